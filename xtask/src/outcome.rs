//! What tests say: the output of libtest, which has passed, failed and ignored tests, and what passed ones printed.

use std::collections::VecDeque;

/// Lines of a failed test that are shown again at the end. All of them stand where it failed.
const SHOWN_AGAIN: usize = 25;
/// What a test prints that leaves out what it is for, and why.
const SKIPPED: &str = "skipped: ";
/// How the lab says that a boot is tried again.
const BOOTS_AGAIN: &str = "; trying once more";
/// How the lab tests say that a job is run again.
const RUNS_AGAIN: &str = "the emulated processor has ended it; it is run again";

/// Tests as libtest counts them, and the end of what failed ones printed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: u32,
    pub failed: u32,
    /// Ignored by attribute, or left out by the test itself.
    pub skipped: u32,
    /// Test and reason, of those that said so themselves.
    pub skips: Vec<String>,
    /// What was done once more: boots, and jobs that the emulated processor has ended.
    pub repeated: Vec<String>,
    pub failures: Vec<VecDeque<String>>,
    section: Section,
    /// The last lines, for a test whose output is not captured.
    last: VecDeque<String>,
}

/// Whose output is being read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Section {
    #[default]
    None,
    /// Headings that follow are of tests that passed.
    Successes,
    /// Of this one.
    Passed(String),
    /// The same, and it is counted as skipped.
    Skipped(String),
    /// Of the last of the failures.
    Failed,
}

impl Counts {
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.skips.extend(other.skips);
        self.repeated.extend(other.repeated);
        self.failures.extend(other.failures);
    }

    /// `9 passed, 1 failed, 2 skipped`
    pub fn text(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }

    /// A line of a test program's output.
    pub fn add_line(&mut self, line: &str) {
        if let Some(result) = line.strip_prefix("test result: ") {
            self.add_result(result);
        } else if line == "successes:" {
            self.section = Section::Successes;
        } else if line == "failures:" {
            self.section = Section::None;
        } else if let Some(test) =
            line.strip_prefix("---- ").and_then(|line| line.strip_suffix(" stdout ----"))
        {
            self.begin(test, line);
        } else if line == "FAILED" {
            // What a test has printed with --nocapture stands before.
            self.failures.push(std::mem::take(&mut self.last));
        } else {
            self.add_output(line);
        }
    }

    fn begin(&mut self, test: &str, heading: &str) {
        if matches!(self.section, Section::Successes | Section::Passed(_) | Section::Skipped(_)) {
            self.section = Section::Passed(test.to_owned());
        } else {
            self.failures.push(VecDeque::from([heading.to_owned()]));
            self.section = Section::Failed;
        }
    }

    fn add_output(&mut self, line: &str) {
        if let Some(reason) = line.strip_prefix(SKIPPED) {
            self.skip(reason);
        }
        if line.contains(RUNS_AGAIN) || (line.contains("did not boot") && line.ends_with(BOOTS_AGAIN)) {
            self.repeated.push(line.to_owned());
        }
        if of_backtrace(line) {
            return;
        }
        let failed = self.section == Section::Failed;
        let failure = self.failures.last_mut().filter(|_| failed);
        let (lines, heading) = failure.map_or((&mut self.last, 0), |lines| (lines, 1));
        if lines.len() >= SHOWN_AGAIN + heading {
            lines.remove(heading);
        }
        lines.push_back(line.to_owned());
    }

    /// A test counts as skipped once, if its output is captured: nothing else says which test printed a line.
    fn skip(&mut self, reason: &str) {
        let test = match &self.section {
            Section::Passed(test) => {
                self.passed = self.passed.wrapping_sub(1);
                self.skipped += 1;
                test.clone()
            }
            Section::Skipped(test) => test.clone(),
            _ => return self.skips.push(reason.to_owned()),
        };
        self.skips.push(format!("{test}: {reason}"));
        self.section = Section::Skipped(test);
    }

    /// `ok. 9 passed; 0 failed; 0 ignored; ...`
    fn add_result(&mut self, text: &str) {
        self.section = Section::None;
        for part in text.split([';', '.']) {
            let mut words = part.split_whitespace();
            if let (Some(Ok(count)), Some(what)) = (words.next().map(str::parse::<u32>), words.next()) {
                match what {
                    // Those that were skipped have been taken off before.
                    "passed" => self.passed = self.passed.wrapping_add(count),
                    "failed" => self.failed += count,
                    "ignored" => self.skipped += count,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Counts {
        let mut counts = Counts::default();
        lines.iter().for_each(|line| counts.add_line(line));
        counts
    }

    #[test]
    fn results_of_tests_are_added_up() {
        let mut counts = of(&[
            "running 3 tests",
            "test result: ok. 9 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.13s",
        ]);
        counts.add(of(&["test result: FAILED. 1 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out"]));
        assert_eq!(counts.text(), "10 passed, 3 failed, 2 skipped");
    }

    #[test]
    fn a_test_that_leaves_out_what_it_is_for_is_skipped_and_named() {
        let counts = of(&[
            "test a ... ok",
            "successes:",
            "",
            "---- a stdout ----",
            "skipped: no root",
            "skipped: no KVM",
            "",
            "---- b stdout ----",
            "it was not skipped: at all",
            "",
            "successes:",
            "    a",
            "    b",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.13s",
        ]);
        assert_eq!(counts.text(), "2 passed, 0 failed, 2 skipped");
        assert_eq!(counts.skips, ["a: no root", "a: no KVM"]);
        let part = of(&["skipped: no tcmalloc", "test result: ok. 1 passed; 0 failed; 0 ignored"]);
        assert_eq!(part.text(), "1 passed, 0 failed, 0 skipped");
        assert_eq!(part.skips, ["no tcmalloc"]);
    }

    #[test]
    fn what_was_done_once_more_is_kept() {
        let boot = "lab: 2n4c did not boot (its agent did not answer); trying once more";
        let job = "x: the emulated processor has ended it; it is run again (1 of 3 runs were made)";
        assert_eq!(of(&["lab: 2n4c boots", boot, job]).repeated, [boot, job]);
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
