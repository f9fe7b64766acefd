//! Watches how hot the memory of VMs is, by DAMON, in a thread of its own: a watch takes some seconds, and a write to DAMON's
//! files can wait. One that waits for the VM's process for long is left to a thread of its own. Until it returns
//! DAMON is in use, and what is displaced is moved without.
//!
//! One VM at a time is watched, and nothing runs in between. What a vnumad that was killed has left is removed at the begin.

use super::{capabilities::Capabilities, inbox::Inbox};
use crate::core::event::Event;
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tracing::{debug, info, warn};
use vnuma_model::{Capability, VmId};
use vnuma_observe::location::monotonic_ns;
use vnuma_policy::{hotness::Hotness, residency::MemoryArea, world::TaskId};
use vnuma_process::{
    Groups, Jobs, Looker, Worker,
    damon::{
        Damon,
        DamonError::{Cancelled, Range, Stopped},
        LOOKS, Sysfs, Tree,
    },
    on_thread,
};

/// A VM whose turn comes later than this is not watched: what is displaced of it is moved without.
const LATE: Duration = Duration::from_secs(30);

/// How long a watch may take: some seconds, and while others use DAMON's files for a moment some more.
const LIMIT: Duration = Duration::from_secs(20);

/// What a vnumad before has left is of no VM that is known yet.
const LEFT_BEFORE: (VmId, i32) = (0, 0);

struct Order {
    task: TaskId,
    pid: i32,
    pidfd: Option<Arc<OwnedFd>>,
    areas: Vec<MemoryArea>,
    given: Instant,
}

/// Whether vnumad stops.
#[derive(Debug, Default)]
struct Stop {
    stops: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn stop(&self) {
        *self.stops.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits for so long; false if vnumad stops.
    fn wait(&self, time: Duration) -> bool {
        let stops = self.stops.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(stops, time, |stops| !*stops);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The thread.
#[derive(Debug)]
pub(super) struct HotnessWatcher {
    stop: Arc<Stop>,
    worker: Worker<Order>,
}

impl HotnessWatcher {
    pub(super) fn start(groups: &Groups, root: PathBuf, inbox: Arc<Inbox>) -> io::Result<Self> {
        let stop = Arc::new(Stop::default());
        let (stops, all) = (Arc::clone(&stop), groups.clone());
        let worker = groups.host.start("hotness", move |orders: Jobs<Order>| {
            let damon = move || {
                let stops = Arc::clone(&stops);
                Damon::new(Sysfs::new(root.clone(), move |time| stops.wait(time)))
            };
            let mut looker = Looker::new(&all, orders.heartbeat(), LIMIT, damon);
            match looker.look(LEFT_BEFORE, |damon| damon.remove_ours()) {
                Ok(Ok(true)) => {
                    info!("a watch of memory that a vnumad before has left was removed from DAMON");
                }
                Ok(Ok(false)) => {}
                Ok(Err(why)) => debug!(%why, "how hot memory is cannot be watched now"),
                Err(why) => {
                    warn!(%why, "a watch of memory that a vnumad before has left is not removed from DAMON")
                }
            }
            for order in orders {
                let (task, pid, capabilities) = (order.task, order.pid, inbox.capabilities.clone());
                let looked = looker.look((task.vm, pid), move |damon| watch(damon, &order, &capabilities));
                let outcome = looked.unwrap_or_else(|error| Err(error.to_string()));
                inbox.tell(Event::HotnessWatched(task, outcome));
            }
        })?;
        Ok(Self { stop, worker })
    }

    /// Watches memory of this process of a VM; [`Event::HotnessWatched`] follows.
    pub(super) fn watch(&self, task: TaskId, pid: i32, pidfd: Option<Arc<OwnedFd>>, areas: Vec<MemoryArea>) {
        self.worker.order(Order { task, pid, pidfd, areas, given: Instant::now() });
    }
}

impl Drop for HotnessWatcher {
    fn drop(&mut self) {
        // Before the worker is dropped, which waits for the end of a watch.
        self.stop.stop();
    }
}

fn watch<T: Tree>(damon: &Damon<T>, order: &Order, capabilities: &Capabilities) -> Result<Hotness, String> {
    let ended = || format!("process {} has ended", order.pid);
    if order.given.elapsed() > LATE {
        return Err(format!("it was not its turn within {} s, as other VMs were watched", LATE.as_secs()));
    }
    let pidfd = order.pidfd.as_ref().ok_or_else(ended)?;
    let range = |area: &MemoryArea| (area.start, area.start.saturating_add(area.bytes));
    let ranges: Vec<(u64, u64)> = order.areas.iter().map(range).collect();
    let began_ns = monotonic_ns();
    // DAMON is told a number. It was this process that was watched if it had that number all the time.
    let seen = on_thread(pidfd.as_fd(), order.pid, order.pid, || damon.watch(order.pid, &ranges));
    let watched = seen.ok_or_else(ended)?;
    let problem = watched.as_ref().err();
    // The others say nothing about DAMON of this host.
    if !problem.is_some_and(|error| matches!(error, Stopped | Cancelled | Range(..))) {
        capabilities.publish(Capability::either(Capability::HOTNESS, ["damon", "none"], problem));
    }
    let watched = watched.map_err(|error| error.to_string())?;
    let cost_ns = watched.cost_ns.unwrap_or(0);
    Ok(Hotness { began_ns, ended_ns: monotonic_ns(), cost_ns, looks: LOOKS, regions: watched.regions })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_process::open_pidfd;

    /// A tree without any file.
    struct Nothing;

    impl Tree for Nothing {
        fn read(&self, _: &str) -> io::Result<String> {
            Err(io::ErrorKind::NotFound.into())
        }
        fn write(&self, path: &str, _: &str) -> io::Result<()> {
            panic!("{path} is written")
        }
        fn list(&self, _: &str) -> io::Result<Vec<String>> {
            Err(io::ErrorKind::NotFound.into())
        }
        fn wait(&self, _: Duration) -> bool {
            true
        }
        fn pause(&self, _: Duration) {}
    }

    fn order() -> Order {
        let pid = std::process::id().cast_signed();
        let area = MemoryArea { guest_node: 0, start: 4096, bytes: 8192, guest_bytes: 8192, page_kib: 4 };
        let pidfd = Some(Arc::new(open_pidfd(pid).expect("a pidfd")));
        Order { task: TaskId { vm: 1, number: 1 }, pid, pidfd, areas: vec![area], given: Instant::now() }
    }

    #[test]
    fn why_it_is_not_known_is_said() {
        let (damon, all) = (Damon::new(Nothing), Capabilities::default());
        let problem = |order: &Order| watch(&damon, order, &all).expect_err("nothing is watched");
        assert!(problem(&order()).starts_with("this kernel has no DAMON"), "{}", problem(&order()));
        let gone = Order { pidfd: None, ..order() };
        assert!(problem(&gone).ends_with("has ended"));
        if let Some(given) = Instant::now().checked_sub(LATE * 2) {
            assert!(problem(&Order { given, ..order() }).contains("other VMs"));
        }
        let odd = Order { areas: vec![MemoryArea { bytes: 0, ..order().areas[0] }], ..order() };
        assert_eq!(problem(&odd), "memory from 0x1000 to 0x1000 cannot be watched");
        let published = all.of(Capability::HOTNESS);
        let why = published.why_not("damon").is_some_and(|why| why.contains("no DAMON"));
        assert!(published.in_use == "none" && why, "what is odd says nothing about the host: {published:?}");
    }

    #[test]
    fn a_watch_ends_when_vnumad_stops() {
        let stop = Stop::default();
        assert!(stop.wait(Duration::from_millis(1)));
        stop.stop();
        assert!(!stop.wait(Duration::from_secs(3600)));
    }
}
