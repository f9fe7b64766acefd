//! A move that the VM's manager has to make, as it keeps pins of its own. However it ends, the core learns of it.

use super::inbox::{Inbox, Message};
use crate::core::event::Event;
use std::{fmt::Display, io, sync::Arc};
use vnuma_model::{CpuSet, VcpuLocation};
use vnuma_policy::world::TaskId;
use vnuma_process::ActError;

/// A move on its way to a VM's worker.
#[derive(Debug)]
pub(crate) struct PinnedMove {
    pub(crate) task: TaskId,
    pub(crate) pid: i32,
    pub(crate) tid: i32,
    pub(crate) cpus: CpuSet,
    /// `None` once it is answered.
    inbox: Option<Arc<Inbox>>,
}

impl PinnedMove {
    pub(crate) fn new(task: TaskId, (pid, tid): (i32, i32), cpus: CpuSet, inbox: Arc<Inbox>) -> Self {
        Self { task, pid, tid, cpus, inbox: Some(inbox) }
    }

    /// It was made.
    pub(crate) fn done(mut self, location: Option<VcpuLocation>) {
        self.answer(Ok(location));
    }

    /// It was not made.
    pub(crate) fn failed(mut self, why: &dyn Display) {
        self.answer(Err(self.error(why)));
    }

    /// The event that it was not made, for who takes no messages.
    pub(crate) fn give_up(mut self, why: &dyn Display) -> Event {
        self.inbox = None;
        Event::Moved(self.task, Err(self.error(why)))
    }

    fn error(&self, why: &dyn Display) -> ActError {
        let source = io::Error::other(why.to_string());
        ActError::System { pid: self.pid, tid: self.tid, act: "pinning it", source }
    }

    fn answer(&mut self, outcome: Result<Option<VcpuLocation>, ActError>) {
        let Some(inbox) = self.inbox.take() else { return };
        // Its mask is the operator's from now on.
        let made = outcome.is_ok().then_some(self.tid);
        let event = Event::Moved(self.task, outcome);
        // Fails only while vnumad stops.
        let _ = inbox.send(Message::Pinned(self.pid, made.into_iter().collect(), event));
    }
}

impl Drop for PinnedMove {
    /// Its worker has ended without having looked at it.
    fn drop(&mut self) {
        self.answer(Err(self.error(&"the connection is closed")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TASK: TaskId = TaskId { vm: 1, number: 3 };

    fn pin(inbox: &Arc<Inbox>) -> PinnedMove {
        PinnedMove::new(TASK, (2, 4), CpuSet::new(), Arc::clone(inbox))
    }

    /// The outcome of the one message; `None` if there is none.
    fn outcome(inbox: &Inbox) -> Option<String> {
        let mut messages = inbox.take_messages();
        assert!(messages.len() <= 1);
        match messages.pop()? {
            Message::Pinned(2, tids, Event::Moved(TASK, outcome)) => {
                assert_eq!(tids, if outcome.is_ok() { vec![4] } else { Vec::new() });
                Some(outcome.map_or_else(|error| error.to_string(), |_| "made".to_owned()))
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_move_is_answered_once_however_it_ends() {
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        pin(&inbox).done(None);
        assert_eq!(outcome(&inbox).as_deref(), Some("made"));
        pin(&inbox).failed(&"no");
        assert_eq!(outcome(&inbox).as_deref(), Some("thread 4 of process 2: pinning it: no"));
        drop(pin(&inbox));
        assert_eq!(
            outcome(&inbox).as_deref(),
            Some("thread 4 of process 2: pinning it: the connection is closed")
        );
        assert!(matches!(pin(&inbox).give_up(&"no"), Event::Moved(TASK, Err(_))));
        assert_eq!(outcome(&inbox), None, "who gives it up has the event");
    }
}
