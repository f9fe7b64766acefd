//! What a host lacks, by what it has.

use super::{
    Action, Facts, Wishes,
    facts::{Confinement, SOCKETS, UNIT, UNUSED_LIBVIRT, huge_pages_path},
};
use crate::{
    confinement::RULE,
    doctor::{Check, Level},
};

/// vnumad's configuration.
const CONFIGURATION: &str = "/etc/vnuma/vnumad.toml";
/// What keeps settings over a boot.
const SYSCTL: &str = "/etc/sysctl.d/60-vnuma.conf";
const TMPFILES: &str = "/etc/tmpfiles.d/vnuma-huge-pages.conf";
/// Where AppArmor's rule goes: what newer profiles for libvirt's QEMUs include, and what all do.
const DROP_IN: &str = "/etc/apparmor.d/abstractions/libvirt-qemu.d/vnuma";
const OPERATORS: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";
/// Controllers that policies read weights and limits from, and that VMs are confined by.
const CONTROLLERS: [&str; 3] = ["cpu", "cpuset", "memory"];

/// Checks, and actions with the check that asks for each.
#[derive(Debug, Default)]
pub struct Plan {
    pub checks: Vec<Check>,
    pub actions: Vec<(&'static str, Action)>,
}

impl Plan {
    fn add(&mut self, check: Check, actions: impl IntoIterator<Item = Action>) {
        let name = check.check;
        self.checks.push(check);
        self.actions.extend(actions.into_iter().map(|action| (name, action)));
    }
}

/// What there is to say, and to do.
pub fn plan(facts: &Facts, wishes: &Wishes) -> Plan {
    let mut plan = Plan::default();
    kvm(&mut plan, facts);
    plan.add(groups(facts), []);
    plan.add(bpf(facts), []);
    plan.add(tracing(facts), []);
    plan.add(pmu(facts), []);
    plan.add(sched_ext(facts), []);
    balancing(&mut plan, facts, wishes);
    huge_pages(&mut plan, facts, wishes);
    sockets(&mut plan, facts);
    libvirt(&mut plan, facts);
    facts.confinement.iter().for_each(|confinement| apparmor(&mut plan, confinement));
    service(&mut plan, facts);
    plan
}

fn words(line: &str) -> Action {
    Action::Run(line.split(' ').map(str::to_owned).collect())
}

fn kvm(plan: &mut Plan, facts: &Facts) {
    let missing = |why: &str, remedy: &str| Check::lower(Level::Missing, "kvm", "none", why, remedy);
    match (facts.kvm, facts.virtualization) {
        (true, _) => plan.add(Check::best("kvm", "/dev/kvm"), []),
        (false, None) => plan.add(
            missing(
                "the CPU shows neither svm nor vmx",
                "enable virtualization in the firmware (in a VM: nested virtualization on its host)",
            ),
            [],
        ),
        (false, Some(flag)) => {
            let load = if flag == "svm" { "modprobe kvm_amd" } else { "modprobe kvm_intel" };
            plan.add(missing("there is no /dev/kvm: the module is not loaded", load), [words(load)]);
        }
    }
}

fn groups(facts: &Facts) -> Check {
    let remedy = "boot without systemd.unified_cgroup_hierarchy=0 and cgroup_no_v1=, cgroup_disable=";
    let Some(controllers) = &facts.controllers else {
        let why = "control groups of version 2 are not mounted: weights and limits of VMs are taken to be the defaults";
        return Check::lower(Level::Reduced, "cgroups", "none", why, remedy);
    };
    let lacking: Vec<&str> =
        CONTROLLERS.into_iter().filter(|name| !controllers.iter().any(|known| known == name)).collect();
    match lacking.is_empty() {
        true => Check::best("cgroups", "version 2"),
        false => {
            let why = format!("there is no controller {}", lacking.join(", "));
            Check::lower(Level::Reduced, "cgroups", "version 2", why, remedy)
        }
    }
}

fn bpf(facts: &Facts) -> Check {
    if !facts.btf {
        let why = "the kernel has no BTF: vCPUs' locations are polled";
        return Check::lower(Level::Reduced, "bpf", "none", why, "a kernel with CONFIG_DEBUG_INFO_BTF");
    }
    if !facts.bpf_file_system {
        let remedy = "mount -t bpf bpf /sys/fs/bpf (systemd does)";
        return Check::lower(
            Level::Reduced,
            "bpf",
            "no file system",
            "scx_vnuma cannot pin its maps",
            remedy,
        );
    }
    Check::best("bpf", "BTF")
}

/// Rights to look into QEMUs, and what KVM shows of its vCPUs.
fn tracing(facts: &Facts) -> Check {
    if facts.ptrace_scope == Some(3) {
        return Check::lower(
            Level::Reduced,
            "tracing",
            "off",
            "with kernel.yama.ptrace_scope = 3 the next vnumad cannot take over the channels of one that was stopped",
            "set it to 2 or less in /etc/sysctl.d, and boot",
        );
    }
    if !facts.debug_file_system {
        return Check::lower(
            Level::Reduced,
            "tracing",
            "no debugfs",
            "vCPUs of a QEMU that does not answer are known by the names of their threads only",
            "mount -t debugfs debugfs /sys/kernel/debug (systemd does)",
        );
    }
    Check::best("tracing", "allowed")
}

fn pmu(facts: &Facts) -> Check {
    match (facts.perf_event_paranoid, facts.pmu) {
        (None, _) => {
            let why = "the kernel has no perf events, so that policies cannot count";
            Check::lower(Level::Reduced, "perf events", "none", why, "a kernel with CONFIG_PERF_EVENTS")
        }
        (Some(_), false) => Check::lower(
            Level::Reduced,
            "perf events",
            "software",
            "the kernel shows no PMU of the CPU, so that policies take the place of memory for that of its accesses",
            "in a VM, have its hypervisor show a PMU",
        ),
        // Whatever the level is: vnumad has CAP_PERFMON.
        (Some(level), true) => Check::best("perf events", format!("PMU, perf_event_paranoid {level}")),
    }
}

fn sched_ext(facts: &Facts) -> Check {
    match (facts.sched_ext, facts.scheduler.as_deref()) {
        (false, _) => Check::lower(
            Level::Reduced,
            "sched_ext",
            "none",
            "the kernel has no sched_ext: policies set affinities, once a period",
            "Linux 7.0 or newer with CONFIG_SCHED_CLASS_EXT",
        ),
        (true, Some("vnuma")) => Check::best("sched_ext", "scx_vnuma"),
        (true, Some(other)) => {
            let why = format!("another scheduler is loaded, {other}: policies set affinities");
            let remedy = "stop it, then: systemctl enable --now scx_vnuma.service";
            Check::lower(Level::Reduced, "sched_ext", "another", why, remedy)
        }
        (true, None) => Check::lower(
            Level::Reduced,
            "sched_ext",
            "unused",
            "scx_vnuma is not loaded: policies set affinities, once a period",
            "if VMs get a policy: systemctl enable --now scx_vnuma.service",
        ),
    }
}

fn balancing(plan: &mut Plan, facts: &Facts, wishes: &Wishes) {
    let check = match facts.numa_balancing {
        None | Some(0) => Check::best("numa balancing", "off"),
        Some(_) => Check::lower(
            Level::Reduced,
            "numa balancing",
            "on",
            "the kernel moves memory of VMs that is not bound; policies and it work against each other",
            "bind the memory of VMs, or: vnumactl setup --no-numa-balancing --apply",
        ),
    };
    let wanted = wishes.no_numa_balancing && check.level != Level::Best;
    let actions = [
        Action::Set { path: "/proc/sys/kernel/numa_balancing".into(), value: "0".into() },
        Action::Keep { path: SYSCTL.into(), line: "kernel.numa_balancing = 0".into() },
    ];
    plan.add(check, actions.into_iter().filter(|_| wanted));
}

fn huge_pages(plan: &mut Plan, facts: &Facts, wishes: &Wishes) {
    let counts: Vec<String> =
        facts.huge_pages.iter().map(|pages| format!("{} on node {}", pages.total, pages.node)).collect();
    let reserved = facts.huge_pages.iter().any(|pages| pages.total > 0);
    let too_few = |wanted: u64| facts.huge_pages.iter().any(|pages| pages.total < wanted);
    let check = match wishes.huge_pages {
        Some(wanted) if too_few(wanted) => Check::lower(
            Level::Missing,
            "huge pages",
            &counts.join(", "),
            format!("{wanted} of each node are wanted"),
            "free memory of the node, or reserve them at boot (hugepages=N:COUNT)",
        ),
        _ if reserved => Check::best("huge pages", counts.join(", ")),
        _ => Check::lower(
            Level::Reduced,
            "huge pages",
            "none",
            "no memory is reserved for huge pages, which VMs would take fewer TLB misses with",
            "vnumactl setup --huge-pages SIZE --apply",
        ),
    };
    let wanted = wishes.huge_pages.filter(|wanted| too_few(*wanted));
    let path = |node| huge_pages_path(node);
    let set = facts.huge_pages.iter().flat_map(|pages| {
        let wanted = wanted.filter(|wanted| pages.total < *wanted)?;
        Some(Action::Set { path: path(pages.node), value: wanted.to_string() })
    });
    let lines: Vec<String> = facts
        .huge_pages
        .iter()
        .filter_map(|pages| Some(format!("w {} - - - - {}", path(pages.node), wanted?.max(pages.total))))
        .collect();
    let keep = (!lines.is_empty()).then(|| Action::Keep { path: TMPFILES.into(), line: lines.join("\n") });
    let actions: Vec<Action> = set.chain(keep).collect();
    plan.add(check, actions);
}

fn sockets(plan: &mut Plan, facts: &Facts) {
    match facts.sockets {
        true => plan.add(Check::best("sockets", SOCKETS), []),
        false => {
            let why = format!("there is no {SOCKETS}, where QEMUs put their QMP sockets for vnumad");
            let remedy = format!("install -d -m 755 {SOCKETS}");
            let check = Check::lower(Level::Missing, "sockets", "none", why, remedy);
            plan.add(check, [Action::MakeDirectory(SOCKETS.into())]);
        }
    }
}

/// What an operator has written is left as it is.
fn libvirt(plan: &mut Plan, facts: &Facts) {
    let line = "uris = [\"qemu:///system\"]";
    match facts.libvirt {
        None => {}
        Some(true) => plan.add(Check::best("libvirt", "named"), []),
        Some(false) => {
            let check = Check::lower(
                Level::Reduced,
                "libvirt",
                "unused",
                "there is a libvirt here, and vnumad's configuration names no connection to it: domains are not found",
                format!("{line} in [libvirt] of {CONFIGURATION}, then: systemctl restart {UNIT}"),
            );
            let pattern = UNUSED_LIBVIRT.replace('[', "\\[").replace(']', "\\]");
            let change = ["sed", "-i", &format!("s|^{pattern}$|{line}|"), CONFIGURATION].map(str::to_owned);
            let actions = [Action::Run(change.into()), words(&format!("systemctl try-restart {UNIT}"))];
            plan.add(check, actions.into_iter().filter(|_| facts.libvirt_line));
        }
    }
}

/// May QEMUs of domains connect to vnumad's sockets?
fn apparmor(plan: &mut Plan, confinement: &Confinement) {
    let (why, capability) = match (confinement.rule, confinement.without.len()) {
        (true, 0) => return plan.add(Check::best("apparmor", "allowed"), []),
        (true, count) => (
            format!(
                "profiles of domains that run ({count}) were made before they had the rule for vnumad's sockets"
            ),
            "domains that run: denied",
        ),
        (false, _) => (
            "libvirt's profiles do not let QEMU connect to vnumad's sockets: domains cannot be attached where they ask for that"
                .to_owned(),
            "denied",
        ),
    };
    let line = RULE.to_owned();
    let rule = match confinement.drop_ins {
        true => Action::Keep { path: DROP_IN.into(), line },
        false => Action::Append { path: OPERATORS.into(), line },
    };
    let reload = |profile: &String| {
        Action::Run(
            ["apparmor_parser", "--replace", &format!("/etc/apparmor.d/libvirt/{profile}")]
                .map(str::to_owned)
                .into(),
        )
    };
    let actions: Vec<Action> = (!confinement.rule)
        .then_some(rule)
        .into_iter()
        .chain(confinement.without.iter().map(reload))
        .collect();
    let check = Check::lower(Level::Missing, "apparmor", capability, why, "vnumactl setup --apply");
    plan.add(check, actions);
}

fn service(plan: &mut Plan, facts: &Facts) {
    let lower = |level, capability: &str, why: &str, remedy: &str| {
        Check::lower(level, "service", capability, why.to_owned(), remedy)
    };
    let Some(unit) = facts.unit.as_ref().filter(|_| facts.systemd) else {
        let (why, remedy) = match facts.systemd {
            true => ("systemctl cannot be asked", "see that systemctl runs"),
            false => ("systemd does not run here", "have vnumad started at boot by what does"),
        };
        plan.add(lower(Level::Reduced, "unknown", why, remedy), []);
        return;
    };
    let enable = "systemctl enable --now vnumad.service";
    match (unit.loaded.as_str(), unit.enabled.as_str(), unit.active.as_str()) {
        ("loaded", "enabled" | "static" | "enabled-runtime", "active") => {
            plan.add(Check::best("service", "active"), []);
        }
        ("loaded", _, "active") => {
            let why = "vnumad runs, and is not started at boot";
            plan.add(lower(Level::Reduced, "not enabled", why, enable), [words(enable)]);
        }
        ("loaded", _, state) => {
            let state = if state.is_empty() { "unknown" } else { state };
            plan.add(lower(Level::Missing, state, "vnumad does not run", enable), [words(enable)]);
        }
        (state, ..) => {
            let why = format!("systemd has no {UNIT} that it could start ({state})");
            let remedy = "install the package vnuma-host (systemctl unmask it, if it is masked)";
            plan.add(lower(Level::Missing, "none", &why, remedy), []);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::facts::{HugePages, Unit},
        *,
    };

    fn ready() -> Facts {
        Facts {
            virtualization: Some("svm"),
            kvm: true,
            controllers: Some(CONTROLLERS.map(str::to_owned).into()),
            btf: true,
            bpf_file_system: true,
            debug_file_system: true,
            ptrace_scope: Some(1),
            perf_event_paranoid: Some(3),
            pmu: true,
            sched_ext: true,
            scheduler: Some("vnuma".into()),
            numa_balancing: Some(0),
            huge_pages: vec![HugePages { node: 0, total: 8 }, HugePages { node: 1, total: 8 }],
            sockets: true,
            libvirt: Some(true),
            libvirt_line: false,
            confinement: Some(Confinement { drop_ins: true, rule: true, without: Vec::new() }),
            systemd: true,
            unit: Some(Unit { loaded: "loaded".into(), enabled: "enabled".into(), active: "active".into() }),
        }
    }

    fn commands(facts: &Facts, wishes: &Wishes) -> Vec<String> {
        plan(facts, wishes).actions.iter().map(|(_, action)| action.to_string()).collect()
    }

    #[test]
    fn a_host_that_has_everything_needs_nothing() {
        let plan = plan(&ready(), &Wishes::default());
        assert!(plan.checks.iter().all(|check| check.level == Level::Best), "{:?}", plan.checks);
        assert_eq!(plan.checks.len(), 12);
        assert!(plan.actions.is_empty());
    }

    /// A check, how bad it is, a host of which that is so, and the commands that help.
    type Lack = (&'static str, Level, Facts, Vec<&'static str>);

    /// If a host lacks something, only the check for that is worse. The check then says why, and what to do.
    fn are_found(lacks: Vec<Lack>) {
        for (name, level, facts, expected) in lacks {
            let plan = plan(&facts, &Wishes::default());
            let worse: Vec<_> = plan.checks.iter().filter(|check| check.level != Level::Best).collect();
            let [check] = worse[..] else { panic!("{name}: {worse:?}") };
            assert_eq!((check.check, check.level), (name, level), "{facts:?}");
            assert!(check.why.is_some() && check.remedy.is_some());
            assert_eq!(commands(&facts, &Wishes::default()), expected, "{facts:?}");
        }
    }

    #[test]
    fn what_the_kernel_lacks_is_found() {
        are_found(vec![
            ("kvm", Level::Missing, Facts { kvm: false, ..ready() }, vec!["modprobe kvm_amd"]),
            (
                "kvm",
                Level::Missing,
                Facts { kvm: false, virtualization: Some("vmx"), ..ready() },
                vec!["modprobe kvm_intel"],
            ),
            ("kvm", Level::Missing, Facts { kvm: false, virtualization: None, ..ready() }, vec![]),
            ("cgroups", Level::Reduced, Facts { controllers: None, ..ready() }, vec![]),
            ("cgroups", Level::Reduced, Facts { controllers: Some(vec!["cpu".into()]), ..ready() }, vec![]),
            ("bpf", Level::Reduced, Facts { btf: false, ..ready() }, vec![]),
            ("bpf", Level::Reduced, Facts { bpf_file_system: false, ..ready() }, vec![]),
            ("tracing", Level::Reduced, Facts { ptrace_scope: Some(3), ..ready() }, vec![]),
            ("tracing", Level::Reduced, Facts { debug_file_system: false, ..ready() }, vec![]),
            ("perf events", Level::Reduced, Facts { perf_event_paranoid: None, ..ready() }, vec![]),
            ("perf events", Level::Reduced, Facts { pmu: false, ..ready() }, vec![]),
            ("sched_ext", Level::Reduced, Facts { sched_ext: false, scheduler: None, ..ready() }, vec![]),
            ("sched_ext", Level::Reduced, Facts { scheduler: None, ..ready() }, vec![]),
            ("sched_ext", Level::Reduced, Facts { scheduler: Some("rusty".into()), ..ready() }, vec![]),
            ("numa balancing", Level::Reduced, Facts { numa_balancing: Some(1), ..ready() }, vec![]),
            ("huge pages", Level::Reduced, Facts { huge_pages: vec![], ..ready() }, vec![]),
            (
                "sockets",
                Level::Missing,
                Facts { sockets: false, ..ready() },
                vec!["install -d -m 755 /run/vnuma/qmp"],
            ),
        ]);
    }

    #[test]
    fn what_libvirt_and_apparmor_lack_is_found() {
        are_found(vec![
            ("libvirt", Level::Reduced, Facts { libvirt: Some(false), ..ready() }, vec![]),
            (
                "libvirt",
                Level::Reduced,
                Facts { libvirt: Some(false), libvirt_line: true, ..ready() },
                vec![
                    r#"sed -i 's|^#uris = \[\]$|uris = ["qemu:///system"]|' /etc/vnuma/vnumad.toml"#,
                    "systemctl try-restart vnumad.service",
                ],
            ),
            (
                "apparmor",
                Level::Missing,
                Facts {
                    confinement: Some(Confinement { drop_ins: true, ..Confinement::default() }),
                    ..ready()
                },
                vec![
                    "echo '/run/vnuma/libvirt/*.sock rw,' > /etc/apparmor.d/abstractions/libvirt-qemu.d/vnuma",
                ],
            ),
            (
                "apparmor",
                Level::Missing,
                Facts {
                    confinement: Some(Confinement {
                        without: vec!["libvirt-a".into()],
                        ..Confinement::default()
                    }),
                    ..ready()
                },
                vec![
                    "echo '/run/vnuma/libvirt/*.sock rw,' >> /etc/apparmor.d/local/abstractions/libvirt-qemu",
                    "apparmor_parser --replace /etc/apparmor.d/libvirt/libvirt-a",
                ],
            ),
            (
                "apparmor",
                Level::Missing,
                Facts {
                    confinement: Some(Confinement {
                        drop_ins: true,
                        rule: true,
                        without: vec!["libvirt-a".into()],
                    }),
                    ..ready()
                },
                vec!["apparmor_parser --replace /etc/apparmor.d/libvirt/libvirt-a"],
            ),
        ]);
    }

    #[test]
    fn what_the_service_lacks_is_found() {
        let unit = |loaded: &str, enabled: &str, active: &str| {
            Some(Unit { loaded: loaded.into(), enabled: enabled.into(), active: active.into() })
        };
        let enable = "systemctl enable --now vnumad.service";
        are_found(vec![
            ("service", Level::Reduced, Facts { systemd: false, unit: None, ..ready() }, vec![]),
            ("service", Level::Reduced, Facts { unit: None, ..ready() }, vec![]),
            ("service", Level::Missing, Facts { unit: unit("not-found", "", "inactive"), ..ready() }, vec![]),
            (
                "service",
                Level::Missing,
                Facts { unit: unit("masked", "masked", "inactive"), ..ready() },
                vec![],
            ),
            (
                "service",
                Level::Missing,
                Facts { unit: unit("loaded", "disabled", "inactive"), ..ready() },
                vec![enable],
            ),
            (
                "service",
                Level::Missing,
                Facts { unit: unit("loaded", "enabled", "failed"), ..ready() },
                vec![enable],
            ),
            (
                "service",
                Level::Reduced,
                Facts { unit: unit("loaded", "disabled", "active"), ..ready() },
                vec![enable],
            ),
        ]);
    }

    #[test]
    fn what_only_an_operator_can_want_is_done_on_request() {
        let facts = Facts { numa_balancing: Some(1), ..ready() };
        let wishes = Wishes { no_numa_balancing: true, huge_pages: None };
        assert_eq!(
            commands(&facts, &wishes),
            [
                "echo 0 > /proc/sys/kernel/numa_balancing",
                "echo 'kernel.numa_balancing = 0' > /etc/sysctl.d/60-vnuma.conf",
            ]
        );
        assert!(commands(&ready(), &wishes).is_empty());
        let wishes = Wishes { huge_pages: Some(10), ..Wishes::default() };
        let facts = Facts {
            huge_pages: vec![HugePages { node: 0, total: 16 }, HugePages { node: 2, total: 8 }],
            ..ready()
        };
        let path = |node| huge_pages_path(node);
        // A node with more pages than are wanted keeps them, after a reboot as well.
        assert_eq!(
            commands(&facts, &wishes),
            [
                format!("echo 10 > {}", path(2)),
                format!("echo 'w {} - - - - 16\nw {} - - - - 10' > {TMPFILES}", path(0), path(2)),
            ]
        );
        assert!(commands(&facts, &Wishes { huge_pages: Some(8), ..Wishes::default() }).is_empty());
        let check = plan(&facts, &wishes).checks.into_iter().find(|check| check.check == "huge pages");
        assert_eq!(check.expect("checked").level, Level::Missing);
    }
}
