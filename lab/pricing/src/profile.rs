//! Profiles of machines, `lab/pricing/profiles/*.toml`: compiled in, as the server has no checkout.

use serde::Deserialize;
use vnuma_abi_lab_counters::{COST_ONE, LINE_SIZE, MAX_CLASSES, MAX_NODES, NAME_SIZE};

use crate::Prices;

/// Name and text of every profile.
const PROFILES: [(&str, &str); 5] = [
    ("broadwell-2s", include_str!("../profiles/broadwell-2s.toml")),
    ("broadwell-2s-high", include_str!("../profiles/broadwell-2s-high.toml")),
    ("epyc-nps4", include_str!("../profiles/epyc-nps4.toml")),
    ("vprobe-e5620", include_str!("../profiles/vprobe-e5620.toml")),
    ("xpv-opteron-6344", include_str!("../profiles/xpv-opteron-6344.toml")),
];

/// Sets are grouped by 16, see lab/counters/plugin/cache.c.
const SET_GROUP: u32 = 16;

/// A machine's caches, distances and latencies.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct CounterProfile {
    /// Name, that of its file.
    #[serde(skip)]
    pub name: String,
    /// What it is, for people.
    pub title: String,
    /// The profile of lab/profiles that has its nodes and distances.
    pub machine: String,
    /// Clock that converts times to cycles.
    pub clock_ghz: f64,
    /// The private L2.
    pub l2: Cache,
    /// The last-level cache of a node.
    pub llc: Cache,
    /// An LLC hit, in cycles beyond the base.
    pub llc_hit_cycles: f64,
    /// A read of a register of a device on the CPU's node, in nanoseconds.
    pub mmio_read_ns: f64,
    /// A write to a register of a device on the CPU's node, in nanoseconds.
    pub mmio_write_ns: f64,
    /// Memory by distance, nearest first; the first is the node's own.
    pub memory: Vec<Memory>,
}

/// A cache with lines of 64 bytes.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Hash)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Its size.
    pub kib: u32,
    /// Its associativity.
    pub ways: u32,
}

/// Memory at one distance.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// The distance as the SLIT has it.
    pub distance: u8,
    /// A load that nothing foresees, in nanoseconds, the missed caches included.
    pub latency_ns: f64,
    /// A line that the prefetcher foresees, in nanoseconds: its share of one core's bandwidth.
    pub streamed_ns: f64,
}

/// What a profile's counters are counted with. Profiles of equal shape can price one another's runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Sets of an L2.
    pub l2_sets: u32,
    /// Ways of an L2.
    pub l2_ways: u32,
    /// Sets of an LLC.
    pub llc_sets: u32,
    /// Ways of an LLC.
    pub llc_ways: u32,
    /// Distances in use, sorted; 0 after the last. The index is the class.
    pub distances: [u8; MAX_CLASSES],
}

impl Shape {
    /// The classes of all pairs of nodes of a machine; an error names the first distance that the shape lacks.
    pub fn classes(&self, distances: &[Vec<u8>]) -> Result<[[u8; MAX_NODES]; MAX_NODES], u8> {
        let mut classes = [[0; MAX_NODES]; MAX_NODES];
        for (row, from) in classes.iter_mut().zip(distances) {
            for (class, &distance) in row.iter_mut().zip(from) {
                let found = self.distances.iter().position(|&known| known == distance);
                *class = found.filter(|_| distance != 0).ok_or(distance)? as u8;
            }
        }
        Ok(classes)
    }

    /// Can a cache of `other` be modelled beside this one? It sees what the same L2 misses, and has the same classes.
    pub fn takes_second(&self, other: &Self) -> bool {
        other.with_llc(self.llc_sets, self.llc_ways) == *self
    }

    /// The same with another last-level cache.
    pub fn with_llc(self, llc_sets: u32, llc_ways: u32) -> Self {
        Self { llc_sets, llc_ways, ..self }
    }

    /// How many classes there are.
    pub fn nr_classes(&self) -> usize {
        self.distances.iter().filter(|&&distance| distance != 0).count()
    }
}

/// What is wrong with a profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// There is none of that name.
    #[error("counter profile \"{name}\" is unknown; there are: {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// It is no TOML, or has unknown or missing keys.
    #[error("counter profile {name}: {source}")]
    Syntax {
        /// The profile.
        name: String,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A value cannot be.
    #[error("counter profile {name}: {field}: {reason}")]
    Value {
        /// The profile.
        name: String,
        /// The key.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// The names of all profiles.
pub fn names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|(name, _)| *name)
}

/// The profile of a name.
pub fn by_name(name: &str) -> Result<CounterProfile, ProfileError> {
    match PROFILES.iter().find(|(known, _)| *known == name) {
        Some((_, text)) => CounterProfile::parse(name, text),
        None => {
            let known = names().collect::<Vec<_>>().join(", ");
            Err(ProfileError::Unknown { name: name.into(), known })
        }
    }
}

impl CounterProfile {
    /// Reads and checks a profile.
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let mut profile: Self = toml::from_str(text)
            .map_err(|source| ProfileError::Syntax { name: name.into(), source: source.into() })?;
        name.clone_into(&mut profile.name);
        match profile.check() {
            Ok(()) => Ok(profile),
            Err((field, reason)) => Err(ProfileError::Value { name: name.into(), field, reason }),
        }
    }

    fn check(&self) -> Result<(), (String, String)> {
        if self.name.len() >= NAME_SIZE {
            return Err(("name".into(), format!("{} bytes, at most {} fit", self.name.len(), NAME_SIZE - 1)));
        }
        within("clock_ghz", self.clock_ghz, 0.1, 10.0)?;
        within("llc_hit_cycles", self.llc_hit_cycles, 1.0, 10_000.0)?;
        within("mmio_read_ns", self.mmio_read_ns, 1.0, 100_000.0)?;
        within("mmio_write_ns", self.mmio_write_ns, 1.0, self.mmio_read_ns)?;
        check_cache("l2", self.l2)?;
        check_cache("llc", self.llc)?;
        if !(1..=MAX_CLASSES).contains(&self.memory.len()) {
            return Err((
                "memory".into(),
                format!("{} distances, expected 1 to {MAX_CLASSES}", self.memory.len()),
            ));
        }
        let mut previous = Memory { distance: 9, latency_ns: 1.0, streamed_ns: 0.1 };
        for (index, memory) in self.memory.iter().enumerate() {
            let field = |name: &str| format!("memory[{index}].{name}");
            if index == 0 && memory.distance != 10 || memory.distance <= previous.distance {
                let reason = format!("{}, expected 10 first and then more and more", memory.distance);
                return Err((field("distance"), reason));
            }
            within(&field("latency_ns"), memory.latency_ns, previous.latency_ns, 100_000.0)?;
            within(&field("streamed_ns"), memory.streamed_ns, previous.streamed_ns, memory.latency_ns)?;
            previous = *memory;
        }
        Ok(())
    }

    /// What it is counted with.
    pub fn shape(&self) -> Shape {
        let mut distances = [0; MAX_CLASSES];
        for (to, memory) in distances.iter_mut().zip(&self.memory) {
            *to = memory.distance;
        }
        Shape {
            l2_sets: self.l2.sets(),
            l2_ways: self.l2.ways,
            llc_sets: self.llc.sets(),
            llc_ways: self.llc.ways,
            distances,
        }
    }

    /// What it costs.
    pub fn prices(&self) -> Prices {
        let cost = |cycles: f64| (cycles * f64::from(COST_ONE)).round() as u32;
        let mut prices = Prices {
            llc_hit: cost(self.llc_hit_cycles),
            dram: [0; MAX_CLASSES],
            streamed: [0; MAX_CLASSES],
            mmio_read: [0; MAX_CLASSES],
            mmio_write: [0; MAX_CLASSES],
        };
        for (class, memory) in self.memory.iter().enumerate() {
            // On the way to another node an access to a register takes the links that one to memory takes, there and back.
            let way_ns = memory.latency_ns - self.memory[0].latency_ns;
            prices.dram[class] = cost(memory.latency_ns * self.clock_ghz);
            prices.streamed[class] = cost(memory.streamed_ns * self.clock_ghz);
            prices.mmio_read[class] = cost((self.mmio_read_ns + way_ns) * self.clock_ghz);
            prices.mmio_write[class] = cost((self.mmio_write_ns + way_ns) * self.clock_ghz);
        }
        prices
    }
}

impl Cache {
    /// Its sets.
    pub fn sets(self) -> u32 {
        self.kib * 1024 / LINE_SIZE as u32 / self.ways
    }
}

fn within(field: &str, value: f64, low: f64, high: f64) -> Result<(), (String, String)> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err((field.to_owned(), format!("{value} is not within {low} to {high}")))
}

fn check_cache(field: &str, cache: Cache) -> Result<(), (String, String)> {
    within(&format!("{field}.kib"), cache.kib.into(), 16.0, f64::from(1 << 20))?;
    within(&format!("{field}.ways"), cache.ways.into(), 1.0, 64.0)?;
    let lines = cache.kib * 1024 / LINE_SIZE as u32;
    if !lines.is_multiple_of(cache.ways) || !cache.sets().is_multiple_of(SET_GROUP) {
        let reason = format!("{} KiB in {} ways is no multiple of {SET_GROUP} sets", cache.kib, cache.ways);
        return Err((field.to_owned(), reason));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "title = 't'\nmachine = 'm'\nclock_ghz = 2.0\nl2 = { kib = 256, ways = 8 }\n\
        llc = { kib = 12288, ways = 16 }\nllc_hit_cycles = 40\nmmio_read_ns = 800\nmmio_write_ns = 125\n\
        [[memory]]\ndistance = 10\nlatency_ns = 80\nstreamed_ns = 5\n\
        [[memory]]\ndistance = 21\nlatency_ns = 120.5\nstreamed_ns = 8\n";

    #[test]
    fn every_profile_is_good_and_tells_the_source_of_every_number() {
        for (name, text) in PROFILES {
            let profile = by_name(name).unwrap();
            assert!(!profile.title.is_empty(), "{name}");
            let keys = [
                "clock_ghz",
                "l2 =",
                "llc =",
                "llc_hit_cycles",
                "mmio_read_ns",
                "mmio_write_ns",
                "latency_ns",
                "streamed_ns",
            ];
            let lines: Vec<_> = text.lines().collect();
            for (number, line) in lines.iter().enumerate() {
                if keys.iter().any(|key| line.starts_with(key)) {
                    assert!(
                        lines[number - 1].starts_with("# "),
                        "{name}: no source above line {}",
                        number + 1
                    );
                }
            }
        }
    }

    #[test]
    fn a_shape_can_be_shared_and_prices_differ() {
        let shapes = |name: &str| by_name(name).unwrap().shape();
        let sharing = |name: &str| names().filter(|other| shapes(other) == shapes(name)).count();
        assert!(names().any(|name| sharing(name) > 1), "no two profiles share a shape");
        assert!(names().any(|name| sharing(name) == 1));
    }

    #[test]
    fn a_cache_beside_another_differs_in_nothing_else() {
        let shape = |name: &str| by_name(name).unwrap().shape();
        assert!(shape("broadwell-2s").takes_second(&shape("vprobe-e5620")));
        assert_ne!(shape("broadwell-2s"), shape("vprobe-e5620"));
        // Other distances, and another L2 as well.
        assert!(!shape("broadwell-2s").takes_second(&shape("epyc-nps4")));
        assert!(!shape("broadwell-2s").takes_second(&Shape { l2_ways: 16, ..shape("vprobe-e5620") }));
    }

    #[test]
    fn prices_are_cycles() {
        let profile = CounterProfile::parse("p", GOOD).unwrap();
        let prices = profile.prices();
        assert_eq!(prices.llc_hit, 40 * 256);
        assert_eq!(prices.dram[..3], [160 * 256, 241 * 256, 0]);
        assert_eq!(prices.streamed[..3], [10 * 256, 16 * 256, 0]);
        // What remote memory takes more, 40.5 ns, is 81 cycles.
        assert_eq!(prices.mmio_read[..3], [1600 * 256, 1681 * 256, 0]);
        assert_eq!(prices.mmio_write[..3], [250 * 256, 331 * 256, 0]);
        let shape = profile.shape();
        assert_eq!((shape.l2_sets, shape.llc_sets, shape.nr_classes()), (512, 12288, 2));
    }

    #[test]
    fn pairs_of_nodes_have_the_class_of_their_distance() {
        let shape = CounterProfile::parse("p", GOOD).unwrap().shape();
        let classes = shape.classes(&[vec![10, 21], vec![21, 10]]).unwrap();
        assert_eq!((classes[0][..3].to_vec(), classes[1][..3].to_vec()), (vec![0, 1, 0], vec![1, 0, 0]));
        assert_eq!(shape.classes(&[vec![10, 31]]), Err(31));
        assert_eq!(shape.classes(&[vec![0]]), Err(0));
    }

    #[test]
    fn errors_name_profile_field_and_value() {
        let error = |from: &str, to: &str| {
            assert!(GOOD.contains(from));
            CounterProfile::parse("p", &GOOD.replacen(from, to, 1)).unwrap_err().to_string()
        };
        let cases = [
            ("clock_ghz = 2.0", "clock_ghz = 0", "p: clock_ghz: 0 is not within 0.1 to 10"),
            ("kib = 256", "kib = 250", "p: l2: 250 KiB in 8 ways is no multiple of 16 sets"),
            ("ways = 16", "ways = 65", "p: llc.ways: 65 is not within 1 to 64"),
            ("mmio_read_ns = 800", "mmio_read_ns = 0", "p: mmio_read_ns: 0 is not within 1 to 100000"),
            ("mmio_write_ns = 125", "mmio_write_ns = 801", "p: mmio_write_ns: 801 is not within 1 to 800"),
            ("mmio_write_ns = 125\n", "", "missing field `mmio_write_ns`"),
            ("distance = 21", "distance = 10", "p: memory[1].distance: 10, expected"),
            ("latency_ns = 120.5", "latency_ns = 79", "p: memory[1].latency_ns: 79 is not within 80 to"),
            (
                "streamed_ns = 8",
                "streamed_ns = 121",
                "p: memory[1].streamed_ns: 121 is not within 5 to 120.5",
            ),
            ("title", "titel", "unknown field `titel`"),
            ("clock_ghz = 2.0", "clock_ghz = nan", "clock_ghz: NaN is not within"),
        ];
        for (from, to, expected) in cases {
            let text = error(from, to);
            assert!(text.contains(expected), "{text}");
        }
        let unknown = by_name("nothing").unwrap_err().to_string();
        assert!(unknown.contains("\"nothing\"") && unknown.contains("vprobe-e5620"), "{unknown}");
    }
}
