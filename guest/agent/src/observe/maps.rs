//! `/proc/PID/maps` and `/proc/PID/numa_maps`. A process can have tens of thousands of mappings, whose files it names.

use super::turn::Turn;
use crate::{core::NodeId, files};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
};

/// 65530 mappings, the kernel's limit by default, have about 16 MiB with long names.
pub(super) const LIMIT: u64 = 64 << 20;
/// A path has up to 4096 bytes, each of which the kernel may show as four.
pub(super) const LINE: usize = 17 * 1024;
/// Libraries of one process that are remembered.
const LIBRARIES: usize = 16;

/// The name of the file that a line of `maps` has code of. The kernel shows a line break in a name as `\012`.
pub fn code_of(line: &[u8]) -> Option<&str> {
    // start-end perms offset device inode path
    let text = str::from_utf8(line).ok()?;
    let mut rest = text;
    let mut words = [""; 5];
    for word in &mut words {
        let (head, tail) = rest.split_once(' ')?;
        (*word, rest) = (head, tail);
    }
    let (path, executable) = (rest.trim_start_matches(' '), words[1].as_bytes().get(2) == Some(&b'x'));
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    (executable && path.starts_with('/')).then(|| path.rsplit('/').next()).flatten()
}

/// Files that a process has code of, as far as `wanted` says so and there is time.
pub(super) fn libraries(
    root: &Path,
    pid: i32,
    wanted: impl Fn(&str) -> bool,
    turn: Turn,
) -> io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    files::lines_while(&root.join(format!("proc/{pid}/maps")), LIMIT, LINE, |line| {
        found.extend(code_of(line).filter(|name| wanted(name)).map(str::to_owned));
        found.len() < LIBRARIES && !turn.is_over()
    })?;
    Ok(found)
}

/// A mapping whose pages can be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Movable {
    /// Its address.
    pub start: u64,
    /// Its pages by node.
    pub pages: BTreeMap<NodeId, u64>,
}

/// A line of `numa_maps`. `None`: its pages are to stay. These are pages of files, which others may use, pages of a pool of huge
/// pages, and those that the program itself has given a place.
pub fn movable(line: &[u8]) -> Option<Movable> {
    let text = str::from_utf8(line).ok()?;
    let mut words = text.split(' ');
    let start = u64::from_str_radix(words.next()?, 16).ok()?;
    if !matches!(words.next()?, "default" | "local") {
        return None;
    }
    let mut pages = BTreeMap::new();
    for word in words {
        if word == "huge" || word.starts_with("file=") {
            return None;
        }
        let Some((key, value)) = word.split_once('=') else { continue };
        if key == "kernelpagesize_kB" && value != "4" {
            return None;
        }
        let node = key.strip_prefix('N').and_then(|node| node.parse().ok()).filter(|node| *node <= 1023_u32);
        if let (Some(node), Ok(count)) = (node, value.parse()) {
            pages.insert(node, count);
        }
    }
    (!pages.is_empty()).then_some(Movable { start, pages })
}

/// Mappings of a process whose pages can be moved, for as long as `goes_on` says so. Walks all page tables of the process.
pub fn read_movable(root: &Path, pid: i32, goes_on: impl Fn() -> bool) -> io::Result<Vec<Movable>> {
    let mut found = Vec::new();
    let path = root.join(format!("proc/{pid}/numa_maps"));
    files::lines_while(&path, LIMIT, LINE, |line| {
        found.extend(movable(line));
        goes_on()
    })?;
    Ok(found)
}

/// Memory of a process that can be moved, by node, KiB. Nothing if there is no time for all of it.
pub(super) fn read_memory(root: &Path, pid: i32, turn: Turn) -> Option<BTreeMap<NodeId, u64>> {
    let mut memory: BTreeMap<NodeId, u64> = BTreeMap::new();
    let movable = read_movable(root, pid, || !turn.is_over()).ok().filter(|_| !turn.is_over())?;
    for (node, pages) in movable.into_iter().flat_map(|mapping| mapping.pages) {
        let kib = memory.entry(node).or_default();
        *kib = kib.saturating_add(pages.saturating_mul(4));
    }
    Some(memory)
}

/// Start and end of mappings of a process, for as long as `goes_on` says so.
pub fn read_ranges(root: &Path, pid: i32, goes_on: impl Fn() -> bool) -> io::Result<BTreeMap<u64, u64>> {
    let mut ranges = BTreeMap::new();
    files::lines_while(&root.join(format!("proc/{pid}/maps")), LIMIT, LINE, |line| {
        ranges.extend(range(line));
        goes_on()
    })?;
    Ok(ranges)
}

/// The addresses of a line of `maps`.
pub fn range(line: &[u8]) -> Option<(u64, u64)> {
    let word = line.split(|byte| *byte == b' ').next()?;
    let (start, end) = str::from_utf8(word).ok()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    (start < end).then_some((start, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_counts() {
        let line =
            |perms: &str, path: &str| format!("7f00-7f10 {perms} 00000000 fe:00 123                 {path}");
        for (perms, path, expected) in [
            ("r-xp", "/usr/lib/libibverbs.so.1", Some("libibverbs.so.1")),
            ("r-xp", "/tmp/a b/libvma.so (deleted)", Some("libvma.so")),
            ("r--p", "/usr/lib/libibverbs.so.1", None),
            ("r-xp", "[vdso]", None),
            ("r-xp", "/tmp/x\\012libvma.so", Some("x\\012libvma.so")),
            ("r-xp", "", None),
        ] {
            assert_eq!(code_of(line(perms, path).as_bytes()), expected, "{perms} {path}");
        }
        for none in [&b""[..], b"x", b"7f00-7f10 r-xp", b"\xff\xff r-xp 0 0 0 /x", b"7f00-7f10  r-xp"] {
            assert_eq!(code_of(none), None);
        }
    }

    #[test]
    fn memory_that_is_shared_huge_or_placed_is_to_stay() {
        let line = "7f0000 default anon=5 dirty=5 N0=3 N1=2 kernelpagesize_kB=4";
        let found = movable(line.as_bytes()).expect("movable");
        assert_eq!((found.start, found.pages), (0x7f_0000, BTreeMap::from([(0, 3), (1, 2)])));
        for no in [
            "7f0000 bind:1 anon=5 N0=5",
            "7f0000 default file=/lib/x.so mapped=5 N0=5",
            "7f0000 default huge anon=5 N0=5 kernelpagesize_kB=2048",
            "7f0000 default anon=5 N0=5 kernelpagesize_kB=2048",
            "7f0000 default",
            "7f0000 interleave:0-1 anon=2 N0=1 N1=1",
            "x default N0=1",
            "",
        ] {
            assert_eq!(movable(no.as_bytes()), None, "{no}");
        }
        assert_eq!(range(b"1000-3000 rw-p"), Some((0x1000, 0x3000)));
        assert_eq!((range(b"3000-1000 rw-p"), range(b"3000"), range(b"")), (None, None, None));
    }
}
