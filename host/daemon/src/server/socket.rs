//! The API's listening socket: one daemon, the right modes, and no leftovers. And the directory of records: one daemon as well.

use nix::{
    fcntl::{Flock, FlockArg},
    unistd::{Gid, Group, chown},
};
use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, Read, Seek, Write},
    os::unix::{
        fs::{FileTypeExt, OpenOptionsExt, PermissionsExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
};
use tracing::warn;

/// Why the socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another daemon serves it.
    #[error("{}: another vnumad{owner} serves this socket", socket.display())]
    InUse {
        /// The socket.
        socket: PathBuf,
        /// Its process, if known.
        owner: String,
    },
    /// Another daemon keeps its records there. Both would take over the channels that these name.
    #[error("{}: another vnumad{owner} keeps its records there (publish.records)", directory.display())]
    RecordsInUse {
        /// The directory.
        directory: PathBuf,
        /// Its process, if known.
        owner: String,
    },
    /// Something else is in its place.
    #[error("{}: exists and is not a socket; it is left alone", socket.display())]
    NoSocket {
        /// The path.
        socket: PathBuf,
    },
    /// The group is not known.
    #[error("{key} = \"{group}\": there is no such group")]
    NoGroup {
        /// The key of the configuration.
        key: &'static str,
        /// Its name.
        group: String,
    },
    /// The system refused.
    #[error("{}: {act}: {source}", path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// What was tried.
        act: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A listening socket that is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct ApiSocket {
    path: PathBuf,
    /// Held as long as the socket is served. The file stays: removing it would let two daemons
    /// lock different files of one name.
    _lock: Flock<File>,
}

impl ApiSocket {
    /// Listens at `path`.
    pub(crate) fn listen(path: &Path, group: Option<Gid>) -> Result<(Self, UnixListener), SocketError> {
        let system = |act| move |source: io::Error| SocketError::System { path: path.into(), act, source };
        if let Some(directory) = path.parent() {
            create_directory(directory).map_err(system("creating its directory"))?;
        }
        let lock = lock(path, |owner| SocketError::InUse { socket: path.into(), owner })?;
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(SocketError::NoSocket { socket: path.into() });
            }
            // The lock is free, so no vnumad listens there.
            Ok(_) => {
                std::fs::remove_file(path).map_err(system("removing the socket of an earlier vnumad"))?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(system("looking at it")(error)),
        }
        // No other user can connect before the mode is set: vnumad runs with umask 077.
        let listener = UnixListener::bind(path).map_err(system("listening"))?;
        let socket = Self { path: path.into(), _lock: lock };
        if group.is_some() {
            chown(path, None, group).map_err(|error| system("setting its group")(error.into()))?;
        }
        std::fs::set_permissions(path, Permissions::from_mode(0o660)).map_err(system("setting its mode"))?;
        listener.set_nonblocking(true).map_err(system("listening"))?;
        Ok((socket, listener))
    }
}

impl Drop for ApiSocket {
    fn drop(&mut self) {
        // The next daemon removes it if this one cannot.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Creates missing directories, which everybody may enter.
fn create_directory(directory: &Path) -> io::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    if let Some(parent) = directory.parent() {
        create_directory(parent)?;
    }
    std::fs::create_dir(directory)?;
    std::fs::set_permissions(directory, Permissions::from_mode(0o755))
}

/// The directory of records, for one daemon. Held as long as this lives.
#[derive(Debug)]
pub(crate) struct RecordsLock {
    _lock: Flock<File>,
}

impl RecordsLock {
    pub(crate) fn take(directory: &Path) -> Result<Self, SocketError> {
        let foreign =
            |source| SocketError::System { path: directory.into(), act: "keeping records there", source };
        vnuma_process::own::check_directory(directory).map_err(foreign)?;
        if let Some(parent) = directory.parent() {
            create_directory(parent).map_err(|source| SocketError::System {
                path: directory.into(),
                act: "creating the directory that it is in",
                source,
            })?;
        }
        let in_use = |owner| SocketError::RecordsInUse { directory: directory.into(), owner };
        Ok(Self { _lock: lock(directory, in_use)? })
    }
}

/// Locks the file beside `path`. `in_use`: the error where another process has.
fn lock(path: &Path, in_use: impl FnOnce(String) -> SocketError) -> Result<Flock<File>, SocketError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let path = PathBuf::from(name);
    let system = |act| {
        let path = path.clone();
        move |source: io::Error| SocketError::System { path, act, source }
    };
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(false).mode(0o644);
    let file = options.custom_flags(nix::libc::O_NOFOLLOW).open(&path).map_err(system("opening the lock"))?;
    let mut file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(file, _)| {
        let mut owner = String::new();
        // Only for the message.
        let _ = file.take(16).read_to_string(&mut owner);
        let owner = owner.trim().parse::<u32>().map(|pid| format!(" (process {pid})")).unwrap_or_default();
        in_use(owner)
    })?;
    let written =
        file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id()));
    if let Err(error) = written {
        // It only names this process in the message for another one. A file system that is full is no reason not to serve.
        warn!(path = %path.display(), %error, "the lock does not say which process has it");
    }
    Ok(file)
}

/// The group that a key of the configuration names, if it does.
pub(crate) fn group_id(key: &'static str, name: Option<&str>) -> Result<Option<Gid>, SocketError> {
    let Some(name) = name else { return Ok(None) };
    match Group::from_name(name) {
        Ok(Some(group)) => Ok(Some(group.gid)),
        _ => Err(SocketError::NoGroup { key, group: name.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn two_daemons_refuse_each_other_and_a_stale_socket_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("run/vnuma/api.sock");
        let (socket, listener) = ApiSocket::listen(&path, None).expect("listens");
        let error = ApiSocket::listen(&path, None).expect_err("in use").to_string();
        assert!(error.contains(&format!("another vnumad (process {})", std::process::id())), "{error}");
        assert!(UnixStream::connect(&path).is_ok(), "the first one still listens");
        let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        assert_eq!((mode(&path), mode(path.parent().expect("a parent"))), (0o660, 0o755));

        drop(socket);
        assert!(!path.exists());
        drop(listener);

        // A killed daemon leaves its socket, and no lock.
        drop(UnixListener::bind(&path).expect("bound"));
        assert!(path.exists());
        let (_socket, _listener) = ApiSocket::listen(&path, None).expect("replaces it");
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn two_daemons_do_not_share_records() {
        let directory = tempfile::tempdir().expect("a directory");
        let records = directory.path().join("run/vnuma/channels");
        let first = RecordsLock::take(&records).expect("taken");
        let error = RecordsLock::take(&records).expect_err("in use").to_string();
        let owner = format!("another vnumad (process {}) keeps its records there", std::process::id());
        assert!(error.contains(&owner), "{error}");
        assert!(RecordsLock::take(&records.with_extension("other")).is_ok(), "those of another one");
        drop(first);
        assert!(RecordsLock::take(&records).is_ok());
        assert!(!records.exists(), "it is made with the first record");
    }

    /// Others could have vnumad give back masks, or take over channels, of their making.
    #[test]
    fn no_records_are_kept_where_others_can_write() {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).expect("set");
        let error = RecordsLock::take(directory.path()).expect_err("refused").to_string();
        assert!(
            error.contains(": keeping records there: mode = 777: no user but its owner may write"),
            "{error}"
        );
    }

    #[test]
    fn what_is_no_socket_is_not_touched() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("precious");
        std::fs::write(&path, "text").expect("written");
        let error = ApiSocket::listen(&path, None).expect_err("refused").to_string();
        assert!(error.contains("is not a socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).expect("still there"), "text");
    }

    #[test]
    fn an_unknown_group_is_named() {
        assert_eq!(group_id("api.group", None).expect("none"), None);
        let error = group_id("api.group", Some("no-such-group")).expect_err("refused");
        assert_eq!(error.to_string(), "api.group = \"no-such-group\": there is no such group");
    }
}
