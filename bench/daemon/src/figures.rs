//! The report's rows, and what is expected of them.

use crate::{readers::Clients, yardstick::Yardstick};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use vnuma_bench_figures::{goals::Limit, report, stats::median};

/// What bench/README.md explains. A figure of a row that was skipped is null.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
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

/// A row, and the yardsticks just before and after it. Other work on the machine adds to both; so the lower one counts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    pub row: Row,
    pub yardsticks: [Yardstick; 2],
}

/// A move costs at most so many times its system calls (bench/README.md says why, of all three).
const MOVE: f64 = 4.9;
/// A second at rest costs at most so many times that.
const REST: f64 = 2940.0;
/// A publication takes at most so many times the least that it can.
const PUBLISH: f64 = 11.5;

/// Fields of a row that people are shown, and their digits.
const COLUMNS: &str = "backend locations clients vms vcpus moves_per_s publish_p99_ms:1 cpu_us_per_move:1 rest_cpu_share:4 \
    wakeups_per_s:1 rss_mb:1 unpublished skipped";

/// For people.
pub fn table(rows: &[Row]) -> String {
    report::table(COLUMNS, rows)
}

/// What bench/README.md explains.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Growth {
    pub vms: [usize; 2],
    pub moves_per_s: u64,
    /// Of each turn.
    pub turns_cpu_us_per_move: Vec<[f64; 2]>,
    /// Median of the turns.
    pub cpu_us_per_move: [Option<f64>; 2],
    /// Median of each turn's large by small; `None`: skipped.
    pub ratio: Option<f64>,
    pub skipped: Option<String>,
}

impl Growth {
    /// From the cost of a move in each turn.
    pub fn of(vms: [usize; 2], moves_per_s: u64, turns: Vec<[f64; 2]>) -> Self {
        let each = |host: usize| median(turns.iter().map(|turn| turn[host]));
        let ratio = median(turns.iter().map(|[few, many]| many / few));
        let cpu_us_per_move = [each(0), each(1)];
        Self { vms, moves_per_s, turns_cpu_us_per_move: turns, cpu_us_per_move, ratio, skipped: None }
    }
}

/// Goals of the rows with BPF that were asked for: those with 500 VMs and 1000 moves a second, by each backend, and those whose
/// metrics are scraped. One whose row was skipped is not met. Times are judged by yardsticks of the same run.
pub fn goals(measured: &[Measured], growth: Option<&Growth>) -> Vec<Limit> {
    let mut goals = Vec::new();
    let mut goal = |name: String, value, limit| goals.push(Limit::at_most(name, value, limit));
    for Measured { row, yardsticks: [before, after] } in
        measured.iter().filter(|one| one.row.locations == "bpf")
    {
        let named = |name: &str| format!("{}, {} VMs: {name}", row.backend, row.vms);
        let unpublished = row.publish_p99_ms.map(|_| row.unpublished as f64);
        let (yardstick_us, yardstick_ms) = (before.us.min(after.us), before.ms.min(after.ms));
        let published = row.publish_p99_ms.map(|ms| ms / yardstick_ms);
        match row.clients {
            Clients::Readers if (row.vms, row.moves_per_s) == (500, 1000) => {
                goal(named("publish_p99_ms by yardstick_ms"), published, PUBLISH);
                let by_yardstick = row.cpu_us_per_move.map(|us| us / yardstick_us);
                goal(named("cpu_us_per_move by yardstick_us"), by_yardstick, MOVE);
                let rest = row.rest_cpu_share.map(|share| share * 1e6 / yardstick_us);
                goal(named("us of CPU in a second at rest by yardstick_us"), rest, REST);
                goal(named("wakeups_per_s"), row.wakeups_per_s, 5.0);
                goal(named("rss_mb"), row.rss_mb, 200.0);
                goal(named("unpublished"), unpublished, 0.0);
            }
            Clients::Scrapers => {
                goal(named("publish_p99_ms by yardstick_ms while metrics are scraped"), published, PUBLISH);
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

    fn measured(row: Row) -> Measured {
        Measured { row, yardsticks: [Yardstick { us: 9.0, ms: 4.0 }, Yardstick { us: 8.0, ms: 5.0 }] }
    }

    #[test]
    fn goals_are_of_the_rows_that_there_are() {
        assert_eq!(goals(&[measured(row(100, 1000, 1.0))], None), []);
        let skipped = Row { publish_p99_ms: None, cpu_us_per_move: None, ..row(500, 1000, 1.0) };
        let skipped = goals(&[measured(Row { skipped: Some("no BTF".to_owned()), ..skipped })], None);
        assert!(
            skipped.len() == 6 && skipped.iter().all(|goal| goal.value.is_none() && !goal.met),
            "{skipped:?}"
        );
        let growth = Growth::of([100, 1000], 500, vec![[40.0, 50.0], [50.0, 40.0], [40.0, 52.0]]);
        let rest = Row { rest_cpu_share: Some(0.02), ..row(500, 1000, 39.2) };
        let goals = goals(&[measured(rest), measured(row(100, 500, 1.0))], Some(&growth));
        let found: Vec<_> = goals.iter().map(|goal| (goal.name.as_str(), goal.value, goal.met)).collect();
        let growth = "growth of cpu_us_per_move from 100 to 1000 VMs";
        assert_eq!(
            found,
            [
                ("qmp, 500 VMs: publish_p99_ms by yardstick_ms", Some(15.0), false),
                ("qmp, 500 VMs: cpu_us_per_move by yardstick_us", Some(4.9), true),
                ("qmp, 500 VMs: us of CPU in a second at rest by yardstick_us", Some(2500.0), true),
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
            goals(&[measured(row)], None).len()
        };
        assert_eq!((of("libvirt", "bpf", Clients::Readers), of("qmp", "poll", Clients::Readers)), (6, 0));
        assert_eq!(of("libvirt", "bpf", Clients::Scrapers), 2);
    }

    #[test]
    fn a_skipped_row_says_why() {
        let rows = [Row { skipped: Some("no BTF".to_owned()), ..row(1, 1, 0.0) }];
        assert!(table(&rows).ends_with("no BTF\n"));
    }
}
