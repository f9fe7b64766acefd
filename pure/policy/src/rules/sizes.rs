//! How large guest nodes may be.

use crate::{
    memory_move::NodeMemory,
    sizing::{Resize, SizeBounds, SizeSettings, SizedBy, most, sums},
    world::{DescriptionSource, ResizeWish, SizeMode, Vm, WantedSize, World},
};
use vnuma_model::{GuestNodeId, HostNodeId, MemoryDevice, RunState};

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
    /// It would have no memory any more.
    #[error(
        "its guest would take a node without memory away, and none of its vCPUs could move to it: it keeps {block_kib} KiB"
    )]
    LastBlock {
        /// Size of a block.
        block_kib: u64,
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

impl Vm {
    /// What the controller may plug of a guest node, if it sizes it.
    pub fn size_bounds(&self, guest_node: GuestNodeId, settings: &SizeSettings) -> Option<SizeBounds> {
        let devices = self.devices_of(guest_node);
        if devices.is_empty() {
            return None;
        }
        match self.homing.sizes.get(&guest_node).and_then(|sizing| sizing.mode) {
            Some(SizeMode::Fixed) => None,
            Some(SizeMode::Auto(SizeBounds { least, most })) => {
                Some(SizeBounds { least: least.max(self.kept_bytes(guest_node)), most })
            }
            None if !settings.auto => None,
            None => {
                let share = |permille: u64| (u128::from(most(&devices)) * u128::from(permille) / 1000) as u64;
                Some(SizeBounds {
                    least: share(settings.least_permille).max(self.kept_bytes(guest_node)),
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
}

impl World {
    /// What guest nodes have plugged of a host node and have not touched yet, bytes.
    pub(crate) fn promised(&self, node: HostNodeId) -> u64 {
        let vms = self.iter().filter_map(|(_, managed)| managed.vm.as_ref());
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
        let block = vm.block_bytes(guest_node);
        if bytes % block != 0 {
            return Err(ResizeObstacle::Step { block_kib: block >> 10, boot_kib: boot >> 10 });
        }
        if bytes < vm.kept_bytes(guest_node) {
            return Err(ResizeObstacle::LastBlock { block_kib: block >> 10 });
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
}

/// What a guest has, or is to have, of a device and has not touched, bytes.
fn untouched(device: &MemoryDevice) -> u64 {
    let promised = device.requested_bytes.max(device.plugged_bytes);
    let kib = device.memory.resident_kib.iter().fold(0_u64, |sum, (_, kib)| sum.saturating_add(*kib));
    promised.saturating_sub(kib.saturating_mul(1024))
}
