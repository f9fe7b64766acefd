//! Profiles of emulated servers, `lab/profiles/*.toml`.

use crate::file_error::{FileError, file_error};
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The profile that is used when none is named.
pub const DEFAULT_PROFILE: &str = "4n8c";

/// Distance of a node to itself (ACPI, SLIT).
const LOCAL_DISTANCE: u8 = 10;
/// A distance that means "unreachable" (ACPI, SLIT).
const UNREACHABLE: u8 = 255;

/// An emulated server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// NUMA nodes; each is a socket.
    pub nodes: usize,
    /// CPUs of each node at boot.
    pub cpus_per_node: Vec<usize>,
    /// Memory of each node at boot in MiB.
    pub memory_mib_per_node: Vec<usize>,
    /// SLIT, row = from, column = to.
    pub distances: Vec<Vec<u8>>,
    /// PCI devices that are attached to a node.
    pub devices: Vec<Device>,
    /// What can be plugged while the server runs.
    pub hotplug: Option<Hotplug>,
    /// Has it an IOMMU, so that devices can be passed through to guests?
    pub iommu: bool,
    /// Pages of 1 GiB that the kernel keeps for each node at boot: later it rarely finds that much in one piece.
    pub pages_1g_per_node: usize,
    /// Has each core two threads (SMT)? Their CPUs are neighbours by number.
    pub smt: bool,
    /// CPUs on which the kernel has no tick while they run one thread.
    pub nohz_full: Vec<usize>,
}

/// The text of a profile.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    nodes: usize,
    cpus_per_node: PerNode,
    memory_mib_per_node: PerNode,
    distances: Vec<Vec<u8>>,
    #[serde(default)]
    devices: Vec<Device>,
    hotplug: Option<Hotplug>,
    #[serde(default)]
    iommu: bool,
    #[serde(default)]
    pages_1g_per_node: usize,
    #[serde(default)]
    smt: bool,
    #[serde(default)]
    nohz_full: Vec<usize>,
}

/// Room for CPUs and memory that are plugged while the server runs.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Hotplug {
    /// The most CPUs that a node can have.
    pub cpus_per_node: usize,
    /// The most memory that can be plugged, in MiB.
    pub memory_mib: usize,
    /// Slots for it.
    pub memory_slots: usize,
}

/// One number for every node, or a list with one for each.
enum PerNode {
    Same(usize),
    List(Vec<usize>),
}

impl<'de> Deserialize<'de> for PerNode {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = PerNode;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a number for every node, or a list with a number for each node")
            }

            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<PerNode, E> {
                let error = |_| E::invalid_value(serde::de::Unexpected::Signed(value), &self);
                usize::try_from(value).map(PerNode::Same).map_err(error)
            }

            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<PerNode, E> {
                let error = |_| E::invalid_value(serde::de::Unexpected::Unsigned(value), &self);
                usize::try_from(value).map(PerNode::Same).map_err(error)
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<PerNode, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = list.next_element()? {
                    values.push(value);
                }
                Ok(PerNode::List(values))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl PerNode {
    /// The number of each node. In a list 0 stands for a node that has none.
    fn resolve(self, field: &str, nodes: usize, low: usize, high: usize) -> Result<Vec<usize>, Fault> {
        match self {
            Self::Same(value) => {
                range(field, value, low, high)?;
                Ok(vec![value; nodes])
            }
            Self::List(values) if values.len() != nodes => {
                Err((field.to_owned(), format!("{} values, expected {nodes} (nodes)", values.len())))
            }
            Self::List(values) => {
                // The server boots on node 0.
                range(&format!("{field}[0]"), values[0], low, high)?;
                for (node, &value) in values.iter().enumerate().filter(|(_, value)| **value != 0) {
                    range(&format!("{field}[{node}]"), value, low, high)?;
                }
                Ok(values)
            }
        }
    }
}

/// A key, and what is wrong with its value.
type Fault = (String, String);

fn range(field: &str, value: usize, low: usize, high: usize) -> Result<(), Fault> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err((field.to_owned(), format!("{value} is not within {low} to {high}")))
}

/// A PCI device on a node.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// What it is.
    pub model: DeviceModel,
    /// The node that its root port belongs to.
    pub node: usize,
}

/// What a PCI device can be.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub enum DeviceModel {
    /// A paravirtual network card.
    #[serde(rename = "virtio-net-pci")]
    VirtioNet,
    /// A network card.
    #[serde(rename = "e1000e")]
    E1000e,
    /// A network card with virtual functions.
    #[serde(rename = "igb")]
    Igb,
    /// A disk with nothing on it.
    #[serde(rename = "nvme")]
    Nvme,
}

/// What is wrong with a profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// There is none of that name.
    #[error("profile \"{name}\": there is no {path}; there are: {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// Where it was looked for.
        path: PathBuf,
        /// The names that exist.
        known: String,
    },
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// It is no TOML, or has unknown or missing keys.
    #[error("{path}: {source}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A value cannot be.
    #[error("{path}: {field}: {reason}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl Profile {
    /// Loads the profile of a name, or of a file where the name ends in `.toml`.
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        let directory = crate::lab_dir().join("profiles");
        let is_file = name.ends_with(".toml");
        let path = if is_file { PathBuf::from(name) } else { directory.join(format!("{name}.toml")) };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_file => {
                return Err(ProfileError::Unknown { name: name.into(), path, known: known(&directory) });
            }
            Err(source) => return Err(file_error(&path)(source).into()),
        };
        Self::parse(&text, &path)
    }

    /// Understands the text of `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ProfileError> {
        let text: Text = toml::from_str(text)
            .map_err(|source| ProfileError::Syntax { path: path.into(), source: source.into() })?;
        let value = |(field, reason)| ProfileError::Value { path: path.into(), field, reason };
        Self::build(text).map_err(value)
    }

    fn build(text: Text) -> Result<Self, Fault> {
        let Text { nodes, cpus_per_node, memory_mib_per_node, pages_1g_per_node, .. } = text;
        let Text { distances, devices, hotplug, iommu, smt, nohz_full, .. } = text;
        range("nodes", nodes, 1, 16)?;
        let cpus_per_node = cpus_per_node.resolve("cpus_per_node", nodes, 1, 16)?;
        let memory_mib_per_node = memory_mib_per_node.resolve("memory_mib_per_node", nodes, 256, 65536)?;
        let profile = Self {
            nodes,
            cpus_per_node,
            memory_mib_per_node,
            distances,
            devices,
            hotplug,
            iommu,
            pages_1g_per_node,
            smt,
            nohz_full,
        };
        profile.check()?;
        Ok(profile)
    }

    fn check(&self) -> Result<(), Fault> {
        range("sum of cpus_per_node", self.cpus(), 1, 64)?;
        range("number of devices", self.devices.len(), 0, 16)?;
        // The server itself needs room.
        let smallest = self.memory_mib_per_node.iter().copied().min().unwrap_or(0);
        range("pages_1g_per_node", self.pages_1g_per_node, 0, (smallest >> 10).saturating_sub(2))?;
        for (index, cpu) in self.nohz_full.iter().enumerate() {
            // One has to keep the time.
            range(&format!("nohz_full[{index}]"), *cpu, 1, self.cpus() - 1)?;
        }
        self.check_distances()?;
        for (index, device) in self.devices.iter().enumerate() {
            range(&format!("devices[{index}].node"), device.node, 0, self.nodes - 1)?;
        }
        for (node, (cpus, memory)) in self.cpus_per_node.iter().zip(&self.memory_mib_per_node).enumerate() {
            if (*cpus, *memory) == (0, 0) && self.hotplug.is_none() {
                let reason = "0, as is memory_mib_per_node: such a node needs [hotplug]".to_owned();
                return Err((format!("cpus_per_node[{node}]"), reason));
            }
        }
        if self.smt && (self.even().is_none() || !self.largest_node().is_multiple_of(2)) {
            let reason = "true: nodes have to have the same even number of CPUs, and no [hotplug]".to_owned();
            return Err(("smt".to_owned(), reason));
        }
        let Some(hotplug) = &self.hotplug else { return Ok(()) };
        range("hotplug.cpus_per_node", hotplug.cpus_per_node, self.largest_node(), 128)?;
        range("nodes * hotplug.cpus_per_node", self.nodes * hotplug.cpus_per_node, 1, 256)?;
        range("hotplug.memory_mib", hotplug.memory_mib, 256, 65536)?;
        range("hotplug.memory_slots", hotplug.memory_slots, 1, 32)
    }

    fn check_distances(&self) -> Result<(), Fault> {
        let rows = self.distances.len();
        if rows != self.nodes {
            return Err(("distances".into(), format!("{rows} rows, expected {} (nodes)", self.nodes)));
        }
        for (from, row) in self.distances.iter().enumerate() {
            if row.len() != self.nodes {
                let reason = format!("{} columns, expected {} (nodes)", row.len(), self.nodes);
                return Err((format!("distances[{from}]"), reason));
            }
            for (to, &value) in row.iter().enumerate() {
                let good = match from == to {
                    true => value == LOCAL_DISTANCE,
                    // Linux drops a SLIT in which another node is as near as the node itself.
                    false => value > LOCAL_DISTANCE && value < UNREACHABLE,
                };
                if !good {
                    let expected = if from == to { "10" } else { "11 to 254" };
                    return Err((
                        format!("distances[{from}][{to}]"),
                        format!("{value}, expected {expected}"),
                    ));
                }
            }
        }
        Ok(())
    }

    /// CPUs of the server at boot.
    pub fn cpus(&self) -> usize {
        self.cpus_per_node.iter().sum()
    }

    /// Cores of each socket that can have a CPU.
    pub fn cores_per_socket(&self) -> usize {
        self.hotplug.as_ref().map_or(self.largest_node(), |hotplug| hotplug.cpus_per_node)
    }

    fn largest_node(&self) -> usize {
        self.cpus_per_node.iter().copied().max().unwrap_or(1)
    }

    /// Memory of the server at boot in MiB.
    pub fn memory_mib(&self) -> usize {
        self.memory_mib_per_node.iter().sum()
    }

    /// CPUs and MiB of each node, if all nodes are equal and stay so.
    pub fn even(&self) -> Option<(usize, usize)> {
        let (cpus, memory) = (self.cpus_per_node[0], self.memory_mib_per_node[0]);
        let same = self.cpus_per_node.iter().all(|&other| other == cpus)
            && self.memory_mib_per_node.iter().all(|&other| other == memory);
        (same && self.hotplug.is_none()).then_some((cpus, memory))
    }
}

fn known(directory: &Path) -> String {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".toml").map(str::to_owned))
        .collect();
    names.sort();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = "nodes = 2\ncpus_per_node = 2\nmemory_mib_per_node = 512\n\
        distances = [[10, 21], [21, 10]]\n[[devices]]\nmodel = \"nvme\"\nnode = 1\n";

    const EMPTY_FROM: &str = "cpus_per_node = 2\nmemory_mib_per_node = 512";
    const EMPTY_TO: &str = "cpus_per_node = [2, 0]\nmemory_mib_per_node = [512, 0]";
    const HOTPLUG: &str = "[hotplug]\ncpus_per_node = 3\nmemory_mib = 1024\nmemory_slots = 2\n";

    fn error(text: &str) -> String {
        Profile::parse(text, Path::new("p.toml")).unwrap_err().to_string()
    }

    #[test]
    fn the_profiles_of_the_project_are_valid_and_what_their_names_say() {
        let names = [
            ("2n4c", 2, 4),
            ("2n4c-large", 2, 4),
            ("2n5c", 2, 5),
            ("2n5c-iommu", 2, 5),
            ("2n6c-iommu", 2, 6),
            ("2n8c-256", 2, 8),
            ("3n4c-hotplug", 3, 4),
            ("4n8c", 4, 8),
            ("4n8c-iommu", 4, 8),
            ("4n9c", 4, 9),
            ("8n16c", 8, 16),
        ];
        for (name, nodes, cpus) in names {
            let profile = Profile::load(name).unwrap();
            assert_eq!((profile.nodes, profile.cpus()), (nodes, cpus), "{name}");
            assert!(!profile.devices.is_empty(), "{name}");
        }
        // What is left without CPU 0 is the same on every node.
        for name in ["2n5c", "2n5c-iommu", "4n9c"] {
            let mut cpus = Profile::load(name).unwrap().cpus_per_node;
            cpus[0] -= 1;
            assert!(cpus.iter().all(|&count| count == cpus[0]), "{name}: {cpus:?}");
        }
        assert!(Profile::load(DEFAULT_PROFILE).is_ok());
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = Profile::load("3n5c").unwrap_err().to_string();
        assert!(
            error.contains("\"3n5c\"")
                && error.contains(
                    "2n4c, 2n4c-large, 2n4c-nohz, 2n5c, 2n5c-iommu, 2n6c-iommu, 2n8c, 2n8c-256, 2n8c-smt, 3n4c-hotplug, 4n8c, 4n8c-iommu, 4n9c, 8n16c"
                ),
            "{error}"
        );
    }

    #[test]
    fn bad_values_are_refused_with_file_field_and_value() {
        let cases = [
            ("nodes = 2", "nodes = 0", "p.toml: nodes: 0 is not within 1 to 16"),
            ("cpus_per_node = 2", "cpus_per_node = 17", "p.toml: cpus_per_node: 17"),
            ("= 512", "= 1", "p.toml: memory_mib_per_node: 1 is not within 256 to 65536"),
            ("node = 2", "node = \"2\"", "expected a number for every node, or a list"),
            ("node = 2", "node = -2", "invalid value: integer `-2`"),
            ("node = 2", "node = [3]", "p.toml: cpus_per_node: 1 values, expected 2 (nodes)"),
            ("node = 2", "node = [3, 17]", "p.toml: cpus_per_node[1]: 17 is not within 1 to 16"),
            ("node = 2", "node = [0, 2]", "p.toml: cpus_per_node[0]: 0 is not within 1 to 16"),
            ("node = 2", "node = [3, -2]", "invalid value: integer `-2`"),
            ("node = 512", "node = [512, 1]", "p.toml: memory_mib_per_node[1]: 1 is not within 256"),
            (EMPTY_FROM, EMPTY_TO, "p.toml: cpus_per_node[1]: 0, as is memory_mib_per_node"),
            ("[[10, 21], [21, 10]]", "[[10, 21]]", "p.toml: distances: 1 rows, expected 2"),
            ("[21, 10]", "[21]", "p.toml: distances[1]: 1 columns, expected 2"),
            ("[21, 10]", "[21, 11]", "p.toml: distances[1][1]: 11, expected 10"),
            ("[21, 10]", "[10, 10]", "p.toml: distances[1][0]: 10, expected 11 to 254"),
            ("[21, 10]", "[255, 10]", "p.toml: distances[1][0]: 255, expected 11 to 254"),
            ("node = 1", "node = 2", "p.toml: devices[0].node: 2 is not within 0 to 1"),
            ("\"nvme\"", "\"floppy\"", "unknown variant `floppy`"),
            (
                "nodes = 2",
                "nodes = 2\npages_1g_per_node = 1",
                "p.toml: pages_1g_per_node: 1 is not within 0 to 0",
            ),
            (
                "cpus_per_node = 2",
                "cpus_per_node = 2\nnohz_full = [0]",
                "p.toml: nohz_full[0]: 0 is not within 1 to 3",
            ),
            (
                "cpus_per_node = 2",
                "cpus_per_node = 3\nsmt = true",
                "p.toml: smt: true: nodes have to have the same even number of CPUs, and no [hotplug]",
            ),
            ("nodes = 2", "nodes = 2\nsockets = 2", "unknown field `sockets`"),
            ("nodes = 2\n", "", "missing field `nodes`"),
        ];
        for (from, to, expected) in cases {
            let found = error(&GOOD.replacen(from, to, 1));
            assert!(found.contains(expected), "{to}: {found}");
        }
    }

    #[test]
    fn nodes_may_differ_and_be_empty_where_they_can_be_filled() {
        let text = GOOD.replace("cpus_per_node = 2", "cpus_per_node = [3, 2]");
        let profile = Profile::parse(&text, Path::new("p.toml")).unwrap();
        assert_eq!((profile.cpus(), profile.cores_per_socket(), profile.even()), (5, 3, None));
        let even = Profile::parse(GOOD, Path::new("p.toml")).unwrap();
        assert_eq!((even.cores_per_socket(), even.even()), (2, Some((2, 512))));
        let empty = format!("{}{HOTPLUG}", GOOD.replace(EMPTY_FROM, EMPTY_TO));
        let profile = Profile::parse(&empty, Path::new("p.toml")).unwrap();
        assert_eq!((profile.cpus(), profile.cores_per_socket(), profile.memory_mib()), (2, 3, 512));
        let cases = [
            ("cpus_per_node = 3", "cpus_per_node = 1", "hotplug.cpus_per_node: 1 is not within 2 to 128"),
            ("memory_slots = 2", "memory_slots = 0", "hotplug.memory_slots: 0 is not within 1 to 32"),
            ("memory_mib = 1024", "memory_mib = 1", "hotplug.memory_mib: 1 is not within 256"),
            ("memory_mib = 1024", "memory = 1", "unknown field `memory`"),
        ];
        for (from, to, expected) in cases {
            let found = error(&format!("{GOOD}{}", HOTPLUG.replace(from, to)));
            assert!(found.contains(expected), "{to}: {found}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,200}", nodes in any::<usize>(), cpus in any::<usize>()) {
            let _ = Profile::parse(&text, Path::new("p.toml"));
            let text = GOOD.replace("nodes = 2", &format!("nodes = {nodes}"))
                .replace("cpus_per_node = 2", &format!("cpus_per_node = {cpus}"));
            let _ = Profile::parse(&text, Path::new("p.toml"));
        }
    }
}
