//! The lists of a README against the folder that it stands in: files, parts, kinds of threads.

use super::{links, read, resolve, tracked};
use crate::counts::source::File;
use std::collections::BTreeSet;

/// What stands in each crate, or says nothing of it.
const NOT_LISTED: [&str; 10] = [
    "Cargo.toml",
    "Kbuild",
    "Makefile",
    "README.md",
    "lib.rs",
    "main.rs",
    "mod.rs",
    "tests",
    "benches",
    "test",
];

/// The first heading of each table, and the first cells of its rows.
fn tables(text: &str) -> Vec<(String, Vec<String>)> {
    let mut tables: Vec<(String, Vec<String>)> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        let Some(row) = line.strip_prefix('|') else {
            inside = false;
            continue;
        };
        let cell = row.split('|').next().unwrap_or_default().trim().to_owned();
        match tables.last_mut().filter(|_| inside) {
            Some((_, cells)) => cells.push(cell),
            None => tables.push((cell, Vec::new())),
        }
        inside = true;
    }
    tables
}

/// What stands between backquotes and is no link.
fn names(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// Files and folders that a cell names, from the root of the tree.
fn paths(readme: &str, cell: &str) -> BTreeSet<String> {
    let linked: Vec<String> = links(cell).into_iter().map(|(_, target)| target).collect();
    let named = names(cell).into_iter().map(str::to_owned).filter(|_| linked.is_empty());
    linked.iter().cloned().chain(named).filter_map(|path| resolve(readme, &path)).collect()
}

/// Entries of the folders of what a table lists that it lacks, and paths in it that are not there.
fn files_wrong(readme: &str, cells: &[String], files: &BTreeSet<String>) -> Vec<String> {
    let listed: BTreeSet<String> = cells.iter().flat_map(|cell| paths(readme, cell)).collect();
    let inside =
        |folder: &str, path: &String| path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
    let is_there = |path: &String| files.contains(path) || files.iter().any(|file| inside(path, file));
    let mut wrong: Vec<String> = listed
        .iter()
        .filter(|path| !is_there(path))
        .map(|path| format!("{readme} lists {path}, which is not there"))
        .collect();
    // What is elsewhere is another list's.
    let own = readme.trim_end_matches("README.md");
    let folders: BTreeSet<&str> = listed.iter().filter_map(|path| Some(path.rsplit_once('/')?.0)).collect();
    let folders = folders.into_iter().filter(|folder| format!("{folder}/").starts_with(own));
    for folder in folders {
        let entries: BTreeSet<&str> = files
            .iter()
            .filter(|file| inside(folder, file))
            .filter_map(|file| file[folder.len() + 1..].split('/').next())
            .collect();
        for entry in entries {
            let path = format!("{folder}/{entry}");
            // The folder of a file's modules, and a file's header.
            let of_a_file =
                files.contains(&format!("{path}.rs")) || listed.contains(&path.replace(".h", ".c"));
            let covered = listed.contains(&path) || listed.iter().any(|known| inside(&path, known));
            let left_out =
                entry.starts_with('.') || entry.ends_with("tests.rs") || NOT_LISTED.contains(&entry);
            if !(covered || of_a_file || left_out) {
                wrong.push(format!("{readme} does not list {path}"));
            }
        }
    }
    wrong
}

/// Names in a table that the code of the folder does not have.
fn parts_wrong(readme: &str, cells: &[String], code: &[File]) -> Vec<String> {
    let words = code.iter().flat_map(|file| &file.tokens).map(|token| token.text.trim_matches('"'));
    let words: BTreeSet<&str> = words.collect();
    let known = |name: &&str| name.split("::").all(|word| words.contains(word));
    let plain = |name: &&str| name.chars().all(|c| c.is_alphanumeric() || "_:".contains(c));
    let unknown = cells.iter().flat_map(|cell| names(cell)).filter(plain).filter(|name| !known(name));
    unknown.map(|name| format!("{readme} names `{name}`, which is not in the code")).collect()
}

/// What the crate of a README offers to others, by the lines of its root: a public module, or what is public of one. Errors explain
/// themselves.
fn offers<'a>(readme: &str, code: &'a [File]) -> Vec<BTreeSet<&'a str>> {
    let root = readme.replace("README.md", "src/lib.rs");
    let Some(root) = code.iter().find(|file| file.path == root) else { return Vec::new() };
    let tokens: Vec<&str> = root.tokens.iter().map(|token| token.text.as_str()).collect();
    let begins = tokens.windows(2).enumerate().filter(|(_, pair)| matches!(pair, ["pub", "use" | "mod"]));
    let offer = |(at, _): (usize, &[&'a str])| -> BTreeSet<&'a str> {
        let end = at + tokens[at..].iter().position(|token| *token == ";").unwrap_or_default();
        let names = (at + 2..end).filter(|at| tokens[at + 1] != "::").map(|at| tokens[at]);
        names.filter(|name| name.starts_with(char::is_alphabetic) && !name.ends_with("Error")).collect()
    };
    begins.map(offer).filter(|offer| !offer.is_empty()).collect()
}

/// What the crate offers and its tables lack.
fn offers_wrong(readme: &str, cells: &[String], code: &[File]) -> Vec<String> {
    let listed: BTreeSet<&str> =
        cells.iter().flat_map(|cell| names(cell)).flat_map(|name| name.split("::")).collect();
    let missing = offers(readme, code).into_iter().filter(|offer| offer.is_disjoint(&listed));
    missing.map(|offer| format!("{readme} names nothing of {offer:?}")).collect()
}

/// Names of the threads that code starts.
fn threads(code: &[File]) -> BTreeSet<String> {
    let starts = |file: &File| -> Vec<String> {
        let calls = file.tokens.windows(3).filter(|tokens| {
            ["start", "start_polling", "start_alone", "spawn_worker"].contains(&tokens[0].text.as_str())
                && tokens[1].text == "("
                && tokens[2].text.starts_with('"')
        });
        calls.map(|tokens| tokens[2].text.trim_matches('"').to_owned()).collect()
    };
    code.iter().flat_map(starts).collect()
}

/// A table of threads has one row for each name, and rows for those without a name: "the ..." and "a ...".
fn threads_wrong(readme: &str, cells: &[String], code: &[File]) -> Vec<String> {
    let described = |cell: &&String| ["the ", "a "].iter().any(|article| cell.starts_with(article));
    let listed: BTreeSet<String> = cells.iter().filter(|cell| !described(cell)).cloned().collect();
    listed.symmetric_difference(&threads(code)).map(|name| format!("{readme}: thread {name}")).collect()
}

/// What is wrong with the lists of a README. `code` is that of its folder, without tests.
fn lists_wrong(readme: &str, text: &str, files: &BTreeSet<String>, code: &[File]) -> Vec<String> {
    let (mut wrong, mut parts) = (Vec::new(), Vec::new());
    for (heading, cells) in tables(text) {
        // The row of dashes.
        let cells = &cells[1.min(cells.len())..];
        wrong.extend(match heading.as_str() {
            "file" | "folder" | "folder or file" => files_wrong(readme, cells, files),
            "part" | "module" | "type" => {
                parts.extend_from_slice(cells);
                parts_wrong(readme, cells, code)
            }
            "thread" => threads_wrong(readme, cells, code),
            _ => Vec::new(),
        });
    }
    if !parts.is_empty() {
        wrong.extend(offers_wrong(readme, &parts, code));
    }
    wrong
}

#[test]
fn the_lists_of_readmes_are_what_is_there() {
    let files = tracked();
    let mut wrong = Vec::new();
    for readme in files.iter().filter(|path| path.ends_with("/README.md")) {
        let folder = &readme[..readme.len() - "README.md".len()];
        let product = |path: &&String| {
            path.starts_with(folder) && path.ends_with(".rs") && !path[folder.len()..].starts_with("tests/")
        };
        let code: Vec<File> =
            files.iter().filter(product).map(|path| File::new(path.clone(), &read(path))).collect();
        wrong.extend(lists_wrong(readme, &read(readme), &files, &code));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn lists_that_lack_or_invent_something_are_found() {
    let paths =
        ["a/src/lib.rs", "a/src/b.rs", "a/src/b/c.rs", "a/src/d/mod.rs", "a/src/b_tests.rs", "a/Cargo.toml"];
    let files: BTreeSet<String> = paths.into_iter().map(str::to_owned).collect();
    let code = "pub use e::AnError;\npub use d::{Known, Other};\npub struct Known;\nfn f() { workers.start(\"one\", g); spawn_worker(\"two\", g) }\n\
                #[cfg(test)]\nmod tests { fn f() { spawn_worker(\"three\", g) } struct Unknown; }";
    let code = [File::new("a/src/lib.rs".to_owned(), code)];
    let check = |text: &str| lists_wrong("a/README.md", text, &files, &code).len();
    let listed = "| file | content |\n|---|---|\n| [b.rs](src/b.rs) | b |\n| `src/d` | `d` |\n\n| other | |\n|---|---|\n| `x` | |\n";
    assert_eq!(check(listed), 0);
    assert_eq!(check(&listed.replace("| `src/d` | `d` |\n", "")), 1, "one is not listed");
    assert_eq!(check(&listed.replace("`src/d`", "`src/d`, `src/e.rs`")), 1, "one is not there");
    let parts = "| part | purpose |\n|---|---|\n| `Known` | |\n| `Known::f`, `--flag` | |\n";
    assert_eq!(check(parts), 0);
    assert_eq!(check(&parts.replace("| `Known` |", "| `Unknown` |")), 1);
    let offered = "| part | purpose |\n|---|---|\n| `f` | |\n";
    assert_eq!(
        (check(offered), check(&offered.replace("`f`", "`Other`"))),
        (1, 0),
        "nothing of what d has is named"
    );
    let threads = "| thread | what delays it |\n|---|---|\n| one | |\n| two | |\n| a worker of each VM | |\n";
    assert_eq!(check(threads), 0);
    assert_eq!(check(&threads.replace("| two | |\n", "")), 1);
    assert_eq!(check(&threads.replace("| two |", "| two | |\n| three |")), 1);
}
