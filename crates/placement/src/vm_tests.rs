use super::*;
use crate::node::tests::host;
use vnuma_topology::{GuestNode, MemoryBacking, Vcpu as DescribedVcpu};

const MS: u64 = 1_000_000;
const DISTANCES: &[&[u8]] = &[&[10, 16, 32, 32], &[16, 10, 32, 32], &[32, 32, 10, 16], &[32, 32, 16, 10]];

fn vm(homes: &[u32], vcpus: u32) -> VmDescription {
    let node = |(id, &home): (usize, &u32)| GuestNode {
        id: id as u32,
        memory_bytes: 1 << 30,
        memory: Some(MemoryBacking {
            id: format!("ram{id}"),
            size_bytes: 1 << 30,
            policy: "bind".into(),
            host_nodes: vec![home],
            resident_kib: Vec::new(),
        }),
    };
    let vcpu = |index: u32| DescribedVcpu {
        index,
        apic_id: index * 2,
        boot_node: (!homes.is_empty()).then(|| index % homes.len() as u32),
        tid: 100 + index as i32,
    };
    VmDescription {
        name: "a".into(),
        pid: 100,
        guest_nodes: homes.iter().enumerate().map(node).collect(),
        vcpus: (0..vcpus).map(vcpu).collect(),
        run_state: "running".into(),
        spare_slots: std::collections::BTreeMap::new(),
    }
}

fn seen(node: u32, pinned: bool, ms: u64) -> Option<Observation> {
    Some(Observation { node, pinned, time_ns: ms * MS })
}

fn state(placement: &VmPlacement, apic_id: u32) -> VcpuState {
    placement.vcpu(apic_id).expect("plugged").state
}

#[test]
fn a_vm_without_channel_believes_what_it_booted_with() {
    let host = host(DISTANCES);
    let mut vm = VmPlacement::new(&host, &vm(&[0, 2], 2), SettlePolicy::default());
    assert_eq!(state(&vm, 0), VcpuState::Unknown);
    vm.observe(&host, 0, seen(0, true, 1));
    assert_eq!(state(&vm, 0), VcpuState::True);
    vm.observe(&host, 0, seen(1, true, 2));
    assert_eq!(state(&vm, 0), VcpuState::Approximate);
    assert_eq!(vm.observe(&host, 0, seen(3, true, 3)), Some(1));
    assert_eq!(state(&vm, 0), VcpuState::Stale);
    assert_eq!((vm.take_due(1, 9000 * MS), vm.next_deadline_ns()), (None, None));
    vm.observe(&host, 0, None);
    assert_eq!(state(&vm, 0), VcpuState::Unknown);
}

#[test]
fn attaching_tells_everything_and_acknowledging_makes_it_true() {
    let host = host(DISTANCES);
    let mut vm = VmPlacement::new(&host, &vm(&[0, 2], 2), SettlePolicy::default());
    vm.observe(&host, 0, seen(2, false, 1));
    vm.observe(&host, 2, seen(3, false, 1));
    let telling = vm.start_telling(1, 5 * MS);
    let nodes: Vec<_> =
        telling.vcpus.iter().map(|v| (v.apic_id, v.placed.node, v.placed.approximate)).collect();
    assert_eq!(nodes, [(0, 1, false), (2, 1, true)]);
    assert_eq!(telling.distances.rows(), [[10, 32], [32, 10]]);
    assert_eq!((state(&vm, 0), state(&vm, 2)), (VcpuState::Stale, VcpuState::Approximate));
    assert!(vm.is_waiting());
    assert_eq!(vm.acknowledged(1), Some(Updated { generation: 1, changed_ns: 5 * MS, told_ns: 5 * MS }));
    assert_eq!((state(&vm, 0), state(&vm, 2)), (VcpuState::True, VcpuState::Approximate));
    assert!(!vm.is_waiting());
}

#[test]
fn a_pinned_vcpu_is_told_at_once_and_is_stale_until_acknowledged() {
    let host = host(DISTANCES);
    let mut vm = VmPlacement::new(&host, &vm(&[0, 2], 2), SettlePolicy::default());
    vm.observe(&host, 0, seen(0, true, 1));
    vm.observe(&host, 2, seen(2, true, 1));
    vm.start_telling(1, 2 * MS);
    vm.acknowledged(1);
    vm.observe(&host, 0, seen(2, true, 50));
    assert_eq!(vm.next_deadline_ns(), Some(50 * MS));
    let telling = vm.take_due(2, 51 * MS).expect("pinned");
    assert_eq!((telling.vcpus[0].placed.node, telling.changed_ns), (1, 50 * MS));
    assert_eq!(state(&vm, 0), VcpuState::Stale);
    vm.acknowledged(2);
    assert_eq!(state(&vm, 0), VcpuState::True);
}

#[test]
fn detaching_keeps_what_the_guest_took_over() {
    let host = host(DISTANCES);
    let mut vm = VmPlacement::new(&host, &vm(&[0, 2], 1), SettlePolicy::default());
    vm.observe(&host, 0, seen(2, true, 1));
    vm.start_telling(1, 2 * MS);
    vm.acknowledged(1);
    vm.stop_telling();
    assert_eq!(state(&vm, 0), VcpuState::True);
    vm.observe(&host, 0, seen(0, true, 3));
    assert_eq!((state(&vm, 0), vm.take_due(2, 9000 * MS)), (VcpuState::Stale, None));
}

#[test]
fn vcpus_come_and_go() {
    let host = host(DISTANCES);
    let mut placement = VmPlacement::new(&host, &vm(&[0, 2], 2), SettlePolicy::default());
    placement.start_telling(1, MS);
    placement.describe(&host, &vm(&[0, 2], 3), 5 * MS);
    let telling = placement.take_due(2, 5 * MS).expect("another vCPU");
    assert_eq!(telling.vcpus.iter().map(|v| v.apic_id).collect::<Vec<_>>(), [0, 2, 4]);
    placement.describe(&host, &vm(&[0, 2], 1), 6 * MS);
    assert_eq!(placement.take_due(3, 6 * MS).expect("fewer vCPUs").vcpus.len(), 1);
    assert_eq!(placement.vcpu(4), None);
    placement.describe(&host, &vm(&[0, 2], 1), 7 * MS);
    assert_eq!(placement.take_due(4, 7 * MS), None, "nothing changed");
}

#[test]
fn a_new_home_is_told() {
    let host = host(DISTANCES);
    let mut placement = VmPlacement::new(&host, &vm(&[0, 2], 1), SettlePolicy::default());
    placement.observe(&host, 0, seen(0, false, 1));
    placement.start_telling(1, MS);
    placement.acknowledged(1);
    placement.describe(&host, &vm(&[2, 0], 1), 5 * MS);
    assert_eq!(state(&placement, 0), VcpuState::Stale);
    let telling = placement.take_due(2, 300 * MS).expect("it is at the other node's home");
    assert_eq!(telling.vcpus[0].placed.node, 1);
    placement.describe(&host, &vm(&[1, 0], 1), 400 * MS);
    let telling = placement.take_due(3, 400 * MS).expect("the distance is another");
    assert_eq!(telling.distances.get(0, 1), Some(16));
}

#[test]
fn a_new_home_counts_from_when_it_became_one() {
    let host = host(DISTANCES);
    let mut placement = VmPlacement::new(&host, &vm(&[0, 2], 1), SettlePolicy::default());
    placement.observe(&host, 0, seen(0, false, 1));
    placement.start_telling(1, MS);
    placement.describe(&host, &vm(&[2, 0], 1), 5000 * MS);
    assert_eq!(placement.take_due(2, 5249 * MS), None, "the dwell begins with the new home");
    assert_eq!(placement.take_due(2, 5250 * MS).expect("due").changed_ns, 5000 * MS);
}

#[test]
fn a_guest_that_reboots_believes_its_boot_nodes_and_is_told_again() {
    let host = host(DISTANCES);
    let mut placement = VmPlacement::new(&host, &vm(&[0, 2], 1), SettlePolicy::default());
    placement.observe(&host, 0, seen(2, true, 1));
    placement.start_telling(1, 2 * MS);
    placement.acknowledged(1);
    assert_eq!(state(&placement, 0), VcpuState::True);
    placement.rebooted(9 * MS);
    assert_eq!(state(&placement, 0), VcpuState::Stale);
    let telling = placement.take_due(2, 9 * MS).expect("told again");
    assert_eq!((telling.vcpus[0].placed.node, telling.changed_ns), (1, 9 * MS));
    placement.acknowledged(2);
    assert_eq!(state(&placement, 0), VcpuState::True);
    placement.stop_telling();
    placement.rebooted(10 * MS);
    assert_eq!((state(&placement, 0), placement.take_due(3, 10 * MS)), (VcpuState::Stale, None));
}

#[test]
fn what_a_lost_guest_believes_is_unknown_until_it_acknowledges() {
    let host = host(DISTANCES);
    let mut placement = VmPlacement::new(&host, &vm(&[0, 2], 1), SettlePolicy::default());
    placement.observe(&host, 0, seen(0, true, 1));
    assert_eq!(state(&placement, 0), VcpuState::True);
    placement.belief_unknown();
    let status = placement.vcpu(0).expect("plugged");
    assert_eq!((status.state, status.believed), (VcpuState::Unknown, None));
    placement.start_telling(1, 2 * MS);
    assert_eq!(state(&placement, 0), VcpuState::Unknown);
    placement.acknowledged(1);
    assert_eq!(state(&placement, 0), VcpuState::True);
}

#[test]
fn a_uma_vm_has_nothing_to_be_true_about() {
    let host = host(DISTANCES);
    let mut vm = VmPlacement::new(&host, &vm(&[], 1), SettlePolicy::default());
    vm.observe(&host, 0, seen(2, true, 1));
    let status = vm.vcpu(0).expect("plugged");
    assert_eq!((status.state, status.believed, status.told), (VcpuState::Unknown, None, None));
}
