//! Bounded reading of small files below a root.

use super::SysfsError;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};
use vnuma_model::CpuSet;

/// Longest file read. A distance row of 1024 nodes has 4 KiB, a CPU list of 8192 single numbers 40 KiB, a node's meminfo 2 KiB.
const FILE_LIMIT: usize = 64 * 1024;

/// Most files are shorter: with room for it at once, one is read in one piece.
const USUAL_SIZE: usize = 4096;

/// Most entries of one directory.
const ENTRY_LIMIT: usize = 65_536;

/// A directory that holds `sys` and `proc`.
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Path of a file, for reading and for messages.
    pub(super) fn path(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// A file's text, or `None` if there is no such file.
    pub(super) fn text(&self, path: &Path) -> Result<Option<String>, SysfsError> {
        let failed = |source| SysfsError::Read { path: path.to_owned(), source };
        let Some(file) = open(path)? else { return Ok(None) };
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(SysfsError::NotAFile { path: path.to_owned() });
        }
        let mut bytes = Vec::with_capacity(USUAL_SIZE);
        if let Err(error) = file.take(FILE_LIMIT as u64 + 1).read_to_end(&mut bytes) {
            // A CPU or device that goes away between open and read.
            return if absent(&error) { Ok(None) } else { Err(failed(error)) };
        }
        if bytes.len() > FILE_LIMIT {
            return Err(SysfsError::TooLong { path: path.to_owned(), limit: FILE_LIMIT });
        }
        // Some kernels, old and new, count the end of their string to lists of CPUs and nodes.
        let length = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        bytes.truncate(length);
        String::from_utf8(bytes)
            .map(Some)
            .map_err(|error| SysfsError::value(path, &String::from_utf8_lossy(error.as_bytes()), "not UTF-8"))
    }

    /// The beginning of a long file, up to its last whole line; `None` if there is no such file.
    pub(super) fn beginning(&self, path: &Path) -> Result<Option<String>, SysfsError> {
        const LIMIT: u64 = 1 << 20;
        let failed = |source| SysfsError::Read { path: path.to_owned(), source };
        let Some(file) = open(path)? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.take(LIMIT).read_to_end(&mut bytes).map_err(failed)?;
        bytes.truncate(bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1));
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// A file's text as `parse` understands it.
    pub(super) fn parsed<T, E: ToString>(
        &self,
        path: &Path,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<Option<T>, SysfsError> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        parse(&text).map(Some).map_err(|reason| SysfsError::value(path, &text, reason))
    }

    /// A set of CPUs (or nodes) from `NAME_list`'s list format or, in copies that lack it,
    /// `NAME_map`'s masks.
    pub(super) fn set(&self, list: &Path, map: &Path) -> Result<Option<CpuSet>, SysfsError> {
        match self.parsed(list, str::parse::<CpuSet>)? {
            Some(set) => Ok(Some(set)),
            None => self.parsed(map, super::parse::cpu_map),
        }
    }

    /// Names in a directory, sorted; none if there is no such directory. A name that is
    /// not UTF-8 is nothing that the kernel made and is left out.
    pub(super) fn names(&self, path: &Path) -> Result<Vec<String>, SysfsError> {
        let failed = |source| SysfsError::Read { path: path.to_owned(), source };
        let entries = match fs::read_dir(path) {
            Ok(entries) => entries,
            Err(error) if absent(&error) => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut names = Vec::new();
        for (count, entry) in entries.enumerate() {
            if count == ENTRY_LIMIT {
                return Err(SysfsError::TooMany { path: path.to_owned(), limit: ENTRY_LIMIT });
            }
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The last part of where a link leads; `None` if there is none, or something else in its place.
    pub(super) fn link_name(&self, path: &Path) -> Option<String> {
        Some(fs::read_link(path).ok()?.file_name()?.to_str()?.to_owned())
    }

    /// Where a link leads; `None` if there is none.
    pub(super) fn link(&self, path: &Path) -> Option<PathBuf> {
        fs::read_link(path).ok()
    }

    /// Numbers of the entries called `PREFIX<number>`, rising.
    pub(super) fn numbered(&self, path: &Path, prefix: &str) -> Result<Vec<u32>, SysfsError> {
        let number = |name: &String| {
            let digits = name.strip_prefix(prefix)?;
            digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
        };
        let mut numbers: Vec<u32> = self.names(path)?.iter().filter_map(number).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }
}

/// Opens a file to be read; `None` if there is none.
fn open(path: &Path) -> Result<Option<File>, SysfsError> {
    // O_NONBLOCK: opening a FIFO would wait for its writer.
    match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if absent(&error) => Ok(None),
        Err(source) => Err(SysfsError::Read { path: path.to_owned(), source }),
    }
}

/// Not there, or gone while it was read.
fn absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || error.raw_os_error() == Some(libc::ENODEV)
}
