//! Lists which VMs there may be, whenever that can have changed. What else may wait for a disk and is not urgent is done here
//! too: records of channels are removed.

use super::{
    inbox::{Inbox, Message},
    records::Records,
};
use crate::core::event::{Candidate, Event};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        inotify::{AddWatchFlags, InitFlags, Inotify},
    },
};
use std::{
    collections::HashSet,
    fs, io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use tracing::{debug, warn};
use vnuma_hypervisor::VmBackend;

/// Changes that come within this time are looked at together.
const GATHER: Duration = Duration::from_millis(20);

/// A thread that lists VMs.
#[derive(Debug)]
pub(super) struct Scanner {
    forget: mpsc::Sender<i32>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Scanner {
    /// Lists at once, after changes, and every `interval` in case one was missed.
    pub(super) fn start(
        backend: Box<dyn VmBackend>,
        records: Records,
        interval: Duration,
        inbox: Arc<Inbox>,
    ) -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = Arc::new(EventFd::from_value_and_flags(0, flags)?);
        let (forget, forgotten) = mpsc::channel();
        let task =
            Task { backend, records, forgotten, wake: Arc::clone(&wake), directories: Directories::new() };
        let thread =
            thread::Builder::new().name("scanner".into()).spawn(move || task.run(interval, &inbox))?;
        Ok(Self { forget, wake, thread: Some(thread) })
    }

    /// The hypervisor of this process number has no channel any more.
    pub(super) fn forget_record(&self, pid: i32) {
        if self.forget.send(pid).is_ok() {
            let _ = self.wake.write(1);
        }
    }
}

impl Drop for Scanner {
    fn drop(&mut self) {
        let (closed, _) = mpsc::channel();
        drop(std::mem::replace(&mut self.forget, closed));
        let _ = self.wake.write(1);
        if let Some(thread) = self.thread.take() {
            // It only fails if the thread panicked, which has been reported then.
            let _ = thread.join();
        }
    }
}

struct Task {
    backend: Box<dyn VmBackend>,
    records: Records,
    forgotten: mpsc::Receiver<i32>,
    wake: Arc<EventFd>,
    directories: Directories,
}

impl Task {
    fn run(mut self, interval: Duration, inbox: &Inbox) {
        self.records.tidy();
        let mut scan_at = Instant::now();
        loop {
            loop {
                match self.forgotten.try_recv() {
                    Ok(pid) => self.records.remove(pid),
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
            }
            if scan_at <= Instant::now() {
                scan_at = Instant::now() + interval;
                self.directories.watch(&self.backend.watch_dirs());
                if !inbox.send(Message::Event(Event::Scanned(self.scan()))) {
                    return;
                }
            }
            if self.wait(scan_at) {
                thread::sleep(GATHER);
                self.directories.clear();
                scan_at = Instant::now();
            }
        }
    }

    /// Waits until `until` or for something to do. True if directories have changed.
    fn wait(&self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut fds = vec![PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.directories.inotify.as_ref().map(|i| PollFd::new(i.as_fd(), PollFlags::POLLIN)));
        if poll(&mut fds, timeout).is_err() {
            return false;
        }
        let _ = self.wake.read();
        fds.get(1).is_some_and(|fd| fd.any().unwrap_or(false))
    }

    fn scan(&mut self) -> Result<Vec<Candidate>, String> {
        let candidates = self.backend.scan().map_err(|error| error.to_string())?;
        let instance = |path: &Path| {
            let file = fs::metadata(path).ok();
            file.map_or(0, |file| file.dev().rotate_left(32) ^ file.ino())
        };
        let candidate = |found: vnuma_hypervisor::VmCandidate| Candidate {
            handle: found.socket.to_string_lossy().into_owned(),
            name: found.name,
            instance: instance(&found.socket),
        };
        Ok(candidates.into_iter().map(candidate).collect())
    }
}

/// Directories that are watched for changes.
#[derive(Debug)]
struct Directories {
    inotify: Option<Inotify>,
    watched: HashSet<PathBuf>,
}

impl Directories {
    /// Without inotify there are only the looks now and then.
    fn new() -> Self {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        let inotify = inotify.inspect_err(|error| {
            warn!(%error, "inotify is unavailable: new VMs are found at the next look only");
        });
        Self { inotify: inotify.ok(), watched: HashSet::new() }
    }

    /// Watches those that exist. One that was removed and made again is watched again.
    fn watch(&mut self, directories: &[PathBuf]) {
        let Some(inotify) = &self.inotify else { return };
        self.watched.retain(|directory| directory.is_dir());
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_ONLYDIR;
        for directory in directories {
            // Adding a watch again is harmless and finds a directory that was replaced.
            match inotify.add_watch(directory, flags) {
                Ok(_) if self.watched.insert(directory.clone()) => {
                    debug!(directory = %directory.display(), "watching for VMs");
                }
                Ok(_) => {}
                Err(error) => debug!(directory = %directory.display(), %error, "not watched"),
            }
        }
    }

    /// What changed is found out by looking; the events are only taken out of the way.
    fn clear(&self) {
        while let Some(inotify) = &self.inotify
            && inotify.read_events().is_ok_and(|events| !events.is_empty())
        {}
    }
}
