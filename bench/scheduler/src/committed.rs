//! What is compared, fixed before the first figure was seen: schedulers, loads, windows, runs, goals.

use crate::code::Kind;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

/// CPUs of the server (lab/profiles/2n8c.toml), and of the one with room for many more when it has booted.
pub const CPUS: usize = 8;
/// Runs of each load, each with all schedulers. Goals are judged by the intervals of so many.
pub const RUNS: usize = 5;

/// Who schedules.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    ValueEnum,
    IntoStaticStr,
    VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Scheduler {
    /// The kernel's own
    Eevdf,
    /// scx_vnuma in partial mode
    Partial,
    /// scx_vnuma in full mode
    Full,
    /// The kernel's own once more: what differs from the first time is chance
    EevdfAgain,
    /// Of scx
    ScxRusty,
    /// Of scx
    ScxBpfland,
    /// Of scx
    ScxLavd,
    /// Of scx, with its example of layers
    ScxLayered,
}

impl Scheduler {
    /// Those that every form has.
    pub const REDUCED: [Self; 4] = [Self::Eevdf, Self::Partial, Self::Full, Self::EevdfAgain];
    /// Both modes of scx_vnuma, which goals are for.
    pub const JUDGED: [Self; 2] = [Self::Partial, Self::Full];

    /// As rows have it.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The program of one of scx.
    pub fn program(self) -> Option<String> {
        self.name().starts_with("scx-").then(|| self.name().replace('-', "_"))
    }
}

/// What is to be scheduled.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    ValueEnum,
    IntoStaticStr,
    VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Load {
    /// Two guests of 8 vCPUs that each want one lock
    Lock,
    /// One vCPU that never sleeps, beside an idle CPU
    Loop,
    /// Groups of weights 1 to 10,000
    Weights,
    /// Groups with quotas, beside one without
    Quotas,
    /// 64 guests that wake up often
    Wakes,
    /// A compiler, eight times at once
    Build,
}

/// Guests in one control group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guests {
    /// What they do.
    pub kind: Kind,
    /// How many, and vCPUs of each.
    pub vms: usize,
    /// See there.
    pub vcpus: usize,
    /// `cpu.weight` of the group.
    pub weight: u32,
    /// CPUs that its `cpu.max` is worth.
    pub quota: Option<f64>,
}

const fn guests(kind: Kind, vms: usize, vcpus: usize) -> Guests {
    Guests { kind, vms, vcpus, weight: 100, quota: None }
}

const LOCK: [Guests; 2] = [guests(Kind::Lock, 1, 8); 2];
const LOOP: [Guests; 1] = [guests(Kind::Loop, 1, 1)];
const WEIGHTS: [Guests; 4] = [
    Guests { weight: 10_000, ..guests(Kind::Loop, 1, 2) },
    Guests { weight: 300, ..guests(Kind::Loop, 1, 8) },
    Guests { weight: 100, ..guests(Kind::Loop, 1, 8) },
    Guests { weight: 1, ..guests(Kind::Loop, 1, 4) },
];
const QUOTAS: [Guests; 3] = [
    Guests { quota: Some(0.2), ..guests(Kind::Loop, 1, 2) },
    Guests { quota: Some(1.5), ..guests(Kind::Loop, 1, 4) },
    guests(Kind::Loop, 1, 8),
];
const WAKES: [Guests; 1] = [guests(Kind::Wake, 64, 1)];
/// Guests of the cost of an event: queues that are never empty, and wake-ups.
pub const COST: [Guests; 2] = [guests(Kind::Wake, 16, 1), guests(Kind::Loop, 1, 4)];
/// CPUs that they share, one of each node. On busy CPUs, of which a machine with two has not as many, programs are stopped while they run.
pub const COST_CPUS: &str = "2,6";
/// Control groups from the root to these guests.
pub const DEPTH: usize = 5;

impl Load {
    /// All of them, in the order in which they are measured and shown.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// As rows have it.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Its guests, by groups.
    pub fn groups(self) -> &'static [Guests] {
        match self {
            Self::Lock => &LOCK,
            Self::Loop => &LOOP,
            Self::Weights => &WEIGHTS,
            Self::Quotas => &QUOTAS,
            Self::Wakes => &WAKES,
            Self::Build => &[],
        }
    }

    /// The CPUs that it may use, if not all: one beside an idle one.
    pub fn allowed(self) -> Option<&'static str> {
        (self == Self::Loop).then_some("2-3")
    }

    /// CPUs whose time its groups share; none if its threads sleep, so that nothing can be said of what they are entitled to.
    pub fn shares(self) -> Option<usize> {
        match self {
            Self::Loop => Some(1),
            Self::Weights | Self::Quotas => Some(CPUS),
            Self::Lock | Self::Wakes | Self::Build => None,
        }
    }

    /// Seconds in which a scheduler settles, and in which it is measured. Shares are those of all runs, a minute together.
    pub fn window_s(self) -> (f64, f64) {
        match self {
            Self::Lock => (1.0, 5.0),
            Self::Loop => (0.5, 4.0),
            Self::Weights | Self::Quotas => (1.0, 12.0),
            Self::Wakes => (1.0, 6.0),
            // It lasts as long as it lasts.
            Self::Build => (0.0, 0.0),
        }
    }

    /// VMs and vCPUs.
    pub fn size(self) -> (usize, usize) {
        let groups = self.groups();
        let vms = groups.iter().map(|guests| guests.vms).sum();
        (vms, groups.iter().map(|guests| guests.vms * guests.vcpus).sum())
    }
}

/// Rounds of loops in guests: of the critical section, of what is between two, and of spinning before a vCPU sleeps.
pub fn rounds(kind: Kind) -> [u32; 3] {
    match kind {
        // A handover takes an emulated CPU as long as tens of thousands of rounds. With fewer between two critical sections all vCPUs but one
        // sleep, and there is nothing to be scheduled.
        Kind::Lock => [10_000, 200_000, 200],
        Kind::Loop => [1, 20_000, 1],
        Kind::Wake => [1, 20_000, 1],
    }
}

/// How long a vCPU sleeps whose guest wakes up often, us.
pub const SLEEP_US: u64 = 50_000;
/// The same of the cost of an event.
pub const COST_SLEEP_US: u64 = 5000;
/// Windows in which the cost of an event is measured, and their length, s.
pub const COST_WINDOWS: usize = 5;
/// See there.
pub const COST_WINDOW_S: f64 = 4.0;

/// Files of the build, and compilers at once.
pub const FILES: usize = 16;
/// See there.
pub const COMPILERS: usize = 8;
/// What each of them has. Four times as many functions made the reduced form take longer than half an hour.
pub const SOURCE: &str = "\
#define F(n) long f##n(long *a, long b) { long s = b; \\
    for (long i = 0; i < 64; i++) { s += a[i] * n; if (s & i) s ^= a[(s + i) & 63]; else a[i] = s >> 3; } return s; }
#define G(n) F(n##0) F(n##1) F(n##2) F(n##3) F(n##4) F(n##5) F(n##6) F(n##7)
G(1) G(2)
";

/// What is wanted of both modes.
pub mod goals {
    /// Operations, by those under EEVDF: nowhere less than this.
    pub const OPS: f64 = 0.98;
    /// Those of guests with locks.
    pub const LOCK_OPS: f64 = 1.0;
    /// The 99th percentile of wake-ups, by that under EEVDF.
    pub const WAKE: f64 = 1.1;
    /// A group's part of all CPU time is so close to what it is entitled to, or as close as under EEVDF.
    pub const SHARE: f64 = 0.01;
    /// A lone busy vCPU lacks at most this part of the time of its CPU.
    pub const ALONE: f64 = 0.02;
    /// What an event costs with room for 256 CPUs, by what it costs with 8.
    pub const COST: f64 = 1.2;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_those_of_the_issue() {
        let sizes: Vec<_> = Load::ALL.iter().map(|load| (load.name(), load.size())).collect();
        assert_eq!(sizes[..2], [("lock", (2, 16)), ("loop", (1, 1))]);
        assert_eq!(sizes[4..], [("wakes", (64, 64)), ("build", (0, 0))]);
        let weights = Load::Weights.groups().iter().map(|guests| guests.weight);
        assert!(weights.clone().min() == Some(1) && weights.max() == Some(10_000));
        for load in Load::ALL.iter().filter(|load| load.groups().len() > 1 && load.shares().is_some()) {
            assert_eq!(load.window_s().1 * RUNS as f64, 60.0, "{load:?}");
        }
    }

    #[test]
    fn schedulers_of_scx_have_programs() {
        let programs: Vec<_> = Scheduler::VARIANTS.iter().filter_map(|one| one.program()).collect();
        assert_eq!(programs, ["scx_rusty", "scx_bpfland", "scx_lavd", "scx_layered"]);
        assert!(Scheduler::REDUCED.iter().all(|one| one.program().is_none()));
    }
}
