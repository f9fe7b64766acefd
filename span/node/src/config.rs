//! What a node is.

use crate::pages::Sabotage;
use std::time::Duration;
use vnuma_abi_dsm_wire::Hello;
use vnuma_coherence::{Managers, NodeId, NodeSet, Options};
use vnuma_dsm_pager::{Placement, Region};

/// What a node is, as [`Node::start`](crate::Node::start) takes it.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its number, from 0.
    pub node: u8,
    /// How many numbers there are for nodes, at most 64.
    pub nodes: u8,
    /// Which of them are members: all, unless the DSM was started anew by those that were left.
    pub members: NodeSet,
    /// Who manages which page: the same on all nodes.
    pub managers: Managers,
    /// Switches of the protocol: the same on all nodes, or they refuse each other.
    pub options: Options,
    /// How long a thread polls before it sleeps. Polling takes a CPU from the threads of the program.
    pub spin: Duration,
    /// Where the threads run.
    pub placement: Placement,
    /// Whether [`Stats::touches`](crate::Stats::touches) lists each page that a thread waited for. That costs time and memory for each of them.
    pub list_touches: bool,
    /// How long device code may keep a page that the protocol takes away. The node fails after that.
    pub pin_limit: Duration,
    pub(crate) sabotage: Sabotage,
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
            members: NodeSet::first(nodes.into()),
            managers,
            options: Options::default(),
            spin: Duration::ZERO,
            placement: Placement::Float,
            list_touches: false,
            pin_limit: Duration::from_secs(5),
            sabotage: Sabotage::None,
        }
    }

    /// What the lanes of this node say first; `cluster` and `incarnation` are to be filled in.
    pub fn hello(&self, region: &Region) -> Hello {
        Hello {
            lanes: u16::try_from(region.shards()).unwrap_or(u16::MAX),
            switches: self.options.switches(),
            pages: region.pages(),
            stripe_pages: u32::try_from(region.stripe_pages()).unwrap_or(u32::MAX),
            ..Hello::new(self.node, self.node)
        }
    }

    /// Has the node make a mistake on purpose, which tests must find.
    #[doc(hidden)]
    pub fn sabotage(&mut self, sabotage: Sabotage) {
        self.sabotage = sabotage;
    }
}
