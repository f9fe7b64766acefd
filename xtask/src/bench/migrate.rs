//! How long it takes from the arrival of a VM that migrates until its guest is told where its vCPUs are: on a lab server that stands
//! for two hosts.

use super::{Options, check_goals, commit, on_server::run_on, write_report};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::PathBuf, time::Duration};
use vnuma_lab_runner::{Input, Lab, build_release_binaries, driver, end_on_signals};

const SERVER: &str = "2n4c";
const KERNEL: &str = "6.12";
/// Only ends a hang.
const HANG: Duration = Duration::from_secs(3600);
/// How often a VM migrates in each way: the reduced form, and the full one.
const ROUNDS: [usize; 2] = [5, 20];
/// Seconds within which a guest is to be told.
const GOAL_S: f64 = 2.0;
const BACKENDS: [&str; 2] = ["qmp", "libvirt"];

/// Runs it and writes the report.
pub fn run(options: &Options) -> Result<()> {
    ensure!(!options.json, "this benchmark has no --json; its report is a file");
    end_on_signals().context("signal handlers")?;
    let files = files()?;
    let rounds = ROUNDS[usize::from(options.full)];
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for backend in BACKENDS {
        let before = load_average();
        let (lines, outcome) = measure(backend, rounds, &files)?;
        let load = [before, load_average()];
        rows.extend(rows_of(backend, &lines, load));
        // What was measured before it failed counts.
        if let Err(error) = outcome {
            eprintln!("{backend}: {error:#}");
            failed.push(format!("{backend}: {error:#}"));
        }
    }
    let goals: Vec<_> = rows.iter().map(goal).collect();
    let report = json!({
        "source": "measured in the lab, whose CPUs are emulated: upper bounds",
        "commit": commit(),
        "form": if options.full { "full" } else { "reduced" },
        "server": SERVER,
        "guest_kernel": KERNEL,
        "rounds": rounds,
        "rows": rows,
        "goals": goals,
        "failed": failed,
    });
    print!("{}", table(&report));
    write_report("migrate", &report)?;
    ensure!(failed.is_empty(), "not all was measured: {}", failed.join("; "));
    check_goals(&report)
}

/// What the server needs: here, there.
fn files() -> Result<Vec<(PathBuf, String)>> {
    let programs = [("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-lab-tests", "lab-scenario")];
    let built = build_release_binaries(&programs)?;
    let there = programs.iter().map(|(_, name)| format!("/usr/local/bin/{name}"));
    let mut files: Vec<_> = built.into_iter().zip(there).collect();
    files.push((driver::build(KERNEL)?, format!("/root/vnuma-{KERNEL}.ko")));
    files.push((driver::tools(KERNEL)?.join("vnuma-check"), "/root/vnuma-check".to_owned()));
    Ok(files)
}

/// The migrations of a backend, and what ended them too early.
fn measure(backend: &str, rounds: usize, files: &[(PathBuf, String)]) -> Result<(Vec<Value>, Result<()>)> {
    let lab = Lab::boot(SERVER)?;
    for (here, there) in files {
        lab.put(here, there, HANG)?;
    }
    let mut argv = vec!["lab-scenario".to_owned(), "migrate-times".to_owned()];
    argv.extend(["--rounds".to_owned(), rounds.to_string()]);
    argv.extend((backend == "libvirt").then(|| "--libvirt".to_owned()));
    let mut output = Vec::new();
    let outcome = run_on(&lab, argv, Input::Null, &mut output, HANG);
    Ok((parse(&String::from_utf8_lossy(&output)), outcome))
}

/// Lines that are JSON; scenarios print others, too.
fn parse(text: &str) -> Vec<Value> {
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["told_ms"].is_number()).collect()
}

/// One for each way of migrating.
fn rows_of(backend: &str, lines: &[Value], load: [f64; 2]) -> Vec<Value> {
    let mut modes: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for line in lines {
        let (mode, told) = (line["mode"].as_str(), line["told_ms"].as_f64());
        if let Some((mode, told)) = mode.zip(told) {
            modes.entry(mode).or_default().push(told / 1e3);
        }
    }
    let row = |(mode, mut told): (&str, Vec<f64>)| {
        told.sort_by(f64::total_cmp);
        let rounded = |at: usize| (told[at] * 1e3).round() / 1e3;
        json!({
            "backend": backend,
            "mode": mode,
            "migrations": told.len(),
            "told_s_min": rounded(0),
            "told_s_median": rounded((told.len() - 1) / 2),
            "told_s_max": rounded(told.len() - 1),
            "load_average": load,
        })
    };
    modes.into_iter().map(row).collect()
}

fn goal(row: &Value) -> Value {
    let name = format!("{}, {}: told_s_max", row["backend"], row["mode"]).replace('"', "");
    let met = row["told_s_max"].as_f64().is_some_and(|told| told <= GOAL_S);
    json!({"name": name, "value": row["told_s_max"], "at_most": GOAL_S, "met": met})
}

/// Of the last minute, of this machine.
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(f64::NAN)
}

fn table(report: &Value) -> String {
    const COLUMNS: [&str; 6] = ["backend", "mode", "migrations", "told_s_min", "told_s_median", "told_s_max"];
    let line = |cells: [String; 6]| cells.map(|cell| format!("{cell:>14}")).concat() + "\n";
    let mut text = line(COLUMNS.map(str::to_owned));
    for row in report["rows"].as_array().into_iter().flatten() {
        text += &line(COLUMNS.map(|name| row[name].to_string().replace('"', "")));
    }
    for goal in report["goals"].as_array().into_iter().flatten() {
        let met = if goal["met"] == true { "met" } else { "MISSED" };
        let name = goal["name"].as_str().unwrap_or_default();
        text += &format!("{met:<7} {name}: {}, at most {}\n", goal["value"], goal["at_most"]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_goals_are_those_of_what_was_measured() {
        let output = "the VM is told\n\
            {\"backend\":\"qmp\",\"mode\":\"precopy\",\"told_ms\":900.4}\n\
            {\"backend\":\"qmp\",\"mode\":\"plugged\",\"told_ms\":2100.0}\n\
            {\"backend\":\"qmp\",\"mode\":\"precopy\",\"told_ms\":700.0}\n\
            {\"backend\":\"qmp\",\"mode\":\"precopy\",\"told_ms\":1500.0}\n";
        let rows = rows_of("qmp", &parse(output), [1.0, 2.0]);
        assert_eq!(rows.len(), 2, "{rows:?}");
        let precopy = &rows[1];
        assert_eq!((precopy["mode"].as_str(), precopy["migrations"].as_u64()), (Some("precopy"), Some(3)));
        let figures = ["told_s_min", "told_s_median", "told_s_max"].map(|name| precopy[name].as_f64());
        assert_eq!(figures, [0.7, 0.9, 1.5].map(Some));
        let goals: Vec<_> = rows.iter().map(goal).collect();
        assert_eq!((goals[0]["met"].as_bool(), goals[1]["met"].as_bool()), (Some(false), Some(true)));
        let table = table(&json!({"rows": rows, "goals": goals}));
        assert!(table.contains("MISSED  qmp, plugged: told_s_max: 2.1, at most 2.0"), "{table}");
    }
}
