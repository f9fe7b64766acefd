//! What programs on the lab server need to play a scenario: VMs, a running vnumad, vnumactl, and the host's nodes as the
//! kernel lists them. It shares no code with vnumad, because it judges it.

#![forbid(unsafe_code)]

mod nodes;
mod process;
mod vm;

pub use nodes::Nodes;
pub use process::{Process, output, vnumactl, vnumad, wait_for};
pub use vm::{Vm, vcpu_threads};
