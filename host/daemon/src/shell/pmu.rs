//! The counters of threads, as they are read once a period: those of the kernel, and in tests others.

use std::{path::PathBuf, sync::Arc};
use vnuma_counters::{CounterError, Detected, Events, Heard, Reading, ThreadCounters, detect};
use vnuma_model::{Accesses, Counted, PassedOver};
use vnuma_policy::world::VcpuReading;

/// A vCPU that was on a CPU for less than that may have been counted for none of it.
const LEAST_RAN_NS: u64 = 1_000_000;

/// What can be counted with.
pub(super) trait Pmu {
    type Counters: Count + Send + 'static;
    /// Finds the best source but for those that are given up.
    fn detect(&mut self, given_up: &[PassedOver]) -> Detected;
    /// What opens the counters of threads, in a thread of its own: the kernel has it wait for one whose process is about to run another
    /// program.
    fn opener(&self) -> Opener<Self::Counters>;
}

/// Counts for a thread from now on.
pub(super) type Opener<C> = Arc<dyn Fn(i32, &Events) -> Result<C, CounterError> + Send + Sync>;

/// The counters of a thread.
pub(super) trait Count {
    /// Their ids, in the order of a reading.
    fn ids(&self) -> Vec<u64>;
    /// What happened since the last call, as of a reading that was made already. `None`: that is too old.
    fn take(&mut self, now: Reading, ran_ns: u64) -> Option<Counted>;
    /// The same, and reads them.
    fn read(&mut self) -> Result<Counted, CounterError>;
}

/// That of the kernel.
pub(super) struct Perf {
    /// Where `sys` and `proc` are.
    pub(super) root: PathBuf,
}

impl Pmu for Perf {
    type Counters = ThreadCounters;

    fn detect(&mut self, given_up: &[PassedOver]) -> Detected {
        detect(&self.root, given_up)
    }

    fn opener(&self) -> Opener<ThreadCounters> {
        Arc::new(ThreadCounters::open)
    }
}

impl Count for ThreadCounters {
    fn ids(&self) -> Vec<u64> {
        self.ids()
    }

    fn take(&mut self, now: Reading, ran_ns: u64) -> Option<Counted> {
        self.take(now, ran_ns)
    }

    fn read(&mut self) -> Result<Counted, CounterError> {
        self.read()
    }
}

/// What was counted of a thread in a period, for [`Heard`]. Those that have no counters say nothing.
pub(super) fn hear(heard: &mut Heard, vcpu: &VcpuReading) {
    match &vcpu.counted {
        Counted::Counted(counted) => {
            heard.ran |= vcpu.ran_ns >= LEAST_RAN_NS;
            heard.instructions = heard.instructions.saturating_add(counted.instructions);
            heard.llc_misses = heard.llc_misses.saturating_add(counted.llc_misses);
            let sum = match &counted.accesses {
                Accesses::ByNode(list) => {
                    Some(list.iter().fold(0_u64, |sum, (_, count)| sum.saturating_add(*count)))
                }
                Accesses::LocalRemote { local, remote } => Some(local.saturating_add(*remote)),
                Accesses::Unknown => None,
            };
            if let Some(sum) = sum {
                heard.accesses = Some(heard.accesses.unwrap_or(0).saturating_add(sum));
            }
        }
        Counted::DidNotRun | Counted::Crowded => heard.ran |= vcpu.ran_ns >= LEAST_RAN_NS,
        Counted::Lost | Counted::NoCounters => {}
    }
}
