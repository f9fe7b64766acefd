//! The difference between two contents of a page: the runs of bytes that changed.
//!
//! A run is its offset and its length, two bytes each, little endian, and then its bytes. Runs are in rising order and do
//! not overlap. Changes that are close to each other share a run, because a run costs four bytes itself.

use std::fmt;

/// Bytes of a run's offset and length.
const HEADER: usize = 4;
/// Equal bytes between two changes that are cheaper to send than another run. Equal words are skipped faster.
const GAP: usize = 8;

/// Why a difference cannot be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaError {
    /// It ends within a run.
    Truncated,
    /// The run that begins at this byte of the difference is empty, not behind the last one, or beyond the page.
    BadRun(usize),
}

impl fmt::Display for DeltaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => write!(f, "difference: ends within a run"),
            Self::BadRun(at) => {
                write!(f, "difference: byte {at}: run is empty, out of order or beyond the page")
            }
        }
    }
}

impl std::error::Error for DeltaError {}

/// Appends the difference from `base` to `page` to `out`. False if it would take more than `limit` bytes: then `out` is as
/// it was, and the whole page should be sent.
///
/// # Panics
/// If the two are not equally long, or longer than 65535 bytes.
pub fn encode(base: &[u8], page: &[u8], limit: usize, out: &mut Vec<u8>) -> bool {
    assert!(base.len() == page.len() && u16::try_from(page.len()).is_ok(), "two contents of one page");
    let before = out.len();
    let mut at = 0;
    while let Some(start) = first_change(base, page, at) {
        let end = end_of_run(base, page, start);
        if out.len() - before + HEADER + (end - start) > limit {
            out.truncate(before);
            return false;
        }
        out.extend_from_slice(&(start as u16).to_le_bytes());
        out.extend_from_slice(&((end - start) as u16).to_le_bytes());
        out.extend_from_slice(&page[start..end]);
        at = end;
    }
    true
}

/// The first byte from `at` on that differs.
fn first_change(base: &[u8], page: &[u8], mut at: usize) -> Option<usize> {
    while at + 64 <= page.len() && base[at..at + 64] == page[at..at + 64] {
        at += 64;
    }
    (at..page.len()).find(|at| base[*at] != page[*at])
}

/// The end of the run that starts at `start`.
fn end_of_run(base: &[u8], page: &[u8], start: usize) -> usize {
    let mut end = start + 1;
    let mut at = end;
    while at < page.len() && at - end < GAP {
        at += 1;
        if base[at - 1] != page[at - 1] {
            end = at;
        }
    }
    end
}

/// Applies a difference to the content that it starts from. All of it is checked before the first byte is changed.
///
/// # Errors
/// See [`DeltaError`]; `page` is as it was.
pub fn apply(delta: &[u8], page: &mut [u8]) -> Result<(), DeltaError> {
    visit(delta, page.len(), |_, _| {})?;
    visit(delta, page.len(), |start, bytes| page[start..start + bytes.len()].copy_from_slice(bytes))
}

fn visit(delta: &[u8], len: usize, mut run: impl FnMut(usize, &[u8])) -> Result<(), DeltaError> {
    let (mut at, mut behind) = (0, 0);
    while at < delta.len() {
        let header = delta.get(at..at + HEADER).ok_or(DeltaError::Truncated)?;
        let start = usize::from(u16::from_le_bytes([header[0], header[1]]));
        let count = usize::from(u16::from_le_bytes([header[2], header[3]]));
        if count == 0 || start < behind || start + count > len {
            return Err(DeltaError::BadRun(at));
        }
        let bytes = delta.get(at + HEADER..at + HEADER + count).ok_or(DeltaError::Truncated)?;
        run(start, bytes);
        behind = start + count;
        at += HEADER + count;
    }
    Ok(())
}
