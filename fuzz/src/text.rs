//! Files and answers that are plain text.

use crate::{expect_clear, expect_plain};
use std::{collections::BTreeSet, fmt::Debug};
use vnuma_hypervisor::{check_name, numa, resident};
use vnuma_model::{CpuSet, MemoryBacking, NumaPolicy};
use vnuma_observe::{
    devices::{DeviceFile, device_file},
    sysfs::{parse, pci_ids},
};
use vnuma_process::procfs;

/// A value that was accepted reads back as itself once it is printed; the message of a refusal is clear.
#[track_caller]
fn reads_back<T: Debug + PartialEq>(
    read: impl Fn(&str) -> Result<T, String>,
    print: impl Fn(&T) -> String,
    text: &str,
) {
    match read(text) {
        Ok(value) => assert_eq!(read(&print(&value)).as_ref(), Ok(&value), "{text:?}"),
        Err(reason) => assert!(!reason.is_empty(), "{text:?}"),
    }
}

/// Lists of CPUs.
pub fn cpu_list(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match text.parse::<CpuSet>() {
        Ok(set) => {
            assert!(set.iter().all(|cpu| cpu <= CpuSet::MAX_CPU), "{set}");
            assert_eq!(set.len(), set.iter().count());
            assert_eq!(set.to_string().parse(), Ok(set.clone()));
            let json = serde_json::to_string(&set).expect("JSON");
            assert_eq!(serde_json::from_str::<CpuSet>(&json).expect("read back"), set);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Values of sysfs, each text taken for each of them.
pub fn sysfs_value(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let meminfo = |memory: &parse::Memory| {
        format!("Node 0 MemTotal: {} kB\nNode 0 MemFree: {} kB\n", memory.total_kib, memory.free_kib)
    };
    reads_back(parse::meminfo, meminfo, &text);
    let row = |row: &Vec<u8>| row.iter().map(u8::to_string).collect::<Vec<_>>().join(" ");
    reads_back(parse::distances, row, &text);
    reads_back(parse::cache_size_kib, |kib| format!("{kib}K\n"), &text);
    reads_back(parse::cpu_map, mask, &text);
    assert!(
        parse::cpu_map(&text).map_or(true, |set| set.iter().all(|cpu| cpu <= CpuSet::MAX_CPU)),
        "{text:?}"
    );
    assert!(parse::hex(&text, 0xffff).map_or(true, |value| value <= 0xffff), "{text:?}");
    reads_back(|text| parse::hex(text, 0xff_ffff), |value| format!("{value:#x}\n"), &text);
    reads_back(parse::numa_node, |node| node.map_or("-1".to_owned(), |node| node.to_string()), &text);
    let speed = |speed: &Option<u32>| {
        speed.map_or("Unknown".to_owned(), |mts| format!("{}.{} GT/s PCIe\n", mts / 1000, mts % 1000 / 100))
    };
    reads_back(parse::link_speed, speed, &text);
    reads_back(parse::link_width, |width| format!("{}\n", width.unwrap_or_default()), &text);
    reads_back(parse::number, |number| format!("{number}\n"), &text);
    reads_back(parse::cpu_weight, |weight| format!("{weight}\n"), &text);
    let limit =
        |limit: &Option<u64>| limit.map_or("max 1000\n".to_owned(), |limit| format!("{limit} 1000\n"));
    reads_back(parse::cpu_max, limit, &text);
    if vnuma_model::is_pci_address(&text) {
        assert!(text.bytes().all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.'), "{text:?}");
        assert!(!text.contains("..") && text.len() <= 16, "{text:?}");
    }
    vm_name(&text);
}

fn mask(set: &CpuSet) -> String {
    let mut words = [0_u32; CpuSet::MAX_CPU as usize / 32 + 1];
    set.iter().for_each(|cpu| words[cpu as usize / 32] |= 1 << (cpu % 32));
    words.iter().rev().map(|word| format!("{word:08x}")).collect::<Vec<_>>().join(",")
}

/// The file of names of PCI devices: a name is one short line, and only what was asked for has one.
pub fn pci_ids(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let wanted = BTreeSet::from([(0x8086, 0x10c9), (0x1b36, 0x0010)]);
    let names = pci_ids::parse(&text, &wanted);
    for (vendor, device) in [(0x8086, 0x10c9), (0x1b36, 0x0010), (0x8086, 0x0010), (0x1234, 0x0001)] {
        let found = names.device(vendor, device);
        assert!(found.is_none() || wanted.contains(&(vendor, device)), "{found:?}");
        let shown = [found, names.vendor(vendor), names.class(u32::from(vendor) << 8)];
        for name in shown.into_iter().flatten() {
            expect_plain(name);
            assert!(!name.is_empty() && name.chars().count() <= 120, "{name:?}");
        }
    }
}

/// A name that was accepted is one harmless component of a path.
fn vm_name(name: &str) {
    match check_name(name) {
        Ok(()) => {
            assert!(name.len() <= 64, "{name:?}");
            expect_plain(name);
            assert_eq!(std::path::Path::new(name).file_name(), Some(name.as_ref()));
        }
        Err(error) => expect_clear(&error.to_string()),
    }
}

/// `status`, `stat`, `fdinfo`, `maps` and `numa_maps` of a process.
pub fn proc(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let list = procfs::allowed_list(&text);
    assert!(text.contains(list) && !list.contains('\n'));
    // Both find a field of the same line, counted from the end of the name.
    let (cpu, start) = (procfs::last_cpu(&text), procfs::start_time(&text));
    if cpu.is_some() && std::str::from_utf8(input).is_ok() {
        let fields = || text.rsplit_once(')').map(|(_, rest)| rest.split_ascii_whitespace());
        assert_eq!(cpu, fields().and_then(|mut fields| fields.nth(36)?.parse().ok()));
        assert_eq!(start, fields().and_then(|mut fields| fields.nth(19)?.parse().ok()));
    }
    for path in ["/dev/net/tun", "anon_inode:[vfio-device]"].into_iter().chain(text.lines()) {
        let file = procfs::OpenFile { fd: 3, path: path.to_owned(), number: None };
        match device_file(&file, || text.to_string()) {
            Some(DeviceFile::VfioAddress(address)) => {
                assert!(vnuma_model::is_pci_address(&address), "{address:?}")
            }
            Some(DeviceFile::Tap(name)) => assert!(!name.contains('\n') && text.contains(&name), "{name:?}"),
            _ => {}
        }
    }
    let numbers = procfs::namespace_numbers(&text);
    assert!(numbers.is_empty() || text.contains("NSpid:"));
    if vnuma_channel::parse_eventfd_id(&text).is_some() {
        assert!(text.contains("eventfd-id:"));
    }
    let mappings = resident::parse_maps(&text);
    for &(start, length) in &mappings {
        assert!(start.checked_add(length).is_some(), "{start:#x} {length:#x}");
        assert_eq!(resident::find_mapping(&mappings, Some(start), 0), Some(start));
        if let Some(found) = resident::find_mapping(&mappings, None, length) {
            assert_eq!(mappings.iter().filter(|mapping| mapping.1 == length).count(), 1, "{found:#x}");
        }
    }
    for line in text.lines() {
        let address = line.split(' ').next().and_then(|word| u64::from_str_radix(word, 16).ok());
        let Some(address) = address else { continue };
        let nodes = resident::parse_numa_maps(&text, address).map(|found| found.pages).unwrap_or_default();
        assert!(nodes.windows(2).all(|pair| pair[0].0 < pair[1].0), "{nodes:?}");
    }
    for mapping in resident::parse_guest_mappings(&text) {
        assert!(mapping.pages.iter().any(|(_, kib)| *kib > 0), "{mapping:?}");
        assert_ne!(mapping.policy, resident::MappingPolicy::Nodes(Vec::new()));
    }
}

/// `info numa` with backends that fit it or not, and `info ramblock`.
pub fn hmp(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    for name in resident::parse_ramblocks(&text).keys() {
        assert!(!name.contains(char::is_whitespace) && !name.is_empty(), "{name:?}");
    }
    match numa::parse_info_numa(&text) {
        Ok(nodes) => {
            assert!(nodes.len() <= 128);
            let with_memory = || nodes.iter().filter(|(_, node)| node.size_mib > node.plugged_mib);
            let backend = |(position, (_, node)): (usize, (&u32, &numa::NumaNode))| numa::PlacedBackend {
                backing: MemoryBacking {
                    id: position.to_string(),
                    size_bytes: (node.size_mib - node.plugged_mib) << 20,
                    policy: NumaPolicy::Default,
                    host_nodes: Vec::new(),
                    resident_kib: Vec::new(),
                    mapping: None,
                },
                offset: position as u64,
            };
            let backends: Vec<_> = with_memory().enumerate().map(backend).collect();
            let count = backends.len();
            // The backends were made after the nodes, so all of them belong, each to its node.
            let matched = numa::match_backends(&nodes, backends.clone());
            assert_eq!(matched.len(), count, "{nodes:?}");
            for (position, (id, _)) in with_memory().enumerate() {
                assert_eq!(matched[id].id, position.to_string());
            }
            // With one less, nothing is used.
            let fewer = backends.into_iter().skip(1).collect();
            assert!(count == 0 || numa::match_backends(&nodes, fewer).is_empty());
        }
        Err(reason) => expect_plain(&reason),
    }
}
