//! A guest without the driver sees where its vCPUs are, by replugging them.

use crate::guest::{check_kernel_log, detach, expect_check, listed, wait_until_listed};
use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::process::Command;
use std::time::{Duration, Instant};
use vnuma_scenario::{
    HANG_LIMIT, Monitor, Nodes, Process, Vm, bring_online, output, replug_when_noticed, vcpu_thread,
    vnumactl, vnumad, wait_for,
};

/// Between host nodes 0 and 1.
const MOVES: usize = 6;
/// Of a vnumad that replugs of itself.
const CONFIG: &str = "/root/replug.toml";

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    let daemon = vnumad(&[])?;
    let arguments = ["--nodes", "2", "--vcpus", "3", "--spare-slots"].map(str::to_owned);
    let vm = Vm::start("spare", &arguments)?;
    wait_until_listed(&vm.name)?;
    doctor(&vm)?;
    expect_refusal(&["replug", &vm.name, "--vcpu", "0"], "cannot be replugged")?;
    expect_refusal(&["replug", &vm.name, "--vcpu", "2"], "is on the right guest node already")?;
    let _udev = bring_online(&vm)?;

    // Guest node 0 has CPU 0, node 1 has CPUs 1 and 2.
    let mut vcpu = 2;
    let mut latencies = Vec::new();
    for number in 0..MOVES {
        let node = number as u64 % 2;
        let (new, latency) = replug(&vm, vcpu, node, &nodes).with_context(|| format!("move {number}"))?;
        println!("vCPU {vcpu} -> {new}, on guest node {node} after {} ms", latency.as_millis());
        latencies.push(latency.as_millis());
        vcpu = new;
    }
    let vcpu = paused(&vm, vcpu, 1, &nodes)?;
    check_kernel_log(&vm)?;
    latencies.sort_unstable();
    println!(
        "measured in the lab: host change to the guest's new node by ACPI replug, ms: p50 {} max {}",
        latencies[MOVES / 2],
        latencies[MOVES - 1]
    );
    full(&vm, vcpu, &nodes)?;
    detach(&vm)?;
    drop(daemon);
    let vcpu = of_itself(&vm, vcpu, 0, &nodes)?;
    kept(&vm, vcpu, 1, &nodes)
}

/// A paused guest accepts no vCPU: the replug fails and is undone, and is possible again when the guest runs.
fn paused(vm: &Vm, vcpu: u64, home: u64, nodes: &Nodes) -> Result<u64> {
    let mut monitor = Monitor::connect(&vm.monitor())?;
    monitor.execute(&json!({"execute": "stop"}))?;
    let mut last = Ok(());
    wait_for("doctor to name a guest that is paused", HANG_LIMIT, || {
        last = expect_check(Some(&vm.name), "guest", "paused", "reduced");
        Ok(last.is_ok())
    })
    .with_context(|| format!("{last:?}"))?;
    confine(vcpu_thread(vm, vcpu)?, 1 - home, nodes)?;
    let error = match replug_when_noticed(vm, vcpu) {
        Ok(done) => bail!("a paused guest took a vCPU: {done}"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(error.contains("did not take a new vCPU"), "replug of a paused guest: {error}");
    println!("paused: named; {}", error.lines().last().unwrap_or_default());
    monitor.execute(&json!({"execute": "cont"}))?;
    wait_for("the guest to go on, with its three vCPUs", HANG_LIMIT, || {
        let shown = listed(&vm.name)?.context("not listed")?;
        Ok(shown["run_state"] == "running" && shown["vcpus"].as_array().is_some_and(|vcpus| vcpus.len() == 3))
    })?;
    let done = replug_when_noticed(vm, vcpu)?;
    let new = done["new_vcpu"].as_u64().with_context(|| format!("no new_vcpu: {done}"))?;
    check_views(vm, new, 1 - home)?;
    println!("goes on: vCPU {vcpu} -> {new}");
    Ok(new)
}

/// The lesser capability is shown, and what would help.
fn doctor(vm: &Vm) -> Result<()> {
    expect_check(Some(&vm.name), "channel", "replug", "reduced")
}

fn expect_refusal(arguments: &[&str], reason: &str) -> Result<()> {
    let result = Command::new("vnumactl").args(arguments).output()?;
    let error = String::from_utf8_lossy(&result.stderr).into_owned();
    let shown = arguments.join(" ");
    ensure!(!result.status.success() && error.contains(reason), "vnumactl {shown}: no {reason:?} in {error}");
    println!("vnumactl {shown}: {}", error.trim());
    Ok(())
}

/// Confines a vCPU to a host node, and replugs it as soon as vnumad has noticed. Returns its new APIC id and how long it
/// took until the guest's own list of the node had a new CPU.
fn replug(vm: &Vm, vcpu: u64, node: u64, nodes: &Nodes) -> Result<(u64, Duration)> {
    let list = format!("/sys/devices/system/node/node{node}/cpulist");
    let before = vm.exec(&["cat", &list])?.trim().to_owned();
    let watch = format!("until [ \"$(cat {list})\" != \"{before}\" ]; do sleep 0.01; done");
    let mut seen = vm.spawn(&["sh", "-c", &watch])?;
    // It runs before anything changes.
    std::thread::sleep(Duration::from_secs(1));

    let started = Instant::now();
    confine(vcpu_thread(vm, vcpu)?, node, nodes)?;
    let done = replug_when_noticed(vm, vcpu)?;
    await_end(&mut seen)?;
    let latency = started.elapsed();

    let new = done["new_vcpu"].as_u64().with_context(|| format!("no new_vcpu: {done}"))?;
    ensure!(new != vcpu && done["guest_node"] == node, "replug of vCPU {vcpu} to node {node}: {done}");
    check_views(vm, new, node)?;
    Ok((new, latency))
}

fn confine(tid: i32, node: u64, nodes: &Nodes) -> Result<()> {
    let cpus = nodes.cpus(node as u32).with_context(|| format!("the host has no node {node}"))?;
    output("taskset", &["-p", "-c", &cpus.to_string(), &tid.to_string()]).map(drop)
}

fn await_end(process: &mut Process) -> Result<()> {
    let end = Instant::now() + HANG_LIMIT;
    while process.0.try_wait()?.is_none() {
        if Instant::now() > end {
            bail!("the guest shows no new CPU on the node");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// lscpu in the guest and vnumactl agree: as many vCPUs as before, one of them elsewhere, and pinned as it was.
fn check_views(vm: &Vm, new: u64, node: u64) -> Result<()> {
    let expected = if node == 0 { (2, 1) } else { (1, 2) };
    let mut last = String::new();
    wait_for("lscpu to show three CPUs", HANG_LIMIT, || {
        last = vm.exec(&["lscpu", "-p=CPU,NODE"])?;
        let on =
            |node: &str| last.lines().filter(|line| !line.starts_with('#') && line.ends_with(node)).count();
        Ok((on(",0"), on(",1")) == expected)
    })
    .with_context(|| format!("lscpu: {last}"))?;
    let shown = listed(&vm.name)?.context("not listed")?;
    let vcpus = shown["vcpus"].as_array().context("no vcpus")?;
    let moved = vcpus
        .iter()
        .find(|vcpu| vcpu["apic_id"] == new)
        .with_context(|| format!("no vCPU {new}: {shown}"))?;
    ensure!(
        vcpus.len() == 3 && moved["state"] == "true" && moved["pinned"] == true,
        "vnumactl shows {shown}"
    );
    ensure!(moved["host_node"] == node, "its thread is elsewhere: {shown}");
    Ok(())
}

/// Where an operator wants it, a vCPU that stays elsewhere is replugged without being asked for.
fn of_itself(vm: &Vm, vcpu: u64, home: u64, nodes: &Nodes) -> Result<u64> {
    std::fs::write(CONFIG, "[replug]\nafter_s = 2\n").context(CONFIG)?;
    let _daemon = vnumad(&["--config", CONFIG])?;
    wait_until_listed(&vm.name)?;
    confine(vcpu_thread(vm, vcpu)?, 1 - home, nodes)?;
    let (mut new, before) = (None, apic_ids(vm)?);
    wait_for("vnumad to replug the vCPU", HANG_LIMIT, || {
        let now = apic_ids(vm)?;
        new = now.iter().find(|id| !before.contains(id)).copied().filter(|_| !now.contains(&vcpu));
        Ok(new.is_some())
    })?;
    let new = new.context("no new vCPU")?;
    check_views(vm, new, 1 - home)?;
    check_kernel_log(vm)?;
    println!("of itself: vCPU {vcpu} -> {new}");
    Ok(new)
}

fn apic_ids(vm: &Vm) -> Result<Vec<u64>> {
    let shown = listed(&vm.name)?.context("not listed")?;
    let vcpus = shown["vcpus"].as_array().context("no vcpus")?;
    Ok(vcpus.iter().filter_map(|vcpu| vcpu["apic_id"].as_u64()).collect())
}

/// A guest that takes vCPUs and gives none back has one too many then, which is said.
fn kept(vm: &Vm, vcpu: u64, home: u64, nodes: &Nodes) -> Result<()> {
    let _daemon = vnumad(&[])?;
    wait_until_listed(&vm.name)?;
    vm.exec(&["sh", "-c", "echo 0 > /sys/firmware/acpi/hotplug/processor/enabled"])?;
    confine(vcpu_thread(vm, vcpu)?, 1 - home, nodes)?;
    let error = match replug_when_noticed(vm, vcpu) {
        Ok(done) => bail!("a guest that gives none back gave one: {done}"),
        Err(error) => format!("{error:#}"),
    };
    for part in ["the guest refuses to release vCPU", "so both may be plugged"] {
        ensure!(error.contains(part), "no {part:?} in {error}");
    }
    wait_for("four vCPUs", HANG_LIMIT, || Ok(apic_ids(vm)?.len() == 4))?;
    println!("kept: {}", error.lines().last().unwrap_or_default());
    Ok(())
}

/// Without a spare slot nothing is done, and that is said.
fn full(vm: &Vm, vcpu: u64, nodes: &Nodes) -> Result<()> {
    let one = ["--nodes", "2", "--vcpus", "2"].map(str::to_owned);
    let other = Vm::start("full", &one)?;
    wait_until_listed(&other.name)?;
    confine(vcpu_thread(&other, 1)?, 0, nodes)?;
    wait_for("vnumad to notice", HANG_LIMIT, || {
        Ok(listed(&other.name)?.is_some_and(|vm| vm["vcpus"][1]["state"] == "stale"))
    })?;
    expect_refusal(&["replug", &other.name, "--vcpu", "1"], "guest node 0 has no spare slot")?;
    // One that is published through the channel is not replugged as well.
    vnumactl(&["attach", &vm.name])?;
    expect_refusal(
        &["replug", &vm.name, "--vcpu", &vcpu.to_string()],
        "the topology channel is attached, so nothing is replugged",
    )
}
