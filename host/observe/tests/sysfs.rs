//! Reads trees that the tests build file by file.

use proptest::prelude::*;
use std::{fs, os::unix::fs::symlink, path::Path};
use tempfile::TempDir;
use vnuma_model::{CacheGroup, CpuSet, HostTopology, HugePages};
use vnuma_observe::{SysfsError, read_cpu_layout, read_host_topology, read_idle_times};

const NODE: &str = "sys/devices/system/node";
const CPU: &str = "sys/devices/system/cpu";
const PCI: &str = "sys/bus/pci/devices";

struct Fixture(TempDir);

impl Fixture {
    fn new(files: &[(&str, &str)]) -> Self {
        let fixture = Self(tempfile::tempdir().unwrap());
        for (path, text) in files {
            fixture.write(path, text.as_bytes());
        }
        fixture
    }
    fn path(&self) -> &Path {
        self.0.path()
    }
    fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    fn node(&self, id: u32, cpus: &str, memory_kib: u64, distance: &str) {
        self.write(&format!("{NODE}/node{id}/cpulist"), cpus.as_bytes());
        self.write(&format!("{NODE}/node{id}/distance"), distance.as_bytes());
        let meminfo =
            format!("Node {id} MemTotal: {memory_kib} kB\nNode {id} MemFree: {} kB\n", memory_kib / 2);
        self.write(&format!("{NODE}/node{id}/meminfo"), meminfo.as_bytes());
    }
    fn cache(&self, cpu: u32, index: u32, level: &str, kind: &str, shared: &str) {
        let directory = format!("{CPU}/cpu{cpu}/cache/index{index}");
        self.write(&format!("{directory}/level"), level.as_bytes());
        self.write(&format!("{directory}/type"), kind.as_bytes());
        self.write(&format!("{directory}/size"), b"2048K\n");
        self.write(&format!("{directory}/shared_cpu_list"), shared.as_bytes());
    }
    fn read(&self) -> Result<HostTopology, SysfsError> {
        read_host_topology(self.path())
    }
    /// The message of the error, the path of the fixture left out.
    fn error(&self) -> String {
        self.read().unwrap_err().to_string().replace(&format!("{}/", self.path().display()), "")
    }
}

/// Three nodes: 0 with CPUs and memory, 2 with memory only, 5 with CPUs only.
fn three_nodes() -> Fixture {
    let fixture =
        Fixture::new(&[(&format!("{CPU}/online"), "0-2,4-7\n"), (&format!("{NODE}/online"), "0,2,5\n")]);
    fixture.node(0, "0-3\n", 4096, "10 17 28\n");
    fixture.node(2, "\n", 1024, "17 10 28\n");
    fixture.node(5, "4-7\n", 0, "28 28 10\n");
    fixture
}

#[test]
fn nodes_with_gaps_without_cpus_and_without_memory() {
    let host = three_nodes().read().unwrap();
    let nodes: Vec<_> = host
        .nodes
        .iter()
        .map(|n| (n.id, n.cpus.to_string(), n.memory_total_kib, n.memory_free_kib))
        .collect();
    assert_eq!(
        nodes,
        [(0, "0-2".into(), 4096, 2048), (2, String::new(), 1024, 512), (5, "4-7".into(), 0, 0)]
    );
    assert_eq!((host.distance(0, 2), host.distance(5, 0)), (Some(17), Some(28)));
    assert!(host.caches.is_empty() && host.pci_devices.is_empty());
}

#[test]
fn kernel_without_numa_is_one_node() {
    let fixture = Fixture::new(&[
        (&format!("{CPU}/online"), "0-1\n"),
        ("proc/meminfo", "MemTotal:  2000 kB\nMemFree:  1000 kB\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "3\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1\n"),
    ]);
    let host = fixture.read().unwrap();
    assert_eq!(host.nodes.len(), 1);
    let node = &host.nodes[0];
    assert_eq!((node.id, node.cpus.to_string(), node.memory_total_kib), (0, "0-1".into(), 2000));
    assert_eq!(node.huge_pages, [HugePages { size_kib: 2048, total: 3, free: 1 }]);
    assert_eq!(host.distance(0, 0), Some(10));
}

#[test]
fn kernel_without_lists_of_what_is_online() {
    let fixture = Fixture::new(&[(&format!("{CPU}/cpu0/uevent"), ""), (&format!("{CPU}/cpu3/uevent"), "")]);
    assert_eq!(fixture.read().unwrap().nodes[0].cpus.to_string(), "0,3");
    let fixture =
        Fixture::new(&[(&format!("{NODE}/node1/cpumap"), "c\n"), (&format!("{NODE}/node0/cpumap"), "3\n")]);
    let host = fixture.read().unwrap();
    assert_eq!((host.nodes[0].id, host.nodes[1].cpus.to_string()), (0, "2-3".into()));
    assert_eq!(host.distance(0, 1), Some(20), "what the kernel gives where the firmware tells nothing");
}

#[test]
fn kernel_without_a_list_of_online_cpus_says_it_by_cpu() {
    let fixture = Fixture::new(&[
        (&format!("{CPU}/cpu0/uevent"), ""),
        (&format!("{CPU}/cpu1/online"), "0\n"),
        (&format!("{CPU}/cpu2/online"), "1\n"),
        (&format!("{CPU}/cpu3/online"), ""),
    ]);
    assert_eq!(fixture.read().unwrap().nodes[0].cpus.to_string(), "0,2-3");
    fixture.node(1, "0-3\n", 1024, "10\n");
    assert_eq!(fixture.read().unwrap().nodes[0].cpus.to_string(), "0,2-3");
    fixture.write(&format!("{CPU}/cpu2/online"), b"2\n");
    assert_eq!(fixture.error(), "sys/devices/system/cpu/cpu2/online: `2`: neither 0 nor 1");
    let fixture = Fixture::new(&[(&format!("{CPU}/cpu8192/uevent"), "")]);
    assert_eq!(fixture.error(), "sys/devices/system/cpu: `cpu8192`: CPU numbers end at 8191");
}

#[test]
fn lists_that_end_with_the_end_of_a_string() {
    let fixture = three_nodes();
    fixture.write(&format!("{NODE}/online"), b"0,2,5\n\0");
    fixture.write(&format!("{NODE}/node0/cpulist"), b"0-3\n\0");
    assert_eq!(fixture.read().unwrap(), three_nodes().read().unwrap());
    fixture.write(&format!("{NODE}/node0/cpulist"), b"0\0-3\n");
    assert!(fixture.read().is_err(), "only at the end");
}

#[test]
fn firmware_that_tells_no_distances() {
    let fixture = three_nodes();
    for id in [0, 2, 5] {
        fixture.write(&format!("{NODE}/node{id}/distance"), b"0 0 0\n");
    }
    let host = fixture.read().unwrap();
    assert_eq!((host.distance(2, 2), host.distance(2, 5)), (Some(10), Some(20)));
}

#[test]
fn distances_from_before_a_node_went_offline() {
    let fixture = three_nodes();
    fixture.write(&format!("{NODE}/possible"), b"0,2,5\n");
    fixture.write(&format!("{NODE}/online"), b"2,5\n");
    let host = fixture.read().unwrap();
    assert_eq!(host.distances.rows(), [[10, 28], [28, 10]]);
    fixture.write(&format!("{NODE}/possible"), b"0-5\n");
    assert_eq!(
        fixture.error(),
        "sys/devices/system/node/node2/distance: `[17, 10, 28]`: 3 distances for 2 online nodes"
    );
}

#[test]
fn a_cpu_that_several_nodes_list_is_on_the_one_that_it_links_to() {
    let fixture = three_nodes();
    fixture.write(&format!("{NODE}/node2/cpulist"), b"0-3\n");
    let cpus = |fixture: &Fixture| {
        fixture.read().unwrap().nodes.iter().map(|node| node.cpus.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(cpus(&fixture), ["0-2", "", "4-7"], "without links, the first");
    for (cpu, node) in [(0, 0), (1, 2), (2, 7)] {
        let directory = fixture.path().join(format!("{CPU}/cpu{cpu}"));
        fs::create_dir_all(&directory).unwrap();
        symlink(format!("../../node/node{node}"), directory.join(format!("node{node}"))).unwrap();
    }
    assert_eq!(cpus(&fixture), ["0,2", "1", "4-7"]);
}

#[test]
fn last_level_caches_are_grouped() {
    let fixture = three_nodes();
    for cpu in 0..4 {
        let own = cpu.to_string();
        fixture.cache(cpu, 0, "1\n", "Data\n", &own);
        fixture.cache(cpu, 1, "1\n", "Instruction\n", &own);
        fixture.cache(cpu, 2, "2\n", "Unified\n", &own);
        // CPU 3 is offline.
        fixture.cache(cpu, 3, "3\n", "Unified\n", if cpu < 2 { "0-1\n" } else { "2-3\n" });
    }
    fixture.cache(4, 0, "1\n", "Instruction\n", "4\n");
    fixture.cache(4, 1, "1\n", "Data\n", "4-5\n");
    let groups = fixture.read().unwrap().caches;
    let group = |level, cpus: &str| CacheGroup { level, size_kib: 2048, cpus: cpus.parse().unwrap() };
    assert_eq!(groups, [group(3, "0-1"), group(3, "2"), group(1, "4-5")]);
}

#[test]
fn caches_whose_lists_leave_out_their_own_cpu() {
    let fixture = three_nodes();
    let map = |cpu: u32, text: &str| {
        fixture.write(&format!("{CPU}/cpu{cpu}/cache/index3/shared_cpu_map"), text.as_bytes());
    };
    // By the mask; by neither, as on CPUs just plugged; shared by no CPU, as on Itanium; the same, and no core is listed.
    for (cpu, list, mask) in [(0, "4-5\n", "3\n"), (2, "0\n", "1\n"), (4, "\n", "0\n"), (6, "", "0\n")] {
        fixture.cache(cpu, 3, "3", "Unified", list);
        map(cpu, mask);
    }
    fixture.write(&format!("{CPU}/cpu4/topology/thread_siblings"), b"30\n");
    let groups = fixture.read().unwrap().caches;
    let cpus: Vec<_> = groups.iter().map(|group| group.cpus.to_string()).collect();
    assert_eq!(cpus, ["0-1", "0,2", "4-5", "6"]);
}

#[test]
fn pci_functions_of_kernels_that_tell_local_cpus_only() {
    let fixture = three_nodes();
    // Those of one node, one more of another, all, none, some of a node.
    for (function, local, node) in
        [(0, "f0", Some(5)), (1, "f1", Some(5)), (2, "ff", None), (3, "0", None), (4, "30", None)]
    {
        let device = format!("{PCI}/0000:00:1f.{function}");
        for (file, text) in
            [("class", "0x010802"), ("vendor", "0x8086"), ("device", "0x1"), ("local_cpus", local)]
        {
            fixture.write(&format!("{device}/{file}"), text.as_bytes());
        }
        let devices = fixture.read().unwrap().pci_devices;
        assert_eq!(devices[function].node, node, "{local}");
    }
    fixture.write(&format!("{PCI}/0000:00:1f.0/numa_node"), b"-1\n");
    assert_eq!(fixture.read().unwrap().pci_devices[0].node, None, "the kernel's own word counts");
}

#[test]
fn pci_functions_and_their_nodes() {
    let fixture = three_nodes();
    for (address, node) in [("0000:00:1f.2", "-1\n"), ("10000:01:00.0", "5\n"), ("0000:81:00.1", "9\n")] {
        let target = format!("sys/devices/pci/{address}");
        for (file, text) in
            [("class", "0x010802\n"), ("vendor", "0x8086\n"), ("device", "0xf1a5\n"), ("numa_node", node)]
        {
            fixture.write(&format!("{target}/{file}"), text.as_bytes());
        }
        fs::create_dir_all(fixture.path().join(PCI)).unwrap();
        symlink(format!("../../../../{target}"), fixture.path().join(PCI).join(address)).unwrap();
    }
    // Of a second one it is a folder, as in a copy that followed links.
    let group = |address: &str| fixture.path().join(format!("sys/devices/pci/{address}/iommu_group"));
    symlink("../../../kernel/iommu_groups/17", group("0000:81:00.1")).unwrap();
    fs::create_dir(group("0000:00:1f.2")).unwrap();
    // Gone while it was read.
    symlink("../../../../sys/devices/pci/nowhere", fixture.path().join(PCI).join("0000:02:00.0")).unwrap();
    let devices = fixture.read().unwrap().pci_devices;
    let seen: Vec<_> =
        devices.iter().map(|d| (d.address.as_str(), d.class, d.vendor, d.device, d.node)).collect();
    assert_eq!(
        seen,
        [
            ("0000:00:1f.2", 0x010802, 0x8086, 0xf1a5, None),
            ("0000:81:00.1", 0x010802, 0x8086, 0xf1a5, None),
            ("10000:01:00.0", 0x010802, 0x8086, 0xf1a5, Some(5)),
        ]
    );
    assert_eq!(devices.iter().map(|device| device.iommu_group).collect::<Vec<_>>(), [None, Some(17), None]);
    fs::remove_file(group("0000:81:00.1")).unwrap();
    symlink("../iommu_groups/x", group("0000:81:00.1")).unwrap();
    let error = fixture.read().unwrap_err().to_string();
    assert!(error.ends_with("0000:81:00.1/iommu_group: `x`: not the number of an IOMMU group"), "{error}");
}

#[test]
fn errors_name_file_and_value() {
    for (path, text, message) in [
        (
            "online",
            "0,2,x\n",
            "sys/devices/system/node/online: `0,2,x`: `x` is neither a number nor a range of numbers",
        ),
        ("online", "0,1024\n", "sys/devices/system/node/online: `1024`: node numbers end at 1023"),
        (
            "node0/cpulist",
            "3-1",
            "sys/devices/system/node/node0/cpulist: `3-1`: range `3-1` ends before it begins",
        ),
        (
            "node2/meminfo",
            "Node 2 MemTotal: much",
            "sys/devices/system/node/node2/meminfo: `Node 2 MemTotal: much`: `Node 2 MemTotal: much` is no size in kB",
        ),
        (
            "node2/distance",
            "10 17",
            "sys/devices/system/node/node2/distance: `[10, 17]`: 2 distances for 3 online nodes",
        ),
        (
            "node2/distance",
            "10 9 10",
            "sys/devices/system/node/node2/distance: `9`: below 10, the local distance",
        ),
        (
            "node2/hugepages/hugepages-4KkB/x",
            "",
            "sys/devices/system/node/node2/hugepages/hugepages-4KkB: `4K`: not the size of a huge page in kB",
        ),
    ] {
        let fixture = three_nodes();
        fixture.write(&format!("{NODE}/{path}"), text.as_bytes());
        assert_eq!(fixture.error(), message);
    }
    let fixture = three_nodes();
    fs::remove_file(fixture.path().join(NODE).join("node5/cpulist")).unwrap();
    assert_eq!(fixture.error(), "sys/devices/system/node/node5/cpulist: missing");
    let fixture = three_nodes();
    fixture.cache(0, 0, "9", "Unified", "0");
    assert_eq!(
        fixture.error(),
        "sys/devices/system/cpu/cpu0/cache/index0/level: `9`: cache levels are 1 to 4"
    );
    let fixture = three_nodes();
    fixture.write(&format!("{PCI}/0000:00:00.0/class"), b"0x1000000");
    assert_eq!(
        fixture.error(),
        "sys/bus/pci/devices/0000:00:00.0/class: `0x1000000`: not a number from 0x0 to 0xffffff"
    );
    assert!(Fixture::new(&[]).error().ends_with("cpu/online: missing"));
}

#[test]
fn errors_do_not_disturb_a_terminal() {
    for text in ["\u{1b}[2J".to_owned(), "\u{1b}".repeat(60_000)] {
        let fixture = three_nodes();
        fixture.write(&format!("{NODE}/node0/cpulist"), text.as_bytes());
        let error = fixture.error();
        assert!(!error.contains(char::is_control) && error.contains(r"\u{1b}"), "{error:?}");
        assert!(error.len() < 2000, "{} bytes", error.len());
    }
}

#[test]
fn endless_files_fifos_and_binary_are_refused() {
    let fixture = three_nodes();
    fixture.write(&format!("{NODE}/node0/cpulist"), &vec![b'0'; 70_000]);
    assert!(fixture.error().ends_with("node0/cpulist: longer than 65536 bytes"));
    fixture.write(&format!("{NODE}/node0/cpulist"), b"0-\xff");
    assert!(fixture.error().contains("node0/cpulist: `0-\u{fffd}`: not UTF-8"), "{}", fixture.error());
    let path = fixture.path().join(NODE).join("node0/cpulist");
    fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(fixture.error().ends_with("node0/cpulist: not a regular file"));
    fs::remove_file(&path).unwrap();
    symlink("/dev/zero", &path).unwrap();
    assert!(fixture.error().ends_with("node0/cpulist: not a regular file"));
}

#[test]
fn largest_hosts_are_read() {
    const NODES: u32 = 128;
    let fixture = Fixture::new(&[(&format!("{CPU}/online"), "0-8191"), (&format!("{NODE}/online"), "0-127")]);
    let row = |id| (0..NODES).map(|other| if other == id { "10 " } else { "21 " }).collect::<String>();
    for id in 0..NODES {
        fixture.node(id, &format!("{}-{}", id * 64, id * 64 + 63), 1 << 30, &row(id));
        fixture.cache(id * 64, 3, "3", "Unified", &format!("{}-{}", id * 64, id * 64 + 63));
    }
    let host = fixture.read().unwrap();
    assert_eq!((host.nodes.len(), host.caches.len(), host.distances.len()), (128, 128, 128));
    assert_eq!(host.node_of_cpu(8191), Some(127));
}

#[test]
fn this_machine_is_read() {
    let host = read_host_topology(Path::new("/")).unwrap();
    let cpus: usize = host.nodes.iter().map(|node| node.cpus.len()).sum();
    let online = nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_ONLN).unwrap().unwrap();
    assert_eq!(cpus, usize::try_from(online).unwrap());
    assert!(host.nodes.iter().map(|node| node.memory_total_kib).sum::<u64>() > 0);
    assert_eq!(host.distances.len(), host.nodes.len());
}

/// A node of a server that the next test makes up.
#[derive(Clone, Debug)]
struct AnyNode {
    has_cpus: bool,
    memory_kib: u64,
}

/// Up to 64 nodes with numbers that have gaps, some without CPUs, some without memory.
fn any_nodes() -> impl Strategy<Value = std::collections::BTreeMap<u32, AnyNode>> {
    let memory = prop_oneof![Just(0), 1..=u64::from(u32::MAX)];
    let node = (any::<bool>(), memory).prop_map(|(has_cpus, memory_kib)| AnyNode { has_cpus, memory_kib });
    prop::collection::btree_map(0..1024u32, node, 1..=64)
}

#[test]
fn isolated_cpus_and_cores_are_read_and_may_be_missing() {
    let fixture = three_nodes();
    let host = fixture.read().unwrap();
    assert_eq!(read_cpu_layout(fixture.path(), &host).unwrap(), Default::default());
    fixture.write(&format!("{CPU}/isolated"), b"3,7\n");
    for (cpu, siblings) in [(0, "0,4\n"), (4, "0,4\n"), (1, "1\n"), (2, "5-6\n")] {
        fixture.write(&format!("{CPU}/cpu{cpu}/topology/thread_siblings_list"), siblings.as_bytes());
    }
    let layout = read_cpu_layout(fixture.path(), &host).unwrap();
    let cores: Vec<_> = layout.cores.iter().map(ToString::to_string).collect();
    assert_eq!((layout.isolated.to_string(), cores), ("3,7".into(), vec!["0,4".to_owned()]));
    fixture.write(&format!("{CPU}/isolated"), b"nonsense");
    let error = read_cpu_layout(fixture.path(), &host).unwrap_err().to_string();
    assert!(error.contains("cpu/isolated") && error.contains("nonsense"), "{error}");
}

#[test]
fn idle_times_of_cpus_are_read() {
    let stat = "cpu  9 9 9 9 9\ncpu0 1 2 3 40 5 6\ncpu3 0 0 0 7\ncpux 1\nintr 5\ncpu4 0 0 0 1";
    let fixture = Fixture::new(&[("proc/stat", stat)]);
    // The last line is cut off.
    assert_eq!(read_idle_times(fixture.path()).unwrap(), [(0, 450_000_000), (3, 70_000_000)]);
    let empty = Fixture::new(&[]);
    assert!(matches!(read_idle_times(empty.path()), Err(SysfsError::Missing { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Up to 4096 CPUs, each on any of the nodes that have some, some offline.
    #[test]
    fn any_server_is_read_as_it_is(
        nodes in any_nodes(),
        homes in prop::collection::vec((any::<prop::sample::Index>(), prop::bool::weighted(0.9)), 1..=4096),
        lists_offline in any::<bool>(),
    ) {
        let with_cpus: Vec<u32> = nodes.iter().filter(|(_, node)| node.has_cpus).map(|(&id, _)| id).collect();
        prop_assume!(!with_cpus.is_empty());
        let home = |cpu: usize| with_cpus[homes[cpu].0.index(with_cpus.len())];
        let set = |wanted: &dyn Fn(usize) -> bool| -> CpuSet {
            (0..homes.len()).filter(|&cpu| wanted(cpu)).map(|cpu| u32::try_from(cpu).unwrap()).collect()
        };
        let online = set(&|cpu| homes[cpu].1);
        let ids: CpuSet = nodes.keys().copied().collect();
        let fixture = Fixture::new(&[
            (&format!("{CPU}/online"), &online.to_string()),
            (&format!("{NODE}/online"), &ids.to_string()),
        ]);
        let row = |id: u32| ids.iter().map(|other| if id == other { "10 " } else { "21 " }).collect::<String>();
        for (&id, node) in &nodes {
            let listed = set(&|cpu| home(cpu) == id && (lists_offline || homes[cpu].1));
            fixture.node(id, &listed.to_string(), node.memory_kib, &row(id));
        }
        let host = fixture.read().unwrap();
        let read: Vec<_> = host.nodes.iter().map(|n| (n.id, n.cpus.clone(), n.memory_total_kib)).collect();
        let expected: Vec<_> = nodes
            .iter()
            .map(|(&id, node)| (id, set(&|cpu| homes[cpu].1 && home(cpu) == id), node.memory_kib))
            .collect();
        prop_assert_eq!(read, expected);
        prop_assert_eq!(host.distances.len(), nodes.len());
    }

    #[test]
    fn any_content_of_any_file_is_survived(which in 0usize..14, bytes in content()) {
        let fixture = three_nodes();
        fixture.cache(0, 0, "3", "Unified", "0-3");
        fixture.write(&format!("{PCI}/0000:00:00.0/vendor"), b"0x1");
        fixture.write(&format!("{PCI}/0000:00:00.0/device"), b"0x1");
        fixture.write(&format!("{PCI}/0000:00:00.0/class"), b"0x1");
        let file = [
            "sys/devices/system/cpu/online", "sys/devices/system/node/online",
            "sys/devices/system/node/node0/cpulist", "sys/devices/system/node/node0/meminfo",
            "sys/devices/system/node/node2/distance", "sys/bus/pci/devices/0000:00:00.0/class",
            "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages",
            "sys/devices/system/cpu/cpu0/cache/index0/level", "sys/devices/system/cpu/cpu0/cache/index0/type",
            "sys/devices/system/cpu/cpu0/cache/index0/size",
            "sys/devices/system/cpu/cpu0/cache/index0/shared_cpu_list",
            "sys/bus/pci/devices/0000:00:00.0/vendor", "sys/bus/pci/devices/0000:00:00.0/device",
            "sys/bus/pci/devices/0000:00:00.0/numa_node",
        ][which];
        fixture.write(file, &bytes);
        if let Ok(host) = fixture.read() {
            prop_assert_eq!(host.distances.len(), host.nodes.len());
            for device in &host.pci_devices {
                prop_assert!(device.node.is_none_or(|id| host.node(id).is_some()));
            }
        }
    }
}

/// Anything, and things that look as if they belonged there.
fn content() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..64),
        "[0-9,-]{0,20}\n".prop_map(String::into_bytes),
        "(Node [0-9]+ )?Mem(Total|Free): *[0-9]{0,25} (kB|)\n".prop_map(String::into_bytes),
        "0x[0-9a-f]{0,10}\n".prop_map(String::into_bytes),
        "([0-9]{1,4} ){0,5}\n".prop_map(String::into_bytes),
    ]
}
