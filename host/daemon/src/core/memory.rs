//! Memory of VMs that policies move.

use super::{
    Core,
    event::{Ask, Level},
    render,
};
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
            if let Some((_, vm)) = self.world.vm_mut(id) {
                vm.described_ns = now_ns;
            }
            self.ask_if_connected(id, Ask::Describe);
        }
    }

    /// Ends the move that is under way if `is_its` holds for its reason.
    pub(super) fn stop_memory(&mut self, id: VmId, is_its: impl FnOnce(&MemoryReason) -> bool) {
        let begun = self.vm(id).and_then(|vm| vm.scheduling.memory.task.begun());
        if begun.is_some_and(|begun| is_its(&begun.order.why)) {
            self.world.add_step(id, Action::StopMemory(Reason::Ended));
        }
    }

    pub(super) fn tell_memory(&mut self, vm: String, last: &LastMemoryMove) {
        let step = render::memory_step(last);
        self.log(Level::Info, format!("{vm}: {}", step.text()));
        self.announce(api::Event::Memory { vm, step });
    }
}
