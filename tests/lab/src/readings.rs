//! What the BPF program reads of threads and CPUs, compared with what `/proc` says, on the server's kernel.

use anyhow::{Context, Result, anyhow, ensure};
use std::{fs, path::Path, thread, time::Duration};
use vnuma_model::CpuSet;
use vnuma_observe::{
    read_idle_times,
    tasks::{Asked, Call, Doing, TaskReader},
};
use vnuma_process::{procfs, read_allowed};

const ROUNDS: usize = 20;
/// The file has idle time and that of waiting for I/O, each in ticks of 10 ms that are rounded down.
const ROUNDED_NS: u64 = 20_000_000;

/// A thread that may run meanwhile is between two readings of its files; so is each CPU.
pub fn compare(pid: i32, tid: i32) -> Result<()> {
    let mut reader = TaskReader::load().map_err(|why| anyhow!("threads cannot be read by BPF: {why}"))?;
    let times = || procfs::read_cpu_times(pid, tid).context("its times");
    for _ in 0..ROUNDS {
        thread::sleep(Duration::from_millis(20));
        let before = (times()?, read_idle_times(Path::new("/"))?);
        let mut found = None;
        let note = |_, reading: vnuma_observe::tasks::TaskReading<'_>| {
            let times = procfs::CpuTimes { ran_ns: reading.ran_ns, waited_ns: reading.waited_ns };
            found = Some((reading.pid, times, CpuSet::from_words(reading.mask)));
        };
        reader.read(&[Asked { tid, events: &[] }], note)?;
        let after = (read_idle_times(Path::new("/"))?, times()?);
        let (process, read, allowed) = found.context("BPF does not find the thread")?;
        let between = |value: fn(&procfs::CpuTimes) -> u64| {
            (value(&before.0)..=value(&after.1)).contains(&value(&read))
        };
        let same = between(|times| times.ran_ns) && between(|times| times.waited_ns);
        ensure!(same, "times of thread {tid}: {read:?}, by files {:?} and {:?}", before.0, after.1);
        let expected = read_allowed(pid, tid)?;
        ensure!((process, &allowed) == (pid, &expected), "thread {tid} of {process}, CPUs {allowed}");
        let idle: Vec<_> = reader.idle_times().map_err(|why| anyhow!("idle times: {why}"))?.collect();
        ensure!(idle.len() == before.1.len(), "CPUs: {idle:?}, by the file {:?}", before.1);
        for ((from, read), to) in before.1.iter().zip(&idle).zip(&after.0) {
            let fits = from.0 == read.0 && (from.1..=to.1 + ROUNDED_NS).contains(&read.1);
            ensure!(fits, "idle time of a CPU: {read:?}, by the file {from:?} and {to:?}");
        }
    }
    println!("threads and CPUs read by BPF are as their files say, {ROUNDS} times");
    compare_looks(&mut reader, pid)
}

/// What the main thread of the process does, if it does the same before and after.
fn compare_looks(reader: &mut TaskReader, pid: i32) -> Result<()> {
    let path = format!("/proc/{pid}/task/{pid}/syscall");
    let text = || fs::read_to_string(&path).context("the call of its main thread");
    // One that has run meanwhile may wait in the same call again.
    let status = format!("/proc/{pid}/task/{pid}/status");
    let sleeps = || -> Result<String> {
        let text = fs::read_to_string(&status).context("the switches of its main thread")?;
        let line = text.lines().find(|line| line.starts_with("voluntary_ctxt_switches:"));
        Ok(line.with_context(|| format!("{status}: no voluntary switches"))?.to_owned())
    };
    let mut compared = 0;
    for _ in 0..ROUNDS {
        thread::sleep(Duration::from_millis(20));
        let (slept, before, mut found) = (sleeps()?, text()?, None);
        reader.look(&[pid], |_, look| found = Some(look))?;
        let words: Vec<&str> = before.split_ascii_whitespace().collect();
        let Some(Ok(number)) = words.first().map(|word| word.parse()) else { continue };
        if before != text()? || slept != sleeps()? {
            continue;
        }
        let stack =
            words.iter().nth_back(1).and_then(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
        let stack = stack.with_context(|| format!("{path}: {before:?}"))?;
        let look = found.context("BPF does not find the main thread")?;
        let expected = Doing::Sleeps((number >= 0).then_some(Call { number, stack }));
        ensure!(
            (look.pid, look.doing) == (pid, expected),
            "main thread {pid}: {look:?}, by its file {before:?}"
        );
        compared += 1;
    }
    ensure!(compared > 0, "the main thread of process {pid} never sleeps");
    println!("the main thread does what its file says, {compared} times");
    Ok(())
}
