//! The file in which reservations outlive vnumad.
//!
//! It is JSON, version 1:
//!
//! ```json
//! {"version": 1, "boot_id": "…", "next_id": 8,
//!  "reservations": [{"id": 7, "state": {"waiting": {"until_ns": 61000000000}}, "placement": {…}}]}
//! ```
//!
//! A file of an earlier boot holds nothing: its VMs are gone. Another version is refused, and so is a file that contradicts
//! itself, such as one CPU in two reservations. What is read here can have been written by anybody who could write the file:
//! every refusal names the field and the value.
//!
//! To change the format: raise [`VERSION`], and read the old one for as long as a host can run both.

use super::{Book, LIFETIMES_NS, MAX_RESERVATIONS, Reservation, State};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// Longest file, bytes. 4096 reservations of small VMs have 2 MiB.
pub const MAX_BYTES: usize = 16 << 20;
/// Longest piece of a file that a message repeats.
const MAX_SHOWN: usize = 200;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    version: u32,
    boot_id: String,
    next_id: u64,
    reservations: Vec<Reservation>,
}

/// Read first, so that another version is not taken for a broken file.
#[derive(Deserialize)]
struct Head {
    version: u32,
    boot_id: String,
}

/// Why a file of reservations was refused.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{}: {field}: {reason}", path.display())]
pub struct FileError {
    /// The file.
    pub path: PathBuf,
    /// The field.
    pub field: String,
    /// What is wrong with its value.
    pub reason: String,
}

/// Of foreign text the beginning, with everything escaped that would disturb a terminal or a log.
fn shown(text: &str) -> String {
    let rest = if text.chars().nth(MAX_SHOWN).is_some() { "…" } else { "" };
    let plain = |c: char| if c.is_control() { c.escape_debug().collect() } else { c.to_string() };
    text.chars().take(MAX_SHOWN).map(plain).collect::<String>() + rest
}

/// A text to write.
pub fn print(book: &Book, boot_id: &str) -> String {
    let content = Content {
        version: VERSION,
        boot_id: boot_id.to_owned(),
        next_id: book.next_id,
        reservations: book.all().cloned().collect(),
    };
    // Maps with keys that are no text are the only thing that JSON has not.
    serde_json::to_string(&content).unwrap_or_default() + "\n"
}

/// Reads what [`print`] wrote, in this boot or an earlier one. `path` is for messages.
pub fn parse(path: &Path, text: &str, boot_id: &str, now_ns: u64) -> Result<Book, FileError> {
    let wrong = |field: &str, reason: String| {
        let (field, reason) = (shown(field), shown(&reason));
        FileError { path: path.to_owned(), field, reason }
    };
    if text.len() > MAX_BYTES {
        return Err(wrong("size", format!("{} bytes: expected at most {MAX_BYTES}", text.len())));
    }
    let unreadable = |error: serde_path_to_error::Error<serde_json::Error>| {
        wrong(&error.path().to_string(), error.inner().to_string())
    };
    let head: Head = serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_str(text))
        .map_err(unreadable)?;
    if head.version != VERSION {
        return Err(wrong("version", format!("{}: expected {VERSION}", head.version)));
    }
    if head.boot_id != boot_id {
        return Ok(Book::default());
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let content: Content = serde_path_to_error::deserialize(&mut deserializer).map_err(unreadable)?;
    deserializer.end().map_err(|error| wrong("end of file", error.to_string()))?;
    let next_id = content.next_id;
    let reservations = check(content, now_ns).map_err(|(field, reason)| wrong(&field, reason))?;
    Ok(Book { next_id, reservations })
}

/// The fields agree with each other, or a field and what is wrong with it.
fn check(content: Content, now_ns: u64) -> Result<BTreeMap<u64, Reservation>, (String, String)> {
    let count = content.reservations.len();
    if count > MAX_RESERVATIONS {
        return Err(("reservations".into(), format!("{count}: expected at most {MAX_RESERVATIONS}")));
    }
    let mut names = BTreeSet::new();
    let mut cpus = BTreeSet::new();
    let mut devices = BTreeSet::new();
    let mut reservations = BTreeMap::new();
    for (at, reservation) in content.reservations.into_iter().enumerate() {
        let field = |name: &str| format!("reservations[{at}].{name}");
        let Reservation { id, state, placement } = &reservation;
        if *id >= content.next_id || reservations.contains_key(id) {
            let reason = format!("{id}: expected one below next_id {} that no other has", content.next_id);
            return Err((field("id"), reason));
        }
        let latest = now_ns.saturating_add(*LIFETIMES_NS.end());
        match *state {
            State::Waiting { until_ns } if until_ns > latest => {
                let reason = format!("{until_ns}: expected at most an hour from now, {latest}");
                return Err((field("state.waiting.until_ns"), reason));
            }
            State::Held { pid, .. } if pid <= 0 => {
                return Err((field("state.held.pid"), format!("{pid}: expected the number of a process")));
            }
            _ => {}
        }
        placement.check().map_err(|(name, reason)| (field(&format!("placement.{name}")), reason))?;
        if !names.insert(placement.name.clone()) {
            return Err((field("placement.name"), format!("{}: another reservation has it", placement.name)));
        }
        if let Some(pin) = placement.pins().find(|pin| !cpus.insert(pin.cpu)) {
            return Err((field("placement.guest_nodes"), format!("CPU {}: reserved twice", pin.cpu)));
        }
        if let Some(device) = placement.devices.iter().find(|device| !devices.insert(device.address.clone()))
        {
            return Err((field("placement.devices"), format!("{}: reserved twice", device.address)));
        }
        reservations.insert(*id, reservation);
    }
    Ok(reservations)
}
