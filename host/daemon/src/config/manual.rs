//! The tables of keys in docs/vnumad.md against the configuration: keys, defaults and ranges.

use super::Config;
use std::{collections::BTreeSet, path::Path};

const MANUAL: &str = include_str!("../../../../docs/vnumad.md");
/// No text of a key.
const NONSENSE: &str = "nonsense";

/// A key, its default and its range, as the manual has them.
#[derive(Clone, Debug)]
struct Row {
    key: String,
    default: String,
    range: String,
}

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(Path::new("x.toml"), text).map_err(|error| error.to_string())
}

/// A file with this key only.
fn with(key: &str, value: &str) -> Result<Config, String> {
    let (section, name) = key.split_once('.').expect("a section");
    parse(&format!("[{section}]\n{name} = {value}\n"))
}

/// Texts between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Rows of a table, cell by cell.
fn rows<'a>(manual: &'a str, heading: &str) -> Vec<Vec<&'a str>> {
    let (_, text) = manual.split_once(heading).expect("the heading");
    let text = text.split("\n#").next().unwrap_or_default();
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// The table of keys. Two keys that share a row have two defaults and one range.
fn table(manual: &str) -> Vec<Row> {
    let row = |cells: Vec<&str>| -> Vec<Row> {
        let keys = quoted(cells[0]);
        let defaults: Vec<&str> =
            if keys.len() == 1 { vec![cells[1]] } else { cells[1].split(", ").collect() };
        assert_eq!(keys.len(), defaults.len(), "{cells:?}");
        let rows = keys.into_iter().zip(defaults);
        rows.map(|(key, default)| Row { key: key.into(), default: default.into(), range: cells[2].into() })
            .collect()
    };
    rows(manual, "\n## Configuration\n").into_iter().flat_map(row).collect()
}

/// The names that the refusal of an unknown one lists.
fn names(text: &str) -> Vec<String> {
    let error = parse(text).expect_err("it is unknown");
    let (_, known) = error.split_once("expected ").expect("a list");
    quoted(known).into_iter().map(str::to_owned).collect()
}

/// The keys that vnumad knows.
fn keys() -> BTreeSet<String> {
    let sections = names(&format!("[{NONSENSE}]"));
    let keys = sections.iter().flat_map(|section| {
        let names = names(&format!("[{section}]\n{NONSENSE} = 0"));
        names.into_iter().map(move |name| format!("{section}.{name}"))
    });
    keys.collect()
}

/// As TOML has it: text that is no number and no list is quoted.
fn toml(value: &str) -> String {
    if value.parse::<f64>().is_ok() || value.starts_with('[') {
        value.to_owned()
    } else {
        format!("{value:?}")
    }
}

/// What is wrong with a row.
fn wrong(row: &Row) -> Vec<String> {
    let Row { key, default, range } = row;
    let mut wrong = Vec::new();
    let default = quoted(default).first().copied().unwrap_or(default);
    // To set the list of sockets takes the default directory away, as the manual says.
    let directory = if key == "vms.sockets" { "directory = \"/run/vnuma/qmp\"\n" } else { "" };
    if default != "none" && with(key, &format!("{}\n{directory}", toml(default))) != Ok(Config::default()) {
        wrong.push(format!("{key}: {default} is not the default"));
    }
    if let Some((low, high)) = range.split_once(" to ") {
        let error = with(key, "-1").expect_err("below every range");
        if !error.ends_with(&format!("must be {range}")) {
            wrong.push(format!("{key}: {range}, but {error}"));
        }
        // Bounds of types are refused, too, if they are in the wrong order.
        let unordered = |error: &String| error.contains("than policy.bound_");
        for value in [low, high] {
            wrong.extend(with(key, value).err().filter(|error| !unordered(error)));
        }
    }
    let values: BTreeSet<&str> = quoted(range).into_iter().collect();
    if !values.is_empty() {
        let error = with(key, &toml(NONSENSE)).expect_err("no value");
        // Two values are `a` or `b`.
        let list = error.rsplit_once("one of ").or_else(|| error.rsplit_once("expected "));
        let words = list.expect("a list").1.split([',', ' ', '`']);
        let known: BTreeSet<&str> = words.filter(|word| !matches!(*word, "" | "or")).collect();
        if known != values {
            wrong.push(format!("{key}: {values:?}, but {error}"));
        }
    }
    wrong
}

/// What the manual says otherwise than the program.
fn differences(manual: &str) -> Vec<String> {
    let table = table(manual);
    let listed: BTreeSet<String> = table.iter().map(|row| row.key.clone()).collect();
    let keys = keys();
    let mut found: Vec<String> =
        keys.symmetric_difference(&listed).map(|key| format!("only one of both has {key}")).collect();
    found.extend(table.iter().filter(|row| keys.contains(&row.key)).flat_map(wrong));
    // Times in words, of keys that the other table has in milliseconds.
    for cells in rows(manual, "\n### Periodic work\n") {
        let key = quoted(cells[0])[0];
        let row = table.iter().find(|row| row.key == key);
        let ms = row.and_then(|row| row.default.parse::<f64>().ok());
        let said = cells[1].strip_suffix(" s").and_then(|seconds| seconds.parse::<f64>().ok());
        if ms.is_none() || ms != said.map(|seconds| seconds * 1000.0) {
            found.push(format!("{key}: {} and {ms:?} ms", cells[1]));
        }
    }
    found
}

#[test]
fn the_manual_has_every_key_with_its_default_and_range() {
    assert!(table(MANUAL).len() > 20);
    assert_eq!(differences(MANUAL), Vec::<String>::new());
}

#[test]
fn a_manual_that_differs_is_found() {
    for (from, to) in [
        ("| `observe.root` |", "| `observe.tree` |"),
        ("| `publish.max_per_second` | 10 ", "| `publish.max_per_second` | 11 "),
        ("| `/run/vnuma/vnumad.sock` |", "| `/run/vnumad.sock` |"),
        ("| `publish.calm_s` | 10 | 0 to 3600 |", "| `publish.calm_s` | 10 | 1 to 3600 |"),
        ("| 3, 20 |", "| 3, 21 |"),
        ("`auto`, `bpf`, `poll` |", "`auto`, `bpf` |"),
        ("`vprobe-paper`, `vprobe` |", "`vprobe` |"),
        ("| `observe.probe_interval_ms` | 20 s |", "| `observe.probe_interval_ms` | 2 s |"),
    ] {
        assert!(MANUAL.contains(from), "{from}");
        assert!(!differences(&MANUAL.replace(from, to)).is_empty(), "{from}");
    }
}

/// Keys of a file in which every one stands as a comment, with their values.
fn commented(file: &str) -> Vec<(String, &str)> {
    let mut section = "";
    let mut found = Vec::new();
    for line in file.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name;
        }
        // A sentence has a space after its `#`.
        let key = line.strip_prefix('#').filter(|line| !line.starts_with(' '));
        if let Some((name, value)) = key.and_then(|line| line.split_once(" = ")) {
            found.push((format!("{section}.{name}"), value));
        }
    }
    found
}

/// What of the packaged configuration is not as the program has it.
fn wrong_in_file(file: &str) -> Vec<String> {
    let found = commented(file);
    let listed: BTreeSet<String> = found.iter().map(|(key, _)| key.clone()).collect();
    let keys = keys();
    let mut wrong: Vec<String> =
        keys.symmetric_difference(&listed).map(|key| format!("only one of both has {key}")).collect();
    let none: BTreeSet<String> =
        table(MANUAL).into_iter().filter(|row| row.default == "none").map(|row| row.key).collect();
    for (key, value) in found.iter().filter(|(key, _)| keys.contains(key)) {
        let directory = if key == "vms.sockets" { "directory = \"/run/vnuma/qmp\"\n" } else { "" };
        match with(key, &format!("{value}\n{directory}")) {
            Ok(config) if (config == Config::default()) != none.contains(key) => {}
            Ok(_) => wrong.push(format!("{key}: {value} is not what the manual says")),
            Err(error) => wrong.push(error),
        }
    }
    if parse(file) != Ok(Config::default()) {
        wrong.push("as it is, it changes something".to_owned());
    }
    wrong
}

#[test]
fn the_packaged_configuration_has_every_key_with_its_default() {
    let file = include_str!("../../../../packaging/vnumad.toml");
    assert_eq!(wrong_in_file(file), Vec::<String>::new());
    for (from, to) in [
        ("#period_ms = 1000", "#period_ms = 2000"),
        ("#period_ms = 1000\n", ""),
        ("#dwell_ms", "#dwel_ms"),
        ("#listen = \"127.0.0.1:9743\"", "#listen = \"9743\""),
        ("#calm_s = 10", "calm_s = 11"),
    ] {
        assert!(file.contains(from), "{from}");
        assert!(!wrong_in_file(&file.replacen(from, to, 1)).is_empty(), "{from}");
    }
}
