//! How the vCPUs of a VM are scheduled.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use vnuma_model::CpuSet;

/// Body of a request for another policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyRequest {
    /// Its name.
    pub policy: String,
}

/// How the vCPUs of a VM are scheduled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Scheduling {
    /// The VM.
    pub vm: String,
    /// Its policy.
    pub policy: String,
    /// vCPUs in rising order of APIC id. One that no period has shown yet has no figures.
    pub vcpus: Vec<VcpuScheduling>,
    /// Its threads that run no vCPU, while they follow its vCPUs.
    #[serde(default)]
    pub others: Option<OtherThreads>,
    /// Its memory, if a policy has moved some of it.
    #[serde(default)]
    pub memory: Option<MemoryMoves>,
    /// What of its memory is on other host nodes than the homes of its guest nodes, bytes, if that is known.
    #[serde(default)]
    pub displaced_bytes: Option<u64>,
}

/// Memory of a VM that policies have moved to its vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemoryMoves {
    /// Moves that have ended.
    pub moves: u64,
    /// Bytes that these have moved.
    pub bytes: u64,
    /// The last one, or the one that is under way.
    pub last: MemoryStep,
}

/// Stands for a policy where memory goes to the new home of its guest node.
pub const REHOME: &str = "rehome";

/// Memory of a VM that a policy moves from one node to another.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct MemoryStep {
    /// When it began or, if it has ended, ended: `CLOCK_MONOTONIC` of the host, nanoseconds.
    pub time_ns: u64,
    /// The policy, or [`REHOME`](crate::REHOME).
    pub policy: String,
    /// What made it act.
    pub cause: String,
    /// Node that the memory leaves.
    pub from: u32,
    /// Node that it goes to.
    pub to: u32,
    /// How much is to be moved, at most, bytes.
    pub bytes: u64,
    /// It has ended.
    pub ended: bool,
    /// How much was moved so far, bytes.
    pub moved_bytes: u64,
    /// Pages that were pinned (VFIO, direct I/O), and that stayed.
    pub busy_pages: u64,
    /// Pages that other processes have mapped as well, and that stayed.
    pub shared_pages: u64,
    /// Pages that stayed for another reason.
    pub failed_pages: u64,
    /// Why it ended early.
    pub problem: Option<String>,
    /// Guest node whose memory comes home, or gets another one; none if memory goes to its vCPUs.
    pub guest_node: Option<u32>,
    /// What of the VM was displaced and could be moved before, bytes, if it comes home.
    pub displaced_bytes: Option<u64>,
    /// The longest that pages were held while they moved, microseconds: a vCPU that touched one waited for as long.
    pub longest_hold_us: u64,
    /// Share of the VM's memory accesses that left the nodes of its vCPUs before, 0 to 1.
    pub remote_share: f64,
    /// The share that is expected if all of it is moved.
    pub expected_remote_share: f64,
    /// CPU time that the move is taken to cost, milliseconds.
    pub price_ms: f64,
    /// Time that the vCPUs are expected to save in a second, milliseconds.
    pub saving_ms_per_s: f64,
    /// Accesses are assumed, as nothing is counted on this host.
    pub assumed: bool,
    /// How hot it is was watched, and the hottest is moved first.
    pub hottest_first: bool,
}

impl MemoryStep {
    /// For people: what is done and why, with the figures before and those that are expected.
    pub fn text(&self) -> String {
        let Self { from, to, .. } = self;
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        if self.ended {
            let mut text = format!(
                "{} of {} were moved from node {from} to {to}",
                mib(self.moved_bytes),
                mib(self.bytes)
            );
            for (pages, what) in [
                (self.busy_pages, "were held"),
                (self.shared_pages, "are shared with other processes"),
                (self.failed_pages, "could not be moved"),
            ] {
                if pages > 0 {
                    text += &format!("; {pages} pages {what}");
                }
            }
            if self.longest_hold_us > 0 {
                text += &format!("; held for {} us at most", self.longest_hold_us);
            }
            if let Some(problem) = &self.problem {
                text += &format!("; {problem}");
            }
            return text;
        }
        if let Some(guest_node) = self.guest_node {
            if self.policy == REHOME {
                let (mib, cause) = (mib(self.bytes), &self.cause);
                return format!("guest node {guest_node}: {mib} go from node {from} to {to}: {cause}");
            }
            return self.home_text(guest_node);
        }
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let (before, after) = (percent(self.remote_share), percent(self.expected_remote_share));
        let (price, saving) = (self.price_ms, self.saving_ms_per_s);
        let assumed = if self.assumed { "; accesses are assumed" } else { "" };
        format!(
            "{} go from node {from} to {to}, by {}: {}; remote share {before}, {after} expected; \
             {price} ms of work, {saving} ms a second saved{assumed}",
            mib(self.bytes),
            self.policy,
            self.cause
        )
    }

    fn home_text(&self, guest_node: u32) -> String {
        let Self { from, to, policy, cause, price_ms, saving_ms_per_s, .. } = self;
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let (most, displaced) = (mib(self.bytes), mib(self.displaced_bytes.unwrap_or(0)));
        let assumed = if self.assumed { "; accesses are assumed" } else { "" };
        let order = if self.hottest_first { ", hottest first" } else { "" };
        format!(
            "guest node {guest_node}: up to {most} come home from node {from} to {to}, by {policy}: {cause}{order}; {displaced} displaced; \
             {price_ms} ms of work, {saving_ms_per_s} ms a second saved{assumed}"
        )
    }
}

/// Threads of a VM that run no vCPU: main loop, I/O threads, workers, vhost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OtherThreads {
    /// How many are kept to the CPUs.
    pub threads: usize,
    /// CPUs of the nodes that policies have confined vCPUs to. Each thread is kept to those of them that its operator allows.
    /// None: the threads have their operators' masks.
    pub cpus: Option<CpuSet>,
    /// Why some of them do not follow.
    pub problem: Option<String>,
}

/// How a vCPU is scheduled, and what the last period showed of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VcpuScheduling {
    /// APIC id.
    pub vcpu: u32,
    /// Node that it is on.
    pub node: Option<u32>,
    /// Whether its policy may move it: `free`, `unmanaged`, `pinned`, `isolated`, `real-time`.
    pub standing: Option<String>,
    /// Where the figures come from: `counted`, `did-not-run`, `crowded` (others had the counters), `lost`, `assumed` (there are
    /// no counters, and the place of the VM's pages stands in for them).
    pub quality: Option<String>,
    /// Per mille of its time on a CPU in which the counters were its own. Below 1000 the figures are scaled up.
    pub counted_permille: Option<u32>,
    /// References to the last-level cache in a thousand instructions.
    pub pressure: Option<f64>,
    /// `LLC-T`, `LLC-FI` or `LLC-FR`.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Node that most of its memory accesses go to.
    pub affinity: Option<u32>,
    /// Share of its memory accesses that leave its node, 0 to 1.
    pub remote_share: Option<f64>,
    /// Share of the period on a CPU, 0 to 1.
    pub ran_share: Option<f64>,
    /// Share of the period in which it waited for a CPU, 0 to 1.
    pub wait_share: Option<f64>,
    /// Share of the period in which it had no quota (`cpu.max`), 0 to 1.
    #[serde(default)]
    pub throttled_share: Option<f64>,
    /// Share of the period for which it is entitled to a CPU, of what it wanted, 0 to 1.
    #[serde(default)]
    pub entitled_share: Option<f64>,
    /// `cpu.weight` of its control group.
    #[serde(default)]
    pub weight: Option<u32>,
    /// CPUs that its operator lets it run on.
    pub operator_cpus: Option<CpuSet>,
    /// Of these, the CPUs that its policy has confined it to; none if it may run on all of them.
    pub policy_cpus: Option<CpuSet>,
    /// How that is set: [`PlaceSetting::AFFINITY`](crate::PlaceSetting::AFFINITY) or
    /// [`PlaceSetting::SCHEDULER`](crate::PlaceSetting::SCHEDULER); none if it is not confined.
    #[serde(default)]
    pub set_by: Option<String>,
    /// Steps that policies have made.
    pub moves: u64,
    /// The last one.
    pub last: Option<PolicyStep>,
}

/// A step of a policy: a vCPU was confined to CPUs, or got its operator's mask again.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PolicyStep {
    /// When, `CLOCK_MONOTONIC` of the host, nanoseconds.
    pub time_ns: u64,
    /// The policy.
    pub policy: String,
    /// What made it act.
    pub cause: String,
    /// Node that it was on.
    pub from: Option<u32>,
    /// Node that it is on from now on; none if it has its operator's mask again.
    pub to: Option<u32>,
    /// CPUs that it is confined to; none if it has its operator's mask again.
    pub cpus: Option<CpuSet>,
    /// References to the last-level cache in a thousand instructions, before; none where nothing is counted.
    pub pressure: Option<f64>,
    /// Share of its memory accesses that left its node before, 0 to 1.
    pub remote_share: Option<f64>,
    /// The share that is expected where it goes.
    pub expected_remote_share: Option<f64>,
    /// The other VM that is the reason.
    pub caused_by: Option<String>,
}

impl PolicyStep {
    /// For people: what was done and why, with the figures before and those that are expected.
    pub fn text(&self, vcpu: u32) -> String {
        let on = |node: Option<u32>| node.map_or_else(String::new, |node| format!(" on node {node}"));
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let mut text = match &self.cpus {
            Some(cpus) => {
                let node = self.to.map_or_else(String::new, |node| format!(" of node {node}"));
                format!("vCPU {vcpu} is confined to CPUs {cpus}{node}")
            }
            None => format!("vCPU {vcpu} has its operator's CPUs again"),
        };
        text += &format!(", by {}: {}", self.policy, self.cause);
        if let Some(vm) = &self.caused_by {
            text += &format!(" (because of {vm})");
        }
        if let Some(pressure) = self.pressure {
            text += &format!("; pressure {pressure:.1}");
        }
        if let Some(before) = self.remote_share {
            text += &format!("; remote share {}{}", percent(before), on(self.from));
        }
        if let Some(after) = self.expected_remote_share {
            text += &format!(", {} expected{}", percent(after), on(self.to));
        }
        text
    }
}

/// Where the counts of vCPUs come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Counters {
    /// `per-node`, `local-remote`, `generic`, `page-location` or `none`, best first.
    pub source: String,
    /// Sources that would be better, each with why it is not used.
    pub passed_over: Vec<String>,
    /// Of these, the names of those that could be opened, and counted nothing.
    #[serde(default)]
    pub given_up: Vec<String>,
    /// Threads that are counted now; none while no VM has a policy.
    pub threads: usize,
    /// Threads whose counters cannot be opened or read, and one reason.
    pub failed: usize,
    /// The reason.
    pub why_failed: Option<String>,
    /// Threads whose counters did not count all of the time, as others use the PMU too.
    #[serde(default)]
    pub shared: usize,
    /// Of these, the least time that one was counted, per mille of its time on a CPU.
    #[serde(default)]
    pub least_permille: Option<u32>,
    /// Memory accesses are sampled.
    #[serde(default)]
    pub samples: bool,
    /// The operator wants them sampled, and they cannot be: why.
    #[serde(default)]
    pub why_no_samples: Option<String>,
    /// How times, CPUs and masks of threads are read: `bpf` or `files`. Empty while no VM has a policy.
    #[serde(default)]
    pub read_by: String,
    /// Why it is files; with `bpf`, why it is a file for how long CPUs are idle.
    #[serde(default)]
    pub why_files: Option<String>,
    /// How long CPUs are idle cannot be read: why.
    pub why_no_idle_times: Option<String>,
    /// Weights or limits of control groups cannot be read: why.
    #[serde(default)]
    pub why_no_groups: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_says_why_with_the_figures() {
        let cpus: CpuSet = "4-7".parse().expect("a list");
        let step = PolicyStep {
            time_ns: 1,
            policy: "vprobe".into(),
            cause: "its memory is there".into(),
            from: Some(0),
            to: Some(1),
            cpus: Some(cpus),
            pressure: Some(12.34),
            remote_share: Some(0.954),
            expected_remote_share: Some(0.046),
            caused_by: None,
        };
        assert_eq!(
            step.text(3),
            "vCPU 3 is confined to CPUs 4-7 of node 1, by vprobe: its memory is there; pressure 12.3; \
             remote share 95 % on node 0, 5 % expected on node 1"
        );
        let back = PolicyStep {
            policy: "vprobe".into(),
            cause: "its policy does not apply any more".into(),
            from: Some(1),
            ..PolicyStep::default()
        };
        assert_eq!(
            back.text(3),
            "vCPU 3 has its operator's CPUs again, by vprobe: its policy does not apply any more"
        );
        let other = PolicyStep { caused_by: Some("db".into()), ..step };
        assert!(other.text(3).contains("there (because of db); pressure"), "{}", other.text(3));
    }
}
