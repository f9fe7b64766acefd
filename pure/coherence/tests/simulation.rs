//! A seeded simulation: up to 64 nodes, many pages, and faults. One seed gives one run, on any machine.
//!
//! A run starts with faults: slow links, nodes that are killed, partitions, false suspicions. Then all faults end, and
//! every thread of a node that is still a member must finish. The checker looks at the memory after every step.
//! `VNUMA_SOAK_ROUNDS` sets the number of seeds, `VNUMA_DSM_SEED` the first.

mod common;

use common::{Broken, Cluster, check, lost_for_nothing, managers};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use vnuma_coherence::{Command, Event, NodeId, NodeSet, Options, PageId};
use vnuma_random::Rng;

/// What a run is about.
#[derive(Clone, Copy, Debug)]
struct Setup {
    nodes: usize,
    pages: usize,
    /// Accesses of each node.
    accesses: u32,
    options: Options,
    faults: bool,
    broken: Broken,
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    left: u32,
    waits: Option<(usize, bool)>,
    /// The last page, for sequential readers.
    page: usize,
}

struct Simulation {
    setup: Setup,
    rng: Rng,
    now: u64,
    cluster: Cluster,
    threads: Vec<Thread>,
    writes: Vec<u64>,
    /// Pairs that are cut, and how likely a message of a pair is delivered when it is its turn.
    cut: Vec<bool>,
    speed: Vec<u64>,
    /// Who will suspect whom.
    suspicions: Vec<(usize, usize)>,
    lost: u64,
    hash: DefaultHasher,
}

/// What a run has shown.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    hash: u64,
    steps: u64,
    members: usize,
    writes: u64,
    lost: u64,
    messages: u64,
}

impl Simulation {
    fn new(seed: u64, setup: Setup) -> Self {
        let mut cluster =
            Cluster::new(setup.nodes, &managers(setup.nodes, setup.pages as u64), setup.options);
        cluster.broken = setup.broken;
        let mut rng = Rng::new(seed);
        let thread =
            |rng: &mut Rng| Thread { left: setup.accesses, waits: None, page: rng.index(setup.pages) };
        let threads = (0..setup.nodes).map(|_| thread(&mut rng)).collect();
        let speed = (0..setup.nodes * setup.nodes).map(|_| if rng.chance(100) { 50 } else { 1000 }).collect();
        Self {
            setup,
            rng,
            now: 0,
            cluster,
            threads,
            writes: vec![0; setup.pages],
            cut: vec![false; setup.nodes * setup.nodes],
            speed,
            suspicions: Vec::new(),
            lost: 0,
            hash: DefaultHasher::new(),
        }
    }

    fn runs(&self, node: usize) -> bool {
        !self.cluster.dead[node] && !self.cluster.nodes[node].is_stopped()
    }

    fn finished(&self) -> bool {
        (0..self.setup.nodes).all(|node| !self.runs(node) || self.threads[node].left == 0)
    }

    fn event(&mut self, node: usize, event: Event) {
        let commands = self.cluster.event(node, self.now, event);
        self.note(node, &commands);
    }

    fn note(&mut self, node: usize, commands: &[Command]) {
        (node, commands).hash(&mut self.hash);
    }

    fn run(mut self) -> Result<Outcome, String> {
        let most = 4000 + u64::from(self.setup.accesses) * self.setup.nodes as u64 * 200;
        let faults_until = if self.setup.faults { most / 20 } else { 0 };
        for step in 0..most {
            self.now += self.rng.number() % 2000;
            if step < faults_until {
                self.fault(faults_until);
            } else {
                self.heal();
            }
            let idle = !self.act();
            self.check().map_err(|error| format!("step {step}: {error}"))?;
            if idle && step >= faults_until && self.finished() {
                return Ok(self.outcome(step));
            }
        }
        let waits: Vec<_> =
            (0..self.setup.nodes).filter(|node| self.runs(*node) && self.threads[*node].left > 0).collect();
        Err(format!("progress: nodes {waits:?} are not finished after {most} steps"))
    }

    fn outcome(&self, steps: u64) -> Outcome {
        let newest = self.cluster.counts().len();
        let writes = self.writes.iter().sum();
        Outcome {
            hash: self.hash.finish(),
            steps,
            members: newest,
            writes,
            lost: self.lost,
            messages: self.cluster.sent,
        }
    }

    fn check(&self) -> Result<(), String> {
        if let Some(wrong) = self.cluster.wrong.first() {
            return Err(wrong.clone());
        }
        if let Some(lost) = lost_for_nothing(&self.cluster) {
            return Err(lost);
        }
        let counts = self.cluster.counts();
        check(&self.cluster.memory, &self.writes, |node| counts.contains(NodeId(node as u8)))
    }

    /// Now and then something goes wrong.
    fn fault(&mut self, until: u64) {
        let nodes = self.setup.nodes;
        // Two or three times in a run.
        if !self.rng.number().is_multiple_of(until / 3 + 1) {
            return;
        }
        let node = self.rng.index(nodes);
        match self.rng.index(4) {
            0 if self.cluster.dead.iter().filter(|dead| **dead).count() * 4 < nodes => {
                self.cluster.kill(node);
                self.suspicions.extend((0..nodes).map(|other| (other, node)));
            }
            1 => self.suspicions.push((self.rng.index(nodes), node)),
            2 => {
                let side = NodeSet::from_bits(self.rng.number() & self.rng.number());
                for pair in 0..nodes * nodes {
                    let (from, to) = (NodeId((pair / nodes) as u8), NodeId((pair % nodes) as u8));
                    if side.contains(from) != side.contains(to) {
                        self.cut[pair] = true;
                        self.suspicions.push((usize::from(from.0), usize::from(to.0)));
                    }
                }
            }
            _ => {
                let pair = self.rng.index(nodes * nodes);
                self.speed[pair] = 1 + self.rng.number() % 1000;
            }
        }
    }

    /// Links work again. All suspect a node that is gone.
    fn heal(&mut self) {
        self.cut.fill(false);
        self.speed.fill(1000);
        if self.suspicions.is_empty() && self.now.is_multiple_of(64) {
            let members = self.cluster.counts();
            for other in 0..self.setup.nodes {
                if !self.runs(other) {
                    self.suspicions.extend(members.iter().map(|node| (usize::from(node.0), other)));
                }
            }
        }
    }

    /// One thing happens. False if nothing can.
    fn act(&mut self) -> bool {
        if !self.suspicions.is_empty() && self.rng.chance(300) {
            let at = self.rng.index(self.suspicions.len());
            let (node, suspect) = self.suspicions.swap_remove(at);
            if self.runs(node) && node != suspect {
                self.event(node, Event::Suspect { node: NodeId(suspect as u8) });
            }
            return true;
        }
        if self.rng.chance(400) && self.thread() {
            return true;
        }
        self.deliver() || self.flush_or_timer() || self.thread()
    }

    fn deliver(&mut self) -> bool {
        let nodes = self.setup.nodes;
        let ready: Vec<_> =
            self.cluster.deliverable().filter(|(from, to)| !self.cut[from * nodes + to]).collect();
        if ready.is_empty() {
            return false;
        }
        let (from, to) = ready[self.rng.index(ready.len())];
        if self.rng.chance(self.speed[from * nodes + to]) {
            let commands = self.cluster.deliver(from, to, self.now);
            self.note(to, &commands);
        }
        true
    }

    fn flush_or_timer(&mut self) -> bool {
        if let Some((node, page, access)) = self.cluster.late.pop() {
            self.cluster.memory[node][page].access = access;
            return true;
        }
        for node in (0..self.setup.nodes).filter(|node| self.runs(*node)).collect::<Vec<_>>() {
            if self.cluster.nodes[node].needs_flush() {
                self.event(node, Event::Flush);
                return true;
            }
            if let Some(page) =
                (0..self.setup.pages).find(|page| self.cluster.memory[node][*page].timer.is_some())
            {
                let at = self.cluster.memory[node][page].timer.take().unwrap_or(0);
                self.now = self.now.max(at);
                self.event(node, Event::Timer { page: PageId(page as u64) });
                return true;
            }
        }
        false
    }

    /// A thread goes on.
    fn thread(&mut self) -> bool {
        let first = self.rng.index(self.setup.nodes);
        for node in (first..self.setup.nodes).chain(0..first) {
            let Thread { left, waits, page } = self.threads[node];
            let ready = waits.is_none_or(|(page, _)| self.cluster.memory[node][page].woken);
            if left == 0 || !ready || !self.runs(node) {
                continue;
            }
            let (page, write) = waits.unwrap_or_else(|| match self.rng.index(4) {
                0 => ((page + 1) % self.setup.pages, false),
                1 => (page, true),
                _ => (self.rng.index(self.setup.pages), self.rng.chance(400)),
            });
            self.attempt(node, page, write, waits.is_some());
            return true;
        }
        false
    }

    fn attempt(&mut self, node: usize, page: usize, write: bool, waited: bool) {
        self.cluster.memory[node][page].woken = false;
        self.threads[node].page = page;
        self.threads[node].waits = None;
        if self.cluster.memory[node][page].poisoned {
            self.lost += 1;
        } else if !self.cluster.access(node, page, write) {
            self.threads[node].waits = Some((page, write));
            return self.event(node, Event::Fault { page: PageId(page as u64), write });
        } else if write && self.cluster.counts().contains(NodeId(node as u8)) {
            self.writes[page] += 1;
        }
        self.threads[node].left -= 1;
        if waited && self.rng.chance(500) {
            self.event(node, Event::Progress { page: PageId(page as u64) });
        }
    }
}

fn setup(nodes: usize, options: Options, faults: bool) -> Setup {
    Setup { nodes, pages: 12, accesses: 30, options, faults, broken: Broken::No }
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let first = number("VNUMA_DSM_SEED").unwrap_or(1);
    first..first + number("VNUMA_SOAK_ROUNDS").unwrap_or(default)
}

fn run(seed: u64, setup: Setup) -> Outcome {
    let outcome = Simulation::new(seed, setup).run();
    outcome.unwrap_or_else(|error| {
        panic!("VNUMA_DSM_SEED={seed} VNUMA_SOAK_ROUNDS=1 {} nodes: {error}", setup.nodes)
    })
}

fn all(name: &str, nodes: usize, options: Options, faults: bool, count: u64) {
    let outcomes: Vec<_> = seeds(count).map(|seed| run(seed, setup(nodes, options, faults))).collect();
    let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum::<u64>();
    println!(
        "{name}: {} runs of {nodes} nodes: {} steps, {} writes, {} messages, {} members at the end, {} accesses to lost pages",
        outcomes.len(),
        sum(|outcome| outcome.steps),
        sum(|outcome| outcome.writes),
        sum(|outcome| outcome.messages),
        sum(|outcome| outcome.members as u64),
        sum(|outcome| outcome.lost),
    );
}

#[test]
fn nodes_are_coherent_without_faults() {
    for nodes in [2, 5, 16] {
        all("default", nodes, Options::default(), false, 20);
        all("ivy", nodes, Options { hold_ns: 20_000, ..Options::ivy() }, false, 20);
    }
    all("default", 64, Options::default(), false, 2);
}

#[test]
fn nodes_are_coherent_with_faults() {
    for nodes in [3, 5, 16] {
        all("default with faults", nodes, Options::default(), true, 40);
        all("ivy with faults", nodes, Options { hold_ns: 20_000, ..Options::ivy() }, true, 40);
    }
    all("default with faults", 64, Options::default(), true, 2);
}

#[test]
fn a_seed_replays_exactly() {
    for seed in 1..5 {
        let setup = setup(8, Options::default(), true);
        let first = run(seed, setup);
        assert_eq!(first, run(seed, setup));
        assert_ne!(first.hash, run(seed + 100, setup).hash);
    }
}

#[test]
fn faults_that_are_put_in_are_found() {
    for (broken, rule) in [
        (Broken::KeepCopy, "data value|single writer"),
        (Broken::ForgetCopies, "data value|single writer"),
        (Broken::CopyThenDrop, "data value|single writer"),
        (Broken::StaleTwin, "data value"),
        (Broken::LoseGrants, "progress"),
        (Broken::LoseWakes, "progress"),
    ] {
        let setup = Setup { broken, ..setup(5, Options::default(), false) };
        let error = Simulation::new(1, setup).run().expect_err("the fault is found");
        assert!(rule.split('|').any(|rule| error.contains(rule)), "{broken:?}: {error}");
        println!("{broken:?}: {error}");
    }
    // In most runs no node is lost.
    let lose = Setup { broken: Broken::LoseAll, ..setup(5, Options::default(), true) };
    let errors: Vec<_> = (1..20).filter_map(|seed| Simulation::new(seed, lose).run().err()).collect();
    println!("{:?}: {errors:?}", lose.broken);
    assert!(!errors.is_empty() && errors.iter().all(|error| error.contains("lost for nothing")));
}
