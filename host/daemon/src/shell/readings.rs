//! Reads what vCPU threads did, once a period, while some VM has a policy: counters, time on a CPU and without one, masks,
//! and how long the host's CPUs were idle. It decides nothing.

use super::{
    access_samples::{AccessSampling, Sampled},
    capabilities::{GROUPS, IBS},
    groups::Groups,
    inbox::{Inbox, Message},
    pages::PageReader,
    pmu::{Count, Perf, Pmu, hear},
    threads::{self, Known},
};
use crate::core::event::Event;
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tracing::{info, warn};
use vnuma_api as api;
use vnuma_counters::{Change, Detected, Heard, PATIENCE, Silence, Source};
use vnuma_model::{ApicId, Capability, CpuId, CpuLayout, HostTopology};
use vnuma_observe::{
    location::{Prefer, monotonic_ns},
    read_cpu_layout,
};
use vnuma_policy::{
    scheduling::CpuSample,
    world::{Counted, HostReading, VcpuReading, VmId, VmReading},
};
use vnuma_process::{Groups as Workers, Jobs, Looker, Next, Worker, on_thread, procfs};

/// Periods after which counters that could not be opened are tried again.
const TRY_AGAIN: u32 = 10;

/// How long opening the counters of a thread may take. It takes microseconds.
const LIMIT: Duration = Duration::from_secs(5);

/// All of the time, per mille.
const WHOLE: u32 = 1000;

/// The threads of a VM that are counted.
#[derive(Debug)]
pub(super) struct Targets {
    pub(super) vm: VmId,
    pub(super) pid: i32,
    /// The process, as a pidfd. `None`: it has ended.
    pub(super) pidfd: Option<Arc<OwnedFd>>,
    pub(super) vcpus: Vec<(ApicId, i32)>,
}

pub(super) enum Order {
    /// Counts these threads of a VM from now on, and no others of it.
    Count(Targets),
    /// The host's topology has changed.
    Host(HostTopology),
}

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) period: Duration,
    /// Where memory may go.
    pub(super) memory: bool,
    /// Samples of memory accesses.
    pub(super) samples: bool,
}

/// Starts the thread that reads once a period.
pub(super) fn start(
    workers: &Workers,
    (root, prefer): (PathBuf, Prefer),
    wanted: Wanted,
    host: &HostTopology,
    inbox: Arc<Inbox>,
) -> io::Result<Worker<Order>> {
    let pmu = Perf { root: root.clone() };
    let (all, host) = (workers.clone(), host.clone());
    workers.host.start("sampler", move |orders: Jobs<Order>| {
        let looker = Looker::new(&all, orders.heartbeat(), LIMIT, || ());
        let mut task = Task::new((all, looker), pmu, (root, prefer), wanted, &host, inbox);
        task.detect();
        task.run(wanted.period, &orders);
    })
}

/// A thread that is counted.
struct Thread<C> {
    vcpu: ApicId,
    read: threads::Thread,
    /// Position of its control group.
    group: Option<usize>,
    counters: Option<C>,
    samples: Option<Sampled>,
    /// Why it has no counters, or no samples.
    problem: Option<String>,
    /// Per mille of its time on a CPU in which its counters counted, when it ran last.
    permille: u32,
    /// Periods since they were tried to be opened.
    tried: u32,
    /// Its times at the end of the last period.
    times: Option<procfs::CpuTimes>,
}

impl<C: Count> Thread<C> {
    /// They are opened anew with the end of a period.
    fn close(&mut self) {
        (self.counters, self.samples) = (None, None);
        self.read.set_events(Vec::new());
    }
}

struct Vm<C> {
    pid: i32,
    pidfd: Arc<OwnedFd>,
    threads: Vec<Thread<C>>,
}

impl<C> Vm<C> {
    fn read_groups(&mut self, groups: &mut Groups) {
        let tids: Vec<i32> = self.threads.iter().map(|thread| thread.read.tid).collect();
        for (thread, group) in self.threads.iter_mut().zip(groups.read(self.pid, &tids)) {
            thread.group = group;
        }
    }
}

struct Task<P: Pmu> {
    /// Threads of the host, one of which it may start.
    workers: Workers,
    looker: Looker<()>,
    pmu: P,
    root: PathBuf,
    inbox: Arc<Inbox>,
    host: Arc<HostTopology>,
    layout: Option<Arc<CpuLayout>>,
    detected: Detected,
    /// Whether its source counts.
    silence: Silence,
    vms: BTreeMap<VmId, Vm<P::Counters>>,
    /// Only while something is counted, and counters do not say which node an access goes to or memory may be moved.
    pages: Option<PageReader>,
    wanted: Wanted,
    /// Only while something is counted, and the operator wants samples.
    sampling: Option<Arc<AccessSampling>>,
    /// How long each CPU had been idle at the end of the last period.
    idle: Vec<(CpuId, u64)>,
    /// When the last period ended; 0 before the first.
    read_ns: u64,
    reader: threads::Reader,
    groups: Groups,
}

impl<P: Pmu> Task<P> {
    fn new(
        (workers, looker): (Workers, Looker<()>),
        pmu: P,
        (root, prefer): (PathBuf, Prefer),
        wanted: Wanted,
        host: &HostTopology,
        inbox: Arc<Inbox>,
    ) -> Self {
        Self {
            workers,
            looker,
            pmu,
            host: Arc::new(host.clone()),
            layout: None,
            detected: Detected { events: None, passed_over: Vec::new() },
            silence: Silence::default(),
            vms: BTreeMap::new(),
            pages: None,
            wanted,
            sampling: None,
            idle: Vec::new(),
            read_ns: 0,
            reader: threads::Reader::new(root.clone(), prefer, inbox.capabilities.clone()),
            groups: Groups::new(root.clone(), wanted.period),
            root,
            inbox,
        }
    }

    fn run(&mut self, period: Duration, orders: &Jobs<Order>) {
        let mut read_at = Instant::now();
        loop {
            // No policy, no cost.
            match orders.wait((!self.vms.is_empty()).then_some(read_at)) {
                Next::Job(Order::Count(targets)) => {
                    if self.vms.is_empty() {
                        // A shorter period says too little.
                        read_at = Instant::now() + period;
                    }
                    self.count(targets);
                }
                Next::Job(Order::Host(host)) => (self.host, self.layout) = (Arc::new(host), None),
                Next::Nothing => {
                    // One that is late is not made up for.
                    read_at = (read_at + period).max(Instant::now() + period / 2);
                    if !self.read() {
                        return;
                    }
                }
                Next::End => return,
            }
        }
    }

    fn detect(&mut self) {
        let given_up = self.silence.given_up();
        self.detected = self.pmu.detect(&given_up);
        self.inbox.capabilities.publish(self.detected.capability());
        let given_up = given_up.into_iter().map(|passed| passed.way).collect();
        let numbers = api::Counters { given_up, ..api::Counters::default() };
        self.inbox.capabilities.note_counters(|counters| *counters = numbers);
    }

    /// Gives the source up for the next best one if it counts nothing, and tries it again later.
    fn doubt(&mut self, heard: &Heard) {
        let Some(change) = self.silence.period(self.detected.source(), heard) else { return };
        if let Change::Counts(source) = change {
            info!(%source, "the source of counts that was tried again counts");
            return;
        }
        self.detect();
        let now = self.detected.source();
        match change {
            Change::GivenUp(source) => {
                warn!(%source, %now, "a source of counts is given up: it counted nothing in {PATIENCE} periods");
            }
            _ => info!(%now, "a source of counts that was given up is tried again"),
        }
        for thread in self.vms.values_mut().flat_map(|vm| &mut vm.threads) {
            thread.close();
            (thread.problem, thread.permille, thread.tried) = (None, WHOLE, TRY_AGAIN);
        }
        self.look_at_pages();
    }

    /// Pages are looked at where counters do not say which node an access goes to, and where memory may be moved.
    fn look_at_pages(&mut self) {
        let wanted = self.wanted.memory || self.detected.source() != Source::PerNode;
        if wanted == self.pages.is_some() {
            return;
        }
        // Without it accesses are attributed to nodes less well, or not at all; the policies see that as a gap.
        let start = || PageReader::start(&self.workers, self.root.clone(), self.wanted.memory).ok();
        self.pages = wanted.then(start).flatten();
        if let Some(pages) = &self.pages {
            self.vms.iter().for_each(|(&vm, counted)| pages.watch(vm, counted.pid));
        }
    }

    fn count(&mut self, targets: Targets) {
        let Targets { vm, pid, pidfd, vcpus } = targets;
        if self.vms.is_empty() && !vcpus.is_empty() {
            self.begin();
        }
        let before = self.vms.remove(&vm).filter(|before| before.pid == pid);
        let Some(pidfd) = pidfd.filter(|_| !vcpus.is_empty()) else {
            self.pages.iter().for_each(|pages| pages.unwatch(vm));
            return self.end_if_unused();
        };
        let mut before = before.map(|before| before.threads).unwrap_or_default();
        let thread = |(vcpu, tid)| {
            let known = before.iter().position(|thread| (thread.vcpu, thread.read.tid) == (vcpu, tid));
            known.map(|at| before.swap_remove(at)).unwrap_or_else(|| {
                let (group, counters, samples, problem, times) = (None, None, None, None, None);
                let (read, tried, permille) = (threads::Thread::new(pid, tid), TRY_AGAIN, WHOLE);
                Thread { vcpu, read, group, counters, samples, problem, permille, tried, times }
            })
        };
        let threads = vcpus.into_iter().map(thread).collect();
        let mut vm_threads = Vm { pid, pidfd, threads };
        self.begin_threads(&mut vm_threads.threads);
        vm_threads.read_groups(&mut self.groups);
        self.open_counters(vm, &mut vm_threads);
        self.vms.insert(vm, vm_threads);
        self.pages.iter().for_each(|pages| pages.watch(vm, pid));
    }

    /// Reads the times of new threads, from which their first period goes.
    fn begin_threads(&mut self, threads: &mut [Thread<P::Counters>]) {
        let is_new = |thread: &&mut Thread<P::Counters>| thread.times.is_none();
        self.reader.read(threads.iter_mut().filter(is_new).map(|thread| &mut thread.read).collect());
        for thread in threads.iter_mut().filter(is_new) {
            thread.times = thread.read.take().map(|known| known.times);
        }
    }

    /// The first VM is to be counted.
    fn begin(&mut self) {
        self.reader.begin();
        // The operator may have changed what is permitted, and ended who held the counters.
        self.silence = Silence::default();
        self.detect();
        (self.read_ns, self.layout) = (monotonic_ns(), None);
        self.reader.read(Vec::new());
        self.read_idle();
        self.sampling = self.wanted.samples.then(|| Arc::new(AccessSampling::find(&self.root)));
        if let Some(sampling) = &self.sampling {
            let by = Capability::either(Capability::SAMPLES, [IBS, "none"], sampling.problem());
            self.inbox.capabilities.publish(by);
        }
        self.look_at_pages();
    }

    fn end_if_unused(&mut self) {
        if self.vms.is_empty() {
            self.pages = None;
            self.idle.clear();
            self.reader.end();
            self.inbox.capabilities.withdraw(&[Capability::GROUPS, Capability::SAMPLES]);
            self.note_numbers();
        }
    }

    /// A period has ended. False once the inbox is closed.
    fn read(&mut self) -> bool {
        let began_ns = monotonic_ns();
        let period_ns = began_ns.saturating_sub(std::mem::replace(&mut self.read_ns, began_ns));
        let threads = self.vms.values_mut().flat_map(|vm| &mut vm.threads);
        self.reader.read(threads.map(|thread| &mut thread.read).collect());
        let cpus = self.read_idle();
        let layout = match &self.layout {
            Some(layout) => Arc::clone(layout),
            // Of a host that does not say, all CPUs are taken as cores of their own that are not isolated.
            None => Arc::new(read_cpu_layout(&self.root, &self.host).unwrap_or_default()),
        };
        self.layout = Some(Arc::clone(&layout));
        if self.groups.forget_if_old() {
            self.vms.values_mut().for_each(|vm| vm.read_groups(&mut self.groups));
        }
        let source = self.detected.source().name();
        let vms = self.read_vms();
        let mut heard = Heard::default();
        vms.iter().flat_map(|vm| &vm.vcpus).for_each(|vcpu| hear(&mut heard, vcpu));
        self.doubt(&heard);
        // Now, so that they count for the whole of the next period.
        let mut counted = std::mem::take(&mut self.vms);
        counted.iter_mut().for_each(|(&vm, threads)| self.open_counters(vm, threads));
        self.vms = counted;
        self.note_numbers();
        let by = Capability::either(Capability::GROUPS, [GROUPS, "defaults"], self.groups.problem());
        self.inbox.capabilities.publish(by);
        let groups = self.groups.known();
        let memory = self.pages.as_ref().map(PageReader::nodes).unwrap_or_default();
        let reading = HostReading { began_ns, period_ns, source, layout, cpus, groups, memory, vms };
        self.inbox.send(Message::Event(Event::Sampled(Box::new(reading))))
    }

    /// What the threads of each VM did.
    fn read_vms(&mut self) -> Vec<VmReading> {
        let (none, sampling) = (self.detected.events.is_none(), self.sampling.as_deref());
        let mut vms = Vec::with_capacity(self.vms.len());
        for (&vm, counted) in &mut self.vms {
            let (pages, memory) = self.pages.as_ref().map(|pages| pages.of(vm)).unwrap_or_default();
            let threads = counted.threads.iter_mut();
            let vcpus = threads.filter_map(|thread| period_of(thread, none, sampling)).collect();
            vms.push(VmReading { vm, pid: counted.pid, pages, memory, vcpus });
        }
        vms
    }

    /// How long each CPU was idle since the last call.
    fn read_idle(&mut self) -> Vec<CpuSample> {
        let now = self.reader.idle_times();
        let before = std::mem::replace(&mut self.idle, now);
        let since = |&(cpu, idle_ns): &(CpuId, u64)| {
            let at = before.binary_search_by_key(&cpu, |(cpu, _)| *cpu).ok()?;
            Some(CpuSample { cpu, idle_ns: idle_ns.saturating_sub(before[at].1) })
        };
        self.idle.iter().filter_map(since).collect()
    }

    /// Opens the counters of threads that have none. What cannot be opened is tried again after some periods.
    fn open_counters(&mut self, vm: VmId, Vm { pid, pidfd, threads }: &mut Vm<P::Counters>) {
        let Some(events) = &self.detected.events else { return };
        let (opener, events, pid) = (self.pmu.opener(), Arc::new(events.clone()), *pid);
        for thread in threads.iter_mut().filter(|thread| thread.counters.is_none()) {
            thread.tried += 1;
            if thread.tried < TRY_AGAIN {
                continue;
            }
            thread.tried = 0;
            let (tid, pidfd) = (thread.read.tid, Arc::clone(pidfd));
            let (opener, events) = (Arc::clone(&opener), Arc::clone(&events));
            let sampling = self.sampling.clone();
            let open = move |_: &mut ()| {
                // Counters can be opened by the thread's number only: those of a thread that is not the VM's are closed at once.
                let counters = match on_thread(pidfd.as_fd(), pid, tid, || opener(tid, &events)) {
                    Some(opened) => opened.map_err(|error| error.to_string())?,
                    None => return Err(format!("thread {tid} does not belong to process {pid}")),
                };
                let samples = sampling.and_then(|sampling| sampling.open(&pidfd, pid, tid)).transpose();
                Ok((counters, samples))
            };
            let opened = self.looker.look((vm, pid), open);
            match opened.unwrap_or_else(|error| Err(error.to_string())) {
                Ok((counters, samples)) => {
                    thread.read.set_events(counters.ids());
                    (thread.counters, thread.problem) = (Some(counters), None);
                    match samples {
                        Ok(samples) => thread.samples = samples,
                        Err(why) => thread.problem = Some(why),
                    }
                }
                Err(why) => thread.problem = Some(why),
            }
        }
    }

    fn note_numbers(&self) {
        let threads = || self.vms.values().flat_map(|vm| &vm.threads);
        let shared = threads().map(|thread| thread.permille).filter(|permille| *permille < WHOLE);
        self.inbox.capabilities.note_counters(|counters| {
            counters.threads = threads().count();
            counters.failed = threads().filter(|thread| thread.problem.is_some()).count();
            counters.why_failed = threads().find_map(|thread| thread.problem.clone());
            (counters.shared, counters.least_permille) = (shared.clone().count(), shared.min());
        });
    }
}

/// A thread's period. `None`: it has ended, or its period before is not known yet.
fn period_of<C: Count>(
    thread: &mut Thread<C>,
    no_counters: bool,
    sampling: Option<&AccessSampling>,
) -> Option<VcpuReading> {
    let Some(Known { times, cpu, real_time, allowed, counts }) = thread.read.take() else {
        // Another thread may get its number.
        thread.times = None;
        return None;
    };
    let before = thread.times.replace(times);
    let ran_ns = before.map_or(0, |before| times.ran_ns.saturating_sub(before.ran_ns));
    let counted = match &mut thread.counters {
        None if no_counters => Counted::NoCounters,
        None => Counted::Lost,
        Some(counters) => match counts.and_then(|counts| counters.take(counts, ran_ns)) {
            Some(counted) => counted,
            // It has been on its CPU for long.
            None => match counters.read() {
                Ok(counted) => counted,
                Err(error) => {
                    thread.close();
                    thread.problem = Some(error.to_string());
                    Counted::Lost
                }
            },
        },
    };
    match &counted {
        Counted::Counted(counted) => thread.permille = counted.permille,
        Counted::Crowded => thread.permille = 0,
        Counted::NoCounters | Counted::Lost => thread.permille = WHOLE,
        Counted::DidNotRun => {}
    }
    let counted = match (sampling, &mut thread.samples) {
        (Some(sampling), Some(samples)) => sampling.refine(samples, counted),
        _ => counted,
    };
    let before = before?;
    Some(VcpuReading {
        vcpu: thread.vcpu,
        tid: thread.read.tid,
        cpu: Some(cpu),
        allowed,
        real_time,
        ran_ns,
        waited_ns: times.waited_ns.saturating_sub(before.waited_ns),
        group: thread.group,
        counted,
    })
}

#[cfg(test)]
mod tests;
