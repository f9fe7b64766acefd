//! What a worker reports, with the resources that the shell keeps for the core.

use crate::core::{
    Refusal,
    event::{Outcome, Report as CoreReport},
};
use std::os::fd::OwnedFd;
use vnuma_channel::Channel;
use vnuma_hypervisor::ObservedVcpus;
use vnuma_model::VmDescription;
use vnuma_policy::world::TaskId;

/// What a worker reports.
#[derive(Debug)]
pub(crate) enum Report {
    /// The hypervisor has greeted and described the VM.
    Up { description: VmDescription, pidfd: OwnedFd, channel: bool },
    /// It has not answered a probe in time.
    Slow { problem: String, pid: i32, pidfd: OwnedFd },
    /// It does not answer. Carries what was observed without it, so that both are shown at the same time.
    Silent { problem: String, pid: i32, pidfd: OwnedFd, observed: Option<ObservedVcpus> },
    /// What is observed without the hypervisor.
    Observed { pid: i32, pidfd: OwnedFd, observed: ObservedVcpus },
    /// The host's end of a channel that was plugged or taken over, or why there is none; and which outcome of the task that is.
    Channel(TaskId, Result<Channel, Refusal>, fn(Result<u64, Refusal>) -> Outcome),
    /// A report that the core gets as it is.
    Plain(CoreReport),
}
