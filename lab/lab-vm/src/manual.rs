//! lab/README.md against the program: its commands, their options, and the defaults of these.

#[path = "../../tests/usage_check.rs"]
mod usage_check;

use crate::Command;
use clap::CommandFactory;

const README: &str = include_str!("../../README.md");

fn differences(readme: &str) -> Vec<String> {
    usage_check::differences(readme, "lab-vm", &Command::command())
}

#[test]
fn the_readme_has_every_command_and_option() {
    assert_eq!(differences(README), Vec::<String>::new());
}

#[test]
fn a_readme_that_differs_is_found() {
    for (from, to) in [
        ("`--unbound`\n", "`--free`\n"),
        ("`--vcpus N`\n", "`--vcpus`\n"),
        ("`6.12`.", "`6.1`."),
        ("### lab-vm start NAME [OPTIONS]", "### lab-vm start [OPTIONS]"),
        ("### lab-vm exec NAME --", "### lab-vm exec"),
        ("`lab-vm reset NAME`\n", "`lab-vm restart NAME`\n"),
        ("`lab-vm put NAME SRC DST`", "`lab-vm put NAME`"),
        (" NODE [--offline]`", " NODE`"),
    ] {
        assert!(README.contains(from), "{from}");
        assert!(!differences(&README.replace(from, to)).is_empty(), "{from}");
    }
}
