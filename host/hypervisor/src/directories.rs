//! Directories of sockets, watched by inotify.

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor},
};
use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

/// Most times that events are taken at once, some hundred each time: a program that fills the directory without a pause does
/// not keep the caller.
const READS: usize = 64;

/// Reports when directories have to be read again.
#[derive(Debug)]
pub(crate) struct DirectoryWatch {
    /// `None` where there is no inotify.
    inotify: Option<Inotify>,
    watched: BTreeMap<PathBuf, WatchDescriptor>,
}

impl DirectoryWatch {
    pub(crate) fn new() -> Self {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        if let Err(error) = &inotify {
            tracing::warn!(%error, "inotify unavailable: new VMs are found by polling only");
        }
        Self { inotify: inotify.ok(), watched: BTreeMap::new() }
    }

    /// Watches those of `directories` that exist. One that was removed and made again is watched again.
    pub(crate) fn watch(&mut self, directories: &[PathBuf]) {
        let Some(inotify) = &self.inotify else { return };
        for directory in directories {
            // Adding a watch again is harmless, and finds a directory that took the place of another.
            match inotify.add_watch(directory, flags()) {
                Ok(watch) => {
                    if self.watched.insert(directory.clone(), watch) != Some(watch) {
                        tracing::debug!(directory = %directory.display(), "watching for VMs");
                    }
                }
                Err(error) => not_watched(directory, error, self.watched.remove(directory).is_some()),
            }
        }
    }

    /// Readable after a change.
    pub(crate) fn changes(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    /// Discards the events: the directories are read anyway.
    pub(crate) fn clear(&self) {
        let Some(inotify) = &self.inotify else { return };
        for _ in 0..READS {
            if !inotify.read_events().is_ok_and(|events| !events.is_empty()) {
                return;
            }
        }
    }
}

/// A directory that is not there yet is nothing to speak of.
fn not_watched(directory: &Path, error: Errno, was_watched: bool) {
    if was_watched || !matches!(error, Errno::ENOENT | Errno::ENOTDIR) {
        tracing::debug!(directory = %directory.display(), %error, "not watched");
    }
}

fn flags() -> AddWatchFlags {
    AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_MOVED_TO
        | AddWatchFlags::IN_MOVED_FROM
        | AddWatchFlags::IN_ONLYDIR
}
