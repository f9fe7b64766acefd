//! Counts of the tree that show whether its structure holds, and their limits. Nothing is built or run for them.

mod imports;
pub(crate) mod source;

use crate::{layers, steps::workspace};
use anyhow::{Context, Result};
use source::File;
use std::{fs, path::Path, process::Command};

/// A function with more lines than this is long.
const LONG: usize = 70;

/// What is counted, and how much of it there may be. A commit that lowers a count lowers its limit.
const LIMITS: [(&str, usize); 6] = [
    ("circles of imports", 7),
    ("imports upwards", 0),
    ("fields of the daemon's Core", 10),
    ("functions over 70 lines", 0),
    ("lines of Rust outside tests", 124_757),
    ("lines of ARCHITECTURE.md", 200),
];

/// A count and what it is made of, as far as that helps to lower it.
struct Count {
    value: usize,
    parts: Vec<String>,
}

impl From<Vec<String>> for Count {
    fn from(parts: Vec<String>) -> Self {
        Self { value: parts.len(), parts }
    }
}

impl From<usize> for Count {
    fn from(value: usize) -> Self {
        Self { value, parts: Vec::new() }
    }
}

/// Rust files that git tracks and that are there, in folders of their own for tests or not.
fn tracked(root: &Path) -> Result<Vec<String>> {
    let output =
        Command::new("git").args(["ls-files", "-z", "*.rs"]).current_dir(root).output().context("git")?;
    let list = String::from_utf8(output.stdout)?;
    let there = list.split_terminator('\0').filter(|path| root.join(path).exists());
    Ok(there.map(str::to_owned).collect())
}

/// Whether cargo builds what lies in this folder for tests, benchmarks and examples only.
fn in_a_test(path: &str) -> bool {
    path.split('/').any(|folder| ["tests", "benches", "examples"].contains(&folder))
}

/// Files of the product, the lab, the benchmarks and the tools, without tests.
fn product(root: &Path) -> Result<Vec<File>> {
    let mut files = Vec::new();
    for path in tracked(root)?.into_iter().filter(|path| !in_a_test(path)) {
        let text = fs::read_to_string(root.join(&path)).with_context(|| path.clone())?;
        files.push(File::new(path, &text));
    }
    let tests: Vec<String> = files.iter().flat_map(File::test_modules).collect();
    files.retain(|file| !tests.contains(&file.path));
    Ok(files)
}

fn long_functions(files: &[File]) -> Vec<String> {
    let functions =
        files.iter().flat_map(|file| file.functions().into_iter().map(move |found| (file, found)));
    let long = functions.filter(|(_, function)| function.lines > LONG);
    let mut long: Vec<_> = long.collect();
    long.sort_by_key(|(_, function)| std::cmp::Reverse(function.lines));
    let show = |(file, function): (&File, source::Function)| {
        format!("{}:{} {} has {}", file.path, function.at, function.name, function.lines)
    };
    long.into_iter().map(show).collect()
}

/// In the order of [`LIMITS`].
fn counts() -> Result<[Count; LIMITS.len()]> {
    let root = workspace();
    let files = product(&root)?;
    let core = files.iter().find(|file| file.path == "host/daemon/src/core/mod.rs").context("the core")?;
    let architecture = fs::read_to_string(root.join("ARCHITECTURE.md")).context("ARCHITECTURE.md")?;
    Ok([
        imports::circles(&files).into(),
        layers::upwards().into(),
        core.fields("Core").into(),
        long_functions(&files).into(),
        files.iter().map(|file| file.lines).sum::<usize>().into(),
        architecture.lines().count().into(),
    ])
}

/// Prints the counts, their limits, and what they are made of.
pub fn run() -> Result<()> {
    for ((name, limit), count) in LIMITS.into_iter().zip(counts()?) {
        println!("{name:28} {:7} of at most {limit}", count.value);
        count.parts.iter().for_each(|part| println!("  {part}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_count_is_above_its_limit() {
        for ((name, limit), count) in LIMITS.into_iter().zip(counts().expect("counts")) {
            assert!(count.value <= limit, "{name}: {}, at most {limit}: {:#?}", count.value, count.parts);
        }
    }
}
