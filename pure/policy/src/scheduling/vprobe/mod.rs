//! `vprobe`: the paper's idea for a host with operators, SMT, several caches per node and tenants who do not know each other.
//!
//! A vCPU that uses memory is confined to the last-level cache where its time is expected to be least; the kernel chooses
//! the CPU there. All others keep their operator's mask, and so fill what is left. What is expected is
//!
//! ```text
//!   time = (instructions + memory + contention) * overload
//!   memory      accesses of each node * distance to it, smoothed over periods
//!   contention  reuse of the vCPU * lines that others bring into the cache, and the reverse: what it costs them
//!   overload    CPU time due on the domain / cores there, if that is above 1 and above the host's mean
//! ```
//!
//! The time that is due to a vCPU is what it wants; if all want more than there is, what it is [entitled] to by the weights of
//! its control groups. Many vCPUs of a VM with a small weight therefore count for little.
//!
//! [entitled]: super::entitlement
//!
//! | promise | by |
//! |---|---|
//! | in any `n` periods a vCPU is moved at most `burst + n / rest_periods + n / starve_periods` times | [`Bucket`], `hungry` |
//! | in any `n` periods one VM causes at most `budget + n / budget_rest_periods` moves of others, and one of each vCPU that starves | [`Bucket`], `gives_way` |
//! | a vCPU that waits for `starve_periods` while a CPU that it may use is idle is stolen next | [`RunQueues::steal_fairly`] |
//! | masks are kept; pinned, real-time and isolated vCPUs stay | [`Standing`], [`Reach`] |
//!
//! A move belongs to the budget of another VM when that one is the reason for it: it takes the cache or the CPU time, or it
//! gets the room in exchange, or others wait for the CPUs that it uses and are stolen. A vCPU that goes to its own memory is its own
//! reason. When the budget of a VM is used up, its own vCPUs still move, and the others stay.
//!
//! Nobody starves because a budget is used up. The VM then owes what it could not pay, and the vCPU is not taken to another place:
//! it is released, so that the kernel finds it a CPU, and gets no place until the debt is paid. Otherwise it would go back to its
//! memory, starve again, and be moved for as long as the other VM likes.
//!
//! [`RunQueues::steal_fairly`]: super::balance::RunQueues::steal_fairly
//! [`Reach`]: super::Reach

mod cost;
mod history;

use super::{
    Analysis, Cause, Counts, Input, Place, Placed, Policy, Settings, VcpuSample, analyzer::Bounds, idle_cpus,
    placed_with, run_queues, sample::remote_share,
};
use crate::world::VmId;
use cost::{Best, Costs, Domains, Saving};
use history::{Bucket, Histories, History, Observer};
use std::collections::BTreeMap;

/// Times that moves are tried in one decision.
const PASSES: usize = 3;
/// Exchanges that are looked for in one decision.
const EXCHANGES: usize = 128;

/// What it remembers.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    histories: Histories,
    /// What each VM may still cause others; a VM that is not in it may cause all.
    budgets: BTreeMap<VmId, Bucket>,
}

impl Memory {
    /// A period has ended. What each vCPU did has to be noted before anything is decided.
    pub(super) fn begin<'a>(
        &'a mut self,
        settings: &'a Settings,
        bounds: Bounds,
        input: &'a Input<'a>,
    ) -> Observer<'a> {
        self.histories.begin(settings, bounds, input)
    }

    pub(super) fn decide(
        &mut self,
        settings: &Settings,
        input: &Input<'_>,
        analysis: &[Analysis],
    ) -> Vec<Placed> {
        let (full, rest) = (settings.budget * settings.budget_rest_periods, settings.budget_rest_periods);
        self.budgets.retain(|_, bucket| !bucket.refill(full));
        for history in self.histories.all_mut() {
            let owes = |vm: &VmId| self.budgets.get(vm).is_some_and(|bucket| !bucket.holds(rest));
            history.gives_way = history.gives_way.filter(owes);
        }
        let mut round = Round {
            settings,
            input,
            analysis,
            domains: Domains::new(input, self.histories.all()),
            histories: self.histories.all_mut(),
            budgets: &mut self.budgets,
            budget: (full, rest),
            wanted: vec![0; input.vcpus.len()],
            moves: Vec::with_capacity(input.vcpus.len()),
        };
        let blocked = round.improve();
        round.exchange(&blocked);
        round.keep();
        round.rescue();
        round.release();
        round.steps()
    }
}

/// What is wanted of a vCPU: its domain, or its operator's mask.
type Wanted = (Option<usize>, Cause, Option<VmId>);

/// One decision.
struct Round<'a> {
    settings: &'a Settings,
    input: &'a Input<'a>,
    analysis: &'a [Analysis],
    domains: Domains<'a>,
    /// By position in the input.
    histories: &'a mut [History],
    budgets: &'a mut BTreeMap<VmId, Bucket>,
    budget: (u32, u32),
    /// For each vCPU the position of what is wanted of it in `moves`, counted from 1. 0: nothing is.
    wanted: Vec<u32>,
    moves: Vec<Wanted>,
}

/// A move that would save time. The largest saving is the least, as a number that is compared at once: what is saved, the
/// vCPU, where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Proposal(u128);

impl Proposal {
    fn new(vcpu: usize, Saving { gain, to }: Saving) -> Self {
        // As `f64::total_cmp` does.
        let bits = gain.to_bits();
        let rising = if gain.is_sign_negative() { !bits } else { bits | (1 << 63) };
        Self((u128::from(!rising) << 64) | (u128::from(vcpu as u32) << 32) | u128::from(to as u32))
    }

    fn vcpu(self) -> usize {
        (self.0 >> 32) as u32 as usize
    }

    fn to(self) -> usize {
        self.0 as u32 as usize
    }
}

impl Round<'_> {
    /// May this vCPU be moved by choice now?
    fn may_move(&self, at: usize) -> bool {
        let history = &self.histories[at];
        history.free
            && history.gives_way.is_none()
            && self.is_unplanned(at)
            && history.credit.holds(self.settings.rest_periods)
    }

    /// Is nothing wanted of it yet?
    fn is_unplanned(&self, at: usize) -> bool {
        self.wanted[at] == 0
    }

    fn costs(&self, at: usize) -> Costs {
        self.domains.costs(at, &self.histories[at])
    }

    /// Moves that save time, the largest saving first. Returns those for which there was no room.
    fn improve(&mut self) -> Vec<Proposal> {
        let (mut proposals, mut blocked) = (Vec::with_capacity(self.input.vcpus.len()), Vec::new());
        for at in 0..self.input.vcpus.len() {
            if !self.histories[at].is_worth() || !self.may_move(at) {
                continue;
            }
            let costs = self.costs(at);
            let enough = costs.here * self.settings.min_gain;
            let Best { roomy, any } = self.domains.best(at, &self.histories[at], costs.here);
            let proposal = |saving| Proposal::new(at, saving);
            proposals.extend(roomy.filter(|best| best.gain > enough).map(proposal));
            let missed =
                any.filter(|best| best.gain > enough + roomy.map_or(0.0, |roomy| roomy.gain.max(0.0)));
            blocked.extend(missed.map(proposal));
        }
        proposals.extend(&blocked);
        proposals.sort_unstable();
        // Who moves away makes room for others.
        for _ in 0..PASSES {
            let before = proposals.len();
            proposals
                .retain(|proposal| self.is_unplanned(proposal.vcpu()) && !self.carry_out(proposal.vcpu()));
            if proposals.len() == before {
                break;
            }
        }
        blocked.retain(|proposal| self.is_unplanned(proposal.vcpu()));
        blocked.sort_unstable();
        blocked
    }

    /// Looks again, as others have moved meanwhile, and moves it if that still saves time.
    fn carry_out(&mut self, at: usize) -> bool {
        let costs = self.costs(at);
        let Some(best) = self.domains.best(at, &self.histories[at], costs.here).roomy else { return false };
        if best.gain <= costs.here * self.settings.min_gain || self.domains.of(at) == Some(best.to) {
            return false;
        }
        let Some(reason) = self.reason(at, &costs, best.to) else { return false };
        self.take_to(at, best.to, reason);
        true
    }

    /// Who uses memory and stays is confined from now on, so that the kernel does not take it elsewhere.
    fn keep(&mut self) {
        for at in 0..self.input.vcpus.len() {
            let history = &self.histories[at];
            if history.confined || !history.is_worth() || !self.may_move(at) {
                continue;
            }
            if let Some(here) = self.domains.of(at) {
                self.set(at, Some(here), Cause::Kept, None);
            }
        }
    }

    /// Why a vCPU is moved, and on whose budget. `None`: that budget is used up.
    fn reason(&self, at: usize, costs: &Costs, to: usize) -> Option<(Cause, Option<VmId>)> {
        if self.nears_memory(at, costs, to) {
            return Some((Cause::Memory, None));
        }
        let cause = if costs.overload > 1.0 { Cause::Overload } else { Cause::Contention };
        match self.crowded_by(at, cause == Cause::Overload) {
            Some(vm) => self.may_cause(vm).then_some((cause, Some(vm))),
            None => Some((cause, None)),
        }
    }

    /// The VM that takes most of the CPU time or of the cache where a vCPU is, if it takes more than the vCPU's own.
    fn crowded_by(&self, at: usize, by_demand: bool) -> Option<VmId> {
        let (own, other) = self.domains.largest(at, by_demand, self.histories);
        other.filter(|(_, share)| *share > own).map(|(vm, _)| vm)
    }

    /// Does its memory alone make it worth to go there?
    fn nears_memory(&self, at: usize, costs: &Costs, to: usize) -> bool {
        let there = self.domains.memory_at(&self.histories[at], self.input.machine.domains[to].node);
        costs.memory - there > costs.alone * self.settings.min_gain
    }

    fn may_cause(&self, vm: VmId) -> bool {
        let (full, rest) = self.budget;
        self.budgets.get(&vm).map_or(full >= rest && rest > 0, |bucket| bucket.holds(rest))
    }

    /// Takes a vCPU to a domain, on the budget of the VM that is the reason.
    fn take_to(&mut self, at: usize, to: usize, (cause, caused_by): (Cause, Option<VmId>)) {
        let (full, rest) = self.budget;
        if let Some(vm) = caused_by {
            self.budgets.entry(vm).or_insert(Bucket::new(full)).take(rest);
        }
        self.set(at, Some(to), cause, caused_by);
    }

    fn set(&mut self, at: usize, to: Option<usize>, cause: Cause, caused_by: Option<VmId>) {
        self.domains.place(at, to, &self.histories[at]);
        self.histories[at].credit.take(self.settings.rest_periods);
        let history = &mut self.histories[at];
        (history.hungry, history.gives_way) = (0, None);
        self.moves.push((to, cause, caused_by));
        self.wanted[at] = self.moves.len() as u32;
    }

    /// A vCPU for which there is no room changes places with one that loses less than it gains: one of its own VM, or one
    /// of another VM that loses next to nothing.
    fn exchange(&mut self, blocked: &[Proposal]) {
        for proposal in blocked.iter().take(EXCHANGES) {
            let (at, to) = (proposal.vcpu(), proposal.to());
            let Some(here) = self.domains.of(at).filter(|here| *here != to && self.may_move(at)) else {
                continue;
            };
            let vm = self.histories[at].vm();
            let may_cause = self.may_cause(vm);
            let costs = self.costs(at);
            let gain = costs.here - self.domains.time_at(at, &self.histories[at], to);
            let enough = costs.here * self.settings.min_gain;
            // Others have moved since it was proposed: it may lose by it now, and its partner would be the only one that gains.
            if gain <= enough {
                continue;
            }
            // It may have been left out because a budget is used up.
            let Some(reason) = self.reason(at, &costs, to) else { continue };
            let mut partner = None::<(f64, usize)>;
            for other in self.domains.members(to).iter().map(|&other| other as usize) {
                let history = &self.histories[other];
                let foreign = history.vm() != vm;
                if !self.may_move(other)
                    || (foreign && !may_cause)
                    || !self.input.reaches[history.reach as usize].domain(here)
                {
                    continue;
                }
                let costs = self.costs(other);
                let loss = self.domains.time_at(other, history, here) - costs.here;
                let bearable = !foreign || loss <= costs.here * self.settings.min_gain;
                if bearable && gain - loss > enough && partner.is_none_or(|(least, _)| loss < least) {
                    partner = Some((loss, other));
                }
            }
            let Some((_, other)) = partner else { continue };
            let foreign = self.histories[other].vm() != vm;
            // Who comes nearer to its memory is its own reason. Who only gets away from others is not.
            let nearer = self.nears_memory(other, &self.costs(other), here);
            let caused_by = (foreign && !nearer).then_some(vm);
            self.take_to(other, here, (if nearer { Cause::Memory } else { Cause::Swapped }, caused_by));
            self.take_to(at, to, reason);
        }
    }

    /// CPUs that were idle take vCPUs that waited elsewhere, confined to places that such a CPU does not belong to.
    fn rescue(&mut self) {
        let starve = self.settings.starve_periods;
        let wait = |at: usize| {
            let history: &History = &self.histories[at];
            let (hungry, may) = (history.hungry, self.may_move(at));
            let may = may || (hungry >= starve && self.is_unplanned(at));
            (may && history.confined).then_some(u64::from(hungry))
        };
        // Nobody to be stolen is the usual case.
        if !self.histories.iter().any(|history| history.waits && history.confined && history.free) {
            return;
        }
        // By what they are entitled to: many vCPUs of a small weight are no load.
        let load = |vcpu: &VcpuSample| (vcpu.demand(self.input.period_ns) * 1000.0) as u32;
        let mut queues = run_queues(self.input, self.analysis, load, wait);
        for cpu in idle_cpus(self.input) {
            if queues.is_empty() {
                return;
            }
            let Some(domain) = self.input.machine.domain_of(cpu) else { continue };
            let node = self.input.machine.domains[domain].node;
            let may = |at: usize| {
                let elsewhere = self.domains.of(at) != Some(domain);
                let starved = self.histories[at].hungry >= starve;
                let on_budget = || self.crowded_by(at, true).is_none_or(|vm| self.may_cause(vm));
                elsewhere
                    && self.input.reaches[self.input.vcpus[at].reach].cpu(cpu)
                    && (starved || on_budget())
            };
            let nearest = self.input.machine.nearest(node);
            if let Some(at) = queues.steal_fairly(node, nearest, u64::from(starve), may) {
                let crowded_by = self.crowded_by(at, true);
                let starved = self.histories[at].hungry >= starve;
                let cause = if starved { Cause::Starved } else { Cause::Stolen };
                match crowded_by.filter(|&vm| !self.may_cause(vm)) {
                    Some(vm) => self.give_way(at, vm),
                    None => self.take_to(at, domain, (cause, crowded_by)),
                }
            }
        }
    }

    /// A vCPU that starves beside a VM whose budget is used up.
    fn give_way(&mut self, at: usize, vm: VmId) {
        let (full, rest) = self.budget;
        self.budgets.entry(vm).or_insert(Bucket::new(full)).owe(rest);
        self.set(at, None, Cause::Starved, Some(vm));
        self.histories[at].gives_way = Some(vm);
    }

    /// A vCPU that has not used memory for a while needs no place.
    fn release(&mut self) {
        for at in 0..self.input.vcpus.len() {
            let history = &self.histories[at];
            if history.confined && history.is_calm() && self.may_move(at) {
                self.set(at, None, Cause::Calm, None);
            }
        }
    }

    fn steps(&self) -> Vec<Placed> {
        let machine = self.input.machine;
        let mut moved = Vec::with_capacity(self.moves.len());
        for (at, &wanted) in self.wanted.iter().enumerate().filter(|(_, wanted)| **wanted > 0) {
            let to = self.moves[wanted as usize - 1].0;
            let vcpu = &self.input.vcpus[at];
            if vcpu.assigned != to.map(Place::Cache) {
                // Each is in another part of memory. A CPU fetches several at once if little else is done meanwhile.
                let at_node = |counts: &Counts| to.map(|to| counts.at(machine.domains[to].node));
                moved.push((at, vcpu.counts.as_ref().and_then(at_node)));
            }
        }
        let mut steps = Vec::with_capacity(moved.len());
        for (at, local) in moved {
            let (to, cause, caused_by) = self.moves[self.wanted[at] as usize - 1];
            let why = (Policy::Vprobe, cause, caused_by);
            let remote_share = local.and_then(|local| remote_share(self.histories[at].total, local));
            let to = to.map(Place::Cache);
            steps.push(placed_with(machine, &self.analysis[at], to, why, remote_share));
        }
        steps
    }
}
