//! Copies are dropped: invalidations, their acknowledgements, and the hold time.

use super::{Node, protest};
use crate::command::{Command, Protest};
use crate::page::Then;
use vnuma_abi_dsm_wire::{Access, NodeId, NodeSet, Notice, PageId, Purpose};

impl Node {
    /// The owner `from` wants the copy dropped; `owner` writes next.
    pub(super) fn on_invalidate(
        &mut self,
        now: u64,
        from: NodeId,
        page: PageId,
        owner: NodeId,
        out: &mut Vec<Command>,
    ) {
        let own = self.own;
        let entry = self.page(page);
        if entry.owner || entry.deferred().is_some() || owner == own {
            return protest(from, Protest::UnexpectedInvalidation, out);
        }
        // Without a copy it concerns one that is on its way: an owner invalidates only what it granted.
        entry.waiting_mut().deferred = Some((from, owner));
        self.advance(now, page, out);
    }

    /// Drops the copy that is to be dropped, if it is there and was held for long enough.
    pub(super) fn drop_deferred(&mut self, now: u64, page: PageId, out: &mut Vec<Command>) {
        let (hints, direct) = (self.options.owner_hints, self.options.direct_acks);
        let entry = self.page(page);
        let Some((from, owner)) = entry.deferred() else {
            return;
        };
        let on_its_way =
            entry.access == Access::None && matches!(entry.wanted, Some(Purpose::Read | Purpose::Prefetch));
        if on_its_way {
            return;
        }
        if now < entry.hold_until && entry.access != Access::None {
            return self.set_timer(page, out);
        }
        entry.waiting_mut().deferred = None;
        if hints && !entry.is_root() {
            entry.hint = owner;
        }
        if std::mem::take(&mut entry.access) != Access::None {
            out.push(Command::SetAccess { page, access: Access::None, twin: false });
        }
        self.notify(if direct { owner } else { from }, Notice::Invalidated { page }, out);
    }

    /// A copy was dropped.
    pub(super) fn on_invalidated(&mut self, now: u64, from: NodeId, page: PageId, out: &mut Vec<Command>) {
        let early = self.options.direct_acks;
        let entry = self.page(page);
        // The owner's grant is on its way, and says who had a copy.
        let early = early && entry.wanted == Some(Purpose::Write);
        let Some(invalidating) = entry.waiting_mut().invalidating.as_mut() else {
            if !early || entry.waiting_mut().dropped.contains(from) {
                entry.tidy();
                return protest(from, Protest::UnexpectedAcknowledgement, out);
            }
            return entry.waiting_mut().dropped.insert(from);
        };
        if !invalidating.waiting.remove(from) {
            return protest(from, Protest::UnexpectedAcknowledgement, out);
        }
        let (then, done) = (invalidating.then, invalidating.waiting.is_empty());
        entry.copyset.remove(from);
        if done {
            entry.waiting_mut().invalidating = None;
            match then {
                Then::Upgrade => self.upgraded(now, page, out),
                Then::Transfer(request) => self.transfer(page, request, NodeSet::EMPTY, out),
            }
            self.advance(now, page, out);
        }
    }

    pub(super) fn on_timer(&mut self, now: u64, page: PageId, out: &mut Vec<Command>) {
        if page.0 < self.table.pages() {
            self.page(page).waiting_mut().timer = false;
            self.advance(now, page, out);
        }
    }

    pub(super) fn on_progress(&mut self, now: u64, page: PageId, out: &mut Vec<Command>) {
        if page.0 < self.table.pages() {
            self.page(page).hold_until = 0;
            self.advance(now, page, out);
        }
    }
}
