//! What a worker reports, with the resources that the shell keeps for the core.

use crate::core::{Refusal, event::Report as CoreReport};
use std::os::fd::OwnedFd;
use vnuma_channel::Channel;
use vnuma_topology::{Vcpu, VmDescription};

/// What a worker reports.
#[derive(Debug)]
pub(crate) enum Report {
    /// The hypervisor has greeted and described the VM.
    Up { description: VmDescription, pidfd: OwnedFd, channel: bool },
    /// It has not answered a probe yet.
    Slow { problem: String, pid: i32, pidfd: OwnedFd },
    /// It does not answer.
    Silent { problem: String, pid: i32, pidfd: OwnedFd },
    /// What can be seen of it without its help.
    Observed { pid: i32, pidfd: OwnedFd, vcpus: Vec<Vcpu>, certain: bool },
    /// The channel was plugged, and this is the host's end; or it was not.
    Attached(Result<Channel, Refusal>),
    /// The channel of an earlier vnumad was taken over; or it was not.
    Recovered(Result<Channel, Refusal>),
    /// For the core as it is.
    Plain(CoreReport),
}
