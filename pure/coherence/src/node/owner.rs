//! Requests of others: forwarded, queued, answered.

use super::{Node, protest};
use crate::command::{Command, Protest};
use crate::page::{MIGRATORY, Page, Then};
use vnuma_abi_dsm_wire::{
    Access, Grant, MIGRATORY_MOST, Message, NodeId, NodeSet, PageId, Payload, Purpose, Request, Version,
};

/// A migratory page is handed over write-protected whenever its version is a multiple of this.
/// An owner that did not write it until the next request shows that the page does not migrate any more.
const PROBE_VERSIONS: Version = 4;

/// What becomes of a request.
enum Turn {
    /// Answered, refused or forwarded now.
    Now,
    /// Behind others, or until the page comes.
    Wait,
    /// Until the hold time ends.
    Hold,
}

impl Node {
    pub(super) fn on_request(&mut self, now: u64, from: NodeId, request: Request, out: &mut Vec<Command>) {
        let page = request.page;
        let requester = request.requester;
        let queue = self.page(page).waiting().map(|waiting| &waiting.queue);
        let idle = queue.is_none_or(|queue| queue.is_empty());
        if queue.is_some_and(|queue| queue.iter().any(|other| other.requester == requester)) {
            // Who only forwards it cannot know. Either way it does not wait, so that nobody fills the queue.
            if from == requester {
                protest(from, Protest::UnexpectedRequest, out);
            }
            return;
        }
        match self.turn(now, page) {
            Turn::Now if idle => self.on_ready(page, request, out),
            // Nobody waits for a prefetch, so it does not wait either.
            _ if request.purpose == Purpose::Prefetch => {
                self.send(request.requester, Message::Refuse { page }, out)
            }
            _ => self.page(page).waiting_mut().queue.push_back(request),
        }
        self.advance(now, page, out);
    }

    fn turn(&mut self, now: u64, page: PageId) -> Turn {
        let migratory = self.options.migratory;
        let entry = self.page(page);
        if entry.poisoned {
            return Turn::Now;
        }
        if entry.owner {
            return match entry.invalidating() {
                Some(_) => Turn::Wait,
                None if now < entry.hold_until => Turn::Hold,
                None => Turn::Now,
            };
        }
        // The next owner keeps what reaches it. A reader may become the owner of a migratory page; if it forwarded
        // requests before it knows, they would go round in a circle.
        match entry.wanted {
            Some(Purpose::Write) => Turn::Wait,
            Some(_) if migratory => Turn::Wait,
            _ => Turn::Now,
        }
    }

    /// The next request whose turn it is. Sets the timer if it is the hold time that it waits for.
    pub(super) fn next_ready(&mut self, now: u64, page: PageId, out: &mut Vec<Command>) -> Option<Request> {
        if self.page(page).waiting()?.queue.is_empty() {
            return None;
        }
        match self.turn(now, page) {
            Turn::Now => self.page(page).next_request(),
            Turn::Wait => None,
            Turn::Hold => {
                self.set_timer(page, out);
                None
            }
        }
    }

    pub(super) fn set_timer(&mut self, page: PageId, out: &mut Vec<Command>) {
        let entry = self.page(page);
        let at_ns = entry.hold_until;
        if !std::mem::replace(&mut entry.waiting_mut().timer, true) {
            out.push(Command::SetTimer { page, at_ns });
        }
    }

    /// Answers a request, or forwards it to the owner as far as this node knows.
    pub(super) fn on_ready(&mut self, page: PageId, request: Request, out: &mut Vec<Command>) {
        let entry = self.page(page);
        if entry.poisoned {
            return self.send(request.requester, Message::Lost { page }, out);
        }
        if entry.owner {
            return match request.purpose {
                Purpose::Read if self.migrates(page) => self.transfer(page, request, NodeSet::EMPTY, out),
                Purpose::Read | Purpose::Prefetch => self.share(page, request, out),
                Purpose::Write => self.give(page, request, out),
            };
        }
        let to = entry.hint;
        if request.purpose == Purpose::Write {
            entry.hint = request.requester;
        }
        self.send(to, Message::Request(request), out);
    }

    /// True if a reader gets the page for itself. An owner that has not written what it got ends that.
    fn migrates(&mut self, page: PageId) -> bool {
        let enabled = self.options.migratory;
        let entry = self.page(page);
        if !enabled || entry.migratory < MIGRATORY || !entry.copyset.is_empty() {
            return false;
        }
        if entry.access != Access::Write {
            entry.migratory = 0;
            return false;
        }
        true
    }

    /// A reader gets a copy and enters the copyset.
    fn share(&mut self, page: PageId, request: Request, out: &mut Vec<Command>) {
        let payload = self.payload(page, request.have);
        let entry = self.page(page);
        let before = entry.access;
        entry.access = before.min(Access::Read);
        entry.copyset.insert(request.requester);
        let copy = (Access::Read, false, NodeSet::EMPTY);
        self.grant(page, request.requester, copy, payload, before, out);
    }

    /// A writer gets the page once all other copies are dropped. With direct acknowledgements it gets it at once, and waits for
    /// them itself: that takes a message less, one after the other.
    fn give(&mut self, page: PageId, request: Request, out: &mut Vec<Command>) {
        let entry = self.page(page);
        let others = entry.copyset.without(request.requester);
        if !others.is_empty() {
            entry.migratory = 0;
            if self.options.direct_acks {
                self.tell_to_drop(page, others, request.requester, out);
                return self.transfer(page, request, others, out);
            }
            return self.invalidate(page, others, Then::Transfer(request), request.requester, out);
        }
        if entry.copyset.contains(request.requester) {
            // The only reader since the last write is the next writer.
            entry.migratory = (entry.migratory + 1).min(MIGRATORY_MOST);
        }
        self.transfer(page, request, NodeSet::EMPTY, out);
    }

    /// Hands the page over. No other nodes have a copy than `copies`, which were told to drop it.
    pub(super) fn transfer(
        &mut self,
        page: PageId,
        request: Request,
        copies: NodeSet,
        out: &mut Vec<Command>,
    ) {
        let payload = self.payload(page, request.have);
        let entry = self.page(page);
        let probe = request.purpose != Purpose::Write && entry.version.rem_euclid(PROBE_VERSIONS) == 0;
        let before = entry.access;
        entry.access = Access::None;
        entry.copyset = NodeSet::EMPTY;
        entry.owner = false;
        entry.hint = request.requester;
        let access = if probe { Access::Read } else { Access::Write };
        self.grant(page, request.requester, (access, true, copies), payload, before, out);
        let entry = self.page(page);
        entry.twin = 0;
        let version = entry.version;
        let told = std::mem::take(&mut entry.before).into_iter().flatten();
        for node in told.filter(|node| *node != request.requester) {
            self.send(node, Message::OwnerIs { page, owner: request.requester, version }, out);
        }
    }

    /// What must travel so that a node that has the content `have` gets the present one.
    fn payload(&mut self, page: PageId, have: Version) -> Payload {
        let options = self.options;
        let Page { version, twin, .. } = *self.page(page);
        if options.upgrade_without_data && have == version {
            Payload::None
        } else if options.deltas && have != 0 && have == twin {
            Payload::Delta { base: twin }
        } else {
            Payload::Page
        }
    }

    /// Sends a grant; `before` is the access that local threads had until now.
    fn grant(
        &mut self,
        page: PageId,
        to: NodeId,
        (access, owner, copies): (Access, bool, NodeSet),
        payload: Payload,
        before: Access,
        out: &mut Vec<Command>,
    ) {
        let (own, manager) = (self.own, self.manager(page));
        let direct = self.options.direct_reply || manager == own;
        let entry = self.page(page);
        // Two nodes between which a page goes back and forth know each other.
        let before_this = entry.before[0].filter(|last| owner && *last != to);
        let (keeps, version, migratory) = (entry.access, entry.version, entry.migratory);
        let from = own;
        let grant =
            Grant { page, to, access, owner, from, version, payload, migratory, before: before_this, copies };
        let via = if direct { to } else { manager };
        let frame = self.frame(via, Message::Grant(grant), out);
        if payload != Payload::None {
            return out.push(Command::SendPage { to: via, frame, page, access: keeps });
        }
        if keeps != before {
            out.push(Command::SetAccess { page, access: keeps, twin: false });
        }
        out.push(Command::Send { to: via, frame });
    }
}
