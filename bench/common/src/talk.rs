//! Programs in guests, and what they say, line by line and within a limit: one that hangs ends its cell, not the run.

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use std::{
    io::Write,
    process::{ChildStdin, ChildStdout},
    time::Duration,
};
use vnuma_scenario::{Lines, Process, wait_for};

/// How long a program has to end by itself that is not asked how it ended. Only ends a hang.
const DROP: Duration = Duration::from_secs(20);

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
        if let Err(error) = wait_for(&format!("{} to end", self.output.who()), DROP, ended) {
            eprintln!("{error:#}; it is killed");
        }
    }
}

impl Talk {
    /// With one that has started.
    pub fn with(mut process: Process, who: impl Into<String>) -> Result<Self> {
        let input = process.0.stdin.take();
        let output = Lines::of_process(&mut process, who)?;
        Ok(Self { process, input, output })
    }

    /// What it says next.
    pub fn answer<T: DeserializeOwned>(&mut self, what: &str) -> Result<T> {
        let line = self.output.next(what)?;
        serde_json::from_str(&line).with_context(|| format!("{}: {line:?} to {what:?}", self.output.who()))
    }

    /// Has it do something.
    pub fn ask<T: DeserializeOwned>(&mut self, what: &str) -> Result<T> {
        let input = self.input.as_mut().context("standard input")?;
        writeln!(input, "{what}")
            .and_then(|()| input.flush())
            .with_context(|| self.output.who().to_owned())?;
        self.answer(what)
    }

    /// Has it end, as which it may not fail.
    pub fn end(mut self) -> Result<()> {
        drop(self.input.take());
        self.process.succeed(self.output.who())
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
