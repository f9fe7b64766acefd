use super::*;
use vnuma_lab_pricing::{SecondLlc, by_name};

fn row(workload: &str, policy: &str, cycles_per_op: f64) -> Row {
    Row {
        profile: "p".into(),
        workload: workload.into(),
        policy: policy.into(),
        memory_intensive: workload != "compute",
        cycles_per_op,
        overhead_share: Some(0.0001),
        ..Row::default()
    }
}

fn missed(rows: &[Row]) -> Vec<String> {
    judge(rows)
        .into_iter()
        .filter(|goal| !goal.met)
        .map(|goal| format!("{}: {}", goal.goal, goal.found))
        .collect()
}

fn good() -> Vec<Row> {
    let chase = [
        ("linux", 140.0),
        ("linux-nobalance", 150.0),
        ("credit", 150.0),
        ("vprobe", 100.0),
        ("oracle", 99.0),
    ];
    let compute = [("linux", 10.0), ("credit", 10.0), ("vprobe", 10.05)];
    let rows = |name: &'static str, list: &[(&str, f64)]| {
        list.iter().map(|(policy, cost)| row(name, policy, *cost)).collect::<Vec<_>>()
    };
    [rows("chase", &chase), rows("compute", &compute)].concat()
}

#[test]
fn a_run_that_meets_all_goals_misses_none() {
    assert_eq!(missed(&good()), Vec::<String>::new());
    let goals = judge(&good());
    assert_eq!(goals.len(), 5, "{goals:?}");
    assert!(goals.iter().any(|goal| goal.found == "97.6 % of 41.4 %"), "{goals:?}");
}

#[test]
fn a_load_without_memory_says_nothing_of_credit() {
    let compute: Vec<Row> = good().into_iter().filter(|row| !row.memory_intensive).collect();
    assert_eq!(judge(&compute).len(), 2, "{:?}", judge(&compute));
    assert_eq!(missed(&compute), Vec::<String>::new());
}

#[test]
fn each_goal_can_be_missed() {
    let with = |workload: &str, policy: &str, cost: f64| {
        let mut rows = good();
        let row = rows.iter_mut().find(|row| row.workload == workload && row.policy == policy);
        row.expect("a row").cycles_per_op = cost;
        missed(&rows)
    };
    assert_eq!(with("chase", "vprobe", 104.0).len(), 2, "the gap, and credit");
    assert_eq!(
        with("chase", "linux", 98.0),
        ["chase under p: at most 1 % behind any peer: 2.04 % behind linux"]
    );
    assert_eq!(with("compute", "vprobe", 10.3).len(), 2, "a peer, and Linux");
}

#[test]
fn a_row_that_does_not_count_is_no_peer_and_proves_nothing() {
    let mut rows = good();
    rows[0].does_not_count = Some("vm1 had 80.0 % of ...".into());
    rows[0].cycles_per_op = 1.0;
    assert_eq!(missed(&rows), Vec::<String>::new());
    for at in [1, 5] {
        rows[at].does_not_count = Some("vm1 had 80.0 % of ...".into());
    }
    assert_eq!(
        missed(&rows),
        [
            "chase under p: the gap between Linux and the oracle is judged: neither row of Linux counts, or that of the oracle does not",
            "compute under p: the cost beside Linux is judged: neither row of Linux counts, or that of the oracle does not",
        ]
    );
    rows[3].does_not_count = Some("CPUs were idle".into());
    let missed = missed(&rows);
    assert!(missed[0].contains("the row of vprobe counts: CPUs were idle"), "{missed:?}");
}

fn period(accesses: [u64; 2], operations: u64, ran_ns: u64, idle_share: f64) -> Period {
    let misses = accesses.iter().sum();
    let user = Counts {
        instructions: 4 * operations,
        base_cycles: 4 * operations,
        llc_references: misses,
        llc_misses: misses,
        dram_by_class: accesses.to_vec(),
        streamed_by_class: vec![0, 0],
        ..Counts::default()
    };
    let (program_cycles, waited_ns) = (None, ran_ns);
    let values =
        crate::threads::Values { user, cycles: 1000, program_cycles, ran_ns, waited_ns, migrations: 1 };
    let vcpu = || Vcpu { values: values.clone(), operations, cpu: 1 };
    let vm = || (0..4).map(|_| vcpu()).collect::<Vec<_>>();
    Period {
        elapsed_s: 1.0,
        vms: vec![vm(), vm(), vm()],
        idle_share,
        daemon: Some([("sampler".to_owned(), 6)].into()),
        daemon_ns: None,
        programs_ns: None,
        program_runs: None,
        wakes_us: Vec::new(),
    }
}

fn cell(policy: &str, periods: Vec<Period>) -> Cell {
    Cell {
        workload: "chase".into(),
        policy: policy.into(),
        warm_up: 1,
        periods,
        pages_scanned: 1 << 20,
        pages_moved: 0,
        steps: 2,
        means: None,
        vm_steps: Vec::new(),
        because_of: Default::default(),
        left_out: 0,
        repeated: 0,
    }
}

#[test]
fn a_linux_row_in_which_balancing_slept_does_not_count() {
    let counted = || vec![period([1000, 1000], 1000, 300_000_000, 0.0); 4];
    let slept = Cell { pages_scanned: 131_071, ..cell("linux", counted()) };
    let found = rows_of(vec![slept])[0].does_not_count.clone().expect("it does not count");
    assert_eq!(found, "AutoNUMA looked at 131071 pages, less than the 131072 that vm1 has");
    assert_eq!(rows_of(vec![cell("linux", counted())])[0].does_not_count, None);
}

#[test]
fn a_candidate_of_the_oracle_that_does_not_count_is_not_the_best() {
    let cells = |idle_share| {
        let linux = cell("linux", vec![period([0, 1000], 1000, 300_000_000, 0.0); 4]);
        let remote = cell("oracle:by-vm", vec![period([0, 1000], 1000, 300_000_000, 0.0); 4]);
        let local = cell("oracle:at-home", vec![period([1000, 0], 1000, 300_000_000, idle_share); 4]);
        rows_of(vec![linux, local, remote])[1].placement.clone()
    };
    assert_eq!(cells(0.0).as_deref(), Some("at-home"));
    assert_eq!(cells(0.5).as_deref(), Some("by-vm"));
}

fn rows_of(cells: Vec<Cell>) -> Vec<Row> {
    let profile = by_name("broadwell-2s").expect("it is there");
    run_of(cells).rows(&profile)
}

fn run_of(cells: Vec<Cell>) -> Run {
    let (profile, second_llc) = ("broadwell-2s".into(), Some((12288, 16)));
    let server = raw::Server { profile, second_llc, kernel: String::new(), numad: String::new() };
    Run { server, workloads: Vec::new(), cells }
}

#[test]
fn rows_are_priced_and_the_warm_up_is_left_out() {
    let remote = || period([0, 1000], 1000, 300_000_000, 0.0);
    let local = || period([1000, 0], 1000, 300_000_000, 0.0);
    let moved = vec![remote(), local(), local(), local(), local()];
    let stayed = vec![remote(), remote(), remote(), remote(), remote()];
    let rows = rows_of(vec![cell("linux", stayed), cell("vprobe", moved)]);
    // 4 + 133.4 ns and 75.8 ns at 2.2 GHz.
    assert!((rows[0].cycles_per_op - (4.0 + 293.48)).abs() < 0.01, "{:?}", rows[0]);
    assert!((rows[1].cycles_per_op - (4.0 + 166.76)).abs() < 0.01, "{:?}", rows[1]);
    assert_eq!((rows[0].remote_share, rows[1].remote_share), (Some(1.0), Some(0.0)));
    assert_eq!((rows[0].converge_periods, rows[1].converge_periods), (0, 1));
    assert_eq!((rows[1].migrations, rows[1].llc_misses), (20, 1000.0));
    assert!((rows[1].cpu_share - 0.3).abs() < 1e-9 && rows[1].does_not_count.is_none(), "{:?}", rows[1]);
    assert!((rows[1].overhead_share.expect("vnumad ran") - 6.0 / 12_000.0).abs() < 1e-9);
}

#[test]
fn less_cpu_time_and_idle_cpus_are_named() {
    let full = || period([1000, 0], 1000, 300_000_000, 0.0);
    let less = period([1000, 0], 900, 270_000_000, 0.0);
    let idle = period([1000, 0], 1000, 300_000_000, 0.1);
    let rows = rows_of(vec![
        cell("linux", vec![full(), full()]),
        cell("lb", vec![full(), less]),
        cell("brm", vec![full(), idle]),
    ]);
    let why = |at: usize| rows[at].does_not_count.clone().unwrap_or_default();
    assert_eq!(why(0), "");
    assert_eq!(why(1), "vm1 had 90.0 % of the CPU time that vm1 and vm2 have under linux");
    assert_eq!(why(2), "CPUs were idle for 10.0 % of the time while vCPUs waited");
}

#[test]
fn cpu_time_is_compared_with_the_lower_of_both_rows_of_linux() {
    let with = |policy: &str, ran_ns: u64| {
        cell(policy, vec![period([1000, 0], 1000, 300_000_000, 0.0), period([1000, 0], 1000, ran_ns, 0.0)])
    };
    let rows = rows_of(vec![
        with("linux", 300_000_000),
        with("linux-nobalance", 270_000_000),
        with("lb", 260_000_000),
        with("brm", 250_000_000),
    ]);
    let why = |at: usize| rows[at].does_not_count.clone().unwrap_or_default();
    assert_eq!([why(0), why(1), why(2)].concat(), "");
    assert_eq!(why(3), "vm1 had 92.6 % of the CPU time that vm1 and vm2 have under linux");
}

#[test]
fn the_oracle_is_its_best_candidate() {
    let at = |accesses| vec![period(accesses, 1000, 1, 0.0), period(accesses, 1000, 1, 0.0)];
    let rows = rows_of(vec![
        cell("linux", at([0, 1000])),
        cell("oracle:a", at([500, 500])),
        cell("oracle:b", at([900, 100])),
        cell("oracle:c", at([0, 1000])),
    ]);
    assert_eq!((rows.len(), rows[1].placement.as_deref()), (2, Some("b")));
}

/// A cell whose warm-up has no wake-ups that count, and then those of these lengths.
fn waking(policy: &str, wakes_us: Vec<u32>) -> Cell {
    let quiet = || period([1000, 0], 1000, 300_000_000, 0.0);
    let warm_up = Period { wakes_us: vec![u32::MAX; 1000], ..quiet() };
    cell(policy, vec![warm_up, Period { wakes_us, ..quiet() }, quiet()])
}

#[test]
fn the_p99_of_wake_ups_is_by_that_of_linux() {
    // Nearest rank: of 200 the 198th.
    let linux: Vec<u32> = (1..=200).rev().collect();
    let slow: Vec<u32> = (1..=200).map(|us| us * 3).chain([7; 200]).collect();
    let rows = rows_of(vec![waking("linux", linux), waking("lb", slow), waking("brm", vec![5; 99])]);
    assert_eq!((rows[0].wake_ups, rows[0].wake_p99_by_linux), (200, Some(1.0)));
    assert_eq!((rows[1].wake_ups, rows[1].wake_p99_by_linux), (400, Some(3.0 * 196.0 / 198.0)));
    assert_eq!((rows[2].wake_ups, rows[2].wake_p99_by_linux), (99, None));
    assert_eq!(rows[2].no_wake_p99.as_deref(), Some("99 wake-ups under brm, fewer than 100"));
    let rows = rows_of(vec![waking("linux", vec![5; 3]), waking("lb", vec![5; 100])]);
    assert_eq!(rows[1].no_wake_p99.as_deref(), Some("3 wake-ups under linux, fewer than 100"));
    let rows = rows_of(vec![waking("lb", vec![5; 100])]);
    assert_eq!(rows[0].no_wake_p99.as_deref(), Some("there is no linux row"));
}

#[test]
fn what_observing_costs_is_told_beside_linux() {
    // 1000 local accesses: 4000 + 1000 * 166.76 modelled cycles of the program on each of 8 vCPUs, which run for 0.3 s.
    let program = 4000 + 166_760;
    let with = |policy: &str, kernel: u64| {
        let mut period = period([1000, 0], 1000, 300_000_000, 0.0);
        for vcpu in period.vms.iter_mut().flatten() {
            (vcpu.values.cycles, vcpu.values.program_cycles) = (program + kernel, Some(program));
        }
        cell(policy, vec![period; 3])
    };
    let profile = by_name("broadwell-2s").expect("it is there");
    let run = run_of(vec![with("linux", 9_240), with("linux-nobalance", 9_000), with("observe", 9_420)]);
    let rows = run.rows(&profile);
    assert!((rows[2].kernel_cycles_per_s.expect("counted") - 9_420.0 / 0.3).abs() < 1e-6, "{:?}", rows[2]);
    let found = run.observing(&profile);
    assert_eq!(found.iter().map(|found| found.against).collect::<Vec<_>>(), ["linux", "linux-nobalance"]);
    assert!((found[0].kernels - 0.001).abs() < 1e-6, "{found:?}");
    assert!((found[1].kernels - 420.0 / 179_760.0).abs() < 1e-6, "{found:?}");
    assert_eq!((found[0].programs, found[0].workload.as_str()), (0.0, "chase"));
    assert!((found[0].vnumad - 6.0 / (12.0 * (program + 9_420) as f64)).abs() < 1e-12, "{found:?}");
}

#[test]
fn what_vnumad_takes_is_judged_by_periods_of_its_default_length() {
    // 12 vCPUs take 1000 cycles each in a period, whose length was 1 s of modelled time.
    let with = |policy: &str, cycles: [u64; 3]| {
        let period = |cycles: u64| Period {
            daemon: Some([("core".to_owned(), cycles), ("sampler".to_owned(), 0)].into()),
            // At 2 cycles in a period programs take 0.12 cycles.
            daemon_ns: Some(300_000),
            // Of the 3.6 s that all vCPUs ran.
            programs_ns: Some(18_000),
            program_runs: Some(20),
            ..period([1000, 0], 1000, 300_000_000, 0.0)
        };
        cell(policy, cycles.map(period).into())
    };
    let profile = by_name("broadwell-2s").expect("it is there");
    let judged = |cells: Vec<Cell>| {
        let run = run_of(cells);
        let (rows, found) = (run.rows(&profile), run.overhead(&profile));
        (overhead::goal(&found, &rows), found, rows.len())
    };
    // The first period of each is its warm-up.
    let (goal, found, rows) =
        judged(vec![with("vprobe", [0, 900, 900]), with("vprobe:period-1", [900, 1, 3])]);
    let goal = goal.expect("a goal");
    assert_eq!(
        (goal.goal.as_str(), goal.found.as_str(), goal.met, rows),
        (
            "chase under vprobe: with periods of 1 s vnumad takes at most 0.02 % of the VMs' cycles",
            "0.0177 %",
            true,
            1
        )
    );
    assert_eq!((found[0].warm_up_periods, found[0].measured_periods, found[0].threads["core"]), (1, 2, 2));
    let expected = [1.0 / 12_000.0, 3.0 / 12_000.0].map(|own| own + 1e-5);
    assert!(found[0].shares.iter().zip(expected).all(|(share, expected)| (share - expected).abs() < 1e-12));
    assert!((found[0].programs_share - 1e-5).abs() < 1e-12);
    assert!((found[0].programs_time_share - 5e-6).abs() < 1e-12);
    assert_eq!(found[0].program_runs, 20);
    let mut untimed = with("vprobe:period-1", [900, 1, 3]);
    untimed.periods[1].programs_ns = None;
    assert!(judged(vec![untimed]).0.is_some_and(|goal| !goal.met), "it says nothing of the programs");
    let mut untimed = with("vprobe:period-1", [900, 1, 3]);
    untimed.periods[2].daemon_ns = None;
    assert!(
        judged(vec![untimed]).0.is_some_and(|goal| !goal.met),
        "it says nothing of what their time is worth"
    );
    assert!(judged(vec![with("vprobe:period-1", [0, 3, 3])]).0.is_some_and(|goal| !goal.met));
    let missing = judged(vec![with("vprobe", [0, 0, 0])]).0.expect("a goal");
    assert_eq!((missing.found.as_str(), missing.met), ("it was not measured", false));
    assert_eq!(judged(vec![with("linux", [0, 0, 0])]).0, None);
}

#[test]
fn one_run_is_priced_by_both_caches() {
    let mut local = period([1000, 0], 1000, 300_000_000, 0.0);
    for vcpu in local.vms.iter_mut().take(LOADED).flatten() {
        // Of 1000 references the second cache would miss 400.
        vcpu.values.user.second = Some(SecondLlc {
            llc_misses: 400,
            llc_misses_streamed: 0,
            dram_by_class: vec![300, 100],
            streamed_by_class: vec![0, 0],
        });
    }
    let run = run_of(vec![cell("linux", vec![local; 2])]);
    let first = profiles(&run.server.profile).expect("known");
    let second = profiles_of_second(&run.server.profile, run.server.second_llc.expect("one")).expect("known");
    let name = |profile: &CounterProfile| profile.name.clone();
    assert_eq!(first.iter().map(name).collect::<Vec<_>>(), ["broadwell-2s", "broadwell-2s-high"]);
    assert_eq!(second.iter().map(name).collect::<Vec<_>>(), ["vprobe-e5620"]);
    let row = &run.by_second().rows(&second[0])[0];
    // 4 + 0.6 hits of 42 cycles, 0.3 * 83.7 ns and 0.1 * 121.7 ns at 2.4 GHz.
    assert!((row.cycles_per_op - (4.0 + 25.2 + 60.264 + 29.208)).abs() < 0.01, "{row:?}");
    assert_eq!((row.remote_share, row.llc_misses), (Some(0.25), 400.0));
}

#[test]
fn a_figure_that_did_not_come_out_is_none_to_people() {
    let row = Row { cycles_per_op: 1.0, vm2_cycles_per_op: f64::NAN, cpu_share: f64::NAN, ..Row::default() };
    let observing =
        Observing { workload: "mix".into(), against: "linux", vnumad: 0.5, kernels: f64::NAN, programs: 0.0 };
    let text = table(std::slice::from_ref(&row)) + &observing.to_string();
    assert!(text.contains("vnumad 50.0000 %, kernels none more") && text.contains("none"), "{text}");
    let rows = [Row { policy: "vprobe".into(), memory_intensive: true, ..row }];
    let goals: String = judge(&rows).iter().map(|goal| goal.found.as_str()).collect();
    assert!(!text.contains("NaN") && !goals.contains("NaN"), "{text}{goals}");
}
