//! Host topology from a sysfs and procfs tree.
//!
//! The tree is `/` on a live host, or a copy of another server's files. What the kernel leaves out on some machines (no NUMA, no
//! cache information, no huge pages, no PCI) is taken as absent; where old or odd kernels have another file for it, that one is
//! read (`cargo xtask servers` reads hwloc's recorded servers and compares). What is there and makes no sense is an error that
//! names the file and the value. Reading is bounded in every direction: length of a file, number of entries, nodes and CPUs;
//! anything but a regular file is refused, so that a FIFO in a copied tree does not block the reader.

mod caches;
mod cpus;
mod groups;
mod interfaces;
mod nodes;
pub mod parse;
mod pci;
pub mod pci_ids;
mod tree;

pub use cpus::{read_cpu_layout, read_idle_times};
pub use groups::{CpuControl, may_be_threaded, read_cpu_control};
pub use interfaces::{Interface, nics_behind, read_interfaces};
use std::path::{Path, PathBuf};
use tree::Tree;
use vnuma_model::{HostNode, HostNodeId, HostTopology, HugePages, PciFunction};
use vnuma_process::text::{sanitize_reason, sanitize_short};

/// Why a tree is no host topology.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file that has to be there for the others to make sense.
    #[error("{}: missing", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// Not a regular file.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// What is not a file.
        path: PathBuf,
    },
    /// A file is longer than anything the kernel writes there.
    #[error("{}: longer than {limit} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Bytes accepted.
        limit: usize,
    },
    /// A directory has more entries than a host can have.
    #[error("{}: more than {limit} entries", path.display())]
    TooMany {
        /// The directory.
        path: PathBuf,
        /// Entries accepted.
        limit: usize,
    },
    /// A value makes no sense.
    #[error("{}: `{value}`: {reason}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// What was found, sanitized.
        value: String,
        /// Why it cannot be.
        reason: String,
    },
}

impl SysfsError {
    fn value(path: &Path, value: &str, reason: impl ToString) -> Self {
        Self::Value {
            path: path.to_owned(),
            value: sanitize_short(value),
            reason: sanitize_reason(&reason.to_string()),
        }
    }
}

/// Reads the topology of the host whose `/sys` and `/proc` are below `root`.
pub fn read_host_topology(root: &Path) -> Result<HostTopology, SysfsError> {
    let tree = Tree::new(root);
    let (nodes, distances) = nodes::read(&tree)?;
    let caches = caches::read(&tree, &nodes)?;
    let pci_devices = pci::read(&tree, &nodes)?;
    Ok(HostTopology { nodes, distances, caches, pci_devices })
}

/// All and free memory of each online node of the host whose `/sys` is below `root`: (node, KiB, KiB).
pub fn read_node_memory(root: &Path) -> Result<Vec<(HostNodeId, u64, u64)>, SysfsError> {
    nodes::read_memory(&Tree::new(root))
}

/// Pools of huge pages of each online node of the host whose `/sys` is below `root`.
pub fn read_node_pools(root: &Path) -> Result<Vec<(HostNodeId, HugePages)>, SysfsError> {
    nodes::read_pools(&Tree::new(root))
}

/// Reads the PCI functions of the host whose `/sys` is below `root`, and of which these are the nodes.
pub fn read_pci_functions(root: &Path, nodes: &[HostNode]) -> Result<Vec<PciFunction>, SysfsError> {
    pci::read_functions(&Tree::new(root), nodes)
}

/// The number of a device of a class, `major:minor`; none if there is no such device.
pub fn read_class_number(root: &Path, class: &str, name: &str) -> Result<Option<String>, SysfsError> {
    let tree = Tree::new(root);
    let text = tree.text(&tree.path(&format!("sys/class/{class}/{name}/dev")))?;
    Ok(text.map(|text| text.trim().to_owned()))
}
