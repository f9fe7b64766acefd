//! How a benchmark ends: with status 0 if all was measured and its goals are met, 2 if goals are missed, and 1 if something could not be
//! measured or its arguments are wrong.

use anyhow::{Error, Result, bail};
use clap::Parser;
use std::{
    fmt,
    process::{ExitCode, ExitStatus},
};

const FAILED: u8 = 1;
const MISSED: u8 = 2;

/// All was measured, and goals are missed: these.
#[derive(Debug)]
pub struct Missed(pub String);

impl fmt::Display for Missed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Missed {}

/// Does what the arguments of this program say.
pub fn main<A: Parser>(run: impl FnOnce(A) -> Result<()>) -> ExitCode {
    match arguments() {
        Ok(arguments) => end(run(arguments)),
        Err(status) => status,
    }
}

/// The arguments of this program, or what it ends with, as they are wrong or ask for help.
pub fn arguments<A: Parser>() -> Result<A, ExitCode> {
    A::try_parse().map_err(|error| {
        // There is no way left to report that it could not be printed.
        let _ = error.print();
        ExitCode::from(if error.use_stderr() { FAILED } else { 0 })
    })
}

/// Says why it ends, if not well.
pub fn end(outcome: Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    let (status, meaning) = meaning(&error);
    eprintln!("error: {error:#}\nexit status {status}: {meaning}");
    ExitCode::from(status)
}

fn meaning(error: &Error) -> (u8, &'static str) {
    match error.is::<Missed>() {
        true => (MISSED, "all was measured, and goals are missed"),
        false => (FAILED, "not all was measured"),
    }
}

/// How a benchmark ended that is a program of its own.
pub fn of(program: &str, status: ExitStatus) -> Result<()> {
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(0) => Ok(()),
        Some(MISSED) => Err(Missed(format!("{program}: goals are missed")).into()),
        _ => bail!("{program}: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};
    use std::process::Command;

    #[test]
    fn missed_goals_have_a_status_of_their_own() {
        let missed = Err::<(), _>(Missed("a".to_owned())).context("of a benchmark").expect_err("missed");
        assert_eq!(meaning(&missed).0, 2);
        assert_eq!(meaning(&anyhow!("no server")).0, 1);
        let ended = |code: &str| of("it", Command::new("sh").args(["-c", code]).status().expect("a shell"));
        assert!(ended("exit 0").is_ok());
        assert_eq!(meaning(&ended("exit 2").expect_err("missed")).0, 2);
        for failed in ["exit 1", "exit 3", "kill -9 $$"] {
            assert_eq!(meaning(&ended(failed).expect_err("failed")).0, 1, "{failed}");
        }
    }
}
