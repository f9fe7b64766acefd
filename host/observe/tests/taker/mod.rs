//! A watcher with a thread of its own that takes the events of BPF.

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    ops::Deref,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};
use vnuma_model::HostTopology;
use vnuma_observe::location::{
    KernelEvents, LocationError, LocationEvent, LocationKind, LocationWatcher, Prefer,
};
use vnuma_process::{Worker, Workers};

/// Its threads end when it is dropped.
pub struct Watching {
    watcher: Arc<LocationWatcher>,
    _taker: Option<Worker<()>>,
}

impl Deref for Watching {
    type Target = LocationWatcher;

    fn deref(&self) -> &LocationWatcher {
        &self.watcher
    }
}

/// `on_event` is called for each event, from a thread of the watcher's own.
pub fn start(
    workers: &Workers,
    host: &HostTopology,
    prefer: Prefer,
    poll_interval: Duration,
    on_event: impl Fn(LocationEvent) + Send + Sync + 'static,
) -> Result<Watching, LocationError> {
    let on_event = Arc::new(on_event);
    let polled = Arc::clone(&on_event);
    let (watcher, events) =
        LocationWatcher::start(workers, host, prefer, poll_interval, move |event| polled(event))?;
    let watcher = Arc::new(watcher);
    let weak = Arc::downgrade(&watcher);
    let on_event = move |event: LocationEvent| {
        if let (LocationKind::Exited, Some(watcher)) = (event.kind, weak.upgrade()) {
            watcher.unwatch(event.tid);
        }
        on_event(event);
    };
    let taker = events.map(|events| start_taker(workers, events, on_event)).transpose();
    let taker = taker.map_err(|source| LocationError::Watch { act: "starting a thread", source })?;
    Ok(Watching { watcher, _taker: taker })
}

fn start_taker(
    workers: &Workers,
    mut events: KernelEvents,
    on_event: impl Fn(LocationEvent) + Send + 'static,
) -> std::io::Result<Worker<()>> {
    workers.start_polling("vnuma-bpf", move |jobs, stop| {
        let mut taken = Vec::new();
        while jobs.heartbeat().rest(|| wait_until_readable(events.fd(), stop.as_fd())) {
            let rest = events.take(&mut taken);
            taken.drain(..).for_each(&on_event);
            let Some(rest) = rest else { return };
            // Ended early by `stop` only, which is seen above.
            let rest = PollTimeout::try_from(rest).unwrap_or(PollTimeout::ZERO);
            let _ = poll(&mut [PollFd::new(stop.as_fd(), PollFlags::POLLIN)], rest);
        }
    })
}

/// Without a time limit. False once `stop` is readable.
fn wait_until_readable(events: BorrowedFd<'_>, stop: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(events, PollFlags::POLLIN), PollFd::new(stop, PollFlags::POLLIN)];
    // It fails by a signal only; then there is nothing to take.
    let _ = poll(&mut fds, PollTimeout::NONE);
    !fds[1].any().unwrap_or(true)
}
