//! What can go wrong with a VM.

/// The command that begins a migration.
pub(crate) const MIGRATE: &str = "migrate";

/// Why something could not be learned from a VM or done to it.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// The VMs cannot be listed.
    #[error("{directory}: cannot be read: {source}")]
    Directory {
        /// Where they are looked for.
        directory: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The socket cannot be connected to.
    #[error("{socket}: cannot connect: {source}")]
    Connect {
        /// The socket, as text for people.
        socket: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another client uses the socket, or QEMU hangs. The greeting may still come.
    #[error("{socket}: QMP: no greeting within {limit_ms} ms: is another client connected?")]
    NoGreeting {
        /// The socket, as text for people.
        socket: String,
        /// How long it was waited for.
        limit_ms: u64,
    },
    /// A command was not answered in time. The answer may still come.
    #[error("{vm}: QMP: `{command}` was not answered within {limit_ms} ms")]
    Timeout {
        /// The VM.
        vm: String,
        /// The QMP command.
        command: String,
        /// How long it was waited for.
        limit_ms: u64,
    },
    /// What manages the VM has not answered in time. The answer may still come.
    #[error("{vm}: {reason}")]
    NoAnswer {
        /// The VM.
        vm: String,
        /// What was not answered.
        reason: String,
    },
    /// What manages the VM refused, or what it says of the VM makes no sense.
    #[error("{vm}: {reason}")]
    Libvirt {
        /// The VM.
        vm: String,
        /// What is wrong.
        reason: String,
    },
    /// It does not answer, and was therefore not asked.
    #[error("{vm}: QEMU does not answer, so nothing was sent to it: {why}")]
    Silent {
        /// The VM.
        vm: String,
        /// What it has not answered.
        why: String,
    },
    /// The other end has closed the connection.
    #[error("{vm}: the connection is closed")]
    Disconnected {
        /// The VM.
        vm: String,
    },
    /// Reading from or writing to the socket failed.
    #[error("{vm}: `{command}`: {source}")]
    Io {
        /// The VM.
        vm: String,
        /// The QMP command.
        command: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// What came is no QMP, or no answer to what was asked.
    #[error("{vm}: `{command}`: the answer is not usable: {reason}")]
    Protocol {
        /// The VM.
        vm: String,
        /// The QMP command.
        command: String,
        /// What is wrong with it.
        reason: String,
    },
    /// QEMU refused a command.
    #[error("{vm}: QEMU refused `{command}`: {reason}")]
    Refused {
        /// The VM.
        vm: String,
        /// The QMP command.
        command: String,
        /// QEMU's message.
        reason: String,
    },
    /// A value in an answer makes no sense.
    #[error("{vm}: `{command}`: {field} is `{value}`: {reason}")]
    Value {
        /// The VM.
        vm: String,
        /// The QMP command.
        command: String,
        /// Which part of the answer.
        field: String,
        /// What was found, sanitized.
        value: String,
        /// Why it cannot be.
        reason: String,
    },
    /// QEMU named a thread that is not its own: it is not touched.
    #[error("{vm}: thread {tid} given for vCPU {vcpu} does not belong to the VM's process {pid}; refused")]
    ForeignThread {
        /// The VM.
        vm: String,
        /// Its process.
        pid: i32,
        /// QEMU's index of the vCPU.
        vcpu: u32,
        /// The thread it named.
        tid: i64,
    },
    /// A name that cannot be used in paths and output.
    #[error("VM name `{name}` is refused: {reason}")]
    Name {
        /// The name, sanitized.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The process behind the socket could not be opened.
    #[error("{socket}: process {pid} of the other end: {source}")]
    Process {
        /// The socket, as text for people.
        socket: String,
        /// The process, by the socket's credentials.
        pid: i32,
        /// The system's error.
        source: std::io::Error,
    },
    /// Nowhere to plug the channel's device.
    #[error("{vm}: no free PCIe root port; start the VM with `-device pcie-root-port` and leave one empty")]
    NoFreePort {
        /// The VM.
        vm: String,
    },
    /// There is a channel already.
    #[error("{vm}: the topology channel is attached already")]
    AlreadyAttached {
        /// The VM.
        vm: String,
    },
    /// There is no channel.
    #[error("{vm}: no topology channel is attached")]
    NotAttached {
        /// The VM.
        vm: String,
    },
    /// There is no such vCPU (any more).
    #[error("{vm}: has no vCPU with APIC id {vcpu}")]
    NoVcpu {
        /// The VM.
        vm: String,
        /// Its APIC id.
        vcpu: u32,
    },
    /// vCPU 0 cannot be unplugged.
    #[error("{vm}: its first vCPU booted the guest and cannot be replugged")]
    BootVcpu {
        /// The VM.
        vm: String,
    },
    /// Nowhere to plug a vCPU.
    #[error(
        "{vm}: guest node {node} has no spare slot for a vCPU; start the VM with `-smp N,maxcpus=M` and `-numa cpu` for the slots beyond N"
    )]
    NoSpareSlot {
        /// The VM.
        vm: String,
        /// The guest node.
        node: u32,
    },
    /// The guest does not take part in hot-plug.
    #[error("{vm}: the guest did not take a new vCPU within {limit_ms} ms (is it booting or paused?)")]
    PlugIgnored {
        /// The VM.
        vm: String,
        /// How long it was waited for.
        limit_ms: u64,
    },
    /// Something on the host's side failed.
    #[error("{vm}: vCPU {vcpu} was not replugged: {reason}")]
    ReplugFailed {
        /// The VM.
        vm: String,
        /// The vCPU's APIC id.
        vcpu: u32,
        /// What failed.
        reason: String,
    },
    /// It was done, and nothing could be asked after it.
    #[error("{vm}: vCPU {vcpu} was replugged and is vCPU {new} now, but then: {source}")]
    ReplugUndescribed {
        /// The VM.
        vm: String,
        /// APIC id that it had.
        vcpu: u32,
        /// APIC id that it has.
        new: u32,
        /// What went wrong afterwards.
        source: Box<VmError>,
    },
    /// The guest does not give the vCPU back.
    #[error("{vm}: the guest refuses to release vCPU {vcpu} (_OST status {status:#x})")]
    UnplugRefused {
        /// The VM.
        vm: String,
        /// Its APIC id.
        vcpu: u32,
        /// What the guest reported.
        status: i64,
    },
    /// The guest has been asked to let go of a vCPU, and has neither done so nor refused.
    #[error(
        "{vm}: the guest has not released vCPU {vcpu} within {limit_ms} ms: the old vCPU and the new one are both plugged until it does"
    )]
    UnplugPending {
        /// The VM.
        vm: String,
        /// Its APIC id.
        vcpu: u32,
        /// How long it was waited for.
        limit_ms: u64,
    },
    /// A failure that could not be undone.
    #[error("{cause}; and the new vCPU could not be unplugged, so both may be plugged: {error}")]
    NotUndone {
        /// The failure.
        cause: Box<VmError>,
        /// Why it is not undone.
        error: Box<VmError>,
    },
    /// The VM's manager migrates it.
    #[error("{vm}: what manages it cannot migrate it (docs/migration.md)")]
    NotMigrated {
        /// The VM.
        vm: String,
    },
    /// The VM's manager sizes its memory.
    #[error(
        "{vm}: device {id}: vnumad sizes memory by QMP sockets only; have libvirt do it (virsh update-memory-device)"
    )]
    NotResized {
        /// The VM.
        vm: String,
        /// The device.
        id: String,
    },
    /// AppArmor confines the hypervisor's process.
    #[error(
        "{vm}: AppArmor does not let its QEMU connect to {socket} (profile {profile}): {reason}; \
         `vnumactl setup` says what to do, and does it with --apply (docs/libvirt.md)"
    )]
    Confined {
        /// The VM.
        vm: String,
        /// The profile.
        profile: String,
        /// What it may not connect to.
        socket: String,
        /// What the hypervisor said.
        reason: String,
    },
    /// The guest has been asked to release the device and has not done so yet.
    #[error("{vm}: the guest has not released the channel's device within {limit_ms} ms")]
    DetachPending {
        /// The VM.
        vm: String,
        /// How long it was waited for.
        limit_ms: u64,
    },
}

impl VmError {
    /// A failure, after it was tried to undo what had been done.
    pub(crate) fn with_undo(cause: Self, undone: Result<(), Self>) -> Self {
        match undone {
            Ok(()) => cause,
            Err(error) => Self::NotUndone { cause: Box::new(cause), error: Box::new(error) },
        }
    }

    /// The time was up, and the answer may still come.
    pub fn may_be_answered(&self) -> bool {
        matches!(self, Self::NoGreeting { .. } | Self::Timeout { .. } | Self::NoAnswer { .. })
    }

    /// The order to migrate was not sent: what comes before it was not answered. After other errors that
    /// [may be answered](Self::may_be_answered) the migration may have begun.
    pub fn precedes_migration(&self) -> bool {
        let before = |command: &str| command != MIGRATE;
        matches!(self, Self::Silent { .. })
            || matches!(self, Self::Timeout { command, .. } if before(command))
    }

    /// No process listens there: a killed VM left the socket, or the VM has not started yet.
    pub fn nobody_listening(&self) -> bool {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, Self::Connect { source, .. } if matches!(source.kind(), ConnectionRefused | NotFound))
    }

    /// The queue of the listener is full.
    pub fn queue_full(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if source.kind() == std::io::ErrorKind::WouldBlock)
    }
}
