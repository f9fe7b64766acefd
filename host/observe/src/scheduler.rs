//! scx_vnuma, the sched_ext scheduler of vCPU threads: is it loaded, and the maps that it shares.
//!
//! It pins its maps in [`DIRECTORY`]. They outlive a scheduler that is killed, so that they say nothing of whether it runs;
//! that is what the kernel says in `/sys/kernel/sched_ext`. The next scheduler pins other maps, under another instance number.

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use vnuma_abi_bpf::sched::{
    Assignment, COUNT_KEPT, COUNT_LOCAL, COUNT_PLACED, COUNT_PREEMPTED, COUNT_REMOTE, COUNT_STARVED,
    COUNT_THROTTLED, Header, MAGIC, MASK_WORDS, PLACED, STEAL_BLIND, STEAL_PLACE, STEAL_PRESSURE, VERSION,
};
use vnuma_model::{CpuSet, Steal};

/// Where the maps are pinned: only root may enter it.
pub const DIRECTORY: &str = "/sys/fs/bpf/vnuma";
/// The name that the scheduler has in the kernel.
pub const OPS: &str = "vnuma";
/// Files of the maps.
pub const HEADER: &str = "header";
/// See [`HEADER`].
pub const ASSIGNMENTS: &str = "assignments";
/// See [`HEADER`].
pub const COUNTS: &str = "counts";

/// Where the kernel says which scheduler is loaded.
const SYSFS: &str = "sys/kernel/sched_ext";
/// Longest file read there, in bytes.
const LIMIT: usize = 256;

/// Why scx_vnuma cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SchedulerError {
    /// The kernel has no sched_ext.
    #[error("this kernel has no sched_ext (there is no /{SYSFS})")]
    NoSchedExt,
    /// No sched_ext scheduler is loaded.
    #[error("no sched_ext scheduler is loaded; scx_vnuma is not running")]
    NotLoaded,
    /// Another one is.
    #[error("another sched_ext scheduler is loaded, `{ops}`; the kernel takes one at a time")]
    Foreign {
        /// Its name.
        ops: String,
    },
    /// A file of the kernel cannot be read.
    #[error("{}: {source}", path.display())]
    Sysfs {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A map cannot be used.
    #[error("{}: {problem}", path.display())]
    Map {
        /// Where it is pinned.
        path: PathBuf,
        /// Why.
        problem: String,
    },
}

/// Opens the directory of the maps. Where any user can make directories in the file system of BPF, another one may have made it: then
/// the maps may be of that user, and what is in it is not touched.
pub fn open_directory(directory: &Path) -> Result<File, SchedulerError> {
    let wrong = |problem: String| SchedulerError::Map { path: directory.to_owned(), problem };
    let flags = nix::libc::O_DIRECTORY | nix::libc::O_NOFOLLOW;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(directory);
    let opened = opened.map_err(|error| wrong(error.to_string()))?;
    let found = opened.metadata().map_err(|error| wrong(error.to_string()))?;
    if let Some(why) = vnuma_process::own::foreign(&found) {
        return Err(wrong(why));
    }
    match found.mode() & 0o7777 {
        mode if mode & 0o077 != 0 => {
            Err(wrong(format!("mode = {mode:o}: no user but its owner may enter it")))
        }
        _ => Ok(opened),
    }
}

/// The name of the sched_ext scheduler that is loaded, if there is one. `root`: `/`, or that of a recorded server.
pub fn loaded_scheduler(root: &Path) -> Result<Option<String>, SchedulerError> {
    let directory = root.join(SYSFS);
    if !directory.exists() {
        return Err(SchedulerError::NoSchedExt);
    }
    let read = |name: &str| {
        let path = directory.join(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(vnuma_process::text::sanitize(text.trim(), LIMIT))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(SchedulerError::Sysfs { path, source }),
        }
    };
    // The directory `root` is there while one is loaded, and a moment longer.
    match read("state")?.as_deref() {
        Some("enabled") => Ok(read("root/ops")?),
        _ => Ok(None),
    }
}

/// What is decided of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// Its process.
    pub pid: i32,
    /// Another one than before: it is taken to its place, once.
    pub epoch: u64,
    /// LLC references in a million instructions; 0 if not known.
    pub pressure: u32,
    /// CPUs of its place. `None`: it has none.
    pub place: Option<CpuSet>,
}

/// What the scheduler has done since it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Threads taken to their place.
    pub placed: u64,
    /// Stolen within a node.
    pub stolen_local: u64,
    /// Stolen from another node.
    pub stolen_remote: u64,
    /// Of both, because they had waited too long.
    pub starved: u64,
    /// Ran on before others, as they had had less than their share.
    pub kept: u64,
    /// Waits for a `cpu.max`.
    pub throttled: u64,
    /// Took a CPU from another thread when they woke.
    pub preempted: u64,
}

/// A scheduler that is loaded, and its maps.
#[derive(Debug)]
pub struct Scheduler {
    root: PathBuf,
    directory: PathBuf,
    instance: u64,
    full: bool,
    header: MapHandle,
    assignments: MapHandle,
    counts: MapHandle,
}

impl Scheduler {
    /// The one that is loaded on this host.
    pub fn open(root: &Path, directory: &Path) -> Result<Self, SchedulerError> {
        require(root)?;
        open_directory(directory)?;
        let header = open_map(directory, HEADER)?;
        let found = check_header(&read_header(&header, directory)?)
            .map_err(|problem| SchedulerError::Map { path: directory.join(HEADER), problem })?;
        Ok(Self {
            root: root.to_owned(),
            directory: directory.to_owned(),
            instance: found.instance,
            full: found.full != 0,
            header,
            assignments: open_map(directory, ASSIGNMENTS)?,
            counts: open_map(directory, COUNTS)?,
        })
    }

    /// Does it schedule all threads of the host?
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Is it the one that is loaded now?
    pub fn check(&self) -> Result<(), SchedulerError> {
        require(&self.root)?;
        open_directory(&self.directory)?;
        let header = open_map(&self.directory, HEADER)?;
        match read_header(&header, &self.directory)?.instance {
            instance if instance == self.instance => Ok(()),
            _ => Err(SchedulerError::NotLoaded),
        }
    }

    /// Which vCPUs it steals now.
    pub fn steals(&self) -> Result<Steal, SchedulerError> {
        Ok(steal_from_abi(read_header(&self.header, &self.directory)?.steal))
    }

    /// The program that decides is alive at this time, of `CLOCK_MONOTONIC`, and wants vCPUs to be stolen like this.
    pub fn beat(&self, now_ns: u64, steal: Steal) -> Result<(), SchedulerError> {
        // The scheduler itself does not write to the header after the map was pinned.
        let header = read_header(&self.header, &self.directory)?;
        let header = Header { heartbeat_ns: now_ns, steal: steal_to_abi(steal), ..header };
        self.update(&self.header, HEADER, &0u32.to_ne_bytes(), &header.to_bytes())
    }

    /// Decides about a thread.
    pub fn assign(&self, tid: i32, assigned: &Assigned) -> Result<(), SchedulerError> {
        let bytes = to_abi(assigned).to_bytes();
        self.update(&self.assignments, ASSIGNMENTS, &tid.to_ne_bytes(), &bytes)
    }

    /// Nothing is decided about a thread any more.
    pub fn forget(&self, tid: i32) {
        // The only way to fail is that it is not there.
        let _ = self.assignments.delete(&tid.to_ne_bytes());
    }

    /// Threads about which something is decided, and their processes.
    pub fn threads(&self) -> Vec<(i32, i32)> {
        let of = |key: Vec<u8>| {
            let value = self.assignments.lookup(&key, MapFlags::ANY).ok()??;
            let tid = i32::from_ne_bytes(key.get(..4)?.try_into().ok()?);
            Some((tid, Assignment::from_bytes(&value).pid.cast_signed()))
        };
        self.assignments.keys().filter_map(of).collect()
    }

    /// What it has done.
    pub fn counts(&self) -> Counts {
        let count = |which: u32| {
            let per_cpu = self.counts.lookup_percpu(&which.to_ne_bytes(), MapFlags::ANY).ok().flatten();
            let number = |bytes: &Vec<u8>| Some(u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?));
            per_cpu.unwrap_or_default().iter().filter_map(number).sum()
        };
        Counts {
            placed: count(COUNT_PLACED),
            stolen_local: count(COUNT_LOCAL),
            stolen_remote: count(COUNT_REMOTE),
            starved: count(COUNT_STARVED),
            kept: count(COUNT_KEPT),
            throttled: count(COUNT_THROTTLED),
            preempted: count(COUNT_PREEMPTED),
        }
    }

    fn update(&self, map: &MapHandle, name: &str, key: &[u8], value: &[u8]) -> Result<(), SchedulerError> {
        let failed = |error: libbpf_rs::Error| wrong(&self.directory, name, error);
        map.update(key, value, MapFlags::ANY).map_err(failed)
    }
}

fn require(root: &Path) -> Result<(), SchedulerError> {
    match loaded_scheduler(root)? {
        None => Err(SchedulerError::NotLoaded),
        Some(ops) if ops != OPS => Err(SchedulerError::Foreign { ops }),
        Some(_) => Ok(()),
    }
}

fn wrong(directory: &Path, name: &str, error: libbpf_rs::Error) -> SchedulerError {
    SchedulerError::Map { path: directory.join(name), problem: error.to_string() }
}

fn open_map(directory: &Path, name: &str) -> Result<MapHandle, SchedulerError> {
    MapHandle::from_pinned_path(directory.join(name)).map_err(|error| wrong(directory, name, error))
}

fn read_header(map: &MapHandle, directory: &Path) -> Result<Header, SchedulerError> {
    match map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY) {
        Ok(bytes) => Ok(Header::from_bytes(&bytes.unwrap_or_default())),
        Err(error) => Err(wrong(directory, HEADER, error)),
    }
}

/// Is it a header that this build understands?
fn check_header(header: &Header) -> Result<Header, String> {
    let fields = [
        ("magic", header.magic, MAGIC),
        ("version", header.version, VERSION),
        ("header_size", header.header_size, size_of::<Header>() as u32),
        ("assignment_size", header.assignment_size, size_of::<Assignment>() as u32),
    ];
    match fields.into_iter().find(|(_, found, expected)| found != expected) {
        Some((field, found, expected)) => Err(format!("{field}: {found}, expected {expected}")),
        None => Ok(*header),
    }
}

fn to_abi(assigned: &Assigned) -> Assignment {
    let mut cpus = [0; MASK_WORDS];
    for cpu in assigned.place.iter().flat_map(CpuSet::iter) {
        if let Some(word) = cpus.get_mut(cpu as usize / 64) {
            *word |= 1 << (cpu % 64);
        }
    }
    Assignment {
        // The scheduler takes 0 for none.
        epoch: assigned.epoch.max(1),
        pid: assigned.pid.cast_unsigned(),
        flags: if assigned.place.is_some() { PLACED } else { 0 },
        pressure: assigned.pressure,
        reserved: 0,
        cpus,
    }
}

fn steal_to_abi(steal: Steal) -> u32 {
    match steal {
        Steal::ByPressure => STEAL_PRESSURE,
        Steal::Blindly => STEAL_BLIND,
        Steal::WithinPlaces => STEAL_PLACE,
    }
}

/// What the scheduler does with this value.
fn steal_from_abi(value: u32) -> Steal {
    match value {
        STEAL_BLIND => Steal::Blindly,
        STEAL_PLACE => Steal::WithinPlaces,
        _ => Steal::ByPressure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(SYSFS).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn maps_in_a_directory_of_others_are_not_opened() {
        use std::os::unix::fs::{PermissionsExt, chown, symlink};
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("vnuma");
        let refused = |directory: &Path| open_directory(directory).map(drop).unwrap_err().to_string();
        assert!(refused(&directory).contains("vnuma: No such file"));
        fs::create_dir(&directory).unwrap();
        let set = |mode| fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
        set(0o700);
        open_directory(&directory).unwrap();
        set(0o755);
        assert!(refused(&directory).ends_with("vnuma: mode = 755: no user but its owner may enter it"));
        set(0o777);
        assert!(refused(&directory).ends_with("vnuma: mode = 777: no user but its owner may write to it"));
        set(0o700);
        let link = parent.path().join("link");
        symlink(&directory, &link).unwrap();
        assert!(refused(&link).contains("link: "));
        if nix::unistd::geteuid().is_root() {
            chown(&directory, Some(65_534), None).unwrap();
            assert!(refused(&directory).contains("vnuma: owner = 65534: must be root"));
        }
    }

    fn required(files: &[(&str, &str)]) -> String {
        match require(host(files).path()) {
            Ok(()) => "loaded".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn what_the_kernel_says_is_told_apart() {
        assert!(required(&[]).starts_with("this kernel has no sched_ext"));
        assert!(required(&[("state", "disabled\n")]).starts_with("no sched_ext scheduler is loaded"));
        let other = required(&[("state", "enabled\n"), ("root/ops", "simple\u{1b}[2J\n")]);
        assert!(other.starts_with("another sched_ext scheduler is loaded, `simple"), "{other}");
        assert!(!other.contains('\u{1b}'), "it is printed to terminals");
        assert_eq!(required(&[("state", "enabled\n"), ("root/ops", "vnuma\n")]), "loaded");
        // It is being unloaded.
        assert!(
            required(&[("state", "disabling\n"), ("root/ops", "vnuma\n")])
                .starts_with("no sched_ext scheduler")
        );
    }

    #[test]
    fn a_header_of_another_build_is_refused_with_field_and_value() {
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            header_size: size_of::<Header>() as u32,
            assignment_size: size_of::<Assignment>() as u32,
            ..Header::default()
        };
        assert_eq!(check_header(&header), Ok(header));
        let refused = |header: Header| check_header(&header).unwrap_err();
        assert_eq!(refused(Header { version: 1, ..header }), "version: 1, expected 3");
        assert_eq!(refused(Header { assignment_size: 8, ..header }), "assignment_size: 8, expected 1048");
        assert!(refused(Header::default()).starts_with("magic: 0,"));
    }

    #[test]
    fn each_way_to_steal_has_its_own_number() {
        let all = [Steal::ByPressure, Steal::Blindly, Steal::WithinPlaces];
        assert_eq!(all.map(steal_to_abi), [STEAL_PRESSURE, STEAL_BLIND, STEAL_PLACE]);
        assert_eq!(all.map(|steal| steal_from_abi(steal_to_abi(steal))), all);
        assert_eq!(steal_from_abi(99), Steal::ByPressure, "as the scheduler does");
    }

    #[test]
    fn a_place_is_a_mask_and_no_place_is_none() {
        let place = Some("0,63-64,8191".parse().unwrap());
        let assigned = Assigned { pid: 7, epoch: 0, pressure: 5, place };
        let abi = to_abi(&assigned);
        assert_eq!((abi.epoch, abi.pid, abi.flags, abi.pressure), (1, 7, PLACED, 5));
        assert_eq!((abi.cpus[0], abi.cpus[1], abi.cpus[127]), (1 | 1 << 63, 1, 1 << 63));
        assert_eq!(abi.cpus[2..127], [0; 125]);
        let abi = to_abi(&Assigned { place: None, ..assigned });
        assert_eq!((abi.flags, abi.cpus), (0, [0; MASK_WORDS]));
    }
}
