//! One VM: what is known of it, decided for it and told to it.

use crate::{
    error::Refusal,
    message::{ConnectionId, Reply},
    tell::{Teller, content},
};
use std::{collections::BTreeMap, os::fd::OwnedFd, time::Duration};
use tracing::error;
use vnuma_api as api;
use vnuma_channel::{Channel, DriverMode};
use vnuma_host::location::monotonic_ns;
use vnuma_hypervisor::VmError;
use vnuma_placement::{
    ACKNOWLEDGEMENT_WINDOW, Observation, Replugger, SettlePolicy, Telling, VcpuState, VmPlacement,
};
use vnuma_topology::{ApicId, HostTopology, VcpuLocation, VmDescription};

/// A VM's channel.
///
/// ```text
///   None ──▶ Attaching ──▶ Serving ──▶ None
///    │           │          ▲  │
///    ├───────────┼──▶ TakingOver
///    │           ▼             ▼
///    └────────▶ Lost ◀─────────┘   plugged, but not (any more) served by this process
/// ```
#[derive(Debug)]
pub(crate) enum Slot {
    None,
    Attaching {
        channel: Channel,
        reply: Reply<api::Vm>,
    },
    /// Plugged by an earlier vnumad; its parts are being copied.
    TakingOver,
    Serving(Teller),
    Lost,
}

/// A vCPU that is on its way to another guest node.
#[derive(Debug)]
pub(crate) struct Replugging {
    pub(crate) vcpu: ApicId,
    pub(crate) guest_node: u32,
    /// Who asked for it, if somebody did.
    pub(crate) reply: Option<Reply<api::Replugged>>,
}

impl Replugging {
    pub(crate) fn answer(self, answer: Result<api::Replugged, Refusal>) {
        if let Some(reply) = self.reply {
            // Nobody waiting for it is fine.
            let _ = reply.send(answer);
        }
    }
}

/// What is known of a VM, and from whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Its hypervisor has described it.
    Described,
    /// It has not answered yet; KVM told its vCPUs.
    ByKvm,
    /// It has not answered yet; the names of its threads told its vCPUs. Their numbers may not be APIC ids.
    ByName,
}

/// A VM.
#[derive(Debug)]
pub(crate) struct Vm {
    /// Number of its first connection, which stays its number.
    pub(crate) id: ConnectionId,
    pub(crate) description: VmDescription,
    pub(crate) known: Known,
    pub(crate) pidfd: OwnedFd,
    pub(crate) placement: VmPlacement,
    pub(crate) locations: BTreeMap<ApicId, VcpuLocation>,
    pub(crate) slot: Slot,
    pub(crate) detaching: Option<Reply<api::Vm>>,
    pub(crate) replugging: Option<Replugging>,
    pub(crate) replugger: Replugger,
    /// An attach has failed that the hypervisor may still carry out: then it is undone.
    pub(crate) undoing: bool,
    pub(crate) stats: api::Telling,
    /// When it was found, and when it was described last.
    pub(crate) found_ns: u64,
    pub(crate) described_ns: u64,
}

impl Vm {
    pub(crate) fn new(
        id: ConnectionId,
        host: &HostTopology,
        description: VmDescription,
        pidfd: OwnedFd,
        policy: SettlePolicy,
    ) -> Self {
        Self {
            id,
            placement: VmPlacement::new(host, &description, policy),
            description,
            known: Known::Described,
            pidfd,
            locations: BTreeMap::new(),
            slot: Slot::None,
            detaching: None,
            replugging: None,
            replugger: Replugger::default(),
            undoing: false,
            stats: api::Telling::default(),
            found_ns: monotonic_ns(),
            described_ns: monotonic_ns(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.description.name
    }

    /// Its hypervisor described it again.
    pub(crate) fn describe(&mut self, host: &HostTopology, description: VmDescription) {
        self.described_ns = monotonic_ns();
        self.placement.describe(host, &description, self.described_ns);
        self.locations.retain(|id, _| description.vcpus.iter().any(|vcpu| vcpu.apic_id == *id));
        self.description = description;
    }

    /// A vCPU was looked at; `None` when it could not be.
    pub(crate) fn locate(
        &mut self,
        host: &HostTopology,
        apic_id: ApicId,
        location: Option<VcpuLocation>,
    ) -> Option<api::Event> {
        let Some(location) = location else {
            self.locations.remove(&apic_id);
            self.placement.observe(host, apic_id, None);
            return None;
        };
        let before = self.locations.insert(apic_id, location);
        let now = Observation::from(location);
        let same = |before: VcpuLocation| {
            let before = Observation::from(before);
            (before.node, before.pinned) == (now.node, now.pinned)
        };
        if before.is_some_and(same) {
            return None;
        }
        let from = self.placement.observe(host, apic_id, Some(now))?;
        let vm = self.name().to_owned();
        Some(api::Event::Changed { vm, vcpu: apic_id, from, to: now.node, time_ns: now.time_ns })
    }

    /// Can it be told anything at all? Before a channel is made.
    pub(crate) fn check_tellable(&self) -> Result<(), Refusal> {
        let vm = self.name().to_owned();
        let ids = self.placement.guest_nodes();
        if ids.is_empty() {
            return Err(Refusal::Uma { vm });
        }
        let last = ids.len() - 1;
        if ids.iter().enumerate().any(|(position, &id)| id as usize != position) {
            return Err(Refusal::NodeNumbers { vm, ids: ids.to_vec(), last });
        }
        // On a copy: this publishes nothing.
        let telling = self.placement.clone().start_telling(0, 0);
        content(&telling).map(drop).map_err(|source| Refusal::Content { vm, source })
    }

    /// The guest node that a vCPU is to be replugged to.
    pub(crate) fn plan_replug(&self, vcpu: ApicId) -> Result<u32, Refusal> {
        let vm = || self.name().to_owned();
        if self.placement.guest_nodes().is_empty() {
            return Err(Refusal::Uma { vm: vm() });
        }
        if self.replugging.is_some() {
            return Err(Refusal::Replugging { vm: vm() });
        }
        if !matches!(self.slot, Slot::None) {
            return Err(Refusal::Told { vm: vm() });
        }
        let described = self.description.vcpus.iter().find(|described| described.apic_id == vcpu);
        let (Some(described), Some(status)) = (described, self.placement.vcpu(vcpu)) else {
            let present = self.description.vcpus.iter().map(|vcpu| vcpu.apic_id).collect();
            return Err(Refusal::NoVcpu { vm: vm(), vcpu, present });
        };
        if described.index == 0 {
            return Err(VmError::BootVcpu { vm: vm() }.into());
        }
        match (status.right, status.believed) {
            (None, _) => Err(Refusal::Nowhere { vm: vm(), vcpu }),
            (Some(node), Some(believed)) if node == believed => Err(Refusal::Right { vm: vm(), vcpu, node }),
            (Some(node), _) => Ok(node),
        }
    }

    /// The vCPU that is to be replugged without anybody asking, and the guest node to plug it to. A guest that stands
    /// still takes no vCPU.
    pub(crate) fn replug_due(&mut self, after: Duration) -> Option<(ApicId, u32)> {
        if self.known != Known::Described || self.description.run_state != "running" {
            return None;
        }
        let vcpus = self.description.vcpus.iter().map(|vcpu| vcpu.apic_id);
        let stale = vcpus
            .filter(|&vcpu| self.placement.vcpu(vcpu).is_some_and(|status| status.state == VcpuState::Stale));
        let astray: Vec<_> = stale.filter_map(|vcpu| Some((vcpu, self.plan_replug(vcpu).ok()?))).collect();
        let after_ns = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
        self.replugger.next(astray, &self.description.spare_slots, after_ns, monotonic_ns())
    }

    /// Serves a channel from now on, and tells all that is true.
    pub(crate) fn serve(&mut self, teller: Teller) -> Result<api::Event, Refusal> {
        let (generation, now_ns) = (teller.next_generation(), monotonic_ns());
        self.slot = Slot::Serving(teller);
        let telling = self.placement.start_telling(generation, now_ns);
        self.publish(&telling, now_ns)
    }

    /// The channel is not served any more.
    pub(crate) fn stop_serving(&mut self, slot: Slot) {
        self.slot = slot;
        self.placement.stop_telling();
        if matches!(self.slot, Slot::Lost | Slot::TakingOver) {
            self.placement.belief_unknown();
        }
    }

    /// The guest boots again. On a lost channel it finds again what somebody else left there.
    pub(crate) fn rebooted(&mut self) {
        if !matches!(self.slot, Slot::Lost | Slot::TakingOver) {
            self.placement.rebooted(monotonic_ns());
        }
    }

    /// Tells what is due.
    pub(crate) fn tell_due(&mut self) -> Option<api::Event> {
        let Slot::Serving(teller) = &self.slot else { return None };
        let now_ns = monotonic_ns();
        let telling = self.placement.take_due(teller.next_generation(), now_ns)?;
        match self.publish(&telling, now_ns) {
            Ok(event) => Some(event),
            Err(refusal) => {
                error!(vm = self.name(), %refusal, "nothing can be told any more");
                self.stop_serving(Slot::Lost);
                None
            }
        }
    }

    fn publish(&mut self, telling: &Telling, time_ns: u64) -> Result<api::Event, Refusal> {
        let vm = self.name().to_owned();
        let Slot::Serving(teller) = &mut self.slot else { return Err(Refusal::NotAttached { vm }) };
        let content = match content(telling) {
            Ok(content) => content,
            Err(source) => return Err(Refusal::Content { vm, source }),
        };
        let generation = match teller.publish(&content) {
            Ok(generation) => api::Generation(generation),
            Err(source) => return Err(Refusal::Channel { vm, source }),
        };
        self.stats.told += 1;
        self.stats.generation = Some(generation);
        Ok(api::Event::Told { vm, generation, time_ns, changed_ns: telling.changed_ns })
    }

    /// The guest has rung.
    pub(crate) fn rung(&mut self) -> Vec<api::Event> {
        let acknowledged_ns = monotonic_ns();
        let Slot::Serving(teller) = &mut self.slot else { return Vec::new() };
        let generation = match teller.take_acknowledgement() {
            Ok(Some(generation)) => generation,
            Ok(None) => return Vec::new(),
            Err(error) => {
                error!(vm = self.name(), %error, "cannot read acknowledgements");
                return Vec::new();
            }
        };
        let mode = teller.guest_status().mode;
        let number = generation as u32 as usize % ACKNOWLEDGEMENT_WINDOW;
        let Some(updated) = self.placement.acknowledged(number) else { return Vec::new() };
        let generation = api::Generation(updated.generation);
        self.stats.driver_mode = match mode {
            Some(DriverMode::Fast) => Some(api::DriverMode::Fast),
            Some(DriverMode::Safe) => Some(api::DriverMode::Safe),
            Some(DriverMode::None) | None => self.stats.driver_mode,
        };
        self.stats.updated += 1;
        self.stats.acknowledged = Some(generation);
        vec![api::Event::Updated {
            vm: self.description.name.clone(),
            generation,
            changed_ns: updated.changed_ns,
            told_ns: updated.told_ns,
            acknowledged_ns,
        }]
    }

    /// Homes of its guest nodes can change without anybody saying so.
    pub(crate) fn has_unbound_memory(&self) -> bool {
        let bound = |memory: &vnuma_topology::MemoryBacking| {
            matches!(memory.policy.as_str(), "bind" | "preferred") && memory.host_nodes.len() == 1
        };
        self.description.guest_nodes.iter().any(|node| !node.memory.as_ref().is_some_and(bound))
    }
}
