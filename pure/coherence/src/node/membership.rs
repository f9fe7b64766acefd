//! Who is a member: suspicion, agreement, fencing.
//!
//! ```text
//!             suspected, or a peer's Accept
//!   in force ──────────────────────────────▶ round 1 ── Accept 1 of all ──▶ round 2 ── Accept 2 of all ──┐
//!      ▲                                                                                                 ▼
//!      └────────── Directory of all ────────── directory ◀──────────── Holdings of all ────────── holdings
//! ```
//!
//! A view is in force only if all of its members have accepted it, and they are a majority of the configured nodes.
//! A node accepts only what is newer than, and within, what it accepted before.
//! So two views that were in force have a member in common, and the later is within the earlier: there is one history.
//! The majority goes on. A node that reaches no majority stops itself, and so does one that learns of a view without it.
//!
//! From round 1 on a node makes no new message of its epoch, and takes only contents that were on their way.
//! A channel keeps its order, so after round 1 each relay has all that it must pass on, and after round 2 all contents
//! have arrived.

use super::{Node, protest};
use crate::command::{Command, Frame, Protest, StopReason};
use std::collections::BTreeMap;
use vnuma_abi_dsm_wire::{Epoch, Membership, Message, NodeId, NodeSet, PageId, View};

/// How far a change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Phase {
    Round1,
    Round2,
    Holdings,
    Directory,
}

/// A membership that is being agreed on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Change {
    pub view: View,
    pub phase: Phase,
    /// Who has sent all of each phase.
    pub came: [NodeSet; 4],
    /// Who has which page, of those that this node will manage: owner and holders.
    pub holders: BTreeMap<PageId, (Option<NodeId>, NodeSet)>,
    /// What this node will own.
    pub owned: BTreeMap<PageId, NodeSet>,
    /// Frames of the next epoch that came early.
    pub early: Vec<(NodeId, Frame)>,
    /// Their messages and notices, by sender.
    pub early_of: BTreeMap<NodeId, usize>,
}

/// What one member can have sent in an epoch before all others are in it: requests of its threads, and invalidations of what it owns.
const EARLY: usize = 1 << 16;

impl Change {
    fn new(view: View) -> Self {
        Self {
            view,
            phase: Phase::Round1,
            came: [NodeSet::EMPTY; 4],
            holders: BTreeMap::new(),
            owned: BTreeMap::new(),
            early: Vec::new(),
            early_of: BTreeMap::new(),
        }
    }

    /// Counts a frame of the next epoch. False if its sender has sent too much.
    pub fn has_room_for(&mut self, from: NodeId, frame: &Frame) -> bool {
        let messages = match &frame.message {
            Message::Notices(notices) => notices.len(),
            _ => 1,
        };
        let count = self.early_of.entry(from).or_insert(0);
        *count += messages;
        *count <= EARLY
    }

    /// Keeps a frame of the next epoch, and gives one of the present epoch back if its sender may still send such.
    pub fn takes(&mut self, from: NodeId, epoch: Epoch, frame: Frame) -> Option<Frame> {
        if !self.view.members.contains(from) {
            return None;
        }
        if frame.epoch == self.view.epoch {
            self.early.push((from, frame));
            return None;
        }
        (frame.epoch == epoch && self.phase < Phase::Holdings).then_some(frame)
    }
}

impl Node {
    pub(super) fn on_suspect(&mut self, node: NodeId, out: &mut Vec<Command>) {
        let view = self.accepted();
        if node == self.own || !view.members.contains(node) {
            return;
        }
        self.suspects.insert(node);
        let left = view.members.minus(self.suspects);
        if !self.is_majority(left) {
            return self.stop(StopReason::Minority, out);
        }
        match left.iter().next() {
            Some(lowest) if lowest == self.own => self.propose(view.epoch, left, out),
            Some(lowest) => {
                for node in self.suspects.and(view.members).iter() {
                    self.tell(lowest, Membership::Suspect { node }, out);
                }
            }
            None => {}
        }
    }

    /// The view that was accepted last.
    fn accepted(&self) -> View {
        self.change.as_ref().map_or(self.view(), |change| change.view)
    }

    fn is_majority(&self, nodes: NodeSet) -> bool {
        nodes.len() * 2 > self.configured.len()
    }

    /// Proposes these members, with a number above that of the newest view that it has seen.
    fn propose(&mut self, newest: Epoch, members: NodeSet, out: &mut Vec<Command>) {
        // Unique to the proposer.
        let limit = NodeId::LIMIT as u64;
        let round = newest.0 / limit + 1;
        self.accept(View { epoch: Epoch(round * limit + u64::from(self.own.0)), members }, out);
    }

    fn accept(&mut self, view: View, out: &mut Vec<Command>) {
        let mut change = Change::new(view);
        change.came[0].insert(self.own);
        self.change = Some(Box::new(change));
        self.held_back.clear();
        self.tell_all(&Membership::Accept { view, round: 1 }, out);
    }

    fn tell(&mut self, to: NodeId, message: Membership, out: &mut Vec<Command>) {
        self.send(to, Message::Membership(message), out);
    }

    pub(super) fn tell_all(&mut self, message: &Membership, out: &mut Vec<Command>) {
        for node in self.accepted().members.without(self.own).iter() {
            self.tell(node, message.clone(), out);
        }
    }

    fn stop(&mut self, reason: StopReason, out: &mut Vec<Command>) {
        self.stopped = true;
        out.push(Command::Stop { reason });
    }

    /// Tells a node that is no member.
    pub(super) fn fence(&mut self, node: NodeId, out: &mut Vec<Command>) {
        let view = self.view();
        self.tell(node, Membership::Fenced { view }, out);
    }

    pub(super) fn on_membership(
        &mut self,
        now: u64,
        from: NodeId,
        message: Membership,
        out: &mut Vec<Command>,
    ) {
        if let Membership::Fenced { view } = message {
            // A node that is none any more has no newer membership.
            if self.members.contains(from) && view.epoch > self.epoch && !view.members.contains(self.own) {
                self.stop(StopReason::Fenced, out);
            }
            return;
        }
        if !self.members.contains(from) {
            return self.fence(from, out);
        }
        if let Membership::Accept { view, .. } | Membership::Conflict { view } = &message
            && !view.epoch.may_follow(self.accepted().epoch)
        {
            return protest(from, Protest::FarEpoch, out);
        }
        match message {
            // What an excluded node suspects does not count.
            Membership::Suspect { node } if self.accepted().members.contains(from) => {
                self.on_suspect(node, out)
            }
            Membership::Accept { view, round } => self.on_accept(from, view, round, out),
            Membership::Conflict { view } => self.on_conflict(view, out),
            Membership::Holdings { epoch, pages, last } if self.agrees_with(from, epoch) => {
                if !self.on_holdings(from, &pages, last) {
                    protest(from, Protest::UnexpectedPage, out);
                }
            }
            Membership::Directory { epoch, pages, last } if self.agrees_with(from, epoch) => {
                if !self.on_directory(from, &pages, last) {
                    protest(from, Protest::UnexpectedPage, out);
                }
            }
            Membership::Holdings { .. } | Membership::Directory { .. } => {}
            Membership::Suspect { .. } | Membership::Fenced { .. } => {}
        }
        self.go_on(now, out);
    }

    /// True if this is about the change that is under way, from one who will be a member.
    fn agrees_with(&self, from: NodeId, epoch: Epoch) -> bool {
        self.change
            .as_ref()
            .is_some_and(|change| change.view.epoch == epoch && change.view.members.contains(from))
    }

    fn on_accept(&mut self, from: NodeId, view: View, round: u8, out: &mut Vec<Command>) {
        let accepted = self.accepted();
        if view.epoch > accepted.epoch {
            let within = view.members.is_subset(accepted.members) && view.members.contains(self.own);
            if !within || !self.is_majority(view.members) {
                return self.tell(from, Membership::Conflict { view: accepted }, out);
            }
            self.accept(view, out);
        }
        if let Some(change) = self.change.as_mut().filter(|change| change.view == view) {
            change.came[usize::from(round != 1)].insert(from);
        }
    }

    /// Another node has accepted what contradicts the view that this one has accepted. What both contain may win.
    fn on_conflict(&mut self, other: View, out: &mut Vec<Command>) {
        let accepted = self.accepted();
        if self.change.is_none()
            || other.members.bits() == accepted.members.bits() && other.epoch <= accepted.epoch
        {
            return;
        }
        let both = accepted.members.and(other.members);
        if !both.contains(self.own) {
            return self.stop(StopReason::Fenced, out);
        }
        if !self.is_majority(both) {
            return self.stop(StopReason::Minority, out);
        }
        if both != accepted.members || other.epoch > accepted.epoch {
            self.propose(accepted.epoch.max(other.epoch), both, out);
        }
    }

    /// Goes through the phases that are complete.
    fn go_on(&mut self, now: u64, out: &mut Vec<Command>) {
        while let Some(change) = self.change.as_mut() {
            let (own, view, phase) = (self.own, change.view, change.phase);
            if !view.members.is_subset(change.came[phase as usize]) {
                return;
            }
            match phase {
                Phase::Round1 => {
                    change.phase = Phase::Round2;
                    change.came[1].insert(own);
                    self.tell_all(&Membership::Accept { view, round: 2 }, out);
                }
                Phase::Round2 => {
                    change.phase = Phase::Holdings;
                    self.report(view, out);
                }
                Phase::Holdings => {
                    change.phase = Phase::Directory;
                    self.direct(view, out);
                }
                Phase::Directory => self.install(now, view, out),
            }
        }
    }
}
