//! Watchers of events.

use tokio::sync::mpsc;
use tracing::warn;
use vnuma_api::Event;

/// Longest queue of a watcher. A watcher with more is dropped.
const BACKLOG: usize = 1024;

/// All watchers.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    senders: Vec<mpsc::Sender<Event>>,
    dropped: u64,
}

impl Watchers {
    /// Adds a watcher. Its receiver ends if it is too slow.
    pub(crate) fn add(&mut self) -> mpsc::Receiver<Event> {
        self.senders.retain(|sender| !sender.is_closed());
        let (sender, receiver) = mpsc::channel(BACKLOG);
        self.senders.push(sender);
        receiver
    }

    /// Sends an event to every watcher without waiting for any.
    pub(crate) fn announce(&mut self, event: &Event) {
        let dropped = &mut self.dropped;
        self.senders.retain(|sender| match sender.try_send(event.clone()) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(_)) => {
                *dropped += 1;
                warn!(backlog = BACKLOG, "a watcher reads too slowly and was dropped");
                false
            }
        });
    }

    pub(crate) fn count(&self) -> usize {
        self.senders.iter().filter(|sender| !sender.is_closed()).count()
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_watcher_is_dropped_and_counted_and_the_others_are_not() {
        let mut watchers = Watchers::default();
        let (mut slow, mut fast) = (watchers.add(), watchers.add());
        for time_ns in 0..BACKLOG as u64 + 1 {
            watchers.announce(&Event::Gone { vm: "a".into(), time_ns });
            assert!(fast.try_recv().is_ok());
        }
        assert_eq!((watchers.count(), watchers.dropped()), (1, 1));
        let received = std::iter::from_fn(|| slow.try_recv().ok()).count();
        assert_eq!(received, BACKLOG);
        assert_eq!(slow.try_recv(), Err(mpsc::error::TryRecvError::Disconnected));
    }

    #[test]
    fn one_that_went_away_is_forgotten() {
        let mut watchers = Watchers::default();
        drop(watchers.add());
        watchers.announce(&Event::Gone { vm: "a".into(), time_ns: 0 });
        assert_eq!((watchers.count(), watchers.dropped()), (0, 0));
    }
}
