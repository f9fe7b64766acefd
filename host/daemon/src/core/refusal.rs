//! Why a request is refused.

use vnuma_api::{ApiError, ErrorKind};
use vnuma_channel::{ChannelError, ContentError};
use vnuma_hypervisor::VmError;
use vnuma_observe::SysfsError;
use vnuma_policy::{
    policies::UNPLUG_LIMIT_NS,
    rules::{RehomeObstacle, ResizeObstacle},
    world::Vm,
};
use vnuma_process::ActError;

/// Longest message with text from elsewhere, in bytes.
const MESSAGE_LIMIT: usize = 1000;

/// The message with a bounded length and without control characters.
pub fn sanitize(message: &str) -> String {
    vnuma_process::text::sanitize(message, MESSAGE_LIMIT)
}

/// Why a request is refused. The text goes to the operator and says what each one means.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("there is no VM `{0}`; `vnumactl list` shows those that there are")]
    NoVm(String),
    #[error("{vm}: not connected to its hypervisor: {problem}")]
    NotConnected { vm: String, problem: String },
    #[error("{vm}: a UMA VM: it has no guest nodes (no -numa), so there is nothing to publish")]
    Uma { vm: String },
    #[error("{vm}: a UMA VM: it has no guest nodes (no -numa), so no memory of it has a home")]
    NoGuestNodes { vm: String },
    #[error("{vm}: where its memory is cannot be seen: {problem}")]
    Memory { vm: String, problem: String },
    #[error("{vm}: there is no guest node {node}; it has {present:?}")]
    NoGuestNode { vm: String, node: u32, present: Vec<u32> },
    #[error("{vm}: guest node {guest_node} cannot get its home on node {node}: {source}{}", way_out(.source))]
    Rehome { vm: String, guest_node: u32, node: u32, source: RehomeObstacle },
    #[error("{vm}: no guest node gets another home now")]
    NoRehome { vm: String },
    #[error("{vm}: guest node {guest_node} cannot get that size: {source}")]
    Resize { vm: String, guest_node: u32, source: ResizeObstacle },
    #[error("{vm}: no guest node grows or shrinks now")]
    NoResize { vm: String },
    #[error("{vm}: its guest nodes are numbered {ids:?}, not 0 to {last}; the channel takes no others")]
    NodeNumbers { vm: String, ids: Vec<u32>, last: usize },
    #[error("{vm}: {source}")]
    Content { vm: String, source: ContentError },
    #[error("{vm}: the topology channel is attached already")]
    Attached { vm: String },
    #[error(
        "{vm}: a topology channel of an earlier vnumad is attached, and could not be taken over; detach it first"
    )]
    Lost { vm: String },
    #[error(
        "{vm}: its topology channel is none of this vnumad's, and is plugged anew when its guest runs: {why}"
    )]
    CameAlong { vm: String, why: String },
    #[error("{vm}: the topology channel is being attached by another request")]
    Attaching { vm: String },
    #[error("{vm}: the topology channel is being taken over from an earlier vnumad; try again")]
    Recovering { vm: String },
    #[error("{vm}: the topology channel is being detached by another request")]
    Detaching { vm: String },
    #[error("{vm}: no topology channel is attached")]
    NotAttached { vm: String },
    #[error("{vm}: it is migrating to {destination}; `vnumactl migrate {vm} --cancel` ends that")]
    Migrating { vm: String, destination: String },
    #[error("{vm}: its guest is not here yet: its hypervisor waits for a migration")]
    Waits { vm: String },
    #[error("{vm}: vnumad knows of no migration of it")]
    NoMigration { vm: String },
    #[error("{vm}: its migration to {destination} cannot be cancelled any more: {why}")]
    PastCancel { vm: String, destination: String, why: &'static str },
    #[error("{vm}: it cannot migrate to `{destination}`: {why} (docs/migration.md)")]
    Destination { vm: String, destination: String, why: String },
    #[error("{vm}: has no vCPU with APIC id {vcpu}; it has {present:?}")]
    NoVcpu { vm: String, vcpu: u32, present: Vec<u32> },
    #[error("{vm}: the topology channel is attached, so nothing is replugged; detach it first")]
    ChannelInUse { vm: String },
    #[error("{vm}: a vCPU is being replugged by another request")]
    Replugging { vm: String },
    #[error("{vm}: vCPU {vcpu}: location unknown; cannot choose a target node")]
    LocationUnknown { vm: String, vcpu: u32 },
    #[error("{vm}: vCPU {vcpu} is on the right guest node already ({node}); nothing to do")]
    AlreadyCorrect { vm: String, vcpu: u32, node: u32 },
    #[error("the host has no node {node}; it has {present:?}")]
    NoNode { node: u32, present: Vec<u32> },
    #[error("host node {node} has no CPUs")]
    NoCpus { node: u32 },
    #[error(
        "{vm}: its vCPUs are known by the names of their threads only, which do not show APIC ids; they can be moved once its hypervisor answers"
    )]
    Unnumbered { vm: String },
    #[error("{source}; the attach is undone as soon as it answers")]
    Unfinished { source: VmError },
    #[error("{vm}: the VM ended before the request was done")]
    Ended { vm: String },
    #[error("{vm}: vCPU {vcpu} was not moved to node {node}: {source}")]
    Move { vm: String, vcpu: u32, node: u32, source: ActError },
    #[error("{vm}: the CPUs of vCPU {vcpu} could not be set: {source}; this is tried again every period")]
    Confine { vm: String, vcpu: u32, source: ActError },
    #[error("{0}")]
    Vm(#[from] VmError),
    #[error("{vm}: {source}")]
    Channel { vm: String, source: ChannelError },
    #[error("{source}; it is asked again, for {} s at most", UNPLUG_LIMIT_NS / 1_000_000_000)]
    AskedAgain { source: VmError },
    #[error("{vm}: cannot write the record of its channel: {source}")]
    Record { vm: String, source: std::io::Error },
    #[error("{vm}: {source}")]
    System { vm: String, source: std::io::Error },
    #[error("reading the host's topology: {0}")]
    Topology(#[from] SysfsError),
    #[error("{act} needs {who}; the peer is user {uid}. Reading (list, show, hardware, watch) is allowed")]
    Forbidden { act: &'static str, who: String, uid: u32 },
    #[error("user {uid} has {most} watchers, the most that one may have (api.watchers_per_user)")]
    Watchers { uid: u32, most: usize },
    #[error("user {uid} has {has} watchers, and gets no more while other users have so many; try again")]
    WatchersOfAll { uid: u32, has: usize },
    #[error("{who} has {has} requests that wait for vnumad, the most that one may have now; try again")]
    Requests { who: String, has: usize },
    #[error("too many requests wait for vnumad; try again")]
    Overloaded,
    #[error("vnumad is shutting down")]
    ShuttingDown,
}

/// What an operator can do about it.
fn way_out(obstacle: &RehomeObstacle) -> &'static str {
    match obstacle {
        RehomeObstacle::Pinned { .. } => "; widen their affinities, or repeat it with --move-pinned",
        _ => "",
    }
}

impl Refusal {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::NoVm(_)
            | Self::NoVcpu { .. }
            | Self::NoNode { .. }
            | Self::NoMigration { .. }
            | Self::NoGuestNode { .. } => ErrorKind::NotFound,
            Self::Destination { .. } => ErrorKind::BadRequest,
            Self::Forbidden { .. } => ErrorKind::Forbidden,
            Self::Watchers { .. } | Self::WatchersOfAll { .. } | Self::Requests { .. } | Self::Overloaded => {
                ErrorKind::Busy
            }
            Self::Channel { .. }
            | Self::System { .. }
            | Self::Record { .. }
            | Self::Topology(_)
            | Self::ShuttingDown
            | Self::Move { .. }
            | Self::Confine { .. } => ErrorKind::Internal,
            Self::NotConnected { .. }
            | Self::Memory { .. }
            | Self::Unnumbered { .. }
            | Self::Unfinished { .. } => ErrorKind::Vm,
            Self::Vm(error) => match error {
                VmError::NoFreePort { .. }
                | VmError::AlreadyAttached { .. }
                | VmError::NotAttached { .. }
                | VmError::DetachPending { .. }
                | VmError::BootVcpu { .. }
                | VmError::NoSpareSlot { .. }
                | VmError::UnplugPending { .. } => ErrorKind::Conflict,
                VmError::NoVcpu { .. } => ErrorKind::NotFound,
                _ => ErrorKind::Vm,
            },
            _ => ErrorKind::Conflict,
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        Self { error: refusal.kind(), message: refusal.to_string() }
    }
}

/// Why nothing else is done with the channel of a VM that migrates.
pub(super) fn refuse_if_migrating(vm: &Vm) -> Result<(), Refusal> {
    match vm.migration.as_ref().filter(|migration| !migration.phase().is_over()) {
        Some(migration) => {
            let destination = migration.destination.clone();
            Err(Refusal::Migrating { vm: vm.name().to_owned(), destination })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_that_need_another_kind_have_it() {
        let vm = || "a".to_owned();
        for (refusal, kind) in [
            (Refusal::NoVm(vm()), ErrorKind::NotFound),
            (Refusal::Uma { vm: vm() }, ErrorKind::Conflict),
            (Refusal::Vm(VmError::NoFreePort { vm: vm() }), ErrorKind::Conflict),
            (Refusal::Vm(VmError::BootVcpu { vm: vm() }), ErrorKind::Conflict),
            (Refusal::Vm(VmError::Disconnected { vm: vm() }), ErrorKind::Vm),
            (Refusal::Memory { vm: vm(), problem: "no backend".to_owned() }, ErrorKind::Vm),
            (Refusal::Forbidden { act: "attach", who: String::new(), uid: 7 }, ErrorKind::Forbidden),
            (Refusal::Watchers { uid: 7, most: 1 }, ErrorKind::Busy),
            (Refusal::Requests { who: "user 7".to_owned(), has: 1 }, ErrorKind::Busy),
            (Refusal::ShuttingDown, ErrorKind::Internal),
            (Refusal::NoMigration { vm: vm() }, ErrorKind::NotFound),
            (Refusal::Waits { vm: vm() }, ErrorKind::Conflict),
            (
                Refusal::Destination { vm: vm(), destination: "x".to_owned(), why: "no scheme".to_owned() },
                ErrorKind::BadRequest,
            ),
        ] {
            let error = ApiError::from(refusal);
            assert_eq!(error.error, kind, "{}", error.message);
            assert!(!error.message.is_empty());
        }
    }
}
