//! Profiles that price what was counted.

use anyhow::Result;
use vnuma_lab_pricing::{CounterProfile, by_name, names};

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

#[cfg(test)]
mod tests {
    use super::*;

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
