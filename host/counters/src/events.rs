//! Events that are counted, by how much they say of memory.
//!
//! | source | accesses to memory | where |
//! |---|---|---|
//! | [`Source::PerNode`] | counted for each node | a PMU "cpu" with events `dram-nodeN` (the lab's) |
//! | [`Source::LocalRemote`] | local and remote ones | Intel servers since Haswell, AMD since Zen 2, as published: *not run here* |
//! | [`Source::Generic`] | the kernel's `node-loads` and `node-load-misses` | where the kernel has such events for its CPU |
//! | [`Source::PageLocation`] | none; where the VM's pages lie stands in for it | any PMU with LLC references and misses |
//! | [`Source::None`] | nothing is counted | no PMU, or no permission |

use crate::period::Meaning;
use perf_event::{
    Builder,
    events::{Cache, CacheId, CacheOp, CacheResult, Hardware, Raw},
};

/// How much the counters say of memory, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::Display, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Source {
    /// Accesses by node.
    PerNode,
    /// Local and remote accesses, by events of this CPU.
    LocalRemote,
    /// Local and remote accesses, by the kernel's generic events.
    Generic,
    /// LLC references and misses only.
    PageLocation,
    /// Nothing.
    None,
}

impl Source {
    /// For operators.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// An event as `perf_event_open(2)` takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// A generic one of the kernel.
    Instructions,
    /// A generic one of the kernel: `cache-references`.
    References,
    /// A generic one of the kernel: `cache-misses`.
    Misses,
    /// A generic one of the kernel: loads from memory.
    NodeLoads,
    /// A generic one of the kernel: loads from memory of another node.
    NodeLoadMisses,
    /// One of this PMU.
    Raw(u64),
}

impl Code {
    pub(crate) fn builder(self) -> Builder<'static> {
        let node = |result| Cache { which: CacheId::NODE, operation: CacheOp::READ, result };
        match self {
            Self::Instructions => Builder::new(Hardware::INSTRUCTIONS),
            Self::References => Builder::new(Hardware::CACHE_REFERENCES),
            Self::Misses => Builder::new(Hardware::CACHE_MISSES),
            Self::NodeLoads => Builder::new(node(CacheResult::ACCESS)),
            Self::NodeLoadMisses => Builder::new(node(CacheResult::MISS)),
            Self::Raw(config) => Builder::new(Raw::new(config)),
        }
    }
}

/// What is counted for each thread, as one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Events {
    /// How much it says of memory.
    pub source: Source,
    pub(crate) list: Vec<(Code, Meaning)>,
}

impl Events {
    pub(crate) fn new(source: Source, accesses: Vec<(Code, Meaning)>) -> Self {
        let mut list = vec![
            (Code::Instructions, Meaning::Instructions),
            (Code::References, Meaning::References),
            (Code::Misses, Meaning::Misses),
        ];
        list.extend(accesses);
        Self { source, list }
    }

    /// Descriptors that the counters of a thread need.
    pub fn descriptors(&self) -> usize {
        self.list.len()
    }
}
