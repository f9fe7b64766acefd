//! What `vnumactl place` prints is started as it is: the VM's vCPUs, memory, nodes and device are where the placement says, by
//! `/proc` and by the guest, and the reservation is the VM's while it is there. Another VM has ordinary pages and no device.

use crate::virsh::{Libvirt, virsh};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use vnuma_scenario::{
    HANG_LIMIT, PCI_DEVICES, Vm, device_of_class, output, pass_through, vcpu_threads, vnumactl, vnumad,
    wait_for,
};

const NAME: &str = "placed";
/// VMs do not run on CPU 0 of the lab's server.
const GUARD: &str = "server";
/// The VM with ordinary pages. It is on two nodes, as neither has so many CPUs left.
const PLAIN: &str = "plain";
const PLAIN_SHAPE: [&str; 6] = ["--vcpus", "3", "--memory", "64M", "--lifetime", "600"];
const PLAIN_PID: &str = "/root/plain.pid";
const FILE: &str = "/root/placed.vm";
const DOMAIN: &str = "/root/placed.xml";
const HUGE_PAGES: &str = "/dev/hugepages";
/// Of an NVMe disk.
pub const CLASS: &str = "0x010802";
const PAGE_BYTES: u64 = 2 << 20;
/// Huge pages of each node.
const PAGES: u64 = 200;
/// On a busy machine the VM needs more than the default lifetime to start.
const SHAPE: [&str; 8] = ["--vcpus", "3", "--memory", "512M", "--hugepages", "2M", "--lifetime", "600"];

pub fn run() -> Result<()> {
    let device = device_of_class(CLASS)?.address;
    pass_through(&device)?;
    for node in 0..2 {
        let pool = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
        fs::write(&pool, PAGES.to_string()).context(pool)?;
    }
    let _daemon = vnumad(&[])?;
    let guard = vnumactl(&["place", GUARD, "--vcpus", "1", "--memory", "2M", "--lifetime", "3600"])?;
    ensure!(pins(&guard["reservation"]["placement"])? == [(0, 0)], "not on CPU 0: {guard}");

    let vm = start(&device)?;
    let placement = reservation()?["placement"].clone();
    expect_reservation_of(vm.pid)?;
    expect_threads(vm.pid, &placement)?;
    expect_memory(vm.pid, &placement)?;
    expect_guest(&vm, &placement)?;
    println!("vCPUs, memory, guest nodes and the device are where the placement says");

    let taken = [&["place", "other", "--device", device.as_str()][..], &SHAPE].concat();
    expect_error(&taken, &format!("device {device}: in use by {NAME}"))?;
    expect_error(&["release", NAME], &format!("is held by the VM {NAME}, PID {}", vm.pid))?;
    drop(vm);
    let gone = || Ok(reservations()?.iter().all(|one| one["placement"]["name"] != NAME));
    wait_for("the reservation to end with its VM", HANG_LIMIT, gone)?;
    vnumactl(&taken)?;
    vnumactl(&["release", "other"])?;
    println!("the reservation was the VM's, and has ended with it");
    plain()?;
    libvirt(&device)
}

/// Ordinary pages, by the commands that the manual of `vnumactl place` has. The VM stands still before its first instruction.
fn plain() -> Result<()> {
    let placement = place_plain("qemu", FILE)?;
    let start = format!(
        "qemu-system-x86_64 $(grep -v '^#' {FILE}) -nodefaults -display none -S -daemonize -pidfile {PLAIN_PID}
        sed -n 's/^# //p' {FILE} | sh -s $(cat {PLAIN_PID})"
    );
    output("sh", &["-ec", &start])?;
    let pid: i32 = fs::read_to_string(PLAIN_PID).context(PLAIN_PID)?.trim().parse()?;
    let found = expect_threads(pid, &placement).and_then(|()| expect_policies(pid, &placement));
    output("kill", &["-KILL", &pid.to_string()])?;
    found?;
    vnumactl(&["release", PLAIN])?;
    println!("ordinary pages: vCPUs and the policies of memory are as the placement says");
    Ok(())
}

/// Places it, and writes what is printed to a file.
fn place_plain(format: &str, file: &str) -> Result<Value> {
    let command = [&["place", PLAIN][..], &PLAIN_SHAPE, &["--format", format]].concat();
    fs::write(file, output("vnumactl", &command)?).with_context(|| file.to_owned())?;
    let placement = reservation_of(PLAIN)?["placement"].clone();
    ensure!(nodes(&placement)?.len() == 2, "it was to be on two nodes: {placement}");
    Ok(placement)
}

/// Some memory of the process is bound to each home.
fn expect_policies(pid: i32, placement: &Value) -> Result<()> {
    let path = format!("/proc/{pid}/numa_maps");
    let maps = fs::read_to_string(&path).with_context(|| path.clone())?;
    for node in nodes(placement)? {
        let policy = format!("bind:{}", node["home"]);
        let bound = maps.lines().any(|line| line.split(' ').nth(1) == Some(&policy));
        ensure!(bound, "{path}: nothing has the policy {policy}: {maps}");
    }
    Ok(())
}

/// The same placement as a domain of libvirt, which starts what was printed and says itself where it put it. The VM has no disk:
/// its firmware runs.
fn libvirt(device: &str) -> Result<()> {
    fs::create_dir_all(HUGE_PAGES).context(HUGE_PAGES)?;
    output("mount", &["-t", "hugetlbfs", "hugetlbfs", HUGE_PAGES])?;
    let _libvirt = Libvirt::start("")?;
    let command = [&["place", NAME, "--device", device][..], &SHAPE, &["--format", "libvirt"]].concat();
    fs::write(DOMAIN, output("vnumactl", &command)?).context(DOMAIN)?;
    let placement = reservation()?["placement"].clone();
    virsh(&["create", DOMAIN])?;
    let pid_file = format!("/run/libvirt/qemu/{NAME}.pid");
    let pid: i32 = fs::read_to_string(&pid_file).context(pid_file)?.trim().parse()?;
    expect_threads(pid, &placement)?;
    expect_memory(pid, &placement)?;
    let nodes_of_guest = virsh(&["qemu-monitor-command", NAME, "--hmp", "info numa"])?;
    for (at, node) in nodes(&placement)?.iter().enumerate() {
        let cpus: Vec<_> = pins_of(node)?.iter().map(|(vcpu, _)| vcpu.to_string()).collect();
        let line = format!("node {at} cpus: {}", cpus.join(" "));
        ensure!(nodes_of_guest.contains(&line), "no {line:?} in {nodes_of_guest}");
    }
    expect_group_of(device, pid)?;
    let started = virsh(&["dumpxml", NAME])?;
    ensure!(!started.contains("bus='0x01'"), "the port for the channel is taken: {started}");
    virsh(&["destroy", NAME])?;
    println!(
        "libvirt starts what was printed: vCPUs, memory, guest nodes and the device are where the placement says"
    );
    // It has the CPUs until its VM is known to be gone, if that was known to be there.
    let given_up = || Ok(vnumactl(&["release", NAME]).is_ok() || reservation().is_err());
    wait_for("the reservation to be given up", HANG_LIMIT, given_up)?;
    let placement = place_plain("libvirt", DOMAIN)?;
    virsh(&["create", DOMAIN])?;
    let pid_file = format!("/run/libvirt/qemu/{PLAIN}.pid");
    let pid: i32 = fs::read_to_string(&pid_file).context(pid_file)?.trim().parse()?;
    expect_threads(pid, &placement)?;
    expect_policies(pid, &placement)?;
    virsh(&["destroy", PLAIN])?;
    println!("and with ordinary pages as well");
    Ok(())
}

/// A process has the IOMMU group of a device open.
fn expect_group_of(device: &str, pid: i32) -> Result<()> {
    let group =
        fs::read_link(Path::new(PCI_DEVICES).join(device).join("iommu_group")).context("IOMMU group")?;
    let file = Path::new("/dev/vfio").join(group.file_name().context("no name")?);
    let directory = format!("/proc/{pid}/fd");
    let mut open = Vec::new();
    for entry in fs::read_dir(&directory).context(directory)? {
        open.extend(fs::read_link(entry?.path()));
    }
    ensure!(open.contains(&file), "process {pid} has not {} open: {open:?}", file.display());
    Ok(())
}

/// Places the VM, and starts what was printed.
fn start(device: &str) -> Result<Vm> {
    let command = [&["place", NAME, "--device", device][..], &SHAPE, &["--format", "qemu"]].concat();
    let text = output("vnumactl", &command)?;
    print!("{text}");
    fs::write(FILE, text).context(FILE)?;
    let waits = reservation()?;
    ensure!(waits["waits_ms"].is_u64() && waits["pid"].is_null(), "it does not wait for its VM: {waits}");
    // Its home is the node of the device, and two vCPUs do not fit there beside the others' share.
    let homes: Vec<_> = nodes(&waits["placement"])?.iter().map(|node| node["home"].clone()).collect();
    ensure!(homes == [1, 0], "the homes of its guest nodes: {homes:?}");
    Vm::start(NAME, &["--placement", FILE].map(str::to_owned))
}

fn reservations() -> Result<Vec<Value>> {
    let all = vnumactl(&["reservations"])?;
    Ok(all.as_array().context("vnumactl reservations: not an array")?.clone())
}

fn reservation() -> Result<Value> {
    reservation_of(NAME)
}

fn reservation_of(name: &str) -> Result<Value> {
    let all = reservations()?;
    let own = all.iter().find(|one| one["placement"]["name"] == name);
    own.cloned().with_context(|| format!("no reservation of {name}: {all:?}"))
}

fn expect_reservation_of(pid: i32) -> Result<()> {
    wait_for("the reservation to be the VM's", HANG_LIMIT, || Ok(reservation()?["pid"] == pid))
}

fn nodes(placement: &Value) -> Result<&Vec<Value>> {
    placement["guest_nodes"].as_array().with_context(|| format!("no guest nodes: {placement}"))
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("no number: {value}"))
}

/// (vCPU, CPU) of a guest node.
fn pins_of(node: &Value) -> Result<Vec<(u64, u64)>> {
    let pins = node["vcpus"].as_array().with_context(|| format!("no vCPUs: {node}"))?;
    pins.iter().map(|pin| Ok((number(&pin["vcpu"])?, number(&pin["cpu"])?))).collect()
}

fn pins(placement: &Value) -> Result<Vec<(u64, u64)>> {
    let pins: Result<Vec<_>> = nodes(placement)?.iter().map(pins_of).collect();
    Ok(pins?.concat())
}

fn list(mut numbers: Vec<u64>) -> String {
    numbers.sort_unstable();
    let words: String = numbers.iter().map(|number| format!("{number},")).collect();
    words.trim_end_matches(',').parse::<vnuma_model::CpuSet>().map(|set| set.to_string()).unwrap_or(words)
}

/// CPUs of guest nodes without devices, if these have any, and else of all.
fn emulator_cpus(placement: &Value) -> Result<Vec<u64>> {
    let devices = placement["devices"].as_array().context("no devices")?;
    let has_device = |node: &Value| devices.iter().any(|device| device["guest_node"] == node["id"]);
    let others = nodes(placement)?.iter().filter(|node| !has_device(node)).map(pins_of);
    let mut pins = others.collect::<Result<Vec<_>>>()?.concat();
    if pins.is_empty() {
        pins = self::pins(placement)?;
    }
    Ok(pins.into_iter().map(|(_, cpu)| cpu).collect())
}

/// Each vCPU thread may run on its CPU only, the others on those that vCPUs at devices do not need.
fn expect_threads(pid: i32, placement: &Value) -> Result<()> {
    let threads = vcpu_threads(pid)?;
    let pins = pins(placement)?;
    ensure!(threads.len() == pins.len(), "{} vCPU threads, {} pins", threads.len(), pins.len());
    let mut expected: BTreeMap<i32, String> =
        pins.iter().map(|&(vcpu, cpu)| (threads[vcpu as usize], cpu.to_string())).collect();
    expected.insert(pid, list(emulator_cpus(placement)?));
    for (tid, cpus) in expected {
        let path = format!("/proc/{pid}/task/{tid}/status");
        let status = fs::read_to_string(&path).with_context(|| path.clone())?;
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        ensure!(allowed.map(str::trim) == Some(&cpus), "{path}: {allowed:?}, expected {cpus}");
    }
    Ok(())
}

/// The huge pages of each guest node are bound to its home, and all there.
fn expect_memory(pid: i32, placement: &Value) -> Result<()> {
    let path = format!("/proc/{pid}/numa_maps");
    let maps = fs::read_to_string(&path).with_context(|| path.clone())?;
    let mut found = BTreeMap::<String, BTreeMap<String, u64>>::new();
    for line in maps.lines().filter(|line| line.split(' ').any(|word| word == "huge")) {
        let policy = line.split(' ').nth(1).unwrap_or_default();
        for word in line.split(' ') {
            let pages = word.strip_prefix('N').and_then(|word| word.split_once('='));
            if let Some((node, count)) = pages {
                *found.entry(policy.to_owned()).or_default().entry(node.to_owned()).or_default() +=
                    count.parse::<u64>().with_context(|| line.to_owned())?;
            }
        }
    }
    let mut expected = BTreeMap::new();
    for node in nodes(placement)? {
        let pages = number(&node["memory_bytes"])? / PAGE_BYTES;
        let home = node["home"].to_string();
        expected.insert(format!("bind:{home}"), BTreeMap::from([(home, pages)]));
    }
    ensure!(found == expected, "{path}: huge pages by policy and node: {found:?}, expected {expected:?}");
    Ok(())
}

/// The guest's kernel knows its nodes, their distances, and the node of its device.
fn expect_guest(vm: &Vm, placement: &Value) -> Result<()> {
    let read = |path: String| -> Result<String> { Ok(vm.exec(&["cat", &path])?.trim().to_owned()) };
    let distances = placement["distances"].as_array().context("no distances")?;
    for (at, node) in nodes(placement)?.iter().enumerate() {
        let directory = format!("/sys/devices/system/node/node{at}");
        let cpus = read(format!("{directory}/cpulist"))?;
        let expected = list(pins_of(node)?.iter().map(|&(vcpu, _)| vcpu).collect());
        ensure!(cpus == expected, "guest node {at} has the CPUs {cpus}, expected {expected}");
        let row: Vec<_> = distances[at].as_array().context("no row")?.iter().map(Value::to_string).collect();
        let seen = read(format!("{directory}/distance"))?;
        ensure!(seen == row.join(" "), "guest node {at} has the distances {seen}, expected {row:?}");
    }
    let devices = placement["devices"].as_array().context("no devices")?;
    ensure!(devices.len() == 1 && devices[0]["local"] == true, "not local: {devices:?}");
    let script = format!(
        "cd {PCI_DEVICES} && for d in *; do test $(cat $d/class) = {CLASS} && cat $d/numa_node; done; true"
    );
    let node = vm.exec(&["sh", "-c", &script])?;
    let expected = devices[0]["guest_node"].to_string();
    ensure!(node.trim() == expected, "the guest's disk is on node {node:?}, expected {expected}");
    Ok(())
}

fn expect_error(command: &[&str], part: &str) -> Result<()> {
    let error = vnumactl(command).err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(error.contains(part), "vnumactl {}: no {part:?} in {error:?}", command.join(" "));
    Ok(())
}
