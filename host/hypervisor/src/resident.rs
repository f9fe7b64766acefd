//! Which host nodes the pages of a memory backend are on, from /proc.
//!
//! `/proc/PID/maps` has the addresses of mappings, `/proc/PID/numa_maps` the pages on each node
//! for each address. A backend's own address comes from HMP `info ramblock` (QEMU 8.1 and
//! later); before that, its mapping is known only if no other has its size.
//!
//! Counting walks all page tables of the process. It is therefore done once for a description, which is made when
//! something changes, and now and then for memory that is not bound to a node.

use std::collections::BTreeMap;
use vnuma_model::{CpuSet, HostNodeId};
use vnuma_process::procfs::{self, ProcError};

/// Longest file. A QEMU has some hundred mappings; one with 65530 of them, the kernel's
/// default limit, has about 8 MiB.
const FILE_LIMIT: u64 = 16 << 20;

/// Mappings: (start, length), in bytes.
pub type Mapping = (u64, u64);

/// `/proc/PID/maps`. Lines that are none are left out.
pub fn parse_maps(text: &str) -> Vec<Mapping> {
    let mapping = |line: &str| {
        let (start, rest) = line.split_once('-')?;
        let end = rest.split(' ').next()?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        Some((start, end.checked_sub(start)?))
    };
    text.lines().filter_map(mapping).collect()
}

/// What a mapping has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedPages {
    /// Size of its pages, KiB: those of a pool, or the smallest. A mapping without pages may not say so.
    pub page_kib: u64,
    /// Pages on each node, KiB.
    pub pages: Vec<(HostNodeId, u64)>,
}

/// Pages of the mapping that begins at `start`, from `/proc/PID/numa_maps`.
pub fn parse_numa_maps(text: &str, start: u64) -> Option<MappedPages> {
    let line = text.lines().find(|line| {
        line.split_once(' ').and_then(|(address, _)| u64::from_str_radix(address, 16).ok()) == Some(start)
    })?;
    let mut pages: BTreeMap<HostNodeId, u64> = BTreeMap::new();
    let mut page_kib = 4;
    for word in line.split(' ').skip(1) {
        let Some((key, value)) = word.split_once('=') else { continue };
        let Ok(value) = value.parse::<u64>() else { continue };
        if key == "kernelpagesize_kB" {
            page_kib = value;
        } else if let Some(node) = key.strip_prefix('N').and_then(|node| node.parse().ok()) {
            pages.insert(node, value);
        }
    }
    let pages = pages.into_iter().map(|(node, pages)| (node, pages.saturating_mul(page_kib))).collect();
    Some(MappedPages { page_kib, pages })
}

/// Address of a backend among those of `info ramblock`. That of a device's backend has the device's path before its id.
pub fn address_of(addresses: &BTreeMap<String, u64>, id: &str) -> Option<u64> {
    if let Some(address) = addresses.get(id) {
        return Some(*address);
    }
    let mut found =
        addresses.iter().filter(|(name, _)| name.rsplit_once('/').is_some_and(|(_, last)| last == id));
    match (found.next(), found.next()) {
        (Some((_, address)), None) => Some(*address),
        _ => None,
    }
}

/// Mappings with less than this part of the largest one's pages are no memory of a guest, but programs and their heaps.
const PART: u64 = 16;

/// Where the kernel may put pages of a mapping.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MappingPolicy {
    /// Anywhere.
    Any,
    /// On these nodes (`bind`, `prefer`).
    Nodes(Vec<HostNodeId>),
    /// Where they are: pages that are spread over nodes on purpose, and what is not known.
    Fixed,
}

/// A mapping that a VM's memory may be in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestMapping {
    /// Its address.
    pub start: u64,
    /// Where its pages may be.
    pub policy: MappingPolicy,
    /// Size of its pages, KiB: those of a pool, or the smallest.
    pub page_kib: u64,
    /// Pages on each node, KiB.
    pub pages: Vec<(HostNodeId, u64)>,
}

impl GuestMapping {
    fn kib(&self) -> u64 {
        self.pages.iter().fold(0_u64, |sum, (_, kib)| sum.saturating_add(*kib))
    }
}

/// The policy of a line of `/proc/PID/numa_maps`, which has it after the address.
fn parse_policy(line: &str) -> MappingPolicy {
    let policy = line.split(' ').nth(1).unwrap_or_default();
    // `bind=static:0-1`: flags of the policy come before its nodes.
    let (mode, nodes) = policy.split_once(':').unwrap_or((policy, ""));
    match mode.split('=').next().unwrap_or_default() {
        "default" | "local" => MappingPolicy::Any,
        "bind" | "prefer" => match nodes.parse::<CpuSet>() {
            Ok(nodes) if !nodes.is_empty() => MappingPolicy::Nodes(nodes.iter().collect()),
            _ => MappingPolicy::Fixed,
        },
        _ => MappingPolicy::Fixed,
    }
}

/// Mappings of a process that have pages, from `/proc/PID/numa_maps`.
pub fn parse_mappings(text: &str) -> Vec<GuestMapping> {
    let mapping = |line: &str| {
        let start = line.split_once(' ').and_then(|(address, _)| u64::from_str_radix(address, 16).ok())?;
        let MappedPages { page_kib, pages } = parse_numa_maps(line, start)?;
        Some(GuestMapping { start, policy: parse_policy(line), page_kib, pages })
    };
    text.lines().filter_map(mapping).filter(|mapping| mapping.kib() > 0).collect()
}

/// Large ones of them, which a VM's memory is in.
pub fn parse_guest_mappings(text: &str) -> Vec<GuestMapping> {
    let mut mappings = parse_mappings(text);
    let largest = mappings.iter().map(GuestMapping::kib).max().unwrap_or(0);
    mappings.retain(|mapping| mapping.kib() >= largest / PART);
    mappings
}

/// Pages of these mappings by node, KiB.
pub fn sum_pages<'a>(mappings: impl IntoIterator<Item = &'a GuestMapping>) -> Vec<(HostNodeId, u64)> {
    let mut all: BTreeMap<HostNodeId, u64> = BTreeMap::new();
    for &(node, kib) in mappings.into_iter().flat_map(|mapping| &mapping.pages) {
        let sum = all.entry(node).or_default();
        *sum = sum.saturating_add(kib);
    }
    all.into_iter().collect()
}

/// The mappings of a VM's process that its memory is in. Walks all page tables of the process, which takes long for a large
/// VM.
pub fn read_guest_mappings(pid: i32) -> Result<Vec<GuestMapping>, ProcError> {
    procfs::read_process(pid, "numa_maps", FILE_LIMIT).map(|text| parse_guest_mappings(&text))
}

/// All mappings of a process that have pages. A caller that knows where memory of the VM is does not go by their size.
pub fn read_mappings_with_pages(pid: i32) -> Result<Vec<GuestMapping>, ProcError> {
    procfs::read_process(pid, "numa_maps", FILE_LIMIT).map(|text| parse_mappings(&text))
}

/// All mappings of a process: (start, length), in bytes.
pub fn read_mappings(pid: i32) -> Result<Vec<Mapping>, ProcError> {
    procfs::read_process(pid, "maps", FILE_LIMIT).map(|text| parse_maps(&text))
}

/// Host virtual addresses of RAM blocks by name, from HMP `info ramblock`; none of a QEMU
/// that does not show them. A backend's block has the name of the backend.
pub fn parse_ramblocks(text: &str) -> BTreeMap<String, u64> {
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    // Block Name, PSize (number and unit), Offset, Used, Total, HVA, RO
    let known = header == ["Block", "Name", "PSize", "Offset", "Used", "Total", "HVA", "RO"];
    let block = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, _, _, _, _, _, address, _] = words[..] else { return None };
        let address = u64::from_str_radix(address.strip_prefix("0x")?, 16).ok()?;
        Some((name.to_owned(), address))
    };
    if known { lines.filter_map(block).collect() } else { BTreeMap::new() }
}

/// The mapping of a backend: where QEMU says it is, or the only one of its size.
pub fn find_mapping(mappings: &[Mapping], address: Option<u64>, size: u64) -> Option<u64> {
    match address {
        Some(address) => mappings.iter().find(|&&(start, _)| start == address).map(|&(start, _)| start),
        None => {
            let mut fitting = mappings.iter().filter(|&&(_, length)| length == size);
            let first = fitting.next()?.0;
            fitting.next().is_none().then_some(first)
        }
    }
}

/// A process's `maps` and `numa_maps`.
pub(crate) fn read(pid: i32) -> Result<(String, String), ProcError> {
    let text = |file| procfs::read_process(pid, file, FILE_LIMIT);
    Ok((text("maps")?, text("numa_maps")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn mappings_and_their_pages() {
        let maps = "7f0000000000-7f0010000000 rw-p 00000000 00:00 0\n\
            7f0010000000-7f0010001000 ---p 00000000 00:00 0\nnonsense\n";
        let mappings = parse_maps(maps);
        assert_eq!(mappings, [(0x7f00_0000_0000, 256 << 20), (0x7f00_1000_0000, 4096)]);
        let numa_maps = "7f0000000000 default anon=3 dirty=3 N0=1 N3=2 kernelpagesize_kB=2048\n\
            7f0010000000 default\n";
        let has = |page_kib, pages| Some(MappedPages { page_kib, pages });
        assert_eq!(parse_numa_maps(numa_maps, mappings[0].0), has(2048, vec![(0, 2048), (3, 4096)]));
        assert_eq!(parse_numa_maps(numa_maps, mappings[1].0), has(4, vec![]));
        assert_eq!(parse_numa_maps(numa_maps, 1), None);
    }

    #[test]
    fn a_vms_memory_is_in_its_large_mappings() {
        let text = "55550000 default file=/usr/bin/qemu mapped=300 N0=300 kernelpagesize_kB=4\n\
            7f0000000000 default anon=9 N0=10000 N3=20000 kernelpagesize_kB=4\n\
            7f1000000000 bind:1 huge anon=3 N1=30 kernelpagesize_kB=2048\nnonsense N2=9\n7f2 default\n";
        let resident = |text| sum_pages(&parse_guest_mappings(text));
        assert_eq!(resident(text), [(0, 40_000), (1, 61_440), (3, 80_000)]);
        assert_eq!(resident(""), []);
        let kib: Vec<u64> = parse_mappings(text).iter().map(GuestMapping::kib).collect();
        assert_eq!(kib, [1200, 120_000, 61_440], "a small one that has pages, and none that has not");
        let own = read_guest_mappings(std::process::id().cast_signed());
        assert!(own.is_ok_and(|own| own.iter().all(|mapping| mapping.kib() > 0)));
        assert!(read_guest_mappings(i32::MAX).is_err());
    }

    #[test]
    fn the_policy_of_a_mapping_says_where_its_pages_may_be() {
        for (words, policy) in [
            ("default anon=3", MappingPolicy::Any),
            ("local anon=3", MappingPolicy::Any),
            ("bind:1 anon=3", MappingPolicy::Nodes(vec![1])),
            ("bind=static:0,2-3 file=/memfd:a", MappingPolicy::Nodes(vec![0, 2, 3])),
            ("prefer:2", MappingPolicy::Nodes(vec![2])),
            ("interleave:0-1", MappingPolicy::Fixed),
            ("prefer (many):0-1", MappingPolicy::Fixed),
            ("default file=/dev/hugepages/a huge dirty=3", MappingPolicy::Any),
            ("bind:x", MappingPolicy::Fixed),
            ("bind", MappingPolicy::Fixed),
            ("", MappingPolicy::Fixed),
        ] {
            assert_eq!(parse_policy(&format!("7f0000000000 {words} N0=3")), policy, "{words}");
        }
        let text = "7f0000000000 bind:1 anon=9 N0=10000 N3=20000 kernelpagesize_kB=4\n7f1 default N0=1 kernelpagesize_kB=4\n";
        let pages = vec![(0, 40_000), (3, 80_000)];
        let policy = MappingPolicy::Nodes(vec![1]);
        let mapping = GuestMapping { start: 0x7f00_0000_0000, policy, page_kib: 4, pages };
        assert_eq!(parse_guest_mappings(text), [mapping]);
        let pool = parse_guest_mappings("7f1000000000 default huge anon=3 N1=30 kernelpagesize_kB=2048\n");
        assert_eq!((pool[0].page_kib, pool[0].pages[0]), (2048, (1, 61_440)));
    }

    #[test]
    fn a_backend_is_found_by_address_or_by_a_size_of_its_own() {
        let mappings = [(0x1000, 64), (0x2000, 32), (0x3000, 64)];
        assert_eq!(find_mapping(&mappings, Some(0x3000), 64), Some(0x3000));
        assert_eq!(find_mapping(&mappings, Some(0x4000), 64), None);
        assert_eq!(find_mapping(&mappings, None, 32), Some(0x2000));
        assert_eq!(find_mapping(&mappings, None, 64), None, "two of this size");
    }

    #[test]
    fn ram_blocks_of_old_and_new_qemu() {
        let new = "              Block Name    PSize              Offset               Used              Total                HVA  RO\n\
            ram0    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000 0x00007f97d3e00000  rw\n";
        assert_eq!(parse_ramblocks(new), BTreeMap::from([("ram0".to_owned(), 0x7f97_d3e0_0000)]));
        let old = "              Block Name    PSize              Offset               Used              Total\n\
            ram0    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000\n";
        assert!(parse_ramblocks(old).is_empty());
    }

    #[test]
    fn a_backend_of_a_device_has_its_path_before_its_id() {
        let text = "              Block Name    PSize              Offset               Used              Total                HVA  RO\n\
            \x20                   ram0    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000 0x00007f63afe00000  rw\n\
            \x200000:00:01.0/plug    4 KiB  0x0000000020000000 0x0000000010000000 0x0000000010000000 0x00007f638fa00000  rw\n\
            \x200000:00:02.0/twin    4 KiB  0x0000000030000000 0x0000000010000000 0x0000000010000000 0x00007f637f800000  rw\n\
            \x200000:00:03.0/twin    4 KiB  0x0000000030000000 0x0000000010000000 0x0000000010000000 0x00007f637f900000  rw\n";
        let addresses = parse_ramblocks(text);
        let of = |id| address_of(&addresses, id);
        assert_eq!((of("ram0"), of("plug")), (Some(0x7f63_afe0_0000), Some(0x7f63_8fa0_0000)));
        assert_eq!((of("twin"), of("lug"), of("0000:00:01.0")), (None, None, None));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(.|[0-9a-fN=x \n-]){0,200}", start in any::<u64>()) {
            let _ = (parse_maps(&text), parse_numa_maps(&text, start), parse_ramblocks(&text), parse_mappings(&text));
        }
    }
}
