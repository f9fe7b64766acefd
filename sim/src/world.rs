//! The simulated truth: machines, their threads and their guests. A daemon sees of it what the simulated shell shows it.

use crate::host::{self, CPUS_PER_NODE, Host, NODES};
use std::collections::{BTreeMap, VecDeque};
use vnuma_model::{
    ApicId, BackingMapping, CpuSet, GuestNode, GuestNodeId, HostNodeId, MemoryBacking, MigrationStatus,
    NumaPolicy, PciAddress, Vcpu, VcpuLocation, VmDescription, VmDevice,
};
use vnuma_policy::{Publication, world::StopReason};
use vnuma_random::Rng;

/// A handle's place in the list of all handles.
pub type Slot = usize;
/// A machine, or a device. Never used twice.
pub type Serial = u64;
/// Memory of a guest node, bytes.
pub const GUEST_NODE: u64 = 1 << 30;

/// Where a machine has the memory of a guest node.
pub fn mapping(id: GuestNodeId) -> BackingMapping {
    BackingMapping { start: u64::from(id + 1) << 40, page_kib: 4 }
}

/// How a guest's driver treats a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Takes over what is published, after this time, and acknowledges it.
    Honest {
        /// How long that takes.
        delay_ns: u64,
    },
    /// Takes over nothing, and says nothing.
    Deaf,
    /// Acknowledges whatever it likes.
    Forger,
}

/// A guest node.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// Host node of its memory; `None` where that cannot be known.
    pub home: Option<HostNodeId>,
    /// Its memory is bound there.
    pub bound: bool,
}

/// A vCPU.
#[derive(Clone, Copy, Debug)]
pub struct VcpuTruth {
    /// QEMU's index.
    pub index: u32,
    /// Its thread.
    pub tid: i32,
    /// Its node in the firmware tables.
    pub boot: GuestNodeId,
}

/// The device of a topology channel, with the memory behind it.
#[derive(Clone, Debug)]
pub struct Device {
    /// Which one.
    pub serial: Serial,
    /// What is in the shared memory: the last publication and its generation.
    pub page: Option<(u64, Publication)>,
    /// There is a record, by which a later daemon can take it over.
    pub record: bool,
}

/// What runs in a machine.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Its driver.
    pub driver: Driver,
    /// The nodes that its kernel uses.
    pub used: BTreeMap<ApicId, GuestNodeId>,
    /// It boots until then, and takes over nothing.
    pub boots_until_ns: u64,
    /// It is about to take something over.
    pub applying: bool,
    /// It lets go of devices and vCPUs when asked.
    pub cooperates: bool,
}

/// A QEMU process and its guest.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Which one.
    pub serial: Serial,
    /// Its process.
    pub pid: i32,
    /// What it says that it is called.
    pub name: String,
    /// It does not answer.
    pub hung: bool,
    /// Its process is stopped.
    pub stopped: Option<StopReason>,
    /// An attach that timed out is carried out as soon as it answers.
    pub late_attach: bool,
    /// An order to migrate that timed out is carried out as soon as it answers: whether with post-copy.
    pub late_migration: Option<bool>,
    /// It is to be attached when it runs.
    pub marked: bool,
    /// It waits for its guest, which comes from another host.
    pub waits: bool,
    /// Its last migration.
    pub migration: MigrationStatus,
    /// How often that has gone through the memory.
    pub passes: u64,
    /// Its guest may go on at the destination before its memory is there.
    pub post_copy: bool,
    /// Guest nodes.
    pub nodes: Vec<Node>,
    /// vCPUs.
    pub vcpus: BTreeMap<ApicId, VcpuTruth>,
    /// The next vCPU's APIC id.
    pub next_apic: ApicId,
    /// Free slots of guest nodes.
    pub spare: BTreeMap<GuestNodeId, u32>,
    /// Functions of the host that it has, by their bus in the guest; 0 where firmware has not numbered it yet.
    pub functions: Vec<(u8, String)>,
    /// The topology channel's device, if it is plugged.
    pub device: Option<Device>,
    /// Its guest.
    pub guest: Guest,
}

impl Machine {
    /// Can it be asked something?
    pub fn answers(&self) -> bool {
        !self.hung && self.stopped.is_none()
    }

    /// What QEMU says of it.
    pub fn describe(&self) -> VmDescription {
        let node = |(id, node): (usize, &Node)| GuestNode {
            id: id as u32,
            memory_bytes: GUEST_NODE,
            memory: node.home.map(|home| MemoryBacking {
                id: format!("ram{id}"),
                size_bytes: GUEST_NODE,
                policy: if node.bound { NumaPolicy::Bind } else { NumaPolicy::Default },
                host_nodes: if node.bound { vec![home] } else { Vec::new() },
                resident_kib: if node.bound {
                    Vec::new()
                } else {
                    vec![(home, 900_000), (home ^ 1, 100_000)]
                },
                mapping: Some(mapping(id as u32)),
            }),
        };
        VmDescription {
            name: self.name.clone(),
            pid: self.pid,
            run_state: self.run_state(),
            guest_nodes: self.nodes.iter().enumerate().map(node).collect(),
            vcpus: self.listed_vcpus(),
            spare_slots: self.spare.clone(),
            devices: self.functions.iter().map(Self::function).collect(),
            memory_devices: Vec::new(),
        }
    }

    fn function((bus, host): &(u8, String)) -> VmDevice {
        let guest = (*bus > 0).then_some(PciAddress { segment: 0, bus: *bus, devfn: 0 });
        VmDevice { host: host.clone(), guest }
    }

    /// A function is plugged into a port that is free, or one is unplugged.
    pub fn change_functions(&mut self, rng: &mut Rng) {
        if self.functions.is_empty() || self.functions.len() < 4 && rng.chance(500) {
            let free = (0..6).find(|bus| self.functions.iter().all(|(used, _)| used != bus));
            self.functions.extend(free.map(|bus| (bus, host::function(rng.within(0..64) as u32))));
        } else {
            let at = rng.index(self.functions.len());
            self.functions.remove(at);
        }
    }

    /// Its vCPUs as a description lists them.
    pub fn listed_vcpus(&self) -> Vec<Vcpu> {
        let vcpu = |(&apic_id, truth): (&ApicId, &VcpuTruth)| Vcpu {
            index: truth.index,
            apic_id,
            boot_node: Some(truth.boot),
            tid: truth.tid,
        };
        self.vcpus.iter().map(vcpu).collect()
    }

    /// The guest boots: its kernel uses what the firmware says.
    pub fn boot(&mut self, until_ns: u64) {
        self.guest.used = self.vcpus.iter().map(|(id, vcpu)| (*id, vcpu.boot)).collect();
        self.guest.boots_until_ns = until_ns;
    }
}

/// What may be behind a handle.
#[derive(Clone, Debug)]
pub struct Place {
    /// The backend's name for it.
    pub handle: String,
    /// What it is called there.
    pub name: String,
    /// The backend lists it.
    pub listed: bool,
    /// Rises with each machine.
    pub instance: u64,
    /// The machine, while it runs.
    pub machine: Option<Machine>,
}

/// A thread of a vCPU.
#[derive(Clone, Debug)]
pub struct Thread {
    /// The machine.
    pub machine: Serial,
    /// Its place.
    pub slot: Slot,
    /// Its process.
    pub pid: i32,
    /// The vCPU.
    pub vcpu: ApicId,
    /// Where it is; the time is that of its last change.
    pub at: VcpuLocation,
    /// Who set its mask, and how it is.
    pub mask: Mask,
}

/// CPUs that a thread may run on: all of the host, or those of a node, or what a policy chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    /// The mask.
    pub cpus: CpuSet,
    /// The last one that anybody but a policy has set.
    pub operator: CpuSet,
    /// A policy has set it.
    pub by_policy: bool,
    /// The kernel has broken it, as none of its CPUs was left: what a daemon makes of it is right.
    pub broken: bool,
}

impl Mask {
    /// Somebody sets it who is no policy.
    pub fn set(&mut self, cpus: CpuSet) {
        *self = Self { operator: cpus.clone(), cpus, by_policy: false, broken: false };
    }
}

/// All CPUs that a host can have.
pub fn all_cpus() -> CpuSet {
    (0..NODES * CPUS_PER_NODE).collect()
}

/// What the record of a process says of a thread: its operator's mask, and those that a policy set or was about to set.
pub type RecordedMask = (CpuSet, Vec<CpuSet>);

/// Everything that is true.
#[derive(Clone, Debug)]
pub struct World {
    /// The host.
    pub host: Host,
    /// Handles, with and without machines.
    pub places: Vec<Place>,
    /// Threads of vCPUs.
    pub threads: BTreeMap<i32, Thread>,
    /// Records of masks, by the machine: they outlive a daemon.
    pub records: BTreeMap<Serial, BTreeMap<i32, RecordedMask>>,
    /// CPUs that threads which run no vCPU are kept to.
    pub others: BTreeMap<Serial, CpuSet>,
    last_serial: Serial,
    last_number: i32,
    /// Process and thread numbers that are free again.
    free: VecDeque<i32>,
}

impl World {
    /// A host with this many handles and no machine.
    pub fn new(places: usize) -> Self {
        let place = |slot: usize| Place {
            handle: format!("/run/vm/vm{slot}.qmp"),
            name: format!("vm{slot}"),
            listed: false,
            instance: 0,
            machine: None,
        };
        Self {
            host: Host::new(),
            places: (0..places).map(place).collect(),
            threads: BTreeMap::new(),
            records: BTreeMap::new(),
            others: BTreeMap::new(),
            last_serial: 0,
            last_number: 1000,
            free: VecDeque::new(),
        }
    }

    /// The place of a handle.
    pub fn slot_of(handle: &str) -> Slot {
        let number = handle.strip_prefix("/run/vm/vm").and_then(|rest| rest.strip_suffix(".qmp"));
        number.and_then(|number| number.parse().ok()).unwrap_or(0)
    }

    /// A serial that nothing has.
    pub fn serial(&mut self) -> Serial {
        self.last_serial += 1;
        self.last_serial
    }

    /// A process or thread number: soon one that was in use a moment ago.
    fn number(&mut self) -> i32 {
        if self.free.len() > 16
            && let Some(number) = self.free.pop_front()
        {
            return number;
        }
        self.last_number += 1;
        self.last_number
    }

    /// The machine of a place, if it is this one.
    pub fn machine(&self, slot: Slot, serial: Serial) -> Option<&Machine> {
        self.places.get(slot)?.machine.as_ref().filter(|machine| machine.serial == serial)
    }

    /// The same, to be changed.
    pub fn machine_mut(&mut self, slot: Slot, serial: Serial) -> Option<&mut Machine> {
        self.places.get_mut(slot)?.machine.as_mut().filter(|machine| machine.serial == serial)
    }

    /// Starts a machine in an empty place.
    pub fn start(&mut self, slot: Slot, rng: &mut Rng, now_ns: u64) {
        let (serial, pid) = (self.serial(), self.number());
        let nodes: Vec<Node> = (0..rng.within(1..5))
            .map(|_| Node { home: self.some_node(rng).filter(|_| !rng.chance(20)), bound: rng.chance(600) })
            .collect();
        let driver = match rng.index(20) {
            0 => Driver::Deaf,
            1 => Driver::Forger,
            2..=4 => Driver::Honest { delay_ns: rng.within(500_000_000..6_000_000_000) },
            _ => Driver::Honest { delay_ns: rng.within(100_000..20_000_000) },
        };
        let mut machine = Machine {
            serial,
            pid,
            name: self.places[slot].name.clone(),
            hung: false,
            stopped: None,
            late_attach: false,
            late_migration: None,
            marked: false,
            waits: false,
            migration: MigrationStatus::None,
            passes: 0,
            post_copy: false,
            spare: (0..nodes.len() as u32).map(|node| (node, rng.within(0..3) as u32)).collect(),
            nodes,
            vcpus: BTreeMap::new(),
            next_apic: 0,
            functions: Vec::new(),
            device: None,
            guest: Guest {
                driver,
                used: BTreeMap::new(),
                boots_until_ns: now_ns,
                applying: false,
                cooperates: !rng.chance(100),
            },
        };
        for _ in 0..rng.within(1..9) {
            let node = rng.index(machine.nodes.len()) as u32;
            self.plug(slot, &mut machine, node, rng, now_ns);
        }
        for _ in 0..rng.within(0..3) {
            machine.change_functions(rng);
        }
        machine.boot(now_ns);
        let place = &mut self.places[slot];
        (place.machine, place.listed, place.instance) = (Some(machine), true, place.instance + 1);
    }

    fn some_node(&self, rng: &mut Rng) -> Option<HostNodeId> {
        let nodes: Vec<_> = self.host.nodes().collect();
        rng.pick(&nodes)
    }

    /// Adds a vCPU. Returns its APIC id and thread.
    pub fn plug(
        &mut self,
        slot: Slot,
        machine: &mut Machine,
        boot: GuestNodeId,
        rng: &mut Rng,
        now_ns: u64,
    ) -> (ApicId, i32) {
        let (vcpu, tid) = (machine.next_apic, self.number());
        machine.next_apic += 1;
        machine.vcpus.insert(vcpu, VcpuTruth { index: vcpu, tid, boot });
        machine.guest.used.insert(vcpu, boot);
        let node = self.some_node(rng).unwrap_or(0);
        let cpu = self.host.a_cpu(node, rng).unwrap_or(0);
        let at = VcpuLocation { cpu, node, pinned: None, time_ns: now_ns };
        let all = all_cpus();
        let mask = Mask { cpus: all.clone(), operator: all, by_policy: false, broken: false };
        let thread = Thread { machine: machine.serial, slot, pid: machine.pid, vcpu, at, mask };
        self.threads.insert(tid, thread);
        (vcpu, tid)
    }

    /// A vCPU goes. Returns its thread.
    pub fn unplug(&mut self, slot: Slot, vcpu: ApicId) -> Option<i32> {
        let machine = self.places.get_mut(slot)?.machine.as_mut()?;
        let gone = machine.vcpus.remove(&vcpu)?;
        machine.guest.used.remove(&vcpu);
        self.threads.remove(&gone.tid);
        self.free.push_back(gone.tid);
        Some(gone.tid)
    }

    /// A machine's process ends. Returns its process and threads.
    pub fn end(&mut self, slot: Slot) -> Option<(i32, Vec<i32>)> {
        let machine = self.places.get_mut(slot)?.machine.take()?;
        let tids: Vec<_> = machine.vcpus.values().map(|vcpu| vcpu.tid).collect();
        for tid in &tids {
            self.threads.remove(tid);
            self.free.push_back(*tid);
        }
        self.free.push_back(machine.pid);
        self.records.remove(&machine.serial);
        self.others.remove(&machine.serial);
        Some((machine.pid, tids))
    }

    /// Where a thread of a process is, read now.
    pub fn read(&self, pid: i32, tid: i32, now_ns: u64) -> Option<VcpuLocation> {
        let thread = self.threads.get(&tid).filter(|thread| thread.pid == pid)?;
        Some(VcpuLocation { time_ns: now_ns, ..thread.at })
    }

    /// A thread runs somewhere else, confined or not. Where that is not as before, somebody has set its mask.
    pub fn carry(&mut self, tid: i32, node: HostNodeId, pinned: bool, rng: &mut Rng, now_ns: u64) {
        let Some(cpu) = self.host.a_cpu(node, rng) else { return };
        if let Some(thread) = self.threads.get_mut(&tid) {
            let now = pinned.then_some(node);
            if thread.at.pinned != now {
                let of_node = node * CPUS_PER_NODE..(node + 1) * CPUS_PER_NODE;
                thread.mask.set(if pinned { of_node.collect() } else { all_cpus() });
            }
            thread.at = VcpuLocation { cpu, node, pinned: now, time_ns: now_ns };
        }
    }

    /// An operator confines a thread to the CPUs of a node, as vnumad knows them.
    pub fn put(&mut self, tid: i32, node: HostNodeId, cpus: &CpuSet, rng: &mut Rng, now_ns: u64) {
        self.carry(tid, node, true, rng, now_ns);
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.mask.set(cpus.clone());
        }
    }

    /// The CPUs of a thread that are online.
    pub fn affinity(&self, tid: i32) -> Option<CpuSet> {
        let thread = self.threads.get(&tid)?;
        let online = |cpu: &u32| self.host.topology.node_of_cpu(*cpu).is_some();
        Some(thread.mask.cpus.iter().filter(online).collect())
    }

    /// A policy sets a mask, or the operator's is given back.
    pub fn confine(&mut self, tid: i32, cpus: &CpuSet, by_policy: bool, rng: &mut Rng, now_ns: u64) {
        let pinned = self.host.topology.node_of_cpus(cpus);
        let online: Vec<u32> =
            cpus.iter().filter(|&cpu| self.host.topology.node_of_cpu(cpu).is_some()).collect();
        let Some(thread) = self.threads.get_mut(&tid) else { return };
        (thread.mask.cpus, thread.mask.by_policy) = (cpus.clone(), by_policy);
        let stays = online.contains(&thread.at.cpu);
        let cpu = if stays { thread.at.cpu } else { rng.pick(&online).unwrap_or(thread.at.cpu) };
        let node = self.host.topology.node_of_cpu(cpu).unwrap_or(thread.at.node);
        thread.at = VcpuLocation { cpu, node, pinned, time_ns: now_ns };
    }

    /// The kernel takes threads off CPUs that are gone, and breaks affinities that leave none.
    pub fn leave_missing_cpus(&mut self, rng: &mut Rng, now_ns: u64) -> Vec<i32> {
        let mut moved = Vec::new();
        for (&tid, thread) in &mut self.threads {
            if self.host.topology.node_of_cpu(thread.at.cpu).is_some() {
                continue;
            }
            let same = self.host.a_cpu(thread.at.node, rng);
            let node = if same.is_some() { thread.at.node } else { 0 };
            let cpu = same.or_else(|| self.host.a_cpu(0, rng)).unwrap_or(0);
            let pinned = thread.at.pinned.filter(|_| same.is_some());
            if thread.at.pinned.is_some() && pinned.is_none() {
                // The kernel lets it run anywhere.
                thread.mask.broken = true;
                thread.mask.cpus = all_cpus();
            }
            thread.at = VcpuLocation { cpu, node, pinned, time_ns: now_ns };
            moved.push(tid);
        }
        moved
    }
}
