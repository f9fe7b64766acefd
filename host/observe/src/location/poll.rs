//! Polling: what differs in /proc since the last reading.

use super::{
    LocationError, LocationEvent, LocationKind, MAX_WATCHED, monotonic_ns,
    proc::{self, ThreadState},
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use vnuma_model::{CpuSet, HostTopology};
use vnuma_process::{Jobs, Next, Worker, Workers, procfs::read_affinity};

/// Shortest interval; below it, polling would only heat the host.
const SHORTEST: Duration = Duration::from_millis(1);

/// So many threads are looked at in each interval. Of the others only the affinity is read, for a tenth of the cost; they
/// have their turn in the next intervals, or at once if it has changed.
const LOOKED_AT: usize = 512;

#[derive(Debug)]
struct Watched {
    pid: i32,
    /// `None` before the first reading, which is always reported.
    seen: Option<ThreadState>,
}

#[derive(Debug, Default)]
struct State {
    threads: BTreeMap<i32, Watched>,
    topology: HostTopology,
}

#[derive(Debug, Default)]
struct Shared(Mutex<State>);

impl Shared {
    /// No code that holds the lock can panic half-way through a change.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that reads /proc.
#[derive(Debug)]
pub(super) struct PollSource {
    shared: Arc<Shared>,
    /// A job says that there is something to watch.
    worker: Worker<()>,
}

impl PollSource {
    /// `threads` are watched already, by number with their process, but it is not known where they were seen last.
    pub(super) fn start(
        workers: &Workers,
        topology: HostTopology,
        interval: Duration,
        threads: &HashMap<i32, i32>,
        on_event: impl Fn(LocationEvent) + Send + 'static,
    ) -> Result<Self, LocationError> {
        let watched = |(&tid, &pid): (&i32, &i32)| (tid, Watched { pid, seen: None });
        let threads = threads.iter().map(watched).collect();
        let shared = Arc::new(Shared(Mutex::new(State { threads, topology })));
        let theirs = Arc::clone(&shared);
        let work = move |jobs| run(&jobs, &theirs, interval.max(SHORTEST), on_event);
        let worker = workers
            .start("vnuma-poll", work)
            .map_err(|source| LocationError::Watch { act: "starting a thread", source })?;
        Ok(Self { shared, worker })
    }

    pub(super) fn watch(&self, pid: i32, tid: i32) -> Result<(), LocationError> {
        let seen = proc::read_thread(pid, tid)?;
        let mut state = self.shared.lock();
        if state.threads.len() >= MAX_WATCHED && !state.threads.contains_key(&tid) {
            return Err(LocationError::TooMany { tid, limit: MAX_WATCHED });
        }
        let waits_for_it = state.threads.is_empty();
        state.threads.insert(tid, Watched { pid, seen: Some(seen) });
        if waits_for_it {
            // One that has panicked is seen by who looks at the workers.
            let _ = self.worker.send(());
        }
        Ok(())
    }

    pub(super) fn set_topology(&self, topology: &HostTopology) {
        self.shared.lock().topology = topology.clone();
    }

    pub(super) fn unwatch(&self, tid: i32) {
        self.shared.lock().threads.remove(&tid);
    }
}

fn run(jobs: &Jobs<()>, shared: &Shared, interval: Duration, on_event: impl Fn(LocationEvent)) {
    // The last one that was looked at.
    let mut last = 0;
    while wait(jobs, shared, interval) {
        let (turn, others) = split(&shared.lock().threads, last);
        last = turn.last().map_or(0, |&(_, tid)| tid);
        let changed =
            others.into_iter().filter(|(_, tid, seen)| read_affinity(*tid).ok().as_ref() != Some(seen));
        for (pid, tid) in turn.into_iter().chain(changed.map(|(pid, tid, _)| (pid, tid))) {
            let found = proc::read_thread(pid, tid);
            let time_ns = monotonic_ns();
            // The callback may watch and unwatch, so it is called without the lock.
            let kinds = note(&mut shared.lock(), tid, found);
            for (kind, cpu) in kinds.into_iter().flatten() {
                on_event(LocationEvent { tid, cpu, kind, time_ns });
            }
        }
    }
}

/// A process and its thread.
type Thread = (i32, i32);

/// Those whose turn it is: the next ones after `last`, and those that were never looked at. Then the others, with the
/// affinity that they had.
fn split(threads: &BTreeMap<i32, Watched>, last: i32) -> (Vec<Thread>, Vec<(i32, i32, CpuSet)>) {
    let after = threads.range(last.saturating_add(1)..);
    let in_order = after.chain(threads.range(..=last));
    let (mut turn, mut others) = (Vec::new(), Vec::new());
    for (position, (&tid, watched)) in in_order.enumerate() {
        match &watched.seen {
            Some(seen) if position >= LOOKED_AT => others.push((watched.pid, tid, seen.allowed.clone())),
            _ => turn.push((position, watched.pid, tid)),
        }
    }
    // The last of those in order comes last.
    turn.sort_by_key(|(position, ..)| *position < LOOKED_AT);
    (turn.into_iter().map(|(_, pid, tid)| (pid, tid)).collect(), others)
}

/// Sleeps for the interval, or until there is something to watch. False at the end.
fn wait(jobs: &Jobs<()>, shared: &Shared, interval: Duration) -> bool {
    let mut until = None;
    loop {
        until = until.or_else(|| (!shared.lock().threads.is_empty()).then(|| Instant::now() + interval));
        match jobs.wait(until) {
            Next::Job(()) => {}
            Next::Nothing => return true,
            Next::End => return false,
        }
    }
}

/// Stores what was read of a thread and returns the event, if it is one.
fn note(
    state: &mut State,
    tid: i32,
    found: Result<ThreadState, LocationError>,
) -> [Option<(LocationKind, u32)>; 2] {
    let (topology, threads) = (&state.topology, &mut state.threads);
    let Some(watched) = threads.get_mut(&tid) else { return [None, None] };
    match found {
        Ok(found) => {
            let cpu = found.cpu;
            let Some(seen) = watched.seen.replace(found.clone()) else {
                return [Some((LocationKind::AffinityChanged, cpu)), Some((LocationKind::Migrated, cpu))];
            };
            let (before, now) = (topology.node_of_cpu(seen.cpu), topology.node_of_cpu(cpu));
            // Between two CPUs of unknown node anything may have happened: report it.
            let crossed = cpu != seen.cpu && (before.is_none() || before != now);
            let confined = found.allowed != seen.allowed;
            [
                confined.then_some((LocationKind::AffinityChanged, cpu)),
                crossed.then_some((LocationKind::Migrated, cpu)),
            ]
        }
        Err(LocationError::NoThread { .. }) => {
            let cpu = watched.seen.as_ref().map_or(0, |seen| seen.cpu);
            threads.remove(&tid);
            [Some((LocationKind::Exited, cpu)), None]
        }
        Err(error) => {
            tracing::debug!(tid, %error, "the thread's location could not be read");
            [None, None]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_have_their_turn_and_the_affinity_of_the_others_is_known() {
        let own = nix::unistd::gettid().as_raw();
        let seen = ThreadState { cpu: 0, allowed: read_affinity(own).unwrap() };
        let many = 3 * LOOKED_AT as i32 / 2;
        let mut threads: BTreeMap<i32, Watched> =
            (1..=many).map(|tid| (tid, Watched { pid: 7, seen: Some(seen.clone()) })).collect();
        let (first, others) = split(&threads, 0);
        assert_eq!((first.len(), others.len()), (LOOKED_AT, many as usize - LOOKED_AT));
        let (second, _) = split(&threads, first[LOOKED_AT - 1].1);
        // The rest of them, and then the first ones again.
        assert_eq!(
            (second[0], second[LOOKED_AT - 1]),
            ((7, LOOKED_AT as i32 + 1), (7, LOOKED_AT as i32 / 2))
        );
        threads.insert(many + 1, Watched { pid: 8, seen: None });
        let (turn, _) = split(&threads, 0);
        assert_eq!(
            (turn.len(), turn[0], turn[LOOKED_AT]),
            (LOOKED_AT + 1, (8, many + 1), (7, LOOKED_AT as i32))
        );
        assert_eq!(split(&BTreeMap::new(), 5), (Vec::new(), Vec::new()));
    }
}
