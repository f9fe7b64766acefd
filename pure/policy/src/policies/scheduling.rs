//! Scheduling of the host's vCPUs, a period at a time: readings become input of the policies that are in use, and what these
//! decide becomes steps.

use super::{Now, PerVm, Propose};
use crate::{
    Action, Reason, Step,
    residency::{AreaSample, MemoryObservation},
    scheduling::{
        Analysis, Cause, Decision, Figures, Input, Machine, Policy, Reach, Scheduler, Settings, Standing,
        VcpuKey, VcpuSample, Why,
        analyzer::Bounds,
        entitlement::{DEFAULT_WEIGHT, Want, entitle},
    },
    world::{
        Confine, ConnectionId, Counted, HostReading, Periods, VcpuMask, VcpuReading, Vm, VmId, VmReading,
        World,
    },
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use vnuma_model::{ApicId, CpuSet, HostNodeId};

/// Where accesses go is known for so long after the period in which they were counted.
const COUNTED_NS: u64 = 120_000_000_000;

/// Asks each policy that is in use, once a period. Threads that run no vCPU follow. Masks that an earlier vnumad left are given back.
pub struct Scheduling<'a>(pub &'a Settings);

/// What scheduling remembers from period to period.
#[derive(Clone, Debug, Default)]
pub struct SchedulingMemory {
    /// The scheduler of each policy that is in use.
    schedulers: BTreeMap<Policy, Scheduler>,
    /// The bounds of each policy's last decision.
    bounds: BTreeMap<Policy, Bounds>,
    /// By VM: its policy, and what the last periods showed it of its vCPUs.
    shown: BTreeMap<VmId, (Policy, BTreeMap<ApicId, Shown>)>,
    /// The connection over which pins of an earlier vnumad were given back.
    settled: PerVm<Option<ConnectionId>>,
    pub(super) last: LastPeriod,
}

/// What the policies were given in the last period.
#[derive(Clone, Debug, Default)]
pub struct LastPeriod {
    /// Number of its reading; 0: there was none.
    pub(super) number: u64,
    /// Number of the machine that positions are of.
    pub(super) machine: u64,
    /// When the period ended.
    pub time_ns: u64,
    /// vCPUs.
    pub vcpus: Vec<VcpuSample>,
    /// Whether the counts of each vCPU are assumed.
    pub assumed: Vec<bool>,
    pub(super) reaches: Vec<Reach>,
    /// `vprobe` is in use.
    pub(super) vprobe: bool,
    /// VMs whose vCPUs `vprobe` wants elsewhere.
    pub(super) placed: BTreeSet<VmId>,
}

/// What the last period showed of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shown {
    /// What the analyzer says.
    pub analysis: Analysis,
    /// Share of the period on a CPU.
    pub ran: f64,
    /// Share of the period that it waited for one.
    pub waited: f64,
    /// Share of the period that it had no quota.
    pub throttled: f64,
    /// Share of the period that it is entitled to a CPU, of what it wanted.
    pub entitled: f64,
    /// `cpu.weight` of its control group.
    pub weight: u32,
    /// Node that most accesses go to, by the kernel's number.
    pub affinity: Option<HostNodeId>,
    /// How good the figures are.
    pub quality: Quality,
}

/// How good the figures of a vCPU are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quality {
    /// Counted, for so many per mille of its time.
    Counted(u32),
    /// It was on no CPU.
    DidNotRun,
    /// Others had the counters.
    Crowded,
    /// Its counters could not be opened or read.
    Lost,
    /// There are no counters: the place of its VM's pages stands in for them.
    Assumed,
}

/// The input of a period, with what is needed to read the decision.
struct Prepared<'a> {
    vcpus: Vec<VcpuSample>,
    /// The policy of each vCPU.
    policies: Vec<Policy>,
    readings: Vec<&'a VcpuReading>,
    reaches: Vec<Reach>,
}

impl Propose for Scheduling<'_> {
    type Memory = SchedulingMemory;

    fn propose(&self, now: &Now<'_>, memory: &mut SchedulingMemory) -> Vec<Step> {
        let (world, mut wanted, mut steps) = (now.world, BTreeMap::new(), Vec::new());
        for id in now.gone() {
            memory.shown.remove(&id);
            memory.settled.forget(id);
        }
        if let Some(reading) = world.periods().last()
            && memory.last.number != world.periods().reading_number()
        {
            memory.decide(self.0, world, reading, &mut wanted);
        }
        let left = world.left().iter().filter_map(|left| Some((left.vm, left.masked?)));
        steps.extend(left.map(|(id, pid)| Step::now(id, Action::RestoreMasks(pid, Reason::Ended))));
        let machine = world.periods().machine();
        for (id, managed, vm) in now.vms() {
            let answers = managed.responsive().filter(|_| managed.abilities.pins);
            if answers.is_some() && std::mem::replace(memory.settled.of(id, vm.found_ns), answers) != answers
            {
                steps.push(Step::now(id, Action::SettlePins(Reason::LeftBehind)));
            }
            // What was wanted before, unless something else is now.
            for (&vcpu, mask) in vm.scheduling.masks.iter().filter(|(_, mask)| !mask.step.is_under_way()) {
                let back = || mask.released.then(|| memory.give_back(machine, (id, vm), vcpu, mask));
                if let Some(step) = mask.step.wanted.or_else(back) {
                    wanted.entry((id, vcpu)).or_insert(step);
                }
            }
            let restore = &vm.scheduling.restore;
            if restore.wanted.is_some() && !restore.is_under_way() {
                let pid = vm.description.pid;
                steps.push(Step::now(id, Action::RestoreMasks(pid, Reason::LeftBehind)));
            }
            if vm.others_may_follow() {
                steps.push(Step::now(id, Action::Follow));
            }
        }
        steps.extend(wanted.into_iter().map(|((id, _), step)| Step::now(id, Action::Confine(step))));
        steps
    }
}

/// At most one step for each vCPU.
type Wanted = BTreeMap<(VmId, ApicId), Confine>;

impl SchedulingMemory {
    /// What the policies were given in the last period.
    pub fn last_period(&self) -> &LastPeriod {
        &self.last
    }

    /// Bounds that were used last. Policies whose VMs came at other times can have learned others: these are of one of them.
    pub fn last_bounds(&self) -> Option<Bounds> {
        self.bounds.values().next().copied()
    }

    /// What the last periods showed of a vCPU, if its VM's policy has seen it.
    pub fn shown(&self, id: VmId, vm: &Vm, vcpu: ApicId) -> Option<&Shown> {
        let (policy, shown) = self.shown.get(&id)?;
        let known = *policy == vm.scheduling.policy && vm.scheduling.masks.contains_key(&vcpu);
        shown.get(&vcpu).filter(|_| known)
    }

    /// A period has ended: each policy that is in use decides.
    fn decide(&mut self, settings: &Settings, world: &World, reading: &HostReading, wanted: &mut Wanted) {
        let periods = world.periods();
        if self.last.machine != periods.machine_number() {
            // The schedulers remember positions of the machine before.
            self.schedulers.clear();
        }
        let Prepared { mut vcpus, policies: of, readings, reaches } = prepare_input(world, reading);
        let policies: BTreeSet<Policy> = of.iter().copied().filter(|policy| *policy != Policy::Off).collect();
        self.schedulers.retain(|policy, _| policies.contains(policy));
        self.bounds.retain(|policy, _| policies.contains(policy));
        divide_time(periods.machine(), reading, &readings, &reaches, &mut vcpus);
        let mut placed = BTreeSet::new();
        for &policy in &policies {
            for (sample, own) in vcpus.iter_mut().zip(&of) {
                sample.managed = *own == policy;
            }
            let fresh = || Scheduler::new(policy, *settings);
            let scheduler = self.schedulers.entry(policy).or_insert_with(fresh);
            let decision = scheduler.decide(&Input {
                machine: periods.machine(),
                reaches: &reaches,
                cpus: &reading.cpus,
                vcpus: &vcpus,
                period_ns: reading.period_ns,
            });
            if policy == Policy::Vprobe {
                placed = decision.steps.iter().map(|step| step.key.vm).collect();
            }
            self.bounds.insert(policy, decision.bounds);
            for (at, analysis) in decision.analysis.iter().enumerate().filter(|(at, _)| of[*at] == policy) {
                self.show(policy, periods, analysis, &vcpus[at], readings[at]);
            }
            self.want(world, decision, wanted);
        }
        self.give_back_unused(world, wanted);
        self.last = LastPeriod {
            number: periods.reading_number(),
            machine: periods.machine_number(),
            time_ns: reading.began_ns,
            assumed: readings.iter().map(|reading| reading.is_assumed()).collect(),
            vcpus,
            reaches,
            vprobe: policies.contains(&Policy::Vprobe),
            placed,
        };
    }

    /// Notes what a period showed of a vCPU.
    fn show(
        &mut self,
        policy: Policy,
        periods: &Periods,
        analysis: &Analysis,
        sample: &VcpuSample,
        reading: &VcpuReading,
    ) {
        let (machine, period_ns) = (periods.machine(), periods.period_ns());
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
        let known = self.shown.entry(sample.key.vm).or_insert_with(|| (policy, BTreeMap::new()));
        if known.0 != policy {
            *known = (policy, BTreeMap::new());
        }
        known.1.insert(sample.key.vcpu, shown);
    }

    /// Notes the steps that a policy wants, in place of those that it wanted before.
    fn want(&self, world: &World, decision: Decision, wanted: &mut Wanted) {
        for step in decision.steps {
            let VcpuKey { vm: id, vcpu } = step.key;
            let Some(vm) = world.get(id).and_then(|managed| managed.vm.as_ref()) else { continue };
            if vm.scheduling.masks.get(&vcpu).is_none_or(|mask| mask.step.is_under_way()) {
                continue;
            }
            let assumed = self.shown(id, vm, vcpu).is_some_and(|shown| shown.quality == Quality::Assumed);
            let why = Why { pressure: step.why.pressure.filter(|_| !assumed), ..step.why };
            wanted.insert((id, vcpu), Confine { vcpu, to: step.to, why });
        }
    }

    /// Masks that no policy has a use for are given back: after a failure, and where the host has changed so that no CPU is
    /// left of a mask.
    fn give_back_unused(&self, world: &World, wanted: &mut Wanted) {
        let machine = world.periods().machine();
        for (id, managed) in world.iter() {
            let Some(vm) = managed.vm.as_ref().filter(|vm| vm.scheduling.in_use()) else { continue };
            let acts = vm.effective_policy().acts();
            for (&vcpu, mask) in vm.scheduling.masks.iter().filter(|(_, mask)| mask.is_settled()) {
                let Some(policy) = &mask.policy else { continue };
                if !acts || policy.place(machine).is_none() {
                    let back = || self.give_back(machine, (id, vm), vcpu, mask);
                    wanted.entry((id, vcpu)).or_insert_with(back);
                }
            }
        }
    }

    /// The step that gives a vCPU its operator's mask again.
    fn give_back(&self, machine: &Machine, (id, vm): (VmId, &Vm), vcpu: ApicId, mask: &VcpuMask) -> Confine {
        let policy = mask.step.last.as_ref().map_or(vm.scheduling.policy, |last| last.why.policy);
        let node =
            mask.policy.as_ref().and_then(|mask| mask.place(machine)).map(|place| machine.node_at(place));
        // The reason names the policy that has confined it, even if its VM has another one by now.
        let before = || self.shown.get(&id)?.1.get(&vcpu).filter(|_| mask.released);
        let shown = self.shown(id, vm, vcpu).or_else(before).map(|shown| shown.analysis);
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
}

impl LastPeriod {
    /// What the schedulers were given.
    pub(super) fn input<'a>(&'a self, machine: &'a Machine, reading: &'a HostReading) -> Input<'a> {
        let (reaches, vcpus) = (&self.reaches, &self.vcpus);
        Input { machine, reaches, cpus: &reading.cpus, vcpus, period_ns: reading.period_ns }
    }

    /// What a page of a VM saves in a second when it is on `home` instead of `node`, in tenths of a local access: accesses of all
    /// of the VM's vCPUs to that node, divided by the pages that the VM has there.
    pub(super) fn saving(
        &self,
        world: &World,
        id: VmId,
        observed: &MemoryObservation,
        (node, home): (HostNodeId, HostNodeId),
    ) -> Option<f64> {
        let machine = world.periods().machine();
        if self.number == 0 || observed.began_ns.saturating_sub(self.time_ns) > COUNTED_NS {
            return None;
        }
        let (from, to) = (machine.position(node)?, machine.position(home)?);
        let (mut saved, mut counted) = (0.0, false);
        let vcpus = self.vcpus.iter().zip(&self.assumed);
        for (sample, assumed) in vcpus.filter(|(sample, _)| sample.key.vm == id) {
            let Some(accesses) = sample.counts.as_ref().and_then(|counts| counts.accesses.get(from)) else {
                continue;
            };
            if *assumed {
                return None;
            }
            let Some(at) = sample.node(machine) else { continue };
            let nearer = f64::from(machine.distance(at, from)) - f64::from(machine.distance(at, to));
            (saved, counted) = (saved + *accesses as f64 * nearer, true);
        }
        let there = observed.areas.iter().flat_map(AreaSample::places).filter(|(at, ..)| *at == node);
        let pages = there.fold(0_u64, |sum, (.., size)| sum.saturating_add(size.bytes)) / 4096;
        let seconds = world.periods().period_ns() as f64 / 1e9;
        (counted && pages > 0 && seconds > 0.0).then(|| saved / seconds / pages as f64)
    }
}

/// What the schedulers are given. vCPUs whose mask or thread is not known are left out.
fn prepare_input<'a>(world: &World, reading: &'a HostReading) -> Prepared<'a> {
    let machine = world.periods().machine();
    let mut known: HashMap<&CpuSet, usize> = HashMap::new();
    // Most have the mask of the one before.
    let mut last: Option<(&CpuSet, usize)> = None;
    let mut prepared =
        Prepared { vcpus: Vec::new(), policies: Vec::new(), readings: Vec::new(), reaches: Vec::new() };
    for VmReading { vm: id, pid, pages, vcpus, .. } in &reading.vms {
        let Some(vm) = world.get(*id).and_then(|managed| managed.vm.as_ref()) else { continue };
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
            let begun = mask.step.begun().map(|begun| begun.mask.as_ref());
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
                weight: seen.group.and_then(|at| reading.groups.get(at)).map_or(DEFAULT_WEIGHT, |g| g.weight),
                ran_ns: seen.ran_ns,
                waited_ns: seen.waited_ns,
                throttled_ns: 0,
                entitled_ns: seen.ran_ns.saturating_add(seen.waited_ns),
                counts: seen.counts(machine, node, vm.home_of(seen.vcpu), pages),
            });
            prepared.policies.push(vm.effective_policy());
            prepared.readings.push(seen);
        }
    }
    prepared
}

/// Divides the waiting of vCPUs into that for a CPU and that for quota, and says how much time each is entitled to.
fn divide_time(
    machine: &Machine,
    reading: &HostReading,
    readings: &[&VcpuReading],
    reaches: &[Reach],
    vcpus: &mut [VcpuSample],
) {
    let period_ns = reading.period_ns;
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
