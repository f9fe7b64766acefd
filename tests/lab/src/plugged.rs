//! Memory of a guest node that was plugged by virtio-mem is looked at, comes home and is re-homed like what the guest node booted with.
//! The rest of the device, which is not plugged, stays a hole.

use crate::guest::{check_kernel_log, wait_until_listed};
use crate::pages::Mapping;
use crate::resize::ready;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use vnuma_scenario::{HANG_LIMIT, Monitor, Vm, vnumactl, vnumad, wait_for};

const NAME: &str = "plugged";
const CONFIGURATION: &str = "/root/plugged.toml";
/// An emulated server is slow, so that a look may cost more of it.
const SETTINGS: &str = "[memory]\nobserve_s = 2\nobserve_permille = 300\nmib_per_s = 512\namount_permille = 5\n\
    [observe]\ndescribe_interval_ms = 2000\n";
const MIB: u64 = 1 << 20;
/// The guest node whose device is plugged, its home, and another node.
const NODE: usize = 1;
const HOME: u64 = 1;
const AWAY: u64 = 0;
/// It boots with this, and so much of its device's 256 MiB is plugged.
const BOOT_MIB: u64 = 192;
const PLUGGED_MIB: u64 = 128;
/// What the guest writes there: user memory comes from what is plugged first.
const WRITTEN_MIB: u64 = 64;
/// What of it is displaced: less than half, so that its home stays.
const DISPLACED: u64 = 24 * MIB;
/// Some pages are in use at any moment.
const FEW: u64 = 4 * MIB;
const WRITE: &str = "numactl --physcpubind=1 --membind=1 sh -c 'seq 1000000 9999999 | head -c 64M > /dev/shm/load' && cksum < /dev/shm/load";

pub fn run() -> Result<()> {
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "384M", "--pluggable", "256M"];
    let vm = Vm::start(NAME, &shape.map(str::to_owned))?;
    let _daemon = vnumad(&["--config", CONFIGURATION])?;
    wait_until_listed(NAME)?;
    ready(&vm)?;
    let size = format!("{}M", BOOT_MIB + PLUGGED_MIB);
    let grown = vnumactl(&["resize", NAME, "--guest-node", &NODE.to_string(), "--size", &size])?;
    ensure!(grown["guest_nodes"][NODE]["resize"]["state"] == "done", "it was not plugged: {grown}");
    vm.exec(&["mount", "-o", "remount,size=90%", "/dev/shm"])?;
    let sum = vm.exec(&["sh", "-c", WRITE])?;
    let device = Mapping::at(&vm, address(&vm)?)?;
    let written = device.on(HOME)?;
    ensure!(
        written >= (WRITTEN_MIB - 8) * MIB,
        "the file is elsewhere: {:?} of the device",
        device.places()?
    );

    looked_at(&device)?;
    comes_home(&device)?;
    re_homed(&device, AWAY, HOME)?;
    re_homed(&device, HOME, AWAY)?;
    let resident: u64 = device.places()?.values().sum();
    ensure!(
        resident <= PLUGGED_MIB * MIB,
        "{resident} bytes of the device are there, and {PLUGGED_MIB} MiB plugged"
    );
    let after = vm.exec(&["sh", "-c", "cksum < /dev/shm/load"])?;
    ensure!(sum == after, "the content of the guest's memory changed: {sum} {after}");
    check_kernel_log(&vm)
}

/// Where QEMU has the device's memory, by QEMU itself.
fn address(vm: &Vm) -> Result<u64> {
    let mut monitor = Monitor::connect(&vm.monitor())?;
    let arguments = json!({"command-line": "info ramblock"});
    let text = monitor.execute(&json!({"execute": "human-monitor-command", "arguments": arguments}))?;
    let text = text.as_str().context("info ramblock: no text")?;
    let name = format!("pluggable{NODE}");
    let line =
        text.lines().find(|line| line.split_whitespace().next().is_some_and(|block| block.ends_with(&name)));
    let word = line.and_then(|line| line.split_whitespace().nth(6)).with_context(|| text.to_owned())?;
    u64::from_str_radix(word.trim_start_matches("0x"), 16).with_context(|| text.to_owned())
}

fn node() -> Result<Value> {
    Ok(vnumactl(&["memory", NAME])?["nodes"][NODE].take())
}

/// Pages of the device are among what is resident and displaced.
fn looked_at(device: &Mapping) -> Result<()> {
    let before = node()?;
    ensure!(before["home"] == HOME && before["memory_bytes"] == (BOOT_MIB + PLUGGED_MIB) * MIB, "{before}");
    let displaced = device.displace(HOME, AWAY, DISPLACED)?;
    let mut shown = Value::Null;
    wait_for("vnumactl to show that plugged memory is displaced", HANG_LIMIT, || {
        shown = node()?;
        let size = &shown["displaced"];
        let (low, high) = (size["low"].as_u64().unwrap_or(0), size["high"].as_u64().unwrap_or(0));
        // A look in twenty misses its interval.
        Ok(low <= displaced && displaced <= high)
    })
    .with_context(|| format!("{displaced} bytes are displaced: {shown}"))?;
    println!(
        "looked at: {} MiB of plugged memory are displaced, shown as {} MiB",
        displaced / MIB,
        mib(&shown["displaced"]["bytes"])
    );
    Ok(())
}

fn comes_home(device: &Mapping) -> Result<()> {
    vnumactl(&["memory", NAME, "--set", "both"])?;
    wait_for("plugged memory to come home", HANG_LIMIT, || Ok(device.on(AWAY)? < FEW / 2))
        .with_context(|| format!("{:?} of the device; {:?}", device.places(), vnumactl(&["memory", NAME])))?;
    vnumactl(&["memory", NAME, "--set", "none"])?;
    println!("come home: {} KiB of the device are left elsewhere", device.on(AWAY)? >> 10);
    Ok(())
}

fn re_homed(device: &Mapping, to: u64, from: u64) -> Result<()> {
    let before = device.on(from)?;
    let (node, home) = (NODE.to_string(), to.to_string());
    let done = vnumactl(&["rehome", NAME, "--guest-node", &node, "--node", &home, "--move-pinned"])?;
    ensure!(done["rehome"]["state"] == "done", "the re-home: {done}");
    let (there, left) = (device.on(to)?, device.on(from)?);
    ensure!(
        left < FEW && there + FEW > before,
        "of the device {there} bytes are there, {left} are not: {done}"
    );
    let shown = &vnumactl(&["rehome", NAME])?["guest_nodes"][NODE];
    ensure!(shown["home"] == to, "vnumactl rehome: {shown}");
    println!(
        "re-homed to node {to}: {} MiB of the device are there, {} KiB are not",
        there / MIB,
        left >> 10
    );
    Ok(())
}

fn mib(bytes: &Value) -> u64 {
    bytes.as_u64().unwrap_or(0) / MIB
}
