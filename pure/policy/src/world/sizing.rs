//! Guest nodes that grow and shrink: what is there, what an operator may want, and the next step of each change.

use super::{DescriptionSource, TaskId, Vm, VmId, World};
use crate::{
    memory_move::NodeMemory,
    sizing::{Resize, ResizePhase, SizeBounds, SizeSettings, SizedBy, most, sums},
};
use vnuma_model::{GuestNodeId, HostNodeId, MemoryDevice, RunState};

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

/// Why a guest node cannot have that size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeObstacle {
    /// It has no virtio-mem device.
    #[error(
        "it has no virtio-mem device that vnumad can ask (docs/memory.md says how to start the VM with one)"
    )]
    NoDevice,
    /// It cannot have that size.
    #[error("it can have {least_mib} to {most_mib} MiB")]
    OutOfRange {
        /// The memory that it booted with.
        least_mib: u64,
        /// With all that can be plugged.
        most_mib: u64,
    },
    /// Bounds that contradict each other.
    #[error("the least that it is to have, {least_mib} MiB, is more than the most, {most_mib} MiB")]
    Bounds {
        /// The least.
        least_mib: u64,
        /// The most.
        most_mib: u64,
    },
    /// It is no multiple of a block.
    #[error(
        "what is plugged has to be a multiple of {block_kib} KiB beside the {boot_kib} KiB that it booted with"
    )]
    Step {
        /// Size of a block.
        block_kib: u64,
        /// The memory that it booted with.
        boot_kib: u64,
    },
    /// Its guest does not run.
    #[error("its guest does not run (`{0}`)")]
    NotRunning(String),
    /// There is not enough room.
    #[error(
        "node {node} has no room: {needed_mib} MiB more are wanted, and {free_mib} MiB are free beyond its reserve and what \
         guest nodes have plugged and not touched yet"
    )]
    NoRoom {
        /// The node.
        node: HostNodeId,
        /// What is wanted.
        needed_mib: u64,
        /// What is there.
        free_mib: u64,
    },
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

    /// The host node that plugged memory of a guest node comes from.
    pub fn plugs_from(&self, guest_node: GuestNodeId) -> Option<HostNodeId> {
        let bound = self.devices_of(guest_node).into_iter().find_map(|device| device.memory.bound_node());
        bound.or_else(|| self.placement.homes().get(&guest_node).copied())
    }

    /// What the controller may plug of a guest node, if it sizes it.
    pub fn size_bounds(&self, guest_node: GuestNodeId, settings: &SizeSettings) -> Option<SizeBounds> {
        let devices = self.devices_of(guest_node);
        if devices.is_empty() {
            return None;
        }
        match self.homing.sizes.get(&guest_node).and_then(|sizing| sizing.mode) {
            Some(SizeMode::Fixed) => None,
            Some(SizeMode::Auto(bounds)) => Some(bounds),
            None if !settings.auto => None,
            None => {
                let share = |permille: u64| (u128::from(most(&devices)) * u128::from(permille) / 1000) as u64;
                Some(SizeBounds {
                    least: share(settings.least_permille),
                    most: share(settings.most_permille),
                })
            }
        }
    }

    /// Some guest node of it is sized by the controller.
    pub fn is_sized(&self, settings: &SizeSettings) -> bool {
        let known = self.source == DescriptionSource::Hypervisor;
        let nodes = self.description.memory_devices.iter().map(|device| device.guest_node);
        known && nodes.into_iter().any(|node| self.size_bounds(node, settings).is_some())
    }

    /// A guest node of it grows or shrinks.
    pub fn is_resized(&self) -> bool {
        self.homing.sizes.values().any(|sizing| sizing.resize.as_ref().is_some_and(Resize::is_active))
    }
}

impl World {
    /// What guest nodes have plugged of a host node and have not touched yet, bytes.
    pub(crate) fn promised(&self, node: HostNodeId) -> u64 {
        let vms = self.vms.values().filter_map(|managed| managed.vm.as_ref());
        let devices = vms.flat_map(|vm| {
            let its = vm.description.memory_devices.iter();
            its.filter(move |device| vm.plugs_from(device.guest_node) == Some(node))
        });
        devices.fold(0, |sum, device| sum.saturating_add(untouched(device)))
    }

    /// Where memory of a guest node is plugged from, all of that node, and what is free there beyond its reserve, as that was
    /// observed last.
    pub(crate) fn room_for(&self, vm: &Vm, guest_node: GuestNodeId) -> Option<(HostNodeId, u64, i64)> {
        let node = vm.plugs_from(guest_node)?;
        let observed = vm.homing.observed.as_deref()?;
        let &(_, total_kib, free_kib) = observed.nodes.iter().find(|(known, ..)| *known == node)?;
        let reserve_kib = NodeMemory { total_kib, free_kib }.reserve_kib();
        let free = (i128::from(free_kib) - i128::from(reserve_kib)) * 1024;
        let bytes = i64::try_from(free).unwrap_or(if free < 0 { i64::MIN } else { i64::MAX });
        Some((node, total_kib.saturating_mul(1024), bytes))
    }

    /// What would be done, if something can be: what is to be plugged, and for the controller its bounds.
    pub fn plan_resize(
        &self,
        vm: &Vm,
        wish: &ResizeWish,
        now_ns: u64,
    ) -> Result<(SizeMode, Option<Resize>), ResizeObstacle> {
        let guest_node = wish.guest_node;
        let (devices, boot) = (vm.devices_of(guest_node), vm.boot_bytes(guest_node));
        if !devices.iter().any(|device| device.id.is_some()) {
            return Err(ResizeObstacle::NoDevice);
        }
        let whole = boot.saturating_add(most(&devices));
        let mib = |bytes: u64| bytes >> 20;
        let range = ResizeObstacle::OutOfRange { least_mib: mib(boot), most_mib: mib(whole) };
        let part = |size: u64| match (boot..=whole).contains(&size) {
            true => Ok(size - boot),
            false => Err(range.clone()),
        };
        let bytes = match wish.size {
            WantedSize::Fixed(size) => part(size)?,
            WantedSize::Auto(least, up_to) => {
                let up_to = up_to.unwrap_or(whole);
                if least > up_to {
                    return Err(ResizeObstacle::Bounds { least_mib: mib(least), most_mib: mib(up_to) });
                }
                return Ok((SizeMode::Auto(SizeBounds { least: part(least)?, most: part(up_to)? }), None));
            }
        };
        let block = devices.iter().map(|device| device.block_bytes).max().unwrap_or(1).max(1);
        if bytes % block != 0 {
            return Err(ResizeObstacle::Step { block_kib: block >> 10, boot_kib: boot >> 10 });
        }
        if vm.description.run_state != RunState::Running || vm.is_migrating() {
            let state = if vm.is_migrating() { "migrating" } else { vm.description.run_state.as_ref() };
            return Err(ResizeObstacle::NotRunning(state.to_owned()));
        }
        let (before, requested) = sums(&devices);
        if bytes > requested
            && let Some((node, _, free)) = self.room_for(vm, guest_node)
            && let free = free.saturating_sub_unsigned(self.promised(node))
            && i128::from(bytes - requested) > i128::from(free)
        {
            let free_mib = mib(u64::try_from(free).unwrap_or(0));
            return Err(ResizeObstacle::NoRoom {
                node,
                needed_mib: (bytes - requested).div_ceil(1 << 20),
                free_mib,
            });
        }
        let resize = Resize::new(guest_node, before, bytes, SizedBy::Operator, now_ns);
        Ok((SizeMode::Fixed, Some(resize)))
    }

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

/// What a guest has, or is to have, of a device and has not touched, bytes.
fn untouched(device: &MemoryDevice) -> u64 {
    let promised = device.requested_bytes.max(device.plugged_bytes);
    let kib = device.memory.resident_kib.iter().fold(0_u64, |sum, (_, kib)| sum.saturating_add(*kib));
    promised.saturating_sub(kib.saturating_mul(1024))
}
