//! A shard's part of a cut.

use crate::{NodeError, copies::Copies, lanes::Peers, shared::Shared, stats::Stats};
use std::{collections::VecDeque, sync::Arc};
use vnuma_abi_dsm_wire::Contents;
use vnuma_dsm::{CutCommand, CutMessage, Cuts, Epoch, Frame, Message, NodeId, NodeSet, PageId, Version};
use vnuma_dsm_pager::{Page, Region};

#[derive(Debug)]
pub(crate) struct Saving {
    cuts: Cuts,
    copies: Arc<Copies>,
    members: NodeSet,
    /// What is to be done next. Pages wait here while a connection takes no more.
    queue: VecDeque<CutCommand>,
    begun: u64,
    over: bool,
}

/// What a shard lends.
pub(crate) struct Means<'a> {
    pub own: NodeId,
    pub epoch: Epoch,
    pub region: &'a Region,
    pub peers: &'a mut Peers,
    pub stats: &'a mut Stats,
    pub shared: &'a Shared,
}

impl Saving {
    pub fn new(cuts: Cuts, copies: Arc<Copies>, members: NodeSet) -> Self {
        Self { cuts, copies, members, queue: VecDeque::new(), begun: 0, over: false }
    }

    /// The cut to begin now, if there is one.
    pub fn due(&self) -> Option<u64> {
        let wanted = self.copies.wanted();
        (wanted > self.begun && !self.over).then_some(wanted)
    }

    /// Pages wait to be sent.
    pub fn is_busy(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Begins a cut with these pages.
    pub fn begin(&mut self, number: u64, owned: Vec<(PageId, Version)>) {
        self.begun = number;
        let mut out = Vec::new();
        self.cuts.begin(number, owned, &mut out);
        self.queue.extend(out);
    }

    /// A member has sent this, with a page if it is one.
    pub fn receive(&mut self, from: NodeId, message: CutMessage, content: Option<Box<Page>>) {
        if let (CutMessage::Page { number, page, version }, Some(content)) = (message, content) {
            return self.copies.keep(number, page, version, content);
        }
        let mut out = Vec::new();
        self.cuts.receive(from, message, &mut out);
        self.queue.extend(out);
    }

    /// A member was lost.
    pub fn end(&mut self, reason: &'static str) {
        self.over = true;
        self.queue.clear();
        self.copies.over(reason);
    }

    /// Does what can be done without waiting.
    pub fn go_on(&mut self, means: &mut Means<'_>) -> Result<(), NodeError> {
        while let Some(command) = self.queue.front().copied() {
            if let CutCommand::Save { to, .. } = command
                && !means.peers.has_room(to)
            {
                return Ok(());
            }
            self.queue.pop_front();
            match command {
                CutCommand::Save { to, number, page, version } => {
                    let content = means.region.peek(page.0, |page| Box::new(*page))?;
                    if to == means.own {
                        self.copies.keep(number, page, version, content);
                    } else {
                        let message = CutMessage::Page { number, page, version };
                        send(means, to, message, Contents::Page(&content));
                    }
                }
                CutCommand::Tell { message } => {
                    for node in self.members.without(means.own).iter() {
                        send(means, node, message, Contents::None);
                    }
                }
                CutCommand::Complete { number } => self.copies.complete(number),
            }
        }
        Ok(())
    }
}

fn send(means: &mut Means<'_>, to: NodeId, message: CutMessage, contents: Contents<'_>) {
    let frame = Frame { epoch: means.epoch, message: Message::Cut(message) };
    means.peers.send(to, &frame, contents, means.stats, means.shared);
}
