use super::{
    goals::{Limit, Verdict, of, verdict},
    *,
};
use crate::committed::RUNS;

fn seen(ops: u64) -> Seen {
    Seen { window_s: 2.0, ops, ..Seen::default() }
}

fn outcome(scheduler: Scheduler, seen: Seen) -> Outcome {
    Outcome { scheduler, refused: None, seen: Some(seen) }
}

/// A run of a load by EEVDF twice and by full mode, with so many operations.
fn cell(load: Load, run: usize, [own, again, full]: [Seen; 3]) -> Cell {
    let outcomes = [(Scheduler::Eevdf, own), (Scheduler::EevdfAgain, again), (Scheduler::Full, full)];
    let outcomes = outcomes.into_iter().map(|(scheduler, seen)| outcome(scheduler, seen)).collect();
    Cell { load, run, cpus: CPUS, outcomes }
}

fn rows_of(cells: &[Cell], costs: &[Cost]) -> Vec<Row> {
    rows(&cells.iter().collect::<Vec<_>>(), &costs.iter().collect::<Vec<_>>())
}

fn said(rows: &[Row], goal: &str) -> Verdict {
    let goals = of(rows);
    let found: Vec<_> = goals.iter().filter(|judged| judged.goal.starts_with(goal)).collect();
    assert_eq!(found.len(), 1, "{goal}: {goals:#?}");
    found[0].verdict
}

#[test]
fn a_goal_is_met_only_where_the_spread_is_finer() {
    let at_least = |limit, interval, spread| verdict(Limit::AtLeast(limit), interval, spread);
    assert_eq!(at_least(0.98, [0.985, 1.01], 0.01), Verdict::Met);
    assert_eq!(at_least(0.98, [0.985, 1.01], 0.05), Verdict::NotResolvedHere);
    assert_eq!(at_least(0.98, [0.97, 1.01], 0.01), Verdict::NotResolvedHere);
    assert_eq!(at_least(0.98, [0.90, 0.97], 0.01), Verdict::Missed);
    // As far from EEVDF as that is from itself.
    assert_eq!(at_least(0.98, [0.90, 0.97], 0.05), Verdict::NotResolvedHere);
    // Nor is it where all runs are better by more than chance.
    assert_eq!(at_least(0.98, [1.2, 1.3], 0.05), Verdict::NotResolvedHere);
    assert_eq!(at_least(1.0, [1.06, 1.3], 0.05), Verdict::NotResolvedHere);
    assert_eq!(at_least(1.0, [1.0, 1.3], 0.0), Verdict::Met);
    let at_most = |interval, spread| verdict(Limit::AtMost(1.1), interval, spread);
    assert_eq!(at_most([0.9, 1.09], 0.1), Verdict::Met);
    assert_eq!(at_most([0.9, 1.09], 0.2), Verdict::NotResolvedHere);
    assert_eq!(at_most([0.5, 0.7], 0.2), Verdict::NotResolvedHere);
    assert_eq!(at_most([1.3, 2.5], 0.2), Verdict::Missed);
    assert_eq!(at_most([1.05, 2.5], 0.01), Verdict::NotResolvedHere);
}

#[test]
fn operations_are_compared_within_a_run() {
    // The machine is twice as fast in each second run.
    let cells: Vec<Cell> = (1..=RUNS)
        .map(|run| {
            let speed = 1 + run as u64 % 2;
            cell(Load::Lock, run, [1000, 1000, 1100].map(|ops| seen(speed * ops)))
        })
        .collect();
    let rows = rows_of(&cells, &[]);
    assert_eq!(rows.len(), 3);
    let full = rows.iter().find(|row| row.scheduler == "full").expect("full mode");
    assert_eq!((full.load, full.vms, full.vcpus, full.ops_by_eevdf), ("lock", 2, 16, Some(1.1)));
    assert_eq!(said(&rows, "lock, full: operations"), Verdict::Met);
    assert_eq!(said(&rows, "lock, partial: operations"), Verdict::NotMeasured);
    assert_eq!(said(&rows_of(&cells[1..], &[]), "lock, full: operations"), Verdict::NotResolvedHere);
    let noisy: Vec<Cell> =
        (1..=RUNS).map(|run| cell(Load::Build, run, [1000, 900 + 40 * run as u64, 995].map(seen))).collect();
    assert_eq!(said(&rows_of(&noisy, &[]), "build, full: operations"), Verdict::NotResolvedHere);
}

#[test]
fn shares_are_those_of_all_runs_and_may_be_as_wrong_as_under_eevdf() {
    // Entitled are 0.2, 1.5 and 6.3 CPUs.
    let used = |third: f64| Seen { used_s: vec![0.4, 3.0, third], lag_max_ms: Some(third), ..seen(1) };
    let runs = |own: f64, again: f64, full: [f64; 2]| -> Vec<Cell> {
        let of = |run: usize| cell(Load::Quotas, run, [used(own), used(again), used(full[run % 2])]);
        (0..2).map(of).collect()
    };
    let rows = rows_of(&runs(12.6, 12.6, [12.2, 13.0]), &[]);
    let full = rows.iter().find(|row| row.scheduler == "full").expect("full mode");
    assert!(full.share_error.is_some_and(|error| error < 1e-9), "{full:?}");
    assert_eq!(full.lag_max_ms, Some(13.0));
    // 16 of 16 CPU seconds in the mean of both runs.
    assert!(full.used_share.is_some_and(|share| (share - 1.0).abs() < 1e-9), "{full:?}");
    assert_eq!(said(&rows, "quotas, full: the largest error"), Verdict::Met);
    let verdict_of =
        |own, again, full| said(&rows_of(&runs(own, again, [full; 2]), &[]), "quotas, full: the");
    // 8 CPUs for 2 s: 0.8 s are 5 points.
    assert_eq!(verdict_of(12.6, 12.6, 11.8), Verdict::Missed);
    assert_eq!(verdict_of(11.8, 11.8, 11.8), Verdict::Met);
    assert_eq!(verdict_of(11.8, 12.6, 11.8), Verdict::NotResolvedHere);
}

#[test]
fn wake_ups_and_events_are_judged_by_intervals() {
    let p99 = |us: f64| Seen { wake_p99_us: Some(us), wake_max_us: Some(5.0 * us), wakes: 500, ..seen(10) };
    let longest = |rows: Vec<Row>| rows.into_iter().find(|row| row.scheduler == "full")?.wake_max_ms;
    let cells = |full: f64| -> Vec<Cell> {
        (1..=RUNS).map(|run| cell(Load::Wakes, run, [p99(100.0), p99(103.0), p99(full)])).collect()
    };
    assert_eq!(said(&rows_of(&cells(109.0), &[]), "wakes, full: 99th"), Verdict::Met);
    assert_eq!(longest(rows_of(&cells(600.0), &[])), Some(3.0));
    assert_eq!(said(&rows_of(&cells(150.0), &[]), "wakes, full: 99th"), Verdict::Missed);
    let cost = |possible, ns: f64| Cost {
        scheduler: Scheduler::Full,
        cpus: CPUS,
        possible,
        topology: possible,
        windows: (0..RUNS).map(|at| (ns + at as f64, 1000)).collect(),
    };
    let of = |many: f64| said(&rows_of(&[], &[cost(256, many), cost(8, 1000.0)]), "full: cost of an event");
    assert_eq!(of(1150.0), Verdict::Met);
    assert_eq!(of(1250.0), Verdict::Missed);
    assert_eq!(said(&rows_of(&[], &[cost(8, 1000.0)]), "full: cost"), Verdict::NotMeasured);
    let rows = rows_of(&[], &[cost(256, 1150.0), cost(8, 1000.0)]);
    let shown: Vec<_> = rows.iter().map(|row| (row.cpus, row.run_ns_per_event)).collect();
    assert_eq!(shown, [(8, Some(1002.0)), (256, Some(1152.0))]);
}

#[test]
fn a_scheduler_that_is_refused_is_named_and_not_compared() {
    let refused = Outcome {
        scheduler: Scheduler::ScxLavd,
        refused: Some("scx_lavd: exit status: 1: no kfunc".to_owned()),
        seen: None,
    };
    let mut one = cell(Load::Lock, 1, [1000, 1000, 1000].map(seen));
    one.outcomes.push(refused);
    let mut two = cell(Load::Lock, 2, [1000, 1000, 1000].map(seen));
    let rows = rows_of(&[one.clone()], &[]);
    let row = rows.last().expect("rows");
    assert_eq!((row.scheduler, row.ops_by_eevdf, row.yields), ("scx-lavd", None, None));
    let reason = "1 of 1 runs: scx_lavd: exit status: 1: no kfunc";
    assert_eq!(row.refused.as_deref(), Some(reason));
    assert!(shown(&rows).ends_with(&format!("\nrefused: lock, scx-lavd: {reason}\n")), "{}", shown(&rows));
    // One that the kernel has ended once has the figures of its other runs.
    two.outcomes.push(outcome(Scheduler::ScxLavd, seen(500)));
    let both = rows_of(&[one, two], &[]);
    let row = both.last().expect("rows");
    assert_eq!((row.ops_by_eevdf, row.ops.map(|figure| figure.runs)), (Some(0.5), Some(1)));
    assert_eq!(row.refused.as_deref(), Some("1 of 2 runs: scx_lavd: exit status: 1: no kfunc"));
    let without: Vec<_> = rows.iter().filter_map(missing).collect();
    assert_eq!(without, ["lock, scx-lavd"]);
}
