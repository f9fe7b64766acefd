//! What a guest's own work costs with vnuma attached and nothing changing, and without (XPV, section 5.2): by the lab's
//! counters of the VM's vCPU threads, never by time. Both sides take turns in one VM.

use crate::work::Kind;
use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;
use vnuma_bench_figures::stats::median;
use vnuma_scenario::{Process, Vm, output, vnumactl, vnumad};

const PROGRAM: &str = "/root/bench-topology";
/// Name, vCPUs, memory: a VM that fits on the server's CPUs, and one with twice as many vCPUs.
const VMS: [(&str, &str, &str); 2] = [("small", "2", "384M"), ("big", "6", "1G")];

/// What starting vnumad and attaching stirred up has settled.
const SETTLE: Duration = Duration::from_secs(3);

#[derive(clap::Args)]
pub struct Arguments {
    /// The driver for lab-vm's usual kernel
    #[arg(long)]
    driver: String,
    /// Turns of each side
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Modelled cycles of one kind of work in one VM.
#[derive(Serialize)]
struct Sides {
    /// Median with by median without, less one.
    overhead: f64,
    without_cycles: Vec<f64>,
    with_cycles: Vec<f64>,
}

#[derive(Serialize)]
struct Report {
    /// The largest of all.
    overhead_no_change: f64,
    vms: BTreeMap<String, BTreeMap<String, Sides>>,
}

/// Prints the report.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut vms = BTreeMap::new();
    for (name, vcpus, memory) in VMS {
        vms.insert(name.to_owned(), of_vm(name, vcpus, memory, arguments)?);
    }
    let all = vms.values().flat_map(BTreeMap::values).map(|sides: &Sides| sides.overhead);
    let report = Report { overhead_no_change: all.fold(f64::NEG_INFINITY, f64::max), vms };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

fn of_vm(name: &str, vcpus: &str, memory: &str, arguments: &Arguments) -> Result<BTreeMap<String, Sides>> {
    let shape = ["--nodes", "2", "--vcpus", vcpus, "--memory", memory].map(str::to_owned);
    let vm = Vm::start(name, &shape)?;
    vm.put(&arguments.driver, "/root/vnuma.ko")?;
    vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
    // It starts to scan a process after a second of its run time, which is how long some of the work takes: whether it
    // does would be a matter of chance, and of a tenth of the cycles.
    vm.exec(&["sh", "-c", "echo 0 > /proc/sys/kernel/numa_balancing"])?;
    let mut runs: BTreeMap<String, [Vec<f64>; 2]> = BTreeMap::new();
    let mut add = |side: usize, cycles: BTreeMap<String, Vec<f64>>| {
        cycles.into_iter().for_each(|(kind, cycles)| runs.entry(kind).or_default()[side].extend(cycles));
    };
    let mut attached = None;
    for round in 0..arguments.rounds {
        // Each side comes first in every other round, so that what drifts favours neither.
        for side in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            match (side, attached.take()) {
                (0, Some(daemon)) => detach(&vm, daemon)?,
                (1, None) => attached = Some(attach(&vm)?),
                (_, as_before) => attached = as_before,
            }
            sleep(SETTLE);
            add(side, of_each_kind(&vm)?);
        }
        eprintln!("{name} VM: round {} of {}", round + 1, arguments.rounds);
    }
    runs.into_iter().map(|(kind, sides)| Ok((kind, compare(sides)?))).collect()
}

fn attach(vm: &Vm) -> Result<Process> {
    let daemon = vnumad(&[])?;
    vm.exec(&["insmod", "/root/vnuma.ko"])?;
    vm.attach()?;
    vm.await_driver()?;
    Ok(daemon)
}

fn detach(vm: &Vm, daemon: Process) -> Result<()> {
    vnumactl(&["detach", &vm.name])?;
    vm.exec(&["rmmod", "vnuma"])?;
    drop(daemon);
    Ok(())
}

/// Cycles of each run, by kind of work.
fn of_each_kind(vm: &Vm) -> Result<BTreeMap<String, Vec<f64>>> {
    // Not counted: memory that the VM has not had before costs more, and caches hold what was done before.
    work(vm, &name(Kind::Stream)?)?;
    let of_kind = |&kind: &Kind| {
        let name = name(kind)?;
        let cycles: Result<_> = (0..kind.runs()).map(|_| work(vm, &name)).collect();
        Ok((name, cycles?))
    };
    Kind::value_variants().iter().map(of_kind).collect()
}

fn name(kind: Kind) -> Result<String> {
    let value = kind.to_possible_value().context("a kind of work without a name")?;
    Ok(value.get_name().to_owned())
}

fn compare([without_cycles, with_cycles]: [Vec<f64>; 2]) -> Result<Sides> {
    let middle = |cycles: &[f64]| median(cycles.iter().copied()).context("no run was counted");
    let overhead = middle(&with_cycles)? / middle(&without_cycles)? - 1.0;
    Ok(Sides { overhead, without_cycles, with_cycles })
}

/// Modelled cycles of the VM's vCPUs while the guest does a fixed amount of work.
fn work(vm: &Vm, kind: &str) -> Result<f64> {
    let counted = ["--vm", &vm.name, "--json", "/root/count.json", "--"];
    let command = ["lab-vm", "exec", &vm.name, "--", PROGRAM, "work", kind];
    let text = output("lab-count", &[&counted[..], &command].concat())?;
    let report = std::fs::read_to_string("/root/count.json").with_context(|| text.clone())?;
    let report: Value = serde_json::from_str(&report)?;
    report["modelled"][0]["cycles"]["total"].as_f64().with_context(|| format!("lab-count: {report}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overhead_is_of_medians() {
        let sides = compare([vec![100.0, 300.0, 200.0], vec![202.0, 1000.0, 90.0]]).expect("runs");
        assert!((sides.overhead - 0.01).abs() < 1e-9, "{}", sides.overhead);
        assert!(compare([vec![1.0], vec![]]).is_err());
    }
}
