//! docs/vnuma-guest.md against the program: commands, options, keys with their defaults and ranges, and the unit.

use std::{collections::BTreeSet, fs, os::unix::process::CommandExt, path::Path, process::Command};
use vnuma_guest::{journal::Journal, rules::Rules};
use vnuma_test_kit::errors;

const MANUAL: &str = include_str!("../../../docs/vnuma-guest.md");
const UNIT: &str = include_str!("../systemd/vnuma-guest.service");

fn parse(text: &str) -> Result<Rules, String> {
    Rules::parse(Path::new("x.toml"), text).map_err(|error| error.to_string())
}

/// Texts between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

fn section<'a>(manual: &'a str, heading: &str) -> &'a str {
    let (_, rest) = manual.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no {heading}"));
    rest.split("\n#").next().unwrap_or_default()
}

/// What the manual says of keys otherwise than the program.
fn differences(manual: &str) -> Vec<String> {
    let rows = section(manual, "## Rules").lines().filter(|line| line.starts_with("| `"));
    let rows: Vec<Vec<&str>> =
        rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect();
    let error = parse("nonsense = 1").expect_err("unknown");
    let known: BTreeSet<&str> = quoted(error.split_once("expected").expect("a list").1).into_iter().collect();
    let mut listed: BTreeSet<&str> = rows.iter().flat_map(|row| quoted(row[0])).collect();
    listed.insert("workload");
    let mut found: Vec<String> =
        known.symmetric_difference(&listed).map(|key| format!("only one of both has {key}")).collect();
    for row in rows {
        let (key, default) = (quoted(row[0])[0], quoted(row[1]).first().copied().unwrap_or(row[1]));
        if let Some((low, high)) = row[2].split_once(" to ") {
            if parse(&format!("{key} = {default}")) != Ok(Rules::default()) {
                found.push(format!("{key}: {default} is not the default"));
            }
            let error = parse(&format!("{key} = -1")).err().unwrap_or_default();
            if !error.ends_with(&format!("must be {}", row[2])) {
                found.push(format!("{key}: {}: {error}", row[2]));
            }
            found.extend([low, high].iter().filter_map(|value| parse(&format!("{key} = {value}")).err()));
        } else if !quoted(row[1]).is_empty() {
            if parse(&format!("{key} = {default:?}")) != Ok(Rules::default()) {
                found.push(format!("{key}: {default} is not the default"));
            }
            let error = parse(&format!("{key} = \"nonsense\"")).expect_err("no value");
            let values: BTreeSet<&str> =
                quoted(error.split_once("expected").expect("a list").1).into_iter().collect();
            if values != quoted(row[2]).into_iter().collect() {
                found.push(format!("{key}: {}: {error}", row[2]));
            }
        }
    }
    found
}

#[test]
fn the_manual_has_every_key_with_its_default_and_range() {
    assert_eq!(differences(MANUAL), Vec::<String>::new());
    for (from, to) in [
        ("| `rest_s` | 60 |", "| `rest_s` | 61 |"),
        ("| `rest_s` |", "| `rests_s` |"),
        ("| 2 to 1000 |", "| 1 to 1000 |"),
        ("`move`, `bind`, `leave` |", "`move`, `bind` |"),
        ("| `used` | `used`,", "| `all` | `used`,"),
    ] {
        assert!(MANUAL.contains(from), "{from}");
        assert!(!differences(&MANUAL.replace(from, to)).is_empty(), "a manual that differs is found: {from}");
    }
}

#[test]
fn the_manual_shows_rules_that_are_understood() {
    let example: String = section(MANUAL, "## Rules")
        .lines()
        .filter(|line| line.starts_with("    ") || line.is_empty())
        .map(|line| format!("{}\n", line.trim()))
        .collect();
    assert_eq!(parse(&example).map(|rules| rules.workloads.len()), Ok(2), "{example}");
}

#[test]
fn the_manual_has_every_command_and_option() {
    let help = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_vnuma-guest")).args(arguments).output().expect("runs");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let options = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| c.is_whitespace() || "[]`,".contains(c));
        words.filter(|word| word.starts_with("--") && word.len() > 2).map(str::to_owned).collect()
    };
    let overview = help(&["--help"]);
    let (_, commands) = overview.split_once("\nCommands:\n").expect("clap's list of commands");
    let names: Vec<&str> = commands
        .lines()
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert_eq!(names, ["run", "list", "undo", "check-rules"]);
    for name in names {
        let help = help(&[name, "--help"]);
        let (_, list) = help.split_once("\nOptions:\n").expect("clap's list of options");
        let mut offered: Vec<&str> = list.lines().filter(|line| line.trim_start().starts_with('-')).collect();
        offered.retain(|line| !line.contains("--help") && !line.contains("--version"));
        let terms: Vec<&str> = section(MANUAL, &format!("### vnuma-guest {name}"))
            .lines()
            .filter(|line| line.starts_with("`--"))
            .collect();
        assert_eq!(options(&terms.join("\n")), options(&offered.join("\n")), "{name}");
        let synopsis =
            section(MANUAL, "## Synopsis").lines().find(|line| line.contains(&format!("vnuma-guest {name}")));
        assert_eq!(options(synopsis.unwrap_or_default()), options(&offered.join("\n")), "{name}");
    }
}

/// Whatever ends the program, systemd runs this afterwards.
#[test]
fn the_unit_undoes_what_is_left() {
    for line in
        ["ExecStart=/usr/bin/vnuma-guest run", "ExecStopPost=/usr/bin/vnuma-guest undo", "KillMode=mixed"]
    {
        assert!(UNIT.lines().any(|found| found == line), "{line}");
    }
}

/// What the program says when it fails.
fn error(command: &mut Command) -> String {
    let output = command.output().expect("runs");
    let error = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{error}");
    let last = error.lines().rev().find_map(|line| line.strip_prefix("vnuma-guest: "));
    last.unwrap_or_else(|| panic!("no error: {error}")).to_owned()
}

#[test]
fn the_manual_names_errors_by_their_text() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnuma-guest"));
        command.args(arguments).arg("--root").arg(path).arg("--journal").arg(path);
        command
    };
    let mut made = Vec::new();
    for text in ["intervall_s = 1", "interval_s = 0"] {
        fs::write(path.join("rules.toml"), text).expect("written");
        made.push(error(run(&["check-rules"]).arg(path.join("rules.toml"))));
    }
    let mut as_nobody = run(&["run"]);
    if nix::unistd::geteuid().is_root() {
        // Others may not even start what is below root's home.
        let program = Path::new("/proc/self/fd/0");
        let file = fs::File::open(env!("CARGO_BIN_EXE_vnuma-guest")).expect("the program");
        as_nobody = Command::new(program);
        as_nobody.arg("run").stdin(file).uid(65534).gid(65534);
    }
    made.push(error(&mut as_nobody));
    let journal = Journal::take(path, path).expect("taken");
    made.push(Journal::take(path, path).expect_err("taken").to_string());
    drop(journal);
    // A unit, and no systemd to be asked.
    let cpus = r#"{"former":"0-7","set":"4-7"}"#;
    let unit = format!(
        r#"{{"unit":{{"pid":1,"started":1,"unit":"a.service","path":"/a.service","cpus":{cpus},"mems":null,"drop_ins":[]}}}}"#
    );
    let text = format!(r#"{{"version":1,"boot":"","changes":[{unit}]}}"#);
    fs::write(path.join("journal.json"), &text).expect("written");
    made.push(error(&mut run(&["undo"])));
    assert_eq!(fs::read_to_string(path.join("journal.json")).expect("it stays"), text);
    errors::compare(MANUAL, &made);
}
