//! Masks of operators: who sets them, and when they are given back.

use super::*;

#[test]
fn switching_off_is_answered_when_the_operators_masks_are_back() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    assert_eq!((run.mask(0), run.mask(1)), ("4-7".into(), "4-7".into()));
    run.obedient = false;
    run.set_policy(2, Policy::Off);
    assert_eq!(run.answered(2), None);
    let (task, _, orders) = run.orders.last().cloned().expect("orders");
    assert!(orders.iter().all(|order| order.cpus.is_none() && order.operator == set("0-7")), "{orders:?}");
    run.counts.clear();
    let outcome = run.obey(task, &orders);
    run.step(outcome);
    assert_eq!((run.answered(2), run.mask(0), run.mask(1)), (Some(true), "0-7".into(), "0-7".into()));
    assert_eq!(run.counts, [(task.vm, 0)], "nothing is left to be looked at");
    assert!(run.lines.iter().any(|line| line.contains("has its operator's CPUs again")), "{:?}", run.lines);
}

#[test]
fn another_policy_begins_with_the_operators_masks() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    run.set_policy(2, Policy::VprobePaper);
    assert_eq!((run.answered(2), run.mask(0)), (Some(true), "0-7".into()));
    run.period(0, 1);
    let masks = [run.mask(0), run.mask(1)];
    assert!(masks.contains(&"4-7".to_owned()), "Algorithm 1 spreads them over both nodes: {masks:?}");
}

#[test]
fn giving_back_is_tried_again_after_a_failure() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    run.obedient = false;
    run.set_policy(2, Policy::Off);
    let failed = |tid| {
        let (act, source) = ("setting its affinity", std::io::Error::from_raw_os_error(22));
        Err(ActError::System { pid: PID, tid, act, source })
    };
    let (task, ..) = run.orders[run.orders.len() - 1];
    run.step(Event::Confined(task, vec![(0, failed(101)), (1, failed(102))]));
    assert_eq!(run.answered(2), Some(false));
    run.obedient = true;
    run.period(4, 1);
    assert_eq!((run.mask(0), run.mask(1)), ("0-7".into(), "0-7".into()));
}

#[test]
fn a_mask_that_somebody_else_sets_is_the_operators() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    run.masks.insert(101, set("0-1,4"));
    // It is noticed with the next period, and the policy goes on within it.
    run.period(0, 1);
    assert_eq!(run.forgotten, [101]);
    assert_eq!(
        (run.scheduling().vcpus[0].operator_cpus.clone(), run.mask(0)),
        (Some(set("0-1,4")), "4".into())
    );
    // It is also noticed when a step finds it.
    run.masks.insert(102, set("2-3"));
    run.set_policy(2, Policy::Off);
    assert_eq!((run.answered(2), run.mask(0), run.mask(1)), (Some(true), "0-1,4".into(), "2-3".into()));
    assert!(run.lines.iter().any(|line| line.contains("its operator's mask now")), "{:?}", run.lines);
}

#[test]
fn what_was_read_before_a_mask_was_set_says_nothing_of_it() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    let late = run.reading(0, 1);
    run.period(0, 1);
    run.step(Event::Sampled(Box::new(late)));
    let shown = run.scheduling();
    assert_eq!((&shown.vcpus[0].policy_cpus, &run.forgotten[..]), (&Some(set("4-7")), &[][..]));
    run.set_policy(2, Policy::Off);
    assert_eq!(run.mask(0), "0-7");
}

#[test]
fn an_operators_move_ends_what_a_policy_wanted() {
    let mut run = Run::with_vms(&["a"]);
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    run.ask(2, |to| Request::Move("a".into(), 0, 0, to));
    run.masks.insert(101, set("0-3"));
    let at = Some(location(&set("0-3"), run.now_ns));
    run.step(Event::Moved(run.task, Ok(at)));
    run.period(0, 1);
    assert_eq!(run.scheduling().vcpus[0].operator_cpus, Some(set("0-3")));
    run.set_policy(3, Policy::Off);
    assert_eq!((run.answered(3), run.mask(0), run.mask(1)), (Some(true), "0-3".into(), "0-7".into()));
}

#[test]
fn an_operators_move_waits_for_the_step_under_way() {
    let mut run = Run::with_vms(&["a"]);
    run.obedient = false;
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    run.ask(2, |to| Request::Move("a".into(), 0, 0, to));
    run.set_policy(3, Policy::Off);
    assert_eq!(run.moves, 0, "which of both was last would not be known");
    let (task, _, orders) = run.orders.pop().expect("orders");
    let made = run.obey(task, &orders);
    run.obedient = true;
    run.step(made);
    assert_eq!(run.moves, 1);
    run.masks.insert(101, set("0-3"));
    let at = Some(location(&set("0-3"), run.now_ns));
    run.step(Event::Moved(run.task, Ok(at)));
    assert_eq!((run.answered(2), run.answered(3)), (Some(true), Some(true)));
    assert_eq!(
        (run.mask(0), run.mask(1), run.counts.last()),
        ("0-3".into(), "0-7".into(), Some(&(run.task.vm, 0)))
    );
}

#[test]
fn nothing_is_confined_before_the_masks_of_an_earlier_vnumad_are_given_back() {
    let mut run = Run::new();
    run.restores = false;
    let candidate = VmCandidate::new("/a", "a", 1);
    run.step(Event::Scanned(Ok(vec![candidate])));
    let connection = run.connections[0].1;
    run.step(Event::Hypervisor(connection, Report::Up(description("a", PID), false)));
    assert_eq!(run.restored, [PID]);
    run.masks.insert(101, set("0-3"));
    run.set_policy(1, Policy::Vprobe);
    run.period(0, 1);
    assert_eq!(run.orders.len(), 0);
    // Read before, with a mask of the earlier vnumad in it.
    let early = run.reading(0, 1);
    run.step(Event::MasksRestored(run.task, Ok(1)));
    run.masks.insert(101, set("0-7"));
    run.step(Event::Sampled(Box::new(early)));
    assert_eq!((run.orders.len(), run.scheduling().vcpus[0].operator_cpus.clone()), (0, None));
    run.period(0, 1);
    assert_eq!(
        (run.mask(0), run.scheduling().vcpus[0].operator_cpus.clone()),
        ("4-7".into(), Some(set("0-7")))
    );
    assert!(run.lines.iter().any(|line| line.contains("an earlier vnumad had confined")), "{:?}", run.lines);
}

#[test]
fn masks_that_could_not_be_given_back_are_tried_again() {
    let mut run = Run::new();
    run.restores = false;
    let candidate = VmCandidate::new("/a", "a", 1);
    run.step(Event::Scanned(Ok(vec![candidate])));
    let (_, connection) = run.connections[0];
    run.step(Event::Hypervisor(connection, Report::Up(description("a", PID), false)));
    for _ in 0..2 {
        run.step(Event::MasksRestored(run.task, Err("no CPU is online".into())));
        run.step(Event::Resync);
    }
    assert_eq!(run.restored, [PID, PID, PID]);
    assert_eq!(run.lines.iter().filter(|line| line.contains("not undone yet")).count(), 1);
    let problem = |run: &Run| run.core.show("a").expect("shown").problem;
    assert!(problem(&run).is_some_and(|problem| problem.contains("not undone yet: no CPU is online")));
    run.step(Event::MasksRestored(run.task, Ok(1)));
    run.step(Event::Resync);
    assert_eq!((run.restored.len(), problem(&run)), (3, None));
}
