//! What the next vnumad needs to take this one's channels over: a small file for each VM that has one.
//!
//! A record only names things; the channel itself is in the hypervisor. One that is lost or stale costs a
//! detach and an attach, nothing else.

use super::mask_records::check_version;
use crate::core::sanitize;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};
use tracing::warn;
use vnuma_channel::Identity;
use vnuma_process::own;

/// Longest record, in bytes.
const SIZE_LIMIT: u64 = 1 << 16;

/// What the name of a record that is set aside ends with.
const ASIDE: &str = ".before";

/// Layout of a record; another one is not understood.
const VERSION: u32 = 1;

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    channel: Identity,
}

/// Understands the text of a record, or says what is wrong with it.
pub fn parse_record(text: &str) -> Result<Identity, String> {
    check_version(text, VERSION)?;
    let record: Record = serde_json::from_str(text).map_err(|error| sanitize(&error.to_string()))?;
    Ok(record.channel)
}

/// The directory of records, one for each hypervisor process.
#[derive(Clone, Debug)]
pub(crate) struct ChannelRecords(PathBuf);

impl ChannelRecords {
    /// The records in `directory`.
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self(directory)
    }

    /// Removes the records of processes that have ended.
    pub(crate) fn tidy(&self) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let of_process =
                |name: &str| name.strip_suffix(".json").or(name.strip_suffix(ASIDE))?.parse::<i32>().ok();
            let pid = name.to_str().and_then(of_process);
            if let Some(pid) = pid.filter(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
                self.remove(pid);
                self.forget_aside(pid);
            }
        }
    }

    fn path(&self, pid: i32) -> PathBuf {
        self.0.join(format!("{pid}.json"))
    }

    fn aside(&self, pid: i32) -> PathBuf {
        self.0.join(format!("{pid}{ASIDE}"))
    }

    /// Keeps the record that a process has, if any, while another one is tried. It is not read, which may take long.
    pub(crate) fn set_aside(&self, pid: i32) {
        self.forget_aside(pid);
        // Mostly there is none. Without it the device of an earlier vnumad is lost, which costs a detach and an attach.
        let _ = fs::hard_link(self.path(pid), self.aside(pid));
    }

    /// The other one has failed: the process has the record that it had.
    pub(crate) fn give_back(&self, pid: i32) {
        if fs::rename(self.aside(pid), self.path(pid)).is_err() {
            self.remove(pid);
        }
    }

    /// What was set aside is of no use any more.
    pub(crate) fn forget_aside(&self, pid: i32) {
        let _ = fs::remove_file(self.aside(pid));
    }

    /// Writes the record of a channel, atomically.
    pub(crate) fn write(&self, pid: i32, channel: Identity) -> io::Result<()> {
        let text = serde_json::to_string(&Record { version: VERSION, channel })?;
        own::write(&self.path(pid), text.as_bytes())
    }

    /// Reads the record of a process.
    pub(crate) fn read(&self, pid: i32) -> io::Result<Identity> {
        let path = self.path(pid);
        let wrong = |what: String| io::Error::other(format!("{}: {what}", path.display()));
        let mut text = String::new();
        let file = own::open(&path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        file.take(SIZE_LIMIT).read_to_string(&mut text).map_err(|error| wrong(error.to_string()))?;
        parse_record(&text).map_err(wrong)
    }

    /// Removes the record of a process, if there is one.
    pub(crate) fn remove(&self, pid: i32) {
        let path = self.path(pid);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(path = %path.display(), %error, "cannot remove channel record");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As earlier vnumads have written it.
    fn identity_of(inode: u64) -> Identity {
        let vectors = [3, 4];
        let channel = serde_json::json!({
            "memory_device": 1, "memory_inode": inode, "guest_vectors": vectors, "host_vectors": vectors,
        });
        parse_record(&serde_json::json!({"version": 1, "channel": channel}).to_string()).expect("a record")
    }

    fn identity() -> Identity {
        identity_of(2)
    }

    #[test]
    fn a_record_is_read_as_written_and_goes() {
        let directory = tempfile::tempdir().expect("a directory");
        let records = ChannelRecords::new(directory.path().join("channels"));
        records.write(7, identity()).expect("written");
        records.write(7, identity()).expect("written again");
        assert_eq!(records.read(7).expect("read"), identity());
        records.remove(7);
        records.remove(7);
        assert!(records.read(7).is_err());
    }

    #[test]
    fn one_that_was_set_aside_is_given_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let records = ChannelRecords::new(directory.path().into());
        let other = identity_of(7);
        let attempt = |keep: bool| {
            records.set_aside(7);
            records.write(7, other.clone()).expect("written");
            if keep { records.forget_aside(7) } else { records.give_back(7) }
        };
        attempt(false);
        assert!(records.read(7).is_err(), "there was none");
        records.write(7, identity()).expect("written");
        attempt(false);
        assert_eq!(records.read(7).expect("read"), identity());
        attempt(true);
        assert_eq!(records.read(7).expect("read"), other);
        assert_eq!(std::fs::read_dir(directory.path()).expect("there").count(), 1, "nothing else stays");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let records = ChannelRecords::new(directory.path().into());
        let good = serde_json::to_string(&Record { version: 9, channel: identity() }).expect("text");
        let cases = [
            ("", "EOF"),
            ("{\"version\":1}", "missing field `channel`"),
            ("{\"version\":1,\"channel\":{\"x\":2}}", "unknown field `x`"),
            ("{\"version\":1,\"x\":2}", "unknown field `x`"),
            ("{\"version\":2,\"channels\":[]}", "version = 2: must be 1"),
            ("{\"version\":1,\"\\u001b[2J\":2}", r"unknown field `\u{1b}[2J`"),
            (&good, "version = 9: must be 1"),
            ("\u{1}", "expected value"),
        ];
        for (text, problem) in cases {
            fs::write(directory.path().join("7.json"), text).expect("written");
            let error = records.read(7).expect_err(text).to_string();
            assert!(error.contains("7.json: ") && error.contains(problem), "{text}: {error}");
        }
    }

    #[test]
    fn records_of_ended_processes_go_and_others_stay() {
        let directory = tempfile::tempdir().expect("a directory");
        let me = std::process::id().cast_signed();
        let ended = i32::MAX;
        for name in
            [format!("{me}.json"), format!("{ended}.json"), format!("{ended}.before"), "notes.txt".into()]
        {
            fs::write(directory.path().join(name), "x").expect("written");
        }
        ChannelRecords::new(directory.path().into()).tidy();
        let mut left: Vec<_> =
            fs::read_dir(&directory).expect("there").flatten().map(|e| e.file_name()).collect();
        left.sort();
        assert_eq!(left, [format!("{me}.json").as_str(), "notes.txt"]);
    }
}
