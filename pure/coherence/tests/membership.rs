//! Nodes that are lost, suspected and cut off.

mod common;

use common::{Cluster, check, managers};
use std::collections::VecDeque;
use vnuma_coherence::{Access, Command, Event, Managers, Node, NodeId, NodeSet, Options, PageId, StopReason};

fn suspect(cluster: &mut Cluster, node: usize, other: u8) -> Vec<Command> {
    cluster.event(node, 0, Event::Suspect { node: NodeId(other) })
}

fn set(nodes: &[u8]) -> NodeSet {
    nodes.iter().map(|node| NodeId(*node)).collect()
}

/// The first pair with a message that passes.
fn next(cluster: &Cluster, passes: impl Fn(&(usize, usize)) -> bool) -> Option<(usize, usize)> {
    cluster.deliverable().find(passes)
}

/// Node 2 manages nothing and is lost.
fn lose_node_2(cluster: &mut Cluster) {
    cluster.kill(2);
    suspect(cluster, 1, 2);
    cluster.drain(&mut Vec::new());
}

#[test]
fn a_page_whose_only_copy_is_lost_is_said_to_be_lost() {
    let managers = Managers::new(&[(1, NodeId(0)), (1, NodeId(1))]).unwrap();
    for options in [Options::ivy(), Options::default()] {
        let mut cluster = Cluster::new(3, &managers, options);
        cluster.settle(2, 0, true);
        // A thread waits for it when node 2 is lost.
        cluster.event(1, 0, Event::Fault { page: PageId(0), write: false });
        lose_node_2(&mut cluster);
        assert_eq!(cluster.nodes[0].view().members, set(&[0, 1]));
        let cell = cluster.memory[1][0];
        assert!(cell.poisoned && cell.woken, "a waiting thread gets an error: {cell:?}");
        cluster.event(0, 0, Event::Fault { page: PageId(0), write: true });
        cluster.drain(&mut Vec::new());
        assert!(cluster.memory[0][0].poisoned);
        // The other page was never there.
        cluster.settle(0, 1, true);
        assert_eq!(cluster.wrong, Vec::<String>::new());
    }
}

/// Pages that nobody has touched are there as long as their manager is, also those beside pages of a lost manager.
#[test]
fn an_untouched_page_of_a_living_manager_is_not_lost() {
    let managers = Managers::new(&[(2, NodeId(0)), (2, NodeId(2)), (2, NodeId(1))]).unwrap();
    for options in [Options::ivy(), Options { hold_ns: 0, ..Options::default() }] {
        let mut cluster = Cluster::new(3, &managers, options);
        lose_node_2(&mut cluster);
        for page in [0, 1, 4, 5] {
            cluster.settle(0, page, page % 2 == 0);
            cluster.settle(1, page, true);
        }
        assert!(common::lost_for_nothing(&cluster).is_none());
        // The first touch comes while the members agree, at any moment.
        for moment in 0..20 {
            let mut cluster = Cluster::new(3, &managers, options);
            cluster.kill(2);
            suspect(&mut cluster, 1, 2);
            for _ in 0..moment {
                let next = next(&cluster, |_| true);
                next.map(|(from, to)| cluster.deliver(from, to, 0));
            }
            for node in [0, 1] {
                for page in [0, 4] {
                    cluster.event(node, 0, Event::Fault { page: PageId(page), write: false });
                }
            }
            cluster.drain(&mut Vec::new());
            for (node, page) in [(0, 0), (1, 0), (0, 4), (1, 4)] {
                cluster.settle(node, page, true);
            }
            assert_eq!(common::lost_for_nothing(&cluster), None, "after {moment} messages");
        }
    }
}

/// Of a large region the next manager knows no more pages than before, and says all the same which are lost.
#[test]
fn a_lost_manager_of_many_pages_takes_the_next_one_no_memory() {
    const PAGES: u64 = 1 << 18;
    let managers = Managers::new(&[(PAGES, NodeId(0)), (PAGES, NodeId(2))]).unwrap();
    let node = |own| Node::new(NodeId(own), set(&[0, 1, 2]), managers.clone(), Options::default());
    let (mut nodes, mut commands) = ([node(0), node(1)], Vec::new());
    nodes[0].step(0, Event::Suspect { node: NodeId(2) }, &mut commands);
    let mut sent: VecDeque<_> = commands.drain(..).map(|command| (0, command)).collect();
    while let Some((from, command)) = sent.pop_front() {
        let Command::Send { to, frame } = command else { continue };
        if let Some(node) = nodes.get_mut(usize::from(to.0)) {
            node.step(0, Event::Receive { from: NodeId(from), frame }, &mut commands);
            sent.extend(commands.drain(..).map(|command| (to.0, command)));
        }
    }
    assert_eq!(nodes[0].view().members, set(&[0, 1]));
    let size = format!("{:?}", nodes[0]).len();
    assert!(size < 32 << 10, "{size} bytes as text");
    for (page, lost) in [(0, false), (PAGES - 1, false), (PAGES, true), (2 * PAGES - 1, true)] {
        let page = PageId(page);
        // Whether somebody has asked for it or not.
        assert_eq!(nodes[0].is_owner(page), !lost);
        nodes[0].step(0, Event::Fault { page, write: true }, &mut commands);
        assert_eq!(commands.contains(&Command::Poison { page }), lost, "{commands:?}");
        assert_eq!(nodes[0].is_owner(page), !lost);
        commands.clear();
    }
}

#[test]
fn a_page_with_another_copy_survives_its_owner() {
    let managers = Managers::new(&[(1, NodeId(2)), (1, NodeId(2))]).unwrap();
    let mut cluster = Cluster::new(3, &managers, Options::default());
    cluster.settle(2, 0, true);
    cluster.settle(1, 0, false);
    cluster.settle(2, 1, true);
    lose_node_2(&mut cluster);
    assert!(cluster.nodes[1].is_owner(PageId(0)), "the only holder owns it now");
    cluster.settle(0, 0, true);
    assert_eq!(cluster.memory[0][0].value, 2, "node 2 wrote once, node 0 once");
    check(&cluster.memory, &[2, 1], |node| node != 2).unwrap();
    // Its manager is lost, and the next member knows that the page is.
    cluster.event(1, 0, Event::Fault { page: PageId(1), write: false });
    cluster.drain(&mut Vec::new());
    assert!(cluster.memory[1][1].poisoned);
}

#[test]
fn a_suspected_node_that_resumes_is_refused_and_stops() {
    let mut cluster = Cluster::new(3, &managers(3, 3), Options::default());
    cluster.settle(2, 0, true);
    let mut all = suspect(&mut cluster, 0, 2);
    // Node 2 stands still: nothing is delivered to it.
    while let Some((from, to)) = next(&cluster, |(_, to)| *to != 2) {
        all.extend(cluster.deliver(from, to, 0));
    }
    assert_eq!(cluster.nodes[1].view().members, set(&[0, 1]));
    assert_eq!(cluster.memory[2][0].access, Access::Write, "it does not know yet");
    // It resumes and asks for a page.
    let members = cluster.count();
    cluster.network.iter_mut().for_each(|queue| queue.clear());
    cluster.event(2, 0, Event::Fault { page: PageId(1), write: true });
    let refused = cluster.deliver(2, 1, 0);
    assert!(
        !refused.is_empty()
            && refused.iter().all(|command| matches!(command, Command::Send { to: NodeId(2), .. }))
    );
    let stopped = cluster.deliver(1, 2, 0);
    assert_eq!(stopped, [Command::Stop { reason: StopReason::Fenced }]);
    assert!(cluster.nodes[2].is_stopped() && cluster.memory[2][0].access == Access::None);
    assert_eq!(cluster.event(2, 0, Event::Fault { page: PageId(1), write: true }), []);
    assert_eq!(members, 3);
}

#[test]
fn the_majority_wins_a_partition_and_the_minority_stops() {
    let mut cluster = Cluster::new(5, &managers(5, 5), Options::default());
    for (node, other) in
        [(0, 2), (0, 3), (1, 2), (1, 3), (0, 4), (1, 4), (2, 0), (3, 0), (4, 0), (2, 1), (3, 1), (4, 1)]
    {
        suspect(&mut cluster, node, other);
    }
    // Nothing passes between {0, 1} and {2, 3, 4}.
    while let Some((from, to)) = next(&cluster, |(from, to)| (*from < 2) == (*to < 2)) {
        cluster.deliver(from, to, 0);
    }
    let stopped: Vec<_> = cluster.nodes.iter().map(vnuma_coherence::Node::is_stopped).collect();
    assert_eq!(stopped, [true, true, false, false, false]);
    assert!((2..5).all(|node| cluster.nodes[node].view().members == set(&[2, 3, 4])));
    // Half is no majority.
    let mut cluster = Cluster::new(4, &managers(4, 4), Options::default());
    suspect(&mut cluster, 0, 2);
    assert_eq!(suspect(&mut cluster, 0, 3), [Command::Stop { reason: StopReason::Minority }]);
}

#[test]
fn contents_on_their_way_between_members_are_not_lost() {
    for options in [Options::ivy(), Options::default()] {
        let mut cluster = Cluster::new(4, &Managers::new(&[(1, NodeId(0))]).unwrap(), options);
        cluster.settle(1, 0, true);
        cluster.event(2, 0, Event::Fault { page: PageId(0), write: true });
        cluster.deliver(2, 0, 0);
        cluster.deliver(0, 1, 0);
        // The page has left node 1 and is on its way, in ivy to the relay, when node 3 is suspected.
        assert!(!cluster.nodes[1].is_owner(PageId(0)));
        cluster.kill(3);
        suspect(&mut cluster, 0, 3);
        cluster.drain(&mut Vec::new());
        assert!(cluster.access(2, 0, true), "it came: {:?}", cluster.memory);
        cluster.settle(0, 0, false);
        assert_eq!(cluster.memory[0][0].value, 2);
    }
}

#[test]
fn two_nodes_that_propose_at_once_agree_on_what_both_keep() {
    let mut cluster = Cluster::new(5, &managers(5, 5), Options::default());
    // Node 0 gives up node 4, node 1 gives up node 0, and both ask node 2.
    suspect(&mut cluster, 0, 4);
    suspect(&mut cluster, 1, 0);
    cluster.deliver(0, 2, 0);
    cluster.drain(&mut Vec::new());
    let views: Vec<_> =
        cluster.nodes.iter().filter(|node| !node.is_stopped()).map(vnuma_coherence::Node::view).collect();
    assert!(views.len() >= 3 && views.iter().all(|view| *view == views[0]), "{views:?}");
    assert_eq!(views[0].members, set(&[1, 2, 3]));
}
