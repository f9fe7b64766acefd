//! What vnumad costs with hundreds of VMs, and how fast it publishes, on this machine: bench/daemon measures.

use super::Options;
use crate::steps::{run as run_command, workspace};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::process::{Command, Stdio};

/// Fields of a row in the order in which they are shown, and after how many digits they end.
const COLUMNS: [(&str, usize); 11] = [
    ("backend", 0),
    ("locations", 0),
    ("clients", 0),
    ("vms", 0),
    ("vcpus", 0),
    ("moves_per_s", 0),
    ("publish_p99_ms", 1),
    ("cpu_us_per_move", 1),
    ("rest_cpu_share", 4),
    ("wakeups_per_s", 1),
    ("rss_mb", 1),
];

/// Runs it and writes the report.
pub fn run(options: &Options) -> Result<()> {
    let mut build = Command::new("cargo");
    run_command(build.args([
        "build",
        "--release",
        "--package",
        "vnumad",
        "--package",
        "vnuma-bench-daemon",
    ]))?;
    let built = |name: &str| workspace().join("target/release").join(name);
    let mut bench = Command::new(built("bench-daemon"));
    bench.arg("run").arg("--vnumad").arg(built("vnumad")).stdout(Stdio::piped());
    if options.full {
        bench.arg("--full");
    }
    let output = bench.spawn().and_then(std::process::Child::wait_with_output).context("bench-daemon")?;
    let report = serde_json::from_slice(&output.stdout);
    let mut report: Value = report.with_context(|| format!("bench-daemon: {}", output.status))?;
    report["commit"] = json!(commit());
    if options.json {
        println!("{report}");
    } else {
        print!("{}", table(&report));
    }
    super::write_report("daemon", &report)?;
    super::check_goals(&report)
}

/// What was measured, as far as Git knows.
fn commit() -> Option<String> {
    let mut git = Command::new("git");
    let output =
        git.args(["describe", "--always", "--dirty", "--abbrev=12"]).current_dir(workspace()).output();
    let output = output.ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn table(report: &Value) -> String {
    let line = |cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("{cell:>16}")).collect();
        format!("{cells}\n")
    };
    let mut text = line(COLUMNS.map(|(name, _)| name.to_owned()).into());
    for row in report["rows"].as_array().into_iter().flatten() {
        let cell = |(name, digits): (&str, usize)| match &row[name] {
            Value::String(word) => word.clone(),
            Value::Null => "-".to_owned(),
            number => format!("{:.digits$}", number.as_f64().unwrap_or(f64::NAN)),
        };
        text += &line(COLUMNS.map(cell).into());
        if let Some(reason) = row["skipped"].as_str() {
            text += &format!("    skipped: {reason}\n");
        }
    }
    for goal in report["goals"].as_array().into_iter().flatten() {
        let met = if goal["met"] == true { "met" } else { "MISSED" };
        let name = goal["name"].as_str().unwrap_or_default();
        let value = goal["value"].as_f64().map_or("not measured".to_owned(), |value| value.to_string());
        text += &format!("{met:<7} {name}: {value}, at most {}\n", goal["at_most"]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_row_and_goal() {
        let report = json!({
            "rows": [
                {"backend": "libvirt", "locations": "bpf", "clients": "readers", "vms": 500, "vcpus": 8000, "moves_per_s": 1000, "publish_p99_ms": 1.25,
                 "cpu_us_per_move": 40.0, "rest_cpu_share": 0.02, "wakeups_per_s": 4.0, "rss_mb": 80.5},
                {"backend": "qmp", "locations": "poll", "vms": 1, "publish_p99_ms": null, "skipped": "no reason"},
            ],
            "goals": [{"name": "rss_mb", "value": 80.5, "at_most": 200.0, "met": true}],
        });
        let table = table(&report);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 5, "{table}");
        assert!(lines[1].split_whitespace().eq([
            "libvirt", "bpf", "readers", "500", "8000", "1000", "1.2", "40.0", "0.0200", "4.0", "80.5"
        ]));
        assert_eq!((lines[3], lines[4]), ("    skipped: no reason", "met     rss_mb: 80.5, at most 200.0"));
    }
}
