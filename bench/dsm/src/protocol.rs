//! Remote page faults of the protocol, of three nodes.
//!
//! Node 1 manages all pages. Before each pass others write every page, so that its owner and what node 0 knows of it are as
//! the access says; then threads of node 0 touch them.

use crate::{
    cluster::{Cluster, Shape},
    floor::Floor,
    peer::Kind,
    report::{Mix, Quantiles, Row},
    spent::Spent,
};
use anyhow::{Context, Result};
use std::{
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};
use vnuma_coherence::Options;
use vnuma_dsm_node::Node;
use vnuma_dsm_pager::PAGE_SIZE;

/// Pages of the shared memory.
pub const PAGES: usize = 256;

/// What node 0 does, after who has written, and whether it writes.
const ACCESSES: [(&str, &[usize], bool); 5] = [
    ("read-owner", &[1], false),
    ("read-nonowner", &[1, 2], false),
    ("write-owner", &[1], true),
    ("write-nonowner-hint", &[2], true),
    // The last write does not pass by node 0, which still knows the one before.
    ("write-nonowner-miss", &[2, 1, 2], true),
];

/// All that is compared.
pub fn modes() -> Vec<(&'static str, Options)> {
    let all = Options::default();
    vec![
        ("ivy", Options::ivy()),
        ("default", all),
        ("default-without-direct-reply", Options { direct_reply: false, ..all }),
        ("default-without-owner-hints", Options { owner_hints: false, ..all }),
        ("default-without-upgrade-without-data", Options { upgrade_without_data: false, ..all }),
        ("default-without-migratory", Options { migratory: false, ..all }),
        ("default-without-tell-owners", Options { tell_owners: false, ..all }),
        ("default-without-deltas", Options { deltas: false, ..all }),
        ("default-without-prefetch", Options { prefetch_pages: 0, ..all }),
        ("default-without-hold", Options { hold_ns: 0, ..all }),
        ("default-without-batch-invalidations", Options { batch_invalidations: false, ..all }),
        ("default-without-direct-acks", Options { direct_acks: false, ..all }),
    ]
}

/// A word of a page, as threads of a node see it.
pub fn word(node: &Node, page: usize, word: usize) -> &AtomicU64 {
    assert!((page as u64) < node.region().pages() && word < PAGE_SIZE / size_of::<u64>());
    // SAFETY: aligned and inside the region, which lives as long as the node; all accesses are atomic.
    unsafe { &*node.region().guest().as_ptr().add(page * PAGE_SIZE).cast::<AtomicU64>().add(word) }
}

/// All accesses, with each number of threads.
pub fn measure(kind: Kind, mode: &'static str, passes: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let counts: &[usize] = if matches!(mode, "ivy" | "default") { &[1, 2, 16] } else { &[1] };
    for (access, writers, write) in ACCESSES {
        let mut cluster = Cluster::new(kind, mode, &Shape::three())?;
        for &threads in counts {
            rows.push(row(&mut cluster, kind, (mode, access), (writers, write), threads, passes)?);
        }
    }
    Ok(rows)
}

fn row(
    cluster: &mut Cluster,
    kind: Kind,
    (mode, access): (&'static str, &'static str),
    (writers, write): (&[usize], bool),
    threads: usize,
    passes: usize,
) -> Result<Row> {
    let (mut samples, mut taken, mut spent) = (Vec::new(), Duration::ZERO, [Spent::default(); 2]);
    // How fast the machine is changes within a run, so that what is compared takes turns.
    let compared = threads == 1 && matches!(mode, "ivy" | "default") && kind != Kind::Rdma;
    let floor = compared.then(|| Floor::begin(kind)).transpose()?;
    let mut floors = Vec::new();
    for pass in 0..passes + 1 {
        for writer in writers {
            cluster.write(*writer, 0..PAGES)?;
        }
        // The time that an owner keeps a page is over.
        thread::sleep(Duration::from_millis(1));
        let before = cluster.spent()?;
        let (times, lasted) = touch_all(cluster.own(), threads, write)?;
        // The first pass meets pages that nobody has touched.
        if pass > 0 {
            taken += lasted;
            let after = cluster.spent()?;
            spent = [0, 1].map(|side: usize| spent[side] + (after[side] - before[side]));
            samples.extend(times);
            floors.extend(floor.as_ref().map_or_else(|| Ok(Vec::new()), Floor::pass)?);
        }
    }
    floor.map_or(Ok(()), Floor::end)?;
    let count = samples.len() as f64;
    let Quantiles { p50, p90, p99, .. } = Quantiles::of(&samples);
    let each = |figure: fn(&Spent) -> u64| figure(&(spent[0] + spent[1])) as f64 / count;
    Ok(Row {
        transport: kind.name(),
        mode,
        access: Some(access),
        threads,
        p50_us: p50,
        p90_us: p90,
        p99_us: p99,
        floor_us: compared.then(|| Quantiles::of(&floors)),
        faults_per_s: count / taken.as_secs_f64(),
        messages: each(|spent| spent.messages),
        bytes: each(|spent| spent.bytes),
        cpu_us: each(|spent| spent.cpu_ns) / 1000.0,
        cpu_measured_us: Some(spent[0].cpu_ns as f64 / count / 1000.0),
        sleeps: each(|spent| spent.sleeps),
        spin_us: 0,
        exchange_us: None,
    })
}

/// Non-owner writes by `ivy` and by the default protocol in turn, of which hints find this share. Each two of the three nodes
/// share a CPU in one of three placements, so that none is nearer to another; medians of each, and the mean of the three.
pub fn mix(kind: Kind, hint_rate: f64, passes: usize) -> Result<Vec<Mix>> {
    let places = [None, Some(1), Some(2)];
    let medians = places.map(|beside| medians(kind, hint_rate, passes, beside));
    let medians = medians.into_iter().collect::<Result<Vec<_>>>()?;
    let figures = |(index, mode): (usize, &'static str)| {
        let mean =
            |which: usize| medians.iter().map(|of| of[index][which]).sum::<f64>() / places.len() as f64;
        let (hint_us, miss_us) = (mean(0), mean(1));
        let typical_us = hint_rate * hint_us + (1.0 - hint_rate) * miss_us;
        Mix { transport: kind.name(), mode, hint_rate, hint_us, miss_us, typical_us }
    };
    Ok(MIXED.into_iter().enumerate().map(figures).collect())
}

/// The protocols of a mix.
const MIXED: [&str; 2] = ["ivy", "default"];

/// Of both protocols: what a write takes that a hint finds, and another one. This node is on the CPU of node 0.
fn medians(kind: Kind, hint_rate: f64, passes: usize, beside: Option<u8>) -> Result<Vec<[f64; 2]>> {
    let shape = Shape { beside, ..Shape::three() };
    let clusters = MIXED.map(|mode| Cluster::new(kind, mode, &shape));
    let mut clusters = clusters.into_iter().collect::<Result<Vec<_>>>()?;
    // Spread over the pages: whether the hint is right is the remainder that has come to 1.
    let hit = |page: usize| ((page + 1) as f64 * hint_rate).floor() > (page as f64 * hint_rate).floor();
    let mut samples = [(); 2].map(|()| [Vec::new(), Vec::new()]);
    for pass in 0..passes + 1 {
        for (cluster, samples) in clusters.iter_mut().zip(&mut samples) {
            cluster.write(2, 0..PAGES)?;
            for node in [1, 2] {
                cluster.write(node, (0..PAGES).filter(|page| !hit(*page)))?;
            }
            thread::sleep(Duration::from_millis(1));
            for page in (0..PAGES).map(|index| index * 37 % PAGES) {
                let begin = Instant::now();
                word(cluster.own(), page, 0).store(7, SeqCst);
                // The first pass meets pages that nobody has touched.
                if pass > 0 {
                    samples[usize::from(!hit(page))].push(begin.elapsed());
                }
            }
        }
    }
    let median = |samples: &Vec<Duration>| Quantiles::of(samples).p50;
    Ok(samples.iter().map(|samples| samples.each_ref().map(median)).collect())
}

/// What each touch took, and all of them from when the threads were ready: to start many of them takes longer than to start one.
fn touch_all(node: &Node, threads: usize, write: bool) -> Result<(Vec<Duration>, Duration)> {
    let ready = Barrier::new(threads);
    let part = |thread: usize| {
        ready.wait();
        let begin = Instant::now();
        (touch(node, thread, threads, write), begin, Instant::now())
    };
    let parts: Vec<_> = thread::scope(|scope| {
        let part = &part;
        let handles: Vec<_> = (0..threads).map(|thread| scope.spawn(move || part(thread))).collect();
        handles.into_iter().map(|handle| handle.join().ok()).collect::<Option<_>>()
    })
    .context("a thread panicked")?;
    let begin = parts.iter().map(|(_, begin, _)| *begin).min().context("no threads")?;
    let end = parts.iter().map(|(_, _, end)| *end).max().context("no threads")?;
    Ok((parts.into_iter().flat_map(|(times, ..)| times).collect(), end - begin))
}

/// A thread's pages, not in their order: what is measured are faults, not the prefetch.
fn touch(node: &Node, thread: usize, threads: usize, write: bool) -> Vec<Duration> {
    let pages = (0..PAGES).map(|index| index * 37 % PAGES).skip(thread).step_by(threads);
    pages
        .map(|page| {
            let begin = Instant::now();
            if write {
                word(node, page, 0).store(7, SeqCst);
            } else {
                word(node, page, 0).load(SeqCst);
            }
            begin.elapsed()
        })
        .collect()
}
