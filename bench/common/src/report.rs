//! What a judge reads and writes: lines of JSON that a server printed, and a report with a picture.

use anyhow::{Context, Result};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
};

/// Options of every judge.
#[derive(Clone, Debug, clap::Args)]
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
}

impl Files {
    /// All lines of what the server printed. An error names the line.
    pub fn lines<T: DeserializeOwned>(&self) -> Result<Vec<T>> {
        let path = self.raw.display();
        let file = fs::File::open(&self.raw).with_context(|| path.to_string())?;
        let of = |(number, line): (usize, std::io::Result<String>)| {
            let place = || format!("{path}:{}", number + 1);
            serde_json::from_str(&line.with_context(place)?).with_context(place)
        };
        BufReader::new(file).lines().enumerate().map(of).collect()
    }

    /// Writes the report; where it is.
    pub fn write(&self, report: &impl Serialize) -> Result<PathBuf> {
        let path = self.directory.join("report.json");
        let text = serde_json::to_string_pretty(report)? + "\n";
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// Where the picture is to be.
    pub fn picture(&self) -> PathBuf {
        self.directory.join("report.svg")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_their_numbers_and_a_report_is_written_beside_them() {
        let directory = std::env::temp_dir().join(format!("vnuma-report-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a folder");
        let raw = directory.join("raw.jsonl");
        let files = Files { raw: raw.clone(), directory: directory.clone(), commit: "c".into() };
        fs::write(&raw, "1\n2\n").expect("a file");
        assert_eq!(files.lines::<u32>().expect("numbers"), [1, 2]);
        fs::write(&raw, "1\nx\n").expect("a file");
        let error = files.lines::<u32>().expect_err("no number");
        assert!(error.to_string().ends_with("raw.jsonl:2"), "{error:#}");
        let path = files.write(&[3]).expect("a report");
        assert_eq!(fs::read_to_string(&path).expect("the report"), "[\n  3\n]\n");
        assert_eq!((path, files.picture()), (directory.join("report.json"), directory.join("report.svg")));
        fs::remove_dir_all(&directory).expect("the folder");
        let error = files.lines::<u32>().expect_err("no file");
        assert!(error.to_string().ends_with("raw.jsonl"), "{error:#}");
    }
}
