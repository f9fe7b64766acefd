//! Which thread a number stands for.

use crate::{ActError, alive};
use std::{
    fs::File,
    io::{self, Read},
    os::fd::BorrowedFd,
};

/// `/proc/PID/task/TID/stat` is a line of 52 numbers and a name of up to 64 bytes.
const STAT_LIMIT: u64 = 4096;

/// Start time of a thread of the process behind `pidfd`, in clock ticks since boot: with
/// its number, it tells a thread from any other that ever had that number.
pub(crate) fn start_time(pidfd: BorrowedFd<'_>, pid: i32, tid: i32) -> Result<u64, ActError> {
    let system = |act| move |source| ActError::System { pid, tid, act, source };
    if pid <= 0 || tid <= 0 {
        return Err(ActError::ForeignThread { pid, tid });
    }
    let stat = read_stat(pid, tid);
    // Looked up last: if the process is alive now, its number was its own all the time.
    if !alive(pidfd).map_err(system("asking for its process"))? {
        return Err(ActError::Exited { pid });
    }
    let stat = match stat {
        Ok(stat) => stat,
        Err(error) if gone(&error) => return Err(ActError::ForeignThread { pid, tid }),
        Err(error) => return Err(system("reading its state")(error)),
    };
    parse_start_time(&stat).ok_or_else(|| {
        let reason = io::Error::new(io::ErrorKind::InvalidData, "no start time in /proc/PID/task/TID/stat");
        system("reading its state")(reason)
    })
}

/// Is there such a thread?
pub fn thread_exists(pid: i32, tid: i32) -> bool {
    pid > 0 && tid > 0 && std::path::Path::new(&format!("/proc/{pid}/task/{tid}")).exists()
}

fn read_stat(pid: i32, tid: i32) -> io::Result<Vec<u8>> {
    let mut stat = Vec::new();
    File::open(format!("/proc/{pid}/task/{tid}/stat"))?.take(STAT_LIMIT).read_to_end(&mut stat)?;
    Ok(stat)
}

/// No such file, or the thread ended between open and read.
fn gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Field 22 of a `stat` file. The name (field 2) may contain anything, parentheses and
/// line breaks included, so fields are counted from its end.
pub fn parse_start_time(stat: &[u8]) -> Option<u64> {
    let name_end = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn start_time_is_found_behind_a_hostile_name() {
        let stat = b"77 (a) R 1 2) x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        assert_eq!(parse_start_time(stat), Some(4711));
    }

    #[test]
    fn short_or_odd_lines_have_none() {
        for stat in [&b""[..], b"77", b"77 (a)", b"77 (a) S 1 2 3", b"77 (a) \xff\xfe"] {
            assert_eq!(parse_start_time(stat), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(stat in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = parse_start_time(&stat);
        }
    }
}
