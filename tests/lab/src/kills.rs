//! vnumad is killed again and again, at random moments of its work, while vCPUs move: its successor takes the channel
//! over, and the guest ends up with what is true.

use crate::guest::{check, check_kernel_log, detach, equip, listed, taskset, wait_until_seen};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};
use vnuma_random::Rng;
use vnuma_scenario::{HANG_LIMIT, Nodes, Process, Vm, vnumactl, vnumad, wait_for};

const VCPUS: usize = 2;
const RECORDS: &str = "/run/vnuma/channels";
/// vnumad is killed at most so long after a move: publishing takes less.
const MOMENT_MS: usize = 60;
/// After this many kills another VM is started, and stopped after the next kill.
const OTHER_EVERY: usize = 20;

#[derive(clap::Args)]
pub struct Arguments {
    /// How often vnumad is killed
    #[arg(long, default_value_t = 20)]
    kills: usize,
    /// Seed of moves and moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let nodes = Nodes::read()?;
    let hosts: Vec<u32> = nodes.with_cpus().map(|(node, _)| *node).collect();
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "384M"].map(str::to_owned);
    let small = ["--uma", "--vcpus", "1", "--memory", "256M"].map(str::to_owned);
    let mut daemon = Some(vnumad(&[])?);
    let vm = Vm::start("kills", &shape)?;
    equip(&vm)?;
    await_channel(&vm.name, "none")?;
    vnumactl(&["attach", &vm.name])?;
    let mut places = vec![hosts[0], hosts[1]];
    expect(&vm, &places)?;
    let descriptors = open_files(vm.pid)?;

    let mut random = Rng::new(arguments.seed);
    let mut other = None;
    let mut resumed = Vec::new();
    for kill in 0..arguments.kills {
        for _ in 0..=random.index(3) {
            place(&vm, &mut places, &hosts, &nodes, &mut random)?;
        }
        sleep(Duration::from_millis(random.index(MOMENT_MS) as u64));
        // SIGKILL; dropping waits for the end.
        drop(daemon.take());
        if random.index(2) == 0 {
            place(&vm, &mut places, &hosts, &nodes, &mut random)?;
        }
        match kill % OTHER_EVERY {
            1 => other = Some(Vm::start("other", &small)?),
            2 => drop(other.take()),
            _ => {}
        }
        let started = Instant::now();
        daemon = Some(restart(&vm)?);
        resumed.push(started.elapsed());
        expect(&vm, &places).with_context(|| format!("after kill {kill}"))?;
        ensure!(
            listed("other")?.is_some() == other.is_some() || kill % OTHER_EVERY == 1,
            "a stale VM is listed"
        );
        println!("kill {kill}: {places:?} ok, taken over after {} ms", resumed[kill].as_millis());
    }
    check_kernel_log(&vm)?;
    let after = open_files(vm.pid)?;
    ensure!(after <= descriptors, "QEMU has {after} open files, {descriptors} before the kills");
    let records = fs::read_dir(RECORDS).context(RECORDS)?.count();
    ensure!(records == 1, "{records} records in {RECORDS} for one channel");
    detach(&vm)?;
    ensure!(fs::read_dir(RECORDS).context(RECORDS)?.next().is_none(), "a record stays in {RECORDS}");
    resumed.sort_unstable();
    let at = |share: usize| resumed[(resumed.len() * share / 100).min(resumed.len() - 1)].as_millis();
    println!("{} kills, no wrong state; taken over after ms: p50 {} p99 {}", resumed.len(), at(50), at(99));
    Ok(())
}

/// Puts a vCPU somewhere, without vnumad's knowledge.
fn place(vm: &Vm, places: &mut [u32], hosts: &[u32], nodes: &Nodes, random: &mut Rng) -> Result<()> {
    let (vcpu, node) = (random.index(VCPUS), hosts[random.index(hosts.len())]);
    taskset(vm, vcpu, node, nodes)?;
    places[vcpu] = node;
    Ok(())
}

/// Starts vnumad and waits until it serves the VM's channel.
fn restart(vm: &Vm) -> Result<Process> {
    let daemon = vnumad(&[])?;
    await_channel(&vm.name, "attached")?;
    ensure!(Path::new(&format!("/proc/{}", vm.pid)).exists(), "QEMU has ended");
    Ok(daemon)
}

fn await_channel(name: &str, state: &str) -> Result<()> {
    let mut last = None;
    wait_for(&format!("the channel of {name} to be {state}"), HANG_LIMIT, || {
        last = listed(name)?.map(|vm| vm["channel"].clone());
        Ok(last.as_ref().is_some_and(|channel| channel == state))
    })
    .with_context(|| format!("the channel is {last:?}"))
}

fn expect(vm: &Vm, places: &[u32]) -> Result<()> {
    let seen: Vec<_> = places.iter().map(|&node| (u64::from(node), u64::from(node), "true")).collect();
    wait_until_seen(&vm.name, &seen)?;
    check(vm, &places.iter().map(|&node| u64::from(node)).collect::<Vec<_>>())
}

fn open_files(pid: i32) -> Result<usize> {
    let path = format!("/proc/{pid}/fd");
    Ok(fs::read_dir(&path).context(path)?.count())
}
