//! The server's kernel and its daemons: what is set for all cells, and for one policy.

use crate::committed::{HOST_CPUS, VM_CPUS};
use anyhow::{Context, Result, ensure};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use std::{fs, path::Path, process::Command, time::Duration};
use vnuma_scenario::{Process, output, vnumactl, vnumad_logging_to, wait_for};

const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
const SCAN: &str = "/sys/kernel/debug/sched/numa_balancing";
const SLICE: &str = "/sys/kernel/debug/sched/base_slice_ns";
const GROUP: &str = "/sys/fs/cgroup/machine.slice";
const CONFIGURATION: &str = "/root/vnumad.toml";
const LOG: &str = "/root/vnumad.log";
/// Most that the kernel takes.
const LONGEST_SLICE_NS: f64 = 1e8;
/// vnumad's own period of looking at everything, seconds.
const RESYNC_S: f64 = 2.0;
/// numad's shortest and longest interval, seconds (numad(8), `-i`).
const NUMAD_S: [f64; 2] = [5.0, 15.0];
const NUMAD_PID: &str = "/var/run/numad.pid";
const HANG: Duration = Duration::from_secs(120);

fn write(path: &str, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("{path}: writing {text:?}"))
}

fn list(cpus: &[u32]) -> String {
    cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// CPUs of VMs, as the kernel's lists are written.
pub fn vm_cpus() -> String {
    list(VM_CPUS.as_flattened())
}

/// Lets VMs run on their CPUs only, and the benchmark on the others. The kernel balances both by themselves: with one domain
/// for all, it would leave VMs on one node as long as that has an idle CPU, which they may not use.
pub fn divide() -> Result<()> {
    write(&format!("{GROUP}/cpuset.cpus"), &vm_cpus())?;
    let path = format!("{GROUP}/cpuset.cpus.partition");
    write(&path, "root")?;
    let found = fs::read_to_string(&path).with_context(|| path.clone())?;
    ensure!(found.trim() == "root", "{path}: {}", found.trim());
    affine(0, &HOST_CPUS)
}

/// CPUs that a thread may run on; 0 is the caller.
pub fn affine(tid: i32, cpus: &[u32]) -> Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu as usize)?;
    }
    sched_setaffinity(Pid::from_raw(tid), &set).with_context(|| format!("CPUs {cpus:?} for thread {tid}"))
}

/// AutoNUMA, on or off.
pub fn balance(on: bool) -> Result<()> {
    write(BALANCING, if on { "1" } else { "0" })
}

/// The kernel's own timers, as they were.
pub struct Timers(Vec<(String, f64, f64)>);

impl Timers {
    /// Reads them: those of AutoNUMA, in milliseconds, and the slice of its scheduler.
    pub fn read() -> Result<Self> {
        let names = ["scan_delay_ms", "scan_period_min_ms", "scan_period_max_ms"];
        let scan = names.map(|name| (format!("{SCAN}/{name}"), f64::MAX));
        let mut timers = Vec::new();
        for (path, most) in scan.into_iter().chain([(SLICE.to_owned(), LONGEST_SLICE_NS)]) {
            let text = fs::read_to_string(&path).with_context(|| path.clone())?;
            let value = text.trim().parse().with_context(|| format!("{path}: {text:?}"))?;
            timers.push((path, value, most));
        }
        Ok(Self(timers))
    }

    /// Multiplies AutoNUMA's by one factor and the slice by the dilation.
    pub fn stretch(&self, factor: f64, dilation: f64) -> Result<()> {
        for (path, value, most) in &self.0 {
            let by = if path == SLICE { dilation } else { factor };
            write(path, &format!("{:.0}", (value * by).min(*most)))?;
        }
        Ok(())
    }
}

/// Pages that AutoNUMA has moved.
pub fn pages_moved() -> Result<u64> {
    let path = "/proc/vmstat";
    let text = fs::read_to_string(path).context(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix("numa_pages_migrated "));
    line.and_then(|number| number.trim().parse().ok())
        .with_context(|| format!("{path}: no numa_pages_migrated"))
}

/// How long the CPUs of VMs were idle, nanoseconds. The kernel counts it in steps of 10 ms.
pub fn idle_ns() -> Result<u64> {
    let path = "/proc/stat";
    let text = fs::read_to_string(path).context(path)?;
    let mut sum = 0;
    for cpu in VM_CPUS.as_flattened() {
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

/// vnumad with periods of this length, on the host's CPUs.
pub fn start_vnumad(period_s: f64, factor: f64) -> Result<Process> {
    let (period, resync) = (period_s * 1000.0, (RESYNC_S * factor * 1000.0).clamp(1000.0, 60_000.0));
    let text = format!("[observe]\nresync_interval_ms = {resync:.0}\n\n[policy]\nperiod_ms = {period:.0}\n");
    write(CONFIGURATION, &text)?;
    let daemon = vnumad_logging_to(Path::new(LOG), &["--config", CONFIGURATION])?;
    for vm in crate::committed::VMS {
        wait_for("vnumad to find the VMs", HANG, || {
            Ok(vnumactl(&["show", vm.0]).is_ok_and(|shown| shown["described"] == true))
        })?;
    }
    Ok(daemon)
}

/// numad, while it lives. It does nothing in the first minutes after a boot, so it gets a clock that is ahead.
pub struct Numad;

impl Numad {
    /// Its version, or why it cannot be started.
    pub fn version() -> String {
        let text = output("sh", &["-c", "dpkg-query -W -f '${Version}' numad"]);
        text.unwrap_or_else(|error| format!("{error:#}"))
    }

    /// Starts it with its intervals multiplied.
    pub fn start(factor: f64) -> Result<Self> {
        let [least, most] = NUMAD_S.map(|seconds| (seconds * factor).round().max(1.0) as u64);
        let interval = format!("{least}:{most}");
        let clock = ["--time", "--fork", "--monotonic", "1000000", "--boottime", "1000000"];
        let mut command = Command::new("unshare");
        let status =
            command.args(clock).args(["numad", "-i", &interval]).status().context("unshare numad")?;
        ensure!(status.success(), "numad -i {interval}: {status}");
        wait_for("numad to start", HANG, || Ok(fs::exists(NUMAD_PID)?))?;
        Ok(Self)
    }
}

impl Drop for Numad {
    fn drop(&mut self) {
        let pid = fs::read_to_string(NUMAD_PID).unwrap_or_default();
        if let Err(error) = output("kill", &["-KILL", pid.trim()]) {
            eprintln!("numad: {error:#}");
        }
        // The next one would take it for running.
        let _ = fs::remove_file(NUMAD_PID);
    }
}
