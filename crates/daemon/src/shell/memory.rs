//! Moves memory of VMs to other nodes, a few pages at a time, in a thread of its own.
//!
//! ```text
//!   order ──▶ jobs ──▶ the first one: a batch of pages ──▶ a pause ──▶ the next one ...
//!               ▲                                  │
//!               └──────── not at its end ◀─────────┘
//! ```
//!
//! A job walks through the mappings that may go there and have pages where they are to leave. It asks where the pages of a
//! batch are, moves those that it is about, and asks again: what counts is where they are then. Nothing has to be undone:
//! wherever this ends, each page is whole and on one node.
//!
//! The thread works for at most a quarter of the time, as a batch holds locks of the VM's process. Jobs take turns, so that
//! none waits for the end of another one.

use super::inbox::{Inbox, Message};
use crate::core::event::Event;
use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use vnuma_host::read_node_memory;
use vnuma_hypervisor::resident::{MappingPolicy, read_guest_mappings, read_mappings};
use vnuma_placement::{
    scheduling::memory::MoveMemory,
    world::{MemoryMoved, VmId},
};
use vnuma_process::{PAGES_AT_ONCE, PageState, find_pages, move_pages, spawn_worker};

/// After a batch, a pause of so many times as long.
const PAUSE: u32 = 3;
/// Longest pause: a batch that took longer was kept waiting itself.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// Time of work after which a job ends, whatever is left of it.
const WORK: Duration = Duration::from_secs(10);
/// Between two reports of a job.
const REPORT: Duration = Duration::from_secs(1);
/// Between two looks at what is free where pages go.
const LOOK: Duration = Duration::from_millis(100);
/// Pages that did not move, beyond those that did, after which a job ends: they are held.
const STUCK: u64 = 2048;
const PAGE: u64 = 4096;
/// Batches of a job's turn at most that are only looked at.
const LOOKS: usize = 64;
/// VMs whose places are remembered.
const PLACES: usize = 4096;

enum Order {
    Move { vm: VmId, pid: i32, pidfd: Option<Arc<OwnedFd>>, order: MoveMemory },
    Stop(VmId),
}

/// The thread. When it is dropped, jobs end after their batch.
#[derive(Debug)]
pub(super) struct MemoryMover {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl MemoryMover {
    pub(super) fn start(root: PathBuf, inbox: Arc<Inbox>) -> io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let mut task = Task { root, inbox, jobs: VecDeque::new(), places: HashMap::new() };
        let thread = spawn_worker("memory", move || task.run(&received))?;
        Ok(Self { orders: Some(orders), thread: Some(thread) })
    }

    /// Moves memory of this process of a VM; [`Event::MemoryMoved`] follows, now and then and at the end.
    pub(super) fn move_memory(&self, vm: VmId, pid: i32, pidfd: Option<Arc<OwnedFd>>, order: MoveMemory) {
        self.order(Order::Move { vm, pid, pidfd, order });
    }

    /// Ends what is under way for a VM; the event follows.
    pub(super) fn stop(&self, vm: VmId) {
        self.order(Order::Stop(vm));
    }

    fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // Fails only while vnumad stops.
            let _ = orders.send(order);
        }
    }
}

impl Drop for MemoryMover {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            // Fails only if the thread panicked, and the panic has been reported.
            let _ = thread.join();
        }
    }
}

struct Task {
    root: PathBuf,
    inbox: Arc<Inbox>,
    jobs: VecDeque<Job>,
    /// Where the last job of a VM's process ended: the next one goes on there.
    places: HashMap<VmId, (i32, u64)>,
}

impl Task {
    /// Until the orders end.
    fn run(&mut self, orders: &mpsc::Receiver<Order>) {
        let mut pause = Duration::ZERO;
        loop {
            let order = match self.jobs.is_empty() {
                true => orders.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
                false => orders.recv_timeout(pause),
            };
            match order {
                // A batch that an order comes before has its whole pause.
                Ok(order) => self.take(order),
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let begun = Instant::now();
                    self.turn();
                    pause = (begun.elapsed() * PAUSE).min(LONGEST_PAUSE);
                }
            }
        }
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Move { vm, pid, pidfd, order } => {
                let from = self.places.get(&vm).filter(|(known, _)| *known == pid).map_or(0, |(_, at)| *at);
                match Job::new((vm, pid, pidfd), order, from) {
                    Ok(job) => self.jobs.push_back(job),
                    Err(problem) => {
                        let moved = MemoryMoved { problem: Some(problem), ..MemoryMoved::default() };
                        self.report(vm, pid, moved, true);
                    }
                }
            }
            Order::Stop(vm) => {
                if let Some(at) = self.jobs.iter().position(|job| job.vm == vm)
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
        let Some(mut job) = self.jobs.pop_front() else { return };
        let begun = Instant::now();
        let over = job.turn(&self.root);
        job.worked += begun.elapsed();
        if over || job.worked >= WORK {
            return self.end(job);
        }
        if job.reported.elapsed() >= REPORT {
            job.reported = Instant::now();
            // The next one says the same, and more.
            let _ = self.inbox.try_send(Event::MemoryMoved(job.vm, job.pid, job.moved.clone(), false));
        }
        self.jobs.push_back(job);
    }

    fn end(&mut self, job: Job) {
        if self.places.len() >= PLACES {
            // Most of them are of VMs that are gone.
            self.places.clear();
        }
        self.places.insert(job.vm, (job.pid, job.at));
        self.report(job.vm, job.pid, job.moved, true);
    }

    fn report(&self, vm: VmId, pid: i32, moved: MemoryMoved, ended: bool) {
        // Fails only while vnumad stops.
        let _ = self.inbox.send(Message::Event(Event::MemoryMoved(vm, pid, moved, ended)));
    }
}

/// Memory of a process that goes to another node.
struct Job {
    vm: VmId,
    pid: i32,
    pidfd: Arc<OwnedFd>,
    order: MoveMemory,
    /// Ranges that are left: (start, end).
    ranges: VecDeque<(u64, u64)>,
    /// Where it is.
    at: u64,
    moved: MemoryMoved,
    worked: Duration,
    reported: Instant,
    looked: Option<Instant>,
}

impl Job {
    fn new(
        (vm, pid, pidfd): (VmId, i32, Option<Arc<OwnedFd>>),
        order: MoveMemory,
        from: u64,
    ) -> Result<Self, String> {
        let pidfd = pidfd.ok_or_else(|| format!("process {pid} has ended"))?;
        let ranges = ranges(pid, &order, from)?;
        let (moved, worked, reported) = (MemoryMoved::default(), Duration::ZERO, Instant::now());
        Ok(Self { vm, pid, pidfd, order, ranges, at: from, moved, worked, reported, looked: None })
    }

    /// A batch. True at the end of the job.
    fn turn(&mut self, root: &Path) -> bool {
        for _ in 0..LOOKS {
            let Some(addresses) = self.next_batch() else { return true };
            match self.batch(&addresses, root) {
                Ok(None) => {}
                Ok(Some(over)) => return over,
                Err(problem) => {
                    self.moved.problem = Some(problem);
                    return true;
                }
            }
        }
        false
    }

    fn next_batch(&mut self) -> Option<Vec<u64>> {
        let (start, end) = self.ranges.front_mut()?;
        let next = (*end).min(*start + PAGES_AT_ONCE as u64 * PAGE);
        let addresses = (*start..next).step_by(PAGE as usize).collect();
        (*start, self.at) = (next, next);
        if next >= *end {
            self.ranges.pop_front();
        }
        Some(addresses)
    }

    /// `None`: nothing of it was where it is to leave. Else whether the job is at its end.
    fn batch(&mut self, addresses: &[u64], root: &Path) -> Result<Option<bool>, String> {
        let (pidfd, pid) = (Arc::clone(&self.pidfd), self.pid);
        let failed = |error: io::Error| format!("move_pages: {error}");
        let find = |addresses: &[u64]| find_pages(pidfd.as_fd(), pid, addresses).map_err(failed);
        let states = find(addresses)?;
        let from = PageState::On(self.order.from);
        let left = ((self.order.bytes - self.moved.bytes) / PAGE) as usize;
        let there = addresses.iter().zip(states).filter(|(_, state)| *state == from);
        let pages: Vec<u64> = there.map(|(address, _)| *address).take(left).collect();
        if pages.is_empty() {
            return Ok((left == 0).then_some(true));
        }
        self.see_room(root)?;
        let states = move_pages(pidfd.as_fd(), pid, &pages, self.order.to).map_err(failed)?;
        let mut full = false;
        for (state, now) in states.into_iter().zip(find(&pages)?) {
            match (now, state) {
                (PageState::On(node), _) if node == self.order.to => self.moved.bytes += PAGE,
                (now, _) if now != from => {}
                (_, PageState::Shared) => self.moved.shared += 1,
                (_, PageState::NoMemory) => full = true,
                (_, PageState::Failed(_)) => self.moved.failed += 1,
                _ => self.moved.busy += 1,
            }
        }
        if full {
            return Err(format!("there was no memory for a page on node {}", self.order.to));
        }
        let stayed = self.moved.shared + self.moved.busy + self.moved.failed;
        if stayed > self.moved.bytes / PAGE + STUCK {
            return Err("most pages are held, or shared with other processes".to_owned());
        }
        Ok(Some(self.moved.bytes + PAGE > self.order.bytes))
    }

    /// Others take memory meanwhile.
    fn see_room(&mut self, root: &Path) -> Result<(), String> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let (node, reserve) = (self.order.to, self.order.reserve_kib);
        let memory = read_node_memory(root).map_err(|error| error.to_string())?;
        match memory.iter().find(|(known, ..)| *known == node) {
            Some((_, _, free)) if *free >= reserve => Ok(()),
            Some((_, _, free)) => Err(format!("node {node} has {free} KiB free, and keeps {reserve}")),
            None => Err(format!("node {node} is offline")),
        }
    }
}

/// The mappings that may go there and have pages that are to leave, those from `from` on first.
fn ranges(pid: i32, order: &MoveMemory, from: u64) -> Result<VecDeque<(u64, u64)>, String> {
    let mappings = read_guest_mappings(pid).map_err(|error| error.to_string())?;
    let lengths: HashMap<u64, u64> =
        read_mappings(pid).map_err(|error| error.to_string())?.into_iter().collect();
    let may = |policy: &MappingPolicy| match policy {
        MappingPolicy::Any => true,
        MappingPolicy::Nodes(nodes) => nodes.contains(&order.to),
        MappingPolicy::Fixed => false,
    };
    let (mut before, mut after) = (Vec::new(), VecDeque::new());
    for mapping in mappings.iter().filter(|mapping| may(&mapping.policy)) {
        let start = mapping.start;
        let has = mapping.pages.iter().any(|(node, kib)| *node == order.from && *kib > 0);
        let Some(end) = lengths.get(&start).map(|length| start.saturating_add(*length)).filter(|_| has)
        else {
            continue;
        };
        let middle = (from / PAGE * PAGE).clamp(start, end);
        before.extend((start < middle).then_some((start, middle)));
        after.extend((middle < end).then_some((middle, end)));
    }
    after.extend(before);
    Ok(after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_hypervisor::resident::parse_guest_mappings;
    use vnuma_placement::scheduling::memory::{MemoryCause, MemoryWhy};
    use vnuma_process::open_pidfd;

    const MIB: usize = 1 << 20;

    fn order(from: u32, to: u32, bytes: u64) -> MoveMemory {
        let why = MemoryWhy {
            cause: MemoryCause::CannotRun,
            remote_share: 1.0,
            expected_remote_share: 0.0,
            price_ns: 0.0,
            saving_ns_per_s: 0.0,
        };
        MoveMemory { from, to, bytes, reserve_kib: 0, why }
    }

    /// Memory of this process that is larger than any other, touched from the node that it is to be on.
    fn memory() -> Vec<u8> {
        vec![1; 64 * MIB]
    }

    fn lies(pid: i32, node: u32) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{pid}/numa_maps")).expect("numa_maps");
        let pages = parse_guest_mappings(&text).into_iter().flat_map(|mapping| mapping.pages);
        pages.filter(|(known, _)| *known == node).map(|(_, kib)| kib).sum()
    }

    fn own() -> (VmId, i32, Option<Arc<OwnedFd>>) {
        let pid = std::process::id().cast_signed();
        (1, pid, Some(Arc::new(open_pidfd(pid).expect("a pidfd"))))
    }

    fn finish(job: &mut Job) -> usize {
        (1..10_000).find(|_| job.turn(Path::new("/"))).expect("an end")
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
        let mut job = Job::new(own(), order(from, to, 16 * MIB as u64), 0).expect("begun");
        assert!(finish(&mut job) > 4, "a few pages at a time");
        assert_eq!((job.moved.bytes, job.moved.problem.as_deref()), (16 * MIB as u64, None));
        let moved = (lies(pid, to) - before) << 10;
        assert!((14 * MIB as u64..=18 * MIB as u64).contains(&moved), "{moved} bytes are there");
        // The next one goes on where this one ended.
        let mut next = Job::new(own(), order(from, to, 16 * MIB as u64), job.at).expect("begun");
        assert!(next.ranges[0].0 >= job.at, "{:?}", next.ranges);
        finish(&mut next);
        assert_eq!(next.moved.bytes, 16 * MIB as u64);
        assert!(memory.iter().all(|byte| *byte == 1), "its content has come along");
    }

    #[test]
    fn a_job_that_cannot_move_a_page_says_why() {
        let (_memory, pid) = (memory(), own().1);
        let Ok(nodes) = read_node_memory(Path::new("/")) else { return };
        let Some((from, ..)) = nodes.iter().max_by_key(|(node, ..)| lies(pid, *node)).copied() else {
            eprintln!("skipped: this kernel has no NUMA");
            return;
        };
        let mut job = Job::new(own(), order(from, 1000, MIB as u64), 0).expect("begun");
        finish(&mut job);
        assert_eq!(job.moved.problem.as_deref(), Some("node 1000 is offline"));
        let mut full = Job::new(own(), order(1000, from, MIB as u64), 0).expect("begun");
        finish(&mut full);
        assert_eq!((full.moved.bytes, full.moved.problem), (0, None), "nothing was there");
        let mut held = order(from, from, MIB as u64);
        held.reserve_kib = u64::MAX;
        let mut held = Job::new(own(), held, 0).expect("begun");
        finish(&mut held);
        assert!(held.moved.problem.expect("a problem").contains("KiB free, and keeps"), "the reserve");
        assert_eq!(held.moved.bytes, 0);
        assert!(Job::new((1, pid, None), order(0, 1, 1), 0).is_err(), "the process has ended");
    }

    #[test]
    fn jobs_take_turns_and_one_that_is_stopped_says_how_far_it_has_got() {
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        let mover = MemoryMover::start(PathBuf::from("/"), Arc::clone(&inbox)).expect("started");
        let _memory = memory();
        let (_, pid, pidfd) = own();
        mover.move_memory(1, pid, None, order(0, 1, 1));
        // From a node that it has no pages on.
        mover.move_memory(2, pid, pidfd.clone(), order(1000, 0, MIB as u64));
        mover.stop(3);
        let mut ended = Vec::new();
        while ended.len() < 2 {
            let turn = inbox.take(Instant::now() + Duration::from_secs(60), &[]).expect("open");
            assert!(!turn.messages.is_empty(), "a report within a minute");
            for message in turn.messages {
                if let Message::Event(Event::MemoryMoved(vm, known, moved, true)) = message {
                    assert_eq!(known, pid);
                    ended.push((vm, moved.problem.is_some()));
                }
            }
        }
        assert_eq!(ended, [(1, true), (2, false)]);
    }
}
