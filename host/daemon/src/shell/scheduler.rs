//! scx_vnuma as the thread that sets affinities uses it: the threads that it schedules, and their places.
//!
//! ```text
//!                 place()                              release()
//!   SCHED_OTHER ──────────▶ SCHED_EXT, in its map ──────────────▶ SCHED_OTHER
//!       ▲                            │
//!       └────────────────────────────┘ look(): it has ended, so that the kernel's scheduler has them anyway
//! ```
//!
//! The maps are pinned, so that they outlive a vnumad that is killed. Its places do not hold for long without a heartbeat,
//! and the next vnumad finds the threads by the map and by their class.

use super::capabilities::Capabilities;
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
};
use tracing::warn;
use vnuma_api::PlaceSetting as By;
use vnuma_model::{Capability, CpuSet, PassedOver, Steal};
use vnuma_observe::{
    location::monotonic_ns,
    scheduler::{Assigned, Counts, DIRECTORY, OPS, Scheduler, loaded_scheduler},
};
use vnuma_process::{ActError, Class, change_class, procfs, read_class};

/// What a look at the scheduler has shown.
#[derive(Debug)]
pub(super) enum Look {
    Same,
    Loaded,
    /// scx_vnuma has ended, and had these threads.
    Ended(String, Vec<(i32, Thread)>),
}

/// A thread that it schedules.
#[derive(Clone, Debug)]
pub(super) struct Thread {
    pub(super) pid: i32,
    pub(super) pidfd: Arc<OwnedFd>,
    pub(super) place: Option<CpuSet>,
    /// Its operator's mask, if it had a place.
    pub(super) operator: Option<CpuSet>,
    pressure: u32,
}

/// The scheduler, if it is loaded.
#[derive(Debug)]
pub(super) struct Places {
    root: PathBuf,
    directory: PathBuf,
    open: Option<Scheduler>,
    threads: BTreeMap<i32, Thread>,
    /// Why it does not schedule threads that it should.
    problems: BTreeMap<i32, String>,
    epoch: u64,
    steal: Steal,
    capabilities: Capabilities,
}

impl Places {
    pub(super) fn new(root: PathBuf, capabilities: Capabilities) -> Self {
        Self {
            root,
            directory: PathBuf::from(DIRECTORY),
            open: None,
            threads: BTreeMap::new(),
            problems: BTreeMap::new(),
            epoch: monotonic_ns(),
            steal: Steal::default(),
            capabilities,
        }
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.open.is_some()
    }

    /// Looks whether scx_vnuma is loaded, and still the same. If so, tells it that vnumad is alive.
    pub(super) fn look(&mut self) -> Look {
        let found = match &self.open {
            Some(scheduler) => match scheduler.check() {
                Ok(()) => Look::Same,
                Err(error) => {
                    self.open = None;
                    self.problems.clear();
                    let threads: Vec<_> = std::mem::take(&mut self.threads).into_iter().collect();
                    threads.iter().for_each(|(tid, thread)| give_class_back(thread, *tid));
                    Look::Ended(error.to_string(), threads)
                }
            },
            None => match Scheduler::open(&self.root, &self.directory) {
                Ok(scheduler) => {
                    self.open = Some(scheduler);
                    Look::Loaded
                }
                Err(error) => {
                    self.note(Some(error.to_string()));
                    Look::Same
                }
            },
        };
        self.beat();
        match &found {
            Look::Ended(why, _) => self.note(Some(why.clone())),
            _ if self.open.is_some() => self.note(self.problems.values().next().cloned()),
            _ => {}
        }
        found
    }

    /// `problem`: why it is not used, or not for some thread.
    fn note(&self, problem: Option<String>) {
        let (in_use, numbers) = match &self.open {
            None => (By::AFFINITY, By::default()),
            Some(scheduler) => {
                let Counts { placed, stolen_local, stolen_remote, starved, .. } = scheduler.counts();
                let (full, vcpus) = (scheduler.is_full(), self.threads.len());
                let numbers =
                    By { full, vcpus, placed, stolen_local, stolen_remote, starved, ..By::default() };
                (By::SCHEDULER, numbers)
            }
        };
        let passed_over = problem.map(|why| PassedOver::new(By::SCHEDULER, why));
        self.capabilities.publish(Capability::new(Capability::PLACES, in_use, passed_over));
        self.capabilities.note_places(numbers);
    }

    /// Which threads idle CPUs take. scx_vnuma is told with the next heartbeat.
    pub(super) fn set_stealing(&mut self, steal: Steal) {
        self.steal = steal;
    }

    /// Tells scx_vnuma that vnumad is alive.
    fn beat(&self) {
        let beat = |scheduler: &Scheduler| scheduler.beat(monotonic_ns(), self.steal);
        if let Some(Err(error)) = self.open.as_ref().map(beat) {
            warn!(%error, "scx_vnuma cannot be told that vnumad is alive");
        }
    }

    /// Gives a thread a place, or another one, or none. It is scheduled by scx_vnuma from then on. An error leaves it as it
    /// was; `None`: it is of a kind that scx_vnuma must not have.
    pub(super) fn place(
        &mut self,
        pid: i32,
        pidfd: &Arc<OwnedFd>,
        tid: i32,
        place: Option<CpuSet>,
        operator: &CpuSet,
    ) -> Option<Result<(), ActError>> {
        let known = self.threads.get(&tid).filter(|thread| thread.pid == pid);
        let pressure = known.map_or(0, |known| known.pressure);
        let (pidfd, operator) = (Arc::clone(pidfd), Some(operator.clone()));
        let thread = Thread { pid, pidfd, place, operator, pressure };
        self.tell(tid, thread)
    }

    /// What a period has shown of a thread. One with a place is taken there once more, if it was stolen.
    pub(super) fn rank(&mut self, pid: i32, pidfd: &Arc<OwnedFd>, tid: i32, pressure: u32) {
        let known = self.threads.get(&tid).filter(|thread| thread.pid == pid).cloned();
        let fresh = || Thread { pid, pidfd: Arc::clone(pidfd), place: None, operator: None, pressure };
        let thread = Thread { pressure, ..known.unwrap_or_else(fresh) };
        if let Some(Err(error)) = self.tell(tid, thread)
            && !has_ended(&error)
        {
            self.problems.insert(tid, error.to_string());
        }
    }

    fn tell(&mut self, tid: i32, thread: Thread) -> Option<Result<(), ActError>> {
        let scheduler = self.open.as_ref()?;
        self.epoch += 1;
        let assigned = Assigned {
            pid: thread.pid,
            epoch: self.epoch,
            pressure: thread.pressure,
            place: thread.place.clone(),
        };
        let pid = thread.pid;
        if let Err(error) = scheduler.assign(tid, &assigned) {
            let (act, source) = ("telling scx_vnuma of it", io::Error::other(error));
            return Some(Err(ActError::System { pid, tid, act, source }));
        }
        // In full mode it has all threads that the kernel's own scheduler had.
        let class = match scheduler.is_full() {
            true => read_class(tid).map_err(|source| {
                let act = "reading its scheduling class";
                ActError::System { pid, tid, act, source }
            }),
            false => change_class(thread.pidfd.as_fd(), pid, tid, Class::Other, Class::Ext),
        };
        match class {
            Ok(Class::Other | Class::Ext) => {
                self.threads.insert(tid, thread);
                self.problems.remove(&tid);
                Some(Ok(()))
            }
            Ok(Class::Foreign(class)) => {
                scheduler.forget(tid);
                let why = format!("thread {tid} of process {pid} has scheduling class {class}");
                self.problems.insert(tid, why);
                None
            }
            // A sandbox (systemd's RestrictRealtime=) allows the classes that it knows only.
            Err(error) if is_refused(&error) => {
                scheduler.forget(tid);
                self.problems.insert(tid, error.to_string());
                None
            }
            Err(error) => {
                scheduler.forget(tid);
                Some(Err(error))
            }
        }
    }

    /// Does it schedule this thread?
    pub(super) fn has(&self, pid: i32, tid: i32) -> bool {
        self.threads.get(&tid).is_some_and(|thread| thread.pid == pid)
    }

    /// Threads of a process that it schedules.
    pub(super) fn of(&self, pid: i32) -> Vec<i32> {
        let threads = self.threads.iter().filter(|(_, thread)| thread.pid == pid);
        threads.map(|(&tid, _)| tid).collect()
    }

    /// The kernel's own scheduler has these threads again.
    pub(super) fn release(&mut self, pid: i32, tids: &[i32]) {
        for tid in tids {
            self.problems.remove(tid);
            let Some(thread) = self.threads.get(tid).filter(|thread| thread.pid == pid) else { continue };
            give_class_back(thread, *tid);
            self.threads.remove(tid);
            self.open.iter().for_each(|scheduler| scheduler.forget(*tid));
        }
    }

    /// The kernel's own scheduler has all threads again.
    pub(super) fn release_all(&mut self) {
        let known: Vec<(i32, i32)> = self.threads.iter().map(|(&tid, thread)| (thread.pid, tid)).collect();
        known.into_iter().for_each(|(pid, tid)| self.release(pid, &[tid]));
    }

    /// The same for all threads of a process that an earlier vnumad has given to scx_vnuma. If another sched_ext scheduler is
    /// loaded, threads of its class are its own.
    pub(super) fn release_process(&mut self, pid: i32, pidfd: &Arc<OwnedFd>) {
        let known = self.of(pid);
        self.release(pid, &known);
        if loaded_scheduler(&self.root).is_ok_and(|loaded| loaded.is_some_and(|ops| ops != OPS)) {
            return;
        }
        for tid in procfs::threads(pid).unwrap_or_default() {
            if read_class(tid).is_ok_and(|class| class == Class::Ext) {
                // One that has ended by now needs nothing.
                let _ = change_class(pidfd.as_fd(), pid, tid, Class::Ext, Class::Other);
            }
            self.open.iter().for_each(|scheduler| scheduler.forget(tid));
        }
    }

    /// Threads have gone, and their problems with them. Those of others come again with the next period.
    pub(super) fn clear_problems(&mut self) {
        self.problems.clear();
    }

    /// The process has ended.
    pub(super) fn forget_process(&mut self, pid: i32) {
        self.clear_problems();
        for tid in self.of(pid) {
            self.threads.remove(&tid);
            self.open.iter().for_each(|scheduler| scheduler.forget(tid));
        }
    }
}

/// A thread that a period has shown may end before scx_vnuma learns of it. That is no problem to note, as nothing would clear it.
fn has_ended(error: &ActError) -> bool {
    match error {
        ActError::Exited { .. } | ActError::ForeignThread { .. } | ActError::Raced { .. } => true,
        ActError::System { source, .. } => source.raw_os_error() == Some(nix::libc::ESRCH),
        _ => false,
    }
}

/// Does this error say that vnumad may not set the class of any thread?
fn is_refused(error: &ActError) -> bool {
    matches!(error, ActError::System { source, .. } if source.raw_os_error() == Some(nix::libc::EPERM))
}

/// A thread that has ended needs nothing, and one of another class has been given that by others.
fn give_class_back(thread: &Thread, tid: i32) {
    let given = change_class(thread.pidfd.as_fd(), thread.pid, tid, Class::Ext, Class::Other);
    if let Err(error @ ActError::System { .. }) = given {
        warn!(%error, "a vCPU keeps the class SCHED_EXT");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, libbpf_sys::bpf_map_create_opts};
    use std::{fs, path::Path, process::Command};
    use vnuma_abi_bpf::sched::{
        Assignment, COUNTS as MANY_COUNTS, Header, MAGIC, STEAL_BLIND, STEAL_PRESSURE, VERSION,
    };
    use vnuma_observe::scheduler::{ASSIGNMENTS, COUNTS, HEADER};

    const FIRST: [u8; 4] = 0_u32.to_ne_bytes();

    /// A BPF file system of the test.
    struct Pins(tempfile::TempDir);

    impl Drop for Pins {
        fn drop(&mut self) {
            // Fails only if it was not mounted.
            let _ = Command::new("umount").arg(self.0.path()).status();
        }
    }

    /// The maps of a scheduler, which are those of the kernel, and a kernel that says that it is loaded.
    struct Loaded {
        root: tempfile::TempDir,
        pins: Pins,
        header: MapHandle,
    }

    impl Loaded {
        fn new() -> Result<Self, String> {
            let pins = Pins(tempfile::tempdir().expect("a directory"));
            let mounted = Command::new("mount")
                .args(["-t", "bpf", "-o", "mode=0700", "bpf"])
                .arg(pins.0.path())
                .output();
            let mounted = mounted.map_err(|error| error.to_string())?;
            if !mounted.status.success() {
                return Err(String::from_utf8_lossy(&mounted.stderr).trim().to_owned());
            }
            let map = |name: &str, kind, value: usize, entries| {
                let sz = size_of::<bpf_map_create_opts>() as u64;
                let options = bpf_map_create_opts { sz, ..bpf_map_create_opts::default() };
                let map = MapHandle::create(kind, Some(name), 4, value as u32, entries, &options);
                let mut map = map.map_err(|error| error.to_string())?;
                map.pin(pins.0.path().join(name)).map_err(|error| error.to_string())?;
                Ok::<_, String>(map)
            };
            let header = map(HEADER, MapType::Array, size_of::<Header>(), 1)?;
            map(ASSIGNMENTS, MapType::Hash, size_of::<Assignment>(), 8)?;
            map(COUNTS, MapType::PercpuArray, 8, MANY_COUNTS)?;
            let loaded = Self { root: tempfile::tempdir().expect("a directory"), pins, header };
            loaded.say("enabled");
            loaded.write(Header {
                magic: MAGIC,
                version: VERSION,
                header_size: size_of::<Header>() as u32,
                assignment_size: size_of::<Assignment>() as u32,
                instance: 7,
                ..Header::default()
            });
            Ok(loaded)
        }

        /// What the kernel says of sched_ext.
        fn say(&self, state: &str) {
            let sysfs = self.root.path().join("sys/kernel/sched_ext");
            fs::create_dir_all(sysfs.join("root")).expect("made");
            fs::write(sysfs.join("state"), state).expect("written");
            fs::write(sysfs.join("root/ops"), OPS).expect("written");
        }

        fn read(&self) -> Header {
            let bytes = self.header.lookup(&FIRST, MapFlags::ANY).expect("read").expect("one entry");
            Header::from_bytes(&bytes)
        }

        fn write(&self, header: Header) {
            self.header.update(&FIRST, &header.to_bytes(), MapFlags::ANY).expect("written");
        }

        /// The heartbeat that a look leaves, and what it saw.
        fn look(&self, places: &mut Places) -> (u64, Look) {
            self.write(Header { heartbeat_ns: 0, ..self.read() });
            let before = monotonic_ns();
            let look = places.look();
            let beat = self.read().heartbeat_ns;
            assert!(beat == 0 || (before..=monotonic_ns()).contains(&beat), "{beat}, not from {before} on");
            (beat, look)
        }
    }

    fn places(root: &Path, directory: &Path) -> Places {
        let places = Places::new(root.to_owned(), Capabilities::default());
        Places { directory: directory.to_owned(), ..places }
    }

    #[test]
    fn each_look_is_a_heartbeat_and_says_how_to_steal() {
        let loaded = match Loaded::new() {
            Ok(loaded) => loaded,
            Err(why) => return println!("skipped: BPF maps cannot be made here: {why}"),
        };
        let mut places = places(loaded.root.path(), loaded.pins.0.path());
        loaded.say("disabled");
        let (beat, look) = loaded.look(&mut places);
        assert!(matches!(look, Look::Same) && beat == 0, "nobody is told: {look:?}, {beat}");
        loaded.say("enabled");
        let (beat, look) = loaded.look(&mut places);
        assert!(matches!(look, Look::Loaded) && beat > 0, "{look:?}, {beat}");
        // Nothing else is told it: no thread has a place, and nothing is ranked.
        for _ in 0..3 {
            let (beat, look) = loaded.look(&mut places);
            assert!(matches!(look, Look::Same) && beat > 0, "{look:?}, {beat}");
        }
        assert_eq!(loaded.read().steal, STEAL_PRESSURE);
        places.set_stealing(Steal::Blindly);
        loaded.look(&mut places);
        let header = loaded.read();
        assert_eq!((header.steal, header.instance, header.magic), (STEAL_BLIND, 7, MAGIC), "the rest stays");
        loaded.say("disabled");
        let (beat, look) = loaded.look(&mut places);
        assert!(matches!(look, Look::Ended(..)) && beat == 0, "{look:?}, {beat}");
    }

    #[test]
    fn another_scheduler_of_the_same_name_is_another_one() {
        let loaded = match Loaded::new() {
            Ok(loaded) => loaded,
            Err(why) => return println!("skipped: BPF maps cannot be made here: {why}"),
        };
        let mut places = places(loaded.root.path(), loaded.pins.0.path());
        assert!(matches!(places.look(), Look::Loaded));
        loaded.write(Header { instance: 8, ..loaded.read() });
        let (beat, look) = loaded.look(&mut places);
        assert!(matches!(look, Look::Ended(..)) && beat == 0, "{look:?}, {beat}");
        assert!(matches!(loaded.look(&mut places), (1.., Look::Loaded)));
    }

    #[test]
    fn a_thread_that_has_ended_is_no_problem() {
        let loaded = match Loaded::new() {
            Ok(loaded) => loaded,
            Err(why) => return println!("skipped: BPF maps cannot be made here: {why}"),
        };
        for full in [false, true] {
            loaded.write(Header { full: u32::from(full), ..loaded.read() });
            let mut places = places(loaded.root.path(), loaded.pins.0.path());
            assert!(matches!(places.look(), Look::Loaded));
            let mut child = Command::new("sleep").arg("60").spawn().expect("it starts");
            let pid = child.id().cast_signed();
            let pidfd = Arc::new(vnuma_process::open_pidfd(pid).expect("it runs"));
            child.kill().and_then(|()| child.wait()).expect("it ends");
            places.rank(pid, &pidfd, pid, 1000);
            assert_eq!(places.problems.values().collect::<Vec<_>>(), Vec::<&String>::new(), "full: {full}");
            assert!(!places.has(pid, pid));
        }
    }
}
