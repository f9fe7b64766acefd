//! Mirror of `include/vnuma/tasks.h`: what vnumad asks of threads and CPUs, and the answer of a BPF program.

/// Threads that one run of the program reads.
pub const MAX_TASKS: usize = 128;
/// Counters of a thread that there is room for.
pub const MAX_EVENTS: usize = 16;
/// CPUs that there is room for.
pub const MAX_CPUS: usize = 8192;
/// Words of a mask of CPUs.
pub const MASK_WORDS: usize = 128;
/// [`Tasks::flags`]: all of a thread is wanted but what [`CALLS`] asks for.
pub const TIMES: u32 = 1;
/// [`Tasks::flags`]: state, call, stack and sleeps are wanted.
pub const CALLS: u32 = 2;
/// [`Task::state`]: it is on a CPU, or waits for one.
pub const RUNS: u32 = 0;
/// [`Task::state`]: it sleeps.
pub const SLEEPS: u32 = 1;
/// [`Task::state`]: a signal has stopped it.
pub const STOPPED: u32 = 2;
/// [`Task::state`]: a debugger holds it.
pub const TRACED: u32 = 3;
/// [`Task::state`]: it has ended.
pub const ENDED: u32 = 4;
/// [`Tasks::idle_ns`]: the CPU is offline.
pub const OFFLINE: u64 = u64::MAX;

/// `struct vnuma_task`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// Asked for; in the initial PID namespace.
    pub tid: u32,
    /// Its process; 0: there is no such thread.
    pub pid: u32,
    /// `CLOCK_BOOTTIME` of its start, nanoseconds.
    pub start_ns: u64,
    /// Time on a CPU, nanoseconds.
    pub ran_ns: u64,
    /// Time ready to run, without a CPU, nanoseconds.
    pub waited_ns: u64,
    /// CPU that it is on, or was on last.
    pub cpu: u32,
    /// `SCHED_*`.
    pub policy: u32,
    /// [`RUNS`] and the like.
    pub state: u32,
    /// System call in which it sleeps; negative: none.
    pub call: i32,
    /// Its stack in user space then.
    pub stack: u64,
    /// Times that it has begun to sleep.
    pub sleeps: u64,
    /// Asked for: counters of a group, the leader first.
    pub nr_events: u32,
    /// The same number, or 0: they could not be read.
    pub nr_counts: u32,
    /// Of the group: time that its thread was on a CPU, nanoseconds.
    pub enabled_ns: u64,
    /// Time that it was counting, nanoseconds.
    pub running_ns: u64,
    /// Asked for: their ids (`PERF_EVENT_IOC_ID`).
    pub events: [u64; MAX_EVENTS],
    /// When the thread last left its CPU, or later.
    pub counts: [u64; MAX_EVENTS],
    /// CPUs that it may run on, online or not.
    pub cpus: [u64; MASK_WORDS],
}

/// `struct vnuma_tasks`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tasks {
    /// Threads asked for.
    pub nr_tasks: u32,
    /// CPUs asked for, from 0 on.
    pub nr_cpus: u32,
    /// Of each mask that are wanted; the others stay as they are.
    pub mask_words: u32,
    /// [`TIMES`], [`CALLS`]. What is not wanted stays as it is.
    pub flags: u32,
    /// Of each CPU since the boot, nanoseconds, or [`OFFLINE`].
    pub idle_ns: [u64; MAX_CPUS],
    /// Threads.
    pub tasks: [Task; MAX_TASKS],
}
