//! What decides the figures of a cell: a hash of the content of programs, kernels, plugin, and all else that the lab is made of.

use crate::cells::hex;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    str::FromStr,
};

/// Digits of a hash that name a folder.
const SHORT: usize = 16;

/// Something that decides the figures: its name, and a file or folder with its content.
#[derive(Clone, Debug)]
pub struct Input {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
}

impl FromStr for Input {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = text.split_once('=').ok_or_else(|| format!("{text:?}: expected NAME=PATH"))?;
        Ok(Self { name: name.to_owned(), path: path.into() })
    }
}

/// All of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Configuration {
    /// Hash of all inputs, its first digits.
    pub hash: String,
    /// Hash of each input, by its name.
    pub inputs: BTreeMap<String, String>,
}

/// Reads all inputs.
pub fn of(inputs: &[Input]) -> Result<Configuration> {
    let mut hashes = BTreeMap::new();
    for Input { name, path } in inputs {
        let mut hasher = Sha256::new();
        add(&mut hasher, path, Path::new("")).with_context(|| format!("{name}: {}", path.display()))?;
        let before = hashes.insert(name.clone(), hex(&hasher.finalize()));
        ensure!(before.is_none(), "{name} is given twice");
    }
    let mut all = Sha256::new();
    for (name, hash) in &hashes {
        all.update(format!("{name} {hash}\n"));
    }
    Ok(Configuration { hash: hex(&all.finalize())[..SHORT].to_owned(), inputs: hashes })
}

/// The content of a file, or names and contents of all files of a folder. Documents and hidden files decide nothing.
fn add(hasher: &mut Sha256, path: &Path, name: &Path) -> Result<()> {
    let at = || path.display().to_string();
    if !fs::metadata(path).with_context(at)?.is_dir() {
        let mut file = File::open(path).with_context(at)?;
        hasher.update(format!("{}\0{}\0", name.display(), file.metadata()?.len()));
        io::copy(&mut file, hasher).with_context(at)?;
        return Ok(());
    }
    let entries = fs::read_dir(path).with_context(at)?;
    let mut names = entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort();
    for entry in names {
        let text = entry.to_string_lossy();
        if !text.starts_with('.') && !text.ends_with(".md") {
            add(hasher, &path.join(&entry), &name.join(&entry))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_content_and_each_name_counts_and_documents_do_not() {
        let directory = tempfile::tempdir().expect("a folder");
        let folder = directory.path().join("lab");
        let program = directory.path().join("vnumad");
        fs::create_dir(&folder).expect("a folder");
        let write = |path: &Path, text: &str| fs::write(path, text).expect("a file");
        write(&program, "1");
        write(&folder.join("a.c"), "2");
        let input = |name: &str, path: &Path| Input { name: name.into(), path: path.into() };
        let hash =
            || of(&[input("vnumad", &program), input("lab", &folder)]).expect("files that can be read").hash;
        let first = hash();
        assert_eq!((first.len(), first == hash()), (SHORT, true));
        write(&folder.join("README.md"), "words");
        assert_eq!(hash(), first);
        write(&folder.join("a.c"), "3");
        let second = hash();
        assert_ne!(second, first);
        fs::rename(folder.join("a.c"), folder.join("b.c")).expect("another name");
        let third = hash();
        assert!(third != second && third != first);
        write(&program, "4");
        assert_ne!(hash(), third);
        let error = of(&[input("plugin", &folder.join("none"))]).expect_err("it is not there");
        assert!(format!("{error:#}").contains("plugin: ") && format!("{error:#}").contains("none"));
    }

    #[test]
    fn an_input_has_a_name_and_a_path() {
        let input: Input = "kernel=/boot/a=b".parse().expect("understood");
        assert_eq!((input.name.as_str(), input.path), ("kernel", PathBuf::from("/boot/a=b")));
        assert_eq!("kernel".parse::<Input>().expect_err("no path"), "\"kernel\": expected NAME=PATH");
    }
}
