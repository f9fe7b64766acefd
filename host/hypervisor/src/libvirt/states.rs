//! Files that libvirt keeps of domains that run, and the processes that they name.
//!
//! A libvirt may run in a container: in a PID and a mount namespace of its own, as another user. Its files lie in its own root then,
//! belong to that user, and have its own numbers of processes. The kernel says which process is at the other end of its socket:
//!
//! ```text
//!  libvirt.uris: ...?socket=PATH ──connect──▶ SO_PEERCRED: process and user of the daemon
//!                                               │
//!       /proc/DAEMON/root ◀─────────────────────┼──▶ its PID namespace
//!         └─ state directory / NAME.xml         │         └─ the process there that has the file's number
//!              (of root or of that user) ───────┴──────────▶ (of the user of the file, if that is not root)
//! ```
//!
//! So the writer of such a file can name processes of its own container only, and if it is not root there, of its own user only.

use crate::process::{Process, ThreadNames};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt::PeerCredentials,
};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
};
use vnuma_libvirt::{FoundStatus, StatusError, StatusFile, StatusPlaces};
use vnuma_process::procfs::{self, ProcError, STAT_LIMIT, STATUS_LIMIT};

/// A namespace: device and inode of its file in `/proc`.
type Namespace = (u64, u64);

/// Where files of a libvirt's domains are.
#[derive(Clone, Debug)]
pub(super) struct States {
    directories: Arc<[PathBuf]>,
    /// Not known of a libvirt whose socket is not named.
    daemon: Option<Arc<Daemon>>,
}

/// The daemon at the other end of a connection.
#[derive(Debug)]
pub(super) struct Daemon {
    process: Process,
    user: u32,
    /// Its PID namespace, if that is not the one of this process.
    inside: Option<Namespace>,
    /// It has a mount namespace of its own.
    has_root: bool,
}

/// A file of a domain, and the process that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    /// For messages.
    pub(super) path: PathBuf,
    /// To whom the file belongs.
    pub(super) owner: u32,
    pub(super) file: StatusFile,
    /// The process's number here.
    pub(super) pid: i32,
    /// When it started, of one that runs.
    pub(super) started: Option<u64>,
}

impl Named {
    /// Does its process run, and is it no other one that was given its number? It does as long as nothing else is known. Nothing that
    /// the process does delays this, as a look at its memory might be.
    pub(super) fn runs(&self) -> bool {
        match start_of(self.pid) {
            Ok(found) => found.is_some() && (self.started.is_none() || self.started == found),
            Err(_) => true,
        }
    }
}

/// Processes of a PID namespace: the numbers there and here. Looked up once, when a number is asked for.
#[derive(Debug, Default)]
pub(super) struct Numbers(Option<BTreeMap<i32, i32>>);

impl Daemon {
    /// The daemon that serves the socket of a URI, if that names one and the kernel tells.
    pub(super) fn of(uri: &str) -> Option<Self> {
        let path = socket_of(uri)?;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let probe = socket(AddressFamily::Unix, SockType::Stream, flags, None).ok()?;
        connect(probe.as_raw_fd(), &UnixAddr::new(&path).ok()?).ok()?;
        let process = Process::behind(probe.as_fd(), &path).ok()?;
        let user = getsockopt(&probe, PeerCredentials).ok()?.uid();
        let own = std::process::id().cast_signed();
        let (pids, mounts) = (namespace(process.pid(), "pid")?, namespace(process.pid(), "mnt")?);
        let inside = (Some(pids) != namespace(own, "pid")).then_some(pids);
        let has_root = Some(mounts) != namespace(own, "mnt");
        // Otherwise what was read is another process's.
        process.alive().then_some(Self { process, user, inside, has_root })
    }

    pub(super) fn alive(&self) -> bool {
        self.process.alive()
    }

    /// Its root, if that is another one, and how it is called.
    fn root(&self) -> Option<(File, PathBuf)> {
        let path = PathBuf::from(format!("/proc/{}/root", self.process.pid()));
        let root = self.has_root.then(|| File::open(&path).ok())??;
        self.alive().then_some((root, path))
    }
}

impl States {
    pub(super) fn new(directories: Arc<[PathBuf]>, daemon: Option<Arc<Daemon>>) -> Self {
        Self { directories, daemon }
    }

    /// Files of domains with this name and UUID, at least one.
    fn files(&self, name: &str, uuid: &str) -> Result<Vec<FoundStatus>, StatusError> {
        let daemon = self.daemon.as_ref().map(|daemon| daemon.user);
        let root = self.daemon.as_ref().and_then(|daemon| daemon.root());
        let here = StatusPlaces { directories: &self.directories, root: None, daemon };
        let Some((root, path)) = root else { return StatusFile::find(here, name, uuid) };
        let there = StatusPlaces { root: Some((root.as_fd(), &path)), ..here };
        let missing = match StatusFile::find(there, name, uuid) {
            Err(missing @ StatusError::Missing { .. }) => missing,
            found => return found,
        };
        // A directory may be named by its path on the host.
        match StatusFile::find(here, name, uuid) {
            Err(StatusError::Missing { .. }) => Err(missing),
            found => found,
        }
    }

    /// Files of domains with this name and UUID, with the processes that they name; at least one.
    pub(super) fn find(&self, name: &str, uuid: &str, numbers: &mut Numbers) -> Result<Vec<Named>, String> {
        let files = self.files(name, uuid).map_err(|error| error.to_string())?;
        let (mut named, mut problem) = (Vec::new(), None);
        for found in files {
            match self.process_of(&found, numbers) {
                Ok(pid) => {
                    let started = start_of(pid).ok().flatten();
                    named.push(Named {
                        path: found.path,
                        owner: found.owner,
                        file: found.file,
                        pid,
                        started,
                    });
                }
                Err(error) => problem = problem.or(Some(error)),
            }
        }
        if named.is_empty() { Err(problem.unwrap_or_else(|| "it has no file".to_owned())) } else { Ok(named) }
    }

    /// The process that a file names, by its number here.
    fn process_of(&self, found: &FoundStatus, numbers: &mut Numbers) -> Result<i32, String> {
        let named = found.file.pid;
        let refused =
            |reason: &str| Err(format!("{}: <domstatus pid> is `{named}`: {reason}", found.path.display()));
        let pid = match self.daemon.as_ref().and_then(|daemon| daemon.inside) {
            None => named,
            Some(inside) => {
                let Some(pid) = numbers.of(inside).get(&named).copied() else {
                    return refused("no process of the PID namespace of its libvirt has this number");
                };
                pid
            }
        };
        match self.misplaced(pid, found.owner) {
            Some(reason) => refused(&reason),
            None => Ok(pid),
        }
    }

    /// Why a file of this owner cannot mean this process.
    fn misplaced(&self, pid: i32, owner: u32) -> Option<String> {
        let inside = self.daemon.as_ref().and_then(|daemon| daemon.inside);
        if inside.is_some_and(|inside| namespace(pid, "pid") != Some(inside)) {
            return Some(format!("process {pid} is not in the PID namespace of its libvirt"));
        }
        if owner == 0 || owner == nix::unistd::geteuid().as_raw() {
            return None;
        }
        // One that has ended has no users, and is found out by its command line.
        let other = users(pid)?.into_iter().find(|user| *user != owner)?;
        Some(format!("process {pid} is of user {other}, and not of user {owner}, to whom the file belongs"))
    }

    /// Is it still so that the file can mean its process? Asked when that process cannot be another one any more.
    pub(super) fn check(&self, named: &Named) -> Result<(), String> {
        let reason = self.misplaced(named.pid, named.owner);
        reason.map_or(Ok(()), |reason| Err(format!("{}: {reason}", named.path.display())))
    }

    /// The file that names this process.
    pub(super) fn of(
        &self,
        process: &Process,
        names: &ThreadNames,
        (name, uuid): (&str, &str),
    ) -> Result<Option<StatusFile>, StatusError> {
        // Without a namespace of its own, the file has the numbers that this process has.
        let named = |pid: i32| match self.daemon.as_ref().and_then(|daemon| daemon.inside) {
            None => Some(pid),
            Some(_) => names.ours(pid.into()),
        };
        let found = self.files(name, uuid)?.into_iter().map(|found| found.file);
        Ok(found.into_iter().find(|file| named(file.pid) == Some(process.pid())))
    }

    /// How the files of its domains number a process's threads.
    pub(super) fn thread_names(&self, process: &Process) -> ThreadNames {
        match self.daemon.as_ref().and_then(|daemon| daemon.inside) {
            None => ThreadNames::Ours,
            Some(_) => process.thread_names(),
        }
    }
}

impl Numbers {
    fn of(&mut self, inside: Namespace) -> &BTreeMap<i32, i32> {
        self.0.get_or_insert_with(|| {
            let pids = procfs::read_processes(Path::new("/proc")).unwrap_or_default();
            let number = |pid: i32| {
                // The namespace first: most processes are of another one.
                let status = (namespace(pid, "pid") == Some(inside))
                    .then(|| procfs::read_process(pid, "status", STATUS_LIMIT).ok())??;
                Some((*procfs::namespace_numbers(&status).last()?, pid))
            };
            pids.into_iter().filter_map(number).collect()
        })
    }
}

/// When a process started. `None`: it has ended.
fn start_of(pid: i32) -> Result<Option<u64>, ProcError> {
    let stat = match procfs::read_process(pid, "stat", STAT_LIMIT) {
        Err(ProcError::Gone { .. }) => return Ok(None),
        other => other?,
    };
    let ended = matches!(procfs::state(&stat), Some("Z" | "X") | None);
    Ok(procfs::start_time(&stat).filter(|_| !ended))
}

/// A namespace that a process is in. `kind` is its name in `/proc`.
fn namespace(pid: i32, kind: &str) -> Option<Namespace> {
    let found = fs::metadata(format!("/proc/{pid}/ns/{kind}")).ok()?;
    Some((found.dev(), found.ino()))
}

/// Users that a process has: its own, the one that counts, the saved one and that of the file system.
fn users(pid: i32) -> Option<[u32; 4]> {
    let status = procfs::read_process(pid, "status", STATUS_LIMIT).ok()?;
    procfs::users(&status)
}

/// Has the process the same directory at this path as this process?
pub(super) fn shares_directory(pid: i32, directory: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let there = Path::new("/proc").join(pid.to_string()).join("root");
    let path = directory.strip_prefix("/").unwrap_or(directory);
    id(&there.join(path)).is_some_and(|there| id(directory) == Some(there))
}

/// The socket that a URI names: its parameter `socket`, of a connection on this host.
fn socket_of(uri: &str) -> Option<PathBuf> {
    let (scheme, rest) = uri.split_once("://")?;
    let transport = scheme.split_once('+').map_or("unix", |(_, transport)| transport);
    let (path, query) = rest.split_once('?')?;
    if transport != "unix" || !path.starts_with('/') {
        return None;
    }
    let query = query.split_once('#').map_or(query, |(query, _)| query);
    let value = query.split(['&', ';']).find_map(|parameter| parameter.strip_prefix("socket="))?;
    let path = PathBuf::from(unescape(value)?);
    path.is_absolute().then_some(path)
}

/// A value of a URI: `%2F` stands for a slash.
fn unescape(value: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        bytes.push(u8::try_from(digit()? * 16 + digit()?).ok()?);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_of_a_uri_is_found() {
        let socket = |uri: &str| socket_of(uri).map(|path| path.display().to_string());
        let some = |path: &str| Some(path.to_owned());
        assert_eq!(socket("qemu+unix:///session?socket=/run/l"), some("/run/l"));
        assert_eq!(socket("qemu:///system?mode=direct&socket=%2Frun%2fa%20b#x"), some("/run/a b"));
        assert_eq!(socket("qemu+unix:///system?name=x;socket=/l"), some("/l"));
        for none in [
            "qemu:///system",
            "qemu+unix:///system?socket=",
            "qemu+unix:///system?socket=l",
            "qemu+unix:///system?socket=/%2",
            "qemu+unix:///system?socket=/%ff",
            "qemu+ssh:///system?socket=/l",
            "qemu+unix://far/system?socket=/l",
            "socket=/l",
        ] {
            assert_eq!(socket(none), None, "{none}");
        }
    }
}
