//! Guest nodes that are sized by what is free on their homes.

use super::{Now, PerVm, Propose};
use crate::{
    Action, Reason, Step,
    sizing::{
        FIRST_REST_NS, LONGEST_REST_NS, Request, Resize, ResizePhase, SizeInput, SizeSettings, SizedBy,
        decide_size, sums,
    },
    world::{DescriptionSource, NodeSizing, Vm, VmId, World},
};
use std::collections::BTreeMap;
use vnuma_model::{GuestNodeId, HostNodeId, Rest};

/// Proposes the steps of changes of size, and asks for those that [`decide_size`] decides on.
pub struct Sizing<'a>(pub &'a SizeSettings);

/// What is remembered of guest nodes that are sized.
#[derive(Clone, Debug, Default)]
pub struct SizingMemory(PerVm<OfVm>);

#[derive(Clone, Debug, Default)]
struct OfVm {
    look: u64,
    nodes: BTreeMap<GuestNodeId, OfNode>,
}

#[derive(Clone, Copy, Debug, Default)]
struct OfNode {
    /// When it was changed last.
    changed_ns: Option<u64>,
    /// Changes that have ended, and words of the operator, up to this time were taken into account.
    noticed_ns: u64,
    /// It is left alone, as its guest has not done what it was asked for.
    rest: Option<Rest>,
}

impl Propose for Sizing<'_> {
    type Memory = SizingMemory;

    fn propose(&self, now: &Now<'_>, memory: &mut SizingMemory) -> Vec<Step> {
        now.gone().for_each(|id| memory.0.forget(id));
        let mut steps = Vec::new();
        for (id, managed, vm) in now.vms() {
            for resize in vm.homing.sizes.values().filter_map(|sizing| sizing.resize.as_ref()) {
                // What its guest has done is known only while its hypervisor answers.
                let depends = matches!(resize.phase(), ResizePhase::Waiting | ResizePhase::Stopping);
                if depends && managed.responsive().is_none() {
                    continue;
                }
                let mut next = resize.clone();
                let requests = next.next(&vm.devices_of(resize.guest_node), now.now_ns);
                if next != *resize {
                    propose(id, next, requests, &mut steps);
                }
            }
            if vm.homing.look == 0 {
                continue;
            }
            let known = memory.0.of(id, vm.found_ns);
            let looked = std::mem::replace(&mut known.look, vm.homing.look) != vm.homing.look;
            if looked && vm.homing.problem.is_none() {
                self.decide(now, id, vm, &mut known.nodes, &mut steps);
            }
        }
        steps
    }
}

impl Sizing<'_> {
    /// The memory of a VM was looked at.
    fn decide(
        &self,
        now: &Now<'_>,
        id: VmId,
        vm: &Vm,
        known: &mut BTreeMap<GuestNodeId, OfNode>,
        steps: &mut Vec<Step>,
    ) {
        if vm.source != DescriptionSource::Hypervisor || !vm.runs() || vm.is_migrating() {
            return;
        }
        let (world, now_ns) = (now.world, now.now_ns);
        for node in &vm.description.guest_nodes {
            let sizing = vm.homing.sizes.get(&node.id);
            let active = sizing.and_then(|sizing| sizing.resize.as_ref()).is_some_and(Resize::is_active);
            let Some(bounds) = vm.size_bounds(node.id, self.0).filter(|_| !active) else { continue };
            let Some((home, home_total, home_free)) = world.room_for(vm, node.id) else { continue };
            let of_node = known.entry(node.id).or_default();
            sizing.into_iter().for_each(|sizing| of_node.notice(sizing));
            let devices = vm.devices_of(node.id);
            let (plugged, requested) = sums(&devices);
            let input = SizeInput {
                requested,
                plugged,
                block: devices.iter().map(|device| device.block_bytes).max().unwrap_or(0),
                bounds,
                home_total,
                home_free,
                promised: world.promised(home),
                sharers: self.sharers(world, home),
                changed_ns: of_node.changed_ns,
                rests_until_ns: of_node.rest.map_or(0, |rest| rest.until_ns()),
                now_ns,
            };
            if let Some(bytes) = decide_size(self.0, &input) {
                of_node.changed_ns = Some(now_ns);
                let mut resize = Resize::new(node.id, plugged, bytes, SizedBy::Policy, now_ns);
                let requests = resize.next(&devices, now_ns);
                propose(id, resize, requests, steps);
            }
        }
    }

    /// Guest nodes that are sized by the controller and plug memory of this node.
    fn sharers(&self, world: &World, home: HostNodeId) -> usize {
        let vms = world.iter().filter_map(|(_, managed)| managed.vm.as_ref());
        vms.flat_map(|vm| vm.description.guest_nodes.iter().map(move |node| (vm, node.id)))
            .filter(|(vm, node)| {
                vm.size_bounds(*node, self.0).is_some() && vm.plugs_from(*node) == Some(home)
            })
            .count()
    }
}

/// The next state of a change of size, and the requests to the hypervisor that it needs.
fn propose(id: VmId, resize: Resize, requests: Vec<Request>, steps: &mut Vec<Step>) {
    let node = resize.guest_node;
    steps.push(Step::now(id, Action::SizeNode(resize)));
    let asked = |(device, bytes)| Step::now(id, Action::Resize(node, device, bytes, Reason::Sized));
    steps.extend(requests.into_iter().map(asked));
}

impl OfNode {
    /// A guest that did not do what it was asked for is left alone for a while, unless an operator has spoken since.
    fn notice(&mut self, sizing: &NodeSizing) {
        if sizing.asked_ns > self.noticed_ns {
            self.rest = None;
        }
        let ended_ns = sizing.ended_ns.filter(|ended_ns| *ended_ns > self.noticed_ns.max(sizing.asked_ns));
        self.noticed_ns = self.noticed_ns.max(sizing.asked_ns).max(sizing.ended_ns.unwrap_or(0));
        let Some(resize) = sizing.resize.as_ref().filter(|resize| resize.by == SizedBy::Policy) else {
            return;
        };
        match (ended_ns, resize.phase()) {
            (Some(ended_ns), ResizePhase::Partly | ResizePhase::Failed) => {
                self.rest.get_or_insert(Rest::new(FIRST_REST_NS, LONGEST_REST_NS)).begin(ended_ns);
            }
            (Some(_), ResizePhase::Done) => self.rest = None,
            _ => {}
        }
    }
}
