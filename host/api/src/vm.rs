//! A VM as vnumad sees it.

use crate::Generation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;
use vnuma_model::{DistanceMatrix, VcpuState};

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Process of its hypervisor; none while nothing is known but the socket.
    pub pid: Option<i32>,
    /// By what vnumad has it: `qmp` or `libvirt`.
    #[serde(default)]
    pub backend: String,
    /// Its hypervisor has described it. If not, it has yet to answer: guest nodes are not known, and vCPUs, if there are
    /// any here, were seen from outside.
    pub described: bool,
    /// Can its hypervisor be asked?
    pub hypervisor: Hypervisor,
    /// It has a topology channel, and this vnumad serves it.
    pub attached: bool,
    /// The same with more detail.
    pub channel: ChannelState,
    /// It is to be attached as soon as its guest runs here.
    #[serde(default)]
    pub attach_on_arrival: bool,
    /// Whether its guest runs, in QEMU's words: `running`, `paused`, `internal-error` and so on; none before QEMU has
    /// answered.
    #[serde(default)]
    pub run_state: Option<String>,
    /// What is wrong: why its hypervisor cannot be asked anything, why its guest cannot go on, or what an earlier vnumad has left.
    pub problem: Option<String>,
    /// Guest nodes in rising order; none in a UMA VM.
    pub nodes: Vec<GuestNode>,
    /// Distances between guest nodes that follow from their homes, by position.
    pub distances: DistanceMatrix,
    /// vCPUs in rising order of APIC id.
    pub vcpus: Vec<Vcpu>,
    /// PCI functions of the host that it has, as its QEMU says.
    #[serde(default)]
    pub devices: Vec<VmDevice>,
    /// What was published to its guest.
    pub publication: Publication,
    /// Slots of guest nodes that vCPUs can be replugged to, where there are any.
    #[serde(default)]
    pub spare_slots: BTreeMap<u32, u32>,
}

/// Whether a VM's hypervisor can be asked. Whatever it is, its vCPUs are observed, moved and published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Hypervisor {
    /// It answers.
    Answers,
    /// A signal has stopped its process (SIGSTOP).
    Stopped,
    /// A debugger holds its process.
    Debugged,
    /// It does not answer: another client uses its monitor, or it hangs.
    Silent,
    /// There is no connection to it.
    Lost,
}

/// A VM's topology channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum ChannelState {
    /// There is none.
    None,
    /// It is being plugged, or taken over from an earlier vnumad.
    Attaching,
    /// It is there and served.
    Attached,
    /// It is there, but belonged to an earlier vnumad and could not be taken over: nothing can be published through it.
    Lost,
}

/// A guest node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestNode {
    /// Its number.
    pub id: u32,
    /// Host node that its memory is on, if it can be said.
    pub home: Option<u32>,
    /// Its memory, bytes.
    pub memory_bytes: u64,
    /// What of it is resident on other host nodes than its home, bytes, if that is known.
    #[serde(default)]
    pub displaced_bytes: Option<u64>,
    /// Host node that QEMU's policy (`bind`, `preferred`) takes new pages of it from, if it names one alone.
    #[serde(default)]
    pub bound: Option<u32>,
}

/// A vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Vcpu {
    /// How host and guest name it.
    pub apic_id: u32,
    /// Its thread.
    pub tid: i32,
    /// CPU of the host that it was seen on last.
    pub host_cpu: Option<u32>,
    /// Node that it is on.
    pub host_node: Option<u32>,
    /// Its affinity confines it to that node.
    pub pinned: bool,
    /// Guest node that was published for it last; before the first publication, the one that it booted on.
    pub guest_node: Option<u32>,
    /// Guest node that the guest's kernel uses, as far as is known: the one that it acknowledged last.
    pub acked_node: Option<u32>,
    /// Guest node that is right for where the vCPU runs now.
    pub target_node: Option<u32>,
    /// How true the guest's view is.
    pub state: VcpuState,
}

/// A PCI function of the host that a VM has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmDevice {
    /// Its address on the host.
    pub host: String,
    /// Host node that it is attached to, if that is known.
    pub host_node: Option<u32>,
    /// Its address in the guest, once the guest's firmware has given it one.
    pub guest: Option<String>,
    /// Guest node that was published for it last.
    pub guest_node: Option<u32>,
    /// Guest node that the guest's kernel has for it: the one that its driver acknowledged last.
    pub acked_node: Option<u32>,
    /// Guest node that is right for it now.
    pub target_node: Option<u32>,
    /// How true the guest's view is, as of a vCPU.
    pub state: VcpuState,
}

/// How the guest's driver changes the kernel's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum DriverMode {
    /// In place: CPUs go on running.
    Fast,
    /// By CPU hotplug: each CPU that moves is offline for a moment, and one of them cannot move.
    Safe,
}

/// A publication that a guest's driver refused, or applied in part only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusedGeneration {
    /// Which.
    pub generation: Generation,
    /// Why: an error number of Linux; 0 if the guest gave none.
    pub errno: i32,
}

/// What was published to a VM since vnumad first saw it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Publication {
    /// Last generation that was published.
    pub generation: Option<Generation>,
    /// Last generation that the guest acknowledged.
    pub acknowledged: Option<Generation>,
    /// How its driver changes the guest's maps, as the guest reports; none without a driver.
    pub driver_mode: Option<DriverMode>,
    /// The driver's version, as the guest reports; none without a driver.
    #[serde(default)]
    pub driver_version: Option<String>,
    /// The last publication that the driver refused or applied in part only, as the guest reports.
    #[serde(default)]
    pub refused: Option<RefusedGeneration>,
    /// How many there were.
    pub publications: u64,
    /// How many of them the guest acknowledged.
    pub acknowledgements: u64,
    /// Changes that were gone before their dwell was over.
    pub suppressed_by_dwell: u64,
    /// Publications that had to wait for the cap.
    pub deferred_by_cap: u64,
}
