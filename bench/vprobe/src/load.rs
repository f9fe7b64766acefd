//! In a guest: a program that runs on one vCPU for ever. Before it begins it prints where its memory lies in the guest's
//! physical memory, so that the host can place it, and where it counts what it has done, so that the host can read that
//! without asking the guest.

use crate::{
    committed::{Kind, VCPUS, seed},
    database,
    full::committed::ABUSE_TURN,
    team,
};
use anyhow::{Context, Result, bail};
use lab_count::load::{Chain, Matrix, Memory, bring_home, compute, touch};
use serde::{Deserialize, Serialize};
use std::{thread, time::Duration};
use vnuma_bench_common::{
    cells::print,
    frames::{frames, ranges},
    host::affine,
};

const PAGE: usize = 4096;
const LINE: usize = 64;
const HUGE: usize = 2 << 20;
/// Operations between two counts.
const BATCH: u64 = 4096;
/// Bytes that [`Kind::Stream`] reads between two counts.
const STREAM: usize = 1 << 20;
const WORDS: usize = STREAM / size_of::<usize>();
/// Rounds of computing after each access of [`Kind::Walk`].
const ROUNDS: u64 = 16;
/// Rounds that are one operation of [`Kind::Compute`].
const COMPUTE: u64 = 500;

#[derive(clap::Args)]
pub struct Arguments {
    /// What to do
    kind: Kind,
    /// CPU to run on
    #[arg(long)]
    cpu: usize,
    /// Of `sleep`: how long at a time, in microseconds of the guest
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    sleep_us: u64,
    /// Of `redis` and `memcached`: connections
    #[arg(long, default_value_t = 0)]
    connections: usize,
    /// Guest node of the count, which stays there
    #[arg(long)]
    count_on: Option<usize>,
    /// Threads of a program that has several, on CPU 0 and on
    #[arg(long, default_value_t = VCPUS)]
    threads: usize,
}

/// What it prints.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Physical memory of the guest, first byte and length of each range.
    pub memory: Vec<(u64, u64)>,
    /// Memory that belongs on another node than that.
    #[serde(default)]
    pub other: Vec<(u64, u64)>,
    /// Physical address of the count of operations, 8 bytes. None: a thousand instructions count as one.
    #[serde(default)]
    pub count: Option<u64>,
}

/// The number of operations, for the host.
pub struct Count(pub Memory);

impl Count {
    /// None yet. On a node the guest's kernel leaves it where it is.
    pub fn new(node: Option<usize>) -> Result<Self> {
        let mut count = Self(Memory::map(HUGE, node, true).context("memory of the count")?);
        touch(&mut count.0);
        count.0.words()[0] = 0;
        Ok(count)
    }

    /// Operations that are finished.
    pub fn add(&mut self, operations: u64) {
        let before = self.0.words()[0] as u64;
        self.set(before + operations);
    }

    /// All of them until now.
    pub fn set(&mut self, operations: u64) {
        let word = &raw mut self.0.words()[0];
        // SAFETY: an aligned word of a slice that is borrowed for writing; volatile, as the host reads it.
        unsafe { word.write_volatile(operations as usize) };
    }

    /// Where it is.
    pub fn address(&self) -> Result<u64> {
        let first = *frames(self.0.address(), self.0.bytes())?.first().context("no memory of the count")?;
        Ok(first * PAGE as u64)
    }
}

/// Runs until it is killed.
pub fn run(arguments: &Arguments) -> Result<()> {
    let kind = arguments.kind;
    if kind.is_team() {
        return team::run(kind, arguments.threads);
    }
    affine(0, &[arguments.cpu as u32])?;
    if kind.is_of_debian() {
        return database::run(kind, arguments.cpu, arguments.connections);
    }
    let mut count = Count::new(arguments.count_on)?;
    let memory = Memory::map(kind.mib() << 20, None, true).with_context(|| format!("{} MiB", kind.mib()))?;
    match kind {
        Kind::Chase => {
            let mut chain = Chain::random(memory, seed(arguments.cpu));
            ready(chain.memory(), &count)?;
            forever(&mut count, || chain.follow(BATCH), BATCH)
        }
        Kind::Walk => {
            let mut chain = Chain::random(memory, seed(arguments.cpu));
            ready(chain.memory(), &count)?;
            let mut step = || {
                chain.follow(1);
                compute(ROUNDS);
            };
            forever(&mut count, || (0..BATCH).for_each(|_| step()), BATCH)
        }
        Kind::Stream => {
            let mut memory = memory;
            touch(&mut memory);
            ready(&memory, &count)?;
            // In pieces: a whole pass is a large part of a period.
            let pieces = memory.bytes() / STREAM;
            let mut next = 0;
            let mut piece = || {
                lab_count::load::read(&memory.words()[next * WORDS..(next + 1) * WORDS]);
                next = (next + 1) % pieces;
            };
            forever(&mut count, &mut piece, (STREAM / LINE) as u64)
        }
        Kind::Matrix => {
            let mut memory = memory;
            touch(&mut memory);
            ready(&memory, &count)?;
            let mut matrix = Matrix::new(memory, seed(arguments.cpu));
            let lines = (matrix.block_bytes() / LINE) as u64;
            forever(&mut count, || matrix.multiply(), lines)
        }
        Kind::Compute => {
            ready(&memory, &count)?;
            forever(&mut count, || compute(COMPUTE * 100), 100)
        }
        Kind::Sleep => {
            ready(&memory, &count)?;
            let time = Duration::from_micros(arguments.sleep_us);
            forever(&mut count, || thread::sleep(time), 1)
        }
        Kind::Abuse => abuse(arguments, memory, count),
        _ => bail!("{} has threads", kind.name()),
    }
}

/// Goes from memory on one node to memory on the other one about once a period.
fn abuse(arguments: &Arguments, memory: Memory, mut count: Count) -> Result<()> {
    let other = Memory::map(memory.bytes(), None, true).context("the other half")?;
    let chain = |memory, number| Chain::random(memory, seed(arguments.cpu + number * VCPUS));
    let mut chains = [chain(memory, 0), chain(other, 1)];
    let there = chains[1].memory();
    let there = ranges(&frames(there.address(), there.bytes())?);
    print(&Ready { other: there, ..line(chains[0].memory(), &count)? })?;
    let mut done = 0;
    let mut step = || {
        chains[(done / ABUSE_TURN % 2) as usize].follow(BATCH);
        done += BATCH;
    };
    forever(&mut count, &mut step, BATCH)
}

fn forever(count: &mut Count, mut work: impl FnMut(), operations: u64) -> ! {
    loop {
        work();
        count.add(operations);
    }
}

/// Says where everything is, and again whenever it is told to take its memory to a node of the guest: a line with the number.
fn ready(memory: &Memory, count: &Count) -> Result<()> {
    let first = line(memory, count)?;
    let (address, bytes, count) = (memory.address(), memory.bytes(), first.count);
    thread::spawn(move || {
        for told in std::io::stdin().lines() {
            let done = told.context("standard input").and_then(|node| {
                bring_home(address, bytes, node.trim().parse()?).context("mbind")?;
                print(&Ready { memory: ranges(&frames(address, bytes)?), other: Vec::new(), count })
            });
            if let Err(error) = done {
                // The sender of the command waits for a line.
                eprintln!("{error:#}");
                std::process::exit(1);
            }
        }
    });
    print(&first)
}

/// Where a program's memory and its count are.
pub fn line(memory: &Memory, count: &Count) -> Result<Ready> {
    let memory = ranges(&frames(memory.address(), memory.bytes())?);
    Ok(Ready { memory, other: Vec::new(), count: Some(count.address()?) })
}
