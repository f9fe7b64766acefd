//! Moves vCPU threads between host nodes, as an operator (taskset) and as the load
//! balancer (load beside the thread) would. A process of its own that talks to
//! nobody: it finds the threads by their name.
//!
//! Every VM gets the same moves at the same time, so that the VMs can be compared.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vnuma_model::CpuSet;
use vnuma_random::Rng;
use vnuma_scenario::{home_nodes, vcpu_threads};

#[derive(clap::Args)]
pub struct Arguments {
    /// Process ids of the VMs' QEMUs, separated by commas
    #[arg(long, value_delimiter = ',', required = true)]
    pids: Vec<i32>,
    /// Stop after this many seconds
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Milliseconds between two moves
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    period_ms: u64,
    /// Seed of the sequence of moves
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Leave no move to the load balancer, and so make no load beside the threads
    #[arg(long)]
    without_load: bool,
}

/// One in this many moves is left to the load balancer.
const BALANCER_SHARE: u64 = 4;

pub fn run(arguments: &Arguments) -> Result<()> {
    let nodes: Vec<CpuSet> = home_nodes(Path::new("/"))?.into_iter().map(|(_, cpus)| cpus).collect();
    ensure!(nodes.len() >= 2, "a host with {} nodes has no other node to move to", nodes.len());
    let vms = arguments.pids.iter().map(|&pid| vcpu_threads(pid)).collect::<Result<Vec<_>>>()?;
    let vcpus = vms.iter().map(Vec::len).min().context("no VM")?;
    ensure!(vcpus > 0, "a VM has no vCPU threads");
    // vCPU -> position of the node it was put on last; unknown at first.
    let mut places: Vec<Option<usize>> = vec![None; vcpus];
    let mut random = Rng::new(arguments.seed);
    let end = Instant::now() + Duration::from_secs(arguments.seconds);
    let mut next = Instant::now();
    while next < end {
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let vcpu = random.index(vcpus);
        let target = other_than(places[vcpu], nodes.len(), &mut random);
        let balancer = random.index(BALANCER_SHARE as usize) == 0 && !arguments.without_load;
        let load = match places[vcpu].filter(|_| balancer) {
            Some(from) => {
                let both: CpuSet = nodes[from].iter().chain(nodes[target].iter()).collect();
                for vm in &vms {
                    taskset(vm[vcpu], &both)?;
                }
                Some(Load::start(&nodes[from])?)
            }
            None => {
                for vm in &vms {
                    taskset(vm[vcpu], &nodes[target])?;
                }
                None
            }
        };
        places[vcpu] = Some(target);
        next += Duration::from_millis(arguments.period_ms);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        // Else the balancer would go on to move it between both nodes, and the number of changes would be left to chance.
        if load.is_some() {
            for vm in &vms {
                taskset(vm[vcpu], &nodes[target])?;
            }
        }
        drop(load);
    }
    Ok(())
}

fn other_than(place: Option<usize>, nodes: usize, random: &mut Rng) -> usize {
    match place {
        Some(place) => (place + 1 + random.index(nodes - 1)) % nodes,
        None => random.index(nodes),
    }
}

fn taskset(tid: i32, cpus: &CpuSet) -> Result<()> {
    let (cpus, tid) = (cpus.to_string(), tid.to_string());
    let output = Command::new("taskset").args(["-p", "-c", &cpus, &tid]).output().context("taskset")?;
    let message = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "taskset -p -c {cpus} {tid}: {}", message.trim());
    Ok(())
}

/// Busy loops on every CPU of a node.
struct Load(Vec<Child>);

impl Load {
    fn start(cpus: &CpuSet) -> Result<Self> {
        let mut load = Self(Vec::new());
        for cpu in cpus.iter() {
            let command = ["-c", &cpu.to_string(), "sh", "-c", "while :; do :; done"];
            load.0
                .push(Command::new("taskset").args(command).stdin(Stdio::null()).spawn().context("taskset")?);
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It does not end by itself. An error could not be reported here.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_always_leads_to_another_node() {
        let mut random = Rng::new(7);
        let mut seen = [false; 4];
        for step in 0..1000 {
            let place = step % 4;
            let target = other_than(Some(place), 4, &mut random);
            assert_ne!(target, place);
            seen[target] = true;
        }
        assert_eq!(seen, [true; 4], "every node is reached");
    }
}
