//! What the policies that bring displaced memory home promise, whatever is displaced, full or stuck.

#[path = "common/decide.rs"]
mod decide;

use decide::decide;
use proptest::prelude::*;
use vnuma_policy::{
    memory_move::{HomeCause, LEAST, MemoryPolicy, MemoryReason, MoveMemory, NodeMemory, SAVED_S},
    repatriation::{FIRST_REST_NS, HomeArea, HomeInput, LONGEST_REST_NS, MemorySettings, Repatriator, Stray},
};

const SECOND_NS: u64 = 1_000_000_000;
const MINUTE_NS: u64 = 60 * SECOND_NS;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const PAGE: u64 = 4096;

fn settings() -> MemorySettings {
    MemorySettings { bytes_per_s: 64 * MIB, ..MemorySettings::default() }
}

/// A VM of two guest nodes of 8 GiB, at home on nodes 0 and 1, with so much of the first one on nodes 1 and 2.
struct Run {
    repatriator: Repatriator,
    settings: MemorySettings,
    policy: MemoryPolicy,
    vms: usize,
    displaced: [u64; 2],
    free_kib: u64,
    saving: Option<f64>,
    /// Size of its pages.
    page_kib: u64,
    ready: bool,
    now_ns: u64,
}

impl Run {
    fn new(policy: MemoryPolicy) -> Self {
        Self {
            repatriator: Repatriator::default(),
            settings: settings(),
            policy,
            vms: 1,
            displaced: [0, 0],
            free_kib: 16 << 20,
            saving: None,
            page_kib: 4,
            ready: true,
            now_ns: 1,
        }
    }

    fn areas(&self) -> Vec<HomeArea> {
        let stray = |(node, bytes): (u32, u64)| Stray {
            node,
            bytes,
            high: bytes + bytes / 8,
            distance: 21,
            saving: self.saving,
            heat: None,
        };
        let room = NodeMemory { total_kib: 32 << 20, free_kib: self.free_kib };
        let strays = [(1, self.displaced[0]), (2, self.displaced[1])].map(stray);
        let first = HomeArea {
            guest_node: 0,
            home: 0,
            within: (GIB, 9 * GIB),
            page_kib: self.page_kib,
            strays: strays.to_vec(),
            room,
        };
        let second = HomeArea {
            guest_node: 1,
            home: 1,
            within: (9 * GIB, 17 * GIB),
            page_kib: 4,
            strays: Vec::new(),
            room,
        };
        vec![first, second]
    }

    fn look(&mut self) -> Option<MoveMemory> {
        let areas = self.areas();
        let input = HomeInput {
            vm: 7,
            policy: self.policy,
            sharers: self.vms,
            memory_bytes: 16 * GIB,
            areas: &areas,
            ready: self.ready,
            now_ns: self.now_ns,
        };
        decide(&mut self.repatriator, &self.settings, &input)
    }

    /// A minute later.
    fn minute(&mut self) -> Option<MoveMemory> {
        self.now_ns += MINUTE_NS;
        self.look()
    }

    /// All of it moves, or none.
    fn carry_out(&mut self, order: &MoveMemory, moves: bool) {
        let displaced = &mut self.displaced[order.from as usize - 1];
        let moved = if moves { order.bytes.min(*displaced) } else { 0 };
        *displaced -= moved;
        let stayed = if moves { 0 } else { 64 * PAGE };
        self.repatriator.ended(7, order, moved, stayed, self.now_ns);
    }

    /// Until nothing is wanted any more. Returns what was moved.
    fn finish(&mut self) -> u64 {
        let before: u64 = self.displaced.iter().sum();
        for _ in 0..1000 {
            match self.minute() {
                Some(order) => self.carry_out(&order, true),
                None if !self.repatriator.in_round(7) => break,
                None => {}
            }
        }
        before - self.displaced.iter().sum::<u64>()
    }
}

fn cause(order: &MoveMemory) -> HomeCause {
    match order.why {
        MemoryReason::Home(why) => why.cause,
        MemoryReason::Nearer(_) | MemoryReason::Rehome(_) => panic!("{order:?}"),
    }
}

#[test]
fn the_amount_starts_a_round_that_brings_everything_home() {
    let mut run = Run::new(MemoryPolicy::Amount);
    let amount = 16 * GIB * 30 / 1000;
    run.displaced = [amount / 2, amount / 2 - PAGE];
    assert_eq!((run.minute(), run.minute()), (None, None), "less than the amount");
    run.displaced[1] += 2 * PAGE;
    let order = run.minute().expect("the amount");
    assert_eq!((cause(&order), order.from, order.to), (HomeCause::Amount, 2, 0), "the larger part first");
    assert_eq!(order.within, Some((GIB, 9 * GIB)), "only that guest node's");
    run.carry_out(&order, true);
    assert!(run.repatriator.in_round(7));
    run.finish();
    assert_eq!(run.displaced, [0, 0], "also what is less than the amount");
}

#[test]
fn the_period_starts_a_round_every_quarter_of_an_hour() {
    let mut run = Run::new(MemoryPolicy::Periodic);
    run.displaced = [4 * MIB, 0];
    assert!((0..15).all(|_| run.look().is_none() && {
        run.now_ns += MINUTE_NS;
        true
    }));
    let order = run.look().expect("900 s are over");
    assert_eq!(cause(&order), HomeCause::Period);
    run.carry_out(&order, true);
    assert_eq!(run.finish(), 0);
    run.displaced = [8 * GIB, 0];
    let began_ns = run.now_ns;
    while run.look().is_none() {
        run.now_ns += MINUTE_NS;
    }
    assert!(run.now_ns - began_ns <= 900 * SECOND_NS && run.now_ns > began_ns, "however much it is");
}

#[test]
fn both_starts_with_whichever_comes_first() {
    let mut run = Run::new(MemoryPolicy::Both);
    run.displaced = [GIB, 0];
    run.look();
    assert_eq!(run.minute().as_ref().map(cause), Some(HomeCause::Amount));
    let mut run = Run::new(MemoryPolicy::Both);
    run.displaced = [8 * MIB, 0];
    run.look();
    run.now_ns += 900 * SECOND_NS;
    assert_eq!(run.look().as_ref().map(cause), Some(HomeCause::Period));
}

#[test]
fn none_moves_nothing() {
    let mut run = Run::new(MemoryPolicy::None);
    run.displaced = [4 * GIB, 4 * GIB];
    assert!((0..100).all(|_| run.minute().is_none()));
}

#[test]
fn adaptive_leaves_what_nobody_uses_and_takes_what_is_used() {
    let of = |saving, displaced| {
        let mut run = Run::new(MemoryPolicy::Adaptive);
        (run.saving, run.displaced) = (saving, [displaced, 0]);
        run.look();
        run.minute()
    };
    assert_eq!(of(Some(0.0), 4 * GIB), None, "nobody accesses it");
    assert_eq!(of(Some(-50.0), 4 * GIB), None, "its vCPUs are nearer to it than to the home");
    assert_eq!(of(Some(1000.0), 64 * MIB).as_ref().map(cause), Some(HomeCause::Pays));
    // Nothing is counted: 1 % of the guest node pays, a thousandth does not.
    assert!(of(None, 8 * GIB / 90).is_some());
    assert_eq!(of(None, 8 * GIB / 1000), None);
}

#[test]
fn adaptive_takes_the_dearest_first() {
    let mut run = Run::new(MemoryPolicy::Adaptive);
    run.displaced = [GIB, 2 * GIB];
    run.look();
    run.now_ns += MINUTE_NS;
    let mut areas = run.areas();
    (areas[0].strays[0].saving, areas[0].strays[1].saving) = (Some(900.0), Some(500.0));
    let (policy, vms, memory_bytes, ready, now_ns) = (run.policy, 1, 16 * GIB, true, run.now_ns);
    let input = HomeInput { vm: 7, policy, sharers: vms, memory_bytes, areas: &areas, ready, now_ns };
    assert_eq!(decide(&mut run.repatriator, &run.settings, &input).map(|order| order.from), Some(1));
}

#[test]
fn what_cannot_be_moved_rests_twice_as_long_each_time() {
    let mut run = Run::new(MemoryPolicy::Amount);
    run.displaced = [GIB, 0];
    run.look();
    let (mut tries, mut last_ns) = (Vec::new(), 0);
    for _ in 0..2000 {
        if let Some(order) = run.minute() {
            tries.push(run.now_ns - last_ns);
            last_ns = run.now_ns;
            run.carry_out(&order, false);
            assert!(run.repatriator.rests_until_ns(7, run.now_ns).is_some());
        }
    }
    let rests: Vec<u64> = tries[1..8].iter().map(|ns| ns / MINUTE_NS).collect();
    assert_eq!(rests, [1, 2, 4, 8, 16, 32, 60], "minutes");
    assert!(tries[8..].iter().all(|ns| *ns == LONGEST_REST_NS), "once an hour from then on: {tries:?}");
    // It can be moved after all.
    run.now_ns += LONGEST_REST_NS;
    assert!(run.finish() > 0);
    assert_eq!((run.displaced[0], run.repatriator.rests_until_ns(7, run.now_ns)), (0, None));
}

#[test]
fn a_full_home_is_left_alone_for_a_while() {
    let mut run = Run::new(MemoryPolicy::Amount);
    run.displaced = [GIB, 0];
    // All of it is the node's reserve.
    run.free_kib = 2 << 20;
    run.look();
    assert_eq!(
        (run.minute(), run.repatriator.rests_until_ns(7, run.now_ns)),
        (None, Some(run.now_ns + FIRST_REST_NS * 2))
    );
    run.free_kib = 4 << 20;
    assert_eq!(run.minute(), None, "it rests");
    run.now_ns += MINUTE_NS;
    let order = run.look().expect("there is room");
    assert!(order.bytes <= 2 * GIB && order.reserve_kib == 2 << 20, "{order:?}");
}

#[test]
fn what_may_move_is_saved_up_by_the_rate_for_twenty_seconds_at_most() {
    let mut run = Run::new(MemoryPolicy::Amount);
    run.displaced = [8 * GIB, 0];
    assert_eq!(run.look(), None, "nothing is saved yet");
    for (seconds, saved) in [(5, 5), (1, 1), (3600, SAVED_S)] {
        run.now_ns += seconds * SECOND_NS;
        let order = run.look().expect("more is displaced than that");
        assert_eq!(order.bytes, saved * 64 * MIB, "after {seconds} s");
        run.carry_out(&order, true);
        assert_eq!(run.look(), None, "all of it is spent");
    }
    // An observation that is older than the last one.
    run.now_ns -= 10 * SECOND_NS;
    assert_eq!(run.look(), None);
    run.now_ns += 10 * SECOND_NS;
    assert_eq!(run.look(), None, "the same seconds are not saved up twice");
    // Two VMs share the rate.
    run.vms = 2;
    run.now_ns += 5 * SECOND_NS;
    assert_eq!(run.look().map(|order| order.bytes), Some(5 * 32 * MIB));
}

#[test]
fn a_move_has_its_price_and_what_it_saves() {
    let mut run = Run::new(MemoryPolicy::Amount);
    run.displaced = [8 * GIB, 0];
    run.look();
    run.now_ns += SECOND_NS;
    let order = run.look().expect("more is displaced than the amount");
    let MemoryReason::Home(why) = order.why else { panic!("{order:?}") };
    // 16384 pages at 10 us each, and as much of a look at all 2097152 pages at 0.2 us as these are of those displaced.
    let price_ns = 16384.0 * 10_000.0 + 2_097_152.0 * 200.0 * 64.0 / 8192.0;
    assert!((why.price_ns - price_ns).abs() < 1.0, "{} of {price_ns}", why.price_ns);
    // Ten accesses a second to each, which are 1.1 local ones longer: 110 ns.
    assert!((why.saving_ns_per_s - 16384.0 * 10.0 * 110.0).abs() < 1.0, "{why:?}");
    assert!(why.assumed && why.displaced_bytes == 8 * GIB, "{why:?}");
    run.saving = Some(50.0);
    run.now_ns += SECOND_NS;
    let order = run.look().expect("a round goes on");
    let MemoryReason::Home(why) = order.why else { panic!("{order:?}") };
    assert!((why.saving_ns_per_s - 16384.0 * 500.0).abs() < 1.0 && !why.assumed, "{why:?}");
}

#[test]
fn no_move_is_smaller_than_the_least_if_there_is_as_much() {
    let mut run = Run::new(MemoryPolicy::Amount);
    (run.displaced, run.settings.bytes_per_s) = ([4 * GIB, 0], LEAST / 4);
    run.look();
    for second in 1..4 {
        run.now_ns += SECOND_NS;
        assert_eq!(run.look(), None, "second {second}");
    }
    run.now_ns += SECOND_NS;
    assert_eq!(run.look().map(|order| order.bytes), Some(LEAST));
    // The same of the room at home, beside its reserve.
    run.free_kib = (2 << 20) + LEAST / 1024;
    assert_eq!(run.minute().map(|order| order.bytes), Some(LEAST));
    run.free_kib -= 1;
    assert_eq!(run.minute(), None);
    assert!(run.repatriator.rests_until_ns(7, run.now_ns).is_some(), "there is no room");
}

#[test]
fn a_round_begins_at_the_amount_and_takes_a_page() {
    let mut run = Run::new(MemoryPolicy::Amount);
    run.displaced = [16 * GIB * 30 / 1000, 0];
    run.look();
    assert!(run.minute().is_some(), "as much as the amount");
    let mut run = Run::new(MemoryPolicy::Periodic);
    run.displaced = [PAGE, 0];
    run.look();
    run.now_ns += 900 * SECOND_NS;
    assert_eq!(run.look().map(|order| order.bytes), Some(PAGE));
    run.displaced = [PAGE - 1, 0];
    assert_eq!(run.finish(), 0, "less than a page is none");
}

#[test]
fn what_moved_in_part_does_not_rest_and_begins_with_short_rests_again() {
    let mut run = Run::new(MemoryPolicy::Amount);
    run.displaced = [4 * GIB, 0];
    run.look();
    let ended = |run: &mut Run, moved: u64, stayed: u64| {
        run.now_ns += LONGEST_REST_NS;
        let order = run.look().expect("it rests no more");
        run.repatriator.ended(7, &order, moved, stayed, run.now_ns);
        run.repatriator.rests_until_ns(7, run.now_ns).map(|until_ns| until_ns - run.now_ns)
    };
    assert_eq!(ended(&mut run, 0, 0), Some(FIRST_REST_NS), "nothing was there to be moved");
    assert_eq!(ended(&mut run, 10 * PAGE, 11 * PAGE), Some(2 * FIRST_REST_NS), "most of it stayed");
    assert_eq!(ended(&mut run, 10 * PAGE, 10 * PAGE), None, "half of it moved");
    assert_eq!(ended(&mut run, 0, PAGE), Some(FIRST_REST_NS), "as if for the first time");
    let until_ns = run.now_ns + FIRST_REST_NS;
    assert_eq!(run.repatriator.rests_until_ns(7, until_ns - 1), Some(until_ns));
    assert_eq!(run.repatriator.rests_until_ns(7, until_ns), None, "it is over");
}

#[test]
fn the_longest_rest_is_shown_and_a_policy_that_is_set_forgets_it() {
    let rested = || {
        let mut run = Run::new(MemoryPolicy::Amount);
        run.displaced = [4 * GIB, GIB];
        run.look();
        // The first part fails twice, the second one once.
        for wait_ns in [FIRST_REST_NS, FIRST_REST_NS, SECOND_NS] {
            run.now_ns += wait_ns;
            let order = run.look().expect("one of both does not rest");
            run.carry_out(&order, false);
        }
        run
    };
    let mut run = rested();
    let longest = run.repatriator.rests_until_ns(7, run.now_ns).expect("both rest");
    assert_eq!(longest - run.now_ns, 2 * FIRST_REST_NS - SECOND_NS);
    run.repatriator.forget(7);
    assert_eq!(run.repatriator.rests_until_ns(7, run.now_ns), None);
    assert!(!run.repatriator.in_round(7));
    let mut run = rested();
    run.policy = MemoryPolicy::None;
    run.look();
    assert_eq!((run.repatriator.rests_until_ns(7, run.now_ns), run.repatriator.in_round(7)), (None, false));
}

#[test]
fn huge_pages_of_a_pool_come_home_as_far_as_its_pool_there_goes() {
    let mut run = Run::new(MemoryPolicy::Both);
    (run.page_kib, run.displaced) = (2048, [GIB, 0]);
    // It is there to be used up.
    run.free_kib = 100 * 2048;
    run.look();
    let order = run.minute().expect("a move");
    assert_eq!((order.bytes, order.page_kib, order.reserve_kib), (100 * 2 * MIB, 2048, 0));
    run.carry_out(&order, true);
    run.free_kib = 0;
    assert_eq!(run.minute(), None, "no page is free there");
    run.free_kib = 2048;
    assert_eq!(run.minute(), None, "it rests");
    let less = [2 * MIB - PAGE, 0];
    let mut run = Run::new(MemoryPolicy::Both);
    (run.page_kib, run.displaced, run.settings.amount_permille) = (2048, less, 0);
    run.look();
    assert_eq!(run.minute(), None, "less than a page is nothing");
}

#[test]
fn a_page_that_is_larger_than_what_the_rate_saves_up_comes_home_all_the_same() {
    let mut run = Run::new(MemoryPolicy::Both);
    (run.page_kib, run.displaced, run.settings.bytes_per_s) = (1 << 20, [2 * GIB, 0], 10 * MIB);
    run.look();
    assert_eq!(run.minute(), None, "a minute's rate is 600 MiB");
    let order = run.minute().expect("a move");
    assert_eq!((order.bytes, order.page_kib), (GIB, 1 << 20), "one page");
    run.carry_out(&order, true);
    assert_eq!(run.minute(), None, "it has been spent");
}

proptest! {
    /// The rate, the room, the addresses and the direction, whatever happens.
    #[test]
    fn moves_keep_within_their_limits(
        policy in prop::sample::select(MemoryPolicy::ALL),
        page_kib in prop::sample::select(&[4_u64, 2048, 1 << 20]),
        vms in 1_usize..20,
        mib_per_s in 1_u64..500,
        steps in prop::collection::vec(
            (0_u64..600, 0_u64..4 << 18, 0_u64..4 << 18, 0_u64..8 << 20, any::<bool>(), any::<bool>()),
            1..120,
        ),
    ) {
        let mut run = Run::new(policy);
        (run.vms, run.settings.bytes_per_s, run.page_kib) = (vms, mib_per_s * MIB, page_kib);
        let share = run.settings.bytes_per_s / vms as u64;
        let (mut ordered, begin_ns) = (0_u128, run.now_ns);
        for (seconds, first, second, free_kib, ready, moves) in steps {
            run.now_ns += seconds * SECOND_NS;
            run.displaced = [first * PAGE, second * PAGE];
            (run.free_kib, run.ready) = (free_kib, ready);
            let room = NodeMemory { total_kib: 32 << 20, free_kib };
            let Some(order) = run.look() else { continue };
            prop_assert!(policy != MemoryPolicy::None && ready);
            prop_assert_eq!((order.to, order.within), (0, Some((GIB, 9 * GIB))));
            let displaced = run.displaced[order.from as usize - 1];
            prop_assert!(order.bytes > 0 && order.bytes <= displaced + displaced / 8);
            prop_assert!(order.page_kib == page_kib && order.bytes % (page_kib * 1024) == 0, "whole pages: {order:?}");
            let reserve_kib = if page_kib > 4 { 0 } else { room.reserve_kib() };
            prop_assert!(order.reserve_kib == reserve_kib && free_kib >= reserve_kib + order.bytes / 1024, "{order:?}");
            if policy == MemoryPolicy::Adaptive {
                let MemoryReason::Home(why) = order.why else { panic!("{order:?}") };
                prop_assert!(why.saving_ns_per_s * 60.0 > why.price_ns, "it does not pay: {why:?}");
            }
            ordered += u128::from(order.bytes);
            let elapsed = u128::from(run.now_ns - begin_ns);
            let most = (u128::from(share) * elapsed / 1_000_000_000) + u128::from(LEAST.max(share * SAVED_S).max(page_kib * 1024));
            prop_assert!(ordered <= most, "{ordered} bytes of {most}");
            run.carry_out(&order, moves);
        }
    }

    /// If memory can be moved, all of it comes home, whatever is displaced.
    #[test]
    fn everything_comes_home(first in 0_u64..4 << 18, second in 0_u64..4 << 18) {
        for policy in [MemoryPolicy::Periodic, MemoryPolicy::Both] {
            let mut run = Run::new(policy);
            run.displaced = [first * PAGE, second * PAGE];
            run.look();
            run.now_ns += 900 * SECOND_NS;
            run.finish();
            prop_assert_eq!(run.displaced, [0, 0], "{}", policy);
        }
    }

    /// What is left after `adaptive` does not pay, and it never moves more than `both`.
    #[test]
    fn adaptive_moves_no_more_than_both(first in 0_u64..4 << 18, saving in prop::option::of(0.0..2000.0_f64)) {
        let moved = |policy| {
            let mut run = Run::new(policy);
            (run.displaced, run.saving) = ([first * PAGE, 0], saving);
            run.look();
            run.now_ns += 900 * SECOND_NS;
            run.finish()
        };
        prop_assert!(moved(MemoryPolicy::Adaptive) <= moved(MemoryPolicy::Both));
    }
}

#[test]
fn names_are_read_back_and_others_refused() {
    for &policy in MemoryPolicy::ALL {
        assert_eq!(policy.name().parse(), Ok(policy));
    }
    let error = "all\u{1b}".parse::<MemoryPolicy>().expect_err("no policy").to_string();
    assert_eq!(
        error,
        "there is no memory policy `all\\u{1b}`; there are none, periodic, amount, both, adaptive"
    );
}

#[test]
fn a_device_of_a_guest_node_does_not_rest_with_what_it_booted_with() {
    let mut run = Run::new(MemoryPolicy::Amount);
    run.displaced = [2 * GIB, 0];
    let mut areas = run.areas();
    let mut device = areas[0].clone();
    (device.within, device.strays[0].bytes) = ((20 * GIB, 28 * GIB), GIB);
    areas.push(device);
    let look = |run: &mut Run, ended: Option<&MoveMemory>| {
        run.now_ns += MINUTE_NS / 2;
        let (policy, vms, memory_bytes, ready, now_ns) = (run.policy, 1, 24 * GIB, true, run.now_ns);
        let input = HomeInput { vm: 7, policy, sharers: vms, memory_bytes, areas: &areas, ready, now_ns };
        if let Some(order) = ended {
            run.repatriator.ended(7, order, 0, 64 * PAGE, now_ns);
        }
        decide(&mut run.repatriator, &run.settings, &input)
    };
    look(&mut run, None);
    let first = look(&mut run, None).expect("more than the amount");
    assert_eq!((first.from, first.within), (1, Some((GIB, 9 * GIB))), "the larger part");
    let second = look(&mut run, Some(&first)).expect("the device is tried");
    assert_eq!((second.from, second.within), (1, Some((20 * GIB, 28 * GIB))));
    assert_eq!(look(&mut run, Some(&second)).map(|order| order.within), None, "both rest");
}
