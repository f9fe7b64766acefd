//! What control groups are entitled to: CPU time by their weights, no group more than its threads and its quota can use.

/// CPUs that each group has of so many: (weight, the most that it can use). What one cannot use is shared among the others.
pub fn entitled(cpus: f64, groups: &[(f64, f64)]) -> Vec<f64> {
    let mut given: Vec<Option<f64>> = vec![None; groups.len()];
    loop {
        let used: f64 = given.iter().flatten().sum();
        let open = || groups.iter().zip(&given).filter(|(_, given)| given.is_none());
        let weights: f64 = open().map(|((weight, _), _)| weight).sum();
        let part = |weight: f64| (cpus - used).max(0.0) * weight / weights;
        let full: Vec<usize> = (0..groups.len())
            .filter(|&at| given[at].is_none() && groups[at].1 <= part(groups[at].0))
            .collect();
        if full.is_empty() {
            let of = |(&(weight, _), given): (&(f64, f64), &Option<f64>)| given.unwrap_or(part(weight));
            return groups.iter().zip(&given).map(of).collect();
        }
        full.into_iter().for_each(|at| given[at] = Some(groups[at].1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: &[f64], expected: &[f64]) {
        let same = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-9);
        assert!(same && found.len() == expected.len(), "{found:?}, expected {expected:?}");
    }

    #[test]
    fn time_goes_by_weight_and_what_one_cannot_use_to_the_others() {
        close(&entitled(8.0, &[(100.0, 8.0), (300.0, 8.0)]), &[2.0, 6.0]);
        close(&entitled(8.0, &[(10_000.0, 2.0), (300.0, 8.0), (100.0, 8.0)]), &[2.0, 4.5, 1.5]);
        // The second is full only once the first is.
        close(&entitled(8.0, &[(100.0, 1.0), (100.0, 3.0), (100.0, 8.0)]), &[1.0, 3.0, 4.0]);
        close(&entitled(8.0, &[(100.0, 1.0)]), &[1.0]);
        close(&entitled(2.0, &[(1.0, 1.0), (1.0, 1.0), (1.0, 0.0)]), &[1.0, 1.0, 0.0]);
        close(&entitled(2.0, &[]), &[]);
    }
}
