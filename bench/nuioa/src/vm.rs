//! The VM of each configuration, as a placement that lab-vm starts.

use crate::{
    committed::{CPUS, Configuration, HOME, MEMORY_MIB, REMOTE, VCPUS},
    guest::agent,
};
use anyhow::{Context, Result, ensure};
use std::{fs, io::ErrorKind};
use vnuma_model::CpuSet;
use vnuma_scenario::{
    HANG_LIMIT, Nodes, PCI_DEVICES, Process, Vm, host_devices, output, pass_through, vnumactl, vnumad,
    wait_for,
};

/// Its name.
const NAME: &str = "nuioa";
/// Of the reservation of CPU 0, which VMs do not use.
const GUARD: &str = "server";
const FILE: &str = "/root/nuioa.vm";
/// Where the guest driver is on the server and in the guest.
const DRIVER: &str = "/root/vnuma.ko";
/// This program in the guest.
pub const PROGRAM: &str = "/root/bench-nuioa";
/// Class of the devices for guests: network cards and NVMe disks.
const CLASSES: [&str; 2] = ["0x020000", "0x010802"];

/// vnuma-guest on the server.
const AGENT: &str = "/usr/local/bin/vnuma-guest";
/// Huge pages of 2 MiB that a node of the server has for VMs.
const POOL: usize = MEMORY_MIB / 2 + 8;

/// A VM that runs, with what it needs.
pub struct Machine {
    agent: Option<Process>,
    _daemon: Option<Process>,
    /// Ends after the others, to which it would have died.
    pub vm: Vm,
}

/// Keeps memory for VMs in huge pages, as soon as the server is up. In small ones it depends on chance which lines of a program share
/// a set of the caches.
pub fn reserve_memory() -> Result<()> {
    for node in [HOME, REMOTE] {
        let path = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
        fs::write(&path, POOL.to_string()).with_context(|| path.clone())?;
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        ensure!(text.trim() == POOL.to_string(), "{path}: {}, expected {POOL}", text.trim());
    }
    Ok(())
}

/// The server's interrupts of devices of the VM come to a CPU that the VM does not use. Else it depends on the configuration whether
/// they come to a vCPU's, which stops running the guest for them.
pub fn keep_interrupts(vm: &Vm, devices: &[String]) -> Result<()> {
    let cpu = free_cpu(vm)?;
    for device in devices {
        let directory = format!("{PCI_DEVICES}/{device}/msi_irqs");
        // A device whose driver uses none has no such folder.
        for entry in fs::read_dir(&directory).into_iter().flatten() {
            let path = format!("/proc/irq/{}/smp_affinity_list", entry?.file_name().to_string_lossy());
            match fs::write(&path, cpu.to_string()) {
                // A vector that the guest's driver does not use: VFIO has it, and no handler.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                written => written.with_context(|| format!("{path}: {cpu}"))?,
            }
        }
    }
    Ok(())
}

/// The last CPU of the devices' node that no vCPU of the VM may run on.
pub fn free_cpu(vm: &Vm) -> Result<u32> {
    let mut used = CpuSet::new();
    for &thread in &vm.threads {
        used.add_all(&cpus_of(vm, thread)?);
    }
    let nodes = Nodes::read()?;
    let home = nodes.cpus(HOME as u32).context("the devices' node")?;
    let free = home.iter().rfind(|cpu| !used.contains(*cpu));
    free.with_context(|| format!("vCPUs may run on {used}, which is all of node {HOME}"))
}

/// CPUs that a vCPU's thread may run on.
pub fn cpus_of(vm: &Vm, thread: i32) -> Result<CpuSet> {
    let path = format!("/proc/{}/task/{thread}/status", vm.pid);
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let list = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.with_context(|| path.clone())?.trim().parse().with_context(|| path.clone())
}

/// Gives the devices of the home node to VFIO; their addresses.
pub fn devices() -> Result<Vec<String>> {
    let mut found = host_devices()?;
    found.retain(|device| CLASSES.contains(&device.class.as_str()) && device.node == Some(HOME as u32));
    found.iter().try_for_each(|device| pass_through(&device.address))?;
    ensure!(found.len() == 3, "expected two cards and a disk on node {HOME}: {found:?}");
    Ok(found.into_iter().map(|device| device.address).collect())
}

impl Machine {
    /// Boots it.
    pub fn start(configuration: Configuration, devices: &[String]) -> Result<Self> {
        let aware = configuration == Configuration::NuioaAware;
        let daemon = aware.then(|| vnumad(&[])).transpose()?;
        let text = if aware { placed(devices)? } else { placement(configuration, devices) };
        fs::write(FILE, text).context(FILE)?;
        let vm = Vm::start(NAME, &["--placement", FILE].map(str::to_owned))?;
        vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
        if aware {
            vm.put(DRIVER, DRIVER)?;
            vm.exec(&["insmod", DRIVER])?;
            vm.attach()?;
            vm.await_driver()?;
            vm.put(AGENT, agent::PROGRAM)?;
        }
        let agent = aware.then(|| vm.spawn(&[PROGRAM, "agent"])).transpose()?;
        Ok(Self { vm, agent, _daemon: daemon })
    }

    /// An error if the guest was to have a vnuma-guest, and it has ended: then nothing is placed.
    pub fn see_agent(&mut self) -> Result<()> {
        let ended = self.agent.as_mut().map(|agent| agent.0.try_wait()).transpose()?.flatten();
        ensure!(ended.is_none(), "vnuma-guest has ended: {ended:?}");
        Ok(())
    }
}

/// Where vnumactl places it.
fn placed(devices: &[String]) -> Result<String> {
    let is_reserved = |name: &str| -> Result<bool> {
        let reservations = vnumactl(&["reservations"])?;
        let all = reservations.as_array().context("vnumactl reservations: not an array")?;
        Ok(all.iter().any(|one| one["placement"]["name"] == name))
    };
    wait_for("the reservation of an earlier VM to end", HANG_LIMIT, || Ok(!is_reserved(NAME)?))?;
    if !is_reserved(GUARD)? {
        // Without a device it may get a CPU of either node, by which has more memory left.
        let card = server_card()?;
        let lifetime = ["--lifetime", "3600"];
        vnumactl(
            &[&["place", GUARD, "--vcpus", "1", "--memory", "2M", "--device", &card][..], &lifetime].concat(),
        )?;
    }
    let (vcpus, memory) = (VCPUS.to_string(), format!("{MEMORY_MIB}M"));
    let mut command = vec!["place", NAME, "--vcpus", &vcpus, "--memory", &memory];
    command.extend(devices.iter().flat_map(|device| ["--device", device.as_str()]));
    command.extend(["--hugepages", "2M", "--format", "qemu"]);
    let text = output("vnumactl", &command)?;
    let cpus = reserved_cpus(&vnumactl(&["reservations"])?, NAME)?;
    let nodes = Nodes::read()?;
    let home = nodes.cpus(HOME as u32).context("the devices' node")?;
    let at_home = cpus.iter().filter(|cpu| home.contains(**cpu)).count();
    eprintln!("vnumactl place: {NAME} has CPUs {cpus:?}, of which {at_home} are of node {HOME}");
    // One of them is counted. A workload that is placed on several of them would be counted in part.
    ensure!(at_home == VCPUS / 2, "{NAME} is to have {} vCPUs on node {HOME}: CPUs {cpus:?}", VCPUS / 2);
    Ok(text)
}

/// CPUs that a reservation has for vCPUs.
fn reserved_cpus(reservations: &serde_json::Value, name: &str) -> Result<Vec<u32>> {
    let mut all = reservations.as_array().into_iter().flatten();
    let found = all.find(|one| one["placement"]["name"] == name);
    let found = found.with_context(|| format!("vnumactl reservations: no {name} in {reservations}"))?;
    let nodes = found["placement"]["guest_nodes"].as_array().into_iter().flatten();
    let pins = nodes.flat_map(|node| node["vcpus"].as_array().into_iter().flatten());
    let cpu = |pin: &serde_json::Value| pin["cpu"].as_u64().and_then(|cpu| u32::try_from(cpu).ok());
    pins.map(|pin| cpu(pin).with_context(|| format!("vnumactl reservations: {pin}: no CPU"))).collect()
}

/// The card that the server keeps.
fn server_card() -> Result<String> {
    let mut all = host_devices()?.into_iter();
    let card = all.find(|device| device.class == CLASSES[0] && device.node == Some(REMOTE as u32));
    Ok(card.with_context(|| format!("no network card on node {REMOTE}"))?.address)
}

/// A guest node: vCPUs on CPUs of the server, and the node of the server that has its memory.
struct GuestNode {
    home: usize,
    pins: Vec<(usize, usize)>,
}

fn guest_nodes(configuration: Configuration) -> Vec<GuestNode> {
    let whole = |home: usize| vec![GuestNode { home, pins: (0..VCPUS).zip(CPUS[home]).collect() }];
    let half = |home: usize| {
        let vcpus = home * VCPUS / 2..(home + 1) * VCPUS / 2;
        GuestNode { home, pins: vcpus.zip(CPUS[home]).collect() }
    };
    match configuration {
        Configuration::Home => whole(HOME),
        Configuration::Remote => whole(REMOTE),
        Configuration::Uma | Configuration::Vnuma | Configuration::NuioaAware => {
            vec![half(REMOTE), half(HOME)]
        }
    }
}

/// The options of QEMU and the script that pins its threads, in the form that `vnumactl place` has. The devices are behind ports
/// that name no node.
fn placement(configuration: Configuration, devices: &[String]) -> String {
    let nodes = guest_nodes(configuration);
    let uma = configuration == Configuration::Uma;
    let machine = if uma { "q35,memory-backend=ram0" } else { "q35" };
    let mut lines = vec![
        format!("-name {NAME},debug-threads=on"),
        format!("-machine {machine} -accel kvm -cpu host"),
        format!("-smp {VCPUS},maxcpus={VCPUS},sockets={VCPUS},cores=1,threads=1 -m {MEMORY_MIB}M"),
    ];
    if uma {
        lines.push(memory(0, MEMORY_MIB, "host-nodes=0-1,policy=interleave"));
    } else {
        lines.extend(numa(&nodes));
    }
    for (port, address) in devices.iter().enumerate() {
        let id = format!("port{port}");
        let chassis = 128 + port;
        lines.push(format!(
            "-device pcie-root-port,id={id},bus=pcie.0,chassis={chassis},slot=0 -device vfio-pci,host={address},bus={id}"
        ));
    }
    lines.push("# for name in /proc/$1/task/*/comm; do case \"$(cat $name)\" in".to_owned());
    for (vcpu, cpu) in nodes.iter().flat_map(|node| &node.pins) {
        lines.push(format!(
            "# \"CPU {vcpu}/KVM\") task=${{name%/comm}}; taskset -c -p {cpu} ${{task##*/}} > /dev/null || exit 1;;"
        ));
    }
    lines.push("# esac; done".to_owned());
    lines.join("\n") + "\n"
}

fn memory(id: usize, mib: usize, policy: &str) -> String {
    let huge = "hugetlb=on,hugetlbsize=2M,prealloc=on";
    format!("-object memory-backend-memfd,id=ram{id},size={mib}M,{huge},{policy}")
}

fn numa(nodes: &[GuestNode]) -> Vec<String> {
    let mut lines = Vec::new();
    let mib = MEMORY_MIB / nodes.len();
    for (id, GuestNode { home, pins }) in nodes.iter().enumerate() {
        lines.push(memory(id, mib, &format!("host-nodes={home},policy=bind")));
        let mut line = format!("-numa node,nodeid={id},memdev=ram{id}");
        for (vcpu, _) in pins {
            line.push_str(&format!(" -numa cpu,node-id={id},socket-id={vcpu}"));
        }
        lines.push(line);
    }
    if nodes.len() == 2 {
        lines.push("-numa dist,src=0,dst=1,val=21 -numa dist,src=1,dst=0,val=21".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_says_which_cpus_it_has() {
        let reservations = serde_json::json!([
            {"placement": {"name": "server", "guest_nodes": [{"vcpus": [{"vcpu": 0, "cpu": 0}]}]}},
            {"placement": {"name": "nuioa", "guest_nodes": [
                {"vcpus": [{"vcpu": 0, "cpu": 3}]}, {"vcpus": [{"vcpu": 1, "cpu": 1}]}, {"vcpus": []},
            ]}},
        ]);
        assert_eq!(reserved_cpus(&reservations, "nuioa").unwrap(), [3, 1]);
        assert!(reserved_cpus(&reservations, "other").is_err());
        let wrong =
            serde_json::json!([{"placement": {"name": "x", "guest_nodes": [{"vcpus": [{"cpu": -1}]}]}}]);
        assert!(reserved_cpus(&wrong, "x").unwrap_err().to_string().contains("no CPU"));
    }

    fn text(configuration: Configuration) -> String {
        placement(configuration, &["0000:29:00.0".to_owned()])
    }

    #[test]
    fn each_configuration_is_where_its_name_says() {
        let home = text(Configuration::Home);
        assert!(
            home.contains(
                "id=ram0,size=1024M,hugetlb=on,hugetlbsize=2M,prealloc=on,host-nodes=1,policy=bind"
            ),
            "{home}"
        );
        assert!(home.contains("\"CPU 0/KVM\") task=${name%/comm}; taskset -c -p 3 "), "{home}");
        let remote = text(Configuration::Remote);
        assert!(remote.contains("host-nodes=0,policy=bind") && remote.contains("-c -p 2 "), "{remote}");
        let uma = text(Configuration::Uma);
        assert!(!uma.contains("-numa") && uma.contains("host-nodes=0-1,policy=interleave"), "{uma}");
        assert!(uma.contains("\"CPU 0/KVM\") task=${name%/comm}; taskset -c -p 1 "), "{uma}");
        let vnuma = text(Configuration::Vnuma);
        for part in [
            "id=ram0,size=512M,hugetlb=on,hugetlbsize=2M,prealloc=on,host-nodes=0,policy=bind",
            "id=ram1,size=512M,hugetlb=on,hugetlbsize=2M,prealloc=on,host-nodes=1,policy=bind",
            "nodeid=1,memdev=ram1 -numa cpu,node-id=1,socket-id=1",
            "\"CPU 1/KVM\") task=${name%/comm}; taskset -c -p 3 ",
        ] {
            assert!(vnuma.contains(part), "{part}: {vnuma}");
        }
        // No tool reports where the devices are.
        assert!([home, remote, uma, vnuma].iter().all(|text| !text.contains("pxb")));
    }
}
