//! A thread per VM that talks to its hypervisor, so that one that does not answer holds up no other.
//!
//! ```text
//!  connect ──▶ greeted, described ──▶ serving
//!     │           ▲      │               │
//!     │           │      ▼ no answer     │ no answer
//!     └────────▶ silent ◀────────────────┘
//! ```
//!
//! A silent VM is not given up: the connection stays, in the queue of a monitor that somebody else uses or with a
//! command that is still to be answered, and goes on with the first word from the other end.

use crate::{
    error::Refusal,
    message::{ConnectionId, Message},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};
use tokio::sync::mpsc as async_mpsc;
use vnuma_channel::{Channel, Identity};
use vnuma_hypervisor::{
    ObservedVcpus, Plugged, VmBackend, VmCandidate, VmConnection, VmError, VmEvent, roll_back,
};
use vnuma_process::{StopReason, copy_affinity, spawn_worker};
use vnuma_topology::VmDescription;

/// Between two descriptions of a VM, which cost QEMU and the kernel something. What asks for one meanwhile gets the next.
const DESCRIBE_PAUSE: Duration = Duration::from_millis(200);

/// A VM that has said nothing for so long is asked whether it still answers.
const ASK_AFTER: Duration = Duration::from_secs(20);

/// For the answer to a probe, until it is said that none comes: half a second, less what it takes to show that; and from
/// then on, until nothing more is asked.
const PROMPT: Duration = Duration::from_millis(450);
const PATIENCE: Duration = Duration::from_secs(1);

/// Between two attempts to make a silent VM answer: at first, and at most. It may also speak of itself.
const FIRST_ATTEMPT: Duration = Duration::from_secs(2);
const LAST_ATTEMPT: Duration = Duration::from_secs(10);

/// A connection breaks a moment before the process is seen to have ended.
const END_LIMIT: Duration = Duration::from_millis(500);

/// Most events taken before commands have their turn.
const EVENTS_A_ROUND: usize = 64;

/// What a VM's thread is asked to do.
#[derive(Debug)]
pub(crate) enum Command {
    /// Describe the VM again.
    Describe,
    /// See whether it still answers.
    Probe,
    /// Plug the channel; QEMU gets this socket.
    Attach(OwnedFd),
    /// Unplug the channel.
    Detach,
    /// Move a vCPU to a spare slot of a guest node.
    Replug { vcpu: u32, node: u32 },
    /// Copy an earlier vnumad's channel out of the hypervisor, for generations of this epoch.
    TakeOver { identity: Identity, epoch: u32 },
}

/// What a VM's thread reports.
#[derive(Debug)]
pub(crate) enum Report {
    /// Connected.
    Up { description: VmDescription, pidfd: OwnedFd, channel: bool },
    /// It has not answered a probe yet. [`Prompt`](Self::Prompt) follows if it still does soon, else [`Silent`](Self::Silent).
    Slow { error: VmError, pid: i32 },
    /// It has answered after all.
    Prompt,
    /// It does not answer; [`Up`](Self::Up) follows when it does.
    Silent { error: VmError, pid: i32 },
    /// What can be seen of it without its help.
    Glimpsed { pid: i32, pidfd: OwnedFd, glimpse: ObservedVcpus },
    /// There is no connection, or no more; the VM may live on. Nothing follows.
    Lost(VmError),
    /// The VM's process has ended. Nothing follows.
    Ended,
    /// Answer to [`Command::Describe`], when it succeeds.
    Described(VmDescription),
    /// Answer to [`Command::Attach`].
    Attached(Result<(), VmError>),
    /// Answer to [`Command::Detach`].
    Detached(Result<(), VmError>),
    /// Answer to [`Command::Replug`]: the new vCPU, and what the VM consists of now.
    Replugged(Result<(Plugged, VmDescription), VmError>),
    /// Answer to [`Command::TakeOver`].
    TakenOver(Result<Channel, Refusal>),
    /// The guest let go of the channel's device.
    Released,
    /// The guest boots again.
    Rebooted,
}

/// The other end of a VM's thread. The thread ends when this is dropped.
#[derive(Debug)]
pub(crate) struct VmThread {
    commands: mpsc::Sender<Command>,
    wake: Arc<EventFd>,
}

impl VmThread {
    /// Starts a thread that connects to `candidate` and reports to `messages`.
    pub(crate) fn start(
        id: ConnectionId,
        candidate: VmCandidate,
        backend: Box<dyn VmBackend>,
        messages: async_mpsc::Sender<Message>,
    ) -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = Arc::new(EventFd::from_value_and_flags(0, flags)?);
        let (commands, receiver) = mpsc::channel();
        let worker = Worker {
            id,
            commands: receiver,
            wake: Arc::clone(&wake),
            messages,
            candidate,
            ask_at: Instant::now() + ASK_AFTER,
            describe_wanted: false,
            describe_from: Instant::now(),
        };
        spawn_worker(&format!("vm-{id}"), move || worker.run(&*backend))?;
        Ok(Self { commands, wake })
    }

    /// Asks for something. False when the thread has ended.
    pub(crate) fn send(&self, command: Command) -> bool {
        // A full counter wakes as well as any other.
        self.commands.send(command).is_ok() && matches!(self.wake.write(1), Ok(_) | Err(Errno::EAGAIN))
    }
}

impl Drop for VmThread {
    fn drop(&mut self) {
        // Takes the commands' sender away before the wake-up, for the thread to see that.
        let (closed, _) = mpsc::channel();
        drop(std::mem::replace(&mut self.commands, closed));
        // Fails only when the counter is full, and then it wakes all the same.
        let _ = self.wake.write(1);
    }
}

struct Worker {
    id: ConnectionId,
    commands: mpsc::Receiver<Command>,
    wake: Arc<EventFd>,
    messages: async_mpsc::Sender<Message>,
    candidate: VmCandidate,
    /// When it is asked whether it still answers.
    ask_at: Instant,
    /// The VM is to be described, but not before this time.
    describe_wanted: bool,
    describe_from: Instant,
}

/// Why a worker stops.
enum Stop {
    /// Nobody is interested any more.
    Unwanted,
    /// The VM has ended.
    Ended,
    /// The connection is of no use any more.
    Lost(VmError),
    /// Nothing comes; something may yet.
    Silent(VmError),
}

impl From<VmError> for Stop {
    fn from(error: VmError) -> Self {
        match error {
            VmError::NoGreeting { .. } | VmError::Timeout { .. } => Self::Silent(error),
            error => Self::Lost(error),
        }
    }
}

impl Worker {
    fn run(mut self, backend: &dyn VmBackend) {
        let mut connection = match backend.connect(&self.candidate.handle) {
            Ok(connection) => connection,
            Err(error) => return drop(self.report(Report::Lost(error))),
        };
        let stop = loop {
            let met = self.meet(&mut *connection);
            let stop = met.map_or_else(|stop| stop, |()| self.serve(&mut *connection));
            let Stop::Silent(error) = stop else { break stop };
            if let Err(stop) = self.sit_out(&mut *connection, error) {
                break stop;
            }
        };
        let last = match stop {
            Stop::Unwanted => return,
            Stop::Ended => Report::Ended,
            Stop::Lost(error) | Stop::Silent(error) => {
                if ends_soon(&*connection, &error) {
                    Report::Ended
                } else {
                    if self.report_vcpus(&*connection).is_err() {
                        return;
                    }
                    Report::Lost(error)
                }
            }
        };
        // Closed before it is reported: whoever connects next finds the socket free.
        drop(connection);
        let _ = self.report(last);
    }

    /// Greets, describes, and reports that it is up.
    fn meet(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        connection.greet()?;
        let description = connection.describe()?;
        let channel = connection.tidy_channel()?;
        let pidfd = self.pidfd(connection)?;
        self.ask_at = Instant::now() + ASK_AFTER;
        self.report(Report::Up { description, pidfd, channel })
    }

    fn pidfd(&self, connection: &dyn VmConnection) -> Result<OwnedFd, VmError> {
        let (socket, pid) = (self.candidate.handle.to_string(), connection.pid());
        let copy = connection.pidfd().try_clone_to_owned();
        copy.map_err(|source| VmError::Process { socket, pid, source })
    }

    fn report_vcpus(&self, connection: &dyn VmConnection) -> Result<(), Stop> {
        let Some(glimpse) = connection.observe_vcpus() else { return Ok(()) };
        let (pid, pidfd) = (connection.pid(), self.pidfd(connection)?);
        self.report(Report::Glimpsed { pid, pidfd, glimpse })
    }

    /// Waits until there is a reason to try again; says meanwhile what is wrong.
    fn sit_out(&mut self, connection: &mut dyn VmConnection, error: VmError) -> Result<(), Stop> {
        let (pid, words) = (connection.pid(), error.to_string());
        self.report(Report::Silent { error, pid })?;
        self.report_vcpus(connection)?;
        let mut pause = FIRST_ATTEMPT;
        loop {
            let until = Instant::now() + pause;
            while Instant::now() < until {
                self.refuse_commands(connection, &words)?;
                let mut wait = [
                    PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
                    PollFd::new(connection.event_fd(), PollFlags::POLLIN),
                    PollFd::new(connection.pidfd(), PollFlags::POLLIN),
                ];
                wait_for(&mut wait, connection.pid(), timeout_at(until))?;
                if wait[2].any().unwrap_or(true) {
                    return Err(Stop::Ended);
                }
                if wait[1].any().unwrap_or(true) {
                    return Ok(());
                }
                // Empty when the time is up.
                let _ = self.wake.read();
            }
            // What stands still answers nothing, and what it is asked only piles up.
            if matches!(StopReason::of(pid), Ok(None)) {
                return Ok(());
            }
            pause = (pause * 2).min(LAST_ATTEMPT);
        }
    }

    /// Commands for a VM that does not answer.
    fn refuse_commands(&mut self, connection: &dyn VmConnection, why: &str) -> Result<(), Stop> {
        loop {
            let refusal = || VmError::Silent { vm: self.candidate.name.clone(), why: why.to_owned() };
            match self.commands.try_recv() {
                // Described it is as soon as it answers.
                Ok(Command::Describe | Command::Probe) => {}
                Ok(Command::Attach(_)) => self.report(Report::Attached(Err(refusal())))?,
                Ok(Command::Detach) => self.report(Report::Detached(Err(refusal())))?,
                Ok(Command::Replug { .. }) => self.report(Report::Replugged(Err(refusal())))?,
                // That needs no answer of it.
                Ok(Command::TakeOver { identity, epoch }) => self.take_over(connection, &identity, epoch)?,
                Err(mpsc::TryRecvError::Empty) => return Ok(()),
                Err(mpsc::TryRecvError::Disconnected) => return Err(Stop::Unwanted),
            }
        }
    }

    fn report(&self, report: Report) -> Result<(), Stop> {
        self.messages.blocking_send(Message::Vm { id: self.id, report }).map_err(|_| Stop::Unwanted)
    }

    fn serve(&mut self, connection: &mut dyn VmConnection) -> Stop {
        loop {
            if let Err(stop) = self.round(connection) {
                return stop;
            }
        }
    }

    /// Waits until there is something to do, and does it.
    fn round(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        self.events(connection)?;
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(connection, command)?,
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) => return Err(Stop::Unwanted),
            }
        }
        // Commands bring events with them, which the socket would not announce again.
        let all_taken = self.events(connection)?;
        self.describe_if_due(connection)?;
        self.ask_if_due(connection)?;
        let mut wait = [
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
            PollFd::new(connection.event_fd(), PollFlags::POLLIN),
            PollFd::new(connection.pidfd(), PollFlags::POLLIN),
        ];
        wait_for(&mut wait, connection.pid(), self.patience(all_taken))?;
        if wait[2].any().unwrap_or(true) {
            return Err(Stop::Ended);
        }
        // Empty when something else woke this thread.
        let _ = self.wake.read();
        Ok(())
    }

    /// How long nothing is to be done unless something happens.
    fn patience(&self, all_taken: bool) -> PollTimeout {
        if !all_taken {
            return PollTimeout::ZERO;
        }
        timeout_at(if self.describe_wanted { self.ask_at.min(self.describe_from) } else { self.ask_at })
    }

    /// Takes events. False if there may be more: a QEMU that never pauses keeps nobody from giving commands.
    fn events(&mut self, connection: &mut dyn VmConnection) -> Result<bool, Stop> {
        let (mut rebooted, mut all_taken) = (false, false);
        for _ in 0..EVENTS_A_ROUND {
            let Some(event) = connection.poll_event(Duration::ZERO)? else {
                all_taken = true;
                break;
            };
            match event {
                // Whether the guest runs is part of what the VM is.
                VmEvent::VcpusChanged | VmEvent::Stopped | VmEvent::Resumed => self.describe_wanted = true,
                VmEvent::ChannelDetached => self.report(Report::Released)?,
                VmEvent::Rebooted => rebooted = true,
                VmEvent::Disconnected => {
                    let vm = format!("VM of process {}", connection.pid());
                    return Err(Stop::Lost(VmError::Disconnected { vm }));
                }
                // The process's end is what counts, and the pidfd tells it.
                VmEvent::Shutdown => {}
            }
        }
        if rebooted {
            self.report(Report::Rebooted)?;
        }
        Ok(all_taken)
    }

    fn obey(&mut self, connection: &mut dyn VmConnection, command: Command) -> Result<(), Stop> {
        match command {
            Command::Describe => {
                self.describe_wanted = true;
                Ok(())
            }
            Command::Probe => {
                self.ask_at = Instant::now();
                Ok(())
            }
            Command::TakeOver { identity, epoch } => self.take_over(connection, &identity, epoch),
            Command::Attach(socket) => {
                let outcome = connection.attach_channel(socket);
                self.conclude(connection, outcome, Report::Attached)
            }
            Command::Detach => {
                let outcome = connection.detach_channel();
                self.conclude(connection, outcome, Report::Detached)
            }
            Command::Replug { vcpu, node } => {
                let outcome = replug(&self.candidate.name, connection, vcpu, node);
                self.describe_wanted = true;
                self.conclude(connection, outcome, Report::Replugged)
            }
        }
    }

    /// Reports how a command went; an error if nothing more can be asked.
    fn conclude<T>(
        &mut self,
        connection: &dyn VmConnection,
        outcome: Result<T, VmError>,
        answer: fn(Result<T, VmError>) -> Report,
    ) -> Result<(), Stop> {
        self.ask_at = Instant::now() + ASK_AFTER;
        if outcome.as_ref().is_err_and(|error| ends_soon(connection, error)) {
            return Err(Stop::Ended);
        }
        let stop = outcome.as_ref().err().and_then(ends_serving);
        self.report(answer(outcome))?;
        stop.map_or(Ok(()), Err)
    }

    /// Needs the hypervisor's process only, not its word.
    fn take_over(&self, connection: &dyn VmConnection, identity: &Identity, epoch: u32) -> Result<(), Stop> {
        let process = Path::new("/proc").join(connection.pid().to_string());
        let channel = Channel::take_over(identity, connection.pidfd(), &process, epoch);
        let vm = || self.candidate.name.clone();
        self.report(Report::TakenOver(channel.map_err(|source| Refusal::Channel { vm: vm(), source })))
    }

    /// Finds out that a VM does not answer before somebody needs it.
    fn ask_if_due(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        if Instant::now() < self.ask_at {
            return Ok(());
        }
        self.ask_at = Instant::now() + ASK_AFTER;
        // One that is stopped is known to be, without a question.
        if matches!(StopReason::of(connection.pid()), Ok(None)) { self.probe(connection) } else { Ok(()) }
    }

    /// An operator is to know soon, and commands are to be refused late: a QEMU that is busy for a moment does them
    /// yet.
    fn probe(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        let error = match connection.probe(PROMPT) {
            Err(error @ VmError::Timeout { .. }) => error,
            outcome => return Ok(outcome?),
        };
        self.report(Report::Slow { error, pid: connection.pid() })?;
        connection.probe(PATIENCE)?;
        self.report(Report::Prompt)
    }

    fn describe_if_due(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        if !self.describe_wanted || Instant::now() < self.describe_from {
            return Ok(());
        }
        let description = connection.describe()?;
        self.describe_wanted = false;
        self.describe_from = Instant::now() + DESCRIBE_PAUSE;
        self.ask_at = Instant::now() + ASK_AFTER;
        self.report(Report::Described(description))
    }
}

/// A new vCPU is plugged, and may run where the old one may before the guest uses it; then the old one is unplugged.
fn replug(
    vm: &str,
    connection: &mut dyn VmConnection,
    vcpu: u32,
    node: u32,
) -> Result<(Plugged, VmDescription), VmError> {
    let old = connection.removable_vcpu(vcpu)?;
    let new = connection.plug_vcpu(node)?;
    let failed = |reason| VmError::ReplugFailed { vm: vm.to_owned(), vcpu, reason };
    let moved = copy_affinity(connection.pidfd(), connection.pid(), old.tid, new.tid)
        .map_err(|error| failed(error.to_string()))
        .and_then(|()| connection.await_guest(new.apic_id))
        .and_then(|()| connection.unplug_vcpu(vcpu));
    moved.map_err(|cause| roll_back(connection, new, cause))?;
    let described = connection.describe();
    let undescribed = |source| {
        let vm = vm.to_owned();
        VmError::ReplugUndescribed { vm, vcpu, new: new.apic_id, source: Box::new(source) }
    };
    Ok((new, described.map_err(undescribed)?))
}

/// After these nothing can be asked, for now or for good.
fn ends_serving(error: &VmError) -> Option<Stop> {
    match error {
        VmError::Disconnected { vm } => Some(Stop::Lost(VmError::Disconnected { vm: vm.clone() })),
        VmError::Timeout { vm, command, limit_ms } => {
            let (vm, command) = (vm.clone(), command.clone());
            Some(Stop::Silent(VmError::Timeout { vm, command, limit_ms: *limit_ms }))
        }
        VmError::ReplugUndescribed { source, .. } => ends_serving(source),
        VmError::NotUndone { error, .. } => ends_serving(error),
        _ => None,
    }
}

/// Is a broken connection the first sign of the process's end?
fn ends_soon(connection: &dyn VmConnection, error: &VmError) -> bool {
    if !matches!(error, VmError::Disconnected { .. } | VmError::Io { .. }) {
        return false;
    }
    let mut wait = [PollFd::new(connection.pidfd(), PollFlags::POLLIN)];
    let timeout = timeout_at(Instant::now() + END_LIMIT);
    poll(&mut wait, timeout).is_ok_and(|ready| ready > 0)
}

/// Until then, rounded up, so as not to wake before the time.
fn timeout_at(time: Instant) -> PollTimeout {
    let left = time.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}

fn wait_for(wait: &mut [PollFd<'_>], pid: i32, timeout: PollTimeout) -> Result<(), Stop> {
    match poll(wait, timeout) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => {
            let (vm, command) = (format!("VM of process {pid}"), "poll".to_owned());
            Err(Stop::Lost(VmError::Io { vm, command, source: error.into() }))
        }
    }
}
