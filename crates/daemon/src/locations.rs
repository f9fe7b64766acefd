//! Where vCPU threads are: events from the watcher, and a look at /proc.

use crate::config::Config;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::mpsc;
use tracing::{info, warn};
use vnuma_host::location::{LocationError, LocationEvent, LocationKind, LocationWatcher, read_location};
use vnuma_topology::{HostTopology, VcpuLocation};

/// Events that wait to be taken; more are counted as lost, and everything is read again.
const BACKLOG: usize = 4096;

/// Watches threads on behalf of whoever owns them.
pub(crate) struct Locations {
    watcher: LocationWatcher,
    overflowed: Arc<AtomicU64>,
    /// Process of each thread, and whether it is watched.
    threads: HashMap<i32, (i32, bool)>,
    seen_lost: u64,
}

impl Locations {
    /// Starts watching; events come out of the receiver.
    pub(crate) fn start(
        host: &HostTopology,
        config: &Config,
    ) -> Result<(Self, mpsc::Receiver<LocationEvent>), LocationError> {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let overflowed = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&overflowed);
        let on_event = move |event| {
            if sender.try_send(event).is_err() {
                counter.fetch_add(1, Ordering::Relaxed);
            }
        };
        let watcher = LocationWatcher::start(host, config.location, config.poll_interval, on_event)?;
        match watcher.why_not_bpf() {
            None => info!(source = watcher.source(), "watching vCPU locations"),
            Some(why) => info!(source = watcher.source(), why_not_bpf = why, "watching vCPU locations"),
        }
        Ok((Self { watcher, overflowed, threads: HashMap::new(), seen_lost: 0 }, receiver))
    }

    /// Watches a thread from now on, if it is not watched yet. What failed is tried again at the next call.
    pub(crate) fn watch(&mut self, pid: i32, tid: i32) {
        let before = self.threads.get(&tid).copied();
        if before == Some((pid, true)) {
            return;
        }
        let watched = self.watcher.watch(pid, tid);
        if let Err(error) = &watched
            && before.is_none()
        {
            // The look at everything now and then still finds where it is.
            warn!(tid, %error, "the thread is not watched");
        }
        self.threads.insert(tid, (pid, watched.is_ok()));
    }

    /// Forgets a thread.
    pub(crate) fn unwatch(&mut self, tid: i32) {
        if self.threads.remove(&tid).is_some() {
            self.watcher.unwatch(tid);
        }
    }

    /// Where a watched thread is.
    pub(crate) fn read(&self, host: &HostTopology, tid: i32) -> Option<VcpuLocation> {
        let (pid, _) = *self.threads.get(&tid)?;
        read_location(host, pid, tid).ok()
    }

    /// Where an event says that a thread is. Its affinity is looked up: only that tells a move on purpose from drift.
    pub(crate) fn after(&self, host: &HostTopology, event: &LocationEvent) -> Option<VcpuLocation> {
        let mut location = self.read(host, event.tid)?;
        if event.kind == LocationKind::Migrated
            && let Some(node) = host.node_of_cpu(event.cpu)
        {
            // /proc may not show it yet: the event is sent on the way.
            location.cpu = event.cpu;
            location.node = node;
        }
        location.time_ns = event.time_ns;
        Some(location)
    }

    /// Events lost since the start.
    pub(crate) fn lost(&self) -> u64 {
        self.watcher.dropped() + self.overflowed.load(Ordering::Relaxed)
    }

    /// Have events been lost since the last call?
    pub(crate) fn lost_again(&mut self) -> bool {
        let lost = self.lost();
        std::mem::replace(&mut self.seen_lost, lost) != lost
    }

    pub(crate) fn source(&self) -> &'static str {
        self.watcher.source()
    }

    pub(crate) fn sees_affinity(&self) -> bool {
        self.watcher.sees_affinity()
    }

    pub(crate) fn why_not_bpf(&self) -> Option<String> {
        self.watcher.why_not_bpf()
    }
}
