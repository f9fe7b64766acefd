//! What a VM that is moved for ever, and whose guest rings for ever, costs others: XPV's abusive guest (section 5.5), as far as
//! publications go.

use crate::moves::Bench;
use anyhow::{Context, Result};
use serde_json::json;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vnuma_scenario::{Lines, Nodes, Process, Vm, vnumactl, vnumad};

/// Scribbles over its channel and rings every vector, from the lab's tests.
const HOSTILE: &str = "/root/lab-scenario";

#[derive(clap::Args)]
pub struct Arguments {
    /// The driver for lab-vm's usual kernel
    #[arg(long)]
    driver: String,
    /// Moves of the VM whose updates are timed, in each state of the others
    #[arg(long, default_value_t = 15)]
    moves: usize,
}

/// Prints `{"quiet": _, "moved": _, "busy": _, "ringing": _}`: the same VM's updates while two others are idle, while one of
/// them is moved without end, and while the other's guest computes without end, and rings without end.
pub fn run(arguments: &Arguments) -> Result<()> {
    let nodes = Nodes::read()?;
    let daemon = vnumad(&[])?;
    let small = ["--nodes", "2", "--vcpus", "2", "--memory", "384M"].map(str::to_owned);
    let timed = crate::moves::start("timed", "6.12", &arguments.driver)?;
    let (moved, ringing) = (Vm::start("moved", &small)?, Vm::start("ringing", &small)?);
    for vm in [&moved, &ringing] {
        vm.attach()?;
    }
    let mut bench = Bench::start(&timed, Nodes::read()?)?;
    let mut report = serde_json::Map::new();
    report.insert("quiet".into(), part(&mut bench, &daemon, "quiet", arguments.moves, &moved)?);

    let stop = AtomicBool::new(false);
    let count = AtomicU64::new(0);
    let part_moved = std::thread::scope(|scope| {
        let mover = scope.spawn(|| move_for_ever(&moved, &nodes, &stop, &count));
        let start = Instant::now();
        let figures = part(&mut bench, &daemon, "moved", arguments.moves, &moved);
        stop.store(true, Ordering::Relaxed);
        mover.join().expect("no panic")?;
        let mut figures = figures?;
        figures["moves_per_s"] =
            (count.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64()).into();
        anyhow::Ok(figures)
    })?;
    report.insert("moved".into(), part_moved);

    // Ringing keeps a vCPU busy, and with it a CPU of the host; that is not what ringing costs.
    let busy = ringing.spawn(&["sh", "-c", "while :; do :; done"])?;
    report.insert("busy".into(), part(&mut bench, &daemon, "busy", arguments.moves, &moved)?);
    ringing.exec(&["pkill", "-f", "while :"])?;
    drop(busy);

    ringing.put(HOSTILE, HOSTILE)?;
    let mut scribbler = ringing.spawn(&[HOSTILE, "scribble"])?;
    let line = Lines::of_process(&mut scribbler, "the hostile guest")?.next("scribble")?;
    anyhow::ensure!(line.starts_with("scribbling"), "the hostile guest does not ring: {line:?}");
    report.insert("ringing".into(), part(&mut bench, &daemon, "ringing", arguments.moves, &moved)?);
    println!("{}", serde_json::Value::Object(report));
    Ok(())
}

/// Moves of one VM, with what vnumad uses and what it publishes to another VM at the same time.
fn part(
    bench: &mut Bench<'_>,
    daemon: &Process,
    name: &str,
    moves: usize,
    other: &Vm,
) -> Result<serde_json::Value> {
    let (cpu, publications, start) = (daemon.cpu_time()?, publications(other)?, Instant::now());
    let trips = bench.moves(name, moves)?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(json!({
        "update_latency_ms": crate::moves::latencies(&trips)?,
        "daemon_cpu_share": (daemon.cpu_time()? - cpu).as_secs_f64() / seconds,
        "publications_per_s": (self::publications(other)? - publications) as f64 / seconds,
    }))
}

/// One vCPU from node to node, fifty times a second.
fn move_for_ever(vm: &Vm, nodes: &Nodes, stop: &AtomicBool, count: &AtomicU64) -> Result<()> {
    let sets: Vec<_> = nodes
        .with_cpus()
        .take(2)
        .map(|(_, cpus)| {
            let mut set = nix::sched::CpuSet::new();
            cpus.iter().try_for_each(|cpu| set.set(cpu as usize)).map(|()| set)
        })
        .collect::<Result<_, _>>()?;
    let thread = nix::unistd::Pid::from_raw(*vm.threads.first().context("no vCPU")?);
    for set in sets.iter().cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        nix::sched::sched_setaffinity(thread, set)?;
        count.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// How many publications a VM has had.
fn publications(vm: &Vm) -> Result<u64> {
    let shown = vnumactl(&["show", &vm.name])?;
    shown["publication"]["publications"]
        .as_u64()
        .with_context(|| format!("no publication.publications: {shown}"))
}
