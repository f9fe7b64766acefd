//! What tests have happen in threads. No program is built with this.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use vnuma_model::VmId;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The thread panics.
    Panic,
    /// It does nothing until the test drops what it was [`Injected`] by, and has not for an hour.
    Hang,
}

/// For how long a thread that hangs seems to have done so.
const LONG: Duration = Duration::from_secs(3600);

type Decide = Arc<dyn Fn(&str, Option<VmId>) -> Option<Fault> + Send + Sync>;

struct State {
    last: u64,
    injected: BTreeMap<u64, Decide>,
}

static STATE: Mutex<State> = Mutex::new(State { last: 0, injected: BTreeMap::new() });
static DROPPED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Faults, until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Injected(u64);

/// `decide` says what goes wrong in a thread of this name when it starts, and when it looks at this VM. It is asked by the thread
/// that starts that one, or has it look.
pub fn inject(decide: impl Fn(&str, Option<VmId>) -> Option<Fault> + Send + Sync + 'static) -> Injected {
    let mut state = lock();
    state.last += 1;
    let number = state.last;
    state.injected.insert(number, Arc::new(decide));
    Injected(number)
}

impl Drop for Injected {
    fn drop(&mut self) {
        lock().injected.remove(&self.0);
        DROPPED.notify_all();
    }
}

/// A fault, and who has injected it.
#[derive(Clone, Copy)]
pub(crate) struct Chosen {
    fault: Fault,
    by: u64,
}

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)
    }
}

/// What goes wrong in this thread.
pub(crate) fn of(name: &str, vm: Option<VmId>) -> Option<Chosen> {
    let injected = lock().injected.clone();
    injected.into_iter().find_map(|(by, decide)| Some(Chosen { fault: decide(name, vm)?, by }))
}

pub(crate) fn hangs(chosen: Option<Chosen>) -> bool {
    chosen.is_some_and(|chosen| chosen.fault == Fault::Hang)
}

/// When a thread has begun, as its heartbeat has it.
pub(crate) fn began(chosen: Option<Chosen>) -> Instant {
    let now = Instant::now();
    let long_ago = hangs(chosen).then(|| now.checked_sub(LONG)).flatten();
    long_ago.unwrap_or(now)
}

/// Has it happen.
pub(crate) fn meet(chosen: Option<Chosen>) {
    match chosen {
        None => {}
        Some(Chosen { fault: Fault::Panic, .. }) => panic!("a test wants it so"),
        Some(Chosen { fault: Fault::Hang, by }) => {
            let hangs = |state: &mut State| state.injected.contains_key(&by);
            drop(DROPPED.wait_while(lock(), hangs));
        }
    }
}
