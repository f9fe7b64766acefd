//! Remote page faults of the protocol: three nodes in this process.
//!
//! Node 1 manages all pages. Before each pass others write every page, so that its owner and what node 0 knows of it are as
//! the access says; then threads of node 0 touch them.

use crate::{
    peer::{Kind, identities},
    report::{Quantiles, Row},
};
use anyhow::{Context, Result, anyhow};
use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};
use vnuma_dsm::{Managers, NodeId, Options};
use vnuma_dsm_node::{Config, Node};
use vnuma_dsm_pager::{Options as Memory, PAGE_SIZE, Region};
use vnuma_dsm_transport::{Limits, Listener, Place, mesh};

const PAGES: usize = 256;
const NODES: u8 = 3;
/// Shards of a node.
const SHARDS: usize = 2;

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
        ("default-without-deltas", Options { deltas: false, ..all }),
        ("default-without-prefetch", Options { prefetch_pages: 0, ..all }),
        ("default-without-hold", Options { hold_ns: 0, ..all }),
        ("default-without-batch-invalidations", Options { batch_invalidations: false, ..all }),
    ]
}

fn cluster(kind: Kind, options: Options) -> Result<Vec<Node>> {
    let directory = tempfile::tempdir()?;
    let identities = identities::<3>()?;
    let sockets: Vec<_> =
        (0..NODES).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<_, _>>()?;
    let addresses: Vec<_> = sockets.iter().map(TcpListener::local_addr).collect::<Result<_, _>>()?;
    drop(sockets);
    let start = |number: u8| {
        let place = |node: u8| match kind {
            Kind::Tcp => Place::Tcp(addresses[usize::from(node)]),
            Kind::Tls => Place::Tls(addresses[usize::from(node)], identities[usize::from(number)].clone()),
            Kind::Shm => Place::Shm(directory.path().join(node.to_string())),
        };
        let (own, others) = (place(number), (0..NODES).filter(|node| *node != number));
        let others: BTreeMap<_, _> = others.map(|node| (node, place(node))).collect();
        thread::spawn(move || -> Result<Node> {
            let memory = Memory { shards: SHARDS, ..Memory::default() };
            let region = Arc::new(Region::create(PAGES * PAGE_SIZE, memory)?);
            let mut config = Config::new(number, NODES, PAGES as u64);
            config.options = options;
            config.managers = Managers::new(&[(PAGES as u64, NodeId(1))])?;
            let silence = Duration::from_secs(60);
            let limits = Limits { silence, stall: silence, ..Limits::default() };
            let listener = Listener::bind(&own)?;
            let lanes =
                mesh(&listener, &others, &config.hello(&region), limits, |error| eprintln!("{error}"))?;
            Ok(Node::start(&config, region, lanes, |_| {})?)
        })
    };
    let threads: Vec<_> = (0..NODES).map(start).collect();
    threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a node panicked"))?).collect()
}

/// A word of a page, as threads of a node see it.
fn word(node: &Node, page: usize) -> &AtomicU64 {
    assert!(page < PAGES);
    // SAFETY: aligned and inside the region, which lives as long as the node; all accesses are atomic.
    unsafe { &*node.region().guest().as_ptr().add(page * PAGE_SIZE).cast::<AtomicU64>() }
}

/// All accesses, with each number of threads.
pub fn measure(kind: Kind, mode: &'static str, options: Options, passes: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let counts: &[usize] = if matches!(mode, "ivy" | "default") { &[1, 2, 16] } else { &[1] };
    for (access, writers, write) in ACCESSES {
        let nodes = cluster(kind, options)?;
        for &threads in counts {
            rows.push(row(&nodes, kind, (mode, access), (writers, write), threads, passes)?);
        }
    }
    Ok(rows)
}

fn row(
    nodes: &[Node],
    kind: Kind,
    (mode, access): (&'static str, &'static str),
    (writers, write): (&[usize], bool),
    threads: usize,
    passes: usize,
) -> Result<Row> {
    let (mut samples, mut taken, mut sent) = (Vec::new(), Duration::ZERO, [0; 2]);
    let total = || nodes.iter().map(Node::sent).fold([0; 2], |sum, one| [sum[0] + one[0], sum[1] + one[1]]);
    for pass in 0..passes + 1 {
        for writer in writers {
            for page in 0..PAGES {
                word(&nodes[*writer], page).fetch_add(1, SeqCst);
            }
        }
        // The time that an owner keeps a page is over.
        thread::sleep(Duration::from_millis(1));
        let (before, begin) = (total(), Instant::now());
        let part = |thread: usize| touch(&nodes[0], thread, threads, write);
        let times: Vec<Vec<Duration>> = thread::scope(|scope| {
            let handles: Vec<_> = (0..threads).map(|thread| scope.spawn(move || part(thread))).collect();
            handles.into_iter().map(|handle| handle.join().ok()).collect::<Option<_>>()
        })
        .context("a thread panicked")?;
        // The first pass meets pages that nobody has touched.
        if pass > 0 {
            taken += begin.elapsed();
            let after = total();
            sent = [sent[0] + after[0] - before[0], sent[1] + after[1] - before[1]];
            samples.extend(times.into_iter().flatten());
        }
    }
    let count = samples.len() as f64;
    let Quantiles { p50, p90, p99, .. } = Quantiles::of(&mut samples);
    Ok(Row {
        transport: kind.name(),
        mode,
        access: Some(access),
        threads,
        p50_us: p50,
        p90_us: p90,
        p99_us: p99,
        faults_per_s: count / taken.as_secs_f64(),
        messages: sent[0] as f64 / count,
        bytes: sent[1] as f64 / count,
        spin_us: 0,
        exchange_us: None,
    })
}

/// A thread's pages, not in their order: what is measured are faults, not the prefetch.
fn touch(node: &Node, thread: usize, threads: usize, write: bool) -> Vec<Duration> {
    let pages = (0..PAGES).map(|index| index * 37 % PAGES).skip(thread).step_by(threads);
    pages
        .map(|page| {
            let begin = Instant::now();
            if write {
                word(node, page).store(7, SeqCst);
            } else {
                word(node, page).load(SeqCst);
            }
            begin.elapsed()
        })
        .collect()
}
