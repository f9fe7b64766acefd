//! VMs that are not there: a backend whose VMs do what a test wants. Their vCPU threads are real, as are
//! the processes that can be killed.

use nix::{
    libc,
    sys::eventfd::{EfdFlags, EventFd},
    unistd::gettid,
};
use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};
use vnuma_channel_model::GuestEnd;
use vnuma_hypervisor::{
    ObservedVcpus, Plugged, VmBackend, VmCandidate, VmConnection, VmError, VmEvent, VmHandle,
};
use vnuma_topology::{GuestNode, MemoryBacking, Vcpu, VmDescription};

/// A thread that sleeps and wakes like an idle vCPU, until it is dropped.
pub struct VcpuThread {
    pub tid: i32,
    stop: Arc<AtomicBool>,
}

impl VcpuThread {
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let stopped = Arc::clone(&stop);
        thread::spawn(move || {
            sender.send(gettid().as_raw()).expect("the test waits");
            while !stopped.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(2));
            }
        });
        Self { tid: receiver.recv().expect("started"), stop }
    }

    /// Confines it to a CPU, behind the daemon's back.
    pub fn pin(&self, cpu: usize) {
        let mut set = nix::sched::CpuSet::new();
        set.set(cpu).expect("in range");
        nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(self.tid), &set).expect("pinned");
    }
}

impl Drop for VcpuThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A process that stands for a VM's and can be killed.
pub struct Process(pub Child);

impl Process {
    pub fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().expect("sleep"))
    }

    pub fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    pub fn kill(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("ended");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a VM does.
pub struct FakeVm {
    pub description: VmDescription,
    /// The device's end of the channel, while it is plugged.
    pub device: Option<OwnedFd>,
    /// A channel that somebody else plugged.
    pub foreign_channel: bool,
    pub free_port: bool,
    /// What is plugged by the next replug.
    pub spare: Option<Plugged>,
    /// It falls silent as soon as that is done.
    pub silent_after_replug: bool,
    /// Commands do not return while it is set.
    pub stuck: bool,
    /// Every call fails.
    pub silent: bool,
    /// Nobody listens at its socket.
    pub refuses: bool,
    /// Its socket is not there, though it lives.
    pub unlinked: bool,
    /// How often it was described.
    pub described: usize,
    events: VecDeque<VmEvent>,
    instance: u64,
    event_fd: Arc<EventFd>,
}

/// All VMs there are.
#[derive(Clone)]
pub struct World {
    directory: PathBuf,
    state: Arc<(Mutex<BTreeMap<PathBuf, FakeVm>>, Condvar)>,
    /// It cannot be seen which VMs there are.
    pub blind: Arc<AtomicBool>,
    scans: Arc<AtomicUsize>,
    changes: Arc<EventFd>,
}

/// A VM of this process with guest nodes at home on these host nodes, a vCPU a thread, and vCPU `i` booted
/// on guest node `i` modulo their number.
pub fn describe(name: &str, pid: i32, homes: &[u32], tids: &[i32]) -> VmDescription {
    let memory = |home: u32| MemoryBacking {
        id: format!("ram{home}"),
        size_bytes: 1 << 28,
        policy: "bind".into(),
        host_nodes: vec![home],
        resident_kib: Vec::new(),
    };
    let node = |(id, home): (usize, &u32)| GuestNode {
        id: id as u32,
        memory_bytes: 1 << 28,
        memory: Some(memory(*home)),
    };
    let vcpu = |(index, tid): (usize, &i32)| Vcpu {
        index: index as u32,
        apic_id: index as u32,
        boot_node: (!homes.is_empty()).then(|| (index % homes.len()) as u32),
        tid: *tid,
    };
    VmDescription {
        name: name.into(),
        pid,
        guest_nodes: homes.iter().enumerate().map(node).collect(),
        vcpus: tids.iter().enumerate().map(vcpu).collect(),
        run_state: "running".into(),
        spare_slots: std::collections::BTreeMap::new(),
    }
}

impl FakeVm {
    /// Events that nobody has taken yet.
    pub fn pending_events(&self) -> usize {
        self.events.len()
    }
}

fn event_fd() -> EventFd {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    EventFd::from_value_and_flags(0, flags).expect("an eventfd")
}

impl World {
    pub fn new(directory: &Path) -> Self {
        std::fs::create_dir_all(directory).expect("created");
        Self {
            directory: directory.into(),
            state: Arc::default(),
            blind: Arc::default(),
            scans: Arc::default(),
            changes: Arc::new(event_fd()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, FakeVm>> {
        self.state.0.lock().expect("not poisoned")
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.sock"))
    }

    /// A VM appears.
    pub fn add(&self, name: &str, description: VmDescription) {
        static INSTANCES: AtomicUsize = AtomicUsize::new(0);
        let vm = FakeVm {
            description,
            device: None,
            foreign_channel: false,
            free_port: true,
            spare: None,
            silent_after_replug: false,
            stuck: false,
            silent: false,
            refuses: false,
            unlinked: false,
            described: 0,
            events: VecDeque::new(),
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed) as u64,
            event_fd: Arc::new(event_fd()),
        };
        self.lock().insert(self.socket(name), vm);
        self.changes.write(1).expect("announced");
    }

    /// Changes a VM, and wakes whoever waits for it; one that was silent says something.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut FakeVm)) {
        let mut vms = self.lock();
        let vm = vms.get_mut(&self.socket(name)).expect("there");
        let silent = vm.silent;
        change(vm);
        if silent && !vm.silent {
            vm.event_fd.write(1).expect("announced");
        }
        drop(vms);
        self.state.1.notify_all();
    }

    /// Something happens to a VM.
    pub fn event(&self, name: &str, event: VmEvent) {
        self.change(name, |vm| {
            vm.events.push_back(event);
            vm.event_fd.write(1).expect("announced");
        });
    }

    /// Its socket is taken away.
    pub fn remove(&self, name: &str) {
        self.lock().remove(&self.socket(name));
        self.changes.write(1).expect("announced");
    }

    /// Waits until the daemon has looked again for VMs.
    pub fn wait_for_a_scan(&self) {
        let before = self.scans.load(Ordering::SeqCst);
        // One may be under way.
        super::wait_for("two scans", || self.scans.load(Ordering::SeqCst) >= before + 2);
    }

    /// The guest's end of its channel.
    pub fn guest(&self, name: &str) -> GuestEnd {
        let vms = self.lock();
        let device = vms[&self.socket(name)].device.as_ref().expect("plugged");
        GuestEnd::connect(device).expect("all messages")
    }
}

impl VmBackend for World {
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError> {
        self.scans.fetch_add(1, Ordering::SeqCst);
        if self.blind.load(Ordering::SeqCst) {
            let source = std::io::ErrorKind::PermissionDenied.into();
            return Err(VmError::Directory { directory: self.directory.display().to_string(), source });
        }
        let name = |socket: &Path| socket.file_stem().and_then(|s| s.to_str()).expect("UTF-8").to_owned();
        let vms = self.lock();
        let listed = vms.iter().filter(|(_, vm)| !vm.unlinked);
        let candidate = |(socket, vm): (&PathBuf, &FakeVm)| VmCandidate {
            handle: VmHandle::new(socket.to_str().expect("UTF-8")),
            name: name(socket),
            instance: vm.instance,
        };
        Ok(listed.map(candidate).collect())
    }

    fn connect(&self, handle: &VmHandle) -> Result<Box<dyn VmConnection>, VmError> {
        let socket = PathBuf::from(handle.as_str());
        let refused =
            |kind: std::io::ErrorKind| VmError::Connect { socket: handle.to_string(), source: kind.into() };
        let (pid, event_fd) = match self.lock().get(&socket) {
            Some(vm) if !vm.refuses => (vm.description.pid, Arc::clone(&vm.event_fd)),
            _ => return Err(refused(std::io::ErrorKind::ConnectionRefused)),
        };
        // SAFETY: no memory is involved; the result is checked.
        let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        assert!(raw >= 0, "pidfd_open: {}", std::io::Error::last_os_error());
        // SAFETY: the kernel has just made this descriptor for this process.
        let pidfd = unsafe { OwnedFd::from_raw_fd(raw as i32) };
        Ok(Box::new(Connection { world: self.clone(), socket, pid, pidfd, event_fd }))
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.changes.as_fd())
    }

    fn clear_changes(&mut self) {
        // Empty when there was no change.
        let _ = self.changes.read();
    }
}

struct Connection {
    world: World,
    socket: PathBuf,
    pid: i32,
    pidfd: OwnedFd,
    event_fd: Arc<EventFd>,
}

impl Connection {
    /// The VM, once it answers.
    fn with<T>(&self, act: impl FnOnce(&mut FakeVm, String) -> Result<T, VmError>) -> Result<T, VmError> {
        let gone = || VmError::Disconnected { vm: self.socket.display().to_string() };
        let mut vms = self.world.lock();
        while vms.get(&self.socket).is_some_and(|vm| vm.stuck) {
            vms = self.world.state.1.wait(vms).expect("not poisoned");
        }
        let vm = vms.get_mut(&self.socket).ok_or_else(gone)?;
        let name = vm.description.name.clone();
        if vm.silent {
            return Err(VmError::Timeout { vm: name, command: "anything".into(), limit_ms: 1 });
        }
        act(vm, name)
    }
}

impl VmConnection for Connection {
    fn greet(&mut self) -> Result<(), VmError> {
        self.with(|_, _| Ok(()))
    }

    fn observe_vcpus(&self) -> Option<ObservedVcpus> {
        None
    }

    fn tidy_channel(&mut self) -> Result<bool, VmError> {
        self.channel_attached()
    }

    fn describe(&mut self) -> Result<VmDescription, VmError> {
        self.with(|vm, _| {
            vm.described += 1;
            Ok(vm.description.clone())
        })
    }

    fn attach_channel(&mut self, server: OwnedFd) -> Result<(), VmError> {
        self.with(|vm, name| {
            if !vm.free_port {
                return Err(VmError::NoFreePort { vm: name });
            }
            vm.device = Some(server);
            Ok(())
        })
    }

    fn probe(&mut self, _limit: Duration) -> Result<(), VmError> {
        self.with(|_, _| Ok(()))
    }

    fn channel_attached(&mut self) -> Result<bool, VmError> {
        self.with(|vm, _| Ok(vm.device.is_some() || vm.foreign_channel))
    }

    fn detach_channel(&mut self) -> Result<(), VmError> {
        self.with(|vm, name| {
            if vm.device.take().is_none() && !std::mem::take(&mut vm.foreign_channel) {
                return Err(VmError::NotAttached { vm: name });
            }
            Ok(())
        })
    }

    fn removable_vcpu(&mut self, apic_id: u32) -> Result<Plugged, VmError> {
        self.with(|vm, name| {
            let old = vm.description.vcpus.iter().find(|vcpu| vcpu.apic_id == apic_id).map(|vcpu| vcpu.tid);
            Ok(Plugged { apic_id, tid: old.ok_or(VmError::NoVcpu { vm: name, vcpu: apic_id })? })
        })
    }

    fn plug_vcpu(&mut self, node: u32) -> Result<Plugged, VmError> {
        self.with(|vm, name| {
            let Some(new) = vm.spare.take() else { return Err(VmError::NoSpareSlot { vm: name, node }) };
            let (apic_id, tid) = (new.apic_id, new.tid);
            vm.description.vcpus.push(Vcpu { index: apic_id, apic_id, boot_node: Some(node), tid });
            Ok(new)
        })
    }

    fn await_guest(&mut self, _apic_id: u32) -> Result<(), VmError> {
        self.with(|_, _| Ok(()))
    }

    fn unplug_vcpu(&mut self, apic_id: u32) -> Result<(), VmError> {
        self.with(|vm, _| {
            vm.description.vcpus.retain(|vcpu| vcpu.apic_id != apic_id);
            vm.silent |= std::mem::take(&mut vm.silent_after_replug);
            Ok(())
        })
    }

    fn poll_event(&mut self, _timeout: Duration) -> Result<Option<VmEvent>, VmError> {
        let _ = self.event_fd.read();
        let gone = VmError::Disconnected { vm: self.socket.display().to_string() };
        let mut vms = self.world.lock();
        Ok(vms.get_mut(&self.socket).ok_or(gone)?.events.pop_front())
    }

    fn pid(&self) -> i32 {
        self.pid
    }

    fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }
}
