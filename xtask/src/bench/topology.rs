//! How fast guests follow their topology, and what that costs: one run for each guest kernel, with its peer (hot-unplug and
//! re-plug of a vCPU, which needs no driver) in the same run.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vnuma_lab_runner::{Counters, Exec, Input, Lab, build_binaries, driver, end_on_signals};

const KERNELS: [&str; 3] = ["6.1", "6.12", "7.3"];
const SERVER: &str = "4n8c";
const COUNTERS: &str = "broadwell-2s";
const COUNTERS_SERVER: &str = "2n4c";
/// Only ends a hang.
const HANG: Duration = Duration::from_secs(1800);
const DEMO_REPORT: &str = "/root/demo.json";
/// Of the run that local_share comes from.
const DEMO: [&str; 2] = ["--seconds=60", "--period-ms=15000"];

/// Runs it and writes the report; limits that are not kept are said and make it fail. So does a part that fails, but
/// the report has the others all the same.
pub fn run() -> Result<()> {
    end_on_signals().context("signal handlers")?;
    let programs = Programs::build()?;
    let mut report = serde_json::Map::new();
    report
        .insert("source".into(), "measured in the lab, but for overhead_no_change, which is modelled".into());
    report.insert("server".into(), SERVER.into());
    let mut wrong = Vec::new();
    let mut done = |part: &str, outcome: Result<Value>| {
        outcome.inspect_err(|error| eprintln!("{part}: {error:#}")).unwrap_or_else(|error| {
            wrong.push(format!("{part} failed: {error}"));
            Value::Null
        })
    };
    for kernel in KERNELS {
        println!("guest kernel {kernel}");
        let figures = done(kernel, of_kernel(&programs, kernel));
        print_rows(&[kernel], std::slice::from_ref(&figures));
        report.insert(kernel.into(), figures);
    }
    for name in ["generation_read_ns", "sched_getcpu_ns"] {
        let cost = report["6.12"]["cost"][name].clone();
        report.insert(name.into(), cost);
    }
    println!("vnumad at rest");
    let daemon = done("vnumad at rest", of_daemon(&programs));
    report.insert("daemon_wakeups_per_s".into(), daemon["daemon_wakeups_per_s"].clone());
    report.insert("daemon".into(), daemon);
    println!("cost for a guest that nothing happens to, by the counters of {COUNTERS}");
    let overhead = done("overhead", of_overhead(&programs));
    report.insert("overhead_no_change".into(), overhead["overhead_no_change"].clone());
    report.insert("overhead".into(), overhead);
    let report = Value::Object(report);
    for kernel in KERNELS {
        wrong.extend(check_kernel(&report[kernel]).into_iter().map(|text| format!("{kernel}: {text}")));
    }
    wrong.extend(check_whole(&report));
    print_table(&report);
    super::write_report("topology", &report)?;
    ensure!(wrong.is_empty(), "limits that are not kept:\n  {}", wrong.join("\n  "));
    Ok(())
}

fn of_daemon(programs: &Programs) -> Result<Value> {
    json_of(&programs.boot(SERVER, None)?, "bench-topology daemon")
}

fn of_overhead(programs: &Programs) -> Result<Value> {
    let counters: Counters = COUNTERS.parse()?;
    let lab = programs.boot(COUNTERS_SERVER, Some(&counters))?;
    json_of(&lab, "bench-topology overhead --driver /root/vnuma-6.12.ko")
}

/// What is put on a server: here, there.
struct Programs(Vec<(PathBuf, String)>);

impl Programs {
    fn build() -> Result<Self> {
        let programs = [
            ("vnumad", "vnumad"),
            ("vnumactl", "vnumactl"),
            ("vnuma-demo", "vnuma-demo"),
            ("vnuma-bench-topology", "bench-topology"),
        ];
        let there = programs.iter().map(|(_, name)| format!("/usr/local/bin/{name}"));
        let mut files: Vec<_> = build_binaries(&programs)?.into_iter().zip(there).collect();
        for kernel in KERNELS {
            files.push((driver::build(kernel)?, format!("/root/vnuma-{kernel}.ko")));
        }
        files.push((driver::tools(KERNELS[0])?.join("vnuma-check"), "/root/vnuma-check".to_owned()));
        let load = build_binaries(&[("lab-count", "lab-load")])?.pop().context("lab-load")?;
        files.push((load, "/run/lab/bin/lab-load".to_owned()));
        Ok(Self(files))
    }

    fn boot(&self, profile: &str, counters: Option<&Counters>) -> Result<Lab> {
        let lab = Lab::boot_with(profile, counters)?;
        for (here, there) in &self.0 {
            lab.put(here, there, HANG)?;
        }
        Ok(lab)
    }
}

/// Runs a command on the server; its messages are shown, its last line is JSON.
fn json_of(lab: &Lab, command: &str) -> Result<Value> {
    let text = sh(lab, command)?;
    let line = text.trim_end().lines().last().with_context(|| format!("{command}: no output"))?;
    serde_json::from_str(line).with_context(|| format!("{command}: {line}"))
}

fn sh(lab: &Lab, script: &str) -> Result<String> {
    let exec = Exec {
        argv: ["sh", "-c", script].map(str::to_owned).into(),
        env: vec![("RUST_LOG".to_owned(), "error".to_owned())],
        ..Exec::default()
    };
    let mut stdout = Vec::new();
    let status = lab.exec(&exec, Input::Null, &mut stdout, &mut std::io::stderr(), HANG)?;
    let text = String::from_utf8_lossy(&stdout).into_owned();
    ensure!(status == 0, "{script}: status {status}: {text}");
    Ok(text)
}

/// All figures of one guest kernel, on one server.
fn of_kernel(programs: &Programs, kernel: &str) -> Result<Value> {
    let lab = programs.boot(SERVER, None)?;
    let driver = format!("/root/vnuma-{kernel}.ko");
    let mut figures = json_of(&lab, &format!("bench-topology moves --kernel {kernel} --driver {driver}"))?;
    let replug = json_of(&lab, &format!("bench-topology replug --kernel {kernel}"))?;
    figures["acpi_replug_latency_ms"] = replug["acpi_replug_latency_ms"].clone();
    let demo = DEMO.join(" ");
    sh(
        &lab,
        &format!("vnuma-demo host --kernel {kernel} --driver {driver} --report {DEMO_REPORT} {demo} >&2"),
    )?;
    let demo: Value = serde_json::from_str(&sh(&lab, &format!("cat {DEMO_REPORT}"))?).context(DEMO_REPORT)?;
    for name in ["local_share", "resident_local_share"] {
        figures[name] = demo["dynamic"][name].clone();
        figures[format!("{name}_static")] = demo["static"][name].clone();
    }
    figures["autonuma"] =
        json!({"dynamic": demo["dynamic"]["autonuma"], "static": demo["static"]["autonuma"]});
    figures["demo_configuration"] = demo["configuration"].clone();
    Ok(figures)
}

fn number(value: &Value, path: &str) -> f64 {
    // A figure that is missing keeps no limit.
    value.pointer(path).and_then(Value::as_f64).unwrap_or(f64::NAN)
}

/// Limits of a kernel's figures that are not kept.
fn check_kernel(figures: &Value) -> Vec<String> {
    let p50 = number(figures, "/update_latency_ms/p50");
    let replug = number(figures, "/acpi_replug_latency_ms/p50");
    let limits = [
        (p50 <= 20.0, format!("update_latency_ms.p50 is {p50:.1}, at most 20 are allowed")),
        (
            replug >= 20.0 * p50,
            format!("ACPI replug takes {replug:.0} ms, {:.1} times as long; 20 are needed", replug / p50),
        ),
        (number(figures, "/wrong_states") == 0.0, format!("wrong_states is {}", figures["wrong_states"])),
        (
            number(figures, "/local_share") >= 0.99,
            format!("local_share is {}, at least 0.99 is needed", figures["local_share"]),
        ),
    ];
    limits.into_iter().filter(|(kept, _)| !kept).map(|(_, text)| text).collect()
}

/// Limits of the other figures that are not kept.
fn check_whole(report: &Value) -> Vec<String> {
    let (read, getcpu) = (number(report, "/generation_read_ns"), number(report, "/sched_getcpu_ns"));
    let (wakeups, overhead) =
        (number(report, "/daemon_wakeups_per_s"), number(report, "/overhead_no_change"));
    let limits = [
        (
            read <= 2.0 * getcpu,
            format!("reading the generation takes {read:.1} ns, sched_getcpu {getcpu:.1}"),
        ),
        (wakeups <= 5.0, format!("daemon_wakeups_per_s is {wakeups:.1}, at most 5 are allowed")),
        (overhead.abs() <= 0.01, format!("overhead_no_change is {overhead:.4}, within 0.01 is allowed")),
    ];
    limits.into_iter().filter(|(kept, _)| !kept).map(|(_, text)| text).collect()
}

fn print_table(report: &Value) {
    print_rows(&KERNELS, &KERNELS.map(|kernel| report[kernel].clone()));
    for name in ["generation_read_ns", "sched_getcpu_ns", "daemon_wakeups_per_s", "overhead_no_change"] {
        println!("{name:<34}{:>12.4}", number(report, &format!("/{name}")));
    }
}

/// The figures of guest kernels, side by side.
fn print_rows(kernels: &[&str], figures: &[Value]) {
    let line = |name: &str, cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("{cell:>12}")).collect();
        println!("{name:<34}{cells}");
    };
    line("", kernels.iter().map(ToString::to_string).collect());
    for (name, path) in ROWS {
        line(name, figures.iter().map(|figures| format!("{:.3}", number(figures, path))).collect());
    }
}

const ROWS: [(&str, &str); 14] = [
    ("update idle, p50 ms", "/update_latency_ms/p50"),
    ("update idle, p99 ms", "/update_latency_ms/p99"),
    ("  move to published, p50 ms", "/update_latency_ms/phases_ms/moved_to_published/p50"),
    ("  published to interrupt, p50 ms", "/update_latency_ms/phases_ms/published_to_interrupt/p50"),
    ("  interrupt to kernel, p50 ms", "/update_latency_ms/phases_ms/interrupt_to_kernel/p50"),
    ("  kernel to program, p50 ms", "/update_latency_ms/phases_ms/kernel_to_program/p50"),
    ("update loaded, p50 ms", "/update_latency_ms_loaded/p50"),
    ("update loaded, p99 ms", "/update_latency_ms_loaded/p99"),
    ("ACPI replug, p50 ms", "/acpi_replug_latency_ms/p50"),
    ("wrong states", "/wrong_states"),
    ("fresh pages local", "/local_share"),
    ("  static", "/local_share_static"),
    ("long-lived pages local", "/resident_local_share"),
    ("  static", "/resident_local_share_static"),
];
