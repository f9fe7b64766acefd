//! Guest nodes of a running VM grow and shrink by virtio-mem, with stock QEMU and the stock driver: what the guest's kernel has on each
//! node, its zonelists and distances agree with what vnumad shows, and plugged memory comes from the home. A guest that does not
//! give memory back is shown, and the size that it has is asked for.

use crate::guest::{check_kernel_log, wait_until_listed};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use vnuma_scenario::{HANG_LIMIT, Process, Vm, vnumactl, vnumad, wait_for};

const NAME: &str = "sized";
const CONFIGURATION: &str = "/root/resize.toml";
/// An emulated server is slow, so that a look may cost more of it.
const SETTINGS: &str = "[memory]\nobserve_s = 2\nobserve_permille = 300\n\
    [size]\nlow_permille = 100\nhigh_permille = 300\npause_s = 1\n";
const MIB: u64 = 1 << 20;
/// Each guest node boots with this, and its device has as much.
const BOOT_MIB: u64 = 256;
/// The guest node that is sized, and its home.
const NODE: u64 = 1;
/// Struct pages of what is plugged, and what the kernel holds for a moment.
const SOME_MIB: u64 = 24;
/// What a program in the guest takes of that node: more than it booted with.
const FILE_MIB: u64 = 300;

pub fn run() -> Result<()> {
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "512M", "--pluggable", "256M"];
    let vm = Vm::start(NAME, &shape.map(str::to_owned))?;
    let mut daemon = start()?;
    by_request(&vm, NAME)?;
    by_what_is_free(&vm)?;
    // What was asked for is in QEMU: the next one sees it.
    drop(daemon);
    daemon = start()?;
    wait_for("the next vnumad to show what is plugged", HANG_LIMIT, || {
        let pluggable = node(NAME)?["pluggable"].take();
        Ok(pluggable["plugged_bytes"] == BOOT_MIB * MIB && pluggable["auto"].is_null())
    })?;
    check_kernel_log(&vm)?;
    given_up(&vm)?;
    drop(daemon);
    Ok(())
}

fn start() -> Result<Process> {
    let daemon = vnumad(&["--config", CONFIGURATION])?;
    wait_until_listed(NAME)?;
    Ok(daemon)
}

/// Grows, shrinks, is stopped, and has the size of before in the end.
fn by_request(vm: &Vm, name: &str) -> Result<()> {
    ready(vm)?;
    let shown = node(name)?;
    let pluggable = &shown["pluggable"];
    ensure!(
        pluggable["most_bytes"] == BOOT_MIB * MIB && pluggable["plugged_bytes"] == 0,
        "at first: {shown}"
    );
    for (size, reason) in
        [("257M", "multiple of 2048 KiB"), ("255M", "it can have 256 to 512 MiB"), ("4G", "256 to 512 MiB")]
    {
        let refused =
            resize(name, &["--size", size]).err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(refused.contains(reason), "--size {size}: {refused:?}");
    }
    let planned = resize(name, &["--size", "384M", "--dry-run"])?;
    ensure!(planned["guest_nodes"][1]["resize"]["state"] == "planned", "a dry run: {planned}");

    let before = [guest_total(vm, 0)?, guest_total(vm, NODE)?];
    let distances = guest_distances(vm)?;
    resize(name, &["--size", "512M"])?;
    let grown = [guest_total(vm, 0)?, guest_total(vm, NODE)?];
    let more = grown[1].saturating_sub(before[1]);
    ensure!((BOOT_MIB - SOME_MIB..=BOOT_MIB).contains(&more), "guest node {NODE} has {more} MiB more");
    ensure!(
        grown[0].abs_diff(before[0]) <= SOME_MIB,
        "guest node 0 had {} MiB, and has {}",
        before[0],
        grown[0]
    );
    ensure!(guest_distances(vm)? == distances, "the guest's distances were {distances}");
    uses_it(vm, name)?;
    println!(
        "grown: guest node {NODE} has {} MiB, had {}, and its memory is on node {NODE}",
        grown[1], before[1]
    );

    stopped(vm, name)?;
    let shrunk = resize(name, &["--size", "256M"])?;
    ensure!(shrunk["guest_nodes"][1]["resize"]["state"] == "done", "shrunk: {shrunk}");
    wait_for("the guest to have what it had", HANG_LIMIT, || {
        Ok(guest_total(vm, NODE)?.abs_diff(before[1]) <= SOME_MIB)
    })
    .with_context(|| format!("it has {:?} MiB, had {}", guest_total(vm, NODE), before[1]))?;
    ensure!(guest_distances(vm)? == distances, "the guest's distances were {distances}");
    println!("shrunk: guest node {NODE} has {} MiB", guest_total(vm, NODE)?);
    Ok(())
}

/// The guest's driver, and what is plugged online as it comes.
pub fn ready(vm: &Vm) -> Result<()> {
    let online = "echo online_movable > /sys/devices/system/memory/auto_online_blocks && modprobe virtio_mem && \
                  for i in $(seq 100); do [ $(ls -d /sys/bus/virtio/drivers/virtio_mem/virtio* | wc -l) = 2 ] && exit; sleep 0.2; \
                  done; exit 1";
    vm.exec(&["sh", "-c", online]).map(drop).context("the driver of virtio-mem")
}

fn resize(name: &str, more: &[&str]) -> Result<Value> {
    let node = NODE.to_string();
    vnumactl(&[&["resize", name, "--guest-node", &node], more].concat())
}

fn node(name: &str) -> Result<Value> {
    Ok(vnumactl(&["resize", name])?["guest_nodes"][NODE as usize].take())
}

/// What the guest's kernel has on a node, MiB.
fn guest_total(vm: &Vm, node: u64) -> Result<u64> {
    let path = format!("/sys/devices/system/node/node{node}/meminfo");
    let text = vm.exec(&["cat", &path])?;
    let line = text.lines().find(|line| line.contains("MemTotal:")).with_context(|| text.clone())?;
    let kib: u64 = line.split_ascii_whitespace().rev().nth(1).context("no figure")?.parse()?;
    Ok(kib >> 10)
}

pub fn guest_distances(vm: &Vm) -> Result<String> {
    vm.exec(&["sh", "-c", "cat /sys/devices/system/node/node*/distance"])
}

/// A program in the guest that is bound to the node gets more than it booted with, by that node's zonelist, and the host has it at home.
fn uses_it(vm: &Vm, name: &str) -> Result<()> {
    let zone =
        "awk '/^Node 1, zone +Movable/ {its = 1} its && $1 == \"managed\" {print $2; exit}' /proc/zoneinfo";
    let pages: u64 = vm.exec(&["sh", "-c", zone])?.trim().parse().context("zone Movable of node 1")?;
    ensure!(
        pages * 4096 >= (BOOT_MIB - SOME_MIB) * MIB,
        "zone Movable of guest node {NODE} has {pages} pages"
    );
    // tmpfs has half of the memory that there was when it was mounted.
    vm.exec(&["mount", "-o", "remount,size=90%", "/dev/shm"])?;
    fill(vm, FILE_MIB)?;
    let used = "awk '/MemFree/ {print int($4 / 1024)}' /sys/devices/system/node/node0/meminfo";
    let free: u64 = vm.exec(&["sh", "-c", used])?.trim().parse()?;
    ensure!(free > BOOT_MIB / 4, "the file is on guest node 0, too: {free} MiB are free there");
    let mut shown = Value::Null;
    wait_for("vnumad to show the plugged memory on its home", HANG_LIMIT, || {
        shown = vnumactl(&["memory", name])?["nodes"][NODE as usize]["pluggable"].take();
        let places = shown["places"].as_array().context("no places")?;
        // It is described every two seconds while something changes, and seldom after that.
        vnumactl(&["rehome", name]).map(drop)?;
        Ok(places.len() == 1 && places[0]["node"] == NODE && places[0]["bytes"].as_u64() > Some(64 * MIB))
    })
    .with_context(|| format!("vnumactl memory: {shown}"))?;
    Ok(())
}

fn fill(vm: &Vm, mib: u64) -> Result<()> {
    let line = format!("head -c {mib}M /dev/zero > /dev/shm/file");
    vm.exec(&["numactl", "--physcpubind=1", &format!("--membind={NODE}"), "sh", "-c", &line]).map(drop)
}

/// What is left of a change that an operator ends: the guest keeps what it has, and that is what is asked for.
fn stopped(vm: &Vm, name: &str) -> Result<()> {
    // So much that not all of it has a place elsewhere.
    vm.exec(&["sh", "-c", "head -c 150M /dev/zero > /dev/shm/more"])?;
    resize(name, &["--size", "256M", "--no-wait"])?;
    let mut shown = Value::Null;
    wait_for("the guest to be asked", HANG_LIMIT, || {
        shown = node(name)?;
        Ok(shown["resize"]["state"] == "waiting" && shown["pluggable"]["requested_bytes"] == 0)
    })
    .with_context(|| format!("{shown}"))?;
    ensure!(
        shown["pluggable"]["plugged_bytes"].as_u64() > Some(0),
        "it had a place for all of that: {shown}"
    );
    let stopped = vnumactl(&["resize", name, "--stop"])?;
    ensure!(stopped["guest_nodes"][1]["resize"]["state"] == "stopped", "--stop: {stopped}");
    wait_for("what it has to be what is asked for", HANG_LIMIT, || {
        shown = node(name)?;
        let (plugged, requested) =
            (&shown["pluggable"]["plugged_bytes"], &shown["pluggable"]["requested_bytes"]);
        Ok(plugged == requested && plugged.as_u64() > Some(0))
    })
    .with_context(|| format!("{shown}"))?;
    println!("stopped: {} MiB stay plugged", shown["pluggable"]["plugged_bytes"].as_u64().unwrap_or(0) / MIB);
    let again =
        vnumactl(&["resize", name, "--stop"]).err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(again.contains("no guest node grows or shrinks"), "a second --stop: {again:?}");
    vm.exec(&["sh", "-c", "rm /dev/shm/file /dev/shm/more"]).map(drop)
}

/// A guest that does not give memory back, as its driver is gone, is given up after a while, and shown.
fn given_up(vm: &Vm) -> Result<()> {
    vm.exec(&["modprobe", "-r", "virtio_mem"])?;
    let error = resize(NAME, &["--size", "256M"]).err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(error.contains("did not get the size"), "a guest that keeps its memory: {error:?}");
    let mut shown = Value::Null;
    wait_for("what it keeps to be what is asked for", HANG_LIMIT, || {
        shown = node(NAME)?;
        Ok(shown["pluggable"]["plugged_bytes"] == shown["pluggable"]["requested_bytes"])
    })
    .with_context(|| format!("{shown}"))?;
    let problem = shown["resize"]["problem"].as_str().unwrap_or_default();
    ensure!(shown["resize"]["state"] == "partly" && problem.contains("unplugged nothing more"), "{shown}");
    ensure!(shown["pluggable"]["plugged_bytes"] == BOOT_MIB * MIB, "{shown}");
    println!("given up: {BOOT_MIB} MiB stay plugged: {problem}");
    vm.exec(&["true"]).map(drop).context("the guest, after that")
}

/// The controller: it grows while its home has memory, shrinks while others have that, and grows again.
fn by_what_is_free(vm: &Vm) -> Result<()> {
    resize(NAME, &["--auto", "256M..512M"])?;
    let plugged = || -> Result<u64> {
        node(NAME)?["pluggable"]["plugged_bytes"].as_u64().context("nothing is pluggable")
    };
    let await_size = |what: &str, is: &dyn Fn(u64) -> bool| {
        wait_for(what, HANG_LIMIT, || Ok(is(plugged()?))).with_context(|| format!("{:?}", node(NAME)))
    };
    await_size("it to grow by what is free", &|bytes| bytes == BOOT_MIB * MIB)?;
    let pool = format!("/sys/devices/system/node/node{NODE}/hugepages/hugepages-2048kB/nr_hugepages");
    let text = fs::read_to_string(format!("/sys/devices/system/node/node{NODE}/meminfo"))?;
    let line = text.lines().find(|line| line.contains("MemFree:")).context("MemFree")?;
    let free_mib = line.split_ascii_whitespace().rev().nth(1).context("no figure")?.parse::<u64>()? >> 10;
    // Less than the reserve is left: the home lacks memory.
    fs::write(&pool, (free_mib.saturating_sub(120) / 2).to_string()).context(pool.clone())?;
    let shrunk = await_size("it to shrink while its home lacks memory", &|bytes| bytes < BOOT_MIB * MIB / 2);
    fs::write(&pool, "0").context(pool)?;
    shrunk?;
    await_size("it to grow again", &|bytes| bytes == BOOT_MIB * MIB)?;
    ensure!(guest_total(vm, NODE)? > BOOT_MIB, "the guest has {} MiB", guest_total(vm, NODE)?);
    let by = node(NAME)?["resize"]["by"].take();
    ensure!(by == "what is free on its home", "by {by}");
    println!("by what is free: grown, shrunk while its home lacked memory, and grown again");
    Ok(())
}
