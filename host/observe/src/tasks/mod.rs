//! What the scheduler knows of many threads, and how long each CPU was idle, by one call.
//!
//! ```text
//!   numbers of threads ──▶ mapped memory ◀── BPF program, run by that call: task_struct, kernel_cpustat
//!                               │
//!                               ▼
//!   times, CPU, class, allowed CPUs, start and counters of each, or what it does; idle time of each CPU
//! ```
//!
//! The same stands in `/proc/PID/task/TID/{schedstat,stat,status,syscall}` and `/proc/stat`. There the kernel makes text of it, file by
//! file, and the caller takes it apart again.
//!
//! Counters stand in `struct perf_event`. To read a group by its descriptor interrupts the CPU that the thread runs on.
//!
//! It needs Linux 6.10 with BTF, `CAP_BPF` and `CAP_PERFMON`, and thread numbers of the initial PID namespace. Elsewhere
//! [`TaskReader::load`] says why not, and the files have to be read. Idle times need symbols of the kernel's variables as well
//! (`CONFIG_KALLSYMS_ALL`); [`TaskReader::idle_times`] says so if there are none.

use crate::bpf::{prepare, words};
use libbpf_rs::{ErrorKind, MapCore, Object, ObjectBuilder, ProgramInput};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    ffi::c_void,
    fs, io,
    num::NonZero,
    ptr::{NonNull, addr_of, addr_of_mut},
};
use vnuma_abi_bpf::tasks::{
    CALLS, ENDED, MASK_WORDS, MAX_CPUS, MAX_EVENTS, MAX_TASKS, OFFLINE, RUNS, STOPPED, TIMES, TRACED, Task,
    Tasks,
};
use vnuma_model::{CpuId, CpuSet, CpuSetError};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tasks.bpf.o"));

/// Programs of the object.
const THREADS_ONLY: &str = "vnuma_tasks";
const WITH_CPUS: &str = "vnuma_tasks_and_cpus";

/// CPUs that the kernel has made room for.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

// A list of CPUs has no larger number than there is room for.
const _: () = assert!((CpuSet::MAX_CPU as usize) < MAX_CPUS);

/// CPUs of a word of a mask.
const WORD: usize = u64::BITS as usize;

/// A thread that is asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked<'a> {
    /// Its number.
    pub tid: i32,
    /// Ids of a group of counters that were opened for it (`PERF_EVENT_IOC_ID`), the leader first. Empty: none are wanted.
    pub events: &'a [u64],
}

/// What the scheduler knows of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskReading<'a> {
    /// Its process.
    pub pid: i32,
    /// When it began, `CLOCK_BOOTTIME`, nanoseconds. Number and start are unique.
    pub start_ns: u64,
    /// Time on a CPU, nanoseconds.
    pub ran_ns: u64,
    /// Time ready to run, without a CPU, nanoseconds.
    pub waited_ns: u64,
    /// The CPU that it is on, or was on last.
    pub cpu: CpuId,
    /// `SCHED_*`.
    pub policy: u32,
    /// CPUs that it may run on, online or not: bits of words ([`CpuSet::from_words`]).
    pub mask: &'a [u64],
    /// Its counters, if they were asked for and can be read.
    pub counts: Option<GroupCounts<'a>>,
}

/// Counters of a group since they were opened, as they were when the thread last left its CPU, or when somebody last read them.
/// They are as old as its turn on the CPU: no CPU is interrupted for newer ones, as a read of the group does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupCounts<'a> {
    /// How long the thread was on a CPU, nanoseconds.
    pub enabled_ns: u64,
    /// Of that, how long the group was counting, nanoseconds.
    pub running_ns: u64,
    /// In the order of the ids.
    pub values: &'a [u64],
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// It is on a CPU, or waits for one.
    Runs,
    /// It sleeps, in a system call or not.
    Sleeps(Option<Call>),
    /// A signal has stopped it.
    Stopped,
    /// A debugger holds it.
    Traced,
    /// It has ended. Its process may not have.
    Ended,
}

/// A system call in which a thread sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub number: i32,
    /// Where the thread's stack was.
    pub stack: u64,
}

/// What a look at a thread has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskLook {
    /// Its process.
    pub pid: i32,
    /// When it began, `CLOCK_BOOTTIME`, nanoseconds. Number and start are unique.
    pub start_ns: u64,
    /// What it does.
    pub doing: Doing,
    /// Times that it has begun to sleep, or to wait otherwise.
    pub sleeps: u64,
}

/// A BPF program in the kernel that reads threads and CPUs. It costs nothing until it is asked.
#[derive(Debug)]
pub struct TaskReader {
    object: Object,
    shared: Shared,
    /// Why idle times are not read.
    why_no_idle_times: Option<String>,
    /// CPUs that the host can have.
    cpus: usize,
    mask: Vec<u64>,
    counts: Vec<u64>,
}

impl TaskReader {
    /// Loads the program. The error explains why that is not possible here.
    pub fn load() -> Result<Self, String> {
        prepare()?;
        match load(WITH_CPUS) {
            Ok(object) => Self::of(object, None),
            Err(why) => Self::of(load_threads_only()?, Some(not_fitting(&why))),
        }
    }

    /// The same for a reader that is not used for idle times.
    pub fn load_for_threads() -> Result<Self, String> {
        prepare()?;
        Self::of(load_threads_only()?, Some("they are not read".to_owned()))
    }

    fn of(object: Object, why_no_idle_times: Option<String>) -> Result<Self, String> {
        let cpus = possible_cpus()?;
        let map = object.maps().next().ok_or("the program has no map")?;
        let shared = Shared::of(&map).map_err(|error| format!("mapping the program's memory: {error}"))?;
        let mut reader = Self {
            object,
            shared,
            why_no_idle_times,
            cpus,
            mask: vec![0; cpus.div_ceil(WORD)],
            counts: Vec::new(),
        };
        // A kernel may load what it then refuses to run.
        reader.run(0, reader.cpus, TIMES).map_err(|error| format!("running the program: {error}"))?;
        Ok(reader)
    }

    /// Reads threads. `visit` is given each one that exists, with its position. How long CPUs were idle is read at the same time.
    pub fn read(
        &mut self,
        asked: &[Asked<'_>],
        mut visit: impl FnMut(usize, TaskReading<'_>),
    ) -> io::Result<()> {
        let mut position = 0;
        let mut with_cpus = true;
        // Without threads it is the CPUs alone.
        for part in asked.chunks(MAX_TASKS).chain(asked.is_empty().then_some(asked)) {
            self.shared.ask(part.iter().copied());
            self.run(part.len(), if with_cpus { self.cpus } else { 0 }, TIMES)?;
            with_cpus = false;
            for at in 0..part.len() {
                if let Some(reading) = self.shared.task(at, self.cpus, &mut self.mask, &mut self.counts) {
                    visit(position + at, reading);
                }
            }
            position += part.len();
        }
        Ok(())
    }

    /// Looks what threads do, as `/proc/PID/syscall` says it. `visit` is given each one that exists, with its position.
    pub fn look(&mut self, tids: &[i32], mut visit: impl FnMut(usize, TaskLook)) -> io::Result<()> {
        for (number, part) in tids.chunks(MAX_TASKS).enumerate() {
            let asked = part.iter().map(|&tid| Asked { tid, events: &[] });
            self.shared.ask(asked);
            self.run(part.len(), 0, CALLS)?;
            for at in 0..part.len() {
                if let Some(look) = self.shared.look(at) {
                    visit(number * MAX_TASKS + at, look);
                }
            }
        }
        Ok(())
    }

    /// How long each CPU that is online had been idle since the boot when threads were read last, nanoseconds, in rising order
    /// of the CPUs. Before that, when the program was loaded. An error explains why that is not known.
    pub fn idle_times(&self) -> Result<impl Iterator<Item = (CpuId, u64)> + '_, &str> {
        if let Some(why) = &self.why_no_idle_times {
            return Err(why);
        }
        let idle = (0..self.cpus).map(|cpu| (cpu as CpuId, self.shared.idle_ns(cpu)));
        Ok(idle.filter(|(_, idle_ns)| *idle_ns != OFFLINE))
    }

    fn run(&mut self, tasks: usize, cpus: usize, flags: u32) -> io::Result<()> {
        self.shared.size([tasks, cpus, self.mask.len()], flags);
        let wanted = if self.why_no_idle_times.is_none() { WITH_CPUS } else { THREADS_ONLY };
        let program = self.object.progs_mut().find(|program| program.name() == wanted);
        let program = program.ok_or_else(|| io::Error::other("the object has no program"))?;
        match program.test_run(ProgramInput::default()) {
            Ok(output) if output.return_value == 0 => Ok(()),
            Ok(output) => Err(io::Error::other(format!("it returned {}", output.return_value))),
            Err(error) => Err(io::Error::other(words(&error))),
        }
    }
}

/// Loads one of the programs.
fn load(wanted: &str) -> libbpf_rs::Result<Object> {
    let mut open = ObjectBuilder::default().open_memory(OBJECT)?;
    let others = open.progs_mut().filter(|program| program.name() != wanted);
    others.for_each(|mut program| program.set_autoload(false));
    open.load()
}

fn load_threads_only() -> Result<Object, String> {
    load(THREADS_ONLY).map_err(|error| not_fitting(&error))
}

fn not_fitting(error: &libbpf_rs::Error) -> String {
    match error.kind() {
        // The verifier's refusal is that as well.
        ErrorKind::PermissionDenied => {
            format!("{}, or the BPF program does not fit the kernel", words(error))
        }
        _ => format!("the BPF program does not fit the kernel ({error})"),
    }
}

/// CPUs that the host can have: their numbers are below this.
fn possible_cpus() -> Result<usize, String> {
    let failed = |why: String| format!("{POSSIBLE}: {why}");
    let text = fs::read_to_string(POSSIBLE).map_err(|error| failed(error.to_string()))?;
    let possible: CpuSet = text.parse().map_err(|error: CpuSetError| failed(error.to_string()))?;
    let last = possible.iter().last().ok_or_else(|| failed("no CPU".to_owned()))?;
    Ok(last as usize + 1)
}

/// Bits of the last word of a mask that are CPUs. The kernel may have set others.
fn last_word(cpus: usize) -> u64 {
    u64::MAX >> (cpus.next_multiple_of(WORD) - cpus)
}

/// The memory of the program's map. The program writes to it while it runs, and that is while somebody waits in
/// [`TaskReader::run`]. Every access is a volatile one, as another process that may open the map could write to it at any time.
#[derive(Debug)]
struct Shared(NonNull<Tasks>);

// SAFETY: the mapping belongs to the process, not to a thread, and only its owner has the address.
unsafe impl Send for Shared {}

impl Shared {
    fn of(map: &impl MapCore) -> io::Result<Self> {
        if map.value_size() as usize != size_of::<Tasks>() {
            return Err(io::Error::other("its size is another one"));
        }
        let size = const { NonZero::new(size_of::<Tasks>()).expect("it has members") };
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, map.as_fd(), 0)? };
        Ok(Self(at.cast()))
    }

    /// Asks for the next run: number of threads and CPUs, words of a mask, and what is wanted of threads.
    fn size(&mut self, [tasks, cpus, words]: [usize; 3], flags: u32) {
        let all = self.0.as_ptr();
        // SAFETY: inside the mapping, which is writable and aligned to a page. There is no reference to it.
        unsafe {
            addr_of_mut!((*all).nr_tasks).write_volatile(tasks as u32);
            addr_of_mut!((*all).nr_cpus).write_volatile(cpus as u32);
            addr_of_mut!((*all).mask_words).write_volatile(words as u32);
            addr_of_mut!((*all).flags).write_volatile(flags);
        }
    }

    /// Asks for these threads, at most [`MAX_TASKS`].
    fn ask<'a>(&mut self, asked: impl Iterator<Item = Asked<'a>>) {
        for (at, Asked { tid, events }) in asked.enumerate().take(MAX_TASKS) {
            // Some of the counters of a group are of no use.
            let events = if events.len() <= MAX_EVENTS { events } else { &[] };
            // SAFETY: as above; `at` and `event` are positions of the arrays.
            unsafe {
                let task = addr_of_mut!((*self.0.as_ptr()).tasks[at]);
                addr_of_mut!((*task).tid).write_volatile(tid.cast_unsigned());
                addr_of_mut!((*task).nr_events).write_volatile(events.len() as u32);
                for (event, id) in events.iter().enumerate() {
                    addr_of_mut!((*task).events[event]).write_volatile(*id);
                }
            }
        }
    }

    /// What the thread at this position, below [`MAX_TASKS`], does. `None`: there is none.
    fn look(&self, at: usize) -> Option<TaskLook> {
        assert!(at < MAX_TASKS);
        // SAFETY: inside the mapping, as asserted.
        let task: *const Task = unsafe { addr_of!((*self.0.as_ptr()).tasks[at]) };
        macro_rules! value {
            ($member:ident) => {
                // SAFETY: any bytes are a valid integer; the rest as above.
                unsafe { addr_of!((*task).$member).read_volatile() }
            };
        }
        let pid = value!(pid).cast_signed();
        let call = || {
            let number = value!(call);
            (number >= 0).then(|| Call { number, stack: value!(stack) })
        };
        let doing = match value!(state) {
            RUNS => Doing::Runs,
            STOPPED => Doing::Stopped,
            TRACED => Doing::Traced,
            ENDED => Doing::Ended,
            _ => Doing::Sleeps(call()),
        };
        let (start_ns, sleeps) = (value!(start_ns), value!(sleeps));
        (pid > 0).then_some(TaskLook { pid, start_ns, doing, sleeps })
    }

    /// The answer for the thread at this position, below [`MAX_TASKS`]. `None`: there is none.
    fn task<'a>(
        &self,
        at: usize,
        cpus: usize,
        mask: &'a mut [u64],
        counts: &'a mut Vec<u64>,
    ) -> Option<TaskReading<'a>> {
        assert!(at < MAX_TASKS && mask.len() <= MASK_WORDS);
        // SAFETY: inside the mapping, as asserted.
        let task: *const Task = unsafe { addr_of!((*self.0.as_ptr()).tasks[at]) };
        macro_rules! value {
            ($member:ident) => {
                // SAFETY: any bytes are a valid integer; the rest as above.
                unsafe { addr_of!((*task).$member).read_volatile() }
            };
        }
        let pid = value!(pid).cast_signed();
        if pid <= 0 {
            return None;
        }
        for (word, to) in mask.iter_mut().enumerate() {
            // SAFETY: as above; a mask has more words than are asked for.
            *to = unsafe { addr_of!((*task).cpus[word]).read_volatile() };
        }
        mask.last_mut().into_iter().for_each(|last| *last &= last_word(cpus));
        let number = (value!(nr_counts) as usize).min(MAX_EVENTS);
        // SAFETY: as above; `number` is at most the length of the array.
        let read = |event: usize| unsafe { addr_of!((*task).counts[event]).read_volatile() };
        counts.clear();
        counts.extend((0..number).map(read));
        let (enabled_ns, running_ns) = (value!(enabled_ns), value!(running_ns));
        Some(TaskReading {
            pid,
            start_ns: value!(start_ns),
            ran_ns: value!(ran_ns),
            waited_ns: value!(waited_ns),
            cpu: value!(cpu),
            policy: value!(policy),
            mask,
            counts: (number > 0).then_some(GroupCounts { enabled_ns, running_ns, values: counts }),
        })
    }

    /// Of a CPU below [`MAX_CPUS`].
    fn idle_ns(&self, cpu: usize) -> u64 {
        assert!(cpu < MAX_CPUS);
        // SAFETY: inside the mapping, as asserted, and any bytes are a valid integer.
        unsafe { addr_of!((*self.0.as_ptr()).idle_ns[cpu]).read_volatile() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped by `of` with this size; it is not used any more.
        let unmapped = unsafe { munmap(self.0.cast::<c_void>(), size_of::<Tasks>()) };
        if let Err(error) = unmapped {
            tracing::error!(%error, "cannot unmap the memory of the BPF program");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_have_the_cpus_that_the_host_can_have() {
        assert_eq!(CpuSet::from_words(&[0b1001, 0, 1 << 63]).to_string(), "0,3,191");
        assert_eq!((last_word(64), last_word(128), last_word(65), last_word(2)), (u64::MAX, u64::MAX, 1, 3));
        assert!(possible_cpus().unwrap() >= std::thread::available_parallelism().unwrap().get());
    }
}
