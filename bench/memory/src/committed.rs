//! What is compared, fixed before the first figure was seen: the VM, causes, policies, periods, goals.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

/// Memory of the VM, half of it on each guest node. The paper's VM has 16 GB, and 3 % of it is what `amount` waits for here as there.
pub const MEMORY_MIB: u64 = 1024;
/// Guest nodes; each is at home on the server's node of the same number.
pub const NODES: usize = 2;
/// CPU of each vCPU at home (lab/profiles/2n8c.toml).
pub const AT_HOME: [u32; NODES] = [1, 5];
/// CPU of the other node, to which vCPU 0 goes.
pub const AWAY: u32 = 6;
/// CPUs of QEMU's other threads: at home with guest node 0, and away.
pub const OTHERS_AT_HOME: u32 = 2;
/// The same, away.
pub const OTHERS_AWAY: u32 = 6;
/// CPUs of the benchmark, of vnumad and of numad.
pub const HOST_CPUS: &[u32] = &[3, 7];
/// Classes of distance that the server has, the node itself included.
pub const CLASSES: u64 = 2;

/// Memory that STREAM maps anew in each run, on guest node 0: so much of that node's that some of it was displaced by the load.
pub const STREAM_MIB: usize = 320;
/// Passes of a run; its figure is their median.
pub const PASSES: usize = 3;
/// What the I/O load takes anew in each period, on guest node 0.
pub const CHUNK_MIB: usize = 12;
/// Periods of the I/O load: the 12 of 15 minutes in figure 7 of the paper.
pub const PERIODS: usize = 12;
/// What a period stands for, seconds: the paper's `period_flip`.
pub const PAPER_PERIOD_S: f64 = 900.0;
/// Its length in modelled time, seconds.
pub const PERIOD_S: f64 = 0.25;

/// How long a period is whose work took so long, seconds of the server; `period_s` at least. On a real host the work is a small part of
/// a period. Here it may be most of one, and what it has displaced last would be counted before any policy could have seen it.
pub fn length_s(period_s: f64, worked_s: f64) -> f64 {
    period_s.max(2.0 * worked_s)
}
/// The shortest and the longest that is taken on the server for work that is short, seconds ([`length_s`]).
pub const PERIODS_S: (f64, f64) = (3.0, 8.0);

/// What a guest node has that was never changed, or was grown, and what it grows and shrinks by, MiB.
pub const WHOLE_MIB: u64 = 512;
/// See there.
pub const PART_MIB: u64 = 256;
/// What STREAM takes after that on guest node 0: more than it has before it grows, and less than it has then.
pub const SIZED_STREAM_MIB: usize = 288;

/// By what a guest node gets another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Means {
    /// It had it from the beginning
    NeverChanged,
    /// A balloon, which knows no nodes
    Balloon,
    /// virtio-mem, by vnumad
    VirtioMem,
}

impl Means {
    /// All of them, in the order in which they are measured and shown.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// As rows have it.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// What happens to a guest node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum SizeCause {
    /// Guest node 0 grows
    Grow,
    /// Guest node 1 shrinks
    Shrink,
}

impl SizeCause {
    /// Both, in the order in which they are measured and shown.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// As rows have it.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// By what the guest's memory gets displaced.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum, IntoStaticStr,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Cause {
    /// A vCPU touches memory for the first time while it runs on the other node
    FirstTouch,
    /// A balloon gives most of the guest's free memory back to the host, which is then touched again on the other node
    Balloon,
    /// Free page reporting gives memory back to the host, and QEMU's threads that read a disk take it again on the other node
    Reporting,
    /// KSM has merged pages, which are written while the vCPU runs on the other node
    Ksm,
}

impl Cause {
    /// All of them, in the order in which they are measured and shown.
    pub const ALL: [Self; 4] = [Self::Balloon, Self::Reporting, Self::Ksm, Self::FirstTouch];

    /// As rows have it.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Who brings displaced memory home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Policy {
    /// Nobody; vnumad runs
    None,
    /// vnumad, every period
    Periodic,
    /// vnumad, when 3 % of the VM are displaced
    Amount,
    /// vnumad, whichever of both comes first
    Both,
    /// vnumad, when it pays
    Adaptive,
    /// The server's AutoNUMA
    AutonumaHost,
    /// Debian's numad
    Numad,
    /// migratepages(8) once a period, from the other node to that of guest node 0
    Migratepages,
    /// The server's DAMON, with a scheme for each guest node
    Damon,
}

impl Policy {
    /// All of them, in the order in which they are measured and shown.
    pub const ALL: &[Self] = Self::VARIANTS;
    /// Those that the reduced form has for every cause.
    pub const REDUCED: [Self; 2] = [Self::None, Self::Adaptive];
    /// The cause for which it has more, and which.
    pub const MORE: (Cause, [Self; 4]) =
        (Cause::FirstTouch, [Self::Both, Self::AutonumaHost, Self::Numad, Self::Migratepages]);

    /// As rows have it.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Is it a memory policy of vnumad?
    pub fn is_of_vnumad(self) -> bool {
        matches!(self, Self::None | Self::Periodic | Self::Amount | Self::Both | Self::Adaptive)
    }
}

/// The cells of a form, in the order in which they are measured.
pub fn cells(full: bool) -> impl Iterator<Item = (Cause, Policy)> {
    let wanted = move |(cause, policy): &(Cause, Policy)| {
        let (one, more) = Policy::MORE;
        full || Policy::REDUCED.contains(policy) || (*cause == one && more.contains(policy))
    };
    let of = |cause| Policy::ALL.iter().map(move |policy| (cause, *policy));
    Cause::ALL.into_iter().flat_map(of).filter(wanted)
}

/// Goals of the issue.
pub mod goals {
    /// Under `none` at least this share is displaced in the end, else the cause is no cause.
    pub const DISPLACES: f64 = 0.10;
    /// Under `adaptive` at most this share is.
    pub const DISPLACED: f64 = 0.01;
    /// The second run takes at most so much more than the first.
    pub const SECOND_RUN: f64 = 0.01;
    /// The I/O load takes at most so much more than under `none`.
    pub const IO: f64 = 0.01;
    /// After a change by virtio-mem STREAM takes at most so much more or less than in a VM that was never changed.
    pub const SIZED: f64 = 0.02;
    /// `adaptive` moves at most so much more of what is displaced than `both`: what is displaced is a sample, whose error this is.
    pub const MOVES: f64 = 0.05;
    /// vnumad takes at most this share of a CPU.
    pub const OVERHEAD: f64 = 0.005;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reduced_form_has_four_causes_and_what_goals_compare_on_one() {
        let reduced: Vec<_> = cells(false).collect();
        let (one, more) = Policy::MORE;
        assert_eq!(reduced.len(), Cause::ALL.len() * Policy::REDUCED.len() + more.len());
        assert!(Cause::ALL.iter().all(|cause| reduced.contains(&(*cause, Policy::None))));
        assert!(more.iter().all(|policy| reduced.contains(&(one, *policy))));
        assert_eq!(cells(true).count(), Cause::ALL.len() * Policy::ALL.len());
    }

    #[test]
    fn what_the_guest_takes_fits_on_its_node() {
        let load = CHUNK_MIB * PERIODS;
        let node = MEMORY_MIB as usize / NODES;
        assert!(load <= node - 128 && STREAM_MIB <= node - 128, "a kernel takes the rest");
        assert!(STREAM_MIB + load > node - 100, "STREAM finds what the load leaves");
        let sized = SIZED_STREAM_MIB as u64;
        assert!(
            sized > WHOLE_MIB - PART_MIB && sized <= WHOLE_MIB - 128,
            "it fits when it has grown, and not before"
        );
        assert!(load as f64 >= MEMORY_MIB as f64 * goals::DISPLACES, "the load displaces enough");
    }
}
