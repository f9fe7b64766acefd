//! Checks of the host and of each VM: which capability is in use, why it is not the best one, and what would help.
//! They use nothing but what vnumad reports of itself, the host and its VMs ([`confinement`](crate::confinement) has one besides).

use crate::{
    table::{Table, plain},
    vms::{displaced, error_text},
};
use serde::Serialize;
use vnuma_api::{
    Capability, ChannelState, Daemon, DriverMode, HangingLook, HostTopology, Hypervisor, LibvirtConnection,
    Limited, PlaceSetting, Vm,
};

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

/// Ends the name of the socket of domains that take their channels along, where vnumad cannot serve it.
const COMMON_SOCKET: &str = "/channel.sock";

/// The setting of libvirt's daemon that says how many calls of a client it serves at a time.
const CLIENT_LIMIT: &str = "max_client_requests";

/// All checks: the host's first, then those of each VM.
pub fn examine(daemon: &Daemon, host: &HostTopology, vms: &[Vm]) -> Vec<Check> {
    examine_with(daemon, host, vms, &|_| false)
}

/// The same. `sends`: does the QEMU of a process send the channel's device with its VM?
pub fn examine_with(
    daemon: &Daemon,
    host: &HostTopology,
    vms: &[Vm],
    sends: &dyn Fn(i32) -> bool,
) -> Vec<Check> {
    // A domain that was attached meanwhile is not one that libvirt migrates.
    let served =
        daemon.libvirt.iter().all(|part| part.problem.is_none() || !part.uri.ends_with(COMMON_SOCKET));
    let sends = |pid| served && sends(pid);
    let mut checks = vec![nodes(host)];
    checks.extend(CAPABILITIES.into_iter().filter_map(|of| capability(daemon, of)));
    if daemon.capabilities.is_empty() {
        let why = "this vnumad does not say what it uses: it is older than vnumactl";
        checks.push(Check::lower(Level::Reduced, "capabilities", "unknown", why, "restart vnumad"));
    }
    checks.extend(daemon.libvirt.iter().map(libvirt));
    checks.extend(silent_threads(daemon));
    checks.extend(daemon.hanging_looks.iter().map(hanging_look));
    checks.extend(daemon.limited.iter().map(limited));
    for vm in vms {
        let mut of_vm = vec![connection(vm)];
        of_vm.extend(vm.run_state.as_deref().map(|state| guest(vm, state)));
        of_vm.extend(masks(vm));
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
                of_vm.push(migration(vm, &sends));
            }
        }
        checks.extend(of_vm.into_iter().map(|check| Check { vm: Some(vm.name.clone()), ..check }));
    }
    checks
}

/// Threads of vnumad that make no progress, if there are any.
fn silent_threads(daemon: &Daemon) -> Option<Check> {
    (!daemon.silent_threads.is_empty()).then(|| {
        let names = daemon.silent_threads.join(", ");
        let remedy =
            "see vnumad's log for since when; if it lasts, restart vnumad: VMs keep what was published";
        Check::lower(Level::Missing, "threads", "silent", format!("no progress: {names}"), remedy)
    })
}

/// A party for which more work is wanted than is done for one.
fn limited(of: &Limited) -> Check {
    let why = format!("{} had to wait {} times: {}", of.party, of.times, of.work);
    let remedy =
        "see what it does; vnumad does no more than this for one party, and serves the others as before";
    Check::lower(Level::Reduced, "limited", "waits", why, remedy)
}

/// A look at a VM's process that has not returned.
fn hanging_look(look: &HangingLook) -> Check {
    let HangingLook { vm, pid, thread, seconds } = look;
    let why = format!("process {pid} does not answer looks: {thread} has waited for it for {seconds} s");
    let remedy = format!(
        "see what process {pid} waits for (cat /proc/{pid}/task/*/wchan): often storage that does not answer; it goes on as soon as \
         that does"
    );
    Check { vm: vm.clone(), ..Check::lower(Level::Reduced, "looks", "hang", why, remedy) }
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

const PMU: &str = "use a host whose PMU is visible (in a VM: its hypervisor has to show it), run vnumad with CAP_PERFMON, and see \
                   that perf_event_open is allowed (kernel.perf_event_paranoid)";
const BY_BPF: &str = "run vnumad as root, with observe.location = \"auto\", on Linux 6.10 or newer with CONFIG_DEBUG_INFO_BTF and \
                      CONFIG_KALLSYMS_ALL";

/// Capabilities as they are shown: which ways are good enough, what the last resort costs, and what would help.
const CAPABILITIES: [(&str, &[&str], [&str; 2], &str); 11] = [
    (
        Capability::LOCATIONS,
        &["bpf"],
        ["", ""],
        "run vnumad as root, on a kernel with CONFIG_DEBUG_INFO_BTF, with observe.location = \"auto\"",
    ),
    (Capability::AFFINITY, &["event"], ["", ""], "BPF locations, or a shorter observe.resync_interval_ms"),
    (Capability::PROCESSES, &["bpf"], ["files", "each look costs more CPU time: "], BY_BPF),
    (
        Capability::COUNTERS,
        &["per-node", "local-remote"],
        [
            "none",
            "nothing can be counted, so that policies take the place of a VM's pages for that of its accesses: ",
        ],
        "a PMU whose events tell local memory from remote memory",
    ),
    (Capability::PAGE_HOLDS, &["bpf"], ["calls", "holds of pages that move are timed too long: "], BY_BPF),
    (Capability::READINGS, &["bpf"], ["files", "each period of the policies costs more CPU time: "], BY_BPF),
    (
        Capability::IDLE_TIMES,
        &["bpf"],
        ["none", "how long CPUs are idle is not known, so that nothing is moved to idle ones: "],
        BY_BPF,
    ),
    (
        Capability::GROUPS,
        &["cgroups"],
        ["defaults", "cpu.weight and cpu.max of some VMs are taken to be the kernel's defaults: "],
        "correct what is wrong with that control group",
    ),
    (
        Capability::SAMPLES,
        &["ibs"],
        ["", ""],
        "set policy.samples to \"off\", or run vnumad on a host with an AMD CPU and Linux 6.2 or newer",
    ),
    (
        Capability::HOTNESS,
        &["damon"],
        ["none", "displaced memory is moved without regard to how hot it is: "],
        "run vnumad on Linux 6.2 or newer with CONFIG_DAMON_SYSFS and CONFIG_DAMON_VADDR, and end other users of DAMON",
    ),
    (
        Capability::PLACES,
        &[PlaceSetting::SCHEDULER],
        ["", ""],
        "run scx_vnuma, on Linux 7.0 or newer with sched_ext: then idle CPUs take vCPUs that wait at once, not once a period",
    ),
];

/// A capability of vnumad, if it is one that is in use now.
fn capability(
    daemon: &Daemon,
    (name, enough, [worst, costs], remedy): (&'static str, &[&str], [&str; 2], &'static str),
) -> Option<Check> {
    let found = daemon.capabilities.iter().find(|found| found.name == name)?;
    let in_use = found.in_use.as_str();
    let shown = match (name, in_use) {
        (Capability::PLACES, PlaceSetting::SCHEDULER) => {
            format!("{in_use}, {}", if daemon.places.full { "full" } else { "partial" })
        }
        (Capability::SAMPLES, "ibs") => format!("{in_use}, which vnuma's developers could not run"),
        _ => in_use.to_owned(),
    };
    let counters = if name == Capability::COUNTERS { counters(daemon, found) } else { None };
    Some(match (counters, found.why_not(in_use)) {
        (Some(check), _) => check,
        (None, None) if enough.contains(&in_use) => Check::best(name, shown),
        (None, Some(why)) if name == Capability::PLACES => Check::lower(
            Level::Reduced,
            name,
            &format!("{shown}; affinity for some vCPUs"),
            why,
            "leave the vCPUs of VMs with a policy in class SCHED_OTHER (chrt --other --pid 0 THREAD)",
        ),
        (None, _) => {
            let why = found.why().unwrap_or_else(|| "no reason is given".to_owned());
            let costs = if in_use == worst { costs } else { "" };
            let remedy = match (name, in_use) {
                (Capability::COUNTERS, "none") => PMU,
                (Capability::AFFINITY, _) if daemon.location_source == "bpf" => {
                    "a kernel in which BPF can trace __set_cpus_allowed_ptr(), or a shorter observe.resync_interval_ms"
                }
                _ => remedy,
            };
            Check::lower(Level::Reduced, name, &shown, format!("{costs}{why}"), remedy)
        }
    })
}

/// What keeps counters from counting all that the source in use could.
fn counters(daemon: &Daemon, found: &Capability) -> Option<Check> {
    let counters = &daemon.counters;
    let (source, threads) = (&found.in_use, counters.threads);
    let lower = |capability: String, why, remedy| {
        Some(Check::lower(Level::Reduced, Capability::COUNTERS, &capability, why, remedy))
    };
    if let Some(why) = counters.why_failed.clone().filter(|_| counters.failed > 0) {
        return lower(
            format!("{source}, {} of {threads} threads are not counted", counters.failed),
            why,
            PMU.to_owned(),
        );
    }
    let others = "end other users of the PMU (perf, other agents, the watchdog of kernel.nmi_watchdog)";
    if let Some(permille) = counters.least_permille.filter(|_| counters.shared > 0) {
        let why = format!(
            "one was counted for {:.1} % of its time on a CPU only; figures are scaled up, and there are none at 0 %",
            f64::from(permille) / 10.0
        );
        let capability =
            format!("{source}, {} of {threads} threads share counters with others", counters.shared);
        return lower(capability, why, others.to_owned());
    }
    if counters.given_up.is_empty() {
        return None;
    }
    let remedy = format!("{others}; in a VM, see that the PMU which its hypervisor shows counts");
    lower(
        format!("{source}, instead of {}", counters.given_up.join(", ")),
        found.why().unwrap_or_default(),
        remedy,
    )
}

/// Is a libvirt that the configuration names there?
fn libvirt(connection: &LibvirtConnection) -> Check {
    match &connection.problem {
        None => Check::best("libvirt", connection.uri.clone()),
        Some(why) if why.contains(CLIENT_LIMIT) => Check::lower(
            Level::Reduced,
            "libvirt",
            &connection.uri,
            why.clone(),
            "resume or end domains that hang (`vnumactl list`), or raise `max_client_requests` and `max_workers` in libvirtd.conf or virtqemud.conf",
        ),
        Some(why) => Check::lower(
            Level::Missing,
            "libvirt",
            &connection.uri,
            why.clone(),
            "see that libvirt's daemon runs and answers `virsh -c URI list` (docs/libvirt.md#errors); domains that vnumad knows are watched on",
        ),
    }
}

fn connection(vm: &Vm) -> Check {
    let by_libvirt = vm.backend == "libvirt";
    if vm.hypervisor == Hypervisor::Answers {
        return Check::best("connection", if by_libvirt { "libvirt" } else { "qmp" });
    }
    let why = vm.problem.as_deref().unwrap_or("no reason is given");
    let remedy = match (vm.hypervisor, vm.pid) {
        (Hypervisor::Stopped, Some(pid)) => format!("kill -CONT {pid}"),
        (Hypervisor::Stopped, None) => "resume its QEMU with SIGCONT".to_owned(),
        (Hypervisor::Debugged, _) => "resume it in the debugger, or detach the debugger".to_owned(),
        _ if why.contains(NAME_TAKEN) => "give one of the two VMs another name".to_owned(),
        (hypervisor, pid) if by_libvirt => of_libvirt(hypervisor, pid),
        (hypervisor, pid) => of_socket(hypervisor, pid),
    };
    match vm.pid {
        Some(_) => {
            let capability = format!("{}, observed only", vm.hypervisor);
            Check::lower(Level::Reduced, "connection", &capability, why, remedy)
        }
        None => Check::lower(Level::Missing, "connection", &vm.hypervisor.to_string(), why, remedy),
    }
}

/// What vnumad says of a VM whose vCPUs have CPUs of an earlier vnumad's policies.
const CONFINED: &str = "has confined vCPUs";

/// The CPUs of its vCPUs, if they are not its operator's and no policy of this vnumad has set them.
fn masks(vm: &Vm) -> Option<Check> {
    let why = vm.problem.as_deref().filter(|problem| problem.contains(CONFINED))?;
    let remedy = "start the vnumad that has written the record, or set the CPUs by hand (`taskset`) and remove the file (docs/vnumad.md)";
    Some(Check::lower(Level::Reduced, "masks", "an earlier vnumad's", why, remedy))
}

/// What vnumad says of a VM that is not managed, as another one has its name.
const NAME_TAKEN: &str = " is taken by the VM at ";

/// What helps if the QEMU of a socket cannot be asked.
fn of_socket(hypervisor: Hypervisor, pid: Option<i32>) -> String {
    let own_socket = "give vnumad a QMP socket of its own";
    match (hypervisor, pid) {
        (Hypervisor::Silent, _) => {
            format!("{own_socket}, or end the other client; if there is none, QEMU hangs")
        }
        (_, Some(_)) => format!("{own_socket}; vnumad tries again by itself"),
        (_, None) => format!("start the VM, or {own_socket} and the right to use it"),
    }
}

/// The same of a domain of libvirt: no socket of it would help.
fn of_libvirt(hypervisor: Hypervisor, pid: Option<i32>) -> String {
    let daemon = "see that libvirt's daemon runs and answers `virsh -c URI list` (docs/libvirt.md#errors)";
    match (hypervisor, pid) {
        (Hypervisor::Silent, _) => {
            format!("{daemon}; if it does, its QEMU hangs, or another program holds the domain")
        }
        (_, Some(_)) => format!("{daemon}; vnumad tries again by itself"),
        (_, None) => {
            format!(
                "{daemon}, and that the domain and its file are as vnumad says; vnumad tries again by itself"
            )
        }
    }
}

fn guest(vm: &Vm, state: &str) -> Check {
    let standing = |level, why, remedy: &str| Check::lower(level, "guest", state, why, remedy);
    match (state, &vm.problem) {
        ("running", _) => Check::best("guest", "running"),
        ("inmigrate", _) => standing(
            Level::Reduced,
            "its QEMU waits for the VM to come from another host",
            "migrate it where its guest runs (`vnumactl migrate`); `vnumactl attach VM --on-arrival` here has its guest told when it \
             arrives (docs/migration.md)",
        ),
        ("paused" | "suspended" | "prelaunch" | "postmigrate" | "save-vm", _) => standing(
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
                    "move it before a device is plugged: `vnumactl memory {} --set both` brings it home and keeps it there, \
                     `migratepages {} FROM HOME` at once",
                    vm.name,
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

/// Can an attached VM go to another host? `sends`: does its QEMU send the channel's device, which libvirt does not tell it to?
fn migration(vm: &Vm, sends: &dyn Fn(i32) -> bool) -> Check {
    if vm.backend == "libvirt" && !vm.pid.is_some_and(sends) {
        return Check::lower(
            Level::Reduced,
            "migration",
            "vnumactl migrate only",
            "libvirt refuses to migrate, save or snapshot the domain while it has the channel's device",
            format!(
                "`vnumactl migrate {} URI`; for other tools give its QEMU `-global ivshmem-doorbell.master=on` before it is started again \
                 (docs/migration.md)",
                vm.name
            ),
        );
    }
    if !vm.devices.is_empty() {
        return Check::lower(
            Level::Missing,
            "migration",
            "none",
            "QEMU does not migrate a VM that has passthrough devices",
            "unplug them before (docs/migration.md)",
        );
    }
    Check::best("migration", if vm.backend == "libvirt" { "any tool" } else { "vnumactl migrate" })
}

/// For people: a table, and below it what can be done.
pub fn text(checks: &[Check]) -> String {
    let mut table = Table::new("WHERE  CHECK  CAPABILITY  LEVEL");
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
mod tests;
