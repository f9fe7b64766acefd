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
//! When it is not known whether QEMU was reached with the order to begin, it is asked how far it is, and never told to begin twice.

use vnuma_model::{MigrationProgress, MigrationStatus};

/// Between two looks at how far it is.
const LOOK_NS: u64 = 250_000_000;
/// For the guest to let go of the channel's device.
const RELEASE_NS: u64 = 30_000_000_000;
/// For the channel to be there again afterwards. Whoever attaches goes on after that.
const RETURN_NS: u64 = 60_000_000_000;
/// The memory is sent once while the guest runs here before it goes on there: most of what it needs then is there.
const PASSES_BEFORE_SWITCH: u64 = 2;
/// Why a guest that went on at the destination stands still.
const BROKE: &str = "the connection broke while memory was on its way; the hypervisor can go on (migrate-recover), and the VM stands still till then";

/// How far a migration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The way back is prepared.
    Marking,
    /// The guest is asked to let go of the channel's device.
    Detaching,
    /// QEMU is told to migrate.
    Starting,
    /// Memory is sent while the guest runs here.
    Sending,
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
        match self {
            Self::Marking | Self::Detaching => "detaching",
            Self::Starting => "starting",
            Self::Sending => "sending",
            Self::PostCopy => "post-copy",
            Self::Returning => "returning",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }

    /// True if the migration has ended.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled | Self::Failed)
    }
}

/// What is to be done now. Most orders are requests to the VM's QEMU.
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
    /// QEMU has begun, or refuses to.
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
    /// QEMU has to be connected to again: what it was asked last may have been done or not.
    ConnectionLost,
    /// The VM's guest is at the destination, by what its QEMU says of it.
    Left,
}

/// A migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Where to, as QEMU takes it.
    pub destination: String,
    /// The guest is to go on there before its memory is there.
    pub post_copy: bool,
    /// The VM had a channel, so that it gets it again.
    pub attached: bool,
    /// How far QEMU was when it was asked last.
    pub progress: MigrationProgress,
    /// Why it failed, or what is in its way.
    pub problem: Option<String>,
    phase: Phase,
    /// What QEMU was asked and has not answered yet.
    asked: Option<Order>,
    /// QEMU was told to begin, and it is not known whether that has reached it.
    unsure: bool,
    /// The guest was asked to let go of the device.
    release_asked: bool,
    /// It was told to go on at the destination.
    switched: bool,
    cancel: bool,
    cancel_asked: bool,
    /// QEMU has not said whether it has given the migration up.
    cancel_unsure: bool,
    next_ns: u64,
    until_ns: Option<u64>,
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
            phase: if attached { Phase::Marking } else { Phase::Starting },
            asked: None,
            unsure: false,
            release_asked: false,
            switched: false,
            cancel: false,
            cancel_asked: false,
            cancel_unsure: false,
            next_ns: now_ns,
            until_ns: None,
        }
    }

    /// How far it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// True if an operator has cancelled it.
    pub fn is_cancelled(&self) -> bool {
        self.cancel
    }

    /// True if it can still be cancelled: the guest runs here.
    pub fn may_be_cancelled(&self) -> bool {
        !self.switched && !self.phase.is_over() && self.phase != Phase::Returning
    }

    /// True if the VM has to stay marked: the guest has released the device, or may do so yet.
    pub fn keeps_mark(&self) -> bool {
        self.release_asked && self.phase != Phase::Done
    }

    /// True if the VM may be attached: the migration has ended, or returns.
    pub fn may_attach(&self) -> bool {
        self.phase.is_over() || self.phase == Phase::Returning
    }

    /// What is to be done now. `answers`: QEMU can be asked.
    pub fn due(&self, answers: bool, now_ns: u64) -> Option<Order> {
        if self.until_ns.is_some_and(|until_ns| until_ns <= now_ns) && !self.phase.is_over() {
            return Some(Order::GiveUp);
        }
        if !answers || self.asked.is_some() || now_ns < self.next_ns { None } else { self.next() }
    }

    fn next(&self) -> Option<Order> {
        match self.phase {
            Phase::Marking => Some(Order::Mark),
            Phase::Detaching => Some(Order::Detach),
            Phase::Starting if self.unsure => Some(Order::Look),
            Phase::Starting => Some(Order::Begin),
            Phase::Sending if self.cancel && !self.cancel_asked => Some(Order::Cancel),
            Phase::Sending if self.wants_switch() => Some(Order::Switch),
            Phase::Sending | Phase::PostCopy => Some(Order::Look),
            Phase::Returning | Phase::Done | Phase::Cancelled | Phase::Failed => None,
        }
    }

    fn wants_switch(&self) -> bool {
        self.post_copy && !self.cancel && self.progress.passes >= PASSES_BEFORE_SWITCH
    }

    /// An order was carried out, or passed to QEMU.
    pub fn ordered(&mut self, order: Order, now_ns: u64) {
        self.asked = Some(order);
        match order {
            Order::Detach => {
                self.release_asked = true;
                self.until_ns.get_or_insert(now_ns.saturating_add(RELEASE_NS));
            }
            Order::Begin => self.unsure = true,
            Order::Switch => self.switched = true,
            Order::Cancel => self.cancel_asked = true,
            Order::GiveUp => self.give_up(),
            Order::Mark | Order::Look => {}
        }
    }

    /// When something is due, if nothing else happens. `answers`: QEMU can be asked.
    pub fn deadline_ns(&self, answers: bool) -> Option<u64> {
        let next = self.next().filter(|_| answers && self.asked.is_none()).map(|_| self.next_ns);
        next.into_iter().chain(self.until_ns.filter(|_| !self.phase.is_over())).min()
    }

    fn give_up(&mut self) {
        (self.asked, self.until_ns) = (None, None);
        match self.phase {
            Phase::Detaching => {
                let seconds = RELEASE_NS / 1_000_000_000;
                self.end(format!(
                    "the guest has not released the channel's device within {seconds} s; if it does, the VM is attached again"
                ));
            }
            Phase::Returning => {
                let why = self.problem.take().unwrap_or_default();
                self.problem = Some(format!("{why}; the VM is not attached yet, which is tried on"));
                self.finish();
            }
            _ => {}
        }
    }

    /// Something happened.
    pub fn on(&mut self, event: MigrationEvent, now_ns: u64) {
        use MigrationEvent as E;
        if self.phase.is_over() {
            return;
        }
        match (self.phase, event) {
            // QEMU may have left before it answered.
            (_, E::Left) => (self.phase, self.problem) = (Phase::Done, None),
            (Phase::Marking, E::Marked(outcome)) => {
                self.answered(now_ns);
                self.problem = None;
                match outcome {
                    Ok(()) if self.cancel => self.finish(),
                    Ok(()) => self.phase = Phase::Detaching,
                    Err(why) => self.end(why),
                }
            }
            (Phase::Detaching, E::Released) => {
                self.answered(now_ns);
                self.until_ns = None;
                self.phase = Phase::Starting;
                if self.cancel {
                    self.turn_back(None, now_ns);
                }
            }
            // The guest is asked again, in case a reset has made the guest forget it.
            (Phase::Detaching, E::ReleasePending) => {
                self.answered(now_ns);
                self.next_ns = now_ns.saturating_add(4 * LOOK_NS);
                if self.cancel {
                    self.finish();
                }
            }
            (Phase::Detaching, E::ReleaseFailed(why)) => self.end(why),
            (Phase::Starting, E::Begun(Ok(()))) => {
                self.answered(now_ns);
                (self.phase, self.unsure, self.problem) = (Phase::Sending, false, None);
            }
            (Phase::Marking | Phase::Starting, E::Busy(why)) => {
                (self.asked, self.unsure) = (None, false);
                match (self.cancel, self.phase) {
                    (true, Phase::Marking) => self.finish(),
                    (true, _) => self.turn_back(None, now_ns),
                    _ => self.problem = Some(why),
                }
                self.next_ns = now_ns.saturating_add(LOOK_NS);
            }
            (Phase::Starting, E::Begun(Err(why))) => self.turn_back(Some(why), now_ns),
            (Phase::Starting, E::BeginUnanswered) => {
                self.asked = None;
                self.next_ns = now_ns.saturating_add(LOOK_NS);
            }
            (Phase::Starting | Phase::Sending | Phase::PostCopy, E::Looked(progress)) => {
                self.looked(progress, now_ns);
            }
            (Phase::Starting | Phase::Sending | Phase::PostCopy, E::LookFailed(why)) => {
                self.forget_asked();
                self.problem = Some(why);
                self.next_ns = now_ns.saturating_add(LOOK_NS);
            }
            (Phase::Returning, E::Attached) => self.finish(),
            (Phase::Returning, E::AttachFailed(why)) if self.problem.is_none() => self.problem = Some(why),
            (_, E::CancelWanted) if self.may_be_cancelled() => self.cancel_wanted(now_ns),
            (_, E::ConnectionLost) if self.asked.is_some() => {
                self.forget_asked();
                self.next_ns = now_ns.saturating_add(LOOK_NS);
            }
            _ => {}
        }
    }

    /// What was asked may have reached nobody, or was refused. Whether there is still something to cancel is looked at first: libvirt
    /// refuses to end a migration that has ended.
    fn forget_asked(&mut self) {
        self.cancel_unsure |= self.asked == Some(Order::Cancel);
        self.asked = None;
    }

    fn answered(&mut self, now_ns: u64) {
        self.asked = None;
        self.next_ns = now_ns;
    }

    fn cancel_wanted(&mut self, now_ns: u64) {
        self.cancel = true;
        match self.phase {
            // What QEMU was asked is answered first, as it cannot be taken back.
            _ if self.asked.is_some() => {}
            Phase::Marking | Phase::Detaching => self.finish(),
            Phase::Starting if !self.unsure => self.turn_back(None, now_ns),
            _ => self.next_ns = now_ns,
        }
    }

    fn looked(&mut self, progress: MigrationProgress, now_ns: u64) {
        use MigrationStatus as Is;
        self.asked = None;
        self.next_ns = now_ns.saturating_add(LOOK_NS);
        self.problem = None;
        let why = progress.problem.clone();
        if self.phase == Phase::Starting {
            // What had ended before is an earlier migration, or the one that the VM came by.
            match progress.status {
                Is::Setup | Is::Active | Is::Cancelling | Is::PostCopy | Is::PostCopyPaused => {
                    (self.phase, self.unsure, self.next_ns) = (Phase::Sending, false, now_ns);
                }
                Is::None | Is::Cancelled | Is::Completed | Is::Failed => {
                    let why = why.unwrap_or_else(|| "the hypervisor has not begun to migrate".to_owned());
                    return self.turn_back(Some(why), now_ns);
                }
            }
        }
        let status = progress.status;
        self.progress = progress;
        let or = |what: &str| Some(why.clone().unwrap_or_else(|| what.to_owned()));
        match status {
            Is::Setup | Is::Active | Is::Cancelling => {
                self.cancel_asked &= !std::mem::take(&mut self.cancel_unsure);
            }
            Is::PostCopy => (self.phase, self.switched, self.problem) = (Phase::PostCopy, true, why),
            Is::PostCopyPaused => {
                (self.phase, self.switched, self.problem) = (Phase::PostCopy, true, or(BROKE));
            }
            Is::Completed => self.phase = Phase::Done,
            // A hypervisor may call what it was told to end a failure of the connection.
            Is::Cancelled if self.cancel && self.phase == Phase::Sending => self.turn_back(None, now_ns),
            Is::Cancelled => self.turn_back(or("somebody has cancelled it"), now_ns),
            Is::Failed => self.turn_back(or("the hypervisor does not say why"), now_ns),
            Is::None => self.turn_back(or("the hypervisor knows of no migration any more"), now_ns),
        }
    }

    /// The migration fails or is cancelled: the VM gets its channel back if it had one.
    fn turn_back(&mut self, why: Option<String>, now_ns: u64) {
        self.asked = None;
        self.problem = why;
        if self.phase == Phase::PostCopy || !self.attached {
            return self.finish();
        }
        self.phase = Phase::Returning;
        self.until_ns = Some(now_ns.saturating_add(RETURN_NS));
    }

    fn end(&mut self, why: String) {
        self.problem = Some(why);
        self.finish();
    }

    fn finish(&mut self) {
        self.asked = None;
        let cancelled = self.cancel && self.phase != Phase::PostCopy;
        self.phase = if cancelled { Phase::Cancelled } else { Phase::Failed };
    }
}
