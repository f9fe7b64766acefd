//! Scheduling of vCPUs over the host's nodes by what their memory accesses show.
//!
//! ```text
//!   counters of a period ──▶ analyzer ──▶ type, memory node affinity, LLC access pressure of each vCPU
//!                                              │
//!              ┌───────────────────────────────┴──────────────┐
//!         partition (Algorithm 1)   balance (Algorithm 2)   vprobe, brm
//!              └───────────────────────────────┬──────────────┘
//!                                              ▼
//!                        Decision: which vCPU is confined to which place, and why
//! ```
//!
//! The analyzer and the two algorithms are those of *vProbe: Scheduling Virtual Machines on NUMA Systems* (CLUSTER 2016).
//! [`Policy::VprobePaper`] has them as printed; [`Policy::Vprobe`] is what a host with operators, SMT and several tenants
//! needs. The others are what the paper compares itself with.
//!
//! Everything is a function of its input and of what the [`Scheduler`] remembers: no I/O, no clock, no randomness but a
//! seed. Equal input gives equal output.

pub mod analyzer;
pub mod balance;
mod brm;
pub mod entitlement;
mod machine;
pub mod memory;
mod paper;
pub mod partition;
mod sample;
mod vprobe;

pub use machine::{Domain, Machine, Node, Place, Reach};
pub use sample::{Counts, CpuSample, Input, Standing, VcpuKey, VcpuSample};

use crate::world::VmId;
use analyzer::{Adaptive, Bounds, VcpuType};
use balance::{RunQueue, RunQueues, Waiting};
use sample::{Sums, remote_share};
use std::str::FromStr;
use strum::VariantNames;
use vnuma_model::{HostNodeId, Steal};

/// How vCPUs are scheduled.
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray, VariantNames)]
#[strum(serialize_all = "kebab-case")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Policy {
    /// Nothing is counted, nothing is done.
    #[default]
    Off,
    /// Everything is counted and shown, nothing is done.
    Observe,
    /// The Credit scheduler's stealing, which knows no nodes.
    Credit,
    /// Periodical partitioning with the Credit scheduler's stealing.
    VcpuP,
    /// NUMA-aware load balance without partitioning.
    Lb,
    /// Bias random vCPU migration.
    Brm,
    /// Both algorithms of the paper as printed.
    VprobePaper,
    /// vnuma's own.
    Vprobe,
}

impl Policy {
    /// All of them.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Its name.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Does it move vCPUs?
    pub fn acts(self) -> bool {
        self.stealing().is_some()
    }

    /// Which vCPUs idle CPUs take between two periods, if a scheduler in the kernel has them. `None`: it does not act.
    pub fn stealing(self) -> Option<Steal> {
        match self {
            Self::Off | Self::Observe => None,
            Self::Credit | Self::VcpuP => Some(Steal::Blindly),
            Self::Brm => Some(Steal::WithinPlaces),
            Self::Lb | Self::VprobePaper | Self::Vprobe => Some(Steal::ByPressure),
        }
    }

    /// A host has one way to steal: that of the policies which act, if they agree, else by pressure.
    pub fn stealing_of_host(policies: impl IntoIterator<Item = Self>) -> Steal {
        let mut all = policies.into_iter().filter_map(Self::stealing);
        let first = all.next().unwrap_or_default();
        if all.all(|other| other == first) { first } else { Steal::ByPressure }
    }
}

/// A name that no policy has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no policy `{0}`; there are {names}", names = Policy::VARIANTS.join(", "))]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;
    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let known = Self::ALL.iter().copied().find(|policy| policy.name() == name);
        known.ok_or_else(|| UnknownPolicy(name.chars().take(40).flat_map(char::escape_debug).collect()))
    }
}

/// What an operator may set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Bounds between the types, in references per thousand instructions.
    pub bounds: Bounds,
    /// They follow the loads that run.
    pub adaptive_bounds: bool,
    /// Moves of a vCPU that `vprobe` may make at once.
    pub burst: u32,
    /// Periods after which it may make another one.
    pub rest_periods: u32,
    /// Periods in a row in which a vCPU has to wait to be stolen whatever its pressure.
    pub starve_periods: u32,
    /// Moves of other VMs that one VM may cause at once.
    pub budget: u32,
    /// Periods after which it may cause another one.
    pub budget_rest_periods: u32,
    /// Share of a vCPU's time that a move has to save, 0 to 1.
    pub min_gain: f64,
    /// Of the random choices of `brm`.
    pub seed: u64,
    /// Memory that `vprobe` may move in a second, of all VMs together; 0: none.
    pub memory_bytes_per_s: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            bounds: Bounds::default(),
            adaptive_bounds: false,
            burst: 2,
            rest_periods: 10,
            starve_periods: 3,
            budget: 4,
            budget_rest_periods: 15,
            min_gain: 0.02,
            seed: 1,
            memory_bytes_per_s: 0,
        }
    }
}

/// What a period showed of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Analysis {
    /// Which.
    pub key: VcpuKey,
    /// Whether it may be moved.
    pub standing: Standing,
    /// Its node, by position.
    pub node: Option<usize>,
    /// LLC access pressure (equation 2). `None`: not counted, or it did not run.
    pub pressure: Option<f64>,
    /// Its type (equation 3).
    pub kind: Option<VcpuType>,
    /// Memory node affinity (equation 1), by position.
    pub affinity: Option<usize>,
    /// Share of its memory accesses that leave its node.
    pub remote_share: Option<f64>,
}

/// What made a policy act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The periodical partitioning (Algorithm 1).
    Partitioned,
    /// A CPU was idle (Algorithm 2, or the Credit scheduler).
    Stolen,
    /// A CPU was idle, and the vCPU had been waiting for too long.
    Starved,
    /// Its memory is there.
    Memory,
    /// Others take its cache.
    Contention,
    /// More CPU time is wanted there than there is.
    Overload,
    /// It makes room for another one.
    Swapped,
    /// It is kept where it is.
    Kept,
    /// Chance, with a bias.
    Random,
    /// It needs no place any more.
    Calm,
    /// Its VM has another policy now, or none; or the host has changed.
    SwitchedOff,
}

impl Cause {
    /// For the log and for `watch`.
    pub fn text(self) -> &'static str {
        match self {
            Self::Partitioned => "periodical partitioning",
            Self::Stolen => "a CPU there was idle",
            Self::Starved => "it waited too long for a CPU",
            Self::Memory => "its memory is there",
            Self::Contention => "others take its last-level cache",
            Self::Overload => "too much CPU time is wanted where it is",
            Self::Swapped => "it makes room for another vCPU",
            Self::Kept => "it is kept where it is",
            Self::Random => "chance, biased by its uncore penalty",
            Self::Calm => "it hardly uses memory any more",
            Self::SwitchedOff => "its policy does not apply any more",
        }
    }
}

/// Figures of a vCPU at a node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// The node, by the kernel's number.
    pub node: Option<HostNodeId>,
    /// Share of its memory accesses that leave the node.
    pub remote_share: Option<f64>,
}

/// Why a step is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Why {
    /// The policy that wants it.
    pub policy: Policy,
    /// What made it act.
    pub cause: Cause,
    /// LLC access pressure.
    pub pressure: Option<f64>,
    /// Where it is.
    pub before: Figures,
    /// Where it goes, and what is expected there.
    pub expected: Figures,
    /// The other VM that is the reason, and whose budget the move is on.
    pub caused_by: Option<VmId>,
}

/// A vCPU is confined to a place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placed {
    /// Which.
    pub key: VcpuKey,
    /// Where, within its operator's mask. `None`: it has that mask again.
    pub to: Option<Place>,
    /// Why.
    pub why: Why,
}

/// What follows from a period.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// Of each vCPU, in the order of the input.
    pub analysis: Vec<Analysis>,
    /// At most one for each vCPU, in the order of the input.
    pub steps: Vec<Placed>,
    /// Bounds that the types follow from.
    pub bounds: Bounds,
}

/// A policy and what it remembers from period to period, by positions in the machine: another machine needs another
/// scheduler. None of that has to survive: one that starts anew decides from what it sees.
#[derive(Clone, Debug)]
pub struct Scheduler {
    policy: Policy,
    settings: Settings,
    adaptive: Adaptive,
    brm: brm::Memory,
    vprobe: vprobe::Memory,
}

/// From this share of a period on a CPU counts as idle.
const IDLE: f64 = 0.5;
/// From this share of a period on a vCPU counts as waiting.
const WAITS: f64 = 0.1;

impl Scheduler {
    /// One that remembers nothing yet.
    pub fn new(policy: Policy, settings: Settings) -> Self {
        Self {
            policy,
            adaptive: Adaptive::new(settings.bounds),
            brm: brm::Memory::new(settings.seed),
            vprobe: vprobe::Memory::default(),
            settings,
        }
    }

    /// Its policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Other bounds from now on, which no load changes.
    pub fn set_bounds(&mut self, bounds: Bounds) {
        self.settings = Settings { bounds, adaptive_bounds: false, ..self.settings };
    }

    /// A period has ended.
    pub fn decide(&mut self, input: &Input<'_>) -> Decision {
        if self.policy == Policy::Off {
            return Decision::default();
        }
        let bounds = match self.settings.adaptive_bounds {
            true => self.adaptive.bounds(),
            false => self.settings.bounds,
        };
        let mut analysis = Vec::with_capacity(input.vcpus.len());
        let mut vprobe =
            (self.policy == Policy::Vprobe).then(|| self.vprobe.begin(&self.settings, bounds, input));
        for (at, vcpu) in input.vcpus.iter().enumerate() {
            let sums = vcpu.counts.as_ref().map(|counts| Sums::of(&counts.accesses)).unwrap_or_default();
            let one = analyze(input, vcpu, bounds, sums);
            if let Some(vprobe) = &mut vprobe {
                // Now, as the counts of a large host do not stay in the CPU's cache until all are analyzed.
                vprobe.observe(at, vcpu, &one, sums);
            }
            analysis.push(one);
        }
        if self.settings.adaptive_bounds {
            self.adaptive.learn(input.vcpus.iter().filter_map(|vcpu| miss_rate(vcpu.counts.as_ref()?)));
        }
        let steps = match self.policy {
            Policy::Off | Policy::Observe => Vec::new(),
            Policy::Credit | Policy::VcpuP | Policy::Lb | Policy::VprobePaper => {
                paper::decide(self.policy, input, &analysis)
            }
            Policy::Brm => self.brm.decide(input, &analysis),
            Policy::Vprobe => self.vprobe.decide(&self.settings, input, &analysis),
        };
        Decision { analysis, steps, bounds }
    }
}

/// Pressure and miss rate.
fn miss_rate(counts: &Counts) -> Option<(f64, f64)> {
    let pressure = analyzer::llc_access_pressure(counts)?;
    (counts.llc_references > 0).then(|| (pressure, counts.llc_misses as f64 / counts.llc_references as f64))
}

fn analyze(input: &Input<'_>, vcpu: &VcpuSample, bounds: Bounds, sums: Sums) -> Analysis {
    let counts = vcpu.counts.as_ref();
    let pressure = counts.and_then(analyzer::llc_access_pressure);
    let node = vcpu.node(input.machine);
    Analysis {
        key: vcpu.key,
        standing: vcpu.standing(input),
        node,
        pressure,
        kind: pressure.map(|pressure| analyzer::vcpu_type(pressure, bounds)),
        affinity: analyzer::affinity(sums),
        remote_share: counts.zip(node).and_then(|(counts, node)| remote_share(sums.total, counts.at(node))),
    }
}

/// The step that takes a vCPU to a place.
fn placed(
    input: &Input<'_>,
    at: usize,
    analysis: &Analysis,
    to: Option<Place>,
    why: (Policy, Cause, Option<VmId>),
) -> Placed {
    let node = to.map(|place| input.machine.node_at(place));
    let remote_share =
        node.zip(input.vcpus[at].counts.as_ref()).and_then(|(node, counts)| counts.remote_share(node));
    placed_with(input.machine, analysis, to, why, remote_share)
}

/// The same, if the share of its accesses that will be remote is known already.
fn placed_with(
    machine: &Machine,
    analysis: &Analysis,
    to: Option<Place>,
    (policy, cause, caused_by): (Policy, Cause, Option<VmId>),
    remote_share: Option<f64>,
) -> Placed {
    let node = to.map(|place| machine.node_at(place));
    let why = Why {
        policy,
        cause,
        pressure: analysis.pressure,
        before: Figures {
            node: analysis.node.map(|node| machine.nodes[node].id),
            remote_share: analysis.remote_share,
        },
        expected: Figures { node: node.map(|node| machine.nodes[node].id), remote_share },
        caused_by,
    };
    Placed { key: analysis.key, to, why }
}

/// CPUs that had nothing to do for most of the period, and may be used.
fn idle_cpus<'a>(input: &Input<'a>) -> impl Iterator<Item = u32> + use<'a> {
    let least = (input.period_ns as f64 * IDLE) as u64;
    let machine = input.machine;
    let idle = input.cpus.iter().filter(move |cpu| cpu.idle_ns >= least);
    idle.map(|cpu| cpu.cpu).filter(move |&cpu| machine.domain_of(cpu).is_some())
}

/// Run queues of the CPUs as the period showed them. `load` says how much a vCPU adds to the load of its queue. `wait` gives
/// how long it has been waiting, in the unit of the stealing that follows, and nothing for one that may not be stolen.
fn run_queues(
    input: &Input<'_>,
    analysis: &[Analysis],
    load: impl Fn(&VcpuSample) -> u32,
    wait: impl Fn(usize) -> Option<u64>,
) -> RunQueues {
    let mut queues: Vec<RunQueue> = Vec::new();
    let mut by_cpu: Vec<usize> = Vec::new();
    for (at, vcpu) in input.vcpus.iter().enumerate().filter(|(_, vcpu)| vcpu.ran_ns + vcpu.waited_ns > 0) {
        let Some((cpu, node)) = vcpu.cpu.and_then(|cpu| Some((cpu, input.machine.node_of(cpu)?))) else {
            continue;
        };
        if by_cpu.len() <= cpu as usize {
            by_cpu.resize(cpu as usize + 1, usize::MAX);
        }
        if by_cpu[cpu as usize] == usize::MAX {
            by_cpu[cpu as usize] = queues.len();
            queues.push(RunQueue { cpu, node, workload: 0, runnable: Vec::new() });
        }
        let queue = &mut queues[by_cpu[cpu as usize]];
        let load = load(vcpu);
        queue.workload = queue.workload.saturating_add(load);
        let waits = vcpu.wait_share(input.period_ns) >= WAITS && analysis[at].standing == Standing::Free;
        if let Some(waited) = waits.then(|| wait(at)).flatten() {
            let pressure = analysis[at].pressure.unwrap_or(0.0);
            queue.runnable.push(Waiting { vcpu: at, pressure, waited, load });
        }
    }
    RunQueues::new(input.machine.nodes.len(), queues)
}
