//! What is true of a VM, what was published to its guest, and what the guest uses.

use crate::acked::{AckedTopology, Update};
use crate::devices::{DeviceStatus, Devices};
use crate::{
    Batch, Homes, NodeAssignment, PublishReason, assignment::state_of, choose_node, distances, homes,
};
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::{
    ApicId, DistanceMatrix, GuestNodeId, HostNodeId, HostTopology, PciAddress, VcpuState, VmDescription,
};

/// Where a vCPU is, as far as decisions go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Its host node. One that is confined to a node counts as being there, also while it
    /// sleeps on a CPU that it will never run on again.
    pub node: HostNodeId,
    /// Somebody put it there on purpose, so that it will stay.
    pub deliberate: bool,
    /// Since when, `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
}

/// What is known of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuStatus {
    /// Its host node, if observed.
    pub host_node: Option<HostNodeId>,
    /// Guest node that the guest's kernel uses, as far as it has acknowledged.
    pub acked_node: Option<GuestNodeId>,
    /// Guest node that was published last, or that it booted with.
    pub published_node: Option<GuestNodeId>,
    /// Guest node that would be right.
    pub target_node: Option<GuestNodeId>,
    /// How true the guest's view of it is.
    pub state: VcpuState,
}

/// A publication: the guest's whole topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publication {
    /// Between guest nodes, by their number.
    pub distances: DistanceMatrix,
    /// In rising order of APIC id.
    pub vcpus: Vec<(ApicId, GuestNodeId)>,
    /// PCI functions of the host that the VM has, in rising order of address.
    pub devices: Vec<(PciAddress, GuestNodeId)>,
    /// Oldest change of the host in it.
    pub changed_ns: u64,
    /// Why it goes out.
    pub why: PublishReason,
}

#[derive(Clone, Debug)]
struct Vcpu {
    boot: Option<GuestNodeId>,
    /// It was seen, or somebody tried to see it.
    looked_at: bool,
    observed: Option<Observation>,
    /// What is true, if it can be said.
    target: Option<NodeAssignment>,
    /// What was published last or, before that, what the guest booted with.
    published: GuestNodeId,
}

/// A VM's guest nodes and vCPUs: where they are, and what its guest knows of that.
#[derive(Clone, Debug)]
pub struct VmPlacement {
    guest_nodes: Vec<GuestNodeId>,
    homes: Homes,
    distances: DistanceMatrix,
    vcpus: BTreeMap<ApicId, Vcpu>,
    acked: AckedTopology<ApicId>,
    devices: Devices,
    /// Since when the VM has a channel, if it has one.
    pub(crate) channel_since_ns: Option<u64>,
    /// Nothing was published since the VM has its channel.
    first: bool,
    /// Something besides nodes of vCPUs (distances, the vCPUs that there are) is not published yet, since this time.
    pub(crate) news: Option<(u64, PublishReason)>,
    /// How often what [`Self::told`] says may have changed, at least 1, and how often it was published.
    pub(crate) changes: (u64, u64),
}

impl VmPlacement {
    /// A VM that was just seen. No vCPU is observed and nothing is published.
    pub fn new(host: &HostTopology, vm: &VmDescription) -> Self {
        let mut placement = Self {
            guest_nodes: Vec::new(),
            homes: Homes::new(),
            distances: DistanceMatrix::default(),
            vcpus: BTreeMap::new(),
            acked: AckedTopology::default(),
            devices: Devices::default(),
            channel_since_ns: None,
            first: false,
            news: None,
            changes: (0, 0),
        };
        placement.describe(host, vm, 0);
        placement
    }

    /// The hypervisor's description was read again: vCPUs and devices come and go, memory finds another home.
    pub fn describe(&mut self, host: &HostTopology, vm: &VmDescription, now_ns: u64) {
        self.guest_nodes = vm.guest_nodes.iter().map(|node| node.id).collect();
        self.homes = homes(&vm.guest_nodes, &vm.memory_devices, &self.homes);
        let mut changed = false;
        for vcpu in &vm.vcpus {
            if self.vcpus.contains_key(&vcpu.apic_id) {
                continue;
            }
            changed = true;
            let node = vcpu.boot_node.or(self.guest_nodes.first().copied()).unwrap_or(0);
            if !self.guest_nodes.is_empty() {
                self.acked.boot(vcpu.apic_id, node);
            }
            let state = Vcpu {
                boot: vcpu.boot_node,
                looked_at: false,
                observed: None,
                target: None,
                published: node,
            };
            self.vcpus.insert(vcpu.apic_id, state);
        }
        let present: BTreeSet<_> = vm.vcpus.iter().map(|vcpu| vcpu.apic_id).collect();
        let acked = &mut self.acked;
        self.vcpus.retain(|id, _| {
            let stays = present.contains(id);
            if !stays {
                acked.forget(*id);
                changed = true;
            }
            stays
        });
        self.changes.0 += 1;
        self.devices.describe(&vm.devices);
        self.reassess(host, changed, now_ns);
    }

    /// The host has other nodes, CPUs or distances now.
    pub fn host_changed(&mut self, host: &HostTopology, now_ns: u64) {
        self.reassess(host, false, now_ns);
    }

    /// Homes, distances or the host's nodes changed: all is worked out again.
    fn reassess(&mut self, host: &HostTopology, vcpus_changed: bool, now_ns: u64) {
        let distances = distances(host, &self.guest_nodes, &self.homes);
        let devices_changed = self.devices.reassess(host, &self.homes);
        let changed = distances != self.distances || vcpus_changed || devices_changed;
        self.distances = distances;
        if changed {
            self.note_news(PublishReason::Described, now_ns);
        }
        let observed: Vec<_> = self.vcpus.iter().filter_map(|(id, v)| Some((*id, v.observed?))).collect();
        for (vcpu, observation) in observed {
            // What is right changes now, not when the vCPU came where it is.
            let time_ns = now_ns.max(observation.time_ns);
            self.observe(host, vcpu, Some(Observation { time_ns, ..observation }));
        }
    }

    /// A vCPU was seen, or cannot be seen any more. Returns the host node that it left, if it was seen on another one before.
    pub fn observe(
        &mut self,
        host: &HostTopology,
        apic_id: ApicId,
        observation: Option<Observation>,
    ) -> Option<HostNodeId> {
        let vcpu = self.vcpus.get_mut(&apic_id)?;
        let before = std::mem::replace(&mut vcpu.observed, observation);
        vcpu.looked_at = true;
        self.changes.0 += 1;
        let Some(now) = observation else {
            vcpu.target = None;
            return None;
        };
        vcpu.target = choose_node(host, &self.homes, now.node, Some(vcpu.published), vcpu.boot);
        before.map(|before| before.node).filter(|&node| node != now.node)
    }

    /// Notes that more than nodes of vCPUs is to be published, if there is a channel.
    fn note_news(&mut self, reason: PublishReason, now_ns: u64) {
        if self.channel_since_ns.is_some() {
            self.news.get_or_insert((now_ns, reason));
        }
    }

    /// The VM has a channel from now on: all that is true is to be published at once.
    pub fn start_publishing(&mut self, now_ns: u64) {
        (self.channel_since_ns, self.first) = (Some(now_ns), true);
        (self.news, self.changes.0) = (Some((now_ns, PublishReason::Attached)), self.changes.0 + 1);
    }

    /// The channel is gone. The guest keeps what it took over.
    pub fn stop_publishing(&mut self) {
        (self.channel_since_ns, self.first, self.news) = (None, false, None);
        self.changes.0 += 1;
        self.acked.stop_waiting();
        self.devices.stop_publishing();
    }

    /// Somebody else has the guest's channel: what the guest uses cannot be known until it acknowledges again, or boots
    /// without the channel.
    pub fn acked_unknown(&mut self) {
        self.acked.unknown();
        self.devices.acked_unknown();
    }

    /// The guest boots again, and uses what it boots with. If it has a channel, everything is published anew, for its
    /// driver to acknowledge.
    pub fn rebooted(&mut self, now_ns: u64) {
        self.acked.stop_waiting();
        self.devices.acked_unknown();
        let first = self.guest_nodes.first().copied();
        for (&id, vcpu) in &self.vcpus {
            if let Some(node) = vcpu.boot.or(first) {
                self.acked.boot(id, node);
            }
        }
        self.note_news(PublishReason::Rebooted, now_ns);
    }

    /// Does the VM have this vCPU?
    pub(crate) fn has(&self, apic_id: ApicId) -> bool {
        self.vcpus.contains_key(&apic_id)
    }

    /// Nothing was published since the VM has its channel, and these vCPUs were not looked at: the guest would be told the nodes that
    /// it booted with.
    pub(crate) fn waits_for_first_look(&self) -> bool {
        self.first && self.vcpus.values().any(|vcpu| !vcpu.looked_at)
    }

    /// Each vCPU with the node that the guest was told last and, if that can be said, its node now and what was seen of it. As long as
    /// nothing was published no difference is drift.
    pub(crate) fn told(
        &self,
    ) -> impl Iterator<Item = (ApicId, GuestNodeId, Option<(GuestNodeId, Observation)>)> {
        let first_ns = self.channel_since_ns.filter(|_| self.first);
        self.vcpus.iter().map(move |(id, vcpu)| {
            let seen = |seen: Observation| match first_ns {
                Some(time_ns) => Observation { deliberate: true, time_ns, ..seen },
                None => seen,
            };
            let now = vcpu.target.map(|target| target.node).zip(vcpu.observed.map(seen));
            (*id, vcpu.published, now)
        })
    }

    /// The guest was told all that is not drift.
    pub(crate) fn is_published(&self) -> bool {
        let differs = |told, (target, seen): (_, Observation)| seen.deliberate && target != told;
        self.news.is_none() && !self.told().any(|(_, told, now)| now.is_some_and(|now| differs(told, now)))
    }

    /// What is to be published under `generation`, with these new nodes of vCPUs. It counts as published from now on.
    pub fn publish(
        &mut self,
        batch: &Batch,
        why: PublishReason,
        generation: u64,
        now_ns: u64,
    ) -> Publication {
        (self.first, self.news) = (false, None);
        self.changes.1 += 1;
        for (id, node) in &batch.vcpus {
            if let Some(vcpu) = self.vcpus.get_mut(id) {
                vcpu.published = *node;
            }
        }
        let update = Update { generation, changed_ns: batch.changed_ns, published_ns: now_ns };
        self.acked.published(update, self.vcpus.iter().map(|(id, vcpu)| (*id, vcpu.published)));
        Publication {
            distances: self.distances.clone(),
            vcpus: self.vcpus.iter().map(|(&apic_id, vcpu)| (apic_id, vcpu.published)).collect(),
            devices: self.devices.publish(update),
            changed_ns: batch.changed_ns,
            why,
        }
    }

    /// The guest has acknowledged a generation. Returns what it took over, if that was outstanding.
    pub fn acknowledged(&mut self, generation: u64) -> Option<Update> {
        self.devices.acknowledged(generation);
        self.acked.acknowledged(generation)
    }

    /// Is an acknowledgement outstanding?
    pub fn is_waiting(&self) -> bool {
        self.acked.is_waiting()
    }

    /// Home of each guest node.
    pub fn homes(&self) -> &Homes {
        &self.homes
    }

    /// Guest nodes, in rising order.
    pub fn guest_nodes(&self) -> &[GuestNodeId] {
        &self.guest_nodes
    }

    /// Distances between guest nodes that follow from their homes, by position.
    pub fn distances(&self) -> &DistanceMatrix {
        &self.distances
    }

    /// What is known of a device, by the address that the guest has for it.
    pub fn device(&self, address: PciAddress) -> Option<DeviceStatus> {
        self.devices.status(address)
    }

    /// What is known of a vCPU.
    pub fn vcpu(&self, apic_id: ApicId) -> Option<VcpuStatus> {
        let vcpu = self.vcpus.get(&apic_id)?;
        let acked = self.acked.node(apic_id);
        Some(VcpuStatus {
            host_node: vcpu.observed.map(|observed| observed.node),
            acked_node: acked,
            published_node: (!self.guest_nodes.is_empty()).then_some(vcpu.published),
            target_node: vcpu.target.map(|target| target.node),
            state: state_of(vcpu.target, acked),
        })
    }
}

#[cfg(test)]
#[path = "vm_tests.rs"]
mod tests;
