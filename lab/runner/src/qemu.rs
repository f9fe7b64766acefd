//! The command line of the server's QEMU.

use std::path::{Path, PathBuf};
use std::process::Command;

use vnuma_lab_agent::{MONITOR_PORT, PORT_PREFIX, PORTS};

use crate::network::{self, Member};
use crate::profile::{Device, DeviceModel, Profile};
use crate::tsc;

/// The program in the image.
pub(crate) const QEMU: &str = "qemu-system-x86_64";

/// systemd starts no terminals, loads no graphics, asks no questions and says nothing on the console but errors.
const SYSTEMD_WORDS: &str = " vnuma.init=systemd systemd.unit=lab.target systemd.getty_auto=no systemd.firstboot=no \
                             systemd.show_status=no systemd.mask=getty.target systemd.mask=modprobe@drm.service \
                             systemd.mask=e2scrub_reap.service";

/// Socket of the monitor in the directory of a run.
pub(crate) const QMP_SOCKET: &str = "qmp.sock";
/// Socket of the second monitor of a guest, for a program that drives it.
pub(crate) const CONTROL_SOCKET: &str = "ctl.sock";

/// Free ports of a guest for devices that come while it runs, `vnuma0` and on, as lab-vm has them.
const GUEST_PORTS: usize = 2;

/// What the kernel's command line leaves out because it costs seconds under emulation: mitigations, self-tests of
/// cryptography, a second zeroing of memory, a look for root buses that ACPI does not name. lab-vm has the same for its
/// guests.
const KERNEL_ECONOMY: &str = "mitigations=off cryptomgr.notests init_on_alloc=0 pci=lastbus=0";

/// First bus number of the first node's PCI host bridge; each may have this many buses.
const FIRST_BUS: usize = 0x20;
const BUSES_PER_NODE: usize = 8;

/// The network of all cards with virtual functions: that of the servers, if there are several. Others have one each.
const IGB_HUB: usize = network::HUB;

/// What runs the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// Software emulation.
    Tcg,
    /// The machine's own KVM.
    Kvm,
}

/// What process 1 of a server is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Init {
    /// The lab's own, which is there in a moment.
    #[default]
    Fast,
    /// systemd, for what needs its units or its control groups.
    Systemd,
}

/// What a guest without a server around it is to be.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Its kernel, with all that it needs built in.
    pub vmlinux: PathBuf,
    /// NUMA nodes.
    pub nodes: usize,
    /// vCPUs, dealt to the nodes in order.
    pub vcpus: usize,
    /// Those of a socket.
    pub cores: usize,
    /// Memory of all nodes together.
    pub memory_mib: usize,
    /// What can be plugged into each node.
    pub pluggable_mib: usize,
    /// Words for the kernel.
    pub append: String,
}

impl Default for Guest {
    fn default() -> Self {
        let vmlinux = PathBuf::new();
        Self {
            vmlinux,
            nodes: 2,
            vcpus: 4,
            cores: 1,
            memory_mib: 2048,
            pluggable_mib: 0,
            append: String::new(),
        }
    }
}

/// The files that a machine is started from.
pub(crate) struct Files<'a> {
    /// The image's root file system, which QEMU itself is taken from.
    pub tree: &'a Path,
    pub kernel: &'a Path,
    pub initramfs: &'a Path,
    pub root_disk: &'a Path,
    /// Directory for `console.log` and the sockets `agent0`, `agent1` ..., `qmp.sock`.
    pub directory: &'a Path,
}

/// The command that starts the server.
pub(crate) fn server(
    profile: &Profile,
    accel: Accel,
    files: &Files<'_>,
    init: Init,
    member: Option<&Member>,
) -> Command {
    let mut command = base(accel, files.tree);
    let mut memory = format!("{}M", profile.memory_mib());
    if let Some(hotplug) = &profile.hotplug {
        let most = profile.memory_mib() + hotplug.memory_mib;
        memory.push_str(&format!(",slots={},maxmem={most}M", hotplug.memory_slots));
    }
    // The kernel's own interrupt controller cannot remap interrupts.
    let split = if profile.iommu && accel == Accel::Kvm { ",kernel-irqchip=split" } else { "" };
    command.args(["-machine", &format!("q35{split}"), "-m", &memory]);
    if profile.iommu {
        // Before all other devices, which are behind it. Linux takes it on a CPU of AMD, too; DMA of devices behind the PCI host
        // bridge of a node is lost with QEMU's amd-iommu.
        command.args(["-device", "intel-iommu,intremap=on"]);
    }
    command.args(cpus(profile, accel));
    command.args(numa(profile));
    command.args(devices(profile));
    command.args(surroundings(files));
    command.args(monitors(profile, files.directory));
    let mut words = "server".to_owned();
    if init == Init::Systemd {
        words.push_str(SYSTEMD_WORDS);
    }
    words.push_str(&pages_1g(profile));
    words.push_str(&nohz_full(profile));
    if let Some(member) = member {
        command.args(member.arguments());
        words.push_str(&member.words());
    }
    boot(&mut command, files.kernel, files.initramfs, &words);
    command
}

/// The console, the root disk, and the ports of the agent.
fn surroundings(files: &Files<'_>) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    let serial = escaped(&files.directory.join("console.log"));
    option("-chardev", format!("file,id=console,path={serial}"));
    option("-serial", "chardev:console".to_owned());
    let disk = escaped(files.root_disk);
    option("-drive", format!("if=none,id=root,file={disk},format=raw,readonly=on,file.locking=off"));
    option("-device", "virtio-blk-pci,bus=pcie.0,drive=root".to_owned());
    option("-device", "virtio-serial-pci,id=ports,bus=pcie.0".to_owned());
    for number in 0..PORTS {
        let socket = escaped(&files.directory.join(format!("agent{number}")));
        option("-chardev", format!("socket,id=agent{number},path={socket},server=on,wait=off"));
        let port = format!("virtserialport,bus=ports.0,chardev=agent{number},name={PORT_PREFIX}{number}");
        option("-device", port);
    }
    arguments
}

/// The command that starts a guest without a server around it.
pub(crate) fn guest(guest: &Guest, files: &Files<'_>) -> Command {
    let mut command = base(Accel::Tcg, files.tree);
    let most = match guest.pluggable_mib {
        0 => String::new(),
        // Each device is aligned to 1 GiB at most.
        mib => format!(",maxmem={}M", guest.memory_mib + guest.nodes * (mib + 1024)),
    };
    command.args(["-machine", "q35", "-m", &format!("{}M{most}", guest.memory_mib)]);
    let Guest { vcpus, cores, .. } = guest;
    command.args(["-smp", &format!("{vcpus},sockets={},cores={cores},threads=1", vcpus / cores)]);
    command.args(guest_nodes(guest));
    command.args(surroundings(files));
    for port in 0..GUEST_PORTS {
        let place = format!("bus=pcie.0,chassis={},slot={port}", port + 1);
        command.args(["-device", &format!("pcie-root-port,id=vnuma{port},{place}")]);
    }
    for socket in [QMP_SOCKET, CONTROL_SOCKET] {
        command
            .args(["-qmp", &format!("unix:{},server=on,wait=off", escaped(&files.directory.join(socket)))]);
    }
    // The role is that of a machine whose agent has ports.
    boot(&mut command, files.kernel, files.initramfs, &format!("server {}", guest.append));
    command
}

/// The nodes of a guest, and what can be plugged into them: `vmem0` and on.
fn guest_nodes(guest: &Guest) -> Vec<String> {
    let Guest { nodes, vcpus, cores, .. } = guest;
    let mut arguments = Vec::new();
    let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    for node in 0..*nodes {
        option("-object", format!("memory-backend-ram,id=ram{node},size={}M", guest.memory_mib / nodes));
        option("-numa", format!("node,nodeid={node},memdev=ram{node}"));
        for socket in (node * vcpus / nodes..(node + 1) * vcpus / nodes).step_by(*cores) {
            option("-numa", format!("cpu,node-id={node},socket-id={}", socket / cores));
        }
        if guest.pluggable_mib > 0 {
            let size = guest.pluggable_mib;
            option("-object", format!("memory-backend-ram,id=pluggable{node},size={size}M,reserve=off"));
            let memory = format!("memdev=pluggable{node},node={node},requested-size=0");
            option("-device", format!("virtio-mem-pci,bus=pcie.0,id=vmem{node},{memory}"));
        }
    }
    for (from, to) in (0..*nodes).flat_map(|from| (0..*nodes).map(move |to| (from, to))) {
        let distance = if from == to { 10 } else { 20 + from.abs_diff(to) };
        option("-numa", format!("dist,src={from},dst={to},val={distance}"));
    }
    arguments
}

/// The monitor for this machine and, in a server that can grow, one for programs in it: QEMU connects a virtio port to a
/// socket of its own. A client of a monitor can run commands here (`migrate exec:`), so other servers have no such port.
fn monitors(profile: &Profile, directory: &Path) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    option("-qmp", format!("unix:{},server=on,wait=off", escaped(&directory.join(QMP_SOCKET))));
    if profile.hotplug.is_some() {
        let socket = escaped(&directory.join("qmp-inside.sock"));
        option("-qmp", format!("unix:{socket},server=on,wait=off"));
        option("-chardev", format!("socket,id=inside,path={socket}"));
        option("-device", format!("virtserialport,bus=ports.0,chardev=inside,name={MONITOR_PORT}"));
    }
    arguments
}

/// The command for the trial of an accelerator: boots, reports on its standard output and powers off.
pub(crate) fn trial(accel: Accel, tree: &Path, kernel: &Path, initramfs: &Path) -> Command {
    let mut command = base(accel, tree);
    command.args(["-machine", "q35", "-m", "512M", "-smp", "2", "-serial", "stdio"]);
    boot(&mut command, kernel, initramfs, "trial");
    command
}

/// QEMU of the image, run with the image's libraries on this machine's kernel: the same everywhere, and at least
/// 8.1. Older ones, Debian 12's among them, can translate code while another CPU patches it and keep what was there
/// before; Linux patches itself all the time and then dies of a stale breakpoint ("Oops: int3").
fn base(accel: Accel, tree: &Path) -> Command {
    let libraries = tree.join("usr/lib/x86_64-linux-gnu");
    let mut command = Command::new(tree.join("usr/lib64/ld-linux-x86-64.so.2"));
    command
        .arg("--library-path")
        .arg(&libraries)
        .arg("--argv0")
        .arg(QEMU)
        .arg(tree.join("usr/bin").join(QEMU));
    command.arg("-L").arg(tree.join("usr/share/seabios")).arg("-L").arg(tree.join("usr/share/qemu"));
    command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    match accel {
        // EPYC: 6.12 and 7.3 fault early on TCG's "max" model.
        Accel::Tcg => command.args(["-accel", "tcg,thread=multi", "-cpu", "EPYC"]),
        Accel::Kvm => command.args(["-accel", "kvm", "-cpu", "host"]),
    };
    command
}

/// Words for the kernel, which keeps such pages.
fn pages_1g(profile: &Profile) -> String {
    if profile.pages_1g_per_node == 0 {
        return String::new();
    }
    let of = |node| format!("{node}:{}", profile.pages_1g_per_node);
    let nodes: Vec<String> = (0..profile.nodes).map(of).collect();
    format!(" hugepagesz=1G hugepages={}", nodes.join(","))
}

/// As before, of CPUs.
fn nohz_full(profile: &Profile) -> String {
    let cpus: Vec<String> = profile.nohz_full.iter().map(usize::to_string).collect();
    if cpus.is_empty() { String::new() } else { format!(" nohz_full={}", cpus.join(",")) }
}

fn boot(command: &mut Command, kernel: &Path, initramfs: &Path, role: &str) {
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs);
    // panic=-1 reboots at once, which -no-reboot turns into the end of QEMU. TCG's TSC is the machine's own, and so
    // the same on all CPUs, but Linux does not trust it on a server of several sockets; the HPET that it
    // would take instead costs a device access per look at the clock.
    let words = "console=ttyS0 quiet panic=-1 tsc=reliable";
    let khz = tsc::frequency_khz();
    let line = format!("{words} tsc_early_khz={khz} {KERNEL_ECONOMY} vnuma.role={role}");
    command.args(["-append", &line]);
}

/// In QEMU's option syntax a comma within a value is doubled.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// The CPUs of the server at boot. A socket per node: Linux warns about siblings on different nodes otherwise. QEMU
/// fills sockets in order; where some are not to be full, each CPU but the first is given as a device.
fn cpus(profile: &Profile, accel: Accel) -> Vec<String> {
    let (nodes, cores) = (profile.nodes, profile.cores_per_socket());
    let most = nodes * cores;
    let threads = if profile.smt { 2 } else { 1 };
    let shape = format!("maxcpus={most},sockets={nodes},cores={},threads={threads}", cores / threads);
    if profile.cpus() == most {
        return vec!["-smp".into(), format!("{most},{shape}")];
    }
    let mut arguments = vec!["-smp".into(), format!("1,{shape}")];
    for (node, &count) in profile.cpus_per_node.iter().enumerate() {
        for core in (0..count).filter(|&core| (node, core) != (0, 0)) {
            let model = cpu_device(accel);
            let device = format!("{model},id=cpu{node}.{core},socket-id={node},core-id={core},thread-id=0");
            arguments.extend(["-device".into(), device]);
        }
    }
    arguments
}

/// The device of a CPU of the model that [`base`] chooses.
fn cpu_device(accel: Accel) -> &'static str {
    match accel {
        Accel::Tcg => "EPYC-x86_64-cpu",
        Accel::Kvm => "host-x86_64-cpu",
    }
}

fn numa(profile: &Profile) -> Vec<String> {
    let mut arguments = Vec::new();
    let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    for (node, &size) in profile.memory_mib_per_node.iter().enumerate() {
        let mut memory = String::new();
        if size > 0 {
            option("-object", format!("memory-backend-ram,id=ram{node},size={size}M"));
            memory = format!(",memdev=ram{node}");
        }
        option("-numa", format!("node,nodeid={node}{memory}"));
        // Without core-id: all of the socket.
        option("-numa", format!("cpu,node-id={node},socket-id={node}"));
    }
    for (from, row) in profile.distances.iter().enumerate() {
        for (to, value) in row.iter().enumerate() {
            option("-numa", format!("dist,src={from},dst={to},val={value}"));
        }
    }
    arguments
}

/// Each device sits on a root port of the PCI host bridge of its node.
fn devices(profile: &Profile) -> Vec<String> {
    let mut arguments = Vec::new();
    let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    for node in 0..profile.nodes {
        if profile.devices.iter().any(|device| device.node == node) {
            let bus = FIRST_BUS + node * BUSES_PER_NODE;
            option("-device", format!("pxb-pcie,id=pxb{node},bus=pcie.0,bus_nr={bus},numa_node={node}"));
        }
    }
    for (index, Device { model, node }) in profile.devices.iter().enumerate() {
        let port = format!("port{index}");
        option("-device", format!("pcie-root-port,id={port},bus=pxb{node},chassis={},slot=0", index + 1));
        let id = format!("device{index}");
        match model {
            DeviceModel::VirtioNet | DeviceModel::E1000e | DeviceModel::Igb => {
                // Cards with virtual functions are in one network.
                let (name, hub) = match model {
                    DeviceModel::VirtioNet => ("virtio-net-pci", index),
                    DeviceModel::Igb => ("igb", IGB_HUB),
                    _ => ("e1000e", index),
                };
                option("-netdev", format!("hubport,id=net{index},hubid={hub}"));
                // No boot ROM: nothing boots from it.
                option("-device", format!("{name},id={id},bus={port},netdev=net{index},romfile="));
            }
            DeviceModel::Nvme => {
                let size = 64 << 20;
                option(
                    "-blockdev",
                    format!("driver=null-co,node-name=disk{index},size={size},read-zeroes=on"),
                );
                // Doorbells are registers, as those of disks that are hardware.
                option(
                    "-device",
                    format!("nvme,id={id},bus={port},drive=disk{index},serial=lab{index},dbcs=off"),
                );
            }
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str) -> String {
        let files = Files {
            tree: Path::new("/tree"),
            kernel: Path::new("/k"),
            initramfs: Path::new("/i"),
            root_disk: Path::new("/a,b/root"),
            directory: Path::new("/run"),
        };
        let command = server(&Profile::load(name).unwrap(), Accel::Tcg, &files, Init::Fast, None);
        command.get_args().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_line_has_the_profile() {
        let line = line("2n4c");
        for part in [
            "-smp 4,maxcpus=4,sockets=2,cores=2,threads=1",
            "-m 4096M",
            "node,nodeid=1,memdev=ram1 -numa cpu,node-id=1,socket-id=1",
            "dist,src=0,dst=1,val=21",
            "pxb-pcie,id=pxb1,bus=pcie.0,bus_nr=40,numa_node=1",
            "nvme,id=device1,bus=port1",
            "file=/a,,b/root,",
            "vnuma.role=server",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(!line.contains("iommu"), "{line}");
    }

    #[test]
    fn a_guest_without_a_server_is_as_lab_vm_has_it() {
        let files = Files {
            tree: Path::new("/tree"),
            kernel: Path::new("/k"),
            initramfs: Path::new("/i"),
            root_disk: Path::new("/root.erofs"),
            directory: Path::new("/run"),
        };
        let asked =
            Guest { cores: 2, pluggable_mib: 512, append: "panic_on_warn=1".into(), ..Guest::default() };
        let command = guest(&asked, &files);
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let line = words.join(" ");
        for part in [
            "-m 2048M,maxmem=5120M",
            "-smp 4,sockets=2,cores=2,threads=1",
            "-object memory-backend-ram,id=ram1,size=1024M -numa node,nodeid=1,memdev=ram1 -numa cpu,node-id=1,socket-id=1",
            "virtio-mem-pci,bus=pcie.0,id=vmem1,memdev=pluggable1,node=1,requested-size=0",
            "pcie-root-port,id=vnuma1,",
            "unix:/run/ctl.sock,",
            "vnuma.role=server panic_on_warn=1",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
    }

    #[test]
    fn pages_of_1_gib_are_kept_at_boot() {
        assert!(line("2n4c-large").contains(" hugepagesz=1G hugepages=0:1,1:1"));
        assert!(!line("2n4c").contains("hugepage"));
    }

    #[test]
    fn cores_have_two_threads_where_the_profile_says_so() {
        assert!(line("2n4c-nohz").contains(" nohz_full=3"));
        assert!(line("2n8c-smt").contains("-smp 8,maxcpus=8,sockets=2,cores=2,threads=2"));
    }

    #[test]
    fn an_iommu_is_before_the_devices_that_are_behind_it() {
        let line = line("2n5c-iommu");
        let devices: Vec<_> = line.match_indices("-device ").map(|(at, _)| &line[at..]).collect();
        assert!(devices[0].starts_with("-device intel-iommu,intremap=on "), "{line}");
    }

    #[test]
    fn cards_with_virtual_functions_share_a_network() {
        let line = line("2n6c-iommu");
        assert_eq!(line.matches("hubid=100").count(), 3, "{line}");
        assert_eq!(line.matches("-device igb,id=").count(), 3, "{line}");
    }

    #[test]
    fn cpus_of_unequal_nodes_are_devices() {
        let line = line("2n5c");
        assert!(line.contains("-smp 1,maxcpus=6,sockets=2,cores=3,threads=1"), "{line}");
        let count = |device: &str| line.matches(device).count();
        assert_eq!(count("-device EPYC-x86_64-cpu,id="), 4);
        assert_eq!([0, 1].map(|node| count(&format!(",socket-id={node},core-id="))), [2, 2]);
        assert!(!line.contains("maxmem") && !line.contains("org.vnuma.lab.qmp"), "{line}");
    }

    #[test]
    fn a_server_that_can_grow_has_slots_and_an_empty_node() {
        let line = line("3n4c-hotplug");
        for part in [
            "-smp 1,maxcpus=9,sockets=3,cores=3,threads=1",
            "-m 3072M,slots=4,maxmem=7168M",
            "-numa node,nodeid=2 -numa cpu,node-id=2,socket-id=2",
            "-chardev socket,id=inside,path=/run/qmp-inside.sock",
            "name=org.vnuma.lab.qmp",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
    }

    #[test]
    fn host_bridges_do_not_share_bus_numbers_nor_leave_the_range() {
        let most = 15;
        assert!(FIRST_BUS + most * BUSES_PER_NODE + BUSES_PER_NODE <= 256);
        // The bridge's own bus and one per root port.
        for name in ["2n4c", "4n8c", "8n16c"] {
            let profile = Profile::load(name).unwrap();
            for node in 0..profile.nodes {
                assert!(profile.devices.iter().filter(|device| device.node == node).count() < BUSES_PER_NODE);
            }
        }
    }
}
