//! A shard's part of a cut.

use crate::{NodeError, copies::Copies, lanes::Peers, shared::Shared, stats::Stats};
use std::{collections::VecDeque, sync::Arc};
use vnuma_abi_dsm_wire::Contents;
use vnuma_coherence::{Cut, CutCommand, Cuts, Epoch, Frame, Message, NodeId, NodeSet, PageId, Version};
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
        self.drop_given_up();
        self.begun = number;
        let mut out = Vec::new();
        self.cuts.begin(number, owned, &mut out);
        self.queue.extend(out);
    }

    /// A member has sent this, with a page if it is one.
    pub fn receive(&mut self, from: NodeId, message: Cut, content: Option<Box<Page>>) {
        if let (Cut::Page { number, page, version }, Some(content)) = (message, content) {
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

    /// Threads did not wait for a cut any longer, and not all of its pages are sent. What they write from then on must not get into
    /// it, so it must not be complete on any node: nothing more of it is sent, and so not its end.
    fn drop_given_up(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        let given_up = self.copies.given_up();
        let unsent = |command: &CutCommand| match *command {
            CutCommand::Save { number, page, .. } => (number <= given_up).then_some(page),
            CutCommand::Tell { .. } | CutCommand::Complete { .. } => None,
        };
        let pages: Vec<PageId> = self.queue.iter().filter_map(unsent).collect();
        if pages.is_empty() {
            return;
        }
        pages.into_iter().for_each(|page| self.cuts.forget(page));
        self.queue.retain(|command| match *command {
            CutCommand::Save { number, .. } | CutCommand::Complete { number } => number > given_up,
            CutCommand::Tell { message: Cut::End { number } | Cut::Kept { number } } => number > given_up,
            CutCommand::Tell { message: Cut::Page { .. } } => true,
        });
    }

    /// Does what can be done without waiting.
    pub fn go_on(&mut self, means: &mut Means<'_>) -> Result<(), NodeError> {
        self.drop_given_up();
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
                        let message = Cut::Page { number, page, version };
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

fn send(means: &mut Means<'_>, to: NodeId, message: Cut, contents: Contents<'_>) {
    let frame = Frame { epoch: means.epoch, message: Message::Cut(message) };
    means.peers.send(to, frame, contents, means.stats, means.shared);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeMap, time::Duration};
    use vnuma_coherence::Managers;
    use vnuma_dsm_pager::{Access, Options, PAGE_SIZE, PagerError};

    /// Threads go on after a cut that took too long, and write pages that have not been sent.
    #[test]
    fn a_cut_that_was_given_up_sends_nothing_more_and_the_next_one_has_its_pages() {
        let region = match Region::create(4 * PAGE_SIZE, Options::default()) {
            Ok(region) => region,
            Err(error @ (PagerError::Denied { .. } | PagerError::Kernel { .. })) => {
                return eprintln!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        };
        let (own, members) = (NodeId(0), NodeSet::first(1));
        let managers = Managers::new(&[(4, own)]).expect("ranges");
        let copies = Arc::new(Copies::new(own, members, managers.clone()));
        let mut saving = Saving::new(Cuts::new(own, members, managers), Arc::clone(&copies), members);
        let shared = Shared::new(1, members, Box::new(|_| {})).expect("shared");
        let go_on = |saving: &mut Saving| {
            let (epoch, mut peers) = (Epoch(0), Peers::new(BTreeMap::new()).expect("peers"));
            let (region, shared, stats) = (&region, &shared, &mut Stats::default());
            saving.go_on(&mut Means { own, epoch, region, peers: &mut peers, stats, shared })
        };
        let pages = || [0, 1].map(|page| (PageId(page), 5)).to_vec();
        let (first, content) = (copies.want(1), [7; PAGE_SIZE]);
        saving.begin(first, pages());
        copies.wait(first, Duration::ZERO).expect_err("too late");
        region.install(0, &content, Access::Write).expect("written");
        go_on(&mut saving).expect("it is not sent any more");
        assert!(!saving.is_busy() && copies.newest() == 0);

        region.downgrade(0, |_| ()).expect("read-only");
        region.install(1, &content, Access::Read).expect("there");
        let second = copies.want(1);
        assert_eq!(saving.due(), Some(second));
        saving.begin(second, pages());
        go_on(&mut saving).expect("sent");
        let mut kept = Vec::new();
        copies.restore(second, &[0], |page, content| kept.push((page, content[9])));
        assert_eq!((copies.newest(), kept), (second, vec![(0, 7), (1, 7)]));

        // Threads use the memory again: it is too late to begin.
        let third = copies.want(1);
        copies.wait(third, Duration::ZERO).expect_err("too late");
        assert_eq!(saving.due(), None);
        copies.want(1);
        assert_eq!(saving.due(), Some(third + 1));
    }
}
