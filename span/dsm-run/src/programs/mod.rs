//! The programs, each with its check.
//!
//! | file | programs |
//! |---|---|
//! | `classic.rs` | lock counter, false sharing, PageRank, matrix product |
//! | `data.rs` | producer and consumer, word count, Pi |
//! | `guest.rs`, `machine.rs` | a guest of KVM whose vCPUs are on all nodes |
//! | `system.rs` | metadata of a file system, sysbench's memory test |

mod classic;
mod data;
mod guest;
mod machine;
mod system;

pub use guest::{Seen, VCPUS};

use clap::ValueEnum;
use serde::Serialize;
use std::{
    cell::Cell,
    sync::{
        Arc, Weak,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    thread,
    time::{Duration, Instant},
};
use vnuma_dsm_pager::Region;

/// Words of a page.
const WORDS: usize = 512;
/// Pages of the programs that do not say how many they need.
const PAGES: u64 = 1024;

/// In the first page: a number of each node, and which cut is due.
const HIGHEST: usize = 16;
const DUE: usize = 100;

/// What can be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// All nodes count under one lock
    LockCounter,
    /// Each node sends messages to the next through a ring
    ProducerConsumer,
    /// Product of two matrices; nodes divide the rows
    Matrix,
    /// Ranks of a random graph; nodes divide the vertices
    #[value(name = "pagerank")]
    #[serde(rename = "pagerank")]
    PageRank,
    /// Words of a text that node 0 wrote; nodes divide the text
    WordCount,
    /// Pi by random points; nodes divide the points
    Pi,
    /// Each node counts in a word of its own, all in one page
    FalseSharing,
    /// Inodes, an allocation map and directories under locks that share a page
    Metadata,
    /// A small guest of KVM: each node runs some of its vCPUs, and they move from node to node (see --vcpus)
    Guest,
    /// Blocks read or written again and again, as sysbench's memory test does (see --block, --scope, --access)
    Memory,
}

impl Program {
    /// How much it does unless `--size` says otherwise.
    pub fn default_size(self, block: Block) -> usize {
        match self {
            Self::LockCounter | Self::Metadata => 200,
            Self::ProducerConsumer => 1000,
            Self::Matrix => 96,
            Self::PageRank => 4000,
            Self::WordCount => 1024,
            Self::Pi => 2_000_000,
            Self::FalseSharing | Self::Guest => 2000,
            Self::Memory if block == Block::Large => 4,
            Self::Memory => 500,
        }
    }
}

/// The block of `memory`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Block {
    /// One page
    #[value(name = "4KiB")]
    Page,
    /// 1024 pages
    #[value(name = "4MiB")]
    Large,
}

impl Block {
    fn pages(self) -> usize {
        match self {
            Self::Page => 1,
            Self::Large => 1024,
        }
    }
}

/// Whose block `memory` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scope {
    /// Each node has a block of its own
    Local,
    /// All nodes use the same block
    Global,
}

/// What `memory` does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Access {
    /// Loads
    Read,
    /// Stores
    Write,
}

/// What is to be done: a program, and how much of it.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    pub program: Program,
    pub size: Option<usize>,
    pub block: Block,
    pub scope: Scope,
    pub access: Access,
    /// vCPUs of a guest on each node.
    pub vcpus: u8,
}

/// Makes second copies while no thread uses the memory. False if that cannot be, because a node was lost.
pub type Cut = dyn Fn() -> Result<bool, String> + Send;

/// What a node's part was.
pub struct Done {
    /// What it has read or written, of a program that measures that.
    pub moved_bytes: Option<u64>,
    /// From the first barrier to the last.
    pub taken: Duration,
    /// How long it had nothing to do, summed up over its threads.
    pub idle: Duration,
    /// Threads of the program.
    pub threads: u8,
    /// What a guest was seen to do.
    pub guest: Option<Seen>,
}

/// The memory as words, and this node, or one thread of it, among the others.
pub struct Shared {
    address: usize,
    words: usize,
    /// What the memory is a region of; of a test, nothing.
    pub region: Weak<Region>,
    pub node: usize,
    pub nodes: usize,
    idle: Cell<Duration>,
    /// The program is started anew elsewhere: this thread must not go on.
    abandoned: Arc<AtomicBool>,
    /// At which intervals second copies are made, and how.
    pub cuts: Option<(Duration, Box<Cut>)>,
    /// To be called when all nodes have come together.
    pub begun: Box<dyn Fn() + Send>,
    last_cut: Cell<Instant>,
}

impl Shared {
    /// Of `pages` pages at this address.
    pub fn new(address: usize, pages: u64, node: usize, nodes: usize, abandoned: Arc<AtomicBool>) -> Self {
        let words = pages as usize * WORDS;
        let (idle, last_cut) = (Cell::default(), Cell::new(Instant::now()));
        let region = Weak::new();
        let begun = Box::new(|| {});
        Self { address, words, region, node, nodes, idle, abandoned, cuts: None, begun, last_cut }
    }

    /// A thread of this node, of which each node has so many. They are numbered over all nodes and meet at barriers of their own,
    /// at which no other thread may be.
    fn thread(&self, index: usize, threads: usize) -> Self {
        let pages = (self.words / WORDS) as u64;
        let (node, nodes) = (self.node * threads + index, self.nodes * threads);
        let shared = Self::new(self.address, pages, node, nodes, Arc::clone(&self.abandoned));
        Self { region: Weak::clone(&self.region), ..shared }
    }

    /// All nodes agree on the highest of these numbers.
    pub fn highest(&self, number: u64) -> u64 {
        self.store(HIGHEST + self.node, number);
        self.barrier();
        (0..self.nodes).map(|node| self.load(HIGHEST + node)).max().unwrap_or(number)
    }

    /// Puts a page back. The first one is that of the barrier.
    pub fn put_back(&self, page: u64, content: &[u8]) {
        for (word, bytes) in content.as_chunks::<8>().0.iter().enumerate().filter(|_| page > 0) {
            self.store(page as usize * WORDS + word, u64::from_le_bytes(*bytes));
        }
    }

    /// A barrier, after which second copies are made if it is time. `progress` is a word that says where to go on from them.
    fn cut_point(&self, progress: usize, reached: u64) -> Result<(), String> {
        let Some((interval, cut)) = &self.cuts else {
            self.barrier();
            return Ok(());
        };
        if self.node == 0 && self.last_cut.get().elapsed() >= *interval {
            self.store(DUE, reached);
            self.store(progress, reached);
        }
        self.barrier();
        if self.load(DUE) == reached {
            // What the others have read of it is theirs, and no node writes before all have come here.
            self.barrier();
            if !cut()? {
                return self.await_the_end();
            }
            self.last_cut.set(Instant::now());
        }
        Ok(())
    }

    /// A word, counted over all pages.
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words, "word {index}");
        // SAFETY: aligned, inside the region, which lives until the program has ended; all accesses are atomic.
        unsafe { &*((self.address + index * 8) as *const AtomicU64) }
    }

    fn load(&self, index: usize) -> u64 {
        self.word(index).load(SeqCst)
    }

    fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, SeqCst);
    }

    /// All nodes have come here. The first page is for this.
    pub fn barrier(&self) {
        let generation = self.load(1);
        if self.word(0).fetch_add(1, SeqCst) + 1 == self.nodes as u64 {
            self.store(0, 0);
            self.store(1, generation + 1);
        }
        while self.load(1) == generation {
            self.rest();
        }
    }

    /// A node was lost: the program is started anew, or it fails.
    fn await_the_end(&self) -> Result<(), String> {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(20) {
            if self.abandoned.load(Relaxed) {
                park();
            }
            thread::sleep(Duration::from_millis(5));
        }
        Err("second copies cannot be made, and no node was lost".to_owned())
    }

    /// There is nothing to do before another node has done something.
    fn rest(&self) {
        if self.abandoned.load(Relaxed) {
            park();
        }
        let begin = Instant::now();
        thread::sleep(Duration::from_micros(50));
        self.idle.set(self.idle.get() + begin.elapsed());
    }

    /// Runs `act` while no other node holds the lock, which is a word.
    fn locked<T>(&self, lock: usize, act: impl FnOnce() -> T) -> T {
        while self.word(lock).compare_exchange(0, 1, SeqCst, SeqCst).is_err() {
            thread::yield_now();
        }
        let outcome = act();
        self.store(lock, 0);
        outcome
    }

    /// This node's part of so many things.
    fn part(&self, count: usize) -> std::ops::Range<usize> {
        count * self.node / self.nodes..count * (self.node + 1) / self.nodes
    }
}

/// This thread has nothing more to do, and what it was in the middle of must not go on.
fn park() -> ! {
    loop {
        thread::park();
    }
}

/// Fails when they differ.
fn expect(what: &str, found: u64, expected: u64) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what} is {found:#x}, and {expected:#x} is right")) }
}

/// Fails unless the size is one that there is room for.
fn fits(size: usize, most: usize, what: &str) -> Result<(), String> {
    if (1..=most).contains(&size) { Ok(()) } else { Err(format!("--size {size}: 1 to {most} {what}")) }
}

/// Numbers that look random and are the same everywhere.
fn mix(seed: u64) -> u64 {
    vnuma_random::Rng::new(seed).number()
}

impl Task {
    /// Pages that the program needs.
    pub fn pages(&self, nodes: u8) -> u64 {
        match self.program {
            Program::Memory => system::memory_pages(self, nodes.into()) as u64,
            _ => PAGES,
        }
    }

    /// Runs this node's part. All nodes begin and end together.
    pub fn run(&self, shared: &Shared) -> Result<Done, String> {
        shared.barrier();
        (shared.begun)();
        shared.idle.set(Duration::ZERO);
        let begin = Instant::now();
        let size = self.size.unwrap_or(self.program.default_size(self.block));
        let (mut moved, mut seen) = (None, None);
        let outcome = match self.program {
            Program::LockCounter => classic::lock_counter(shared, size),
            Program::FalseSharing => classic::false_sharing(shared, size),
            Program::PageRank => classic::pagerank(shared, size),
            Program::Matrix => classic::matrix(shared, size),
            Program::ProducerConsumer => data::producer_consumer(shared, size),
            Program::WordCount => data::word_count(shared, size),
            Program::Pi => data::pi(shared, size),
            Program::Metadata => system::metadata(shared, size),
            Program::Guest => guest::guest(shared, self.vcpus.into(), size).map(|guest| seen = Some(guest)),
            Program::Memory => system::memory(shared, self, size).map(|bytes| moved = Some(bytes)),
        };
        shared.barrier();
        let (taken, idle) = (begin.elapsed(), shared.idle.get());
        let threads = if self.program == Program::Guest { self.vcpus } else { 1 };
        outcome.map(|()| Done { moved_bytes: moved, taken, idle, threads, guest: seen })
    }
}
