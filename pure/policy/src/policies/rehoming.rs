//! Guest nodes that get another home: the steps of that, and those that get it by themselves.

use super::{LastPeriod, Now, PerVm, Propose, conflicts::Pages};
use crate::{
    Action, Policies, Reason, Step,
    memory_move::{MemoryReason, MoveMemory, NodeMemory},
    rehome::{Efforts, Part, Rehome, RehomeStep},
    rehome_policy::{NodeView, Rehomer},
    residency::{AreaSample, MemoryArea, MemoryObservation},
    rules::too_much_kept,
    world::{Move, RehomeWish, Vm, VmId, World, moves_of},
};
use std::collections::BTreeSet;
use vnuma_model::{GuestNodeId, HostNodeId};

/// Proposes the steps of re-homes, and asks for those that the [`Rehomer`] decides on.
pub struct Rehoming<'a> {
    /// Settings.
    pub policies: &'a Policies,
    /// What was counted of vCPUs last.
    pub period: &'a LastPeriod,
}

/// What rehoming remembers of where vCPUs stay.
#[derive(Clone, Debug, Default)]
pub struct RehomingMemory {
    pub(super) rehomer: Rehomer,
    seen: PerVm<Seen>,
}

/// What the last decision about a VM has taken into account.
#[derive(Clone, Debug, Default)]
struct Seen {
    look: u64,
    rehome_ns: Option<u64>,
    efforts: Efforts,
}

impl Propose for Rehoming<'_> {
    type Memory = RehomingMemory;

    fn propose(&self, now: &Now<'_>, memory: &mut RehomingMemory) -> Vec<Step> {
        for id in now.gone() {
            memory.seen.forget(id);
            memory.rehomer.forget(id);
        }
        let mut steps = Vec::new();
        for (id, _, vm) in now.vms().filter(|(_, _, vm)| vm.homing.look > 0 || vm.homing.rehome.is_some()) {
            let seen = memory.seen.of(id, vm.found_ns);
            if std::mem::replace(&mut seen.rehome_ns, vm.homing.rehome_ns) != vm.homing.rehome_ns {
                seen.efforts = Efforts::default();
                if let Some(rehome) = vm.homing.rehome.as_ref().filter(|rehome| rehome.why.is_none()) {
                    memory.rehomer.rehomed(&self.policies.rehome, id, rehome.guest_node, now.now_ns);
                }
            }
            self.take_on(now, id, vm, &mut seen.efforts, &mut steps);
            if std::mem::replace(&mut seen.look, vm.homing.look) != vm.homing.look {
                let wish = self.decide(now, id, vm, &mut memory.rehomer);
                steps.extend(wish.map(|wish| Step::now(id, Action::RehomeNode(wish))));
            }
        }
        steps
    }
}

impl Rehoming<'_> {
    /// The next state of a re-home, and the steps that it needs.
    fn take_on(&self, now: &Now<'_>, id: VmId, vm: &Vm, efforts: &mut Efforts, steps: &mut Vec<Step>) {
        let Some(rehome) = vm.homing.rehome.as_ref().filter(|rehome| rehome.is_active()) else { return };
        let mut next = rehome.clone();
        let step = next.next(&vm.rehome_view(rehome.guest_node), efforts);
        let mut actions = Vec::new();
        match step {
            RehomeStep::Wait if next.phase() == rehome.phase() => return,
            RehomeStep::Wait => {}
            RehomeStep::Memory(part) => {
                let areas = vm.memory_areas();
                match areas.iter().find(|area| area.start == part.start) {
                    Some(area) => actions.push(Action::MoveMemory(order(now.world, &next, part, area))),
                    None => {
                        let problem = "where its hypervisor has it is not known any more".to_owned();
                        next.memory_ended(part.start, part.node, Some(problem));
                    }
                }
            }
            // Another move of a vCPU ends first.
            RehomeStep::Vcpus(_) => {
                let free = |wanted: &Move| {
                    !vm.moves.iter().any(|task| task.what().is_some_and(|of| of.vcpu == wanted.vcpu))
                };
                actions
                    .extend(moves_of(&next).filter(free).map(|wanted| Action::Move(wanted, Reason::Rehomed)));
            }
        }
        let reason = if next.why.is_some() { Reason::Away } else { Reason::Requested };
        actions.push(Action::Rehome(next, reason));
        steps.extend(actions.into_iter().map(|action| Step::now(id, action)));
    }

    /// After a look at the memory of a VM: the guest node that gets another home by itself, if one does.
    fn decide(&self, now: &Now<'_>, id: VmId, vm: &Vm, rehomer: &mut Rehomer) -> Option<RehomeWish> {
        if vm.is_rehomed() || vm.is_resized() || vm.waits() || vm.is_migrating() {
            return None;
        }
        let observed = vm.homing.observed.as_deref().filter(|_| vm.homing.problem.is_none())?;
        let views = node_views((now.world, self.period), id, vm, observed, self.policies);
        let (guest_node, node, why) = rehomer.decide(&self.policies.rehome, id, &views, now.now_ns)?;
        Some(RehomeWish { guest_node, node, dry_run: false, move_pinned: true, why: Some(why) })
    }
}

/// The move of a guest node's memory to its new home.
fn order(world: &World, rehome: &Rehome, part: Part, area: &MemoryArea) -> MoveMemory {
    let total_kib = world.host.node(rehome.to).map_or(0, |node| node.memory_total_kib);
    MoveMemory {
        from: part.node,
        to: rehome.to,
        bytes: part.bytes,
        page_kib: area.page_kib,
        reserve_kib: NodeMemory { total_kib, free_kib: 0 }.reserve_of(area.page_kib),
        within: Some((area.start, area.start.saturating_add(area.bytes))),
        parts: None,
        why: MemoryReason::Rehome(rehome.guest_node),
    }
}

/// The guest nodes of a VM after a look at its memory.
pub(super) fn node_views(
    (world, period): (&World, &LastPeriod),
    id: VmId,
    vm: &Vm,
    observed: &MemoryObservation,
    policies: &Policies,
) -> Vec<NodeView> {
    let view = |guest_node: GuestNodeId| {
        let samples = observed.of(guest_node);
        let home = *vm.placement.homes().get(&guest_node)?;
        let may = |to: &HostNodeId| {
            let kept = |sample: &&AreaSample| vm.obstacle(sample, *to, observed).is_some();
            !samples.iter().any(kept) && too_much_kept(&samples, *to).is_none()
        };
        let stays = vm.stays(guest_node).filter(|to| Pages::of(vm, policies) != Pages::ToVcpus && may(to));
        let movable = |to: HostNodeId| samples.iter().flat_map(move |sample| sample.movable(to));
        let away = stays.into_iter().flat_map(movable);
        Some(NodeView {
            guest_node,
            stays,
            away_bytes: away.fold(0, |sum, (_, size)| sum.saturating_add(size.bytes)),
            bytes: samples.iter().fold(0, |sum, sample| sum.saturating_add(sample.area.bytes)),
            distance: stays.and_then(|to| world.host.distance(to, home)).unwrap_or(20),
            saving: stays.and_then(|to| period.saving(world, id, observed, (home, to))),
        })
    };
    let guest_nodes: BTreeSet<_> = observed.areas.iter().map(|sample| sample.area.guest_node).collect();
    guest_nodes.into_iter().filter_map(view).collect()
}
