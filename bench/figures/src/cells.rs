//! Cells: what a benchmark measures one after the other. Each is stored as soon as it has come about, so that a run that was cut off goes
//! on with those that are missing, whichever commit measured the others.
//!
//! A store is a file. A line of it is a cell: what it is and who measured it, a tab, and what was measured, both as JSON. Lines without a tab say what
//! holds for the cells after them.

use crate::waiting::waiting;
use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// What a run measures, and what is measured already.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// What is measured
    #[arg(long, default_value = "")]
    pub commit: String,
    /// What decides the figures: a hash of programs, kernels and all else
    #[arg(id = "configuration-hash", long, default_value = "")]
    pub configuration: String,
    /// Cells that were measured before. Those of this configuration are not measured again
    #[arg(long, value_name = "FILE")]
    pub store: Option<PathBuf>,
    /// How much of it.
    #[command(flatten)]
    pub part: Part,
}

/// Part of a run.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Part {
    /// At most so many cells now; the next run goes on
    #[arg(long, value_name = "N")]
    pub cells: Option<usize>,
    /// Begin no cell after so many minutes; the next run goes on
    #[arg(long, value_name = "MINUTES")]
    pub minutes: Option<u64>,
}

/// Of a cell.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    cell: String,
    /// What measured it.
    commit: String,
    configuration: String,
    took_ms: u64,
    /// Of all this and what was measured.
    sha256: String,
}

impl Header {
    fn sum(&self, measured: &str) -> String {
        let Self { cell, commit, configuration, took_ms, .. } = self;
        hex(&Sha256::digest([cell, commit, configuration, &took_ms.to_string(), measured].join("\n")))
    }
}

/// Lower-case digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A line about a cell that did not come about at first.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Again {
    again: String,
}

/// A file of lines.
#[derive(Debug, PartialEq)]
pub struct Raw<T> {
    /// Its lines, but for those about cells that were tried again. Of a cell that was measured twice the last one counts.
    pub lines: Vec<T>,
    /// These cells.
    pub again: Vec<String>,
    /// How many cells each commit has measured.
    pub measured_by: BTreeMap<String, usize>,
}

impl<T> Default for Raw<T> {
    fn default() -> Self {
        Self { lines: Vec::new(), again: Vec::new(), measured_by: BTreeMap::new() }
    }
}

/// Whole lines, the header of each that is a cell, and the rest. One that was cut off at the end is none; an error names the line.
fn lines(path: &Path) -> Result<Vec<(Option<Header>, String)>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    let line = |(number, line): (usize, &str)| {
        let Some((header, measured)) = line.split_once('\t') else { return Ok((None, line.to_owned())) };
        let place =
            || format!("{}:{}: remove it, and its cell is measured again", path.display(), number + 1);
        let header: Header = serde_json::from_str(header).with_context(place)?;
        let (found, said) = (header.sum(measured), &header.sha256);
        ensure!(found == *said, "{}: its sha256 is {found:?}, not {said:?}", place());
        Ok((Some(header), measured.to_owned()))
    };
    whole.enumerate().map(line).collect()
}

/// An error names the field.
fn parse<T: DeserializeOwned>(line: &str) -> Result<T> {
    let mut deserializer = serde_json::Deserializer::from_str(line);
    let parsed = serde_path_to_error::deserialize(&mut deserializer);
    let value = parsed.map_err(|error| anyhow!("{}: {}", error.path(), error.inner()))?;
    deserializer.end()?;
    Ok(value)
}

impl<T: DeserializeOwned> Raw<T> {
    /// Reads one. An error names the line and the field.
    pub fn read(path: &Path) -> Result<Self> {
        let lines = lines(path)?;
        let cells = lines.iter().enumerate();
        let last: BTreeMap<&str, usize> =
            cells.filter_map(|(number, (header, _))| Some((&*header.as_ref()?.cell, number))).collect();
        let mut raw = Self::default();
        for (number, (header, line)) in lines.iter().enumerate() {
            match header {
                Some(header) if last.get(&*header.cell) != Some(&number) => continue,
                Some(header) => *raw.measured_by.entry(header.commit.clone()).or_default() += 1,
                None => {
                    if let Ok(Again { again }) = serde_json::from_str(line) {
                        raw.again.push(again);
                        continue;
                    }
                }
            }
            let place = || format!("{}:{}", path.display(), number + 1);
            raw.lines.push(parse(line).with_context(place)?);
        }
        Ok(raw)
    }
}

/// A store to go on with, without the part of a line that a run leaves that was cut off.
pub fn go_on(path: &Path) -> Result<File> {
    let at = || path.display().to_string();
    let text = match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        text => text,
    };
    let text = text.with_context(at)?;
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let file = File::options().create(true).append(true).open(path).with_context(at)?;
    file.set_len(whole as u64).with_context(at)?;
    Ok(file)
}

/// Prints a line of JSON.
pub fn print(line: &impl Serialize) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(line)?)?;
    Ok(out.flush()?)
}

/// The cells of a run. One that fails is tried once more; the others are worth having all the same.
pub struct Cells {
    commit: String,
    configuration: String,
    /// What was measured before, as JSON, and by which commit.
    stored: BTreeMap<String, (String, String)>,
    out: Box<dyn Write>,
    left: usize,
    end: Option<Instant>,
    /// Those for which there is no time now.
    missing: usize,
    /// Those that did not come about.
    pub failed: Vec<String>,
    /// How many were tried once more.
    pub retried: usize,
    /// How many cells each commit has measured.
    pub measured_by: BTreeMap<String, usize>,
}

impl Cells {
    /// On a lab server, which prints what it measures, and does not write the store.
    pub fn printed(options: &Options) -> Result<Self> {
        Self::new(options, Box::new(io::stdout()))
    }

    /// On the machine, where the store is. Without one nothing is kept.
    pub fn stored(options: &Options) -> Result<Self> {
        match options.store.as_deref() {
            Some(path) => Self::new(options, Box::new(go_on(path)?)),
            None => Self::new(options, Box::new(io::sink())),
        }
    }

    fn new(Options { commit, configuration, store, part }: &Options, out: Box<dyn Write>) -> Result<Self> {
        let lines = store.as_deref().map_or_else(|| Ok(Vec::new()), lines)?;
        let of_this = lines.into_iter().filter_map(|(header, line)| Some((header?, line)));
        let of_this = of_this.filter(|(header, _)| header.configuration == *configuration);
        Ok(Self {
            commit: commit.clone(),
            configuration: configuration.clone(),
            stored: of_this.map(|(header, line)| (header.cell, (line, header.commit))).collect(),
            out,
            left: part.cells.unwrap_or(usize::MAX),
            end: part.minutes.map(|minutes| Instant::now() + Duration::from_secs(minutes * 60)),
            missing: 0,
            failed: Vec::new(),
            retried: 0,
            measured_by: BTreeMap::new(),
        })
    }

    /// Was it measured before?
    pub fn has(&self, name: &str) -> bool {
        self.stored.contains_key(name)
    }

    /// Is nothing more to be measured now?
    pub fn is_over(&self) -> bool {
        self.left == 0 || self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// It is measured again, whether it was before or not.
    pub fn forget(&mut self, name: &str) {
        self.stored.remove(name);
    }

    /// Measures one and stores it, unless that was done before. None: it did not come about. `once` also says what people are shown of it.
    pub fn measure<T: Serialize + DeserializeOwned>(
        &mut self,
        name: &str,
        mut once: impl FnMut() -> Result<(T, String)>,
    ) -> Result<Option<T>> {
        if let Some((measured, commit)) = self.stored.get(name) {
            eprintln!("{name}: measured before, by {commit}");
            *self.measured_by.entry(commit.clone()).or_default() += 1;
            return Ok(Some(serde_json::from_str(measured).with_context(|| name.to_owned())?));
        }
        if self.is_over() {
            self.missing += 1;
            return Ok(None);
        }
        self.left -= 1;
        for is_last in [false, true] {
            let (began, _waiting) = (Instant::now(), waiting(name));
            match once().with_context(|| name.to_owned()) {
                Ok((measured, shown)) => {
                    eprintln!("{name}: {} s, {shown}", began.elapsed().as_secs());
                    self.put(name, began.elapsed(), &measured)?;
                    *self.measured_by.entry(self.commit.clone()).or_default() += 1;
                    return Ok(Some(measured));
                }
                Err(error) if is_last => {
                    eprintln!("{error:#}");
                    self.failed.push(name.to_owned());
                }
                Err(error) => {
                    eprintln!("{error:#}; once more");
                    self.retried += 1;
                    self.write(&serde_json::to_string(&Again { again: name.to_owned() })?)?;
                }
            }
        }
        Ok(None)
    }

    fn put(&mut self, name: &str, took: Duration, measured: &impl Serialize) -> Result<()> {
        let (commit, configuration) = (self.commit.clone(), self.configuration.clone());
        let (cell, took_ms, sha256) = (name.to_owned(), took.as_millis() as u64, String::new());
        let (header, measured) =
            (Header { cell, commit, configuration, took_ms, sha256 }, serde_json::to_string(measured)?);
        let header = Header { sha256: header.sum(&measured), ..header };
        self.write(&format!("{}\t{measured}", serde_json::to_string(&header)?))
    }

    fn write(&mut self, line: &str) -> Result<()> {
        self.out
            .write_all(format!("{line}\n").as_bytes())
            .and_then(|()| self.out.flush())
            .context("storing a cell")
    }

    /// An error if a cell did not come about.
    pub fn end(self) -> Result<()> {
        if self.missing > 0 {
            eprintln!("{} cells are left for the next run", self.missing);
        }
        ensure!(self.failed.is_empty(), "cells that did not come about: {}", self.failed.join("; "));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(path: &Path) -> Options {
        let [commit, configuration] = ["first", "one"].map(str::to_owned);
        Options { commit, configuration, store: Some(path.into()), part: Part::default() }
    }

    /// Which of these cells a run measures.
    fn run(options: &Options, names: &[&str]) -> Vec<String> {
        let (mut cells, mut measured) = (Cells::stored(options).expect("a store"), Vec::new());
        for name in names {
            let once = || {
                measured.push((*name).to_owned());
                Ok((name.len(), String::new()))
            };
            cells.measure(name, once).expect("stored");
        }
        cells.end().expect("all came about");
        measured
    }

    fn in_store(test: impl FnOnce(&Path)) {
        let directory = tempfile::tempdir().expect("a folder");
        test(&directory.path().join("cells.jsonl"));
    }

    #[test]
    fn a_cell_that_fails_is_tried_once_more_and_named() {
        in_store(|path| {
            let fails = |times: usize| {
                let (mut cells, mut tries) = (Cells::stored(&options(path)).expect("a store"), 0);
                cells.forget("a cell");
                let once = || {
                    tries += 1;
                    ensure!(tries > times, "no VM");
                    Ok((tries, String::new()))
                };
                let measured = cells.measure("a cell", once).expect("stored");
                (measured, tries, cells.end().err().map(|error| error.to_string()))
            };
            let failed = "cells that did not come about: a cell".to_owned();
            assert_eq!(
                [0, 1, 2, 3].map(fails),
                [
                    (Some(1), 1, None),
                    (Some(2), 2, None),
                    (None, 2, Some(failed.clone())),
                    (None, 2, Some(failed))
                ]
            );
            let raw = Raw::<usize>::read(path).expect("whole lines");
            assert_eq!((raw.lines, raw.again), (vec![2], vec!["a cell".to_owned(); 3]));
        });
    }

    #[test]
    fn a_run_that_was_cut_off_goes_on_whatever_the_commit_and_only_with_its_configuration() {
        in_store(|path| {
            assert_eq!(run(&options(path), &["a", "bb"]), ["a", "bb"]);
            let text = fs::read_to_string(path).expect("the store");
            fs::write(path, &text[..text.len() - 3]).expect("cut off");
            let later = Options { commit: "second".to_owned(), ..options(path) };
            assert_eq!(run(&later, &["a", "bb", "ccc"]), ["bb", "ccc"]);
            let raw = Raw::<usize>::read(path).expect("whole lines");
            assert_eq!(raw.lines, [1, 2, 3]);
            assert_eq!(raw.measured_by, [("first".to_owned(), 1), ("second".to_owned(), 2)].into());
            assert!(run(&later, &["a", "bb", "ccc"]).is_empty());
            let other = Options { configuration: "two".to_owned(), ..later };
            assert_eq!(run(&other, &["a", "bb"]), ["a", "bb"]);
        });
    }

    #[test]
    fn a_part_is_measured_now_and_the_rest_later() {
        in_store(|path| {
            let of = |cells, minutes| Options { part: Part { cells, minutes }, ..options(path) };
            assert_eq!(run(&of(Some(2), None), &["a", "b", "c"]), ["a", "b"]);
            assert!(run(&of(None, Some(0)), &["a", "b", "c"]).is_empty());
            assert_eq!(run(&of(Some(2), Some(1)), &["a", "b", "c"]), ["c"]);
        });
    }

    #[test]
    fn lines_are_checked_and_errors_name_them() {
        in_store(|path| {
            run(&options(path), &["a", "bb"]);
            let text = fs::read_to_string(path).expect("the store");
            let read = |text: &str| {
                fs::write(path, text).expect("a file");
                Raw::<usize>::read(path).map_err(|error| format!("{error:#}"))
            };
            for (from, to) in [("first", "other"), ("one", "two"), ("\t2", "\t3"), ("\"bb\"", "\"b\"")] {
                let error = read(&text.replace(from, to)).expect_err("changed");
                assert!(error.contains("cells.jsonl:") && error.contains("sha256"), "{error}");
            }
            let all = read(&format!("1\n{{\"again\":\"a cell\"}}\n{text}3")).expect("one was cut off");
            assert_eq!((all.lines, all.again), (vec![1, 1, 2], vec!["a cell".to_owned()]));
            assert!(read("1\nx\n").expect_err("no number").contains("cells.jsonl:2"));
            fs::remove_file(path).expect("the file");
            let error = Raw::<usize>::read(path).expect_err("no file").to_string();
            assert!(error.ends_with("cells.jsonl"), "{error}");
        });
    }
}
