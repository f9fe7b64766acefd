//! Moves of vCPUs, and of memory, that an operator or a re-home has asked for, and the end of those that are to stop or whose VM is gone.

use super::{Now, Propose};
use crate::{Action, Reason, Step, task::TaskId};
use std::collections::BTreeSet;

/// Moves of one vCPU are made one after the other.
pub struct Moving;

impl Propose for Moving {
    type Memory = ();

    fn propose(&self, now: &Now<'_>, (): &mut ()) -> Vec<Step> {
        let of = now.vms().filter_map(|(_, _, vm)| vm.scheduling.memory.stop);
        let moves = now.world.left().iter().filter_map(|left| left.moving).chain(of);
        let stop = |task: TaskId| Step::now(task.vm, Action::StopMemory(task, Reason::Ended));
        let mut steps: Vec<_> = moves.map(stop).collect();
        for (id, _, vm) in now.vms() {
            let mut vcpus = BTreeSet::new();
            for task in &vm.moves {
                let first = task.what().is_some_and(|wanted| vcpus.insert(wanted.vcpu));
                if let Some(wanted) = task.wanted.as_ref().filter(|_| first) {
                    let reason = if wanted.request.is_some() { Reason::Requested } else { Reason::Rehomed };
                    steps.push(Step::now(id, Action::Move(*wanted, reason)));
                }
            }
            let memory = vm.scheduling.memory.task.wanted.clone();
            steps.extend(memory.map(|order| Step::now(id, Action::MoveMemory(order))));
        }
        steps
    }
}
