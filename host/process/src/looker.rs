//! Looks at processes of VMs, each with a limit in time.
//!
//! A system call that looks at another process may wait for that process: for the lock of its memory, say, which one of its
//! threads holds while storage does not answer. Nothing ends such a wait. So a thread that works for all VMs leaves such calls
//! to another one, its looker:
//!
//! ```text
//!   worker ── a look ──▶ looker ── what it found ──▶ worker
//!                          │
//!                          └── nothing within the limit ──▶ it is left behind, and ends when its call returns
//! ```
//!
//! The worker goes on with another looker. Until that call returns no worker begins a look at that VM. A look that panics, by what
//! the VM's process shows, ends its looker and nothing else.

#[cfg(any(test, feature = "faults"))]
use crate::faults;
use crate::{
    looks::{LookError, Looks},
    worker::{Groups, Heartbeat, Jobs, Worker, Workers},
};
use std::{
    fmt,
    sync::{Arc, mpsc},
    time::Duration,
};
use vnuma_model::VmId;

type Task<S> = Box<dyn FnOnce(&mut S) + Send>;

/// The thread that looks at processes for a worker, who waits. It is started with the first look.
pub struct Looker<S> {
    name: String,
    looks: Looks,
    workers: Workers,
    heartbeat: Arc<Heartbeat>,
    limit: Duration,
    prepare: Arc<dyn Fn() -> S + Send + Sync>,
    thread: Option<Worker<Task<S>>>,
}

impl<S> fmt::Debug for Looker<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Looker").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<S: 'static> Looker<S> {
    /// For the worker with this heartbeat. A look may take so long. Each new thread begins with `prepare`, and keeps what that
    /// returns.
    pub fn new(
        groups: &Groups,
        heartbeat: &Arc<Heartbeat>,
        limit: Duration,
        prepare: impl Fn() -> S + Send + Sync + 'static,
    ) -> Self {
        let (name, heartbeat) = (format!("{}-look", heartbeat.name()), Arc::clone(heartbeat));
        let (looks, workers) = (groups.looks.clone(), groups.vms.clone());
        Self { name, looks, workers, heartbeat, limit, prepare: Arc::new(prepare), thread: None }
    }

    /// Looks at a process of a VM, unless a look at it hangs, and waits for what was found.
    pub fn look<T: Send + 'static>(
        &mut self,
        (vm, pid): (VmId, i32),
        look: impl FnOnce(&mut S) -> T + Send + 'static,
    ) -> Result<T, LookError> {
        let under_way = self.looks.begin((vm, pid), &self.name)?;
        let number = under_way.number();
        #[cfg(any(test, feature = "faults"))]
        let fault = faults::of(&self.name, Some(vm));
        let (answer, answered) = mpsc::channel();
        let task: Task<S> = Box::new(move |state| {
            #[cfg(any(test, feature = "faults"))]
            faults::meet(fault);
            let found = look(state);
            drop(under_way);
            // After the limit there is nobody who would use it.
            let _ = answer.send(found);
        });
        // If its thread has just ended the task is dropped, and the answer with it.
        self.thread(pid)?.order(task);
        #[cfg(any(test, feature = "faults"))]
        let limit = if faults::hangs(fault) { Duration::from_millis(20) } else { self.limit };
        #[cfg(not(any(test, feature = "faults")))]
        let limit = self.limit;
        let received = match self.heartbeat.rest(|| answered.recv_timeout(limit)) {
            Err(mpsc::RecvTimeoutError::Timeout) => match self.looks.leave(number) {
                Some(hangs) => {
                    drop(self.thread.take().map(Worker::detached));
                    return Err(hangs);
                }
                // It has returned just now.
                None => answered.recv().ok(),
            },
            received => received.ok(),
        };
        received.ok_or_else(|| {
            self.thread = None;
            LookError::Panicked { pid, by: self.name.clone() }
        })
    }

    fn thread(&mut self, pid: i32) -> Result<&Worker<Task<S>>, LookError> {
        if self.thread.is_none() {
            if !self.looks.has_room() {
                return Err(LookError::TooMany { pid });
            }
            let prepare = Arc::clone(&self.prepare);
            let work = move |tasks: Jobs<Task<S>>| {
                let heartbeat = Arc::clone(tasks.heartbeat());
                // Its worker sees to it that this does not take long.
                let mut state = heartbeat.rest(|| prepare());
                tasks.for_each(|task| heartbeat.rest(|| task(&mut state)));
            };
            let started = self.workers.start(&self.name, work);
            self.thread = Some(started.map_err(|source| LookError::Start { pid, source })?);
        }
        self.thread.as_ref().ok_or(LookError::TooMany { pid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{looks::MOST_LEFT, worker::Change};
    use std::time::Instant;

    /// Nothing here takes so long.
    const LONG: Duration = Duration::from_secs(600);
    /// Long enough to hang for.
    const SHORT: Duration = Duration::from_millis(20);

    fn looker(groups: &Groups, limit: Duration) -> Looker<u32> {
        Looker::new(groups, &Arc::new(Heartbeat::new("test")), limit, || 0)
    }

    /// A look that returns when the sender is dropped.
    fn held() -> (mpsc::Sender<()>, impl FnOnce(&mut u32) -> u32 + Send + 'static) {
        let (go_on, held) = mpsc::channel::<()>();
        (go_on, move |count: &mut u32| {
            let _ = held.recv();
            *count
        })
    }

    fn wait_until(mut done: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < end, "not within a minute");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn count(count: &mut u32) -> u32 {
        *count += 1;
        *count
    }

    #[test]
    fn looks_are_made_in_order_by_one_thread_that_keeps_its_state() {
        let (groups, mut numbers) = (Groups::default(), Vec::new());
        let mut looker = looker(&groups, LONG);
        for vm in 1..4 {
            numbers.push(looker.look((vm, vm as i32), count).unwrap());
        }
        assert_eq!((numbers, groups.looks.hanging()), (vec![1, 2, 3], Vec::new()));
    }

    #[test]
    fn a_look_that_hangs_stops_looks_at_its_vm_by_anybody_and_no_others_until_it_returns() {
        let groups = Groups::default();
        let (mut one, mut other) = (looker(&groups, SHORT), looker(&groups, LONG));
        assert_eq!(one.look((7, 70), count).unwrap(), 1);
        let (go_on, hangs) = held();
        let error = one.look((7, 70), hangs).unwrap_err().to_string();
        assert!(
            error.starts_with("process 70 does not answer looks: test-look has waited for it for"),
            "{error}"
        );
        let hanging = groups.looks.hanging();
        assert_eq!((hanging.len(), hanging[0].vm, hanging[0].pid), (1, 7, 70));
        assert!(matches!(one.look((7, 70), count), Err(LookError::Hangs { .. })));
        assert!(matches!(other.look((7, 70), count), Err(LookError::Hangs { .. })), "by whomever");
        one.limit = LONG;
        assert_eq!(one.look((8, 80), count).unwrap(), 1, "by a new thread");
        assert_eq!(other.look((8, 80), count).unwrap(), 1);
        drop(go_on);
        wait_until(|| groups.looks.hanging().is_empty());
        assert_eq!(one.look((7, 70), count).unwrap(), 2);
        // The thread that was left behind has ended: its place among the workers is free.
        wait_until(|| {
            assert_eq!(groups.vms.look(Instant::now(), LONG), [], "none has been silent");
            groups.vms.count() == 2
        });
    }

    #[test]
    fn a_look_that_panics_is_seen_and_the_next_one_is_made() {
        let groups = Groups::default();
        let mut looker = looker(&groups, LONG);
        let error = looker.look((7, 70), |_| -> u32 { panic!("odd text") }).unwrap_err();
        assert!(matches!(error, LookError::Panicked { pid: 70, .. }), "{error}");
        assert_eq!(looker.look((7, 70), count).unwrap(), 1);
        let panicked = Change::Panicked("test-look".to_owned(), "odd text".to_owned());
        wait_until(|| groups.vms.look(Instant::now(), LONG).contains(&panicked));
        assert_eq!(groups.looks.hanging(), []);
    }

    #[test]
    fn only_so_many_threads_are_left_behind() {
        let groups = Groups::default();
        let mut looker = looker(&groups, Duration::from_millis(1));
        let mut held: Vec<_> = (0..MOST_LEFT as i32)
            .map(|pid| {
                let (go_on, hangs) = held();
                let error = looker.look((1, pid), hangs).unwrap_err();
                assert!(matches!(error, LookError::Hangs { .. }), "{error}");
                go_on
            })
            .collect();
        looker.limit = LONG;
        let error = looker.look((2, 7000), count).unwrap_err().to_string();
        assert_eq!(error, "process 7000 is not looked at: 256 looks at other processes hang");
        held.pop();
        wait_until(|| groups.looks.hanging().len() < MOST_LEFT);
        assert_eq!(looker.look((2, 7000), count).unwrap(), 1, "there is room again");
    }
}
