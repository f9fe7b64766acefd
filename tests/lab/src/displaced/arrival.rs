//! Post-copy displaces memory: pages come where the threads of the QEMU run that receives them, and these may run elsewhere than those
//! that brought the first part. A memory policy brings the pages home after the arrival.

use super::{DISPLACED, HANG_LIMIT, MIB, NOTHING, SETTINGS, displaced_of};
use crate::migrate::{HOSTS, Host, NAME, POST_COPY, boot_like};
use crate::policy::{BALANCING, FAR, NEAR};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use vnuma_scenario::{Monitor, Vm, output, wait_for};

/// What the guest has to send, of the 192 MiB of its node 0.
const WRITTEN_MIB: u64 = 96;
/// So much of the VM comes before post-copy begins.
const BEFORE: u64 = 100 * MIB;
/// Bytes in a second until then.
const SLOWLY: u64 = 16 * MIB;

pub fn run() -> Result<()> {
    fs::write(BALANCING, "0").context(BALANCING)?;
    let [a, b] = &HOSTS;
    let daemon = b.start_vnumad_with(SETTINGS.split_once("[observe]").context("settings")?.0)?;
    fs::create_dir_all(a.path("qmp")).context("a folder of monitors")?;
    let own = std::process::id().to_string();
    output("taskset", &["-p", "-c", NEAR, &own])?;
    let vm = boot_like(a, &["--nodes", "2", "--vcpus", "2", "--memory", "384M", "--unbound"])?;
    let write =
        format!("head -c {} /dev/urandom > /dev/shm/file && cksum < /dev/shm/file", WRITTEN_MIB * MIB);
    let sum = vm.exec(&["numactl", "--membind=0", "sh", "-c", &write])?;
    let pid = b.receive(a, &["-global", POST_COPY])?;
    output("taskset", &["-p", "-c", "0-3", &own])?;

    migrate(a, b, pid)?;
    let there = Vm::started(b.lab_name, pid)?;
    drop(vm);
    put(pid, NEAR)?;
    let mut last = Value::Null;
    wait_for("vnumactl to show what post-copy displaced", HANG_LIMIT, || {
        last = b.ask(&["memory", NAME])?;
        Ok(displaced_of(&last) >= DISPLACED)
    })
    .with_context(|| last.to_string())?;
    println!("after post-copy {} MiB are displaced", displaced_of(&last) / MIB);

    b.ask(&["memory", NAME, "--set", "both"])?;
    wait_for("displaced memory to come home", HANG_LIMIT, || {
        last = b.ask(&["memory", NAME])?;
        Ok(displaced_of(&last) <= NOTHING && last["moves"]["last"]["ended"] == true)
    })
    .with_context(|| last.to_string())?;
    println!("after post-copy: at home again, {} MiB", last["moves"]["bytes"].as_u64().unwrap_or(0) / MIB);
    let found = there.exec(&["sh", "-c", "cksum < /dev/shm/file"])?;
    ensure!(found == sum, "the guest's file: {sum:?} before, {found:?} after");
    drop(daemon);
    Ok(())
}

/// Puts all threads of a process on these CPUs.
fn put(pid: i32, cpus: &str) -> Result<()> {
    output("taskset", &["-a", "-p", "-c", cpus, &pid.to_string()]).map(drop)
}

/// By QMP. The QEMU that receives goes to the other node when post-copy begins.
fn migrate(from: &Host, to: &Host, pid: i32) -> Result<()> {
    let mut monitor = from.monitor()?;
    let post_copy = json!({"capabilities": [{"capability": "postcopy-ram", "state": true}]});
    for (command, arguments) in [
        ("migrate-set-capabilities", post_copy),
        ("migrate-set-parameters", json!({"max-bandwidth": SLOWLY})),
        ("migrate", json!({"uri": to.destination()})),
    ] {
        monitor.execute(&json!({"execute": command, "arguments": arguments})).context(command)?;
    }
    wait_until(&mut monitor, "half of the VM to have come", |state| {
        state["ram"]["transferred"].as_u64() >= Some(BEFORE)
    })?;
    put(pid, FAR)?;
    monitor.execute(&json!({"execute": "migrate-start-postcopy"}))?;
    wait_until(&mut monitor, "the migration to end", |state| state["status"] == "completed")
}

fn wait_until(monitor: &mut Monitor, what: &str, ready: impl Fn(&Value) -> bool) -> Result<()> {
    let mut last = Value::Null;
    wait_for(what, HANG_LIMIT, || {
        last = monitor.execute(&json!({"execute": "query-migrate"}))?;
        ensure!(last["status"] != "failed", "it has failed");
        Ok(ready(&last))
    })
    .with_context(|| last.to_string())
}
