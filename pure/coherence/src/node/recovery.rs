//! Who owns what after a node was lost: rebuilt from the page tables of the members.
//!
//! Each member tells the managers which pages it has. A manager keeps the owner of a page, or makes the lowest holder the
//! owner. The contents of a page that nobody has are lost, which its manager says to everybody who asks.

use super::Node;
use crate::command::Command;
use vnuma_abi_dsm_wire::{
    Access, Entry, Holding, Membership, Message, NodeId, NodeSet, PAGES_LIMIT, PageId, View,
};

impl Node {
    /// Tells the managers of a view what this node has.
    pub(super) fn report(&mut self, view: View, out: &mut Vec<Command>) {
        let View { epoch, members } = view;
        let mut lists: Vec<Vec<Holding>> = vec![Vec::new(); NodeId::LIMIT];
        for (page, entry) in self.table.iter() {
            if entry.owner || entry.access != Access::None {
                let manager = self.managers.manager(page, members);
                lists[usize::from(manager.0)].push(Holding { page, owner: entry.owner });
            }
        }
        if members.contains(self.own) {
            self.on_holdings(self.own, &std::mem::take(&mut lists[usize::from(self.own.0)]), true);
        }
        let message = |pages, last| Membership::Holdings { epoch, pages, last };
        self.send_parts(members, lists, message, out);
    }

    /// Sends each other member its list, in parts.
    fn send_parts<T: Clone>(
        &mut self,
        members: NodeSet,
        lists: Vec<Vec<T>>,
        message: impl Fn(Vec<T>, bool) -> Membership,
        out: &mut Vec<Command>,
    ) {
        for node in members.without(self.own).iter() {
            for part in lists[usize::from(node.0)].chunks(PAGES_LIMIT) {
                self.send(node, Message::Membership(message(part.to_vec(), false)), out);
            }
            self.send(node, Message::Membership(message(Vec::new(), true)), out);
        }
    }

    /// Notes what a member has. False if this node will not manage one of the pages, or that one has said that these were all.
    pub(super) fn on_holdings(&mut self, from: NodeId, pages: &[Holding], last: bool) -> bool {
        let (own, limit, managers) = (self.own, self.table.pages(), &self.managers);
        let Some(change) = self.change.as_mut() else {
            return true;
        };
        let members = change.view.members;
        let mine = |page: PageId| page.0 < limit && managers.manager(page, members) == own;
        if change.came[2].contains(from) || !pages.iter().all(|holding| mine(holding.page)) {
            return false;
        }
        for holding in pages {
            let (owner, holders) = change.holders.entry(holding.page).or_insert((None, NodeSet::EMPTY));
            holders.insert(from);
            if holding.owner {
                *owner = Some(from);
            }
        }
        if last {
            change.came[2].insert(from);
        }
        true
    }

    /// Decides who owns the pages that this node manages, and tells the owners.
    pub(super) fn direct(&mut self, view: View, out: &mut Vec<Command>) {
        let View { epoch, members } = view;
        let mut lists: Vec<Vec<Entry>> = vec![Vec::new(); NodeId::LIMIT];
        let Some(change) = &self.change else {
            return;
        };
        for (page, (owner, holders)) in &change.holders {
            if let Some(owner) = owner.or_else(|| holders.iter().next()) {
                lists[usize::from(owner.0)].push(Entry { page: *page, copyset: holders.without(owner) });
            }
        }
        if members.contains(self.own) {
            self.on_directory(self.own, &std::mem::take(&mut lists[usize::from(self.own.0)]), true);
        }
        let message = |pages, last| Membership::Directory { epoch, pages, last };
        self.send_parts(members, lists, message, out);
    }

    /// Notes what this node will own. False if the sender will not manage one of the pages, names a copy of this node or of one
    /// that will be no member, or has said that these were all.
    pub(super) fn on_directory(&mut self, from: NodeId, pages: &[Entry], last: bool) -> bool {
        let (own, limit, managers) = (self.own, self.table.pages(), &self.managers);
        let Some(change) = self.change.as_mut() else {
            return true;
        };
        let members = change.view.members;
        let theirs = |page: PageId| page.0 < limit && managers.manager(page, members) == from;
        let fits = |entry: &Entry| theirs(entry.page) && entry.copyset.is_subset(members.without(own));
        if change.came[3].contains(from) || !pages.iter().all(fits) {
            return false;
        }
        change.owned.extend(pages.iter().map(|entry| (entry.page, entry.copyset)));
        if last {
            change.came[3].insert(from);
        }
        true
    }

    /// The view is in force.
    pub(super) fn install(&mut self, now: u64, view: View, out: &mut Vec<Command>) {
        let Some(change) = self.change.take() else {
            return;
        };
        // Pages that members have are known here from now on. All others whose manager was lost are lost: see `Page::fresh`.
        for page in change.holders.keys() {
            self.page(*page);
        }
        let (own, managers) = (self.own, &self.managers);
        for (page, entry) in self.table.iter_mut() {
            // This node reports what it owns. What it owns and has not reported was made after the report: until then nobody had
            // touched the page, or another one of its chunk.
            let untouched = entry.owner && !change.holders.contains_key(&page);
            entry.reset(managers.manager(page, view.members));
            if entry.hint == own {
                match change.holders.get(&page) {
                    Some((owner, holders)) => {
                        entry.hint = owner.or_else(|| holders.iter().next()).unwrap_or(own)
                    }
                    None if untouched => entry.owner = true,
                    None => entry.poisoned = true,
                }
            }
        }
        let left = self.members.minus(view.members);
        (self.members, self.epoch) = (view.members, view.epoch);
        for (page, copyset) in change.owned {
            let entry = self.page(page);
            entry.owner = true;
            entry.copyset = copyset;
        }
        out.push(Command::Members { members: view.members });
        for node in left.iter() {
            self.fence(node, out);
        }
        self.ask_again(now, out);
        for (from, frame) in change.early {
            self.on_frame(now, from, frame, out);
        }
    }

    /// Local threads still wait for what was asked for in the last epoch.
    fn ask_again(&mut self, now: u64, out: &mut Vec<Command>) {
        let waiting = self.table.iter().filter(|(_, entry)| entry.fault != Access::None);
        let waiting: Vec<_> = waiting.map(|(page, entry)| (page, entry.poisoned)).collect();
        for (page, poisoned) in waiting {
            if poisoned {
                self.page(page).fault = Access::None;
                out.push(Command::Poison { page });
            } else {
                self.advance(now, page, out);
            }
        }
    }
}
