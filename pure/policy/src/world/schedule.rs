//! Scheduling of the host's vCPUs, a period at a time: readings become input of the policies that are in use, and what these
//! decide becomes steps that the next plan has.

use super::{
    DescriptionSource, ManagedVm, Vm, VmId, World,
    homing::is_home,
    masks::{Confine, LastStep, Mechanism, PolicyMask, Quality, Shown, VcpuMask},
    reading::{HostReading, VcpuReading, VmReading},
};
use crate::scheduling::{
    Analysis, Cause, CpuSample, Figures, Input, Machine, Place, Policy, Reach, Scheduler, Settings, Standing,
    VcpuKey, VcpuSample, Why,
    analyzer::Bounds,
    entitlement::{DEFAULT_WEIGHT, Want, entitle},
    memory::{MemoryInput, MemoryMover},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};
use vnuma_model::{ApicId, Counted, CpuLayout, CpuSet, HostTopology, Vcpu};

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

/// What is kept from period to period.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    machine: Machine,
    layout: Arc<CpuLayout>,
    /// CPUs of the host.
    online: CpuSet,
    /// The machine is not that of the host and the layout any more.
    stale: bool,
    /// Of each policy that is in use.
    schedulers: BTreeMap<Policy, Scheduler>,
    /// Of `vprobe`: which memory goes to its vCPUs.
    mover: MemoryMover,
    /// Bounds of the last decisions.
    bounds: BTreeMap<Policy, Bounds>,
    /// Where the last counts came from.
    source: Option<&'static str>,
    period_ns: u64,
    /// CPUs of the last period are not known.
    blind: bool,
    last: Option<LastPeriod>,
}

/// What the policies were given in the last period.
#[derive(Clone, Debug, Default)]
pub struct LastPeriod {
    /// When it ended.
    pub time_ns: u64,
    /// CPUs.
    pub cpus: Vec<CpuSample>,
    /// vCPUs, and whether their counts are assumed.
    pub vcpus: Vec<(VcpuSample, bool)>,
}

impl Schedule {
    /// The host is another one.
    pub(super) fn host_changed(&mut self) {
        self.stale = true;
    }

    /// The host, prepared for decisions.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Isolated CPUs and cores.
    pub fn layout(&self) -> &CpuLayout {
        &self.layout
    }

    /// Where the last counts came from; none before the first period.
    pub fn source(&self) -> Option<&'static str> {
        self.source
    }

    /// Length of the last period, nanoseconds; 0 before the first.
    pub fn period_ns(&self) -> u64 {
        self.period_ns
    }

    /// How long CPUs were idle could not be read in the last period: nothing is stolen then.
    pub fn is_blind(&self) -> bool {
        self.blind
    }

    /// What the policies were given in the last period.
    pub fn last_period(&self) -> Option<&LastPeriod> {
        self.last.as_ref()
    }

    /// Bounds between the types that a policy used last.
    pub fn bounds(&self, policy: Policy) -> Option<Bounds> {
        self.bounds.get(&policy).copied()
    }

    /// Bounds that were used last. Policies whose VMs came at other times can have learned others: these are of one of them.
    pub fn last_bounds(&self) -> Option<Bounds> {
        self.bounds.values().next().copied()
    }

    /// Are accesses assumed, as nothing is counted?
    pub(super) fn assumes(&self) -> bool {
        self.last.as_ref().is_some_and(|last| last.vcpus.iter().any(|(_, assumed)| *assumed))
    }

    /// A move of a VM's memory has ended.
    pub(super) fn memory_ended(&mut self, vm: VmId, moved: u64, stayed: u64, now_ns: u64) {
        self.mover.ended(vm, moved, stayed, now_ns);
    }

    /// Takes in the host. True if it is another one.
    fn prepare(&mut self, host: &HostTopology, layout: &Arc<CpuLayout>) -> bool {
        let same = Arc::ptr_eq(&self.layout, layout) || self.layout == *layout;
        if self.stale || self.machine.nodes.is_empty() || !same {
            self.layout = Arc::clone(layout);
            self.machine = Machine::new(host, layout);
            self.online = host.nodes.iter().flat_map(|node| node.cpus.iter()).collect();
            self.stale = false;
            // What they remember is of places that are others now.
            self.schedulers.clear();
            self.mover = MemoryMover::default();
            return true;
        }
        false
    }
}

/// The input of a period, with what is needed to understand what comes out.
struct Prepared<'a> {
    vcpus: Vec<VcpuSample>,
    /// Policy of each.
    policies: Vec<Policy>,
    readings: Vec<&'a VcpuReading>,
    reaches: Vec<Reach>,
}

impl World {
    /// What is kept of scheduling.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// A VM has another policy now. Its vCPUs get their operator's masks; the policy begins with the next period.
    pub fn set_policy(&mut self, id: VmId, policy: Policy) {
        let machine = &self.schedule.machine;
        let Some(vm) = self.vms.get_mut(&id).and_then(|managed| managed.vm.as_mut()) else { return };
        if std::mem::replace(&mut vm.scheduling.policy, policy) == policy {
            return;
        }
        for (&vcpu, mask) in &mut vm.scheduling.masks {
            let policy = mask.last.as_ref().map_or(policy, |last| last.why.policy);
            mask.wanted = mask.is_in_use().then(|| give_back(machine, vcpu, policy, mask));
            mask.shown = None;
        }
        vm.scheduling.others.look = true;
        vm.scheduling.memory.wanted.take_if(|order| !is_home(order));
        self.touched.insert(id);
    }

    /// A period has ended: each policy that is in use decides. Returns the masks that somebody else has set meanwhile.
    pub fn take_reading(&mut self, settings: &Settings, mut reading: HostReading) -> Vec<MaskChange> {
        if self.schedule.prepare(&self.host, &reading.layout) {
            let used =
                |(&id, vm): (&VmId, &ManagedVm)| vm.vm.as_ref()?.scheduling.others.in_use().then_some(id);
            let ids: Vec<VmId> = self.vms.iter().filter_map(used).collect();
            ids.into_iter().for_each(|id| self.others_look(id));
        }
        (self.schedule.source, self.schedule.period_ns) = (Some(reading.source), reading.period_ns);
        self.schedule.blind = reading.cpus.is_empty();
        reading.vms.sort_by_key(|vm| vm.vm);
        reading.vms.dedup_by_key(|vm| vm.vm);
        for vm in &mut reading.vms {
            vm.vcpus.sort_by_key(|vcpu| vcpu.vcpu);
            vm.vcpus.dedup_by_key(|vcpu| vcpu.vcpu);
        }
        let changes = self.see_masks(&reading);
        let prepared = self.prepare_input(&reading);
        let policies: BTreeSet<Policy> =
            prepared.policies.iter().copied().filter(|policy| *policy != Policy::Off).collect();
        self.schedule.schedulers.retain(|policy, _| policies.contains(policy));
        self.schedule.bounds.retain(|policy, _| policies.contains(policy));
        let Prepared { mut vcpus, policies: of, readings, reaches } = prepared;
        let (nodes, mut memory) = self.memory_of_vms(&reading);
        self.divide_time(&reading, &readings, &reaches, &mut vcpus);
        for policy in policies {
            for (sample, own) in vcpus.iter_mut().zip(&of) {
                sample.managed = *own == policy;
            }
            let fresh = || Scheduler::new(policy, *settings);
            let scheduler = self.schedule.schedulers.entry(policy).or_insert_with(fresh);
            let input = Input {
                machine: &self.schedule.machine,
                reaches: &reaches,
                cpus: &reading.cpus,
                vcpus: &vcpus,
                period_ns: reading.period_ns,
            };
            let decision = scheduler.decide(&input);
            let mut moves = Vec::new();
            if policy == Policy::Vprobe {
                // First its vCPUs go where they should be.
                memory
                    .iter_mut()
                    .for_each(|vm| vm.ready &= !decision.steps.iter().any(|s| s.key.vm == vm.vm));
                let now_ns = reading.began_ns;
                let all = MemoryInput { input: &input, nodes: &nodes, vms: &memory, now_ns };
                moves = self.schedule.mover.decide(settings, &all);
            }
            self.schedule.bounds.insert(policy, decision.bounds);
            for (at, analysis) in decision.analysis.iter().enumerate().filter(|(at, _)| of[*at] == policy) {
                self.show(analysis, &vcpus[at], readings[at], reading.period_ns);
            }
            for step in decision.steps {
                self.want(Confine { vcpu: step.key.vcpu, to: step.to, why: step.why }, step.key.vm);
            }
            moves.into_iter().for_each(|(id, step)| self.want_memory(id, step));
        }
        self.give_back_unused();
        let assumed = readings.iter().map(|reading| reading.is_assumed());
        let vcpus = vcpus.into_iter().zip(assumed).collect();
        self.schedule.last =
            Some(LastPeriod { time_ns: reading.began_ns, cpus: reading.cpus.clone(), vcpus });
        changes
    }

    /// Takes in the masks that were read.
    fn see_masks(&mut self, reading: &HostReading) -> Vec<MaskChange> {
        let online = &self.schedule.online;
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
                    vm.scheduling.others.look = true;
                }
            }
        }
        changes
    }

    /// What the schedulers are given. vCPUs whose mask or thread is not known are left out.
    fn prepare_input<'a>(&self, reading: &'a HostReading) -> Prepared<'a> {
        let machine = &self.schedule.machine;
        let mut known: HashMap<&CpuSet, usize> = HashMap::new();
        // Most have the mask of the one before.
        let mut last: Option<(&CpuSet, usize)> = None;
        let mut prepared =
            Prepared { vcpus: Vec::new(), policies: Vec::new(), readings: Vec::new(), reaches: Vec::new() };
        for VmReading { vm: id, pid, pages, vcpus, .. } in &reading.vms {
            let Some(vm) = self.get(*id).and_then(|managed| managed.vm.as_ref()) else { continue };
            if vm.description.pid != *pid {
                continue;
            }
            for seen in vcpus {
                let Some(mask) = vm.scheduling.masks.get(&seen.vcpu) else { continue };
                let Some(operator) = &mask.operator else { continue };
                let mut find = || {
                    *known.entry(operator).or_insert_with(|| {
                        prepared.reaches.push(Reach::new(machine, operator));
                        prepared.reaches.len() - 1
                    })
                };
                let reach = last.filter(|(mask, _)| *mask == operator).map_or_else(&mut find, |(_, at)| at);
                last = Some((operator, reach));
                let begun = mask.begun.as_ref().map(|begun| begun.mask.as_ref());
                let assigned = begun.unwrap_or(mask.policy.as_ref()).and_then(|mask| mask.place(machine));
                let node = assigned.map(|place| machine.node_at(place));
                let node = node.or_else(|| machine.node_of(seen.cpu?));
                prepared.vcpus.push(VcpuSample {
                    key: VcpuKey { vm: *id, vcpu: seen.vcpu },
                    cpu: seen.cpu,
                    assigned,
                    reach,
                    real_time: seen.real_time,
                    managed: false,
                    weight: seen
                        .group
                        .and_then(|at| reading.groups.get(at))
                        .map_or(DEFAULT_WEIGHT, |g| g.weight),
                    ran_ns: seen.ran_ns,
                    waited_ns: seen.waited_ns,
                    throttled_ns: 0,
                    entitled_ns: seen.ran_ns.saturating_add(seen.waited_ns),
                    counts: seen.counts(machine, node, vm.home_of(seen.vcpu), pages),
                });
                prepared.policies.push(effective_policy(vm));
                prepared.readings.push(seen);
            }
        }
        prepared
    }

    /// Tells vCPUs that waited for a CPU from those that had no quota, and says how much time each is entitled to.
    fn divide_time(
        &self,
        reading: &HostReading,
        readings: &[&VcpuReading],
        reaches: &[Reach],
        vcpus: &mut [VcpuSample],
    ) {
        let (machine, period_ns) = (&self.schedule.machine, reading.period_ns);
        let input = Input { machine, reaches, cpus: &reading.cpus, vcpus, period_ns };
        let want = |(vcpu, seen): (&VcpuSample, &&VcpuReading)| {
            // The kernel adds a wait when it ends, so that one of several periods is in the last of them.
            let ran_ns = seen.ran_ns.min(period_ns);
            let waited_ns = seen.waited_ns.min(period_ns - ran_ns);
            let apart = matches!(vcpu.standing(&input), Standing::Isolated | Standing::RealTime);
            Want { group: seen.group, ran_ns, waited_ns, apart }
        };
        let wants: Vec<Want> = vcpus.iter().zip(readings).map(want).collect();
        let usable = input.usable();
        let cpus: usize = machine.domains.iter().map(|domain| domain.cpus.count_in(&usable)).sum();
        let shares = entitle(&reading.groups, &wants, period_ns.saturating_mul(cpus as u64), period_ns);
        for ((vcpu, want), share) in vcpus.iter_mut().zip(&wants).zip(shares) {
            vcpu.waited_ns = share.waited_ns;
            vcpu.throttled_ns = want.waited_ns.saturating_sub(share.waited_ns);
            vcpu.entitled_ns = share.entitled_ns;
        }
    }

    /// Notes what a period showed of a vCPU.
    fn show(&mut self, analysis: &Analysis, sample: &VcpuSample, reading: &VcpuReading, period_ns: u64) {
        let machine = &self.schedule.machine;
        let affinity = analysis.affinity.map(|node| machine.nodes[node].id);
        let quality = match &reading.counted {
            Counted::Counted(counted) => Quality::Counted(counted.permille),
            Counted::DidNotRun => Quality::DidNotRun,
            Counted::Crowded => Quality::Crowded,
            Counted::Lost => Quality::Lost,
            Counted::NoCounters => Quality::Assumed,
        };
        let analysis = match reading.is_assumed() {
            // What is assumed is not shown as if it had been counted.
            true => Analysis { pressure: None, kind: None, ..*analysis },
            false => *analysis,
        };
        let share = |ns: u64| ns as f64 / period_ns.max(1) as f64;
        let (ran, waited) = (share(sample.ran_ns), share(sample.waited_ns));
        let (throttled, entitled) = (share(sample.throttled_ns), share(sample.entitled_ns));
        let weight = sample.weight;
        let shown = Shown { analysis, ran, waited, throttled, entitled, weight, affinity, quality };
        if let Some(mask) = self.mask_mut(sample.key.vm, sample.key.vcpu) {
            mask.shown = Some(shown);
        }
    }

    /// A policy wants a step. What it wanted before does not count any more.
    fn want(&mut self, step: Confine, id: VmId) {
        let Some(mask) = self.mask_mut(id, step.vcpu).filter(|mask| mask.begun.is_none()) else { return };
        let assumed = mask.shown.is_some_and(|shown| shown.quality == Quality::Assumed);
        let why = Why { pressure: step.why.pressure.filter(|_| !assumed), ..step.why };
        mask.wanted = Some(Confine { why, ..step });
        self.touched.insert(id);
    }

    /// Masks that no policy has a use for are given back: after a failure, and where the host has changed so that no CPU is
    /// left of a mask.
    fn give_back_unused(&mut self) {
        let (machine, touched) = (&self.schedule.machine, &mut self.touched);
        for (&id, managed) in &mut self.vms {
            let Some(vm) = managed.vm.as_mut().filter(|vm| vm.scheduling.in_use()) else { continue };
            let acts = effective_policy(vm).acts();
            for (&vcpu, mask) in &mut vm.scheduling.masks {
                let Some(policy) = &mask.policy else { continue };
                let lost = policy.place(machine).is_none();
                if (!acts || lost) && mask.begun.is_none() && mask.wanted.is_none() {
                    let policy = mask.last.as_ref().map_or(vm.scheduling.policy, |last| last.why.policy);
                    mask.wanted = Some(give_back(machine, vcpu, policy, mask));
                    touched.insert(id);
                }
            }
        }
    }

    /// The mask of a vCPU, to change.
    pub fn mask_mut(&mut self, id: VmId, vcpu: ApicId) -> Option<&mut VcpuMask> {
        self.vms.get_mut(&id)?.vm.as_mut()?.scheduling.masks.get_mut(&vcpu)
    }

    /// The CPUs of a place that a vCPU's operator allows.
    pub fn policy_mask(&self, id: VmId, vcpu: ApicId, place: Place) -> Option<PolicyMask> {
        let mask = self.get(id)?.vm.as_ref()?.scheduling.masks.get(&vcpu)?;
        let machine = &self.schedule.machine;
        let exists = match place {
            Place::Node(node) => node < machine.nodes.len(),
            Place::Cache(domain) => domain < machine.domains.len(),
        };
        let operator = mask.operator.as_ref().filter(|_| exists)?;
        let cpus = machine.cpus(place, operator);
        let of_cache = matches!(place, Place::Cache(_));
        (!cpus.is_empty()).then_some(PolicyMask { cpus, of_cache, by: Mechanism::default() })
    }

    /// A step has been made, or somebody else has set another mask. Returns what was made. The last step that is made once more, in
    /// another way, is none.
    pub fn step_ended(
        &mut self,
        id: VmId,
        vcpu: ApicId,
        made: bool,
        caused_by: Option<String>,
        now_ns: u64,
    ) -> Option<LastStep> {
        let mask = self.mask_mut(id, vcpu)?;
        let begun = mask.begun.take()?;
        mask.settled_ns = now_ns;
        self.others_look(id);
        let mask = self.mask_mut(id, vcpu)?;
        if !made {
            return None;
        }
        let cpus = begun.mask.as_ref().map(|mask| mask.cpus.clone());
        let is_last = |last: &LastStep| last.mask == cpus && last.why == begun.why;
        if mask.policy.is_some() && mask.last.as_ref().is_some_and(is_last) {
            mask.policy = begun.mask;
            return None;
        }
        let last = LastStep { time_ns: now_ns, mask: cpus, why: begun.why, caused_by };
        (mask.policy, mask.moves, mask.last) = (begun.mask, mask.moves + 1, Some(last.clone()));
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

/// The policy that decides for a VM. One whose APIC ids are not certain is left alone, as is one whose guest has not arrived.
pub(super) fn effective_policy(vm: &Vm) -> Policy {
    let certain = vm.source != DescriptionSource::ThreadNames && vm.scheduling.clean_ns.is_some();
    if certain && !vm.waits() { vm.scheduling.policy } else { Policy::Off }
}

/// The step that gives a vCPU its operator's mask again.
fn give_back(machine: &Machine, vcpu: ApicId, policy: Policy, mask: &VcpuMask) -> Confine {
    let node = mask.policy.as_ref().and_then(|mask| mask.place(machine)).map(|place| machine.node_at(place));
    let shown = mask.shown.map(|shown| shown.analysis);
    let why = Why {
        policy,
        cause: Cause::SwitchedOff,
        pressure: shown.and_then(|analysis| analysis.pressure),
        before: Figures {
            node: node.map(|node| machine.nodes[node].id),
            remote_share: shown.and_then(|analysis| analysis.remote_share),
        },
        expected: Figures::default(),
        caused_by: None,
    };
    Confine { vcpu, to: None, why }
}
