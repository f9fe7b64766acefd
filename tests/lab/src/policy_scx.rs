//! The VM of `policy` while scx_vnuma comes and goes: its vCPU has the class SCHED_EXT, its affinity stays its operator's, and
//! whoever dies, the other one goes on. In full mode CPU time is shared as control groups say.

use crate::{
    guest::expect_check,
    policy::{
        FAR, MEMORY, NAME, NEAR, OPERATORS, expect_mask, first_vcpu, is_recorded, set_mask, start,
        wait_for_mask,
    },
    threads::{Group, Loop, expect_share},
};
use anyhow::{Context, Result, ensure};
use std::{
    path::Path,
    process::{Command, Stdio},
};
use vnuma_model::Steal;
use vnuma_observe::scheduler::{DIRECTORY, Scheduler};
use vnuma_process::{Class, read_class};
use vnuma_scenario::{HANG_LIMIT, Process, Vm, output, vnumactl, wait_for};

pub fn run(vm: Vm) -> Result<()> {
    let mut daemon = start()?;
    crate::guest::wait_until_listed(NAME)?;
    vnumactl(&["policy", NAME, "--set", "vprobe"])?;
    expect_affinity(&vm).context("without scx_vnuma")?;
    let mut scheduler = load(&[])?;
    expect_scheduler(&vm).context("scx_vnuma was loaded while the policy acts")?;
    expect_check(None, "places", "sched_ext, partial", "best")?;
    println!("loaded: the place of an affinity was told to scx_vnuma, and the operator's CPUs are back");
    follows(&vm)?;
    let second = Command::new("scx_vnuma").stdin(Stdio::null()).output()?;
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    ensure!(!second.status.success() && error.contains("EBUSY"), "a second scx_vnuma: {error}");
    println!("a second scx_vnuma is refused: {}", error.trim());

    vnumactl(&["policy", NAME, "--set", "off"])?;
    expect_released(&vm).context("switched off")?;
    vnumactl(&["policy", NAME, "--set", "vprobe"])?;
    expect_scheduler(&vm).context("switched on")?;
    drop(daemon);
    ensure!(class(&vm)? == Class::Ext && maps()?.threads().len() == 1, "after SIGKILL of vnumad");
    daemon = start()?;
    expect_released(&vm).context("the next vnumad")?;
    println!("vnumad was killed: the next one has taken the vCPU from scx_vnuma");

    crate::guest::wait_until_listed(NAME)?;
    vnumactl(&["policy", NAME, "--set", "vprobe"])?;
    expect_scheduler(&vm).context("the next vnumad")?;
    scheduler.0.kill()?;
    scheduler.0.wait()?;
    expect_affinity(&vm).context("after SIGKILL of scx_vnuma")?;
    expect_check(None, "places", "affinity", "reduced")?;
    println!("scx_vnuma was killed: the policy goes on with the same place as an affinity");

    scheduler = load(&["--full"])?;
    expect_scheduled(&vm, Class::Other).context("the next scx_vnuma, in full mode")?;
    expect_check(None, "places", "sched_ext, full", "best")?;
    shares(&vm)?;
    vnumactl(&["policy", NAME, "--set", "credit"])?;
    wait_for("the policy's way to steal to be told", HANG_LIMIT, || Ok(maps()?.steals()? == Steal::Blindly))?;
    drop(vm);
    wait_for("the vCPU of a VM that has ended to be forgotten", HANG_LIMIT, || {
        Ok(maps()?.threads().is_empty())
    })?;
    ensure!(scheduler.0.try_wait()?.is_none(), "scx_vnuma has ended");
    output("kill", &["-TERM", &scheduler.0.id().to_string()])?;
    scheduler.succeed("scx_vnuma")?;
    println!("the VM has ended while scx_vnuma had its vCPU: both go on");
    drop(daemon);
    Ok(())
}

fn load(options: &[&str]) -> Result<Process> {
    Ok(Process(Command::new("scx_vnuma").args(options).stdin(Stdio::null()).spawn().context("scx_vnuma")?))
}

fn maps() -> Result<Scheduler> {
    Ok(Scheduler::open(Path::new("/"), Path::new(DIRECTORY))?)
}

fn class(vm: &Vm) -> Result<Class> {
    Ok(read_class(vm.threads[0])?)
}

/// The place is an affinity.
fn expect_affinity(vm: &Vm) -> Result<()> {
    wait_for_setting("affinity")?;
    expect_mask(vm, NEAR)?;
    ensure!(class(vm)? == Class::Other, "its class is {:?}", class(vm)?);
    ensure!(is_recorded(vm), "its operator's CPUs are not recorded");
    Ok(())
}

/// scx_vnuma was told of the place, in partial mode.
fn expect_scheduler(vm: &Vm) -> Result<()> {
    expect_scheduled(vm, Class::Ext)
}

fn expect_scheduled(vm: &Vm, expected: Class) -> Result<()> {
    wait_for_setting("sched_ext")?;
    expect_mask(vm, OPERATORS)?;
    ensure!(class(vm)? == expected, "its class is {:?}", class(vm)?);
    ensure!(!is_recorded(vm), "a record of masks stays");
    ensure!(maps()?.threads() == [(vm.threads[0], vm.pid)], "it has {:?}", maps()?.threads());
    wait_until_seen_near()
}

fn wait_for_setting(setting: &str) -> Result<()> {
    let mut last = serde_json::Value::Null;
    wait_for(&format!("the place to be set by {setting}"), HANG_LIMIT, || {
        last = first_vcpu()?;
        Ok(last["set_by"] == setting && last["policy_cpus"] == NEAR && last["operator_cpus"] == OPERATORS)
    })
    .with_context(|| format!("vnumactl policy shows {last}"))
}

/// vnumad sees by its own means where scx_vnuma has taken the vCPU.
fn wait_until_seen_near() -> Result<()> {
    let node = || Ok(crate::guest::listed(NAME)?.context("not listed")?["vcpus"][0]["host_node"] == MEMORY);
    wait_for("the vCPU to be seen on the node of its memory", HANG_LIMIT, node)
}

/// The operator pins it elsewhere, and lets it go.
fn follows(vm: &Vm) -> Result<()> {
    set_mask(vm, FAR)?;
    wait_for("the pinned vCPU to be taken from scx_vnuma", HANG_LIMIT, || {
        Ok(class(vm)? == Class::Other && maps()?.threads().is_empty())
    })?;
    expect_mask(vm, FAR)?;
    set_mask(vm, OPERATORS)?;
    expect_scheduler(vm).context("the operator has let it go")?;
    println!("pinned by its operator: left alone; let go: taken to its memory by scx_vnuma, and seen there");
    Ok(())
}

/// In full mode its vCPU and a thread of the host share a CPU as their control groups say.
fn shares(vm: &Vm) -> Result<()> {
    set_mask(vm, FAR)?;
    Group::of_vm(vm).write("cpu.weight", "300")?;
    let group = Group::new("machine.slice/rival.scope", "cpu.weight", "100")?;
    let rival = Loop::start_fair(FAR)?;
    group.take(&rival)?;
    let vcpu = Loop::of_vcpu(vm);
    // Until it is there each has a CPU of its own, which the shares must not count.
    wait_for("the vCPU to be on the rival's CPU", HANG_LIMIT, || {
        let listed = crate::guest::listed(NAME)?.context("not listed")?;
        Ok(listed["vcpus"][0]["host_cpu"].as_u64() == FAR.parse().ok())
    })?;
    expect_share("a vCPU of weight 300 beside 100", None, &[&vcpu, &rival], (0.75, 0.08))?;
    drop(rival);
    set_mask(vm, OPERATORS)?;
    expect_scheduled(vm, Class::Other).context("the operator has let it go")
}

fn expect_released(vm: &Vm) -> Result<()> {
    wait_for("scx_vnuma to have no vCPU", HANG_LIMIT, || {
        Ok(class(vm)? == Class::Other && maps()?.threads().is_empty())
    })?;
    wait_for_mask(vm, OPERATORS)
}
