//! A guest node of a running VM with a load gets another home: its memory goes there, its guest is told, its vCPU follows. It is
//! stopped in the middle, vnumad is killed in the middle, and the VM ends in the middle: the next command completes it or undoes it.

use crate::guest::{check_kernel_log, equip, listed, wait_until_listed};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use vnuma_scenario::{HANG_LIMIT, Process, Vm, output, vnumactl, vnumad, wait_for};

const NAME: &str = "mover";
/// Home of guest node 0 at first, and then.
const OLD: u64 = 0;
const NEW: u64 = 1;
const NEW_CPUS: &str = "2,3";
/// On these CPUs of the old node the operator confines its vCPU, and VMs run there: they do not get CPU 0.
const OLD_CPUS: &str = "1";
const MIB: u64 = 1 << 20;
/// What the guest writes to guest node 0, so that there is something to be moved.
const WRITTEN_MIB: u64 = 64;
/// More is there only if a move has begun, and less is left only when it is over: some pages are in use at any moment.
const BEGUN: u64 = 8 * MIB;
const FEW: u64 = 4 * MIB;
/// What the host keeps free of a node of 2 GiB.
const RESERVE: u64 = 128 * MIB;

pub fn run() -> Result<()> {
    let vm = Vm::start(NAME, &["--nodes", "2", "--vcpus", "2", "--memory", "512M"].map(str::to_owned))?;
    equip(&vm)?;
    let mut daemon = start()?;
    vm.attach()?;
    vm.await_driver()?;
    let write = format!("yes vnuma | head -c {} > /dev/shm/load && cksum < /dev/shm/load", WRITTEN_MIB * MIB);
    let sum = vm.exec(&["numactl", "--physcpubind=0", "--membind=0", "sh", "-c", &write])?;
    let load = vm.spawn(&[
        "numactl",
        "--physcpubind=0",
        "sh",
        "-c",
        "while cksum < /dev/shm/load > /dev/null; do :; done",
    ])?;
    wait_for("guest node 0 to be at home", HANG_LIMIT, || {
        Ok(there(OLD)? > WRITTEN_MIB * MIB && home()? == OLD)
    })?;
    let before = distance(&vm)?;
    ensure!(before > 11, "the guest's distance between its nodes is {before} at the beginning");
    ensure!(binding()?.is_none(), "the doctor finds fault with QEMU's policy at the beginning");

    refused(&vm)?;
    stopped_in_the_middle(&vm)?;

    begin(&vm, NEW)?;
    // Wherever that is: pages are whole, and nothing has to be remembered.
    drop(daemon);
    vm.exec(&["true"]).context("the guest, after vnumad was killed")?;
    let (left, gone) = (kernel_has(&vm, OLD)?, kernel_has(&vm, NEW)?);
    println!(
        "vnumad killed in the middle: {} MiB on node {OLD}, {} MiB on node {NEW}",
        left / MIB,
        gone / MIB
    );
    ensure!(left > FEW, "the re-home was over before vnumad was killed");
    daemon = start()?;
    let shown = vnumactl(&["rehome", NAME])?;
    ensure!(shown["rehome"].is_null(), "the next vnumad knows of a re-home: {shown}");
    let places = shown["guest_nodes"][0]["places"].as_array().context("no places")?;
    ensure!(places.len() == 2, "it is not shown as partly moved: {shown}");

    complete(&vm, before)?;
    undo(&vm, before)?;
    drop(load);
    let after = vm.exec(&["sh", "-c", "cksum < /dev/shm/load"])?;
    ensure!(sum == after, "the content of the guest's memory changed: {sum} {after}");
    check_kernel_log(&vm)?;

    begin(&vm, NEW)?;
    drop(vm);
    wait_for("vnumad to notice that the VM has ended", HANG_LIMIT, || Ok(listed(NAME)?.is_none()))?;
    let gone = vnumactl(&with(NEW, &[])).err().map(|error| format!("{error:#}")).unwrap_or_default();
    // Its socket is there until it is removed.
    let ended = ["no VM", "not connected"].iter().any(|reason| gone.contains(reason));
    ensure!(ended, "a re-home of a VM that has ended: {gone:?}");
    ensure!(daemon.0.try_wait()?.is_none(), "vnumad has ended with the VM");
    println!("the VM ended in the middle, and vnumad goes on");
    Ok(())
}

fn start() -> Result<Process> {
    let daemon = vnumad(&[])?;
    wait_until_listed(NAME)?;
    Ok(daemon)
}

/// The command for a re-home of guest node 0.
fn with<'a>(node: u64, more: &[&'a str]) -> Vec<&'a str> {
    let node = if node == NEW { "1" } else { "0" };
    [&["rehome", NAME, "--guest-node", "0", "--node", node, "--move-pinned"], more].concat()
}

/// Begins one, and waits until it is in the middle.
fn begin(vm: &Vm, node: u64) -> Result<()> {
    let before = kernel_has(vm, node)?;
    vnumactl(&with(node, &["--no-wait"]))?;
    wait_for("memory to be on its way", HANG_LIMIT, || Ok(kernel_has(vm, node)? > before + BEGUN))
        .with_context(|| format!("{:?}", vnumactl(&["rehome", NAME])))
}

/// A node without room, a vCPU that somebody has confined, and a dry run: nothing is moved.
fn refused(vm: &Vm) -> Result<()> {
    let free = node_free(NEW)?;
    // Half of what is to come is too much. Huge pages that are reserved are free for nobody else.
    let take = free.saturating_sub(RESERVE + WRITTEN_MIB / 2 * MIB) / (2 * MIB);
    let pool = format!("/sys/devices/system/node/node{NEW}/hugepages/hugepages-2048kB/nr_hugepages");
    fs::write(&pool, take.to_string()).context(pool.clone())?;
    let full = node_free(NEW)?;
    let answer = vnumactl(&with(NEW, &[])).err().map(|error| format!("{error:#}"));
    fs::write(&pool, "0").context(pool)?;
    let answer = answer.with_context(|| format!("a node with {} MiB free was not refused", full / MIB))?;
    ensure!(answer.contains("node 1 has no room"), "a node without room: {answer}");
    println!("refused: {}", answer.trim());

    let pinned = ["rehome", NAME, "--guest-node", "0", "--node", "1"];
    output("taskset", &["-p", "-c", OLD_CPUS, &vm.threads[0].to_string()])?;
    wait_for("a vCPU that its operator has confined to be refused", HANG_LIMIT, || {
        Ok(vnumactl(&pinned).is_err_and(|error| format!("{error:#}").contains("are confined to other nodes")))
    })?;
    let planned = vnumactl(&with(NEW, &["--dry-run"]))?;
    ensure!(planned["rehome"]["state"] == "planned", "a dry run: {planned}");
    ensure!(kernel_has(vm, NEW)? < FEW, "something was moved all the same");
    Ok(())
}

fn stopped_in_the_middle(vm: &Vm) -> Result<()> {
    begin(vm, NEW)?;
    let stopped = vnumactl(&["rehome", NAME, "--stop"])?;
    ensure!(stopped["rehome"]["state"] == "stopped", "--stop: {stopped}");
    let mut last = 0;
    wait_for("memory to stand still", HANG_LIMIT, || {
        let now = kernel_has(vm, NEW)?;
        Ok(std::mem::replace(&mut last, now) == now)
    })?;
    ensure!(kernel_has(vm, OLD)? > FEW, "the re-home was over before it was stopped");
    println!(
        "stopped in the middle: {} MiB on node {NEW}, {} MiB on node {OLD}",
        last / MIB,
        kernel_has(vm, OLD)? / MIB
    );
    let again =
        vnumactl(&["rehome", NAME, "--stop"]).err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(again.contains("no guest node gets another home"), "a second --stop: {again:?}");
    Ok(())
}

/// The repeat after vnumad was killed.
fn complete(vm: &Vm, before: u64) -> Result<()> {
    let done = vnumactl(&with(NEW, &[]))?;
    let state = &done["rehome"];
    ensure!(state["state"] == "done" && state["vcpus"] == json!([0]), "the repeat: {done}");
    let note = state["notes"].to_string();
    ensure!(note.contains("takes new pages of it from nodes [0]"), "QEMU's policy is not named: {note}");
    ensure!(kernel_has(vm, OLD)? < FEW, "{} KiB stay on the old node", kernel_has(vm, OLD)? >> 10);
    confined_to(vm, NEW_CPUS)?;
    wait_for("the guest to know the new distance", HANG_LIMIT, || Ok(distance(vm)? < before))
        .with_context(|| format!("it is {:?}", distance(vm)))?;
    let shown = vnumactl(&["show", NAME])?;
    let node = &shown["nodes"][0];
    ensure!(node["home"] == NEW && node["bound"] == OLD, "vnumactl show: {node}");
    wait_for("vnumactl to show its vCPU there", HANG_LIMIT, || {
        let vcpu = vnumactl(&["show", NAME])?["vcpus"][0].take();
        Ok(vcpu["host_node"] == NEW && vcpu["state"] == "true")
    })
    .with_context(|| format!("{:?}", vnumactl(&["show", NAME])))?;
    let top = vnumactl(&["top"])?;
    let displaced = top[0]["displaced_bytes"].as_u64().with_context(|| format!("vnumactl top: {top}"))?;
    ensure!(displaced < FEW, "vnumactl top: {displaced} bytes are displaced");
    let found = binding()?.context("the doctor does not name QEMU's policy")?;
    ensure!(found["capability"] == "elsewhere" && found["level"] == "reduced", "vnumactl doctor: {found}");
    println!(
        "repeated: memory and vCPU are on node {NEW}, and the guest's distance is {}, was {before}",
        distance(vm)?
    );
    Ok(())
}

/// The reverse command.
fn undo(vm: &Vm, before: u64) -> Result<()> {
    let undone = vnumactl(&with(OLD, &[]))?;
    ensure!(undone["rehome"]["state"] == "done", "the way back: {undone}");
    wait_for("the guest to know the distance of before", HANG_LIMIT, || Ok(distance(vm)? == before))?;
    ensure!(kernel_has(vm, NEW)? < FEW, "{} KiB stay on the new node", kernel_has(vm, NEW)? >> 10);
    confined_to(vm, OLD_CPUS)?;
    ensure!(binding()?.is_none(), "the doctor finds fault with QEMU's policy at its home");
    println!("undone by the reverse: home on node {OLD} again, the distance is {before}");
    Ok(())
}

fn confined_to(vm: &Vm, cpus: &str) -> Result<()> {
    let mask = output("taskset", &["-p", "-c", &vm.threads[0].to_string()])?;
    ensure!(mask.trim().ends_with(&format!(": {cpus}")), "its vCPU is confined to {mask}");
    Ok(())
}

/// What vnumactl doctor says of QEMU's policy.
fn binding() -> Result<Option<Value>> {
    let checks = vnumactl(&["doctor"])?;
    let checks = checks.as_array().context("vnumactl doctor: not an array")?;
    Ok(checks.iter().find(|check| check["vm"] == NAME && check["check"] == "binding").cloned())
}

fn node_free(node: u64) -> Result<u64> {
    let path = format!("/sys/devices/system/node/node{node}/meminfo");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find(|line| line.contains("MemFree:")).with_context(|| path.clone())?;
    let kib: u64 = line.split_ascii_whitespace().rev().nth(1).context("no figure")?.parse()?;
    Ok(kib << 10)
}

fn guest_node() -> Result<Value> {
    Ok(vnumactl(&["rehome", NAME])?["guest_nodes"][0].take())
}

fn home() -> Result<u64> {
    guest_node()?["home"].as_u64().context("no home")
}

/// Memory of guest node 0 on a host node, as vnumad shows it.
fn there(node: u64) -> Result<u64> {
    let shown = guest_node()?;
    let places = shown["places"].as_array().context("no places")?;
    let found = places.iter().find(|place| place["node"] == node);
    Ok(found.and_then(|place| place["bytes"].as_u64()).unwrap_or(0))
}

/// The same as the kernel counts it: QEMU binds it to the old node, and no other memory is.
fn kernel_has(vm: &Vm, node: u64) -> Result<u64> {
    let path = format!("/proc/{}/numa_maps", vm.pid);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let key = format!("N{node}=");
    let bound = text.lines().filter(|line| line.contains(" bind:0 "));
    let pages = bound
        .flat_map(str::split_ascii_whitespace)
        .filter_map(|word| word.strip_prefix(&key)?.parse::<u64>().ok());
    Ok(pages.sum::<u64>() * 4096)
}

/// Between its two nodes, as the guest's kernel has it.
fn distance(vm: &Vm) -> Result<u64> {
    let text = vm.exec(&["cat", "/sys/devices/system/node/node0/distance"])?;
    text.split_ascii_whitespace().nth(1).context("no distance")?.parse().context("the guest's distance")
}
