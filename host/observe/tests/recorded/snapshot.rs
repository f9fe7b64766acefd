//! hwloc's recorded servers: copies of `/sys` and `/proc`, one archive each.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::TempDir;

/// The archives, in order of their names.
pub fn archives() -> Vec<PathBuf> {
    let directory = PathBuf::from(
        env::var_os("VNUMA_RECORDED_SERVERS")
            .expect("VNUMA_RECORDED_SERVERS is the folder of the archives; `cargo xtask servers` fetches them and sets it"),
    );
    let entries = fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut archives: Vec<_> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    archives.sort();
    archives
}

/// A directory in memory where there is one: a server is ten thousand tiny files.
pub fn scratch() -> TempDir {
    let in_memory = Path::new("/dev/shm");
    let directory = if in_memory.is_dir() { tempfile::tempdir_in(in_memory) } else { tempfile::tempdir() };
    directory.expect("a temporary directory")
}

/// A server, unpacked for as long as this lives: all of them at once would take half a gigabyte.
pub struct Snapshot {
    pub name: String,
    directory: TempDir,
}

impl Snapshot {
    pub fn unpack(archive: &Path) -> Self {
        let name = archive.file_name().and_then(|name| name.to_str()).expect("UTF-8");
        let name = name.trim_end_matches(".tar.bz2").to_owned();
        let directory = scratch();
        let mut tar = Command::new("tar");
        // Neither we nor lstopo's answer need these, and they are half of all files.
        let unread = ["cpufreq", "cpuidle", "thermal_throttle", "microcode", "power", "uevent"];
        tar.args(unread.map(|name| format!("--exclude=*/cpu/cpu*/{name}")));
        tar.arg("-xjf").arg(archive).arg("-C").arg(directory.path());
        assert!(tar.status().expect("tar").success(), "{} cannot be unpacked", archive.display());
        Self { name, directory }
    }

    /// The directory that holds `sys`: it has the name of the archive or nearly so, or lies one below that.
    pub fn root(&self) -> PathBuf {
        let mut candidates = vec![self.directory.path().to_owned()];
        while let Some(directory) = candidates.pop() {
            if directory.join("sys/devices/system").is_dir() {
                return directory;
            }
            let entries = fs::read_dir(&directory).expect("a readable folder").flatten();
            let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            candidates.extend(directories.map(|entry| entry.path()));
        }
        panic!("{}: no sys/devices/system in it", self.name);
    }
}
