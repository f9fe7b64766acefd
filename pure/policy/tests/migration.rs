//! A migration whatever happens to it: QEMU that answers, refuses, is silent or lost, operators that cancel, guests that do not let go.

use proptest::prelude::*;
use vnuma_model::{MigrationProgress, MigrationStatus as Stage};
use vnuma_policy::{
    migration::{Migration, MigrationEvent as E, Order, Phase, Told},
    policies::orders_of,
    world::TaskId,
};

const SECOND_NS: u64 = 1_000_000_000;
/// No migration of these tests is under way for longer without an answer of QEMU's.
const LONG_NS: u64 = 3600 * SECOND_NS;
const STARTING: Phase = Phase::Starting(false);
const SENDING: Phase = Phase::Sending(Told::Nothing);
const TASK: TaskId = TaskId { vm: 1, number: 1 };

fn looked(status: Stage, passes: u64, problem: Option<&str>) -> E {
    let problem = problem.map(str::to_owned);
    E::Looked(MigrationProgress { status, passes, problem, ..MigrationProgress::default() })
}

/// The phase, without what belongs to it.
fn plain(migration: &Migration) -> Phase {
    match migration.phase() {
        Phase::Starting(_) => STARTING,
        Phase::Sending(_) => SENDING,
        phase => phase,
    }
}

/// What is due by now.
fn due(migration: &Migration, now_ns: u64) -> Option<Order> {
    orders_of(migration, true, now_ns).find(|(_, due_ns)| *due_ns <= now_ns).map(|(order, _)| order)
}

/// A migration, what it wanted, and what is true of the VM.
struct Run {
    migration: Migration,
    now_ns: u64,
    orders: Vec<Order>,
    asked: Option<Order>,
    /// The device is in the VM.
    plugged: bool,
    /// What the phases were.
    phases: Vec<Phase>,
    /// It was not told to begin, as QEMU was busy.
    busy: usize,
}

impl Run {
    fn new(post_copy: bool, attached: bool) -> Self {
        let migration = Migration::new("tcp:b:1".into(), post_copy, attached, SECOND_NS);
        let phases = vec![migration.phase()];
        let orders = Vec::new();
        Self { migration, now_ns: SECOND_NS, orders, asked: None, plugged: attached, phases, busy: 0 }
    }

    fn on(&mut self, event: E) {
        let over = self.migration.phase().is_over();
        let before = self.migration.clone();
        match &event {
            E::Released => {
                self.plugged = false;
                self.asked = self.asked.filter(|asked| *asked != Order::Detach);
            }
            E::Attached => self.plugged = true,
            E::ConnectionLost => self.asked = None,
            E::Busy(_) => {
                self.busy += usize::from(self.asked == Some(Order::Begin));
                self.asked = None;
            }
            E::CancelWanted | E::Left | E::AttachFailed(_) => {}
            _ => self.asked = None,
        }
        self.migration.on(event, self.now_ns);
        assert!(!over || self.migration == before, "what is over goes on: {before:?}");
        self.advance();
    }

    fn advance(&mut self) {
        while due(&self.migration, self.now_ns) == Some(Order::GiveUp) {
            self.migration.ordered(TASK, Order::GiveUp, self.now_ns);
        }
        self.note();
        if let Some(order) = due(&self.migration, self.now_ns) {
            assert_eq!(self.asked, None, "{order:?} while that is not answered");
            assert!(!self.migration.phase().is_over());
            self.migration.ordered(TASK, order, self.now_ns);
            assert!(order != Order::Begin || !self.plugged, "it begins with its device");
            self.orders.push(order);
            self.asked = Some(order);
        }
        self.note();
    }

    fn note(&mut self) {
        if self.phases.last() != Some(&plain(&self.migration)) {
            self.phases.push(plain(&self.migration));
        }
    }

    /// Time passes until something is due.
    fn pass(&mut self) {
        let due_ns = orders_of(&self.migration, true, 0).map(|(_, due_ns)| due_ns).min();
        let due_ns = due_ns.unwrap_or(self.now_ns + SECOND_NS);
        self.now_ns = self.now_ns.max(due_ns) + 1;
        self.advance();
    }

    /// The answer of a QEMU that does what it is told, and whose migration is at this stage.
    fn answer(&mut self, stage: Stage, passes: u64) {
        let Some(order) = self.asked else { return self.pass() };
        let looked = looked(stage, passes, None);
        self.on(match order {
            Order::Mark => E::Marked(Ok(())),
            Order::Detach => E::Released,
            Order::Begin => E::Begun(Ok(())),
            Order::Look | Order::Switch | Order::Cancel | Order::GiveUp => looked,
        });
    }
}

fn run(post_copy: bool, attached: bool) -> Run {
    let mut run = Run::new(post_copy, attached);
    run.advance();
    run
}

#[test]
fn the_way_there() {
    let mut run = run(false, true);
    for (stage, passes) in [(Stage::None, 0); 3].into_iter().chain([(Stage::Active, 1); 4]) {
        run.answer(stage, passes);
    }
    run.pass();
    run.answer(Stage::Completed, 2);
    assert_eq!(run.orders[..4], [Order::Mark, Order::Detach, Order::Begin, Order::Look]);
    let phases = [Phase::Marking, Phase::Detaching, STARTING, SENDING, Phase::Done];
    assert_eq!(run.phases, phases);
    assert_eq!((run.migration.problem.as_ref(), run.migration.progress.passes), (None, 2));
}

#[test]
fn a_vm_without_a_channel_begins_at_once_and_returns_to_nothing() {
    let mut run = run(false, false);
    assert_eq!(run.orders, [Order::Begin]);
    run.on(E::Begun(Err("no".into())));
    assert_eq!((run.migration.phase(), run.migration.problem.as_deref()), (Phase::Failed, Some("no")));
    assert!(!run.migration.keeps_mark());
}

#[test]
fn whatever_fails_the_vm_is_attached_again() {
    let failures: [(usize, E, Option<&str>); 5] = [
        (2, E::Begun(Err("no".into())), Some("no")),
        (3, looked(Stage::Failed, 0, Some("full")), Some("full")),
        (3, looked(Stage::Cancelled, 0, None), Some("somebody has cancelled it")),
        (3, looked(Stage::Failed, 0, None), Some("the hypervisor does not say why")),
        (3, looked(Stage::None, 0, None), Some("the hypervisor knows of no migration any more")),
    ];
    for (answers, failure, problem) in failures {
        let mut run = run(false, true);
        (0..answers).for_each(|_| run.answer(Stage::Active, 1));
        run.on(failure.clone());
        assert_eq!(run.migration.phase(), Phase::Returning, "{failure:?}");
        assert!(run.migration.may_attach() && run.migration.keeps_mark());
        run.on(E::Attached);
        assert_eq!((run.migration.phase(), run.migration.problem.as_deref()), (Phase::Failed, problem));
    }
}

#[test]
fn before_the_guest_has_let_go_nothing_has_to_be_attached() {
    let mut marking = run(false, true);
    marking.on(E::Marked(Err("no room".into())));
    assert_eq!(marking.migration.phase(), Phase::Failed);
    assert!(!marking.migration.keeps_mark(), "the guest was not asked");
    let mut refused = run(false, true);
    refused.answer(Stage::None, 0);
    refused.on(E::ReleaseFailed("busy".into()));
    assert_eq!(refused.migration.problem.as_deref(), Some("busy"));
    assert!(refused.migration.keeps_mark(), "it may let go yet");
}

#[test]
fn a_guest_that_keeps_the_device_is_asked_again_and_not_without_end() {
    let mut run = run(false, true);
    run.answer(Stage::None, 0);
    let began_ns = run.now_ns;
    while run.migration.phase() == Phase::Detaching {
        assert!(run.now_ns < began_ns + LONG_NS, "it is asked for ever");
        run.on(E::ReleasePending);
        run.pass();
    }
    assert_eq!(run.migration.phase(), Phase::Failed);
    assert!(run.orders.iter().filter(|order| **order == Order::Detach).count() > 10);
    assert!(run.migration.keeps_mark(), "it may let go yet");
}

#[test]
fn a_vm_that_cannot_be_attached_again_is_said_to_be_detached() {
    let mut run = run(false, true);
    (0..2).for_each(|_| run.answer(Stage::None, 0));
    run.on(E::Begun(Err("no route".into())));
    run.on(E::AttachFailed("no port".into()));
    run.pass();
    assert_eq!(run.migration.phase(), Phase::Failed);
    let problem = run.migration.problem.expect("why");
    assert!(problem.starts_with("no route; the VM is not attached yet"), "{problem}");
}

#[test]
fn when_it_is_not_known_whether_it_has_begun_it_is_asked_and_not_begun_again() {
    let ends = [
        (Stage::Active, SENDING),
        (Stage::PostCopy, Phase::PostCopy),
        // What ended before this one: another migration, or the one that it came by.
        (Stage::Completed, Phase::Returning),
        (Stage::Failed, Phase::Returning),
        (Stage::None, Phase::Returning),
    ];
    for lost in [false, true] {
        for (stage, phase) in ends {
            let mut run = run(false, true);
            (0..2).for_each(|_| run.answer(Stage::None, 0));
            assert_eq!(run.asked, Some(Order::Begin));
            run.on(if lost { E::ConnectionLost } else { E::BeginUnanswered });
            // Asked in vain at first.
            run.pass();
            assert_eq!(run.asked, Some(Order::Look));
            run.on(E::LookFailed("silence".into()));
            assert_eq!(run.migration.problem.as_deref(), Some("silence"));
            run.pass();
            run.answer(stage, 1);
            assert_eq!(plain(&run.migration), phase, "{stage:?}");
            assert_eq!(run.orders.iter().filter(|order| **order == Order::Begin).count(), 1);
        }
    }
}

#[test]
fn a_busy_qemu_is_asked_again() {
    for (answers, order) in [(0, Order::Mark), (2, Order::Begin)] {
        let mut run = run(false, true);
        (0..answers).for_each(|_| run.answer(Stage::None, 0));
        for _ in 0..5 {
            assert_eq!(run.asked, Some(order));
            run.on(E::Busy("no answer".into()));
            assert_eq!((run.migration.problem.as_deref(), run.asked), (Some("no answer"), None));
            run.pass();
        }
        run.answer(Stage::None, 0);
        assert_eq!((run.migration.problem.as_deref(), run.migration.phase().is_over()), (None, false));
        let mut cancelled = run_to_busy(order, answers);
        cancelled.on(E::CancelWanted);
        cancelled.on(E::Busy("no answer".into()));
        let expected = if order == Order::Mark { Phase::Cancelled } else { Phase::Returning };
        assert_eq!(cancelled.migration.phase(), expected);
    }
}

fn run_to_busy(order: Order, answers: usize) -> Run {
    let mut run = run(false, true);
    (0..answers).for_each(|_| run.answer(Stage::None, 0));
    assert_eq!(run.asked, Some(order));
    run
}

#[test]
fn the_guest_goes_on_at_the_destination_after_one_pass_if_that_is_wanted() {
    for (post_copy, expected) in [(true, Order::Switch), (false, Order::Look)] {
        let mut run = run(post_copy, true);
        (0..3).for_each(|_| run.answer(Stage::Active, 1));
        assert_eq!(run.asked, Some(Order::Look));
        run.answer(Stage::Active, 1);
        run.pass();
        assert_eq!(run.asked, Some(Order::Look), "in the first pass");
        run.answer(Stage::Active, 2);
        run.pass();
        assert_eq!(run.asked, Some(expected));
    }
    let mut run = run(true, true);
    (0..4).for_each(|_| run.answer(Stage::Active, 2));
    run.pass();
    run.answer(Stage::PostCopy, 2);
    assert_eq!(run.migration.phase(), Phase::PostCopy);
    assert!(!run.migration.may_be_cancelled());
    run.on(E::CancelWanted);
    run.pass();
    run.answer(Stage::Failed, 2);
    // The guest is not here.
    assert_eq!(run.migration.phase(), Phase::Failed);
}

#[test]
fn one_that_is_cancelled_is_as_before() {
    for answers in 0..5 {
        for waits in [false, true] {
            let mut run = run(false, true);
            (0..answers).for_each(|_| run.answer(Stage::Active, 1));
            if !waits && run.asked.is_some() {
                run.answer(Stage::Active, 1);
            }
            run.on(E::CancelWanted);
            assert!(run.migration.is_cancelled());
            for _ in 0..8 {
                // QEMU takes a moment.
                let cancelled = run.orders.contains(&Order::Cancel) && run.asked == Some(Order::Look);
                run.answer(if cancelled { Stage::Cancelled } else { Stage::Active }, 1);
                if run.migration.phase() == Phase::Returning {
                    assert!(!run.plugged);
                    run.on(E::Attached);
                }
            }
            assert_eq!(run.migration.phase(), Phase::Cancelled, "after {answers}, {:?}", run.orders);
            assert!(run.plugged, "after {answers}");
            assert_eq!(run.migration.problem, None, "after {answers}");
            assert!(run.orders.iter().filter(|order| **order == Order::Cancel).count() <= 1);
        }
    }
}

/// One whose cancel is refused whenever it is asked for. `then`: how far it is by any look after that.
fn refused_cancel(then: Stage) -> Run {
    let mut run = run(false, true);
    (0..3).for_each(|_| run.answer(Stage::Active, 1));
    run.on(E::CancelWanted);
    for _ in 0..20 {
        match run.asked {
            Some(Order::Cancel) => run.on(E::LookFailed("no job is active on the domain".into())),
            _ if run.migration.phase() == Phase::Returning => run.on(E::Attached),
            _ => run.answer(if run.orders.contains(&Order::Cancel) { then } else { Stage::Active }, 1),
        }
    }
    run
}

#[test]
fn it_waits_for_the_answer_to_what_it_has_asked_last() {
    let mut run = run(false, true);
    let other = TaskId { number: 2, ..TASK };
    assert!(run.migration.waits_for(TASK) && !run.migration.waits_for(other));
    run.on(E::ConnectionLost);
    assert!(!run.migration.waits_for(TASK));
}

/// libvirt has no job to end yet, say, or does not answer.
#[test]
fn a_cancel_that_fails_is_asked_again() {
    let run = refused_cancel(Stage::Active);
    let cancels = run.orders.iter().filter(|order| **order == Order::Cancel).count();
    assert!(cancels >= 3, "{:?}", run.orders);
}

/// libvirt was started anew, say, and has given the migration up by itself.
#[test]
fn a_cancel_of_what_has_ended_does_not_keep_it_from_ending() {
    let run = refused_cancel(Stage::None);
    assert_eq!(run.migration.phase(), Phase::Cancelled, "{:?}", run.orders);
}

#[test]
fn one_that_has_left_has_left() {
    let mut run = run(false, true);
    (0..3).for_each(|_| run.answer(Stage::Active, 1));
    run.on(E::Left);
    assert_eq!(run.migration.phase(), Phase::Done);
    assert!(!run.migration.keeps_mark());
}

fn stage() -> impl Strategy<Value = Stage> {
    prop_oneof![
        Just(Stage::None),
        Just(Stage::Active),
        Just(Stage::Active),
        Just(Stage::PostCopy),
        Just(Stage::Completed),
        Just(Stage::Cancelled),
        Just(Stage::Failed),
    ]
}

fn why() -> impl Strategy<Value = Option<String>> {
    prop::option::of(Just("because".to_owned()))
}

/// Anything, at any time.
fn event() -> impl Strategy<Value = Option<E>> {
    let result = || prop_oneof![2 => Just(Ok(())), 1 => Just(Err("no".to_owned()))];
    prop_oneof![
        4 => Just(None),
        1 => result().prop_map(|outcome| Some(E::Marked(outcome))),
        1 => Just(Some(E::Released)),
        1 => Just(Some(E::ReleasePending)),
        1 => Just(Some(E::ReleaseFailed("no".to_owned()))),
        1 => result().prop_map(|outcome| Some(E::Begun(outcome))),
        1 => Just(Some(E::BeginUnanswered)),
        1 => Just(Some(E::Busy("busy".to_owned()))),
        3 => (stage(), 0..4_u64, why()).prop_map(|(stage, passes, why)| {
            Some(looked(stage, passes, why.as_deref()))
        }),
        1 => Just(Some(E::LookFailed("no".to_owned()))),
        1 => Just(Some(E::Attached)),
        1 => Just(Some(E::AttachFailed("no".to_owned()))),
        1 => Just(Some(E::CancelWanted)),
        1 => Just(Some(E::ConnectionLost)),
    ]
}

/// Does this event answer what was asked?
fn answers(event: &E, asked: Option<Order>) -> bool {
    match event {
        E::Marked(_) => asked == Some(Order::Mark),
        E::ReleasePending | E::ReleaseFailed(_) => asked == Some(Order::Detach),
        E::Begun(_) | E::BeginUnanswered => asked == Some(Order::Begin),
        E::Busy(_) => matches!(asked, Some(Order::Mark | Order::Begin)),
        E::Looked(..) | E::LookFailed(_) => {
            matches!(asked, Some(Order::Look | Order::Switch | Order::Cancel))
        }
        _ => true,
    }
}

proptest! {
    /// QEMU answers what it was asked, with anything, and other things happen in between. Then it is fair for a while.
    #[test]
    fn it_ends_and_the_vm_is_there_or_has_what_it_had(
        post_copy: bool,
        attached: bool,
        events in prop::collection::vec(event(), 0..60),
        ends_well: bool,
    ) {
        let mut run = run(post_copy, attached);
        for event in events {
            match event {
                None => run.pass(),
                // A device comes and goes where there is one. If a guest lets go of it unasked, that is its own affair.
                Some(E::Released)
                    if !run.plugged
                        || !run.orders.contains(&Order::Detach)
                        || run.phases.contains(&Phase::Returning) => {}
                Some(E::Attached) if run.plugged || !run.migration.may_attach() => {}
                Some(event) if answers(&event, run.asked) => run.on(event),
                Some(_) => {}
            }
        }
        for _ in 0..200 {
            if run.migration.phase() == Phase::Returning && !run.plugged {
                run.on(E::Attached);
            }
            run.answer(if ends_well { Stage::Completed } else { Stage::Failed }, 3);
        }
        let (migration, phase) = (&run.migration, run.migration.phase());
        prop_assert!(phase.is_over(), "{migration:?}");
        let begun = run.orders.iter().filter(|order| **order == Order::Begin).count();
        prop_assert!(begun <= 1 + run.busy, "{:?}", run.orders);
        let went = run.phases.contains(&Phase::PostCopy);
        // Either it never let go, or it has the device again, or it could not be attached in time and says so; and stays marked.
        if attached && phase != Phase::Done && !went && !run.plugged {
            prop_assert!(migration.keeps_mark(), "{migration:?}");
            let why = migration.problem.as_deref().unwrap_or_default();
            prop_assert!(why.contains("not attached yet") || !run.phases.contains(&Phase::Returning), "{migration:?}");
        }
        if phase == Phase::Failed {
            prop_assert!(migration.problem.is_some(), "{migration:?}");
        }
        // There is no way back from there.
        prop_assert!(!went || !run.phases.contains(&Phase::Returning), "{:?}", run.phases);
    }

    #[test]
    fn whatever_comes_at_whatever_time_is_survived(
        post_copy: bool,
        attached: bool,
        events in prop::collection::vec((event(), 0..100 * SECOND_NS), 0..80),
    ) {
        let mut migration = Migration::new("tcp:b:1".into(), post_copy, attached, 0);
        let (mut now_ns, mut begun, mut busy) = (0, 0, 0);
        for (event, after_ns) in events {
            now_ns += after_ns;
            if let Some(event) = event {
                busy += usize::from(matches!(event, E::Busy(_)));
                migration.on(event, now_ns);
            }
            while let Some(order) = due(&migration, now_ns) {
                migration.ordered(TASK, order, now_ns);
                begun += usize::from(order == Order::Begin);
            }
        }
        prop_assert!(begun <= 1 + busy, "begun {begun} times");
    }
}
