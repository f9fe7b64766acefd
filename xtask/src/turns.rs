//! What `make test` plays by turns, as there is no time for all of it at each commit. `make soak` plays all of it.

use crate::changed::git;

/// Scenarios of `tests/lab` are played in so many parts.
const TURNS: usize = 3;
/// Those that `make test` plays at one turn only. It plays all others at each.
const SCENARIOS: [&[&str]; TURNS] = [
    &["slice::displaced_memory_comes_home", "slice::a_policy_takes_vcpus_to_their_memory"],
    &[
        "slice::a_guest_node_gets_another_home",
        "slice::a_host_that_grows_and_shrinks_is_followed",
        "slice::programs_follow_by_their_libraries",
        "slice::guests_survive_the_end_of_others",
    ],
    &[
        "slice::vms_are_where_they_were_placed_and_know_where_their_devices_are",
        "slice::guests_outlive_a_vnumad_that_is_killed",
    ],
];

/// Which turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn(pub u32);

impl Turn {
    /// The turn of the commit that is checked out, so that what fails once fails again; the first one where there is none.
    pub fn of_checkout() -> Self {
        Self::of_commit(&git(&["rev-parse", "HEAD"]).unwrap_or_default())
    }

    /// The first digits of a commit's hash are as good as random.
    fn of_commit(hash: &str) -> Self {
        Self(hash.get(..7).and_then(|digits| u32::from_str_radix(digits, 16).ok()).unwrap_or_default())
    }

    /// Which of so many things.
    pub fn of(self, count: usize) -> usize {
        self.0 as usize % count.max(1)
    }

    /// Which of the three parts of the scenarios.
    pub fn third(self) -> usize {
        self.of(TURNS)
    }

    /// Whether `make test` plays a scenario at this turn.
    pub fn plays(self, scenario: &str) -> bool {
        let part = SCENARIOS.iter().position(|part| part.contains(&scenario));
        part.is_none_or(|part| part == self.third())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::workspace;

    #[test]
    fn each_scenario_has_its_turn() {
        for scenario in SCENARIOS.into_iter().flatten() {
            let turns: Vec<_> = (0..3).filter(|turn| Turn(*turn).plays(scenario)).collect();
            assert_eq!(turns.len(), 1, "{scenario}: {turns:?}");
        }
        assert!((0..3).all(|turn| Turn(turn).plays("slice::another_one")));
    }

    #[test]
    fn a_commit_has_one_turn() {
        assert_eq!(Turn::of_commit("c83addc0ffee\n"), Turn(0xc83_addc));
        assert_eq!(Turn::of_commit(""), Turn(0));
        assert_eq!((Turn(7).third(), Turn(7).of(5), Turn(7).of(0)), (1, 2, 0));
    }

    /// A scenario that is renamed would be played at each turn, one that is ignored at none.
    #[test]
    fn scenarios_with_turns_are_there_and_not_ignored() {
        let file = workspace().join("tests/lab/tests/lab/slice.rs");
        let text = std::fs::read_to_string(file).unwrap();
        for scenario in SCENARIOS.into_iter().flatten() {
            let function = format!("#[test]\nfn {}()", scenario.trim_start_matches("slice::"));
            assert!(text.contains(&function), "{scenario}");
        }
    }
}
