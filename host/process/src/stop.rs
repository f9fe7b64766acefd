//! Whether a process is stopped, from `/proc`.

use crate::procfs::{self, ProcError, STAT_LIMIT};
use std::fmt;

/// Why a process does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A signal stopped it: SIGSTOP, or a terminal's.
    Signal,
    /// A debugger holds it.
    Tracer,
}

impl StopReason {
    /// Is this process stopped? An error means that this is unknown; most likely it has ended.
    pub fn of(pid: i32) -> Result<Option<Self>, ProcError> {
        Ok(Self::from_stat(&procfs::read_process(pid, "stat", STAT_LIMIT)?))
    }

    /// From a `stat` file.
    pub fn from_stat(stat: &str) -> Option<Self> {
        match procfs::state(stat)? {
            "T" => Some(Self::Signal),
            "t" => Some(Self::Tracer),
            _ => None,
        }
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Signal => "stopped by a signal (SIGSTOP); SIGCONT resumes it",
            Self::Tracer => "held by a debugger",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_found_behind_a_hostile_name() {
        assert_eq!(StopReason::from_stat("7 (qemu) T 1 2"), Some(StopReason::Signal));
        assert_eq!(StopReason::from_stat("7 (qemu) t 1 2"), Some(StopReason::Tracer));
        assert_eq!(StopReason::from_stat("7 (a) T 1) S 1 2"), None);
        assert_eq!((StopReason::from_stat(""), StopReason::from_stat("7 (qemu)")), (None, None));
    }

    #[test]
    fn this_process_runs_and_one_that_is_not_there_is_an_error() {
        assert_eq!(StopReason::of(std::process::id().cast_signed()).unwrap(), None);
        assert!(StopReason::of(-1).is_err());
    }
}
