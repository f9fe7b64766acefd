//! Observe: the host's topology, the VMs on it, and where their vCPUs run.
//!
//! | module | reads | gives |
//! |---|---|---|
//! | [`sysfs`] | `/sys`, `/proc` below a root | [`HostTopology`](vnuma_topology::HostTopology), once |
//! | [`vm`] | QMP sockets, `/proc` | VMs that come and go, their [`VmDescription`](vnuma_topology::VmDescription), the topology channel's device |
//! | [`location`] | BPF events or `/proc` | changes of a thread's node and limits, as they happen |
//!
//! It ends where something is decided or changed: what the observations mean is
//! `vnuma-placement`'s, moving a thread is `vnuma-actuator`'s. The one change made here is
//! that of the VM's own devices, because QMP is spoken here.
//!
//! Everything read here comes from elsewhere (sysfs, /proc, a QEMU that may lie), so every
//! length, count and time is bounded and every error names its source. What takes text apart
//! is plain functions over `&str` or `&[u8]`, open to fuzzing: [`sysfs::parse`],
//! [`location::proc`], [`location::parse_record`], [`vm::message`], [`vm::numa`],
//! [`vm::resident`], [`vm::check_name`].

pub mod location;
pub mod sysfs;

pub use sysfs::{SysfsError, read_host_topology};
