//! Files of `/proc/PID` and `/proc/PID/task/TID`: the one place that reads and parses them.
//!
//! Part of their content is chosen by the process (names, command lines), so it is not trusted: every file is read up to a limit,
//! and every parser survives any text. An error names the file, and the field and the value if that is what is wrong.

use crate::text::sanitize_short;
use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Read},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt},
    },
    path::Path,
};
use vnuma_model::{CpuId, CpuSet};

/// `stat` is a line of 52 numbers and a name of up to 64 bytes.
pub const STAT_LIMIT: u64 = 4096;

/// Nearly all files are shorter.
const USUAL_SIZE: u64 = 4096;

/// `status` has some 60 lines; the longest are a mask and a list of 8192 CPUs, 40 KiB at worst.
pub const STATUS_LIMIT: u64 = 64 * 1024;

/// `cgroup` has a line for each hierarchy, some 15 with cgroup v1, each with a path of at most 4096 bytes.
const CGROUP_LIMIT: u64 = 64 * 1024;

/// `fdinfo` has a few lines; that of an eventpoll has one for each file, which is not needed here.
const FILE_INFO_LIMIT: u64 = 4096;

/// CPUs that a kernel of today can have (`NR_CPUS`).
const CPUS: usize = 8192;

/// Most threads of a process that are listed: the most vCPUs of a VM and as many others.
const THREAD_LIMIT: usize = 8192;

/// Why a fact about a process or thread is unknown.
#[derive(Debug, thiserror::Error)]
pub enum ProcError {
    /// It has ended or never existed.
    #[error("{path}: no such process or thread")]
    Gone {
        /// The file.
        path: String,
    },
    /// A file could not be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// A value is invalid.
    #[error("{path}: {field} is `{value}`: {reason}")]
    Value {
        /// The file.
        path: String,
        /// Which part of it.
        field: &'static str,
        /// What was found, sanitized.
        value: String,
        /// Why it cannot be.
        reason: String,
    },
}

impl ProcError {
    fn reading(path: impl Into<String>, source: io::Error) -> Self {
        let path = path.into();
        if is_gone(&source) { Self::Gone { path } } else { Self::Read { path, source } }
    }
}

/// A file of a process, up to `limit` bytes. What is not UTF-8 is replaced: a name may be any bytes.
pub fn read_process(pid: i32, file: &str, limit: u64) -> Result<String, ProcError> {
    read(format!("/proc/{pid}/{file}"), pid > 0, limit)
}

/// A file of a thread of a process, up to `limit` bytes.
pub fn read_thread(pid: i32, tid: i32, file: &str, limit: u64) -> Result<String, ProcError> {
    read(format!("/proc/{pid}/task/{tid}/{file}"), pid > 0 && tid > 0, limit)
}

fn read(path: String, possible: bool, limit: u64) -> Result<String, ProcError> {
    if !possible {
        return Err(ProcError::Gone { path });
    }
    // With room for it at once, most files are read in one piece: the kernel makes the text anew for each.
    let mut bytes = Vec::with_capacity(limit.min(USUAL_SIZE) as usize);
    match File::open(&path).and_then(|file| file.take(limit).read_to_end(&mut bytes)) {
        Ok(_) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) => Err(ProcError::reading(path, error)),
    }
}

/// A short file of a process that is read repeatedly. It stays bound to that process: after its end reading fails, even if
/// the PID is in use again.
#[derive(Debug)]
pub struct KeptFile {
    file: File,
    path: String,
}

impl KeptFile {
    /// Opens a file of the main thread of a process.
    pub fn of_main_thread(pid: i32, file: &str) -> Result<Self, ProcError> {
        Self::of_thread(pid, pid, file)
    }

    /// Opens a file of a thread of a process. It stays bound to that thread.
    pub fn of_thread(pid: i32, tid: i32, file: &str) -> Result<Self, ProcError> {
        let path = format!("/proc/{pid}/task/{tid}/{file}");
        match File::open(&path) {
            Ok(file) => Ok(Self { file, path }),
            Err(error) => Err(ProcError::reading(path, error)),
        }
    }

    /// What is in it now, up to a page.
    pub fn read(&self) -> Result<String, ProcError> {
        let mut bytes = [0; USUAL_SIZE as usize];
        match self.file.read_at(&mut bytes, 0) {
            Ok(length) => Ok(String::from_utf8_lossy(&bytes[..length]).into_owned()),
            Err(error) => Err(ProcError::reading(&self.path, error)),
        }
    }
}

/// No such file, or it ended between open and read.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Is there such a thread?
pub fn thread_exists(pid: i32, tid: i32) -> bool {
    pid > 0 && tid > 0 && fs::exists(format!("/proc/{pid}/task/{tid}")).unwrap_or(false)
}

/// Threads of a process, the first [`THREAD_LIMIT`] of them.
pub fn threads(pid: i32) -> Result<Vec<i32>, ProcError> {
    let path = format!("/proc/{pid}/task");
    match fs::read_dir(&path) {
        Ok(entries) => {
            let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
            Ok(entries.take(THREAD_LIMIT).filter_map(number).collect())
        }
        Err(error) => Err(ProcError::reading(path, error)),
    }
}

/// A file of `/dev` that a process has open, or one without a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// Its descriptor.
    pub fd: i32,
    /// Its path in the mount namespace of the process, so that it is the process's to choose. Names without a path begin with
    /// `anon_inode:`.
    pub path: String,
    /// `major:minor` of the device that it is, whatever its path.
    pub number: Option<String>,
}

/// Most descriptors of a process, `fs.nr_open` by default. Tests have fewer, so that one can exceed it.
const FD_LIMIT: usize = if cfg!(test) { 1 << 10 } else { 1 << 20 };

/// Files of `/dev` and files without a name among the first `most` descriptors of a process, and whether these are all that it has.
/// `proc` is a directory as `/proc`.
///
/// What it can neither read nor write (`O_PATH`) does not count: any process can have any file like that.
pub fn read_open_files(proc: &Path, pid: i32, most: usize) -> Result<(Vec<OpenFile>, bool), ProcError> {
    let (mut left, mut all) = (most, true);
    let files = read_open_files_while(proc, pid, || {
        all = left > 0;
        left = left.saturating_sub(1);
        all
    })?;
    Ok((files, all))
}

/// As [`read_open_files`], for as long as `goes_on` says so: a process decides how many it has.
pub fn read_open_files_while(
    proc: &Path,
    pid: i32,
    mut goes_on: impl FnMut() -> bool,
) -> Result<Vec<OpenFile>, ProcError> {
    let directory = proc.join(pid.to_string()).join("fd");
    let mut files = Vec::new();
    for (fd, target) in open_files(&directory)?.take(FD_LIMIT).take_while(|_| goes_on()) {
        let link = directory.join(fd.to_string());
        let known = target.starts_with("/dev/") || target.starts_with("anon_inode:");
        if known && is_open(&link) {
            let path = target.strip_suffix(" (deleted)").unwrap_or(&target).to_owned();
            files.push(OpenFile { fd, path, number: device_number(&link) });
        }
    }
    files.sort_by_key(|file| file.fd);
    Ok(files)
}

/// Whether a process has a file of this path open, among its first `most` descriptors: a process may have half a million, which
/// takes a second to look at.
pub fn has_open(proc: &Path, pid: i32, path: &str, most: usize) -> Result<bool, ProcError> {
    let directory = proc.join(pid.to_string()).join("fd");
    Ok(open_files(&directory)?.take(most).any(|(_, target)| target == path))
}

/// Descriptors of a process, each with what it shows. Those that it closes meanwhile are left out.
fn open_files(directory: &Path) -> Result<impl Iterator<Item = (i32, String)> + '_, ProcError> {
    let reading = |error| ProcError::reading(directory.display().to_string(), error);
    let entries = fs::read_dir(directory).map_err(reading)?;
    Ok(entries.map(|entry| {
        let fd = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let shown =
            |fd: i32| fs::read_link(directory.join(fd.to_string())).ok()?.into_os_string().into_string().ok();
        fd.and_then(|fd| Some((fd, shown(fd)?))).unwrap_or_default()
    }))
}

/// The rights of the link are those with which the file was opened.
fn is_open(link: &Path) -> bool {
    fs::symlink_metadata(link).is_ok_and(|found| found.mode() & 0o600 != 0)
}

/// `major:minor` of a file that is a character device. A file system in user space is not asked: it might not answer.
fn device_number(link: &Path) -> Option<String> {
    let path = CString::new(link.as_os_str().as_bytes()).ok()?;
    // SAFETY: a `statx` of zeroes is one.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    let (flags, wanted) = (libc::AT_STATX_DONT_SYNC, libc::STATX_TYPE);
    // SAFETY: the path ends with zero, the kernel fills the structure, and both live through the call.
    let result = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, wanted, &raw mut found) };
    let is_device = u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFCHR;
    (result == 0 && is_device).then(|| format!("{}:{}", found.stx_rdev_major, found.stx_rdev_minor))
}

/// What the kernel tells of an open file of a process.
pub fn read_file_info(proc: &Path, pid: i32, fd: i32) -> Result<String, ProcError> {
    let path = proc.join(pid.to_string()).join("fdinfo").join(fd.to_string());
    read(path.display().to_string(), pid > 0 && fd >= 0, FILE_INFO_LIMIT)
}

/// The value of a field of `fdinfo`; empty if there is none.
pub fn file_info<'a>(info: &'a str, field: &str) -> &'a str {
    let line = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap_or_default().trim()
}

/// Numbers of all processes, rising.
pub fn read_processes(proc: &Path) -> Result<Vec<i32>, ProcError> {
    let entries =
        fs::read_dir(proc).map_err(|source| ProcError::Read { path: proc.display().to_string(), source })?;
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let mut pids: Vec<i32> = entries.filter_map(number).filter(|pid| *pid > 0).collect();
    pids.sort_unstable();
    Ok(pids)
}

/// The name of a process, sanitized: it is the process's to choose.
pub fn read_name(proc: &Path, pid: i32) -> Result<String, ProcError> {
    let path = proc.join(pid.to_string()).join("comm");
    Ok(sanitize_short(&read(path.display().to_string(), pid > 0, STAT_LIMIT)?))
}

/// CPUs that a thread may run on.
pub fn read_allowed(pid: i32, tid: i32) -> Result<CpuSet, ProcError> {
    let status = read_thread(pid, tid, "status", STATUS_LIMIT)?;
    let list = allowed_list(&status);
    list.parse::<CpuSet>().map_err(|reason| {
        value(format!("/proc/{pid}/task/{tid}/status"), "Cpus_allowed_list", list, reason.to_string())
    })
}

/// Nodes that a process may have memory of, as its cpuset says.
pub fn read_allowed_nodes(pid: i32) -> Result<CpuSet, ProcError> {
    let status = read_process(pid, "status", STATUS_LIMIT)?;
    let list = status_field(&status, "Mems_allowed_list");
    list.parse::<CpuSet>()
        .map_err(|reason| value(format!("/proc/{pid}/status"), "Mems_allowed_list", list, reason.to_string()))
}

/// CPUs that the thread with this TID may run on and that are online. It may belong to any process: check afterwards that it is
/// the intended one. Much cheaper than [`read_allowed`].
pub fn read_affinity(tid: i32) -> Result<CpuSet, ProcError> {
    let path = || format!("/proc/{tid}");
    // 0 stands for the caller.
    if tid <= 0 {
        return Err(ProcError::Gone { path: path() });
    }
    let mut mask = [0u64; CPUS / u64::BITS as usize];
    // SAFETY: the kernel writes at most the given number of bytes, all of which are in `mask`.
    let length =
        unsafe { libc::syscall(libc::SYS_sched_getaffinity, tid, size_of_val(&mask), mask.as_mut_ptr()) };
    if length < 0 {
        return Err(ProcError::reading(path(), io::Error::last_os_error()));
    }
    Ok(CpuSet::from_words(&mask))
}

/// The CPU that a thread runs on, or ran on last.
pub fn read_last_cpu(pid: i32, tid: i32) -> Result<CpuId, ProcError> {
    field(pid, tid, "stat", "processor (field 39)", last_cpu)
}

/// When a thread started, in clock ticks since boot. Number and start time together are unique.
pub fn read_start_time(pid: i32, tid: i32) -> Result<u64, ProcError> {
    field(pid, tid, "stat", "starttime (field 22)", start_time)
}

/// Times of a thread since it began, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// On a CPU.
    pub ran_ns: u64,
    /// Ready to run, without a CPU.
    pub waited_ns: u64,
}

/// How long a thread ran and waited for a CPU.
pub fn read_cpu_times(pid: i32, tid: i32) -> Result<CpuTimes, ProcError> {
    field(pid, tid, "schedstat", "run and wait time (fields 1 and 2)", cpu_times)
}

/// What the scheduler knows of a thread: the CPU that it runs on or ran on last, and whether its class is a real-time one.
pub fn read_cpu_and_class(pid: i32, tid: i32) -> Result<(CpuId, bool), ProcError> {
    let both = |stat: &str| last_cpu(stat).zip(real_time(stat));
    field(pid, tid, "stat", "processor or policy (fields 39 and 41)", both)
}

/// The control group of a thread in the hierarchy of cgroup v2, as a path from its root. `None`: that is not in use.
pub fn read_cgroup(pid: i32, tid: i32) -> Result<Option<String>, ProcError> {
    let text = read_thread(pid, tid, "cgroup", CGROUP_LIMIT)?;
    let Some(path) = cgroup_path(&text) else { return Ok(None) };
    if !path.starts_with('/') {
        let file = format!("/proc/{pid}/task/{tid}/cgroup");
        return Err(value(file, "path of cgroup v2", path, "must begin with /".to_owned()));
    }
    Ok(Some(path.to_owned()))
}

/// What a file of a thread has of it, which is a number or several.
fn field<T>(
    pid: i32,
    tid: i32,
    file: &str,
    name: &'static str,
    of: impl Fn(&str) -> Option<T>,
) -> Result<T, ProcError> {
    let text = KeptFile::of_thread(pid, tid, file)?.read()?;
    of(&text)
        .ok_or_else(|| value(format!("/proc/{pid}/task/{tid}/{file}"), name, &text, "no number".to_owned()))
}

fn value(path: String, field: &'static str, value: &str, reason: String) -> ProcError {
    ProcError::Value { path, field, value: sanitize_short(value), reason }
}

/// A field of a `stat` file, counted from 1 as proc(5) does. The name (field 2) may contain anything, parentheses and
/// line breaks included, so fields are counted from its end.
fn stat_field(stat: &str, field: usize) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(field.checked_sub(3)?)
}

/// Field 3 of a `stat` file: what the process does, in a letter.
pub fn state(stat: &str) -> Option<&str> {
    stat_field(stat, 3)
}

/// Field 22 of a `stat` file: when it started.
pub fn start_time(stat: &str) -> Option<u64> {
    stat_field(stat, 22)?.parse().ok()
}

/// Field 39 of a `stat` file: the CPU that it runs on, or ran on last.
pub fn last_cpu(stat: &str) -> Option<CpuId> {
    stat_field(stat, 39)?.parse().ok()
}

/// Field 41 of a `stat` file: is it SCHED_FIFO, SCHED_RR or SCHED_DEADLINE?
pub fn real_time(stat: &str) -> Option<bool> {
    Some(is_real_time(stat_field(stat, 41)?.parse().ok()?))
}

/// Is this policy of the scheduler SCHED_FIFO, SCHED_RR or SCHED_DEADLINE?
pub fn is_real_time(policy: u32) -> bool {
    matches!(policy, 1 | 2 | 6)
}

/// A `schedstat` file: time on a CPU, time ready to run, number of times that it was put on a CPU.
pub fn cpu_times(schedstat: &str) -> Option<CpuTimes> {
    let mut fields = schedstat.split_ascii_whitespace().map(str::parse);
    let mut next = || fields.next()?.ok();
    Some(CpuTimes { ran_ns: next()?, waited_ns: next()? })
}

/// The path of cgroup v2 in a `cgroup` file.
pub fn cgroup_path(cgroup: &str) -> Option<&str> {
    cgroup.lines().find_map(|line| line.strip_prefix("0::"))
}

/// A field of a `status` file; empty if there is none. The name, in the first line, has its line breaks escaped by the kernel.
fn status_field<'a>(status: &'a str, key: &str) -> &'a str {
    let field = |line: &'a str| line.strip_prefix(key)?.strip_prefix(':');
    status.lines().find_map(field).unwrap_or_default().trim()
}

/// `Cpus_allowed_list` of a `status` file; empty if there is none.
pub fn allowed_list(status: &str) -> &str {
    status_field(status, "Cpus_allowed_list")
}

/// `NSpid` of a `status` file: the number in each PID namespace, from that of `/proc` to the innermost, its own.
pub fn namespace_numbers(status: &str) -> Vec<i32> {
    status_field(status, "NSpid").split_ascii_whitespace().map_while(|number| number.parse().ok()).collect()
}

/// `Uid` of a `status` file: the process's own user, the one by whose rights it acts, the saved one, and that of the file system.
pub fn users(status: &str) -> Option<[u32; 4]> {
    let mut users = status_field(status, "Uid").split_ascii_whitespace().map(|user| user.parse().ok());
    let mut next = || users.next()?;
    Some([next()?, next()?, next()?, next()?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_are_found_behind_a_hostile_name() {
        let numbers: Vec<String> = (4..=52).map(|field| (field * 10).to_string()).collect();
        let stat = format!("77 (a) R 1) 2\n(x) S {}", numbers.join(" "));
        assert_eq!((state(&stat), start_time(&stat), last_cpu(&stat)), (Some("S"), Some(220), Some(390)));
        for short in ["", "77", "77 (a)", "77 (a) S 1 2 3", "77 (a) \u{fffd}"] {
            assert_eq!((start_time(short), last_cpu(short)), (None, None), "{short}");
        }
    }

    #[test]
    fn fields_of_status() {
        let status = "Name:\tx\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1,4\nNSpid:\t4711\t12\t1\n";
        assert_eq!(allowed_list(status), "0-1,4");
        assert_eq!(namespace_numbers(status), [4711, 12, 1]);
        assert_eq!((allowed_list("Name: x"), namespace_numbers("NSpid:\t7 x 8")), ("", vec![7]));
        assert_eq!(users("Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5"), Some([1, 2, 3, 4]));
        assert_eq!((users("Uid:\t1\t2\t3"), users("Uid:\t1\t-2\t3\t4"), users("")), (None, None, None));
    }

    #[test]
    fn the_control_group_is_that_of_cgroup_v2() {
        let mixed = "12:cpu,cpuacct:/a\n1:name=systemd:/0::/b\n0::/machine.slice/vm 1.scope\n";
        assert_eq!(cgroup_path(mixed), Some("/machine.slice/vm 1.scope"));
        assert_eq!(
            (cgroup_path("0::/"), cgroup_path("4:cpu:/x\n"), cgroup_path("")),
            (Some("/"), None, None)
        );
        let (pid, tid) = (std::process::id().cast_signed(), nix::unistd::gettid().as_raw());
        let own = read_cgroup(pid, tid).unwrap();
        assert!(own.is_none_or(|path| path.starts_with('/')));
        assert!(matches!(read_cgroup(1, i32::MAX), Err(ProcError::Gone { .. })));
    }

    #[test]
    fn times_and_classes_are_read() {
        assert_eq!(cpu_times("12 34 5\n"), Some(CpuTimes { ran_ns: 12, waited_ns: 34 }));
        assert_eq!((cpu_times("12"), cpu_times("a b c"), cpu_times("")), (None, None, None));
        let stat = |policy: u32| {
            let numbers: Vec<String> =
                (4..=52).map(|field| if field == 41 { policy } else { 0 }.to_string()).collect();
            format!("7 (x) S {}", numbers.join(" "))
        };
        assert_eq!(
            [0, 1, 2, 3, 5, 6].map(|policy| real_time(&stat(policy))),
            [Some(false), Some(true), Some(true), Some(false), Some(false), Some(true)]
        );
        assert_eq!(real_time("7 (x) S 1"), None);
        let (pid, tid) = (std::process::id().cast_signed(), nix::unistd::gettid().as_raw());
        let before = read_cpu_times(pid, tid).unwrap();
        let sum = (0..3_000_000_u64).fold(0, |sum, n| std::hint::black_box(sum ^ n));
        std::hint::black_box(sum);
        // The kernel counts at a tick, or when the thread leaves its CPU.
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(read_cpu_times(pid, tid).unwrap().ran_ns > before.ran_ns);
        assert!(!read_cpu_and_class(pid, tid).unwrap().1);
        assert!(matches!(read_cpu_times(1, i32::MAX), Err(ProcError::Gone { .. })));
    }

    #[test]
    fn this_thread_is_known_and_others_are_gone() {
        let (pid, tid) = (std::process::id().cast_signed(), nix::unistd::gettid().as_raw());
        assert!(threads(pid).unwrap().contains(&tid) && thread_exists(pid, tid));
        assert!(read_allowed(pid, tid).unwrap().contains(read_last_cpu(pid, tid).unwrap()));
        assert_eq!(read_affinity(tid).unwrap(), read_allowed(pid, tid).unwrap());
        for gone in [0, -1, i32::MAX] {
            assert!(matches!(read_affinity(gone), Err(ProcError::Gone { .. })), "{gone}");
        }
        assert_eq!(read_start_time(pid, tid).unwrap(), read_start_time(pid, tid).unwrap());
        for (pid, tid) in [(0, 1), (-1, -1), (1, i32::MAX), (pid, 0)] {
            assert!(matches!(read_allowed(pid, tid), Err(ProcError::Gone { .. })), "{pid} {tid}");
            assert!(!thread_exists(pid, tid));
        }
        let error = read_last_cpu(1, i32::MAX).unwrap_err().to_string();
        assert_eq!(error, "/proc/1/task/2147483647/stat: no such process or thread");
        assert!(matches!(threads(i32::MAX), Err(ProcError::Gone { .. })));
    }

    #[test]
    fn a_kept_file_is_of_its_process_only() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let kept = KeptFile::of_main_thread(child.id().cast_signed(), "stat").unwrap();
        let began = start_time(&kept.read().unwrap());
        assert_eq!(start_time(&kept.read().unwrap()), began);
        assert!(began.is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(kept.read(), Err(ProcError::Gone { .. })));
        assert!(matches!(KeptFile::of_main_thread(i32::MAX, "stat"), Err(ProcError::Gone { .. })));
    }

    /// Without a right to the device.
    #[test]
    fn a_file_that_was_opened_by_its_path_only_is_not_open() {
        use std::os::{fd::AsRawFd, unix::fs::OpenOptionsExt};
        let pid = std::process::id().cast_signed();
        let open = File::open("/dev/zero").unwrap();
        let by_path = fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open("/dev/full").unwrap();
        let found = read_open_files_while(Path::new("/proc"), pid, || true).unwrap();
        let of = |file: &File| found.iter().find(|found| found.fd == file.as_raw_fd());
        let zero = of(&open).unwrap();
        assert_eq!((zero.path.as_str(), zero.number.as_deref()), ("/dev/zero", Some("1:5")));
        assert_eq!(of(&by_path), None);
        let mut left = 0;
        let none = read_open_files_while(Path::new("/proc"), pid, || std::mem::replace(&mut left, 1) > 1);
        assert_eq!(none.unwrap(), []);
    }

    #[test]
    fn open_files_are_looked_at_up_to_a_limit_and_devices_have_their_number() {
        let proc = tempfile::tempdir().unwrap();
        let fds = proc.path().join("7/fd");
        fs::create_dir_all(&fds).unwrap();
        let link =
            |fd: u32, target: &str| std::os::unix::fs::symlink(target, fds.join(fd.to_string())).unwrap();
        link(3, "/dev/null");
        link(4, "anon_inode:[kvm-gmem]");
        link(5, "/dev/not-there (deleted)");
        link(6, "/etc/passwd");
        let (found, all) = read_open_files(proc.path(), 7, 4).unwrap();
        assert!(all);
        let shown: Vec<_> =
            found.iter().map(|file| (file.fd, file.path.as_str(), file.number.as_deref())).collect();
        assert_eq!(
            shown,
            [(3, "/dev/null", Some("1:3")), (4, "anon_inode:[kvm-gmem]", None), (5, "/dev/not-there", None)]
        );
        let has = |path: &str, most: usize| has_open(proc.path(), 7, path, most).unwrap();
        assert!(has("anon_inode:[kvm-gmem]", 4) && !has("anon_inode:[kvm-gmem]", 0) && !has("/dev/zero", 4));
        // Of more than the limit so many are looked at, whichever the kernel names first.
        fs::remove_file(fds.join("6")).unwrap();
        let few = |most: usize| read_open_files(proc.path(), 7, most).map(|(files, all)| (files.len(), all));
        assert_eq!([2, 3].map(|most| few(most).unwrap()), [(2, false), (3, true)]);
        (10..10 + FD_LIMIT as u32).for_each(|fd| link(fd, "/dev/zero"));
        let all = read_open_files_while(proc.path(), 7, || true);
        assert_eq!(all.unwrap().len(), FD_LIMIT);
        assert!(matches!(has_open(proc.path(), 8, "/dev/null", 1), Err(ProcError::Gone { .. })));
    }

    #[test]
    fn files_are_read_up_to_the_limit() {
        let pid = std::process::id().cast_signed();
        assert_eq!(read_process(pid, "status", 5).unwrap(), "Name:");
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(.|[0-9() \\n:\\t]|NSpid:){0,200}") {
            let _ = (state(&text), start_time(&text), last_cpu(&text), allowed_list(&text));
            let _ = (namespace_numbers(&text), real_time(&text), cpu_times(&text), cgroup_path(&text));
        }
    }
}
