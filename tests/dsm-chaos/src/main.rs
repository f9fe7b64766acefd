//! A node that reads and writes at random for a while.

use anyhow::{Context, Result};
use clap::Parser;
use nix::{
    sys::{prctl::set_pdeathsig, signal::Signal},
    time::{ClockId, clock_gettime},
};
use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    os::fd::OwnedFd,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};
use vnuma_dsm_chaos::{History, Kind, PAGES, Record, value};
use vnuma_dsm_node::{Config, Happening, Node, Sabotage};
use vnuma_dsm_pager::{Options as Memory, PAGE_SIZE, Region};
use vnuma_dsm_transport::{Limits, Listener, Place, mesh};
use vnuma_random::Rng;

#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    node: u8,
    /// Where this node listens, and where it finds the others: a port for each node
    #[arg(long, value_delimiter = ',')]
    ports: Vec<u16>,
    #[arg(long)]
    seed: u64,
    /// How long it reads and writes
    #[arg(long)]
    millis: u64,
    #[arg(long)]
    history: PathBuf,
    /// Make acknowledgements of invalidations up in place of sending them: the checker must object
    #[arg(long)]
    skip_invalidations: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("node {}: {error:#}", arguments.node);
            ExitCode::FAILURE
        }
    }
}

/// Shorter than those of a product: a run is over in a second.
fn limits() -> Limits {
    let (stall, silence) = (Duration::from_millis(300), Duration::from_millis(450));
    Limits { stall, silence, connect: Duration::from_secs(20), ..Limits::default() }
}

fn run(arguments: &Arguments) -> Result<()> {
    set_pdeathsig(Signal::SIGKILL)?;
    let (number, nodes) = (arguments.node, u8::try_from(arguments.ports.len())?);
    let memory = Memory { shards: 2, ..Memory::default() };
    let region = Arc::new(Region::create(PAGES as usize * PAGE_SIZE, memory).context("the shared memory")?);
    let place = |port: u16| Place::Tcp((Ipv4Addr::LOCALHOST, port).into());
    let listener = Listener::bind(&place(arguments.ports[usize::from(number)])).context("listening")?;
    let others = arguments.ports.iter().enumerate().map(|(node, port)| (node as u8, place(*port)));
    let others: BTreeMap<_, _> = others.filter(|(node, _)| *node != number).collect();
    let mut config = Config::new(number, nodes, PAGES);
    if arguments.skip_invalidations {
        config.sabotage(Sabotage::SkipInvalidation);
    }
    let complain = |error| eprintln!("node {number}: {error}");
    let lanes = mesh(&listener, &others, &config.hello(&region), limits(), complain)?;
    let node = Node::start(&config, region, lanes, move |happening| told(number, happening))?;
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    work(arguments, &node, nodes)?;
    println!("done");
    // The others may still want what this node has.
    std::io::stdin().read_line(&mut String::new())?;
    node.stop();
    Ok(())
}

fn told(number: u8, happening: &Happening) {
    eprintln!("node {number}: {happening}");
    if matches!(happening, Happening::Stopped { .. } | Happening::Failed { .. }) {
        std::process::exit(3);
    }
}

fn now_ns() -> Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    Ok(time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// Finds out whether a page can be read without dying if not: the kernel gets an error where a load would get SIGBUS.
struct Probe {
    from: OwnedFd,
    to: OwnedFd,
}

impl Probe {
    fn is_there(&self, address: usize) -> Result<bool> {
        // SAFETY: a byte of the region, which outlives this; the kernel checks what it reads there.
        let byte = unsafe { std::slice::from_raw_parts(address as *const u8, 1) };
        match nix::unistd::write(&self.to, byte) {
            Ok(_) => {
                nix::unistd::read(&self.from, &mut [0])?;
                Ok(true)
            }
            Err(nix::Error::EFAULT | nix::Error::EIO | nix::Error::EHWPOISON) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

fn work(arguments: &Arguments, node: &Node, nodes: u8) -> Result<()> {
    let (from, to) = nix::unistd::pipe()?;
    let probe = Probe { from, to };
    let mut history = History::create(&arguments.history).context("the history")?;
    let mut random = Rng::new(arguments.seed << 8 | u64::from(arguments.node));
    let mut next = |below: u64| random.within(0..below);
    let mut sequences = BTreeMap::new();
    let begin = Instant::now();
    let base = node.region().guest().as_ptr() as usize;
    while begin.elapsed() < Duration::from_millis(arguments.millis) {
        let (page, writes) = (next(PAGES) as u16, next(3) == 0);
        let owner = if writes { arguments.node } else { next(nodes.into()) as u8 };
        // Now and then a crowd on one page.
        let page = if next(4) == 0 { 0 } else { page };
        let address = base + usize::from(page) * PAGE_SIZE + usize::from(owner) * 8;
        // SAFETY: aligned and inside the region, which outlives this; all accesses are atomic.
        let word = unsafe { &*(address as *const AtomicU64) };
        let begin_ns = now_ns()?;
        let mut record = Record { kind: Kind::Read, owner, page, value: 0, begin_ns, end_ns: begin_ns };
        if !probe.is_there(address)? {
            history.add(&Record { kind: Kind::Refused, ..record })?;
        } else if writes {
            let sequence = sequences.entry(page).or_insert(0);
            *sequence += 1;
            record.value = value(owner, page, *sequence);
            history.add(&Record { kind: Kind::Writes, ..record })?;
            word.store(record.value, SeqCst);
            history.add(&Record { kind: Kind::Wrote, end_ns: now_ns()?, ..record })?;
        } else {
            record.value = word.load(SeqCst);
            history.add(&Record { end_ns: now_ns()?, ..record })?;
        }
        // The machine has other things to do.
        thread::sleep(Duration::from_micros(next(600)));
    }
    Ok(())
}
