//! The difference of two contents of a page.
//!
//! ```text
//! runs: { offset u16, length u16, bytes }, in rising order, with at least one unchanged byte between two of them
//! ```

use crate::{PAGE_SIZE, error::WireError, reader::Reader};

/// Largest encoded difference in bytes. A page that differs in more is sent whole.
pub const DELTA_LIMIT: usize = 2048;
/// Most runs of a difference.
pub const RUN_LIMIT: usize = DELTA_LIMIT / (RUN_HEADER + 1);
/// Bytes before those of a run.
const RUN_HEADER: usize = 4;
/// Unchanged bytes that are cheaper sent than skipped.
const GAP: usize = RUN_HEADER;

/// A difference that was checked: every run is inside a page, and they do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta<'a> {
    runs: &'a [u8],
}

impl<'a> Delta<'a> {
    /// Reads a difference, of at most [`DELTA_LIMIT`] bytes. An empty one says that nothing changed.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, WireError> {
        if bytes.len() > DELTA_LIMIT {
            return Err(WireError::Limit { field: "delta", value: bytes.len(), limit: DELTA_LIMIT });
        }
        let mut reader = Reader::new(bytes);
        let mut free = 0;
        while !reader.is_empty() {
            let offset = usize::from(reader.u16("delta.offset")?);
            let length = usize::from(reader.u16("delta.length")?);
            let value = offset as u64;
            if offset < free || offset >= PAGE_SIZE {
                let expected = "behind the run before it and inside a page";
                return Err(WireError::Value { field: "delta.offset", value, expected });
            }
            if length == 0 || length > PAGE_SIZE - offset {
                let expected = "at least 1 and inside a page";
                return Err(WireError::Value { field: "delta.length", value: length as u64, expected });
            }
            reader.take("delta.bytes", length)?;
            // Two runs that touch would be one.
            free = offset + length + 1;
        }
        Ok(Self { runs: bytes })
    }

    /// Its encoding.
    pub fn bytes(&self) -> &'a [u8] {
        self.runs
    }

    /// Offset and new bytes of each run.
    pub fn runs(&self) -> impl Iterator<Item = (usize, &'a [u8])> {
        let mut rest = self.runs;
        std::iter::from_fn(move || {
            let (header, after) = rest.split_first_chunk::<RUN_HEADER>()?;
            let offset = usize::from(u16::from_le_bytes([header[0], header[1]]));
            let length = usize::from(u16::from_le_bytes([header[2], header[3]]));
            let (run, after) = after.split_at_checked(length)?;
            rest = after;
            Some((offset, run))
        })
    }

    /// Turns the old content into the new one.
    pub fn apply(&self, page: &mut [u8; PAGE_SIZE]) {
        for (offset, run) in self.runs() {
            page[offset..offset + run.len()].copy_from_slice(run);
        }
    }
}

/// Appends the difference that turns `old` into `new`. False, and nothing appended, if it is longer than [`DELTA_LIMIT`].
pub fn diff(old: &[u8; PAGE_SIZE], new: &[u8; PAGE_SIZE], out: &mut Vec<u8>) -> bool {
    let begin = out.len();
    let mut at = 0;
    while let Some(start) = next_difference(old, new, at) {
        let mut end = start + 1;
        // The run goes on over gaps that are not worth a run of their own.
        while let Some(next) = next_difference(old, new, end).filter(|next| *next - end <= GAP) {
            end = next + 1;
        }
        if out.len() - begin + RUN_HEADER + (end - start) > DELTA_LIMIT {
            out.truncate(begin);
            return false;
        }
        out.extend((start as u16).to_le_bytes());
        out.extend(((end - start) as u16).to_le_bytes());
        out.extend(&new[start..end]);
        at = end;
    }
    true
}

/// First byte at or behind `from` that differs, by words where that is possible.
fn next_difference(old: &[u8; PAGE_SIZE], new: &[u8; PAGE_SIZE], from: usize) -> Option<usize> {
    const WORD: usize = 32;
    let mut at = from;
    while at < PAGE_SIZE {
        if at.is_multiple_of(WORD) && old[at..at + WORD] == new[at..at + WORD] {
            at += WORD;
        } else if old[at] == new[at] {
            at += 1;
        } else {
            return Some(at);
        }
    }
    None
}
