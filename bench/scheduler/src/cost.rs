//! What an event costs scx_vnuma: the time of its BPF programs by how often they ran, as the kernel counts it. On a server with 8 CPUs, and on
//! one that has as many and room for many more: there the scheduler has queues for all, and is given a topology with all of them.

use crate::{
    committed::{COST, COST_CPUS, COST_SLEEP_US, COST_WINDOW_S, COST_WINDOWS, DEPTH, Scheduler},
    load::Apart,
    raw::{Cost, Line},
    schedulers,
    server::go_first,
};
use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, unshare};
use std::{
    fs::{self, create_dir_all},
    path::Path,
    thread,
    time::Duration,
};
use vnuma_bench_figures::{
    cells::{Cells, Options},
    report::Form,
};
use vnuma_model::CpuSet;
use vnuma_observe::read_host_topology;
use vnuma_scenario::output;
use vnuma_scheduled::{Group, Programs};

const CPUS: &str = "/sys/devices/system/cpu";
const NODES: &str = "/sys/devices/system/node";
/// What is mounted there instead.
const MADE_UP: &str = "/run/bench-scheduler";

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    options: Options,
}

/// Prints a line of JSON for each mode.
pub fn run(arguments: &Arguments) -> Result<()> {
    let online: CpuSet = read(&format!("{CPUS}/online"))?.parse()?;
    let possible: CpuSet = read(&format!("{CPUS}/possible"))?.parse()?;
    let (online, possible) = (online.iter().count(), possible.iter().count());
    if possible > online {
        show_all(possible).context("a topology with all possible CPUs")?;
    }
    let host = read_host_topology(Path::new("/"))?;
    let topology = host.nodes.iter().map(|node| node.cpus.iter().count()).sum();
    ensure!(topology == possible, "the topology has {topology} CPUs of {possible}");
    go_first()?;
    let (windows, length_s) = match arguments.form.smoke {
        true => (1, 1.0),
        false => (COST_WINDOWS, COST_WINDOW_S),
    };
    let mut cells = Cells::printed(&arguments.options)?;
    let modes = if arguments.form.smoke { &Scheduler::JUDGED[..1] } else { &Scheduler::JUDGED };
    for &scheduler in modes {
        let name = format!("cost of an event, {}, {possible} CPUs", scheduler.name());
        cells.measure(&name, || {
            let windows = measure(scheduler, windows, length_s)?;
            let shown = format!("{windows:.0?} (ns, runs)");
            Ok((Line::Cost(Cost { scheduler, cpus: online, possible, topology, windows }), shown))
        })?;
    }
    cells.end()
}

fn read(path: &str) -> Result<String> {
    Ok(fs::read_to_string(path).with_context(|| path.to_owned())?.trim().to_owned())
}

/// From now on this process, and what it starts, sees all possible CPUs online, shared out to the nodes in order. CPUs that are not there
/// have no other files in sysfs.
fn show_all(possible: usize) -> Result<()> {
    let host = read_host_topology(Path::new("/"))?;
    unshare(CloneFlags::CLONE_NEWNS)?;
    output("mount", &["--make-rprivate", "/"])?;
    let made_up = Path::new(MADE_UP);
    create_dir_all(made_up)?;
    let online = made_up.join("online");
    fs::write(&online, format!("0-{}\n", possible - 1))?;
    let nodes = made_up.join("node");
    for (number, cpus) in shared_out(possible, host.nodes.len()).into_iter().enumerate() {
        let (from, to) =
            (Path::new(NODES).join(format!("node{number}")), nodes.join(format!("node{number}")));
        create_dir_all(&to)?;
        for file in ["distance", "meminfo"] {
            fs::write(to.join(file), fs::read(from.join(file))?)?;
        }
        fs::write(to.join("cpulist"), cpus + "\n")?;
    }
    for file in ["online", "possible"] {
        fs::write(nodes.join(file), fs::read(Path::new(NODES).join(file))?)?;
    }
    let bind = |from: &Path, to: &str| output("mount", &["--bind", &from.to_string_lossy(), to]).map(drop);
    bind(&nodes, NODES)?;
    bind(&online, &format!("{CPUS}/online"))
}

/// Lists of so many CPUs for each of so many nodes.
fn shared_out(cpus: usize, nodes: usize) -> Vec<String> {
    let first = |node: usize| node * cpus / nodes;
    (0..nodes).map(|node| format!("{}-{}", first(node), first(node + 1) - 1)).collect()
}

fn measure(scheduler: Scheduler, windows: usize, length_s: f64) -> Result<Vec<(f64, u64)>> {
    let chains = [Group::chain("bench-wake", DEPTH)?, Group::chain("bench-loop", DEPTH)?];
    let lowest = chains.each_ref().map(|chain| chain.first().context("a chain"));
    let [wake, busy] = lowest;
    Programs::take_time(true)?;
    let loaded = schedulers::load(scheduler)?.map_err(anyhow::Error::msg)?;
    let pid = loaded.pid()?;
    // Beside busy CPUs the kernel takes a minute of an emulated server to check a scheduler.
    let guests = [
        Apart::start(wake?, &COST[0], "cost-wake", COST_SLEEP_US)?,
        Apart::start(busy?, &COST[1], "cost-loop", 0)?,
    ];
    guests.iter().try_for_each(|guests| guests.allow(COST_CPUS))?;
    let window = Duration::from_secs_f64(length_s);
    thread::sleep(window / 4);
    let once = || {
        let before = Programs::read(pid)?;
        thread::sleep(window);
        let now = Programs::read(pid)?;
        let cost = now.ns_per_run(before).context("no program ran")?;
        Ok((cost, now.runs - before.runs))
    };
    let found = (0..windows).map(|_| once()).collect::<Result<_>>();
    Programs::take_time(false)?;
    loaded.end()?.map_err(anyhow::Error::msg)?;
    // Before their groups.
    drop(guests);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_cpus_are_shared_out() {
        assert_eq!(shared_out(256, 2), ["0-127", "128-255"]);
        assert_eq!(shared_out(255, 2), ["0-126", "127-254"]);
        assert_eq!(shared_out(8, 1), ["0-7"]);
    }
}
