//! All that is decided about one VM.

use crate::belief::{Belief, Updated};
use crate::{Homes, Placed, SettlePolicy, Settler, Suppressed, choose_node, distances, homes};
use std::collections::BTreeMap;
use vnuma_topology::{
    ApicId, DistanceMatrix, GuestNodeId, HostNodeId, HostTopology, VcpuLocation, VmDescription,
};

/// Where a vCPU is, as far as decisions go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Its host node. One that is confined to a node counts as being there, also while it
    /// sleeps on a CPU that it will never run on again.
    pub node: HostNodeId,
    /// Its affinity confines it to that node.
    pub pinned: bool,
    /// Since when, `CLOCK_MONOTONIC`.
    pub time_ns: u64,
}

impl From<VcpuLocation> for Observation {
    fn from(location: VcpuLocation) -> Self {
        Self {
            node: location.pinned.unwrap_or(location.node),
            pinned: location.pinned.is_some(),
            time_ns: location.time_ns,
        }
    }
}

/// How true the guest's view of a vCPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum VcpuState {
    /// It is on the home of the guest node that the guest believes it to be on.
    True,
    /// It is on no guest node's home; the guest believes the nearest one.
    Approximate,
    /// The guest believes another guest node: told and not yet taken over, waiting to be
    /// told, or nothing can be told.
    Stale,
    /// It was not observed, no guest node has a known home, or what the guest believes cannot be known.
    Unknown,
}

/// What is known of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuStatus {
    /// Its host node, if observed.
    pub host_node: Option<HostNodeId>,
    /// It is confined to that node.
    pub pinned: bool,
    /// Guest node that the guest believes.
    pub believed: Option<GuestNodeId>,
    /// Guest node that was told last, or that it booted with.
    pub told: Option<GuestNodeId>,
    /// Guest node that would be right.
    pub right: Option<GuestNodeId>,
    /// The sum of it.
    pub state: VcpuState,
}

/// A vCPU in a [`Telling`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToldVcpu {
    /// The vCPU.
    pub apic_id: ApicId,
    /// Its guest node.
    pub placed: Placed,
}

/// One publication: the whole view of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Telling {
    /// Between guest nodes, by their number.
    pub distances: DistanceMatrix,
    /// In rising order of APIC id.
    pub vcpus: Vec<ToldVcpu>,
    /// Oldest change of the host in it.
    pub changed_ns: u64,
}

#[derive(Clone, Debug)]
struct Vcpu {
    boot: Option<GuestNodeId>,
    observed: Option<Observation>,
    /// What is true, if it can be said.
    wanted: Option<Placed>,
    /// What was told last; before that, what the guest booted with.
    told: Placed,
}

/// What is true of a VM, what it was told and what it believes.
#[derive(Clone, Debug)]
pub struct VmPlacement {
    guest_nodes: Vec<GuestNodeId>,
    homes: Homes,
    distances: DistanceMatrix,
    vcpus: BTreeMap<ApicId, Vcpu>,
    settler: Settler,
    belief: Belief,
    telling: bool,
}

impl VmPlacement {
    /// A VM that was just seen; no vCPU is observed and nothing is told.
    pub fn new(host: &HostTopology, vm: &VmDescription, policy: SettlePolicy) -> Self {
        let mut placement = Self {
            guest_nodes: Vec::new(),
            homes: Homes::new(),
            distances: DistanceMatrix::default(),
            vcpus: BTreeMap::new(),
            settler: Settler::new(policy),
            belief: Belief::default(),
            telling: false,
        };
        placement.describe(host, vm, 0);
        placement
    }

    /// The hypervisor's description was read again: vCPUs come and go, unbound memory finds
    /// another home.
    pub fn describe(&mut self, host: &HostTopology, vm: &VmDescription, now_ns: u64) {
        self.guest_nodes = vm.guest_nodes.iter().map(|node| node.id).collect();
        self.homes = homes(&vm.guest_nodes, &self.homes);
        let mut changed = false;
        for vcpu in &vm.vcpus {
            if self.vcpus.contains_key(&vcpu.apic_id) {
                continue;
            }
            changed = true;
            let node = vcpu.boot_node.or(self.guest_nodes.first().copied()).unwrap_or(0);
            if !self.guest_nodes.is_empty() {
                self.belief.boot(vcpu.apic_id, node);
            }
            let told = Placed { node, approximate: false };
            let vcpu_state = Vcpu { boot: vcpu.boot_node, observed: None, wanted: None, told };
            self.vcpus.insert(vcpu.apic_id, vcpu_state);
        }
        let present: std::collections::BTreeSet<_> = vm.vcpus.iter().map(|vcpu| vcpu.apic_id).collect();
        let (settler, belief) = (&mut self.settler, &mut self.belief);
        self.vcpus.retain(|id, _| {
            let stays = present.contains(id);
            if !stays {
                settler.forget(*id);
                belief.forget(*id);
                changed = true;
            }
            stays
        });
        self.host_changed(host, changed, now_ns);
    }

    /// Homes, distances or the host's nodes changed: all is worked out again.
    fn host_changed(&mut self, host: &HostTopology, vcpus_changed: bool, now_ns: u64) {
        let distances = distances(host, &self.guest_nodes, &self.homes);
        let changed = distances != self.distances || vcpus_changed;
        self.distances = distances;
        if changed && self.telling {
            self.settler.tell_at_once(now_ns);
        }
        let observed: Vec<_> = self.vcpus.iter().filter_map(|(id, v)| Some((*id, v.observed?))).collect();
        for (vcpu, observation) in observed {
            // What is right changes now, not when the vCPU came where it is.
            let time_ns = now_ns.max(observation.time_ns);
            self.observe(host, vcpu, Some(Observation { time_ns, ..observation }));
        }
    }

    /// A vCPU was seen, or cannot be seen any more. Returns the host node that it left, if it was
    /// seen on another one before.
    pub fn observe(
        &mut self,
        host: &HostTopology,
        apic_id: ApicId,
        observation: Option<Observation>,
    ) -> Option<HostNodeId> {
        let vcpu = self.vcpus.get_mut(&apic_id)?;
        let before = std::mem::replace(&mut vcpu.observed, observation);
        let Some(now) = observation else {
            vcpu.wanted = None;
            self.settler.forget(apic_id);
            return None;
        };
        vcpu.wanted = choose_node(host, &self.homes, now.node, Some(vcpu.told.node), vcpu.boot);
        match vcpu.wanted {
            Some(wanted) if self.telling => {
                self.settler.observe(apic_id, vcpu.told, wanted, now.pinned, now.time_ns);
            }
            _ => self.settler.forget(apic_id),
        }
        before.map(|before| before.node).filter(|&node| node != now.node)
    }

    /// The VM has a channel from now on. Returns the first publication: all that is true now.
    pub fn start_telling(&mut self, generation: u64, now_ns: u64) -> Telling {
        self.telling = true;
        self.settler.clear();
        self.settler.count_telling(now_ns);
        for vcpu in self.vcpus.values_mut() {
            vcpu.told = vcpu.wanted.unwrap_or(vcpu.told);
        }
        self.publish(generation, now_ns, now_ns)
    }

    /// The channel is gone; the guest keeps what it took over.
    pub fn stop_telling(&mut self) {
        self.telling = false;
        self.settler.clear();
        self.belief.stop_waiting();
    }

    /// Somebody else has the guest's channel: what it believes cannot be known until it acknowledges again,
    /// or boots without it.
    pub fn belief_unknown(&mut self) {
        self.belief.unknown();
    }

    /// The guest boots again, and believes what it boots with. If it has a channel, everything is
    /// told anew, for its driver to acknowledge.
    pub fn rebooted(&mut self, now_ns: u64) {
        self.belief.stop_waiting();
        let first = self.guest_nodes.first().copied();
        for (&id, vcpu) in &self.vcpus {
            if let Some(node) = vcpu.boot.or(first) {
                self.belief.boot(id, node);
            }
        }
        if self.telling {
            self.settler.tell_at_once(now_ns);
        }
    }

    /// The publication that is due now, if one is; it counts as told under `generation`.
    pub fn take_due(&mut self, generation: u64, now_ns: u64) -> Option<Telling> {
        if !self.telling {
            return None;
        }
        let due = self.settler.take_due(now_ns)?;
        for (id, pending) in &due.vcpus {
            if let Some(vcpu) = self.vcpus.get_mut(id) {
                vcpu.told = pending.wanted;
            }
        }
        Some(self.publish(generation, due.changed_ns, now_ns))
    }

    fn publish(&mut self, generation: u64, changed_ns: u64, told_ns: u64) -> Telling {
        let nodes = self.vcpus.iter().map(|(id, vcpu)| (*id, vcpu.told.node)).collect();
        self.belief.told(Updated { generation, changed_ns, told_ns }, nodes);
        let vcpus = self.vcpus.iter().map(|(&apic_id, vcpu)| ToldVcpu { apic_id, placed: vcpu.told });
        Telling { distances: self.distances.clone(), vcpus: vcpus.collect(), changed_ns }
    }

    /// The guest acknowledged on a vector. Returns what it took over, if that was outstanding.
    pub fn acknowledged(&mut self, vector: usize) -> Option<Updated> {
        self.belief.acknowledged(vector)
    }

    /// Is an acknowledgement outstanding?
    pub fn is_waiting(&self) -> bool {
        self.belief.is_waiting()
    }

    /// When [`Self::take_due`] has something to say, if nothing else happens.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        if self.telling { self.settler.next_deadline_ns() } else { None }
    }

    /// What was suppressed since the VM was first seen.
    pub fn suppressed(&self) -> Suppressed {
        self.settler.suppressed()
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

    /// What is known of a vCPU.
    pub fn vcpu(&self, apic_id: ApicId) -> Option<VcpuStatus> {
        let vcpu = self.vcpus.get(&apic_id)?;
        let believed = self.belief.node(apic_id);
        let state = match (vcpu.wanted, believed) {
            (None, _) | (_, None) => VcpuState::Unknown,
            (Some(wanted), Some(node)) if wanted.node != node => VcpuState::Stale,
            (Some(Placed { approximate: true, .. }), _) => VcpuState::Approximate,
            _ => VcpuState::True,
        };
        Some(VcpuStatus {
            host_node: vcpu.observed.map(|observed| observed.node),
            pinned: vcpu.observed.is_some_and(|observed| observed.pinned),
            believed,
            told: (!self.guest_nodes.is_empty()).then_some(vcpu.told.node),
            right: vcpu.wanted.map(|wanted| wanted.node),
            state,
        })
    }
}

#[cfg(test)]
#[path = "vm_tests.rs"]
mod tests;
