//! What a period has shown of the host's vCPUs and their masks. It is noted here; nothing is decided.

use super::{
    ManagedVm, TaskId, VmId, World,
    masks::{LastStep, Mechanism, PolicyMask, VcpuMask},
    reading::{HostReading, VmReading},
};
use crate::scheduling::{Machine, Place, Policy};
use std::sync::Arc;
use vnuma_model::{ApicId, CpuLayout, CpuSet, HostTopology, Vcpu};

/// A vCPU's mask that somebody else has set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskChange {
    /// The VM.
    pub vm: VmId,
    /// The vCPU.
    pub vcpu: ApicId,
    /// Its thread.
    pub tid: i32,
    /// The mask.
    pub mask: CpuSet,
}

/// Periods of the host.
#[derive(Clone, Debug, Default)]
pub struct Periods {
    machine: Machine,
    layout: Arc<CpuLayout>,
    /// CPUs of the host.
    online: CpuSet,
    /// The host has changed since the machine was made.
    stale: bool,
    /// How many machines were made so far.
    machines: u64,
    /// How many readings there were so far.
    readings: u64,
    last: Option<Box<HostReading>>,
}

impl Periods {
    /// The host has changed: another machine is made with the next reading.
    pub(super) fn host_changed(&mut self) {
        self.stale = true;
    }

    /// The host, prepared for decisions.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The machine's number. Positions are valid for the machine with this number only.
    pub(crate) fn machine_number(&self) -> u64 {
        self.machines
    }

    /// Isolated CPUs and cores.
    pub fn layout(&self) -> &CpuLayout {
        &self.layout
    }

    /// What the last period showed; nothing before the first one.
    pub fn last(&self) -> Option<&HostReading> {
        self.last.as_deref()
    }

    /// Number of the last reading; 0: there was none.
    pub(crate) fn reading_number(&self) -> u64 {
        self.readings
    }

    /// Length of the last period, nanoseconds; 0 before the first.
    pub fn period_ns(&self) -> u64 {
        self.last.as_ref().map_or(0, |last| last.period_ns)
    }

    /// Makes the machine if the host or its layout has changed. True if it was made.
    fn prepare(&mut self, host: &HostTopology, layout: &Arc<CpuLayout>) -> bool {
        let same = Arc::ptr_eq(&self.layout, layout) || self.layout == *layout;
        if !self.stale && !self.machine.nodes.is_empty() && same {
            return false;
        }
        self.layout = Arc::clone(layout);
        self.machine = Machine::new(host, layout);
        self.online = host.nodes.iter().flat_map(|node| node.cpus.iter()).collect();
        (self.stale, self.machines) = (false, self.machines + 1);
        true
    }
}

impl World {
    /// What periods have shown.
    pub fn periods(&self) -> &Periods {
        &self.periods
    }

    /// A VM has another policy now. Its vCPUs are to get their operator's masks; the policy begins with the next period.
    pub fn set_policy(&mut self, id: VmId, policy: Policy) {
        let Some((_, vm)) = self.vm_mut(id) else { return };
        if std::mem::replace(&mut vm.scheduling.policy, policy) == policy {
            return;
        }
        for mask in vm.scheduling.masks.values_mut() {
            (mask.step.wanted, mask.released) = (None, mask.is_in_use());
        }
        vm.scheduling.others.follow.wanted = Some(());
        vm.scheduling.memory.task.wanted.take_if(|order| !order.is_home());
    }

    /// A period has ended. Returns the masks that somebody else has set meanwhile.
    pub fn note_reading(&mut self, mut reading: Box<HostReading>) -> Vec<MaskChange> {
        if self.periods.prepare(&self.host, &reading.layout) {
            let used =
                |(&id, vm): (&VmId, &ManagedVm)| vm.vm.as_ref()?.scheduling.others.in_use().then_some(id);
            let ids: Vec<VmId> = self.vms.iter().filter_map(used).collect();
            ids.into_iter().for_each(|id| self.others_look(id));
        }
        reading.vms.sort_by_key(|vm| vm.vm);
        reading.vms.dedup_by_key(|vm| vm.vm);
        for vm in &mut reading.vms {
            vm.vcpus.sort_by_key(|vcpu| vcpu.vcpu);
            vm.vcpus.dedup_by_key(|vcpu| vcpu.vcpu);
        }
        let changes = self.see_masks(&reading);
        self.periods.readings += 1;
        self.periods.last = Some(reading);
        changes
    }

    /// Compares the masks that were read with those that are known. Returns those that somebody else has set.
    fn see_masks(&mut self, reading: &HostReading) -> Vec<MaskChange> {
        let online = &self.periods.online;
        let mut changes = Vec::new();
        for VmReading { vm: id, pid, vcpus, .. } in &reading.vms {
            let Some(vm) = self.vms.get_mut(id).and_then(|managed| managed.vm.as_mut()) else { continue };
            let clean = vm.scheduling.clean_ns.is_some_and(|clean_ns| clean_ns <= reading.began_ns);
            if vm.description.pid != *pid || !clean {
                continue;
            }
            let mut threads = Threads { vcpus: &vm.description.vcpus, next: 0 };
            for seen in vcpus.iter().filter(|seen| threads.of(seen.vcpu) == Some(seen.tid)) {
                let Some(allowed) = seen.allowed.as_ref().filter(|allowed| !allowed.is_empty()) else {
                    continue;
                };
                let inherited = &vm.scheduling.others.inherited;
                let mask = vm.scheduling.masks.entry(seen.vcpu).or_insert_with(|| begin(inherited, allowed));
                if mask.seen(allowed, online, reading.began_ns) {
                    let (vcpu, tid) = (seen.vcpu, seen.tid);
                    changes.push(MaskChange { vm: *id, vcpu, tid, mask: allowed.clone() });
                    vm.scheduling.others.follow.wanted = Some(());
                }
            }
        }
        changes
    }

    /// The mask of a vCPU.
    pub fn mask_mut(&mut self, id: VmId, vcpu: ApicId) -> Option<&mut VcpuMask> {
        self.vms.get_mut(&id)?.vm.as_mut()?.scheduling.masks.get_mut(&vcpu)
    }

    /// The CPUs of a place that a vCPU's operator allows.
    pub fn policy_mask(&self, id: VmId, vcpu: ApicId, place: Place) -> Option<PolicyMask> {
        let mask = self.get(id)?.vm.as_ref()?.scheduling.masks.get(&vcpu)?;
        let machine = &self.periods.machine;
        let exists = match place {
            Place::Node(node) => node < machine.nodes.len(),
            Place::Cache(domain) => domain < machine.domains.len(),
        };
        let operator = mask.operator.as_ref().filter(|_| exists)?;
        let cpus = machine.cpus(place, operator);
        let of_cache = matches!(place, Place::Cache(_));
        (!cpus.is_empty()).then_some(PolicyMask { cpus, of_cache, by: Mechanism::default() })
    }

    /// A change of a mask has ended; `made`: it was made. Returns the step that is worth a report. To set the last mask once more, in
    /// another way, is none.
    pub fn step_ended(
        &mut self,
        id: TaskId,
        vcpu: ApicId,
        made: bool,
        caused_by: Option<String>,
        now_ns: u64,
    ) -> Option<LastStep> {
        let mask = self.mask_mut(id.vm, vcpu)?;
        let begun = mask.step.end(id)?;
        mask.settled_ns = now_ns;
        self.others_look(id.vm);
        let mask = self.mask_mut(id.vm, vcpu)?;
        if !made {
            return None;
        }
        let cpus = begun.mask.as_ref().map(|mask| mask.cpus.clone());
        let is_last = |last: &LastStep| last.mask == cpus && last.why == begun.why;
        if mask.policy.is_some() && mask.step.last.as_ref().is_some_and(is_last) {
            mask.policy = begun.mask;
            return None;
        }
        let last = LastStep { time_ns: now_ns, mask: cpus, why: begun.why, caused_by };
        (mask.policy, mask.moves, mask.step.last) = (begun.mask, mask.moves + 1, Some(last.clone()));
        Some(last)
    }
}

/// The threads of a VM's vCPUs. None is searched for as long as they are asked for in the order of the VM's description.
struct Threads<'a> {
    vcpus: &'a [Vcpu],
    next: usize,
}

impl Threads<'_> {
    fn of(&mut self, vcpu: ApicId) -> Option<i32> {
        let is_it = |known: &Vcpu| known.apic_id == vcpu;
        let at = match self.vcpus.get(self.next).is_some_and(is_it) {
            true => self.next,
            false => self.vcpus.iter().position(is_it)?,
        };
        self.next = at + 1;
        Some(self.vcpus[at].tid)
    }
}

/// The mask of a vCPU that is seen for the first time. A new one has that of the thread which made it.
fn begin(inherited: &Option<(CpuSet, CpuSet)>, allowed: &CpuSet) -> VcpuMask {
    match inherited.as_ref().filter(|(mask, _)| mask == allowed) {
        Some((mask, operator)) => VcpuMask {
            operator: Some(operator.clone()),
            policy: Some(PolicyMask { cpus: mask.clone(), of_cache: false, by: Mechanism::Affinity }),
            ..VcpuMask::default()
        },
        None => VcpuMask::default(),
    }
}
