//! Where the memory of VMs is, and how displaced memory comes home.

use super::{
    Core,
    event::Level,
    refusal::Refusal,
    render,
    requests::Taken,
    waiting::{Until, Waiting},
};
use vnuma_api as api;
use vnuma_policy::{
    hotness::Hotness,
    memory_move::{MemoryPolicy, MemoryReason},
    residency::MemoryObservation,
    world::{TaskId, VmId},
};

impl Core {
    /// A client asks where a VM's memory is.
    pub(super) fn want_memory_shown(&mut self, name: &str) -> Taken {
        let id = self.with_guest_nodes(name)?;
        // If another look would cost too much, the last one is shown.
        let rests_until_ns = self.vm(id).map_or(0, |vm| vm.homing.rests_until_ns(&self.policies.memory));
        let observed = self.world.observe_now(id, rests_until_ns, self.now_ns);
        Ok((id, observed.then_some(Until::MemoryObserved)))
    }

    pub(super) fn set_memory_policy(&mut self, name: &str, policy: MemoryPolicy) -> Taken {
        let id = self.with_guest_nodes(name)?;
        let now_ns = self.now_ns;
        let before = self.world.set_memory_policy(id, policy, now_ns);
        if let Some(before) = before.filter(|before| *before != policy) {
            self.world.stop_memory(id, |why| matches!(why, MemoryReason::Home(_)));
            self.log(None, Level::Info, format!("{name}: its memory policy is {policy}, was {before}"));
        }
        Ok((id, None))
    }

    /// A VM whose memory has homes.
    pub(super) fn with_guest_nodes(&self, name: &str) -> Result<VmId, Refusal> {
        let (id, managed) = self.find(name)?;
        let Some(vm) = &managed.vm else {
            let problem = render::problem(managed).unwrap_or_else(|| "connecting".to_owned());
            return Err(Refusal::NotConnected { vm: name.to_owned(), problem });
        };
        match vm.description.guest_nodes.is_empty() {
            true if render::problem(managed).is_some() => {
                let problem = render::problem(managed).unwrap_or_default();
                Err(Refusal::NotConnected { vm: name.to_owned(), problem })
            }
            true => Err(Refusal::NoGuestNodes { vm: name.to_owned() }),
            false => Ok(id),
        }
    }

    /// A VM's memory was looked at, or could not be.
    pub(super) fn memory_observed(&mut self, task: TaskId, outcome: Result<MemoryObservation, String>) {
        let id = task.vm;
        let Some(vm) = self.vm(id).filter(|vm| vm.homing.observation.is(task)) else { return };
        let (name, before) = (vm.name().to_owned(), vm.homing.problem.clone());
        let problem = outcome.as_ref().err().cloned();
        self.world.note_observation(task, outcome, self.now_ns);
        if let Some(problem) = problem.as_ref().filter(|problem| before.as_ref() != Some(*problem)) {
            self.log(task.vm, Level::Warn, format!("{name}: where its memory is cannot be seen: {problem}"));
        }
        match problem {
            None => self.reached(id, Until::MemoryObserved),
            Some(problem) => {
                let waits = |waiting: &Waiting| (waiting.vm, waiting.until) == (id, Until::MemoryObserved);
                let refusal = || Refusal::Memory { vm: name.clone(), problem: problem.clone() };
                self.refuse_waiting(waits, refusal);
            }
        }
    }

    /// How hot a VM's memory is was watched, or could not be.
    pub(super) fn hotness_watched(&mut self, task: TaskId, outcome: Result<Hotness, String>) {
        let Some(vm) = self.vm(task.vm).filter(|vm| vm.homing.hotness.task.is(task)) else { return };
        let (name, before) = (vm.name().to_owned(), vm.homing.hotness.problem.clone());
        let problem = outcome.as_ref().err().cloned();
        self.world.note_hotness(task, outcome, self.now_ns);
        if let Some(problem) = problem.filter(|problem| before.as_ref() != Some(problem)) {
            self.log(task.vm, Level::Info, format!("{name}: how hot its memory is is not known: {problem}"));
        }
    }

    /// Where the memory of a VM is.
    pub(super) fn memory_of(&self, id: VmId) -> Result<api::VmMemory, Refusal> {
        let vm = self.vm(id).ok_or_else(|| Refusal::Ended { vm: "the VM".to_owned() })?;
        let rests_ns = self.memories.memory_rests_until_ns(id, self.now_ns);
        Ok(render::vm_memory(vm, &self.policies, rests_ns, self.now_ns))
    }
}
