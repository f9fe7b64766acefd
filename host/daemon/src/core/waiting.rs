//! Requests that wait: who asked, of which VM, until what happens, and what is done then.
//!
//! When a VM goes, or its hypervisor does not answer, all of its requests are found here.

use super::{Core, Reply, event::Level, refusal::Refusal};
use vnuma_policy::world::{RehomeWish, RequestId, ResizeWish, VmId};

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// The channel is plugged, or cannot be.
    Attached,
    /// Something was published for the first time.
    Published,
    /// The channel is unplugged, or the guest keeps it.
    Detached,
    /// The vCPU is replugged, or cannot be.
    Replugged,
    /// The VM is marked to be attached when it runs, or cannot be.
    Marked,
    /// All masks that the policy before has set are the operator's again.
    MasksReturned,
    /// The VM is described.
    Described,
    /// The VM's memory was looked at.
    MemoryObserved,
}

/// What is done then.
pub(super) enum Then {
    /// It is answered.
    Answer(Reply),
    /// A guest node gets another home.
    Rehome(RehomeWish),
    /// A guest node gets another size.
    Resize(ResizeWish),
}

/// One that waits.
pub(super) struct Waiting {
    /// The request. `None`: a policy wants it, and there is no answer to give.
    pub request: Option<RequestId>,
    pub vm: VmId,
    pub until: Until,
    pub then: Then,
}

impl Waiting {
    /// Was the hypervisor asked for it?
    fn needs_answer(&self) -> bool {
        matches!(self.until, Until::Attached | Until::Detached | Until::Replugged | Until::Marked)
    }

    /// Does it need to know what the VM consists of?
    fn needs_description(&self) -> bool {
        self.until == Until::Described || matches!(self.then, Then::Resize(_))
    }
}

/// All that wait, in the order in which they came.
#[derive(Default)]
pub(super) struct WaitingList(Vec<Waiting>);

impl WaitingList {
    /// Does anything of a VM wait for this?
    pub(super) fn has(&self, vm: VmId, until: Until) -> bool {
        self.0.iter().any(|waiting| (waiting.vm, waiting.until) == (vm, until))
    }

    /// Takes out those for which this holds.
    pub(super) fn take_if(&mut self, mut holds: impl FnMut(&Waiting) -> bool) -> Vec<Waiting> {
        self.0.extract_if(.., |waiting| holds(waiting)).collect()
    }

    /// Takes out what waits for this.
    pub(super) fn take(&mut self, vm: VmId, until: Until) -> Vec<Waiting> {
        self.take_if(|waiting| (waiting.vm, waiting.until) == (vm, until))
    }
}

impl Core {
    /// Has a request wait.
    pub(super) fn wait(&mut self, request: Option<RequestId>, vm: VmId, until: Until, then: Then) {
        self.waiting.0.push(Waiting { request, vm, until, then });
    }

    /// What these have waited for has come about.
    pub(super) fn reached(&mut self, id: VmId, until: Until) {
        for Waiting { request, then, .. } in self.waiting.take(id, until) {
            match then {
                Then::Answer(reply) => self.answer(request, reply),
                then if until == Until::Described => self.observe_before(request, id, then),
                then => self.begin(request, id, then),
            }
        }
    }

    /// Whoever may act decides what it costs: what was free at the last look would refuse, or allow, for minutes.
    fn observe_before(&mut self, request: Option<RequestId>, id: VmId, then: Then) {
        if let Some((_, vm)) = self.world.vm_mut(id) {
            vm.homing.rests_until_ns = 0;
        }
        match self.world.observe_now(id, self.now_ns) {
            true => self.wait(request, id, Until::MemoryObserved, then),
            false => self.begin(request, id, then),
        }
    }

    fn begin(&mut self, request: Option<RequestId>, id: VmId, then: Then) {
        let begun = match then {
            Then::Answer(reply) => return self.answer(request, reply),
            Then::Rehome(wish) => self.begin_rehome(request, id, wish),
            Then::Resize(wish) => self.begin_resize(request, id, &wish),
        };
        if let Err(refusal) = begun {
            self.refuse(request, refusal);
        }
    }

    /// A policy that wants another home is not answered.
    fn refuse(&mut self, request: Option<RequestId>, refusal: Refusal) {
        match request {
            Some(_) => self.answer(request, Reply::Refused(refusal)),
            None => self.log(Level::Warn, format!("{refusal}; its vCPUs have come to stay elsewhere")),
        }
    }

    /// What these have waited for does not come about.
    pub(super) fn refuse_waiting(&mut self, holds: impl Fn(&Waiting) -> bool, refusal: impl Fn() -> Refusal) {
        for waiting in self.waiting.take_if(holds) {
            self.refuse(waiting.request, refusal());
        }
    }

    /// The same, where one is told why, and the others how things are now.
    pub(super) fn refuse_first(&mut self, id: VmId, until: Until, refusal: Refusal) {
        let mut refusal = Some(refusal);
        for Waiting { request, then, .. } in self.waiting.take(id, until) {
            match refusal.take() {
                Some(refusal) => self.refuse(request, refusal),
                None => self.begin(request, id, then),
            }
        }
    }

    /// The hypervisor of a VM does not describe it. `lost`: nor does it answer anything that it was asked.
    pub(super) fn refuse_unanswered(&mut self, id: VmId, problem: &str, lost: bool) {
        let vm = self.name_of(id);
        let refusal = || Refusal::NotConnected { vm: vm.clone(), problem: problem.to_owned() };
        let waits = |waiting: &Waiting| {
            waiting.vm == id && (waiting.needs_description() || lost && waiting.needs_answer())
        };
        self.refuse_waiting(waits, refusal);
    }

    /// A VM is gone, and with it all that its requests have waited for.
    pub(super) fn refuse_ended(&mut self, id: VmId, name: &str) {
        for waiting in self.waiting.take_if(|waiting| waiting.vm == id) {
            self.answer(waiting.request, Reply::Refused(Refusal::Ended { vm: name.to_owned() }));
        }
    }
}
