//! QEMUs that are stopped, whose monitor somebody else uses, and that end in mid-attach: each is named, observed all the
//! same, and back by itself; the VM beside them is not disturbed.

use crate::guest::{check, detach, equip, listed, seen, taskset, wait_until_listed, wait_until_seen};
use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use vnuma_scenario::{HANG_LIMIT, Monitor, Nodes, Vm, output, vnumactl, vnumad};

const RECORDS: &str = "/run/vnuma/channels";
/// Other scenarios let QEMU take longer. Here is what users have.
const CONFIGURATION: &str = "/root/stopped.toml";
const SETTINGS: &str = "[vms]\ncommand_limit_ms = 1000\n";
const FIFO: &str = "/run/stuck";
/// Moments in an attach at which QEMU is stopped or killed: all of it takes some 100 ms in the lab.
const MOMENTS_MS: [u64; 3] = [20, 50, 90];

pub fn run() -> Result<()> {
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    let nodes = Nodes::read()?;
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "256M"].map(str::to_owned);
    let (good, vm) = thread::scope(|scope| {
        let good = scope.spawn(|| Vm::start("good", &shape));
        let vm = Vm::start("busy", &shape);
        (good.join().map_err(|_| anyhow!("starting a VM panicked")), vm)
    });
    let (good, vm) = (good??, vm?);
    in_use_from_the_start(&vm, &nodes)?;

    let daemon = vnumad(&["--config", CONFIGURATION])?;
    wait_until_listed(&good.name)?;
    wait_until_listed(&vm.name)?;
    equip(&vm)?;
    vnumactl(&["attach", &vm.name])?;
    stopped(&vm, &nodes)?;
    hung(&vm, &nodes)?;
    detach(&vm)?;
    stopped_in_mid_attach(&vm)?;
    killed_in_mid_attach(vm, &shape, &nodes)?;
    wait_until_seen(&good.name, &[(0, 0, "true"), (1, 1, "true")]).context("the other VM")?;
    drop(daemon);
    Ok(())
}

/// Another client has the monitor when vnumad starts: the VM is observed from the kernel until the client leaves.
fn in_use_from_the_start(vm: &Vm, nodes: &Nodes) -> Result<()> {
    let socket = Path::new("/run/vnuma/qmp").join(format!("{}.sock", vm.name));
    let mut other = UnixStream::connect(&socket).with_context(|| socket.display().to_string())?;
    other.read_exact(&mut [0]).context("the greeting")?;
    let _daemon = vnumad(&["--config", CONFIGURATION])?;
    let shown = await_hypervisor(vm, "silent", "in use")?;
    ensure!(shown["problem"].to_string().contains("is another client connected?"), "{shown}");
    ensure!(shown["pid"] == vm.pid && shown["described"] == false, "{shown}");
    let doctor = output("vnumactl", &["doctor"])?;
    ensure!(doctor.contains("silent, observed only"), "vnumactl doctor does not name it:\n{doctor}");
    await_nodes(vm, &[0, 1])?;
    taskset(vm, 0, 1, nodes)?;
    await_nodes(vm, &[1, 1])?;
    // KVM itself names the vCPUs here, so one can be moved.
    vnumactl(&["move", &vm.name, "--vcpu", "0", "--node", "0"])?;
    await_nodes(vm, &[0, 1])?;
    drop(other);
    let shown = await_hypervisor(vm, "answers", "in use no more")?;
    ensure!(shown["described"] == true, "{shown}");
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")])
}

/// A stopped QEMU: a vCPU that is moved meanwhile is seen to be, and its guest has it when it goes on.
fn stopped(vm: &Vm, nodes: &Nodes) -> Result<()> {
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")])?;
    signal("STOP", vm)?;
    let shown = await_hypervisor(vm, "stopped", "SIGSTOP").inspect_err(|_| show_threads(vm))?;
    ensure!(shown["problem"].to_string().contains("is stopped by a signal (SIGSTOP)"), "{shown}");
    ensure!(shown["channel"] == "attached", "{shown}");
    taskset(vm, 1, 0, nodes)?;
    await_nodes(vm, &[0, 0])?;
    // It is published, and cannot be acknowledged yet.
    ensure!(seen(&vm.name)?[1].state == "stale", "{:?}", seen(&vm.name)?);
    refused(&["detach", &vm.name], "is stopped by a signal")?;
    signal("CONT", vm)?;
    await_hypervisor(vm, "answers", "SIGCONT")?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (0, 0, "true")])?;
    check(vm, &[0, 0])
}

/// A QEMU whose main loop is stuck, as it writes to a pipe that is not read: it runs, and answers nothing.
fn hung(vm: &Vm, nodes: &Nodes) -> Result<()> {
    output("mkfifo", &[FIFO])?;
    let mut monitor = Monitor::connect(&vm.monitor())?;
    let save = json!({"execute": "pmemsave", "arguments": {"val": 0, "size": 4096, "filename": FIFO}});
    let saved = thread::spawn(move || monitor.execute(&save));
    let shown = await_hypervisor(vm, "silent", "stuck in a FIFO")?;
    let problem = shown["problem"].to_string();
    ensure!(problem.contains("its main loop is stuck in "), "{shown}");
    println!("{problem}");
    ensure!(shown["channel"] == "attached", "{shown}");
    taskset(vm, 1, 1, nodes)?;
    await_nodes(vm, &[0, 1])?;
    refused(&["detach", &vm.name], "`query-status` was not answered")?;
    ensure!(fs::read(FIFO)?.len() == 4096, "not what was to be saved");
    saved.join().map_err(|_| anyhow!("the other client panicked"))??;
    await_hypervisor(vm, "answers", "read")?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")])?;
    check(vm, &[0, 1])
}

/// An attach that is not answered fails in time; when QEMU goes on there is either no channel or a whole one.
fn stopped_in_mid_attach(vm: &Vm) -> Result<()> {
    for moment in MOMENTS_MS {
        let attach = spawn_attach(vm)?;
        sleep(Duration::from_millis(moment));
        signal("STOP", vm)?;
        let started = Instant::now();
        let ended = attach.wait_with_output()?;
        let error = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
        ensure!(started.elapsed() < HANG_LIMIT, "the attach took {:?}", started.elapsed());
        println!(
            "stopped {moment} ms after the attach began: {} after {} ms {error}",
            ended.status,
            started.elapsed().as_millis()
        );
        signal("CONT", vm)?;
        await_hypervisor(vm, "answers", "SIGCONT")?;
        let wanted = if ended.status.success() { "attached" } else { "none" };
        await_field(vm, "channel", wanted).context("after the attach")?;
        ensure!(records()? == usize::from(ended.status.success()), "{} records", records()?);
        if !ended.status.success() {
            vnumactl(&["attach", &vm.name])?;
        }
        detach(vm)?;
    }
    Ok(())
}

/// A QEMU that is killed during an attach leaves nothing, and the next VM of its name is attached as any other.
fn killed_in_mid_attach(vm: Vm, shape: &[String], nodes: &Nodes) -> Result<()> {
    let attach = spawn_attach(&vm)?;
    sleep(Duration::from_millis(MOMENTS_MS[1]));
    signal("STOP", &vm)?;
    sleep(Duration::from_millis(200));
    signal("KILL", &vm)?;
    let ended = attach.wait_with_output()?;
    println!("killed in mid-attach: {} {}", ended.status, String::from_utf8_lossy(&ended.stderr).trim());
    vnuma_scenario::wait_for("it to be gone", HANG_LIMIT, || Ok(listed(&vm.name)?.is_none()))?;
    ensure!(records()? == 0, "{} records stay behind", records()?);
    drop(vm);
    let next = Vm::start("busy", shape)?;
    wait_until_listed(&next.name)?;
    equip(&next)?;
    vnumactl(&["attach", &next.name])?;
    taskset(&next, 0, 1, nodes)?;
    wait_until_seen(&next.name, &[(1, 1, "true"), (1, 1, "true")])
}

fn signal(name: &str, vm: &Vm) -> Result<()> {
    output("kill", &[&format!("-{name}"), &vm.pid.to_string()]).map(drop)
}

/// After a failure: what QEMU's threads are at.
fn show_threads(vm: &Vm) {
    let command = format!(
        "for t in /proc/{}/task/*; do echo \"$(cat $t/comm): $(grep State $t/status)\"; cat $t/stack; done",
        vm.pid
    );
    match output("sh", &["-c", &command]) {
        Ok(text) => println!("{text}"),
        Err(error) => println!("{error:#}"),
    }
}

fn spawn_attach(vm: &Vm) -> Result<std::process::Child> {
    let mut command = Command::new("vnumactl");
    let command = command.args(["attach", &vm.name]).stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).spawn().context("vnumactl attach")
}

fn refused(arguments: &[&str], reason: &str) -> Result<()> {
    let result = Command::new("vnumactl").args(arguments).output()?;
    let error = String::from_utf8_lossy(&result.stderr).into_owned();
    ensure!(!result.status.success() && error.contains(reason), "vnumactl {arguments:?}: {error:?}");
    Ok(())
}

fn records() -> Result<usize> {
    Ok(fs::read_dir(RECORDS).map_or(0, Iterator::count))
}

/// Waits until vnumactl shows the VM's hypervisor so. It prints how long that took; nothing depends on it.
fn await_hypervisor(vm: &Vm, state: &str, why: &str) -> Result<Value> {
    let started = Instant::now();
    let shown = await_field(vm, "hypervisor", state)?;
    println!("{why}: {state} after {} ms", started.elapsed().as_millis());
    Ok(shown)
}

/// Waits with shorter pauses than other scenarios, as callers print how long it took. The limit only ends a hang.
fn await_field(vm: &Vm, field: &str, value: &str) -> Result<Value> {
    let end = Instant::now() + HANG_LIMIT;
    loop {
        let shown = listed(&vm.name)?.unwrap_or_default();
        if shown[field] == value {
            return Ok(shown);
        }
        ensure!(Instant::now() < end, "{}: {field} is not {value}: {shown}", vm.name);
        sleep(Duration::from_millis(20));
    }
}

/// Waits until the vCPUs are on these host nodes.
fn await_nodes(vm: &Vm, expected: &[u64]) -> Result<()> {
    let expected: Vec<_> = expected.iter().copied().map(Some).collect();
    let mut last = Vec::new();
    vnuma_scenario::wait_for("the vCPUs to be seen there", HANG_LIMIT, || {
        last = seen(&vm.name)?.into_iter().map(|vcpu| vcpu.host_node).collect();
        Ok(last == expected)
    })
    .with_context(|| format!("{}: on nodes {last:?}, not {expected:?}", vm.name))
}
