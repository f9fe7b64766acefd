//! A VM's topology channel, and what is in flight about it.
//!
//! ```text
//!                 ┌───────────────── ReplugEnded ◀── Replugging ◀─┐ ReplugStarted
//!                 ▼                                               │
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
//! from every plugged state to `Detached`, and `ConnectionLost` ends what is in flight. The table of the tests is complete.
//!
//! The device is plugged in `Attached`, `Detaching`, `Recovering`, `Lost` and `LostDetaching`. Only in the first two does this
//! process publish through it. vCPUs are replugged only where there is no channel.

use super::RequestId;
use vnuma_model::{ApicId, GuestNodeId};

/// A vCPU that is on its way to another guest node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replug {
    /// The vCPU.
    pub vcpu: ApicId,
    /// The guest node it goes to.
    pub node: GuestNodeId,
    /// Who asked for it, if somebody did.
    pub request: Option<RequestId>,
}

/// The writing end of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Publisher {
    /// The next publication has this generation.
    Ready(u64),
    /// This generation is being published.
    Publishing(u64),
}

/// A VM's topology channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelState {
    /// There is none.
    Detached,
    /// There is none, and a vCPU is being replugged.
    Replugging(Replug),
    /// It is being plugged, for this request.
    Attaching(RequestId),
    /// Plugging it was not answered in time: the hypervisor may still carry it out. Then it is undone.
    AttachTimedOut,
    /// An earlier vnumad plugged it. Its parts are being copied from the hypervisor.
    Recovering,
    /// It is there and served.
    Attached(Publisher),
    /// The guest is asked to let go of it. It is served until it does.
    Detaching(Publisher, RequestId),
    /// It is there, and cannot be served.
    Lost,
    /// The guest is asked to let go of one that cannot be served, for a request or to undo an attach.
    LostDetaching(Option<RequestId>),
}

/// What happens to a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelEvent {
    /// An operator wants one.
    AttachRequested(RequestId),
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
    /// It could not be.
    RecoverFailed,
    /// An operator wants it gone.
    DetachRequested(RequestId),
    /// The guest has let go of it, and the request is answered.
    DetachDone,
    /// It has not.
    DetachFailed,
    /// The device is gone, whoever asked for that.
    Released,
    /// A publication goes out.
    PublishStarted,
    /// It went out; the next one has this generation.
    Published(u64),
    /// It did not.
    PublishFailed,
    /// A vCPU is being replugged.
    ReplugStarted(Replug),
    /// That has ended, one way or the other.
    ReplugEnded,
    /// The connection to the hypervisor is lost: nothing that was asked for is answered any more.
    ConnectionLost,
}

impl ChannelState {
    /// The state after an event. `None`: the event means nothing in this state, which stays.
    pub fn next(self, event: ChannelEvent) -> Option<Self> {
        use ChannelEvent as E;
        match (self, event) {
            (Self::Detached, E::ReplugStarted(replug)) => Some(Self::Replugging(replug)),
            (Self::Replugging(_), E::ReplugEnded | E::ConnectionLost) => Some(Self::Detached),
            (Self::Detached | Self::AttachTimedOut, E::AttachRequested(request)) => {
                Some(Self::Attaching(request))
            }
            (Self::Attaching(_), E::Attached(next)) | (Self::Recovering, E::Recovered(next)) => {
                Some(Self::Attached(Publisher::Ready(next)))
            }
            (Self::Attaching(_), E::AttachFailed | E::ConnectionLost) => Some(Self::Detached),
            (Self::Attaching(_), E::AttachTimedOut) => Some(Self::AttachTimedOut),
            (Self::Attaching(_), E::AttachFoundForeign) => Some(Self::Lost),
            (Self::Detached | Self::Lost, E::FoundPlugged) => Some(Self::Recovering),
            (Self::AttachTimedOut, E::FoundPlugged) => Some(Self::LostDetaching(None)),
            (Self::AttachTimedOut, E::FoundUnplugged) => Some(Self::Detached),
            (Self::Recovering, E::RecoverFailed | E::ConnectionLost) => Some(Self::Lost),
            (state, E::FoundUnplugged | E::Released | E::DetachDone) if state.is_plugged() => {
                Some(Self::Detached)
            }
            (Self::Attached(publisher), E::DetachRequested(request)) => {
                Some(Self::Detaching(publisher, request))
            }
            (Self::Lost, E::DetachRequested(request)) => Some(Self::LostDetaching(Some(request))),
            (Self::Detaching(publisher, _), E::DetachFailed | E::ConnectionLost) => {
                Some(Self::Attached(publisher))
            }
            (Self::LostDetaching(_), E::DetachFailed | E::ConnectionLost) => Some(Self::Lost),
            (Self::Attached(_), E::PublishFailed) => Some(Self::Lost),
            (Self::Detaching(_, request), E::PublishFailed) => Some(Self::LostDetaching(Some(request))),
            (Self::Attached(publisher), event) => publisher.next(event).map(Self::Attached),
            (Self::Detaching(publisher, request), event) => {
                publisher.next(event).map(|publisher| Self::Detaching(publisher, request))
            }
            _ => None,
        }
    }

    /// Is the device in the VM, as far as is known?
    pub fn is_plugged(self) -> bool {
        match self {
            Self::Attached(_) | Self::Detaching(..) | Self::Recovering | Self::Lost => true,
            Self::LostDetaching(_) => true,
            Self::Detached | Self::Replugging(_) | Self::Attaching(_) | Self::AttachTimedOut => false,
        }
    }

    /// The writing end, where this process has it.
    pub fn publisher(self) -> Option<Publisher> {
        match self {
            Self::Attached(publisher) | Self::Detaching(publisher, _) => Some(publisher),
            _ => None,
        }
    }

    /// The request that waits for something that is in flight.
    pub fn request(self) -> Option<RequestId> {
        match self {
            Self::Attaching(request) | Self::Detaching(_, request) => Some(request),
            Self::LostDetaching(request) => request,
            Self::Replugging(replug) => replug.request,
            _ => None,
        }
    }
}

impl Publisher {
    fn next(self, event: ChannelEvent) -> Option<Self> {
        match (self, event) {
            (Self::Ready(generation), ChannelEvent::PublishStarted) => Some(Self::Publishing(generation)),
            (Self::Publishing(_), ChannelEvent::Published(next)) => Some(Self::Ready(next)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ChannelEvent as E;
    use super::ChannelState as S;
    use super::*;
    use Publisher::{Publishing, Ready};

    const REPLUG: Replug = Replug { vcpu: 1, node: 0, request: Some(3) };

    const STATES: [S; 11] = [
        S::Detached,
        S::Replugging(REPLUG),
        S::Attaching(1),
        S::AttachTimedOut,
        S::Recovering,
        S::Attached(Ready(8)),
        S::Attached(Publishing(8)),
        S::Detaching(Ready(8), 1),
        S::Detaching(Publishing(8), 1),
        S::Lost,
        S::LostDetaching(Some(1)),
    ];

    const EVENTS: [E; 19] = [
        E::AttachRequested(2),
        E::Attached(9),
        E::AttachFailed,
        E::AttachTimedOut,
        E::AttachFoundForeign,
        E::FoundPlugged,
        E::FoundUnplugged,
        E::Recovered(9),
        E::RecoverFailed,
        E::DetachRequested(2),
        E::DetachDone,
        E::DetachFailed,
        E::Released,
        E::PublishStarted,
        E::Published(9),
        E::PublishFailed,
        E::ReplugStarted(REPLUG),
        E::ReplugEnded,
        E::ConnectionLost,
    ];

    /// Everything that changes a state; all other pairs change nothing.
    const TABLE: [(S, E, S); 55] = [
        (S::Detached, E::AttachRequested(2), S::Attaching(2)),
        (S::Detached, E::FoundPlugged, S::Recovering),
        (S::Detached, E::ReplugStarted(REPLUG), S::Replugging(REPLUG)),
        (S::Replugging(REPLUG), E::ReplugEnded, S::Detached),
        (S::Replugging(REPLUG), E::ConnectionLost, S::Detached),
        (S::Attaching(1), E::Attached(9), S::Attached(Ready(9))),
        (S::Attaching(1), E::AttachFailed, S::Detached),
        (S::Attaching(1), E::AttachTimedOut, S::AttachTimedOut),
        (S::Attaching(1), E::AttachFoundForeign, S::Lost),
        (S::Attaching(1), E::ConnectionLost, S::Detached),
        (S::AttachTimedOut, E::AttachRequested(2), S::Attaching(2)),
        (S::AttachTimedOut, E::FoundPlugged, S::LostDetaching(None)),
        (S::AttachTimedOut, E::FoundUnplugged, S::Detached),
        (S::Recovering, E::Recovered(9), S::Attached(Ready(9))),
        (S::Recovering, E::RecoverFailed, S::Lost),
        (S::Recovering, E::ConnectionLost, S::Lost),
        (S::Recovering, E::FoundUnplugged, S::Detached),
        (S::Recovering, E::Released, S::Detached),
        (S::Recovering, E::DetachDone, S::Detached),
        (S::Attached(Ready(8)), E::DetachRequested(2), S::Detaching(Ready(8), 2)),
        (S::Attached(Ready(8)), E::FoundUnplugged, S::Detached),
        (S::Attached(Ready(8)), E::Released, S::Detached),
        (S::Attached(Ready(8)), E::DetachDone, S::Detached),
        (S::Attached(Ready(8)), E::PublishStarted, S::Attached(Publishing(8))),
        (S::Attached(Ready(8)), E::PublishFailed, S::Lost),
        (S::Attached(Publishing(8)), E::DetachRequested(2), S::Detaching(Publishing(8), 2)),
        (S::Attached(Publishing(8)), E::FoundUnplugged, S::Detached),
        (S::Attached(Publishing(8)), E::Released, S::Detached),
        (S::Attached(Publishing(8)), E::DetachDone, S::Detached),
        (S::Attached(Publishing(8)), E::Published(9), S::Attached(Ready(9))),
        (S::Attached(Publishing(8)), E::PublishFailed, S::Lost),
        (S::Detaching(Ready(8), 1), E::FoundUnplugged, S::Detached),
        (S::Detaching(Ready(8), 1), E::DetachDone, S::Detached),
        (S::Detaching(Ready(8), 1), E::Released, S::Detached),
        (S::Detaching(Ready(8), 1), E::DetachFailed, S::Attached(Ready(8))),
        (S::Detaching(Ready(8), 1), E::ConnectionLost, S::Attached(Ready(8))),
        (S::Detaching(Ready(8), 1), E::PublishStarted, S::Detaching(Publishing(8), 1)),
        (S::Detaching(Ready(8), 1), E::PublishFailed, S::LostDetaching(Some(1))),
        (S::Detaching(Publishing(8), 1), E::FoundUnplugged, S::Detached),
        (S::Detaching(Publishing(8), 1), E::DetachDone, S::Detached),
        (S::Detaching(Publishing(8), 1), E::Released, S::Detached),
        (S::Detaching(Publishing(8), 1), E::DetachFailed, S::Attached(Publishing(8))),
        (S::Detaching(Publishing(8), 1), E::ConnectionLost, S::Attached(Publishing(8))),
        (S::Detaching(Publishing(8), 1), E::Published(9), S::Detaching(Ready(9), 1)),
        (S::Detaching(Publishing(8), 1), E::PublishFailed, S::LostDetaching(Some(1))),
        (S::Lost, E::FoundPlugged, S::Recovering),
        (S::Lost, E::FoundUnplugged, S::Detached),
        (S::Lost, E::DetachRequested(2), S::LostDetaching(Some(2))),
        (S::Lost, E::Released, S::Detached),
        (S::Lost, E::DetachDone, S::Detached),
        (S::LostDetaching(Some(1)), E::FoundUnplugged, S::Detached),
        (S::LostDetaching(Some(1)), E::DetachDone, S::Detached),
        (S::LostDetaching(Some(1)), E::Released, S::Detached),
        (S::LostDetaching(Some(1)), E::DetachFailed, S::Lost),
        (S::LostDetaching(Some(1)), E::ConnectionLost, S::Lost),
    ];

    #[test]
    fn the_whole_table() {
        for state in STATES {
            for event in EVENTS {
                let listed = TABLE.iter().find(|(from, on, _)| (*from, *on) == (state, event));
                let expected = listed.map(|(_, _, to)| *to);
                assert_eq!(state.next(event), expected, "{state:?} on {event:?}");
            }
        }
    }

    #[test]
    fn only_a_served_channel_has_a_writer_and_only_what_is_in_flight_a_request() {
        for state in STATES {
            let served = matches!(state, S::Attached(_) | S::Detaching(..));
            assert_eq!(state.publisher().is_some(), served, "{state:?}");
            assert!(state.is_plugged() || !served, "{state:?}");
            let in_flight =
                !matches!(state, S::Detached | S::AttachTimedOut | S::Recovering | S::Attached(_) | S::Lost);
            assert_eq!(state.request().is_some(), in_flight, "{state:?}");
        }
    }
}
