//! A node of the user-space DSM: the pure protocol of `vnuma-coherence` with page faults, connections and a clock around it.
//!
//! Each shard of the [`Region`] has a thread. The thread owns the shard's userfaultfd, a lane to every peer, and a state
//! machine of the protocol for the shard's pages. Frames of a lane arrive in order, which is the order per peer that the
//! protocol asks for, and shards share nothing but who is suspected. So there are no locks.
//!
//! The threads of a program use [`Region::guest`]. Everything else is reported as [`Happening`].
//!
//! # Example
//!
//! The second of three nodes, which share 16 MiB:
//!
//! ```no_run
//! use std::{collections::BTreeMap, sync::Arc};
//! use vnuma_dsm_node::{Config, Happening, Node};
//! use vnuma_dsm_pager::{Options, Region};
//! use vnuma_dsm_transport::{Limits, Listener, Place, mesh};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let place = |node: u8| Place::Tcp(([192, 0, 2, 1 + node], 8300).into()); // Place::Tls with keys, if others use the network
//! let region = Arc::new(Region::create(16 << 20, Options::default())?);
//! let config = Config::new(1, 3, region.pages());
//! let listener = Listener::bind(&place(1))?;
//! let others: BTreeMap<u8, Place> = [0, 2].map(|node| (node, place(node))).into();
//! // Waits until all have met, or fails.
//! let lanes = mesh(&listener, &others, &config.hello(&region), Limits::default(), |error| eprintln!("{error}"))?;
//! let node = Node::start(&config, Arc::clone(&region), lanes, |happening| match happening {
//!     Happening::Stopped { .. } | Happening::Failed { .. } => std::process::exit(1),
//!     other => eprintln!("{other}"),
//! })?;
//! // From here on threads read and write at this address, and other nodes see it.
//! let memory = region.guest().cast::<std::sync::atomic::AtomicU64>();
//! // SAFETY: aligned, inside the region, and only accessed atomically.
//! unsafe { memory.as_ref() }.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
//! println!("{} bytes were sent", node.stop().bytes);
//! # Ok(())
//! # }
//! ```
//!
//! # After a node was lost
//!
//! [`Happening::Members`] says that all shards of this node go on without it. Survivors that start anew
//! ([`Config::members`], [`Copies::restore`]) keep the old node until all of them are connected to each other again, and then
//! [`Node::leave`] it. From then on the old node of another survivor may find itself without a majority and say so
//! ([`Happening::Stopped`]); that does not concern the new one.

#![forbid(unsafe_code)]

mod config;
mod copies;
mod error;
mod happening;
mod held;
mod lanes;
mod pages;
mod saving;
mod shard;
mod shared;
mod stats;
mod timers;
mod touches;

pub use config::Config;
pub use copies::Copies;
pub use error::NodeError;
pub use happening::Happening;
#[doc(hidden)]
pub use pages::Sabotage;
pub use stats::{Faults, Found, Phases, Stats};
pub use touches::Touch;

use shard::Shard;
use shared::Shared;
use std::{
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::Duration,
};
use vnuma_coherence::NodeId;
use vnuma_dsm_pager::Region;
use vnuma_dsm_transport::Lanes;

/// A node that runs.
#[derive(Debug)]
pub struct Node {
    region: Arc<Region>,
    shared: Arc<Shared>,
    copies: Arc<Copies>,
    threads: Mutex<Vec<JoinHandle<Stats>>>,
}

/// How long the nodes may take to begin a cut, and to give the pages on.
const CUT: Duration = Duration::from_secs(30);

impl Node {
    /// Starts the threads. `lanes` are those of [`vnuma_dsm_transport::mesh`] with [`Config::hello`]: one for each shard
    /// and peer. `tell` is called from the threads of the node, must not wait, and must not touch the region.
    pub fn start(
        config: &Config,
        region: Arc<Region>,
        lanes: Lanes,
        tell: impl Fn(&Happening) + Send + Sync + 'static,
    ) -> Result<Self, NodeError> {
        let expect = |field, value: u64, expected: u64| match value == expected {
            true => Ok(()),
            false => Err(NodeError::Config { field, value, expected }),
        };
        expect("shards with lanes", lanes.len() as u64, region.shards() as u64)?;
        expect("managed pages", config.managers.pages(), region.pages())?;
        for peers in &lanes {
            expect("peers of a shard", peers.len() as u64, (config.members.len() as u64).saturating_sub(1))?;
        }
        let shared = Arc::new(Shared::new(region.shards(), config.members, Box::new(tell))?);
        let copies = Arc::new(Copies::new(NodeId(config.node), config.members, config.managers.clone()));
        let node = Self { region, shared, copies, threads: Mutex::default() };
        for (index, peers) in lanes.into_iter().enumerate() {
            let (shared, copies) = (Arc::clone(&node.shared), Arc::clone(&node.copies));
            let shard = Shard::new(config, index, Arc::clone(&node.region), peers, shared, copies)?;
            let builder = std::thread::Builder::new().name(format!("dsm-node-{index}"));
            let thread = builder.spawn(move || shard.run());
            let thread = thread.map_err(|source| NodeError::System { call: "clone", source })?;
            node.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        Ok(node)
    }

    /// The memory.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Suspects a node, as a connection that ends does.
    pub fn suspect(&self, node: u8) {
        self.shared.suspect(node);
    }

    /// Makes second copies of all pages as they are now, for [`Copies::restore`]. To be called by one thread of each member while
    /// no thread of any node uses the memory, as at a barrier; threads may go on when it returns. Returns the number of the cut.
    ///
    /// It fails if a member is lost before its end, or not all have called it after 30 s. The cut before is kept then, and the next one
    /// has what this one would have had.
    pub fn cut(&self) -> Result<u64, NodeError> {
        let number = self.copies.want(self.region.shards());
        self.shared.wake();
        self.copies.wait(number, CUT)?;
        Ok(number)
    }

    /// The second copies that this node keeps.
    pub fn copies(&self) -> Arc<Copies> {
        Arc::clone(&self.copies)
    }

    /// Messages of the protocol that were sent until now, and their bytes.
    pub fn sent(&self) -> [u64; 2] {
        self.shared.sent()
    }

    /// [`Self::stop`] does not count what was done until now, such as a program's preparations. Once only.
    pub fn begin(&self) {
        self.shared.forget();
    }

    /// What has happened until now.
    pub fn happenings(&self) -> Vec<Happening> {
        self.shared.told()
    }

    /// Leaves, and returns what was done. No thread may use the memory any more, and no other node may need what only this
    /// one has.
    pub fn stop(self) -> Stats {
        self.leave()
    }

    /// As [`Self::stop`], of a node that others still hold. Only the first call returns what it has done.
    pub fn leave(&self) -> Stats {
        self.shared.leave();
        self.copies.over("this node has left");
        let mut stats = Stats::default();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A thread that panicked has said why.
            if let Ok(part) = thread.join() {
                stats.merge(&part);
            }
        }
        stats
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.leave();
    }
}
