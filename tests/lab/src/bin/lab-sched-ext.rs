//! Has a scheduler of `sched_ext` run all tasks of this machine for a time, with tasks to run.
//!
//! Exit status 1 if the kernel ended the scheduler, or if a task did not run for too long. A scheduler of another program may not run
//! here even while nothing changes: that is said, and is no fault.

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use libbpf_rs::{MapCore, MapMut, ObjectBuilder};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::{Pid, pipe},
};
use std::{
    fs::{self, File},
    io::{Read, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, available_parallelism, sleep},
    time::{Duration, Instant},
};
use vnuma_scenario::wait_for;
use vnuma_scheduled::{Other, loaded};

/// The program, aligned as libbpf reads it.
static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/by_node.bpf.o"));

const STATE: &str = "/sys/kernel/sched_ext/state";
/// Until the program of another scheduler has loaded it again, when CPUs come and go no more. Only ends a hang.
const LOADS_AGAIN: Duration = Duration::from_secs(120);
/// What the program of another scheduler says.
const OTHERS_LOG: &str = "/run/lab-sched-ext.log";
/// A task that has not run for so long waits for something that does not come.
const STUCK: Duration = Duration::from_secs(30);
/// Between two rounds of tasks that wait for each other, so that CPUs become idle.
const PAUSE: Duration = Duration::from_micros(300);

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// Idle CPUs by node, and tasks that wait for each other
    PerNode,
    /// Two tasks for each CPU that may run nowhere else, in the queues of nodes
    Global,
    /// The scheduler of another program, with tasks of both kinds
    Other,
    /// One that comes and goes without pause. It has no tasks: 7.3 warns now and then (`put_prev_task_scx()`) if a thread of the kernel
    /// starts as one comes that takes all
    Again,
}

#[derive(Parser)]
#[command(about = "Runs all tasks by a scheduler of sched_ext")]
struct Arguments {
    kind: Kind,
    /// How long
    seconds: u64,
    /// With `other`: so long before, while nothing changes
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    still: u64,
    /// With `other`: the kernel may end it and the program load it again, as it does where CPUs come and go
    #[arg(long)]
    anew: bool,
    /// With `other`: the program, and its options
    #[arg(last = true, required_if_eq("kind", "other"))]
    program: Vec<String>,
}

/// A task, and how often it has run.
struct Worker {
    name: String,
    rounds: Arc<AtomicU64>,
    seen: u64,
    since: Instant,
}

impl Worker {
    fn start(name: String, work: impl Fn(&AtomicU64) -> Result<()> + Send + 'static) -> Self {
        let rounds = Arc::new(AtomicU64::new(0));
        let its = Arc::clone(&rounds);
        thread::spawn(move || {
            if let Err(error) = work(&its) {
                eprintln!("{error:#}");
            }
        });
        Self { name, rounds, seen: 0, since: Instant::now() }
    }

    fn expect_to_run(&mut self) -> Result<()> {
        let rounds = self.rounds.load(Ordering::Relaxed);
        if rounds != self.seen {
            (self.seen, self.since) = (rounds, Instant::now());
        }
        ensure!(self.since.elapsed() < STUCK, "{} has not run for {STUCK:?}", self.name);
        Ok(())
    }
}

fn bound(cpu: usize) -> Worker {
    Worker::start(format!("a task of CPU {cpu}"), move |rounds| {
        let mut cpus = CpuSet::new();
        cpus.set(cpu)?;
        sched_setaffinity(Pid::from_raw(0), &cpus)?;
        loop {
            rounds.fetch_add(1, Ordering::Relaxed);
        }
    })
}

/// Two tasks of which one waits for the other.
fn pair(number: usize) -> Result<[Worker; 2]> {
    let (to, from) = (pipe()?, pipe()?);
    let (asked, ask) = (File::from(to.0), File::from(to.1));
    let (answered, answer) = (File::from(from.0), File::from(from.1));
    let asks = move |rounds: &AtomicU64| -> Result<()> {
        loop {
            (&ask).write_all(&[0])?;
            (&answered).read_exact(&mut [0])?;
            rounds.fetch_add(1, Ordering::Relaxed);
            sleep(PAUSE);
        }
    };
    let answers = move |rounds: &AtomicU64| -> Result<()> {
        loop {
            (&asked).read_exact(&mut [0])?;
            (&answer).write_all(&[0])?;
            rounds.fetch_add(1, Ordering::Relaxed);
        }
    };
    Ok([Worker::start(format!("asker {number}"), asks), Worker::start(format!("answerer {number}"), answers)])
}

fn state() -> Result<String> {
    Ok(fs::read_to_string(STATE).context(STATE)?.trim().to_owned())
}

fn expect_enabled() -> Result<()> {
    let state = state()?;
    ensure!(state == "enabled", "the kernel has ended the scheduler: {STATE} is {state}");
    Ok(())
}

/// The kernel takes each of them, and none leaves anything behind that the next one stumbles over.
fn come_and_go(map: &mut MapMut<'_>, end: Instant) -> Result<()> {
    println!("loaded");
    let mut times = 0;
    while Instant::now() < end {
        let link = map.attach_struct_ops().context("the kernel refuses the scheduler")?;
        expect_enabled()?;
        drop(link);
        let since = Instant::now();
        while state()? != "disabled" {
            ensure!(since.elapsed() < STUCK, "the scheduler has not gone for {STUCK:?}");
            sleep(PAUSE);
        }
        times += 1;
    }
    println!("it has come and gone {times} times");
    Ok(())
}

/// Two tasks for each CPU run all the time.
fn run_tasks(
    map: &mut MapMut<'_>,
    seconds: u64,
    of_cpu: impl Fn(usize) -> Result<[Worker; 2]>,
) -> Result<()> {
    let _link = map.attach_struct_ops()?;
    let mut workers = Vec::new();
    for cpu in 0..available_parallelism()?.get() {
        workers.extend(of_cpu(cpu)?);
    }
    println!("loaded");
    watch(seconds, &mut workers, expect_enabled)?;
    report(&workers, "");
    Ok(())
}

/// Has all workers run for a time. `check` is asked now and then.
fn watch(seconds: u64, workers: &mut [Worker], mut check: impl FnMut() -> Result<()>) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        sleep(Duration::from_millis(500));
        check()?;
        workers.iter_mut().try_for_each(Worker::expect_to_run)?;
    }
    Ok(())
}

fn report(workers: &[Worker], more: &str) {
    let rounds: u64 = workers.iter().map(|worker| worker.rounds.load(Ordering::Relaxed)).sum();
    println!("{} tasks, {rounds} rounds{more}", workers.len());
}

/// One that the kernel refuses, or that does not run while nothing changes, is named, and no fault of what changes later.
fn run_another(arguments: &Arguments) -> Result<()> {
    let (program, options) = arguments.program.split_first().context("no program")?;
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let mut other = match Other::load(program, &options, OTHERS_LOG.into())? {
        Ok(other) => other,
        Err(why) => return refused(&why),
    };
    let cpus = available_parallelism()?.get();
    let mut workers = vec![bound(cpus - 1), bound(cpus - 1)];
    for number in 0..cpus {
        workers.extend(pair(number)?);
    }
    let still = watch(arguments.still, &mut workers, || {
        ensure!(other.stayed()?, "it ends by itself");
        Ok(())
    });
    if let Err(why) = still {
        return refused(&format!("{program}: {why:#}: {:?}", other.end()?));
    }
    println!("loaded");
    let anew = arguments.anew;
    let watched = watch(arguments.seconds, &mut workers, || {
        if anew {
            ensure!(other.runs()?, "{program} has ended");
        } else {
            ensure!(other.stayed()?, "{program} does not schedule any more");
        }
        Ok(())
    });
    let watched = watched.and_then(|()| match anew {
        true => wait_for("the program to load it again", LOADS_AGAIN, || Ok(loaded()?.is_some())),
        false => Ok(()),
    });
    let times_anew = other.times_anew()?;
    let ended = other.end()?;
    watched.with_context(|| format!("{ended:?}"))?;
    ensure!(anew || ended.is_ok(), "{program}: {ended:?}");
    report(&workers, &format!(", loaded again {times_anew} times"));
    Ok(())
}

fn refused(why: &str) -> Result<()> {
    println!("refused: {}", why.replace('\n', " "));
    Ok(())
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let wanted = match arguments.kind {
        Kind::PerNode => "per_node",
        Kind::Global => "global",
        Kind::Other => return run_another(&arguments),
        Kind::Again => "partial",
    };
    let mut open = ObjectBuilder::default().open_memory(OBJECT)?;
    for mut map in open.maps_mut().filter(|map| map.name() != wanted) {
        map.set_autocreate(false)?;
    }
    let mut object = open.load()?;
    let mut map: MapMut<'_> = object.maps_mut().find(|map| map.name() == wanted).context("no such map")?;
    match arguments.kind {
        Kind::PerNode => run_tasks(&mut map, arguments.seconds, pair),
        Kind::Global => run_tasks(&mut map, arguments.seconds, |cpu| Ok([bound(cpu), bound(cpu)])),
        Kind::Again => come_and_go(&mut map, Instant::now() + Duration::from_secs(arguments.seconds)),
        Kind::Other => unreachable!("it has run"),
    }
}
