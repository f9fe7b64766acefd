//! Guest nodes that grow and shrink: what is there, what an operator wants, and how far each change is.

use super::{TaskId, Vm, VmId, World};
use crate::sizing::{Resize, ResizePhase, SizeBounds, sums};
use vnuma_model::{GuestNodeId, HostNodeId, MemoryDevice};

/// Who sizes a guest node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeMode {
    /// Its operator.
    Fixed,
    /// The controller, within these bounds.
    Auto(SizeBounds),
}

/// What is known of a guest node that grows and shrinks.
#[derive(Clone, Debug, Default)]
pub struct NodeSizing {
    /// Who sizes it, as its operator has said. `None`: as the configuration says.
    pub mode: Option<SizeMode>,
    /// The last change.
    pub resize: Option<Resize>,
    /// When the last change ended.
    pub(crate) ended_ns: Option<u64>,
    /// When its operator has last said something.
    pub(crate) asked_ns: u64,
}

/// What an operator wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizeWish {
    /// The guest node.
    pub guest_node: GuestNodeId,
    /// The wanted size, including the memory that it booted with.
    pub size: WantedSize,
    /// Say what would be done, and do nothing.
    pub dry_run: bool,
}

/// A size, or bounds for the controller, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WantedSize {
    /// This size.
    Fixed(u64),
    /// The least and the most. `None`: as much as it can have.
    Auto(u64, Option<u64>),
}

impl Vm {
    /// virtio-mem devices of a guest node.
    pub fn devices_of(&self, guest_node: GuestNodeId) -> Vec<&MemoryDevice> {
        self.description.memory_devices.iter().filter(|device| device.guest_node == guest_node).collect()
    }

    /// Memory of a guest node that is always there, bytes.
    pub fn boot_bytes(&self, guest_node: GuestNodeId) -> u64 {
        let node = self.description.guest_nodes.iter().find(|node| node.id == guest_node);
        let plugged = sums(&self.devices_of(guest_node)).0;
        node.map_or(0, |node| {
            let boot = node.memory.as_ref().map(|memory| memory.size_bytes);
            boot.unwrap_or(node.memory_bytes.saturating_sub(plugged))
        })
    }

    /// Sizes of what is plugged of a guest node are multiples of this, bytes.
    pub(crate) fn block_bytes(&self, guest_node: GuestNodeId) -> u64 {
        self.devices_of(guest_node).iter().map(|device| device.block_bytes).max().unwrap_or(1).max(1)
    }

    /// What stays plugged of a guest node, bytes. Linux takes a node offline that has neither memory nor CPUs
    /// (`try_offline_node()`, mm/memory_hotplug.c), and one without boot memory may have lost its vCPUs by moves: none could
    /// come back.
    pub(crate) fn kept_bytes(&self, guest_node: GuestNodeId) -> u64 {
        let plugged = sums(&self.devices_of(guest_node)).0;
        match self.boot_bytes(guest_node) {
            0 if plugged > 0 => self.block_bytes(guest_node),
            _ => 0,
        }
    }

    /// The host node that plugged memory of a guest node comes from.
    pub fn plugs_from(&self, guest_node: GuestNodeId) -> Option<HostNodeId> {
        let bound = self.devices_of(guest_node).into_iter().find_map(|device| device.memory.bound_node());
        bound.or_else(|| self.placement.homes().get(&guest_node).copied())
    }

    /// A guest node of it grows or shrinks.
    pub fn is_resized(&self) -> bool {
        self.homing.sizes.values().any(|sizing| sizing.resize.as_ref().is_some_and(Resize::is_active))
    }
}

impl World {
    /// An operator has decided who sizes a guest node. A change of it that is under way is given up.
    pub fn begin_resize(
        &mut self,
        id: VmId,
        guest_node: GuestNodeId,
        mode: SizeMode,
        resize: Option<Resize>,
        now_ns: u64,
    ) {
        let Some((_, vm)) = self.vm_mut(id) else { return };
        let sizing = vm.homing.sizes.entry(guest_node).or_default();
        (sizing.mode, sizing.asked_ns) = (Some(mode), now_ns);
        if resize.is_some() {
            (sizing.resize, sizing.ended_ns) = (resize, None);
        }
    }

    /// Stores the next state of a change.
    pub fn resize_changed(&mut self, id: VmId, resize: Resize, now_ns: u64) {
        let Some((_, vm)) = self.vm_mut(id) else { return };
        let sizing = vm.homing.sizes.entry(resize.guest_node).or_default();
        (sizing.resize, sizing.ended_ns) = (Some(resize), None);
        sizing.ended(now_ns);
    }

    /// An operator ends the changes of a VM. False: there are none.
    pub fn stop_resizes(&mut self, id: VmId) -> bool {
        let Some((_, vm)) = self.vm_mut(id).filter(|(_, vm)| vm.is_resized()) else { return false };
        vm.homing.sizes.values_mut().filter_map(|sizing| sizing.resize.as_mut()).for_each(Resize::stop);
        true
    }

    /// The hypervisor has answered what it was asked of a change. Returns the change if it has failed by that.
    pub fn resize_answered(
        &mut self,
        task: TaskId,
        outcome: Result<(), String>,
        now_ns: u64,
    ) -> Option<Resize> {
        let (_, vm) = self.vm_mut(task.vm)?;
        let waits = |sizing: &&mut NodeSizing| sizing.resize.as_ref().is_some_and(|of| of.waits_for(task));
        let sizing = vm.homing.sizes.values_mut().find(waits)?;
        let resize = sizing.resize.as_mut()?;
        let before = resize.phase();
        resize.answered(task, outcome);
        let failed = resize.phase() == ResizePhase::Failed && before != ResizePhase::Failed;
        let resize = resize.clone();
        sizing.ended(now_ns);
        failed.then_some(resize)
    }
}

impl NodeSizing {
    fn ended(&mut self, now_ns: u64) {
        if self.resize.as_ref().is_some_and(|resize| !resize.is_active()) {
            self.ended_ns.get_or_insert(now_ns);
        }
    }
}
