//! Things that can be done in several ways, of which one is in use.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A way that would be better than the one in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PassedOver {
    /// Its name.
    pub way: String,
    /// Why it is not used.
    pub why: String,
}

impl PassedOver {
    /// This way, for this reason.
    pub fn new(way: &str, why: impl Into<String>) -> Self {
        Self { way: way.to_owned(), why: why.into() }
    }
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.way, self.why)
    }
}

/// Something that can be done in several ways.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Capability {
    /// What is done, `locations` for example.
    pub name: String,
    /// The way in use, or `none`.
    pub in_use: String,
    /// Better ways, best first. The one in use is among them if something keeps it from serving all that it should.
    pub passed_over: Vec<PassedOver>,
    /// Since when that way is in use: `CLOCK_MONOTONIC` of the host, nanoseconds.
    pub since_ns: u64,
}

impl Capability {
    /// How the node is learned that a vCPU runs on: `bpf`, `poll`.
    pub const LOCATIONS: &str = "locations";
    /// How a change of a thread's allowed CPUs is learned: `event`, `resync`.
    pub const AFFINITY: &str = "affinity";
    /// What counts the memory accesses of vCPUs: `per-node`, `local-remote`, `generic`, `page-location`.
    pub const COUNTERS: &str = "counters";
    /// How times, CPUs and masks of threads are read for policies: `bpf`, `files`. Only while they are read.
    pub const READINGS: &str = "readings";
    /// How it is read for policies how long CPUs are idle: `bpf`, `files`. Only while it is read.
    pub const IDLE_TIMES: &str = "idle-times";
    /// Which weights and limits of control groups policies know: `cgroups`, `defaults`. Only while they are read.
    pub const GROUPS: &str = "groups";
    /// What samples memory accesses: `ibs`. Only if the operator wants that.
    pub const SAMPLES: &str = "samples";
    /// What takes vCPUs to the CPUs that a policy chose: `sched_ext`, `affinity`.
    pub const PLACES: &str = "places";
    /// How processes of VMs are looked at: `bpf`, `files`. From the first VM on.
    pub const PROCESSES: &str = "processes";
    /// What watches how hot memory is: `damon`. From the first watch on.
    pub const HOTNESS: &str = "hotness";
    /// What times how long pages are held while they move: `bpf`; `calls`, which take longer than that. From the first move on.
    pub const PAGE_HOLDS: &str = "page-holds";

    /// `name` is done in this way, and not in these.
    pub fn new(name: &str, in_use: &str, passed_over: impl IntoIterator<Item = PassedOver>) -> Self {
        let passed_over = passed_over.into_iter().collect();
        Self { name: name.to_owned(), in_use: in_use.to_owned(), passed_over, since_ns: 0 }
    }

    /// The first of these ways if it works, and otherwise the second one.
    pub fn either<E: ToString>(name: &str, [best, other]: [&str; 2], problem: Option<E>) -> Self {
        let in_use = if problem.is_none() { best } else { other };
        Self::new(name, in_use, problem.map(|why| PassedOver::new(best, why.to_string())))
    }

    /// Why a way is not used, or not for all.
    pub fn why_not(&self, way: &str) -> Option<&str> {
        self.passed_over.iter().find(|passed| passed.way == way).map(|passed| passed.why.as_str())
    }

    /// Why no better way is used, of all of these; none if there is none.
    pub fn why(&self) -> Option<String> {
        let all: Vec<_> = self.passed_over.iter().map(PassedOver::to_string).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_ways_the_better_one_is_used_if_it_works() {
        let of = |problem: Option<&str>| Capability::either(Capability::LOCATIONS, ["bpf", "poll"], problem);
        assert_eq!(of(None), Capability::new("locations", "bpf", []));
        let poll = of(Some("no BTF"));
        assert_eq!(
            (poll.in_use.as_str(), poll.why_not("bpf"), poll.why_not("poll")),
            ("poll", Some("no BTF"), None)
        );
        assert_eq!((poll.why().as_deref(), of(None).why()), (Some("bpf: no BTF"), None));
    }

    #[test]
    fn all_that_is_passed_over_is_named_best_first() {
        let passed = ["per-node", "local-remote"].map(|way| PassedOver::new(way, "no such events"));
        let counters = Capability::new(Capability::COUNTERS, "generic", passed);
        assert_eq!(counters.why().as_deref(), Some("per-node: no such events; local-remote: no such events"));
    }
}
