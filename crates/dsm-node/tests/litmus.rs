//! Shapes that x86-TSO forbids, with each variable on a page that another node manages and each thread on another node.
//!
//! A run uses words of its own, so that the threads race through a block of runs without waiting for each other.

mod common;

use common::{HANG, Transport, Words, cluster};
use std::{
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Release, SeqCst},
            fence,
        },
    },
    thread,
    time::Instant,
};
use vnuma_dsm::Options;
use vnuma_dsm_node::{Node, Sabotage};

/// What a thread does; registers and variables by number.
#[derive(Clone, Copy)]
enum Op {
    Store(usize, u64),
    Load(usize, usize),
    Fence,
}
use Op::{Fence, Load, Store};

/// A shape: its threads, and whether registers and final values are forbidden.
struct Shape {
    name: &'static str,
    threads: &'static [&'static [Op]],
    forbidden: fn(&[u64; 4], &[u64; 3]) -> bool,
}

const X: usize = 0;
const Y: usize = 1;
const Z: usize = 2;

const SHAPES: &[Shape] = &[
    Shape {
        name: "SB with mfence",
        threads: &[&[Store(X, 1), Fence, Load(Y, 0)], &[Store(Y, 1), Fence, Load(X, 1)]],
        forbidden: |r, _| r[..2] == [0, 0],
    },
    Shape {
        name: "MP",
        threads: &[&[Store(X, 1), Store(Y, 1)], &[Load(Y, 0), Load(X, 1)]],
        forbidden: |r, _| r[..2] == [1, 0],
    },
    Shape {
        name: "LB",
        threads: &[&[Load(X, 0), Store(Y, 1)], &[Load(Y, 1), Store(X, 1)]],
        forbidden: |r, _| r[..2] == [1, 1],
    },
    Shape {
        name: "WRC",
        threads: &[&[Store(X, 1)], &[Load(X, 0), Store(Y, 1)], &[Load(Y, 1), Load(X, 2)]],
        forbidden: |r, _| r[..3] == [1, 1, 0],
    },
    Shape {
        name: "IRIW",
        threads: &[&[Store(X, 1)], &[Store(Y, 1)], &[Load(X, 0), Load(Y, 1)], &[Load(Y, 2), Load(X, 3)]],
        forbidden: |r, _| *r == [1, 0, 1, 0],
    },
    Shape {
        name: "ISA2",
        threads: &[&[Store(X, 1), Store(Y, 1)], &[Load(Y, 0), Store(Z, 1)], &[Load(Z, 1), Load(X, 2)]],
        forbidden: |r, _| r[..3] == [1, 1, 0],
    },
    Shape {
        name: "RWC with mfence",
        threads: &[&[Store(X, 1)], &[Load(X, 0), Load(Y, 1)], &[Store(Y, 1), Fence, Load(X, 2)]],
        forbidden: |r, _| r[..3] == [1, 0, 0],
    },
    Shape {
        name: "CoRR",
        threads: &[&[Store(X, 1)], &[Load(X, 0), Load(X, 1)]],
        forbidden: |r, _| r[..2] == [1, 0],
    },
    Shape {
        name: "CoWW",
        threads: &[&[Store(X, 1), Store(X, 2)], &[Load(X, 0)]],
        forbidden: |_, last| last[X] == 1,
    },
    Shape {
        name: "CoWR",
        threads: &[&[Store(X, 1), Load(X, 0)], &[Load(X, 1), Store(Y, 1)]],
        forbidden: |r, _| r[0] == 0,
    },
    Shape {
        name: "2+2W",
        threads: &[&[Store(X, 1), Store(Y, 2)], &[Store(Y, 1), Store(X, 2)]],
        forbidden: |_, last| last[..2] == [1, 1],
    },
    Shape {
        name: "S",
        threads: &[&[Store(X, 2), Store(Y, 1)], &[Load(Y, 0), Store(X, 1)]],
        forbidden: |r, last| r[0] == 1 && last[X] == 2,
    },
    Shape {
        name: "R with mfence",
        threads: &[&[Store(X, 1), Store(Y, 1)], &[Store(Y, 2), Fence, Load(X, 0)]],
        forbidden: |r, last| last[Y] == 2 && r[0] == 0,
    },
];

const NODES: u8 = 4;
const PAGES: u64 = 64;
/// Each managed by another node.
const PAGE: [u64; 3] = [0, 16, 32];
/// Runs of a block: the words of a page.
const BLOCK: usize = 512;

type Registers = Arc<Vec<[AtomicU64; 4]>>;

fn run_thread(ops: &[Op], words: Words, registers: &Registers) {
    for (run, registers) in registers.iter().enumerate() {
        for op in ops {
            match *op {
                // Plain stores and loads of x86.
                Store(variable, value) => words.at(PAGE[variable], run).store(value, Release),
                Load(variable, to) => {
                    registers[to].store(words.at(PAGE[variable], run).load(Acquire), Release)
                }
                Fence => fence(SeqCst),
            }
        }
    }
}

/// A block of runs of a shape. Returns how many were forbidden.
fn block(shape: &Shape, nodes: &[Node], turn: usize) -> usize {
    let registers: Registers = Arc::new((0..BLOCK).map(|_| Default::default()).collect());
    // A node of its own for each thread, another one in each block.
    let words = |thread: usize| Words::of(&nodes[(thread + turn) % nodes.len()]);
    for page in PAGE {
        (0..BLOCK).for_each(|word| words(3).at(page, word).store(0, SeqCst));
    }
    let start = |(thread, ops): (usize, &&'static [Op])| {
        let (ops, words, registers) = (*ops, words(thread), Arc::clone(&registers));
        thread::spawn(move || run_thread(ops, words, &registers))
    };
    let threads: Vec<_> = shape.threads.iter().enumerate().map(start).collect();
    let begin = Instant::now();
    while !threads.iter().all(thread::JoinHandle::is_finished) {
        assert!(begin.elapsed() < HANG, "{} hangs", shape.name);
        thread::yield_now();
    }
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    let forbidden = |run: &usize| {
        let registers = [0, 1, 2, 3].map(|register: usize| registers[*run][register].load(Acquire));
        let last = PAGE.map(|page| words(0).at(page, *run).load(Acquire));
        (shape.forbidden)(&registers, &last)
    };
    (0..BLOCK).filter(forbidden).count()
}

fn soak_rounds() -> Option<usize> {
    std::env::var("VNUMA_SOAK_ROUNDS").ok()?.parse().ok()
}

#[test]
fn what_x86_forbids_is_not_seen() {
    // 500 rounds are ten million runs.
    let blocks = soak_rounds().map_or(3, |rounds| (rounds * 20_000).div_ceil(SHAPES.len() * BLOCK));
    for options in [Options::default(), Options::ivy()] {
        let Some(nodes) = cluster(NODES, PAGES, Transport::Shm, |config| config.options = options) else {
            return;
        };
        for shape in SHAPES {
            let seen: usize = (0..blocks).map(|turn| block(shape, &nodes, turn)).sum();
            assert_eq!(seen, 0, "{} of {} runs of {}", seen, blocks * BLOCK, shape.name);
        }
        eprintln!(
            "{} shapes, {} runs, none forbidden: {options:?}",
            SHAPES.len(),
            SHAPES.len() * blocks * BLOCK
        );
        nodes.into_iter().for_each(|node| drop(node.stop()));
    }
}

/// The shapes are good for something: they find a node that acknowledges an invalidation before it drops the copy.
#[test]
fn a_copy_that_outlives_its_invalidation_is_found() {
    let change = |config: &mut vnuma_dsm_node::Config| config.sabotage = Sabotage::LateInvalidation;
    let Some(nodes) = cluster(NODES, PAGES, Transport::Shm, change) else { return };
    let begin = Instant::now();
    let mut turn = 0;
    let found = loop {
        if let Some(shape) = SHAPES.iter().find(|shape| block(shape, &nodes, turn) > 0) {
            break shape.name;
        }
        turn += 1;
        assert!(begin.elapsed() < HANG, "it is not found in {turn} turns");
    };
    eprintln!("found by {found} in turn {turn}");
    nodes.into_iter().for_each(|node| drop(node.stop()));
}
