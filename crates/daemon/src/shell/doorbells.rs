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
