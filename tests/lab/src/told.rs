//! A guest is told the nodes of the devices that are passed through to it: one that it boots with, and one that is plugged later.
//! Both are behind root ports that name no node. Its kernel has the node for as long as the driver is there,
//! and takes buffers for transfers from it. An agent in the guest acts on it.

use crate::guest::{check_kernel_log, detach, equip, unload_driver};
use crate::memory::share;
use crate::placement::CLASS as DISK_CLASS;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vnuma_scenario::{
    HANG_LIMIT, Monitor, PCI_DEVICES, Process, Vm, device_of_class, output, pass_through, vnumactl, vnumad,
    wait_for,
};

const NAME: &str = "told";
/// Of a network card.
const CARD_CLASS: &str = "0x020000";
/// Host nodes of the disk and of the card, by the server's profile.
const DISK_NODE: u64 = 1;
const CARD_NODE: u64 = 0;
/// A device that nobody says anything of.
const NO_NODE: i64 = -1;
/// Share of a VM's pages: the kernel does not move those that are in use at that moment.
const MOST: f64 = 0.98;
/// Where the disk's driver is bound: a CPU of the other guest node, so that what is local there is not local to the disk.
const PROBE_CPU: &str = "0";
/// Buffers that the disk's driver takes at least: two rings for each of two queues.
const BUFFERS: usize = 4;
/// The port that the channel leaves free.
const PORT: &str = "vnuma1";

pub fn run() -> Result<()> {
    let (disk, card) = (device_of_class(DISK_CLASS)?.address, device_of_class(CARD_CLASS)?.address);
    pass_through(&disk)?;
    pass_through(&card)?;
    let daemon = vnumad(&[])?;
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "512M", "--device", &disk].map(str::to_owned);
    let vm = Vm::start(NAME, &shape)?;
    expect_node(&vm, DISK_CLASS, NO_NODE).context("before anybody has said a word")?;
    equip(&vm)?;
    vm.attach()?;
    wait_for_node(&vm, DISK_CLASS, DISK_NODE)?;
    wait_until_shown(&disk, DISK_NODE, DISK_NODE, "true")?;
    println!("the disk that it booted with is on the guest node of its home");
    buffers_are_on(&vm, DISK_NODE).context("buffers of the disk")?;

    vm.plug("card", &card, PORT)?;
    wait_for_node(&vm, CARD_CLASS, CARD_NODE)?;
    wait_until_shown(&card, CARD_NODE, CARD_NODE, "true")?;
    expect_node(&vm, DISK_CLASS, DISK_NODE as i64)?;
    println!("a card that was plugged later is on that of its own");
    crate::workload::run(&vm, CARD_CLASS).context("the agent")?;

    let _daemon = survives(&vm, &disk, daemon)?;
    follows_home(&vm, &disk)?;
    check_kernel_log(&vm)
}

/// The guest's kernel binds its own driver to the disk, far from it: where does that take memory for transfers? The kernel says it by
/// its event `dma_alloc`, and a DMA address is a physical one without an IOMMU in the guest. lspci says the same node.
fn buffers_are_on(vm: &Vm, node: u64) -> Result<()> {
    let script = format!(
        "set -e
        t=/sys/kernel/tracing
        mountpoint -q $t || mount -t tracefs tracefs $t
        for d in {PCI_DEVICES}/*; do test $(cat $d/class) != {DISK_CLASS} || break; done
        lspci -v -s ${{d##*/}}
        echo 1 > $t/events/dma/dma_alloc/enable
        taskset -c {PROBE_CPU} modprobe nvme
        for try in $(seq 300); do ! ls -d $d/nvme/nvme?/nvme*n1 2>/dev/null || break; sleep 0.2; done
        echo 0 > $t/events/dma/dma_alloc/enable
        grep \"dma_alloc: ${{d##*/}}\" $t/trace"
    );
    let text = vm.exec(&["sh", "-c", &script])?;
    let said = text.lines().flat_map(|line| line.split(", ")).any(|flag| flag == format!("NUMA node {node}"));
    ensure!(said, "lspci does not say NUMA node {node}: {text}");
    let zones = zones(&vm.exec(&["cat", "/proc/zoneinfo"])?)?;
    let mut found = Vec::new();
    for line in text.lines().filter(|line| line.contains("dma_alloc: ")) {
        let address = line.split(' ').find_map(|word| word.strip_prefix("dma_addr="));
        let frame =
            u64::from_str_radix(address.unwrap_or_default(), 16).with_context(|| line.to_owned())? >> 12;
        let zone = zones.iter().find(|zone| (zone.first..zone.end).contains(&frame));
        found.push(zone.with_context(|| format!("{line}: in none of {zones:?}"))?.node);
    }
    ensure!(
        found.len() >= BUFFERS && found.iter().all(|on| *on == node),
        "expected at least {BUFFERS} buffers, all on node {node}, found some on {found:?}: {text}"
    );
    println!("its kernel's own driver took {} buffers for transfers, all on that node", found.len());
    Ok(())
}

/// Page frames of a node, without the last one.
#[derive(Debug, PartialEq, Eq)]
struct Zone {
    node: u64,
    first: u64,
    end: u64,
}

/// From `/proc/zoneinfo`.
fn zones(text: &str) -> Result<Vec<Zone>> {
    let (mut node, mut spanned, mut zones) = (0, 0, Vec::new());
    for line in text.lines() {
        let number = |word: &str| word.trim_end_matches(',').parse::<u64>().with_context(|| line.to_owned());
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["Node", id, "zone", _] => node = number(id)?,
            ["spanned", frames] => spanned = number(frames)?,
            ["start_pfn:", first] => {
                let first = number(first)?;
                zones.push(Zone { node, first, end: first + spanned });
            }
            _ => {}
        }
    }
    ensure!(!zones.is_empty(), "/proc/zoneinfo has no zones");
    Ok(zones)
}

/// Whoever ends: what the guest was told stays for as long as there is a driver and a channel, and no longer.
fn survives(vm: &Vm, disk: &str, daemon: Process) -> Result<Process> {
    let told = DISK_NODE as i64;
    drop(daemon);
    expect_node(vm, DISK_CLASS, told).context("without vnumad")?;
    let daemon = vnumad(&[])?;
    vm.await_found()?;
    wait_until_shown(disk, DISK_NODE, DISK_NODE, "true").context("the next vnumad")?;
    unload_driver(vm)?;
    expect_node(vm, DISK_CLASS, NO_NODE).context("without the driver")?;
    vm.exec(&["insmod", "/root/vnuma.ko"])?;
    wait_for_node(vm, DISK_CLASS, DISK_NODE)?;
    detach(vm)?;
    expect_node(vm, DISK_CLASS, NO_NODE).context("without the channel")?;
    vm.attach()?;
    wait_for_node(vm, DISK_CLASS, DISK_NODE)?;
    println!("the guest gives back what it found when the driver or the channel goes");
    Ok(daemon)
}

/// VFIO pins memory, so that the devices go before it is moved. All of it is on node 0 then, and the disk's node is no guest node's
/// home. This comes last: the emulated processor can leave an event behind when a page of the guest is mapped anew, and KVM
/// gives a VM up that accesses a register after that.
fn follows_home(vm: &Vm, disk: &str) -> Result<()> {
    for (id, class) in [("card", CARD_CLASS), ("device0", DISK_CLASS)] {
        let mut monitor = Monitor::connect(&vm.monitor())?;
        monitor.execute(&json!({"execute": "device_del", "arguments": {"id": id}}))?;
        wait_for("the guest to release a device", HANG_LIMIT, || Ok(nodes(vm, class)?.is_empty()))?;
    }
    // QEMU takes a device away some time after the guest has released it, and only then are its pages not pinned any more.
    wait_for("QEMU to close the devices", HANG_LIMIT, || {
        Ok(vnumactl(&["show", NAME])?["devices"] == json!([]))
    })?;
    wait_for("the VM's memory to be on node 0", HANG_LIMIT, || {
        output("migratepages", &[&vm.pid.to_string(), "1", "0"])?;
        Ok(share(vm, 0)? > MOST)
    })?;
    vm.plug("disk", disk, PORT)?;
    wait_for_node(vm, DISK_CLASS, 0)?;
    wait_until_shown(disk, DISK_NODE, 0, "approximate")?;
    println!("its memory was moved: the disk is on the guest node that is nearest");
    Ok(())
}

/// What the guest's kernel says of its devices of a class that are passed through.
fn nodes(vm: &Vm, class: &str) -> Result<Vec<i64>> {
    let script = format!(
        "cd {PCI_DEVICES} && for d in *; do test $(cat $d/class) = {class} && cat $d/numa_node; done; true"
    );
    let text = vm.exec(&["sh", "-c", &script])?;
    text.lines().map(|line| line.trim().parse().with_context(|| format!("numa_node is {line:?}"))).collect()
}

fn expect_node(vm: &Vm, class: &str, expected: i64) -> Result<()> {
    let found = nodes(vm, class)?;
    ensure!(found == [expected], "numa_node of the device of class {class}: {found:?}, expected {expected}");
    Ok(())
}

fn wait_for_node(vm: &Vm, class: &str, expected: u64) -> Result<()> {
    let mut last = Vec::new();
    wait_for("the guest's device to have its node", HANG_LIMIT, || {
        last = nodes(vm, class)?;
        Ok(last == [expected as i64])
    })
    .with_context(|| format!("class {class}: expected {expected}, numa_node is {last:?}"))
}

/// What vnumactl says of a device of the VM.
fn wait_until_shown(address: &str, host_node: u64, guest_node: u64, state: &str) -> Result<()> {
    let mut last = Value::Null;
    wait_for("vnumactl to show the device", HANG_LIMIT, || {
        last = vnumactl(&["show", NAME])?["devices"].clone();
        let devices = last.as_array().context("no devices")?;
        Ok(devices.iter().any(|device| {
            device["host"] == address
                && device["host_node"] == host_node
                && device["guest_node"] == guest_node
                && device["acked_node"] == guest_node
                && device["state"] == state
        }))
    })
    .with_context(|| format!("{address}: expected {host_node}, {guest_node}, {state}; vnumactl shows {last}"))
}
