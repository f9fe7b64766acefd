//! What a judge makes of what a server printed: rows, goals, a report with a picture, and the status that the run ends with.

use crate::{
    cells::Again,
    goals::{self, Goal},
};
use anyhow::{Context, Result, ensure};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Options of every judge.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Files {
    /// What the server printed
    #[arg(long)]
    raw: PathBuf,
    /// Folder for report.json and report.svg
    #[arg(long)]
    directory: PathBuf,
    /// What was measured
    #[arg(long)]
    pub commit: String,
    /// It is to have all that the full form has
    #[arg(long)]
    pub full: bool,
    /// Judge nothing but that figures came out
    #[arg(long)]
    smoke: bool,
    /// Print the report instead of a table
    #[arg(long)]
    json: bool,
}

/// What a server printed.
#[derive(Debug, PartialEq)]
pub struct Raw<T> {
    /// Its lines, but for those about cells that were tried again.
    pub lines: Vec<T>,
    /// These cells.
    pub again: Vec<String>,
}

impl<T: DeserializeOwned> Raw<T> {
    /// All lines of a file; one that was cut off at the end is none. An error names the line.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let mut raw = Self { lines: Vec::new(), again: Vec::new() };
        for (number, line) in text.split_inclusive('\n').filter(|line| line.ends_with('\n')).enumerate() {
            match serde_json::from_str(line) {
                Ok(Again { again }) => raw.again.push(again),
                Err(_) => {
                    let place = || format!("{}:{}", path.display(), number + 1);
                    raw.lines.push(serde_json::from_str(line).with_context(place)?);
                }
            }
        }
        Ok(raw)
    }
}

/// A benchmark on a lab server, after its cells were measured.
pub trait Bench {
    /// A cell as a profile prices it.
    type Row: Serialize;
    /// How its figures came about.
    const SOURCE: &'static str;
    /// The server's profile.
    const MACHINE: &'static str;

    /// All cells, priced.
    fn price(&self) -> Result<Vec<Self::Row>>;
    /// The name of a row, and the figure without which it is none.
    fn figure(row: &Self::Row) -> (String, f64);
    /// What is wanted of the rows.
    fn goals(&self, rows: &[Self::Row]) -> Vec<Goal>;
    /// What else the report has.
    fn more(&self, rows: &[Self::Row]) -> impl Serialize;
    /// What people are shown.
    fn table(&self, rows: &[Self::Row]) -> String;
    /// Writes the picture.
    fn draw(&self, rows: &[Self::Row], path: &Path) -> Result<()>;
}

#[derive(Serialize)]
struct Report<'a, R, M> {
    source: &'static str,
    commit: &'a str,
    machine: &'static str,
    /// Cells that did not come about at first.
    again: &'a [String],
    goals: &'a [Goal],
    rows: &'a [R],
    #[serde(flatten)]
    more: M,
}

impl Files {
    /// What the server printed.
    pub fn read<T: DeserializeOwned>(&self) -> Result<Raw<T>> {
        Raw::read(&self.raw)
    }

    /// What the server printed is read from.
    pub fn raw(&self) -> &Path {
        &self.raw
    }

    /// Writes report and picture, prints the table. An error if a figure did not come out, or goals are missed.
    pub fn judge<B: Bench>(&self, bench: &B, again: &[String]) -> Result<()> {
        let rows = bench.price()?;
        let goals = if self.smoke { Vec::new() } else { bench.goals(&rows) };
        let report = Report {
            source: B::SOURCE,
            commit: &self.commit,
            machine: B::MACHINE,
            again,
            goals: &goals,
            rows: &rows,
            more: bench.more(&rows),
        };
        let text = serde_json::to_string_pretty(&report)? + "\n";
        let [path, picture] = ["report.json", "report.svg"].map(|name| self.directory.join(name));
        fs::write(&path, &text).with_context(|| path.display().to_string())?;
        bench.draw(&rows, &picture)?;
        print!("{}", if self.json { text } else { bench.table(&rows) });
        eprintln!("report: {}\npicture: {}", path.display(), picture.display());
        let missing: Vec<String> = rows
            .iter()
            .map(B::figure)
            .filter(|(_, figure)| !figure.is_finite())
            .map(|(name, _)| name)
            .collect();
        ensure!(missing.is_empty(), "no figure came out: {}", missing.join("; "));
        if self.json {
            return goals::check(goals.iter().map(|goal| (goal.goal.as_str(), Some(goal.met))));
        }
        goals::print(&goals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ending::Missed;

    struct Doubled(Vec<f64>);

    impl Bench for Doubled {
        type Row = f64;
        const SOURCE: &'static str = "made up";
        const MACHINE: &'static str = "none";

        fn price(&self) -> Result<Vec<f64>> {
            Ok(self.0.iter().map(|cell| cell * 2.0).collect())
        }

        fn figure(row: &f64) -> (String, f64) {
            (format!("row {row}"), *row)
        }

        fn goals(&self, rows: &[f64]) -> Vec<Goal> {
            let met = rows.iter().all(|row| *row < 10.0);
            vec![Goal { goal: "below 10".into(), found: format!("{rows:?}"), met }]
        }

        fn more(&self, rows: &[f64]) -> impl Serialize {
            serde_json::json!({"count": rows.len()})
        }

        fn table(&self, _: &[f64]) -> String {
            String::new()
        }

        fn draw(&self, _: &[f64], path: &Path) -> Result<()> {
            Ok(fs::write(path, "")?)
        }
    }

    fn in_directory(name: &str, test: impl FnOnce(&Path)) {
        let directory = std::env::temp_dir().join(format!("vnuma-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a folder");
        test(&directory);
        fs::remove_dir_all(&directory).expect("the folder");
    }

    #[test]
    fn lines_are_read_with_their_numbers_and_cells_that_came_late_apart() {
        in_directory("raw", |directory| {
            let path = directory.join("raw.jsonl");
            let read = |text: &str| {
                fs::write(&path, text).expect("a file");
                Raw::<u32>::read(&path)
            };
            let raw = read("1\n{\"again\":\"a cell\"}\n2\n3").expect("numbers, of which one was cut off");
            assert_eq!(raw, Raw { lines: vec![1, 2], again: vec!["a cell".to_owned()] });
            let error = read("1\nx\n").expect_err("no number");
            assert!(error.to_string().ends_with("raw.jsonl:2"), "{error:#}");
            fs::remove_file(&path).expect("the file");
            assert!(Raw::<u32>::read(&path).expect_err("no file").to_string().ends_with("raw.jsonl"));
        });
    }

    #[test]
    fn a_report_has_all_and_a_run_ends_as_it_went() {
        in_directory("report", |directory| {
            let files = Files { directory: directory.into(), commit: "c".into(), ..Files::default() };
            files.judge(&Doubled(vec![1.0]), &["a cell".to_owned()]).expect("met");
            let text = fs::read_to_string(directory.join("report.json")).expect("the report");
            let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!((&report["rows"][0], &report["count"]), (&2.0.into(), &1.into()));
            assert_eq!((&report["commit"], &report["again"][0]), (&"c".into(), &"a cell".into()));
            let missed = |cell| files.judge(&Doubled(vec![cell]), &[]).expect_err("missed");
            assert!(missed(5.0).is::<Missed>());
            assert_eq!(missed(f64::NAN).to_string(), "no figure came out: row NaN");
            let smoke = Files { smoke: true, ..files.clone() };
            smoke.judge(&Doubled(vec![5.0]), &[]).expect("a short form judges nothing");
            smoke.judge(&Doubled(vec![f64::NAN]), &[]).expect_err("but that figures came out");
        });
    }
}
