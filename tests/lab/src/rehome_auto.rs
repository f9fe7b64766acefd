//! All vCPUs of a VM come to stay on a host node where no guest node is at home: its memory goes after them, its guest is told, and the
//! vCPUs keep the masks of their operator. When they go back at once, it rests before it follows.

use crate::guest::{check_kernel_log, equip, wait_until_listed};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{fs, thread, time::Duration};
use vnuma_scenario::{HANG_LIMIT, Vm, output, vnumactl, vnumad, wait_for};

const NAME: &str = "followed";
const CONFIGURATION: &str = "/root/rehomed.toml";
/// The two nodes, and the CPUs that VMs may use of each.
const CPUS: [&str; 2] = ["1", "2,3"];
/// An emulated server is slow, so that a look may cost more of it.
const SETTINGS: &str = "[memory]\nobserve_s = 2\nobserve_permille = 300\n\
    [rehome]\nmode = \"auto\"\nsettle_s = 6\nrest_s = 40\n";
const MIB: u64 = 1 << 20;
const WRITTEN_MIB: u64 = 64;
/// Some pages are in use at any moment.
const FEW: u64 = 4 * MIB;
/// Less than they have to stay, and several looks.
const PASSING: Duration = Duration::from_secs(5);

pub fn run() -> Result<()> {
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    let shape = ["--nodes", "1", "--vcpus", "2", "--memory", "384M", "--unbound"];
    let vm = Vm::start(NAME, &shape.map(str::to_owned))?;
    equip(&vm)?;
    confine(&vm, 0)?;
    let write = format!("yes vnuma | head -c {} > /dev/shm/load && cksum < /dev/shm/load", WRITTEN_MIB * MIB);
    let sum = vm.exec(&["sh", "-c", &write])?;
    // What was taken before the vCPUs were confined may be on either node.
    output("migratepages", &[&vm.pid.to_string(), "1", "0"])?;
    let _daemon = vnumad(&["--config", CONFIGURATION])?;
    wait_until_listed(NAME)?;
    vm.attach()?;
    vm.await_driver()?;
    let load = vm.spawn(&["sh", "-c", "while cksum < /dev/shm/load > /dev/null; do :; done"])?;
    wait_for("the VM to be at home on node 0", HANG_LIMIT, || Ok(shown()?["guest_nodes"][0]["home"] == 0))?;
    ensure!(shown()?["rehome"].is_null(), "it has got another home at the beginning");

    // One of two, and both for a moment only.
    output("taskset", &["-p", "-c", CPUS[1], &vm.threads[0].to_string()])?;
    thread::sleep(3 * PASSING);
    ensure!(shown()?["rehome"].is_null(), "with one of two vCPUs elsewhere: {}", shown()?);
    confine(&vm, 0)?;

    confine(&vm, 1)?;
    followed(&vm, 1)?;
    let why = shown()?["rehome"]["why"].take();
    ensure!(
        why.as_str().is_some_and(|why| why.contains("where no guest node is at home")),
        "no reason: {why}"
    );
    println!("followed to node 1: {why}");
    confine(&vm, 0)?;
    wait_for("it to rest before it follows", HANG_LIMIT, || {
        let shown = shown()?;
        ensure!(shown["rehome"]["node"] == 1, "it follows again at once: {shown}");
        Ok(shown["guest_nodes"][0]["stays"]["reason"] == "rests")
    })?;
    followed(&vm, 0)?;
    println!("rested, and followed to node 0");

    drop(load);
    let after = vm.exec(&["sh", "-c", "cksum < /dev/shm/load"])?;
    ensure!(sum == after, "the content of the guest's memory changed: {sum} {after}");
    check_kernel_log(&vm)
}

fn confine(vm: &Vm, node: usize) -> Result<()> {
    for thread in &vm.threads {
        output("taskset", &["-p", "-c", CPUS[node], &thread.to_string()])?;
    }
    Ok(())
}

/// Waits until the memory has followed, and checks that nothing else has changed.
fn followed(vm: &Vm, node: usize) -> Result<()> {
    wait_for("the memory to follow its vCPUs", HANG_LIMIT, || {
        let rehome = shown()?["rehome"].take();
        Ok(rehome["node"] == node && rehome["state"] == "done")
    })
    .with_context(|| format!("{:?}", shown()))?;
    let (there, left) = (kernel_has(vm, node)?, kernel_has(vm, 1 - node)?);
    ensure!(there > WRITTEN_MIB * MIB && left < FEW, "{there} bytes are there, {left} are not");
    for thread in &vm.threads {
        let mask = output("taskset", &["-p", "-c", &thread.to_string()])?;
        let expected = format!(": {}", CPUS[node]);
        ensure!(mask.trim().ends_with(&expected), "vCPU thread {thread} is confined to {mask}");
    }
    wait_for("the vCPUs to be where their guest takes them to be", HANG_LIMIT, || {
        let vm = vnumactl(&["show", NAME])?;
        let vcpus = vm["vcpus"].as_array().context("no vCPUs")?;
        Ok(vcpus.iter().all(|vcpu| vcpu["state"] == "true" && vcpu["host_node"] == node))
    })
    .with_context(|| format!("{:?}", vnumactl(&["show", NAME])))
}

fn shown() -> Result<Value> {
    vnumactl(&["rehome", NAME])
}

/// What the kernel counts of the VM's memory on a node: the mapping that is larger than all others.
fn kernel_has(vm: &Vm, node: usize) -> Result<u64> {
    let path = format!("/proc/{}/numa_maps", vm.pid);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let pages = |line: &str, key: &str| -> u64 {
        line.split_ascii_whitespace().filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok()).sum()
    };
    let guest = text.lines().max_by_key(|line| pages(line, "anon=")).context("no mapping")?;
    Ok(pages(guest, &format!("N{node}=")) * 4096)
}
