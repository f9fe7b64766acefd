//! A seed replays, nothing is broken, and faults that are put in are found.

use clap::ValueEnum;
use vnuma_sim::{Fault, Outcome, Settings, Simulation};

fn run(seed: u64, fault: Option<Fault>, events: u64) -> Outcome {
    Simulation::new(Settings { seed, vms: 200, events, fault }).run(|_| {})
}

#[test]
fn a_seed_gives_the_same_commands_and_another_one_others() {
    let (first, again, other) = (run(7, None, 30_000), run(7, None, 30_000), run(8, None, 30_000));
    assert_eq!((&first.hash, first.commands, &first.broken), (&again.hash, again.commands, &again.broken));
    assert_ne!(first.hash, other.hash);
}

#[test]
fn no_rule_is_broken() {
    let broken: Vec<_> = (1..4).filter_map(|seed| run(seed, None, 60_000).broken).collect();
    assert_eq!(broken, Vec::<String>::new());
}

#[test]
fn every_fault_that_is_put_in_is_found() {
    // Some need what few runs have: a reading that began before a mask was set and ended after it, say. Most are found in a short one,
    // some of them at its end.
    let runs = || std::iter::once((1, 60_000)).chain((1..=8).map(|seed| (seed, 250_000)));
    let missed =
        |fault: &&Fault| runs().all(|(seed, events)| run(seed, Some(**fault), events).broken.is_none());
    let missed: Vec<_> = Fault::value_variants().iter().filter(missed).collect();
    assert!(missed.is_empty(), "{missed:?}");
}
