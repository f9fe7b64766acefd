//! What is known of where the memory of VMs is, and how hot it is.

use super::{DescriptionSource, NodeSizing, Task, TaskId, Vm, VmId, World};
use crate::{
    Reason, backings,
    hotness::Hotness,
    memory_move::MemoryPolicy,
    rehome::Rehome,
    residency::{MemoryArea, MemoryObservation},
};
use std::{collections::BTreeMap, sync::Arc};
use vnuma_model::{BackingMapping, GuestNodeId, MemoryBacking};

/// What is known of where a VM's memory is.
#[derive(Clone, Debug, Default)]
pub struct KnownMemory {
    /// When what is displaced comes home.
    pub policy: MemoryPolicy,
    /// Decisions from before this time do not count any more: since then the VM has another policy, or a guest node another home.
    pub since_ns: u64,
    /// Number of the last observation that has ended; 0: there was none.
    pub look: u64,
    /// What the last observation showed.
    pub observed: Option<Arc<MemoryObservation>>,
    /// When it ended.
    pub looked_ns: u64,
    /// Why the last one failed.
    pub problem: Option<String>,
    /// The observation that is under way, and when one that was asked for is due, and why.
    pub observation: Task<(u64, Reason), ()>,
    /// What is known of the heat of its memory.
    pub hotness: HotnessWatch,
    /// The last guest node that got another home on request, or gets it.
    pub rehome: Option<Rehome>,
    /// When that re-home began.
    pub rehome_ns: Option<u64>,
    /// Guest nodes that were sized, or are not sized as the configuration says.
    pub sizes: BTreeMap<GuestNodeId, NodeSizing>,
}

impl KnownMemory {
    /// Of a VM that was just found.
    pub(super) fn new(now_ns: u64) -> Self {
        Self { since_ns: now_ns, ..Self::default() }
    }
}

/// What is known of how hot a VM's memory is.
#[derive(Clone, Debug, Default)]
pub struct HotnessWatch {
    /// What the last watch showed.
    pub known: Option<Arc<Hotness>>,
    /// Why the last one failed.
    pub problem: Option<String>,
    /// Number of the last watch that has ended; 0: there was none.
    pub(crate) watch: u64,
    /// The watch that is under way.
    pub task: Task,
    /// When the last one ended.
    pub(crate) watched_ns: u64,
}

impl Vm {
    /// Where its process has the memory of its guest nodes, as far as that is known.
    pub fn memory_areas(&self) -> Vec<MemoryArea> {
        let area = |guest_node, memory: &MemoryBacking, guest_bytes: u64| {
            let BackingMapping { start, page_kib } = memory.mapping?;
            let bytes = memory.size_bytes;
            start.checked_add(bytes)?;
            Some(MemoryArea { guest_node, start, bytes, guest_bytes: guest_bytes.min(bytes), page_kib })
        };
        if self.source != DescriptionSource::Hypervisor {
            return Vec::new();
        }
        let booted = self.description.guest_nodes.iter().filter_map(|node| {
            let memory = node.memory.as_ref()?;
            area(node.id, memory, memory.size_bytes)
        });
        // A device of which nothing is plugged is all holes.
        let devices = self.description.memory_devices.iter().filter(|device| device.plugged_bytes > 0);
        let plugged =
            devices.filter_map(|device| area(device.guest_node, &device.memory, device.plugged_bytes));
        booted.chain(plugged).collect()
    }

    /// The backend of memory of a guest node.
    pub(crate) fn backing_of(&self, area: &MemoryArea) -> Option<&MemoryBacking> {
        let node = self.description.guest_nodes.iter().find(|node| node.id == area.guest_node)?;
        backings(node, &self.description.memory_devices)
            .find(|memory| memory.mapping.is_some_and(|mapping| mapping.start == area.start))
    }
}

impl World {
    /// Sets the memory policy of a VM. Returns the one before.
    pub fn set_memory_policy(&mut self, id: VmId, policy: MemoryPolicy, now_ns: u64) -> Option<MemoryPolicy> {
        let vm = self.vms.get_mut(&id)?.vm.as_mut()?;
        let before = std::mem::replace(&mut vm.homing.policy, policy);
        if before != policy {
            vm.scheduling.memory.task.wanted.take_if(|order| order.is_home());
            vm.homing.since_ns = now_ns;
        }
        self.touched.push(id);
        Some(before)
    }

    /// Asks for a look at a VM's memory now. False: it rests, so that the last look has to do.
    pub fn observe_now(&mut self, id: VmId, rests_until_ns: u64, now_ns: u64) -> bool {
        let Some((_, vm)) = self.vm_mut(id) else { return false };
        if vm.homing.observation.is_under_way() {
            return true;
        }
        if now_ns < rests_until_ns {
            return false;
        }
        vm.homing.observation.wanted = Some((now_ns, Reason::Requested));
        true
    }

    /// A look has ended.
    pub fn note_observation(
        &mut self,
        task: TaskId,
        outcome: Result<MemoryObservation, String>,
        now_ns: u64,
    ) {
        self.looks += 1;
        let look = self.looks;
        let Some((_, vm)) = self.vm_mut(task.vm) else { return };
        let homing = &mut vm.homing;
        homing.observation.end(task);
        // It also serves requests that came while it was under way.
        homing.observation.wanted = None;
        (homing.look, homing.looked_ns) = (look, now_ns);
        match outcome {
            Ok(observed) => (homing.observed, homing.problem) = (Some(Arc::new(observed)), None),
            Err(problem) => homing.problem = Some(problem),
        }
    }

    /// A watch has ended.
    pub fn note_hotness(&mut self, task: TaskId, outcome: Result<Hotness, String>, now_ns: u64) {
        self.looks += 1;
        let number = self.looks;
        let Some((_, vm)) = self.vm_mut(task.vm) else { return };
        let watch = &mut vm.homing.hotness;
        watch.task.end(task);
        (watch.watch, watch.watched_ns) = (number, now_ns);
        (watch.known, watch.problem) = match outcome {
            Ok(known) => (Some(Arc::new(known)), None),
            Err(problem) => (None, Some(problem)),
        };
    }
}
