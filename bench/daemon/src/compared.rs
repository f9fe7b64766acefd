//! Compares a vnumad with another one, such as that of an earlier commit. Both run at the same time, and vCPUs of both are moved
//! in turn, so that a machine that is faster for a while is so for both.

use crate::growth::{Measured, Side, in_turn};
use serde::Serialize;
use std::path::Path;
use vnuma_bench_figures::stats::median;

/// VMs of each.
const VMS: usize = 200;

/// What bench/README.md explains. Of each pair the first is the vnumad that is measured, the second the one beside it.
#[derive(Debug, Serialize)]
pub struct Compared {
    source: &'static str,
    vms: usize,
    turns_cpu_us_per_move: Vec<[f64; 2]>,
    cpu_us_per_move: [Option<f64>; 2],
    /// Median of each turn's ratio, first by second.
    ratio: Option<f64>,
    turns_publish_p99_ms: Vec<[Option<f64>; 2]>,
    publish_p99_ms: [Option<f64>; 2],
    skipped: Option<String>,
}

impl Compared {
    fn of(measured: Measured, skipped: Option<String>) -> Self {
        let Measured { cpu_us_per_move: cpu, publish_p99_ms: p99 } = measured;
        let middle = |side: usize| median(cpu.iter().map(|turn| turn[side]));
        let middle_p99 = |side: usize| median(p99.iter().filter_map(|turn| turn[side]));
        Self {
            source: "measured",
            vms: VMS,
            cpu_us_per_move: [middle(0), middle(1)],
            ratio: median(cpu.iter().map(|[first, second]| first / second)),
            publish_p99_ms: [middle_p99(0), middle_p99(1)],
            turns_cpu_us_per_move: cpu,
            turns_publish_p99_ms: p99,
            skipped,
        }
    }
}

pub fn measure(vnumad: &Path, beside: &Path) -> anyhow::Result<Compared> {
    eprintln!("{} and {}: {VMS} VMs each, moved in turn", vnumad.display(), beside.display());
    let side = |vnumad| Side { vnumad, vms: VMS, log: None };
    Ok(match in_turn(&[side(vnumad), side(beside)])? {
        Ok(measured) => Compared::of(measured, None),
        Err(reason) => Compared::of(Measured::default(), Some(reason)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_that_of_turns() {
        // The machine was slower in the second turn, for both.
        let cpu_us_per_move = vec![[50.0, 40.0], [100.0, 80.0], [10.0, 10.0]];
        let publish_p99_ms = vec![[Some(1.0), Some(2.0)], [Some(3.0), None], [Some(5.0), Some(4.0)]];
        let compared = Compared::of(Measured { cpu_us_per_move, publish_p99_ms }, None);
        assert_eq!((compared.ratio, compared.cpu_us_per_move), (Some(1.25), [Some(50.0), Some(40.0)]));
        assert_eq!(compared.publish_p99_ms, [Some(3.0), Some(2.0)]);
        assert_eq!(Compared::of(Measured::default(), Some("no BTF".to_owned())).ratio, None);
    }
}
