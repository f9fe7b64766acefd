//! What the demonstration found: a table for people, a file for programs.

use crate::device::Told;
use crate::placed::BeforeAfter;
use crate::series::Series;
use anyhow::{Result, ensure};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use vnuma_bench_figures::stats::Samples;

/// Everything of one run.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Where the figures come from.
    pub source: &'static str,
    /// How the run was set up.
    pub configuration: Configuration,
    /// The VM that vnumad publishes its topology to.
    pub dynamic: VmReport,
    /// The otherwise identical VM that keeps the topology of its boot.
    #[serde(rename = "static")]
    pub static_: VmReport,
    /// Times that a vCPU of the dynamic VM came to another host node.
    pub changes: usize,
    /// Generations that its guest acknowledged.
    pub updates: usize,
    /// Host change to guest updated, one clock (`CLOCK_MONOTONIC` of the host). A drift
    /// includes the dwell that vnumad gives the load balancer to change its mind.
    pub update_latency_ms: Percentiles,
    /// The part of it after the publication.
    pub published_to_acknowledged_ms: Percentiles,
    /// The static VM, after a policy has placed its vCPUs.
    pub placed: BeforeAfter,
    /// The static VM, which was then given a device and attached; none on a machine that is not the lab's.
    pub told: Option<Told>,
    /// Both VMs over time.
    pub series: Series,
}

/// The attached guest may miss one in so many of the stays that vnumad told it of in time, or one. A stay is the time that a vCPU is on one
/// node; the guest follows it if its last pages come from that node. Stays that end before the guest has the update do not count, and
/// the share of local pages does not either: both depend on the load of the machine.
const MISSED_LESS: usize = 10;

impl Report {
    /// An error unless the run showed what the demonstration claims.
    ///
    /// On a machine of its own the counters decide whether the guest's program uses enough memory for the policy to act.
    pub fn check_claim(&self, on_this_machine: bool, with_disk: bool) -> Result<()> {
        let static_ = self.static_.stays.saturating_sub(self.static_.stays_followed);
        ensure!(static_ > 1, "the guest without a channel missed {static_} stays: its vCPUs have not moved");
        let VmReport { stays, stays_told, told_missed, .. } = self.dynamic;
        ensure!(stays_told > 0, "the attached guest was told of none of {stays} stays in time");
        ensure!(
            told_missed <= (stays_told / MISSED_LESS).max(1),
            "the attached guest missed {told_missed} of the {stays_told} stays that it was told of in time"
        );
        match &self.told {
            Some(told) => told.check()?,
            None => ensure!(!with_disk, "no device was passed through"),
        }
        if on_this_machine && self.placed.cause.is_none() { Ok(()) } else { self.placed.check() }
    }

    /// What was run, where.
    pub fn run(&self) -> String {
        let configuration = &self.configuration;
        format!(
            "{}: {} host nodes, {} CPUs, {} vCPUs, {} s, a move every {} ms",
            self.source,
            configuration.host_nodes,
            configuration.host_cpus,
            configuration.vcpus,
            configuration.seconds,
            configuration.period_ms,
        )
    }
}

/// How a run was set up.
#[derive(Debug, Default, Serialize)]
pub struct Configuration {
    /// Host nodes.
    pub host_nodes: usize,
    /// Host CPUs.
    pub host_cpus: usize,
    /// vCPUs of each VM.
    pub vcpus: usize,
    /// Seconds of moves and allocation.
    pub seconds: u64,
    /// Milliseconds between moves.
    pub period_ms: u64,
    /// Seed of the moves.
    pub seed: u64,
    /// Kernel of the host.
    pub host_kernel: String,
    /// Kernel of the guests.
    pub guest_kernel: String,
}

/// One VM.
#[derive(Debug, Default, Serialize)]
pub struct VmReport {
    /// Share of freshly allocated pages on the host node of the vCPU that touched them.
    pub local_share: f64,
    /// Stays of vCPUs on a host node, but for short ones.
    pub stays: usize,
    /// Those at whose end the guest allocated on that node.
    pub stays_followed: usize,
    /// Those of which it had acknowledged an update before it took the pages that say whether it followed.
    pub stays_told: usize,
    /// Those of `stays_told` that it did not follow.
    pub told_missed: usize,
    /// Freshly allocated pages looked up.
    pub pages: usize,
    /// Those whose vCPU changed its node while it touched them; they count as local
    /// only if they are local before and after.
    pub pages_in_transit: usize,
    /// Pages of either kind that could not be looked up, because AutoNUMA was migrating them; not local.
    pub pages_not_found: usize,
    /// Share of long-lived pages on the host node of the vCPU that uses them, each
    /// looked at once a second: what the guest's AutoNUMA can raise.
    pub resident_local_share: f64,
    /// Looks at long-lived pages.
    pub resident_pages: usize,
    /// Times that a vCPU came to another host node.
    pub vcpu_node_changes: usize,
    /// What the counters of AutoNUMA rose by.
    pub autonuma: BTreeMap<String, u64>,
}

/// Nearest-rank percentiles.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Samples.
    pub count: usize,
    /// Median; none without samples.
    pub p50: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
}

impl Percentiles {
    /// Of any samples.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Self {
        let samples: Samples = samples.into_iter().collect();
        Self { count: samples.count(), p50: samples.median(), p99: samples.percentile(99) }
    }
}

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

fn milliseconds(value: Option<f64>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| format!("{value:.1} ms"))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dynamic, static_) = (&self.dynamic, &self.static_);
        let mut row = |name: &str, dynamic: String, static_: String| {
            writeln!(f, "  {name:<44} {dynamic:>14} {static_:>14}")
        };
        row("", "with vnuma".into(), "static vNUMA".into())?;
        let stays = |vm: &VmReport| format!("{} of {}", vm.stays_followed, vm.stays);
        row("stays on a node that the guest followed", stays(dynamic), stays(static_))?;
        row("  stays that it was told of in time", dynamic.stays_told.to_string(), "0".into())?;
        row("fresh pages on the vCPU's node", percent(dynamic.local_share), percent(static_.local_share))?;
        row("  pages looked up", dynamic.pages.to_string(), static_.pages.to_string())?;
        row(
            "long-lived pages on the vCPU's node",
            percent(dynamic.resident_local_share),
            percent(static_.resident_local_share),
        )?;
        let names = dynamic.autonuma.keys().chain(static_.autonuma.keys());
        for name in names.collect::<std::collections::BTreeSet<_>>() {
            let count = |vm: &VmReport| vm.autonuma.get(name).copied().unwrap_or_default().to_string();
            row(&format!("  AutoNUMA: {name}"), count(dynamic), count(static_))?;
        }
        row(
            "vCPU moves between host nodes",
            dynamic.vcpu_node_changes.to_string(),
            static_.vcpu_node_changes.to_string(),
        )?;
        row("updates of the guest's topology", self.updates.to_string(), "0".into())?;
        for (name, latency) in [
            ("host change to guest updated", &self.update_latency_ms),
            ("  of that, published to acknowledged", &self.published_to_acknowledged_ms),
        ] {
            row(&format!("{name}, p50"), milliseconds(latency.p50), "never".into())?;
            row(&format!("{name}, p99"), milliseconds(latency.p99), "never".into())?;
        }
        self.placed.fmt(f)?;
        self.told.iter().try_for_each(|told| told.fmt(f))?;
        let configuration = &self.configuration;
        write!(
            f,
            "  ({}: {} host nodes, {} CPUs, Linux {}; guests with {} vCPUs, Linux {}; {} s, a move every {} ms)",
            self.source,
            configuration.host_nodes,
            configuration.host_cpus,
            configuration.host_kernel,
            configuration.vcpus,
            configuration.guest_kernel,
            configuration.seconds,
            configuration.period_ms,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::State;

    #[test]
    fn percentiles_are_the_nearest_rank() {
        let hundred = (1..=100).rev().map(f64::from);
        assert_eq!(Percentiles::of(hundred), Percentiles { count: 100, p50: Some(50.0), p99: Some(99.0) });
        assert_eq!(Percentiles::of(vec![3.0]), Percentiles { count: 1, p50: Some(3.0), p99: Some(3.0) });
        assert_eq!(Percentiles::of(vec![]), Percentiles { count: 0, p50: None, p99: None });
    }

    #[test]
    fn the_claim_is_relative_to_the_guest_without_a_channel() {
        let report = |(told_missed, stays_told), (stays_followed, stays)| {
            let dynamic = VmReport { stays: 200, stays_told, told_missed, ..VmReport::default() };
            let static_ = VmReport { stays, stays_followed, ..VmReport::default() };
            let placed = BeforeAfter { local_share_after: 1.0, ..BeforeAfter::default() };
            let known = State { guest_node: 1, buffers: 4, local_share: 1.0 };
            let told =
                Told { host_node: 1, before: State { guest_node: -1, ..State::default() }, after: known };
            let told = Some(told);
            Report { dynamic, static_, placed, told, ..Report::default() }
        };
        for told in [(0, 1), (1, 9), (2, 20)] {
            report(told, (8, 20)).check_claim(false, true).unwrap();
        }
        for (dynamic, static_) in [
            ((2, 19), (8, 20)),
            ((3, 20), (8, 20)),
            ((0, 20), (20, 20)),
            ((0, 20), (19, 20)),
            ((0, 0), (8, 20)),
        ] {
            assert!(report(dynamic, static_).check_claim(false, true).is_err(), "{dynamic:?} {static_:?}");
        }
        let mut without = report((0, 20), (8, 20));
        without.told = None;
        assert!(
            without.check_claim(false, false).is_ok() && without.check_claim(false, true).is_err(),
            "no device"
        );
        without.told = Some(Told::default());
        assert!(without.check_claim(true, false).is_err(), "one that the guest is told nothing of");
        let unmoved = Report { placed: BeforeAfter::default(), ..report((0, 20), (8, 20)) };
        assert!(unmoved.check_claim(false, true).is_err(), "a policy that does not help");
        assert!(unmoved.check_claim(true, false).is_ok(), "one that had no reason to");
        let cause = Some("its memory is there".into());
        let placed = BeforeAfter { cause, ..BeforeAfter::default() };
        let worse = Report { placed, ..report((0, 20), (8, 20)) };
        assert!(worse.check_claim(true, false).is_err(), "one that moved vCPUs in vain");
    }
}
