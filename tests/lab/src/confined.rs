//! The packaged vnumad, in its unit's sandbox, and a domain of libvirt that AppArmor confines, with a user of its own for its QEMU: found,
//! attached, moved by libvirt's pin, told and detached with the package's rule. Without it, it is refused with what to do, and that does
//! it. The unit is stopped and killed while it attaches the domain.

use crate::guest::{check, check_kernel_log, detach, taskset, wait_until_listed, wait_until_seen};
use crate::libvirt;
use crate::packages::{CHECKER, MODULE, UNIT, files, install, property, status};
use crate::virsh::{CPUS, virsh};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::{process::Stdio, thread::sleep, time::Duration};
use vnuma_scenario::{HANG_LIMIT, Nodes, Process, Vm, output, vnumactl, vnumactl_command, wait_for};

const NAME: &str = "db";
const CID: u32 = 78;
/// The lab's image has no programs of AppArmor. Those of Debian 13 make profiles that do not ask for connections to sockets with a name;
/// those of AppArmor 5 do, on Linux 6.17 and newer.
const APPARMOR: &str = "/root/packages/apparmor";
const NEXT: &str = "/root/packages/apparmor-next";
/// vnumad's configuration, and how setup names the connection there.
const CONFIGURATION: &str = "/etc/vnuma/vnumad.toml";
const NAMED: &str = "\nuris = [\"qemu:///system\"]\n";
/// The package's rule.
const RULE: &str = "/etc/apparmor.d/abstractions/libvirt-qemu.d/vnuma";
/// What profiles of domains include, and the line by which they have that rule. Those of Debian 12 lack this line.
const ABSTRACTION: &str = "/etc/apparmor.d/abstractions/libvirt-qemu";
const DIRECTORY: &str = "include if exists <abstractions/libvirt-qemu.d>";
/// The operator's own file. The lab's domains have more than libvirt knows of: what is named on QEMU's command line only, and lab-vm's folder.
const OPERATORS: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";
const RULES: &str = "/dev/vda rk,\n/dev/vhost-vsock rw,\n/run/lab-vm/** rwk,\n/run/lab/** rk,\nsignal (receive) peer=unconfined,\n";
/// QEMU's user is libvirt's default for it. libvirt gives that user what the domain's XML names, and the lab the rest.
const FOR_QEMU: &str = "namespaces = []\n";
const USER: &str = "libvirt-qemu";
const DEVICES: [(&str, &str); 2] = [("o+r", "/dev/vda"), ("o+rw", "/dev/vhost-vsock")];
/// The option by which QEMU sends the channel's device.
const OPTION: &str = "<qemu:arg value='-global'/><qemu:arg value='ivshmem-doorbell.master=on'/>";
/// The unit is stopped or killed so long after it was asked to attach.
const MOMENTS_MS: [u64; 4] = [0, 5, 30, 120];
/// The child has seen by then that QEMU has read everything.
const LOOKS: Duration = Duration::from_millis(2500);
/// So often QEMU may have done that before it is stopped.
const ATTEMPTS: u32 = 10;
/// libvirt's own unit, and the CPUs of the lab that it may use.
const LIBVIRTD: &str = "libvirtd.service";
const DROP_INS: &str = "/run/systemd/system/libvirtd.service.d";

/// AppArmor's programs, whose package loads the profiles of all others that are there.
pub fn equip() -> Result<()> {
    let folder = Path::new(OPERATORS).parent().context("a folder")?;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    fs::write(OPERATORS, RULES).context(OPERATORS)?;
    install(APPARMOR, &["apparmor"])
}

/// libvirtd, confined: only then does it confine QEMUs.
fn libvirtd() -> Result<()> {
    fs::write("/etc/libvirt/qemu.conf", format!("{FOR_QEMU}{}", libvirt::DEVICES)).context("qemu.conf")?;
    DEVICES.into_iter().try_for_each(|(mode, path)| output("chmod", &[mode, path]).map(drop))?;
    fs::create_dir_all(DROP_INS).context(DROP_INS)?;
    fs::write(format!("{DROP_INS}/lab.conf"), format!("[Service]\nCPUAffinity={CPUS}\n"))
        .context(DROP_INS)?;
    output("systemctl", &["daemon-reload"])?;
    output("systemctl", &["restart", LIBVIRTD]).with_context(|| status(LIBVIRTD))?;
    wait_for("libvirt to answer", HANG_LIMIT, || Ok(virsh(&["version"]).is_ok()))
        .with_context(|| status(LIBVIRTD))?;
    let label = label(&property(LIBVIRTD, "MainPID")?)?;
    ensure!(label == "libvirtd (enforce)\n", "libvirtd is {label:?}");
    Ok(())
}

/// AppArmor's, of a process.
fn label(pid: &str) -> Result<String> {
    let path = format!("/proc/{pid}/attr/apparmor/current");
    fs::read_to_string(&path).context(path)
}

/// `before`: files of other packages than vnuma's. This adds some to them.
pub fn domain(nodes: &Nodes, before: &mut BTreeSet<PathBuf>) -> Result<()> {
    libvirtd()?;
    // docs/first-host.md has this, too.
    println!("{}", output("vnumactl", &["setup", "--apply"])?);
    let named = fs::read_to_string(CONFIGURATION).context(CONFIGURATION)?;
    ensure!(named.contains(NAMED) && !unused()?, "libvirt is not named: {named}");
    attached(nodes).context("AppArmor as Debian has it")?;
    not_asked(nodes)?;
    let known = files()?;
    install(NEXT, &["libapparmor1", "apparmor"])?;
    before.extend(files()?.difference(&known).cloned());
    libvirtd()?;
    attached(nodes).context("AppArmor that asks for sockets")?;
    without(nodes)?;
    output("systemctl", &["stop", LIBVIRTD])?;
    Ok(())
}

/// With what the package has.
fn attached(nodes: &Nodes) -> Result<()> {
    let vm = start(nodes)?;
    vnumactl(&["attach", NAME]).with_context(|| status(UNIT))?;
    used(&vm)?;
    for (how, moment_ms) in ["stop", "kill"].into_iter().flat_map(|how| MOMENTS_MS.map(|ms| (how, ms))) {
        ended_in_mid_attach(&vm, how, moment_ms).with_context(|| format!("{how}, {moment_ms} ms"))?;
    }
    killed_before_qemu_reads(&vm)?;
    end(vm)?;
    let vm = start_from(&libvirt::DOMAIN.replace("ARGUMENTS", &format!("ARGUMENTS{OPTION}")), nodes)?;
    vnumactl(&["attach", NAME]).with_context(|| status(UNIT))?;
    let xml = virsh(&["dumpxml", NAME])?;
    ensure!(
        xml.contains("role='master'") && xml.contains("/run/vnuma/libvirt/channel.sock"),
        "not over the socket of all domains: {xml}"
    );
    used(&vm)?;
    end(vm)?;
    let denied = denied()?;
    ensure!(denied.is_empty(), "AppArmor has denied something of vnuma's:\n{}", denied.join("\n"));
    let version = output("dpkg-query", &["--show", "--showformat=${Version}", "apparmor"])?;
    println!(
        "sandbox, AppArmor {version}: a confined domain was attached, moved by libvirt's pin, told and detached"
    );
    Ok(())
}

/// vnumad's unit ends while it attaches the domain, and the child that answers QEMU does not: the guest goes on, and the next vnumad attaches
/// it or has it attached.
fn ended_in_mid_attach(vm: &Vm, how: &str, moment_ms: u64) -> Result<()> {
    let before = property(UNIT, "MainPID")?;
    let attach = vnumactl_command(&["attach", NAME]).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let attach = Process(attach.context("vnumactl attach")?);
    sleep(Duration::from_millis(moment_ms));
    match how {
        "stop" => output("systemctl", &["stop", UNIT])?,
        // As after a crash. It is started again at once by its unit.
        _ => output("systemctl", &["kill", "--signal=KILL", "--kill-whom=main", UNIT])?,
    };
    vm.exec(&["true"]).context("the guest stands still")?;
    drop(attach);
    runs_again(&before)?;
    // Whoever has it attached below does not count.
    wait_until_listed(NAME).with_context(|| status(UNIT))?;
    let came = libvirt::has_channel_of(NAME)?;
    served_by_the_next(vm)?;
    println!("{how} of the unit {moment_ms} ms after it was asked to attach: the device came: {came}");
    Ok(())
}

/// While the unit is started again after it was killed, a start of it fails, or it is taken for the one that was killed.
fn runs_again(before: &str) -> Result<()> {
    wait_for("the unit to run again", HANG_LIMIT, || {
        let started = output("systemctl", &["start", UNIT]).is_ok();
        Ok(started && !["0", before].contains(&property(UNIT, "MainPID")?.as_str()))
    })
    .with_context(|| status(UNIT))
}

/// The next vnumad has taken the channel over, or attaches the domain when it is asked to. The guest is told, and detached.
fn served_by_the_next(vm: &Vm) -> Result<()> {
    wait_until_listed(NAME).with_context(|| status(UNIT))?;
    match vnumactl(&["attach", NAME]) {
        Err(error) if !format!("{error:#}").contains("attached") => return Err(error),
        _ => {}
    }
    wait_until_seen(NAME, &[(1, 1, "true"), (1, 1, "true")])?;
    detach(vm)
}

/// vnumad is killed while its child waits until QEMU, which is stopped, has read the messages. The child outlives it, and the next vnumad
/// starts beside the child. The device comes when QEMU goes on. Were the child ended with the unit, it would not come.
fn killed_before_qemu_reads(vm: &Vm) -> Result<()> {
    let (qemu, main) = (Pid::from_raw(vm.pid), property(UNIT, "MainPID")?);
    let processes = format!("/sys/fs/cgroup{}/cgroup.procs", property(UNIT, "ControlGroup")?);
    let all = || -> Result<BTreeSet<String>> {
        let all = fs::read_to_string(&processes).with_context(|| processes.clone())?;
        Ok(all.lines().map(str::to_owned).collect())
    };
    // vnumad, and the process that forks its children, which ends with it.
    let before = all()?;
    let child = || -> Result<Option<String>> { Ok(all()?.difference(&before).next().cloned()) };
    let mut caught = None;
    for _ in 0..ATTEMPTS {
        let attach = vnumactl_command(&["attach", NAME]).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut attach = Process(attach.context("vnumactl attach")?);
        while child()?.is_none() && attach.0.try_wait()?.is_none() {
            sleep(Duration::from_millis(1));
        }
        kill(qemu, Signal::SIGSTOP).context("QEMU")?;
        // It ends where QEMU had read everything before, and looks for that once a second in the end.
        sleep(LOOKS);
        if let Some(child) = child()? {
            caught = Some((child, attach));
            break;
        }
        kill(qemu, Signal::SIGCONT).context("QEMU")?;
        attach.0.wait()?;
        detach(vm)?;
    }
    let (child, attach) = caught.context("QEMU had read everything before it was stopped, each time")?;
    output("systemctl", &["kill", "--signal=KILL", "--kill-whom=main", UNIT])?;
    let starts = runs_again(&main);
    let outlives = Path::new(&format!("/proc/{child}/status")).exists();
    kill(qemu, Signal::SIGCONT).context("QEMU")?;
    starts?;
    ensure!(outlives, "the child has ended with the unit");
    drop(attach);
    wait_for("the device to come", HANG_LIMIT, || libvirt::has_channel_of(NAME))?;
    vm.exec(&["true"]).context("the guest stands still")?;
    served_by_the_next(vm)?;
    println!("vnumad was killed before QEMU had read everything: the device came all the same");
    Ok(())
}

/// Debian's profiles do not ask for it.
fn not_asked(nodes: &Nodes) -> Result<()> {
    let packaged = fs::read_to_string(RULE).context(RULE)?;
    fs::remove_file(RULE).context(RULE)?;
    let vm = start(nodes)?;
    ensure!(!named("doctor")?, "doctor says that AppArmor is in the way");
    vnumactl(&["attach", NAME]).context("AppArmor asks for the rule")?;
    end(vm)?;
    println!("AppArmor as Debian has it: a confined domain is attached without the rule, too");
    fs::write(RULE, packaged).context(RULE)
}

/// Without it, and where profiles do not include it.
fn without(nodes: &Nodes) -> Result<()> {
    let packaged = fs::read_to_string(RULE).context(RULE)?;
    fs::remove_file(RULE).context(RULE)?;
    refused(nodes).context("the package's rule was removed")?;
    fs::write(RULE, packaged).context(RULE)?;
    let abstraction = fs::read_to_string(ABSTRACTION).context(ABSTRACTION)?;
    let older = abstraction.replacen(DIRECTORY, "", 1);
    ensure!(older != abstraction, "{ABSTRACTION} has no `{DIRECTORY}`");
    fs::write(ABSTRACTION, older).context(ABSTRACTION)?;
    refused(nodes).context("profiles include the operator's file only")?;
    ensure!(fs::read_to_string(OPERATORS)?.ends_with(".sock rw,\n"), "not in the operator's file");
    fs::write(ABSTRACTION, abstraction).context(ABSTRACTION)
}

/// What AppArmor has denied on this server, of vnuma's.
fn denied() -> Result<Vec<String>> {
    let log = output("dmesg", &[])?;
    let lines = log.lines().filter(|line| line.contains("apparmor=\"DENIED\""));
    lines.clone().for_each(|line| println!("{line}"));
    Ok(lines.filter(|line| line.contains("vnuma")).map(str::to_owned).collect())
}

/// A domain that AppArmor confines, with its guest's vCPUs on both nodes.
fn start(nodes: &Nodes) -> Result<Vm> {
    start_from(libvirt::DOMAIN, nodes)
}

/// The same of a domain that is described otherwise.
fn start_from(domain: &str, nodes: &Nodes) -> Result<Vm> {
    let vm = libvirt::create_from(domain, NAME, NAME, CID)?;
    let owner = output("stat", &["--format=%U", &format!("/proc/{}", vm.pid)])?;
    ensure!(owner.trim() == USER, "QEMU runs as {owner}");
    let label = label(&vm.pid.to_string())?;
    ensure!(label.starts_with("libvirt-") && label.ends_with(" (enforce)\n"), "QEMU is {label:?}");
    vm.put(MODULE, "/root/vnuma.ko")?;
    vm.put(CHECKER, CHECKER)?;
    vm.exec(&["insmod", "/root/vnuma.ko"])?;
    (0..2).try_for_each(|vcpu| taskset(&vm, vcpu, vcpu as u32, nodes))?;
    wait_until_listed(NAME).with_context(|| status(UNIT))?;
    Ok(vm)
}

fn used(vm: &Vm) -> Result<()> {
    wait_until_seen(NAME, &[(0, 0, "true"), (1, 1, "true")])?;
    vnumactl(&["move", NAME, "--vcpu", "0", "--node", "1"])?;
    wait_until_seen(NAME, &[(1, 1, "true"), (1, 1, "true")])?;
    check(vm, &[1, 1])?;
    let pins = virsh(&["vcpupin", NAME, "--live"])?;
    ensure!(pins.lines().any(|line| line.split_whitespace().eq(["0", "2-3"])), "not by libvirt: {pins}");
    detach(vm)
}

fn end(vm: Vm) -> Result<()> {
    check_kernel_log(&vm)?;
    virsh(&["destroy", NAME])?;
    drop(vm);
    Ok(())
}

/// Without the rule, and with profiles that ask for it: the error and doctor lead to `vnumactl setup`, which has it done while the domain runs.
fn refused(nodes: &Nodes) -> Result<()> {
    let before = denied()?.len();
    let vm = start(nodes)?;
    let manual = include_str!("../../../docs/libvirt.md");
    let command =
        manual.lines().find_map(|line| line.strip_prefix("    # vnumactl ")).context("no command")?;
    println!("docs/libvirt.md: vnumactl {command}");
    let words: Vec<&str> = command.split_whitespace().collect();
    let error = vnumactl(&words).err().context("AppArmor lets it through without the rule")?;
    let error = format!("{error:#}");
    println!("{error}");
    ensure!(
        error.contains("AppArmor does not let its QEMU connect") && error.contains("vnumactl setup"),
        "the error leads nowhere"
    );
    let denied = denied()?.split_off(before);
    ensure!(denied.iter().any(|line| line.contains("/run/vnuma/libvirt/")), "not by AppArmor: {denied:?}");
    vm.exec(&["true"]).context("the guest stands still")?;
    ensure!(named("doctor")? && named("setup")?, "neither doctor nor setup names AppArmor");
    println!("{}", output("vnumactl", &["setup", "--apply"])?);
    ensure!(!named("doctor")? && !named("setup")?, "it is not done");
    vnumactl(&["attach", NAME]).with_context(|| status(UNIT))?;
    used(&vm)?;
    end(vm)?;
    println!("AppArmor without the rule: refused with what to do, which did it");
    Ok(())
}

/// Purged: the operator's file is as it was.
pub fn purged() -> Result<()> {
    let text = fs::read_to_string(OPERATORS).context(OPERATORS)?;
    ensure!(text == RULES, "{OPERATORS} has more than the operator's lines: {text:?}");
    Ok(())
}

/// Does `vnumactl setup` say that vnumad does not use the libvirt that is there?
fn unused() -> Result<bool> {
    let shown = vnumactl(&["setup"])?;
    let checks = shown["checks"].as_array().with_context(|| shown.to_string())?;
    Ok(checks.iter().any(|check| check["check"] == "libvirt" && check["level"] != "best"))
}

/// Does this command say that AppArmor is in the way?
fn named(command: &str) -> Result<bool> {
    let shown = vnumactl(&[command])?;
    let checks = shown.get("checks").unwrap_or(&shown);
    let checks = checks.as_array().with_context(|| format!("vnumactl {command}: {shown}"))?;
    Ok(checks.iter().any(|check| check["check"] == "apparmor" && check["level"] != "best"))
}
