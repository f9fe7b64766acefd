//! In the guest: a program on vCPU 0, whose memory is on guest node 0. It reads a line from its standard input, does what it says,
//! and answers with a line of JSON.
//!
//! | line | what | answer |
//! |---|---|---|
//! | `stream MIB` | maps memory for STREAM anew and writes it | where it is, `[first byte, length]` of guest physical memory |
//! | `local MIB` | the same, of whichever node the kernel takes for a vCPU of guest node 0 | the same |
//! | `pass` | a pass of STREAM's triad: one word of each line | operations |
//! | `store MIB` | the same as `stream`, for a table of records, which it fills | the same |
//! | `lookups` | a pass of the table: finds records by their keys | operations |
//! | `end` | gives that memory up | 0 |
//! | `take MIB` | maps a chunk of memory and writes a word of each line | lines |
//! | `rewrite N` | writes the Nth chunk again, with other words | lines |
//! | `disk MIB` | reads so much more of the guest's disk, which stays in the page cache | bytes |
//! | `read` | reads a word of each line of all that it has taken | lines |
//! | `drop` | gives up all of that, and the page cache | 0 |

use crate::{committed::STREAM_MIB, store::Store};
use anyhow::{Context, Result, bail};
use lab_count::load::Memory;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::{
    fs::{self, File},
    io::{BufRead, Read, Seek, Write},
    num::NonZeroUsize,
};
use vnuma_bench_common::{
    frames::{frames, ranges},
    host::affine,
};

/// Words of a line of the caches, and of a page.
const LINE: usize = 8;
const PAGE: usize = 512;
/// The guest's root disk.
const DISK: &str = "/dev/vda";
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
/// Guest node and vCPU of everything.
const NODE: usize = 0;

struct Load {
    stream: Option<Memory>,
    store: Option<Store>,
    chunks: Vec<Memory>,
    disk: Option<File>,
    /// Bytes of the disk that were read, since its beginning.
    read: Vec<u8>,
}

/// Serves its standard input.
pub fn run() -> Result<()> {
    affine(0, &[NODE as u32])?;
    let mut load = Load { stream: None, store: None, chunks: Vec::new(), disk: None, read: vec![0; 1 << 20] };
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = load.answer(&line).with_context(|| line.clone())?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

/// In huge pages of the guest as far as it has any.
fn map(mib: usize, node: Option<usize>) -> Result<Memory> {
    let map = |huge| Memory::map(mib << 20, node, huge);
    map(true).or_else(|_| map(false)).with_context(|| format!("mapping {mib} MiB"))
}

fn write(memory: &mut Memory, value: usize) -> usize {
    let lines = memory.words().chunks_mut(LINE);
    let count = lines.len();
    lines.for_each(|line| line[0] = value);
    count
}

/// One word of each line: enough to bring the line from memory.
fn read(memory: &mut Memory) -> usize {
    let lines = memory.words().chunks(LINE);
    let count = lines.len();
    std::hint::black_box(lines.fold(0_usize, |sum, line| sum.wrapping_add(line[0])));
    count
}

/// c = a + 3 b, with a word of each line; how many. It goes through a page of one array after the other: how soon the caches see
/// that lines follow each other does then not depend on where the arrays lie.
fn triad(memory: &mut Memory) -> usize {
    let words = memory.words();
    let third = words.len() / 3 / PAGE * PAGE;
    let (a, rest) = words.split_at_mut(third);
    let (b, c) = rest.split_at_mut(third);
    for ((a, b), c) in a.chunks(PAGE).zip(b.chunks(PAGE)).zip(c.chunks_mut(PAGE)) {
        let mut sums = [0_usize; PAGE / LINE];
        sums.iter_mut().zip(a.chunks(LINE)).for_each(|(sum, a)| *sum = a[0]);
        sums.iter_mut()
            .zip(b.chunks(LINE))
            .for_each(|(sum, b)| *sum = sum.wrapping_add(b[0].wrapping_mul(3)));
        c.chunks_mut(LINE).zip(sums).for_each(|(c, sum)| c[0] = sum);
    }
    third / LINE
}

impl Load {
    fn answer(&mut self, line: &str) -> Result<String> {
        let mut words = line.split_ascii_whitespace();
        let word = words.next().unwrap_or_default();
        let number = words.next().map(str::parse::<usize>).transpose()?;
        let done = match (word, number) {
            ("stream" | "local" | "store", mib) => {
                let node = (word != "local").then_some(NODE);
                let mut memory = map(mib.unwrap_or(STREAM_MIB), node)?;
                self.store = (word == "store").then(|| Store::fill(memory.words()));
                if word != "store" {
                    write(&mut memory, 1);
                }
                let there = ranges(&frames(memory.address(), memory.bytes())?);
                self.stream = Some(memory);
                return Ok(serde_json::to_string(&there)?);
            }
            ("pass", None) => triad(self.stream.as_mut().context("there is no memory for STREAM")?),
            ("lookups", None) => match (&mut self.store, &mut self.stream) {
                (Some(store), Some(memory)) => store.lookups(memory.words()),
                _ => bail!("there is no table"),
            },
            ("end", None) => self.stream.take().map_or(0, |_| 0),
            ("take", Some(mib)) => {
                let mut memory = map(mib, Some(NODE))?;
                let lines = write(&mut memory, 1);
                self.chunks.push(memory);
                lines
            }
            ("rewrite", Some(chunk)) => {
                let count = self.chunks.len();
                let memory = self.chunks.get_mut(chunk).with_context(|| format!("there are {count}"))?;
                write(memory, 2 + chunk)
            }
            ("disk", Some(mib)) => self.disk(mib)?,
            ("read", None) => {
                let chunks: usize = self.chunks.iter_mut().map(read).sum();
                chunks + self.cached()?
            }
            ("drop", None) => {
                (self.disk, self.stream) = (None, None);
                self.chunks.clear();
                fs::write(DROP_CACHES, "1").context(DROP_CACHES)?;
                0
            }
            _ => bail!("what is that?"),
        };
        Ok(done.to_string())
    }

    /// Reads on.
    fn disk(&mut self, mib: usize) -> Result<usize> {
        let disk = match &mut self.disk {
            Some(disk) => disk,
            none => none.insert(File::open(DISK).context(DISK)?),
        };
        for _ in 0..mib {
            disk.read_exact(&mut self.read).context(DISK)?;
        }
        Ok(mib << 20)
    }

    /// Reads again what it has read of the disk: a word of each line of the page cache. Lines.
    fn cached(&mut self) -> Result<usize> {
        let Some(disk) = &mut self.disk else { return Ok(0) };
        let bytes = disk.stream_position()? as usize;
        let Some(length) = NonZeroUsize::new(bytes) else { return Ok(0) };
        // SAFETY: a new mapping for reading, at an address that the kernel chooses; the disk is read-only.
        let address = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, disk, 0) };
        let address = address.context(DISK)?;
        // SAFETY: the mapping made above, which is aligned to a page and of this length; nothing writes to it.
        let words: &[usize] =
            unsafe { std::slice::from_raw_parts(address.as_ptr().cast(), bytes / size_of::<usize>()) };
        let sum = words.chunks(LINE).fold(0_usize, |sum, line| sum.wrapping_add(line[0]));
        std::hint::black_box(sum);
        // SAFETY: the mapping made above, of which no slice is used any more.
        unsafe { munmap(address, bytes) }.context(DISK)?;
        Ok(bytes / (LINE * size_of::<usize>()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(words: &[usize]) -> Memory {
        let mut memory = Memory::map(4096, None, false).expect("a page");
        memory.words()[..words.len()].copy_from_slice(words);
        memory
    }

    #[test]
    fn a_word_of_each_line_is_touched() {
        let mut page = memory(&[]);
        assert_eq!((write(&mut page, 7), read(&mut page)), (64, 64));
        let words = page.words();
        assert!(words.iter().enumerate().all(|(at, word)| *word == if at % LINE == 0 { 7 } else { 0 }));
    }

    #[test]
    fn the_triad_is_a_plus_three_b() {
        // Two pages for each array, and one that is left.
        let mut memory = Memory::map(7 * 4096, None, false).expect("pages");
        for (at, word) in [(8, 5), (PAGE + 16, 7), (2 * PAGE + 8, 4)] {
            memory.words()[at] = word;
        }
        assert_eq!(triad(&mut memory), 128);
        let c = &memory.words()[4 * PAGE..];
        assert_eq!((c[8], c[16], c[PAGE + 16]), (17, 0, 7));
    }
}
