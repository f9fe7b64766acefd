//! The shell around the core: it collects events and carries out the core's commands.
//!
//! ```text
//!  scanner ─────┐                                ┌──▶ VM workers (a thread per hypervisor): QMP, channels made, records
//!  VM workers ──┤                                ├──▶ locator: watches threads, reads where they are
//!  locator ─────┼─▶ Inbox ─▶ Shell ─▶ Core ─────┼──▶ affinities: sets them, and keeps the record of those that policies set; scx_vnuma
//!  readings ────┤      ▲       │                 ├──▶ readings: what threads did, once a period
//!  page mover ──┤      │       │                 ├──▶ page mover: moves pages to other nodes, a few at a time
//!  observer ────┤      │       │                 ├──▶ observer: looks where the memory of VMs is
//!  hotness ─────┤      │       │                 ├──▶ hotness: watches how often it is accessed
//!  processes ───┤      │       │                 ├──▶ processes: do they run, stand still, hang
//!  host watch ──┘      │       └── outcomes ◀────┼──▶ channels: publishes, in place
//!                      │                         └──▶ watchers: events for clients
//!  API server ─────────┘ requests, one between two batches of events
//! ```
//!
//! Two sources are waited for beside the inbox, as a thread of theirs would only pass on what they say: where vCPUs go, by BPF,
//! and doorbells of guests.
//!
//! Names of threads are those of modules, but for three that reports of benchmarks have: `mover` (affinities), `memory` (page mover) and
//! `sampler` (readings).
//!
//! The shell's own thread does nothing that can wait: no file, no socket, no system call that another process can delay.
//! So neither a hypervisor that hangs nor a disk or a reader that is slow delays a publication.

mod access_samples;
mod affinities;
mod capabilities;
mod channel_records;
mod descriptions;
mod doorbells;
mod groups;
mod hotness;
pub(crate) mod inbox;
mod locator;
mod mask_records;
mod observation_streams;
mod observer;
mod others;
mod page_mover;
mod pages;
mod pin_orders;
mod pmu;
mod policy_pins;
mod processes;
mod readings;
mod report;
mod rests;
mod scanner;
mod scheduler;
#[cfg(test)]
mod stuck_vms;
mod supervisor;
mod threads;
pub(crate) mod told;
pub(crate) mod totals;
mod vm_worker;
mod watchers;

pub use channel_records::parse_record;
pub use mask_records::{MaskRecord, parse_masks};

use crate::{
    config::Config,
    core::{
        Core, Refusal,
        content::content,
        event::{Command, Event, Level, Report},
    },
    notify::Watchdog,
};
use affinities::{Move, Order};
use channel_records::ChannelRecords;
use doorbells::Doorbells;
use hotness::HotnessWatcher;
use inbox::{ApiRequest, Asked, Inbox, Message, Turn};
use locator::Locator;
use observation_streams::ObservationStreams;
use page_mover::Order as Memory;
use pin_orders::{NOT_CONNECTED, PinnedMove};
use processes::Probed;
use readings::{Order::Count, Targets, Wanted};
use rests::Rests;
use scanner::Scanner;
use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use supervisor::{Supervisor, ThreadFailed};
use totals::Totals;
use tracing::{debug, info, warn};
use vm_worker::{Job, VmWorker};
use vnuma_api as api;
use vnuma_channel::Channel;
use vnuma_hypervisor::{Source, VmBackend, VmError};
use vnuma_model::{Capability, HostTopology, Limited, Party, VmHandle, Work};
use vnuma_observe::{
    HostWatcher,
    location::{BPF, KernelEvents, monotonic_ns},
};
use vnuma_policy::{
    Policies, Publication,
    scheduling::Settings,
    world::{ConnectionId, Mechanism, RequestId, VmId},
};
use vnuma_process::{Hanging, Ledger, Worker, Workers};
use watchers::Watchers;

/// Makes backends. One lists VMs, and each VM's worker has its own, so that none waits for another.
pub type BackendFactory = Arc<dyn Fn() -> Box<dyn VmBackend> + Send + Sync>;

/// An inbox that is closed when this is dropped.
struct ClosedAtEnd(Arc<Inbox>);

impl Drop for ClosedAtEnd {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn watch_host(
    workers: &Workers,
    config: &Config,
    host: HostTopology,
    inbox: Arc<Inbox>,
) -> io::Result<HostWatcher> {
    HostWatcher::start(workers, &config.root, host, config.intervals.host, move |host| {
        inbox.tell(Event::HostChanged(host));
    })
}

/// The settings of the policies, from the configuration.
fn policies(config: &Config) -> Policies {
    Policies {
        settle: config.settle,
        replug_after_ns: config.replug_after.map(|after| after.as_nanos() as u64),
        schedule: config.policy,
        settings: Settings {
            bounds: config.policy_bounds,
            adaptive_bounds: config.policy_adaptive_bounds,
            memory_bytes_per_s: config.policy_memory,
            ..Settings::default()
        },
        memory: config.memory,
        sizes: config.sizes,
        rehome: config.rehome,
    }
}

/// The core and everything that carries out its commands.
pub(crate) struct Shell {
    core: Core,
    config: Config,
    factory: BackendFactory,
    inbox: Arc<Inbox>,
    records: ChannelRecords,
    workers: HashMap<ConnectionId, (VmId, Arc<VmWorker>)>,
    /// The host's end of each topology channel.
    channels: HashMap<VmId, Channel>,
    /// The process of each VM, as the connection to its hypervisor found it.
    pidfds: HashMap<VmId, (i32, Arc<OwnedFd>)>,
    last_request: RequestId,
    watchers: Watchers,
    totals: Totals,
    observation_streams: ObservationStreams,
    doorbells: Doorbells,
    locator: Locator,
    /// Events of BPF: where vCPUs go. They are taken here, as a thread of their own would only pass them on.
    kernel: Option<KernelEvents>,
    /// When the kernel's events and the doorbells are looked at next.
    rests: Rests,
    affinities: Worker<Order>,
    page_mover: Worker<Memory>,
    observer: Worker<observer::Order>,
    hotness: HotnessWatcher,
    readings: Worker<readings::Order>,
    processes: Worker<processes::Order>,
    scanner: Scanner,
    _host_watcher: HostWatcher,
    supervisor: Supervisor,
    /// Budgets of those that cause work: the core's, and those of backends.
    ledgers: Vec<Ledger>,
    resync_at: Instant,
    /// The service manager's watchdog, which ends a vnumad whose loop has stopped.
    watchdog: Option<Watchdog>,
    /// scx_vnuma is loaded.
    by_scheduler: bool,
}

impl Shell {
    /// Starts the threads around the core. They end when this is dropped.
    pub(crate) fn start(
        config: Config,
        host: HostTopology,
        factory: BackendFactory,
        first_epoch: u32,
        watchdog: Option<Watchdog>,
        inbox: Arc<Inbox>,
    ) -> anyhow::Result<Self> {
        let records = ChannelRecords::new(config.records.clone());
        let backend = factory();
        let supervisor = Supervisor::with(backend.workers());
        let ledgers = [inbox.ledger.clone()].into_iter().chain(backend.ledgers()).collect();
        let (groups, workers) = (&supervisor.own, &supervisor.own.host);
        let (locator, kernel) = Locator::start(workers, &host, &config, Arc::clone(&inbox))?;
        let shell = Self {
            affinities: affinities::start(
                workers,
                config.root.clone(),
                config.records.clone(),
                locator.reader(),
                Arc::clone(&inbox),
            )?,
            page_mover: page_mover::start(groups, config.root.clone(), Arc::clone(&inbox))?,
            observer: observer::start(groups, config.root.clone(), Arc::clone(&inbox))?,
            hotness: HotnessWatcher::start(groups, config.root.clone(), Arc::clone(&inbox))?,
            readings: readings::start(
                groups,
                (config.root.clone(), config.location),
                Wanted {
                    period: config.policy_period,
                    memory: config.policy_memory > 0,
                    samples: config.policy_samples,
                },
                &host,
                Arc::clone(&inbox),
            )?,
            processes: processes::start(groups, &config, Arc::clone(&inbox))?,
            scanner: Scanner::start(
                workers,
                backend,
                records.clone(),
                config.resync_interval,
                Arc::clone(&inbox),
            )?,
            _host_watcher: watch_host(workers, &config, host.clone(), Arc::clone(&inbox))?,
            doorbells: Doorbells::new()?,
            core: Core::new(host, policies(&config), first_epoch).describing_every(config.intervals.describe),
            locator,
            kernel,
            rests: Rests::new(Instant::now()),
            records,
            factory,
            inbox,
            workers: HashMap::new(),
            channels: HashMap::new(),
            pidfds: HashMap::new(),
            last_request: 0,
            watchers: Watchers::default(),
            totals: Totals::default(),
            observation_streams: ObservationStreams::default(),
            resync_at: Instant::now() + config.resync_interval,
            watchdog,
            supervisor,
            ledgers,
            by_scheduler: false,
            config,
        };
        Ok(shell)
    }

    /// Runs until the inbox is closed, or a thread has panicked or hangs. Events come first; between two batches of them one request has its
    /// turn.
    pub(crate) fn run(mut self) -> Result<(), ThreadFailed> {
        // However this ends, a panic included, senders and clients that wait are released.
        let _closed = ClosedAtEnd(Arc::clone(&self.inbox));
        let mut outcome = Ok(());
        while let Some(turn) = self.wait() {
            for message in turn.messages {
                self.take_in(message);
            }
            if let Some(Asked { request, ticket }) = turn.request {
                // Moves that do not wake this thread are taken before it is answered.
                self.look_at_kernel(Instant::now());
                self.serve(request);
                drop(ticket);
            }
            if self.resync_at <= Instant::now() {
                self.resync_at = Instant::now() + self.config.resync_interval;
                self.step([Event::Resync]);
                let world = self.core.world();
                self.inbox.ledger.retain(|party| !matches!(party, Party::Vm(id) if world.get(id).is_none()));
            }
            if self.core.next_deadline_ns().is_some_and(|deadline_ns| deadline_ns <= monotonic_ns()) {
                self.step([Event::Woken]);
            }
            let now = Instant::now();
            outcome = self.supervisor.look(now);
            if outcome.is_err() {
                self.inbox.close();
            }
            let looks = self.supervisor.looks();
            self.step(looks);
            if let Some(watchdog) = &mut self.watchdog {
                watchdog.turned(now);
            }
        }
        self.give_pins_back();
        outcome
    }

    /// What there is to do next. `None` once the inbox is closed.
    fn wait(&mut self) -> Option<Turn> {
        self.look();
        self.watchers.send();
        let (now, mut until, mut readable) = (Instant::now(), self.wake_at(), Vec::with_capacity(2));
        let sources = [
            (self.kernel.as_ref().map(KernelEvents::fd), self.rests.kernel()),
            (Some(self.doorbells.fd()), self.rests.doorbells()),
        ];
        for (fd, rests_until) in sources {
            match fd {
                Some(fd) if rests_until <= now => readable.push(fd),
                Some(_) => until = until.min(rests_until),
                None => {}
            }
        }
        self.inbox.take(until, &readable)
    }

    /// Takes what the kernel and guests have to say, unless it rests from that.
    fn look(&mut self) {
        let now = Instant::now();
        self.look_at_kernel(now);
        if self.rests.doorbells() <= now {
            let rung = self.doorbells.take();
            if !rung.is_empty() {
                self.rests.took_doorbells(now);
            }
            let events: Vec<_> = rung.into_iter().flat_map(|vm| self.doorbell(vm)).flatten().collect();
            self.step(events);
        }
    }

    fn look_at_kernel(&mut self, now: Instant) {
        let rests = self.rests.kernel() > now;
        let Some(kernel) = self.kernel.as_mut().filter(|_| !rests) else { return };
        let mut events = Vec::new();
        match kernel.take(&mut events) {
            Some(rest) => self.rests.took_events(now, rest),
            // Polling has taken over.
            None => self.kernel = None,
        }
        self.locator.afford(&mut events);
        for events in locator::split(&events) {
            let events: Vec<_> = events.iter().filter_map(|event| self.locator.take(event)).collect();
            self.step(events);
        }
    }

    fn wake_at(&self) -> Instant {
        let until = |deadline_ns: u64| Duration::from_nanos(deadline_ns.saturating_sub(monotonic_ns()));
        let due = self.core.next_deadline_ns().map(|deadline_ns| Instant::now() + until(deadline_ns));
        // The scanner reports at the same interval, so both share one wake-up.
        let latest = self.resync_at + self.config.resync_interval / 4;
        let turn = self.watchdog.as_ref().map(Watchdog::due);
        due.into_iter().chain(turn).fold(latest, Instant::min)
    }

    /// Handles events together, and then every outcome that is known at once.
    fn step(&mut self, events: impl IntoIterator<Item = Event>) {
        let mut events: Vec<_> = events.into_iter().collect();
        while !events.is_empty() {
            let mut commands = self.core.step(monotonic_ns(), events.drain(..));
            events.extend(commands.drain(..).filter_map(|command| self.carry_out(command)));
            self.core.reuse(commands);
        }
    }

    /// Keeps the resources of a message here, and passes the rest to the core.
    fn take_in(&mut self, message: Message) {
        match message {
            Message::Event(Event::HostChanged(host)) => {
                self.locator.order(locator::Order::Host(host.clone()));
                self.readings.order(readings::Order::Host(host.clone()));
                self.step([Event::HostChanged(host)]);
            }
            Message::Event(Event::Switched(switch)) => {
                self.by_scheduler = switch.to == Mechanism::Scheduler;
                self.step([Event::Switched(switch)]);
            }
            Message::Event(event @ Event::Sampled(_)) => {
                self.step([event]);
                self.observation_streams.give(|| self.core.observation());
            }
            Message::Event(event) => self.step([event]),
            Message::Worker(connection, report) => self.reported(connection, report),
            Message::Pinned(pid, tids, event) => {
                tids.into_iter().for_each(|tid| self.affinities.order(Order::Forget { pid, tid }));
                self.step([event]);
            }
            Message::Unpinned(task, pid, pidfd, pins) => {
                let vcpus = self.threads_of_vcpus(task.vm);
                self.affinities.order(Order::Restore { task, pid, pidfd, vcpus, pins });
            }
        }
    }

    fn reported(&mut self, connection: ConnectionId, report: report::Report) {
        use report::Report as R;
        let Some(&(vm, _)) = self.workers.get(&connection) else { return };
        let report = match report {
            R::Up { description, pidfd, channel } => {
                self.keep_process(vm, description.pid, pidfd);
                Report::Up(description, channel)
            }
            R::Slow { problem, pid, pidfd } => {
                self.keep_process(vm, pid, pidfd);
                Report::Slow(problem, pid)
            }
            R::Silent { problem, pid, pidfd, observed } => {
                self.keep_process(vm, pid, pidfd);
                self.step([Event::Hypervisor(connection, Report::Silent(problem, pid))]);
                let Some(observed) = observed else { return };
                Report::Observed(pid, observed.vcpus, observed.certain)
            }
            R::Observed { pid, pidfd, observed } => {
                self.keep_process(vm, pid, pidfd);
                Report::Observed(pid, observed.vcpus, observed.certain)
            }
            R::Channel(task, channel, of) => {
                Report::Outcome(task, of(channel.map(|channel| self.keep(vm, channel))))
            }
            R::Plain(report) => report,
        };
        self.step([Event::Hypervisor(connection, report)]);
        // The core may have dropped this channel in that step.
        let served = |vm: &VmId| {
            let known = self.core.world().get(*vm).and_then(|managed| managed.vm.as_ref());
            known.is_some_and(|vm| vm.channel.generation().is_some())
        };
        if self.channels.contains_key(&vm) && !served(&vm) {
            self.channels.remove(&vm);
        }
        // Likewise for a process that the core does not watch.
        let process = self.core.world().get(vm).and_then(|managed| managed.process);
        let watched = |pid: i32| process.is_some_and(|process| process.pid == pid);
        if self.pidfds.get(&vm).is_some_and(|(pid, _)| !watched(*pid)) {
            self.pidfds.remove(&vm);
        }
    }

    /// Keeps the pidfd of a VM's process. The first one stays in use for as long as the process lives.
    fn keep_process(&mut self, vm: VmId, pid: i32, pidfd: OwnedFd) {
        let known = self.pidfds.get(&vm).filter(|(known, _)| *known == pid);
        if known.is_none_or(|(_, known)| processes::has_ended(known)) {
            self.pidfds.insert(vm, (pid, Arc::new(pidfd)));
        }
    }

    fn keep(&mut self, vm: VmId, channel: Channel) -> u64 {
        let next = channel.next_generation();
        if let Err(error) = self.doorbells.watch(vm, &channel) {
            self.log(
                Some(vm),
                Level::Warn,
                &format!("acknowledgements of a guest cannot be received: {error}"),
            );
        }
        self.channels.insert(vm, channel);
        next
    }

    /// What a guest says that has changed its area of the channel.
    fn doorbell(&mut self, vm: VmId) -> [Option<Event>; 2] {
        let Some(channel) = self.channels.get_mut(&vm) else { return [None, None] };
        let acknowledged = channel.take_acknowledgement();
        let status = channel.guest_status().driver;
        // Nearly always it says the same as before, and the core would take a step to find that out.
        let known = self.core.world().get(vm).and_then(|managed| managed.vm.as_ref());
        let news = known.is_none_or(|known| known.stats.driver != status);
        let acknowledged = acknowledged.unwrap_or_else(|error| {
            self.log(Some(vm), Level::Warn, &format!("cannot read acknowledgements: {error}"));
            None
        });
        [news.then_some(Event::Driver(vm, status)), acknowledged.map(|of| Event::Acknowledged(vm, of))]
    }

    fn serve(&mut self, request: ApiRequest) {
        match request {
            // A client that is gone is no error, here and below.
            ApiRequest::Names(reply) => drop(reply.send(self.core.names())),
            ApiRequest::Show(name, reply) => drop(reply.send(self.core.show(&name))),
            ApiRequest::Scheduling(name, reply) => drop(reply.send(self.core.show_scheduling(&name))),
            ApiRequest::Uses(after, reply) => drop(reply.send(self.core.uses(after))),
            ApiRequest::Daemon(reply) => drop(reply.send(self.describe_self())),
            ApiRequest::Totals(reply) => {
                let thread_panics = self.supervisor.panics();
                drop(reply.send(Totals { thread_panics, ..self.totals.with(&self.core) }));
            }
            ApiRequest::Watch(kinds, reply) => drop(reply.send(self.watchers.add(kinds))),
            ApiRequest::Record(reply) => drop(reply.send(self.observation_streams.add())),
            ApiRequest::Act(wanted) => {
                self.last_request += 1;
                self.step([Event::Requested(self.last_request, wanted)]);
            }
        }
    }

    fn describe_self(&self) -> api::Daemon {
        let capabilities = &self.inbox.capabilities;
        let locations = capabilities.of(Capability::LOCATIONS);
        api::Daemon {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id().cast_signed(),
            why_not_bpf: locations.why_not(BPF).map(str::to_owned),
            location_source: locations.in_use,
            affinity_events: capabilities.of(Capability::AFFINITY).passed_over.is_empty(),
            location_events_lost: self.locator.lost(),
            capabilities: capabilities.all(),
            replug_after_s: self.config.replug_after.map(|after| after.as_secs()),
            policy: self.config.policy.to_string(),
            policy_period_ms: self.config.policy_period.as_millis() as u64,
            counters: capabilities.counters(),
            places: capabilities.places(),
            libvirt: self.libvirt(),
            watchers: self.watchers.count() + self.observation_streams.count(),
            watchers_dropped: self.watchers.dropped() + self.observation_streams.dropped(),
            silent_threads: self.supervisor.silent(),
            limited: self.limited(),
            hanging_looks: self.supervisor.hanging().into_iter().map(|look| self.hanging(look)).collect(),
        }
    }

    fn limited(&self) -> Vec<Limited> {
        let party = |party| match party {
            Party::Vm(id) => {
                format!("vm {}", self.core.world().get(id).map_or("that is gone", |of| of.name()))
            }
            other => inbox::who(other),
        };
        let shown = Ledger::limited_by(&self.ledgers).into_iter().map(|((work, of), (times, ago))| Limited {
            work: work.name().to_owned(),
            party: party(of),
            times,
            last_ns: monotonic_ns().saturating_sub(ago.as_nanos() as u64),
        });
        shown.collect()
    }

    fn hanging(&self, look: Hanging) -> api::HangingLook {
        let vm = self.core.world().get(look.vm).map(|known| known.name().to_owned());
        let seconds = look.since.elapsed().as_secs();
        api::HangingLook { vm, pid: look.pid, thread: look.by, seconds }
    }

    fn libvirt(&self) -> Vec<api::LibvirtConnection> {
        let shown = |source: Source| api::LibvirtConnection { uri: source.name, problem: source.problem };
        self.scanner.sources().into_iter().map(shown).collect()
    }

    /// Carries out a command. Returns its outcome if that is known at once.
    fn carry_out(&mut self, command: Command) -> Option<Event> {
        match command {
            Command::Connect(vm, connection, handle) => return self.connect(vm, connection, handle),
            Command::Disconnect(connection) => drop(self.workers.remove(&connection)),
            Command::Ask(task, connection, ask) => self.order(connection, Job::Ask(task, ask)),
            Command::Describe(connection, payer) => return self.describe(connection, payer),
            Command::Probe(connection) => self.order(connection, Job::Probe),
            Command::Publish(task, generation, publication) => {
                return Some(Event::Published(task, self.publish(task.vm, generation, publication)));
            }
            Command::CloseChannel(vm) => drop(self.channels.remove(&vm)),
            Command::ForgetRecord(pid) => {
                self.scanner.forget_record(pid);
                self.affinities.order(Order::ForgetProcess(pid));
            }
            Command::Watch(pid, tid) => {
                if let Some(vm) = self.core.vm_of_thread(tid) {
                    self.locator.order(locator::Order::Watch(vm, pid, tid));
                }
            }
            Command::Unwatch(tid) => self.locator.order(locator::Order::Unwatch(tid)),
            Command::Defer(threads, waits) => self.locator.order(locator::Order::Defer(threads, waits)),
            Command::Look(threads) => self.locator.order(locator::Order::Look(threads)),
            Command::Move { task, pid, tid, cpus, .. } => {
                return self.make(Move { task, pid, pidfd: self.pidfd(task.vm, pid), tid, cpus });
            }
            Command::Confine(task, pid, masks) => {
                let pinner = || self.pinner(task.vm).map_or_else(Weak::new, Arc::downgrade);
                let (pinner, pidfd) = (self.keeps_pins(task.vm).then(pinner), self.pidfd(task.vm, pid));
                self.affinities.order(Order::Confine { task, pid, pidfd, masks, pinner });
            }
            Command::Follow(task, pid, vcpus, cpus) => {
                let pidfd = self.pidfd(task.vm, pid);
                self.affinities.order(Order::Follow { task, pid, pidfd, vcpus, cpus });
            }
            Command::MoveMemory(task, pid, order) => {
                self.page_mover.order(Memory::Move { task, pid, pidfd: self.pidfd(task.vm, pid), order });
            }
            Command::ObserveMemory(task, pid, areas) => {
                self.observer.order(observer::Order { task, pid, pidfd: self.pidfd(task.vm, pid), areas });
            }
            Command::WatchHotness(task, pid, areas) => {
                self.hotness.watch(task, pid, self.pidfd(task.vm, pid), areas);
            }
            Command::StopMemory(task) => self.page_mover.order(Memory::Stop(task)),
            Command::RestoreMasks(task, pid) => self.restore(task, pid),
            Command::SettlePins(vm) => self.settle_pins(vm),
            // Without scx_vnuma it has no use. A look for that is ordered with each resync.
            Command::Rank { .. } if !self.by_scheduler => {}
            Command::Rank { vm, pid, vcpus, stealing } => {
                self.affinities.order(Order::Rank { pid, pidfd: self.pidfd(vm, pid), vcpus, stealing });
            }
            Command::LookForScheduler => self.affinities.order(Order::Look),
            Command::ForgetMask(pid, tid) => self.affinities.order(Order::Forget { pid, tid }),
            Command::Count(vm, pid, vcpus) => {
                self.readings.order(Count(Targets { vm, pid, pidfd: self.pidfd(vm, pid), vcpus }));
            }
            Command::WatchProcess(vm, pid) => self.watch_process(vm, pid),
            Command::UnwatchProcess(vm, pid) => self.unwatch_process(vm, pid),
            Command::Reply(reply) => reply.give(),
            Command::Announce(event) => {
                self.totals.add(&event);
                self.watchers.announce(event);
            }
            Command::Log(_, Level::Debug, line) => debug!("{line}"),
            Command::Log(about, level, line) => self.log(about, level, &line),
        }
        None
    }

    /// A user who may only look, and has wanted too many descriptions, gets none.
    fn describe(&self, connection: ConnectionId, payer: Option<Party>) -> Option<Event> {
        if let Some(user @ Party::User(_)) = payer
            && self.inbox.ledger.spend(Work::Descriptions, user, descriptions::LEAST).is_err()
        {
            return Some(Event::Hypervisor(connection, Report::NotDescribed));
        }
        self.order(connection, Job::Describe(payer));
        None
    }

    /// A line about a VM that has caused too many is counted.
    fn log(&self, about: Option<VmId>, level: Level, line: &str) {
        let more = match about.map(|vm| self.inbox.ledger.line(Party::Vm(vm))) {
            Some(None) => return,
            Some(more) => more.map_or_else(String::new, |more| more.to_string()),
            None => String::new(),
        };
        match level {
            Level::Warn => warn!("{line}{more}"),
            Level::Info | Level::Debug => info!("{line}{more}"),
        }
    }

    fn unwatch_process(&mut self, vm: VmId, pid: i32) {
        // Another channel may have taken its place.
        if self.pidfds.get(&vm).is_some_and(|(known, _)| *known == pid) {
            self.pidfds.remove(&vm);
        }
        self.processes.order(processes::Order::Unwatch(vm, pid));
    }

    fn watch_process(&self, vm: VmId, pid: i32) {
        let probed = Probed::of(self.core.world().get(vm).map(|known| known.abilities));
        self.processes.order(processes::Order::Watch(vm, pid, self.pidfd(vm, pid), probed));
    }

    /// A process of a VM.
    fn pidfd(&self, vm: VmId, pid: i32) -> Option<Arc<OwnedFd>> {
        let process = self.pidfds.get(&vm).filter(|(known, _)| *known == pid);
        process.map(|(_, pidfd)| Arc::clone(pidfd))
    }

    /// Does the manager of the VM keep pins of its own, so that vnumad confines vCPUs through it?
    fn keeps_pins(&self, vm: VmId) -> bool {
        self.core.world().get(vm).is_some_and(|known| known.abilities.pins)
    }

    /// The worker that can ask the VM's manager for pins.
    fn pinner(&self, vm: VmId) -> Option<&Arc<VmWorker>> {
        let connection = self.core.world().get(vm)?.link.connection()?;
        self.workers.get(&connection).map(|(_, worker)| worker)
    }

    /// Orders a move of a vCPU: from the VM's manager if that keeps pins, else from the thread that sets affinities.
    fn make(&self, wanted: Move) -> Option<Event> {
        if !self.keeps_pins(wanted.task.vm) {
            self.affinities.order(Order::Move(wanted));
            return None;
        }
        let Move { task, pid, tid, cpus, .. } = wanted;
        let pin = PinnedMove::new(task, (pid, tid), cpus, Arc::clone(&self.inbox));
        let refused = match self.pinner(task.vm) {
            Some(worker) => worker.pin(pin).err()?,
            None => pin,
        };
        Some(refused.give_up(&NOT_CONNECTED))
    }

    fn connect(&mut self, vm: VmId, connection: ConnectionId, handle: VmHandle) -> Option<Event> {
        let (inbox, backend) = (Arc::clone(&self.inbox), (self.factory)());
        let (records, reader) = (self.records.clone(), self.locator.reader());
        let name = self.core.world().get(vm).map_or_else(String::new, |vm| vm.fallback_name.clone());
        let at = (handle.clone(), name);
        let ids = (vm, connection);
        match VmWorker::start(&self.supervisor.own.vms, ids, at, backend, records, reader, inbox) {
            Ok(worker) => {
                self.workers.insert(connection, (vm, Arc::new(worker)));
                None
            }
            Err(source) => {
                let command = "starting a thread".to_owned();
                let lost = VmError::Io { vm: handle.to_string(), command, source };
                Some(Event::Hypervisor(connection, Report::Lost(lost)))
            }
        }
    }

    /// A worker that is gone has reported its end.
    fn order(&self, connection: ConnectionId, job: Job) {
        if let Some((_, worker)) = self.workers.get(&connection) {
            worker.order(job);
        }
    }

    fn publish(&mut self, vm: VmId, generation: u64, publication: Publication) -> Result<u64, Refusal> {
        let name = || {
            let known = self.core.world().get(vm);
            known.map(|managed| managed.name().to_owned()).unwrap_or_default()
        };
        let Publication { distances, vcpus, devices, why, .. } = publication;
        let content = content(distances, vcpus.into_iter(), devices.into_iter());
        let content = content.map_err(|source| Refusal::Content { vm: name(), source })?;
        let Some(channel) = self.channels.get_mut(&vm) else {
            return Err(Refusal::NotAttached { vm: name() });
        };
        if channel.next_generation() != generation {
            let source = io::Error::other("the channel is at another generation");
            return Err(Refusal::System { vm: name(), source });
        }
        channel.publish(&content).map_err(|source| Refusal::Channel { vm: name(), source })?;
        debug!("{}: generation {generation:016x} is published: {why:?}", name());
        Ok(channel.next_generation())
    }
}
