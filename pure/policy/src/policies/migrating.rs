//! The next step of each migration.

use super::{Now, Propose};
use crate::{
    Action, Reason, Step,
    migration::{Migration, Order, Phase, Told},
    world::ChannelState,
};

/// Between two looks at how far it is.
const LOOK_NS: u64 = 250_000_000;
/// For the guest to let go of the channel's device.
const RELEASE_NS: u64 = 30_000_000_000;
/// For the channel to be there again afterwards. Whoever attaches goes on after that.
const RETURN_NS: u64 = 60_000_000_000;
/// The memory is sent once while the guest runs here before it goes on there: most of what it needs then is there.
const PASSES_BEFORE_SWITCH: u64 = 2;

/// Proposes the next order of each [`Migration`], which waits in the plan until it is due.
pub struct Migrating;

impl Propose for Migrating {
    type Memory = ();

    fn propose(&self, now: &Now<'_>, (): &mut ()) -> Vec<Step> {
        let due = now.vms().flat_map(|(id, managed, vm)| {
            let answers = managed.responsive().is_some();
            let due = vm.migration.as_ref().map(|migration| orders_of(migration, answers, now.now_ns));
            due.into_iter().flatten().map(move |(order, not_before_ns)| {
                // The guest may have let go of the device before it was asked.
                let gone = order == Order::Detach && vm.channel == ChannelState::Detached;
                let order = if gone { Order::Begin } else { order };
                Step { vm: id, action: Action::Migrate(order, Reason::Migrates), not_before_ns }
            })
        });
        due.collect()
    }
}

/// What is to be done next, and when; and when waiting for it is given up. `answers`: the hypervisor can be asked.
pub fn orders_of(
    migration: &Migration,
    answers: bool,
    now_ns: u64,
) -> impl Iterator<Item = (Order, u64)> + use<> {
    let next = next(migration).filter(|_| answers && !migration.asked.is_under_way());
    let next = next.map(|order| (order, next_ns(migration, order)));
    let gives_up_ns = match migration.phase() {
        // It may be asked for the first time now.
        Phase::Detaching => {
            let asked_ns =
                migration.release_asked_ns.or(next.filter(|(_, ns)| *ns <= now_ns).map(|_| now_ns));
            asked_ns.map(|ns| ns.saturating_add(RELEASE_NS))
        }
        Phase::Returning => Some(migration.since_ns.saturating_add(RETURN_NS)),
        _ => None,
    };
    let next = next.filter(|_| gives_up_ns.is_none_or(|ns| now_ns < ns));
    gives_up_ns.map(|ns| (Order::GiveUp, ns)).into_iter().chain(next)
}

fn next(migration: &Migration) -> Option<Order> {
    let wants_switch = migration.post_copy && migration.progress.passes >= PASSES_BEFORE_SWITCH;
    match migration.phase() {
        Phase::Marking => Some(Order::Mark),
        Phase::Detaching => Some(Order::Detach),
        Phase::Starting(false) => Some(Order::Begin),
        Phase::Starting(true) => Some(Order::Look),
        Phase::Sending(Told::Nothing) if migration.is_cancelled() => Some(Order::Cancel),
        Phase::Sending(_) if wants_switch && !migration.is_cancelled() => Some(Order::Switch),
        Phase::Sending(_) | Phase::PostCopy => Some(Order::Look),
        Phase::Returning | Phase::Done | Phase::Cancelled | Phase::Failed => None,
    }
}

/// The hypervisor is asked at once when a phase begins or an operator has said something, and else some time after its last answer.
fn next_ns(migration: &Migration, order: Order) -> u64 {
    let Some(answered_ns) = migration.asked.last else { return migration.since_ns };
    let pause_ns = if order == Order::Detach { 4 * LOOK_NS } else { LOOK_NS };
    let cancelled_ns = migration.cancelled_ns.filter(|cancelled_ns| *cancelled_ns > answered_ns);
    cancelled_ns.unwrap_or(answered_ns.saturating_add(pause_ns))
}
