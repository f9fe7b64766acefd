//! A build: a compiler for each of some files, several at once.

use crate::{
    committed::{COMPILERS, SOURCE},
    raw::Seen,
};
use anyhow::{Context, Result};
use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};
use vnuma_scenario::Process;
use vnuma_scheduled::{Group, Loop};

const DIRECTORY: &str = "/tmp/bench-scheduler-build";
/// The shell waits until it has its class and its group, which all that it starts have.
const BUILD: &str = "read go && cd \"$1\" && seq \"$2\" | \
    xargs -P \"$3\" -I{} gcc -O2 -Wno-aggressive-loop-optimizations -c -o {}.o source.c";

/// Compiles so many files, and takes the time.
pub fn watch(files: usize) -> Result<Seen> {
    let directory = Path::new(DIRECTORY);
    fs::create_dir_all(directory).context(DIRECTORY)?;
    fs::write(directory.join("source.c"), SOURCE).context(DIRECTORY)?;
    let group = Group::new("bench-build", "cpu.weight", "100")?;
    let mut shell = Command::new("sh");
    shell.args(["-ec", BUILD, "sh", DIRECTORY, &files.to_string(), &COMPILERS.to_string()]);
    let mut process = Process(shell.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().context("a shell")?);
    let pid = process.0.id().cast_signed();
    let thread = Loop::of_thread_of(pid, pid);
    thread.make_ext()?;
    group.take(&thread)?;
    let mut input = process.0.stdin.take().context("its standard input")?;
    let (began, used) = (Instant::now(), group.used_us()?);
    writeln!(input, "go").context("the shell")?;
    let status = process.0.wait().context("the build")?;
    anyhow::ensure!(status.success(), "the build: {status}");
    Ok(Seen {
        window_s: began.elapsed().as_secs_f64(),
        ops: files as u64,
        used_s: vec![(group.used_us()? - used) as f64 / 1e6],
        ..Seen::default()
    })
}
