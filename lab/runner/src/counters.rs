//! The server's hardware counters: what a server with them is started with, and what is loaded into it.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use vnuma_lab_counters::{Machine, PluginError, RegionError, Sampling, qemu_arguments, region};
use vnuma_lab_pricing::{CounterProfile, ProfileError, by_name};

use crate::binaries;
use crate::cache::cache_dir;
use crate::file_error::{FileError, file_error};
use crate::image::Image;
use crate::kbuild::KbuildError;
use crate::pmu;
use crate::profile::Profile;

/// Where the programs of the server are.
const PROGRAMS: &str = "/run/lab/bin";
const MODULE: &str = "/run/lab/vnuma_lab_pmu.ko";
/// Loads the module, and says why that failed.
pub(crate) const LOAD_PMU: &str = "insmod /run/lab/vnuma_lab_pmu.ko 2>&1 && \
    test -e /sys/devices/cpu/vnuma/header || { dmesg | tail -3; false; }";

/// Counters for a server: `PROFILE`; `PROFILE+SECOND` to model the last-level cache of another profile beside it; either with
/// `:full` to model every set of the caches.
#[derive(Clone, Debug, PartialEq)]
pub struct Counters {
    /// What is modelled and what it costs.
    pub profile: CounterProfile,
    /// Whose last-level cache is modelled as well.
    pub second: Option<CounterProfile>,
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
        let (first, second) =
            name.split_once('+').map_or((name, None), |(first, second)| (first, Some(second)));
        Ok(Self { profile: by_name(first)?, second: second.map(by_name).transpose()?, sampling })
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
    /// The nodes of the server differ.
    #[error(
        "profile {0}: the counters need nodes that have equal numbers of CPUs and equal memory, and no hotplug"
    )]
    Uneven(String),
    /// lab-count does not build.
    #[error(transparent)]
    Build(#[from] binaries::BuildError),
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The PMU module does not build.
    #[error(transparent)]
    Module(#[from] KbuildError),
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
        let uneven = || CountersError::Uneven(name.to_owned());
        let (cpus_per_node, memory_mib_per_node) = profile.even().ok_or_else(uneven)?;
        let machine = Machine {
            profile: name,
            nodes: profile.nodes,
            cpus_per_node,
            memory_mib_per_node,
            distances: &profile.distances,
        };
        let region = region(&counters.profile, counters.second.as_ref(), &machine, counters.sampling)?;
        let programs = binaries::build(&[("lab-count", "lab-count"), ("lab-count", "lab-load")])?;
        let plugin = vnuma_lab_counters::build(&cache_dir())?;
        Ok(Self { region, plugin, module: pmu::build(image)?, programs })
    }

    /// Writes the region into the server's directory; the arguments for its QEMU.
    pub(crate) fn arguments(&self, directory: &Path) -> Result<Vec<String>, CountersError> {
        let path = directory.join("counters");
        fs::write(&path, &self.region).map_err(file_error(&path))?;
        Ok(qemu_arguments(&self.plugin, &path, self.region.len()))
    }

    /// The files that the server needs: here, there.
    pub(crate) fn files(&self) -> Vec<(&Path, String)> {
        let program = |path: &'_ PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            format!("{PROGRAMS}/{name}")
        };
        let programs = self.programs.iter().map(|path| (path.as_path(), program(path)));
        programs.chain([(self.module.as_path(), MODULE.to_owned())]).collect()
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
        let both: Counters = "broadwell-2s+vprobe-e5620:full".parse().unwrap();
        assert_eq!((both.profile.name.as_str(), both.sampling), ("broadwell-2s", Sampling::Full));
        assert_eq!(both.second.map(|second| second.name).as_deref(), Some("vprobe-e5620"));
        assert!("broadwell-2s+".parse::<Counters>().unwrap_err().to_string().contains("\"\" is unknown"));
        assert!("vprobe".parse::<Counters>().unwrap_err().to_string().contains("epyc-nps4"));
    }

    /// Boots the trial on this machine's own QEMU with counters; the header that the plugin leaves, and all counts.
    #[cfg(feature = "lab-tests")]
    fn trial(option: &str) -> (vnuma_abi_lab_counters::Header, Vec<u64>) {
        use vnuma_abi_lab_counters::{CPUS_OFFSET, Cpu, Header, MODES, PAGE_SIZE};

        let image = Image::ensure(crate::Progress::Show).unwrap();
        let initramfs = crate::initramfs::server(&image, &binaries::Binaries::build().unwrap()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (disk, path) = (directory.path().join("initramfs"), directory.path().join("region"));
        fs::write(&disk, initramfs).unwrap();
        let distances = [vec![10, 21], vec![21, 10]];
        let machine = Machine {
            profile: "trial",
            nodes: 2,
            cpus_per_node: 1,
            memory_mib_per_node: 512,
            distances: &distances,
        };
        let (first, second) = (by_name("broadwell-2s").unwrap(), by_name("vprobe-e5620").unwrap());
        let content = region(&first, Some(&second), &machine, Sampling::Sampled).unwrap();
        let plugin = vnuma_lab_counters::build(&cache_dir()).unwrap();
        let command = || {
            // A boot that was cut short has counted.
            fs::write(&path, &content).unwrap();
            let mut command = std::process::Command::new("qemu-system-x86_64");
            command.args(
                "-nodefaults -no-user-config -display none -no-reboot -machine q35 -m 1024M".split(' '),
            );
            command.args("-accel tcg,thread=multi -cpu EPYC -smp 2,sockets=2 -serial stdio".split(' '));
            for node in 0..2 {
                command.arg("-object").arg(format!("memory-backend-ram,id=ram{node},size=512M"));
                command.arg("-numa").arg(format!("node,nodeid={node},cpus={node},memdev=ram{node}"));
            }
            let mut arguments = qemu_arguments(&plugin, &path, content.len());
            arguments[1].push_str(option);
            command.args(arguments).arg("-kernel").arg(image.vmlinux(image.server_kernel()));
            command.arg("-initrd").arg(&disk);
            let khz = crate::tsc::frequency_khz();
            let words = "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable";
            command.arg("-append").arg(format!("{words} tsc_early_khz={khz} vnuma.role=trial"));
            command
        };
        crate::accel::boots_in_two_tries(command, std::time::Duration::from_secs(300)).unwrap();
        let bytes = fs::read(&path).unwrap();
        let counts = (0..size_of::<Cpu>() / 8).map(|word| {
            let of = |part: usize| {
                let (cpu, mode) = (part / MODES, part % MODES);
                let offset = CPUS_OFFSET + cpu * PAGE_SIZE + mode * size_of::<Cpu>() + word * 8;
                u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
            };
            (0..2 * MODES).map(of).sum()
        });
        (Header::from_bytes(&bytes).unwrap(), counts.collect())
    }

    /// The machine's QEMU may be older than the image's, as Debian 12's is: the shortcut to physical addresses is
    /// checked and taken there, and the API alone gives the same picture.
    #[cfg(feature = "lab-tests")]
    #[test]
    fn the_machines_own_qemu_can_count_too() {
        use vnuma_abi_lab_counters::{STATUS_API, STATUS_SHORTCUT};

        let (header, quick) = trial("");
        let expected = if header.api_version == 1 { STATUS_SHORTCUT } else { STATUS_API };
        println!("plugin API {}, compared {}: {quick:?}", header.api_version, header.compared);
        assert_eq!((header.status, header.mismatched), (expected, 0));
        assert!(header.api_version > 1 || header.compared > 4096, "{} compared", header.compared);
        let (header, slow) = trial(",layout=api");
        println!("layout=api: {slow:?}");
        assert_eq!((header.status, header.compared), (STATUS_API, 0));
        // Boots differ, by what they put on which node above all.
        for (name, word) in [("instructions", 0), ("llc_references", 4), ("llc_misses", 6)] {
            let ratio = slow[word] as f64 / quick[word] as f64;
            assert!((0.8..1.25).contains(&ratio), "{name}: {} and {}", quick[word], slow[word]);
        }
        for counts in [&quick, &slow] {
            let node = |node: usize| counts[16 + node] + counts[32 + node];
            assert_eq!(node(0) + node(1), counts[6], "every miss is some node's");
            let least = node(0).min(node(1)) as f64 / counts[6] as f64;
            assert!(
                counts[9] > counts[6] && counts[9] <= counts[4],
                "a smaller cache misses more: {counts:?}"
            );
            let second: u64 = counts[64..96].iter().sum();
            assert_eq!(second, counts[9], "and each of its misses is some node's");
            assert!(least > 0.001, "one node has next to nothing: {} and {}", node(0), node(1));
        }
    }

    #[test]
    fn every_counter_profile_fits_the_machine_it_names() {
        for name in vnuma_lab_pricing::names() {
            let counters: Counters = name.parse().unwrap();
            let profile = Profile::load(&counters.profile.machine).unwrap();
            let (cpus_per_node, memory_mib_per_node) = profile.even().unwrap();
            let machine = Machine {
                profile: &counters.profile.machine,
                nodes: profile.nodes,
                cpus_per_node,
                memory_mib_per_node,
                distances: &profile.distances,
            };
            let region = region(&counters.profile, None, &machine, Sampling::Sampled).unwrap();
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
