//! Properties of publishing, over random histories of moves.

use proptest::prelude::*;
use std::collections::BTreeMap;
use vnuma_model::{
    CpuSet, DistanceMatrix, GuestNode, HostNode, HostTopology, MemoryBacking, Vcpu, VmDescription,
};
use vnuma_policy::{Observation, Publication, SettlePolicy, Settler, VmPlacement};

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
        mapping: None,
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
        devices: Vec::new(),
        memory_devices: Vec::new(),
    }
}

#[derive(Clone, Debug)]
struct Step {
    after_ms: u64,
    vcpu: u32,
    node: u32,
    deliberate: bool,
}

fn step() -> impl Strategy<Value = Step> {
    (prop_oneof![0..20u64, 0..400u64], 0..VCPUS, 0..HOST_NODES, any::<bool>())
        .prop_map(|(after_ms, vcpu, node, deliberate)| Step { after_ms, vcpu, node, deliberate })
}

/// A VM, its clock, and all that it was told.
struct Run {
    host: HostTopology,
    homes: Vec<u32>,
    vm: VmPlacement,
    settler: Settler,
    policy: SettlePolicy,
    now_ns: u64,
    publications: Vec<(u64, Publication)>,
}

impl Run {
    fn new(homes: Vec<u32>, policy: SettlePolicy) -> Self {
        let host = host();
        let mut vm = VmPlacement::new(&host, &vm(&homes));
        for id in 0..VCPUS {
            let at = homes[id as usize % homes.len()];
            vm.observe(&host, id, Some(Observation { node: at, deliberate: false, time_ns: 0 }));
        }
        vm.start_publishing(0);
        let settler = Settler::default();
        let mut run = Self { host, homes, vm, settler, policy, now_ns: 0, publications: Vec::new() };
        run.advance(0);
        run
    }

    /// Lets time pass, waking up exactly when the placement asks for it.
    fn advance(&mut self, to_ns: u64) {
        while let Some((due_ns, batch, why)) = self.settler.next(&self.policy, &self.vm, self.now_ns)
            && due_ns <= to_ns
        {
            if due_ns <= self.now_ns {
                let generation = self.publications.len() as u64 + 1;
                self.publications.push((self.now_ns, self.vm.publish(&batch, why, generation, self.now_ns)));
            }
            self.now_ns = self.now_ns.max(due_ns);
        }
        self.now_ns = to_ns;
    }

    fn observe(&mut self, step: &Step) {
        let observation = Observation { node: step.node, deliberate: step.deliberate, time_ns: self.now_ns };
        self.vm.observe(&self.host, step.vcpu, Some(observation));
        self.advance(self.now_ns);
    }

    fn distance(&self, node: u32, guest_node: u32) -> u8 {
        self.host.distance(node, self.homes[guest_node as usize]).expect("known")
    }

    fn nearest(&self, node: u32) -> u8 {
        (0..self.homes.len() as u32).map(|guest| self.distance(node, guest)).min().expect("some")
    }

    /// The guest node that was published last.
    fn published(&self, vcpu: u32) -> u32 {
        let (_, last) = self.publications.last().expect("one at least");
        last.vcpus.iter().find(|(id, _)| *id == vcpu).expect("published").1
    }

    fn in_last_second(&self) -> usize {
        self.publications.iter().filter(|(at, _)| at + 1000 * MS > self.now_ns).count()
    }
}

fn runs() -> impl Strategy<Value = (Vec<u32>, SettlePolicy, Vec<Step>)> {
    let homes = prop::collection::vec(0..HOST_NODES, 1..=4);
    let policy =
        (0..400u64, 0..400u64, 0..3000u64, 1..5u32).prop_map(|(dwell, calm_dwell, calm, max_per_second)| {
            let [dwell_ns, calm_dwell_ns, calm_ns] = [dwell, calm_dwell, calm].map(|ms| ms * MS);
            SettlePolicy { dwell_ns, calm_dwell_ns, calm_ns, max_per_second }
        });
    (homes, policy, prop::collection::vec(step(), 0..60))
}

proptest! {
    #[test]
    fn the_truth_is_published_in_the_end((homes, policy, steps) in runs()) {
        let mut run = Run::new(homes.clone(), policy);
        let mut at: BTreeMap<u32, u32> = (0..VCPUS).map(|id| (id, homes[id as usize % homes.len()])).collect();
        for step in &steps {
            run.advance(run.now_ns + step.after_ms * MS);
            run.observe(step);
            at.insert(step.vcpu, step.node);
        }
        run.advance(run.now_ns + 60_000 * MS);
        for (vcpu, node) in at {
            let published = run.published(vcpu);
            prop_assert_eq!(run.distance(node, published), run.nearest(node), "vCPU {} at {}", vcpu, node);
        }
        prop_assert_eq!(run.settler.next(&policy, &run.vm, run.now_ns), None);
    }

    #[test]
    fn nothing_is_published_twice_and_the_cap_holds((homes, policy, steps) in runs()) {
        let mut run = Run::new(homes, policy);
        for step in &steps {
            run.advance(run.now_ns + step.after_ms * MS);
            run.observe(step);
        }
        run.advance(run.now_ns + 60_000 * MS);
        for pair in run.publications.windows(2) {
            prop_assert_ne!(&pair[0].1.vcpus, &pair[1].1.vcpus);
        }
        let cap = policy.max_per_second as usize;
        for window in run.publications.windows(cap + 1) {
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
            if step.deliberate && !full {
                let published = run.published(step.vcpu);
                prop_assert_eq!(run.distance(step.node, published), run.nearest(step.node));
            }
        }
    }

    /// A vCPU that drifts is published on another node only after it has been wrong, without a break, for the dwell:
    /// the short one at least, and the long one if it was wrong within the calm before.
    #[test]
    fn drift_is_not_published_before_its_dwell((homes, policy, steps) in runs()) {
        let mut run = Run::new(homes.clone(), policy);
        let mut at: [u32; VCPUS as usize] = std::array::from_fn(|id| homes[id % homes.len()]);
        // Since when each vCPU is farther from its published node than it has to be.
        let mut wrong_since: [Option<u64>; VCPUS as usize] = [None; VCPUS as usize];
        let mut right_since: [Option<u64>; VCPUS as usize] = [None; VCPUS as usize];
        let dwell = |right: Option<u64>, wrong: u64| match right {
            Some(right) if wrong - right < policy.calm_ns => policy.dwell_ns,
            _ => policy.dwell_ns.min(policy.calm_dwell_ns),
        };
        for step in steps.iter().map(|step| Step { deliberate: false, ..step.clone() }) {
            let mut before: Vec<u32> = (0..VCPUS).map(|vcpu| run.published(vcpu)).collect();
            let from = run.publications.len();
            run.advance(run.now_ns + step.after_ms * MS);
            for (time_ns, publication) in &run.publications[from..] {
                for &(vcpu, node) in &publication.vcpus {
                    let index = vcpu as usize;
                    if node == before[index] {
                        continue;
                    }
                    before[index] = node;
                    let since = wrong_since[index].take();
                    let waited = since.is_some_and(|since| time_ns - since >= dwell(right_since[index], since));
                    prop_assert!(waited, "{vcpu} at {time_ns}");
                    right_since[index] = Some(*time_ns);
                }
            }
            run.observe(&step);
            at[step.vcpu as usize] = step.node;
            for vcpu in 0..VCPUS {
                let index = vcpu as usize;
                let wrong = run.distance(at[index], run.published(vcpu)) != run.nearest(at[index]);
                if !wrong && wrong_since[index].is_some() {
                    right_since[index] = Some(run.now_ns);
                }
                wrong_since[index] = if wrong { wrong_since[index].or(Some(run.now_ns)) } else { None };
            }
        }
    }

    #[test]
    fn ties_never_move_a_vcpu((homes, policy, steps) in runs()) {
        let mut run = Run::new(homes, policy);
        for step in &steps {
            run.advance(run.now_ns + step.after_ms * MS);
            let before = run.published(step.vcpu);
            let count = run.publications.len();
            let step = Step { deliberate: true, ..step.clone() };
            run.observe(&step);
            let after = run.published(step.vcpu);
            if run.publications.len() > count && run.distance(step.node, before) == run.nearest(step.node) {
                prop_assert_eq!(before, after, "it was as good as any");
            }
        }
    }
}
