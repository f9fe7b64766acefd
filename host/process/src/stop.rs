//! Whether a process is stopped, from `/proc`.

use crate::procfs::{self, ProcError, STAT_LIMIT};
use vnuma_model::StopReason;

/// Is this process stopped? An error means that this is unknown; most likely it has ended.
pub fn stopped(pid: i32) -> Result<Option<StopReason>, ProcError> {
    Ok(stopped_by_stat(&procfs::read_process(pid, "stat", STAT_LIMIT)?))
}

/// The same, from a `stat` file.
pub fn stopped_by_stat(stat: &str) -> Option<StopReason> {
    match procfs::state(stat)? {
        "T" => Some(StopReason::Signal),
        "t" => Some(StopReason::Tracer),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_found_behind_a_hostile_name() {
        assert_eq!(stopped_by_stat("7 (qemu) T 1 2"), Some(StopReason::Signal));
        assert_eq!(stopped_by_stat("7 (qemu) t 1 2"), Some(StopReason::Tracer));
        assert_eq!(stopped_by_stat("7 (a) T 1) S 1 2"), None);
        assert_eq!((stopped_by_stat(""), stopped_by_stat("7 (qemu)")), (None, None));
    }

    #[test]
    fn this_process_runs_and_one_that_is_not_there_is_an_error() {
        assert_eq!(stopped(std::process::id().cast_signed()).unwrap(), None);
        assert!(stopped(-1).is_err());
    }
}
