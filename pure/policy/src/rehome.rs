//! A guest node gets another home: its memory goes there, then the new home is published, then its vCPUs follow.
//!
//! ```text
//!   memory ──nothing is left to move──▶ topology ──published──▶ vcpus ──each was moved──▶ done
//!     │ ▲                                   │
//!     │ └─ a move, and a look at what is    │ most of it left again
//!     ├──── not most of it could be moved ──┴──▶ failed
//!     └──── (from each state) an operator ─────▶ stopped
//! ```
//!
//! Where the home of a guest node is follows from where its memory is, before, during and after it. Nothing else is remembered:
//! wherever it ends, what is there can be observed, and a request for the same home or for the one before goes on from there.

use crate::rehome_policy::RehomeWhy;
use std::collections::BTreeSet;
use vnuma_model::{ApicId, GuestNodeId, HostNodeId};

/// After so many moves in a row that have brought nothing to the new home, the rest of the memory on that node stays.
pub const FRUITLESS: u32 = 3;
const PAGE: u64 = 4096;

/// How far it is.
#[derive(Clone, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum RehomePhase {
    /// Memory is moved.
    Memory,
    /// The new homes and distances are published.
    Topology,
    /// vCPUs are moved.
    Vcpus,
    /// It has ended, and what could be done was done.
    Done,
    /// An operator has ended it.
    Stopped,
    /// Most of the memory is not there.
    Failed,
}

impl RehomePhase {
    /// For the API.
    pub fn name(&self) -> &'static str {
        self.into()
    }
}

/// Memory of a guest node that is on one host node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its first address: that of what the guest node booted with, or of a device.
    pub start: u64,
    /// The host node.
    pub node: HostNodeId,
    /// How much, bytes.
    pub bytes: u64,
}

/// What is observed of the guest node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RehomeView {
    /// Resident memory of the guest node.
    pub parts: Vec<Part>,
    /// Its home, as it follows from that.
    pub home: Option<HostNodeId>,
    /// A move of the VM's memory is under way or wanted.
    pub moving: bool,
    /// The guest was told of the homes, or there is no channel to tell it.
    pub published: bool,
    /// vCPUs that the VM has.
    pub vcpus: Vec<ApicId>,
}

/// What is to be done next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RehomeStep {
    /// Nothing: something is under way, or it has ended.
    Wait,
    /// Move this memory of the guest node.
    Memory(Part),
    /// Move these vCPUs.
    Vcpus(Vec<ApicId>),
}

/// A guest node that gets another home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rehome {
    /// The guest node.
    pub guest_node: GuestNodeId,
    /// Its new home.
    pub to: HostNodeId,
    /// Its vCPUs.
    pub vcpus: Vec<ApicId>,
    /// vCPUs that are being moved.
    pub left: BTreeSet<ApicId>,
    phase: RehomePhase,
    /// Why, if no operator wants it.
    pub why: Option<RehomeWhy>,
    /// The last thing that could not be done, and why.
    pub problem: Option<String>,
    /// A move of its memory has ended, and its pages were not looked at since.
    pub unseen: bool,
    /// The last move that has ended: the memory (by its first address), the node that it left, and why it ended early.
    tried: Option<(u64, HostNodeId, Option<String>)>,
}

/// What moves of a re-home have brought so far.
#[derive(Clone, Debug, Default)]
pub struct Efforts {
    /// The most memory that was on the new home, bytes.
    most: Option<u64>,
    /// How many moves in a row have brought nothing there.
    fruitless: u32,
    /// Memory (by its first address) and node: what is left there stays.
    given_up: BTreeSet<(u64, HostNodeId)>,
}

impl Rehome {
    /// A re-home that begins.
    pub fn new(guest_node: GuestNodeId, to: HostNodeId, vcpus: Vec<ApicId>) -> Self {
        Self {
            guest_node,
            to,
            vcpus,
            left: BTreeSet::new(),
            phase: RehomePhase::Memory,
            why: None,
            problem: None,
            unseen: false,
            tried: None,
        }
    }

    /// How far it is.
    pub fn phase(&self) -> &RehomePhase {
        &self.phase
    }

    /// It has not ended.
    pub fn is_active(&self) -> bool {
        matches!(self.phase, RehomePhase::Memory | RehomePhase::Topology | RehomePhase::Vcpus)
    }

    /// Ends it on an operator's request.
    pub fn stop(&mut self) {
        if self.is_active() {
            self.phase = RehomePhase::Stopped;
        }
    }

    /// A move of this memory from this node has ended. Its pages are to be looked at next.
    pub fn memory_ended(&mut self, start: u64, from: HostNodeId, problem: Option<String>) {
        if self.phase == RehomePhase::Memory {
            (self.unseen, self.tried) = (true, Some((start, from, problem)));
        }
    }

    /// Compares what is on the new home with the most so far. The sum counts, not what was moved: others may move pages back.
    fn weigh(&mut self, view: &RehomeView, efforts: &mut Efforts) {
        let its = view.parts.iter().filter(|part| part.node == self.to);
        let there = its.fold(0_u64, |sum, part| sum.saturating_add(part.bytes));
        let grown = there > *efforts.most.get_or_insert(there);
        let Some((start, from, problem)) = self.tried.take() else { return };
        efforts.most = efforts.most.max(Some(there));
        efforts.fruitless = if grown { 0 } else { efforts.fruitless + 1 };
        if efforts.fruitless >= FRUITLESS {
            efforts.given_up.insert((start, from));
            efforts.fruitless = 0;
            let stays = "pages of it are held, or shared with other processes".to_owned();
            self.problem = Some(format!("not all of it leaves node {from}: {}", problem.unwrap_or(stays)));
        }
    }

    /// A vCPU was moved, or could not be.
    pub fn vcpu_ended(&mut self, vcpu: ApicId, outcome: Result<(), String>) {
        if self.left.remove(&vcpu)
            && let Err(problem) = outcome
        {
            self.problem = Some(problem);
        }
    }

    /// What is to be done next.
    pub fn next(&mut self, view: &RehomeView, efforts: &mut Efforts) -> RehomeStep {
        if self.phase == RehomePhase::Memory && !self.unseen && !view.moving {
            self.weigh(view, efforts);
            let may = |part: &&Part| {
                let tried = efforts.given_up.contains(&(part.start, part.node));
                part.node != self.to && part.bytes >= PAGE && !tried
            };
            // The largest part first.
            if let Some(part) = view.parts.iter().filter(may).max_by_key(|part| part.bytes) {
                return RehomeStep::Memory(*part);
            }
            self.phase = RehomePhase::Topology;
        }
        if self.phase == RehomePhase::Topology {
            if view.home != Some(self.to) {
                self.phase = RehomePhase::Failed;
                let few = || format!("most of its memory is not on node {}", self.to);
                self.problem.get_or_insert_with(few);
            } else if view.published {
                self.phase = RehomePhase::Vcpus;
                let present = |vcpu: &&ApicId| view.vcpus.contains(vcpu);
                self.left = self.vcpus.iter().filter(present).copied().collect();
                if !self.left.is_empty() {
                    return RehomeStep::Vcpus(self.left.iter().copied().collect());
                }
            }
        }
        if self.phase == RehomePhase::Vcpus {
            self.left.retain(|vcpu| view.vcpus.contains(vcpu));
            if self.left.is_empty() {
                self.phase = RehomePhase::Done;
            }
        }
        RehomeStep::Wait
    }
}
