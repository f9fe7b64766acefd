//! A guest that scribbles over its channel and rings without end hurts itself alone.

use crate::guest::{
    check, check_kernel_log, detach, equip, taskset, unload_driver, wait_until_listed, wait_until_seen,
};
use anyhow::{Context, Result, ensure};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use std::fs::{self, File, OpenOptions};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::time::Instant;
use vnuma_abi_topology_channel::REGION_SIZE;
use vnuma_abi_topology_channel::ivshmem::{HOST_PEER, REG_DOORBELL, VECTORS};
use vnuma_random::Rng;
use vnuma_scenario::{Lines, Nodes, Vm, vnumactl, vnumad};

const PROGRAM: &str = "/root/lab-scenario";
/// Moves of both VMs while one guest scribbles.
const MOVES: u32 = 6;
/// Of a CPU, for everything that vnumad does meanwhile. Without its budget of wake-ups it would need all of one.
const MOST_CPU: f64 = 0.5;

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    let daemon = vnumad(&[])?;
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "384M"].map(str::to_owned);
    let (bad, good) = (Vm::start("bad", &shape)?, Vm::start("good", &shape)?);
    for vm in [&bad, &good] {
        wait_until_listed(&vm.name)?;
        equip(vm)?;
        vnumactl(&["attach", &vm.name])?;
        wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")])?;
    }
    // The kernel gives a device's memory to programs only while no driver has it.
    unload_driver(&bad)?;
    bad.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
    let mut scribbler = bad.spawn(&[PROGRAM, "scribble"])?;
    let mut said = Lines::of_process(&mut scribbler, "the hostile guest")?;
    let line = said.next("scribble")?;
    ensure!(line.starts_with("scribbling"), "the hostile guest does not scribble: {line:?}");

    let (cpu, start) = (daemon.cpu_time()?, Instant::now());
    for number in 1..=MOVES {
        let node = number % 2;
        taskset(&bad, 0, node, &nodes)?;
        taskset(&good, 0, node, &nodes)?;
        wait_until_seen(&good.name, &[(node.into(), node.into(), "true"), (1, 1, "true")])
            .with_context(|| format!("the other VM, move {number}"))?;
        check(&good, &[node.into(), 1])?;
    }
    let (cpu, elapsed) = (daemon.cpu_time()? - cpu, start.elapsed().as_secs_f64());
    let share = cpu.as_secs_f64() / elapsed;
    println!(
        "while one guest scribbles and rings for {elapsed:.1} s, vnumad uses {:.1} % of a CPU",
        100.0 * share
    );
    ensure!(share <= MOST_CPU, "vnumad uses {share:.2} of a CPU, not at most {MOST_CPU}");
    ensure!(scribbler.0.try_wait()?.is_none(), "the scribbling has ended early");
    drop(scribbler);
    heal(&bad, &nodes)?;
    wait_until_seen(&good.name, &[(0, 0, "true"), (1, 1, "true")]).context("the other VM in the end")?;
    check_kernel_log(&good)
}

/// What the guest broke is its own channel; a new one is whole again.
fn heal(bad: &Vm, nodes: &Nodes) -> Result<()> {
    detach(bad)?;
    bad.exec(&["insmod", "/root/vnuma.ko"])?;
    vnumactl(&["attach", &bad.name])?;
    taskset(bad, 0, 1, nodes)?;
    wait_until_seen(&bad.name, &[(1, 1, "true"), (1, 1, "true")]).context("with a new channel")?;
    check(bad, &[1, 1])?;
    check_kernel_log(bad)?;
    println!("the hostile guest follows again with a new channel");
    Ok(())
}

/// In the guest: writes random words over the whole channel and rings every vector of the host, until it is killed.
pub fn scribble() -> Result<()> {
    let device = find_device()?;
    let memory: NonNull<u64> = map(&device.join("resource2"), REGION_SIZE)?.cast();
    let registers: NonNull<u8> = map(&device.join("resource0"), 0x100)?.cast();
    println!("scribbling over {}", device.display());
    let mut random = Rng::new(1);
    loop {
        for word in 0..REGION_SIZE / 8 {
            // Every other time something that a layout may have: small numbers.
            let value = random.index(if word % 2 == 0 { usize::MAX } else { 70 }) as u64;
            // SAFETY: `word` lies within the mapping, which is aligned to a page and lives as long as the process.
            unsafe { memory.add(random.index(REGION_SIZE / 8)).write_volatile(value) };
            let vector = (word % VECTORS) as u32;
            // SAFETY: the register is a 32-bit word within the mapping of the registers.
            unsafe {
                let doorbell = registers.add(REG_DOORBELL as usize).cast::<u32>();
                doorbell.write_volatile(u32::from(HOST_PEER) << 16 | vector);
            }
        }
    }
}

fn find_device() -> Result<PathBuf> {
    for entry in fs::read_dir("/sys/bus/pci/devices").context("/sys/bus/pci/devices")? {
        let path = entry?.path();
        let is =
            |file: &str, id: &str| fs::read_to_string(path.join(file)).is_ok_and(|text| text.trim() == id);
        if is("vendor", "0x1af4") && is("device", "0x1110") {
            fs::write(path.join("enable"), "1").context("enabling the device")?;
            return Ok(path);
        }
    }
    anyhow::bail!("no ivshmem device in this guest")
}

fn map(path: &Path, length: usize) -> Result<NonNull<std::ffi::c_void>> {
    let file: File =
        OpenOptions::new().read(true).write(true).open(path).with_context(|| path.display().to_string())?;
    let length = NonZeroUsize::new(length).context("nothing to map")?;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let mapped = unsafe {
        mmap(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, &file, 0)
    };
    mapped.with_context(|| path.display().to_string())
}
