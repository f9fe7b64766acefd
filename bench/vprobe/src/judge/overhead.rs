//! What vnumad takes, with its default period.
//!
//! Its threads are counted in modelled cycles, as vCPUs are. Of BPF programs that run in other threads only the time is known. The
//! emulator takes as long for an instruction that misses the cache as for any other one, so that a vCPU that waits for memory has
//! more modelled cycles in a microsecond than code that does not. What the programs take is therefore converted: a microsecond of
//! theirs is as many modelled cycles as one of vnumad's threads, which is such code, too. Their share by time is shown beside it.

use super::{ByLinux, Row, Run, percent, shown};
use crate::committed::{goals, overhead};
use serde::Serialize;
use std::{collections::BTreeMap, fmt};
use vnuma_bench_common::goals::Goal;
use vnuma_lab_pricing::CounterProfile;

/// A cell of [`overhead`], under the server's profile.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overhead {
    /// Under which load.
    pub workload: String,
    /// Under which policy.
    pub policy: &'static str,
    /// Length of a measured period in modelled time, seconds: its mean.
    pub modelled_period_s: f64,
    /// Periods that are not judged.
    pub warm_up_periods: usize,
    /// Periods that are.
    pub measured_periods: usize,
    /// Steps of the policy, warm-up included.
    pub steps: u64,
    /// Modelled cycles of vnumad and of its BPF programs by those of all vCPUs.
    pub share: f64,
    /// The part of the BPF programs that run in other threads.
    pub programs_share: f64,
    /// Their time by that of all vCPUs.
    pub programs_time_share: f64,
    /// How often these ran in a measured period, mean.
    pub program_runs: u64,
    /// The share in each period.
    pub shares: Vec<f64>,
    /// Modelled cycles of each of its threads in a measured period, mean.
    pub threads: BTreeMap<String, u64>,
}

impl fmt::Display for Overhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workload, policy, modelled_period_s, .. } = self;
        write!(
            f,
            "{workload}: {policy} with periods of {} s: vnumad {}, of which BPF programs {} ({} of the time, {} runs a period)",
            shown(*modelled_period_s, 2),
            percent(self.share, 4),
            percent(self.programs_share, 4),
            percent(self.programs_time_share, 4),
            self.program_runs
        )?;
        let mut threads: Vec<_> = self.threads.iter().filter(|(_, cycles)| **cycles >= 1000).collect();
        threads.sort_by_key(|(_, cycles)| std::cmp::Reverse(**cycles));
        let shown = threads.iter().map(|(name, cycles)| format!("{name} {}", *cycles / 1000));
        write!(f, "; thousand cycles a period: {}", shown.collect::<Vec<_>>().join(", "))
    }
}

impl Run {
    /// The cells of it.
    pub(super) fn overhead(&self, own: &CounterProfile) -> Vec<Overhead> {
        let of = |cell: &super::Cell| {
            let row = cell.row(own, ByLinux::default());
            let periods = cell.measured();
            let spent = Spent::of(periods);
            let all = |period: &super::Period| {
                let one = Spent::of(std::slice::from_ref(period));
                one.daemon_share() + one.programs_share(spent.daemon_rate())
            };
            let programs_share = programs_share(periods).unwrap_or(f64::NAN);
            let mut threads: BTreeMap<String, u64> = BTreeMap::new();
            for (name, cycles) in periods.iter().filter_map(|period| period.daemon.as_ref()).flatten() {
                *threads.entry(name.clone()).or_default() += cycles;
            }
            let count = periods.len().max(1) as u64;
            threads.values_mut().for_each(|cycles| *cycles /= count);
            Overhead {
                workload: cell.workload.clone(),
                policy: overhead::PERIOD.0,
                modelled_period_s: row.modelled_period_s,
                warm_up_periods: row.warm_up_periods,
                measured_periods: row.measured_periods,
                steps: row.steps,
                share: row.overhead_share.unwrap_or(f64::NAN) + programs_share,
                programs_share,
                programs_time_share: spent.programs_time_share(),
                program_runs: periods.iter().filter_map(|period| period.program_runs).sum::<u64>() / count,
                shares: periods.iter().map(all).collect(),
                threads,
            }
        };
        self.cells.iter().filter(|cell| cell.policy == overhead::CELL).map(of).collect()
    }
}

/// The part of the BPF programs that run in other threads than vnumad's, in modelled cycles, of what these vCPUs took. `None`: it was
/// not taken.
pub fn programs_share(periods: &[super::Period]) -> Option<f64> {
    let spent = Spent::of(periods);
    let share = spent.programs_share(spent.daemon_rate());
    share.is_finite().then_some(share)
}

/// Cycles and times of some periods; no number if something was not taken.
struct Spent {
    vcpu_cycles: f64,
    vcpu_ns: f64,
    daemon_cycles: f64,
    daemon_ns: f64,
    programs_ns: f64,
}

impl Spent {
    fn of(periods: &[super::Period]) -> Self {
        let vcpus = || periods.iter().flat_map(|period| period.vms.iter().flatten());
        let daemon = periods.iter().map(|period| period.daemon.as_ref());
        let sum = |all: Option<u64>| all.map_or(f64::NAN, |sum| sum as f64);
        Self {
            vcpu_cycles: vcpus().map(|vcpu| vcpu.values.cycles).sum::<u64>() as f64,
            vcpu_ns: vcpus().map(|vcpu| vcpu.values.ran_ns).sum::<u64>() as f64,
            daemon_cycles: sum(daemon.map(|threads| Some(threads?.values().sum::<u64>())).sum()),
            daemon_ns: sum(periods.iter().map(|period| period.daemon_ns).sum()),
            programs_ns: sum(periods.iter().map(|period| period.programs_ns).sum()),
        }
    }

    fn daemon_share(&self) -> f64 {
        super::ratio(self.daemon_cycles, self.vcpu_cycles)
    }

    /// Modelled cycles of vnumad's threads in a nanosecond.
    fn daemon_rate(&self) -> f64 {
        super::ratio(self.daemon_cycles, self.daemon_ns)
    }

    fn programs_share(&self, cycles_per_ns: f64) -> f64 {
        super::ratio(self.programs_ns * cycles_per_ns, self.vcpu_cycles)
    }

    fn programs_time_share(&self) -> f64 {
        super::ratio(self.programs_ns, self.vcpu_ns)
    }
}

/// The goal, if `vprobe` was measured under that load, or this was.
pub(super) fn goal(found: &[Overhead], rows: &[Row]) -> Option<Goal> {
    let most = found.iter().map(|found| found.share).reduce(f64::max);
    let (policy, period_s) = overhead::PERIOD;
    let wanted = |row: &&Row| (row.workload.as_str(), row.policy.as_str()) == (overhead::WORKLOAD, policy);
    if most.is_none() && !rows.iter().any(|row| wanted(&row)) {
        return None;
    }
    Some(Goal {
        goal: format!(
            "{} under {policy}: with periods of {period_s} s vnumad takes at most {:.2} % of the VMs' cycles",
            overhead::WORKLOAD,
            goals::OVERHEAD * 100.0
        ),
        found: most.map_or_else(|| "it was not measured".to_owned(), |most| percent(most, 4)),
        met: most.is_some_and(|most| most <= goals::OVERHEAD),
    })
}
