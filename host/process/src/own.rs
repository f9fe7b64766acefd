//! Files that a program keeps for its next run, in a directory of its own. They count if they belong to root or to the program's user,
//! and if no other user can write to them.

use std::{
    fs::{self, DirBuilder, File, Metadata, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

/// Why a file or a directory is not one's own. `None`: it is.
pub fn foreign(found: &Metadata) -> Option<String> {
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    if owner != 0 && owner != nix::unistd::geteuid().as_raw() {
        return Some(format!("owner = {owner}: must be root or the user of this program"));
    }
    (mode & 0o022 != 0).then(|| format!("mode = {mode:o}: no user but its owner may write to it"))
}

/// Checks that a directory is one's own, if it is there.
pub fn check_directory(directory: &Path) -> io::Result<()> {
    match fs::metadata(directory) {
        Ok(found) if !found.is_dir() => Err(refused("it is no directory".to_owned())),
        Ok(found) => foreign(&found).map_or(Ok(()), |why| Err(refused(why))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Opens a file of one's own for reading.
pub fn open(path: &Path) -> io::Result<File> {
    // One that is no file, a FIFO say, could be waited for.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(refused("it is no regular file".to_owned()));
    }
    #[cfg(any(test, feature = "faults"))]
    crate::faults::meet(crate::faults::of(&path.display().to_string(), None));
    foreign(&found).map_or(Ok(file), |why| Err(refused(why)))
}

/// Writes a file of one's own, atomically. Its directory is made if there is none.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", directory.display()));
        check_directory(directory).map_err(named)?;
    }
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    // A process may have been killed here.
    let _ = fs::remove_file(&new);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    let written = file.write_all(bytes).and_then(|()| fs::rename(&new, path));
    // What there is of it takes room on a file system that has none.
    written.inspect_err(|_| drop(fs::remove_file(&new)))
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs::Permissions,
        io::Read,
        os::unix::fs::{PermissionsExt, chown, symlink},
    };

    #[test]
    fn what_was_written_is_read_and_what_others_can_write_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("records/7.json");
        write(&path, b"one").unwrap();
        write(&path, b"two").unwrap();
        let mut text = String::new();
        open(&path).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), fs::read_dir(path.parent().unwrap()).unwrap().count()), ("two", 1));
        let refused = |path: &Path| open(path).unwrap_err().to_string();
        fs::set_permissions(&path, Permissions::from_mode(0o620)).unwrap();
        assert_eq!(refused(&path), "mode = 620: no user but its owner may write to it");
        let link = dir.path().join("link");
        symlink(&path, &link).unwrap();
        assert_eq!(open(&link).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert_eq!(refused(dir.path()), "it is no regular file");
        nix::unistd::mkfifo(&dir.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(refused(&dir.path().join("fifo")), "it is no regular file", "it is not waited for");
        let shared = dir.path().join("shared");
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, Permissions::from_mode(0o1777)).unwrap();
        let error = write(&shared.join("7.json"), b"x").unwrap_err().to_string();
        assert_eq!(
            error,
            format!("{}: mode = 1777: no user but its owner may write to it", shared.display())
        );
        check_directory(&dir.path().join("none")).unwrap();
        assert!(check_directory(&path).unwrap_err().to_string().contains("no directory"));
    }

    #[test]
    fn what_belongs_to_another_user_is_not_read() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: only root can give a file to another user");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("7.json");
        write(&path, b"x").unwrap();
        chown(&path, Some(65_534), None).unwrap();
        assert_eq!(
            open(&path).unwrap_err().to_string(),
            "owner = 65534: must be root or the user of this program"
        );
        chown(dir.path(), Some(65_534), None).unwrap();
        assert!(write(&path, b"y").unwrap_err().to_string().contains(": owner = 65534: must be root"));
    }
}
