//! Memory of VMs that policies move.

use super::{Core, event::Level, render};
use vnuma_api as api;
use vnuma_policy::{
    memory_move::MemoryReason,
    world::{LastMemoryMove, MemoryMoved, TaskId},
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
            self.describe_once(id, None);
        }
    }

    pub(super) fn tell_memory(&mut self, vm: String, last: &LastMemoryMove) {
        let step = render::memory_step(last);
        self.log(None, Level::Info, format!("{vm}: {}", step.text()));
        self.announce(api::Event::Memory { vm, step });
    }
}
