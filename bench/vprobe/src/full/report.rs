//! From stored cells to medians, tables and goals.

use crate::{
    committed::{HALF, Layout, VCPUS},
    full::{
        committed::{self, Part, SETUPS, Table},
        plan::Id,
        store::Measured,
    },
    judge::{ByLinux, Row, judge, programs_share, score, table},
    raw::Period,
};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};
use vnuma_bench_common::{
    configuration::Configuration,
    goals::Goal,
    judging::profiles,
    report::{Form, Results},
    stats::{self, Samples},
};
use vnuma_lab_pricing::CounterProfile;

/// The median of a cell's repetitions, as a profile prices them.
#[derive(Clone, Debug, Serialize)]
pub struct Median {
    /// Which setup.
    pub setup: String,
    /// What of the policy differs from the other rows, such as `period-0.05`.
    pub variant: Option<String>,
    /// Costs of an operation when the warm-up counts as well.
    pub cycles_per_op_from_start: f64,
    /// Repetitions that there are.
    pub repetitions: usize,
    /// Of these, those that count.
    pub counted: usize,
    /// By VM: how often its vCPUs were on another node than at the end of the period before.
    pub node_changes: Vec<usize>,
    /// By VM: steps of vnumad's policy.
    pub vm_steps: Vec<u64>,
    /// By VM: steps in others that it was the reason for.
    pub because_of: BTreeMap<String, u64>,
    /// Modelled cycles of BPF programs in other threads than vnumad's, by those of all vCPUs; null where it was not taken. What
    /// vnumad itself takes is in `overhead_share`.
    pub programs_share: Option<f64>,
    /// The least of them.
    pub cycles_per_op_low: f64,
    /// And the most.
    pub cycles_per_op_high: f64,
    /// What measured the repetition in the middle.
    pub commit: String,
    /// That repetition.
    #[serde(flatten)]
    pub row: Row,
}

/// What is written.
#[derive(Serialize)]
struct Report<'a> {
    source: &'static str,
    form: &'static str,
    commit: &'a str,
    configuration: &'a Configuration,
    /// Cells of the selected parts, and those of them that are not measured yet.
    cells: usize,
    missing: usize,
    repetitions: u32,
    modelled_period_s: f64,
    /// What each boot of the server measured of time.
    dilations: Vec<Dilation>,
    goals: &'a [Goal],
    rows: &'a [Median],
}

/// How much slower the server was than the modelled machine, under a workload on a boot.
#[derive(Serialize, PartialEq)]
struct Dilation {
    setup: String,
    workload: String,
    boot: String,
    dilation: f64,
    period_s: f64,
    factor: f64,
}

/// A repetition as a profile prices it.
#[derive(Clone)]
struct Repetition {
    commit: String,
    row: Row,
    from_start: f64,
    node_changes: Vec<usize>,
    vm_steps: Vec<u64>,
    because_of: BTreeMap<String, u64>,
    programs_share: Option<f64>,
}

/// The repetition in the middle by its costs, by the nearest rank. Those that do not count are left out, unless half of them or more
/// do not.
fn median(setup: &str, all: Vec<Repetition>) -> Option<Median> {
    let repetitions = all.len();
    let (good, bad): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|repetition| repetition.row.does_not_count.is_none());
    let counted = good.len();
    let kept = if 2 * counted > repetitions { good } else { bad };
    let cost = |repetition: &Repetition| repetition.row.cycles_per_op;
    let [low, high] = kept.iter().map(cost).collect::<Samples>().interval()?;
    let mut middle = stats::middle(kept, cost)?;
    if let Some(why) = &mut middle.row.does_not_count {
        *why = format!("{why} ({} of {repetitions} repetitions do not count)", repetitions - counted);
    }
    Some(Median {
        setup: setup.to_owned(),
        variant: None,
        repetitions,
        counted,
        node_changes: middle.node_changes,
        vm_steps: middle.vm_steps,
        because_of: middle.because_of,
        programs_share: middle.programs_share,
        cycles_per_op_low: low,
        cycles_per_op_high: high,
        cycles_per_op_from_start: middle.from_start,
        commit: middle.commit,
        row: middle.row,
    })
}

fn priced(
    profile: &CounterProfile,
    cells: &BTreeMap<Id, Measured>,
    (id, measured): (&Id, &Measured),
) -> Repetition {
    let of = |policy: &str| cells.get(&Id { policy: policy.into(), ..id.clone() }).map(|found| &found.cell);
    let by_linux = ByLinux { balanced: of("linux"), unbalanced: of("linux-nobalance") };
    let workload = crate::committed::workload(&id.workload);
    let cell = &measured.cell;
    Repetition {
        commit: measured.commit.clone(),
        from_start: score(profile, &cell.periods, by_linux.balanced, workload, 0),
        row: cell.row(profile, by_linux),
        node_changes: node_changes(
            committed::setup(&id.setup).map_or(&HALF, |setup| setup.layout),
            &cell.periods,
        ),
        vm_steps: cell.vm_steps.clone(),
        because_of: cell.because_of.clone(),
        programs_share: programs_share(cell.measured()),
    }
}

/// By VM, from the placement that every cell starts from.
fn node_changes(layout: &Layout, periods: &[Period]) -> Vec<usize> {
    let node = |cpu: u32| layout.vm_cpus.iter().position(|cpus| cpus.contains(&cpu));
    let of = |(vm, start): (usize, &[usize; VCPUS])| {
        let changes = |vcpu: usize| {
            let at = periods.iter().filter_map(|period| node(period.vms.get(vm)?.get(vcpu)?.cpu));
            let nodes: Vec<usize> = std::iter::once(start[vcpu]).chain(at).collect();
            nodes.windows(2).filter(|pair| pair[0] != pair[1]).count()
        };
        (0..VCPUS).map(changes).sum()
    };
    layout.start.vcpus.iter().enumerate().map(of).collect()
}

/// Medians of all cells of a setup; of the placements of `oracle` the best.
fn medians(cells: &BTreeMap<Id, Measured>, order: &[Id], setup: &committed::Setup) -> Result<Vec<Median>> {
    let mut keys: Vec<(&str, &str)> = Vec::new();
    for id in order.iter().filter(|id| id.setup == setup.name) {
        let key = (id.workload.as_str(), id.policy.as_str());
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let mut found: Vec<Median> = Vec::new();
    for profile in profiles(setup.counters)? {
        for (workload, policy) in &keys {
            let same = |id: &Id| id.setup == setup.name && id.workload == *workload && id.policy == *policy;
            let of_all = cells.iter().filter(|(id, _)| same(id));
            let rows = of_all.map(|cell| priced(&profile, cells, cell)).collect();
            let Some(mut new) = median(setup.name, rows) else { continue };
            if new.row.policy != "oracle" {
                new.variant = new.row.placement.take();
            }
            let of = |known: &&mut Median| {
                let (a, b) = (&known.row, &new.row);
                a.policy == "oracle"
                    && (&a.profile, &a.workload, &a.policy) == (&b.profile, &b.workload, &b.policy)
            };
            match found.iter_mut().find(of) {
                Some(known) if new.row.cycles_per_op < known.row.cycles_per_op => *known = new,
                Some(_) => {}
                None => found.push(new),
            }
        }
    }
    Ok(found)
}

/// Rows of a setup that are compared with each other.
fn rows_of(medians: &[Median], setup: &str) -> Vec<Row> {
    let of = |median: &&Median| median.setup == setup && median.variant.is_none();
    medians.iter().filter(of).map(|median| median.row.clone()).collect()
}

/// All medians of the plan's cells, and goals of each setup.
fn conclude(cells: &BTreeMap<Id, Measured>, plan: &[Id]) -> Result<(Vec<Median>, Vec<Goal>)> {
    let (mut all, mut goals) = (Vec::new(), Vec::new());
    for setup in &SETUPS {
        let found = medians(cells, plan, setup)?;
        let rows = rows_of(&found, setup.name);
        // Small VMs are no comparison of policies.
        if setup.small == 0 && !rows.is_empty() {
            let of_setup = |goal: Goal| Goal { goal: format!("{}: {}", setup.name, goal.goal), ..goal };
            goals.extend(judge(&rows).into_iter().map(of_setup));
        }
        all.extend(found);
    }
    goals.extend(abuse_goal(&all));
    Ok((all, goals))
}

/// Cells of a setup come from one kernel and one numad: the configuration says so.
fn check_servers(cells: &BTreeMap<Id, Measured>) -> Result<()> {
    let mut first: BTreeMap<&str, (&Id, &Measured)> = BTreeMap::new();
    for (id, measured) in cells {
        let (of, one) = first.entry(&id.setup).or_insert((id, measured));
        let fields = [
            ("server.kernel", &one.server.kernel, &measured.server.kernel),
            ("server.numad", &one.server.numad, &measured.server.numad),
        ];
        for (field, one, other) in fields {
            ensure!(one == other, "{field}: {one:?} in the cell {of}, and {other:?} in {id}");
        }
    }
    Ok(())
}

/// Writes report and picture and prints tables. Goals are judged when no cell is missing.
pub fn write(
    directory: &Path,
    commit: &str,
    configuration: &Configuration,
    parts: &[&Part],
    plan: &[Id],
    cells: &BTreeMap<Id, Measured>,
) -> Result<()> {
    check_servers(cells)?;
    let missing = plan.iter().filter(|id| !cells.contains_key(id)).count();
    let (medians, goals) = conclude(cells, plan)?;
    ensure!(!medians.is_empty(), "no cell is measured yet");
    let mut dilations: Vec<Dilation> = Vec::new();
    for (id, Measured { boot, workload, .. }) in cells {
        let new = Dilation {
            setup: id.setup.clone(),
            workload: id.workload.clone(),
            boot: boot.clone(),
            dilation: workload.dilation,
            period_s: workload.period_s,
            factor: workload.factor,
        };
        if !dilations.contains(&new) {
            dilations.push(new);
        }
    }
    let report = Report {
        source: "modelled: the lab's counters, priced under the profile of each row",
        form: "full",
        commit,
        configuration,
        cells: plan.len(),
        missing,
        repetitions: committed::REPETITIONS,
        modelled_period_s: crate::committed::PERIOD_S,
        dilations,
        goals: if missing == 0 { &goals } else { &[] },
        rows: &medians,
    };
    let first = &medians[0].setup;
    let picture = directory.join("report.svg");
    crate::picture::draw(&rows_of(&medians, first), &picture)?;
    let shown = |part: &&Part| format!("{}: {}\n{}\n", part.name, part.about, part_table(part, &medians));
    let mut table: String = parts.iter().map(shown).collect();
    table += &format!("picture of {first}: {}\n", picture.display());
    if missing > 0 {
        table += &format!("{missing} of {} cells are missing, so no goal is judged\n", plan.len());
    }
    let form = Form { full: true, smoke: false };
    Results { directory: directory.into(), form, json: false }.end(&report, &table, report.goals)
}

/// The table of a part, for each of its setups.
fn part_table(part: &Part, medians: &[Median]) -> String {
    let setups: BTreeSet<&str> = part.blocks.iter().map(|block| block.setup).collect();
    let mut text = String::new();
    for setup in SETUPS.iter().filter(|setup| setups.contains(setup.name)) {
        let of_setup: Vec<&Median> = medians.iter().filter(|median| median.setup == setup.name).collect();
        if of_setup.is_empty() {
            continue;
        }
        text += &format!("{} ({}, counters {})\n", setup.name, setup.server, setup.counters);
        text += &match part.table {
            Table::Rows => table(&rows_of(medians, setup.name)),
            Table::RemoteShares => by_policy(part, setup, &of_setup, |row, _| percent(row.remote_share, 1)),
            Table::Costs => by_policy(part, setup, &of_setup, by_credit),
            Table::Periods => periods(part, setup, &of_setup),
            Table::Overhead => overhead(setup, &of_setup),
            Table::Abuse => abuse(part, setup, &of_setup),
        };
    }
    text
}

/// A line for each workload and a column for each policy, under the server's own profile. `show` gets the row of `credit` too.
fn by_policy(
    part: &Part,
    setup: &committed::Setup,
    medians: &[&Median],
    show: impl Fn(&Row, Option<&Row>) -> String,
) -> String {
    let mut text = String::new();
    for block in part.blocks.iter().filter(|block| block.setup == setup.name) {
        text += &format!("{:<14}", "workload");
        block.policies.iter().for_each(|policy| text += &format!("{policy:>18}"));
        for workload in block.workloads {
            text += &format!("\n{workload:<14}");
            let of = |policy| find(medians, setup, workload, policy, None).map(|median| &median.row);
            for policy in block.policies {
                let shown = of(policy).map_or_else(|| "-".to_owned(), |row| show(row, of("credit")));
                text += &format!("{shown:>18}");
            }
        }
        text += "\n";
    }
    text
}

/// What an operation costs by what it costs under `credit`. A star: the row does not count.
fn by_credit(row: &Row, credit: Option<&Row>) -> String {
    let star = if row.does_not_count.is_some() { " *" } else { "" };
    let by = |credit: &Row| format!("{:.4}{star}", row.cycles_per_op / credit.cycles_per_op);
    credit.map_or_else(|| "-".to_owned(), by)
}

/// Costs by the period, beside those of `linux`.
fn periods(part: &Part, setup: &committed::Setup, medians: &[&Median]) -> String {
    let mut text = format!(
        "{:<12}{:>12}{:>14}{:>14}{:>14}{:>10}\n",
        "workload", "period s", "by linux", "from start", "overhead", "converge"
    );
    for workload in
        part.blocks.iter().filter(|block| block.setup == setup.name).flat_map(|block| block.workloads)
    {
        let Some(linux) = find(medians, setup, workload, "linux", None) else { continue };
        for period in committed::PERIODS_S {
            let variant = format!("period-{period}");
            let Some(found) = find(medians, setup, workload, "vprobe", Some(&variant)) else { continue };
            let by = found.row.cycles_per_op / linux.row.cycles_per_op;
            let from_start = found.cycles_per_op_from_start / linux.cycles_per_op_from_start;
            let why = found
                .row
                .does_not_count
                .as_ref()
                .map_or_else(String::new, |why| format!("  does not count: {why}"));
            text += &format!(
                "{workload:<12}{period:>12}{by:>14.4}{from_start:>14.4}{:>14}{:>10}{why}\n",
                percent(found.row.overhead_share, 4),
                found.row.converge_periods,
            );
        }
    }
    text
}

/// What the policy costs with these VMs, beside the paper.
fn overhead(setup: &committed::Setup, medians: &[&Median]) -> String {
    let found = find(medians, setup, "small", "vprobe", None);
    let share = found.and_then(|median| Some(median.row.overhead_share? + median.programs_share?));
    let programs = found.and_then(|median| median.programs_share);
    let paper = committed::TABLE_3.get(setup.small.wrapping_sub(1)).copied();
    let [share, programs, paper] = [share, programs, paper].map(|share| percent(share, 4));
    format!("{} VMs: {share}, of which BPF programs {programs} (the paper: {paper})\n", setup.small)
}

/// Moves that one VM may cause in others, in so many periods.
fn budget(periods: usize) -> u64 {
    let (at_once, rest) = committed::BUDGET;
    at_once + (periods / rest) as u64
}

/// What vm2 does to the others, beside the same without abuse.
fn abuse(part: &Part, setup: &committed::Setup, medians: &[&Median]) -> String {
    let mut text = format!(
        "{:<18}{:>12}{:>12}{:>14}{:>14}{:>12}{:>10}\n",
        "policy", "cycles/op", "abused", "node changes", "abused", "because", "budget"
    );
    for policy in
        part.blocks.iter().filter(|block| block.setup == setup.name).flat_map(|block| block.policies)
    {
        let of = |workload| find(medians, setup, workload, policy, None);
        let (Some(quiet), Some(abused)) = (of("chase"), of("abuse")) else { continue };
        let others = |median: &Median| {
            median
                .node_changes
                .iter()
                .enumerate()
                .filter(|(vm, _)| *vm != 1)
                .map(|(_, count)| count)
                .sum::<usize>()
        };
        let because = abused.because_of.get("vm2").copied().unwrap_or(0);
        let limit = budget(abused.row.warm_up_periods + abused.row.measured_periods);
        let (because, limit) = match policy.starts_with("vprobe") && !policy.ends_with("paper") {
            true => (because.to_string(), limit.to_string()),
            false => ("-".to_owned(), "-".to_owned()),
        };
        text += &format!(
            "{policy:<18}{:>12.3}{:>12.3}{:>14}{:>14}{because:>12}{limit:>10}\n",
            quiet.row.cycles_per_op,
            abused.row.cycles_per_op,
            others(quiet),
            others(abused)
        );
    }
    text
}

/// The goal of the abusive guest, once it is measured.
fn abuse_goal(medians: &[Median]) -> Option<Goal> {
    let found = medians.iter().find(|median| {
        (median.row.workload.as_str(), median.row.policy.as_str()) == ("abuse", "vprobe")
            && median.variant.is_none()
    })?;
    let because = found.because_of.get("vm2").copied().unwrap_or(0);
    let periods = found.row.warm_up_periods + found.row.measured_periods;
    Some(Goal {
        goal: format!(
            "abuse: vm2 is the reason for at most {} moves of others in {periods} periods",
            budget(periods)
        ),
        found: because.to_string(),
        met: because <= budget(periods),
    })
}

fn percent(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{:.digits$} %", value * 100.0))
}

/// Under the profile that the server counts with.
fn find<'a>(
    medians: &[&'a Median],
    setup: &committed::Setup,
    workload: &str,
    policy: &str,
    variant: Option<&str>,
) -> Option<&'a Median> {
    let same = |median: &&&Median| {
        let row = &median.row;
        row.profile == setup.counters
            && row.workload == workload
            && row.policy == policy
            && median.variant.as_deref() == variant
    };
    medians.iter().find(same).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::full::{
        plan::plan,
        store::tests::{id, measured},
    };

    fn repetition((cycles_per_op, why): &(f64, Option<&str>)) -> Repetition {
        let row =
            Row { cycles_per_op: *cycles_per_op, does_not_count: why.map(str::to_owned), ..Row::default() };
        Repetition {
            commit: "abc".to_owned(),
            row,
            from_start: 2.0 * cycles_per_op,
            node_changes: Vec::new(),
            vm_steps: Vec::new(),
            because_of: BTreeMap::new(),
            programs_share: None,
        }
    }

    fn middle(rows: &[(f64, Option<&str>)]) -> (f64, usize, f64, f64, Option<String>) {
        let found = median("half", rows.iter().map(repetition).collect()).expect("rows");
        assert_eq!(found.cycles_per_op_from_start, 2.0 * found.row.cycles_per_op);
        let Median { counted, cycles_per_op_low: low, cycles_per_op_high: high, row, .. } = found;
        (row.cycles_per_op, counted, low, high, row.does_not_count)
    }

    #[test]
    fn the_median_is_a_repetition_that_counts() {
        assert_eq!(middle(&[(3.0, None), (1.0, None), (2.0, None)]), (2.0, 3, 1.0, 3.0, None));
        assert_eq!(middle(&[(3.0, None), (1.0, Some("idle")), (2.0, None)]), (2.0, 2, 2.0, 3.0, None));
        assert_eq!(middle(&[(5.0, None)]), (5.0, 1, 5.0, 5.0, None));
        let why = Some("idle (2 of 3 repetitions do not count)".to_owned());
        assert_eq!(middle(&[(1.0, None), (9.0, Some("idle")), (8.0, Some("idle"))]), (8.0, 1, 8.0, 9.0, why));
        assert!(median("half", Vec::new()).is_none());
    }

    fn cells(list: &[(&str, u32, [u64; 2])]) -> BTreeMap<Id, Measured> {
        let cell = |(policy, repetition, accesses): &(&str, u32, [u64; 2])| {
            let id = id(policy, *repetition);
            (id.clone(), measured(&id, *accesses))
        };
        list.iter().map(cell).collect()
    }

    #[test]
    fn stored_cells_become_medians_of_what_a_profile_prices() {
        let cells = cells(&[
            ("linux", 0, [0, 10]),
            ("linux", 1, [0, 10]),
            ("linux", 2, [10, 0]),
            ("vprobe", 0, [10, 0]),
            ("oracle:at-home", 0, [9, 0]),
            ("oracle:by-vm", 0, [8, 0]),
        ]);
        let plan = plan(cells.keys().cloned());
        let (medians, goals) = conclude(&cells, &plan).expect("priced");
        let broadwell: Vec<&Median> =
            medians.iter().filter(|median| median.row.profile == "broadwell-2s").collect();
        let shown: Vec<(&str, usize, Option<&str>)> = broadwell
            .iter()
            .map(|median| (median.row.policy.as_str(), median.repetitions, median.row.placement.as_deref()))
            .collect();
        let oracle = ("oracle", 1, Some("by-vm"));
        assert_eq!(
            shown,
            [("linux", 3, None), ("oracle", 1, Some("by-vm")), ("vprobe", 1, None)],
            "{oracle:?}"
        );
        // 4 + 10 * 133.4 ns at 2.2 GHz, and 10 * 75.8 ns.
        let cost = |at: usize| broadwell[at].row.cycles_per_op;
        assert!((cost(0) - 2938.8).abs() < 0.1 && (cost(2) - 1671.6).abs() < 0.1, "{} {}", cost(0), cost(2));
        assert!(goals.iter().any(|goal| goal.goal.starts_with("half: chase under broadwell-2s: at most")));
        assert!(broadwell.iter().all(|median| median.row.does_not_count.is_none()), "{broadwell:?}");
    }

    #[test]
    fn tables_of_figures_show_shares_and_periods() {
        let cells = cells(&[
            ("linux", 0, [2, 8]),
            ("linux-nobalance", 0, [1, 9]),
            ("vprobe:period-0.01", 0, [10, 0]),
            ("vprobe:period-0.25", 0, [5, 5]),
        ]);
        let (medians, goals) = conclude(&cells, &plan(cells.keys().cloned())).expect("priced");
        let text = part_table(committed::part("figure-1").expect("a part"), &medians);
        let line = text.lines().find(|line| line.starts_with("chase")).expect("a line");
        assert_eq!(line.split_whitespace().collect::<Vec<_>>(), ["chase", "80.0", "%", "90.0", "%", "-"]);
        let text = part_table(committed::part("figure-8").expect("a part"), &medians);
        let of = |period: &str| {
            let line = text.lines().find(|line| line.split_whitespace().nth(1) == Some(period));
            line.expect("a line").split_whitespace().nth(2).and_then(|by| by.parse::<f64>().ok())
        };
        let (short, long) = (of("0.01").expect("a number"), of("0.25").expect("a number"));
        assert!(short < long && long < 1.0, "{text}");
        // A variant is neither judged nor a row of the policies.
        assert!(goals.iter().any(|goal| goal.found == "it is missing"), "{goals:?}");
        assert!(!part_table(committed::part("policies").expect("a part"), &medians).contains("vprobe "));
    }

    #[test]
    fn costs_are_shown_by_those_of_credit() {
        let mut cells = BTreeMap::new();
        for (policy, accesses) in [("linux", [0, 10]), ("credit", [0, 10]), ("vprobe", [10, 0])] {
            let id = Id { workload: "redis-4000".into(), ..id(policy, 0) };
            let mut cell = measured(&id, accesses);
            // It has less of the CPU than under linux.
            if policy == "vprobe" {
                let vcpus = cell.cell.periods.iter_mut().flat_map(|period| &mut period.vms).flatten();
                vcpus.for_each(|vcpu| vcpu.values.ran_ns /= 2);
            }
            cells.insert(id, cell);
        }
        let (medians, _) = conclude(&cells, &plan(cells.keys().cloned())).expect("priced");
        let text = part_table(committed::part("figure-7").expect("a part"), &medians);
        let line = text.lines().find(|line| line.starts_with("redis-4000")).expect("a line");
        let shown: Vec<&str> = line.split_whitespace().collect();
        // 1671.6 by 2938.8 cycles.
        assert_eq!(shown, ["redis-4000", "1.0000", "1.0000", "-", "-", "-", "-", "0.5688", "*"], "{text}");
        let other = text.lines().find(|line| line.starts_with("redis-2000")).expect("a line");
        assert!(other.split_whitespace().skip(1).all(|shown| shown == "-"), "{other}");
    }

    #[test]
    fn what_an_abusive_guest_does_to_others_is_shown_and_judged() {
        let mut cells = cells(&[("linux", 0, [0, 10]), ("vprobe", 0, [10, 0])]);
        for policy in ["linux", "vprobe"] {
            let id = Id { workload: "abuse".into(), ..id(policy, 0) };
            let mut abused = measured(&id, [10, 0]);
            // vCPU 0 of vm1 starts on node 1; then it is on nodes 0, 1 and 0.
            [1, 4, 1]
                .into_iter()
                .zip(&mut abused.cell.periods)
                .for_each(|(cpu, period)| period.vms[0][0].cpu = cpu);
            abused.cell.because_of = BTreeMap::from([("vm2".to_owned(), 5), ("vm1".to_owned(), 9)]);
            cells.insert(id, abused);
        }
        let (medians, goals) = conclude(&cells, &plan(cells.keys().cloned())).expect("priced");
        let text = part_table(committed::part("abuse").expect("a part"), &medians);
        let line = |policy: &str| {
            let line = text.lines().find(|line| line.starts_with(&format!("{policy} "))).expect("a line");
            line.split_whitespace().skip(3).map(str::to_owned).collect::<Vec<_>>()
        };
        // All vCPUs of the others are on node 0 otherwise: three of vm1 and one of vm3 started elsewhere.
        assert_eq!(line("vprobe"), ["4", "6", "5", "4"], "{text}");
        assert_eq!(line("linux"), ["4", "6", "-", "-"], "{text}");
        let goal = goals.iter().find(|goal| goal.goal.starts_with("abuse: vm2")).expect("a goal");
        assert_eq!((goal.goal.ends_with("at most 4 moves of others in 10 periods"), goal.met), (true, false));
        assert_eq!([budget(10), budget(15), budget(31)], [4, 5, 6]);
    }

    #[test]
    fn small_vms_show_what_the_policy_costs_and_are_not_judged() {
        let mut cells = BTreeMap::new();
        for policy in ["linux", "vprobe"] {
            let id = Id { setup: "small-1".into(), workload: "small".into(), ..id(policy, 0) };
            let mut one = measured(&id, [1, 0]);
            let daemon = BTreeMap::from([("sampler".to_owned(), 2)]);
            // Its two cycles took 10 us, and its programs 5 us: these are one cycle of the vCPU's thousand.
            for period in &mut one.cell.periods {
                (period.daemon, period.daemon_ns) = (Some(daemon.clone()), Some(10_000));
                period.programs_ns = Some(5000);
            }
            cells.insert(id, one);
        }
        let shown = |cells: &BTreeMap<Id, Measured>| {
            let (medians, goals) = conclude(cells, &plan(cells.keys().cloned())).expect("priced");
            (part_table(committed::part("table-3").expect("a part"), &medians), medians, goals)
        };
        let (text, medians, goals) = shown(&cells);
        let expected = "1 VMs: 0.3000 %, of which BPF programs 0.1000 % (the paper: 0.0085 %)";
        assert!(text.contains(expected), "{text}");
        assert_eq!((goals.len(), medians[0].row.does_not_count.as_deref()), (0, None));
        let all = cells.values_mut().flat_map(|one| &mut one.cell.periods);
        all.for_each(|period| period.programs_ns = None);
        let (text, ..) = shown(&cells);
        assert!(text.contains("1 VMs: -, of which BPF programs -"), "half of it is no figure: {text}");
    }

    #[test]
    fn cells_of_two_kernels_are_not_mixed() {
        let mut cells = cells(&[("linux", 0, [1, 0]), ("vprobe", 0, [1, 0])]);
        check_servers(&cells).expect("one kernel");
        cells.get_mut(&id("vprobe", 0)).expect("a cell").server.kernel = "7.4".into();
        let error = check_servers(&cells).expect_err("two kernels").to_string();
        assert!(error.contains("server.kernel: \"7.3\" in the cell half, chase, linux"), "{error}");
    }

    #[test]
    fn goals_wait_until_no_cell_is_missing() {
        let directory = tempfile::tempdir().expect("a folder");
        let configuration = Configuration { hash: "0".into(), inputs: BTreeMap::new() };
        let cells = cells(&[("linux", 0, [0, 10]), ("vprobe", 0, [0, 12])]);
        let parts: Vec<&Part> = committed::PARTS.iter().collect();
        let write = |plan: &[Id]| write(directory.path(), "abc", &configuration, &parts, plan, &cells);
        let all = plan(cells.keys().cloned());
        let error = write(&all).expect_err("vprobe is behind").to_string();
        assert!(error.contains("half: chase under broadwell-2s: at most 1 % behind any peer"), "{error}");
        let more = plan(all.iter().cloned().chain([id("linux", 1)]));
        write(&more).expect("not judged yet");
        let text = std::fs::read_to_string(directory.path().join("report.json")).expect("a report");
        let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&report["missing"], &report["cells"]), (&1.into(), &3.into()));
        assert_eq!(report["rows"][0]["setup"], "half");
        assert_eq!(report["goals"].as_array().map(Vec::len), Some(0));
    }
}
