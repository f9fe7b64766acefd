//! Pages of another process: which node each is on, and to take them to another one, by `move_pages(2)`.
//!
//! The system call names the process by its number, so that the process is looked at before and after, as with affinities. It
//! moves pages that only this process has mapped; those that others share with it stay, and so do pages that somebody holds
//! (VFIO, direct I/O). The caller may die at any time: the kernel moves a page as a whole or not at all.

use crate::on_thread;
use std::{
    io,
    os::fd::BorrowedFd,
    ptr::{null, null_mut},
};
use vnuma_model::HostNodeId;

/// Pages of one call, at most: it holds locks of the process for that long.
pub const PAGES_AT_ONCE: usize = 512;

/// Only pages that no other process has mapped (`linux/mempolicy.h`).
const MPOL_MF_MOVE: libc::c_int = 1 << 1;

/// Where a page is, or why that is not known or it did not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// On this node.
    On(HostNodeId),
    /// Nothing is there, or the zero page.
    Absent,
    /// Other processes have it mapped, too.
    Shared,
    /// It is pinned (VFIO, direct I/O), or in use just now.
    Busy,
    /// There was no memory for it.
    NoMemory,
    /// The kernel's error number.
    Failed(i32),
}

impl PageState {
    fn of(status: i32) -> Self {
        match -status {
            ..=0 => Self::On(status.unsigned_abs()),
            libc::ENOENT | libc::EFAULT => Self::Absent,
            libc::EACCES => Self::Shared,
            libc::EBUSY | libc::EAGAIN => Self::Busy,
            libc::ENOMEM => Self::NoMemory,
            error => Self::Failed(error),
        }
    }
}

/// Where these pages of the process behind `pidfd` (whose number is `pid`) are. At most [`PAGES_AT_ONCE`].
pub fn find_pages(pidfd: BorrowedFd<'_>, pid: i32, addresses: &[u64]) -> io::Result<Vec<PageState>> {
    call(pidfd, pid, addresses, None)
}

/// Takes these pages to a node. What is said of a page that is [`Busy`](PageState::Busy) may be late: a huge page is moved
/// with its first one. [`find_pages`] tells where they are then.
pub fn move_pages(
    pidfd: BorrowedFd<'_>,
    pid: i32,
    addresses: &[u64],
    node: HostNodeId,
) -> io::Result<Vec<PageState>> {
    call(pidfd, pid, addresses, Some(node))
}

fn call(
    pidfd: BorrowedFd<'_>,
    pid: i32,
    addresses: &[u64],
    node: Option<HostNodeId>,
) -> io::Result<Vec<PageState>> {
    let ended = || io::Error::from_raw_os_error(libc::ESRCH);
    if addresses.len() > PAGES_AT_ONCE {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    }
    let target = |node: HostNodeId| i32::try_from(node).map_err(io::Error::other);
    let nodes = node.map(target).transpose()?.map(|node| vec![node; addresses.len()]);
    // What the kernel does not get to is as it was.
    let mut status = vec![-libc::EBUSY; addresses.len()];
    let call = || {
        let nodes = nodes.as_ref().map_or(null(), Vec::as_ptr);
        // SAFETY: the kernel reads `addresses.len()` addresses and, unless that is null, as many nodes, and writes as many
        // states. All three have that length. The addresses are of the other process, and are not touched here.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                libc::c_long::from(pid),
                addresses.len(),
                addresses.as_ptr(),
                nodes,
                if addresses.is_empty() { null_mut() } else { status.as_mut_ptr() },
                MPOL_MF_MOVE,
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    match on_thread(pidfd, pid, pid, call).ok_or_else(ended)? {
        // There is none that would have to move. The kernel may have said so without a state for each.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        // It has no memory any more: a process gives that back before it has ended (find_mm_struct in mm/migrate.c).
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Err(ended()),
        outcome => outcome?,
    }
    Ok(status.into_iter().map(PageState::of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open_pidfd;
    use std::os::fd::AsFd;

    const PAGE: usize = 4096;

    fn own() -> (i32, std::os::fd::OwnedFd) {
        let pid = std::process::id().cast_signed();
        (pid, open_pidfd(pid).expect("a pidfd"))
    }

    /// Pages of this process that are there.
    struct Memory(*mut u8, usize);

    impl Memory {
        fn new(pages: usize) -> Self {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping, wherever the kernel likes.
            let at = unsafe {
                libc::mmap(null_mut(), pages * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
            };
            assert_ne!(at, libc::MAP_FAILED);
            // SAFETY: the mapping was made just now, with this length, to be written.
            unsafe { libc::memset(at, 1, pages * PAGE) };
            Self(at.cast(), pages)
        }

        fn addresses(&self) -> Vec<u64> {
            (0..self.1).map(|page| self.0 as u64 + (page * PAGE) as u64).collect()
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: the mapping is whole, and there is no reference to it any more.
            unsafe { libc::munmap(self.0.cast(), self.1 * PAGE) };
        }
    }

    /// Numbers of the nodes with memory.
    fn nodes() -> Vec<u32> {
        let list = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
        list.trim().parse::<vnuma_model::CpuSet>().map(|list| list.iter().collect()).unwrap_or_default()
    }

    #[test]
    fn pages_are_found_and_taken_to_another_node() {
        let nodes = nodes();
        let [first, second, ..] = nodes[..] else {
            eprintln!("skipped: this needs 2 nodes with memory, and there are {}", nodes.len());
            return;
        };
        let (memory, (pid, pidfd)) = (Memory::new(100), own());
        let mut addresses = memory.addresses();
        for node in [first, second, first] {
            // In a container without CAP_SYS_NICE it is not allowed, nor outside of a cpuset.
            if let Err(error) = move_pages(pidfd.as_fd(), pid, &addresses, node) {
                eprintln!("skipped: move_pages: {error}");
                return;
            }
            let found = find_pages(pidfd.as_fd(), pid, &addresses).expect("found");
            assert_eq!(found, vec![PageState::On(node); 100]);
        }
        addresses.truncate(1);
        // SAFETY: the page is part of the mapping, which is written nowhere meanwhile.
        assert_eq!(unsafe { *memory.0 }, 1, "its content has come along");
    }

    #[test]
    fn what_is_not_there_is_absent_and_too_much_is_refused() {
        let (memory, (pid, pidfd)) = (Memory::new(2), own());
        let mut addresses = memory.addresses();
        addresses.push(PAGE as u64);
        let found = match find_pages(pidfd.as_fd(), pid, &addresses) {
            Ok(found) => found,
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                eprintln!("skipped: this kernel has no move_pages");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        assert!(matches!(found[..], [PageState::On(_), PageState::On(_), PageState::Absent]), "{found:?}");
        let many = vec![0; PAGES_AT_ONCE + 1];
        assert_eq!(find_pages(pidfd.as_fd(), pid, &many).unwrap_err().raw_os_error(), Some(libc::E2BIG));
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().expect("cat");
        let ended = child.id().cast_signed();
        let pidfd = open_pidfd(ended).expect("a pidfd");
        drop(child.stdin.take());
        child.wait().expect("it ends with its input");
        let found = find_pages(pidfd.as_fd(), ended, &addresses);
        assert_eq!(found.unwrap_err().raw_os_error(), Some(libc::ESRCH), "whoever has its number now");
    }

    /// The number of a process may be another one's by now; the pidfd tells.
    #[test]
    fn pages_of_a_successor_are_neither_found_nor_moved() {
        let cat =
            || std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().expect("cat");
        let (mut ended, mut successor) = (cat(), cat());
        let (pidfd, pid) =
            (open_pidfd(ended.id().cast_signed()).expect("a pidfd"), successor.id().cast_signed());
        drop(ended.stdin.take());
        ended.wait().expect("it ends with its input");
        let address = [PAGE as u64];
        let refused = [find_pages(pidfd.as_fd(), pid, &address), move_pages(pidfd.as_fd(), pid, &address, 0)];
        drop(successor.stdin.take());
        successor.wait().expect("it ends with its input");
        for refused in refused {
            assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::ESRCH));
        }
    }

    /// So is one that ends, for a moment. A thread of the kernel is so for ever.
    #[test]
    fn a_process_without_memory_has_ended() {
        let kernel = std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd");
        let Some(pidfd) = kernel.then(|| open_pidfd(2).ok()).flatten() else {
            eprintln!("skipped: there is no kthreadd in this PID namespace");
            return;
        };
        let error = find_pages(pidfd.as_fd(), 2, &[PAGE as u64]).unwrap_err();
        // Without the right to ask, or the system call, that is said first.
        let refused = [libc::EPERM, libc::ENOSYS];
        assert!(
            error.raw_os_error().is_some_and(|number| number == libc::ESRCH || refused.contains(&number)),
            "{error}"
        );
    }

    #[test]
    fn states_are_told_apart() {
        let all = [
            (0, PageState::On(0)),
            (3, PageState::On(3)),
            (-libc::ENOENT, PageState::Absent),
            (-libc::EACCES, PageState::Shared),
            (-libc::EBUSY, PageState::Busy),
            (-libc::ENOMEM, PageState::NoMemory),
            (-libc::EIO, PageState::Failed(libc::EIO)),
        ];
        all.into_iter().for_each(|(status, state)| assert_eq!(PageState::of(status), state, "{status}"));
    }
}
