//! The counters of one thread.

use crate::{
    events::{Code, Events},
    period::{Meaning, Reading, is_recent, period},
};
use perf_event::{Counter, ReadFormat};
use std::io;
use vnuma_model::Counted;

/// Why a thread has no counters.
#[derive(Debug, thiserror::Error)]
pub enum CounterError {
    /// The kernel wants another privilege.
    #[error("counting {event}: not permitted: it needs CAP_PERFMON, or kernel.perf_event_paranoid of -1")]
    NotPermitted {
        /// What was to be counted.
        event: &'static str,
    },
    /// There is no such event, or no PMU at all.
    #[error("counting {event}: this host has no such counter")]
    Unsupported {
        /// What was to be counted.
        event: &'static str,
    },
    /// The thread has ended.
    #[error("thread {tid} has ended")]
    Ended {
        /// Which.
        tid: i32,
    },
    /// Too many descriptors.
    #[error("counting {event}: too many open files: raise the limit of vnumad (LimitNOFILE=)")]
    Descriptors {
        /// What was to be counted.
        event: &'static str,
    },
    /// The counters went away: the kernel gives nothing to read.
    #[error("the counters of thread {tid} were lost: {source}")]
    Lost {
        /// Whose.
        tid: i32,
        /// The system's error.
        source: io::Error,
    },
    /// Anything else.
    #[error("counting {event}: {source}")]
    System {
        /// What was to be counted.
        event: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl CounterError {
    pub(crate) fn open(code: Code, source: io::Error) -> Self {
        let event = match code {
            Code::Instructions => "instructions",
            Code::References => "cache-references",
            Code::Misses => "cache-misses",
            Code::NodeLoads => "node-loads",
            Code::NodeLoadMisses => "node-load-misses",
            Code::Raw(_) => "an event of the PMU",
        };
        Self::of(event, source)
    }

    pub(crate) fn of(event: &'static str, source: io::Error) -> Self {
        match source.raw_os_error() {
            // EPERM, EACCES
            Some(1 | 13) => Self::NotPermitted { event },
            // ENOENT, ENODEV, EINVAL, EOPNOTSUPP
            Some(2 | 19 | 22 | 95) => Self::Unsupported { event },
            // EMFILE, ENFILE
            Some(23 | 24) => Self::Descriptors { event },
            _ => Self::System { event, source },
        }
    }
}

/// The counters of one thread: a group, so that all of them count at the same time. They are closed when it is dropped.
#[derive(Debug)]
pub struct ThreadCounters {
    tid: i32,
    leader: Counter,
    /// In the order of the events, after the leader.
    others: Vec<Counter>,
    meanings: Vec<Meaning>,
    before: Reading,
}

impl ThreadCounters {
    /// Counts for this thread, from now on. See before and afterwards that it is the thread that was meant.
    pub fn open(tid: i32, events: &Events) -> Result<Self, CounterError> {
        // 0 would be the caller.
        if tid <= 0 {
            return Err(CounterError::Ended { tid });
        }
        Self::open_for(tid, events)
    }

    /// Counts for the calling thread.
    pub(crate) fn open_caller(events: &Events) -> Result<Self, CounterError> {
        Self::open_for(0, events)
    }

    fn open_for(tid: i32, events: &Events) -> Result<Self, CounterError> {
        let failed = |code, source: io::Error| match source.raw_os_error() {
            // ESRCH
            Some(3) => CounterError::Ended { tid },
            _ => CounterError::open(code, source),
        };
        let build = |code: Code| {
            let mut builder = code.builder();
            // A guest's kernel counts as a kernel. Everything else but what runs below the host counts, too.
            builder.observe_pid(tid).any_cpu().exclude_kernel(false).read_format(
                ReadFormat::GROUP
                    | ReadFormat::TOTAL_TIME_ENABLED
                    | ReadFormat::TOTAL_TIME_RUNNING
                    | ReadFormat::ID,
            );
            builder
        };
        let (first, rest) =
            events.list.split_first().unwrap_or((&(Code::Instructions, Meaning::Instructions), &[]));
        let mut leader = build(first.0).build().map_err(|source| failed(first.0, source))?;
        let mut others = Vec::with_capacity(rest.len());
        for (code, _) in rest {
            let member = build(*code).build_with_group(&mut leader);
            others.push(member.map_err(|source| failed(*code, source))?);
        }
        leader.enable_group().map_err(|source| failed(first.0, source))?;
        let meanings = events.list.iter().map(|(_, meaning)| meaning.clone()).collect();
        Ok(Self { tid, leader, others, meanings, before: Reading::default() })
    }

    /// Their ids (`PERF_EVENT_IOC_ID`), in the order of a [`Reading`].
    pub fn ids(&self) -> Vec<u64> {
        std::iter::once(&self.leader).chain(&self.others).map(Counter::id).collect()
    }

    /// The same as [`Self::read`], from a reading that a BPF program has made. `None`: that is too old, as it has less than half
    /// of the time that the thread was on a CPU since the last call.
    pub fn take(&mut self, now: Reading, ran_ns: u64) -> Option<Counted> {
        let fits = now.values.len() == self.meanings.len() && is_recent(&self.before, &now, ran_ns);
        fits.then(|| self.since(now))
    }

    fn since(&mut self, now: Reading) -> Counted {
        let period = period(&self.meanings, &self.before, &now);
        self.before = now;
        period
    }

    /// What happened since the last call, or since they were opened.
    pub fn read(&mut self) -> Result<Counted, CounterError> {
        let lost = |source| CounterError::Lost { tid: self.tid, source };
        let data = self.leader.read_group().map_err(lost)?;
        let value = |counter: &Counter| data.get(counter).map(|entry| entry.value());
        let nanoseconds = |time: Option<std::time::Duration>| time.map_or(0, |time| time.as_nanos() as u64);
        let counters = std::iter::once(&self.leader).chain(&self.others);
        let values: Option<Vec<u64>> = counters.map(value).collect();
        let Some(values) = values else {
            let source = io::Error::new(io::ErrorKind::UnexpectedEof, "a counter is missing");
            return Err(CounterError::Lost { tid: self.tid, source });
        };
        let now = Reading {
            values,
            enabled_ns: nanoseconds(data.time_enabled()),
            running_ns: nanoseconds(data.time_running()),
        };
        Ok(self.since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Detected, detect};
    use std::path::Path;

    #[test]
    fn errors_say_what_to_do() {
        let text = |code| CounterError::open(Code::Misses, io::Error::from_raw_os_error(code)).to_string();
        assert!(text(1).contains("CAP_PERFMON") && text(13).contains("perf_event_paranoid"));
        assert_eq!(text(2), "counting cache-misses: this host has no such counter");
        assert!(text(24).contains("LimitNOFILE"));
        assert!(text(5).starts_with("counting cache-misses: Input/output error"));
    }

    #[test]
    fn a_host_without_a_pmu_says_so_and_one_with_a_pmu_counts() {
        let detected @ Detected { .. } = detect(Path::new("/"), &[]);
        let Some(events) = &detected.events else {
            let whys: Vec<_> = detected.passed_over.iter().map(|passed| passed.why.as_str()).collect();
            assert_eq!(whys.len(), 4, "{whys:?}");
            assert!(whys.iter().all(|why| !why.is_empty()));
            return;
        };
        let mut counters = ThreadCounters::open_caller(events).expect("as a moment ago");
        let sum = (0..2_000_000_u64).fold(0_u64, |sum, n| std::hint::black_box(sum ^ n));
        std::hint::black_box(sum);
        match counters.read().expect("read") {
            Counted::Counted(counted) => assert!(counted.instructions > 1_000_000, "{counted:?}"),
            other => assert_eq!(other, Counted::Crowded),
        }
    }

    #[test]
    fn a_thread_that_is_gone_is_named() {
        let events = detect(Path::new("/"), &[]).events;
        let error = match events {
            Some(events) => ThreadCounters::open(i32::MAX, &events).expect_err("no such thread"),
            None => CounterError::Ended { tid: i32::MAX },
        };
        assert_eq!(error.to_string(), "thread 2147483647 has ended");
    }
}
