//! The XML of a domain that runs, as far as it matters here: guest nodes, bindings, pins, and places for a device.

use crate::{
    own_pins::{OwnPin, own_pins},
    xml::{MAX_VCPUS, Reader, XmlError, child, children, of_metadata},
};
use roxmltree::Node;
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::{CpuSet, GuestNodeId, HostNodeId, NumaPolicy, is_pci_address};

/// Most guest nodes and devices that are read.
const MAX_CELLS: usize = 128;
const MAX_DEVICES: usize = 4096;

/// How vCPUs are counted in sockets, dies, cores and threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Dies of a socket.
    pub dies: u32,
    /// Cores of a die.
    pub cores: u32,
    /// Threads of a core.
    pub threads: u32,
}

impl Topology {
    /// The APIC id that QEMU gives to the vCPU with this index (include/hw/i386/topology.h): the numbers of its socket, die,
    /// core and thread side by side, each in as many bits as the largest one takes.
    pub fn apic_id(self, index: u32) -> u32 {
        let (mut id, mut rest, mut shift) = (0_u32, index, 0);
        for count in [self.threads, self.cores, self.dies] {
            let count = count.max(1);
            id |= (rest % count).checked_shl(shift).unwrap_or(0);
            rest /= count;
            shift += u32::BITS - (count - 1).leading_zeros();
        }
        id | rest.checked_shl(shift).unwrap_or(0)
    }
}

/// Without one, libvirt gives every vCPU a socket of its own.
impl Default for Topology {
    fn default() -> Self {
        Self { dies: 1, cores: 1, threads: 1 }
    }
}

/// A guest node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Its number.
    pub id: GuestNodeId,
    /// Indices of its vCPUs; none of a node with memory only.
    pub vcpus: CpuSet,
    /// Memory that it started with, bytes.
    pub memory_bytes: u64,
}

/// Where memory comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Their policy: the kernel's own where only the control group confines the memory.
    pub policy: NumaPolicy,
    /// Host nodes.
    pub nodes: Vec<HostNodeId>,
}

/// A PCI function of the host that the domain has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPci {
    /// Its address on the host.
    pub host: String,
    /// Slot and function in the guest, if it is on the root bus. Buses behind bridges are numbered by the guest's firmware.
    pub on_root_bus: Option<(u8, u8)>,
}

/// A PCIe root port that takes devices while the domain runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Port {
    /// Its index, which is the number of the bus behind it in addresses of the XML.
    pub index: u32,
}

/// Memory that is shared with the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shmem {
    /// Its alias: the id of the device in QEMU.
    pub alias: String,
    /// Its model, such as `ivshmem-doorbell`.
    pub model: String,
}

/// Namespace of the element that says that a domain is to be attached as soon as its guest runs.
pub const MARK_NAMESPACE: &str = "urn:vnuma:attach:1";

/// That element. libvirt gives it its namespace.
pub const MARK_ELEMENT: &str = "<attach/>";

/// The usual prefix of these namespaces.
pub const PREFIX: &str = "vnuma";

/// A domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainXml {
    /// Its name.
    pub name: String,
    /// Its UUID, as text.
    pub uuid: String,
    /// vCPUs that it can have; indices are below.
    pub max_vcpus: u32,
    /// How they are counted.
    pub topology: Topology,
    /// Guest nodes in rising order of their number. None for a UMA domain.
    pub cells: Vec<Cell>,
    /// Memory plugged since, bytes by guest node.
    pub plugged: BTreeMap<GuestNodeId, u64>,
    /// Where memory of guest nodes without a binding of their own comes from.
    pub memory: Option<Binding>,
    /// Bindings of guest nodes.
    pub cell_memory: BTreeMap<GuestNodeId, Binding>,
    /// CPUs that an operator lets all vCPUs run on (`<vcpu cpuset>`).
    pub cpuset: Option<CpuSet>,
    /// The same of single vCPUs, by index.
    pub vcpu_pins: BTreeMap<u32, CpuSet>,
    /// Pins that vnumad has set. They may have been changed since.
    pub own_pins: BTreeMap<u32, OwnPin>,
    /// It is to be attached as soon as its guest runs.
    pub marked: bool,
    /// CPUs that an operator lets QEMU's other threads run on.
    pub emulator_pin: Option<CpuSet>,
    /// Functions of the host.
    pub host_devices: Vec<HostPci>,
    /// Ports that nothing is plugged into.
    pub free_ports: Vec<Port>,
    /// Shared memory.
    pub shmems: Vec<Shmem>,
}

impl DomainXml {
    /// Understands the XML of a domain. `name` is for messages.
    pub fn parse(name: &str, text: &str) -> Result<Self, XmlError> {
        let reader = Reader::new(name);
        let document = reader.document(text)?;
        let root = document.root_element();
        if root.tag_name().name() != "domain" {
            return Err(reader.missing("domain"));
        }
        let text_of = |element: &str| {
            let text = child(root, element).and_then(|node| node.text()).unwrap_or_default().trim();
            if text.is_empty() { Err(reader.missing(element)) } else { Ok(text.to_owned()) }
        };
        let vcpu = child(root, "vcpu");
        let max_vcpus = vcpus(&reader, vcpu)?;
        let tune = child(root, "cputune");
        let memory = child(root, "numatune").and_then(|tune| child(tune, "memory"));
        let devices = child(root, "devices");
        let emulator = tune.and_then(|tune| child(tune, "emulatorpin"));
        Ok(Self {
            name: text_of("name")?,
            uuid: text_of("uuid")?,
            max_vcpus,
            topology: topology(&reader, root)?,
            cells: cells(&reader, root, max_vcpus)?,
            plugged: plugged(&reader, devices)?,
            memory: memory.map(|memory| binding(&reader, memory)).transpose()?.flatten(),
            cell_memory: cell_memory(&reader, root)?,
            cpuset: vcpu.map(|vcpu| reader.set(vcpu, "cpuset")).transpose()?.flatten(),
            vcpu_pins: vcpu_pins(&reader, tune)?,
            own_pins: own_pins(&reader, root)?,
            marked: of_metadata(root, MARK_NAMESPACE, "attach").next().is_some(),
            emulator_pin: emulator.map(|pin| reader.set(pin, "cpuset")).transpose()?.flatten(),
            host_devices: host_devices(&reader, devices)?,
            free_ports: free_ports(&reader, devices)?,
            shmems: shmems(&reader, devices)?,
        })
    }

    /// Where the memory of a guest node comes from.
    pub fn binding(&self, cell: GuestNodeId) -> Option<&Binding> {
        self.cell_memory.get(&cell).or(self.memory.as_ref())
    }

    /// CPUs that a vCPU is pinned to. `None`: any.
    pub fn pin(&self, vcpu: u32) -> Option<&CpuSet> {
        self.vcpu_pins.get(&vcpu).or(self.cpuset.as_ref())
    }

    /// The guest node that a vCPU is on when the guest boots.
    pub fn cell_of(&self, vcpu: u32) -> Option<GuestNodeId> {
        self.cells.iter().find(|cell| cell.vcpus.contains(vcpu)).map(|cell| cell.id)
    }

    /// Is there a device with this alias?
    pub fn has_shmem(&self, alias: &str) -> bool {
        self.shmems.iter().any(|shmem| shmem.alias == alias)
    }
}

fn vcpus(reader: &Reader<'_>, vcpu: Option<Node<'_, '_>>) -> Result<u32, XmlError> {
    let text = vcpu.and_then(|vcpu| vcpu.text()).unwrap_or_default().trim();
    match text.parse() {
        Ok(count @ 1..=MAX_VCPUS) => Ok(count),
        _ => Err(reader.value("vcpu", text, format!("not a number from 1 to {MAX_VCPUS}"))),
    }
}

fn topology(reader: &Reader<'_>, root: Node<'_, '_>) -> Result<Topology, XmlError> {
    let Some(node) = child(root, "cpu").and_then(|cpu| child(cpu, "topology")) else {
        return Ok(Topology::default());
    };
    let count = |attribute| -> Result<u32, XmlError> {
        match reader.number(node, attribute)?.unwrap_or(1) {
            count @ 1..=MAX_VCPUS => Ok(count),
            other => {
                let element = format!("topology {attribute}");
                Err(reader.value(element, &other.to_string(), format!("not a number from 1 to {MAX_VCPUS}")))
            }
        }
    };
    Ok(Topology { dies: count("dies")?, cores: count("cores")?, threads: count("threads")? })
}

fn cells(reader: &Reader<'_>, root: Node<'_, '_>, max_vcpus: u32) -> Result<Vec<Cell>, XmlError> {
    let numa = child(root, "cpu").and_then(|cpu| child(cpu, "numa"));
    let mut cells: Vec<Cell> = Vec::new();
    let mut taken = CpuSet::new();
    for node in numa.into_iter().flat_map(|numa| children(numa, "cell")) {
        let id: GuestNodeId = reader.some_number(node, "id")?;
        if cells.len() == MAX_CELLS {
            return Err(reader.value(
                "cell id",
                &id.to_string(),
                format!("more than {MAX_CELLS} guest nodes"),
            ));
        }
        if cells.iter().any(|cell| cell.id == id) {
            return Err(reader.value("cell id", &id.to_string(), "it is there twice"));
        }
        let vcpus = reader.set(node, "cpus")?.unwrap_or_default();
        let text = node.attribute("cpus").unwrap_or_default();
        if vcpus.iter().any(|vcpu| vcpu >= max_vcpus) {
            return Err(reader.value("cell cpus", text, format!("the domain has {max_vcpus} vCPUs")));
        }
        if vcpus.intersects(&taken) {
            return Err(reader.value("cell cpus", text, "a vCPU is on two guest nodes"));
        }
        taken.add_all(&vcpus);
        cells.push(Cell { id, vcpus, memory_bytes: reader.bytes_of(node, "memory")? });
    }
    cells.sort_by_key(|cell| cell.id);
    Ok(cells)
}

/// Memory of devices that were plugged: DIMMs, and what virtio-mem devices have of theirs.
fn plugged(
    reader: &Reader<'_>,
    devices: Option<Node<'_, '_>>,
) -> Result<BTreeMap<GuestNodeId, u64>, XmlError> {
    let mut plugged = BTreeMap::new();
    for memory in of_kind(devices, "memory") {
        let Some(target) = child(memory, "target") else { continue };
        let Some(node) = child(target, "node") else { continue };
        let text = node.text().unwrap_or_default().trim();
        let id: GuestNodeId =
            text.parse().map_err(|_| reader.value("target node", text, "not a guest node"))?;
        let size = child(target, "current").or_else(|| child(target, "size"));
        let size = size.ok_or_else(|| reader.missing("target size"))?;
        let sum: &mut u64 = plugged.entry(id).or_default();
        *sum = sum.saturating_add(reader.bytes(size)?);
    }
    Ok(plugged)
}

fn binding(reader: &Reader<'_>, node: Node<'_, '_>) -> Result<Option<Binding>, XmlError> {
    // Placed by numad: the XML of a running domain does not say where.
    let Some(nodes) = reader.set(node, "nodeset")? else { return Ok(None) };
    let mode = node.attribute("mode").unwrap_or("strict");
    let policy = match mode {
        "strict" => NumaPolicy::Bind,
        "preferred" => NumaPolicy::Preferred,
        "interleave" => NumaPolicy::Interleave,
        "restrictive" => NumaPolicy::Default,
        _ => return Err(reader.value("memory mode", mode, "not a mode of numatune")),
    };
    Ok(Some(Binding { policy, nodes: nodes.iter().collect() }))
}

fn cell_memory(reader: &Reader<'_>, root: Node<'_, '_>) -> Result<BTreeMap<GuestNodeId, Binding>, XmlError> {
    let tune = child(root, "numatune");
    let mut bindings = BTreeMap::new();
    for node in tune.into_iter().flat_map(|tune| children(tune, "memnode")).take(MAX_CELLS) {
        let id = reader.some_number(node, "cellid")?;
        if let Some(binding) = binding(reader, node)? {
            bindings.insert(id, binding);
        }
    }
    Ok(bindings)
}

fn vcpu_pins(reader: &Reader<'_>, tune: Option<Node<'_, '_>>) -> Result<BTreeMap<u32, CpuSet>, XmlError> {
    let mut pins = BTreeMap::new();
    for node in tune.into_iter().flat_map(|tune| children(tune, "vcpupin")).take(MAX_VCPUS as usize) {
        let vcpu: u32 = reader.some_number(node, "vcpu")?;
        let cpus = reader.set(node, "cpuset")?.ok_or_else(|| reader.missing("vcpupin cpuset"))?;
        pins.insert(vcpu, cpus);
    }
    Ok(pins)
}

/// Devices of a kind.
fn of_kind<'a, 'i: 'a>(devices: Option<Node<'a, 'i>>, kind: &str) -> impl Iterator<Item = Node<'a, 'i>> {
    devices.into_iter().flat_map(move |devices| children(devices, kind)).take(MAX_DEVICES)
}

fn host_devices(reader: &Reader<'_>, devices: Option<Node<'_, '_>>) -> Result<Vec<HostPci>, XmlError> {
    let mut found = Vec::new();
    for device in of_kind(devices, "hostdev").filter(|device| device.attribute("type") == Some("pci")) {
        let Some(source) = child(device, "source").and_then(|source| child(source, "address")) else {
            continue;
        };
        let part = |attribute| reader.hexadecimal(source, attribute).map(Option::unwrap_or_default);
        let (domain, bus, slot) = (part("domain")?, part("bus")?, part("slot")?);
        let host = format!("{domain:04x}:{bus:02x}:{slot:02x}.{:x}", part("function")?);
        if !is_pci_address(&host) {
            return Err(reader.value("hostdev source address", &host, "not an address of a PCI function"));
        }
        found.push(HostPci { host, on_root_bus: on_root_bus(reader, device)? });
    }
    Ok(found)
}

fn on_root_bus(reader: &Reader<'_>, device: Node<'_, '_>) -> Result<Option<(u8, u8)>, XmlError> {
    let Some(address) = pci_address(device) else { return Ok(None) };
    let part = |attribute| reader.hexadecimal(address, attribute).map(Option::unwrap_or_default);
    Ok(match (part("bus")?, part("slot")?, part("function")?) {
        (0, slot @ 0..32, function @ 0..8) => Some((slot as u8, function as u8)),
        _ => None,
    })
}

/// Where a device is in the guest, if it is a PCI device.
fn pci_address<'a, 'i: 'a>(device: Node<'a, 'i>) -> Option<Node<'a, 'i>> {
    child(device, "address").filter(|address| address.attribute("type") == Some("pci"))
}

fn free_ports(reader: &Reader<'_>, devices: Option<Node<'_, '_>>) -> Result<Vec<Port>, XmlError> {
    let (mut ports, mut taken) = (BTreeSet::new(), BTreeSet::new());
    let all = devices.into_iter().flat_map(|devices| devices.children().filter(Node::is_element));
    for device in all.take(MAX_DEVICES) {
        if let Some(address) = pci_address(device) {
            taken.extend(reader.hexadecimal(address, "bus")?);
        }
        let is_port = device.tag_name().name() == "controller"
            && device.attribute("type") == Some("pci")
            && device.attribute("model") == Some("pcie-root-port");
        let hot = child(device, "target").is_none_or(|target| target.attribute("hotplug") != Some("off"));
        if is_port && hot {
            ports.insert(Port { index: reader.some_number(device, "index")? });
        }
    }
    Ok(ports.into_iter().filter(|port| !taken.contains(&port.index)).collect())
}

fn shmems(reader: &Reader<'_>, devices: Option<Node<'_, '_>>) -> Result<Vec<Shmem>, XmlError> {
    let attribute = |device, element, name| child(device, element).and_then(|node| node.attribute(name));
    let mut found = Vec::new();
    for device in of_kind(devices, "shmem") {
        let alias = attribute(device, "alias", "name").ok_or_else(|| reader.missing("shmem alias"))?;
        let model = attribute(device, "model", "type").unwrap_or("ivshmem");
        found.push(Shmem { alias: alias.to_owned(), model: model.to_owned() });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xml;
    use proptest::prelude::*;

    /// `virsh dumpxml` of Debian 12's libvirt 9.0, with what does not matter here left out.
    const RECORDED: &str = include_str!("../tests/recorded/two-nodes.xml");

    fn set(text: &str) -> CpuSet {
        xml::parse_set(text).unwrap()
    }

    #[test]
    fn a_recorded_domain_is_understood() {
        let domain = DomainXml::parse("two-nodes", RECORDED).unwrap();
        assert_eq!((domain.name.as_str(), domain.max_vcpus), ("two-nodes", 4));
        assert_eq!(domain.topology, Topology { dies: 1, cores: 2, threads: 1 });
        let cell = |id, vcpus, mib: u64| Cell { id, vcpus: set(vcpus), memory_bytes: mib << 20 };
        assert_eq!(domain.cells, [cell(0, "0-1", 64), cell(1, "2-3", 64)]);
        assert_eq!((domain.cell_of(3), domain.cell_of(4)), (Some(1), None));
        assert_eq!(domain.binding(0), None);
        assert_eq!(domain.limit(0), Some(&set("0-1")));
        assert_eq!(domain.limit(1), Some(&set("0")));
        assert_eq!(domain.emulator_pin, Some(set("1")));
        assert!(domain.shmems.is_empty() && domain.host_devices.is_empty());
        assert!(!domain.free_ports.is_empty());
    }

    fn domain(inner: &str) -> String {
        format!("<domain type='kvm' id='1'><name>web</name><uuid>u</uuid><vcpu>8</vcpu>{inner}</domain>")
    }

    fn parsed(inner: &str) -> DomainXml {
        DomainXml::parse("web", &domain(inner)).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn bindings_of_a_node_come_before_those_of_the_domain() {
        let tuned = parsed(
            "<numatune><memory mode='preferred' nodeset='1'/><memnode cellid='0' mode='strict' nodeset='0-1'/>\
             <memnode cellid='2' mode='restrictive' nodeset='1'/></numatune>",
        );
        let binding =
            |policy: &str, nodes: &[u32]| Some(Binding { policy: policy.into(), nodes: nodes.to_vec() });
        assert_eq!(tuned.binding(0).cloned(), binding("bind", &[0, 1]));
        assert_eq!(tuned.binding(1).cloned(), binding("preferred", &[1]));
        assert_eq!(tuned.binding(2).cloned(), binding("default", &[1]));
        assert_eq!(parsed("<numatune><memory mode='strict' placement='auto'/></numatune>").binding(0), None);
    }

    #[test]
    fn ports_are_free_if_nothing_is_behind_them() {
        let port = |index: u32, target: &str| {
            format!(
                "<controller type='pci' index='{index}' model='pcie-root-port'>{target}\
                 <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x{index}'/></controller>"
            )
        };
        let devices = format!(
            "<devices><controller type='pci' index='0' model='pcie-root'/>{}{}{}{}\
             <interface><address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/></interface>\
             <hostdev type='pci'><source><address domain='0x0000' bus='0x03' slot='0x1f' function='0x6'/></source>\
             <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/></hostdev></devices>",
            port(1, ""),
            port(2, "<target chassis='2' port='0x11' hotplug='off'/>"),
            port(3, "<target chassis='3' port='0x12'/>"),
            port(4, ""),
        );
        let found = parsed(&devices);
        assert_eq!(found.free_ports, [Port { index: 3 }], "1 and 4 are taken, 2 takes nothing while it runs");
        let host = HostPci { host: "0000:03:1f.6".to_owned(), on_root_bus: None };
        assert_eq!(found.host_devices, [host]);
    }

    #[test]
    fn a_mark_is_known_by_its_namespace() {
        let marked = |namespace: &str| {
            parsed(&format!("<metadata><v:attach xmlns:v='{namespace}'/></metadata>")).marked
        };
        assert!(marked(MARK_NAMESPACE) && !marked("urn:somebody") && !parsed("").marked);
    }

    #[test]
    fn memory_that_was_plugged_and_shared_memory() {
        let found = parsed(
            "<devices><memory model='dimm'><target><size unit='MiB'>128</size><node>1</node></target></memory>\
             <memory model='virtio-mem'><target><size unit='MiB'>512</size><node>1</node><current unit='MiB'>2</current>\
             </target></memory><memory model='nvdimm'><target><size>1</size></target></memory>\
             <shmem name='x'><model type='ivshmem-doorbell'/><alias name='ua-vnuma'/></shmem></devices>",
        );
        assert_eq!(found.plugged, BTreeMap::from([(1, 130 << 20)]));
        assert!(found.has_shmem("ua-vnuma") && !found.has_shmem("x"));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let refused = |inner: &str| DomainXml::parse("web", &domain(inner)).unwrap_err().to_string();
        let cell = |attributes: &str| refused(&format!("<cpu><numa><cell {attributes}/></numa></cpu>"));
        assert_eq!(cell("id='x'"), "domain web: <cell id> is `x`: not a number of this kind");
        assert_eq!(
            cell("id='0' cpus='0-8' memory='1'"),
            "domain web: <cell cpus> is `0-8`: the domain has 8 vCPUs"
        );
        assert_eq!(cell("id='0' cpus='0'"), "domain web: <cell memory> is missing");
        let twice =
            "<cpu><numa><cell id='0' cpus='0' memory='1'/><cell id='1' cpus='0' memory='1'/></numa></cpu>";
        assert_eq!(refused(twice), "domain web: <cell cpus> is `0`: a vCPU is on two guest nodes");
        assert_eq!(
            refused("<cpu><topology cores='0'/></cpu>"),
            "domain web: <topology cores> is `0`: not a number from 1 to 8192"
        );
        assert_eq!(
            refused("<numatune><memory mode='lax' nodeset='0'/></numatune>"),
            "domain web: <memory mode> is `lax`: not a mode of numatune"
        );
        assert_eq!(
            refused("<cputune><vcpupin vcpu='0'/></cputune>"),
            "domain web: <vcpupin cpuset> is missing"
        );
        let no_vcpus = "<domain><name>web</name><uuid>u</uuid><vcpu>0</vcpu></domain>";
        let error = DomainXml::parse("web", no_vcpus).unwrap_err().to_string();
        assert_eq!(error, "domain web: <vcpu> is `0`: not a number from 1 to 8192");
    }

    /// What `qom-get` of QEMU 7.2 gave for these.
    #[test]
    fn apic_ids_follow_the_topology() {
        let ids = |dies, cores, threads| {
            let topology = Topology { dies, cores, threads };
            (0..8).map(|index| topology.apic_id(index)).collect::<Vec<_>>()
        };
        assert_eq!(ids(1, 1, 1), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(ids(1, 2, 2), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(ids(1, 3, 1), [0, 1, 2, 4, 5, 6, 8, 9]);
        assert_eq!(ids(1, 3, 2), [0, 1, 2, 3, 4, 5, 8, 9]);
        assert_eq!(ids(2, 3, 1), [0, 1, 2, 4, 5, 6, 8, 9]);
    }

    proptest! {
        #[test]
        fn no_two_vcpus_have_one_apic_id(dies in 1u32..5, cores in 1u32..9, threads in 1u32..3) {
            let topology = Topology { dies, cores, threads };
            let ids: BTreeSet<u32> = (0..256).map(|index| topology.apic_id(index)).collect();
            prop_assert_eq!(ids.len(), 256);
        }

        #[test]
        fn any_text_is_survived(text in "(<[a-z/]{0,9} ?(id|cpus|memory)?=?'?[0-9,-]{0,9}'?>|.){0,40}") {
            let _ = DomainXml::parse("web", &domain(&text));
        }
    }
}
