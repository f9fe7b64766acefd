//! QMP: commands, their answers, and events.

use crate::{
    VmError, VmEvent,
    commands::{Command, QmpCapabilities},
    message::{Message, event_of, parse_message},
    wire::{Wire, WireError},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    time::{Duration, Instant},
};
use vnuma_model::{Budget, Rate};
use vnuma_process::text::{sanitize_reason, sanitize_short};

/// How long QEMU may take for one command, from its first byte out to the last byte in, unless the user says otherwise.
pub(crate) const COMMAND_LIMIT: Duration = Duration::from_secs(1);

/// How long QEMU is waited for. All of it follows from what one command may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// For one command.
    pub(crate) command: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { command: COMMAND_LIMIT }
    }
}

impl Limits {
    /// For all commands of one task. A QEMU that takes nearly the limit for each of a thousand must not keep the caller for a quarter of
    /// an hour.
    pub(crate) fn task(self) -> Duration {
        self.command * 5
    }

    /// For the greeting, so that its absence is shown within the time of a command.
    fn greeting(self) -> Duration {
        self.command * 4 / 5
    }
}

/// Most messages that one look for an event takes. There may be more behind them.
const MESSAGES: u32 = 256;

/// What a QEMU may say while an answer is waited for that is no answer to it, in messages, or KiB of them. Of more it is made to wait,
/// as it would keep a CPU busy that is not its own.
const UNASKED: Rate = Rate::new(1000, 4000);

/// Most complaints that are kept until they are taken.
const COMPLAINTS: usize = 16;

/// What is waited for while there is no command.
const EVENTS: &str = "events";

#[derive(Deserialize)]
struct Greeting {
    #[serde(rename = "QMP")]
    qmp: Value,
}

/// A command as it is sent.
#[derive(Serialize)]
struct Execute<'a, C> {
    execute: &'static str,
    arguments: &'a C,
    id: u64,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// QEMU has yet to greet.
    Silent,
    /// It has greeted.
    Greeted,
    /// It was asked to take commands, and has not answered yet.
    Asked,
    /// It accepts commands.
    Ready,
}

/// A connection over which commands can be given.
#[derive(Debug)]
pub(crate) struct Client {
    wire: Wire,
    stage: Stage,
    /// The VM, for messages.
    vm: String,
    /// Number of the last command. Answers carry it, so that a late one is known as such.
    last_id: u64,
    /// The last command whose refusal came too late for it, and why it was refused.
    late_refusal: Option<(u64, String)>,
    /// Each kind once, however often it has come.
    events: VecDeque<VmEvent>,
    /// Messages since they were last asked for that were no events and answered nothing.
    overheard: u32,
    /// For what is said unasked while an answer is waited for.
    unasked: Budget,
    began: Instant,
    complaints: Vec<String>,
    /// End of a task of several commands.
    budget: Option<Instant>,
    limits: Limits,
    /// What the present command is given.
    limit: Duration,
    /// The other end is gone, or the start of the next message is lost.
    closed: bool,
}

impl Client {
    /// Connects. What has to happen before QEMU is spoken to (finding out who it is) happens
    /// between this and [`greet`](Self::greet).
    pub(crate) fn connect(vm: &str, socket: &Path, limits: Limits) -> Result<Self, VmError> {
        let failed = |source| VmError::Connect { socket: socket.display().to_string(), source };
        let wire = Wire::connect(socket).map_err(failed)?;
        let vm = vm.to_owned();
        let (stage, events) = (Stage::Silent, VecDeque::new());
        let limit = limits.command;
        Ok(Self {
            wire,
            stage,
            vm,
            last_id: 0,
            late_refusal: None,
            events,
            overheard: 0,
            unasked: Budget::default(),
            began: Instant::now(),
            complaints: Vec::new(),
            budget: None,
            limits,
            limit,
            closed: false,
        })
    }

    /// Waits for QEMU's greeting and answers it. Can be called again after a timeout.
    pub(crate) fn greet(&mut self, socket: &str) -> Result<(), VmError> {
        if self.stage == Stage::Silent {
            self.await_greeting(socket)?;
            self.stage = Stage::Greeted;
        }
        if self.stage != Stage::Ready {
            let asked_before = self.stage == Stage::Asked;
            self.stage = Stage::Asked;
            match self.execute(&QmpCapabilities {}) {
                // QEMU refuses to be asked again after it has agreed.
                Err(VmError::Refused { .. }) if asked_before => {}
                other => _ = other?,
            }
            self.stage = Stage::Ready;
        }
        Ok(())
    }

    fn await_greeting(&mut self, socket: &str) -> Result<(), VmError> {
        let line = match self.wire.line(Instant::now() + self.limits.greeting()) {
            Ok(line) => line,
            Err(WireError::Timeout) => {
                let limit_ms = self.limits.greeting().as_millis() as u64;
                return Err(VmError::NoGreeting { socket: socket.to_owned(), limit_ms });
            }
            Err(error) => return Err(self.broken("greeting", error)),
        };
        let greeting: Result<Greeting, _> = serde_json::from_slice(&line);
        match greeting {
            Ok(greeting) if greeting.qmp.is_object() => Ok(()),
            _ => {
                let reason =
                    format!("`{}` is no QMP greeting", sanitize_short(&String::from_utf8_lossy(&line)));
                Err(self.nonsense("greeting", reason))
            }
        }
    }

    /// How long QEMU is waited for.
    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// The VM's name in messages.
    pub(crate) fn vm(&self) -> &str {
        &self.vm
    }

    /// Limits everything until [`end_task`](Self::end_task) to `limit` altogether.
    pub(crate) fn begin_task(&mut self, limit: Duration) {
        self.budget = Some(Instant::now() + limit);
    }

    /// Ends what [`begin_task`](Self::begin_task) began.
    pub(crate) fn end_task(&mut self) {
        self.budget = None;
    }

    /// Gives a command and waits for its answer.
    pub(crate) fn execute<C: Command>(&mut self, command: &C) -> Result<C::Answer, VmError> {
        self.execute_with_fd(command, None)
    }

    /// Gives a command that a descriptor goes with.
    pub(crate) fn execute_with_fd<C: Command>(
        &mut self,
        command: &C,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<C::Answer, VmError> {
        if self.closed {
            return Err(VmError::Disconnected { vm: self.vm.clone() });
        }
        let left = self.budget.map(|budget| budget.saturating_duration_since(Instant::now()));
        self.limit = left.map_or(self.limits.command, |left| left.min(self.limits.command));
        let until = Instant::now() + self.limit;
        self.last_id += 1;
        let id = self.last_id;
        let mut line = serde_json::to_vec(&Execute { execute: C::NAME, arguments: command, id })
            .map_err(|error| self.nonsense(C::NAME, error.to_string()))?;
        line.push(b'\n');
        if let Err(error) = self.wire.send(&line, fd, until) {
            // Part of it may have been sent, so nothing can follow.
            self.closed = true;
            return Err(self.broken(C::NAME, error));
        }
        let answer = loop {
            let (message, length) = self.receive(C::NAME, until)?;
            let answered = message.id.as_ref().and_then(Value::as_u64);
            if answered != Some(id) {
                self.make_wait(length, until);
                if let (Some(earlier), Some(refusal)) = (answered, message.error) {
                    self.late_refusal = Some((earlier, sanitize_short(&refusal.desc)));
                }
                if Instant::now() >= until {
                    return Err(self.broken(C::NAME, WireError::Timeout));
                }
                continue;
            }
            match (message.answer, message.error) {
                (Some(answer), None) => break answer,
                (None, Some(refusal)) => {
                    let (vm, command) = (self.vm.clone(), C::NAME.to_owned());
                    return Err(VmError::Refused { vm, command, reason: sanitize_short(&refusal.desc) });
                }
                _ => return Err(self.nonsense(C::NAME, "neither an answer nor an error".to_owned())),
            }
        };
        serde_json::from_value(answer).map_err(|error| self.unusable(C::NAME, &error.to_string()))
    }

    /// Number of the last command.
    pub(crate) fn last_id(&self) -> u64 {
        self.last_id
    }

    /// Why a command was refused whose answer was not waited for, if that has come since.
    pub(crate) fn take_late_refusal(&mut self, id: u64) -> Option<String> {
        self.late_refusal.take_if(|(refused, _)| *refused == id).map(|(_, reason)| reason)
    }

    /// Is there time left for the task?
    pub(crate) fn has_time(&self) -> bool {
        self.budget.is_none_or(|budget| Instant::now() < budget)
    }

    /// The next event. `None` at `until`, or if [`Self::overheard`] says that there may be one behind what means nothing here;
    /// disconnection is an event.
    pub(crate) fn event(&mut self, until: Instant) -> Result<Option<VmEvent>, VmError> {
        let mut messages = 0;
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            if self.closed {
                return Ok(Some(VmEvent::Disconnected));
            }
            match self.receive(EVENTS, until) {
                Ok((_, length)) => self.make_wait(length, until),
                Err(VmError::Timeout { .. }) => return Ok(None),
                Err(VmError::Disconnected { .. }) => return Ok(Some(VmEvent::Disconnected)),
                Err(error) => return Err(error),
            }
            messages += 1;
            // A peer that never pauses does not keep the caller.
            if messages >= MESSAGES && Instant::now() >= until {
                return Ok(self.events.pop_front());
            }
        }
    }

    /// Gives events back that were taken while another was waited for.
    pub(crate) fn put_back(&mut self, events: VecDeque<VmEvent>) {
        let later = std::mem::replace(&mut self.events, events);
        later.into_iter().for_each(|event| self.keep(event));
    }

    /// Keeps an event. One of its kind that was not taken yet means the same.
    fn keep(&mut self, event: VmEvent) {
        if self.events.contains(&event) {
            self.overheard = self.overheard.saturating_add(1);
        } else {
            self.events.push_back(event);
        }
    }

    /// Messages since the last call that were no events, or the same again, and answered nothing.
    pub(crate) fn overheard(&mut self) -> u32 {
        std::mem::take(&mut self.overheard)
    }

    /// Notes what people should know of the VM.
    pub(crate) fn complain(&mut self, complaint: String) {
        if self.complaints.len() < COMPLAINTS {
            self.complaints.push(complaint);
        }
    }

    /// What was noted since the last call.
    pub(crate) fn complaints(&mut self) -> Vec<String> {
        std::mem::take(&mut self.complaints)
    }

    /// A message of this length was none that was waited for. Meanwhile what a QEMU says fills its socket, and it waits itself.
    fn make_wait(&mut self, length: usize, until: Instant) {
        let now = Instant::now();
        let now_ns = u64::try_from(now.duration_since(self.began).as_nanos()).unwrap_or(u64::MAX);
        if let Err(wait_ns) = self.unasked.spend(UNASKED, amount_of(length), now_ns) {
            std::thread::sleep(Duration::from_nanos(wait_ns).min(until.saturating_duration_since(now)));
        }
    }

    /// Takes the next message, and says how long it is; if it is an event, keeps it.
    fn receive(&mut self, command: &str, until: Instant) -> Result<(Message, usize), VmError> {
        let line = match self.wire.line(until) {
            Ok(line) => line,
            Err(error) => return Err(self.broken(command, error)),
        };
        let message = parse_message(&line).map_err(|reason| self.nonsense(command, reason))?;
        match message.event.as_deref().and_then(|name| event_of(name, &message.data)) {
            Some(event) => self.keep(event),
            None if command == EVENTS => {
                self.overheard = self.overheard.saturating_add(amount_of(line.len()))
            }
            None => {}
        }
        Ok((message, line.len()))
    }

    fn broken(&mut self, command: &str, error: WireError) -> VmError {
        let (vm, command) = (self.vm.clone(), command.to_owned());
        match error {
            // The answer may still come; its id distinguishes it from the next.
            WireError::Timeout => {
                // A task's limit has lost a little by now.
                let limit_ms = self.limit.as_millis().next_multiple_of(10) as u64;
                VmError::Timeout { vm, command, limit_ms }
            }
            WireError::Closed => {
                self.closed = true;
                VmError::Disconnected { vm }
            }
            WireError::TooLong => self.nonsense(&command, error.to_string()),
            WireError::Io(source) => {
                self.closed = true;
                VmError::Io { vm, command, source }
            }
        }
    }

    /// A peer that does not speak QMP is not listened to any longer.
    fn nonsense(&mut self, command: &str, reason: String) -> VmError {
        self.closed = true;
        self.unusable(command, &reason)
    }

    fn unusable(&self, command: &str, reason: &str) -> VmError {
        let (vm, command) = (self.vm.clone(), command.to_owned());
        VmError::Protocol { vm, command, reason: sanitize_reason(reason) }
    }
}

/// How much a message counts: a large one is as much work as many.
fn amount_of(length: usize) -> u32 {
    u32::try_from(length / 1024).unwrap_or(u32::MAX).saturating_add(1)
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}
