//! Threads that work through a queue of jobs, and what is wrong with them.
//!
//! Every [`Worker`] is one of a group of [`Workers`]. Its thread beats whenever it begins or ends to wait, and its panic is
//! caught. So [`Workers::look`], a function that does not wait, sees a worker that panicked, and one that works and shows
//! no progress. One that hangs can be [given up](Workers::give_up).

#[cfg(any(test, feature = "faults"))]
use crate::faults;
use crate::{looks::Looks, procfs, spawn_worker};
use nix::{
    sys::eventfd::{EfdFlags, EventFd},
    unistd::gettid,
};
use std::{
    any::Any,
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// A sign of life of a worker's thread.
#[derive(Debug)]
pub struct Heartbeat {
    name: String,
    began: Instant,
    /// Nanoseconds from the begin to the last beat; [`WAITS`] while the thread waits for work, and after its end.
    beat_ns: AtomicU64,
    panic: OnceLock<String>,
    /// The thread; 0 before its begin.
    tid: AtomicI32,
    /// It hangs, and its end is not waited for any more.
    given_up: AtomicBool,
}

const WAITS: u64 = u64::MAX;

impl Heartbeat {
    /// Of a thread with this name, which works from now on.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            began: Instant::now(),
            beat_ns: AtomicU64::new(0),
            panic: OnceLock::new(),
            tid: AtomicI32::new(0),
            given_up: AtomicBool::new(false),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The thread works, and makes progress.
    pub fn beat(&self) {
        let now = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(WAITS - 1);
        self.beat_ns.store(now, Ordering::Relaxed);
    }

    /// Waits for work: whatever time that takes is no silence.
    pub fn rest<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.beat_ns.store(WAITS, Ordering::Relaxed);
        let waited = wait();
        self.beat();
        waited
    }

    /// Does the kernel have it wait, for a disk or a lock? Such a thread cannot be ended, nor can its process.
    fn is_held(&self) -> bool {
        let (pid, tid) = (std::process::id().cast_signed(), self.tid.load(Ordering::Relaxed));
        let stat = procfs::read_thread(pid, tid, "stat", procfs::STAT_LIMIT);
        stat.is_ok_and(|stat| procfs::state(&stat) == Some("D"))
    }

    /// Since when it works without a beat.
    fn silent_since(&self) -> Option<Instant> {
        let beat_ns = self.beat_ns.load(Ordering::Relaxed);
        (beat_ns != WAITS).then(|| self.began + Duration::from_nanos(beat_ns))
    }
}

/// What has changed with a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Its thread has ended by a panic, with this message.
    Panicked(String, String),
    /// It works, and has not beaten for so long.
    Silent(String, Duration),
    /// It was silent, and beats again.
    Beats(String),
}

#[derive(Debug)]
struct Member {
    heartbeat: Arc<Heartbeat>,
    silent: bool,
    panicked: bool,
}

/// Workers by what ends with one that panics.
#[derive(Clone, Debug, Default)]
pub struct Groups {
    /// What each VM needs. The process ends.
    pub host: Workers,
    /// What one VM needs. Its connection, or the look at it, ends.
    pub vms: Workers,
    /// What workers of the host look at, one VM at a time.
    pub looks: Looks,
}

/// The workers of a group.
#[derive(Clone, Debug, Default)]
pub struct Workers(Arc<Mutex<Vec<Member>>>);

impl Workers {
    /// Starts a thread that takes its jobs from the queue, until that ends.
    pub fn start<J: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce(Jobs<J>) + Send + 'static,
    ) -> io::Result<Worker<J>> {
        self.start_with(name, None, work)
    }

    /// The same for a thread that waits for other descriptors as well: this one is readable once there is a job, or no more.
    pub fn start_polling<J: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce(Jobs<J>, Arc<EventFd>) + Send + 'static,
    ) -> io::Result<Worker<J>> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = Arc::new(EventFd::from_value_and_flags(0, flags)?);
        let theirs = Arc::clone(&wake);
        self.start_with(name, Some(wake), |jobs| work(jobs, theirs))
    }

    /// Starts a thread without jobs, whose end is not waited for. It is looked at until then.
    pub fn start_alone(&self, name: &str, work: impl FnOnce(&Heartbeat) + Send + 'static) -> io::Result<()> {
        let work = |jobs: Jobs<()>| work(jobs.heartbeat());
        self.start_with(name, None, work).map(|worker| drop(worker.detached()))
    }

    fn start_with<J: Send + 'static>(
        &self,
        name: &str,
        wake: Option<Arc<EventFd>>,
        work: impl FnOnce(Jobs<J>) + Send + 'static,
    ) -> io::Result<Worker<J>> {
        #[cfg_attr(not(any(test, feature = "faults")), expect(unused_mut, reason = "only tests change it"))]
        let mut heartbeat = Heartbeat::new(name);
        #[cfg(any(test, feature = "faults"))]
        let fault = faults::of(name, None);
        #[cfg(any(test, feature = "faults"))]
        {
            heartbeat.began = faults::began(fault);
        }
        let heartbeat = Arc::new(heartbeat);
        let member = Member { heartbeat: Arc::clone(&heartbeat), silent: false, panicked: false };
        let (jobs, received) = mpsc::channel();
        let kept = Arc::clone(&heartbeat);
        let thread = spawn_worker(name, move || {
            let jobs = Jobs { received, heartbeat: Arc::clone(&kept) };
            // Nothing of what it worked with is used after a panic.
            kept.tid.store(gettid().as_raw(), Ordering::Relaxed);
            let work = || {
                #[cfg(any(test, feature = "faults"))]
                faults::meet(fault);
                work(jobs);
            };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
                let _ = kept.panic.set(panic_message(&*panic));
            }
            // Its handle may be kept for long.
            kept.beat_ns.store(WAITS, Ordering::Relaxed);
        })?;
        self.lock(|members| members.push(member));
        Ok(Worker { jobs: Some(jobs), wake, thread: Some(thread), heartbeat })
    }

    /// What has changed since the last call. A worker is silent if it has worked so long without a beat.
    pub fn look(&self, now: Instant, patience: Duration) -> Vec<Change> {
        self.lock(|members| {
            let mut changes = Vec::new();
            members.retain_mut(|member| {
                let has_ended = Arc::get_mut(&mut member.heartbeat).is_some();
                changes.extend(member.look(now, patience));
                !has_ended
            });
            changes
        })
    }

    /// Gives up a worker that has worked for so long without a beat, and says which one and for how long: dropping it does not wait for
    /// its end. One that the kernel has wait is none.
    pub fn give_up(&self, now: Instant, limit: Duration) -> Option<(String, Duration)> {
        self.lock(|members| {
            members.iter().find_map(|Member { heartbeat, .. }| {
                let silence = now.saturating_duration_since(heartbeat.silent_since()?);
                if silence < limit || heartbeat.is_held() {
                    return None;
                }
                heartbeat.given_up.store(true, Ordering::Relaxed);
                Some((heartbeat.name.clone(), silence))
            })
        })
    }

    /// How many are looked at.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.lock(|members| members.len())
    }

    fn lock<T>(&self, act: impl FnOnce(&mut Vec<Member>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Member {
    fn look(&mut self, now: Instant, patience: Duration) -> Option<Change> {
        let name = || self.heartbeat.name.clone();
        if let Some(why) = self.heartbeat.panic.get() {
            let known = std::mem::replace(&mut self.panicked, true);
            return (!known).then(|| Change::Panicked(name(), why.clone()));
        }
        let silence = self.heartbeat.silent_since().map(|since| now.saturating_duration_since(since));
        let silence = silence.filter(|silence| *silence >= patience);
        let before = std::mem::replace(&mut self.silent, silence.is_some());
        match silence {
            Some(silence) if !before => Some(Change::Silent(name(), silence)),
            None if before => Some(Change::Beats(name())),
            _ => None,
        }
    }
}

/// What a panic says.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message").to_owned()
}

/// The handle of a worker. When it is dropped, the thread ends after the jobs that it has, and is waited for.
pub struct Worker<J> {
    jobs: Option<mpsc::Sender<J>>,
    wake: Option<Arc<EventFd>>,
    thread: Option<JoinHandle<()>>,
    /// It is looked at until the thread has ended and there is no such handle.
    heartbeat: Arc<Heartbeat>,
}

impl<J> fmt::Debug for Worker<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("heartbeat", &self.heartbeat).finish_non_exhaustive()
    }
}

impl<J> Worker<J> {
    /// Its end is not waited for.
    pub fn detached(mut self) -> Self {
        drop(self.thread.take());
        self
    }

    /// Queues a job. One of a thread that has ended is given back.
    pub fn send(&self, job: J) -> Result<(), J> {
        let Some(jobs) = &self.jobs else { return Err(job) };
        jobs.send(job).map_err(|mpsc::SendError(job)| job)?;
        self.wake();
        Ok(())
    }

    /// Queues a job of a thread whose end ends the program: a job that comes after that is dropped.
    pub fn order(&self, job: J) {
        let _ = self.send(job);
    }

    fn wake(&self) {
        // Fails only if the counter is full, and a full counter wakes the thread, too.
        if let Some(wake) = &self.wake {
            let _ = wake.write(1);
        }
    }
}

impl<J> Drop for Worker<J> {
    fn drop(&mut self) {
        // Before the thread wakes up, so that it sees the end.
        drop(self.jobs.take());
        self.wake();
        if self.heartbeat.given_up.load(Ordering::Relaxed) {
            return;
        }
        // The thread itself may be the one that has no more use for it.
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != thread::current().id())
        {
            // Its panic was caught.
            let _ = thread.join();
        }
    }
}

/// The queue of a worker, for its thread. As an iterator it waits for jobs until the worker is dropped.
#[derive(Debug)]
pub struct Jobs<J> {
    received: mpsc::Receiver<J>,
    heartbeat: Arc<Heartbeat>,
}

/// What a queue has.
#[derive(Debug)]
pub enum Next<J> {
    /// A job.
    Job(J),
    /// None for now.
    Nothing,
    /// None any more: the worker was dropped.
    End,
}

impl<J> Jobs<J> {
    /// Waits for a job, until this time if there is one.
    pub fn wait(&self, until: Option<Instant>) -> Next<J> {
        let received = self.heartbeat.rest(|| match until {
            Some(until) => self.received.recv_timeout(until.saturating_duration_since(Instant::now())),
            None => self.received.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
        });
        match received {
            Ok(job) => Next::Job(job),
            Err(mpsc::RecvTimeoutError::Timeout) => Next::Nothing,
            Err(mpsc::RecvTimeoutError::Disconnected) => Next::End,
        }
    }

    /// A job that is there already.
    pub fn try_next(&self) -> Next<J> {
        match self.received.try_recv() {
            Ok(job) => Next::Job(job),
            Err(mpsc::TryRecvError::Empty) => Next::Nothing,
            Err(mpsc::TryRecvError::Disconnected) => Next::End,
        }
    }

    /// For work that takes long, and waits for other things.
    pub fn heartbeat(&self) -> &Arc<Heartbeat> {
        &self.heartbeat
    }
}

impl<J> Iterator for Jobs<J> {
    type Item = J;

    fn next(&mut self) -> Option<J> {
        match self.wait(None) {
            Next::Job(job) => Some(job),
            Next::Nothing | Next::End => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// Looks until there is a change, for a minute.
    fn wait_for_change(workers: &Workers, after: Duration) -> Vec<Change> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let changes = workers.look(Instant::now() + after, PATIENCE);
            if !changes.is_empty() || Instant::now() > end {
                return changes;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn a_worker_does_its_jobs_in_order_and_those_that_it_has_before_its_end() {
        let (done, results) = mpsc::channel();
        let worker =
            Workers::default().start("test", move |jobs| jobs.for_each(|job: u32| done.send(job).unwrap()));
        let worker = worker.unwrap();
        (1..4).for_each(|job| worker.send(job).unwrap());
        drop(worker);
        assert_eq!(results.try_iter().collect::<Vec<_>>(), [1, 2, 3], "it was waited for");
    }

    #[test]
    fn a_worker_that_panics_is_seen_once_and_takes_no_more_jobs() {
        let workers = Workers::default();
        let work = |mut jobs: Jobs<u32>| panic!("job {}", jobs.next().unwrap_or(0));
        let worker = workers.start("test", work).unwrap();
        worker.send(7).unwrap();
        let panicked = Change::Panicked("test".to_owned(), "job 7".to_owned());
        assert_eq!(wait_for_change(&workers, Duration::ZERO), [panicked]);
        assert_eq!(workers.look(Instant::now() + PATIENCE, PATIENCE), []);
        assert_eq!(worker.send(8), Err(8));
    }

    #[test]
    fn a_worker_that_hangs_is_seen_until_it_goes_on() {
        let (workers, (go_on, held)) = (Workers::default(), mpsc::channel::<()>());
        let worker = workers.start("test", move |jobs| {
            jobs.for_each(|()| held.recv().unwrap_or(()));
        });
        let worker = worker.unwrap();
        worker.send(()).unwrap();
        let changes = wait_for_change(&workers, PATIENCE);
        assert!(
            matches!(&changes[..], [Change::Silent(name, time)] if name == "test" && *time >= PATIENCE),
            "{changes:?}"
        );
        assert_eq!(workers.look(Instant::now() + PATIENCE, PATIENCE), [], "once");
        go_on.send(()).unwrap();
        assert_eq!(
            wait_for_change(&workers, PATIENCE),
            [Change::Beats("test".to_owned())],
            "it waits for work"
        );
    }

    #[test]
    fn a_worker_that_hangs_is_given_up_and_its_end_is_not_waited_for() {
        let (workers, (go_on, held)) = (Workers::default(), mpsc::channel::<()>());
        let worker = workers.start("test", move |_: Jobs<()>| held.recv().unwrap_or(())).unwrap();
        assert_eq!(workers.give_up(Instant::now(), PATIENCE), None, "not yet");
        let (name, silence) = workers.give_up(Instant::now() + PATIENCE, PATIENCE).unwrap();
        assert!(name == "test" && silence >= PATIENCE);
        drop(worker);
        drop(go_on);
    }

    #[test]
    fn a_worker_that_the_kernel_has_wait_is_not_given_up() {
        let (workers, (mut held, mut go_on)) = (Workers::default(), io::pipe().unwrap());
        let worker = workers.start("test", move |_: Jobs<()>| {
            let flags = libc::c_long::from(libc::CLONE_VFORK | libc::SIGCHLD);
            // SAFETY: as a fork: the child has memory of its own, and makes system calls only. This thread waits until it has ended.
            let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
            if child == 0 {
                let mut byte = [0];
                let _ = io::Read::read(&mut held, &mut byte);
                // SAFETY: nothing of this process is run any more.
                unsafe { libc::_exit(0) };
            }
            // SAFETY: it takes a number, and no status is wanted.
            unsafe { libc::waitpid(child as libc::pid_t, std::ptr::null_mut(), 0) };
        });
        let worker = worker.unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while !worker.heartbeat.is_held() {
            assert!(Instant::now() < end, "it does not wait");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(workers.give_up(Instant::now() + PATIENCE, PATIENCE), None);
        io::Write::write_all(&mut go_on, b"x").unwrap();
        drop(worker);
    }

    #[test]
    fn a_worker_that_has_ended_is_not_silent() {
        let workers = Workers::default();
        let worker = workers.start("test", |_: Jobs<()>| ()).unwrap();
        while !worker.thread.as_ref().unwrap().is_finished() {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(workers.look(Instant::now() + PATIENCE, PATIENCE), []);
    }

    #[test]
    fn who_waits_for_something_else_is_not_silent_and_who_beats_is_not_either() {
        let heartbeat = Heartbeat::new("test");
        let began = heartbeat.began;
        assert_eq!(heartbeat.silent_since(), Some(began));
        heartbeat.rest(|| assert_eq!(heartbeat.silent_since(), None));
        let first = heartbeat.silent_since().unwrap();
        heartbeat.beat();
        assert!(first >= began && heartbeat.silent_since().unwrap() >= first);
    }

    #[test]
    fn a_worker_that_polls_is_woken_by_a_job_and_by_the_end() {
        let (done, results) = mpsc::channel();
        let worker = Workers::default().start_polling("test", move |jobs: Jobs<u32>, wake| {
            loop {
                let mut fds = [PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
                jobs.heartbeat().rest(|| poll(&mut fds, PollTimeout::NONE).unwrap());
                let _ = wake.read();
                loop {
                    match jobs.try_next() {
                        Next::Job(job) => done.send(job).unwrap(),
                        Next::Nothing => break,
                        Next::End => return,
                    }
                }
            }
        });
        let worker = worker.unwrap();
        worker.send(5).unwrap();
        assert_eq!(results.recv_timeout(Duration::from_secs(60)), Ok(5));
        drop(worker);
        assert!(results.recv().is_err(), "it has ended");
    }

    #[test]
    fn a_worker_whose_end_nobody_waits_for_is_looked_at_until_then() {
        let (workers, (go_on, held)) = (Workers::default(), mpsc::channel::<()>());
        let worker = workers.start("test", move |_: Jobs<()>| held.recv().unwrap_or(())).unwrap().detached();
        drop(worker);
        assert!(matches!(&wait_for_change(&workers, PATIENCE)[..], [Change::Silent(..)]));
        drop(go_on);
        assert_eq!(wait_for_change(&workers, PATIENCE), [Change::Beats("test".to_owned())]);
        while workers.lock(|members| !members.is_empty()) {
            assert_eq!(workers.look(Instant::now() + PATIENCE, PATIENCE), []);
        }
        workers.start_alone("test", |_| panic!("unseen")).unwrap();
        let panicked = Change::Panicked("test".to_owned(), "unseen".to_owned());
        assert_eq!(wait_for_change(&workers, Duration::ZERO), [panicked], "without a handle as well");
    }
}
