//! The peer that needs no driver: a vCPU is unplugged and plugged again on the right guest node, timed as the moves are.

use crate::clock::{Line, Moment, monotonic_ns};
use crate::figures::Percentiles;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::{Duration, Instant};
use vnuma_api::{DEFAULT_SOCKET, ReplugRequest, Replugged, operation};
use vnuma_client::{Error, blocking::Client};
use vnuma_scenario::{HANG_LIMIT, Lines, Nodes, Vm, tsc_offset, vcpu_thread, vnumad};

const PROGRAM: &str = "/root/bench-topology";
const CPUS: &str = "/sys/devices/system/cpu";

#[derive(clap::Args)]
pub struct Arguments {
    /// Kernel of the guest, as lab-vm takes it
    #[arg(long)]
    kernel: String,
    /// Moves
    #[arg(long, default_value_t = 8)]
    moves: usize,
}

/// Prints `{"acpi_replug_latency_ms": _}`: from the beginning of the system call that moves a vCPU to the guest's
/// own list of the node having another CPU.
pub fn run(arguments: &Arguments) -> Result<()> {
    let nodes = Nodes::read()?;
    let _daemon = vnumad(&[])?;
    let mut shape = crate::moves::shape(&arguments.kernel)?;
    shape.push("--spare-slots".to_owned());
    let vm = Vm::start("spare", &shape)?;
    vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
    vm.await_found()?;
    let offset = tsc_offset(&vm)?;
    // Guest node 0 has CPU 0, node 1 has CPUs 1 and 2.
    let (mut vcpu, mut latencies) = (2, Vec::new());
    for number in 0..arguments.moves {
        let (new, ns) =
            replug(&vm, offset, vcpu, number as u32 % 2, &nodes).with_context(|| format!("move {number}"))?;
        eprintln!("replug {} of {}: {:.0} ms", number + 1, arguments.moves, ns / 1e6);
        latencies.push(ns);
        vcpu = new;
    }
    println!("{}", json!({"acpi_replug_latency_ms": Percentiles::of_ns(latencies.into_iter())}));
    Ok(())
}

/// Moves a vCPU to a host node and replugs it as soon as vnumad has noticed; its new APIC id, and nanoseconds until the guest
/// shows it.
fn replug(vm: &Vm, offset: u64, vcpu: u64, node: u32, nodes: &Nodes) -> Result<(u64, f64)> {
    // On CPU 0, which stays: the time stamp counter of one that is plugged in may have another offset.
    let mut waiter = vm.spawn(&["taskset", "-c", "0", PROGRAM, "await-cpu", "--node", &node.to_string()])?;
    // It runs before anything changes.
    std::thread::sleep(std::time::Duration::from_secs(1));
    let cpus = nodes.cpus(node).with_context(|| format!("no node {node}"))?;
    let mut set = nix::sched::CpuSet::new();
    cpus.iter().try_for_each(|cpu| set.set(cpu as usize))?;
    let tid = vcpu_thread(vm, vcpu)?;
    let (start, moved_ns) = (Moment::now()?, monotonic_ns()?);
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(tid), &set)?;
    let done = replug_when_noticed(&vm.name, vcpu)?;
    let text = Lines::of_process(&mut waiter, "the guest")?.next("await-cpu")?;
    let seen: Moment = serde_json::from_str(&text).with_context(|| format!("await-cpu: {text:?}"))?;
    let host = Line::through(start, Moment::now()?)?;
    let ns = host.between(host.tsc(moved_ns), seen.tsc.wrapping_sub(offset));
    ensure!(ns > 0.0, "the guest saw it before it was moved");
    Ok((done.new_vcpu.into(), ns))
}

/// Asks vnumad itself, as starting a program would take longer than what is timed. vnumad refuses until it has seen that
/// the vCPU runs elsewhere.
fn replug_when_noticed(vm: &str, vcpu: u64) -> Result<Replugged> {
    let (client, end) = (Client::new(DEFAULT_SOCKET, HANG_LIMIT)?, Instant::now() + HANG_LIMIT);
    let input = ReplugRequest { vcpu: vcpu.try_into()? };
    loop {
        match client.ask::<operation::Replug>(vm, &input) {
            Err(Error::Refused(refusal))
                if refusal.message.contains("is on the right guest node already") && Instant::now() < end =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done.with_context(|| format!("replug of {vm}, vCPU {vcpu}")),
        }
    }
}

/// In the guest: waits until a node has other CPUs and prints the [`Moment`]. Brings CPUs online as they are plugged in, in
/// place of the guest's udev, and with less to do: it forks nothing.
pub fn await_cpu(node: u32) -> Result<()> {
    let path = format!("/sys/devices/system/node/node{node}/cpulist");
    let read = || std::fs::read_to_string(&path).with_context(|| path.clone());
    let before = read()?;
    while read()? == before {
        bring_online()?;
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    println!("{}", serde_json::to_string(&Moment::now()?)?);
    Ok(())
}

fn bring_online() -> Result<()> {
    for entry in std::fs::read_dir(CPUS).context(CPUS)? {
        let switch = entry?.path().join("online");
        // Not all have one, and a CPU may go while it is looked at.
        if std::fs::read(&switch).is_ok_and(|state| state.starts_with(b"0")) {
            let _ = std::fs::write(&switch, "1");
        }
    }
    Ok(())
}
