//! Programs of others that run, stop, and end with the workload.

use super::Place;
use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

/// How long a program has to begin.
const BEGIN: Duration = Duration::from_secs(2);

/// Runs a program to its end.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output().with_context(|| program.to_owned())?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}: {text}", arguments.join(" "), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A process in a process group of its own, which ends with this value.
pub struct Running(Child);

impl Running {
    /// Starts a program, and lets it begin.
    pub fn start(command: &mut Command) -> Result<Self> {
        use std::os::unix::process::CommandExt;
        let child = command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let mut running = Self(child.with_context(|| format!("{command:?}"))?);
        thread::sleep(BEGIN);
        ensure!(running.0.try_wait()?.is_none(), "{command:?} ended at once");
        Ok(running)
    }

    /// The same, and stops it.
    pub fn stopped(command: &mut Command) -> Result<Self> {
        let running = Self::start(command)?;
        running.halt()?;
        Ok(running)
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }

    pub fn go(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    pub fn halt(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let group = Pid::from_raw(-i32::try_from(self.0.id())?);
        kill(group, signal).with_context(|| format!("{signal} to process group {group}"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.signal(Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

/// A command at the place of the workload; one that an agent is to place begins anywhere.
pub fn at(place: Place, program: &str) -> Command {
    if place.by_agent {
        return Command::new(program);
    }
    let mut command = Command::new("numactl");
    command.arg(format!("--physcpubind={}", place.cpu));
    if place.bind {
        command.arg(format!("--membind={}", place.node));
    }
    command.arg(program);
    command
}
