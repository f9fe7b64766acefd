//! The directory outside the checkout that everything expensive is kept in, and its locks.
//!
//! A directory `X` of the cache is written by the holder of the exclusive lock on `X.lock`, into a temporary
//! directory beside it that is renamed at the end. A user of `X` holds the shared lock, so that nobody
//! prunes it meanwhile. Locks are `flock`s: they end with the process, however it ends.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};

/// Where the project keeps what it builds outside the checkout: `$VNUMA_CACHE`, else `$HOME/.cache/vnuma`.
pub fn cache_dir() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/root".into()));
    match std::env::var_os("VNUMA_CACHE") {
        Some(directory) if !directory.is_empty() => PathBuf::from(directory),
        _ => home().join(".cache/vnuma"),
    }
}

/// The name under which something is kept: of what it is for, and paths and contents of what it is made of.
pub(crate) fn hash(release: &str, sources: &[(PathBuf, Vec<u8>)]) -> String {
    let mut digest = Sha256::new();
    digest.update(release.as_bytes());
    for (path, content) in sources {
        for part in [path.as_os_str().as_encoded_bytes(), content] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
    }
    digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// A held lock; dropping it releases it.
pub(crate) type Lock = Flock<File>;

fn lock_file(path: &Path) -> io::Result<File> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    File::options().create(true).truncate(false).read(true).write(true).open(PathBuf::from(name))
}

/// Waits for the lock of `path`.
pub(crate) fn lock(path: &Path, how: FlockArg) -> io::Result<Lock> {
    Flock::lock(lock_file(path)?, how).map_err(|(_, errno)| errno.into())
}

/// Takes the exclusive lock of `path` if it is free.
pub(crate) fn try_lock(path: &Path) -> io::Result<Option<Lock>> {
    match Flock::lock(lock_file(path)?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}

/// Removes a directory tree of the cache; refuses where something is mounted inside, as removing
/// would then reach into the machine.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    let absolute = match fs::canonicalize(path) {
        Ok(absolute) => absolute,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    // Field 5 of a line is the mount point.
    let inside = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .find(|p| Path::new(p).starts_with(&absolute));
    if let Some(point) = inside {
        return Err(io::Error::other(format!("{point} is a mount inside it; unmount it first")));
    }
    fs::remove_dir_all(&absolute)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_lock_keeps_the_exclusive_one_away() {
        let directory = tempfile::tempdir().unwrap();
        let entry = directory.path().join("entry");
        let shared = lock(&entry, FlockArg::LockShared).unwrap();
        assert!(try_lock(&entry).unwrap().is_none());
        drop(shared);
        assert!(try_lock(&entry).unwrap().is_some());
    }

    #[test]
    fn the_hash_follows_kernel_names_and_contents() {
        let file = |name: &str, text: &str| (PathBuf::from(name), text.as_bytes().to_vec());
        let one = hash("6.12", &[file("a", "bc"), file("d", "")]);
        assert_eq!(one, hash("6.12", &[file("a", "bc"), file("d", "")]));
        let others = [
            hash("6.13", &[file("a", "bc"), file("d", "")]),
            hash("6.12", &[file("ab", "c"), file("d", "")]),
            hash("6.12", &[file("a", "bcd"), file("", "")]),
        ];
        assert!(others.iter().all(|other| *other != one));
    }

    #[test]
    fn removing_what_is_not_there_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        remove_tree(&directory.path().join("nothing")).unwrap();
    }

    #[test]
    fn a_mount_inside_stops_the_removal() {
        let error = remove_tree(Path::new("/proc")).unwrap_err();
        assert!(error.to_string().contains("/proc"), "{error}");
    }
}
