//! The layout of a channel in memory: the region, its header, the two slots with their sections, generations, and a publication as
//! the list of its stores. A transport carries the region to a guest and signals in both directions
//! ([`Transport`](crate::Transport)).

use crate::{ChannelError, Content, error::failed};
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        mman::{MapFlags, ProtFlags, mmap, munmap},
        stat::fstat,
    },
};
use std::{
    io,
    mem::offset_of,
    num::NonZeroUsize,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering, fence},
};
use vnuma_abi_topology_channel::{
    DEVICES_VERSION, DISTANCE_UNREACHABLE, Device, Devices, GUEST_OFFSET, GUEST_SIZE, Header, LAYOUT, MAGIC,
    MAX_SECTIONS, MAX_SUPPORTED, NODES_VERSION, Nodes, REGION_SIZE, SECTION_DEVICES, SECTION_NODES,
    SECTION_VCPUS, SLOT_OFFSET, SLOT_SIZE, Section, Slot, SupportedSection, VCPUS_VERSION, Vcpu, Vcpus,
};

/// Bytes of a store; the layout has no field that straddles such a word.
pub const WORD: usize = 8;

/// The sections that are published, in this order.
const SECTIONS: [SupportedSection; 3] = [
    SupportedSection { kind: SECTION_NODES, version: NODES_VERSION },
    SupportedSection { kind: SECTION_VCPUS, version: VCPUS_VERSION },
    SupportedSection { kind: SECTION_DEVICES, version: DEVICES_VERSION },
];

/// One step of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Stores a word at an offset that is a multiple of [`WORD`].
    Store {
        /// Offset in the region.
        offset: usize,
        /// What is stored.
        value: u64,
    },
    /// Everything before is visible before everything after.
    Fence,
}

/// Generations in the order in which a writer gives them out.
#[derive(Clone, Copy, Debug)]
pub struct Generations {
    epoch: u32,
    counter: u32,
}

impl Generations {
    /// `epoch` keeps the generations of this writer apart from those of any other.
    pub fn new(epoch: u32) -> Self {
        Self { epoch, counter: 1 }
    }

    /// Those of a writer that goes on where another published `published` last: its first publication is written into
    /// the other slot.
    pub fn after(epoch: u32, published: u64) -> Self {
        Self { epoch, counter: if published & 1 == 1 { 2 } else { 1 } }
    }

    /// What [`Self::take`] returns next.
    pub fn peek(&self) -> u64 {
        u64::from(self.epoch) << 32 | u64::from(self.counter)
    }

    /// The next generation. Its lowest bit alternates, also where the counter starts over, as it says which slot is written.
    pub fn take(&mut self) -> u64 {
        let generation = self.peek();
        self.counter = match self.counter {
            u32::MAX => 2,
            counter => counter + 1,
        };
        generation
    }
}

/// A region of its own memory, which can neither grow nor shrink: no process that shares it can make a store
/// of this process fault.
#[derive(Debug)]
pub struct Region {
    memory: OwnedFd,
    address: NonNull<AtomicU64>,
}

// SAFETY: the mapping belongs to this value and stays at its address; it is accessed by atomic
// loads and stores only.
unsafe impl Send for Region {}

impl Region {
    /// A region with its header and no publication.
    pub fn new() -> Result<Self, ChannelError> {
        Self::make().map_err(failed("shared memory"))
    }

    fn make() -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let memory = memfd_create(c"vnuma-topology", flags)?;
        nix::unistd::ftruncate(&memory, REGION_SIZE as i64)?;
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&memory, FcntlArg::F_ADD_SEALS(seals))?;
        Self::map(memory)
    }

    /// A region that another process made and may have died writing, and the generation that it says is published: the
    /// guest could have written that, so it is good for a hint only.
    pub(crate) fn take_over(memory: OwnedFd) -> io::Result<(Self, u64)> {
        let seals = SealFlag::from_bits_truncate(fcntl(&memory, FcntlArg::F_GET_SEALS)?);
        let size = fstat(&memory)?.st_size;
        if !seals.contains(SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK) || size != REGION_SIZE as i64 {
            return Err(io::Error::other(format!(
                "{size} bytes with {seals:?}, not {REGION_SIZE} that stay"
            )));
        }
        let region = Self::map(memory)?;
        let published = region.load(offset_of!(Header, published));
        Ok((region, published))
    }

    fn map(memory: OwnedFd) -> io::Result<Self> {
        let size = NonZeroUsize::new(REGION_SIZE).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let address = unsafe {
            mmap(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, &memory, 0)?
        };
        let mut region = Self { memory, address: address.cast() };
        region.apply_all(&header());
        Ok(region)
    }

    /// The memory, to be shared with a VM.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Does one step.
    ///
    /// # Panics
    /// When a store is not aligned or not inside the region, which no step of this module is.
    pub fn apply(&mut self, step: &Step) {
        match *step {
            Step::Fence => fence(Ordering::SeqCst),
            Step::Store { offset, value } => self.word(offset).store(value, Ordering::Release),
        }
    }

    /// Loads a word, which may have any value.
    ///
    /// # Panics
    /// As [`Self::apply`].
    pub(crate) fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(WORD) && offset + WORD <= REGION_SIZE, "offset {offset:#x}");
        // SAFETY: inside the mapping and aligned, as was just checked; mmap returns page aligned
        // memory. Others access it at the same time, hence the atomic.
        unsafe { self.address.add(offset / WORD).as_ref() }
    }

    /// Does all steps in order.
    pub fn apply_all(&mut self, steps: &[Step]) {
        steps.iter().for_each(|step| self.apply(step));
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, of this size, and nothing refers to it any more.
        // It cannot fail for such a mapping.
        let _ = unsafe { munmap(self.address.cast(), REGION_SIZE) };
    }
}

/// Stores that make an empty region one without a publication. They leave the guest's area alone.
pub fn header() -> Vec<Step> {
    const _: () = assert!(offset_of!(Header, header_size) == 12 && offset_of!(Header, slot_offset) == 24);
    const _: () = assert!(offset_of!(Header, host_version) == 40 && SECTIONS.len() <= MAX_SUPPORTED);
    let mut words = vec![
        MAGIC,
        pair(u32::from(LAYOUT) | (SECTIONS.len() as u32) << 16, size_of::<Header>() as u32),
        pair(REGION_SIZE as u32, SLOT_SIZE as u32),
        pair(SLOT_OFFSET[0] as u32, SLOT_OFFSET[1] as u32),
        pair(GUEST_OFFSET as u32, GUEST_SIZE as u32),
        pair(host_version(), 0),
    ];
    let word = |section: &SupportedSection| u32::from(section.kind) | u32::from(section.version) << 16;
    words.extend(SECTIONS.chunks(2).map(|two| pair(word(&two[0]), two.get(1).map_or(0, word))));
    words.resize(offset_of!(Header, published) / WORD, 0);
    // The magic last: a reader that finds it finds the rest.
    let rest = stores(0, &words).skip(1);
    rest.chain([Step::Fence, Step::Store { offset: 0, value: words[0] }]).collect()
}

/// The stores that publish `content` as `generation`, in the order of `topology_channel.h`.
pub fn publication(generation: u64, content: &Content) -> Vec<Step> {
    publication_of(generation, &sections(content))
}

/// The same for sections as words, those of a later version among them.
///
/// # Panics
/// If they do not fit into a slot; those of any [`Content`] do.
pub fn publication_of(generation: u64, sections: &[Vec<u64>]) -> Vec<Step> {
    const _: () = assert!(offset_of!(Slot, length) == WORD && size_of::<Slot>() == 2 * WORD);
    let slot = SLOT_OFFSET[(generation & 1) as usize];
    let words: usize = sections.iter().map(Vec::len).sum();
    let length = size_of::<Slot>() + words * WORD;
    assert!(length <= SLOT_SIZE && sections.len() <= MAX_SECTIONS, "{length} bytes");
    let mut steps = Vec::with_capacity(words + 7);
    steps.extend([Step::Store { offset: slot, value: 0 }, Step::Fence]);
    let counts = pair(length as u32, sections.len() as u32);
    steps.push(Step::Store { offset: slot + offset_of!(Slot, length), value: counts });
    steps.extend(stores(slot + size_of::<Slot>(), &sections.concat()));
    steps.extend([
        Step::Fence,
        Step::Store { offset: slot, value: generation },
        Step::Fence,
        Step::Store { offset: offset_of!(Header, published), value: generation },
    ]);
    steps
}

/// The sections of `content`, each as its words.
pub fn sections(content: &Content) -> Vec<Vec<u64>> {
    vec![nodes(content), vcpus(content), devices(content)]
}

/// A section of these words behind its header.
pub fn section(kind: u16, version: u16, compatible: u16, flags: u16, words: &[u64]) -> Vec<u64> {
    const _: () = assert!(size_of::<Section>() == 2 * WORD);
    let low = u64::from(kind) | u64::from(version) << 16;
    let high = u64::from(compatible) << 32 | u64::from(flags) << 48;
    let length = size_of::<Section>() + words.len() * WORD;
    [&[low | high, length as u64], words].concat()
}

fn nodes(content: &Content) -> Vec<u64> {
    const _: () = assert!(offset_of!(Nodes, nr_nodes) == size_of::<Section>());
    let nodes = content.distances().len();
    let distance = |from, to| content.distances().get(from, to).unwrap_or(DISTANCE_UNREACHABLE);
    let bytes: Vec<u8> = (0..nodes)
        .flat_map(|from| (0..nodes).map(move |to| (from, to)))
        .map(|(f, t)| distance(f, t))
        .collect();
    let mut words = vec![pair(nodes as u32, size_of::<Nodes>() as u32)];
    words.extend(bytes.chunks(WORD).map(|chunk| {
        let mut word = [0; WORD];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    }));
    section(SECTION_NODES, NODES_VERSION, 1, 0, &words)
}

fn vcpus(content: &Content) -> Vec<u64> {
    const _: () = assert!(offset_of!(Vcpus, nr_vcpus) == size_of::<Section>() && size_of::<Vcpu>() == WORD);
    let count = content.vcpus().len() as u32;
    let mut words = vec![pair(count, size_of::<Vcpus>() as u32), pair(size_of::<Vcpu>() as u32, 0)];
    words.extend(content.vcpus().iter().map(|vcpu| pair(vcpu.apic_id, vcpu.node)));
    section(SECTION_VCPUS, VCPUS_VERSION, 1, 0, &words)
}

fn devices(content: &Content) -> Vec<u64> {
    const _: () =
        assert!(offset_of!(Devices, nr_devices) == size_of::<Section>() && size_of::<Device>() == WORD);
    const _: () = assert!(offset_of!(Device, bus) == 2 && offset_of!(Device, devfn) == 3);
    let count = content.devices().len() as u32;
    let mut words = vec![pair(count, size_of::<Devices>() as u32), pair(size_of::<Device>() as u32, 0)];
    words.extend(content.devices().iter().map(|device| {
        let place = u32::from(device.bus) | u32::from(device.devfn) << 8;
        pair(u32::from(device.segment) | place << 16, device.node)
    }));
    section(SECTION_DEVICES, DEVICES_VERSION, 1, 0, &words)
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn stores(offset: usize, words: &[u64]) -> impl Iterator<Item = Step> {
    words.iter().enumerate().map(move |(index, &value)| Step::Store { offset: offset + index * WORD, value })
}

/// Of this package: `major << 16 | minor << 8 | patch`.
const fn host_version() -> u32 {
    const fn number(text: &str) -> u32 {
        match u32::from_str_radix(text, 10) {
            Ok(number) => number,
            Err(_) => panic!("a version of three numbers"),
        }
    }
    number(env!("CARGO_PKG_VERSION_MAJOR")) << 16
        | number(env!("CARGO_PKG_VERSION_MINOR")) << 8
        | number(env!("CARGO_PKG_VERSION_PATCH"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::DistanceMatrix;

    fn content(nodes: usize, vcpus: u32) -> Content {
        let distance = |from, to| if from == to { 10 } else { 20 };
        let rows = (0..nodes).map(|from| (0..nodes).map(|to| distance(from, to)).collect()).collect();
        let vcpu = |apic_id| Vcpu { apic_id, node: 0 };
        Content::new(DistanceMatrix::new(rows).expect("square"), (0..vcpus).map(vcpu).collect())
            .expect("within limits")
    }

    #[test]
    fn stores_come_in_the_order_of_the_header() {
        for generation in [(5 << 32) | 2, (5 << 32) | 3] {
            let slot = SLOT_OFFSET[(generation & 1) as usize];
            let steps = publication(generation, &content(1, 1));
            let (first, rest) = steps.split_at(2);
            let (fill, last) = rest.split_at(rest.len() - 4);
            assert_eq!(first, [Step::Store { offset: slot, value: 0 }, Step::Fence]);
            let inside = (slot + WORD..).step_by(WORD).take(fill.len());
            let offsets = fill.iter().map(|step| match step {
                Step::Store { offset, .. } => *offset,
                Step::Fence => 0,
            });
            assert!(offsets.eq(inside), "the words behind the generation, without a gap");
            assert_eq!(fill[0], Step::Store { offset: slot + WORD, value: pair(slot_bytes(fill), 3) });
            let published = Step::Store { offset: offset_of!(Header, published), value: generation };
            let whole = Step::Store { offset: slot, value: generation };
            assert_eq!(last, [Step::Fence, whole, Step::Fence, published]);
        }
    }

    fn slot_bytes(fill: &[Step]) -> u32 {
        ((fill.len() + 1) * WORD) as u32
    }

    #[test]
    fn a_small_vm_needs_few_stores() {
        let bytes = publication(2, &content(4, 8)).len() * WORD;
        assert!(bytes < 300, "{bytes} bytes for 4 nodes and 8 vCPUs");
    }

    #[test]
    fn generations_alternate_their_slot_for_ever() {
        let mut generations = Generations::new(7);
        assert_eq!([generations.take(), generations.take()], [(7 << 32) | 1, (7 << 32) | 2]);
        generations.counter = u32::MAX - 1;
        let around: Vec<_> = (0..4).map(|_| generations.take() & 0xffff_ffff).collect();
        assert_eq!(around, [0xffff_fffe, 0xffff_ffff, 2, 3]);
    }
}
