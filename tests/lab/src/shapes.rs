//! VMs as they are: without NUMA, with memory that nobody bound, with more guest nodes than homes, with vCPUs that come
//! and go.

use crate::guest::{
    check, check_kernel_log, equip, listed, seen, taskset, wait_until_listed, wait_until_seen,
};
use crate::policy::BALANCING;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use vnuma_scenario::{HANG_LIMIT, Monitor, Nodes, Vm, output, vcpu_threads, vnumactl, vnumad, wait_for};

const CONFIGURATION: &str = "/root/shapes.toml";
/// What the plugged one is called.
const NEW_VCPU: &str = "more";

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    // The kernel would move unbound memory itself.
    fs::write(BALANCING, "0").context(BALANCING)?;
    fs::write(CONFIGURATION, "[policy]\nperiod_ms = 300\nmemory_mib_per_s = 512\n").context(CONFIGURATION)?;
    let _daemon = vnumad(&["--config", CONFIGURATION])?;
    uma(&nodes)?;
    unbound(&nodes)?;
    shared_home(&nodes)?;
    grown(&nodes)
}

fn shape(arguments: &str) -> Vec<String> {
    arguments.split(' ').map(str::to_owned).collect()
}

/// Nothing can be published to it, but it is observed like any other.
fn uma(nodes: &Nodes) -> Result<()> {
    let vm = Vm::start("flat", &shape("--uma --vcpus 2 --memory 256M"))?;
    wait_until_listed(&vm.name)?;
    for node in [3, 1] {
        taskset(&vm, 1, node, nodes)?;
        wait_for("vnumactl to show where the vCPU is", HANG_LIMIT, || {
            Ok(seen(&vm.name)?[1].host_node == Some(node.into()))
        })?;
    }
    let vcpu = seen(&vm.name)?.swap_remove(1);
    ensure!(vcpu.state == "unknown" && vcpu.guest_node.is_none(), "a vCPU without guest nodes: {vcpu:?}");
    let shown = listed(&vm.name)?.context("not listed")?;
    ensure!(shown["nodes"].as_array().is_some_and(Vec::is_empty), "guest nodes of a UMA VM: {shown}");
    let error = format!("{:#}", vnumactl(&["attach", &vm.name]).err().context("a UMA VM was attached")?);
    ensure!(error.contains("UMA"), "not said why: {error}");
    println!("UMA: observed, and refused with a reason");
    Ok(())
}

/// Homes of memory that is bound nowhere are where it lies, and follow it.
fn unbound(nodes: &Nodes) -> Result<()> {
    let vm = Vm::start("loose", &shape("--nodes 2 --vcpus 2 --memory 768M --unbound"))?;
    wait_until_listed(&vm.name)?;
    taskset(&vm, 0, 0, nodes)?;
    taskset(&vm, 1, 3, nodes)?;
    equip(&vm)?;
    vnumactl(&["attach", &vm.name])?;
    // First touch puts each guest node's memory where its vCPU runs. More than half of a node outweighs what booting left.
    let touch = "for node in 0 1; do numactl --membind=$node --physcpubind=$node \
                 stress-ng --quiet --vm 1 --vm-bytes 160M --vm-keep --vm-populate --vm-ops 1 --oomable; done";
    vm.exec(&["sh", "-c", touch])?;
    await_homes(&vm, &[0, 3])?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (3, 1, "true")]).context("each at home")?;
    taskset(&vm, 1, 0, nodes)?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (0, 0, "true")]).context("moved to the other's home")?;
    check(&vm, &[0, 0])?;
    // The host moves all memory: both guest nodes are now at home on one host node.
    output("migratepages", &[&vm.pid.to_string(), "0,3", "2"])?;
    await_homes(&vm, &[2, 2])?;
    taskset(&vm, 0, 2, nodes)?;
    taskset(&vm, 1, 2, nodes)?;
    wait_until_seen(&vm.name, &[(2, 0, "true"), (2, 0, "true")]).context("after the memory moved")?;
    check(&vm, &[0, 0])?;
    println!("unbound: homes are where the memory lies, and follow it");
    memory_follows(&vm, nodes)?;
    check_kernel_log(&vm)
}

/// Its policy moves the memory to vCPUs that may not go to it, and the guest is told of the new homes.
fn memory_follows(vm: &Vm, nodes: &Nodes) -> Result<()> {
    let busy =
        vm.spawn(&["sh", "-c", "for cpu in 0 1; do dd if=/dev/zero of=/dev/null bs=8M & done; wait"])?;
    taskset(vm, 0, 3, nodes)?;
    taskset(vm, 1, 3, nodes)?;
    vnumactl(&["policy", &vm.name, "--set", "vprobe"])?;
    await_homes(vm, &[3, 3]).with_context(|| format!("{:?}", vnumactl(&["policy", &vm.name])))?;
    // The guest node whose memory came first has got them.
    let mut last = Vec::new();
    wait_for("the guest to know of the new homes", HANG_LIMIT, || {
        last = seen(&vm.name)?;
        Ok(last.iter().all(|vcpu| vcpu.host_node == Some(3) && vcpu.state == "true"))
    })
    .with_context(|| format!("vnumactl shows {last:?}"))?;
    check(vm, &last.iter().filter_map(|vcpu| vcpu.guest_node).collect::<Vec<_>>())?;
    let memory = vnumactl(&["policy", &vm.name])?["memory"].take();
    ensure!(memory["last"]["from"] == 2 && memory["last"]["to"] == 3, "moved by somebody else: {memory}");
    vnumactl(&["policy", &vm.name, "--set", "off"])?;
    drop(busy);
    println!("unbound: its policy has moved the memory, and the guest knows");
    Ok(())
}

fn await_homes(vm: &Vm, expected: &[u64]) -> Result<()> {
    let mut last = Vec::new();
    wait_for("the homes of the guest nodes", HANG_LIMIT, || {
        let shown = listed(&vm.name)?.context("not listed")?;
        last =
            shown["nodes"].as_array().context("no nodes")?.iter().map(|node| node["home"].as_u64()).collect();
        Ok(last.iter().map(|home: &Option<u64>| home.unwrap_or(u64::MAX)).eq(expected.iter().copied()))
    })
    .with_context(|| format!("expected {expected:?}"))
    .with_context(|| format!("homes are {last:?}: {}", resident(vm)))
}

/// For the error: where the kernel says the memory is.
fn resident(vm: &Vm) -> String {
    let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", vm.pid)).unwrap_or_default();
    maps.lines()
        .filter(|line| line.contains("anon=") && line.len() > 80)
        .take(20)
        .collect::<Vec<_>>()
        .join("\n")
}

/// Five guest nodes on four host nodes: the first and the last have one home.
fn shared_home(nodes: &Nodes) -> Result<()> {
    let vm = Vm::start("five", &shape("--nodes 5 --vcpus 5 --memory 960M"))?;
    wait_until_listed(&vm.name)?;
    await_homes(&vm, &[0, 1, 2, 3, 0])?;
    equip(&vm)?;
    vnumactl(&["attach", &vm.name])?;
    let at_home = [(0, 0, "true"), (1, 1, "true"), (2, 2, "true"), (3, 3, "true"), (0, 4, "true")];
    wait_until_seen(&vm.name, &at_home).context("after attach")?;
    // A vCPU from elsewhere is published on the lowest of the two, one that booted on the other stays there.
    taskset(&vm, 2, 0, nodes)?;
    taskset(&vm, 4, 1, nodes)?;
    let expected = [(0, 0, "true"), (1, 1, "true"), (0, 0, "true"), (3, 3, "true"), (1, 1, "true")];
    wait_until_seen(&vm.name, &expected).context("moved")?;
    check(&vm, &[0, 1, 0, 3, 1])?;
    taskset(&vm, 2, 2, nodes)?;
    taskset(&vm, 4, 0, nodes)?;
    wait_until_seen(&vm.name, &at_home).context("back")?;
    check(&vm, &[0, 1, 2, 3, 4])?;
    check_kernel_log(&vm)?;
    println!("two guest nodes with one home: each vCPU is published on its own");
    Ok(())
}

/// A vCPU that is plugged into a VM with a channel is published like the others, wherever it is when its guest brings it online,
/// and forgotten when it goes. Twice: the second one finds what the first has left behind.
fn grown(nodes: &Nodes) -> Result<()> {
    let mut vm = Vm::start("grown", &shape("--nodes 2 --vcpus 2 --memory 512M --spare-slots"))?;
    wait_until_listed(&vm.name)?;
    equip(&vm)?;
    vnumactl(&["attach", &vm.name])?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")])?;
    let mut monitor = Monitor::connect(&vm.monitor())?;
    for node in [1, 0] {
        plug(&mut monitor)?;
        wait_for("the thread of the new vCPU", HANG_LIMIT, || Ok(vcpu_threads(vm.pid)?.len() == 3))?;
        vm.threads = vcpu_threads(vm.pid)?;
        taskset(&vm, 2, node, nodes)?;
        let online = "until echo 1 > /sys/devices/system/cpu/cpu2/online; do sleep 0.05; done 2>/dev/null";
        vm.exec(&["sh", "-c", online])?;
        let published = u64::from(node);
        wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true"), (published, published, "true")])
            .context("a vCPU more")?;
        check(&vm, &[0, 1, published])?;
        taskset(&vm, 2, 1 - node, nodes)?;
        let published = 1 - published;
        wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true"), (published, published, "true")])
            .context("the new vCPU moved")?;
        check(&vm, &[0, 1, published])?;
        monitor.execute(&json!({"execute": "device_del", "arguments": {"id": NEW_VCPU}}))?;
        wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("a vCPU less")?;
        check(&vm, &[0, 1])?;
    }
    taskset(&vm, 1, 0, nodes)?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (0, 0, "true")]).context("moved afterwards")?;
    check(&vm, &[0, 0])?;
    check_kernel_log(&vm)?;
    println!("grown: a plugged vCPU is published like the others");
    Ok(())
}

/// Plugs a vCPU into the spare slot of guest node 0.
fn plug(monitor: &mut Monitor) -> Result<()> {
    let slots = monitor.execute(&json!({"execute": "query-hotpluggable-cpus"}))?;
    let spare = |slot: &&Value| slot.get("qom-path").is_none() && slot["props"]["node-id"] == 0;
    let slot = slots.as_array().and_then(|slots| slots.iter().find(spare)).context("no spare slot")?;
    let mut arguments = slot["props"].clone();
    arguments["driver"] = slot["type"].clone();
    arguments["id"] = NEW_VCPU.into();
    monitor.execute(&json!({"execute": "device_add", "arguments": arguments})).map(drop)
}
