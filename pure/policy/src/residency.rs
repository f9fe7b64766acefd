//! Where the memory of a VM is, by a sample of its pages.
//!
//! The share of the sample's pages that are on a node estimates the share of all pages there. Beside it is the interval that has
//! the true share with a confidence of 95 % (Wilson's score interval). The interval assumes independent pages, and is too narrow
//! for a few huge pages. If all pages were looked at, the figures are exact.

use crate::memory_move::{BASE_KIB, NodeMemory};
use std::collections::BTreeMap;
use vnuma_model::{GuestNodeId, HostNodeId, HugePages, PageKind};

/// Quantile of the normal distribution for 95 %, both sides.
const Z: f64 = 1.959_964;

/// Memory of a guest node, as its hypervisor's process has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryArea {
    /// The guest node.
    pub guest_node: GuestNodeId,
    /// Address of its first byte.
    pub start: u64,
    /// Its size, bytes.
    pub bytes: u64,
    /// What its guest has of it, bytes: all, or what is plugged of a device. The rest is holes.
    pub guest_bytes: u64,
    /// Size of the pages that it is made of, KiB: those of a pool, or the smallest.
    pub page_kib: u64,
}

/// What keeps a page where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Keeps {
    /// KSM has merged it with others.
    #[strum(serialize = "ksm")]
    Merged,
    /// Other processes have it mapped as well.
    Shared,
    /// It is of a pool of huge pages, and the mapping was not when it was described.
    Pool,
}

impl Keeps {
    /// For the API.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Pages of a sample that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Their node.
    pub node: HostNodeId,
    /// Their size.
    pub kind: PageKind,
    /// What keeps them there.
    pub kept: Option<Keeps>,
    /// They are locked (`mlock`). That keeps no page on its node.
    pub locked: bool,
    /// How many there are in the sample.
    pub count: u64,
}

/// A sample of the memory of a guest node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AreaSample {
    /// Which memory.
    pub area: MemoryArea,
    /// Pages that were looked at.
    pub looked: u64,
    /// Of these, those that are there.
    pub found: Vec<Found>,
    /// Of these, those that are in swap.
    pub swapped: u64,
    /// Addresses and nodes of those that are there and that nothing keeps, in rising order.
    pub pages: Vec<(u64, HostNodeId)>,
}

/// Bytes, and the interval that they are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Most likely.
    pub bytes: u64,
    /// At least.
    pub low: u64,
    /// At most.
    pub high: u64,
}

impl Estimate {
    /// Of parts that were estimated by themselves: the squares of what they may be off by are added (Zou and Donner's method of
    /// recovered variances), as they are independent of each other.
    pub fn sum(parts: impl IntoIterator<Item = Self>) -> Self {
        let (mut bytes, mut below, mut above) = (0_u64, 0.0, 0.0);
        for part in parts {
            bytes = bytes.saturating_add(part.bytes);
            below += (part.bytes.saturating_sub(part.low) as f64).powi(2);
            above += (part.high.saturating_sub(part.bytes) as f64).powi(2);
        }
        let (low, high) =
            (bytes.saturating_sub(below.sqrt() as u64), bytes.saturating_add(above.sqrt() as u64));
        Self { bytes, low, high }
    }
}

impl AreaSample {
    fn pages(&self) -> u64 {
        self.area.bytes / self.area.page_kib.saturating_mul(1024).max(1)
    }

    /// All pages were looked at.
    pub fn is_exact(&self) -> bool {
        self.looked >= self.pages()
    }

    /// How much memory so many pages of the sample stand for.
    pub fn estimate(&self, hits: u64) -> Estimate {
        let total = self.area.bytes as f64;
        let hits = hits.min(self.looked);
        if self.looked == 0 {
            return Estimate { bytes: 0, low: 0, high: self.area.guest_bytes };
        }
        let (n, p) = (self.looked as f64, hits as f64 / self.looked as f64);
        let bytes = (p * total) as u64;
        if self.is_exact() {
            return Estimate { bytes, low: bytes, high: bytes };
        }
        let z2 = Z * Z;
        let middle = (p + z2 / (2.0 * n)) / (1.0 + z2 / n);
        let half = Z / (1.0 + z2 / n) * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
        let low = ((middle - half).max(0.0) * total) as u64;
        let high = (((middle + half).min(1.0) * total) as u64).min(self.area.guest_bytes);
        // Rounding must not take the likely figure out of its interval.
        Estimate { bytes, low: if hits == 0 { 0 } else { low.min(bytes) }, high: high.max(bytes) }
    }

    fn count(&self, is: impl Fn(&Found) -> bool) -> u64 {
        self.found.iter().filter(|found| is(found)).fold(0, |sum, found| sum.saturating_add(found.count))
    }

    /// How much of it is resident.
    pub fn resident(&self) -> Estimate {
        self.estimate(self.count(|_| true))
    }

    /// How much of it is on other nodes than its home.
    pub fn displaced(&self, home: HostNodeId) -> Estimate {
        self.estimate(self.count(|found| found.node != home))
    }

    /// How much of the displaced memory can be moved, by node.
    pub fn movable(&self, home: HostNodeId) -> Vec<(HostNodeId, Estimate)> {
        let mut by_node: BTreeMap<HostNodeId, u64> = BTreeMap::new();
        for found in self.found.iter().filter(|found| found.node != home && found.kept.is_none()) {
            let sum = by_node.entry(found.node).or_default();
            *sum = sum.saturating_add(found.count);
        }
        by_node.into_iter().map(|(node, hits)| (node, self.estimate(hits))).collect()
    }

    /// How much of the displaced memory cannot be moved, by reason.
    pub fn kept(&self, home: HostNodeId) -> Vec<(Keeps, Estimate)> {
        let of = |keeps| self.count(|found| found.node != home && found.kept == Some(keeps));
        let all = [Keeps::Merged, Keeps::Shared, Keeps::Pool].map(|keeps| (keeps, of(keeps)));
        all.into_iter()
            .filter(|(_, hits)| *hits > 0)
            .map(|(keeps, hits)| (keeps, self.estimate(hits)))
            .collect()
    }

    /// How much of it is on each node, by size of pages.
    pub fn places(&self) -> Vec<(HostNodeId, PageKind, Estimate)> {
        let mut places: BTreeMap<(HostNodeId, PageKind), u64> = BTreeMap::new();
        for found in &self.found {
            let sum = places.entry((found.node, found.kind)).or_default();
            *sum = sum.saturating_add(found.count);
        }
        places.into_iter().map(|((node, kind), hits)| (node, kind, self.estimate(hits))).collect()
    }

    /// How much of it is locked.
    pub fn locked(&self) -> Estimate {
        self.estimate(self.count(|found| found.locked))
    }

    /// How much of it is in swap.
    pub fn in_swap(&self) -> Estimate {
        self.estimate(self.swapped)
    }
}

/// What a look at the memory of a VM has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryObservation {
    /// When it began, of the clock that the world has.
    pub began_ns: u64,
    /// CPU time that it took, nanoseconds.
    pub cost_ns: u64,
    /// Memory of each guest node whose place is known.
    pub areas: Vec<AreaSample>,
    /// All and free memory of each node of the host, KiB.
    pub nodes: Vec<(HostNodeId, u64, u64)>,
    /// Pools of huge pages of each node.
    pub pools: Vec<(HostNodeId, HugePages)>,
    /// Nodes that its cpuset lets it have memory of.
    pub allowed: Vec<HostNodeId>,
    /// It has memory that no process maps (guest_memfd), and that is in none of the figures.
    pub unmapped: bool,
}

impl MemoryObservation {
    /// Memory of a node of the host for pages of this size: of its pool, if they are of one.
    pub fn room(&self, node: HostNodeId, page_kib: u64) -> NodeMemory {
        if page_kib > BASE_KIB {
            let mut pools = self.pools.iter();
            let pool = pools.find(|(known, pool)| *known == node && pool.size_kib == page_kib);
            let kib = |pages: u64| pages.saturating_mul(page_kib);
            return pool.map_or_else(NodeMemory::default, |(_, pool)| NodeMemory {
                total_kib: kib(pool.total),
                free_kib: kib(pool.free),
            });
        }
        let memory = self.nodes.iter().find(|(known, ..)| *known == node);
        memory
            .map_or_else(NodeMemory::default, |&(_, total_kib, free_kib)| NodeMemory { total_kib, free_kib })
    }

    /// Samples of the memory of a guest node: of what it booted with, and of what is plugged.
    pub fn of(&self, guest_node: GuestNodeId) -> Vec<&AreaSample> {
        self.areas.iter().filter(|sample| sample.area.guest_node == guest_node).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(bytes: u64, looked: u64, found: &[(u32, Option<Keeps>, u64)]) -> AreaSample {
        let found = found.iter().map(|&(node, kept, count)| {
            let (kind, locked) = (PageKind::Base, kept.is_none());
            Found { node, kind, kept, locked, count }
        });
        let area = MemoryArea { guest_node: 0, start: 0, bytes, guest_bytes: bytes, page_kib: 4 };
        AreaSample { area, looked, found: found.collect(), swapped: 0, pages: Vec::new() }
    }

    #[test]
    fn a_sample_stands_for_all_with_an_interval() {
        let gib = 1 << 30;
        let some = sample(100 * gib, 1000, &[(0, None, 900), (1, None, 20), (2, Some(Keeps::Shared), 10)]);
        assert_eq!((some.resident().bytes, some.displaced(0).bytes), (93 * gib, 3 * gib));
        // Wilson's interval of 30 in 1000: 2.109 % to 4.250 %.
        let percent = |bytes: u64| (bytes as f64 / gib as f64 * 1000.0).round();
        assert_eq!((percent(some.displaced(0).low), percent(some.displaced(0).high)), (2109.0, 4250.0));
        assert_eq!(some.movable(0), [(1, some.estimate(20))]);
        assert_eq!(some.kept(0), [(Keeps::Shared, some.estimate(10))]);
        assert_eq!(some.locked(), some.estimate(920));
        let none = some.estimate(0);
        assert_eq!((none.bytes, none.low), (0, 0));
        assert!(none.high > gib / 3 && none.high < gib / 2, "{none:?}");
    }

    #[test]
    fn if_all_pages_were_looked_at_the_figures_are_exact() {
        let all = sample(1 << 20, 256, &[(0, None, 200), (3, None, 56)]);
        let exact = |bytes| Estimate { bytes, low: bytes, high: bytes };
        assert_eq!((all.resident(), all.displaced(0)), (exact(1 << 20), exact(56 << 12)));
        assert_eq!(all.displaced(3), exact(200 << 12));
        let nothing = sample(1 << 20, 0, &[]);
        assert_eq!(nothing.displaced(0), Estimate { bytes: 0, low: 0, high: 1 << 20 }, "nothing is known");
    }

    #[test]
    fn of_a_device_that_is_mostly_holes_no_more_is_there_than_is_plugged() {
        let mut device = sample(1 << 40, 1000, &[(0, None, 10), (1, None, 1)]);
        device.area.guest_bytes = 12 << 30;
        let shown = device.estimate(11);
        assert_eq!((shown.bytes >> 30, shown.high), (11, 12 << 30));
        device.area.guest_bytes = 8 << 30;
        assert_eq!(device.estimate(11).high, device.estimate(11).bytes, "it was unplugged since");
    }

    #[test]
    fn parts_of_a_guest_node_are_added_with_their_intervals() {
        let estimate = |bytes, low, high| Estimate { bytes, low, high };
        assert_eq!(Estimate::sum([]), Estimate::default());
        assert_eq!(Estimate::sum([estimate(50, 20, 110)]), estimate(50, 20, 110));
        assert_eq!(Estimate::sum([estimate(50, 20, 130), estimate(100, 60, 160)]), estimate(150, 100, 250));
        assert_eq!(Estimate::sum([estimate(50, 20, 130), estimate(100, 100, 100)]), estimate(150, 120, 230));
        let most = estimate(u64::MAX, 0, u64::MAX);
        assert_eq!(Estimate::sum([most, most]), most);
    }

    #[test]
    fn places_are_by_node_and_size() {
        let mut some = sample(1 << 30, 100, &[(0, None, 10), (1, None, 5), (0, Some(Keeps::Merged), 3)]);
        some.found[1].kind = PageKind::Huge;
        let places: Vec<_> =
            some.places().into_iter().map(|(node, kind, size)| (node, kind, size.bytes)).collect();
        let share = |hits| some.estimate(hits).bytes;
        assert_eq!(places, [(0, PageKind::Base, share(13)), (1, PageKind::Huge, share(5))]);
    }
}
