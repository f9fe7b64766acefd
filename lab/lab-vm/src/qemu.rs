//! The command line of a VM's QEMU.

use std::path::Path;

use crate::network::Nic;
use crate::plan::{GuestNode, Plan};

/// Free ports for devices that come while the VM runs, `vnuma0` and on.
const FREE_PORTS: usize = 2;

/// What costs seconds under emulation: mitigations, self-tests of cryptography, a second zeroing of memory, and a look
/// for root buses that ACPI does not name, which in a guest is 16000 exits (pcibios_fixup_peer_bridges(),
/// arch/x86/pci/legacy.c). The server has the same.
const KERNEL_ECONOMY: &str = "mitigations=off cryptomgr.notests init_on_alloc=0 pci=lastbus=0";

/// Where the files of a VM are.
pub struct Files<'a> {
    /// Boot file.
    pub kernel: &'a Path,
    /// Initial RAM disk.
    pub initrd: &'a Path,
    /// Root disk.
    pub root: &'a Path,
    /// The VM's directory.
    pub directory: &'a Path,
    /// More words for the kernel.
    pub append: &'a str,
}

/// The options of the machine itself, in groups that make readable lines.
pub fn machine(name: &str, plan: &Plan) -> Vec<Vec<String>> {
    let most_vcpus = plan.nodes.iter().map(|node| node.vcpus.len() + node.spare.len()).sum::<usize>();
    let (vcpus, sockets, cores) = (plan.vcpus, most_vcpus / plan.cores, plan.cores);
    let memory: usize = plan.nodes.iter().map(|node| node.memory_mib).sum();
    let most = match plan.pluggable_mib {
        0 => String::new(),
        // Each device is aligned to 1 GiB at most.
        mib => format!(",maxmem={}M", memory + plan.nodes.len() * (mib + 1024)),
    };
    let machine = if plan.numa { "q35" } else { "q35,memory-backend=ram0" };
    let mut lines: Vec<String> = vec![
        format!("-name {name},debug-threads=on"),
        format!("-machine {machine} -accel kvm -cpu host"),
        // With one socket per vCPU siblings and caches never contradict a vCPU's node, whichever it is.
        format!(
            "-smp {vcpus},maxcpus={most_vcpus},sockets={sockets},cores={cores},threads=1 -m {memory}M{most}"
        ),
    ];
    for (number, node) in plan.nodes.iter().enumerate() {
        let bind = node.home.as_ref().map(|home| format!(",host-nodes={},policy=bind", home.node));
        let size = node.memory_mib;
        let bind = bind.unwrap_or_default();
        lines.push(format!("-object memory-backend-ram,id=ram{number},size={size}M,prealloc=off{bind}"));
    }
    if plan.numa {
        lines.extend(numa(plan));
    }
    if plan.pluggable_mib > 0 {
        lines.extend(
            plan.nodes.iter().enumerate().map(|(number, node)| pluggable(number, node, plan.pluggable_mib)),
        );
    }
    for port in 0..FREE_PORTS {
        lines.push(format!(
            "-device pcie-root-port,id=vnuma{port},bus=pcie.0,chassis={},slot={port}",
            port + 1
        ));
    }
    words(&lines)
}

/// Memory that can be plugged into a node while the VM runs.
fn pluggable(number: usize, node: &GuestNode, mib: usize) -> String {
    let bind = node.home.as_ref().map(|home| format!(",host-nodes={},policy=bind", home.node));
    format!(
        "-object memory-backend-ram,id=pluggable{number},size={mib}M,prealloc=off,reserve=off{} \
         -device virtio-mem-pci,bus=pcie.0,id=vmem{number},memdev=pluggable{number},node={number},requested-size=0,\
         modern-pio-notify=on",
        bind.unwrap_or_default()
    )
}

/// The options of devices that are passed through. Their ids are `device0` and on.
pub fn passed_through(devices: &[String]) -> Vec<Vec<String>> {
    let option = |(number, address): (usize, &String)| {
        let slot = FREE_PORTS + number;
        format!(
            "-device pcie-root-port,id=passed{number},bus=pcie.0,chassis={},slot={slot} \
             -device vfio-pci,host={address},id=device{number},bus=passed{number}",
            slot + 1
        )
    };
    words(&devices.iter().enumerate().map(option).collect::<Vec<_>>())
}

/// The options of what every VM of the lab has: disk, console, agent, monitors.
pub fn surroundings(cid: u32, files: &Files<'_>, nic: Option<&Nic>) -> Vec<Vec<String>> {
    let Files { kernel, initrd, root, directory, append } = files;
    let path = |file: &str| directory.join(file).display().to_string();
    let mut lines = vec![
        "-nodefaults -no-user-config -display none -no-reboot".into(),
        format!("-drive if=none,id=root,file={},format=raw,readonly=on,file.locking=off", root.display()),
        // Queues are notified by an I/O port: after memory was plugged in, KVM has to emulate a notification by
        // MMIO, and gave the VM up instead when the last event in the guest was an exception, such as the page
        // fault that reads the disk. TCG leaves that event in EXITINTINFO, marked as not valid; presumably KVM
        // takes its type for an event that is being delivered.
        "-device virtio-blk-pci,bus=pcie.0,drive=root,modern-pio-notify=on".into(),
        format!("-device vhost-vsock-pci,bus=pcie.0,guest-cid={cid},modern-pio-notify=on"),
        format!("-chardev file,id=console,path={} -serial chardev:console", path("console.log")),
        format!("-qmp unix:{},server=on,wait=off", path("qmp.sock")),
        format!("-qmp unix:{},server=on,wait=off", path("ctl.sock")),
        // -S: the vCPU threads are pinned before they run.
        format!("-pidfile {} -S", path("pid")),
        format!("-kernel {} -initrd {}", kernel.display(), initrd.display()),
    ];
    let mut address = String::new();
    if let Some(nic) = nic {
        let Nic { tap, mac, .. } = nic;
        lines.push(format!("-netdev tap,id=lan,ifname={tap},script=no,downscript=no"));
        // By an I/O port, as above.
        let device = "virtio-net-pci,bus=pcie.0,netdev=lan,romfile=,modern-pio-notify=on";
        lines.push(format!("-device {device},mac={mac}"));
        address = format!(" vnuma.address={}", nic.address);
    }
    let mut groups = words(&lines);
    groups.push(vec![
        "-append".into(),
        format!("console=ttyS0 quiet panic=-1 {KERNEL_ECONOMY} vnuma.role=guest{address} {append}")
            .trim_end()
            .to_owned(),
    ]);
    groups
}

/// No path of the lab has a blank.
fn words(lines: &[String]) -> Vec<Vec<String>> {
    lines.iter().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
}

fn numa(plan: &Plan) -> Vec<String> {
    let mut lines = Vec::new();
    for (number, node) in plan.nodes.iter().enumerate() {
        let mut line = format!("-numa node,nodeid={number},memdev=ram{number}");
        for vcpu in node.vcpus.iter().chain(&node.spare).step_by(plan.cores) {
            let socket = vcpu / plan.cores;
            line.push_str(&format!(" -numa cpu,node-id={number},socket-id={socket}"));
        }
        lines.push(line);
    }
    for (from, row) in plan.distances.iter().enumerate() {
        let distance = |(to, value)| format!("-numa dist,src={from},dst={to},val={value}");
        lines.push(row.iter().enumerate().map(distance).collect::<Vec<_>>().join(" "));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Home;

    fn line(numa: bool, homes: bool) -> String {
        let node = |number: usize| GuestNode {
            memory_mib: 256,
            vcpus: vec![2 * number, 2 * number + 1],
            spare: if numa { vec![4 + number] } else { Vec::new() },
            home: homes.then(|| Home { node: 3 - number, cpus: vec![0] }),
        };
        let nodes = if numa { vec![node(0), node(1)] } else { vec![node(0)] };
        let pluggable_mib = if homes { 256 } else { 0 };
        let vcpus = nodes.iter().map(|node| node.vcpus.len()).sum();
        let distances = vec![vec![10, 21], vec![21, 10]];
        let plan = Plan { nodes, vcpus, numa, cores: 1, pluggable_mib, distances };
        let path = Path::new;
        let files = Files {
            kernel: path("/k"),
            initrd: path("/i"),
            root: path("/dev/vda"),
            directory: path("/run/lab-vm/a"),
            append: if homes { "preempt=full" } else { "" },
        };
        let nic = Nic { tap: "vm7".into(), mac: "52:54:00:77:01:07".into(), address: "10.77.1.7/16".into() };
        let groups = [machine("a", &plan), surroundings(7, &files, homes.then_some(&nic))].concat();
        groups.concat().join(" ")
    }

    #[test]
    fn a_bound_vm_has_its_nodes_at_home() {
        let line = line(true, true);
        for part in [
            "-smp 4,maxcpus=6,sockets=6,cores=1,threads=1 -m 512M,maxmem=3072M ",
            "id=pluggable1,size=256M,prealloc=off,reserve=off,host-nodes=2,policy=bind",
            "id=vmem1,memdev=pluggable1,node=1,requested-size=0,modern-pio-notify=on",
            "id=ram1,size=256M,prealloc=off,host-nodes=2,policy=bind",
            "-numa node,nodeid=1,memdev=ram1 -numa cpu,node-id=1,socket-id=2 -numa cpu,node-id=1,socket-id=3 \
             -numa cpu,node-id=1,socket-id=5",
            "dist,src=0,dst=1,val=21",
            "pcie-root-port,id=vnuma0,",
            "guest-cid=7",
            "-netdev tap,id=lan,ifname=vm7,",
            "mac=52:54:00:77:01:07",
            "vnuma.role=guest vnuma.address=10.77.1.7/16 preempt=full",
            "unix:/run/lab-vm/a/qmp.sock,server=on,wait=off",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
    }

    #[test]
    fn a_socket_of_several_cores_is_on_one_node() {
        let node = |number: usize| GuestNode {
            memory_mib: 256,
            vcpus: if number == 0 { vec![0, 1, 4, 5] } else { vec![2, 3, 6, 7] },
            spare: Vec::new(),
            home: None,
        };
        let distances = vec![vec![10, 21], vec![21, 10]];
        let nodes = vec![node(0), node(1)];
        let plan = Plan { nodes, vcpus: 8, numa: true, cores: 2, pluggable_mib: 0, distances };
        let line = machine("a", &plan).concat().join(" ");
        for part in [
            "-smp 8,maxcpus=8,sockets=4,cores=2,threads=1",
            "memdev=ram1 -numa cpu,node-id=1,socket-id=1 -numa cpu,node-id=1,socket-id=3 -numa dist",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
    }

    #[test]
    fn devices_have_ports_of_their_own() {
        let devices = ["0000:81:00.0", "0000:82:00.1"].map(str::to_owned);
        let line = passed_through(&devices).concat().join(" ");
        assert!(line.contains("id=passed1,bus=pcie.0,chassis=4,slot=3"), "{line}");
        assert!(line.contains("vfio-pci,host=0000:82:00.1,id=device1,bus=passed1"), "{line}");
    }

    #[test]
    fn an_unbound_vm_has_no_policy_and_a_uma_vm_no_nodes() {
        assert!(!line(true, false).contains("vmem") && !line(true, false).contains("maxmem"));
        assert!(!line(true, false).contains("policy") && !line(true, false).contains("netdev"));
        let uma = line(false, false);
        assert!(
            !uma.contains("-numa") && uma.contains("memory-backend=ram0") && uma.contains("id=ram0,"),
            "{uma}"
        );
    }
}
