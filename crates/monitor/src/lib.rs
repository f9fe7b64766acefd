//! Observe: the host's topology, the VMs on it, and where their vCPUs run.
//!
//! Everything read here comes from elsewhere (sysfs, /proc, a QEMU that may lie), so
//! every length, count and time is bounded and every error names its source.

pub mod location;
pub mod sysfs;
mod text;
pub mod vm;

pub use sysfs::{SysfsError, read_host_topology};
