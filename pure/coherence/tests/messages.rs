//! Messages of each access, against the counts of GiantVM's section 3.3.1.

mod common;

use common::{Cluster, check};
use vnuma_coherence::{
    Access, Command, Epoch, Event, Frame, Grant, Managers, Message, Node, NodeId, NodeSet, Notice, Options,
    PageId, Payload, Purpose, Request,
};

/// Three nodes and one page that node 0 manages.
fn three(options: Options) -> Cluster {
    let managers = Managers::new(&[(1, NodeId(0))]).unwrap();
    Cluster::new(3, &managers, options)
}

/// Requests and grants, without invalidations; then the grant's payload.
fn count(messages: &[Message]) -> (usize, Option<Payload>) {
    let counts = |message: &&Message| matches!(message, Message::Request(_) | Message::Grant(_));
    let payload = messages.iter().rev().find_map(|message| match message {
        Message::Grant(grant) => Some(grant.payload),
        _ => None,
    });
    (messages.iter().filter(counts).count(), payload)
}

fn invalidations(messages: &[Message]) -> usize {
    messages.iter().filter(|message| matches!(message, Message::Notices(notices) if matches!(notices[..], [Notice::Invalidate { .. }]))).count()
}

#[test]
fn ivy_takes_two_messages_from_the_manager_and_four_from_another_owner() {
    let page = Some(Payload::Page);
    let mut cluster = three(Options::ivy());
    assert_eq!(count(&cluster.settle(1, 0, false)), (2, page), "read-owner");
    assert_eq!(count(&cluster.settle(2, 0, true)), (2, page), "write-owner");
    // Node 2 owns it now, node 0 manages it.
    assert_eq!(count(&cluster.settle(1, 0, false)), (4, page), "read-nonowner");
    let messages = cluster.settle(1, 0, true);
    assert_eq!(count(&messages), (4, page), "write-nonowner, with data though the copy was current");
    assert_eq!(invalidations(&messages), 0, "the old owner itself is no copy to be invalidated by a message");
    // The manager itself asks the owner.
    assert_eq!(count(&cluster.settle(0, 0, false)), (2, page));
    assert_eq!(count(&cluster.settle(2, 0, false)), (4, page));
    // The owner writes: only invalidations.
    let messages = cluster.settle(1, 0, true);
    assert_eq!((count(&messages), invalidations(&messages), messages.len()), ((0, None), 2, 4));
    assert_eq!(cluster.wrong, Vec::<String>::new());
    check(&cluster.memory, &[3], |_| true).unwrap();
}

#[test]
fn ivy_invalidates_the_other_holders_from_the_old_owner() {
    let mut cluster = three(Options::ivy());
    cluster.settle(1, 0, false);
    let messages = cluster.settle(2, 0, true);
    assert_eq!((count(&messages).0, invalidations(&messages), messages.len()), (2, 1, 4));
}

/// What one message waits for the other counts, not their number.
#[test]
fn a_writer_waits_for_copies_itself() {
    let run = |options: Options, readers: &[usize]| {
        let mut cluster = three(Options { hold_ns: 0, ..options });
        cluster.settle(2, 0, true);
        for reader in readers {
            cluster.settle(*reader, 0, false);
        }
        let outcome = cluster.turns(1, 0, true);
        assert_eq!(cluster.wrong, Vec::<String>::new());
        check(&cluster.memory, &[2], |_| true).unwrap();
        outcome
    };
    let direct = Options { migratory: false, tell_owners: false, ..Options::default() };
    let by_owner = Options { direct_acks: false, ..direct };
    assert_eq!(run(Options::ivy(), &[1, 0]), (6, 6), "request twice, invalidation and answer, grant twice");
    assert_eq!(run(by_owner, &[1, 0]), (4, 4), "request, invalidation, answer, grant");
    assert_eq!(run(direct, &[1, 0]), (3, 4), "request, then invalidation and grant, answer");
    assert_eq!(
        run(Options { direct_acks: true, ..Options::ivy() }, &[1, 0]),
        (4, 6),
        "they come with the grant"
    );
    // Also if the writer had no copy: then the content comes before it may be used.
    assert_eq!(run(direct, &[0]), (4, 5), "its hint is the manager");
    // Nobody else has a copy.
    assert_eq!(run(direct, &[1]), (2, 2));
}

#[test]
fn a_direct_reply_takes_three_messages() {
    let mut cluster = three(Options { direct_reply: true, ..Options::ivy() });
    cluster.settle(2, 0, true);
    assert_eq!(count(&cluster.settle(1, 0, false)).0, 3);
    assert_eq!(count(&cluster.settle(1, 0, true)).0, 3);
}

/// It may become the owner: what it forwarded until it knows could come back to it.
#[test]
fn who_waits_for_a_page_that_may_migrate_forwards_nothing() {
    for (migratory, forwarded) in [(true, 0), (false, 1)] {
        let mut cluster = three(Options { migratory, ..Options::default() });
        cluster.event(1, 0, Event::Fault { page: PageId(0), write: false });
        let request = Request { page: PageId(0), requester: NodeId(2), purpose: Purpose::Write, have: 0 };
        let frame = Frame { epoch: Epoch(0), message: Message::Request(request) };
        let commands = cluster.event(1, 0, Event::Receive { from: NodeId(2), frame });
        assert_eq!(commands.iter().filter(|command| command.sends().is_some()).count(), forwarded);
    }
}

#[test]
fn a_hint_takes_two_messages_and_a_wrong_one_three() {
    let hints = Options { direct_reply: true, owner_hints: true, ..Options::ivy() };
    let mut cluster = three(hints);
    cluster.settle(2, 0, true);
    assert_eq!(count(&cluster.settle(1, 0, true)).0, 3, "the first hint is the manager");
    assert_eq!(count(&cluster.settle(2, 0, true)).0, 2, "hit");
    assert_eq!(count(&cluster.settle(1, 0, false)).0, 2, "hit");
    // The manager's pointer is at node 1, which was the owner when it last forwarded.
    assert_eq!(count(&cluster.settle(0, 0, true)).0, 3, "miss: node 1 knows the owner");
}

#[test]
fn nodes_that_had_a_page_know_who_gets_it() {
    let news = |message: &&Message| matches!(message, Message::OwnerIs { .. });
    let run = |tell_owners, nodes: [usize; 3]| {
        let options = Options { direct_reply: true, owner_hints: true, tell_owners, ..Options::ivy() };
        let mut cluster = Cluster::new(4, &Managers::new(&[(1, NodeId(0))]).unwrap(), options);
        let turn = |turn: usize| {
            let messages = cluster.settle(nodes[turn % 3], 0, true);
            (count(&messages).0, messages.iter().filter(news).count())
        };
        let turns: Vec<_> = (0..10).map(turn).collect();
        assert_eq!(cluster.wrong, Vec::<String>::new());
        turns[4..].to_vec()
    };
    assert_eq!(run(true, [1, 2, 3]), [(2, 1); 6], "each finds the owner at once");
    let by_hints = [(2, 0), (3, 0)].repeat(3);
    assert_eq!(run(false, [1, 2, 3]), by_hints, "each second hint is wrong");
    // Nobody else wants it: nobody is told.
    assert_eq!(run(true, [1, 2, 1])[..1], [(2, 0)]);
}

#[test]
fn an_upgrade_takes_no_data() {
    let mut cluster = three(Options { upgrade_without_data: true, ..Options::ivy() });
    cluster.settle(2, 0, true);
    assert_eq!(count(&cluster.settle(1, 0, false)).1, Some(Payload::Page));
    assert_eq!(count(&cluster.settle(1, 0, true)), (4, Some(Payload::None)));
    assert_eq!(count(&cluster.settle(2, 0, true)).1, Some(Payload::Page), "its copy is older");
    // A first touch takes no data either: all memory starts equal.
    let mut cluster = three(Options { upgrade_without_data: true, ..Options::ivy() });
    assert_eq!(count(&cluster.settle(1, 0, true)), (2, Some(Payload::None)));
}

#[test]
fn a_difference_goes_to_a_node_whose_copy_the_owner_started_from() {
    let mut cluster = three(Options { deltas: true, ..Options::ivy() });
    cluster.settle(1, 0, true);
    let delta = |message: &Message| matches!(message, Message::Grant(grant) if matches!(grant.payload, Payload::Delta { .. }));
    for turn in 0..6 {
        let messages = cluster.settle(2 - turn % 2, 0, true);
        // Node 1 wrote on top of the first content, which node 2 has.
        assert!(messages.iter().any(delta), "turn {turn}: {messages:?}");
    }
    let messages = cluster.settle(0, 0, false);
    assert!(!messages.iter().any(delta), "node 0 has the first content only: {messages:?}");
    assert_eq!(cluster.wrong, Vec::<String>::new());
    check(&cluster.memory, &[7], |_| true).unwrap();
}

#[test]
fn a_migratory_page_is_handed_over_at_the_read_and_stops_when_it_is_not_written() {
    let migratory = Options { migratory: true, owner_hints: true, direct_reply: true, ..Options::ivy() };
    let mut cluster = three(migratory);
    let turn = |cluster: &mut Cluster, node| {
        let read = cluster.settle(node, 0, false).len();
        (read, cluster.settle(node, 0, true).len())
    };
    let turns: Vec<_> = (0..12).map(|index| turn(&mut cluster, 1 + index % 2)).collect();
    assert_eq!(turns[1], (3, 2), "two transactions at first");
    let single = turns[2..].iter().filter(|(_, write)| *write == 0).count();
    assert_eq!(single, 10, "then one: {turns:?}");
    // From now on all nodes read only.
    for _ in 0..8 {
        for node in 0..3 {
            cluster.settle(node, 0, false);
        }
    }
    let readers = cluster.memory.iter().filter(|cells| cells[0].access == Access::Read).count();
    assert_eq!(readers, 3, "the page is shared again");
    assert_eq!(cluster.wrong, Vec::<String>::new());
}

#[test]
fn a_sequential_reader_has_the_next_pages_before_it_faults_on_them() {
    let options = Options { prefetch_pages: 8, ..Options::ivy() };
    let managers = Managers::new(&[(64, NodeId(0))]).unwrap();
    let mut cluster = Cluster::new(2, &managers, options);
    let faults = (0..64).filter(|page| !cluster.settle(1, *page, false).is_empty()).count();
    assert_eq!(faults, 10, "1, 1 + 2, 1 + 4, then 1 + 8 at a time");
    let mut cluster = Cluster::new(2, &managers, Options::ivy());
    assert_eq!((0..64).filter(|page| !cluster.settle(1, *page, false).is_empty()).count(), 64);
}

#[test]
fn a_prefetch_stays_within_its_block() {
    let options = Options { prefetch_pages: 8, prefetch_within: 6, ..Options::ivy() };
    let managers = Managers::new(&[(64, NodeId(0))]).unwrap();
    let mut cluster = Cluster::new(2, &managers, options);
    for page in [1, 2, 5] {
        assert!(!cluster.settle(1, page, false).is_empty(), "page {page} was not there yet");
    }
    let there: Vec<_> = (0..64).filter(|page| cluster.memory[1][*page].access == Access::Read).collect();
    assert_eq!(there, [1, 2, 3, 4, 5]);
}

#[test]
fn a_prefetch_does_not_disturb_an_owner_that_holds_the_page() {
    let options = Options { prefetch_pages: 8, hold_ns: 1, ..Options::ivy() };
    let managers = Managers::new(&[(4, NodeId(0))]).unwrap();
    let mut cluster = Cluster::new(2, &managers, options);
    cluster.settle(1, 0, false);
    // Node 0 just got page 2 and has not used it yet.
    cluster.event(0, 0, Event::Fault { page: PageId(2), write: true });
    let messages = cluster.settle(1, 1, false);
    assert!(messages.contains(&Message::Refuse { page: PageId(2) }), "{messages:?}");
    assert_eq!(cluster.memory[0][2].access, Access::Write);
    assert_eq!(cluster.memory[1][3].access, Access::Read);
}

#[test]
fn a_page_is_held_until_its_thread_made_progress() {
    let mut cluster = three(Options { hold_ns: 100, ..Options::ivy() });
    cluster.event(0, 0, Event::Fault { page: PageId(0), write: true });
    cluster.event(1, 0, Event::Fault { page: PageId(0), write: true });
    let commands = cluster.deliver(1, 0, 10);
    assert_eq!(commands, [Command::SetTimer { page: PageId(0), at_ns: 100 }], "not yet");
    assert!(
        cluster
            .event(0, 99, Event::Timer { page: PageId(0) })
            .contains(&Command::SetTimer { page: PageId(0), at_ns: 100 })
    );
    let commands = cluster.event(0, 100, Event::Timer { page: PageId(0) });
    assert!(matches!(commands[..], [Command::SendPage { access: Access::None, .. }]), "{commands:?}");
    // Without it the page leaves at once.
    let mut cluster = three(Options::ivy());
    cluster.event(0, 0, Event::Fault { page: PageId(0), write: true });
    cluster.event(1, 0, Event::Fault { page: PageId(0), write: true });
    assert!(matches!(cluster.deliver(1, 0, 10)[..], [Command::SendPage { .. }]));
}

/// A reader may become the owner of a migratory page: what reaches it meanwhile waits for it. If it passed requests on to the
/// owner that hands the page over, they would come back, and go round until the page is there.
#[test]
fn a_reader_that_may_become_the_owner_keeps_requests() {
    let managers = Managers::new(&[(1, NodeId(0))]).unwrap();
    let sent = |commands: &[Command]| {
        commands
            .iter()
            .filter_map(|command| command.sends().map(|(to, message)| (to, message.clone())))
            .collect::<Vec<_>>()
    };
    for migratory in [true, false] {
        let options = Options { migratory, hold_ns: 0, ..Options::default() };
        let mut node = Node::new(NodeId(1), NodeSet::first(3), managers.clone(), options);
        let mut step = |event| {
            let mut commands = Vec::new();
            node.step(0, event, &mut commands);
            commands
        };
        let receive = |from, message| Event::Receive { from, frame: Frame { epoch: Epoch(0), message } };
        let page = PageId(0);
        assert_eq!(sent(&step(Event::Fault { page, write: false })).len(), 1);
        let request = Request { page, requester: NodeId(2), purpose: Purpose::Write, have: 0 };
        let passed_on = sent(&step(receive(NodeId(2), Message::Request(request))));
        assert_eq!(passed_on.is_empty(), migratory, "{passed_on:?}");
        if migratory {
            let grant = Grant {
                page,
                to: NodeId(1),
                access: Access::Write,
                owner: true,
                from: NodeId(0),
                version: 5,
                payload: Payload::Page,
                migratory: 2,
                before: None,
                copies: NodeSet::EMPTY,
            };
            let answers = sent(&step(receive(NodeId(0), Message::Grant(grant))));
            let answered = |(to, message): &(NodeId, Message)| {
                *to == NodeId(2)
                    && matches!(message, Message::Grant(grant) if grant.owner && grant.to == NodeId(2))
            };
            assert!(answers.iter().any(answered), "{answers:?}");
        }
    }
}

#[test]
fn invalidations_of_many_pages_share_a_message() {
    let run = |batch_invalidations| {
        let options = Options { batch_invalidations, ..Options::ivy() };
        let managers = Managers::new(&[(8, NodeId(0))]).unwrap();
        let mut cluster = Cluster::new(2, &managers, options);
        for page in 0..8 {
            cluster.settle(1, page, false);
        }
        // Eight threads of node 0 fault, and then there is nothing to do but to flush.
        for page in 0..8 {
            cluster.event(0, 0, Event::Fault { page: PageId(page), write: true });
        }
        let mut messages = Vec::new();
        let before = cluster.sent;
        cluster.drain(&mut messages);
        assert!(cluster.memory[0].iter().all(|cell| cell.access == Access::Write));
        (messages.len(), cluster.sent - before)
    };
    assert_eq!(run(true).0, 2, "eight invalidations, eight acknowledgements");
    assert_eq!(run(false).0, 8, "only the acknowledgements are left to be sent");
}

#[test]
fn what_no_peer_may_send_is_refused() {
    use vnuma_coherence::{Epoch, Frame, Grant, Protest, Request};
    let mut cluster = three(Options::default());
    let request = Request { page: PageId(0), requester: NodeId(1), purpose: Purpose::Read, have: 0 };
    let grant = Grant {
        page: PageId(0),
        to: NodeId(0),
        access: Access::Write,
        owner: true,
        from: NodeId(1),
        version: 9,
        payload: Payload::Page,
        migratory: 0,
        before: None,
        copies: NodeSet::EMPTY,
    };
    let cases = [
        (1, Message::Request(Request { page: PageId(1), ..request }), Protest::NoSuchPage),
        (1, Message::Request(Request { requester: NodeId(7), ..request }), Protest::NoMember),
        (9, Message::Request(request), Protest::NoMember),
        (1, Message::Grant(grant), Protest::UnexpectedGrant),
        (1, Message::Grant(Grant { to: NodeId(2), ..grant }), Protest::UnexpectedGrant),
        (
            1,
            Message::Notices(vec![Notice::Invalidated { page: PageId(0) }]),
            Protest::UnexpectedAcknowledgement,
        ),
        (
            1,
            Message::Notices(vec![Notice::Invalidate { page: PageId(0), owner: NodeId(1) }]),
            Protest::UnexpectedInvalidation,
        ),
        (1, Message::Refuse { page: PageId(0) }, Protest::UnexpectedAnswer),
        (1, Message::Lost { page: PageId(0) }, Protest::UnexpectedAnswer),
    ];
    for (peer, message, reason) in cases {
        let frame = Frame { epoch: Epoch(0), message };
        let event = Event::Receive { from: NodeId(peer), frame };
        let commands = cluster.event(0, 0, event.clone());
        assert_eq!(commands, [Command::Protest { peer: NodeId(peer), reason }], "{event:?}");
    }
}

/// A frame has room for so many, and a peer refuses one that is longer.
#[test]
fn notices_that_are_too_many_for_a_message_are_divided() {
    let pages = 2500;
    let managers = Managers::new(&[(pages, NodeId(0))]).unwrap();
    let mut node = Node::new(NodeId(0), NodeSet::first(2), managers, Options::default());
    let mut commands = Vec::new();
    for page in (0..pages).map(PageId) {
        let request = Request { page, requester: NodeId(1), purpose: Purpose::Read, have: 0 };
        let frame = Frame { epoch: Epoch(0), message: Message::Request(request) };
        node.step(0, Event::Receive { from: NodeId(1), frame }, &mut commands);
    }
    for page in (0..pages).map(PageId) {
        node.step(0, Event::Fault { page, write: true }, &mut commands);
    }
    commands.clear();
    node.step(0, Event::Flush, &mut commands);
    let lengths = commands.iter().filter_map(Command::sends).map(|sent| match sent {
        (NodeId(1), Message::Notices(notices)) => notices.len(),
        other => panic!("{other:?}"),
    });
    assert_eq!(lengths.collect::<Vec<_>>(), [1024, 1024, 452]);
}
