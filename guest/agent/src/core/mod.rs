//! Decides which processes are placed on the node of their device, and which are released.
//!
//! ```text
//!              fits for `place_after` looks, and has rested
//!   found ────────────────────────────────────────────────────▶ placed
//!     ▲                                                           │
//!     └───────────────────────────────────────────────────────────┘
//!        strained for `release_after` looks, not found any more: rests for `rest`, twice as long each time;
//!        its device's node or that node's CPUs changed: may be placed again at once
//! ```
//!
//! A process fits if the node, with all that the process uses, keeps a reserve of CPU time and of memory. It is strained if
//! the node is busy *and* threads of the process wait for a CPU, or if the node's memory runs out. The two are far apart, and
//! a process that was released rests. So a process whose device stays where it is is placed at most once in
//! [`Limits::rest`], whatever the machine does.

mod find;
mod interrupts;
mod snapshot;

pub use find::{Finding, find};
pub use interrupts::{InterruptAction, Interrupts};
pub use snapshot::{Device, Evidence, Interrupt, Limits, Node, NodeId, Process, ProcessId, Snapshot};

use crate::rules::{Memory, Rules};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use vnuma_model::CpuSet;

/// Times [`Limits::rest`] that a process rests at most.
pub const LONGEST_REST: u32 = 16;
/// A node whose CPUs are idle for less than this is busy, thousandths.
const BUSY_PERMILLE: u64 = 30;
/// A process waits if its threads are ready without a CPU for longer than this, thousandths.
const WAITS_PERMILLE: u32 = 100;
/// Of the memory reserve, what may be left on a node before those placed there are released.
const MEMORY_LOW: u64 = 4;

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Confine a process to these CPUs of a node.
    Place {
        /// Which.
        id: ProcessId,
        /// Where.
        node: NodeId,
        /// CPUs of the node that it may use.
        cpus: CpuSet,
        /// Why.
        reason: String,
    },
    /// Give a process back what it had.
    Release {
        /// Which.
        id: ProcessId,
        /// Why.
        reason: String,
    },
    /// Take up to so much of its memory to the node that it is placed on.
    MoveMemory {
        /// Which.
        id: ProcessId,
        /// Where.
        node: NodeId,
        /// How much, at most, KiB.
        kib: u64,
    },
    /// A found process stays as it is.
    Keep {
        /// Which.
        id: ProcessId,
        /// Why.
        reason: String,
    },
}

impl Action {
    /// The process.
    pub fn id(&self) -> ProcessId {
        match self {
            Self::Place { id, .. }
            | Self::Release { id, .. }
            | Self::MoveMemory { id, .. }
            | Self::Keep { id, .. } => *id,
        }
    }
}

/// What a look comes to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Of processes, in order.
    pub actions: Vec<Action>,
    /// Of interrupts.
    pub interrupts: Vec<InterruptAction>,
}

/// Where a process has been put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The node.
    pub node: NodeId,
    /// CPUs of it.
    pub cpus: CpuSet,
    /// CPUs that it had before.
    pub former: CpuSet,
    /// Devices that it used then.
    pub devices: BTreeSet<String>,
    /// When.
    pub since: Duration,
    /// No more of its memory is moved: what is elsewhere cannot be.
    pub memory_settled: bool,
}

/// What is remembered of a process from look to look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Standing {
    fits: u32,
    strains: u32,
    releases: u32,
    rests_until: Option<Duration>,
    placed: Option<Placed>,
}

/// What is remembered from look to look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The last look that counted.
    counted: Option<Duration>,
    processes: BTreeMap<ProcessId, Standing>,
    interrupts: Interrupts,
}

/// CPUs and memory of a node that a look has not given away yet.
struct Room<'a> {
    nodes: &'a BTreeMap<NodeId, Node>,
    limits: Limits,
    more_used: BTreeMap<NodeId, u64>,
    less_free: BTreeMap<NodeId, u64>,
}

impl State {
    /// Where a process is placed.
    pub fn placed(&self, id: ProcessId) -> Option<&Placed> {
        self.processes.get(&id)?.placed.as_ref()
    }

    /// All processes that are placed.
    pub fn all_placed(&self) -> impl Iterator<Item = (ProcessId, &Placed)> {
        self.processes.iter().filter_map(|(id, standing)| Some((*id, standing.placed.as_ref()?)))
    }

    /// A process is of interest: its memory has to be read for the next decision.
    pub fn wants_memory(&self, id: ProcessId) -> bool {
        self.placed(id).is_none_or(|placed| !placed.memory_settled)
    }

    /// Placing a process has failed, or somebody else has changed what was set: it is not placed any more, and rests.
    pub fn lost(&mut self, id: ProcessId, limits: &Limits, now: Duration) {
        if let Some(standing) = self.processes.get_mut(&id) {
            standing.placed = None;
            standing.rest(limits, now);
        }
    }

    /// Memory of a process was moved. `settled`: the rest cannot be.
    pub fn moved(&mut self, id: ProcessId, settled: bool) {
        let placed = self.processes.get_mut(&id).and_then(|standing| standing.placed.as_mut());
        if let Some(placed) = placed {
            placed.memory_settled = settled;
        }
    }

    /// Setting an interrupt has failed.
    pub fn interrupt_failed(&mut self, irq: u32) {
        self.interrupts.failed(irq);
    }
}

impl Standing {
    fn rest(&mut self, limits: &Limits, now: Duration) {
        let times = 1_u32.checked_shl(self.releases).unwrap_or(LONGEST_REST).min(LONGEST_REST);
        self.releases = self.releases.saturating_add(1);
        self.rests_until = Some(now.saturating_add(limits.rest.saturating_mul(times)));
        (self.fits, self.strains) = (0, 0);
    }
}

impl Room<'_> {
    /// Why a process that uses so much does not fit on a node; nothing if it does.
    fn lacks(&self, process: &Process, allowed: &CpuSet, node: NodeId) -> Option<String> {
        let Some(Node { cpus, used_permille, free_kib, total_kib }) = self.nodes.get(&node) else {
            return Some(format!("node {node} is not online"));
        };
        let own = cpus.count_in(allowed) as u64 * 1000;
        if own == 0 {
            return Some(format!("it may run on no CPU of node {node}"));
        }
        let Some(used) = used_permille else {
            return Some("CPU time is measured from one look to the next".to_owned());
        };
        let used = u64::from(*used) + self.more_used.get(&node).copied().unwrap_or(0);
        let (ran, all) = (process.ran(), cpus.len() as u64 * 1000);
        let keep = all * u64::from(self.limits.cpu_reserve_percent) / 100;
        let would = used.saturating_sub(process.ran_on(node)).saturating_add(ran);
        if would > all - keep.min(all) || ran > own {
            return Some(format!(
                "node {node} has no CPU time to spare: {would} of {all} thousandths would be used, {keep} are kept"
            ));
        }
        let remote = process.remote_kib(node);
        let free = free_kib.saturating_sub(self.less_free.get(&node).copied().unwrap_or(0));
        let keep = self.memory_reserve(*total_kib);
        (remote.saturating_add(keep) > free).then(|| {
            format!("node {node} has no memory to spare: {remote} KiB would come, {free} are free, {keep} are kept")
        })
    }

    /// CPUs of a node that a process with these may use.
    fn cpus(&self, node: NodeId, allowed: &CpuSet) -> CpuSet {
        let cpus = self.nodes.get(&node).map(|node| node.cpus.iter().filter(|cpu| allowed.contains(*cpu)));
        cpus.into_iter().flatten().collect()
    }

    fn memory_reserve(&self, total_kib: u64) -> u64 {
        (u128::from(total_kib) * u128::from(self.limits.memory_reserve_percent) / 100) as u64
    }

    fn take(&mut self, process: &Process, node: NodeId) {
        let more = process.ran().saturating_sub(process.ran_on(node));
        *self.more_used.entry(node).or_default() += more;
        // Memory that is yet to come.
        let less = self.less_free.entry(node).or_default();
        *less = less.saturating_add(process.remote_kib(node));
    }

    /// Why a process cannot stay on its node; nothing if it can.
    fn strain(&self, process: &Process, placed: &Placed) -> Option<String> {
        let node = placed.node;
        let Node { cpus, used_permille, free_kib, total_kib } = self.nodes.get(&node)?;
        let (all, used) = (cpus.len() as u64 * 1000, u64::from(used_permille.unwrap_or(0)));
        let idle = all.saturating_sub(used);
        if idle * 1000 < all * BUSY_PERMILLE && process.waited_permille >= WAITS_PERMILLE {
            let waited = process.waited_permille;
            return Some(format!(
                "node {node} is busy ({used} of {all} thousandths of a CPU), and it waits for CPUs ({waited} thousandths)"
            ));
        }
        let low = self.memory_reserve(*total_kib) / MEMORY_LOW;
        (*free_kib < low).then(|| format!("node {node} has {free_kib} KiB free, less than {low}"))
    }
}

/// Decides. Time is counted from any point, and does not go back.
pub fn decide(rules: &Rules, snapshot: &Snapshot, state: &mut State, now: Duration) -> Plan {
    let mut look = Look {
        room: Room {
            nodes: &snapshot.nodes,
            limits: rules.limits,
            more_used: BTreeMap::new(),
            less_free: BTreeMap::new(),
        },
        now,
        counts: state.counted.is_none_or(|at| now.saturating_sub(at) >= rules.interval / 10 * 9),
        actions: Vec::new(),
    };
    if look.counts {
        state.counted = Some(now);
    }
    let processes: BTreeMap<ProcessId, &Process> =
        snapshot.processes.iter().map(|process| (process.id, process)).collect();
    // Those that have ended have taken everything with them.
    state.processes.retain(|id, _| processes.contains_key(id));
    let mut candidates = Vec::new();
    for process in processes.values() {
        let finding = find(process, &snapshot.devices, rules);
        let of_devices = find::devices_of(process, &snapshot.devices);
        let allowed = match look.review(process, &finding, &of_devices, state) {
            Review::Stays => continue,
            Review::Leaves { former } => former,
            Review::Unplaced => process.allowed.clone(),
        };
        match finding {
            Finding::Workload { node, because } => {
                candidates.push(Candidate { process, devices: of_devices, allowed, node, because });
            }
            Finding::Unplaceable { because, why } => look.keep(process.id, format!("{because}: {why}")),
            Finding::Nothing => forget(state, process.id, now),
        }
    }
    look.place(candidates, state);
    if rules.memory != Memory::Leave {
        look.move_memory(&processes, state);
    }
    let used = driven_devices(snapshot, &processes, state);
    let interrupts = state.interrupts.decide(snapshot, &used, rules.interrupts);
    Plan { actions: look.actions, interrupts }
}

/// A process of which nothing is found has no standing, once it has rested.
fn forget(state: &mut State, id: ProcessId, now: Duration) {
    let rests = |standing: &Standing| standing.rests_until.is_some_and(|until| until > now);
    if !state.processes.get(&id).is_some_and(rests) {
        state.processes.remove(&id);
    }
}

/// Devices that processes drive which are placed on the devices' node.
fn driven_devices(
    snapshot: &Snapshot,
    processes: &BTreeMap<ProcessId, &Process>,
    state: &State,
) -> BTreeSet<String> {
    let mut driven = BTreeSet::new();
    for (id, placed) in state.all_placed() {
        let Some(process) = processes.get(&id) else { continue };
        let there = |address: &String| {
            snapshot.devices.get(address).is_some_and(|device| device.node == Some(placed.node))
        };
        driven.extend(find::driven_by(process, &snapshot.devices).into_iter().filter(there));
    }
    driven
}

/// A process that can be placed.
struct Candidate<'a> {
    process: &'a Process,
    devices: BTreeSet<String>,
    /// CPUs that it has or, as it was placed until now, will have again.
    allowed: CpuSet,
    node: NodeId,
    because: String,
}

/// What becomes of a process that may be placed.
enum Review {
    /// It is, and stays.
    Stays,
    /// It was, and gets back what it had.
    Leaves {
        /// CPUs that it had.
        former: CpuSet,
    },
    /// It is not.
    Unplaced,
}

/// A look while it is decided.
struct Look<'a> {
    room: Room<'a>,
    now: Duration,
    /// It is one in a row. Looks that a change of the topology has caused are not: they may follow each other fast.
    counts: bool,
    actions: Vec<Action>,
}

impl Look<'_> {
    fn keep(&mut self, id: ProcessId, reason: String) {
        self.actions.push(Action::Keep { id, reason });
    }

    /// Looks at a process that may be placed.
    fn review(
        &mut self,
        process: &Process,
        finding: &Finding,
        of_devices: &BTreeSet<String>,
        state: &mut State,
    ) -> Review {
        let id = process.id;
        let (limits, now) = (self.room.limits, self.now);
        let Some(standing) = state.processes.get_mut(&id) else { return Review::Unplaced };
        let Some(placed) = standing.placed.clone() else { return Review::Unplaced };
        let former = placed.former.clone();
        let mut release = |standing: &mut Standing, reason: String| {
            standing.placed = None;
            self.actions.push(Action::Release { id, reason });
            Review::Leaves { former: former.clone() }
        };
        let (node, because) = match finding {
            Finding::Workload { node, because } => (*node, because),
            Finding::Unplaceable { why, .. } => {
                standing.rest(&limits, now);
                return release(standing, why.clone());
            }
            Finding::Nothing => {
                standing.rest(&limits, now);
                return release(standing, "it uses no such device any more".to_owned());
            }
        };
        let cpus = self.room.cpus(node, &placed.former);
        if node != placed.node || cpus != placed.cpus {
            let change = if node == placed.node { "has other CPUs now" } else { "is no more its device's" };
            if *of_devices == placed.devices {
                // Not its fault: it may be placed again at once.
                standing.fits = limits.place_after;
            } else {
                standing.rest(&limits, now);
            }
            return release(standing, format!("node {} {change}", placed.node));
        }
        if now.saturating_sub(placed.since) >= limits.rest.saturating_mul(LONGEST_REST) {
            standing.releases = 0;
        }
        if self.counts {
            match self.room.strain(process, &placed) {
                None => standing.strains = 0,
                Some(strain) if standing.strains + 1 >= limits.release_after => {
                    standing.rest(&limits, now);
                    return release(standing, strain);
                }
                Some(_) => standing.strains += 1,
            }
        }
        self.room.take(process, node);
        self.keep(id, format!("{because}: placed on node {node}"));
        Review::Stays
    }

    /// Places candidates that fit, those that have fitted for longest first.
    fn place(&mut self, mut candidates: Vec<Candidate<'_>>, state: &mut State) {
        let limits = self.room.limits;
        let fits =
            |state: &State, id: ProcessId| state.processes.get(&id).map_or(0, |standing| standing.fits);
        candidates.sort_by_key(|one| (std::cmp::Reverse(fits(state, one.process.id)), one.process.id));
        let mut left = limits.placements_per_look;
        for Candidate { process, devices, allowed, node, because } in candidates {
            let standing = state.processes.entry(process.id).or_default();
            if let Some(until) = standing.rests_until.filter(|until| *until > self.now) {
                let seconds = (until - self.now).as_secs() + 1;
                self.keep(process.id, format!("{because}: rests for {seconds} s"));
                continue;
            }
            if let Some(lack) = self.room.lacks(process, &allowed, node) {
                standing.fits = if self.counts { 0 } else { standing.fits };
                self.keep(process.id, format!("{because}: {lack}"));
                continue;
            }
            standing.fits = standing.fits.saturating_add(u32::from(self.counts));
            if standing.fits < limits.place_after {
                let (fits, after) = (standing.fits, limits.place_after);
                self.keep(process.id, format!("{because}: fits on node {node}, look {fits} of {after}"));
                continue;
            }
            if left == 0 {
                self.keep(process.id, format!("{because}: others are placed on node {node} first"));
                continue;
            }
            left -= 1;
            self.room.take(process, node);
            let (cpus, former) = (self.room.cpus(node, &allowed), allowed);
            (standing.fits, standing.strains) = (0, 0);
            standing.placed = Some(Placed {
                node,
                cpus: cpus.clone(),
                former,
                devices,
                since: self.now,
                memory_settled: false,
            });
            self.actions.push(Action::Place { id: process.id, node, cpus, reason: because });
        }
    }

    /// Moves memory of those that are placed, as far as the budget and the node allow it.
    fn move_memory(&mut self, processes: &BTreeMap<ProcessId, &Process>, state: &mut State) {
        let mut left = self.room.limits.memory_kib_per_look;
        let mut given: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (id, standing) in &mut state.processes {
            let Some(placed) = standing.placed.as_mut().filter(|placed| !placed.memory_settled) else {
                continue;
            };
            let Some(process) = processes.get(id).filter(|process| process.memory_kib.is_some()) else {
                continue;
            };
            let Some(node) = self.room.nodes.get(&placed.node) else { continue };
            let remote = process.remote_kib(placed.node);
            if remote == 0 {
                placed.memory_settled = true;
                continue;
            }
            let given = given.entry(placed.node).or_default();
            let reserve = self.room.memory_reserve(node.total_kib);
            let kib = remote.min(left).min(node.free_kib.saturating_sub(reserve).saturating_sub(*given));
            if kib > 0 {
                left -= kib;
                *given += kib;
                self.actions.push(Action::MoveMemory { id: *id, node: placed.node, kib });
            }
        }
    }
}
