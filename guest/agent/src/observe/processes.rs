//! Processes: which of them are of interest, and what they do.

use super::{
    devices, maps,
    turn::{Turn, Users},
};
use crate::{
    core::{Evidence, NodeId, Process, ProcessId},
    files,
    rules::Rules,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::Path,
    time::Duration,
};
use vnuma_model::CpuSet;
use vnuma_process::{
    procfs::{self, CpuTimes, ProcError},
    text::sanitize_short,
};

/// Most threads of a process that are looked at.
const THREADS: usize = 8192;
/// Device files of one process that are remembered.
const FILES: usize = 64;
/// Flag of a thread of the kernel (`PF_KTHREAD`), in field 9 of `stat`.
const KERNEL_THREAD: u64 = 0x0020_0000;
const KVM: &str = "/dev/kvm";

/// A thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Thread {
    pub(super) tid: i32,
    cpu: Option<u32>,
    pub(super) times: CpuTimes,
    allowed: CpuSet,
}

/// CPU time by node and waiting time of a process, thousandths.
pub(super) type Rates = (BTreeMap<NodeId, u32>, u32);

/// Numbers of all processes but this one, rising.
pub(super) fn list(root: &Path) -> Vec<i32> {
    let own = std::process::id().cast_signed();
    let all = procfs::read_processes(&root.join("proc")).unwrap_or_default();
    all.into_iter().filter(|pid| *pid != own).collect()
}

/// What comes of a look at a process.
pub(super) enum Seen {
    /// It is heavy on I/O, or a rule names it, or it is placed. Whose it is, and was there time for all of it?
    Found(Box<Process>, u32, bool),
    /// It is none of that, as far as there was time to see it. Whose it is, and was there time for all of it?
    Other(u32, bool),
    /// There was no time for it.
    Unread,
    /// It cannot be looked at, for lack of rights.
    Hidden,
    /// It has ended, or is a thread of the kernel.
    Nothing,
}

/// A process, if something shows that it is heavy on I/O, a rule names it, or it is placed.
pub(super) fn read(
    root: &Path,
    pid: i32,
    rules: &Rules,
    users: &Users,
    turn: Turn,
    is_placed: impl Fn(ProcessId) -> bool,
) -> Seen {
    if turn.is_over() {
        return Seen::Unread;
    }
    let directory = root.join(format!("proc/{pid}"));
    // Checked first: a process that is passed over is charged to no budget, so it must cost little.
    let Some((user, of_root)) = user(&directory) else { return Seen::Nothing };
    if !users.may(user) {
        return Seen::Unread;
    }
    let Some(started) = files::text(&directory.join("stat")).and_then(|stat| user_process(&stat)) else {
        return Seen::Nothing;
    };
    let id = ProcessId { pid, started };
    let name = files::text(&directory.join("comm")).map(|name| sanitize_short(&name)).unwrap_or_default();
    let program = files::link_name(&directory.join("exe")).unwrap_or_default();
    let program = program.strip_suffix(" (deleted)").unwrap_or(&program).to_owned();
    let cgroup = files::text(&directory.join("cgroup")).unwrap_or_default();
    let cgroup = procfs::cgroup_path(&cgroup).unwrap_or_default().to_owned();
    let (evidence, runs_vm, whole) = match evidence(root, pid, rules, turn) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Seen::Hidden,
        // It has ended.
        Err(_) => return Seen::Nothing,
    };
    let (allowed, ran_permille, waited_permille, memory_kib) = Default::default();
    let process = Process {
        id,
        name,
        program,
        cgroup,
        evidence,
        of_root,
        runs_vm,
        allowed,
        ran_permille,
        waited_permille,
        memory_kib,
    };
    let named = rules.workloads.iter().any(|rule| rule.names(&process));
    if named || !process.evidence.is_empty() || is_placed(id) {
        Seen::Found(Box::new(process), user, whole)
    } else {
        Seen::Other(user, whole)
    }
}

/// Whose process it is, and whether it acts by the rights of root only. The directory of one that hides its memory is root's, so that
/// does not tell.
fn user(directory: &Path) -> Option<(u32, bool)> {
    match fs::metadata(directory).ok()?.uid() {
        0 => {
            let users = procfs::users(&files::text(&directory.join("status"))?)?;
            Some((users[0], users == [0; 4]))
        }
        user => Some((user, false)),
    }
}

/// When a process started. `None`: it is a thread of the kernel, or a zombie.
fn user_process(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let flags: u64 = rest.split_ascii_whitespace().nth(6)?.parse().ok()?;
    let alive = !matches!(procfs::state(stat)?, "Z" | "X" | "x");
    (alive && flags & KERNEL_THREAD == 0).then(|| procfs::start_time(stat)).flatten()
}

/// What shows that a process is heavy on I/O, whether it runs a VM, and whether there was time for all of it.
fn evidence(
    root: &Path,
    pid: i32,
    rules: &Rules,
    turn: Turn,
) -> io::Result<(BTreeSet<Evidence>, bool, bool)> {
    let mut found = BTreeSet::new();
    // Files without end leave time for libraries, and both for threads.
    let of_files = turn.half();
    let open = match procfs::read_open_files_while(&root.join("proc"), pid, || !of_files.is_over()) {
        Ok(open) => open,
        Err(ProcError::Read { source, .. }) => return Err(source),
        Err(_) => Vec::new(),
    };
    let mut whole = !of_files.is_over();
    for file in &open {
        if found.len() >= FILES {
            break;
        }
        if let Some(devices) = devices::behind(root, file) {
            found.insert(Evidence::File { path: sanitize_short(&file.path), devices });
        }
    }
    let of_libraries = turn.half();
    let libraries = maps::libraries(root, pid, |name| rules.libraries.has(name), of_libraries)?;
    whole &= !of_libraries.is_over();
    found.extend(libraries.into_iter().map(|name| Evidence::Library(sanitize_short(&name))));
    let runs_vm = open.iter().any(|file| file.path == KVM || file.path.starts_with("anon_inode:kvm-"));
    Ok((found, runs_vm, whole))
}

/// Threads of a process, those for which there is time.
pub(super) fn threads(root: &Path, pid: i32, turn: Turn) -> Vec<Thread> {
    let directory = root.join(format!("proc/{pid}/task"));
    let tids = files::names(&directory).into_iter().filter_map(|name| name.parse::<i32>().ok());
    let read = |tid: i32| {
        let file = |name: &str| files::text(&directory.join(tid.to_string()).join(name));
        let allowed = procfs::allowed_list(&file("status")?).parse().ok()?;
        let cpu = file("stat").and_then(|stat| procfs::last_cpu(&stat));
        let times = file("schedstat").and_then(|text| procfs::cpu_times(&text)).unwrap_or_default();
        Some(Thread { tid, cpu, times, allowed })
    };
    tids.take(THREADS).take_while(|_| !turn.is_over()).filter_map(read).collect()
}

/// What threads have done since `before`.
pub(super) fn rates(
    threads: &[Thread],
    before: impl Fn(i32) -> Option<CpuTimes>,
    elapsed: Option<Duration>,
    node_of: impl Fn(u32) -> Option<NodeId>,
) -> Rates {
    let (mut ran, mut waited) = (BTreeMap::<NodeId, u32>::new(), 0_u32);
    let Some(elapsed) = elapsed else { return (ran, waited) };
    let permille = |ns: u64| ((u128::from(ns) * 1000 / elapsed.as_nanos()).min(1000)) as u32;
    for thread in threads {
        // A new thread has done all of it since.
        let was = before(thread.tid).unwrap_or_default();
        if let Some(node) = thread.cpu.and_then(&node_of) {
            *ran.entry(node).or_default() += permille(thread.times.ran_ns.saturating_sub(was.ran_ns));
        }
        waited += permille(thread.times.waited_ns.saturating_sub(was.waited_ns));
    }
    (ran, waited)
}

/// Takes what was read of the threads of a process.
pub(super) fn take(process: &mut Process, threads: &[Thread], (ran, waited): Rates) {
    let widest = threads.iter().max_by_key(|thread| (thread.allowed.len(), std::cmp::Reverse(thread.tid)));
    process.allowed = widest.map(|thread| thread.allowed.clone()).unwrap_or_default();
    (process.ran_permille, process.waited_permille) = (ran, waited);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_the_kernel_and_zombies_are_no_processes() {
        let stat = |state: &str, flags: u64| {
            let rest: Vec<String> = (4..=52)
                .map(|field| if field == 9 { flags.to_string() } else { field.to_string() })
                .collect();
            format!("7 (a) b (c) {state} {}", rest.join(" "))
        };
        assert_eq!(user_process(&stat("S", 0x400)), Some(22));
        assert_eq!(user_process(&stat("Z", 0x400)), None);
        assert_eq!(user_process(&stat("S", KERNEL_THREAD | 1)), None);
        assert_eq!((user_process(""), user_process("7 (a) S 1")), (None, None));
    }

    #[test]
    fn rates_are_those_since_the_last_look() {
        let thread = |tid, cpu, ran_ns, waited_ns| Thread {
            tid,
            cpu: Some(cpu),
            times: CpuTimes { ran_ns, waited_ns },
            allowed: CpuSet::new(),
        };
        let threads = [thread(1, 0, 1_500, 0), thread(2, 4, 250, 100)];
        let before = |tid| (tid == 1).then_some(CpuTimes { ran_ns: 1_000, waited_ns: 0 });
        let node_of = |cpu: u32| Some(cpu / 4);
        let elapsed = Some(Duration::from_nanos(1000));
        let (ran, waited) = rates(&threads, before, elapsed, node_of);
        assert_eq!((ran, waited), (BTreeMap::from([(0, 500), (1, 250)]), 100));
        assert_eq!(rates(&threads, before, None, node_of), (BTreeMap::new(), 0));
    }

    /// A process of another user that hides its memory has a directory of root's.
    #[test]
    fn a_process_is_its_users_whatever_its_directory_says() {
        use std::{os::unix::process::CommandExt, process::Command};
        let is_root = nix::unistd::geteuid().is_root();
        assert_eq!(user(Path::new("/proc/self")).map(|(_, of_root)| of_root), Some(is_root));
        if !is_root {
            eprintln!("skipped: this needs root");
            return;
        }
        let mut command = Command::new("sleep");
        let mut child = command.arg("1000").uid(1000).spawn().expect("sleep");
        let found = user(Path::new(&format!("/proc/{}", child.id())));
        // A change of the user takes the right to look at the memory from others, until a program begins.
        let status = "Uid:\t1000\t1000\t1000\t1000\n";
        let hides = tempfile::tempdir().expect("a directory");
        fs::write(hides.path().join("status"), status).expect("written");
        let hidden = user(hides.path());
        child.kill().and_then(|()| child.wait().map(drop)).expect("ended");
        assert_eq!((found, hidden), (Some((1000, false)), Some((1000, false))));
    }
}
