//! VMs behind one trait: which there are, what they consist of, and their topology channel.
//!
//! [`QmpBackend`] speaks QMP with a QEMU that it does not trust:
//!
//! - **Who** is at the other end is what the kernel says of the socket (`SO_PEERPIDFD`, or
//!   `SO_PEERCRED` and a pidfd). A thread that QEMU names is looked up in that process's
//!   `/proc/PID/task` and refused if it is not there ([`VmError::ForeignThread`]).
//! - **How long** it takes and **how much** it says is bounded: a second for a command, five for
//!   all commands of one call, 4 MiB for a line, 4096 vCPUs, one event of each kind. A QEMU that talks instead of answering is
//!   read slowly, so that it waits itself.
//! - **What** it says is checked before it is used: names, numbers, ids that occur twice.
//!
//! A command that was not answered in time leaves the connection usable: answers carry the number of their command, so a late one
//! is recognised. After nonsense or a broken line the connection is closed.
//!
//! A monitor serves one client at a time, so a socket that libvirt or an operator uses gives [`VmError::NoGreeting`], as does a
//! QEMU that is stopped ([`vnuma_model::StopReason`]). The connection then waits in the listener's queue, and is greeted when its
//! turn comes. Until then the kernel shows which threads are the VM's vCPUs ([`ObservedVcpus`]).
//!
//! [`LibvirtBackend`] has the domains of libvirt. It reads what libvirt's interface does not tell (the process, the threads of vCPUs,
//! where memory is) from libvirt's own files and from the kernel. [`JoinedBackend`] makes one backend of several, and
//! [`UnusableBackend`] stands for one that cannot be had on this host.
//!
//! Where it ends: a QEMU that was handed its listening socket by another process has that process's credentials, and its vCPUs are
//! refused as foreign. Whether two VMs claim the same name is the caller's to find out.

mod channel;
mod check;
mod client;
mod commands;
mod describe;
pub mod devices;
mod directories;
mod error;
mod hotplug;
mod joined;
pub mod libvirt;
mod memory_devices;
pub mod message;
mod migration;
mod name;
pub mod numa;
pub mod observed;
mod process;
mod qmp;
pub mod resident;
mod unusable;
mod vcpus;
mod wire;

pub use describe::state_word;
pub use error::VmError;
pub use hotplug::roll_back;
pub use joined::JoinedBackend;
pub use libvirt::{LibvirtBackend, MakeSpare};
pub use migration::GO_ON;
pub use name::check_name;
pub use observed::ObservedVcpus;
pub use qmp::QmpBackend;
pub use unusable::UnusableBackend;
pub use vnuma_channel::Plug;

use std::{collections::BTreeMap, os::fd::BorrowedFd, time::Duration};
use vnuma_model::{CpuSet, MigrationProgress, VmCandidate, VmDescription, VmHandle};
use vnuma_process::{Groups, Ledger};

/// A source of VMs: QMP sockets, libvirt; in memory for tests.
pub trait VmBackend: Send {
    /// VMs that are there now. Cheap (names only), for a call after every change. What is no VM is skipped with a log
    /// line; an error says that it is not known which there are.
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError>;
    /// Readable when another [`scan`](Self::scan) may find something else, until
    /// [`clear_changes`](Self::clear_changes). The descriptor is the same from the first scan on. Not every change is
    /// seen (a directory that is not there yet makes none), so scan now and then all the same. `None` before the first
    /// scan, and where changes cannot be seen at all, which has been logged.
    fn changes(&self) -> Option<BorrowedFd<'_>>;
    /// Makes [`changes`](Self::changes) wait for the next change. Call it before a scan.
    fn clear_changes(&mut self);
    /// Leaves out VMs that are among these of another backend, from the next scan on.
    fn hide(&mut self, _others: &[VmCandidate]) {}
    /// What it asks for VMs, other than files of this host, and how that went with the last scan.
    fn sources(&self) -> Vec<Source> {
        Vec::new()
    }
    /// Threads of its own. Who uses the backend looks at them.
    fn workers(&self) -> Vec<Groups> {
        Vec::new()
    }
    /// Budgets of users for what they have it do. Who uses the backend shows them.
    fn ledgers(&self) -> Vec<Ledger> {
        Vec::new()
    }
    /// Connects to a VM without waiting for anything. Its process is pinned down by a pidfd before
    /// anything is asked. Another backend's handle is refused.
    fn connect(&self, handle: &VmHandle) -> Result<Box<dyn VmConnection>, VmError>;
}

/// What a backend asks for VMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// A URI.
    pub name: String,
    /// Why it has not answered.
    pub problem: Option<String>,
}

/// Something that happened to a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmEvent {
    /// The VM shuts down; its process ends soon.
    Shutdown,
    /// vCPUs are stopped (paused, or the end of a migration).
    Stopped,
    /// vCPUs run again.
    Resumed,
    /// The machine was reset: the guest boots again.
    Rebooted,
    /// vCPUs were plugged or unplugged: describe the VM again.
    VcpusChanged,
    /// A guest has plugged or unplugged memory of a virtio-mem device: describe the VM again.
    MemoryChanged,
    /// The topology channel's device was plugged, by vnumad or by others.
    ChannelAttached,
    /// The guest has let go of the topology channel's device.
    ChannelDetached,
    /// The VM is at another host; its process here ends, or stands still.
    Left,
    /// The other end closed the connection. Nothing follows.
    Disconnected,
}

/// A vCPU that is plugged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plugged {
    /// Its APIC id.
    pub apic_id: u32,
    /// Its thread.
    pub tid: i32,
}

/// A pin of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyPin {
    /// The vCPU's thread.
    pub tid: i32,
    /// The affinity that it has. If it has another one, somebody else has set that, and it stays.
    pub expected: CpuSet,
    /// Where it may run when no policy confines it.
    pub operator: CpuSet,
    /// The policy's CPUs. `None`: no policy confines it any more.
    pub cpus: Option<CpuSet>,
}

/// Why a vCPU is not pinned as a policy wants.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// Others have set this affinity.
    #[error("its affinity is {0} now: somebody else has set it")]
    Changed(CpuSet),
    /// The VM's hypervisor refuses, or does not answer.
    #[error(transparent)]
    Vm(#[from] VmError),
}

/// A connection to a VM. Calls block, most for a second at most, those of many commands for five.
pub trait VmConnection: Send {
    /// Waits until the VM accepts commands; before anything else. After [`VmError::NoGreeting`] and
    /// [`VmError::Timeout`] it can be called again.
    fn greet(&mut self) -> Result<(), VmError>;
    /// What can be seen of the VM's vCPUs without asking the VM. `None` if there are none, or if the process is
    /// not beyond doubt the VM's.
    fn observe_vcpus(&self) -> Option<ObservedVcpus>;
    /// Asks for everything that is in a [`VmDescription`]. Thread ids are checked to belong to the VM's own process.
    fn describe(&mut self) -> Result<VmDescription, VmError>;
    /// Plugs the topology channel's device into a free PCIe root port. On failure everything done so far is undone.
    fn attach_channel(&mut self, plug: Plug) -> Result<(), VmError>;
    /// Asks for next to nothing, to see whether there is an answer in time.
    fn probe(&mut self, limit: Duration) -> Result<(), VmError>;
    /// Is the device plugged?
    fn channel_attached(&mut self) -> Result<bool, VmError>;
    /// Is the device plugged? If not, removes what is left of an attach that was cut short.
    fn tidy_channel(&mut self) -> Result<bool, VmError>;
    /// May the device have no host's end, as it came along from another host or was there when the process was started? If it is not
    /// served then, it is unplugged and plugged anew.
    fn gets_channel_anew(&self) -> bool {
        false
    }
    /// Unplugs the device. The guest takes part in that: [`VmError::DetachPending`] says
    /// that it has not let go in time; [`VmEvent::ChannelDetached`] follows when it does.
    fn detach_channel(&mut self) -> Result<(), VmError>;
    /// The vCPU with this APIC id, if it can be unplugged: there is one, and the guest did not boot on it.
    fn removable_vcpu(&mut self, apic_id: u32) -> Result<Plugged, VmError>;
    /// Plugs a vCPU into a spare slot of a guest node. The guest takes it a while later ([`await_guest`](Self::await_guest));
    /// confine its thread before that. On failure nothing is plugged, unless it is [`VmError::NotUndone`].
    fn plug_vcpu(&mut self, node: u32) -> Result<Plugged, VmError>;
    /// Waits until the guest has taken a vCPU that was plugged over this connection, up to ten seconds.
    fn await_guest(&mut self, apic_id: u32) -> Result<(), VmError>;
    /// Asks the guest to let go of a vCPU and waits until it has, up to ten seconds. After
    /// [`VmError::UnplugPending`] it may still do so.
    fn unplug_vcpu(&mut self, apic_id: u32) -> Result<(), VmError>;
    /// How it migrates, where [`Abilities::migrates`](vnuma_model::Abilities::migrates) says that it can.
    fn migrates(&mut self) -> Option<&mut dyn Migrates> {
        None
    }
    /// How the VM's manager pins vCPUs, where [`Abilities::pins`](vnuma_model::Abilities::pins) says that pins are kept.
    fn pins(&mut self) -> Option<&mut dyn Pins> {
        None
    }
    /// How it sizes the memory devices that it describes.
    fn sizes(&mut self) -> Option<&mut dyn Sizes> {
        None
    }
    /// Waits for the next event. `None` after `timeout`.
    fn poll_event(&mut self, timeout: Duration) -> Result<Option<VmEvent>, VmError>;
    /// How much was received since the last call that is no event, and answers nothing that was asked.
    fn overheard(&mut self) -> u32 {
        0
    }
    /// What is wrong with the VM, as was found since the last call, for people.
    fn complaints(&mut self) -> Vec<String> {
        Vec::new()
    }
    /// The VM's process.
    fn pid(&self) -> i32;
    /// The VM's process, immune to the reuse of its number.
    fn pidfd(&self) -> BorrowedFd<'_>;
    /// The connection's socket: readable when [`poll_event`](Self::poll_event) may have something. Take events until there is none
    /// before waiting for it: some may have been received with the answer to a command.
    fn event_fd(&self) -> BorrowedFd<'_>;
}

/// A VM that can migrate to another host.
pub trait Migrates {
    /// Is it marked to be attached as soon as its guest runs?
    fn is_marked(&mut self) -> Result<bool, VmError>;
    /// Marks it to be attached as soon as its guest runs, or takes the mark away. The mark outlasts the process that sets it, and ends with the
    /// VM at the latest. A VM that waits for a migration is made ready for post-copy as well, if its host can do that.
    fn mark(&mut self, marked: bool) -> Result<(), VmError>;
    /// Begins to migrate it. After [`VmError::Timeout`] it may have begun, which [`progress`](Self::progress) shows.
    fn migrate(&mut self, destination: &str, post_copy: bool) -> Result<(), VmError>;
    /// How far its last migration is.
    fn progress(&mut self) -> Result<MigrationProgress, VmError>;
    /// Has the migration given up, which takes a while.
    fn cancel(&mut self) -> Result<(), VmError>;
    /// Has the guest go on at the destination before its memory is there.
    fn start_post_copy(&mut self) -> Result<(), VmError>;
    /// Was a migration begun here, has it not failed, and will [`Self::has_left`] say whether the VM has left?
    fn is_leaving(&self) -> bool {
        false
    }
    /// Did the VM's process end because the VM is at another host? Asked once the process has ended; waits a moment for the answer.
    fn has_left(&mut self) -> bool {
        false
    }
}

/// A VM's manager keeps pins of its own: vCPUs are moved by asking for that.
pub trait Pins {
    /// Confines a vCPU, by its thread, to those of these CPUs that the operator allows.
    fn pin(&mut self, tid: i32, cpus: &CpuSet) -> Result<(), VmError>;
    /// Confines vCPUs as policies decide, or gives them back what they had before, with one outcome for each. That they are a policy's
    /// outlasts the process that sets them.
    fn confine(&mut self, pins: &[PolicyPin]) -> Vec<Result<(), PinError>>;
    /// Gives vCPUs back what they had before policies have confined them over this or an earlier connection. Returns how many. `keep`:
    /// pins that stay, by the vCPU's thread.
    fn give_back(&mut self, keep: &BTreeMap<i32, Vec<CpuSet>>) -> Result<usize, VmError>;
}

/// A VM whose memory devices can be sized.
pub trait Sizes {
    /// Has a device, by its id, offer its guest so much memory. The guest takes it, or gives memory back, a while later or
    /// not at all: [`VmEvent::MemoryChanged`] and the description show what it does.
    fn request(&mut self, id: &str, bytes: u64) -> Result<(), VmError>;
}
