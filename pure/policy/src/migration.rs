//! A live migration of a VM, step by step. Pure: events come in, orders go out, and time is an argument.
//!
//! ```text
//!             Marked            Released           Begun               completed, gone
//!   Marking ─────────▶ Detaching ───────▶ Starting ──────▶ Sending ─────────────────────▶ Done
//!      │ refused          │ time is over     │ refused        │  │ the guest runs there     ▲
//!      │                  │                  ▼                │  └────────▶ PostCopy ───────┤ completed
//!      │                  │              Returning ◀──────────┘ failed,         │ failed    │
//!      ▼                  ▼                  │ Attached         cancelled       ▼           │
//!   Failed, Cancelled ◀───┴──────────────────┘                               Failed         │
//! ```
//!
//! A VM without a topology channel begins with `Starting`, and has nothing to return to. The first step marks the VM: whoever finds a
//! VM that is marked, runs and has no channel attaches it. So the way back is there before the first step of the way out, also for
//! another vnumad after this one has ended. `PostCopy` has no way back: the guest runs at the destination, and half of its memory with it.
//!
//! When it is not known whether the order to begin has reached the hypervisor, that is asked how far it is. It never gets the order twice.

use crate::task::{Task, TaskId};
use vnuma_model::{MigrationProgress, MigrationStatus};

/// Why a guest that went on at the destination stands still.
pub const BROKE: &str =
    "the connection broke while memory was on its way, and the VM stands still till its hypervisor goes on";

/// What the hypervisor was told while it sends memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Nothing.
    Nothing,
    /// To have the guest go on at the destination.
    Switch,
    /// To give the migration up.
    Cancel,
    /// The same, and it has not said whether it has.
    CancelPerhaps,
}

/// How far a migration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Phase {
    /// The way back is prepared.
    #[strum(serialize = "detaching")]
    Marking,
    /// The guest is asked to let go of the channel's device.
    Detaching,
    /// The hypervisor is to be told to migrate; or, with `true`, was, and it is not known whether that has reached it.
    Starting(bool),
    /// Memory is sent while the guest runs here.
    Sending(Told),
    /// The guest runs at the destination, and its memory follows.
    PostCopy,
    /// It failed or was cancelled, and the VM is being attached again.
    Returning,
    /// The VM is at the destination.
    Done,
    /// It was cancelled, and the VM is here as it was.
    Cancelled,
    /// It failed.
    Failed,
}

impl Phase {
    /// For the API.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// True if the migration has ended.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled | Self::Failed)
    }
}

/// What is to be done now. Most orders are requests to the VM's hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Mark it to be attached when it runs without a channel.
    Mark,
    /// Unplug the channel's device.
    Detach,
    /// Begin to migrate.
    Begin,
    /// Say how far it is.
    Look,
    /// Have the guest go on at the destination, and say how far it is.
    Switch,
    /// Give up, and say how far it is.
    Cancel,
    /// Wait no longer for what is not there in time.
    GiveUp,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MigrationEvent {
    /// It is marked, or could not be.
    Marked(Result<(), String>),
    /// The guest has let go of the channel's device.
    Released,
    /// The guest has not let go of it yet.
    ReleasePending,
    /// It cannot be asked to.
    ReleaseFailed(String),
    /// The hypervisor has begun, or refuses to.
    Begun(Result<(), String>),
    /// It has not answered whether it has.
    BeginUnanswered,
    /// It was not marked, or not told to begin, as it is busy: it can be asked again.
    Busy(String),
    /// How far it is.
    Looked(MigrationProgress),
    /// It has not said how far it is.
    LookFailed(String),
    /// The VM is attached again.
    Attached,
    /// It could not be attached yet.
    AttachFailed(String),
    /// An operator wants it to end.
    CancelWanted,
    /// The hypervisor has to be connected to again: what it was asked last may have been done or not.
    ConnectionLost,
    /// The VM's guest is at the destination, by what its hypervisor says of it.
    Left,
}

/// A migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Where to, as the hypervisor takes it.
    pub destination: String,
    /// The guest is to go on there before its memory is there.
    pub post_copy: bool,
    /// The VM had a channel, so that it gets it again.
    pub attached: bool,
    /// How far the hypervisor was when it was asked last.
    pub progress: MigrationProgress,
    /// Why it failed, or what is in its way.
    pub problem: Option<String>,
    phase: Phase,
    /// Since when.
    pub(crate) since_ns: u64,
    /// What the hypervisor was asked, and when it has answered last in this phase.
    pub(crate) asked: Task<(), Order, u64>,
    /// When the guest was first asked to let go of the device.
    pub(crate) release_asked_ns: Option<u64>,
    /// When an operator has cancelled it.
    pub(crate) cancelled_ns: Option<u64>,
}

impl Migration {
    /// A migration that has yet to begin.
    pub fn new(destination: String, post_copy: bool, attached: bool, now_ns: u64) -> Self {
        Self {
            destination,
            post_copy,
            attached,
            progress: MigrationProgress::default(),
            problem: None,
            phase: if attached { Phase::Marking } else { Phase::Starting(false) },
            since_ns: now_ns,
            asked: Task::default(),
            release_asked_ns: None,
            cancelled_ns: None,
        }
    }

    /// How far it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// True if an operator has cancelled it.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled_ns.is_some()
    }

    /// True if it can still be cancelled: the guest runs here.
    pub fn may_be_cancelled(&self) -> bool {
        let runs_there = matches!(self.phase, Phase::Sending(Told::Switch) | Phase::PostCopy);
        !runs_there && !self.may_attach()
    }

    /// True if the VM has to stay marked: the guest has released the device, or may do so yet.
    pub fn keeps_mark(&self) -> bool {
        self.release_asked_ns.is_some() && self.phase != Phase::Done
    }

    /// True if the VM may be attached: the migration has ended, or returns.
    pub fn may_attach(&self) -> bool {
        self.phase.is_over() || self.phase == Phase::Returning
    }

    /// An order was carried out, or passed to the hypervisor under this id.
    pub fn ordered(&mut self, task: TaskId, order: Order, now_ns: u64) {
        match order {
            Order::GiveUp => return self.give_up(now_ns),
            Order::Detach => _ = self.release_asked_ns.get_or_insert(now_ns),
            Order::Begin => self.phase = Phase::Starting(true),
            Order::Switch => self.phase = Phase::Sending(Told::Switch),
            Order::Cancel => self.phase = Phase::Sending(Told::Cancel),
            Order::Mark | Order::Look => {}
        }
        self.asked.begin(task, order);
    }

    fn give_up(&mut self, now_ns: u64) {
        match self.phase {
            Phase::Detaching => {
                let asked_ns = self.release_asked_ns.unwrap_or(now_ns);
                let seconds = now_ns.saturating_sub(asked_ns) / 1_000_000_000;
                self.end(format!(
                    "the guest has not released the channel's device within {seconds} s; if it does, the VM is attached again"
                ));
            }
            Phase::Returning => {
                let why = self.problem.take().unwrap_or_default();
                self.end(format!("{why}; the VM is not attached yet, which is tried on"));
            }
            _ => {}
        }
    }

    /// Was the hypervisor asked for it under this id, and has not answered?
    pub fn waits_for(&self, task: TaskId) -> bool {
        self.asked.is(task)
    }

    /// Something happened.
    pub fn on(&mut self, event: MigrationEvent, now_ns: u64) {
        use MigrationEvent as E;
        if self.phase.is_over() {
            return;
        }
        let cancelled = self.is_cancelled();
        match (self.phase, event) {
            // The hypervisor may have left before it answered.
            (_, E::Left) => (self.phase, self.problem) = (Phase::Done, None),
            (Phase::Marking, E::Marked(Ok(()))) => {
                self.problem = None;
                if cancelled { self.finish() } else { self.enter(Phase::Detaching, now_ns) }
            }
            (Phase::Marking, E::Marked(Err(why))) | (Phase::Detaching, E::ReleaseFailed(why)) => {
                self.end(why)
            }
            (Phase::Detaching, E::Released) | (Phase::Starting(_), E::Busy(_)) if cancelled => {
                self.turn_back(None, now_ns);
            }
            (Phase::Detaching, E::Released) => self.enter(Phase::Starting(false), now_ns),
            (Phase::Detaching, E::ReleasePending) | (Phase::Marking, E::Busy(_)) if cancelled => {
                self.finish()
            }
            // The guest is asked again, in case a reset has made the guest forget it.
            (Phase::Detaching, E::ReleasePending) => self.answered(now_ns),
            (Phase::Starting(_), E::Begun(Ok(()))) => {
                self.problem = None;
                self.enter(Phase::Sending(Told::Nothing), now_ns);
            }
            (Phase::Starting(_), E::Begun(Err(why))) => self.turn_back(Some(why), now_ns),
            (Phase::Starting(_), E::BeginUnanswered) => self.answered(now_ns),
            (phase @ (Phase::Marking | Phase::Starting(_)), E::Busy(why)) => {
                self.answered(now_ns);
                self.problem = Some(why);
                self.phase = if phase == Phase::Marking { phase } else { Phase::Starting(false) };
            }
            (Phase::Starting(_) | Phase::Sending(_) | Phase::PostCopy, E::Looked(progress)) => {
                self.looked(progress, now_ns);
            }
            (Phase::Starting(_) | Phase::Sending(_) | Phase::PostCopy, E::LookFailed(why)) => {
                self.unanswered(now_ns);
                self.problem = Some(why);
            }
            (Phase::Returning, E::Attached) => self.finish(),
            (Phase::Returning, E::AttachFailed(why)) if self.problem.is_none() => self.problem = Some(why),
            (_, E::CancelWanted) if self.may_be_cancelled() => self.cancel(now_ns),
            (_, E::ConnectionLost) if self.asked.is_under_way() => self.unanswered(now_ns),
            _ => {}
        }
    }

    /// What was asked may have reached nobody, or was refused. Whether there is still something to cancel is looked at first: libvirt
    /// refuses to end a migration that has ended.
    fn unanswered(&mut self, now_ns: u64) {
        if self.asked.begun() == Some(&Order::Cancel) {
            self.phase = Phase::Sending(Told::CancelPerhaps);
        }
        self.answered(now_ns);
    }

    fn answered(&mut self, now_ns: u64) {
        self.asked.give_up();
        self.asked.last = Some(now_ns);
    }

    fn enter(&mut self, phase: Phase, now_ns: u64) {
        (self.phase, self.since_ns, self.asked) = (phase, now_ns, Task::default());
    }

    fn cancel(&mut self, now_ns: u64) {
        self.cancelled_ns = Some(now_ns);
        match self.phase {
            // What the hypervisor was asked is answered first, as it cannot be taken back.
            _ if self.asked.is_under_way() => {}
            Phase::Marking | Phase::Detaching => self.finish(),
            Phase::Starting(false) => self.turn_back(None, now_ns),
            _ => {}
        }
    }

    fn looked(&mut self, progress: MigrationProgress, now_ns: u64) {
        use MigrationStatus as Is;
        let (status, why) = (progress.status, progress.problem.clone());
        let or = |what: &str| Some(why.clone().unwrap_or_else(|| what.to_owned()));
        self.problem = None;
        match (self.phase, status) {
            // What had ended before is an earlier migration, or the one that the VM came by.
            (Phase::Starting(_), Is::None | Is::Cancelled | Is::Completed | Is::Failed) => {
                return self.turn_back(or("the hypervisor has not begun to migrate"), now_ns);
            }
            (Phase::Starting(_), _) => self.enter(Phase::Sending(Told::Nothing), now_ns),
            _ => self.answered(now_ns),
        }
        self.progress = progress;
        match (status, self.phase) {
            (Is::Setup | Is::Active | Is::Cancelling, Phase::Sending(Told::CancelPerhaps)) => {
                self.phase = Phase::Sending(Told::Nothing);
            }
            (Is::Setup | Is::Active | Is::Cancelling, _) => {}
            (Is::PostCopy, _) => (self.phase, self.problem) = (Phase::PostCopy, why),
            (Is::PostCopyPaused, _) => (self.phase, self.problem) = (Phase::PostCopy, or(BROKE)),
            (Is::Completed, _) => self.phase = Phase::Done,
            // A hypervisor may call what it was told to end a failure of the connection.
            (Is::Cancelled, Phase::Sending(_)) if self.is_cancelled() => self.turn_back(None, now_ns),
            (Is::Cancelled, _) => self.turn_back(or("somebody has cancelled it"), now_ns),
            (Is::Failed, _) => self.turn_back(or("the hypervisor does not say why"), now_ns),
            (Is::None, _) => self.turn_back(or("the hypervisor knows of no migration any more"), now_ns),
        }
    }

    /// The migration fails or is cancelled: the VM gets its channel back if it had one.
    fn turn_back(&mut self, why: Option<String>, now_ns: u64) {
        self.problem = why;
        if self.phase == Phase::PostCopy || !self.attached {
            return self.finish();
        }
        self.enter(Phase::Returning, now_ns);
    }

    fn end(&mut self, why: String) {
        self.problem = Some(why);
        self.finish();
    }

    fn finish(&mut self) {
        self.asked.give_up();
        let cancelled = self.is_cancelled() && self.phase != Phase::PostCopy;
        self.phase = if cancelled { Phase::Cancelled } else { Phase::Failed };
    }
}
