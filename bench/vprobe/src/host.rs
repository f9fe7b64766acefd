//! The server's kernel and its daemons: what is set for all cells, and for one policy.

use crate::committed::{DEFAULT_PERIOD_S, Layout};
use anyhow::{Context, Result, ensure};
use libbpf_rs::{ProgramType, query::ProgInfoIter};
use std::{collections::BTreeMap, fs, io, path::Path, process::Command, time::Duration};
pub use vnuma_bench_common::host::{Balanced, Numad, affine, balance, balanced};
use vnuma_scenario::{Process, vnumactl, vnumad_logging_to, wait_for};

const SCAN: &str = "/sys/kernel/debug/sched/numa_balancing";
const SCHEDULER: &str = "/sys/kernel/debug/sched";
const PROGRAMS_TIMED: &str = "/proc/sys/kernel/bpf_stats_enabled";
/// What the names of vnumad's and scx_vnuma's BPF programs begin with.
const PROGRAMS: &str = "vnuma_";
const GROUP: &str = "/sys/fs/cgroup/machine.slice";
const CONFIGURATION: &str = "/root/vnumad.toml";
const LOG: &str = "/root/vnumad.log";
/// Timers of the kernel's scheduler, and the most that it takes.
const SCHEDULER_NS: [(&str, f64); 2] = [("base_slice_ns", 1e8), ("migration_cost_ns", 1e9)];
/// Timers of its load balancer, for each domain of a CPU.
const BALANCER_MS: [&str; 2] = ["min_interval", "max_interval"];
/// What vnumad does by the clock beside its policies: the key of its configuration, its default and the least that is taken,
/// in milliseconds (docs/vnumad.md, "Periodic work").
const VNUMAD_MS: [(&str, f64, f64, f64); 5] = [
    ("resync_interval_ms", 2000.0, 1000.0, 60_000.0),
    ("process_interval_ms", 500.0, 100.0, 3_600_000.0),
    ("probe_interval_ms", 20_000.0, 1000.0, 3_600_000.0),
    ("describe_interval_ms", 30_000.0, 2000.0, 3_600_000.0),
    ("host_interval_ms", 30_000.0, 1000.0, 3_600_000.0),
];
/// The kernel's name of the sched_ext scheduler that is loaded.
const LOADED: &str = "/sys/kernel/sched_ext/root/ops";
/// Defaults of scx_vnuma, and the most that it takes.
const SCX_SLICE_US: (f64, f64) = (5000.0, 100_000.0);
const SCX_STARVE_MS: (f64, f64) = (100.0, 10_000.0);
const HANG: Duration = Duration::from_secs(120);

fn write(path: &str, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("{path}: writing {text:?}"))
}

fn list(cpus: &[u32]) -> String {
    cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Lets VMs run on their CPUs only, and the benchmark on the others. The kernel balances both by themselves: with one domain
/// for all, it would leave VMs on one node as long as that has an idle CPU, which they may not use.
pub fn divide(layout: &Layout) -> Result<()> {
    write(&format!("{GROUP}/cpuset.cpus"), &list(&layout.all_vm_cpus()))?;
    let path = format!("{GROUP}/cpuset.cpus.partition");
    write(&path, "root")?;
    let found = fs::read_to_string(&path).with_context(|| path.clone())?;
    ensure!(found.trim() == "root", "{path}: {}", found.trim());
    affine(0, layout.host_cpus)
}

/// A timer of the kernel.
struct Timer {
    path: String,
    /// As it was.
    value: f64,
    /// The most that the kernel takes.
    most: f64,
    /// Is it the scheduler's?
    schedules: bool,
}

/// The kernel's own timers, as they were.
pub struct Timers(Vec<Timer>);

impl Timers {
    /// Reads them: those of AutoNUMA, of the scheduler, and of its load balancer. To be called when CPUs are divided.
    pub fn read(layout: &Layout) -> Result<Self> {
        let mut paths = Vec::new();
        for name in ["scan_delay_ms", "scan_period_min_ms", "scan_period_max_ms"] {
            paths.push((format!("{SCAN}/{name}"), f64::MAX, false));
        }
        for (name, most) in SCHEDULER_NS {
            paths.push((format!("{SCHEDULER}/{name}"), most, true));
        }
        // Only then are the domains shown.
        write(&format!("{SCHEDULER}/verbose"), "Y")?;
        for cpu in layout.all_vm_cpus() {
            let directory = format!("{SCHEDULER}/domains/cpu{cpu}");
            for domain in fs::read_dir(&directory).with_context(|| directory.clone())? {
                let domain = domain?.path();
                let timer = |name| (domain.join(name).display().to_string(), f64::MAX, true);
                paths.extend(BALANCER_MS.map(timer));
            }
        }
        let mut timers = Vec::new();
        for (path, most, schedules) in paths {
            let text = fs::read_to_string(&path).with_context(|| path.clone())?;
            let value = text.trim().parse().with_context(|| format!("{path}: {text:?}"))?;
            timers.push(Timer { path, value, most, schedules });
        }
        Ok(Self(timers))
    }

    /// Multiplies AutoNUMA's by one factor and the scheduler's by the dilation. By how much each one was.
    pub fn stretch(&self, factor: f64, dilation: f64) -> Result<BTreeMap<String, f64>> {
        let mut stretched = BTreeMap::new();
        for Timer { path, value, most, schedules } in &self.0 {
            let by = if *schedules { dilation } else { factor };
            let new = (value * by).min(*most).round();
            write(path, &new.to_string())?;
            stretched.insert(path.clone(), new / value);
        }
        Ok(stretched)
    }
}

/// Has the kernel take the time of BPF programs, which costs them some more.
pub fn time_programs(on: bool) -> Result<()> {
    write(PROGRAMS_TIMED, if on { "1" } else { "0" })
}

/// Time that vnumad's BPF programs took in whatever thread they found, nanoseconds, and how often they ran. Those that it calls
/// itself are its own threads'.
pub fn programs() -> (u64, u64) {
    let programs = ProgInfoIter::default().filter(|program| {
        program.ty != ProgramType::Syscall && program.name.to_string_lossy().starts_with(PROGRAMS)
    });
    programs.fold((0, 0), |(ns, runs), program| (ns + program.run_time_ns, runs + program.run_cnt))
}

/// What they took between two moments. Programs that are loaded anew begin at 0.
pub fn programs_since(now: Option<(u64, u64)>, before: Option<(u64, u64)>) -> Option<(u64, u64)> {
    let (now, before) = now.zip(before)?;
    Some((now.0.saturating_sub(before.0), now.1.saturating_sub(before.1)))
}

/// How long the CPUs of VMs were idle, nanoseconds. The kernel counts it in steps of 10 ms.
pub fn idle_ns(layout: &Layout) -> Result<u64> {
    let path = "/proc/stat";
    let text = fs::read_to_string(path).context(path)?;
    let mut sum = 0;
    for cpu in layout.all_vm_cpus() {
        let name = format!("cpu{cpu} ");
        let line = text.lines().find(|line| line.starts_with(&name));
        // user nice system idle iowait
        let fields: Vec<u64> = line
            .unwrap_or_default()
            .split_whitespace()
            .skip(1)
            .filter_map(|field| field.parse().ok())
            .collect();
        ensure!(fields.len() > 4, "{path}: no CPU {cpu}");
        sum += (fields[3] + fields[4]) * 10_000_000;
    }
    Ok(sum)
}

/// By how much the timers of vnumad and numad are stretched.
pub fn stretched(period_s: f64, factor: f64, dilation: f64) -> BTreeMap<String, f64> {
    let mut stretched =
        BTreeMap::from([("vnumad: policy.period_ms".to_owned(), period_s / DEFAULT_PERIOD_S)]);
    for (key, ms, least, most) in VNUMAD_MS {
        stretched.insert(format!("vnumad: observe.{key}"), (ms * dilation).clamp(least, most) / ms);
    }
    stretched.insert("numad: -i".to_owned(), factor);
    stretched
}

/// vnumad's configuration: but for its period everything that it does by the clock is as by default, in modelled time.
fn configuration(period_s: f64, dilation: f64) -> String {
    let mut text = format!("[policy]\nperiod_ms = {:.0}\n\n[observe]\n", period_s * 1000.0);
    for (key, ms, least, most) in VNUMAD_MS {
        text += &format!("{key} = {:.0}\n", (ms * dilation).clamp(least, most));
    }
    text
}

/// vnumad with periods of this length, once it knows these VMs.
pub fn start_vnumad(vms: &[&str], period_s: f64, dilation: f64) -> Result<Process> {
    write(CONFIGURATION, &configuration(period_s, dilation))?;
    let daemon = vnumad_logging_to(Path::new(LOG), &["--config", CONFIGURATION])?;
    for vm in vms {
        wait_for("vnumad to find the VMs", HANG, || {
            Ok(vnumactl(&["show", vm]).is_ok_and(|shown| shown["described"] == true))
        })?;
    }
    Ok(daemon)
}

fn scheduler_arguments(dilation: f64) -> [String; 2] {
    let [slice, starve] = [SCX_SLICE_US, SCX_STARVE_MS].map(|(time, most)| (time * dilation).min(most));
    [format!("--slice-us={slice:.0}"), format!("--starve-ms={starve:.0}")]
}

/// scx_vnuma in partial mode, on the host's CPUs, with its times stretched as the kernel's own scheduler's are.
pub fn start_scheduler(dilation: f64) -> Result<Process> {
    let mut command = Command::new("scx_vnuma");
    // Standard output is for the cells alone.
    command.args(scheduler_arguments(dilation)).stdout(io::stderr());
    let scheduler = Process(command.spawn().context("scx_vnuma")?);
    wait_for("scx_vnuma to be loaded", HANG, || {
        Ok(fs::read_to_string(LOADED).is_ok_and(|name| name.trim() == "vnuma"))
    })?;
    Ok(scheduler)
}

/// Steps that vnumad's log has another VM as the reason for, by that VM.
pub fn because_of() -> Result<BTreeMap<String, u64>> {
    Ok(reasons(&fs::read_to_string(LOG).context(LOG)?))
}

fn reasons(log: &str) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for line in log.lines().filter(|line| line.contains(" is confined to CPUs ")) {
        let name = line.split_once("(because of ").and_then(|(_, rest)| rest.split_once(')'));
        if let Some((name, _)) = name {
            *found.entry(name.to_owned()).or_default() += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_vnumad_does_by_the_clock_is_stretched() {
        let text = configuration(5.7, 22.8);
        assert!(
            text.starts_with("[policy]\nperiod_ms = 5700\n\n[observe]\nresync_interval_ms = 45600\n"),
            "{text}"
        );
        assert!(
            text.contains("process_interval_ms = 11400\n") && text.ends_with("host_interval_ms = 684000\n"),
            "{text}"
        );
        // A server that is nearly as fast as the modelled machine.
        let text = configuration(0.1, 0.1);
        assert!(
            text.contains("resync_interval_ms = 1000\nprocess_interval_ms = 100\nprobe_interval_ms = 2000\n")
        );
        assert!(
            configuration(10.0, 40.0).contains("resync_interval_ms = 60000\n"),
            "no more than vnumad takes"
        );
    }

    #[test]
    fn the_times_of_scx_vnuma_are_stretched_as_far_as_it_takes_them() {
        assert_eq!(scheduler_arguments(13.7), ["--slice-us=68500", "--starve-ms=1370"]);
        assert_eq!(scheduler_arguments(500.0), ["--slice-us=100000", "--starve-ms=10000"]);
    }

    #[test]
    fn what_was_stretched_is_told() {
        let stretched = stretched(0.5, 0.5, 2.0);
        assert_eq!(
            (stretched.len(), stretched["vnumad: policy.period_ms"], stretched["numad: -i"]),
            (7, 0.5, 0.5)
        );
        assert_eq!(stretched["vnumad: observe.host_interval_ms"], 2.0);
    }

    #[test]
    fn steps_are_counted_by_the_vm_that_is_their_reason() {
        let log = "INFO vm1: vCPU 3 is confined to CPUs 4-5 of node 1, by vprobe: it makes room for another vCPU (because of vm2); pressure 1.0\n\
                   INFO vm1: vCPU 2 is confined to CPUs 4-5 of node 1, by vprobe: its memory is there; pressure 1.0\n\
                   INFO vm3: vCPU 0 is confined to CPUs 1-2 of node 0, by vprobe: others take its last-level cache (because of vm2)\n\
                   INFO (because of vm9)\n";
        assert_eq!(reasons(log), BTreeMap::from([("vm2".to_owned(), 2)]));
    }
}
