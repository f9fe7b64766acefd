//! What is checked, and faults that must be found.

use crate::common::Broken;
use crate::system::System;
use stateright::{Checker, HasDiscoveries, Model};
use std::time::Instant;
use vnuma_dsm::Options;

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
    }
}

/// More accesses, for a soak.
fn long() -> bool {
    std::env::var_os("VNUMA_SOAK_ROUNDS").is_some()
}

/// Checks all interleavings, prints how many states there are, and expects no fault.
fn all(name: &str, system: System) {
    let start = Instant::now();
    let bounds = format!(
        "{} nodes, {} pages, {:?} accesses, {} losses",
        system.nodes,
        system.managers.len(),
        system.accesses,
        system.losses
    );
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

/// Expects a fault that was put in to be found as a violation of this property.
fn found(broken: Broken, options: Options, property: &str) {
    let system = System { broken, accesses: vec![2, 1, 1], ..system(options) };
    let checker = system.checker().threads(1).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let discoveries = checker.discoveries();
    let path =
        discoveries.get(property).unwrap_or_else(|| panic!("{broken:?}: {property} holds: {discoveries:?}"));
    println!("{broken:?}: {property}, after {} steps", path.clone().into_actions().len());
}

#[test]
fn ivy_is_coherent() {
    let accesses = if long() { vec![2, 2, 1] } else { vec![2, 1, 1] };
    all("ivy", System { accesses, ..system(Options::ivy()) });
}

#[test]
fn the_default_is_coherent() {
    let accesses = if long() { vec![2, 2, 2] } else { vec![2, 2, 1] };
    all("default", System { accesses, ..system(default()) });
    // The hold time may end at any moment.
    all("default", System { timers: true, accesses: vec![1, 1, 1], ..system(default()) });
}

#[test]
fn each_optimization_alone_is_coherent() {
    let ivy = Options::ivy();
    let direct = Options { direct_reply: true, ..ivy };
    let each = [
        ("direct_reply", direct),
        ("owner_hints", Options { owner_hints: true, ..direct }),
        ("upgrade_without_data", Options { upgrade_without_data: true, ..ivy }),
        ("migratory", Options { migratory: true, owner_hints: true, ..direct }),
        ("tell_owners", Options { tell_owners: true, owner_hints: true, ..direct }),
        ("deltas", Options { deltas: true, ..ivy }),
        ("hold_ns", Options { hold_ns: 1, ..ivy }),
        ("batch_invalidations", Options { batch_invalidations: true, ..ivy }),
    ];
    for (name, options) in each {
        all(name, System { accesses: vec![2, 1, 1], ..system(options) });
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
        ("hold_ns", Options { hold_ns: 0, ..default }),
        ("batch_invalidations", Options { batch_invalidations: false, ..default }),
    ];
    for (name, options) in each {
        let accesses = if options.hold_ns == 0 { vec![2, 1, 1] } else { vec![2, 2, 1] };
        all(&format!("default without {name}"), System { accesses, ..system(options) });
    }
}

#[test]
fn two_pages_are_coherent() {
    let two = |options| System { managers: vec![0, 1], accesses: vec![1, 1, 1], ..system(options) };
    all("ivy", two(Options::ivy()));
    all("default", two(default()));
}

#[test]
fn a_lost_node_and_a_false_suspicion_leave_the_rest_coherent() {
    for (name, options) in [("ivy", Options::ivy()), ("default", default())] {
        let system = System { accesses: vec![1, 1, 0], ..system(options) };
        all(&format!("{name}, one node killed"), System { kills: 1, ..system.clone() });
        all(&format!("{name}, one false suspicion"), System { false_suspicions: 1, ..system });
    }
}

#[test]
fn faults_are_found() {
    let safety = "single writer, data value";
    for options in [Options::ivy(), default()] {
        found(Broken::KeepCopy, options, safety);
        found(Broken::CopyThenDrop, options, safety);
        found(Broken::LoseGrants, options, "progress");
        found(Broken::LoseWakes, options, "progress");
    }
    found(Broken::SkipInvalidation, Options::ivy(), safety);
}
