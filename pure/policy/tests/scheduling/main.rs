//! What every policy of vCPUs promises, whatever the host, the masks and the counters are.

mod properties;
mod remembered;
mod world;

use vnuma_model::{CpuLayout, CpuSet, DistanceMatrix};
use vnuma_policy::scheduling::{Cause, Machine, Place, Placed, Policy, Settings};

use world::*;

#[test]
fn vprobe_brings_vcpus_to_their_memory_once_and_leaves_them_there() {
    let mut world = World::plain(2, 1, 4, Policy::Vprobe);
    for vcpu in 0..4 {
        // VM 1 runs on node 0 and has its memory on node 1; VM 2 the other way round.
        world.add(1, vcpu, vcpu, thrashing(&[10_000, 990_000]));
        world.add(2, vcpu, 4 + vcpu, fitting(&[990_000, 10_000]));
        world.add(3, vcpu, vcpu, friendly(2));
    }
    let decision = world.period();
    let expected: Vec<_> = (0..4)
        .map(|vcpu| (1, vcpu, Some(1), Cause::Memory))
        .chain((0..4).map(|vcpu| (2, vcpu, Some(0), Cause::Memory)))
        .collect();
    assert_eq!(shown(&world, &decision), expected, "and VM 3 keeps its mask");
    let why = decision.steps[0].why;
    assert_eq!((why.before.node, why.expected.node, why.caused_by), (Some(0), Some(1), None));
    assert_eq!((why.before.remote_share, why.expected.remote_share), (Some(0.99), Some(0.01)));
    for period in 0..50 {
        assert_eq!(world.period().steps, [], "period {period}");
    }
}

#[test]
fn vprobe_confines_who_is_on_the_right_node_and_releases_who_stops_using_memory() {
    let mut world = World::plain(2, 1, 4, Policy::Vprobe);
    let at = world.add(1, 0, 5, thrashing(&[0, 1_000_000]));
    let decision = world.period();
    assert_eq!(shown(&world, &decision), [(1, 0, Some(1), Cause::Kept)]);
    world.vcpus[at].counts = Some(friendly(2));
    let released: Vec<_> = (0..4).map(|_| world.period().steps.len()).collect();
    assert_eq!(released, [0, 0, 1, 0], "after three quiet periods");
    assert_eq!(world.vcpus[at].assigned, None);
}

#[test]
fn vprobe_leaves_alone_who_hardly_runs_whatever_it_misses() {
    let steps = |misses: u64, seconds: u64| {
        let mut world = World::plain(2, 1, 4, Policy::Vprobe);
        world.add(1, 0, 0, thrashing(&[0, misses]));
        world.period_ns = seconds * PERIOD_NS;
        let steps = world.period().steps;
        steps.iter().map(|step| step.why.cause).collect::<Vec<_>>()
    };
    // 50,000 references per second make it one that uses memory. Nine of ten references miss here.
    assert_eq!((steps(44_990, 1), steps(45_010, 1)), (vec![], vec![Cause::Memory]));
    assert_eq!((steps(179_990, 4), steps(180_010, 4)), (vec![], vec![Cause::Memory]));
    // One that uses memory does not stop and begin again with each little change.
    let mut world = World::plain(2, 1, 4, Policy::Vprobe);
    let at = world.add(1, 0, 5, thrashing(&[0, 47_500]));
    assert_eq!(world.period().steps.len(), 1);
    for period in 0..10 {
        world.vcpus[at].counts = Some(thrashing(&[0, if period % 2 == 0 { 42_500 } else { 37_500 }]));
        assert_eq!(world.period().steps, [], "period {period}");
    }
    world.vcpus[at].counts = Some(thrashing(&[0, 35_000]));
    let released: Vec<_> = (0..4).map(|_| world.period().steps.len()).collect();
    assert_eq!(released, [0, 0, 1, 0]);
}

#[test]
fn vprobe_uses_each_cache_of_a_node() {
    let mut world = World::plain(2, 2, 2, Policy::Vprobe);
    // Both on the first cache of node 0, where the memory of both is: one of them takes the other cache.
    world.add(1, 0, 0, thrashing(&[4_000_000, 0]));
    world.add(2, 0, 1, fitting(&[200_000, 0]));
    world.period();
    let domain = |at: usize| match world.vcpus[at].assigned {
        Some(Place::Cache(domain)) => domain,
        other => panic!("{other:?}"),
    };
    assert_eq!((world.node(0), world.node(1)), (Some(0), Some(0)));
    assert_ne!(domain(0), domain(1));
}

#[test]
fn vprobe_prefers_the_node_next_to_memory_that_has_no_cpus() {
    let mut host = host(3, 1, 2);
    host.nodes[1].cpus = CpuSet::new();
    host.distances =
        DistanceMatrix::new(vec![vec![10, 31, 21], vec![31, 10, 14], vec![21, 14, 10]]).expect("square");
    let mut world = World::new(&host, CpuSet::new(), Policy::Vprobe, Settings::default());
    let at = world.add(1, 0, 0, thrashing(&[0, 1_000_000, 0]));
    world.period();
    assert_eq!(world.node(at), Some(2));
}

#[test]
fn vprobe_does_not_overload_a_node_and_changes_places_where_both_gain() {
    let mut world = World::plain(2, 1, 2, Policy::Vprobe);
    for vcpu in 0..2 {
        world.add(1, vcpu, vcpu, thrashing(&[0, 1_000_000]));
        world.add(2, vcpu, 2 + vcpu, thrashing(&[1_000_000, 0]));
    }
    world.period();
    let nodes: Vec<_> = (0..4).map(|at| world.node(at)).collect();
    assert_eq!(nodes, [Some(1), Some(1), Some(0), Some(0)]);
    // Two CPUs and eight that want them, and other CPUs free: not all go there.
    let mut world = World::plain(2, 1, 2, Policy::Vprobe);
    for vcpu in 0..4 {
        world.add(1, vcpu, vcpu, thrashing(&[1_000_000, 0]));
    }
    world.period();
    let there = (0..4).filter(|&at| world.node(at) == Some(0)).count();
    assert_eq!(there, 2);
}

/// Three vCPUs have most of their memory on a node of four CPUs. On two cores that is one too many.
#[test]
fn vprobe_counts_cores_and_not_siblings() {
    let left = |siblings: u32| {
        let host = host(2, 1, 4);
        let cores = (0..8).step_by(siblings as usize).map(|cpu| (cpu..cpu + siblings).collect()).collect();
        let mut world = World::new(&host, CpuSet::new(), Policy::Vprobe, Settings::default());
        world.machine = Machine::new(&host, &CpuLayout { cores, ..CpuLayout::default() });
        for vcpu in 0..3 {
            world.add(1, vcpu, vcpu, thrashing(&[600_000, 400_000]));
        }
        world.period();
        (0..3).filter(|&at| world.node(at) == Some(1)).count()
    };
    assert_eq!((left(1), left(2)), (0, 1));
}

/// Its memory is on node 0, where its mask does not let it go. Node 2 is the nearest that it may go to, and there is least to do
/// on others.
#[test]
fn vprobe_takes_a_vcpu_to_the_nearest_node_that_its_mask_has() {
    let mut host = host(6, 1, 2);
    let row = |from: usize| (0..6_usize).map(move |to| 10 + 10 * from.abs_diff(to) as u8);
    host.distances = DistanceMatrix::new((0..6).map(|from| row(from).collect()).collect()).expect("square");
    let mut world = World::new(&host, CpuSet::new(), Policy::Vprobe, Settings::default());
    let far = world.mask((4..12).collect());
    let at = world.add(1, 0, 10, thrashing(&[1_000_000, 0, 0, 0, 0, 0]));
    world.vcpus[at].reach = far;
    world.add(2, 0, 4, thrashing(&[0, 0, 90_000, 0, 0, 0]));
    world.period();
    assert_eq!(world.node(at), Some(2));
}

/// Two vCPUs want one CPU of the node that their memory is on. There is least to do on nodes that their mask does not have.
#[test]
fn vprobe_looks_for_room_where_a_mask_allows_it() {
    let mut world = World::plain(8, 1, 1, Policy::Vprobe);
    let allowed = world.mask((4..8).collect());
    for vcpu in 0..2 {
        let at = world.add(1, vcpu, 4, thrashing(&[0, 0, 0, 0, 1_000_000, 0, 0, 0]));
        world.vcpus[at].reach = allowed;
    }
    let pinned = world.mask([5].into_iter().collect());
    let at = world.add(2, 0, 5, friendly(8));
    world.vcpus[at].reach = pinned;
    world.period();
    let mut nodes = [world.node(0), world.node(1)];
    nodes.sort_unstable();
    assert_eq!(nodes, [Some(4), Some(6)]);
}

/// VM 1 takes all CPUs of a node from two others whose memory is there. Its budget pays for one move. After that they are released
/// when they starve, and stay so until the debt is paid.
#[test]
fn vprobe_releases_who_starves_beside_a_vm_whose_budget_is_used_up() {
    let settings =
        Settings { budget: 1, budget_rest_periods: 5, burst: 8, rest_periods: 1, ..Settings::default() };
    let mut world = World::new(&host(2, 1, 4), CpuSet::new(), Policy::Vprobe, settings);
    let narrow = world.mask((0..4).collect());
    for vcpu in 0..4 {
        let at = world.add(1, vcpu, vcpu, friendly(2));
        world.vcpus[at].reach = narrow;
    }
    for vm in 2..4 {
        let at = world.add(vm, 0, 0, fitting(&[1_000_000, 0]));
        world.vcpus[at].entitled_ns = PERIOD_NS / 20;
        world.vcpus[at].assigned = Some(Place::Cache(0));
    }
    world.cpus[4].idle_ns = PERIOD_NS;
    let mut seen = Vec::new();
    for now in 0..16 {
        for vcpu in world.vcpus.iter_mut().filter(|vcpu| vcpu.key.vm > 1) {
            let waits = vcpu.assigned == Some(Place::Cache(0));
            (vcpu.ran_ns, vcpu.waited_ns) =
                if waits { (PERIOD_NS / 2, PERIOD_NS / 2) } else { (PERIOD_NS, 0) };
        }
        let decision = world.period();
        let steps = decision.steps.iter().filter(|step| step.key.vm > 1);
        seen.extend(steps.map(|step| (now, step.key.vm, step.to, step.why.cause, step.why.caused_by)));
    }
    // VM 2 goes back to its memory at once, which is nobody's doing, and so starves as well. The budget holds nothing at 0, and -5
    // + 2 and -5 + 4 for the two that are released: it takes eleven periods to have the price of a move again.
    let there = Some(Place::Cache(0));
    assert_eq!(
        seen,
        [
            (0, 2, Some(Place::Cache(1)), Cause::Stolen, Some(1)),
            (1, 2, there, Cause::Memory, None),
            (2, 3, None, Cause::Starved, Some(1)),
            (4, 2, None, Cause::Starved, Some(1)),
            (15, 2, there, Cause::Kept, None),
            (15, 3, there, Cause::Kept, None),
        ]
    );
}

/// Half of the nodes, and half of the CPUs there, are kept for the host. What they could do is no room for VMs, and what VMs
/// want of the rest is not too much for it: three vCPUs for each CPU everywhere.
#[test]
fn vprobe_counts_only_cpus_that_vms_may_use() {
    let mut world = World::plain(8, 1, 2, Policy::Vprobe);
    world.masks[0] = [1, 3, 5, 7].into_iter().collect();
    for vcpu in 0..4 {
        let memory = |node: u32| (0..8).map(|at| if at == node { 1_000_000 } else { 0 }).collect::<Vec<_>>();
        world.add(1, vcpu, (vcpu + 1) % 4 * 2 + 1, thrashing(&memory(vcpu)));
        world.add(2, vcpu, (vcpu + 2) % 4 * 2 + 1, thrashing(&memory(vcpu)));
        world.add(3, vcpu, vcpu * 2 + 1, friendly(8));
    }
    for vcpu in &mut world.vcpus {
        (vcpu.ran_ns, vcpu.waited_ns) = (PERIOD_NS / 3, PERIOD_NS * 2 / 3);
    }
    world.period();
    let nodes: Vec<_> = (0..8).map(|at| world.node(at)).collect();
    let home = [0, 1, 2, 3, 0, 1, 2, 3].map(Some);
    assert_eq!(nodes, home);
}

#[test]
fn vprobe_lets_one_vm_cause_no_more_moves_than_its_budget() {
    let crowded = |budget| {
        let settings = Settings { budget, ..Settings::default() };
        let mut world = World::new(&host(1, 2, 8), CpuSet::new(), Policy::Vprobe, settings);
        let pinned = world.mask([0].into_iter().collect());
        let at = world.add(1, 0, 0, thrashing(&[50_000_000]));
        world.vcpus[at].reach = pinned;
        for vm in 2..8 {
            world.add(vm, 0, 1, fitting(&[100_000]));
        }
        let steps = world.period().steps;
        let caused = steps.iter().filter(|step| step.why.caused_by == Some(1)).count();
        let moved = steps.iter().filter(|step| step.to == Some(Place::Cache(1))).count();
        (caused, moved)
    };
    assert_eq!(crowded(0), (0, 0));
    assert_eq!(crowded(2), (2, 2));
    assert_eq!(crowded(100), (6, 6));
}

#[test]
fn vprobe_steals_for_an_idle_cpu_and_first_who_waits_too_long() {
    let mut world = World::plain(2, 1, 2, Policy::Vprobe);
    for vcpu in 0..3 {
        let at = world.add(1, vcpu, 0, thrashing(&[1_000_000 + u64::from(vcpu), 0]));
        world.vcpus[at].assigned = Some(Place::Cache(0));
    }
    for at in 0..3 {
        (world.vcpus[at].ran_ns, world.vcpus[at].waited_ns) = (PERIOD_NS * 2 / 3, PERIOD_NS / 3);
    }
    world.cpus[3].idle_ns = PERIOD_NS;
    let decision = world.period();
    let stolen: Vec<_> = shown(&world, &decision).into_iter().filter(|step| step.2 == Some(1)).collect();
    assert_eq!(stolen.len(), 1, "{decision:?}");
}

/// Eight vCPUs want four CPUs. By their number both nodes have as much; by what they are entitled to one has three times as
/// much as the other.
#[test]
fn vprobe_balances_what_vcpus_are_entitled_to_and_not_their_number() {
    let due = |weights: [u32; 2]| {
        let mut world = World::plain(2, 1, 2, Policy::Vprobe);
        for vcpu in 0..4 {
            world.add(1, vcpu, vcpu % 2, thrashing(&[500_000, 500_000]));
            world.add(2, vcpu, 2 + vcpu % 2, thrashing(&[500_000, 500_000]));
        }
        let groups = (1..3).map(|vm| (vm, (weights[vm as usize - 1], None))).collect();
        let mut moved = 0;
        for _ in 0..20 {
            for vcpu in &mut world.vcpus {
                (vcpu.ran_ns, vcpu.waited_ns) = (PERIOD_NS / 2, PERIOD_NS / 2);
            }
            world.divide(&groups);
            let before: Vec<_> = (0..8).map(|at| world.node(at)).collect();
            world.period();
            moved += (0..8).filter(|&at| world.node(at) != before[at]).count();
        }
        let on = |node: usize| {
            let there = (0..8).filter(|&at| world.node(at) == Some(node));
            there.map(|at| world.vcpus[at].demand(PERIOD_NS)).sum::<f64>()
        };
        (on(0), on(1), moved)
    };
    assert_eq!(due([100, 100]), (2.0, 2.0, 0));
    let (a, b, moved) = due([300, 100]);
    // 3.0 and 1.0 before.
    assert!((1.75..=2.25).contains(&a) && (1.75..=2.25).contains(&b) && moved > 0, "{a} {b} {moved}");
    assert!(moved <= 4, "{moved} moves");
}

/// Three vCPUs wait for one CPU and two for another. Where more time is due is where one is stolen from.
#[test]
fn vprobe_steals_where_most_time_is_due() {
    let stolen = |due_permille: [u64; 2]| {
        let mut world = World::plain(2, 1, 2, Policy::Vprobe);
        for (vcpu, cpu) in [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)] {
            let at = world.add(1, vcpu, cpu, thrashing(&[1_000_000, 0]));
            let vcpu = &mut world.vcpus[at];
            (vcpu.ran_ns, vcpu.waited_ns) = (PERIOD_NS / 3, PERIOD_NS * 2 / 3);
            vcpu.entitled_ns = PERIOD_NS / 1000 * due_permille[cpu as usize];
            vcpu.assigned = Some(Place::Cache(0));
        }
        world.cpus[2].idle_ns = PERIOD_NS;
        let decision = world.period();
        let stolen = decision.steps.iter().find(|step| step.why.cause == Cause::Stolen);
        stolen.map(|step| step.key.vcpu)
    };
    assert_eq!(stolen([300, 300]).map(|vcpu| vcpu < 3), Some(true));
    assert_eq!(stolen([100, 500]).map(|vcpu| vcpu < 3), Some(false));
}

/// Two CPUs are idle. Three vCPUs wait for a CPU, of which 0.3 CPUs are due to each, and two for another one, with 0.4 each: when
/// one of the three is gone, more is due where the two wait.
#[test]
fn vprobe_counts_what_it_has_stolen() {
    let mut world = World::plain(2, 1, 2, Policy::Vprobe);
    for (vcpu, cpu) in [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)] {
        let at = world.add(1, vcpu, cpu, thrashing(&[1_000_000, 0]));
        let vcpu = &mut world.vcpus[at];
        (vcpu.ran_ns, vcpu.waited_ns) = (PERIOD_NS / 3, PERIOD_NS * 2 / 3);
        vcpu.entitled_ns = PERIOD_NS / 1000 * [300, 400][cpu as usize];
        vcpu.assigned = Some(Place::Cache(0));
    }
    (2..4).for_each(|cpu| world.cpus[cpu].idle_ns = PERIOD_NS);
    let decision = world.period();
    let stolen = decision.steps.iter().filter(|step| step.why.cause == Cause::Stolen);
    let stolen: Vec<bool> = stolen.map(|step| step.key.vcpu < 3).collect();
    assert_eq!(stolen.len(), 2);
    assert!(stolen.contains(&true) && stolen.contains(&false), "{stolen:?}");
}

#[test]
fn who_has_no_quota_is_not_taken_to_an_idle_cpu() {
    for policy in [Policy::Credit, Policy::VcpuP, Policy::Lb, Policy::VprobePaper, Policy::Vprobe] {
        let steps = |limit_permille: Option<u64>| {
            let mut world = World::plain(2, 1, 2, policy);
            for vcpu in 0..2 {
                let at = world.add(1, vcpu, 0, thrashing(&[1_000_000, 0]));
                world.vcpus[at].assigned = Some(Place::Cache(0));
            }
            let groups = [(1, (100, limit_permille))].into();
            let mut taken = 0;
            for _ in 0..10 {
                for vcpu in &mut world.vcpus {
                    (vcpu.ran_ns, vcpu.waited_ns) = (PERIOD_NS / 2, PERIOD_NS / 2);
                }
                world.divide(&groups);
                // CPUs 1 to 3 have nothing to do.
                (1..4).for_each(|cpu| world.cpus[cpu].idle_ns = PERIOD_NS);
                let decision = world.period();
                let stolen = |step: &&Placed| matches!(step.why.cause, Cause::Stolen | Cause::Starved);
                taken += decision.steps.iter().filter(stolen).count();
            }
            taken
        };
        // Together they ran for one CPU.
        assert_eq!(steps(Some(1000)), 0, "{policy}");
        assert!(steps(None) > 0 && steps(Some(2000)) > 0, "{policy}");
    }
}

#[test]
fn the_papers_policy_does_what_algorithm_1_says() {
    let mut world = World::plain(2, 1, 4, Policy::VprobePaper);
    // Four that thrash with memory on node 0, wherever they are: two of them go to each node.
    for vcpu in 0..4 {
        world.add(1, vcpu, vcpu, thrashing(&[1_000_000, 0]));
    }
    world.add(2, 0, 4, fitting(&[0, 1_000_000]));
    world.add(3, 0, 5, friendly(2));
    let decision = world.period();
    let by = Cause::Partitioned;
    let expected = [
        (1, 0, Some(0), by),
        (1, 1, Some(1), by),
        (1, 2, Some(0), by),
        (1, 3, Some(1), by),
        (2, 0, Some(0), by),
    ];
    assert_eq!(shown(&world, &decision), expected, "the fitting one comes last and takes what is even");
    assert_eq!(world.period().steps, [], "the same counters give the same assignment");
}

#[test]
fn stealing_policies_take_from_where_they_say() {
    let stolen = |policy| {
        let mut world = World::plain(2, 1, 2, policy);
        // On CPU 0, node 0, and on CPU 3, node 1; CPU 2 of node 1 is idle.
        for (vcpu, cpu) in [(0, 0), (1, 0), (2, 3), (3, 3)] {
            let at = world.add(1, vcpu, cpu, fitting(&[500_000, 500_000 + u64::from(vcpu)]));
            (world.vcpus[at].ran_ns, world.vcpus[at].waited_ns) = (PERIOD_NS / 2, PERIOD_NS / 2);
        }
        let at = world.vcpus.len() - 1;
        world.vcpus[at].counts = Some(friendly(2));
        world.cpus[2].idle_ns = PERIOD_NS;
        let decision = world.decide();
        let stolen = shown(&world, &decision).into_iter().find(|step| step.3 == Cause::Stolen);
        stolen.map(|(_, vcpu, node, _)| (vcpu, node))
    };
    assert_eq!(stolen(Policy::Credit), Some((2, Some(1))), "the first of the next CPU");
    assert_eq!(stolen(Policy::Lb), Some((3, Some(1))), "the one with the least pressure of its node");
    assert_eq!(stolen(Policy::Observe), None);
}

#[test]
fn nobody_is_stolen_for_an_idle_cpu_that_the_operator_does_not_allow() {
    let policies = [Policy::Credit, Policy::VcpuP, Policy::Lb, Policy::VprobePaper, Policy::Vprobe];
    for policy in policies {
        // CPU 2 of node 1 is idle.
        let stolen = |mask: &str| {
            let mut world = World::plain(2, 1, 2, policy);
            let reach = world.mask(mask.parse().expect("a list"));
            for vcpu in 0..3 {
                let at = world.add(1, vcpu, 0, friendly(2));
                (world.vcpus[at].reach, world.vcpus[at].assigned) = (reach, Some(Place::Cache(0)));
                (world.vcpus[at].ran_ns, world.vcpus[at].waited_ns) = (PERIOD_NS / 3, PERIOD_NS * 2 / 3);
            }
            world.cpus[2].idle_ns = PERIOD_NS;
            let decision = world.decide();
            shown(&world, &decision).iter().filter(|step| step.3 == Cause::Stolen).count()
        };
        assert_eq!((stolen("0-3"), stolen("0-1,3")), (1, 0), "{policy}");
    }
}

#[test]
fn off_and_observe_do_nothing_and_observe_shows_everything() {
    for policy in [Policy::Off, Policy::Observe] {
        let mut world = World::plain(2, 1, 2, policy);
        world.add(1, 0, 0, thrashing(&[0, 1_000_000]));
        let decision = world.period();
        assert_eq!(decision.steps, []);
        let shown =
            decision.analysis.first().map(|a| (a.affinity, a.remote_share, a.pressure.map(f64::round)));
        let expected = (policy == Policy::Observe).then_some((Some(1), Some(1.0), Some(30.0)));
        assert_eq!(shown, expected);
    }
}

#[test]
fn brm_finds_the_node_with_the_lower_penalty_more_often() {
    let mut world = World::plain(2, 1, 4, Policy::Brm);
    let at = world.add(1, 0, 0, thrashing(&[0, 1_000_000]));
    let mut there = 0;
    for _ in 0..400 {
        world.period();
        there += usize::from(world.node(at) == Some(1));
    }
    assert!((240..400).contains(&there), "{there} of 400 periods at its memory");
}

#[test]
fn names_are_read_back() {
    for &policy in Policy::ALL {
        assert_eq!(policy.name().parse(), Ok(policy));
    }
    let error = "fast\u{1b}".parse::<Policy>().expect_err("no policy");
    assert!(
        error.to_string().starts_with(r"there is no policy `fast\u{1b}`; there are off, observe,"),
        "{error}"
    );
}
