use crate::WORD;
use std::{collections::BTreeSet, mem::offset_of, ops::RangeInclusive};
use vnuma_abi_topology_channel::{
    DEVICES_VERSION, DISTANCE_LOCAL, Device, Devices, Header, LAYOUT, MAGIC, MAX_DEVICES, MAX_NODES,
    MAX_REGION_SIZE, MAX_SECTIONS, MAX_VCPUS, NODES_VERSION, Nodes, READ_RETRIES, SECTION_DEVICES,
    SECTION_NODES, SECTION_REQUIRED, SECTION_VCPUS, Section, Slot, SupportedSection, VCPUS_VERSION, Vcpu,
    Vcpus,
};

/// What was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Its generation.
    pub generation: u64,
    /// Distances, by guest node.
    pub distances: Vec<Vec<u8>>,
    /// vCPUs.
    pub vcpus: Vec<Vcpu>,
    /// PCI functions; none from a host that does not know of them.
    pub devices: Vec<Device>,
    /// Sections that a reader of a later version understands.
    pub others: Vec<Other>,
}

/// A section that is none of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Other {
    /// Its kind.
    pub kind: u16,
    /// Its version.
    pub version: u16,
    /// What follows [`Section`].
    pub words: Vec<u64>,
}

/// Why there is nothing to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// No region of this layout.
    Header,
    /// Nothing was published yet.
    Nothing,
    /// The writer was faster in every try, or died in the middle.
    Torn,
    /// A published slot that makes no sense.
    Malformed,
    /// A section that must be understood is of this kind, or of a version that is not.
    Unsupported(u16),
}

/// What a reader of today knows.
pub const SUPPORTED: [SupportedSection; 3] = [
    SupportedSection { kind: SECTION_NODES, version: NODES_VERSION },
    SupportedSection { kind: SECTION_VCPUS, version: VCPUS_VERSION },
    SupportedSection { kind: SECTION_DEVICES, version: DEVICES_VERSION },
];

/// Reads the current topology. `load` returns the word at an offset; each call is one load, in program order.
pub fn read(load: impl FnMut(usize) -> u64) -> Result<Topology, ReadError> {
    read_as(&SUPPORTED, load)
}

/// The same by a reader that knows these sections.
pub fn read_as(
    supported: &[SupportedSection],
    mut load: impl FnMut(usize) -> u64,
) -> Result<Topology, ReadError> {
    if load(0) != MAGIC || load(offset_of!(Header, layout)) as u16 != LAYOUT {
        return Err(ReadError::Header);
    }
    let sizes = load(offset_of!(Header, region_size));
    let (region_size, slot_size) = (low(sizes), high(sizes));
    let offsets = load(offset_of!(Header, slot_offset));
    let slots = [low(offsets), high(offsets)];
    let outside = |slot: usize| {
        slot < size_of::<Header>()
            || !slot.is_multiple_of(WORD)
            || slot.saturating_add(slot_size) > region_size
    };
    if region_size > MAX_REGION_SIZE || slot_size < size_of::<Slot>() || slots.into_iter().any(outside) {
        return Err(ReadError::Header);
    }
    for _ in 0..READ_RETRIES {
        let generation = load(offset_of!(Header, published));
        if generation == 0 {
            return Err(ReadError::Nothing);
        }
        let slot = slots[(generation & 1) as usize];
        if load(slot) != generation {
            continue;
        }
        let counts = load(slot + offset_of!(Slot, length));
        let (length, sections) = (low(counts), high(counts));
        let copied = length.clamp(size_of::<Slot>(), slot_size) / WORD;
        let words: Vec<u64> =
            (size_of::<Slot>() / WORD..copied).map(|index| load(slot + index * WORD)).collect();
        if load(slot) != generation || load(offset_of!(Header, published)) != generation {
            continue;
        }
        if length > slot_size || length < size_of::<Slot>() || sections > MAX_SECTIONS {
            return Err(ReadError::Malformed);
        }
        return decode(supported, generation, sections, &words);
    }
    Err(ReadError::Torn)
}

fn low(word: u64) -> usize {
    (word & 0xffff_ffff) as usize
}

fn high(word: u64) -> usize {
    (word >> 32) as usize
}

fn decode(
    supported: &[SupportedSection],
    generation: u64,
    sections: usize,
    words: &[u64],
) -> Result<Topology, ReadError> {
    let (mut distances, mut vcpus, mut devices) = (None, None, None);
    let (mut others, mut rest) = (Vec::new(), words);
    for _ in 0..sections {
        let [first, second, ..] = *rest else { return Err(ReadError::Malformed) };
        let section = Section {
            kind: first as u16,
            version: (first >> 16) as u16,
            compatible: (first >> 32) as u16,
            flags: (first >> 48) as u16,
            length: second as u32,
            reserved: 0,
        };
        let length = section.length as usize;
        if length < size_of::<Section>() || !length.is_multiple_of(WORD) || length / WORD > rest.len() {
            return Err(ReadError::Malformed);
        }
        let (this, after) = rest.split_at(length / WORD);
        rest = after;
        let understood =
            |entry: &&SupportedSection| entry.kind == section.kind && section.compatible <= entry.version;
        if !supported.iter().any(|entry| understood(&entry)) {
            if section.flags & SECTION_REQUIRED != 0 {
                return Err(ReadError::Unsupported(section.kind));
            }
            continue;
        }
        let twice = match section.kind {
            SECTION_NODES => distances.replace(decode_nodes(this)?).is_some(),
            SECTION_VCPUS => vcpus.replace(decode_vcpus(this)?).is_some(),
            SECTION_DEVICES => devices.replace(decode_devices(this)?).is_some(),
            kind => {
                let words = this[size_of::<Section>() / WORD..].to_vec();
                others.push(Other { kind, version: section.version, words });
                false
            }
        };
        if twice {
            return Err(ReadError::Malformed);
        }
    }
    let (Some(distances), Some(vcpus)) = (distances, vcpus) else { return Err(ReadError::Malformed) };
    let devices = devices.unwrap_or_default();
    let mut nodes = vcpus.iter().map(|vcpu| vcpu.node).chain(devices.iter().map(|device| device.node));
    if nodes.any(|node| node as usize >= distances.len()) {
        return Err(ReadError::Malformed);
    }
    Ok(Topology { generation, distances, vcpus, devices, others })
}

fn decode_nodes(section: &[u64]) -> Result<Vec<Vec<u8>>, ReadError> {
    let word = section.get(offset_of!(Nodes, nr_nodes) / WORD).ok_or(ReadError::Malformed)?;
    let (nodes, offset) = (low(*word), high(*word));
    let bytes: Vec<u8> = section.iter().flat_map(|word| word.to_le_bytes()).collect();
    if !(1..=MAX_NODES).contains(&nodes)
        || offset < size_of::<Nodes>()
        || offset.saturating_add(nodes * nodes) > bytes.len()
    {
        return Err(ReadError::Malformed);
    }
    let matrix = &bytes[offset..offset + nodes * nodes];
    if matrix.iter().any(|&distance| distance < DISTANCE_LOCAL) {
        return Err(ReadError::Malformed);
    }
    Ok(matrix.chunks(nodes).map(<[u8]>::to_vec).collect())
}

fn decode_vcpus(section: &[u64]) -> Result<Vec<Vcpu>, ReadError> {
    const _: () = assert!(size_of::<Vcpus>() == size_of::<Devices>() && size_of::<Vcpu>() == WORD);
    let vcpu = |word: u64| Vcpu { apic_id: low(word) as u32, node: high(word) as u32 };
    Ok(decode_array(section, 1..=MAX_VCPUS)?.into_iter().map(vcpu).collect())
}

fn decode_devices(section: &[u64]) -> Result<Vec<Device>, ReadError> {
    const _: () = assert!(offset_of!(Devices, nr_devices) == offset_of!(Vcpus, nr_vcpus));
    const _: () = assert!(offset_of!(Devices, device_size) == offset_of!(Vcpus, vcpu_size));
    const _: () = assert!(size_of::<Device>() == WORD && offset_of!(Device, bus) == 2);
    let device = |word: u64| Device {
        segment: word as u16,
        bus: (word >> 16) as u8,
        devfn: (word >> 24) as u8,
        node: high(word) as u32,
    };
    let devices: Vec<Device> = decode_array(section, 0..=MAX_DEVICES)?.into_iter().map(device).collect();
    let addresses = devices.iter().map(|device| (device.segment, device.bus, device.devfn));
    let unique = addresses.collect::<BTreeSet<_>>().len() == devices.len();
    if unique { Ok(devices) } else { Err(ReadError::Malformed) }
}

/// The first word of each element. Sections of vCPUs and of devices have their counts at the same place.
fn decode_array(section: &[u64], counts: RangeInclusive<usize>) -> Result<Vec<u64>, ReadError> {
    let word = |offset: usize| section.get(offset / WORD).copied().ok_or(ReadError::Malformed);
    let first = word(offset_of!(Vcpus, nr_vcpus))?;
    let (count, offset) = (low(first), high(first));
    let size = low(word(offset_of!(Vcpus, vcpu_size))?);
    let end = || count.checked_mul(size)?.checked_add(offset);
    if !counts.contains(&count)
        || offset < size_of::<Vcpus>()
        || !offset.is_multiple_of(WORD)
        || size < WORD
        || !size.is_multiple_of(WORD)
        || end().is_none_or(|end| end > section.len() * WORD)
    {
        return Err(ReadError::Malformed);
    }
    (0..count).map(|index| word(offset + index * size)).collect()
}
