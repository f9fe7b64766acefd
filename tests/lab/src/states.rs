//! What vnumactl shows: `true`, `approximate` and `stale`, and what it refuses.

use crate::guest::{
    check, equip, expect_check, seen, taskset, unload_driver, wait_until_listed, wait_until_seen,
};
use anyhow::{Context, Result, anyhow, ensure};
use std::process::Command;
use vnuma_scenario::{HANG_LIMIT, Nodes, Process, Vm, output, vnumactl, vnumad, wait_for};

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    let daemon = vnumad(&[])?;
    expect_location_source("bpf")?;
    hardware(&nodes)?;
    // Guest nodes 0 and 1 are at home on host nodes 0 and 1; nodes 2 and 3 back no guest node.
    let shape = ["--nodes", "2", "--vcpus", "2", "--memory", "512M"].map(str::to_owned);
    let flat = ["--uma", "--vcpus", "1", "--memory", "256M"].map(str::to_owned);
    let vms = Vm::start_all(&[("two", &shape), ("polled", &shape), ("uma", &flat)])?;
    let [vm, polled, uma]: [Vm; 3] = vms.try_into().map_err(|_| anyhow!("not three VMs"))?;
    wait_until_listed(&vm.name)?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("after boot")?;
    println!("not attached and not moved: true");
    doctor(&vm)?;

    taskset(&vm, 1, 0, &nodes)?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (0, 1, "stale")]).context("moved, not attached")?;
    println!("moved and not attached: stale");

    // This time the device is there before the driver.
    vnumactl(&["attach", &vm.name])?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (0, 0, "stale")]).context("attached, no driver")?;
    println!("published, no driver to apply it: stale");
    expect_check(Some(&vm.name), "channel", "attached", "best")?;
    expect_check(Some(&vm.name), "driver", "none", "missing")?;
    equip(&vm)?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (0, 0, "true")]).context("driver loaded")?;
    check(&vm, &[0, 0])?;
    expect_check(Some(&vm.name), "driver", "fast", "best")?;
    safe_mode(&vm, &nodes)?;
    println!("driver loaded: true");

    homeless(&vm, &nodes)?;
    drift(&vm, &nodes)?;
    burst(&vm, &nodes)?;
    refusals(&vm, &uma)?;
    drop(daemon);
    polling(&polled, &nodes)
}

/// The host's checks, and those of a VM that is not attached.
fn doctor(vm: &Vm) -> Result<()> {
    expect_check(None, "nodes", "4", "best")?;
    expect_check(None, "locations", "bpf", "best")?;
    expect_check(None, "affinity", "event", "best")?;
    expect_check(Some(&vm.name), "connection", "qmp", "best")?;
    expect_check(Some(&vm.name), "guest nodes", "2", "best")?;
    expect_check(Some(&vm.name), "homes", "one each", "best")?;
    expect_check(Some(&vm.name), "channel", "none", "missing")?;
    println!("doctor: the checks of the host and of a VM that is not attached");
    Ok(())
}

/// A guest whose driver may not be in fast mode follows as well, and says so.
fn safe_mode(vm: &Vm, nodes: &Nodes) -> Result<()> {
    unload_driver(vm)?;
    vm.exec(&["insmod", "/root/vnuma.ko", "mode=safe"])?;
    taskset(vm, 1, 1, nodes)?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("safe mode")?;
    check(vm, &[0, 1])?;
    expect_check(Some(&vm.name), "driver", "safe", "reduced")?;
    unload_driver(vm)?;
    vm.exec(&["insmod", "/root/vnuma.ko"])?;
    taskset(vm, 1, 0, nodes)?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (0, 0, "true")]).context("fast mode again")?;
    expect_check(Some(&vm.name), "driver", "fast", "best")?;
    println!("doctor: the driver's mode");
    Ok(())
}

fn expect_location_source(expected: &str) -> Result<()> {
    let daemon = vnumactl(&["daemon"])?;
    ensure!(daemon["location_source"] == expected, "vnumad learns locations not by {expected}: {daemon}");
    println!("locations come from {expected}");
    Ok(())
}

/// More changes than the cap allows go out together, later, and are counted; none is lost.
fn burst(vm: &Vm, nodes: &Nodes) -> Result<()> {
    let deferred = || -> Result<u64> {
        let shown = vnumactl(&["show", &vm.name])?;
        shown["publication"]["deferred_by_cap"]
            .as_u64()
            .with_context(|| format!("no publication.deferred_by_cap: {shown}"))
    };
    let before = deferred()?;
    wait_for("the cap to defer a publication", HANG_LIMIT, || {
        for node in [0, 1].repeat(30) {
            taskset(vm, 1, node, nodes)?;
        }
        Ok(deferred()? > before)
    })?;
    taskset(vm, 0, 0, nodes)?;
    taskset(vm, 1, 1, nodes)?;
    wait_until_seen(&vm.name, &[(0, 0, "true"), (1, 1, "true")]).context("after the burst")?;
    check(vm, &[0, 1])?;
    println!("burst: capped and counted, the last state is published");
    Ok(())
}

/// Without BPF, locations are polled, and a guest follows as well.
fn polling(vm: &Vm, nodes: &Nodes) -> Result<()> {
    std::fs::write("/root/poll.toml", "[observe]\nlocation = \"poll\"\n")?;
    let _daemon = vnumad(&["--config", "/root/poll.toml"])?;
    expect_location_source("poll")?;
    expect_check(None, "locations", "poll", "reduced")?;
    equip(vm)?;
    wait_until_listed(&vm.name)?;
    vnumactl(&["attach", &vm.name])?;
    taskset(vm, 0, 1, nodes)?;
    wait_until_seen(&vm.name, &[(1, 1, "true"), (1, 1, "true")]).context("polled")?;
    check(vm, &[1, 1])
}

/// The daemon reads the same nodes, CPUs and distances as the kernel lists.
pub fn hardware(nodes: &Nodes) -> Result<()> {
    let hardware = vnumactl(&["hardware"])?;
    let listed = hardware["nodes"].as_array().context("vnumactl hardware: no nodes")?;
    let expected = nodes.with_cpus().count();
    ensure!(
        listed.len() == expected,
        "vnumactl hardware lists {} nodes, the kernel {expected}",
        listed.len()
    );
    for node in listed {
        let id = u32::try_from(node["id"].as_u64().context("no id")?)?;
        let cpus = nodes.cpus(id).with_context(|| format!("no node {id}"))?.to_string();
        ensure!(node["cpus"] == *cpus, "node {id}: vnumactl says {}, the kernel {cpus}", node["cpus"]);
    }
    for (row, node) in hardware["distances"].as_array().context("no distances")?.iter().zip(0..) {
        let path = format!("/sys/devices/system/node/node{node}/distance");
        let kernel: Vec<u64> =
            std::fs::read_to_string(&path)?.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let published: Vec<u64> =
            row.as_array().context("no row")?.iter().filter_map(|value| value.as_u64()).collect();
        ensure!(
            published == kernel,
            "distances of node {node}: vnumactl says {published:?}, the kernel {kernel:?}"
        );
    }
    println!("hardware: {expected} nodes as the kernel lists them");
    Ok(())
}

/// On a node that backs no guest node the nearest one is published, and a tie keeps the present one.
fn homeless(vm: &Vm, nodes: &Nodes) -> Result<()> {
    for node in [2, 3] {
        for present in [0, 1] {
            taskset(vm, 1, present, nodes)?;
            wait_until_seen(&vm.name, &[(0, 0, "true"), (present.into(), present.into(), "true")])?;
            taskset(vm, 1, node, nodes)?;
            let path = format!("/sys/devices/system/node/node{node}/distance");
            let distances: Vec<u64> = std::fs::read_to_string(&path)?
                .split_whitespace()
                .map(str::parse)
                .collect::<Result<_, _>>()?;
            let nearest = match distances[0].cmp(&distances[1]) {
                std::cmp::Ordering::Less => 0,
                std::cmp::Ordering::Greater => 1,
                std::cmp::Ordering::Equal => u64::from(present),
            };
            wait_until_seen(&vm.name, &[(0, 0, "true"), (node.into(), nearest, "approximate")])
                .with_context(|| format!("from node {present} to {node}, distances {distances:?}"))?;
            check(vm, &[0, nearest])?;
        }
    }
    println!("no home: approximate, the nearest guest node is published");
    Ok(())
}

/// A busy vCPU that the balancer pushes off its node is followed without any pinning.
fn drift(vm: &Vm, nodes: &Nodes) -> Result<()> {
    taskset(vm, 0, 0, nodes)?;
    wait_for("vCPU 0 to be at home", HANG_LIMIT, || Ok(seen(&vm.name)?[0].host_node == Some(0)))?;
    let spin = "while :; do :; done";
    let _busy = vm.spawn(&["taskset", "-c", "0", "sh", "-c", spin])?;
    let both: Vec<u32> =
        [0, 1].iter().filter_map(|&node| nodes.cpus(node)).flat_map(|cpus| cpus.iter()).collect();
    let both: vnuma_model::CpuSet = both.into_iter().collect();
    output("taskset", &["-p", "-c", &both.to_string(), &vm.threads[0].to_string()])?;
    let home = nodes.cpus(0).context("no node 0")?;
    let _load = home
        .iter()
        .flat_map(|cpu| [cpu, cpu])
        .map(|cpu| {
            let arguments = ["-c", &cpu.to_string(), "sh", "-c", spin];
            Ok(Process(Command::new("taskset").args(arguments).spawn().context("taskset")?))
        })
        .collect::<Result<Vec<_>>>()?;
    wait_for("the load balancer's move to be published", HANG_LIMIT, || {
        let vcpu = seen(&vm.name)?.swap_remove(0);
        Ok(vcpu.host_node == Some(1) && vcpu.guest_node == Some(1) && vcpu.state == "true")
    })
    .with_context(|| format!("vnumactl shows {:?}", seen(&vm.name)))?;
    println!("drift: published after the balancer moved a vCPU");
    Ok(())
}

/// Each refusal says what is wrong.
fn refusals(vm: &Vm, uma: &Vm) -> Result<()> {
    wait_until_listed(&uma.name)?;
    expect_check(Some(&uma.name), "guest nodes", "none", "missing")?;
    for (arguments, reason) in [
        (vec!["attach", &vm.name], "attached"),
        (vec!["attach", "uma"], "UMA"),
        (vec!["attach", "nobody"], "nobody"),
        (vec!["move", &vm.name, "--vcpu", "9", "--node", "0"], "9"),
        (vec!["move", &vm.name, "--vcpu", "0", "--node", "77"], "77"),
    ] {
        let result = Command::new("vnumactl").args(&arguments).output()?;
        let error = String::from_utf8_lossy(&result.stderr).into_owned();
        let shown = arguments.join(" ");
        ensure!(!result.status.success(), "vnumactl {shown} succeeded");
        ensure!(error.contains(reason), "vnumactl {shown} does not say {reason:?}: {error}");
        println!("vnumactl {shown}: {}", error.trim());
    }
    Ok(())
}
