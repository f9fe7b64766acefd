//! What a vCPU's time is expected to be on each domain, given what else runs there.
//!
//! Times are in units of a tenth of a local memory access, so that a distance of the SLIT is a time.

use super::{
    super::{Domain, Input, Place, Standing},
    history::{HOT, History},
};
use crate::world::VmId;
use std::collections::BTreeMap;

/// An instruction, in tenths of a local memory access of some 200 cycles.
const INSTRUCTION: f32 = 0.05;
/// A local memory access.
const LOCAL: f32 = 10.0;
/// Share of the lines that others bring in which push out one that the vCPU would use again.
const PUSHED_OUT: f32 = 0.25;
/// So much more than its share of the host's CPU time may be wanted on a domain.
const SLACK: f64 = 1.05;
/// Domains that are considered for a vCPU, at most.
const CANDIDATES: usize = 48;

/// Time of a vCPU where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// In all.
    pub(super) here: f64,
    /// Without contention and overload.
    pub(super) alone: f64,
    /// Of that, for memory.
    pub(super) memory: f64,
    /// Factor by which the domain is overloaded, at least 1.
    pub(super) overload: f64,
}

/// What runs on a domain.
#[derive(Clone, Debug, Default)]
struct Load {
    /// CPU time that is due to vCPUs that are confined to it, in CPUs.
    demand: f64,
    /// How much may be.
    limit: f64,
    /// Lines that are brought into the cache in a period.
    inserted: f32,
    /// Sum of the vCPUs' reuse.
    reuse: f32,
    /// vCPUs that use memory.
    members: Vec<usize>,
}

/// All domains, and where the vCPUs are.
pub(super) struct Domains<'a> {
    input: &'a Input<'a>,
    loads: Vec<Load>,
    /// Domain of each vCPU that counts there.
    of: Vec<Option<usize>>,
    /// Domains with the least wanted of them, to be tried by all.
    least: Vec<usize>,
}

impl<'a> Domains<'a> {
    pub(super) fn new(input: &'a Input<'a>, histories: &[History]) -> Self {
        let machine = input.machine;
        let cores: u32 = machine.domains.iter().map(|domain| domain.cores).sum();
        let demand: f64 = input.vcpus.iter().map(|vcpu| vcpu.demand(input.period_ns)).sum();
        let crowded = (demand / f64::from(cores.max(1))).max(1.0) * SLACK;
        let load = |domain: &Domain| Load { limit: f64::from(domain.cores) * crowded, ..Load::default() };
        let mut domains = Self {
            input,
            loads: machine.domains.iter().map(load).collect(),
            of: vec![None; input.vcpus.len()],
            least: Vec::new(),
        };
        for (at, vcpu) in input.vcpus.iter().enumerate() {
            let reach = &input.reaches[vcpu.reach];
            let stays = vcpu.standing(input) != Standing::Free;
            let there = match vcpu.assigned {
                Some(Place::Cache(domain)) => Some(domain),
                _ => vcpu.cpu.and_then(|cpu| machine.domain_of(cpu)),
            };
            // It may still be on a CPU that its mask does not have any more.
            let there = there.filter(|&domain| stays || reach.domain(domain)).or_else(|| reach.only_domain());
            // One that uses no memory and may go elsewhere makes room by itself.
            let counts = histories[at].uses_memory || stays || reach.only_domain().is_some();
            domains.place(at, there.filter(|_| counts), &histories[at]);
        }
        let mut order: Vec<usize> = (0..domains.loads.len()).collect();
        let full = |at: usize| domains.loads[at].demand / domains.loads[at].limit.max(f64::MIN_POSITIVE);
        order.sort_by(|&a, &b| full(a).total_cmp(&full(b)).then(a.cmp(&b)));
        order.truncate(2);
        domains.least = order;
        domains
    }

    /// Where a vCPU is, if it counts there.
    pub(super) fn of(&self, at: usize) -> Option<usize> {
        self.of[at]
    }

    /// vCPUs that use memory on a domain.
    pub(super) fn members(&self, domain: usize) -> &[usize] {
        &self.loads[domain].members
    }

    /// Puts a vCPU on another domain, or on none.
    pub(super) fn place(&mut self, at: usize, to: Option<usize>, history: &History) {
        let demand = self.input.vcpus[at].demand(self.input.period_ns);
        if let Some(from) = std::mem::replace(&mut self.of[at], to) {
            let load = &mut self.loads[from];
            load.demand -= demand;
            if history.uses_memory {
                load.inserted -= history.misses;
                load.reuse -= history.reuse;
                load.members.retain(|&member| member != at);
            }
        }
        if let Some(to) = to {
            let load = &mut self.loads[to];
            load.demand += demand;
            if history.uses_memory {
                load.inserted += history.misses;
                load.reuse += history.reuse;
                load.members.push(at);
            }
        }
    }

    /// Is there room for it? Where there is none anywhere, a domain with less load than its own has.
    pub(super) fn has_room(&self, to: usize, at: usize, here: Option<usize>) -> bool {
        let demand = self.input.vcpus[at].demand(self.input.period_ns);
        let after = (self.loads[to].demand + demand) / self.loads[to].limit;
        after <= 1.0 || here.is_some_and(|here| after < self.loads[here].demand / self.loads[here].limit)
    }

    /// Domains worth a look for a vCPU: where its memory is or near it, where it is, and where there is room.
    pub(super) fn candidates(&self, at: usize, history: &History) -> Vec<usize> {
        let machine = self.input.machine;
        let mut candidates: Vec<usize> = self.of[at].into_iter().collect();
        for &(node, _) in history.hot.iter().take(HOT).filter(|(_, count)| *count > 0.0) {
            if let Some(&nearest) = machine.nearest(node as usize).first() {
                candidates.extend(machine.nodes[nearest].domains.clone());
            }
        }
        if let Some(here) = self.of[at] {
            candidates.extend(machine.nodes[machine.domains[here].node].domains.clone());
        }
        candidates.extend(&self.least);
        candidates.truncate(CANDIDATES);
        candidates
    }

    /// Time for memory on a domain.
    pub(super) fn memory_at(&self, history: &History, to: usize) -> f64 {
        let machine = self.input.machine;
        let node = machine.domains[to].node;
        let hot = history.hot.iter().filter(|(_, count)| *count > 0.0);
        let priced = hot.map(|&(memory, count)| count * f32::from(machine.distance(node, memory as usize)));
        f64::from(priced.sum::<f32>() + history.elsewhere * f32::from(machine.mean_distance(node)))
    }

    /// Time that sharing a cache takes, of the vCPU and of the others.
    fn contention_at(&self, at: usize, history: &History, to: usize) -> f64 {
        let load = &self.loads[to];
        let (mut inserted, mut reuse) = (load.inserted, load.reuse);
        if self.of[at] == Some(to) && history.uses_memory {
            (inserted, reuse) = (inserted - history.misses, reuse - history.reuse);
        }
        let lost = history.reuse * inserted.max(0.0) + history.misses * reuse.max(0.0);
        f64::from(lost * PUSHED_OUT * LOCAL)
    }

    /// By how much more CPU time is due on a domain than there is.
    fn overload_at(&self, at: usize, to: usize) -> f64 {
        let load = &self.loads[to];
        let arriving = self.of[at] != Some(to);
        let demand =
            load.demand + if arriving { self.input.vcpus[at].demand(self.input.period_ns) } else { 0.0 };
        (demand / load.limit).max(1.0)
    }

    /// Time of a vCPU on a domain.
    pub(super) fn time_at(&self, at: usize, history: &History, to: usize) -> f64 {
        let alone = f64::from(history.instructions * INSTRUCTION) + self.memory_at(history, to);
        (alone + self.contention_at(at, history, to)) * self.overload_at(at, to)
    }

    /// Time of a vCPU where it is. One that is nowhere yet counts as being on the worst of its candidates.
    pub(super) fn costs(&self, at: usize, history: &History) -> Costs {
        let worst = |a: usize, b: usize| {
            if self.time_at(at, history, b) > self.time_at(at, history, a) { b } else { a }
        };
        let here = self.of[at].or_else(|| self.candidates(at, history).into_iter().reduce(worst));
        let Some(here) = here else { return Costs { here: 0.0, alone: 0.0, memory: 0.0, overload: 1.0 } };
        let memory = self.memory_at(history, here);
        let alone = f64::from(history.instructions * INSTRUCTION) + memory;
        let overload = self.overload_at(at, here);
        Costs { here: self.time_at(at, history, here), alone, memory, overload }
    }

    /// Of what makes a vCPU's domain crowded: the share of its own VM, and the VM with the largest share of all others.
    pub(super) fn largest(
        &self,
        at: usize,
        by_demand: bool,
        histories: &[History],
    ) -> (f64, Option<(VmId, f64)>) {
        let Some(here) = self.of[at] else { return (0.0, None) };
        let mut shares: BTreeMap<VmId, f64> = BTreeMap::new();
        for &member in self.members(here) {
            let vcpu = &self.input.vcpus[member];
            let share = match by_demand {
                true => vcpu.demand(self.input.period_ns),
                false => f64::from(histories[member].misses),
            };
            *shares.entry(vcpu.key.vm).or_default() += share;
        }
        let own = shares.remove(&self.input.vcpus[at].key.vm).unwrap_or(0.0);
        let largest = shares.into_iter().reduce(|a, b| if b.1 > a.1 { b } else { a });
        (own, largest)
    }
}
