//! Our reading of a server beside lstopo's.

use crate::lstopo::{self, Cache, Lstopo};
use std::{collections::BTreeMap, fmt};
use vnuma_model::{CpuSet, HostNode, HostTopology, PciDevice};

/// Why lstopo may say something else and both be right. A reason that no server needs fails the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    SharedCpu,
    GpuMemory,
    CpuWithoutNode,
    CacheContradicts,
    WideDomain,
    BridgeWithoutBuses,
    DeviceWithoutIds,
    HostBridge,
}

impl Reason {
    pub const ALL: [Self; 8] = [
        Self::SharedCpu,
        Self::GpuMemory,
        Self::CpuWithoutNode,
        Self::CacheContradicts,
        Self::WideDomain,
        Self::BridgeWithoutBuses,
        Self::DeviceWithoutIds,
        Self::HostBridge,
    ];
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SharedCpu => "nodes list the same CPUs: lstopo drops all of these nodes but the first, here a CPU is on one of them",
            Self::GpuMemory => "a node is the memory of a GPU: lstopo gives it the CPUs near the GPU, the kernel none",
            Self::CpuWithoutNode => "CPUs are on no node that is online: lstopo lists them nevertheless, here a CPU has a node",
            Self::CacheContradicts => {
                "a cache's list and mask of CPUs contradict each other: lstopo goes by the mask and drops the cache"
            }
            Self::WideDomain => "a PCI domain has more than 16 bits: lstopo is built without them",
            Self::BridgeWithoutBuses => "a PCI bridge is recorded without the buses behind it: lstopo leaves it out",
            Self::DeviceWithoutIds => "of a PCI function neither vendor nor device was recorded: here it is left out",
            Self::HostBridge => "lstopo places all that is behind a host bridge by its first function, here each is where the kernel says",
        })
    }
}

/// What was compared, over all servers.
#[derive(Debug, Default)]
pub struct Tally {
    pub servers: usize,
    pub nodes: usize,
    pub nodes_without_cpus: usize,
    pub nodes_without_memory: usize,
    pub cpus: usize,
    pub distances: usize,
    pub caches: usize,
    pub pci_devices: usize,
    pub pci_devices_with_node: usize,
    /// Differences that are right, by their reason.
    pub explained: BTreeMap<Reason, Vec<String>>,
    /// Those that are not.
    pub wrong: Vec<String>,
}

impl Tally {
    /// Compares a server.
    pub fn add(&mut self, name: &str, ours: &HostTopology, theirs: &Lstopo, files: &Files) {
        let mut server = Server { name, ours, theirs, files, tally: self };
        server.nodes();
        server.cpus();
        server.distances();
        server.caches();
        server.pci_devices();
        self.servers += 1;
    }

    /// The figures in a line.
    pub fn text(&self) -> String {
        format!(
            "{} servers, {} nodes ({} without CPUs, {} without memory), {} CPUs, {} distances, {} last-level caches, \
             {} PCI functions ({} with a node)",
            self.servers,
            self.nodes,
            self.nodes_without_cpus,
            self.nodes_without_memory,
            self.cpus,
            self.distances,
            self.caches,
            self.pci_devices,
            self.pci_devices_with_node,
        )
    }
}

/// What stands in a server's files, read without our reader, to see whether a reason applies.
pub struct Files {
    /// The CPUs of each node.
    pub node_masks: BTreeMap<u32, CpuSet>,
    /// CPUs with a cache of which list and mask of CPUs contradict each other.
    pub contradictory: CpuSet,
}

struct Server<'a> {
    name: &'a str,
    ours: &'a HostTopology,
    theirs: &'a Lstopo,
    files: &'a Files,
    tally: &'a mut Tally,
}

impl Server<'_> {
    /// A difference: wrong, unless there is a reason.
    fn differs(&mut self, reason: Option<Reason>, what: String) {
        let what = format!("{}: {what}", self.name);
        match reason {
            Some(reason) => self.tally.explained.entry(reason).or_default().push(what),
            None => self.tally.wrong.push(what),
        }
    }

    /// Does the node list a CPU that another one lists, too?
    fn shares_cpus(&self, id: u32) -> bool {
        let own = self.files.node_masks.get(&id).cloned().unwrap_or_default();
        let others = self.files.node_masks.iter().filter(|(other, _)| **other != id);
        others.flat_map(|(_, mask)| mask.iter()).any(|cpu| own.contains(cpu))
    }

    fn nodes(&mut self) {
        for &id in self.theirs.nodes.keys().filter(|&&id| self.ours.node(id).is_none()) {
            self.differs(None, format!("node {id} only in lstopo"));
        }
        for node in &self.ours.nodes {
            match self.theirs.nodes.get(&node.id) {
                Some(theirs) => self.node(node, theirs),
                None => {
                    let reason = self.shares_cpus(node.id).then_some(Reason::SharedCpu);
                    self.differs(reason, format!("node {} not in lstopo", node.id));
                }
            }
        }
    }

    fn node(&mut self, node: &HostNode, theirs: &lstopo::Node) {
        self.tally.nodes += 1;
        self.tally.nodes_without_cpus += usize::from(node.cpus.is_empty());
        self.tally.nodes_without_memory += usize::from(node.memory_total_kib == 0);
        if node.cpus != theirs.cpus {
            let reason = if node.cpus.is_empty() && theirs.kind == "GPUMemory" {
                Some(Reason::GpuMemory)
            } else {
                let part = self.shares_cpus(node.id) && node.cpus.is_subset(&theirs.cpus);
                part.then_some(Reason::SharedCpu)
            };
            self.differs(reason, format!("node {}: CPUs {}, lstopo has {}", node.id, node.cpus, theirs.cpus));
        }
        let bytes = node.memory_total_kib * 1024;
        if bytes != theirs.memory_bytes {
            self.differs(
                None,
                format!("node {}: {bytes} bytes, lstopo has {}", node.id, theirs.memory_bytes),
            );
        }
    }

    fn cpus(&mut self) {
        let cpus: CpuSet = self.ours.nodes.iter().flat_map(|node| node.cpus.iter()).collect();
        self.tally.cpus += cpus.len();
        if cpus != self.theirs.cpus {
            let listed = |&cpu: &u32| self.files.node_masks.values().any(|mask| mask.contains(cpu));
            let with_node: CpuSet = self.theirs.cpus.iter().filter(listed).collect();
            let reason = (cpus == with_node).then_some(Reason::CpuWithoutNode);
            self.differs(reason, format!("CPUs {cpus}, lstopo has {}", self.theirs.cpus));
        }
    }

    fn distances(&mut self) {
        for (&(from, to), &distance) in self.theirs.distances.iter().flatten() {
            self.tally.distances += 1;
            let ours = self.ours.distance(from, to);
            if ours.map(u64::from) != Some(distance) {
                self.differs(None, format!("distance {from} to {to}: {ours:?}, lstopo has {distance}"));
            }
        }
    }

    fn caches(&mut self) {
        let mut caches = BTreeMap::new();
        for group in &self.ours.caches {
            let (level, size_bytes, cpus) = (group.level, group.size_kib * 1024, group.cpus.clone());
            caches
                .extend(group.cpus.iter().map(|cpu| (cpu, Cache { level, size_bytes, cpus: cpus.clone() })));
        }
        self.tally.caches += self.ours.caches.len();
        for cpu in self.theirs.cpus.iter() {
            let (ours, theirs) = (caches.get(&cpu), self.theirs.last_caches.get(&cpu));
            if ours != theirs {
                let contradictory =
                    |cache: &Cache| cache.cpus.iter().any(|cpu| self.files.contradictory.contains(cpu));
                let reason = if self.ours.node_of_cpu(cpu).is_none() {
                    Some(Reason::CpuWithoutNode)
                } else {
                    ours.is_some_and(contradictory).then_some(Reason::CacheContradicts)
                };
                self.differs(reason, format!("last cache of CPU {cpu}: {ours:?}, lstopo has {theirs:?}"));
            }
        }
    }

    fn pci_devices(&mut self) {
        for (address, device) in &self.theirs.pci_devices {
            if self.ours.pci_devices.iter().all(|ours| ours.address != *address) {
                let reason = (device.vendor == 0 && device.device == 0).then_some(Reason::DeviceWithoutIds);
                self.differs(reason, format!("PCI function {address} only in lstopo"));
            }
        }
        for device in &self.ours.pci_devices {
            match self.theirs.pci_devices.get(&device.address) {
                Some(theirs) => self.pci_device(device, theirs),
                None => {
                    const BRIDGE: u32 = 0x0604;
                    let wide = device.address.find(':').is_some_and(|digits| digits > 4);
                    let reason = if wide {
                        Some(Reason::WideDomain)
                    } else {
                        (device.class >> 8 == BRIDGE).then_some(Reason::BridgeWithoutBuses)
                    };
                    self.differs(reason, format!("PCI function {} not in lstopo", device.address));
                }
            }
        }
    }

    fn pci_device(&mut self, device: &PciDevice, theirs: &lstopo::PciDevice) {
        self.tally.pci_devices += 1;
        self.tally.pci_devices_with_node += usize::from(device.node.is_some());
        let address = &device.address;
        let ids = (device.class >> 8, u32::from(device.vendor), u32::from(device.device));
        if ids != (theirs.class, theirs.vendor, theirs.device) {
            self.differs(None, format!("PCI function {address}: {ids:x?}, lstopo has {theirs:x?}"));
        }
        if !self.is_near(device, &theirs.nodes) {
            let first = self.ours.pci_devices.iter().find(|other| other.address == theirs.first);
            let as_the_first = first.is_some_and(|first| self.is_near(first, &theirs.nodes));
            let reason = (as_the_first && theirs.first != *address).then_some(Reason::HostBridge);
            let (ours, theirs) = (device.node, &theirs.nodes);
            self.differs(reason, format!("PCI function {address}: node {ours:?}, lstopo has {theirs}"));
        }
    }

    /// Is a function's node the one that lstopo found it near to, or does neither know one? lstopo has no other
    /// word for not knowing than all nodes, which with one node is that one.
    fn is_near(&self, device: &PciDevice, nodes: &CpuSet) -> bool {
        match device.node {
            Some(node) => nodes.iter().eq([node]),
            None => nodes.len() == self.theirs.nodes.len(),
        }
    }
}
