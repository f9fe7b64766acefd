//! In a guest: sets a workload up, and lets it go and halt as lines on standard input say. What it did is asked for while it is
//! halted, so that operations and cycles are of the same time. Ends with its standard input.

pub mod agent;
mod disk;
mod fio;
mod net;
mod pci;
pub mod process;
mod spin;
mod tools;

use crate::{
    committed::{Cycles, Kind, NEIGHBOUR_MIB, SYSBENCH_MIB, Spot, workload},
    raw::{Done, Ready},
};
use anyhow::{Context, Result, bail, ensure};
use nix::{
    errno::Errno,
    sched::{CpuSet as Cpus, sched_setaffinity},
    unistd::Pid,
};
use spin::Spin;
use std::{
    fs,
    io::{BufRead, Write},
    path::PathBuf,
    str::FromStr,
};
use vnuma_model::CpuSet;

const NODES: &str = "/sys/devices/system/node";

#[derive(clap::Args)]
pub struct Arguments {
    /// Which workload
    workload: String,
    /// Where: `cpu:N`, `node:N`, or `device`
    #[arg(long)]
    spot: Spot,
}

impl FromStr for Spot {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().map_err(|_| format!("\"{text}\" is no number"));
        match text.split_once(':') {
            Some(("cpu", cpu)) => Ok(Self::Cpu(number(cpu)?)),
            Some(("node", node)) => Ok(Self::Node(number(node)?)),
            None if text == "device" => Ok(Self::Device),
            _ => Err(format!("\"{text}\": expected cpu:N, node:N or device")),
        }
    }
}

impl Spot {
    /// As [`Arguments`] takes it.
    pub fn argument(self) -> String {
        match self {
            Self::Cpu(cpu) => format!("cpu:{cpu}"),
            Self::Node(node) => format!("node:{node}"),
            Self::Device => "device".to_owned(),
        }
    }
}

/// Where it runs, and what else there is.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub cpu: usize,
    /// Another CPU.
    pub other: usize,
    /// Guest node of `cpu`.
    pub node: usize,
    /// Its memory is bound to that.
    pub bind: bool,
    /// It is not started there, but anywhere: vnuma-guest is to place it.
    pub by_agent: bool,
}

/// Something that goes and halts.
pub trait Load {
    /// Goes on.
    fn go(&mut self) -> Result<()>;
    /// Stops, and tells what it has done since it went; none if it does not know.
    fn halt(&mut self) -> Result<Option<u64>>;
    /// The process that uses the device.
    fn process(&self) -> Option<u32>;
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let workload =
        workload(&arguments.workload).with_context(|| format!("{}: unknown", arguments.workload))?;
    // Who started it may have been kept on one CPU for an earlier workload.
    let everywhere: Vec<usize> = nodes()?.concat();
    pin(&everywhere)?;
    let device = devices(workload.kind)?;
    let device_node = device.first().map(|device| pci::node(device)).transpose()?;
    // A load without a device is anywhere; that is on the CPU that others leave.
    let place = place(arguments.spot, device_node)?;
    if arguments.spot == Spot::Device {
        agent::keep_on(place.other)?;
    }
    let mut load = start(workload.kind, &device, place)?;
    if let (true, Some(process)) = (place.by_agent, load.process()) {
        let cpus = &nodes()?[place.node];
        // The interrupts of queues of a disk cannot be set, and those of a driver in user space are not used.
        let interrupts = workload.kind.has_peer().then(|| device[0].as_path());
        agent::await_placed(process, &cpus.iter().map(|&cpu| cpu as u32).collect(), interrupts)?;
    }
    if load.process() != Some(std::process::id()) {
        keep_apart(place.other)?;
    }
    say(&Ready { cpu: place.cpu, node: place.node, device_node })?;
    // Where only programs count, it does not matter what the CPU does while they wait.
    let mut spin = (workload.cycles == Cycles::All).then(|| Spin::start(place.cpu)).transpose()?;
    for line in std::io::stdin().lock().lines() {
        let word = line?;
        let works = match word.trim() {
            "go" | "halt" => true,
            "spin" | "rest" => false,
            "why" => {
                say(&why(arguments.spot, place, load.process())?)?;
                continue;
            }
            other => bail!("standard input: {other:?}, expected go, halt, spin, rest or why"),
        };
        if matches!(word.trim(), "go" | "spin") {
            spin.as_mut().map(Spin::go).transpose()?;
            if works {
                load.go()?;
            }
            say(&"goes")?;
        } else {
            let operations = if works { load.halt()? } else { None };
            let spun = spin.as_mut().map(Spin::halt).transpose()?;
            say(&Done { operations, spun })?;
        }
    }
    Ok(())
}

/// Why it runs where it does.
fn why(spot: Spot, place: Place, process: Option<u32>) -> Result<Vec<String>> {
    match process {
        Some(process) if place.by_agent => agent::told(process),
        _ => Ok(vec![format!("started on CPU {}, as {} says", place.cpu, spot.argument())]),
    }
}

/// Those that a workload uses.
fn devices(kind: Kind) -> Result<Vec<PathBuf>> {
    match kind {
        Kind::Disk | Kind::Fio { .. } => pci::disks(),
        Kind::Sysbench => Ok(Vec::new()),
        _ => pci::cards(),
    }
}

fn start(kind: Kind, device: &[PathBuf], place: Place) -> Result<Box<dyn Load>> {
    let transmit = |bytes, burst| tools::Testpmd::start("txonly", &device[..1], place, bytes, burst);
    Ok(match kind {
        Kind::Transmit { bytes, burst } | Kind::BesideNeighbour { bytes, burst } => {
            Box::new(transmit(bytes, burst)?)
        }
        Kind::Forward { bytes, burst } => Box::new(tools::Testpmd::start("io", device, place, bytes, burst)?),
        Kind::Disk => Box::new(disk::Reader::start(&device[0], place)?),
        Kind::Fio { depth } => Box::new(fio::Fio::start(&device[0], place, depth)?),
        Kind::Sysbench => Box::new(tools::Sysbench::start(place.cpu, 1, SYSBENCH_MIB)?),
        Kind::BesideSysbench { bytes, burst, instances } => {
            let first = transmit(bytes, burst)?;
            Box::new(tools::Both(first, tools::Sysbench::start(place.other, instances, NEIGHBOUR_MIB)?))
        }
        Kind::Sockperf { way, pace, bytes } => {
            Box::new(net::Counted::sockperf(&device[0], place, way, pace, bytes)?)
        }
        Kind::Memcached { .. } => Box::new(net::Counted::memcached(&device[0], place)?),
        Kind::Rdma { verb, way, bytes } => Box::new(net::Counted::rdma(&device[0], place, verb, way, bytes)?),
        Kind::RemoteDisk { depth } => Box::new(fio::Fio::remote(&device[0], place, depth)?),
    })
}

/// Keeps the calling thread on these CPUs.
fn pin(cpus: &[usize]) -> Result<()> {
    let mut set = Cpus::new();
    cpus.iter().try_for_each(|&cpu| set.set(cpu)).with_context(|| format!("CPUs {cpus:?}"))?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("CPUs {cpus:?}"))
}

/// Lets all threads of a process run on all CPUs.
fn let_run_anywhere(process: u32) -> Result<()> {
    let mut all = Cpus::new();
    nodes()?.concat().into_iter().try_for_each(|cpu| all.set(cpu)).context("CPUs of the guest")?;
    set_threads(&format!("/proc/{process}/task"), &all)
}

/// What drives the workload stays on another CPU: this program, and the lab's agent, which started it. Else chance decides how much
/// of that is counted with the workload.
fn keep_apart(cpu: usize) -> Result<()> {
    pin(&[cpu])?;
    let mut set = Cpus::new();
    set.set(cpu).with_context(|| format!("CPU {cpu}"))?;
    set_threads(&format!("/proc/{}/task", Pid::parent()), &set)
}

fn set_threads(directory: &str, cpus: &Cpus) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| directory.to_owned())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let thread = name.parse().with_context(|| format!("{directory}: {name:?}"))?;
        match sched_setaffinity(Pid::from_raw(thread), cpus) {
            // It has ended already.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error).with_context(|| format!("{directory}: CPUs of thread {thread}")),
        }
    }
    Ok(())
}

fn say(value: &impl serde::Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(value)?)?;
    Ok(out.flush()?)
}

/// CPUs of each guest node; all on node 0 if the guest has none.
fn nodes() -> Result<Vec<Vec<usize>>> {
    let mut nodes = Vec::new();
    for node in 0.. {
        let path = format!("{NODES}/node{node}/cpulist");
        let Ok(text) = fs::read_to_string(&path) else { break };
        let cpus: CpuSet = text.trim().parse().with_context(|| format!("{path}: {text:?}"))?;
        nodes.push(cpus.iter().map(|cpu| cpu as usize).collect());
    }
    ensure!(!nodes.is_empty(), "{NODES}: no node");
    Ok(nodes)
}

fn place(spot: Spot, device_node: Option<i64>) -> Result<Place> {
    let nodes = nodes()?;
    let on = |node: usize| -> Result<(usize, usize)> {
        let cpus = nodes.get(node).with_context(|| format!("there is no guest node {node}"))?;
        Ok((*cpus.first().with_context(|| format!("guest node {node} has no CPU"))?, node))
    };
    let (cpu, node) = match (spot, device_node) {
        (Spot::Cpu(cpu), _) => {
            let node = nodes.iter().position(|cpus| cpus.contains(&cpu));
            (cpu, node.with_context(|| format!("there is no CPU {cpu}"))?)
        }
        (Spot::Node(node), _) => on(node)?,
        // A load without a device leaves the devices' node to others, if there is another one.
        (Spot::Device, None) => on(nodes.len() - 1)?,
        (Spot::Device, Some(node)) => {
            let known = usize::try_from(node);
            on(known
                .with_context(|| format!("the guest was not told where its device is: numa_node {node}"))?)?
        }
    };
    let other = nodes.iter().flatten().copied().find(|other| *other != cpu).context("only one CPU")?;
    let by_agent = spot == Spot::Device && device_node.is_some();
    Ok(Place { cpu, other, node, bind: !matches!(spot, Spot::Cpu(_)), by_agent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spot_is_what_it_is_written_as() {
        for spot in [Spot::Cpu(3), Spot::Node(0), Spot::Device] {
            assert_eq!(spot.argument().parse(), Ok(spot));
        }
        assert!("cpu:x".parse::<Spot>().unwrap_err().contains("\"x\""));
        assert!("disk".parse::<Spot>().unwrap_err().contains("expected cpu:N"));
    }
}
