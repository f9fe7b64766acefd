//! How often vnumad wakes up while eight attached VMs run and nothing changes.

use anyhow::{Context, Result};
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
    let answer = serde_json::json!({
        "daemon_wakeups_per_s": (after - before) as f64 / elapsed,
        "vms": arguments.vms,
        "seconds": elapsed,
        "location_source": vnumactl(&["daemon"])?["location_source"],
    });
    println!("{answer}");
    Ok(())
}

/// How often the threads of a process have gone to sleep: each had to be woken up before.
fn switches(pid: u32) -> Result<u64> {
    let directory = format!("/proc/{pid}/task");
    let mut sum = 0;
    for entry in fs::read_dir(&directory).with_context(|| directory.clone())? {
        let path = entry?.path().join("status");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sum += line
            .with_context(|| format!("{}: no voluntary_ctxt_switches", path.display()))?
            .trim()
            .parse::<u64>()?;
    }
    Ok(sum)
}
