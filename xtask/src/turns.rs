//! What `make test` plays by turns, as there is no time for all of it at each commit. `make soak` plays all of it.

use crate::changed::git;

/// There are so many parts.
const TURNS: usize = 21;
/// Jobs of `make test` that have turns, by their names: those that take minutes of CPU time. All others run at each. A turn has some five
/// minutes of a CPU, so that all of `make test` takes less than twelve minutes once it is built. The guests that follow moves have another
/// kernel at each of their three turns, and so have those of which one has moved and one booted so.
const PARTS: [&[&str]; TURNS] = [
    &[FOLLOW],
    &["lab: slice::a_policy_takes_vcpus_to_their_memory", "bench: short form of fleet"],
    &[DRIVER, "bench: short form of dsm"],
    &["lab: slice::programs_follow_by_their_libraries", "bench: short form of lab"],
    &["lab: slice::vms_are_where_they_were_placed", "lab/runner:command_line"],
    &["lab/runner:guests", "bench: short form of decide", "bench: short form of scheduler"],
    &["lab: slice::displaced_memory_comes_home"],
    &[FOLLOW],
    &["lab: slice::a_host_that_grows_and_shrinks_is_followed"],
    &["lab: slice::a_guest_node_gets_another_home"],
    &["lab: slice::guests_outlive_a_vnumad_that_is_killed"],
    &["lab: slice::guests_survive_the_end_of_others", "bench: short form of daemon"],
    &["lab: dsm::a_guest_of_kvm_spans_the_nodes_of_a_dsm"],
    &["lab: slice::vms_know_where_their_devices_are"],
    &[FOLLOW],
    &[BOOTED, "bench: short form of migrate"],
    &[DRIVER],
    &[BOOTED, "bench: short form of vprobe"],
    &["bench: short form of memory"],
    &[BOOTED, "bench: short form of topology"],
    &["bench: short form of nuioa", "bench: short form of runtimes"],
];
const FOLLOW: &str = "lab: slice::guests_follow_every_move_and_are_shown_as_they_are";
const BOOTED: &str = "lab: slice::a_guest_that_moved_knows_what_one_that_booted_so_knows";
const DRIVER: &str = "lab: slice::the_driver_and_the_observer_do_what_they_must";

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

    /// Whether `make test` runs a job at this turn.
    pub fn plays(self, job: &str) -> bool {
        let parts: Vec<usize> = (0..TURNS).filter(|part| PARTS[*part].contains(&job)).collect();
        parts.is_empty() || parts.contains(&self.of(TURNS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{SMOKE_HERE, SMOKE_IN_LAB};
    use crate::steps::workspace;
    use std::collections::BTreeSet;

    #[test]
    fn each_job_has_its_turn() {
        for job in PARTS.into_iter().flatten() {
            let turns = (0..TURNS as u32).filter(|turn| Turn(*turn).plays(job)).count();
            assert_eq!(turns, PARTS.iter().filter(|part| part.contains(job)).count(), "{job}");
        }
        assert!((0..TURNS as u32).all(|turn| Turn(turn).plays("another one")));
        for job in [FOLLOW, BOOTED] {
            let turns = (0..TURNS as u32).map(Turn).filter(|turn| turn.plays(job));
            let kernels: BTreeSet<_> = turns.map(|turn| turn.of(3)).collect();
            assert_eq!(kernels, BTreeSet::from([0, 1, 2]), "{job}");
        }
    }

    #[test]
    fn a_commit_has_one_turn() {
        assert_eq!(Turn::of_commit("c83addc0ffee\n"), Turn(0xc83_addc));
        assert_eq!(Turn::of_commit(""), Turn(0));
        assert_eq!((Turn(7).of(3), Turn(7).of(5), Turn(7).of(0)), (1, 2, 0));
    }

    #[test]
    fn each_short_form_of_a_benchmark_has_its_turn() {
        for name in SMOKE_HERE.into_iter().chain(SMOKE_IN_LAB) {
            let job = format!("bench: short form of {name}");
            assert!(PARTS.iter().any(|part| part.contains(&job.as_str())), "{job}");
        }
    }

    /// One that is renamed would run at each turn, one that is ignored at none.
    #[test]
    fn jobs_with_turns_are_there_and_not_ignored() {
        for job in PARTS.into_iter().flatten() {
            if let Some(name) = job.strip_prefix("bench: short form of ") {
                assert!(SMOKE_HERE.contains(&name) || SMOKE_IN_LAB.contains(&name), "{job}");
                continue;
            }
            let (file, function) = match job.strip_prefix("lab: ").and_then(|name| name.split_once("::")) {
                Some((file, name)) => {
                    (format!("tests/lab/tests/lab/{file}.rs"), format!("#[test]\nfn {name}()"))
                }
                None => (format!("{}.rs", job.replace(':', "/tests/")), "#[test]\nfn ".to_owned()),
            };
            let text = std::fs::read_to_string(workspace().join(&file)).unwrap();
            assert!(text.contains(&function), "{job}: {file}");
        }
    }
}
