//! docs/dsm-run.md against the program: its options with their values and defaults, and its programs.

use crate::options::Arguments;
use crate::programs::{Block, Program};
use clap::{Arg, CommandFactory, Parser, ValueEnum};
use std::collections::BTreeSet;

const MANUAL: &str = include_str!("../../../docs/dsm-run.md");

fn section<'a>(manual: &'a str, heading: &str) -> &'a str {
    let (_, rest) = manual.split_once(&format!("\n## {heading}\n")).expect("the heading");
    rest.split("\n## ").next().unwrap_or_default()
}

/// Texts between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Terms of the list of options, and what is said of them.
fn described(manual: &str) -> Vec<(&str, &str)> {
    let items = section(manual, "Options").split("\n\n").map(str::trim);
    items.filter(|item| item.starts_with('`')).filter_map(|item| item.split_once("\n: ")).collect()
}

fn names(argument: &Arg) -> Vec<String> {
    let values = argument.get_possible_values().into_iter().filter(|_| argument.get_action().takes_values());
    values.map(|value| value.get_name().to_owned()).collect()
}

/// An option as the manual writes it. Of one that may be given several times the manual lists the values in its text.
fn term(argument: &Arg) -> String {
    let long = format!("--{}", argument.get_long().expect("an option"));
    let values = names(argument);
    let repeated = matches!(argument.get_action(), clap::ArgAction::Append);
    match argument.get_value_names() {
        _ if !argument.get_action().takes_values() => long,
        _ if !(values.is_empty() || repeated) => format!("{long} {}", values.join("|")),
        name => format!("{long} {}", name.expect("a name of its value")[0]),
    }
}

/// The default that the program documents to clap.
fn default(argument: &Arg) -> Option<&str> {
    let value = argument.get_default_values().first().and_then(|value| value.to_str());
    value.filter(|_| argument.get_action().takes_values())
}

/// The range of a number, by the program's refusal of 0.
fn range(term: &str) -> Option<String> {
    let option = format!("{}=0", term.split(' ').next().unwrap_or_default());
    let error = Arguments::try_parse_from(["dsm-run", &option, "pi"]).err()?.to_string();
    let words = error.split_whitespace().find(|word| word.contains("..="))?;
    Some(words.replace("..=", " to "))
}

fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("a name").get_name().to_owned()
}

/// What the manual says of options otherwise than the program.
fn differences(manual: &str) -> Vec<String> {
    let mut command = Arguments::command();
    command.build();
    let described = described(manual);
    let terms: BTreeSet<String> =
        described.iter().flat_map(|(terms, _)| quoted(terms)).map(str::to_owned).collect();
    let options: Vec<&Arg> = command
        .get_arguments()
        .filter(|argument| argument.get_long().is_some() && !argument.is_hide_set())
        .collect();
    let offered: BTreeSet<String> = options.iter().map(|argument| term(argument)).collect();
    let mut wrong: Vec<String> =
        offered.symmetric_difference(&terms).map(|term| format!("only one of both has {term}")).collect();
    for argument in options {
        let term = term(argument);
        let Some((_, text)) = described.iter().find(|(terms, _)| quoted(terms).any(|found| found == term))
        else {
            continue;
        };
        let words: BTreeSet<&str> = quoted(text).collect();
        let says = |default: &str| {
            [format!("Default: `{default}`"), format!("Default: {default}.")]
                .iter()
                .any(|said| text.contains(said))
        };
        if let Some(default) = default(argument).filter(|default| !says(default)) {
            wrong.push(format!("{term}: the default is {default}"));
        }
        if let Some(range) = range(&term).filter(|range| !text.contains(range.as_str())) {
            wrong.push(format!("{term}: the range is {range}"));
        }
        for name in
            names(argument).iter().filter(|name| !term.contains(*name) && !words.contains(name.as_str()))
        {
            wrong.push(format!("{term}: there is no {name}"));
        }
    }
    let hosts = ["dsm-run", "--hosts", "192.0.2.1,192.0.2.2", "--host", "0", "pi"];
    let transports =
        [&["dsm-run", "pi"][..], &hosts].map(|line| name(Arguments::parse_from(line).transport()));
    let [alone, among] = transports;
    if !section(manual, "Options").contains(&format!("Default: `{alone}`; with `--hosts` `{among}`.")) {
        wrong.push(format!("--transport: the default is {alone}, with --hosts {among}"));
    }
    let guest = Arguments::parse_from(["dsm-run", "guest"]).task().expect("a task");
    if !section(manual, "Options").contains(&format!("Default: {} vCPUs.", guest.vcpus)) {
        wrong.push(format!("--vcpus: the default is {}", guest.vcpus));
    }
    let memory = Arguments::parse_from(["dsm-run", "memory"]).task().expect("a task");
    let defaults = [name(memory.block), name(memory.scope), name(memory.access)];
    let defaults = defaults.map(|name| format!("`{name}`")).join(", ");
    if !section(manual, "Options").contains(&format!("Default: {defaults}.")) {
        wrong.push(format!("--block, --scope, --access: the defaults are {defaults}"));
    }
    wrong
}

/// Names of the programs and their default sizes, as the table has them.
fn programs_of(manual: &str) -> Vec<(String, String)> {
    let rows = section(manual, "Programs").lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>());
    cells.map(|cells| (cells[0].trim_matches('`').to_owned(), cells[3].to_owned())).collect()
}

#[test]
fn the_manual_has_every_option_with_its_values_and_default() {
    assert_eq!(differences(MANUAL), Vec::<String>::new());
}

#[test]
fn the_manual_has_every_program_with_its_default() {
    let program = |program: &Program| {
        let [page, large] = [Block::Page, Block::Large].map(|block| program.default_size(block));
        let large = if page == large { String::new() } else { format!("; {large} with `--block 4MiB`") };
        (name(*program), format!("{page}{large}"))
    };
    let programs: Vec<_> = Program::value_variants().iter().map(program).collect();
    assert_eq!(programs_of(MANUAL), programs);
}

#[test]
fn a_manual_that_differs_is_found() {
    for (from, to) in [
        ("`--stats`\n", "`--statistics`\n"),
        ("shm|tcp|tcp-tls|rdma", "shm|tcp"),
        ("Default: `shm`", "Default: `tcp`"),
        ("with `--hosts` `tcp-tls`", "with `--hosts` `tcp`"),
        ("Default: 2.", "Default: 3."),
        ("1 to 16", "1 to 32"),
        ("Default: 2 vCPUs.", "Default: 3 vCPUs."),
        ("`hold`, ", ""),
        ("`local`, `write`", "`global`, `write`"),
    ] {
        assert!(MANUAL.contains(from), "{from}");
        assert!(!differences(&MANUAL.replace(from, to)).is_empty(), "{from}");
    }
}
