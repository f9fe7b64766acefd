//! What a node does not believe: grants that do not fit, acknowledgements of others, and memberships that contradict its own.

use vnuma_coherence::{
    Access, Command, Epoch, Event, Frame, Grant, Managers, Membership, Message, Node, NodeId, NodeSet,
    Notice, Options, PageId, Payload, Protest, Purpose, Request, State, StopReason, View,
};

const PAGE: PageId = PageId(0);

/// A node of five, of which node 0 manages the pages.
struct One(Node);

impl One {
    fn new(own: u8, options: Options) -> Self {
        let managers = Managers::new(&[(4, NodeId(0))]).expect("a range");
        Self(Node::new(NodeId(own), NodeSet::first(5), managers, options))
    }

    fn at(&mut self, now: u64, event: Event) -> Vec<Command> {
        let mut commands = Vec::new();
        self.0.step(now, event, &mut commands);
        commands
    }

    fn fault(&mut self, write: bool) -> Vec<Command> {
        self.at(0, Event::Fault { page: PAGE, write })
    }

    fn receive(&mut self, from: u8, message: Message) -> Vec<Command> {
        self.in_epoch(0, from, message)
    }

    fn in_epoch(&mut self, epoch: u64, from: u8, message: Message) -> Vec<Command> {
        let frame = Frame { epoch: Epoch(epoch), message };
        self.at(0, Event::Receive { from: NodeId(from), frame })
    }

    fn membership(&mut self, from: u8, message: Membership) -> Vec<Command> {
        self.receive(from, Message::Membership(message))
    }
}

fn view(epoch: u64, members: &[u8]) -> View {
    View { epoch: Epoch(epoch), members: members.iter().map(|node| NodeId(*node)).collect() }
}

fn protests(commands: &[Command], expected: Protest) -> bool {
    commands.iter().any(|command| matches!(command, Command::Protest { reason, .. } if *reason == expected))
}

/// What is said about the membership, and to whom.
fn said(commands: &[Command]) -> Vec<(u8, Membership)> {
    let said = |command: &Command| match command.sends() {
        Some((to, Message::Membership(message))) => Some((to.0, message.clone())),
        _ => None,
    };
    commands.iter().filter_map(said).collect()
}

fn read_grant() -> Grant {
    Grant {
        page: PAGE,
        to: NodeId(1),
        access: Access::Read,
        owner: false,
        from: NodeId(0),
        version: 7,
        payload: Payload::Page,
        migratory: 0,
        before: None,
        copies: NodeSet::EMPTY,
    }
}

fn write_grant() -> Grant {
    Grant { access: Access::Write, owner: true, ..read_grant() }
}

#[test]
fn a_grant_that_does_not_fit_the_request_is_refused() {
    let read = read_grant();
    let write = write_grant();
    let cases = [
        (true, Grant { owner: false, ..write }, "the right to write belongs to an owner"),
        (true, read, "less than was asked for"),
        (true, Grant { access: Access::Read, ..write }, "an owner that asked to write and may not"),
        (false, Grant { owner: false, ..write }, "the right to write without being the owner"),
        (false, Grant { access: Access::None, ..read }, "nothing"),
        (false, Grant { payload: Payload::None, ..read }, "this node has content 1, and not 7"),
        (false, Grant { payload: Payload::Delta { base: 2 }, ..read }, "a difference to what is not here"),
        (false, Grant { from: NodeId(9), ..read }, "from no member"),
        (true, Grant { before: Some(NodeId(9)), ..write }, "an owner before it that is no member"),
        (true, Grant { before: Some(NodeId(1)), ..write }, "this node itself as the owner before"),
    ];
    for (wants, grant, why) in cases {
        let mut node = One::new(1, Options::default());
        node.fault(wants);
        let commands = node.receive(0, Message::Grant(grant));
        assert!(protests(&commands, Protest::UnexpectedGrant), "{why}: {commands:?}");
        assert_eq!((commands.len(), node.0.state(PAGE)), (1, State::Invalid), "{why}");
        // It still waits for the right one.
        let commands = node.receive(0, Message::Grant(if wants { write } else { read }));
        assert!(commands.contains(&Command::Wake { page: PAGE }), "{why}: {commands:?}");
    }
    // What was asked for ahead of a reader is a copy and no more.
    let mut node = One::new(1, Options { prefetch_pages: 2, ..Options::default() });
    let mut ahead = Vec::new();
    for page in [0, 1] {
        ahead = node.at(0, Event::Fault { page: PageId(page), write: false });
        let grant = Grant { page: PageId(page), ..read };
        node.receive(0, Message::Grant(grant));
    }
    assert!(
        ahead.iter().any(|command| matches!(command.sends(),
        Some((_, Message::Request(request))) if request.page == PageId(2) && request.purpose == Purpose::Prefetch))
    );
    let grant = Grant { page: PageId(2), access: Access::Read, ..write };
    assert!(protests(&node.receive(0, Message::Grant(grant)), Protest::UnexpectedGrant));
}

/// In `ivy` the manager passes grants on, and nobody else does.
#[test]
fn only_the_manager_relays() {
    let grant = Grant { to: NodeId(2), from: NodeId(3), ..write_grant() };
    let relays = |own, options| {
        let commands = One::new(own, options).receive(3, Message::Grant(grant));
        match commands.as_slice() {
            [Command::Relay { to: NodeId(2), .. }] => true,
            [Command::Protest { reason: Protest::UnexpectedGrant, .. }] => false,
            other => panic!("{other:?}"),
        }
    };
    assert!(relays(0, Options::ivy()) && !relays(1, Options::ivy()) && !relays(0, Options::default()));
}

#[test]
fn an_acknowledgement_counts_from_whom_it_was_asked() {
    let mut node = One::new(0, Options { batch_invalidations: false, ..Options::default() });
    for from in [1, 2] {
        let request = Request { page: PAGE, requester: NodeId(from), purpose: Purpose::Read, have: 0 };
        node.receive(from, Message::Request(request));
    }
    node.fault(true);
    let acknowledge =
        |node: &mut One, from| node.receive(from, Message::Notices(vec![Notice::Invalidated { page: PAGE }]));
    assert_eq!(acknowledge(&mut node, 1), []);
    for from in [1, 3] {
        assert!(protests(&acknowledge(&mut node, from), Protest::UnexpectedAcknowledgement), "node {from}");
        assert_ne!(node.0.state(PAGE), State::Modified, "node 2 still has a copy");
    }
    assert!(acknowledge(&mut node, 2).contains(&Command::Wake { page: PAGE }));
    assert_eq!((node.0.state(PAGE), node.0.copyset(PAGE)), (State::Modified, NodeSet::EMPTY));
}

/// Copies of nodes 2 and 3 are dropped for the write of node 1.
#[test]
fn a_page_that_others_still_have_is_not_written() {
    let copies: NodeSet = [NodeId(2), NodeId(3)].into_iter().collect();
    let grant = Grant { copies, ..write_grant() };
    let start = |write| {
        let mut node = One::new(1, Options { hold_ns: 0, ..Options::default() });
        node.fault(write);
        node
    };
    let dropped =
        |node: &mut One, from| node.receive(from, Message::Notices(vec![Notice::Invalidated { page: PAGE }]));
    let writes = |commands: &[Command]| {
        commands.contains(&Command::SetAccess { page: PAGE, access: Access::Write, twin: true })
            && commands.contains(&Command::Wake { page: PAGE })
    };
    let kept = Command::Install { page: PAGE, access: Access::None, payload: Payload::Page, twin: false };
    // In any order, and the last of them is what the thread waits for.
    let mut node = start(true);
    assert_eq!(node.receive(0, Message::Grant(grant)), std::slice::from_ref(&kept));
    assert_eq!(
        (node.0.state(PAGE), node.0.is_owner(PAGE), node.0.copyset(PAGE)),
        (State::Invalid, true, copies)
    );
    // A request waits, too.
    let request = Request { page: PAGE, requester: NodeId(4), purpose: Purpose::Write, have: 0 };
    assert_eq!(node.receive(4, Message::Request(request)), []);
    assert_eq!(dropped(&mut node, 3), []);
    assert!(protests(&dropped(&mut node, 3), Protest::UnexpectedAcknowledgement), "again");
    assert!(protests(&dropped(&mut node, 4), Protest::UnexpectedAcknowledgement), "node 4 had no copy");
    let commands = dropped(&mut node, 2);
    assert!(writes(&commands), "{commands:?}");
    let gives = |command: &Command| {
        matches!(command, Command::SendPage { to: NodeId(4), frame: Frame { message: Message::Grant(grant), .. }, .. }
            if grant.copies.is_empty())
    };
    assert!(commands.iter().any(gives), "{commands:?}");
    let mut node = start(true);
    assert_eq!(dropped(&mut node, 3), []);
    assert!(protests(&dropped(&mut node, 3), Protest::UnexpectedAcknowledgement), "again");
    assert_eq!(node.receive(0, Message::Grant(grant)), [kept]);
    assert!(writes(&dropped(&mut node, 2)));
    let mut node = start(true);
    for from in [2, 3, 4] {
        assert_eq!(dropped(&mut node, from), []);
    }
    let commands = node.receive(0, Message::Grant(grant));
    let install = Command::Install { page: PAGE, access: Access::Write, payload: Payload::Page, twin: true };
    assert!(commands.contains(&install) && commands.contains(&Command::Wake { page: PAGE }), "{commands:?}");
    let blamed = Command::Protest { peer: NodeId(4), reason: Protest::UnexpectedAcknowledgement };
    assert!(commands.contains(&blamed), "node 4 had no copy: {commands:?}");
    // Nobody who has not asked to write is told of copies.
    assert!(protests(&dropped(&mut start(false), 2), Protest::UnexpectedAcknowledgement));
}

#[test]
fn copies_that_nobody_can_have_are_refused() {
    let of = |nodes: &[u8]| nodes.iter().map(|node| NodeId(*node)).collect::<NodeSet>();
    let (read, write) = (read_grant(), write_grant());
    let handed_over = Grant { owner: true, ..read };
    let cases = [
        (true, true, Grant { copies: of(&[1, 2]), ..write }, "of this node itself"),
        (true, true, Grant { copies: of(&[0, 2]), ..write }, "of the owner that gave the page away"),
        (true, true, Grant { copies: of(&[2, 5]), ..write }, "of no member"),
        (true, false, Grant { copies: of(&[2]), ..handed_over }, "of a page that a reader gets"),
        (true, false, Grant { copies: of(&[2]), ..write }, "of a page that was only to be read"),
        (false, true, Grant { copies: of(&[2]), ..write }, "where the owner waits for them"),
    ];
    for (direct_acks, wants, grant, why) in cases {
        let mut node = One::new(1, Options { direct_acks, ..Options::default() });
        node.fault(wants);
        let commands = node.receive(0, Message::Grant(grant));
        assert!(protests(&commands, Protest::UnexpectedGrant) && commands.len() == 1, "{why}: {commands:?}");
    }
}

/// The membership changes while a writer waits for copies to be dropped: it has the page, and says so.
#[test]
fn a_writer_that_waits_for_copies_owns_the_page() {
    let mut node = One::new(1, Options { hold_ns: 0, ..Options::default() });
    node.fault(true);
    let view = view(66, &[0, 1, 2]);
    node.membership(0, Membership::Accept { view, round: 1 });
    // It was on its way.
    let copies = NodeSet::EMPTY.with(NodeId(2));
    node.receive(0, Message::Grant(Grant { copies, ..write_grant() }));
    let mut said_to_manager = Vec::new();
    for round in [1, 2] {
        for from in [0, 2] {
            said_to_manager.extend(said(&node.membership(from, Membership::Accept { view, round })));
        }
    }
    let pages = vec![vnuma_coherence::Holding { page: PAGE, owner: true }];
    let reported = (0, Membership::Holdings { epoch: view.epoch, pages, last: false });
    assert!(said_to_manager.contains(&reported), "{said_to_manager:?}");
    let epoch = view.epoch;
    for from in [0, 2] {
        node.membership(from, Membership::Holdings { epoch, pages: Vec::new(), last: true });
    }
    let pages = vec![vnuma_coherence::Entry { page: PAGE, copyset: copies }];
    node.membership(0, Membership::Directory { epoch, pages, last: true });
    node.membership(2, Membership::Directory { epoch, pages: Vec::new(), last: true });
    // The copy is dropped for the node's own write now.
    let commands = node.at(0, Event::Flush);
    let invalidate = Message::Notices(vec![Notice::Invalidate { page: PAGE, owner: NodeId(1) }]);
    assert_eq!(commands.iter().filter_map(Command::sends).collect::<Vec<_>>(), [(NodeId(2), &invalidate)]);
    let commands = node.in_epoch(66, 2, Message::Notices(vec![Notice::Invalidated { page: PAGE }]));
    assert!(commands.contains(&Command::Wake { page: PAGE }), "{commands:?}");
    assert_eq!(node.0.state(PAGE), State::Modified);
}

/// A copy is kept for the hold time, too, and dropped for one invalidation only. The next writer learns of it, or the owner.
#[test]
fn a_copy_is_held_and_dropped_once() {
    for (direct_acks, told) in [(true, 2), (false, 0)] {
        held_and_dropped(direct_acks, NodeId(told));
    }
}

fn held_and_dropped(direct_acks: bool, told: NodeId) {
    let options = Options { hold_ns: 100, batch_invalidations: false, direct_acks, ..Options::default() };
    let mut node = One::new(1, options);
    node.fault(false);
    node.receive(0, Message::Grant(read_grant()));
    let invalidate = Message::Notices(vec![Notice::Invalidate { page: PAGE, owner: NodeId(2) }]);
    assert_eq!(node.receive(0, invalidate.clone()), [Command::SetTimer { page: PAGE, at_ns: 100 }]);
    assert_eq!(node.0.state(PAGE), State::Shared);
    assert!(protests(&node.receive(0, invalidate), Protest::UnexpectedInvalidation));
    // The thread that has read wants to write: it has used the copy.
    let commands = node.fault(true);
    let acknowledged = |command: &Command| matches!(command.sends(), Some((to, Message::Notices(notices))) if to == told && *notices == [Notice::Invalidated { page: PAGE }]);
    assert!(commands.iter().any(acknowledged), "{commands:?}");
    // And its request goes to the next owner.
    let asks = |command: &Command| matches!(command.sends(), Some((NodeId(2), Message::Request(_))));
    assert!(commands.iter().any(asks), "{commands:?}");
}

/// A node that has never had the page has no content that a difference could start from.
#[test]
fn a_requester_without_content_gets_the_page() {
    let mut node = One::new(0, Options::default());
    let request = Request { page: PAGE, requester: NodeId(2), purpose: Purpose::Read, have: 0 };
    let payload = |commands: Vec<Command>| {
        commands.iter().find_map(|command| match command.sends() {
            Some((_, Message::Grant(grant))) => Some(grant.payload),
            _ => None,
        })
    };
    assert_eq!(payload(node.receive(2, Message::Request(request))), Some(Payload::Page));
    // Neither does one whose content is older than the one that this node started from.
    let mut node = One::new(0, Options { hold_ns: 0, ..Options::default() });
    node.fault(true);
    let read = |requester, have| Message::Request(Request { requester: NodeId(requester), have, ..request });
    assert_eq!(payload(node.receive(2, read(2, 1))), Some(Payload::Delta { base: 1 }));
    for (from, notice) in [(2, None), (2, Some(Notice::Invalidated { page: PAGE }))] {
        match notice {
            None => drop(node.fault(true)),
            Some(notice) => drop(node.receive(from, Message::Notices(vec![notice]))),
        }
    }
    assert_eq!(node.0.version(PAGE), 3);
    assert_eq!(payload(node.receive(3, read(3, 1))), Some(Payload::Page));
    assert_eq!(payload(node.receive(4, read(4, 2))), Some(Payload::Delta { base: 2 }));
}

#[test]
fn a_membership_that_does_not_follow_from_the_last_is_refused() {
    let accept = |view| Membership::Accept { view, round: 1 };
    let own = |epoch, members: &[u8]| view(epoch, members);
    let all = [0, 1, 2, 3, 4];
    let mut node = One::new(1, Options::default());
    let conflict = |epoch, members: &[u8]| vec![(2, Membership::Conflict { view: own(epoch, members) })];
    // Two of five, and without this node.
    assert_eq!(said(&node.membership(2, accept(own(66, &[1, 2])))), conflict(0, &all));
    assert_eq!(said(&node.membership(2, accept(own(66, &[0, 2, 3])))), conflict(0, &all));
    // Nothing is said about what is not newer.
    assert_eq!(node.membership(2, accept(own(0, &[0, 1, 2]))), []);
    // Accepted, and then no member may come back.
    assert_eq!(said(&node.membership(2, accept(own(66, &[0, 1, 2])))).len(), 2);
    assert_eq!(said(&node.membership(2, accept(own(130, &[0, 1, 2, 3])))), conflict(66, &[0, 1, 2]));
    // What the excluded node suspects does not count, what a member does, does.
    assert_eq!(node.membership(3, Membership::Suspect { node: NodeId(2) }), []);
    assert_eq!(
        node.membership(0, Membership::Suspect { node: NodeId(2) }),
        [Command::Stop { reason: StopReason::Minority }]
    );
}

#[test]
fn only_a_newer_membership_without_this_node_fences_it() {
    let mut node = One::new(1, Options::default());
    for (epoch, members) in [(0, &[0, 2, 3][..]), (66, &[0, 1, 2])] {
        assert_eq!(node.membership(2, Membership::Fenced { view: view(epoch, members) }), []);
    }
    let fenced = Membership::Fenced { view: view(66, &[0, 2, 3]) };
    assert_eq!(node.membership(2, fenced), [Command::Stop { reason: StopReason::Fenced }]);
}

/// Goes through a change of membership to nodes 0, 1 and 2, as node 1. Returns what the last message causes.
fn changed(node: &mut One) -> Vec<Command> {
    let view = view(66, &[0, 1, 2]);
    let messages = |epoch| {
        [
            Membership::Accept { view, round: 1 },
            Membership::Accept { view, round: 2 },
            Membership::Holdings { epoch, pages: Vec::new(), last: true },
            Membership::Directory { epoch, pages: Vec::new(), last: true },
        ]
    };
    let mut last = Vec::new();
    for (message, other) in messages(view.epoch).into_iter().zip(messages(Epoch(65))) {
        // Lists of another view do not count.
        if !matches!(other, Membership::Accept { .. }) {
            assert_eq!(node.membership(0, other.clone()), []);
            assert_eq!(node.membership(2, other), []);
        }
        for from in [0, 2] {
            assert_ne!(node.0.view(), view, "it waits for all");
            last = node.membership(from, message.clone());
        }
    }
    assert_eq!(node.0.view(), view);
    last
}

#[test]
fn frames_of_another_epoch_or_an_excluded_node_change_nothing() {
    let mut node = One::new(1, Options::default());
    node.fault(false);
    let commands = changed(&mut node);
    // An excluded node learns of it, and what a thread waits for is requested anew.
    let fenced = Membership::Fenced { view: view(66, &[0, 1, 2]) };
    assert_eq!(said(&commands), [(3, fenced.clone()), (4, fenced)]);
    let asks = |command: &Command| {
        matches!(
            command,
            Command::Send { to: NodeId(0), frame: Frame { epoch: Epoch(66), message: Message::Request(_) } }
        )
    };
    assert!(commands.iter().any(asks), "{commands:?}");
    let state = node.0.clone();
    assert_eq!(node.in_epoch(0, 0, Message::Grant(read_grant())), []);
    for message in
        [Message::Grant(read_grant()), Message::Membership(Membership::Suspect { node: NodeId(0) })]
    {
        let answer = node.in_epoch(66, 4, message);
        assert_eq!(said(&answer), [(4, Membership::Fenced { view: view(66, &[0, 1, 2]) })]);
    }
    assert_eq!(node.0, state);
    // What it waits for was asked for anew, and comes.
    let commands = node.in_epoch(66, 0, Message::Grant(read_grant()));
    assert!(commands.contains(&Command::Wake { page: PAGE }), "{commands:?}");
}

/// Contents that were on their way when a membership changes arrive before the pages are counted, and not after.
#[test]
fn contents_are_taken_until_the_pages_are_counted() {
    for (round, taken) in [(1, true), (2, false)] {
        let mut node = One::new(1, Options::default());
        node.fault(false);
        for from in [0, 2] {
            for round in 1..=round {
                let view = view(66, &[0, 1, 2]);
                node.membership(from, Membership::Accept { view, round });
            }
        }
        // A member that the next view leaves out is too late in any case.
        assert_eq!(node.receive(4, Message::Grant(Grant { from: NodeId(4), ..read_grant() })), []);
        let commands = node.receive(0, Message::Grant(read_grant()));
        assert_eq!(commands.contains(&Command::Wake { page: PAGE }), taken, "round {round}: {commands:?}");
    }
}

#[test]
fn a_frame_of_the_next_membership_waits_for_it() {
    let mut node = One::new(1, Options::default());
    node.fault(false);
    node.receive(0, Message::Grant(write_grant()));
    let view = view(66, &[0, 1, 2]);
    node.membership(0, Membership::Accept { view, round: 1 });
    let request = Request { page: PAGE, requester: NodeId(2), purpose: Purpose::Read, have: 0 };
    assert_eq!(node.in_epoch(66, 2, Message::Request(request)), []);
    // Node 0 lets the page stay with the owner that it had.
    node.membership(2, Membership::Accept { view, round: 1 });
    let epoch = view.epoch;
    for message in
        [Membership::Accept { view, round: 2 }, Membership::Holdings { epoch, pages: Vec::new(), last: true }]
    {
        node.membership(0, message.clone());
        node.membership(2, message);
    }
    let pages = vec![vnuma_coherence::Entry { page: PAGE, copyset: NodeSet::EMPTY }];
    node.membership(0, Membership::Directory { epoch, pages, last: true });
    let commands = node.membership(2, Membership::Directory { epoch, pages: Vec::new(), last: true });
    let answers = |command: &Command| {
        matches!(command, Command::SendPage { to: NodeId(2), frame: Frame { epoch: Epoch(66), .. }, .. })
    };
    assert!(commands.iter().any(answers), "{commands:?}");
}

/// A notice belongs to the epoch in which it was made; here it is one for the node that is left out.
#[test]
fn what_was_held_back_is_not_sent_in_the_next_epoch() {
    let mut node = One::new(0, Options { hold_ns: 0, ..Options::default() });
    let request = Request { page: PAGE, requester: NodeId(4), purpose: Purpose::Read, have: 0 };
    node.receive(4, Message::Request(request));
    node.fault(true);
    assert!(node.0.needs_flush());
    node.at(0, Event::Suspect { node: NodeId(4) });
    assert!(!node.0.needs_flush());
}

#[test]
fn what_two_memberships_have_in_common_may_win() {
    let conflict = |other| {
        let mut node = One::new(1, Options::default());
        assert_eq!(node.membership(2, Membership::Conflict { view: other }), [], "nothing is proposed");
        node.membership(2, Membership::Accept { view: view(66, &[0, 1, 2, 3]), round: 1 });
        node.membership(2, Membership::Conflict { view: other })
    };
    assert_eq!(conflict(view(130, &[0, 2, 3, 4])), [Command::Stop { reason: StopReason::Fenced }]);
    assert_eq!(conflict(view(130, &[0, 1, 4])), [Command::Stop { reason: StopReason::Minority }]);
    // As many members, of an older epoch: this one's holds.
    assert_eq!(conflict(view(65, &[0, 1, 2, 3])), []);
    let proposed = |commands: Vec<Command>| {
        said(&commands).into_iter().find_map(|(_, message)| match message {
            Membership::Accept { view, round: 1 } => Some(view),
            _ => None,
        })
    };
    // Newer than both, and this node's.
    assert_eq!(proposed(conflict(view(130, &[0, 1, 2, 3, 4]))), Some(view(193, &[0, 1, 2, 3])));
    assert_eq!(proposed(conflict(view(65, &[0, 1, 2, 4]))), Some(view(129, &[0, 1, 2])));
}

/// A node that hears of an owner with an older content keeps its own pointer.
#[test]
fn an_old_owner_is_no_hint() {
    let mut node = One::new(0, Options { hold_ns: 0, ..Options::default() });
    let request = |requester| {
        let purpose = Purpose::Write;
        Message::Request(Request { page: PAGE, requester: NodeId(requester), purpose, have: 1 })
    };
    node.receive(1, request(1));
    let forwarded = |commands: Vec<Command>| commands.iter().find_map(|command| Some(command.sends()?.0));
    for (version, to) in [(0, 1), (9, 2)] {
        let mut node = One(node.0.clone());
        assert_eq!(node.receive(2, Message::OwnerIs { page: PAGE, owner: NodeId(2), version }), []);
        assert_eq!(forwarded(node.receive(3, request(3))), Some(NodeId(to)), "version {version}");
    }
}

/// A page whose content is in a cut changes by a new version only.
#[test]
fn a_page_is_write_protected_for_a_cut() {
    let mut node = One::new(0, Options { hold_ns: 0, ..Options::default() });
    node.fault(true);
    node.at(0, Event::Fault { page: PageId(1), write: false });
    let mut commands = Vec::new();
    assert_eq!(node.0.owned_for_cut(&mut commands), [(PAGE, 2)]);
    assert_eq!(commands, [Command::SetAccess { page: PAGE, access: Access::Read, twin: false }]);
    assert_eq!(node.0.state(PAGE), State::Shared);
    // Again without a write: nothing is to be done, and the version is the same.
    assert_eq!((node.0.owned_for_cut(&mut commands), commands.len()), (vec![(PAGE, 2)], 1));
    node.fault(true);
    assert_eq!(node.0.owned_for_cut(&mut commands), [(PAGE, 3)]);
}

/// A lost page is asked for once.
#[test]
fn a_page_that_is_lost_stays_lost() {
    let mut node = One::new(1, Options::default());
    node.fault(false);
    assert_eq!(node.receive(0, Message::Lost { page: PAGE }), [Command::Poison { page: PAGE }]);
    assert_eq!(node.fault(true), [Command::Poison { page: PAGE }]);
    let request = Request { page: PAGE, requester: NodeId(2), purpose: Purpose::Read, have: 0 };
    let answer = node.receive(2, Message::Request(request));
    assert_eq!(
        answer.iter().filter_map(Command::sends).collect::<Vec<_>>(),
        [(NodeId(2), &Message::Lost { page: PAGE })]
    );
}
