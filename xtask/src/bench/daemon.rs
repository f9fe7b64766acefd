//! What vnumad costs with hundreds of VMs, and how fast it publishes, on this machine: bench/daemon measures.

use super::{FormAndJson, build, commit, with_scratch};
use anyhow::{Context, Result, bail};
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
pub fn run(FormAndJson { form, json }: &FormAndJson) -> Result<()> {
    let programs = build(form.smoke, &[("vnumad", "vnumad"), ("vnuma-bench-daemon", "bench-daemon")])?;
    let [vnumad, bench] = &programs[..] else { bail!("a program is missing") };
    let mut bench = Command::new(bench);
    bench.arg("run").arg("--vnumad").arg(vnumad).args(form.words()).stdout(Stdio::piped());
    let _scratch = with_scratch(&mut bench)?;
    let output = bench.spawn().and_then(std::process::Child::wait_with_output).context("bench-daemon")?;
    let report = serde_json::from_slice(&output.stdout);
    let mut report: Value = report.with_context(|| format!("bench-daemon: {}", output.status))?;
    report["commit"] = json!(commit());
    if *json {
        println!("{report}");
    } else {
        print!("{}", table(&report));
    }
    super::write_report(&form.folder("daemon"), &report)?;
    super::check_goals(&report)
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
            number => number.as_f64().map_or("-".to_owned(), |number| format!("{number:.digits$}")),
        };
        text += &line(COLUMNS.map(cell).into());
        if let Some(reason) = row["skipped"].as_str() {
            text += &format!("    skipped: {reason}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_row() {
        let report = json!({
            "rows": [
                {"backend": "libvirt", "locations": "bpf", "clients": "readers", "vms": 500, "vcpus": 8000, "moves_per_s": 1000, "publish_p99_ms": 1.25,
                 "cpu_us_per_move": 40.0, "rest_cpu_share": 0.02, "wakeups_per_s": 4.0, "rss_mb": 80.5},
                {"backend": "qmp", "locations": "poll", "vms": 1, "publish_p99_ms": null, "skipped": "no reason"},
            ],
        });
        let table = table(&report);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 4, "{table}");
        assert!(lines[1].split_whitespace().eq([
            "libvirt", "bpf", "readers", "500", "8000", "1000", "1.2", "40.0", "0.0200", "4.0", "80.5"
        ]));
        assert_eq!(lines[3], "    skipped: no reason");
    }
}
