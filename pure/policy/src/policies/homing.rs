//! When memory of VMs is looked at, and displaced memory that comes home.
//!
//! ```text
//!   due ──▶ being observed ──▶ observed ──▶ a move ──▶ begun ──▶ ended ──▶ due
//! ```
//!
//! A VM without a policy is observed when somebody asks. Before `adaptive` moves something, it is watched how hot that is, unless
//! that is known of a short while ago: then it is decided again.

use super::{LastPeriod, Now, PerVm, Propose, conflicts::Pages};
use crate::{
    Action, Policies, Reason, Step,
    hotness::Hotness,
    memory_move::{MemoryPolicy, MemoryReason},
    repatriation::{HomeArea, HomeInput, Repatriator, Stray},
    residency::{AreaSample, MemoryObservation},
    world::{Vm, VmId, World},
};
use vnuma_model::HostNodeId;

/// Longest time between two observations while memory is coming home: what the rate allows is saved up for as long.
const ROUND_NS: u64 = 10_000_000_000;

/// Brings displaced memory home as the [`Repatriator`] says.
pub struct Homing<'a> {
    /// Settings.
    pub policies: &'a Policies,
    /// What was counted of vCPUs last.
    pub period: &'a LastPeriod,
}

/// What is remembered of memory that comes home.
#[derive(Clone, Debug, Default)]
pub struct HomingMemory {
    pub(super) repatriator: Repatriator,
    seen: PerVm<Seen>,
}

/// What the last decision about a VM has taken into account.
#[derive(Clone, Debug, Default)]
struct Seen {
    policy: MemoryPolicy,
    /// When the next look at the VM's memory is due, and why.
    next: Option<(u64, Reason)>,
    since_ns: u64,
    look: u64,
    watch: u64,
    move_ended_ns: u64,
}

impl Seen {
    /// What is new since the last decision: a look at the VM's memory, and whether anything is worth another decision.
    fn take_in(&mut self, repatriator: &mut Repatriator, id: VmId, vm: &Vm) -> (bool, bool) {
        let homing = &vm.homing;
        if std::mem::replace(&mut self.since_ns, homing.since_ns) != homing.since_ns {
            repatriator.forget(id);
        }
        let looked = std::mem::replace(&mut self.look, homing.look) != homing.look;
        let watched = std::mem::replace(&mut self.watch, homing.hotness.watch) != homing.hotness.watch;
        (looked, watched || (looked && homing.problem.is_none()))
    }

    /// Whether a move home has ended since the last decision.
    fn move_ended(&mut self, repatriator: &mut Repatriator, id: VmId, vm: &Vm) -> bool {
        let Some(last) = vm.scheduling.memory.shown() else { return false };
        let (Some(ended_ns), MemoryReason::Home(_)) = (last.ended_ns, &last.order.why) else { return false };
        if ended_ns <= self.move_ended_ns || ended_ns < vm.homing.since_ns {
            return false;
        }
        self.move_ended_ns = ended_ns;
        repatriator.ended(id, &last.order, last.moved.bytes, last.moved.stayed(), ended_ns);
        true
    }
}

impl Propose for Homing<'_> {
    type Memory = HomingMemory;

    fn propose(&self, now: &Now<'_>, memory: &mut HomingMemory) -> Vec<Step> {
        let (mut steps, settings) = (Vec::new(), &self.policies.memory);
        let HomingMemory { repatriator, seen: all } = memory;
        for id in now.gone() {
            all.forget(id);
            repatriator.forget(id);
        }
        for (id, _, vm) in now.vms() {
            // Nothing is known of most VMs, and nothing is wanted.
            let homing = &vm.homing;
            let unknown = (homing.policy, homing.look) == (MemoryPolicy::None, 0) && all.get(id).is_none();
            if unknown && homing.observation.wanted.is_none() && !vm.is_looked_at(self.policies) {
                continue;
            }
            let seen = all.of(id, vm.found_ns);
            let mut next = self.chosen(vm, seen, now.now_ns);
            if vm.homing.look > 0 {
                let (looked, news) = seen.take_in(repatriator, id, vm);
                if news {
                    steps.extend(self.decide(now, id, vm, repatriator));
                }
                if looked {
                    next = self.period(vm, vm.homing.looked_ns);
                }
                let rested = |at_ns: u64| at_ns.max(vm.homing.rests_until_ns(settings));
                let ended = seen.move_ended(repatriator, id, vm) && vm.homing.policy != MemoryPolicy::None;
                // Where it is now is looked at as soon as that may cost something again, and soon while more is to come.
                let again = ended.then(|| (rested(now.now_ns), Reason::Moved)).or_else(|| {
                    let in_round = looked && repatriator.in_round(id);
                    let wait_ns = settings.observe_ns.min(ROUND_NS);
                    in_round.then(|| (rested(now.now_ns.saturating_add(wait_ns)), Reason::Period))
                });
                next = next.into_iter().chain(again).min_by_key(|(due_ns, _)| *due_ns);
            }
            let look =
                |(not_before_ns, why)| Step { vm: id, action: Action::ObserveMemory(why), not_before_ns };
            if !vm.homing.observation.is_under_way() {
                let wanted = vm.homing.observation.wanted.into_iter().chain(next);
                let first = wanted.min_by_key(|(due_ns, _)| *due_ns);
                if first.is_some_and(|(due_ns, _)| due_ns <= now.now_ns) {
                    // It begins now.
                    next = self.period(vm, now.now_ns);
                    steps.extend(next.map(look));
                }
                steps.extend(first.map(look));
            }
            seen.next = next;
        }
        steps
    }
}

impl Homing<'_> {
    /// When the next look at a VM's memory is due, after its operator may have chosen another policy.
    fn chosen(&self, vm: &Vm, seen: &mut Seen, now_ns: u64) -> Option<(u64, Reason)> {
        let (policy, before) = (vm.homing.policy, std::mem::replace(&mut seen.policy, vm.homing.policy));
        let due = |why| Some((now_ns.max(vm.homing.rests_until_ns(&self.policies.memory)), why));
        match policy {
            // One without a policy may be looked at because of its size.
            MemoryPolicy::None if policy != before && vm.homing.sizes.is_empty() => None,
            MemoryPolicy::None if seen.next.is_none() && vm.is_looked_at(self.policies) => due(Reason::Sized),
            _ if policy != before && policy != MemoryPolicy::None => due(Reason::Requested),
            _ => seen.next,
        }
    }

    /// When a look is due after that of this time, if a policy of the VM needs looks.
    fn period(&self, vm: &Vm, since_ns: u64) -> Option<(u64, Reason)> {
        let settings = &self.policies.memory;
        let due_ns = since_ns.saturating_add(settings.observe_ns).max(vm.homing.rests_until_ns(settings));
        let wanted = vm.homing.policy != MemoryPolicy::None || vm.is_looked_at(self.policies);
        wanted.then_some((due_ns, Reason::Period))
    }

    /// What was observed becomes a move, if its policy wants one. Before that it is watched how hot it is.
    fn decide(&self, now: &Now<'_>, id: VmId, vm: &Vm, repatriator: &mut Repatriator) -> Option<Step> {
        let (world, now_ns, settings) = (now.world, now.now_ns, &self.policies.memory);
        let pages = Pages::of(vm, self.policies);
        let observed = vm.homing.observed.as_deref().filter(|_| pages != Pages::Rehome)?;
        let memory = &vm.scheduling.memory;
        let hotness = vm.homing.hotness.now(settings, now_ns).filter(|_| settings.hotness);
        let areas = match pages {
            Pages::Home => self.areas(world, vm, id, (observed, hotness)),
            _ => Vec::new(),
        };
        let input = HomeInput {
            vm: id,
            policy: vm.homing.policy,
            sharers: world.memory_sharers(self.policies),
            memory_bytes: observed.areas.iter().fold(0, |sum, one| sum.saturating_add(one.area.guest_bytes)),
            areas: &areas,
            ready: memory.task.wanted.is_none()
                && !memory.task.is_under_way()
                && observed.began_ns >= memory.ended_ns()
                && vm.scheduling.clean_ns.is_some()
                && !vm.homing.hotness.task.is_under_way()
                && !vm.waits()
                && !vm.is_migrating(),
            now_ns: observed.began_ns,
        };
        let (order, next) = repatriator.weigh(settings, &input);
        let watch = settings.hotness && !vm.homing.hotness.holds(settings, now_ns);
        if watch && input.policy == MemoryPolicy::Adaptive && order.is_some() {
            return Some(Step::now(id, Action::WatchHotness(Reason::Weighed)));
        }
        repatriator.remember(id, next);
        Some(Step::now(id, Action::MoveMemory(order?)))
    }

    /// The parts of a VM's memory that may come home.
    fn areas(
        &self,
        world: &World,
        vm: &Vm,
        id: VmId,
        (observed, hotness): (&MemoryObservation, Option<&Hotness>),
    ) -> Vec<HomeArea> {
        let of = |sample: &AreaSample| {
            let home = *vm.placement.homes().get(&sample.area.guest_node)?;
            if vm.obstacle(sample, home, observed).is_some() {
                return None;
            }
            let stray = |(node, size): (HostNodeId, crate::residency::Estimate)| Stray {
                node,
                bytes: size.bytes,
                high: size.high,
                distance: world.host.distance(home, node).unwrap_or(20),
                saving: self.period.saving(world, id, observed, (node, home)),
                heat: hotness.map(|hotness| hotness.heat(observed, sample, node)),
            };
            let end = sample.area.start.saturating_add(sample.area.bytes);
            Some(HomeArea {
                guest_node: sample.area.guest_node,
                home,
                within: (sample.area.start, end),
                page_kib: sample.area.page_kib,
                strays: sample.movable(home).into_iter().map(stray).collect(),
                room: observed.room(home, sample.area.page_kib),
            })
        };
        observed.areas.iter().filter_map(of).collect()
    }
}
