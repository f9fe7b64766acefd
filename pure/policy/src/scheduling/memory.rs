//! Memory goes to its VM's vCPUs where these stay away from it.
//!
//! `vprobe` moves vCPUs to their memory. Where that cannot be, as masks of operators exclude the node or others have the room
//! there, the memory may come to the vCPUs instead. Pages are moved once and accesses are saved from then on, so that
//!
//! ```text
//!   price   pages * PAGE_PRICE
//!   saving  accesses to these pages in a period * (distance now - distance then), over all vCPUs of the VM
//!   moved   if saving over HORIZON_NS > MARGIN * price, and it is at least `min_gain` of the VM's time for memory
//! ```
//!
//! Accesses to a node are taken to be spread evenly over the VM's pages there.
//!
//! | promise | by |
//! |---|---|
//! | one VM's moves never delay another's | the host's rate is divided evenly among the VMs, and each has a [budget](crate::memory_budget) of its own |
//! | in `t` seconds a VM moves at most `(t + SAVED_S) * rate / VMs`, or [`LEAST`] more than `t * rate / VMs` | the budget |
//! | memory that came to a node stays there for [`HORIZON_NS`] | `arrived` |
//! | a node keeps its [reserve](NodeMemory::reserve_kib) | what is free, less what was decided |
//! | policies of memory, cpusets and huge pages are respected | [`VmMemory`] |
//! | nothing is moved while vCPUs are being placed | `held`: they have been where they are for some periods |

use super::{Input, Settings, Standing, VcpuSample};
use crate::{
    memory_budget::MemoryBudget,
    memory_move::{
        BASE_KIB, HORIZON_NS, LEAST, MARGIN, MemoryCause, MemoryReason, MemoryWhy, MoveMemory, NodeMemory,
        PAGE, PAGE_PRICE, TENTH_NS, bytes_of,
    },
    world::VmId,
};
use std::collections::BTreeMap;
use vnuma_model::ApicId;

/// Periods that vCPUs have to stay, if they cannot run where their memory is.
pub const HELD_CANNOT: u32 = 3;
/// Periods that they have to stay, if their policy keeps them elsewhere: it moves a vCPU again after as many.
pub const HELD_KEPT: u32 = 10;
/// A VM whose pages could not be moved rests for so long, nanoseconds.
pub const REST_NS: u64 = 600_000_000_000;
fn sum(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

/// Memory of a VM that may go to the same nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPart {
    /// Nodes that its policy names, by position. `None`: it has no policy, and may go anywhere.
    pub targets: Option<Vec<usize>>,
    /// How much of it lies on each node, by position, KiB.
    pub kib: Vec<u64>,
}

/// The memory of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmMemory {
    /// The VM.
    pub vm: VmId,
    /// What may be moved.
    pub parts: Vec<MemoryPart>,
    /// What stays (huge pages, interleaved memory), by position, KiB.
    pub fixed: Vec<u64>,
    /// Nodes that its cpuset lets it have memory of, by position.
    pub allowed: Vec<usize>,
    /// A move may begin: none is under way, none of its vCPUs is being placed, and its pages were counted since.
    pub ready: bool,
}

/// Everything that a decision is made of.
#[derive(Clone, Copy, Debug)]
pub struct MemoryInput<'a> {
    /// vCPUs and what they access. Those of the policy are managed.
    pub input: &'a Input<'a>,
    /// Nodes, by position.
    pub nodes: &'a [NodeMemory],
    /// VMs of the policy.
    pub vms: &'a [VmMemory],
    /// VMs that share the host's rate, these among them.
    pub sharers: usize,
    /// When the period ended.
    pub now_ns: u64,
}

/// A move that would pay: of all memory that can go from one node to another.
#[derive(Clone, Copy, Debug)]
struct Proposal {
    pair: (usize, usize),
    /// A period's saving, in tenths of a local access.
    saving: f64,
    /// The part of the saving by vCPUs that cannot run where the memory is.
    cannot: f64,
    movable_kib: u64,
    /// Accesses of a period that get remote by it, less those that get local.
    remote: f64,
}

/// What is remembered of a VM.
#[derive(Clone, Debug, Default)]
struct Remembered {
    budget: MemoryBudget,
    /// Where its vCPUs are that have a place.
    places: Vec<(ApicId, usize)>,
    /// The move that would have paid in the last periods, and how many these were.
    held: Option<((usize, usize), u32)>,
    /// When memory came to a node last.
    arrived: BTreeMap<usize, u64>,
    /// Before this time nothing is tried.
    rests_until_ns: u64,
}

/// Decides which memory is moved. Positions in the machine are remembered: another machine needs another one.
#[derive(Clone, Debug, Default)]
pub struct MemoryToVcpus {
    vms: BTreeMap<VmId, Remembered>,
}

impl MemoryToVcpus {
    /// A period has ended. At most one move for each VM.
    pub fn decide(&mut self, settings: &Settings, all: &MemoryInput<'_>) -> Vec<(VmId, MoveMemory)> {
        self.vms.retain(|vm, _| all.vms.iter().any(|known| known.vm == *vm));
        let rate = settings.memory_bytes_per_s;
        if rate == 0 || all.nodes.len() != all.input.machine.nodes.len() {
            return Vec::new();
        }
        let mut free: Vec<u64> = all.nodes.iter().map(NodeMemory::available).collect();
        let mut moves = Vec::new();
        for memory in all.vms {
            let known = self.vms.entry(memory.vm).or_default();
            known.budget.earn((rate, all.sharers), all.input.period_ns, PAGE);
            let flows = Flows::of(all.input, memory);
            let places = flows.places();
            if known.places != places {
                (known.places, known.held) = (places, None);
            }
            let barred = |node: usize| {
                known.arrived.get(&node).is_some_and(|&at| all.now_ns < at.saturating_add(HORIZON_NS))
            };
            let Some(best) = flows.best(settings, all, memory, barred) else {
                known.held = None;
                continue;
            };
            let held =
                known.held.filter(|(pair, _)| *pair == best.pair).map_or(0, |(_, periods)| periods) + 1;
            known.held = Some((best.pair, held));
            let cannot = best.cannot * 2.0 >= best.saving;
            let needed = if cannot { HELD_CANNOT } else { HELD_KEPT };
            if held < needed || !memory.ready || all.now_ns < known.rests_until_ns {
                continue;
            }
            let (from, to) = best.pair;
            let bytes = known.budget.left().min(bytes_of(best.movable_kib)).min(free[to]) / PAGE * PAGE;
            if bytes < LEAST {
                continue;
            }
            known.budget.spend(bytes);
            free[to] -= bytes;
            known.arrived.insert(to, all.now_ns);
            known.held = None;
            let nodes = &all.input.machine.nodes;
            moves.push((
                memory.vm,
                MoveMemory {
                    from: nodes[from].id,
                    to: nodes[to].id,
                    bytes,
                    page_kib: BASE_KIB,
                    reserve_kib: all.nodes[to].reserve_kib(),
                    within: None,
                    parts: None,
                    why: MemoryReason::Nearer(flows.why(&best, bytes, cannot, all.input.period_ns)),
                },
            ));
        }
        moves
    }

    /// A move has ended, after which so many bytes had moved, and so many had not: they are pinned or shared. A VM most of whose
    /// pages could not be moved rests for a while.
    pub fn ended(&mut self, vm: VmId, moved: u64, stayed: u64, now_ns: u64) {
        if let Some(known) = self.vms.get_mut(&vm).filter(|_| moved == 0 || stayed > moved) {
            known.rests_until_ns = now_ns.saturating_add(REST_NS);
        }
    }
}

/// A vCPU that accesses memory.
struct Flow<'a> {
    vcpu: &'a VcpuSample,
    node: usize,
    standing: Standing,
}

/// What the vCPUs of a VM access.
struct Flows<'a> {
    input: &'a Input<'a>,
    flows: Vec<Flow<'a>>,
}

impl<'a> Flows<'a> {
    fn of(input: &'a Input<'a>, memory: &VmMemory) -> Self {
        // They are in rising order of their keys.
        let begin = input.vcpus.partition_point(|vcpu| vcpu.key.vm < memory.vm);
        let own = input.vcpus[begin..].iter().take_while(|vcpu| vcpu.key.vm == memory.vm);
        let flow = |vcpu: &'a VcpuSample| {
            Some(Flow { vcpu, node: vcpu.node(input.machine)?, standing: vcpu.standing(input) })
        };
        Self { input, flows: own.filter_map(flow).collect() }
    }

    /// Where vCPUs are that somebody has placed there.
    fn places(&self) -> Vec<(ApicId, usize)> {
        let placed = self.flows.iter().filter(|flow| flow.is_placed(self.input));
        placed.map(|flow| (flow.vcpu.key.vcpu, flow.node)).collect()
    }

    /// The move that saves most.
    fn best(
        &self,
        settings: &Settings,
        all: &MemoryInput<'_>,
        memory: &VmMemory,
        barred: impl Fn(usize) -> bool,
    ) -> Option<Proposal> {
        let machine = self.input.machine;
        let distance = |flow: &Flow<'_>, node| f64::from(machine.distance(flow.node, node));
        let time = |flow: &Flow<'_>| {
            (0..machine.nodes.len()).map(|at| flow.accesses(at) * distance(flow, at)).sum::<f64>()
        };
        let enough = self.flows.iter().map(time).sum::<f64>() * settings.min_gain;
        let mut targets: Vec<usize> = self.flows.iter().map(|flow| flow.node).collect();
        targets.sort_unstable();
        targets.dedup();
        targets.retain(|to| memory.allowed.contains(to));
        let mut best = None::<Proposal>;
        for from in (0..machine.nodes.len()).filter(|&from| !barred(from)) {
            for &to in targets.iter().filter(|&&to| to != from) {
                let Some(proposal) = self.proposal(memory, (from, to)) else { continue };
                let periods = HORIZON_NS as f64 / self.input.period_ns.max(1) as f64;
                let price = bytes_of(proposal.movable_kib) as f64 / PAGE as f64 * PAGE_PRICE;
                let pays = proposal.saving * periods > MARGIN * price && proposal.saving >= enough;
                let room = all.nodes[to].available() >= LEAST;
                if pays && room && best.is_none_or(|best| proposal.saving > best.saving) {
                    best = Some(proposal);
                }
            }
        }
        best
    }

    /// The saving and its parts if all memory that can be moved is moved.
    fn proposal(&self, memory: &VmMemory, pair: (usize, usize)) -> Option<Proposal> {
        let (from, to) = pair;
        let machine = self.input.machine;
        let on = |kib: &[u64]| kib.get(from).copied().unwrap_or(0);
        let may = |part: &&MemoryPart| part.targets.as_ref().is_none_or(|targets| targets.contains(&to));
        let movable_kib = sum(memory.parts.iter().filter(may).map(|part| on(&part.kib)));
        let there = sum(memory.parts.iter().map(|part| on(&part.kib)).chain([on(&memory.fixed)]));
        if bytes_of(movable_kib) < LEAST {
            return None;
        }
        let part = movable_kib as f64 / there as f64;
        let (mut saving, mut cannot, mut remote) = (0.0, 0.0, 0.0);
        for flow in &self.flows {
            let accesses = flow.accesses(from) * part;
            let nearer =
                f64::from(machine.distance(flow.node, from)) - f64::from(machine.distance(flow.node, to));
            let stays_away = flow.cannot_run_on(self.input, from);
            // Where a vCPU is that nobody has placed says little of where it will be.
            if nearer < 0.0 || stays_away || flow.is_placed(self.input) {
                saving += accesses * nearer;
                cannot += if stays_away { accesses * nearer } else { 0.0 };
            }
            remote += accesses * (f64::from(flow.node != to) - f64::from(flow.node != from));
        }
        (saving > 0.0).then_some(Proposal { pair, saving, cannot, movable_kib, remote })
    }

    fn why(&self, best: &Proposal, bytes: u64, cannot: bool, period_ns: u64) -> MemoryWhy {
        let part = bytes as f64 / bytes_of(best.movable_kib) as f64;
        let nodes = self.input.machine.nodes.len();
        let total: f64 =
            self.flows.iter().map(|flow| (0..nodes).map(|at| flow.accesses(at)).sum::<f64>()).sum();
        let local: f64 = self.flows.iter().map(|flow| flow.accesses(flow.node)).sum();
        let share = |remote: f64| (remote / total.max(1.0)).clamp(0.0, 1.0);
        MemoryWhy {
            cause: if cannot { MemoryCause::CannotRun } else { MemoryCause::Kept },
            remote_share: share(total - local),
            expected_remote_share: share(total - local + best.remote * part),
            price_ns: bytes as f64 / PAGE as f64 * PAGE_PRICE * TENTH_NS,
            saving_ns_per_s: best.saving * part * TENTH_NS * 1e9 / period_ns.max(1) as f64,
            assumed: false,
        }
    }
}

impl Flow<'_> {
    fn accesses(&self, node: usize) -> f64 {
        let counts = self.vcpu.counts.as_ref();
        counts.and_then(|counts| counts.accesses.get(node)).copied().unwrap_or(0) as f64
    }

    fn cannot_run_on(&self, input: &Input<'_>, node: usize) -> bool {
        let stays = matches!(self.standing, Standing::Pinned | Standing::Isolated | Standing::RealTime);
        self.node != node && (stays || !input.reaches[self.vcpu.reach].node(input.machine, node))
    }

    /// Has its policy or its operator put it on its node?
    fn is_placed(&self, input: &Input<'_>) -> bool {
        let reach = &input.reaches[self.vcpu.reach];
        let only = |node: usize| {
            (0..input.machine.nodes.len()).all(|other| (other == node) == reach.node(input.machine, other))
        };
        self.vcpu.assigned.is_some()
            || matches!(self.standing, Standing::Pinned | Standing::Isolated | Standing::RealTime)
            || only(self.node)
    }
}
