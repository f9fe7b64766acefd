//! Which of the steps that policies propose begin now.
//!
//! | about | order |
//! |---|---|
//! | a vCPU | a step that is under way, a move that was asked for, a policy's CPUs |
//! | the pages of a VM | a move that is under way, then whose they are by [`Pages`] |
//! | the size and the home of a guest node | its size: a look at memory that leads to another size leads to no other home |
//! | the channel of a VM | attaching or detaching it, a replug, asking for its device again |
//! | other threads of a VM | follow when none of its vCPUs is on its way |
//!
//! A step that cannot begin yet waits, and is noted as wanted: a move of pages or new CPUs for a vCPU until what is under way
//! has ended, a step with a time until that has come. Any other is dropped; it is proposed again for as long as it is wanted.

use super::Now;
use crate::{
    Action, Plan, Policies, Step,
    memory_move::MemoryReason,
    world::{Vm, VmId},
};

/// Whose the pages of a VM are, the first one first. The others propose no move of them: what they remember would count it as made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// A re-home's, while it is under way.
    Rehome,
    /// `vprobe`'s, where that takes memory to vCPUs.
    ToVcpus,
    /// That of what brings them home.
    Home,
}

impl Pages {
    pub(super) fn of(vm: &Vm, policies: &Policies) -> Self {
        match (vm.is_rehomed(), vm.memory_goes_to_vcpus(policies)) {
            (true, _) => Self::Rehome,
            (false, true) => Self::ToVcpus,
            (false, false) => Self::Home,
        }
    }
}

/// What becomes of a step.
enum Verdict {
    Begins,
    Waits,
    Dropped,
}

/// What the steps before it in the plan, of the same VM, have taken.
#[derive(Default)]
struct Taken {
    vm: Option<VmId>,
    vcpus: bool,
    pages: bool,
    size: bool,
    channel: bool,
}

/// Makes the plan of what was proposed, in the order of VMs and, of each, in the order in which [`place`] has actions.
pub(super) fn settle_conflicts(now: Now<'_>, mut proposed: Vec<Step>) -> Plan {
    proposed.sort_by_key(|step| (step.vm, place(&step.action)));
    let (mut plan, mut taken) = (Plan::default(), Taken::default());
    for step in proposed {
        let Some(vm) = now.world.get(step.vm).and_then(|managed| managed.vm.as_ref()) else {
            // With a VM that is gone nothing contends.
            plan.steps.push(step);
            continue;
        };
        if taken.vm != Some(step.vm) {
            taken = Taken { vm: Some(step.vm), ..Taken::default() };
        }
        match verdict(vm, &step, &mut taken, now.now_ns) {
            Verdict::Begins => plan.steps.push(step),
            Verdict::Waits => plan.waits.push(step),
            Verdict::Dropped => {}
        }
    }
    plan.considered = now.vms().map(|(id, ..)| id).collect();
    plan
}

/// The first one of two that want the same comes first.
fn place(action: &Action) -> u8 {
    match action {
        Action::RestoreMasks(..) | Action::StopMemory(..) | Action::SettlePins(_) | Action::PlaceAgain(_) => {
            0
        }
        Action::SizeNode(_) | Action::Resize(..) | Action::Rehome(..) => 0,
        Action::RehomeNode(_) => 1,
        Action::Move(..) => 2,
        Action::Confine(_) => 3,
        Action::Follow => 4,
        Action::ObserveMemory(_) => 5,
        Action::WatchHotness(_) => 6,
        Action::MoveMemory(order) => match order.why {
            MemoryReason::Rehome(_) => 7,
            MemoryReason::Nearer(_) => 8,
            MemoryReason::Home(_) => 9,
        },
        Action::Migrate(..) | Action::Attach(_) | Action::Mark(..) | Action::Detach(_) => 10,
        Action::Replug(..) => 11,
        Action::GiveUpDetach(_) => 12,
        Action::Publish(..) => 13,
        // They contend with nothing.
        Action::Rank(..) | Action::Recover(_) => 14,
    }
}

fn verdict(vm: &Vm, step: &Step, taken: &mut Taken, now_ns: u64) -> Verdict {
    let begins_if = |ready: bool, otherwise| if ready { Verdict::Begins } else { otherwise };
    let scheduling = &vm.scheduling;
    match &step.action {
        Action::Move(wanted, _) => {
            let mask = scheduling.masks.get(&wanted.vcpu);
            begins_if(mask.is_none_or(|mask| !mask.step.is_under_way()), Verdict::Dropped)
        }
        Action::Confine(confine) => {
            taken.vcpus = true;
            let moved = vm.moves.iter().any(|task| task.what().is_some_and(|of| of.vcpu == confine.vcpu));
            let begun = scheduling.masks.get(&confine.vcpu).is_none_or(|mask| mask.step.is_under_way());
            begins_if(scheduling.clean_ns.is_some() && !begun && !moved, Verdict::Waits)
        }
        Action::Follow => begins_if(!taken.vcpus, Verdict::Dropped),
        Action::MoveMemory(_) if std::mem::replace(&mut taken.pages, true) => Verdict::Dropped,
        Action::MoveMemory(_) => {
            let ready = !scheduling.memory.task.is_under_way() && scheduling.clean_ns.is_some();
            begins_if(ready, Verdict::Waits)
        }
        Action::ObserveMemory(_) => {
            begins_if(!vm.homing.observation.is_under_way() && step.not_before_ns <= now_ns, Verdict::Waits)
        }
        Action::SizeNode(_) => {
            taken.size = true;
            Verdict::Begins
        }
        Action::RehomeNode(_) => begins_if(!taken.size, Verdict::Dropped),
        Action::Attach(_) | Action::Detach(_) => {
            let begins = step.not_before_ns <= now_ns;
            taken.channel |= begins;
            begins_if(begins, Verdict::Waits)
        }
        Action::Replug(..) | Action::GiveUpDetach(_) if taken.channel => Verdict::Dropped,
        _ => begins_if(step.not_before_ns <= now_ns, Verdict::Waits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Memories, Policies, Reason, World, decide,
        memory_move::{HomeCause, HomeWhy, MemoryPolicy, MoveMemory},
        rehome::Rehome,
        scheduling::{Cause, Figures, Policy, Why},
        sizing::{Resize, SizedBy},
        world::{
            Confine, Confining, DescriptionSource, Link, ManagedVm, Mechanism, Move, Mover, PolicyMask,
            RehomeWish, Replug, Task, TaskId, VcpuMask,
        },
    };
    use proptest::prelude::*;
    use vnuma_model::{CpuSet, HostTopology, Vcpu, VmCandidate, VmDescription};

    const ID: VmId = 1;
    const NOW_NS: u64 = 100;
    const TASK: TaskId = TaskId { vm: ID, number: 1 };

    /// A VM of two vCPUs, with masks that can be set.
    fn world(change: impl FnOnce(&mut Vm)) -> World {
        let mut world = World::new(HostTopology::default());
        let vcpu =
            |index: u32| Vcpu { index: index as _, apic_id: index, boot_node: None, tid: 10 + index as i32 };
        let description = VmDescription { vcpus: vec![vcpu(0), vcpu(1)], ..description() };
        let mut vm = Vm::new(&world.host, description, DescriptionSource::Hypervisor, 0);
        vm.scheduling.clean_ns = Some(0);
        vm.scheduling.masks = (0..2).map(|vcpu| (vcpu, VcpuMask::default())).collect();
        change(&mut vm);
        let mut managed = ManagedVm::new(VmCandidate::new("qmp:a", "a", 0), 0);
        managed.vm = Some(vm);
        world.insert(ID, managed);
        world
    }

    fn why() -> Why {
        let (before, expected) = (Figures::default(), Figures::default());
        Why {
            policy: Policy::Vprobe,
            cause: Cause::Memory,
            pressure: None,
            before,
            expected,
            caused_by: None,
        }
    }

    fn confine(vcpu: u32) -> Action {
        Action::Confine(Confine { vcpu, to: None, why: why() })
    }

    fn moved(vcpu: u32) -> Move {
        Move { vcpu, node: 0, mover: Mover::Operator, request: Some(7) }
    }

    fn memory(why: MemoryReason) -> Action {
        let (from, to, bytes, page_kib, reserve_kib) = (1, 0, 4096, 4, 0);
        Action::MoveMemory(MoveMemory {
            from,
            to,
            bytes,
            page_kib,
            reserve_kib,
            within: None,
            parts: None,
            why,
        })
    }

    fn home() -> MemoryReason {
        MemoryReason::Home(HomeWhy {
            policy: MemoryPolicy::Periodic,
            cause: HomeCause::Period,
            guest_node: 0,
            displaced_bytes: 4096,
            price_ns: 0.0,
            saving_ns_per_s: 0.0,
            assumed: true,
            hottest_first: false,
        })
    }

    /// What begins, and what waits, of these actions.
    fn settled(world: &World, actions: Vec<Action>) -> (Vec<Action>, Vec<Action>) {
        let steps = actions.into_iter().map(|action| Step::now(ID, action)).collect();
        let plan = settle_conflicts(Now::new(world, NOW_NS), steps);
        let actions = |steps: Vec<Step>| steps.into_iter().map(|step| step.action).collect();
        (actions(plan.steps), actions(plan.waits))
    }

    #[test]
    fn a_move_that_was_asked_for_comes_before_the_cpus_of_a_policy() {
        let asked = Action::Move(moved(0), Reason::Requested);
        let world = world(|vm| vm.moves.push(Task::wanted(moved(0))));
        let (begins, waits) = settled(&world, vec![confine(0), confine(1), asked.clone()]);
        assert_eq!((begins, waits), (vec![asked, confine(1)], vec![confine(0)]));
    }

    #[test]
    fn nothing_is_begun_with_a_vcpu_that_is_on_its_way() {
        let begun = |vm: &mut Vm| {
            vm.scheduling.masks.entry(0).or_default().step.begin(TASK, Confining { mask: None, why: why() });
        };
        let asked = Action::Move(moved(0), Reason::Requested);
        let (begins, waits) = settled(&world(begun), vec![asked, confine(0), Action::Follow]);
        assert_eq!((begins, waits), (vec![], vec![confine(0)]), "the move stays asked for");
        let (begins, _) = settled(&world(|_| {}), vec![Action::Follow]);
        assert_eq!(begins, [Action::Follow]);
    }

    #[test]
    fn pages_are_moved_for_a_re_home_before_they_come_home_or_go_to_vcpus() {
        let rehome = || memory(MemoryReason::Rehome(0));
        let (begins, waits) = settled(&world(|_| {}), vec![memory(home()), rehome()]);
        assert_eq!((begins, waits), (vec![rehome()], vec![]));
        let (begins, waits) = settled(&world(|vm| vm.scheduling.clean_ns = None), vec![rehome()]);
        assert_eq!((begins, waits), (vec![], vec![rehome()]));
    }

    #[test]
    fn pages_are_of_a_re_home_then_of_vprobe_then_of_what_brings_them_home() {
        let mut policies = Policies::default();
        let of = |policies: &Policies, policy, rehomed: bool| {
            let world = world(|vm| {
                vm.scheduling.policy = policy;
                vm.homing.rehome = rehomed.then(|| Rehome::new(0, 1, Vec::new()));
            });
            let vm = world.get(ID).and_then(|managed| managed.vm.as_ref()).expect("a VM");
            Pages::of(vm, policies)
        };
        assert_eq!(of(&policies, Policy::Vprobe, false), Pages::Home, "it moves no memory");
        policies.settings.memory_bytes_per_s = 1;
        assert_eq!(of(&policies, Policy::Vprobe, false), Pages::ToVcpus);
        assert_eq!(of(&policies, Policy::Brm, false), Pages::Home);
        assert_eq!(of(&policies, Policy::Vprobe, true), Pages::Rehome);
    }

    #[test]
    fn a_guest_node_that_changes_its_size_gets_no_other_home() {
        let resize = Action::SizeNode(Resize::new(0, 0, 4096, SizedBy::Policy, NOW_NS));
        let wish = RehomeWish { guest_node: 0, node: 1, dry_run: false, move_pinned: true, why: None };
        let (begins, waits) = settled(&world(|_| {}), vec![Action::RehomeNode(wish), resize.clone()]);
        assert_eq!((begins, waits), (vec![resize], vec![]));
        let (begins, _) = settled(&world(|_| {}), vec![Action::RehomeNode(wish)]);
        assert_eq!(begins, [Action::RehomeNode(wish)]);
    }

    #[test]
    fn a_vm_that_is_being_attached_is_asked_for_nothing_else_of_its_channel() {
        let replug = Action::Replug(Replug { vcpu: 1, node: 1 }, Reason::Astray);
        let attach = Action::Attach(Reason::Marked);
        let (begins, waits) = settled(&world(|_| {}), vec![replug.clone(), attach.clone()]);
        assert_eq!((begins, waits), (vec![attach.clone()], vec![]));
        let later = Step { vm: ID, action: attach, not_before_ns: NOW_NS + 1 };
        let world = world(|_| {});
        let plan = settle_conflicts(Now::new(&world, NOW_NS), vec![later, Step::now(ID, replug.clone())]);
        assert_eq!(plan.steps, [Step::now(ID, replug)], "one that is to be attached later is not yet");
    }

    #[test]
    fn a_step_with_a_time_waits_for_it() {
        let step =
            |not_before_ns| Step { vm: ID, action: Action::ObserveMemory(Reason::Moved), not_before_ns };
        let world = world(|_| {});
        let plan = settle_conflicts(Now::new(&world, NOW_NS), vec![step(NOW_NS + 1)]);
        assert_eq!((plan.steps, plan.waits), (vec![], vec![step(NOW_NS + 1)]));
        let plan = settle_conflicts(Now::new(&world, NOW_NS), vec![step(NOW_NS)]);
        assert_eq!((plan.steps.len(), plan.waits.len(), plan.considered), (1, 0, vec![ID]));
    }

    #[test]
    fn a_look_at_memory_says_whether_somebody_asked_for_it() {
        let mut world = world(|_| {});
        let looks = |world: &World, now_ns| {
            let plan = decide(world, &Policies::default(), &mut Memories::default(), now_ns);
            plan.steps.into_iter().map(|step| step.action).collect::<Vec<_>>()
        };
        world.observe_now(ID, 0, NOW_NS);
        assert_eq!(looks(&world, NOW_NS), [Action::ObserveMemory(Reason::Requested)]);
        if let Some((_, vm)) = world.vm_mut(ID) {
            vm.homing.observation.begin(TASK, ());
        }
        world.set_memory_policy(ID, MemoryPolicy::Periodic, 0);
        world.note_observation(TASK, Err("it cannot be seen".to_owned()), NOW_NS);
        assert_eq!(looks(&world, 1 << 60), [Action::ObserveMemory(Reason::Period)]);
    }

    #[test]
    fn pins_of_an_earlier_vnumad_are_settled_once_over_each_connection() {
        let (mut world, mut memories) = (world(|_| {}), Memories::default());
        let mut settles = |connection| {
            if let Some(managed) = world.get_mut(ID) {
                managed.abilities.pins = true;
                managed.link = Link::Answers { connection };
            }
            let plan = decide(&world, &Policies::default(), &mut memories, NOW_NS);
            plan.steps.contains(&Step::now(ID, Action::SettlePins(Reason::LeftBehind)))
        };
        assert_eq!([1, 1, 2, 2].map(&mut settles), [true, false, true, false]);
    }

    #[test]
    fn what_a_vm_has_left_is_ended_once() {
        for ended in [false, true] {
            let mut world = world(|vm| {
                let mask = PolicyMask { cpus: CpuSet::default(), of_cache: false, by: Mechanism::Affinity };
                vm.scheduling.masks.entry(0).or_default().policy = Some(mask);
                let Action::MoveMemory(order) = memory(home()) else { return };
                vm.scheduling.memory.begin(TASK, order, 0);
            });
            let pid = world.drop_vm(ID, ended).map_or(0, |vm| vm.description.pid);
            let mut memories = Memories::default();
            let mut steps = |world: &World| decide(world, &Policies::default(), &mut memories, NOW_NS).steps;
            let masks = Step::now(ID, Action::RestoreMasks(pid, Reason::Ended));
            let moved = Step::now(ID, Action::StopMemory(TASK, Reason::Ended));
            let expected = if ended { vec![moved] } else { vec![masks, moved] };
            let mut left = steps(&world);
            left.sort_by_key(|step| matches!(step.action, Action::StopMemory(..)));
            assert_eq!(left, expected);
            world.commit(NOW_NS);
            assert_eq!(steps(&world), []);
        }
    }

    #[test]
    fn a_scheduler_that_is_loaded_is_told_of_all_places_once() {
        let (mut world, mut memories) = (world(|_| {}), Memories::default());
        let mut told = |loads| {
            world.scheduler_loads = loads;
            let plan = decide(&world, &Policies::default(), &mut memories, NOW_NS);
            plan.steps.contains(&Step::now(ID, Action::PlaceAgain(Reason::Loaded)))
        };
        assert_eq!([0, 1, 1, 2].map(&mut told), [false, true, false, true]);
    }

    #[test]
    fn a_step_that_waits_for_its_time_has_its_vm_considered_then() {
        let mut world = world(|vm| vm.homing.policy = MemoryPolicy::Periodic);
        world.get_mut(ID).expect("a VM").link = Link::Answers { connection: 1 };
        let (policies, mut memories) = (Policies::default(), Memories::default());
        let plan = decide(&world, &policies, &mut memories, NOW_NS);
        world.note_waits(&plan, NOW_NS);
        world.commit(NOW_NS);
        let due_ns = NOW_NS + policies.memory.observe_ns;
        assert_eq!((world.due(due_ns - 1), world.due(due_ns)), (vec![], vec![ID]));
    }

    proptest! {
        /// Whatever is proposed, whatever is under way: no two steps contend, and none with what is under way.
        #[test]
        fn no_two_steps_contend(
            proposed in prop::collection::vec(0_usize..9, 0..12),
            (asked, begun, clean) in any::<(bool, bool, bool)>(),
        ) {
            let resize = Action::SizeNode(Resize::new(0, 0, 4096, SizedBy::Policy, NOW_NS));
            let wish = RehomeWish { guest_node: 0, node: 1, dry_run: false, move_pinned: true, why: None };
            let all = [
                Action::Move(moved(0), Reason::Requested),
                confine(0),
                confine(1),
                Action::Follow,
                Action::ObserveMemory(Reason::Period),
                memory(home()),
                memory(MemoryReason::Rehome(0)),
                resize,
                Action::RehomeNode(wish),
            ];
            let proposed: Vec<Action> = proposed.into_iter().map(|at| all[at].clone()).collect();
            let world = world(|vm| {
                vm.moves.extend(asked.then(|| Task::wanted(moved(0))));
                let mask = vm.scheduling.masks.entry(0).or_default();
                if begun {
                    mask.step.begin(TASK, Confining { mask: None, why: why() });
                }
                vm.scheduling.clean_ns = clean.then_some(0);
            });
            let (begins, waits) = settled(&world, proposed.clone());
            prop_assert!(begins.iter().chain(&waits).all(|step| proposed.contains(step)));
            let count = |is_it: fn(&Action) -> bool| begins.iter().filter(|step| is_it(step)).count();
            let of_pages = count(|step| matches!(step, Action::MoveMemory(_)));
            let wanted = proposed.iter().any(|step| matches!(step, Action::MoveMemory(_)));
            prop_assert_eq!(of_pages, usize::from(wanted && clean));
            prop_assert!(!begins.contains(&confine(0)) || !(asked || begun || !clean));
            prop_assert!(!begins.contains(&all[0]) || !begun);
            let confines = proposed.contains(&confine(0)) || proposed.contains(&confine(1));
            prop_assert!(!begins.contains(&Action::Follow) || !confines);
            let (sizes, homes) = (begins.contains(&all[7]), begins.contains(&all[8]));
            prop_assert!(!(sizes && homes) && sizes == proposed.contains(&all[7]));
        }
    }

    fn description() -> VmDescription {
        VmDescription {
            name: "a".into(),
            pid: 1,
            run_state: "running".into(),
            guest_nodes: Vec::new(),
            vcpus: Vec::new(),
            spare_slots: Default::default(),
            devices: Vec::new(),
            memory_devices: Vec::new(),
        }
    }
}
