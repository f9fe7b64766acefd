//! What a decision costs on a large host: 4096 vCPUs of 1024 VMs on 64 nodes with two caches each.
//!
//! `cargo xtask bench decide` runs it and compares it with the goal.

#![expect(missing_docs, reason = "criterion's macros make functions without")]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use std::{hint::black_box, time::Duration};
use vnuma_model::{CacheGroup, CpuLayout, CpuSet, DistanceMatrix, HostNode, HostTopology};
use vnuma_policy::scheduling::{
    Counts, CpuSample, Input, Machine, Place, Policy, Reach, Scheduler, Settings, VcpuKey, VcpuSample,
};

const NODES: u32 = 64;
const CPUS_PER_CACHE: u32 = 16;
const CPUS: u32 = NODES * 2 * CPUS_PER_CACHE;
const VCPUS: u32 = 4096;
const PERIOD_NS: u64 = 1_000_000_000;

fn host() -> HostTopology {
    let range = |first: u32, count: u32| (first..first + count).collect::<CpuSet>();
    let node =
        |id| HostNode { id, cpus: range(id * 2 * CPUS_PER_CACHE, 2 * CPUS_PER_CACHE), ..HostNode::default() };
    // Sockets of four nodes.
    let distance = |from: u32, to: u32| match from == to {
        true => 10,
        false if from / 4 == to / 4 => 12,
        false => 32,
    };
    let rows = (0..NODES).map(|from| (0..NODES).map(|to| distance(from, to)).collect());
    HostTopology {
        nodes: (0..NODES).map(node).collect(),
        distances: DistanceMatrix::new(rows.collect()).expect("square"),
        caches: (0..NODES * 2)
            .map(|at| CacheGroup {
                level: 3,
                size_kib: 1 << 15,
                cpus: range(at * CPUS_PER_CACHE, CPUS_PER_CACHE),
            })
            .collect(),
        ..HostTopology::default()
    }
}

/// A mix: a third each thrashes, fits and is friendly. The memory of each is on two nodes, and a little of it on all.
fn vcpus(memory_at: impl Fn(u32) -> u32) -> Vec<VcpuSample> {
    (0..VCPUS)
        .map(|at| {
            let (references, misses) = [(30, 27), (15, 3), (1, 0)][at as usize % 3];
            let mut accesses = vec![misses; NODES as usize];
            accesses[memory_at(at) as usize % NODES as usize] += misses * 800_000;
            accesses[(memory_at(at) + 1) as usize % NODES as usize] += misses * 100_000;
            VcpuSample {
                key: VcpuKey { vm: u64::from(at / 4), vcpu: at % 4 },
                cpu: Some(at % CPUS),
                assigned: None,
                reach: 0,
                real_time: false,
                managed: true,
                weight: 100,
                ran_ns: PERIOD_NS * 4 / 10,
                waited_ns: if at % 7 == 0 { PERIOD_NS / 5 } else { 0 },
                throttled_ns: 0,
                entitled_ns: PERIOD_NS * 4 / 10,
                counts: Some(Counts {
                    instructions: 1_000_000_000,
                    llc_references: references * 1_000_000,
                    llc_misses: misses * 1_000_000,
                    accesses,
                }),
            }
        })
        .collect()
}

/// A host with its vCPUs as a policy left them after some periods.
struct Host {
    machine: Machine,
    reaches: Vec<Reach>,
    cpus: Vec<CpuSample>,
    vcpus: Vec<VcpuSample>,
    scheduler: Scheduler,
}

impl Host {
    fn new(policy: Policy) -> Self {
        let machine = Machine::new(&host(), &CpuLayout::default());
        let reaches = vec![Reach::new(&machine, &(0..CPUS).collect())];
        // Every eighth CPU has nothing to do.
        let idle = |cpu| if cpu % 8 == 0 { PERIOD_NS } else { PERIOD_NS / 10 };
        let cpus = (0..CPUS).map(|cpu| CpuSample { cpu, idle_ns: idle(cpu) }).collect();
        let scheduler = Scheduler::new(policy, Settings::default());
        Self { machine, reaches, cpus, vcpus: vcpus(|at| at * 7), scheduler }
    }

    /// Decides and carries it out.
    fn period(&mut self) {
        let input = Input {
            machine: &self.machine,
            reaches: &self.reaches,
            cpus: &self.cpus,
            vcpus: &self.vcpus,
            period_ns: PERIOD_NS,
        };
        for step in self.scheduler.decide(&input).steps {
            let at = (step.key.vm * 4 + u64::from(step.key.vcpu)) as usize;
            self.vcpus[at].assigned = step.to;
            let domain = match step.to {
                Some(Place::Cache(domain)) => self.machine.domains.get(domain),
                Some(Place::Node(node)) => self.machine.domains.get(self.machine.nodes[node].domains.start),
                None => None,
            };
            if let Some(domain) = domain {
                self.vcpus[at].cpu = domain.cpus.iter().nth(at % CPUS_PER_CACHE as usize);
            }
        }
    }

    fn measure(&self, criterion: &mut Criterion, name: &str) {
        let input = Input {
            machine: &self.machine,
            reaches: &self.reaches,
            cpus: &self.cpus,
            vcpus: &self.vcpus,
            period_ns: PERIOD_NS,
        };
        criterion.bench_function(name, |bencher| {
            let decide = |mut scheduler: Scheduler| (scheduler.decide(black_box(&input)), scheduler);
            bencher.iter_batched(|| self.scheduler.clone(), decide, BatchSize::LargeInput);
        });
    }
}

fn decide(criterion: &mut Criterion) {
    let measured = vcpus(|at| at * 7);
    for &policy in Policy::ALL.iter().filter(|policy| **policy != Policy::Off) {
        // In turn, as the speed of a shared machine changes.
        let yardstick = format!("yardstick/{policy}");
        criterion.bench_function(&yardstick, |bencher| bencher.iter(|| arithmetic(black_box(&measured))));
        // The first one, when everything has to be placed.
        let mut host = Host::new(policy);
        host.period();
        let mut first = Host::new(policy);
        // It knows the vCPUs already, as it does whenever it is not the very first period.
        first.scheduler = host.scheduler.clone();
        first.measure(criterion, &format!("decide/{policy}/all-move"));
        for _ in 0..12 {
            host.period();
        }
        host.measure(criterion, &format!("decide/{policy}/steady"));
        // Every vCPU's memory is elsewhere.
        host.vcpus.iter_mut().zip(vcpus(|at| at * 11 + 5)).for_each(|(old, new)| old.counts = new.counts);
        host.measure(criterion, &format!("decide/{policy}/changed"));
    }
}

/// What a decision must compute, whatever its policy is, as plain loops: for each vCPU the node that it accesses most, how hard it uses
/// its cache, and the order of all by that. The goal compares with it, so that a slow machine is slow for both.
fn arithmetic(vcpus: &[VcpuSample]) -> Vec<(f64, u32, usize)> {
    let one = |vcpu: &VcpuSample| {
        let counts = vcpu.counts.as_ref()?;
        let sum: u64 = counts.accesses.iter().sum();
        let (node, most) = counts.accesses.iter().enumerate().max_by_key(|(_, accesses)| **accesses)?;
        let pressure = counts.llc_references as f64 / counts.instructions as f64;
        Some((pressure * *most as f64 / sum as f64, vcpu.cpu?, node))
    };
    let mut found: Vec<_> = vcpus.iter().filter_map(one).collect();
    found.sort_by(|one, other| one.0.total_cmp(&other.0));
    found
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    targets = decide
}
criterion_main!(benches);
