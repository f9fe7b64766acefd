//! The system that is checked: nodes, one thread per node, the network.
//!
//! Each thread makes a number of accesses; page, and whether it reads or writes, are free.
//! Messages of one pair of nodes keep their order; messages of different pairs come in any order.

use crate::common::{Broken, Cluster, check, lost_for_nothing};
use crate::parts::Part;
use stateright::{Model, Property};
use vnuma_coherence::{Event, Managers, NodeId, NodeSet, Options, PageId};

/// What to check.
#[derive(Clone, Debug)]
pub struct System {
    pub nodes: usize,
    /// Manager of each page.
    pub managers: Vec<u8>,
    pub options: Options,
    /// Accesses of each node's thread.
    pub accesses: Vec<u8>,
    /// The hold time may end before the thread made progress.
    pub timers: bool,
    /// How often a thread may lose a page again before it used it. Without a hold time there is no end to that.
    pub losses: u8,
    pub broken: Broken,
    /// Nodes that may be killed, and suspicions of nodes that live.
    pub kills: u8,
    pub false_suspicions: u8,
    /// What must be reached.
    pub parts: Vec<Part>,
}

/// What a thread is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Use {
    pub page: usize,
    pub write: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Thread {
    pub left: u8,
    /// Pages that it lost before it used them.
    pub losses: u8,
    /// It faulted and waits.
    pub waits: Option<Use>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub cluster: Cluster,
    pub threads: Vec<Thread>,
    /// Writes that each page has seen.
    pub writes: Vec<u64>,
    pub kills: u8,
    pub false_suspicions: u8,
    /// Who was told to suspect whom.
    pub suspected: Vec<NodeSet>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A thread begins an access.
    Begin(usize, Use),
    /// A woken thread tries again.
    Retry(usize),
    Deliver(usize, usize),
    Flush(usize),
    Timer(usize, usize),
    Kill(usize),
    Suspect(usize, usize),
    /// An access is taken away late ([`Broken::CopyThenDrop`]).
    DropLate,
}

impl System {
    pub fn managers(&self) -> Managers {
        let ranges: Vec<_> = self.managers.iter().map(|node| (1, NodeId(*node))).collect();
        Managers::new(&ranges).unwrap()
    }

    fn attempt(&self, world: &mut World, node: usize, access: Use) {
        let Use { page, write } = access;
        let id = PageId(page as u64);
        world.cluster.memory[node][page].woken = false;
        if world.cluster.memory[node][page].poisoned {
            world.threads[node].waits = None;
            world.threads[node].left -= 1;
            return;
        }
        if !world.cluster.access(node, page, write) {
            // Who is woken with less than it wants, as a writer by a copy that was fetched ahead, still waits. It has lost nothing.
            let had = world.threads[node].waits.is_some() && !world.cluster.nodes[node].waits(id);
            world.threads[node].losses += u8::from(had);
            world.threads[node].waits = Some(access);
            world.cluster.event(node, 0, Event::Fault { page: id, write });
            return;
        }
        let waited = world.threads[node].waits.take().is_some();
        world.threads[node].left -= 1;
        // A node that the others have given up writes for itself until it learns that.
        if write && world.cluster.counts().contains(NodeId(node as u8)) {
            world.writes[page] += 1;
        }
        if waited && self.options.hold_ns > 0 && self.broken != Broken::StopClock {
            world.cluster.event(node, 0, Event::Progress { page: id });
        }
    }

    pub fn steps(&self, world: &World, actions: &mut Vec<Action>) {
        for (node, thread) in world.threads.iter().enumerate() {
            if !self.runs(world, node) {
                continue;
            }
            self.failures(world, node, actions);
            match thread.waits {
                Some(access) if world.cluster.memory[node][access.page].woken => {
                    actions.push(Action::Retry(node))
                }
                None if thread.left > 0 => {
                    let pages = 0..self.managers.len();
                    let all = pages.flat_map(|page| [false, true].map(|write| Use { page, write }));
                    actions.extend(all.map(|access| Action::Begin(node, access)));
                }
                _ => {}
            }
            if world.cluster.nodes[node].needs_flush() {
                actions.push(Action::Flush(node));
            }
            let cells = world.cluster.memory[node].iter().enumerate();
            actions.extend(
                cells
                    .filter(|(_, cell)| self.timers && cell.timer.is_some())
                    .map(|(page, _)| Action::Timer(node, page)),
            );
        }
        actions.extend(world.cluster.deliverable().map(|(from, to)| Action::Deliver(from, to)));
        if !world.cluster.late.is_empty() {
            actions.push(Action::DropLate);
        }
    }

    fn runs(&self, world: &World, node: usize) -> bool {
        !world.cluster.dead[node] && !world.cluster.nodes[node].is_stopped()
    }

    fn failures(&self, world: &World, node: usize, actions: &mut Vec<Action>) {
        if world.kills < self.kills {
            actions.push(Action::Kill(node));
        }
        for other in (0..self.nodes).filter(|other| *other != node) {
            let known = world.suspected[node].contains(NodeId(other as u8));
            let gone = !self.runs(world, other);
            let allowed = gone || world.false_suspicions < self.false_suspicions;
            if !known && allowed && (self.kills > 0 || self.false_suspicions > 0) {
                actions.push(Action::Suspect(node, other));
            }
        }
    }

    pub fn apply(&self, world: &mut World, action: Action) {
        match action {
            Action::Begin(node, access) => self.attempt(world, node, access),
            Action::Retry(node) => {
                let access = world.threads[node].waits.expect("it waits");
                self.attempt(world, node, access);
            }
            Action::Deliver(from, to) => {
                world.cluster.deliver(from, to, 0);
            }
            Action::Flush(node) => {
                world.cluster.event(node, 0, Event::Flush);
            }
            Action::Timer(node, page) => {
                let at = world.cluster.memory[node][page].timer.take().expect("it is set");
                let at = if self.broken == Broken::StopClock { 0 } else { at };
                world.cluster.event(node, at, Event::Timer { page: PageId(page as u64) });
            }
            Action::Kill(node) => {
                world.kills += 1;
                world.cluster.kill(node);
            }
            Action::Suspect(node, other) => {
                world.false_suspicions += u8::from(self.runs(world, other));
                world.suspected[node].insert(NodeId(other as u8));
                world.cluster.event(node, 0, Event::Suspect { node: NodeId(other as u8) });
            }
            Action::DropLate => {
                let (node, page, access) = world.cluster.late.remove(0);
                world.cluster.memory[node][page].access = access;
            }
        }
        // Only counted by other tests; it would tell equal states apart.
        (world.cluster.sent, world.cluster.sent_data) = (0, 0);
        if !self.timers {
            world.cluster.memory.iter_mut().flatten().for_each(|cell| cell.timer = None);
        }
    }

    /// True of what nobody may count on. That a node which is gone gets suspected is no failure.
    pub fn is_failure(&self, after: &World, action: Action) -> bool {
        match action {
            Action::Kill(_) => true,
            Action::Suspect(_, other) => self.runs(after, other),
            _ => false,
        }
    }

    /// A thread that got a page keeps it until it has used it, if there is a hold time and nobody is lost.
    fn keeps(&self, world: &World) -> bool {
        let held = self.options.hold_ns > 0 && !self.timers && self.kills + self.false_suspicions == 0;
        !held || world.threads.iter().all(|thread| thread.losses == 0)
    }

    fn reached(&self, part: Part, world: &World) -> bool {
        part.is_used(world, &self.managers)
    }

    pub fn done(world: &World) -> bool {
        let ended = |node: usize| world.cluster.dead[node] || world.cluster.nodes[node].is_stopped();
        world.threads.iter().enumerate().all(|(node, thread)| thread.left == 0 || ended(node))
    }

    pub fn start(&self) -> World {
        let mut cluster = Cluster::new(self.nodes, &self.managers(), self.options);
        cluster.broken = self.broken;
        let threads =
            self.accesses.iter().map(|left| Thread { left: *left, losses: 0, waits: None }).collect();
        World {
            cluster,
            threads,
            writes: vec![0; self.managers.len()],
            kills: 0,
            false_suspicions: 0,
            suspected: vec![NodeSet::EMPTY; self.nodes],
        }
    }

    /// Nothing can happen any more, though a thread still waits.
    fn stuck(&self, world: &World) -> bool {
        let mut actions = Vec::new();
        self.steps(world, &mut actions);
        actions.is_empty() && !Self::done(world)
    }

    /// All is done, and some copy of a page that nobody can write any more lacks a write.
    fn lost_update(world: &World) -> bool {
        let quiet = Self::done(world) && world.cluster.deliverable().next().is_none();
        quiet
            && world.writes.iter().enumerate().any(|(page, writes)| {
                let nodes = world.cluster.nodes.iter().zip(&world.cluster.memory);
                let lost = world.cluster.memory.iter().any(|cells| cells[page].poisoned);
                let counts = world.cluster.counts();
                let nodes = nodes.filter(|(node, _)| counts.contains(node.id()));
                let mut owners = nodes.filter(|(node, _)| node.is_owner(PageId(page as u64)));
                !lost
                    && counts.len() == world.threads.len()
                    && !owners.any(|(_, cells)| cells[page].value == *writes)
            })
    }
}

impl Model for System {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![self.start()]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        // Behind a violation there is nothing to learn.
        if world.cluster.wrong.is_empty() {
            self.steps(world, actions);
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut world = world.clone();
        self.apply(&mut world, action);
        Some(world)
    }

    fn within_boundary(&self, world: &World) -> bool {
        world.threads.iter().all(|thread| thread.losses <= self.losses)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("single writer, data value", |_, world: &World| {
                let counts = world.cluster.counts();
                check(&world.cluster.memory, &world.writes, |node| counts.contains(NodeId(node as u8)))
                    .is_ok()
            }),
            Property::always("no protest", |_, world: &World| world.cluster.wrong.is_empty()),
            Property::always("progress", |system: &Self, world| !system.stuck(world)),
            Property::always("who waited keeps it", |system: &Self, world| system.keeps(world)),
            Property::always("no lost update", |_, world| !Self::lost_update(world)),
            Property::always("nothing is lost for nothing", |_, world: &World| {
                lost_for_nothing(&world.cluster).is_none()
            }),
            Property::sometimes("all accesses are made", |_, world| Self::done(world)),
        ];
        properties.extend(self.parts.iter().map(|part| reached(*part)));
        properties
    }
}

/// Of each part a property of its own, because a condition of stateright takes nothing along.
fn reached(part: Part) -> Property<System> {
    let condition: fn(&System, &World) -> bool = match part {
        Part::Direct => |system, world| system.reached(Part::Direct, world),
        Part::Hint => |system, world| system.reached(Part::Hint, world),
        Part::Upgrade => |system, world| system.reached(Part::Upgrade, world),
        Part::Migratory => |system, world| system.reached(Part::Migratory, world),
        Part::Told => |system, world| system.reached(Part::Told, world),
        Part::Delta => |system, world| system.reached(Part::Delta, world),
        Part::Prefetch => |system, world| system.reached(Part::Prefetch, world),
        Part::Refused => |system, world| system.reached(Part::Refused, world),
        Part::Batch => |system, world| system.reached(Part::Batch, world),
        Part::PrefetchInvalidated => |system, world| system.reached(Part::PrefetchInvalidated, world),
        Part::DirectAck => |system, world| system.reached(Part::DirectAck, world),
    };
    Property::sometimes(part.name(), condition)
}
