//! Host topology from a sysfs and procfs tree.

use std::path::{Path, PathBuf};
use vnuma_topology::HostTopology;

/// Why a tree is no host topology.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is longer than anything the kernel writes there.
    #[error("{}: longer than {limit} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Bytes accepted.
        limit: usize,
    },
    /// A directory has more entries of a kind than a host can have.
    #[error("{}: more than {limit} {what}", path.display())]
    TooMany {
        /// The directory.
        path: PathBuf,
        /// What is counted.
        what: &'static str,
        /// Entries accepted.
        limit: usize,
    },
    /// A value makes no sense.
    #[error("{}: `{value}` is no {what}: {reason}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// What was found, shortened.
        value: String,
        /// What was expected.
        what: &'static str,
        /// Why it is not that.
        reason: String,
    },
    /// Not available in this build.
    #[error("reading the host topology is not supported yet")]
    Unsupported,
}

/// Reads the topology of the host whose `/sys` and `/proc` are below `root`.
pub fn read_host_topology(root: &Path) -> Result<HostTopology, SysfsError> {
    let _ = root;
    Err(SysfsError::Unsupported)
}
