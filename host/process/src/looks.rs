//! Looks at processes of VMs that are under way, whichever thread makes them, and those that hang ([`Looker`](crate::Looker)).

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use vnuma_model::VmId;

/// Lookers that may be left behind. Each has a thread of the kernel and next to no memory. There are that many only if storage of
/// the whole host hangs; no new one is started then, and what would need one is not looked at.
pub const MOST_LEFT: usize = 256;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// An earlier look, or this one, has not returned.
    #[error("process {pid} does not answer looks: {by} has waited for it for {} s", waited.as_secs())]
    Hangs {
        /// The process.
        pid: i32,
        /// Who waits.
        by: String,
        /// For how long.
        waited: Duration,
    },
    /// The look has panicked.
    #[error("{by} panicked while it looked at process {pid}; vnumad's log has why")]
    Panicked {
        /// The process.
        pid: i32,
        /// Who looked.
        by: String,
    },
    /// Too many hang.
    #[error("process {pid} is not looked at: {MOST_LEFT} looks at other processes hang")]
    TooMany {
        /// The process.
        pid: i32,
    },
    /// There is no thread for it.
    #[error("process {pid} is not looked at: starting a thread: {source}")]
    Start {
        /// The process.
        pid: i32,
        /// The system's error.
        source: io::Error,
    },
}

/// A look that has not returned in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hanging {
    /// The VM; 0: what is looked at is no VM's.
    pub vm: VmId,
    /// Its process.
    pub pid: i32,
    /// The thread that waits.
    pub by: String,
    /// When it was begun.
    pub since: Instant,
}

#[derive(Debug)]
struct Look {
    of: Hanging,
    left: bool,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    looks: BTreeMap<u64, Look>,
}

impl State {
    fn left(&self) -> impl Iterator<Item = &Hanging> {
        self.looks.values().filter(|look| look.left).map(|look| &look.of)
    }
}

/// All looks that are under way.
#[derive(Clone, Debug, Default)]
pub struct Looks(Arc<Mutex<State>>);

impl Looks {
    /// Those that have not returned in time.
    pub fn hanging(&self) -> Vec<Hanging> {
        self.lock().left().cloned().collect()
    }

    /// Is there room for another one that hangs?
    pub(crate) fn has_room(&self) -> bool {
        self.lock().left().count() < MOST_LEFT
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a look, unless one at that process hangs.
    pub(crate) fn begin(&self, (vm, pid): (VmId, i32), by: &str) -> Result<UnderWay, LookError> {
        let mut state = self.lock();
        if let Some(hanging) = state.left().find(|hanging| hanging.pid == pid) {
            let (by, waited) = (hanging.by.clone(), hanging.since.elapsed());
            return Err(LookError::Hangs { pid, by, waited });
        }
        state.last += 1;
        let number = state.last;
        let of = Hanging { vm, pid, by: by.to_owned(), since: Instant::now() };
        state.looks.insert(number, Look { of, left: false });
        Ok(UnderWay { looks: self.clone(), number })
    }

    /// It has taken too long; why, if it has not returned just now.
    pub(crate) fn leave(&self, number: u64) -> Option<LookError> {
        let mut state = self.lock();
        let look = state.looks.get_mut(&number)?;
        look.left = true;
        let Hanging { pid, by, since, .. } = &look.of;
        Some(LookError::Hangs { pid: *pid, by: by.clone(), waited: since.elapsed() })
    }
}

/// A look that has not returned.
#[derive(Debug)]
pub(crate) struct UnderWay {
    looks: Looks,
    number: u64,
}

impl UnderWay {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.looks.lock().looks.remove(&self.number);
    }
}
