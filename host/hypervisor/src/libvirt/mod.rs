//! Domains of libvirt that run on this host.
//!
//! ```text
//!  libvirt: names, XML, events, hot-plug, pins        ──┐
//!  its state directory: process, threads of vCPUs     ──┼──▶ VmDescription
//!  the kernel: APIC ids (KVM), where memory is (/proc) ─┘
//! ```
//!
//! No query changes a domain or marks it as tampered with (`taint`): no monitor command, no agent. Everything that is not
//! in libvirt's interface is read where libvirt or the kernel shows it.

mod child;
mod common_socket;
mod connection;
mod departure;
mod describe;
mod fork_server;
mod handshake;
pub mod mappings;
mod migration;
mod pins;
mod sockets;
mod states;

use crate::{
    Source, VmBackend, VmConnection, VmError, joined::foreign_handle, name::check_name, process::Process,
};
pub use common_socket::MakeSpare;
use common_socket::{CommonSocket, Served};
use connection::LibvirtConnection;
use nix::sys::eventfd::{EfdFlags, EventFd};
use states::{Daemon, Named, Numbers, States};
use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};
use vnuma_libvirt::{Connection, Library, LibvirtError, Listed};
use vnuma_model::{Abilities, VmCandidate, VmHandle};
use vnuma_process::{Groups, Ledger, qemu, text::sanitize_short};

/// Handles of this backend begin so; the domain's UUID and the URI of its connection follow.
const PREFIX: &str = "libvirt:";

/// libvirt answers for its domains, whatever their QEMUs do, and keeps pins of their vCPUs.
const ABILITIES: Abilities =
    Abilities { answered_for: true, pins: true, migrates: Some(migration::DESTINATIONS) };

/// For a list of domains, after which the last one counts.
const LIST_LIMIT: Duration = Duration::from_secs(1);

/// So long a list counts while libvirt says that nothing has changed: each one takes this process several wake-ups.
const LIST_INTERVAL: Duration = Duration::from_secs(20);

/// Domains of some connections to libvirt. Clones share the connections.
#[derive(Clone, Debug)]
pub struct LibvirtBackend {
    shared: Arc<Shared>,
    /// QMP sockets of VMs that another backend has.
    hidden: BTreeSet<String>,
}

#[derive(Debug)]
struct Shared {
    connections: Vec<Connection>,
    /// The daemons of connections, as far as they are known.
    daemons: Mutex<BTreeMap<usize, Arc<Daemon>>>,
    /// Where libvirt keeps files of domains that run.
    directories: Arc<[PathBuf]>,
    sockets: PathBuf,
    common: Common,
    workers: Groups,
    changes: Arc<EventFd>,
    known: Mutex<Known>,
}

/// Directories of a domain.
#[derive(Debug)]
struct Places {
    /// Where its libvirt keeps files of domains that run.
    states: States,
    /// For the sockets over which QEMU gets a channel.
    sockets: PathBuf,
    /// The one that all have which take their channels along.
    common: Common,
    workers: Groups,
}

/// The socket for domains that take their channels along, or why it is not served. Nothing before that was tried.
type Common = Arc<OnceLock<Result<Served, String>>>;

impl Places {
    fn common(&self) -> Option<&CommonSocket> {
        Some(self.common.get()?.as_ref().ok()?.socket())
    }
}

#[derive(Debug, Default)]
struct Known {
    /// By handle.
    domains: BTreeMap<String, KnownDomain>,
    /// What has been complained of, so that it is done once.
    complaints: BTreeMap<String, String>,
    /// Until when the last list of a connection counts, if nothing changes.
    lists: BTreeMap<usize, Instant>,
}

#[derive(Clone, Debug)]
struct KnownDomain {
    listed: Listed,
    /// Which of the connections.
    connection: usize,
    status: Option<Named>,
}

impl LibvirtBackend {
    /// Domains of the libvirts at these URIs, whose processes are named by files in the directories `states`. QEMU gets a
    /// channel over a socket in the directory `sockets`. Fails where there is no libvirt.
    pub fn new(uris: &[String], states: Vec<PathBuf>, sockets: PathBuf) -> Result<Self, LibvirtError> {
        let library = Library::load()?;
        // Before this process is large.
        fork_server::start();
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let changes = EventFd::from_value_and_flags(0, flags)
            .map_err(|errno| LibvirtError::Library(format!("an eventfd: {errno}")))?;
        let changes = Arc::new(changes);
        let connect = |uri: &String| Connection::new(library, uri, Arc::clone(&changes));
        let connections = uris.iter().map(connect).collect::<Result<_, _>>()?;
        let (daemons, known, common) = (Mutex::default(), Mutex::default(), Arc::default());
        let (directories, workers) = (states.into(), library.workers());
        let shared = Shared { connections, daemons, directories, sockets, common, workers, changes, known };
        Ok(Self { shared: Arc::new(shared), hidden: BTreeSet::new() })
    }

    /// Serves the socket for domains that take their channels along, as long as this backend or a clone of it is there. Where that
    /// fails, these domains are attached as the others, and [`sources`](VmBackend::sources) says why.
    pub fn serve_arrivals(&self, make: MakeSpare) -> io::Result<()> {
        let served = Served::start(&self.shared.workers.host, &self.shared.sockets, make);
        let outcome =
            served.as_ref().map(drop).map_err(|error| io::Error::new(error.kind(), error.to_string()));
        // A second call changes nothing.
        let _ = self.shared.common.set(served.map_err(|error| error.to_string()));
        outcome
    }

    /// The handle of a domain.
    fn handle(uri: &str, uuid: &str) -> String {
        format!("{PREFIX}{uuid}@{uri}")
    }
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the libvirt of a connection keeps files. Its daemon is looked for again when it has ended.
    fn states(&self, connection: usize) -> States {
        let mut daemons = self.daemons.lock().unwrap_or_else(PoisonError::into_inner);
        if !daemons.get(&connection).is_some_and(|daemon| daemon.alive()) {
            daemons.remove(&connection);
            let found = Daemon::of(self.connections[connection].uri());
            daemons.extend(found.map(|daemon| (connection, Arc::new(daemon))));
        }
        States::new(Arc::clone(&self.directories), daemons.get(&connection).cloned())
    }

    /// What the file says that names a domain's process.
    fn status(&self, states: &States, listed: &Listed, numbers: &mut Numbers) -> Result<Named, String> {
        let found = states.find(&listed.name, &listed.uuid, numbers)?;
        choose(found, listed.id, |pid| runs_domain(pid, &listed.uuid))
    }

    /// Takes over what a connection has listed. Files of domains that are new are read; one that cannot be is tried again soon.
    fn listed(&self, connection: usize, listed: Vec<Listed>) {
        let uri = self.connections[connection].uri();
        let mut fresh = BTreeMap::new();
        let mut names = BTreeSet::new();
        let (before, count) = (self.known().domains.clone(), listed.len());
        let (states, mut numbers) = (self.states(connection), Numbers::default());
        for listed in listed {
            let handle = LibvirtBackend::handle(uri, &listed.uuid);
            names.insert(handle.clone());
            let known = before.get(&handle).filter(|known| known.listed == listed && known.status.is_some());
            let status = match known {
                Some(known) => known.status.clone(),
                None => match self.status(&states, &listed, &mut numbers) {
                    Ok(status) => Some(status),
                    Err(problem) => {
                        self.complain(&handle, Some(problem));
                        continue;
                    }
                },
            };
            self.complain(&handle, None);
            fresh.insert(handle, KnownDomain { listed, connection, status });
        }
        let mut known = self.known();
        if fresh.len() == count {
            known.lists.insert(connection, Instant::now() + LIST_INTERVAL);
        }
        let own = |handle: &str| handle.starts_with(PREFIX) && handle.ends_with(&format!("@{uri}"));
        known.complaints.retain(|about, _| !own(about) || names.contains(about));
        known.domains.retain(|_, domain| domain.connection != connection);
        known.domains.extend(fresh);
    }

    /// Forgets domains of a connection whose processes have ended. libvirt says that while it answers.
    fn forget_ended(&self, connection: usize) {
        let known = self.known().domains.clone();
        let ended = known.into_iter().filter(|(_, domain)| {
            domain.connection == connection && !domain.status.as_ref().is_some_and(Named::runs)
        });
        for (handle, _) in ended {
            self.known().domains.remove(&handle);
        }
    }

    /// Says once what is wrong with something.
    fn complain(&self, about: &str, problem: Option<String>) {
        let mut known = self.known();
        match problem {
            None => drop(known.complaints.remove(about)),
            Some(problem) if known.complaints.get(about) == Some(&problem) => {}
            Some(problem) => {
                tracing::warn!(about, problem, "libvirt");
                known.complaints.insert(about.to_owned(), problem);
            }
        }
    }
}

/// The file of the domain with this number. Two libvirts, of a container and of the host for example, can each run a domain of the same
/// name and UUID, and both number their domains from 1.
fn choose(mut files: Vec<Named>, id: u32, runs: impl Fn(i32) -> bool) -> Result<Named, String> {
    // A libvirt that was killed leaves files of domains that have ended. A look at a process may wait for it, so there is one only
    // where it decides.
    if files.len() > 1 && files.iter().any(|named| runs(named.pid)) {
        files.retain(|named| runs(named.pid));
    }
    if files.iter().any(|named| named.file.id == Some(id)) {
        files.retain(|named| named.file.id == Some(id));
    }
    match files.as_slice() {
        [one, other, ..] if one.pid != other.pid => Err(format!(
            "{} and {} name different processes for one UUID, and it is not known which of them is meant; name the directory of one \
             libvirt only (`libvirt.state_directories`)",
            one.path.display(),
            other.path.display()
        )),
        [one, ..] => Ok(one.clone()),
        [] => Err("it has no file".to_owned()),
    }
}

/// What a domain is called here: its own name, if that can be used.
fn name_of(listed: &Listed) -> &str {
    if check_name(&listed.name).is_ok() { &listed.name } else { &listed.uuid }
}

impl VmBackend for LibvirtBackend {
    fn scan(&mut self) -> Result<Vec<VmCandidate>, VmError> {
        for (index, connection) in self.shared.connections.iter().enumerate() {
            // Asked each time, as that is what a change is counted from.
            let changed = connection.may_have_changed();
            if !changed && self.shared.known().lists.get(&index).is_some_and(|until| *until > Instant::now())
            {
                continue;
            }
            self.shared.known().lists.remove(&index);
            match connection.list(LIST_LIMIT) {
                Ok(listed) => {
                    self.shared.complain(connection.uri(), None);
                    self.shared.listed(index, listed);
                }
                // Domains run on without it.
                Err(error) => {
                    self.shared.complain(connection.uri(), Some(error.to_string()));
                    self.shared.forget_ended(index);
                }
            }
        }
        let known = self.shared.known();
        let candidate = |(handle, domain): (&String, &KnownDomain)| {
            let status = domain.status.as_ref()?;
            if check_name(name_of(&domain.listed)).is_err() {
                return None;
            }
            if status.file.sockets.iter().any(|socket| self.hidden.contains(socket)) {
                return None;
            }
            let mut hasher = DefaultHasher::new();
            (domain.listed.id, status.pid).hash(&mut hasher);
            let name = name_of(&domain.listed).to_owned();
            Some(VmCandidate::new(handle.as_str(), name, hasher.finish()).with(ABILITIES))
        };
        Ok(known.domains.iter().filter_map(candidate).collect())
    }

    fn changes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.shared.changes.as_fd())
    }

    fn clear_changes(&mut self) {
        // Empty when there was none.
        let _ = self.shared.changes.read();
    }

    fn hide(&mut self, others: &[VmCandidate]) {
        self.hidden = others
            .iter()
            .filter_map(|other| other.handle.as_str().strip_prefix("qmp:"))
            .map(str::to_owned)
            .collect();
    }

    fn workers(&self) -> Vec<Groups> {
        vec![self.shared.workers.clone()]
    }

    fn ledgers(&self) -> Vec<Ledger> {
        let served = self.shared.common.get().and_then(|served| served.as_ref().ok());
        served.map(|served| served.ledger().clone()).into_iter().collect()
    }

    fn sources(&self) -> Vec<Source> {
        let known = self.shared.known();
        let source = |connection: &Connection| {
            let name = connection.uri().to_owned();
            let problem = known.complaints.get(&name).cloned().or_else(|| connection.congestion());
            Source { name, problem }
        };
        let common = self.shared.common.get().and_then(|served| served.as_ref().err());
        let not_served = common.map(|problem| Source {
            name: self.shared.sockets.join(common_socket::NAME).display().to_string(),
            problem: Some(problem.clone()),
        });
        self.shared.connections.iter().map(source).chain(not_served).collect()
    }

    fn connect(&self, handle: &VmHandle) -> Result<Box<dyn VmConnection>, VmError> {
        if !handle.as_str().starts_with(PREFIX) {
            return Err(foreign_handle(handle, "a domain of libvirt"));
        }
        let failed = |source| VmError::Connect { socket: handle.to_string(), source };
        let known = self.shared.known().domains.get(handle.as_str()).cloned();
        let Some(KnownDomain { listed, connection, .. }) = known else {
            return Err(failed(io::ErrorKind::NotFound.into()));
        };
        let other = |problem: String| failed(io::Error::other(problem));
        let states = self.shared.states(connection);
        let status = self.shared.status(&states, &listed, &mut Numbers::default()).map_err(other)?;
        let process = Process::with_number(status.pid).map_err(|source| {
            let (socket, pid) = (handle.to_string(), status.pid);
            VmError::Process { socket, pid, source }
        })?;
        // The number may have been given to another process since libvirt wrote it.
        if !runs_domain(status.pid, &listed.uuid) || !process.alive() {
            let domain = sanitize_short(&listed.name);
            let reason = format!("process {} is not the QEMU of domain {domain}", status.pid);
            return Err(other(reason));
        }
        states.check(&status).map_err(other)?;
        let name = name_of(&listed).to_owned();
        let domain = self.shared.connections[connection].domain(&listed.uuid);
        let domain = domain.map_err(|error| connection::error(&name, error))?;
        let (sockets, common) = (self.shared.sockets.clone(), Arc::clone(&self.shared.common));
        let workers = self.shared.workers.clone();
        let places = Arc::new(Places { states, sockets, common, workers });
        Ok(Box::new(LibvirtConnection::new(domain, process, listed.name, name, places)))
    }
}

/// Is it a QEMU with this UUID? It is that of a pidfd that was opened before, if that lives afterwards.
fn runs_domain(pid: i32, uuid: &str) -> bool {
    qemu::command_line(pid).windows(2).any(|pair| pair[0] == "-uuid" && pair[1] == uuid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_libvirt::StatusFile;

    #[test]
    fn the_file_of_a_domain_is_that_of_its_libvirt_and_of_a_process_that_runs() {
        let file = |place: &str, id, pid| {
            let (uuid, vcpus, sockets) = ("8d2a52f4".to_owned(), BTreeMap::new(), Vec::new());
            let file = StatusFile { uuid, id: Some(id), pid, vcpus, sockets };
            Named { path: PathBuf::from(place), owner: 0, file, pid, started: None }
        };
        let files = || vec![file("/a/web.xml", 1, 10), file("/b/web.xml", 2, 20)];
        let chosen = |files, id, running: &[i32]| {
            choose(files, id, |pid| running.contains(&pid)).map(|named| named.pid)
        };
        assert_eq!((chosen(files(), 1, &[10, 20]), chosen(files(), 2, &[10, 20])), (Ok(10), Ok(20)));
        // One that has ended is not it, whatever its number.
        assert_eq!(chosen(files(), 1, &[20]), Ok(20));
        // None runs: the error is that of the process.
        assert_eq!(chosen(files(), 2, &[]), Ok(20));
        // Both count from 1.
        let alike = || vec![file("/a/web.xml", 1, 10), file("/b/web.xml", 1, 20)];
        let refused = chosen(alike(), 1, &[10, 20]).expect_err("two");
        assert!(refused.contains("/a/web.xml and /b/web.xml name different processes"), "{refused}");
        assert!(chosen(files(), 3, &[10, 20]).is_err());
        // One directory under two names.
        assert_eq!(chosen(vec![file("/a/web.xml", 1, 10), file("/c/web.xml", 1, 10)], 1, &[10]), Ok(10));
    }
}
