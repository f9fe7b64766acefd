//! Finds the bounds between the types of vCPUs for this host, as section IV-A of *vProbe: Scheduling Virtual Machines on NUMA
//! Systems* does: loads of the operator run on one CPU with local memory, alone and beside others that fill the last-level
//! cache. Their miss rates say of which type each is, and the bounds go between the pressures of the types.

mod fill;
mod measure;

pub use measure::ENDED;

use crate::table::{Table, plain};
use serde::Serialize;
use std::{path::Path, time::Duration};
use vnuma_counters::{Source, detect};
use vnuma_model::{CacheGroup, CpuId, HostTopology, ThreadCounts};
use vnuma_observe::read_host_topology;
use vnuma_policy::scheduling::{
    Counts,
    analyzer::{self, CalibrationError, Measured, VcpuType, type_by_miss_rate},
};

/// Of `vnumactl calibrate`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Command line of a load, for sh; it has to run until it is killed
    #[arg(long = "load", required = true, value_name = "COMMAND")]
    loads: Vec<String>,
    /// CPU that the loads run on; others that share its cache fill that
    #[arg(long, value_name = "N")]
    cpu: Option<CpuId>,
    /// Seconds that a load has before it is counted
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=3600))]
    warm_up: u64,
    /// Seconds that it is counted, alone and again beside others
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Size of the last-level cache, where the host does not say it or says it wrongly
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=4096))]
    cache: Option<u64>,
}

/// Why nothing was found.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// Nothing can be counted.
    #[error("this host has no counters: {0}")]
    NoCounters(String),
    /// The host's topology cannot be read.
    #[error(transparent)]
    Host(#[from] vnuma_observe::SysfsError),
    /// No such CPU.
    #[error("--cpu {0}: there is no such CPU online")]
    NoCpu(CpuId),
    /// No program could fill its cache.
    #[error("CPU {0} shares its last-level cache with no other CPU: choose another one with --cpu")]
    Alone(CpuId),
    /// No size of the cache.
    #[error("the size of the last-level cache of CPU {0} is not known: give it with --cache")]
    NoSize(CpuId),
    /// A load.
    #[error("{load:?}: {reason}")]
    Load {
        /// Its command line.
        load: String,
        /// What went wrong.
        reason: String,
    },
    /// No bounds separate the types.
    #[error("no bounds separate these loads: {0}")]
    NoBounds(String),
    /// A thread that fills the cache.
    #[error("filling the cache: {0}")]
    Fill(std::io::Error),
}

/// A load and what was counted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Load {
    /// Its command line.
    pub command: String,
    /// References to the last-level cache in a thousand instructions, alone.
    pub pressure: f64,
    /// Share of them that miss, alone.
    pub miss_rate_alone: f64,
    /// The same beside others.
    pub miss_rate_beside_others: f64,
    /// Its type by these.
    #[serde(rename = "type")]
    pub kind: &'static str,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// The CPU that the loads ran on.
    pub cpu: CpuId,
    /// Threads that filled its cache.
    pub fillers: usize,
    /// All loads.
    pub loads: Vec<Load>,
    /// `policy.bound_low`; null if no bounds separate the types.
    pub bound_low: Option<f64>,
    /// `policy.bound_high`.
    pub bound_high: Option<f64>,
    /// Why there are none.
    pub problem: Option<String>,
}

/// Runs all loads.
pub fn run(arguments: &Arguments) -> Result<Calibration, CalibrateError> {
    let detected = detect(Path::new("/"), &[]);
    let Some(events) = detected.events.as_ref().filter(|events| events.source != Source::None) else {
        let why = detected.passed_over.last().map(|passed| passed.why.clone());
        return Err(CalibrateError::NoCounters(why.unwrap_or_default()));
    };
    let host = read_host_topology(Path::new("/"))?;
    let Place { cpu, others, bytes } = place(&host, arguments.cpu, arguments.cache)?;
    let seconds = Duration::from_secs;
    let mut counts = Vec::new();
    for command in &arguments.loads {
        let failed = |reason| CalibrateError::Load { load: command.clone(), reason };
        let load = measure::Load::start(command, cpu).map_err(failed)?;
        std::thread::sleep(seconds(arguments.warm_up));
        let alone = load.count(events, seconds(arguments.seconds)).map_err(failed)?;
        let fillers = fill::Fillers::start(&others, bytes).map_err(CalibrateError::Fill)?;
        let beside = load.count(events, seconds(arguments.seconds)).map_err(failed)?;
        drop(fillers);
        counts.push((command.clone(), alone, beside));
    }
    Ok(conclude(cpu, others.len(), &counts))
}

/// Where it happens.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    cpu: CpuId,
    /// CPUs that share its cache, at most [`fill::MOST`].
    others: Vec<CpuId>,
    /// Of the cache.
    bytes: u64,
}

/// The CPU of the operator, or the first one that shares its cache with another.
fn place(host: &HostTopology, wanted: Option<CpuId>, mib: Option<u64>) -> Result<Place, CalibrateError> {
    let online: Vec<CpuId> = host.nodes.iter().flat_map(|node| node.cpus.iter()).collect();
    let cache = |cpu: CpuId| -> Option<&CacheGroup> {
        host.caches.iter().filter(|group| group.cpus.contains(cpu)).max_by_key(|group| group.level)
    };
    let others = |cpu: CpuId| -> Vec<CpuId> {
        // A host that does not show its caches has one for each node.
        let of_node = || host.nodes.iter().find(|node| node.cpus.contains(cpu)).map(|node| &node.cpus);
        let sharing = cache(cpu).map(|group| &group.cpus).or_else(of_node);
        let all = sharing.into_iter().flat_map(|cpus| cpus.iter());
        all.filter(|&other| other != cpu && online.contains(&other)).take(fill::MOST).collect()
    };
    let chosen = wanted.or_else(|| online.iter().copied().find(|&cpu| !others(cpu).is_empty()));
    let cpu = chosen.or(online.first().copied()).ok_or(CalibrateError::NoCpu(0))?;
    if !online.contains(&cpu) {
        return Err(CalibrateError::NoCpu(cpu));
    }
    let others = others(cpu);
    if others.is_empty() {
        return Err(CalibrateError::Alone(cpu));
    }
    let known = cache(cpu).map(|group| group.size_kib << 10).filter(|&bytes| bytes > 0);
    let bytes = mib.map(|mib| mib << 20).or(known).ok_or(CalibrateError::NoSize(cpu))?;
    Ok(Place { cpu, others, bytes })
}

/// Types and bounds.
fn conclude(cpu: CpuId, fillers: usize, counts: &[(String, ThreadCounts, ThreadCounts)]) -> Calibration {
    let measured: Vec<Measured> = counts.iter().map(|(_, alone, beside)| measured(alone, beside)).collect();
    let load = |((command, _, _), measured): (&(String, ThreadCounts, ThreadCounts), &Measured)| Load {
        command: command.clone(),
        pressure: measured.pressure,
        miss_rate_alone: measured.miss_rate_alone,
        miss_rate_beside_others: measured.miss_rate_beside_others,
        kind: type_by_miss_rate(measured).name(),
    };
    let bounds = analyzer::calibrate(&measured);
    let problem = bounds.as_ref().err().map(problem);
    Calibration {
        cpu,
        fillers,
        loads: counts.iter().zip(&measured).map(load).collect(),
        bound_low: bounds.as_ref().ok().map(|bounds| bounds.low),
        bound_high: bounds.as_ref().ok().map(|bounds| bounds.high),
        problem,
    }
}

fn problem(error: &CalibrationError) -> String {
    let hint = match error {
        CalibrationError::Missing(VcpuType::Friendly) => "give one that hardly uses memory",
        CalibrationError::Missing(VcpuType::Fitting) => "give one whose data fits the cache when it is alone",
        CalibrationError::Missing(VcpuType::Thrashing) => "give one with much more data than the cache holds",
        CalibrationError::Overlap { .. } => "leave one of them out",
    };
    format!("{error}: {hint}")
}

fn measured(alone: &ThreadCounts, beside: &ThreadCounts) -> Measured {
    let counts = |counted: &ThreadCounts| Counts {
        instructions: counted.instructions,
        llc_references: counted.llc_references,
        llc_misses: counted.llc_misses,
        accesses: Vec::new(),
    };
    let rate = |counted: &ThreadCounts| counted.llc_misses as f64 / counted.llc_references.max(1) as f64;
    Measured {
        pressure: analyzer::llc_access_pressure(&counts(alone)).unwrap_or(0.0),
        // Counters of one group need not count in the same instant.
        miss_rate_alone: rate(alone).min(1.0),
        miss_rate_beside_others: rate(beside).min(1.0),
    }
}

/// For people.
pub fn text(found: &Calibration) -> String {
    let mut table = Table::new(">PRESSURE  >MISSES ALONE  >BESIDE OTHERS  TYPE  LOAD");
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    for load in &found.loads {
        table.row([
            format!("{:.2}", load.pressure),
            percent(load.miss_rate_alone),
            percent(load.miss_rate_beside_others),
            load.kind.to_owned(),
            plain(&load.command),
        ]);
    }
    let mut text =
        format!("CPU {}, {} others filled its cache\n\n{}\n", found.cpu, found.fillers, table.text(0));
    match (found.bound_low, found.bound_high, &found.problem) {
        (Some(low), Some(high), _) => {
            text += &format!("in vnumad.toml:\n[policy]\nbound_low = {low:.2}\nbound_high = {high:.2}\n");
        }
        (_, _, problem) => text += &format!("no bounds: {}\n", problem.as_deref().unwrap_or_default()),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vnuma_model::HostNode;

    fn host(caches: &[(u32, &str, u64)]) -> HostTopology {
        let set = |text: &str| text.parse().expect("a list");
        let node = |id, cpus| HostNode { id, cpus: set(cpus), ..HostNode::default() };
        let cache =
            |&(level, cpus, size_kib): &(u32, &str, u64)| CacheGroup { level, size_kib, cpus: set(cpus) };
        HostTopology {
            nodes: vec![node(0, "0-3"), node(1, "4-7")],
            caches: caches.iter().map(cache).collect(),
            ..HostTopology::default()
        }
    }

    #[test]
    fn the_loads_run_where_a_cache_is_shared() {
        let shared = host(&[(2, "4-7", 512), (3, "0", 1024), (3, "1-2", 2048), (3, "4-7", 4096)]);
        let found = place(&shared, None, None).expect("CPU 1");
        assert_eq!(found, Place { cpu: 1, others: vec![2], bytes: 2 << 20 });
        let found = place(&shared, Some(6), Some(64)).expect("CPU 6");
        assert_eq!(found, Place { cpu: 6, others: vec![4, 5, 7], bytes: 64 << 20 });
        let error =
            |host: &HostTopology, cpu| place(host, Some(cpu), None).expect_err("not possible").to_string();
        assert!(error(&shared, 0).contains("shares its last-level cache with no other CPU"));
        assert_eq!(error(&shared, 8), "--cpu 8: there is no such CPU online");
        assert!(error(&host(&[]), 2).contains("give it with --cache"));
        assert_eq!(place(&host(&[]), None, Some(1)).expect("CPU 0").others, [1, 2, 3]);
    }

    fn counted(pressure: f64, miss_rate: f64) -> ThreadCounts {
        let llc_references = (pressure * 1e6) as u64;
        let llc_misses = (llc_references as f64 * miss_rate) as u64;
        ThreadCounts { instructions: 1_000_000_000, llc_references, llc_misses, ..ThreadCounts::default() }
    }

    fn found(loads: &[(f64, f64, f64)]) -> Calibration {
        let counts = |&(pressure, alone, beside): &(f64, f64, f64)| {
            ("load".to_owned(), counted(pressure, alone), counted(pressure, beside))
        };
        conclude(0, 1, &loads.iter().map(counts).collect::<Vec<_>>())
    }

    /// Section IV-A of the paper, with miss rates as its figure 3 shows them.
    #[test]
    fn the_papers_programs_give_bounds_like_the_papers() {
        let found = found(&[
            (0.48, 0.2, 0.3),
            (2.01, 0.1, 0.2),
            (15.38, 0.1, 0.6),
            (16.33, 0.2, 0.6),
            (21.68, 0.9, 0.95),
            (22.41, 0.95, 0.97),
        ]);
        let (low, high) = (found.bound_low.expect("low"), found.bound_high.expect("high"));
        assert!((2.01..15.38).contains(&low) && (16.33..21.68).contains(&high), "{found:?}");
        assert!(text(&found).contains("bound_low = 5.56\nbound_high = 18.82\n"), "{}", text(&found));
    }

    #[test]
    fn what_is_missing_is_said() {
        let text = text(&found(&[(0.5, 0.1, 0.1), (30.0, 0.9, 0.9)]));
        assert!(
            text.contains("no bounds: no load turned out to be LLC-FI: give one whose data fits"),
            "{text}"
        );
    }

    #[test]
    fn nothing_counted_is_no_reference() {
        let nothing = measured(&ThreadCounts::default(), &ThreadCounts::default());
        assert_eq!((nothing.pressure, nothing.miss_rate_alone), (0.0, 0.0));
    }

    proptest! {
        /// Whatever loads of the three types there are, if their pressures do not overlap the bounds are between them.
        #[test]
        fn bounds_separate_the_types(
            friendly in proptest::collection::vec(0.0_f64..0.9, 1..5),
            fitting in proptest::collection::vec(4.0_f64..15.0, 1..5),
            thrashing in proptest::collection::vec(16.0_f64..300.0, 1..5),
            rates in (0.0_f64..0.4, 0.7_f64..1.0, 0.6_f64..1.0),
        ) {
            let (alone, beside, high) = rates;
            let all: Vec<_> = friendly.iter().map(|&p| (p, alone, beside))
                .chain(fitting.iter().map(|&p| (p, alone, beside)))
                .chain(thrashing.iter().map(|&p| (p, high, high)))
                .collect();
            let found = found(&all);
            let (low, high) = (found.bound_low.expect("low"), found.bound_high.expect("high"));
            prop_assert!(friendly.iter().all(|&p| p < low) && fitting.iter().all(|&p| p >= low - 1e-6));
            prop_assert!(fitting.iter().all(|&p| p < high) && thrashing.iter().all(|&p| p >= high - 1e-6));
        }
    }
}
