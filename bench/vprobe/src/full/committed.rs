//! What the full run has beyond the reduced form, fixed before its first figure: setups, workloads, parts.

use crate::committed::{self, AT_HOME, BY_VM, Kind, VCPUS, Workload};
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

/// What the table of a part shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// The rows, as in the reduced form.
    Rows,
    /// Remote shares, a column for each policy.
    RemoteShares,
    /// Costs by the period of the policy.
    Periods,
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
pub const SETUPS: [Setup; 2] = [
    Setup { name: "half", server: committed::SERVER, counters: "broadwell-2s" },
    Setup { name: "half-e5620", server: committed::SERVER, counters: "vprobe-e5620" },
];

/// Workloads that the reduced form does not have.
pub const WORKLOADS: [Workload; 7] = [
    Workload {
        name: "stream",
        programs: [Kind::Stream; VCPUS],
        memory_intensive: true,
        oracles: &[AT_HOME, BY_VM],
    },
    Workload {
        name: "matrix",
        programs: [Kind::Matrix; VCPUS],
        memory_intensive: true,
        oracles: &[AT_HOME, BY_VM],
    },
    team("bt-like", Kind::BtLike),
    team("cg-like", Kind::CgLike),
    team("lu-like", Kind::LuLike),
    team("mg-like", Kind::MgLike),
    team("sp-like", Kind::SpLike),
];

const fn team(name: &'static str, kind: Kind) -> Workload {
    Workload { name, programs: [kind; VCPUS], memory_intensive: true, oracles: &[AT_HOME, BY_VM] }
}

/// Workloads that use memory.
const MEMORY: [&str; 9] =
    ["chase", "mix", "stream", "matrix", "bt-like", "cg-like", "lu-like", "mg-like", "sp-like"];

/// All parts, in the order in which they run.
pub const PARTS: [Part; 3] = [
    Part {
        name: "policies",
        about: "every workload under every policy",
        table: Table::Rows,
        blocks: &[
            Block { setup: "half", workloads: &MEMORY, policies: &committed::POLICIES },
            Block { setup: "half", workloads: &["compute"], policies: &committed::POLICIES },
            Block {
                setup: "half-e5620",
                workloads: &["chase", "mix", "compute", "cg-like", "mg-like"],
                policies: &committed::POLICIES,
            },
        ],
    },
    Part {
        name: "figure-1",
        about: "figure 1 of vProbe: the share of remote accesses under what hosts have by default",
        table: Table::RemoteShares,
        blocks: &[Block {
            setup: "half",
            workloads: &MEMORY,
            policies: &["linux", "linux-nobalance", "credit"],
        }],
    },
    Part {
        name: "figure-8",
        about: "figure 8 of vProbe: the period of the policy",
        table: Table::Periods,
        blocks: &[Block {
            setup: "half",
            workloads: &["mix", "chase"],
            policies: &["linux", "vprobe@periods"],
        }],
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
                for workload in block.workloads.iter().filter_map(|name| committed::workload(name)) {
                    let names = block.policies.iter().flat_map(|policy| variants(workload, policy));
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
fn variants(workload: &Workload, policy: &str) -> Vec<String> {
    match policy {
        "vprobe@periods" => PERIODS_S.map(|period| format!("vprobe:period-{period}")).into(),
        "oracle" => workload.oracles.iter().map(|placement| format!("{policy}:{}", placement.name)).collect(),
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
    fn each_setup_has_counters_that_can_be_priced() {
        for setup in &SETUPS {
            let own = crate::judge::profiles(setup.counters).expect("the profile is there");
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
