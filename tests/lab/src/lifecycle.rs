//! VMs come and go while vnumad runs: started before and after it, stopped in order and killed.

use crate::guest::{check, check_kernel_log, equip, listed, taskset, wait_until_listed, wait_until_seen};
use anyhow::{Context, Result, anyhow};
use std::{
    fs,
    time::{Duration, Instant},
};
use vnuma_scenario::{HANG_LIMIT, Nodes, Vm, output, vnumactl, vnumad, wait_for};

/// No file was opened or closed for so long.
const SETTLED: Duration = Duration::from_secs(3);

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "384M"].map(str::to_owned);
    let early = Vm::start("early", &shape)?;
    let daemon = vnumad(&[])?;
    wait_until_listed(&early.name)?;
    let descriptors = settled_open_files(daemon.0.id())?;
    println!("a VM that was there first is found");

    std::thread::scope(|scope| {
        // Beside the others, which are not disturbed by it either.
        let again = scope.spawn(|| reboot(&early, &shape, &nodes));
        come_and_go(&early, &shape, &nodes)?;
        again.join().map_err(|_| anyhow!("the reboot panicked"))?
    })?;

    // Connections of vnumactl that have just ended may not be closed yet.
    let mut after = Vec::new();
    wait_for("vnumad to have no more open files than before", HANG_LIMIT, || {
        after = open_files(daemon.0.id())?;
        Ok(after.len() <= descriptors.len())
    })
    .with_context(|| format!("open files before three VMs came and went: {descriptors:?}, now: {after:?}"))?;
    println!("{} open files, as before", after.len());
    Ok(())
}

/// A VM is attached, moved and stopped.
fn come_and_go(early: &Vm, shape: &[String], nodes: &Nodes) -> Result<()> {
    let late = Vm::start("late", shape)?;
    wait_until_listed(&late.name)?;
    equip(&late)?;
    vnumactl(&["attach", &late.name])?;
    taskset(&late, 0, 1, nodes)?;
    wait_until_seen(&late.name, &[(1, 1, "true"), (1, 1, "true")])?;
    drop(late);
    wait_until_gone("late", early)?;
    println!("stopped: gone, the other VM undisturbed");
    Ok(())
}

fn wait_until_gone(name: &str, other: &Vm) -> Result<()> {
    wait_for("the VM to be gone", HANG_LIMIT, || Ok(listed(name)?.is_none()))?;
    wait_until_seen(&other.name, &[(0, 0, "true"), (1, 1, "true")]).context("the other VM")
}

/// A guest that boots again uses what it booted with until its driver is there again. At last its QEMU is killed.
fn reboot(early: &Vm, shape: &[String], nodes: &Nodes) -> Result<()> {
    let vm = Vm::start("again", shape)?;
    wait_until_listed(&vm.name)?;
    equip(&vm)?;
    vnumactl(&["attach", &vm.name])?;
    taskset(&vm, 0, 1, nodes)?;
    wait_until_seen(&vm.name, &[(1, 1, "true"), (1, 1, "true")])?;
    output("lab-vm", &["reset", &vm.name])?;
    wait_until_seen(&vm.name, &[(1, 1, "stale"), (1, 1, "true")]).context("after the reset")?;
    equip(&vm)?;
    wait_until_seen(&vm.name, &[(1, 1, "true"), (1, 1, "true")]).context("with the driver again")?;
    check(&vm, &[1, 1])?;
    check_kernel_log(&vm)?;
    println!("reset: stale until the driver is there again, then true");
    output("kill", &["-KILL", &vm.pid.to_string()])?;
    wait_until_gone(&vm.name, early)?;
    println!("killed: gone, the other VM undisturbed");
    Ok(())
}

/// The same once it has not changed for a while: BPF programs are loaded when the first VM is there.
fn settled_open_files(pid: u32) -> Result<Vec<String>> {
    let (mut files, mut since) = (open_files(pid)?, Instant::now());
    wait_for("vnumad to open no more files", HANG_LIMIT, || {
        let now = open_files(pid)?;
        if std::mem::replace(&mut files, now).len() != files.len() {
            since = Instant::now();
        }
        Ok(since.elapsed() >= SETTLED)
    })?;
    Ok(files)
}

/// But for the one that all channels share, which is there from the first attach on.
fn open_files(pid: u32) -> Result<Vec<String>> {
    let path = format!("/proc/{pid}/fd");
    let files =
        fs::read_dir(&path).context(path)?.flatten().filter_map(|file| fs::read_link(file.path()).ok());
    let names = files.map(|target| target.to_string_lossy().into_owned());
    let mut names: Vec<_> = names.filter(|name| !name.contains("vnuma-doorbell")).collect();
    names.sort();
    Ok(names)
}
