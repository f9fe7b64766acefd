//! The guest's reader as `topology_channel.h` describes it, over anything that loads words. The
//! shipped reader is the guest driver; this one lets tests hold a writer to its promise.

use crate::publish::WORD;
use std::mem::offset_of;
use vnuma_abi_topology_channel::{
    DISTANCE_LOCAL, Header, MAGIC, MAX_NODES, MAX_VCPUS, READ_RETRIES, SLOT_OFFSET, Slot, VERSION_MAJOR, Vcpu,
};

/// What was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Its generation.
    pub generation: u64,
    /// Distances, by guest node.
    pub distances: Vec<Vec<u8>>,
    /// vCPUs.
    pub vcpus: Vec<Vcpu>,
}

/// Why there is nothing to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// No region of this layout.
    Header,
    /// Nothing was published yet.
    Nothing,
    /// The writer was faster in every try, or died in the middle.
    Torn,
    /// A published slot that makes no sense.
    Malformed,
}

/// Reads the current topology. `load` returns the word at an offset; each call is one load, in program order.
pub fn read(mut load: impl FnMut(usize) -> u64) -> Result<Topology, ReadError> {
    if load(0) != MAGIC || load(WORD) & 0xffff != u64::from(VERSION_MAJOR) {
        return Err(ReadError::Header);
    }
    for _ in 0..READ_RETRIES {
        let generation = load(offset_of!(Header, published));
        if generation == 0 {
            return Err(ReadError::Nothing);
        }
        let slot = SLOT_OFFSET[(generation & 1) as usize];
        if load(slot) != generation {
            continue;
        }
        let words: Vec<u64> = (1..size_of::<Slot>() / WORD).map(|index| load(slot + index * WORD)).collect();
        if load(slot) == generation && load(offset_of!(Header, published)) == generation {
            return decode(generation, &words);
        }
    }
    Err(ReadError::Torn)
}

fn decode(generation: u64, words: &[u64]) -> Result<Topology, ReadError> {
    let (nodes, vcpus) = ((words[0] & 0xffff_ffff) as usize, (words[0] >> 32) as usize);
    if !(1..=MAX_NODES).contains(&nodes) || !(1..=MAX_VCPUS).contains(&vcpus) {
        return Err(ReadError::Malformed);
    }
    let matrix = offset_of!(Slot, distance) / WORD - 1;
    let bytes: Vec<u8> = words[matrix..].iter().flat_map(|word| word.to_le_bytes()).collect();
    let row = |from: usize| bytes[from * MAX_NODES..][..nodes].to_vec();
    let first = offset_of!(Slot, vcpu) / WORD - 1;
    let vcpu =
        |word: &u64| Vcpu { apic_id: *word as u32, node: (word >> 32) as u16, flags: (word >> 48) as u16 };
    let topology = Topology {
        generation,
        distances: (0..nodes).map(row).collect(),
        vcpus: words[first..first + vcpus].iter().map(vcpu).collect(),
    };
    let sound = topology.vcpus.iter().all(|vcpu| usize::from(vcpu.node) < nodes)
        && topology.distances.iter().flatten().all(|&distance| distance >= DISTANCE_LOCAL);
    if sound { Ok(topology) } else { Err(ReadError::Malformed) }
}
