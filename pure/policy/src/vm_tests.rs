use super::*;
use crate::assignment::tests::host;
use crate::{SettlePolicy, Settler, Suppressed};
use proptest::prelude::*;
use vnuma_model::{BackingMapping, GuestNode, MemoryBacking, PciDevice, Vcpu as DescribedVcpu, VmDevice};

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
            mapping: Some(BackingMapping { start: 1 << 40, page_kib: 4 }),
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
        devices: Vec::new(),
        memory_devices: Vec::new(),
    }
}

fn seen(node: u32, deliberate: bool, ms: u64) -> Option<Observation> {
    Some(Observation { node, deliberate, time_ns: ms * MS })
}

/// Every drift waits for the same dwell here; that of calm vCPUs is tested with the settler.
const POLICY: SettlePolicy =
    SettlePolicy { dwell_ns: 250 * MS, calm_dwell_ns: 250 * MS, calm_ns: 0, max_per_second: 10 };

/// A VM, and what is remembered of its publications.
struct Published {
    vm: VmPlacement,
    settler: Settler,
}

impl Published {
    fn new(host: &HostTopology, vm: &VmDescription) -> Self {
        Self { vm: VmPlacement::new(host, vm), settler: Settler::default() }
    }

    /// When something is published next.
    fn next_ns(&self) -> Option<u64> {
        self.settler.clone().next(&POLICY, &self.vm, 0).map(|(due_ns, ..)| due_ns)
    }
}

impl std::ops::Deref for Published {
    type Target = VmPlacement;

    fn deref(&self) -> &VmPlacement {
        &self.vm
    }
}

impl std::ops::DerefMut for Published {
    fn deref_mut(&mut self) -> &mut VmPlacement {
        &mut self.vm
    }
}

/// What is published at `ms`, if something is due.
fn publish(of: &mut Published, generation: u64, ms: u64) -> Option<Publication> {
    let (due_ns, batch, why) = of.settler.next(&POLICY, &of.vm, ms * MS)?;
    (due_ns <= ms * MS).then(|| of.vm.publish(&batch, why, generation, ms * MS))
}

/// Attaches, and takes the first publication.
fn attach(placement: &mut Published, generation: u64, ms: u64) -> Publication {
    placement.start_publishing(ms * MS);
    publish(placement, generation, ms).expect("all that is true")
}

fn state(placement: &VmPlacement, apic_id: u32) -> VcpuState {
    placement.vcpu(apic_id).expect("plugged").state
}

#[test]
fn a_vm_without_channel_uses_what_it_booted_with() {
    let host = host(DISTANCES);
    let mut vm = Published::new(&host, &vm(&[0, 2], 2));
    assert_eq!(state(&vm, 0), VcpuState::Unknown);
    vm.observe(&host, 0, seen(0, true, 1));
    assert_eq!(state(&vm, 0), VcpuState::True);
    vm.observe(&host, 0, seen(1, true, 2));
    assert_eq!(state(&vm, 0), VcpuState::Approximate);
    assert_eq!(vm.observe(&host, 0, seen(3, true, 3)), Some(1));
    assert_eq!(state(&vm, 0), VcpuState::Stale);
    assert_eq!((publish(&mut vm, 1, 9000), vm.next_ns()), (None, None));
    vm.observe(&host, 0, None);
    assert_eq!(state(&vm, 0), VcpuState::Unknown);
}

#[test]
fn attaching_tells_everything_and_acknowledging_makes_it_true() {
    let host = host(DISTANCES);
    let mut vm = Published::new(&host, &vm(&[0, 2], 2));
    vm.observe(&host, 0, seen(2, false, 1));
    vm.observe(&host, 2, seen(3, false, 1));
    let publication = attach(&mut vm, 1, 5);
    assert_eq!(publication.vcpus, [(0, 1), (2, 1)]);
    assert_eq!(publication.distances.rows(), [[10, 32], [32, 10]]);
    assert_eq!((state(&vm, 0), state(&vm, 2)), (VcpuState::Stale, VcpuState::Approximate));
    assert!(vm.is_waiting());
    assert_eq!(vm.acknowledged(1), Some(Update { generation: 1, changed_ns: 5 * MS, published_ns: 5 * MS }));
    assert_eq!((state(&vm, 0), state(&vm, 2)), (VcpuState::True, VcpuState::Approximate));
    assert!(!vm.is_waiting());
}

#[test]
fn a_pinned_vcpu_is_published_at_once_and_is_stale_until_acknowledged() {
    let host = host(DISTANCES);
    let mut vm = Published::new(&host, &vm(&[0, 2], 2));
    vm.observe(&host, 0, seen(0, true, 1));
    vm.observe(&host, 2, seen(2, true, 1));
    attach(&mut vm, 1, 2);
    vm.acknowledged(1);
    vm.observe(&host, 0, seen(2, true, 50));
    assert_eq!(vm.next_ns(), Some(50 * MS));
    let publication = publish(&mut vm, 2, 51).expect("pinned");
    assert_eq!((publication.vcpus[0].1, publication.changed_ns), (1, 50 * MS));
    assert_eq!(state(&vm, 0), VcpuState::Stale);
    vm.acknowledged(2);
    assert_eq!(state(&vm, 0), VcpuState::True);
}

#[test]
fn what_was_not_written_is_due_again() {
    let host = host(DISTANCES);
    let mut vm = Published::new(&host, &vm(&[0, 2], 1));
    vm.observe(&host, 0, seen(0, true, 1));
    attach(&mut vm, 1, 2);
    vm.observe(&host, 0, seen(2, true, 50));
    let dropped = vm.settler.next(&POLICY, &vm.vm, 51 * MS).expect("due").1;
    assert_eq!(publish(&mut vm, 2, 52).expect("due again").vcpus[0].1, dropped.vcpus[0].1);
    assert_eq!(publish(&mut vm, 3, 53), None, "it was written");
}

#[test]
fn being_nearer_or_further_from_home_alone_is_no_news_for_the_guest() {
    let host = host(DISTANCES);
    let mut vm = Published::new(&host, &vm(&[0, 2], 1));
    vm.observe(&host, 0, seen(1, true, 1));
    attach(&mut vm, 1, 2);
    vm.observe(&host, 0, seen(0, true, 3));
    assert_eq!((publish(&mut vm, 2, 9000), vm.settler.suppressed()), (None, Suppressed::default()));
}

#[test]
fn detaching_keeps_what_the_guest_took_over() {
    let host = host(DISTANCES);
    let mut vm = Published::new(&host, &vm(&[0, 2], 1));
    vm.observe(&host, 0, seen(2, true, 1));
    attach(&mut vm, 1, 2);
    vm.acknowledged(1);
    vm.stop_publishing();
    assert_eq!(state(&vm, 0), VcpuState::True);
    vm.observe(&host, 0, seen(0, true, 3));
    assert_eq!((state(&vm, 0), publish(&mut vm, 2, 9000)), (VcpuState::Stale, None));
}

#[test]
fn vcpus_come_and_go() {
    let host = host(DISTANCES);
    let mut placement = Published::new(&host, &vm(&[0, 2], 2));
    placement.observe(&host, 0, None);
    placement.observe(&host, 2, None);
    attach(&mut placement, 1, 1);
    placement.describe(&host, &vm(&[0, 2], 3), 5 * MS);
    let publication = publish(&mut placement, 2, 5).expect("another vCPU");
    assert_eq!(publication.vcpus.iter().map(|v| v.0).collect::<Vec<_>>(), [0, 2, 4]);
    placement.describe(&host, &vm(&[0, 2], 1), 6 * MS);
    assert_eq!(publish(&mut placement, 3, 6).expect("fewer vCPUs").vcpus.len(), 1);
    assert_eq!(placement.vcpu(4), None);
    placement.describe(&host, &vm(&[0, 2], 1), 7 * MS);
    assert_eq!(publish(&mut placement, 4, 7), None, "nothing changed");
}

#[test]
fn a_new_home_is_published() {
    let host = host(DISTANCES);
    let mut placement = Published::new(&host, &vm(&[0, 2], 1));
    placement.observe(&host, 0, seen(0, false, 1));
    attach(&mut placement, 1, 1);
    placement.acknowledged(1);
    placement.describe(&host, &vm(&[2, 0], 1), 5 * MS);
    assert_eq!(state(&placement, 0), VcpuState::Stale);
    let publication = publish(&mut placement, 2, 300).expect("it is at the other node's home");
    assert_eq!(publication.vcpus[0].1, 1);
    placement.describe(&host, &vm(&[1, 0], 1), 400 * MS);
    let publication = publish(&mut placement, 3, 400).expect("the distance is another");
    assert_eq!(publication.distances.get(0, 1), Some(16));
}

#[test]
fn a_new_home_counts_from_when_it_became_one() {
    let host = host(DISTANCES);
    let mut placement = Published::new(&host, &vm(&[0, 2], 1));
    placement.observe(&host, 0, seen(0, false, 1));
    attach(&mut placement, 1, 1);
    placement.describe(&host, &vm(&[2, 0], 1), 5000 * MS);
    assert_eq!(publish(&mut placement, 2, 5249), None, "the dwell begins with the new home");
    assert_eq!(publish(&mut placement, 2, 5250).expect("due").changed_ns, 5000 * MS);
}

#[test]
fn a_guest_that_reboots_uses_its_boot_nodes_and_is_published_again() {
    let host = host(DISTANCES);
    let mut placement = Published::new(&host, &vm(&[0, 2], 1));
    placement.observe(&host, 0, seen(2, true, 1));
    attach(&mut placement, 1, 2);
    placement.acknowledged(1);
    assert_eq!(state(&placement, 0), VcpuState::True);
    placement.rebooted(9 * MS);
    assert_eq!(state(&placement, 0), VcpuState::Stale);
    let publication = publish(&mut placement, 2, 9).expect("published again");
    assert_eq!((publication.vcpus[0].1, publication.changed_ns), (1, 9 * MS));
    placement.acknowledged(2);
    assert_eq!(state(&placement, 0), VcpuState::True);
    placement.stop_publishing();
    placement.rebooted(10 * MS);
    assert_eq!((state(&placement, 0), publish(&mut placement, 3, 10)), (VcpuState::Stale, None));
}

#[test]
fn what_a_lost_guest_uses_is_unknown_until_it_acknowledges() {
    let host = host(DISTANCES);
    let mut placement = Published::new(&host, &vm(&[0, 2], 1));
    placement.observe(&host, 0, seen(0, true, 1));
    assert_eq!(state(&placement, 0), VcpuState::True);
    placement.acked_unknown();
    let status = placement.vcpu(0).expect("plugged");
    assert_eq!((status.state, status.acked_node), (VcpuState::Unknown, None));
    attach(&mut placement, 1, 2);
    assert_eq!(state(&placement, 0), VcpuState::Unknown);
    placement.acknowledged(1);
    assert_eq!(state(&placement, 0), VcpuState::True);
}

#[test]
fn a_uma_vm_has_nothing_to_be_true_about() {
    let host = host(DISTANCES);
    let mut vm = Published::new(&host, &vm(&[], 1));
    vm.observe(&host, 0, seen(2, true, 1));
    let status = vm.vcpu(0).expect("plugged");
    assert_eq!((status.state, status.acked_node, status.published_node), (VcpuState::Unknown, None, None));
}

#[test]
fn the_first_publication_waits_until_every_vcpu_was_looked_at() {
    let host = host(DISTANCES);
    let mut vm = Published::new(&host, &vm(&[0, 2], 2));
    vm.start_publishing(10 * MS);
    vm.observe(&host, 0, seen(2, false, 11));
    assert_eq!(publish(&mut vm, 1, 12), None, "the other one would be told where it booted");
    assert_eq!(vm.next_ns(), Some(260 * MS));
    vm.observe(&host, 2, seen(0, false, 13));
    assert_eq!(vm.next_ns(), Some(10 * MS));
    assert_eq!(publish(&mut vm, 1, 13).expect("all were looked at").vcpus, [(0, 1), (2, 0)]);
    vm.observe(&host, 2, seen(2, false, 14));
    assert_eq!(vm.next_ns(), Some(264 * MS), "drift again waits for its dwell");
}

#[test]
fn the_first_publication_does_not_wait_for_vcpus_that_nobody_finds() {
    let host = host(DISTANCES);
    let mut placement = Published::new(&host, &vm(&[0, 2], 2));
    placement.start_publishing(10 * MS);
    placement.observe(&host, 0, seen(2, false, 11));
    assert_eq!(publish(&mut placement, 1, 259), None);
    assert_eq!(publish(&mut placement, 1, 260).expect("in time").vcpus, [(0, 1), (2, 1)]);
    // One whose location cannot be read was looked at.
    placement.stop_publishing();
    placement.observe(&host, 2, None);
    placement.start_publishing(300 * MS);
    assert!(publish(&mut placement, 2, 300).is_some());
}

const DISK: PciAddress = PciAddress { segment: 0, bus: 1, devfn: 0 };

/// The host has a disk on node 2 and something on a node that the firmware does not say.
fn host_with_devices() -> HostTopology {
    let device = |address: &str, node| PciDevice {
        address: address.into(),
        class: 0x01_0802,
        vendor: 1,
        device: 2,
        node,
        iommu_group: Some(1),
    };
    let pci_devices = vec![device("0000:81:00.0", Some(2)), device("0000:00:01.0", None)];
    HostTopology { pci_devices, ..host(DISTANCES) }
}

fn with_disk(vm: VmDescription, host: &str, guest: PciAddress) -> VmDescription {
    let devices = vec![VmDevice { host: host.into(), guest: Some(guest) }];
    VmDescription { devices, ..vm }
}

#[test]
fn a_device_is_on_the_guest_node_of_its_home_and_follows_that() {
    let host = host_with_devices();
    let disk = |homes: &[u32]| with_disk(vm(homes, 1), "0000:81:00.0", DISK);
    let mut placement = Published::new(&host, &disk(&[0, 2]));
    placement.observe(&host, 0, seen(0, true, 1));
    assert_eq!(attach(&mut placement, 1, 1000).devices, [(DISK, 1)]);
    let status = placement.device(DISK).expect("described");
    assert_eq!((status.host_node, status.published_node, status.acked_node), (Some(2), Some(1), None));
    assert_eq!(status.state, VcpuState::Unknown);
    placement.acknowledged(1);
    assert_eq!(placement.device(DISK).expect("described").state, VcpuState::True);
    // The memory of both guest nodes is moved.
    placement.describe(&host, &disk(&[2, 0]), 2000 * MS);
    assert_eq!(placement.device(DISK).expect("described").state, VcpuState::Stale);
    let publication = publish(&mut placement, 2, 3000).expect("another node");
    assert_eq!(publication.devices, [(DISK, 0)]);
    placement.acknowledged(2);
    assert_eq!(placement.device(DISK).expect("described").acked_node, Some(0));
    // On node 3 there is none; node 2 is the nearest.
    placement.describe(&host, &disk(&[3, 0]), 4000 * MS);
    assert_eq!(placement.device(DISK).expect("described").state, VcpuState::Approximate);
    placement.stop_publishing();
    let status = placement.device(DISK).expect("described");
    assert_eq!((status.published_node, status.acked_node), (None, None), "the guest has given it back");
}

#[test]
fn devices_come_go_and_are_told_only_what_is_known() {
    let host = host_with_devices();
    let mut placement = Published::new(&host, &vm(&[0, 2], 1));
    placement.observe(&host, 0, seen(0, true, 1));
    assert_eq!(attach(&mut placement, 1, 1000).devices, []);
    for (generation, (device, told)) in
        (2..).zip([("0000:81:00.0", vec![(DISK, 1)]), ("0000:00:01.0", vec![]), ("0000:99:00.0", vec![])])
    {
        let ms = 1000 * generation;
        placement.describe(&host, &with_disk(vm(&[0, 2], 1), device, DISK), ms * MS);
        let published = publish(&mut placement, generation, ms).map(|publication| publication.devices);
        // Of two that nothing is known of, the second is no news.
        assert_eq!(published, (generation < 4).then_some(told), "{device}");
        placement.acknowledged(generation);
        let acked = placement.device(DISK).expect("described").acked_node;
        assert_eq!(acked, (generation == 2).then_some(1), "{device}");
    }
    let moved = PciAddress { bus: 2, ..DISK };
    placement.describe(&host, &with_disk(vm(&[0, 2], 1), "0000:81:00.0", moved), 9000 * MS);
    assert_eq!(publish(&mut placement, 9, 9000).expect("it has come").devices, [(moved, 1)]);
    assert_eq!(placement.device(DISK), None);
    placement.describe(&host, &vm(&[0, 2], 1), 10_000 * MS);
    assert_eq!(publish(&mut placement, 10, 10_000).expect("it has gone").devices, []);
}

#[test]
fn a_device_of_a_guest_that_boots_again_is_told_anew() {
    let host = host_with_devices();
    let mut placement = Published::new(&host, &with_disk(vm(&[0, 2], 1), "0000:81:00.0", DISK));
    placement.observe(&host, 0, seen(0, true, 1));
    attach(&mut placement, 1, 1000);
    placement.acknowledged(1);
    placement.rebooted(2000 * MS);
    assert_eq!(placement.device(DISK).expect("described").acked_node, None);
    assert_eq!(publish(&mut placement, 2, 2000).expect("anew").devices, [(DISK, 1)]);
    placement.acknowledged(2);
    assert_eq!(placement.device(DISK).expect("described").acked_node, Some(1));
}

proptest! {
    /// Whatever the homes are: the guest node at the device's host node if there is one, else one that is nearest.
    #[test]
    fn no_guest_node_is_nearer_to_a_device(homes in prop::collection::vec(0_u32..4, 1..5), node in 0_u32..4) {
        let mut host = host_with_devices();
        host.pci_devices[0].node = Some(node);
        let mut placement = Published::new(&host, &with_disk(vm(&homes, 1), "0000:81:00.0", DISK));
        placement.observe(&host, 0, seen(0, true, 1));
        let told = attach(&mut placement, 1, 1000).devices[0].1;
        let distance = |home: u32| host.distance(node, home).expect("a node");
        let least = homes.iter().map(|&home| distance(home)).min();
        prop_assert_eq!(Some(distance(homes[told as usize])), least);
    }
}
