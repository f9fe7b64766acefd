//! The Debian packages on a server with systemd: installed by apt, upgraded while a VM runs, removed and purged.
//!
//! What docs/first-host.md and docs/first-guest.md say is done by their own commands ([`manual`](crate::manual)).

use crate::confined;
use crate::guest::{check, check_kernel_log, seen, taskset, wait_until_seen};
use crate::manual::{Manual, Place};
use anyhow::{Context, Result, bail, ensure};
use nix::libc;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use vnuma_process::{Class, read_class};
use vnuma_scenario::{HANG_LIMIT, Nodes, Process, Vm, output, vnumactl, wait_for};

/// CPUs of the server that VMs have.
const OF_VMS: &str = "1-3";
/// Packages of a lower version, which the manuals' commands install, and of this one; and what DKMS has made of this one's.
const BEFORE: &str = "/root/packages/before";
const NOW: &str = "/root/packages/now";
pub(crate) const MODULE: &str = "/root/packages/vnuma.ko";
pub(crate) const CHECKER: &str = "/root/vnuma-check";
/// Of the manuals.
const VM: &str = "web";
pub(crate) const UNIT: &str = "vnumad.service";

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    // A peer of some benchmark that systemd starts, and that moves the memory of VMs, bound or not.
    output("systemctl", &["stop", "numad.service"])?;
    confined::equip()?;
    let mut before = files()?;
    install(BEFORE, &["vnuma-guest"])?;
    let vm = first_host()?;
    first_guest(&vm)?;
    follows(&vm, &nodes)?;
    upgraded(&vm, &nodes)?;
    as_without_a_sandbox(&vm, &nodes)?;
    scheduled(&vm, &nodes)?;
    stuck(&vm, &nodes)?;
    full_run(&vm, &nodes)?;
    agent()?;
    confined::domain(&nodes, &mut before)?;
    println!("{}", output("systemd-analyze", &["security", "--no-pager", UNIT])?);
    gone(vm, &before)
}

/// The part of them with a domain that AppArmor confines.
pub fn confined() -> Result<()> {
    confined::equip()?;
    install(NOW, &["vnuma-host"])?;
    confined::domain(&Nodes::read()?, &mut BTreeSet::new())
}

fn apt(words: &[&str]) -> Result<String> {
    let options = ["--yes", "--option", "Dpkg::Use-Pty=0"];
    let mut command = Command::new("apt-get");
    command.args(options).args(words).env("DEBIAN_FRONTEND", "noninteractive");
    let done = command.output().context("apt-get")?;
    let text = [done.stdout, done.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    ensure!(done.status.success(), "apt-get {}: {}\n{text}", words.join(" "), done.status);
    // A script of a package that fails without dpkg's knowledge says so.
    ensure!(!text.contains("Failed to") && !text.contains("rror:"), "apt-get {}:\n{text}", words.join(" "));
    Ok(text)
}

fn package(folder: &str, name: &str) -> Result<String> {
    let prefix = format!("{name}_");
    let entries = fs::read_dir(folder).context(folder.to_owned())?.flatten();
    let found = entries
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)));
    Ok(found.with_context(|| format!("{folder} has no {name}"))?.display().to_string())
}

pub(crate) fn install(folder: &str, names: &[&str]) -> Result<()> {
    let paths = names.iter().map(|name| package(folder, name)).collect::<Result<Vec<_>>>()?;
    let words: Vec<&str> = ["install"].into_iter().chain(paths.iter().map(String::as_str)).collect();
    apt(&words).map(drop)
}

/// A property of a unit, as systemd shows it.
pub fn property(unit: &str, name: &str) -> Result<String> {
    Ok(output("systemctl", &["show", "--value", "--property", name, unit])?.trim().to_owned())
}

fn started() -> Result<()> {
    for unit in [UNIT, "vnuma-guest.service"] {
        ensure!(property(unit, "ActiveState")? == "active", "{}", status(unit));
        ensure!(property(unit, "UnitFileState")? == "enabled", "{unit} is not enabled");
    }
    ensure!(property("scx_vnuma.service", "ActiveState")? == "inactive", "{}", status("scx_vnuma.service"));
    let text = status(UNIT);
    ensure!(text.contains("serving /run/vnuma/vnumad.sock"), "no status of vnumad's own: {text}");
    // It answers from the moment on that it says so: apt is done, and nothing is waited for here.
    ensure!(vnumactl(&["list"])? == Value::Array(Vec::new()), "VMs without a VM");
    println!("installed: vnumad and vnuma-guest are active and enabled, scx_vnuma is not");
    Ok(())
}

pub fn status(unit: &str) -> String {
    // Its exit status is that of the unit.
    let shown = Command::new("systemctl").args(["status", "--no-pager", "--full", unit]).output();
    shown.map_or_else(|error| error.to_string(), |shown| String::from_utf8_lossy(&shown.stdout).into_owned())
}

/// Everything that docs/first-host.md says, in its order.
fn first_host() -> Result<Vm> {
    let manual = Manual::new("docs/first-host.md", include_str!("../../../docs/first-host.md"));
    let mut vm = None;
    for (place, command) in manual.commands() {
        ensure!(place == Place::Host, "{command}: not a command of the host");
        if command.starts_with("qemu-system-x86_64 ") {
            // The lab starts VMs that its agent is in, with the same options for nodes, socket and port.
            let needed =
                ["-numa node,", "-qmp unix:/run/vnuma/qmp/web.sock,", "-device pcie-root-port,id=vnuma0"];
            ensure!(needed.iter().all(|part| command.contains(part)), "{command}");
            let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "384M"].map(str::to_owned);
            vm = Some(Vm::start(VM, &shape)?);
            vm.as_ref().context("started")?.await_found()?;
        } else {
            manual.play(&command, |command| shell(BEFORE, command))?;
        }
        if command.starts_with("apt install ") {
            started()?;
        }
    }
    vm.context("docs/first-host.md starts no VM")
}

/// The same of docs/first-guest.md. To compile the module in an emulated guest takes too long: it is the one that DKMS has
/// made of the package in the same tree, and is put where DKMS puts it.
fn first_guest(vm: &Vm) -> Result<()> {
    let manual = Manual::new("docs/first-guest.md", include_str!("../../../docs/first-guest.md"));
    vm.put(CHECKER, CHECKER)?;
    for (place, command) in manual.commands() {
        match place {
            Place::Host => manual.play(&command, |command| shell(BEFORE, command))?,
            Place::Guest if command.starts_with("apt install ") => {
                ensure!(command.contains("./vnuma-guest-dkms_*_all.deb"), "{command}");
                install_module(vm)?;
            }
            Place::Guest => manual.play(&command, |command| vm.exec(&["sh", "-c", command]))?,
            Place::Other => bail!("{command}: there is no other host"),
        }
    }
    vm.await_driver()
}

/// What apt and DKMS do in a guest, but for compiling; and udev, which the lab's guests do not start.
fn install_module(vm: &Vm) -> Result<()> {
    let rules = "/root/packages/rules";
    output("dpkg-deb", &["--extract", &package(NOW, "vnuma-guest-dkms")?, rules])?;
    let rule = ["usr/lib/udev/rules.d", "lib/udev/rules.d"].map(|folder| Path::new(rules).join(folder));
    let rule = rule.iter().find_map(|folder| fs::read_dir(folder).ok()?.flatten().next());
    let rule = rule.context("vnuma-guest-dkms has no udev rule")?.path();
    vm.put(MODULE, "/root/vnuma.ko")?;
    vm.put(&rule.display().to_string(), "/etc/udev/rules.d/60-vnuma.rules")?;
    let script = "set -e; folder=/lib/modules/$(uname -r)/updates/dkms; mkdir -p $folder; mv /root/vnuma.ko $folder; \
                  depmod; /usr/lib/systemd/systemd-udevd --daemon; udevadm control --ping";
    vm.exec(&["sh", "-c", script]).map(drop)
}

fn shell(folder: &str, command: &str) -> Result<String> {
    output("env", &["--chdir", folder, "DEBIAN_FRONTEND=noninteractive", "sh", "-c", command])
}

/// A vCPU goes to the other node and back, and the guest's kernel follows.
fn follows(vm: &Vm, nodes: &Nodes) -> Result<()> {
    // vnumad may have started a moment ago.
    vm.await_found()?;
    for node in [1, 0] {
        taskset(vm, 0, node, nodes)?;
        let guest = u64::from(node);
        wait_until_seen(VM, &[(guest, guest, "true"), (1, 1, "true")]).with_context(|| status(UNIT))?;
        check(vm, &[guest, 1])?;
    }
    Ok(())
}

fn upgraded(vm: &Vm, nodes: &Nodes) -> Result<()> {
    let (pid, publications) = (property(UNIT, "MainPID")?, published()?);
    install(NOW, &["vnuma-host", "vnuma-guest"])?;
    let version = output("dpkg-query", &["-W", "-f=${Version}", "vnuma-host"])?;
    ensure!(!version.contains('~'), "still {version}");
    ensure!(property(UNIT, "MainPID")? != pid, "vnumad was not started anew");
    follows(vm, nodes)?;
    println!(
        "upgraded to {version}: the guest is served by the next vnumad ({publications} publications before)"
    );
    Ok(())
}

fn published() -> Result<u64> {
    let vm = vnumactl(&["show", VM])?;
    vm["publication"]["publications"].as_u64().with_context(|| format!("no publications: {vm}"))
}

/// What doctor says of host and VM, without what differs from moment to moment.
fn capabilities() -> Result<BTreeSet<String>> {
    let checks = vnumactl(&["doctor"])?;
    let checks = checks.as_array().context("vnumactl doctor: not an array")?;
    Ok(checks.iter().map(|check| format!("{check}")).collect())
}

/// The sandbox takes nothing away: vnumad can do as much as one that root starts.
fn as_without_a_sandbox(vm: &Vm, nodes: &Nodes) -> Result<()> {
    let observe = || -> Result<(BTreeSet<String>, Value)> {
        vnumactl(&["policy", VM, "--set", "observe"])?;
        wait_for("a period of the policy", HANG_LIMIT, || {
            let shown = vnumactl(&["policy", VM])?;
            Ok(shown["vcpus"]
                .as_array()
                .is_some_and(|vcpus| vcpus.iter().all(|vcpu| !vcpu["quality"].is_null())))
        })?;
        wait_until_seen(VM, &[(0, 0, "true"), (1, 1, "true")])?;
        let found = (capabilities()?, vnumactl(&["memory", VM])?["problem"].clone());
        vnumactl(&["policy", VM, "--set", "off"])?;
        Ok(found)
    };
    let confined = observe()?;
    damon_is_writable()?;
    output("systemctl", &["stop", UNIT])?;
    let mut free = Command::new("vnumad");
    let free = Process(free.spawn().context("vnumad")?);
    wait_for("vnumad to answer", HANG_LIMIT, || Ok(vnumactl(&["list"]).is_ok()))?;
    vm.await_found()?;
    let unconfined = observe()?;
    drop(free);
    output("systemctl", &["start", UNIT])?;
    follows(vm, nodes)?;
    let lost: Vec<_> = confined.0.symmetric_difference(&unconfined.0).collect();
    ensure!(
        lost.is_empty() && confined.1 == unconfined.1,
        "the sandbox changes what vnumad can do: {lost:#?}"
    );
    println!("sandbox: doctor says the same with and without it ({} checks)", confined.0.len());
    Ok(())
}

/// The sandbox lets vnumad give vCPUs to scx_vnuma, which the package has as well.
fn scheduled(vm: &Vm, nodes: &Nodes) -> Result<()> {
    const SCHEDULER: &str = "scx_vnuma.service";
    let all_have = |class: Class| {
        let has = |tid: &i32| read_class(*tid).map(|found| found == class);
        Ok(vm.threads.iter().map(has).collect::<Result<Vec<_>, _>>()?.into_iter().all(|has| has))
    };
    // The only CPU of node 0 that VMs have pins a vCPU, which policies leave alone then.
    for tid in &vm.threads {
        output("taskset", &["-p", "-c", OF_VMS, &tid.to_string()])?;
    }
    output("systemctl", &["start", SCHEDULER])?;
    vnumactl(&["policy", VM, "--set", "vprobe"])?;
    wait_for("scx_vnuma to have the vCPUs", HANG_LIMIT, || all_have(Class::Ext))
        .with_context(|| format!("vnumactl policy: {:#?}", vnumactl(&["policy", VM])))
        .with_context(|| status(SCHEDULER))
        .with_context(|| status(UNIT))?;
    vnumactl(&["policy", VM, "--set", "off"])?;
    wait_for("the vCPUs to be given back", HANG_LIMIT, || all_have(Class::Other))?;
    output("systemctl", &["stop", SCHEDULER])?;
    // Where the checks that follow have them.
    (0..).zip([0, 1]).try_for_each(|(vcpu, node)| taskset(vm, vcpu, node, nodes))?;
    println!("sandbox: scx_vnuma has had {} vCPUs", vm.threads.len());
    Ok(())
}

/// vnumad sees DAMON's files, and may write to them.
fn damon_is_writable() -> Result<()> {
    let pid = output("systemctl", &["show", "--property=MainPID", "--value", UNIT])?;
    let write = "echo 0 > /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds";
    output("nsenter", &["--mount", "--target", pid.trim(), "sh", "-c", write])
        .context("DAMON's files")
        .map(drop)
}

/// The loop of vnumad stands still: systemd ends it and starts another one, which serves the guest.
fn stuck(vm: &Vm, nodes: &Nodes) -> Result<()> {
    let pid = property(UNIT, "MainPID")?;
    let core = thread(&pid, "core")?;
    for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: neither request reads or writes memory of this process.
        let done = unsafe { libc::ptrace(request, core.as_raw(), nothing, nothing) };
        ensure!(done == 0, "ptrace: {}", std::io::Error::last_os_error());
    }
    waitpid(core, Some(WaitPidFlag::__WALL)).context("the core's thread")?;
    wait_for("systemd to start vnumad anew", HANG_LIMIT, || {
        // The thread is ours to bury before its process can go.
        let _ = waitpid(core, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG));
        Ok(property(UNIT, "NRestarts")? == "1" && property(UNIT, "ActiveState")? == "active")
    })
    .with_context(|| status(UNIT))?;
    ensure!(property(UNIT, "MainPID")? != pid, "the same process");
    let log = output("journalctl", &["--no-pager", "--unit", UNIT])?;
    ensure!(log.contains("Watchdog timeout"), "not by its watchdog:\n{log}");
    follows(vm, nodes)?;
    println!("a loop that stood still: ended by systemd, and the next vnumad serves the guest");
    Ok(())
}

/// vnumad is killed while /run has neither room nor inodes, and for 20 s more. What cannot start is started again, and the next vnumad has
/// the records.
fn full_run(vm: &Vm, nodes: &Nodes) -> Result<()> {
    let before = property(UNIT, "MainPID")?;
    let used = |what: &str| -> Result<u64> {
        let text = output("df", &["--block-size=1K", &format!("--output={what}"), "/run"])?;
        text.lines().last().and_then(|line| line.trim().parse().ok()).with_context(|| text.clone())
    };
    let remount = |kib: u64, inodes: u64| {
        let options = format!("remount,size={kib}k,nr_inodes={inodes}");
        output("mount", &["-o", &options, "/run"]).map(drop)
    };
    let (kib, inodes) = (used("used")?, used("iused")?);
    remount(kib.max(4), inodes)?;
    output("systemctl", &["kill", "--kill-whom=main", "--signal=KILL", UNIT])?;
    std::thread::sleep(Duration::from_secs(20));
    remount(kib + (64 << 10), inodes + 100_000)?;
    let serves = || Ok(property(UNIT, "ActiveState")? == "active" && property(UNIT, "MainPID")? != before);
    wait_for("vnumad to serve again", HANG_LIMIT, serves).with_context(|| status(UNIT))?;
    follows(vm, nodes)?;
    println!("a full /run: vnumad was started until there was room, and serves the guest");
    Ok(())
}

fn thread(pid: &str, name: &str) -> Result<Pid> {
    let tasks = format!("/proc/{pid}/task");
    for task in fs::read_dir(&tasks).with_context(|| tasks.clone())?.flatten() {
        if fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name) {
            return Ok(Pid::from_raw(task.file_name().to_string_lossy().parse()?));
        }
    }
    bail!("{tasks}: no thread {name}")
}

fn agent() -> Result<()> {
    ensure!(property("vnuma-guest.service", "ActiveState")? == "active", "{}", status("vnuma-guest.service"));
    output("vnuma-guest", &["list"]).map(drop)
}

/// Removed while the VM runs, which goes on with what it was told; and purged without it.
fn gone(vm: Vm, before: &BTreeSet<PathBuf>) -> Result<()> {
    let told: Vec<u64> = seen(VM)?.iter().filter_map(|vcpu| vcpu.guest_node).collect();
    apt(&["remove", "vnuma-host", "vnuma-guest"])?;
    ensure!(!Path::new("/run/vnuma/vnumad.sock").exists(), "vnumad runs on");
    check(&vm, &told).context("after vnumad was removed")?;
    check_kernel_log(&vm)?;
    drop(vm);
    apt(&["purge", "vnuma-host", "vnuma-guest"])?;
    output("systemctl", &["daemon-reload"])?;
    confined::purged()?;
    let left: Vec<_> = files()?.difference(before).cloned().collect();
    ensure!(left.is_empty(), "purged, and still there: {left:#?}");
    ensure!(
        output("systemctl", &["list-units", "--all", "--no-legend", "vnum*", "scx_*"])?.trim().is_empty()
    );
    println!("purged: nothing is left");
    Ok(())
}

/// Files and folders of the server, but for what dpkg, apt and systemd keep of every package.
pub(crate) fn files() -> Result<BTreeSet<PathBuf>> {
    const TOPS: [&str; 6] = ["/etc", "/usr", "/var", "/run", "/opt", "/srv"];
    const OTHERS: [&str; 18] = [
        // Of libvirt, which is another package: its files, and profiles of its domains.
        "/etc/apparmor.d/libvirt",
        "/etc/libvirt",
        "/run/libvirt",
        "/run/libvirtd.pid",
        "/run/virtlogd.pid",
        "/var/lib/libvirt",
        "/var/lib/dpkg",
        "/var/lib/apt",
        "/var/cache",
        "/var/log",
        "/var/lib/systemd",
        "/run/systemd",
        "/run/lab",
        "/run/lab-vm",
        "/run/udev",
        "/run/log",
        "/run/lock",
        "/var/tmp",
    ];
    let mut found = BTreeSet::new();
    let mut folders: Vec<PathBuf> = TOPS.map(PathBuf::from).into();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if OTHERS.iter().any(|other| path == Path::new(other)) {
                continue;
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(path.clone());
            }
            found.insert(path);
        }
    }
    ensure!(found.len() > 1000, "only {} files on this server", found.len());
    Ok(found)
}
