//! A node: events in, commands out.
//!
//! | file | part |
//! |---|---|
//! | `fault.rs` | local faults, and what comes back for them |
//! | `owner.rs` | requests of others: forwarded, queued, answered |
//! | `copy.rs` | copies are dropped: invalidations, hold time |
//! | `prefetch.rs` | sequential readers |
//! | `membership.rs` | who is a member: suspicion, agreement, fencing |
//! | `recovery.rs` | who owns what after a node was lost |
//!
//! # How a request finds the owner
//!
//! Each node has a pointer to the owner as far as it knows (`Page::hint`); the first is the manager.
//! A node that forwards a request to write points to the requester from then on, because that one owns the page next.
//! The requester queues what reaches it until it has the page.
//! The pointers are a tree whose root is the last requester, as in the distributed queue of Naimi and Trehel, so a request
//! reaches a root without the manager having to lock the page.
//! Without owner hints every request starts at the manager, so its pointer must be the last requester at any time:
//! then nothing but a request that it forwards changes it.
//! A migratory page changes its owner at a read, which the manager cannot know, so it needs owner hints.

mod copy;
mod fault;
mod membership;
mod owner;
mod prefetch;
mod recovery;

use crate::command::{Command, Event, Frame, Protest};
use crate::managers::Managers;
use crate::options::Options;
use crate::page::{Page, State};
use crate::table::Table;
use membership::Change;
use prefetch::Streams;
use vnuma_abi_dsm_wire::{
    Access, Epoch, Message, NOTICE_LIMIT, NodeId, NodeSet, Notice, PageId, Version, View,
};

/// One node's part of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    own: NodeId,
    /// All nodes that there ever were.
    configured: NodeSet,
    members: NodeSet,
    epoch: Epoch,
    /// Nodes that this one suspects or knows to be suspected.
    suspects: NodeSet,
    /// A membership that is being agreed on.
    change: Option<Box<Change>>,
    stopped: bool,
    managers: Managers,
    options: Options,
    table: Table,
    streams: Streams,
    /// Notices that wait for a flush; one entry per node that has some.
    held_back: Vec<(NodeId, Vec<Notice>)>,
}

impl Node {
    /// A node that starts with the others: all of `members` are there, nobody has touched a page, and the memory of
    /// all nodes is equal. `own` is a member.
    pub fn new(own: NodeId, members: NodeSet, managers: Managers, options: Options) -> Self {
        let table = Table::new(managers.pages());
        let hints = options.owner_hints;
        let (migratory, tell_owners) = (options.migratory && hints, options.tell_owners && hints);
        let options = Options { migratory, tell_owners, ..options };
        Self {
            own,
            configured: members,
            members,
            epoch: Epoch::default(),
            suspects: NodeSet::EMPTY,
            change: None,
            stopped: false,
            managers,
            options,
            table,
            streams: Streams::default(),
            held_back: Vec::new(),
        }
    }

    /// Takes an event and appends what is to be done to `out`, in order. `now` is in nanoseconds of one monotonic clock.
    pub fn step(&mut self, now: u64, event: Event, out: &mut Vec<Command>) {
        if self.stopped {
            return;
        }
        match event {
            Event::Fault { page, write } => self.on_fault(now, page, write, out),
            Event::Receive { from, frame } => self.on_frame(now, from, frame, out),
            Event::Timer { page } => self.on_timer(now, page, out),
            Event::Progress { page } => self.on_progress(now, page, out),
            Event::Suspect { node } => self.on_suspect(node, out),
            Event::Flush => self.flush(out),
        }
    }

    /// Its number.
    pub fn id(&self) -> NodeId {
        self.own
    }

    /// The state of a page here.
    pub fn state(&self, page: PageId) -> State {
        self.table.get(page).map_or(State::Invalid, Page::state)
    }

    /// True if this node owns the page.
    pub fn is_owner(&self, page: PageId) -> bool {
        let untouched = || self.manager(page) == self.own && self.first_manager(page) == self.own;
        self.table.get(page).map_or_else(untouched, |page| page.owner)
    }

    /// The nodes that have a copy of a page besides this one, if it is the owner.
    pub fn copyset(&self, page: PageId) -> NodeSet {
        self.table.get(page).map_or(NodeSet::EMPTY, |page| page.copyset)
    }

    /// The membership in force.
    pub fn view(&self) -> View {
        View { epoch: self.epoch, members: self.members }
    }

    /// True if it is no member any more.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// The content of a page in this node's memory.
    pub fn version(&self, page: PageId) -> Version {
        self.table.get(page).map_or(1, |page| page.version)
    }

    /// True if local threads wait for the page.
    pub fn waits(&self, page: PageId) -> bool {
        self.table.get(page).is_some_and(|page| page.fault != Access::None)
    }

    /// True if other nodes want the page, or its copy dropped. A local fault ends the hold time, and then it may go at once.
    pub fn is_wanted(&self, page: PageId) -> bool {
        let waiting = self.table.get(page).and_then(Page::waiting);
        waiting.is_some_and(|waiting| waiting.deferred.is_some() || !waiting.queue.is_empty())
    }

    /// Frames of the membership that is being agreed on, which are kept until it is in force. If another one is agreed on instead they
    /// are thrown away.
    pub fn early(&self) -> usize {
        self.change.as_ref().map_or(0, |change| change.early.len())
    }

    /// True if notices wait for [`Event::Flush`].
    pub fn needs_flush(&self) -> bool {
        !self.held_back.is_empty()
    }

    /// The pages that this node owns and that were ever written, with their contents' versions, for a cut. None of them can be
    /// written without a new version from then on: pages that can are write-protected first.
    pub fn owned_for_cut(&mut self, out: &mut Vec<Command>) -> Vec<(PageId, Version)> {
        let mut owned = Vec::new();
        for (page, entry) in self.table.iter_mut().filter(|(_, entry)| entry.owner && entry.version > 1) {
            if entry.access == Access::Write {
                entry.access = Access::Read;
                out.push(Command::SetAccess { page, access: Access::Read, twin: false });
            }
            owned.push((page, entry.version));
        }
        owned
    }

    fn on_frame(&mut self, now: u64, from: NodeId, frame: Frame, out: &mut Vec<Command>) {
        if !self.configured.contains(from) || from == self.own {
            return protest(from, Protest::NoMember, out);
        }
        if let Message::Membership(message) = frame.message {
            return self.on_membership(now, from, message, out);
        }
        if !self.members.contains(from) {
            return self.fence(from, out);
        }
        if let Some(change) = &mut self.change {
            if frame.epoch == change.view.epoch && !change.has_room_for(from, &frame) {
                return protest(from, Protest::TooMuch, out);
            }
            return match change.takes(from, self.epoch, frame) {
                // What carries contents still arrives, so that no page is lost on its way.
                Some(Frame { message: Message::Grant(grant), .. })
                    if self.accepts(from, grant.page, grant.to, out) =>
                {
                    self.on_grant(now, from, grant, out);
                }
                _ => {}
            };
        }
        if frame.epoch != self.epoch {
            return;
        }
        match frame.message {
            Message::Notices(notices) => {
                for notice in notices {
                    self.on_notice(now, from, notice, out);
                }
            }
            message => self.on_message(now, from, message, out),
        }
    }

    fn on_notice(&mut self, now: u64, from: NodeId, notice: Notice, out: &mut Vec<Command>) {
        match notice {
            Notice::Invalidate { page, owner } if self.accepts(from, page, owner, out) => {
                self.on_invalidate(now, from, page, owner, out);
            }
            Notice::Invalidated { page } if self.accepts(from, page, from, out) => {
                self.on_invalidated(now, from, page, out);
            }
            _ => {}
        }
    }

    fn on_message(&mut self, now: u64, from: NodeId, message: Message, out: &mut Vec<Command>) {
        match message {
            Message::Request(request) if self.accepts(from, request.page, request.requester, out) => {
                if request.requester == self.own {
                    return protest(from, Protest::UnexpectedAnswer, out);
                }
                self.on_request(now, from, request, out);
            }
            Message::Grant(grant) if self.accepts(from, grant.page, grant.to, out) => {
                self.on_grant(now, from, grant, out);
            }
            Message::Refuse { page } if self.accepts(from, page, from, out) => {
                self.on_refuse(now, from, page, out)
            }
            Message::OwnerIs { page, owner, version } if self.accepts(from, page, owner, out) => {
                let own = self.own;
                let page = self.page(page);
                if !page.is_root() && version >= page.version && owner != own {
                    page.hint = owner;
                }
            }
            Message::Lost { page } if self.accepts(from, page, from, out) => {
                self.on_lost(now, from, page, out)
            }
            _ => {}
        }
    }

    /// True if the page exists and the node is a member; protests otherwise.
    fn accepts(&self, from: NodeId, page: PageId, names: NodeId, out: &mut Vec<Command>) -> bool {
        if page.0 >= self.table.pages() {
            protest(from, Protest::NoSuchPage, out);
            return false;
        }
        if !self.members.contains(names) {
            protest(from, Protest::NoMember, out);
            return false;
        }
        true
    }

    fn manager(&self, page: PageId) -> NodeId {
        self.managers.manager(page, self.members)
    }

    /// The manager when all nodes were members.
    fn first_manager(&self, page: PageId) -> NodeId {
        self.managers.manager(page, self.configured)
    }

    /// The page, which is in the region.
    fn page(&mut self, page: PageId) -> &mut Page {
        let (own, managers, members, configured) = (self.own, &self.managers, self.members, self.configured);
        self.table.get_mut(page, |page| {
            Page::fresh(own, managers.manager(page, members), managers.manager(page, configured))
        })
    }

    /// Sends a message, after what was held back for the same node.
    fn send(&mut self, to: NodeId, message: Message, out: &mut Vec<Command>) {
        let frame = self.frame(to, message, out);
        out.push(Command::Send { to, frame });
    }

    fn frame(&mut self, to: NodeId, message: Message, out: &mut Vec<Command>) -> Frame {
        debug_assert_ne!(to, self.own, "no message to itself: {message:?}");
        self.flush_to(to, out);
        Frame { epoch: self.epoch, message }
    }

    /// Sends a notice now, or with the next flush.
    fn notify(&mut self, to: NodeId, notice: Notice, out: &mut Vec<Command>) {
        if !self.options.batch_invalidations {
            return self.send(to, Message::Notices(vec![notice]), out);
        }
        match self.held_back.iter_mut().find(|(node, _)| *node == to) {
            Some((_, notices)) => notices.push(notice),
            None => self.held_back.push((to, vec![notice])),
        }
    }

    fn flush_to(&mut self, to: NodeId, out: &mut Vec<Command>) {
        if let Some(index) = self.held_back.iter().position(|(node, _)| *node == to) {
            let (_, notices) = self.held_back.swap_remove(index);
            self.send_notices(to, &notices, out);
        }
    }

    fn flush(&mut self, out: &mut Vec<Command>) {
        for (to, notices) in std::mem::take(&mut self.held_back) {
            self.send_notices(to, &notices, out);
        }
    }

    /// Sends notices, in parts that a message has room for.
    fn send_notices(&self, to: NodeId, notices: &[Notice], out: &mut Vec<Command>) {
        let send = |part: &[Notice]| {
            let frame = Frame { epoch: self.epoch, message: Message::Notices(part.to_vec()) };
            Command::Send { to, frame }
        };
        out.extend(notices.chunks(NOTICE_LIMIT).map(send));
    }
}

fn protest(peer: NodeId, reason: Protest, out: &mut Vec<Command>) {
    out.push(Command::Protest { peer, reason });
}
