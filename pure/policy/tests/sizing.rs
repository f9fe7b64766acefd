//! Guest nodes that grow and shrink: the controller in a loop with a made-up host and guests, and the course of a change.

use proptest::prelude::*;
use vnuma_model::{MemoryBacking, MemoryDevice};
use vnuma_policy::{
    sizing::{
        PATIENCE_NS, Resize, ResizePhase, SizeBounds, SizeInput, SizeSettings, SizedBy, decide_size, most,
        spread, sums,
    },
    world::TaskId,
};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 2 * MIB;
const SECOND_NS: u64 = 1_000_000_000;

fn device(id: &str, requested_mib: u64, most_mib: u64) -> MemoryDevice {
    let memory = MemoryBacking {
        id: format!("ram-{id}"),
        size_bytes: most_mib * MIB,
        policy: "default".into(),
        host_nodes: Vec::new(),
        resident_kib: Vec::new(),
        mapping: None,
    };
    MemoryDevice {
        id: Some(id.into()),
        guest_node: 0,
        requested_bytes: requested_mib * MIB,
        plugged_bytes: requested_mib * MIB,
        block_bytes: BLOCK,
        memory,
    }
}

fn input(requested_mib: u64, home_free_mib: i64) -> SizeInput {
    SizeInput {
        requested: requested_mib * MIB,
        plugged: requested_mib * MIB,
        block: BLOCK,
        bounds: SizeBounds { least: 100 * MIB, most: 1000 * MIB },
        home_total: 10_000 * MIB,
        home_free: home_free_mib * MIB as i64,
        promised: 0,
        sharers: 1,
        changed_ns: None,
        rests_until_ns: 0,
        now_ns: 1000 * SECOND_NS,
    }
}

fn decided(input: &SizeInput) -> Option<u64> {
    decide_size(&SizeSettings::default(), input).map(|bytes| bytes / MIB)
}

#[test]
fn it_grows_to_the_high_bound_and_shrinks_to_the_low_one() {
    // 500 MiB and 1500 MiB of 10,000.
    assert_eq!(decided(&input(400, 1400)), None);
    assert_eq!(decided(&input(400, 500)), None);
    assert_eq!(decided(&input(400, 1700)), Some(600));
    assert_eq!(decided(&input(400, 1501)), None, "less than a block");
    assert_eq!(decided(&input(400, 5000)), Some(1000), "its operator's most");
    assert_eq!(decided(&input(400, 399)), Some(298), "101 MiB, in blocks");
    assert_eq!(decided(&input(400, -5000)), Some(100), "its operator's least");
    assert_eq!(decided(&input(100, -5000)), None);
    assert_eq!(decided(&input(0, 1000)), Some(100), "the least is plugged where it is free");
    assert_eq!(decided(&input(0, 400)), None);
    assert_eq!(decided(&input(1200, 1000)), Some(1000), "the most is a bound of what is there, too");
    let promised = |free, mib| SizeInput { promised: mib * MIB, ..input(400, free) };
    assert_eq!(decided(&promised(1700, 150)), Some(450), "50 MiB are nobody's");
    assert_eq!(decided(&promised(600, 500)), None, "nothing lacks before it is touched");
    let shared = |free| SizeInput { sharers: 4, ..input(400, free) };
    assert_eq!((decided(&shared(1900)), decided(&shared(100))), (Some(500), Some(300)));
}

#[test]
fn it_waits_for_the_guest_and_for_its_pause() {
    assert_eq!(decided(&SizeInput { plugged: 300 * MIB, ..input(400, 5000) }), None);
    assert_eq!(decided(&SizeInput { rests_until_ns: 1001 * SECOND_NS, ..input(400, -100) }), None);
    let lately = |free| SizeInput { changed_ns: Some(941 * SECOND_NS), ..input(400, free) };
    assert_eq!(decided(&lately(1700)), None, "59 s");
    assert_eq!(decided(&SizeInput { changed_ns: Some(940 * SECOND_NS), ..input(400, 1700) }), Some(600));
    assert_eq!(decided(&lately(399)), Some(298), "what lacks memory does not wait");
    assert_eq!(decide_size(&SizeSettings::default(), &SizeInput { block: 0, ..input(400, 5000) }), None);
}

#[test]
fn devices_grow_from_the_first_and_shrink_from_the_last() {
    let (a, b) = (device("a", 100, 256), device("b", 50, 128));
    let both = [&a, &b];
    assert_eq!(most(&both), 384 * MIB);
    assert_eq!(spread(&both, 150 * MIB), []);
    assert_eq!(spread(&both, 200 * MIB), [("a".to_owned(), 150 * MIB)]);
    assert_eq!(spread(&both, 320 * MIB), [("a".to_owned(), 256 * MIB), ("b".to_owned(), 64 * MIB)]);
    assert_eq!(spread(&both, 120 * MIB), [("b".to_owned(), 20 * MIB)]);
    assert_eq!(spread(&both, 0), [("b".to_owned(), 0), ("a".to_owned(), 0)]);
    let silent = MemoryDevice { id: None, ..a.clone() };
    assert_eq!(most(&[&silent, &b]), 228 * MIB);
    assert_eq!(spread(&[&silent, &b], 200 * MIB), [("b".to_owned(), 100 * MIB)]);
}

/// The first things that QEMU is asked.
const TASKS: [TaskId; 2] = [TaskId { vm: 1, number: 1 }, TaskId { vm: 1, number: 2 }];

/// Of a resize to 256 MiB, asked and answered.
fn waiting(device: &MemoryDevice) -> Resize {
    let mut resize = Resize::new(0, device.plugged_bytes, 256 * MIB, SizedBy::Operator, 0);
    assert_eq!(resize.next(&[device], 0), [("a".to_owned(), 256 * MIB)]);
    resize.asked(TASKS[0]);
    assert_eq!((resize.phase(), resize.next(&[device], 1)), (ResizePhase::Asked, Vec::new()));
    resize.answered(TASKS[0], Ok(()));
    assert_eq!(resize.phase(), ResizePhase::Waiting);
    resize
}

#[test]
fn a_guest_that_does_it_is_done() {
    let mut a = device("a", 0, 512);
    let mut resize = waiting(&a);
    a.requested_bytes = 256 * MIB;
    for mib in [0, 64, 200] {
        a.plugged_bytes = mib * MIB;
        // Long, but each time there is more.
        assert_eq!(resize.next(&[&a], (mib + 1) * SECOND_NS / 4), []);
        assert!(resize.is_active(), "{mib}");
    }
    a.plugged_bytes = 256 * MIB;
    assert_eq!(resize.next(&[&a], 60 * SECOND_NS), []);
    assert_eq!((resize.phase(), resize.is_active(), &resize.problem), (ResizePhase::Done, false, &None));
    resize.stop();
    assert_eq!(resize.phase(), ResizePhase::Done);
}

#[test]
fn what_a_guest_does_not_do_is_not_asked_for_any_more() {
    let mut a = device("a", 300, 512);
    let mut resize = waiting(&a);
    (a.requested_bytes, a.plugged_bytes) = (256 * MIB, 280 * MIB);
    assert_eq!(resize.next(&[&a], 20 * SECOND_NS), []);
    assert_eq!(resize.next(&[&a], 20 * SECOND_NS + PATIENCE_NS - 1), []);
    assert!(resize.is_active());
    assert_eq!(resize.next(&[&a], 20 * SECOND_NS + PATIENCE_NS), [("a".to_owned(), 280 * MIB)]);
    assert_eq!(resize.phase(), ResizePhase::Partly);
    assert_eq!(resize.problem.as_deref(), Some("the guest has unplugged nothing more for 30 s"));
    assert_eq!(resize.next(&[&a], 900 * SECOND_NS), [], "once");

    let mut stopped = waiting(&device("a", 300, 512));
    stopped.stop();
    assert_eq!((stopped.phase().name(), stopped.is_active()), ("stopped", false));
    assert_eq!(stopped.next(&[&a], SECOND_NS), [("a".to_owned(), 280 * MIB)]);
    stopped.stop();
    assert_eq!((stopped.phase().name(), stopped.next(&[&a], SECOND_NS)), ("stopped", Vec::new()));
}

#[test]
fn qemu_may_refuse_and_what_comes_late_changes_nothing() {
    let (a, b) = (device("a", 0, 128), device("b", 0, 512));
    let mut resize = Resize::new(0, 0, 256 * MIB, SizedBy::Policy, 0);
    assert_eq!(resize.next(&[&a, &b], 0).len(), 2);
    TASKS.into_iter().for_each(|task| resize.asked(task));
    resize.answered(TASKS[0], Ok(()));
    assert_eq!(resize.phase(), ResizePhase::Asked, "one answer is missing");
    assert_eq!(TASKS.map(|task| resize.waits_for(task)), [false, true]);
    resize.answered(TASKS[1], Err("no".into()));
    assert_eq!((resize.phase(), resize.problem.as_deref()), (ResizePhase::Failed, Some("no")));
    resize.answered(TASKS[1], Ok(()));
    assert_eq!(resize.phase(), ResizePhase::Failed);
}

/// A host node, and guests that do what they are asked for. What they have is touched in part.
#[derive(Clone, Debug)]
struct Loop {
    settings: SizeSettings,
    total: u64,
    /// What others have of the home.
    others: i64,
    /// What guests touch of what they have plugged.
    touched: f64,
    guests: Vec<SizeInput>,
}

impl Loop {
    /// What is free, and what of that is promised.
    fn free(&self) -> (i64, u64) {
        let plugged: u64 = self.guests.iter().map(|guest| guest.requested).sum();
        let promised = (plugged as f64 * (1.0 - self.touched)) as u64;
        (self.total as i64 - self.others - (plugged - promised) as i64, promised)
    }

    /// Each guest node decides once, and sees what those before it have got.
    fn round(&mut self, now_ns: u64) -> usize {
        let mut changes = 0;
        for at in 0..self.guests.len() {
            let ((home_free, promised), sharers) = (self.free(), self.guests.len());
            let home_total = self.total;
            let seen = SizeInput { home_free, promised, sharers, now_ns, home_total, ..self.guests[at] };
            if let Some(bytes) = decide_size(&self.settings, &seen) {
                let guest = &mut self.guests[at];
                (guest.requested, guest.plugged, guest.changed_ns) = (bytes, bytes, Some(now_ns));
                changes += 1;
            }
        }
        changes
    }
}

fn loops() -> impl Strategy<Value = Loop> {
    let guest = (0_u64..200, 0_u64..200, 0_u64..400).prop_map(|(requested, least, more)| {
        let (least, most) = (least * BLOCK, (least + more) * BLOCK);
        let requested = (requested * BLOCK).clamp(least, most);
        SizeInput { bounds: SizeBounds { least, most }, requested, plugged: requested, ..input(0, 0) }
    });
    let bounds = (0_u64..300, 0_u64..300).prop_map(|(low, more)| SizeSettings {
        low_permille: low,
        high_permille: low + more,
        ..SizeSettings::default()
    });
    (bounds, 1_u64..4000, -100_i64..4000, 0.0_f64..=1.0, prop::collection::vec(guest, 1..5)).prop_map(
        |(settings, total, others, touched, guests)| Loop {
            settings,
            total: total * MIB,
            others: others * MIB as i64,
            touched,
            guests,
        },
    )
}

proptest! {
    /// With others that stand still it settles, each guest node goes one way only, and what is free is between the bounds unless
    /// operators' bounds do not let it.
    #[test]
    fn it_settles_between_the_bounds(mut host in loops()) {
        let before = host.clone();
        let mut rounds = 0;
        while host.round(rounds * 100 * SECOND_NS) > 0 {
            rounds += 1;
            prop_assert!(rounds < 2000, "{host:?}");
        }
        let low = (host.total as u128 * u128::from(host.settings.low_permille) / 1000) as i64;
        let high = ((host.total as u128 * u128::from(host.settings.high_permille) / 1000) as i64).max(low + BLOCK as i64);
        let grew = host.guests.iter().zip(&before.guests).any(|(now, before)| now.requested > before.requested);
        let shrank = host.guests.iter().zip(&before.guests).any(|(now, before)| now.requested < before.requested);
        prop_assert!(!(grew && shrank), "some grew while others shrank: {before:?} {host:?}");
        for guest in &host.guests {
            prop_assert!((guest.bounds.least..=guest.bounds.most).contains(&guest.requested));
            prop_assert_eq!(guest.requested % BLOCK, 0);
        }
        let (free, promised) = host.free();
        let nobodys = free - promised as i64;
        if grew {
            prop_assert!(nobodys >= high, "it took more than there was: {host:?}");
        }
        let at_least = host.guests.iter().all(|guest| guest.requested == guest.bounds.least);
        prop_assert!(free >= low || at_least, "memory is lacking, and can be unplugged: {host:?}");
        let sharers = host.guests.len() as i64;
        let at_most = host.guests.iter().all(|guest| guest.requested == guest.bounds.most);
        prop_assert!(nobodys < high + (sharers * BLOCK as i64) || at_most, "memory is free, and is not plugged: {host:?}");
    }

    /// A demand of others that swings, but leaves as much free as is between the bounds, changes nothing.
    #[test]
    fn a_swing_between_the_bounds_moves_nothing(
        mut host in loops(), swings in prop::collection::vec(0.0_f64..=1.0, 1..20),
    ) {
        let low = host.total * host.settings.low_permille / 1000;
        let high = host.total * host.settings.high_permille / 1000;
        for (turn, swing) in swings.into_iter().enumerate() {
            let wanted = low as i64 + ((high - low) as f64 * swing) as i64;
            let (free, promised) = host.free();
            host.others += free - promised as i64 - wanted;
            prop_assert_eq!(host.round(turn as u64 * 100 * SECOND_NS), 0, "{:?}", host);
        }
    }

    /// Devices together get what is wanted, each a multiple of its blocks and no more than it has, and none goes against the others.
    #[test]
    fn a_size_is_spread_exactly(
        sizes in prop::collection::vec((0_u64..100, 0_u64..100), 1..5), wanted in 0.0_f64..=1.0,
    ) {
        let devices: Vec<_> = sizes.iter().enumerate()
            .map(|(at, (has, more))| device(&at.to_string(), has * 2, (has + more) * 2)).collect();
        let all: Vec<_> = devices.iter().collect();
        let bytes = (most(&all) as f64 * wanted) as u64 / BLOCK * BLOCK;
        let grows = bytes > sums(&all).1;
        let mut sizes: Vec<u64> = devices.iter().map(|device| device.requested_bytes).collect();
        for (id, bytes) in spread(&all, bytes) {
            let at: usize = id.parse().expect("its number");
            prop_assert_eq!(bytes > sizes[at], grows);
            prop_assert!(bytes != sizes[at] && bytes % BLOCK == 0 && bytes <= devices[at].memory.size_bytes);
            sizes[at] = bytes;
        }
        prop_assert_eq!(sizes.iter().sum::<u64>(), bytes);
    }
}
