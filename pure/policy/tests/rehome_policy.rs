//! What the policy for homes of guest nodes promises, wherever vCPUs go.

use proptest::prelude::*;
use vnuma_policy::{
    rehome_policy::{NodeView, Patience, RehomeSettings, Rehomer},
    world::VmId,
};

const SECOND_NS: u64 = 1_000_000_000;
const PAGE: u64 = 4096;
const VM: VmId = 1;
const SETTINGS: RehomeSettings =
    RehomeSettings { auto: true, settle_ns: 60 * SECOND_NS, rest_ns: 600 * SECOND_NS };

/// A guest node of 1000 pages; each would save so much in a second on the node that its vCPUs stay on.
fn view(stays: Option<u32>, saving: Option<f64>) -> NodeView {
    NodeView { guest_node: 0, stays, away_bytes: 1000 * PAGE, bytes: 1000 * PAGE, distance: 21, saving }
}

/// Seconds after which it gets another home, with a look at it every ten.
fn after(view: NodeView) -> Option<u64> {
    let mut rehomer = Rehomer::default();
    (0..4000).step_by(10).find(|s| rehomer.decide(&SETTINGS, VM, &[view], s * SECOND_NS).is_some())
}

#[test]
fn a_move_has_to_have_paid_twice() {
    // A page costs 1000 tenths to move and 20 to look at; twice that is lost after 2040 / saving seconds.
    assert_eq!(after(view(Some(1), Some(100.0))), Some(60), "it pays long before they have settled");
    assert_eq!(after(view(Some(1), Some(20.0))), Some(110));
    assert_eq!(after(view(Some(1), Some(2.0))), Some(1030));
    assert_eq!(after(view(Some(1), Some(0.0))), None, "it does nothing");
    assert_eq!(after(view(Some(1), Some(-3.0))), None, "it would lose by it");
    assert_eq!(after(view(Some(1), None)), Some(60), "ten accesses a second, 11 tenths nearer each");
    assert_eq!(after(view(None, None)), None);
    assert_eq!(after(NodeView { away_bytes: PAGE - 1, ..view(Some(1), None) }), None);
}

#[test]
fn vcpus_that_go_elsewhere_begin_anew() {
    let mut rehomer = Rehomer::default();
    let mut at = |s: u64, stays| rehomer.decide(&SETTINGS, VM, &[view(stays, None)], s * SECOND_NS);
    assert_eq!(
        (at(0, Some(1)), at(50, Some(2)), at(70, Some(2)), at(80, None), at(90, Some(2))),
        Default::default()
    );
    assert_eq!(at(149, Some(2)), None);
    let (guest_node, to, why) = at(150, Some(2)).expect("settled");
    assert_eq!((guest_node, to, why.stayed_ns, why.assumed), (0, 2, 60 * SECOND_NS, true));
    // 60 s, 1000 pages, 110 tenths of 100 ns a second each.
    assert_eq!((why.lost_ns, why.price_ns), (66_000_000, 10_200_000));
}

#[test]
fn the_guest_node_that_loses_most_goes_first_and_the_other_one_later() {
    let mut rehomer = Rehomer::default();
    let nodes = [view(Some(2), Some(50.0)), NodeView { guest_node: 1, ..view(Some(3), Some(90.0)) }];
    let mut at =
        |s: u64| rehomer.decide(&SETTINGS, VM, &nodes, s * SECOND_NS).map(|(node, to, _)| (node, to));
    assert_eq!((at(0), at(60), at(61)), (None, Some((1, 3)), Some((0, 2))));
}

#[test]
fn a_vm_that_is_gone_and_one_without_the_policy_are_forgotten() {
    let mut rehomer = Rehomer::default();
    let views = [view(Some(1), None)];
    rehomer.decide(&SETTINGS, VM, &views, 0);
    rehomer.forget(VM);
    assert_eq!(rehomer.decide(&SETTINGS, VM, &views, 60 * SECOND_NS), None);
    let off = RehomeSettings { auto: false, ..SETTINGS };
    assert_eq!(rehomer.decide(&off, VM, &views, 300 * SECOND_NS), None);
    assert_eq!(rehomer.decide(&SETTINGS, VM, &views, 301 * SECOND_NS), None);
}

#[test]
fn what_it_waits_for_is_what_it_decides_by() {
    let mut rehomer = Rehomer::default();
    let staying = view(Some(1), Some(20.0));
    let waits =
        |rehomer: &Rehomer, view: NodeView, s: u64| rehomer.waits_for(&SETTINGS, VM, &view, s * SECOND_NS);
    assert_eq!(waits(&rehomer, view(None, None), 0), None);
    assert_eq!(waits(&rehomer, NodeView { away_bytes: PAGE - 1, ..staying }, 0), None);
    assert_eq!(rehomer.decide(&SETTINGS, VM, &[staying], 0), None);
    let settles =
        |stayed_s| Some(Patience::Settles { stayed_ns: stayed_s * SECOND_NS, settle_ns: 60 * SECOND_NS });
    assert_eq!(waits(&rehomer, staying, 59), settles(59));
    assert_eq!(waits(&rehomer, view(Some(2), Some(20.0)), 59), settles(0), "they have gone on");
    // 1000 pages lose 20 tenths of 100 ns each a second, and the move costs 10.2 ms: twice that is lost after 102 s.
    let Some(Patience::Costs(why)) = waits(&rehomer, staying, 60) else { panic!("it does not pay yet") };
    assert_eq!((why.lost_ns, why.price_ns, why.assumed), (12_000_000, 10_200_000, false));
    assert!(matches!(waits(&rehomer, staying, 102), Some(Patience::Costs(_))));
    assert_eq!(waits(&rehomer, staying, 103), Some(Patience::Due));
    assert!(rehomer.decide(&SETTINGS, VM, &[staying], 103 * SECOND_NS).is_some());
    assert_eq!(waits(&rehomer, staying, 104), Some(Patience::Rests { for_ns: 599 * SECOND_NS }));
    assert_eq!(waits(&rehomer, staying, 703), settles(0), "nothing was seen since");
}

proptest! {
    #[test]
    fn what_waits_for_nothing_is_decided_at_the_next_look_and_nothing_else_is(
        steps in prop::collection::vec((1_u64..120, prop::option::of(1_u32..4), -5.0_f64..200.0), 1..100),
    ) {
        let (mut rehomer, mut now_s) = (Rehomer::default(), 0);
        for (wait, stays, saving) in steps {
            now_s += wait;
            let (view, now_ns) = (view(stays, Some(saving)), now_s * SECOND_NS);
            let due = rehomer.waits_for(&SETTINGS, VM, &view, now_ns) == Some(Patience::Due);
            prop_assert_eq!(rehomer.decide(&SETTINGS, VM, &[view], now_ns).is_some(), due);
        }
    }

    #[test]
    fn no_place_is_left_for_vcpus_that_pass_and_homes_are_few(
        steps in prop::collection::vec((1_u64..120, prop::option::of(1_u32..4), -5.0_f64..200.0), 1..300),
    ) {
        let mut rehomer = Rehomer::default();
        let (mut now_s, mut homes, mut since) = (0, Vec::new(), None);
        for (wait, stays, saving) in steps {
            now_s += wait;
            if since.map(|(node, _)| Some(node)) != Some(stays) {
                since = stays.map(|node| (node, now_s));
            }
            let decided = rehomer.decide(&SETTINGS, VM, &[view(stays, Some(saving))], now_s * SECOND_NS);
            if let Some((_, to, why)) = decided {
                let (node, since_s) = since.expect("they stay somewhere");
                prop_assert_eq!(to, node);
                prop_assert!(now_s - since_s >= 60 && why.stayed_ns <= (now_s - since_s) * SECOND_NS);
                prop_assert!(why.lost_ns > 2 * why.price_ns);
                homes.push(now_s);
            }
        }
        prop_assert!(homes.len() as u64 <= 1 + now_s / 600);
        // The third of a row rests twice as long as the second.
        for three in homes.windows(3) {
            prop_assert!(three[2] - three[1] >= 1200 || three[1] - three[0] >= 1200, "{:?}", three);
        }
    }
}
