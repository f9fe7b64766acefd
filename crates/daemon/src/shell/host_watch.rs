//! Follows the host's topology.

use super::inbox::{Inbox, Message};
use crate::{config::Config, core::event::Event};
use std::{
    io,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};
use tracing::warn;
use vnuma_host::read_host_topology;
use vnuma_topology::HostTopology;

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(5);

/// A thread that reads the host's topology again and again.
#[derive(Debug)]
pub(super) struct HostWatch {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl HostWatch {
    pub(super) fn start(config: &Config, host: HostTopology, inbox: Arc<Inbox>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let root = config.root.clone();
        let mut known = fixed(host);
        let thread = thread::Builder::new().name("host-watch".into()).spawn(move || {
            while stopped.recv_timeout(INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                let now = match read_host_topology(&root) {
                    Ok(now) => now,
                    Err(error) => {
                        warn!(%error, "the host's topology cannot be read; the last one stays");
                        continue;
                    }
                };
                if fixed(now.clone()) == known {
                    continue;
                }
                known = fixed(now.clone());
                if !inbox.send(Message::Event(Event::HostChanged(now))) {
                    return;
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

/// A topology without what changes all the time.
fn fixed(mut host: HostTopology) -> HostTopology {
    for node in &mut host.nodes {
        node.memory_free_kib = 0;
        node.huge_pages.iter_mut().for_each(|pool| (pool.free, pool.total) = (0, 0));
    }
    host
}

impl Drop for HostWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It only fails if the thread panicked, which has been reported then.
            let _ = thread.join();
        }
    }
}
