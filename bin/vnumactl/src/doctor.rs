//! Which rung of each ladder is in use, why, and what would raise it. Everything follows from what vnumad
//! says of itself, the host and its VMs.

use crate::table::{Table, plain};
use serde::Serialize;
use vnuma_api::{ChannelState, Daemon, DriverMode, HostTopology, Hypervisor, Vm};

/// How good a rung is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The highest there is.
    Best,
    /// It works, less well.
    Reduced,
    /// It does not work.
    Missing,
}

/// One ladder of the host or of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rung {
    /// The VM; none for the host.
    pub vm: Option<String>,
    /// What it is about.
    pub ladder: &'static str,
    /// What is in use.
    pub rung: String,
    /// How good that is.
    pub level: Level,
    /// Why it is not better.
    pub why: Option<String>,
    /// What would raise it.
    pub raise: Option<String>,
}

impl Rung {
    fn best(ladder: &'static str, rung: impl Into<String>) -> Self {
        Self { vm: None, ladder, rung: rung.into(), level: Level::Best, why: None, raise: None }
    }

    fn lower(
        level: Level,
        ladder: &'static str,
        rung: &str,
        why: impl Into<String>,
        raise: impl Into<String>,
    ) -> Self {
        let (why, raise) = (Some(why.into()), Some(raise.into()));
        Self { vm: None, ladder, rung: rung.to_owned(), level, why, raise }
    }
}

/// All ladders: the host's first, then those of each VM.
pub fn examine(daemon: &Daemon, host: &HostTopology, vms: &[Vm]) -> Vec<Rung> {
    let mut rungs = vec![nodes(host), locations(daemon), affinity(daemon)];
    for vm in vms {
        let mut of_vm = vec![connection(vm)];
        of_vm.extend(vm.run_state.as_deref().map(|state| guest(vm, state)));
        if vm.described {
            of_vm.push(guest_nodes(vm));
            if !vm.nodes.is_empty() {
                of_vm.extend([homes(vm), channel(vm, daemon.replug_after_s)]);
            }
            if vm.channel == ChannelState::Attached {
                of_vm.push(driver(vm));
            }
        }
        rungs.extend(of_vm.into_iter().map(|rung| Rung { vm: Some(vm.name.clone()), ..rung }));
    }
    rungs
}

fn nodes(host: &HostTopology) -> Rung {
    match host.nodes.len() {
        1 => Rung::lower(
            Level::Reduced,
            "nodes",
            "one",
            "the host's kernel shows a single node: everything is local",
            "nothing, unless the firmware interleaves memory over sockets (\"node interleaving\", NPS0): then turn that off",
        ),
        count => Rung::best("nodes", count.to_string()),
    }
}

fn locations(daemon: &Daemon) -> Rung {
    match (daemon.location_source.as_str(), &daemon.why_not_bpf) {
        ("bpf", _) => Rung::best("locations", "bpf"),
        (source, why) => Rung::lower(
            Level::Reduced,
            "locations",
            source,
            why.clone().unwrap_or_else(|| "no reason is given".to_owned()),
            "run vnumad as root, on a kernel with CONFIG_DEBUG_INFO_BTF, with observe.location = \"auto\"",
        ),
    }
}

fn affinity(daemon: &Daemon) -> Rung {
    if daemon.affinity_events {
        return Rung::best("affinity", "event");
    }
    Rung::lower(
        Level::Reduced,
        "affinity",
        "resync",
        "a change of a thread's affinity alone makes no event here; it is noticed when the vCPU runs or with the next resync",
        "BPF locations, or a shorter observe.resync_interval_ms",
    )
}

fn connection(vm: &Vm) -> Rung {
    if vm.hypervisor == Hypervisor::Answers {
        return Rung::best("connection", "qmp");
    }
    let own_socket = "give vnumad a QMP socket of its own";
    let raise = match (vm.hypervisor, vm.pid) {
        (Hypervisor::Stopped, Some(pid)) => format!("kill -CONT {pid}"),
        (Hypervisor::Stopped, None) => "let its QEMU go on with SIGCONT".to_owned(),
        (Hypervisor::Debugged, _) => "let the debugger go on or detach it".to_owned(),
        (Hypervisor::Silent, _) => {
            format!("{own_socket}, or end the other client; if there is none, QEMU hangs")
        }
        (_, Some(_)) => format!("{own_socket}; vnumad tries again by itself"),
        (_, None) => format!("start the VM, or {own_socket} and the right to use it"),
    };
    let why = vm.problem.as_deref().unwrap_or("no reason is given");
    match vm.pid {
        Some(_) => {
            let rung = format!("{}, observed only", vm.hypervisor);
            Rung::lower(Level::Reduced, "connection", &rung, why, raise)
        }
        None => Rung::lower(Level::Missing, "connection", &vm.hypervisor.to_string(), why, raise),
    }
}

fn guest(vm: &Vm, state: &str) -> Rung {
    let standing = |level, why, raise: &str| Rung::lower(level, "guest", state, why, raise);
    match (state, &vm.problem) {
        ("running", _) => Rung::best("guest", "running"),
        ("paused" | "suspended" | "prelaunch" | "inmigrate" | "postmigrate" | "save-vm", _) => standing(
            Level::Reduced,
            "somebody has it stand still; what it is told waits for it",
            "let it go on (`cont` at a QEMU monitor), or wait until the migration is over",
        ),
        (_, problem) => standing(
            Level::Missing,
            problem.as_deref().unwrap_or("it does not run"),
            "QEMU's log says more; reset or restart the VM",
        ),
    }
}

fn guest_nodes(vm: &Vm) -> Rung {
    match vm.nodes.len() {
        0 => Rung::lower(
            Level::Missing,
            "guest nodes",
            "none",
            "a UMA VM (no -numa): its guest knows no nodes that could be told",
            "start it with -numa, a memory backend for each node",
        ),
        1 => Rung::lower(
            Level::Reduced,
            "guest nodes",
            "one",
            "with a single guest node a vCPU that moves to another host node can only be shown as approximate",
            "start it with as many nodes as host nodes that it may run on (memory can be small)",
        ),
        count => Rung::best("guest nodes", count.to_string()),
    }
}

fn homes(vm: &Vm) -> Rung {
    let list = |nodes: Vec<u32>| nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let homeless: Vec<u32> = vm.nodes.iter().filter(|node| node.home.is_none()).map(|node| node.id).collect();
    let mut homes: Vec<u32> = vm.nodes.iter().filter_map(|node| node.home).collect();
    let count = homes.len();
    homes.sort_unstable();
    homes.dedup();
    if !homeless.is_empty() {
        let level = if homes.is_empty() { Level::Missing } else { Level::Reduced };
        let why = format!("of guest nodes {} it cannot be said where their memory is", list(homeless));
        let raise =
            "bind each node's memory (host-nodes=N,policy=bind), or wait until the guest has touched it";
        return Rung::lower(level, "homes", "some unknown", why, raise);
    }
    if homes.len() < count {
        let why = format!("{count} guest nodes share host nodes {}", list(homes));
        let raise = "bind the memory of each guest node to a host node of its own";
        return Rung::lower(Level::Reduced, "homes", "shared", why, raise);
    }
    Rung::best("homes", "one each")
}

fn channel(vm: &Vm, replug_after_s: Option<u64>) -> Rung {
    let attach = format!("vnumactl attach {}", vm.name);
    match vm.channel {
        ChannelState::Attached => Rung::best("channel", "attached"),
        ChannelState::Attaching => {
            Rung::lower(Level::Reduced, "channel", "attaching", "it is being plugged", "wait")
        }
        ChannelState::None if !vm.spare_slots.is_empty() => Rung::lower(
            Level::Reduced,
            "channel",
            "replug",
            match replug_after_s {
                Some(seconds) => format!(
                    "without a channel its guest learns of a node only by vCPUs that vnumad replugs after {seconds} s (replug.after_s): not vCPU 0, and CPU numbers change"
                ),
                None => format!(
                    "without a channel its guest learns of a node only by `vnumactl replug {} --vcpu N`: for each vCPU, by hand (unless replug.after_s is set), not for vCPU 0, and CPU numbers change",
                    vm.name
                ),
            },
            format!("{attach} (needs a free PCIe root port, and vnuma.ko in the guest)"),
        ),
        ChannelState::None => {
            let raise = format!("{attach} (needs a free PCIe root port)");
            Rung::lower(Level::Missing, "channel", "none", "nothing can be told to its guest", raise)
        }
        ChannelState::Lost => {
            let raise =
                format!("vnumactl detach {}, then {attach}; vnumad's log says what was missing", vm.name);
            let why = "an earlier vnumad's channel could not be taken over";
            Rung::lower(Level::Missing, "channel", "lost", why, raise)
        }
    }
}

fn driver(vm: &Vm) -> Rung {
    let publication = &vm.publication;
    match publication.acknowledged {
        None => Rung::lower(
            Level::Missing,
            "driver",
            "silent",
            "the guest has acknowledged nothing",
            "load vnuma.ko in the guest; if it is there, the guest's kernel log says why it does not act",
        ),
        acknowledged if acknowledged != publication.generation => Rung::lower(
            Level::Reduced,
            "driver",
            "behind",
            "the guest has not acknowledged the last generation yet",
            "nothing if it is busy; otherwise look at the guest's kernel log",
        ),
        _ if publication.driver_mode == Some(DriverMode::Safe) => Rung::lower(
            Level::Reduced,
            "driver",
            "safe",
            "the guest moves a CPU by taking it offline for a moment, and cannot move CPU 0",
            "load vnuma.ko with mode=auto; if it is, its guest's kernel log names the symbols that fast mode lacks",
        ),
        _ => Rung::best("driver", "fast"),
    }
}

/// For people: a table, and below it what can be done.
pub fn text(rungs: &[Rung]) -> String {
    let mut table = Table::new(&["WHERE", "LADDER", "RUNG", "LEVEL"]);
    let place =
        |rung: &Rung| rung.vm.as_deref().map_or_else(|| "host".to_owned(), |vm| format!("VM {}", plain(vm)));
    for rung in rungs {
        let level = match rung.level {
            Level::Best => "best",
            Level::Reduced => "reduced",
            Level::Missing => "missing",
        };
        table.row([place(rung), rung.ladder.to_owned(), plain(&rung.rung), level.to_owned()]);
    }
    let mut text = table.text(0);
    for rung in rungs {
        if let (Some(why), Some(raise)) = (&rung.why, &rung.raise) {
            text += &format!(
                "\n{}, {}: {}\n  to raise it: {}\n",
                place(rung),
                rung.ladder,
                plain(why),
                plain(raise)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use vnuma_api::{Generation, GuestNode, Publication};
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
            watchers: 0,
            watchers_dropped: 0,
        }
    }

    fn vm(name: &str, homes: &[Option<u32>]) -> Vm {
        let node =
            |(id, home): (usize, &Option<u32>)| GuestNode { id: id as u32, home: *home, memory_bytes: 1 };
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
                ..Publication::default()
            },
            spare_slots: BTreeMap::new(),
        }
    }

    fn found(rungs: &[Rung], ladder: &str) -> (String, Level) {
        let rung = rungs.iter().find(|rung| rung.ladder == ladder).unwrap_or_else(|| panic!("no {ladder}"));
        assert_eq!(rung.level == Level::Best, rung.why.is_none() && rung.raise.is_none(), "{rung:?}");
        (rung.rung.clone(), rung.level)
    }

    #[test]
    fn at_the_top_nothing_is_left_to_do() {
        let rungs = examine(&daemon("bpf"), &HostTopology::default(), &[vm("web", &[Some(0), Some(1)])]);
        assert!(rungs.iter().all(|rung| rung.level == Level::Best), "{rungs:?}");
        assert_eq!(rungs.len(), 9);
        assert!(!text(&rungs).contains("to raise it"));
    }

    #[test]
    fn every_lower_rung_says_why_and_what_to_do() {
        let rungs = examine(&daemon("poll"), &HostTopology::default(), &[]);
        assert_eq!(found(&rungs, "locations"), ("poll".into(), Level::Reduced));
        assert_eq!(found(&rungs, "affinity"), ("resync".into(), Level::Reduced));
        let of = |vm: Vm| examine(&daemon("bpf"), &HostTopology::default(), &[vm]);
        assert_eq!(found(&of(vm("a", &[])), "guest nodes"), ("none".into(), Level::Missing));
        assert_eq!(found(&of(vm("a", &[Some(1)])), "guest nodes"), ("one".into(), Level::Reduced));
        let homes = [
            (vec![Some(1), Some(1)], "shared", Level::Reduced),
            (vec![Some(1), None], "some unknown", Level::Reduced),
            (vec![None, None], "some unknown", Level::Missing),
        ];
        for (homes, rung, level) in homes {
            assert_eq!(found(&of(vm("a", &homes)), "homes"), (rung.into(), level));
        }
        for (channel, rung) in [(ChannelState::None, "none"), (ChannelState::Lost, "lost")] {
            let rungs = of(Vm { channel, ..vm("a", &[Some(0), Some(1)]) });
            assert_eq!(found(&rungs, "channel"), (rung.into(), Level::Missing));
            assert!(rungs.iter().all(|rung| rung.ladder != "driver"), "a driver without a channel");
            assert!(text(&rungs).contains("vnumactl attach a"));
        }
        let spare_slots = BTreeMap::from([(1, 2)]);
        let rungs = of(Vm { channel: ChannelState::None, spare_slots, ..vm("a", &[Some(0), Some(1)]) });
        assert_eq!(found(&rungs, "channel"), ("replug".into(), Level::Reduced));
        assert!(text(&rungs).contains("vnumactl replug a --vcpu N"));
        let spare_slots = BTreeMap::from([(1, 2)]);
        let spare = Vm { channel: ChannelState::None, spare_slots, ..vm("a", &[Some(0), Some(1)]) };
        let daemon = Daemon { replug_after_s: Some(7), ..daemon("bpf") };
        let rungs = examine(&daemon, &HostTopology::default(), &[spare]);
        assert!(text(&rungs).contains("vCPUs that vnumad replugs after 7 s"), "{}", text(&rungs));
        for (acknowledged, rung, level) in
            [(None, "silent", Level::Missing), (Some(Generation(4)), "behind", Level::Reduced)]
        {
            let mut vm = vm("a", &[Some(0), Some(1)]);
            vm.publication.acknowledged = acknowledged;
            assert_eq!(found(&of(vm), "driver"), (rung.into(), level));
        }
        let mut vm = vm("a", &[Some(0), Some(1)]);
        vm.publication.driver_mode = Some(DriverMode::Safe);
        assert_eq!(found(&of(vm), "driver"), ("safe".into(), Level::Reduced));
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
            let rungs = examine(&daemon("bpf"), &HostTopology::default(), &[vm]);
            assert_eq!(found(&rungs, "guest"), (state.into(), level));
            assert!(problem.is_none_or(|problem| text(&rungs).contains(problem)));
        }
    }

    #[test]
    fn a_hypervisor_that_cannot_be_asked_is_named_with_what_to_do() {
        for (hypervisor, pid, rung, raise) in [
            (Hypervisor::Stopped, Some(7), "stopped, observed only", "kill -CONT 7"),
            (Hypervisor::Debugged, Some(7), "debugged, observed only", "detach it"),
            (Hypervisor::Silent, Some(7), "silent, observed only", "end the other client"),
            (Hypervisor::Silent, None, "silent", "a QMP socket of its own"),
            (Hypervisor::Lost, Some(7), "lost, observed only", "tries again"),
            (Hypervisor::Lost, None, "lost", "start the VM"),
        ] {
            let problem = Some("the reason".to_owned());
            let known = pid.is_some();
            let vm = Vm { hypervisor, pid, problem, described: known, ..vm("a", &[Some(0), Some(1)]) };
            let rungs = examine(&daemon("bpf"), &HostTopology::default(), &[vm]);
            let level = if known { Level::Reduced } else { Level::Missing };
            assert_eq!(found(&rungs, "connection"), (rung.into(), level));
            let text = text(&rungs);
            assert!(text.contains("connection: the reason\n") && text.contains(raise), "{text}");
            assert_eq!(rungs.iter().any(|rung| rung.ladder == "homes"), known);
        }
    }
}
