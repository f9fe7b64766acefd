//! Schedulers of `sched_ext` of other programs, such as those of scx.

use crate::loaded;
use anyhow::{Context, Result};
use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};
use vnuma_scenario::{HANG_LIMIT, Process, output, wait_for};

/// How often the kernel has loaded one.
const TIMES_LOADED: &str = "/sys/kernel/sched_ext/enable_seq";
/// Until one is loaded, which takes an emulated server up to a minute, or has ended. Only ends a hang.
const LOADS: Duration = Duration::from_secs(300);
/// Until one that the kernel has ended has said why.
const SAYS_WHY: Duration = Duration::from_secs(20);
/// Lines of what it says that an error has.
const SHOWN: usize = 3;

/// One that is loaded.
pub struct Other {
    process: Process,
    log: PathBuf,
    /// How often the kernel had loaded one when it had loaded this.
    times_loaded: u64,
}

impl Other {
    /// Loads it, or says why that cannot be. What the program says goes to `log`.
    pub fn load(program: &str, options: &[&str], log: PathBuf) -> Result<Result<Self, String>> {
        let file = File::create(&log).with_context(|| log.display().to_string())?;
        let mut command = Command::new(program);
        command.args(options).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
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
            (None, Ok(())) => Ok(Ok(Self { process, log, times_loaded: times_loaded()? })),
            (ended, _) => {
                let status = ended.map_or("it loads none".to_owned(), |status| status.to_string());
                kill(process)?;
                Ok(Err(format!("{program}: {status}: {}", last_lines(&fs::read_to_string(&log)?))))
            }
        }
    }

    /// How often it was loaded again: the kernel ends one that does wrong, and some when a CPU comes or goes, and some start anew then.
    pub fn times_anew(&self) -> Result<u64> {
        Ok(times_loaded()?.saturating_sub(self.times_loaded))
    }

    /// Whether it has scheduled all the time.
    pub fn stayed(&self) -> Result<bool> {
        Ok(loaded()?.is_some() && times_loaded()? == self.times_loaded)
    }

    /// Whether the program runs, whatever the kernel has done to its scheduler.
    pub fn runs(&mut self) -> Result<bool> {
        Ok(self.process.0.try_wait()?.is_none())
    }

    /// Unloads it. An error in words if it did not schedule all the time.
    pub fn end(self) -> Result<Result<(), String>> {
        let stayed = self.stayed()?;
        let Self { mut process, log, .. } = self;
        if stayed {
            output("kill", &["-INT", &process.0.id().to_string()])?;
        }
        let mut status = None;
        // One that does not end is killed.
        let _ = wait_for("it to end", if stayed { LOADS } else { SAYS_WHY }, || {
            status = process.0.try_wait()?;
            Ok(status.is_some())
        });
        kill(process)?;
        if stayed {
            return Ok(Ok(()));
        }
        let status = status.map_or("it loaded itself again".to_owned(), |status| status.to_string());
        Ok(Err(format!("the kernel ended it: {status}: {}", last_lines(&fs::read_to_string(&log)?))))
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
