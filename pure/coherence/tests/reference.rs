//! Any accesses, in any order of deliveries, with any switches: the nodes' memory is one memory, in which a page is a number that
//! each write raises.

mod common;

use common::{Cluster, check, managers};
use proptest::prelude::*;
use vnuma_coherence::{Event, Options, PageId};

const PAGES: usize = 4;

#[derive(Clone, Copy, Debug)]
enum Op {
    /// A thread of a node uses a page, unless it waits for one.
    Access {
        node: usize,
        page: usize,
        write: bool,
    },
    /// The oldest message of one of the pairs that have some arrives.
    Deliver(usize),
    Flush(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => (0..5_usize, 0..PAGES, any::<bool>()).prop_map(|(node, page, write)| Op::Access { node, page, write }),
        4 => any::<usize>().prop_map(Op::Deliver),
        1 => (0..5_usize).prop_map(Op::Flush),
    ]
}

fn options() -> impl Strategy<Value = Options> {
    any::<[bool; 10]>().prop_map(|on| Options {
        direct_reply: on[0],
        owner_hints: on[1],
        upgrade_without_data: on[2],
        migratory: on[3],
        tell_owners: on[4],
        deltas: on[5],
        prefetch_pages: if on[6] { 2 } else { 0 },
        prefetch_within: 0,
        // It ends when the page was used.
        hold_ns: u64::from(on[7]),
        batch_invalidations: on[8],
        direct_acks: on[9],
    })
}

/// The cluster, what its threads wait for, and the reference: how often each page was written.
struct Run {
    cluster: Cluster,
    waits: Vec<Option<(usize, bool)>>,
    written: Vec<u64>,
}

impl Run {
    fn new(nodes: usize, options: Options) -> Self {
        let cluster = Cluster::new(nodes, &managers(nodes, PAGES as u64), options);
        Self { cluster, waits: vec![None; nodes], written: vec![0; PAGES] }
    }

    fn attempt(&mut self, node: usize, page: usize, write: bool) {
        let id = PageId(page as u64);
        self.cluster.memory[node][page].woken = false;
        if !self.cluster.access(node, page, write) {
            self.waits[node] = Some((page, write));
            self.cluster.event(node, 0, Event::Fault { page: id, write });
            return;
        }
        self.written[page] += u64::from(write);
        if self.waits[node].take().is_some() {
            self.cluster.event(node, 0, Event::Progress { page: id });
        }
    }

    fn apply(&mut self, op: Op) {
        let nodes = self.cluster.count();
        match op {
            Op::Access { node, page, write } if self.waits[node % nodes].is_none() => {
                self.attempt(node % nodes, page, write);
            }
            Op::Access { .. } => {}
            Op::Deliver(index) => {
                let pairs: Vec<_> = self.cluster.deliverable().collect();
                if let Some((from, to)) = pairs.get(index % pairs.len().max(1)) {
                    self.cluster.deliver(*from, *to, 0);
                }
            }
            Op::Flush(node) if self.cluster.nodes[node % nodes].needs_flush() => {
                self.cluster.event(node % nodes, 0, Event::Flush);
            }
            Op::Flush(_) => {}
        }
        self.retry();
    }

    /// Woken threads try again.
    fn retry(&mut self) {
        for node in 0..self.cluster.count() {
            if let Some((page, write)) = self.waits[node]
                && self.cluster.memory[node][page].woken
            {
                self.attempt(node, page, write);
            }
        }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(&self.cluster.wrong, &Vec::<String>::new());
        check(&self.cluster.memory, &self.written, |_| true).map_err(TestCaseError::fail)
    }
}

proptest! {
    #[test]
    fn any_accesses_see_one_memory(
        nodes in 2..=5_usize,
        options in options(),
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        let mut run = Run::new(nodes, options);
        for op in ops {
            run.apply(op);
            run.check()?;
        }
        // All that was begun ends.
        for _ in 0..100 {
            run.cluster.drain(&mut Vec::new());
            run.retry();
            run.check()?;
        }
        prop_assert_eq!(&run.waits, &vec![None; nodes]);
        // Each node finds what was written, on each page.
        for (node, page) in (0..nodes).flat_map(|node| (0..PAGES).map(move |page| (node, page))) {
            run.cluster.settle(node, page, false);
            prop_assert_eq!(run.cluster.memory[node][page].value, run.written[page]);
        }
        run.check()?;
    }
}
