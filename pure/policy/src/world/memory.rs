//! Memory of VMs that is moved, to their vCPUs or home: what is wanted, what is under way, and how the last move ended.
//!
//! ```text
//!   a period ──▶ wanted ──▶ begun: pages are being moved ──▶ last: how many were, how many could not be
//!                  │                    │
//!                  └── another policy ──┴──▶ stopped, with what was moved so far
//! ```

use super::{Task, TaskId, VmId, World};
use crate::memory_move::{MemoryReason, MoveMemory, PAGE};

/// How far a move has got.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryMoved {
    /// Bytes that were moved.
    pub bytes: u64,
    /// Pages that somebody holds (VFIO, direct I/O).
    pub busy: u64,
    /// Pages that other processes have mapped, too.
    pub shared: u64,
    /// Pages that could not be moved for another reason.
    pub failed: u64,
    /// The longest that pages were held while they moved, nanoseconds.
    pub longest_hold_ns: u64,
    /// Why it ended early.
    pub problem: Option<String>,
}

impl MemoryMoved {
    /// Bytes that stayed.
    pub(crate) fn stayed(&self) -> u64 {
        self.busy.saturating_add(self.shared).saturating_add(self.failed).saturating_mul(PAGE)
    }
}

/// The last move of a VM's memory.
#[derive(Clone, Debug, PartialEq)]
pub struct LastMemoryMove {
    /// What was wanted, and why.
    pub order: MoveMemory,
    /// Its figures rest on assumed accesses, as nothing is counted on this host.
    pub assumed: bool,
    /// When it began, nanoseconds.
    pub began_ns: u64,
    /// When it ended; none while it is under way.
    pub ended_ns: Option<u64>,
    /// How far it has got.
    pub moved: MemoryMoved,
}

/// How the memory of a VM is moved.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryMoves {
    /// The move that is wanted or under way, and the last one.
    pub task: Task<MoveMemory, LastMemoryMove, LastMemoryMove>,
    /// The move that is to end early.
    pub stop: Option<TaskId>,
    /// Moves that have ended.
    pub count: u64,
    /// Bytes that these have moved.
    pub bytes: u64,
}

impl MemoryMoves {
    /// A move begins. Returns it.
    pub fn begin(&mut self, task: TaskId, order: MoveMemory, now_ns: u64) -> LastMemoryMove {
        let assumed = match &order.why {
            MemoryReason::Nearer(why) => why.assumed,
            MemoryReason::Home(why) => why.assumed,
            MemoryReason::Rehome(_) => false,
        };
        let moved = MemoryMoved::default();
        let begun = LastMemoryMove { order, assumed, began_ns: now_ns, ended_ns: None, moved };
        self.task.begin(task, begun.clone());
        begun
    }

    /// The last one, or the one that is under way.
    pub fn shown(&self) -> Option<&LastMemoryMove> {
        self.task.begun().or(self.task.last.as_ref())
    }

    /// When the last one ended, nanoseconds; 0 if there was none, or one is under way.
    pub(crate) fn ended_ns(&self) -> u64 {
        self.shown().and_then(|last| last.ended_ns).unwrap_or(0)
    }
}

impl World {
    /// The move that is under way is to end early, if `is_its` holds for its reason.
    pub fn stop_memory(&mut self, id: VmId, is_its: impl FnOnce(&MemoryReason) -> bool) {
        let Some((_, vm)) = self.vm_mut(id) else { return };
        let memory = &mut vm.scheduling.memory;
        if memory.task.begun().is_some_and(|begun| is_its(&begun.order.why)) {
            memory.stop = memory.task.id();
        }
    }

    /// Notes how far a move is, or that it has ended. Returns the move. `None`: it is not under way.
    pub fn memory_moved(
        &mut self,
        task: TaskId,
        moved: MemoryMoved,
        ended: bool,
        now_ns: u64,
    ) -> Option<LastMemoryMove> {
        let memory = &mut self.vms.get_mut(&task.vm)?.vm.as_mut()?.scheduling.memory;
        let begun = memory.task.get_mut(task)?;
        begun.moved = moved;
        if !ended {
            return Some(begun.clone());
        }
        let last = LastMemoryMove { ended_ns: Some(now_ns), ..memory.task.end(task)? };
        (memory.count, memory.bytes) = (memory.count + 1, memory.bytes.saturating_add(last.moved.bytes));
        memory.task.last = Some(last.clone());
        // The policy that wanted it finds it as the last one.
        self.touched.push(task.vm);
        if matches!(last.order.why, MemoryReason::Rehome(_)) {
            self.rehome_moved(task.vm, &last.order, last.moved.problem.clone());
        }
        Some(last)
    }
}
