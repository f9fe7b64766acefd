//! A guest node that grows or shrinks while the VM runs, by a balloon or by virtio-mem, and STREAM on guest node 0 after it, beside a VM
//! that always had its memory. All memory is bound to its home, as operators have it whose VMs have guest nodes.
//!
//! | cause | the host | balloon | virtio-mem | never changed |
//! |---|---|---|---|---|
//! | `grow` | lacked memory on both nodes, and has some on that of guest node 0 now | is inflated by both parts, then deflated by one | guest node 0 grows | has all from the beginning |
//! | `shrink` | lacks memory on the home of guest node 1 | is inflated by that part | guest node 1 shrinks | the same |

use crate::{
    committed::{Means, PART_MIB, SizeCause, WHOLE_MIB},
    policy::quiet_vnumad,
    raw::{SizeCell, Stream},
    vm::{Machine, NAME},
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vnuma_scenario::vnumactl;

/// The guest's driver, with what is plugged online as it comes.
const DRIVER: &str = "echo online_movable > /sys/devices/system/memory/auto_online_blocks && modprobe virtio_mem && \
    for i in $(seq 100); do [ $(ls -d /sys/bus/virtio/drivers/virtio_mem/virtio* | wc -l) = 2 ] && exit; sleep 0.2; done; exit 1";

/// Has the memory of a VM changed, and measures.
pub fn cell(
    mut machine: Machine,
    (cause, means): (SizeCause, Means),
    passes: usize,
    stream_mib: usize,
) -> Result<SizeCell> {
    let free_mib = match means {
        Means::Balloon => by_balloon(&mut machine, cause)?,
        Means::VirtioMem => by_virtio_mem(&machine, cause)?,
        Means::NeverChanged => free_mib(&machine)?,
    };
    machine.put_home()?;
    machine.ask::<u64>("drop")?;
    let _: Value = machine.ask(&format!("local {stream_mib}"))?;
    let passes = (0..passes).map(|_| machine.pass("pass")).collect::<Result<_>>()?;
    machine.ask::<u64>("end")?;
    Ok(SizeCell { cause, means, free_mib, stream: Stream { passes, ..Stream::default() } })
}

fn by_balloon(machine: &mut Machine, cause: SizeCause) -> Result<[u64; 2]> {
    machine.report(true)?;
    let both = WHOLE_MIB * 2;
    match cause {
        SizeCause::Grow => {
            machine.inflate(both - 2 * PART_MIB)?;
            machine.inflate(both - PART_MIB)?;
        }
        SizeCause::Shrink => machine.inflate(both - PART_MIB)?,
    }
    free_mib(machine)
}

fn by_virtio_mem(machine: &Machine, cause: SizeCause) -> Result<[u64; 2]> {
    machine.vm.exec(&["sh", "-c", DRIVER]).context("the driver of virtio-mem")?;
    let before = free_mib(machine)?;
    let daemon = quiet_vnumad()?;
    let resize = |node: &str, mib: u64| -> Result<()> {
        let shown = vnumactl(&["resize", NAME, "--guest-node", node, "--size", &format!("{mib}M")])?;
        let state = &shown["guest_nodes"][node.parse::<usize>()?]["resize"]["state"];
        ensure!(state == "done", "guest node {node} to {mib} MiB: {shown}");
        Ok(())
    };
    resize("0", WHOLE_MIB)?;
    if cause == SizeCause::Shrink {
        resize("1", WHOLE_MIB)?;
        resize("1", WHOLE_MIB - PART_MIB)?;
    }
    drop(daemon);
    let after = free_mib(machine)?;
    let grown = after[0].saturating_sub(before[0]);
    ensure!(grown > PART_MIB / 10 * 9, "guest node 0 has {grown} MiB more");
    Ok(after)
}

/// What is free on each node of the guest, MiB.
fn free_mib(machine: &Machine) -> Result<[u64; 2]> {
    let of = |node: usize| -> Result<u64> {
        let path = format!("/sys/devices/system/node/node{node}/meminfo");
        let text = machine.vm.exec(&["cat", &path])?;
        let line = text.lines().find(|line| line.contains("MemFree:")).with_context(|| text.clone())?;
        let kib: u64 = line.split_ascii_whitespace().rev().nth(1).context("no figure")?.parse()?;
        Ok(kib >> 10)
    };
    Ok([of(0)?, of(1)?])
}
