//! A VM's channel: memory, interrupt and acknowledgements.

use crate::{
    Content, Generations, GuestStatus, Identity, Region, doorbell::Doorbells, ivshmem, publish::publication,
    takeover::Parts, wakeups::Wakeups,
};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};
use vnuma_abi_topology_channel::ivshmem::{ACKNOWLEDGE_VECTOR, PUBLISH_VECTOR, VECTORS};

/// Publications that can wait for their acknowledgement at the same time. The oldest of more is given up: a later one
/// contains it.
pub const MAX_OUTSTANDING: usize = 8;

/// Why a channel could not be made or used.
#[derive(Debug, thiserror::Error)]
#[error("topology channel: {act}: {source}")]
pub struct ChannelError {
    act: &'static str,
    source: io::Error,
}

fn failed<E: Into<io::Error>>(act: &'static str) -> impl Fn(E) -> ChannelError {
    move |source| ChannelError { act, source: source.into() }
}

/// The host's end. Dropping it leaves the memory and the last publication to the VM.
#[derive(Debug)]
pub struct Channel {
    region: Region,
    generations: Generations,
    doorbells: &'static Doorbells,
    guest_vectors: Vec<EventFd>,
    host_vectors: Vec<EventFd>,
    /// Of the vector by which the guest acknowledges.
    wakeups: Wakeups,
    /// Published and not acknowledged yet, in their order.
    outstanding: VecDeque<u64>,
    /// Kept open: QEMU would see the server going away. It has where a channel was taken over, and does not mind.
    _server: Option<OwnedFd>,
}

impl Channel {
    /// Makes a channel, and the socket that is to be handed to QEMU. `epoch` is in the upper
    /// half of every generation: one that no other channel of the VM had.
    pub fn new(epoch: u32) -> Result<(Self, OwnedFd), ChannelError> {
        let region = Region::new().map_err(failed("shared memory"))?;
        let (guest_vectors, host_vectors) = (vectors()?, vectors()?);
        let host = host_vectors.iter().map(AsFd::as_fd);
        let guest = guest_vectors.iter().map(AsFd::as_fd);
        let (server, client) =
            ivshmem::serve(region.memory(), host, guest).map_err(failed("ivshmem server's messages"))?;
        let generations = Generations::new(epoch);
        let channel = Self {
            doorbells: Doorbells::shared().map_err(failed("asynchronous reads"))?,
            wakeups: watch(&host_vectors)?,
            outstanding: VecDeque::new(),
            region,
            generations,
            guest_vectors,
            host_vectors,
            _server: Some(server),
        };
        Ok((channel, client))
    }

    /// The socket that is to be handed to a QEMU whose guest brings its channel along: nobody has the host's end.
    pub fn unserved() -> Result<OwnedFd, ChannelError> {
        Self::new(0).map(|(_, client)| client)
    }

    /// What finds this channel again in the hypervisor, once it is attached and this process has died.
    pub fn identity(&self) -> Result<Identity, ChannelError> {
        Identity::of(self.region.memory(), &self.guest_vectors, &self.host_vectors)
            .map_err(failed("its identity"))
    }

    /// Takes over a channel whose host's end has died from its hypervisor: the process of `pidfd`, whose directory in
    /// `/proc` is `process`. What is published there stays readable until [`Self::publish`] is called, and
    /// during it. Two host's ends at a time would mix their publications.
    pub fn take_over(
        identity: &Identity,
        pidfd: BorrowedFd<'_>,
        process: &Path,
        epoch: u32,
    ) -> Result<Self, ChannelError> {
        let parts = identity.take(pidfd, process).map_err(failed("taking it over from the hypervisor"))?;
        let Parts { memory, guest_vectors, host_vectors } = parts;
        let (region, published) = Region::take_over(memory).map_err(failed("shared memory"))?;
        Ok(Self {
            doorbells: Doorbells::shared().map_err(failed("asynchronous reads"))?,
            wakeups: watch(&host_vectors)?,
            outstanding: VecDeque::new(),
            region,
            generations: Generations::after(epoch, published),
            guest_vectors,
            host_vectors,
            _server: None,
        })
    }

    /// The generation of the next publication.
    pub fn next_generation(&self) -> u64 {
        self.generations.peek()
    }

    /// Publishes `content`, raises the guest's interrupt and expects an acknowledgement. Returns the generation. Never
    /// blocks, whatever the other side does to what it shares.
    pub fn publish(&mut self, content: &Content) -> Result<u64, ChannelError> {
        let generation = self.generations.take();
        let doorbell = &self.host_vectors[ACKNOWLEDGE_VECTOR];
        self.wakeups.refill(doorbell).map_err(failed("watching for acknowledgements"))?;
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
        let vector = self.guest_vectors[PUBLISH_VECTOR].as_fd();
        self.doorbells.signal(vector).map_err(failed("raising the interrupt"))
    }

    /// Readable when the guest has changed what [`Self::guest_status`] returns. A guest that signals without end
    /// makes it readable [`WAKEUPS_PER_PUBLICATION`](crate::WAKEUPS_PER_PUBLICATION) times for each publication and twice
    /// in each [`PAUSE`](crate::PAUSE), if [`Self::take_acknowledgement`] is called each time.
    pub fn acknowledgement_fd(&self) -> BorrowedFd<'_> {
        self.wakeups.fd()
    }

    /// The generation that the guest has acknowledged since the last call, if it is one that was outstanding. Those
    /// published before it are acknowledged with it. Does not block.
    pub fn take_acknowledgement(&mut self) -> Result<Option<u64>, ChannelError> {
        let doorbell = &self.host_vectors[ACKNOWLEDGE_VECTOR];
        self.wakeups.take(doorbell).map_err(failed("reading acknowledgements"))?;
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

fn watch(host_vectors: &[EventFd]) -> Result<Wakeups, ChannelError> {
    Wakeups::new(&host_vectors[ACKNOWLEDGE_VECTOR]).map_err(failed("watching for acknowledgements"))
}

fn vectors() -> Result<Vec<EventFd>, ChannelError> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    (0..VECTORS).map(|_| EventFd::from_value_and_flags(0, flags).map_err(failed("eventfd"))).collect()
}
