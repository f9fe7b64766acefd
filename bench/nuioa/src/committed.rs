//! What is measured: fixed before the first figure of `nuioa-aware` was seen.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The server's node that has the devices of guests (lab/profiles/2n6c-iommu.toml).
pub const HOME: usize = 1;
/// The other one. CPU 0, which VMs do not use, and the card that the server keeps are there.
pub const REMOTE: usize = 0;
/// CPUs for vCPUs, by node.
pub const CPUS: [[usize; VCPUS]; 2] = [[1, 2], [3, 4]];
/// vCPUs of the VM.
pub const VCPUS: usize = 2;
/// Its memory.
pub const MEMORY_MIB: usize = 1024;

/// Windows of a cell, and how long each is, seconds of the server. The figure is the median.
pub const WINDOWS: usize = 3;
pub const WINDOW_S: f64 = 2.0;
/// How long a program computes after each window of a workload of which all cycles count, seconds of the server.
pub const REGULAR_S: f64 = 1.5;
/// Before the first one.
pub const WARM_UP_S: f64 = 1.0;
/// Of a disk's blocks that are read.
pub const SEED: u64 = 12;

/// Goals, as shares of what `home` takes.
pub mod goals {
    /// So far behind has `remote` or `vnuma` to be ...
    pub const SHOWS: f64 = 0.05;
    /// ... on so many workloads, or the benchmark shows nothing.
    pub const SHOWING: usize = 3;
    /// As near is `nuioa-aware`, on every workload.
    pub const AWARE: f64 = 0.03;
    /// And as near on those without I/O.
    pub const WITHOUT_IO: f64 = 0.01;
}

/// Where the VM is, and what its guest knows of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum Configuration {
    /// All of it is on the devices' node.
    Home,
    /// All of it is on the other node.
    Remote,
    /// Half of its vCPUs is on each node, its memory is interleaved, its guest has no nodes.
    Uma,
    /// Half of it is on each node, and its guest has these nodes. Its devices are on none.
    Vnuma,
    /// Where `vnumactl place --device` says, with a driver that is told where the devices are.
    NuioaAware,
}

impl Configuration {
    /// As rows have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Home => "home",
            Self::Remote => "remote",
            Self::Uma => "uma",
            Self::Vnuma => "vnuma",
            Self::NuioaAware => "nuioa-aware",
        }
    }

    /// Where its guest starts a workload. One that does not know where the devices are starts it anywhere: half of the windows each
    /// way, and the figure is the mean.
    pub fn spots(self) -> &'static [Spot] {
        match self {
            Self::Home | Self::Remote => &[Spot::Cpu(1)],
            Self::Uma => &[Spot::Cpu(0), Spot::Cpu(1)],
            Self::Vnuma => &[Spot::Node(0), Spot::Node(1)],
            Self::NuioaAware => &[Spot::Device],
        }
    }
}

/// All of them, in the order in which they are measured and shown.
pub const CONFIGURATIONS: [Configuration; 5] = [
    Configuration::Home,
    Configuration::Remote,
    Configuration::Uma,
    Configuration::Vnuma,
    Configuration::NuioaAware,
];

/// Where in the guest a workload runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spot {
    /// On this CPU.
    Cpu(usize),
    /// On a CPU and in the memory of this guest node.
    Node(usize),
    /// On that of the guest node that the guest's kernel says the device is on, as a program does that knows of NUMA.
    Device,
}

/// Whose cycles an operation has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cycles {
    /// Those of programs: the workload makes no system calls for its I/O. The kernels' ticks are the more the slower the machine is.
    Programs,
    /// All, but what kernels do by the clock.
    All,
}

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    pub name: &'static str,
    pub kind: Kind,
    pub cycles: Cycles,
    /// Does it use a device?
    pub io: bool,
    /// What is one operation.
    pub operation: &'static str,
}

/// What a workload does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// DPDK's testpmd sends packets of so many bytes, so many at a time.
    Transmit { bytes: usize, burst: usize },
    /// It passes packets on between two cards, so many at a time at most.
    Forward { bytes: usize, burst: usize },
    /// A driver in user space reads blocks of 4 KiB from the disk, one at a time.
    Disk,
    /// fio reads blocks of 4 KiB from the disk by the kernel's driver, so many at a time.
    Fio { depth: usize },
    /// sysbench reads memory at random.
    Sysbench,
    /// [`Kind::Transmit`] with so many of these beside it, on the other vCPU.
    BesideSysbench { bytes: usize, burst: usize, instances: usize },
}

/// A workload that makes no system calls for its I/O.
const fn bypass(name: &'static str, kind: Kind, operation: &'static str) -> Workload {
    Workload { name, kind, cycles: Cycles::Programs, io: true, operation }
}

const fn fio(name: &'static str, depth: usize) -> Workload {
    let operation = "a block of 4 KiB that fio reads";
    Workload { name, kind: Kind::Fio { depth }, cycles: Cycles::All, io: true, operation }
}

const PACKET: &str = "a packet that is sent";
const PASSED: &str = "a packet that is passed on";

/// All of the reduced form.
pub const WORKLOADS: [Workload; 7] = [
    bypass("testpmd-tx-1", Kind::Transmit { bytes: 64, burst: 1 }, PACKET),
    bypass("testpmd-tx-32", Kind::Transmit { bytes: 64, burst: 32 }, PACKET),
    bypass("testpmd-io", Kind::Forward { bytes: 64, burst: 4 }, PASSED),
    bypass("nvme-user", Kind::Disk, "a block of 4 KiB that a driver in user space reads"),
    fio("fio-randread", 16),
    bypass("tx-1-sysbench", Kind::BesideSysbench { bytes: 64, burst: 1, instances: 1 }, PACKET),
    Workload {
        name: "sysbench",
        kind: Kind::Sysbench,
        cycles: Cycles::Programs,
        io: false,
        operation: "1000 instructions of sysbench memory",
    },
];

/// Those that the full form has beside them: sizes and rates, and table IV of the paper.
pub const FULL: [Workload; 9] = [
    bypass("testpmd-tx-1-512", Kind::Transmit { bytes: 512, burst: 1 }, PACKET),
    bypass("testpmd-tx-1-1514", Kind::Transmit { bytes: 1514, burst: 1 }, PACKET),
    bypass("testpmd-tx-4", Kind::Transmit { bytes: 64, burst: 4 }, PACKET),
    bypass("testpmd-io-1", Kind::Forward { bytes: 64, burst: 1 }, PASSED),
    bypass("testpmd-io-32", Kind::Forward { bytes: 64, burst: 32 }, PASSED),
    bypass("testpmd-io-1514", Kind::Forward { bytes: 1514, burst: 4 }, PASSED),
    fio("fio-randread-1", 1),
    bypass("tx-1-sysbench-2", Kind::BesideSysbench { bytes: 64, burst: 1, instances: 2 }, PACKET),
    bypass("tx-1-sysbench-4", Kind::BesideSysbench { bytes: 64, burst: 1, instances: 4 }, PACKET),
];

/// All of a form.
pub fn workloads(full: bool) -> impl Iterator<Item = &'static Workload> {
    WORKLOADS.iter().chain(FULL.iter().filter(move |_| full))
}

/// That of a name.
pub fn workload(name: &str) -> Option<&'static Workload> {
    workloads(true).find(|workload| workload.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_workload() {
        for one in workloads(true) {
            assert_eq!(workload(one.name), Some(one), "{}", one.name);
        }
        assert_eq!(workload("nothing"), None);
    }
}
