//! Requests that wait: who asked, of which VM, until what happens, and what is done then.
//!
//! When a VM goes, or its hypervisor does not answer, all of its requests are found here.

use super::{
    Core,
    event::Level,
    refusal::Refusal,
    reply::{Reply, ReplyTo, Requester},
};
use vnuma_api as api;
use vnuma_policy::world::{RehomeWish, RequestId, ResizeWish, VmId};

/// An answer that is due: it shows things as they are when it is given, or says why not.
pub(super) struct Due {
    show: Box<Show>,
    requester: Requester,
}

type Show = dyn FnOnce(Result<&Core, Refusal>) -> Reply + Send;

impl Due {
    pub(super) fn new<T: Send + 'static>(
        to: ReplyTo<T>,
        show: impl FnOnce(&Core) -> Result<T, Refusal> + Send + 'static,
    ) -> Self {
        let requester = to.requester.clone();
        Self { show: Box::new(move |core| to.with(core.and_then(show))), requester }
    }

    pub(super) fn reply(self, core: Result<&Core, Refusal>) -> Reply {
        (self.show)(core)
    }
}

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
    /// The move that this request wants, if one does, was made, or could not be.
    Moved(Option<RequestId>),
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
    Answer(Due),
    /// A guest node gets another home. If a policy wants it, no client waits for an answer.
    Rehome(RehomeWish, Option<ReplyTo<api::Rehome>>),
    /// A guest node gets another size.
    Resize(ResizeWish, ReplyTo<api::Sizes>),
}

impl Then {
    /// Does a policy want it, and no client?
    pub(super) fn is_a_policys(&self) -> bool {
        matches!(self, Self::Rehome(_, None))
    }

    /// Is it an answer whose client pays for what it waits for?
    fn is_paid(&self) -> bool {
        matches!(self, Self::Answer(due) if due.requester.payer.is_some())
    }

    /// Does it wait for the answer no more, who asked?
    fn is_in_vain(&self) -> bool {
        match self {
            Self::Answer(due) => due.requester.has_gone(),
            Self::Rehome(_, Some(to)) => to.requester.has_gone(),
            Self::Resize(_, to) => to.requester.has_gone(),
            // A policy stays.
            Self::Rehome(_, None) => false,
        }
    }
}

/// A request that waits.
pub(super) struct Waiting {
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
        self.until == Until::Described || matches!(self.then, Then::Resize(..))
    }
}

/// All that wait, in the order in which they came. One whose client has gone is as if it had not come.
#[derive(Default)]
pub(super) struct WaitingList(Vec<Waiting>);

impl WaitingList {
    /// Does anything of a VM wait for this?
    pub(super) fn has(&self, vm: VmId, until: Until) -> bool {
        let waits = |waiting: &Waiting| (waiting.vm, waiting.until) == (vm, until);
        self.0.iter().any(|waiting| waits(waiting) && !waiting.then.is_in_vain())
    }

    /// Takes out those for which this holds.
    pub(super) fn take_if(&mut self, mut holds: impl FnMut(&Waiting) -> bool) -> Vec<Waiting> {
        let taken = self.0.extract_if(.., |waiting| holds(waiting));
        taken.filter(|waiting| !waiting.then.is_in_vain()).collect()
    }

    /// Forgets those whose clients have gone, which may wait for something that never comes.
    pub(super) fn forget_gone(&mut self) {
        self.0.retain(|waiting| !waiting.then.is_in_vain());
    }

    /// Takes out what waits for this.
    pub(super) fn take(&mut self, vm: VmId, until: Until) -> Vec<Waiting> {
        self.take_if(|waiting| (waiting.vm, waiting.until) == (vm, until))
    }
}

impl Core {
    /// Adds a request to those that wait.
    pub(super) fn wait(&mut self, vm: VmId, until: Until, then: Then) {
        self.waiting.0.push(Waiting { vm, until, then });
    }

    /// What these requests have waited for has happened.
    pub(super) fn reached(&mut self, id: VmId, until: Until) {
        for Waiting { then, .. } in self.waiting.take(id, until) {
            match then {
                Then::Rehome(..) | Then::Resize(..) if until == Until::Described => {
                    self.observe_before(id, then);
                }
                then => self.begin(id, then),
            }
        }
    }

    /// A client could not pay for a description: it is answered by what is known. Requests of others wait for theirs.
    pub(super) fn not_described(&mut self, id: VmId) {
        let theirs = |waiting: &Waiting| {
            (waiting.vm, waiting.until) == (id, Until::Described) && waiting.then.is_paid()
        };
        for waiting in self.waiting.take_if(theirs) {
            self.begin(id, waiting.then);
        }
    }

    /// An authorised request gets a fresh look, whatever it costs: by an old one it could be refused or allowed wrongly for minutes.
    fn observe_before(&mut self, id: VmId, then: Then) {
        match self.world.observe_now(id, 0, self.now_ns) {
            true => self.wait(id, Until::MemoryObserved, then),
            false => self.begin(id, then),
        }
    }

    pub(super) fn begin(&mut self, id: VmId, then: Then) {
        match then {
            Then::Answer(due) => self.replies.push((due, None)),
            Then::Rehome(wish, to) => match (self.begin_rehome(id, wish), to) {
                (Ok(planned), Some(to)) => self.answer(to, move |core| core.rehome_of(id, planned.as_ref())),
                (Ok(_), None) => {}
                (Err(refusal), to) => self.refuse(Then::Rehome(wish, to), refusal),
            },
            Then::Resize(wish, to) => match self.begin_resize(id, &wish) {
                Ok(planned) => self.answer(to, move |core| core.sizes_of(id, planned.as_ref())),
                Err(refusal) => self.refuse(Then::Resize(wish, to), refusal),
            },
        }
    }

    /// Refuses a request. A policy that wants another home gets no answer.
    pub(super) fn refuse(&mut self, then: Then, refusal: Refusal) {
        match then {
            Then::Answer(due) => self.replies.push((due, Some(refusal))),
            Then::Rehome(_, Some(to)) => self.answer(to, |_| Err(refusal)),
            Then::Resize(_, to) => self.answer(to, |_| Err(refusal)),
            Then::Rehome(_, None) => {
                self.log(None, Level::Warn, format!("{refusal}; its vCPUs have come to stay elsewhere"));
            }
        }
    }

    /// What these requests wait for will not happen.
    pub(super) fn refuse_waiting(&mut self, holds: impl Fn(&Waiting) -> bool, refusal: impl Fn() -> Refusal) {
        for waiting in self.waiting.take_if(holds) {
            self.refuse(waiting.then, refusal());
        }
    }

    /// Refuses the first of those that wait for this; the others are answered with the present state.
    pub(super) fn refuse_first(&mut self, id: VmId, until: Until, refusal: Refusal) {
        let mut refusal = Some(refusal);
        for Waiting { then, .. } in self.waiting.take(id, until) {
            match refusal.take() {
                Some(refusal) => self.refuse(then, refusal),
                None => self.begin(id, then),
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
            if !matches!(waiting.then, Then::Rehome(_, None)) {
                self.refuse(waiting.then, Refusal::Ended { vm: name.to_owned() });
            }
        }
    }
}
