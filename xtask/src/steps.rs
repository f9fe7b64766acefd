//! Running commands, and the steps of a check with a summary that counts.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

/// The root of the checkout.
pub fn workspace() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().expect("xtask lies in the workspace").to_owned()
}

/// Runs a command from the root of the checkout; an error unless it succeeds.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    if command.get_current_dir().is_none() {
        command.current_dir(workspace());
    }
    let status = command.status().with_context(|| format!("cannot start {shown}"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

/// Like [`run`]; output is shown only when it fails.
pub fn run_quiet(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let output = command.output().with_context(|| format!("cannot start {shown}"))?;
    if !output.status.success() {
        let text = [output.stdout, output.stderr].concat();
        bail!("{shown}: {}\n{}", output.status, String::from_utf8_lossy(&text));
    }
    Ok(())
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Tests as `cargo test` counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    passed: u32,
    failed: u32,
    ignored: u32,
}

impl Counts {
    /// One test that cargo did not run.
    pub fn add_passed(&mut self) {
        self.passed += 1;
    }

    /// `test result: ok. 9 passed; 0 failed; 0 ignored; ...`
    fn add_line(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("test result: ") else { return };
        for part in rest.split([';', '.']) {
            let mut words = part.split_whitespace();
            if let (Some(Ok(count)), Some(what)) = (words.next().map(str::parse::<u32>), words.next()) {
                match what {
                    "passed" => self.passed += count,
                    "failed" => self.failed += count,
                    "ignored" => self.ignored += count,
                    _ => {}
                }
            }
        }
    }
}

/// Steps of a check. Later steps run although an earlier one failed, so that one run shows
/// everything that is wrong.
#[derive(Default)]
pub struct Steps {
    results: Vec<(String, Result<()>, f64)>,
    counts: Counts,
}

impl Steps {
    /// Runs one step.
    pub fn step(&mut self, name: &str, action: impl FnOnce(&mut Counts) -> Result<()>) {
        println!("\n==> {name}");
        let start = Instant::now();
        let result = action(&mut self.counts);
        if let Err(error) = &result {
            println!("{name} FAILED: {error:#}");
        }
        self.results.push((name.to_owned(), result, start.elapsed().as_secs_f64()));
    }

    /// Prints the summary; an error when a step failed.
    pub fn finish(self) -> Result<()> {
        println!();
        for (name, result, seconds) in &self.results {
            println!("{:<7} {name} ({seconds:.0} s)", if result.is_ok() { "ok" } else { "FAILED" });
        }
        let Counts { passed, failed, ignored } = self.counts;
        println!("{passed} passed, {failed} failed, {ignored} skipped");
        let broken = self.results.iter().filter(|(_, result, _)| result.is_err()).count();
        if broken > 0 {
            bail!("{broken} of {} steps failed", self.results.len());
        }
        Ok(())
    }
}

/// Runs `cargo test` with its output shown, and counts the tests.
pub fn cargo_test(arguments: &[&str], env: &[(&str, &str)], counts: &mut Counts) -> Result<()> {
    let mut command = Command::new("cargo");
    command.arg("test").args(arguments).envs(env.iter().copied());
    command.current_dir(workspace()).stdout(Stdio::piped());
    let shown = show(&command);
    let mut child = command.spawn().with_context(|| format!("cannot start {shown}"))?;
    let stdout = child.stdout.take().context("no standard output")?;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        counts.add_line(&line);
        println!("{line}");
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_cargo_test_are_added_up() {
        let mut counts = Counts::default();
        counts.add_line("running 3 tests");
        counts.add_line(
            "test result: ok. 9 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.13s",
        );
        counts.add_line("test result: FAILED. 1 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(counts, Counts { passed: 10, failed: 3, ignored: 2 });
    }
}
