//! The programs, each with its check.

use clap::ValueEnum;
use std::{
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    thread,
    time::Duration,
};

/// Pages of the shared memory.
pub const PAGES: u64 = 1024;
/// Words of a page.
const WORDS: usize = 512;

/// What can be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Program {
    /// All nodes count under one lock
    LockCounter,
    /// Each node counts in a word of its own, all in one page
    FalseSharing,
    /// Ranks of a random graph; nodes divide the vertices
    #[value(name = "pagerank")]
    PageRank,
    /// Product of two matrices; nodes divide the rows
    Matrix,
}

/// The memory as words, and this node among the others.
pub struct Shared {
    address: usize,
    pub node: usize,
    pub nodes: usize,
}

impl Shared {
    pub fn new(address: usize, node: usize, nodes: usize) -> Self {
        Self { address, node, nodes }
    }

    /// A word, counted over all pages.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < PAGES as usize * WORDS, "word {index}");
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
    fn barrier(&self) {
        let generation = self.load(1);
        if self.word(0).fetch_add(1, SeqCst) + 1 == self.nodes as u64 {
            self.store(0, 0);
            self.store(1, generation + 1);
        }
        while self.load(1) == generation {
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// This node's part of so many things.
    fn part(&self, count: usize) -> std::ops::Range<usize> {
        count * self.node / self.nodes..count * (self.node + 1) / self.nodes
    }
}

/// Fails when they differ.
fn expect(what: &str, found: u64, expected: u64) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what} is {found:#x}, and {expected:#x} is right")) }
}

impl Program {
    /// Runs this node's part. All nodes end together.
    pub fn run(self, shared: &Shared, size: Option<usize>) -> Result<(), String> {
        shared.barrier();
        let outcome = match self {
            Self::LockCounter => lock_counter(shared, size.unwrap_or(200)),
            Self::FalseSharing => false_sharing(shared, size.unwrap_or(2000)),
            Self::PageRank => pagerank(shared, size.unwrap_or(4000)),
            Self::Matrix => matrix(shared, size.unwrap_or(96)),
        };
        shared.barrier();
        outcome
    }
}

fn lock_counter(shared: &Shared, rounds: usize) -> Result<(), String> {
    let (lock, counter) = (WORDS, 2 * WORDS);
    for _ in 0..rounds {
        while shared.word(lock).compare_exchange(0, 1, SeqCst, SeqCst).is_err() {
            thread::yield_now();
        }
        shared.store(counter, shared.load(counter) + 1);
        shared.store(lock, 0);
    }
    shared.barrier();
    expect("the counter", shared.load(counter), (rounds * shared.nodes) as u64)
}

fn false_sharing(shared: &Shared, rounds: usize) -> Result<(), String> {
    let own = WORDS + shared.node;
    for _ in 0..rounds {
        shared.store(own, shared.load(own) + 1);
    }
    shared.barrier();
    (0..shared.nodes).try_for_each(|node| expect("a counter", shared.load(WORDS + node), rounds as u64))
}

/// Numbers that look random and are the same everywhere.
fn mix(seed: u64) -> u64 {
    let mut value = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// Edges into each vertex.
const DEGREE: usize = 8;
const ITERATIONS: usize = 10;

/// The next rank of a vertex.
fn rank(vertex: usize, count: usize, last: impl Fn(usize) -> f64) -> f64 {
    let from = |edge| mix((vertex * DEGREE + edge) as u64) as usize % count;
    let sum: f64 = (0..DEGREE).map(|edge| last(from(edge))).sum();
    0.15 / count as f64 + 0.85 * sum / DEGREE as f64
}

fn pagerank(shared: &Shared, count: usize) -> Result<(), String> {
    if count == 0 || count > 200 * WORDS {
        return Err(format!("--size {count}: 1 to {} vertices", 200 * WORDS));
    }
    let start = |half: usize| (1 + half * 200) * WORDS;
    let begin = 1.0 / count as f64;
    shared.part(count).for_each(|vertex| shared.store(start(0) + vertex, begin.to_bits()));
    shared.barrier();
    for iteration in 0..ITERATIONS {
        let (from, to) = (start(iteration % 2), start((iteration + 1) % 2));
        for vertex in shared.part(count) {
            let next = rank(vertex, count, |other| f64::from_bits(shared.load(from + other)));
            shared.store(to + vertex, next.to_bits());
        }
        shared.barrier();
    }
    let mut right = vec![begin; count];
    for _ in 0..ITERATIONS {
        right = (0..count).map(|vertex| rank(vertex, count, |other| right[other])).collect();
    }
    let found = |vertex: usize| shared.load(start(ITERATIONS % 2) + vertex);
    (0..count).try_for_each(|vertex| expect("a rank", found(vertex), right[vertex].to_bits()))
}

fn matrix(shared: &Shared, side: usize) -> Result<(), String> {
    if side == 0 || side * side > 300 * WORDS {
        return Err(format!("--size {side}: the matrices would not fit"));
    }
    let cell = |matrix: usize, row: usize, column: usize| (1 + matrix * 300) * WORDS + row * side + column;
    let value = |matrix: usize, row: usize, column: usize| mix(cell(matrix, row, column) as u64);
    for row in shared.part(side) {
        for column in 0..side {
            (0..2).for_each(|matrix| shared.store(cell(matrix, row, column), value(matrix, row, column)));
        }
    }
    shared.barrier();
    let product = |row: usize, column: usize, at: &dyn Fn(usize, usize, usize) -> u64| {
        (0..side).fold(0_u64, |sum, k| sum.wrapping_add(at(0, row, k).wrapping_mul(at(1, k, column))))
    };
    for row in shared.part(side) {
        for column in 0..side {
            let sum = product(row, column, &|matrix, row, column| shared.load(cell(matrix, row, column)));
            shared.store(cell(2, row, column), sum);
        }
    }
    shared.barrier();
    (0..side * side).try_for_each(|at| {
        let (row, column) = (at / side, at % side);
        expect("a sum", shared.load(cell(2, row, column)), product(row, column, &value))
    })
}
