//! What hwloc's lstopo says of a server.

use std::{collections::BTreeMap, path::Path, process::Command};
use vnuma_model::{CpuId, CpuSet, HostNodeId};

/// A server as lstopo sees it.
#[derive(Debug, Default)]
pub struct Lstopo {
    /// CPUs that are online.
    pub cpus: CpuSet,
    pub nodes: BTreeMap<HostNodeId, Node>,
    /// Between nodes by number, from and to; none where lstopo shows no distances.
    pub distances: Option<BTreeMap<(HostNodeId, HostNodeId), u64>>,
    /// Of each CPU the cache of the highest level that holds data.
    pub last_caches: BTreeMap<CpuId, Cache>,
    pub pci_devices: BTreeMap<String, PciDevice>,
}

#[derive(Debug)]
pub struct Node {
    pub cpus: CpuSet,
    pub memory_bytes: u64,
    /// lstopo's word for special memory, such as `GPUMemory`.
    pub kind: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    pub level: u32,
    pub size_bytes: u64,
    pub cpus: CpuSet,
}

#[derive(Debug)]
pub struct PciDevice {
    /// Base class and subclass.
    pub class: u32,
    pub vendor: u32,
    pub device: u32,
    /// Nodes of the object that its host bridge hangs below.
    pub nodes: CpuSet,
    /// The first function behind that host bridge.
    pub first: String,
}

impl Lstopo {
    /// Asks lstopo for the server whose `/sys` and `/proc` are below `root`.
    pub fn ask(root: &Path) -> Self {
        let output = Command::new("lstopo-no-graphics")
            .args(["--of", "xml", "--filter", "all:all"])
            // CPUs and nodes that a cgroup keeps from this process are there all the same.
            .arg("--disallowed")
            .env("HWLOC_FSROOT", root)
            // Files alone: neither this machine's CPUID nor its PCI library.
            .env("HWLOC_COMPONENTS", "linux,stop")
            // Nodes with the CPUs that the kernel gives them. By default lstopo places nodes without CPUs near others,
            // adds the CPUs of initiators, and rebuilds a Xeon Phi's nodes.
            .env("HWLOC_USE_NUMA_DISTANCES", "1")
            .env("HWLOC_KNL_NUMA_QUIRK", "0")
            // It leaves out nodes that are the memory of an NVIDIA GPU.
            .env("HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES", "1")
            .env("LC_ALL", "C")
            .output()
            .expect("lstopo-no-graphics (package hwloc-nox) is needed for this test");
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "lstopo on {}: {complaints}", root.display());
        Self::parse(&String::from_utf8(output.stdout).expect("lstopo writes UTF-8"))
    }

    fn parse(xml: &str) -> Self {
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        let document = roxmltree::Document::parse_with_options(xml, options).expect("lstopo writes XML");
        let mut server = Self::default();
        for element in document.descendants() {
            match (element.tag_name().name(), element.attribute("type")) {
                ("distances2", _) if element.attribute("name") == Some("NUMALatency") => {
                    server.distances = Some(distances(element));
                }
                ("object", Some("PU")) => server.cpus.insert(number(element, "os_index")),
                ("object", Some("NUMANode")) => {
                    server.nodes.insert(number(element, "os_index"), node(element));
                }
                ("object", Some(_)) if element.has_attribute("cache_type") => server.add_cache(element),
                ("object", Some("PCIDev" | "Bridge")) if element.has_attribute("pci_busid") => {
                    server.pci_devices.insert(text(element, "pci_busid").to_owned(), pci_device(element));
                }
                _ => {}
            }
        }
        server
    }

    fn add_cache(&mut self, element: Element) {
        const INSTRUCTIONS: u32 = 2;
        if number::<u32>(element, "cache_type") == INSTRUCTIONS {
            return;
        }
        let cache = Cache {
            level: number(element, "depth"),
            size_bytes: number(element, "cache_size"),
            cpus: set(element, "cpuset"),
        };
        for cpu in cache.cpus.iter() {
            let last = self.last_caches.entry(cpu).or_insert_with(|| cache.clone());
            if last.level < cache.level {
                *last = cache.clone();
            }
        }
    }
}

type Element<'a> = roxmltree::Node<'a, 'a>;

fn node(element: Element) -> Node {
    Node {
        cpus: set(element, "cpuset"),
        memory_bytes: element.attribute("local_memory").map_or(0, |_| number(element, "local_memory")),
        kind: element.attribute("subtype").unwrap_or_default().to_owned(),
    }
}

/// `<indexes>0 1</indexes><u64values>10 21 21 10</u64values>`, cut anywhere into several elements.
fn distances(element: Element) -> BTreeMap<(HostNodeId, HostNodeId), u64> {
    let numbers = |name: &str| -> Vec<u64> {
        let parts = element.children().filter(|child| child.has_tag_name(name));
        let texts: Vec<&str> = parts.filter_map(|part| part.text()).collect();
        texts.join(" ").split_whitespace().map(|word| word.parse().expect("a number")).collect()
    };
    let ids: Vec<HostNodeId> =
        numbers("indexes").into_iter().map(|id| id.try_into().expect("a node number")).collect();
    let values = numbers("u64values");
    assert_eq!(values.len(), ids.len() * ids.len(), "lstopo's matrix is square");
    let pairs = ids.iter().flat_map(|&from| ids.iter().map(move |&to| (from, to)));
    pairs.zip(values).collect()
}

/// `pci_type="0604 [8086:3c02] [0000:0000] 07"`
fn pci_device(element: Element) -> PciDevice {
    let words = text(element, "pci_type").split([' ', '[', ']', ':']).filter(|word| !word.is_empty());
    let numbers: Vec<u32> = words.map(|word| u32::from_str_radix(word, 16).expect("hexadecimal")).collect();
    let mut ancestors = element.ancestors();
    let bridge =
        ancestors.by_ref().take_while(|object| !object.has_attribute("nodeset")).last().expect("itself");
    let place = bridge.parent_element().expect("the machine at last");
    let first = bridge.descendants().find(|object| object.has_attribute("pci_busid")).expect("itself");
    PciDevice {
        class: numbers[0],
        vendor: numbers[1],
        device: numbers[2],
        nodes: set(place, "nodeset"),
        first: text(first, "pci_busid").to_owned(),
    }
}

fn text<'a>(element: Element<'a>, name: &str) -> &'a str {
    element.attribute(name).unwrap_or_else(|| panic!("no `{name}`: {element:?}"))
}

fn number<T: std::str::FromStr>(element: Element, name: &str) -> T {
    text(element, name).parse().unwrap_or_else(|_| panic!("`{name}` is no number: {element:?}"))
}

fn set(element: Element, name: &str) -> CpuSet {
    mask(text(element, name))
}

/// Words of 32 bits, the highest first, `0x0000000f,,0x00000001`; an empty word is zero.
pub fn mask(text: &str) -> CpuSet {
    let mut members = CpuSet::new();
    for (position, word) in text.rsplit(',').enumerate() {
        let digits = word.strip_prefix("0x").unwrap_or(word);
        let bits = if digits.is_empty() { 0 } else { u32::from_str_radix(digits, 16).expect("a mask") };
        let first = u32::try_from(position * 32).expect("a small number");
        (0..32).filter(|bit| bits & (1 << bit) != 0).for_each(|bit| members.insert(first + bit));
    }
    members
}
