//! From what was measured to rows and goals: what benchmarks have in common.

use anyhow::{Result, ensure};
use serde::Serialize;
use vnuma_lab_pricing::{CounterProfile, by_name, names};

/// A goal and what was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goal {
    /// What is wanted.
    pub goal: String,
    /// What was found.
    pub found: String,
    /// Is it met?
    pub met: bool,
}

/// Prints all of them. An error if one is missed.
pub fn print_goals(goals: &[Goal]) -> Result<()> {
    for goal in goals {
        println!("{} {}: {}", if goal.met { "met   " } else { "MISSED" }, goal.goal, goal.found);
    }
    let missed = goals.iter().filter(|goal| !goal.met).count();
    ensure!(missed == 0, "{missed} of {} goals are missed", goals.len());
    Ok(())
}

/// The profile that was counted with, and those that can price its counts.
pub fn profiles(name: &str) -> Result<Vec<CounterProfile>> {
    let own = by_name(name)?;
    let shape = own.shape();
    let mut all = vec![own];
    for other in names().filter(|other| *other != name) {
        let other = by_name(other)?;
        if other.shape() == shape {
            all.push(other);
        }
    }
    Ok(all)
}

/// Profiles that can price the counts of a second last-level cache with so many sets and ways, beside those of this profile.
pub fn profiles_of_second(name: &str, (sets, ways): (u32, u32)) -> Result<Vec<CounterProfile>> {
    let shape = by_name(name)?.shape().with_llc(sets, ways);
    let all = names().map(by_name).collect::<Result<Vec<_>, _>>()?;
    Ok(all.into_iter().filter(|profile| profile.shape() == shape).collect())
}

/// A difference, as a person reads it.
pub fn percent(share: f64) -> String {
    format!("{:+.2} %", share * 100.0)
}

/// The middle one of an odd number of figures, the upper one of both else.
pub fn median(figures: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!((median([3.0, 1.0, 2.0]), median([4.0, 1.0]), median([])), (Some(2.0), Some(4.0), None));
    }

    #[test]
    fn a_missed_goal_is_an_error_that_counts() {
        let goal = |met| Goal { goal: "a".into(), found: "b".into(), met };
        assert!(print_goals(&[goal(true)]).is_ok() && print_goals(&[]).is_ok());
        let error = print_goals(&[goal(true), goal(false), goal(false)]).expect_err("two are missed");
        assert_eq!(error.to_string(), "2 of 3 goals are missed");
    }

    #[test]
    fn the_profile_that_was_counted_with_is_the_first() {
        let all = profiles("broadwell-2s").expect("a profile");
        assert_eq!(all[0].name, "broadwell-2s");
        assert!(all.iter().all(|one| one.shape() == all[0].shape()) && all.len() > 1);
        assert!(profiles("nothing").is_err());
    }

    #[test]
    fn a_second_cache_has_profiles_of_its_own() {
        let other = by_name("vprobe-e5620").expect("a profile").shape();
        let found = profiles_of_second("broadwell-2s", (other.llc_sets, other.llc_ways)).expect("profiles");
        assert_eq!(found.iter().map(|profile| profile.name.as_str()).collect::<Vec<_>>(), ["vprobe-e5620"]);
        assert!(profiles_of_second("broadwell-2s", (1, 1)).expect("profiles").is_empty());
    }
}
