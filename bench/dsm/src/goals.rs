//! What is expected, and whether it was seen. All figures of a goal are of one run.

use crate::report::{Answer, Mix, Program, Report, Row};
use vnuma_bench_figures::goals::Limit;
use vnuma_dsm_transport::Limits;

/// Most that a row may take, in floors.
const HIT: f64 = 1.3;
const MISS: f64 = 2.0;
/// Most of P90 by P50, and the same in floors' own.
const SPREAD: f64 = 1.5;
const SPREAD_OF_FLOOR: f64 = 1.2;
/// How much faster than `ivy` the non-owner writes of a mix are.
const FASTER: f64 = 1.5;
/// Bytes of a program, by those of `ivy`.
const BYTES: f64 = 0.5;
/// Most until survivors have an answer, by the limit of silence that nodes have: 2 s of 1.5 s.
const ANSWER: f64 = 1.33;

fn row<'a>(report: &'a Report, mode: &str, access: Option<&str>, threads: usize) -> Option<&'a Row> {
    report.rows.iter().find(|row| {
        row.transport == "tcp"
            && row.mode == mode
            && row.access == access
            && row.threads == threads
            && row.spin_us == 0
    })
}

/// All goals. A figure that is missing meets none.
pub fn all(report: &Report) -> Vec<Limit> {
    let mut goals = Vec::new();
    for (access, limit) in [("write-nonowner-hint", HIT), ("write-nonowner-miss", MISS)] {
        let row = row(report, "default", Some(access), 1);
        let floor = row.and_then(|row| row.floor_us);
        let value = row.zip(floor).map(|(row, floor)| row.p50_us / floor.p50);
        goals.push(Limit::at_most(format!("tcp {access}: p50 by the floor's"), value, limit));
        let value = row.map(|row| row.p90_us / row.p50_us);
        let limit = floor.map_or(SPREAD, |floor| SPREAD.max(SPREAD_OF_FLOOR * floor.p90 / floor.p50));
        goals.push(Limit::at_most(format!("tcp {access}: P90 by P50"), value, limit));
    }
    let single = |mode: &str| {
        let found = report.mix.iter().find(|mix: &&Mix| mix.transport == "tcp" && mix.mode == mode);
        found.map(|mix| mix.typical_us)
    };
    let faster = single("ivy").zip(single("default")).map(|(ivy, default)| ivy / default);
    goals.push(Limit::at_least("tcp: non-owner writes of a mix, ivy by default".to_owned(), faster, FASTER));
    for access in ["read-owner", "read-nonowner", "write-owner", "write-nonowner-hint", "write-nonowner-miss"]
    {
        let rate = |threads| row(report, "default", Some(access), threads).map(|row| row.faults_per_s);
        let value = rate(16).zip(rate(2)).map(|(many, two)| many / two);
        goals.push(Limit::at_least(format!("tcp {access}: faults per second, 16 threads by 2"), value, 1.0));
    }
    for program in ["pagerank", "false-sharing"] {
        let bytes = |mode: &str| {
            let same = |one: &&Program| one.program == program && one.transport == "tcp" && one.mode == mode;
            report.programs.iter().find(same).and_then(|one| one.bytes).map(|bytes| bytes as f64)
        };
        let value = bytes("default").zip(bytes("ivy")).map(|(default, ivy)| default / ivy);
        goals.push(Limit::at_most(format!("tcp {program}: bytes by ivy's"), value, BYTES));
    }
    let silence_s = Limits::default().silence.as_secs_f64();
    let slowest =
        report.faulty_peers.iter().map(|answer: &Answer| answer.seconds / silence_s).reduce(f64::max);
    let name = "time until survivors of a faulty peer have an answer, by the limit of silence";
    goals.push(Limit::at_most(name, slowest, ANSWER));
    goals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Quantiles;

    fn row(mode: &'static str, access: Option<&'static str>, threads: usize, p50_us: f64) -> Row {
        Row {
            transport: "tcp",
            mode,
            access,
            threads,
            p50_us,
            p90_us: p50_us * 1.4,
            p99_us: p50_us * 2.0,
            floor_us: Some(Quantiles { p50: 20.0, p90: 28.0, p99: 40.0, samples: 256 }),
            faults_per_s: 1000.0 * threads as f64,
            messages: 2.0,
            bytes: 100.0,
            cpu_us: 10.0,
            cpu_measured_us: None,
            sleeps: 3.0,
            spin_us: 0,
            exchange_us: None,
        }
    }

    #[test]
    fn goals_are_met_only_by_figures_that_are_there_and_good_enough() {
        let mut report = Report::new();
        assert!(all(&report).iter().all(|goal| !goal.met && goal.value.is_none()));
        for access in
            ["read-owner", "read-nonowner", "write-owner", "write-nonowner-hint", "write-nonowner-miss"]
        {
            for threads in [1, 2, 16] {
                report.rows.push(row("default", Some(access), threads, 26.0));
            }
        }
        for (mode, bytes) in [("ivy", 1000), ("default", 501)] {
            for program in ["pagerank", "false-sharing"] {
                let bytes = Some(bytes);
                report.programs.push(Program { bytes, ..Program::new(program, "tcp", mode, 4) });
            }
            let typical_us = if mode == "ivy" { 40.0 } else { 26.6 };
            let (hint_us, miss_us) = (1.0, 1.0);
            report.mix.push(Mix { transport: "tcp", mode, hint_rate: 0.5, hint_us, miss_us, typical_us });
        }
        let (case, error, reason) = ("stopped", String::new(), String::new());
        report.faulty_peers.push(Answer { case, seconds: 1.9, error, reason });
        let missed: Vec<_> =
            all(&report).into_iter().filter(|goal| !goal.met).map(|goal| goal.name).collect();
        assert_eq!(missed, ["tcp pagerank: bytes by ivy's", "tcp false-sharing: bytes by ivy's"]);
        report.rows.iter_mut().for_each(|row| row.p50_us += 0.1);
        report.mix[1].typical_us = 26.7;
        report.faulty_peers[0].seconds = 2.1;
        let missed = all(&report).into_iter().filter(|goal| !goal.met).count();
        assert_eq!(missed, 5);
    }
}
