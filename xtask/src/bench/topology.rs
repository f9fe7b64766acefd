//! How fast guests follow their topology, and what that costs: one run for each guest kernel, with its peer (hot-unplug and
//! re-plug of a vCPU, which needs no driver) in the same run.

use super::{
    Common, build, commit, inputs, of_lab,
    peer::{boot, sh},
};
use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use vnuma_bench_figures::{cells::Cells, goals::Limit, report::Form};
use vnuma_lab_runner::{Counters, Lab, build_binaries, driver, end_on_signals};

const KERNELS: [&str; 3] = ["6.1", "6.12", "7.3"];
const SERVER: &str = "4n8c";
const COUNTERS: &str = "broadwell-2s";
const COUNTERS_SERVER: &str = "2n4c";
/// Publications a second to a VM, at most (docs/vnumad.md).
const CAP: f64 = 10.0;
const DEMO_REPORT: &str = "/root/demo.json";
/// Changes a minute of the runs that local_share comes from: XPV's highest (section 5.4.1), on each kernel.
const CHANGES: u64 = 20;
/// Others, on one kernel.
const OTHER_CHANGES: [u64; 3] = [5, 12, 60];
const OTHER_CHANGES_KERNEL: &str = "6.12";

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Only these guest kernels, and nothing that needs no kernel of its own
    #[arg(long, value_name = "KERNEL", value_parser = KERNELS)]
    kernel: Vec<String>,
}

/// What was measured, part by part: the others are worth having all the same if one does not come about.
struct Parts<'a> {
    cells: Cells,
    report: Map<String, Value>,
    programs: &'a [(PathBuf, String)],
    size: &'a Size,
}

/// A lab server that boots when something is to be measured there.
struct Server<'a> {
    programs: &'a [(PathBuf, String)],
    lab: Option<Lab>,
}

impl Server<'_> {
    fn lab(&mut self) -> Result<&Lab> {
        Ok(match self.lab.take() {
            Some(lab) => self.lab.insert(lab),
            None => self.lab.insert(boot(SERVER, None, self.programs)?),
        })
    }
}

impl Parts<'_> {
    /// Measures a part, once more if it fails: the emulated CPU now and then delivers an interrupt to a guest that has masked it, and the
    /// guest panics.
    fn part(&mut self, name: &str, mut measure: impl FnMut() -> Result<Value>) -> Result<Value> {
        let measured = self.cells.measure(name, || Ok((measure()?, String::new())))?;
        Ok(measured.unwrap_or_default())
    }

    fn insert(&mut self, name: &str, value: impl Into<Value>) {
        self.report.insert(name.to_owned(), value.into());
    }

    /// All figures of one guest kernel, on one server.
    fn kernel(&mut self, kernel: &str) -> Result<()> {
        let Size { idle, loaded, replug, other_changes, .. } = *self.size;
        let (programs, size) = (self.programs, self.size);
        let mut server = Server { programs, lab: None };
        let driver = format!("/root/vnuma-{kernel}.ko");
        let moves = format!("--kernel {kernel} --driver {driver} --idle {idle} --loaded {loaded}");
        let moves = self.part(&format!("{kernel}, moves"), || {
            json_of(server.lab()?, &format!("bench-topology moves {moves}"))
        })?;
        let mut figures = if moves.is_null() { json!({}) } else { moves };
        let replug = self.part(&format!("{kernel}, replug"), || {
            json_of(server.lab()?, &format!("bench-topology replug --kernel {kernel} --moves {replug}"))
        })?;
        figures["acpi_replug_latency_ms"] = replug["acpi_replug_latency_ms"].clone();
        let mut demo = |parts: &mut Self, changes: u64| {
            let name = format!("{kernel}, demonstration with {changes} changes a minute");
            parts.part(&name, || demonstration(server.lab()?, kernel, changes, size))
        };
        let usual = demo(self, CHANGES)?;
        for name in ["local_share", "resident_local_share"] {
            figures[name] = usual["dynamic"][name].clone();
            figures[format!("{name}_static")] = usual["static"][name].clone();
        }
        // The host's load balancer moves vCPUs as well, so that this is not what was asked for.
        figures["changes"] = made(&usual);
        figures["autonuma"] =
            json!({"dynamic": usual["dynamic"]["autonuma"], "static": usual["static"]["autonuma"]});
        figures["demo_configuration"] = usual["configuration"].clone();
        if kernel == OTHER_CHANGES_KERNEL && other_changes {
            let (mut shares, mut all) = (Map::new(), Map::new());
            shares.insert(CHANGES.to_string(), figures["local_share"].clone());
            all.insert(CHANGES.to_string(), figures["changes"].clone());
            for changes in OTHER_CHANGES {
                let demo = demo(self, changes)?;
                shares.insert(changes.to_string(), demo["dynamic"]["local_share"].clone());
                all.insert(changes.to_string(), made(&demo));
            }
            figures["local_share_by_changes_per_minute"] = shares.into();
            figures["changes_by_changes_per_minute"] = all.into();
        }
        self.insert(kernel, figures);
        Ok(())
    }

    /// What needs no kernel of its own.
    fn others(&mut self) -> Result<()> {
        let (programs, size) = (self.programs, self.size);
        for name in ["generation_read_ns", "sched_getcpu_ns"] {
            let cost = self.report["6.12"]["cost"][name].clone();
            self.insert(name, cost);
        }
        let daemon =
            self.part("vnumad at rest", || json_of(&boot(SERVER, None, programs)?, "bench-topology daemon"))?;
        self.insert("daemon_wakeups_per_s", daemon["daemon_wakeups_per_s"].clone());
        self.insert("daemon", daemon);
        let name = format!("cost for a guest that nothing happens to, by the counters of {COUNTERS}");
        let overhead = self.part(&name, || of_overhead(programs, size))?;
        self.insert("overhead_no_change", overhead["overhead_no_change"].clone());
        self.insert("overhead", overhead);
        let name = "what a VM that is moved for ever, and a guest that rings for ever, cost another VM";
        let abuse = self.part(name, || of_abuse(programs, size))?;
        self.insert("abuse", abuse);
        Ok(())
    }
}

/// Runs it and writes the report, which has the other parts all the same when one fails.
pub fn run(Arguments { common, kernel }: &Arguments) -> Result<()> {
    end_on_signals().context("signal handlers")?;
    let form = common.form;
    let size = match form {
        Form { full: true, .. } => &FULL,
        Form { smoke: true, .. } => &SMOKE,
        _ => &REDUCED,
    };
    let chosen = |one: &&str| match kernel.is_empty() {
        true => !form.smoke || *one == OTHER_CHANGES_KERNEL,
        false => kernel.iter().any(|kernel| kernel == one),
    };
    let kernels: Vec<_> = KERNELS.into_iter().filter(chosen).collect();
    let programs = programs(form.smoke, &kernels)?;
    let here: Vec<PathBuf> = programs.iter().map(|(here, _)| here.clone()).collect();
    // Of some kernels: the whole report stays what it is.
    let name = if kernel.is_empty() { "topology" } else { "topology-kernels" };
    let run = common.run(name, &[inputs(&here), of_lab()?].concat())?;
    let cells = Cells::stored(&run.options)?;
    let mut parts = Parts { cells, report: Map::new(), programs: &programs, size };
    parts.insert("source", "measured in the lab, but for overhead_no_change, which is modelled");
    parts.insert("server", SERVER);
    parts.insert("form", form.name());
    parts.insert("commit", commit());
    kernels.iter().try_for_each(|kernel| parts.kernel(kernel))?;
    let whole = kernel.is_empty() && !form.smoke;
    if whole {
        parts.others()?;
    }
    parts.insert("retried", parts.cells.retried);
    parts.insert("measured_by", json!(parts.cells.measured_by));
    let Parts { cells, report, .. } = parts;
    let report = Value::Object(report);
    let figures: Vec<Value> = kernels.iter().map(|kernel| report[*kernel].clone()).collect();
    let mut goals: Vec<Limit> =
        kernels.iter().zip(&figures).flat_map(|(kernel, figures)| kernel_goals(kernel, figures)).collect();
    let mut table = rows(&kernels, &figures);
    if whole {
        goals.extend(other_goals(&report));
        for name in ["generation_read_ns", "sched_getcpu_ns", "daemon_wakeups_per_s", "overhead_no_change"] {
            table += &format!("{name:<34}{:>12}\n", shown(number(&report, &format!("/{name}")), 4));
        }
    }
    let judged = run.results.end(&report, &table, &goals);
    cells.end().and(judged)
}

fn of_abuse(programs: &[(PathBuf, String)], size: &Size) -> Result<Value> {
    let lab = boot(SERVER, None, programs)?;
    json_of(&lab, &format!("bench-topology abuse --driver /root/vnuma-6.12.ko --moves {}", size.abuse))
}

fn of_overhead(programs: &[(PathBuf, String)], size: &Size) -> Result<Value> {
    let counters: Counters = COUNTERS.parse()?;
    let lab = boot(COUNTERS_SERVER, Some(&counters), programs)?;
    json_of(&lab, &format!("bench-topology overhead --driver /root/vnuma-6.12.ko --rounds {}", size.overhead))
}

/// How often each part repeats what it times.
struct Size {
    idle: usize,
    loaded: usize,
    replug: usize,
    /// Seconds of each demonstration.
    demo: u64,
    /// Are there demonstrations with other numbers of changes?
    other_changes: bool,
    overhead: usize,
    abuse: usize,
}

const REDUCED: Size =
    Size { idle: 32, loaded: 32, replug: 6, demo: 60, other_changes: true, overhead: 5, abuse: 12 };
const FULL: Size =
    Size { idle: 100, loaded: 60, replug: 12, demo: 300, other_changes: true, overhead: 7, abuse: 40 };
/// Of one kernel, in two minutes.
const SMOKE: Size =
    Size { idle: 4, loaded: 4, replug: 1, demo: 6, other_changes: false, overhead: 0, abuse: 0 };

/// What is put on a server: here, there.
fn programs(smoke: bool, kernels: &[&str]) -> Result<Vec<(PathBuf, String)>> {
    let measured =
        [("vnumad", "vnumad"), ("vnumactl", "vnumactl"), ("vnuma-bench-topology", "bench-topology")];
    let others = [("vnuma-demo", "vnuma-demo"), ("vnuma-lab-tests", "lab-scenario")];
    let there = measured.iter().chain(&others).map(|(_, name)| match *name {
        "lab-scenario" => format!("/root/{name}"),
        _ => format!("/usr/local/bin/{name}"),
    });
    let built = [build(smoke, &measured)?, build_binaries(&others)?].concat();
    let mut files: Vec<_> = built.into_iter().zip(there).collect();
    for kernel in kernels {
        files.push((driver::build(kernel)?, format!("/root/vnuma-{kernel}.ko")));
    }
    let tools = driver::tools(kernels[0])?;
    for tool in ["vnuma-check", "vnuma-fake-host"] {
        files.push((tools.join(tool), format!("/root/{tool}")));
    }
    let load = build_binaries(&[("lab-count", "lab-load")])?.pop().context("lab-load")?;
    files.push((load, "/run/lab/bin/lab-load".to_owned()));
    Ok(files)
}

/// Runs a command on the server; its messages are shown, its last line is JSON.
fn json_of(lab: &Lab, command: &str) -> Result<Value> {
    let text = sh(lab, command)?;
    let line = text.trim_end().lines().last().with_context(|| format!("{command}: no output"))?;
    serde_json::from_str(line).with_context(|| format!("{command}: {line}"))
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
    // The server has no IOMMU.
    let command = format!("vnuma-demo host --without-disk {driver} --report {DEMO_REPORT} {times} >&2");
    sh(lab, &command)?;
    serde_json::from_str(&sh(lab, &format!("cat {DEMO_REPORT}"))?).context(DEMO_REPORT)
}

fn number(value: &Value, path: &str) -> Option<f64> {
    value.pointer(path).and_then(Value::as_f64)
}

/// One figure by another one.
fn by(of: Option<f64>, other: Option<f64>) -> Option<f64> {
    of.zip(other).map(|(of, other)| of / other)
}

/// Goals of a kernel's figures. All are relative to what the same run measured, so that a busy machine decides nothing.
fn kernel_goals(kernel: &str, figures: &Value) -> Vec<Limit> {
    let p50 = |field: &str| number(figures, &format!("/{field}/p50"));
    let named = |name: &str| format!("{kernel}: {name}");
    let idle = p50("update_latency_ms");
    vec![
        Limit::at_most(named("an idle update, in floors"), by(idle, p50("floor_ms")), 1.5),
        Limit::at_most(
            named("a loaded update, in floors"),
            by(p50("update_latency_ms_loaded"), p50("floor_ms_loaded")),
            2.0,
        ),
        Limit::at_least(named("ACPI replug, in updates"), by(p50("acpi_replug_latency_ms"), idle), 40.0),
        Limit::at_most(named("wrong_states"), number(figures, "/wrong_states"), 0.0),
        Limit::at_least(named("local_share"), number(figures, "/local_share"), 0.99),
    ]
}

/// Goals of the other figures. What a VM may cost another one, by its updates' median: as much again, which is more than such a median
/// varies between two runs. A guest that rings is compared with one that is as busy.
fn other_goals(report: &Value) -> Vec<Limit> {
    let of = |name: &str| number(report, &format!("/{name}"));
    let p50 = |part: &str| of(&format!("abuse/{part}/update_latency_ms/p50"));
    vec![
        Limit::at_most(
            "reading the generation, in sched_getcpu()",
            by(of("generation_read_ns"), of("sched_getcpu_ns")),
            2.0,
        ),
        Limit::at_most("daemon_wakeups_per_s", of("daemon_wakeups_per_s"), 5.0),
        Limit::at_most("overhead_no_change", of("overhead_no_change"), 0.01),
        Limit::at_most("abuse: an update, moved by quiet", by(p50("moved"), p50("quiet")), 2.0),
        Limit::at_most("abuse: an update, ringing by busy", by(p50("ringing"), p50("busy")), 2.0),
        // They are counted when the window ends, and may belong to the second before it.
        Limit::at_most("abuse: publications_per_s", of("abuse/moved/publications_per_s"), CAP * 1.1),
    ]
}

fn shown(figure: Option<f64>, digits: usize) -> String {
    figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.digits$}"))
}

/// The figures of guest kernels, side by side.
fn rows(kernels: &[&str], figures: &[Value]) -> String {
    let line = |name: &str, cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("{cell:>12}")).collect();
        format!("{name:<34}{cells}\n")
    };
    let row = |(name, path): &(&str, &str)| {
        line(name, figures.iter().map(|figures| shown(number(figures, path), 3)).collect())
    };
    line("", kernels.iter().map(ToString::to_string).collect()) + &ROWS.iter().map(row).collect::<String>()
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

    fn found(goals: &[Limit]) -> [usize; 2] {
        let missed = goals.iter().filter(|goal| !goal.met && goal.value.is_some()).count();
        [missed, goals.iter().filter(|goal| goal.value.is_none()).count()]
    }

    #[test]
    fn each_goal_of_a_kernel_can_be_missed() {
        assert_eq!(found(&kernel_goals("6.1", &figures())), [0, 0]);
        for (path, value) in [
            ("/update_latency_ms/p50", json!(7.6)),
            ("/update_latency_ms_loaded/p50", json!(22.1)),
            ("/acpi_replug_latency_ms/p50", json!(279.0)),
            ("/wrong_states", json!(1)),
            ("/local_share", json!(0.98)),
        ] {
            let mut figures = figures();
            *figures.pointer_mut(path).expect("a field") = value;
            assert_eq!(found(&kernel_goals("6.1", &figures)), [1, 0], "{path}");
        }
    }

    #[test]
    fn a_figure_that_is_missing_is_not_measured_and_shows_as_such() {
        let mut figures = figures();
        figures["floor_ms"] = Value::Null;
        assert_eq!(found(&kernel_goals("6.1", &figures)), [0, 1]);
        assert_eq!(found(&kernel_goals("6.1", &Value::Null)), [0, 5]);
        assert_eq!((shown(None, 3), shown(Some(1.0), 3)), ("-".to_owned(), "1.000".to_owned()));
    }

    #[test]
    fn each_other_limit_can_be_missed() {
        assert_eq!(found(&other_goals(&whole())), [0, 0]);
        for (path, value, expected) in [
            ("/generation_read_ns", json!(41.0), [1, 0]),
            ("/daemon_wakeups_per_s", json!(5.1), [1, 0]),
            ("/overhead_no_change", json!(0.011), [1, 0]),
            ("/abuse/moved/update_latency_ms/p50", json!(16.1), [1, 0]),
            ("/abuse/ringing/update_latency_ms/p50", json!(24.1), [1, 0]),
            ("/abuse/moved/publications_per_s", json!(11.1), [1, 0]),
            ("/abuse/busy", Value::Null, [0, 1]),
        ] {
            let mut report = whole();
            *report.pointer_mut(path).expect("a field") = value;
            assert_eq!(found(&other_goals(&report)), expected, "{path}");
        }
    }
}
