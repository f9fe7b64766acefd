//! A VM's topology channel, and what is in flight about it.
//!
//! ```text
//!            ┌─ Detached ──AttachRequested──▶ Attaching ──Attached──▶ Attached ◀─DetachFailed── Detaching
//!            │    ▲  ▲                          │   │ TimedOut         │  └──DetachRequested───────▲
//! FoundPlugged    │  └──────── AttachFailed ────┘   ▼                  │ PublishFailed
//!            │    │                         AttachTimedOut             ▼
//!            │    │  Released, DetachDone           │ FoundPlugged ─▶ LostDetaching ◀──▶ Lost
//!            ▼    │  (from every plugged state)     │                                     ▲
//!        Recovering ── Recovered ─▶ Attached        └─ FoundUnplugged ─▶ Detached          │
//!            └────────────────────── RecoverFailed ────────────────────────────────────────┘
//! ```
//!
//! Not drawn: `AttachFoundForeign` leads from `Attaching` to `Lost`, `FoundPlugged` from `Lost` to `Recovering`, `FoundUnplugged`
//! from every plugged state to `Detached`, and `ConnectionLost` ends what is in flight. The tests visit every state
//! that can be reached.
//!
//! The device is plugged in `Attached`, `Detaching`, `Recovering`, `Lost` and `LostDetaching`. Only in the first two does this
//! process publish through it. vCPUs are replugged only where there is no channel.

use vnuma_model::{ApicId, GuestNodeId};

/// A vCPU that is on its way to another guest node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replug {
    /// The vCPU.
    pub vcpu: ApicId,
    /// The guest node it goes to.
    pub node: GuestNodeId,
}

/// A VM's topology channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelState {
    /// There is none.
    Detached,
    /// It is being plugged.
    Attaching,
    /// Plugging it was not answered in time: the hypervisor may still carry it out. Then it is undone.
    AttachTimedOut,
    /// An earlier vnumad plugged it. Its parts are being copied from the hypervisor.
    Recovering,
    /// It is there and served; the next publication has this generation.
    Attached(u64),
    /// The guest is asked to let go of it. It is served until it does.
    Detaching(u64),
    /// It is there, and cannot be served.
    Lost,
    /// The guest is asked to let go of one that cannot be served, or to undo an attach.
    LostDetaching,
}

/// What happens to a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelEvent {
    /// It is to be plugged.
    AttachRequested,
    /// It is plugged; the next publication has this generation.
    Attached(u64),
    /// It could not be plugged, and nothing is left of the attempt.
    AttachFailed,
    /// Plugging it was not answered in time.
    AttachTimedOut,
    /// There is one already that is not ours.
    AttachFoundForeign,
    /// A hypervisor that was connected to has the device.
    FoundPlugged,
    /// A hypervisor that was connected to does not have it.
    FoundUnplugged,
    /// An earlier vnumad's channel was taken over; the next publication has this generation.
    Recovered(u64),
    /// Taking it over has failed.
    RecoverFailed,
    /// It is to be unplugged.
    DetachRequested,
    /// The guest has let go of it, and the request is answered.
    DetachDone,
    /// The guest has not let go of it.
    DetachFailed,
    /// The device is gone, whoever asked for that.
    Released,
    /// The publication is written; the next one has this generation.
    Published(u64),
    /// The publication failed.
    PublishFailed,
    /// The connection to the hypervisor is lost: nothing that was asked for is answered any more.
    ConnectionLost,
}

impl ChannelState {
    /// The state after an event. `None`: the event means nothing in this state, which stays.
    pub fn next(self, event: ChannelEvent) -> Option<Self> {
        use ChannelEvent as E;
        match (self, event) {
            (Self::Detached | Self::AttachTimedOut, E::AttachRequested) => Some(Self::Attaching),
            (Self::Attaching, E::Attached(next)) | (Self::Recovering, E::Recovered(next)) => {
                Some(Self::Attached(next))
            }
            (Self::Attaching, E::AttachFailed | E::ConnectionLost) => Some(Self::Detached),
            (Self::Attaching, E::AttachTimedOut) => Some(Self::AttachTimedOut),
            (Self::Attaching, E::AttachFoundForeign) => Some(Self::Lost),
            (Self::Detached | Self::Lost, E::FoundPlugged) => Some(Self::Recovering),
            (Self::AttachTimedOut, E::FoundPlugged) => Some(Self::LostDetaching),
            (Self::AttachTimedOut, E::FoundUnplugged) => Some(Self::Detached),
            (Self::Recovering, E::RecoverFailed | E::ConnectionLost) => Some(Self::Lost),
            (state, E::FoundUnplugged | E::Released | E::DetachDone) if state.is_plugged() => {
                Some(Self::Detached)
            }
            (Self::Attached(next), E::DetachRequested) => Some(Self::Detaching(next)),
            (Self::Lost, E::DetachRequested) => Some(Self::LostDetaching),
            (Self::Detaching(next), E::DetachFailed | E::ConnectionLost) => Some(Self::Attached(next)),
            (Self::LostDetaching, E::DetachFailed | E::ConnectionLost) => Some(Self::Lost),
            (Self::Attached(_), E::PublishFailed) => Some(Self::Lost),
            (Self::Detaching(_), E::PublishFailed) => Some(Self::LostDetaching),
            (Self::Attached(_), E::Published(next)) => Some(Self::Attached(next)),
            (Self::Detaching(_), E::Published(next)) => Some(Self::Detaching(next)),
            _ => None,
        }
    }

    /// Is the device in the VM, as far as is known?
    pub fn is_plugged(self) -> bool {
        match self {
            Self::Attached(_) | Self::Detaching(..) | Self::Recovering | Self::Lost => true,
            Self::LostDetaching => true,
            Self::Detached | Self::Attaching | Self::AttachTimedOut => false,
        }
    }

    /// The generation of the next publication, where this process publishes.
    pub fn generation(self) -> Option<u64> {
        match self {
            Self::Attached(next) | Self::Detaching(next) => Some(next),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ChannelEvent as E;
    use super::ChannelState as S;

    const EVENTS: [E; 16] = [
        E::AttachRequested,
        E::Attached(9),
        E::AttachFailed,
        E::AttachTimedOut,
        E::AttachFoundForeign,
        E::FoundPlugged,
        E::FoundUnplugged,
        E::Recovered(9),
        E::RecoverFailed,
        E::DetachRequested,
        E::DetachDone,
        E::DetachFailed,
        E::Released,
        E::Published(9),
        E::PublishFailed,
        E::ConnectionLost,
    ];

    /// Every state that can be reached, with these numbers.
    fn states() -> Vec<S> {
        let mut reached = vec![S::Detached];
        let mut visited = 0;
        while let Some(&state) = reached.get(visited) {
            for next in EVENTS.iter().filter_map(|event| state.next(*event)) {
                if !reached.contains(&next) {
                    reached.push(next);
                }
            }
            visited += 1;
        }
        reached
    }

    /// The state after events, each of which means something.
    fn after(state: S, events: &[E]) -> Option<S> {
        events.iter().try_fold(state, |state, event| state.next(*event))
    }

    #[test]
    fn every_state_can_be_reached_and_no_other() {
        let expected = [
            S::Detached,
            S::Attaching,
            S::AttachTimedOut,
            S::Recovering,
            S::Lost,
            S::LostDetaching,
            S::Attached(9),
            S::Detaching(9),
        ];
        let reached = states();
        assert_eq!(reached.len(), expected.len(), "{reached:?}");
        assert!(expected.iter().all(|state| reached.contains(state)), "{reached:?}");
    }

    #[test]
    fn whatever_says_that_a_plugged_device_is_gone_leads_to_none() {
        for state in states() {
            let gone = [E::FoundUnplugged, E::Released, E::DetachDone].map(|event| state.next(event));
            let expected = match state {
                state if state.is_plugged() => [Some(S::Detached); 3],
                S::AttachTimedOut => [Some(S::Detached), None, None],
                _ => [None; 3],
            };
            assert_eq!(gone, expected, "{state:?}");
        }
    }

    #[test]
    fn what_was_asked_for_and_failed_leaves_the_channel_as_it_was() {
        for state in states().into_iter().filter(|state| state.next(E::DetachRequested).is_some()) {
            assert!(matches!(state, S::Attached(_) | S::Lost), "{state:?}");
            for end in [E::DetachFailed, E::ConnectionLost] {
                assert_eq!(after(state, &[E::DetachRequested, end]), Some(state), "{state:?}, {end:?}");
            }
        }
        for end in [E::AttachFailed, E::ConnectionLost] {
            assert_eq!(after(S::Detached, &[E::AttachRequested, end]), Some(S::Detached));
        }
        assert_eq!(S::LostDetaching.next(E::DetachFailed), Some(S::Lost), "an attach that is undone");
        assert_eq!(S::LostDetaching.next(E::ConnectionLost), Some(S::Lost));
    }

    #[test]
    fn a_lost_connection_leaves_nothing_in_flight() {
        for state in states() {
            let next = state.next(E::ConnectionLost);
            let in_flight =
                matches!(state, S::Attaching | S::Recovering | S::Detaching(_) | S::LostDetaching);
            assert_eq!(next.is_some(), in_flight, "{state:?}");
            let Some(next) = next else { continue };
            assert!(matches!(next, S::Detached | S::Attached(_) | S::Lost), "{state:?}");
            assert_eq!(next.is_plugged(), state.is_plugged(), "{state:?}");
            assert_eq!(next.generation(), state.generation(), "{state:?}");
        }
    }

    #[test]
    fn an_attach_ends_as_its_hypervisor_says() {
        let attach = |end: &[E]| after(S::Attaching, end);
        assert_eq!(attach(&[E::Attached(9)]), Some(S::Attached(9)));
        assert_eq!(attach(&[E::AttachFoundForeign]), Some(S::Lost));
        assert_eq!(attach(&[E::AttachTimedOut, E::AttachRequested]), Some(S::Attaching));
        assert_eq!(attach(&[E::AttachTimedOut, E::FoundPlugged]), Some(S::LostDetaching), "undone");
        for state in states() {
            let may = matches!(state, S::Detached | S::AttachTimedOut);
            assert_eq!(state.next(E::AttachRequested).is_some(), may, "{state:?}");
            let answered = [E::Attached(9), E::AttachFailed, E::AttachTimedOut, E::AttachFoundForeign];
            let waits = answered.map(|event| state.next(event).is_some());
            assert_eq!(waits, [matches!(state, S::Attaching); 4], "{state:?}");
        }
    }

    #[test]
    fn a_device_that_is_found_is_taken_over_unless_it_is_known() {
        for state in states() {
            let taken_over = state.next(E::FoundPlugged) == Some(S::Recovering);
            assert_eq!(taken_over, matches!(state, S::Detached | S::Lost), "{state:?}");
            let ends = [E::Recovered(9), E::RecoverFailed].map(|event| state.next(event));
            let expected = match state {
                S::Recovering => [Some(S::Attached(9)), Some(S::Lost)],
                _ => [None; 2],
            };
            assert_eq!(ends, expected, "{state:?}");
        }
    }

    #[test]
    fn a_publication_says_which_is_the_next_one_and_a_failed_one_is_the_last() {
        for state in states() {
            let published = match state {
                S::Attached(_) => Some(S::Attached(10)),
                S::Detaching(_) => Some(S::Detaching(10)),
                _ => None,
            };
            assert_eq!(state.next(E::Published(10)), published, "{state:?}");
            let failed = state.next(E::PublishFailed);
            assert_eq!(failed.is_some(), state.generation().is_some(), "{state:?}");
            if let Some(failed) = failed {
                let goes = [failed, state].map(|state| matches!(state, S::Detaching(_) | S::LostDetaching));
                assert_eq!((failed.generation(), goes[0]), (None, goes[1]), "{state:?}");
            }
        }
    }

    #[test]
    fn only_a_served_channel_has_a_writer() {
        for state in states() {
            let served = matches!(state, S::Attached(_) | S::Detaching(..));
            assert_eq!(state.generation().is_some(), served, "{state:?}");
            assert!(state.is_plugged() || !served, "{state:?}");
        }
    }
}
