//! A domain with a running load migrates from one libvirt to another and back: by `vnumactl migrate`, with post-copy, and by virsh. The
//! server stands for two hosts: the second libvirt has directories and a name of its own, and the homes of the guest nodes are the
//! other way round there. On its arrival the guest is told, and pins of the other host are gone. A migration that fails or is
//! cancelled leaves the domain as it was. The domain's QEMU sends the channel's device, so that any tool migrates and saves it attached.

use crate::{
    guest::{check, check_kernel_log},
    libvirt::{self, DEVICES, DOMAIN},
    manual::{Manual, Place},
    migrate::{Host, Load, NAME, Watched},
    virsh::{CONFIGURATION, CPUS, Libvirt},
};
use anyhow::{Context, Result, bail, ensure};
use std::{fs, os::unix::fs::PermissionsExt, process::Command};
use vnuma_scenario::{HANG_LIMIT, Nodes, Process, Vm, output, wait_for};

/// What libvirt finds below `/` on the second host is here.
const ROOT: &str = "/run/host-b";
/// Directories of libvirt.
const OWN: [&str; 5] =
    ["/etc/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt", "/run/libvirt"];
const LOGS: &str = "/var/log/libvirt/qemu";
/// Both hosts have it. libvirt takes none of 127.0.0.0/8.
const ADDRESS: &str = "192.0.2.1";
const UUID: &str = "6f3ae8a6-5c0c-4f66-9c7f-0a5f7d3c1b2e";

pub(crate) const HOSTS: [Host; 2] = [
    Host { lab_name: "web-a", cid: 93, port: 0, directory: "/run/vnuma-a", homes: [0, 1] },
    Host { lab_name: "web-b", cid: 94, port: 0, directory: "/run/vnuma-b", homes: [1, 0] },
];

/// Connections to the libvirts, and where they keep files of domains that run.
const URIS: [&str; 2] = ["qemu:///system", "qemu+unix:///system?socket=/run/host-b/run/libvirt/libvirt-sock"];
const STATES: [&str; 2] = ["/run/libvirt/qemu", "/run/host-b/run/libvirt/qemu"];
/// The first one as others see it.
const URI_OF_FIRST: &str = "qemu+unix:///system?socket=/run/host-a/libvirt-sock";

/// CPUs that the operator lets vCPUs run on, and those of the second node among them.
const OPERATORS: &str = "1-3";
const SECOND: &str = "2-3";

/// Where the domain is saved.
const IMAGE: &str = "/run/web.save";

/// So slow, MiB/s, that something can be done in the middle.
const SLOW: &str = "2";
const FAST: &str = "1000";

/// The other host in docs/libvirt.md.
const OTHER: &str = "qemu+ssh://other/system";

/// The option of docs/libvirt.md by which any tool migrates the domain.
const OPTION: &str = "<qemu:arg value='-global'/><qemu:arg value='ivshmem-doorbell.master=on'/>";

/// The commands of docs/libvirt.md: a migration by vnumad, one by virsh of a domain that is not attached, and one of a domain that is.
struct Commands {
    by_vnumad: Vec<(Place, String)>,
    by_virsh: Vec<(Place, String)>,
    attached: Vec<(Place, String)>,
}

impl Commands {
    fn read() -> Result<Self> {
        let manual = Manual::new("docs/libvirt.md", include_str!("../../../docs/libvirt.md"));
        let mut by_vnumad = manual.commands();
        ensure!(by_vnumad.len() == 5, "docs/libvirt.md has other commands: {by_vnumad:?}");
        let mut by_virsh = by_vnumad.split_off(1);
        let attached = by_virsh.split_off(3);
        Ok(Self { by_vnumad, by_virsh, attached })
    }
}

/// Runs a command as it stands there, on the host where the domain is or on the other one.
fn play((place, command): &(Place, String), at: usize) -> Result<String> {
    println!("docs/libvirt.md: {command}");
    let uri = uri_for(at);
    let words: Vec<&str> =
        command.split_whitespace().map(|word| if word == OTHER { uri } else { word }).collect();
    let host = match place {
        Place::Host => at,
        Place::Other => 1 - at,
        Place::Guest => bail!("{command}: not a command of a host"),
    };
    match words.split_first() {
        Some((&"vnumactl", words)) => Ok(HOSTS[host].ask(words)?.to_string()),
        Some((&"virsh", words)) => virsh(host, words),
        _ => bail!("{command}: neither vnumactl nor virsh"),
    }
}

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    let server = Server::start()?;
    let vm = server.begin()?;
    let Server { vnumads: [vnumad_a, vnumad_b], libvirts } = server;
    let load = Load::start(&vm)?;

    let commands = Commands::read()?;
    let vm = there(vm, &load, &nodes, &commands.by_vnumad)?;
    let vm = back_by_virsh(vm, &load, &nodes, &commands.by_virsh)?;
    let vm = attached(vm, &load, &nodes, &commands.attached)?;
    let vm = saved(vm, &nodes)?;
    let vm = with_post_copy(vm, &load, &nodes)?;
    stays(&vm, &nodes)?;
    let vnumad_b = stays_without_vnumad(&vm, &nodes, vnumad_b)?;
    let (vm, vnumad_a) = to_nobodys_host(vm, &load, &nodes, vnumad_a)?;
    drop((vm, vnumad_a, vnumad_b, libvirts));
    Ok(())
}

/// What stands for both hosts, in the order in which it ends.
pub(crate) struct Server {
    vnumads: [Process; 2],
    libvirts: (Libvirt, Process),
}

impl Server {
    pub(crate) fn start() -> Result<Self> {
        output("ip", &["address", "add", &format!("{ADDRESS}/32"), "dev", "lo"])?;
        let more = format!("migration_host = \"{ADDRESS}\"\n{DEVICES}");
        write_hook("/etc/libvirt/hooks", 0)?;
        let libvirts = (Libvirt::start(&more)?, start_second(&more)?);
        Ok(Self { vnumads: [start_vnumad(0)?, start_vnumad(1)?], libvirts })
    }

    /// A domain on the first host, attached.
    pub(crate) fn begin(&self) -> Result<Vm> {
        let domain = DOMAIN.replace("ARGUMENTS", &format!("ARGUMENTS{OPTION}"));
        let vm = libvirt::create_from(&domain, NAME, HOSTS[0].lab_name, HOSTS[0].cid)?;
        HOSTS[0].begin(&vm)?;
        Ok(vm)
    }
}

/// Where a host finds the libvirt of the other one.
pub(crate) fn uri_for(host: usize) -> &'static str {
    [URIS[1], URI_OF_FIRST][host]
}

/// How fast a domain migrates from a host: `slow`, so that it is not over before the guest goes on where it goes to.
pub(crate) fn set_speed(host: usize, slow: bool) -> Result<()> {
    virsh(host, &["migrate-setspeed", NAME, if slow { "8" } else { FAST }]).map(drop)
}

/// The domain that runs on a host.
pub(crate) fn running(host: usize) -> Result<Vm> {
    let path = format!("{}/{NAME}.pid", STATES[host]);
    let pid = fs::read_to_string(&path).with_context(|| path.clone())?;
    Vm::started(HOSTS[host].lab_name, pid.trim().parse().context(path)?)
}

/// Has libvirt change the domain that comes: what the lab adds to the command line, the homes of its guest nodes, and vnumad's directory,
/// which two hosts have in the same place.
fn write_hook(directory: &str, host: usize) -> Result<()> {
    let (to, from) = (&HOSTS[host], &HOSTS[1 - host]);
    let home = |node: usize| format!("s/\\(cellid='{node}'.*nodeset='\\)[0-9]*/\\1{}/", to.homes[node]);
    let script = format!(
        "#!/bin/sh\n[ \"$2\" = migrate ] || exit 0\nexec sed \"s/guest-cid={}/guest-cid={}/; s#{}/#{}/#g; s#{}/#{}/#g; {}; {}\"\n",
        from.cid,
        to.cid,
        from.lab_directory().display(),
        to.lab_directory().display(),
        from.directory,
        to.directory,
        home(0),
        home(1)
    );
    fs::create_dir_all(directory).with_context(|| directory.to_owned())?;
    let path = format!("{directory}/qemu");
    fs::write(&path, script).with_context(|| path.clone())?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).context(path)
}

/// A libvirtd as that of another host.
fn start_second(more: &str) -> Result<Process> {
    let own = |path: &str| format!("{ROOT}{path}");
    for path in OWN {
        fs::create_dir_all(own(path)).with_context(|| own(path))?;
    }
    fs::create_dir_all(own(LOGS)).context(LOGS)?;
    // What libvirt knows of QEMU takes it a while to find out.
    output("cp", &["-a", "/var/cache/libvirt/.", &own("/var/cache/libvirt")])?;
    let settings = format!("{CONFIGURATION}{more}stdio_handler = \"file\"\ncgroup_controllers = []\n");
    fs::write(own("/etc/libvirt/qemu.conf"), settings).context("qemu.conf")?;
    fs::write(own("/etc/libvirt/libvirtd.conf"), format!("host_uuid = \"{UUID}\"\n"))
        .context("libvirtd.conf")?;
    write_hook(&own("/etc/libvirt/hooks"), 1)?;
    // Where the second one finds the first.
    fs::create_dir_all("/run/host-a").context("/run/host-a")?;
    output("mount", &["--bind", "/run/libvirt", "/run/host-a"])?;
    let binds = OWN.map(|path| format!("mount --bind {} {path}\n", own(path))).concat();
    let script = format!(
        "set -e\nhostname host-b\n{binds}exec taskset --cpu-list {CPUS} libvirtd --pid-file {ROOT}/libvirtd.pid"
    );
    let child = Command::new("unshare").args(["--mount", "--uts", "sh", "-c", &script]).spawn();
    let daemon = Process(child.context("libvirtd")?);
    wait_for("the second libvirt to answer", HANG_LIMIT, || Ok(virsh(1, &["version"]).is_ok()))?;
    Ok(daemon)
}

fn start_vnumad(host: usize) -> Result<Process> {
    let (uri, state, sockets) = (URIS[host], STATES[host], HOSTS[host].path("libvirt"));
    HOSTS[host].start_vnumad_with(&format!(
        "[libvirt]\nuris = [{uri:?}]\nstate_directories = [{state:?}]\nsocket_directory = {sockets:?}\n"
    ))
}

/// What virsh of a host prints.
pub(crate) fn virsh(host: usize, words: &[&str]) -> Result<String> {
    output("virsh", &[&["--quiet", "--connect", URIS[host]], words].concat())
}

/// What libvirt says that a vCPU is pinned to.
fn pin(host: usize, vcpu: &str) -> Result<String> {
    let pins = virsh(host, &["vcpupin", NAME, "--live"])?;
    let line = pins.lines().find(|line| line.split_whitespace().next() == Some(vcpu));
    let pin = line.and_then(|line| line.split_whitespace().nth(1));
    pin.map(str::to_owned).with_context(|| format!("no pin of vCPU {vcpu}: {pins}"))
}

/// Has vnumad pin vCPU 0 to the second node.
fn pin_by_vnumad(host: usize) -> Result<()> {
    HOSTS[host].ask(&["move", NAME, "--vcpu", "0", "--node", "1"])?;
    ensure!(pin(host, "0")? == SECOND, "libvirt has not pinned vCPU 0: {}", pin(host, "0")?);
    Ok(())
}

/// The domain is at its new host, whole, told, and goes on; and it is no more where it was.
fn arrived(to: usize, load: &Load, nodes: &Nodes) -> Result<Vm> {
    let (from, host) = (&HOSTS[1 - to], &HOSTS[to]);
    from.wait_until("the domain to be forgotten where it was", |vm| vm.is_none())?;
    host.wait_until_told()?;
    ensure!(pin(to, "0")? == OPERATORS, "a pin of the other host is here: {}", pin(to, "0")?);
    let vm = running(to)?;
    for places in [[0, 1], [1, 1], [1, 0]] {
        host.place(&vm, places, nodes)?;
        host.expect(&vm, places)?;
    }
    load.check(&vm)?;
    check_kernel_log(&vm)?;
    Ok(vm)
}

/// By `vnumactl migrate`, with a pin of vnumad.
fn there(vm: Vm, load: &Load, nodes: &Nodes, commands: &[(Place, String)]) -> Result<Vm> {
    let b = &HOSTS[1];
    Vm::prepare(b.lab_name, b.cid)?;
    pin_by_vnumad(0)?;
    let watched = Watched::start(b)?;
    let done = commands.iter().map(|command| play(command, 0)).collect::<Result<String>>()?;
    ensure!(done.contains("\"state\":\"done\""), "{done}");
    watched.report("by vnumactl migrate")?;
    println!("by vnumactl migrate: {done}");
    let there = arrived(1, load, nodes)?;
    // Its QEMU has ended.
    drop(vm);
    Ok(there)
}

/// By virsh, which takes a pin of vnumad along. It is attached by its operator.
fn back_by_virsh(vm: Vm, load: &Load, nodes: &Nodes, commands: &[(Place, String)]) -> Result<Vm> {
    let [detach, migrate, attach] = commands else { bail!("docs/libvirt.md: {commands:?}") };
    let [a, b] = &HOSTS;
    pin_by_vnumad(1)?;
    Vm::prepare(a.lab_name, a.cid)?;
    match play(detach, 1) {
        // A guest that is busy may let go of the device later than vnumactl waits for it.
        Err(error) if format!("{error:#}").contains("has not released") => {
            b.wait_until("the channel to be unplugged", |vm| vm.is_some_and(|vm| vm["channel"] == "none"))?;
        }
        detached => drop(detached?),
    }
    play(migrate, 1)?;
    a.wait_until("vnumad to find the domain", |vm| vm.is_some_and(|vm| vm["run_state"] == "running"))?;
    wait_for("pins of the other host to be taken back", HANG_LIMIT, || Ok(pin(0, "0")? == OPERATORS))?;
    play(attach, 1)?;
    println!("by virsh: pins of the other host are taken back");
    let back = arrived(0, load, nodes)?;
    drop(vm);
    Ok(back)
}

/// By virsh, with the channel's device: to the other host, and from there to the first one with post-copy.
fn attached(vm: Vm, load: &Load, nodes: &Nodes, commands: &[(Place, String)]) -> Result<Vm> {
    let [migrate] = commands else { bail!("docs/libvirt.md: {commands:?}") };
    let mut vm = vm;
    for to in [1, 0] {
        let (from, host) = (1 - to, &HOSTS[to]);
        ensure!(has_device(from)?, "virsh shows no device with a role");
        Vm::prepare(host.lab_name, host.cid)?;
        let watched = Watched::start(host)?;
        if to == 1 {
            play(migrate, from)?;
        } else {
            set_speed(from, true)?;
            virsh(
                from,
                &[
                    "migrate",
                    "--live",
                    "--p2p",
                    "--postcopy",
                    "--postcopy-after-precopy",
                    NAME,
                    uri_for(from),
                ],
            )?;
        }
        watched.report("by virsh, attached")?;
        // Its QEMU has ended.
        vm = arrived(to, load, nodes)?;
    }
    println!("by virsh: the domain has taken its channel along, also with post-copy");
    Ok(vm)
}

/// Is the channel's device one that libvirt migrates?
fn has_device(host: usize) -> Result<bool> {
    Ok(virsh(host, &["dumpxml", NAME])?.contains("<shmem name='vnuma' role='master'>"))
}

/// Saved while it is attached, and restored on the same host.
fn saved(vm: Vm, nodes: &Nodes) -> Result<Vm> {
    let host = &HOSTS[0];
    virsh(0, &["save", NAME, IMAGE])?;
    host.wait_until("the domain to be forgotten", |vm| vm.is_none())?;
    drop(vm);
    Vm::prepare(host.lab_name, host.cid)?;
    virsh(0, &["restore", IMAGE])?;
    host.wait_until_told()?;
    let vm = running(0)?;
    for places in [[1, 1], [0, 1]] {
        host.place(&vm, places, nodes)?;
        host.expect(&vm, places)?;
    }
    check_kernel_log(&vm)?;
    println!("saved and restored with its channel");
    Ok(vm)
}

fn with_post_copy(vm: Vm, load: &Load, nodes: &Nodes) -> Result<Vm> {
    let [a, b] = &HOSTS;
    Vm::prepare(b.lab_name, b.cid)?;
    set_speed(0, true)?;
    let watched = Watched::start(b)?;
    let done = a.ask(&["migrate", NAME, URIS[1], "--post-copy"])?;
    ensure!(done["state"] == "done", "{done}");
    watched.report("with post-copy")?;
    println!("with post-copy: {done}");
    let there = arrived(1, load, nodes)?;
    drop(vm);
    Ok(there)
}

/// There is no such libvirt; then it is cancelled in the middle. Both times it is attached again, with vnumad's pins.
fn stays(vm: &Vm, nodes: &Nodes) -> Result<()> {
    let host = &HOSTS[1];
    pin_by_vnumad(1)?;
    let nobody = host.ask(&["migrate", NAME, "qemu+unix:///system?socket=/run/nobody"]);
    let nobody =
        nobody.err().map(|error| format!("{error:#}")).context("a migration to nobody has succeeded")?;
    ensure!(nobody.contains("/run/nobody") && nobody.contains("did not migrate"), "{nobody}");
    host.wait_until_told()?;
    ensure!(pin(1, "0")? == SECOND, "the pin was not set again: {}", pin(1, "0")?);
    println!("a migration that fails leaves the domain attached and pinned");

    Vm::prepare(HOSTS[0].lab_name, HOSTS[0].cid)?;
    virsh(1, &["migrate-setspeed", NAME, SLOW])?;
    host.ask(&["migrate", NAME, URI_OF_FIRST, "--no-wait"])?;
    host.wait_until_state("sending")?;
    ensure!(host.listed()?.is_some_and(|vm| vm["channel"] == "none"), "it migrates with its device");
    let cancelled = host.ask(&["migrate", NAME, "--cancel"])?;
    ensure!(cancelled["state"] == "cancelled", "{cancelled}");
    host.wait_until_told()?;
    ensure!(pin(1, "0")? == SECOND, "the pin was not set again: {}", pin(1, "0")?);
    host.place(vm, [0, 1], nodes)?;
    host.expect(vm, [0, 1])?;
    println!("one that is cancelled as well");
    Ok(())
}

/// vnumad is killed in the middle, and libvirt goes on. The next vnumad attaches the domain when somebody has ended that.
fn stays_without_vnumad(vm: &Vm, nodes: &Nodes, vnumad: Process) -> Result<Process> {
    let host = &HOSTS[1];
    host.ask(&["migrate", NAME, URI_OF_FIRST, "--no-wait"])?;
    host.wait_until_state("sending")?;
    // vnumad has asked for that in a thread. libvirt may not know of it yet.
    wait_for("libvirt to have begun the migration", HANG_LIMIT, || {
        Ok(!virsh(1, &["domjobinfo", NAME])?.contains("None"))
    })?;
    drop(vnumad);
    let vnumad = start_vnumad(1)?;
    host.wait_until("the next vnumad to know that the domain is to be attached", |vm| {
        vm.is_some_and(|vm| vm["attach_on_arrival"] == true && vm["channel"] == "none")
    })?;
    virsh(1, &["domjobabort", NAME])?;
    virsh(1, &["migrate-setspeed", NAME, FAST])?;
    host.wait_until_told()?;
    host.place(vm, [1, 0], nodes)?;
    host.expect(vm, [1, 0])?;
    println!("vnumad was killed in the middle: the next one attached the domain that stayed");
    Ok(vnumad)
}

/// No vnumad is where the domain goes to: the guest keeps what it has. The one that is started there later takes it over.
fn to_nobodys_host(vm: Vm, load: &Load, nodes: &Nodes, vnumad: Process) -> Result<(Vm, Process)> {
    let [a, b] = &HOSTS;
    // As it was placed last.
    let has = [1, 0].map(|place: usize| u64::from(b.homes[place]));
    check(&vm, &has)?;
    drop(vnumad);
    Vm::prepare(a.lab_name, a.cid)?;
    let done = b.ask(&["migrate", NAME, URI_OF_FIRST])?;
    ensure!(done["state"] == "done", "{done}");
    let there = running(0)?;
    check(&there, &has).context("where there is no vnumad")?;
    load.check(&there)?;
    println!("where there is no vnumad the guest keeps what it has");
    let vnumad = start_vnumad(0)?;
    let there = arrived(0, load, nodes).map(|vm| (vm, vnumad))?;
    drop(vm);
    Ok(there)
}
