//! VMs, for people.

use crate::table::{Table, or_dash, plain, size};
use vnuma_api::{
    Capability, Daemon, GuestNode, LibvirtConnection, Limited, PlaceSetting, Publication, Replugged, Vcpu,
    VcpuState, Vm, VmDevice,
};

/// One line a VM.
pub fn list(vms: &[Vm]) -> String {
    if vms.is_empty() {
        return "no VMs; vnumad looks for QMP sockets, by default in /run/vnuma/qmp\n".to_owned();
    }
    let mut table =
        Table::new("NAME  >PID  CHANNEL  >NODES  >VCPUS  >TRUE  >APPROXIMATE  >STALE  >UNKNOWN  PROBLEM");
    for vm in vms {
        let count = |state| vm.vcpus.iter().filter(|vcpu| vcpu.state == state).count().to_string();
        table.row([
            plain(&vm.name),
            or_dash(vm.pid),
            vm.channel.to_string(),
            vm.nodes.len().to_string(),
            vm.vcpus.len().to_string(),
            count(VcpuState::True),
            count(VcpuState::Approximate),
            count(VcpuState::Stale),
            count(VcpuState::Unknown),
            vm.problem.as_deref().map(plain).unwrap_or_default(),
        ]);
    }
    table.text(0)
}

/// All of a VM.
pub fn show(vm: &Vm) -> String {
    let mut text = format!("{}: process {}, channel {}\n", plain(&vm.name), or_dash(vm.pid), vm.channel);
    if let Some(problem) = &vm.problem {
        text += &format!("problem: {}\n", plain(problem));
    }
    if let Some(state) = vm.run_state.as_deref().filter(|state| *state != "running") {
        text += &format!("the guest does not run: {}\n", plain(state));
    }
    if vm.attach_on_arrival && !vm.attached {
        text += "it is attached as soon as its guest runs here\n";
    }
    if !vm.described && vm.pid.is_some() {
        text += "not described by QEMU yet: guest nodes are unknown, vCPUs are those that the host kernel shows\n";
    } else if vm.nodes.is_empty() && vm.pid.is_some() {
        text += "a UMA VM: no guest nodes, nothing to publish\n";
    }
    if !vm.nodes.is_empty() {
        text += "\nGuest nodes\n";
        text += &nodes(vm);
    }
    if !vm.vcpus.is_empty() {
        text += "\nvCPUs\n";
        text += &vcpus(&vm.vcpus);
    }
    if !vm.devices.is_empty() {
        text += "\nPassthrough devices\n";
        text += &devices(&vm.devices);
    }
    let publication = &vm.publication;
    if publication.publications > 0 {
        text += &format!(
            "\nPublished {} times, acknowledged {} times; last generation {}, acknowledged {}\n",
            publication.publications,
            publication.acknowledgements,
            or_dash(publication.generation),
            or_dash(publication.acknowledged),
        );
        text += &format!(
            "Not published: {} changes that did not last; deferred by the cap: {}\n",
            publication.suppressed_by_dwell, publication.deferred_by_cap
        );
        text += &driver(publication);
    }
    text
}

/// What the guest reports of its driver.
fn driver(publication: &Publication) -> String {
    let mut text = match (&publication.driver_version, publication.driver_mode) {
        (None, _) => "Driver: none\n".to_owned(),
        (Some(version), None) => format!("Driver: {}, applies nothing\n", plain(version)),
        (Some(version), Some(mode)) => format!("Driver: {}, {mode} mode\n", plain(version)),
    };
    if let Some(refused) = publication.refused {
        text += &format!("Refused: generation {}: {}\n", refused.generation, error_text(refused.errno));
    }
    text
}

/// What an error number means, as the kernel's manual says it.
pub fn error_text(errno: i32) -> String {
    match errno {
        1.. => std::io::Error::from_raw_os_error(errno).to_string().replace("os error", "errno"),
        _ => "no error number was given".to_owned(),
    }
}

fn nodes(vm: &Vm) -> String {
    let distances: String = vm.nodes.iter().map(|node| format!("  >TO {}", node.id)).collect();
    let mut table = Table::new(&format!(">NODE  >HOME  >MEMORY{distances}"));
    for (node, row) in vm.nodes.iter().zip(vm.distances.rows()) {
        let cells = [node.id.to_string(), or_dash(node.home), crate::table::size(node.memory_bytes >> 10)];
        table.row(cells.into_iter().chain(row.iter().map(u8::to_string)).collect::<Vec<_>>());
    }
    table.text(2)
}

fn vcpus(vcpus: &[Vcpu]) -> String {
    let mut table =
        Table::new(">VCPU  >THREAD  >HOST CPU  >HOST NODE  PINNED  >PUBLISHED  >ACKED  >TARGET  STATE");
    for vcpu in vcpus {
        table.row([
            vcpu.apic_id.to_string(),
            vcpu.tid.to_string(),
            or_dash(vcpu.host_cpu),
            or_dash(vcpu.host_node),
            if vcpu.pinned { "yes" } else { "no" }.to_owned(),
            or_dash(vcpu.guest_node),
            or_dash(vcpu.acked_node),
            or_dash(vcpu.target_node),
            vcpu.state.to_string(),
        ]);
    }
    table.text(2)
}

fn devices(devices: &[VmDevice]) -> String {
    let mut table = Table::new("DEVICE  >HOST NODE  IN THE GUEST  >PUBLISHED  >ACKED  >TARGET  STATE");
    for device in devices {
        table.row([
            plain(&device.host),
            or_dash(device.host_node),
            device.guest.as_deref().map_or_else(|| "-".to_owned(), plain),
            or_dash(device.guest_node),
            or_dash(device.acked_node),
            or_dash(device.target_node),
            device.state.to_string(),
        ]);
    }
    table.text(2)
}

/// After `attach`.
pub fn attached(vm: &Vm) -> String {
    let name = plain(&vm.name);
    if vm.attach_on_arrival && !vm.attached {
        return format!("{name}: it is attached as soon as its guest runs here\n");
    }
    let attached =
        format!("{name}: topology channel attached; changes are published to its guest from now on\n");
    match displaced(vm) {
        Some(displaced) => format!("{attached}{name}: {displaced}\n"),
        None => attached,
    }
}

/// How much of its memory is not on the homes of its guest nodes, and what becomes of that, if any is.
pub fn displaced(vm: &Vm) -> Option<String> {
    let node = |node: &GuestNode| {
        let bytes = node.displaced_bytes.filter(|bytes| *bytes > 0)?;
        Some(format!("{} of guest node {}", size(bytes.div_ceil(1024)), node.id))
    };
    let nodes: Vec<String> = vm.nodes.iter().filter_map(node).collect();
    let whole: u64 = vm.nodes.iter().map(|node| node.memory_bytes).fold(0, u64::saturating_add);
    let of = size(whole >> 10);
    (!nodes.is_empty()).then(|| {
        let nodes = nodes.join(", ");
        let pins = match vm.devices.is_empty() {
            true => "the first passthrough device pins memory where it is, for good",
            false => "its passthrough devices have pinned them there",
        };
        format!("{nodes} are not on its home, of {of} in all; {pins}")
    })
}

/// After `detach`.
pub fn detached(vm: &Vm) -> String {
    format!("{}: topology channel detached; the guest keeps what was published last\n", plain(&vm.name))
}

/// After `move`.
pub fn moved(vm: &Vm, vcpu: u32) -> String {
    let state = vm.vcpus.iter().find(|found| found.apic_id == vcpu);
    let node = or_dash(state.and_then(|vcpu| vcpu.host_node));
    let state = state.map_or("unknown".to_owned(), |vcpu| vcpu.state.to_string());
    format!("{}: vCPU {vcpu} is confined to host node {node}; its guest's view is {state}\n", plain(&vm.name))
}

/// After `replug`.
pub fn replugged(done: &Replugged) -> String {
    let Replugged { vcpu, new_vcpu, guest_node, vm } = done;
    format!(
        "{}: vCPU {vcpu} is vCPU {new_vcpu} now, on guest node {guest_node}; the guest knows it by another CPU number, too\n",
        plain(&vm.name)
    )
}

/// The daemon itself.
pub fn daemon(daemon: &Daemon) -> String {
    let mut text = format!("vnumad {}, process {}\n", plain(&daemon.version), daemon.pid);
    text += &format!("vCPU locations by {}", plain(&daemon.location_source));
    if let Some(why) = &daemon.why_not_bpf {
        text += &format!(" (not by bpf: {})", plain(why));
    }
    if !daemon.affinity_events {
        text += "\nchanges of affinity alone are noticed with the next resync, or when the vCPU runs";
    }
    text += &format!("\nlocation events lost: {}\n", daemon.location_events_lost);
    let seconds = |after: u64| format!("of itself, after {after} s");
    text +=
        &format!("vCPUs are replugged: {}\n", daemon.replug_after_s.map_or("when asked for".into(), seconds));
    text += &format!(
        "policy by default: {}, a period of {} ms; counters: {}, {} threads counted\n",
        plain(&daemon.policy),
        daemon.policy_period_ms,
        plain(&daemon.counters.source),
        daemon.counters.threads
    );
    text += &format!("places of vCPUs by {}", plain(&daemon.places.mechanism));
    if daemon.places.mechanism == PlaceSetting::SCHEDULER {
        let PlaceSetting { vcpus, placed, stolen_local, stolen_remote, starved, .. } = daemon.places;
        let mode = if daemon.places.full { "full" } else { "partial" };
        text += &format!(
            ", {mode}: {vcpus} vCPUs, {placed} times taken there, {stolen_local} times stolen within a node and {stolen_remote} \
             times from another one, {starved} times after a long wait"
        );
    }
    if let Some(why) = &daemon.places.why_not {
        text += &format!(" ({})", plain(why));
    }
    text += "\n";
    for Capability { name, in_use, passed_over, since_ns } in &daemon.capabilities {
        let since_s = *since_ns as f64 / 1e9;
        text += &format!("{}: {} since {since_s:.0} s after the boot\n", plain(name), plain(in_use));
        passed_over.iter().for_each(|passed| text += &format!("  not {}\n", plain(&passed.to_string())));
    }
    for LibvirtConnection { uri, problem } in &daemon.libvirt {
        let problem = problem.as_ref().map_or_else(|| "connected".to_owned(), |problem| plain(problem));
        text += &format!("libvirt at {}: {problem}\n", plain(uri));
    }
    for Limited { work, party, times, last_ns } in &daemon.limited {
        let last_s = *last_ns as f64 / 1e9;
        text += &format!(
            "{}: {} limited {times} times, last {last_s:.0} s after the boot\n",
            plain(party),
            plain(work)
        );
    }
    text + &format!("watchers: {}, dropped as too slow: {}\n", daemon.watchers, daemon.watchers_dropped)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_api::{ChannelState, DriverMode, Generation, Hypervisor, RefusedGeneration};
    use vnuma_model::DistanceMatrix;

    fn vcpu(apic_id: u32, host_node: u32, guest_node: u32, state: VcpuState) -> Vcpu {
        Vcpu {
            apic_id,
            tid: 100 + apic_id as i32,
            host_cpu: Some(host_node * 2),
            host_node: Some(host_node),
            pinned: apic_id == 0,
            guest_node: Some(guest_node),
            acked_node: Some(guest_node),
            target_node: Some(0),
            state,
        }
    }

    fn vm() -> Vm {
        let node = |id| GuestNode {
            id,
            home: (id == 0).then_some(0),
            memory_bytes: 512 << 20,
            displaced_bytes: None,
            bound: None,
        };
        Vm {
            name: "web".into(),
            pid: Some(99),
            backend: "qmp".into(),
            described: true,
            hypervisor: Hypervisor::Answers,
            attached: true,
            channel: ChannelState::Attached,
            attach_on_arrival: false,
            run_state: Some("running".into()),
            problem: None,
            nodes: vec![node(0), node(1)],
            distances: DistanceMatrix::new(vec![vec![10, 21], vec![21, 10]]).expect("square"),
            vcpus: vec![vcpu(0, 0, 0, VcpuState::True), vcpu(1, 2, 1, VcpuState::Stale)],
            publication: Publication {
                generation: Some(Generation(1)),
                publications: 3,
                acknowledgements: 2,
                ..Publication::default()
            },
            devices: Vec::new(),
            spare_slots: std::collections::BTreeMap::new(),
        }
    }

    #[test]
    fn passthrough_devices_are_shown_with_what_the_guest_was_told() {
        let device = VmDevice {
            host: "0000:81:00.0".into(),
            host_node: Some(2),
            guest: Some("0000:01:00.0".into()),
            guest_node: Some(1),
            acked_node: Some(0),
            target_node: Some(1),
            state: VcpuState::Stale,
        };
        let early = VmDevice {
            host: "0000:82:00.0".into(),
            host_node: None,
            guest: None,
            guest_node: None,
            acked_node: None,
            target_node: None,
            state: VcpuState::Unknown,
        };
        let expected = "
Passthrough devices
  DEVICE        HOST NODE  IN THE GUEST  PUBLISHED  ACKED  TARGET  STATE
  0000:81:00.0          2  0000:01:00.0          1      0       1  stale
  0000:82:00.0          -  -                     -      -       -  unknown
";
        let text = show(&Vm { devices: vec![device, early], ..vm() });
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_list_counts_states() {
        let mut broken = vm();
        broken.problem = Some("no\tanswer".into());
        broken.vcpus.clear();
        let expected = "\
NAME  PID  CHANNEL   NODES  VCPUS  TRUE  APPROXIMATE  STALE  UNKNOWN  PROBLEM
web    99  attached      2      2     1            0      1        0
web    99  attached      2      0     0            0      0        0  no\u{fffd}answer
";
        assert_eq!(list(&[vm(), broken]), expected);
        assert!(list(&[]).starts_with("no VMs"));
    }

    #[test]
    fn attach_says_how_much_memory_is_displaced() {
        let mut vm = vm();
        vm.nodes[1].displaced_bytes = Some(0);
        assert_eq!(attached(&vm).lines().count(), 1);
        vm.nodes[0].displaced_bytes = Some(100 << 20);
        vm.nodes[1].displaced_bytes = Some(1);
        let expected = "web: 100 MiB of guest node 0, 1 KiB of guest node 1 are not on its home, of 1024 MiB in all; the first \
                        passthrough device pins memory where it is, for good";
        assert_eq!(attached(&vm).lines().nth(1), Some(expected));
    }

    #[test]
    fn a_vm_is_shown_whole() {
        let expected = "\
web: process 99, channel attached

Guest nodes
  NODE  HOME   MEMORY  TO 0  TO 1
     0     0  512 MiB    10    21
     1     -  512 MiB    21    10

vCPUs
  VCPU  THREAD  HOST CPU  HOST NODE  PINNED  PUBLISHED  ACKED  TARGET  STATE
     0     100         0          0  yes             0      0       0  true
     1     101         4          2  no              1      1       0  stale

Published 3 times, acknowledged 2 times; last generation 0000000000000001, acknowledged -
Not published: 0 changes that did not last; deferred by the cap: 0
Driver: none
";
        assert_eq!(show(&vm()), expected);
    }

    #[test]
    fn the_driver_is_shown_with_what_it_refused() {
        let mut vm = vm();
        vm.publication.driver_version = Some("1.2.3".into());
        assert!(
            show(&vm).ends_with(
                "
Driver: 1.2.3, applies nothing
"
            ),
            "{}",
            show(&vm)
        );
        vm.publication.driver_mode = Some(DriverMode::Safe);
        vm.publication.refused = Some(RefusedGeneration { generation: Generation(2), errno: 95 });
        let text = show(&vm);
        let expected = "
Driver: 1.2.3, safe mode
Refused: generation 0000000000000002: Operation not supported (errno 95)
";
        assert!(text.ends_with(expected), "{text}");
        assert_eq!(error_text(0), "no error number was given");
    }

    #[test]
    fn a_replug_says_what_else_changed() {
        let done = Replugged { vcpu: 1, new_vcpu: 5, guest_node: 0, vm: vm() };
        let text = replugged(&done);
        assert!(text.starts_with("web: vCPU 1 is vCPU 5 now, on guest node 0;"), "{text}");
        assert!(text.contains("another CPU number"), "{text}");
    }

    #[test]
    fn one_that_was_only_seen_from_outside_is_not_taken_for_a_uma_vm() {
        let seen = Vm { described: false, hypervisor: Hypervisor::Silent, nodes: Vec::new(), ..vm() };
        let text = show(&seen);
        assert!(text.contains("not described by QEMU yet") && !text.contains("UMA"), "{text}");
        assert!(show(&Vm { nodes: Vec::new(), ..vm() }).contains("a UMA VM"));
    }

    #[test]
    fn a_move_says_where_the_vcpu_is() {
        assert_eq!(moved(&vm(), 1), "web: vCPU 1 is confined to host node 2; its guest's view is stale\n");
    }
}
