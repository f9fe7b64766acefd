//! What every transport does: order, back-pressure, the end.

mod common;

use common::{HANG, Meeting, Transport, all, anywhere, ending, hello, meet, pair, run};
use proptest::prelude::*;
use std::{
    cell::Cell,
    collections::BTreeMap,
    io::Write,
    net::{TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{
    Body, Contents, Entry, Epoch, Grant, HEADER, Hello, Membership, Message, NodeId, NodeSet, PAGE_SIZE,
    PageId, Payload, Purpose, Request,
};
use vnuma_dsm_transport::{Fault, Limits, Listener, Place, RING, Waiter, dial, mesh, wait};

fn grant(page: u64) -> Message {
    Message::Grant(Grant {
        page: PageId(page),
        to: NodeId(1),
        from: NodeId(0),
        access: vnuma_abi_dsm_wire::Access::Read,
        owner: false,
        migratory: 0,
        before: None,
        version: page,
        payload: Payload::Page,
        copies: NodeSet::EMPTY,
    })
}

#[test]
fn frames_arrive_in_order_and_whole() {
    const FRAMES: u64 = 3000;
    for transport in all() {
        let (mut zero, mut one) = pair(transport, Limits::default());
        let (mut sent, mut seen) = (0, 0);
        let mut pending = Vec::new();
        while seen < FRAMES {
            while sent < FRAMES && zero.has_room() {
                let page = [sent as u8; PAGE_SIZE];
                zero.send(&Body::Protocol(grant(sent), Contents::Page(&page)), 5).expect("sent");
                sent += 1;
            }
            zero.flush().expect("going");
            one.receive(|header, body| {
                assert_eq!(header.epoch, 5);
                let Body::Protocol(message, Contents::Page(page)) = body else { panic!("{body:?}") };
                assert_eq!(message, grant(seen), "{transport:?}");
                assert!(page.iter().all(|byte| *byte == seen as u8));
                seen += 1;
                pending.push(seen);
            })
            .expect("frames");
            for page in pending.drain(..) {
                one.send(&Body::Opaque(&page.to_le_bytes()), 5).expect("sent");
            }
            one.flush().expect("going");
            zero.receive(|_, _| {}).expect("answers");
        }
    }
}

/// Frames that are posted share system calls.
#[test]
fn posted_frames_wait_until_they_are_given_on() {
    for transport in all() {
        let (mut zero, mut one) = pair(transport, Limits::default());
        for number in 0..3 {
            zero.post(&Body::Opaque(&[number]), 0).expect("posted");
        }
        let waiting = zero.waiting();
        zero.give_on(waiting + 1).expect("nothing is due");
        assert!(waiting > 0 && zero.waiting() == waiting, "{transport:?}");
        let mut seen = Vec::new();
        let mut look = |one: &mut vnuma_dsm_transport::Lane| {
            one.receive(|_, body| {
                if let Body::Opaque(bytes) = body {
                    seen.extend_from_slice(bytes);
                }
            })
            .expect("frames");
            seen.clone()
        };
        assert_eq!(look(&mut one), [0_u8; 0], "{transport:?}");
        zero.give_on(waiting).expect("given on");
        zero.give_on(1).expect("nothing waits");
        let begin = Instant::now();
        while look(&mut one) != [0, 1, 2] {
            assert!(begin.elapsed() < HANG, "it hangs");
            wait(&mut [&mut one], &[], Duration::from_millis(5), Duration::ZERO).expect("poll");
        }
    }
}

/// The answer comes from a sleeping thread and goes to another one: no wake-up is lost.
#[test]
fn who_sleeps_is_woken() {
    for transport in all() {
        let limits = Limits { silence: HANG, ..Limits::default() };
        let (mut zero, mut one) = pair(transport, limits);
        let echo = thread::spawn(move || {
            let mut requests = Vec::new();
            loop {
                wait(&mut [&mut one], &[], HANG, Duration::ZERO).expect("poll");
                let outcome = one.receive(|_, body| {
                    if let Body::Opaque(bytes) = body {
                        requests.push(bytes.to_vec());
                    }
                });
                for bytes in requests.drain(..) {
                    one.send(&Body::Opaque(&bytes), 0).expect("sent");
                }
                match outcome {
                    Ok(_) => {}
                    Err(error) => return error,
                }
            }
        });
        let start = Instant::now();
        for round in 0..2000_u64 {
            zero.send(&Body::Opaque(&round.to_le_bytes()), 0).expect("sent");
            let mut answer = None;
            while answer.is_none() {
                assert!(start.elapsed() < HANG, "{transport:?}: nothing comes back in round {round}");
                let limit = Duration::from_secs(5);
                let ready = wait(&mut [&mut zero], &[], limit, Duration::ZERO).expect("poll");
                assert_eq!(ready.lanes, [0], "{transport:?}: not woken in round {round}");
                zero.receive(|_, body| {
                    if let Body::Opaque(bytes) = body {
                        answer = Some(bytes.to_vec());
                    }
                })
                .expect("going");
            }
            assert_eq!(answer.expect("an answer"), round.to_le_bytes());
        }
        zero.leave(0);
        let error = echo.join().expect("no panic");
        assert!(matches!(error.fault, Fault::Bye), "{transport:?}: {error}");
    }
}

/// The kernel keeps the list of a waiter, which follows when the list changes.
#[test]
fn a_waiter_sees_lanes_and_other_descriptors_in_their_places() {
    for transport in all() {
        let (mut zero, mut one) = pair(transport, Limits { silence: HANG, ..Limits::default() });
        let [first, second] = [(); 2].map(|()| std::io::pipe().expect("a pipe"));
        let mut waiter = Waiter::new().expect("epoll");
        let mut ready = |zero: &mut vnuma_dsm_transport::Lane, others: &[BorrowedFd<'_>]| {
            let ready =
                waiter.wait(&mut [zero], others, Duration::from_millis(50), Duration::ZERO).expect("epoll");
            (ready.lanes, ready.others)
        };
        let both = [first.0.as_fd(), second.0.as_fd()];
        assert_eq!(ready(&mut zero, &both), (vec![], vec![]), "{transport:?}");
        (&second.1).write_all(b"x").expect("written");
        assert_eq!(ready(&mut zero, &both), (vec![], vec![1]));
        // The same one in another place.
        assert_eq!(ready(&mut zero, &both[1..]), (vec![], vec![0]));
        one.send(&Body::Opaque(&[1]), 0).expect("sent");
        // By RDMA it takes a moment.
        let begin = Instant::now();
        let mut both_ready = || ready(&mut zero, &both);
        let mut seen = both_ready();
        while seen != (vec![0], vec![1]) {
            assert!(begin.elapsed() < HANG && seen == (vec![], vec![1]), "{transport:?}: {seen:?}");
            seen = both_ready();
        }
        zero.receive(|_, _| {}).expect("a frame");
        assert_eq!(ready(&mut zero, &both[..1]), (vec![], vec![]));
        drop(one);
        assert_eq!(ready(&mut zero, &both[..1]), (vec![0], vec![]));
    }
}

/// A peer that is still being connected to others has `connect`, not `silence`, for its first answer.
#[test]
fn a_peer_that_has_not_answered_yet_has_the_time_of_a_connection() {
    let (silence, connect) = (Duration::from_millis(100), Duration::from_secs(30));
    let (mut zero, mut one) = pair(Transport::Tcp, Limits { silence, connect, ..Limits::default() });
    let later = Instant::now() + Duration::from_secs(20);
    zero.tick(later, 0).expect("it may still come");
    let error = zero.tick(later + Duration::from_secs(20), 0).expect_err("silent");
    assert!(error.to_string().ends_with("silent: nothing received for 30s"), "{error}");
    // Zero's question is the first that one hears.
    let begin = Instant::now();
    while one.receive(|_, _| {}).expect("a question") == 0 {
        assert!(begin.elapsed() < HANG, "nothing comes");
    }
    let error = one.tick(Instant::now() + Duration::from_millis(200), 0).expect_err("silent");
    assert!(error.to_string().ends_with("silent: nothing received for 100ms"), "{error}");
}

/// What TLS kept while the socket was full goes on when it is read, too. That is no stall.
#[test]
fn what_goes_on_while_a_lane_is_read_is_no_stall() {
    let (mut zero, mut one) = pair(Transport::Tls, Limits { silence: HANG, ..Limits::default() });
    let body = vec![7; 1000];
    while zero.flush().expect("going") || zero.waiting() > 0 {
        zero.send(&Body::Opaque(&body), 0).expect("room");
    }
    let (begin, mut came) = (Instant::now(), false);
    one.send(&Body::Opaque(&[1]), 0).expect("sent");
    // It has its lane read, and has nothing to send itself.
    while !came || begin.elapsed() < Duration::from_millis(500) {
        assert!(begin.elapsed() < HANG, "it hangs");
        one.receive(|_, _| {}).expect("frames");
        zero.receive(|_, _| came = true).expect("a frame");
    }
    zero.tick(Instant::now() + Duration::from_secs(5), 0).expect("nothing is stuck");
}

/// More frames than are taken at once: those that were read already are not forgotten when no descriptor tells of them.
#[test]
fn a_burst_of_small_frames_is_taken_to_its_end() {
    const FRAMES: usize = 500;
    for transport in all() {
        let (mut zero, mut one) = pair(transport, Limits { silence: HANG, ..Limits::default() });
        for number in 0..FRAMES as u64 {
            zero.send(&Body::Opaque(&number.to_le_bytes()), 0).expect("sent");
        }
        let mut seen = 0;
        while seen < FRAMES {
            let ready = wait(&mut [&mut one], &[], Duration::from_secs(5), Duration::ZERO).expect("poll");
            assert_eq!(ready.lanes, [0], "{transport:?}: forgotten after {seen}");
            zero.flush().expect("going");
            one.receive(|_, body| {
                assert_eq!(body, Body::Opaque(&(seen as u64).to_le_bytes()));
                seen += 1;
            })
            .expect("frames");
        }
        assert_eq!(one.receive(|_, _| {}).expect("nothing"), 0);
        let ready = wait(&mut [&mut one], &[], Duration::ZERO, Duration::ZERO).expect("poll");
        assert!(ready.lanes.is_empty(), "{transport:?}: nothing is left, and nobody is kept awake");
    }
}

#[test]
fn large_bodies_go_round_the_ring() {
    for transport in all() {
        let (mut zero, mut one) = pair(transport, Limits::default());
        let body: Vec<u8> = (0..1 << 20).map(|index: u32| (index / 3) as u8).collect();
        let rounds = 3 * RING / body.len() + 1;
        let (mut sent, mut seen) = (0, 0);
        while seen < rounds {
            if sent < rounds && zero.send(&Body::Opaque(&body), 0).is_ok() {
                sent += 1;
            }
            zero.flush().expect("going");
            one.receive(|_, came| {
                assert!(came == Body::Opaque(&body), "{transport:?}: other bytes");
                seen += 1;
            })
            .expect("going");
            one.flush().expect("going");
            zero.receive(|_, _| {}).expect("going");
        }
    }
}

#[test]
fn a_peer_that_reads_nothing_stops_new_requests_then_everything() {
    for transport in all() {
        let limits = Limits {
            queue_bytes: 1 << 20,
            room_bytes: 64 << 10,
            stall: Duration::from_millis(200),
            ..Limits::default()
        };
        let (mut zero, _one) = pair(transport, limits);
        let body = [7; 64 << 10];
        let mut no_room_at = None;
        let error = loop {
            if !zero.has_room() && no_room_at.is_none() {
                no_room_at = Some(zero.waiting());
            }
            if let Err(error) = zero.send(&Body::Opaque(&body), 0) {
                break error;
            }
        };
        assert!(
            matches!(error.fault, Fault::Full { limit, .. } if limit == 1 << 20),
            "{transport:?}: {error}"
        );
        assert!(no_room_at.is_some_and(|bytes| bytes < limits.queue_bytes), "{no_room_at:?}");
        assert!(zero.waiting() < limits.queue_bytes + body.len() + 100, "bounded");
        let error = ending(&mut zero);
        assert!(matches!(error.fault, Fault::Stalled { .. }), "{transport:?}: {error}");
        assert!(error.to_string().starts_with("node 1, lane 0 ("), "{error}");
        assert!(matches!(zero.send(&Body::Bye, 0), Err(error) if matches!(error.fault, Fault::Ended)));
    }
}

/// After a loss a node tells of all its pages at once. It must not take a peer for lost that has not read them yet.
#[test]
fn what_is_said_about_the_pages_after_a_loss_does_not_make_a_lane_full() {
    const LISTS: u64 = 400;
    let limits = Limits { queue_bytes: 64 << 10, room_bytes: 16 << 10, ..Limits::default() };
    let pages = (0..512).map(|page| Entry { page: PageId(page), copyset: NodeSet::first(1) }).collect();
    let list = Message::Membership(Membership::Directory { epoch: Epoch(64), last: false, pages });
    for transport in all() {
        let meeting = Meeting::new(transport);
        let large = |node, peer| Hello { pages: LISTS * 512, ..hello(node, peer) };
        let (zero, one) = meet(&meeting, large(0, 0), large(1, 0), limits);
        let (mut zero, mut one) = (zero.expect("accepted"), one.expect("connected"));
        for _ in 0..LISTS {
            zero.post(&Body::Protocol(list.clone(), Contents::None), 0).expect("a list is taken");
        }
        assert!(zero.waiting() > 40 * limits.queue_bytes && !zero.has_room(), "{transport:?}");
        // What else there is to say still has its limit, and may fill it.
        let body = [7; 1 << 10];
        let mut others = 0;
        let full = loop {
            match zero.post(&Body::Opaque(&body), 0) {
                Ok(bytes) => others += u64::from(bytes == HEADER + body.len()),
                Err(error) => break error,
            }
        };
        assert!(matches!(full.fault, Fault::Full { bytes, .. } if bytes < 2 * limits.queue_bytes), "{full}");
        assert!((32..64).contains(&others), "{others}");
        // Lists have one, too: not more than there can be to say.
        let more = (0..10 * LISTS)
            .take_while(|_| zero.post(&Body::Protocol(list.clone(), Contents::None), 0).is_ok());
        assert!((LISTS..9 * LISTS).contains(&(more.count() as u64)), "{transport:?}");
        zero.flush().expect("going");
        let mut seen = 0;
        let count = |_, body: Body<'_>| seen += u64::from(matches!(body, Body::Opaque(_)));
        run(&mut [&mut zero, &mut one], count, |lanes| lanes[0].waiting() == 0).expect("going");
        // Nothing is counted any more.
        zero.post(&Body::Opaque(&body), 0).expect("taken");
        assert!(zero.has_room() && seen <= others, "{transport:?}");
    }
}

#[test]
fn what_waited_goes_out_when_the_peer_reads_again() {
    for transport in all() {
        let (mut zero, mut one) = pair(transport, Limits::default());
        let body = [7; 64 << 10];
        let mut sent = 0;
        while zero.waiting() < 2 << 20 {
            zero.send(&Body::Opaque(&body), 0).expect("taken");
            sent += 1;
        }
        let seen = Cell::new(0);
        let count = || seen.set(seen.get() + 1);
        run(&mut [&mut zero, &mut one], |_, _| count(), |lanes| lanes[0].waiting() == 0).expect("going");
        // What is on its way takes a round or several, as the transport has it.
        run(&mut [&mut zero, &mut one], |_, _| count(), |_| seen.get() == sent).expect("going");
        assert_eq!(seen.get(), sent, "{transport:?}");
    }
}

#[test]
fn a_peer_that_left_and_one_that_vanished_are_told_apart() {
    for transport in all() {
        let (mut zero, mut one) = pair(transport, Limits::default());
        one.leave(0);
        assert!(matches!(ending(&mut zero).fault, Fault::Bye), "{transport:?}");
        let (mut zero, one) = pair(transport, Limits::default());
        drop(one);
        let error = ending(&mut zero);
        let gone = matches!(error.fault, Fault::Closed { .. } | Fault::Io { .. });
        assert!(gone, "{transport:?}: {error}");
    }
}

/// A side that polls for a while before it sleeps sees what is there without sleeping.
#[test]
fn who_polls_sleeps_when_nothing_comes_and_sees_that_a_peer_is_gone() {
    const SPIN: Duration = Duration::from_micros(20);
    for transport in all() {
        let limits = Limits { silence: HANG / 3, connect: HANG / 3, ..Limits::default() };
        let (mut zero, mut one) = pair(transport, limits);
        let mut seen = 0;
        let mut turn = |zero: &mut vnuma_dsm_transport::Lane| {
            let ready = wait(&mut [zero], &[], Duration::from_millis(1), SPIN).expect("poll");
            zero.flush()?;
            zero.receive(|_, _| seen += 1)?;
            zero.tick(Instant::now(), 0).map(|()| (ready.lanes.is_empty(), seen))
        };
        // It sleeps, so the frame comes with what wakes it.
        turn(&mut zero).expect("going");
        one.send(&Body::Opaque(&[1]), 0).expect("sent");
        let begin = Instant::now();
        while !matches!(turn(&mut zero).expect("going"), (true, 1)) {
            assert!(begin.elapsed() < HANG / 4, "{transport:?}: it is never idle");
        }
        drop(one);
        let error = loop {
            if let Err(error) = turn(&mut zero) {
                break error;
            }
        };
        let gone = matches!(error.fault, Fault::Closed { .. } | Fault::Io { .. });
        assert!(gone, "{transport:?}: {error}");
    }
}

#[test]
fn a_silent_peer_is_asked_and_then_given_up() {
    for transport in all() {
        let limits = Limits { silence: Duration::from_millis(300), ..Limits::default() };
        let (mut zero, mut one) = pair(transport, limits);
        // Neither sends anything unasked, and both answer.
        let start = Instant::now();
        let quiet = |_: &mut [&mut vnuma_dsm_transport::Lane]| start.elapsed() > Duration::from_millis(1000);
        run(&mut [&mut zero, &mut one], |_, _| panic!("nothing for the protocol"), quiet).expect("alive");
        let error = ending(&mut zero);
        assert!(matches!(error.fault, Fault::Silent { .. }), "{transport:?}: {error}");
    }
}

#[test]
fn three_nodes_meet_whatever_the_order_and_whoever_calls_besides() {
    let directory = tempfile::tempdir().expect("a directory");
    let places: BTreeMap<u8, Place> =
        (0..3).map(|node| (node, Place::Shm(directory.path().join(format!("{node}"))))).collect();
    let path = directory.path().join("0");
    let threads: Vec<_> = [2, 0, 1]
        .into_iter()
        .map(|node: u8| {
            let places = places.clone();
            let start = move || {
                thread::sleep(Duration::from_millis(u64::from(node) * 20));
                let listener = Listener::bind(&places[&node]).expect("a listener");
                let peers = places.into_iter().filter(|(other, _)| *other != node).collect();
                let hello = Hello { lanes: 4, ..hello(node, 0) };
                let mut complaints = Vec::new();
                let lanes = mesh(&listener, &peers, &hello, Limits::default(), |error| {
                    complaints.push(error.to_string());
                });
                (node, lanes.expect("a mesh"), complaints, listener)
            };
            thread::spawn(start)
        })
        .collect();
    while std::os::unix::net::UnixStream::connect(&path).is_err() {
        thread::yield_now();
    }
    let mut nodes: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    nodes.sort_by_key(|(node, ..)| *node);
    for (node, lanes, ..) in &nodes {
        assert_eq!(lanes.len(), 4);
        for (number, peers) in lanes.iter().enumerate() {
            let others: Vec<u8> = (0..3).filter(|other| other != node).collect();
            assert_eq!(peers.keys().copied().collect::<Vec<_>>(), others);
            assert!(peers.iter().all(|(peer, lane)| {
                lane.peer().node == Some(*peer) && usize::from(lane.peer().lane) == number
            }));
        }
    }
    // Each lane is joined to the lane of the same number.
    let (all, rest) = nodes.split_at_mut(1);
    let zero = all.first_mut().map(|(_, lanes, ..)| lanes).expect("node 0");
    for (number, lanes) in zero.iter_mut().enumerate() {
        lanes.get_mut(&2).expect("a lane").send(&Body::Opaque(&[number as u8]), 0).expect("sent");
    }
    let two = &mut rest[1].1;
    for (number, lanes) in two.iter_mut().enumerate() {
        let mut seen: Vec<u8> = Vec::new();
        run(
            &mut [lanes.get_mut(&0).expect("a lane")],
            |_, body| {
                if let Body::Opaque(bytes) = body {
                    seen.extend(bytes);
                }
            },
            |_| true,
        )
        .expect("going");
        assert_eq!(seen, [number as u8]);
    }
}

/// A node dials others that do not answer yet, and callers that say nothing, or half of it, take all the room that there is and
/// do not go away.
#[test]
fn callers_that_say_nothing_keep_no_node_out() {
    const LANES: u16 = 64;
    let meeting = Meeting::new(Transport::Tcp);
    let (place, address) = (meeting.place.clone(), meeting.address());
    let silent = TcpListener::bind(anywhere()).expect("a listener");
    let peers =
        [(0, Place::Tcp(silent.local_addr().expect("an address"))), (2, Place::Tcp(anywhere()))].into();
    let limits = Limits { connect: HANG, hello: HANG, ..Limits::default() };
    let greeting = |node, lane| Hello { lanes: LANES, lane, ..hello(node, 1) };
    let ours = greeting(1, 0);
    // It ends with this process.
    thread::spawn(move || mesh(&meeting.listener, &peers, &ours, limits, |_| {}));
    dial(&place, &greeting(2, 0), limits).expect("it is served beside those that this node dials");
    let silent_callers: Vec<_> = (0..300)
        .map(|number| {
            let mut stream = TcpStream::connect(address).expect("connected");
            stream.write_all(&[40, 0, 0][..number % 4]).expect("sent");
            stream
        })
        .collect();
    for lane in 1..LANES {
        dial(&place, &greeting(2, lane), limits).expect("it is served beside them");
    }
    drop(silent_callers);
}

/// As one does that begins to listen anew.
#[test]
fn a_peer_that_closes_a_connection_before_it_says_who_it_is_is_dialled_again() {
    let listener = TcpListener::bind(anywhere()).expect("a listener");
    let place = Place::Tcp(listener.local_addr().expect("an address"));
    let limits = Limits { connect: HANG, ..Limits::default() };
    let complain = |error| panic!("{error}");
    let dials = thread::spawn(move || {
        let ours = Listener::bind(&Place::Tcp(anywhere())).expect("a listener");
        mesh(&ours, &[(0, place)].into(), &hello(1, 0), limits, complain)
    });
    drop(listener.accept().expect("a caller"));
    listener.set_nonblocking(true).expect("set");
    let listener = Listener::Tcp(listener, None);
    let peers = [(1, Place::Tcp(anywhere()))].into();
    let zero = mesh(&listener, &peers, &hello(0, 0), limits, |error| eprintln!("{error}")).expect("a mesh");
    // Neither lane ends before both nodes have theirs.
    let one = dials.join().expect("no panic").expect("a mesh");
    assert_eq!([zero, one].map(|lanes| lanes[0].len()), [1, 1]);
}

#[test]
fn a_node_that_does_not_come_is_named() {
    let meeting = Meeting::new(Transport::Tcp);
    let peers = [(3, Place::Tcp(common::anywhere()))].into_iter().collect();
    let limits = Limits { connect: Duration::from_millis(200), ..Limits::default() };
    let error = mesh(&meeting.listener, &peers, &hello(0, 0), limits, |_| {}).expect_err("nobody comes");
    assert_eq!(error.to_string(), "node 3, lane 0 (not connected): no connection within 200ms");
}

#[test]
fn hosts_that_do_not_belong_together_are_told_why() {
    use vnuma_abi_dsm_wire::Refusal;
    let meeting = Meeting::new(Transport::Tcp);
    let limits = Limits::default();
    let expect = |theirs: Hello, reason: Refusal, text: &str| {
        let (zero, one) = meet(&meeting, hello(0, 0), theirs, limits);
        let refused = zero.expect_err("refused").to_string();
        assert!(refused.starts_with("tcp 127.0.0.1:") && refused.ends_with(text), "{refused}");
        let told = one.expect_err("refused").fault;
        assert!(matches!(told, Fault::Refused(told) if told == reason), "{told}");
    };
    let text = "hello.cluster: the peer has 0x4e, and here it is 0x4d";
    expect(Hello { cluster: 78, ..hello(1, 0) }, Refusal::Cluster, text);
    let text = "hello.pages: the peer has 0x3ff, and here it is 0x400";
    expect(Hello { pages: 1023, ..hello(1, 0) }, Refusal::Region, text);
    expect(hello(1, 5), Refusal::Peer, "hello.peer: the peer has 0x5, and here it is 0x0");
    let future = Hello { version_min: 900, version_max: 901, ..hello(1, 0) };
    expect(future, Refusal::Version, "hello.version_max: the peer has 0x385, and here it is 0x1");
    expect(hello(0, 0), Refusal::Peer, "hello.node: 0x0 is not above the node that listens");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_mix_of_frames_comes_through_the_ring(sizes in proptest::collection::vec(0..200_000_usize, 1..40)) {
        let (mut zero, mut one) = pair(Transport::Shm, Limits::default());
        let body = |index: usize| vec![index as u8; sizes[index]];
        let (mut sent, mut seen) = (0, 0);
        while seen < sizes.len() {
            if sent < sizes.len() && zero.has_room() {
                zero.send(&Body::Opaque(&body(sent)), 0).expect("sent");
                sent += 1;
            }
            zero.flush().expect("going");
            one.receive(|_, came| {
                assert!(came == Body::Opaque(&body(seen)));
                seen += 1;
            }).expect("going");
        }
    }
}

#[test]
fn requests_of_the_protocol_keep_their_fields() {
    let (mut zero, mut one) = pair(Transport::Tls, Limits::default());
    let message =
        Message::Request(Request { page: PageId(9), requester: NodeId(1), purpose: Purpose::Write, have: 4 });
    one.send(&Body::Protocol(message.clone(), Contents::None), 1).expect("sent");
    let mut seen = None;
    run(
        &mut [&mut zero, &mut one],
        |place, body| {
            let Body::Protocol(message, Contents::None) = body else { panic!("{body:?}") };
            seen = Some((place, message));
        },
        {
            let start = Instant::now();
            move |_| start.elapsed() > Duration::from_millis(50)
        },
    )
    .expect("going");
    assert_eq!(seen, Some((0, message)));
}

/// Bytes that a pipe keeps, and room that it gets, are no reason to sleep for ever.
#[test]
fn who_waits_for_room_is_woken() {
    for transport in all() {
        let limits = Limits { silence: HANG, stall: HANG, ..Limits::default() };
        let (mut zero, mut one) = pair(transport, limits);
        let reader = thread::spawn(move || {
            let mut bytes = 0;
            loop {
                let outcome = one.receive(|_, body| {
                    if let Body::Opaque(came) = body {
                        bytes += came.len();
                    }
                });
                match outcome {
                    Ok(0) => drop(wait(&mut [&mut one], &[], HANG, Duration::ZERO)),
                    Ok(_) => {}
                    Err(error) => return (bytes, error),
                }
            }
        });
        let body = [7; 60_000];
        for _ in 0..200 {
            while !zero.has_room() {
                let limit = Duration::from_secs(20);
                let ready = wait(&mut [&mut zero], &[], limit, Duration::ZERO).expect("poll");
                assert_eq!(
                    ready.lanes,
                    [0],
                    "{transport:?}: {} bytes wait, and nobody is woken",
                    zero.waiting()
                );
                zero.flush().expect("going");
            }
            zero.send(&Body::Opaque(&body), 0).expect("taken");
        }
        while !zero.flush().expect("going") {
            let ready = wait(&mut [&mut zero], &[], Duration::from_secs(20), Duration::ZERO).expect("poll");
            assert_eq!(ready.lanes, [0], "{transport:?}: {} bytes wait, and nobody is woken", zero.waiting());
        }
        zero.leave(0);
        let (bytes, error) = reader.join().expect("no panic");
        assert_eq!(bytes, 200 * body.len(), "{transport:?}: {error}");
    }
}
