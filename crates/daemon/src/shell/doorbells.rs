//! Waits for doorbells of guests.

use super::inbox::{Inbox, Message};
use nix::{
    errno::Errno,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        eventfd::{EfdFlags, EventFd},
    },
};
use std::{
    io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};
use tracing::error;
use vnuma_channel::Channel;
use vnuma_placement::world::VmId;
use vnuma_process::spawn_worker;

/// Stands for the end in place of a VM's number. VMs are numbered from 1.
const STOP: u64 = 0;
const EVENTS: usize = 64;

/// How long the thread pauses after it announced rings. Rings of that time are announced together: a single ring is
/// announced at once, and a thousand a second cause a few hundred wake-ups.
const REST: Duration = Duration::from_millis(4);

/// A thread that waits for guests to ring.
#[derive(Debug)]
pub(super) struct Doorbells {
    epoll: Arc<Epoll>,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Doorbells {
    pub(super) fn start(inbox: Arc<Inbox>) -> io::Result<Self> {
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        epoll.add(&stop, EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
        let theirs = Arc::clone(&epoll);
        let thread = spawn_worker("doorbells", move || run(&theirs, &inbox))?;
        Ok(Self { epoll, stop, thread: Some(thread) })
    }

    /// Reports the doorbell of a channel until the channel is closed.
    pub(super) fn watch(&self, vm: VmId, channel: &Channel) -> io::Result<()> {
        Ok(self.epoll.add(channel.acknowledgement_fd(), interest(vm))?)
    }

    /// Enables reports of a doorbell again after one was handled. None is reported in between, so that a guest that rings
    /// without pause fills no queue.
    pub(super) fn rearm(&self, vm: VmId, channel: &Channel) {
        if let Err(error) = self.epoll.modify(channel.acknowledgement_fd(), &mut interest(vm)) {
            error!(%error, "acknowledgements of a guest cannot be received any more");
        }
    }
}

fn interest(vm: VmId) -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, vm)
}

impl Drop for Doorbells {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // Fails only if the thread panicked, and the panic has been reported.
            let _ = thread.join();
        }
    }
}

fn run(epoll: &Epoll, inbox: &Inbox) {
    loop {
        let mut events = [EpollEvent::empty(); EVENTS];
        let count = match epoll.wait(&mut events, EpollTimeout::NONE) {
            Ok(count) => count,
            Err(Errno::EINTR) => continue,
            Err(error) => return error!(%error, "acknowledgements of guests cannot be received any more"),
        };
        for event in &events[..count] {
            if event.data() == STOP || !inbox.send(Message::Doorbell(event.data())) {
                return;
            }
        }
        thread::sleep(REST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;
    use vnuma_abi_topology_channel::Vcpu;
    use vnuma_channel::Content;
    use vnuma_channel_model::GuestEnd;
    use vnuma_topology::DistanceMatrix;

    /// More than one call of epoll_wait() returns.
    const VMS: u64 = EVENTS as u64 + 6;

    fn channel() -> (Channel, GuestEnd) {
        let (channel, socket) = Channel::new(1).expect("a channel");
        (channel, GuestEnd::connect(&socket).expect("all messages"))
    }

    /// Doorbells that were reported until the inbox stayed empty for ten times as long as the thread pauses. Twice as many as
    /// there are VMs are enough.
    fn reported(inbox: &Inbox, at_least: usize) -> Vec<VmId> {
        let (mut all, hang) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        loop {
            let turn = inbox.take(Instant::now() + 10 * REST, None).expect("open");
            let enough = all.len() >= at_least || Instant::now() > hang;
            if turn.messages.is_empty() && enough || all.len() as u64 > 2 * VMS {
                all.sort_unstable();
                return all;
            }
            all.extend(turn.messages.into_iter().map(|message| match message {
                Message::Doorbell(vm) => vm,
                other => panic!("{other:?}"),
            }));
        }
    }

    #[test]
    fn guests_that_ring_together_are_each_reported_once() {
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        let doorbells = Doorbells::start(Arc::clone(&inbox)).expect("started");
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
            assert_eq!(reported(&inbox, expected.len()), expected, "round {round}");
            for (vm, (channel, _)) in &mut channels {
                assert!(channel.take_acknowledgement().expect("taken").is_some());
                doorbells.rearm(*vm, channel);
            }
            assert!(reported(&inbox, 0).is_empty(), "nobody rang again");
        }
    }
}
