//! One thread per connection to a hypervisor, so that a silent one delays no other. The thread also makes the
//! channels and writes their records, which may wait for a disk.
//!
//! ```text
//!  connect ──▶ handshake ──▶ serving
//!     │           ▲   │         │
//!     │           │   ▼ no answer
//!     └────────▶ waiting until responsive
//! ```
//!
//! The connection to a silent VM is kept. It waits in the queue of a monitor that another client uses, or for the answer
//! to a command, and resumes on the next reply.

use super::{
    channel_records::ChannelRecords,
    descriptions::{Descriptions, Listening},
    inbox::{Inbox, Message},
    locator::Reader,
    pin_orders::{PinnedMove, PolicyPins, Unpin},
    report::Report,
};
use crate::core::{
    Refusal,
    event::{Ask, Outcome, Replugged, Report as CoreReport},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};
use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use tracing::warn;
use vnuma_channel::Channel;
use vnuma_hypervisor::{Migrates, PinError, VmBackend, VmConnection, VmError, VmEvent, roll_back};
use vnuma_model::{Backoff, Party, VmDescription, VmHandle, VmId};
use vnuma_policy::world::{ConnectionId, TaskId};
use vnuma_process::{Jobs, Next, Worker, Workers, copy_affinity, main_loop, stopped};

/// Time limits of a probe: first until the missing answer is reported (half a second, less the time to show it), then
/// until the VM counts as unresponsive.
const PROMPT: Duration = Duration::from_millis(450);
const PATIENCE: Duration = Duration::from_secs(1);

/// Time between two attempts to make a silent VM answer: first and longest. The VM may also answer without one.
const ATTEMPTS: Backoff = Backoff::of(Duration::from_secs(2), Duration::from_secs(10));

/// How long a VM that has spent its budget waits at most for its first description over a connection.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// A connection breaks shortly before the process's end is seen.
const END_LIMIT: Duration = Duration::from_millis(500);

/// Only the shell asks for pins, and only of VMs whose abilities say so.
const NO_PINS: &str = "whoever manages the VM keeps no pins";

/// Most events taken before commands have their turn.
const EVENTS_A_ROUND: u32 = 64;

/// Complaints that are remembered, so that none is logged with each description.
const COMPLAINTS: usize = 64;

/// The handle of a worker. Its thread ends when this is dropped.
#[derive(Debug)]
pub(crate) struct VmWorker {
    jobs: Worker<Job>,
}

impl VmWorker {
    /// Starts a thread that connects to what is behind `handle` and reports to `inbox`.
    pub(crate) fn start(
        workers: &Workers,
        (vm, connection): (VmId, ConnectionId),
        (handle, name): (VmHandle, String),
        backend: Box<dyn VmBackend>,
        records: ChannelRecords,
        reader: Reader,
        inbox: Arc<Inbox>,
    ) -> io::Result<Self> {
        let work = move |jobs, wake| {
            // Dropped last, when the connection is closed.
            let _lost = LostByPanic { id: connection, vm: handle.to_string(), inbox: Arc::clone(&inbox) };
            let (party, ledger) = (Party::Vm(vm), inbox.ledger.clone());
            let task = Task {
                id: connection,
                party,
                jobs,
                wake,
                inbox,
                handle,
                name,
                records,
                reader,
                probe_wanted: false,
                descriptions: Descriptions::new(ledger.clone(), party),
                listening: Listening::new(ledger, party),
                complaints: BTreeSet::new(),
            };
            task.run(&*backend);
        };
        // Its end is not waited for, as it may wait for a QEMU.
        let jobs = workers.start_polling(&format!("vm-{connection}"), work)?.detached();
        Ok(Self { jobs })
    }

    /// Queues an order. A worker whose thread has ended has reported why.
    pub(crate) fn order(&self, job: Job) {
        let _ = self.jobs.send(job);
    }

    /// Queues pins of policies. Those that cannot be queued, as the thread has ended, are answered when they are dropped.
    pub(crate) fn pin_all(&self, pins: PolicyPins) {
        let _ = self.jobs.send(Job::PinAll(pins));
    }

    /// Queues the order to give pins of policies back. One that cannot be queued is given back itself.
    pub(crate) fn unpin(&self, unpin: Unpin) -> Result<(), Unpin> {
        match self.jobs.send(Job::Unpin(unpin)) {
            Err(Job::Unpin(unpin)) => Err(unpin),
            _ => Ok(()),
        }
    }

    /// Queues a move. One that cannot be queued, as the thread has ended, is given back.
    pub(crate) fn pin(&self, pin: PinnedMove) -> Result<(), PinnedMove> {
        match self.jobs.send(Job::PinnedMove(pin)) {
            Err(Job::PinnedMove(pin)) => Err(pin),
            _ => Ok(()),
        }
    }
}

/// An order for a worker.
#[derive(Debug)]
pub(crate) enum Job {
    Ask(TaskId, Ask),
    /// Who pays.
    Describe(Option<Party>),
    Probe,
    PinnedMove(PinnedMove),
    PinAll(PolicyPins),
    Unpin(Unpin),
}

/// Reports a thread that panics as a lost connection. The core makes another one, so that the fault of one VM's thread, which works
/// with what that VM's QEMU says, ends no other VM's and not vnumad.
struct LostByPanic {
    id: ConnectionId,
    vm: String,
    inbox: Arc<Inbox>,
}

impl Drop for LostByPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            let (vm, command) = (self.vm.clone(), "working for it".to_owned());
            let source = io::Error::other("the thread of its connection panicked");
            let lost = CoreReport::Lost(VmError::Io { vm, command, source });
            // Fails only while vnumad stops.
            let _ = self.inbox.send(Message::Worker(self.id, Report::Plain(lost)));
        }
    }
}

/// What the thread works with.
struct Task {
    id: ConnectionId,
    /// The VM, whose budgets are spent.
    party: Party,
    jobs: Jobs<Job>,
    wake: Arc<EventFd>,
    inbox: Arc<Inbox>,
    handle: VmHandle,
    /// Name of the VM, for messages.
    name: String,
    records: ChannelRecords,
    reader: Reader,
    /// A probe is due.
    probe_wanted: bool,
    descriptions: Descriptions,
    listening: Listening,
    /// What is wrong with it and was logged.
    complaints: BTreeSet<String>,
}

/// Why serving ends.
enum Stop {
    /// The handle was dropped.
    Unwanted,
    /// The VM has ended.
    Ended,
    /// The connection is broken.
    Lost(VmError),
    /// No answer came in time. It may still come.
    Silent(VmError),
}

impl From<VmError> for Stop {
    fn from(error: VmError) -> Self {
        if error.may_be_answered() { Self::Silent(error) } else { Self::Lost(error) }
    }
}

impl Task {
    fn run(mut self, backend: &dyn VmBackend) {
        let mut connection = match backend.connect(&self.handle) {
            Ok(connection) => connection,
            Err(error) => return drop(self.report(Report::Plain(CoreReport::Lost(error)))),
        };
        let stop = loop {
            let up = self.handshake(&mut *connection);
            let stop = up.map_or_else(|stop| stop, |()| self.serve(&mut *connection));
            let Stop::Silent(error) = stop else { break stop };
            if let Err(stop) = self.wait_until_responsive(&mut *connection, error) {
                break stop;
            }
        };
        let last = match stop {
            Stop::Unwanted => return self.part(&mut *connection),
            Stop::Ended if has_left(&mut *connection) => CoreReport::Left,
            Stop::Ended => CoreReport::Ended,
            // Before its process ends, libvirt knows nothing of a domain that has left.
            Stop::Lost(_) | Stop::Silent(_) if is_leaving(&mut *connection) && has_left(&mut *connection) => {
                CoreReport::Left
            }
            Stop::Lost(error) | Stop::Silent(error) => {
                if ends_soon(&*connection, &error) {
                    if has_left(&mut *connection) { CoreReport::Left } else { CoreReport::Ended }
                } else {
                    // A failed observation must not keep the lost connection from being reported.
                    if matches!(self.report_observed(&*connection), Err(Stop::Unwanted)) {
                        return;
                    }
                    CoreReport::Lost(error)
                }
            }
        };
        // Closed before it is reported, so that the next connection finds the socket free.
        drop(connection);
        let _ = self.report(Report::Plain(last));
    }

    /// Greets, describes, and reports that it is up.
    fn handshake(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        connection.greet()?;
        self.wait_until_paid(connection)?;
        let description = self.describe(connection)?;
        // A record stays: an attach that an earlier vnumad had asked for may be carried out yet.
        let channel = connection.tidy_channel()?;
        let pidfd = self.pidfd(connection)?;
        self.probe_wanted = false;
        let marked = match connection.migrates() {
            Some(migrates) => migrates.is_marked()?,
            None => false,
        };
        self.report(Report::Up { description, pidfd, channel })?;
        if marked {
            self.report(Report::Plain(CoreReport::FoundMarked))?;
        }
        Ok(())
    }

    fn pidfd(&self, connection: &dyn VmConnection) -> Result<OwnedFd, VmError> {
        let (socket, pid) = (self.handle.to_string(), connection.pid());
        let copy = connection.pidfd().try_clone_to_owned();
        copy.map_err(|source| VmError::Process { socket, pid, source })
    }

    fn report_observed(&self, connection: &dyn VmConnection) -> Result<(), Stop> {
        let Some(observed) = connection.observe_vcpus() else { return Ok(()) };
        let (pid, pidfd) = (connection.pid(), self.pidfd(connection)?);
        self.report(Report::Observed { pid, pidfd, observed })
    }

    /// Waits until there is a reason to try again, and reports what is wrong until then.
    fn wait_until_responsive(
        &mut self,
        connection: &mut dyn VmConnection,
        error: VmError,
    ) -> Result<(), Stop> {
        let (pid, words) = (connection.pid(), error.to_string());
        let (problem, observed) = (explain(&error, pid), connection.observe_vcpus());
        self.report(Report::Silent { problem, pid, pidfd: self.pidfd(connection)?, observed })?;
        let mut attempts = ATTEMPTS;
        loop {
            let until = Instant::now() + attempts.duration();
            while Instant::now() < until {
                self.refuse_commands(connection, &words)?;
                let mut wait = [
                    PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
                    PollFd::new(connection.event_fd(), PollFlags::POLLIN),
                    PollFd::new(connection.pidfd(), PollFlags::POLLIN),
                ];
                self.wait(&mut wait, connection.pid(), timeout_at(until))?;
                if wait[2].any().unwrap_or(true) {
                    return Err(Stop::Ended);
                }
                if wait[1].any().unwrap_or(true) {
                    return Ok(());
                }
                // No descriptor is ready when the time is up.
                let _ = self.wake.read();
            }
            // A stopped process answers nothing, and commands would only queue up.
            if matches!(stopped(pid), Ok(None)) {
                return Ok(());
            }
        }
    }

    /// Refuses a command to a VM that does not answer, or carries it out if it needs no answer.
    fn refuse_commands(&mut self, connection: &dyn VmConnection, why: &str) -> Result<(), Stop> {
        loop {
            let silent = || VmError::Silent { vm: self.name.clone(), why: why.to_owned() };
            let report = match self.jobs.try_next() {
                // The VM is described as soon as it answers.
                Next::Job(Job::Describe(_) | Job::Probe) => continue,
                // This needs no answer from the VM.
                Next::Job(Job::Ask(task, Ask::Recover(epoch))) => self.recover(connection, task, epoch),
                Next::Job(Job::Ask(task, ask)) => {
                    Report::Plain(CoreReport::Outcome(task, ask.failed(silent())))
                }
                Next::Job(Job::PinnedMove(pin)) => {
                    pin.failed(&silent());
                    continue;
                }
                Next::Job(Job::PinAll(pins)) => {
                    pins.failed(&silent());
                    continue;
                }
                Next::Job(Job::Unpin(unpin)) => {
                    unpin.answer(Err(silent().to_string()));
                    continue;
                }
                Next::Nothing => return Ok(()),
                Next::End => return Err(Stop::Unwanted),
            };
            self.report(report)?;
        }
    }

    fn report(&self, report: Report) -> Result<(), Stop> {
        if self.inbox.send(Message::Worker(self.id, report)) { Ok(()) } else { Err(Stop::Unwanted) }
    }

    fn serve(&mut self, connection: &mut dyn VmConnection) -> Stop {
        loop {
            if let Err(stop) = self.round(connection) {
                return stop;
            }
        }
    }

    /// Waits for a command, an event or a deadline, and handles it.
    fn round(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        self.events(connection)?;
        loop {
            match self.jobs.try_next() {
                Next::Job(Job::Ask(task, ask)) => self.execute(connection, task, ask)?,
                Next::Job(Job::Describe(payer)) => self.descriptions.want(payer),
                Next::Job(Job::Probe) => self.probe_wanted = true,
                Next::Job(Job::PinnedMove(pin)) => self.pin(connection, pin)?,
                Next::Job(Job::PinAll(pins)) => self.pin_all(connection, pins)?,
                Next::Job(Job::Unpin(unpin)) => self.unpin(connection, unpin)?,
                Next::Nothing => break,
                Next::End => return Err(Stop::Unwanted),
            }
        }
        self.events(connection)?;
        self.describe_if_due(connection)?;
        self.ask_if_due(connection)?;
        // Commands bring events with them, which the socket would not announce again. So this comes last before the wait.
        let all_taken = self.events(connection)?;
        // One that has said too much is not listened to. A socket that is closed would end each wait.
        let rests = self.listening.rests_until();
        let heard = if rests.is_some() { connection.pidfd() } else { connection.event_fd() };
        let mut wait = [
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
            PollFd::new(heard, PollFlags::POLLIN),
            PollFd::new(connection.pidfd(), PollFlags::POLLIN),
        ];
        self.wait(&mut wait, connection.pid(), self.patience(all_taken, rests))?;
        if wait[2].any().unwrap_or(true) {
            return Err(Stop::Ended);
        }
        // Empty when something else woke this thread.
        let _ = self.wake.read();
        Ok(())
    }

    fn wait(&self, wait: &mut [PollFd<'_>], pid: i32, timeout: PollTimeout) -> Result<(), Stop> {
        match self.jobs.heartbeat().rest(|| poll(wait, timeout)) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => {
                let (vm, command) = (format!("VM of process {pid}"), "poll".to_owned());
                Err(Stop::Lost(VmError::Io { vm, command, source: error.into() }))
            }
        }
    }

    /// How long to wait without an event.
    fn patience(&self, all_taken: bool, rests: Option<Instant>) -> PollTimeout {
        if !all_taken && rests.is_none() {
            return PollTimeout::ZERO;
        }
        self.descriptions.next().into_iter().chain(rests).min().map_or(PollTimeout::NONE, timeout_at)
    }

    /// Takes a bounded number of events, unless it rests from them. False if there may be more: a QEMU that never pauses must not delay
    /// commands.
    fn events(&mut self, connection: &mut dyn VmConnection) -> Result<bool, Stop> {
        if self.listening.rests_until().is_some() {
            return Ok(false);
        }
        let (mut rebooted, mut detached, mut all_taken, mut count) = (false, false, false, 0);
        while count < EVENTS_A_ROUND {
            let Some(event) = connection.poll_event(Duration::ZERO)? else {
                all_taken = true;
                break;
            };
            count += 1;
            match event {
                // The run state is part of the description.
                VmEvent::VcpusChanged | VmEvent::MemoryChanged | VmEvent::Stopped | VmEvent::Resumed => {
                    self.descriptions.want_by_vm();
                }
                VmEvent::ChannelAttached => {
                    detached = false;
                    self.report(Report::Plain(CoreReport::FoundPlugged))?;
                }
                // It is unplugged, however often that is said.
                VmEvent::ChannelDetached if detached => {}
                VmEvent::ChannelDetached => {
                    detached = true;
                    self.records.remove(connection.pid());
                    self.report(Report::Plain(CoreReport::Released))?;
                }
                VmEvent::Rebooted => rebooted = true,
                VmEvent::Disconnected => {
                    let vm = format!("VM of process {}", connection.pid());
                    return Err(Stop::Lost(VmError::Disconnected { vm }));
                }
                VmEvent::Left => self.report(Report::Plain(CoreReport::Left))?,
                // The pidfd reports the process's end, which is authoritative.
                VmEvent::Shutdown => {}
            }
        }
        if rebooted {
            self.report(Report::Plain(CoreReport::Rebooted))?;
        }
        let overheard = connection.overheard();
        self.listening.heard(count.saturating_add(overheard));
        self.complain(connection);
        // What means nothing here may hide an event behind it.
        Ok(all_taken && overheard == 0)
    }

    /// Logs once what is wrong with the VM. What it is may be up to the VM, and so how often it is something else.
    fn complain(&mut self, connection: &mut dyn VmConnection) {
        for complaint in connection.complaints() {
            if !self.complaints.contains(&complaint)
                && let Some(more) = self.inbox.ledger.line(self.party)
            {
                warn!(vm = self.name, "{complaint}{more}");
                if self.complaints.len() == COMPLAINTS {
                    self.complaints.pop_first();
                }
                self.complaints.insert(complaint);
            }
        }
    }

    fn execute(&mut self, connection: &mut dyn VmConnection, task: TaskId, ask: Ask) -> Result<(), Stop> {
        match ask {
            Ask::Recover(epoch) => self.report(self.recover(connection, task, epoch)),
            Ask::Attach(epoch) => {
                let outcome = self.attach(connection, epoch);
                let stop = match &outcome {
                    Err(Refusal::Vm(error)) => self.stop_after(connection, error),
                    _ => None,
                };
                self.conclude(stop, Report::Channel(task, outcome, Outcome::Attached))
            }
            Ask::Detach => {
                let outcome = connection.detach_channel();
                // Here and not later, when there may be a record of the next channel.
                if matches!(outcome, Ok(()) | Err(VmError::NotAttached { .. })) {
                    self.records.remove(connection.pid());
                }
                self.conclude_with(connection, task, outcome, Outcome::Detached)
            }
            Ask::Replug(vcpu, node) => {
                let outcome = self.replug(connection, vcpu, node);
                self.descriptions.want(None);
                self.conclude_with(connection, task, outcome, Outcome::Replugged)
            }
            Ask::Mark(marked) => {
                let outcome = migrates(connection).and_then(|vm| vm.mark(marked));
                self.conclude_with(connection, task, outcome, Outcome::Marked)
            }
            Ask::Migrate(destination, post_copy) => {
                let outcome = migrates(connection).and_then(|vm| vm.migrate(&destination, post_copy));
                self.conclude_with(connection, task, outcome, Outcome::MigrationBegun)
            }
            Ask::LookAtMigration | Ask::SwitchMigration | Ask::CancelMigration => {
                let outcome = migrates(connection).and_then(|vm| {
                    match ask {
                        Ask::SwitchMigration => vm.start_post_copy()?,
                        Ask::CancelMigration => vm.cancel()?,
                        _ => {}
                    }
                    vm.progress()
                });
                self.conclude_with(connection, task, outcome, Outcome::Migration)
            }
            Ask::Resize(device, bytes) => {
                let outcome = request_memory(connection, &device, bytes);
                self.conclude_with(connection, task, outcome, Outcome::Resized)
            }
        }
    }

    /// Reports an outcome; an error if it shows that the VM can be asked nothing more.
    fn conclude_with<T>(
        &mut self,
        connection: &dyn VmConnection,
        task: TaskId,
        outcome: Result<T, VmError>,
        of: fn(Result<T, VmError>) -> Outcome,
    ) -> Result<(), Stop> {
        let stop = outcome.as_ref().err().and_then(|error| self.stop_after(connection, error));
        self.conclude(stop, Report::Plain(CoreReport::Outcome(task, of(outcome))))
    }

    fn pin(&self, connection: &mut dyn VmConnection, pin: PinnedMove) -> Result<(), Stop> {
        let Some(manager) = connection.pins() else {
            pin.failed(&NO_PINS);
            return Ok(());
        };
        match manager.pin(pin.tid, &pin.cpus) {
            Ok(()) => {
                let location = self.reader.read(connection.pid(), pin.tid);
                pin.done(location);
                Ok(())
            }
            Err(error) => {
                pin.failed(&error);
                self.stop_after(connection, &error).map_or(Ok(()), Err)
            }
        }
    }

    fn pin_all(&self, connection: &mut dyn VmConnection, pins: PolicyPins) -> Result<(), Stop> {
        let Some(manager) = connection.pins() else {
            pins.failed(&NO_PINS);
            return Ok(());
        };
        let outcomes = manager.confine(&pins.wanted);
        let errors = outcomes.iter().filter_map(|outcome| match outcome {
            Err(PinError::Vm(error)) => Some(error),
            _ => None,
        });
        let stop = errors.into_iter().find_map(|error| self.stop_after(connection, error));
        pins.done(outcomes, |tid| self.reader.read(connection.pid(), tid));
        stop.map_or(Ok(()), Err)
    }

    fn unpin(&self, connection: &mut dyn VmConnection, unpin: Unpin) -> Result<(), Stop> {
        let Some(manager) = connection.pins() else {
            unpin.answer(Ok(0));
            return Ok(());
        };
        let outcome = manager.give_back(&unpin.keep);
        let stop = outcome.as_ref().err().and_then(|error| self.stop_after(connection, error));
        unpin.answer(outcome.map_err(|error| error.to_string()));
        stop.map_or(Ok(()), Err)
    }

    /// vnumad stops and reads no messages any more. Until it drops the handle, orders to give pins back are still carried out.
    fn part(mut self, connection: &mut dyn VmConnection) {
        while let Some(job) = self.jobs.next() {
            if let Job::Unpin(unpin) = job
                && self.unpin(connection, unpin).is_err()
            {
                return;
            }
        }
    }

    /// Makes a channel, writes its record and plugs it. The record comes before the hypervisor has anything of the
    /// channel, so that there is no moment without.
    fn attach(&self, connection: &mut dyn VmConnection, epoch: u32) -> Result<Channel, Refusal> {
        let (vm, pid) = (|| self.name.clone(), connection.pid());
        let failed = |source| Refusal::Channel { vm: vm(), source };
        let (channel, plug) = Channel::create(epoch).map_err(failed)?;
        let identity = channel.identity().map_err(failed)?;
        // What an earlier vnumad had asked for may be carried out yet.
        self.records.set_aside(pid);
        self.records.write(pid, identity).map_err(|source| Refusal::Record { vm: vm(), source })?;
        match connection.attach_channel(plug) {
            Ok(()) => {
                self.records.forget_aside(pid);
                Ok(channel)
            }
            Err(error) => {
                self.records.give_back(pid);
                Err(error.into())
            }
        }
    }

    /// Reports an outcome; an error if the VM can be asked nothing more.
    fn conclude(&mut self, stop: Option<Stop>, report: Report) -> Result<(), Stop> {
        self.probe_wanted = false;
        if let Some(Stop::Ended) = stop {
            return Err(Stop::Ended);
        }
        self.report(report)?;
        stop.map_or(Ok(()), Err)
    }

    /// Why the VM can be asked nothing more after this error, if so.
    fn stop_after(&self, connection: &dyn VmConnection, error: &VmError) -> Option<Stop> {
        if ends_soon(connection, error) { Some(Stop::Ended) } else { ends_serving(error) }
    }

    /// Needs only the hypervisor's process, not its answer.
    fn recover(&self, connection: &dyn VmConnection, task: TaskId, epoch: u32) -> Report {
        let (vm, pid) = (|| self.name.clone(), connection.pid());
        let identity = self.records.read(pid).map_err(|source| Refusal::System { vm: vm(), source });
        let process = Path::new("/proc").join(pid.to_string());
        let taken = identity.and_then(|identity| {
            let taken = Channel::take_over(&identity, connection.pidfd(), &process, epoch);
            taken.map_err(|source| Refusal::Channel { vm: vm(), source })
        });
        let taken = taken.map_err(|why| match connection.gets_channel_anew() {
            true => Refusal::CameAlong { vm: vm(), why: why.to_string() },
            false => why,
        });
        Report::Channel(task, taken, Outcome::Recovered)
    }

    /// A new vCPU is plugged, and may run where the old one may before the guest uses it; then the old one is unplugged.
    fn replug(&self, connection: &mut dyn VmConnection, vcpu: u32, node: u32) -> Result<Replugged, VmError> {
        let vm = || self.name.clone();
        let old = connection.removable_vcpu(vcpu)?;
        let plugged = connection.plug_vcpu(node)?;
        let failed = |reason| VmError::ReplugFailed { vm: vm(), vcpu, reason };
        let moved = copy_affinity(connection.pidfd(), connection.pid(), old.tid, plugged.tid)
            .map_err(|error| failed(error.to_string()))
            .and_then(|()| connection.await_guest(plugged.apic_id))
            .and_then(|()| connection.unplug_vcpu(vcpu));
        moved.map_err(|cause| roll_back(connection, plugged, cause))?;
        let described = connection.describe();
        let undescribed = |source| VmError::ReplugUndescribed {
            vm: vm(),
            vcpu,
            new: plugged.apic_id,
            source: Box::new(source),
        };
        let description = described.map_err(undescribed)?;
        Ok(Replugged { plugged, description, location: self.reader.read(connection.pid(), plugged.tid) })
    }

    /// Probes the VM, so that one that does not answer is known before it is needed.
    fn ask_if_due(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        if !self.probe_wanted {
            return Ok(());
        }
        self.probe_wanted = false;
        // A stopped process is known to be stopped without a probe.
        if matches!(stopped(connection.pid()), Ok(None)) { self.probe(connection) } else { Ok(()) }
    }

    /// An operator is to know soon, and commands are to be refused late: a QEMU that is busy for a moment does them
    /// yet.
    fn probe(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        let error = match connection.probe(PROMPT) {
            Err(error) if error.may_be_answered() => error,
            outcome => return Ok(outcome?),
        };
        let (pid, pidfd) = (connection.pid(), self.pidfd(connection)?);
        self.report(Report::Slow { problem: explain(&error, pid), pid, pidfd })?;
        connection.probe(PATIENCE)?;
        self.report(Report::Plain(CoreReport::Prompt))
    }

    fn describe_if_due(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        if !self.descriptions.is_due() {
            return Ok(());
        }
        let description = self.describe(connection)?;
        self.probe_wanted = false;
        self.report(Report::Plain(CoreReport::Described(description)))
    }

    fn describe(&mut self, connection: &mut dyn VmConnection) -> Result<VmDescription, VmError> {
        let description = self.descriptions.make(|| connection.describe());
        self.complain(connection);
        description
    }

    /// A VM that is connected to again and again, or answers now and then, is described each time. It waits for some seconds at most: what
    /// operators want of it is refused meanwhile.
    fn wait_until_paid(&mut self, connection: &dyn VmConnection) -> Result<(), Stop> {
        let end = Instant::now() + LONGEST_WAIT;
        while let Err(wait) = self.descriptions.pay() {
            if Instant::now() >= end {
                break;
            }
            let until = (Instant::now() + wait).min(end);
            while Instant::now() < until {
                self.refuse_commands(
                    connection,
                    "it has come, or changed, too often, and is described later",
                )?;
                let mut wait = [
                    PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
                    PollFd::new(connection.pidfd(), PollFlags::POLLIN),
                ];
                self.wait(&mut wait, connection.pid(), timeout_at(until))?;
                if wait[1].any().unwrap_or(true) {
                    return Err(Stop::Ended);
                }
                let _ = self.wake.read();
            }
        }
        Ok(())
    }
}

fn migrates(connection: &mut dyn VmConnection) -> Result<&mut dyn Migrates, VmError> {
    let vm = format!("VM of process {}", connection.pid());
    connection.migrates().ok_or(VmError::NotMigrated { vm })
}

fn is_leaving(connection: &mut dyn VmConnection) -> bool {
    connection.migrates().is_some_and(|vm| vm.is_leaving())
}

fn has_left(connection: &mut dyn VmConnection) -> bool {
    connection.migrates().is_some_and(|vm| vm.has_left())
}

fn request_memory(connection: &mut dyn VmConnection, id: &str, bytes: u64) -> Result<(), VmError> {
    let vm = format!("VM of process {}", connection.pid());
    let sizes = connection.sizes().ok_or_else(|| VmError::NotResized { vm, id: id.to_owned() })?;
    sizes.request(id, bytes)
}

/// Why the hypervisor does not answer, and where it is stuck if that can be seen.
fn explain(error: &VmError, pid: i32) -> String {
    main_loop::stuck_in(pid).map_or_else(
        || error.to_string(),
        |function| format!("{error}; its main loop is stuck in {function} (a function of the kernel)"),
    )
}

/// Errors after which the VM can be asked nothing, for now or for good.
fn ends_serving(error: &VmError) -> Option<Stop> {
    match error {
        VmError::Disconnected { vm } => Some(Stop::Lost(VmError::Disconnected { vm: vm.clone() })),
        VmError::Timeout { vm, command, limit_ms } => {
            let (vm, command) = (vm.clone(), command.clone());
            Some(Stop::Silent(VmError::Timeout { vm, command, limit_ms: *limit_ms }))
        }
        VmError::NoAnswer { vm, reason } => {
            Some(Stop::Silent(VmError::NoAnswer { vm: vm.clone(), reason: reason.clone() }))
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

/// Time until `until`, rounded up, so that the wake-up is not early.
fn timeout_at(time: Instant) -> PollTimeout {
    let left = time.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_panics_loses_its_connection() {
        let (inbox, workers) = (Arc::new(Inbox::new().expect("an inbox")), Workers::default());
        let (vm, theirs) = ("vm".to_owned(), Arc::clone(&inbox));
        let worker = workers.start("vm-7", move |_: Jobs<()>| {
            let _lost = LostByPanic { id: 7, vm, inbox: theirs };
            panic!("a test wants it so");
        });
        drop(worker.expect("started"));
        let turn = inbox.take(Instant::now() + Duration::from_secs(60), &[]).expect("open");
        let lost = |message: &Message| {
            matches!(message, Message::Worker(7, Report::Plain(CoreReport::Lost(VmError::Io { .. }))))
        };
        assert!(turn.messages.iter().all(lost) && turn.messages.len() == 1, "{:?}", turn.messages);
    }
}
