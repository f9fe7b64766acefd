//! The priority of a thread of this process.

use std::io;

/// The highest nice value there is (`setpriority(2)`).
const FIRST: libc::c_int = -20;

/// Has the scheduler prefer the calling thread to all others of its class. Needs `CAP_SYS_NICE`.
///
/// For a thread that others wait for while it works, such as one that moves their pages: it is not to wait for a CPU behind them.
pub fn prefer_this_thread() -> io::Result<()> {
    // SAFETY: the call takes numbers; 0 is the calling thread.
    match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, FIRST) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nice() -> libc::c_int {
        // SAFETY: the call takes numbers; 0 is the calling thread.
        unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
    }

    #[test]
    fn only_the_calling_thread_is_preferred() {
        let before = nice();
        let preferred = std::thread::spawn(|| prefer_this_thread().map(|()| nice())).join().unwrap();
        match preferred {
            Ok(nice) => assert_eq!(nice, FIRST),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}"),
        }
        assert_eq!(nice(), before);
    }
}
