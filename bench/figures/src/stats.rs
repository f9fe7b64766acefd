//! Medians, percentiles and intervals of samples. A percentile is a sample: the smallest that is not below its share of them (nearest
//! rank). So the median of an even number is the lower one of both in the middle.

/// Samples in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples(Vec<f64>);

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        let mut samples: Vec<f64> = samples.into_iter().collect();
        samples.sort_by(f64::total_cmp);
        Self(samples)
    }
}

impl Samples {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Nearest rank; none without samples.
    pub fn percentile(&self, percent: usize) -> Option<f64> {
        self.0.get(rank(self.count(), percent)).copied()
    }

    /// The 50th percentile.
    pub fn median(&self) -> Option<f64> {
        self.percentile(50)
    }

    /// The least and the most.
    pub fn interval(&self) -> Option<[f64; 2]> {
        Some([*self.0.first()?, *self.0.last()?])
    }
}

/// Where a percentile is among so many in order.
fn rank(count: usize, percent: usize) -> usize {
    (count * percent).div_ceil(100).saturating_sub(1)
}

/// The load average of the last minute, of the whole machine.
pub fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or_default()
}

/// The median of figures.
pub fn median(figures: impl IntoIterator<Item = f64>) -> Option<f64> {
    figures.into_iter().collect::<Samples>().median()
}

/// The one whose figure is the median.
pub fn middle<T>(mut all: Vec<T>, figure: impl Fn(&T) -> f64) -> Option<T> {
    all.sort_by(|one, other| figure(one).total_cmp(&figure(other)));
    let at = rank(all.len(), 50);
    all.into_iter().nth(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_by_nearest_rank() {
        let of = |count: u32| (1..=count).rev().map(f64::from).collect::<Samples>();
        assert_eq!(
            [50, 90, 99, 100].map(|at| of(200).percentile(at)),
            [100.0, 180.0, 198.0, 200.0].map(Some)
        );
        assert_eq!((of(0).percentile(99), of(1).percentile(1)), (None, Some(1.0)));
        assert_eq!((of(200).interval(), of(0).interval()), (Some([1.0, 200.0]), None));
    }

    #[test]
    fn the_median_is_the_middle_one_or_the_lower_of_two() {
        assert_eq!((median([3.0, 1.0, 2.0]), median([4.0, 1.0]), median([])), (Some(2.0), Some(1.0), None));
        assert_eq!(middle(vec![("b", 2.0), ("c", 3.0), ("a", 1.0)], |one| one.1), Some(("b", 2.0)));
        assert_eq!(middle(vec![("b", 2.0), ("a", 1.0)], |one| one.1), Some(("a", 1.0)));
        assert_eq!(middle(Vec::<f64>::new(), |one| *one), None);
    }
}
