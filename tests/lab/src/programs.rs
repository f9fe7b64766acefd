//! What programs of other runtimes read of the topology, when, and whether they follow it through the kernel and sysfs alone: each runs
//! as it comes under strace, and a vCPU is moved.
//!
//! strace sees system calls and no call of the vDSO: that a program asks for its CPU (`sched_getcpu()`) is not seen, what it makes
//! of it is, by where its memory is.

use crate::guest::{DEFAULT_KERNEL, check_kernel_log, equip_with, show_guest, wait_until_seen};
use crate::runtimes::{DIRECTORY, install};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fmt;
use std::io::Write;
use std::ops::RangeInclusive;
use std::process::{ChildStdin, ChildStdout};
use vnuma_scenario::{Lines, Process, Vm, vnumactl, vnumad};

mod postgres;

const NAME: &str = "programs";
/// What `make soak` brings, and where it is in the guest. Any user can read it there.
const ARCHIVE: &str = "programs.tar";
const THERE: &str = "/opt/programs";
/// Pages of 2 MiB of each node for DPDK.
const HUGE_PAGES: u32 = 24;
/// Rounds of `again` until it is looked at. The first ones can still get what another round of a garbage collector has left.
const ROUNDS: usize = 4;
/// System calls that say or ask something about nodes and CPUs.
const CALLS: [&str; 9] = [
    "sched_getaffinity",
    "sched_setaffinity",
    "getcpu",
    "get_mempolicy",
    "set_mempolicy",
    "set_mempolicy_home_node",
    "mbind",
    "move_pages",
    "migrate_pages",
];
/// Where the topology stands in files.
const PLACES: [&str; 6] = [
    "/sys/devices/system/node",
    "/sys/devices/system/cpu",
    "/proc/cpuinfo",
    "/proc/stat",
    "/proc/self/status",
    "/proc/self/numa_maps",
];

/// Files, with `N` for each number, and system calls.
type Reads = BTreeSet<String>;

/// A share of memory that is on the node of now, percent.
type Share = Option<u64>;

/// What was seen of a program.
#[derive(Debug, Default)]
struct Row {
    name: String,
    version: String,
    at_start: Reads,
    later: Reads,
    new: Share,
    again: Share,
    /// OpenMP's, before and after the move.
    places: Option<[String; 2]>,
}

/// What a program is expected to do, so that a change of it is seen.
struct Expected {
    new: Option<RangeInclusive<u64>>,
    again: Option<RangeInclusive<u64>>,
    /// It reads this as it starts.
    reads: &'static [&'static str],
}

/// A program that speaks by lines (guest/runtime/test/programs), and how it is run.
struct Program {
    name: &'static str,
    command: &'static [&'static str],
    asks: &'static [&'static str],
    /// Whether its main thread is put on the vCPU that is moved; else it goes there by itself.
    pinned: bool,
    expected: Expected,
}

/// Of the memory on the node of now. What a program takes as new may have some in it that it had before.
const FOLLOWS: Option<RangeInclusive<u64>> = Some(90..=100);
const STAYS: Option<RangeInclusive<u64>> = Some(0..=10);
/// It differs from run to run.
const DIFFERS: Option<RangeInclusive<u64>> = Some(0..=100);
const NODE_LISTS: &str = "node/nodeN/cpulist";
const LIBRARIES: &str = "LD_LIBRARY_PATH=/opt/programs/lib";
const GOMP: &str = "/root/runtime/programs/libgomp";
const OMP: &str = "/opt/programs/libomp";

/// Those of `make test`: their runtime is in the guest's image.
const ESSENTIAL: [Program; 2] = [
    Program {
        name: "libgomp, OMP_PLACES=threads",
        command: &["env", "OMP_PROC_BIND=close", "OMP_PLACES=threads", GOMP],
        asks: &["new", "places"],
        pinned: false,
        expected: Expected { new: FOLLOWS, again: None, reads: &["sched_getaffinity", "sched_setaffinity"] },
    },
    Program {
        name: "libgomp, OMP_PLACES=numa_domains",
        command: &["env", "OMP_PROC_BIND=close", "OMP_PLACES=numa_domains", GOMP],
        asks: &["places"],
        pinned: false,
        expected: Expected { new: None, again: None, reads: &["node/online", NODE_LISTS] },
    },
];

/// The others.
const OTHERS: [Program; 6] = [
    Program {
        name: "libomp, OMP_PLACES=threads",
        command: &["env", LIBRARIES, "OMP_PROC_BIND=close", "OMP_PLACES=threads", OMP],
        asks: &["new", "places"],
        pinned: false,
        expected: Expected { new: FOLLOWS, again: None, reads: &["sched_getaffinity", "sched_setaffinity"] },
    },
    Program {
        name: "libomp, OMP_PLACES=numa_domains",
        command: &["env", LIBRARIES, "OMP_PROC_BIND=close", "OMP_PLACES=numa_domains", OMP],
        asks: &["places"],
        pinned: false,
        expected: Expected { new: None, again: None, reads: &["sched_getaffinity"] },
    },
    Program {
        name: "Go",
        command: &["/opt/programs/go"],
        asks: &["again", "new"],
        pinned: true,
        // What is free is used again where it is, unless it went back to the kernel in the background.
        expected: Expected { new: FOLLOWS, again: DIFFERS, reads: &["sched_getaffinity"] },
    },
    Program {
        name: ".NET, workstation GC",
        command: &["env", "COMPlus_gcServer=0", "/opt/programs/dotnet/dotnet", "/opt/programs/Allocate.dll"],
        asks: &["again", "new"],
        pinned: true,
        expected: Expected { new: FOLLOWS, again: STAYS, reads: &["node", "get_mempolicy"] },
    },
    Program {
        name: ".NET, server GC",
        command: &["env", "COMPlus_gcServer=1", "/opt/programs/dotnet/dotnet", "/opt/programs/Allocate.dll"],
        asks: &["again", "new"],
        pinned: true,
        // A thread gets memory of the heap of its CPU, or of one with more room.
        expected: Expected { new: DIFFERS, again: STAYS, reads: &["node/nodeN/cpumap", "mbind"] },
    },
    Program {
        name: "DPDK",
        command: &["/opt/programs/dpdk", "-l", "1", "--no-pci", "--in-memory", "--no-telemetry"],
        asks: &["again", "new"],
        pinned: false,
        expected: Expected { new: STAYS, again: STAYS, reads: &["node/nodeN/cpuN"] },
    },
];

/// All programs, and the table.
pub fn run() -> Result<()> {
    let _daemon = vnumad(&[])?;
    let shape = ["--nodes", "2", "--vcpus", "4", "--memory", "1536M", "--kernel", DEFAULT_KERNEL];
    let vm = Vm::start(NAME, &shape.map(str::to_owned))?;
    all(&vm).inspect_err(|_| show_guest(&vm))?;
    check_kernel_log(&vm)
}

fn all(vm: &Vm) -> Result<()> {
    install(vm)?;
    vm.exec(&["sh", "-c", &format!("mkdir -p {THERE} && tar -xf {DIRECTORY}/{ARCHIVE} -C {THERE}")])?;
    equip_with(vm, DEFAULT_KERNEL)?;
    vm.attach()?;
    vm.await_driver()?;
    // What a program does not do is not done for it meanwhile.
    let prepare = format!(
        "echo 0 > /proc/sys/kernel/numa_balancing; echo 1 > /proc/sys/vm/compact_memory;
         for n in 0 1; do echo {HUGE_PAGES} > /sys/devices/system/node/node$n/hugepages/hugepages-2048kB/nr_hugepages; done"
    );
    vm.exec(&["sh", "-c", &prepare])?;
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for program in ESSENTIAL.iter().chain(&OTHERS) {
        let file = program.command.iter().rev().find(|word| word.starts_with('/')).copied().unwrap_or("");
        if vm.exec(&["test", "-e", file]).is_err() {
            println!("skipped: {}: there is no {file}", program.name);
            continue;
        }
        // A table of all the others is worth having.
        match watch(vm, program) {
            Ok(row) => {
                failed.extend(program.expected.differs(&row).map(|what| format!("{}: {what}", program.name)));
                rows.push(row);
            }
            Err(error) => failed.push(format!("{}: {error:#}", program.name)),
        }
    }
    match postgres::watch(vm) {
        Ok(Some((row, wrong))) => {
            failed.extend(wrong);
            rows.push(row);
        }
        Ok(None) => println!("skipped: PostgreSQL was not brought"),
        Err(error) => failed.push(format!("PostgreSQL: {error:#}")),
    }
    print(&rows);
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

/// libgomp's part, in a guest that follows already. vCPU 1 is on node 0 before and after.
pub fn essential(vm: &Vm) -> Result<()> {
    let mut rows = Vec::new();
    for program in &ESSENTIAL {
        let row = watch(vm, program).context(program.name)?;
        let wrong = program.expected.differs(&row);
        rows.push(row);
        ensure!(wrong.is_none(), "{}: {wrong:?}: {rows:?}", program.name);
    }
    print(&rows);
    Ok(())
}

/// Runs a program, moves a vCPU below it, and takes that back.
fn watch(vm: &Vm, program: &Program) -> Result<Row> {
    println!("{}", program.name);
    go_to(vm, 0)?;
    let mut watched = Watched::start(vm, program)?;
    let at_start = watched.trace.reads(vm, 0)?;
    let began = watched.trace.lines(vm)?;
    let before = watched.round(vm, program, 0)?;
    let asked = watched.trace.lines(vm)?;
    go_to(vm, 1)?;
    let after = watched.round(vm, program, 1)?;
    let later = watched.trace.reads(vm, asked)?;
    println!("  before: {before:?}, after: {after:?}");
    println!("  reads in the round before: {:?}", watched.trace.reads(vm, began)?);
    for (share, name) in [(before.new, "new"), (before.again, "again")] {
        ensure!(share.is_none_or(|share| share >= 75), "{name}: {share:?} % on node 0 before the move");
    }
    let places = before.places.zip(after.places).map(|(before, after)| [before, after]);
    let row = Row {
        name: program.name.to_owned(),
        version: watched.version.clone(),
        at_start,
        later,
        new: after.new,
        again: after.again,
        places,
    };
    watched.end()?;
    go_to(vm, 0)?;
    Ok(row)
}

/// vCPU 1 goes to a node, 0 is on node 0 and 2 and 3 on node 1, and the guest knows.
fn go_to(vm: &Vm, node: u64) -> Result<()> {
    let nodes = [0, node, 1, 1];
    for (vcpu, node) in nodes.iter().enumerate() {
        vnumactl(&["move", &vm.name, "--vcpu", &vcpu.to_string(), "--node", &node.to_string()])?;
    }
    wait_until_seen(&vm.name, &nodes.map(|node| (node, node, "true")))
}

/// What a program answered.
#[derive(Debug, Default)]
struct Answers {
    new: Share,
    again: Share,
    places: Option<String>,
}

/// A program that runs under strace.
struct Watched {
    process: Process,
    input: ChildStdin,
    lines: Lines<ChildStdout>,
    pid: String,
    version: String,
    trace: Trace,
}

impl Watched {
    fn start(vm: &Vm, program: &Program) -> Result<Self> {
        let trace = Trace::new(vm, program.name)?;
        let strace = trace.strace();
        let command: Vec<&str> =
            strace.iter().map(String::as_str).chain(program.command.iter().copied()).collect();
        let mut process = vm.spawn(&command)?;
        let input = process.0.stdin.take().context("no input")?;
        let mut lines = Lines::of_process(&mut process, program.name)?;
        // EAL and others may say something first.
        let is_first = |line: &str| line.split(' ').next().is_some_and(|pid| pid.parse::<u32>().is_ok());
        let first = loop {
            let line = lines.next("its beginning")?;
            if is_first(&line) {
                break line;
            }
        };
        let (pid, version) = first.split_once(' ').with_context(|| first.clone())?;
        if program.pinned {
            vm.exec(&["taskset", "-c", "-p", "1", pid])?;
        }
        let (pid, version) = (pid.to_owned(), version.to_owned());
        Ok(Self { process, input, lines, pid, version, trace })
    }

    fn ask(&mut self, what: &str) -> Result<String> {
        writeln!(self.input, "{what}").and_then(|()| self.input.flush()).context("its input")?;
        self.lines.next(what)
    }

    /// Asks what there is to be asked.
    fn round(&mut self, vm: &Vm, program: &Program, node: usize) -> Result<Answers> {
        let mut answers = Answers::default();
        for what in program.asks {
            match *what {
                // What it keeps would lie between what it takes again before and after the move.
                "new" if node == 0 && program.asks.contains(&"again") => {}
                "new" => answers.new = Some(self.share(vm, "new", node)?),
                "again" => {
                    for _ in 0..ROUNDS {
                        answers.again = Some(self.share(vm, "again", node)?);
                    }
                }
                other => answers.places = Some(self.ask(other)?),
            }
        }
        Ok(answers)
    }

    /// Of what it says it has got, the share on a node.
    fn share(&mut self, vm: &Vm, what: &str, node: usize) -> Result<u64> {
        let memory = self.ask(what)?;
        let tool = format!("{DIRECTORY}/vnuma-where");
        let command: Vec<&str> =
            [tool.as_str(), self.pid.as_str()].into_iter().chain(memory.split(' ')).collect();
        let counts = vm.exec(&command)?;
        println!("  {what}: {memory:.60}: {}", counts.trim());
        let pages: Vec<u64> = counts.split_whitespace().filter_map(|count| count.parse().ok()).collect();
        let all: u64 = pages.iter().sum();
        ensure!(pages.len() == 2 && all > 0, "vnuma-where of {memory:?}: {counts:?}");
        Ok(pages[node] * 100 / all)
    }

    /// Ends it by the end of its input.
    fn end(mut self) -> Result<()> {
        drop(self.input);
        self.process.succeed(self.lines.who())
    }
}

/// What strace writes, in the guest.
struct Trace(String);

impl Trace {
    fn new(vm: &Vm, name: &str) -> Result<Self> {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let file = format!("/tmp/{}.strace", name.chars().map(plain).collect::<String>());
        vm.exec(&["rm", "-f", &file])?;
        Ok(Self(file))
    }

    /// What stands before a command.
    fn strace(&self) -> Vec<String> {
        let calls = format!("trace=%file,{}", CALLS.join(","));
        let words = ["strace", "-f", "--seccomp-bpf", "-qq", "-s", "200", "-e", "signal=none", "-e", &calls];
        words.iter().map(|&word| word.to_owned()).chain(["-o".to_owned(), self.0.clone()]).collect()
    }

    fn lines(&self, vm: &Vm) -> Result<usize> {
        let text = vm.exec(&["sed", "-n", "$=", &self.0])?;
        Ok(text.trim().parse().unwrap_or(0))
    }

    /// From a line on.
    fn reads(&self, vm: &Vm, from: usize) -> Result<Reads> {
        let text = vm.exec(&["sed", "-n", &format!("{},$p", from + 1), &self.0])?;
        Ok(text.lines().filter_map(read_of).collect())
    }
}

/// What a line of strace reads of the topology, if anything: `PID openat(AT_FDCWD, "/sys/devices/system/node/online", ...`.
fn read_of(line: &str) -> Option<String> {
    let (_, call) = line.split_once(' ')?;
    let (name, arguments) = call.trim_start().split_once('(')?;
    if CALLS.contains(&name) {
        return Some(name.to_owned());
    }
    let path = arguments.split('"').nth(1)?;
    if !PLACES.iter().any(|place| path.starts_with(place)) {
        return None;
    }
    let path = path.trim_end_matches('/');
    let mut short = String::new();
    for c in path.strip_prefix("/sys/devices/system/").unwrap_or(path).chars() {
        match c {
            '0'..='9' if short.ends_with('N') => {}
            '0'..='9' => short.push('N'),
            c => short.push(c),
        }
    }
    Some(short)
}

impl Expected {
    /// What was seen and not expected.
    fn differs(&self, row: &Row) -> Option<String> {
        for (what, expected, seen) in [("new", &self.new, row.new), ("again", &self.again, row.again)] {
            let is_right = match (expected, seen) {
                (Some(expected), Some(seen)) => expected.contains(&seen),
                (expected, seen) => expected.is_none() && seen.is_none(),
            };
            if !is_right {
                return Some(format!("{what}: {seen:?} % on the new node, expected: {expected:?}"));
            }
        }
        // No runtime that was tried makes its places anew.
        if let Some([before, after]) = &row.places
            && before != after
        {
            return Some(format!("places were {before}, and are {after}"));
        }
        let missing = self.reads.iter().find(|read| !row.at_start.contains(**read));
        missing.map(|read| format!("it does not read {read} as it starts: {:?}", row.at_start))
    }
}

/// As a table of docs/runtimes.md.
fn print(rows: &[Row]) {
    println!(
        "| program | it reads as it starts | and after a change | new memory | memory used again | places |"
    );
    println!("|---|---|---|--:|--:|---|");
    rows.iter().for_each(|row| println!("{row}"));
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let list = |reads: &Reads| {
            let quoted: Vec<_> = reads.iter().map(|read| format!("`{read}`")).collect();
            if quoted.is_empty() { "nothing".to_owned() } else { quoted.join(", ") }
        };
        let share = |share: Share| share.map(|share| format!("{share} %")).unwrap_or_default();
        let places = self.places.as_ref().map(|[_, after]| format!("`{after}`")).unwrap_or_default();
        let Self { name, version, at_start, later, new, again, .. } = self;
        let (at_start, later) = (list(at_start), list(later));
        write!(
            f,
            "| {name} ({version}) | {at_start} | {later} | {} | {} | {places} |",
            share(*new),
            share(*again)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_line_of_strace_reads_is_told() {
        let read = |line| read_of(line);
        let open = r#"812 openat(AT_FDCWD, "/sys/devices/system/node/node12/cpulist", O_RDONLY) = 3"#;
        assert_eq!(read(open).as_deref(), Some("node/nodeN/cpulist"));
        let access = r#"7   access("/sys/devices/system/cpu/cpu3/node1", F_OK) = -1 ENOENT (No such file)"#;
        assert_eq!(read(access).as_deref(), Some("cpu/cpuN/nodeN"));
        assert_eq!(read("7 sched_getaffinity(0, 128, [0 1]) = 8").as_deref(), Some("sched_getaffinity"));
        for other in [
            r#"7 openat(AT_FDCWD, "/etc/passwd", O_RDONLY) = 3"#,
            "7 <... sched_getaffinity resumed>[0 1]) = 8",
            "7 +++ exited with 0 +++",
            "",
        ] {
            assert_eq!(read(other), None, "{other}");
        }
    }

    #[test]
    fn what_is_not_expected_is_told() {
        let expected = Expected { new: FOLLOWS, again: STAYS, reads: &["mbind"] };
        let row = |new, places: [&str; 2]| Row {
            new: Some(new),
            again: Some(3),
            at_start: Reads::from(["mbind".to_owned()]),
            places: Some(places.map(str::to_owned)),
            ..Row::default()
        };
        assert_eq!(expected.differs(&row(100, ["0,1;2", "0,1;2"])), None);
        assert!(expected.differs(&row(0, ["0,1;2", "0,1;2"])).is_some());
        assert!(expected.differs(&row(100, ["0,1;2", "0;1,2"])).is_some());
        let nothing = Row { at_start: Reads::new(), ..row(100, ["0", "0"]) };
        assert!(expected.differs(&nothing).is_some());
    }
}
