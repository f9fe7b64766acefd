//! A VM's channel: memory, interrupt and acknowledgements.

use crate::{
    Content, Generations, Identity, Region, doorbell, ivshmem, publish::publication, takeover::Parts,
};
use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        eventfd::{EfdFlags, EventFd},
    },
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};
use vnuma_abi_topology_channel::ivshmem::{VECTORS, WINDOW};

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

/// The guest says that its kernel's maps agree with a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Acknowledgement {
    /// Its counter modulo [`WINDOW`].
    pub number: usize,
    /// They were changed by CPU hotplug, the driver's safe mode.
    pub safe: bool,
}

/// The host's end. Dropping it leaves the memory and the last publication to the VM.
#[derive(Debug)]
pub struct Channel {
    region: Region,
    generations: Generations,
    guest_vectors: Vec<EventFd>,
    host_vectors: Vec<EventFd>,
    /// Watches vectors of the host, each only while an acknowledgement is expected on it, and once.
    acknowledgements: Epoll,
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
            acknowledgements: watch(&host_vectors)?,
            region,
            generations,
            guest_vectors,
            host_vectors,
            _server: Some(server),
        };
        Ok((channel, client))
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
            acknowledgements: watch(&host_vectors)?,
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

    /// Publishes `content`, raises the guest's interrupt and expects an acknowledgement. Returns
    /// the generation.
    pub fn publish(&mut self, content: &Content) -> Result<u64, ChannelError> {
        let generation = self.generations.take();
        let number = generation as u32 as usize % WINDOW;
        self.expect(number)?;
        self.expect(WINDOW + number)?;
        self.region.apply_all(&publication(generation, content));
        self.raise()?;
        Ok(generation)
    }

    /// Raises the guest's interrupt.
    pub fn raise(&self) -> Result<(), ChannelError> {
        doorbell::signal(self.guest_vectors[0].as_fd()).map_err(failed("raising the interrupt"))
    }

    /// Readable when [`Self::take_acknowledgements`] has something. A guest that rings without end
    /// makes it readable twice per publication.
    pub fn acknowledgement_fd(&self) -> BorrowedFd<'_> {
        self.acknowledgements.0.as_fd()
    }

    /// What was acknowledged since it was last expected, each once. Does not block.
    pub fn take_acknowledgements(&self) -> Result<Vec<Acknowledgement>, ChannelError> {
        let mut events = [EpollEvent::empty(); VECTORS];
        let count = match self.acknowledgements.wait(&mut events, EpollTimeout::ZERO) {
            Err(Errno::EINTR) => 0,
            other => other.map_err(failed("epoll"))?,
        };
        let acknowledgement = |event: &EpollEvent| {
            let vector = event.data() as usize;
            Acknowledgement { number: vector % WINDOW, safe: vector >= WINDOW }
        };
        Ok(events[..count].iter().map(acknowledgement).collect())
    }

    /// From now on, one ring on `vector` is noticed.
    fn expect(&self, vector: usize) -> Result<(), ChannelError> {
        let event = &self.host_vectors[vector];
        // Rings from before this publication are none of its acknowledgements.
        doorbell::clear(event.as_fd()).map_err(failed("clearing an acknowledgement"))?;
        self.acknowledgements.modify(event, &mut interest(vector, true)).map_err(failed("epoll"))
    }
}

/// Watches the vectors of the host, none of them expected yet.
fn watch(host_vectors: &[EventFd]) -> Result<Epoll, ChannelError> {
    let acknowledgements = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed("epoll"))?;
    for (vector, event) in host_vectors.iter().enumerate() {
        acknowledgements.add(event, interest(vector, false)).map_err(failed("epoll"))?;
    }
    Ok(acknowledgements)
}

fn interest(vector: usize, expected: bool) -> EpollEvent {
    // One-shot: after an event nothing is watched until it is expected again.
    let flags = if expected { EpollFlags::EPOLLIN } else { EpollFlags::empty() };
    EpollEvent::new(flags | EpollFlags::EPOLLONESHOT, vector as u64)
}

fn vectors() -> Result<Vec<EventFd>, ChannelError> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    (0..VECTORS).map(|_| EventFd::from_value_and_flags(0, flags).map_err(failed("eventfd"))).collect()
}
