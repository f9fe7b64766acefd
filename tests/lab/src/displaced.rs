//! A VM whose memory is displaced by what displaces memory on real hosts: its guest touches pages for the first time, or again
//! after a balloon gave them up or it reported them as free, while its vCPU runs on another node; its home is full, KSM parts pages,
//! or they come back from swap. A memory policy brings them home while the VM runs, and a vnumad that is killed in the middle harms
//! nothing.

pub mod arrival;
pub mod gigantic;
mod host;
mod pool;
pub mod pooled;

use crate::guest::{check_kernel_log, detach, expect_check, wait_until_listed};
use crate::memory::share;
use crate::policy::{BALANCING, FAR, MEMORY, NEAR};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use vnuma_scenario::{HANG_LIMIT, Monitor, Process, Vm, output, vnumactl, vnumad, wait_for};

const NAME: &str = "strays";
const CONFIGURATION: &str = "/root/displaced.toml";
/// An emulated server is slow, so that a look may cost more of it.
const SETTINGS: &str = "[memory]\nobserve_s = 2\nobserve_permille = 300\nmib_per_s = 512\n\
    [observe]\ndescribe_interval_ms = 2000\n";
const MIB: u64 = 1 << 20;
/// What the guest writes each time, and what of it has to be displaced then: some pages were touched before.
const WRITTEN_MIB: u64 = 48;
const DISPLACED: u64 = 20 * MIB;
/// Less is at home as far as a sample shows.
const NOTHING: u64 = MIB;
/// What the guest uses of the free memory of each of its nodes before it is given back.
const FREE_MIB: [u64; 2] = [96, 144];
/// What the balloon leaves of the guest's 512 MiB.
const BALLOON_LEAVES: u64 = 240 * MIB;
/// So much has to go back to the host.
const GIVEN_BACK: u64 = 128 * MIB;
/// A free port of the VM, from the end: vnumad takes the first.
const PORT: &str = "vnuma1";

pub fn run() -> Result<()> {
    // The kernel would move unbound memory itself.
    fs::write(BALANCING, "0").context(BALANCING)?;
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    let vm = start_at_home()?;
    let mut daemon = start()?;
    ensure!(memory()?["policy"] == "none", "the policy is not none by default");
    wait_for("guest node 0 to be at home", HANG_LIMIT, || Ok(memory()?["nodes"][0]["home"] == MEMORY))
        .with_context(|| format!("{:?}", memory()))?;
    ensure!(share(&vm, 1 - MEMORY)? < 0.1, "displaced at the beginning: {}", share(&vm, 1 - MEMORY)?);

    touch_elsewhere(&vm, "first")?;
    agrees_with_the_kernel(&vm)?;
    is_named(&vm)?;
    come_home(&vm, "touched for the first time elsewhere")?;

    touch_elsewhere(&vm, "second")?;
    vnumactl(&["memory", NAME, "--set", "both"])?;
    wait_for("a move to begin", HANG_LIMIT, || Ok(!memory()?["moves"].is_null()))?;
    // Wherever that is: pages are whole, and the next one goes on.
    drop(daemon);
    vm.exec(&["true"]).context("the guest, after vnumad was killed")?;
    daemon = start()?;
    come_home(&vm, "vnumad killed in the middle of a move")?;
    is_whole(&vm, "second")?;

    balloon(&vm, 0)?;
    touch_elsewhere(&vm, "third")?;
    come_home(&vm, "given up to a balloon and touched again elsewhere")?;
    is_whole(&vm, "third")?;

    report_free_pages(&vm)?;
    touch_elsewhere(&vm, "fourth")?;
    come_home(&vm, "reported as free and touched again elsewhere")?;
    is_whole(&vm, "fourth")?;

    host::full_home(&vm, "fifth")?;
    host::ksm(&vm, "sixth")?;
    host::swap(&vm, "seventh")?;
    drop(daemon);
    check_kernel_log(&vm)
}

fn start() -> Result<Process> {
    let daemon = vnumad(&["--config", CONFIGURATION])?;
    wait_until_listed(NAME)?;
    Ok(daemon)
}

/// A VM whose memory is on one node, as the threads that touch it first run there.
fn start_at_home() -> Result<Vm> {
    let own = std::process::id().to_string();
    output("taskset", &["-p", "-c", NEAR, &own])?;
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "512M", "--unbound"];
    let vm = Vm::start(NAME, &shape.map(str::to_owned));
    output("taskset", &["-p", "-c", "0-3", &own])?;
    vm
}

fn memory() -> Result<Value> {
    vnumactl(&["memory", NAME])
}

fn put(vm: &Vm, cpus: &str) -> Result<()> {
    for thread in &vm.threads {
        output("taskset", &["-p", "-c", cpus, &thread.to_string()])?;
    }
    Ok(())
}

/// Displaced memory of all guest nodes, as vnumad sees it.
fn displaced() -> Result<u64> {
    Ok(displaced_of(&memory()?))
}

fn displaced_of(shown: &Value) -> u64 {
    let nodes = shown["nodes"].as_array().into_iter().flatten();
    nodes.filter_map(|node| node["displaced"]["bytes"].as_u64()).sum()
}

/// The guest writes a file while its vCPUs are on the other node.
fn touch_elsewhere(vm: &Vm, file: &str) -> Result<()> {
    put(vm, FAR)?;
    write(vm, file, 0)?;
    put(vm, NEAR)?;
    expect_displaced(file, DISPLACED)
}

/// The guest writes a file into memory of a guest node.
fn write(vm: &Vm, file: &str, node: u32) -> Result<()> {
    let write = format!("yes vnuma | head -c {} > /dev/shm/{file}", WRITTEN_MIB * MIB);
    vm.exec(&["numactl", "--physcpubind=0", &format!("--membind={node}"), "sh", "-c", &write]).map(drop)
}

/// So much of what was written to a file is displaced, or the cause is no cause.
fn expect_displaced(file: &str, least: u64) -> Result<()> {
    let mut last = 0;
    wait_for("vnumactl to show that memory is displaced", HANG_LIMIT, || {
        last = displaced()?;
        Ok(last >= least)
    })
    .with_context(|| format!("{file}: {last} bytes are displaced; {:?}", memory()))?;
    println!("{file}: {} MiB of {WRITTEN_MIB} are displaced", last / MIB);
    Ok(())
}

/// What is displaced by the sample, and by the kernel's own count.
fn agrees_with_the_kernel(vm: &Vm) -> Result<()> {
    let shown = memory()?;
    let nodes = shown["nodes"].as_array().context("no nodes")?;
    let sum = |field: &str| -> u64 { nodes.iter().filter_map(|node| node[field]["bytes"].as_u64()).sum() };
    let (sampled, kernel) = (sum("displaced") as f64 / sum("resident") as f64, share(vm, 1 - MEMORY)?);
    // The kernel's has memory of QEMU itself, too.
    ensure!((sampled - kernel).abs() < 0.1, "displaced: {sampled} of the sample, {kernel} of the kernel");
    println!("displaced: {:.1} % of the sample, {:.1} % by numa_maps", sampled * 100.0, kernel * 100.0);
    Ok(())
}

/// `doctor` and `attach` name it, as the first passthrough device would pin it there.
fn is_named(vm: &Vm) -> Result<()> {
    let named = || expect_check(Some(NAME), "memory", "displaced", "reduced");
    wait_for("doctor to name displaced memory", HANG_LIMIT, || Ok(named().is_ok()))
        .with_context(|| format!("{:?}", named().err()))?;
    let said = output("vnumactl", &["attach", NAME])?;
    let pins = "the first passthrough device pins memory where it is, for good";
    ensure!(
        said.contains("of guest node 0 are not on its home") && said.contains(pins),
        "attach says {said:?}"
    );
    detach(vm)?;
    println!("doctor and attach name it");
    Ok(())
}

fn come_home(vm: &Vm, cause: &str) -> Result<()> {
    vnumactl(&["memory", NAME, "--set", "both"])?;
    wait_for("displaced memory to come home", HANG_LIMIT, || Ok(displaced()? <= NOTHING))
        .with_context(|| format!("{cause}: {:?}", memory()))?;
    let left = share(vm, 1 - MEMORY)?;
    ensure!(left < 0.05, "{cause}: by the kernel's count, {left} are on the other node");
    let mut moves = Value::Null;
    wait_for("the move to end", HANG_LIMIT, || {
        moves = memory()?["moves"].take();
        Ok(moves["last"]["ended"] == true)
    })?;
    let last = &moves["last"];
    let reason = last["policy"] == "both" && last["cause"].as_str().is_some_and(|cause| !cause.is_empty());
    // It may be one of guest node 1, whose few pages come home after those of node 0.
    ensure!(reason && last["to"] == MEMORY, "{cause}: the reason: {last}");
    println!(
        "{cause}: at home again, {} MiB by {} moves; held for {} us at most (measured, emulated)",
        moves["bytes"].as_u64().unwrap_or(0) / MIB,
        moves["moves"],
        last["longest_hold_us"]
    );
    vnumactl(&["memory", NAME, "--set", "none"]).map(drop)
}

/// A file has what was written to it, and is removed.
fn is_whole(vm: &Vm, file: &str) -> Result<()> {
    let line = format!("cd /dev/shm && cmp first {file} && rm {file}");
    vm.exec(&["sh", "-c", &line]).map(drop).with_context(|| format!("content of {file}"))
}

/// Has the guest touch memory that it has free, and give it up: the host has pages for it from then on.
fn use_free_memory(vm: &Vm) -> Result<()> {
    for (node, mib) in FREE_MIB.iter().enumerate() {
        let fill = format!("head -c {mib}M /dev/zero > /dev/shm/filler && rm /dev/shm/filler");
        let (cpu, memory) = (format!("--physcpubind={node}"), format!("--membind={node}"));
        vm.exec(&["numactl", &cpu, &memory, "sh", "-c", &fill]).context("using the guest's free memory")?;
    }
    Ok(())
}

/// Plugs a balloon and waits for its driver.
fn plug_balloon(vm: &Vm, reports: bool) -> Result<Monitor> {
    let mut monitor = Monitor::connect(&vm.monitor())?;
    let device = json!({
        "driver": "virtio-balloon-pci", "id": "balloon", "bus": PORT, "free-page-reporting": reports,
        // KVM gives a guest up now and then that notifies a queue by MMIO under emulation (lab/lab-vm/src/qemu.rs).
        "modern-pio-notify": true,
    });
    monitor.execute(&json!({"execute": "device_add", "arguments": device}))?;
    let load = "for i in $(seq 100); do [ -e /sys/bus/virtio/drivers/virtio_balloon/virtio* ] && exit; \
                modprobe virtio_balloon; sleep 0.3; done; exit 1";
    vm.exec(&["sh", "-c", load]).context("the balloon's driver")?;
    Ok(monitor)
}

fn unplug_balloon(monitor: &mut Monitor) -> Result<()> {
    monitor.execute(&json!({"execute": "device_del", "arguments": {"id": "balloon"}}))?;
    wait_for("the balloon to be unplugged", HANG_LIMIT, || {
        let all =
            monitor.execute(&json!({"execute": "qom-list", "arguments": {"path": "/machine/peripheral"}}))?;
        let all = all.as_array().context("qom-list: not an array")?;
        Ok(all.iter().all(|device| device["name"] != "balloon"))
    })
}

/// The host has so much less of the VM than before, or the cause is no cause.
fn expect_given_back(vm: &Vm, before: u64, by: &str) -> Result<()> {
    let given_back = before.saturating_sub(resident(vm)?);
    println!("{by}: the host has {} MiB less of the VM", given_back / MIB);
    ensure!(given_back >= GIVEN_BACK, "{by}: only {given_back} bytes went back to the host");
    Ok(())
}

/// What a guest node has free, bytes.
fn free(vm: &Vm, node: u32) -> Result<u64> {
    let line = format!("awk '/MemFree/ {{ print $4 }}' /sys/devices/system/node/node{node}/meminfo");
    let text = vm.exec(&["sh", "-c", &line])?;
    Ok(text.trim().parse::<u64>().with_context(|| format!("MemFree: {text:?}"))? << 10)
}

/// Takes most of the guest's memory, that of a node first, and gives it back: the host has no pages for it any more.
fn balloon(vm: &Vm, node: u32) -> Result<()> {
    use_free_memory(vm)?;
    // The driver takes what is free on the node of the CPU that has its interrupt, and only then what the other node has.
    vm.exec(&["sh", "-c", &format!("echo {} > /proc/irq/default_smp_affinity", 1 << node)])?;
    let mut monitor = plug_balloon(vm, false)?;
    let (before, free_before) = (resident(vm)?, free(vm, node)?);
    for (target, what) in [(BALLOON_LEAVES, "inflated"), (512 * MIB, "deflated")] {
        monitor.execute(&json!({"execute": "balloon", "arguments": {"value": target}}))?;
        let mut actual = None;
        wait_for(&format!("the balloon to be {what}"), HANG_LIMIT, || {
            actual = monitor.execute(&json!({"execute": "query-balloon"}))?["actual"].as_u64();
            Ok(actual == Some(target))
        })
        .with_context(|| format!("the guest has {actual:?} bytes"))?;
        if target == BALLOON_LEAVES {
            let taken = free_before.saturating_sub(free(vm, node)?);
            ensure!(taken >= GIVEN_BACK, "the balloon has only {taken} bytes of guest node {node}");
        }
    }
    expect_given_back(vm, before, "balloon")?;
    unplug_balloon(&mut monitor)
}

/// The guest reports pages that are free, and the host takes them back.
fn report_free_pages(vm: &Vm) -> Result<()> {
    use_free_memory(vm)?;
    let before = resident(vm)?;
    let mut monitor = plug_balloon(vm, true)?;
    wait_for("free pages to be reported", HANG_LIMIT, || {
        Ok(before.saturating_sub(resident(vm)?) >= GIVEN_BACK)
    })?;
    expect_given_back(vm, before, "free page reporting")?;
    unplug_balloon(&mut monitor)
}

/// Memory of the VM that is there, as the kernel counts it.
fn resident(vm: &Vm) -> Result<u64> {
    status(vm, "VmRSS:")
}

/// An amount of memory in `/proc/PID/status` of QEMU, bytes.
fn status(vm: &Vm, name: &str) -> Result<u64> {
    let path = format!("/proc/{}/status", vm.pid);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kib.with_context(|| format!("{path}: no {name}"))? << 10)
}
