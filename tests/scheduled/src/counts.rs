//! What the kernel counts of a scheduler: directed yields of vCPUs, and the time of its BPF programs.

use anyhow::{Context, Result, ensure};
use std::{fs, path::Path};
use vnuma_process::procfs::file_info;

/// Of all vCPUs of the server.
const STATISTICS: &str = "/sys/kernel/debug/kvm";
/// Has the kernel take the time of BPF programs.
const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Directed yields of vCPUs: one gives its CPU to another one that is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Yields {
    /// How many were asked for.
    pub tried: u64,
    /// How many the scheduler granted.
    pub granted: u64,
}

impl Yields {
    /// Since the kernel started, of the VMs that there are.
    pub fn read() -> Result<Self> {
        let read = |name: &str| -> Result<u64> {
            let path = Path::new(STATISTICS).join(name);
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            Ok(text.trim().parse()?)
        };
        Ok(Self { tried: read("directed_yield_attempted")?, granted: read("directed_yield_successful")? })
    }

    /// Since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            tried: self.tried.saturating_sub(before.tried),
            granted: self.granted.saturating_sub(before.granted),
        }
    }
}

/// The BPF programs that a process has loaded, while the kernel takes their time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Programs {
    /// Time in them, nanoseconds.
    pub run_ns: u64,
    /// How often they ran.
    pub runs: u64,
}

impl Programs {
    /// The kernel takes their time from now on, or no more.
    pub fn take_time(on: bool) -> Result<()> {
        fs::write(SWITCH, if on { "1" } else { "0" }).context(SWITCH)
    }

    /// Since they were loaded.
    pub fn read(pid: u32) -> Result<Self> {
        let folder = format!("/proc/{pid}/fdinfo");
        let mut all = Self::default();
        for entry in fs::read_dir(Path::new(&folder)).context(folder.clone())? {
            let info = fs::read_to_string(entry?.path()).unwrap_or_default();
            let number = |field| file_info(&info, field).parse::<u64>().unwrap_or_default();
            all.run_ns += number("run_time_ns");
            all.runs += number("run_cnt");
        }
        ensure!(all.runs > 0, "{folder} says of no program that it ran");
        Ok(all)
    }

    /// Nanoseconds of a run since `before`.
    pub fn ns_per_run(self, before: Self) -> Option<f64> {
        let runs = self.runs.checked_sub(before.runs).filter(|runs| *runs > 0)?;
        Some(self.run_ns.saturating_sub(before.run_ns) as f64 / runs as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_the_mean_of_the_time_since() {
        let of = |run_ns, runs| Programs { run_ns, runs };
        assert_eq!(of(900, 5).ns_per_run(of(100, 1)), Some(200.0));
        assert_eq!(of(900, 5).ns_per_run(of(900, 5)), None);
        let yields = |tried, granted| Yields { tried, granted };
        assert_eq!(yields(9, 4).since(yields(5, 1)), yields(4, 3));
    }
}
