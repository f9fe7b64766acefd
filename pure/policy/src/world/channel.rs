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

use vnuma_model::{ApicId, GuestNodeId};

/// A vCPU that is on its way to another guest node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replug {
    /// The vCPU.
    pub vcpu: ApicId,
    /// The guest node it goes to.
    pub node: GuestNodeId,
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
    /// It is being plugged.
    Attaching,
    /// Plugging it was not answered in time: the hypervisor may still carry it out. Then it is undone.
    AttachTimedOut,
    /// An earlier vnumad plugged it. Its parts are being copied from the hypervisor.
    Recovering,
    /// It is there and served.
    Attached(Publisher),
    /// The guest is asked to let go of it. It is served until it does.
    Detaching(Publisher),
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
    /// It could not be.
    RecoverFailed,
    /// It is to go.
    DetachRequested,
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
            (Self::Detached | Self::AttachTimedOut, E::AttachRequested) => Some(Self::Attaching),
            (Self::Attaching, E::Attached(next)) | (Self::Recovering, E::Recovered(next)) => {
                Some(Self::Attached(Publisher::Ready(next)))
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
            (Self::Attached(publisher), E::DetachRequested) => Some(Self::Detaching(publisher)),
            (Self::Lost, E::DetachRequested) => Some(Self::LostDetaching),
            (Self::Detaching(publisher), E::DetachFailed | E::ConnectionLost) => {
                Some(Self::Attached(publisher))
            }
            (Self::LostDetaching, E::DetachFailed | E::ConnectionLost) => Some(Self::Lost),
            (Self::Attached(_), E::PublishFailed) => Some(Self::Lost),
            (Self::Detaching(_), E::PublishFailed) => Some(Self::LostDetaching),
            (Self::Attached(publisher), event) => publisher.next(event).map(Self::Attached),
            (Self::Detaching(publisher), event) => publisher.next(event).map(Self::Detaching),
            _ => None,
        }
    }

    /// Is the device in the VM, as far as is known?
    pub fn is_plugged(self) -> bool {
        match self {
            Self::Attached(_) | Self::Detaching(..) | Self::Recovering | Self::Lost => true,
            Self::LostDetaching => true,
            Self::Detached | Self::Replugging(_) | Self::Attaching | Self::AttachTimedOut => false,
        }
    }

    /// The writing end, where this process has it.
    pub fn publisher(self) -> Option<Publisher> {
        match self {
            Self::Attached(publisher) | Self::Detaching(publisher) => Some(publisher),
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

    const REPLUG: Replug = Replug { vcpu: 1, node: 0 };

    const STATES: [S; 11] = [
        S::Detached,
        S::Replugging(REPLUG),
        S::Attaching,
        S::AttachTimedOut,
        S::Recovering,
        S::Attached(Ready(8)),
        S::Attached(Publishing(8)),
        S::Detaching(Ready(8)),
        S::Detaching(Publishing(8)),
        S::Lost,
        S::LostDetaching,
    ];

    const EVENTS: [E; 19] = [
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
        E::PublishStarted,
        E::Published(9),
        E::PublishFailed,
        E::ReplugStarted(REPLUG),
        E::ReplugEnded,
        E::ConnectionLost,
    ];

    /// Everything that changes a state; all other pairs change nothing.
    const TABLE: [(S, E, S); 55] = [
        (S::Detached, E::AttachRequested, S::Attaching),
        (S::Detached, E::FoundPlugged, S::Recovering),
        (S::Detached, E::ReplugStarted(REPLUG), S::Replugging(REPLUG)),
        (S::Replugging(REPLUG), E::ReplugEnded, S::Detached),
        (S::Replugging(REPLUG), E::ConnectionLost, S::Detached),
        (S::Attaching, E::Attached(9), S::Attached(Ready(9))),
        (S::Attaching, E::AttachFailed, S::Detached),
        (S::Attaching, E::AttachTimedOut, S::AttachTimedOut),
        (S::Attaching, E::AttachFoundForeign, S::Lost),
        (S::Attaching, E::ConnectionLost, S::Detached),
        (S::AttachTimedOut, E::AttachRequested, S::Attaching),
        (S::AttachTimedOut, E::FoundPlugged, S::LostDetaching),
        (S::AttachTimedOut, E::FoundUnplugged, S::Detached),
        (S::Recovering, E::Recovered(9), S::Attached(Ready(9))),
        (S::Recovering, E::RecoverFailed, S::Lost),
        (S::Recovering, E::ConnectionLost, S::Lost),
        (S::Recovering, E::FoundUnplugged, S::Detached),
        (S::Recovering, E::Released, S::Detached),
        (S::Recovering, E::DetachDone, S::Detached),
        (S::Attached(Ready(8)), E::DetachRequested, S::Detaching(Ready(8))),
        (S::Attached(Ready(8)), E::FoundUnplugged, S::Detached),
        (S::Attached(Ready(8)), E::Released, S::Detached),
        (S::Attached(Ready(8)), E::DetachDone, S::Detached),
        (S::Attached(Ready(8)), E::PublishStarted, S::Attached(Publishing(8))),
        (S::Attached(Ready(8)), E::PublishFailed, S::Lost),
        (S::Attached(Publishing(8)), E::DetachRequested, S::Detaching(Publishing(8))),
        (S::Attached(Publishing(8)), E::FoundUnplugged, S::Detached),
        (S::Attached(Publishing(8)), E::Released, S::Detached),
        (S::Attached(Publishing(8)), E::DetachDone, S::Detached),
        (S::Attached(Publishing(8)), E::Published(9), S::Attached(Ready(9))),
        (S::Attached(Publishing(8)), E::PublishFailed, S::Lost),
        (S::Detaching(Ready(8)), E::FoundUnplugged, S::Detached),
        (S::Detaching(Ready(8)), E::DetachDone, S::Detached),
        (S::Detaching(Ready(8)), E::Released, S::Detached),
        (S::Detaching(Ready(8)), E::DetachFailed, S::Attached(Ready(8))),
        (S::Detaching(Ready(8)), E::ConnectionLost, S::Attached(Ready(8))),
        (S::Detaching(Ready(8)), E::PublishStarted, S::Detaching(Publishing(8))),
        (S::Detaching(Ready(8)), E::PublishFailed, S::LostDetaching),
        (S::Detaching(Publishing(8)), E::FoundUnplugged, S::Detached),
        (S::Detaching(Publishing(8)), E::DetachDone, S::Detached),
        (S::Detaching(Publishing(8)), E::Released, S::Detached),
        (S::Detaching(Publishing(8)), E::DetachFailed, S::Attached(Publishing(8))),
        (S::Detaching(Publishing(8)), E::ConnectionLost, S::Attached(Publishing(8))),
        (S::Detaching(Publishing(8)), E::Published(9), S::Detaching(Ready(9))),
        (S::Detaching(Publishing(8)), E::PublishFailed, S::LostDetaching),
        (S::Lost, E::FoundPlugged, S::Recovering),
        (S::Lost, E::FoundUnplugged, S::Detached),
        (S::Lost, E::DetachRequested, S::LostDetaching),
        (S::Lost, E::Released, S::Detached),
        (S::Lost, E::DetachDone, S::Detached),
        (S::LostDetaching, E::FoundUnplugged, S::Detached),
        (S::LostDetaching, E::DetachDone, S::Detached),
        (S::LostDetaching, E::Released, S::Detached),
        (S::LostDetaching, E::DetachFailed, S::Lost),
        (S::LostDetaching, E::ConnectionLost, S::Lost),
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
    fn only_a_served_channel_has_a_writer() {
        for state in STATES {
            let served = matches!(state, S::Attached(_) | S::Detaching(..));
            assert_eq!(state.publisher().is_some(), served, "{state:?}");
            assert!(state.is_plugged() || !served, "{state:?}");
        }
    }
}
