//! The host's end of a VM's channel: what was published, and what of that the guest has acknowledged.

use crate::{
    ChannelError, Content, GuestStatus, Identity, Transport,
    error::failed,
    layout::{Generations, Region, publication},
};
use std::{collections::VecDeque, os::fd::BorrowedFd};

/// Publications that can wait for their acknowledgement at the same time. The oldest of more is given up: a later one contains it.
pub const MAX_OUTSTANDING: usize = 8;

/// The host's end. Dropping it leaves the memory and the last publication to the VM.
#[derive(Debug)]
pub struct Channel {
    region: Region,
    generations: Generations,
    transport: Box<dyn Transport>,
    /// Published and not acknowledged yet, in their order.
    outstanding: VecDeque<u64>,
}

impl Channel {
    /// The host's end of a channel in this region, whose guest is reached by this transport.
    pub fn new(region: Region, transport: impl Transport + 'static, generations: Generations) -> Self {
        Self { region, generations, transport: Box::new(transport), outstanding: VecDeque::new() }
    }

    /// What finds it again in the hypervisor, once it is plugged and this process has died.
    pub fn identity(&self) -> Result<Identity, ChannelError> {
        self.transport.identity(&self.region).map_err(failed("its identity"))
    }

    /// The generation of the next publication.
    pub fn next_generation(&self) -> u64 {
        self.generations.peek()
    }

    /// Publishes `content`, raises the guest's interrupt and expects an acknowledgement. Returns the generation. Never
    /// blocks, whatever the other side does to what it shares.
    pub fn publish(&mut self, content: &Content) -> Result<u64, ChannelError> {
        let generation = self.generations.take();
        self.transport.expect_signals().map_err(failed("watching for acknowledgements"))?;
        if self.outstanding.len() == MAX_OUTSTANDING {
            self.outstanding.pop_front();
        }
        self.outstanding.push_back(generation);
        self.region.apply_all(&publication(generation, content));
        self.raise()?;
        Ok(generation)
    }

    /// Raises the guest's interrupt.
    pub fn raise(&self) -> Result<(), ChannelError> {
        self.transport.raise().map_err(failed("raising the interrupt"))
    }

    /// Readable when the guest has changed what [`Self::guest_status`] returns. A guest that signals without end
    /// makes it readable [`WAKEUPS_PER_PUBLICATION`](crate::WAKEUPS_PER_PUBLICATION) times for each publication and twice
    /// in each [`PAUSE`](crate::PAUSE), if [`Self::take_acknowledgement`] is called each time.
    pub fn acknowledgement_fd(&self) -> BorrowedFd<'_> {
        self.transport.signalled()
    }

    /// The generation that the guest has acknowledged since the last call, if it is one that was outstanding. Those
    /// published before it are acknowledged with it. Does not block.
    pub fn take_acknowledgement(&mut self) -> Result<Option<u64>, ChannelError> {
        self.transport.take_signals().map_err(failed("reading acknowledgements"))?;
        let acknowledged = self.guest_status().acknowledged;
        let Some(position) = self.outstanding.iter().position(|&outstanding| outstanding == acknowledged)
        else {
            return Ok(None);
        };
        self.outstanding.drain(..=position);
        Ok(Some(acknowledged))
    }

    /// What the guest reports of itself and of the last publications.
    pub fn guest_status(&self) -> GuestStatus {
        GuestStatus::read(&self.region)
    }
}
