use super::*;
use crate::raw::Period;
use vnuma_lab_pricing::Counts;

const MIB: u64 = 1 << 20;

fn server() -> raw::Server {
    raw::Server {
        profile: "broadwell-2s".into(),
        kernel: "7.3".into(),
        numad: "0.5".into(),
        dilation: 16.0,
        period_s: 4.0,
    }
}

/// An operation of so many cycles with prices of 0 for memory: cycles are instructions.
fn pass(operations: u64, cycles: u64) -> Pass {
    let counts = Counts {
        instructions: cycles,
        base_cycles: cycles,
        dram_by_class: vec![30, 10],
        streamed_by_class: vec![50, 10],
        ..Counts::default()
    };
    Pass { operations, counts }
}

fn cell(cause: Cause, policy: Policy, displaced_mib: u64) -> Cell {
    let run = |cycles: u64| Stream {
        remote_pages: 3,
        pages: 100,
        passes: [cycles, cycles * 9, cycles + 1].map(|cycles| pass(1000, cycles * 1000)).to_vec(),
    };
    let period = Period {
        elapsed_s: 4.0,
        worked_s: 1.0,
        io: pass(100, 5000),
        displaced_after_work: 40 * MIB,
        displaced: displaced_mib * MIB,
        resident: 400 * MIB,
    };
    Cell {
        cause,
        policy,
        period_s: 4.0,
        first: run(100),
        periods: vec![period; 12],
        second: run(120),
        store: None,
        resident: 400 * MIB,
        displaced: displaced_mib * MIB,
        caused: [("given_back".to_owned(), 300 * MIB)].into(),
        pages_moved: if policy == Policy::Both { 2000 } else { 1000 },
        longest_hold_us: Some(1500),
        daemon: policy.is_of_vnumad().then(|| [("memory".to_owned(), 1_000_000_000)].into()),
    }
}

fn rows(cells: &[Cell]) -> Vec<Row> {
    let profile = by_name("broadwell-2s").expect("a profile");
    rows_of(cells, &server(), &profile).expect("rows")
}

fn of(rows: &[Row], text: &str) -> Goal {
    let goals = judge(rows, false);
    goals.into_iter().find(|goal| goal.goal.contains(text)).unwrap_or_else(|| panic!("no goal {text}"))
}

#[test]
fn a_row_has_shares_medians_and_the_daemon_s_part_of_a_cpu() {
    let found = rows(&[cell(Cause::Balloon, Policy::None, 100)]);
    let row = &found[0];
    assert_eq!((row.displaced_share, row.displaced_share_mean, row.displaced_share_most), (0.25, 0.25, 0.1));
    assert_eq!((row.remote_share, row.remote_allocations, row.allocations), (0.2, 3, 100));
    // Of three passes the middle one; the wildest has no say.
    let instructions = row.cycles_per_op - row.cycles_per_op_first_run;
    assert!((instructions - 20.0).abs() < 1e-6, "{row:?}");
    assert_eq!((row.longest_hold_ms, row.does_not_count.as_deref()), (Some(1.5), None));
    // 10^9 cycles in 12 periods of 900 s.
    let clock = by_name("broadwell-2s").expect("a profile").clock_ghz;
    assert!((row.overhead_share.expect("a daemon") - 1.0 / (12.0 * 900.0 * clock)).abs() < 1e-12);
    let peer = rows(&[cell(Cause::Balloon, Policy::AutonumaHost, 100)]);
    assert_eq!(peer[0].overhead_share, None);
}

#[test]
fn a_cause_that_displaces_too_little_is_no_cause() {
    let cells = [cell(Cause::Ksm, Policy::None, 39), cell(Cause::Ksm, Policy::Adaptive, 0)];
    let found = rows(&cells);
    assert!(found.iter().all(|row| row.does_not_count.as_ref().is_some_and(|why| why.contains("no cause"))));
    assert!(!of(&found, "under none").met && !of(&found, "adaptive at most 1.0 % are displaced").met);
    let found = rows(&[cell(Cause::Ksm, Policy::None, 40), cell(Cause::Ksm, Policy::Adaptive, 4)]);
    assert!(found.iter().all(|row| row.does_not_count.is_none()), "{found:?}");
    assert!(of(&found, "under none").met && of(&found, "adaptive at most 1.0 % are displaced").met);
    let alone = rows(&[cell(Cause::Ksm, Policy::Adaptive, 0)]);
    assert!(alone[0].does_not_count.as_ref().is_some_and(|why| why.contains("no row of none")));
}

#[test]
fn periods_that_are_late_do_not_count() {
    let none = cell(Cause::Balloon, Policy::None, 100);
    let mut late = cell(Cause::Balloon, Policy::Both, 0);
    late.periods[1].elapsed_s = 6.1;
    late.periods[2].elapsed_s = 6.1;
    assert_eq!(rows(&[none.clone(), late.clone()])[1].does_not_count, None, "two of twelve may be late");
    let mut long = late.clone();
    long.periods.iter_mut().for_each(|period| (period.elapsed_s, period.worked_s) = (6.3, 3.1));
    assert_eq!(rows(&[none.clone(), long])[1].does_not_count, None, "their work takes half of them");
    late.periods[3].elapsed_s = 6.1;
    assert!(rows(&[none, late])[1].does_not_count.is_some());
}

#[test]
fn every_goal_can_be_missed() {
    let met = || {
        [cell(Cause::FirstTouch, Policy::None, 100), cell(Cause::FirstTouch, Policy::Both, 8), good(), peer()]
    };
    fn good() -> Cell {
        let mut good = cell(Cause::FirstTouch, Policy::Adaptive, 4);
        good.second = good.first.clone();
        good
    }
    fn peer() -> Cell {
        cell(Cause::FirstTouch, Policy::AutonumaHost, 80)
    }
    let all = judge(&rows(&met()), false);
    assert!(all[1..].iter().all(|goal| goal.met), "{all:?}");
    assert!(!all[0].met && all[0].found.starts_with("4 of "), "{:?}", all[0]);
    let without = |change: fn(&mut [Cell; 4])| {
        let mut cells = met();
        change(&mut cells);
        let missed = judge(&rows(&cells), false).into_iter().skip(1).filter(|goal| !goal.met);
        missed.map(|goal| goal.goal).collect::<Vec<_>>()
    };
    let missed = |change: fn(&mut [Cell; 4]), text: &str| {
        let missed = without(change);
        assert!(missed.len() == 1 && missed[0].contains(text), "{text}: {missed:?}");
    };
    missed(|cells| cells[2].displaced = 5 * MIB, "at most 1.0 % are displaced");
    missed(|cells| cells[2].periods.iter_mut().for_each(|one| one.io = pass(100, 9000)), "the I/O load");
    missed(|cells| cells[2].pages_moved = 3000, "more pages than both");
    let spends = |cells: &mut [Cell; 4]| {
        cells[2].daemon = Some([("memory".to_owned(), 200_000_000_000_000)].into());
    };
    missed(spends, "of a CPU");
    let slower = |cells: &mut [Cell; 4]| {
        cells[2].second.passes = vec![pass(1000, 110_000); 3];
    };
    missed(slower, "the second run takes at most 1.0 % more");
    let ahead = |cells: &mut [Cell; 4]| {
        // The peer has 2 % less in the second run than in the first.
        let cycles = |pass: &mut Pass| pass.counts.base_cycles = pass.counts.base_cycles * 98 / 100;
        cells[3].second = cells[3].first.clone();
        cells[3].second.passes.iter_mut().for_each(cycles);
    };
    missed(ahead, "no peer");
    // What has no rows of others to compare with in the reduced form does not miss for that, and in the full one does.
    let mut cells = met().to_vec();
    cells.extend([cell(Cause::Ksm, Policy::None, 100), good()]);
    cells[5].cause = Cause::Ksm;
    let missed = |full| judge(&rows(&cells), full).iter().skip(1).filter(|goal| !goal.met).count();
    assert_eq!((missed(false), missed(true)), (0, 2));
}

#[test]
fn the_table_has_a_line_for_each_row() {
    let found = rows(&[cell(Cause::Ksm, Policy::None, 39), cell(Cause::Ksm, Policy::AutonumaHost, 39)]);
    let text = table(&found);
    assert_eq!(text.lines().count(), 3);
    assert!(text.contains("does not count: the cause is no cause") && text.contains("3 of 100"), "{text}");
}

fn size_cell(cause: SizeCause, means: Means, cycles: u64) -> SizeCell {
    let passes = [cycles, cycles * 9, cycles + 1].map(|cycles| pass(1000, cycles * 1000)).to_vec();
    SizeCell { cause, means, free_mib: [300, 200], stream: Stream { passes, ..Stream::default() } }
}

#[test]
fn sizes_are_compared_with_a_vm_that_was_never_changed() {
    let profile = by_name("broadwell-2s").expect("a profile");
    let some = |by_mem: u64, skip: usize| {
        let cells = [SizeCause::Grow, SizeCause::Shrink].map(|cause| {
            [(Means::NeverChanged, 10_000), (Means::Balloon, 20_000), (Means::VirtioMem, by_mem)]
                .map(|(means, cycles)| size_cell(cause, means, cycles))
        });
        sizes_of(&cells.concat()[skip..], &profile).expect("rows")
    };
    let all = |by_mem| some(by_mem, 0);
    let rows = all(10_100);
    assert_eq!((rows.len(), rows[1].remote_share, rows[0].to_never_changed), (6, 0.2, Some(0.0)));
    assert!(rows[1].to_never_changed.expect("compared") > 0.9, "{:?}", rows[1]);
    let met = |rows: &[SizeRow]| judge_sizes(rows).into_iter().map(|goal| goal.met).collect::<Vec<_>>();
    assert_eq!(met(&rows), [true]);
    // Less is as wrong as more: then something else is measured.
    assert_eq!((met(&all(10_300)), met(&all(9_700))), (vec![false], vec![false]));
    assert_eq!(met(&rows[..3]), [false], "one of both causes");
    assert_eq!(met(&some(10_100, 1)), [false], "nothing to compare with");
    assert!(judge_sizes(&[]).is_empty() && size_table(&[]).is_empty());
    let text = size_table(&rows);
    assert!(text.contains("shrink   virtio-mem         300, 200 MiB"), "{text}");
}

#[test]
fn the_store_has_rows_and_a_second_run_of_its_own() {
    let stored = |policy, cycles: [u64; 2]| {
        let mut cell = cell(Cause::Ksm, policy, if policy == Policy::None { 100 } else { 0 });
        cell.second = cell.first.clone();
        let run = |cycles| Stream { passes: vec![pass(1000, cycles); 3], ..Stream::default() };
        cell.store = Some(cycles.map(run));
        cell
    };
    let cells = |second| {
        [
            stored(Policy::None, [200_000, 300_000]),
            stored(Policy::Both, [200_000; 2]),
            stored(Policy::Adaptive, [200_000, second]),
        ]
    };
    let found = rows(&cells(201_000));
    let workloads: Vec<&str> = found.iter().map(|row| row.workload).collect();
    assert_eq!(workloads, ["stream", "store"].repeat(3));
    let goal = of(&found, "the second run takes at most 1.0 % more");
    assert!(goal.met && goal.found.contains("ksm (store)"), "{goal:?}");
    assert!(!of(&rows(&cells(210_000)), "the second run takes at most 1.0 % more").met);
    let displaced = of(&found, "adaptive at most 1.0 % are displaced");
    assert!(displaced.met && !displaced.found.contains("store"), "{displaced:?}");
}
