//! Every committed input through its target. Among them are those that broke something once.

use std::{
    collections::BTreeSet,
    fs, panic,
    path::{Path, PathBuf},
};
use vnuma_fuzz::{TARGETS, corpora};

/// The targets in C, whose corpora `make check` of guest/driver and of guest/runtime feeds to them.
const IN_C: [&str; 2] = ["driver-channel", "runtime-page"];

/// Larger corpora belong to target/fuzz.
const SIZE_LIMIT: u64 = 300 << 10;

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    entries.map(|entry| entry.expect("readable").path()).collect()
}

#[test]
fn every_target_has_a_corpus_and_every_corpus_a_target() {
    let name = |path: PathBuf| path.file_name().and_then(|name| name.to_str()).expect("UTF-8").to_owned();
    let folders: BTreeSet<String> = entries(&corpora()).into_iter().map(name).collect();
    let targets = TARGETS.iter().map(|target| target.name).chain(IN_C);
    assert_eq!(folders, targets.map(str::to_owned).collect());
    let files = |folder: &String| entries(&corpora().join(folder));
    assert!(folders.iter().all(|folder| !files(folder).is_empty()), "an empty corpus");
    let size: u64 = folders.iter().flat_map(files).map(|file| file.metadata().expect("there").len()).sum();
    assert!(size <= SIZE_LIMIT, "{size} bytes of corpora, at most {SIZE_LIMIT} are meant to be committed");
}

#[test]
fn every_input_is_survived() {
    let mut broken = Vec::new();
    for target in &TARGETS {
        for file in entries(&corpora().join(target.name)) {
            let input = fs::read(&file).expect("readable");
            if panic::catch_unwind(|| (target.run)(&input)).is_err() {
                broken.push(file);
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}
