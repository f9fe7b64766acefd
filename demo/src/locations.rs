//! Where each vCPU thread was at each moment, from the kernel's own scheduler
//! trace: an ftrace instance with the time stamp counter as its clock, so that a
//! guest's readings can be compared after its TSC offset is taken off.

use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use vnuma_scenario::Nodes;

const TRACING: &str = "/sys/kernel/tracing/instances/vnuma-demo";
const BUFFER_KIB: u32 = 1024;

/// A scheduler trace that is being recorded.
pub struct Trace {
    start_cpus: BTreeMap<i32, u32>,
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
        Ok(Self { start_cpus })
    }

    /// Stops and returns where each thread was.
    pub fn stop(self) -> Result<Locations> {
        write("tracing_on", "0")?;
        let text = fs::read_to_string(format!("{TRACING}/trace")).context("reading the trace")?;
        check_complete(&text)?;
        let mut migrations =
            text.lines().filter(|line| !line.starts_with('#')).map(parse_line).collect::<Result<Vec<_>>>()?;
        migrations.sort_by_key(|migration| migration.tsc);
        remove()?;
        Ok(Locations::new(&self.start_cpus, &migrations))
    }
}

fn write(file: &str, value: &str) -> Result<()> {
    let path = format!("{TRACING}/{file}");
    fs::write(&path, value).with_context(|| format!("cannot write {value:?} to {path}"))
}

fn remove() -> Result<()> {
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

/// `# entries-in-buffer/entries-written: 12/12   #P:8`
fn check_complete(text: &str) -> Result<()> {
    let line = text.lines().find(|line| line.starts_with("# entries-in-buffer/"));
    let counts =
        line.and_then(|line| line.split_whitespace().nth(2)).and_then(|counts| counts.split_once('/'));
    let (kept, written) = counts.context("the trace does not say how many entries it holds")?;
    ensure!(kept == written, "the trace lost entries: {kept} of {written} kept");
    Ok(())
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

/// Where threads were, by time.
pub struct Locations(BTreeMap<i32, Vec<(u64, u32)>>);

impl Locations {
    /// `migrations` in order of time.
    fn new(start_cpus: &BTreeMap<i32, u32>, migrations: &[Migration]) -> Self {
        let mut threads: BTreeMap<i32, Vec<(u64, u32)>> = BTreeMap::new();
        for (&tid, &cpu) in start_cpus {
            let first = migrations.iter().find(|migration| migration.tid == tid);
            threads.insert(tid, vec![(0, first.map_or(cpu, |migration| migration.from_cpu))]);
        }
        for migration in migrations {
            if let Some(history) = threads.get_mut(&migration.tid) {
                history.push((migration.tsc, migration.to_cpu));
            }
        }
        Self(threads)
    }

    /// CPU of a thread at a time of the host's time stamp counter.
    pub fn cpu(&self, tid: i32, tsc: u64) -> Option<u32> {
        let history = self.0.get(&tid)?;
        let next = history.partition_point(|(since, _)| *since <= tsc);
        history.get(next.checked_sub(1)?).map(|(_, cpu)| *cpu)
    }

    /// How often a thread came to another node.
    pub fn node_changes(&self, tid: i32, nodes: &Nodes) -> usize {
        let history = self.0.get(&tid).map_or(&[][..], Vec::as_slice);
        history.windows(2).filter(|pair| nodes.of_cpu(pair[0].1) != nodes.of_cpu(pair[1].1)).count()
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
    fn an_overrun_trace_is_refused() {
        check_complete("# tracer: nop\n#\n# entries-in-buffer/entries-written: 7/7   #P:8\n").unwrap();
        let error = check_complete("# entries-in-buffer/entries-written: 7/9   #P:8\n").unwrap_err();
        assert!(error.to_string().contains("7 of 9"), "{error}");
        check_complete("").unwrap_err();
    }

    #[test]
    fn a_thread_is_where_its_last_migration_before_the_moment_put_it() {
        let migration = |tsc, from_cpu, to_cpu| Migration { tsc, tid: 1, from_cpu, to_cpu };
        let start = BTreeMap::from([(1, 7), (2, 4)]);
        let locations = Locations::new(&start, &[migration(100, 0, 2), migration(200, 2, 1)]);
        let seen: Vec<_> = [0, 99, 100, 199, 200, u64::MAX].map(|tsc| locations.cpu(1, tsc).unwrap()).into();
        assert_eq!(seen, [0, 0, 2, 2, 1, 1], "the first event's origin outranks the CPU read at the start");
        assert_eq!(locations.cpu(2, 500), Some(4));
        assert_eq!(locations.cpu(3, 500), None);
        let nodes = Nodes::new(vec![(0, "0-1".parse().unwrap()), (1, "2-3".parse().unwrap())]);
        assert_eq!(locations.node_changes(1, &nodes), 2);
        assert_eq!(locations.node_changes(2, &nodes), 0);
    }
}
