//! A host, its vCPUs and what a policy makes of them.

use std::collections::BTreeMap;
use vnuma_model::{CacheGroup, CpuLayout, CpuSet, DistanceMatrix, HostNode, HostTopology};
use vnuma_policy::scheduling::{
    Cause, Counts, CpuSample, Decision, Input, Machine, Place, Policy, Reach, Scheduler, Settings, VcpuKey,
    VcpuSample,
    entitlement::{CpuGroup, Want, entitle},
};

pub const PERIOD_NS: u64 = 1_000_000_000;

/// A host of equal nodes: caches of each, CPUs of each cache. Nodes are 21 from each other.
pub fn host(nodes: u32, caches: u32, cpus: u32) -> HostTopology {
    let of_node = caches * cpus;
    let range = |first: u32, count: u32| (first..first + count).collect::<CpuSet>();
    let row = |from: u32| (0..nodes).map(|to| if from == to { 10 } else { 21 }).collect::<Vec<u8>>();
    HostTopology {
        nodes: (0..nodes)
            .map(|id| HostNode { id, cpus: range(id * of_node, of_node), ..HostNode::default() })
            .collect(),
        distances: DistanceMatrix::new((0..nodes).map(row).collect()).expect("square"),
        caches: (0..nodes * caches)
            .map(|at| CacheGroup { level: 3, size_kib: 1 << 14, cpus: range(at * cpus, cpus) })
            .collect(),
        ..HostTopology::default()
    }
}

/// Thrashing, fitting and friendly loads with their accesses.
pub fn thrashing(accesses: &[u64]) -> Counts {
    let llc_misses = accesses.iter().sum::<u64>();
    let llc_references = llc_misses * 10 / 9;
    Counts {
        instructions: llc_references * 1000 / 30,
        llc_references,
        llc_misses,
        accesses: accesses.to_vec(),
    }
}

pub fn fitting(accesses: &[u64]) -> Counts {
    let llc_misses = accesses.iter().sum::<u64>();
    let llc_references = llc_misses * 5;
    Counts {
        instructions: llc_references * 1000 / 15,
        llc_references,
        llc_misses,
        accesses: accesses.to_vec(),
    }
}

pub fn friendly(nodes: usize) -> Counts {
    let mut accesses = vec![0; nodes];
    accesses[0] = 100;
    Counts { instructions: 1_000_000_000, llc_references: 100_000, llc_misses: 100, accesses }
}

/// A host, its vCPUs and what a policy makes of them, period by period.
pub struct World {
    pub machine: Machine,
    pub masks: Vec<CpuSet>,
    pub vcpus: Vec<VcpuSample>,
    pub cpus: Vec<CpuSample>,
    pub period_ns: u64,
    pub scheduler: Scheduler,
}

impl World {
    pub fn new(host: &HostTopology, isolated: CpuSet, policy: Policy, settings: Settings) -> Self {
        let machine = Machine::new(host, &CpuLayout { isolated, cores: Vec::new() });
        let all = host.nodes.iter().flat_map(|node| node.cpus.iter()).collect::<CpuSet>();
        let cpus = all.iter().map(|cpu| CpuSample { cpu, idle_ns: 0 }).collect();
        Self {
            machine,
            masks: vec![all],
            vcpus: Vec::new(),
            cpus,
            period_ns: PERIOD_NS,
            scheduler: Scheduler::new(policy, settings),
        }
    }

    pub fn plain(nodes: u32, caches: u32, cpus: u32, policy: Policy) -> Self {
        Self::new(&host(nodes, caches, cpus), CpuSet::new(), policy, Settings::default())
    }

    pub fn mask(&mut self, mask: CpuSet) -> usize {
        self.masks.push(mask);
        self.masks.len() - 1
    }

    /// Adds a vCPU that runs all the time.
    pub fn add(&mut self, vm: u64, vcpu: u32, cpu: u32, counts: Counts) -> usize {
        let key = VcpuKey { vm, vcpu };
        self.vcpus.push(VcpuSample {
            key,
            cpu: Some(cpu),
            assigned: None,
            reach: 0,
            real_time: false,
            managed: true,
            weight: 100,
            ran_ns: PERIOD_NS,
            waited_ns: 0,
            throttled_ns: 0,
            entitled_ns: PERIOD_NS,
            counts: Some(counts),
        });
        self.vcpus.sort_by_key(|vcpu| vcpu.key);
        self.vcpus.iter().position(|vcpu| vcpu.key == key).expect("it is there")
    }

    pub fn decide(&mut self) -> Decision {
        let reaches: Vec<Reach> = self.masks.iter().map(|mask| Reach::new(&self.machine, mask)).collect();
        let (machine, vcpus) = (&self.machine, &self.vcpus);
        let (cpus, period_ns) = (&self.cpus, self.period_ns);
        let input = Input { machine, reaches: &reaches, cpus, vcpus, period_ns };
        self.scheduler.decide(&input)
    }

    /// A period: what was decided is carried out. A vCPU that was moved runs on the first CPU of its new place.
    pub fn period(&mut self) -> Decision {
        let decision = self.decide();
        for step in &decision.steps {
            let vcpu = self.vcpus.iter_mut().find(|vcpu| vcpu.key == step.key).expect("known");
            vcpu.assigned = step.to;
            if let Some(place) = step.to {
                let cpus = self.machine.cpus(place, &self.masks[vcpu.reach]);
                if !vcpu.cpu.is_some_and(|cpu| cpus.contains(cpu)) {
                    vcpu.cpu = cpus.iter().next();
                }
            }
        }
        decision
    }

    /// All vCPUs are in a group of their VM, with this weight and limit.
    pub fn divide(&mut self, groups: &BTreeMap<u64, (u32, Option<u64>)>) {
        let group = |(weight, limit_permille): &(u32, Option<u64>)| CpuGroup {
            parent: None,
            weight: *weight,
            limit_permille: *limit_permille,
        };
        let known: Vec<CpuGroup> = groups.values().map(group).collect();
        let want = |vcpu: &VcpuSample| Want {
            group: groups.keys().position(|vm| *vm == vcpu.key.vm),
            ran_ns: vcpu.ran_ns,
            waited_ns: vcpu.waited_ns,
            apart: vcpu.real_time,
        };
        let wants: Vec<Want> = self.vcpus.iter().map(want).collect();
        let shares = entitle(&known, &wants, self.cpus.len() as u64 * PERIOD_NS, PERIOD_NS);
        for (vcpu, share) in self.vcpus.iter_mut().zip(shares) {
            vcpu.throttled_ns = vcpu.waited_ns - share.waited_ns;
            (vcpu.waited_ns, vcpu.entitled_ns) = (share.waited_ns, share.entitled_ns);
        }
    }

    pub fn node(&self, at: usize) -> Option<usize> {
        self.vcpus[at].node(&self.machine)
    }
}

/// (VM, vCPU, node, why) of each step.
pub fn shown(world: &World, decision: &Decision) -> Vec<(u64, u32, Option<usize>, Cause)> {
    let node = |place: Option<Place>| place.map(|place| world.machine.node_at(place));
    decision.steps.iter().map(|s| (s.key.vm, s.key.vcpu, node(s.to), s.why.cause)).collect()
}
