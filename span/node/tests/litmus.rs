//! Shapes that x86-TSO forbids, with each variable on a page that another node manages and each thread on another node.
//!
//! A run uses words of its own. The threads meet before it, and each goes through it on another node than the one before, so that it
//! has to fetch pages that the others fetch as well: most runs are races, and how many were is counted.

mod common;

use common::{HANG, Transport, Words, cluster, until};
use std::{
    collections::BTreeMap,
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
use vnuma_coherence::Options;
use vnuma_dsm_node::{Node, Sabotage};

/// What a thread does; registers and variables by number. A locked instruction takes the old value into a register.
#[derive(Clone, Copy)]
enum Op {
    Store(usize, u64),
    Load(usize, usize),
    Swap(usize, u64, usize),
    Fence,
}
use Op::{Fence, Load, Store, Swap};

/// Registers of a run. The last one is not looked at.
const REGISTERS: usize = 6;
type Values = [u64; REGISTERS];

/// A shape: its threads, and whether registers and final values are forbidden.
struct Shape {
    name: &'static str,
    threads: &'static [&'static [Op]],
    forbidden: fn(&Values, &[u64; 3]) -> bool,
}

const X: usize = 0;
const Y: usize = 1;
const Z: usize = 2;

/// The cycles of up to three variables and four threads that x86-TSO forbids, by their names in the literature (Alglave, Maranget),
/// and those of Intel's and AMD's manuals with locked instructions.
const SHAPES: &[Shape] = &[
    Shape {
        name: "SB with mfence",
        threads: &[&[Store(X, 1), Fence, Load(Y, 0)], &[Store(Y, 1), Fence, Load(X, 1)]],
        forbidden: |r, _| r[..2] == [0, 0],
    },
    Shape {
        name: "SB with xchg",
        threads: &[&[Swap(X, 1, 5), Load(Y, 0)], &[Swap(Y, 1, 5), Load(X, 1)]],
        forbidden: |r, _| r[..2] == [0, 0],
    },
    Shape {
        name: "3.SB with mfence",
        threads: &[
            &[Store(X, 1), Fence, Load(Y, 0)],
            &[Store(Y, 1), Fence, Load(Z, 1)],
            &[Store(Z, 1), Fence, Load(X, 2)],
        ],
        forbidden: |r, _| r[..3] == [0, 0, 0],
    },
    Shape {
        name: "MP",
        threads: &[&[Store(X, 1), Store(Y, 1)], &[Load(Y, 0), Load(X, 1)]],
        forbidden: |r, _| r[..2] == [1, 0],
    },
    Shape {
        name: "MP with xchg",
        threads: &[&[Swap(X, 1, 5), Store(Y, 1)], &[Load(Y, 0), Load(X, 1)]],
        forbidden: |r, _| r[..2] == [1, 0],
    },
    Shape {
        name: "MP into xchg",
        threads: &[&[Store(X, 1), Swap(Y, 1, 5)], &[Swap(Y, 2, 0), Load(X, 1)]],
        forbidden: |r, _| r[..2] == [1, 0],
    },
    Shape {
        name: "LB",
        threads: &[&[Load(X, 0), Store(Y, 1)], &[Load(Y, 1), Store(X, 1)]],
        forbidden: |r, _| r[..2] == [1, 1],
    },
    Shape {
        name: "LB with xchg",
        threads: &[&[Load(X, 0), Swap(Y, 1, 5)], &[Load(Y, 1), Swap(X, 1, 5)]],
        forbidden: |r, _| r[..2] == [1, 1],
    },
    Shape {
        name: "3.LB",
        threads: &[&[Load(X, 0), Store(Y, 1)], &[Load(Y, 1), Store(Z, 1)], &[Load(Z, 2), Store(X, 1)]],
        forbidden: |r, _| r[..3] == [1, 1, 1],
    },
    Shape {
        name: "WRC",
        threads: &[&[Store(X, 1)], &[Load(X, 0), Store(Y, 1)], &[Load(Y, 1), Load(X, 2)]],
        forbidden: |r, _| r[..3] == [1, 1, 0],
    },
    Shape {
        name: "WWC",
        threads: &[&[Store(X, 2)], &[Load(X, 0), Store(Y, 1)], &[Load(Y, 1), Store(X, 1)]],
        forbidden: |r, last| r[..2] == [2, 1] && last[X] == 2,
    },
    Shape {
        name: "IRIW",
        threads: &[&[Store(X, 1)], &[Store(Y, 1)], &[Load(X, 0), Load(Y, 1)], &[Load(Y, 2), Load(X, 3)]],
        forbidden: |r, _| r[..4] == [1, 0, 1, 0],
    },
    Shape {
        name: "IRIW with xchg",
        threads: &[&[Swap(X, 1, 5)], &[Swap(Y, 1, 5)], &[Load(X, 0), Load(Y, 1)], &[Load(Y, 2), Load(X, 3)]],
        forbidden: |r, _| r[..4] == [1, 0, 1, 0],
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
        name: "RWC with xchg",
        threads: &[&[Store(X, 1)], &[Load(X, 0), Load(Y, 1)], &[Swap(Y, 1, 5), Load(X, 2)]],
        forbidden: |r, _| r[..3] == [1, 0, 0],
    },
    Shape {
        name: "W+RWC with mfence",
        threads: &[&[Store(X, 1), Store(Y, 1)], &[Load(Y, 0), Load(Z, 1)], &[Store(Z, 1), Fence, Load(X, 2)]],
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
        threads: &[&[Store(X, 1), Load(X, 0)], &[Store(X, 2)]],
        forbidden: |r, last| r[0] == 0 || (r[0] == 2 && last[X] == 1),
    },
    Shape {
        name: "CoRW1",
        threads: &[&[Load(X, 0), Store(X, 1)], &[Load(X, 1)]],
        forbidden: |r, _| r[0] == 1,
    },
    Shape {
        name: "CoRW2",
        threads: &[&[Load(X, 0), Store(X, 1)], &[Store(X, 2)]],
        forbidden: |r, last| r[0] == 2 && last[X] == 2,
    },
    Shape {
        name: "2+2W",
        threads: &[&[Store(X, 1), Store(Y, 2)], &[Store(Y, 1), Store(X, 2)]],
        forbidden: |_, last| last[..2] == [1, 1],
    },
    Shape {
        name: "3.2W",
        threads: &[&[Store(X, 2), Store(Y, 1)], &[Store(Y, 2), Store(Z, 1)], &[Store(Z, 2), Store(X, 1)]],
        forbidden: |_, last| *last == [2, 2, 2],
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
    Shape {
        name: "R with xchg",
        threads: &[&[Store(X, 1), Store(Y, 1)], &[Swap(Y, 2, 5), Load(X, 0)]],
        forbidden: |r, last| last[Y] == 2 && r[0] == 0,
    },
    Shape {
        name: "Z6.0 with mfence",
        threads: &[
            &[Store(X, 1), Store(Y, 1)],
            &[Load(Y, 0), Store(Z, 1)],
            &[Store(Z, 2), Fence, Load(X, 1)],
        ],
        forbidden: |r, last| r[..2] == [1, 0] && last[Z] == 2,
    },
    Shape {
        name: "Z6.1",
        threads: &[&[Store(X, 2), Store(Y, 1)], &[Store(Y, 2), Store(Z, 1)], &[Load(Z, 0), Store(X, 1)]],
        forbidden: |r, last| last[..2] == [2, 2] && r[0] == 1,
    },
    Shape {
        name: "Z6.2",
        threads: &[&[Store(X, 2), Store(Y, 1)], &[Load(Y, 0), Store(Z, 1)], &[Load(Z, 1), Store(X, 1)]],
        forbidden: |r, last| r[..2] == [1, 1] && last[X] == 2,
    },
    Shape {
        name: "Z6.3",
        threads: &[&[Store(X, 1), Store(Y, 1)], &[Store(Y, 2), Store(Z, 1)], &[Load(Z, 0), Load(X, 1)]],
        forbidden: |r, last| r[..2] == [1, 0] && last[Y] == 2,
    },
    Shape {
        name: "Z6.4 with mfence",
        threads: &[
            &[Store(X, 1), Store(Y, 1)],
            &[Store(Y, 2), Fence, Load(Z, 0)],
            &[Store(Z, 1), Fence, Load(X, 1)],
        ],
        forbidden: |r, last| r[..2] == [0, 0] && last[Y] == 2,
    },
    Shape {
        name: "Z6.5 with mfence",
        threads: &[
            &[Store(X, 2), Store(Y, 1)],
            &[Store(Y, 2), Fence, Load(Z, 0)],
            &[Store(Z, 1), Store(X, 1)],
        ],
        forbidden: |r, last| r[0] == 0 && last[..2] == [2, 2],
    },
    Shape {
        name: "WRR+2W",
        threads: &[&[Store(X, 2)], &[Load(X, 0), Load(Y, 1)], &[Store(Y, 1), Store(X, 1)]],
        forbidden: |r, last| r[..2] == [2, 0] && last[X] == 2,
    },
    Shape {
        name: "WRW+2W",
        threads: &[&[Store(X, 2)], &[Load(X, 0), Store(Y, 1)], &[Store(Y, 2), Store(X, 1)]],
        forbidden: |r, last| r[0] == 2 && last[..2] == [2, 2],
    },
    Shape {
        name: "WRW+WR with mfence",
        threads: &[&[Store(X, 1)], &[Load(X, 0), Store(Y, 1)], &[Store(Y, 2), Fence, Load(X, 1)]],
        forbidden: |r, last| r[..2] == [1, 0] && last[Y] == 2,
    },
];

const NODES: u8 = 4;
const PAGES: u64 = 64;
/// Each managed by another node.
const PAGE: [u64; 3] = [0, 16, 32];
/// Runs of a block, each on words of its own.
const BLOCK: usize = 128;
/// One of so many runs is to be a race at least, of a short test. Nine in ten are on a quiet machine, and one in eight was in a long run
/// that got hardly any CPU.
const RACES: usize = 4;

/// What a run leaves.
#[derive(Default)]
struct Run {
    registers: [AtomicU64; REGISTERS],
    /// When each thread began and ended it, in nanoseconds since the begin of the block.
    times: [[AtomicU64; 2]; 4],
}

impl Run {
    /// True if two threads were in this run at the same time.
    fn raced(&self, threads: usize) -> bool {
        let times = |thread: usize| self.times[thread].each_ref().map(|time| time.load(Acquire));
        let pairs = (0..threads).flat_map(|one| (0..one).map(move |other| (one, other)));
        pairs.into_iter().any(|(one, other)| {
            let ([begin, end], [other_begin, other_end]) = (times(one), times(other));
            begin <= other_end && other_begin <= end
        })
    }
}

/// The threads of a block wait for each other here.
#[derive(Default)]
struct Meeting(AtomicU64);

impl Meeting {
    /// Returns when `all` threads are here for the time `turn`, from 1.
    fn wait(&self, all: usize, turn: u64) {
        self.0.fetch_add(1, SeqCst);
        while self.0.load(SeqCst) < all as u64 * turn {
            thread::yield_now();
        }
    }
}

/// What all threads of a block share, outside of the shared memory.
struct Block {
    runs: Vec<Run>,
    meeting: Meeting,
    begin: Instant,
}

fn run_thread(shape: &Shape, thread: usize, nodes: &[Words], block: &Block) {
    let now = || block.begin.elapsed().as_nanos() as u64;
    for (number, run) in block.runs.iter().enumerate() {
        // A thread that has all pages would be through before another one begins.
        let words = nodes[(thread + number) % nodes.len()];
        block.meeting.wait(shape.threads.len(), number as u64 + 1);
        run.times[thread][0].store(now(), Release);
        for op in shape.threads[thread] {
            match *op {
                // Plain stores and loads of x86.
                Store(variable, value) => words.at(PAGE[variable], number).store(value, Release),
                Load(variable, to) => {
                    run.registers[to].store(words.at(PAGE[variable], number).load(Acquire), Release)
                }
                // xchg, which is locked.
                Swap(variable, value, to) => {
                    let before = words.at(PAGE[variable], number).swap(value, SeqCst);
                    run.registers[to].store(before, Release);
                }
                Fence => fence(SeqCst),
            }
        }
        run.times[thread][1].store(now(), Release);
    }
}

/// What runs of a shape have shown.
#[derive(Default)]
struct Seen {
    runs: usize,
    /// Two threads were in the run at the same time.
    raced: usize,
    forbidden: usize,
    /// Different registers and final values, with how often each was seen.
    outcomes: BTreeMap<(Values, [u64; 3]), usize>,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.runs += other.runs;
        self.raced += other.raced;
        self.forbidden += other.forbidden;
        for (outcome, count) in other.outcomes {
            *self.outcomes.entry(outcome).or_default() += count;
        }
    }
}

/// A block of runs of a shape.
fn block(shape: &'static Shape, nodes: &[Node], turn: usize) -> Seen {
    let block = Arc::new(Block {
        runs: (0..BLOCK).map(|_| Run::default()).collect(),
        meeting: Meeting::default(),
        begin: Instant::now(),
    });
    // A node of its own for each thread.
    let words = |thread: usize| Words::of(&nodes[(thread + turn) % nodes.len()]);
    for page in PAGE {
        (0..BLOCK).for_each(|word| words(3).at(page, word).store(0, SeqCst));
    }
    let start = |thread| {
        let (words, block) = ((0..nodes.len()).map(words).collect::<Vec<_>>(), Arc::clone(&block));
        thread::spawn(move || run_thread(shape, thread, &words, &block))
    };
    let threads: Vec<_> = (0..shape.threads.len()).map(start).collect();
    until(&format!("{} hangs", shape.name), || threads.iter().all(thread::JoinHandle::is_finished));
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    let mut seen = Seen { runs: BLOCK, ..Seen::default() };
    for (number, run) in block.runs.iter().enumerate() {
        let registers = run.registers.each_ref().map(|register| register.load(Acquire));
        let last = PAGE.map(|page| words(0).at(page, number).load(Acquire));
        seen.raced += usize::from(run.raced(shape.threads.len()));
        seen.forbidden += usize::from((shape.forbidden)(&registers, &last));
        *seen.outcomes.entry((registers, last)).or_default() += 1;
    }
    seen
}

fn soak_rounds() -> Option<usize> {
    std::env::var("VNUMA_SOAK_ROUNDS").ok()?.parse().ok()
}

/// All shapes, in so many blocks each. Nothing forbidden may be seen, and in a long run each shape must have raced.
fn none_is_seen(transport: Transport, options: Options, blocks: usize) -> Option<Seen> {
    let nodes = cluster(NODES, PAGES, transport, |config| config.options = options)?;
    let mut all = Seen::default();
    for shape in SHAPES {
        let mut seen = Seen::default();
        (0..blocks).for_each(|turn| seen.add(block(shape, &nodes, turn)));
        eprintln!(
            "{}: {} runs, {} of them raced, {} different outcomes",
            shape.name,
            seen.runs,
            seen.raced,
            seen.outcomes.len()
        );
        assert_eq!(seen.forbidden, 0, "{}: {:?}", shape.name, seen.outcomes);
        assert!(blocks < 20 || (seen.raced > 0 && seen.outcomes.len() > 1), "{}: no run raced", shape.name);
        all.add(seen);
    }
    eprintln!(
        "{} shapes, {transport:?}: {} runs, {} of them raced, none forbidden: {options:?}",
        SHAPES.len(),
        all.runs,
        all.raced
    );
    nodes.into_iter().for_each(|node| drop(node.stop()));
    Some(all)
}

#[test]
fn what_x86_forbids_is_not_seen() {
    // 500 rounds are ten million runs, half of them by each protocol.
    let blocks = soak_rounds().map_or(1, |rounds| (rounds * 10_000).div_ceil(SHAPES.len() * BLOCK));
    let mut all = Seen::default();
    for options in [Options::default(), Options::ivy()] {
        let Some(seen) = none_is_seen(Transport::Shm, options, blocks) else { return };
        all.add(seen);
        // By another transport some more.
        none_is_seen(Transport::Tcp, options, blocks.div_ceil(10)).into_iter().for_each(|seen| all.add(seen));
    }
    eprintln!("{} runs, {} of them raced, {} forbidden", all.runs, all.raced, all.forbidden);
    // On one CPU threads run by turns, and few runs race.
    let by_turns = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1);
    let enough = by_turns || soak_rounds().is_some() || all.raced * RACES >= all.runs;
    assert!(enough, "{} of {} runs raced", all.raced, all.runs);
}

/// The shapes are good for something: they find a node that acknowledges an invalidation before it drops the copy, and one that
/// does not send it.
#[test]
fn a_copy_that_outlives_its_invalidation_is_found() {
    for sabotage in [Sabotage::LateInvalidation, Sabotage::SkipInvalidation] {
        let change = |config: &mut vnuma_dsm_node::Config| config.sabotage(sabotage);
        let Some(nodes) = cluster(NODES, PAGES, Transport::Shm, change) else { return };
        let begin = Instant::now();
        let mut turn = 0;
        let found = loop {
            if let Some(shape) = SHAPES.iter().find(|shape| block(shape, &nodes, turn).forbidden > 0) {
                break shape.name;
            }
            turn += 1;
            assert!(begin.elapsed() < HANG, "{sabotage:?} is not found in {turn} turns");
        };
        eprintln!("{sabotage:?} is found by {found} in turn {turn}");
        nodes.into_iter().for_each(|node| drop(node.stop()));
    }
}

/// The conditions are right: nothing is forbidden that steps lead to which come one after the other, each thread's in its order.
/// And they say something: without the order of each thread's steps, what is forbidden happens.
#[test]
fn only_what_a_reordering_leads_to_is_forbidden() {
    for shape in SHAPES {
        let forbidden = |order: &Vec<Step>| {
            let (registers, last) = in_order(shape, order);
            (shape.forbidden)(&registers, &last)
        };
        let found = orders(shape, true).into_iter().find(forbidden);
        assert_eq!(found, None, "{}", shape.name);
        assert!(orders(shape, false).iter().any(forbidden), "{}: nothing leads to it", shape.name);
    }
}

/// A thread, and which of its operations.
type Step = (usize, usize);

/// All orders of the steps of all threads; fences are none.
fn orders(shape: &Shape, in_program_order: bool) -> Vec<Vec<Step>> {
    let of_thread = |(thread, ops): (usize, &&'static [Op])| {
        let steps = ops.iter().enumerate().filter(|(_, op)| !matches!(op, Fence));
        steps.map(move |(step, _)| (thread, step)).collect::<Vec<Step>>()
    };
    let steps: Vec<Step> = shape.threads.iter().enumerate().flat_map(of_thread).collect();
    let mut orders = vec![Vec::new()];
    for _ in &steps {
        let longer = |order: Vec<Step>| {
            let may_come = |next: &Step| {
                let before = |step: &Step| step.0 == next.0 && step.1 < next.1 && !order.contains(step);
                let too_early = in_program_order && steps.iter().any(before);
                !order.contains(next) && !too_early
            };
            let next = steps.iter().copied().filter(may_come);
            next.map(|step| [&order[..], &[step]].concat()).collect::<Vec<_>>()
        };
        orders = orders.into_iter().flat_map(longer).collect();
    }
    orders
}

/// Registers and final values when the steps come in this order.
fn in_order(shape: &Shape, order: &[Step]) -> (Values, [u64; 3]) {
    let (mut registers, mut memory) = (Values::default(), [0; 3]);
    for (thread, step) in order {
        match shape.threads[*thread][*step] {
            Store(variable, value) => memory[variable] = value,
            Load(variable, to) => registers[to] = memory[variable],
            Swap(variable, value, to) => registers[to] = std::mem::replace(&mut memory[variable], value),
            Fence => {}
        }
    }
    (registers, memory)
}
