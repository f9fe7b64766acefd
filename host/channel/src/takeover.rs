//! Finding a channel again whose host's end has died. The hypervisor still holds its memory and its vectors, and a process
//! that may trace the hypervisor can have copies of them (`pidfd_getfd`). Nothing else has to outlive the
//! host's end, and neither the VM nor its hypervisor notices.

use nix::sys::{eventfd::EventFd, stat::fstat};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::MetadataExt,
    },
    path::Path,
};
use vnuma_abi_topology_channel::ivshmem::VECTORS;

/// Most descriptors of a hypervisor that are read.
const MAX_DESCRIPTORS: usize = 1 << 20;

/// The parts of a channel by ivshmem among the open files of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// Device of the shared memory's file.
    pub memory_device: u64,
    /// Its inode.
    pub memory_inode: u64,
    /// `eventfd-id` of each of the guest's vectors, as `/proc/PID/fdinfo` names it.
    pub guest_vectors: Vec<u64>,
    /// Of each of the host's.
    pub host_vectors: Vec<u64>,
}

/// The parts of a channel.
#[derive(Debug)]
pub(crate) struct Parts {
    pub memory: OwnedFd,
    pub guest_vectors: Vec<EventFd>,
    pub host_vectors: Vec<EventFd>,
}

impl Files {
    pub(crate) fn of(
        memory: BorrowedFd<'_>,
        guest_vectors: &[EventFd],
        host_vectors: &[EventFd],
    ) -> io::Result<Self> {
        let (memory_device, memory_inode) = file_of(memory)?;
        let ids = |vectors: &[EventFd]| {
            vectors.iter().map(|vector| id_of(vector.as_fd())).collect::<io::Result<Vec<_>>>()
        };
        Ok(Self {
            memory_device,
            memory_inode,
            guest_vectors: ids(guest_vectors)?,
            host_vectors: ids(host_vectors)?,
        })
    }

    /// Copies the parts from the process of `pidfd`, whose directory in `/proc` is `process`.
    pub(crate) fn take(&self, pidfd: BorrowedFd<'_>, process: &Path) -> io::Result<Parts> {
        let all: BTreeSet<u64> = self.guest_vectors.iter().chain(&self.host_vectors).copied().collect();
        if self.guest_vectors.len() != VECTORS
            || self.host_vectors.len() != VECTORS
            || all.len() != 2 * VECTORS
        {
            return Err(io::Error::other(format!("not {VECTORS} vectors on each side, all different")));
        }
        let (memory, vectors) = self.search(process)?;
        let memory = memory.ok_or_else(|| missing("shared memory"))?;
        let memory = copy(pidfd, memory)?;
        // In between, the number may have been reused, or the process directory may be of another process.
        if file_of(memory.as_fd())? != (self.memory_device, self.memory_inode) {
            return Err(missing("shared memory"));
        }
        let take = |id: &u64| {
            let number = *vectors.get(id).ok_or_else(|| missing("vector"))?;
            let descriptor = copy(pidfd, number)?;
            if id_of(descriptor.as_fd())? != *id {
                return Err(missing("vector"));
            }
            // SAFETY: the descriptor is this process's own, and has an `eventfd-id`, which only an eventfd has.
            Ok(unsafe { EventFd::from_owned_fd(descriptor) })
        };
        Ok(Parts {
            memory,
            guest_vectors: self.guest_vectors.iter().map(take).collect::<io::Result<_>>()?,
            host_vectors: self.host_vectors.iter().map(take).collect::<io::Result<_>>()?,
        })
    }

    /// Numbers of the memory and of eventfds in a process.
    fn search(&self, process: &Path) -> io::Result<(Option<RawFd>, HashMap<u64, RawFd>)> {
        let (mut memory, mut vectors) = (None, HashMap::new());
        for entry in fs::read_dir(process.join("fd"))?.take(MAX_DESCRIPTORS) {
            let entry = entry?;
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A descriptor that was closed since it was listed is not part of the channel.
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            if target.as_os_str() == "anon_inode:[eventfd]" {
                if let Ok(id) = read_id(&process.join("fdinfo").join(entry.file_name())) {
                    vectors.insert(id, number);
                }
            } else if target.to_string_lossy().starts_with("/memfd:") {
                let file = fs::metadata(entry.path());
                if file.is_ok_and(|file| (file.dev(), file.ino()) == (self.memory_device, self.memory_inode))
                {
                    memory = Some(number);
                }
            }
        }
        Ok((memory, vectors))
    }
}

fn missing(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("the hypervisor does not hold the channel's {what}"))
}

fn copy(pidfd: BorrowedFd<'_>, number: RawFd) -> io::Result<OwnedFd> {
    Ok(pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?)
}

fn file_of(file: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let status = fstat(file)?;
    Ok((status.st_dev, status.st_ino))
}

fn id_of(vector: BorrowedFd<'_>) -> io::Result<u64> {
    read_id(&Path::new("/proc/self/fdinfo").join(vector.as_raw_fd().to_string()))
}

fn read_id(fdinfo: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(fdinfo)?;
    parse_eventfd_id(&text).ok_or_else(|| io::Error::other(format!("{}: no eventfd-id", fdinfo.display())))
}

/// `eventfd-id` of an eventfd's `/proc/PID/fdinfo/FD`.
pub fn parse_eventfd_id(fdinfo: &str) -> Option<u64> {
    let line = fdinfo.lines().find_map(|line| line.strip_prefix("eventfd-id:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eventfds_have_an_id_of_their_own() {
        let text =
            "pos:\t0\nflags:\t04002\nmnt_id:\t15\nino:\t9\neventfd-count:                1\neventfd-id: 42\n";
        assert_eq!(parse_eventfd_id(text), Some(42));
        assert_eq!((parse_eventfd_id("eventfd-id: x"), parse_eventfd_id("")), (None, None));
        let (one, other) = (EventFd::new().expect("made"), EventFd::new().expect("made"));
        let ids = [one.as_fd(), other.as_fd()].map(|vector| id_of(vector).expect("an id"));
        assert_ne!(ids[0], ids[1]);
    }
}
