//! What is measured: fixed before the first figure of `nuioa-aware` was seen.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

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
/// Memory that sysbench reads: more than twice the last-level cache (55 MiB), so that more than half of it comes from memory, and
/// less than a guest node has.
pub const SYSBENCH_MIB: usize = 128;
/// Of each of up to four that run beside another workload.
pub const NEIGHBOUR_MIB: usize = 32;

/// How long a window is at least, seconds of the server.
pub const WINDOW_S: f64 = 1.5;
/// Operations of a window of a workload that does its I/O by the kernel.
const KERNEL_OPERATIONS: u64 = 120;
/// How long a thread computes after the windows of a workload of which all cycles count, seconds of the server.
pub const BASELINE_S: f64 = 3.0;
/// Before the first one.
pub const WARM_UP_S: f64 = 1.0;
/// The same under `nuioa-aware`: vnuma-guest looks once a second, and what a program takes when it begins to work is moved at the look
/// after that. Caches are cold then, which a program on one node in all other configurations never sees.
pub const WARM_UP_PLACED_S: f64 = 4.0;
/// Of a disk's blocks that are read.
pub const SEED: u64 = 12;

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// The order of the configurations.
    pub turns: &'static [Configuration],
    /// Windows of a cell. The figure is the median.
    pub windows: usize,
    /// How long a window takes at most for the operations that it is to have, seconds of the server.
    pub longest_window_s: f64,
}

/// `home` and `nuioa-aware`, which a goal compares, have two turns each, and the same time on average: whatever changes while the server
/// is up then changes both.
const FULL_FORM: Form = Form {
    turns: &[
        Configuration::Home,
        Configuration::NuioaAware,
        Configuration::Remote,
        Configuration::Uma,
        Configuration::Vnuma,
        Configuration::NuioaAware,
        Configuration::Home,
    ],
    windows: 5,
    longest_window_s: 6.0,
};

/// In half an hour.
const REDUCED_FORM: Form = Form { turns: &TURNS, windows: 3, longest_window_s: 4.0 };

/// One VM, and a window that says nothing.
pub const SMOKE_FORM: Form = Form { turns: &[Configuration::Home], windows: 1, longest_window_s: 2.0 };

/// The order of the reduced form: those that a goal compares follow each other.
const TURNS: [Configuration; 5] = [
    Configuration::NuioaAware,
    Configuration::Home,
    Configuration::Remote,
    Configuration::Vnuma,
    Configuration::Uma,
];

/// That of a form.
pub const fn form(full: bool) -> &'static Form {
    if full { &FULL_FORM } else { &REDUCED_FORM }
}

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
    /// So many of the writes to registers are by the vCPU that is counted, or the workload ran elsewhere, and its figures are not its own.
    pub const KEPT: f64 = 0.98;
    /// Instructions are more if they are by so many standard errors.
    pub const ERRORS: f64 = 2.0;
}

/// Where the VM is, and what its guest knows of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
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
        self.into()
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

/// All of them, in the order in which they are shown.
pub const CONFIGURATIONS: &[Configuration] = Configuration::VARIANTS;

/// Where in the guest a workload runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spot {
    /// On this CPU.
    Cpu(usize),
    /// On a CPU and in the memory of this guest node.
    Node(usize),
    /// Where vnuma-guest places it: on the guest node that the guest's kernel says the device is on.
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
    /// Has the reduced form all configurations of it? Else it has those that goals compare.
    pub everywhere: bool,
    /// A window has at least so many, if there is time. With fewer, the result depends on what the kernels happen to do.
    pub wanted: u64,
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
    /// [`Kind::Transmit`] while a program of the server reads the other node's memory without end.
    BesideNeighbour { bytes: usize, burst: usize },
    /// sockperf between the guest and the second server, in messages of so many bytes.
    Sockperf { way: Way, pace: Pace, bytes: usize },
    /// memcached, asked from the second server one after the other: nine of ten read so many bytes, one writes them.
    Memcached { bytes: usize },
    /// perftest over soft RoCE.
    Rdma { verb: Verb, way: Way, bytes: usize },
    /// fio reads blocks of 4 KiB from the second server's RAM by NVMe over TCP, so many at a time.
    RemoteDisk { depth: usize },
}

impl Kind {
    /// Does it need the second server?
    pub const fn has_peer(self) -> bool {
        use Kind::{Memcached, Rdma, RemoteDisk, Sockperf};
        matches!(self, Sockperf { .. } | Memcached { .. } | Rdma { .. } | RemoteDisk { .. })
    }

    /// Does the second server begin, to which the guest then connects?
    pub fn peer_begins(self) -> bool {
        use Kind::{Rdma, RemoteDisk, Sockperf};
        let way = match self {
            Sockperf { way, .. } | Rdma { way, .. } => Some(way),
            _ => None,
        };
        way == Some(Way::Transmit) || matches!(self, RemoteDisk { .. })
    }
}

impl Workload {
    /// Is it measured under this configuration, in the reduced form or as a whole?
    pub fn is_under(&self, configuration: Configuration, reduced: bool) -> bool {
        let compared = !matches!(configuration, Configuration::Uma | Configuration::Vnuma);
        !reduced || self.everywhere || compared
    }
}

/// Which way data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the guest, which responds.
    Receive,
    /// From the guest, which initiates.
    Transmit,
}

/// How soon a message follows another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// When the answer to the last one is there: latency.
    Alone,
    /// The same, but at most so many in a second.
    Rate(u32),
    /// At once: throughput.
    Full,
}

/// What RDMA does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Send,
    Read,
    Write,
    Atomic,
}

/// A workload that makes no system calls for its I/O.
const fn bypass(name: &'static str, kind: Kind, operation: &'static str) -> Workload {
    Workload { name, kind, cycles: Cycles::Programs, io: true, operation, everywhere: true, wanted: 0 }
}

/// One that does its I/O by the kernel.
const fn kernel(name: &'static str, kind: Kind, operation: &'static str) -> Workload {
    let everywhere = !kind.has_peer();
    Workload { name, kind, cycles: Cycles::All, io: true, operation, everywhere, wanted: KERNEL_OPERATIONS }
}

const PACKET: &str = "a packet that is sent";
const PASSED: &str = "a packet that is passed on";
const BLOCK: &str = "a block of 4 KiB that fio reads";
const MESSAGE: &str = "a message and its answer";
const STREAMED: &str = "a packet of a stream";
const REQUEST: &str = "a request of RDMA";

/// Beside others it is compared with what it takes alone.
const fn beside(name: &'static str, kind: Kind) -> Workload {
    Workload { everywhere: false, ..bypass(name, kind, PACKET) }
}

const fn beside_sysbench(name: &'static str, instances: usize) -> Workload {
    beside(name, Kind::BesideSysbench { bytes: 64, burst: 1, instances })
}

const fn ping(name: &'static str, way: Way, bytes: usize) -> Workload {
    kernel(name, Kind::Sockperf { way, pace: Pace::Alone, bytes }, MESSAGE)
}

/// The second server sends at this rate, as a sender in the guest would spin between packets.
const fn paced(name: &'static str, per_second: u32) -> Workload {
    kernel(name, Kind::Sockperf { way: Way::Receive, pace: Pace::Rate(per_second), bytes: 64 }, MESSAGE)
}

const fn stream(name: &'static str, way: Way, bytes: usize) -> Workload {
    kernel(name, Kind::Sockperf { way, pace: Pace::Full, bytes }, STREAMED)
}

const fn rdma(name: &'static str, verb: Verb, way: Way, bytes: usize) -> Workload {
    kernel(name, Kind::Rdma { verb, way, bytes }, REQUEST)
}

/// All of the reduced form.
pub const WORKLOADS: [Workload; 14] = [
    bypass("testpmd-tx-1", Kind::Transmit { bytes: 64, burst: 1 }, PACKET),
    bypass("testpmd-io", Kind::Forward { bytes: 64, burst: 4 }, PASSED),
    bypass("nvme-user", Kind::Disk, "a block of 4 KiB that a driver in user space reads"),
    kernel("fio-randread", Kind::Fio { depth: 1 }, BLOCK),
    ping("sockperf-rx", Way::Receive, 64),
    stream("sockperf-tx-stream", Way::Transmit, 1400),
    kernel("memcached", Kind::Memcached { bytes: 1024 }, "a command of a client on the second server"),
    rdma("rdma-send", Verb::Send, Way::Transmit, 1024),
    kernel("fio-remote", Kind::RemoteDisk { depth: 1 }, BLOCK),
    beside("tx-1-neighbour", Kind::BesideNeighbour { bytes: 64, burst: 1 }),
    beside_sysbench("tx-1-sysbench", 1),
    beside_sysbench("tx-1-sysbench-2", 2),
    beside_sysbench("tx-1-sysbench-4", 4),
    Workload {
        name: "sysbench",
        kind: Kind::Sysbench,
        cycles: Cycles::Programs,
        io: false,
        operation: "1000 instructions of sysbench memory",
        everywhere: false,
        wanted: 0,
    },
];

/// Those that the full form has beside them: sizes, rates, directions and verbs.
pub const FULL: [Workload; 26] = [
    bypass("testpmd-tx-32", Kind::Transmit { bytes: 64, burst: 32 }, PACKET),
    bypass("testpmd-tx-1-512", Kind::Transmit { bytes: 512, burst: 1 }, PACKET),
    bypass("testpmd-tx-1-1514", Kind::Transmit { bytes: 1514, burst: 1 }, PACKET),
    bypass("testpmd-tx-4", Kind::Transmit { bytes: 64, burst: 4 }, PACKET),
    bypass("testpmd-io-1", Kind::Forward { bytes: 64, burst: 1 }, PASSED),
    bypass("testpmd-io-32", Kind::Forward { bytes: 64, burst: 32 }, PASSED),
    bypass("testpmd-io-1514", Kind::Forward { bytes: 1514, burst: 4 }, PASSED),
    kernel("fio-randread-16", Kind::Fio { depth: 16 }, BLOCK),
    ping("sockperf-tx", Way::Transmit, 64),
    ping("sockperf-rx-512", Way::Receive, 512),
    ping("sockperf-rx-1400", Way::Receive, 1400),
    ping("sockperf-tx-512", Way::Transmit, 512),
    ping("sockperf-tx-1400", Way::Transmit, 1400),
    paced("sockperf-rx-10-per-s", 10),
    paced("sockperf-rx-40-per-s", 40),
    stream("sockperf-rx-stream", Way::Receive, 1400),
    stream("sockperf-rx-stream-64", Way::Receive, 64),
    stream("sockperf-tx-stream-64", Way::Transmit, 64),
    rdma("rdma-write", Verb::Write, Way::Transmit, 1024),
    rdma("rdma-read", Verb::Read, Way::Transmit, 1024),
    rdma("rdma-atomic", Verb::Atomic, Way::Transmit, 8),
    rdma("rdma-read-rx", Verb::Read, Way::Receive, 1024),
    rdma("rdma-send-rx", Verb::Send, Way::Receive, 1024),
    rdma("rdma-write-rx", Verb::Write, Way::Receive, 1024),
    rdma("rdma-atomic-rx", Verb::Atomic, Way::Receive, 8),
    kernel("fio-remote-16", Kind::RemoteDisk { depth: 16 }, BLOCK),
];

/// Addresses in the network of the servers (lab/runner/src/network.rs): the second server's, and the guest's.
pub const PEER_ADDRESS: &str = "10.77.0.2";
pub const GUEST_ADDRESS: &str = "10.77.9.1";

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
    fn the_reduced_form_has_what_goals_compare_of_each_workload() {
        for one in workloads(true) {
            for configuration in [Configuration::Home, Configuration::Remote, Configuration::NuioaAware] {
                assert!(one.is_under(configuration, true), "{} {configuration:?}", one.name);
            }
            assert!(one.is_under(Configuration::Uma, false));
        }
        let everywhere = workloads(false).filter(|one| one.is_under(Configuration::Vnuma, true));
        let names: Vec<&str> = everywhere.map(|one| one.name).collect();
        assert_eq!(names, ["testpmd-tx-1", "testpmd-io", "nvme-user", "fio-randread"]);
    }

    #[test]
    fn each_form_has_all_configurations_and_the_full_one_compares_over_time() {
        for full in [false, true] {
            let Form { turns, windows, .. } = form(full);
            assert!(CONFIGURATIONS.iter().all(|one| turns.contains(one)), "{full}");
            assert!(*windows >= 3, "a median of fewer is a mean");
        }
        // The same time on average.
        let at = |wanted| form(true).turns.iter().enumerate().filter(move |(_, one)| **one == wanted);
        let sum = |wanted| at(wanted).map(|(at, _)| at).sum::<usize>();
        assert_eq!(sum(Configuration::Home), sum(Configuration::NuioaAware));
    }

    /// Verbs and directions of RDMA, directions, paces and sizes of sockperf, and the rest.
    #[test]
    fn the_full_form_has_each_program_in_each_way() {
        let has = |wanted: fn(Kind) -> bool| workloads(true).filter(|one| wanted(one.kind)).count();
        for way in [Way::Receive, Way::Transmit] {
            for verb in [Verb::Send, Verb::Read, Verb::Write, Verb::Atomic] {
                let is = |one: &&Workload| matches!(one.kind, Kind::Rdma { verb: v, way: w, .. } if (v, w) == (verb, way));
                assert_eq!(workloads(true).filter(is).count(), 1, "{verb:?} {way:?}");
            }
            for pace in [Pace::Alone, Pace::Full] {
                let is = |one: &&Workload| matches!(one.kind, Kind::Sockperf { way: w, pace: p, .. } if (w, p) == (way, pace));
                assert!(workloads(true).filter(is).count() >= 2, "sizes: {pace:?} {way:?}");
            }
        }
        assert!(has(|kind| matches!(kind, Kind::Sockperf { pace: Pace::Rate(_), .. })) >= 2, "rates");
        for (wanted, least) in [
            ((|kind| matches!(kind, Kind::Memcached { .. })) as fn(Kind) -> bool, 1),
            (|kind| matches!(kind, Kind::Fio { .. }), 2),
            (|kind| matches!(kind, Kind::RemoteDisk { .. }), 2),
            (|kind| matches!(kind, Kind::Transmit { .. }), 2),
            (|kind| matches!(kind, Kind::Forward { .. }), 2),
            (|kind| matches!(kind, Kind::BesideNeighbour { .. }), 1),
        ] {
            assert!(has(wanted) >= least);
        }
        for count in [1, 2, 4] {
            let is = |one: &&Workload| matches!(one.kind, Kind::BesideSysbench { instances, .. } if instances == count);
            assert_eq!(workloads(true).filter(is).count(), 1, "{count} sysbenches");
        }
    }

    #[test]
    fn a_name_is_one_workload() {
        for one in workloads(true) {
            assert_eq!(workload(one.name), Some(one), "{}", one.name);
        }
        assert_eq!(workload("nothing"), None);
    }
}
