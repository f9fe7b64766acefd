//! What programs say, line by line.

use crate::{HANG_LIMIT, Process, waiting};
use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    io::Read,
    os::fd::AsFd,
    process::ChildStdout,
    time::{Duration, Instant},
};

/// The lines of a pipe, each within a limit.
pub struct Lines<R> {
    from: R,
    rest: Vec<u8>,
    who: String,
    /// Until the next line. Only ends a hang.
    pub limit: Duration,
}

impl Lines<ChildStdout> {
    /// Of a process that has a pipe for its standard output.
    pub fn of_process(process: &mut Process, who: impl Into<String>) -> Result<Self> {
        Ok(Self::of(process.0.stdout.take().context("no standard output")?, who))
    }
}

impl<R: Read + AsFd> Lines<R> {
    /// Of a program, which errors name.
    pub fn of(from: R, who: impl Into<String>) -> Self {
        Self { from, rest: Vec::new(), who: who.into(), limit: HANG_LIMIT }
    }

    /// The program, as errors name it.
    pub fn who(&self) -> &str {
        &self.who
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn lines_come_one_by_one_and_a_silence_is_named() {
        let shell =
            Command::new("sh").args(["-c", "echo 1; echo 2; exec sleep 1000"]).stdout(Stdio::piped()).spawn();
        let mut shell = Process(shell.expect("a shell"));
        let mut lines = Lines::of_process(&mut shell, "a shell").expect("a pipe");
        assert_eq!([lines.next("").expect("one"), lines.next("").expect("two")], ["1", "2"]);
        lines.limit = Duration::from_millis(300);
        let error = lines.next("a third").expect_err("none").to_string();
        assert_eq!(error, "a shell: no answer to \"a third\" within 0 s");
    }
}
