//! Programs see one memory, whatever the protocol's switches are.

mod common;

use common::{HANG, Transport, Words, cluster, connected, patient, region, told, until};
use std::{
    collections::BTreeMap,
    sync::{Arc, Barrier, atomic::Ordering::SeqCst},
    thread,
    time::Instant,
};
use vnuma_abi_dsm_wire::{
    Access, Body, Contents, Cut, Epoch, Grant, Membership, Message, NodeId, NodeSet, PageId, Payload, View,
};
use vnuma_coherence::{Options, StopReason};
use vnuma_dsm_node::{Config, Happening, Node, Sabotage, Stats};
use vnuma_dsm_transport::{Lanes, Limits};

const PAGES: u64 = 64;

fn stop(nodes: Vec<Node>) -> Stats {
    let mut stats = Stats::default();
    nodes.into_iter().for_each(|node| stats.merge(&node.stop()));
    stats
}

/// Runs a function on every node at the same time.
fn on_all(nodes: &[Node], run: impl Fn(usize, Words) + Send + Sync + 'static) {
    let (run, barrier) = (Arc::new(run), Arc::new(Barrier::new(nodes.len())));
    let thread = |(index, node): (usize, &Node)| {
        let (words, run, barrier) = (Words::of(node), Arc::clone(&run), Arc::clone(&barrier));
        thread::spawn(move || {
            barrier.wait();
            run(index, words);
        })
    };
    let threads: Vec<_> = nodes.iter().enumerate().map(thread).collect();
    until("it hangs", || threads.iter().all(thread::JoinHandle::is_finished));
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
}

fn count_together(transport: Transport, nodes: u8, options: Options) -> Option<Stats> {
    const ROUNDS: u64 = 100;
    let nodes = cluster(nodes, PAGES, transport, |config| config.options = options)?;
    on_all(&nodes, |index, words| {
        for round in 0..ROUNDS {
            for page in [0, PAGES - 1] {
                words.at(page, 0).fetch_add(1, SeqCst);
                // Each in a word of its own, which no other thread changes.
                let own = words.at(page, 1 + index).load(SeqCst);
                assert_eq!(own, round, "node {index} page {page}");
                words.at(page, 1 + index).store(round + 1, SeqCst);
            }
        }
    });
    for node in &nodes {
        for page in [0, PAGES - 1] {
            assert_eq!(Words::of(node).at(page, 0).load(SeqCst), ROUNDS * nodes.len() as u64);
        }
        assert_eq!(node.happenings(), []);
    }
    Some(stop(nodes))
}

#[test]
fn increments_of_all_nodes_count() {
    for transport in [Transport::Shm, Transport::Tcp] {
        for nodes in [2, 3] {
            let Some(stats) = count_together(transport, nodes, Options::default()) else { return };
            assert!(stats.messages > 0 && stats.writes.count > 0 && !stats.pages.is_empty());
        }
    }
}

#[test]
fn increments_of_all_nodes_count_with_any_switches() {
    let base = Options::default();
    let cases = [
        Options::ivy(),
        Options { direct_reply: false, ..base },
        Options { owner_hints: false, ..base },
        Options { upgrade_without_data: false, ..base },
        Options { migratory: false, ..base },
        Options { tell_owners: false, ..base },
        Options { deltas: false, ..base },
        Options { prefetch_pages: 0, ..base },
        Options { hold_ns: 0, ..base },
        Options { batch_invalidations: false, ..base },
        Options { direct_acks: false, ..base },
    ];
    for options in cases {
        if count_together(Transport::Shm, 3, options).is_none() {
            return;
        }
    }
}

/// The thread of a shard goes where the faults are.
#[test]
fn increments_count_where_faults_are_handled_on_their_cpu() {
    let follow = |config: &mut Config| config.placement = vnuma_dsm_pager::Placement::Follow;
    let Some(nodes) = cluster(3, PAGES, Transport::Shm, follow) else { return };
    on_all(&nodes, |_, words| {
        for page in [0, PAGES - 1].into_iter().cycle().take(200) {
            words.at(page, 0).fetch_add(1, SeqCst);
        }
    });
    for page in [0, PAGES - 1] {
        assert_eq!(Words::of(&nodes[1]).at(page, 0).load(SeqCst), 300);
    }
    stop(nodes);
}

#[test]
fn a_difference_is_sent_instead_of_a_page() {
    let run = |deltas| {
        let options = Options { deltas, ..Options::default() };
        count_together(Transport::Shm, 2, options)
    };
    let (Some(with), Some(without)) = (run(true), run(false)) else { return };
    assert!(with.deltas > 0 && without.deltas == 0, "{} and {}", with.deltas, without.deltas);
    // A write of another node is a few bytes.
    let each = |stats: &Stats| stats.bytes / stats.messages;
    assert!(each(&with) < each(&without), "{with:?} {without:?}");
}

#[test]
fn a_page_is_read_as_it_was_written() {
    let Some(nodes) = cluster(3, PAGES, Transport::Shm, |_| {}) else { return };
    for page in 0..PAGES {
        for word in [0, 100, 511] {
            Words::of(&nodes[page as usize % 3]).at(page, word).store(page << 16 | word as u64, SeqCst);
        }
    }
    for node in &nodes {
        for page in 0..PAGES {
            for word in [0, 1, 100, 511] {
                let expected = if word == 1 { 0 } else { page << 16 | word as u64 };
                assert_eq!(Words::of(node).at(page, word).load(SeqCst), expected);
            }
        }
    }
    stop(nodes);
}

#[test]
fn a_lost_page_is_an_error_and_not_a_wait() {
    let Some(mut nodes) = cluster(3, PAGES, Transport::Shm, |_| {}) else { return };
    // Page 0 is written on node 2 alone, page 1 on node 0, page 2 on both.
    let at = |nodes: &[Node], node: usize, page| Words::of(&nodes[node]).at(page, 0);
    at(&nodes, 2, 0).store(7, SeqCst);
    at(&nodes, 0, 1).store(8, SeqCst);
    at(&nodes, 2, 2).store(9, SeqCst);
    assert_eq!(at(&nodes, 1, 2).load(SeqCst), 9);
    drop(nodes.pop());
    nodes[0].suspect(2);
    for node in &nodes {
        told(node, |happening| matches!(happening, Happening::Members { members, .. } if members == &[0, 1]));
        assert_eq!(Words::of(node).at(1, 0).load(SeqCst), 8);
        assert_eq!(Words::of(node).at(2, 0).load(SeqCst), 9, "a copy is left");
        let error = Words::of(node).read_by_kernel(0).expect_err("lost");
        assert!(matches!(error, nix::Error::EFAULT | nix::Error::EIO | nix::Error::EHWPOISON), "{error}");
        told(node, |happening| *happening == Happening::PageLost { page: 0 });
    }
    stop(nodes);
}

/// Waits until a page can no longer be read.
fn refused(words: Words, page: u64) {
    let readable = format!("page {page} of a node that has stopped can be read");
    until(&readable, || words.read_by_kernel(page).is_err());
}

/// Threads that wait for a page, or touch one later, get an error though the thread that would serve them is gone.
#[test]
fn a_panic_of_a_shard_is_an_error_and_not_a_wait() {
    let change = |config: &mut Config| {
        if config.node == 0 {
            config.sabotage(Sabotage::Panic { page: 0 });
        }
    };
    let Some(nodes) = cluster(3, PAGES, Transport::Shm, change) else { return };
    let words = Words::of(&nodes[0]);
    let region = nodes[0].region();
    // A page of the other shard, which goes on by itself.
    let other = (0..PAGES).find(|page| region.shard_of(*page) != region.shard_of(0)).expect("two shards");
    words.at(other, 0).store(1, SeqCst);
    // Several at once, so that faults are left when the thread panics.
    let of_shard: Vec<u64> =
        (0..PAGES).filter(|page| region.shard_of(*page) == region.shard_of(0)).take(4).collect();
    let threads: Vec<_> = (0..4).map(|_| thread::spawn(move || words.read_by_kernel(0))).collect();
    until("a thread waits for a shard that is gone", || threads.iter().all(thread::JoinHandle::is_finished));
    for outcome in threads.into_iter().map(|thread| thread.join().expect("no panic")) {
        let error = outcome.expect_err("refused");
        assert!(matches!(error, nix::Error::EFAULT | nix::Error::EIO | nix::Error::EHWPOISON), "{error}");
    }
    let failed = told(&nodes[0], |happening| matches!(happening, Happening::Failed { .. }));
    assert_eq!(failed.to_string(), format!("failed: the thread of shard {} panicked", region.shard_of(0)));
    for page in of_shard {
        words.read_by_kernel(page).expect_err("refused");
    }
    refused(words, other);
    // The others go on without it.
    told(
        &nodes[1],
        |happening| matches!(happening, Happening::Members { members, .. } if members == &[1, 2]),
    );
    stop(nodes);
}

/// One shard fails while another one has put an answer off. The answer would give the page back to the threads of this node.
#[test]
fn a_page_of_a_node_that_has_failed_does_not_come_back() {
    let hold = std::time::Duration::from_millis(400);
    let change = |config: &mut Config| {
        config.options.hold_ns = hold.as_nanos() as u64;
        if config.node == 0 {
            config.sabotage(Sabotage::Panic { page: 0 });
        }
    };
    let Some(nodes) = cluster(3, PAGES, Transport::Shm, change) else { return };
    let (words, theirs) = (Words::of(&nodes[0]), Words::of(&nodes[1]));
    let region = nodes[0].region();
    let other = (0..PAGES).find(|page| region.shard_of(*page) != region.shard_of(0)).expect("two shards");
    words.at(other, 0).store(1, SeqCst);
    let reader = thread::spawn(move || theirs.read_by_kernel(other));
    // Long enough for the reader to have asked.
    thread::sleep(hold / 8);
    words.read_by_kernel(0).expect_err("refused");
    refused(words, other);
    thread::sleep(hold * 2);
    words.read_by_kernel(other).expect_err("the page has come back");
    // What it gets depends on which of the nodes was faster.
    let _ = reader.join().expect("no panic");
    stop(nodes);
}

/// A page that device code holds stays until that lets go of it. The others of a node that stops do not wait for that.
#[test]
fn a_node_that_stops_loses_a_pinned_page_last() {
    let Some(mut nodes) = cluster(2, PAGES, Transport::Shm, |_| {}) else { return };
    let words = Words::of(&nodes[0]);
    let region = Arc::clone(nodes[0].region());
    let of_shard: Vec<u64> =
        (0..PAGES).filter(|page| region.shard_of(*page) == region.shard_of(0)).take(3).collect();
    for page in &of_shard {
        words.at(*page, 0).store(1, SeqCst);
    }
    let pin = region.pin(0, vnuma_dsm_pager::Access::Write).expect("pinned");
    drop(nodes.pop());
    nodes[0].suspect(1);
    told(&nodes[0], |happening| *happening == Happening::Stopped { reason: StopReason::Minority });
    for page in &of_shard[1..] {
        refused(words, *page);
    }
    words.read_by_kernel(0).expect("device code holds it");
    drop(pin);
    refused(words, 0);
    assert!(!nodes[0].happenings().iter().any(|happening| matches!(happening, Happening::Failed { .. })));
    stop(nodes);
}

#[test]
fn a_node_without_a_majority_stops_itself() {
    let Some(mut nodes) = cluster(2, PAGES, Transport::Shm, |_| {}) else { return };
    Words::of(&nodes[0]).at(0, 0).store(1, SeqCst);
    drop(nodes.pop());
    // The other one manages the last page.
    let error = Words::of(&nodes[0]).read_by_kernel(PAGES - 1).expect_err("stopped");
    assert!(matches!(error, nix::Error::EFAULT | nix::Error::EIO | nix::Error::EHWPOISON), "{error}");
    told(&nodes[0], |happening| *happening == Happening::Stopped { reason: StopReason::Minority });
    // What it had is gone, too. Other threads of the node see to that, each for its pages.
    refused(Words::of(&nodes[0]), 0);
    stop(nodes);
}

/// A node, and the lanes of a peer that the test plays.
fn against_a_hand_made_peer(test: impl FnOnce(&Node, &mut vnuma_dsm_transport::Lanes)) {
    let Some(mut parts) = connected(2, PAGES, Transport::Shm, patient()) else { return };
    let (_theirs, mut lanes) = parts.pop().expect("two");
    let (region, ours) = parts.pop().expect("two");
    let config = Config::new(0, 2, PAGES);
    let node = Node::start(&config, region, ours, |happening| eprintln!("{happening}")).expect("starts");
    test(&node, &mut lanes);
    assert!(matches!(node.happenings().last(), Some(Happening::Stopped { reason: StopReason::Minority })));
    node.stop();
}

fn grant(page: u64) -> Grant {
    let (page, to, from) = (PageId(page), NodeId(0), NodeId(1));
    let (access, payload) = (Access::Write, Payload::None);
    let (before, copies) = (None, NodeSet::EMPTY);
    Grant { page, to, from, access, owner: true, migratory: 0, before, version: 5, payload, copies }
}

#[test]
fn a_peer_that_breaks_the_protocol_is_named_with_the_field() {
    let cases = [
        (Message::Grant(grant(3)), "grant.page 3: a grant that was not asked for"),
        (Message::Refuse { page: PageId(PAGES) }, "refuse.page 64: no page of this connection"),
        (Message::Lost { page: PageId(PAGES - 1) }, "lost.page 63: no page of this connection"),
        (
            Message::Grant(Grant { from: NodeId(9), ..grant(4) }),
            "grant.page 4: a grant that was not asked for",
        ),
        (
            Message::Grant(Grant { to: NodeId(9), ..grant(4) }),
            "grant.page 4: it names a node that is no member",
        ),
    ];
    for (message, text) in cases {
        against_a_hand_made_peer(|node, lanes| {
            let lane = lanes[0].get_mut(&0).expect("a lane");
            lane.send(&Body::Protocol(message, Contents::None), 0).expect("sent");
            let protest = told(node, |happening| matches!(happening, Happening::Protested { .. }));
            assert_eq!(protest, Happening::Protested { peer: 1, field: text.to_owned() });
            assert_eq!(protest.to_string(), format!("node 1 broke the protocol: {text}"));
            told(node, |happening| matches!(happening, Happening::Stopped { .. }));
        });
    }
}

/// Frames about a pinned page wait, but not any number of them.
#[test]
fn a_peer_that_floods_a_pinned_page_is_given_up() {
    let Some(mut parts) = connected(2, PAGES, Transport::Shm, patient()) else { return };
    let (_theirs, mut lanes) = parts.pop().expect("two");
    let (region, ours) = parts.pop().expect("two");
    let mut config = Config::new(0, 2, PAGES);
    config.pin_limit = 10 * HANG;
    let node = Node::start(&config, region, ours, |_| {}).expect("starts");
    Words::of(&node).at(0, 0).store(1, SeqCst);
    let pin = node.region().pin(0, vnuma_dsm_pager::Access::Write).expect("pinned");
    let lane = lanes[0].get_mut(&0).expect("a lane");
    let protested = |happening: &Happening| matches!(happening, Happening::Protested { .. });
    let begin = Instant::now();
    while !node.happenings().iter().any(protested) {
        assert!(begin.elapsed() < HANG, "any number of frames waits");
        // The last ones find a lane that has ended.
        for _ in 0..1 << 10 {
            let _ = lane.send(&Body::Protocol(Message::Refuse { page: PageId(0) }, Contents::None), 0);
        }
        let _ = lane.flush();
    }
    let field = "more frames than can wait for a pinned page".to_owned();
    assert_eq!(told(&node, protested), Happening::Protested { peer: 1, field });
    drop(pin);
    told(&node, |happening| matches!(happening, Happening::Stopped { .. }));
    node.stop();
}

#[test]
fn a_peer_that_is_gone_is_named_with_the_reason() {
    against_a_hand_made_peer(|node, lanes| {
        lanes.clear();
        let ended = told(node, |happening| matches!(happening, Happening::PeerEnded { .. }));
        let text = ended.to_string();
        assert!(text.starts_with("node 1, lane ") && text.ends_with("the connection was closed"), "{text}");
        told(node, |happening| matches!(happening, Happening::Stopped { .. }));
    });
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let Some(region) = region(PAGES) else { return };
    let refusal = |config: &Config, lanes| {
        Node::start(config, Arc::clone(&region), lanes, |_| {}).expect_err("refused").to_string()
    };
    let none = || (0..2).map(|_| BTreeMap::new()).collect::<Vec<_>>();
    let config = Config::new(0, 2, PAGES);
    assert_eq!(refusal(&config, Vec::new()), "shards with lanes: 0, expected 2");
    assert_eq!(refusal(&config, none()), "peers of a shard: 0, expected 1");
    assert_eq!(refusal(&Config::new(0, 1, PAGES + 1), none()), "managed pages: 65, expected 64");
    let _ = Limits::default();
}

/// The difference of an owner that became a writer again starts from what the readers have.
#[test]
fn a_word_that_becomes_zero_again_is_seen() {
    let Some(nodes) = cluster(2, PAGES, Transport::Shm, |_| {}) else { return };
    for value in [5, 0, 7, 0] {
        Words::of(&nodes[0]).at(0, 3).store(value, SeqCst);
        assert_eq!(Words::of(&nodes[1]).at(0, 3).load(SeqCst), value);
    }
    let stats = stop(nodes);
    assert!(stats.deltas > 0, "{stats:?}");
}

/// A writer that got the page keeps a twin of what came, too: no page goes as a whole from then on.
#[test]
fn writers_in_turn_send_differences_only() {
    let Some(nodes) = cluster(2, PAGES, Transport::Shm, |_| {}) else { return };
    for turn in 1..=8 {
        Words::of(&nodes[turn as usize % 2]).at(0, 5).store(turn, SeqCst);
    }
    assert_eq!(Words::of(&nodes[1]).at(0, 5).load(SeqCst), 8);
    let stats = stop(nodes);
    assert!(stats.deltas >= 6 && stats.whole_pages == 0, "{stats:?}");
}

/// A thread that wants a page that device code has pinned waits. Pages of the same shard do not.
#[test]
fn a_pinned_page_keeps_nobody_else_waiting() {
    let Some(nodes) = cluster(2, PAGES, Transport::Shm, |_| {}) else { return };
    for page in [0, 1] {
        Words::of(&nodes[0]).at(page, 0).store(1, SeqCst);
    }
    let pin = nodes[0].region().pin(0, vnuma_dsm_pager::Access::Write).expect("pinned");
    let words = Words::of(&nodes[1]);
    let wants = |page| thread::spawn(move || words.at(page, 0).fetch_add(1, SeqCst));
    let (pinned, other) = (wants(0), wants(1));
    until("it waits, too", || other.is_finished());
    // Long enough for the pinned one to have asked.
    thread::sleep(std::time::Duration::from_millis(100));
    assert!(!pinned.is_finished(), "a pinned page was taken away");
    // SAFETY: the first word of the page, aligned; all accesses are atomic, and the pin keeps it here.
    let device = unsafe { pin.address().cast::<std::sync::atomic::AtomicU64>().as_ref() };
    device.store(7, SeqCst);
    drop(pin);
    until("it hangs", || pinned.is_finished());
    assert_eq!((pinned.join().expect("no panic"), words.at(0, 0).load(SeqCst)), (7, 8));
    assert_eq!([0, 1].map(|node: usize| nodes[node].happenings()), [vec![], vec![]]);
    stop(nodes);
}

/// A thread writes a page that another node wants back, and that device code reads. It waits, and other threads do not.
#[test]
fn a_write_of_a_pinned_page_keeps_nobody_else_waiting() {
    let hold = |config: &mut Config| config.options.hold_ns = 10 * HANG.as_nanos() as u64;
    let Some(nodes) = cluster(2, PAGES, Transport::Shm, hold) else { return };
    // Pages of one shard. A thread that goes on to another page lets go of the one before.
    let [page, other, next, last] = [0, 1, 2, 3];
    let (ours, theirs) = (Words::of(&nodes[0]), Words::of(&nodes[1]));
    theirs.at(page, 0).store(1, SeqCst);
    theirs.at(next, 0).store(1, SeqCst);
    assert_eq!(ours.at(page, 0).load(SeqCst), 1);
    let wants = thread::spawn(move || {
        let before = theirs.at(page, 0).fetch_add(1, SeqCst);
        theirs.at(last, 0).store(1, SeqCst);
        before
    });
    thread::sleep(std::time::Duration::from_millis(100));
    assert!(!wants.is_finished(), "the page was not held");
    let pin = nodes[0].region().pin(page, vnuma_dsm_pager::Access::Read).expect("pinned");
    let writes = thread::spawn(move || ours.at(page, 0).fetch_add(1, SeqCst));
    thread::sleep(std::time::Duration::from_millis(100));
    ours.read_by_kernel(other).expect("the shard goes on");
    assert!(!wants.is_finished() && !writes.is_finished(), "a pinned page was taken away");
    drop(pin);
    until("it hangs", || wants.is_finished() && writes.is_finished());
    let before = [wants, writes].map(|thread| thread.join().expect("no panic"));
    assert_eq!((before, ours.at(page, 0).load(SeqCst)), ([1, 2], 3));
    assert_eq!([0, 1].map(|node: usize| nodes[node].happenings()), [vec![], vec![]]);
    stop(nodes);
}

/// Pins `page` again and again, and adds to its first word while it is pinned. Returns what was added.
fn count_pinned(node: &Node, page: u64, pins: u64) -> u64 {
    for _ in 0..pins {
        let pin = node.region().fetch_and_pin(page, vnuma_dsm_pager::Access::Write).expect("pinned");
        // SAFETY: the first word of the page, aligned; all accesses are atomic, and the pin keeps it here.
        let word = unsafe { pin.address().cast::<std::sync::atomic::AtomicU64>().as_ref() };
        for _ in 0..4 {
            // No other node has the page, so this need not be one step.
            let count = word.load(SeqCst);
            thread::sleep(std::time::Duration::from_micros(50));
            word.store(count + 1, SeqCst);
        }
        drop(pin);
        thread::sleep(std::time::Duration::from_micros(100));
    }
    pins * 4
}

/// Device code of all nodes counts in one word, while threads of all nodes write the page. It would lose counts if the page were
/// taken away from under a pin.
#[test]
fn what_device_code_counts_in_a_pinned_page_is_not_lost() {
    let Some(nodes) = cluster(3, PAGES, Transport::Shm, |_| {}) else { return };
    let counted: u64 = thread::scope(|scope| {
        for (index, node) in nodes.iter().enumerate() {
            scope.spawn(move || {
                for _ in 0..300 {
                    Words::of(node).at(0, 8 + index).fetch_add(1, SeqCst);
                    thread::sleep(std::time::Duration::from_micros(20));
                }
            });
        }
        let devices: Vec<_> =
            nodes.iter().map(|node| scope.spawn(move || count_pinned(node, 0, 50))).collect();
        devices.into_iter().map(|device| device.join().expect("no panic")).sum()
    });
    for node in &nodes {
        let words = Words::of(node);
        assert_eq!(words.at(0, 0).load(SeqCst), counted, "what devices have counted");
        assert_eq!([8, 9, 10].map(|word: usize| words.at(0, word).load(SeqCst)), [300; 3]);
    }
    stop(nodes);
}

/// A page is held for a thread until it has used it. That it faults on another page shows that it has.
#[test]
fn a_thread_that_goes_on_lets_go_of_its_page() {
    let hold = |config: &mut Config| config.options.hold_ns = 10 * HANG.as_nanos() as u64;
    let Some(nodes) = cluster(2, PAGES, Transport::Shm, hold) else { return };
    // Pages of node 1, in one shard.
    let [page, other] = [PAGES - 2, PAGES - 1];
    let ours = Words::of(&nodes[0]);
    ours.at(page, 0).store(1, SeqCst);
    let theirs = Words::of(&nodes[1]);
    let wants = thread::spawn(move || theirs.at(page, 0).fetch_add(1, SeqCst));
    thread::sleep(std::time::Duration::from_millis(50));
    assert!(!wants.is_finished(), "the page was not held");
    ours.at(other, 0).store(1, SeqCst);
    until("the page is still held", || wants.is_finished());
    assert_eq!(wants.join().expect("no panic"), 1);
    stop(nodes);
}

/// A keeper keeps what a member sends in the membership in force, and nothing of another epoch or of a node that was excluded.
#[test]
fn second_copies_of_another_epoch_or_an_excluded_node_are_not_kept() {
    let Some(mut parts) = connected(3, PAGES, Transport::Shm, patient()) else { return };
    let ((_third, mut excluded), (_second, mut member)) =
        (parts.pop().expect("three"), parts.pop().expect("three"));
    let (region, ours) = parts.pop().expect("three");
    let node = Node::start(&Config::new(0, 3, PAGES), region, ours, |_| {}).expect("starts");
    let send = |lanes: &mut Lanes, message: Message, content: Option<&[u8; 4096]>, epoch| {
        let contents = content.map_or(Contents::None, Contents::Page);
        let lane = lanes[0].get_mut(&0).expect("a lane");
        lane.send(&Body::Protocol(message, contents), epoch).expect("sent");
    };
    let copy = |page| Message::Cut(Cut::Page { number: 1, page: PageId(page), version: 2 });
    let content = [5; 4096];
    send(&mut member, copy(0), Some(&content), 0);
    send(&mut member, copy(1), Some(&content), 65);
    let view = View { epoch: Epoch(65), members: NodeSet::first(2) };
    for message in [
        Membership::Accept { view, round: 1 },
        Membership::Accept { view, round: 2 },
        Membership::Holdings { epoch: Epoch(65), last: true, pages: Vec::new() },
        Membership::Directory { epoch: Epoch(65), last: true, pages: Vec::new() },
    ] {
        send(&mut member, Message::Membership(message), None, 0);
    }
    // The answers show that what was sent before them was looked at.
    let heard = |lanes: &mut Lanes, what: &dyn Fn(&Membership) -> bool| {
        let (begin, mut heard) = (Instant::now(), false);
        while !heard {
            assert!(begin.elapsed() < HANG, "it hangs");
            let take = |_: &_, body: Body<'_>| {
                if let Body::Protocol(Message::Membership(message), _) = body {
                    heard |= what(&message);
                }
            };
            lanes[0].get_mut(&0).expect("a lane").receive(take).expect("frames");
            thread::sleep(std::time::Duration::from_millis(1));
        }
    };
    heard(&mut member, &|message| matches!(message, Membership::Directory { last: true, .. }));
    let fenced = |message: &Membership| matches!(message, Membership::Fenced { .. });
    heard(&mut excluded, &fenced);
    send(&mut excluded, copy(2), Some(&content), 65);
    send(&mut excluded, Message::Lost { page: PageId(0) }, None, 65);
    heard(&mut excluded, &fenced);
    send(&mut member, copy(3), Some(&content), 0);
    send(&mut member, copy(4), Some(&content), 65);
    let (copies, begin, mut kept) = (node.copies(), Instant::now(), Vec::new());
    while !kept.contains(&4) {
        assert!(begin.elapsed() < HANG, "it hangs");
        kept.clear();
        copies.restore(1, &[0], |page, _| kept.push(page));
    }
    assert_eq!(kept, [0, 4]);
    node.stop();
}

/// What a manager has to pass on once the next membership is in force comes with contents. If another membership is agreed on
/// instead, these are nobody's.
#[test]
fn contents_of_a_membership_that_was_not_to_be_are_not_passed_on() {
    let Some(mut parts) = connected(4, PAGES, Transport::Shm, patient()) else { return };
    let _third = parts.pop();
    let ((_second, mut requester), (_first, mut owner)) =
        (parts.pop().expect("four"), parts.pop().expect("four"));
    let (region, ours) = parts.pop().expect("four");
    let mut config = Config::new(0, 4, PAGES);
    config.options.direct_reply = false;
    let node = Node::start(&config, region, ours, |_| {}).expect("starts");
    let send = |lanes: &mut Lanes, message: Message, content: Option<&[u8; 4096]>, epoch| {
        let contents = content.map_or(Contents::None, Contents::Page);
        let lane = lanes[0].get_mut(&0).expect("a lane");
        lane.send(&Body::Protocol(message, contents), epoch).expect("sent");
    };
    let pass_on = || Message::Grant(Grant { to: NodeId(2), payload: Payload::Page, ..grant(0) });
    let accept = |epoch, round| {
        Message::Membership(Membership::Accept {
            view: View { epoch: Epoch(epoch), members: NodeSet::first(3) },
            round,
        })
    };
    // Each is early.
    for (epoch, byte) in [(65, 5), (129, 6)] {
        send(&mut owner, accept(epoch, 1), None, 0);
        send(&mut owner, pass_on(), Some(&[byte; 4096]), epoch);
    }
    for lanes in [&mut owner, &mut requester] {
        for message in [
            accept(129, 1),
            accept(129, 2),
            Message::Membership(Membership::Holdings { epoch: Epoch(129), last: true, pages: Vec::new() }),
            Message::Membership(Membership::Directory { epoch: Epoch(129), last: true, pages: Vec::new() }),
        ] {
            send(lanes, message, None, 0);
        }
    }
    let (begin, mut came) = (Instant::now(), None);
    while came.is_none() {
        assert!(begin.elapsed() < HANG, "nothing is passed on");
        let take = |_: &_, body: Body<'_>| {
            if let Body::Protocol(Message::Grant(_), Contents::Page(content)) = body {
                came = Some(content[7]);
            }
        };
        requester[0].get_mut(&0).expect("a lane").receive(take).expect("frames");
        thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(came, Some(6));
    node.stop();
}

/// What one shard excludes, because others agreed on that, the other shards do not go on with.
#[test]
fn a_node_that_one_shard_excludes_is_suspected_by_all() {
    let Some(mut parts) = connected(3, PAGES, Transport::Shm, patient()) else { return };
    let (_third, (_second, mut lanes)) = (parts.pop(), parts.pop().expect("three"));
    let (region, ours) = parts.pop().expect("three");
    let node = Node::start(&Config::new(0, 3, PAGES), region, ours, |_| {}).expect("starts");
    // Node 1 wants to go on without node 2, and says so to the first shard alone.
    let view = View { epoch: Epoch(65), members: NodeSet::first(2) };
    let messages = [
        Membership::Accept { view, round: 1 },
        Membership::Accept { view, round: 2 },
        Membership::Holdings { epoch: Epoch(65), last: true, pages: Vec::new() },
        Membership::Directory { epoch: Epoch(65), last: true, pages: Vec::new() },
    ];
    let agree = |lanes: &mut Lanes, shard: usize| {
        let lane = lanes[shard].get_mut(&0).expect("a lane");
        for message in messages.clone() {
            lane.send(&Body::Protocol(Message::Membership(message), Contents::None), 0).expect("sent");
        }
    };
    agree(&mut lanes, 0);
    let (begin, mut proposed) = (Instant::now(), false);
    while !proposed {
        assert!(begin.elapsed() < HANG, "the second shard goes on with node 2");
        let take = |_: &_, body: Body<'_>| {
            if let Body::Protocol(Message::Membership(Membership::Accept { view, round: 1 }), _) = body {
                proposed |= view.members == NodeSet::first(2);
            }
        };
        lanes[1].get_mut(&0).expect("a lane").receive(take).expect("frames");
        thread::sleep(std::time::Duration::from_millis(1));
    }
    // The receiver may end this node, and its second shard has not agreed yet.
    let members = |happening: &Happening| matches!(happening, Happening::Members { .. });
    assert!(!node.happenings().iter().any(members), "{:?}", node.happenings());
    agree(&mut lanes, 1);
    assert_eq!(told(&node, members), Happening::Members { members: vec![0, 1], lost: vec![2] });
    node.stop();
}
