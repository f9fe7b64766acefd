//! Events of this CPU that tell local memory from remote memory. *Not run here*: no machine of this project has such a PMU.
//!
//! | CPU | event | list that it is from | limitation |
//! |---|---|---|---|
//! | Intel Xeon | `MEM_LOAD_UOPS_L3_MISS_RETIRED` or `MEM_LOAD_L3_MISS_RETIRED`: loads that missed the L3 cache | Intel's perfmon (github.com/intel/perfmon), August 2026 | local is all memory of the socket, even if that is several nodes (sub-NUMA clusters); memory behind CXL does not count |
//! | AMD EPYC | `ls_dmnd_fills_from_sys`: fills of the data cache | tools/perf/pmu-events/arch/x86/amdzen2 to amdzen6 of Linux, August 2026 | accesses to devices (MMIO) count, too |
//!
//! Events of the uncore count for all threads of a socket together, so that they are of no use here.

use crate::events::Code;
use std::ops::RangeInclusive;

/// CPUs with the same events.
struct Server {
    vendor: &'static str,
    family: u32,
    models: &'static [RangeInclusive<u32>],
    event: u64,
    /// Unit mask of accesses that memory of the own node answered.
    local: u64,
    /// The same of another node.
    remote: u64,
}

impl Server {
    const fn intel(models: &'static [RangeInclusive<u32>], remote: u64) -> Self {
        Self { vendor: "GenuineIntel", family: 6, models, event: 0xd3, local: 0x01, remote }
    }

    const fn amd(family: u32, models: &'static [RangeInclusive<u32>], remote: u64) -> Self {
        Self { vendor: "AuthenticAMD", family, models, event: 0x43, local: 0x08, remote }
    }
}

/// `dram_io_far`, and `alternate_memories`: memory behind CXL, which is a node without CPUs.
const FAR_OR_CXL: u64 = 0x40 | 0x80;

const SERVERS: [Server; 8] = [
    // Haswell-EP, Broadwell-EP, Broadwell-DE: LOCAL_DRAM, REMOTE_DRAM.
    Server::intel(&[0x3f..=0x3f, 0x4f..=0x4f, 0x56..=0x56], 0x04),
    // Skylake-SP to Cooper Lake, Ice Lake-SP and -D, Sapphire Rapids, Emerald Rapids: the same, with another mask.
    Server::intel(&[0x55..=0x55, 0x6a..=0x6a, 0x6c..=0x6c, 0x8f..=0x8f, 0xcf..=0xcf], 0x02),
    // Granite Rapids-SP and -D: the same.
    Server::intel(&[0xad..=0xae], 0x02),
    // Sierra Forest, Clearwater Forest: LOCAL_DRAM, REMOTE_DRAM_OR_NOFWD.
    Server::intel(&[0xaf..=0xaf, 0xdd..=0xdd], 0x02),
    // Zen 2: lcl_dram, rmt_dram.
    Server::amd(0x17, &[0x30..=0xff], 0x40),
    // Zen 3: dram_io_near, dram_io_far.
    Server::amd(0x19, &[0x00..=0x0f, 0x20..=0x5f], 0x40),
    // Zen 4.
    Server::amd(0x19, &[0x10..=0x1f, 0x60..=0xff], FAR_OR_CXL),
    // Zen 5, Zen 6.
    Server::amd(0x1a, &[0x00..=0xff], FAR_OR_CXL),
];

/// Events of local and of remote accesses of the first CPU of `/proc/cpuinfo`.
pub(crate) fn local_and_remote(cpuinfo: &str) -> Option<[Code; 2]> {
    let field = |name: &str| {
        let is_it = |line: &&str| line.split(':').next().is_some_and(|key| key.trim() == name);
        cpuinfo.lines().find(is_it)?.split_once(':').map(|(_, value)| value.trim())
    };
    let number = |name| field(name)?.parse::<u32>().ok();
    let (vendor, family, model) = (field("vendor_id")?, number("cpu family")?, number("model")?);
    let is_it = |server: &&Server| {
        (server.vendor, server.family) == (vendor, family)
            && server.models.iter().any(|models| models.contains(&model))
    };
    let server = SERVERS.iter().find(is_it)?;
    Some([server.local, server.remote].map(|mask| Code::Raw(mask << 8 | server.event)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernel prints them, with the event's code and the unit masks of local and of remote accesses as the lists have them.
    #[test]
    fn servers_have_their_makers_events() {
        const KNOWN: [(&str, &str, u32, u32, [u64; 2]); 22] = [
            ("Haswell-EP", "GenuineIntel", 6, 63, [0x01d3, 0x04d3]),
            ("Broadwell-EP", "GenuineIntel", 6, 79, [0x01d3, 0x04d3]),
            ("Broadwell-DE", "GenuineIntel", 6, 86, [0x01d3, 0x04d3]),
            ("Skylake-SP", "GenuineIntel", 6, 85, [0x01d3, 0x02d3]),
            ("Ice Lake-SP", "GenuineIntel", 6, 106, [0x01d3, 0x02d3]),
            ("Ice Lake-D", "GenuineIntel", 6, 108, [0x01d3, 0x02d3]),
            ("Sapphire Rapids", "GenuineIntel", 6, 143, [0x01d3, 0x02d3]),
            ("Emerald Rapids", "GenuineIntel", 6, 207, [0x01d3, 0x02d3]),
            ("Granite Rapids-SP", "GenuineIntel", 6, 173, [0x01d3, 0x02d3]),
            ("Granite Rapids-D", "GenuineIntel", 6, 174, [0x01d3, 0x02d3]),
            ("Sierra Forest", "GenuineIntel", 6, 175, [0x01d3, 0x02d3]),
            ("Clearwater Forest", "GenuineIntel", 6, 221, [0x01d3, 0x02d3]),
            ("Rome", "AuthenticAMD", 23, 0x31, [0x0843, 0x4043]),
            ("Milan", "AuthenticAMD", 25, 0x01, [0x0843, 0x4043]),
            ("Vermeer", "AuthenticAMD", 25, 0x21, [0x0843, 0x4043]),
            ("Genoa", "AuthenticAMD", 25, 0x11, [0x0843, 0xc043]),
            ("Raphael", "AuthenticAMD", 25, 0x61, [0x0843, 0xc043]),
            ("Bergamo", "AuthenticAMD", 25, 0xa0, [0x0843, 0xc043]),
            ("Turin", "AuthenticAMD", 26, 0x02, [0x0843, 0xc043]),
            ("Turin Dense", "AuthenticAMD", 26, 0x11, [0x0843, 0xc043]),
            ("Granite Ridge", "AuthenticAMD", 26, 0x44, [0x0843, 0xc043]),
            ("Venice", "AuthenticAMD", 26, 0x50, [0x0843, 0xc043]),
        ];
        for (name, vendor, family, model, events) in KNOWN {
            assert_eq!(of(vendor, family, model), Some(events.map(Code::Raw)), "{name}");
        }
    }

    #[test]
    fn other_cpus_have_none() {
        // Sandy Bridge, Grand Ridge (one socket), Panther Lake; Naples, whose list has no such event.
        for (vendor, family, model) in [
            ("GenuineIntel", 6, 42),
            ("GenuineIntel", 6, 182),
            ("GenuineIntel", 6, 204),
            ("GenuineIntel", 19, 1),
            ("AuthenticAMD", 23, 1),
            ("AuthenticAMD", 6, 85),
            ("HygonGenuine", 24, 0),
        ] {
            assert_eq!(of(vendor, family, model), None, "{vendor} {family} {model}");
        }
        assert_eq!(local_and_remote("nonsense"), None);
    }

    #[test]
    fn no_cpu_is_listed_twice() {
        let count = |vendor, family, model| {
            let of = |server: &&Server| (server.vendor, server.family) == (vendor, family);
            let models = SERVERS.iter().filter(of).flat_map(|server| server.models);
            models.filter(|models| models.contains(&model)).count()
        };
        for family in 0..0x20 {
            for model in 0..=0xff {
                assert!(count("GenuineIntel", family, model) <= 1, "Intel {family:#x} {model:#x}");
                assert!(count("AuthenticAMD", family, model) <= 1, "AMD {family:#x} {model:#x}");
            }
        }
    }

    fn of(vendor: &str, family: u32, model: u32) -> Option<[Code; 2]> {
        let text = format!(
            "processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: x\n"
        );
        local_and_remote(&text)
    }
}
