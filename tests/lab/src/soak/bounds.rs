//! What `vprobe` promises of its moves (docs/policies.md), checked on the events of a vnumad. Pure.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// A vCPU is moved so often at once, ...
const BURST: usize = 2;
/// ... and then once in so many periods, ...
const REST: u64 = 10;
/// ... and once in so many if it starves.
const STARVE: u64 = 3;
/// A VM causes so many moves of others at once, ...
const BUDGET: usize = 4;
/// ... and then one in so many periods.
const BUDGET_REST: u64 = 15;
/// An event comes when a step has been made. One may be made so many periods after it was decided, and the next one at once.
const LATE: u64 = 10;
const POLICY: &str = "vprobe";
const STARVED: &str = "it waited too long for a CPU";
const SWITCHED_OFF: &str = "its policy does not apply any more";

/// Events of one vnumad, in their order.
pub struct Bounds {
    period_ns: u64,
    /// VMs that have the policy.
    vms: BTreeSet<String>,
    /// When each vCPU was moved, because it starved and for other reasons.
    moved: BTreeMap<(String, u64), [Vec<u64>; 2]>,
    /// When each VM was the reason for a move of another one.
    caused: BTreeMap<String, Vec<u64>>,
    /// Moves so far.
    pub count: usize,
}

impl Bounds {
    pub fn new(period_ns: u64) -> Self {
        Self { period_ns, vms: BTreeSet::new(), moved: BTreeMap::new(), caused: BTreeMap::new(), count: 0 }
    }

    /// A line of `vnumactl watch --json`. An error if it breaks a promise.
    pub fn take(&mut self, line: &str) -> Result<()> {
        let event: Value = serde_json::from_str(line).with_context(|| format!("an event: {line:?}"))?;
        let text = |field: &str| event[field].as_str().unwrap_or_default();
        match text("event") {
            "policy" => self.has_policy(text("vm"), text("policy") == POLICY),
            // Another one may come under this name.
            "gone" => self.has_policy(text("vm"), false),
            "confined" if text("policy") == POLICY && text("cause") != SWITCHED_OFF => {
                let time_ns = event["time_ns"].as_u64().with_context(|| format!("no time_ns: {line}"))?;
                let vcpu = event["vcpu"].as_u64().with_context(|| format!("no vcpu: {line}"))?;
                self.confined(
                    (text("vm"), vcpu),
                    text("cause") == STARVED,
                    event["caused_by"].as_str(),
                    time_ns,
                )
                .with_context(|| line.to_owned())?;
            }
            _ => {}
        }
        Ok(())
    }

    /// What is remembered of a VM begins anew with its policy, and all of it when no VM has that any more.
    fn has_policy(&mut self, vm: &str, has: bool) {
        self.moved.retain(|(name, _), _| name != vm);
        self.caused.remove(vm);
        match has {
            true => drop(self.vms.insert(vm.to_owned())),
            false => drop(self.vms.remove(vm)),
        }
        if self.vms.is_empty() {
            self.caused.clear();
        }
    }

    fn confined(
        &mut self,
        (vm, vcpu): (&str, u64),
        starved: bool,
        caused_by: Option<&str>,
        time_ns: u64,
    ) -> Result<()> {
        // One that was on its way when the policy changed.
        if !self.vms.contains(vm) {
            return Ok(());
        }
        self.count += 1;
        let [starving, others] = self.moved.entry((vm.to_owned(), vcpu)).or_default();
        let period = self.period_ns;
        if starved {
            starving.push(time_ns);
            check(starving, (1, STARVE), period).with_context(|| format!("vCPU {vcpu} of {vm} starves"))?;
        } else {
            others.push(time_ns);
            check(others, (BURST, REST), period).with_context(|| format!("vCPU {vcpu} of {vm}"))?;
        }
        if let Some(other) = caused_by.filter(|other| *other != vm) {
            let caused = self.caused.entry(other.to_owned()).or_default();
            caused.push(time_ns);
            check(caused, (BUDGET, BUDGET_REST), period).with_context(|| format!("because of {other}"))?;
        }
        Ok(())
    }
}

/// In each time up to the last move there are at most so many at once, and one more in so many periods.
fn check(times_ns: &[u64], (at_once, rest): (usize, u64), period_ns: u64) -> Result<()> {
    let Some(last) = times_ns.last() else { return Ok(()) };
    for (count, first) in (1..).zip(times_ns.iter().rev()) {
        let periods = last.saturating_sub(*first) / period_ns;
        let most = at_once + ((periods + LATE) / rest) as usize;
        ensure!(count <= most, "{count} moves in {periods} periods, expected at most {most}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: u64 = 300_000_000;

    fn moved(vcpu: u64, periods: u64, cause: &str, caused_by: Option<&str>) -> String {
        let time_ns = periods * PERIOD;
        let event = serde_json::json!({"event": "confined", "vm": "a", "vcpu": vcpu, "policy": POLICY, "cause": cause,
            "time_ns": time_ns, "caused_by": caused_by});
        event.to_string()
    }

    fn policy(vm: &str, policy: &str) -> String {
        serde_json::json!({"event": "policy", "vm": vm, "policy": policy, "time_ns": 0}).to_string()
    }

    fn taken(lines: &[String]) -> Result<(), String> {
        let mut bounds = Bounds::new(PERIOD);
        bounds.take(&policy("a", POLICY)).expect("a policy");
        lines.iter().try_for_each(|line| bounds.take(line)).map_err(|error| format!("{error:#}"))
    }

    const MEMORY: &str = "its memory is there";

    #[test]
    fn a_vcpu_is_moved_twice_at_once_and_then_once_in_ten_periods() {
        let every = |periods: u64, count: u64| -> Vec<String> {
            (0..count).map(|at| moved(0, 100 + at * periods, MEMORY, None)).collect()
        };
        assert_eq!(taken(&every(10, 50)), Ok(()));
        assert_eq!(taken(&every(0, 3)), Ok(()), "one of them may be late");
        let error = taken(&every(0, 4)).expect_err("too many");
        assert!(error.contains("vCPU 0 of a: 4 moves in 0 periods, expected at most 3"), "{error}");
        assert!(taken(&every(9, 50)).is_err() && taken(&every(1, 5)).is_err());
        let of_two = every(0, 3).into_iter().chain((0..3).map(|_| moved(1, 100, MEMORY, None)));
        assert_eq!(taken(&of_two.collect::<Vec<_>>()), Ok(()), "each vCPU has its own");
    }

    #[test]
    fn one_that_starves_is_moved_once_in_three_periods() {
        let every = |periods: u64| -> Vec<String> {
            (0..40).map(|at| moved(0, 100 + at * periods, STARVED, None)).collect()
        };
        assert_eq!(taken(&every(3)), Ok(()));
        let error = taken(&every(2)).expect_err("too many");
        assert!(error.contains("vCPU 0 of a starves"), "{error}");
    }

    #[test]
    fn one_vm_causes_four_moves_of_others_at_once_and_then_one_in_fifteen_periods() {
        let by = |vm: &str, count: u64, periods: u64| -> Vec<String> {
            (0..count).map(|at| moved(at, 100 + at * periods, MEMORY, Some(vm))).collect()
        };
        assert_eq!(taken(&by("b", 4, 0)), Ok(()));
        let error = taken(&by("b", 5, 0)).expect_err("too many");
        assert!(error.contains("because of b: 5 moves in 0 periods, expected at most 4"), "{error}");
        assert_eq!(taken(&by("b", 60, 15)), Ok(()));
        assert!(taken(&by("b", 60, 14)).is_err());
        assert_eq!(taken(&by("a", 60, 0)), Ok(()), "its own moves are no matter of the budget");
    }

    #[test]
    fn what_is_remembered_ends_with_the_policy_and_with_the_vm() {
        let three = || (0..3).map(|_| moved(0, 100, MEMORY, None));
        for end in [policy("a", "off"), serde_json::json!({"event": "gone", "vm": "a"}).to_string()] {
            let again = [end.clone(), policy("a", POLICY)];
            let all: Vec<_> = three().chain(again).chain(three()).collect();
            assert_eq!(taken(&all), Ok(()));
            let off: Vec<_> = [end].into_iter().chain(three()).chain(three()).collect();
            assert_eq!(taken(&off), Ok(()), "it has the policy no more");
        }
        let other: Vec<_> = three().chain([policy("b", "off")]).chain(three()).collect();
        assert!(taken(&other).is_err(), "another VM's policy");
    }

    #[test]
    fn steps_of_others_and_those_that_give_back_do_not_count() {
        let back: Vec<_> = (0..9).map(|_| moved(0, 100, SWITCHED_OFF, None)).collect();
        assert_eq!(taken(&back), Ok(()));
        let brm: Vec<_> = (0..9).map(|_| moved(0, 100, MEMORY, None).replace(POLICY, "brm")).collect();
        assert_eq!(taken(&brm), Ok(()));
        assert!(taken(&["{".to_owned()]).is_err());
    }
}
