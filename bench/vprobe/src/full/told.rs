//! vm1 with two guest nodes and the driver: its guest is told where its vCPUs are, and its kernel balances memory by that.

use crate::{guest_memory::GuestMemory, load::Ready};
use anyhow::{Context, Result, ensure};
use std::{
    io::Write,
    process::{ChildStdin, ChildStdout},
    time::Duration,
};
use vnuma_scenario::{Lines, Vm, vnumactl, vnumad, wait_for};

/// What lab-vm is told of its shape.
pub const NODES: [&str; 3] = ["--nodes", "2", "--unbound"];
/// Its memory: a guest node of 256 MiB has too few huge pages for what programs take of it.
pub const MEMORY: &str = "768M";
/// Where the driver is on the server and in the guest.
const DRIVER: &str = "/root/vnuma.ko";
/// The guest's AutoNUMA.
const SCAN: &str = "/sys/kernel/debug/sched/numa_balancing";
const TIMERS: [&str; 3] = ["scan_delay_ms", "scan_period_min_ms", "scan_period_max_ms"];
/// Share of a program's pages that has to be on its guest node.
const ENOUGH: f64 = 0.995;
/// Times that memory is moved in the guest until enough is.
const ATTEMPTS: usize = 5;
const HANG: Duration = Duration::from_secs(120);

/// What is needed of the guest: its timers as they were, milliseconds.
pub struct Told {
    timers: [u64; 3],
}

impl Told {
    /// Loads the driver and plugs the channel, which stays when vnumad ends.
    pub fn equip(vm: &Vm) -> Result<Self> {
        vm.put(DRIVER, DRIVER)?;
        vm.exec(&["insmod", DRIVER])?;
        let daemon = vnumad(&[])?;
        vm.attach()?;
        vm.await_driver()?;
        drop(daemon);
        let read = |name: &str| {
            let path = format!("{SCAN}/{name}");
            let text = vm.exec(&["cat", &path])?;
            text.trim().parse().with_context(|| format!("{path} of the guest: {text:?}"))
        };
        let [delay, least, most] = TIMERS.map(read);
        Ok(Self { timers: [delay?, least?, most?] })
    }

    /// Multiplies the timers of the guest's AutoNUMA.
    pub fn stretch(&self, vm: &Vm, factor: f64) -> Result<()> {
        for (name, ms) in TIMERS.iter().zip(self.timers) {
            let line = format!("echo {:.0} > {SCAN}/{name}", ms as f64 * factor);
            vm.exec(&["sh", "-c", &line])?;
        }
        Ok(())
    }
}

/// Waits until the guest uses the node that each vCPU is on.
pub fn wait_until_told(vm: &Vm, nodes: &[usize]) -> Result<()> {
    let mut last = serde_json::Value::Null;
    let told = wait_for("the guest to know where its vCPUs are", HANG, || {
        last = vnumactl(&["show", &vm.name])?["vcpus"].take();
        let vcpus = last.as_array_mut().context("vnumactl show: no vcpus")?;
        vcpus.sort_by_key(|vcpu| vcpu["apic_id"].as_u64());
        let right = |(vcpu, node): (&serde_json::Value, &usize)| {
            vcpu["host_node"] == *node && vcpu["guest_node"] == *node && vcpu["state"] == "true"
        };
        Ok(vcpus.len() == nodes.len() && vcpus.iter().zip(nodes).all(right))
    });
    told.with_context(|| format!("expected nodes {nodes:?}, vnumactl shows {last}"))
}

/// With a program in a guest.
pub struct Talk {
    pub input: ChildStdin,
    pub lines: Lines<ChildStdout>,
}

impl Talk {
    /// Its memory goes to this guest node.
    pub fn bring_home(&mut self, memory: &GuestMemory, node: usize) -> Result<()> {
        let mut share = 0.0;
        for _ in 0..ATTEMPTS {
            writeln!(self.input, "{node}").and_then(|()| self.input.flush()).context("telling a program")?;
            let line = self.lines.next("memory that goes to another node")?;
            let ready: Ready =
                serde_json::from_str(&line).with_context(|| format!("a program said {line:?}"))?;
            share = share_within(&ready.memory, memory.of_node(node));
            if share >= ENOUGH {
                return Ok(());
            }
        }
        ensure!(
            share >= ENOUGH,
            "only {:.1} % of a program's memory could go to guest node {node}",
            share * 100.0
        );
        Ok(())
    }
}

/// Share of these ranges, each a first byte and a length, that is within another one.
fn share_within(ranges: &[(u64, u64)], node: std::ops::Range<u64>) -> f64 {
    let all: u64 = ranges.iter().map(|(_, bytes)| bytes).sum();
    let part = |(start, bytes): &(u64, u64)| {
        (start + bytes).min(node.end).saturating_sub((*start).max(node.start)).min(*bytes)
    };
    ranges.iter().map(part).sum::<u64>() as f64 / all.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_on_a_node_is_by_bytes() {
        let ranges = [(0, 10), (90, 20), (200, 10)];
        assert_eq!(share_within(&ranges, 0..100), 0.5);
        assert_eq!(share_within(&ranges, 100..200), 0.25);
        assert_eq!((share_within(&ranges, 0..300), share_within(&[], 0..1)), (1.0, 0.0));
    }
}
