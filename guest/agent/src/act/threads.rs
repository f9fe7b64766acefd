//! Affinities of the threads of a process.
//!
//! Threads that have the process's widest affinity are confined; one that has another one was given that by its program or its
//! operator, and keeps it. A thread that is started later inherits what its creator has. So does a process: a descendant that is
//! not placed itself is given back what its ancestor had.

use crate::{core::ProcessId, files};
use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd, OwnedFd},
    path::Path,
};
use vnuma_model::CpuSet;
use vnuma_process::{ActError, open_pidfd, pin_thread_if, procfs};

/// A thread that is being confined may start others that are not. More than so many rounds are not made.
const ROUNDS: usize = 16;

/// A process that is still the one that was meant. `None`: it has ended.
fn hold(id: ProcessId) -> Result<Option<OwnedFd>, String> {
    let pidfd = match open_pidfd(id.pid) {
        Ok(pidfd) => pidfd,
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(error) => return Err(format!("pidfd_open: {error}")),
    };
    Ok(is_alive(id).then_some(pidfd))
}

/// Is it still the process that was meant?
pub fn is_alive(id: ProcessId) -> bool {
    procfs::read_start_time(id.pid, id.pid).is_ok_and(|started| started == id.started)
}

/// Is the affinity that was found this one, as far as CPUs are online? When none of them is left, the kernel lets a thread run
/// anywhere.
fn is(found: &CpuSet, cpus: &CpuSet, online: &CpuSet) -> bool {
    cpus.agrees(found, online) || !online.intersects(cpus)
}

/// Threads that have this affinity, each with its start.
pub fn already(id: ProcessId, cpus: &CpuSet, online: &CpuSet) -> Result<BTreeMap<i32, u64>, String> {
    let threads = procfs::threads(id.pid).map_err(|error| error.to_string())?;
    let has = |tid: i32| {
        let found = procfs::read_affinity(tid).ok()?;
        cpus.agrees(&found, online).then(|| procfs::read_start_time(id.pid, tid).ok()).flatten()
    };
    Ok(threads.into_iter().filter_map(|tid| Some((tid, has(tid)?))).collect())
}

/// Has any of its threads this affinity?
pub fn any_has(id: ProcessId, cpus: &CpuSet, online: &CpuSet) -> bool {
    let threads = procfs::threads(id.pid).unwrap_or_default();
    let mut found = threads.into_iter().filter_map(|tid| procfs::read_affinity(tid).ok());
    found.any(|found| is(&found, cpus, online))
}

/// Gives threads with the affinity `from` the affinity `to`. Gives how many, or nothing if the process has ended.
pub fn change(
    id: ProcessId,
    from: &CpuSet,
    to: &CpuSet,
    except: &BTreeMap<i32, u64>,
    online: &CpuSet,
) -> Result<Option<usize>, String> {
    let Some(pidfd) = hold(id)? else { return Ok(None) };
    let mut done = BTreeSet::new();
    for _ in 0..ROUNDS {
        let Ok(threads) = procfs::threads(id.pid) else { break };
        let before = done.len();
        for tid in threads {
            let is_own =
                |started: &u64| procfs::read_start_time(id.pid, tid).is_ok_and(|now| now == *started);
            if done.contains(&tid) || except.get(&tid).is_some_and(is_own) {
                continue;
            }
            match pin_thread_if(pidfd.as_fd(), id.pid, tid, |found| is(found, from, online), to) {
                Ok(()) => drop(done.insert(tid)),
                // Another affinity, or it has ended.
                Err(
                    ActError::MaskChanged { .. } | ActError::ForeignThread { .. } | ActError::Raced { .. },
                ) => {}
                Err(ActError::Exited { .. }) => return Ok(None),
                Err(error) => return Err(error.to_string()),
            }
        }
        if done.len() == before {
            break;
        }
    }
    Ok(Some(done.len()))
}

/// Gives descendants of these processes, which have this affinity instead of that, what they would have without us. Each once:
/// who sets it after that means it.
pub fn free_descendants(
    root: &Path,
    placed: &BTreeMap<ProcessId, (CpuSet, CpuSet)>,
    freed: &mut BTreeSet<ProcessId>,
    online: &CpuSet,
) -> Vec<String> {
    let mut lines = Vec::new();
    let parents = parents(root);
    freed.retain(|id| parents.get(&id.pid).is_some_and(|(started, _)| *started == id.started));
    for (&pid, &(started, parent)) in &parents {
        let id = ProcessId { pid, started };
        if placed.contains_key(&id) || freed.contains(&id) {
            continue;
        }
        let Some((former, set)) = ancestor(&parents, parent, placed) else { continue };
        freed.insert(id);
        match change(id, set, former, &BTreeMap::new(), online) {
            Ok(Some(count)) if count > 0 => {
                lines.push(format!("PID {pid}: a descendant, {count} threads may use CPUs {former} again"));
            }
            Ok(_) => {}
            Err(error) => lines.push(format!("PID {pid}: a descendant: {error}")),
        }
    }
    lines
}

/// Start and parent of each process.
fn parents(root: &Path) -> BTreeMap<i32, (u64, i32)> {
    let pids = procfs::read_processes(&root.join("proc")).unwrap_or_default();
    let read = |pid: i32| {
        let stat = files::text(&root.join(format!("proc/{pid}/stat")))?;
        Some((pid, (procfs::start_time(&stat)?, parent(&stat)?)))
    };
    pids.into_iter().filter_map(read).collect()
}

/// Field 4 of a `stat` file.
fn parent(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The nearest of these that a process with this parent descends from.
fn ancestor<'a>(
    parents: &BTreeMap<i32, (u64, i32)>,
    mut parent: i32,
    placed: &'a BTreeMap<ProcessId, (CpuSet, CpuSet)>,
) -> Option<&'a (CpuSet, CpuSet)> {
    // What was read at different times can have a circle.
    for _ in 0..parents.len() {
        let (started, next) = parents.get(&parent)?;
        if let Some(found) = placed.get(&ProcessId { pid: parent, started: *started }) {
            return Some(found);
        }
        parent = *next;
    }
    None
}
