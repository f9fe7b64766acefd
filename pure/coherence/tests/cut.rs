//! Cuts in random order of all steps: whatever node is lost, and whenever, the others can put a complete cut together.

use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use vnuma_coherence::{
    Cut, CutCommand, Cuts, Kept, Managers, NodeId, NodeSet, PageId, Version, keepers, restorer,
};

const NODES: usize = 3;
const PAGES: u64 = 4;
const CUTS: u64 = 3;

/// The content of a page is its version.
struct World {
    managers: Managers,
    members: NodeSet,
    cuts: Vec<Cuts>,
    kept: Vec<Kept<Version>>,
    /// Of each node: cuts that it has begun.
    begun: Vec<u64>,
    channels: BTreeMap<(usize, usize), VecDeque<(Cut, Version)>>,
    owners: Vec<usize>,
    versions: Vec<Version>,
    /// The memory when the last node began a cut.
    moments: Vec<Vec<Version>>,
    /// Keepers keep the first content of a page, whatever comes later: a mistake on purpose.
    first_wins: bool,
}

impl World {
    fn new(first_wins: bool) -> Self {
        let ranges = [(2, NodeId(0)), (1, NodeId(1)), (1, NodeId(2))];
        let managers = Managers::new(&ranges).expect("ranges");
        let members = NodeSet::first(NODES);
        let cuts = (0..NODES).map(|node| Cuts::new(NodeId(node as u8), members, managers.clone())).collect();
        Self {
            managers,
            members,
            cuts,
            kept: (0..NODES).map(|_| Kept::default()).collect(),
            begun: vec![0; NODES],
            channels: BTreeMap::new(),
            owners: vec![0, 0, 1, 2],
            versions: vec![1; PAGES as usize],
            moments: vec![vec![1; PAGES as usize]],
            first_wins,
        }
    }

    fn keep(&mut self, node: usize, message: Cut, content: Version) {
        let Cut::Page { number, page, version } = message else { return };
        let has = self.kept[node].of(number).any(|(other, content)| other == page && *content > 1);
        if !(self.first_wins && has) {
            self.kept[node].keep(number, page, version, content);
        }
    }

    fn carry_out(&mut self, node: usize, commands: Vec<CutCommand>) {
        for command in commands {
            match command {
                CutCommand::Save { to, number, page, version } => {
                    let content = self.versions[page.0 as usize];
                    assert_eq!(content, version, "the content that was announced");
                    let message = Cut::Page { number, page, version };
                    if usize::from(to.0) == node {
                        self.keep(node, message, content);
                    } else {
                        self.channels.entry((node, to.0.into())).or_default().push_back((message, content));
                    }
                }
                CutCommand::Tell { message } => {
                    for other in (0..NODES).filter(|other| *other != node) {
                        self.channels.entry((node, other)).or_default().push_back((message, 0));
                    }
                }
                CutCommand::Complete { number } => self.kept[node].complete(number),
            }
        }
    }

    /// A thread of a node writes a page, or its node begins a cut, or a message arrives.
    fn step(&mut self, choice: u32) {
        let node = choice as usize % NODES;
        let what = choice as usize / NODES;
        match what % 4 {
            0 if self.cuts[node].current().is_none() => {
                let page = what / 4 % PAGES as usize;
                self.owners[page] = node;
                self.versions[page] += 1;
            }
            1 if self.cuts[node].current().is_none() && self.begun[node] < CUTS => {
                self.begun[node] += 1;
                let number = self.begun[node];
                let owned =
                    (0..PAGES as usize).filter(|page| self.owners[*page] == node && self.versions[*page] > 1);
                let owned: Vec<_> = owned.map(|page| (PageId(page as u64), self.versions[page])).collect();
                if self.begun.iter().all(|begun| *begun >= number) {
                    self.moments.push(self.versions.clone());
                }
                let mut out = Vec::new();
                self.cuts[node].begin(number, owned, &mut out);
                self.carry_out(node, out);
            }
            2 | 3 => {
                let from = (node + 1 + what / 4 % (NODES - 1)) % NODES;
                let Some((message, content)) = self.channels.entry((from, node)).or_default().pop_front()
                else {
                    return;
                };
                self.keep(node, message, content);
                let mut out = Vec::new();
                self.cuts[node].receive(NodeId(from as u8), message, &mut out);
                self.carry_out(node, out);
            }
            _ => {}
        }
    }

    /// What the others put together when this node is lost, and what it should be.
    fn restored(&self, lost: usize) -> (u64, Vec<Version>, &[Version]) {
        let survivors = self.members.without(NodeId(lost as u8));
        let newest =
            survivors.iter().map(|node| self.kept[usize::from(node.0)].newest()).max().expect("some");
        let mut memory = vec![1; PAGES as usize];
        for node in survivors.iter() {
            for (page, content) in self.kept[usize::from(node.0)].of(newest) {
                if restorer(&self.managers, self.members, survivors, page) == Some(node) {
                    memory[page.0 as usize] = *content;
                }
            }
        }
        (newest, memory, &self.moments[newest as usize])
    }
}

/// The newest cut of all, or what is wrong.
fn run(choices: &[u32], first_wins: bool) -> Result<u64, String> {
    let mut world = World::new(first_wins);
    let mut newest = 0;
    for choice in choices {
        world.step(*choice);
        for lost in 0..NODES {
            let (number, memory, right) = world.restored(lost);
            newest = newest.max(number);
            if memory != right {
                return Err(format!("without node {lost}, cut {number}: {memory:?}, and {right:?} is right"));
            }
        }
    }
    Ok(newest)
}

proptest! {
    #[test]
    fn survivors_have_a_complete_cut_whoever_is_lost_and_when(choices in prop::collection::vec(any::<u32>(), 0..600)) {
        prop_assert!(run(&choices, false).is_ok(), "{:?}", run(&choices, false));
    }
}

/// The order above reaches complete cuts, and finds a keeper that keeps the wrong content.
#[test]
fn the_runs_reach_complete_cuts_and_find_a_mistake() {
    let mut state = 7_u32;
    let mut choices = || {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        (0..600).map(|_| next()).collect::<Vec<_>>()
    };
    let runs: Vec<_> = (0..200).map(|_| choices()).collect();
    let complete: Vec<_> = runs.iter().map(|run_choices| run(run_choices, false).expect("right")).collect();
    assert!(complete.iter().filter(|newest| **newest == CUTS).count() > 50, "{complete:?}");
    let wrong = runs.iter().filter_map(|choices| run(choices, true).err()).count();
    assert!(wrong > 0, "a keeper that keeps the first content is not found");
}

#[test]
fn two_nodes_keep_a_page_and_one_alone_keeps_it_once() {
    let managers = Managers::new(&[(1, NodeId(2)), (1, NodeId(0))]).expect("ranges");
    let members = NodeSet::first(3);
    assert_eq!(keepers(&managers, members, PageId(0)), [NodeId(2), NodeId(0)]);
    assert_eq!(keepers(&managers, members, PageId(1)), [NodeId(0), NodeId(1)]);
    let alone = [NodeId(1)].into_iter().collect();
    assert_eq!(keepers(&managers, alone, PageId(0)), [NodeId(1); 2]);
    assert_eq!(restorer(&managers, members, members.without(NodeId(2)), PageId(0)), Some(NodeId(0)));
    assert_eq!(restorer(&managers, members, alone, PageId(0)), None);
}

/// A page that has not changed is not sent again.
#[test]
fn only_what_has_changed_is_sent() {
    let managers = Managers::new(&[(PAGES, NodeId(0))]).expect("a range");
    let mut cuts = Cuts::new(NodeId(0), NodeSet::first(2), managers);
    let saves = |cuts: &mut Cuts, number, owned: &[(u64, Version)]| {
        let mut out = Vec::new();
        cuts.begin(number, owned.iter().map(|(page, version)| (PageId(*page), *version)), &mut out);
        cuts.receive(NodeId(1), Cut::End { number }, &mut out);
        cuts.receive(NodeId(1), Cut::Kept { number }, &mut out);
        assert_eq!(out.last(), Some(&CutCommand::Complete { number }));
        let saved = |command: &CutCommand| match command {
            CutCommand::Save { to, page, .. } => Some((to.0, page.0)),
            _ => None,
        };
        out.iter().filter_map(saved).collect::<Vec<_>>()
    };
    assert_eq!(saves(&mut cuts, 1, &[(0, 2), (1, 5)]), [(0, 0), (1, 0), (0, 1), (1, 1)]);
    assert_eq!(saves(&mut cuts, 2, &[(0, 2), (1, 6)]), [(0, 1), (1, 1)]);
    assert!(saves(&mut cuts, 3, &[(0, 2)]).is_empty());
}
