//! Events of domains: from libvirt's thread to the subscribers.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Most events kept. Of more the oldest are dropped, and [`DomainEvent::Changed`] says so.
const LIMIT: usize = 256;

/// Something that happened to a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DomainEvent {
    /// It was paused, or has begun to be migrated away.
    Suspended,
    /// It runs again, or has arrived.
    Resumed,
    /// The guest boots again.
    Rebooted,
    /// It has stopped.
    Stopped,
    /// It is at another host, and has stopped here.
    Left,
    /// A pin was changed.
    Changed,
    /// A device with this alias was plugged.
    DeviceAdded(String),
    /// The device with this alias was unplugged.
    DeviceRemoved(String),
    /// The guest does not give back the device with this alias.
    RemovalFailed(String),
    /// The connection is closed. Nothing follows.
    Disconnected,
}

/// The events of a domain that were not taken yet.
#[derive(Debug)]
pub(crate) struct Queue {
    events: Mutex<VecDeque<DomainEvent>>,
    fd: Arc<EventFd>,
}

impl Queue {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let fd = Arc::new(EventFd::from_value_and_flags(0, flags)?);
        Ok(Self { events: Mutex::default(), fd })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<DomainEvent>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, event: DomainEvent) {
        let mut events = self.lock();
        if events.len() == LIMIT {
            // What was lost has changed something.
            events.pop_front();
            events.pop_front();
            events.push_front(DomainEvent::Changed);
        }
        events.push_back(event);
        drop(events);
        // A counter that is full is as readable as any other.
        let _ = self.fd.write(1);
    }

    /// Makes the descriptor readable without an event.
    pub(crate) fn wake(&self) {
        // A counter that is full is as readable as any other.
        let _ = self.fd.write(1);
    }

    /// The next event. Without one the descriptor is quiet afterwards.
    pub(crate) fn take(&self) -> Option<DomainEvent> {
        let mut events = self.lock();
        let event = events.pop_front();
        if event.is_none() {
            // Empty when nothing has signalled it.
            let _ = self.fd.read();
        }
        event
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn signal(&self) -> Arc<EventFd> {
        Arc::clone(&self.fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_and_too_many_are_noticed() {
        let queue = Queue::new().unwrap();
        assert_eq!(queue.take(), None);
        queue.push(DomainEvent::Suspended);
        queue.push(DomainEvent::Resumed);
        assert_eq!(queue.take(), Some(DomainEvent::Suspended));
        assert_eq!(queue.take(), Some(DomainEvent::Resumed));
        assert_eq!(queue.take(), None);
        assert!(queue.fd.read().is_err(), "it is quiet");
        (0..LIMIT + 10).for_each(|_| queue.push(DomainEvent::Suspended));
        queue.push(DomainEvent::Disconnected);
        let all: Vec<_> = std::iter::from_fn(|| queue.take()).collect();
        assert_eq!((all.len(), &all[0]), (LIMIT, &DomainEvent::Changed));
        assert_eq!(all.last(), Some(&DomainEvent::Disconnected), "the last ones are kept");
    }
}
