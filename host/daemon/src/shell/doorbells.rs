//! Doorbells of guests.

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};
use vnuma_channel::Channel;
use vnuma_policy::world::VmId;

/// Most that are taken at once.
const EVENTS: usize = 64;

/// Guests that may ring.
#[derive(Debug)]
pub(super) struct Doorbells(Epoll);

impl Doorbells {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?))
    }

    /// Readable while a guest has rung.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }

    /// Takes the doorbell of a channel, until the channel is closed.
    pub(super) fn watch(&self, vm: VmId, channel: &Channel) -> io::Result<()> {
        Ok(self.0.add(channel.acknowledgement_fd(), EpollEvent::new(EpollFlags::EPOLLIN, vm))?)
    }

    /// VMs whose guests have rung, at most [`EVENTS`]. The kernel moves each descriptor that it returns to the end of its ready list
    /// (`ep_send_events`). A guest that rings without pause therefore cannot delay the doorbells of other guests.
    pub(super) fn take(&self) -> Vec<VmId> {
        let mut events = [EpollEvent::empty(); EVENTS];
        // It fails by a signal only, and the descriptor stays readable.
        let count = self.0.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        events[..count].iter().map(EpollEvent::data).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use vnuma_abi_topology_channel::Vcpu;
    use vnuma_channel::{Content, Plug};
    use vnuma_channel_model::GuestEnd;
    use vnuma_model::DistanceMatrix;

    /// More than one call takes.
    const VMS: u64 = EVENTS as u64 + 6;

    fn channel() -> (Channel, GuestEnd) {
        let (channel, Plug::Ivshmem(socket)) = Channel::create(1).expect("a channel");
        (channel, GuestEnd::connect(&socket).expect("all messages"))
    }

    /// All that have rung and acknowledged something, in order.
    fn taken(doorbells: &Doorbells, channels: &mut [(VmId, (Channel, GuestEnd))]) -> Vec<VmId> {
        let mut all = Vec::new();
        loop {
            let mut fds = [PollFd::new(doorbells.fd(), PollFlags::POLLIN)];
            let readable = poll(&mut fds, PollTimeout::ZERO).expect("polled") > 0;
            let some = doorbells.take();
            assert_eq!(readable, !some.is_empty());
            if some.is_empty() {
                all.sort_unstable();
                return all;
            }
            for vm in some {
                let (_, (channel, _)) = &mut channels[vm as usize - 1];
                assert!(channel.take_acknowledgement().expect("taken").is_some());
                all.push(vm);
            }
        }
    }

    #[test]
    fn guests_that_ring_together_are_each_taken_once() {
        let doorbells = Doorbells::new().expect("made");
        let mut channels: Vec<_> = (1..=VMS).map(|vm| (vm, channel())).collect();
        for (vm, (channel, _)) in &channels {
            doorbells.watch(*vm, channel).expect("watched");
        }
        let expected: Vec<VmId> = (1..=VMS).collect();
        let distances = DistanceMatrix::new(vec![vec![10]]).expect("square");
        let content = Content::new(distances, vec![Vcpu { apic_id: 0, node: 0 }]).expect("within limits");
        for round in 0..2 {
            for (_, (channel, guest)) in &mut channels {
                let generation = channel.publish(&content).expect("published");
                guest.acknowledge(generation).expect("rung");
            }
            assert_eq!(taken(&doorbells, &mut channels), expected, "round {round}");
            assert_eq!(taken(&doorbells, &mut channels), [0; 0], "no guest rang again");
        }
    }
}
