//! How hot displaced memory is: how often its pages are accessed, as a watch of some seconds has shown.
//!
//! The watch has regions and how many of its looks found each accessed. The sample of pages has addresses and nodes. Together
//! they say how much of which region is displaced. The accesses of a VM to a node are divided among its pages there in
//! proportion to what was seen:
//!
//! ```text
//!   accesses of a page = accesses of a page of that node on average * looks that found it accessed / the same on average
//! ```
//!
//! so that their sum is kept. Where nothing of the VM was found accessed, the watch says nothing.

use crate::residency::{AreaSample, Estimate, MemoryObservation};
use vnuma_model::{HostNodeId, WatchedRegion};

/// What was seen is taken to hold for so long, nanoseconds, and a watch that failed is not tried again before; for longer if another
/// one would cost more than it may.
pub const HOLDS_NS: u64 = 60_000_000_000;

/// What a watch of a VM's memory has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hotness {
    /// When it began, of the clock that the world has.
    pub began_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
    /// CPU time that it took, nanoseconds.
    pub cost_ns: u64,
    /// Looks at each region.
    pub looks: u32,
    /// In rising order, without overlaps.
    pub regions: Vec<WatchedRegion>,
}

/// Displaced memory on one host node that is accessed alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece {
    /// Its addresses: the first, and the one after the last. Not all of them are displaced.
    pub within: (u64, u64),
    /// How much of it is displaced, most likely.
    pub bytes: u64,
    /// Looks that found it accessed.
    pub accesses: u32,
}

/// Displaced memory of a guest node on one host node, by how often it is accessed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heat {
    /// Looks that found a page of the VM on that host node accessed, on average.
    pub mean: f64,
    /// The hottest first, then by address.
    pub pieces: Vec<Piece>,
}

/// Parts of displaced memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// At least half of the looks found it accessed.
    pub hot: Estimate,
    /// Fewer looks, and at least one, found it accessed.
    pub warm: Estimate,
    /// No look found it accessed.
    pub cold: Estimate,
}

impl Hotness {
    /// The region of an address, and looks that found it accessed.
    fn of(&self, address: u64) -> Option<&WatchedRegion> {
        let after = self.regions.partition_point(|region| region.start <= address);
        self.regions[..after].last().filter(|region| address < region.end)
    }

    fn accesses(&self, address: u64) -> u32 {
        self.of(address).map_or(0, |region| region.accesses)
    }

    /// True if any region was found accessed.
    pub fn says_something(&self) -> bool {
        self.regions.iter().any(|region| region.accesses > 0)
    }

    /// The memory of a sample that is on a node, by how often it is accessed ([`Heat`]).
    pub fn heat(&self, observed: &MemoryObservation, sample: &AreaSample, node: HostNodeId) -> Heat {
        let end = sample.area.start.saturating_add(sample.area.bytes);
        let (mut found, mut hits) = (Vec::<(Piece, u64)>::new(), Vec::new());
        for (address, _) in sample.pages.iter().filter(|(_, at)| *at == node) {
            let region =
                self.of(*address).map(|region| (region.start.max(sample.area.start), region.end.min(end)));
            // What was not watched is taken to be cold, page by page.
            let within = region.unwrap_or((*address, address.saturating_add(4096).min(end)));
            match found.last_mut().filter(|(piece, _)| piece.within == within) {
                Some((_, count)) => *count += 1,
                None => found.push((Piece { within, bytes: 0, accesses: self.accesses(*address) }, 1)),
            }
        }
        let all: u64 = found.iter().map(|(_, count)| count).sum();
        let bytes = sample.estimate(all).bytes;
        let share = |count: u64| (u128::from(bytes) * u128::from(count) / u128::from(all.max(1))) as u64;
        // Rounding loses no byte.
        let mut counted = 0;
        for (piece, count) in found {
            let before = share(counted);
            counted += count;
            hits.push(Piece { bytes: share(counted) - before, ..piece });
        }
        hits.sort_by(|a, b| b.accesses.cmp(&a.accesses).then(a.within.cmp(&b.within)));
        Heat { mean: self.mean(observed, node), pieces: joined(hits) }
    }

    /// Looks that found a page of the VM on a node accessed, on average.
    fn mean(&self, observed: &MemoryObservation, node: HostNodeId) -> f64 {
        let (mut accesses, mut all) = (0.0, 0.0);
        for sample in &observed.areas {
            // A page of the sample stands for so many.
            let weight = sample.area.bytes as f64 / sample.looked.max(1) as f64;
            for (address, _) in sample.pages.iter().filter(|(_, at)| *at == node) {
                accesses += weight * f64::from(self.accesses(*address));
                all += weight;
            }
        }
        if all > 0.0 { accesses / all } else { 0.0 }
    }

    /// The heat of the displaced memory that can be moved.
    pub fn shares(&self, sample: &AreaSample, home: HostNodeId) -> Shares {
        let (mut hot, mut warm, mut cold) = (0, 0, 0);
        for (address, _) in sample.pages.iter().filter(|(_, at)| *at != home) {
            match self.accesses(*address) {
                0 => cold += 1,
                seen if seen * 2 >= self.looks => hot += 1,
                _ => warm += 1,
            }
        }
        let [hot, warm, cold] = [hot, warm, cold].map(|hits| sample.estimate(hits));
        Shares { hot, warm, cold }
    }
}

/// Neighbours that are accessed alike are one piece.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match joined.last_mut() {
            Some(last) if last.accesses == piece.accesses && last.within.1 == piece.within.0 => {
                last.within.1 = piece.within.1;
                last.bytes = last.bytes.saturating_add(piece.bytes);
            }
            _ => joined.push(piece),
        }
    }
    joined
}
