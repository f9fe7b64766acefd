//! The server's kernel and its daemons: what a policy is made of that vnuma is compared with.

use anyhow::{Context, Result, ensure};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use std::{fs, process::Command, time::Duration};
use vnuma_scenario::{output, wait_for};

const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
/// numad's shortest and longest interval, seconds (numad(8), `-i`).
const NUMAD_S: [f64; 2] = [5.0, 15.0];
const NUMAD_PID: &str = "/var/run/numad.pid";
const HANG: Duration = Duration::from_secs(120);

/// Writes a file of the kernel.
pub fn write(path: &str, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("{path}: writing {text:?}"))
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

/// What AutoNUMA has done since the kernel started.
#[derive(Clone, Copy)]
pub struct Balanced {
    /// Pages that it has unmapped to see who uses them next.
    pub scanned: u64,
    /// Accesses to these that it has seen.
    pub seen: u64,
    /// Pages that it has moved.
    pub moved: u64,
}

impl Balanced {
    /// Since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            scanned: self.scanned - before.scanned,
            seen: self.seen - before.seen,
            moved: self.moved - before.moved,
        }
    }
}

/// What AutoNUMA has done.
pub fn balanced() -> Result<Balanced> {
    let (scanned, seen) = (counted("numa_pte_updates")?, counted("numa_hint_faults")?);
    Ok(Balanced { scanned, seen, moved: counted("numa_pages_migrated")? })
}

/// What the kernel has counted since it started, by a name in `/proc/vmstat`.
pub fn counted(name: &str) -> Result<u64> {
    let path = "/proc/vmstat";
    let text = fs::read_to_string(path).context(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|number| number.trim().parse().ok()).with_context(|| format!("{path}: no {name}"))
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
