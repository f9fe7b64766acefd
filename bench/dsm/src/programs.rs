//! Time, messages and bytes of programs: dsm-run beside MPI.

use crate::{protocol, report::Program};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};
use vnuma_bench_figures::{cells::Cells, stats::middle};

/// Nodes, and processes of MPI.
pub const NODES: u8 = 4;
/// Nothing here takes longer unless it hangs.
const HANG: Duration = Duration::from_secs(120);

/// Name, further arguments, size, and whether it is written for MPI too.
const PROGRAMS: [(&str, &[&str], u32, bool); 16] = [
    ("lock-counter", &[], 300, true),
    ("producer-consumer", &[], 1000, true),
    ("matrix", &[], 160, true),
    ("pagerank", &[], 20_000, true),
    ("word-count", &[], 4000, true),
    ("pi", &[], 5_000_000, true),
    ("false-sharing", &[], 5000, true),
    ("metadata", &[], 200, false),
    ("memory", &["--block", "4KiB", "--scope", "local", "--access", "read"], 2000, false),
    ("memory", &["--block", "4KiB", "--scope", "local", "--access", "write"], 2000, false),
    ("memory", &["--block", "4KiB", "--scope", "global", "--access", "read"], 2000, false),
    ("memory", &["--block", "4KiB", "--scope", "global", "--access", "write"], 200, false),
    ("memory", &["--block", "4MiB", "--scope", "local", "--access", "read"], 2, false),
    ("memory", &["--block", "4MiB", "--scope", "local", "--access", "write"], 2, false),
    ("memory", &["--block", "4MiB", "--scope", "global", "--access", "read"], 2, false),
    ("memory", &["--block", "4MiB", "--scope", "global", "--access", "write"], 1, false),
];

/// Programs in which parts of the default matter that single faults do not show: streams of pages, pages that several nodes want
/// at once, writes in turn.
const WITHOUT_PARTS: [&str; 5] =
    ["pagerank", "producer-consumer", "metadata", "memory 4MiB global read", "memory 4KiB global write"];

/// The words that tell a run from others.
fn name(program: &str, arguments: &[&str]) -> String {
    let values: Vec<_> = arguments.iter().copied().filter(|word| !word.starts_with("--")).collect();
    [&[program][..], &values[..]].concat().join(" ")
}

/// A run of a program, to which options can be added.
pub fn command(dsm_run: &Path, program: &str, arguments: &[&str], size: u32) -> Command {
    let mut command = Command::new(dsm_run);
    command.args(["--nodes", &NODES.to_string(), "--size", &size.to_string()]).args(arguments).arg(program);
    command
}

/// Programs that anybody would run for their results: their names, further arguments and sizes. All nodes of the memory test
/// write all its pages as fast as they can.
pub fn realistic() -> impl Iterator<Item = (&'static str, &'static [&'static str], u32)> {
    let all = PROGRAMS.into_iter().map(|(name, arguments, size, _)| (name, arguments, size));
    all.filter(|(name, ..)| *name != "memory")
}

/// All programs on all transports by both protocols, `repeats` times; the median by time counts.
pub fn dsm(dsm_run: &Path, repeats: usize, cells: &mut Cells) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for (program, arguments, size, _) in PROGRAMS {
        for transport in ["tcp", "tcp-tls", "shm"] {
            for mode in ["ivy", "default"] {
                let run = || run_by(dsm_run, (program, arguments, size), transport, mode);
                let name = [&*name(program, arguments), transport, mode].join(", ");
                programs.extend(repeated(cells, &name, repeats, run)?);
            }
        }
    }
    Ok(programs)
}

/// Some programs on TCP by the default without each of its parts, to be compared with those of [`dsm`].
pub fn without_parts(dsm_run: &Path, repeats: usize, cells: &mut Cells) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for (program, arguments, size, _) in PROGRAMS {
        if !WITHOUT_PARTS.contains(&name(program, arguments).as_str()) {
            continue;
        }
        for (mode, _) in protocol::modes().into_iter().filter(|(mode, _)| mode.starts_with(WITHOUT)) {
            let run = || run_by(dsm_run, (program, arguments, size), "tcp", mode);
            let name = [&*name(program, arguments), "tcp", mode].join(", ");
            programs.extend(repeated(cells, &name, repeats, run)?);
        }
    }
    Ok(programs)
}

/// What begins the name of a mode that lacks a part of the default.
const WITHOUT: &str = "default-without-";

/// A run of a program by dsm-run.
fn run_by(
    dsm_run: &Path,
    (program, arguments, size): (&str, &[&str], u32),
    transport: &str,
    mode: &str,
) -> Result<Program> {
    let mut command = command(dsm_run, program, arguments, size);
    command.args(["--json", "--transport", transport]).args(options(mode));
    let output = limited(&mut command)?;
    let value = serde_json::from_slice(&output.stdout).context("the report of dsm-run")?;
    read(&name(program, arguments), transport, mode, &value)
}

/// The options of dsm-run for a mode.
fn options(mode: &str) -> Vec<&str> {
    match mode.strip_prefix(WITHOUT) {
        Some(part) => vec!["--mode", "default", "--without", part],
        None => vec!["--mode", mode],
    }
}

/// The median of some runs, of which none may fail.
fn repeated(
    cells: &mut Cells,
    name: &str,
    repeats: usize,
    run: impl Fn() -> Result<Program>,
) -> Result<Option<Program>> {
    cells.measure(name, || {
        let runs = (0..repeats).map(|_| run()).collect::<Result<_>>()?;
        let one = middle(runs, |run: &Program| run.seconds).context("no run")?;
        let shown = format!("{:.3} s a run", one.seconds);
        Ok((one, shown))
    })
}

fn read(name: &str, transport: &str, mode: &str, value: &Value) -> Result<Program> {
    let number = |path: &str| {
        let found = value.pointer(path).and_then(Value::as_f64);
        found.with_context(|| format!("{path}: no number in the report of dsm-run"))
    };
    let stats = |field: &str| number(&format!("/stats/{field}"));
    Ok(Program {
        program: name.to_owned(),
        transport: transport.to_owned(),
        mode: mode.to_owned(),
        nodes: NODES,
        seconds: number("/seconds")?,
        messages: Some(stats("messages")? as u64),
        bytes: Some(stats("bytes")? as u64),
        faults: Some((stats("reads/count")? + stats("writes/count")?) as u64),
        mib_per_s: value.pointer("/mib_per_s").and_then(Value::as_f64),
        guest_s: Some(number("/time/guest_s")?),
        dsm_s: Some(number("/time/dsm_s")?),
        idle_s: Some(number("/time/idle_s")?),
        owner_writes: Some(stats("found_by_writes/manager")? as u64),
        hint_writes: Some(stats("found_by_writes/hint")? as u64),
        elsewhere_writes: Some(stats("found_by_writes/elsewhere")? as u64),
    })
}

/// Runs a command in a network of its own. The last line is the number of bytes that its loopback has carried.
const SCRIPT: &str = r#"ip link set lo up; "$@"; sed -n 's/^ *lo: *\([0-9]*\).*/\1/p' /proc/net/dev"#;

/// The same programs, written for MPI. Open MPI over TCP of a network namespace, whose loopback counts the bytes, and over
/// shared memory.
pub fn mpi(program: &Path, repeats: usize, cells: &mut Cells) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for (name, _, size, _) in PROGRAMS.into_iter().filter(|(.., in_mpi)| *in_mpi) {
        for (transport, layers) in [("tcp", "tcp,self"), ("shm", "vader,self")] {
            let run = || -> Result<Program> {
                let mut command = Command::new("unshare");
                command.args(["--net", "sh", "-e", "-c", SCRIPT, "sh", "mpirun", "--oversubscribe"]);
                command.args(["--bind-to", "none", "-n", &NODES.to_string()]);
                let settings = [
                    ("btl", layers),
                    ("pml", "ob1"),
                    ("btl_tcp_if_include", "lo"),
                    ("oob_tcp_if_include", "lo"),
                    ("mpi_yield_when_idle", "1"),
                ];
                for (parameter, value) in settings {
                    command.args(["--mca", parameter, value]);
                }
                command.arg(program).args([name, &size.to_string()]);
                command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
                let output = limited(&mut command)?;
                let text = String::from_utf8_lossy(&output.stdout);
                let seconds = text.lines().find_map(|line| line.strip_prefix("right, "));
                let seconds = seconds.and_then(|rest| rest.strip_suffix(" s")?.parse().ok());
                let carried = text.lines().last().and_then(|line| line.trim().parse().ok());
                Ok(Program {
                    seconds: seconds.with_context(|| format!("no time in {text:?}"))?,
                    bytes: carried.filter(|_| transport == "tcp"),
                    ..Program::new(name, transport, "mpi", NODES)
                })
            };
            programs.extend(repeated(cells, &[name, transport, "mpi"].join(", "), repeats, run)?);
        }
    }
    Ok(programs)
}

/// The output of a command that must succeed, and end.
pub fn limited(command: &mut Command) -> Result<Output> {
    let shown = format!("{command:?}");
    let child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().with_context(|| shown.clone())?;
    let id = i32::try_from(child.id())?;
    let waits = thread::spawn(move || child.wait_with_output());
    let begin = Instant::now();
    while !waits.is_finished() {
        if begin.elapsed() > HANG {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), nix::sys::signal::Signal::SIGKILL);
        }
        thread::sleep(Duration::from_millis(2));
    }
    let output = waits.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{shown}: {}: {}", output.status, errors.trim());
    Ok(output)
}

/// How often a write of a page whose manager does not own it went straight to the owner, over the programs that were run by the
/// default protocol on `transport`; none if there was no such write. The memory test is no program that anybody would run for its
/// result: all its nodes write all its pages as fast as they can.
pub fn hint_rate(programs: &[Program], transport: &str) -> Option<f64> {
    let realistic = |one: &&Program| !one.program.starts_with("memory");
    let of =
        programs.iter().filter(|one| one.transport == transport && one.mode == "default").filter(realistic);
    let (hints, all) = of.fold((0, 0), |(hints, all), one| {
        let (hint, elsewhere) = (one.hint_writes.unwrap_or(0), one.elsewhere_writes.unwrap_or(0));
        (hints + hint, all + hint + elsewhere)
    });
    (all > 0).then(|| hints as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_run_without_each_part_of_the_default() {
        let names = PROGRAMS.map(|(program, arguments, ..)| name(program, arguments));
        assert!(WITHOUT_PARTS.iter().all(|wanted| names.iter().any(|name| name == wanted)), "{names:?}");
        assert_eq!(options("ivy"), ["--mode", "ivy"]);
        assert_eq!(options("default-without-hold"), ["--mode", "default", "--without", "hold"]);
        let without = protocol::modes().into_iter().filter(|(mode, _)| options(mode).len() == 4);
        assert_eq!(without.count(), 10);
    }

    #[test]
    fn what_dsm_run_reports_is_read() {
        let faults = |count: u64| serde_json::json!({ "count": count });
        let found = serde_json::json!({ "manager": 1, "hint": 2, "elsewhere": 3 });
        let mut value = serde_json::json!({
            "seconds": 0.5,
            "mib_per_s": 64.0,
            "time": { "guest_s": 0.1, "dsm_s": 0.2, "idle_s": 0.3 },
            "stats": {
                "messages": 4, "bytes": 5, "reads": faults(6), "writes": faults(7), "found_by_writes": found,
            },
        });
        let run = read("memory", "tcp", "default", &value).expect("all is there");
        assert_eq!((run.mib_per_s, run.faults, run.messages), (Some(64.0), Some(13), Some(4)));
        value["mib_per_s"] = Value::Null;
        assert_eq!(read("pi", "tcp", "default", &value).expect("it is no memory test").mib_per_s, None);
        value["stats"]["bytes"] = Value::Null;
        let error = read("pi", "tcp", "default", &value).err().expect("bytes are missing").to_string();
        assert_eq!(error, "/stats/bytes: no number in the report of dsm-run");
    }

    #[test]
    fn the_hit_rate_is_that_of_the_default_protocol_on_one_transport() {
        let run = |transport, mode, hint, elsewhere| Program {
            hint_writes: Some(hint),
            elsewhere_writes: Some(elsewhere),
            ..Program::new("pi", transport, mode, 4)
        };
        let runs = [
            run("tcp", "default", 30, 10),
            run("tcp", "default", 60, 0),
            run("tcp", "ivy", 0, 99),
            run("shm", "default", 0, 99),
            Program { program: "memory 4KiB".to_owned(), ..run("tcp", "default", 0, 99) },
        ];
        assert_eq!(hint_rate(&runs, "tcp"), Some(0.9));
        assert_eq!(hint_rate(&runs[..2], "shm"), None);
        assert_eq!(name("memory", &["--block", "4KiB", "--access", "read"]), "memory 4KiB read");
    }
}
