//! After the moves: the VM whose guest is told nothing gets a policy, which takes its vCPUs to the memory that the guest uses.

use crate::checker::Sample;
use crate::judge::is_local;
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
    /// When all vCPUs had a place.
    done: Option<Instant>,
}

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
            self.done = Some(Instant::now());
        }
        Ok(self.done.is_some_and(|done| done.elapsed() >= THEN) || self.since.elapsed().as_secs() >= LIMIT_S)
    }
}

fn vcpus(vm: &Vm) -> Result<Vec<Value>> {
    let mut shown = vnumactl(&["policy", &vm.name])?;
    match shown["vcpus"].take() {
        Value::Array(vcpus) => Ok(vcpus),
        _ => bail!("vnumactl policy {}: no vcpus", vm.name),
    }
}

/// The policy has made a step for each vCPU, and each was on the node of its memory in the last period.
fn all_placed(vcpus: &[Value]) -> bool {
    let placed =
        |vcpu: &Value| vcpu["last"]["policy"] == POLICY && vcpu["remote_share"].as_f64() == Some(0.0);
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
    /// The same since a vCPU came to another node for the last time after which pages were seen.
    pub local_share_after: f64,
    /// The same of long-lived pages.
    pub resident_local_share_before: f64,
    /// And after.
    pub resident_local_share_after: f64,
    /// How long it took until then; none if no vCPU came to another node.
    pub seconds_until_placed: Option<f64>,
    /// Why the policy moved a vCPU, in its own words.
    pub cause: Option<String>,
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
        let moved = moves.first().copied();
        // On a slow server a vCPU may come to its node so late that nothing is seen after that.
        let is_seen = |since: u64| {
            let seen = |kind| samples.iter().any(|sample| sample.kind == kind && sample.before_tsc >= since);
            seen(Kind::Fresh) && seen(Kind::Resident)
        };
        let since = moves.into_iter().find(|tsc| is_seen(*tsc)).unwrap_or(placed.tsc);
        let share = |kind: Kind, after: bool| {
            let in_time = |sample: &&Sample| match after {
                true => sample.before_tsc >= since,
                false => sample.before_tsc < placed.tsc,
            };
            let of: Vec<_> = samples.iter().filter(|sample| sample.kind == kind).filter(in_time).collect();
            let when = if after { "after" } else { "before" };
            ensure!(!of.is_empty(), "no pages ({kind:?}) were seen {when} the policy had placed the vCPUs");
            Ok(of.iter().filter(|sample| is_local(sample, locations)).count() as f64 / of.len() as f64)
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
            Some(seconds) => writeln!(f, "  (placed within {seconds:.1} s: {cause})"),
            None => writeln!(f, "  (no vCPU came to another node)"),
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
        let placed = Placed { tsc: 300, since: Instant::now(), done: None };
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
        let text = BeforeAfter { cause: Some("its memory is there".into()), ..found }.to_string();
        assert!(text.contains(" 25.00 %        66.67 %\n"), "{text}");
        assert!(text.contains("placed within 1.0 s: its memory is there"), "{text}");
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
        let vcpu = |policy: Option<&str>, remote_share: Option<f64>| json!({ "remote_share": remote_share, "last": policy.map(|policy| json!({ "policy": policy })) });
        let done = || vcpu(Some(POLICY), Some(0.0));
        assert!(all_placed(&[done(), done()]));
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
