use super::*;
use crate::{
    committed::{Spot, WORKLOADS},
    raw::{Baseline, Ready, Spun, Vcpu, Window},
};
use vnuma_lab_pricing::{Counts, by_name};

fn counts(instructions: u64, near: u64, far: u64) -> Counts {
    Counts {
        instructions,
        base_cycles: instructions,
        mmio_writes_by_class: vec![near, far],
        mmio_reads_by_class: vec![0, 0],
        dram_by_class: vec![30, 10],
        streamed_by_class: vec![0, 0],
        ..Counts::default()
    }
}

/// Operations of which each is 1000 instructions and a write to a register, on vCPU 1; vCPU 0 is busy with something else.
fn cell(configuration: Configuration, workload: &str, spot: Spot, cycles: [u64; 3], far: bool) -> Cell {
    let window = |instructions: u64| {
        let (near, far) = if far { (0, 100) } else { (100, 0) };
        let vcpu = |counts| Vcpu { counts, program_cycles: 100, ran_ns: 800, server_ticks: 0 };
        Window {
            elapsed_ns: 1000,
            operations: Some(100),
            vcpus: vec![vcpu(counts(1 << 40, 1, 0)), vcpu(counts(instructions, near, far))],
            spun: None,
        }
    };
    Cell {
        configuration,
        workload: workload.to_owned(),
        spot,
        guest: Ready { cpu: 1, node: 0, device_node: Some(-1) },
        why: vec!["started on CPU 1".to_owned()],
        windows: cycles.map(window).into(),
        baseline: None,
    }
}

fn profile() -> CounterProfile {
    by_name("broadwell-2s").unwrap()
}

fn rows_with(aware: u64, remote_far: bool) -> Vec<Row> {
    let mut cells = Vec::new();
    for workload in &WORKLOADS {
        for &configuration in CONFIGURATIONS {
            for &spot in configuration.spots() {
                let cost = if configuration == Configuration::NuioaAware { aware } else { 100_000 };
                let far = remote_far && configuration == Configuration::Remote;
                cells.push(cell(configuration, workload.name, spot, [cost; 3], far));
            }
        }
    }
    rows_of(&cells, &profile())
}

#[test]
fn a_row_is_the_median_of_the_windows_of_its_own_vcpu() {
    let cells = [cell(Configuration::Home, "testpmd-tx-1", Spot::Cpu(1), [100_000, 500_000, 120_000], false)];
    let rows = rows_of(&cells, &profile());
    assert_eq!(rows.len(), 1);
    let row = &rows[0];
    let dram = 30.0 * 75.8 * 2.2 + 10.0 * 133.4 * 2.2;
    // 1200 instructions, a write of 125 ns at 2.2 GHz, and 40 accesses to memory in a hundred operations.
    assert!((row.cycles_per_op - (1200.0 + 275.0 + dram / 100.0)).abs() < 0.5, "{row:?}");
    assert_eq!((row.remote_dram_share, row.remote_mmio_share), (Some(0.25), Some(0.0)));
    assert_eq!((row.mmio_writes_per_op, row.mmio_reads_per_op, row.cpu_share), (1.0, 0.0, 0.8));
    assert_eq!(row.window_operations, 100);
    assert!(row.windows_low < 0.9 && row.windows_high > 3.0, "{row:?}");
}

#[test]
fn a_guest_that_may_start_it_anywhere_has_the_mean_and_none_with_half() {
    let near = cell(Configuration::Vnuma, "nvme-user", Spot::Node(1), [100_000; 3], false);
    let far = cell(Configuration::Vnuma, "nvme-user", Spot::Node(0), [100_000; 3], true);
    assert_eq!(rows_of(std::slice::from_ref(&near), &profile()), []);
    let rows = rows_of(&[near, far], &profile());
    assert_eq!(rows[0].remote_mmio_share, Some(0.5));
    let remote = 57.6 * 2.2;
    let home =
        rows_of(&[cell(Configuration::Home, "nvme-user", Spot::Cpu(1), [100_000; 3], false)], &profile());
    assert!((rows[0].cycles_per_op - home[0].cycles_per_op - remote / 2.0).abs() < 0.5);
}

/// A vCPU that computed: a spin takes 20 cycles, and a tick of the server 300.
fn baseline() -> Baseline {
    let counts = Counts { base_cycles: 1000 + 1500, ..Counts::default() };
    let vcpu = Vcpu { counts, program_cycles: 1000, ran_ns: 800, server_ticks: 5 };
    Baseline { vcpu, spun: Spun { spins: 50, ticks: 5 } }
}

fn by_kernel(configuration: Configuration, instructions: [u64; 3], far: bool) -> Cell {
    let mut cell = cell(configuration, "fio-randread", configuration.spots()[0], instructions, far);
    cell.baseline = Some(baseline());
    cell.windows.iter_mut().for_each(|window| window.spun = Some(Spun::default()));
    cell
}

#[test]
fn what_is_beside_a_workload_is_no_operation_s() {
    let mut cell = by_kernel(Configuration::Home, [100_000; 3], false);
    let of = |cell: &Cell| rows_of(std::slice::from_ref(cell), &profile())[0].cycles_per_op;
    let before = of(&cell);
    for window in &mut cell.windows {
        window.spun = Some(Spun { spins: 100, ticks: 0 });
        window.vcpus[1].server_ticks = 10;
    }
    // Of a hundred operations.
    assert!((before - of(&cell) - 50.0).abs() < 1e-6, "{before} {}", of(&cell));
    // A driver's statistics go by the clock.
    let before = of(&cell);
    cell.windows.iter_mut().for_each(|window| window.vcpus[1].counts.mmio_reads_by_class = vec![69, 0]);
    assert_eq!(of(&cell), before);
}

#[test]
fn a_workload_by_the_kernel_has_the_same_instructions_everywhere_and_its_own_waits() {
    let home = by_kernel(Configuration::Home, [100_000, 101_000, 102_000], false);
    let remote = by_kernel(Configuration::Remote, [104_000, 105_000, 106_000], true);
    let rows = rows_of(&[home, remote], &profile());
    let [home, remote] = &rows[..] else { panic!("{rows:?}") };
    // A write to a register that is far.
    assert!((remote.cycles_per_op - home.cycles_per_op - 57.6 * 2.2).abs() < 0.5, "{rows:?}");
    assert_eq!((home.instructions_per_op, remote.instructions_per_op), (1010.0, 1050.0));
    // 10 of 1010, by the root of 3.
    assert!((home.instructions_error - 0.00572).abs() < 1e-5, "{home:?}");
    assert_eq!((home.windows_low, home.windows_high), (1.0, 1.0), "only waits are its own");
}

#[test]
fn more_instructions_than_their_error_are_no_good_either() {
    let rows = |instructions: [u64; 3]| {
        let mut rows = rows_with(100_000, true);
        rows.retain(|row| row.workload != "fio-randread");
        let cells = [
            by_kernel(Configuration::Home, [100_000, 101_000, 102_000], false),
            by_kernel(Configuration::NuioaAware, instructions, false),
        ];
        rows.extend(rows_of(&cells, &profile()));
        judge(&rows, WORKLOADS.len())
    };
    assert!(rows([103_000, 105_000, 107_000])[1].met, "4 % more, and an error of 1.2 %");
    let goal = &rows([105_000, 106_000, 107_000])[1];
    assert!(!goal.met && goal.found.starts_with("fio-randread +4.95 % instructions"), "{goal:?}");
}

#[test]
fn nothing_is_claimed_by_a_benchmark_that_shows_nothing() {
    let goals = judge(&rows_with(100_000, false), WORKLOADS.len());
    assert_eq!(goals.iter().map(|goal| goal.met).collect::<Vec<_>>(), [false, false]);
    assert!(goals[1].found.starts_with("nothing is claimed"), "{goals:?}");
    // A write that takes 57.6 ns more is 9.6 % of 1275 cycles and some.
    let goals = judge(&rows_with(100_000, true), WORKLOADS.len());
    assert_eq!(goals.iter().map(|goal| goal.met).collect::<Vec<_>>(), [true, true], "{goals:?}");
}

#[test]
fn aware_has_to_be_near_home_and_nearer_without_io() {
    // 40 cycles more of 1348.
    let goals = judge(&rows_with(104_100, true), WORKLOADS.len());
    assert!(!goals[1].met && goals[1].found.contains("testpmd-tx-1 +"), "{goals:?}");
    // 1.5 % more is fine for I/O, and too much without.
    let goals = judge(&rows_with(102_000, true), WORKLOADS.len());
    assert!(!goals[1].met && goals[1].found.starts_with("sysbench +"), "{goals:?}");
    // A workload that is missing is no workload that is good.
    let mut rows = rows_with(100_000, true);
    rows.retain(|row| row.workload != "sysbench");
    let goals = judge(&rows, WORKLOADS.len());
    let expected = format!("{} of {}", WORKLOADS.len() - 1, WORKLOADS.len());
    assert!(goals[0].met && !goals[1].met && goals[1].found.starts_with(&expected), "{goals:?}");
}

#[test]
fn a_workload_that_ran_elsewhere_is_not_near_home() {
    let mut cell = cell(Configuration::NuioaAware, "testpmd-tx-1", Spot::Device, [50_000; 3], false);
    cell.windows[1].vcpus[0].counts.mmio_writes_by_class = vec![0, 100];
    cell.why =
        vec!["PID 7: released: node 1 has other CPUs now".to_owned(), "interrupt 30: CPUs 1".to_owned()];
    let mut rows = rows_with(100_000, true);
    rows.retain(|row| (row.configuration, row.workload.as_str()) != (cell.configuration, "testpmd-tx-1"));
    rows.extend(rows_of(&[cell], &profile()));
    let goal = &judge(&rows, WORKLOADS.len())[1];
    assert!(!goal.met && goal.found == "testpmd-tx-1 ran elsewhere", "{goal:?}");
    // All that was said of it.
    let text = table(&rows);
    assert!(text.contains("elsewhere") && text.contains("interrupt 30: CPUs 1\n"), "{text}");
}

#[test]
fn the_table_has_each_row() {
    let text = table(&rows_with(100_000, true));
    // With a reason for each that vnuma-guest has placed.
    assert_eq!(text.lines().count(), 1 + WORKLOADS.len() * (CONFIGURATIONS.len() + 1));
    assert!(text.contains("nuioa-aware") && text.contains("100.0 %"), "{text}");
}

#[test]
fn a_row_says_why_its_workload_was_placed_where_it_was() {
    let with = |configuration| {
        let mut cell = cell(configuration, "testpmd-tx-1", Spot::Device, [50_000; 3], false);
        cell.why = ["PID 7: placed on node 1", "interrupt 30: CPUs 1"].map(str::to_owned).into();
        table(&rows_of(&[cell], &profile()))
    };
    let text = with(Configuration::NuioaAware);
    assert!(text.contains("PID 7: placed on node 1\n") && !text.contains("interrupt 30"), "{text}");
    assert!(!with(Configuration::Home).contains("PID 7"), "where home puts it is known");
}
