//! Threads and CPUs read by the BPF program, compared with what `/proc` says of them.

use nix::{
    sched::{CpuSet as Mask, sched_setaffinity},
    unistd::{Pid, gettid},
};
use std::{
    fs,
    path::Path,
    sync::mpsc,
    thread::{self, JoinHandle},
    time::Duration,
};
use vnuma_host::{
    read_idle_times,
    tasks::{TaskReader, TaskReading, cpus_of},
};
use vnuma_process::{procfs, read_allowed};
use vnuma_topology::CpuSet;

fn pid() -> i32 {
    std::process::id().cast_signed()
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

fn read(reader: &mut TaskReader, tids: &[i32]) -> Vec<Option<(TaskReading, CpuSet)>> {
    let mut readings = vec![None; tids.len()];
    reader.read(tids, |at, reading, mask| readings[at] = Some((reading, cpus_of(mask)))).unwrap();
    readings
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

    /// Until it sleeps: then its times stay as they are.
    fn settle(&self) {
        while procfs::state(&procfs::read_thread(pid(), self.tid, "stat", 4096).unwrap()) != Some("S") {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.end.take();
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
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
    threads.iter().for_each(Waiting::settle);
    let mut tids: Vec<i32> = threads.iter().map(|thread| thread.tid).collect();
    tids.insert(1, i32::MAX);
    tids.push(-1);
    let readings = read(&mut reader, &tids);
    assert_eq!((&readings[1], readings.last().unwrap()), (&None, &None), "there are no such threads");
    let mut ran = 0;
    for (&tid, reading) in tids.iter().zip(&readings) {
        let Some((reading, allowed)) = reading else { continue };
        let times = procfs::read_cpu_times(pid(), tid).unwrap();
        assert_eq!((reading.ran_ns, reading.waited_ns), (times.ran_ns, times.waited_ns), "thread {tid}");
        let (cpu, is_real_time) = procfs::read_cpu_and_class(pid(), tid).unwrap();
        assert_eq!((reading.pid, reading.cpu), (pid(), cpu), "thread {tid}");
        assert_eq!(matches!(reading.policy, 1 | 2 | 6), is_real_time, "thread {tid}");
        assert_eq!(*allowed, read_allowed(pid(), tid).unwrap(), "thread {tid}");
        // Ticks of 10 ms.
        assert_eq!(reading.start_ns / 10_000_000, procfs::read_start_time(pid(), tid).unwrap());
        ran += 1;
    }
    assert_eq!(ran, threads.len(), "all of them are there");
    let shown: Vec<_> = readings.iter().flatten().rev().take(2).collect();
    assert_eq!((shown[0].0.policy, shown[1].1.to_string()), (1, "0".to_owned()));
    let ended = threads.remove(0).tid;
    assert_eq!(read(&mut reader, &[ended]), [None], "it has ended");
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
        reader.read(&[], |_, _, _| {}).unwrap();
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
