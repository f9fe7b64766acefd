//! A guest of a scenario: its vCPUs, what vnumactl says of them, and what its kernel uses.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{thread, time::Duration};
use vnuma_model::CpuSet;
use vnuma_scenario::{HANG_LIMIT, Monitor, Nodes, Vm, output, vnumactl, wait_for};

/// Kernel of guests unless a scenario is about kernels; that of lab-vm.
pub const DEFAULT_KERNEL: &str = "6.12";
/// Where the driver is in a guest.
const DRIVER: &str = "/root/vnuma.ko";
const CHECKER: &str = "/root/vnuma-check";

/// What vnumactl says of one vCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Host node that it is on.
    pub host_node: Option<u64>,
    /// Guest node that was published, or that the guest uses.
    pub guest_node: Option<u64>,
    /// `true`, `approximate`, `stale` or `unknown`.
    pub state: String,
}

/// Loads the driver into a guest and puts the checker there.
pub fn equip(vm: &Vm) -> Result<()> {
    equip_with(vm, DEFAULT_KERNEL)
}

/// The same for a guest with some kernel.
pub fn equip_with(vm: &Vm, kernel: &str) -> Result<()> {
    vm.put(&format!("/root/vnuma-{kernel}.ko"), DRIVER)?;
    vm.put(CHECKER, CHECKER)?;
    vm.exec(&["insmod", DRIVER]).map(drop)
}

/// What `vnumactl list` says of a VM; none when it does not list it.
pub fn listed(name: &str) -> Result<Option<Value>> {
    let vms = vnumactl(&["list"])?;
    let vms = vms.as_array().context("vnumactl list: not an array")?;
    Ok(vms.iter().find(|vm| vm["name"] == name).cloned())
}

/// What vnumactl doctor says of a check, of a VM or of the host: the capability in use, and how good it is.
pub fn expect_check(vm: Option<&str>, check: &str, capability: &str, level: &str) -> Result<()> {
    let checks = vnumactl(&["doctor"])?;
    let checks = checks.as_array().context("vnumactl doctor: not an array")?;
    let found = checks.iter().find(|found| found["vm"].as_str() == vm && found["check"] == check);
    let found = found.with_context(|| format!("vnumactl doctor: no {check} of {vm:?}"))?;
    ensure!(
        found["capability"] == capability && found["level"] == level,
        "vnumactl doctor: expected {capability} ({level}): {found}"
    );
    // What is not the best says why, and what to do.
    let advice = found["why"].is_string() && found["remedy"].is_string();
    ensure!(advice == (level != "best"), "vnumactl doctor: {found}");
    Ok(())
}

/// What vnumactl says of the vCPUs of a VM, in order of their APIC id.
pub fn seen(name: &str) -> Result<Vec<Seen>> {
    let vm = listed(name)?.with_context(|| format!("vnumactl list does not show {name}"))?;
    let vcpus = vm["vcpus"].as_array().with_context(|| format!("no vcpus: {vm}"))?;
    let mut vcpus: Vec<_> = vcpus.iter().collect();
    vcpus.sort_by_key(|vcpu| vcpu["apic_id"].as_u64());
    let read = |vcpu: &&Value| {
        Ok(Seen {
            host_node: vcpu["host_node"].as_u64(),
            guest_node: vcpu["guest_node"].as_u64(),
            state: vcpu["state"].as_str().with_context(|| format!("no state: {vcpu}"))?.to_owned(),
        })
    };
    vcpus.iter().map(read).collect()
}

/// Waits until vnumactl shows the VM's vCPUs like this: (host node, guest node, state).
pub fn wait_until_seen(name: &str, expected: &[(u64, u64, &str)]) -> Result<()> {
    let expected: Vec<Seen> = expected
        .iter()
        .map(|&(host_node, guest_node, state)| Seen {
            host_node: Some(host_node),
            guest_node: Some(guest_node),
            state: state.to_owned(),
        })
        .collect();
    let mut last = Vec::new();
    wait_for("vnumactl to show the expected states", HANG_LIMIT, || {
        last = seen(name)?;
        Ok(last == expected)
    })
    .with_context(|| format!("{name}: expected {expected:?}"))
    .with_context(|| format!("{name}: vnumactl shows {last:?}"))
}

/// Waits until vnumad lists the VM, and its QEMU has answered.
pub fn wait_until_listed(name: &str) -> Result<()> {
    wait_for(&format!("vnumactl list to show {name}"), HANG_LIMIT, || {
        Ok(listed(name)?.is_some_and(|vm| vm["hypervisor"] == "answers" && vm["described"] == true))
    })
}

/// Unplugs the channel. A guest that is busy may let go of the device later than vnumactl waits for it.
pub fn detach(vm: &Vm) -> Result<()> {
    match vnumactl(&["detach", &vm.name]) {
        Err(error) if format!("{error:#}").contains("has not released") => {
            wait_for("the guest to release the channel's device", HANG_LIMIT, || {
                Ok(listed(&vm.name)?.is_some_and(|vm| vm["channel"] == "none"))
            })
        }
        result => result.map(drop),
    }
}

/// Writes a line to the guest's console and unloads the driver. The first round is for the page faults of this program.
const UNLOAD: &str = r#"open(K, ">", "/dev/kmsg") or die; my $status = -1;
    for ("none", "vnuma") { my $module = "$_"; syswrite(K, "<0>unloading $module\n"); $status = syscall(176, $module, 0x800) }
    $status == 0 or die "delete_module: $!\n""#;

/// As rmmod does, but right before the guest's processor leaves to the server, as it writes to the console: under TCG a guest ends that
/// writes a device's register after a page fault, as the driver does when it goes, with no exit in between (lab/README.md).
pub fn unload_driver(vm: &Vm) -> Result<()> {
    vm.exec(&["perl", "-e", UNLOAD]).map(drop)
}

/// Puts a vCPU on a node without vnumad's knowledge. CPU 0 is left out, as lab-vm's control groups leave it out: domains of libvirt are
/// not in them (lab/README.md).
pub fn taskset(vm: &Vm, vcpu: usize, node: u32, nodes: &Nodes) -> Result<()> {
    let cpus = nodes.cpus(node).with_context(|| format!("the host has no node {node}"))?;
    let mut of_vms = CpuSet::new();
    cpus.iter().filter(|&cpu| cpu != 0).for_each(|cpu| of_vms.insert(cpu));
    output("taskset", &["-p", "-c", &of_vms.to_string(), &vm.threads[vcpu].to_string()]).map(drop)
}

/// Compares everything in the guest that names a node with the expected guest node of each vCPU.
pub fn check(vm: &Vm, guest_nodes: &[u64]) -> Result<()> {
    let expected: Vec<String> =
        guest_nodes.iter().enumerate().map(|(apic_id, node)| format!("{apic_id}:{node}")).collect();
    let expected = expected.join(",");
    vm.exec(&[CHECKER, "--strict", &expected])
        .map(drop)
        .with_context(|| format!("{}: expected {expected}", vm.name))
}

/// The guest's kernel log must hold no warning, and no complaint of the driver.
pub fn check_kernel_log(vm: &Vm) -> Result<()> {
    let log = vm.exec(&["dmesg"])?;
    let bad = ["WARNING:", "BUG:", "Oops", "Call Trace", "rcu_sched", "blocked for more than"];
    let found: Vec<_> = log.lines().filter(|line| bad.iter().any(|bad| line.contains(bad))).collect();
    ensure!(found.is_empty(), "{}: the guest's kernel complains:\n{}", vm.name, found.join("\n"));
    Ok(())
}

/// After a failure: what the guest has to say. It may be past saying anything.
pub fn show_guest(vm: &Vm) {
    let blocked = "echo w > /proc/sysrq-trigger; dmesg | tail -n 80";
    let stacks = "grep -l -E 'vnuma|pciehp' /proc/[0-9]*/comm | while read f; do cat $f ${f%comm}stack; done";
    let autonuma = "grep -E '^(numa_|pgmigrate_|thp_migration_)' /proc/vmstat; cat /proc/buddyinfo";
    let memory =
        "grep -h -E 'Mem(Total|Free)|FilePages|AnonPages|Slab|Shmem:' /sys/devices/system/node/node*/meminfo";
    let driver = "grep -i vnuma /proc/interrupts; grep -s . /sys/class/misc/vnuma/*; grep . /sys/devices/system/node/node*/cpulist";
    match output("vnumactl", &["show", &vm.name]) {
        Ok(text) => println!("--- {}\n{text}", vm.name),
        Err(error) => println!("--- {}: {error:#}", vm.name),
    }
    // A guest that has started again, or stands, does not say why itself.
    println!("--- the end of its console\n{}", vm.end_of_console());
    match processors(vm) {
        Ok(text) => println!("--- its processors, twice\n{text}"),
        Err(error) => println!("--- its processors: {error:#}"),
    }
    for command in [blocked, stacks, autonuma, memory, driver, "uptime"] {
        match output("timeout", &["60", "lab-vm", "exec", &vm.name, "--", "sh", "-c", command]) {
            Ok(text) => println!("--- {} {command}\n{text}", vm.name),
            Err(error) => {
                println!("--- {} {command}: {error:#}", vm.name);
                // Each would take as long to fail.
                break;
            }
        }
    }
}

/// Where a guest's processors are, by QEMU, at two moments: one that stands is at the same place.
fn processors(vm: &Vm) -> Result<String> {
    let mut monitor = Monitor::connect(&vm.monitor())?;
    let mut shown = String::new();
    for _ in 0..2 {
        let arguments = json!({"command-line": "info registers -a"});
        let text = monitor.execute(&json!({"execute": "human-monitor-command", "arguments": arguments}))?;
        let lines = text.as_str().unwrap_or_default().lines();
        let place =
            |line: &&str| line.starts_with("CPU#") || line.contains("RIP=") || line.starts_with("CR0=");
        lines.filter(place).for_each(|line| shown.push_str(&format!("{}\n", line.trim_end())));
        thread::sleep(Duration::from_secs(1));
    }
    Ok(shown)
}
