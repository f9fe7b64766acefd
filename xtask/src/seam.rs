//! Pure crates and the daemon's core know what hypervisors can do. They know neither which there are, nor by which commands they are
//! asked. Pure crates do not know what operators call either. The world, which is what is known, knows no rule.

use crate::steps::workspace;
use std::{fs, path::Path};

/// Names of hypervisors and of what manages them.
const NAMES: [&str; 4] = ["qemu", "libvirt", "qmp", "virsh"];
/// What operators call.
const COMMANDS: [&str; 3] = ["vnumactl", "migrate-recover", "--"];
/// Commands of hypervisors, or how they begin, and states in the words of one of them.
const ASKED: [&str; 8] = [
    "\"migrate\"",
    "migrate-",
    "device_add",
    "device_del",
    "query-",
    "chardev",
    "inmigrate",
    "finish-migrate",
];
/// Rules that follow from settings, and policies: what is known is free of them.
const RULES: [&str; 2] = ["settings", "policies"];
/// Folders of pure code, and what they do not name.
const PURE: [(&str, &[&str]); 6] = [
    ("pure", &NAMES),
    ("pure", &COMMANDS),
    ("pure", &ASKED),
    ("host/daemon/src/core", &NAMES),
    ("host/daemon/src/core", &ASKED),
    ("pure/policy/src/world", &RULES),
];
/// A placement is printed as arguments of QEMU and as XML of libvirt: these texts are what it is for.
const PRINTS: &str = "pure/placement/src/print";

/// Code without comments and without the tests that end a file.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default().lines();
    // `://` is part of a URL in a string.
    let comment =
        |line: &str| line.match_indices("//").map(|(at, _)| at).find(|at| !line[..*at].ends_with(':'));
    code.enumerate().map(move |(at, line)| (at + 1, comment(line).map_or(line, |end| &line[..end])))
}

fn names_in(folder: &Path, names: &[&str], found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let shown = path.strip_prefix(workspace()).expect("inside").display().to_string();
        let is_test = path.file_name().is_some_and(|name| {
            let name = name.to_string_lossy();
            ["tests", "benches", "target"].contains(&name.as_ref()) || name.ends_with("tests.rs")
        });
        if is_test || shown == PRINTS {
            continue;
        }
        if path.is_dir() {
            names_in(&path, names, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("text");
            let named = |line: &str| names.iter().any(|name| line.to_lowercase().contains(name));
            let lines = code(&text).filter(|(_, line)| named(line));
            found.extend(lines.map(|(number, line)| format!("{shown}:{number}: {}", line.trim())));
        }
    }
}

#[test]
fn pure_code_names_no_hypervisor_no_command_and_the_world_no_rule() {
    let mut found = Vec::new();
    PURE.iter().for_each(|(folder, names)| names_in(&workspace().join(folder), names, &mut found));
    assert!(
        found.is_empty(),
        "abilities say what a hypervisor can do, the core what operators call, rules/ what settings allow: {found:#?}"
    );
}

#[test]
fn comments_and_tests_are_no_code() {
    let text = "a // qemu\nb(\"qemu://x\"); // c\n/// d\n#[cfg(test)]\nmod tests { qemu }\n";
    let lines: Vec<_> = code(text).map(|(_, line)| line.trim()).collect();
    assert_eq!(lines, ["a", "b(\"qemu://x\");", ""]);
}
