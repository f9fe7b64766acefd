//! Policies of VMs: periods come in, masks go out.
//!
//! | mask of a vCPU | by |
//! |---|---|
//! | its operator's is remembered | `World::note_reading`, from what is read while no policy confines it |
//! | a policy's is set | a step of the plan, [`Command::Confine`]; recorded on disk, or with a domain of libvirt, before |
//! | its operator's is set again | a step of the plan when the policy changes, or [`Command::RestoreMasks`] by the record |
//! | its place is told to scx_vnuma, if that is loaded | the same steps; the affinity stays the operator's |
//! | those of threads that run no vCPU | [`Command::Follow`], after the steps of the vCPUs (`others`) |
//! | another one that is found is its operator's from then on | the next period, an operator's move, or a step that finds it |

use super::{
    Core,
    event::{Command, Level, Made, Switch},
    refusal::Refusal,
    render,
    requests::Taken,
    waiting::{Until, Waiting},
};
use vnuma_api as api;
use vnuma_model::{ApicId, CpuSet, HostNode, HostTopology};
use vnuma_policy::{
    memory_move::MemoryReason,
    scheduling::Policy,
    world::{HostReading, MaskChange, Mechanism, Mover, TaskId, Vm, VmId, VmScheduling},
};
use vnuma_process::ActError;

impl Core {
    /// How the vCPUs of a VM are scheduled.
    pub fn show_scheduling(&self, name: &str) -> Result<api::Scheduling, Refusal> {
        let (id, _) = self.find(name)?;
        Ok(api::Scheduling { vm: name.to_owned(), ..self.scheduling(id)? })
    }

    pub(super) fn scheduling(&self, id: VmId) -> Result<api::Scheduling, Refusal> {
        let ended = || Refusal::Ended { vm: "the VM".to_owned() };
        let managed = self.world.get(id).ok_or_else(ended)?;
        let Some(vm) = &managed.vm else {
            let policy = self.policies.schedule.to_string();
            let vm = managed.name().to_owned();
            return Ok(api::Scheduling { vm, policy, ..api::Scheduling::default() });
        };
        Ok(render::scheduling(id, vm, &self.world, &self.memories.scheduling))
    }

    /// What the policies were given in the last period.
    pub fn observation(&self) -> Option<api::Observation> {
        let (periods, scheduling) = (self.world.periods(), &self.memories.scheduling);
        let (reading, last) = (periods.last()?, scheduling.last_period());
        let mut vms: Vec<(VmId, api::ObservedVm)> = Vec::new();
        for (sample, assumed) in last.vcpus.iter().zip(&last.assumed) {
            let key = sample.key;
            let Some(vm) = self.vm(key.vm) else { continue };
            let Some(operator) = vm.scheduling.masks.get(&key.vcpu).and_then(|mask| mask.operator.clone())
            else {
                continue;
            };
            if vms.last().is_none_or(|(id, _)| *id != key.vm) {
                let (name, policy) = (vm.name().to_owned(), vm.scheduling.policy.to_string());
                vms.push((key.vm, api::ObservedVm { vm: name, policy, vcpus: Vec::new() }));
            }
            if let Some((_, vm)) = vms.last_mut() {
                vm.vcpus.push(render::observed(sample, *assumed, operator));
            }
        }
        let host = HostTopology { pci_devices: Vec::new(), ..self.world.host.clone() };
        let bare = |node: HostNode| HostNode { huge_pages: Vec::new(), ..node };
        Some(api::Observation {
            time_ns: last.time_ns,
            period_ns: reading.period_ns,
            source: reading.source.to_owned(),
            bounds: scheduling.last_bounds().map(|bounds| (bounds.low, bounds.high)),
            host: HostTopology { nodes: host.nodes.into_iter().map(bare).collect(), ..host },
            layout: periods.layout().clone(),
            idle: reading.cpus.iter().map(|cpu| (cpu.cpu, cpu.idle_ns)).collect(),
            vms: vms.into_iter().map(|(_, vm)| vm).collect(),
        })
    }

    pub(super) fn set_policy(&mut self, name: &str, policy: Policy) -> Taken {
        let (id, managed) = self.find(name)?;
        let Some(vm) = &managed.vm else {
            let problem = render::problem(managed).unwrap_or_else(|| "connecting".to_owned());
            return Err(Refusal::NotConnected { vm: name.to_owned(), problem });
        };
        let (vm, before) = (vm.name().to_owned(), vm.scheduling.policy);
        self.recount(id);
        if before != policy {
            self.world.set_policy(id, policy);
            self.world.stop_memory(id, |why| matches!(why, MemoryReason::Nearer(_)));
            self.log(None, Level::Info, format!("{vm}: its policy is {policy}, was {before}"));
            let policy = policy.to_string();
            self.announce(api::Event::Policy { vm, policy, time_ns: self.now_ns });
        }
        Ok((id, Some(Until::MasksReturned)))
    }

    /// Answers those who have set a policy, once no mask of the one before is left.
    pub(super) fn answer_policies(&mut self) {
        let world = &self.world;
        let waits = |id: VmId| {
            let vm = world.get(id).and_then(|managed| managed.vm.as_ref());
            let given_back = |vm: &Vm| {
                let masks = vm.scheduling.masks.values();
                masks.filter(|mask| mask.is_in_use()).all(|mask| {
                    let by = mask.step.begun().map(|begun| begun.why.policy);
                    let set = mask.policy.as_ref().and(mask.step.last.as_ref()).map(|last| last.why.policy);
                    by.or(set) == Some(vm.scheduling.policy)
                        && !mask.released
                        && mask.step.wanted.is_none_or(|wanted| wanted.to.is_some())
                })
            };
            let others = |vm: &Vm| {
                let others = &vm.scheduling.others;
                let kept = others.kept.is_some() || others.follow.is_under_way();
                !vm.scheduling.policy.acts() && kept && others.problem.is_none()
            };
            vm.is_some_and(|vm| !given_back(vm) || others(vm))
        };
        let done = |waiting: &Waiting| waiting.until == Until::MasksReturned && !waits(waiting.vm);
        for Waiting { vm, then, .. } in self.waiting.take_if(done) {
            self.begin(vm, then);
        }
    }

    /// A period has ended.
    pub(super) fn sampled(&mut self, reading: Box<HostReading>) {
        self.read_locations(&reading);
        for MaskChange { vm: id, vcpu, tid, mask } in self.world.note_reading(reading) {
            let Some((host, vm)) = self.world.vm_mut(id) else { continue };
            vm.unassign(host, vcpu);
            let pid = vm.description.pid;
            self.commands.push(Command::ForgetMask(pid, tid));
            self.recount(id);
            self.taken_over(id, vcpu, &mask);
        }
    }

    /// scx_vnuma was loaded, or has ended.
    pub(super) fn switched(&mut self, switch: Switch) {
        let now_ns = self.now_ns;
        let mut lost = 0;
        for (tid, done) in switch.threads {
            let Some((id, vcpu)) = self.registry.threads.get(&tid).copied() else { continue };
            let Some(mask) = self.world.mask_mut(id, vcpu) else { continue };
            // What was read of it before may be of either way.
            mask.settled_ns = now_ns;
            match &mut mask.policy {
                Some(policy) if done => policy.by = switch.to,
                Some(_) => {
                    (mask.policy, lost) = (None, lost + 1);
                    if let Some((host, vm)) = self.world.vm_mut(id) {
                        vm.unassign(host, vcpu);
                        vm.scheduling.others.follow.wanted = Some(());
                    }
                }
                None => {}
            }
        }
        let mut line = match switch.to {
            Mechanism::Scheduler => "scx_vnuma is loaded: policies set the places of vCPUs by it".to_owned(),
            Mechanism::Affinity => format!("policies set the places of vCPUs by affinities: {}", switch.why),
        };
        if lost > 0 {
            line += &format!("; {lost} vCPUs have lost theirs until the next period");
        }
        self.log(None, Level::Info, line);
        self.world.scheduler_loads += u64::from(switch.to == Mechanism::Scheduler);
    }

    /// A mask that vnumad has not set.
    fn taken_over(&mut self, id: VmId, vcpu: ApicId, mask: &CpuSet) {
        let name = self.vm(id).map(|vm| vm.name().to_owned()).unwrap_or_default();
        let line = format!(
            "{name}: vCPU {vcpu}: somebody else has set its CPUs to {mask}: that is its operator's mask now"
        );
        self.log(id, Level::Info, line);
    }

    /// Masks were set, or could not be.
    pub(super) fn confined(&mut self, task: TaskId, outcomes: Vec<(ApicId, Result<Made, ActError>)>) {
        let id = task.vm;
        // It may have been the last one that a policy confined.
        self.recount(id);
        for (vcpu, outcome) in outcomes {
            if !self.world.mask_mut(id, vcpu).is_some_and(|mask| mask.step.is(task)) {
                continue;
            }
            if outcome.is_ok() {
                self.state(id).confine_problems.remove(&vcpu);
            }
            match outcome {
                Ok(made) => self.step_made(task, vcpu, made),
                Err(ActError::MaskChanged { found, .. }) => {
                    self.world.step_ended(task, vcpu, false, None, self.now_ns);
                    if let Some(mask) = self.world.mask_mut(id, vcpu) {
                        // The next period reads it, with the CPUs that are offline now.
                        mask.set_by_operator(None, self.now_ns);
                    }
                    if let Some((host, vm)) = self.world.vm_mut(id) {
                        vm.unassign(host, vcpu);
                    }
                    self.taken_over(id, vcpu, &found);
                }
                Err(error) => self.step_failed(task, vcpu, error),
            }
        }
    }

    fn step_made(&mut self, task: TaskId, vcpu: ApicId, Made { location, by }: Made) {
        let id = task.vm;
        let begun = self.world.mask_mut(id, vcpu).and_then(|mask| mask.step.get_mut(task));
        let Some(begun) = begun else { return };
        begun.mask.iter_mut().for_each(|mask| mask.by = by);
        let caused_by = begun.why.caused_by;
        let caused_by = caused_by.map(|other| match self.vm(other) {
            Some(other) => other.name().to_owned(),
            None => "a VM that is gone".to_owned(),
        });
        let Some(made) = self.world.step_ended(task, vcpu, true, caused_by, self.now_ns) else { return };
        let Some((host, vm)) = self.world.vm_mut(id) else { return };
        let name = vm.name().to_owned();
        // Published at once, as it was put there on purpose.
        match made.why.expected.node.filter(|_| made.mask.is_some()) {
            Some(node) => vm.assign(host, vcpu, node, Mover::Policy),
            None => vm.unassign(host, vcpu),
        }
        let step = render::step(&made);
        self.log(None, Level::Info, format!("{name}: {}", step.text(vcpu)));
        self.announce(api::Event::Confined { vm: name, vcpu, step });
        self.locate(id, vcpu, location);
    }

    fn step_failed(&mut self, task: TaskId, vcpu: ApicId, source: ActError) {
        let id = task.vm;
        self.world.step_ended(task, vcpu, false, None, self.now_ns);
        let Some((_, vm)) = self.world.vm_mut(id) else { return };
        let name = vm.name().to_owned();
        // It is tried again with the next period, and a libvirt that is gone may be so for long.
        let problem = source.to_string();
        let before = self.state(id).confine_problems.insert(vcpu, problem.clone());
        let level = if before.as_ref() == Some(&problem) { Level::Debug } else { Level::Warn };
        self.log(task.vm, level, format!("{name}: the CPUs of vCPU {vcpu} could not be set: {problem}"));
        self.refuse_first(id, Until::MasksReturned, Refusal::Confine { vm: name, vcpu, source });
    }

    /// The masks that an earlier vnumad left are the operator's again.
    pub(super) fn masks_restored(&mut self, task: TaskId, outcome: Result<usize, String>) {
        let now_ns = self.now_ns;
        let Some((_, vm)) = self.world.vm_mut(task.vm) else { return };
        if vm.scheduling.restore.end(task).is_none() {
            return;
        }
        let name = vm.name().to_owned();
        match outcome {
            Ok(count) => {
                (vm.scheduling.clean_ns, vm.scheduling.restore.last) = (Some(now_ns), None);
                if count > 0 {
                    let line = format!(
                        "{name}: {count} threads have their operator's CPUs again, which an earlier vnumad had confined"
                    );
                    self.log(task.vm, Level::Info, line);
                }
            }
            Err(problem) => {
                // It is tried again with the next resync.
                let before = vm.scheduling.restore.last.replace(problem.clone());
                if before.as_ref() != Some(&problem) {
                    let line = format!(
                        "{name}: an earlier vnumad has confined vCPUs, and that is not undone yet: {problem}"
                    );
                    self.log(task.vm, Level::Warn, line);
                }
            }
        }
    }

    /// The masks of an earlier vnumad that could not be given back are tried again.
    pub(super) fn restore_again(&mut self) {
        let failed = |vm: &Vm| {
            let VmScheduling { clean_ns, restore, .. } = &vm.scheduling;
            clean_ns.is_none() && restore.last.is_some() && !restore.is_under_way()
        };
        let vms = self.world.iter().filter_map(|(id, managed)| Some((id, managed.vm.as_ref()?)));
        let due: Vec<VmId> = vms.filter(|(_, vm)| failed(vm)).map(|(id, _)| id).collect();
        for id in due {
            if let Some((_, vm)) = self.world.vm_mut(id) {
                vm.scheduling.restore.wanted = Some(());
            }
        }
    }

    /// An operator has moved a vCPU: its mask is the operator's.
    pub(super) fn moved_by_operator(&mut self, id: VmId, vcpu: ApicId) {
        let now_ns = self.now_ns;
        if let Some(mask) = self.world.mask_mut(id, vcpu) {
            // The next period reads it.
            mask.set_by_operator(None, now_ns);
        }
        self.recount(id);
    }

    /// The threads of a VM may have changed: they are counted anew.
    pub(super) fn recount(&mut self, id: VmId) {
        if self.states.of.contains_key(&id) {
            self.states.recount.push(id);
        }
    }

    /// Counts the threads of all VMs while any VM needs it, as all of them take CPU time and caches.
    pub(super) fn count(&mut self) {
        let mut changed = std::mem::take(&mut self.states.recount);
        changed.sort_unstable();
        changed.dedup();
        for &id in &changed {
            let Some(state) = self.states.of.get_mut(&id) else { continue };
            let vm = self.world.get(id).and_then(|managed| managed.vm.as_ref());
            let wants = vm.is_some_and(|vm| vm.scheduling.wants_readings());
            let before = std::mem::replace(&mut state.wants_readings, wants);
            self.states.want_readings = self.states.want_readings + usize::from(wants) - usize::from(before);
        }
        let counted = self.states.want_readings > 0;
        if std::mem::replace(&mut self.states.counted, counted) != counted {
            changed = self.world.iter().map(|(id, _)| id).collect();
        }
        for id in changed {
            let vm = self.world.get(id).and_then(|managed| managed.vm.as_ref()).filter(|_| counted);
            let now = vm.map(|vm| {
                let vcpus = vm.description.vcpus.iter().map(|vcpu| (vcpu.apic_id, vcpu.tid));
                (vm.description.pid, vcpus.collect::<Vec<_>>())
            });
            let Some(state) = self.states.of.get_mut(&id).filter(|state| state.counted != now) else {
                continue;
            };
            let before = std::mem::replace(&mut state.counted, now.clone());
            let (pid, vcpus) = match (now, before) {
                (Some(now), _) => now,
                (None, Some((pid, _))) => (pid, Vec::new()),
                (None, None) => continue,
            };
            self.commands.push(Command::Count(id, pid, vcpus));
        }
    }
}
