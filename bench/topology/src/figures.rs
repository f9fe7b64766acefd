//! Figures of many samples.

use serde::Serialize;
use vnuma_bench_figures::stats::Samples;

/// Median and 99th percentile, in milliseconds.
#[derive(Debug, PartialEq, Serialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
    pub samples: usize,
}

impl Percentiles {
    /// Of samples in nanoseconds; `None` without any.
    pub fn of_ns(samples: impl Iterator<Item = f64>) -> Option<Self> {
        let samples: Samples = samples.map(|ns| ns / 1e6).collect();
        let [_, max] = samples.interval()?;
        Some(Self { p50: samples.median()?, p99: samples.percentile(99)?, max, samples: samples.count() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_by_nearest_rank() {
        let of = |count: u32| Percentiles::of_ns((1..=count).rev().map(|ms| f64::from(ms) * 1e6));
        assert_eq!(of(0), None);
        assert_eq!(of(1), Some(Percentiles { p50: 1.0, p99: 1.0, max: 1.0, samples: 1 }));
        assert_eq!(of(4).unwrap().p50, 2.0);
        assert_eq!(of(200), Some(Percentiles { p50: 100.0, p99: 198.0, max: 200.0, samples: 200 }));
    }
}
