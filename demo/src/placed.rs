//! After the moves: the unattached VM gets a policy, which moves its vCPUs to the memory that the guest uses.

use crate::checker::Sample;
use crate::locations::{Locations, tsc};
use crate::record::Kind;
use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::time::{Duration, Instant};
use vnuma_scenario::{Nodes, Vm, vnumactl};

/// The policy.
pub const POLICY: &str = "vprobe";
/// How long it may take until all vCPUs have a place, seconds. On a quiet lab server it takes one or two.
pub const LIMIT_S: u64 = 40;
/// How long the VM goes on then.
pub const THEN: Duration = Duration::from_millis(1500);

/// The policy has been set.
pub struct Placed {
    /// When.
    pub tsc: u64,
    since: Instant,
    /// When all vCPUs had a place, by both clocks.
    done: Option<(Instant, u64)>,
}

/// Why an idle CPU takes a vCPU that waits for one elsewhere, in the policy's words. That may be away from its memory: the policy keeps
/// CPUs busy first, and the next period places the vCPU again.
const STOLEN: [&str; 2] = ["a CPU there was idle", "it waited too long for a CPU"];

/// Ends the pinning that the moves have left, and sets the policy.
pub fn place(vm: &Vm, nodes: &Nodes) -> Result<Placed> {
    let mut all = CpuSet::new();
    for cpu in nodes.with_cpus().flat_map(|(_, cpus)| cpus.iter()) {
        all.set(cpu as usize).with_context(|| format!("CPU {cpu}"))?;
    }
    for &thread in &vm.threads {
        sched_setaffinity(Pid::from_raw(thread), &all).with_context(|| format!("{}: affinity", vm.name))?;
    }
    let tsc = tsc();
    vnumactl(&["policy", &vm.name, "--set", POLICY])?;
    Ok(Placed { tsc, since: Instant::now(), done: None })
}

impl Placed {
    /// All vCPUs have had their place for a while, or it took too long.
    pub fn seen_enough(&mut self, vm: &Vm) -> Result<bool> {
        if self.done.is_none() && all_placed(&vcpus(vm)?) {
            self.done = Some((Instant::now(), tsc()));
        }
        Ok(self.done.is_some_and(|(done, _)| done.elapsed() >= THEN)
            || self.since.elapsed().as_secs() >= LIMIT_S)
    }
}

fn vcpus(vm: &Vm) -> Result<Vec<Value>> {
    let mut shown = vnumactl(&["policy", &vm.name])?;
    match shown["vcpus"].take() {
        Value::Array(vcpus) => Ok(vcpus),
        _ => bail!("vnumactl policy {}: no vcpus", vm.name),
    }
}

/// The policy has made a step for each vCPU, each was on the node of its memory in the last period, and was not stolen since.
fn all_placed(vcpus: &[Value]) -> bool {
    let placed = |vcpu: &Value| {
        let stolen = vcpu["last"]["cause"].as_str().is_some_and(|cause| STOLEN.contains(&cause));
        vcpu["last"]["policy"] == POLICY && vcpu["remote_share"].as_f64() == Some(0.0) && !stolen
    };
    !vcpus.is_empty() && vcpus.iter().all(placed)
}

/// Why the policy took a vCPU to another node, in its own words; none if it took none.
pub fn cause(vm: &Vm) -> Result<Option<String>> {
    let vcpus = vcpus(vm)?;
    let steps = vcpus.iter().map(|vcpu| &vcpu["last"]);
    let mut causes =
        steps.filter(|step| step["from"] != step["to"]).filter_map(|step| step["cause"].as_str());
    Ok(causes.next().map(str::to_owned))
}

/// What the policy changed for the VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BeforeAfter {
    /// The policy.
    pub policy: &'static str,
    /// When it was set, seconds after the start.
    pub seconds: f64,
    /// Share of freshly allocated pages on the node of the vCPU that touched them, before.
    pub local_share_before: f64,
    /// The same since a vCPU came to another node for the last time after which pages were seen. If all vCPUs had a place, only
    /// until one left it again.
    pub local_share_after: f64,
    /// The same of long-lived pages.
    pub resident_local_share_before: f64,
    /// And after.
    pub resident_local_share_after: f64,
    /// How long it took until then; none if no vCPU came to another node.
    pub seconds_until_placed: Option<f64>,
    /// Why the policy moved a vCPU, in its own words.
    pub cause: Option<String>,
    /// All vCPUs had a place at the same time.
    pub all_placed: bool,
    /// A vCPU left its place again before the end, so many seconds after the policy was set.
    pub seconds_until_left: Option<f64>,
}

impl BeforeAfter {
    /// Of the VM's samples, and where its threads were.
    pub fn of(
        placed: &Placed,
        threads: &[i32],
        samples: &[Sample],
        locations: &Locations,
        seconds: impl Fn(u64) -> f64,
    ) -> Result<Self> {
        let stays = threads.iter().flat_map(|&tid| locations.stays(tid));
        let mut moves: Vec<u64> = stays.map(|stay| stay.since_tsc).filter(|tsc| *tsc >= placed.tsc).collect();
        moves.sort_unstable_by_key(|tsc| std::cmp::Reverse(*tsc));
        // What an idle CPU took after all had their places is said, and does not count.
        let done = placed.done.map_or(u64::MAX, |(_, tsc)| tsc);
        let left = moves.iter().copied().rfind(|tsc| *tsc > done);
        moves.retain(|tsc| *tsc <= done);
        let moved = moves.first().copied();
        let until = left.unwrap_or(u64::MAX);
        // On a slow server a vCPU may come to its node so late that nothing is seen after that.
        let is_seen = |since: u64| {
            let in_time = |sample: &Sample| sample.before_tsc >= since && sample.after_tsc < until;
            let seen = |kind| samples.iter().any(|sample| sample.kind == kind && in_time(sample));
            seen(Kind::Fresh) && seen(Kind::Resident)
        };
        let since = moves.into_iter().find(|tsc| is_seen(*tsc)).unwrap_or(placed.tsc);
        let share = |kind: Kind, after: bool| {
            let in_time = |sample: &&Sample| match after {
                true => sample.before_tsc >= since && sample.after_tsc < until,
                false => sample.before_tsc < placed.tsc,
            };
            let of: Vec<_> = samples.iter().filter(|sample| sample.kind == kind).filter(in_time).collect();
            let when = if after { "after" } else { "before" };
            ensure!(!of.is_empty(), "no pages ({kind:?}) were seen {when} the policy had placed the vCPUs");
            Ok(of.iter().filter(|sample| sample.is_local(locations)).count() as f64 / of.len() as f64)
        };
        Ok(Self {
            policy: POLICY,
            seconds: seconds(placed.tsc),
            local_share_before: share(Kind::Fresh, false)?,
            local_share_after: share(Kind::Fresh, true)?,
            resident_local_share_before: share(Kind::Resident, false)?,
            resident_local_share_after: share(Kind::Resident, true)?,
            seconds_until_placed: moved.map(|tsc| seconds(tsc) - seconds(placed.tsc)),
            cause: None,
            all_placed: placed.done.is_some(),
            seconds_until_left: left.map(|tsc| seconds(tsc) - seconds(placed.tsc)),
        })
    }

    /// An error unless the policy has helped.
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.local_share_after > self.local_share_before,
            "{} has not helped: {:.0} % of the fresh pages were local before, {:.0} % after",
            self.policy,
            self.local_share_before * 100.0,
            self.local_share_after * 100.0
        );
        Ok(())
    }
}

impl fmt::Display for BeforeAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row =
            |name: &str, before: &str, after: &str| writeln!(f, "  {name:<44} {before:>14} {after:>14}");
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        row("the static VM, then placed by a policy", "before", self.policy)?;
        row(
            "fresh pages on the vCPU's node",
            &percent(self.local_share_before),
            &percent(self.local_share_after),
        )?;
        row(
            "long-lived pages on the vCPU's node",
            &percent(self.resident_local_share_before),
            &percent(self.resident_local_share_after),
        )?;
        let cause = self.cause.as_deref().unwrap_or("-");
        match self.seconds_until_placed {
            Some(seconds) if self.all_placed => writeln!(f, "  (placed within {seconds:.1} s: {cause})")?,
            Some(_) => {
                writeln!(f, "  (not all at their memory within {LIMIT_S} s; the first cause: {cause})")?
            }
            None => writeln!(f, "  (no vCPU came to another node)")?,
        }
        match self.seconds_until_left {
            Some(seconds) => {
                writeln!(f, "  (after {seconds:.1} s an idle CPU of another node took a vCPU that waited)")
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locations::Stay;
    use serde_json::json;

    fn sample(kind: Kind, at: u64, node: u32) -> Sample {
        Sample { kind, tid: 7, before_tsc: at, after_tsc: at + 1, node: Some(node) }
    }

    fn stays(stays: &[(u64, u32)]) -> Locations {
        let stays: Vec<_> =
            stays.iter().map(|&(since_tsc, node)| Stay { since_tsc, node: Some(node) }).collect();
        Locations::of(7, &stays)
    }

    fn fresh(pages: &[(u64, u32)]) -> Vec<Sample> {
        let fresh = pages.iter().map(|&(at, node)| sample(Kind::Fresh, at, node));
        fresh.chain([sample(Kind::Resident, 150, 0), sample(Kind::Resident, 450, 0)]).collect()
    }

    fn of(samples: &[Sample], locations: &Locations) -> Result<BeforeAfter> {
        of_done(samples, locations, None)
    }

    fn of_done(samples: &[Sample], locations: &Locations, done: Option<u64>) -> Result<BeforeAfter> {
        let done = done.map(|tsc| (Instant::now(), tsc));
        let placed = Placed { tsc: 300, since: Instant::now(), done };
        BeforeAfter::of(&placed, &[7], samples, locations, |tsc| tsc as f64 / 100.0)
    }

    #[test]
    fn before_is_until_the_policy_and_after_is_since_its_last_move() {
        let locations = stays(&[(0, 0), (100, 3), (400, 0)]);
        // At home, away (three times), with the policy but not moved, and moved.
        let samples = fresh(&[(50, 0), (150, 0), (200, 0), (250, 0), (350, 3), (450, 0), (500, 0), (550, 1)]);
        let found = of(&samples, &locations).unwrap();
        assert_eq!((found.local_share_before, found.local_share_after), (0.25, 2.0 / 3.0));
        assert_eq!((found.resident_local_share_before, found.resident_local_share_after), (0.0, 1.0));
        assert_eq!((found.seconds, found.seconds_until_placed), (3.0, Some(1.0)));
        found.check().unwrap();
        let cause = Some("its memory is there".into());
        let text = BeforeAfter { cause, all_placed: true, ..found }.to_string();
        assert!(text.contains(" 25.00 %        66.67 %\n"), "{text}");
        assert!(text.contains("placed within 1.0 s: its memory is there"), "{text}");
    }

    /// An idle CPU takes vCPUs that wait, on a busy server at any time: the policy had placed them all the same.
    #[test]
    fn a_vcpu_that_leaves_its_place_again_is_said_and_does_not_count() {
        let locations = stays(&[(0, 0), (100, 3), (400, 0), (500, 3)]);
        let samples = fresh(&[(150, 0), (350, 3), (450, 0), (460, 0), (550, 0), (600, 0), (650, 0)]);
        let found = of_done(&samples, &locations, Some(480)).unwrap();
        assert_eq!((found.local_share_after, found.resident_local_share_after), (1.0, 1.0));
        assert_eq!((found.seconds_until_placed, found.seconds_until_left), (Some(1.0), Some(2.0)));
        let text = found.to_string();
        assert!(text.contains("placed within 1.0 s") && text.contains("after 2.0 s an idle CPU"), "{text}");
        // Without a time at which all were at their memory the last move counts, whatever it was for.
        let found =
            of_done(&fresh(&[(150, 0), (450, 0), (550, 0)]), &stays(&[(0, 0), (100, 3), (400, 0)]), None);
        let text = found.unwrap().to_string();
        assert!(text.contains("not all at their memory") && !text.contains("idle CPU"), "{text}");
    }

    #[test]
    fn a_move_after_which_nothing_is_seen_is_not_the_last_one() {
        let locations = stays(&[(0, 0), (100, 3), (400, 0), (600, 3)]);
        let found = of(&fresh(&[(150, 0), (350, 3), (450, 0)]), &locations).unwrap();
        assert_eq!((found.local_share_after, found.resident_local_share_after), (1.0, 1.0));
        assert_eq!(found.seconds_until_placed, Some(3.0));
    }

    #[test]
    fn all_are_placed_once_each_has_a_step_and_is_at_its_memory() {
        let vcpu = |policy: Option<&str>, remote_share: Option<f64>| {
            let last = policy.map(|policy| json!({ "policy": policy, "cause": "its memory is there" }));
            json!({ "remote_share": remote_share, "last": last })
        };
        let done = || vcpu(Some(POLICY), Some(0.0));
        assert!(all_placed(&[done(), done()]));
        let causes = include_str!("../../pure/policy/src/scheduling/mod.rs");
        for cause in STOLEN {
            assert!(
                causes.contains(&format!("=> \"{cause}\"")),
                "the policy has other words for it: {cause}"
            );
            let mut stolen = done();
            stolen["last"]["cause"] = cause.into();
            assert!(!all_placed(&[done(), stolen]), "it has left since the last period");
        }
        for other in [vcpu(Some(POLICY), Some(1.0)), vcpu(None, Some(0.0)), vcpu(Some(POLICY), None)] {
            assert!(!all_placed(&[done(), other]));
        }
        assert!(!all_placed(&[]));
    }

    #[test]
    fn a_policy_that_does_nothing_is_seen() {
        let locations = stays(&[(0, 0), (100, 3)]);
        let found = of(&fresh(&[(150, 0), (350, 0)]), &locations).unwrap();
        assert_eq!((found.local_share_after, found.seconds_until_placed), (0.0, None));
        assert!(found.check().is_err() && found.to_string().contains("no vCPU came to another node"));
        assert!(of(&fresh(&[(150, 0)]), &locations).is_err(), "no fresh page after it");
        assert!(of(&fresh(&[(350, 0)]), &locations).is_err(), "none before it");
    }
}
