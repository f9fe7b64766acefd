//! Documents against the tree: the README's transcript against what the demonstration prints, relative links, the
//! lists of folders, the lengths of lines. Nothing boots: the demonstration's lines are read from its source.
//!
//! Each check takes texts and returns what is wrong, so that the tests can also give it broken ones.

#[cfg(test)]
mod readmes;

use crate::steps::workspace;
use std::{collections::BTreeSet, fs, process::Command};

/// Longer lines are hard to review: a change of one word shows as a change of a paragraph.
const MAX_LINE: usize = 160;
/// Lines of the demonstration that a run of programs and an image that are built already, without a retried boot, does not
/// print.
const NOT_PRINTED: [&str; 7] = [
    "lab boot retried",
    "still building",
    "trying again",
    "trying once more",
    "no vCPU came to another node",
    "not all at their memory",
    "an idle CPU of another node",
];

fn read(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Files that git tracks and that are there.
fn tracked() -> BTreeSet<String> {
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(workspace()).output().expect("git");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let list = String::from_utf8(output.stdout).expect("UTF-8");
    let files = list.split_terminator('\0').filter(|path| workspace().join(path).exists());
    files.map(str::to_owned).collect()
}

fn documents(files: &BTreeSet<String>) -> impl Iterator<Item = &String> {
    files.iter().filter(|path| path.ends_with(".md"))
}

/// Lines outside of code blocks and tables, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut code = false;
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        if !(code || fence || line.starts_with('|') || line.starts_with("    ")) {
            lines.push((index + 1, line));
        }
    }
    lines
}

/// The part of a document below a heading, up to the next heading of that level.
fn section<'a>(text: &'a str, heading: &str) -> &'a str {
    let from = text.find(heading).unwrap_or_else(|| panic!("no heading `{heading}`")) + heading.len();
    text[from..].split("\n## ").next().unwrap_or_default()
}

fn long_lines(path: &str, text: &str) -> Vec<String> {
    let long = prose(text).into_iter().filter(|(_, line)| line.chars().count() > MAX_LINE);
    long.map(|(number, line)| format!("{path}:{number} has {} characters", line.chars().count())).collect()
}

/// Targets of `[text](target)`, with the number of their line. Tables have links, too; code has none.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut code = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        code ^= line.trim_start().starts_with("```");
        if code {
            continue;
        }
        // Every second piece is between backquotes, but a link's text may be code: keep what follows it.
        let plain: String = line.split('`').step_by(2).collect();
        let targets = plain.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        found.extend(targets.map(|(target, _)| (index + 1, target.to_owned())));
    }
    found
}

/// `path` as seen from the folder of `document`, or nothing if it leaves the tree.
fn resolve(document: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

/// The anchors that a page of headings has.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).into_iter().filter(|(_, line)| line.starts_with('#'));
    let anchor = |line: &str| -> String {
        let kept = line.trim_start_matches('#').trim().to_lowercase();
        kept.chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    };
    headings.map(|(_, line)| anchor(line)).collect()
}

fn broken_links(path: &str, text: &str, files: &BTreeSet<String>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (line, target) in links(text) {
        if target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
        let Some(to) = (if file.is_empty() { Some(path.to_owned()) } else { resolve(path, file) }) else {
            wrong.push(format!("{path}:{line}: {target} is outside of the tree"));
            continue;
        };
        let folder = format!("{to}/");
        if !files.contains(&to) && !files.iter().any(|known| known.starts_with(&folder)) {
            wrong.push(format!("{path}:{line}: there is no {to}"));
        } else if !anchor.is_empty() {
            let there = if to == path { text.to_owned() } else { read(&to) };
            if !anchors(&there).contains(anchor) {
                wrong.push(format!("{path}:{line}: {to} has no heading for #{anchor}"));
            }
        }
    }
    wrong
}

/// Folders at the top of the tree, without hidden ones.
fn top_folders(files: &BTreeSet<String>) -> BTreeSet<String> {
    let tops = files.iter().filter_map(|path| path.split_once('/')).map(|(top, _)| top.to_owned());
    tops.filter(|top| !top.starts_with('.')).collect()
}

/// Folders of packages.
fn packages(files: &BTreeSet<String>) -> BTreeSet<String> {
    files.iter().filter_map(|path| path.strip_suffix("/Cargo.toml")).map(str::to_owned).collect()
}

/// The README links each folder, or something in it, and each crate of the product itself.
fn components_missing(readme: &str, files: &BTreeSet<String>) -> Vec<String> {
    let linked: BTreeSet<String> =
        links(section(readme, "\n## Components\n")).into_iter().map(|(_, target)| target).collect();
    let reaches = |top: &str| linked.iter().any(|link| link.split('/').next() == Some(top));
    let tops = top_folders(files).into_iter().filter(|top| !reaches(top));
    let product = |path: &String| ["pure/", "host/", "span/"].iter().any(|top| path.starts_with(top));
    let crates = packages(files).into_iter().filter(|path| product(path) && !linked.contains(path));
    tops.chain(crates).map(|path| format!("README.md does not link {path}")).collect()
}

/// Paths of a drawn tree: names, at least two spaces, what they are. Indented ones are inside of the one above.
fn drawn_paths(block: &str) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    let mut inside = "";
    for line in block.lines().filter(|line| !line.trim().is_empty()) {
        let indented = line.starts_with(' ');
        let names = line.trim_start().split("  ").next().unwrap_or_default();
        for name in names.split(' ').map(|name| name.trim_end_matches('/')) {
            paths.insert(if indented { format!("{inside}/{name}") } else { name.to_owned() });
        }
        if !indented {
            inside = names.split('/').next().unwrap_or_default();
        }
    }
    paths
}

/// ARCHITECTURE.md draws each folder at the top and each package, and nothing that is not there.
fn drawn_wrongly(architecture: &str, files: &BTreeSet<String>) -> Vec<String> {
    let block = section(architecture, "\n## Folders\n").split("```\n").nth(1).expect("a code block");
    let drawn = drawn_paths(block);
    let wanted = top_folders(files).into_iter().chain(packages(files)).filter(|path| !drawn.contains(path));
    let mut wrong: Vec<String> = wanted.map(|path| format!("ARCHITECTURE.md does not name {path}")).collect();
    for path in &drawn {
        let folder = format!("{path}/");
        if !files.contains(path) && !files.iter().any(|known| known.starts_with(&folder)) {
            wrong.push(format!("ARCHITECTURE.md names {path}, which is not there"));
        }
    }
    wrong
}

/// Contents of the string literals of Rust code, comments left out. Enough for the demonstration's own source.
fn literals(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in code.lines() {
        let mut text: Option<String> = None;
        let mut characters = line.trim_start().chars().peekable();
        while let Some(character) = characters.next() {
            match (&mut text, character) {
                (None, '/') if characters.peek() == Some(&'/') => break,
                (None, '"') => text = Some(String::new()),
                (None, _) => {}
                (Some(_), '"') => found.extend(text.take()),
                (Some(text), '\\') => match characters.next() {
                    Some('n') => text.push('\n'),
                    other => text.extend(other),
                },
                (Some(text), other) => text.push(other),
            }
        }
    }
    found
}

/// The first literal after each occurrence of `call`.
fn literals_of_calls(code: &str, call: &str) -> Vec<String> {
    code.split(call).skip(1).filter_map(|rest| literals(rest).into_iter().next()).collect()
}

/// What a format string prints whatever its arguments are: the pieces that have letters.
fn fixed_parts(format: &str) -> Vec<&str> {
    let pieces = format.split('{').enumerate().map(|(index, piece)| match index {
        0 => piece,
        _ => piece.split_once('}').map_or("", |(_, after)| after),
    });
    pieces.filter(|piece| piece.contains(char::is_alphabetic)).map(|piece| piece.trim_matches('\n')).collect()
}

/// Format strings of the lines that each run prints.
fn printed() -> Vec<String> {
    let [host, report, xtask] = ["demo/src/host.rs", "demo/src/report.rs", "xtask/src/demo.rs"].map(read);
    let [placed, policies] = ["demo/src/placed.rs", "pure/policy/src/scheduling/mod.rs"].map(read);
    let [picture, device] = ["demo/src/picture.rs", "demo/src/device.rs"].map(read);
    let picture = picture.split("#[cfg(test)]").next().expect("the picture's lines");
    let tables = [
        (&report, "impl fmt::Display for Report"),
        (&placed, "impl fmt::Display for BeforeAfter"),
        (&device, "impl fmt::Display for Told"),
    ];
    let tables = tables.into_iter().flat_map(|(code, begin)| {
        let table = code.split(begin).nth(1).unwrap_or_else(|| panic!("no {begin}"));
        literals(table.split("\n}\n").next().unwrap_or_default())
    });
    let calls = [
        (&host, "say("),
        (&host, "println!("),
        (&host, "const LAB: "),
        (&placed, "const POLICY: "),
        (&policies, "Self::Memory => "),
        (&xtask, "println!("),
    ];
    let lines = calls.into_iter().flat_map(|(code, call)| literals_of_calls(code, call));
    let lines = lines.chain(tables).chain(literals(picture));
    lines.filter(|line| !NOT_PRINTED.iter().any(|part| line.contains(part))).collect()
}

/// The lines that the README shows of `make demo`.
fn transcript(readme: &str) -> Vec<&str> {
    let block = readme.split("```console\n$ make demo\n").nth(1).expect("a transcript of make demo");
    let block = block.split("```").next().unwrap_or_default();
    block.lines().filter(|line| !line.trim().is_empty()).collect()
}

fn contains_in_order(line: &str, parts: &[&str]) -> bool {
    let mut rest = line;
    parts.iter().all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

/// What remains of a line without the words that the demonstration prints: values, or words that it does not print.
fn foreign_words(line: &str, formats: &[String]) -> Vec<String> {
    let mut parts: Vec<&str> = formats.iter().flat_map(|format| fixed_parts(format)).collect();
    parts.extend([" ms", " %"]);
    parts.sort_by_key(|part| std::cmp::Reverse(part.len()));
    // Names of counters and of kernels, paths and figures are values.
    let value = |word: &str| word.contains(|c: char| c.is_ascii_digit() || c == '_' || c == '/');
    let line = line.split(' ').filter(|word| !word.contains('/')).collect::<Vec<_>>().join(" ");
    let rest = parts.iter().fold(format!("{line} "), |line, part| line.replace(part, " | "));
    let words = rest.split_whitespace().filter(|word| word.contains(char::is_alphabetic) && !value(word));
    words.map(str::to_owned).collect()
}

fn transcript_differs(readme: &str, formats: &[String]) -> Vec<String> {
    let lines = transcript(readme);
    let missing = formats.iter().filter(|format| {
        let parts = fixed_parts(format);
        !lines.iter().any(|line| contains_in_order(line, &parts))
    });
    let mut wrong: Vec<String> =
        missing.map(|format| format!("the README's transcript lacks {format:?}")).collect();
    for line in lines {
        let words = foreign_words(line, formats);
        if !words.is_empty() {
            wrong.push(format!("the demonstration does not print {words:?} of {line:?}"));
        }
    }
    wrong
}

#[test]
fn the_readme_shows_what_the_demonstration_prints() {
    let formats = printed();
    assert!(formats.len() > 15, "lines of the demonstration were not found: {formats:?}");
    let wrong = transcript_differs(&read("README.md"), &formats);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_relative_link_leads_somewhere() {
    let files = tracked();
    let wrong: Vec<String> =
        documents(&files).flat_map(|path| broken_links(path, &read(path), &files)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The tests that a cell links, each with its file. `None`: it has something else.
fn linked_tests(cell: &str) -> Option<Vec<(&str, &str)>> {
    cell.split(", ").map(|link| link.strip_prefix('[')?.strip_suffix(')')?.split_once("](")).collect()
}

/// Rows of a table of promises whose last cell links anything but tests of these names.
fn promises_without_a_test<'a>(table: &'a str, read: &dyn Fn(&str) -> String) -> Vec<&'a str> {
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    let is_missing = |row: &&str| {
        let cell = row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap_or_default();
        let is_there = |(test, path): (&str, &str)| read(path).contains(&format!("fn {test}("));
        linked_tests(cell).is_none_or(|tests| !tests.into_iter().all(is_there))
    };
    rows.filter(is_missing).collect()
}

#[test]
fn each_promise_has_its_test() {
    let security = read("SECURITY.md");
    let table = section(&security, "## Promises");
    assert!(table.lines().filter(|line| line.starts_with("| ")).count() > 20, "{table}");
    assert_eq!(promises_without_a_test(table, &read), [] as [&str; 0]);
}

#[test]
fn a_promise_without_a_test_is_found() {
    let row = |cell: &str| format!("| threat | test |\n|---|---|\n| a | {cell} |\n");
    let source = |_: &str| "#[test]\nfn it_holds() {".to_owned();
    let found = |cell: &str| promises_without_a_test(&row(cell), &source).len();
    assert_eq!([found("[it_holds](a.rs)"), found("[it_breaks](a.rs)"), found("tried once")], [0, 1, 1]);
    // Of several each has to be there.
    assert_eq!(found("[it_holds](a.rs), [it_holds](b.rs)"), 0);
    assert_eq!([found("[it_holds](a.rs), [it_breaks](a.rs)"), found("[it_holds](a.rs), tried once")], [1, 1]);
}

#[test]
fn the_lists_of_folders_are_the_tree() {
    let files = tracked();
    let mut wrong = components_missing(&read("README.md"), &files);
    wrong.extend(drawn_wrongly(&read("ARCHITECTURE.md"), &files));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_line_of_a_document_is_too_long() {
    let files = tracked();
    let wrong: Vec<String> = documents(&files).flat_map(|path| long_lines(path, &read(path))).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn broken_transcripts_are_found() {
    let formats =
        ["demo: {what}", "moving vCPUs for {} s", "{seconds:3} s: {updates} updates", "{name}, p50"];
    let formats: Vec<String> =
        formats.into_iter().chain(["host change to guest updated"]).map(str::to_owned).collect();
    let readme = "```console\n$ make demo\ndemo: moving vCPUs for 60 s\ndemo:  10 s: 2 updates\n\n  \
                  host change to guest updated, p50    288.5 ms\n```\n";
    assert_eq!(transcript_differs(readme, &formats), Vec::<String>::new());
    let lacking = readme.replace("demo: moving vCPUs for 60 s\n", "");
    assert_eq!(transcript_differs(&lacking, &formats).len(), 1);
    let renamed = readme.replace("guest updated", "guest told");
    assert_eq!(transcript_differs(&renamed, &formats).len(), 2);
    let invented = readme.replace("2 updates", "2 updates, no errors");
    assert_eq!(transcript_differs(&invented, &formats).len(), 1);
    let code = "say(\"a \\\"b\\\"\"); // say(\"c\")\nrow(\"d\", \"e\");";
    assert_eq!(literals(code), ["a \"b\"", "d", "e"]);
}

#[test]
fn broken_links_are_found() {
    let files = BTreeSet::from(["docs/a.md".to_owned(), "docs/b/c.rs".to_owned(), "d.md".to_owned()]);
    let text = "# A heading, here\n[`a`](b/c.rs) [b](b) [c](../d.md) [d](#a-heading-here) [e](https://e.example/x)\n\
                `[f](g)` is code.\n```\n[h](i)\n```\n";
    assert_eq!(broken_links("docs/a.md", text, &files), Vec::<String>::new());
    for broken in ["[a](b/d.rs)", "| [a](c) |", "[a](../../d.md)", "[a](#another)", "[`a`](c#here)"] {
        assert_eq!(broken_links("docs/a.md", broken, &files).len(), 1, "{broken}");
    }
}

#[test]
fn folders_that_a_list_lacks_or_invents_are_found() {
    let paths = [".ci/run", "Makefile", "host/vnumad/Cargo.toml", "host/api/Cargo.toml", "docs/a.md"];
    let files: BTreeSet<String> = paths.into_iter().map(str::to_owned).collect();
    let readme = "\n## Components\n- [a](host/vnumad), [b](host/api), [c](docs).\n\n## More\n[d](pure/b)\n";
    assert_eq!(components_missing(readme, &files), Vec::<String>::new());
    assert_eq!(components_missing(&readme.replace("(host/vnumad)", "(bin)"), &files).len(), 1);
    assert_eq!(components_missing(&readme.replace("(docs)", "(host/api)"), &files).len(), 1);
    let drawing = "\n## Folders\n\n```\nhost/       README.md\n  vnumad/   one\n  api/\n\
                   docs/ Makefile .ci/run  the rest\n```\n";
    assert_eq!(drawn_wrongly(drawing, &files), Vec::<String>::new());
    assert_eq!(drawn_wrongly(&drawing.replace("  api/\n", ""), &files).len(), 1);
    assert_eq!(drawn_wrongly(&drawing.replace("  api/\n", "  api/ apis/\n"), &files).len(), 1);
    assert_eq!(drawn_wrongly(&drawing.replace("docs/ ", ""), &files).len(), 1);
}

#[test]
fn long_lines_are_found_in_prose_only() {
    let long = "x".repeat(MAX_LINE + 1);
    assert_eq!(long_lines("a.md", &format!("{long}\n- {long}\n")).len(), 2);
    let excluded = format!("| {long} |\n\n    {long}\n\n```\n{long}\n```\n{}\n", "ä".repeat(MAX_LINE));
    assert_eq!(long_lines("a.md", &excluded), Vec::<String>::new());
}
