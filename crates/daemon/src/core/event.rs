//! What the core is told, and what it wants done. Plain data on both sides.

use super::refusal::Refusal;
use vnuma_api as api;
use vnuma_hypervisor::{Plugged, VmError};
use vnuma_placement::{
    Publication,
    world::{ConnectionId, DriverStatus, RequestId, StopReason, VmId},
};
use vnuma_process::ActError;
use vnuma_topology::{ApicId, CpuSet, HostNodeId, HostTopology, Vcpu, VcpuLocation, VmDescription};

/// What a VM backend lists: a VM, or something that may turn out to be one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The backend's name for it. Opaque.
    pub handle: String,
    /// What it is called until it says its name.
    pub name: String,
    /// Differs when another VM may be behind the handle.
    pub instance: u64,
}

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// The backends listed what there is, or could not.
    Scanned(Result<Vec<Candidate>, String>),
    /// Over a connection to a hypervisor.
    Hypervisor(ConnectionId, Report),
    /// A thread that is watched is somewhere else, or was looked at. `None`: it could not be looked at.
    Located(i32, Option<VcpuLocation>),
    /// A thread that is watched has ended.
    ThreadEnded(i32),
    /// A guest has acknowledged a generation.
    Acknowledged(VmId, u64),
    /// What a guest's driver reports of itself. It may be what it reported before.
    Driver(VmId, DriverStatus),
    /// A publication went out, and the next one has this generation; or it did not.
    Published(VmId, Result<u64, Refusal>),
    /// A move was made, and where the vCPU was then; or it was not made.
    Moved(VmId, ApicId, HostNodeId, Result<Option<VcpuLocation>, ActError>),
    /// A process that is watched runs, or stands still.
    ProcessState(VmId, i32, Option<StopReason>),
    /// A process that is watched is at work or stuck: only a question tells which.
    MainLoopBusy(VmId, i32),
    /// A process that is watched has ended.
    ProcessEnded(VmId, i32),
    /// The host has other CPUs, nodes or distances.
    HostChanged(HostTopology),
    /// An operator wants something.
    Requested(RequestId, Request),
    /// It is time to look at everything again, in case something was missed.
    Resync,
    /// Time has passed.
    Woken,
}

/// What a connection reports.
#[derive(Debug)]
pub enum Report {
    /// The hypervisor has greeted and described the VM. Its channel's device is plugged or not.
    Up(VmDescription, bool),
    /// A probe is not answered yet, and what the probe was; the process.
    Slow(String, i32),
    /// It was answered after all.
    Prompt,
    /// Nothing is answered, and what was asked; the process.
    Silent(String, i32),
    /// vCPUs that were seen without the hypervisor's help: the process, the vCPUs, and whether their APIC ids are certain.
    Observed(i32, Vec<Vcpu>, bool),
    /// There is no connection, or no more. Nothing follows.
    Lost(VmError),
    /// The VM's process has ended. Nothing follows.
    Ended,
    /// The VM was described again.
    Described(VmDescription),
    /// The channel was plugged, and its first generation; or it was not.
    Attached(Result<u64, Refusal>),
    /// The channel was unplugged, or was not.
    Detached(Result<(), VmError>),
    /// A vCPU was replugged, or was not.
    Replugged(Result<Replugged, VmError>),
    /// The channel of an earlier vnumad was taken over, and its next generation; or it was not.
    Recovered(Result<u64, Refusal>),
    /// The guest let go of the channel's device.
    Released,
    /// The guest boots again.
    Rebooted,
}

/// A vCPU that was replugged.
#[derive(Clone, Debug)]
pub struct Replugged {
    /// The new vCPU.
    pub plugged: Plugged,
    /// What the VM consists of now.
    pub description: VmDescription,
    /// Where the new vCPU is.
    pub location: Option<VcpuLocation>,
}

/// What an operator wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// A topology channel for a VM.
    Attach(String),
    /// No topology channel for a VM any more.
    Detach(String),
    /// A vCPU on a host node.
    Move(String, ApicId, HostNodeId),
    /// A vCPU plugged anew where it runs.
    Replug(String, ApicId),
}

/// What a request came to.
#[derive(Debug)]
pub enum Answer {
    /// The VM as it is now.
    Vm(Box<api::Vm>),
    /// A vCPU that was replugged.
    Replugged(Box<api::Replugged>),
}

/// What is asked of a hypervisor. [`Report`]s answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Describe the VM again.
    Describe,
    /// See whether it still answers.
    Probe,
    /// Plug a channel whose generations have this epoch.
    Attach(u32),
    /// Unplug the channel.
    Detach,
    /// Move a vCPU to a spare slot of a guest node.
    Replug(ApicId, u32),
    /// Take over the channel of an earlier vnumad, for generations of this epoch.
    Recover(u32),
}

/// How urgent a line of the log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// For whoever looks for a fault.
    Debug,
    /// What happened.
    Info,
    /// What an operator should look at.
    Warn,
}

/// Something to do. None of it waits for anything.
#[derive(Debug)]
pub enum Command {
    /// Connect to what is behind a handle, which is this VM or may turn out to be.
    Connect(VmId, ConnectionId, String),
    /// Close a connection. Nothing is expected of it any more.
    Disconnect(ConnectionId),
    /// Ask a hypervisor.
    Ask(ConnectionId, Ask),
    /// Publish to a guest; [`Event::Published`] answers.
    Publish(VmId, u64, Publication),
    /// The host's end of a VM's channel is not used any more.
    CloseChannel(VmId),
    /// The process of this number has ended, and its channel with it.
    ForgetRecord(i32),
    /// Watch a thread of a process, and say where it is.
    Watch(i32, i32),
    /// Watch a thread no longer.
    Unwatch(i32),
    /// Say where all these threads are, in case something was missed: (process, thread).
    Look(Vec<(i32, i32)>),
    /// Confine a thread to CPUs of a node; [`Event::Moved`] answers.
    Move {
        /// The VM.
        vm: VmId,
        /// Its process.
        pid: i32,
        /// The vCPU.
        vcpu: ApicId,
        /// Its thread.
        tid: i32,
        /// The node.
        node: HostNodeId,
        /// Its CPUs.
        cpus: CpuSet,
    },
    /// Watch whether a VM's process runs. Any other one of this VM is watched no longer.
    WatchProcess(VmId, i32),
    /// Watch this process of a VM no longer.
    UnwatchProcess(VmId, i32),
    /// Answer a request.
    Reply(RequestId, Result<Answer, Refusal>),
    /// Give an event to those who watch events.
    Announce(api::Event),
    /// Write a line of the log.
    Log(Level, String),
}
