//! Only what carries out plans has something done to a VM. Three things have no step, and this test lets them be:
//!
//! - When vnumad stops, no plan follows. The shell gives back pins (`policy_pins.rs`), and the thread that sets affinities gives back
//!   masks and places as it ends (`affinities.rs`).
//! - When a connection opens, the VM's worker has `tidy_channel` remove what an attach that was cut short has left (`vm_worker.rs`).
//!   The core learns of the VM only afterwards, and asks for no attach before that.
//! - `Command::LookForScheduler` finds that scx_vnuma was loaded or has ended: the places that steps have set stay, by the other
//!   means. `Command::ForgetMask` drops the place of a thread whose mask others have set.

use std::{fs, path::Path};

/// These change no VM, none of its threads, no memory of it, and nothing that its guest knows. All others act.
const PASSIVE: [&str; 20] = [
    "Ask::LookAtMigration",
    // What is asked acts, or does not.
    "Command::Ask",
    "Command::Describe",
    "Command::Probe",
    "Command::Connect",
    "Command::Disconnect",
    "Command::CloseChannel",
    "Command::ForgetRecord",
    "Command::Watch",
    "Command::Unwatch",
    "Command::Defer",
    "Command::Look",
    "Command::Count",
    "Command::LookForScheduler",
    "Command::ForgetMask",
    "Command::WatchProcess",
    "Command::UnwatchProcess",
    "Command::Reply",
    "Command::Announce",
    "Command::Log",
];

/// Commands that act, and what acts that is asked of hypervisors.
fn acting(events: &str) -> Vec<String> {
    let mut all = Vec::new();
    for kind in ["Ask", "Command"] {
        let body = events.split_once(&format!("pub enum {kind} {{")).expect("an enum").1;
        let body = body.split_once("\n}\n").expect("it ends").0;
        let variants = body.lines().filter_map(|line| line.strip_prefix("    "));
        let variants = variants.filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()));
        let name = |line: &str| line.chars().take_while(char::is_ascii_alphanumeric).collect::<String>();
        all.extend(variants.map(|line| format!("{kind}::{}", name(line))));
    }
    let unknown = PASSIVE.iter().find(|name| !all.iter().any(|known| known == *name));
    assert_eq!(unknown, None, "it has another name now");
    all.retain(|name| !PASSIVE.contains(&name.as_str()));
    all
}

/// Lines of a source, without comments and its tests, that name one of these.
fn naming<'a>(source: &'a str, names: &[String]) -> Vec<&'a str> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let whole = |line: &str, name: &str| {
        let mut rests = line.match_indices(name).map(|(at, _)| &line[at + name.len()..]);
        rests.any(|rest| !rest.starts_with(|next: char| next.is_ascii_alphanumeric() || next == '_'))
    };
    lines.filter(|line| names.iter().any(|name| whole(line, name))).collect()
}

/// What sets affinities and places of threads, and the files that do so when they carry out a command.
const SETTERS: [&str; 4] = ["pin_thread", "pin_thread_if", "places.place", "places.release"];
const SETTING: [&str; 3] = ["affinities.rs", "mask_records.rs", "others.rs"];

#[test]
fn only_the_files_that_carry_out_commands_set_affinities_and_places() {
    let (mut folders, mut setting) = (vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")], Vec::new());
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if !naming(&fs::read_to_string(&path).expect("a source"), &SETTERS.map(str::to_owned))
                .is_empty()
            {
                setting.push(path.file_name().expect("a name").to_string_lossy().into_owned());
            }
        }
    }
    setting.sort_unstable();
    assert_eq!(setting, SETTING);
}

/// What the shell calls to carry out a command that acts.
const ACTS: [&str; 11] = [
    "order(connection, Job::Ask(",
    "self.publish(",
    "self.make(",
    "self.restore(task",
    "self.settle_pins(",
    "Order::Confine",
    "Order::Follow",
    "Order::Rank",
    "observer.order(",
    "hotness.watch(",
    "page_mover.order(",
];

#[test]
fn the_shell_acts_only_where_it_carries_out_commands() {
    let shell = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/shell");
    let mut carried_out = Vec::new();
    for path in fs::read_dir(&shell).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        let Ok(source) = fs::read_to_string(&path) else { continue };
        let carries = source.split_once("fn carry_out(").and_then(|(_, rest)| rest.split_once("\n    }\n"));
        let carries = carries.map_or("", |(body, _)| body);
        let code = source.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        // Who gets an order takes it apart.
        for line in lines.filter(|line| !line.contains("} =>")) {
            for act in ACTS.iter().filter(|act| line.contains(**act)) {
                assert!(carries.contains(line), "{}: {line}", path.display());
                carried_out.push(*act);
            }
        }
        for act in ACTS.iter().filter(|act| carries.contains(**act)) {
            carried_out.push(act);
        }
    }
    let missing: Vec<_> = ACTS.iter().filter(|act| !carried_out.contains(act)).collect();
    assert!(missing.is_empty(), "these are called by other names now: {missing:?}");
}

#[test]
fn no_file_but_the_one_that_carries_out_plans_issues_an_acting_command() {
    let core = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/core");
    let names = acting(&fs::read_to_string(core.join("event.rs")).expect("events"));
    assert!(names.len() >= 20, "{names:?}");
    let (mut folders, mut seen) = (vec![core], 0);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let source = fs::read_to_string(&path).expect("a source");
            assert!(!source.contains("Command::*") && !source.contains("Ask::*"), "{}", path.display());
            let acting = naming(&source, &names);
            match path.file_name().and_then(|name| name.to_str()) {
                Some("act.rs") => seen += acting.len(),
                _ => assert!(acting.is_empty(), "{}: {acting:#?}", path.display()),
            }
        }
    }
    assert!(seen >= names.len(), "each is a step's: {seen}");
}
