//! VMs that exist in this process only, and do what a simulation or a test wants.
//!
//! A [`MemoryBackend`] is a handle to a set of VMs; its clones share it. One of them is scanned, others connect. What a
//! VM does is data ([`MemoryVm`]), changed at any time with [`MemoryBackend::change`]: it describes itself, answers
//! late or not at all, refuses, vanishes, ends, and has events.
//!
//! A VM has a process. Either that is real (its threads can be confined then, and it can be killed), or there is none,
//! and [`MemoryBackend::end`] ends it.

mod connection;

use connection::MemoryConnection;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use vnuma_hypervisor::{ObservedVcpus, Plugged, VmBackend, VmConnection, VmError, VmEvent};
use vnuma_model::{Abilities, Destinations, MigrationProgress, VmCandidate, VmDescription, VmHandle};

/// Handles of this backend begin so; the VM's name follows.
const PREFIX: &str = "memory:";

/// What its VMs can do.
pub const ABILITIES: Abilities = Abilities {
    answered_for: false,
    pins: false,
    migrates: Some(Destinations { schemes: &["tcp:", "unix:", "vsock:"], programs: &[] }),
};

/// What a VM is and does.
#[derive(Debug)]
pub struct MemoryVm {
    /// Its description. A replug changes it.
    pub description: VmDescription,
    /// What the kernel shows of its vCPUs.
    pub observed: Option<ObservedVcpus>,
    /// Its process exists: `description.pid`. If not, the VM is simulated through and through.
    pub real_process: bool,
    /// A scan finds it. If not, it lives on all the same.
    pub listed: bool,
    /// No process listens for connections.
    pub refuses: bool,
    /// It answers nothing: what needs an answer fails at once, as if the time were over.
    pub silent: bool,
    /// Calls do not return as long as this is set.
    pub stuck: bool,
    /// For each call, before it is answered.
    pub delay: Duration,
    /// The next calls that need an answer fail with these, in this order.
    pub errors: VecDeque<VmError>,
    /// The device's end of the topology channel, while it is plugged.
    pub device: Option<OwnedFd>,
    /// A channel that somebody else plugged.
    pub foreign_channel: bool,
    /// There is a place for the channel's device.
    pub free_port: bool,
    /// The guest lets go of the device when it is asked to. If not, it is still plugged, until
    /// [`VmEvent::ChannelDetached`] and `device` say otherwise.
    pub releases_device: bool,
    /// vCPUs to plug, the next one first.
    pub spare: VecDeque<Plugged>,
    /// The guest brings plugged vCPUs online.
    pub takes_vcpus: bool,
    /// What the guest does when it is to let go of a vCPU.
    pub unplug: Unplug,
    /// It falls silent as soon as a vCPU is unplugged.
    pub silent_after_unplug: bool,
    /// Its guest plugs and unplugs memory as it is asked to.
    pub resizes: bool,
    /// It is to be attached as soon as its guest runs.
    pub marked: bool,
    /// Its last migration.
    pub migration: MigrationProgress,
    /// The destination of its migration, and whether it may use post-copy.
    pub migrated_to: Option<(String, bool)>,
    /// A migration is under way of which is told whether it has left: what will be told. `None`: there is none.
    pub leaves: Option<bool>,
    /// How often it was described.
    pub described: usize,
    /// Another VM has another one.
    instance: u64,
    events: VecDeque<VmEvent>,
    event_fd: Arc<EventFd>,
    /// Readable once it has ended, like a pidfd.
    end_fd: Arc<EventFd>,
}

/// What a guest does when it is to let go of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unplug {
    /// It does so.
    #[default]
    Obey,
    /// It refuses once, so that a new vCPU can be taken away again.
    Refuse,
    /// It does nothing.
    Ignore,
}

impl MemoryVm {
    /// A VM that answers, with a free port and an obedient guest. Its process is that of the description.
    pub fn of_process(description: VmDescription) -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let event_fd = || EventFd::from_value_and_flags(0, flags).map(Arc::new);
        Ok(Self {
            description,
            observed: None,
            real_process: true,
            listed: true,
            refuses: false,
            silent: false,
            stuck: false,
            delay: Duration::ZERO,
            errors: VecDeque::new(),
            device: None,
            foreign_channel: false,
            free_port: true,
            releases_device: true,
            spare: VecDeque::new(),
            takes_vcpus: true,
            unplug: Unplug::Obey,
            silent_after_unplug: false,
            resizes: true,
            marked: false,
            migration: MigrationProgress::default(),
            migrated_to: None,
            leaves: None,
            described: 0,
            instance: 0,
            events: VecDeque::new(),
            event_fd: event_fd()?,
            end_fd: event_fd()?,
        })
    }

    /// The same, without a process. What needs one (an affinity, taking over a channel) fails.
    pub fn simulated(description: VmDescription) -> io::Result<Self> {
        Ok(Self { real_process: false, ..Self::of_process(description)? })
    }

    /// Events that were not read yet.
    pub fn pending_events(&self) -> usize {
        self.events.len()
    }
}

#[derive(Debug, Default)]
struct State {
    vms: BTreeMap<String, MemoryVm>,
    blind: bool,
    scans: u64,
    instances: u64,
}

/// A set of VMs.
#[derive(Clone, Debug)]
pub struct MemoryBackend {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Something about a VM is different.
    changed: Condvar,
    /// Another scan would find something else.
    changes: EventFd,
}

impl Shared {
    /// What holds the lock for others, [`MemoryBackend::change`], leaves a VM as it is when it panics.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryBackend {
    /// No VMs.
    pub fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let changes = EventFd::from_value_and_flags(0, flags)?;
        Ok(Self { shared: Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), changes }) })
    }

    /// Adds a VM, and replaces one of its name.
    pub fn add(&self, name: &str, mut vm: MemoryVm) -> VmHandle {
        let mut state = self.shared.lock();
        state.instances += 1;
        vm.instance = state.instances;
        state.vms.insert(name.to_owned(), vm);
        drop(state);
        self.announce();
        VmHandle::new(format!("{PREFIX}{name}"))
    }

    /// Changes or reads a VM. One that is silent no longer makes an event. `None` if there is none.
    pub fn change<T>(&self, name: &str, change: impl FnOnce(&mut MemoryVm) -> T) -> Option<T> {
        let mut state = self.shared.lock();
        let vm = state.vms.get_mut(name)?;
        let (silent, listed) = (vm.silent, vm.listed);
        let result = change(vm);
        if silent && !vm.silent {
            signal(&vm.event_fd);
        }
        let relisted = vm.listed != listed;
        drop(state);
        self.shared.changed.notify_all();
        if relisted {
            self.announce();
        }
        Some(result)
    }

    /// Something happens to a VM.
    pub fn event(&self, name: &str, event: VmEvent) {
        self.change(name, |vm| {
            vm.events.push_back(event);
            signal(&vm.event_fd);
        });
    }

    /// A VM ends: its connections break, and so does its process if that is simulated.
    pub fn end(&self, name: &str) {
        let vm = self.shared.lock().vms.remove(name);
        if let Some(vm) = vm {
            signal(&vm.end_fd);
            signal(&vm.event_fd);
        }
        self.shared.changed.notify_all();
        self.announce();
    }

    /// While it is set, scans fail.
    pub fn set_blind(&self, blind: bool) {
        self.shared.lock().blind = blind;
        self.announce();
    }

    /// How often it was scanned.
    pub fn scans(&self) -> u64 {
        self.shared.lock().scans
    }

    fn announce(&self) {
        signal(&self.shared.changes);
    }
}

/// A counter that is full is as readable as any other.
fn signal(event_fd: &EventFd) {
    let _ = event_fd.write(1);
}

impl VmBackend for MemoryBackend {
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError> {
        let mut state = self.shared.lock();
        state.scans += 1;
        if state.blind {
            let source = io::ErrorKind::PermissionDenied.into();
            return Err(VmError::Directory { directory: "memory".to_owned(), source });
        }
        let candidate = |(name, vm): (&String, &MemoryVm)| {
            VmCandidate::new(format!("{PREFIX}{name}"), name.as_str(), vm.instance).with(ABILITIES)
        };
        Ok(state.vms.iter().filter(|(_, vm)| vm.listed).map(candidate).collect())
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.shared.changes.as_fd())
    }

    fn clear_changes(&mut self) {
        // Empty when there was no change.
        let _ = self.shared.changes.read();
    }

    fn connect(&self, handle: &VmHandle) -> Result<Box<dyn VmConnection>, VmError> {
        let failed = |source| VmError::Connect { socket: handle.to_string(), source };
        let name = handle.as_str().strip_prefix(PREFIX).unwrap_or_default();
        let state = self.shared.lock();
        let Some(vm) = state.vms.get(name).filter(|vm| !vm.refuses) else {
            return Err(failed(io::ErrorKind::ConnectionRefused.into()));
        };
        Ok(Box::new(MemoryConnection::new(&self.shared, name, vm).map_err(failed)?))
    }
}
