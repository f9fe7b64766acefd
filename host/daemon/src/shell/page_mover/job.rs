//! A move of a VM's memory: which pages, in which order, and when it ends.
//!
//! It asks where the pages of a batch are, moves those that are to leave, and asks again: what counts is where they are then.
//! A vCPU that touches a page while it moves waits until all pages of the call have moved. A call has therefore only as many
//! pages as are expected to move within [`HOLD`], by how long the calls before held theirs ([`Pace`]); a huge page is moved as a whole.
//! An order for huge pages of a pool counts in these, and moves no others.
//! The process and the host are behind [`Pages`], so that tests can be what no test machine is.

use super::{MoveMemory, TaskId, Timer};
use nix::libc;
use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use vnuma_hypervisor::resident::{
    GuestMapping, MappingPolicy, read_guest_mappings, read_mappings, read_mappings_with_pages,
};
use vnuma_model::HostNodeId;
use vnuma_observe::{read_node_memory, read_node_pools};
use vnuma_policy::{memory_move::MemoryReason, world::MemoryMoved};
use vnuma_process::{PAGES_AT_ONCE, PageState, find_pages, move_pages};

/// Working time after which a job ends, whatever is left of it.
pub(super) const WORK: Duration = Duration::from_secs(10);
/// Between two looks at what is free where pages go.
const LOOK: Duration = Duration::from_millis(100);
/// Pages that did not move, beyond those that did, after which a job ends: they are held.
const STUCK: u64 = 2048;
const PAGE: u64 = 4096;
/// Bytes of a batch. One ends where a huge page does: else half of each would have moved with the batch before, uncounted.
const BATCH: u64 = PAGES_AT_ONCE as u64 * PAGE;
/// Bytes of one of huge pages of a pool, unless a page is larger.
const POOL_BATCH: u64 = 32 << 20;
/// Size of the smallest pages, KiB.
const SMALLEST_KIB: u64 = 4;
/// Batches of a job's turn at most that are only looked at.
const LOOKS: usize = 64;
/// How long a call that moves pages is to hold them at most.
const HOLD: Duration = Duration::from_millis(2);
/// Pages of the first one, and the least that one has: most of a shorter call is what each call takes, whatever it moves, as the
/// kernel has every CPU put its pages back first. No thread waits for that.
const LEAST: usize = 32;

/// How many pages a call has, and at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pace(usize, usize);

impl Pace {
    fn begin(page: u64) -> Self {
        let least = if page > PAGE { 1 } else { LEAST };
        Self(least, least)
    }

    /// A call with as many pages as it may have has held them for so long.
    fn after(self, took: Duration) -> Self {
        let Self(pages, least) = self;
        match took {
            took if took > HOLD => Self((pages / 2).max(least), least),
            // Twice as many are sure to fit.
            took if took < HOLD / 4 => Self((pages * 2).min(PAGES_AT_ONCE), least),
            _ => self,
        }
    }
}

/// Pages of a process, and the nodes that they may be on.
pub(super) trait Pages {
    /// Mappings that a VM's memory may be in, or all that have pages, each with its end.
    fn mappings(&self, all: bool) -> Result<Vec<(GuestMapping, u64)>, String>;
    /// Where these pages are.
    fn find(&self, addresses: &[u64]) -> io::Result<Vec<PageState>>;
    /// Moves these pages to a node, and says how long it has held them.
    fn move_to(&self, node: HostNodeId, addresses: &[u64]) -> io::Result<(Vec<PageState>, Duration)>;
    /// Free memory of a node for pages of this size, KiB; `None`: it is offline.
    fn free_kib(&self, node: HostNodeId, page_kib: u64) -> Result<Option<u64>, String>;
}

/// A process of this machine.
pub(super) struct Process {
    pid: i32,
    pidfd: Arc<OwnedFd>,
    root: PathBuf,
    timer: Timer,
}

impl Process {
    pub(super) fn new(pid: i32, pidfd: Option<Arc<OwnedFd>>, root: PathBuf) -> Result<Self, String> {
        let pidfd = pidfd.ok_or_else(|| format!("process {pid} has ended"))?;
        Ok(Self { pid, pidfd, root, timer: None })
    }

    /// Has what it moves from now on timed by this one, which is the thread's that does so.
    pub(super) fn time_by(&mut self, timer: Timer) {
        self.timer = timer;
    }
}

impl Pages for Process {
    fn mappings(&self, all: bool) -> Result<Vec<(GuestMapping, u64)>, String> {
        let read = if all { read_mappings_with_pages } else { read_guest_mappings };
        let mappings = read(self.pid).map_err(|error| error.to_string())?;
        let lengths = read_mappings(self.pid).map_err(|error| error.to_string())?;
        Ok(with_ends(mappings, lengths))
    }

    fn find(&self, addresses: &[u64]) -> io::Result<Vec<PageState>> {
        find_pages(self.pidfd.as_fd(), self.pid, addresses)
    }

    fn move_to(&self, node: HostNodeId, addresses: &[u64]) -> io::Result<(Vec<PageState>, Duration)> {
        let begun = Instant::now();
        let states = move_pages(self.pidfd.as_fd(), self.pid, addresses, node)?;
        let called = begun.elapsed();
        let held = self.timer.as_ref().and_then(|timer| timer.take_longest().ok());
        Ok((states, held.map_or(called, |held| held.min(called))))
    }

    fn free_kib(&self, node: HostNodeId, page_kib: u64) -> Result<Option<u64>, String> {
        if page_kib > SMALLEST_KIB {
            let pools = read_node_pools(&self.root).map_err(|error| error.to_string())?;
            let mut pools = pools.iter().filter(|(known, _)| *known == node).peekable();
            let online = pools.peek().is_some();
            let pool = pools.find(|(_, pool)| pool.size_kib == page_kib);
            let free = pool.map_or(0, |(_, pool)| pool.free.saturating_mul(page_kib));
            return Ok(online.then_some(free));
        }
        let memory = read_node_memory(&self.root).map_err(|error| error.to_string())?;
        Ok(memory.iter().find(|(known, ..)| *known == node).map(|(.., free)| *free))
    }
}

/// The end of each mapping, by all mappings: (start, length). The kernel may have merged one with another since.
fn with_ends(mappings: Vec<GuestMapping>, lengths: Vec<(u64, u64)>) -> Vec<(GuestMapping, u64)> {
    let lengths: BTreeMap<u64, u64> = lengths.into_iter().collect();
    let with_end = |mapping: GuestMapping| {
        let (start, length) = lengths.range(..=mapping.start).next_back()?;
        let end = start.checked_add(*length).filter(|end| *end > mapping.start)?;
        Some((mapping, end))
    };
    mappings.into_iter().filter_map(with_end).collect()
}

/// Memory of a process that goes to another node.
pub(super) struct Job<P> {
    pub(super) task: TaskId,
    pub(super) pid: i32,
    pub(super) pages: P,
    order: MoveMemory,
    /// Size of a page, bytes.
    page: u64,
    /// Ranges that are left: (start, end).
    ranges: VecDeque<(u64, u64)>,
    /// Where it is.
    pub(super) at: u64,
    pub(super) moved: MemoryMoved,
    /// Time that it has worked.
    worked: Duration,
    pub(super) reported: Instant,
    looked: Option<Instant>,
    pace: Pace,
}

impl<P: Pages> Job<P> {
    pub(super) fn new(
        (task, pid): (TaskId, i32),
        pages: P,
        order: MoveMemory,
        from: u64,
    ) -> Result<Self, String> {
        // Where that is known its size says nothing: a guest node may be small, or have few pages plugged.
        let mappings = pages.mappings(order.within.is_some())?;
        let ranges = match &order.parts {
            None => ranges(&mappings, &order, order.within, from),
            // One after the other, each from its begin.
            Some(parts) => {
                let of = |part: &(u64, u64)| ranges(&mappings, &order, Some(*part), 0);
                parts.iter().flat_map(of).collect()
            }
        };
        let (moved, worked, reported) = (MemoryMoved::default(), Duration::ZERO, Instant::now());
        let page = order.page_kib.saturating_mul(1024).max(PAGE);
        let (looked, pace) = (None, Pace::begin(page));
        Ok(Self { task, pid, pages, order, page, ranges, at: from, moved, worked, reported, looked, pace })
    }

    /// Counts a batch that took `took`. True at the end of the job.
    pub(super) fn has_worked(&mut self, took: Duration) -> bool {
        self.worked = self.worked.saturating_add(took);
        self.worked >= WORK
    }

    /// Does one batch. True at the end of the job.
    pub(super) fn turn(&mut self) -> bool {
        for _ in 0..LOOKS {
            let Some(addresses) = self.next_batch() else { return true };
            match self.batch(&addresses) {
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
        let batch = if self.page > PAGE { POOL_BATCH.max(self.page) } else { BATCH };
        let (start, end) = self.ranges.front_mut()?;
        let next = (*end).min((*start / batch + 1).saturating_mul(batch));
        let addresses = (*start..next).step_by(self.page as usize).collect();
        (*start, self.at) = (next, next);
        if next >= *end {
            self.ranges.pop_front();
        }
        Some(addresses)
    }

    /// `None`: nothing of it was where it is to leave. Else whether the job is at its end.
    fn batch(&mut self, addresses: &[u64]) -> Result<Option<bool>, String> {
        let failed = |error: io::Error| match error.raw_os_error() {
            Some(libc::EPERM) => format!("move_pages: {error}: vnumad needs root, or CAP_SYS_NICE"),
            Some(libc::ESRCH) => "its process has ended".to_owned(),
            _ => format!("move_pages: {error}"),
        };
        let states = self.pages.find(addresses).map_err(failed)?;
        let from = PageState::On(self.order.from);
        let left = (self.order.bytes.saturating_sub(self.moved.bytes) / self.page) as usize;
        let there = addresses.iter().zip(states).filter(|(_, state)| *state == from);
        let pages: Vec<u64> = there.map(|(address, _)| *address).take(left).collect();
        if pages.is_empty() {
            return Ok((left == 0).then_some(true));
        }
        self.see_room()?;
        let states = self.move_all(&pages).map_err(failed)?;
        let mut full = false;
        for (state, now) in states.into_iter().zip(self.pages.find(&pages).map_err(failed)?) {
            match (now, state) {
                (PageState::On(node), _) if node == self.order.to => self.moved.bytes += self.page,
                (now, _) if now != from => {}
                (_, PageState::Shared) => self.moved.shared += 1,
                (_, PageState::NoMemory) => full = true,
                (_, PageState::Failed(_)) => self.moved.failed += 1,
                _ => self.moved.busy += 1,
            }
        }
        if full {
            let kind = if self.page > PAGE { "huge page" } else { "memory for a page" };
            return Err(format!("there was no {kind} on node {}", self.order.to));
        }
        let stayed = self.moved.shared + self.moved.busy + self.moved.failed;
        // As much memory, whatever the size of its pages.
        if stayed > self.moved.bytes / self.page + (STUCK * PAGE / self.page).max(1) {
            return Err("most pages are held, or shared with other processes".to_owned());
        }
        Ok(Some(self.order.bytes.saturating_sub(self.moved.bytes) < self.page))
    }

    /// Moves these pages, as many at a time as the pace allows.
    fn move_all(&mut self, pages: &[u64]) -> io::Result<Vec<PageState>> {
        let (mut states, mut left) = (Vec::with_capacity(pages.len()), pages);
        while !left.is_empty() {
            let (now, later) = left.split_at(self.pace.0.min(left.len()));
            let (moved, took) = self.pages.move_to(self.order.to, now)?;
            states.extend(moved);
            let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            self.moved.longest_hold_ns = self.moved.longest_hold_ns.max(took_ns);
            // The last one may have fewer pages, and says less.
            if now.len() == self.pace.0 || took > HOLD {
                self.pace = self.pace.after(took);
            }
            left = later;
        }
        Ok(states)
    }

    /// An error if the node that pages go to has no room any more: others take memory at the same time.
    fn see_room(&mut self) -> Result<(), String> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let (node, reserve) = (self.order.to, self.order.reserve_kib);
        match self.pages.free_kib(node, self.order.page_kib)? {
            Some(free) if free >= reserve => Ok(()),
            Some(free) => Err(format!("node {node} has {free} KiB free, and keeps {reserve}")),
            None => Err(format!("node {node} is offline")),
        }
    }
}

/// The mappings that may go there and have pages that are to leave, what of them is `within`, from `from` on first.
fn ranges(
    mappings: &[(GuestMapping, u64)],
    order: &MoveMemory,
    within: Option<(u64, u64)>,
    from: u64,
) -> VecDeque<(u64, u64)> {
    let may = |policy: &MappingPolicy| match policy {
        MappingPolicy::Any => true,
        // Pages move against the policy of their memory; only new ones obey it.
        MappingPolicy::Nodes(nodes) => {
            nodes.contains(&order.to) || matches!(order.why, MemoryReason::Rehome(_))
        }
        MappingPolicy::Fixed => false,
    };
    let page = order.page_kib.saturating_mul(1024).max(PAGE);
    // What is to move may begin and end within a huge page of a pool, which moves as a whole.
    let whole = |(least, most): (u64, u64)| {
        (least / page * page, most.checked_next_multiple_of(page).unwrap_or(most))
    };
    let (mut before, mut after) = (Vec::new(), VecDeque::new());
    for (GuestMapping { start, policy, page_kib, pages }, end) in mappings {
        let has = pages.iter().any(|(node, kib)| *node == order.from && *kib > 0);
        let (start, end) =
            within.map(whole).map_or((*start, *end), |(least, most)| ((*start).max(least), (*end).min(most)));
        if !has || !may(policy) || *page_kib != order.page_kib || start >= end {
            continue;
        }
        let middle = (from / page * page).clamp(start, end);
        before.extend((start < middle).then_some((start, middle)));
        after.extend((middle < end).then_some((middle, end)));
    }
    after.extend(before);
    after
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use vnuma_policy::memory_move::{MemoryCause, MemoryWhy};

    const JOB: (TaskId, i32) = (TaskId { vm: 1, number: 1 }, 2);
    const START: u64 = 0x7f00_0000_0000;
    const HERE: HostNodeId = 0;
    const THERE: HostNodeId = 1;

    /// A process with pages of these states, which move if they can.
    struct Fake {
        mappings: Vec<(GuestMapping, u64)>,
        /// Those of them that are too small to be a VM's memory, by their size.
        small: Vec<u64>,
        pages: RefCell<BTreeMap<u64, PageState>>,
        /// What keeps a page where it is.
        stays: BTreeMap<u64, PageState>,
        /// It ends after so many moves.
        lives: Cell<usize>,
        free_kib: Cell<Option<u64>>,
        /// Pages of each move.
        moves: RefCell<Vec<Vec<u64>>>,
        /// Pages move as huge pages of this size.
        folio: u64,
        /// A call takes so long for each page.
        page_takes: Duration,
    }

    impl Fake {
        /// Mappings of so many pages each, one after the other, all on the node that they are to leave.
        fn new(mappings: &[(MappingPolicy, u64)]) -> Self {
            let mut fake = Self {
                mappings: Vec::new(),
                small: Vec::new(),
                pages: RefCell::default(),
                stays: BTreeMap::new(),
                lives: Cell::new(usize::MAX),
                free_kib: Cell::new(Some(1 << 20)),
                moves: RefCell::default(),
                folio: PAGE,
                page_takes: Duration::ZERO,
            };
            let mut start = START;
            for (policy, count) in mappings {
                let end = start + count * PAGE;
                let (policy, pages) = (policy.clone(), vec![(HERE, count * PAGE / 1024)]);
                fake.mappings.push((GuestMapping { start, policy, page_kib: 4, pages }, end));
                let on = |address| (address, PageState::On(HERE));
                fake.pages.get_mut().extend((start..end).step_by(PAGE as usize).map(on));
                start = end;
            }
            fake
        }

        fn any(pages: u64) -> Self {
            Self::new(&[(MappingPolicy::Any, pages)])
        }
    }

    impl Pages for &Fake {
        fn mappings(&self, all: bool) -> Result<Vec<(GuestMapping, u64)>, String> {
            let small = |(mapping, _): &(GuestMapping, u64)| self.small.contains(&mapping.start);
            Ok(self.mappings.iter().filter(|mapping| all || !small(mapping)).cloned().collect())
        }

        fn find(&self, addresses: &[u64]) -> io::Result<Vec<PageState>> {
            if self.lives.get() == 0 {
                return Err(io::Error::from_raw_os_error(3));
            }
            let pages = self.pages.borrow();
            Ok(addresses
                .iter()
                .map(|address| pages.get(address).copied().unwrap_or(PageState::Absent))
                .collect())
        }

        fn move_to(&self, node: HostNodeId, addresses: &[u64]) -> io::Result<(Vec<PageState>, Duration)> {
            self.lives.set(self.lives.get() - 1);
            self.moves.borrow_mut().push(addresses.to_vec());
            let mut pages = self.pages.borrow_mut();
            let mut take = |address: &u64| {
                if let Some(&state) = self.stays.get(address) {
                    return state;
                }
                let folio = address / self.folio * self.folio;
                for (_, state) in pages.range_mut(folio..folio + self.folio) {
                    *state = PageState::On(node);
                }
                PageState::On(node)
            };
            let took = self.page_takes * u32::try_from(addresses.len()).expect("a few");
            Ok((addresses.iter().map(&mut take).collect(), took))
        }

        fn free_kib(&self, _: HostNodeId, _: u64) -> Result<Option<u64>, String> {
            Ok(self.free_kib.get())
        }
    }

    fn order(pages: u64) -> MoveMemory {
        let why = MemoryWhy {
            cause: MemoryCause::CannotRun,
            remote_share: 1.0,
            expected_remote_share: 0.0,
            price_ns: 0.0,
            saving_ns_per_s: 0.0,
            assumed: false,
        };
        let why = MemoryReason::Nearer(why);
        MoveMemory {
            from: HERE,
            to: THERE,
            bytes: pages * PAGE,
            page_kib: 4,
            reserve_kib: 1024,
            within: None,
            parts: None,
            why,
        }
    }

    fn begin(fake: &Fake, pages: u64, from: u64) -> Job<&Fake> {
        Job::new(JOB, fake, order(pages), from).expect("begun")
    }

    fn finish(fake: &Fake, pages: u64) -> Job<&Fake> {
        let mut job = begin(fake, pages, 0);
        assert!((0..10_000).any(|_| job.turn()), "an end");
        job
    }

    fn moved(fake: &Fake) -> u64 {
        fake.pages.borrow().values().filter(|state| **state == PageState::On(THERE)).count() as u64
    }

    #[test]
    fn exactly_what_was_ordered_moves_in_batches_and_the_next_job_goes_on_there() {
        let fake = Fake::any(10_000);
        let job = finish(&fake, 1500);
        assert_eq!((job.moved.bytes, moved(&fake), &job.moved.problem), (1500 * PAGE, 1500, &None));
        assert!(fake.moves.borrow().iter().all(|batch| batch.len() <= PAGES_AT_ONCE));
        fake.moves.borrow_mut().clear();
        let mut next = begin(&fake, 1000, job.at);
        assert!((0..100).any(|_| next.turn()));
        assert_eq!((next.moved.bytes, moved(&fake)), (1000 * PAGE, 2500));
        assert_eq!(fake.moves.borrow()[0][0], job.at, "not from the beginning");
        // Those before that place come last.
        let mut rest = begin(&fake, 10_000, next.at);
        assert!((0..100).any(|_| rest.turn()));
        assert_eq!((rest.moved.bytes, moved(&fake)), (7500 * PAGE, 10_000));
    }

    #[test]
    fn memory_whose_policy_does_not_name_the_node_stays() {
        let only = |node| MappingPolicy::Nodes(vec![node]);
        let all =
            [(only(HERE), 600), (MappingPolicy::Fixed, 600), (only(THERE), 600), (MappingPolicy::Any, 600)];
        let fake = Fake::new(&all);
        let job = finish(&fake, 5000);
        assert_eq!((job.moved.bytes, moved(&fake), &job.moved.problem), (1200 * PAGE, 1200, &None));
        let first = START + 1200 * PAGE;
        assert!(fake.moves.borrow().iter().flatten().all(|address| *address >= first), "they were not tried");
    }

    #[test]
    fn an_operator_moves_it_against_its_policy_but_not_what_is_fixed() {
        let fake = Fake::new(&[(MappingPolicy::Nodes(vec![HERE]), 600), (MappingPolicy::Fixed, 600)]);
        let wanted = MoveMemory { why: MemoryReason::Rehome(0), ..order(5000) };
        let mut job = Job::new(JOB, &fake, wanted, 0).expect("begun");
        assert!((0..10_000).any(|_| job.turn()), "an end");
        assert_eq!((job.moved.bytes, moved(&fake)), (600 * PAGE, 600));
    }

    #[test]
    fn a_batch_ends_where_a_huge_page_does_so_that_all_of_it_counts() {
        let mut fake = Fake::any(4096);
        // The mapping begins in the middle of a huge page.
        let (mapping, _) = &mut fake.mappings[0];
        mapping.start += BATCH / 2;
        let begin = mapping.start;
        fake.pages.get_mut().retain(|at, _| *at >= begin);
        fake.folio = BATCH;
        let job = finish(&fake, 5000);
        assert_eq!((job.moved.bytes, moved(&fake)), ((4096 - 256) * PAGE, 4096 - 256));
        let batches = |batch: &Vec<u64>| (batch[0] / BATCH, batch[batch.len() - 1] / BATCH);
        assert!(fake.moves.borrow().iter().map(batches).all(|(first, last)| first == last), "in one batch");
        assert_eq!(fake.moves.borrow().iter().map(Vec::len).sum::<usize>(), 4096 - 256);
    }

    #[test]
    fn a_vm_that_ends_in_the_middle_ends_its_job() {
        let fake = Fake::any(10_000);
        // The first batch takes five calls: 32, 64, 128, 256 and 32 pages.
        fake.lives.set(7);
        let job = finish(&fake, 10_000);
        assert!(job.moved.problem.as_deref().expect("a problem").contains("its process has ended"));
        assert_eq!(job.moved.bytes, 2 * BATCH, "what is known to have moved");
        // Between two batches.
        fake.lives.set(0);
        assert!(begin(&fake, 10_000, 0).turn());
        let job = finish(&fake, 10_000);
        assert!(job.moved.problem.as_deref().expect("a problem").contains("its process has ended"));
    }

    #[test]
    fn pages_that_are_held_are_counted_and_many_of_them_end_the_job() {
        let mut fake = Fake::any(1000);
        let states = [PageState::Busy, PageState::Shared, PageState::Failed(5), PageState::On(HERE)];
        fake.stays =
            states.into_iter().enumerate().map(|(at, state)| (START + at as u64 * PAGE, state)).collect();
        let job = finish(&fake, 1000);
        let MemoryMoved { bytes, busy, shared, failed, problem, .. } = &job.moved;
        assert_eq!((*bytes, *busy, *shared, *failed, problem), (996 * PAGE, 2, 1, 1, &None));

        let mut fake = Fake::any(10_000);
        fake.stays = fake.pages.borrow().keys().map(|at| (*at, PageState::Busy)).collect();
        let job = finish(&fake, 10_000);
        assert_eq!(job.moved.problem.as_deref(), Some("most pages are held, or shared with other processes"));
        assert!((STUCK..STUCK + 1024).contains(&job.moved.busy), "{}", job.moved.busy);
    }

    #[test]
    fn a_node_that_is_full_or_gone_ends_the_job() {
        for (free, problem) in
            [(Some(1023), "node 1 has 1023 KiB free, and keeps 1024"), (None, "node 1 is offline")]
        {
            let fake = Fake::any(1000);
            fake.free_kib.set(free);
            let job = finish(&fake, 1000);
            assert_eq!((job.moved.problem.as_deref(), moved(&fake)), (Some(problem), 0));
        }
        let mut fake = Fake::any(2000);
        fake.stays = BTreeMap::from([(START + 600 * PAGE, PageState::NoMemory)]);
        let job = finish(&fake, 2000);
        assert_eq!(job.moved.problem.as_deref(), Some("there was no memory for a page on node 1"));
        assert_eq!(moved(&fake), 1023, "the rest was not tried");
        // Others take the node's memory while the job runs.
        let fake = Fake::any(100_000);
        let mut job = begin(&fake, 100_000, 0);
        assert!(!job.turn());
        fake.free_kib.set(Some(0));
        job.looked = None;
        assert!(job.turn());
        assert_eq!(moved(&fake), 512);
    }

    #[test]
    fn only_what_is_at_the_addresses_of_the_order_moves() {
        let fake =
            Fake::new(&[(MappingPolicy::Any, 1000), (MappingPolicy::Any, 1000), (MappingPolicy::Any, 1000)]);
        let (first, end) = (START + 700 * PAGE, START + 1300 * PAGE);
        let order = MoveMemory { within: Some((first, end)), ..order(5000) };
        let mut job = Job::new(JOB, &fake, order.clone(), START + 900 * PAGE).expect("begun");
        assert!((0..100).any(|_| job.turn()));
        assert_eq!((job.moved.bytes, moved(&fake)), (600 * PAGE, 600));
        assert!(fake.moves.borrow().iter().flatten().all(|at| (first..end).contains(at)), "elsewhere");
        let nothing = MoveMemory { within: Some((0, START)), ..order };
        assert!(Job::new(JOB, &fake, nothing, 0).expect("begun").turn(), "nothing is there");
    }

    #[test]
    fn parts_of_the_order_move_one_after_the_other_and_nothing_else() {
        let fake =
            Fake::new(&[(MappingPolicy::Any, 1000), (MappingPolicy::Any, 1000), (MappingPolicy::Any, 1000)]);
        let at = |page: u64| START + page * PAGE;
        // The first of them is of two mappings.
        let parts = [(at(900), at(1200)), (at(2500), at(2600)), (at(0), at(300)), (at(5000), at(6000))];
        let within = Some((at(100), at(3000)));
        let order = |pages| MoveMemory { within, parts: Some(parts.into()), ..order(pages) };
        let mut job = Job::new(JOB, &fake, order(500), at(1000)).expect("begun");
        assert!((0..100).any(|_| job.turn()));
        let moved: Vec<u64> = fake.moves.borrow().iter().flatten().copied().collect();
        let expected: Vec<u64> = (900..1200).chain(2500..2600).chain(0..100).map(at).collect();
        assert_eq!((moved, job.moved.bytes), (expected, 500 * PAGE));
        let mut job = Job::new(JOB, &fake, order(5000), 0).expect("begun");
        assert!((0..100).any(|_| job.turn()));
        assert_eq!(job.moved.bytes, 200 * PAGE, "what was left of the third part");
    }

    #[test]
    fn a_small_mapping_moves_if_it_is_known_to_be_memory_of_the_guest() {
        let mut fake = Fake::new(&[(MappingPolicy::Any, 1000), (MappingPolicy::Any, 10)]);
        let (first, end) = (START + 1000 * PAGE, START + 1010 * PAGE);
        fake.small.push(first);
        let order = MoveMemory { within: Some((first, end)), ..order(5000) };
        let mut job = Job::new(JOB, &fake, order, 0).expect("begun");
        assert!((0..100).any(|_| job.turn()));
        assert_eq!((job.moved.bytes, moved(&fake)), (10 * PAGE, 10));
        assert_eq!(finish(&fake, 5000).moved.bytes, 1000 * PAGE, "it may be a program's");
    }

    /// So many huge pages of 2 MiB, of which a small page stands for each.
    fn pool(pages: u64) -> Fake {
        let mut fake = Fake::any(0);
        let end = START + pages * HUGE;
        let kib = vec![(HERE, pages * HUGE / 1024)];
        let mapping = |policy, page_kib| GuestMapping { start: START, policy, page_kib, pages: kib.clone() };
        fake.mappings = vec![(mapping(MappingPolicy::Any, 2048), end)];
        let on = |address| (address, PageState::On(HERE));
        fake.pages = RefCell::new((START..end).step_by(HUGE as usize).map(on).collect());
        fake
    }

    const HUGE: u64 = 2 << 20;

    fn of_pool(pages: u64) -> MoveMemory {
        MoveMemory { bytes: pages * HUGE, page_kib: 2048, reserve_kib: 0, ..order(0) }
    }

    #[test]
    fn huge_pages_of_a_pool_move_as_whole_ones_and_count_as_such() {
        let mut fake = pool(100);
        fake.page_takes = HOLD / 3;
        let mut job = Job::new(JOB, &fake, of_pool(60), 0).expect("begun");
        assert!((0..100).any(|_| job.turn()));
        assert_eq!((job.moved.bytes, moved(&fake), &job.moved.problem), (60 * HUGE, 60, &None));
        assert!(
            fake.moves.borrow().iter().all(|pages| (1..=3).contains(&pages.len())),
            "the bound of a hold"
        );
        assert!(fake.moves.borrow().iter().flatten().all(|at| at % HUGE == 0));
        // A part that begins and ends within pages takes these whole.
        let within = Some((START, START + 100 * HUGE));
        let parts = [(START + 70 * HUGE + PAGE, START + 71 * HUGE + PAGE)];
        let part = MoveMemory { within, parts: Some(parts.into()), ..of_pool(40) };
        let mut job = Job::new(JOB, &fake, part, START + 5 * PAGE).expect("begun");
        assert!((0..100).any(|_| job.turn()));
        assert_eq!((job.moved.bytes, moved(&fake)), (2 * HUGE, 62));
    }

    #[test]
    fn an_order_for_one_size_of_pages_moves_no_others() {
        let fake = pool(100);
        assert_eq!(finish(&fake, 5000).moved.bytes, 0, "small ones were ordered");
        let fake = Fake::any(5000);
        let mut job = Job::new(JOB, &fake, of_pool(10), 0).expect("begun");
        assert!(job.turn());
        assert_eq!((job.moved.bytes, moved(&fake)), (0, 0), "huge ones were");
    }

    #[test]
    fn a_pool_that_is_used_up_ends_the_move() {
        let mut fake = pool(100);
        fake.stays = (10..100).map(|page| (START + page * HUGE, PageState::NoMemory)).collect();
        let mut job = Job::new(JOB, &fake, of_pool(100), 0).expect("begun");
        assert!((0..100).any(|_| job.turn()));
        assert_eq!(job.moved.bytes, 10 * HUGE);
        assert_eq!(job.moved.problem.as_deref(), Some("there was no huge page on node 1"));
        let mut held = pool(100);
        held.stays = (0..100).map(|page| (START + page * HUGE, PageState::Busy)).collect();
        let mut job = Job::new(JOB, &held, of_pool(100), 0).expect("begun");
        assert!(job.turn());
        assert!(
            job.moved.problem.as_deref().is_some_and(|problem| problem.contains("held")),
            "{:?}",
            job.moved
        );
        assert!(job.moved.busy < 20, "it is not tried with all of them");
    }

    #[test]
    fn calls_get_shorter_until_they_hold_pages_no_longer_than_they_may() {
        let mut fake = Fake::any(4096);
        fake.page_takes = HOLD / 100;
        let job = finish(&fake, 4096);
        let moves = fake.moves.borrow();
        let sizes: Vec<usize> = moves.iter().map(Vec::len).collect();
        assert_eq!(sizes.iter().sum::<usize>(), 4096);
        assert!(sizes.iter().all(|size| *size <= 100), "{sizes:?}");
        assert_eq!(
            job.moved.longest_hold_ns,
            (HOLD / 100).as_nanos() as u64 * *sizes.iter().max().expect("some") as u64
        );
        drop(moves);
        // One page takes too long, and fewer at a time would only take longer.
        let mut slow = Fake::any(600);
        slow.page_takes = HOLD * 3;
        let job = finish(&slow, 600);
        assert_eq!(
            (job.moved.bytes, slow.moves.borrow().iter().map(Vec::len).max()),
            (600 * PAGE, Some(LEAST))
        );
        assert!(slow.moves.borrow().len() <= 600 / LEAST + 2, "{} calls", slow.moves.borrow().len());
        assert_eq!(
            job.moved.longest_hold_ns,
            (HOLD * 3).as_nanos() as u64 * LEAST as u64,
            "what it was is said"
        );
    }

    #[test]
    fn a_call_is_never_empty_nor_longer_than_the_kernel_takes() {
        let mut pace = Pace::begin(PAGE);
        for took in [Duration::ZERO; 9] {
            pace = pace.after(took);
        }
        assert_eq!(pace, Pace(PAGES_AT_ONCE, LEAST));
        assert_eq!(pace.after(HOLD), pace, "within the bound");
        for took in [Duration::MAX; 12] {
            pace = pace.after(took);
        }
        assert_eq!(pace, Pace(LEAST, LEAST));
    }

    #[test]
    fn a_mapping_that_was_merged_with_another_ends_where_both_do() {
        let mapping =
            |start| GuestMapping { start, policy: MappingPolicy::Any, page_kib: 4, pages: vec![(HERE, 4)] };
        let lengths = vec![(0x1000, 0x1000), (0x4000, 0x4000), (u64::MAX, 2)];
        let of = |start| with_ends(vec![mapping(start)], lengths.clone()).first().map(|(_, end)| *end);
        assert_eq!(of(0x1000), Some(0x2000));
        assert_eq!(of(0x5000), Some(0x8000));
        assert_eq!((of(0x2000), of(0x8000), of(0), of(u64::MAX)), (None, None, None, None), "unmapped since");
    }

    #[test]
    fn a_job_ends_when_its_time_is_over() {
        let fake = Fake::any(1000);
        let mut job = begin(&fake, 1000, 0);
        assert!(!job.has_worked(WORK / 2));
        assert!(job.has_worked(WORK / 2));
        assert!(job.has_worked(Duration::MAX));
    }

    #[test]
    fn a_mapping_without_pages_is_looked_at_a_few_batches_at_a_time() {
        let mut fake = Fake::any(100);
        fake.mappings[0].1 = START + 1000 * BATCH;
        let mut job = begin(&fake, 1000, 0);
        assert!(!job.turn());
        assert_eq!(moved(&fake), 100);
        assert!(!job.turn(), "others have their turn");
        assert_eq!(job.at, START + (1 + LOOKS as u64) * BATCH);
        assert!((0..100).any(|_| job.turn()));
        // Numbers that no kernel has.
        let mut fake = Fake::any(1);
        fake.mappings[0].0.start = u64::MAX - 5;
        fake.mappings[0].1 = u64::MAX;
        finish(&fake, u64::MAX / PAGE);
        fake.mappings[0] = (fake.mappings[0].0.clone(), 0);
        assert_eq!(finish(&fake, 1).moved.bytes, 0, "it ends before it begins");
    }
}
