//! What displaces memory of a VM while its vCPUs are at home or do not touch anything new: a home that is full for a while, KSM,
//! and swap.

use super::{
    DISPLACED, HANG_LIMIT, MEMORY, MIB, NAME, WRITTEN_MIB, balloon, come_home, displaced, expect_displaced,
    is_whole, memory, put, write,
};
use crate::policy::{FAR, NEAR};
use anyhow::{Context, Result, ensure};
use nix::libc;
use std::{fs, io, os::fd::AsRawFd};
use vnuma_process::open_pidfd;
use vnuma_scenario::{Vm, output, vnumactl, wait_for};

const KSM: &str = "/sys/kernel/mm/ksm";
/// KSM looks at so many pages at a time, and sleeps for so many milliseconds in between.
const KSM_PACE: [(&str, &str); 2] = [("pages_to_scan", "20000"), ("sleep_millisecs", "20")];
/// What of it the full home does not take at least: some pages are left that are no huge ones.
const NO_ROOM: u64 = 8 * MIB;
/// Looks of KSM at all memory until it has merged what is the same.
const SCANS: u64 = 3;
/// Part of two files, as most of their pages are the same.
const MERGED: u64 = 2 * WRITTEN_MIB * MIB / 10 * 9;
const ZRAM: &str = "/sys/block/zram0";
/// The swap is in memory, compressed.
const SWAP_MIB: u64 = 384;
/// Mappings of QEMU that are smaller are not the guest's memory.
const LARGE: u64 = 64 * MIB;
/// Addresses of one call.
const PART: u64 = 16 * MIB;

/// The home has no page left for a while, so that the kernel takes those of the other node for a guest whose vCPUs are at home.
/// A policy waits until there is room again.
pub fn full_home(vm: &Vm, file: &str) -> Result<()> {
    let pool = format!("/sys/devices/system/node/node{MEMORY}/hugepages/hugepages-2048kB/nr_hugepages");
    // Guest node 1 gives its free memory back, so that what it writes needs pages. Its home is the same, and stays there: where most
    // of its memory is, it is at home.
    balloon(vm, 1)?;
    write(vm, "stays", 1)?;
    fill(&pool)?;
    write(vm, file, 1)?;
    expect_displaced(file, NO_ROOM)?;
    vnumactl(&["memory", NAME, "--set", "both"])?;
    wait_for("the policy to find that there is no room", HANG_LIMIT, || Ok(memory()?["rests_ms"].is_u64()))
        .with_context(|| format!("{:?}", memory()))?;
    ensure!(displaced()? >= NO_ROOM, "{} bytes came to a home that was full", displaced()?);
    vnumactl(&["memory", NAME, "--set", "none"])?;
    fs::write(&pool, "0").context(pool)?;
    come_home(vm, "its home was full")?;
    is_whole(vm, "stays")?;
    is_whole(vm, file)
}

/// Takes huge pages of the home until it has none left.
fn fill(pool: &str) -> Result<()> {
    let free = free_mib(MEMORY)?;
    fs::write(pool, (free / 2).to_string()).context(pool.to_owned())?;
    let text = fs::read_to_string(pool).context(pool.to_owned())?;
    let taken: u64 = text.trim().parse().with_context(|| format!("{pool}: {text:?}"))?;
    println!(
        "{} of {free} MiB that node {MEMORY} had free are taken, {} are left",
        taken * 2,
        free_mib(MEMORY)?
    );
    Ok(())
}

fn free_mib(node: u64) -> Result<u64> {
    let path = format!("/sys/devices/system/node/node{node}/meminfo");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let kib = text.lines().find_map(|line| {
        let (_, value) = line.split_once("MemFree:")?;
        value.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    Ok(kib.with_context(|| format!("{path}: no MemFree"))? / 1024)
}

/// KSM merges a file of the guest with another one, and the guest writes it again while its vCPUs are on the other node.
pub fn ksm(vm: &Vm, file: &str) -> Result<()> {
    write(vm, file, 0)?;
    for (name, value) in KSM_PACE {
        fs::write(format!("{KSM}/{name}"), value).context(name)?;
    }
    fs::write(format!("{KSM}/run"), "1").context("KSM")?;
    // What the guest has removed is the same, and merged before the file is: KSM merges what it has found unchanged once before.
    let scans = ksm_count("full_scans")? + SCANS;
    let mut merged = 0;
    wait_for("KSM to merge the guest's pages", HANG_LIMIT, || {
        merged = ksm_count("pages_sharing")? * 4096;
        Ok(merged >= MERGED && ksm_count("full_scans")? >= scans)
    })
    .with_context(|| format!("{} MiB are merged", merged / MIB))?;
    fs::write(format!("{KSM}/run"), "0").context("KSM")?;
    put(vm, FAR)?;
    let again = format!(
        "yes vnuma | head -c {} | dd of=/dev/shm/{file} bs=1M iflag=fullblock conv=notrunc status=none",
        WRITTEN_MIB * MIB
    );
    vm.exec(&["numactl", "--physcpubind=0", "sh", "-c", &again])?;
    put(vm, NEAR)?;
    expect_displaced(file, DISPLACED)?;
    come_home(vm, "merged by KSM and written elsewhere")?;
    is_whole(vm, file)
}

fn ksm_count(name: &str) -> Result<u64> {
    let path = format!("{KSM}/{name}");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    text.trim().parse().with_context(|| format!("{path}: {text:?}"))
}

/// The guest's memory is swapped out and touched again while its vCPUs are on the other node.
pub fn swap(vm: &Vm, file: &str) -> Result<()> {
    write(vm, file, 0)?;
    output("modprobe", &["zram", "num_devices=1"])?;
    fs::write(format!("{ZRAM}/disksize"), format!("{SWAP_MIB}M")).context(ZRAM)?;
    output("mkswap", &["/dev/zram0"])?;
    output("swapon", &["/dev/zram0"])?;
    page_out(vm)?;
    let swapped = swapped(vm)?;
    println!("{} MiB of QEMU are swapped out", swapped / MIB);
    ensure!(swapped >= WRITTEN_MIB * MIB, "only {swapped} bytes of QEMU were swapped out");
    put(vm, FAR)?;
    // Not all of it: a node that has most of what is left in memory would be the home.
    let half = (WRITTEN_MIB * MIB / 2).to_string();
    vm.exec(&["numactl", "--physcpubind=0", "head", "-c", &half, &format!("/dev/shm/{file}")])
        .context("reading what was swapped out")?;
    put(vm, NEAR)?;
    expect_displaced(file, DISPLACED)?;
    come_home(vm, "swapped out and touched again elsewhere")?;
    is_whole(vm, file)
}

/// Has the kernel swap out the guest's memory, as far as it can.
fn page_out(vm: &Vm) -> Result<()> {
    let path = format!("/proc/{}/maps", vm.pid);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let pidfd = open_pidfd(vm.pid).context("QEMU")?;
    let range = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
    };
    for (start, end) in text.lines().filter_map(range).filter(|(start, end)| end - start >= LARGE) {
        for at in (start..end).step_by(PART as usize) {
            let part =
                libc::iovec { iov_base: at as *mut libc::c_void, iov_len: (end - at).min(PART) as usize };
            // SAFETY: the kernel reads one iovec, which lives through the call; its addresses are of the other process.
            let done = unsafe {
                libc::syscall(
                    libc::SYS_process_madvise,
                    pidfd.as_raw_fd(),
                    &raw const part,
                    1_usize,
                    libc::MADV_PAGEOUT,
                    0_u32,
                )
            };
            // Mappings that cannot be swapped out are none of the guest's memory.
            if done < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL) {
                return Err(io::Error::last_os_error()).with_context(|| format!("MADV_PAGEOUT at {at:x}"));
            }
        }
    }
    Ok(())
}

fn swapped(vm: &Vm) -> Result<u64> {
    super::status(vm, "VmSwap:")
}
