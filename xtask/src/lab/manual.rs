//! lab/README.md against `cargo xtask lab`: its commands, their options, and the defaults and ranges of these.

#[path = "../../../lab/tests/usage_check.rs"]
mod usage_check;

use super::LabCommand;
use clap::{Command, Subcommand};
use vnuma_lab_runner::DEFAULT_PROFILE;

const README: &str = include_str!("../../../lab/README.md");

fn command() -> Command {
    LabCommand::augment_subcommands(Command::new("lab"))
}

fn differences(readme: &str) -> Vec<String> {
    let mut wrong = usage_check::differences(readme, "cargo xtask lab", &command());
    if !readme.contains(&format!("Default `{DEFAULT_PROFILE}`")) {
        wrong.push(format!("the default profile is {DEFAULT_PROFILE}"));
    }
    wrong
}

#[test]
fn the_readme_has_every_command_and_option() {
    assert_eq!(differences(README), Vec::<String>::new());
}

#[test]
fn a_shell_has_the_options_that_the_readme_says() {
    let options = |name| usage_check::options(command().find_subcommand(name).expect("a command"));
    let (run, shell) = (options("run"), options("shell"));
    assert_eq!(shell.difference(&run).count(), 0);
    let lacking: Vec<String> = run
        .difference(&shell)
        .map(|option| format!("`{}`", option.split(' ').next().expect("a word")))
        .collect();
    let said = format!("The options are those of `run`, without {}.", lacking.join(" and "));
    assert!(README.contains(&said), "lab/README.md does not say: {said}");
}

#[test]
fn a_readme_that_differs_is_found() {
    for (from, to) in [
        ("`--systemd`\n", "`--init`\n"),
        ("`--get SRC:DST`\n", "`--get SRC`\n"),
        ("Default `4n8c`", "Default `2n4c`"),
        ("default 600", "default 60"),
        ("1 to 604800", "1 to 604801"),
        ("### cargo xtask lab image\n", "### cargo xtask lab build\n"),
        ("### cargo xtask lab run [OPTIONS]", "### cargo xtask lab run"),
    ] {
        assert!(README.contains(from), "{from}");
        assert!(!differences(&README.replace(from, to)).is_empty(), "{from}");
    }
}
