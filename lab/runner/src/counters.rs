//! The server's hardware counters: what a server with them is started with, and what is loaded into it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use vnuma_lab_agent::client::Input;
use vnuma_lab_agent::protocol::Exec;
use vnuma_lab_counters::{Machine, PluginError, RegionError, Sampling, qemu_arguments, region};
use vnuma_lab_pricing::{CounterProfile, ProfileError, by_name};

use crate::binaries;
use crate::cache::cache_dir;
use crate::image::Image;
use crate::lab::{Lab, LabError};
use crate::pmu;
use crate::profile::Profile;

/// Where the programs of the server are.
const PROGRAMS: &str = "/run/lab/bin";
/// How long the copy of a file and the loading of the module may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Counters for a server: `PROFILE`, or `PROFILE:full` to model every set of the caches.
#[derive(Clone, Debug, PartialEq)]
pub struct Counters {
    /// What is modelled and what it costs.
    pub profile: CounterProfile,
    /// How much of it.
    pub sampling: Sampling,
}

impl FromStr for Counters {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let (name, sampling) = match text.strip_suffix(":full") {
            Some(name) => (name, Sampling::Full),
            None => (text, Sampling::Sampled),
        };
        Ok(Self { profile: by_name(name)?, sampling })
    }
}

/// Why a server has no counters.
#[derive(Debug, thiserror::Error)]
pub enum CountersError {
    /// The plugin does not build.
    #[error(transparent)]
    Plugin(#[from] PluginError),
    /// The profiles of machine and counters do not fit.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// lab-count does not build.
    #[error(transparent)]
    Build(#[from] binaries::BuildError),
    /// A file.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The PMU module does not build.
    #[error("make of lab/pmu for {release} failed with {status}:\n{output}")]
    Make {
        /// The kernel.
        release: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// What it said.
        output: String,
    },
    /// The PMU module does not load.
    #[error("insmod of the PMU module ended with {status}: {output}")]
    Load {
        /// Its exit status.
        status: i32,
        /// What it and the kernel said.
        output: String,
    },
}

/// Everything that a server with counters needs, built.
pub(crate) struct Ready {
    region: Vec<u8>,
    plugin: PathBuf,
    module: PathBuf,
    programs: Vec<PathBuf>,
}

impl Ready {
    /// Builds it.
    pub(crate) fn build(
        image: &Image,
        counters: &Counters,
        name: &str,
        profile: &Profile,
    ) -> Result<Self, CountersError> {
        let machine = Machine {
            profile: name,
            nodes: profile.nodes,
            cpus_per_node: profile.cpus_per_node,
            memory_mib_per_node: profile.memory_mib_per_node,
            distances: &profile.distances,
        };
        let region = region(&counters.profile, &machine, counters.sampling)?;
        let programs = binaries::build(&[("lab-count", "lab-count"), ("lab-count", "lab-load")])?;
        let plugin = vnuma_lab_counters::build(&cache_dir())?;
        Ok(Self { region, plugin, module: pmu::build(image)?, programs })
    }

    /// Writes the region into the server's directory; the arguments for its QEMU.
    pub(crate) fn arguments(&self, directory: &Path) -> Result<Vec<String>, CountersError> {
        let path = directory.join("counters");
        fs::write(&path, &self.region)
            .map_err(|source| CountersError::File { path: path.clone(), source })?;
        Ok(qemu_arguments(&self.plugin, &path, self.region.len()))
    }

    /// Loads the module and copies the programs.
    pub(crate) fn load(&self, lab: &Lab) -> Result<(), LabError> {
        for program in &self.programs {
            let name = program.file_name().unwrap_or_default().to_string_lossy();
            lab.put(program, &format!("{PROGRAMS}/{name}"), LIMIT)?;
        }
        let module = "/run/lab/vnuma_lab_pmu.ko";
        lab.put(&self.module, module, LIMIT)?;
        let script = format!(
            "insmod {module} 2>&1 && test -e /sys/devices/cpu/vnuma/header || {{ dmesg | tail -3; false; }}"
        );
        let exec = Exec { argv: vec!["sh".into(), "-c".into(), script], ..Exec::default() };
        let mut output = Vec::new();
        let status = lab.exec(&exec, Input::Null, &mut output, &mut io::sink(), LIMIT)?;
        if status != 0 {
            let output = String::from_utf8_lossy(&output).trim().to_owned();
            return Err(CountersError::Load { status, output }.into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_names_profile_and_sampling() {
        let counters: Counters = "vprobe-e5620".parse().unwrap();
        assert_eq!((counters.profile.name.as_str(), counters.sampling), ("vprobe-e5620", Sampling::Sampled));
        assert_eq!("vprobe-e5620:full".parse::<Counters>().unwrap().sampling, Sampling::Full);
        assert!("vprobe".parse::<Counters>().unwrap_err().to_string().contains("epyc-nps4"));
    }

    #[test]
    fn every_counter_profile_fits_the_machine_it_names() {
        for name in vnuma_lab_pricing::names() {
            let counters: Counters = name.parse().unwrap();
            let profile = Profile::load(&counters.profile.machine).unwrap();
            let machine = Machine {
                profile: &counters.profile.machine,
                nodes: profile.nodes,
                cpus_per_node: profile.cpus_per_node,
                memory_mib_per_node: profile.memory_mib_per_node,
                distances: &profile.distances,
            };
            let region = region(&counters.profile, &machine, Sampling::Sampled).unwrap();
            assert!(region.len().is_power_of_two());
            let used: std::collections::HashSet<u8> = profile.distances.iter().flatten().copied().collect();
            assert_eq!(
                used.len(),
                counters.profile.memory.len(),
                "{name} has a distance that its machine lacks"
            );
        }
    }
}
