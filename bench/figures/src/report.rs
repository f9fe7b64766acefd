//! How much is measured, and what is made of it: rows, goals, a report with a picture, and the status that the run ends with.

use crate::{
    cells::Raw,
    goals::{self, Goal, Wanted},
};
use anyhow::{Context, Result, ensure};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// How much is measured.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Form {
    /// The full form, which takes longer
    #[arg(long, conflicts_with = "smoke")]
    pub full: bool,
    /// A form of at most two minutes, of which nothing is judged but that figures come out
    #[arg(long)]
    pub smoke: bool,
}

impl Form {
    /// For another program that has both.
    pub fn words(self) -> impl Iterator<Item = String> {
        let words = [(self.full, "--full"), (self.smoke, "--smoke")];
        words.into_iter().filter(|(chosen, _)| *chosen).map(|(_, word)| word.to_owned())
    }

    /// As reports have it.
    pub fn name(self) -> &'static str {
        match self {
            Self { full: true, .. } => "full",
            Self { smoke: true, .. } => "smoke",
            _ => "reduced",
        }
    }
}

/// Where a report goes, and how much it has.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Results {
    /// Folder for report.json and report.svg
    #[arg(long, default_value = ".")]
    pub directory: PathBuf,
    /// How much is measured.
    #[command(flatten)]
    pub form: Form,
    /// Print the report instead of a table
    #[arg(long)]
    pub json: bool,
}

impl Results {
    /// Writes the report, and prints it or its table, and the goals. An error if a figure is missing, or goals are missed; of a short form
    /// nothing is judged but that figures came out.
    pub fn end<W: Wanted>(&self, report: &impl Serialize, table: &str, goals: &[W]) -> Result<()> {
        let text = serde_json::to_string_pretty(report)? + "\n";
        fs::create_dir_all(&self.directory).with_context(|| self.directory.display().to_string())?;
        let path = self.directory.join("report.json");
        fs::write(&path, &text).with_context(|| path.display().to_string())?;
        print!("{}", if self.json { &text } else { table });
        // Not among what may be read by a program.
        eprintln!("report: {}", path.display());
        if self.form.smoke {
            return goals::check_measured(goals);
        }
        goals.iter().filter(|_| !self.json).for_each(|goal| println!("{goal}"));
        goals::check(goals)
    }
}

/// Rows as people read them, with a column for each of these fields. After a colon stand its digits, after a slash a field of it.
pub fn table(columns: &str, rows: &[impl Serialize]) -> String {
    let digits = |digits: &str| digits.parse().unwrap_or_default();
    let column = |word: &'_ str| {
        word.split_once(':').map_or((word.to_owned(), 0), |(name, after)| (name.to_owned(), digits(after)))
    };
    let columns: Vec<(String, usize)> = columns.split_whitespace().map(column).collect();
    let cell = |row: &Value, (name, digits): &(String, usize)| match row.pointer(&format!("/{name}")) {
        Some(Value::String(word)) => word.clone(),
        Some(Value::Number(number)) => format!("{:.*}", *digits, number.as_f64().unwrap_or(f64::NAN)),
        _ => "-".to_owned(),
    };
    let rows = rows.iter().map(|row| serde_json::to_value(row).unwrap_or_default());
    let mut lines = vec![columns.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()];
    lines.extend(rows.map(|row| columns.iter().map(|column| cell(&row, column)).collect()));
    let widths: Vec<usize> = (0..columns.len())
        .map(|at| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or_default())
        .collect();
    let line = |line: &Vec<String>| -> String {
        let cells = line.iter().zip(&widths).map(|(cell, &width)| format!("{cell:>width$}  "));
        cells.collect::<String>().trim_end().to_owned() + "\n"
    };
    lines.iter().map(line).collect()
}

/// Options of every judge.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Files {
    /// What the server printed
    #[arg(long)]
    raw: PathBuf,
    /// What is judged
    #[arg(long)]
    pub commit: String,
    /// Where to.
    #[command(flatten)]
    pub results: Results,
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
    /// How many cells each commit has measured.
    measured_by: &'a BTreeMap<String, usize>,
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

    /// Writes report and picture, prints the table. An error if a figure did not come out, or goals are missed.
    pub fn judge<B: Bench, T>(&self, bench: &B, Raw { again, measured_by, .. }: &Raw<T>) -> Result<()> {
        let Self { commit, results, .. } = self;
        let rows = bench.price()?;
        let goals = if results.form.smoke { Vec::new() } else { bench.goals(&rows) };
        let (source, machine, more) = (B::SOURCE, B::MACHINE, bench.more(&rows));
        let report = Report { source, commit, machine, measured_by, again, goals: &goals, rows: &rows, more };
        let picture = results.directory.join("report.svg");
        bench.draw(&rows, &picture)?;
        eprintln!("picture: {}", picture.display());
        let judged = results.end(&report, &bench.table(&rows), &goals);
        let figures = rows.iter().map(B::figure).filter(|(_, figure)| !figure.is_finite());
        let missing: Vec<String> = figures.map(|(name, _)| name).collect();
        ensure!(missing.is_empty(), "no figure came out: {}", missing.join("; "));
        judged
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ending::Missed, goals::Limit};

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

    #[test]
    fn a_table_has_each_row_with_its_digits() {
        let rows = [
            serde_json::json!({"backend": "libvirt", "vms": 500, "p99": {"ms": 1.25}}),
            serde_json::json!({"backend": "qmp", "vms": 1, "p99": null}),
        ];
        let table = table("backend vms p99/ms:1", &rows);
        assert_eq!(table, "backend  vms  p99/ms\nlibvirt  500     1.2\n    qmp    1       -\n");
    }

    #[test]
    fn a_report_has_all_and_a_run_ends_as_it_went() {
        let directory = tempfile::tempdir().expect("a folder");
        let of = |form| Results { directory: directory.path().into(), form, json: false };
        let files = |form| Files { commit: "c".into(), results: of(form), ..Files::default() };
        let raw = Raw::<f64> {
            again: vec!["a cell".to_owned()],
            measured_by: [("b".to_owned(), 1)].into(),
            ..Raw::default()
        };
        let judge = |form, cell: f64| files(form).judge(&Doubled(vec![cell]), &raw);
        judge(Form::default(), 1.0).expect("met");
        let text = fs::read_to_string(directory.path().join("report.json")).expect("the report");
        let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&report["rows"][0], &report["count"]), (&2.0.into(), &1.into()));
        assert_eq!((&report["commit"], &report["again"][0]), (&"c".into(), &"a cell".into()));
        assert_eq!(report["measured_by"]["b"], 1);
        let missed = |cell| judge(Form::default(), cell).expect_err("missed");
        assert!(missed(5.0).is::<Missed>());
        assert_eq!(missed(f64::NAN).to_string(), "no figure came out: row NaN");
        let smoke = Form { smoke: true, full: false };
        judge(smoke, 5.0).expect("a short form judges nothing");
        judge(smoke, f64::NAN).expect_err("but that figures came out");
        let goals = [Limit::at_most("a", None, 1.0)];
        of(smoke).end(&(), "", &goals).expect_err("or goals without a figure");
        of(smoke).end(&(), "", &[Limit::at_most("a", Some(2.0), 1.0)]).expect("which is not judged");
    }
}
