//! Observe: the host's topology, now and as it changes, and where threads run.
//!
//! | module | reads | gives |
//! |---|---|---|
//! | [`sysfs`] | `/sys`, `/proc` below a root | [`HostTopology`](vnuma_model::HostTopology), once |
//! | [`devices`] | `/proc/PID/fd` below a root | devices that a process has |
//! | [`watch`] | the kernel's messages about devices, then the same | each one that is another one |
//! | [`location`] | BPF events or `/proc` | changes of a thread's node and limits, as they happen |
//! | [`tasks`] | a BPF program | times, CPUs and masks of many threads, and how long CPUs were idle, at once |
//! | [`page_moves`] | BPF programs | how long the kernel held pages that a thread moves |
//! | [`scheduler`] | `/sys/kernel/sched_ext`, pinned maps | whether scx_vnuma is loaded, and its maps to write to |
//!
//! It decides and changes nothing: what the observations mean is
//! `vnuma-policy`'s, moving a thread is `vnuma-process`'s.
//!
//! Everything read here comes from elsewhere (sysfs, /proc, netlink), so every length, count and time is bounded and
//! every error names its source. What takes text apart is plain functions over `&str` or `&[u8]`, open to fuzzing:
//! [`sysfs::parse`], [`location::parse_record`], [`parse_uevent`].

mod bpf;
pub mod devices;
pub mod location;
pub mod page_moves;
pub mod scheduler;
pub mod sysfs;
pub mod tasks;
pub mod watch;

pub use sysfs::{
    CpuControl, SysfsError, may_be_threaded, read_cpu_control, read_cpu_layout, read_host_topology,
    read_idle_times, read_node_memory, read_node_pools, read_pci_functions,
};
pub use watch::{HostWatcher, parse_uevent};
