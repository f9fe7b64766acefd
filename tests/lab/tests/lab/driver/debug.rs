//! The driver in a kernel that checks itself, in a guest that this machine emulates: what drives it runs here.

use crate::{SOAK_TIMEOUT, soak_seconds};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use vnuma_lab_runner::kernels::DebugKernel;
use vnuma_lab_runner::{Exec, Guest, Input, Lab, build_binaries, driver};

const COPY_LIMIT: Duration = Duration::from_secs(300);
/// Words for each such kernel: all that it finds is on its console.
const APPEND: &str = "loglevel=8 memhp_default_state=online_movable";
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
    /// What the kernel may say, a part of a line each; then it goes on after a warning.
    pub known: &'a [&'a str],
}

/// Runs the stages. The kernel must find nothing but what is known.
pub fn run(run: &Run<'_>) {
    let Run { kernel, mode, nodes, stages, moves, known, .. } = *run;
    let lab = Arc::new(boot(run));
    let directory = tempfile::tempdir().expect("a folder");
    let socket = directory.path().join("guest.sock");
    lab.serve(&socket, SOAK_TIMEOUT).expect("programs can be run in the guest");
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
        .envs([("STAGES", stages), ("MOVES", moves), ("READ_S", &seconds), ("KNOWN", &known.join("|"))])
        .status()
        .expect("bash starts");
    let console = lab.console();
    lab.stop();
    let has = |line: &str, parts: &[&str]| parts.iter().any(|part| line.contains(part));
    let found: Vec<&str> = console.lines().filter(|line| has(line, &FOUND) && !has(line, known)).collect();
    if !status.success() || !found.is_empty() {
        println!("the console of the guest:\n{console}");
    }
    assert!(status.success(), "{status}");
    assert!(found.is_empty(), "the kernel has found something: {found:#?}");
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
    let tools = ["readers.ko", "check", "affinity", "fifo"].map(|tool| format!("test/vnuma-{tool}"));
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
