//! Clients that record the input of the policies.

use super::told::Told;
use std::sync::Arc;
use tokio::sync::mpsc;
use tracing::warn;
use vnuma_api::Observation;

/// Periods that a recorder may be behind; each is large. A recorder that is further behind is dropped.
const BACKLOG: usize = 16;

/// All recorders.
#[derive(Debug, Default)]
pub(crate) struct ObservationStreams {
    senders: Vec<mpsc::Sender<Arc<Told<Observation>>>>,
    dropped: u64,
}

impl ObservationStreams {
    /// Adds a recorder. Its receiver ends if it is too slow.
    pub(crate) fn add(&mut self) -> mpsc::Receiver<Arc<Told<Observation>>> {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        self.senders.push(sender);
        receiver
    }

    /// Gives all recorders a period, which is made only if there is a recorder.
    pub(crate) fn give(&mut self, observation: impl FnOnce() -> Option<Observation>) {
        self.senders.retain(|sender| !sender.is_closed());
        let Some(observation) = (!self.senders.is_empty()).then(observation).flatten() else { return };
        let (observation, dropped) = (Told::new(observation), &mut self.dropped);
        self.senders.retain(|sender| match sender.try_send(Arc::clone(&observation)) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(_)) => {
                *dropped += 1;
                warn!(backlog = BACKLOG, "a recorder reads too slowly and was dropped");
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
    fn a_slow_one_is_dropped_and_one_that_went_away_is_forgotten() {
        let mut recorders = ObservationStreams::default();
        recorders.give(|| panic!("nobody records"));
        let (mut slow, mut fast) = (recorders.add(), recorders.add());
        drop(recorders.add());
        for _ in 0..BACKLOG + 1 {
            recorders.give(|| Some(Observation::default()));
            assert!(fast.try_recv().is_ok());
        }
        assert_eq!((recorders.count(), recorders.dropped()), (1, 1));
        assert_eq!(std::iter::from_fn(|| slow.try_recv().ok()).count(), BACKLOG);
    }

    #[test]
    fn recorders_share_a_period_and_its_line() {
        let mut recorders = ObservationStreams::default();
        let mut receivers: Vec<_> = (0..3).map(|_| recorders.add()).collect();
        recorders.give(|| Some(Observation::default()));
        let lines: Vec<_> = receivers.iter_mut().map(|of| of.try_recv().expect("a period").line()).collect();
        let lines: Vec<_> = lines.into_iter().map(|line| line.expect("JSON")).collect();
        assert!(lines.iter().all(|line| Arc::ptr_eq(line, &lines[0])));
    }
}
