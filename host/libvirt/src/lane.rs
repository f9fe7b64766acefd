//! Calls that may hang, each with a time limit.
//!
//! ```text
//!  caller ──job──▶ queue (one place) ──▶ thread ──▶ libvirt
//!     ▲                                    │
//!     └── result, or the time is up ◀──────┘ a late result is dropped, and announced
//! ```
//!
//! A call into libvirt cannot be cut off. So it runs in a thread of the lane, and its caller gives up after the
//! limit. A job that has not begun by then never runs. While one hangs, a lane takes one more job into its queue and refuses
//! others at once. A lane that is dropped leaves its thread alone, which ends after the call. One that panics is a [`Worker`] as
//! others, and its lane has [ended](NoResult::Ended).

use nix::sys::eventfd::EventFd;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};
use vnuma_process::{Worker, Workers};

type Job = Box<dyn FnOnce() + Send>;

/// The place of the queue, which is free once this is dropped.
struct Place(Arc<AtomicBool>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Why a job has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// The time was up. It runs on, and may still have an effect.
    Late,
    /// The time was up, or another one waits. It has not begun and will not.
    NotBegun,
    /// The thread has panicked.
    Ended,
}

/// A thread for calls, one after the other.
#[derive(Debug)]
pub(crate) struct Lane {
    worker: Worker<Job>,
    /// A job waits.
    full: Arc<AtomicBool>,
    /// Signalled when a call returns after its caller has stopped waiting.
    late: Arc<EventFd>,
}

impl Lane {
    /// A lane that signals `late`. Its thread is one of these workers.
    pub(crate) fn start(workers: &Workers, name: &str, late: Arc<EventFd>) -> io::Result<Self> {
        let worker = workers.start::<Job>(name, |jobs| jobs.for_each(|job| job()))?;
        Ok(Self { worker: worker.detached(), full: Arc::default(), late })
    }

    /// Runs `job` and waits for it, up to `limit`.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        // By the thread, which runs it then, or by the caller, who gives it up.
        let taken = Arc::<AtomicBool>::default();
        let (answer, answered) = mpsc::channel();
        let (own, late) = (Arc::clone(&taken), Arc::clone(&self.late));
        if self.full.swap(true, Ordering::AcqRel) {
            return Err(NoResult::NotBegun);
        }
        let place = Place(Arc::clone(&self.full));
        let job = Box::new(move || {
            drop(place);
            if own.swap(true, Ordering::AcqRel) {
                return;
            }
            let result = job();
            if answer.send(result).is_err() {
                // A counter that is full is as readable as any other.
                let _ = late.write(1);
            }
        });
        self.worker.send(job).map_err(|_| NoResult::Ended)?;
        match answered.recv_timeout(limit) {
            Ok(result) => Ok(result),
            Err(RecvTimeoutError::Disconnected) => Err(NoResult::Ended),
            Err(RecvTimeoutError::Timeout) => {
                let begun = taken.swap(true, Ordering::AcqRel);
                // It may have ended in between.
                if begun && let Ok(result) = answered.try_recv() {
                    return Ok(result);
                }
                Err(if begun { NoResult::Late } else { NoResult::NotBegun })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::{
        poll::{PollFd, PollFlags, PollTimeout, poll},
        sys::eventfd::EfdFlags,
    };
    use std::{os::fd::AsFd, time::Instant};
    use vnuma_process::Change;

    const HANG: Duration = Duration::from_secs(60);
    const MOMENT: Duration = Duration::from_millis(20);
    /// The thread has begun by then, on a busy machine as well.
    const LONG: Duration = Duration::from_secs(3);

    fn lane() -> (Lane, Arc<EventFd>) {
        let late = Arc::new(EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK).unwrap());
        (Lane::start(&Workers::default(), "test-lane", Arc::clone(&late)).unwrap(), late)
    }

    #[test]
    fn a_call_that_returns_gives_its_result() {
        let (lane, late) = lane();
        assert_eq!(lane.run(HANG, || 7), Ok(7));
        assert_eq!(lane.run(HANG, || "again"), Ok("again"));
        assert!(late.read().is_err(), "nothing was late");
    }

    #[test]
    fn a_call_that_hangs_keeps_nobody_and_is_announced_when_it_returns() {
        let (lane, late) = lane();
        let (release, held) = mpsc::channel::<()>();
        assert_eq!(lane.run(LONG, move || held.recv().is_err()), Err(NoResult::Late));
        let (ran, runs) = mpsc::channel();
        let queued = ran.clone();
        assert_eq!(lane.run(MOMENT, move || queued.send(1)), Err(NoResult::NotBegun));
        // The queue is full of a job whose caller has stopped waiting; a further one is refused at once.
        assert_eq!(lane.run(HANG, move || ran.send(2)), Err(NoResult::NotBegun));
        drop(release);
        let mut wait = [PollFd::new(late.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut wait, PollTimeout::try_from(HANG).unwrap()), Ok(1), "announced");
        let end = std::time::Instant::now() + HANG;
        while lane.run(HANG, || 3) != Ok(3) {
            assert!(std::time::Instant::now() < end, "it takes calls again");
        }
        assert!(runs.try_recv().is_err(), "what was given up before it began never runs");
    }

    #[test]
    fn a_panic_ends_the_lane_and_a_call_that_hangs_is_seen() {
        let (workers, (release, held)) = (Workers::default(), mpsc::channel::<()>());
        let late = Arc::new(EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK).unwrap());
        let lane = Lane::start(&workers, "test-lane", late).unwrap();
        let look = || workers.look(Instant::now() + 2 * HANG, HANG).pop();
        let hangs = move || {
            held.recv().unwrap();
            panic!("a call")
        };
        assert_eq!(lane.run::<()>(LONG, hangs), Err(NoResult::Late));
        assert!(matches!(look(), Some(Change::Silent(..))));
        release.send(()).unwrap();
        let end = Instant::now() + HANG;
        while lane.run(HANG, || 1) != Err(NoResult::Ended) {
            assert!(Instant::now() < end, "it works on");
        }
        let panicked = Change::Panicked("test-lane".to_owned(), "a call".to_owned());
        while look().is_none_or(|change| change != panicked) {
            assert!(Instant::now() < end, "its panic is not seen");
        }
        assert_eq!(lane.run(HANG, || 1), Err(NoResult::Ended), "for good");
        let (lane, _) = self::lane();
        assert_eq!(
            lane.run::<()>(HANG, || panic!("at once")),
            Err(NoResult::Ended),
            "its caller does not wait on"
        );
    }

    #[test]
    fn a_lane_that_is_dropped_does_not_wait_for_a_call_that_hangs() {
        let (lane, _) = lane();
        let (release, held) = mpsc::channel::<()>();
        assert!(lane.run(MOMENT, move || held.recv().is_err()).is_err());
        drop(lane);
        drop(release);
    }
}
