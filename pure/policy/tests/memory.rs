//! What the mover of memory promises, whatever the masks, the counts and the host are.

use proptest::prelude::*;
use std::collections::BTreeMap;
use vnuma_model::{CpuLayout, CpuSet, DistanceMatrix, HostNode, HostTopology};
use vnuma_policy::{
    memory_move::{
        HORIZON_NS, LEAST, MARGIN, MemoryCause, MemoryReason, MemoryWhy, MoveMemory, NodeMemory, SAVED_S,
    },
    scheduling::{
        Counts, Input, Machine, Place, Reach, Settings, VcpuKey, VcpuSample,
        memory::{HELD_CANNOT, HELD_KEPT, MemoryInput, MemoryPart, MemoryToVcpus, REST_NS, VmMemory},
    },
};

const PERIOD_NS: u64 = 1_000_000_000;
const NODES: usize = 3;
const MIB: u64 = 1 << 20;

/// Nodes of two CPUs each, 21 from each other.
fn machine() -> Machine {
    let node = |id: u32| HostNode { id, cpus: (id * 2..id * 2 + 2).collect(), ..HostNode::default() };
    let row = |from| (0..NODES).map(|to| if from == to { 10 } else { 21 }).collect::<Vec<u8>>();
    let host = HostTopology {
        nodes: (0..NODES as u32).map(node).collect(),
        distances: DistanceMatrix::new((0..NODES).map(row).collect()).expect("square"),
        ..HostTopology::default()
    };
    Machine::new(&host, &CpuLayout::default())
}

/// A host whose vCPUs and memory stay as they are unless a test changes them.
struct World {
    machine: Machine,
    settings: Settings,
    masks: Vec<CpuSet>,
    vcpus: Vec<VcpuSample>,
    nodes: Vec<NodeMemory>,
    vms: Vec<VmMemory>,
    mover: MemoryToVcpus,
    now_ns: u64,
}

impl World {
    fn new(rate_mib: u64) -> Self {
        Self {
            machine: machine(),
            settings: Settings { memory_bytes_per_s: rate_mib * MIB, ..Settings::default() },
            masks: vec![(0..NODES as u32 * 2).collect()],
            vcpus: Vec::new(),
            nodes: vec![NodeMemory { total_kib: 64 << 20, free_kib: 32 << 20 }; NODES],
            vms: Vec::new(),
            mover: MemoryToVcpus::default(),
            now_ns: 1,
        }
    }

    /// A VM whose one vCPU has this mask and is on its first CPU, with so many MiB on each node.
    fn vm(&mut self, vm: u64, mask: &str, mib: [u64; NODES], accesses: [u64; NODES]) {
        let mask: CpuSet = mask.parse().expect("a list");
        let cpu = mask.iter().next();
        self.masks.push(mask);
        self.vcpus.push(VcpuSample {
            key: VcpuKey { vm, vcpu: 0 },
            cpu,
            assigned: None,
            reach: self.masks.len() - 1,
            real_time: false,
            managed: true,
            weight: 100,
            ran_ns: PERIOD_NS,
            waited_ns: 0,
            throttled_ns: 0,
            entitled_ns: PERIOD_NS,
            counts: Some(counts(&accesses)),
        });
        let part = MemoryPart { targets: None, kib: mib.map(|mib| mib << 10).to_vec() };
        let allowed = (0..NODES).collect();
        self.vms.push(VmMemory { vm, parts: vec![part], fixed: Vec::new(), allowed, ready: true });
    }

    fn period(&mut self) -> Vec<(u64, MoveMemory)> {
        self.now_ns += PERIOD_NS;
        let reaches: Vec<Reach> = self.masks.iter().map(|mask| Reach::new(&self.machine, mask)).collect();
        let input = Input {
            machine: &self.machine,
            reaches: &reaches,
            cpus: &[],
            vcpus: &self.vcpus,
            period_ns: PERIOD_NS,
        };
        let (nodes, vms, now_ns) = (&self.nodes, &self.vms, self.now_ns);
        let all = MemoryInput { input: &input, nodes, vms, sharers: vms.len(), now_ns };
        self.mover.decide(&self.settings, &all)
    }

    /// The first move of so many periods, and the period of it.
    fn first(&mut self, periods: u32) -> Option<(u32, MoveMemory)> {
        (1..=periods).find_map(|period| Some((period, self.period().first()?.1.clone())))
    }

    /// Pages move as was decided, at once.
    fn carry_out(&mut self, moves: &[(u64, MoveMemory)]) {
        for (vm, step) in moves {
            let memory = self.vms.iter_mut().find(|memory| memory.vm == *vm).expect("known");
            let (from, to) = (step.from as usize, step.to as usize);
            let mut left = step.bytes >> 10;
            for part in &mut memory.parts {
                if part.targets.as_ref().is_none_or(|targets| targets.contains(&to)) {
                    let moved = part.kib[from].min(left);
                    part.kib[from] -= moved;
                    part.kib[to] += moved;
                    left -= moved;
                }
            }
        }
    }
}

fn counts(accesses: &[u64]) -> Counts {
    let llc_misses = accesses.iter().sum();
    Counts {
        instructions: llc_misses * 50,
        llc_references: llc_misses * 2,
        llc_misses,
        accesses: accesses.to_vec(),
    }
}

/// A VM that its operator keeps on node 0, while it uses its memory on node 1.
fn strayed() -> World {
    let mut world = World::new(64);
    world.vm(1, "0-1", [0, 256, 0], [0, 5_000_000, 0]);
    world
}

/// The figures of a move to vCPUs.
fn why(step: &MoveMemory) -> MemoryWhy {
    match step.why {
        MemoryReason::Nearer(why) => why,
        MemoryReason::Home(_) | MemoryReason::Rehome(_) => panic!("{step:?}"),
    }
}

#[test]
fn memory_comes_to_vcpus_that_may_not_go_to_it() {
    let mut world = strayed();
    let (period, step) = world.first(20).expect("moved");
    assert_eq!(
        (period, step.from, step.to, step.bytes),
        (HELD_CANNOT, 1, 0, 192 * MIB),
        "three periods saved up"
    );
    assert_eq!((why(&step).cause, why(&step).remote_share), (MemoryCause::CannotRun, 1.0));
    assert!((why(&step).expected_remote_share - 0.25).abs() < 0.01, "{:?}", why(&step));
    // 49152 pages at 10 us; 5 million accesses that take 110 ns less each, for three quarters of them.
    assert!((why(&step).price_ns - 491_520_000.0).abs() < 1.0, "{:?}", why(&step));
    assert!((why(&step).saving_ns_per_s - 412_500_000.0).abs() < 1.0, "{:?}", why(&step));
    // The rest follows, and then there is nothing more to do.
    world.carry_out(&[(1, step)]);
    world.vcpus[0].counts = Some(counts(&[3_750_000, 1_250_000, 0]));
    let (_, rest) = world.first(20).expect("the rest");
    assert_eq!((rest.from, rest.to, rest.bytes), (1, 0, 64 * MIB));
    world.carry_out(&[(1, rest)]);
    world.vcpus[0].counts = Some(counts(&[5_000_000, 0, 0]));
    assert_eq!(world.first(200), None);
}

#[test]
fn one_cpu_of_an_operator_is_a_node_that_memory_may_come_to() {
    let mut world = strayed();
    world.masks[1] = "1".parse().expect("a list");
    assert_eq!(world.first(20).map(|(period, step)| (period, step.to)), Some((HELD_CANNOT, 0)));
}

#[test]
fn memory_waits_longer_for_vcpus_that_their_policy_keeps_elsewhere() {
    let mut world = World::new(64);
    world.vm(1, "0-5", [0, 256, 0], [0, 5_000_000, 0]);
    assert_eq!(world.first(50), None, "nobody has placed it: the policy is to take it to its memory");
    world.vcpus[0].assigned = Some(Place::Node(0));
    let (period, step) = world.first(50).expect("moved");
    assert_eq!((period, step.from, step.to, why(&step).cause), (HELD_KEPT, 1, 0, MemoryCause::Kept));
}

#[test]
fn nothing_is_moved_while_vcpus_are_being_placed() {
    let mut world = World::new(64);
    world.vm(1, "0-5", [0, 256, 0], [0, 5_000_000, 0]);
    for period in 0..100 {
        world.vcpus[0].assigned = Some(Place::Node(if period / 5 % 2 == 0 { 0 } else { 2 }));
        assert_eq!(world.period(), [], "period {period}");
    }
    // One of them stays, and the memory would always go to it.
    let mut world = World::new(64);
    world.vm(1, "0-5", [0, 256, 0], [0, 5_000_000, 0]);
    world.vcpus[0].assigned = Some(Place::Node(0));
    let mut other = world.vcpus[0].clone();
    other.key.vcpu = 1;
    other.counts = Some(counts(&[0, 1_000_000, 0]));
    world.vcpus.push(other);
    for period in 0..100 {
        world.vcpus[1].assigned = Some(Place::Node(if period / 5 % 2 == 0 { 0 } else { 2 }));
        assert_eq!(world.period(), [], "period {period}");
    }
    assert_eq!(world.first(50).map(|(_, step)| (step.from, step.to)), Some((1, 0)), "when both stay");
}

#[test]
fn what_does_not_pay_is_not_moved() {
    // A page is accessed once a second: 66 s of saving for 100 accesses. It has to be three times as often.
    for (accesses, pays) in [(65_536, false), (3 * 65_536, false), (4 * 65_536, true)] {
        let mut world = World::new(64);
        world.vm(1, "0-1", [0, 256, 0], [0, accesses, 0]);
        assert_eq!(world.first(50).is_some(), pays, "{accesses} accesses");
    }
    // Others of the VM are where the memory is.
    let mut world = strayed();
    let mut local = world.vcpus[0].clone();
    (local.key.vcpu, local.cpu, local.reach) = (1, Some(2), 0);
    local.counts = Some(counts(&[0, 5_000_000, 0]));
    world.vcpus.push(local);
    assert_eq!(world.first(50), None, "one would gain what the other loses");
    // It is little beside what the VM accesses elsewhere.
    let mut world = World::new(64);
    world.vm(1, "0-1", [4096, 4, 0], [1_000_000_000, 5_000_000, 0]);
    assert_eq!(world.first(50), None);
}

#[test]
fn policies_of_memory_and_cpusets_are_kept() {
    let mut world = strayed();
    world.vms[0].parts[0].targets = Some(vec![1]);
    assert_eq!(world.first(50), None, "bound to where it is");
    world.vms[0].parts[0].targets = Some(vec![0, 1]);
    assert!(world.first(50).is_some());
    let mut world = strayed();
    world.vms[0].allowed = vec![1, 2];
    assert_eq!(world.first(50), None, "its cpuset has no memory of node 0");
    let mut world = strayed();
    world.vms[0].fixed = std::mem::take(&mut world.vms[0].parts[0].kib);
    assert_eq!(world.first(50), None, "huge pages stay");
    let mut world = strayed();
    world.vms[0].fixed = vec![0, 256 << 20, 0];
    assert_eq!(world.first(50), None, "one access in a thousand is to what may be moved");
    let mut world = strayed();
    world.vms[0].ready = false;
    assert_eq!(world.first(50), None, "one is under way");
    let mut world = strayed();
    world.settings.memory_bytes_per_s = 0;
    assert_eq!(world.first(50), None, "switched off");
}

#[test]
fn a_node_keeps_its_reserve() {
    let mut world = strayed();
    world.nodes[0].free_kib = world.nodes[0].reserve_kib() + (100 << 10);
    assert_eq!(world.first(20).map(|(_, step)| step.bytes), Some(100 * MIB));
    let mut world = World::new(256);
    (1..=2).for_each(|vm| world.vm(vm, "0-1", [0, 256, 0], [0, 5_000_000, 0]));
    world.nodes[0].free_kib = world.nodes[0].reserve_kib() + (300 << 10);
    let moves = (0..20).map(|_| world.period()).find(|moves| !moves.is_empty()).expect("moved");
    let bytes: Vec<_> = moves.iter().map(|(_, step)| step.bytes / MIB).collect();
    assert_eq!(bytes, [256, 44], "two VMs at once");
    let mut world = strayed();
    world.nodes[0].free_kib = world.nodes[0].reserve_kib() + 4095;
    assert_eq!(world.first(50), None);
    assert_eq!(NodeMemory { total_kib: 1 << 20, free_kib: 0 }.reserve_kib(), 128 << 10);
}

#[test]
fn a_vm_whose_pages_cannot_be_moved_rests() {
    let mut world = strayed();
    let (_, step) = world.first(20).expect("tried");
    world.mover.ended(1, step.bytes / 2 - 1, step.bytes / 2, world.now_ns);
    let (periods, _) = world.first(2000).expect("tried again");
    assert_eq!(u64::from(periods), REST_NS / PERIOD_NS);
    world.mover.ended(1, 0, 0, world.now_ns);
    assert_eq!(world.first(599), None, "nothing was moved");
    let mut world = strayed();
    let (_, step) = world.first(20).expect("tried");
    world.mover.ended(1, step.bytes / 2, step.bytes / 2, world.now_ns);
    assert!(world.first(20).is_some(), "half of them were moved");
}

#[test]
fn numbers_that_no_host_has_move_no_more_than_the_rate() {
    let mut world = strayed();
    world.nodes = vec![NodeMemory { total_kib: u64::MAX, free_kib: u64::MAX }; NODES];
    let memory = &mut world.vms[0];
    memory.parts = vec![MemoryPart { targets: None, kib: vec![u64::MAX; NODES] }; 2];
    memory.fixed = vec![u64::MAX; NODES];
    memory.allowed = vec![0, 1, usize::MAX];
    assert_eq!(world.first(50), None, "so much memory would not pay");
    world.vcpus[0].counts = Some(Counts { accesses: vec![0, u64::MAX, 0], ..counts(&[1]) });
    let bytes = world.first(50).map(|(_, step)| step.bytes);
    assert_eq!(bytes, Some(SAVED_S * 64 * MIB), "what was saved up");
    // What is fixed and what is free may be as large as they like.
    world.vms[0].parts = vec![MemoryPart { targets: None, kib: vec![0, 256 << 10, 0] }];
    world.vms[0].fixed = Vec::new();
    world.settings.memory_bytes_per_s = 1;
    assert_eq!(world.first(50).map(|(_, step)| step.bytes), None, "a byte a second");
    world.settings.memory_bytes_per_s = u64::MAX;
    assert_eq!(world.first(50).map(|(_, step)| step.bytes), Some(256 * MIB));
    world.mover.ended(1, u64::MAX, u64::MAX, u64::MAX);
    assert_eq!(world.first(2), None);
}

#[derive(Clone, Debug)]
struct RandomVm {
    mask: Vec<u32>,
    assigned: Option<usize>,
    mib: [u64; NODES],
    targets: Option<Vec<usize>>,
    fixed_mib: [u64; NODES],
    allowed: Vec<usize>,
    accesses: [u64; NODES],
    /// It is somewhere else every so many periods; 0: it stays.
    restless: u32,
}

fn node_lists() -> impl Strategy<Value = Vec<usize>> {
    proptest::sample::subsequence((0..NODES).collect::<Vec<_>>(), 0..=NODES)
}

fn random_vm() -> impl Strategy<Value = RandomVm> {
    let mask = proptest::sample::subsequence((0..NODES as u32 * 2).collect::<Vec<_>>(), 1..=NODES * 2);
    let kib = || prop::array::uniform3(prop_oneof![Just(0_u64), 0_u64..8, 0_u64..2048]);
    let accesses = prop::array::uniform3(prop_oneof![Just(0_u64), 0_u64..1_000_000, 0_u64..1_000_000_000]);
    let placed = proptest::option::of(0..NODES);
    let targets = proptest::option::of(node_lists());
    let restless = prop_oneof![3 => Just(0_u32), 1 => 1_u32..20];
    (mask, placed, kib(), targets, kib(), node_lists(), accesses, restless).prop_map(
        |(mask, assigned, mib, targets, fixed_mib, allowed, accesses, restless)| RandomVm {
            mask,
            assigned,
            mib,
            targets,
            fixed_mib,
            allowed,
            accesses,
            restless,
        },
    )
}

fn random_world(rate_mib: u64, free_mib: &[u64], vms: &[RandomVm]) -> World {
    let mut world = World::new(rate_mib);
    for (node, free) in world.nodes.iter_mut().zip(free_mib) {
        *node = NodeMemory { total_kib: 4 << 20, free_kib: free << 10 };
    }
    for (at, vm) in vms.iter().enumerate() {
        let mask: CpuSet = vm.mask.iter().copied().collect();
        world.vm(at as u64 + 1, &mask.to_string(), vm.mib, vm.accesses);
        let node = vm.assigned.filter(|node| mask.iter().any(|cpu| cpu as usize / 2 == *node));
        world.vcpus[at].assigned = node.map(Place::Node);
        world.vms[at].parts[0].targets = vm.targets.clone();
        world.vms[at].fixed = vm.fixed_mib.map(|mib| mib << 10).to_vec();
        world.vms[at].allowed = vm.allowed.clone();
    }
    world
}

/// Lets vCPUs go about.
fn wander(world: &mut World, vms: &[RandomVm], period: u32) {
    for (at, vm) in vms.iter().enumerate() {
        if vm.restless > 0 && period.is_multiple_of(vm.restless) {
            let cpu = vm.mask[(period / vm.restless) as usize % vm.mask.len()];
            (world.vcpus[at].cpu, world.vcpus[at].assigned) =
                (Some(cpu), Some(Place::Node(cpu as usize / 2)));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_move_keeps_the_promises(
        rate_mib in 0_u64..300,
        free_mib in prop::collection::vec(0_u64..4096, NODES),
        vms in prop::collection::vec(random_vm(), 1..5),
    ) {
        let mut world = random_world(rate_mib, &free_mib, &vms);
        let (mut sums, mut arrived) = (BTreeMap::<u64, u64>::new(), BTreeMap::<(u64, u32), u64>::new());
        let mut stayed = vec![0_u32; vms.len()];
        for period in 1..=150_u32 {
            let before: Vec<_> = world.vcpus.iter().map(|vcpu| vcpu.node(&world.machine)).collect();
            wander(&mut world, &vms, period);
            for (at, vcpu) in world.vcpus.iter().enumerate() {
                stayed[at] = if vcpu.node(&world.machine) == before[at] { stayed[at] + 1 } else { 1 };
            }
            let moves = world.period();
            let mut into = BTreeMap::<u32, u64>::new();
            for (vm, step) in &moves {
                let at = *vm as usize - 1;
                let (memory, to, from) = (&world.vms[at], step.to as usize, step.from as usize);
                prop_assert!(memory.allowed.contains(&to), "never outside the cpuset");
                prop_assert!(memory.parts[0].targets.as_ref().is_none_or(|targets| targets.contains(&to)));
                prop_assert!(step.bytes >= LEAST && step.bytes <= memory.parts[0].kib[from] << 10);
                prop_assert_eq!(world.vcpus[at].node(&world.machine), Some(to), "to the vCPUs");
                prop_assert!(why(step).saving_ns_per_s * (HORIZON_NS / 1_000_000_000) as f64 > MARGIN * why(step).price_ns);
                prop_assert!(stayed[at] >= HELD_CANNOT, "only for vCPUs that stay");
                let may_run = world.masks[at + 1].iter().any(|cpu| cpu as usize / 2 == from);
                prop_assert!(stayed[at] >= HELD_KEPT || !may_run || world.masks[at + 1].len() == 1);
                if let Some(came) = arrived.get(&(*vm, step.from)) {
                    prop_assert!(world.now_ns - came >= HORIZON_NS, "what came stays for a while");
                }
                arrived.insert((*vm, step.to), world.now_ns);
                *sums.entry(*vm).or_default() += step.bytes;
                *into.entry(step.to).or_default() += step.bytes >> 10;
            }
            for (node, kib) in into {
                let node = &mut world.nodes[node as usize];
                prop_assert!(kib + node.reserve_kib() <= node.free_kib, "the reserve is kept");
                node.free_kib -= kib;
            }
            let rate = rate_mib * MIB / vms.len() as u64;
            for sum in sums.values() {
                prop_assert!(*sum <= u64::from(period) * rate + (SAVED_S * rate).max(LEAST));
            }
            world.carry_out(&moves);
        }
    }

    #[test]
    fn what_one_vm_does_changes_nothing_for_another(
        rate_mib in 0_u64..300,
        own in random_vm(),
        others in [random_vm(), random_vm()],
    ) {
        let run = |other: &RandomVm| {
            let vms = [own.clone(), other.clone()];
            let mut world = random_world(rate_mib, &[1 << 20; NODES], &vms);
            let mut own = Vec::new();
            for period in 1..=100 {
                wander(&mut world, &vms, period);
                let moves = world.period();
                own.extend(moves.iter().filter(|(vm, _)| *vm == 1).map(|(_, step)| (period, step.clone())));
                world.carry_out(&moves);
            }
            own
        };
        prop_assert_eq!(run(&others[0]), run(&others[1]));
    }
}
