//! What the documents say of the tree: their lists of folders and their links.

use crate::steps::workspace;
use std::{
    collections::BTreeSet,
    fs,
    path::{Component, Path, PathBuf},
    process::Command,
};

/// Folders without sources of their own.
const UNLISTED: [&str; 2] = ["LICENSES", "scripts"];

/// Paths of all files that git knows.
fn files() -> Vec<PathBuf> {
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(workspace()).output().expect("git");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("UTF-8");
    names.split_terminator('\0').map(PathBuf::from).filter(|path| workspace().join(path).exists()).collect()
}

/// Folders right below `parent` that have files, hidden ones left out.
fn folders(files: &[PathBuf], parent: &Path) -> BTreeSet<PathBuf> {
    let below = files.iter().filter_map(|path| path.strip_prefix(parent).ok());
    let named = below.filter(|path| path.components().count() > 1);
    let first = named.filter_map(|path| path.components().next()?.as_os_str().to_str());
    first.filter(|name| !name.starts_with('.')).map(|name| parent.join(name)).collect()
}

fn read(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The text between a heading and the next one.
fn section<'text>(text: &'text str, heading: &str) -> &'text str {
    let (_, rest) = text.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no `{heading}`"));
    rest.split("\n## ").next().unwrap_or_default()
}

/// The folders of an indented list in a code block, each with its depth below another one.
fn listed(block: &str) -> Vec<(PathBuf, bool)> {
    let mut parent = PathBuf::new();
    let mut all = Vec::new();
    for line in block.lines() {
        let nested = line.starts_with(' ');
        let names = line.split_whitespace().take_while(|word| word.contains('/') || *word == "Makefile");
        for name in names.filter(|name| name.ends_with('/')) {
            let path = if nested { parent.join(name) } else { PathBuf::from(name) };
            if !nested {
                parent = path.clone();
            }
            all.push((path, nested));
        }
    }
    all
}

#[test]
fn the_folders_of_the_architecture_are_those_of_the_tree() {
    let (architecture, files) = (read("ARCHITECTURE.md"), files());
    let block = section(&architecture, "## Folders").split("```").nth(1).expect("a code block");
    let listed = listed(block);
    for (path, _) in &listed {
        assert!(workspace().join(path).is_dir(), "ARCHITECTURE.md lists {}", path.display());
    }
    let names: BTreeSet<_> = listed.iter().map(|(path, _)| path.clone()).collect();
    for folder in folders(&files, Path::new("")) {
        let known = UNLISTED.iter().any(|name| folder == Path::new(name));
        let found = known || names.iter().any(|path| path.starts_with(&folder));
        assert!(found, "ARCHITECTURE.md does not list {}", folder.display());
    }
    // Where some of a folder's own are listed, all are.
    let parents: BTreeSet<_> =
        listed.iter().filter(|(_, nested)| *nested).filter_map(|(path, _)| path.parent()).collect();
    assert!(parents.contains(Path::new("crates")), "{parents:?}");
    for parent in parents {
        for folder in folders(&files, parent) {
            assert!(names.contains(&folder), "ARCHITECTURE.md does not list {}", folder.display());
        }
    }
}

/// Targets of the links of a document that name a file of the tree.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    targets.filter(|target| !target.is_empty() && !target.contains("://"))
}

/// A path without `.` and `..`. None if it leaves the tree.
fn plain(path: &Path) -> Option<PathBuf> {
    path.components().try_fold(PathBuf::new(), |mut plain, part| {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => drop(plain.pop().then_some(())?),
            _ => {}
        }
        Some(plain)
    })
}

#[test]
fn the_components_of_the_readme_are_those_of_the_tree() {
    let readme = read("README.md");
    let components: BTreeSet<_> = links(section(&readme, "## Components")).map(PathBuf::from).collect();
    let files = files();
    let all = [
        folders(&files, Path::new("")),
        folders(&files, Path::new("crates")),
        folders(&files, Path::new("bin")),
    ];
    for folder in
        all.iter().flatten().filter(|folder| !UNLISTED.iter().any(|name| *folder == Path::new(name)))
    {
        let found = components.iter().any(|path| path.starts_with(folder));
        assert!(found, "README.md has no link to {} under Components", folder.display());
    }
}

#[test]
fn every_link_of_a_document_leads_to_a_file() {
    let files = files();
    let documents = files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let mut broken = Vec::new();
    for document in documents {
        let text = read(document.to_str().expect("UTF-8"));
        for link in links(&text) {
            let target = plain(&document.parent().unwrap_or(Path::new("")).join(link));
            let found = target.is_some_and(|path| files.iter().any(|file| file.starts_with(&path)));
            if !found {
                broken.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}
