//! Tell: publishes to a guest, and hears it acknowledge.

use crate::{
    message::{ConnectionId, Message},
    readiness::readable,
};
use std::io;
use tokio::{sync::mpsc, task::AbortHandle};
use vnuma_abi_topology_channel::Vcpu;
use vnuma_channel::{Channel, ChannelError, Content, ContentError, GuestStatus, MAX_OUTSTANDING};
use vnuma_placement::{ACKNOWLEDGEMENT_WINDOW, Telling};

// The channel returns outstanding generations only, so their counters modulo the window are unique.
const _: () = assert!(MAX_OUTSTANDING <= ACKNOWLEDGEMENT_WINDOW);

/// A channel in use.
#[derive(Debug)]
pub(crate) struct Teller {
    channel: Channel,
    rings: AbortHandle,
}

impl Teller {
    /// Takes a channel into use; the guest's rings are announced as messages.
    pub(crate) fn new(
        channel: Channel,
        id: ConnectionId,
        messages: mpsc::Sender<Message>,
    ) -> io::Result<Self> {
        let ready = readable(channel.acknowledgement_fd())?;
        let rings = tokio::spawn(async move {
            while let Ok(mut guard) = ready.readable().await {
                guard.clear_ready();
                if messages.send(Message::Rung { id }).await.is_err() {
                    return;
                }
            }
        });
        Ok(Self { channel, rings: rings.abort_handle() })
    }

    pub(crate) fn next_generation(&self) -> u64 {
        self.channel.next_generation()
    }

    pub(crate) fn publish(&mut self, content: &Content) -> Result<u64, ChannelError> {
        self.channel.publish(content)
    }

    /// The generation that the guest has acknowledged since the last call.
    pub(crate) fn take_acknowledgement(&mut self) -> Result<Option<u64>, ChannelError> {
        self.channel.take_acknowledgement()
    }

    /// What the guest says of itself.
    pub(crate) fn guest_status(&self) -> GuestStatus {
        self.channel.guest_status()
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.rings.abort();
    }
}

/// A decision in the form of the channel.
pub(crate) fn content(telling: &Telling) -> Result<Content, ContentError> {
    let vcpu = |told: &vnuma_placement::ToldVcpu| Vcpu { apic_id: told.apic_id, node: told.placed.node };
    Content::new(telling.distances.clone(), telling.vcpus.iter().map(vcpu).collect())
}
