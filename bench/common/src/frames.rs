//! Where memory of a process lies in the physical memory of its kernel: a guest's, so that the host finds it.

use anyhow::{Context, Result, ensure};
use std::{fs::File, os::unix::fs::FileExt};

const PAGE: usize = 4096;
/// Of `/proc/self/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Page frames of a part of this process's memory, all of which is there.
pub fn frames(address: usize, bytes: usize) -> Result<Vec<u64>> {
    let frames = frames_of("self", address, bytes)?;
    ensure!(frames.len() == bytes / PAGE, "/proc/self/pagemap: pages are not present, or this is not root");
    Ok(frames)
}

/// Page frames of a part of a process's memory, as far as it is there.
pub fn frames_of(process: &str, address: usize, bytes: usize) -> Result<Vec<u64>> {
    let path = format!("/proc/{process}/pagemap");
    let mut entries = vec![0_u8; bytes / PAGE * 8];
    File::open(&path)
        .and_then(|file| file.read_exact_at(&mut entries, (address / PAGE * 8) as u64))
        .context(path)?;
    let entry = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
    let present = |entry: &u64| entry & PRESENT != 0 && entry & FRAME != 0;
    Ok(entries.chunks(8).map(entry).filter(present).map(|entry| entry & FRAME).collect())
}

/// Frames as ranges of bytes: the first byte and the length of each.
pub fn ranges(frames: &[u64]) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for &frame in frames {
        let start = frame * PAGE as u64;
        match ranges.last_mut() {
            Some((first, length)) if *first + *length == start => *length += PAGE as u64,
            _ => ranges.push((start, PAGE as u64)),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_become_ranges() {
        assert_eq!(ranges(&[5, 6, 7, 9, 3]), [(0x5000, 0x3000), (0x9000, 0x1000), (0x3000, 0x1000)]);
    }
}
