//! Running commands, and the steps of a check with a summary that counts.

use anyhow::{Context, Result, bail};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

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

/// Lines of a failed test that are shown again at the end. All of them stand where it failed.
const SHOWN_AGAIN: usize = 25;

/// Tests as `cargo test` counts them, and the end of what failed ones printed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    passed: u32,
    failed: u32,
    ignored: u32,
    failures: Vec<VecDeque<String>>,
    /// What is read belongs to the last of these.
    in_failure: bool,
    /// The last lines, for a test whose output is not captured.
    last: VecDeque<String>,
}

impl Counts {
    /// One test that cargo did not run.
    pub fn add_passed(&mut self) {
        self.passed += 1;
    }

    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.failures.extend(other.failures);
    }

    /// The last lines of a test that failed, without those of backtraces.
    fn add_failure_line(&mut self, line: &str) {
        if line.starts_with("---- ") && line.ends_with(" stdout ----") {
            self.failures.push(VecDeque::from([line.to_owned()]));
            self.in_failure = true;
        } else if line == "failures:" {
            self.in_failure = false;
        } else if line == "FAILED" {
            // What a test has printed with --nocapture stands before.
            self.failures.push(std::mem::take(&mut self.last));
        } else if !of_backtrace(line) {
            let failure = self.failures.last_mut().filter(|_| self.in_failure);
            let (lines, heading) = failure.map_or((&mut self.last, 0), |lines| (lines, 1));
            if lines.len() >= SHOWN_AGAIN + heading {
                lines.remove(heading);
            }
            lines.push_back(line.to_owned());
        }
    }

    /// `test result: ok. 9 passed; 0 failed; 0 ignored; ...`
    fn add_line(&mut self, line: &str) {
        self.add_failure_line(line);
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

/// `  12: a::function`, `             at ./src/a.rs:1:1`, and the lines around them. Empty lines as well.
fn of_backtrace(line: &str) -> bool {
    let (indent, text) = (line.len() - line.trim_start().len(), line.trim_start());
    let frame =
        text.split_once(": ").is_some_and(|(number, _)| number.bytes().all(|byte| byte.is_ascii_digit()));
    let heading = text == "stack backtrace:" || text.starts_with("note: Some details are omitted");
    text.is_empty() || heading || (indent >= 2 && frame) || (indent >= 10 && text.starts_with("at "))
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
        self.ended(name, result, start.elapsed().as_secs_f64());
    }

    /// Runs the steps of `others`, and `cargo test` with these arguments beside them: one lab server leaves most of a
    /// CPU idle. Its output goes to a file and is printed when it has ended. A machine with one CPU does one after the
    /// other.
    pub fn beside(&mut self, name: &str, arguments: &[&str], others: impl FnOnce(&mut Self)) {
        if thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
            others(self);
            self.step(name, |counts| cargo_test(arguments, &[], counts));
            return;
        }
        let path = workspace().join("target/test/beside.log");
        println!("\n==> {name}: runs beside the next steps, its output is in {}", path.display());
        let (result, counts, seconds) = thread::scope(|scope| {
            let tests = scope.spawn(|| {
                let (start, mut counts) = (Instant::now(), Counts::default());
                let result = logged(&path, |log| cargo_test_to(arguments, &[], &mut counts, log));
                (result, counts, start.elapsed().as_secs_f64())
            });
            others(self);
            let start = Instant::now();
            while !tests.is_finished() {
                thread::sleep(Duration::from_secs(1));
                if start.elapsed().as_secs() % 30 == 29 {
                    println!("{name}: has not ended yet");
                }
            }
            tests.join().expect("the thread does not panic")
        });
        println!("\n==> {name} (ran beside the steps above)");
        if let Err(error) = show_file(&path) {
            println!("{}: {error}", path.display());
        }
        self.counts.add(counts);
        self.ended(name, result, seconds);
    }

    fn ended(&mut self, name: &str, result: Result<()>, seconds: f64) {
        if let Err(error) = &result {
            println!("{name} FAILED: {error:#}");
        }
        self.results.push((name.to_owned(), result, seconds));
    }

    /// Prints the summary; an error when a step failed.
    pub fn finish(self) -> Result<()> {
        println!();
        for line in self.counts.failures.iter().flatten() {
            println!("{line}");
        }
        for (name, result, seconds) in &self.results {
            println!("{:<7} {name} ({seconds:.0} s)", if result.is_ok() { "ok" } else { "FAILED" });
        }
        let Counts { passed, failed, ignored, .. } = self.counts;
        println!("{passed} passed, {failed} failed, {ignored} skipped");
        let broken = self.results.iter().filter(|(_, result, _)| result.is_err()).count();
        if broken > 0 {
            bail!("{broken} of {} steps failed", self.results.len());
        }
        Ok(())
    }
}

/// Makes the file, and its directory.
fn logged(path: &Path, action: impl FnOnce(File) -> Result<()>) -> Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path)).with_context(|| path.display().to_string())?;
    action(File::create(path).with_context(|| path.display().to_string())?)
}

fn show_file(path: &Path) -> io::Result<()> {
    io::copy(&mut File::open(path)?, &mut io::stdout()).map(drop)
}

/// Runs `cargo test` with its output shown, and counts the tests.
pub fn cargo_test(arguments: &[&str], env: &[(&str, &str)], counts: &mut Counts) -> Result<()> {
    run_cargo_test(arguments, env, Stdio::inherit(), counts, &mut io::stdout())
}

/// The same with all output in a file.
fn cargo_test_to(arguments: &[&str], env: &[(&str, &str)], counts: &mut Counts, mut log: File) -> Result<()> {
    let errors = log.try_clone()?.into();
    run_cargo_test(arguments, env, errors, counts, &mut log)
}

fn run_cargo_test(
    arguments: &[&str],
    env: &[(&str, &str)],
    errors: Stdio,
    counts: &mut Counts,
    output: &mut dyn Write,
) -> Result<()> {
    let mut command = Command::new("cargo");
    command.arg("test").args(arguments).envs(env.iter().copied());
    command.current_dir(workspace()).stdout(Stdio::piped()).stderr(errors);
    let shown = show(&command);
    let mut child = command.spawn().with_context(|| format!("cannot start {shown}"))?;
    let stdout = child.stdout.take().context("no standard output")?;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        counts.add_line(&line);
        writeln!(output, "{line}")?;
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
        assert_eq!((counts.passed, counts.failed, counts.ignored), (10, 3, 2));
    }

    #[test]
    fn the_end_of_what_failed_tests_printed_is_kept() {
        let mut counts = Counts::default();
        let long = (0..1000).map(|line| format!("line {line}"));
        let short = [
            "failures:",
            "",
            "---- a stdout ----",
            "a says",
            "",
            "thread 'a' panicked at a.rs:1:1:",
            "it is wrong",
            "stack backtrace:",
            "   0: main",
            "             at ./a.rs:1:1",
            "note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.",
            "a's last word",
            "",
            "---- b stdout ----",
        ];
        short.map(str::to_owned).into_iter().chain(long).for_each(|line| counts.add_line(&line));
        for line in
            ["", "failures:", "    a", "    b", "", "test result: FAILED. 0 passed; 2 failed; 0 ignored"]
        {
            counts.add_line(line);
        }
        let [a, b] = counts.failures.as_slice() else { panic!("{counts:?}") };
        assert_eq!(
            a,
            &[
                "---- a stdout ----",
                "a says",
                "thread 'a' panicked at a.rs:1:1:",
                "it is wrong",
                "a's last word"
            ]
        );
        assert_eq!((b[0].as_str(), b[1].as_str(), b.len()), ("---- b stdout ----", "line 975", 26));
        assert_eq!((b[25].as_str(), counts.failed), ("line 999", 2));
    }

    #[test]
    fn the_end_of_what_a_failed_test_printed_uncaptured_is_kept() {
        let mut counts = Counts::default();
        let before = (0..100).map(|line| format!("line {line}"));
        let panic =
            ["thread 'a' panicked at a.rs:1:1:", "it is wrong", "stack backtrace:", "   0: main", "FAILED"];
        before.chain(panic.map(str::to_owned)).for_each(|line| counts.add_line(&line));
        let [lines] = counts.failures.as_slice() else { panic!("{counts:?}") };
        assert_eq!((lines.len(), lines[0].as_str(), lines[24].as_str()), (25, "line 77", "it is wrong"));
    }
}
