//! A VM of one page of 1 GiB. It stays while its home's pool has none, and comes home as a whole when it has one; it gets another home
//! in the same way.

use super::{
    BALANCING, CONFIGURATION, HANG_LIMIT, MEMORY, NAME, NOTHING, SETTINGS, check_kernel_log, displaced,
    memory,
    pool::{Pool, huge_pages},
    start,
};
use crate::policy::FAR;
use anyhow::{Context, Result, ensure};
use std::fs;
use vnuma_scenario::{Vm, output, vnumactl, wait_for};

const FILE: &str = "/root/gigantic.args";
const POOL: Pool = Pool { page_kib: 1 << 20 };
const PAGE: u64 = POOL.page_kib << 10;
/// What the guest writes, and finds again.
const WRITTEN: &str = "67108864";

pub fn run() -> Result<()> {
    fs::write(BALANCING, "0").context(BALANCING)?;
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    let vm = start_elsewhere()?;
    vm.exec(&["sh", "-c", &format!("yes vnuma | head -c {WRITTEN} > /dev/shm/file")])?;
    let daemon = start()?;
    wait_for("the page to be looked at", HANG_LIMIT, || Ok(!memory()?["nodes"][0]["places"].is_null()))?;
    ensure!(POOL.is_shown(&vm)? == 1, "{:?}", huge_pages(&vm)?);
    let other = 1 - MEMORY;

    rehome(&vm, other, MEMORY)?;
    rehome(&vm, MEMORY, other)?;
    drop(daemon);
    check_kernel_log(&vm)
}

/// One guest node, whose page is touched first on the other node.
fn start_elsewhere() -> Result<Vm> {
    let lines = [
        format!("-name {NAME},debug-threads=on"),
        "-machine q35 -accel kvm -cpu host".to_owned(),
        "-smp 2,maxcpus=2,sockets=2,cores=1,threads=1 -m 1024M".to_owned(),
        "-object memory-backend-memfd,id=ram0,size=1024M,hugetlb=on,hugetlbsize=1G,prealloc=off".to_owned(),
        "-numa node,nodeid=0,memdev=ram0".to_owned(),
    ];
    fs::write(FILE, lines.join("\n") + "\n").context(FILE)?;
    let own = std::process::id().to_string();
    output("taskset", &["-p", "-c", FAR, &own])?;
    let vm = Vm::start(NAME, &["--placement", FILE].map(str::to_owned));
    output("taskset", &["-p", "-c", "0-3", &own])?;
    vm
}

/// A home whose pool has no page is refused; with one, the page goes there as it is.
fn rehome(vm: &Vm, from: u64, to: u64) -> Result<()> {
    let target = to.to_string();
    let wish = ["rehome", NAME, "--guest-node", "0", "--node", &target, "--move-pinned"];
    POOL.set(to, POOL.taken(to)?)?;
    let refused = vnumactl(&wish).err().map(|error| format!("{error:#}"));
    let refused = refused.context("a pool without a free page was not refused")?;
    ensure!(refused.contains("has 0 free huge pages of 1048576 KiB"), "{refused}");
    println!("refused: {}", refused.trim());
    let whole = |node: u64| if node == 0 { [1, 0] } else { [0, 1] };
    ensure!(huge_pages(vm)? == whole(from), "{:?}", huge_pages(vm)?);
    POOL.set(to, 1)?;
    vnumactl(&wish)?;
    wait_for("guest node 0 to have its new home", HANG_LIMIT, || {
        Ok(memory()?["nodes"][0]["home"] == to && displaced()? <= NOTHING)
    })
    .with_context(|| format!("{:?}", memory()))?;
    ensure!(huge_pages(vm)? == whole(to), "{:?}", huge_pages(vm)?);
    ensure!(POOL.taken(from)? == 0, "the page is not free on node {from}");
    vm.exec(&["sh", "-c", &format!("yes vnuma | head -c {WRITTEN} | cmp - /dev/shm/file")])
        .context("its content")?;
    println!("a page of {} MiB went from node {from} to {to}", PAGE >> 20);
    Ok(())
}
