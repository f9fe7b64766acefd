//! Processes on the lab server.

use crate::{HANG_LIMIT, place};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use vnuma_bench_figures::waiting::waiting;

/// Runs a command to its end and returns its standard output.
pub fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let shown = || format!("{program} {}", arguments.join(" "));
    let limit = HANG_LIMIT.as_secs().to_string();
    let limited = [&["--kill-after=10", &limit, program], arguments].concat();
    let (began, _waiting) = (Instant::now(), waiting(&shown()));
    let output = Command::new("timeout").args(limited).stdin(Stdio::null()).output().with_context(shown)?;
    // By both: the clock of an emulated server has jumped once, for timeout(1) or for all.
    let saw = began.elapsed().as_secs();
    ensure!(output.status.code() != Some(124), "{}: no end within {limit} s, {saw} s here", shown());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}\n{text}{error}", shown(), output.status);
    Ok(text)
}

/// A process that is killed when the scenario ends, however it ends.
pub struct Process(pub Child);

impl Process {
    /// User and system time so far. The kernel counts it in hundredths of a second.
    pub fn cpu_time(&self) -> Result<Duration> {
        let path = format!("/proc/{}/stat", self.0.id());
        let stat = fs::read_to_string(&path).with_context(|| path.clone())?;
        ticks(&stat)
            .map(|ticks| Duration::from_millis(ticks * 10))
            .with_context(|| format!("{path}: {stat:?}"))
    }

    /// Waits until it has ended by itself. Errors name it as `who`.
    pub fn ended(&mut self, who: &str) -> Result<ExitStatus> {
        let mut status = None;
        wait_for(&format!("{who} to end"), HANG_LIMIT, || {
            status = self.0.try_wait()?;
            Ok(status.is_some())
        })?;
        status.context("it has ended")
    }

    /// The same, and it may not fail.
    pub fn succeed(&mut self, who: &str) -> Result<()> {
        let status = self.ended(who)?;
        ensure!(status.success(), "{who}: {status}");
        Ok(())
    }
}

/// Sum of fields 14 and 15 of a `stat` file, counted after the command name (proc(5)).
fn ticks(stat: &str) -> Option<u64> {
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().skip(11).take(2).collect();
    let [user, system] = fields[..] else { return None };
    Some(user.parse::<u64>().ok()? + system.parse::<u64>().ok()?)
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts vnumad and waits until it answers. It is patient with QEMUs unless its configuration says otherwise.
pub fn vnumad(arguments: &[&str]) -> Result<Process> {
    start_vnumad(&mut place::vnumad(arguments)?)
}

/// The same, with its log in a file.
pub fn vnumad_logging_to(log: &Path, arguments: &[&str]) -> Result<Process> {
    let file = File::create(log).with_context(|| log.display().to_string())?;
    let mut command = place::vnumad(arguments)?;
    command.stdout(file.try_clone()?).stderr(file);
    start_vnumad(&mut command).with_context(|| format!("vnumad's log is {}", log.display()))
}

fn start_vnumad(command: &mut Command) -> Result<Process> {
    let daemon = Process(command.stdin(Stdio::null()).spawn().context("vnumad")?);
    wait_for("vnumad to answer", HANG_LIMIT, || Ok(vnumactl(&["list"]).is_ok()))?;
    Ok(daemon)
}

/// What `vnumactl ... --json` prints.
pub fn vnumactl(arguments: &[&str]) -> Result<Value> {
    let words = place::vnumactl_arguments(&[arguments, &["--json"]].concat());
    let text = output("vnumactl", &words.iter().map(String::as_str).collect::<Vec<_>>())?;
    serde_json::from_str(&text).with_context(|| format!("vnumactl {}: {text:?}", arguments.join(" ")))
}

/// Waits until `ready` says so.
pub fn wait_for(what: &str, limit: Duration, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
    let (end, _waiting) = (Instant::now() + limit, waiting(what));
    while !ready()? {
        if Instant::now() > end {
            bail!("{what}: not within {} s", limit.as_secs());
        }
        thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_used_user_and_system_time() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 0 0 0 250 13 9 9 20 0 1 0 5 0 0";
        assert_eq!(ticks(stat), Some(263));
        assert_eq!(ticks("7 (a) S 1 7 7 0 -1 4194560 1 0 0 0 250"), None);
    }
}
