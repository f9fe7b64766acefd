//! The eden of a thread whose vCPU was moved is local again within two collections: HotSpot's ParallelGC under `vnuma-run`, beside a JVM
//! that has the same flags only. Both have one thread that allocates, on CPU 1 of a guest with a CPU on each of two nodes.
//! With G1 the pages of regions that are dealt out to a CPU go to its node.

use crate::guest::{DEFAULT_KERNEL, check_kernel_log, equip_with, show_guest, wait_until_seen};
use crate::runtimes::{DIRECTORY, install};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use vnuma_scenario::{HANG_LIMIT, Process, Vm, vnumactl, vnumad, wait_for};

const NAME: &str = "hotspot";
/// On the server an archive: a Java of HotSpot, `jre/bin/java`, and `Churn.class`, which allocates for ever.
fn archive(version: &str) -> String {
    format!("/root/java-{version}.tar")
}

/// Eden has most of it. Small, as the lab is slow: some seconds pass between two collections.
const FLAGS: [&str; 2] = ["-Xmx96m", "-Xmn32m"];
/// What shares of the eden of a node count as used and as left alone, percent.
const USED: u32 = 70;
const LEFT: u32 = 30;
/// KiB of 96 MiB.
const SOME_HUGE_PAGES: u64 = 8 << 10;
/// Of 96 MiB: more than a heap has by chance.
const SOME_PAGES: u64 = 1000;

pub fn run(version: &str) -> Result<()> {
    let _daemon = vnumad(&[])?;
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "1536M", "--kernel", DEFAULT_KERNEL];
    let vm = Vm::start(NAME, &shape.map(str::to_owned))?;
    collect(&vm, version).inspect_err(|_| show_guest(&vm))?;
    check_kernel_log(&vm)
}

fn collect(vm: &Vm, version: &str) -> Result<()> {
    install(vm)?;
    let archive = archive(version);
    vm.put(&archive, &archive)?;
    vm.exec(&["sh", "-c", &format!("tar -xf {archive} -C {DIRECTORY} && rm {archive}")])?;
    let shown = vm.exec(&["sh", "-c", &format!("{DIRECTORY}/jre/bin/java -version 2>&1")])?;
    println!("{}", shown.trim());
    ensure!(shown.contains(&format!("\"{version}.")), "{archive} has another Java");
    equip_with(vm, DEFAULT_KERNEL)?;
    vm.attach()?;
    vm.await_driver()?;
    go_to(vm, 1)?;
    let run = format!("{DIRECTORY}/vnuma-run");
    let started = |gc| [&run, "--libraries", DIRECTORY, "--gc", gc];
    let parallel = Jvm::start(vm, "with", &started("parallel"))?;
    let without = Jvm::start(vm, "without", &["env", "JAVA_TOOL_OPTIONS=-XX:+UseParallelGC -XX:+UseNUMA"])?;
    eden_follows(vm, &parallel, &without)?;
    drop((parallel, without));
    // Where both CPUs are on one node, their regions may be parts of one huge page.
    go_to(vm, 0)?;
    let g1 = Jvm::start(vm, "with-g1", &started("g1"))?;
    let without = Jvm::start(vm, "without-g1", &["env", "JAVA_TOOL_OPTIONS=-XX:+UseG1GC -XX:+UseNUMA"])?;
    regions_follow(vm, &g1, &without)
}

fn eden_follows(vm: &Vm, with: &Jvm, without: &Jvm) -> Result<()> {
    for jvm in [with, without] {
        jvm.pin()?;
        let pinned = jvm.collections()?.len();
        jvm.wait_for_collections(pinned + 3)?;
        jvm.expect_used(pinned + 2, 1).context("before the move")?;
    }
    for node in [0, 1] {
        go_to(vm, node)?;
        let counts = [with.collections()?.len(), without.collections()?.len()];
        // The second one of those that come now: what was used when the first one came may be older than the move.
        with.wait_for_collections(counts[0] + 2)?;
        with.expect_used(counts[0] + 1, node as usize)
            .with_context(|| format!("vCPU 1 is on node {node}"))?;
        // Its table of CPUs is that of its start.
        without.wait_for_collections(counts[1] + 2)?;
        without.expect_used(counts[1] + 1, 1).context("the JVM without vnuma-run")?;
        println!(
            "vCPU 1 is on node {node}: eden of that node is used, without vnuma-run it is that of node 1"
        );
    }
    Ok(())
}

/// Each CPU has half of the heap, whose pages are on its node.
fn regions_follow(vm: &Vm, with: &Jvm, without: &Jvm) -> Result<()> {
    with.pin()?;
    without.pin()?;
    let on_both = |pages: [u64; 2]| pages.iter().all(|&pages| pages >= SOME_PAGES);
    let on_first = |pages: [u64; 2]| pages[0] >= SOME_PAGES && pages[1] == 0;
    with.wait_for_heap("of the node of both CPUs", on_first)?;
    // Of the nodes that there are, whatever CPUs are on them.
    without.wait_for_heap("of both nodes", on_both)?;
    // A huge page has two of its regions, which are a CPU's. Without vnuma-run each region is of another node than the next.
    let huge = [with.huge_pages()?, without.huge_pages()?];
    println!("G1's heap has {huge:?} KiB of huge pages, with vnuma-run and without");
    ensure!(huge[0] >= SOME_HUGE_PAGES && huge[1] == 0, "{}: huge pages: {huge:?} KiB", with.log);
    for _ in 0..2 {
        go_to(vm, 1)?;
        let followed = with.wait_for_heap("of both nodes, as CPU 1 has gone to the second", on_both)?;
        println!("vCPU 1 is on node 1: G1's heap has {followed:?} pages by node");
        go_to(vm, 0)?;
        let followed = with.wait_for_heap("of the first node, as CPU 1 has come back", on_first)?;
        let alone = without.heap()?;
        println!(
            "vCPU 1 is on node 0: G1's heap has {followed:?} pages by node, without vnuma-run {alone:?}"
        );
        ensure!(on_both(alone), "{}: pages have followed by themselves: {alone:?}", without.log);
    }
    Ok(())
}

/// The vCPU that allocates goes to a node, and the guest knows.
fn go_to(vm: &Vm, node: u64) -> Result<()> {
    vnumactl(&["move", &vm.name, "--vcpu", "0", "--node", "0"])?;
    vnumactl(&["move", &vm.name, "--vcpu", "1", "--node", &node.to_string()])?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (node, node, "true")])
}

/// A JVM in the guest, with a log of its collections there.
struct Jvm<'a> {
    vm: &'a Vm,
    log: String,
    _process: Process,
}

impl<'a> Jvm<'a> {
    fn start(vm: &'a Vm, name: &str, prefix: &[&str]) -> Result<Self> {
        let log = format!("/root/{name}.log");
        let logging = format!("-Xlog:gc+heap=debug:file={log}");
        let java = format!("{DIRECTORY}/jre/bin/java");
        let java = [&java, &logging, "-cp", DIRECTORY];
        let command = [prefix, &java, &FLAGS, &["Churn"]].concat();
        Ok(Self { vm, log, _process: vm.spawn(&command)? })
    }

    /// Puts the thread that allocates on CPU 1, and no other: Java 25 uses no nodes if all of it is bound to one.
    fn pin(&self) -> Result<()> {
        let pin = format!(
            "for java in $(pgrep -f -- file={}); do
                 for thread in /proc/$java/task/*; do
                     [ \"$(cat $thread/comm)\" != churn ] || exec taskset -c -p 1 ${{thread##*/}}
                 done
             done; exit 1",
            self.log
        );
        wait_for(&format!("the thread of {}", self.log), HANG_LIMIT, || {
            Ok(self.vm.exec(&["sh", "-c", &pin]).is_ok())
        })
    }

    /// Pages by node of memory that prefers a node, as the regions of G1's heap do.
    fn heap(&self) -> Result<[u64; 2]> {
        let maps = format!("cat /proc/$(pgrep -f -- 'bin/[j]ava .*file={}')/numa_maps", self.log);
        let maps = self.vm.exec(&["sh", "-c", &maps])?;
        let mut pages = [0; 2];
        for line in maps.lines().filter(|line| line.contains(" prefer")) {
            for (node, pages) in pages.iter_mut().enumerate() {
                let key = format!("N{node}=");
                let found = line.split(' ').find_map(|word| word.strip_prefix(&key));
                *pages += found.map_or(Ok(0), str::parse).with_context(|| line.to_owned())?;
            }
        }
        Ok(pages)
    }

    /// KiB of its heap that are huge pages.
    fn huge_pages(&self) -> Result<u64> {
        let maps = format!(
            "java=$(pgrep -f -- 'bin/[j]ava .*file={}') && cat /proc/$java/numa_maps && cat /proc/$java/smaps",
            self.log
        );
        let maps = self.vm.exec(&["sh", "-c", &maps])?;
        let dealt = maps.lines().filter(|line| line.contains(" prefer"));
        let dealt: BTreeSet<_> = dealt.filter_map(|line| line.split(' ').next()).collect();
        let (mut in_heap, mut huge) = (false, 0);
        for line in maps.lines() {
            if let Some((start, _)) = line.split_once('-').filter(|_| line.contains(" rw")) {
                in_heap = dealt.contains(start);
            }
            if let Some(size) = line.strip_prefix("AnonHugePages:").filter(|_| in_heap) {
                huge +=
                    size.trim().trim_end_matches(" kB").parse::<u64>().with_context(|| line.to_owned())?;
            }
        }
        Ok(huge)
    }

    fn wait_for_heap(&self, what: &str, is_so: impl Fn([u64; 2]) -> bool) -> Result<[u64; 2]> {
        let mut pages = [0; 2];
        wait_for(&format!("the heap to be {what}"), HANG_LIMIT, || {
            pages = self.heap()?;
            Ok(is_so(pages))
        })
        .with_context(|| format!("{}: {pages:?} pages by node", self.log))?;
        Ok(pages)
    }

    /// Of each collection: how much of eden was used before it, by node.
    fn collections(&self) -> Result<Vec<Vec<u32>>> {
        // A JVM that does not start has none.
        let log = self.vm.exec(&["sh", "-c", &format!("cat {} || true", self.log)])?;
        // Versions differ in capitals.
        let log = log.to_lowercase();
        let mut found = Vec::new();
        for before in log.split("heap before gc").skip(1) {
            let before = before.split("heap after gc").next().unwrap_or_default();
            let nodes = before.lines().filter(|line| line.contains("lgrp "));
            let used = |line: &str| line.split_once("% used")?.0.rsplit(' ').next()?.parse().ok();
            found.push(nodes.filter_map(used).collect());
        }
        // The last one may be half written.
        found.pop();
        Ok(found)
    }

    fn wait_for_collections(&self, count: usize) -> Result<()> {
        let what = format!("{count} collections in {}", self.log);
        wait_for(&what, HANG_LIMIT, || Ok(self.collections()?.len() >= count))
    }

    /// Before that collection the eden of that node was full, and the other one was left alone.
    fn expect_used(&self, collection: usize, node: usize) -> Result<()> {
        let all = self.collections()?;
        let used = &all[collection];
        println!("  {}: collection {collection}: eden used by node: {used:?} %", self.log);
        ensure!(used.len() == 2, "{}: not two nodes: {used:?}", self.log);
        let around = &all[collection.saturating_sub(4)..];
        ensure!(used[node] >= USED && used[1 - node] <= LEFT, "{}: not on node {node}: {around:?}", self.log);
        Ok(())
    }
}
