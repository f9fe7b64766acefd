//! A publication as the list of its stores.

use crate::Content;
use std::mem::offset_of;
use vnuma_abi_topology_channel::{
    DISTANCE_UNREACHABLE, Header, MAGIC, MAX_NODES, MAX_VCPUS, REGION_SIZE, SLOT_OFFSET, Slot, VERSION_MAJOR,
    VERSION_MINOR, Vcpu,
};

/// Bytes of a store; the layout has no field that straddles such a word.
pub const WORD: usize = 8;

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

    /// The next generation. Its lowest bit alternates, also where the counter starts over, as it says which slot
    /// is written.
    pub fn take(&mut self) -> u64 {
        let generation = self.peek();
        self.counter = match self.counter {
            u32::MAX => 2,
            counter => counter + 1,
        };
        generation
    }
}

/// Stores that make an empty region one without a publication.
pub fn header() -> Vec<Step> {
    const _: () =
        assert!(offset_of!(Header, reserved0) == 5 * WORD && size_of::<Header>().is_multiple_of(WORD));
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let version = u32::from(VERSION_MAJOR) | u32::from(VERSION_MINOR) << 16;
    let words = [
        MAGIC,
        pair(version, size_of::<Header>() as u32),
        pair(REGION_SIZE as u32, size_of::<Slot>() as u32),
        pair(SLOT_OFFSET[0] as u32, SLOT_OFFSET[1] as u32),
        pair(MAX_NODES as u32, MAX_VCPUS as u32),
    ];
    // The magic last: a reader that finds it finds the rest.
    let rest = stores(0, &words).skip(1);
    rest.chain([Step::Fence, Step::Store { offset: 0, value: words[0] }]).collect()
}

/// The stores that publish `content` as `generation`, in the order of `topology_channel.h`. The
/// whole slot is written, so that nothing stays of what was there before.
pub fn publication(generation: u64, content: &Content) -> Vec<Step> {
    let slot = SLOT_OFFSET[(generation & 1) as usize];
    let mut steps = vec![Step::Store { offset: slot + offset_of!(Slot, generation), value: 0 }, Step::Fence];
    steps.extend(stores(slot + offset_of!(Slot, nr_nodes), &slot_words(content)));
    steps.extend([
        Step::Fence,
        Step::Store { offset: slot + offset_of!(Slot, generation), value: generation },
        Step::Fence,
        Step::Store { offset: offset_of!(Header, published), value: generation },
    ]);
    steps
}

fn stores(offset: usize, words: &[u64]) -> impl Iterator<Item = Step> {
    words.iter().enumerate().map(move |(index, &value)| Step::Store { offset: offset + index * WORD, value })
}

/// Everything in a slot behind its generation.
fn slot_words(content: &Content) -> Vec<u64> {
    const _: () = assert!(offset_of!(Slot, nr_nodes) == WORD && size_of::<Vcpu>() == WORD);
    const _: () = assert!(offset_of!(Slot, distance) == 8 * WORD && MAX_NODES.is_multiple_of(WORD));
    let (nodes, vcpus) = (content.distances().len(), content.vcpus());
    let mut words = Vec::with_capacity(size_of::<Slot>() / WORD - 1);
    words.push(nodes as u64 | (vcpus.len() as u64) << 32);
    words.resize(words.len() + 6, 0);
    for from in 0..MAX_NODES {
        for to in (0..MAX_NODES).step_by(WORD) {
            let distance = |to| match content.distances().get(from, to) {
                Some(distance) => distance,
                None if from < nodes && to < nodes => DISTANCE_UNREACHABLE,
                None => 0,
            };
            words.push(u64::from_le_bytes(std::array::from_fn(|byte| distance(to + byte))));
        }
    }
    let entry = |v: &Vcpu| u64::from(v.apic_id) | u64::from(v.node) << 32 | u64::from(v.flags) << 48;
    words.extend(vcpus.iter().map(entry));
    words.resize(size_of::<Slot>() / WORD - 1, 0);
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_topology::DistanceMatrix;

    #[test]
    fn stores_come_in_the_order_of_the_header() {
        let distances = DistanceMatrix::new(vec![vec![10]]).expect("square");
        let content = Content::new(distances, vec![Vcpu::default()]).expect("within limits");
        for generation in [(5 << 32) | 2, (5 << 32) | 3] {
            let slot = SLOT_OFFSET[(generation & 1) as usize];
            let steps = publication(generation, &content);
            let (first, rest) = steps.split_at(2);
            let (fill, last) = rest.split_at(rest.len() - 4);
            assert_eq!(first, [Step::Store { offset: slot, value: 0 }, Step::Fence]);
            let inside = (slot + WORD..slot + size_of::<Slot>()).step_by(WORD);
            let offsets = fill.iter().map(|step| match step {
                Step::Store { offset, .. } => *offset,
                Step::Fence => 0,
            });
            assert!(offsets.eq(inside), "the whole slot behind its generation, and nothing else");
            let published = Step::Store { offset: offset_of!(Header, published), value: generation };
            let whole = Step::Store { offset: slot, value: generation };
            assert_eq!(last, [Step::Fence, whole, Step::Fence, published]);
        }
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
