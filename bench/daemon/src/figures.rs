//! The report's rows, and what is expected of them.

use crate::{growth::Growth, readers::Clients, row::Plan, vms::VCPUS};
use serde::Serialize;
use std::collections::BTreeMap;
use vnuma_bench_figures::goals::Limit;

/// What bench/README.md explains. A figure of a row that was skipped is null.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    pub backend: String,
    pub locations: String,
    pub clients: Clients,
    pub vms: usize,
    pub vcpus: usize,
    pub moves_per_s: u64,
    pub publish_p99_ms: Option<f64>,
    pub cpu_us_per_move: Option<f64>,
    pub rest_cpu_share: Option<f64>,
    pub wakeups_per_s: Option<f64>,
    pub rss_mb: Option<f64>,
    pub publish_p99_ms_alone: Option<f64>,
    pub publish_p50_ms: Option<f64>,
    pub publish_max_ms: Option<f64>,
    pub moves: usize,
    /// How many a second were made of those that are wanted, [`Self::moves_per_s`].
    pub moves_per_s_made: Option<f64>,
    pub unpublished: usize,
    pub cpu_us_per_move_by_thread: BTreeMap<String, f64>,
    pub cpu_share_with_readers: Option<f64>,
    pub answer_p99_ms: Option<f64>,
    pub rest_cpu_share_by_thread: BTreeMap<String, f64>,
    pub wakeups_per_s_by_thread: BTreeMap<String, f64>,
    pub descriptors: usize,
    pub threads: usize,
    pub attach_s: Option<f64>,
    pub load_average: f64,
    pub core_waited_share: Option<f64>,
    pub skipped: Option<String>,
}

/// A move costs at most so many times its system calls (bench/README.md says why).
const MOVE: f64 = 4.9;

/// Above [`Row::line`].
pub const HEADING: &str =
    "backend locations   vms  vcpus  moves/s  p99 ms  us/move  rest CPU  wake-ups/s  RSS MB  unpublished";

impl Row {
    /// One that cannot be measured here.
    pub fn skipped(plan: &Plan, reason: String) -> Self {
        Self {
            backend: plan.backend.to_owned(),
            locations: plan.locations.to_owned(),
            clients: plan.clients,
            vms: plan.vms,
            vcpus: plan.vms * VCPUS,
            moves_per_s: plan.moves_per_s,
            skipped: Some(reason),
            ..Self::default()
        }
    }

    /// For people.
    pub fn line(&self) -> String {
        let Self { backend, locations, vms, vcpus, moves_per_s, .. } = self;
        let head = format!("{backend:<7} {locations:<9} {vms:>5} {vcpus:>6} {moves_per_s:>8}");
        if let Some(reason) = &self.skipped {
            return format!("{head}  skipped: {reason}");
        }
        let rest = self.rest_cpu_share.map(|share| share * 100.0);
        let figures = [self.publish_p99_ms, self.cpu_us_per_move, rest, self.wakeups_per_s, self.rss_mb];
        let shown = |figure: Option<f64>| figure.map_or("-".to_owned(), |figure| format!("{figure:.1}"));
        let [p99, move_us, rest, woken, rss] = figures.map(shown);
        format!("{head} {p99:>7} {move_us:>8} {rest:>8}% {woken:>11} {rss:>7} {:>12}", self.unpublished)
    }
}

/// Goals of the rows with BPF that were asked for: those with 500 VMs and 1000 moves a second, by each backend, and those whose
/// metrics are scraped. One whose row was skipped is not met.
///
/// The cost of a move is judged by what its system calls cost just before the row or just after it (the lower figure, as other work
/// adds to both).
pub fn goals(rows: &[Row], growth: Option<&Growth>, yardstick_us: &[f64]) -> Vec<Limit> {
    let mut goals = Vec::new();
    let mut goal = |name: String, value, limit| goals.push(Limit::at_most(name, value, limit));
    let beside = rows.iter().zip(yardstick_us.windows(2));
    for (row, yardstick_us) in beside.filter(|(row, _)| row.locations == "bpf") {
        let named = |name: &str| format!("{}, {} VMs: {name}", row.backend, row.vms);
        let unpublished = row.publish_p99_ms.map(|_| row.unpublished as f64);
        match row.clients {
            Clients::Readers if (row.vms, row.moves_per_s) == (500, 1000) => {
                goal(named("publish_p99_ms"), row.publish_p99_ms, 50.0);
                let yardstick_us = yardstick_us[0].min(yardstick_us[1]);
                let by_yardstick = row.cpu_us_per_move.map(|us| us / yardstick_us);
                goal(named("cpu_us_per_move by yardstick_us"), by_yardstick, MOVE);
                goal(named("rest_cpu_share"), row.rest_cpu_share, 0.03);
                goal(named("wakeups_per_s"), row.wakeups_per_s, 5.0);
                goal(named("rss_mb"), row.rss_mb, 200.0);
                goal(named("unpublished"), unpublished, 0.0);
            }
            Clients::Scrapers => {
                goal(named("publish_p99_ms while metrics are scraped"), row.publish_p99_ms, 50.0);
                goal(named("unpublished while metrics are scraped"), unpublished, 0.0);
            }
            Clients::Readers => {}
        }
    }
    if let Some(growth) = growth {
        let name = format!("growth of cpu_us_per_move from {} to {} VMs", growth.vms[0], growth.vms[1]);
        goal(name, growth.ratio, 1.2);
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(vms: usize, moves_per_s: u64, us: f64) -> Row {
        Row {
            backend: "qmp".to_owned(),
            locations: "bpf".to_owned(),
            vms,
            moves_per_s,
            publish_p99_ms: Some(60.0),
            cpu_us_per_move: Some(us),
            ..Row::default()
        }
    }

    #[test]
    fn goals_are_of_the_rows_that_there_are() {
        assert_eq!(goals(&[row(100, 1000, 1.0)], None, &[8.0; 2]), []);
        let skipped = Row { publish_p99_ms: None, cpu_us_per_move: None, ..row(500, 1000, 1.0) };
        let skipped = goals(&[Row { skipped: Some("no BTF".to_owned()), ..skipped }], None, &[8.0; 2]);
        assert!(
            skipped.len() == 6 && skipped.iter().all(|goal| goal.value.is_none() && !goal.met),
            "{skipped:?}"
        );
        let growth = Growth::of([100, 1000], 500, vec![[40.0, 50.0], [50.0, 40.0], [40.0, 52.0]]);
        let rows = [row(500, 1000, 39.2), row(100, 500, 1.0)];
        let goals = goals(&rows, Some(&growth), &[9.0, 8.0, 7.0]);
        let found: Vec<_> = goals.iter().map(|goal| (goal.name.as_str(), goal.value, goal.met)).collect();
        let growth = "growth of cpu_us_per_move from 100 to 1000 VMs";
        assert_eq!(
            found,
            [
                ("qmp, 500 VMs: publish_p99_ms", Some(60.0), false),
                ("qmp, 500 VMs: cpu_us_per_move by yardstick_us", Some(4.9), true),
                ("qmp, 500 VMs: rest_cpu_share", None, false),
                ("qmp, 500 VMs: wakeups_per_s", None, false),
                ("qmp, 500 VMs: rss_mb", None, false),
                ("qmp, 500 VMs: unpublished", Some(0.0), true),
                (growth, Some(1.25), false)
            ]
        );
    }

    #[test]
    fn each_backend_has_the_goals_and_polling_has_none() {
        let of = |backend: &str, locations: &str, clients| {
            let row = Row {
                backend: backend.to_owned(),
                locations: locations.to_owned(),
                clients,
                ..row(500, 1000, 1.0)
            };
            goals(&[row], None, &[8.0; 2]).len()
        };
        assert_eq!((of("libvirt", "bpf", Clients::Readers), of("qmp", "poll", Clients::Readers)), (6, 0));
        assert_eq!(of("libvirt", "bpf", Clients::Scrapers), 2);
    }

    #[test]
    fn a_skipped_row_says_why() {
        let row = Row { skipped: Some("no BTF".to_owned()), ..row(1, 1, 0.0) };
        assert!(row.line().ends_with("skipped: no BTF"));
    }
}
