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
//! | in any `n` periods one VM causes at most `budget + n / budget_rest_periods` moves of other VMs' vCPUs | [`Bucket`] |
//! | a vCPU that waits for `starve_periods` while a CPU that it may use is idle is stolen next | [`RunQueues::steal_fairly`] |
//! | masks are kept; pinned, real-time and isolated vCPUs stay | [`Standing`], [`Reach`] |
//!
//! A move belongs to the budget of another VM when that one is the reason for it: it takes the cache or the CPU time, or it
//! gets the room in exchange. A vCPU that goes to its own memory or to an idle CPU is its own reason. When the budget of a
//! VM is used up, its own vCPUs still move, and the others stay.
//!
//! [`RunQueues::steal_fairly`]: super::balance::RunQueues::steal_fairly
//! [`Reach`]: super::Reach

mod cost;
mod history;

use super::{
    Analysis, Cause, Input, Place, Placed, Policy, Settings, Standing, VcpuSample, analyzer::Bounds,
    idle_cpus, placed, run_queues,
};
use crate::world::VmId;
use cost::{Best, Costs, Domains, Saving};
use history::{Bucket, Histories, History};
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
    pub(super) fn decide(
        &mut self,
        settings: &Settings,
        bounds: Bounds,
        input: &Input<'_>,
        analysis: &[Analysis],
    ) -> Vec<Placed> {
        let (full, rest) = (settings.budget * settings.budget_rest_periods, settings.budget_rest_periods);
        self.budgets.retain(|_, bucket| bucket.refill(full) < full);
        self.histories.observe(settings, bounds, input, analysis);
        let mut round = Round {
            settings,
            input,
            analysis,
            domains: Domains::new(input, analysis, self.histories.all()),
            histories: self.histories.all_mut(),
            budgets: &mut self.budgets,
            budget: (full, rest),
            wanted: vec![None; input.vcpus.len()],
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
    wanted: Vec<Option<Wanted>>,
}

/// A move that would save time.
#[derive(Clone, Copy, Debug)]
struct Proposal {
    gain: f64,
    vcpu: usize,
    to: usize,
}

impl Round<'_> {
    /// May this vCPU be moved by choice now?
    fn may_move(&self, at: usize) -> bool {
        self.analysis[at].standing == Standing::Free
            && self.wanted[at].is_none()
            && self.histories[at].credit.holds(self.settings.rest_periods)
    }

    /// Is it one that is worth a place of its own?
    fn worth(&self, at: usize) -> bool {
        let history = &self.histories[at];
        history.uses_memory && history.known && self.input.vcpus[at].ran_ns > 0
    }

    fn costs(&self, at: usize) -> Costs {
        self.domains.costs(at, &self.histories[at])
    }

    /// Moves that save time, the largest saving first. Returns those for which there was no room.
    fn improve(&mut self) -> Vec<Proposal> {
        let (mut proposals, mut blocked) = (Vec::new(), Vec::new());
        for at in 0..self.input.vcpus.len() {
            if !self.may_move(at) || !self.worth(at) {
                continue;
            }
            let costs = self.costs(at);
            let enough = costs.here * self.settings.min_gain;
            let Best { roomy, any } = self.domains.best(at, &self.histories[at], costs.here);
            let proposal = |Saving { gain, to }| Proposal { gain, vcpu: at, to };
            proposals.extend(roomy.filter(|best| best.gain > enough).map(proposal));
            let missed =
                any.filter(|best| best.gain > enough + roomy.map_or(0.0, |roomy| roomy.gain.max(0.0)));
            blocked.extend(missed.map(proposal));
        }
        let order = |a: &Proposal, b: &Proposal| b.gain.total_cmp(&a.gain).then(a.vcpu.cmp(&b.vcpu));
        proposals.extend(&blocked);
        proposals.sort_unstable_by(order);
        // Who moves away makes room for others.
        for _ in 0..PASSES {
            let before = proposals.len();
            proposals
                .retain(|proposal| self.wanted[proposal.vcpu].is_none() && !self.carry_out(proposal.vcpu));
            if proposals.len() == before {
                break;
            }
        }
        blocked.retain(|proposal| self.wanted[proposal.vcpu].is_none());
        blocked.sort_unstable_by(order);
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
            let confined = self.input.vcpus[at].assigned.is_some();
            if confined || !self.may_move(at) || !self.worth(at) {
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
        let (own, other) = self.domains.largest(at, cause == Cause::Overload, self.histories);
        match other.filter(|(_, share)| *share > own) {
            Some((vm, _)) => self.may_cause(vm).then_some((cause, Some(vm))),
            None => Some((cause, None)),
        }
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
        self.histories[at].hungry = 0;
        self.wanted[at] = Some((to, cause, caused_by));
    }

    /// A vCPU for which there is no room changes places with one that loses less than it gains: one of its own VM, or one
    /// of another VM that loses next to nothing.
    fn exchange(&mut self, blocked: &[Proposal]) {
        for proposal in blocked.iter().take(EXCHANGES) {
            let (at, to) = (proposal.vcpu, proposal.to);
            let Some(here) = self.domains.of(at).filter(|here| *here != to && self.may_move(at)) else {
                continue;
            };
            let vm = self.input.vcpus[at].key.vm;
            let may_cause = self.may_cause(vm);
            let costs = self.costs(at);
            let gain = costs.here - self.domains.time_at(at, &self.histories[at], to);
            let enough = costs.here * self.settings.min_gain;
            // It may have been left out because a budget is used up.
            let Some(reason) = self.reason(at, &costs, to) else { continue };
            let mut partner = None::<(f64, usize)>;
            for &other in self.domains.members(to) {
                let sample = &self.input.vcpus[other];
                let foreign = sample.key.vm != vm;
                if !self.may_move(other)
                    || (foreign && !may_cause)
                    || !self.input.reaches[sample.reach].domain(here)
                {
                    continue;
                }
                let costs = self.costs(other);
                let loss = self.domains.time_at(other, &self.histories[other], here) - costs.here;
                let bearable = !foreign || loss <= costs.here * self.settings.min_gain;
                if bearable && gain - loss > enough && partner.is_none_or(|(least, _)| loss < least) {
                    partner = Some((loss, other));
                }
            }
            let Some((_, other)) = partner else { continue };
            let foreign = self.input.vcpus[other].key.vm != vm;
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
            let may = may || (hungry >= starve && self.wanted[at].is_none());
            (may && self.input.vcpus[at].assigned.is_some()).then_some(u64::from(hungry))
        };
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
                elsewhere && self.input.reaches[self.input.vcpus[at].reach].cpu(cpu)
            };
            let nearest = self.input.machine.nearest(node);
            if let Some(at) = queues.steal_fairly(node, nearest, u64::from(starve), may) {
                let starved = self.histories[at].hungry >= starve;
                self.set(at, Some(domain), if starved { Cause::Starved } else { Cause::Stolen }, None);
            }
        }
    }

    /// A vCPU that has not used memory for a while needs no place.
    fn release(&mut self) {
        for at in 0..self.input.vcpus.len() {
            if self.input.vcpus[at].assigned.is_some() && self.may_move(at) && self.histories[at].is_calm() {
                self.set(at, None, Cause::Calm, None);
            }
        }
    }

    fn steps(&self) -> Vec<Placed> {
        let step = |(at, wanted): (usize, &Option<Wanted>)| {
            let (to, cause, caused_by) = (*wanted)?;
            let to = to.map(Place::Cache);
            let why = (Policy::Vprobe, cause, caused_by);
            (self.input.vcpus[at].assigned != to).then(|| placed(self.input, at, &self.analysis[at], to, why))
        };
        let mut steps = Vec::with_capacity(self.wanted.iter().flatten().count());
        steps.extend(self.wanted.iter().enumerate().filter_map(step));
        steps
    }
}
