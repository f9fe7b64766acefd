//! vCPUs of a guest without the driver, re-plugged by vnumad.

use crate::{HANG_LIMIT, Process, Vm, vnumactl};
use anyhow::{Context, Result};
use serde_json::Value;
use std::time::Instant;

/// Stands for the guest's udev, which brings plugged CPUs online.
const UDEV: &str = "while :; do for f in /sys/devices/system/cpu/cpu[0-9]*/online; do \
    [ \"$(cat $f)\" = 1 ] || echo 1 > $f; done; sleep 0.01; done 2>/dev/null";

/// Brings CPUs online that are plugged into the guest, until it is dropped.
pub fn bring_online(vm: &Vm) -> Result<Process> {
    vm.spawn(&["sh", "-c", UDEV])
}

/// The thread of a vCPU, by vnumactl.
pub fn vcpu_thread(vm: &Vm, vcpu: u64) -> Result<i32> {
    let shown = vnumactl(&["show", &vm.name])?;
    let vcpus = shown["vcpus"].as_array().context("no vcpus")?;
    let found = vcpus.iter().find(|found| found["apic_id"] == vcpu);
    let tid = found.and_then(|vcpu| i32::try_from(vcpu["tid"].as_i64()?).ok());
    tid.with_context(|| format!("no vCPU {vcpu}: {shown}"))
}

/// Replugs a vCPU that was just moved: vnumad refuses until it has seen that the vCPU runs elsewhere. What vnumactl prints.
pub fn replug_when_noticed(vm: &Vm, vcpu: u64) -> Result<Value> {
    let end = Instant::now() + HANG_LIMIT;
    loop {
        match vnumactl(&["replug", &vm.name, "--vcpu", &vcpu.to_string()]) {
            Ok(done) => return Ok(done),
            Err(error)
                if format!("{error:#}").contains("is on the right guest node already")
                    && Instant::now() < end => {}
            Err(error) => return Err(error),
        }
    }
}
