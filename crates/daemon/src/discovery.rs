//! Which VMs there may be: directories of sockets, watched by inotify and looked at again now and then.

use crate::{message::Message, readiness::readable};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::{
    collections::HashSet,
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::mpsc, task::AbortHandle, time::sleep};
use tracing::{debug, warn};

/// Changes that come within this time are looked at together.
const GATHER: Duration = Duration::from_millis(20);

/// Watches directories until it is dropped.
#[derive(Debug)]
pub(crate) struct DirectoryWatch {
    inotify: Option<Arc<Inotify>>,
    watched: HashSet<PathBuf>,
    task: Option<AbortHandle>,
}

impl DirectoryWatch {
    /// Sends [`Message::Rescan`] after changes. Without inotify there are only the looks now and then.
    pub(crate) fn new(messages: mpsc::Sender<Message>) -> Self {
        let inotify = match Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK) {
            Ok(inotify) => Arc::new(inotify),
            Err(error) => {
                warn!(%error, "no inotify: new VMs are found at the next look only");
                return Self { inotify: None, watched: HashSet::new(), task: None };
            }
        };
        let task = tokio::spawn(announce(Arc::clone(&inotify), messages)).abort_handle();
        Self { inotify: Some(inotify), watched: HashSet::new(), task: Some(task) }
    }

    /// Watches those of `directories` that exist. One that was removed and made again is watched again.
    pub(crate) fn watch(&mut self, directories: &[PathBuf]) {
        let Some(inotify) = &self.inotify else { return };
        self.watched.retain(|directory| directory.is_dir());
        for directory in directories {
            // Adding a watch again is harmless and finds a directory that was replaced.
            match add(inotify, directory) {
                Ok(()) if self.watched.insert(directory.clone()) => {
                    debug!(directory = %directory.display(), "watching for VMs");
                }
                Ok(()) => {}
                Err(error) => debug!(directory = %directory.display(), %error, "not watched"),
            }
        }
    }
}

fn add(inotify: &Inotify, directory: &Path) -> io::Result<()> {
    let flags = AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_MOVED_TO
        | AddWatchFlags::IN_MOVED_FROM
        | AddWatchFlags::IN_ONLYDIR;
    inotify.add_watch(directory, flags)?;
    Ok(())
}

impl Drop for DirectoryWatch {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn announce(inotify: Arc<Inotify>, messages: mpsc::Sender<Message>) {
    let ready = match readable(inotify.as_fd()) {
        Ok(ready) => ready,
        Err(error) => return warn!(%error, "inotify: new VMs are found at the next look only"),
    };
    loop {
        let Ok(mut guard) = ready.readable().await else { return };
        sleep(GATHER).await;
        // What changed is found out by looking; the events are only taken out of the way.
        while inotify.read_events().is_ok_and(|events| !events.is_empty()) {}
        guard.clear_ready();
        if messages.send(Message::Rescan).await.is_err() {
            return;
        }
    }
}
