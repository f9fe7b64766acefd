//! What an operator has set for a domain's vCPUs (`vcpupin`), other threads (`emulatorpin`) and memory (`numatune`), with a libvirt: no policy
//! leaves it, though each has a reason to.

use crate::guest::{check_kernel_log, wait_until_listed};
use crate::libvirt::{CID, DOMAIN, NAME, create_from, pin};
use crate::memory::share;
use crate::virsh::virsh;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::thread::sleep;
use std::time::Duration;
use vnuma_scenario::{HANG_LIMIT, Vm, output, vnumactl, vnumad, wait_for};

const CONFIGURATION: &str = "/root/vnumad-limits.toml";
/// Everything that may move memory by itself may. An emulated server is slow, so that a look may cost more of it.
const SETTINGS: &str = "[libvirt]\nuris = [\"qemu:///system\"]\n[policy]\nperiod_ms = 300\nmemory_mib_per_s = 512\n\
    [memory]\nobserve_s = 2\nobserve_permille = 300\n[rehome]\nmode = \"auto\"\nsettle_s = 4\n";
/// All memory is to be of node 1, and QEMU's other threads on node 0.
const MEMORY: u64 = 1;
const NEAR: &str = "2-3";
const FAR: &str = "1";
const BOTH: &str = "1-3";
/// Several periods, looks at memory, and looks for threads that follow.
const LONG: Duration = Duration::from_secs(25);

pub fn run() -> Result<()> {
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    let domain = DOMAIN
        .replace("nodeset='0-1'", "nodeset='1'")
        .replace("nodeset='0'", "nodeset='1'")
        .replace("<emulatorpin cpuset='1-3'/>", "<emulatorpin cpuset='1'/>");
    let vm = create_from(&domain, NAME, NAME, CID)?;
    let load = vm.spawn(&[
        "sh",
        "-c",
        "dd if=/dev/zero of=/dev/null bs=8M & exec dd if=/dev/zero of=/dev/null bs=8M",
    ])?;
    let daemon = vnumad(&["--config", CONFIGURATION])?;
    wait_until_listed(NAME)?;
    threads(&vm)?;
    // It is killed, with vCPUs that a policy has pinned.
    drop(daemon);
    let daemon = vnumad(&["--config", CONFIGURATION])?;
    wait_until_listed(NAME)?;
    wait_until_pinned(&vm, BOTH).context("the next vnumad has not given back what the policy had")?;
    vnumactl(&["policy", NAME, "--set", "vprobe"])?;
    wait_until_pinned(&vm, NEAR)?;
    memory(&vm)?;
    drop((load, daemon));
    check_kernel_log(&vm)?;
    virsh(&["destroy", NAME])?;
    println!("vcpupin, emulatorpin and numatune are limits");
    Ok(())
}

/// CPUs that a thread may run on.
fn mask(thread: i32) -> Result<String> {
    let shown = output("taskset", &["-p", "-c", &thread.to_string()])?;
    let list = shown.rsplit(' ').next().unwrap_or_default().trim();
    let cpus: vnuma_model::CpuSet = list.parse().with_context(|| format!("taskset: {shown:?}"))?;
    Ok(cpus.to_string())
}

fn wait_until_at(what: &str, thread: i32, cpus: &str) -> Result<()> {
    wait_for(&format!("{what} to have the CPUs {cpus}"), HANG_LIMIT, || Ok(mask(thread)? == cpus))
        .with_context(|| format!("it has {:?}", mask(thread)))
}

/// libvirt has pinned all vCPUs so, and they have these CPUs.
fn wait_until_pinned(vm: &Vm, cpus: &str) -> Result<()> {
    wait_for(&format!("the vCPUs to be pinned to {cpus}"), HANG_LIMIT, || {
        let masks = vm.threads.iter().map(|thread| mask(*thread));
        let all = ["0", "1"].into_iter().map(pin).chain(masks).collect::<Result<Vec<_>>>()?;
        Ok(all.iter().all(|found| found == cpus))
    })
    .with_context(|| format!("{:?}; {:?}", pin("0"), vnumactl(&["policy", NAME])))
}

/// The policy takes vCPUs to their memory, and QEMU's other threads after them as far as their operator lets them.
fn threads(vm: &Vm) -> Result<()> {
    let main = vm.pid;
    ensure!(mask(main)? == FAR, "libvirt has not pinned the main thread: {}", mask(main)?);
    vnumactl(&["policy", NAME, "--set", "vprobe"])?;
    wait_until_pinned(vm, NEAR).context("the busy vCPUs are to be where their memory is")?;
    sleep(LONG);
    ensure!(mask(main)? == FAR, "the main thread has left its emulatorpin: {}", mask(main)?);
    virsh(&["emulatorpin", NAME, BOTH, "--live"])?;
    wait_until_at("the main thread, which may be there now,", main, NEAR)?;
    virsh(&["emulatorpin", NAME, FAR, "--live"])?;
    wait_until_at("the main thread", main, FAR)?;
    sleep(LONG);
    ensure!(mask(main)? == FAR, "the main thread has left its new emulatorpin: {}", mask(main)?);
    println!("other threads follow their vCPUs within emulatorpin only");
    Ok(())
}

/// vCPUs are where their memory may not be: neither does the policy bring it, nor does a re-home by itself.
fn memory(vm: &Vm) -> Result<()> {
    ["0", "1"].iter().try_for_each(|vcpu| virsh(&["vcpupin", NAME, vcpu, FAR, "--live"]).map(drop))?;
    wait_until_pinned(vm, FAR)?;
    ensure!(share(vm, MEMORY)? > 0.9, "its memory is elsewhere already: {}", share(vm, MEMORY)?);
    sleep(LONG);
    let by_policy = share(vm, MEMORY)?;
    wait_until_pinned(vm, FAR).context("the policy has taken vCPUs from their vcpupin")?;
    vnumactl(&["policy", NAME, "--set", "off"])?;
    wait_until_pinned(vm, FAR)?;
    vnumactl(&["memory", NAME, "--set", "both"])?;
    wait_for("the re-home to say why it is none", HANG_LIMIT, || {
        let stays = vnumactl(&["rehome", NAME])?["guest_nodes"][0]["stays"]["reason"].take();
        Ok(stays == "bound" || stays == "cpuset")
    })
    .with_context(|| format!("{:?}", vnumactl(&["rehome", NAME])))?;
    sleep(LONG);
    let by_rehome = share(vm, MEMORY)?;
    ensure!(by_policy > 0.9 && by_rehome > 0.9, "memory has left numatune: {by_policy} and {by_rehome}");
    println!("memory stays where numatune has it: {by_policy:.3} and {by_rehome:.3} of it");
    Ok(())
}
