//! What the guest program says of the pages it touched. The stream comes from a
//! guest, so the reader trusts none of it: lengths are bounded and an unknown
//! kind ends the reading.

use std::io::{self, Read, Write};

/// Pages that one record may hold: what `PIPE_BUF`, 4096 bytes, has room for.
pub const MAX_PAGES: usize = (4096 - HEADER_BYTES) / PAGE_BYTES;
const MAGIC: u16 = 0x564e;
/// In place of an address: the page was not mapped when its address was read.
pub const NOT_PRESENT: u64 = 0;
const HEADER_BYTES: usize = 12;
const PAGE_BYTES: usize = 24;

/// What the pages of a record are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Allocated a moment ago by first touch.
    Fresh,
    /// Allocated long ago, still in use: what AutoNUMA may migrate.
    Resident,
}

/// One page and when it was touched, in ticks of the guest's time stamp counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Before the first touch.
    pub before_tsc: u64,
    /// After it.
    pub after_tsc: u64,
    /// Guest physical address, or [`NOT_PRESENT`].
    pub gpa: u64,
}

/// Pages that one vCPU touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// What they are.
    pub kind: Kind,
    /// The vCPU.
    pub apic_id: u32,
    /// At most [`MAX_PAGES`].
    pub pages: Vec<Page>,
}

impl Record {
    /// Writes the record in one piece.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.pages.len() * PAGE_BYTES);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend(match self.kind {
            Kind::Fresh => 1u16.to_le_bytes(),
            Kind::Resident => 2u16.to_le_bytes(),
        });
        bytes.extend(self.apic_id.to_le_bytes());
        bytes.extend((self.pages.len() as u32).to_le_bytes());
        for page in &self.pages {
            bytes.extend(page.before_tsc.to_le_bytes());
            bytes.extend(page.after_tsc.to_le_bytes());
            bytes.extend(page.gpa.to_le_bytes());
        }
        out.write_all(&bytes)
    }

    /// Reads the next record; none at the end of the stream.
    pub fn read(input: &mut impl Read) -> io::Result<Option<Self>> {
        let mut header = [0u8; HEADER_BYTES];
        if input.read(&mut header[..1])? == 0 {
            return Ok(None);
        }
        input.read_exact(&mut header[1..])?;
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let (magic, kind) = (u16_at(&header, 0), u16_at(&header, 2));
        if magic != MAGIC {
            return Err(invalid(format!("record starts with {magic:#x}, expected {MAGIC:#x}")));
        }
        let kind = match kind {
            1 => Kind::Fresh,
            2 => Kind::Resident,
            other => return Err(invalid(format!("record of unknown kind {other}"))),
        };
        let count = u32_at(&header, 8) as usize;
        if count > MAX_PAGES {
            return Err(invalid(format!("record of {count} pages, at most {MAX_PAGES} are allowed")));
        }
        let mut body = vec![0u8; count * PAGE_BYTES];
        input.read_exact(&mut body)?;
        let pages = body
            .chunks_exact(PAGE_BYTES)
            .map(|page| Page {
                before_tsc: u64_at(page, 0),
                after_tsc: u64_at(page, 8),
                gpa: u64_at(page, 16),
            })
            .collect();
        Ok(Some(Self { kind, apic_id: u32_at(&header, 4), pages }))
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_record_reads_back_as_it_was_written(
            fresh: bool,
            apic_id: u32,
            pages in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..=MAX_PAGES),
        ) {
            let pages = pages
                .into_iter()
                .map(|(before_tsc, after_tsc, gpa)| Page { before_tsc, after_tsc, gpa })
                .collect();
            let record = Record { kind: if fresh { Kind::Fresh } else { Kind::Resident }, apic_id, pages };
            let mut bytes = Vec::new();
            record.write(&mut bytes).unwrap();
            let mut input = bytes.as_slice();
            prop_assert_eq!(Record::read(&mut input).unwrap(), Some(record));
            prop_assert_eq!(Record::read(&mut input).unwrap(), None);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let mut input = bytes.as_slice();
            while let Ok(Some(_)) = Record::read(&mut input) {}
        }
    }

    #[test]
    fn a_record_that_claims_too_many_pages_is_refused() {
        let mut bytes = Vec::new();
        Record { kind: Kind::Fresh, apic_id: 0, pages: vec![] }.write(&mut bytes).unwrap();
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = Record::read(&mut bytes.as_slice()).unwrap_err();
        assert!(error.to_string().contains("4294967295 pages"), "{error}");
    }
}
