//! Where each vCPU thread was at each moment, from the kernel's own scheduler
//! trace: an ftrace instance with the time stamp counter as its clock, so that a
//! guest's readings can be compared after its TSC offset is taken off.

use anyhow::{Context, Result, bail, ensure};
use nix::sys::time::{TimeSpec, TimeValLike};
use nix::time::{ClockId, clock_gettime};
use std::arch::x86_64::_rdtsc;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use vnuma_scenario::Nodes;

const TRACING: &str = "/sys/kernel/tracing/instances/vnuma-demo";
const BUFFER_KIB: u32 = 1024;

/// The host's time stamp counter, now.
pub fn tsc() -> u64 {
    // SAFETY: RDTSC has no effect on memory.
    unsafe { _rdtsc() }
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every kernel has this clock");
    u64::try_from(TimeSpec::num_nanoseconds(&now)).expect("it counts from the boot")
}

/// Seconds from the time stamp counter, which is compared with the kernel's clock over a whole run.
pub struct Clock {
    start: Instant,
    /// The same by `CLOCK_MONOTONIC`, whose values others name.
    start_ns: u64,
    start_tsc: u64,
}

impl Clock {
    /// Begins at 0 s.
    pub fn start() -> Self {
        Self { start: Instant::now(), start_ns: monotonic_ns(), start_tsc: tsc() }
    }

    /// Seconds between the start and a time of `CLOCK_MONOTONIC`; negative before it.
    pub fn seconds_of_ns(&self, ns: u64) -> f64 {
        ns.wrapping_sub(self.start_ns).cast_signed() as f64 / 1e9
    }

    /// Seconds since the start.
    pub fn elapsed(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Seconds of each value that the counter had between the start and now, or a little outside.
    pub fn seconds(&self) -> impl Fn(u64) -> f64 + use<> {
        let (elapsed, ticks) = (self.start.elapsed().as_secs_f64(), tsc().wrapping_sub(self.start_tsc));
        let start_tsc = self.start_tsc;
        move |tsc| tsc.wrapping_sub(start_tsc).cast_signed() as f64 * elapsed / ticks as f64
    }
}

/// A scheduler trace that is being recorded.
pub struct Trace {
    start_cpus: BTreeMap<i32, u32>,
    pipe: File,
    /// The beginning of a line whose end was not read yet.
    unread: Vec<u8>,
    migrations: Vec<Migration>,
}

/// A thread moved to another CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Migration {
    tsc: u64,
    tid: i32,
    from_cpu: u32,
    to_cpu: u32,
}

impl Trace {
    /// Starts to record the migrations of these threads.
    pub fn start(tids: &[i32]) -> Result<Self> {
        remove()?;
        fs::create_dir(TRACING).with_context(|| format!("cannot create {TRACING} (is tracefs mounted?)"))?;
        let filter: Vec<String> = tids.iter().map(|tid| format!("pid == {tid}")).collect();
        write("trace_clock", "x86-tsc")?;
        write("buffer_size_kb", &BUFFER_KIB.to_string())?;
        write("events/sched/sched_migrate_task/filter", &filter.join(" || "))?;
        write("events/sched/sched_migrate_task/enable", "1")?;
        write("tracing_on", "1")?;
        // Read after the trace is on: a thread that migrates in between has an
        // event, whose origin is used instead.
        let start_cpus = tids.iter().map(|&tid| Ok((tid, current_cpu(tid)?))).collect::<Result<_>>()?;
        let path = format!("{TRACING}/trace_pipe");
        let pipe = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path).context(path)?;
        Ok(Self { start_cpus, pipe, unread: Vec::new(), migrations: Vec::new() })
    }

    /// Takes what was recorded since the last call out of the trace; cheap, as each event is read once.
    fn read(&mut self) -> Result<()> {
        let mut bytes = vec![0; 1 << 16];
        loop {
            match self.pipe.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) => self.unread.extend(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("reading the trace"),
            }
        }
        let end = self.unread.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
        let lines: Vec<u8> = self.unread.drain(..end).collect();
        for line in String::from_utf8_lossy(&lines).lines() {
            self.migrations.push(parse_line(line)?);
        }
        // The kernel merges the buffers of its CPUs, but an event may be late.
        self.migrations.sort_by_key(|migration| migration.tsc);
        Ok(())
    }

    /// Where each thread was until now, in nodes of the host.
    pub fn so_far(&mut self, nodes: &Nodes) -> Result<Locations> {
        self.read()?;
        Ok(Locations::new(&self.start_cpus, &self.migrations, nodes))
    }

    /// Stops and returns where each thread was.
    pub fn stop(mut self, nodes: &Nodes) -> Result<Locations> {
        write("tracing_on", "0")?;
        let locations = self.so_far(nodes)?;
        check_complete(&Path::new(TRACING).join("per_cpu"))?;
        // The instance cannot be removed while its pipe is open.
        drop(self.pipe);
        remove()?;
        Ok(locations)
    }
}

fn write(file: &str, value: &str) -> Result<()> {
    let path = format!("{TRACING}/{file}");
    fs::write(&path, value).with_context(|| format!("cannot write {value:?} to {path}"))
}

/// Removes what a run has left, or an earlier one that was killed.
pub fn remove() -> Result<()> {
    let path = PathBuf::from(TRACING);
    if path.exists() {
        write("tracing_on", "0")?;
        fs::remove_dir(&path).with_context(|| format!("cannot remove {TRACING}"))?;
    }
    Ok(())
}

fn current_cpu(tid: i32) -> Result<u32> {
    let path = format!("/proc/{tid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| path.clone())?;
    // Field 39, counted after the command name, which may hold spaces (proc(5)).
    let rest = stat.rsplit_once(')').with_context(|| format!("{path}: no command name"))?.1;
    let field = rest.split_whitespace().nth(36).with_context(|| format!("{path}: no field 39"))?;
    field.parse().with_context(|| format!("{path}: field 39 is {field:?}"))
}

/// An error if the kernel overwrote or dropped an event of any CPU before it was read.
fn check_complete(per_cpu: &Path) -> Result<()> {
    let entries = fs::read_dir(per_cpu).with_context(|| per_cpu.display().to_string())?;
    let paths = entries.map(|entry| Ok(entry?.path().join("stats"))).collect::<Result<Vec<_>>>()?;
    ensure!(!paths.is_empty(), "{}: no CPU", per_cpu.display());
    for path in paths {
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let lost = lost_events(&text).with_context(|| format!("{}: {text:?}", path.display()))?;
        ensure!(lost == 0, "{}: the trace lost {lost} events", path.display());
    }
    Ok(())
}

/// `overrun: 0` and `dropped events: 0`, among others.
fn lost_events(stats: &str) -> Option<u64> {
    let count = |name: &str| -> Option<u64> {
        stats.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")?.trim().parse().ok())
    };
    Some(count("overrun")? + count("commit overrun")? + count("dropped events")?)
}

/// `  <idle>-0  [003] dNh.. 123456: sched_migrate_task: comm=CPU 1/KVM pid=412 prio=120 orig_cpu=3 dest_cpu=5`
fn parse_line(line: &str) -> Result<Migration> {
    let parse = || -> Option<Migration> {
        let (head, event) = line.split_once(": sched_migrate_task: ")?;
        // A vCPU thread's name holds a space, so the fields are read from the right.
        let mut fields = event.rsplitn(5, ' ');
        let mut field = |name: &str| fields.next()?.strip_prefix(name)?.parse::<u32>().ok();
        let to_cpu = field("dest_cpu=")?;
        let from_cpu = field("orig_cpu=")?;
        field("prio=")?;
        let tid = field("pid=")?.try_into().ok()?;
        let tsc = head.rsplit(' ').next()?.parse().ok()?;
        Some(Migration { tsc, tid, from_cpu, to_cpu })
    };
    match parse() {
        Some(migration) => Ok(migration),
        None => bail!("cannot read this line of the trace: {line:?}"),
    }
}

/// On which node of the host threads were, by time.
pub struct Locations(BTreeMap<i32, Vec<Stay>>);

/// A thread came to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stay {
    /// When, by the host's time stamp counter; 0 where it was at the start.
    pub since_tsc: u64,
    /// The node; none for a CPU of no node.
    pub node: Option<u32>,
}

impl Locations {
    /// `migrations` in order of time.
    fn new(start_cpus: &BTreeMap<i32, u32>, migrations: &[Migration], nodes: &Nodes) -> Self {
        let mut threads: BTreeMap<i32, Vec<Stay>> = BTreeMap::new();
        for (&tid, &cpu) in start_cpus {
            let first = migrations.iter().find(|migration| migration.tid == tid);
            let node = nodes.of_cpu(first.map_or(cpu, |migration| migration.from_cpu));
            threads.insert(tid, vec![Stay { since_tsc: 0, node }]);
        }
        for migration in migrations {
            let node = nodes.of_cpu(migration.to_cpu);
            if let Some(stays) = threads.get_mut(&migration.tid)
                && stays.last().is_none_or(|stay| stay.node != node)
            {
                stays.push(Stay { since_tsc: migration.tsc, node });
            }
        }
        Self(threads)
    }

    #[cfg(test)]
    pub fn of(tid: i32, stays: &[Stay]) -> Self {
        Self(BTreeMap::from([(tid, stays.to_vec())]))
    }

    /// Node of a thread at a time of the host's time stamp counter.
    pub fn node(&self, tid: i32, tsc: u64) -> Option<u32> {
        let stays = self.stays(tid);
        let next = stays.partition_point(|stay| stay.since_tsc <= tsc);
        stays.get(next.checked_sub(1)?)?.node
    }

    /// Where a thread was one after the other. Each stay is on another node than the one before.
    pub fn stays(&self, tid: i32) -> &[Stay] {
        self.0.get(&tid).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "     qemu-system-x86-431     [001] d..2. 98765432100: sched_migrate_task: comm=CPU 1/KVM pid=412 prio=120 orig_cpu=3 dest_cpu=5";

    #[test]
    fn a_line_of_a_thread_whose_name_has_a_space_is_read() {
        let migration = parse_line(LINE).unwrap();
        assert_eq!(migration, Migration { tsc: 98_765_432_100, tid: 412, from_cpu: 3, to_cpu: 5 });
        assert!(parse_line("CPU:3 [LOST 12 EVENTS]").unwrap_err().to_string().contains("LOST 12 EVENTS"));
    }

    #[test]
    fn a_trace_that_lost_events_is_refused() {
        let stats = "entries: 0\noverrun: 0\ncommit overrun: 0\nbytes: 40\nnow ts:   1\ndropped events: 0\nread events: 7\n";
        assert_eq!(lost_events(stats), Some(0));
        assert_eq!(lost_events(&stats.replace("overrun: 0", "overrun: 2")), Some(4));
        assert_eq!(lost_events(&stats.replace("dropped events: 0", "dropped events: 3")), Some(3));
        assert_eq!(lost_events("entries: 0\n"), None);
        let directory = tempfile::tempdir().unwrap();
        check_complete(directory.path()).unwrap_err();
        for (cpu, lost) in [("cpu0", "0"), ("cpu1", "9")] {
            fs::create_dir(directory.path().join(cpu)).unwrap();
            let text = stats.replace("dropped events: 0", &format!("dropped events: {lost}"));
            fs::write(directory.path().join(cpu).join("stats"), text).unwrap();
            assert_eq!(check_complete(directory.path()).is_ok(), lost == "0");
        }
    }

    #[test]
    fn a_thread_is_where_its_last_migration_before_the_moment_put_it() {
        let migration = |tsc, from_cpu, to_cpu| Migration { tsc, tid: 1, from_cpu, to_cpu };
        let start = BTreeMap::from([(1, 7), (2, 4)]);
        let nodes = [(0, "0-1"), (1, "2-3"), (2, "4")].map(|(node, cpus)| (node, cpus.parse().unwrap()));
        let nodes = Nodes::new(nodes.into());
        let migrations = [migration(100, 0, 2), migration(150, 2, 3), migration(200, 3, 1)];
        let locations = Locations::new(&start, &migrations, &nodes);
        let seen: Vec<_> = [0, 99, 100, 199, 200, u64::MAX].map(|tsc| locations.node(1, tsc).unwrap()).into();
        assert_eq!(seen, [0, 0, 1, 1, 0, 0], "the first event's origin outranks the CPU read at the start");
        assert_eq!(locations.stays(1).len(), 3, "a migration inside of a node is no change");
        assert_eq!(locations.node(2, 500), Some(2));
        assert_eq!((locations.node(3, 500), locations.stays(3)), (None, &[][..]));
        let elsewhere = Locations::new(&BTreeMap::from([(1, 9)]), &[], &nodes);
        assert_eq!(elsewhere.node(1, 0), None, "a CPU of no node");
    }

    #[test]
    fn the_clock_counts_from_its_start() {
        let clock = Clock::start();
        std::thread::sleep(std::time::Duration::from_millis(50));
        let seconds = clock.seconds();
        assert_eq!(seconds(clock.start_tsc), 0.0);
        assert!(seconds(clock.start_tsc.wrapping_sub(1 << 20)) < 0.0);
        assert!((0.05..60.0).contains(&seconds(tsc())), "{}", seconds(tsc()));
        assert!((0.05..60.0).contains(&clock.seconds_of_ns(monotonic_ns())));
        assert_eq!(clock.seconds_of_ns(clock.start_ns - 1_000_000_000), -1.0);
    }
}
