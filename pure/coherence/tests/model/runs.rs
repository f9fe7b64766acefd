//! What is checked, and faults that must be found.

use crate::common::Broken;
use crate::ends::ends;
use crate::parts::Part;
use crate::system::System;
use stateright::{Checker, HasDiscoveries, Model};
use std::time::Instant;
use vnuma_coherence::Options;

/// All that goes beyond `ivy`, with a hold time of one unit and one page ahead.
fn default() -> Options {
    Options { prefetch_pages: 2, hold_ns: 1, ..Options::default() }
}

fn system(options: Options) -> System {
    System {
        nodes: 3,
        managers: vec![0],
        options,
        accesses: vec![2, 2, 2],
        timers: false,
        losses: 1,
        broken: Broken::No,
        kills: 0,
        false_suspicions: 0,
        parts: Vec::new(),
    }
}

/// More accesses, for a soak.
fn long() -> bool {
    std::env::var_os("VNUMA_SOAK_ROUNDS").is_some()
}

fn bounds(system: &System) -> String {
    let System { nodes, managers, accesses, losses, kills, false_suspicions, .. } = system;
    let failures = match (kills, false_suspicions) {
        (0, 0) => String::new(),
        _ => format!(", {kills} kills, {false_suspicions} false suspicions"),
    };
    format!("{nodes} nodes, pages managed by {managers:?}, {accesses:?} accesses, {losses} losses{failures}")
}

/// Checks all interleavings, prints how many states there are, and expects no fault.
fn all(name: &str, system: System) {
    let start = Instant::now();
    let bounds = bounds(&system);
    let checker = system.checker().threads(1).spawn_bfs().join();
    checker.assert_properties();
    assert!(checker.is_done());
    println!(
        "{name}: {bounds}: {} states, {} transitions, depth {}, {:.1} s",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        start.elapsed().as_secs_f64()
    );
}

/// Expects that all threads can finish from every state, and prints how many states there are.
fn all_end(name: &str, system: &System) {
    let start = Instant::now();
    let found = ends(system);
    println!(
        "{name}: {}: {} states, {} of them within the bound, {} ends, {} cut off, {:.1} s",
        bounds(system),
        found.states,
        found.inside,
        found.ends,
        found.cut_off,
        start.elapsed().as_secs_f64()
    );
    assert!(found.lost.is_none(), "{name}: no way to an end after {:?}", found.lost);
    assert!(found.ends > 0);
    // With a hold time nobody loses what it waited for, unless the time ends early.
    let held = system.options.hold_ns > 0 && !system.timers && system.kills + system.false_suspicions == 0;
    assert!(!held || found.inside == found.states, "{name}: {found:?}");
}

/// Expects a fault that was put in to be found as a violation of this property.
fn found_in(system: System, property: &str) {
    let broken = system.broken;
    let checker = system.checker().threads(1).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let discoveries = checker.discoveries();
    let path =
        discoveries.get(property).unwrap_or_else(|| panic!("{broken:?}: {property} holds: {discoveries:?}"));
    println!("{broken:?}: {property}, after {} steps", path.clone().into_actions().len());
}

fn found(broken: Broken, options: Options, property: &str) {
    found_in(System { broken, accesses: vec![2, 1, 1], ..system(options) }, property);
}

#[test]
fn ivy_is_coherent() {
    let accesses = if long() { vec![2, 2, 1] } else { vec![2, 1, 1] };
    all("ivy", System { accesses, ..system(Options::ivy()) });
}

#[test]
fn the_default_is_coherent() {
    let accesses = if long() { vec![2, 2, 2] } else { vec![2, 2, 1] };
    let mut parts = vec![Part::Direct, Part::Hint, Part::Upgrade, Part::Migratory, Part::Told, Part::Delta];
    parts.push(Part::DirectAck);
    all("default", System { accesses, parts, ..system(default()) });
    // The hold time may end at any moment.
    all("default", System { timers: true, accesses: vec![1, 1, 1], ..system(default()) });
}

/// A reader that goes on gets pages ahead, which another node writes meanwhile.
#[test]
fn prefetched_copies_are_coherent() {
    let ahead = |options: Options| {
        let accesses = if long() { vec![0, 1, 3] } else { vec![0, 1, 2] };
        let mut parts = vec![Part::Prefetch, Part::PrefetchInvalidated];
        // Without a hold time the owner can answer at once here.
        parts.extend((options.hold_ns > 0).then_some(Part::Refused));
        System { managers: vec![0, 0, 0], accesses, parts, ..system(options) }
    };
    all("prefetch", ahead(Options { prefetch_pages: 2, ..Options::ivy() }));
    all("default", ahead(default()));
    let writer = vec![Part::Prefetch];
    let batches = System { accesses: vec![0, 2, 2], parts: writer, ..ahead(default()) };
    if long() {
        all("default", batches);
    }
}

#[test]
fn each_optimization_alone_is_coherent() {
    let ivy = Options::ivy();
    let direct = Options { direct_reply: true, ..ivy };
    let each = [
        ("direct_reply", direct, Some(Part::Direct)),
        ("owner_hints", Options { owner_hints: true, ..direct }, Some(Part::Hint)),
        ("upgrade_without_data", Options { upgrade_without_data: true, ..ivy }, Some(Part::Upgrade)),
        ("migratory", Options { migratory: true, owner_hints: true, ..direct }, Some(Part::Migratory)),
        ("tell_owners", Options { tell_owners: true, owner_hints: true, ..direct }, Some(Part::Told)),
        ("deltas", Options { deltas: true, ..ivy }, Some(Part::Delta)),
        ("hold_ns", Options { hold_ns: 1, ..ivy }, None),
        ("batch_invalidations", Options { batch_invalidations: true, ..ivy }, None),
        ("direct_acks", Options { direct_acks: true, ..ivy }, Some(Part::DirectAck)),
    ];
    for (name, options, part) in each {
        // A page counts as migratory once it was read and then written twice.
        let accesses = if options.migratory { vec![2, 2, 1] } else { vec![2, 1, 1] };
        all(name, System { accesses, parts: part.into_iter().collect(), ..system(options) });
    }
}

#[test]
fn the_default_without_each_optimization_is_coherent() {
    let default = default();
    let each = [
        ("direct_reply", Options { direct_reply: false, ..default }),
        ("owner_hints", Options { owner_hints: false, ..default }),
        ("upgrade_without_data", Options { upgrade_without_data: false, ..default }),
        ("migratory", Options { migratory: false, ..default }),
        ("tell_owners", Options { tell_owners: false, ..default }),
        ("deltas", Options { deltas: false, ..default }),
        ("prefetch_pages", Options { prefetch_pages: 0, ..default }),
        ("hold_ns", Options { hold_ns: 0, ..default }),
        ("batch_invalidations", Options { batch_invalidations: false, ..default }),
        ("direct_acks", Options { direct_acks: false, ..default }),
    ];
    for (name, options) in each {
        let accesses = if options.hold_ns == 0 { vec![2, 1, 1] } else { vec![2, 2, 1] };
        all(&format!("default without {name}"), System { accesses, ..system(options) });
    }
}

#[test]
fn two_pages_are_coherent() {
    let accesses = if long() { vec![2, 2, 1] } else { vec![2, 1, 1] };
    let two = |options| System { managers: vec![0, 1], accesses: accesses.clone(), ..system(options) };
    if long() {
        all("ivy", two(Options::ivy()));
    } else {
        all("ivy", System { accesses: vec![1, 1, 1], ..two(Options::ivy()) });
    }
    all("default", System { parts: vec![Part::Batch], ..two(default()) });
}

/// The lost node is the manager, the owner, a requester, or several of them.
#[test]
fn a_lost_node_and_a_false_suspicion_leave_the_rest_coherent() {
    let without_hold = Options { hold_ns: 0, ..default() };
    for (name, options) in [("ivy", Options::ivy()), ("default", default()), ("no hold", without_hold)] {
        for (manager, accesses) in [(0, vec![1, 1, 0]), (0, vec![0, 1, 1]), (1, vec![0, 1, 1])] {
            let system = System { managers: vec![manager], accesses, ..system(options) };
            all(&format!("{name}, one node killed"), System { kills: 1, ..system.clone() });
            all(&format!("{name}, one false suspicion"), System { false_suspicions: 1, ..system });
        }
    }
}

#[test]
fn from_every_state_all_threads_can_finish() {
    // Without a hold time there are far more states.
    let without_hold = long().then(|| ("no hold", Options { hold_ns: 0, ..default() }));
    for (name, options) in [("ivy", Options::ivy()), ("default", default())].into_iter().chain(without_hold) {
        all_end(name, &System { accesses: vec![1, 1, 1], losses: 0, ..system(options) });
        let system = System { accesses: vec![0, 1, 1], losses: 0, ..system(options) };
        all_end(name, &System { kills: 1, ..system.clone() });
        if options.hold_ns > 0 || long() {
            all_end(name, &System { false_suspicions: 1, ..system });
        }
    }
    all_end("default", &System { accesses: vec![2, 2, 1], ..system(default()) });
    let accesses = if long() { vec![1, 1, 1] } else { vec![1, 1, 0] };
    let early = System { accesses, timers: true, losses: 0, ..system(default()) };
    all_end("default, hold time ends early", &early);
}

#[test]
fn faults_are_found() {
    let safety = "single writer, data value";
    for options in [Options::ivy(), default()] {
        found(Broken::KeepCopy, options, safety);
        found(Broken::CopyThenDrop, options, safety);
        found(Broken::LoseGrants, options, "progress");
        found(Broken::LoseWakes, options, "progress");
        let gone = System { broken: Broken::LoseAll, kills: 1, accesses: vec![1, 1, 0], ..system(options) };
        found_in(gone, "nothing is lost for nothing");
    }
    found(Broken::SkipInvalidation, Options::ivy(), safety);
    found(Broken::ForgetCopies, default(), safety);
    found(Broken::StaleTwin, Options { deltas: true, ..Options::ivy() }, safety);
    // What a thread waited for is taken away before it was used.
    let steals = System { timers: true, accesses: vec![1, 1, 0], ..system(default()) };
    let found = ends(&System { losses: 0, ..steals });
    assert!(found.inside < found.states, "who waits can lose the page when the hold time is too short");
}

/// There is always something that can happen, and nobody gets the page.
#[test]
fn a_livelock_is_found() {
    let system =
        System { broken: Broken::StopClock, timers: true, accesses: vec![1, 1, 0], ..system(default()) };
    let way = ends(&system).lost.expect("no way to an end");
    println!("no way to an end after {way:?}");
}
