//! `perf_event_open(2)`, as far as it is needed here.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::FromRawFd;

const TYPE_SOFTWARE: u32 = 1;
const TYPE_RAW: u32 = 4;
const COUNT_SW_TASK_CLOCK: u64 = 1;
const FLAG_DISABLED: u64 = 1 << 0;
const FLAG_INHERIT: u64 = 1 << 1;
const FLAG_EXCLUDE_KERNEL: u64 = 1 << 5;
const FLAG_EXCLUDE_HV: u64 = 1 << 6;
const FLAG_ENABLE_ON_EXEC: u64 = 1 << 12;
const OPEN_CLOEXEC: libc::c_ulong = 8;

/// `struct perf_event_attr` of its first version.
#[repr(C)]
struct Attr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    config1: u64,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A raw event of the PMU.
    Raw(u64),
    /// Nanoseconds on a CPU.
    TaskClock,
}

/// Whom it is counted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The calling thread, from now on.
    Caller,
    /// Commands that the caller will run, from their `exec` on, and all that they start.
    Commands,
    /// Another thread, from now on.
    Thread(i32),
}

/// Whose work is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// All.
    #[default]
    All,
    /// Programs' own, without the kernel's for them.
    User,
}

/// A running counter.
#[derive(Debug)]
pub struct Counter(File);

impl Counter {
    /// Starts counting.
    pub fn open(event: Event, target: Target, mode: Mode) -> io::Result<Self> {
        let (kind, config) = match event {
            Event::Raw(config) => (TYPE_RAW, config),
            Event::TaskClock => (TYPE_SOFTWARE, COUNT_SW_TASK_CLOCK),
        };
        let (thread, flags) = match target {
            Target::Caller => (0, 0),
            Target::Commands => (0, FLAG_DISABLED | FLAG_INHERIT | FLAG_ENABLE_ON_EXEC),
            Target::Thread(thread) => (thread, 0),
        };
        // The clock has no modes.
        let flags = match (mode, event) {
            (Mode::User, Event::Raw(_)) => flags | FLAG_EXCLUDE_KERNEL | FLAG_EXCLUDE_HV,
            _ => flags,
        };
        let attr = Attr {
            kind,
            size: size_of::<Attr>() as u32,
            config,
            sample_period: 0,
            sample_type: 0,
            read_format: 0,
            flags,
            wakeup_events: 0,
            bp_type: 0,
            config1: 0,
        };
        // SAFETY: the kernel reads `size` bytes of `attr`, which lives through the call; the other arguments are numbers.
        let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &attr, thread, -1, -1, OPEN_CLOEXEC) };
        let fd = i32::try_from(fd).ok().filter(|&fd| fd >= 0).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the call has just made this descriptor, and nothing else owns it.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// What was counted up to now.
    pub fn read(&self) -> io::Result<u64> {
        let mut value = [0; 8];
        (&self.0).read_exact(&mut value)?;
        Ok(u64::from_ne_bytes(value))
    }
}
