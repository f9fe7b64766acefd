use super::*;
use std::collections::BTreeMap;
use vnuma_api::{Counters, Generation, GuestNode, Limited, PassedOver, Publication, RefusedGeneration};
use vnuma_model::DistanceMatrix;

/// What is in use, with ways that are passed over.
fn capability(name: &str, in_use: &str, passed_over: &[(&str, &str)]) -> Capability {
    Capability::new(name, in_use, passed_over.iter().map(|&(way, why)| PassedOver::new(way, why)))
}

/// With locations from this source.
fn daemon(source: &str) -> Daemon {
    let bpf = source == "bpf";
    let no_bpf = [("bpf", "no BTF")];
    let passed_over = if bpf { &[][..] } else { &no_bpf[..] };
    Daemon {
        version: "1".into(),
        pid: 1,
        capabilities: vec![
            capability(Capability::LOCATIONS, source, passed_over),
            Capability::either(Capability::AFFINITY, ["event", "resync"], (!bpf).then_some("no event")),
            capability(Capability::COUNTERS, "per-node", &[]),
            capability(Capability::PLACES, "sched_ext", &[]),
        ],
        location_source: source.into(),
        why_not_bpf: None,
        affinity_events: bpf,
        location_events_lost: 0,
        replug_after_s: None,
        policy: "off".into(),
        policy_period_ms: 1000,
        counters: Counters::default(),
        places: PlaceSetting::default(),
        libvirt: Vec::new(),
        watchers: 0,
        watchers_dropped: 0,
        silent_threads: Vec::new(),
        limited: Vec::new(),
        hanging_looks: Vec::new(),
    }
}

/// The host's check of this capability, and all as text.
fn with(daemon: Daemon, now: Capability) -> ((String, Level), String) {
    let name = now.name.clone();
    let mut capabilities = daemon.capabilities;
    capabilities.retain(|other| other.name != name);
    capabilities.push(now);
    let checks = examine(&Daemon { capabilities, ..daemon }, &HostTopology::default(), &[]);
    (found(&checks, &name), text(&checks))
}

#[test]
fn threads_of_vnumad_that_make_no_progress_are_named() {
    let check = |silent_threads| {
        let checks = examine(&Daemon { silent_threads, ..daemon("bpf") }, &HostTopology::default(), &[]);
        (checks.iter().any(|check| check.check == "threads"), text(&checks))
    };
    assert!(!check(Vec::new()).0, "all is well");
    let (_, shown) = check(vec!["mover".into(), "vm-3".into()]);
    assert!(shown.contains("mover, vm-3"), "{shown}");
}

#[test]
fn who_had_to_wait_is_named() {
    let of = |party: &str| Limited { work: "descriptions".into(), party: party.into(), times: 7, last_ns: 5 };
    let limited = vec![of("vm web"), of("user 1000")];
    let checks = examine(&Daemon { limited, ..daemon("bpf") }, &HostTopology::default(), &[]);
    let shown = text(&checks);
    assert_eq!(found(&checks, "limited"), ("waits".into(), Level::Reduced), "{shown}");
    assert!(
        shown.contains("vm web had to wait 7 times: descriptions") && shown.contains("user 1000"),
        "{shown}"
    );
}

#[test]
fn looks_that_hang_are_named_with_their_vm() {
    let look = HangingLook { vm: Some("web".into()), pid: 70, thread: "observer-look".into(), seconds: 9 };
    let daemon = Daemon { hanging_looks: vec![look], ..daemon("bpf") };
    let checks = examine(&daemon, &HostTopology::default(), &[]);
    assert!(checks.iter().any(|check| check.check == "looks" && check.vm.as_deref() == Some("web")));
    let shown = text(&checks);
    assert!(
        shown.contains("process 70 does not answer looks: observer-look has waited for it for 9 s"),
        "{shown}"
    );
}

#[test]
fn how_places_are_set_is_named_with_why_it_is_not_better() {
    let check = |full, now| {
        let places = PlaceSetting { full, ..PlaceSetting::default() };
        with(Daemon { places, ..daemon("bpf") }, now)
    };
    let places = |in_use, passed_over| capability(Capability::PLACES, in_use, passed_over);
    assert_eq!(check(false, places("sched_ext", &[])).0, ("sched_ext, partial".into(), Level::Best));
    assert_eq!(check(true, places("sched_ext", &[])).0, ("sched_ext, full".into(), Level::Best));
    let (found, shown) =
        check(false, places("sched_ext", &[("sched_ext", "thread 7 has scheduling class 3")]));
    assert_eq!(found, ("sched_ext, partial; affinity for some vCPUs".into(), Level::Reduced));
    assert!(shown.contains("thread 7 has scheduling class 3") && shown.contains("chrt"), "{shown}");
    let (found, shown) =
        check(false, places("affinity", &[("sched_ext", "no sched_ext scheduler is loaded")]));
    assert_eq!(found, ("affinity".into(), Level::Reduced));
    assert!(shown.contains("no sched_ext scheduler is loaded") && shown.contains("run scx_vnuma"), "{shown}");
}

#[test]
fn a_vnumad_that_does_not_say_what_it_uses_is_named() {
    let old = Daemon { capabilities: Vec::new(), ..daemon("bpf") };
    let checks = examine(&old, &HostTopology::default(), &[]);
    assert_eq!(found(&checks, "capabilities"), ("unknown".into(), Level::Reduced));
}

#[test]
fn a_libvirt_that_does_not_answer_is_named() {
    let connection = |problem: Option<&str>| LibvirtConnection {
        uri: "qemu:///system".into(),
        problem: problem.map(str::to_owned),
    };
    let check = |libvirt| {
        let checks = examine(&Daemon { libvirt, ..daemon("bpf") }, &HostTopology::default(), &[]);
        (checks.iter().any(|check| check.check == "libvirt"), text(&checks))
    };
    assert!(!check(Vec::new()).0, "nobody wants it");
    let (_, shown) = check(vec![connection(None)]);
    assert!(shown.contains("qemu:///system") && !shown.contains("virsh"), "{shown}");
    let (_, shown) = check(vec![connection(Some("qemu:///system: not connected to libvirt: it is off"))]);
    assert!(shown.contains("missing") && shown.contains("it is off") && shown.contains("virsh"), "{shown}");
    let busy = "calls for domains wait for others: it serves `max_client_requests` calls of a client";
    let (_, shown) = check(vec![connection(Some(busy))]);
    assert!(shown.contains("reduced") && shown.contains("raise `max_client_requests`"), "{shown}");
}

#[test]
fn what_is_in_use_is_named_with_why_it_is_not_better() {
    for (name, in_use, passed_over, expected) in [
        (Capability::READINGS, "bpf", &[][..], &[][..]),
        (
            Capability::READINGS,
            "files",
            &[("bpf", "the kernel has no BTF")],
            &["costs more CPU time: bpf: the kernel has no BTF", "6.10"],
        ),
        (
            Capability::PROCESSES,
            "files",
            &[("bpf", "no rights")],
            &["each look costs more CPU time: bpf: no rights"],
        ),
        (
            Capability::IDLE_TIMES,
            "files",
            &[("bpf", "no symbols")],
            &["idle-times: bpf: no symbols", "KALLSYMS"],
        ),
        (
            Capability::IDLE_TIMES,
            "none",
            &[("files", "/proc/stat: missing")],
            &["nothing is moved to idle ones: files: /proc/stat: missing"],
        ),
        (
            Capability::GROUPS,
            "defaults",
            &[("cgroups", "/sys/fs/cgroup/a/cpu.weight: `x`: not a number")],
            &["taken to be the kernel's defaults: cgroups: /sys/fs/cgroup/a/cpu.weight: `x`"],
        ),
        (Capability::SAMPLES, "none", &[("ibs", "no IBS: /sys/x")], &["no IBS: /sys/x", "policy.samples"]),
        (
            Capability::HOTNESS,
            "none",
            &[("damon", "it is in use")],
            &["damon: it is in use", "CONFIG_DAMON_SYSFS"],
        ),
        (
            Capability::PAGE_HOLDS,
            "calls",
            &[("bpf", "no BTF")],
            &["holds of pages that move are timed too long: bpf: no BTF", "CONFIG_DEBUG_INFO_BTF"],
        ),
        (Capability::COUNTERS, "local-remote", &[("per-node", "no events")], &[]),
        (
            Capability::COUNTERS,
            "generic",
            &[("per-node", "no such events")],
            &["per-node: no such events", "a PMU whose events"],
        ),
        (
            Capability::COUNTERS,
            "none",
            &[("generic", "not permitted")],
            &["nothing can be counted", "not permitted", "CAP_PERFMON"],
        ),
    ] {
        let (found, shown) = with(daemon("bpf"), capability(name, in_use, passed_over));
        let level = if expected.is_empty() { Level::Best } else { Level::Reduced };
        assert_eq!(found, (in_use.to_owned(), level), "{name}");
        expected.iter().for_each(|part| assert!(shown.contains(part), "{part} is not in {shown}"));
    }
    let (found, _) = with(daemon("bpf"), capability(Capability::SAMPLES, "ibs", &[]));
    assert_eq!(found, ("ibs, which vnuma's developers could not run".into(), Level::Best));
}

#[test]
fn what_keeps_counters_from_counting_all_is_named() {
    let check = |counters: Counters, in_use, passed_over| {
        with(Daemon { counters, ..daemon("bpf") }, capability(Capability::COUNTERS, in_use, passed_over))
    };
    let why_failed = Some("too many open files".to_owned());
    let failed = Counters { threads: 9, failed: 2, why_failed, ..Counters::default() };
    let (found, shown) = check(failed, "generic", &[]);
    assert_eq!(found, ("generic, 2 of 9 threads are not counted".into(), Level::Reduced));
    assert!(shown.contains("too many open files"), "{shown}");
    let shared = Counters { threads: 9, shared: 3, least_permille: Some(125), ..Counters::default() };
    let (found, shown) = check(shared, "per-node", &[]);
    assert_eq!(found, ("per-node, 3 of 9 threads share counters with others".into(), Level::Reduced));
    assert!(shown.contains("for 12.5 % of its time") && shown.contains("nmi_watchdog"), "{shown}");
    let given_up = Counters { given_up: vec!["per-node".to_owned()], ..Counters::default() };
    let (found, shown) = check(given_up, "local-remote", &[("per-node", "it counted nothing")]);
    assert_eq!(found, ("local-remote, instead of per-node".into(), Level::Reduced));
    assert!(shown.contains("it counted nothing") && shown.contains("nmi_watchdog"), "{shown}");
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
        backend: "qmp".into(),
        described: true,
        hypervisor: Hypervisor::Answers,
        attached: true,
        channel: ChannelState::Attached,
        attach_on_arrival: false,
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
    assert_eq!(checks.len(), 12);
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
    assert!(text.contains("`vnumactl memory web --set both`"), "{text}");
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
    let mut blind = daemon("bpf");
    blind.capabilities[1] = capability(Capability::AFFINITY, "resync", &[("event", "no event")]);
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
        ("inmigrate", None, Level::Reduced),
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

/// A QMP socket is no help to a domain, which has none.
#[test]
fn a_domain_that_cannot_be_asked_leads_to_libvirt() {
    let of = |hypervisor, pid, problem: Option<&str>| {
        let problem = problem.map(str::to_owned);
        let vm = Vm { backend: "libvirt".into(), hypervisor, pid, problem, ..vm("a", &[Some(0), Some(1)]) };
        let checks = examine(&daemon("bpf"), &HostTopology::default(), &[vm]);
        (found(&checks, "connection"), text(&checks))
    };
    let (answers, shown) = of(Hypervisor::Answers, Some(7), None);
    assert_eq!(answers, ("libvirt".into(), Level::Best));
    assert!(!shown.to_lowercase().contains("qmp"), "{shown}");
    for (hypervisor, pid, capability, remedy) in [
        (Hypervisor::Stopped, Some(7), "stopped, observed only", "kill -CONT 7"),
        (Hypervisor::Silent, Some(7), "silent, observed only", "answers `virsh -c URI list`"),
        (Hypervisor::Lost, Some(7), "lost, observed only", "vnumad tries again by itself"),
        (Hypervisor::Lost, None, "lost", "the domain and its file are as vnumad says"),
    ] {
        let (check, shown) = of(hypervisor, pid, Some("the reason"));
        assert_eq!(check.0, capability);
        assert!(shown.contains(remedy) && !shown.to_lowercase().contains("qmp"), "{shown}");
    }
}

#[test]
fn of_two_vms_with_one_name_it_is_said_that_one_needs_another() {
    for backend in ["qmp", "libvirt"] {
        let problem = "its name `web` is taken by the VM at libvirt:u@qemu:///system";
        let (problem, backend) = (Some(problem.to_owned()), backend.to_owned());
        let name = "libvirt:v@qemu:///session";
        let vm = Vm {
            backend,
            hypervisor: Hypervisor::Lost,
            pid: None,
            described: false,
            problem,
            ..vm(name, &[])
        };
        let shown = text(&examine(&daemon("bpf"), &HostTopology::default(), &[vm]));
        assert!(
            shown.contains(name) && shown.contains("remedy: give one of the two VMs another name"),
            "{shown}"
        );
        assert!(!shown.contains("start the VM") && !shown.contains("virsh"), "{shown}");
    }
}

#[test]
fn what_keeps_a_vm_from_another_host_leads_to_the_ways_there() {
    let of = |vm: Vm| examine(&daemon("bpf"), &HostTopology::default(), &[vm]);
    let good = || vm("a", &[Some(0), Some(1)]);
    assert_eq!(found(&of(good()), "migration"), ("vnumactl migrate".into(), Level::Best));
    let detached = of(Vm { channel: ChannelState::None, ..good() });
    assert!(detached.iter().all(|check| check.check != "migration"), "nothing keeps it");
    let domain = of(Vm { backend: "libvirt".into(), ..good() });
    assert_eq!(found(&domain, "migration"), ("vnumactl migrate only".into(), Level::Reduced));
    let with_option = Vm { backend: "libvirt".into(), pid: Some(7), ..good() };
    let with_option = examine_with(&daemon("bpf"), &HostTopology::default(), &[with_option], &|pid| pid == 7);
    assert_eq!(found(&with_option, "migration"), ("any tool".into(), Level::Best));
    let problem = vnuma_api::LibvirtConnection {
        uri: "/run/vnuma/libvirt/channel.sock".into(),
        problem: Some("process 7 serves it as well".into()),
    };
    let not_served = Daemon { libvirt: vec![problem], ..daemon("bpf") };
    let attached = Vm { backend: "libvirt".into(), pid: Some(7), ..good() };
    let not_served = examine_with(&not_served, &HostTopology::default(), &[attached], &|_| true);
    assert_eq!(found(&not_served, "migration"), ("vnumactl migrate only".into(), Level::Reduced));
    let device = vnuma_api::VmDevice {
        host: "0000:81:00.0".into(),
        host_node: None,
        guest: None,
        guest_node: None,
        acked_node: None,
        target_node: None,
        state: vnuma_api::VcpuState::Unknown,
    };
    let pinned = of(Vm { devices: vec![device], ..good() });
    assert_eq!(found(&pinned, "migration"), ("none".into(), Level::Missing));
    let waits = of(Vm { run_state: Some("inmigrate".into()), ..good() });
    for checks in [domain, pinned, waits] {
        assert!(text(&checks).contains("docs/migration.md"), "{}", text(&checks));
    }
}

#[test]
fn a_domain_that_apparmor_keeps_from_the_channel_is_named_with_what_to_do() {
    let domain = |name: &str, pid| Vm {
        backend: "libvirt".into(),
        channel: ChannelState::None,
        pid: Some(pid),
        ..vm(name, &[Some(0), Some(1)])
    };
    let denied = |pid| (pid != 2).then(|| format!("libvirt-{pid}"));
    let vms = [domain("a", 1), domain("free", 2)];
    let checks = crate::confinement::checks(&vms, &denied);
    let [check] = &checks[..] else { panic!("{checks:?}") };
    assert_eq!((check.vm.as_deref(), check.check, check.level), (Some("a"), "apparmor", Level::Missing));
    let shown = text(&checks);
    assert!(
        shown.contains("profile of its QEMU, libvirt-1,") && shown.contains("vnumactl setup --apply"),
        "{shown}"
    );
    // That command does not help everywhere.
    assert!(crate::confinement::RULE.contains(crate::confinement::DIRECTORY));
    assert!(shown.contains("allows /run/vnuma/libvirt: another libvirt.socket_directory needs"), "{shown}");
    let attached = Vm { channel: ChannelState::Attached, ..domain("a", 1) };
    let by_qmp = Vm { backend: "qmp".into(), ..domain("a", 1) };
    assert_eq!(crate::confinement::checks(&[attached, by_qmp], &denied), []);
}

#[test]
fn masks_that_an_earlier_vnumad_has_left_are_named() {
    let why = "an earlier vnumad has confined vCPUs, and that is not undone yet: /run/vnuma/channels/7.masks: version = 2: must be 1";
    let left = Vm { problem: Some(why.to_owned()), ..vm("a", &[Some(0), Some(1)]) };
    let checks = examine(&daemon("bpf"), &HostTopology::default(), &[left]);
    assert_eq!(found(&checks, "masks"), ("an earlier vnumad's".into(), Level::Reduced));
    assert!(text(&checks).contains("7.masks: version = 2"));
    let checks = examine(&daemon("bpf"), &HostTopology::default(), &[vm("a", &[Some(0), Some(1)])]);
    assert!(checks.iter().all(|check| check.check != "masks"));
}
