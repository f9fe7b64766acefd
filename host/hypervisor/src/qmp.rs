//! VMs by their QMP sockets.

use crate::{
    Migrates, ObservedVcpus, Plug, Plugged, Sizes, VmBackend, VmConnection, VmError, VmEvent, channel,
    client::{Client, Limits},
    commands::QueryStatus,
    describe,
    directories::DirectoryWatch,
    hotplug::{self, Arrival},
    joined::foreign_handle,
    memory_devices, migration,
    name::check_name,
    observed,
    process::Process,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, Metadata},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use vnuma_model::{Abilities, MigrationProgress, Party, VmCandidate, VmDescription, VmHandle};
use vnuma_process::Ledger;

/// How the file of a socket in the directory ends.
const EXTENSION: &str = "sock";

/// Most entries of the directory that are read.
const ENTRY_LIMIT: usize = 4096;

/// Handles of this backend begin so; the path of the socket follows.
const PREFIX: &str = "qmp:";

/// QEMU answers itself, and its operator pins vCPUs by their affinity.
const ABILITIES: Abilities =
    Abilities { answered_for: false, pins: false, migrates: Some(migration::DESTINATIONS) };

/// VMs whose QMP sockets are in a directory, or listed one by one.
#[derive(Debug, Default)]
pub struct QmpBackend {
    directory: Option<PathBuf>,
    sockets: Vec<PathBuf>,
    limits: Limits,
    /// What has been complained of, so that it is done once.
    refused: BTreeSet<PathBuf>,
    /// For the lines of the log that users cause who may make sockets.
    ledger: Ledger,
    /// From the first scan on: an instance of inotify is scarce, and one that only connects needs none.
    watch: Option<DirectoryWatch>,
}

impl QmpBackend {
    /// Every `*.sock` in `directory`, if one is given, and every path of `sockets`.
    pub fn new(directory: Option<PathBuf>, sockets: Vec<PathBuf>) -> Self {
        Self { directory, sockets, ..Self::default() }
    }

    /// Lets QEMU take so long for a command. A second by default; five times that for all commands of a task.
    #[must_use]
    pub fn with_limit(mut self, command: Duration) -> Self {
        self.limits = Limits { command };
        self
    }

    /// The handle of the VM whose monitor is at this socket. `None` if the path is not UTF-8.
    pub fn handle(socket: &Path) -> Option<VmHandle> {
        Some(VmHandle::new(format!("{PREFIX}{}", socket.to_str()?)))
    }

    fn paths(&self) -> Result<Vec<PathBuf>, VmError> {
        let mut paths = self.sockets.clone();
        if let Some(directory) = &self.directory {
            let unreadable =
                |source| VmError::Directory { directory: directory.display().to_string(), source };
            let mut found = sockets_in(directory).map_err(unreadable)?;
            found.sort_unstable();
            paths.append(&mut found);
        }
        Ok(paths)
    }

    /// Directories in which VMs may appear.
    fn directories(&self) -> Vec<PathBuf> {
        let parents = self.sockets.iter().filter_map(|socket| socket.parent()).map(Path::to_owned);
        let unique: BTreeSet<PathBuf> = self.directory.iter().cloned().chain(parents).collect();
        unique.into_iter().collect()
    }

    fn refuse(&mut self, path: &Path, file: &Metadata, reason: &str) {
        if self.refused.insert(path.to_owned())
            && let Some(more) = self.ledger.line(Party::User(file.uid()))
        {
            tracing::warn!(socket = %path.display(), reason, "ignoring socket{more}");
        }
    }
}

fn sockets_in(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        // One that is not there yet has no VMs in it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let paths = entries.take(ENTRY_LIMIT).map(|entry| Ok(entry?.path()));
    let is_socket = |path: &PathBuf| path.extension().is_some_and(|extension| extension == EXTENSION);
    paths.filter(|path| path.as_ref().map_or(true, is_socket)).collect()
}

/// The name that a socket's file gives its VM.
fn name_of(socket: &Path) -> &str {
    socket.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default()
}

/// Another file in the place of a socket is another VM's, most likely.
fn instance_of(file: &Metadata) -> u64 {
    let mut hasher = DefaultHasher::new();
    (file.dev(), file.ino()).hash(&mut hasher);
    hasher.finish()
}

impl VmBackend for QmpBackend {
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError> {
        // Before reading, so that no change falls between the two.
        let directories = self.directories();
        self.watch.get_or_insert_with(DirectoryWatch::new).watch(&directories);
        let mut found: BTreeMap<String, (PathBuf, VmCandidate)> = BTreeMap::new();
        for path in self.paths()? {
            // Through links: a directory may be filled with links to sockets elsewhere.
            let Ok(file) = fs::metadata(&path) else { continue };
            if !file.file_type().is_socket() {
                continue;
            }
            let name = name_of(&path).to_owned();
            if let Err(error) = check_name(&name) {
                self.refuse(&path, &file, &error.to_string());
                continue;
            }
            let Some(handle) = Self::handle(&path) else {
                self.refuse(&path, &file, "its path is not UTF-8");
                continue;
            };
            match found.get(&name) {
                Some((other, _)) if *other != path => {
                    let reason = format!("{} has the same name", other.display());
                    self.refuse(&path, &file, &reason);
                }
                _ => {
                    let candidate =
                        VmCandidate::new(handle, name.as_str(), instance_of(&file)).with(ABILITIES);
                    found.insert(name, (path, candidate));
                }
            }
        }
        self.refused.retain(|path| path.exists());
        Ok(found.into_values().map(|(_, candidate)| candidate).collect())
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref()?.changes()
    }

    fn clear_changes(&mut self) {
        if let Some(watch) = &self.watch {
            watch.clear();
        }
    }

    fn ledgers(&self) -> Vec<Ledger> {
        vec![self.ledger.clone()]
    }

    fn connect(&self, handle: &VmHandle) -> Result<Box<dyn VmConnection>, VmError> {
        let Some(socket) = handle.as_str().strip_prefix(PREFIX).map(Path::new) else {
            return Err(foreign_handle(handle, "a VM with a QMP socket"));
        };
        let name = name_of(socket).to_owned();
        let client = Client::connect(&name, socket, self.limits)?;
        let process = Process::behind(client.as_fd(), socket)?;
        let socket = socket.display().to_string();
        Ok(Box::new(QmpConnection { client, process, name, socket, arrivals: Vec::new(), untidy: true }))
    }
}

/// A connection to the monitor of one QEMU.
#[derive(Debug)]
struct QmpConnection {
    client: Client,
    process: Process,
    /// Of the socket.
    name: String,
    socket: String,
    /// vCPUs that were plugged and that the guest may not have taken yet.
    arrivals: Vec<Arrival>,
    /// Something of a channel that is unplugged may be left. A QEMU can say again and again that it is.
    untidy: bool,
}

impl QmpConnection {
    /// Runs a task of several commands within [`Limits::task`].
    fn task<T>(
        &mut self,
        task: impl FnOnce(&mut Client, &Process, &str) -> Result<T, VmError>,
    ) -> Result<T, VmError> {
        self.within(self.client.limits().task(), |vm| task(&mut vm.client, &vm.process, &vm.name))
    }

    /// Runs it with this limit for all of its commands.
    fn within<T>(&mut self, limit: Duration, task: impl FnOnce(&mut Self) -> T) -> T {
        self.client.begin_task(limit);
        let outcome = task(self);
        self.client.end_task();
        outcome
    }
}

impl VmConnection for QmpConnection {
    fn greet(&mut self) -> Result<(), VmError> {
        self.client.greet(&self.socket)
    }

    fn observe_vcpus(&self) -> Option<ObservedVcpus> {
        observed::of(&self.process)
    }

    fn describe(&mut self) -> Result<VmDescription, VmError> {
        self.task(describe::describe)
    }

    fn attach_channel(&mut self, plug: Plug) -> Result<(), VmError> {
        let Plug::Ivshmem(server) = plug;
        self.untidy = true;
        self.task(|client, _, _| channel::attach(client, &server))
    }

    fn probe(&mut self, limit: Duration) -> Result<(), VmError> {
        self.within(limit, |vm| vm.client.execute(&QueryStatus {})).map(drop)
    }

    fn channel_attached(&mut self) -> Result<bool, VmError> {
        self.task(|client, _, _| channel::attached(client))
    }

    fn tidy_channel(&mut self) -> Result<bool, VmError> {
        self.task(|client, _, _| channel::tidy(client))
    }

    fn detach_channel(&mut self) -> Result<(), VmError> {
        let detached = self.task(|client, _, _| channel::detach(client))?;
        if detached {
            return Ok(());
        }
        let limit_ms = self.client.limits().command.as_millis() as u64;
        Err(VmError::DetachPending { vm: self.name.clone(), limit_ms })
    }

    fn removable_vcpu(&mut self, apic_id: u32) -> Result<Plugged, VmError> {
        self.task(|client, process, _| hotplug::removable(client, process, apic_id))
    }

    fn plug_vcpu(&mut self, node: u32) -> Result<Plugged, VmError> {
        // On failure the guest takes part in undoing it.
        let limit = hotplug::limit(self.client.limits());
        let (plugged, arrival) = self.within(limit, |vm| hotplug::plug(&mut vm.client, &vm.process, node))?;
        self.arrivals.push(arrival);
        Ok(plugged)
    }

    fn await_guest(&mut self, apic_id: u32) -> Result<(), VmError> {
        let limit = hotplug::limit(self.client.limits());
        let outcome = self.within(limit, |vm| hotplug::await_guest(&mut vm.client, &vm.arrivals, apic_id));
        self.arrivals.retain(|arrival| !arrival.is(apic_id));
        outcome
    }

    fn unplug_vcpu(&mut self, apic_id: u32) -> Result<(), VmError> {
        let limit = hotplug::limit(self.client.limits());
        let outcome = self.within(limit, |vm| hotplug::unplug(&mut vm.client, apic_id));
        self.arrivals.retain(|arrival| !arrival.is(apic_id));
        outcome
    }

    fn migrates(&mut self) -> Option<&mut dyn Migrates> {
        Some(self)
    }

    fn sizes(&mut self) -> Option<&mut dyn Sizes> {
        Some(self)
    }

    fn poll_event(&mut self, timeout: Duration) -> Result<Option<VmEvent>, VmError> {
        let event = self.client.event(Instant::now() + timeout)?;
        if event == Some(VmEvent::ChannelDetached) && std::mem::take(&mut self.untidy) {
            channel::clean_up(&mut self.client);
        }
        Ok(event)
    }

    fn overheard(&mut self) -> u32 {
        self.client.overheard()
    }

    fn complaints(&mut self) -> Vec<String> {
        self.client.complaints()
    }

    fn pid(&self) -> i32 {
        self.process.pid()
    }

    fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.client.as_fd()
    }
}

impl Migrates for QmpConnection {
    fn is_marked(&mut self) -> Result<bool, VmError> {
        self.task(|client, _, _| migration::is_marked(client))
    }

    fn mark(&mut self, marked: bool) -> Result<(), VmError> {
        self.task(|client, _, _| migration::mark(client, marked))
    }

    fn migrate(&mut self, destination: &str, post_copy: bool) -> Result<(), VmError> {
        self.task(|client, _, _| migration::begin(client, destination, post_copy))
    }

    fn progress(&mut self) -> Result<MigrationProgress, VmError> {
        self.task(|client, _, _| migration::progress(client))
    }

    fn cancel(&mut self) -> Result<(), VmError> {
        self.task(|client, _, _| migration::cancel(client))
    }

    fn start_post_copy(&mut self) -> Result<(), VmError> {
        self.task(|client, _, _| migration::switch(client))
    }
}

impl Sizes for QmpConnection {
    fn request(&mut self, id: &str, bytes: u64) -> Result<(), VmError> {
        self.task(|client, _, _| memory_devices::request(client, id, bytes))
    }
}
