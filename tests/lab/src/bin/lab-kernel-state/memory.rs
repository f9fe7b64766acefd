//! The memory of the running kernel by its addresses, and the addresses by its symbols.

use anyhow::{Context, Result, ensure};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

const ELF_MAGIC: &[u8] = b"\x7fELF\x02\x01";
const LOADED: u32 = 1;
const HEADER: usize = 64;
const SEGMENT: usize = 56;
/// More than the kernel has ranges of memory.
const MOST_SEGMENTS: usize = 4096;

/// Where bytes come from: `/proc/kcore`, or a test.
pub trait Bytes {
    /// Reads all of `into` at that offset.
    fn read_at(&self, into: &mut [u8], offset: u64) -> std::io::Result<()>;
}

impl Bytes for File {
    fn read_at(&self, into: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.read_exact_at(into, offset)
    }
}

struct Segment {
    address: u64,
    size: u64,
    offset: u64,
}

/// The kernel's memory, as an ELF file that is laid out as `/proc/kcore` is.
pub struct Memory {
    bytes: Box<dyn Bytes>,
    segments: Vec<Segment>,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut found = [0; N];
    if let Some(part) = bytes.get(at..at + N) {
        found.copy_from_slice(part);
    }
    found
}

impl Memory {
    /// Reads where the segments are.
    pub fn open(bytes: Box<dyn Bytes>) -> Result<Self> {
        let mut header = [0; HEADER];
        bytes.read_at(&mut header, 0).context("kcore: header")?;
        ensure!(header.starts_with(ELF_MAGIC), "kcore: no ELF file of 64 bits, little endian");
        let table = u64::from_le_bytes(number(&header, 32));
        let size = usize::from(u16::from_le_bytes(number(&header, 54)));
        let count = usize::from(u16::from_le_bytes(number(&header, 56)));
        ensure!(size == SEGMENT, "kcore: e_phentsize {size}, expected {SEGMENT}");
        ensure!(count <= MOST_SEGMENTS, "kcore: e_phnum {count}, at most {MOST_SEGMENTS}");
        let mut all = vec![0; count * SEGMENT];
        bytes.read_at(&mut all, table).context("kcore: program headers")?;
        let field = |one: &[u8], at| u64::from_le_bytes(number(one, at));
        let segments = all.chunks_exact(SEGMENT);
        let loaded = segments.filter(|one| u32::from_le_bytes(number(one, 0)) == LOADED);
        let segments = loaded
            .map(|one| Segment { offset: field(one, 8), address: field(one, 16), size: field(one, 40) })
            .collect();
        Ok(Self { bytes, segments })
    }

    /// Reads so many bytes, all in one segment.
    pub fn read(&self, address: u64, length: u64) -> Result<Vec<u8>> {
        let inside = |one: &&Segment| {
            address.checked_sub(one.address).is_some_and(|from| from < one.size && length <= one.size - from)
        };
        let segment = self.segments.iter().find(inside);
        let segment = segment.with_context(|| format!("no memory at {address:#x}, {length} bytes"))?;
        let offset = segment.offset.checked_add(address - segment.address);
        let offset = offset.with_context(|| format!("kcore: p_offset {:#x}", segment.offset))?;
        let mut found = vec![0; length as usize];
        let read = self.bytes.read_at(&mut found, offset);
        read.with_context(|| format!("memory at {address:#x}, {length} bytes"))?;
        Ok(found)
    }
}

/// `/proc/kallsyms`, without symbols of modules.
pub struct Symbols {
    addresses: HashMap<&'static str, u64>,
    /// Names that there is more than one of.
    several: HashSet<&'static str>,
}

impl Symbols {
    /// Lines of an address, a letter and a name.
    pub fn parse(text: &'static str) -> Result<Self> {
        let (mut addresses, mut several) = (HashMap::with_capacity(text.len() / 40), HashSet::new());
        for line in text.lines() {
            let parts =
                line.split_once(' ').and_then(|(address, rest)| Some((address, rest.split_once(' ')?.1)));
            let (address, name) = parts.with_context(|| format!("kallsyms: line \"{line}\""))?;
            if name.ends_with(']') {
                continue;
            }
            let address =
                u64::from_str_radix(address, 16).with_context(|| format!("kallsyms: line \"{line}\""))?;
            if addresses.insert(name, address).is_some_and(|other| other != address) {
                several.insert(name);
            }
        }
        // All are 0 for who may not see them.
        ensure!(
            addresses.values().any(|address| *address != 0),
            "kallsyms: no addresses, which needs root and kernel.kptr_restrict below 2"
        );
        Ok(Self { addresses, several })
    }

    /// The address of what there is one of by that name; none if there is none.
    pub fn find(&self, name: &str) -> Result<Option<u64>> {
        ensure!(!self.several.contains(name), "symbol \"{name}\": there are several of that name");
        Ok(self.addresses.get(name).copied())
    }

    /// What begins at an address.
    pub fn name(&self, address: u64) -> Option<&str> {
        let mut names: Vec<&str> =
            self.addresses.iter().filter(|(_, other)| **other == address).map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.first().copied()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::io::{Error, ErrorKind};

    impl Bytes for Vec<u8> {
        fn read_at(&self, into: &mut [u8], offset: u64) -> std::io::Result<()> {
            let end = offset as usize + into.len();
            let found =
                self.get(offset as usize..end).ok_or_else(|| Error::from(ErrorKind::UnexpectedEof))?;
            into.copy_from_slice(found);
            Ok(())
        }
    }

    /// A kcore with this memory at this address.
    pub fn kcore(address: u64, memory: &[u8]) -> Vec<u8> {
        let mut file = vec![0; HEADER + 2 * SEGMENT];
        file[..6].copy_from_slice(ELF_MAGIC);
        file[32] = HEADER as u8;
        file[54] = SEGMENT as u8;
        file[56] = 2;
        let data = file.len() as u64;
        // The first is a note, which holds no memory.
        file[HEADER] = 4;
        let one = &mut file[HEADER + SEGMENT..];
        one[0] = 1;
        one[8..16].copy_from_slice(&data.to_le_bytes());
        one[16..24].copy_from_slice(&address.to_le_bytes());
        one[40..48].copy_from_slice(&(memory.len() as u64).to_le_bytes());
        file.extend(memory);
        file
    }

    #[test]
    fn memory_is_read_within_a_segment_only() {
        let memory = Memory::open(Box::new(kcore(0xffff_8000, &[1, 2, 3, 4]))).unwrap();
        assert_eq!(memory.read(0xffff_8001, 3).unwrap(), [2, 3, 4]);
        for (address, length) in
            [(0xffff_8001, 4), (0xffff_7fff, 2), (0, 1), (u64::MAX, 2), (0xffff_8000, u64::MAX)]
        {
            let error = format!("{:#}", memory.read(address, length).unwrap_err());
            assert!(error.starts_with("no memory at 0x"), "{error}");
        }
    }

    #[test]
    fn a_kcore_that_is_none_is_refused() {
        let good = kcore(0, &[0]);
        for (at, value) in [(0, 0), (4, 1), (54, 57), (57, 0xff), (33, 0xff)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(Memory::open(Box::new(bad)).is_err(), "{at}");
        }
        assert!(Memory::open(Box::new(good[..HEADER - 1].to_vec())).is_err());
    }

    #[test]
    fn symbols_that_there_are_several_of_are_no_answer() {
        let text = "0000000000000000 A zero\n00000000ffff1000 D one\n00000000ffff2000 d two\n00000000ffff3000 d two\n\
                    00000000ffff1000 T same\n00000000ffff4000 d three\t[module]\n";
        let symbols = Symbols::parse(text).unwrap();
        assert_eq!((symbols.find("one").unwrap(), symbols.find("three").unwrap()), (Some(0xffff_1000), None));
        assert_eq!((symbols.find("zero").unwrap(), symbols.find("o").unwrap()), (Some(0), None));
        assert_eq!((symbols.name(0xffff_1000), symbols.name(0xffff_1001)), (Some("one"), None));
        assert_eq!(
            symbols.find("two").unwrap_err().to_string(),
            "symbol \"two\": there are several of that name"
        );
        for bad in ["", "0000000000000000 D one\n0000000000000000 D two\n", "1 D\n", "x D one\n"] {
            assert!(Symbols::parse(bad).is_err(), "{bad}");
        }
    }
}
