//! The driver in a kernel that checks itself, in a guest that this machine emulates: what drives it runs here.

use crate::{MOST_RUNS, RUN_AGAIN, SOAK_TIMEOUT, soak_seconds};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use vnuma_lab_runner::kernels::DebugKernel;
use vnuma_lab_runner::{Exec, Guest, Input, Lab, build_binaries, driver};

const COPY_LIMIT: Duration = Duration::from_secs(300);
/// Words for each such kernel: all that it finds is on its console.
const APPEND: &str = "loglevel=8 oops=panic memhp_default_state=online_movable";
/// What is there to be plugged into each node.
const PLUGGABLE_MIB: usize = 512;
/// How a kernel begins what it has found.
const FOUND: [&str; 4] = ["WARNING:", "BUG:", "UBSAN:", "Call Trace:"];

/// A run in a guest with a debug kernel.
#[derive(Default)]
pub struct Run<'a> {
    pub kernel: &'a str,
    /// That of the driver.
    pub mode: &'a str,
    pub nodes: &'a str,
    /// Words for the kernel.
    pub append: &'a str,
    /// Stages of `driver-test.sh`.
    pub stages: &'a str,
    /// None, or `yes`.
    pub moves: &'a str,
    /// What the kernel may say; then it goes on after a warning.
    pub known: &'a [Known<'a>],
}

/// A report of the kernel that is no fault of the driver.
pub struct Known<'a> {
    /// A part of its first line, and of its last.
    pub lines: [&'a str; 2],
    /// What else it has.
    pub has: &'a [&'a str],
}

/// Lines that begin what a kernel has found, but for known reports.
fn found<'a>(console: &'a str, known: &[Known<'_>]) -> Vec<&'a str> {
    let lines: Vec<&str> = console.lines().collect();
    let (mut found, mut next) = (Vec::new(), 0);
    while let Some(line) = lines.get(next) {
        let report = known.iter().find_map(|known| known.length(&lines[next..]));
        if report.is_none() && FOUND.iter().any(|begin| line.contains(begin)) {
            found.push(*line);
        }
        next += report.unwrap_or(1);
    }
    found
}

impl Known<'_> {
    /// How many of these lines it has, if it is their beginning.
    fn length(&self, lines: &[&str]) -> Option<usize> {
        let [first, last] = self.lines;
        lines[0].contains(first).then_some(())?;
        let length = lines.iter().position(|line| line.contains(last))? + 1;
        let has = |part: &&str| lines[..length].iter().any(|line| line.contains(part));
        self.has.iter().all(has).then_some(length)
    }
}

/// Runs the stages. The kernel must find nothing but what is known. Where the emulated processor has ended the guest it is done again.
pub fn run(run: &Run<'_>) {
    for runs in 1..=MOST_RUNS {
        let Err(problem) = attempt(run, runs == MOST_RUNS) else { return };
        RUN_AGAIN.fetch_add(1, SeqCst);
        println!(
            "{problem}: the emulated processor has ended the guest; it is run again ({runs} of {MOST_RUNS} runs were made)"
        );
    }
}

/// Fails if the emulated processor has ended the guest, and nothing else can; in the `last` attempt as with any other problem.
fn attempt(run: &Run<'_>, last: bool) -> Result<(), String> {
    let Run { kernel, mode, nodes, stages, moves, known, .. } = *run;
    let lab = Arc::new(boot(run));
    let directory = tempfile::tempdir().expect("a folder");
    let socket = directory.path().join("guest.sock");
    let ended = lab.serve(&socket, SOAK_TIMEOUT).expect("programs can be run in the guest");
    let program = build_binaries(&[("vnuma-lab-agent", "lab-exec")]).expect("the program builds");
    let tools = driver::built_for_debug(&DebugKernel::ensure(kernel).expect("the kernel is there"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/driver/test/driver-test.sh");
    let seconds = soak_seconds().unwrap_or_else(|| super::READ_SECONDS.to_owned());
    let status = Command::new("bash")
        .arg(script)
        .env("GUEST", format!("{} {}", program[0].display(), socket.display()))
        .env("QMP", lab.control_socket())
        .env("HOST", tools.expect("the fake host builds").join("test/vnuma-fake-host"))
        .envs([("MODULE", "/root/vnuma.ko"), ("NODES", nodes), ("ROUNDS", "20"), ("MODE", mode)])
        // The kernel has no statistics of the scheduler, which name its domains.
        .envs([("STRICT", ""), ("MESSAGES", "4")])
        .envs([("STAGES", stages), ("MOVES", moves), ("READ_S", &seconds)])
        // The console, which has all of the log, is read here.
        .env("KNOWN", if known.is_empty() { "" } else { "." })
        .status()
        .expect("bash starts");
    let console = lab.console();
    lab.stop();
    let found = found(&console, known);
    if !status.success() || !found.is_empty() {
        println!("the console of the guest:\n{console}");
    }
    if !status.success() && !last && ended.load(SeqCst) {
        return Err(status.to_string());
    }
    assert!(status.success(), "{status}");
    assert!(found.is_empty(), "the kernel has found something: {found:#?}");
    Ok(())
}

/// The guest, with the driver.
fn boot(run: &Run<'_>) -> Lab {
    let kernel = DebugKernel::ensure(run.kernel).unwrap_or_else(|error| panic!("{error}"));
    let built = driver::built_for_debug(&kernel).unwrap_or_else(|error| panic!("{error}"));
    let guest = Guest {
        vmlinux: kernel.vmlinux(),
        nodes: run.nodes.parse().expect("a number"),
        pluggable_mib: PLUGGABLE_MIB,
        append: format!("panic_on_warn={} {APPEND} {}", u8::from(run.known.is_empty()), run.append),
        ..Guest::default()
    };
    let lab = Lab::boot_guest(&guest).unwrap_or_else(|error| panic!("{error}"));
    let mut files = kernel.module_files();
    let tools =
        ["readers.ko", "check", "affinity", "faults", "fifo"].map(|tool| format!("test/vnuma-{tool}"));
    for name in [&["vnuma.ko".to_owned()], &tools[..]].concat() {
        let file = built.join(name);
        files.push((file.clone(), Path::new("/root").join(file.file_name().unwrap()).display().to_string()));
    }
    let program = build_binaries(&[("vnuma-lab-tests", "lab-sched-ext")]).expect("the program builds");
    files.push((program[0].clone(), "/root/lab-sched-ext".to_owned()));
    for (here, there) in files {
        lab.put(&here, &there, COPY_LIMIT).unwrap_or_else(|error| panic!("{error}"));
    }
    let mode = format!("mode={}", run.mode);
    let exec =
        Exec { argv: ["insmod", "/root/vnuma.ko", &mode].map(str::to_owned).into(), ..Exec::default() };
    let mut said = Vec::new();
    let status = lab.exec(&exec, Input::Null, &mut std::io::sink(), &mut said, COPY_LIMIT);
    let said = String::from_utf8_lossy(&said);
    assert_eq!(status.ok(), Some(0), "insmod: {said}\n{}", lab.console());
    lab
}

#[cfg(test)]
mod tests {
    use super::{Known, found};

    const WARNING: &str = "[ cut here ]\nname 'node'\nWARNING: at remove_proc_entry+0x1\nCall Trace:\n unregister_irq_proc+0x2\n[ end trace ]\n";
    const KNOWN: [Known<'_>; 1] = [Known {
        lines: ["[ cut here ]", "[ end trace"],
        has: &["name '", "remove_proc_entry+", "unregister_irq_proc+"],
    }];

    #[test]
    fn only_a_whole_report_is_known() {
        let first = |console: &str| {
            found(console, &KNOWN).first().map(|line| line.split(':').next().unwrap().to_owned())
        };
        assert_eq!(first(WARNING), None);
        assert_eq!(first(&format!("{WARNING}{WARNING}BUG: that\n")).as_deref(), Some("BUG"));
        for (from, to) in [
            ("name 'node'", "removing non-empty directory"),
            ("unregister_irq_proc", "vnuma_exit"),
            ("[ end trace ]", ""),
        ] {
            assert_eq!(first(&WARNING.replace(from, to)).as_deref(), Some("WARNING"), "{to}");
        }
    }
}
