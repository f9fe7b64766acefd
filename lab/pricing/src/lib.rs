//! What the lab's counters cost: cache and latency profiles of published machines, and modelled cycles.
//!
//! The emulated server counts events; time enters only here. A profile has a *shape* (what is counted with:
//! nodes, classes of distance, caches) and *prices*. One run under one shape can be priced under every
//! profile that has the same shape.
//!
//! ```text
//! cycles = base cycles
//!        + LLC hits that no prefetcher foresaw   * LLC hit
//!        + DRAM accesses not streamed, per class * DRAM of the class
//!        + DRAM accesses streamed, per class     * streamed of the class
//!        + reads of registers, per class         * MMIO read of the class
//!        + writes to registers, per class        * MMIO write of the class
//! ```
//! A hit in L1 or L2 is in the base cycles, as is a foreseen hit in the LLC: out-of-order cores hide
//! these. Prices are kept in 1/256 cycle, as the server's kernel has them, so both sides agree exactly.

#![forbid(unsafe_code)]

mod profile;

pub use profile::{CounterProfile, ProfileError, Shape, by_name, names};

use vnuma_abi_lab_counters::{COST_ONE, MAX_CLASSES};

/// What one task, VM or CPU did, as far as it costs.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counts {
    /// Instructions.
    pub instructions: u64,
    /// Cycles without any wait for LLC or memory.
    pub base_cycles: u64,
    /// Loads.
    pub loads: u64,
    /// Stores.
    pub stores: u64,
    /// Accesses that missed the L2.
    pub llc_references: u64,
    /// Of these, those that a prefetcher foresees.
    pub llc_streamed: u64,
    /// Accesses that missed the LLC.
    pub llc_misses: u64,
    /// Of these, those that a prefetcher foresees.
    pub llc_misses_streamed: u64,
    /// DRAM accesses that were not streamed, by class of distance.
    pub dram_by_class: Vec<u64>,
    /// DRAM accesses that were streamed, by class of distance.
    pub streamed_by_class: Vec<u64>,
    /// DRAM accesses that were not streamed, by the memory's node.
    pub dram_by_node: Vec<u64>,
    /// DRAM accesses that were streamed, by the memory's node.
    pub streamed_by_node: Vec<u64>,
    /// Reads of devices' registers, by class of distance.
    #[serde(default)]
    pub mmio_reads_by_class: Vec<u64>,
    /// Writes to devices' registers, by class of distance.
    #[serde(default)]
    pub mmio_writes_by_class: Vec<u64>,
    /// Reads of devices' registers, by the device's node.
    #[serde(default)]
    pub mmio_reads_by_node: Vec<u64>,
    /// Writes to devices' registers, by the device's node.
    #[serde(default)]
    pub mmio_writes_by_node: Vec<u64>,
    /// MMIO accesses to devices of no node, interrupt controllers among them. They have no price.
    pub mmio_other: u64,
    /// What a second LLC would have missed, if one was modelled beside the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second: Option<SecondLlc>,
}

/// What an LLC of another size would have missed of the same accesses.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SecondLlc {
    /// As [`Counts::llc_misses`].
    pub llc_misses: u64,
    /// As [`Counts::llc_misses_streamed`].
    pub llc_misses_streamed: u64,
    /// As [`Counts::dram_by_class`].
    pub dram_by_class: Vec<u64>,
    /// As [`Counts::streamed_by_class`].
    pub streamed_by_class: Vec<u64>,
}

/// Each of one list with the one in its place of the other.
fn each(a: &[u64], b: &[u64], of: fn(u64, u64) -> u64) -> Vec<u64> {
    let at = |list: &[u64], index: usize| list.get(index).copied().unwrap_or(0);
    (0..a.len().max(b.len())).map(|index| of(at(a, index), at(b, index))).collect()
}

impl SecondLlc {
    fn with(&self, other: &Self, of: fn(u64, u64) -> u64) -> Self {
        Self {
            llc_misses: of(self.llc_misses, other.llc_misses),
            llc_misses_streamed: of(self.llc_misses_streamed, other.llc_misses_streamed),
            dram_by_class: each(&self.dram_by_class, &other.dram_by_class, of),
            streamed_by_class: each(&self.streamed_by_class, &other.streamed_by_class, of),
        }
    }
}

impl Counts {
    fn with(&self, other: &Self, of: fn(u64, u64) -> u64) -> Self {
        let second = self.second.as_ref().zip(other.second.as_ref());
        Self {
            instructions: of(self.instructions, other.instructions),
            base_cycles: of(self.base_cycles, other.base_cycles),
            loads: of(self.loads, other.loads),
            stores: of(self.stores, other.stores),
            llc_references: of(self.llc_references, other.llc_references),
            llc_streamed: of(self.llc_streamed, other.llc_streamed),
            llc_misses: of(self.llc_misses, other.llc_misses),
            llc_misses_streamed: of(self.llc_misses_streamed, other.llc_misses_streamed),
            mmio_other: of(self.mmio_other, other.mmio_other),
            dram_by_class: each(&self.dram_by_class, &other.dram_by_class, of),
            streamed_by_class: each(&self.streamed_by_class, &other.streamed_by_class, of),
            dram_by_node: each(&self.dram_by_node, &other.dram_by_node, of),
            streamed_by_node: each(&self.streamed_by_node, &other.streamed_by_node, of),
            mmio_reads_by_class: each(&self.mmio_reads_by_class, &other.mmio_reads_by_class, of),
            mmio_writes_by_class: each(&self.mmio_writes_by_class, &other.mmio_writes_by_class, of),
            mmio_reads_by_node: each(&self.mmio_reads_by_node, &other.mmio_reads_by_node, of),
            mmio_writes_by_node: each(&self.mmio_writes_by_node, &other.mmio_writes_by_node, of),
            second: second.map(|(own, other)| own.with(other, of)),
        }
    }

    /// What both did.
    pub fn sum(&self, other: &Self) -> Self {
        let sum = self.with(other, |a, b| a + b);
        let second = sum.second.or_else(|| self.second.clone()).or_else(|| other.second.clone());
        Self { second, ..sum }
    }

    /// What was done since `before`.
    pub fn since(&self, before: &Self) -> Self {
        self.with(before, u64::saturating_sub)
    }

    /// DRAM accesses of all kinds to each node.
    pub fn memory_by_node(&self) -> Vec<u64> {
        self.dram_by_node.iter().zip(&self.streamed_by_node).map(|(dram, streamed)| dram + streamed).collect()
    }

    /// The same work with the second LLC in place of the first; `None` if none was modelled. Accesses are not known by node.
    pub fn by_second(&self) -> Option<Self> {
        let second = self.second.clone()?;
        Some(Self {
            llc_misses: second.llc_misses,
            llc_misses_streamed: second.llc_misses_streamed,
            dram_by_class: second.dram_by_class,
            streamed_by_class: second.streamed_by_class,
            dram_by_node: Vec::new(),
            streamed_by_node: Vec::new(),
            second: None,
            ..self.clone()
        })
    }
}

/// Prices in 1/[`COST_ONE`] cycle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prices {
    /// An LLC hit that was not foreseen.
    pub llc_hit: u32,
    /// A DRAM access that was not foreseen, by class of distance.
    pub dram: [u32; MAX_CLASSES],
    /// A DRAM access that was, by class of distance.
    pub streamed: [u32; MAX_CLASSES],
    /// A read of a device's register, by class of distance.
    pub mmio_read: [u32; MAX_CLASSES],
    /// A write to a device's register, by class of distance.
    pub mmio_write: [u32; MAX_CLASSES],
}

/// Where modelled cycles went.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Cycles {
    /// Instructions.
    pub base: f64,
    /// Hits in the LLC.
    pub llc: f64,
    /// Memory of the CPU's own node.
    pub local: f64,
    /// Memory of other nodes.
    pub remote: f64,
    /// Registers of devices on the CPU's own node.
    pub mmio_local: f64,
    /// Registers of devices on other nodes.
    pub mmio_remote: f64,
    /// All of it.
    pub total: f64,
}

/// Modelled cycles of what was counted, under given prices.
pub fn price(counts: &Counts, prices: &Prices) -> Cycles {
    let one = f64::from(COST_ONE);
    let hits = counts.llc_references.saturating_sub(counts.llc_misses);
    let foreseen = counts.llc_streamed.saturating_sub(counts.llc_misses_streamed);
    let classes = |counts: &[u64], prices: &[u32]| -> Vec<f64> {
        counts.iter().zip(prices).map(|(&count, &price)| count as f64 * f64::from(price) / one).collect()
    };
    let dram = classes(&counts.dram_by_class, &prices.dram);
    let streamed = classes(&counts.streamed_by_class, &prices.streamed);
    let reads = classes(&counts.mmio_reads_by_class, &prices.mmio_read);
    let writes = classes(&counts.mmio_writes_by_class, &prices.mmio_write);
    // Classes are sorted by distance, and nothing is as near as the node itself.
    let near = |costs: &[f64]| costs.iter().take(1).sum::<f64>();
    let far = |costs: &[f64]| costs.iter().skip(1).sum::<f64>();
    let mut cycles = Cycles {
        base: counts.base_cycles as f64,
        llc: hits.saturating_sub(foreseen) as f64 * f64::from(prices.llc_hit) / one,
        local: near(&dram) + near(&streamed),
        remote: far(&dram) + far(&streamed),
        mmio_local: near(&reads) + near(&writes),
        mmio_remote: far(&reads) + far(&writes),
        total: 0.0,
    };
    let memory = cycles.local + cycles.remote;
    cycles.total = cycles.base + cycles.llc + memory + cycles.mmio_local + cycles.mmio_remote;
    cycles
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prices() -> Prices {
        let mut prices = Prices {
            llc_hit: 40 * COST_ONE,
            dram: [0; 8],
            streamed: [0; 8],
            mmio_read: [0; 8],
            mmio_write: [0; 8],
        };
        prices.dram[..2].copy_from_slice(&[200 * COST_ONE, 300 * COST_ONE]);
        prices.streamed[..2].copy_from_slice(&[10 * COST_ONE, 20 * COST_ONE]);
        prices.mmio_read[..2].copy_from_slice(&[1700 * COST_ONE, 1800 * COST_ONE]);
        prices.mmio_write[..2].copy_from_slice(&[300 * COST_ONE, 400 * COST_ONE]);
        prices
    }

    #[test]
    fn each_kind_of_access_has_its_price() {
        let counts = Counts {
            base_cycles: 1000,
            llc_references: 100,
            llc_streamed: 30,
            llc_misses: 40,
            llc_misses_streamed: 10,
            dram_by_class: vec![20, 10],
            streamed_by_class: vec![6, 4],
            mmio_reads_by_class: vec![3, 2],
            mmio_writes_by_class: vec![5, 7],
            // Of which nothing is known but that they were.
            mmio_other: 1000,
            ..Counts::default()
        };
        let cycles = price(&counts, &prices());
        // 60 hits, 20 of them foreseen.
        let expected = Cycles {
            base: 1000.0,
            llc: 1600.0,
            local: 4060.0,
            remote: 3080.0,
            mmio_local: 3.0 * 1700.0 + 5.0 * 300.0,
            mmio_remote: 2.0 * 1800.0 + 7.0 * 400.0,
            total: 9740.0 + 13_000.0,
        };
        assert_eq!(cycles, expected);
    }

    #[test]
    fn the_second_cache_is_priced_like_the_first() {
        let second = SecondLlc {
            llc_misses: 60,
            llc_misses_streamed: 10,
            dram_by_class: vec![30, 20],
            streamed_by_class: vec![10],
        };
        let first = Counts {
            base_cycles: 1000,
            llc_references: 100,
            llc_misses: 40,
            dram_by_class: vec![40, 0],
            ..Counts::default()
        };
        assert_eq!(first.by_second(), None);
        let counts = Counts { second: Some(second.clone()), ..first.clone() };
        let cycles = |counts: &Counts| price(counts, &prices()).total;
        // 60 hits and 40 local misses; 40 hits and 60 misses.
        assert_eq!(cycles(&counts), 1000.0 + 60.0 * 40.0 + 40.0 * 200.0);
        let by_second = counts.by_second().expect("it is there");
        assert_eq!(cycles(&by_second), 1000.0 + 40.0 * 40.0 + 30.0 * 200.0 + 20.0 * 300.0 + 10.0 * 10.0);
        assert_eq!((by_second.instructions, by_second.second.is_none()), (counts.instructions, true));
        let twice = counts.sum(&counts);
        let seconds = twice.second.as_ref().expect("it is there");
        assert_eq!(
            (seconds.llc_misses, &seconds.dram_by_class[..], &seconds.streamed_by_class[..]),
            (120, &[60, 40][..], &[20][..])
        );
        assert_eq!(twice.since(&counts), counts);
        assert_eq!(Counts::default().sum(&counts), counts);
    }

    fn counts() -> impl Strategy<Value = Counts> {
        let number = || 0..1_u64 << 40;
        let classes = || proptest::collection::vec(number(), 2);
        (number(), number(), number(), classes(), classes()).prop_map(
            |(base, hits, streamed_hits, dram, streamed)| {
                let random: u64 = dram.iter().sum();
                let foreseen: u64 = streamed.iter().sum();
                Counts {
                    base_cycles: base,
                    llc_references: hits + streamed_hits + random + foreseen,
                    llc_streamed: streamed_hits + foreseen,
                    llc_misses: random + foreseen,
                    llc_misses_streamed: foreseen,
                    dram_by_class: dram,
                    streamed_by_class: streamed,
                    ..Counts::default()
                }
            },
        )
    }

    proptest! {
        #[test]
        fn the_total_is_its_parts_and_each_access_adds(counts in counts()) {
            let before = price(&counts, &prices());
            prop_assert_eq!(before.total, before.base + before.llc + before.local + before.remote);
            let mut more = counts.clone();
            more.llc_references += 1 << 20;
            more.llc_misses += 1 << 20;
            more.dram_by_class[1] += 1 << 20;
            let after = price(&more, &prices());
            prop_assert_eq!(after.llc, before.llc);
            prop_assert!((after.total - before.total - 300.0 * f64::from(1 << 20)).abs() < 16.0);
        }

        #[test]
        fn remote_memory_never_costs_less(counts in counts()) {
            let mut moved = counts.clone();
            moved.dram_by_class = vec![0, counts.dram_by_class.iter().sum()];
            moved.streamed_by_class = vec![0, counts.streamed_by_class.iter().sum()];
            prop_assert!(price(&moved, &prices()).total >= price(&counts, &prices()).total);
        }

        #[test]
        fn inconsistent_counts_do_not_wrap(a in any::<u64>(), b in any::<u64>(), c in any::<u64>()) {
            let counts = Counts { llc_references: a, llc_misses: b, llc_streamed: c, ..Counts::default() };
            prop_assert!(price(&counts, &prices()).total >= 0.0);
        }
    }
}
