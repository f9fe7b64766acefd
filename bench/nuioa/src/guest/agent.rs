//! vnuma-guest in the guest of `nuioa-aware`: its rules, and what it has done.

use super::{Cpus, pci, set_threads};
use anyhow::{Context, Result};
use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
    time::Duration,
};
use vnuma_model::CpuSet;
use vnuma_scenario::wait_for;

const RULES: &str = "/root/vnuma-guest.toml";
/// What vnuma-guest says.
const LOG: &str = "/root/vnuma-guest.log";
/// Lines of it that are kept of a workload.
const LINES: usize = 32;
pub const PROGRAM: &str = "/root/vnuma-guest";
/// Programs that use a device by the kernel, of which no file or library says so.
const USERS: [(&str, Device); 3] =
    [("fio", Device::Disk), ("sockperf", Device::Card), ("memcached", Device::Card)];
const HANG: Duration = Duration::from_secs(120);

#[derive(Clone, Copy)]
enum Device {
    Disk,
    Card,
}

/// Its name, as the kernel shows it.
const COMMAND: &str = "vnuma-guest";

/// Keeps vnuma-guest on a CPU that the workload is not on: its work is not the workload's. The server is slower than its clock, so
/// that a look each second takes some percent of a CPU.
pub fn keep_on(cpu: usize) -> Result<()> {
    let mut set = Cpus::new();
    set.set(cpu).with_context(|| format!("CPU {cpu}"))?;
    // It starts when the guest knows where its devices are.
    wait_for(&format!("{COMMAND} to run"), HANG, || {
        let mut found = false;
        for entry in fs::read_dir("/proc").context("/proc")? {
            let process = entry?.path();
            if fs::read_to_string(process.join("comm")).is_ok_and(|name| name.trim() == COMMAND) {
                set_threads(&process.join("task").display().to_string(), &set)?;
                found = true;
            }
        }
        Ok(found)
    })
}

/// Writes the rules, and becomes vnuma-guest, on a CPU that is not of the devices' node.
pub fn run() -> Result<()> {
    let (disks, cards) = (pci::disks()?, pci::cards()?);
    fs::write(RULES, rules(pci::address(&disks[0])?, pci::address(&cards[0])?)).context(RULES)?;
    let mut home = None;
    wait_for("the guest to be told where its devices are", HANG, || {
        home = usize::try_from(pci::node(&cards[0])?).ok();
        Ok(home.is_some())
    })?;
    let nodes = super::nodes()?;
    let others = nodes.iter().enumerate().filter(|(node, _)| Some(*node) != home);
    let cpu = others.flat_map(|(_, cpus)| cpus).next().context("all CPUs are on the devices' node")?;
    let log = File::create(LOG).context(LOG)?;
    let mut command = Command::new("taskset");
    command.args(["-c", &cpu.to_string(), PROGRAM, "run", "--rules", RULES]).stderr(log);
    Err(command.exec()).context(PROGRAM)
}

/// A node has one CPU, which a workload may use as a whole, and which never falls idle while it is measured: that is no reason to let go
/// of the workload.
fn rules(disk: &str, card: &str) -> String {
    let mut text = "interval_s = 1\ncpu_reserve_percent = 0\nrelease_after = 1000\n".to_owned();
    for (program, device) in USERS {
        let device = match device {
            Device::Disk => disk,
            Device::Card => card,
        };
        text += &format!("\n[[workload]]\nprogram = \"{program}\"\ndevice = \"{device}\"\n");
    }
    text
}

/// Waits until all threads of a process may run on these CPUs only, and interrupts of the device, if any are named, come there.
pub fn await_placed(process: u32, cpus: &CpuSet, interrupts_of: Option<&Path>) -> Result<()> {
    let mut found = Vec::new();
    wait_for(&format!("vnuma-guest to place process {process} on {cpus}"), HANG, || {
        found = affinities(process)?;
        for interrupt in interrupts_of.map_or_else(|| Ok(Vec::new()), pci::interrupts)? {
            let path = format!("/proc/irq/{interrupt}/smp_affinity_list");
            found.push(fs::read_to_string(&path).context(path)?);
        }
        within(&found, cpus)
    })
    .with_context(|| format!("it may run on {found:?}"))
}

/// What vnuma-guest has said of a process, and of the interrupts that it keeps; at last, where the threads may run now.
pub fn told(process: u32) -> Result<Vec<String>> {
    let log = fs::read_to_string(LOG).context(LOG)?;
    let mut lines = lines_of(process, &log);
    lines.push(format!("its threads may run on CPUs {}", affinities(process)?.join(" ")));
    Ok(lines)
}

fn lines_of(process: u32, log: &str) -> Vec<String> {
    let lines = log.lines().filter_map(|line| line.strip_prefix("vnuma-guest: "));
    let of_it = format!("PID {process}:");
    let all: Vec<&str> =
        lines.filter(|line| line.starts_with(&of_it) || line.starts_with("interrupt ")).collect();
    all[all.len().saturating_sub(LINES)..].iter().map(|&line| line.to_owned()).collect()
}

fn affinities(process: u32) -> Result<Vec<String>> {
    let directory = format!("/proc/{process}/task");
    let mut lists = Vec::new();
    for entry in fs::read_dir(&directory).with_context(|| directory.clone())? {
        // A thread may have ended since the list was read.
        let status = fs::read_to_string(entry?.path().join("status")).unwrap_or_default();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        lists.extend(list.map(|list| list.trim().to_owned()));
    }
    Ok(lists)
}

fn within(lists: &[String], cpus: &CpuSet) -> Result<bool> {
    for list in lists {
        let list: CpuSet = list.trim().parse().with_context(|| format!("CPUs {list:?}"))?;
        if !list.is_subset(cpus) {
            return Ok(false);
        }
    }
    Ok(!lists.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_placed_when_all_its_threads_are() {
        let cpus: CpuSet = "1,3".parse().unwrap();
        let within =
            |lists: &[&str]| within(&lists.iter().map(|&list| list.to_owned()).collect::<Vec<_>>(), &cpus);
        assert!(within(&["1\n", "1,3"]).unwrap());
        assert!(!within(&["1", "0-1"]).unwrap());
        assert!(!within(&[]).unwrap(), "it has ended");
        assert!(within(&["x"]).is_err());
    }

    #[test]
    fn what_is_told_of_a_process_is_its_own() {
        let log = "vnuma-guest: PID 7: placed on node 1\nvnuma-guest: PID 77: released\n\
                   vnuma-guest: interrupt 30: CPUs 1\nother: PID 7: x\nvnuma-guest: PID 7: released\n";
        let told = ["PID 7: placed on node 1", "interrupt 30: CPUs 1", "PID 7: released"];
        assert_eq!(lines_of(7, log), told);
        let long = (0..100).map(|line| format!("vnuma-guest: PID 7: {line}\n")).collect::<String>();
        let last = lines_of(7, &long);
        assert_eq!((last.len(), last[LINES - 1].as_str()), (LINES, "PID 7: 99"));
    }

    #[test]
    fn rules_name_the_device_of_each_program() {
        let text = rules("0000:03:00.0", "0000:01:00.0");
        for (program, device) in [("fio", "0000:03:00.0"), ("memcached", "0000:01:00.0")] {
            assert!(text.contains(&format!("program = \"{program}\"\ndevice = \"{device}\"\n")), "{text}");
        }
    }
}
