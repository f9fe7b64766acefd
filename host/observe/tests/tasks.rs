//! Threads and CPUs read by the BPF program, compared with what `/proc` says of them.

use nix::{
    sched::{CpuSet as Mask, sched_setaffinity},
    unistd::{Pid, gettid},
};
use perf_event::{Builder, ReadFormat, events::Software};
use std::{
    fs,
    path::Path,
    sync::mpsc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use vnuma_model::CpuSet;
use vnuma_observe::{
    read_idle_times,
    tasks::{Asked, Call, Doing, TaskLook, TaskReader, TaskReading},
};
use vnuma_process::{procfs, read_allowed};

/// Nothing here takes so long.
const HANG: Duration = Duration::from_secs(60);

fn pid() -> i32 {
    std::process::id().cast_signed()
}

/// Tries again until there is something.
fn until<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let limit = Instant::now() + HANG;
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(Instant::now() < limit, "it never is");
        thread::sleep(Duration::from_millis(1));
    }
}

/// `None`: this kernel has no place for the program.
fn reader() -> Option<TaskReader> {
    match TaskReader::load() {
        Ok(reader) => Some(reader),
        Err(why) => {
            let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
            let mut numbers =
                release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok());
            let version: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
            assert!(version < (6, 10) || !Path::new("/sys/kernel/btf/vmlinux").exists(), "{release}: {why}");
            eprintln!("skipped: {why}");
            None
        }
    }
}

/// Without what is borrowed.
#[derive(Clone, Debug, PartialEq)]
struct Reading {
    pid: i32,
    start_ns: u64,
    times: procfs::CpuTimes,
    cpu: u32,
    policy: u32,
    allowed: CpuSet,
    /// Values, time enabled, time running.
    counts: Option<(Vec<u64>, u64, u64)>,
}

fn ask(reader: &mut TaskReader, asked: &[Asked<'_>]) -> Vec<Option<Reading>> {
    let mut readings = vec![None; asked.len()];
    let visit = |at: usize, reading: TaskReading<'_>| {
        readings[at] = Some(Reading {
            pid: reading.pid,
            start_ns: reading.start_ns,
            times: procfs::CpuTimes { ran_ns: reading.ran_ns, waited_ns: reading.waited_ns },
            cpu: reading.cpu,
            policy: reading.policy,
            allowed: CpuSet::from_words(reading.mask),
            counts: reading
                .counts
                .map(|counts| (counts.values.to_vec(), counts.enabled_ns, counts.running_ns)),
        });
    };
    reader.read(asked, visit).unwrap();
    readings
}

fn read(reader: &mut TaskReader, tids: &[i32]) -> Vec<Option<Reading>> {
    let asked: Vec<_> = tids.iter().map(|&tid| Asked { tid, events: &[] }).collect();
    ask(reader, &asked)
}

/// A thread that waits until it is dropped.
struct Waiting {
    tid: i32,
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Waiting {
    fn start(prepare: impl FnOnce() + Send + 'static) -> Self {
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            prepare();
            let sum = (0..3_000_000_u64).fold(0, |sum, n| std::hint::black_box(sum ^ n));
            std::hint::black_box(sum);
            tell.send(gettid().as_raw()).unwrap();
            let _ = ended.recv();
        });
        Self { tid: told.recv().unwrap(), end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.end.take();
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
}

fn is_asleep(tid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/task/{tid}/stat", pid())).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('S')
}

fn only_on_cpu_0() {
    let mut mask = Mask::new();
    mask.set(0).unwrap();
    sched_setaffinity(Pid::from_raw(0), &mask).unwrap();
}

fn real_time() {
    let param = libc::sched_param { sched_priority: 1 };
    // SAFETY: `param` is valid; 0 is the caller.
    assert_eq!(unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) }, 0);
}

#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn threads_are_as_their_files_say() {
    let Some(mut reader) = reader() else { return };
    // More than one run of the program reads.
    let mut threads: Vec<Waiting> = (0..130).map(|_| Waiting::start(|| {})).collect();
    threads.push(Waiting::start(only_on_cpu_0));
    threads.push(Waiting::start(real_time));
    let mut tids: Vec<i32> = threads.iter().map(|thread| thread.tid).collect();
    tids.insert(1, i32::MAX);
    tids.push(-1);
    // After it has sent its number it does not sleep yet.
    until(|| threads.iter().all(|thread| is_asleep(thread.tid)).then_some(()));
    let times = || tids.iter().map(|&tid| procfs::read_cpu_times(pid(), tid).ok()).collect::<Vec<_>>();
    let (readings, times) = until(|| {
        let before = times();
        let readings = read(&mut reader, &tids);
        (before == times()).then_some((readings, before))
    });
    assert_eq!((&readings[1], readings.last().unwrap()), (&None, &None), "there are no such threads");
    let mut ran = 0;
    for ((&tid, reading), times) in tids.iter().zip(&readings).zip(times) {
        let Some(reading) = reading else { continue };
        assert_eq!((Some(reading.times), &reading.counts), (times, &None), "thread {tid}");
        let (cpu, is_real_time) = procfs::read_cpu_and_class(pid(), tid).unwrap();
        assert_eq!((reading.pid, reading.cpu), (pid(), cpu), "thread {tid}");
        assert_eq!(matches!(reading.policy, 1 | 2 | 6), is_real_time, "thread {tid}");
        assert_eq!(reading.allowed, read_allowed(pid(), tid).unwrap(), "thread {tid}");
        // Ticks of 10 ms.
        assert_eq!(reading.start_ns / 10_000_000, procfs::read_start_time(pid(), tid).unwrap());
        ran += 1;
    }
    assert_eq!(ran, threads.len(), "all of them are there");
    let shown: Vec<_> = readings.iter().flatten().rev().take(2).collect();
    assert_eq!((shown[0].policy, shown[1].allowed.to_string()), (1, "0".to_owned()));
    let ended = threads.remove(0).tid;
    // A join returns a little before the thread is gone.
    until(|| (read(&mut reader, &[ended]) == [None]).then_some(()));
}

/// The number of a thread's system call and its stack, as its file says. `None`: it runs.
fn call(pid: i32, tid: i32) -> Option<Call> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")).unwrap();
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let number = words[0].parse().ok()?;
    Some(Call { number, stack: u64::from_str_radix(words[7].strip_prefix("0x")?, 16).unwrap() })
}

/// Times that a thread has begun to sleep.
fn sleeps(tid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/task/{tid}/status", pid())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn threads_do_what_their_files_say() {
    let Some(mut reader) = reader() else { return };
    let mut for_threads = TaskReader::load_for_threads().unwrap();
    assert!(for_threads.idle_times().is_err());
    let threads: Vec<Waiting> = (0..130).map(|_| Waiting::start(|| {})).collect();
    let mut tids: Vec<i32> = threads.iter().map(|thread| thread.tid).collect();
    tids.insert(1, i32::MAX);
    until(|| threads.iter().all(|thread| is_asleep(thread.tid)).then_some(()));
    let looks = |reader: &mut TaskReader, tids: &[i32]| {
        let mut looks = vec![None; tids.len()];
        reader.look(tids, |at, look: TaskLook| looks[at] = Some(look)).unwrap();
        looks
    };
    for reader in [&mut reader, &mut for_threads] {
        let looks = looks(reader, &tids);
        assert_eq!(looks[1], None, "there is no such thread");
        for (&tid, look) in tids.iter().zip(&looks).filter(|(_, look)| look.is_some()) {
            let look = look.unwrap();
            assert_eq!((look.pid, look.doing), (pid(), Doing::Sleeps(call(pid(), tid))), "thread {tid}");
            assert_eq!(look.start_ns / 10_000_000, procfs::read_start_time(pid(), tid).unwrap());
            assert_eq!(look.sleeps, sleeps(tid), "thread {tid}");
        }
        assert_eq!(looks.iter().flatten().count(), threads.len());
    }
    // What was asked for before is not taken for an answer.
    let own = gettid().as_raw();
    assert_eq!(looks(&mut reader, &[own])[0].map(|look| look.doing), Some(Doing::Runs));
    assert!(read(&mut reader, &[own])[0].is_some());
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let child_pid = child.id().cast_signed();
    let mut is = |doing: &dyn Fn(Doing) -> bool| {
        until(|| looks(&mut reader, &[child_pid])[0].is_some_and(|look| doing(look.doing)).then_some(()));
    };
    is(&|doing| matches!(doing, Doing::Sleeps(Some(_))));
    let signal = |signal| nix::sys::signal::kill(Pid::from_raw(child_pid), signal).unwrap();
    signal(nix::sys::signal::Signal::SIGSTOP);
    is(&|doing| doing == Doing::Stopped);
    signal(nix::sys::signal::Signal::SIGKILL);
    is(&|doing| doing == Doing::Ended);
    child.wait().unwrap();
    assert_eq!(looks(&mut reader, &[child_pid]), [None]);
}

/// What an allocator gives may have been touched before, by a thread that has ended.
fn touch_new_memory() {
    const LENGTH: usize = 4 << 20;
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, wherever the kernel likes, which is written as a whole and returned.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), LENGTH, access, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        libc::memset(at, 1, LENGTH);
        libc::munmap(at, LENGTH);
    }
}

/// Counts page faults and time, which need no PMU, and something else of the same thread that is not asked for.
#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn counters_are_as_a_read_of_them_says_once_the_thread_has_left_its_cpu() {
    let Some(mut reader) = reader() else { return };
    let (work, orders) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let thread = thread::spawn(move || {
        tell.send(gettid().as_raw()).unwrap();
        for () in orders {
            touch_new_memory();
            tell.send(0).unwrap();
        }
    });
    let tid = told.recv().unwrap();
    let build = |event: Software| {
        let mut builder = Builder::new(event);
        builder.observe_pid(tid).any_cpu().exclude_kernel(false).read_format(
            ReadFormat::GROUP
                | ReadFormat::TOTAL_TIME_ENABLED
                | ReadFormat::TOTAL_TIME_RUNNING
                | ReadFormat::ID,
        );
        builder
    };
    let mut other = build(Software::CPU_MIGRATIONS).build().unwrap();
    let mut leader = build(Software::TASK_CLOCK).build().unwrap();
    let members = [Software::PAGE_FAULTS, Software::CONTEXT_SWITCHES]
        .map(|event| build(event).build_with_group(&mut leader).unwrap());
    leader.enable_group().unwrap();
    other.enable().unwrap();
    let ids = [leader.id(), members[0].id(), members[1].id()];
    let mut ran = 0;
    for _ in 0..5 {
        work.send(()).unwrap();
        told.recv().unwrap();
        let mut by_descriptor = || {
            let data = leader.read_group().unwrap();
            let ns = |time: Option<Duration>| time.unwrap().as_nanos() as u64;
            let values = ids.map(|id| data.iter().find(|entry| entry.id() == id).unwrap().value());
            (values.to_vec(), ns(data.time_enabled()), ns(data.time_running()))
        };
        // Until it does not run any more.
        let (expected, read) = until(|| {
            let before = by_descriptor();
            let read = ask(&mut reader, &[Asked { tid, events: &ids }]);
            (before == by_descriptor()).then_some((before, read))
        });
        assert_eq!(read[0].as_ref().unwrap().counts.as_ref(), Some(&expected));
        let values = expected.0;
        assert!(values[0] > ran && values[1] > 0, "{values:?}");
        ran = values[0];
    }
    // What is no group of the thread is not read: another order, a counter that is not there, more than there is room for.
    let [first, second, third] = ids;
    for events in [&[first, third, second][..], &[first, u64::MAX], &[u64::MAX], &[first; 17]] {
        let read = ask(&mut reader, &[Asked { tid, events }]);
        let counts = &read[0].as_ref().unwrap().counts;
        assert!(counts.is_none(), "{events:?}: {counts:?}");
    }
    drop(work);
    thread.join().unwrap();
}

#[test]
#[cfg_attr(not(root), ignore = "BPF needs root")]
fn idle_times_are_those_of_the_file() {
    let Some(mut reader) = reader() else { return };
    if let Err(why) = reader.idle_times() {
        // Without CONFIG_KALLSYMS_ALL no variables are listed.
        let symbols = fs::read_to_string("/proc/kallsyms").unwrap();
        assert!(!symbols.lines().any(|line| line.ends_with(" runqueues")), "{why}");
        eprintln!("skipped: {why}");
        return;
    }
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(20));
        let before = read_idle_times(Path::new("/")).unwrap();
        reader.read(&[], |_, _| {}).unwrap();
        let after = read_idle_times(Path::new("/")).unwrap();
        let read: Vec<_> = reader.idle_times().unwrap().collect();
        let cpus = |times: &[(u32, u64)]| times.iter().map(|(cpu, _)| *cpu).collect::<Vec<_>>();
        assert_eq!(cpus(&read), cpus(&before));
        for ((before, read), after) in before.iter().zip(&read).zip(&after) {
            // The file has idle time and that of waiting for I/O, each in ticks of 10 ms, rounded down.
            let most = after.1 + 20_000_000;
            assert!((before.1..=most).contains(&read.1), "{before:?} {read:?} {after:?}");
        }
    }
}
