//! What a vCPU's time is expected to be on each domain, given what else runs there.
//!
//! Times are in units of a tenth of a local memory access, so that a distance of the SLIT is a time.

use super::{
    super::{Analysis, Domain, Input, Place, Standing},
    history::History,
};
use crate::world::VmId;
use std::ops::Range;

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
/// Of these, how many are considered because the least is wanted of them.
const LEAST: usize = 2;

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

/// What a vCPU would save on a domain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Saving {
    pub(super) gain: f64,
    pub(super) to: usize,
}

/// Where a vCPU would save most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Best {
    /// Of the domains with room for it, and of that where it is.
    pub(super) roomy: Option<Saving>,
    /// Of all.
    pub(super) any: Option<Saving>,
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
    /// All others that count here: they take CPU time.
    others: Vec<usize>,
}

/// All domains, and where the vCPUs are.
pub(super) struct Domains<'a> {
    input: &'a Input<'a>,
    loads: Vec<Load>,
    /// CPU time that is due to each vCPU, in CPUs.
    demands: Vec<f64>,
    /// Domain of each vCPU that counts there.
    of: Vec<Option<usize>>,
    /// Domains with the least wanted of them, to be tried by all.
    least: Vec<usize>,
    /// No domain has fewer lines brought in, nor less reuse. Domains that get fuller meanwhile do not raise it.
    floor: (f32, f32),
}

impl<'a> Domains<'a> {
    pub(super) fn new(input: &'a Input<'a>, analysis: &[Analysis], histories: &[History]) -> Self {
        let machine = input.machine;
        let cores: u32 = machine.domains.iter().map(|domain| domain.cores).sum();
        let demands: Vec<f64> = input.vcpus.iter().map(|vcpu| vcpu.demand(input.period_ns)).collect();
        let crowded = (demands.iter().sum::<f64>() / f64::from(cores.max(1))).max(1.0) * SLACK;
        let load = |domain: &Domain| Load { limit: f64::from(domain.cores) * crowded, ..Load::default() };
        let mut domains = Self {
            input,
            loads: machine.domains.iter().map(load).collect(),
            demands,
            of: vec![None; input.vcpus.len()],
            least: Vec::new(),
            floor: (0.0, 0.0),
        };
        for (at, vcpu) in input.vcpus.iter().enumerate() {
            let reach = &input.reaches[vcpu.reach];
            let stays = analysis[at].standing != Standing::Free;
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
        domains.floor = domains.loads.iter().fold((f32::MAX, f32::MAX), lower);
        let full = |load: &Load| load.demand / load.limit.max(f64::MIN_POSITIVE);
        let mut order: Vec<(f64, usize)> = domains.loads.iter().map(full).zip(0..).collect();
        order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        domains.least = order.into_iter().take(LEAST).map(|(_, domain)| domain).collect();
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
        let demand = self.demands[at];
        if let Some(from) = std::mem::replace(&mut self.of[at], to) {
            let load = &mut self.loads[from];
            load.demand -= demand;
            if history.uses_memory {
                load.inserted -= history.misses;
                load.reuse -= history.reuse;
                load.members.retain(|&member| member != at);
                self.floor = lower(self.floor, load);
            } else {
                load.others.retain(|&other| other != at);
            }
        }
        if let Some(to) = to {
            let load = &mut self.loads[to];
            load.demand += demand;
            if history.uses_memory {
                load.inserted += history.misses;
                load.reuse += history.reuse;
                load.members.push(at);
            } else {
                load.others.push(at);
            }
        }
    }

    /// Is there room for it? Where there is none anywhere, a domain with less load than its own has.
    fn has_room(&self, load: &Load, at: usize) -> bool {
        let after = (load.demand + self.demands[at]) / load.limit;
        after <= 1.0
            || self.of[at].is_some_and(|here| after < self.loads[here].demand / self.loads[here].limit)
    }

    /// Calls `look` with the domains worth a look for a vCPU, and their node: where its memory is or near it, where it is,
    /// and where there is room.
    fn candidates(&self, at: usize, history: &History, mut look: impl FnMut(usize, Range<usize>)) {
        let machine = self.input.machine;
        let here = self.of[at].map(|domain| machine.domains[domain].node);
        // Where it is counts as one, and its node's domains count again if its memory is there.
        let mut left = CANDIDATES - usize::from(here.is_some());
        let mut add = |domains: Range<usize>, seen: bool| {
            let count = domains.len().min(left);
            left -= count;
            if count > 0 && !seen {
                look(machine.domains[domains.start].node, domains.start..domains.start + count);
            }
        };
        let mut seen = false;
        for &(node, _) in history.hot.iter().filter(|(_, count)| *count > 0.0) {
            if let Some(&nearest) = machine.nearest(node as usize).first() {
                seen |= here == Some(nearest);
                add(machine.nodes[nearest].domains.clone(), false);
            }
        }
        if let Some(here) = here {
            add(machine.nodes[here].domains.clone(), seen);
        }
        for &least in &self.least {
            add(least..least + 1, false);
        }
    }

    /// The best domains for a vCPU whose time is `here` where it is.
    pub(super) fn best(&self, at: usize, history: &History, here: f64) -> Best {
        let reach = &self.input.reaches[self.input.vcpus[at].reach];
        // To stay saves nothing.
        let stay = self.of[at].map(|to| Saving { gain: 0.0, to });
        let mut best = Best { roomy: stay, any: stay };
        let better = |gain: f64, than: Option<Saving>| than.is_none_or(|than| gain > than.gain);
        let (here_at, demand) = (self.of[at], self.demands[at]);
        let least = contention(history, self.floor.0, self.floor.1);
        self.candidates(at, history, |node, domains| {
            let alone = self.alone_at(history, node);
            // Most nodes end here: with the least contention, and with room, there is still nothing better.
            if !better(here - (alone + least), best.roomy) {
                return;
            }
            for to in domains.filter(|&to| here_at != Some(to) && reach.domain(to)) {
                let load = &self.loads[to];
                let time = alone + contention(history, load.inserted, load.reuse);
                if !better(here - time, best.roomy) {
                    continue;
                }
                let gain = here - time * overload(load.demand + demand, load);
                if better(gain, best.roomy) && self.has_room(load, at) {
                    best.roomy = Some(Saving { gain, to });
                }
                if better(gain, best.any) {
                    best.any = Some(Saving { gain, to });
                }
            }
        });
        best
    }

    /// Time of a vCPU for memory on a node.
    #[inline]
    pub(super) fn memory_at(&self, history: &History, node: usize) -> f64 {
        let machine = self.input.machine;
        let distances = machine.distances_from(node);
        let mut time = 0.0;
        for (memory, count) in history.hot {
            time += count * f32::from(distances[memory as usize]);
        }
        f64::from(time + history.elsewhere * f32::from(machine.mean_distance(node)))
    }

    /// Time of a vCPU on a node that it has for itself.
    fn alone_at(&self, history: &History, node: usize) -> f64 {
        f64::from(history.instructions * INSTRUCTION) + self.memory_at(history, node)
    }

    /// Time of a vCPU on a domain, of which it takes so much on the node alone, and the factor of the overload in it.
    fn beside_others(&self, at: usize, history: &History, to: usize, alone: f64) -> (f64, f64) {
        let load = &self.loads[to];
        let (demand, inserted, reuse) = match self.of[at] == Some(to) {
            true if history.uses_memory => {
                (load.demand, load.inserted - history.misses, load.reuse - history.reuse)
            }
            true => (load.demand, load.inserted, load.reuse),
            false => (load.demand + self.demands[at], load.inserted, load.reuse),
        };
        let overload = overload(demand, load);
        ((alone + contention(history, inserted, reuse)) * overload, overload)
    }

    /// Time of a vCPU on a domain.
    pub(super) fn time_at(&self, at: usize, history: &History, to: usize) -> f64 {
        let alone = self.alone_at(history, self.input.machine.domains[to].node);
        self.beside_others(at, history, to, alone).0
    }

    /// Time of a vCPU where it is. One that is nowhere yet counts as being on the worst of its candidates.
    pub(super) fn costs(&self, at: usize, history: &History) -> Costs {
        let here = self.of[at].or_else(|| self.worst(at, history));
        let Some(here) = here else { return Costs { here: 0.0, alone: 0.0, memory: 0.0, overload: 1.0 } };
        let memory = self.memory_at(history, self.input.machine.domains[here].node);
        let alone = f64::from(history.instructions * INSTRUCTION) + memory;
        let (here, overload) = self.beside_others(at, history, here, alone);
        Costs { here, alone, memory, overload }
    }

    /// The candidate where a vCPU takes the most time.
    fn worst(&self, at: usize, history: &History) -> Option<usize> {
        let mut worst = None::<(f64, usize)>;
        self.candidates(at, history, |_, domains| {
            for to in domains {
                let time = self.time_at(at, history, to);
                if worst.is_none_or(|(most, _)| time > most) {
                    worst = Some((time, to));
                }
            }
        });
        worst.map(|(_, to)| to)
    }

    /// Of what makes a vCPU's domain crowded: the share of its own VM, and the VM with the largest share of all others.
    pub(super) fn largest(
        &self,
        at: usize,
        by_demand: bool,
        histories: &[History],
    ) -> (f64, Option<(VmId, f64)>) {
        let Some(here) = self.of[at] else { return (0.0, None) };
        let share = |&member: &usize| {
            let share = if by_demand { self.demands[member] } else { f64::from(histories[member].misses) };
            (self.input.vcpus[member].key.vm, share)
        };
        let others = if by_demand { &self.loads[here].others[..] } else { &[] };
        let mut shares: Vec<(VmId, f64)> = self.members(here).iter().chain(others).map(share).collect();
        // Most are in order already, as they were when the domain was filled.
        shares.sort_by_key(|(vm, _)| *vm);
        let own_vm = self.input.vcpus[at].key.vm;
        let (mut own, mut largest) = (0.0, None::<(VmId, f64)>);
        for vm in shares.chunk_by(|a, b| a.0 == b.0) {
            let sum = vm.iter().map(|(_, share)| share).sum();
            if vm[0].0 == own_vm {
                own = sum;
            } else if largest.is_none_or(|(_, most)| sum > most) {
                largest = Some((vm[0].0, sum));
            }
        }
        (own, largest)
    }
}

/// The lower one of each.
fn lower(floor: (f32, f32), load: &Load) -> (f32, f32) {
    (floor.0.min(load.inserted), floor.1.min(load.reuse))
}

/// Time that a vCPU and the others lose to each other in a cache with such others.
fn contention(history: &History, inserted: f32, reuse: f32) -> f64 {
    let lost = history.reuse * inserted.max(0.0) + history.misses * reuse.max(0.0);
    f64::from(lost * PUSHED_OUT * LOCAL)
}

/// By how much more CPU time than there is would be due on a domain, at least 1.
fn overload(demand: f64, load: &Load) -> f64 {
    (demand / load.limit).max(1.0)
}
