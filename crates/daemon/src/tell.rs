//! Tell: publishes to a guest, and hears it acknowledge.

use crate::{
    message::{ConnectionId, Message},
    readiness::readable,
};
use std::io;
use tokio::{sync::mpsc, task::AbortHandle};
use vnuma_abi_topology_channel::{VCPU_APPROXIMATE, Vcpu, ivshmem::WINDOW};
use vnuma_channel::{Acknowledgement, Channel, ChannelError, Content, ContentError};
use vnuma_placement::{ACKNOWLEDGEMENT_WINDOW, Telling};

const _: () = assert!(WINDOW == ACKNOWLEDGEMENT_WINDOW);

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

    /// What the guest acknowledged.
    pub(crate) fn rung(&self) -> Result<Vec<Acknowledgement>, ChannelError> {
        self.channel.take_acknowledgements()
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.rings.abort();
    }
}

/// A decision in the form of the channel.
pub(crate) fn content(telling: &Telling) -> Result<Content, ContentError> {
    let nodes = telling.distances.len();
    let vcpu = |told: &vnuma_placement::ToldVcpu| {
        let node = told.placed.node;
        let outside = ContentError::Node { apic_id: told.apic_id, node, nodes };
        Ok(Vcpu {
            apic_id: told.apic_id,
            node: u16::try_from(node).map_err(|_| outside)?,
            flags: if told.placed.approximate { VCPU_APPROXIMATE } else { 0 },
        })
    };
    let vcpus = telling.vcpus.iter().map(vcpu).collect::<Result<_, _>>()?;
    Content::new(telling.distances.clone(), vcpus)
}
