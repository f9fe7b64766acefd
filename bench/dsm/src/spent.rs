//! What the nodes have sent and used until now. Unlike times, these figures change little when the machine has other work.

use anyhow::{Context, Result};
use nix::{
    libc,
    time::{ClockId, clock_gettime},
};
use std::{
    fmt,
    mem::MaybeUninit,
    ops::{Add, Sub},
    str::FromStr,
};
use vnuma_dsm_node::Node;

/// Of one node, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    pub messages: u64,
    pub bytes: u64,
    /// CPU time of all threads of the process, in the kernel too.
    pub cpu_ns: u64,
    /// How often one of its threads went to sleep.
    pub sleeps: u64,
}

impl Spent {
    /// Of the calling process, which is this node.
    pub fn now(node: &Node) -> Result<Self> {
        let [messages, bytes] = node.sent();
        Ok(Self { messages, bytes, cpu_ns: cpu_ns()?, sleeps: sleeps()? })
    }
}

/// CPU time of this process.
pub fn cpu_ns() -> Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).context("CLOCK_PROCESS_CPUTIME_ID")?;
    Ok(u64::try_from(time.tv_sec())? * 1_000_000_000 + u64::try_from(time.tv_nsec())?)
}

/// Voluntary context switches of this process.
pub fn sleeps() -> Result<u64> {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the kernel writes one `rusage`, which lives through the call.
    let result = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    nix::errno::Errno::result(result).context("getrusage")?;
    // SAFETY: the call has succeeded, so all of it is written.
    Ok(u64::try_from(unsafe { usage.assume_init() }.ru_nvcsw)?)
}

impl Add for Spent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            messages: self.messages + other.messages,
            bytes: self.bytes + other.bytes,
            cpu_ns: self.cpu_ns + other.cpu_ns,
            sleeps: self.sleeps + other.sleeps,
        }
    }
}

impl Sub for Spent {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            messages: self.messages - before.messages,
            bytes: self.bytes - before.bytes,
            cpu_ns: self.cpu_ns - before.cpu_ns,
            sleeps: self.sleeps - before.sleeps,
        }
    }
}

impl fmt::Display for Spent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.messages, self.bytes, self.cpu_ns, self.sleeps)
    }
}

impl FromStr for Spent {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers: Vec<u64> = text.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [messages, bytes, cpu_ns, sleeps] = numbers[..] else { anyhow::bail!("four numbers") };
        Ok(Self { messages, bytes, cpu_ns, sleeps })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_go_there_and_back() {
        let spent = Spent { messages: 1, bytes: 2, cpu_ns: 3, sleeps: 4 };
        assert_eq!(spent.to_string().parse::<Spent>().expect("four numbers"), spent);
        assert_eq!(spent + spent - spent, spent);
        assert!("1 2 3".parse::<Spent>().is_err());
    }

    #[test]
    fn a_thread_that_sleeps_is_counted() {
        let (cpu, before) = (cpu_ns().expect("a clock"), sleeps().expect("counted"));
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(sleeps().expect("counted") > before && cpu_ns().expect("a clock") >= cpu);
    }
}
