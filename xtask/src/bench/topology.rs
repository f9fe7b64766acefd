//! How fast guests follow their topology, and what that costs: one run for each guest kernel, with its peer (hot-unplug and
//! re-plug of a vCPU, which needs no driver) in the same run.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vnuma_bench_figures::goals;
use vnuma_lab_runner::{
    Counters, Exec, Input, Lab, build_binaries, build_release_binaries, driver, end_on_signals,
};

const KERNELS: [&str; 3] = ["6.1", "6.12", "7.3"];
const SERVER: &str = "4n8c";
const COUNTERS: &str = "broadwell-2s";
const COUNTERS_SERVER: &str = "2n4c";
/// Only ends a hang.
const HANG: Duration = Duration::from_secs(1800);
/// Publications a second to a VM, at most (docs/vnumad.md).
const CAP: f64 = 10.0;
const DEMO_REPORT: &str = "/root/demo.json";
/// Changes a minute of the runs that local_share comes from: XPV's highest (section 5.4.1), on each kernel.
const CHANGES: u64 = 20;
/// Others, on one kernel.
const OTHER_CHANGES: [u64; 3] = [5, 12, 60];
const OTHER_CHANGES_KERNEL: &str = "6.12";

/// Runs it and writes the report, which has the other parts all the same when one fails.
pub fn run(arguments: &super::Options) -> Result<()> {
    ensure!(!arguments.json, "this benchmark has no --json; its report is a file");
    end_on_signals().context("signal handlers")?;
    let programs = Programs::build()?;
    let mut report = serde_json::Map::new();
    report
        .insert("source".into(), "measured in the lab, but for overhead_no_change, which is modelled".into());
    report.insert("server".into(), SERVER.into());
    let mut failed = Vec::new();
    let mut done = |part: &str, outcome: Result<Value>| {
        outcome.inspect_err(|error| eprintln!("{part}: {error:#}")).unwrap_or_else(|error| {
            failed.push(format!("{part}: {error:#}"));
            Value::Null
        })
    };
    let size = if arguments.full { &FULL } else { &REDUCED };
    report.insert("form".into(), size.name.into());
    let chosen = |kernel: &&str| arguments.kernel.is_empty() || arguments.kernel.iter().any(|k| k == kernel);
    let kernels: Vec<_> = KERNELS.into_iter().filter(chosen).collect();
    ensure!(!kernels.is_empty(), "--kernel {:?}: there are {KERNELS:?}", arguments.kernel);
    for kernel in &kernels {
        println!("guest kernel {kernel}");
        let figures = done(kernel, of_kernel(&programs, kernel, size));
        print_rows(&[kernel], std::slice::from_ref(&figures));
        report.insert((*kernel).into(), figures);
    }
    if !arguments.kernel.is_empty() {
        report.insert("retried".into(), RETRIED.load(Ordering::Relaxed).into());
        let report = Value::Object(report);
        // The whole report stays what it is.
        super::write_report("topology-kernels", &report)?;
        let missed = kernels.iter().flat_map(|kernel| check_kernel(kernel, &report[*kernel]));
        return conclude(&failed, missed.collect());
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
    let overhead = done("overhead", of_overhead(&programs, size));
    report.insert("overhead_no_change".into(), overhead["overhead_no_change"].clone());
    report.insert("overhead".into(), overhead);
    println!("what a VM that is moved for ever, and a guest that rings for ever, cost another VM");
    let abuse = done("abuse", of_abuse(&programs, size));
    report.insert("abuse".into(), abuse);
    report.insert("retried".into(), RETRIED.load(Ordering::Relaxed).into());
    let report = Value::Object(report);
    print_table(&report);
    super::write_report("topology", &report)?;
    let missed = KERNELS.into_iter().flat_map(|kernel| check_kernel(kernel, &report[kernel]));
    conclude(&failed, missed.chain(check_whole(&report)).collect())
}

/// What a run ends with that has these parts that failed, and these goals that are missed.
fn conclude(failed: &[String], missed: Vec<String>) -> Result<()> {
    ensure!(failed.is_empty(), "not measured:\n  {}", failed.join("\n  "));
    goals::check(missed.iter().map(|goal| (goal.as_str(), Some(false))))
}

fn of_daemon(programs: &Programs) -> Result<Value> {
    json_of(&programs.boot(SERVER, None)?, "bench-topology daemon")
}

fn of_abuse(programs: &Programs, size: &Size) -> Result<Value> {
    let lab = programs.boot(SERVER, None)?;
    json_of(&lab, &format!("bench-topology abuse --driver /root/vnuma-6.12.ko --moves {}", size.abuse))
}

fn of_overhead(programs: &Programs, size: &Size) -> Result<Value> {
    let counters: Counters = COUNTERS.parse()?;
    let lab = programs.boot(COUNTERS_SERVER, Some(&counters))?;
    json_of(&lab, &format!("bench-topology overhead --driver /root/vnuma-6.12.ko --rounds {}", size.overhead))
}

/// How often each part repeats what it times.
struct Size {
    name: &'static str,
    idle: usize,
    loaded: usize,
    replug: usize,
    /// Seconds of each demonstration.
    demo: u64,
    overhead: usize,
    abuse: usize,
}

const REDUCED: Size =
    Size { name: "reduced", idle: 32, loaded: 32, replug: 6, demo: 60, overhead: 5, abuse: 12 };
const FULL: Size =
    Size { name: "full", idle: 100, loaded: 60, replug: 12, demo: 300, overhead: 7, abuse: 40 };

/// What is put on a server: here, there.
struct Programs(Vec<(PathBuf, String)>);

impl Programs {
    fn build() -> Result<Self> {
        let measured =
            [("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-bench-topology", "bench-topology")];
        let others = [("vnuma-demo", "vnuma-demo"), ("vnuma-lab-tests", "lab-scenario")];
        let there = measured.iter().chain(&others).map(|(_, name)| match *name {
            "lab-scenario" => format!("/root/{name}"),
            _ => format!("/usr/local/bin/{name}"),
        });
        let built = [build_release_binaries(&measured)?, build_binaries(&others)?].concat();
        let mut files: Vec<_> = built.into_iter().zip(there).collect();
        for kernel in KERNELS {
            files.push((driver::build(kernel)?, format!("/root/vnuma-{kernel}.ko")));
        }
        let tools = driver::tools(KERNELS[0])?;
        for tool in ["vnuma-check", "vnuma-fake-host"] {
            files.push((tools.join(tool), format!("/root/{tool}")));
        }
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

/// Commands that were run again.
static RETRIED: AtomicUsize = AtomicUsize::new(0);

/// Does something, once more if it fails: the emulated CPU now and then delivers an interrupt to a guest that has masked it, and
/// the guest panics. That is printed and counted.
fn retried<T>(what: &str, mut once: impl FnMut() -> Result<T>) -> Result<T> {
    once().or_else(|error| {
        eprintln!("{what}: trying once more: {error:#}");
        RETRIED.fetch_add(1, Ordering::Relaxed);
        once()
    })
}

/// Runs a command on the server; its messages are shown, its last line is JSON.
fn json_of(lab: &Lab, command: &str) -> Result<Value> {
    let text = retried(command, || sh(lab, command))?;
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
fn of_kernel(programs: &Programs, kernel: &str, size: &Size) -> Result<Value> {
    let lab = programs.boot(SERVER, None)?;
    let driver = format!("/root/vnuma-{kernel}.ko");
    let Size { idle, loaded, replug, .. } = size;
    let moves = format!("--kernel {kernel} --driver {driver} --idle {idle} --loaded {loaded}");
    let mut figures = json_of(&lab, &format!("bench-topology moves {moves}"))?;
    let replug = json_of(&lab, &format!("bench-topology replug --kernel {kernel} --moves {replug}"))?;
    figures["acpi_replug_latency_ms"] = replug["acpi_replug_latency_ms"].clone();
    let demo = demonstration(&lab, kernel, CHANGES, size)?;
    for name in ["local_share", "resident_local_share"] {
        figures[name] = demo["dynamic"][name].clone();
        figures[format!("{name}_static")] = demo["static"][name].clone();
    }
    // The host's load balancer moves vCPUs as well, so that this is not what was asked for.
    figures["changes"] = made(&demo);
    figures["autonuma"] =
        json!({"dynamic": demo["dynamic"]["autonuma"], "static": demo["static"]["autonuma"]});
    figures["demo_configuration"] = demo["configuration"].clone();
    if kernel == OTHER_CHANGES_KERNEL {
        let (mut shares, mut all) = (serde_json::Map::new(), serde_json::Map::new());
        shares.insert(CHANGES.to_string(), figures["local_share"].clone());
        all.insert(CHANGES.to_string(), figures["changes"].clone());
        for changes in OTHER_CHANGES {
            let demo = demonstration(&lab, kernel, changes, size)?;
            shares.insert(changes.to_string(), demo["dynamic"]["local_share"].clone());
            all.insert(changes.to_string(), made(&demo));
        }
        figures["local_share_by_changes_per_minute"] = shares.into();
        figures["changes_by_changes_per_minute"] = all.into();
    }
    Ok(figures)
}

/// How often vCPUs came to another node in a demonstration, how many updates that led to, and its length.
fn made(demo: &Value) -> Value {
    json!({
        "changes": demo["changes"], "updates": demo["updates"],
        "changes_static": demo["static"]["vcpu_node_changes"],
    })
}

/// The report of a demonstration with so many changes a minute.
fn demonstration(lab: &Lab, kernel: &str, changes: u64, size: &Size) -> Result<Value> {
    let period = 60_000 / changes;
    let driver = format!("--kernel {kernel} --driver /root/vnuma-{kernel}.ko");
    let times = format!("--seconds {} --period-ms {period}", size.demo);
    let command = format!("vnuma-demo host {driver} --report {DEMO_REPORT} {times} >&2");
    retried(&command, || sh(lab, &command))?;
    serde_json::from_str(&sh(lab, &format!("cat {DEMO_REPORT}"))?).context(DEMO_REPORT)
}

fn number(value: &Value, path: &str) -> f64 {
    // A figure that is missing keeps no limit.
    value.pointer(path).and_then(Value::as_f64).unwrap_or(f64::NAN)
}

/// Goals of a kernel's figures that are missed. All are relative to what the same run measured, so that a busy machine
/// decides nothing.
fn check_kernel(kernel: &str, figures: &Value) -> Vec<String> {
    let p50 = |field: &str| number(figures, &format!("/{field}/p50"));
    let (idle, loaded) = (p50("update_latency_ms"), p50("update_latency_ms_loaded"));
    let (floor, floor_loaded) = (p50("floor_ms"), p50("floor_ms_loaded"));
    let (replug, local) = (p50("acpi_replug_latency_ms"), number(figures, "/local_share"));
    let goals = [
        (
            idle <= 1.5 * floor,
            format!(
                "idle, an update takes {:.2} floors ({idle:.1} ms), at most 1.5 are wanted",
                idle / floor
            ),
        ),
        (
            loaded <= 2.0 * floor_loaded,
            format!(
                "loaded, an update takes {:.2} floors ({loaded:.1} ms), at most 2 are wanted",
                loaded / floor_loaded
            ),
        ),
        (
            replug >= 40.0 * idle,
            format!(
                "ACPI replug takes {:.1} times as long ({replug:.0} ms), at least 40 are wanted",
                replug / idle
            ),
        ),
        (number(figures, "/wrong_states") == 0.0, format!("wrong_states is {}", figures["wrong_states"])),
        (local >= 0.99, format!("local_share is {local:.4}, at least 0.99 is wanted")),
    ];
    goals.into_iter().filter(|(met, _)| !met).map(|(_, text)| format!("{kernel}: {text}")).collect()
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
        (overhead <= 0.01, format!("overhead_no_change is {overhead:.4}, at most 0.01 is wanted")),
    ];
    let kept = limits.into_iter().filter(|(kept, _)| !kept).map(|(_, text)| text);
    kept.chain(check_abuse(&report["abuse"])).collect()
}

/// What a VM may cost another one, by its updates' median: as much again, which is more than such a median varies between
/// two runs. A guest that rings is compared with one that is as busy.
fn check_abuse(abuse: &Value) -> Vec<String> {
    let p50 = |part: &str| number(abuse, &format!("/{part}/update_latency_ms/p50"));
    let published = number(abuse, "/moved/publications_per_s");
    let beside = |part: &str, other: &str| {
        let text =
            format!("abuse: an update takes {:.1} ms ({part}), {:.1} ms ({other})", p50(part), p50(other));
        (p50(part) <= 2.0 * p50(other), text)
    };
    let limits = [
        beside("moved", "quiet"),
        beside("ringing", "busy"),
        // They are counted when the window ends, and may belong to the second before it.
        (published <= CAP * 1.1, format!("abuse: {published:.1} publications a second, {CAP} are the cap")),
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

const ROWS: [(&str, &str); 18] = [
    ("update idle, p50 ms", "/update_latency_ms/p50"),
    ("update idle, p99 ms", "/update_latency_ms/p99"),
    ("  move to published, p50 ms", "/update_latency_ms/phases_ms/moved_to_published/p50"),
    ("  published to interrupt, p50 ms", "/update_latency_ms/phases_ms/published_to_interrupt/p50"),
    ("  interrupt to kernel, p50 ms", "/update_latency_ms/phases_ms/interrupt_to_kernel/p50"),
    ("  kernel to program, p50 ms", "/update_latency_ms/phases_ms/kernel_to_program/p50"),
    ("update loaded, p50 ms", "/update_latency_ms_loaded/p50"),
    ("update loaded, p99 ms", "/update_latency_ms_loaded/p99"),
    ("floor idle, p50 ms", "/floor_ms/p50"),
    ("  doorbell, p50 ms", "/floor_ms/doorbell_ms/p50"),
    ("  rebuild of domains, p50 ms", "/floor_ms/rebuild_ms/p50"),
    ("floor loaded, p50 ms", "/floor_ms_loaded/p50"),
    ("ACPI replug, p50 ms", "/acpi_replug_latency_ms/p50"),
    ("wrong states", "/wrong_states"),
    ("fresh pages local", "/local_share"),
    ("  static", "/local_share_static"),
    ("long-lived pages local", "/resident_local_share"),
    ("  static", "/resident_local_share_static"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Value {
        json!({
            "update_latency_ms": {"p50": 7.0}, "update_latency_ms_loaded": {"p50": 20.0},
            "floor_ms": {"p50": 5.0}, "floor_ms_loaded": {"p50": 11.0},
            "acpi_replug_latency_ms": {"p50": 320.0}, "wrong_states": 0, "local_share": 0.995,
        })
    }

    fn whole() -> Value {
        let part = |p50: f64| json!({"update_latency_ms": {"p50": p50}, "publications_per_s": 10.1});
        json!({
            "generation_read_ns": 2.5, "sched_getcpu_ns": 20.0, "daemon_wakeups_per_s": 4.5, "overhead_no_change": 0.004,
            "abuse": {"quiet": part(8.0), "moved": part(9.0), "busy": part(12.0), "ringing": part(14.0)},
        })
    }

    #[test]
    fn what_fails_is_tried_once_more() {
        let fails = |times: usize| {
            let mut tries = 0;
            let done = retried("a command", || {
                tries += 1;
                ensure!(tries > times, "try {tries}");
                Ok(())
            });
            (done.is_ok(), tries)
        };
        assert_eq!([0, 1, 2].map(fails), [(true, 1), (true, 2), (false, 2)]);
    }

    #[test]
    fn each_goal_of_a_kernel_can_be_missed() {
        assert_eq!(check_kernel("6.1", &figures()), [""; 0]);
        for (path, value) in [
            ("/update_latency_ms/p50", json!(7.6)),
            ("/update_latency_ms_loaded/p50", json!(22.1)),
            ("/acpi_replug_latency_ms/p50", json!(279.0)),
            ("/wrong_states", json!(1)),
            ("/local_share", json!(0.98)),
            ("/floor_ms/p50", Value::Null),
        ] {
            let mut figures = figures();
            *figures.pointer_mut(path).expect("a field") = value;
            assert_eq!(check_kernel("6.1", &figures).len(), 1, "{path}");
        }
    }

    #[test]
    fn each_other_limit_can_be_missed() {
        assert_eq!(check_whole(&whole()), [""; 0]);
        for (path, value) in [
            ("/generation_read_ns", json!(41.0)),
            ("/daemon_wakeups_per_s", json!(5.1)),
            ("/overhead_no_change", json!(0.011)),
            ("/abuse/moved/update_latency_ms/p50", json!(16.1)),
            ("/abuse/ringing/update_latency_ms/p50", json!(24.1)),
            ("/abuse/moved/publications_per_s", json!(11.1)),
            ("/abuse/busy", Value::Null),
        ] {
            let mut report = whole();
            *report.pointer_mut(path).expect("a field") = value;
            assert_eq!(check_whole(&report).len(), 1, "{path}");
        }
    }
}
