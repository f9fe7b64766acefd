//! What the full run has beyond the reduced form, fixed before its first figure: setups, workloads, parts.

use crate::committed::{
    self, AT_HOME, BY_VM, HALF, Kind, Layout, Placement, VCPUS, VMS, Workload, in_both, placement,
};
use crate::full::plan::Id;

/// Times that each cell is measured; the report has the median.
pub const REPETITIONS: u32 = 3;

/// A server, and what it counts with. A boot has one setup.
#[derive(Debug)]
pub struct Setup {
    /// Its name.
    pub name: &'static str,
    /// Profile of lab/profiles.
    pub server: &'static str,
    /// Profile of lab/pricing/profiles.
    pub counters: &'static str,
    /// So many VMs with one vCPU each, in place of the three.
    pub small: usize,
    /// vm1 has guest nodes and the driver.
    pub told: bool,
    /// What of it VMs use.
    pub layout: &'static Layout,
}

impl Setup {
    /// VMs, and vCPUs of each.
    pub fn shape(&self) -> (usize, usize) {
        if self.small > 0 { (self.small, 1) } else { (VMS.len(), VCPUS) }
    }
}

/// Cells of one setup: each of these workloads under each of these policies.
#[derive(Debug)]
pub struct Block {
    /// Name of the setup.
    pub setup: &'static str,
    /// Names of the workloads.
    pub workloads: &'static [&'static str],
    /// The policies.
    pub policies: &'static [&'static str],
}

const fn block(
    setup: &'static str,
    workloads: &'static [&'static str],
    policies: &'static [&'static str],
) -> Block {
    Block { setup, workloads, policies }
}

/// What the table of a part shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// The rows, as in the reduced form.
    Rows,
    /// Remote shares, a column for each policy.
    RemoteShares,
    /// Costs by those of `credit`, a column for each policy.
    Costs,
    /// Costs by the period of the policy.
    Periods,
    /// What the policy costs, by the number of VMs.
    Overhead,
    /// What the guest of vm2 does to the others, beside `chase`.
    Abuse,
}

/// A part of the full run, which has a table of its own. Parts may want the same cells.
#[derive(Debug)]
pub struct Part {
    /// Its name.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// What its table shows.
    pub table: Table,
    /// Its cells.
    pub blocks: &'static [Block],
}

/// All setups.
pub const SETUPS: [Setup; 9] = [
    half("half", "broadwell-2s"),
    half("half-e5620", "vprobe-e5620"),
    Setup { told: true, ..half("told", "broadwell-2s") },
    Setup { server: "8n16c", layout: &EIGHT, ..half("eight-epyc", "epyc-nps4") },
    Setup { server: "8n16c-opteron", layout: &EIGHT, ..half("eight-opteron", "xpv-opteron-6344") },
    Setup { small: 1, ..half("small-1", "broadwell-2s") },
    Setup { small: 2, ..half("small-2", "broadwell-2s") },
    Setup { small: 3, ..half("small-3", "broadwell-2s") },
    Setup { small: 4, ..half("small-4", "broadwell-2s") },
];

const fn half(name: &'static str, counters: &'static str) -> Setup {
    Setup { name, server: committed::SERVER, counters, small: 0, told: false, layout: &HALF }
}

/// A server with eight nodes, of which VMs use a CPU of four each, in two neighbourhoods: the load of the reduced form, so that three vCPUs
/// share a CPU here as well. 7 of the 8 vCPUs that use memory are on another node than that; of vm1 two are far, and two are near.
const EIGHT: Layout = Layout {
    nodes: &[0, 1, 4, 5],
    vm_cpus: &[&[1], &[3], &[9], &[11]],
    host_cpus: &[0, 2, 4, 5, 6, 7, 8, 10, 12, 13, 14, 15],
    classes: 3,
    start: placement("start", [[1, 2, 3, 0], [1, 2, 0, 3], [0, 1, 2, 3]], [[0, 1, 2, 3], [0, 1, 2, 3]]),
    sleepers: [0, 1, 2, 3],
    oracles: Some(&[
        placement("at-home", [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]], [[0, 1, 2, 3], [0, 1, 2, 3]]),
        placement("by-vm", [[0, 0, 1, 1], [2, 2, 3, 3], [0, 1, 2, 3]], [[0, 0, 1, 1], [2, 2, 3, 3]]),
    ]),
};

/// Workloads that the reduced form does not have.
pub const WORKLOADS: [Workload; 22] = [
    team("stream", Kind::Stream),
    team("matrix", Kind::Matrix),
    team("bt-like", Kind::BtLike),
    team("cg-like", Kind::CgLike),
    team("lu-like", Kind::LuLike),
    team("mg-like", Kind::MgLike),
    team("sp-like", Kind::SpLike),
    team("sysbench", Kind::Sysbench),
    served("memcached-16", Kind::Memcached, 16),
    served("memcached-32", Kind::Memcached, 32),
    served("memcached-48", Kind::Memcached, 48),
    served("memcached-64", Kind::Memcached, 64),
    served("memcached-80", Kind::Memcached, 80),
    served("memcached-96", Kind::Memcached, 96),
    served("memcached-112", Kind::Memcached, 112),
    served("redis-2000", Kind::Redis, 2000),
    served("redis-4000", Kind::Redis, 4000),
    served("redis-6000", Kind::Redis, 6000),
    served("redis-8000", Kind::Redis, 8000),
    served("redis-10000", Kind::Redis, 10_000),
    Workload { vm2: Some([Kind::Abuse; VCPUS]), ..in_both("abuse", [Kind::Chase; VCPUS], &[]) },
    // Of small VMs: one program each.
    in_both("small", [Kind::Chase; VCPUS], &[]),
];

/// Accesses of the abusive guest in one half of its memory, before it goes to the other one: about a period.
pub const ABUSE_TURN: u64 = 800_000;
/// Moves of other VMs that one VM may cause at once, and periods until it may cause another one (docs/policies.md, vprobe).
pub const BUDGET: (u64, usize) = (4, 15);

const fn team(name: &'static str, kind: Kind) -> Workload {
    served(name, kind, 0)
}

/// With so many connections to the servers of each VM.
const fn served(name: &'static str, kind: Kind, connections: usize) -> Workload {
    Workload { connections, ..in_both(name, [kind; VCPUS], &[AT_HOME, BY_VM]) }
}

/// Workloads that use memory.
const MEMORY: [&str; 12] = [
    "chase",
    "mix",
    "stream",
    "matrix",
    "bt-like",
    "cg-like",
    "lu-like",
    "mg-like",
    "sp-like",
    "sysbench",
    "memcached-80",
    "redis-2000",
];
/// What the paper compares in figures 6 and 7, and Linux.
const FIGURES_6_7: [&str; 7] = ["linux", "credit", "vcpu-p", "lb", "brm", "vprobe-paper", "vprobe"];

const EIGHT_WORKLOADS: [&str; 4] = ["chase", "mix", "cg-like", "compute"];
/// With a guest that has nodes. There is no `oracle`, as a program's memory is on its guest node.
const TOLD: [&str; 7] = ["linux", "linux-nobalance", "observe", "numad", "credit", "vprobe-paper", "vprobe"];

/// What the paper found, of one to four VMs (table III, shares of the time).
pub const TABLE_3: [f64; 4] = [0.000_084_7, 0.000_120_6, 0.000_161_9, 0.000_106_2];

/// All parts, in the order in which they run.
pub const PARTS: [Part; 9] = [
    Part {
        name: "policies",
        about: "every workload under every policy",
        table: Table::Rows,
        blocks: &[
            block("half", &MEMORY, &committed::POLICIES),
            block("half", &["compute"], &committed::POLICIES),
            block("half-e5620", &["chase", "mix", "compute", "cg-like", "mg-like"], &committed::POLICIES),
        ],
    },
    Part {
        name: "eight-nodes",
        about: "servers with eight nodes and several distances",
        table: Table::Rows,
        blocks: &[
            block("eight-epyc", &EIGHT_WORKLOADS, &committed::POLICIES),
            block("eight-opteron", &EIGHT_WORKLOADS, &committed::POLICIES),
        ],
    },
    Part {
        name: "told",
        about: "vm1 has two guest nodes and is told where its vCPUs are, as far as a vnumad runs",
        table: Table::Rows,
        blocks: &[block("told", &["chase", "mix"], &TOLD)],
    },
    Part {
        name: "figure-1",
        about: "figure 1 of vProbe: the share of remote accesses under what hosts have by default",
        table: Table::RemoteShares,
        blocks: &[block("half", &MEMORY, &["linux", "linux-nobalance", "credit"])],
    },
    Part {
        name: "figure-6",
        about: "figure 6 of vProbe: memcached with 16 to 112 concurrent calls",
        table: Table::Costs,
        blocks: &[block(
            "half",
            &[
                "memcached-16",
                "memcached-32",
                "memcached-48",
                "memcached-64",
                "memcached-80",
                "memcached-96",
                "memcached-112",
            ],
            &FIGURES_6_7,
        )],
    },
    Part {
        name: "figure-7",
        about: "figure 7 of vProbe: Redis with 2000 to 10000 connections",
        table: Table::Costs,
        blocks: &[block(
            "half",
            &["redis-2000", "redis-4000", "redis-6000", "redis-8000", "redis-10000"],
            &FIGURES_6_7,
        )],
    },
    Part {
        name: "figure-8",
        about: "figure 8 of vProbe: the period of the policy",
        table: Table::Periods,
        blocks: &[block("half", &["mix", "chase"], &["linux", "vprobe@periods"])],
    },
    Part {
        name: "table-3",
        about: "table III of vProbe: what the policy costs with one to four VMs",
        table: Table::Overhead,
        blocks: &[
            block("small-1", &["small"], &["linux", "vprobe"]),
            block("small-2", &["small"], &["linux", "vprobe"]),
            block("small-3", &["small"], &["linux", "vprobe"]),
            block("small-4", &["small"], &["linux", "vprobe"]),
        ],
    },
    Part {
        name: "abuse",
        about: "the abusive guest of XPV, section 5.5: vm2 wants its vCPUs moved again and again",
        table: Table::Abuse,
        blocks: &[block(
            "half",
            &["chase", "abuse"],
            &["linux", "linux-nobalance", "credit", "vprobe-paper", "vprobe"],
        )],
    },
];

/// Periods of figure 8, modelled seconds.
pub const PERIODS_S: [f64; 7] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.3];

/// The setup of a name.
pub fn setup(name: &str) -> Option<&'static Setup> {
    SETUPS.iter().find(|setup| setup.name == name)
}

/// The part of a name.
pub fn part(name: &str) -> Option<&'static Part> {
    PARTS.iter().find(|part| part.name == name)
}

impl Part {
    /// Its cells; of `oracle` one for each placement.
    pub fn cells(&self) -> Vec<Id> {
        let mut cells = Vec::new();
        for repetition in 0..REPETITIONS {
            for block in self.blocks {
                let layout = setup(block.setup).map_or(&HALF, |setup| setup.layout);
                for workload in block.workloads.iter().filter_map(|name| committed::workload(name)) {
                    let oracles = layout.oracles(workload);
                    let names = block.policies.iter().flat_map(|policy| variants(oracles, policy));
                    cells.extend(names.map(|policy| Id {
                        setup: block.setup.into(),
                        workload: workload.name.into(),
                        policy,
                        repetition,
                    }));
                }
            }
        }
        cells
    }
}

/// The policy and its period in modelled seconds of a variant such as `vprobe:period-0.05`.
pub fn with_period(variant: &str) -> Option<(&str, f64)> {
    let (policy, period) = variant.split_once(":period-")?;
    Some((policy, period.parse().ok().filter(|period| PERIODS_S.contains(period))?))
}

/// What is measured for a policy.
fn variants(oracles: &[Placement], policy: &str) -> Vec<String> {
    match policy {
        "vprobe@periods" => PERIODS_S.map(|period| format!("vprobe:period-{period}")).into(),
        "oracle" => oracles.iter().map(|placement| format!("{policy}:{}", placement.name)).collect(),
        _ => vec![policy.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_name_only_what_there_is() {
        for block in PARTS.iter().flat_map(|part| part.blocks) {
            assert!(setup(block.setup).is_some(), "{}", block.setup);
            for name in block.workloads {
                assert!(committed::workload(name).is_some(), "{name}");
            }
            for policy in block.policies {
                let (name, _) = policy.split_once('@').unwrap_or((policy, ""));
                assert!(committed::POLICIES.contains(&name), "{policy}");
            }
        }
    }

    #[test]
    fn connections_are_those_of_the_name_and_each_server_has_as_many() {
        for workload in &WORKLOADS {
            let (name, count) = workload.name.split_once('-').unwrap_or_default();
            let served = ["redis", "memcached"].contains(&name);
            let expected = if served { count.parse().expect("a number") } else { 0 };
            assert_eq!((workload.connections, expected % VCPUS), (expected, 0), "{}", workload.name);
            assert_eq!(workload.programs.iter().all(|kind| kind.name() == name), served, "{}", workload.name);
        }
    }

    #[test]
    fn layouts_give_each_cpu_three_busy_vcpus_and_one_that_sleeps_wherever_they_are_placed() {
        for layout in SETUPS.iter().map(|setup| setup.layout) {
            assert_eq!(layout.nodes.len(), layout.vm_cpus.len());
            let (vms, others) = (layout.all_vm_cpus(), layout.host_cpus);
            let all: std::collections::BTreeSet<&u32> = vms.iter().chain(others).collect();
            assert_eq!((all.len(), all.last()), (vms.len() + others.len(), Some(&&(all.len() as u32 - 1))));
            for placement in layout.oracles.unwrap_or_default().iter().chain([&layout.start]) {
                for (node, cpus) in layout.vm_cpus.iter().enumerate() {
                    let on = |nodes: &[usize; VCPUS]| nodes.iter().filter(|at| **at == node).count();
                    let busy: usize = placement.vcpus.iter().map(on).sum();
                    assert_eq!((busy, on(&layout.sleepers)), (cpus.len() * 3, cpus.len()), "{placement:?}");
                }
            }
            let start = &layout.start;
            let apart =
                |vm: usize| start.vcpus[vm].iter().zip(&start.memory[vm]).filter(|(at, of)| at != of).count();
            assert_eq!(apart(0) + apart(1), 7);
        }
    }

    #[test]
    fn an_oracle_of_a_layout_takes_the_place_of_those_of_workloads() {
        let cells = part("eight-nodes").expect("a part").cells();
        let of = |id: &&Id| id.repetition == 0 && id.setup == "eight-epyc" && id.workload == "mix";
        let oracles: Vec<_> =
            cells.iter().filter(of).filter_map(|id| id.policy.strip_prefix("oracle:")).collect();
        assert_eq!(oracles, ["at-home", "by-vm"]);
    }

    #[test]
    fn each_setup_has_counters_that_can_be_priced() {
        for setup in &SETUPS {
            let own = vnuma_bench_common::judging::profiles(setup.counters).expect("the profile is there");
            assert_eq!(own[0].name, setup.counters);
        }
    }

    #[test]
    fn the_oracle_is_one_cell_for_each_placement() {
        let cells = PARTS[0].cells();
        let of = |policy: &str| {
            let cell = |id: &&Id| id.setup == "half" && id.workload == "chase" && id.policy == policy;
            cells.iter().filter(cell).count()
        };
        assert_eq!([of("linux"), of("oracle"), of("oracle:at-home"), of("oracle:by-vm")], [3, 0, 3, 3]);
    }

    #[test]
    fn each_period_is_a_variant_of_its_own() {
        let cells = part("figure-8").expect("a part").cells();
        let periods: Vec<f64> = cells
            .iter()
            .filter(|id| id.repetition == 0 && id.workload == "mix")
            .filter_map(|id| Some(with_period(&id.policy)?.1))
            .collect();
        assert_eq!(periods, PERIODS_S);
        assert_eq!(with_period("vprobe:period-0.05"), Some(("vprobe", 0.05)));
        assert_eq!([with_period("vprobe"), with_period("vprobe:period-7")], [None, None]);
    }
}
