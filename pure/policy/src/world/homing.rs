//! Where the memory of VMs is, and displaced memory that comes home: what was seen, and what follows.
//!
//! ```text
//!   due ──▶ being observed ──▶ observed ──▶ a move is wanted ──▶ begun ──▶ ended ──▶ due
//!    ▲                              │                            (`memory`)           │
//!    └──────────────────────────────┴─────────────────────────────────────────────────┘
//! ```
//!
//! A VM without a policy is observed when somebody asks. Before `adaptive` moves something, it is watched how hot that is, unless
//! that is known of a short while ago:
//!
//! ```text
//!   observed, and a move would be wanted ──▶ due ──▶ being watched ──▶ known, or why it is not ──▶ decided again
//! ```

use super::{DescriptionSource, NodeSizing, Vm, VmId, World, schedule::effective_policy};
use crate::{
    Policies, backings,
    hotness::{HOLDS_NS, Hotness},
    rehome::Rehome,
    repatriation::{HomeArea, HomeInput, MemoryPolicy, Stray},
    residency::{AreaSample, MemoryArea, MemoryObservation},
    scheduling::{
        Policy,
        memory::{BASE_KIB, MemoryReason, MoveMemory},
    },
};
use std::{collections::BTreeMap, sync::Arc};
use vnuma_model::{BackingMapping, GuestNodeId, HostNodeId, MemoryBacking, NumaPolicy};

const SECOND_NS: u64 = 1_000_000_000;
/// Longest time between two observations while memory is coming home: what the rate allows is saved up for as long.
const ROUND_NS: u64 = 10 * SECOND_NS;
/// Where accesses go is known for so long after the period in which they were counted.
const COUNTED_NS: u64 = 120 * SECOND_NS;

/// What is known of where a VM's memory is.
#[derive(Clone, Debug, Default)]
pub struct Homing {
    /// When what is displaced comes home.
    pub policy: MemoryPolicy,
    /// What the last observation showed.
    pub observed: Option<Arc<MemoryObservation>>,
    /// Why the last one failed.
    pub problem: Option<String>,
    /// One is under way.
    pub observing: bool,
    /// When the next one is due.
    pub due_ns: Option<u64>,
    /// Until then another one would cost more than it may.
    pub rests_until_ns: u64,
    /// How hot its memory is.
    pub hotness: HotnessWatch,
    /// The last guest node that got another home on request, or gets it.
    pub rehome: Option<Rehome>,
    /// Guest nodes that were sized, or are not sized as the configuration says.
    pub sizes: BTreeMap<GuestNodeId, NodeSizing>,
}

/// What is known of how hot a VM's memory is.
#[derive(Clone, Debug, Default)]
pub struct HotnessWatch {
    /// What the last watch showed.
    pub known: Option<Arc<Hotness>>,
    /// Why the last one failed.
    pub problem: Option<String>,
    due: bool,
    under_way: bool,
    /// Until then the last one holds: what it showed, or that it would fail again.
    holds_until_ns: u64,
}

impl HotnessWatch {
    /// One is to begin.
    pub(crate) fn is_due(&self) -> bool {
        self.due && !self.under_way
    }

    fn holds(&self, now_ns: u64) -> bool {
        now_ns < self.holds_until_ns
    }

    /// What is known and holds.
    fn now(&self, now_ns: u64) -> Option<&Hotness> {
        self.known.as_deref().filter(|known| self.holds(now_ns) && known.says_something())
    }
}

/// Why memory of a guest node cannot come home, all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// VFIO has pinned it, as the VM has a device of the host.
    Devices,
    /// It is huge pages of a pool, of which the home has no free one.
    Pool,
    /// Its policy (`mbind`) does not name the home.
    Bound,
    /// The cpuset of its process excludes the home.
    Cpuset,
    /// The home is offline, or has no memory.
    NoMemory,
    /// `vprobe` moves memory of this VM to its vCPUs.
    Scheduled,
}

impl Obstacle {
    /// For the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Devices => "vfio",
            Self::Pool => "pool",
            Self::Bound => "bound",
            Self::Cpuset => "cpuset",
            Self::NoMemory => "no-memory",
            Self::Scheduled => "vprobe",
        }
    }
}

impl Vm {
    /// An observation that can be begun now.
    pub(crate) fn observation_due(&self, now_ns: u64) -> bool {
        !self.homing.observing && self.homing.due_ns.is_some_and(|due_ns| due_ns <= now_ns)
    }

    /// Where its process has the memory of its guest nodes, as far as that is known.
    pub fn memory_areas(&self) -> Vec<MemoryArea> {
        let area = |guest_node, memory: &MemoryBacking, guest_bytes: u64| {
            let BackingMapping { start, page_kib } = memory.mapping?;
            let bytes = memory.size_bytes;
            start.checked_add(bytes)?;
            Some(MemoryArea { guest_node, start, bytes, guest_bytes: guest_bytes.min(bytes), page_kib })
        };
        if self.source != DescriptionSource::Hypervisor {
            return Vec::new();
        }
        let booted = self.description.guest_nodes.iter().filter_map(|node| {
            let memory = node.memory.as_ref()?;
            area(node.id, memory, memory.size_bytes)
        });
        // Where nothing is plugged there is nothing but a hole.
        let devices = self.description.memory_devices.iter().filter(|device| device.plugged_bytes > 0);
        let plugged =
            devices.filter_map(|device| area(device.guest_node, &device.memory, device.plugged_bytes));
        booted.chain(plugged).collect()
    }

    /// The backend of memory of a guest node.
    pub(super) fn backing_of(&self, area: &MemoryArea) -> Option<&MemoryBacking> {
        let node = self.description.guest_nodes.iter().find(|node| node.id == area.guest_node)?;
        backings(node, &self.description.memory_devices)
            .find(|memory| memory.mapping.is_some_and(|mapping| mapping.start == area.start))
    }

    /// It is looked at regularly, whatever its memory policy.
    pub fn is_looked_at(&self, policies: &Policies) -> bool {
        self.is_sized(&policies.sizes) || (policies.rehome.auto && !self.memory_areas().is_empty())
    }

    /// What keeps all memory of a guest node from its home.
    pub fn obstacle(
        &self,
        sample: &AreaSample,
        home: HostNodeId,
        observed: &MemoryObservation,
        moves_to_vcpus: bool,
    ) -> Option<Obstacle> {
        let backing = self.backing_of(&sample.area);
        let excludes = |memory: &MemoryBacking| match memory.policy {
            NumaPolicy::Bind | NumaPolicy::Preferred => {
                !memory.host_nodes.is_empty() && !memory.host_nodes.contains(&home)
            }
            NumaPolicy::Interleave => true,
            _ => false,
        };
        let there = observed.nodes.iter().any(|(node, total, _)| *node == home && *total > 0);
        let page_kib = sample.area.page_kib;
        if !self.description.devices.is_empty() {
            Some(Obstacle::Devices)
        } else if backing.is_some_and(excludes) {
            Some(Obstacle::Bound)
        } else if !there {
            Some(Obstacle::NoMemory)
        } else if !observed.allowed.contains(&home) {
            Some(Obstacle::Cpuset)
        } else if page_kib > BASE_KIB && observed.room(home, page_kib).free_kib < page_kib {
            Some(Obstacle::Pool)
        } else if moves_to_vcpus && effective_policy(self) == Policy::Vprobe {
            Some(Obstacle::Scheduled)
        } else {
            None
        }
    }
}

impl World {
    /// What displaced memory of a VM does is decided by another policy now. Returns the one before.
    pub fn set_memory_policy(&mut self, id: VmId, policy: MemoryPolicy, now_ns: u64) -> Option<MemoryPolicy> {
        let vm = self.vms.get_mut(&id)?.vm.as_mut()?;
        let before = std::mem::replace(&mut vm.homing.policy, policy);
        if before != policy {
            let due_ns = now_ns.max(vm.homing.rests_until_ns);
            // One without a policy may be looked at because of its size.
            if policy != MemoryPolicy::None || vm.homing.sizes.is_empty() {
                vm.homing.due_ns = (policy != MemoryPolicy::None).then_some(due_ns);
            }
            vm.scheduling.memory.wanted.take_if(|order| is_home(order));
            vm.homing.hotness.due = false;
            self.repatriator.forget(id);
        }
        self.touched.insert(id);
        Some(before)
    }

    /// A VM is to be observed at once. False: that would cost more than it may, and what was seen last has to do.
    pub fn observe_now(&mut self, id: VmId, now_ns: u64) -> bool {
        let Some((_, vm)) = self.vm_mut(id) else { return false };
        if vm.homing.observing {
            return true;
        }
        if now_ns < vm.homing.rests_until_ns {
            return false;
        }
        vm.homing.due_ns = Some(now_ns);
        true
    }

    /// An observation has begun: of this memory.
    pub fn observation_begun(&mut self, id: VmId) -> Option<Vec<MemoryArea>> {
        let (_, vm) = self.vm_mut(id)?;
        (vm.homing.observing, vm.homing.due_ns) = (true, None);
        Some(vm.memory_areas())
    }

    /// An observation has ended.
    pub fn take_observation(
        &mut self,
        id: VmId,
        policies: &Policies,
        outcome: Result<MemoryObservation, String>,
        now_ns: u64,
    ) {
        let (settings, sizes) = (&policies.memory, &policies.sizes);
        let Some(vm) = self.vms.get_mut(&id).and_then(|managed| managed.vm.as_mut()) else { return };
        vm.homing.observing = false;
        match outcome {
            Ok(observed) => {
                let rest_ns = observed.cost_ns.saturating_mul(1000) / settings.cost_permille.max(1);
                vm.homing.rests_until_ns = now_ns.saturating_add(rest_ns);
                (vm.homing.observed, vm.homing.problem) = (Some(Arc::new(observed)), None);
                self.decide_home(id, policies, now_ns);
                self.decide_sizes(id, sizes, now_ns);
            }
            // It may be as dear as one that succeeds.
            Err(problem) => {
                vm.homing.rests_until_ns = now_ns.saturating_add(SECOND_NS);
                vm.homing.problem = Some(problem);
            }
        }
        let in_round = self.repatriator.in_round(id);
        let Some((_, vm)) = self.vm_mut(id) else { return };
        let wait_ns = if in_round { settings.observe_ns.min(ROUND_NS) } else { settings.observe_ns };
        let due_ns = now_ns.saturating_add(wait_ns).max(vm.homing.rests_until_ns);
        let wanted = vm.homing.policy != MemoryPolicy::None || vm.is_looked_at(policies);
        vm.homing.due_ns = wanted.then_some(due_ns);
    }

    /// A watch of how hot a VM's memory is has begun: of this memory.
    pub fn hotness_begun(&mut self, id: VmId) -> Option<Vec<MemoryArea>> {
        let (_, vm) = self.vm_mut(id)?;
        (vm.homing.hotness.under_way, vm.homing.hotness.due) = (true, false);
        Some(vm.memory_areas())
    }

    /// It has ended.
    pub fn take_hotness(
        &mut self,
        id: VmId,
        policies: &Policies,
        outcome: Result<Hotness, String>,
        now_ns: u64,
    ) {
        let Some((_, vm)) = self.vm_mut(id) else { return };
        let watch = &mut vm.homing.hotness;
        let cost_ns = outcome.as_ref().map_or(0, |known| known.cost_ns);
        let rest_ns = cost_ns.saturating_mul(1000) / policies.memory.cost_permille.max(1);
        (watch.under_way, watch.holds_until_ns) = (false, now_ns.saturating_add(rest_ns.max(HOLDS_NS)));
        (watch.known, watch.problem) = match outcome {
            Ok(known) => (Some(Arc::new(known)), None),
            Err(problem) => (None, Some(problem)),
        };
        self.decide_home(id, policies, now_ns);
    }

    /// What was observed becomes a move, if its policy wants one. Before that it is watched how hot it is.
    fn decide_home(&mut self, id: VmId, policies: &Policies, now_ns: u64) {
        let (settings, moves_to_vcpus) = (&policies.memory, policies.memory_goes_to_vcpus());
        let has_policy = |vm: &Vm| vm.homing.policy != MemoryPolicy::None;
        let vms =
            self.vms.values().filter_map(|managed| managed.vm.as_ref()).filter(|vm| has_policy(vm)).count();
        let Some(vm) = self.get(id).and_then(|managed| managed.vm.as_ref()) else { return };
        // What would come home is on its way to the new one.
        let Some(observed) = vm.homing.observed.clone().filter(|_| !vm.is_rehomed()) else { return };
        let memory = &vm.scheduling.memory;
        let hotness = vm.homing.hotness.now(now_ns).filter(|_| settings.hotness);
        let areas = self.home_areas(vm, id, (&observed, hotness), moves_to_vcpus);
        let input = HomeInput {
            vm: id,
            policy: vm.homing.policy,
            vms,
            memory_bytes: observed.areas.iter().fold(0, |sum, one| sum.saturating_add(one.area.guest_bytes)),
            areas: &areas,
            ready: memory.wanted.is_none()
                && !memory.is_under_way()
                && observed.began_ns >= memory.ended_ns()
                && vm.scheduling.clean_ns.is_some()
                && !vm.homing.hotness.under_way
                && !vm.waits()
                && !vm.is_migrating(),
            now_ns: observed.began_ns,
        };
        if settings.hotness
            && !vm.homing.hotness.holds(now_ns)
            && self.repatriator.wants_hotness(settings, &input)
        {
            if let Some((_, vm)) = self.vm_mut(id) {
                vm.homing.hotness.due = true;
            }
            return;
        }
        if let Some(order) = self.repatriator.decide(settings, &input) {
            self.want_memory(id, order);
        }
    }

    /// What of a VM's memory may come home.
    fn home_areas(
        &self,
        vm: &Vm,
        id: VmId,
        (observed, hotness): (&MemoryObservation, Option<&Hotness>),
        moves_to_vcpus: bool,
    ) -> Vec<HomeArea> {
        let of = |sample: &AreaSample| {
            let home = *vm.placement.homes().get(&sample.area.guest_node)?;
            if vm.obstacle(sample, home, observed, moves_to_vcpus).is_some() {
                return None;
            }
            let strays = sample.movable(home).into_iter().map(|(node, size)| Stray {
                node,
                bytes: size.bytes,
                high: size.high,
                distance: self.host.distance(home, node).unwrap_or(20),
                saving: self.saving(id, observed, (node, home)),
                heat: hotness.map(|hotness| hotness.heat(observed, sample, node)),
            });
            let end = sample.area.start.saturating_add(sample.area.bytes);
            Some(HomeArea {
                guest_node: sample.area.guest_node,
                home,
                within: (sample.area.start, end),
                page_kib: sample.area.page_kib,
                strays: strays.collect(),
                room: observed.room(home, sample.area.page_kib),
            })
        };
        observed.areas.iter().filter_map(of).collect()
    }

    /// What a page of a VM saves in a second when it is on `home` instead of `node`, in tenths of a local access: accesses of all
    /// of the VM's vCPUs to that node, divided by the pages that the VM has there.
    pub(super) fn saving(
        &self,
        id: VmId,
        observed: &MemoryObservation,
        (node, home): (HostNodeId, HostNodeId),
    ) -> Option<f64> {
        let machine = self.schedule.machine();
        let last = self.schedule.last_period()?;
        if observed.began_ns.saturating_sub(last.time_ns) > COUNTED_NS {
            return None;
        }
        let (from, to) = (machine.position(node)?, machine.position(home)?);
        let (mut saved, mut counted) = (0.0, false);
        for (sample, assumed) in last.vcpus.iter().filter(|(sample, _)| sample.key.vm == id) {
            let Some(accesses) = sample.counts.as_ref().and_then(|counts| counts.accesses.get(from)) else {
                continue;
            };
            if *assumed {
                return None;
            }
            let Some(at) = sample.node(machine) else { continue };
            let nearer = f64::from(machine.distance(at, from)) - f64::from(machine.distance(at, to));
            (saved, counted) = (saved + *accesses as f64 * nearer, true);
        }
        let there = observed.areas.iter().flat_map(AreaSample::places).filter(|(at, ..)| *at == node);
        let pages = there.fold(0_u64, |sum, (.., size)| sum.saturating_add(size.bytes)) / 4096;
        let seconds = self.schedule.period_ns() as f64 / 1e9;
        (counted && pages > 0 && seconds > 0.0).then(|| saved / seconds / pages as f64)
    }

    /// A move home has ended: where its memory is now is looked at as soon as that may cost something again.
    pub(super) fn home_ended(&mut self, id: VmId, order: &MoveMemory, moved: u64, stayed: u64, now_ns: u64) {
        self.repatriator.ended(id, order, moved, stayed, now_ns);
        if let Some((_, vm)) = self.vm_mut(id)
            && vm.homing.policy != MemoryPolicy::None
        {
            let due_ns = now_ns.max(vm.homing.rests_until_ns);
            vm.homing.due_ns = Some(vm.homing.due_ns.map_or(due_ns, |planned_ns| planned_ns.min(due_ns)));
        }
    }

    /// Until when memory of a VM that could not be moved rests.
    pub fn memory_rests_until_ns(&self, id: VmId, now_ns: u64) -> Option<u64> {
        self.repatriator.rests_until_ns(id, now_ns)
    }
}

/// Does it bring memory home?
pub(super) fn is_home(order: &MoveMemory) -> bool {
    matches!(order.why, MemoryReason::Home(_))
}
