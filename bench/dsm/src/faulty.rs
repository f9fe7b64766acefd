//! How long it takes until a thread that waits for a page of a peer that fails has an answer.

use crate::{
    cluster::{Cluster, Shape},
    peer::Kind,
    place,
    report::Answer,
};
use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::signal::Signal;
use std::{
    collections::BTreeMap,
    io,
    net::Ipv4Addr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use vnuma_coherence::{Managers, NodeId};
use vnuma_dsm_chaos::{Conduct, Proxy};
use vnuma_dsm_node::{Config, Happening, Node};
use vnuma_dsm_pager::{PAGE_SIZE, Region};
use vnuma_dsm_transport::{Limits, Listener, Place, Reserved, mesh};

const PAGES: u64 = 8;
const NODES: u8 = 3;
/// The node that fails.
const VICTIM: u8 = 2;

/// What happens to the process that it is.
const SIGNALS: [(&str, Signal); 2] = [("killed", Signal::SIGKILL), ("stopped", Signal::SIGSTOP)];

/// What happens to its connections.
const CASES: [(&str, Conduct); 4] = [
    ("cut off", Conduct::Cut),
    ("silent", Conduct::Stop),
    ("slowed", Conduct::Slow { bytes: 1, pause: Duration::from_millis(100) }),
    ("garbage", Conduct::Garbage { seed: 7 }),
];

/// Each case with three nodes, the limits that nodes have by default, and a page that only the victim has.
pub fn all() -> Result<Vec<Answer>> {
    let processes = SIGNALS.into_iter().map(|(case, signal)| process(case, signal).context(case));
    processes.chain(CASES.into_iter().map(|(case, conduct)| one(case, conduct).context(case))).collect()
}

/// Nodes that are processes. The survivor that waits is the node of this one.
fn process(case: &'static str, signal: Signal) -> Result<Answer> {
    let shape = Shape { impatient: true, ..Shape::three() };
    let mut cluster = Cluster::new(Kind::Tcp, "default", &shape)?;
    place::anywhere()?;
    // The victim is the only one to have this page.
    cluster.write(usize::from(VICTIM), [0].into_iter())?;
    let begin = Instant::now();
    cluster.signal(usize::from(VICTIM), signal)?;
    let error = load(cluster.own().region()).err();
    let seconds = begin.elapsed().as_secs_f64();
    let error = error.context("a page of the victim was read after it had failed")?.to_string();
    Ok(Answer { case, seconds, error, reason: reason(cluster.own())? })
}

/// What the program of a survivor was told.
fn reason(survivor: &Node) -> Result<String> {
    let begin = Instant::now();
    let mut told = survivor.happenings();
    // It is told once all shards agree, and a thread has its answer when one of them does.
    while !told.iter().any(|happening| matches!(happening, Happening::Members { .. })) {
        ensure!(begin.elapsed() < Duration::from_secs(10), "{told:?}");
        thread::sleep(Duration::from_millis(1));
        told = survivor.happenings();
    }
    let reason = told.iter().find(|happening| matches!(happening, Happening::PeerEnded { peer: VICTIM, .. }));
    Ok(reason.or_else(|| told.first()).map(ToString::to_string).unwrap_or_default())
}

fn one(case: &'static str, conduct: Conduct) -> Result<Answer> {
    let (nodes, proxies) = cluster()?;
    // The victim is the only one to have this page.
    store(&nodes[usize::from(VICTIM)], 5)?;
    let begin = Instant::now();
    proxies.iter().for_each(|proxy| proxy.conduct(conduct));
    let waits: Vec<_> = nodes[..2]
        .iter()
        .map(|node| {
            let region = Arc::clone(node.region());
            thread::spawn(move || (load(&region).err(), begin.elapsed()))
        })
        .collect();
    let (mut slowest, mut errors) = (Duration::ZERO, Vec::new());
    for wait in waits {
        let (error, taken) = wait.join().map_err(|_| anyhow!("a thread panicked"))?;
        slowest = slowest.max(taken);
        errors.push(error.context("a page of the victim was read after it had failed")?.to_string());
    }
    Ok(Answer {
        case,
        seconds: slowest.as_secs_f64(),
        error: errors.swap_remove(0),
        reason: reason(&nodes[0])?,
    })
}

/// Three nodes; the victim's connections pass by the proxies.
fn cluster() -> Result<(Vec<Node>, Vec<Proxy>)> {
    // Kept until all nodes listen.
    let reserved = Reserved::new(Ipv4Addr::LOCALHOST.into(), NODES.into())?;
    let addresses = reserved.addresses();
    // The node with the higher number dials.
    let proxies: Vec<_> =
        addresses[..2].iter().map(|address| Proxy::new(*address)).collect::<Result<_, _>>()?;
    let start = |number: u8| {
        let place = |node: u8| {
            let direct = addresses[usize::from(node)];
            let proxy = proxies.get(usize::from(node)).filter(|_| number == VICTIM);
            Place::Tcp(proxy.map_or(direct, Proxy::address))
        };
        let own = Place::Tcp(addresses[usize::from(number)]);
        let others: BTreeMap<_, _> =
            (0..NODES).filter(|node| *node != number).map(|node| (node, place(node))).collect();
        thread::spawn(move || -> Result<Node> {
            let region = Arc::new(Region::create(PAGES as usize * PAGE_SIZE, Default::default())?);
            let mut config = Config::new(number, NODES, PAGES);
            config.managers = Managers::new(&[(PAGES, NodeId(1))])?;
            let listener = Listener::bind(&own)?;
            let lanes = mesh(&listener, &others, &config.hello(&region), Limits::default(), |_| ())?;
            Ok(Node::start(&config, region, lanes, |_| {})?)
        })
    };
    let threads: Vec<_> = (0..NODES).map(start).collect();
    let nodes: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().map_err(|_| anyhow!("a node panicked"))?)
        .collect::<Result<_>>()?;
    Ok((nodes, proxies))
}

/// Has the kernel write to the page.
fn store(node: &Node, value: u8) -> Result<()> {
    let (from, to) = io::pipe()?;
    io::Write::write_all(&mut &to, &[value])?;
    // SAFETY: a byte of the region, which lives as long as the node; no reference to it exists.
    let byte = unsafe { std::slice::from_raw_parts_mut(node.region().guest().as_ptr(), 1) };
    io::Read::read_exact(&mut &from, byte)?;
    Ok(())
}

/// Has the kernel read the page: what would be SIGBUS is an error then.
fn load(region: &Region) -> io::Result<()> {
    let (_from, to) = io::pipe()?;
    // SAFETY: a byte of the region, which the caller keeps alive; the kernel checks what it reads there.
    let byte = unsafe { std::slice::from_raw_parts(region.guest().as_ptr(), 1) };
    io::Write::write_all(&mut &to, byte)
}
