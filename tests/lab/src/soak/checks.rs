//! What has to be so: what holds at any moment, and what holds a while after the last step.

use super::model::{Guest, Loaded, State};
use crate::threads::Loop;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    thread,
    time::Duration,
};
use vnuma_model::CpuSet;
use vnuma_observe::scheduler::{DIRECTORY, Scheduler};
use vnuma_process::{Class, read_allowed};
use vnuma_scenario::{HANG_LIMIT, Vm, vnumactl, wait_for};

const RECORDS: &str = "/run/vnuma/channels";
/// A vCPU that runs gets this much CPU time before it counts as running.
const RAN_NS: u64 = 20_000_000;
/// Doctor's checks of a UMA VM that is well: name, capability, level.
const OF_VM: [(&str, &str, &str); 3] =
    [("connection", "qmp", "best"), ("guest", "running", "best"), ("guest nodes", "none", "missing")];

/// A VM and what is meant to be so of it.
pub struct Pair<'a> {
    pub vm: &'a Vm,
    pub guest: &'a Guest,
}

impl Pair<'_> {
    fn vcpus(&self) -> impl Iterator<Item = (usize, i32, &CpuSet)> {
        let threads = self.vm.threads.iter().zip(&self.guest.masks).enumerate();
        threads.map(|(vcpu, (&tid, mask))| (vcpu, tid, mask))
    }

    fn vcpu(&self, vcpu: usize) -> Loop {
        Loop::of_thread_of(self.vm.pid, self.vm.threads[vcpu])
    }

    fn allowed(&self, tid: i32) -> Result<CpuSet> {
        Ok(read_allowed(self.vm.pid, tid)?)
    }
}

/// QEMU's threads that are there as long as the VM, but for vCPUs: its main thread, and those of vhost.
fn other_threads(vm: &Vm) -> Result<Vec<i32>> {
    let directory = format!("/proc/{}/task", vm.pid);
    let mut threads = vec![vm.pid];
    for entry in fs::read_dir(&directory).with_context(|| directory.clone())? {
        let entry = entry?;
        // A worker may end meanwhile.
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if name.starts_with("vhost-") {
            threads.push(entry.file_name().to_string_lossy().parse()?);
        }
    }
    Ok(threads)
}

/// At any moment: no vCPU may run, or has run, where its operator does not allow it.
pub fn expect_within_masks(pairs: &[Pair<'_>]) -> Result<()> {
    for pair in pairs {
        for (vcpu, tid, mask) in pair.vcpus() {
            let name = pair.guest.name;
            let allowed = pair.allowed(tid)?;
            ensure!(
                allowed.is_subset(mask),
                "vCPU {vcpu} of {name} may run on CPUs {allowed}, its operator allows {mask}"
            );
            let thread = pair.vcpu(vcpu);
            let (before, first) = (thread.ran_ns()?, thread.cpu()?);
            if mask.contains(first) {
                continue;
            }
            // It may not have run since it was allowed another CPU.
            thread::sleep(Duration::from_millis(50));
            let (after, last) = (thread.ran_ns()?, thread.cpu()?);
            ensure!(
                mask.contains(last) || after == before,
                "vCPU {vcpu} of {name} runs on CPU {last}, its operator allows {mask}"
            );
        }
    }
    Ok(())
}

/// The operators' masks are back, of all threads, the kernel's own scheduler has them, and nothing is recorded.
pub fn expect_given_back(pairs: &[Pair<'_>], others: &CpuSet) -> Result<()> {
    for pair in pairs {
        let wrong = not_given_back(pair, others)?;
        ensure!(wrong.is_empty(), "{}", wrong.join("; "));
        let record = Path::new(RECORDS).join(format!("{}.masks", pair.vm.pid));
        ensure!(!record.exists(), "a record of masks stays: {}", record.display());
    }
    Ok(())
}

fn not_given_back(pair: &Pair<'_>, others: &CpuSet) -> Result<Vec<String>> {
    let (name, mut wrong) = (pair.guest.name, Vec::new());
    for (vcpu, tid, mask) in pair.vcpus() {
        let (allowed, class) = (pair.allowed(tid)?, pair.vcpu(vcpu).class()?);
        if allowed != *mask || class != Class::Other {
            wrong.push(format!(
                "vCPU {vcpu} of {name} has CPUs {allowed} and class {class:?}, its operator's are {mask}"
            ));
        }
    }
    for tid in other_threads(pair.vm)? {
        let allowed = pair.allowed(tid)?;
        if allowed != *others {
            wrong.push(format!("thread {tid} of {name} has CPUs {allowed}, its operator's are {others}"));
        }
    }
    Ok(wrong)
}

/// Each busy vCPU gets CPU time.
pub fn expect_all_run(pairs: &[Pair<'_>]) -> Result<()> {
    let busy = pairs.iter().flat_map(|pair| {
        let busy = pair.guest.busy.iter().enumerate().filter(|(_, busy)| **busy);
        busy.map(move |(vcpu, _)| (pair.guest.name, vcpu, pair.vcpu(vcpu)))
    });
    let mut waiting = Vec::new();
    for (name, vcpu, thread) in busy {
        waiting.push((name, vcpu, thread.ran_ns()?, thread));
    }
    let started = wait_for("each busy vCPU to run", HANG_LIMIT, || {
        let mut still = Vec::new();
        for (name, vcpu, before, thread) in waiting.drain(..) {
            if thread.ran_ns()? < before + RAN_NS {
                still.push((name, vcpu, before, thread));
            }
        }
        waiting = still;
        Ok(waiting.is_empty())
    });
    let names: Vec<String> = waiting.iter().map(|(name, vcpu, ..)| format!("{vcpu} of {name}")).collect();
    started.with_context(|| format!("vCPUs that starve: {}", names.join(", ")))
}

/// What is not so yet while vnumad runs.
pub fn unsettled(state: &State, pairs: &[Pair<'_>]) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for pair in pairs {
        let name = pair.guest.name;
        let shown = vnumactl(&["policy", name]);
        match shown {
            Ok(shown) => wrong.append(&mut unsettled_vm(state, pair, &shown)?),
            Err(error) => wrong.push(format!("vnumactl policy {name}: {error:#}")),
        }
    }
    wrong.append(&mut unsettled_threads(state, pairs));
    wrong.append(&mut unsettled_checks(state, &vnumactl(&["doctor"])?));
    Ok(wrong)
}

fn unsettled_vm(state: &State, pair: &Pair<'_>, shown: &Value) -> Result<Vec<String>> {
    let (name, guest) = (pair.guest.name, pair.guest);
    if shown["policy"] != guest.policy {
        return Ok(vec![format!("{name} has the policy {}, expected {}", shown["policy"], guest.policy)]);
    }
    if !guest.acts() {
        return not_given_back(pair, &state.cpus());
    }
    let mut wrong = Vec::new();
    let by_scheduler = matches!(state.loaded, Loaded::Ours { .. });
    let partial = state.loaded == Loaded::Ours { full: false };
    for (vcpu, tid, mask) in pair.vcpus() {
        let seen = &shown["vcpus"][vcpu];
        let cpus = |field: &str| seen[field].as_str().and_then(|list| list.parse::<CpuSet>().ok());
        let (allowed, class) = (pair.allowed(tid)?, pair.vcpu(vcpu).class()?);
        let policy = cpus("policy_cpus").filter(|_| !by_scheduler);
        let expected = policy.as_ref().unwrap_or(mask);
        let of_class = if partial && mask.len() > 1 { Class::Ext } else { Class::Other };
        if cpus("operator_cpus").as_ref() != Some(mask) || allowed != *expected || class != of_class {
            wrong.push(format!(
                "vCPU {vcpu} of {name} has CPUs {allowed} and class {class:?}, expected {expected}, {of_class:?}, and {mask} \
                 as its operator's: {seen}"
            ));
        }
    }
    Ok(wrong)
}

/// scx_vnuma has the vCPUs that policies may move, and no others.
fn unsettled_threads(state: &State, pairs: &[Pair<'_>]) -> Vec<String> {
    if !matches!(state.loaded, Loaded::Ours { .. }) {
        return Vec::new();
    }
    let acting = pairs.iter().filter(|pair| pair.guest.acts());
    let free = acting.flat_map(|pair| {
        pair.vcpus().filter(|(_, _, mask)| mask.len() > 1).map(|(_, tid, _)| (tid, pair.vm.pid))
    });
    let expected: BTreeSet<(i32, i32)> = free.collect();
    match Scheduler::open(Path::new("/"), Path::new(DIRECTORY)) {
        Ok(scheduler) => {
            let threads: BTreeSet<_> = scheduler.threads().into_iter().collect();
            let differ = threads != expected;
            differ.then(|| format!("scx_vnuma has {threads:?}, expected {expected:?}")).into_iter().collect()
        }
        Err(error) => vec![format!("scx_vnuma: {error}")],
    }
}

/// `vnumactl doctor` lists what there has to be, each as good as it can be here, and nothing else.
fn unsettled_checks(state: &State, checks: &Value) -> Vec<String> {
    let text = |check: &Value, field: &str| check[field].as_str().unwrap_or_default().to_owned();
    let of = |check: &Value| ["vm", "check", "capability", "level"].map(|field| text(check, field));
    let found: BTreeMap<_, _> =
        checks.as_array().into_iter().flatten().map(|check| (of(check), text(check, "why"))).collect();
    let (places, level, why) = match state.loaded {
        Loaded::Nothing => ("affinity", "reduced", "sched_ext: no sched_ext scheduler is loaded"),
        Loaded::Other => ("affinity", "reduced", "sched_ext: another sched_ext scheduler is loaded, `other`"),
        Loaded::Ours { full: false } => ("sched_ext, partial", "best", ""),
        Loaded::Ours { full: true } => ("sched_ext, full", "best", ""),
    };
    let nodes = state.nodes().to_string();
    let mut expected = vec![
        (["", "nodes", &nodes, "best"], ""),
        (["", "locations", "bpf", "best"], ""),
        (["", "affinity", "event", "best"], ""),
        (["", "counters", "none", "reduced"], "nothing can be counted"),
        (["", "places", places, level], why),
    ];
    if state.vms.iter().any(|guest| guest.policy != "off") {
        expected.push((["", "readings", "bpf", "best"], ""));
        expected.push((["", "idle-times", "bpf", "best"], ""));
        expected.push((["", "groups", "cgroups", "best"], ""));
    }
    for guest in &state.vms {
        expected.extend(OF_VM.map(|(check, capability, level)| ([guest.name, check, capability, level], "")));
    }
    let mut wrong = Vec::new();
    for (check, why) in &expected {
        match found.get(&check.map(str::to_owned)) {
            Some(reason) if reason.starts_with(why) => {}
            Some(reason) => {
                wrong.push(format!("vnumactl doctor: {check:?} because {reason:?}, expected {why:?}"))
            }
            None => wrong.push(format!("vnumactl doctor: no {check:?}")),
        }
    }
    let known: BTreeSet<_> = expected.iter().map(|(check, _)| check.map(str::to_owned)).collect();
    // It is listed from the first look at a VM on.
    let looks = ["", "processes", "bpf", "best"].map(str::to_owned);
    let more = found.iter().filter(|(check, _)| !known.contains(*check) && **check != looks);
    wrong
        .extend(more.map(|(check, why)| format!("vnumactl doctor: {check:?} because {why:?}, not expected")));
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soak::model::{Step, VCPUS};
    use serde_json::json;

    fn state(loaded: Loaded) -> State {
        let mut state = State::new(["1", "2-3"].map(|list| list.parse().expect("a list")).into());
        state.apply(&Step::StartVm { name: "vm1", node: 0, busy: [true; VCPUS] });
        state.loaded = loaded;
        state
    }

    fn checks(places: Value) -> Value {
        let check = |vm: Value, check: &str, capability: &str, level: &str, why: Value| json!({"vm": vm, "check": check, "capability": capability, "level": level, "why": why});
        let mut all = vec![
            check(Value::Null, "nodes", "2", "best", Value::Null),
            check(Value::Null, "locations", "bpf", "best", Value::Null),
            check(Value::Null, "affinity", "event", "best", Value::Null),
            check(Value::Null, "counters", "none", "reduced", json!("nothing can be counted, so that")),
            places,
        ];
        all.extend(
            OF_VM.map(|(name, capability, level)| check(json!("vm1"), name, capability, level, Value::Null)),
        );
        Value::Array(all)
    }

    fn places(capability: &str, level: &str, why: &str) -> Value {
        json!({"vm": null, "check": "places", "capability": capability, "level": level, "why": why})
    }

    #[test]
    fn doctor_is_clean_only_with_exactly_what_there_has_to_be() {
        let none = places(
            "affinity",
            "reduced",
            "sched_ext: no sched_ext scheduler is loaded; scx_vnuma is not running",
        );
        let clean = Vec::<String>::new();
        assert_eq!(unsettled_checks(&state(Loaded::Nothing), &checks(none.clone())), clean);
        let other = places(
            "affinity",
            "reduced",
            "sched_ext: another sched_ext scheduler is loaded, `other`; the kernel",
        );
        assert_eq!(unsettled_checks(&state(Loaded::Other), &checks(other.clone())), clean);
        assert_eq!(unsettled_checks(&state(Loaded::Nothing), &checks(other)).len(), 1);
        let ours = places("sched_ext, partial", "best", "");
        assert_eq!(unsettled_checks(&state(Loaded::Ours { full: false }), &checks(ours.clone())), clean);
        assert_eq!(unsettled_checks(&state(Loaded::Ours { full: true }), &checks(ours)).len(), 2);
        let mut bad = checks(none);
        bad[5]["capability"] = json!("silent, observed only");
        let wrong = unsettled_checks(&state(Loaded::Nothing), &bad);
        assert!(
            wrong.len() == 2 && wrong[1].contains("silent") && wrong[1].ends_with("not expected"),
            "{wrong:?}"
        );
    }

    #[test]
    fn readings_are_checked_while_a_vm_has_a_policy() {
        let mut state = state(Loaded::Nothing);
        state.vms[0].policy = "observe";
        let wrong = unsettled_checks(
            &state,
            &checks(places("affinity", "reduced", "sched_ext: no sched_ext scheduler is loaded")),
        );
        assert!(wrong.len() == 3 && wrong[0].contains("readings"), "{wrong:?}");
    }
}
