//! Which mapping of a QEMU is the memory of which guest node, from `/proc/PID/maps`.
//!
//! libvirt makes a memory backend for each guest node, in the order of the nodes, and calls it `ram-nodeN`. QEMU knows
//! their addresses, but libvirt does not offer the command that asks for them.
//!
//! - A backend that is a file has its name there (`/dev/hugepages/libvirt/qemu/1-web/ram-node0`).
//! - Any other is known by its size, if as many mappings have that size as guest nodes. If these are several, their order
//!   decides: QEMU maps them one after the other, and the kernel takes the highest free place for each
//!   (`vm_unmapped_area()` of mm/mmap.c), so that a later one is lower. Between the two nothing of that size is given back.
//!   A kernel that maps upwards (`vm.legacy_va_layout`, an unlimited stack) is known by low addresses.
//!
//! In doubt there is none.

use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::GuestNodeId;

/// The kernel maps downwards from below the stack, which is at the end of 47 bits.
const LOWEST: u64 = 0x7000_0000_0000;

/// QEMU's id of a guest node's memory.
pub fn backend_of(node: GuestNodeId) -> String {
    format!("ram-node{node}")
}

/// A mapping that a guest's memory may be in.
struct Mapping<'a> {
    start: u64,
    length: u64,
    path: &'a str,
}

fn parse(line: &str) -> Option<Mapping<'_>> {
    // Start, end, rights, offset, device, inode; then the path, which may have spaces.
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let writable = words.next()?.starts_with("rw");
    let rest = words.nth(3).unwrap_or_default();
    let path = rest.split_once(' ').map_or("", |(_, path)| path.trim());
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    writable.then_some(Mapping { start, length: end.checked_sub(start)?, path })
}

/// Where the memory of guest nodes begins; those are left out of which it is not known. `sizes`: nodes with the bytes that
/// they started with, in rising order.
pub fn find(sizes: &[(GuestNodeId, u64)], maps: &str) -> BTreeMap<GuestNodeId, u64> {
    let mappings: Vec<_> = maps.lines().filter_map(parse).collect();
    // The kernel shows no address twice.
    let places: BTreeSet<u64> = mappings.iter().map(|mapping| mapping.start).collect();
    let mut found = BTreeMap::new();
    if places.len() < mappings.len() {
        return found;
    }
    for &(node, size) in sizes {
        let name = backend_of(node);
        let named = |mapping: &&Mapping<'_>| {
            mapping.length == size && mapping.path.rsplit('/').next() == Some(name.as_str())
        };
        let mut fitting = mappings.iter().filter(named);
        if let (Some(mapping), None) = (fitting.next(), fitting.next()) {
            found.insert(node, mapping.start);
        }
    }
    if !found.is_empty() {
        return found;
    }
    let mut by_size: BTreeMap<u64, Vec<GuestNodeId>> = BTreeMap::new();
    sizes.iter().for_each(|&(node, size)| by_size.entry(size).or_default().push(node));
    for (size, nodes) in by_size {
        let fitting = mappings.iter().filter(|mapping| mapping.length == size);
        let mut starts: Vec<u64> = fitting.map(|mapping| mapping.start).collect();
        starts.sort_unstable_by(|one, other| other.cmp(one));
        let ordered = starts.len() == 1 || starts.iter().all(|start| *start >= LOWEST);
        if starts.len() == nodes.len() && ordered {
            found.extend(nodes.into_iter().zip(starts));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn line(start: u64, size: u64, path: &str) -> String {
        format!("{start:x}-{:x} rw-p 00000000 00:00 0                          {path}\n", start + size)
    }

    #[test]
    fn equal_backends_are_told_apart_by_their_order() {
        let maps = line(0x7f00_0000_0000, 64 * MIB, "")
            + &line(0x7f10_0000_0000, 64 * MIB, "")
            + &line(0x7f08_0000_0000, 32 * MIB, "/memfd:memory-backend-memfd (deleted)")
            + "7f09000000-7f0d000000 ---p 00000000 00:00 0 \n";
        let sizes = [(0, 64 * MIB), (1, 32 * MIB), (2, 64 * MIB)];
        let expected = BTreeMap::from([(0, 0x7f10_0000_0000), (1, 0x7f08_0000_0000), (2, 0x7f00_0000_0000)]);
        assert_eq!(find(&sizes, &maps), expected);
    }

    #[test]
    fn in_doubt_there_is_none() {
        let sizes = [(0, 64 * MIB), (1, 64 * MIB)];
        let three: String = (1..4).map(|at| line(at << 44, 64 * MIB, "")).collect();
        assert!(find(&sizes, &three).is_empty(), "another mapping of that size");
        let upwards = line(0x2aaa_0000_0000, 64 * MIB, "") + &line(0x2aab_0000_0000, 64 * MIB, "");
        assert!(find(&sizes, &upwards).is_empty(), "the kernel maps upwards");
        assert!(find(&sizes, &line(0x7f00_0000_0000, 64 * MIB, "")).is_empty(), "one of two");
        let twice = line(0x7f00_0000_0000, 64 * MIB, "").repeat(2);
        assert!(find(&sizes, &twice).is_empty(), "two guest nodes in one place");
        assert!(find(&sizes, "").is_empty() && find(&[], &three).is_empty());
    }

    #[test]
    fn files_have_the_names_of_their_nodes() {
        let file = |node: u32| format!("/dev/hugepages/libvirt/qemu/1-web/ram-node{node}");
        let maps = line(0x1000_0000, 64 * MIB, &file(1)) + &line(0x2000_0000, 64 * MIB, &file(0));
        let sizes = [(0, 64 * MIB), (1, 64 * MIB)];
        assert_eq!(find(&sizes, &maps), BTreeMap::from([(0, 0x2000_0000), (1, 0x1000_0000)]));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "([0-9a-f]{0,17}-[0-9a-f]{0,17} rw-p 0 0 0 .{0,20}\n|.){0,20}") {
            prop_assert!(find(&[(0, MIB), (1, MIB)], &text).len() <= 2);
        }
    }
}
