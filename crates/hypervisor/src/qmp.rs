//! VMs by their QMP sockets.

use crate::{
    Adopt, Glimpse, Plugged, VmBackend, VmCandidate, VmConnection, VmError, VmEvent, channel,
    client::{COMMAND_LIMIT, Client},
    commands::QueryStatus,
    describe, glimpse,
    name::check_name,
    process::Process,
    replug,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileTypeExt,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use vnuma_topology::VmDescription;

/// How the file of a socket in the directory ends.
const EXTENSION: &str = "sock";

/// Most entries of the directory that are looked at.
const ENTRY_LIMIT: usize = 4096;

/// For all commands of one task. A single one has [`COMMAND_LIMIT`]; a QEMU that takes
/// nearly that long for each of a thousand must not keep the caller for a quarter of an hour.
const TASK_LIMIT: Duration = Duration::from_secs(5);

/// VMs whose QMP sockets are in a directory, or listed one by one.
#[derive(Clone, Debug, Default)]
pub struct QmpBackend {
    directory: Option<PathBuf>,
    sockets: Vec<PathBuf>,
    /// What has been complained of, so that it is done once.
    refused: BTreeSet<PathBuf>,
}

impl QmpBackend {
    /// Every `*.sock` in `directory`, if one is given, and every path of `sockets`.
    pub fn new(directory: Option<PathBuf>, sockets: Vec<PathBuf>) -> Self {
        Self { directory, sockets, refused: BTreeSet::new() }
    }

    fn paths(&self) -> Result<Vec<PathBuf>, VmError> {
        let mut paths = self.sockets.clone();
        if let Some(directory) = &self.directory {
            let unreadable = |source| VmError::Directory { directory: directory.clone(), source };
            let mut found = sockets_in(directory).map_err(unreadable)?;
            found.sort_unstable();
            paths.append(&mut found);
        }
        Ok(paths)
    }

    fn refuse(&mut self, path: &Path, reason: &str) {
        if self.refused.insert(path.to_owned()) {
            tracing::warn!(socket = %path.display(), reason, "not taken for a VM");
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

impl VmBackend for QmpBackend {
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError> {
        let mut found: BTreeMap<String, PathBuf> = BTreeMap::new();
        for path in self.paths()? {
            // Through links: a directory may be filled with links to sockets elsewhere.
            if !fs::metadata(&path).is_ok_and(|file| file.file_type().is_socket()) {
                continue;
            }
            let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
            if let Err(error) = check_name(&name) {
                self.refuse(&path, &error.to_string());
                continue;
            }
            match found.get(&name) {
                Some(other) if *other != path => {
                    let reason = format!("{} has the same name", other.display());
                    self.refuse(&path, &reason);
                }
                _ => {
                    found.insert(name, path);
                }
            }
        }
        self.refused.retain(|path| path.exists());
        Ok(found.into_iter().map(|(name, socket)| VmCandidate { name, socket }).collect())
    }

    fn connect(&self, candidate: &VmCandidate) -> Result<Box<dyn VmConnection>, VmError> {
        let client = Client::connect(&candidate.name, &candidate.socket)?;
        let process = Process::behind(client.as_fd(), &candidate.socket)?;
        let VmCandidate { name, socket } = candidate.clone();
        Ok(Box::new(QmpConnection { client, process, name, socket }))
    }

    fn watch_dirs(&self) -> Vec<PathBuf> {
        let parents = self.sockets.iter().filter_map(|socket| socket.parent()).map(Path::to_owned);
        let unique: BTreeSet<PathBuf> = self.directory.iter().cloned().chain(parents).collect();
        unique.into_iter().collect()
    }
}

/// A connection to the monitor of one QEMU.
#[derive(Debug)]
struct QmpConnection {
    client: Client,
    process: Process,
    /// Of the socket.
    name: String,
    socket: PathBuf,
}

impl QmpConnection {
    /// Runs a task of several commands within [`TASK_LIMIT`].
    fn task<T>(
        &mut self,
        task: impl FnOnce(&mut Client, &Process, &str) -> Result<T, VmError>,
    ) -> Result<T, VmError> {
        self.client.begin_task(TASK_LIMIT);
        let outcome = task(&mut self.client, &self.process, &self.name);
        self.client.end_task();
        outcome
    }
}

impl VmConnection for QmpConnection {
    fn greet(&mut self) -> Result<(), VmError> {
        self.client.greet(&self.socket)
    }

    fn glimpse(&self) -> Option<Glimpse> {
        glimpse::of(&self.process)
    }

    fn describe(&mut self) -> Result<VmDescription, VmError> {
        self.task(describe::describe)
    }

    fn attach_channel(&mut self, server: OwnedFd) -> Result<(), VmError> {
        self.task(|client, _, _| channel::attach(client, &server))
    }

    fn probe(&mut self, limit: Duration) -> Result<(), VmError> {
        self.client.begin_task(limit);
        let outcome = self.client.execute(&QueryStatus {});
        self.client.end_task();
        outcome.map(drop)
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
        let limit_ms = COMMAND_LIMIT.as_secs() * 1000;
        Err(VmError::DetachPending { vm: self.name.clone(), limit_ms })
    }

    fn replug_vcpu(&mut self, apic_id: u32, node: u32, adopt: Adopt<'_>) -> Result<Plugged, VmError> {
        self.client.begin_task(replug::REPLUG_LIMIT);
        let outcome = replug::replug(&mut self.client, &self.process, apic_id, node, adopt);
        self.client.end_task();
        outcome
    }

    fn poll_event(&mut self, timeout: Duration) -> Result<Option<VmEvent>, VmError> {
        let event = self.client.event(Instant::now() + timeout)?;
        if event == Some(VmEvent::ChannelDetached) {
            channel::clean_up(&mut self.client);
        }
        Ok(event)
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
