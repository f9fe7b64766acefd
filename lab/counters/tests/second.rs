//! What the second cache misses is exactly what it would miss were it the first. On a server two runs never do the same, so
//! that `../../count/tests/exact.rs` can show it to 1 % only; here the plugin's model gets the same accesses twice.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
};

use proptest::prelude::*;
use vnuma_abi_lab_counters::{CPUS_OFFSET, Cpu, FULL, Header, MAX_NODES, PAGE_SIZE, SAMPLED};
use vnuma_lab_counters::{Machine, Sampling, region};
use vnuma_lab_pricing::by_name;

const NODES: usize = 2;
const CPUS: usize = 4;
const LINE: u64 = 64;

/// The plugin's `config.c` and `cache.c` with a driver instead of QEMU, built once.
static MODEL: LazyLock<PathBuf> = LazyLock::new(|| {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = scratch("model");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-I"]).arg(here.join("../../abi/lab-counters/include"));
    cc.arg("-o").arg(&model);
    cc.args(["tests/model.c", "plugin/config.c", "plugin/cache.c"].map(|source| here.join(source)));
    let output = cc.output().expect("cc starts (package gcc)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    model
});

/// A file that no other run uses.
fn scratch(name: &str) -> PathBuf {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("second-{}-{run}-{name}", std::process::id()))
}

/// A line of memory that a CPU accesses, and the memory's node.
#[derive(Clone, Copy, Debug)]
struct Access {
    line: u64,
    cpu: usize,
    node: usize,
}

/// What a CPU's node missed of a cache: misses, those that a prefetcher foresees, and both by the memory's node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Missed {
    misses: u64,
    streamed: u64,
    dram: Vec<u64>,
    dram_streamed: Vec<u64>,
}

/// The counts of a CPU: references, and what the first and the second cache missed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Counted {
    references: u64,
    first: Missed,
    second: Missed,
}

/// The counts of each CPU after these accesses.
fn run(region: &[u8], accesses: &[Access]) -> Vec<Counted> {
    let word = |access: &Access| (access.line * LINE) | access.cpu as u64 | ((access.node as u64) << 3);
    let words: Vec<u8> = accesses.iter().flat_map(|access| word(access).to_le_bytes()).collect();
    let (counters, trace) = (scratch("region"), scratch("accesses"));
    std::fs::write(&counters, region).expect("written");
    std::fs::write(&trace, words).expect("written");
    let output =
        Command::new(&*MODEL).arg(&counters).arg(CPUS.to_string()).arg(&trace).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let counted = std::fs::read(&counters).expect("read");
    [counters, trace].iter().for_each(|file| std::fs::remove_file(file).expect("removed"));
    (0..CPUS).map(|cpu| Counted::from(&counted[CPUS_OFFSET + cpu * PAGE_SIZE..])).collect()
}

impl Counted {
    fn from(page: &[u8]) -> Self {
        let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
        let by_node = |at: usize| (0..MAX_NODES).map(|node| word(at + node * 8)).collect();
        let missed = |[misses, streamed, dram, dram_streamed]: [usize; 4]| Missed {
            misses: word(misses),
            streamed: word(streamed),
            dram: by_node(dram),
            dram_streamed: by_node(dram_streamed),
        };
        use std::mem::offset_of as at;
        Self {
            references: word(at!(Cpu, llc_references)),
            first: missed([
                at!(Cpu, llc_misses),
                at!(Cpu, llc_misses_streamed),
                at!(Cpu, dram),
                at!(Cpu, dram_streamed),
            ]),
            second: missed([
                at!(Cpu, second_misses),
                at!(Cpu, second_misses_streamed),
                at!(Cpu, second_dram),
                at!(Cpu, second_dram_streamed),
            ]),
        }
    }
}

/// The region of a server with a profile's caches, and with those of a second one.
fn region_of(profile: &str, second: Option<&str>) -> Vec<u8> {
    let machine = Machine {
        profile: "2n4c",
        nodes: NODES,
        cpus_per_node: CPUS / NODES,
        memory_mib_per_node: 1024,
        distances: &[vec![10, 21], vec![21, 10]],
    };
    let second = second.map(|name| by_name(name).expect("there is one"));
    region(&by_name(profile).expect("there is one"), second.as_ref(), &machine, Sampling::Sampled)
        .expect("it fits")
}

/// Compares three runs of the same accesses; returns those with the second cache beside the first.
fn compare(regions: [&[u8]; 3], accesses: &[Access]) -> Vec<Counted> {
    let [both, first, second] = regions.map(|region| run(region, accesses));
    for ((both, first), second) in both.iter().zip(&first).zip(&second) {
        assert_eq!(both.second, second.first, "the second cache, against a run with it as the first");
        assert_eq!(both.first, first.first, "the first cache, against a run without a second");
        assert_eq!([first.references, second.references], [both.references; 2]);
    }
    both
}

/// Loads on both nodes of the machines that one run prices: chases within the smaller LLC, within the larger one only and
/// within none, and a stream.
#[test]
fn a_second_cache_misses_what_it_would_miss_alone() {
    let mut accesses = Vec::new();
    for (cpu, mib) in [(0, 6_u64), (2, 24)] {
        let lines = mib << 14;
        // Steps over an odd number of lines: each line of the set in turn, and no stream.
        for pass in 0..3 * lines {
            let line = pass * 7919 % lines;
            accesses.push(Access { line: ((cpu as u64) << 24) | line, cpu, node: 1 - cpu / 2 });
        }
    }
    let lines = 32_u64 << 14;
    accesses.extend((0..lines).map(|line| Access { line: (1 << 26) | line, cpu: 3, node: 0 }));
    for (profile, second) in [("broadwell-2s", "vprobe-e5620"), ("vprobe-e5620", "broadwell-2s")] {
        let regions = [region_of(profile, Some(second)), region_of(profile, None), region_of(second, None)];
        let counted = compare(regions.each_ref().map(Vec::as_slice), &accesses);
        // 12 MiB and 55 MiB: the loads tell the two apart, so that one in place of the other would be seen.
        let [large, small] = match profile {
            "broadwell-2s" => [&counted[2].first, &counted[2].second],
            _ => [&counted[2].second, &counted[2].first],
        };
        assert!(small.misses > 2 * large.misses, "{profile}: {} and {}", small.misses, large.misses);
        assert!(counted[3].second.streamed > counted[3].second.misses / 2, "{:?}", counted[3]);
    }
}

/// Sets and ways of a cache.
fn caches(sets: std::ops::Range<u32>) -> impl Strategy<Value = (u32, u32)> {
    (sets.prop_map(|groups| groups * 16), 1_u32..6)
}

/// Accesses of loads of several sizes that take turns: steps of one line up or down, of more, or anywhere.
fn accesses() -> impl Strategy<Value = Vec<Access>> {
    let load = (0..CPUS, 0..NODES, 1_u64..2000, 0_u64..4, 1_usize..400);
    prop::collection::vec((load, any::<u64>()), 1..40).prop_map(|loads| {
        let mut accesses = Vec::new();
        for ((cpu, node, lines, kind, times), mut random) in loads {
            for at in 0..times as u64 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let line = [at, u64::MAX / 2 - at, at * 17, random >> 33][kind as usize] % lines;
                accesses.push(Access { line: ((node as u64) << 20) | line, cpu, node });
            }
        }
        accesses
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Caches of any size, sampled or not.
    #[test]
    fn caches_do_not_see_one_another(
        l2 in caches(1..4), first in caches(1..40), second in caches(1..40), full in any::<bool>(), accesses in accesses(),
    ) {
        let region = region_of("broadwell-2s", None);
        let with = |first: (u32, u32), second: (u32, u32)| {
            let mut region = region.clone();
            let mut header = Header::from_bytes(&region).expect("a header");
            header.sample_shift = if full { FULL } else { SAMPLED };
            (header.l2_sets, header.l2_ways) = l2;
            (header.llc_sets, header.llc_ways) = first;
            (header.second_sets, header.second_ways) = second;
            let bytes = header.to_bytes();
            region[..bytes.len()].copy_from_slice(&bytes);
            region
        };
        let regions = [with(first, second), with(first, (0, 0)), with(second, (0, 0))];
        compare(regions.each_ref().map(Vec::as_slice), &accesses);
    }
}
