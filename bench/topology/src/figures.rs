//! Figures of many samples.

use serde::Serialize;

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
        let mut sorted: Vec<f64> = samples.map(|ns| ns / 1e6).collect();
        sorted.sort_by(f64::total_cmp);
        // The smallest sample that is not below the share: the nearest-rank definition.
        let rank = |percent: usize| (sorted.len() * percent).div_ceil(100).saturating_sub(1);
        let at = |percent| sorted.get(rank(percent)).copied();
        Some(Self { p50: at(50)?, p99: at(99)?, max: at(100)?, samples: sorted.len() })
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
