//! The scheduling class of a thread, as far as a scheduler of vCPU threads needs it.

use crate::{ActError, thread};
use std::{io, os::fd::BorrowedFd};

/// A scheduling class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// `SCHED_OTHER`: the kernel's own scheduler, unless a sched_ext scheduler takes all threads of the host.
    Other,
    /// `SCHED_EXT`: a sched_ext scheduler, or the kernel's own while there is none.
    Ext,
    /// Another one: batch, idle, real-time, deadline. Threads of these classes are left alone.
    Foreign(i32),
}

const SCHED_OTHER: i32 = 0;
const SCHED_EXT: i32 = 7;
/// Not a part of the class.
const SCHED_RESET_ON_FORK: i32 = 0x4000_0000;

impl Class {
    fn of(number: i32) -> Self {
        match number & !SCHED_RESET_ON_FORK {
            SCHED_OTHER => Self::Other,
            SCHED_EXT => Self::Ext,
            other => Self::Foreign(other),
        }
    }

    fn number(self) -> i32 {
        match self {
            Self::Other => SCHED_OTHER,
            Self::Ext => SCHED_EXT,
            Self::Foreign(other) => other,
        }
    }
}

/// The class of a thread.
pub fn read_class(tid: i32) -> io::Result<Class> {
    // SAFETY: the call takes a number.
    let class = unsafe { libc::syscall(libc::SYS_sched_getscheduler, tid) };
    match i32::try_from(class) {
        Ok(class) if class >= 0 => Ok(Class::of(class)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives a thread of the process behind `pidfd` (whose number is `pid`) another class, if it has the class `from` now. Returns
/// the class that it had. Its nice value stays.
pub fn change_class(
    pidfd: BorrowedFd<'_>,
    pid: i32,
    tid: i32,
    from: Class,
    to: Class,
) -> Result<Class, ActError> {
    let failed = |act| move |source| ActError::System { pid, tid, act, source };
    let before = thread::start_time(pidfd, pid, tid)?;
    let class = read_class(tid);
    let outcome = match class {
        Ok(class) if class == from => set_class(tid, to),
        _ => Ok(()),
    };
    match thread::start_time(pidfd, pid, tid) {
        Ok(after) if after == before => {}
        Ok(_) | Err(ActError::ForeignThread { .. }) => return Err(ActError::Raced { pid, tid }),
        Err(other) => return Err(other),
    }
    let class = class.map_err(failed("reading its scheduling class"))?;
    outcome.map(|()| class).map_err(failed("setting its scheduling class"))
}

fn set_class(tid: i32, class: Class) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the structure, which outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_sched_setscheduler, tid, class.number(), &parameters) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::fd::AsFd, process::Command};

    #[test]
    fn only_a_thread_of_the_process_that_has_the_class_gets_another_one() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().cast_signed();
        let pidfd = crate::open_pidfd(pid).unwrap();
        // SCHED_BATCH needs neither a kernel with sched_ext nor a right.
        let batch = Class::Foreign(3);
        let change = |tid, from, to| change_class(pidfd.as_fd(), pid, tid, from, to);
        assert_eq!(change(pid, Class::Ext, batch).unwrap(), Class::Other);
        assert_eq!(read_class(pid).unwrap(), Class::Other, "it had another class: nothing is done");
        assert_eq!(change(pid, Class::Other, batch).unwrap(), Class::Other);
        assert_eq!(read_class(pid).unwrap(), batch);
        let own = std::process::id().cast_signed();
        assert!(matches!(change(own, Class::Other, batch), Err(ActError::ForeignThread { .. })));
        assert_eq!(read_class(own).unwrap(), Class::Other);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(change(pid, batch, Class::Other), Err(ActError::Exited { .. })));
    }

    #[test]
    fn classes_are_read_without_the_flag_of_forks() {
        assert_eq!(Class::of(0x4000_0007), Class::Ext);
        assert_eq!(Class::of(0), Class::Other);
        assert_eq!(Class::of(1), Class::Foreign(1));
    }
}
