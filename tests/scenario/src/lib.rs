//! What programs on the lab server need to play a scenario: VMs, a running vnumad, vnumactl, and the host's nodes as the
//! kernel lists them. It judges vnumad, and shares only the parser of CPU
//! lists with it.

#![forbid(unsafe_code)]

use std::time::Duration;

/// Only a limit for tests that hang: longer than a guest may take to boot.
pub const HANG_LIMIT: Duration = Duration::from_secs(1000);

mod devices;
mod lines;
mod nodes;
mod place;
mod process;
mod replug;
mod vm;

pub use devices::{HostDevice, PCI_DEVICES, device_of_class, host_devices, pass_through};
pub use lines::Lines;
pub use nodes::{Nodes, home_nodes};
pub use place::{DIRECTORY, vnumactl_command};
pub use process::{Process, output, vnumactl, vnumad, vnumad_logging_to, wait_for};
pub use replug::{bring_online, replug_when_noticed, vcpu_thread};
pub use vm::{Vm, tsc_offset, vcpu_threads};
pub use vnuma_bench_figures::waiting::{Waiting, waiting};
/// A QEMU monitor that vnumad does not use, [`Vm::monitor`].
pub use vnuma_lab_qmp::Qmp as Monitor;
