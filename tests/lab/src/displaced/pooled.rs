//! A VM of huge pages of a pool (hugetlbfs). Its guest touches some for the first time while its vCPU runs on another node. They come
//! home as whole ones as soon as the home's pool has free ones, and get another home in the same way.

use super::{
    BALANCING, CONFIGURATION, HANG_LIMIT, MEMORY, MIB, NAME, NOTHING, SETTINGS, check_kernel_log, come_home,
    displaced, expect_displaced, memory,
    pool::{Pool, huge_pages},
    put, start, write,
};
use crate::policy::{FAR, NEAR};
use anyhow::{Context, Result, ensure};
use std::fs;
use vnuma_scenario::{Vm, output, vnumactl, wait_for};

const FILE: &str = "/root/pooled.args";
const MEMORY_MIB: u64 = 512;
/// Of each node of the server. What the VM has not touched yet is reserved for it, so that the kernel keeps as many on some node.
const PAGES: u64 = 280;
const POOL: Pool = Pool { page_kib: 2048 };
/// So much of what the guest writes has to be displaced: some of its huge pages were touched before.
const DISPLACED: u64 = 16 * MIB;

pub fn run() -> Result<()> {
    fs::write(BALANCING, "0").context(BALANCING)?;
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    (0..2).try_for_each(|node| POOL.set(node, PAGES).map(drop))?;
    let vm = start_at_home()?;
    let daemon = start()?;
    wait_for("guest node 0 to be at home", HANG_LIMIT, || Ok(memory()?["nodes"][0]["home"] == MEMORY))
        .with_context(|| format!("{:?}", memory()))?;
    put(&vm, FAR)?;
    write(&vm, "first", 0)?;
    put(&vm, NEAR)?;
    expect_displaced("first", DISPLACED)?;
    let pages = POOL.is_shown(&vm)?;

    let pool = POOL.set(MEMORY, POOL.taken(MEMORY)?)?;
    vnumactl(&["memory", NAME, "--set", "both"])?;
    wait_for("the pool of the home to be shown as used up", HANG_LIMIT, || {
        Ok(memory()?["nodes"][0]["unmovable"][0]["reason"] == "pool")
    })
    .with_context(|| format!("{:?}", memory()))?;
    ensure!(displaced()? >= DISPLACED, "{} bytes came to a pool without a page", displaced()?);
    println!("pool: {pool} pages of node {MEMORY}, none free: {} MiB stay", displaced()? / MIB);
    POOL.set(MEMORY, PAGES)?;
    come_home(&vm, "the pool of its home had no page")?;
    ensure!(huge_pages(&vm)?.iter().sum::<u64>() == pages, "huge pages were split: {:?}", huge_pages(&vm)?);

    rehome(&vm)?;
    vm.exec(&["sh", "-c", "yes vnuma | head -c 50331648 | cmp - /dev/shm/first"]).context("its content")?;
    drop(daemon);
    check_kernel_log(&vm)?;
    drop(vm);
    (0..2).try_for_each(|node| POOL.set(node, 0).map(drop))
}

/// Its guest nodes have the same home and no policy.
fn start_at_home() -> Result<Vm> {
    let half = MEMORY_MIB / 2;
    let object = |id: u32| {
        format!("-object memory-backend-memfd,id=ram{id},size={half}M,hugetlb=on,hugetlbsize=2M,prealloc=off")
    };
    let numa =
        |id: u32| format!("-numa node,nodeid={id},memdev=ram{id} -numa cpu,node-id={id},socket-id={id}");
    let lines = [
        format!("-name {NAME},debug-threads=on"),
        "-machine q35 -accel kvm -cpu host".to_owned(),
        format!("-smp 2,maxcpus=2,sockets=2,cores=1,threads=1 -m {MEMORY_MIB}M"),
        object(0),
        object(1),
        numa(0),
        numa(1),
    ];
    fs::write(FILE, lines.join("\n") + "\n").context(FILE)?;
    let own = std::process::id().to_string();
    output("taskset", &["-p", "-c", NEAR, &own])?;
    let vm = Vm::start(NAME, &["--placement", FILE].map(str::to_owned));
    output("taskset", &["-p", "-c", "0-3", &own])?;
    vm
}

/// A home whose pool has too few pages is refused; with enough of them all go there.
fn rehome(vm: &Vm) -> Result<()> {
    let other = 1 - MEMORY;
    let target = other.to_string();
    let wish = ["rehome", NAME, "--guest-node", "0", "--node", &target, "--move-pinned"];
    let before = huge_pages(vm)?;
    POOL.set(other, POOL.taken(other)? + 2)?;
    let refused = vnumactl(&wish).err().map(|error| format!("{error:#}"));
    POOL.set(other, PAGES)?;
    let refused = refused.context("a pool with 2 free pages was not refused")?;
    ensure!(refused.contains("has 2 free huge pages of 2048 KiB"), "{refused}");
    println!("refused: {}", refused.trim());
    vnumactl(&wish)?;
    wait_for("guest node 0 to have its new home", HANG_LIMIT, || {
        let shown = memory()?;
        Ok(shown["nodes"][0]["home"] == other && displaced()? <= NOTHING)
    })
    .with_context(|| format!("{:?}", memory()))?;
    let after = huge_pages(vm)?;
    ensure!(
        after.iter().sum::<u64>() == before.iter().sum::<u64>() && after != before,
        "{before:?}, {after:?}"
    );
    println!("another home: huge pages by node were {before:?}, are {after:?}");
    Ok(())
}
