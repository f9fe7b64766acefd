//! Moves of vCPUs, and of memory, that an operator or a re-home has asked for.

use super::{Now, Propose};
use crate::{Action, Reason, Step};

/// Moves of one vCPU are made one after the other.
pub struct Moving;

impl Propose for Moving {
    type Memory = ();

    fn propose(&self, now: &Now<'_>, (): ()) -> (Vec<Step>, ()) {
        let mut steps = Vec::new();
        for (id, _, vm) in now.vms() {
            for (position, wanted) in vm.moves.iter().enumerate() {
                let first = !vm.moves[..position].iter().any(|before| before.vcpu == wanted.vcpu);
                if first && !wanted.in_flight {
                    let reason = if wanted.request.is_some() { Reason::Requested } else { Reason::Rehomed };
                    steps.push(Step::now(id, Action::Move(*wanted, reason)));
                }
            }
            let memory = vm.scheduling.memory.wanted.clone();
            steps.extend(memory.map(|order| Step::now(id, Action::MoveMemory(order))));
        }
        (steps, ())
    }
}
