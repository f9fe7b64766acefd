//! Processes on the lab server.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Only a limit for tests that hang.
const HANG_LIMIT: Duration = Duration::from_secs(400);

/// Runs a command to its end and returns its standard output.
pub fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let shown = || format!("{program} {}", arguments.join(" "));
    let limit = HANG_LIMIT.as_secs().to_string();
    let limited = [&["--kill-after=10", &limit, program], arguments].concat();
    let output = Command::new("timeout").args(limited).stdin(Stdio::null()).output().with_context(shown)?;
    ensure!(output.status.code() != Some(124), "{}: no end within {limit} s", shown());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}\n{text}{error}", shown(), output.status);
    Ok(text)
}

/// A process that is killed when the scenario ends, however it ends.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts vnumad and waits until it answers.
pub fn vnumad(arguments: &[&str]) -> Result<Process> {
    start_vnumad(Command::new("vnumad").args(arguments))
}

/// The same, with its log in a file.
pub fn vnumad_logging_to(log: &Path, arguments: &[&str]) -> Result<Process> {
    let file = File::create(log).with_context(|| log.display().to_string())?;
    let mut command = Command::new("vnumad");
    command.args(arguments).stdout(file.try_clone()?).stderr(file);
    start_vnumad(&mut command).with_context(|| format!("vnumad's log is {}", log.display()))
}

fn start_vnumad(command: &mut Command) -> Result<Process> {
    let daemon = Process(command.stdin(Stdio::null()).spawn().context("vnumad")?);
    wait_for("vnumad to answer", Duration::from_secs(60), || Ok(vnumactl(&["list"]).is_ok()))?;
    Ok(daemon)
}

/// What `vnumactl ... --json` prints.
pub fn vnumactl(arguments: &[&str]) -> Result<Value> {
    let text = output("vnumactl", &[arguments, &["--json"]].concat())?;
    serde_json::from_str(&text).with_context(|| format!("vnumactl {}: {text:?}", arguments.join(" ")))
}

/// Waits until `ready` says so.
pub fn wait_for(what: &str, limit: Duration, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + limit;
    while !ready()? {
        if Instant::now() > end {
            bail!("{what}: not within {} s", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}
