//! Local faults, and what comes back for them.

use super::{Node, protest};
use crate::command::{Command, Protest};
use crate::options::Options;
use crate::page::{Invalidating, Then};
use vnuma_abi_dsm_wire::{
    Access, Grant, MIGRATORY_MOST, Message, NodeId, NodeSet, Notice, PageId, Payload, Purpose, Request,
    VERSION_MOST,
};

impl Node {
    pub(super) fn on_fault(&mut self, now: u64, page: PageId, write: bool, out: &mut Vec<Command>) {
        if page.0 >= self.table.pages() {
            return;
        }
        let want = if write { Access::Write } else { Access::Read };
        let entry = self.page(page);
        if entry.poisoned {
            return out.push(Command::Poison { page });
        }
        if entry.access >= want {
            return out.push(Command::Wake { page });
        }
        entry.fault = entry.fault.max(want);
        // A thread that now wants to write has read what it waited for.
        entry.hold_until = 0;
        let misses = entry.access == Access::None && !write;
        self.advance(now, page, out);
        if misses && self.options.prefetch_pages > 0 && self.change.is_none() {
            self.prefetch(page, out);
        }
    }

    /// Does for a page what can be done now: drops a copy, answers or forwards requests, asks for what local threads want.
    pub(super) fn advance(&mut self, now: u64, page: PageId, out: &mut Vec<Command>) {
        if self.change.is_some() {
            return;
        }
        self.drop_deferred(now, page, out);
        while let Some(request) = self.next_ready(now, page, out) {
            self.on_ready(page, request, out);
        }
        self.pursue(now, page, out);
        self.page(page).tidy();
    }

    /// Gets what local threads wait for, if nothing is under way.
    fn pursue(&mut self, now: u64, page: PageId, out: &mut Vec<Command>) {
        let entry = self.page(page);
        let want = entry.fault;
        if want == Access::None || entry.wanted.is_some() || entry.invalidating().is_some() || entry.poisoned
        {
            return;
        }
        if !entry.owner {
            let purpose = if want == Access::Write { Purpose::Write } else { Purpose::Read };
            return self.request(page, purpose, out);
        }
        if want == Access::Write && !entry.copyset.is_empty() {
            // Others read what this node writes: the page does not migrate.
            entry.migratory = 0;
            let copies = entry.copyset;
            return self.invalidate(page, copies, Then::Upgrade, self.own, out);
        }
        self.map(page, want, None, out);
        self.satisfied(now, page, out);
    }

    /// Sends a request to the node that is expected to know the owner.
    pub(super) fn request(&mut self, page: PageId, purpose: Purpose, out: &mut Vec<Command>) {
        let (own, manager) = (self.own, self.manager(page));
        let hints = self.options.owner_hints;
        let entry = self.page(page);
        entry.wanted = Some(purpose);
        let to = if hints || manager == own { entry.hint } else { manager };
        let request = Request { page, requester: own, purpose, have: entry.version };
        self.send(to, Message::Request(request), out);
    }

    /// Maps a page whose content is in memory or comes with `payload`. A page that becomes writable gets a new version.
    fn map(&mut self, page: PageId, access: Access, payload: Option<Payload>, out: &mut Vec<Command>) {
        let deltas = self.options.deltas;
        let entry = self.page(page);
        let twin = access == Access::Write && deltas;
        if twin {
            entry.twin = entry.version;
        }
        if access == Access::Write {
            entry.version = (entry.version + 1).min(VERSION_MOST);
        }
        entry.access = access;
        out.push(match payload {
            Some(payload) => Command::Install { page, access, payload, twin },
            None => Command::SetAccess { page, access, twin },
        });
    }

    /// Local threads have what they waited for. They keep it for a while.
    fn satisfied(&mut self, now: u64, page: PageId, out: &mut Vec<Command>) {
        let hold_ns = self.options.hold_ns;
        let entry = self.page(page);
        entry.fault = Access::None;
        if hold_ns > 0 {
            entry.hold_until = now.saturating_add(hold_ns);
        }
        out.push(Command::Wake { page });
    }

    pub(super) fn on_grant(&mut self, now: u64, from: NodeId, grant: Grant, out: &mut Vec<Command>) {
        let page = grant.page;
        if grant.to != self.own {
            return self.relay(from, grant, out);
        }
        if !self.may_come_from(from, &grant) || !self.expects(&grant) {
            return protest(from, Protest::UnexpectedGrant, out);
        }
        let manager = self.manager(page);
        let Options { owner_hints: hints, tell_owners: tells, .. } = self.options;
        let entry = self.page(page);
        let asked = entry.wanted.take();
        if hints {
            entry.hint = grant.from;
        }
        let dropped = entry.take_dropped();
        let copies = grant.copies.minus(dropped);
        entry.owner = grant.owner;
        entry.copyset = copies;
        entry.version = grant.version;
        entry.migratory = grant.migratory;
        entry.before = if tells && grant.owner { [Some(grant.from), grant.before] } else { [None; 2] };
        let payload = (grant.payload != Payload::None).then_some(grant.payload);
        if copies.is_empty() {
            self.map(page, grant.access, payload, out);
        } else {
            self.await_copies(page, copies, payload, out);
        }
        for node in dropped.minus(grant.copies).iter() {
            protest(node, Protest::UnexpectedAcknowledgement, out);
        }
        // A request to write passed the manager or left its trace on the way; this one did not.
        let frozen = self.change.is_some();
        if grant.owner
            && asked == Some(Purpose::Read)
            && !frozen
            && manager != self.own
            && manager != grant.from
        {
            self.send(manager, Message::OwnerIs { page, owner: self.own, version: grant.version }, out);
        }
        let fault = self.page(page).fault;
        if !copies.is_empty() {
            // Threads wait until the last copy is dropped.
        } else if fault != Access::None && fault <= grant.access {
            self.satisfied(now, page, out);
        } else if fault != Access::None {
            out.push(Command::Wake { page });
        }
        self.advance(now, page, out);
    }

    /// The page is here, and others have copies of it, which they are dropping. Its content is kept; this node maps it when it may
    /// write.
    fn await_copies(
        &mut self,
        page: PageId,
        copies: NodeSet,
        payload: Option<Payload>,
        out: &mut Vec<Command>,
    ) {
        let entry = self.page(page);
        entry.waiting_mut().invalidating = Some(Invalidating { then: Then::Upgrade, waiting: copies });
        let Some(payload) = payload else { return };
        if std::mem::take(&mut entry.access) != Access::None {
            out.push(Command::SetAccess { page, access: Access::None, twin: false });
        }
        out.push(Command::Install { page, access: Access::None, payload, twin: false });
    }

    /// True if this node asked for the grant and has what its payload needs.
    fn expects(&mut self, grant: &Grant) -> bool {
        let (own, members, acks) = (self.own, self.members, self.options.direct_acks);
        let entry = self.page(grant.page);
        let asked = match entry.wanted {
            Some(Purpose::Write) => grant.owner && grant.access == Access::Write,
            Some(Purpose::Read) => {
                grant.access == Access::Read || (grant.owner && grant.access == Access::Write)
            }
            Some(Purpose::Prefetch) => grant.access == Access::Read && !grant.owner,
            None => false,
        };
        let base = match grant.payload {
            Payload::None => entry.version == grant.version,
            Payload::Delta { base } => entry.version == base,
            Payload::Page => true,
        };
        let inside = grant.version <= VERSION_MOST && grant.migratory <= MIGRATORY_MOST;
        // Only a writer waits for others to drop their copies. The owner that sent it has none.
        let waits = acks && grant.access == Access::Write && entry.wanted == Some(Purpose::Write);
        let others = members.without(own).without(grant.from);
        let copies = grant.copies.is_empty() || waits && grant.copies.is_subset(others);
        asked
            && base
            && inside
            && copies
            && grant.before.is_none_or(|node| members.contains(node) && node != own)
    }

    /// True if the owner that the grant names has sent it, or the manager has passed it on.
    fn may_come_from(&self, from: NodeId, grant: &Grant) -> bool {
        let relayed = !self.options.direct_reply && from == self.manager(grant.page);
        grant.from != self.own && self.members.contains(grant.from) && (grant.from == from || relayed)
    }

    /// The manager passes a grant on (Message-2-*-non-owner).
    fn relay(&mut self, from: NodeId, grant: Grant, out: &mut Vec<Command>) {
        if self.options.direct_reply || self.manager(grant.page) != self.own {
            return protest(from, Protest::UnexpectedGrant, out);
        }
        let frame = self.frame(grant.to, Message::Grant(grant), out);
        out.push(Command::Relay { to: grant.to, frame });
    }

    pub(super) fn on_refuse(&mut self, now: u64, from: NodeId, page: PageId, out: &mut Vec<Command>) {
        let entry = self.page(page);
        if entry.wanted != Some(Purpose::Prefetch) {
            return protest(from, Protest::UnexpectedAnswer, out);
        }
        entry.wanted = None;
        self.streams.refused(page);
        self.advance(now, page, out);
    }

    pub(super) fn on_lost(&mut self, now: u64, from: NodeId, page: PageId, out: &mut Vec<Command>) {
        let entry = self.page(page);
        if entry.wanted.is_none() {
            return protest(from, Protest::UnexpectedAnswer, out);
        }
        entry.wanted = None;
        entry.poisoned = true;
        entry.fault = Access::None;
        entry.access = Access::None;
        out.push(Command::Poison { page });
        self.advance(now, page, out);
    }

    /// Asks for the pages behind a page that was read, if its reader is sequential.
    fn prefetch(&mut self, page: PageId, out: &mut Vec<Command>) {
        let window = self.streams.fault(page, self.options.prefetch_pages);
        let mut end = page.0.saturating_add(u64::from(window)).min(self.table.pages() - 1);
        if let Some(before) = page.0.checked_rem(self.options.prefetch_within) {
            end = end.min(page.0 - before + self.options.prefetch_within - 1);
        }
        for next in page.0 + 1..=end {
            let next = PageId(next);
            let entry = self.page(next);
            if entry.access == Access::None && entry.wanted.is_none() && !entry.owner && !entry.poisoned {
                self.request(next, Purpose::Prefetch, out);
            }
        }
    }

    /// Has the copies in `copies` dropped before `then`; `owner` owns the page next.
    pub(super) fn invalidate(
        &mut self,
        page: PageId,
        copies: NodeSet,
        then: Then,
        owner: NodeId,
        out: &mut Vec<Command>,
    ) {
        self.page(page).waiting_mut().invalidating = Some(Invalidating { then, waiting: copies });
        self.tell_to_drop(page, copies, owner, out);
    }

    pub(super) fn tell_to_drop(
        &mut self,
        page: PageId,
        copies: NodeSet,
        owner: NodeId,
        out: &mut Vec<Command>,
    ) {
        for node in copies.iter() {
            self.notify(node, Notice::Invalidate { page, owner }, out);
        }
    }

    /// All copies are dropped and this node writes.
    pub(super) fn upgraded(&mut self, now: u64, page: PageId, out: &mut Vec<Command>) {
        self.map(page, Access::Write, None, out);
        self.satisfied(now, page, out);
    }
}
