//! A VM of huge pages of a pool (hugetlbfs). Its guest touches some for the first time while its vCPU runs on another node. They come
//! home as whole ones as soon as the home's pool has free ones, and get another home in the same way.

use super::{
    BALANCING, CONFIGURATION, HANG_LIMIT, MEMORY, MIB, NAME, NOTHING, SETTINGS, check_kernel_log, come_home,
    displaced, expect_displaced, memory, put, start, write,
};
use crate::policy::{FAR, NEAR};
use anyhow::{Context, Result, ensure};
use std::fs;
use vnuma_scenario::{Vm, output, vnumactl, wait_for};

const FILE: &str = "/root/pooled.args";
const MEMORY_MIB: u64 = 512;
/// Of each node of the server. What the VM has not touched yet is reserved for it, so that the kernel keeps as many on some node.
const PAGES: u64 = 280;
const PAGE: u64 = 2 * MIB;
/// So much of what the guest writes has to be displaced: some of its huge pages were touched before.
const DISPLACED: u64 = 8 * PAGE;

pub fn run() -> Result<()> {
    fs::write(BALANCING, "0").context(BALANCING)?;
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    (0..2).try_for_each(|node| set_pool(node, PAGES).map(drop))?;
    let vm = start_at_home()?;
    let daemon = start()?;
    wait_for("guest node 0 to be at home", HANG_LIMIT, || Ok(memory()?["nodes"][0]["home"] == MEMORY))
        .with_context(|| format!("{:?}", memory()))?;
    put(&vm, FAR)?;
    write(&vm, "first", 0)?;
    put(&vm, NEAR)?;
    expect_displaced("first", DISPLACED)?;
    let pages = is_of_the_pool(&vm)?;

    let pool = set_pool(MEMORY, taken(MEMORY)?)?;
    vnumactl(&["memory", NAME, "--set", "both"])?;
    wait_for("the pool of the home to be shown as used up", HANG_LIMIT, || {
        Ok(memory()?["nodes"][0]["unmovable"][0]["reason"] == "pool")
    })
    .with_context(|| format!("{:?}", memory()))?;
    ensure!(displaced()? >= DISPLACED, "{} bytes came to a pool without a page", displaced()?);
    println!("pool: {pool} pages of node {MEMORY}, none free: {} MiB stay", displaced()? / MIB);
    set_pool(MEMORY, PAGES)?;
    come_home(&vm, "the pool of its home had no page")?;
    ensure!(huge_pages(&vm)?.iter().sum::<u64>() == pages, "huge pages were split: {:?}", huge_pages(&vm)?);

    rehome(&vm)?;
    vm.exec(&["sh", "-c", "yes vnuma | head -c 50331648 | cmp - /dev/shm/first"]).context("its content")?;
    drop(daemon);
    check_kernel_log(&vm)?;
    drop(vm);
    (0..2).try_for_each(|node| set_pool(node, 0).map(drop))
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

fn pool_file(node: u64, name: &str) -> String {
    format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/{name}")
}

fn read_pool(node: u64, name: &str) -> Result<u64> {
    let path = pool_file(node, name);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    text.trim().parse().with_context(|| format!("{path}: {text:?}"))
}

/// Gives a node's pool so many pages. Returns how many it had.
fn set_pool(node: u64, pages: u64) -> Result<u64> {
    let (path, before) = (pool_file(node, "nr_hugepages"), read_pool(node, "nr_hugepages")?);
    fs::write(&path, pages.to_string()).with_context(|| path.clone())?;
    let now = read_pool(node, "nr_hugepages")?;
    ensure!(now == pages, "{path}: {now} pages, {pages} were to be there");
    Ok(before)
}

/// Pages of a node's pool that are in use.
fn taken(node: u64) -> Result<u64> {
    Ok(read_pool(node, "nr_hugepages")? - read_pool(node, "free_hugepages")?)
}

/// Huge pages of the VM on each node, by the kernel's count.
fn huge_pages(vm: &Vm) -> Result<[u64; 2]> {
    let path = format!("/proc/{}/numa_maps", vm.pid);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let lines = text.lines().filter(|line| line.split(' ').any(|word| word == "huge"));
    let words: Vec<&str> = lines.flat_map(|line| line.split(' ')).collect();
    let of = |node: usize| {
        let counts =
            words.iter().filter_map(|word| word.strip_prefix(&format!("N{node}="))?.parse::<u64>().ok());
        counts.sum()
    };
    Ok([of(0), of(1)])
}

/// vnumad shows the pages as the kernel does. Returns how many there are.
fn is_of_the_pool(vm: &Vm) -> Result<u64> {
    let pages = huge_pages(vm)?;
    let shown = memory()?;
    let nodes = shown["nodes"].as_array().context("no nodes")?;
    let places = nodes.iter().filter_map(|node| node["places"].as_array()).flatten();
    ensure!(places.clone().all(|place| place["pages"] == "pool" && place["page_kib"] == 2048), "{shown}");
    let bytes: u64 = places.filter_map(|place| place["size"]["bytes"].as_u64()).sum();
    ensure!(bytes == (pages[0] + pages[1]) * PAGE, "{bytes} bytes are shown of {pages:?} pages: {shown}");
    println!("huge pages: {} on node 0, {} on node 1", pages[0], pages[1]);
    Ok(pages[0] + pages[1])
}

/// A home whose pool has too few pages is refused; with enough of them all go there.
fn rehome(vm: &Vm) -> Result<()> {
    let other = 1 - MEMORY;
    let target = other.to_string();
    let wish = ["rehome", NAME, "--guest-node", "0", "--node", &target, "--move-pinned"];
    let before = huge_pages(vm)?;
    set_pool(other, taken(other)? + 2)?;
    let refused = vnumactl(&wish).err().map(|error| format!("{error:#}"));
    set_pool(other, PAGES)?;
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
