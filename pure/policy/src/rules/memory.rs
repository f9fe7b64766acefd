//! Whose memory is looked at and moved, how often, and what keeps it where it is.

use crate::{
    Policies,
    hotness::{HOLDS_NS, Hotness},
    memory_move::{BASE_KIB, MemoryPolicy},
    repatriation::MemorySettings,
    residency::{AreaSample, MemoryObservation},
    scheduling::Policy,
    world::{HotnessWatch, KnownMemory, Vm, World},
};
use vnuma_model::{HostNodeId, MemoryBacking, NumaPolicy};

const SECOND_NS: u64 = 1_000_000_000;

/// Why memory of a guest node cannot come home, all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Obstacle {
    /// VFIO has pinned it, as the VM has a device of the host.
    #[strum(serialize = "vfio")]
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

impl KnownMemory {
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

impl Vm {
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
    /// VMs whose memory policies may move. They share the host's rate.
    pub fn memory_sharers(&self, policies: &Policies) -> usize {
        let shares = |vm: &Vm| vm.homing.policy != MemoryPolicy::None || vm.memory_goes_to_vcpus(policies);
        self.iter().filter_map(|(_, managed)| managed.vm.as_ref()).filter(|vm| shares(vm)).count()
    }
}
