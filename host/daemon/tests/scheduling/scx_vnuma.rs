//! Places that are set by scx_vnuma, not by affinities.

use super::*;

fn set_by(run: &Run) -> Vec<Option<String>> {
    run.scheduling().vcpus.iter().map(|vcpu| vcpu.set_by.clone()).collect()
}

#[test]
fn the_scheduler_is_told_of_places_and_ranks_while_the_operators_masks_stay() {
    let mut run = Run::with_vms(&["a"]);
    run.by = Mechanism::Scheduler;
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    let by = Some("sched_ext".to_owned());
    assert_eq!((run.mask(0), set_by(&run)), ("0-7".into(), vec![by.clone(), by]));
    assert_eq!(run.scheduling().vcpus[0].policy_cpus, Some(set("4-7")));
    let ranked = |tid| Ranked { tid, pressure: 30_000 };
    assert_eq!(run.ranked, [(run.id(0), PID, vec![ranked(101), ranked(102)])], "once a period");
    // The masks that are read are the operator's: nobody has changed anything.
    run.period(4, 1);
    assert_eq!((run.orders.len(), run.forgotten.len(), run.ranked.len()), (1, 0, 2));
    // The operator changes one: the place counts no more, and the next one is within it.
    run.masks.insert(101, set("0-1,4"));
    run.period(4, 1);
    assert_eq!(
        (&run.forgotten[..], run.scheduling().vcpus[0].operator_cpus.clone()),
        (&[101][..], Some(set("0-1,4")))
    );
    let last = run.orders.last().and_then(|(_, _, orders)| orders.first()).expect("an order");
    assert_eq!((&last.expected, last.cpus.clone()), (&set("0-1,4"), Some(set("4"))));
    run.ranked.clear();
    run.set_policy(2, Policy::Off);
    assert_eq!((run.answered(2), run.mask(1)), (Some(true), "0-7".into()));
    assert_eq!(run.ranked, [(run.id(0), PID, vec![])], "it has none of them any more");
}

#[test]
fn the_scheduler_is_told_how_the_policies_of_the_host_steal() {
    let mut run = Run::with_vms(&["a", "b"]);
    run.by = Mechanism::Scheduler;
    let expected = [
        (Policy::Credit, Steal::Blindly),
        (Policy::Vprobe, Steal::ByPressure),
        (Policy::VcpuP, Steal::Blindly),
        (Policy::Lb, Steal::ByPressure),
        (Policy::Brm, Steal::WithinPlaces),
        (Policy::VprobePaper, Steal::ByPressure),
    ];
    for (request, (policy, stealing)) in (1..).zip(expected) {
        run.set_policy(request, policy);
        run.period(0, 1);
        assert_eq!(run.stealing, Some(stealing), "{policy}");
    }
    // One that does not act has no say, and of two that disagree neither has.
    run.set_policy(10, Policy::Credit);
    let other = |run: &mut Run, request, policy| {
        run.ask(request, |to| Request::SetPolicy("b".into(), policy, to));
        run.period(0, 1);
        run.stealing
    };
    assert_eq!(other(&mut run, 11, Policy::Observe), Some(Steal::Blindly));
    assert_eq!(other(&mut run, 12, Policy::Brm), Some(Steal::ByPressure));
    assert_eq!(other(&mut run, 13, Policy::VcpuP), Some(Steal::Blindly));
    run.set_policy(14, Policy::Off);
    run.ask(15, |to| Request::SetPolicy("b".into(), Policy::Brm, to));
    run.period(0, 1);
    assert_eq!(run.stealing, Some(Steal::WithinPlaces), "the one that is left decides");
}

#[test]
fn who_is_pinned_is_not_given_to_the_scheduler() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.masks.insert(101, set("3"));
    run.period(0, 1);
    let tids: Vec<i32> = run.ranked[0].2.iter().map(|ranked| ranked.tid).collect();
    assert_eq!(tids, [102]);
    run.set_policy(2, Policy::Observe);
    run.period(0, 1);
    assert_eq!(run.ranked.last(), Some(&(run.id(0), PID, vec![])), "what is observed is not scheduled");
}

#[test]
fn places_survive_the_scheduler_that_comes_and_goes() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    let read_before = run.reading(4, 1);
    let switch = |to, done: [bool; 2]| {
        let threads = vec![(101, done[0]), (102, done[1]), (999, true)];
        Event::Switched(Switch { to, why: "it was killed".into(), threads })
    };
    // As the mover does it: the affinities are the operator's again.
    run.masks.extend([(101, set("0-7")), (102, set("0-7"))]);
    run.step(switch(Mechanism::Scheduler, [true, true]));
    let by = |name: &str| Some(name.to_owned());
    assert_eq!(set_by(&run), [by("sched_ext"), by("sched_ext")]);
    // What was read before says nothing.
    run.step(Event::Sampled(Box::new(read_before)));
    run.period(4, 1);
    assert_eq!((run.orders.len(), run.forgotten.len()), (1, 0));
    // It ends. One of the places could be set as an affinity.
    run.masks.insert(101, set("4-7"));
    run.step(switch(Mechanism::Affinity, [true, false]));
    assert_eq!(set_by(&run), [by("affinity"), None]);
    assert!(
        run.lines.iter().any(|line| line.contains("it was killed") && line.contains("1 vCPUs have lost"))
    );
    run.period(4, 1);
    assert_eq!((set_by(&run), run.mask(1), run.forgotten.len()), (vec![by("affinity"); 2], "4-7".into(), 0));
}

/// As where libvirt pins: the mover tells scx_vnuma of a place first, and the pin is taken back then.
#[test]
fn what_stays_an_affinity_when_the_scheduler_comes_is_ordered_once_more() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    let steps =
        |run: &Run| run.events.iter().filter(|event| matches!(event, api::Event::Confined { .. })).count();
    let (before, shown) = (steps(&run), run.scheduling());
    run.by = Mechanism::Scheduler;
    // It has one of them already.
    run.masks.insert(102, set("0-7"));
    let threads = vec![(102, true)];
    run.step(Event::Switched(Switch { to: Mechanism::Scheduler, why: String::new(), threads }));
    let (_, _, orders) = run.orders.last().expect("an order");
    let order =
        |order: &MaskOrder| (order.tid, order.expected.clone(), order.operator.clone(), order.cpus.clone());
    assert_eq!(
        orders.iter().map(order).collect::<Vec<_>>(),
        [(101, set("4-7"), set("0-7"), Some(set("4-7")))]
    );
    assert_eq!(set_by(&run), vec![Some("sched_ext".to_owned()); 2]);
    let moves = |shown: &api::Scheduling| shown.vcpus.iter().map(|vcpu| vcpu.moves).collect::<Vec<_>>();
    assert_eq!((steps(&run), moves(&run.scheduling())), (before, moves(&shown)), "nothing was moved");
    run.masks.insert(101, set("0-7"));
    run.period(4, 1);
    assert_eq!((run.orders.len(), run.forgotten.len()), (2, 0), "its operator's mask is as expected");
}
