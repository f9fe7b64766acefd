//! Moves memory of VMs to other nodes, a few pages at a time, in a thread of its own.
//!
//! ```text
//!   order ──▶ jobs ──▶ the first one: a batch of pages ──▶ a pause ──▶ the next one ...
//!               ▲                                  │
//!               └──────── not at its end ◀─────────┘
//! ```
//!
//! A [job](job::Job) walks through the mappings that may go there and have pages where they are to leave. Nothing has to be
//! undone: wherever this ends, each page is whole and on one node.
//!
//! The thread works for at most a quarter of the time, as a batch holds locks of the VM's process. Jobs take turns, so that
//! none waits for the end of another one. A call that waits for the VM's process for long ends its job, and is left to a thread that
//! waits for it. As vCPUs wait for pages that it moves, it does not wait for a CPU behind them: the
//! scheduler prefers it.

mod job;

use super::inbox::Inbox;
use crate::core::event::Event;
use job::{Job, Process, WORK};
use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tracing::warn;
use vnuma_model::Capability;
use vnuma_observe::page_moves::PageMoves;
use vnuma_policy::{
    memory_move::MoveMemory,
    world::{MemoryMoved, TaskId, VmId},
};
use vnuma_process::{Groups, Jobs, Looker, Next, Worker, prefer_this_thread};

/// After a batch, a pause of so many times as long.
const PAUSE: u32 = 3;
/// Longest pause: a batch that took longer was kept waiting itself, and jobs of other VMs are not to wait for that.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How long a batch may take, or the begin of a job, which walks the page tables of the process: of a VM of some TiB that takes
/// seconds.
const LIMIT: Duration = Duration::from_secs(20);
/// Between two reports of a job.
const REPORT: Duration = Duration::from_secs(1);
/// VMs whose places are remembered.
const PLACES: usize = 4096;

pub(super) enum Order {
    /// Moves memory of this process of a VM; [`Event::MemoryMoved`] follows, now and then and at the end.
    Move { task: TaskId, pid: i32, pidfd: Option<Arc<OwnedFd>>, order: MoveMemory },
    /// Ends a move; the event follows.
    Stop(TaskId),
}

/// When the worker is dropped, jobs end after their batch.
pub(super) fn start(groups: &Groups, root: PathBuf, inbox: Arc<Inbox>) -> io::Result<Worker<Order>> {
    let all = groups.clone();
    groups.host.start("memory", move |orders: Jobs<Order>| {
        let (jobs, places, told) = (VecDeque::new(), HashMap::new(), Arc::clone(&inbox));
        let looker = Looker::new(&all, orders.heartbeat(), LIMIT, move || prepare(&told));
        Task { root, inbox, jobs, places, looker }.run(&orders);
    })
}

/// Times what the thread moves that made it. `None`: the time of the call has to do.
type Timer = Option<Arc<PageMoves>>;

struct Task {
    root: PathBuf,
    inbox: Arc<Inbox>,
    jobs: VecDeque<Job<Process>>,
    /// Where the last job of a VM's process ended: the next one goes on there.
    places: HashMap<VmId, (i32, u64)>,
    looker: Looker<Timer>,
}

impl Task {
    /// Until the orders end.
    fn run(mut self, orders: &Jobs<Order>) {
        let mut pause = Duration::ZERO;
        loop {
            let until = (!self.jobs.is_empty()).then(|| Instant::now() + pause);
            match orders.wait(until) {
                // A batch that an order comes before has its whole pause.
                Next::Job(order) => self.take(order),
                Next::End => return,
                Next::Nothing => {
                    let begun = Instant::now();
                    self.turn();
                    pause = pause_after(begun.elapsed());
                }
            }
        }
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Move { task, pid, pidfd, order } => {
                let from =
                    self.places.get(&task.vm).filter(|(known, _)| *known == pid).map_or(0, |(_, at)| *at);
                let root = self.root.clone();
                let begin = move |_: &mut Timer| {
                    let process = Process::new(pid, pidfd, root)?;
                    Job::new((task, pid), process, order, from)
                };
                let begun = self.looker.look((task.vm, pid), begin);
                match begun.unwrap_or_else(|error| Err(error.to_string())) {
                    Ok(job) => self.jobs.push_back(job),
                    Err(problem) => {
                        let moved = MemoryMoved { problem: Some(problem), ..MemoryMoved::default() };
                        self.report(task, moved, true);
                    }
                }
            }
            Order::Stop(task) => {
                if let Some(at) = self.jobs.iter().position(|job| job.task == task)
                    && let Some(mut job) = self.jobs.remove(at)
                {
                    job.moved.problem = Some("it was stopped".to_owned());
                    self.end(job);
                }
            }
        }
    }

    /// A batch of the first job.
    fn turn(&mut self) {
        let Some(job) = self.jobs.pop_front() else { return };
        let (begun, task, pid, moved) = (Instant::now(), job.task, job.pid, job.moved.clone());
        let turned = self.looker.look((task.vm, pid), move |timer| turn(job, timer));
        let (mut job, over) = match turned {
            Ok(turned) => turned,
            // What the batch has moved by then is found by the next look at the VM's memory.
            Err(error) => {
                let moved = MemoryMoved { problem: Some(error.to_string()), ..moved };
                return self.report(task, moved, true);
            }
        };
        if job.has_worked(begun.elapsed()) || over {
            if !over {
                job.moved.problem = Some(format!("it has worked for {} s", WORK.as_secs()));
            }
            return self.end(job);
        }
        if job.reported.elapsed() >= REPORT {
            job.reported = Instant::now();
            // The next one says the same, and more.
            let _ = self.inbox.try_send(Event::MemoryMoved(job.task, job.moved.clone(), false));
        }
        self.jobs.push_back(job);
    }

    fn end(&mut self, job: Job<Process>) {
        if self.places.len() >= PLACES {
            // Most of them are of VMs that are gone.
            self.places.clear();
        }
        self.places.insert(job.task.vm, (job.pid, job.at));
        self.report(job.task, job.moved, true);
    }

    fn report(&self, task: TaskId, moved: MemoryMoved, ended: bool) {
        self.inbox.tell(Event::MemoryMoved(task, moved, ended));
    }
}

/// Does a batch of a job, and says whether that was the last one.
fn turn(mut job: Job<Process>, timer: &Timer) -> (Job<Process>, bool) {
    job.pages.time_by(timer.clone());
    let over = job.turn();
    (job, over)
}

/// What the thread that moves pages needs for its first job.
fn prepare(inbox: &Inbox) -> Timer {
    if let Err(error) = prefer_this_thread() {
        warn!(%error, "vCPUs may wait longer for memory that moves: the thread that moves it is not preferred");
    }
    let timer = PageMoves::of_this_thread();
    let by = Capability::either(Capability::PAGE_HOLDS, ["bpf", "calls"], timer.as_ref().err());
    inbox.capabilities.publish(by);
    timer.ok().map(Arc::new)
}

fn pause_after(worked: Duration) -> Duration {
    worked.saturating_mul(PAUSE).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::inbox::Message;
    use std::path::Path;
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use vnuma_hypervisor::resident::parse_guest_mappings;
    use vnuma_observe::read_node_memory;
    use vnuma_policy::memory_move::{MemoryCause, MemoryReason, MemoryWhy};
    use vnuma_process::{Heartbeat, open_pidfd};

    const MIB: usize = 1 << 20;

    fn order(from: u32, to: u32, bytes: u64) -> MoveMemory {
        let why = MemoryWhy {
            cause: MemoryCause::CannotRun,
            remote_share: 1.0,
            expected_remote_share: 0.0,
            price_ns: 0.0,
            saving_ns_per_s: 0.0,
            assumed: false,
        };
        let why = MemoryReason::Nearer(why);
        MoveMemory { from, to, bytes, page_kib: 4, reserve_kib: 0, within: None, parts: None, why }
    }

    /// Memory of this process that is larger than any other, also than that of other tests: these wait.
    struct Memory {
        bytes: Vec<u8>,
        _alone: MutexGuard<'static, ()>,
    }

    fn memory() -> Memory {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Memory { bytes: vec![1; 64 * MIB], _alone: alone }
    }

    fn lies(pid: i32, node: u32) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{pid}/numa_maps")).expect("numa_maps");
        let pages = parse_guest_mappings(&text).into_iter().flat_map(|mapping| mapping.pages);
        pages.filter(|(known, _)| *known == node).map(|(_, kib)| kib).sum()
    }

    fn of(vm: VmId) -> TaskId {
        TaskId { vm, number: vm }
    }

    fn own() -> (TaskId, i32, Option<Arc<OwnedFd>>) {
        let pid = std::process::id().cast_signed();
        (of(1), pid, Some(Arc::new(open_pidfd(pid).expect("a pidfd"))))
    }

    fn begin(order: MoveMemory, from: u64) -> Job<Process> {
        let (task, pid, pidfd) = own();
        let process = Process::new(pid, pidfd, PathBuf::from("/")).expect("it has not ended");
        Job::new((task, pid), process, order, from).expect("begun")
    }

    fn finish(job: &mut Job<Process>) -> usize {
        (1..10_000).find(|_| job.turn()).expect("an end")
    }

    #[test]
    fn a_job_takes_as_much_of_its_own_memory_as_it_was_told() {
        let nodes = read_node_memory(Path::new("/")).unwrap_or_default();
        if nodes.iter().filter(|(_, total, _)| *total > 0).count() < 2 {
            eprintln!("skipped: this needs 2 nodes with memory");
            return;
        }
        let (memory, pid) = (memory(), own().1);
        let (from, to) = if lies(pid, nodes[0].0) > lies(pid, nodes[1].0) { (0, 1) } else { (1, 0) };
        let (from, to) = (nodes[from].0, nodes[to].0);
        let before = lies(pid, to);
        let mut job = begin(order(from, to, 16 * MIB as u64), 0);
        assert!(finish(&mut job) > 4, "a few pages at a time");
        assert_eq!((job.moved.bytes, job.moved.problem.as_deref()), (16 * MIB as u64, None));
        let moved = (lies(pid, to) - before) << 10;
        assert!((14 * MIB as u64..=18 * MIB as u64).contains(&moved), "{moved} bytes are there");
        // The next one goes on where this one ended.
        let begun_at = job.at;
        let mut next = begin(order(from, to, 16 * MIB as u64), job.at);
        finish(&mut next);
        assert_ne!(next.at, begun_at);
        assert_eq!(next.moved.bytes, 16 * MIB as u64);
        assert!(memory.bytes.iter().all(|byte| *byte == 1), "its content has come along");
    }

    #[test]
    fn a_job_that_cannot_move_a_page_says_why() {
        let (_memory, pid) = (memory(), own().1);
        let Ok(nodes) = read_node_memory(Path::new("/")) else { return };
        let Some((from, ..)) = nodes.iter().max_by_key(|(node, ..)| lies(pid, *node)).copied() else {
            eprintln!("skipped: this kernel has no NUMA");
            return;
        };
        let mut job = begin(order(from, 1000, MIB as u64), 0);
        finish(&mut job);
        assert_eq!(job.moved.problem.as_deref(), Some("node 1000 is offline"));
        let mut full = begin(order(1000, from, MIB as u64), 0);
        finish(&mut full);
        assert_eq!((full.moved.bytes, full.moved.problem), (0, None), "nothing was there");
        let mut held = order(from, from, MIB as u64);
        held.reserve_kib = u64::MAX;
        let mut held = begin(held, 0);
        finish(&mut held);
        assert!(held.moved.problem.expect("a problem").contains("KiB free, and keeps"), "the reserve");
        assert_eq!(held.moved.bytes, 0);
        assert!(Process::new(pid, None, PathBuf::from("/")).is_err(), "the process has ended");
    }

    #[test]
    fn jobs_take_turns_and_one_that_is_stopped_says_how_far_it_has_got() {
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        let (workers, root) = (Groups::default(), PathBuf::from("/"));
        let mover = start(&workers, root, Arc::clone(&inbox)).expect("started");
        let _memory = memory();
        let (_, pid, pidfd) = own();
        let move_memory = |task, pidfd, order| mover.order(Order::Move { task, pid, pidfd, order });
        move_memory(of(1), None, order(0, 1, 1));
        // From a node that it has no pages on.
        move_memory(of(2), pidfd.clone(), order(1000, 0, MIB as u64));
        mover.order(Order::Stop(TaskId { number: 9, ..of(2) }));
        let mut ended = Vec::new();
        while ended.len() < 2 {
            let turn = inbox.take(Instant::now() + Duration::from_secs(60), &[]).expect("open");
            assert!(!turn.messages.is_empty(), "a report within a minute");
            for message in turn.messages {
                if let Message::Event(Event::MemoryMoved(task, moved, true)) = message {
                    ended.push((task.vm, moved.problem.is_some()));
                }
            }
        }
        assert_eq!(ended, [(1, true), (2, false)]);
        let by = inbox.capabilities.of(Capability::PAGE_HOLDS);
        assert!(
            by.in_use == "bpf" && by.passed_over.is_empty() || by.in_use == "calls" && by.why().is_some()
        );
    }

    #[test]
    fn a_job_that_is_stopped_ends_at_once_and_others_go_on() {
        let (_memory, (_, pid, pidfd)) = (memory(), own());
        let (mut task, inbox) = task();
        for vm in [1, 2] {
            let order = order(0, 1000, MIB as u64);
            task.take(Order::Move { task: of(vm), pid, pidfd: pidfd.clone(), order });
        }
        if task.jobs.len() < 2 {
            eprintln!("skipped: this kernel has no NUMA");
            return;
        }
        task.take(Order::Stop(TaskId { number: 9, ..of(1) }));
        assert_eq!(task.jobs.len(), 2, "another move of that VM");
        task.take(Order::Stop(of(1)));
        let left: Vec<_> = task.jobs.iter().map(|job| job.task.vm).collect();
        assert_eq!(left, [2]);
        assert_eq!(ended(&inbox).problem.as_deref(), Some("it was stopped"));
    }

    #[test]
    fn a_job_whose_time_is_over_says_so() {
        let (_memory, (_, pid, pidfd)) = (memory(), own());
        let nodes = read_node_memory(Path::new("/")).unwrap_or_default();
        let Some((node, ..)) = nodes.iter().max_by_key(|(node, ..)| lies(pid, *node)).copied() else {
            eprintln!("skipped: this kernel has no NUMA");
            return;
        };
        let (mut task, inbox) = task();
        // Its pages are there already: no machine is too small for that.
        task.take(Order::Move { task: of(1), pid, pidfd, order: order(node, node, 32 * MIB as u64) });
        assert!(task.jobs[0].has_worked(WORK));
        task.turn();
        let moved = ended(&inbox);
        assert_eq!(moved.problem.as_deref(), Some("it has worked for 10 s"));
        assert!((1..=2 * MIB as u64).contains(&moved.bytes), "after its batch: {moved:?}");
        assert!(task.jobs.is_empty());
    }

    fn task() -> (Task, Arc<Inbox>) {
        let (root, inbox) = (PathBuf::from("/"), Arc::new(Inbox::new().expect("an inbox")));
        let (jobs, places) = (VecDeque::new(), HashMap::new());
        let heartbeat = Arc::new(Heartbeat::new("memory"));
        let looker = Looker::new(&Groups::default(), &heartbeat, LIMIT, || None);
        let task = Task { root, inbox: Arc::clone(&inbox), jobs, places, looker };
        (task, inbox)
    }

    /// The one report of a job of VM 1 that has ended.
    fn ended(inbox: &Inbox) -> MemoryMoved {
        let turn = inbox.take(Instant::now() + Duration::from_secs(60), &[]).expect("open");
        let [Message::Event(Event::MemoryMoved(TaskId { vm: 1, .. }, moved, true))] = &turn.messages[..]
        else {
            panic!("one report of one job that has ended");
        };
        moved.clone()
    }

    #[test]
    fn the_thread_rests_three_times_as_long_as_it_worked() {
        assert_eq!(pause_after(Duration::from_millis(20)), Duration::from_millis(60));
        assert_eq!(pause_after(Duration::MAX), LONGEST_PAUSE, "others have their turn");
    }
}
