//! What a benchmark ends with when it measures nothing, and how it goes on with what was measured before.

use serde_json::{Value, json};
use std::{path::Path, process::Command};

fn status(arguments: &[&str]) -> Option<i32> {
    let output = Command::new(env!("CARGO_BIN_EXE_bench-fleet")).args(arguments).output().expect("started");
    output.status.code()
}

#[test]
fn wrong_arguments_end_with_1_and_help_with_0() {
    assert_eq!(status(&["--nonsense"]), Some(1));
    assert_eq!(status(&["--starts", "0"]), Some(1));
    assert_eq!(status(&["--help"]), Some(0));
}

/// How many rows a run has, and who measured them.
fn run(directory: &Path, arguments: &[&str]) -> (usize, Value) {
    let folder = directory.to_string_lossy();
    let store = format!("{folder}/cells.jsonl");
    let common = ["--smoke", "--directory", &*folder, "--store", &*store];
    assert_eq!(status(&[&common, arguments].concat()), Some(0), "{arguments:?}");
    let text = std::fs::read_to_string(directory.join("report.json")).expect("a report");
    let mut report: Value = serde_json::from_str(&text).expect("JSON");
    (report["rows"].as_array().map_or(0, Vec::len), report["measured_by"].take())
}

#[test]
fn a_run_that_was_cut_off_goes_on_with_its_configuration_only() {
    let directory = tempfile::tempdir().expect("a folder");
    let run = |arguments: &[&str]| run(directory.path(), arguments);
    assert_eq!(run(&["--commit", "one", "--cells", "3"]), (3, json!({"one": 3})));
    assert_eq!(run(&["--commit", "two"]), (12, json!({"one": 3, "two": 9})));
    assert_eq!(run(&["--commit", "three"]), (12, json!({"one": 3, "two": 9})));
    let other = ["--commit", "three", "--configuration-hash", "other"];
    assert_eq!(run(&other), (12, json!({"three": 12})));
}
