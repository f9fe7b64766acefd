//! Profiles of emulated servers, `lab/profiles/*.toml`.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The profile that is used when none is named.
pub const DEFAULT_PROFILE: &str = "4n8c";

/// Distance of a node to itself (ACPI, SLIT).
const LOCAL_DISTANCE: u8 = 10;
/// A distance that means "unreachable" (ACPI, SLIT).
const UNREACHABLE: u8 = 255;

/// An emulated server.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// NUMA nodes; each is a socket.
    pub nodes: usize,
    /// CPUs of each node.
    pub cpus_per_node: usize,
    /// Memory of each node in MiB.
    pub memory_mib_per_node: usize,
    /// SLIT, row = from, column = to.
    pub distances: Vec<Vec<u8>>,
    /// PCI devices that are attached to a node.
    #[serde(default)]
    pub devices: Vec<Device>,
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
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
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
            Err(source) => return Err(ProfileError::Read { path, source }),
        };
        Self::parse(&text, &path)
    }

    /// Understands the text of `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ProfileError> {
        let profile: Self = toml::from_str(text)
            .map_err(|source| ProfileError::Syntax { path: path.into(), source: source.into() })?;
        match profile.check() {
            Ok(()) => Ok(profile),
            Err((field, reason)) => Err(ProfileError::Value { path: path.into(), field, reason }),
        }
    }

    fn check(&self) -> Result<(), (String, String)> {
        let range = |field: &str, value: usize, low: usize, high: usize| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err((field.to_owned(), format!("{value} is not within {low} to {high}")))
        };
        range("nodes", self.nodes, 1, 16)?;
        range("cpus_per_node", self.cpus_per_node, 1, 16)?;
        range("nodes * cpus_per_node", self.cpus(), 1, 64)?;
        range("memory_mib_per_node", self.memory_mib_per_node, 256, 65536)?;
        range("number of devices", self.devices.len(), 0, 16)?;
        self.check_distances()?;
        for (index, device) in self.devices.iter().enumerate() {
            range(&format!("devices[{index}].node"), device.node, 0, self.nodes - 1)?;
        }
        Ok(())
    }

    fn check_distances(&self) -> Result<(), (String, String)> {
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

    /// CPUs of the server.
    pub fn cpus(&self) -> usize {
        self.nodes.saturating_mul(self.cpus_per_node)
    }

    /// Memory of the server in MiB.
    pub fn memory_mib(&self) -> usize {
        self.nodes * self.memory_mib_per_node
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

    fn error(text: &str) -> String {
        Profile::parse(text, Path::new("p.toml")).unwrap_err().to_string()
    }

    #[test]
    fn the_profiles_of_the_project_are_valid_and_what_their_names_say() {
        for (name, nodes, cpus) in [("2n4c", 2, 4), ("4n8c", 4, 8), ("8n16c", 8, 16)] {
            let profile = Profile::load(name).unwrap();
            assert_eq!((profile.nodes, profile.cpus()), (nodes, cpus), "{name}");
            assert!(!profile.devices.is_empty(), "{name}");
        }
        assert!(Profile::load(DEFAULT_PROFILE).is_ok());
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = Profile::load("3n5c").unwrap_err().to_string();
        assert!(error.contains("\"3n5c\"") && error.contains("2n4c, 2n8c, 4n8c, 8n16c"), "{error}");
    }

    #[test]
    fn bad_values_are_refused_with_file_field_and_value() {
        let cases = [
            ("nodes = 2", "nodes = 0", "p.toml: nodes: 0 is not within 1 to 16"),
            ("cpus_per_node = 2", "cpus_per_node = 17", "p.toml: cpus_per_node: 17"),
            ("= 512", "= 1", "p.toml: memory_mib_per_node: 1 is not within 256 to 65536"),
            ("[[10, 21], [21, 10]]", "[[10, 21]]", "p.toml: distances: 1 rows, expected 2"),
            ("[21, 10]", "[21]", "p.toml: distances[1]: 1 columns, expected 2"),
            ("[21, 10]", "[21, 11]", "p.toml: distances[1][1]: 11, expected 10"),
            ("[21, 10]", "[10, 10]", "p.toml: distances[1][0]: 10, expected 11 to 254"),
            ("[21, 10]", "[255, 10]", "p.toml: distances[1][0]: 255, expected 11 to 254"),
            ("node = 1", "node = 2", "p.toml: devices[0].node: 2 is not within 0 to 1"),
            ("\"nvme\"", "\"floppy\"", "unknown variant `floppy`"),
            ("nodes = 2", "nodes = 2\nsockets = 2", "unknown field `sockets`"),
            ("nodes = 2\n", "", "missing field `nodes`"),
        ];
        for (from, to, expected) in cases {
            let found = error(&GOOD.replacen(from, to, 1));
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
