//! What a thread did since it was begun to be counted: the lab's counters, and the kernel's account of its time.

use anyhow::{Context, Result};
use lab_count::perf::{Counter, Event, Mode, Target};
use serde::{Deserialize, Serialize};
use std::{fs, mem::offset_of};
use vnuma_abi_lab_counters::{
    Cpu, EVENT_CYCLES, EVENT_DRAM, EVENT_SECOND_DRAM, EVENT_SECOND_STREAMED, EVENT_STREAMED,
};
use vnuma_lab_pricing::{Counts, SecondLlc};

const fn word(offset: usize) -> Event {
    Event::Raw((offset / 8) as u64)
}

/// What programs do, without the kernels' work, in the order of [`Thread::read`].
const USER: [Event; 6] = [
    word(offset_of!(Cpu, instructions)),
    word(offset_of!(Cpu, base_cycles)),
    word(offset_of!(Cpu, llc_references)),
    word(offset_of!(Cpu, llc_streamed)),
    word(offset_of!(Cpu, llc_misses)),
    word(offset_of!(Cpu, llc_misses_streamed)),
];

/// Of the second last-level cache, likewise.
const SECOND: [Event; 2] =
    [word(offset_of!(Cpu, second_misses)), word(offset_of!(Cpu, second_misses_streamed))];

/// What of a thread is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Its cycles only.
    Cycles,
    /// What its programs do as well, with accesses of so many classes of distance.
    Programs(u64),
    /// And what a second last-level cache would miss of that.
    SecondLlc(u64),
}

impl Counted {
    fn classes(self) -> u64 {
        match self {
            Self::Cycles => 0,
            Self::Programs(classes) | Self::SecondLlc(classes) => classes,
        }
    }
}

/// Values that only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Values {
    /// What programs did: the guest's, and QEMU's on this thread.
    pub user: Counts,
    /// Modelled cycles of programs and kernels, under the server's profile.
    pub cycles: u64,
    /// Of these, those of programs; none if programs are not counted.
    #[serde(default)]
    pub program_cycles: Option<u64>,
    /// On a CPU, nanoseconds.
    pub ran_ns: u64,
    /// Waiting for one, nanoseconds.
    pub waited_ns: u64,
    /// Times that it went to another CPU.
    pub migrations: u64,
}

/// A thread that is counted.
pub struct Thread {
    pid: i32,
    /// Its number.
    pub tid: i32,
    classes: usize,
    user: Vec<Counter>,
    cycles: Counter,
    program_cycles: Option<Counter>,
}

impl Thread {
    /// Counts from now on.
    pub fn count(pid: i32, tid: i32, counted: Counted) -> Result<Self> {
        let open = |event, mode| {
            Counter::open(event, Target::Thread(tid), mode)
                .with_context(|| format!("perf_event_open, thread {tid}"))
        };
        let classes = counted.classes();
        let of = |first: u64| (0..classes).map(move |class| Event::Raw(first + class));
        let first = USER.into_iter().chain(of(EVENT_DRAM)).chain(of(EVENT_STREAMED));
        let second = SECOND.into_iter().chain(of(EVENT_SECOND_DRAM)).chain(of(EVENT_SECOND_STREAMED));
        let mut events = Vec::new();
        if counted != Counted::Cycles {
            events.extend(first);
        }
        if matches!(counted, Counted::SecondLlc(_)) {
            events.extend(second);
        }
        let user = events.into_iter().map(|event| open(event, Mode::User)).collect::<Result<_>>()?;
        let cycles = |mode| open(Event::Raw(EVENT_CYCLES), mode);
        let program_cycles = (counted != Counted::Cycles).then(|| cycles(Mode::User)).transpose()?;
        Ok(Self { pid, tid, classes: classes as usize, user, cycles: cycles(Mode::All)?, program_cycles })
    }

    /// Modelled cycles of programs and kernels up to now.
    pub fn cycles(&self) -> Result<u64> {
        self.cycles.read().with_context(|| format!("the counter of thread {}", self.tid))
    }

    /// Up to now.
    pub fn read(&self) -> Result<Values> {
        let user = self.user.iter().map(Counter::read).collect::<Result<Vec<_>, _>>()?;
        let at = |index: usize| user.get(index).copied().unwrap_or(0);
        let list = |first: usize| (first..first + self.classes).map(at).collect::<Vec<u64>>();
        let (first, classes) = (USER.len(), self.classes);
        let second = first + 2 * classes;
        let second_lists = second + SECOND.len();
        let (ran_ns, waited_ns) = self.times()?;
        Ok(Values {
            user: Counts {
                instructions: at(0),
                base_cycles: at(1),
                llc_references: at(2),
                llc_streamed: at(3),
                llc_misses: at(4),
                llc_misses_streamed: at(5),
                dram_by_class: list(first),
                streamed_by_class: list(first + classes),
                second: (user.len() > second).then(|| SecondLlc {
                    llc_misses: at(second),
                    llc_misses_streamed: at(second + 1),
                    dram_by_class: list(second_lists),
                    streamed_by_class: list(second_lists + classes),
                }),
                ..Counts::default()
            },
            cycles: self.cycles()?,
            program_cycles: self.program_cycles.as_ref().map(Counter::read).transpose()?,
            ran_ns,
            waited_ns,
            migrations: self.migrations()?,
        })
    }

    fn file(&self, name: &str) -> Result<String> {
        let path = format!("/proc/{}/task/{}/{name}", self.pid, self.tid);
        fs::read_to_string(&path).context(path)
    }

    /// Time on a CPU up to now, nanoseconds.
    pub fn ran_ns(&self) -> Result<u64> {
        Ok(self.times()?.0)
    }

    /// Documentation/scheduler/sched-stats.rst: time on a CPU, time waiting, slices.
    fn times(&self) -> Result<(u64, u64)> {
        let text = self.file("schedstat")?;
        let mut numbers = text.split_whitespace().map(str::parse::<u64>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(ran_ns)), Some(Ok(waited_ns))) => Ok((ran_ns, waited_ns)),
            _ => anyhow::bail!("schedstat of thread {}: {text:?}", self.tid),
        }
    }

    fn migrations(&self) -> Result<u64> {
        let text = self.file("sched")?;
        let line = text.lines().find_map(|line| line.strip_prefix("se.nr_migrations"));
        let number = line.and_then(|line| line.rsplit(':').next()?.trim().parse().ok());
        number.with_context(|| format!("sched of thread {}: no se.nr_migrations", self.tid))
    }
}

impl Values {
    /// What happened since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            user: self.user.since(&before.user),
            cycles: self.cycles.saturating_sub(before.cycles),
            program_cycles: self
                .program_cycles
                .zip(before.program_cycles)
                .map(|(now, before)| now.saturating_sub(before)),
            ran_ns: self.ran_ns.saturating_sub(before.ran_ns),
            waited_ns: self.waited_ns.saturating_sub(before.waited_ns),
            migrations: self.migrations.saturating_sub(before.migrations),
        }
    }
}

/// Counts all threads of a process, with their names.
pub fn threads_of(pid: i32) -> Result<Vec<(String, Thread)>> {
    let path = format!("/proc/{pid}/task");
    let mut threads = Vec::new();
    for entry in fs::read_dir(&path).with_context(|| path.clone())? {
        let entry = entry?;
        let tid = entry.file_name().to_string_lossy().parse().with_context(|| path.clone())?;
        let name = fs::read_to_string(entry.path().join("comm")).with_context(|| path.clone())?;
        threads.push((name.trim().to_owned(), Thread::count(pid, tid, Counted::Cycles)?));
    }
    Ok(threads)
}

/// The CPU that a thread was on last (proc(5), field 39 of `stat`).
pub fn last_cpu(pid: i32, tid: i32) -> Result<u32> {
    let path = format!("/proc/{pid}/task/{tid}/stat");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let field = text.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(36)?.parse().ok());
    field.with_context(|| format!("{path}: {text:?}"))
}
