//! Checks of the host and of each VM: which capability is in use, why it is not the best one, and what would help.
//! They use nothing but what vnumad reports of itself, the host and its VMs.

use crate::{
    table::{Table, plain},
    vms::{displaced, error_text},
};
use serde::Serialize;
use vnuma_api::{ChannelState, Counters, Daemon, DriverMode, HostTopology, Hypervisor, PlaceSetting, Vm};

/// How good a capability is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The best there is.
    Best,
    /// It works, less well.
    Reduced,
    /// It does not work.
    Missing,
}

/// One check of the host or of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The VM; none for the host.
    pub vm: Option<String>,
    /// What is checked.
    pub check: &'static str,
    /// What is in use.
    pub capability: String,
    /// How good that is.
    pub level: Level,
    /// Why it is not better.
    pub why: Option<String>,
    /// What would make it better.
    pub remedy: Option<String>,
}

impl Check {
    /// Nothing is better.
    pub fn best(check: &'static str, capability: impl Into<String>) -> Self {
        Self { vm: None, check, capability: capability.into(), level: Level::Best, why: None, remedy: None }
    }

    /// Something would be better.
    pub fn lower(
        level: Level,
        check: &'static str,
        capability: &str,
        why: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (why, remedy) = (Some(why.into()), Some(remedy.into()));
        Self { vm: None, check, capability: capability.to_owned(), level, why, remedy }
    }
}

/// All checks: the host's first, then those of each VM.
pub fn examine(daemon: &Daemon, host: &HostTopology, vms: &[Vm]) -> Vec<Check> {
    let mut checks = vec![nodes(host), locations(daemon), affinity(daemon), counters(daemon)];
    checks.extend(readings(daemon));
    checks.extend(samples(daemon));
    checks.push(places(daemon));
    for vm in vms {
        let mut of_vm = vec![connection(vm)];
        of_vm.extend(vm.run_state.as_deref().map(|state| guest(vm, state)));
        if vm.described {
            of_vm.push(guest_nodes(vm));
            if !vm.nodes.is_empty() {
                of_vm.push(homes(vm));
                of_vm.extend(memory(vm));
                of_vm.extend(binding(vm));
                of_vm.push(channel(vm, daemon.replug_after_s));
            }
            if vm.channel == ChannelState::Attached {
                of_vm.push(driver(vm));
            }
        }
        checks.extend(of_vm.into_iter().map(|check| Check { vm: Some(vm.name.clone()), ..check }));
    }
    checks
}

fn nodes(host: &HostTopology) -> Check {
    match host.nodes.len() {
        1 => Check::lower(
            Level::Reduced,
            "nodes",
            "one",
            "the host's kernel shows a single node: everything is local",
            "nothing, unless the firmware interleaves memory over sockets (\"node interleaving\", NPS0): then turn that off",
        ),
        count => Check::best("nodes", count.to_string()),
    }
}

fn locations(daemon: &Daemon) -> Check {
    match (daemon.location_source.as_str(), &daemon.why_not_bpf) {
        ("bpf", _) => Check::best("locations", "bpf"),
        (source, why) => Check::lower(
            Level::Reduced,
            "locations",
            source,
            why.clone().unwrap_or_else(|| "no reason is given".to_owned()),
            "run vnumad as root, on a kernel with CONFIG_DEBUG_INFO_BTF, with observe.location = \"auto\"",
        ),
    }
}

fn affinity(daemon: &Daemon) -> Check {
    if daemon.affinity_events {
        return Check::best("affinity", "event");
    }
    let remedy = match daemon.location_source.as_str() {
        "bpf" => {
            "a kernel in which BPF can trace __set_cpus_allowed_ptr(), or a shorter observe.resync_interval_ms"
        }
        _ => "BPF locations, or a shorter observe.resync_interval_ms",
    };
    Check::lower(
        Level::Reduced,
        "affinity",
        "resync",
        "a change of a thread's affinity alone makes no event here; it is noticed when the vCPU runs or with the next resync",
        remedy,
    )
}

/// What policies see of memory.
fn counters(daemon: &Daemon) -> Check {
    let counters = &daemon.counters;
    let pmu = "use a host whose PMU is visible (in a VM: its hypervisor has to show it), run vnumad with CAP_PERFMON, and see \
         that perf_event_open is allowed (kernel.perf_event_paranoid)";
    if let Some(why) = counters.why_failed.as_ref().filter(|_| counters.failed > 0) {
        let capability = format!(
            "{}, {} of {} threads are not counted",
            counters.source, counters.failed, counters.threads
        );
        return Check::lower(Level::Reduced, "counters", &capability, why.clone(), pmu);
    }
    let others = "end other users of the PMU (perf, other agents, the watchdog of kernel.nmi_watchdog)";
    if let Some(permille) = counters.least_permille.filter(|_| counters.shared > 0) {
        let capability = format!(
            "{}, {} of {} threads share counters with others",
            counters.source, counters.shared, counters.threads
        );
        let why = format!(
            "one was counted for {:.1} % of its time on a CPU only; figures are scaled up, and there are none at 0 %",
            f64::from(permille) / 10.0
        );
        return Check::lower(Level::Reduced, "counters", &capability, why, others);
    }
    if !counters.given_up.is_empty() {
        let capability = format!("{}, instead of {}", counters.source, counters.given_up.join(", "));
        let why = counters.passed_over.join("; ");
        let remedy = format!("{others}; in a VM, see that the PMU which its hypervisor shows counts");
        return Check::lower(Level::Reduced, "counters", &capability, why, remedy);
    }
    let best = source(counters, pmu);
    match &counters.why_no_idle_times {
        Some(why) => Check::lower(
            Level::Reduced,
            "counters",
            &best.capability,
            format!("how long CPUs are idle is not known, so that nothing is moved to idle ones: {why}"),
            "let vnumad read /proc/stat",
        ),
        None => match &counters.why_no_groups {
            Some(why) => Check::lower(
                Level::Reduced,
                "counters",
                &best.capability,
                format!("cpu.weight and cpu.max of some VMs are taken to be the kernel's defaults: {why}"),
                "correct what is wrong with that control group",
            ),
            None => best,
        },
    }
}

/// Where counts come from, if that works as it should.
fn source(counters: &Counters, pmu: &str) -> Check {
    let passed_over = match counters.passed_over.is_empty() {
        true => "no reason is given".to_owned(),
        false => counters.passed_over.join("; "),
    };
    match counters.source.as_str() {
        "per-node" | "local-remote" => Check::best("counters", counters.source.clone()),
        "none" | "" => Check::lower(
            Level::Reduced,
            "counters",
            "none",
            format!(
                "nothing can be counted, so that policies take the place of a VM's pages for that of its accesses: {passed_over}"
            ),
            pmu,
        ),
        source => Check::lower(
            Level::Reduced,
            "counters",
            source,
            passed_over,
            "a PMU whose events tell local memory from remote memory",
        ),
    }
}

/// Samples of memory accesses, if the operator wants them and a VM has a policy.
fn samples(daemon: &Daemon) -> Option<Check> {
    let counters = &daemon.counters;
    let why = match (&counters.why_no_samples, counters.samples) {
        (Some(why), _) => why,
        (None, true) => {
            return Some(Check::best("samples", "ibs, which vnuma's developers could not run"));
        }
        (None, false) => return None,
    };
    let remedy =
        "set policy.samples to \"off\", or run vnumad on a host with an AMD CPU and Linux 6.2 or newer";
    Some(Check::lower(Level::Reduced, "samples", "none", why.clone(), remedy))
}

/// How threads are read for policies, if any VM has one.
fn readings(daemon: &Daemon) -> Option<Check> {
    let counters = &daemon.counters;
    let capability = match (counters.read_by.as_str(), &counters.why_files) {
        ("", _) => return None,
        ("bpf", None) => return Some(Check::best("readings", "bpf")),
        ("bpf", Some(_)) => "bpf, /proc/stat for CPUs",
        (other, _) => other,
    };
    let why = counters.why_files.as_deref().unwrap_or("no reason is given");
    Some(Check::lower(
        Level::Reduced,
        "readings",
        capability,
        format!("each period of the policies costs more CPU time: {why}"),
        "run vnumad as root, with observe.location = \"auto\", on Linux 6.10 or newer with CONFIG_DEBUG_INFO_BTF and \
         CONFIG_KALLSYMS_ALL",
    ))
}

/// How policies set the places of vCPUs.
fn places(daemon: &Daemon) -> Check {
    let places = &daemon.places;
    let why = places.why_not.clone();
    if places.mechanism == PlaceSetting::SCHEDULER {
        let mode = if places.full { "full" } else { "partial" };
        let capability = format!("{}, {mode}", places.mechanism);
        return match why {
            None => Check::best("places", capability),
            Some(why) => Check::lower(
                Level::Reduced,
                "places",
                &format!("{capability}; affinity for some vCPUs"),
                why,
                "leave the vCPUs of VMs with a policy in class SCHED_OTHER (chrt --other --pid 0 THREAD)",
            ),
        };
    }
    Check::lower(
        Level::Reduced,
        "places",
        PlaceSetting::AFFINITY,
        why.unwrap_or_else(|| "no reason is given".to_owned()),
        "run scx_vnuma, on Linux 7.0 or newer with sched_ext: then idle CPUs take vCPUs that wait at once, not once a period",
    )
}

fn connection(vm: &Vm) -> Check {
    if vm.hypervisor == Hypervisor::Answers {
        return Check::best("connection", "qmp");
    }
    let own_socket = "give vnumad a QMP socket of its own";
    let remedy = match (vm.hypervisor, vm.pid) {
        (Hypervisor::Stopped, Some(pid)) => format!("kill -CONT {pid}"),
        (Hypervisor::Stopped, None) => "resume its QEMU with SIGCONT".to_owned(),
        (Hypervisor::Debugged, _) => "resume it in the debugger, or detach the debugger".to_owned(),
        (Hypervisor::Silent, _) => {
            format!("{own_socket}, or end the other client; if there is none, QEMU hangs")
        }
        (_, Some(_)) => format!("{own_socket}; vnumad tries again by itself"),
        (_, None) => format!("start the VM, or {own_socket} and the right to use it"),
    };
    let why = vm.problem.as_deref().unwrap_or("no reason is given");
    match vm.pid {
        Some(_) => {
            let capability = format!("{}, observed only", vm.hypervisor);
            Check::lower(Level::Reduced, "connection", &capability, why, remedy)
        }
        None => Check::lower(Level::Missing, "connection", &vm.hypervisor.to_string(), why, remedy),
    }
}

fn guest(vm: &Vm, state: &str) -> Check {
    let standing = |level, why, remedy: &str| Check::lower(level, "guest", state, why, remedy);
    match (state, &vm.problem) {
        ("running", _) => Check::best("guest", "running"),
        ("paused" | "suspended" | "prelaunch" | "inmigrate" | "postmigrate" | "save-vm", _) => standing(
            Level::Reduced,
            "it was paused; what is published takes effect when it runs again",
            "resume it (`cont` at a QEMU monitor), or wait until the migration is over",
        ),
        (_, problem) => standing(
            Level::Missing,
            problem.as_deref().unwrap_or("it does not run"),
            "QEMU's log says more; reset or restart the VM",
        ),
    }
}

fn guest_nodes(vm: &Vm) -> Check {
    match vm.nodes.len() {
        0 => Check::lower(
            Level::Missing,
            "guest nodes",
            "none",
            "a UMA VM (no -numa): it has no guest nodes to publish",
            "start it with -numa, a memory backend for each node",
        ),
        1 => Check::lower(
            Level::Reduced,
            "guest nodes",
            "one",
            "with a single guest node a vCPU that moves to another host node can only be shown as approximate",
            "start it with as many nodes as host nodes that it may run on (memory can be small)",
        ),
        count => Check::best("guest nodes", count.to_string()),
    }
}

fn homes(vm: &Vm) -> Check {
    let list = |nodes: Vec<u32>| nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let homeless: Vec<u32> = vm.nodes.iter().filter(|node| node.home.is_none()).map(|node| node.id).collect();
    let mut homes: Vec<u32> = vm.nodes.iter().filter_map(|node| node.home).collect();
    let count = homes.len();
    homes.sort_unstable();
    homes.dedup();
    if !homeless.is_empty() {
        let level = if homes.is_empty() { Level::Missing } else { Level::Reduced };
        let why = format!("guest nodes {} have no known home", list(homeless));
        let remedy =
            "bind each node's memory (host-nodes=N,policy=bind), or wait until the guest has touched it";
        return Check::lower(level, "homes", "some unknown", why, remedy);
    }
    if homes.len() < count {
        let why = format!("{count} guest nodes share host nodes {}", list(homes));
        let remedy = "bind the memory of each guest node to a host node of its own";
        return Check::lower(Level::Reduced, "homes", "shared", why, remedy);
    }
    Check::best("homes", "one each")
}

/// Is its memory on the homes of its guest nodes? None while that is not known.
fn memory(vm: &Vm) -> Option<Check> {
    match displaced(vm) {
        Some(why) => Some(Check::lower(
            Level::Reduced,
            "memory",
            "displaced",
            why,
            match vm.devices.is_empty() {
                true => format!(
                    "move it before a device is plugged: migratepages {} FROM HOME",
                    vm.pid.unwrap_or_default()
                ),
                false => {
                    "unplug all passthrough devices and move it, or start the VM as `vnumactl place` says"
                        .to_owned()
                }
            },
        )),
        None => {
            let known = vm.nodes.iter().all(|node| node.displaced_bytes.is_some());
            known.then(|| Check::best("memory", "at home"))
        }
    }
}

/// Do new pages of its guest nodes come from their homes? None where no policy of QEMU names a node, or all name the homes.
fn binding(vm: &Vm) -> Option<Check> {
    let away = |node: &&vnuma_api::GuestNode| {
        node.bound.is_some_and(|bound| node.home.is_some_and(|home| home != bound))
    };
    let node = vm.nodes.iter().find(away)?;
    let (id, bound, home) = (node.id, node.bound.unwrap_or_default(), node.home.unwrap_or_default());
    let why = format!(
        "QEMU's policy takes new pages of guest node {id} from host node {bound}, and its home is {home}: pages that are freed and \
         touched again go back to {bound}, and no memory policy brings them to {home}"
    );
    let remedy = format!(
        "only QEMU can change that: start the VM without policy= and host-nodes= of its memory backends, or with host-nodes={home}; \
         or `vnumactl rehome {} --guest-node {id} --node {bound}`",
        vm.name
    );
    Some(Check::lower(Level::Reduced, "binding", "elsewhere", why, remedy))
}

fn channel(vm: &Vm, replug_after_s: Option<u64>) -> Check {
    let attach = format!("vnumactl attach {}", vm.name);
    match vm.channel {
        ChannelState::Attached => Check::best("channel", "attached"),
        ChannelState::Attaching => {
            Check::lower(Level::Reduced, "channel", "attaching", "it is being plugged", "wait")
        }
        ChannelState::None if !vm.spare_slots.is_empty() => Check::lower(
            Level::Reduced,
            "channel",
            "replug",
            match replug_after_s {
                Some(seconds) => format!(
                    "without a channel its guest follows only because vnumad replugs vCPUs after {seconds} s (replug.after_s): not vCPU 0, and CPU numbers change"
                ),
                None => format!(
                    "without a channel its guest follows only by `vnumactl replug {} --vcpu N`: for each vCPU, by hand (unless replug.after_s is set), not for vCPU 0, and CPU numbers change",
                    vm.name
                ),
            },
            format!("{attach} (needs a free PCIe root port, and vnuma.ko in the guest)"),
        ),
        ChannelState::None => {
            let remedy = format!("{attach} (needs a free PCIe root port)");
            Check::lower(Level::Missing, "channel", "none", "nothing can be published to its guest", remedy)
        }
        ChannelState::Lost => {
            let remedy =
                format!("vnumactl detach {}, then {attach}; vnumad's log says what was missing", vm.name);
            let why = "an earlier vnumad's channel could not be taken over";
            Check::lower(Level::Missing, "channel", "lost", why, remedy)
        }
    }
}

fn driver(vm: &Vm) -> Check {
    let publication = &vm.publication;
    let current = publication.generation.is_some() && publication.acknowledged == publication.generation;
    let refused = publication.refused.filter(|refused| Some(refused.generation) == publication.generation);
    match (refused, publication.driver_mode) {
        _ if publication.driver_version.is_none() => Check::lower(
            Level::Missing,
            "driver",
            "none",
            "no driver reports to the channel",
            "load vnuma.ko in the guest; if it is loaded, the guest's kernel log says why it does not use the channel",
        ),
        (Some(refused), _) if !current => Check::lower(
            if publication.acknowledged.is_none() { Level::Missing } else { Level::Reduced },
            "driver",
            "refused",
            format!(
                "the driver refused generation {}, or applied it in part only: {}",
                refused.generation,
                error_text(refused.errno)
            ),
            "the guest's kernel log says what was refused (`dmesg | grep vnuma`)",
        ),
        _ if !current => Check::lower(
            Level::Reduced,
            "driver",
            "pending",
            "the guest has not acknowledged the last generation yet",
            "nothing if it is busy; otherwise look at the guest's kernel log",
        ),
        (_, Some(DriverMode::Safe)) => Check::lower(
            Level::Reduced,
            "driver",
            "safe",
            "the guest moves a CPU by taking it offline for a moment, and cannot move CPU 0",
            "load vnuma.ko with mode=auto; if it is, the guest's kernel log names the symbols that fast mode lacks",
        ),
        _ => Check::best("driver", "fast"),
    }
}

/// For people: a table, and below it what can be done.
pub fn text(checks: &[Check]) -> String {
    let mut table = Table::new(&["WHERE", "CHECK", "CAPABILITY", "LEVEL"]);
    let place = |check: &Check| {
        check.vm.as_deref().map_or_else(|| "host".to_owned(), |vm| format!("VM {}", plain(vm)))
    };
    for check in checks {
        let level = match check.level {
            Level::Best => "best",
            Level::Reduced => "reduced",
            Level::Missing => "missing",
        };
        table.row([place(check), check.check.to_owned(), plain(&check.capability), level.to_owned()]);
    }
    let mut text = table.text(0);
    for check in checks {
        if let (Some(why), Some(remedy)) = (&check.why, &check.remedy) {
            text += &format!(
                "\n{}, {}: {}\n  remedy: {}\n",
                place(check),
                check.check,
                plain(why),
                plain(remedy)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use vnuma_api::{Generation, GuestNode, Publication, RefusedGeneration};
    use vnuma_topology::DistanceMatrix;

    fn daemon(source: &str) -> Daemon {
        let bpf = source == "bpf";
        Daemon {
            version: "1".into(),
            pid: 1,
            location_source: source.into(),
            why_not_bpf: (!bpf).then(|| "no BTF".into()),
            affinity_events: bpf,
            location_events_lost: 0,
            replug_after_s: None,
            policy: "off".into(),
            policy_period_ms: 1000,
            counters: Counters { source: "per-node".into(), ..Counters::default() },
            places: scheduler(None),
            watchers: 0,
            watchers_dropped: 0,
        }
    }

    fn scheduler(why_not: Option<&str>) -> PlaceSetting {
        let mechanism = PlaceSetting::SCHEDULER.to_owned();
        PlaceSetting { mechanism, why_not: why_not.map(str::to_owned), ..PlaceSetting::default() }
    }

    #[test]
    fn how_places_are_set_is_named_with_why_it_is_not_better() {
        let check = |places: PlaceSetting| {
            let checks = examine(&Daemon { places, ..daemon("bpf") }, &HostTopology::default(), &[]);
            (found(&checks, "places"), text(&checks))
        };
        assert_eq!(check(scheduler(None)).0, ("sched_ext, partial".into(), Level::Best));
        let full = PlaceSetting { full: true, ..scheduler(None) };
        assert_eq!(check(full).0, ("sched_ext, full".into(), Level::Best));
        let (found, shown) = check(scheduler(Some("thread 7 has scheduling class 3")));
        assert_eq!(found, ("sched_ext, partial; affinity for some vCPUs".into(), Level::Reduced));
        assert!(shown.contains("thread 7 has scheduling class 3"), "{shown}");
        let (found, shown) = check(PlaceSetting::affinity("no sched_ext scheduler is loaded".into()));
        assert_eq!(found, ("affinity".into(), Level::Reduced));
        assert!(
            shown.contains("no sched_ext scheduler is loaded") && shown.contains("run scx_vnuma"),
            "{shown}"
        );
    }

    #[test]
    fn how_threads_are_read_is_named_while_they_are_read() {
        let check = |read_by: &str, why_files: Option<&str>| {
            let (read_by, why_files) = (read_by.to_owned(), why_files.map(str::to_owned));
            let counters = Counters { read_by, why_files, ..Counters::default() };
            let checks = examine(&Daemon { counters, ..daemon("bpf") }, &HostTopology::default(), &[]);
            let shown = text(&checks);
            checks.iter().any(|check| check.check == "readings").then(|| (found(&checks, "readings"), shown))
        };
        assert!(check("", None).is_none());
        assert_eq!(check("bpf", None).expect("shown").0, ("bpf".into(), Level::Best));
        let (found, shown) = check("bpf", Some("no symbols")).expect("shown");
        assert_eq!(found, ("bpf, /proc/stat for CPUs".into(), Level::Reduced));
        assert!(shown.contains("no symbols"), "{shown}");
        let (found, shown) = check("files", Some("the kernel has no BTF")).expect("shown");
        assert_eq!(found, ("files".into(), Level::Reduced));
        assert!(shown.contains("the kernel has no BTF") && shown.contains("6.10"), "{shown}");
    }

    #[test]
    fn the_source_of_counters_is_named_with_why_it_is_not_better() {
        let check = |counters: Counters| {
            let checks = examine(&Daemon { counters, ..daemon("bpf") }, &HostTopology::default(), &[]);
            (found(&checks, "counters"), text(&checks))
        };
        let counters = |source: &str, passed_over: &[&str]| Counters {
            source: source.into(),
            passed_over: passed_over.iter().map(|&why| why.to_owned()).collect(),
            ..Counters::default()
        };
        assert_eq!(
            check(counters("local-remote", &["per-node: no events"])).0,
            ("local-remote".into(), Level::Best)
        );
        let (found, shown) = check(counters("generic", &["per-node: no such events"]));
        assert_eq!(found, ("generic".into(), Level::Reduced));
        assert!(shown.contains("per-node: no such events"), "{shown}");
        let (found, shown) = check(counters("none", &["generic: not permitted"]));
        assert_eq!(found, ("none".into(), Level::Reduced));
        assert!(shown.contains("nothing can be counted") && shown.contains("not permitted"), "{shown}");
        let why_failed = Some("too many open files".to_owned());
        let (found, shown) =
            check(Counters { threads: 9, failed: 2, why_failed, ..counters("generic", &[]) });
        assert_eq!(found, ("generic, 2 of 9 threads are not counted".into(), Level::Reduced));
        assert!(shown.contains("too many open files"), "{shown}");
        let (found, shown) =
            check(Counters { threads: 9, shared: 3, least_permille: Some(125), ..counters("per-node", &[]) });
        assert_eq!(found, ("per-node, 3 of 9 threads share counters with others".into(), Level::Reduced));
        assert!(shown.contains("for 12.5 % of its time") && shown.contains("nmi_watchdog"), "{shown}");
        let given_up = vec!["per-node".to_owned()];
        let (found, shown) =
            check(Counters { given_up, ..counters("local-remote", &["per-node: it counted nothing"]) });
        assert_eq!(found, ("local-remote, instead of per-node".into(), Level::Reduced));
        assert!(shown.contains("it counted nothing") && shown.contains("nmi_watchdog"), "{shown}");
        let blind =
            Counters { why_no_idle_times: Some("/proc/stat: missing".into()), ..counters("per-node", &[]) };
        let (found, shown) = check(blind);
        assert_eq!(found, ("per-node".into(), Level::Reduced));
        assert!(shown.contains("/proc/stat: missing"), "{shown}");
        let why = Some("/sys/fs/cgroup/a/cpu.weight: `x`: not a number".into());
        let (found, shown) = check(Counters { why_no_groups: why, ..counters("per-node", &[]) });
        assert_eq!(found, ("per-node".into(), Level::Reduced));
        assert!(
            shown.contains("taken to be the kernel's defaults: /sys/fs/cgroup/a/cpu.weight: `x`"),
            "{shown}"
        );
    }

    #[test]
    fn samples_are_shown_if_they_are_wanted() {
        let check = |counters: Counters| {
            let checks = examine(&Daemon { counters, ..daemon("bpf") }, &HostTopology::default(), &[]);
            (checks.iter().any(|check| check.check == "samples"), text(&checks))
        };
        assert!(!check(Counters::default()).0);
        let (shown, text) = check(Counters { samples: true, ..Counters::default() });
        assert!(shown && text.contains("could not run"), "{text}");
        let why = Some("no IBS: /sys/x".to_owned());
        let (shown, text) = check(Counters { why_no_samples: why, ..Counters::default() });
        assert!(shown && text.contains("no IBS: /sys/x") && text.contains("policy.samples"), "{text}");
    }

    fn vm(name: &str, homes: &[Option<u32>]) -> Vm {
        let node = |(id, home): (usize, &Option<u32>)| GuestNode {
            id: id as u32,
            home: *home,
            memory_bytes: 1 << 30,
            displaced_bytes: None,
            bound: None,
        };
        Vm {
            name: name.into(),
            pid: Some(7),
            described: true,
            hypervisor: Hypervisor::Answers,
            attached: true,
            channel: ChannelState::Attached,
            run_state: Some("running".into()),
            problem: None,
            nodes: homes.iter().enumerate().map(node).collect(),
            distances: DistanceMatrix::default(),
            vcpus: Vec::new(),
            publication: Publication {
                generation: Some(Generation(5)),
                acknowledged: Some(Generation(5)),
                driver_mode: Some(DriverMode::Fast),
                driver_version: Some("1.2.3".into()),
                ..Publication::default()
            },
            devices: Vec::new(),
            spare_slots: BTreeMap::new(),
        }
    }

    fn found(checks: &[Check], name: &str) -> (String, Level) {
        let check = checks.iter().find(|check| check.check == name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(check.level == Level::Best, check.why.is_none() && check.remedy.is_none(), "{check:?}");
        (check.capability.clone(), check.level)
    }

    #[test]
    fn at_the_top_nothing_is_left_to_do() {
        let checks = examine(&daemon("bpf"), &HostTopology::default(), &[vm("web", &[Some(0), Some(1)])]);
        assert!(checks.iter().all(|check| check.level == Level::Best), "{checks:?}");
        assert_eq!(checks.len(), 11);
        assert!(!text(&checks).contains("remedy"));
    }

    #[test]
    fn a_policy_of_qemu_that_brings_pages_back_is_named_with_what_avoids_it() {
        let mut vm = vm("web", &[Some(0), Some(1)]);
        let of = |vm: &Vm| examine(&daemon("bpf"), &HostTopology::default(), std::slice::from_ref(vm));
        for bound in [None, Some(0)] {
            vm.nodes[0].bound = bound;
            assert!(of(&vm).iter().all(|check| check.check != "binding"), "{bound:?}");
        }
        vm.nodes[0].bound = Some(3);
        assert_eq!(found(&of(&vm), "binding"), ("elsewhere".into(), Level::Reduced));
        let text = self::text(&of(&vm));
        assert!(text.contains("new pages of guest node 0 from host node 3, and its home is 0"), "{text}");
        assert!(
            text.contains("without policy= and host-nodes=") && text.contains("--guest-node 0 --node 3"),
            "{text}"
        );
    }

    #[test]
    fn displaced_memory_is_named_before_a_device_pins_it() {
        let mut vm = vm("web", &[Some(0), Some(1)]);
        let of = |vm: &Vm| examine(&daemon("bpf"), &HostTopology::default(), std::slice::from_ref(vm));
        vm.nodes[0].displaced_bytes = Some(0);
        assert!(of(&vm).iter().all(|check| check.check != "memory"), "of node 1 it is not known");
        vm.nodes[1].displaced_bytes = Some(0);
        assert_eq!(found(&of(&vm), "memory"), ("at home".into(), Level::Best));
        vm.nodes[1].displaced_bytes = Some(300 << 20);
        assert_eq!(found(&of(&vm), "memory"), ("displaced".into(), Level::Reduced));
        let text = self::text(&of(&vm));
        let why = "VM web, memory: 300 MiB of guest node 1 are not on its home, of 2048 MiB in all; the first passthrough device pins";
        assert!(text.contains(why) && text.contains("migratepages 7 FROM HOME"), "{text}");
        vm.devices = vec![vnuma_api::VmDevice {
            host: "0000:81:00.0".into(),
            host_node: Some(1),
            guest: None,
            guest_node: None,
            acked_node: None,
            target_node: None,
            state: vnuma_api::VcpuState::Unknown,
        }];
        let text = self::text(&of(&vm));
        assert!(text.contains("its passthrough devices have pinned them there"), "{text}");
        assert!(!text.contains("migratepages"), "{text}");
    }

    #[test]
    fn every_lesser_capability_says_why_and_what_to_do() {
        let checks = examine(&daemon("poll"), &HostTopology::default(), &[]);
        assert_eq!(found(&checks, "locations"), ("poll".into(), Level::Reduced));
        assert_eq!(found(&checks, "affinity"), ("resync".into(), Level::Reduced));
        let remedy = |daemon: Daemon| {
            let checks = examine(&daemon, &HostTopology::default(), &[]);
            let check = checks.into_iter().find(|check| check.check == "affinity");
            check.and_then(|check| check.remedy).expect("a remedy")
        };
        assert!(remedy(daemon("poll")).starts_with("BPF locations"));
        let blind = Daemon { affinity_events: false, ..daemon("bpf") };
        assert!(remedy(blind).starts_with("a kernel in which BPF can trace"), "BPF is in use already");
        let of = |vm: Vm| examine(&daemon("bpf"), &HostTopology::default(), &[vm]);
        assert_eq!(found(&of(vm("a", &[])), "guest nodes"), ("none".into(), Level::Missing));
        assert_eq!(found(&of(vm("a", &[Some(1)])), "guest nodes"), ("one".into(), Level::Reduced));
        let homes = [
            (vec![Some(1), Some(1)], "shared", Level::Reduced),
            (vec![Some(1), None], "some unknown", Level::Reduced),
            (vec![None, None], "some unknown", Level::Missing),
        ];
        for (homes, capability, level) in homes {
            assert_eq!(found(&of(vm("a", &homes)), "homes"), (capability.into(), level));
        }
        for (channel, capability) in [(ChannelState::None, "none"), (ChannelState::Lost, "lost")] {
            let checks = of(Vm { channel, ..vm("a", &[Some(0), Some(1)]) });
            assert_eq!(found(&checks, "channel"), (capability.into(), Level::Missing));
            assert!(checks.iter().all(|check| check.check != "driver"), "a driver without a channel");
            assert!(text(&checks).contains("vnumactl attach a"));
        }
        let spare_slots = BTreeMap::from([(1, 2)]);
        let checks = of(Vm { channel: ChannelState::None, spare_slots, ..vm("a", &[Some(0), Some(1)]) });
        assert_eq!(found(&checks, "channel"), ("replug".into(), Level::Reduced));
        assert!(text(&checks).contains("vnumactl replug a --vcpu N"));
        let spare_slots = BTreeMap::from([(1, 2)]);
        let spare = Vm { channel: ChannelState::None, spare_slots, ..vm("a", &[Some(0), Some(1)]) };
        let daemon = Daemon { replug_after_s: Some(7), ..daemon("bpf") };
        let checks = examine(&daemon, &HostTopology::default(), &[spare]);
        assert!(text(&checks).contains("vnumad replugs vCPUs after 7 s"), "{}", text(&checks));
    }

    #[test]
    fn the_driver_is_checked_by_what_the_guest_reports() {
        let check = |change: &dyn Fn(&mut Publication)| {
            let mut vm = vm("a", &[Some(0), Some(1)]);
            change(&mut vm.publication);
            let checks = examine(&daemon("bpf"), &HostTopology::default(), &[vm]);
            (found(&checks, "driver"), text(&checks))
        };
        let level = |change: &dyn Fn(&mut Publication)| check(change).0;
        let none = level(&|publication| publication.driver_version = None);
        assert_eq!(none, ("none".into(), Level::Missing));
        let pending = level(&|publication| publication.acknowledged = Some(Generation(4)));
        assert_eq!(pending, ("pending".into(), Level::Reduced));
        let safe = level(&|publication| publication.driver_mode = Some(DriverMode::Safe));
        assert_eq!(safe, ("safe".into(), Level::Reduced));

        let refused = |generation, acknowledged| {
            check(&move |publication| {
                let generation = Generation(generation);
                publication.refused = Some(RefusedGeneration { generation, errno: 95 });
                publication.acknowledged = acknowledged;
            })
        };
        let (found, text) = refused(5, None);
        assert_eq!(found, ("refused".into(), Level::Missing));
        let why = "refused generation 0000000000000005, or applied it in part only: Operation not supported (errno 95)\n";
        assert!(text.contains(why), "{text}");
        assert_eq!(refused(5, Some(Generation(4))).0, ("refused".into(), Level::Reduced));
        // An earlier one that was refused says nothing about the present one.
        assert_eq!(refused(4, Some(Generation(5))).0, ("fast".into(), Level::Best));
        assert_eq!(refused(4, Some(Generation(3))).0, ("pending".into(), Level::Reduced));
    }

    #[test]
    fn a_guest_that_stands_still_is_named() {
        for (state, problem, level) in [
            ("paused", None, Level::Reduced),
            ("internal-error", Some("the reason"), Level::Missing),
            ("new-in-qemu-99", None, Level::Missing),
        ] {
            let run_state = Some(state.to_owned());
            let vm = Vm { run_state, problem: problem.map(str::to_owned), ..vm("a", &[Some(0), Some(1)]) };
            let checks = examine(&daemon("bpf"), &HostTopology::default(), &[vm]);
            assert_eq!(found(&checks, "guest"), (state.into(), level));
            assert!(problem.is_none_or(|problem| text(&checks).contains(problem)));
        }
    }

    #[test]
    fn a_hypervisor_that_cannot_be_asked_is_named_with_what_to_do() {
        for (hypervisor, pid, capability, remedy) in [
            (Hypervisor::Stopped, Some(7), "stopped, observed only", "kill -CONT 7"),
            (Hypervisor::Debugged, Some(7), "debugged, observed only", "detach the debugger"),
            (Hypervisor::Silent, Some(7), "silent, observed only", "end the other client"),
            (Hypervisor::Silent, None, "silent", "a QMP socket of its own"),
            (Hypervisor::Lost, Some(7), "lost, observed only", "tries again"),
            (Hypervisor::Lost, None, "lost", "start the VM"),
        ] {
            let problem = Some("the reason".to_owned());
            let known = pid.is_some();
            let vm = Vm { hypervisor, pid, problem, described: known, ..vm("a", &[Some(0), Some(1)]) };
            let checks = examine(&daemon("bpf"), &HostTopology::default(), &[vm]);
            let level = if known { Level::Reduced } else { Level::Missing };
            assert_eq!(found(&checks, "connection"), (capability.into(), level));
            let text = text(&checks);
            assert!(text.contains("connection: the reason\n") && text.contains(remedy), "{text}");
            assert_eq!(checks.iter().any(|check| check.check == "homes"), known);
        }
    }
}
