//! Properties of telling, over random histories of moves.

use proptest::prelude::*;
use std::collections::BTreeMap;
use vnuma_placement::{Observation, SettlePolicy, Telling, VmPlacement};
use vnuma_topology::{
    CpuSet, DistanceMatrix, GuestNode, HostNode, HostTopology, MemoryBacking, Vcpu, VmDescription,
};

const MS: u64 = 1_000_000;
const HOST_NODES: u32 = 4;
const VCPUS: u32 = 3;

fn host() -> HostTopology {
    let rows = vec![vec![10, 16, 32, 32], vec![16, 10, 32, 32], vec![32, 32, 10, 16], vec![32, 32, 16, 10]];
    let node = |id| HostNode { id, cpus: CpuSet::from_iter([id]), ..HostNode::default() };
    HostTopology {
        nodes: (0..HOST_NODES).map(node).collect(),
        distances: DistanceMatrix::new(rows).expect("square"),
        ..HostTopology::default()
    }
}

fn vm(homes: &[u32]) -> VmDescription {
    let memory = |home| MemoryBacking {
        id: String::new(),
        size_bytes: 1 << 30,
        policy: "bind".into(),
        host_nodes: vec![home],
        resident_kib: Vec::new(),
    };
    let node = |(id, home): (usize, &u32)| GuestNode {
        id: id as u32,
        memory_bytes: 1 << 30,
        memory: Some(memory(*home)),
    };
    let boot = |id| Some(id % homes.len() as u32);
    VmDescription {
        name: "vm".into(),
        pid: 1,
        guest_nodes: homes.iter().enumerate().map(node).collect(),
        vcpus: (0..VCPUS).map(|id| Vcpu { index: id, apic_id: id, boot_node: boot(id), tid: 1 }).collect(),
        run_state: "running".into(),
        spare_slots: std::collections::BTreeMap::new(),
    }
}

#[derive(Clone, Debug)]
struct Step {
    after_ms: u64,
    vcpu: u32,
    node: u32,
    pinned: bool,
}

fn step() -> impl Strategy<Value = Step> {
    (prop_oneof![0..20u64, 0..400u64], 0..VCPUS, 0..HOST_NODES, any::<bool>())
        .prop_map(|(after_ms, vcpu, node, pinned)| Step { after_ms, vcpu, node, pinned })
}

/// A VM, its clock, and all that it was told.
struct Run {
    host: HostTopology,
    homes: Vec<u32>,
    vm: VmPlacement,
    now_ns: u64,
    tellings: Vec<(u64, Telling)>,
}

impl Run {
    fn new(homes: Vec<u32>, policy: SettlePolicy) -> Self {
        let host = host();
        let mut vm = VmPlacement::new(&host, &vm(&homes), policy);
        for id in 0..VCPUS {
            let at = homes[id as usize % homes.len()];
            vm.observe(&host, id, Some(Observation { node: at, pinned: false, time_ns: 0 }));
        }
        let first = vm.start_telling(1, 0);
        Self { host, homes, vm, now_ns: 0, tellings: vec![(0, first)] }
    }

    /// Lets time pass, waking up exactly when the placement asks for it.
    fn advance(&mut self, to_ns: u64) {
        while let Some(deadline) = self.vm.next_deadline_ns().filter(|&deadline| deadline <= to_ns) {
            self.now_ns = self.now_ns.max(deadline);
            let generation = self.tellings.len() as u64 + 1;
            let telling = self.vm.take_due(generation, self.now_ns).expect("the deadline was announced");
            self.tellings.push((self.now_ns, telling));
        }
        self.now_ns = to_ns;
    }

    fn observe(&mut self, step: &Step) {
        let observation = Observation { node: step.node, pinned: step.pinned, time_ns: self.now_ns };
        self.vm.observe(&self.host, step.vcpu, Some(observation));
        self.advance(self.now_ns);
    }

    fn distance(&self, node: u32, guest_node: u32) -> u8 {
        self.host.distance(node, self.homes[guest_node as usize]).expect("known")
    }

    fn nearest(&self, node: u32) -> u8 {
        (0..self.homes.len() as u32).map(|guest| self.distance(node, guest)).min().expect("some")
    }

    fn told(&self, vcpu: u32) -> (u32, bool) {
        let (_, last) = self.tellings.last().expect("one at least");
        let told = last.vcpus.iter().find(|told| told.apic_id == vcpu).expect("told");
        (told.placed.node, told.placed.approximate)
    }

    fn in_last_second(&self) -> usize {
        self.tellings.iter().filter(|(at, _)| at + 1000 * MS > self.now_ns).count()
    }
}

fn runs() -> impl Strategy<Value = (Vec<u32>, SettlePolicy, Vec<Step>)> {
    let homes = prop::collection::vec(0..HOST_NODES, 1..=4);
    let policy = (0..400u64, 1..5u32)
        .prop_map(|(ms, max_per_second)| SettlePolicy { dwell_ns: ms * MS, max_per_second });
    (homes, policy, prop::collection::vec(step(), 0..60))
}

proptest! {
    #[test]
    fn the_truth_is_told_in_the_end((homes, policy, steps) in runs()) {
        let mut run = Run::new(homes.clone(), policy);
        let mut at: BTreeMap<u32, u32> = (0..VCPUS).map(|id| (id, homes[id as usize % homes.len()])).collect();
        for step in &steps {
            run.advance(run.now_ns + step.after_ms * MS);
            run.observe(step);
            at.insert(step.vcpu, step.node);
        }
        run.advance(run.now_ns + 60_000 * MS);
        for (vcpu, node) in at {
            let (told, approximate) = run.told(vcpu);
            prop_assert_eq!(run.distance(node, told), run.nearest(node), "vCPU {} at {}", vcpu, node);
            prop_assert_eq!(approximate, !homes.contains(&node));
        }
        prop_assert_eq!(run.vm.next_deadline_ns(), None);
    }

    #[test]
    fn nothing_is_told_twice_and_the_cap_holds((homes, policy, steps) in runs()) {
        let mut run = Run::new(homes, policy);
        for step in &steps {
            run.advance(run.now_ns + step.after_ms * MS);
            run.observe(step);
        }
        run.advance(run.now_ns + 60_000 * MS);
        for pair in run.tellings.windows(2) {
            prop_assert_ne!(&pair[0].1.vcpus, &pair[1].1.vcpus);
        }
        let cap = policy.max_per_second as usize;
        for window in run.tellings.windows(cap + 1) {
            prop_assert!(window[cap].0 - window[0].0 >= 1000 * MS);
        }
    }

    #[test]
    fn pinning_waits_for_the_cap_at_most((homes, policy, steps) in runs()) {
        let mut run = Run::new(homes, policy);
        for step in &steps {
            run.advance(run.now_ns + step.after_ms * MS);
            let full = run.in_last_second() >= policy.max_per_second as usize;
            run.observe(step);
            if step.pinned && !full {
                let (told, _) = run.told(step.vcpu);
                prop_assert_eq!(run.distance(step.node, told), run.nearest(step.node));
            }
        }
    }

    #[test]
    fn drift_is_not_told_before_its_dwell((homes, policy, steps) in runs()) {
        let mut run = Run::new(homes, policy);
        let mut right_until = [0u64; VCPUS as usize];
        for step in steps.iter().map(|step| Step { pinned: false, ..step.clone() }) {
            run.advance(run.now_ns + step.after_ms * MS);
            let before = run.tellings.len();
            if run.vm.vcpu(step.vcpu).map(|v| v.told) == run.vm.vcpu(step.vcpu).map(|v| v.right) {
                right_until[step.vcpu as usize] = run.now_ns;
            }
            run.observe(&step);
            prop_assert!(policy.dwell_ns == 0 || run.tellings.len() == before || run.now_ns - right_until[step.vcpu as usize] >= policy.dwell_ns);
        }
    }

    #[test]
    fn ties_never_move_a_vcpu((homes, policy, steps) in runs()) {
        let mut run = Run::new(homes, policy);
        for step in &steps {
            run.advance(run.now_ns + step.after_ms * MS);
            let (before, _) = run.told(step.vcpu);
            let count = run.tellings.len();
            let step = Step { pinned: true, ..step.clone() };
            run.observe(&step);
            let (after, _) = run.told(step.vcpu);
            if run.tellings.len() > count && run.distance(step.node, before) == run.nearest(step.node) {
                prop_assert_eq!(before, after, "it was as good as any");
            }
        }
    }
}
