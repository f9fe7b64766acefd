//! Why the memory of a guest node stays behind when its vCPUs run where no guest node is at home.
//!
//! Nothing is decided here: this explains what the policy for homes, the operator and the kernel have decided.

use super::{Memories, conflicts::Pages, rehoming::node_views};
use crate::{
    Policies,
    rehome_policy::{NodeView, Patience},
    residency::{AreaSample, Keeps, MemoryObservation},
    rules::{Obstacle, too_much_kept},
    world::{Vm, VmId, World},
};
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::{GuestNodeId, HostNodeId, NumaPolicy};

const SECOND_NS: u64 = 1_000_000_000;

/// Memory that does not follow its vCPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stays {
    /// Host nodes that the vCPUs run on.
    pub vcpus_on: Vec<HostNodeId>,
    /// Why.
    pub why: StaysWhy,
}

/// Why memory does not follow its vCPUs. The first that applies is said: what no command can change before what one can.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum StaysWhy {
    /// They run on several nodes.
    #[error("its vCPUs run on several nodes, and its memory follows only all of them")]
    Spread,
    /// VFIO has pinned it.
    #[error("VFIO has pinned all memory of this VM, as it has a device of the host")]
    #[strum(serialize = "vfio")]
    Devices,
    /// There is no such huge page.
    #[error("its memory is huge pages of {page_kib} KiB, and the pool of node {node} has no free one")]
    Pool {
        /// The node.
        node: HostNodeId,
        /// Size of a page, KiB.
        page_kib: u64,
    },
    /// Nobody has asked for it.
    #[error("rehome.mode is manual")]
    Manual {
        /// The guest node.
        guest_node: GuestNodeId,
        /// Where its vCPUs run.
        node: HostNodeId,
    },
    /// A re-home of the VM is under way.
    #[error("a re-home of this VM is under way")]
    Rehome,
    /// A guest node of the VM changes its size.
    #[error("a guest node of this VM grows or shrinks")]
    Resize,
    /// The VM migrates, or its guest has not arrived.
    #[error("the VM migrates, or waits for its guest to arrive")]
    Migration,
    /// It is not known where it is.
    #[error("where its memory is cannot be seen: {0}")]
    Unknown(String),
    /// It was not looked at.
    #[error("its memory was not looked at yet")]
    NotSeen,
    /// The policy of its memory does not name the node.
    #[error(
        "its memory's policy ({policy}) takes its pages from nodes {nodes:?}, and only its hypervisor can change that"
    )]
    Bound {
        /// The policy.
        policy: NumaPolicy,
        /// Its nodes.
        nodes: Vec<HostNodeId>,
    },
    /// Its process has no memory of that node.
    #[error("the cpuset of its hypervisor excludes the memory of node {0}")]
    Cpuset(HostNodeId),
    /// The node is offline, or has no memory.
    #[error("node {0} is offline, or has no memory")]
    NoMemory(HostNodeId),
    /// Another policy moves it.
    #[error("`vprobe` moves memory of this VM to its vCPUs (policy.memory_mib_per_s)")]
    #[strum(serialize = "vprobe")]
    Scheduled,
    /// Most pages are kept elsewhere.
    #[error("{}", kept(*.0))]
    Kept(Keeps),
    /// There is not enough room.
    #[error(
        "node {node} has no room: {needed_mib} MiB would go there, and {free_mib} MiB are free beyond its reserve"
    )]
    NoRoom {
        /// The node.
        node: HostNodeId,
        /// What is not there yet.
        needed_mib: u64,
        /// What may come.
        free_mib: u64,
    },
    /// The policy for homes waits.
    #[error("{}", patience(.0))]
    Waits(Patience),
}

impl StaysWhy {
    /// For the API.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kept(keeps) => keeps.name(),
            Self::Waits(patience) => patience.into(),
            why => why.into(),
        }
    }
}

fn kept(keeps: Keeps) -> &'static str {
    match keeps {
        Keeps::Merged => "KSM has merged most pages of it, which stay where they are",
        Keeps::Shared => {
            "other processes have most pages of it mapped, too, so that they stay where they are"
        }
        Keeps::Pool => "most pages of it are of a pool (hugetlbfs), and stay where they are",
    }
}

fn patience(patience: &Patience) -> String {
    match patience {
        Patience::Rests { for_ns } => {
            format!("it rests for another {} s after the last re-home", for_ns.div_ceil(SECOND_NS))
        }
        Patience::Settles { stayed_ns, settle_ns } => {
            let (stayed, settle) = (stayed_ns / SECOND_NS, settle_ns.div_ceil(SECOND_NS));
            format!("its vCPUs have been there for {stayed} s, and have to be for {settle} s")
        }
        Patience::Costs(why) => format!(
            "being remote has cost {} ms{} by now, and has to cost more than twice the {} ms of a move",
            why.lost_ns / 1_000_000,
            if why.assumed { " (assumed)" } else { "" },
            why.price_ns / 1_000_000
        ),
        Patience::Due => "it is decided after the next look at its memory".to_owned(),
    }
}

impl Memories {
    /// Why the memory of a guest node does not follow its vCPUs. `None`: some of them run where a guest node is at home, or its memory
    /// is where they are.
    pub fn stays_behind(
        &self,
        world: &World,
        (id, guest_node): (VmId, GuestNodeId),
        policies: &Policies,
        now_ns: u64,
    ) -> Option<Stays> {
        let vm = world.get(id)?.vm.as_ref()?;
        let vcpus_on: Vec<HostNodeId> = vm.nodes_of_vcpus(guest_node).into_iter().collect();
        let is_home = |node: &HostNodeId| vm.placement.homes().values().any(|home| home == node);
        if vcpus_on.iter().all(is_home) {
            return None;
        }
        let why = match vcpus_on[..] {
            [to] => self.why_it_stays((world, id, vm), (guest_node, to), policies, now_ns)?,
            _ => StaysWhy::Spread,
        };
        Some(Stays { vcpus_on, why })
    }

    fn why_it_stays(
        &self,
        (world, id, vm): (&World, VmId, &Vm),
        (guest_node, to): (GuestNodeId, HostNodeId),
        policies: &Policies,
        now_ns: u64,
    ) -> Option<StaysWhy> {
        let areas: Vec<_> =
            vm.memory_areas().into_iter().filter(|area| area.guest_node == guest_node).collect();
        let unknown = || StaysWhy::Unknown("where its hypervisor has it is not known".to_owned());
        let busy = [
            (!vm.description.devices.is_empty(), StaysWhy::Devices),
            (areas.is_empty(), unknown()),
            (vm.is_rehomed(), StaysWhy::Rehome),
            (!policies.rehome.auto, StaysWhy::Manual { guest_node, node: to }),
            (vm.is_resized(), StaysWhy::Resize),
            (vm.waits() || vm.is_migrating(), StaysWhy::Migration),
        ];
        if let Some((_, why)) = busy.into_iter().find(|(applies, _)| *applies) {
            return Some(why);
        }
        if let Some(problem) = &vm.homing.problem {
            return Some(StaysWhy::Unknown(problem.clone()));
        }
        let Some(observed) = vm.homing.observed.as_deref() else { return Some(StaysWhy::NotSeen) };
        let samples = observed.of(guest_node);
        if samples.is_empty() {
            return Some(StaysWhy::NotSeen);
        }
        if let Some(why) = vm.what_keeps(&samples, to, observed, policies) {
            return Some(why);
        }
        let views = node_views((world, &self.scheduling.last), id, vm, observed, policies);
        let view: NodeView = views.into_iter().find(|view| view.guest_node == guest_node)?;
        if let Some((needed, free)) = lacking(&samples, to, observed) {
            let (needed_mib, free_mib) = (needed.div_ceil(1 << 20), free >> 20);
            return Some(StaysWhy::NoRoom { node: to, needed_mib, free_mib });
        }
        self.rehoming.rehomer.waits_for(&policies.rehome, id, &view, now_ns).map(StaysWhy::Waits)
    }
}

/// What would come to a node and what is free there, bytes, of the first size of pages for which that is not enough.
fn lacking(samples: &[&AreaSample], to: HostNodeId, observed: &MemoryObservation) -> Option<(u64, u64)> {
    let mut away: BTreeMap<u64, u64> = BTreeMap::new();
    for sample in samples {
        let sum = away.entry(sample.area.page_kib).or_default();
        *sum = sample.movable(to).iter().fold(*sum, |sum, (_, size)| sum.saturating_add(size.bytes));
    }
    let with_room = |(page_kib, needed)| (needed, observed.room(to, page_kib).available_of(page_kib));
    away.into_iter().map(with_room).find(|(needed, free)| needed > free)
}

impl Vm {
    /// Host nodes that the vCPUs of a guest node run on, as far as that is known.
    fn nodes_of_vcpus(&self, guest_node: GuestNodeId) -> BTreeSet<HostNodeId> {
        let vcpus = self.vcpus_of(guest_node);
        vcpus.iter().filter_map(|vcpu| self.locations.get(vcpu)).map(|location| location.node).collect()
    }

    /// What keeps memory of a guest node from a host node, by the kernel or by the hypervisor.
    fn what_keeps(
        &self,
        samples: &[&AreaSample],
        to: HostNodeId,
        observed: &MemoryObservation,
        policies: &Policies,
    ) -> Option<StaysWhy> {
        for sample in samples {
            let Some(obstacle) = self.obstacle(sample, to, observed) else { continue };
            let memory = self.backing_of(&sample.area);
            return Some(match obstacle {
                Obstacle::Devices => StaysWhy::Devices,
                Obstacle::Pool => StaysWhy::Pool { node: to, page_kib: sample.area.page_kib },
                Obstacle::Bound => StaysWhy::Bound {
                    policy: memory.map_or(NumaPolicy::Default, |memory| memory.policy.clone()),
                    nodes: memory.map(|memory| memory.host_nodes.clone()).unwrap_or_default(),
                },
                Obstacle::Cpuset => StaysWhy::Cpuset(to),
                Obstacle::NoMemory => StaysWhy::NoMemory(to),
            });
        }
        let scheduled = Pages::of(self, policies) == Pages::ToVcpus;
        scheduled.then_some(StaysWhy::Scheduled).or_else(|| too_much_kept(samples, to).map(StaysWhy::Kept))
    }
}
