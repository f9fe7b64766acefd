//! Lists candidate VMs whenever they can have changed. It also removes the records of processes that have ended, which
//! is not urgent and may wait for a disk.

use super::{
    channel_records::ChannelRecords,
    inbox::{Inbox, Message},
};
use crate::core::event::Event;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};
use std::{
    io,
    os::fd::AsFd,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};
use vnuma_hypervisor::{Source, VmBackend};
use vnuma_model::VmCandidate;
use vnuma_process::{Jobs, Next, Worker, Workers};

/// Changes within this time are handled together.
const GATHER: Duration = Duration::from_millis(20);

/// A thread that lists VMs.
#[derive(Debug)]
pub(super) struct Scanner {
    /// Processes that have ended.
    worker: Worker<i32>,
    /// As the last scan has left them.
    sources: Arc<Mutex<Vec<Source>>>,
}

impl Scanner {
    /// Lists at once, after changes, and every `interval` in case one was missed.
    pub(super) fn start(
        workers: &Workers,
        backend: Box<dyn VmBackend>,
        records: ChannelRecords,
        interval: Duration,
        inbox: Arc<Inbox>,
    ) -> io::Result<Self> {
        let sources = Arc::new(Mutex::new(backend.sources()));
        let shown = Arc::clone(&sources);
        let worker = workers.start_polling("scanner", move |ended, wake| {
            Task { backend, records, ended, wake, sources }.run(interval, &inbox);
        })?;
        Ok(Self { worker, sources: shown })
    }

    /// The sources that were asked for VMs, each with its problem.
    pub(super) fn sources(&self) -> Vec<Source> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Removes the record of the process with this PID, which has ended.
    pub(super) fn forget_record(&self, pid: i32) {
        self.worker.order(pid);
    }
}

struct Task {
    backend: Box<dyn VmBackend>,
    records: ChannelRecords,
    ended: Jobs<i32>,
    wake: Arc<EventFd>,
    sources: Arc<Mutex<Vec<Source>>>,
}

impl Task {
    fn run(mut self, interval: Duration, inbox: &Inbox) {
        self.records.tidy();
        let mut scan_at = Instant::now();
        loop {
            loop {
                match self.ended.try_next() {
                    Next::Job(pid) => self.records.remove(pid),
                    Next::Nothing => break,
                    Next::End => return,
                }
            }
            if scan_at <= Instant::now() {
                scan_at = Instant::now() + interval;
                self.backend.clear_changes();
                if !inbox.send(Message::Event(Event::Scanned(self.scan()))) {
                    return;
                }
            }
            if self.wait(scan_at) {
                thread::sleep(GATHER);
                scan_at = Instant::now();
            }
        }
    }

    /// Waits until `until` or for a command or a change. True if another scan may find something else.
    fn wait(&self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut fds = vec![PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.backend.changes().map(|changes| PollFd::new(changes, PollFlags::POLLIN)));
        if self.ended.heartbeat().rest(|| poll(&mut fds, timeout)).is_err() {
            return false;
        }
        let _ = self.wake.read();
        fds.get(1).is_some_and(|fd| fd.any().unwrap_or(false))
    }

    fn scan(&mut self) -> Result<Vec<VmCandidate>, String> {
        let candidates = self.backend.scan().map_err(|error| error.to_string());
        *self.sources.lock().unwrap_or_else(PoisonError::into_inner) = self.backend.sources();
        candidates
    }
}
