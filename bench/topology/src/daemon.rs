//! How often vnumad wakes up while eight attached VMs run and nothing changes.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};
use vnuma_scenario::{Vm, vnumactl, vnumad};

/// What starting and attaching stirred up has settled.
const SETTLE: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
pub struct Arguments {
    /// How many VMs, of two vCPUs each
    #[arg(long, default_value_t = 8)]
    vms: usize,
    /// For how long
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// Prints `{"daemon_wakeups_per_s": _, ...}`.
pub fn run(arguments: &Arguments) -> Result<()> {
    let daemon = vnumad(&[])?;
    let mut vms = Vec::new();
    for number in 0..arguments.vms {
        let name = format!("small{number}");
        let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "256M"];
        let vm = Vm::start(&name, &shape.map(str::to_owned))?;
        vm.attach()?;
        vms.push(vm);
        eprintln!("{} of {} VMs attached", number + 1, arguments.vms);
    }
    std::thread::sleep(SETTLE);
    let pid = daemon.0.id();
    let (before, start) = (switches(pid)?, Instant::now());
    std::thread::sleep(Duration::from_secs(arguments.seconds));
    let (after, elapsed) = (switches(pid)?, start.elapsed().as_secs_f64());
    let by_thread = per_second(&before, &after, elapsed);
    let answer = serde_json::json!({
        "daemon_wakeups_per_s": by_thread.values().sum::<f64>(),
        "by_thread": by_thread,
        "vms": arguments.vms,
        "seconds": elapsed,
        "location_source": vnumactl(&["daemon"])?["location_source"],
    });
    println!("{answer}");
    Ok(())
}

/// How often each thread of a process has gone to sleep, by its name and number: each time it had to be woken up before.
fn switches(pid: u32) -> Result<BTreeMap<(String, String), u64>> {
    let directory = format!("/proc/{pid}/task");
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(&directory).with_context(|| directory.clone())? {
        let entry = entry?;
        let path = entry.path().join("status");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            value.with_context(|| format!("{}: no {name}", path.display()))
        };
        let thread = (field("Name:")?.to_owned(), entry.file_name().to_string_lossy().into_owned());
        all.insert(thread, field("voluntary_ctxt_switches:")?.parse()?);
    }
    Ok(all)
}

/// Wake-ups a second of the threads of each name. A thread that began in this time counts from its beginning.
fn per_second(
    before: &BTreeMap<(String, String), u64>,
    after: &BTreeMap<(String, String), u64>,
    seconds: f64,
) -> BTreeMap<String, f64> {
    let mut rates = BTreeMap::new();
    for (thread, switches) in after {
        let more = switches - before.get(thread).unwrap_or(&0);
        *rates.entry(thread.0.clone()).or_default() += more as f64 / seconds;
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wake_ups_are_added_up_by_name() {
        let thread = |name: &str, tid: &str, switches| ((name.to_owned(), tid.to_owned()), switches);
        let before = BTreeMap::from([thread("qmp", "1", 10), thread("core", "2", 5)]);
        let after = BTreeMap::from([thread("qmp", "1", 14), thread("qmp", "3", 2), thread("core", "2", 5)]);
        let rates = per_second(&before, &after, 2.0);
        assert_eq!(rates, BTreeMap::from([("qmp".to_owned(), 3.0), ("core".to_owned(), 0.0)]));
    }
}
