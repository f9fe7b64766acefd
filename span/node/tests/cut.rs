//! Second copies: what survivors put together after a node was lost is the memory as it was at the cut.

mod common;

use common::{Transport, Words, cluster, told, until};
use std::{collections::BTreeMap, sync::atomic::Ordering::SeqCst, thread};
use vnuma_dsm_node::{Happening, Node, NodeError};

const PAGES: u64 = 64;

/// All nodes cut, each in a thread of its own.
fn cut(nodes: &[Node]) -> Vec<Result<u64, NodeError>> {
    thread::scope(|scope| {
        let threads: Vec<_> = nodes.iter().map(|node| scope.spawn(|| node.cut())).collect();
        until("it hangs", || threads.iter().all(thread::ScopedJoinHandle::is_finished));
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Word 7 of each page is written by the node whose turn it is.
fn write(nodes: &[Node], round: u64) {
    for page in (0..PAGES).filter(|page| page % 5 != 4) {
        let node = (page + round) as usize % nodes.len();
        Words::of(&nodes[node]).at(page, 7).store(round << 32 | page, SeqCst);
        // Copies elsewhere do not matter.
        Words::of(&nodes[(node + 1) % nodes.len()]).at(page, 7).load(SeqCst);
    }
}

#[test]
fn survivors_have_the_memory_of_the_newest_cut() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let Some(mut nodes) = cluster(3, PAGES, transport, |_| {}) else { return };
        for round in 1..=3 {
            write(&nodes, round);
            let numbers: Vec<_> = cut(&nodes).into_iter().map(|outcome| outcome.expect("a cut")).collect();
            assert_eq!(numbers, [round; 3]);
        }
        // Not in any cut.
        write(&nodes, 9);
        let lost = nodes.remove(1);
        drop(lost);
        for node in &nodes {
            node.suspect(1);
            told(
                node,
                |happening| matches!(happening, Happening::Members { members, .. } if members == &[0, 2]),
            );
        }
        let copies: Vec<_> = nodes.iter().map(Node::copies).collect();
        nodes.into_iter().for_each(|node| drop(node.stop()));
        let newest = copies.iter().map(|copies| copies.newest()).max();
        assert_eq!(newest, Some(3));
        let mut memory = BTreeMap::new();
        for copies in &copies {
            copies.restore(3, &[0, 2], |page, content| {
                let word = content.as_chunks::<8>().0[7];
                assert_eq!(
                    memory.insert(page, u64::from_le_bytes(word)),
                    None,
                    "page {page} is put back twice"
                );
            });
        }
        let right: BTreeMap<u64, u64> =
            (0..PAGES).filter(|page| page % 5 != 4).map(|page| (page, 3 << 32 | page)).collect();
        assert_eq!(memory, right);
    }
}

#[test]
fn a_cut_that_a_lost_node_did_not_begin_fails_by_name() {
    let Some(mut nodes) = cluster(3, PAGES, Transport::Shm, |_| {}) else { return };
    write(&nodes, 1);
    assert!(cut(&nodes).iter().all(Result::is_ok));
    write(&nodes, 2);
    let lost = nodes.pop().expect("three");
    let waits = thread::scope(|scope| {
        let threads: Vec<_> = nodes.iter().map(|node| scope.spawn(|| node.cut())).collect();
        // They wait for the third.
        thread::sleep(std::time::Duration::from_millis(100));
        assert!(
            !threads.iter().any(thread::ScopedJoinHandle::is_finished),
            "a cut without a member is complete"
        );
        drop(lost);
        nodes.iter().for_each(|node| node.suspect(2));
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
    });
    for outcome in waits {
        assert_eq!(outcome.expect_err("no cut").to_string(), "cut 2: a member was lost");
    }
    assert_eq!(nodes.iter().map(|node| node.copies().newest()).collect::<Vec<_>>(), [1, 1]);
    nodes.into_iter().for_each(|node| drop(node.stop()));
}

/// A keeper takes the content that it is sent, whether or not its own copy of the page is used meanwhile.
#[test]
fn a_page_that_a_keeper_has_pinned_is_in_the_cut() {
    let Some(nodes) = cluster(2, PAGES, Transport::Shm, |_| {}) else { return };
    Words::of(&nodes[1]).at(0, 7).store(5, SeqCst);
    assert_eq!(Words::of(&nodes[0]).at(0, 7).load(SeqCst), 5);
    let pin = nodes[0].region().pin(0, vnuma_dsm_pager::Access::Read).expect("pinned");
    assert!(cut(&nodes).iter().all(Result::is_ok));
    drop(pin);
    let mut kept = Vec::new();
    nodes[0].copies().restore(1, &[0], |page, content| kept.push((page, content[7 * 8])));
    assert_eq!(kept, [(0, 5)]);
    nodes.into_iter().for_each(|node| drop(node.stop()));
}
