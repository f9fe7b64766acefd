//! A daemon in this process, with a host of two nodes of one CPU each and VMs in memory.

// Each test binary uses a part of it.
#![allow(dead_code)]

pub mod peer;
pub mod vms;

pub use vnuma_test_kit::{host, http, wait_for};

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};
use tokio::sync::oneshot;
use vnuma_channel_model::GuestEnd;
use vnuma_daemon::{BackendFactory, Config};
use vnuma_hypervisor::QmpBackend;
use vnuma_memory_backend::{MemoryBackend, MemoryVm};
use vnuma_model::VmDescription;

/// A running daemon; it is stopped when this is dropped.
pub struct Daemon {
    pub backend: MemoryBackend,
    pub socket: PathBuf,
    pub config: Config,
    /// Of its VMs, if they are not in memory.
    factory: Option<BackendFactory>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
    _directory: tempfile::TempDir,
}

impl Daemon {
    pub fn start() -> Self {
        Self::start_looking_every(Duration::from_secs(1))
    }

    /// One that looks at everything in this interval only.
    pub fn start_looking_every(resync_interval: Duration) -> Self {
        Self::start_with(None, |config| config.resync_interval = resync_interval)
    }

    /// One whose VMs are processes that speak QMP at the sockets of a directory.
    pub fn start_with_qmp(directory: &Path) -> Self {
        let directory = directory.to_owned();
        let factory: BackendFactory =
            Arc::new(move || Box::new(QmpBackend::new(Some(directory.clone()), Vec::new())));
        Self::start_with(Some(factory), |_| {})
    }

    /// One with another configuration, or with VMs that are not in memory.
    pub fn start_with(factory: Option<BackendFactory>, change: impl FnOnce(&mut Config)) -> Self {
        let mut daemon = Self::prepare(factory, change);
        daemon.launch();
        daemon
    }

    /// The same, which does not run yet.
    pub fn prepare(factory: Option<BackendFactory>, change: impl FnOnce(&mut Config)) -> Self {
        // Not those that this process may use now: the threads that play vCPUs go where they are put.
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").expect("sysfs");
        let online = online.parse::<vnuma_model::CpuSet>().expect("a list of CPUs").len();
        assert!(online >= 2, "these tests need two CPUs, one for each node");
        let directory = tempfile::tempdir().expect("a directory");
        host::write_host(directory.path());
        let backend = MemoryBackend::new().expect("made");
        let mut config = Config {
            socket: directory.path().join("api.sock"),
            root: directory.path().into(),
            resync_interval: Duration::from_secs(1),
            poll_interval: Duration::from_millis(20),
            location: vnuma_observe::location::Prefer::Poll,
            records: directory.path().join("channels"),
            ..Config::default()
        };
        change(&mut config);
        let socket = config.socket.clone();
        Self { backend, socket, config, factory, stop: None, thread: None, _directory: directory }
    }

    /// Runs it on this thread until it is told to stop, or ends by itself.
    pub fn run(&self, stop: oneshot::Receiver<()>) -> anyhow::Result<()> {
        let backend = self.backend.clone();
        let factory = self.factory.clone().unwrap_or_else(|| Arc::new(move || Box::new(backend.clone())));
        run(self.config.clone(), factory, stop)
    }

    fn launch(&mut self) {
        let (backend, config) = (self.backend.clone(), self.config.clone());
        let factory = self.factory.clone().unwrap_or_else(|| Arc::new(move || Box::new(backend.clone())));
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || run(config, factory, stopped));
        (self.stop, self.thread) = (Some(stop), Some(thread));
        // Tests change the host's files, which it must have read by then.
        wait_for("the daemon", || {
            assert!(!self.has_ended(), "it ended: see its error");
            host::answers(&self.socket)
        });
    }

    fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// A VM appears, whose process and threads are real.
    pub fn add(&self, name: &str, description: VmDescription) {
        self.add_as(name, description, |_| ());
    }

    /// The same, of a VM that is changed before it can be found.
    pub fn add_as(&self, name: &str, description: VmDescription, change: impl FnOnce(&mut MemoryVm)) {
        let mut vm = MemoryVm::of_process(description).expect("made");
        change(&mut vm);
        self.backend.add(name, vm);
    }

    /// Changes a VM, or looks at it.
    pub fn change<T>(&self, name: &str, change: impl FnOnce(&mut MemoryVm) -> T) -> T {
        self.backend.change(name, change).expect("there is such a VM")
    }

    /// The guest's end of a VM's channel. There is one for each attach.
    pub fn guest(&self, name: &str) -> GuestEnd {
        self.change(name, |vm| GuestEnd::connect(vm.device.as_ref().expect("plugged")).expect("all messages"))
    }

    /// How many channels are recorded.
    pub fn records(&self) -> usize {
        let entries = std::fs::read_dir(&self.config.records).expect("there").flatten();
        entries.filter(|entry| entry.path().extension().is_some_and(|end| end == "json")).count()
    }

    /// Waits until it has looked again for VMs.
    pub fn wait_for_a_scan(&self) {
        let before = self.backend.scans();
        // One may be under way.
        wait_for("two scans", || self.backend.scans() >= before + 2);
    }

    /// Another one in its place, with the same VMs.
    pub fn restart(&mut self) {
        self.stop();
        self.launch();
    }

    /// The same, of which nothing is left of what it knew of VMs that are not in memory.
    pub fn restart_with(&mut self, factory: BackendFactory) {
        self.stop();
        self.factory = Some(factory);
        self.launch();
    }

    /// Stops it in order.
    pub fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic").expect("an orderly end");
        }
    }
}

fn run(config: Config, factory: BackendFactory, stop: oneshot::Receiver<()>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stopped = async { drop(stop.await) };
    runtime.block_on(vnuma_daemon::run(config, factory, vnuma_daemon::Notifier::default(), stopped))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A test that found nobody at the socket fails for that; this is why.
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("vnumad ended: {error:#}");
        }
    }
}
