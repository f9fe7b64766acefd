//! A VM under `vprobe`: a busy vCPU on the wrong node is taken to its memory, within the CPUs that its operator allows, and
//! these are given back whatever becomes of vnumad. The server has no PMU, so that the place of the VM's pages stands in for
//! what a PMU would count.

use crate::guest::{expect_check, listed, wait_until_listed};
use crate::{memory, others::Others, policy_scx, readings};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use vnuma_scenario::{HANG_LIMIT, Nodes, Process, Vm, output, vnumactl, vnumad, wait_for};

pub const CONFIGURATION: &str = "/root/policy.toml";
const PERIOD: &str = "[policy]\nperiod_ms = 300\n";
const RECORDS: &str = "/run/vnuma/channels";
pub const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
pub const NAME: &str = "hungry";
/// CPUs that the operator allows: of both nodes of the server `2n4c`. VMs do not run on CPU 0.
pub const OPERATORS: &str = "1-3";
/// The node of its memory, and its CPUs.
pub const MEMORY: u64 = 1;
pub const NEAR: &str = "2-3";
/// A CPU of the other node.
pub const FAR: &str = "1";
/// The kernel's load balancer may take the vCPU to its memory before the policy does.
const ATTEMPTS: usize = 5;

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    ensure!(nodes.cpus(1).is_some_and(|cpus| cpus.to_string() == NEAR), "the server is not a 2n4c");
    // It would move the pages to the vCPU.
    fs::write(BALANCING, "0").context(BALANCING)?;
    fs::write(CONFIGURATION, PERIOD).context(CONFIGURATION)?;
    let vm = start_near(NAME)?;
    let others = Others::new(&vm)?;
    let busy = vm.spawn(&["sh", "-c", "dd if=/dev/zero of=/dev/null bs=8M"])?;
    let mut daemon = start()?;
    wait_until_listed(NAME)?;
    expect_check(None, "counters", "none", "reduced")?;
    ensure!(vnumactl(&["policy", NAME])?["policy"] == "off", "the policy is not off by default");

    readings::compare(vm.pid, vm.threads[0])?;
    goes_to_its_memory(&vm)?;
    expect_check(None, "readings", "bpf", "best")?;
    others.wait_until_near()?;
    println!("main loop, workers and vhost have followed it");
    vnumactl(&["policy", NAME, "--set", "off"])?;
    expect_mask(&vm, OPERATORS).context("switched off")?;
    others.expect_free().context("switched off")?;
    ensure!(!record(&vm).exists(), "a record of masks stays: {}", record(&vm).display());
    println!("switched off: the operator's CPUs are back");

    set_and_wait(&vm)?;
    others.wait_until_near()?;
    drop(daemon);
    expect_mask(&vm, NEAR).context("after SIGKILL")?;
    ensure!(record(&vm).exists(), "no record of masks: {}", record(&vm).display());
    // This one reads files.
    fs::write(CONFIGURATION, format!("{PERIOD}[observe]\nlocation = \"poll\"\n")).context(CONFIGURATION)?;
    daemon = start()?;
    wait_until_listed(NAME)?;
    fs::write(CONFIGURATION, PERIOD).context(CONFIGURATION)?;
    wait_for_mask(&vm, OPERATORS).context("the next vnumad")?;
    others.wait_until_free().context("the next vnumad")?;
    println!("killed: the next vnumad has given the operator's CPUs back");

    set_and_wait(&vm)?;
    set_mask(&vm, "1-2")?;
    let operators = |shown: &Value| shown["operator_cpus"] == "1-2" && shown["policy_cpus"] == "2";
    wait_for("the operator's new CPUs to be taken over", HANG_LIMIT, || Ok(operators(&first_vcpu()?)))?;
    expect_check(None, "readings", "files", "reduced")?;
    vnumactl(&["policy", NAME, "--set", "off"])?;
    expect_mask(&vm, "1-2").context("set by the operator")?;
    println!("set by the operator meanwhile: taken as the operator's, and kept");

    set_mask(&vm, OPERATORS)?;
    set_and_wait(&vm)?;
    others.wait_until_near()?;
    stop(daemon)?;
    expect_mask(&vm, OPERATORS).context("after SIGTERM")?;
    others.expect_free().context("after SIGTERM")?;
    println!("stopped: vnumad has given the operator's CPUs back");
    memory::run(&vm)?;
    policy_scx::run(vm)?;
    drop(busy);
    Ok(())
}

/// A VM whose memory is on one node, as the threads that touch it first run there.
pub fn start_near(name: &str) -> Result<Vm> {
    let own = std::process::id().to_string();
    output("taskset", &["-p", "-c", NEAR, &own])?;
    let vm = Vm::start(name, &["--uma", "--vcpus", "1", "--memory", "256M"].map(str::to_owned));
    output("taskset", &["-p", "-c", "0-3", &own])?;
    vm
}

pub fn start() -> Result<Process> {
    vnumad(&["--config", CONFIGURATION])
}

/// While it is pinned to one CPU of the wrong node it stays; as soon as it may, it goes to its memory.
fn goes_to_its_memory(vm: &Vm) -> Result<()> {
    for _ in 0..ATTEMPTS {
        set_mask(vm, FAR)?;
        vnumactl(&["policy", NAME, "--set", "vprobe"])?;
        wait_for("the vCPU to be left where it is pinned", HANG_LIMIT, || {
            let shown = first_vcpu()?;
            Ok(shown["standing"] == "pinned" && shown["node"] == 0 && shown["quality"] == "assumed")
        })?;
        expect_mask(vm, FAR)?;
        set_mask(vm, OPERATORS)?;
        wait_until_near(vm)?;
        let last = first_vcpu()?["last"].take();
        if last["from"] == 0 {
            ensure!(last["to"] == MEMORY && last["cause"] == "its memory is there", "the reason: {last}");
            let (before, expected) = (&last["remote_share"], &last["expected_remote_share"]);
            // The rest of its memory is elsewhere if the node was full.
            ensure!(before.as_f64() > Some(0.5) && expected.as_f64() < Some(0.5), "the figures: {last}");
            println!("moved to its memory: remote share {before}, expected {expected}");
            return Ok(());
        }
        println!("the kernel took it there first: {last}");
        vnumactl(&["policy", NAME, "--set", "off"])?;
    }
    bail!("the policy never moved the vCPU, in {ATTEMPTS} attempts")
}

fn set_and_wait(vm: &Vm) -> Result<()> {
    vnumactl(&["policy", NAME, "--set", "vprobe"])?;
    wait_until_near(vm)
}

/// Waits until vnumactl and the kernel show it confined to the node of its memory.
fn wait_until_near(vm: &Vm) -> Result<()> {
    let mut last = Value::Null;
    wait_for("the vCPU to be confined to the node of its memory", HANG_LIMIT, || {
        last = first_vcpu()?;
        Ok(last["policy_cpus"] == NEAR && last["operator_cpus"] == OPERATORS)
    })
    .with_context(|| format!("vnumactl policy shows {last}"))?;
    expect_mask(vm, NEAR)?;
    let node = || Ok(listed(NAME)?.context("not listed")?["vcpus"][0]["host_node"] == MEMORY);
    wait_for("the vCPU to be seen there", HANG_LIMIT, node)
}

pub fn first_vcpu() -> Result<Value> {
    Ok(vnumactl(&["policy", NAME])?["vcpus"][0].take())
}

/// Somebody who is not vnumad sets the CPUs of the vCPU.
pub fn set_mask(vm: &Vm, cpus: &str) -> Result<()> {
    output("taskset", &["-p", "-c", cpus, &vm.threads[0].to_string()]).map(drop)
}

/// CPUs of the vCPU, as the kernel shows them.
fn mask(vm: &Vm) -> Result<String> {
    let path = format!("/proc/{}/task/{}/status", vm.pid, vm.threads[0]);
    let status = fs::read_to_string(&path).with_context(|| path.clone())?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    Ok(list.with_context(|| format!("{path}: no Cpus_allowed_list"))?.trim().to_owned())
}

pub fn expect_mask(vm: &Vm, expected: &str) -> Result<()> {
    let found = mask(vm)?;
    ensure!(found == expected, "the vCPU may run on {found}, expected {expected}");
    Ok(())
}

pub fn wait_for_mask(vm: &Vm, expected: &str) -> Result<()> {
    wait_for(&format!("the vCPU to have the CPUs {expected}"), HANG_LIMIT, || Ok(mask(vm)? == expected))
}

fn record(vm: &Vm) -> std::path::PathBuf {
    Path::new(RECORDS).join(format!("{}.masks", vm.pid))
}

/// Is the operator's mask of the vCPU recorded? Those of other threads are in the same file.
pub fn is_recorded(vm: &Vm) -> bool {
    fs::read_to_string(record(vm)).is_ok_and(|text| text.contains(&format!("\"{}\":", vm.threads[0])))
}

/// Stops vnumad in order.
fn stop(mut daemon: Process) -> Result<()> {
    let pid = daemon.0.id().to_string();
    let status = Command::new("kill").args(["-TERM", &pid]).status().context("kill")?;
    ensure!(status.success(), "kill -TERM {pid}: {status}");
    daemon.ended("vnumad").map(drop)
}
