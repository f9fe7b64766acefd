//! The guest of a fake QEMU: its interrupt wakes it up, it reads the topology, notes the time, and acknowledges.

use crate::board::{Board, now_ns};
use anyhow::Context;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::mman::{MapFlags, ProtFlags, mmap},
};
use std::{
    num::NonZeroUsize,
    os::fd::AsFd,
    sync::atomic::{AtomicU64, Ordering},
};
use vnuma_abi_topology_channel::{MODE_FAST, ivshmem::PUBLISH_VECTOR};
use vnuma_channel_model::{GuestEnd, ReadError, Topology, read};

/// Runs until the process ends. `first` is the place of the VM's first vCPU.
pub fn run(end: &GuestEnd, board: &Board, first: usize) -> anyhow::Result<()> {
    let length = usize::try_from(end.memory.metadata()?.len())?;
    let size = NonZeroUsize::new(length).context("no shared memory")?;
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let memory = unsafe { mmap(None, size, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &end.memory, 0)? };
    let load = |offset: usize| {
        assert!(offset + 8 <= length && offset.is_multiple_of(8), "offset {offset:#x}");
        // SAFETY: inside of the mapping and aligned; others store there at the same time, hence the atomic.
        unsafe { memory.cast::<AtomicU64>().add(offset / 8).as_ref() }.load(Ordering::Acquire)
    };
    end.announce(MODE_FAST)?;
    let mut known: Vec<(u32, u32)> = Vec::new();
    let vector = &end.guest_vectors[PUBLISH_VECTOR];
    let mut acknowledged = 0;
    loop {
        match read(load) {
            Ok(topology) => {
                note(board, first, &mut known, &topology, now_ns());
                if topology.generation != acknowledged {
                    acknowledged = topology.generation;
                    end.store_acknowledged(acknowledged)?;
                    end.ring()?;
                }
            }
            // Another interrupt follows.
            Err(ReadError::Nothing | ReadError::Torn) => {}
            Err(error) => anyhow::bail!("the channel: {error:?}"),
        }
        poll(&mut [PollFd::new(vector.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
        let _ = vector.read();
    }
}

/// Notes which vCPUs are on another node than before, and are where their last move put them.
fn note(board: &Board, first: usize, known: &mut Vec<(u32, u32)>, topology: &Topology, now_ns: u64) {
    let published: Vec<(u32, u32)> = topology.vcpus.iter().map(|vcpu| (vcpu.apic_id, vcpu.node)).collect();
    for (apic_id, node) in published.iter().filter(|vcpu| !known.contains(vcpu)) {
        let Some(place) = board.places().get(first + *apic_id as usize) else { continue };
        if place.wanted.load(Ordering::Acquire) == *node {
            place.seen_ns.store(now_ns, Ordering::Release);
        }
    }
    *known = published;
}
