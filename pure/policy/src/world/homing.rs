//! What is known of where the memory of VMs is, and how hot it is.

use super::{DescriptionSource, NodeSizing, Task, TaskId, Vm, VmId, World};
use crate::{
    Policies, Reason, backings,
    hotness::{HOLDS_NS, Hotness},
    memory_move::{BASE_KIB, MemoryPolicy},
    rehome::Rehome,
    repatriation::MemorySettings,
    residency::{AreaSample, MemoryArea, MemoryObservation},
    scheduling::Policy,
};
use std::{collections::BTreeMap, sync::Arc};
use vnuma_model::{BackingMapping, GuestNodeId, HostNodeId, MemoryBacking, NumaPolicy};

const SECOND_NS: u64 = 1_000_000_000;

/// What is known of where a VM's memory is.
#[derive(Clone, Debug, Default)]
pub struct KnownMemory {
    /// When what is displaced comes home.
    pub policy: MemoryPolicy,
    /// Decisions from before this time do not count any more: since then the VM has another policy, or a guest node another home.
    pub since_ns: u64,
    /// Number of the last observation that has ended; 0: there was none.
    pub look: u64,
    /// What the last observation showed.
    pub observed: Option<Arc<MemoryObservation>>,
    /// When it ended.
    pub looked_ns: u64,
    /// Why the last one failed.
    pub problem: Option<String>,
    /// The observation that is under way, and when one that was asked for is due, and why.
    pub observation: Task<(u64, Reason), ()>,
    /// What is known of the heat of its memory.
    pub hotness: HotnessWatch,
    /// The last guest node that got another home on request, or gets it.
    pub rehome: Option<Rehome>,
    /// When that re-home began.
    pub rehome_ns: Option<u64>,
    /// Guest nodes that were sized, or are not sized as the configuration says.
    pub sizes: BTreeMap<GuestNodeId, NodeSizing>,
}

impl KnownMemory {
    /// Of a VM that was just found.
    pub(super) fn new(now_ns: u64) -> Self {
        Self { since_ns: now_ns, ..Self::default() }
    }

    /// Before this time another observation would exceed its share of CPU time. A failed one may cost as much as one that succeeds.
    pub fn rests_until_ns(&self, settings: &MemorySettings) -> u64 {
        let rest_ns = match (&self.problem, &self.observed) {
            (Some(_), _) => SECOND_NS,
            (None, Some(observed)) => settings.rest_ns(observed.cost_ns),
            (None, None) => 0,
        };
        self.looked_ns.saturating_add(rest_ns)
    }
}

/// What is known of how hot a VM's memory is.
#[derive(Clone, Debug, Default)]
pub struct HotnessWatch {
    /// What the last watch showed.
    pub known: Option<Arc<Hotness>>,
    /// Why the last one failed.
    pub problem: Option<String>,
    /// Number of the last watch that has ended; 0: there was none.
    pub(crate) watch: u64,
    /// The watch that is under way.
    pub task: Task,
    /// When the last one ended.
    watched_ns: u64,
}

impl HotnessWatch {
    /// Does the last watch hold? If it failed: is no other one tried?
    pub(crate) fn holds(&self, settings: &MemorySettings, now_ns: u64) -> bool {
        let known = self.known.as_ref().filter(|_| self.problem.is_none());
        let rest_ns = known.map_or(0, |known| settings.rest_ns(known.cost_ns));
        self.watch > 0 && now_ns < self.watched_ns.saturating_add(rest_ns.max(HOLDS_NS))
    }

    /// The heat, if the last watch still holds and says something.
    pub(crate) fn now(&self, settings: &MemorySettings, now_ns: u64) -> Option<&Hotness> {
        self.known.as_deref().filter(|known| self.holds(settings, now_ns) && known.says_something())
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
        }
    }
}

impl Vm {
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
        // A device of which nothing is plugged is all holes.
        let devices = self.description.memory_devices.iter().filter(|device| device.plugged_bytes > 0);
        let plugged =
            devices.filter_map(|device| area(device.guest_node, &device.memory, device.plugged_bytes));
        booted.chain(plugged).collect()
    }

    /// The backend of memory of a guest node.
    pub(crate) fn backing_of(&self, area: &MemoryArea) -> Option<&MemoryBacking> {
        let node = self.description.guest_nodes.iter().find(|node| node.id == area.guest_node)?;
        backings(node, &self.description.memory_devices)
            .find(|memory| memory.mapping.is_some_and(|mapping| mapping.start == area.start))
    }

    /// It is looked at regularly, whatever its memory policy.
    pub fn is_looked_at(&self, policies: &Policies) -> bool {
        self.is_sized(&policies.sizes) || (policies.rehome.auto && !self.memory_areas().is_empty())
    }

    /// `vprobe` moves its memory to its vCPUs.
    pub fn memory_goes_to_vcpus(&self, policies: &Policies) -> bool {
        policies.settings.memory_bytes_per_s > 0 && self.effective_policy() == Policy::Vprobe
    }

    /// What keeps all memory of a guest node from its home.
    pub fn obstacle(
        &self,
        sample: &AreaSample,
        home: HostNodeId,
        observed: &MemoryObservation,
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
        } else {
            None
        }
    }
}

impl World {
    /// Sets the memory policy of a VM. Returns the one before.
    pub fn set_memory_policy(&mut self, id: VmId, policy: MemoryPolicy, now_ns: u64) -> Option<MemoryPolicy> {
        let vm = self.vms.get_mut(&id)?.vm.as_mut()?;
        let before = std::mem::replace(&mut vm.homing.policy, policy);
        if before != policy {
            vm.scheduling.memory.task.wanted.take_if(|order| order.is_home());
            vm.homing.since_ns = now_ns;
        }
        self.touched.push(id);
        Some(before)
    }

    /// Asks for a look at a VM's memory now. False: it rests, so that the last look has to do.
    pub fn observe_now(&mut self, id: VmId, rests_until_ns: u64, now_ns: u64) -> bool {
        let Some((_, vm)) = self.vm_mut(id) else { return false };
        if vm.homing.observation.is_under_way() {
            return true;
        }
        if now_ns < rests_until_ns {
            return false;
        }
        vm.homing.observation.wanted = Some((now_ns, Reason::Requested));
        true
    }

    /// A look has ended.
    pub fn note_observation(
        &mut self,
        task: TaskId,
        outcome: Result<MemoryObservation, String>,
        now_ns: u64,
    ) {
        self.looks += 1;
        let look = self.looks;
        let Some((_, vm)) = self.vm_mut(task.vm) else { return };
        let homing = &mut vm.homing;
        homing.observation.end(task);
        // It also serves requests that came while it was under way.
        homing.observation.wanted = None;
        (homing.look, homing.looked_ns) = (look, now_ns);
        match outcome {
            Ok(observed) => (homing.observed, homing.problem) = (Some(Arc::new(observed)), None),
            Err(problem) => homing.problem = Some(problem),
        }
    }

    /// VMs whose memory policies may move. They share the host's rate.
    pub fn memory_sharers(&self, policies: &Policies) -> usize {
        let shares = |vm: &Vm| vm.homing.policy != MemoryPolicy::None || vm.memory_goes_to_vcpus(policies);
        self.vms.values().filter_map(|managed| managed.vm.as_ref()).filter(|vm| shares(vm)).count()
    }

    /// A watch has ended.
    pub fn note_hotness(&mut self, task: TaskId, outcome: Result<Hotness, String>, now_ns: u64) {
        self.looks += 1;
        let number = self.looks;
        let Some((_, vm)) = self.vm_mut(task.vm) else { return };
        let watch = &mut vm.homing.hotness;
        watch.task.end(task);
        (watch.watch, watch.watched_ns) = (number, now_ns);
        (watch.known, watch.problem) = match outcome {
            Ok(known) => (Some(Arc::new(known)), None),
            Err(problem) => (None, Some(problem)),
        };
    }
}
