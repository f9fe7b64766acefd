//! The VM of `policy` with its vCPU pinned where its memory is not: its memory comes to it, if vnumad may move some, and a
//! vnumad that is killed in the middle harms nothing.

use crate::policy::{FAR, MEMORY, NAME, NEAR, OPERATORS, expect_mask, first_vcpu, set_mask};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use vnuma_scenario::{HANG_LIMIT, Process, Vm, vnumactl, vnumad, wait_for};

const CONFIGURATION: &str = "/root/memory.toml";
/// A CPU of the node that its memory is on at first.
const BACK: &str = "2";

pub fn run(vm: &Vm) -> Result<()> {
    fs::write(CONFIGURATION, "[policy]\nperiod_ms = 300\nmemory_mib_per_s = 512\n").context(CONFIGURATION)?;
    ensure!(share(vm, MEMORY)? > 0.7, "its memory is elsewhere already: {}", share(vm, MEMORY)?);
    set_mask(vm, FAR)?;
    let daemon = start()?;
    vnumactl(&["policy", NAME, "--set", "vprobe"])?;
    wait_for("memory to be on its way to the pinned vCPU", HANG_LIMIT, || Ok(share(vm, MEMORY)? < 0.6))?;
    // Wherever that is: pages are whole, and the next one goes on.
    drop(daemon);
    vm.exec(&["true"]).context("the guest, after vnumad was killed")?;
    let daemon = start()?;
    vnumactl(&["policy", NAME, "--set", "vprobe"])?;
    wait_for("its memory to be near the pinned vCPU", HANG_LIMIT, || Ok(share(vm, 1 - MEMORY)? > 0.9))
        .with_context(|| format!("vnumactl policy shows {}", shown().unwrap_or_default()))?;
    expect_mask(vm, FAR)?;
    let mut last = Value::Null;
    wait_for("the move to end", HANG_LIMIT, || {
        last = shown()?["last"].take();
        Ok(last["ended"] == true)
    })?;
    let expected =
        last["from"] == MEMORY && last["to"] == 1 - MEMORY && last["cause"] == "its vCPUs may not run there";
    ensure!(expected && last["assumed"] == true, "the reason: {last}");
    println!(
        "pinned away from its memory: the memory has come, {} bytes by the last vnumad",
        last["moved_bytes"]
    );
    drop(daemon);

    // Back, for what follows. What came to a node stays for a minute, but the next vnumad does not know when it came.
    set_mask(vm, BACK)?;
    let daemon = start()?;
    vnumactl(&["policy", NAME, "--set", "vprobe"])?;
    wait_for("its memory to be back", HANG_LIMIT, || Ok(share(vm, MEMORY)? > 0.9))?;
    ensure!(first_vcpu()?["standing"] == "pinned", "the vCPU is not pinned: {}", first_vcpu()?);
    vnumactl(&["policy", NAME, "--set", "off"])?;
    drop(daemon);
    set_mask(vm, OPERATORS)?;
    println!("pinned to a CPU of {NEAR}: it is back there");
    Ok(())
}

fn start() -> Result<Process> {
    let daemon = vnumad(&["--config", CONFIGURATION])?;
    crate::guest::wait_until_listed(NAME)?;
    Ok(daemon)
}

fn shown() -> Result<Value> {
    Ok(vnumactl(&["policy", NAME])?["memory"].take())
}

/// Share of its pages that are on a node, as the kernel shows them.
pub fn share(vm: &Vm, node: u64) -> Result<f64> {
    let path = format!("/proc/{}/numa_maps", vm.pid);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let pages = |word: &str| {
        let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
        Some((node.parse::<u64>().ok()?, pages.parse::<u64>().ok()?))
    };
    // The anonymous ones: QEMU's own code is where it was read first.
    let lines = text.lines().filter(|line| !line.contains(" file="));
    let found: Vec<_> = lines.flat_map(str::split_ascii_whitespace).filter_map(pages).collect();
    let all: u64 = found.iter().map(|(_, pages)| pages).sum();
    let there: u64 = found.iter().filter(|(known, _)| *known == node).map(|(_, pages)| pages).sum();
    Ok(there as f64 / all.max(1) as f64)
}
