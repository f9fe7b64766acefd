//! The run: a queue of what is to happen, in simulated time.

use crate::{
    action::{Action, Chaos, SECOND},
    checker::{Checker, Violation},
    daemon::{Daemon, Message},
    faults::{Fault, Saboteur},
    world::{Serial, Slot, World},
};
use std::{
    collections::BTreeMap,
    fmt::{Debug, Write as _},
    sync::{Arc, Mutex, PoisonError},
};
use strum::IntoEnumIterator;
use vnuma_daemon::core::{
    Core, ReplyTo,
    event::{self, Ask, Command, Event, Report, Request},
};
use vnuma_policy::{
    Policies, SettlePolicy,
    scheduling::Policy,
    world::{ConnectionId, RequestId},
};
use vnuma_random::Rng;

/// Messages that wait for the daemon before location events are lost. Smaller than the real one, so that it happens.
const INBOX: usize = 512;
const RESYNC: u64 = 10 * SECOND;

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Everything follows from it.
    pub seed: u64,
    /// VMs.
    pub vms: usize,
    /// Events after which faults end.
    pub events: u64,
    /// A fault put in on purpose.
    pub fault: Option<Fault>,
}

/// What came of a run.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Outcome {
    /// Its seed.
    pub seed: u64,
    /// Events that the core was given.
    pub events: u64,
    /// Commands that came out.
    pub commands: u64,
    /// Hash of all of them.
    pub hash: String,
    /// Simulated seconds.
    pub simulated_s: f64,
    /// What happened, counted.
    pub counts: BTreeMap<&'static str, u64>,
    /// Checks that were made.
    pub checks: u64,
    /// How often the fault that was put in struck.
    pub strikes: u64,
    /// The rule that was broken, if one was.
    pub broken: Option<String>,
}

/// A run.
pub struct Simulation {
    pub(crate) now_ns: u64,
    pub(crate) rng: Rng,
    pub(crate) world: World,
    pub(crate) daemon: Daemon,
    pub(crate) checker: Checker,
    pub(crate) settings: Settings,
    pub(crate) saboteur: Saboteur,
    pub(crate) stalled_until_ns: u64,
    pub(crate) chaotic: bool,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    pub(crate) scan_soon: bool,
    incarnation: u64,
    sequence: u64,
    /// By time and order: of which daemon it is, or of the world (`None`), and what happens.
    queue: BTreeMap<(u64, u64), (Option<u64>, Action)>,
    last_request: RequestId,
    /// Answers that were given and are not checked yet.
    answers: Arc<Mutex<Vec<Answer>>>,
    events: u64,
    commands: u64,
    hash: Hasher,
    trace: Option<String>,
}

/// The answer to a request: its number, whether it is a yes, and what it says.
type Answer = (RequestId, bool, String);

/// FNV-1a of what is written.
struct Hasher(u64);

impl std::fmt::Write for Hasher {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Ok(())
    }
}

impl Simulation {
    /// A host full of VMs, and a daemon that starts.
    pub fn new(settings: Settings) -> Self {
        let mut rng = Rng::new(settings.seed);
        // A few handles stay free for machines that come later.
        let mut world = World::new(settings.vms + settings.vms / 10 + 1);
        for slot in 0..settings.vms {
            world.start(slot, &mut rng, 0);
        }
        let saboteur = Saboteur::new(settings.fault, settings.seed);
        let policy = SettlePolicy::default();
        let mut simulation = Self {
            now_ns: SECOND,
            daemon: Daemon::new(new_core(&world, &saboteur, 0, settings.seed)),
            checker: Checker::new(policy, world.host.topology.clone()),
            rng,
            world,
            settings,
            saboteur,
            stalled_until_ns: 0,
            chaotic: true,
            counts: BTreeMap::new(),
            scan_soon: false,
            incarnation: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            last_request: 0,
            answers: Arc::default(),
            events: 0,
            commands: 0,
            hash: Hasher(0xcbf2_9ce4_8422_2325),
            trace: None,
        };
        simulation.begin();
        for chaos in Chaos::iter() {
            simulation.later(SECOND, Action::Chaos(chaos));
        }
        simulation.later(SECOND, Action::Sweep);
        simulation
    }

    /// Prints all events and commands in which this text occurs.
    pub fn traced(self, text: Option<String>) -> Self {
        Self { trace: text, ..self }
    }

    fn trace(&self, what: &str, shown: impl Fn() -> String) {
        if let Some(text) = &self.trace {
            let shown = shown();
            if shown.contains(text) {
                eprintln!("{:.6} {what} {shown}", self.now_ns as f64 / SECOND as f64);
            }
        }
    }

    fn begin(&mut self) {
        self.ours(0, Action::Scan(true));
        self.ours(RESYNC, Action::Resync);
    }

    /// Runs it to its end: with faults, then without until all is quiet, then half of the VMs end. `progress` is told
    /// how many events there were.
    pub fn run(mut self, mut progress: impl FnMut(u64)) -> Outcome {
        let limit = self.settings.events;
        while self.events < limit && self.checker.broken.is_none() && self.advance() {
            progress(self.events);
        }
        if self.checker.broken.is_none() {
            self.finish();
        }
        let broken = self.checker.broken.as_ref().map(|Violation { time_ns, rule, what }| {
            format!("{rule}: at {:.6} s: {what}", *time_ns as f64 / SECOND as f64)
        });
        Outcome {
            seed: self.settings.seed,
            events: self.events,
            commands: self.commands,
            hash: format!("{:016x}", self.hash.0),
            simulated_s: self.now_ns as f64 / SECOND as f64,
            counts: self.counts,
            checks: self.checker.checks,
            strikes: self.saboteur.strikes,
            broken,
        }
    }

    /// Time goes on for so long.
    pub(crate) fn pass(&mut self, time_ns: u64) {
        let until_ns = self.now_ns + time_ns;
        while self.next_ns().is_some_and(|next_ns| next_ns <= until_ns) && self.checker.broken.is_none() {
            self.advance();
        }
        self.now_ns = until_ns;
    }

    fn deadline_ns(&self) -> Option<u64> {
        let deadline_ns = self.saboteur.deadline(self.daemon.core.next_deadline_ns());
        let waits = !self.daemon.inbox.is_empty();
        let deadline_ns = if waits { Some(self.stalled_until_ns) } else { deadline_ns };
        deadline_ns.map(|deadline_ns| deadline_ns.max(self.stalled_until_ns).max(self.now_ns))
    }

    fn next_ns(&self) -> Option<u64> {
        let queued = self.queue.first_key_value().map(|((time_ns, _), _)| *time_ns);
        [queued, self.deadline_ns()].into_iter().flatten().min()
    }

    /// The next thing happens.
    fn advance(&mut self) -> bool {
        let queued = self.queue.first_key_value().map(|((time_ns, _), _)| *time_ns);
        if let Some(deadline_ns) = self.deadline_ns()
            && queued.is_none_or(|time_ns| deadline_ns <= time_ns)
        {
            self.now_ns = deadline_ns;
            match self.daemon.inbox.pop_front() {
                Some(message) => self.take_in(message),
                None => self.wake(),
            }
            return true;
        }
        let Some(((time_ns, _), (daemon, action))) = self.queue.pop_first() else { return false };
        self.now_ns = self.now_ns.max(time_ns);
        if daemon.is_none_or(|daemon| daemon == self.incarnation) {
            self.act(action);
        }
        true
    }

    fn wake(&mut self) {
        self.step(Event::Woken);
        let next_ns = self.saboteur.deadline(self.daemon.core.next_deadline_ns());
        let served = next_ns.is_none_or(|next_ns| next_ns > self.now_ns);
        self.checker
            .expect(served, "deadline", || format!("the deadline {next_ns:?} was served, and stands"));
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Arrive(message) => self.arrive(message),
            Action::Work(connection) => self.work(connection),
            Action::TimedOut(connection, job) => self.timed_out(connection, job),
            Action::Done(connection) => self.done(connection),
            Action::LookAtProcess(vm) => self.look_at_process(vm),
            Action::LookAtThreads => self.look_at_threads(),
            Action::Move(order) => self.make_move(&order),
            Action::Confine(order) => self.set_masks(order),
            Action::Sample => self.sample(),
            Action::EndMemory(vm, serial) => self.end_memory(vm, Some(serial)),
            Action::Apply(slot, machine) => self.apply(slot, machine),
            Action::LetGo(slot, machine, device) => self.let_go(slot, machine, device),
            Action::Recover(slot, machine) => self.recover(slot, machine),
            Action::EndMigration(slot, machine) => self.end_migration(slot, machine),
            Action::EndLeft(slot, machine) => self.end_left(slot, machine),
            Action::GuestArrives(slot, machine) => self.guest_arrives(slot, machine),
            Action::Chaos(chaos) => self.chaos(chaos),
            Action::Carry(tid) => self.carry(tid),
            Action::AskMove(slot) => self.ask_of(slot, Chaos::AskMove),
            Action::Scan(again) => self.scan(again),
            Action::Resync => {
                self.event(Event::Resync);
                self.ours(RESYNC, Action::Resync);
            }
            Action::Sweep => {
                if self.stalled_until_ns < self.now_ns && self.daemon.inbox.is_empty() {
                    self.checker.sweep(self.now_ns);
                }
                self.later(SECOND, Action::Sweep);
            }
        }
    }

    /// Something of the world happens after a time.
    pub(crate) fn later(&mut self, after_ns: u64, action: Action) {
        self.push(after_ns, None, action);
    }

    /// Something of this daemon happens after a time, unless it ends before.
    pub(crate) fn ours(&mut self, after_ns: u64, action: Action) {
        self.push(after_ns, Some(self.incarnation), action);
    }

    fn push(&mut self, after_ns: u64, daemon: Option<u64>, action: Action) {
        self.sequence += 1;
        self.queue.insert((self.now_ns + after_ns, self.sequence), (daemon, action));
    }

    /// An event arrives after a time of up to `most_ns`.
    pub(crate) fn soon(&mut self, most_ns: u64, event: Event) {
        let after_ns = self.rng.within(0..most_ns);
        self.ours(after_ns, Action::Arrive(Message::Event(event)));
    }

    /// An event arrives now.
    pub(crate) fn event(&mut self, event: Event) {
        self.arrive(Message::Event(event));
    }

    fn arrive(&mut self, message: Message) {
        if self.now_ns >= self.stalled_until_ns && self.daemon.inbox.is_empty() {
            return self.take_in(message);
        }
        let may_be_lost = matches!(message, Message::Event(Event::Located(..) | Event::ThreadEnded(_)));
        if may_be_lost && self.daemon.inbox.len() >= INBOX {
            self.count("events that found the inbox full");
        } else {
            self.daemon.inbox.push_back(message);
        }
    }

    /// As the shell does: takes what the core has no use for out of a message, and gives the core the rest.
    fn take_in(&mut self, message: Message) {
        match message {
            Message::Event(event) => self.step(event),
            Message::Doorbell(slot, device, generation) => self.doorbell(slot, device, generation),
            Message::Report(connection, report) => self.reported(connection, report),
            Message::Moved(task, pid, done, tid) => {
                self.checker.move_ended(task);
                let at = self.world.read(pid, tid, self.now_ns);
                let failed = vnuma_process::ActError::Exited { pid };
                self.step(Event::Moved(task, if done { Ok(at) } else { Err(failed) }));
            }
            Message::Confined(task, pid, outcomes) => {
                let now_ns = self.now_ns;
                let located = |(vcpu, tid, outcome): (u32, i32, Result<(), vnuma_process::ActError>)| {
                    (vcpu, outcome.map(|()| self.world.read(pid, tid, now_ns).into()))
                };
                let outcomes = outcomes.into_iter().map(located).collect();
                self.step(Event::Confined(task, outcomes));
            }
        }
    }

    fn reported(&mut self, connection: ConnectionId, report: Report) {
        let Some(worker) = self.daemon.workers.get(&connection) else { return };
        let (vm, slot, machine, pid) = (worker.vm, worker.slot, worker.machine, worker.pid);
        if matches!(report, Report::Up(..) | Report::Slow(..) | Report::Silent(..) | Report::Observed(..)) {
            self.daemon.pidfds.insert(vm, (pid, slot, machine));
        }
        let first = match &report {
            Report::Outcome(
                _,
                event::Outcome::Attached(Ok(first)) | event::Outcome::Recovered(Ok(first)),
            ) => Some(*first),
            _ => None,
        };
        let device = self.world.machine(slot, machine).and_then(|machine| machine.device.as_ref());
        if let Some(first) = first {
            let device = device.map_or(0, |device| device.serial);
            self.daemon.channels.insert(vm, (slot, device, first));
            self.checker.opened(vm, first);
        }
        self.step(Event::Hypervisor(connection, report));
        if self.daemon.channels.contains_key(&vm) && !self.daemon.serves(vm) {
            self.daemon.channels.remove(&vm);
            self.checker.closed(vm);
        }
    }

    fn doorbell(&mut self, slot: Slot, device: Serial, generation: u64) {
        let served = self.daemon.channels.iter().find(|(_, open)| (open.0, open.1) == (slot, device));
        if let Some((&vm, _)) = served {
            self.step(Event::Acknowledged(vm, generation));
        }
    }

    /// An event and everything that follows from it at once.
    pub(crate) fn step(&mut self, event: Event) {
        let about = self.checker.vm_of(&event);
        let mut events = vec![event];
        while !events.is_empty() {
            for event in &events {
                self.events += 1;
                self.trace("event", || format!("{event:?}"));
                self.checker.event(self.now_ns, event);
            }
            let events_of_step: Vec<_> = events.drain(..).map(|event| self.saboteur.event(event)).collect();
            let commands = self.daemon.core.step(self.now_ns, events_of_step);
            for todo in self.saboteur.commands(commands) {
                self.commands += 1;
                self.trace("command", || format!("{:?}", todo.command));
                // Cannot fail.
                let _ = write!(self.hash, "{:?}", todo.command);
                if let Command::Ask(_, connection, Ask::Migrate(..)) = &todo.command {
                    let marked = self.is_marked(*connection);
                    self.checker.departs(*connection, marked);
                }
                if !todo.lost {
                    let open = matches!(todo.command, Command::CloseChannel(vm)
                        if self.daemon.channels.contains_key(&vm));
                    self.checker.command(&todo.command, open);
                }
                events.extend(self.carry_out(todo.command, todo.lost));
                self.take_answers();
            }
        }
        self.checker.step_ended();
        if let Some(vm) = about
            && (!self.daemon.channels.contains_key(&vm) || self.daemon.serves(vm))
        {
            self.checker.settled(vm);
        }
    }

    /// Is the machine of a connection marked to be attached?
    fn is_marked(&self, connection: ConnectionId) -> bool {
        let Some(worker) = self.daemon.workers.get(&connection) else { return true };
        self.world.machine(worker.slot, worker.machine).is_none_or(|machine| machine.marked)
    }

    /// An operator wants something.
    pub(crate) fn ask<T: Debug + Send + 'static>(&mut self, wanted: impl FnOnce(ReplyTo<T>) -> Request) {
        self.last_request += 1;
        let (request, answers) = (self.last_request, Arc::clone(&self.answers));
        let to = ReplyTo::new(move |answer| {
            let answer = (request, answer.is_ok(), format!("{answer:?}"));
            answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        });
        self.event(Event::Requested(request, wanted(to)));
    }

    fn take_answers(&mut self) {
        let answers = std::mem::take(&mut *self.answers.lock().unwrap_or_else(PoisonError::into_inner));
        for (request, yes, shown) in answers {
            self.trace("answer", || shown.clone());
            // Cannot fail.
            let _ = write!(self.hash, "{shown}");
            self.checker.answered(request, yes);
        }
    }

    /// The daemon is killed in the middle of everything, and another one starts.
    pub(crate) fn restart(&mut self) {
        self.incarnation += 1;
        let core = new_core(&self.world, &self.saboteur, self.incarnation, self.settings.seed);
        self.daemon = Daemon::new(core);
        self.checker.restarted(self.world.host.topology.clone());
        (self.stalled_until_ns, self.scan_soon) = (0, false);
        self.begin();
    }

    /// One more of something.
    pub(crate) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }
}

fn new_core(world: &World, saboteur: &Saboteur, incarnation: u64, seed: u64) -> Core {
    let replug_after_ns = (seed % 2 == 1).then_some(5 * SECOND);
    let schedule = if seed.is_multiple_of(3) { Policy::Vprobe } else { Policy::Off };
    let settle = saboteur.policy(SettlePolicy::default());
    let policies = Policies { settle, replug_after_ns, schedule, ..Policies::default() };
    Core::new(world.host.topology.clone(), policies, incarnation as u32 * 1_000_000)
}
