//! The region of a server: its header says what the plugin models.

use vnuma_abi_lab_counters::{
    CPUS_OFFSET, FULL, Header, MAGIC, MAX_CPUS, MAX_NODES, MAX_RANGES, NAME_SIZE, PAGE_SIZE, Range, SAMPLED,
    STATUS_OFF, VERSION_MAJOR, VERSION_MINOR,
};
use vnuma_lab_pricing::CounterProfile;

const MIB: u64 = 1 << 20;
/// Where memory goes on above the space of 32-bit devices.
const ABOVE_4G: u64 = 4 << 30;
/// Smallest size of the region: one that ivshmem takes.
const MIN_SIZE: usize = 1 << 16;

/// What of a server the counters depend on. Memory and CPUs are spread evenly over the nodes, in order.
#[derive(Clone, Debug)]
pub struct Machine<'a> {
    /// Name of its profile.
    pub profile: &'a str,
    /// NUMA nodes.
    pub nodes: usize,
    /// CPUs of each.
    pub cpus_per_node: usize,
    /// Memory of each in MiB.
    pub memory_mib_per_node: usize,
    /// SLIT, row = from, column = to.
    pub distances: &'a [Vec<u8>],
}

/// How much of the caches is modelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sampling {
    /// One set in 16.
    #[default]
    Sampled,
    /// All of them: slower, for comparison.
    Full,
}

/// Why a server cannot have counters of a profile.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The profile knows no such distance.
    #[error(
        "counter profile {profile} is for machines like {expected}: it has no latency for distance {distance} \
         of profile {machine}"
    )]
    Distance {
        /// The counter profile.
        profile: String,
        /// The machine it is made for.
        expected: String,
        /// The machine.
        machine: String,
        /// Its distance.
        distance: u8,
    },
    /// A cache that cannot be modelled beside the first.
    #[error(
        "counter profile {second} cannot be a second one beside {profile}: its L2 or its distances differ, or its \
         LLC does not"
    )]
    Second {
        /// The counter profile.
        profile: String,
        /// The one beside it.
        second: String,
    },
    /// Too much of something.
    #[error("profile {machine}: {count} {what}, the counters can have {limit}")]
    TooMany {
        /// The machine.
        machine: String,
        /// How many.
        count: usize,
        /// Of what.
        what: &'static str,
        /// How many are possible.
        limit: usize,
    },
    /// The plugin handles memory in pieces of 2 MiB.
    #[error("profile {machine}: memory_mib_per_node is {mib}, the counters need an even number")]
    Odd {
        /// The machine.
        machine: String,
        /// Its memory per node.
        mib: usize,
    },
}

/// The content of a server's region, of a size that a PCI BAR can have. With `second` that one's LLC is modelled as well.
pub fn region(
    profile: &CounterProfile,
    second: Option<&CounterProfile>,
    machine: &Machine<'_>,
    sampling: Sampling,
) -> Result<Vec<u8>, RegionError> {
    let cpus = machine.nodes * machine.cpus_per_node;
    let too_many = |count, what, limit| {
        if count <= limit {
            return Ok(());
        }
        Err(RegionError::TooMany { machine: machine.profile.into(), count, what, limit })
    };
    too_many(cpus, "CPUs", MAX_CPUS)?;
    too_many(machine.nodes, "nodes", MAX_NODES)?;
    if !machine.memory_mib_per_node.is_multiple_of(2) {
        return Err(RegionError::Odd { machine: machine.profile.into(), mib: machine.memory_mib_per_node });
    }
    let ranges = ranges(machine.nodes, machine.memory_mib_per_node as u64 * MIB);
    too_many(ranges.len(), "ranges of memory", MAX_RANGES)?;
    let size = (CPUS_OFFSET + cpus * PAGE_SIZE).next_power_of_two().max(MIN_SIZE);
    let mut header = header(profile, machine, sampling, &ranges, size)?;
    if let Some(second) = second {
        let (shape, beside) = (profile.shape(), second.shape());
        if !shape.takes_second(&beside) || shape == beside {
            return Err(RegionError::Second { profile: profile.name.clone(), second: second.name.clone() });
        }
        (header.second_sets, header.second_ways) = (beside.llc_sets, beside.llc_ways);
    }
    let mut region = vec![0; size];
    let bytes = header.to_bytes();
    region[..bytes.len()].copy_from_slice(&bytes);
    Ok(region)
}

fn header(
    profile: &CounterProfile,
    machine: &Machine<'_>,
    sampling: Sampling,
    ranges: &[Range],
    size: usize,
) -> Result<Header, RegionError> {
    let (shape, prices) = (profile.shape(), profile.prices());
    let class_of = shape.classes(machine.distances).map_err(|distance| RegionError::Distance {
        profile: profile.name.clone(),
        expected: profile.machine.clone(),
        machine: machine.profile.into(),
        distance,
    })?;
    let cpus = machine.nodes * machine.cpus_per_node;
    let mut header = Header {
        magic: MAGIC,
        version_major: VERSION_MAJOR,
        version_minor: VERSION_MINOR,
        region_size: size as u32,
        nr_cpus: cpus as u32,
        nr_nodes: machine.nodes as u32,
        nr_classes: shape.nr_classes() as u32,
        nr_ranges: ranges.len() as u32,
        sample_shift: if sampling == Sampling::Full { FULL } else { SAMPLED },
        l2_sets: shape.l2_sets,
        l2_ways: shape.l2_ways,
        llc_sets: shape.llc_sets,
        llc_ways: shape.llc_ways,
        second_sets: 0,
        second_ways: 0,
        llc_hit_cost: prices.llc_hit,
        status: STATUS_OFF,
        api_version: 0,
        compared: 0,
        mismatched: 0,
        profile: [0; NAME_SIZE],
        dram_cost: prices.dram,
        streamed_cost: prices.streamed,
        mmio_read_cost: prices.mmio_read,
        mmio_write_cost: prices.mmio_write,
        class_of,
        cpu_node: [0; 256],
        ranges: [Range::default(); MAX_RANGES],
    };
    // CounterProfile checked that the name leaves room for a NUL.
    header.profile[..profile.name.len()].copy_from_slice(profile.name.as_bytes());
    for (cpu, node) in header.cpu_node.iter_mut().enumerate().take(cpus) {
        *node = (cpu / machine.cpus_per_node) as u8;
    }
    header.ranges[..ranges.len()].copy_from_slice(ranges);
    Ok(header)
}

/// Where QEMU's q35 machine puts the memory of the nodes: what does not fit below the space of 32-bit devices
/// goes on at 4 GiB (`pc_q35_init`).
fn ranges(nodes: usize, per_node: u64) -> Vec<Range> {
    let total = nodes as u64 * per_node;
    let low = if total >= 0xb000_0000 { 0x8000_0000 } else { 0xb000_0000 };
    let mut ranges = Vec::new();
    for node in 0..nodes {
        let (start, end) = (node as u64 * per_node, (node as u64 + 1) * per_node);
        let node = node as u32;
        if start < low {
            ranges.push(Range { start, end: end.min(low), node, reserved: 0 });
        }
        if end > low {
            let above = |address: u64| address.max(low) - low + ABOVE_4G;
            ranges.push(Range { start: above(start), end: above(end), node, reserved: 0 });
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vnuma_lab_pricing::by_name;

    fn machine(distances: &[Vec<u8>]) -> Machine<'_> {
        Machine { profile: "m", nodes: 2, cpus_per_node: 2, memory_mib_per_node: 2048, distances }
    }

    #[test]
    fn the_header_says_what_the_server_is() {
        let distances = [vec![10, 21], vec![21, 10]];
        let profile = by_name("broadwell-2s").unwrap();
        let bytes = region(&profile, None, &machine(&distances), Sampling::Sampled).unwrap();
        assert_eq!(bytes.len(), 1 << 16);
        let header = Header::from_bytes(&bytes).unwrap();
        assert_eq!((header.nr_cpus, header.nr_nodes, header.nr_classes), (4, 2, 2));
        assert_eq!(header.cpu_node[..4], [0, 0, 1, 1]);
        assert_eq!(header.class_of[1][..2], [1, 0]);
        assert_eq!(header.profile_name(), "broadwell-2s");
        assert_eq!(header.dram_cost[0], profile.prices().dram[0]);
        let mmio = (header.mmio_read_cost, header.mmio_write_cost);
        assert_eq!(mmio, (profile.prices().mmio_read, profile.prices().mmio_write));
        assert_eq!(header.sample_shift, SAMPLED);
        let node = |start, end, node| Range { start, end, node, reserved: 0 };
        assert_eq!(header.ranges[..2], [node(0, 2 << 30, 0), node(4 << 30, 6 << 30, 1)]);
        assert_eq!((header.second_sets, header.second_ways), (0, 0));
        let full = region(&profile, None, &machine(&distances), Sampling::Full).unwrap();
        assert_eq!(Header::from_bytes(&full).unwrap().sample_shift, FULL);
    }

    #[test]
    fn a_second_cache_is_that_of_a_profile_with_the_same_l2_and_distances() {
        let distances = [vec![10, 21], vec![21, 10]];
        let with = |first: &str, second: &str| {
            let (first, second) = (by_name(first).unwrap(), by_name(second).unwrap());
            region(&first, Some(&second), &machine(&distances), Sampling::Sampled)
        };
        let header = Header::from_bytes(&with("broadwell-2s", "vprobe-e5620").unwrap()).unwrap();
        assert_eq!((header.llc_sets, header.llc_ways), (45056, 20));
        // 12 MiB in 16 ways.
        assert_eq!((header.second_sets, header.second_ways), (12288, 16));
        for second in ["epyc-nps4", "broadwell-2s-high", "broadwell-2s"] {
            let text = with("broadwell-2s", second).unwrap_err().to_string();
            assert!(text.starts_with(&format!("counter profile {second} cannot be a second one")), "{text}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let distances = [vec![10, 31], vec![31, 10]];
        let profile = by_name("broadwell-2s").unwrap();
        let error = |machine: &Machine<'_>| {
            region(&profile, None, machine, Sampling::Sampled).unwrap_err().to_string()
        };
        let text = error(&machine(&distances));
        assert!(text.contains("machines like 2n4c") && text.contains("distance 31 of profile m"), "{text}");
        let text = error(&Machine { cpus_per_node: 128, ..machine(&distances) });
        assert_eq!(text, "profile m: 256 CPUs, the counters can have 254");
        let text = error(&Machine { memory_mib_per_node: 1001, ..machine(&distances) });
        assert!(text.contains("memory_mib_per_node is 1001"), "{text}");
    }

    proptest! {
        #[test]
        fn ranges_hold_the_memory_of_each_node_once(nodes in 1_usize..=16, mib in 128_u64..4096) {
            let ranges = ranges(nodes, mib * 2 * MIB);
            let mut end = 0;
            for range in &ranges {
                prop_assert!(range.start >= end && range.end > range.start, "{ranges:x?}");
                prop_assert!(range.end <= 0xb000_0000 || range.start >= ABOVE_4G);
                end = range.end;
            }
            for node in 0..nodes {
                let own = ranges.iter().filter(|range| range.node as usize == node);
                prop_assert_eq!(own.map(|range| range.end - range.start).sum::<u64>(), mib * 2 * MIB);
            }
        }
    }
}
