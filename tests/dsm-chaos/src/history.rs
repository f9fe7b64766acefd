//! What a node has done, in a file that outlives it.
//!
//! Each word of a page belongs to one node, and only that one writes it: a number that rises by one. So what a read may
//! return follows from the times alone.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
};

/// Bytes of a record.
pub const RECORD: usize = 32;

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The word was read.
    Read,
    /// A write is about to begin: it may be seen from now on.
    Writes,
    /// The write is done.
    Wrote,
    /// An access was refused: the page is lost, or the node has stopped.
    Refused,
}

const KINDS: [Kind; 4] = [Kind::Read, Kind::Writes, Kind::Wrote, Kind::Refused];

/// A line of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What was done.
    pub kind: Kind,
    /// To whose word.
    pub owner: u8,
    /// Of which page.
    pub page: u16,
    /// What was read or written.
    pub value: u64,
    /// When it began, in nanoseconds of CLOCK_MONOTONIC.
    pub begin_ns: u64,
    /// When it ended.
    pub end_ns: u64,
}

impl Record {
    fn encode(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[0] = self.kind as u8;
        bytes[1] = self.owner;
        bytes[2..4].copy_from_slice(&self.page.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.value.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.begin_ns.to_le_bytes());
        bytes[24..].copy_from_slice(&self.end_ns.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; RECORD]) -> Option<Self> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Some(Self {
            kind: *KINDS.get(usize::from(bytes[0]))?,
            owner: bytes[1],
            page: u16::from_le_bytes([bytes[2], bytes[3]]),
            value: word(8),
            begin_ns: word(16),
            end_ns: word(24),
        })
    }
}

/// Takes records. Each is in the file when [`Self::add`] returns, also if the process is killed then.
#[derive(Debug)]
pub struct History {
    file: File,
}

impl History {
    /// A new file.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::create_new(path)? })
    }

    /// Appends a record.
    pub fn add(&mut self, record: &Record) -> io::Result<()> {
        self.file.write_all(&record.encode())
    }

    /// What a file has. A record that its writer could not finish is left out.
    pub fn read(path: &Path) -> io::Result<Vec<Record>> {
        let bytes = std::fs::read(path)?;
        let record = |bytes: &[u8; RECORD]| Record::decode(bytes).ok_or(io::ErrorKind::InvalidData.into());
        bytes.as_chunks::<RECORD>().0.iter().map(record).collect()
    }
}

/// The value of a word after so many writes of its owner: the number, and a code that no other word has.
/// Before the first it is 0.
pub fn value(owner: u8, page: u16, sequence: u32) -> u64 {
    if sequence == 0 {
        return 0;
    }
    let mut code = u64::from(sequence) << 32 | u64::from(page) << 8 | u64::from(owner) | 1 << 24;
    code = (code ^ code >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    code = (code ^ code >> 32).wrapping_mul(0x94d0_49bb_1331_11eb);
    u64::from(sequence) << 32 | code >> 32
}

/// After how many writes of its owner the word has this value; none if it never has it.
pub fn sequence_of(owner: u8, page: u16, found: u64) -> Option<u32> {
    let sequence = (found >> 32) as u32;
    (value(owner, page, sequence) == found).then_some(sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_belong_to_one_word_and_one_write() {
        for (owner, page, sequence) in [(0, 0, 0), (0, 0, 1), (3, 9, 7), (3, 9, u32::MAX)] {
            let found = value(owner, page, sequence);
            assert_eq!(sequence_of(owner, page, found), Some(sequence));
            if sequence > 0 {
                assert_eq!(
                    [sequence_of(owner + 1, page, found), sequence_of(owner, page + 1, found)],
                    [None; 2]
                );
                assert_eq!(sequence_of(owner, page, found ^ 1), None);
                assert_eq!(sequence_of(owner, page, found ^ 1 << 40), None);
            }
        }
    }

    #[test]
    fn a_history_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("history");
        let record =
            |kind| Record { kind, owner: 3, page: 700, value: 1 << 60 | 5, begin_ns: 1 << 50, end_ns: 9 };
        let mut history = History::create(&path).expect("created");
        for kind in KINDS {
            history.add(&record(kind)).expect("added");
        }
        // Killed in the middle of a record.
        history.file.write_all(&[1; RECORD - 1]).expect("written");
        assert_eq!(History::read(&path).expect("read"), KINDS.map(record));
    }
}
