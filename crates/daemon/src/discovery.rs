//! When to look for VMs again: the backend says so.

use crate::{message::Message, readiness::readable};
use std::{io, os::fd::BorrowedFd, time::Duration};
use tokio::{io::unix::AsyncFd, sync::mpsc, task::AbortHandle, time::sleep};
use tracing::warn;

/// Changes that come within this time are looked at together.
const GATHER: Duration = Duration::from_millis(20);

/// Waits for changes until it is dropped.
#[derive(Debug)]
pub(crate) struct ChangeWatch {
    task: AbortHandle,
}

impl ChangeWatch {
    /// Sends [`Message::Rescan`] after changes; whoever takes it clears them. Without this there are only the looks now
    /// and then.
    pub(crate) fn start(changes: BorrowedFd<'_>, messages: mpsc::Sender<Message>) -> io::Result<Self> {
        let ready = readable(changes)?;
        Ok(Self { task: tokio::spawn(announce(ready, messages)).abort_handle() })
    }
}

impl Drop for ChangeWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn announce(ready: AsyncFd<std::os::fd::OwnedFd>, messages: mpsc::Sender<Message>) {
    loop {
        let Ok(mut guard) = ready.readable().await else {
            return warn!("changes cannot be waited for: new VMs are found by polling only");
        };
        // The next change makes it ready again, whether or not this one has been cleared by then.
        guard.clear_ready();
        sleep(GATHER).await;
        if messages.send(Message::Rescan).await.is_err() {
            return;
        }
    }
}
