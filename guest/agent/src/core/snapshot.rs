//! A guest at one time, and the bounds of what is done there: plain data.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use vnuma_model::CpuSet;

/// A NUMA node, by the kernel's number.
pub type NodeId = u32;

/// A process: its number, and its start in clock ticks since boot, as the number is given to others after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId {
    /// Its number.
    pub pid: i32,
    /// When it started.
    pub started: u64,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its CPUs that are online.
    pub cpus: CpuSet,
    /// CPU time used since the last look, thousandths of a CPU. `None`: this is the first look.
    pub used_permille: Option<u32>,
    /// Memory that is free or can be made so at once, KiB.
    pub free_kib: u64,
    /// All of its memory, KiB.
    pub total_kib: u64,
}

/// A device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Its node, if the kernel knows one.
    pub node: Option<NodeId>,
    /// PCI class code, 24 bits.
    pub class: u32,
    /// It does RDMA.
    pub rdma: bool,
    /// Its other names: network interfaces, RDMA devices.
    pub names: BTreeSet<String>,
}

/// What shows that a process is heavy on I/O.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Evidence {
    /// It runs code of a library that talks to devices past the kernel.
    Library(String),
    /// It has a file open through which it drives devices.
    File {
        /// The file.
        path: String,
        /// Addresses of the devices behind it.
        devices: BTreeSet<String>,
    },
}

/// A process that may be of interest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Which.
    pub id: ProcessId,
    /// Name, for messages. Anything may be in it.
    pub name: String,
    /// File name of its program.
    pub program: String,
    /// Its control group, from the root of cgroup v2. Empty if that is not in use.
    pub cgroup: String,
    /// What shows that it is heavy on I/O.
    pub evidence: BTreeSet<Evidence>,
    /// All its user ids (real, effective, saved, file system) are root's.
    pub of_root: bool,
    /// It runs a VM: where its vCPUs are is for its hypervisor's tools to say.
    pub runs_vm: bool,
    /// CPUs of the threads with the widest affinity.
    pub allowed: CpuSet,
    /// CPU time by node since the last look, thousandths of a CPU.
    pub ran_permille: BTreeMap<NodeId, u32>,
    /// Time that its threads waited for a CPU, thousandths of a thread's time.
    pub waited_permille: u32,
    /// Memory that can be moved by node, KiB. `None`: it was not read.
    pub memory_kib: Option<BTreeMap<NodeId, u64>>,
}

impl Process {
    pub(super) fn ran(&self) -> u64 {
        self.ran_permille.values().map(|ran| u64::from(*ran)).sum()
    }

    pub(super) fn ran_on(&self, node: NodeId) -> u64 {
        u64::from(self.ran_permille.get(&node).copied().unwrap_or(0))
    }

    /// Memory on other nodes than this one.
    pub(super) fn remote_kib(&self, node: NodeId) -> u64 {
        let all = self.memory_kib.iter().flatten().filter(|(on, _)| **on != node);
        all.fold(0, |sum, (_, kib)| sum.saturating_add(*kib))
    }
}

/// An interrupt of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interrupt {
    /// The kernel's number.
    pub irq: u32,
    /// Address of the device.
    pub device: String,
    /// What handles it, as its driver calls that: `eth0-TxRx-0`.
    pub name: String,
    /// CPUs that may handle it.
    pub cpus: CpuSet,
}

/// The guest at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Nodes that are online.
    pub nodes: BTreeMap<NodeId, Node>,
    /// PCI functions by address.
    pub devices: BTreeMap<String, Device>,
    /// Processes.
    pub processes: Vec<Process>,
    /// Interrupts of devices.
    pub interrupts: Vec<Interrupt>,
}

/// Bounds of what is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Looks in a row at which a process fits before it is placed.
    pub place_after: u32,
    /// Looks in a row at which it is strained before it is released.
    pub release_after: u32,
    /// Least time between a release and the next placement. It doubles with each release, up to [`LONGEST_REST`] times that.
    pub rest: Duration,
    /// CPU time that a placement leaves on a node, percent.
    pub cpu_reserve_percent: u32,
    /// Memory that a placement leaves on a node, percent.
    pub memory_reserve_percent: u32,
    /// Placements of one look.
    pub placements_per_look: u32,
    /// Memory that is moved in one look, KiB.
    pub memory_kib_per_look: u64,
}
