//! Watchers of events.

use tokio::sync::mpsc;
use tracing::warn;
use vnuma_api::{Event, EventKind};

/// Longest queue of a watcher. A watcher with more is dropped.
const BACKLOG: usize = 1024;

/// All watchers.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    watchers: Vec<Watcher>,
    dropped: u64,
}

#[derive(Debug)]
struct Watcher {
    /// What it wants; all, if empty.
    kinds: Vec<EventKind>,
    sender: mpsc::Sender<Event>,
}

impl Watchers {
    /// Adds a watcher of events of these kinds, or of all if none is named. Its receiver ends if it is too slow.
    pub(crate) fn add(&mut self, kinds: Vec<EventKind>) -> mpsc::Receiver<Event> {
        self.watchers.retain(|watcher| !watcher.sender.is_closed());
        let (sender, receiver) = mpsc::channel(BACKLOG);
        self.watchers.push(Watcher { kinds, sender });
        receiver
    }

    /// Sends an event to every watcher that wants it, without waiting for any. The others are not woken.
    pub(crate) fn announce(&mut self, event: &Event) {
        let dropped = &mut self.dropped;
        self.watchers.retain(|Watcher { kinds, sender }| {
            if !kinds.is_empty() && !kinds.contains(&event.kind()) {
                return true;
            }
            match sender.try_send(event.clone()) {
                Ok(()) => true,
                Err(mpsc::error::TrySendError::Closed(_)) => false,
                Err(mpsc::error::TrySendError::Full(_)) => {
                    *dropped += 1;
                    warn!(backlog = BACKLOG, "a watcher reads too slowly and was dropped");
                    false
                }
            }
        });
    }

    pub(crate) fn count(&self) -> usize {
        self.watchers.iter().filter(|watcher| !watcher.sender.is_closed()).count()
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
        let (mut slow, mut fast) = (watchers.add(vec![]), watchers.add(vec![]));
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
    fn a_watcher_is_sent_the_kinds_that_it_wants() {
        let mut watchers = Watchers::default();
        let mut some = watchers.add(vec![EventKind::Appeared, EventKind::Gone]);
        let event = |kind: &str| {
            let json = serde_json::json!({"event": kind, "vm": "a", "time_ns": 1});
            serde_json::from_value::<Event>(json).expect("an event")
        };
        for kind in ["attached", "gone", "detached", "appeared"] {
            watchers.announce(&event(kind));
        }
        let received: Vec<_> = std::iter::from_fn(|| some.try_recv().ok()).collect();
        assert_eq!(received, [event("gone"), event("appeared")]);
        assert_eq!(watchers.count(), 1);
    }

    #[test]
    fn one_that_went_away_is_forgotten() {
        let mut watchers = Watchers::default();
        drop(watchers.add(vec![]));
        watchers.announce(&Event::Gone { vm: "a".into(), time_ns: 0 });
        assert_eq!((watchers.count(), watchers.dropped()), (0, 0));
    }
}
