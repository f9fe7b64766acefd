//! The host changes while vnumad runs: a CPU is plugged and goes offline again, and a node comes up with CPU and memory
//! and goes. vnumad follows, and so do the guests. On a server that can grow (profile `3n4c-hotplug`).

use crate::guest::{check, check_kernel_log, equip, seen, wait_until_listed, wait_until_seen};
use crate::resize::guest_distances;
use crate::states::hardware;
use anyhow::{Context, Result, ensure};
use std::fs;
use vnuma_scenario::{HANG_LIMIT, Nodes, Vm, output, vnumactl, vnumad, wait_for};

pub fn run() -> Result<()> {
    let _daemon = vnumad(&[])?;
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "384M"].map(str::to_owned);
    let vm = Vm::start("grows", &shape)?;
    equip(&vm)?;
    wait_until_listed(&vm.name)?;
    vnumactl(&["attach", &vm.name])?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("after attach")?;
    a_cpu_comes_and_goes_offline(&vm)?;
    a_node_comes_and_goes(&vm)?;
    a_node_without_cpus_is_a_home(&vm)?;
    check_kernel_log(&vm)
}

/// A vCPU follows to a CPU that was not there when vnumad started, and away when it goes offline.
fn a_cpu_comes_and_goes_offline(vm: &Vm) -> Result<()> {
    let cpu = server(&["plug-cpu", "1"])?;
    await_hardware().with_context(|| format!("CPU {cpu} plugged"))?;
    pin(vm, 0, &cpu)?;
    wait_until_seen(&vm.name, &[(1, 1, "true"), (1, 1, "true")]).context("on the plugged CPU")?;
    check(vm, &[1, 1])?;
    println!("plugged: vCPU 0 on CPU {cpu} is on node 1");

    set_online(&cpu, false)?;
    await_hardware().with_context(|| format!("CPU {cpu} offline"))?;
    // The kernel puts the thread elsewhere, where is up to it.
    wait_for("vnumactl to show where the vCPU went", HANG_LIMIT, || {
        let vcpu = seen(&vm.name)?.swap_remove(0);
        Ok(vcpu.host_node == Nodes::read()?.of_cpu(last_cpu(vm.threads[0])?).map(u64::from)
            && vcpu.state == "true")
    })
    .with_context(|| format!("vnumactl shows {:?}", seen(&vm.name)))?;
    pin(vm, 0, "1")?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("back on CPU 1")?;
    set_online(&cpu, true)?;
    await_hardware().with_context(|| format!("CPU {cpu} online again"))?;
    pin(vm, 0, &cpu)?;
    wait_until_seen(&vm.name, &[(1, 1, "true"), (1, 1, "true")]).context("online again")?;
    check(vm, &[1, 1])?;
    pin(vm, 0, "1")?;
    server(&["unplug-cpu", "1"])?;
    await_hardware().with_context(|| format!("CPU {cpu} unplugged"))?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("unplugged")?;
    println!("offline, online, unplugged: vnumad followed");
    Ok(())
}

/// A node that was not there when vnumad started backs no guest node: the nearest guest node is published.
fn a_node_comes_and_goes(vm: &Vm) -> Result<()> {
    ensure!(Nodes::read()?.cpus(2).is_none(), "the server has a node 2 already");
    let cpu = server(&["plug-cpu", "2"])?;
    await_hardware().context("node 2 came up")?;
    pin(vm, 0, &cpu)?;
    // Its distances are 31 to node 0 and 21 to node 1.
    wait_until_seen(&vm.name, &[(2, 1, "approximate"), (1, 1, "true")]).context("on node 2")?;
    check(vm, &[1, 1])?;
    vnumactl(&["move", &vm.name, "--vcpu", "1", "--node", "2"])?;
    wait_until_seen(&vm.name, &[(2, 1, "approximate"), (2, 1, "approximate")]).context("moved to node 2")?;
    let module = server(&["plug-memory", "2", "256M", "--movable"])?;
    await_memory(2, 256 << 10)?;
    println!("node 2 came up: CPU {cpu}, then memory");

    vnumactl(&["move", &vm.name, "--vcpu", "0", "--node", "0"])?;
    vnumactl(&["move", &vm.name, "--vcpu", "1", "--node", "1"])?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("back")?;
    check(vm, &[0, 1])?;
    server(&["unplug-memory", &module])?;
    server(&["unplug-cpu", "2"])?;
    await_hardware().context("node 2 went")?;
    ensure!(Nodes::read()?.cpus(2).is_none(), "node 2 is still online");
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("node 2 went")?;
    println!("node 2 went");
    Ok(())
}

/// Memory without CPUs, as behind CXL, is a home like others: memory goes there, the guest is told how far it is, vCPUs stay.
fn a_node_without_cpus_is_a_home(vm: &Vm) -> Result<()> {
    let module = server(&["plug-memory", "2", "768M", "--movable"])?;
    await_memory(2, 768 << 10)?;
    ensure!(Nodes::read()?.cpus(2).is_none_or(|cpus| cpus.is_empty()), "node 2 has CPUs");
    let before = guest_distances(vm)?;
    let done = vnumactl(&["rehome", &vm.name, "--guest-node", "1", "--node", "2"])?;
    let notes = done["rehome"]["notes"].to_string();
    ensure!(done["rehome"]["state"] == "done" && notes.contains("node 2 has no CPUs"), "{done}");
    ensure!(vnumactl(&["memory", &vm.name])?["nodes"][1]["home"] == 2, "the home of guest node 1");
    let told = guest_distances(vm)?;
    // 31 from node 0 to node 2, 21 from node 0 to node 1.
    ensure!(
        before == "10 21\n21 10\n" && told == "10 31\n31 10\n",
        "distances were {before:?}, are {told:?}"
    );
    ensure!(seen(&vm.name)?[1].host_node == Some(1), "vCPU 1 was moved: {:?}", seen(&vm.name)?);
    println!("node 2 without CPUs is the home of guest node 1, and its guest knows how far that is");

    vnumactl(&["rehome", &vm.name, "--guest-node", "1", "--node", "1"])?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("at home on node 1 again")?;
    check(vm, &[0, 1])?;
    server(&["unplug-memory", &module])?;
    await_hardware().context("node 2 went")
}

/// What `lab-vm server` prints.
fn server(arguments: &[&str]) -> Result<String> {
    Ok(output("lab-vm", &[&["server"], arguments].concat())?.trim().to_owned())
}

fn pin(vm: &Vm, vcpu: usize, cpu: &str) -> Result<()> {
    output("taskset", &["-p", "-c", cpu, &vm.threads[vcpu].to_string()]).map(drop)
}

fn set_online(cpu: &str, online: bool) -> Result<()> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    fs::write(&path, if online { "1" } else { "0" }).context(path)
}

/// The CPU that a thread ran on last: field 39 of `stat`, counted from the end of the name.
fn last_cpu(tid: i32) -> Result<u32> {
    let stat = fs::read_to_string(format!("/proc/{tid}/stat")).with_context(|| format!("thread {tid}"))?;
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields).unwrap_or_default();
    let cpu = fields.split_ascii_whitespace().nth(39 - 3);
    cpu.and_then(|cpu| cpu.parse().ok()).with_context(|| format!("/proc/{tid}/stat: {stat:?}"))
}

/// Waits until vnumactl shows the nodes, CPUs and distances that the kernel lists.
fn await_hardware() -> Result<()> {
    let mut last = Ok(());
    wait_for("vnumactl hardware to show what the kernel lists", HANG_LIMIT, || {
        last = hardware(&Nodes::read()?);
        Ok(last.is_ok())
    })
    .with_context(|| format!("{last:?}"))
}

fn await_memory(node: u64, kib: u64) -> Result<()> {
    let mut last = serde_json::Value::Null;
    wait_for("vnumactl hardware to show the memory", HANG_LIMIT, || {
        last = vnumactl(&["hardware"])?;
        let nodes = last["nodes"].as_array().context("vnumactl hardware: no nodes")?;
        Ok(nodes.iter().any(|found| found["id"] == node && found["memory_total_kib"] == kib))
    })
    .with_context(|| format!("vnumactl hardware: {last}"))
}
