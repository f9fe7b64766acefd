//! VMs in the form of the API.

mod memory_map;
mod rehome;
mod sizes;

pub(super) use memory_map::vm_memory;
pub(super) use rehome::{rehome, why_rehomed};
pub(super) use sizes::sizes;

use std::collections::BTreeMap;
use vnuma_api as api;
use vnuma_hypervisor::state_word;
use vnuma_model::{CpuSet, DistanceMatrix, RunState, VcpuState};
use vnuma_policy::{
    Suppressed,
    memory_move::MemoryReason,
    policies::{Quality, SchedulingMemory, Shown},
    scheduling::{Policy, Standing, VcpuSample},
    world::{
        ChannelState, DescriptionSource, LastMemoryMove, LastStep, Link, ManagedVm, Mechanism, Others,
        StopReason, VcpuMask, Vm, VmId, World,
    },
};

/// Whether a VM is shown: not before anything behind its handle has answered.
pub(super) fn is_shown(managed: &ManagedVm) -> bool {
    managed.vm.is_some() || problem(managed).is_some()
}

/// The VM in the form of the API.
pub(super) fn managed(managed: &ManagedVm, suppressed: Suppressed) -> Option<api::Vm> {
    let problem = problem(managed);
    match (&managed.vm, problem) {
        (Some(known), problem) => Some(api::Vm {
            backend: managed.handle.backend().to_owned(),
            ..vm(known, hypervisor(managed), suppressed, [problem, unseen(managed)])
        }),
        (None, Some(problem)) => Some(unreachable(managed, hypervisor(managed), problem)),
        (None, None) => None,
    }
}

/// Why its hypervisor cannot be asked.
pub(super) fn problem(managed: &ManagedVm) -> Option<String> {
    match managed.process {
        Some(process) => match process.stopped {
            Some(reason) => Some(format!("the hypervisor (process {}) is {}", process.pid, reason)),
            None => managed.link.problem().map(str::to_owned),
        },
        None => managed.link.problem().map(str::to_owned),
    }
}

/// What is not known of it, as looks at its process hang.
fn unseen(managed: &ManagedVm) -> Option<String> {
    let process = managed.process.filter(|process| process.looks_hang)?;
    Some(format!("process {} does not answer looks: it is not known where its memory is", process.pid))
}

fn hypervisor(managed: &ManagedVm) -> api::Hypervisor {
    match (managed.stopped(), &managed.link) {
        (Some(StopReason::Signal), _) => api::Hypervisor::Stopped,
        (Some(StopReason::Tracer), _) => api::Hypervisor::Debugged,
        (None, Link::Silent { .. } | Link::Slow { .. }) => api::Hypervisor::Silent,
        (None, link) if link.problem().is_some() => api::Hypervisor::Lost,
        _ => api::Hypervisor::Answers,
    }
}

/// All that is known of a VM.
fn vm(
    vm: &Vm,
    hypervisor: api::Hypervisor,
    suppressed: Suppressed,
    [problem, unseen]: [Option<String>; 2],
) -> api::Vm {
    let homes = vm.placement.homes();
    let node = |node: &vnuma_model::GuestNode| api::GuestNode {
        id: node.id,
        home: homes.get(&node.id).copied(),
        memory_bytes: node.memory_bytes,
        displaced_bytes: displaced_of(vm, node),
        bound: bound(node),
    };
    let described = vm.source == DescriptionSource::Hypervisor;
    let (channel, driver) = (channel(vm.channel), vm.stats.driver);
    api::Vm {
        name: vm.name().to_owned(),
        pid: Some(vm.description.pid),
        backend: String::new(),
        described,
        hypervisor,
        attached: channel == api::ChannelState::Attached,
        channel,
        attach_on_arrival: vm.stays_marked(),
        run_state: described.then(|| state_word(&vm.description.run_state).to_owned()),
        problem: problem.or_else(|| stuck(vm)).or_else(|| kept(vm)).or_else(|| confined(vm)).or(unseen),
        nodes: vm.description.guest_nodes.iter().map(node).collect(),
        distances: vm.placement.distances().clone(),
        vcpus: vm.description.vcpus.iter().filter_map(|described| vcpu(vm, described)).collect(),
        devices: vm.description.devices.iter().map(|described| device(vm, described)).collect(),
        publication: api::Publication {
            generation: vm.stats.published.map(api::Generation),
            acknowledged: vm.stats.acknowledged.map(api::Generation),
            driver_mode: driver.safe_mode.map(|safe| match safe {
                true => api::DriverMode::Safe,
                false => api::DriverMode::Fast,
            }),
            driver_version: driver.version.map(|[major, minor, patch]| format!("{major}.{minor}.{patch}")),
            refused: driver.refused.map(|(generation, errno)| api::RefusedGeneration {
                generation: api::Generation(generation),
                errno,
            }),
            publications: vm.stats.publications,
            acknowledgements: vm.stats.acknowledgements,
            suppressed_by_dwell: suppressed.dwell,
            deferred_by_cap: suppressed.cap,
        },
        spare_slots: vm.description.spare_slots.clone(),
    }
}

fn channel(state: ChannelState) -> api::ChannelState {
    match state {
        ChannelState::Detached | ChannelState::AttachTimedOut => api::ChannelState::None,
        ChannelState::Attaching | ChannelState::Recovering => api::ChannelState::Attaching,
        ChannelState::Attached(_) | ChannelState::Detaching(..) => api::ChannelState::Attached,
        ChannelState::Lost | ChannelState::LostDetaching => api::ChannelState::Lost,
    }
}

/// Why a guest that was not paused does not run.
fn stuck(vm: &Vm) -> Option<String> {
    let state = &vm.description.run_state;
    let why = match state {
        RunState::InternalError => "KVM cannot run it any more",
        RunState::IoError => "a disk reported an I/O error",
        RunState::Panicked => "its kernel panicked",
        RunState::Watchdog => "its watchdog expired",
        _ => return None,
    };
    Some(format!("the guest does not run ({state}): {why}"))
}

/// Whether the channel's device was to be unplugged, and is still plugged.
fn kept(vm: &Vm) -> Option<String> {
    let unplug = vm.unplug.as_ref().filter(|unplug| unplug.ignored > 0)?;
    let (times, then) = (
        unplug.ignored,
        match unplug.given_up {
            true => "it is asked no more (`vnumactl detach` asks again)",
            false => "it is asked again",
        },
    );
    let times = if times == 1 { "once".to_owned() } else { format!("{times} times") };
    Some(format!("the guest has not released the channel's device, which it was asked for {times}; {then}"))
}

/// Masks of an earlier vnumad could not be given back. No policy begins before.
fn confined(vm: &Vm) -> Option<String> {
    let problem = vm.scheduling.restore.last.as_ref()?;
    Some(format!("an earlier vnumad has confined vCPUs, and that is not undone yet: {problem}"))
}

/// A VM of which only the handle is known.
fn unreachable(managed: &ManagedVm, hypervisor: api::Hypervisor, problem: String) -> api::Vm {
    api::Vm {
        name: managed.fallback_name.clone(),
        pid: None,
        backend: managed.handle.backend().to_owned(),
        described: false,
        hypervisor,
        attached: false,
        channel: api::ChannelState::None,
        attach_on_arrival: false,
        run_state: None,
        problem: Some(problem),
        nodes: Vec::new(),
        distances: DistanceMatrix::default(),
        vcpus: Vec::new(),
        devices: Vec::new(),
        publication: api::Publication::default(),
        spare_slots: BTreeMap::new(),
    }
}

fn vcpu(vm: &Vm, described: &vnuma_model::Vcpu) -> Option<api::Vcpu> {
    let status = vm.placement.vcpu(described.apic_id)?;
    let location = vm.locations.get(&described.apic_id);
    Some(api::Vcpu {
        apic_id: described.apic_id,
        tid: described.tid,
        host_cpu: location.map(|location| location.cpu),
        host_node: status.host_node,
        pinned: location.is_some_and(|location| location.pinned.is_some()),
        guest_node: status.published_node,
        acked_node: status.acked_node,
        target_node: status.target_node,
        state: status.state,
    })
}

/// A driver that does not know devices acknowledges the rest of a publication only.
fn device(vm: &Vm, described: &vnuma_model::VmDevice) -> api::VmDevice {
    let status = described.guest.and_then(|address| vm.placement.device(address));
    let known = vm.stats.driver.knows_devices;
    api::VmDevice {
        host: described.host.clone(),
        host_node: status.and_then(|status| status.host_node),
        guest: described.guest.map(|address| address.to_string()),
        guest_node: status.and_then(|status| status.published_node),
        acked_node: status.and_then(|status| status.acked_node).filter(|_| known),
        target_node: status.and_then(|status| status.target_node),
        state: status.filter(|_| known).map_or(VcpuState::Unknown, |status| status.state),
    }
}

/// How the vCPUs of a VM are scheduled.
pub(super) fn scheduling(id: VmId, vm: &Vm, world: &World, seen: &SchedulingMemory) -> api::Scheduling {
    let none = VcpuMask::default();
    let vcpu = |described: &vnuma_model::Vcpu| {
        let mask = vm.scheduling.masks.get(&described.apic_id).unwrap_or(&none);
        let node = vm.placement.vcpu(described.apic_id).and_then(|status| status.host_node);
        let shown = api::VcpuScheduling {
            vcpu: described.apic_id,
            node,
            operator_cpus: mask.operator.clone(),
            policy_cpus: mask.policy.as_ref().map(|mask| mask.cpus.clone()),
            set_by: mask.policy.as_ref().map(|mask| match mask.by {
                Mechanism::Affinity => api::PlaceSetting::AFFINITY.to_owned(),
                Mechanism::Scheduler => api::PlaceSetting::SCHEDULER.to_owned(),
            }),
            moves: mask.moves,
            last: mask.step.last.as_ref().map(step),
            ..api::VcpuScheduling::default()
        };
        let figures = seen.shown(id, vm, described.apic_id);
        figures.map_or(shown.clone(), |figures| with_figures(shown, figures, world))
    };
    api::Scheduling {
        vm: vm.name().to_owned(),
        policy: vm.scheduling.policy.to_string(),
        vcpus: vm.description.vcpus.iter().map(vcpu).collect(),
        others: others(&vm.scheduling.others),
        memory: memory(vm),
        displaced_bytes: displaced_bytes(vm),
    }
}

/// Of all guest nodes; none as long as it is not known of one, or there are none.
fn displaced_bytes(vm: &Vm) -> Option<u64> {
    let nodes = &vm.description.guest_nodes;
    let all: Option<Vec<u64>> = nodes.iter().map(|node| displaced_of(vm, node)).collect();
    all.filter(|all| !all.is_empty()).map(|all| all.into_iter().fold(0, u64::saturating_add))
}

fn displaced_of(vm: &Vm, node: &vnuma_model::GuestNode) -> Option<u64> {
    let home = vm.placement.homes().get(&node.id).copied();
    vnuma_policy::displaced_bytes(node, &vm.description.memory_devices, home)
}

/// The one host node that its policy takes new pages from.
fn bound(node: &vnuma_model::GuestNode) -> Option<u32> {
    let memory = node.memory.as_ref()?;
    match &memory.host_nodes[..] {
        [only] if memory.policy.names_nodes() => Some(*only),
        _ => None,
    }
}

fn others(others: &Others) -> Option<api::OtherThreads> {
    let shown = others.kept.is_some() || others.problem.is_some();
    shown.then(|| api::OtherThreads {
        threads: others.threads,
        cpus: others.kept.clone(),
        problem: others.problem.clone(),
    })
}

pub(super) fn memory(vm: &Vm) -> Option<api::MemoryMoves> {
    let memory = &vm.scheduling.memory;
    let last = memory.shown().map(memory_step)?;
    Some(api::MemoryMoves { moves: memory.count, bytes: memory.bytes, last })
}

/// Memory that a policy has moved, or moves.
pub(super) fn memory_step(last: &LastMemoryMove) -> api::MemoryStep {
    let (order, moved) = (&last.order, &last.moved);
    let step = api::MemoryStep {
        time_ns: last.ended_ns.unwrap_or(last.began_ns),
        from: order.from,
        to: order.to,
        bytes: order.bytes,
        ended: last.ended_ns.is_some(),
        moved_bytes: moved.bytes,
        busy_pages: moved.busy,
        shared_pages: moved.shared,
        failed_pages: moved.failed,
        problem: moved.problem.clone(),
        longest_hold_us: moved.longest_hold_ns / 1000,
        assumed: last.assumed,
        ..api::MemoryStep::default()
    };
    let millis = |ns: f64| (ns / 1e6).round();
    match &order.why {
        MemoryReason::Nearer(why) => api::MemoryStep {
            policy: Policy::Vprobe.to_string(),
            cause: why.cause.text().to_owned(),
            remote_share: rounded(why.remote_share),
            expected_remote_share: rounded(why.expected_remote_share),
            price_ms: millis(why.price_ns),
            saving_ms_per_s: millis(why.saving_ns_per_s),
            ..step
        },
        MemoryReason::Home(why) => api::MemoryStep {
            policy: why.policy.to_string(),
            cause: why.cause.text().to_owned(),
            guest_node: Some(why.guest_node),
            displaced_bytes: Some(why.displaced_bytes),
            hottest_first: why.hottest_first,
            price_ms: millis(why.price_ns),
            saving_ms_per_s: millis(why.saving_ns_per_s),
            ..step
        },
        MemoryReason::Rehome(guest_node) => api::MemoryStep {
            policy: api::REHOME.to_owned(),
            cause: "it gets another home".to_owned(),
            guest_node: Some(*guest_node),
            ..step
        },
    }
}

fn with_figures(vcpu: api::VcpuScheduling, figures: &Shown, world: &World) -> api::VcpuScheduling {
    let standing = match figures.analysis.standing {
        Standing::Free => "free",
        Standing::Unmanaged => "unmanaged",
        Standing::Pinned => "pinned",
        Standing::Isolated => "isolated",
        Standing::RealTime => "real-time",
    };
    let (quality, counted_permille) = match figures.quality {
        Quality::Counted(permille) => ("counted", Some(permille)),
        Quality::DidNotRun => ("did-not-run", None),
        Quality::Crowded => ("crowded", None),
        Quality::Lost => ("lost", None),
        Quality::Assumed => ("assumed", None),
    };
    let nodes = &world.periods().machine().nodes;
    let seen = figures.analysis.node.and_then(|node| nodes.get(node)).map(|node| node.id);
    api::VcpuScheduling {
        node: vcpu.node.or(seen),
        standing: Some(standing.to_owned()),
        quality: Some(quality.to_owned()),
        counted_permille,
        pressure: figures.analysis.pressure.map(rounded),
        kind: figures.analysis.kind.map(|kind| kind.name().to_owned()),
        affinity: figures.affinity,
        remote_share: figures.analysis.remote_share.map(rounded),
        ran_share: Some(rounded(figures.ran)),
        wait_share: Some(rounded(figures.waited)),
        throttled_share: Some(rounded(figures.throttled)),
        entitled_share: Some(rounded(figures.entitled)),
        weight: Some(figures.weight),
        ..vcpu
    }
}

/// A step that a policy has made.
pub(super) fn step(made: &LastStep) -> api::PolicyStep {
    let why = &made.why;
    api::PolicyStep {
        time_ns: made.time_ns,
        policy: why.policy.to_string(),
        cause: why.cause.text().to_owned(),
        from: why.before.node,
        to: why.expected.node.filter(|_| made.mask.is_some()),
        cpus: made.mask.clone(),
        pressure: why.pressure.map(rounded),
        remote_share: why.before.remote_share.map(rounded),
        expected_remote_share: why.expected.remote_share.filter(|_| made.mask.is_some()).map(rounded),
        caused_by: made.caused_by.clone(),
    }
}

/// What a policy is given of a vCPU.
pub(super) fn observed(sample: &VcpuSample, assumed: bool, operator: CpuSet) -> api::ObservedVcpu {
    let counts = sample.counts.as_ref().map(|counts| api::ObservedCounts {
        assumed,
        instructions: counts.instructions,
        llc_references: counts.llc_references,
        llc_misses: counts.llc_misses,
        accesses: counts.accesses.clone(),
    });
    api::ObservedVcpu {
        vcpu: sample.key.vcpu,
        cpu: sample.cpu,
        operator,
        real_time: sample.real_time,
        weight: sample.weight,
        ran_ns: sample.ran_ns,
        waited_ns: sample.waited_ns,
        throttled_ns: sample.throttled_ns,
        entitled_ns: Some(sample.entitled_ns),
        counts,
    }
}

/// To thousandths: no figure here is better than that.
fn rounded(figure: f64) -> f64 {
    (figure * 1000.0).round() / 1000.0
}
