//! What a vCPU's time is expected to be on each domain, given what else runs there.
//!
//! Times are in units of a tenth of a local memory access, so that a distance of the SLIT is a time.

use super::{
    super::{Domain, Input, Machine, Reach},
    history::{HOT, History},
};
use crate::world::VmId;

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
    members: Vec<u32>,
    /// All others that count here: they take CPU time.
    others: Vec<u32>,
}

/// Domains of one node.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    node: u32,
    begin: u32,
    end: u32,
}

/// Domains that are worth a look for a vCPU: those of the nodes that its memory is on or of the nearest that its mask reaches, of
/// its own node, and with the least wanted of them. Some may be empty.
type Groups = [Group; HOT + 1 + LEAST];

/// What a decision asks of the machine for every vCPU, prepared for that.
struct Prices {
    /// Of an access to the memory of each node, from each node: a row for each memory.
    access: Vec<f32>,
    /// Of an access to the memory of all nodes alike, from each node.
    mean: Vec<f32>,
    /// Each node and its domains.
    groups: Vec<Group>,
    /// The node of each domain.
    node_of: Vec<u32>,
}

/// What vCPUs with one mask may choose from.
#[derive(Clone, Debug, Default)]
struct Choice {
    /// The node nearest to each that the mask reaches, and its domains; none if it reaches no node.
    nearest: Vec<Group>,
    /// Domains that it reaches with the least wanted of them.
    least: [Group; LEAST],
}

/// Prices of the accesses of one vCPU.
struct Bill<'a> {
    /// To each of the hot nodes, from each node.
    hot: [&'a [f32]; HOT],
    /// To all others.
    mean: &'a [f32],
}

/// All domains, and where the vCPUs are.
pub(super) struct Domains<'a> {
    input: &'a Input<'a>,
    prices: Prices,
    loads: Vec<Load>,
    /// Domain of each vCPU that counts there.
    of: Vec<Option<usize>>,
    /// First for masks that reach all domains, then for others.
    choices: Vec<Choice>,
    /// The choice of each mask of the input.
    choice_of: Vec<u32>,
    /// No domain has fewer lines brought in, nor less reuse. Domains that get fuller meanwhile do not raise it.
    floor: (f32, f32),
}

impl Prices {
    fn new(machine: &Machine) -> Self {
        let nodes = 0..machine.nodes.len();
        let group = |node: usize| {
            let domains = &machine.nodes[node].domains;
            Group { node: node as u32, begin: domains.start as u32, end: domains.end as u32 }
        };
        let access = nodes.clone().flat_map(|to| nodes.clone().map(move |from| machine.distance(from, to)));
        Self {
            access: access.map(f32::from).collect(),
            mean: nodes.clone().map(|node| f32::from(machine.mean_distance(node))).collect(),
            groups: nodes.map(group).collect(),
            node_of: machine.domains.iter().map(|domain| domain.node as u32).collect(),
        }
    }

    /// The first of these nodes that has domains which are reached.
    fn first(&self, nodes: &[usize], reaches: impl Fn(u32) -> bool) -> Group {
        let groups = nodes.iter().map(|&node| self.groups[node]);
        groups.into_iter().find(|group| (group.begin..group.end).any(&reaches)).unwrap_or_default()
    }

    #[inline]
    fn bill(&self, history: &History) -> Bill<'_> {
        let nodes = self.mean.len();
        let row = |(memory, _): (u16, f32)| &self.access[usize::from(memory) * nodes..][..nodes];
        Bill { hot: history.hot.map(row), mean: &self.mean }
    }
}

impl Bill<'_> {
    /// Time of a vCPU for memory on a node: not less than this.
    #[inline]
    fn at_least(&self, history: &History, node: usize) -> f64 {
        f64::from(history.hot[0].1 * self.hot[0][node])
    }

    /// Time of a vCPU for memory on a node.
    #[inline]
    fn at(&self, history: &History, node: usize) -> f64 {
        let mut time = 0.0;
        for (prices, (_, count)) in self.hot.iter().zip(history.hot) {
            time += count * prices[node];
        }
        f64::from(time + history.elsewhere * self.mean[node])
    }
}

impl<'a> Domains<'a> {
    pub(super) fn new(input: &'a Input<'a>, histories: &[History]) -> Self {
        let machine = input.machine;
        let usable = input.usable();
        let cores: f64 = machine.domains.iter().map(|domain| domain.cores_in(&usable)).sum();
        let demand: f64 = histories.iter().map(|history| history.demand).sum();
        let crowded = (demand / cores.max(1.0)).max(1.0) * SLACK;
        let limit = |domain: &Domain| match domain.cores_in(&usable) {
            // No vCPU goes there. vCPUs may be there after a change of masks, and must not be divided by zero.
            0.0 => f64::from(domain.cores),
            cores => cores,
        };
        let load = |domain: &Domain| Load { limit: limit(domain) * crowded, ..Load::default() };
        let mut domains = Self {
            input,
            prices: Prices::new(machine),
            loads: machine.domains.iter().map(load).collect(),
            of: vec![None; input.vcpus.len()],
            choices: Vec::new(),
            choice_of: Vec::new(),
            floor: (0.0, 0.0),
        };
        let mut counts = vec![(0, 0); machine.domains.len()];
        for (history, domain) in histories.iter().filter_map(|history| Some((history, history.domain?))) {
            let (members, others) = &mut counts[domain as usize];
            *(if history.uses_memory { members } else { others }) += 1;
        }
        for (load, (members, others)) in domains.loads.iter_mut().zip(counts) {
            // Room for some that come.
            load.members.reserve(members * 3 / 2);
            load.others.reserve(others);
        }
        for (at, history) in histories.iter().enumerate() {
            if let Some(domain) = history.domain {
                domains.place(at, Some(domain as usize), history);
            }
        }
        domains.floor = domains.loads.iter().fold((f32::MAX, f32::MAX), lower);
        domains.prepare_choices(histories);
        domains
    }

    /// Finds what may be chosen from by each mask. Hosts can have a mask for each VM and many nodes, so that only nodes with
    /// memory of a vCPU with that mask are looked for.
    fn prepare_choices(&mut self, histories: &[History]) {
        let Input { machine, reaches, .. } = *self.input;
        let full = |load: &Load| load.demand / load.limit.max(f64::MIN_POSITIVE);
        let mut order: Vec<(f64, usize)> = self.loads.iter().map(full).zip(0..).collect();
        order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let choice = |reach: Option<&Reach>| {
            let mut choice =
                Choice { nearest: vec![Group::default(); machine.nodes.len()], ..Choice::default() };
            let reached = order.iter().map(|&(_, domain)| domain);
            let reached = reached.filter(|&domain| reach.is_none_or(|reach| reach.domain(domain)));
            for (least, domain) in choice.least.iter_mut().zip(reached) {
                let node = self.prices.node_of[domain];
                *least = Group { node, begin: domain as u32, end: domain as u32 + 1 };
            }
            choice
        };
        let mut choices = vec![choice(None)];
        for (node, nearest) in choices[0].nearest.iter_mut().enumerate() {
            *nearest = self.prices.first(machine.nearest(node), |_| true);
        }
        self.choice_of = vec![0; reaches.len()];
        for (reach, of) in reaches.iter().zip(&mut self.choice_of) {
            if !(0..machine.domains.len()).all(|domain| reach.domain(domain)) {
                *of = choices.len() as u32;
                choices.push(choice(Some(reach)));
            }
        }
        for history in histories.iter().filter(|history| history.uses_memory) {
            let reach = history.reach as usize;
            let nearest = &mut choices[self.choice_of[reach] as usize].nearest;
            for node in history.hot.iter().filter(|hot| hot.1 > 0.0).map(|hot| usize::from(hot.0)) {
                if nearest[node].end == 0 {
                    nearest[node] = self
                        .prices
                        .first(machine.nearest(node), |domain| reaches[reach].domain(domain as usize));
                }
            }
        }
        self.choices = choices;
    }

    /// Where a vCPU is, if it counts there.
    pub(super) fn of(&self, at: usize) -> Option<usize> {
        self.of[at]
    }

    /// vCPUs that use memory on a domain.
    pub(super) fn members(&self, domain: usize) -> &[u32] {
        &self.loads[domain].members
    }

    /// Puts a vCPU on another domain, or on none.
    pub(super) fn place(&mut self, at: usize, to: Option<usize>, history: &History) {
        let demand = history.demand;
        if let Some(from) = std::mem::replace(&mut self.of[at], to) {
            let load = &mut self.loads[from];
            load.demand -= demand;
            if history.uses_memory {
                load.inserted -= history.misses;
                load.reuse -= history.reuse;
                remove(&mut load.members, at);
                self.floor = lower(self.floor, load);
            } else {
                remove(&mut load.others, at);
            }
        }
        if let Some(to) = to {
            let load = &mut self.loads[to];
            load.demand += demand;
            if history.uses_memory {
                load.inserted += history.misses;
                load.reuse += history.reuse;
                load.members.push(at as u32);
            } else {
                load.others.push(at as u32);
            }
        }
    }

    /// Is there room for it? Where there is none anywhere, a domain with less load than its own has.
    fn has_room(&self, load: &Load, at: usize, history: &History) -> bool {
        let after = (load.demand + history.demand) / load.limit;
        after <= 1.0
            || self.of[at].is_some_and(|here| after < self.loads[here].demand / self.loads[here].limit)
    }

    /// The domains worth a look for a vCPU: where its memory is or near it, where it is, and where there is room.
    #[inline(always)]
    fn candidates(&self, at: usize, history: &History, groups: &mut Groups) {
        let here = self.of[at].map(|domain| self.prices.node_of[domain]);
        // Where it is counts as one, and its node's domains count again if its memory is there.
        let mut left = CANDIDATES as u32 - u32::from(here.is_some());
        let mut seen = false;
        // No branches: which ones are needed follows no pattern that a CPU could learn.
        let mut add = |to: &mut Group, group: Group, counts: bool, seen: bool| {
            let count = u32::from(counts) * (group.end - group.begin).min(left);
            left -= count;
            *to = Group { end: group.begin + u32::from(!seen) * count, ..group };
        };
        let (hot, others) = groups.split_at_mut(HOT);
        let choice = &self.choices[self.choice_of[history.reach as usize] as usize];
        for (to, (node, count)) in hot.iter_mut().zip(history.hot) {
            let group = choice.nearest[usize::from(node)];
            let counts = count > 0.0;
            seen |= counts & (here == Some(group.node));
            add(to, group, counts, false);
        }
        let group = here.map_or(Group::default(), |here| self.prices.groups[here as usize]);
        add(&mut others[0], group, true, seen);
        for (to, &least) in others[1..].iter_mut().zip(&choice.least) {
            add(to, least, true, false);
        }
    }

    /// The best domains for a vCPU whose time is `here` where it is.
    pub(super) fn best(&self, at: usize, history: &History, here: f64) -> Best {
        let reach = &self.input.reaches[history.reach as usize];
        // To stay saves nothing.
        let stays = self.of[at];
        let least = if stays.is_some() { 0.0 } else { f64::NEG_INFINITY };
        let (mut roomy, mut any) = (least, least);
        let (mut roomy_to, mut any_to) = (stays, stays);
        let demand = history.demand;
        let least = contention(history, self.floor.0, self.floor.1);
        let instructions = f64::from(history.instructions * INSTRUCTION);
        let bill = self.prices.bill(history);
        let mut groups = Groups::default();
        self.candidates(at, history, &mut groups);
        for group in &groups {
            // Most nodes end here: with the least contention, and with room, there is still nothing better. The accesses to
            // one node are often enough to see that, as rounding keeps the order of sums.
            let node = group.node as usize;
            if here - (instructions + bill.at_least(history, node) + least) <= roomy {
                continue;
            }
            let alone = instructions + bill.at(history, node);
            if here - (alone + least) <= roomy {
                continue;
            }
            for to in group.begin as usize..group.end as usize {
                let load = &self.loads[to];
                let time = alone + contention(history, load.inserted, load.reuse);
                if here - time <= roomy || stays == Some(to) || !reach.domain(to) {
                    continue;
                }
                let gain = here - time * overload(load.demand + demand, load);
                if gain > roomy && self.has_room(load, at, history) {
                    (roomy, roomy_to) = (gain, Some(to));
                }
                if gain > any {
                    (any, any_to) = (gain, Some(to));
                }
            }
        }
        let saving = |gain, to: Option<usize>| to.map(|to| Saving { gain, to });
        Best { roomy: saving(roomy, roomy_to), any: saving(any, any_to) }
    }

    /// Time of a vCPU for memory on a node.
    pub(super) fn memory_at(&self, history: &History, node: usize) -> f64 {
        let (prices, nodes) = (&self.prices, self.prices.mean.len());
        let mut time = 0.0;
        for (memory, count) in history.hot {
            time += count * prices.access[usize::from(memory) * nodes + node];
        }
        f64::from(time + history.elsewhere * prices.mean[node])
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
            false => (load.demand + history.demand, load.inserted, load.reuse),
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
        let mut groups = Groups::default();
        self.candidates(at, history, &mut groups);
        for to in groups.iter().flat_map(|group| group.begin..group.end) {
            let to = to as usize;
            let time = self.time_at(at, history, to);
            if worst.is_none_or(|(most, _)| time > most) {
                worst = Some((time, to));
            }
        }
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
        let share = |&member: &u32| {
            let history = &histories[member as usize];
            (history.vm(), if by_demand { history.demand } else { f64::from(history.misses) })
        };
        let others = if by_demand { &self.loads[here].others[..] } else { &[] };
        let mut shares: Vec<(VmId, f64)> = self.members(here).iter().chain(others).map(share).collect();
        // Most are in order already, as they were when the domain was filled.
        shares.sort_by_key(|(vm, _)| *vm);
        let own_vm = histories[at].vm();
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

/// Takes a vCPU out of a list. The others keep their order.
fn remove(list: &mut Vec<u32>, at: usize) {
    if let Some(position) = list.iter().position(|&one| one as usize == at) {
        list.remove(position);
    }
}

/// The lower one of each.
fn lower(floor: (f32, f32), load: &Load) -> (f32, f32) {
    let less = |a: f32, b: f32| if a < b { a } else { b };
    (less(floor.0, load.inserted), less(floor.1, load.reuse))
}

/// Time that a vCPU and the others lose to each other in a cache with such others.
#[inline]
fn contention(history: &History, inserted: f32, reuse: f32) -> f64 {
    // Not `max()`, which has to mind what is not a number.
    let (inserted, reuse) =
        (if inserted > 0.0 { inserted } else { 0.0 }, if reuse > 0.0 { reuse } else { 0.0 });
    let lost = history.reuse * inserted + history.misses * reuse;
    f64::from(lost * (PUSHED_OUT * LOCAL))
}

/// By how much more CPU time than there is would be due on a domain, at least 1.
#[inline]
fn overload(demand: f64, load: &Load) -> f64 {
    let used = demand / load.limit;
    if used > 1.0 { used } else { 1.0 }
}
