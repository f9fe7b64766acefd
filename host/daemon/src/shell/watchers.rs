//! Watchers of events.

use super::told::Told;
use std::sync::Arc;
use tokio::sync::mpsc;
use tracing::warn;
use vnuma_api::{Event, EventKind};

/// Longest queue of a watcher. A watcher with more is dropped.
const BACKLOG: usize = 1024;

/// Events that are sent at the latest, so that a turn with many of them leaves a watcher time to take them.
const AT_ONCE: usize = 64;

/// All watchers.
///
/// To send wakes a thread up, which takes as long as to publish does. So what happens in a turn of the core's thread is sent at its
/// end, and wakes each watcher once.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    watchers: Vec<Watcher>,
    /// Events that were announced and are not sent yet.
    announced: Vec<Event>,
    dropped: u64,
}

#[derive(Debug)]
struct Watcher {
    /// Kinds of events that it wants; empty: all.
    kinds: Vec<EventKind>,
    sender: mpsc::Sender<Arc<Told<Event>>>,
}

impl Watcher {
    fn wants(&self, event: &Event) -> bool {
        self.kinds.is_empty() || self.kinds.contains(&event.kind())
    }
}

impl Watchers {
    /// Adds a watcher of events of these kinds, or of all if none is named: of those that are announced from now on. Its receiver
    /// ends if it is too slow.
    pub(crate) fn add(&mut self, kinds: Vec<EventKind>) -> mpsc::Receiver<Arc<Told<Event>>> {
        self.send();
        self.watchers.retain(|watcher| !watcher.sender.is_closed());
        let (sender, receiver) = mpsc::channel(BACKLOG);
        self.watchers.push(Watcher { kinds, sender });
        receiver
    }

    /// Has an event sent with [`Self::send`], or at once with all before if there are many.
    pub(crate) fn announce(&mut self, event: Event) {
        if !self.watchers.is_empty() {
            self.announced.push(event);
        }
        if self.announced.len() >= AT_ONCE {
            self.send();
        }
    }

    /// Sends what was announced to every watcher that wants it, without waiting for any. The others are not woken.
    pub(crate) fn send(&mut self) {
        if self.announced.is_empty() {
            return;
        }
        let announced: Vec<_> = std::mem::take(&mut self.announced).into_iter().map(Told::new).collect();
        self.watchers.retain(|watcher| {
            for event in announced.iter().filter(|event| watcher.wants(event.what())) {
                match watcher.sender.try_send(Arc::clone(event)) {
                    Ok(()) => {}
                    Err(mpsc::error::TrySendError::Closed(_)) => return false,
                    Err(mpsc::error::TrySendError::Full(_)) => {
                        self.dropped += 1;
                        warn!(backlog = BACKLOG, "a watcher reads too slowly and was dropped");
                        return false;
                    }
                }
            }
            true
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
            watchers.announce(Event::Gone { vm: "a".into(), time_ns });
            watchers.send();
            assert!(fast.try_recv().is_ok());
        }
        assert_eq!((watchers.count(), watchers.dropped()), (1, 1));
        let received = std::iter::from_fn(|| slow.try_recv().ok()).count();
        assert_eq!(received, BACKLOG);
        assert_eq!(slow.try_recv().err(), Some(mpsc::error::TryRecvError::Disconnected));
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
            watchers.announce(event(kind));
        }
        assert!(some.try_recv().is_err(), "nothing is sent before the end of the turn");
        let mut late = watchers.add(vec![]);
        watchers.send();
        let received: Vec<_> = std::iter::from_fn(|| some.try_recv().ok()).collect();
        let events: Vec<_> = received.iter().map(|told| told.what().clone()).collect();
        assert_eq!(events, [event("gone"), event("appeared")]);
        assert!(late.try_recv().is_err(), "all that was announced before");
        assert_eq!(watchers.count(), 2);
    }

    #[test]
    fn a_turn_with_many_events_sends_them_before_its_end() {
        let mut watchers = Watchers::default();
        let mut all = watchers.add(vec![]);
        for time_ns in 0..AT_ONCE as u64 + 1 {
            watchers.announce(Event::Gone { vm: "a".into(), time_ns });
        }
        assert_eq!(std::iter::from_fn(|| all.try_recv().ok()).count(), AT_ONCE);
    }

    #[test]
    fn one_that_went_away_is_forgotten() {
        let mut watchers = Watchers::default();
        drop(watchers.add(vec![]));
        watchers.announce(Event::Gone { vm: "a".into(), time_ns: 0 });
        watchers.send();
        assert_eq!((watchers.count(), watchers.dropped()), (0, 0));
    }
}
