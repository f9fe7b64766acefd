//! What a worker reports, with the resources that the shell keeps for the core.

use crate::core::{Refusal, event::Report as CoreReport};
use std::os::fd::OwnedFd;
use vnuma_channel::Channel;
use vnuma_hypervisor::ObservedVcpus;
use vnuma_model::VmDescription;

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
    /// The channel was plugged, with the host's end; or plugging failed.
    Attached(Result<Channel, Refusal>),
    /// The channel of an earlier vnumad was taken over, with the host's end; or that failed.
    Recovered(Result<Channel, Refusal>),
    /// A report that the core gets as it is.
    Plain(CoreReport),
}
