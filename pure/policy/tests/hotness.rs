//! What becomes of displaced memory when it is known how hot it is.

#[path = "common/decide.rs"]
mod decide;

use decide::decide;
use proptest::prelude::*;
use vnuma_model::{PageKind, WatchedRegion};
use vnuma_policy::{
    hotness::{Heat, Hotness, Piece, Shares},
    memory_move::{HomeWhy, LEAST, MemoryPolicy, MemoryReason, MoveMemory, NodeMemory, SAVED_S},
    repatriation::{HomeArea, HomeInput, MemorySettings, Repatriator, Stray},
    residency::{AreaSample, Found, MemoryArea, MemoryObservation},
};

const SECOND_NS: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const PAGE: u64 = 4096;
const LOOKS: u32 = 20;

fn region(start: u64, end: u64, accesses: u32) -> WatchedRegion {
    WatchedRegion { start, end, accesses }
}

fn hotness(regions: &[(u64, u64, u32)]) -> Hotness {
    let regions = regions.iter().map(|&(start, end, accesses)| region(start, end, accesses));
    Hotness { began_ns: 0, ended_ns: 1, cost_ns: 0, looks: LOOKS, regions: regions.collect() }
}

/// A sample of all pages, or of some.
fn sample(start: u64, bytes: u64, looked: u64, pages: Vec<(u64, u32)>) -> AreaSample {
    let count = pages.len() as u64;
    let found = vec![Found { node: 0, kind: PageKind::Base, kept: None, locked: false, count }];
    let area = MemoryArea { guest_node: 0, start, bytes, guest_bytes: bytes, page_kib: 4 };
    AreaSample { area, looked, found, swapped: 0, pages }
}

fn observed(areas: Vec<AreaSample>) -> MemoryObservation {
    MemoryObservation { areas, ..MemoryObservation::default() }
}

#[test]
fn displaced_memory_is_parted_by_heat_the_hottest_first() {
    // A page of each MiB was looked at. The first half of it is displaced.
    let pages = (0..64).map(|at| (GIB + at * MIB, u32::from(at < 32))).collect();
    let seen = observed(vec![sample(GIB, 64 * MIB, 64, pages)]);
    let hotness = hotness(&[
        (GIB, GIB + 8 * MIB, 2),
        (GIB + 8 * MIB, GIB + 12 * MIB, 15),
        (GIB + 12 * MIB, GIB + 16 * MIB, 15),
        (GIB + 16 * MIB, GIB + 24 * MIB, 0),
        (GIB + 24 * MIB, GIB + 100 * MIB, 9),
    ]);
    let heat = hotness.heat(&seen, &seen.areas[0], 1);
    let piece = |first: u64, end: u64, mib: u64, accesses| Piece {
        within: (GIB + first * MIB, GIB + end * MIB),
        bytes: mib * MIB,
        accesses,
    };
    assert_eq!(
        heat.pieces,
        [piece(8, 16, 8, 15), piece(24, 64, 8, 9), piece(0, 8, 8, 2), piece(16, 24, 8, 0)]
    );
    assert!((heat.mean - (15.0 + 9.0 + 2.0) / 4.0).abs() < 1e-9, "{heat:?}");
    let Shares { hot, warm, cold } = hotness.shares(&seen.areas[0], 0);
    assert_eq!((hot.bytes / MIB, warm.bytes / MIB, cold.bytes / MIB), (8, 16, 8));
    // What was not watched is cold, and nothing is lost of it.
    let elsewhere = self::hotness(&[(GIB + 8 * MIB, GIB + 16 * MIB, 15)]);
    let heat = elsewhere.heat(&seen, &seen.areas[0], 1);
    assert_eq!(heat.pieces.iter().map(|piece| piece.bytes).sum::<u64>(), 32 * MIB);
    assert_eq!(heat.pieces[0], piece(8, 16, 8, 15));
    assert!(!self::hotness(&[(0, GIB, 0)]).says_something() && elsewhere.says_something());
}

/// A VM of a guest node of 8 GiB at home on node 0, with pieces of it on node 1.
struct Run {
    repatriator: Repatriator,
    settings: MemorySettings,
    policy: MemoryPolicy,
    pieces: Option<Vec<Piece>>,
    bytes: u64,
    /// Looks that found a page of the node accessed, on average.
    mean: f64,
    saving: Option<f64>,
    free_kib: u64,
    ready: bool,
    now_ns: u64,
}

impl Run {
    /// Pieces of a GiB each with so many MiB displaced.
    fn new(saving: Option<f64>, mean: f64, pieces: &[(u64, u32)]) -> Self {
        let at = |at: usize| (GIB * (at as u64 + 1), GIB * (at as u64 + 2));
        let piece = |(place, &(mib, accesses)): (usize, &(u64, u32))| Piece {
            within: at(place),
            bytes: mib * MIB,
            accesses,
        };
        let mut pieces: Vec<Piece> = pieces.iter().enumerate().map(piece).collect();
        pieces.sort_by(|a, b| b.accesses.cmp(&a.accesses).then(a.within.cmp(&b.within)));
        Self {
            repatriator: Repatriator::default(),
            settings: MemorySettings { bytes_per_s: 64 * MIB, ..MemorySettings::default() },
            policy: MemoryPolicy::Adaptive,
            bytes: pieces.iter().map(|piece| piece.bytes).sum(),
            pieces: Some(pieces),
            mean,
            saving,
            free_kib: 16 << 20,
            ready: true,
            now_ns: 1,
        }
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Repatriator, &MemorySettings, &HomeInput<'_>) -> T) -> T {
        let heat = self.pieces.clone().map(|pieces| Heat { mean: self.mean, pieces });
        let (bytes, saving) = (self.bytes, self.saving);
        let stray = Stray { node: 1, bytes, high: bytes + bytes / 8, distance: 21, saving, heat };
        let room = NodeMemory { total_kib: 32 << 20, free_kib: self.free_kib };
        let area = HomeArea {
            guest_node: 0,
            home: 0,
            within: (GIB, 9 * GIB),
            page_kib: 4,
            strays: vec![stray],
            room,
        };
        let input = HomeInput {
            vm: 7,
            policy: self.policy,
            sharers: 1,
            memory_bytes: 8 * GIB,
            areas: &[area],
            ready: self.ready,
            now_ns: self.now_ns,
        };
        act(&mut self.repatriator, &self.settings, &input)
    }

    fn look(&mut self) -> Option<MoveMemory> {
        self.with(decide)
    }

    /// What is wanted when 20 s of the rate are saved up.
    fn order(&mut self) -> Option<MoveMemory> {
        self.look();
        self.now_ns += 60 * SECOND_NS;
        self.look()
    }
}

fn why(order: &MoveMemory) -> HomeWhy {
    match order.why {
        MemoryReason::Home(why) => why,
        MemoryReason::Nearer(_) | MemoryReason::Rehome(_) => panic!("{order:?}"),
    }
}

#[test]
fn what_nobody_accesses_does_not_pay_where_accesses_are_counted() {
    // On average a page saves 100 tenths a second, which pays for more than these looks and moves.
    let mut run = Run::new(Some(100.0), 5.0, &[(100, 0), (200, 20), (300, 10)]);
    let order = run.order().expect("the hot ones pay");
    assert_eq!(order.parts.as_deref(), Some([(2 * GIB, 3 * GIB), (3 * GIB, 4 * GIB)].as_slice()));
    assert_eq!(order.within, Some((GIB, 9 * GIB)));
    assert_eq!(order.bytes, 500 * MIB + 500 * MIB / 8, "and as much more at most as of all of it");
    let why = why(&order);
    assert!(why.hottest_first && !why.assumed && why.displaced_bytes == 600 * MIB, "{why:?}");
    // 200 MiB at four times the average and 300 at twice.
    let pages = |mib: u64| (mib * MIB / PAGE) as f64;
    let saving_ns = (pages(200) * 400.0 + pages(300) * 200.0) * 10.0;
    assert!((why.saving_ns_per_s - saving_ns).abs() < 1.0, "{} of {saving_ns}", why.saving_ns_per_s);
    let price_ns = pages(500) * 10_000.0 + 2.0 * (GIB / PAGE) as f64 * 200.0;
    assert!((why.price_ns - price_ns).abs() < 1.0, "{} of {price_ns}", why.price_ns);
    let mut run = Run::new(Some(100.0), 5.0, &[(100, 0), (200, 0)]);
    assert_eq!(run.order(), None, "nobody accesses any of it");
    run.pieces = None;
    assert!(run.order().is_some(), "it would be moved if that were not known");
}

#[test]
fn what_is_accessed_seldom_pays_if_the_average_is_dear() {
    for (saving, moved) in [(1000.0, true), (100.0, false)] {
        let mut run = Run::new(Some(saving), 10.0, &[(200, 1), (200, 20)]);
        let parts = run.order().and_then(|order| order.parts).expect("the hot one pays");
        assert_eq!(parts.len() == 2, moved, "{saving}: {parts:?}");
        assert_eq!(parts[0], (2 * GIB, 3 * GIB));
    }
}

#[test]
fn accesses_that_are_assumed_are_assumed_of_cold_pages_too_which_come_last() {
    let mut run = Run::new(None, 5.0, &[(100, 0), (200, 3), (300, 20)]);
    let order = run.order().expect("more than 1 % is displaced");
    let parts = [(3 * GIB, 4 * GIB), (2 * GIB, 3 * GIB), (GIB, 2 * GIB)];
    assert_eq!(order.parts.as_deref(), Some(parts.as_slice()));
    assert!(why(&order).hottest_first && why(&order).assumed);
    run.pieces = None;
    let same = run.order().expect("the same without");
    assert_eq!((same.parts.is_none(), same.bytes), (true, order.bytes));
    assert!((why(&same).saving_ns_per_s - why(&order).saving_ns_per_s).abs() < 1.0);
    // A thousandth of the guest node.
    let mut run = Run::new(None, 5.0, &[(8, 20)]);
    assert_eq!(run.order(), None, "as without");
}

#[test]
fn the_hottest_of_two_host_nodes_comes_first() {
    let mut run = Run::new(Some(100.0), 5.0, &[(200, 6)]);
    let order = |accesses: u32, run: &mut Run| {
        run.with(|repatriator, settings, input| {
            let mut areas = input.areas.to_vec();
            let mut other = areas[0].strays[0].clone();
            other.node = 2;
            if let Some(heat) = &mut other.heat {
                heat.pieces[0].accesses = accesses;
            }
            areas[0].strays.push(other);
            decide(repatriator, settings, &HomeInput { areas: &areas, ..*input })
        })
    };
    order(1, &mut run);
    for (accesses, from) in [(5, 1), (7, 2)] {
        run.now_ns += 60 * SECOND_NS;
        assert_eq!(order(accesses, &mut run).map(|order| order.from), Some(from));
    }
}

#[test]
fn a_watch_is_worth_it_only_where_a_move_would_follow() {
    let wants = |run: &mut Run| {
        run.with(|repatriator, settings, input| {
            input.policy == MemoryPolicy::Adaptive && repatriator.weigh(settings, input).0.is_some()
        })
    };
    let mut run = Run::new(None, 0.0, &[(600, 0)]);
    run.pieces = None;
    assert!(!wants(&mut run), "nothing is saved up yet");
    run.look();
    run.now_ns += 60 * SECOND_NS;
    assert!(wants(&mut run) && wants(&mut run), "to ask changes nothing");
    run.ready = false;
    assert!(!wants(&mut run), "a move is under way");
    run.ready = true;
    run.policy = MemoryPolicy::Both;
    assert!(!wants(&mut run), "it is of no use for others");
    run.policy = MemoryPolicy::Adaptive;
    let before = run.now_ns;
    assert!(run.look().is_some() && run.now_ns == before, "what was saved up is still there");
    (run.bytes, run.now_ns) = (MIB, run.now_ns + 60 * SECOND_NS);
    assert!(!wants(&mut run), "too little is displaced");
}

/// Displaced pages of regions that are accessed alike: MiB and looks.
fn pieces() -> impl Strategy<Value = Vec<(u64, u32)>> {
    prop::collection::vec((0_u64..900, 0_u32..=LOOKS), 1..8)
}

proptest! {
    /// The sum of what pages save is what was counted, whatever is how hot.
    #[test]
    fn accesses_are_divided_and_none_is_lost(
        bounds in prop::collection::btree_set(0_u64..512, 0..12),
        accesses in prop::collection::vec(0_u32..=LOOKS, 13),
        pages in prop::collection::vec((prop::option::of(0_u32..3), any::<bool>()), 512),
        looked in 512_u64..4096,
    ) {
        let mut bounds: Vec<u64> = [0, 512].into_iter().chain(bounds).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let regions: Vec<(u64, u64, u32)> =
            bounds.windows(2).zip(&accesses).map(|(pair, accesses)| (GIB + pair[0] * PAGE, GIB + pair[1] * PAGE, *accesses)).collect();
        let hotness = hotness(&regions);
        // Two parts of the VM's memory, of which the second is at home elsewhere.
        let of = |second: bool| -> Vec<(u64, u32)> {
            let its = pages.iter().enumerate().filter(|(_, (_, part))| *part == second);
            its.filter_map(|(at, (node, _))| Some((GIB + at as u64 * PAGE, (*node)?))).collect()
        };
        let seen = observed(vec![
            sample(GIB, 512 * PAGE, looked, of(false)),
            sample(GIB, 512 * PAGE, looked, of(true)),
        ]);
        for node in 0..3 {
            let (mut weighted, mut all, mut mean) = (0.0, 0.0, 0.0);
            for part in &seen.areas {
                let heat = hotness.heat(&seen, part, node);
                prop_assert!(heat.pieces.windows(2).all(|pair| pair[0].accesses >= pair[1].accesses));
                let bytes: u64 = heat.pieces.iter().map(|piece| piece.bytes).sum();
                let count = part.pages.iter().filter(|(_, at)| *at == node).count() as u64;
                prop_assert_eq!(bytes, part.estimate(count).bytes, "no byte is lost");
                weighted += heat.pieces.iter().map(|piece| piece.bytes as f64 * f64::from(piece.accesses)).sum::<f64>();
                (all, mean) = (all + bytes as f64, heat.mean);
            }
            // The mean is that of all pages of the node, so that what they save on average is the average.
            prop_assert!(mean == 0.0 || (weighted / all / mean - 1.0).abs() < 0.01, "{weighted} {all} {mean}");
        }
    }

    /// Only what pays, the hottest first, within the rate, the room, and what is displaced.
    #[test]
    fn moves_by_heat_keep_within_their_limits(
        pieces in pieces(),
        saving in prop::option::of(-100.0..3000.0_f64),
        mean in 0.0..20.0_f64,
        mib_per_s in 1_u64..500,
        steps in prop::collection::vec((0_u64..600, 0_u64..8 << 20, any::<bool>()), 1..60),
    ) {
        let mut run = Run::new(saving, mean, &pieces);
        run.settings.bytes_per_s = mib_per_s * MIB;
        let (mut ordered, begin_ns) = (0_u128, run.now_ns);
        for (seconds, free_kib, ready) in steps {
            run.now_ns += seconds * SECOND_NS;
            (run.free_kib, run.ready) = (free_kib, ready);
            let room = NodeMemory { total_kib: 32 << 20, free_kib };
            let Some(order) = run.look() else { continue };
            prop_assert!(ready && order.bytes > 0 && order.bytes % PAGE == 0);
            prop_assert!(order.bytes <= run.bytes + run.bytes / 8);
            prop_assert!(free_kib >= room.reserve_kib() + order.bytes / 1024, "the reserve: {order:?}");
            let why = why(&order);
            prop_assert!(why.saving_ns_per_s * 60.0 > why.price_ns, "it does not pay: {why:?}");
            let parts = order.parts.as_deref().expect("it is known how hot it is");
            let of = |part: &(u64, u64)| run.pieces.iter().flatten().find(|piece| piece.within == *part);
            let accesses: Vec<u32> = parts.iter().filter_map(|part| of(part).map(|piece| piece.accesses)).collect();
            prop_assert_eq!(accesses.len(), parts.len());
            prop_assert!(accesses.windows(2).all(|pair| pair[0] >= pair[1]), "{accesses:?}");
            prop_assert!(saving.is_none() || accesses.iter().all(|accesses| *accesses > 0), "a cold one: {accesses:?}");
            ordered += u128::from(order.bytes);
            let elapsed = u128::from(run.now_ns - begin_ns);
            let rate = run.settings.bytes_per_s;
            let most = (u128::from(rate) * elapsed / 1_000_000_000) + u128::from(LEAST.max(rate * SAVED_S));
            prop_assert!(ordered <= most, "{ordered} bytes of {most}");
        }
    }

    /// Other policies do not ask how hot it is, and where everything is as hot the figures are those of today.
    #[test]
    fn what_is_equally_hot_is_moved_as_if_that_were_not_known(
        mib in 1_u64..900, accesses in 1_u32..=LOOKS, saving in prop::option::of(0.0..3000.0_f64),
    ) {
        for &policy in MemoryPolicy::ALL {
            let mut with = Run::new(saving, f64::from(accesses), &[(mib, accesses)]);
            (with.policy, with.bytes) = (policy, mib * MIB);
            // One piece that is all of the guest node.
            if let Some(pieces) = &mut with.pieces {
                pieces[0].within = (GIB, 9 * GIB);
            }
            let mut without = Run::new(saving, 0.0, &[(mib, accesses)]);
            (without.policy, without.pieces) = (policy, None);
            let (with, without) = (with.order(), without.order());
            prop_assert_eq!(with.is_some(), without.is_some());
            let (Some(mut with), Some(without)) = (with, without) else { continue };
            prop_assert_eq!(with.parts.is_some(), policy == MemoryPolicy::Adaptive);
            let (one, other) = (why(&with), why(&without));
            prop_assert!((one.price_ns / other.price_ns - 1.0).abs() < 1e-6);
            prop_assert!((one.saving_ns_per_s / other.saving_ns_per_s - 1.0).abs() < 1e-6);
            (with.parts, with.why) = (None, without.why);
            prop_assert_eq!(with, without);
        }
    }
}
