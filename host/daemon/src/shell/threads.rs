//! What the scheduler of the host knows of threads and CPUs, as it is read once a period.
//!
//! | by | threads | counters | CPUs |
//! |---|---|---|---|
//! | `bpf` | one call for all of them | the same call, as of their last turn | the same call, or `/proc/stat` where the kernel does not list its variables |
//! | `files` | `schedstat`, `stat` and the affinity of each, `status` if that has changed | not here | `/proc/stat` |

use super::capabilities::{Capabilities, FILES};
use std::path::{Path, PathBuf};
use tracing::{info, warn};
use vnuma_counters::Reading;
use vnuma_model::{Capability, CpuId, CpuSet, PassedOver};
use vnuma_observe::{
    location::{BPF, Prefer},
    read_idle_times,
    tasks::{Asked, TaskReader, TaskReading},
};
use vnuma_process::{procfs, read_allowed};

/// What is known of a thread at the end of a period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) times: procfs::CpuTimes,
    /// The CPU that it is on, or was on last.
    pub(super) cpu: CpuId,
    /// It has a real-time class.
    pub(super) real_time: bool,
    /// CPUs that it may run on, online or not. `None`: they could not be read.
    pub(super) allowed: Option<CpuSet>,
    /// Its counters, if they were read as well.
    pub(super) counts: Option<Reading>,
}

/// A thread that is read, and what is kept of it so that the next time is cheaper.
#[derive(Debug)]
pub(super) struct Thread {
    pid: i32,
    pub(super) tid: i32,
    /// When it began, once BPF has shown it: its number may be reused.
    start_ns: Option<u64>,
    /// Its files `schedstat` and `stat`: opening them costs more than reading them.
    files: Option<[procfs::KeptFile; 2]>,
    /// Its mask of CPUs that are online as its file showed it, and all of its CPUs: as long as the first is the same, so is the
    /// second.
    mask: Option<(CpuSet, CpuSet)>,
    /// Ids of its counters, if it has any.
    events: Vec<u64>,
    /// As it was read last. `None`: it had ended then.
    known: Option<Known>,
}

impl Thread {
    pub(super) fn new(pid: i32, tid: i32) -> Self {
        Self { pid, tid, start_ns: None, files: None, mask: None, events: Vec::new(), known: None }
    }

    /// Its counters have these ids from now on, or it has none.
    pub(super) fn set_events(&mut self, events: Vec<u64>) {
        self.events = events;
    }

    /// As it was read last. `None`: it has ended.
    pub(super) fn take(&mut self) -> Option<Known> {
        self.known.take()
    }

    fn read_files(&mut self) -> Option<Known> {
        // The files are of that thread of that process: if they can be read afterwards, this was its thread.
        let allowed = self.read_mask();
        let (times, cpu, real_time) = self.read_times()?;
        Some(Known { times, cpu, real_time, allowed, counts: None })
    }

    fn read_times(&mut self) -> Option<(procfs::CpuTimes, CpuId, bool)> {
        if self.files.is_none() {
            let open = |file| procfs::KeptFile::of_thread(self.pid, self.tid, file).ok();
            self.files = open("schedstat").zip(open("stat")).map(|(times, stat)| [times, stat]);
        }
        let Some([times, stat]) = &self.files else {
            // There are too many open files.
            let times = procfs::read_cpu_times(self.pid, self.tid).ok()?;
            let (cpu, real_time) = procfs::read_cpu_and_class(self.pid, self.tid).ok()?;
            return Some((times, cpu, real_time));
        };
        let read = || {
            let (times, stat) = (times.read().ok()?, stat.read().ok()?);
            Some((procfs::cpu_times(&times)?, procfs::last_cpu(&stat)?, procfs::real_time(&stat)?))
        };
        let read = read();
        if read.is_none() {
            // Another thread of the process may get its number.
            self.files = None;
        }
        read
    }

    fn read_mask(&mut self) -> Option<CpuSet> {
        let online = procfs::read_affinity(self.tid).ok()?;
        match &self.mask {
            Some((known, mask)) if *known == online => Some(mask.clone()),
            _ => {
                let mask = read_allowed(self.pid, self.tid).ok()?;
                self.mask = Some((online, mask.clone()));
                Some(mask)
            }
        }
    }

    /// BPF has found a thread with its number.
    fn found(&mut self, reading: TaskReading<'_>) {
        let TaskReading { pid, start_ns, ran_ns, waited_ns, cpu, policy, mask, counts } = reading;
        if pid != self.pid {
            return;
        }
        if self.start_ns.replace(start_ns).is_some_and(|before| before != start_ns) {
            // Another one: it is as new with the next period.
            return;
        }
        self.known = Some(Known {
            times: procfs::CpuTimes { ran_ns, waited_ns },
            cpu,
            real_time: procfs::is_real_time(policy),
            allowed: Some(CpuSet::from_words(mask)),
            counts: counts.map(|counts| Reading {
                values: counts.values.to_vec(),
                enabled_ns: counts.enabled_ns,
                running_ns: counts.running_ns,
            }),
        });
    }
}

/// How all that is read.
#[derive(Debug)]
pub(super) struct Reader {
    root: PathBuf,
    prefer: Prefer,
    /// While anything is read.
    bpf: Option<TaskReader>,
    capabilities: Capabilities,
}

impl Reader {
    /// Below another root than `/` there are no threads that BPF could read.
    pub(super) fn new(root: PathBuf, prefer: Prefer, capabilities: Capabilities) -> Self {
        Self { root, prefer, bpf: None, capabilities }
    }

    /// Something is to be read from now on.
    pub(super) fn begin(&mut self) {
        let loaded = match (self.prefer, self.root == Path::new("/")) {
            (Prefer::Poll, _) => Err("BPF is switched off (observe.location = \"poll\")".to_owned()),
            (_, false) => Err("the host's files are those of another root than /".to_owned()),
            (Prefer::Auto | Prefer::Bpf, true) => TaskReader::load(),
        };
        let by = Capability::either(Capability::READINGS, [BPF, FILES], loaded.as_ref().err());
        info!(source = by.in_use, passed_over = by.why(), "reading threads once a period");
        self.capabilities.publish(by);
        self.bpf = loaded.ok();
    }

    /// Nothing is read any more.
    pub(super) fn end(&mut self) {
        self.bpf = None;
        self.capabilities.withdraw(&[Capability::READINGS, Capability::IDLE_TIMES]);
    }

    /// Reads these threads, and the CPUs for [`Self::idle_times`].
    pub(super) fn read(&mut self, mut threads: Vec<&mut Thread>) {
        threads.iter_mut().for_each(|thread| thread.known = None);
        if let Some(bpf) = &mut self.bpf {
            // Their ids are asked for while what is found is noted.
            let events: Vec<_> =
                threads.iter_mut().map(|thread| std::mem::take(&mut thread.events)).collect();
            let asked = threads.iter().zip(&events).map(|(thread, events)| Asked { tid: thread.tid, events });
            let read = bpf.read(&asked.collect::<Vec<_>>(), |at, reading| threads[at].found(reading));
            threads.iter_mut().zip(events).for_each(|(thread, events)| thread.events = events);
            match read {
                Ok(()) => return,
                Err(error) => {
                    warn!(%error, "threads cannot be read by BPF any more: their files are read");
                    self.bpf = None;
                    self.capabilities.publish(Capability::either(
                        Capability::READINGS,
                        [BPF, FILES],
                        Some(error),
                    ));
                }
            }
        }
        threads.into_iter().for_each(|thread| thread.known = thread.read_files());
    }

    /// How long each CPU had been idle since the boot when threads were read last, or is by now, in rising order. Empty: that
    /// cannot be read.
    pub(super) fn idle_times(&mut self) -> Vec<(CpuId, u64)> {
        let (in_use, passed_over, mut times) = match self.bpf.as_ref().map(TaskReader::idle_times) {
            Some(Ok(times)) => (BPF, Vec::new(), times.collect()),
            by_bpf => {
                let why = by_bpf.and_then(Result::err).unwrap_or("threads are not read by it either");
                let mut passed_over = vec![PassedOver::new(BPF, why)];
                match read_idle_times(&self.root) {
                    Ok(times) => (FILES, passed_over, times),
                    Err(error) => {
                        passed_over.push(PassedOver::new(FILES, error.to_string()));
                        ("none", passed_over, Vec::new())
                    }
                }
            }
        };
        self.capabilities.publish(Capability::new(Capability::IDLE_TIMES, in_use, passed_over));
        times.sort_unstable();
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::mpsc,
        time::{Duration, Instant},
    };

    /// Nothing here takes so long.
    const HANG: Duration = Duration::from_secs(60);

    fn reader(prefer: Prefer) -> Reader {
        let mut reader = Reader::new("/".into(), prefer, Capabilities::default());
        reader.begin();
        reader
    }

    fn read(reader: &mut Reader, thread: &mut Thread) -> Option<Known> {
        reader.read(vec![thread]);
        thread.take()
    }

    fn own_pid() -> i32 {
        std::process::id().cast_signed()
    }

    fn reading(start_ns: u64, mask: &[u64]) -> TaskReading<'_> {
        let (pid, counts) = (own_pid(), None);
        TaskReading { pid, start_ns, ran_ns: 5, waited_ns: 6, cpu: 7, policy: 1, mask, counts }
    }

    #[test]
    fn both_ways_read_the_same_until_the_thread_has_ended() {
        let mut ways = [reader(Prefer::Auto), reader(Prefer::Poll)];
        let [first, second] = ways.each_ref().map(|way| way.capabilities.of(Capability::READINGS));
        assert_eq!(second.in_use, FILES);
        assert!(second.why_not(BPF).is_some_and(|why| why.contains("observe.location")));
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let waiting = std::thread::spawn(move || {
            tell.send(nix::unistd::gettid().as_raw()).expect("told");
            let _ = ended.recv();
        });
        let tid = told.recv().expect("it runs");
        let mut threads = [Thread::new(own_pid(), tid), Thread::new(own_pid(), tid)];
        let limit = Instant::now() + HANG;
        let mut compared = 0;
        while compared < 2 {
            // It may run for a moment more.
            let [before, known, after] = [1, 0, 1].map(|way| read(&mut ways[way], &mut threads[way]));
            if before == after {
                assert!(known.is_some());
                assert_eq!(known, after, "by {} and by files", first.in_use);
                compared += 1;
            }
            assert!(Instant::now() < limit, "it never rests");
        }
        drop(end);
        waiting.join().expect("it ends");
        // Who waits for its end is told a little before it is gone.
        while [0, 1].map(|way| read(&mut ways[way], &mut threads[way])) != [None, None] {
            assert!(Instant::now() < limit, "it is always there");
        }
        let idle =
            ways.each_mut().map(|way| way.idle_times().iter().map(|(cpu, _)| *cpu).collect::<Vec<_>>());
        assert!(idle[0] == idle[1] && !idle[0].is_empty(), "{idle:?}");
    }

    #[test]
    fn another_thread_with_the_number_is_as_new() {
        let mut thread = Thread::new(own_pid(), 77);
        thread.found(reading(1, &[0b110]));
        let known = thread.take().expect("read");
        assert_eq!((known.times.ran_ns, known.times.waited_ns, known.cpu, known.real_time), (5, 6, 7, true));
        assert_eq!(known.allowed.map(|cpus| cpus.to_string()), Some("1-2".to_owned()));
        thread.found(reading(2, &[0b110]));
        assert_eq!(thread.take(), None, "it began later");
        thread.found(reading(2, &[0b111]));
        assert_eq!(thread.take().and_then(|known| known.allowed).map(|cpus| cpus.len()), Some(3));
        thread.found(TaskReading { pid: 1, ..reading(2, &[0b111]) });
        assert_eq!(thread.take(), None, "it belongs to another process");
    }

    #[test]
    fn another_root_is_read_from_its_files() {
        let root = tempfile::tempdir().expect("a directory");
        let mut reader = Reader::new(root.path().into(), Prefer::Auto, Capabilities::default());
        reader.begin();
        assert_eq!(reader.idle_times(), []);
        let published = |reader: &Reader| reader.capabilities.of(Capability::IDLE_TIMES);
        assert_eq!(
            (
                reader.capabilities.of(Capability::READINGS).in_use.as_str(),
                published(&reader).in_use.as_str()
            ),
            (FILES, "none")
        );
        assert!(published(&reader).why_not(FILES).is_some_and(|why| why.contains("proc/stat")));
        std::fs::create_dir(root.path().join("proc")).expect("made");
        std::fs::write(root.path().join("proc/stat"), "cpu1 0 0 0 7 1\ncpu0 0 0 0 2 0\n").expect("written");
        assert_eq!(reader.idle_times(), [(0, 20_000_000), (1, 80_000_000)]);
        assert_eq!((published(&reader).in_use.as_str(), published(&reader).why_not(FILES)), (FILES, None));
    }
}
