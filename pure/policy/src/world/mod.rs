//! All that is known, as plain data: the host, the VMs on it, their vCPUs and channels.
//!
//! Observations change it, and [`decide`](crate::decide) reads it. It keeps an index of deadlines, so that the cost of an
//! event does not grow with the number of VMs.

mod channel;
mod homing;
mod link;
mod masks;
mod memory;
mod others;
mod period;
mod reading;
mod rehome;
mod sizing;
mod unplug;

pub use crate::plan::{Move, Mover, RehomeWish};
pub use crate::task::{Task, TaskId};
pub use channel::{ChannelEvent, ChannelState, Replug};
pub use homing::{HotnessWatch, KnownMemory};
pub use link::{FIRST_RETRY_NS, Link, LinkEvent};
pub use masks::{Confine, Confining, LastStep, Mechanism, PolicyMask, VcpuMask};
pub use memory::{LastMemoryMove, MemoryMoved, MemoryMoves};
pub use others::Others;
pub use period::{MaskChange, Periods};
pub(crate) use reading::by_position;
pub use reading::{HostReading, MemoryRange, MemoryReading, VcpuReading, VmReading};
pub(crate) use rehome::moves_of;
pub use sizing::{NodeSizing, ResizeWish, SizeMode, WantedSize};
pub use unplug::Unplug;
pub use vnuma_model::{Accesses, ConnectionId, Counted, DriverStatus, RequestId, StopReason, VmId};

use crate::{
    Action, Observation, Plan, Reason, VmPlacement, migration::Migration, scheduling::Policy, sizing::Resize,
};
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::{
    Abilities, ApicId, GuestNodeId, HostNodeId, HostTopology, RunState, VcpuLocation, VcpuState, VmCandidate,
    VmDescription, VmHandle,
};

/// The process of a VM's hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessState {
    /// Its PID.
    pub pid: i32,
    /// Why it does not run, if so.
    pub stopped: Option<StopReason>,
    /// A look at it has not returned in time: until it does the process is not looked at.
    pub looks_hang: bool,
}

/// Who described a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptionSource {
    /// Its hypervisor.
    Hypervisor,
    /// KVM, which names its vCPUs. The hypervisor has not answered yet.
    Kvm,
    /// The names of its threads. The numbers in them may not be APIC ids.
    ThreadNames,
}

/// How a replug ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplugEnd {
    /// The vCPU is in its new slot.
    Done,
    /// It is where it was.
    Undone,
    /// It is in both slots: the guest releases neither.
    Both,
}

/// Least time between a description of a VM and the next one because its guest has seen devices come or go: a guest must not
/// cost more by saying so without end.
const LOOK_PAUSE_NS: u64 = 2_000_000_000;

/// What was published to a guest and what it acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublicationStats {
    /// Last generation that was published.
    pub published: Option<u64>,
    /// Last generation that the guest acknowledged.
    pub acknowledged: Option<u64>,
    /// What the guest's driver reported last.
    pub driver: DriverStatus,
    /// Publications.
    pub publications: u64,
    /// Publications that the guest acknowledged.
    pub acknowledgements: u64,
}

/// How the vCPUs of a VM are scheduled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmScheduling {
    /// Its policy.
    pub policy: Policy,
    /// Since when the masks are the operator's: those that an earlier vnumad left have been given back. `None`: not yet.
    pub clean_ns: Option<u64>,
    /// The task of giving these masks back, and why that failed last.
    pub restore: Task<(), (), String>,
    /// By APIC id.
    pub masks: BTreeMap<ApicId, VcpuMask>,
    /// Its threads that run no vCPU.
    pub others: Others,
    /// Its memory.
    pub memory: MemoryMoves,
}

impl VmScheduling {
    /// Does a policy confine any of its threads?
    pub fn in_use(&self) -> bool {
        self.masks.values().any(VcpuMask::is_in_use) || self.others.in_use()
    }

    /// Is it worth a look every period?
    pub fn wants_readings(&self) -> bool {
        self.policy != Policy::Off || self.in_use()
    }
}

/// A VM whose vCPUs are known.
#[derive(Clone, Debug)]
pub struct Vm {
    /// What it consists of.
    pub description: VmDescription,
    /// Source of the description.
    pub source: DescriptionSource,
    /// Where it runs, and what its guest uses.
    pub placement: VmPlacement,
    /// Where each vCPU was seen last.
    pub locations: BTreeMap<ApicId, VcpuLocation>,
    /// vCPUs that vnumad put on a node, and who asked for it.
    pub assigned: BTreeMap<ApicId, (HostNodeId, Mover)>,
    /// Its topology channel.
    pub channel: ChannelState,
    /// A publication that is being written.
    pub publication: Task,
    /// What its hypervisor is asked for that the channel's state is to lead to: to plug the device, unplug it or hand it over.
    pub plug: Task<Reason>,
    /// The channel's device is to go, and the guest has not let go of it.
    pub unplug: Option<Unplug>,
    /// Moves that are requested or under way, in the order of the requests.
    pub moves: Vec<Task<Move>>,
    /// The replug that an operator wants, the one that is under way, and how and when the last one ended.
    pub replug: Task<Replug, Replug, (ReplugEnd, u64)>,
    /// When the first step that waits for its time is due.
    waits_until_ns: Option<u64>,
    /// How its vCPUs are scheduled.
    pub scheduling: VmScheduling,
    /// Where its memory is, and what becomes of it when it is displaced.
    pub homing: KnownMemory,
    /// What was published.
    pub stats: PublicationStats,
    /// When it was found.
    pub found_ns: u64,
    /// When it was described last, or asked to be.
    pub described_ns: u64,
    /// When it is to be described because its guest has seen devices come or go.
    pub look_ns: Option<u64>,
    /// It is to be attached when it runs without a channel: its hypervisor is marked so.
    pub marked: bool,
    /// Whether it is to be marked, and what of that has failed last.
    pub mark: Task<bool, bool, bool>,
    /// It has arrived with its channel, which is to be plugged anew.
    pub came_along: bool,
    /// A migration that is under way, or the last one if that was not to the end.
    pub migration: Option<Migration>,
}

/// Has the VM left for another host, by this description?
pub fn has_left(description: &VmDescription) -> bool {
    description.run_state == RunState::Left
}

impl Vm {
    /// A VM that was just found.
    pub fn new(
        host: &HostTopology,
        description: VmDescription,
        source: DescriptionSource,
        now_ns: u64,
    ) -> Self {
        Self {
            placement: VmPlacement::new(host, &description),
            description,
            source,
            locations: BTreeMap::new(),
            assigned: BTreeMap::new(),
            channel: ChannelState::Detached,
            publication: Task::default(),
            plug: Task::default(),
            unplug: None,
            moves: Vec::new(),
            replug: Task::default(),
            waits_until_ns: None,
            scheduling: VmScheduling::default(),
            homing: KnownMemory::new(now_ns),
            stats: PublicationStats::default(),
            found_ns: now_ns,
            described_ns: now_ns,
            look_ns: None,
            marked: false,
            mark: Task::default(),
            came_along: false,
            migration: None,
        }
    }

    /// The generation of the next publication, unless one is being written or there is no channel for it.
    pub(crate) fn may_publish(&self) -> Option<u64> {
        self.channel.generation().filter(|_| !self.publication.is_under_way())
    }

    /// It has no channel, and none of its vCPUs is being replugged.
    pub fn is_free(&self) -> bool {
        self.channel == ChannelState::Detached && !self.replug.is_under_way()
    }

    /// Its guest has not arrived yet: its hypervisor waits for a migration.
    pub fn waits(&self) -> bool {
        self.description.run_state == RunState::Arriving
    }

    /// Its guest runs.
    pub fn runs(&self) -> bool {
        self.description.run_state == RunState::Running
    }

    /// The policy that decides for it. One whose APIC ids are not certain is left alone, as is one whose guest has not arrived.
    pub(crate) fn effective_policy(&self) -> Policy {
        let certain = self.source != DescriptionSource::ThreadNames && self.scheduling.clean_ns.is_some();
        if certain && !self.waits() { self.scheduling.policy } else { Policy::Off }
    }

    /// A migration of it is under way.
    pub fn is_migrating(&self) -> bool {
        self.migration.as_ref().is_some_and(|migration| !migration.phase().is_over())
    }

    /// The unplug of the channel's device, if one is wanted and nothing else is under way with the channel.
    pub(crate) fn waiting_unplug(&self) -> Option<&Unplug> {
        let idle = matches!(self.channel, ChannelState::Attached(_) | ChannelState::Lost);
        self.unplug.as_ref().filter(|_| idle && !self.is_migrating())
    }

    /// It is marked, and the mark is not to go.
    pub fn stays_marked(&self) -> bool {
        self.marked && self.mark.what().or(self.mark.last.as_ref()) != Some(&false)
    }

    /// The connection to its hypervisor is lost: nothing that was asked over it is answered.
    pub fn connection_lost(&mut self) {
        self.plug.give_up();
        self.replug.give_up();
        self.mark.last = self.mark.what().copied().or(self.mark.last);
        self.mark.give_up();
        self.homing.sizes.values_mut().filter_map(|of| of.resize.as_mut()).for_each(Resize::connection_lost);
    }

    /// It is marked to be attached, runs without a channel, and is not about to leave.
    pub fn is_to_be_attached(&self) -> bool {
        self.stays_marked()
            && self.channel == ChannelState::Detached
            && self.description.run_state == RunState::Running
            && self.replug.what().is_none()
            && self.migration.as_ref().is_none_or(Migration::may_attach)
    }

    /// Takes over what its guest's driver reports. Where a device is in the guest is known when the driver starts, and may be
    /// another place when devices have come or gone.
    pub fn driver_reported(&mut self, status: DriverStatus, now_ns: u64) {
        let before = std::mem::replace(&mut self.stats.driver, status);
        let news =
            (status.knows_devices, status.device_changes) != (before.knows_devices, before.device_changes);
        if status.knows_devices && news {
            self.look_ns.get_or_insert(now_ns.max(self.described_ns.saturating_add(LOOK_PAUSE_NS)));
        }
    }

    /// The name by which an operator calls it.
    pub fn name(&self) -> &str {
        &self.description.name
    }

    /// Takes over a new description.
    pub fn describe(&mut self, host: &HostTopology, description: VmDescription, now_ns: u64) {
        self.described_ns = now_ns;
        self.placement.describe(host, &description, now_ns);
        let present: BTreeSet<_> = description.vcpus.iter().map(|vcpu| vcpu.apic_id).collect();
        self.locations.retain(|id, _| present.contains(id));
        self.assigned.retain(|id, _| present.contains(id));
        self.keep_masks(&description);
        self.description = description;
    }

    /// Records where a vCPU was seen, or `None` if its location is unknown. An observation older than the last one is
    /// ignored.
    fn locate(&mut self, host: &HostTopology, apic_id: ApicId, location: Option<VcpuLocation>) -> Located {
        let Some(location) = location else {
            self.locations.remove(&apic_id);
            self.placement.observe(host, apic_id, None);
            return Located::Anew(None);
        };
        if self.locations.get(&apic_id).is_some_and(|before| before.time_ns > location.time_ns) {
            return Located::AsBefore;
        }
        let before = self.locations.insert(apic_id, location).map(|before| self.observation(apic_id, before));
        let now = self.observation(apic_id, location);
        if before.is_some_and(|before| (before.node, before.deliberate) == (now.node, now.deliberate)) {
            return Located::AsBefore;
        }
        Located::Anew(self.placement.observe(host, apic_id, Some(now)).map(|from| (from, now.node)))
    }

    /// Records that vnumad put a vCPU on a node. It may have been seen there before this was known.
    pub fn assign(&mut self, host: &HostTopology, apic_id: ApicId, node: HostNodeId, mover: Mover) {
        self.assigned.insert(apic_id, (node, mover));
        if let Some(location) = self.locations.get(&apic_id) {
            let now = self.observation(apic_id, *location);
            self.placement.observe(host, apic_id, Some(now));
        }
    }

    /// Records that vnumad does not say any more where a vCPU is, unless an operator said so.
    pub fn unassign(&mut self, host: &HostTopology, apic_id: ApicId) {
        if self.assigned.get(&apic_id).is_some_and(|(_, mover)| *mover == Mover::Policy) {
            self.assigned.remove(&apic_id);
            if let Some(location) = self.locations.get(&apic_id) {
                let now = self.observation(apic_id, *location);
                self.placement.observe(host, apic_id, Some(now));
            }
        }
    }

    /// Of a vCPU that is gone, or has another thread, no mask is known.
    fn keep_masks(&mut self, description: &VmDescription) {
        let same_process = self.description.pid == description.pid;
        let threads: BTreeMap<ApicId, i32> =
            description.vcpus.iter().map(|vcpu| (vcpu.apic_id, vcpu.tid)).collect();
        let kept = |vcpu: &&vnuma_model::Vcpu| threads.get(&vcpu.apic_id) == Some(&vcpu.tid);
        let kept: BTreeSet<ApicId> =
            self.description.vcpus.iter().filter(kept).map(|vcpu| vcpu.apic_id).collect();
        self.scheduling.masks.retain(|id, _| same_process && kept.contains(id));
    }

    /// Classifies a location. A vCPU whose affinity confines it to a node was put there on purpose. So was a vCPU that
    /// vnumad put there, confined or not. Anything else is drift.
    fn observation(&self, apic_id: ApicId, location: VcpuLocation) -> Observation {
        let node = location.pinned.unwrap_or(location.node);
        let assigned = self.assigned.get(&apic_id).is_some_and(|(assigned, _)| *assigned == node);
        Observation { node, deliberate: assigned || location.pinned.is_some(), time_ns: location.time_ns }
    }

    /// The guest node that a vCPU would have to be replugged to, if it has one that is known and is not on it.
    pub fn astray(&self, apic_id: ApicId) -> Option<GuestNodeId> {
        let status = self.placement.vcpu(apic_id)?;
        (status.state == VcpuState::Stale).then_some(status.target_node).flatten()
    }

    /// vCPUs that could be replugged to a better node. A paused guest accepts none, and a guest with a channel needs none.
    /// While one is replugged the others stay astray. QEMU cannot unplug the vCPU that a machine boots with.
    pub(crate) fn astray_now(&self) -> Vec<(ApicId, GuestNodeId)> {
        let ready = self.source == DescriptionSource::Hypervisor
            && self.description.run_state == RunState::Running
            && !self.is_migrating()
            && self.channel == ChannelState::Detached;
        let vcpus = self.description.vcpus.iter().filter(|vcpu| ready && vcpu.index != 0);
        vcpus.filter_map(|vcpu| Some((vcpu.apic_id, self.astray(vcpu.apic_id)?))).collect()
    }

    /// Host node of the memory that a vCPU's guest kernel allocates for it, if the VM has several guest nodes.
    pub(crate) fn home_of(&self, apic_id: ApicId) -> Option<HostNodeId> {
        let several = self.placement.guest_nodes().len() > 1;
        let node = self.placement.vcpu(apic_id).filter(|_| several)?.published_node?;
        self.placement.homes().get(&node).copied()
    }

    /// Host nodes of its guest nodes can change without an event.
    pub fn has_unbound_memory(&self) -> bool {
        let bound = |memory: &vnuma_model::MemoryBacking| memory.bound_node().is_some();
        let mut plugged = self.description.memory_devices.iter().filter(|device| device.plugged_bytes > 0);
        self.description.guest_nodes.iter().any(|node| !node.memory.as_ref().is_some_and(bound))
            || plugged.any(|device| !bound(&device.memory))
    }
}

/// What an observation of a vCPU has changed.
enum Located {
    /// Nothing changed that a decision depends on.
    AsBefore,
    /// Something changed. With the old and the new node if these differ.
    Anew(Option<(HostNodeId, HostNodeId)>),
}

/// A VM, or a candidate that may turn out to be one, as a backend listed it.
#[derive(Clone, Debug)]
pub struct ManagedVm {
    /// The backend's name for it, opaque here.
    pub handle: VmHandle,
    /// Its name until it reports its own.
    pub fallback_name: String,
    /// Differs when another VM may be behind the handle.
    pub instance: u64,
    /// What its hypervisor can do.
    pub abilities: Abilities,
    /// The link to its hypervisor.
    pub link: Link,
    /// The process of its hypervisor, once known.
    pub process: Option<ProcessState>,
    /// The VM, once its vCPUs are known. It stays known while the link is down.
    pub vm: Option<Vm>,
    /// Its deadline in the world's index.
    indexed_ns: Option<u64>,
}

impl ManagedVm {
    /// A VM of which only what the backend has listed is known.
    pub fn new(candidate: VmCandidate, now_ns: u64) -> Self {
        let VmCandidate { handle, name: fallback_name, instance, abilities } = candidate;
        let link = Link::new(now_ns);
        Self { handle, fallback_name, instance, abilities, link, process: None, vm: None, indexed_ns: None }
    }

    /// The name by which an operator calls it.
    pub fn name(&self) -> &str {
        self.vm.as_ref().map_or(&self.fallback_name, |vm| vm.name())
    }

    /// Why its process does not run, if so.
    pub fn stopped(&self) -> Option<StopReason> {
        self.process.and_then(|process| process.stopped)
    }

    /// The connection that answers commands now.
    pub fn responsive(&self) -> Option<ConnectionId> {
        self.link.responsive().filter(|_| self.stopped().is_none())
    }

    /// Its next deadline.
    fn deadline_ns(&self) -> Option<u64> {
        let retry = match self.link {
            Link::Disconnected { retry_ns, .. } => Some(retry_ns),
            _ => None,
        };
        let vm = self.vm.as_ref();
        let waits = vm.and_then(|vm| vm.waits_until_ns);
        let look = vm.and_then(|vm| vm.look_ns);
        [retry, waits, look].into_iter().flatten().min()
    }
}

/// What a VM that is gone has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// The VM. Another one may be known by this by now.
    pub vm: VmId,
    /// Its process, if that goes on with masks that policies have set.
    pub masked: Option<i32>,
    /// The move of its memory that is under way.
    pub moving: Option<TaskId>,
}

/// All that is known.
#[derive(Clone, Debug, Default)]
pub struct World {
    /// The host.
    pub host: HostTopology,
    /// How often scx_vnuma was loaded.
    pub scheduler_loads: u64,
    vms: BTreeMap<VmId, ManagedVm>,
    /// Deadlines by time, one for each VM that has any.
    deadlines: BTreeSet<(u64, VmId)>,
    /// Changed since [`commit`](Self::commit).
    touched: Vec<VmId>,
    /// What VMs have left that are gone since the last decision.
    left: Vec<Left>,
    periods: Periods,
    /// Looks at memory that have ended, of all VMs.
    looks: u64,
    /// Tasks that have begun, of all VMs.
    tasks: u64,
}

impl World {
    /// A host without VMs.
    pub fn new(host: HostTopology) -> Self {
        Self { host, ..Self::default() }
    }

    /// A VM.
    pub fn get(&self, id: VmId) -> Option<&ManagedVm> {
        self.vms.get(&id)
    }

    /// A VM to change. The next decision considers it.
    pub fn get_mut(&mut self, id: VmId) -> Option<&mut ManagedVm> {
        self.touched.push(id);
        self.vms.get_mut(&id)
    }

    /// The host and a VM to change together.
    pub fn vm_mut(&mut self, id: VmId) -> Option<(&HostTopology, &mut Vm)> {
        self.touched.push(id);
        Some((&self.host, self.vms.get_mut(&id)?.vm.as_mut()?))
    }

    /// Records where a vCPU of a VM was seen, or `None` if its location is unknown. An observation older than the last one is
    /// ignored, and one that shows the same node leads to no decision. Returns the old and the new node if they differ.
    pub fn locate(
        &mut self,
        id: VmId,
        apic_id: ApicId,
        location: Option<VcpuLocation>,
    ) -> Option<(HostNodeId, HostNodeId)> {
        let vm = self.vms.get_mut(&id)?.vm.as_mut()?;
        match vm.locate(&self.host, apic_id, location) {
            Located::AsBefore => None,
            Located::Anew(change) => {
                self.touched.push(id);
                change
            }
        }
    }

    /// Adds a VM, in place of another one if there is one.
    pub fn insert(&mut self, id: VmId, vm: ManagedVm) {
        self.remove(id);
        self.vms.insert(id, ManagedVm { indexed_ns: None, ..vm });
    }

    /// Forgets a VM.
    pub fn remove(&mut self, id: VmId) -> Option<ManagedVm> {
        self.touched.push(id);
        let vm = self.vms.remove(&id)?;
        vm.indexed_ns.map(|before_ns| self.deadlines.remove(&(before_ns, id)));
        Some(vm)
    }

    /// Forgets what a VM consists of. `ended`: its process has ended.
    pub fn drop_vm(&mut self, id: VmId, ended: bool) -> Option<Vm> {
        let vm = self.get_mut(id)?.vm.take()?;
        let masked = (!ended && vm.scheduling.in_use()).then_some(vm.description.pid);
        self.left.push(Left { vm: id, masked, moving: vm.scheduling.memory.task.id() });
        Some(vm)
    }

    /// What VMs have left that are gone since the last decision.
    pub(crate) fn left(&self) -> &[Left] {
        &self.left
    }

    /// All VMs.
    pub fn iter(&self) -> impl Iterator<Item = (VmId, &ManagedVm)> {
        self.vms.iter().map(|(id, vm)| (*id, vm))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.vms.len()
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.vms.is_empty()
    }

    /// Replaces the host's topology.
    pub fn host_changed(&mut self, host: HostTopology, now_ns: u64) {
        self.host = host;
        self.periods.host_changed();
        for (id, managed) in &mut self.vms {
            if let Some(vm) = &mut managed.vm {
                vm.placement.host_changed(&self.host, now_ns);
                self.touched.push(*id);
            }
        }
    }

    /// A new id for a task of a VM.
    pub fn next_task(&mut self, vm: VmId) -> TaskId {
        self.tasks += 1;
        TaskId { vm, number: self.tasks }
    }

    /// Notes what a plan wants and cannot begin yet. A step that waits for its time has its VM considered again then.
    pub fn note_waits(&mut self, plan: &Plan, now_ns: u64) {
        for id in &plan.considered {
            if let Some(vm) = self.vms.get_mut(id).and_then(|managed| managed.vm.as_mut())
                && vm.waits_until_ns.take().is_some()
            {
                self.touched.push(*id);
            }
        }
        for step in &plan.waits {
            let Some((_, vm)) = self.vm_mut(step.vm) else { continue };
            if step.not_before_ns > now_ns {
                let until_ns = vm.waits_until_ns.get_or_insert(step.not_before_ns);
                *until_ns = step.not_before_ns.min(*until_ns);
            }
            match &step.action {
                Action::Confine(confine) => {
                    if let Some(mask) = vm.scheduling.masks.get_mut(&confine.vcpu) {
                        (mask.step.wanted, mask.released) = (Some(*confine), false);
                    }
                }
                Action::MoveMemory(order) => vm.scheduling.memory.task.wanted = Some(order.clone()),
                _ => {}
            }
        }
    }

    /// Has a VM considered again at once: a step of it could not begin, which may let another one begin.
    pub fn consider_again(&mut self, id: VmId, now_ns: u64) {
        self.vm_mut(id).into_iter().for_each(|(_, vm)| vm.waits_until_ns = Some(now_ns));
    }

    /// VMs that changed or whose deadline has passed, in rising order.
    pub fn due(&self, now_ns: u64) -> Vec<VmId> {
        let ripe = self.deadlines.range(..=(now_ns, VmId::MAX)).map(|(_, id)| *id);
        let mut due: Vec<_> = ripe.chain(self.touched.iter().copied()).collect();
        due.sort_unstable();
        due.dedup();
        due
    }

    /// Ends a turn, after its changes were considered.
    pub fn commit(&mut self, now_ns: u64) {
        self.refresh(now_ns);
        self.touched.clear();
        self.left.clear();
    }

    /// Updates the deadlines of all VMs that changed or whose deadline has passed.
    fn refresh(&mut self, now_ns: u64) {
        for id in self.due(now_ns) {
            let Some(managed) = self.vms.get_mut(&id) else { continue };
            let deadline_ns = managed.deadline_ns();
            let before_ns = std::mem::replace(&mut managed.indexed_ns, deadline_ns);
            if before_ns != deadline_ns {
                before_ns.map(|before_ns| self.deadlines.remove(&(before_ns, id)));
                self.deadlines.extend(deadline_ns.map(|deadline_ns| (deadline_ns, id)));
            }
        }
    }

    /// When the first deadline is.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        self.deadlines.first().map(|(deadline_ns, _)| *deadline_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_model::{HostNode, Vcpu};

    fn host() -> HostTopology {
        let node = |id: u32| HostNode { id, cpus: [id, id + 2].into_iter().collect(), ..HostNode::default() };
        HostTopology { nodes: vec![node(0), node(1)], ..HostTopology::default() }
    }

    fn managed(host: &HostTopology) -> ManagedVm {
        let description = VmDescription {
            name: "a".into(),
            pid: 1,
            run_state: "running".into(),
            guest_nodes: Vec::new(),
            vcpus: vec![Vcpu { index: 0, apic_id: 0, boot_node: None, tid: 2 }],
            spare_slots: BTreeMap::new(),
            devices: Vec::new(),
            memory_devices: Vec::new(),
        };
        let mut managed = ManagedVm::new(VmCandidate::new("qmp:a", "a", 0), 0);
        managed.vm = Some(Vm::new(host, description, DescriptionSource::Hypervisor, 0));
        managed.link = Link::Answers { connection: 1 };
        managed
    }

    #[test]
    fn vms_whose_memory_any_policy_moves_share_the_hosts_rate() {
        use crate::{Policies, memory_move::MemoryPolicy};
        let mut world = World::new(host());
        let of = [
            (MemoryPolicy::Both, Policy::Off),
            (MemoryPolicy::None, Policy::Vprobe),
            (MemoryPolicy::Adaptive, Policy::Vprobe),
            (MemoryPolicy::None, Policy::Brm),
        ];
        for (id, (memory, scheduling)) in of.into_iter().enumerate() {
            let mut managed = managed(&world.host);
            let vm = managed.vm.as_mut().expect("a VM");
            (vm.homing.policy, vm.scheduling.policy, vm.scheduling.clean_ns) = (memory, scheduling, Some(0));
            world.insert(id as VmId, managed);
        }
        let mut policies = Policies::default();
        assert_eq!(world.memory_sharers(&policies), 2);
        policies.settings.memory_bytes_per_s = 1;
        assert_eq!(world.memory_sharers(&policies), 3, "one that both may move has one part");
    }

    #[test]
    fn an_observation_that_says_nothing_new_leads_to_no_decision() {
        let mut world = World::new(host());
        world.insert(1, managed(&world.host));
        let mut see = |cpu: u32, pinned: Option<u32>, time_ns: u64| {
            world.commit(time_ns);
            let location = VcpuLocation { cpu, node: cpu % 2, pinned, time_ns };
            let change = world.locate(1, 0, Some(location));
            let cpu = world.get(1).and_then(|managed| Some(managed.vm.as_ref()?.locations[&0].cpu));
            (change, world.due(time_ns).len(), cpu)
        };
        assert_eq!(see(0, None, 1), (None, 1, Some(0)), "the first one");
        assert_eq!(see(2, None, 2), (None, 0, Some(2)), "another CPU of the node");
        assert_eq!(see(1, None, 3), (Some((0, 1)), 1, Some(1)));
        assert_eq!(see(0, None, 2), (None, 0, Some(1)), "an old one");
        assert_eq!(see(1, Some(1), 4), (None, 1, Some(1)), "it was put there");
        assert_eq!(
            see(0, Some(1), 5),
            (None, 0, Some(0)),
            "it sleeps where it was, and runs on its node next"
        );
    }
}
