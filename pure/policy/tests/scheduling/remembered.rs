//! What `vprobe` weighs, and what it remembers from period to period.

use crate::world::*;
use vnuma_model::CpuSet;
use vnuma_policy::scheduling::{Cause, Counts, Place, Policy, Settings, Standing};

const ACTING: [Policy; 6] =
    [Policy::Credit, Policy::VcpuP, Policy::Lb, Policy::Brm, Policy::VprobePaper, Policy::Vprobe];

/// All of its references miss, so that it neither uses what is in a cache nor minds who else does.
fn streaming(accesses: &[u64]) -> Counts {
    let llc_misses = accesses.iter().sum::<u64>();
    let instructions = llc_misses * 1000 / 30;
    Counts { instructions, llc_references: llc_misses, llc_misses, accesses: accesses.to_vec() }
}

/// Three of the four CPUs of node 1 have something else to do.
fn fill_three(world: &mut World) {
    for vcpu in 0..3 {
        let cpu = 4 + vcpu + 1;
        let pinned = world.mask([cpu].into_iter().collect());
        let nodes = world.machine.nodes.len();
        let at = world.add(9, vcpu, cpu, friendly(nodes));
        world.vcpus[at].reach = pinned;
    }
}

/// Its memory is on the other node, where its mask does not let it go at first.
fn confined_at_first(world: &mut World, counts: Counts) -> usize {
    let narrow = world.mask((0..4).collect());
    let at = world.add(1, 0, 0, counts);
    world.vcpus[at].reach = narrow;
    assert_eq!(world.period().steps.len(), 1, "it is kept where it is");
    at
}

fn causes(world: &mut World) -> Vec<Cause> {
    world.period().steps.iter().map(|step| step.why.cause).collect()
}

#[test]
fn figures_that_are_lost_apply_for_ten_periods() {
    let moved_after = |lost: usize| {
        let mut world = World::plain(2, 1, 4, Policy::Vprobe);
        let at = confined_at_first(&mut world, thrashing(&[0, 1_000_000]));
        world.vcpus[at].counts = None;
        (1..lost).for_each(|period| assert_eq!(world.period().steps, [], "period {period}"));
        world.vcpus[at].reach = 0;
        causes(&mut world)
    };
    assert_eq!((moved_after(1), moved_after(9)), (vec![Cause::Memory], vec![Cause::Memory]));
    assert_eq!(moved_after(10), []);
}

#[test]
fn a_period_counts_half_in_what_is_known() {
    let mut world = World::plain(2, 1, 4, Policy::Vprobe);
    let at = world.add(1, 0, 0, thrashing(&[1_000_000, 0]));
    assert_eq!(causes(&mut world), [Cause::Kept]);
    world.vcpus[at].counts = Some(thrashing(&[0, 1_000_000]));
    assert_eq!(causes(&mut world), [], "as much on either node");
    assert_eq!(causes(&mut world), [Cause::Memory], "three quarters");
}

#[test]
fn what_is_known_of_a_vcpu_stays_when_others_go() {
    let mut world = World::plain(2, 1, 4, Policy::Vprobe);
    for vm in 1..4 {
        world.add(vm, 0, vm as u32 - 1, streaming(&[1_000_000, 0]));
    }
    assert_eq!(causes(&mut world).len(), 3);
    // The figures of those that stay are half of what they were, so that both nodes are as good.
    world.vcpus.remove(0);
    world.vcpus.iter_mut().for_each(|vcpu| vcpu.counts = Some(streaming(&[0, 1_000_000])));
    assert_eq!(causes(&mut world), []);
}

#[test]
fn a_period_without_much_use_of_memory_changes_nothing_yet() {
    let mut world = World::plain(2, 1, 4, Policy::Vprobe);
    let at = confined_at_first(&mut world, thrashing(&[0, 1_000_000]));
    world.vcpus[at].counts = Some(friendly(2));
    world.vcpus[at].reach = 0;
    assert_eq!(causes(&mut world), [Cause::Memory]);
}

#[test]
fn misses_count_as_use_of_memory_whatever_the_pressure() {
    let causes = |llc_misses: u64| {
        let mut world = World::plain(2, 1, 4, Policy::Vprobe);
        // One reference in a thousand instructions.
        let (instructions, llc_references) = (1_000_000_000, 1_000_000);
        world.add(
            1,
            0,
            0,
            Counts { instructions, llc_references, llc_misses, accesses: vec![0, llc_misses] },
        );
        causes(&mut world)
    };
    assert_eq!((causes(499_000), causes(501_000)), (vec![], vec![Cause::Memory]));
}

#[test]
fn a_move_has_to_save_two_percent() {
    let causes = |there: u64| {
        let mut world = World::plain(2, 1, 4, Policy::Vprobe);
        world.add(1, 0, 0, thrashing(&[1_000_000 - there, there]));
        causes(&mut world)
    };
    // 1.4 and 2.5 % of its time.
    assert_eq!((causes(511_000), causes(520_000)), (vec![Cause::Kept], vec![Cause::Memory]));
}

/// Three that disturb each other in one cache. When the first has gone, the second would save 1.3 % beside the third.
#[test]
fn what_a_move_saves_is_looked_at_again_when_others_have_moved() {
    let mut world = World::plain(1, 4, 4, Policy::Vprobe);
    world.add(1, 0, 0, fitting(&[1_000_000]));
    let second = world.add(2, 0, 1, fitting(&[900_000]));
    world.add(3, 0, 2, thrashing(&[45_010]));
    world.period();
    let on = |at: usize| world.vcpus[at].assigned;
    assert_eq!(on(second), Some(Place::Cache(0)), "{:?}", world.vcpus);
    assert!(on(0) != on(second) && on(2) != on(second), "{:?}", world.vcpus);
}

#[test]
fn who_has_gone_disturbs_nobody_any_more() {
    let mut world = World::plain(1, 3, 4, Policy::Vprobe);
    world.add(1, 0, 0, fitting(&[1_000_000]));
    world.add(2, 0, 1, fitting(&[900_000]));
    world.period();
    let there = world.vcpus.iter().filter(|vcpu| vcpu.assigned == Some(Place::Cache(0)));
    assert_eq!(there.count(), 1, "one of them goes, and the other one stays: {:?}", world.vcpus);
}

#[test]
fn who_goes_makes_room_for_others_in_the_same_decision() {
    let mut world = World::plain(3, 1, 4, Policy::Vprobe);
    let waits = world.add(1, 0, 0, thrashing(&[0, 1_000_000, 0]));
    let goes = world.add(2, 0, 4, thrashing(&[0, 0, 1_000_000]));
    fill_three(&mut world);
    assert_eq!(causes(&mut world), [Cause::Memory, Cause::Memory]);
    assert_eq!((world.node(waits), world.node(goes)), (Some(1), Some(2)));
}

/// A vCPU has its memory on a node that is full with three others and this one.
fn exchange(other_vm: u64, other: Counts, budget: u32) -> Vec<(u64, Cause, Option<u64>)> {
    let settings = Settings { budget, ..Settings::default() };
    let mut world = World::new(&host(2, 1, 4), CpuSet::new(), Policy::Vprobe, settings);
    world.add(1, 0, 0, streaming(&[0, 4_000_000]));
    world.add(other_vm, 1, 4, other);
    fill_three(&mut world);
    let steps = world.period().steps;
    let moved = steps.iter().filter(|step| step.why.cause != Cause::Kept);
    moved.map(|step| (step.key.vm, step.why.cause, step.why.caused_by)).collect()
}

#[test]
fn who_makes_room_for_another_vm_loses_next_to_nothing_and_is_on_its_budget() {
    let indifferent = || streaming(&[500_000, 500_000]);
    let swapped = [(1, Cause::Memory, None), (2, Cause::Swapped, Some(1))];
    assert_eq!(exchange(2, indifferent(), 4), swapped);
    assert_eq!(exchange(2, indifferent(), 0), [], "the budget is used up");
    // It would lose 6.6 % of its time, which is much less than the other one gains.
    let loses = || streaming(&[450_000, 550_000]);
    assert_eq!(exchange(2, loses(), 4), []);
    let of_its_own = [(1, Cause::Memory, None), (1, Cause::Swapped, None)];
    assert_eq!(exchange(1, loses(), 0), of_its_own, "within a VM what counts is the sum");
    // Who comes nearer to its own memory is nobody's doing.
    let gains = || streaming(&[600_000, 400_000]);
    assert_eq!(exchange(2, gains(), 0), [(1, Cause::Memory, None), (2, Cause::Memory, None)]);
}

/// It waits wherever it is, and a CPU of the other node is idle.
#[test]
fn who_was_stolen_has_to_starve_again_before_it_is_stolen_without_credit() {
    let settings = Settings { starve_periods: 3, burst: 1, rest_periods: 1000, ..Settings::default() };
    let mut world = World::new(&host(2, 1, 8), CpuSet::new(), Policy::Vprobe, settings);
    let at = world.add(1, 0, 0, thrashing(&[1_000_000, 0]));
    world.vcpus[at].assigned = Some(Place::Cache(0));
    (world.vcpus[at].ran_ns, world.vcpus[at].waited_ns) = (PERIOD_NS / 10, PERIOD_NS * 9 / 10);
    let mut stolen = Vec::new();
    for period in 1..=8 {
        let idle = if world.node(at) == Some(0) { 9 } else { 1 };
        world.cpus.iter_mut().for_each(|cpu| cpu.idle_ns = if cpu.cpu == idle { PERIOD_NS } else { 0 });
        stolen.extend(causes(&mut world).into_iter().map(|cause| (period, cause)));
    }
    assert_eq!(stolen, [(1, Cause::Stolen), (4, Cause::Starved), (7, Cause::Starved)]);
}

#[test]
fn vcpus_of_a_vm_with_another_policy_are_left_alone() {
    for policy in ACTING {
        let steps = |managed: bool| {
            let mut world = World::plain(2, 1, 2, policy);
            for vcpu in 0..4 {
                let at = world.add(1, vcpu, 0, thrashing(&[0, 1_000_000]));
                (world.vcpus[at].ran_ns, world.vcpus[at].waited_ns) = (PERIOD_NS / 2, PERIOD_NS / 2);
                world.vcpus[at].managed = managed;
            }
            (1..4).for_each(|cpu| world.cpus[cpu].idle_ns = PERIOD_NS);
            (0..20).map(|_| world.period().steps.len()).sum::<usize>()
        };
        assert!(steps(true) > 0, "{policy}");
        assert_eq!(steps(false), 0, "{policy}");
    }
}

#[test]
fn a_mask_of_isolated_cpus_is_left_alone_wherever_the_vcpu_was_seen() {
    let mut world = World::new(&host(2, 1, 4), (0..2).collect(), Policy::Vprobe, Settings::default());
    let isolated = world.mask((0..2).collect());
    // Its operator has just set that mask.
    let at = world.add(1, 0, 4, thrashing(&[0, 1_000_000]));
    world.vcpus[at].reach = isolated;
    let decision = world.period();
    assert_eq!((decision.analysis[at].standing, decision.steps.len()), (Standing::Isolated, 0));
}

#[test]
fn the_papers_policies_release_who_uses_no_memory_any_more() {
    for policy in [Policy::VcpuP, Policy::VprobePaper] {
        let mut world = World::plain(2, 1, 4, policy);
        let at = world.add(1, 0, 0, thrashing(&[1_000_000, 0]));
        assert_eq!(causes(&mut world), [Cause::Partitioned]);
        world.vcpus[at].counts = Some(friendly(2));
        let decision = world.period();
        let steps: Vec<_> = decision.steps.iter().map(|step| (step.to, step.why.cause)).collect();
        assert_eq!(steps, [(None, Cause::Calm)], "{policy}");
        assert_eq!(causes(&mut world), [], "{policy}");
    }
}
