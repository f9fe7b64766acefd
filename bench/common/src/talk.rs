//! Programs in guests, and what they say, line by line and within a limit: one that hangs ends its cell, not the run.

use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::de::DeserializeOwned;
use std::{
    io::{Read, Write},
    os::fd::AsFd,
    process::{ChildStdin, ChildStdout},
    time::{Duration, Instant},
};
use vnuma_scenario::{Process, wait_for, waiting};

/// Until an answer. Only ends a hang.
const ANSWER: Duration = Duration::from_secs(600);
/// How long a program has to end by itself. Only ends a hang, too.
const END: Duration = Duration::from_secs(120);
/// The same of one that is not asked how it ended.
const DROP: Duration = Duration::from_secs(20);

/// The lines of a pipe.
pub struct Lines<R> {
    from: R,
    rest: Vec<u8>,
    who: String,
    limit: Duration,
}

impl<R: Read + AsFd> Lines<R> {
    /// Of a program, which errors name.
    pub fn of(from: R, who: impl Into<String>) -> Self {
        Self { from, rest: Vec::new(), who: who.into(), limit: ANSWER }
    }

    /// Waits for the next one; `what` is waited for.
    pub fn next(&mut self, what: &str) -> Result<String> {
        let end = Instant::now() + self.limit;
        let _waiting = waiting(&format!("{} to answer {what:?}", self.who));
        loop {
            if let Some(at) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=at).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            let left = end.saturating_duration_since(Instant::now());
            let mut ready = [PollFd::new(self.from.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            let in_time = !left.is_zero() && poll(&mut ready, timeout)? > 0;
            ensure!(in_time, "{}: no answer to {what:?} within {} s", self.who, self.limit.as_secs());
            let mut piece = [0; 4096];
            match self.from.read(&mut piece).with_context(|| self.who.clone())? {
                0 => bail!("{} has ended, and not answered {what:?}", self.who),
                count => self.rest.extend(&piece[..count]),
            }
        }
    }
}

/// A program in a guest that does what its standard input says, and answers each line with one of JSON.
pub struct Talk {
    process: Process,
    /// Until the end.
    input: Option<ChildStdin>,
    output: Lines<ChildStdout>,
}

impl Drop for Talk {
    /// It ends by itself when its input does, and ends its programs. Killed, it would leave those in the guest, and a server among
    /// them would keep its port.
    fn drop(&mut self) {
        drop(self.input.take());
        let ended = || Ok(self.process.0.try_wait()?.is_some());
        if let Err(error) = wait_for(&format!("{} to end", self.output.who), DROP, ended) {
            eprintln!("{error:#}; it is killed");
        }
    }
}

impl Talk {
    /// With one that has started.
    pub fn with(mut process: Process, who: impl Into<String>) -> Result<Self> {
        let input = process.0.stdin.take();
        let output = Lines::of(process.0.stdout.take().context("standard output")?, who);
        Ok(Self { process, input, output })
    }

    /// What it says next.
    pub fn answer<T: DeserializeOwned>(&mut self, what: &str) -> Result<T> {
        let line = self.output.next(what)?;
        serde_json::from_str(&line).with_context(|| format!("{}: {line:?} to {what:?}", self.output.who))
    }

    /// Has it do something.
    pub fn ask<T: DeserializeOwned>(&mut self, what: &str) -> Result<T> {
        let input = self.input.as_mut().context("standard input")?;
        writeln!(input, "{what}").and_then(|()| input.flush()).with_context(|| self.output.who.clone())?;
        self.answer(what)
    }

    /// Has it end, as which it may not fail.
    pub fn end(mut self) -> Result<()> {
        drop(self.input.take());
        let mut status = None;
        wait_for(&format!("{} to end", self.output.who), END, || {
            status = self.process.0.try_wait()?;
            Ok(status.is_some())
        })?;
        ensure!(status.is_some_and(|status| status.success()), "{}: {status:?}", self.output.who);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn talk(script: &str) -> Talk {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut talk = Talk::with(Process(shell.spawn().expect("a shell")), "a shell").expect("a talk");
        talk.output.limit = Duration::from_millis(300);
        talk
    }

    #[test]
    fn a_program_answers_line_by_line_and_ends() {
        let mut cat = talk("echo 1; cat");
        assert_eq!((cat.answer::<u8>("").expect("one"), cat.ask::<u8>("2").expect("two")), (1, 2));
        cat.end().expect("ended");
        assert!(talk("exit 3").end().is_err());
    }

    #[test]
    fn a_program_that_hangs_or_ends_is_no_answer() {
        let error = |script| talk(script).ask::<u8>("go").expect_err("no answer").to_string();
        assert_eq!(error("read line; exec sleep 1"), "a shell: no answer to \"go\" within 0 s");
        assert_eq!(error("read line"), "a shell has ended, and not answered \"go\"");
        assert_eq!(error("read line; echo x"), "a shell: \"x\" to \"go\"");
    }
}
