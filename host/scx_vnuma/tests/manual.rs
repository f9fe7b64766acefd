//! docs/scx_vnuma.md against the program: its options, and the errors that it makes without a scheduler.

use std::process::Command;

const MANUAL: &str = include_str!("../../../docs/scx_vnuma.md");

fn run(arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_scx_vnuma")).args(arguments).output().expect("it starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.success(), text(output.stdout), text(output.stderr))
}

/// Options of a text, each once.
fn options(text: &str) -> Vec<String> {
    let words = text.split(|c: char| c.is_whitespace() || "[]`,()".contains(c));
    let mut options: Vec<String> = words.filter(|word| word.starts_with("--")).map(str::to_owned).collect();
    options.sort_unstable();
    options.dedup();
    options
}

fn section(heading: &str) -> &'static str {
    let (_, rest) = MANUAL.split_once(&format!("\n## {heading}\n")).expect("the heading");
    rest.split("\n## ").next().unwrap_or_default()
}

#[test]
fn the_manual_has_every_option() {
    let (_, help, _) = run(&["--help"]);
    let (_, list) = help.split_once("\nOptions:\n").expect("clap's list of options");
    let offered: Vec<_> = list.lines().filter(|line| line.trim_start().starts_with('-')).collect();
    let offered = options(&offered.join("\n"));
    let terms: Vec<_> = section("Options").lines().filter(|line| line.starts_with('`')).collect();
    assert_eq!(options(&terms.join("\n")), offered);
    let mut synopsis = options(section("Synopsis"));
    synopsis.extend(["--help".to_owned(), "--version".to_owned()]);
    synopsis.sort_unstable();
    assert_eq!(synopsis, offered);
}

#[test]
fn values_out_of_range_are_refused() {
    for wrong in ["--keep-s=0", "--starve-ms=10001", "--slice-us=99"] {
        let (done, _, error) = run(&[wrong]);
        let (option, value) = wrong.split_once('=').expect("a value");
        assert!(!done && error.contains(option) && error.contains(value), "{error}");
    }
}

#[test]
fn without_a_scheduler_there_is_no_status() {
    let (done, _, error) = run(&["--status"]);
    if done {
        println!("a scx_vnuma is loaded on this machine");
        return;
    }
    let known =
        ["this kernel has no sched_ext", "no sched_ext scheduler is loaded", "another sched_ext", "/sys/"];
    assert!(known.iter().any(|known| error.contains(known)), "{error}");
}
