//! A thread per VM that talks to its hypervisor, so that one that does not answer holds up no other.

use crate::message::{ConnectionId, Message};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};
use tokio::sync::mpsc as async_mpsc;
use vnuma_actuator::pin_thread;
use vnuma_monitor::{
    location::read_allowed,
    vm::{Plugged, VmBackend, VmCandidate, VmConnection, VmError, VmEvent},
};
use vnuma_topology::VmDescription;

/// Between two descriptions of a VM, which cost QEMU and the kernel something. What asks for one meanwhile gets the next.
const DESCRIBE_PAUSE: Duration = Duration::from_millis(200);

/// Most events taken before commands have their turn.
const EVENTS_A_ROUND: usize = 64;

/// What a VM's thread is asked to do.
#[derive(Debug)]
pub(crate) enum Command {
    /// Describe the VM again.
    Describe,
    /// Plug the channel; QEMU gets this socket.
    Attach(OwnedFd),
    /// Unplug the channel.
    Detach,
    /// Move a vCPU to a spare slot of a guest node.
    Replug { vcpu: u32, node: u32 },
}

/// What a VM's thread reports.
#[derive(Debug)]
pub(crate) enum Report {
    /// Connected.
    Up { description: VmDescription, pidfd: OwnedFd, channel: bool },
    /// Could not connect. Nothing follows.
    Down(VmError),
    /// The connection is lost; the VM may live on. Nothing follows.
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
            describe_wanted: false,
            describe_from: Instant::now(),
        };
        thread::Builder::new().name(format!("vm-{id}")).spawn(move || worker.run(&candidate, &*backend))?;
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
}

impl From<VmError> for Stop {
    fn from(error: VmError) -> Self {
        Self::Lost(error)
    }
}

impl Worker {
    fn run(mut self, candidate: &VmCandidate, backend: &dyn VmBackend) {
        let connected = backend.connect(candidate).and_then(|mut connection| {
            let report = introduce(&mut *connection, candidate)?;
            Ok((connection, report))
        });
        let (mut connection, up) = match connected {
            Ok(connected) => connected,
            Err(error) => return drop(self.report(Report::Down(error))),
        };
        let stop = match self.report(up) {
            Ok(()) => self.serve(&mut *connection),
            Err(stop) => stop,
        };
        let last = match stop {
            Stop::Unwanted => return,
            Stop::Ended => Report::Ended,
            Stop::Lost(error) => Report::Lost(error),
        };
        // Closed before it is reported: whoever connects next finds the socket free.
        drop(connection);
        let _ = self.report(last);
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
        let mut wait = [
            PollFd::new(self.wake.as_fd(), PollFlags::POLLIN),
            PollFd::new(connection.event_fd(), PollFlags::POLLIN),
            PollFd::new(connection.pidfd(), PollFlags::POLLIN),
        ];
        match poll(&mut wait, self.patience(all_taken)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => {
                let source = error.into();
                let vm = format!("VM of process {}", connection.pid());
                return Err(Stop::Lost(VmError::Io { vm, command: "poll".into(), source }));
            }
        }
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
        if !self.describe_wanted {
            return PollTimeout::NONE;
        }
        // Rounded up, so as not to wake before the time.
        let left = self.describe_from.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
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
                VmEvent::VcpusChanged => self.describe_wanted = true,
                VmEvent::ChannelDetached => self.report(Report::Released)?,
                VmEvent::Rebooted => rebooted = true,
                VmEvent::Disconnected => {
                    let vm = format!("VM of process {}", connection.pid());
                    return Err(Stop::Lost(VmError::Disconnected { vm }));
                }
                // The process's end is what counts, and the pidfd tells it.
                VmEvent::Shutdown | VmEvent::Stopped | VmEvent::Resumed => {}
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
            Command::Attach(socket) => {
                let outcome = connection.attach_channel(socket);
                let lost = ends_connection(&outcome);
                self.report(Report::Attached(outcome))?;
                lost.map_or(Ok(()), Err)
            }
            Command::Replug { vcpu, node } => {
                let outcome = replug(connection, vcpu, node);
                let lost = ends_connection(&outcome);
                self.report(Report::Replugged(outcome))?;
                self.describe_wanted = true;
                lost.map_or(Ok(()), Err)
            }
            Command::Detach => {
                let outcome = connection.detach_channel();
                let lost = ends_connection(&outcome);
                self.report(Report::Detached(outcome))?;
                lost.map_or(Ok(()), Err)
            }
        }
    }

    fn describe_if_due(&mut self, connection: &mut dyn VmConnection) -> Result<(), Stop> {
        if !self.describe_wanted || Instant::now() < self.describe_from {
            return Ok(());
        }
        let description = connection.describe()?;
        self.describe_wanted = false;
        self.describe_from = Instant::now() + DESCRIBE_PAUSE;
        self.report(Report::Described(description))
    }
}

/// The new vCPU may run where the old one may, from before the guest uses it.
fn replug(
    connection: &mut dyn VmConnection,
    vcpu: u32,
    node: u32,
) -> Result<(Plugged, VmDescription), VmError> {
    let pid = connection.pid();
    let io = |source| VmError::Io { vm: format!("VM of process {pid}"), command: "replug".into(), source };
    let pidfd = connection.pidfd().try_clone_to_owned().map_err(io)?;
    let mut adopt = |old: i32, new: i32| {
        let allowed = read_allowed(pid, old).map_err(|error| error.to_string())?;
        pin_thread(pidfd.as_fd(), pid, new, &allowed).map_err(|error| error.to_string())
    };
    let plugged = connection.replug_vcpu(vcpu, node, &mut adopt)?;
    Ok((plugged, connection.describe()?))
}

/// After these the connection cannot be used.
fn ends_connection<T>(outcome: &Result<T, VmError>) -> Option<Stop> {
    let lost = match outcome {
        Err(VmError::Disconnected { vm }) => VmError::Disconnected { vm: vm.clone() },
        Err(VmError::Timeout { vm, command, limit_ms }) => {
            VmError::Timeout { vm: vm.clone(), command: command.clone(), limit_ms: *limit_ms }
        }
        _ => return None,
    };
    Some(Stop::Lost(lost))
}

fn introduce(connection: &mut dyn VmConnection, candidate: &VmCandidate) -> Result<Report, VmError> {
    let description = connection.describe()?;
    let channel = connection.channel_attached()?;
    let pid = connection.pid();
    let pidfd = connection.pidfd().try_clone_to_owned();
    let pidfd = pidfd.map_err(|source| VmError::Process { socket: candidate.socket.clone(), pid, source })?;
    Ok(Report::Up { description, pidfd, channel })
}
