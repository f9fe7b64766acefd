//! Options of QEMU, and a script that pins its threads.

use super::{bridges, elsewhere};
use crate::{capacity::BASE_PAGE_BYTES, placement::Placement};

/// Number of the first chassis. A slot of a root port is known by its chassis, and lower ones are likely to be used by what else
/// the machine has.
const CHASSIS: usize = 128;

/// The options, in groups that make readable lines. No word has a blank.
pub fn options(placement: &Placement) -> Vec<Vec<String>> {
    let (vcpus, memory) = (placement.vcpus(), placement.memory_bytes() >> 20);
    let mut lines = vec![
        format!("-name {},debug-threads=on", placement.name),
        "-machine q35 -accel kvm -cpu host".to_owned(),
        // One socket for each vCPU: siblings and caches then never contradict a vCPU's node, whichever it becomes.
        format!("-smp {vcpus},maxcpus={vcpus},sockets={vcpus},cores=1,threads=1 -m {memory}M"),
    ];
    for node in &placement.guest_nodes {
        let (id, home, size) = (node.id, node.home, node.memory_bytes >> 20);
        let kind = match placement.page_bytes {
            BASE_PAGE_BYTES => format!("memory-backend-ram,id=ram{id},size={size}M"),
            // Huge pages that are lacking are an error at the start, not a guest that is killed later.
            huge => format!(
                "memory-backend-memfd,id=ram{id},size={size}M,hugetlb=on,hugetlbsize={huge},prealloc=on"
            ),
        };
        lines.push(format!("-object {kind},host-nodes={home},policy=bind"));
    }
    lines.extend(nodes(placement));
    lines.push(format!("-device pcie-root-port,id=vnuma0,bus=pcie.0,chassis={},slot=0", CHASSIS - 1));
    lines.extend(devices(placement));
    lines.iter().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
}

fn nodes(placement: &Placement) -> Vec<String> {
    let mut lines = Vec::new();
    for node in &placement.guest_nodes {
        let id = node.id;
        let mut line = format!("-numa node,nodeid={id},memdev=ram{id}");
        for pin in &node.vcpus {
            line.push_str(&format!(" -numa cpu,node-id={id},socket-id={}", pin.vcpu));
        }
        lines.push(line);
    }
    // One node is at the distance 10 from itself anyway.
    for (from, row) in placement.distances.rows().iter().enumerate().filter(|(_, row)| row.len() > 1) {
        let distance = |(to, value)| format!("-numa dist,src={from},dst={to},val={value}");
        lines.push(row.iter().enumerate().map(distance).collect::<Vec<_>>().join(" "));
    }
    lines
}

fn devices(placement: &Placement) -> Vec<String> {
    let mut lines = Vec::new();
    let mut port = 0;
    let mut device = |bus: &str, address: &str| {
        let id = format!("vnuma-port{port}");
        let chassis = CHASSIS + port;
        port += 1;
        format!(
            "-device pcie-root-port,id={id},bus={bus},chassis={chassis},slot=0 -device vfio-pci,host={address},bus={id}"
        )
    };
    for bridge in bridges(placement) {
        let (node, bus) = (bridge.guest_node, bridge.bus);
        lines.push(format!("-device pxb-pcie,id=vnuma-pxb{node},bus=pcie.0,bus_nr={bus},numa_node={node}"));
        let bus = format!("vnuma-pxb{node}");
        lines.extend(bridge.devices.iter().map(|one| device(&bus, &one.address)));
    }
    lines.extend(elsewhere(placement).map(|one| device("pcie.0", &one.address)));
    lines
}

/// A script that pins the threads of a running QEMU: each vCPU to its CPU, all others to
/// [`Placement::emulator_cpus`]. Its argument is the PID.
pub fn pinning(placement: &Placement) -> String {
    let cpus = placement.emulator_cpus();
    let mut script = format!(
        "\
# Pins the threads of QEMU, which cannot do it itself: sh -s PID < SCRIPT
pid=${{1:?the PID of the QEMU of {name}}}
pin() {{
    for name in /proc/$pid/task/*/comm; do
        task=${{name%/comm}}
        [ \"$(cat \"$name\")\" = \"CPU $1/KVM\" ] && taskset -c -p \"$2\" \"${{task##*/}}\" > /dev/null && return
    done
    echo \"process $pid has no thread CPU $1/KVM that can be pinned to CPU $2\" >&2
    exit 1
}}
taskset -a -c -p {cpus} \"$pid\" > /dev/null || exit 1
",
        name = placement.name
    );
    for pin in placement.pins() {
        script.push_str(&format!("pin {} {}\n", pin.vcpu, pin.cpu));
    }
    script
}

/// Both: the script as comments.
pub fn text(placement: &Placement) -> String {
    let options = options(placement).into_iter().map(|words| words.join(" ") + "\n");
    let script = pinning(placement);
    let comments = script.lines().map(|line| format!("# {line}\n"));
    options.chain(comments).collect()
}
