//! A node of the user-space DSM: the pure protocol of `vnuma-dsm` with page faults, connections and a clock around it.
//!
//! Each shard of the [`Region`] has a thread. The thread owns the shard's userfaultfd, a lane to every peer, and a state
//! machine of the protocol for the shard's pages. Frames of a lane arrive in order, which is the order per peer that the
//! protocol asks for, and shards share nothing but who is suspected. So there are no locks.
//!
//! The threads of a program use [`Region::guest`]. What happens besides is told as [`Happening`].

#![forbid(unsafe_code)]

mod convert;
mod happening;
mod lanes;
mod pages;
mod shard;
mod shared;
mod stats;
mod timers;

pub use happening::Happening;
pub use pages::Sabotage;
pub use stats::{Faults, Phases, Stats};

use shard::Shard;
use shared::Shared;
use std::{io, sync::Arc, thread::JoinHandle, time::Duration};
use vnuma_abi_dsm_wire::Hello;
use vnuma_dsm::{Managers, NodeId, Options};
use vnuma_dsm_pager::{PageError, PagerError, Placement, Region};
use vnuma_dsm_transport::Lanes;

/// What a node is.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its number, from 0.
    pub node: u8,
    /// How many nodes there are, at most 64.
    pub nodes: u8,
    /// Who manages which page: the same on all nodes.
    pub managers: Managers,
    /// Switches of the protocol: the same on all nodes.
    pub options: Options,
    /// How long a thread polls before it sleeps. Polling takes a CPU from the threads of the program.
    pub spin: Duration,
    /// Where the threads run.
    pub placement: Placement,
    /// A mistake on purpose: tests must find it.
    pub sabotage: Sabotage,
}

impl Config {
    /// Pages in equal ranges over the nodes; the default protocol; threads that sleep.
    ///
    /// # Panics
    /// When there are no nodes, more than 64, fewer pages than nodes, or `node` is none of them.
    pub fn new(node: u8, nodes: u8, pages: u64) -> Self {
        assert!(node < nodes && usize::from(nodes) <= NodeId::LIMIT, "node {node} of {nodes}");
        assert!(pages >= u64::from(nodes), "{pages} pages for {nodes} nodes");
        let (each, more) = (pages / u64::from(nodes), pages % u64::from(nodes));
        let range = |node: u8| (each + u64::from(u64::from(node) < more), NodeId(node));
        let ranges: Vec<_> = (0..nodes).map(range).collect();
        let managers = Managers::new(&ranges).expect("ranges with pages, of nodes below 64");
        Self {
            node,
            nodes,
            managers,
            options: Options::default(),
            spin: Duration::ZERO,
            placement: Placement::Float,
            sabotage: Sabotage::None,
        }
    }

    /// What the lanes of this node say first; `cluster` and `incarnation` are to be filled in.
    pub fn hello(&self, region: &Region) -> Hello {
        Hello {
            lanes: u16::try_from(region.shards()).unwrap_or(u16::MAX),
            pages: region.pages(),
            stripe_pages: u32::try_from(region.stripe_pages()).unwrap_or(u32::MAX),
            ..Hello::new(self.node, self.node)
        }
    }
}

/// Why a node cannot start, or go on.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The configuration does not fit.
    #[error("{field}: {value}, and {expected} are needed")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What is needed.
        expected: u64,
    },
    /// A page could not be changed.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The region cannot be served.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// The system refused.
    #[error("{call}: {source}")]
    System {
        /// What was called.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// What came with a page is not what the protocol expects.
    #[error("page {page}: {detail}")]
    Contents {
        /// The page.
        page: u64,
        /// What is wrong.
        detail: &'static str,
    },
}

impl NodeError {
    fn system(call: &'static str) -> impl FnOnce(nix::Error) -> Self {
        move |error| Self::System { call, source: error.into() }
    }
}

/// A node that runs.
#[derive(Debug)]
pub struct Node {
    region: Arc<Region>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Stats>>,
}

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
            expect("peers of a shard", peers.len() as u64, u64::from(config.nodes).saturating_sub(1))?;
        }
        let shared = Arc::new(Shared::new(region.shards(), Box::new(tell))?);
        let mut node = Self { region, shared, threads: Vec::new() };
        for (index, peers) in lanes.into_iter().enumerate() {
            let shard = Shard::new(config, index, Arc::clone(&node.region), peers, Arc::clone(&node.shared))?;
            let builder = std::thread::Builder::new().name(format!("dsm-node-{index}"));
            let thread = builder.spawn(move || shard.run());
            node.threads.push(thread.map_err(|source| NodeError::System { call: "clone", source })?);
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

    /// Messages of the protocol that were sent until now, and their bytes.
    pub fn sent(&self) -> [u64; 2] {
        self.shared.sent()
    }

    /// What was told until now.
    pub fn happenings(&self) -> Vec<Happening> {
        self.shared.told()
    }

    /// Leaves, and tells what was done. No thread may use the memory any more, and no other node may need what only this
    /// one has.
    pub fn stop(mut self) -> Stats {
        self.join()
    }

    fn join(&mut self) -> Stats {
        self.shared.leave();
        let mut stats = Stats::default();
        for thread in self.threads.drain(..) {
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
        self.join();
    }
}
