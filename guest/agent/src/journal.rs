//! What has been changed, and what was there before: written before each change, so that the next process can undo it.
//!
//! The directory is on a file system that ends with the machine. A journal of another boot counts for nothing, as all that it
//! names has ended with that. One process at a time may change it, by a lock that the kernel drops when that process ends,
//! however it ends.

use crate::core::ProcessId;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use vnuma_model::CpuSet;
use vnuma_process::{
    own,
    text::{sanitize_reason, sanitize_short},
};

/// Where it is.
pub const DIRECTORY: &str = "/run/vnuma-guest";
/// Layout; another one is not understood.
const VERSION: u32 = 1;
/// Longest journal, in bytes.
const SIZE_LIMIT: u64 = 64 << 20;
const FILE: &str = "journal.json";
const LOCK: &str = "lock";

/// A value that was written to a file or a property.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Value {
    /// What was there.
    pub former: String,
    /// What is there now, if nobody else has changed it.
    pub set: String,
}

/// A change.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Change {
    /// Affinities of the threads of a process.
    Threads {
        /// Its number.
        pid: i32,
        /// Its start.
        started: u64,
        /// What they were.
        former: CpuSet,
        /// What they are.
        set: CpuSet,
        /// Threads, each with its start, that had that affinity by themselves.
        own: BTreeMap<i32, u64>,
    },
    /// The cpuset of the control group of a process.
    Group {
        /// Its number.
        pid: i32,
        /// Its start.
        started: u64,
        /// The group, from the root.
        path: String,
        /// `cpuset.cpus`
        cpus: Value,
        /// `cpuset.mems`, if that was set.
        mems: Option<Value>,
    },
    /// Properties of the unit of a process.
    Unit {
        /// Its number.
        pid: i32,
        /// Its start.
        started: u64,
        /// The unit.
        unit: String,
        /// Its control group.
        path: String,
        /// `AllowedCPUs`
        cpus: Value,
        /// `AllowedMemoryNodes`, if that was set.
        mems: Option<Value>,
        /// Properties that had been set at run time before.
        drop_ins: Vec<String>,
    },
    /// CPUs that handle an interrupt.
    Interrupt {
        /// Which.
        irq: u32,
        /// Address of its device.
        device: String,
        /// What they were.
        former: CpuSet,
        /// What they are.
        set: CpuSet,
    },
}

impl Change {
    /// The process that it was made for.
    pub fn process(&self) -> Option<ProcessId> {
        match self {
            Self::Threads { pid, started, .. }
            | Self::Group { pid, started, .. }
            | Self::Unit { pid, started, .. } => Some(ProcessId { pid: *pid, started: *started }),
            Self::Interrupt { .. } => None,
        }
    }

    /// What makes no sense in it.
    fn wrong(&self) -> Option<&'static str> {
        let group = |path: &str| path.starts_with('/') && !path.split('/').any(|part| part == "..");
        if self.process().is_some_and(|id| id.pid <= 0) {
            return Some("not the number of a process");
        }
        match self {
            Self::Threads { former, set, .. } if former.is_empty() || set.is_empty() => Some("no CPUs"),
            Self::Interrupt { former, set, .. } if former.is_empty() || set.is_empty() => Some("no CPUs"),
            Self::Group { path, .. } | Self::Unit { path, .. } if !group(path) => {
                Some("not the path of a control group")
            }
            Self::Unit { unit, .. } if !is_unit(unit) => Some("not the name of a unit"),
            _ => None,
        }
    }
}

/// Longest name of a unit, in bytes.
const UNIT_NAME_LIMIT: usize = 255;

/// Is this the name of a unit that has processes?
pub fn is_unit(name: &str) -> bool {
    let known = name.ends_with(".service") || name.ends_with(".scope");
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b":-_.\\@".contains(&byte);
    known && name.len() <= UNIT_NAME_LIMIT && !name.starts_with(['-', '.']) && name.bytes().all(plain)
}

#[derive(Deserialize)]
struct Head {
    version: u32,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Content {
    version: u32,
    boot: String,
    changes: Vec<Change>,
}

/// Why there is no journal.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process has it.
    #[error("{}: another vnuma-guest is at work; stop that first", path.display())]
    Busy {
        /// The lock.
        path: PathBuf,
    },
    /// It makes no sense.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Understands the text of a journal of this boot, or says what is wrong with it. One of another boot is empty.
pub fn parse(text: &str, boot: &str) -> Result<Vec<Change>, String> {
    let wrong = |error: serde_json::Error| sanitize_reason(&error.to_string());
    // Another version may have other fields.
    let head: Head = serde_json::from_str(text).map_err(wrong)?;
    if head.version != VERSION {
        return Err(format!("version = {}: must be {VERSION}", head.version));
    }
    let content: Content = serde_json::from_str(text).map_err(wrong)?;
    if content.boot != boot {
        return Ok(Vec::new());
    }
    for (number, change) in content.changes.iter().enumerate() {
        if let Some(wrong) = change.wrong() {
            let shown = serde_json::to_string(change).unwrap_or_default();
            return Err(format!("change {}: {}: {wrong}", number + 1, sanitize_short(&shown)));
        }
    }
    Ok(content.changes)
}

/// The journal, held by this process.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    boot: String,
    changes: Vec<Change>,
    _lock: Flock<File>,
}

fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, JournalError> {
    result.map_err(|source| JournalError::File { path: path.to_owned(), source })
}

impl Journal {
    /// Takes it. `root` has the `/proc` of this boot.
    pub fn take(directory: &Path, root: &Path) -> Result<Self, JournalError> {
        at(directory, DirBuilder::new().recursive(true).mode(0o700).create(directory))?;
        at(directory, own::check_directory(directory))?;
        let path = directory.join(LOCK);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let lock =
            Flock::lock(at(&path, file)?, FlockArg::LockExclusiveNonblock).map_err(
                |(_, errno)| match errno {
                    nix::errno::Errno::EWOULDBLOCK => JournalError::Busy { path: path.clone() },
                    errno => JournalError::File { path: path.clone(), source: errno.into() },
                },
            )?;
        let (boot, changes) = (boot_of(root), read(directory, root)?);
        Ok(Self { directory: directory.to_owned(), boot, changes, _lock: lock })
    }

    /// What has been changed, in order.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// Writes that something is about to be changed.
    pub fn note(&mut self, change: Change) -> Result<(), JournalError> {
        self.changes.push(change);
        self.write().inspect_err(|_| drop(self.changes.pop()))
    }

    /// Writes that a change is undone.
    pub fn strike(&mut self, change: &Change) -> Result<(), JournalError> {
        self.changes.retain(|known| known != change);
        self.write()
    }

    fn write(&self) -> Result<(), JournalError> {
        let path = self.directory.join(FILE);
        if self.changes.is_empty() {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => at(&path, Err(error)),
                _ => Ok(()),
            };
        }
        let content = Content { version: VERSION, boot: self.boot.clone(), changes: self.changes.clone() };
        let text = at(&path, serde_json::to_string(&content).map_err(io::Error::other))?;
        at(&path, own::write(&path, text.as_bytes()))
    }
}

/// What has been changed, as the journal in `directory` says, also while another process holds it.
pub fn read(directory: &Path, root: &Path) -> Result<Vec<Change>, JournalError> {
    let path = directory.join(FILE);
    let file = match own::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(JournalError::File { path, source }),
    };
    let mut text = String::new();
    at(&path, file.take(SIZE_LIMIT).read_to_string(&mut text))?;
    parse(&text, &boot_of(root)).map_err(|reason| JournalError::Content { path, reason })
}

/// The kernel's name of this boot.
fn boot_of(root: &Path) -> String {
    crate::files::text(&root.join("proc/sys/kernel/random/boot_id")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(list: &str) -> CpuSet {
        list.parse().expect("a list")
    }

    fn interrupt(irq: u32) -> Change {
        Change::Interrupt { irq, device: "0000:01:00.0".into(), former: set("0-3"), set: set("0") }
    }

    #[test]
    fn what_was_noted_is_there_for_the_next_one_until_it_is_struck() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("run");
        let root = Path::new("/");
        let mut journal = Journal::take(&path, root).expect("taken");
        journal.note(interrupt(24)).expect("written");
        journal.note(interrupt(25)).expect("written");
        assert!(matches!(Journal::take(&path, root), Err(JournalError::Busy { .. })));
        assert_eq!(read(&path, root).expect("read"), [interrupt(24), interrupt(25)]);
        drop(journal);
        let mut next = Journal::take(&path, root).expect("the lock ends with its holder");
        assert_eq!(next.changes(), [interrupt(24), interrupt(25)]);
        next.strike(&interrupt(24)).expect("written");
        assert_eq!(read(&path, root).expect("read"), [interrupt(25)]);
        next.strike(&interrupt(25)).expect("written");
        assert_eq!(fs::read_dir(&path).expect("there").count(), 1, "the lock alone");
    }

    #[test]
    fn a_journal_of_another_boot_is_empty_and_a_wrong_one_is_named() {
        let text = |changes: &str| format!("{{\"version\":1,\"boot\":\"b\",\"changes\":[{changes}]}}");
        let good = r#"{"interrupt":{"irq":1,"device":"d","former":"0-1","set":"0"}}"#;
        assert_eq!(parse(&text(good), "b").expect("read").len(), 1);
        assert_eq!(parse(&text(good), "c"), Ok(Vec::new()));
        let group = |path: &str| {
            format!(
                r#"{{"group":{{"pid":1,"started":2,"path":"{path}","cpus":{{"former":"","set":"0"}},"mems":null}}}}"#
            )
        };
        assert_eq!(parse(&text(&group("/a")), "b").expect("read").len(), 1);
        for (changes, problem) in [
            (r#"{"interrupt":{"irq":1,"device":"d","former":"","set":"0"}}"#.to_owned(), "no CPUs"),
            (
                r#"{"threads":{"pid":0,"started":1,"former":"0","set":"0","own":{}}}"#.to_owned(),
                "not the number",
            ),
            (group("/a/../b"), "not the path"),
            (group("a"), "not the path"),
            (
                r#"{"interrupt":{"irq":1,"device":"d","former":"0","set":"0","x":1}}"#.to_owned(),
                "unknown field",
            ),
            (r#"{"nonsense":{}}"#.to_owned(), "unknown variant"),
        ] {
            let error = parse(&text(&changes), "b").expect_err(&changes);
            assert!(error.contains(problem), "{changes}: {error}");
        }
        assert!(parse("", "b").is_err());
        let error = parse("{\"version\":2,\"boot\":\"b\",\"changes\":[]}", "b").expect_err("version");
        assert_eq!(error, "version = 2: must be 1");
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(.|[0-9{}\",:-]|threads|group|unit|interrupt|version|boot){0,200}") {
            let _ = parse(&text, "b");
        }
    }
}
