//! A member that sends whatever its connection permits: the others neither panic nor keep any amount of it.

use proptest::prelude::*;
use vnuma_coherence::{
    Access, CUTS_AHEAD, Command, Cut, Cuts, Entry, Epoch, Event, Frame, Grant, Holding, Managers, Membership,
    Message, Node, NodeId, NodeSet, Notice, Options, PageId, Payload, Protest, Purpose, Request,
    VERSION_MOST, View,
};

const NODES: u8 = 5;
const PAGES: u64 = 4;

fn managers() -> Managers {
    Managers::new(&[(2, NodeId(0)), (2, NodeId(1))]).expect("ranges")
}

fn node(own: u8, options: Options) -> Node {
    Node::new(NodeId(own), NodeSet::first(NODES.into()), managers(), options)
}

/// Mostly pages that exist.
fn page() -> impl Strategy<Value = PageId> {
    prop_oneof![9 => 0..PAGES, 1 => any::<u64>()].prop_map(PageId)
}

/// Mostly nodes that exist.
fn name() -> impl Strategy<Value = NodeId> {
    prop_oneof![9 => 0..NODES, 1 => any::<u8>()].prop_map(NodeId)
}

/// Small numbers, and those at the ends.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..5_u64,
        2 => 60..200_u64,
        1 => (0..4_u64).prop_map(|less| u64::MAX - less),
        1 => (0..4_u64).prop_map(|less| VERSION_MOST + 1 - less),
        1 => any::<u64>()
    ]
}

fn nodes() -> impl Strategy<Value = NodeSet> {
    prop_oneof![8 => 0..1_u64 << NODES, 1 => any::<u64>()].prop_map(NodeSet::from_bits)
}

fn view() -> impl Strategy<Value = View> {
    (number(), nodes()).prop_map(|(epoch, members)| View { epoch: Epoch(epoch), members })
}

fn grant() -> impl Strategy<Value = Message> {
    let access = prop_oneof![Just(Access::None), Just(Access::Read), Just(Access::Write)];
    let payload = prop_oneof![
        Just(Payload::None),
        Just(Payload::Page),
        number().prop_map(|base| Payload::Delta { base })
    ];
    let copies = prop_oneof![2 => Just(NodeSet::EMPTY), 1 => nodes()];
    let ends = (proptest::option::of(name()), copies);
    let rest = (any::<bool>(), prop_oneof![0..4_u8, any::<u8>()], number(), ends);
    (page(), name(), name(), access, payload, rest).prop_map(|(page, to, from, access, payload, rest)| {
        let (owner, migratory, version, (before, copies)) = rest;
        Message::Grant(Grant { page, to, access, owner, from, version, payload, migratory, before, copies })
    })
}

fn membership() -> impl Strategy<Value = Message> {
    let holding = (page(), any::<bool>()).prop_map(|(page, owner)| Holding { page, owner });
    let entry = (page(), nodes()).prop_map(|(page, copyset)| Entry { page, copyset });
    prop_oneof![
        name().prop_map(|node| Membership::Suspect { node }),
        (view(), 0..4_u8).prop_map(|(view, round)| Membership::Accept { view, round }),
        view().prop_map(|view| Membership::Conflict { view }),
        (number(), proptest::collection::vec(holding, 0..4), any::<bool>())
            .prop_map(|(epoch, pages, last)| Membership::Holdings { epoch: Epoch(epoch), pages, last }),
        (number(), proptest::collection::vec(entry, 0..4), any::<bool>())
            .prop_map(|(epoch, pages, last)| Membership::Directory { epoch: Epoch(epoch), pages, last }),
        view().prop_map(|view| Membership::Fenced { view }),
    ]
    .prop_map(Message::Membership)
}

fn notice() -> impl Strategy<Value = Notice> {
    prop_oneof![
        (page(), name()).prop_map(|(page, owner)| Notice::Invalidate { page, owner }),
        page().prop_map(|page| Notice::Invalidated { page }),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let purpose = prop_oneof![Just(Purpose::Read), Just(Purpose::Write), Just(Purpose::Prefetch)];
    let request = (page(), name(), purpose, number()).prop_map(|(page, requester, purpose, have)| Request {
        page,
        requester,
        purpose,
        have,
    });
    prop_oneof![
        3 => request.prop_map(Message::Request),
        3 => grant(),
        2 => membership(),
        1 => page().prop_map(|page| Message::Refuse { page }),
        2 => notice().prop_map(|notice| Message::Notices(vec![notice])),
        1 => proptest::collection::vec(notice(), 0..4).prop_map(Message::Notices),
        1 => (page(), name(), number())
            .prop_map(|(page, owner, version)| Message::OwnerIs { page, owner, version }),
        1 => page().prop_map(|page| Message::Lost { page }),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let frame = (number(), message()).prop_map(|(epoch, message)| Frame { epoch: Epoch(epoch), message });
    prop_oneof![
        6 => (name(), frame).prop_map(|(from, frame)| Event::Receive { from, frame }),
        2 => (page(), any::<bool>()).prop_map(|(page, write)| Event::Fault { page, write }),
        1 => page().prop_map(|page| Event::Timer { page }),
        1 => page().prop_map(|page| Event::Progress { page }),
        1 => name().prop_map(|node| Event::Suspect { node }),
        1 => Just(Event::Flush),
    ]
}

/// What a node has kept, as text: there is no other way to see all of it.
fn size(node: &Node) -> usize {
    format!("{node:?}").len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("VNUMA_SOAK_ROUNDS").map_or(400, |_| 100_000)
    ))]

    /// In a build for tests an overflow panics, and so does a message to itself.
    #[test]
    fn nothing_that_a_member_sends_makes_a_node_panic(
        own in 0..NODES,
        ivy: bool,
        direct: bool,
        events in proptest::collection::vec((number(), event()), 1..120),
    ) {
        let options = if ivy {
            Options { direct_reply: direct, ..Options::ivy() }
        } else {
            Options { direct_reply: direct, ..Options::default() }
        };
        let mut node = node(own, options);
        let mut commands = Vec::new();
        for (now, event) in events {
            commands.clear();
            node.step(now, event, &mut commands);
            for command in &commands {
                let sent = command.sends();
                let foreign = sent.is_some_and(|(to, _)| to.0 >= NODES || to.0 == own);
                prop_assert!(!foreign, "{:?}", command);
            }
        }
        prop_assert!(size(&node) < 60_000, "{:?}", node);
    }
}

fn receive(node: &mut Node, from: u8, epoch: u64, message: Message) -> Vec<Command> {
    let mut commands = Vec::new();
    let frame = Frame { epoch: Epoch(epoch), message };
    node.step(0, Event::Receive { from: NodeId(from), frame }, &mut commands);
    commands
}

fn protest(commands: &[Command]) -> Option<(u8, Protest)> {
    commands.iter().find_map(|command| match command {
        Command::Protest { peer, reason } => Some((peer.0, *reason)),
        _ => None,
    })
}

fn request(requester: u8) -> Message {
    let requester = NodeId(requester);
    Message::Request(Request { page: PageId(0), requester, purpose: Purpose::Read, have: 0 })
}

#[test]
fn one_request_of_each_requester_waits_for_a_page() {
    let mut node = node(0, Options::default());
    let mut commands = Vec::new();
    node.step(0, Event::Fault { page: PageId(0), write: true }, &mut commands);
    assert_eq!(protest(&receive(&mut node, 1, 0, request(1))), None);
    assert_eq!(protest(&receive(&mut node, 2, 0, request(2))), None);
    let before = size(&node);
    let again = receive(&mut node, 1, 0, request(1));
    assert_eq!(protest(&again), Some((1, Protest::UnexpectedRequest)));
    // Who forwards it is not blamed.
    assert_eq!(protest(&receive(&mut node, 3, 0, request(1))), None);
    assert_eq!(size(&node), before);
}

#[test]
fn numbers_that_nobody_reaches_are_refused() {
    let view = |epoch| View { epoch: Epoch(epoch), members: NodeSet::first(4) };
    for message in [
        Membership::Accept { view: view(u64::MAX), round: 1 },
        Membership::Conflict { view: view(1 << 56) },
        Membership::Accept { view: view(Epoch::AHEAD + 1), round: 1 },
    ] {
        let mut node = node(1, Options::default());
        receive(&mut node, 2, 0, Message::Membership(Membership::Accept { view: view(0), round: 1 }));
        let commands = receive(&mut node, 2, 0, Message::Membership(message));
        assert_eq!(protest(&commands), Some((2, Protest::FarEpoch)));
    }
    let grant = Grant {
        page: PageId(0),
        to: NodeId(2),
        access: Access::Write,
        owner: true,
        from: NodeId(0),
        version: VERSION_MOST,
        payload: Payload::Page,
        migratory: 3,
        before: None,
        copies: NodeSet::EMPTY,
    };
    for (grant, refused) in [
        (grant, false),
        (Grant { version: VERSION_MOST + 1, ..grant }, true),
        (Grant { migratory: 4, ..grant }, true),
        (Grant { from: NodeId(1), ..grant }, true),
        (Grant { from: NodeId(2), ..grant }, true),
        (Grant { from: NodeId(64), ..grant }, true),
    ] {
        let mut node = node(2, Options::default());
        node.step(0, Event::Fault { page: PageId(0), write: true }, &mut Vec::new());
        let commands = receive(&mut node, 0, 0, Message::Grant(grant));
        assert_eq!(protest(&commands).is_some(), refused, "{grant:?}");
        // What this node makes of it can be sent on.
        assert!(node.version(PageId(0)) <= VERSION_MOST);
    }
}

#[test]
fn an_invalidation_for_ones_own_sake_is_refused() {
    let mut node = node(2, Options::default());
    let notice = Notice::Invalidate { page: PageId(0), owner: NodeId(2) };
    let commands = receive(&mut node, 0, 0, Message::Notices(vec![notice]));
    assert_eq!(protest(&commands), Some((0, Protest::UnexpectedInvalidation)));
}

/// Node 1 of five, after all have accepted that node 4 is lost.
fn changing() -> (Node, View) {
    let mut node = node(1, Options::default());
    let view = View { epoch: Epoch(64), members: NodeSet::first(4) };
    for round in [1, 2] {
        for from in [0, 2, 3] {
            receive(&mut node, from, 0, Message::Membership(Membership::Accept { view, round }));
        }
    }
    (node, view)
}

#[test]
fn lists_of_pages_have_what_belongs_there() {
    let (_, View { epoch, .. }) = changing();
    let holdings = |page, last| {
        let pages = vec![Holding { page: PageId(page), owner: true }];
        Message::Membership(Membership::Holdings { epoch, pages, last })
    };
    let directory = |page, copyset| {
        let pages = vec![Entry { page: PageId(page), copyset: NodeSet::from_bits(copyset) }];
        Message::Membership(Membership::Directory { epoch, pages, last: false })
    };
    let cases = [
        (2, holdings(2, false), None, "node 1 manages page 2"),
        (2, holdings(1, false), Some((2, Protest::UnexpectedPage)), "node 0 manages page 1"),
        (2, holdings(PAGES, false), Some((2, Protest::UnexpectedPage)), "there is no such page"),
        (4, holdings(2, false), None, "ignored: it is left out"),
        (0, directory(1, 0b1101), None, "node 0 manages page 1"),
        (0, directory(2, 0), Some((0, Protest::UnexpectedPage)), "node 1 manages page 2"),
        (0, directory(1, 0b10), Some((0, Protest::UnexpectedPage)), "a copy of the owner itself"),
        (0, directory(1, 0b1_0000), Some((0, Protest::UnexpectedPage)), "a copy of a lost node"),
        (0, directory(u64::MAX, 0), Some((0, Protest::UnexpectedPage)), "there is no such page"),
    ];
    for (from, message, expected, why) in cases {
        let (mut node, _) = changing();
        assert_eq!(protest(&receive(&mut node, from, 0, message)), expected, "{why}");
    }
    // The same page again takes no more room, and behind the last there is none.
    let (mut node, _) = changing();
    receive(&mut node, 0, 0, directory(1, 0));
    let before = size(&node);
    (0..10).for_each(|_| drop(receive(&mut node, 0, 0, directory(1, 0))));
    assert_eq!(size(&node), before);
    receive(&mut node, 2, 0, holdings(2, true));
    let commands = receive(&mut node, 2, 0, holdings(2, true));
    assert_eq!(protest(&commands), Some((2, Protest::UnexpectedPage)));
}

/// Node 4 is left out: nobody would tell it that it owns page 2.
#[test]
fn what_a_node_has_that_is_left_out_does_not_count() {
    let (mut node, View { epoch, .. }) = changing();
    let holdings = |owner| {
        let pages = vec![Holding { page: PageId(2), owner }];
        Message::Membership(Membership::Holdings { epoch, pages, last: true })
    };
    receive(&mut node, 4, 0, holdings(true));
    let mut commands = Vec::new();
    for from in [0, 2, 3] {
        commands = receive(&mut node, from, 0, holdings(false));
    }
    let directory = commands.iter().find_map(|command| match command.sends()? {
        (NodeId(0), Message::Membership(Membership::Directory { pages, .. })) if !pages.is_empty() => {
            Some(pages.clone())
        }
        _ => None,
    });
    let entry = Entry { page: PageId(2), copyset: NodeSet::from_bits(0b1100) };
    assert_eq!(directory, Some(vec![entry]), "{commands:?}");
}

#[test]
fn frames_of_the_next_membership_are_counted() {
    let (mut node, View { epoch, .. }) = changing();
    let notices = Message::Notices(vec![Notice::Invalidated { page: PageId(0) }; 1000]);
    let protests = |count: usize, node: &mut Node| {
        let mut all = (0..count).map(|_| receive(node, 2, epoch.0, notices.clone()));
        all.find_map(|commands| protest(&commands))
    };
    assert_eq!(protests(65, &mut node), None);
    assert_eq!(protests(1, &mut node), Some((2, Protest::TooMuch)));
    // Of each peer by itself.
    assert_eq!(protest(&receive(&mut node, 3, epoch.0, notices.clone())), None);
}

#[test]
fn only_a_member_fences() {
    let (mut node, view) = changing();
    for (from, page) in [(0, 2), (2, 2), (3, 2)] {
        let pages = vec![Holding { page: PageId(page), owner: false }];
        let message = Membership::Holdings { epoch: view.epoch, pages, last: true };
        receive(&mut node, from, 0, Message::Membership(message));
    }
    for from in [0, 2, 3] {
        let message = Membership::Directory { epoch: view.epoch, pages: Vec::new(), last: true };
        receive(&mut node, from, 0, Message::Membership(message));
    }
    assert_eq!(node.view(), view);
    let newer = View { epoch: Epoch(128), members: NodeSet::from_bits(0b1_1101) };
    let fenced = Message::Membership(Membership::Fenced { view: newer });
    receive(&mut node, 4, 0, fenced.clone());
    assert!(!node.is_stopped(), "node 4 is none any more");
    receive(&mut node, 0, 0, fenced);
    assert!(node.is_stopped());
}

#[test]
fn cuts_that_are_far_ahead_are_not_remembered() {
    let mut cuts = Cuts::new(NodeId(0), NodeSet::first(3), managers());
    let mut out = Vec::new();
    let size = |cuts: &Cuts| format!("{cuts:?}").len();
    for number in (0..1000).chain(u64::MAX - 10..=u64::MAX) {
        for message in [Cut::End { number }, Cut::Kept { number }] {
            cuts.receive(NodeId(1), message, &mut out);
        }
    }
    assert!(size(&cuts) < 1000, "{cuts:?}");
    // What one node may be ahead counts.
    for node in [1, 2] {
        (1..=CUTS_AHEAD).for_each(|number| cuts.receive(NodeId(node), Cut::End { number }, &mut out));
        cuts.receive(NodeId(node), Cut::Kept { number: 1 }, &mut out);
    }
    out.clear();
    cuts.begin(1, [], &mut out);
    assert!(out.contains(&vnuma_coherence::CutCommand::Complete { number: 1 }), "{out:?}");
}
