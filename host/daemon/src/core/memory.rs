//! Memory of VMs that policies move.

use super::{Core, event::Level, render};
use vnuma_api as api;
use vnuma_policy::{
    Action, Reason,
    memory_move::MemoryReason,
    world::{LastMemoryMove, MemoryMoved, TaskId, VmId},
};

impl Core {
    /// The thread that moves pages reports how far it is. `ended`: the move is over.
    pub(super) fn memory_moved(&mut self, task: TaskId, moved: MemoryMoved, ended: bool) {
        let (id, now_ns) = (task.vm, self.now_ns);
        let Some(last) = self.world.memory_moved(task, moved, ended, now_ns) else { return };
        if !ended {
            return;
        }
        self.tell_memory(self.name_of(id), &last);
        // A re-home needs a new description to go on.
        if last.moved.bytes > 0 || matches!(last.order.why, MemoryReason::Rehome(_)) {
            // A guest node may have another home by now, which is published when the VM is described.
            self.describe_once(id);
        }
    }

    /// Ends the move that is under way if `is_its` holds for its reason.
    pub(super) fn stop_memory(&mut self, id: VmId, is_its: impl FnOnce(&MemoryReason) -> bool) {
        let Some(moves) = self.vm(id).map(|vm| &vm.scheduling.memory.task) else { return };
        let its = moves.begun().filter(|begun| is_its(&begun.order.why)).and_then(|_| moves.id());
        if let Some(task) = its {
            self.world.add_step(id, Action::StopMemory(task, Reason::Ended));
        }
    }

    pub(super) fn tell_memory(&mut self, vm: String, last: &LastMemoryMove) {
        let step = render::memory_step(last);
        self.log(Level::Info, format!("{vm}: {}", step.text()));
        self.announce(api::Event::Memory { vm, step });
    }
}
