//! Samples of a thread's accesses with their physical addresses: from them follows which node its memory is on. *Not run here*:
//! no machine of this project has such a PMU. It is off unless the operator asks for it.
//!
//! | CPU | |
//! |---|---|
//! | AMD | IBS of operations (`ibs_op`), for threads since Linux 6.2. An interrupt each [`PERIOD`] cycles |
//! | Intel | none: while a guest runs KVM switches the host's PEBS off (`intel_guest_get_msrs` in arch/x86/events/intel/core.c), so that no access of a guest is sampled |
//!
//! Samples tell where accesses go; how many there are, the counter of LLC misses tells.

use crate::{detect::read, group::CounterError};
use perf_event::{
    Builder, SampleFlag, Sampler,
    data::{MemLevel, Record},
    events::{Dynamic, Event},
};
use std::{collections::BTreeMap, fs, io, path::Path};
use vnuma_model::HostNodeId;

/// Cycles between two samples of a thread: about 3000 a second of its time at 3 GHz, at one to two microseconds each. A multiple
/// of 16, as the kernel wants it.
const PERIOD: u64 = 1 << 20;
/// Bytes of a thread's ring, a power of two. A sample has 32: it holds what comes in a third of a second at least, and
/// what does not fit is counted as lost.
const RING: usize = 1 << 15;
/// Records that are taken in a period, whatever the kernel has written.
const MOST: usize = 1 << 14;
/// Longest file of the kernel that is read here.
const FILE_LIMIT: u64 = 64;
/// Fewer samples say too little.
const LEAST: f64 = 8.0;
/// What counts of the samples of a period in the next one.
const KEPT: f64 = 0.5;

/// Which node a physical address belongs to, by blocks of memory (`/sys/devices/system/node/nodeN/memoryM`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryMap {
    block_bytes: u64,
    /// Number of each block, in rising order, and its node.
    blocks: Vec<(u64, HostNodeId)>,
}

impl MemoryMap {
    /// Reads it. `root` is where `sys` is.
    pub fn read(root: &Path) -> Result<Self, String> {
        let size = root.join("sys/devices/system/memory/block_size_bytes");
        let text = read(&size, FILE_LIMIT).ok_or_else(|| format!("{}: cannot be read", size.display()))?;
        let block_bytes = u64::from_str_radix(text.trim(), 16).ok().filter(|&bytes| bytes > 0);
        let block_bytes = block_bytes
            .ok_or_else(|| format!("{}: `{}` is no size", size.display(), text.trim().escape_debug()))?;
        let nodes = root.join("sys/devices/system/node");
        let mut blocks = Vec::new();
        for (node, folder) in
            numbered(&nodes, "node").map_err(|error| format!("{}: {error}", nodes.display()))?
        {
            let Ok(node) = HostNodeId::try_from(node) else { continue };
            let found =
                numbered(&folder, "memory").map_err(|error| format!("{}: {error}", folder.display()))?;
            blocks.extend(found.into_iter().map(|(block, _)| (block, node)));
        }
        blocks.sort_unstable();
        Ok(Self { block_bytes, blocks })
    }

    /// The node of an address; none for a device's memory, and for memory that was added later.
    pub fn node(&self, address: u64) -> Option<HostNodeId> {
        let block = address.checked_div(self.block_bytes)?;
        let at = self.blocks.binary_search_by_key(&block, |(block, _)| *block).ok()?;
        Some(self.blocks[at].1)
    }
}

/// Entries of a folder whose name is a prefix and a number.
fn numbered(folder: &Path, prefix: &str) -> io::Result<Vec<(u64, std::path::PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.strip_prefix(prefix)?.parse().ok());
        found.extend(number.map(|number| (number, entry.path())));
    }
    Ok(found)
}

/// IBS of this host.
#[derive(Clone, Copy, Debug)]
pub struct Ibs(Dynamic);

impl Ibs {
    /// Finds it. `root` is where `sys` is. The error says why it cannot be used.
    pub fn find(root: &Path) -> Result<Self, String> {
        let pmu = root.join("sys/bus/event_source/devices/ibs_op");
        let mut builder =
            Dynamic::builder(&pmu).map_err(|error| format!("no IBS: {}: {error}", pmu.display()))?;
        let fields: Vec<String> = builder.params().map(str::to_owned).collect();
        for field in fields {
            // Since Zen 4 only operations that miss the last-level cache can be sampled.
            let value = u64::from(field == "l3missonly");
            builder.field(&field, value).map_err(|error| format!("{}: {field}: {error}", pmu.display()))?;
        }
        builder.build().map(Self).map_err(|error| format!("{}: {error}", pmu.display()))
    }
}

/// Samples of a period.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sampled {
    /// Accesses to memory, by node.
    pub by_node: BTreeMap<HostNodeId, u64>,
    /// Accesses to memory of no node that is known.
    pub elsewhere: u64,
    /// Samples that were lost, as the ring was full.
    pub lost: u64,
}

/// Samples one thread's accesses. They end when it is dropped.
pub struct ThreadSamples(Sampler);

impl std::fmt::Debug for ThreadSamples {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadSamples").finish_non_exhaustive()
    }
}

impl ThreadSamples {
    /// Samples this thread from now on. See before and afterwards that it is the thread that was meant.
    pub fn open(tid: i32, ibs: Ibs) -> Result<Self, CounterError> {
        // 0 would be the caller.
        if tid <= 0 {
            return Err(CounterError::Ended { tid });
        }
        Self::open_for(tid, ibs.0, PERIOD)
    }

    fn open_for(tid: i32, event: impl Event, period: u64) -> Result<Self, CounterError> {
        let failed = |source: io::Error| match source.raw_os_error() {
            // ESRCH
            Some(3) => CounterError::Ended { tid },
            _ => CounterError::of("samples of memory accesses", source),
        };
        let mut builder = Builder::new(event);
        // IBS cannot leave anything out.
        builder.observe_pid(tid).any_cpu().exclude_kernel(false).exclude_hv(false).sample_period(period);
        builder.sample(SampleFlag::DATA_SRC).sample(SampleFlag::PHYS_ADDR);
        let mut counter = builder.build().map_err(failed)?;
        counter.enable().map_err(failed)?;
        Ok(Self(counter.sampled(RING).map_err(failed)?))
    }

    /// Those since the last call.
    pub fn take(&mut self, map: &MemoryMap) -> Sampled {
        let mut sampled = Sampled::default();
        for _ in 0..MOST {
            let Some(record) = self.0.next_record() else { break };
            match record.parse_record() {
                Ok(Record::Sample(sample)) => {
                    let level = sample.data_src().map(|source| source.mem_lvl());
                    sampled.add(level, sample.phys_addr().unwrap_or(0), map);
                }
                Ok(Record::Lost(lost)) => sampled.lost = sampled.lost.saturating_add(lost.lost),
                // Throttling by the kernel, among others: fewer samples come.
                _ => {}
            }
        }
        sampled
    }
}

impl Sampled {
    /// Counts a sample if memory answered it. Address 0: the CPU has given none.
    fn add(&mut self, level: Option<MemLevel>, address: u64, map: &MemoryMap) {
        let memory = MemLevel::LOC_RAM | MemLevel::REM_RAM1 | MemLevel::REM_RAM2;
        if address == 0 || !level.is_some_and(|level| level.intersects(memory)) {
            return;
        }
        match map.node(address) {
            Some(node) => *self.by_node.entry(node).or_default() += 1,
            None => self.elsewhere += 1,
        }
    }
}

/// Where a thread's accesses go, as the samples of the last periods say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shares(BTreeMap<HostNodeId, f64>);

impl Shares {
    /// A period has ended. What was before counts less.
    pub fn add(&mut self, sampled: &Sampled) {
        self.0.values_mut().for_each(|weight| *weight *= KEPT);
        for (&node, &count) in &sampled.by_node {
            *self.0.entry(node).or_default() += count as f64;
        }
        self.0.retain(|_, weight| *weight > 0.01);
    }

    /// So many accesses by node. `None`: there are too few samples to say.
    pub fn spread(&self, accesses: u64) -> Option<Vec<(HostNodeId, u64)>> {
        let total: f64 = self.0.values().sum();
        let share = |(&node, weight): (&HostNodeId, &f64)| (node, (accesses as f64 * weight / total) as u64);
        (total >= LEAST).then(|| self.0.iter().map(share).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_event::events::Software;
    use proptest::prelude::*;

    fn host(blocks: &[(&str, &[&str])], size: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let system = root.path().join("sys/devices/system");
        for (node, names) in blocks {
            for name in *names {
                fs::create_dir_all(system.join("node").join(node).join(name)).expect("made");
            }
        }
        fs::create_dir_all(system.join("memory")).expect("made");
        fs::write(system.join("memory/block_size_bytes"), size).expect("written");
        root
    }

    #[test]
    fn an_address_has_the_node_of_its_block() {
        let root = host(
            &[
                ("node0", &["memory0", "memory3", "meminfo"]),
                ("node12", &["memory1"]),
                ("power", &["memory9"]),
            ],
            "8000000\n",
        );
        let map = MemoryMap::read(root.path()).expect("read");
        let nodes = [0, 0x7ff_ffff, 0x800_0000, 0x1000_0000, 0x1800_0000, 0x4800_0000, u64::MAX];
        let expected = [Some(0), Some(0), Some(12), None, Some(0), None, None];
        assert_eq!(nodes.map(|address| map.node(address)), expected);
        assert_eq!(MemoryMap::default().node(7), None, "nothing is known");
    }

    #[test]
    fn a_host_that_does_not_say_is_named() {
        let error = |size: &str| MemoryMap::read(host(&[], size).path()).expect_err("wrong");
        assert!(error("0\n").contains("block_size_bytes: `0` is no size"), "{}", error("0\n"));
        assert!(error("x\u{7}y").contains("`x\\u{7}y` is no size"), "{}", error("x\u{7}y"));
        let empty = tempfile::tempdir().expect("a directory");
        assert!(MemoryMap::read(empty.path()).expect_err("nothing there").ends_with("cannot be read"));
        assert!(error("1000").contains("system/node: "), "{}", error("1000"));
    }

    #[test]
    fn ibs_is_found_and_counts_misses_only_where_it_can() {
        let root = tempfile::tempdir().expect("a directory");
        let why = Ibs::find(root.path()).expect_err("none");
        assert!(why.starts_with("no IBS: ") && why.contains("ibs_op: No such file"), "{why}");
        let format = root.path().join("sys/bus/event_source/devices/ibs_op/format");
        fs::create_dir_all(&format).expect("made");
        fs::write(format.with_file_name("type"), "11\n").expect("written");
        fs::write(format.join("cnt_ctl"), "config:19\n").expect("written");
        let found = || Ibs::find(root.path()).map(|ibs| format!("{ibs:?}"));
        assert!(found().is_ok_and(|ibs| ibs.contains("ty: 11, config: 0,")), "{:?}", found());
        fs::write(format.join("l3missonly"), "config:16\n").expect("written");
        assert!(found().is_ok_and(|ibs| ibs.contains("ty: 11, config: 65536,")), "{:?}", found());
        fs::write(format.join("l3missonly"), "nonsense").expect("written");
        assert!(found().is_err_and(|why| why.contains("l3missonly")), "{:?}", found());
    }

    #[test]
    fn only_what_memory_answered_counts() {
        let map = MemoryMap { block_bytes: 100, blocks: vec![(0, 3), (1, 5)] };
        let mut sampled = Sampled::default();
        let local = Some(MemLevel::HIT | MemLevel::LOC_RAM);
        sampled.add(local, 50, &map);
        sampled.add(Some(MemLevel::HIT | MemLevel::REM_RAM1), 150, &map);
        sampled.add(Some(MemLevel::HIT | MemLevel::REM_RAM2), 199, &map);
        sampled.add(local, 250, &map);
        for (level, address) in [(Some(MemLevel::HIT | MemLevel::L3), 50), (None, 50), (local, 0)] {
            sampled.add(level, address, &map);
        }
        let by_node = BTreeMap::from([(3, 1), (5, 2)]);
        assert_eq!(sampled, Sampled { by_node, elsewhere: 1, lost: 0 });
    }

    #[test]
    fn shares_follow_the_last_periods_and_need_some_samples() {
        let sampled = |counts: &[(u32, u64)]| Sampled {
            by_node: counts.iter().copied().collect(),
            ..Sampled::default()
        };
        let mut shares = Shares::default();
        assert_eq!(shares.spread(100), None);
        shares.add(&sampled(&[(0, 7)]));
        assert_eq!(shares.spread(100), None, "too few");
        shares.add(&sampled(&[(0, 9), (1, 37)]));
        assert_eq!(shares.spread(1000), Some(vec![(0, 252), (1, 747)]));
        (0..20).for_each(|_| shares.add(&Sampled::default()));
        assert_eq!(shares, Shares::default(), "a thread that does nothing is forgotten");
    }

    #[test]
    fn records_of_the_kernel_are_read() {
        // No CPU of this project samples addresses. Page faults have the same records, and neither an address nor a level.
        let mut samples = match ThreadSamples::open_for(0, Software::PAGE_FAULTS, 1) {
            Ok(samples) => samples,
            Err(error) => {
                println!("skipped: {error}");
                return;
            }
        };
        let mut bytes = vec![0_u8; 4 << 20];
        bytes.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        std::hint::black_box(&bytes);
        let mut count = 0;
        while samples
            .0
            .next_record()
            .is_some_and(|record| matches!(record.parse_record(), Ok(Record::Sample(_))))
        {
            count += 1;
        }
        assert!(count >= 2, "{count} faults of 4 MiB");
        assert_eq!(samples.take(&MemoryMap::default()).by_node, BTreeMap::new());
    }

    #[test]
    fn a_thread_that_is_gone_is_named() {
        let error = ThreadSamples::open_for(i32::MAX, Software::PAGE_FAULTS, 1)
            .expect_err("no such thread")
            .to_string();
        assert!(error == "thread 2147483647 has ended" || error.contains("not permitted"), "{error}");
    }

    proptest! {
        #[test]
        fn no_more_is_spread_than_there_is(
            periods in proptest::collection::vec(proptest::collection::btree_map(0_u32..64, 0_u64..1 << 40, 0..6), 1..6),
            accesses in 0_u64..1 << 48,
        ) {
            let mut shares = Shares::default();
            for by_node in periods {
                shares.add(&Sampled { by_node, ..Sampled::default() });
            }
            if let Some(spread) = shares.spread(accesses) {
                prop_assert!(spread.iter().map(|(_, count)| count).sum::<u64>() <= accesses + 64);
            }
        }
    }
}
