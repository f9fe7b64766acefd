//! Memory of VMs that is moved, to their vCPUs or home: what is wanted, what is under way, and how the last move ended.
//!
//! ```text
//!   a period ──▶ wanted ──▶ begun: pages are being moved ──▶ last: how many were, how many could not be
//!                  │                    │
//!                  └── another policy ──┴──▶ stopped, with what was moved so far
//! ```

use super::{HostReading, Vm, VmId, World, reading::by_position, schedule::effective_policy};
use crate::scheduling::{
    Machine, Policy,
    memory::{MemoryPart, MemoryReason, MoveMemory, NodeMemory, PAGE, VmMemory},
};
use vnuma_model::HostNodeId;

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
    fn stayed(&self) -> u64 {
        self.busy.saturating_add(self.shared).saturating_add(self.failed).saturating_mul(PAGE)
    }
}

/// The last move of a VM's memory.
#[derive(Clone, Debug, PartialEq)]
pub struct LastMemoryMove {
    /// What was wanted, and why.
    pub order: MoveMemory,
    /// Its figures are made of accesses that are assumed: nothing is counted on this host.
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
    /// A move that its policy wants.
    pub wanted: Option<MoveMemory>,
    /// Moves that have ended.
    pub count: u64,
    /// Bytes that these have moved.
    pub bytes: u64,
    /// The last one, or the one that is under way.
    pub last: Option<LastMemoryMove>,
}

impl MemoryMoves {
    /// Is one under way?
    pub fn is_under_way(&self) -> bool {
        self.last.as_ref().is_some_and(|last| last.ended_ns.is_none())
    }

    /// When the last one ended, nanoseconds; 0 if there was none.
    pub(super) fn ended_ns(&self) -> u64 {
        self.last.as_ref().and_then(|last| last.ended_ns).unwrap_or(0)
    }
}

impl Vm {
    /// A move of its memory that can be begun now.
    pub(crate) fn memory_step(&self) -> Option<MoveMemory> {
        let memory = &self.scheduling.memory;
        let ready = !memory.is_under_way() && self.scheduling.clean_ns.is_some();
        memory.wanted.clone().filter(|_| ready)
    }
}

impl World {
    /// The memory of the VMs whose memory may be moved.
    pub(super) fn memory_of_vms(&self, reading: &HostReading) -> (Vec<NodeMemory>, Vec<VmMemory>) {
        let machine = self.schedule.machine();
        if reading.memory.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let of = |id: HostNodeId| reading.memory.iter().find(|(node, ..)| *node == id);
        let node = |id| of(id).map(|&(_, total_kib, free_kib)| NodeMemory { total_kib, free_kib });
        let nodes = machine.nodes.iter().map(|known| node(known.id).unwrap_or_default()).collect();
        let memory = |vm: &super::VmReading| {
            let known = self.get(vm.vm)?.vm.as_ref().filter(|known| known.description.pid == vm.pid)?;
            if effective_policy(known) != Policy::Vprobe {
                return None;
            }
            let read = vm.memory.as_ref()?;
            let scheduling = &known.scheduling;
            let placed = scheduling.masks.values().all(|mask| mask.begun.is_none() && mask.wanted.is_none());
            let moves = &scheduling.memory;
            let fresh = read.read_ns > moves.ended_ns();
            Some(VmMemory {
                vm: vm.vm,
                parts: read.parts.iter().map(|part| part_of(machine, part)).collect(),
                fixed: by_position(machine, &read.fixed),
                allowed: read.allowed.iter().filter_map(|&node| machine.position(node)).collect(),
                ready: placed
                    && fresh
                    && moves.wanted.is_none()
                    && !moves.is_under_way()
                    && !known.is_rehomed(),
            })
        };
        (nodes, reading.vms.iter().filter_map(memory).collect())
    }

    /// A policy wants memory to be moved.
    pub(super) fn want_memory(&mut self, id: VmId, step: MoveMemory) {
        if let Some(vm) = self.vms.get_mut(&id).and_then(|managed| managed.vm.as_mut()) {
            vm.scheduling.memory.wanted = Some(step);
            self.touched.insert(id);
        }
    }

    /// A move has begun.
    pub fn memory_begun(&mut self, id: VmId, order: MoveMemory, now_ns: u64) -> Option<LastMemoryMove> {
        let assumed = match &order.why {
            MemoryReason::Nearer(_) => self.schedule.assumes(),
            MemoryReason::Home(why) => why.assumed,
            MemoryReason::Rehome(_) => false,
        };
        let memory = &mut self.vms.get_mut(&id)?.vm.as_mut()?.scheduling.memory;
        let moved = MemoryMoved::default();
        let begun = LastMemoryMove { order, assumed, began_ns: now_ns, ended_ns: None, moved };
        (memory.wanted, memory.last) = (None, Some(begun.clone()));
        Some(begun)
    }

    /// A move has got so far, or has ended. Returns what is known of it, if it is under way.
    pub fn memory_moved(
        &mut self,
        id: VmId,
        moved: MemoryMoved,
        ended: bool,
        now_ns: u64,
    ) -> Option<LastMemoryMove> {
        let memory = &mut self.vms.get_mut(&id)?.vm.as_mut()?.scheduling.memory;
        let last = memory.last.as_mut().filter(|last| last.ended_ns.is_none())?;
        last.moved = moved;
        if ended {
            last.ended_ns = Some(now_ns);
            (memory.count, memory.bytes) = (memory.count + 1, memory.bytes.saturating_add(last.moved.bytes));
        }
        let last = last.clone();
        let stayed = last.moved.stayed();
        match &last.order.why {
            _ if !ended => {}
            MemoryReason::Nearer(_) => self.schedule.memory_ended(id, last.moved.bytes, stayed, now_ns),
            MemoryReason::Home(_) => self.home_ended(id, &last.order, last.moved.bytes, stayed, now_ns),
            MemoryReason::Rehome(_) => {
                self.rehome_moved(id, &last.order, last.moved.problem.clone());
            }
        }
        Some(last)
    }
}

fn part_of(machine: &Machine, part: &super::MemoryRange) -> MemoryPart {
    let positions =
        |nodes: &Vec<HostNodeId>| nodes.iter().filter_map(|&node| machine.position(node)).collect();
    MemoryPart { targets: part.targets.as_ref().map(positions), kib: by_position(machine, &part.kib) }
}
