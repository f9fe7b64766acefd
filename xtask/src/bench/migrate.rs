//! How long it takes from the arrival of a VM that migrates until its guest is told where its vCPUs are: on a lab server that stands
//! for two hosts.

use super::{
    Common, build, commit, inputs, of_lab,
    peer::{boot, sh},
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::PathBuf};
use vnuma_bench_figures::{
    cells::Cells,
    goals::Limit,
    report::{Form, table},
    stats::{Samples, load_average, median},
};
use vnuma_lab_runner::{driver, end_on_signals};

const SERVER: &str = "2n4c";
const KERNEL: &str = "6.12";
/// A guest is told within so many times what an attach of the VM at rest takes (bench/README.md says why).
const GOAL: f64 = 3.0;
const BACKENDS: [&str; 2] = ["qmp", "libvirt"];
/// What people are shown of a row, and with how many digits.
const COLUMNS: &str =
    "backend mode migrations told_s_min:3 told_s_median:3 told_s_max:3 attach_s:3 told_by_attach:3";

/// Runs it and writes the report.
pub fn run(common: &Common) -> Result<()> {
    end_on_signals().context("signal handlers")?;
    let form = common.form;
    let files = files(form.smoke)?;
    let here: Vec<PathBuf> = files.iter().map(|(here, _)| here.clone()).collect();
    let run = common.run("migrate", &[inputs(&here), of_lab()?].concat())?;
    // How often a VM migrates in each way.
    let rounds = match form {
        Form { full: true, .. } => 20,
        Form { smoke: true, .. } => 1,
        _ => 5,
    };
    // Each backend has a server of its own, for which a short form has no time.
    let backends = if form.smoke { &BACKENDS[..1] } else { &BACKENDS };
    let (mut cells, mut rows) = (Cells::stored(&run.options)?, Vec::new());
    for backend in backends {
        let measured = cells.measure(backend, || {
            let before = load_average();
            let lines = measure(backend, rounds, &files)?;
            let shown = format!("{} lines", lines.len());
            Ok(((lines, [before, load_average()]), shown))
        })?;
        rows.extend(measured.iter().flat_map(|(lines, load)| rows_of(backend, lines, *load)));
    }
    let goals: Vec<_> = rows.iter().map(goal).collect();
    let report = json!({
        "source": "measured in the lab, whose CPUs are emulated: upper bounds",
        "commit": commit(),
        "measured_by": cells.measured_by,
        "form": form.name(),
        "server": SERVER,
        "guest_kernel": KERNEL,
        "rounds": rounds,
        "rows": rows,
        "goals": if form.smoke { &[] } else { &goals[..] },
        "failed": cells.failed,
    });
    let judged = run.results.end(&report, &table(COLUMNS, &rows), &goals);
    cells.end().and(judged)
}

/// What the server needs: here, there.
fn files(smoke: bool) -> Result<Vec<(PathBuf, String)>> {
    let programs = [("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-lab-tests", "lab-scenario")];
    let built = build(smoke, &programs)?;
    let there = programs.iter().map(|(_, name)| format!("/usr/local/bin/{name}"));
    let mut files: Vec<_> = built.into_iter().zip(there).collect();
    files.push((driver::build(KERNEL)?, format!("/root/vnuma-{KERNEL}.ko")));
    files.push((driver::tools(KERNEL)?.join("vnuma-check"), "/root/vnuma-check".to_owned()));
    Ok(files)
}

/// The migrations of a backend.
fn measure(backend: &str, rounds: usize, files: &[(PathBuf, String)]) -> Result<Vec<Value>> {
    let lab = boot(SERVER, None, files)?;
    let libvirt = if backend == "libvirt" { " --libvirt" } else { "" };
    let text = sh(&lab, &format!("lab-scenario migrate-times --rounds {rounds}{libvirt}"))?;
    let lines = parse(&text);
    ensure!(!lines.is_empty(), "no VM migrated");
    Ok(lines)
}

/// Lines that are JSON; scenarios print others, too.
fn parse(text: &str) -> Vec<Value> {
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["told_ms"].is_number() || line["attach_ms"].is_number()).collect()
}

/// One for each way of migrating.
fn rows_of(backend: &str, lines: &[Value], load: [f64; 2]) -> Vec<Value> {
    let seconds = |line: &Value, field: &str| line[field].as_f64().map(|ms| ms / 1e3);
    let attach_s = median(lines.iter().filter_map(|line| seconds(line, "attach_ms")));
    let mut modes: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for line in lines {
        if let Some((mode, told)) = line["mode"].as_str().zip(seconds(line, "told_ms")) {
            modes.entry(mode).or_default().push(told);
        }
    }
    let rounded = |seconds: Option<f64>| seconds.map(|seconds| (seconds * 1e3).round() / 1e3);
    let row = |(mode, told): (&str, Vec<f64>)| {
        let told: Samples = told.into_iter().collect();
        let (least, most) = told.interval().map(|[least, most]| (least, most)).unzip();
        json!({
            "backend": backend,
            "mode": mode,
            "migrations": told.count(),
            "told_s_min": rounded(least),
            "told_s_median": rounded(told.median()),
            "told_s_max": rounded(most),
            "attach_s": rounded(attach_s),
            "told_by_attach": rounded(most.zip(attach_s).map(|(told, attach)| told / attach)),
            "load_average": load,
        })
    };
    modes.into_iter().map(row).collect()
}

fn goal(row: &Value) -> Limit {
    let name = format!("{}, {}: told_s_max by attach_s", row["backend"], row["mode"]).replace('"', "");
    Limit::at_most(name, row["told_by_attach"].as_f64(), GOAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_goals_are_those_of_what_was_measured() {
        let output = "the VM is told\n\
            {\"backend\":\"qmp\",\"attach_ms\":650.0}\n\
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
        assert_eq!((goals[0].met, goals[1].met), (false, true));
        assert_eq!(goals[0].to_string(), "MISSED  qmp, plugged: told_s_max by attach_s: 3.231, at most 3");
        let without = rows_of("qmp", &parse(&output.replace("attach_ms", "other_ms")), [1.0, 2.0]);
        assert_eq!(goal(&without[0]).value, None, "without a yardstick nothing is judged");
        assert_eq!(table(COLUMNS, &rows).lines().count(), 3);
    }
}
