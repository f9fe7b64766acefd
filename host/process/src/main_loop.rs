//! What the main thread of a QEMU does, from `/proc`. Only this thread answers the monitor, so a QEMU that is blocked
//! there (storage that does not answer, a pipe without a reader) is silent though it runs.

use crate::{
    procfs::{self, ProcError},
    stopped,
};

/// `syscall` has a number and eight more of 18 characters; `wchan` the name of a function.
const FILE_LIMIT: u64 = 256;

/// The system calls in which a main loop waits for something to do.
const WAITS: &[libc::c_long] = &[
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
];

/// Where a main thread waits for something to do: the system call, and where its stack was then. A main loop calls it from
/// one place; one that is nested in a command (waiting for storage, say) calls it from deeper, and may serve no monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    call: libc::c_long,
    stack: u64,
}

/// Does the main thread of this process wait for something to do? If not, it is at work or it is stuck, which only a
/// question tells. An error says that it cannot be known.
pub fn waits(pid: i32) -> Result<bool, ProcError> {
    Ok(parse_place(&read(pid, "syscall")?).is_some())
}

impl Place {
    /// A main thread sleeps in this system call. `None` if it does not wait for something to do.
    pub fn of(call: libc::c_long, stack: u64) -> Option<Self> {
        WAITS.contains(&call).then_some(Self { call, stack })
    }
}

/// The place where it waits, from its `syscall` file. `None` if it does not wait for something to do.
pub fn parse_place(syscall: &str) -> Option<Place> {
    let call = parse_syscall(syscall)?;
    // Number, six arguments, stack pointer, program counter.
    let stack = syscall.split_ascii_whitespace().nth(7)?.strip_prefix("0x")?;
    Place::of(call, u64::from_str_radix(stack, 16).ok()?)
}

/// Does its `syscall` file show that it was on a CPU or waited for one?
pub fn runs(syscall: &str) -> bool {
    syscall.trim_end() == "running"
}

/// The function of the kernel in which the main thread sleeps, if it does and that is no wait for something to do.
pub fn stuck_in(pid: i32) -> Option<String> {
    if stopped(pid).ok()?.is_some() || waits(pid).ok()? {
        return None;
    }
    parse_function(&read(pid, "wchan").ok()?)
}

/// Of the thread whose number is that of its process.
fn read(pid: i32, file: &str) -> Result<String, ProcError> {
    procfs::read_process(pid, file, FILE_LIMIT)
}

/// The number of the system call, in decimal. `running` and -1 (blocked, but in none) are none.
fn parse_syscall(text: &str) -> Option<libc::c_long> {
    text.split_ascii_whitespace().next()?.parse().ok().filter(|&number| number >= 0)
}

/// `0` stands for none.
fn parse_function(text: &str) -> Option<String> {
    let name = text.trim_end();
    let is_name = !name.is_empty() && !name.starts_with(|first: char| first.is_ascii_digit());
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.'));
    (is_name && plain).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::{sys::stat::Mode, unistd::mkfifo};
    use std::{
        process::{Child, Command},
        time::{Duration, Instant},
    };

    #[test]
    fn the_call_is_the_first_word() {
        let poll = "271 0x5629f5b0b5c0 0x6 0x7ffe2f0c3a10 0x0 0x8 0x0 0x7ffe2f0c39f0 0x7f3c5b1c5ad6\n";
        assert_eq!(parse_syscall(poll), Some(271));
        assert_eq!(parse_syscall("0 0x3 0x7f 0x400"), Some(0));
        for none in ["running\n", "-1 0x7ffe2f0c39f0 0x7f3c5b1c5ad6", "", "99999999999999999999"] {
            assert_eq!(parse_syscall(none), None, "{none}");
        }
    }

    #[test]
    fn a_place_is_a_call_and_a_stack() {
        let (outer, nested) =
            ("271 0x1 0x6 0x2 0x0 0x8 0x0 0x7ffe00 0x7f3c", "271 0x1 0x6 0x2 0x0 0x8 0x0 0x7ffd00 0x7f3c");
        let place = |text: &str| parse_place(text);
        assert!(place(outer).is_some() && place(outer) != place(nested));
        // The arguments may change from one wait to the next.
        assert_eq!(place(outer), place("271 0x9 0x7 0x2 0x0 0x8 0x0 0x7ffe00 0x7f3c\n"));
        for none in
            ["0 0x3 0x7f 0x400 0x0 0x0 0x0 0x7ffe00 0x7f3c", "271 0x1", "running", "271 1 2 3 4 5 6 7 8"]
        {
            assert_eq!(place(none), None, "{none}");
        }
    }

    #[test]
    fn a_thread_on_a_cpu_is_told_from_one_that_sleeps() {
        assert!(runs("running\n"));
        for other in ["", "271 0x1 0x6 0x2 0x0 0x8 0x0 0x7ffe00 0x7f3c", "-1 0x7ffe2f0c39f0 0x7f3c5b1c5ad6"] {
            assert!(!runs(other), "{other}");
        }
    }

    #[test]
    fn a_function_is_a_name_and_nothing_else() {
        let name = "poll_schedule_timeout.constprop.0";
        assert_eq!(parse_function(name).as_deref(), Some(name));
        for none in ["0", "", "a\x1b[31m", "two words"] {
            assert_eq!(parse_function(none), None, "{none:?}");
        }
    }

    /// Until then, or for ten seconds.
    fn eventually(condition: impl Fn() -> bool) -> bool {
        let end = Instant::now() + Duration::from_secs(10);
        while !condition() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        condition()
    }

    fn start(program: &str, arguments: &[&str]) -> Child {
        Command::new(program).args(arguments).spawn().unwrap_or_else(|error| panic!("{program}: {error}"))
    }

    fn end(mut child: Child) {
        let _ = child.kill();
        let _ = child.wait();
    }

    #[test]
    fn a_process_that_waits_for_events_is_not_taken_for_a_stuck_one() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let stuck = start("sh", &["-c", &format!("exec 3> '{}'", fifo.display())]);
        let pid = stuck.id().cast_signed();
        let there = eventually(|| parse_syscall(&read(pid, "syscall").unwrap()) == Some(libc::SYS_openat));
        let (waiting, function) = (waits(pid).unwrap(), stuck_in(pid));
        end(stuck);
        assert!(there && !waiting, "opening a FIFO that nobody reads: waits {waiting}");
        assert!(function.is_some(), "where it sleeps is not known");

        let idle = start("perl", &["-e", "select(undef, undef, undef, 1000)"]);
        let pid = idle.id().cast_signed();
        let waiting = eventually(|| waits(pid).unwrap());
        let function = stuck_in(pid);
        end(idle);
        assert!(waiting && function.is_none(), "select(): waits {waiting}, stuck in {function:?}");
    }

    #[test]
    fn of_a_process_that_is_not_there_nothing_is_known() {
        assert!(waits(-1).is_err());
        assert_eq!(stuck_in(-1), None);
    }
}
