// Commands of programs and what lab/README.md says of them, for the tests that compare the two.

use clap::{Arg, Command};
use std::collections::BTreeSet;

/// An option or argument as the README writes it.
fn word(argument: &Arg) -> String {
    let value = argument.get_value_names().map(|names| names[0].to_string());
    let value = value.filter(|_| argument.get_action().takes_values()).unwrap_or_default();
    match argument.get_long() {
        Some(long) => format!("--{long} {value}").trim_end().to_owned(),
        None if argument.is_last_set() => format!("-- {value} [ARGUMENT]..."),
        None => value,
    }
}

fn own(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|argument| argument.get_id() != "help" && !argument.is_hide_set())
}

/// Its options, as the README writes them.
pub fn options(command: &Command) -> BTreeSet<String> {
    own(command).filter(|argument| argument.get_long().is_some()).map(word).collect()
}

/// How it is called, with each of its options.
fn usage(name: &str, command: &Command) -> String {
    let optional = |argument: &Arg| {
        if argument.is_required_set() { word(argument) } else { format!("[{}]", word(argument)) }
    };
    std::iter::once(name.to_owned()).chain(own(command).map(optional)).collect::<Vec<_>>().join(" ")
}

/// The same with `[OPTIONS]` in place of them, after the arguments but before a command.
fn short_usage(name: &str, command: &Command) -> String {
    let arguments = |last| {
        let arguments = own(command).filter(move |argument| argument.get_long().is_none());
        arguments.filter(move |argument| argument.is_last_set() == last).map(word)
    };
    let words = std::iter::once(name.to_owned()).chain(arguments(false));
    words.chain(["[OPTIONS]".to_owned()]).chain(arguments(true)).collect::<Vec<_>>().join(" ")
}

/// The commands that it has, with their names in full.
fn leaves(name: &str, command: &Command) -> Vec<(String, Command)> {
    let found = command.get_subcommands().filter(|found| found.get_name() != "help");
    let found: Vec<_> =
        found.flat_map(|found| leaves(&format!("{name} {}", found.get_name()), found)).collect();
    if found.is_empty() { vec![(name.to_owned(), command.clone())] } else { found }
}

/// Terms of the lists of a text, and what is said of each.
fn terms(text: &str) -> impl Iterator<Item = (Vec<&str>, &str)> {
    let items = text.split("\n\n").map(str::trim).filter(|item| item.starts_with('`'));
    let items = items.filter_map(|item| item.split_once("\n: "));
    items.map(|(terms, said)| (terms.split('`').skip(1).step_by(2).collect(), said))
}

/// What an option's text lacks: its default, or its range, by what the program says when it is 0.
fn unsaid(command: &Command, argument: &Arg, said: &str) -> Vec<String> {
    let default = argument.get_default_values().first().and_then(|value| value.to_str());
    let default = default.filter(|_| argument.get_action().takes_values());
    let says = |default: &str| {
        ["Default", "default"].iter().any(|word| {
            said.contains(&format!("{word} `{default}`.")) || said.contains(&format!("{word} {default}."))
        })
    };
    let default = default.filter(|default| !says(default)).map(|default| format!("default {default}"));
    let zero = format!("--{}=0", argument.get_long().unwrap_or_default());
    let error = command.clone().try_get_matches_from(["it", &zero]).err().map(|error| error.to_string());
    let range = error.iter().flat_map(|error| error.split_whitespace()).find(|word| word.contains("..="));
    let range = range.map(|range| range.replace("..=", " to ")).filter(|range| !said.contains(range));
    default.into_iter().chain(range).collect()
}

/// What the README says otherwise than the program `name`.
pub fn differences(readme: &str, name: &str, program: &Command) -> Vec<String> {
    let mut program = program.clone();
    program.build();
    let leaves = leaves(name, &program);
    let listed: BTreeSet<&str> = terms(readme)
        .flat_map(|(terms, _)| terms)
        .filter(|term| term.starts_with(&format!("{name} ")))
        .collect();
    let mut wrong = Vec::new();
    let mut known = BTreeSet::new();
    for (name, command) in &leaves {
        let (full, short) = (usage(name, command), short_usage(name, command));
        let heading = format!("\n### {short}\n");
        if let Some((_, section)) = readme.split_once(&heading) {
            let section = section.split("\n### ").next().unwrap_or_default();
            wrong.extend(section_differs(name, section, command));
        } else if !listed.contains(full.as_str()) && !readme.contains(&format!("\n### {full}\n")) {
            wrong.push(format!("lab/README.md has neither `{full}` nor a section `{short}`"));
        }
        known.insert(full);
    }
    let invented = listed.into_iter().filter(|term| !known.contains(*term));
    wrong.extend(invented.map(|term| format!("there is no `{term}`")));
    wrong
}

/// What a section says otherwise than its command.
fn section_differs(name: &str, section: &str, command: &Command) -> Vec<String> {
    let listed: BTreeSet<String> = terms(section).flat_map(|(terms, _)| terms).map(str::to_owned).collect();
    let offered = options(command);
    if listed.is_empty() && section.contains("The options are those of") {
        return Vec::new();
    }
    let only = offered.symmetric_difference(&listed);
    let mut wrong: Vec<String> =
        only.map(|option| format!("{name}: only one of both has {option}")).collect();
    for argument in own(command).filter(|argument| argument.get_long().is_some()) {
        let word = word(argument);
        let Some((_, said)) = terms(section).find(|(terms, _)| terms.contains(&word.as_str())) else {
            continue;
        };
        let unsaid = unsaid(command, argument, said).into_iter();
        wrong.extend(unsaid.map(|what| format!("{name} {word}: its text lacks {what}")));
    }
    wrong
}
