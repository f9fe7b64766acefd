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
/// How often the kernel has loaded one.
const TIMES_LOADED: &str = "/sys/kernel/sched_ext/enable_seq";
/// Until one of scx is loaded, which takes an emulated server up to a minute, or has ended. Only ends a hang.
const LOADS: Duration = Duration::from_secs(300);
/// Until one that the kernel has ended has said why.
const SAYS_WHY: Duration = Duration::from_secs(20);
/// Lines of the log that the report has of one that is refused.
const SHOWN: usize = 3;

/// One that schedules.
pub enum Running {
    /// The kernel's own.
    Own,
    /// scx_vnuma.
    Vnuma(Process),
    /// One of scx.
    Scx {
        /// Its process.
        process: Process,
        /// How often the kernel had loaded one when it had loaded this.
        times_loaded: u64,
    },
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
        (None, Ok(())) => Ok(Ok(Running::Scx { process, times_loaded: times_loaded()? })),
        (ended, _) => {
            let status = ended.map_or("it loads none".to_owned(), |status| status.to_string());
            kill(process)?;
            Ok(Err(format!("{program}: {status}: {}", last_lines(&fs::read_to_string(LOG)?))))
        }
    }
}

/// It may have loaded itself in the end.
fn kill(process: Process) -> Result<()> {
    drop(process);
    wait_for("the kernel's own scheduler", HANG_LIMIT, || Ok(loaded()?.is_none()))
}

fn times_loaded() -> Result<u64> {
    let text = fs::read_to_string(TIMES_LOADED).context(TIMES_LOADED)?;
    text.trim().parse().context(TIMES_LOADED)
}

/// The last lines that say anything, without colours.
fn last_lines(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    // A colour ends with its letter.
    let plain = parts.filter_map(|part| part.split_once('m')).fold(first, |text, (_, plain)| text + plain);
    let lines: Vec<&str> = plain.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(SHOWN)..].join("; ")
}

impl Running {
    /// Unloads it. An error in words if it did not schedule all the time: the kernel ends one that does wrong, and some start anew then.
    pub fn end(self) -> Result<Result<(), String>> {
        match self {
            Self::Own => Ok(Ok(())),
            Self::Vnuma(process) => Ok(Ok(stop(process)?)),
            Self::Scx { mut process, times_loaded: before } => {
                let stayed = loaded()?.is_some() && times_loaded()? == before;
                if stayed {
                    output("kill", &["-INT", &process.0.id().to_string()])?;
                }
                let mut status = None;
                // One that does not end is killed.
                let _ = wait_for("one of scx to end", if stayed { LOADS } else { SAYS_WHY }, || {
                    status = process.0.try_wait()?;
                    Ok(status.is_some())
                });
                kill(process)?;
                let status = status.map_or("it loaded itself again".to_owned(), |status| status.to_string());
                let why = || {
                    Ok(format!("the kernel ended it: {status}: {}", last_lines(&fs::read_to_string(LOG)?)))
                };
                if stayed { Ok(Ok(())) } else { why().map(Err) }
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
        assert_eq!(last_lines("\x1b[0m\x1b[34m[INFO] \x1b[0mone\n\x1b[1;31mtwo\x1b[0m"), "[INFO] one; two");
        assert_eq!(last_lines(""), "");
    }
}
