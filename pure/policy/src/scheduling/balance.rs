//! NUMA-aware load balance: Algorithm 2 of *vProbe: Scheduling Virtual Machines on NUMA Systems*, section III-D, the
//! NUMA-blind stealing of the Credit scheduler that it replaces, and stealing that starves nobody.
//!
//! The numbers in the comments are the lines of the algorithm.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};
use vnuma_model::CpuId;

/// A vCPU that waits in a run queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waiting {
    /// The caller's name for it.
    pub vcpu: usize,
    /// Its LLC access pressure.
    pub pressure: f64,
    /// How long it has been waiting, in any unit.
    pub waited: u64,
    /// Its part of the queue's `workload`.
    pub load: u32,
}

/// The run queue of a CPU.
#[derive(Clone, Debug, PartialEq)]
pub struct RunQueue {
    /// The CPU.
    pub cpu: CpuId,
    /// Its node, by position.
    pub node: usize,
    /// vCPUs in it: the paper's `workload`.
    pub workload: u32,
    /// Those that could be stolen.
    pub runnable: Vec<Waiting>,
}

/// The run queues of a host, found by node and by CPU. Those in which nothing is runnable are left out: line 4 would pass
/// over them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunQueues {
    queues: Vec<RunQueue>,
    /// `loadList` of each node: positions in `queues`, the most loaded one first.
    load_lists: Vec<Vec<usize>>,
    by_cpu: BTreeMap<CpuId, usize>,
    /// All that wait, the longest one first: reversed time, vCPU, position in `queues`.
    by_wait: BTreeSet<(Reverse<u64>, usize, usize)>,
}

impl RunQueues {
    /// Of these queues on a host with so many nodes.
    pub fn new(nodes: usize, queues: Vec<RunQueue>) -> Self {
        let mut all = Self { load_lists: vec![Vec::new(); nodes], queues, ..Self::default() };
        for (at, queue) in all.queues.iter().enumerate().filter(|(_, queue)| !queue.runnable.is_empty()) {
            all.load_lists[queue.node].push(at);
            all.by_cpu.insert(queue.cpu, at);
            all.by_wait.extend(queue.runnable.iter().map(|one| (Reverse(one.waited), one.vcpu, at)));
        }
        for list in &mut all.load_lists {
            list.sort_by_key(|&at| rank(&all.queues[at]));
        }
        all
    }

    /// Nothing waits.
    pub fn is_empty(&self) -> bool {
        self.by_cpu.is_empty()
    }

    /// Algorithm 2: steals a vCPU for an idle CPU of the node `local`. `nodes` is the order in which `nextNode()` gives the
    /// others. `may` says whether the idle CPU may have a vCPU: masks are not in the algorithm, but nobody may break one.
    pub fn steal(&mut self, local: usize, nodes: &[usize], may: impl Fn(usize) -> bool) -> Option<usize> {
        // 1: begin with the node of the idle CPU
        let order = std::iter::once(local).chain(nodes.iter().copied().filter(|&node| node != local));
        // 2, 9, 10: the printed loop has no end if nothing is runnable anywhere; here each node has its turn once
        let found = order.filter_map(|node| self.load_lists.get(node)).find_map(|load_list| {
            // 3: the node's CPUs, the most loaded one first
            load_list.iter().find_map(|&at| {
                // 4: is there one that is runnable?
                let runnable = self.queues[at].runnable.iter().filter(|waiting| may(waiting.vcpu));
                // 5: the one with the least pressure
                let least =
                    runnable.min_by(|a, b| a.pressure.total_cmp(&b.pressure).then(a.vcpu.cmp(&b.vcpu)))?;
                // 6: this has to leave both loops, or line 11 is never reached
                Some((least.vcpu, at))
                // 7, 8
            })
        });
        // 11, 12
        self.take(found)
    }

    /// What Xen's Credit scheduler does: an idle CPU looks at the others in the order of their numbers, begins after
    /// itself, and takes the first vCPU that it may run, whichever node that comes from.
    pub fn steal_blindly(&mut self, idle: CpuId, may: impl Fn(usize) -> bool) -> Option<usize> {
        let mut order = self.by_cpu.range(idle + 1..).chain(self.by_cpu.range(..idle));
        let found = order.find_map(|(_, &at)| {
            let first = self.queues[at].runnable.iter().find(|waiting| may(waiting.vcpu))?;
            Some((first.vcpu, at))
        });
        self.take(found)
    }

    /// Stealing that starves nobody: who has been waiting for at least `limit` goes first, the longest one before all,
    /// whatever its pressure and its node. Else [`steal`](Self::steal).
    pub fn steal_fairly(
        &mut self,
        local: usize,
        nodes: &[usize],
        limit: u64,
        may: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let mut starving = self.by_wait.iter().take_while(|(waited, _, _)| waited.0 >= limit);
        match starving.find(|(_, vcpu, _)| may(*vcpu)).map(|&(_, vcpu, at)| (vcpu, at)) {
            Some(found) => self.take(Some(found)),
            None => self.steal(local, nodes, may),
        }
    }

    /// It is in no queue any more.
    fn take(&mut self, found: Option<(usize, usize)>) -> Option<usize> {
        let (vcpu, at) = found?;
        let queue = &mut self.queues[at];
        let position = queue.runnable.iter().position(|waiting| waiting.vcpu == vcpu)?;
        let Waiting { waited, load, .. } = queue.runnable.remove(position);
        queue.workload = queue.workload.saturating_sub(load);
        self.by_wait.remove(&(Reverse(waited), vcpu, at));
        let list = &mut self.load_lists[queue.node];
        list.retain(|&other| other != at);
        if queue.runnable.is_empty() {
            self.by_cpu.remove(&queue.cpu);
        } else {
            let key = rank(&self.queues[at]);
            let before = list.partition_point(|&other| rank(&self.queues[other]) < key);
            list.insert(before, at);
        }
        Some(vcpu)
    }
}

/// Orders a `loadList`.
fn rank(queue: &RunQueue) -> (Reverse<u32>, CpuId) {
    (Reverse(queue.workload), queue.cpu)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn queue(cpu: CpuId, node: usize, workload: u32, runnable: &[(usize, f64)]) -> RunQueue {
        let waiting = |&(vcpu, pressure)| Waiting { vcpu, pressure, waited: 0, load: 1 };
        RunQueue { cpu, node, workload, runnable: runnable.iter().map(waiting).collect() }
    }

    #[test]
    fn the_local_node_comes_first_then_the_longest_queue_then_the_least_pressure() {
        let queues = || {
            RunQueues::new(
                3,
                vec![
                    queue(0, 0, 9, &[(1, 0.1)]),
                    queue(4, 1, 2, &[(2, 5.0)]),
                    queue(5, 1, 4, &[(3, 25.0), (4, 7.0), (5, 30.0)]),
                    queue(6, 1, 5, &[]),
                ],
            )
        };
        assert_eq!(queues().steal(1, &[0, 1], |_| true), Some(4));
        assert_eq!(queues().steal(1, &[0, 1], |vcpu| ![3, 4, 5].contains(&vcpu)), Some(2));
        assert_eq!(queues().steal(1, &[0, 1], |vcpu| vcpu == 1), Some(1), "then a remote node");
        assert_eq!(queues().steal(1, &[0, 1], |_| false), None);
        assert_eq!(queues().steal(2, &[1, 0], |_| true), Some(4), "in the order of nextNode()");
        let mut queues = queues();
        let mut order = Vec::new();
        while let Some(vcpu) = queues.steal(1, &[0, 1], |_| true) {
            order.push(vcpu);
        }
        assert_eq!(order, [4, 3, 2, 5, 1], "a queue that was stolen from is less loaded");
        assert!(queues.is_empty());
    }

    #[test]
    fn credit_looks_at_the_next_cpu_whichever_node_it_is_on() {
        let queues = || {
            let queues =
                [queue(0, 0, 1, &[(1, 0.0)]), queue(1, 0, 1, &[]), queue(2, 1, 3, &[(3, 9.0), (2, 0.0)])];
            RunQueues::new(2, queues.to_vec())
        };
        assert_eq!(queues().steal_blindly(1, |_| true), Some(3), "and there the first");
        assert_eq!(queues().steal_blindly(2, |_| true), Some(1), "CPU 0 follows the last one");
        assert_eq!(queues().steal_blindly(0, |vcpu| vcpu == 1), None, "not from itself");
    }

    #[test]
    fn who_waits_too_long_goes_before_pressure_and_node() {
        let queues = |waited| {
            let mut queues = [queue(0, 0, 9, &[(1, 99.0)]), queue(4, 1, 2, &[(2, 5.0)])];
            queues[0].runnable[0].waited = waited;
            RunQueues::new(2, queues.to_vec())
        };
        assert_eq!(queues(2).steal_fairly(1, &[0, 1], 3, |_| true), Some(2));
        assert_eq!(queues(3).steal_fairly(1, &[0, 1], 3, |_| true), Some(1));
        assert_eq!(queues(3).steal_fairly(1, &[0, 1], 3, |vcpu| vcpu != 1), Some(2));
    }

    #[test]
    fn who_was_stolen_waits_no_more() {
        let mut all = queue(0, 0, 3, &[(1, 9.0), (2, 5.0), (3, 7.0)]);
        all.runnable.iter_mut().zip([7, 9, 8]).for_each(|(one, waited)| one.waited = waited);
        let mut queues = RunQueues::new(1, vec![all]);
        let order: Vec<_> = (0..4).map(|_| queues.steal_fairly(0, &[], 3, |_| true)).collect();
        assert_eq!(order, [Some(2), Some(3), Some(1), None]);
    }

    proptest! {
        /// One idle CPU, and a newcomer without any pressure every round: a vCPU that they overtake has its turn after at
        /// most `limit` rounds and one for each that has been waiting as long.
        #[test]
        fn nobody_starves(pressures in proptest::collection::vec(1.0_f64..100.0, 1..20), limit in 1_u64..5) {
            let mut waiting: Vec<Waiting> = pressures.iter().enumerate()
                .map(|(vcpu, &pressure)| Waiting { vcpu, pressure, waited: 0, load: 1 }).collect();
            let victim = waiting.iter().max_by(|a, b| a.pressure.total_cmp(&b.pressure)).unwrap().vcpu;
            for round in 0.. {
                prop_assert!(round <= limit + pressures.len() as u64, "{} still waits", victim);
                waiting.push(Waiting { vcpu: 1000 + round as usize, pressure: 0.0, waited: 0, load: 1 });
                let queue = RunQueue { cpu: 0, node: 0, workload: 1, runnable: waiting.clone() };
                let stolen = RunQueues::new(1, vec![queue]).steal_fairly(0, &[], limit, |_| true).unwrap();
                if stolen == victim {
                    break;
                }
                waiting.retain(|one| one.vcpu != stolen);
                waiting.iter_mut().for_each(|one| one.waited += 1);
            }
        }
    }
}
