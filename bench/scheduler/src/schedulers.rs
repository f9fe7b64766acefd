//! Schedulers that are loaded, and those that the kernel refuses.

use crate::committed::Scheduler;
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs::{self, File},
    process::{Command, Stdio},
    time::Duration,
};
use vnuma_scenario::{HANG_LIMIT, Process, output, wait_for};
use vnuma_scheduled::{loaded, start, stop};

/// What one of scx says goes there.
const LOG: &str = "/tmp/bench-scheduler-scx.log";
/// Until one of scx is loaded. Only ends a hang.
const LOADS: Duration = Duration::from_secs(60);
/// Lines of the log that the report has of one that is refused.
const SHOWN: usize = 3;

/// One that schedules.
pub enum Running {
    /// The kernel's own.
    Own,
    /// scx_vnuma.
    Vnuma(Process),
    /// One of scx.
    Scx(Process),
}

/// Loads it, or says why that cannot be.
pub fn load(scheduler: Scheduler) -> Result<Result<Running, String>> {
    ensure!(loaded()?.is_none(), "a scheduler is loaded already: {:?}", loaded()?);
    let options: &[&str] = match scheduler {
        Scheduler::Eevdf | Scheduler::EevdfAgain => return Ok(Ok(Running::Own)),
        Scheduler::Partial => &[],
        Scheduler::Full => &["--full"],
        Scheduler::ScxLayered => return scx(scheduler, &["--run-example"]),
        _ => return scx(scheduler, &[]),
    };
    Ok(Ok(Running::Vnuma(start(options)?.0)))
}

fn scx(scheduler: Scheduler, options: &[&str]) -> Result<Result<Running, String>> {
    let program = scheduler.program().context("one of scx")?;
    let log = File::create(LOG).context(LOG)?;
    let mut command = Command::new(&program);
    command.args(options).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut process = match command.spawn() {
        Ok(child) => Process(child),
        Err(error) => return Ok(Err(format!("{program}: {error}"))),
    };
    let mut ended = None;
    let waited = wait_for(&format!("{program} to be loaded"), LOADS, || {
        ended = process.0.try_wait()?;
        Ok(ended.is_some() || loaded()?.is_some())
    });
    match (ended, waited) {
        (None, Ok(())) => Ok(Ok(Running::Scx(process))),
        (ended, _) => {
            let status = ended.map_or("it loads none".to_owned(), |status| status.to_string());
            Ok(Err(format!("{program}: {status}: {}", last_lines(&fs::read_to_string(LOG)?))))
        }
    }
}

/// The last lines that say anything.
fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(SHOWN)..].join("; ")
}

impl Running {
    /// Unloads it. An error if it has ended before.
    pub fn end(self) -> Result<Result<(), String>> {
        match self {
            Self::Own => Ok(Ok(())),
            Self::Vnuma(process) => Ok(Ok(stop(process)?)),
            Self::Scx(mut process) => {
                if let Some(status) = process.0.try_wait()? {
                    return Ok(Err(format!("it ended: {status}: {}", last_lines(&fs::read_to_string(LOG)?))));
                }
                output("kill", &["-INT", &process.0.id().to_string()])?;
                process.ended("one of scx")?;
                wait_for("the kernel's own scheduler", HANG_LIMIT, || Ok(loaded()?.is_none()))?;
                Ok(Ok(()))
            }
        }
    }

    /// The process of scx_vnuma.
    pub fn pid(&self) -> Result<u32> {
        match self {
            Self::Vnuma(process) => Ok(process.0.id()),
            _ => bail!("it is not scx_vnuma"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_the_last_lines_that_say_anything() {
        assert_eq!(last_lines("one\n\n two\nthree\nfour\n\n"), "two; three; four");
        assert_eq!(last_lines(""), "");
    }
}
