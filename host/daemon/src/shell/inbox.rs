//! The core's queue of messages and requests.

use super::{capabilities::Capabilities, report, totals::Totals};
use crate::core::{
    Refusal,
    event::{Event, Request},
    uses::VmUse,
};
use nix::{
    poll::{PollFd, PollFlags, ppoll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        time::TimeSpec,
    },
};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::{mpsc, oneshot};
use vnuma_api as api;
use vnuma_policy::world::{ConnectionId, TaskId};
use vnuma_process::Ledger;

/// Capacity of the message queue. When it is full, a sender waits or counts its message as lost.
const CAPACITY: usize = 4096;

/// Capacity of the request queue.
const REQUESTS: usize = 1024;

/// Messages taken between two requests.
const BATCH: usize = 256;

/// A message to the shell.
#[derive(Debug)]
pub(crate) enum Message {
    /// An event for the core.
    Event(Event),
    /// A worker reports.
    Worker(ConnectionId, report::Report),
    /// The VM's manager has pinned vCPUs of a process, or could not. The record and scx_vnuma forget the threads that are listed.
    /// Carries the event for the core.
    Pinned(i32, Vec<i32>, Event),
    /// How many pins of a VM were given back, before the masks that are recorded of its process.
    Unpinned(TaskId, i32, Option<Arc<OwnedFd>>, Result<usize, String>),
}

/// A request of a client of the API.
#[derive(Debug)]
pub(crate) enum ApiRequest {
    /// Names of all VMs.
    Names(oneshot::Sender<Vec<String>>),
    /// A VM.
    Show(String, oneshot::Sender<Result<api::Vm, Refusal>>),
    /// How the vCPUs of a VM are scheduled.
    Scheduling(String, oneshot::Sender<Result<api::Scheduling, Refusal>>),
    /// What VMs have of the host.
    Uses(oneshot::Sender<Vec<VmUse>>),
    /// The daemon itself.
    Daemon(oneshot::Sender<api::Daemon>),
    /// Sums of what has happened so far.
    Totals(oneshot::Sender<Totals>),
    /// Events of these kinds from now on; all, if none is named.
    Watch(Vec<api::EventKind>, oneshot::Sender<mpsc::Receiver<api::Event>>),
    /// The input of the policies, each period from now on.
    Record(oneshot::Sender<mpsc::Receiver<api::Observation>>),
    /// A request that the core carries out.
    Act(Request),
}

/// What one call takes from the inbox.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    pub(crate) messages: Vec<Message>,
    pub(crate) request: Option<ApiRequest>,
}

#[derive(Debug, Default)]
struct State {
    messages: VecDeque<Message>,
    requests: VecDeque<ApiRequest>,
    closed: bool,
    /// The receiver sleeps and has not been woken up yet.
    asleep: bool,
    /// Senders that wait for room.
    waiting: usize,
}

/// Messages and requests, in two queues, so that requests never delay messages.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    /// Wakes up the receiver, which can wait for the kernel's events as well.
    arrived: EventFd,
    taken: Condvar,
    /// What sources say of themselves, which the core does not need.
    pub(super) capabilities: Capabilities,
    /// What is done for each party that causes work.
    pub(crate) ledger: Ledger,
}

impl Inbox {
    pub(crate) fn new() -> io::Result<Self> {
        let arrived = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (taken, capabilities) = (Condvar::new(), Capabilities::default());
        Ok(Self { state: Mutex::default(), arrived, taken, capabilities, ledger: Ledger::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes up the receiver if it sleeps, which costs a system call. The lock is released before that, as the receiver takes
    /// it first.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let asleep = std::mem::take(&mut state.asleep);
        drop(state);
        if asleep {
            self.ring();
        }
    }

    fn ring(&self) {
        // It fails only after 2^64 writes without a read.
        let _ = self.arrived.write(1);
    }

    /// Waits until something arrives, one of these descriptors is readable, or the time is over. True if a descriptor is readable.
    fn wait(&self, left: Duration, others: &[BorrowedFd<'_>]) -> bool {
        let mut fds: Vec<_> = others.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
        fds.push(PollFd::new(self.arrived.as_fd(), PollFlags::POLLIN));
        // It fails by a signal only, and then nothing is readable.
        if ppoll(&mut fds, Some(TimeSpec::from_duration(left)), None).unwrap_or(0) == 0 {
            return false;
        }
        let readable = |fd: &PollFd<'_>| fd.any().unwrap_or(true);
        if fds.last().is_some_and(readable) {
            // Nothing to read: it was a late one, for what has been taken already.
            let _ = self.arrived.read();
        }
        fds[..others.len()].iter().any(readable)
    }

    /// Adds a message, and waits for room. False once the inbox is closed.
    pub(crate) fn send(&self, message: Message) -> bool {
        let Some(state) = self.add(message) else { return false };
        self.wake(state);
        true
    }

    /// Adds an event of a thread that goes on whatever becomes of it: the inbox is closed only while vnumad stops.
    pub(crate) fn tell(&self, event: Event) {
        let _ = self.send(Message::Event(event));
    }

    /// Adds a message that may wait until the receiver wakes up for another reason.
    pub(crate) fn send_lazily(&self, message: Message) -> bool {
        let Some(state) = self.add(message) else { return false };
        if state.messages.len() >= BATCH {
            self.wake(state);
        }
        true
    }

    /// `None` once it is closed.
    fn add(&self, message: Message) -> Option<MutexGuard<'_, State>> {
        let mut state = self.lock();
        while state.messages.len() >= CAPACITY && !state.closed {
            state.waiting += 1;
            state = self.taken.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        if state.closed {
            return None;
        }
        state.messages.push_back(message);
        Some(state)
    }

    /// Adds an event if there is room for it.
    pub(crate) fn try_send(&self, event: Event) -> bool {
        let mut state = self.lock();
        if state.closed || state.messages.len() >= CAPACITY {
            return false;
        }
        state.messages.push_back(Message::Event(event));
        self.wake(state);
        true
    }

    /// Adds a request, unless there are too many or the inbox is closed.
    pub(crate) fn request(&self, request: ApiRequest) -> Result<(), Refusal> {
        let mut state = self.lock();
        if state.closed {
            return Err(Refusal::ShuttingDown);
        }
        if state.requests.len() >= REQUESTS {
            return Err(Refusal::Overloaded);
        }
        state.requests.push_back(request);
        self.wake(state);
        Ok(())
    }

    /// Waits until there is something, until one of these descriptors is readable, or until `until`. `None` once it is closed.
    pub(crate) fn take(&self, until: Instant, others: &[BorrowedFd<'_>]) -> Option<Turn> {
        let mut state = self.lock();
        while state.messages.is_empty() && state.requests.is_empty() && !state.closed {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state.asleep = true;
            drop(state);
            let readable = self.wait(left, others);
            state = self.lock();
            state.asleep = false;
            if readable {
                break;
            }
        }
        if state.closed {
            return None;
        }
        let messages = self.batch(&mut state);
        let request = state.requests.pop_front();
        Some(Turn { messages, request })
    }

    /// What has arrived by now, without waiting and without a request.
    #[cfg(test)]
    pub(crate) fn take_messages(&self) -> Vec<Message> {
        self.batch(&mut self.lock())
    }

    fn batch(&self, state: &mut State) -> Vec<Message> {
        let count = state.messages.len().min(BATCH);
        let messages = state.messages.drain(..count).collect();
        if count > 0 && state.waiting > 0 {
            self.taken.notify_all();
        }
        messages
    }

    /// Closes it. Senders that wait for room return.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        // Clients that wait for an answer get an error.
        state.requests.clear();
        self.ring();
        self.taken.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread};

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn messages_can_be_taken_without_a_request() {
        let inbox = Inbox::new().expect("an inbox");
        assert_eq!(inbox.take_messages().len(), 0, "it does not wait");
        assert!(inbox.request(ApiRequest::Names(oneshot::channel().0)).is_ok());
        (0..BATCH + 1).for_each(|_| assert!(inbox.send_lazily(Message::Event(Event::Woken))));
        assert_eq!([inbox.take_messages().len(), inbox.take_messages().len()], [BATCH, 1]);
        assert!(inbox.take(soon(), &[]).expect("open").request.is_some(), "it is still there");
    }

    #[test]
    fn messages_come_before_requests_and_requests_one_at_a_time() {
        let inbox = Inbox::new().expect("an inbox");
        for _ in 0..3 {
            assert!(inbox.request(ApiRequest::Names(oneshot::channel().0)).is_ok());
        }
        for _ in 0..BATCH + 1 {
            assert!(inbox.send(Message::Event(Event::Woken)));
        }
        let sizes: Vec<_> = (0..3)
            .map(|_| inbox.take(soon(), &[]).map(|turn| (turn.messages.len(), turn.request.is_some())))
            .collect();
        assert_eq!(sizes, [Some((BATCH, true)), Some((1, true)), Some((0, true))]);
        assert!(inbox.take(Instant::now(), &[]).is_some_and(|turn| turn.messages.is_empty()));
    }

    #[test]
    fn whatever_arrives_wakes_up_a_receiver_that_sleeps() {
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        let arrivals: [fn(&Inbox) -> bool; 3] = [
            |inbox| inbox.send(Message::Event(Event::Woken)),
            |inbox| inbox.try_send(Event::Woken),
            |inbox| inbox.request(ApiRequest::Names(oneshot::channel().0)).is_ok(),
        ];
        for (number, arrive) in arrivals.into_iter().enumerate() {
            let (theirs, (done, taken)) = (Arc::clone(&inbox), std::sync::mpsc::channel());
            thread::spawn(move || {
                let turn = theirs.take(Instant::now() + Duration::from_secs(3600), &[]);
                done.send(turn.map(|turn| turn.messages.len() + usize::from(turn.request.is_some())))
            });
            while !inbox.lock().asleep {
                thread::yield_now();
            }
            assert!(arrive(&inbox));
            let count = taken.recv_timeout(Duration::from_secs(60));
            assert_eq!(count.expect("it woke up"), Some(1), "arrival {number}");
        }
    }

    #[test]
    fn events_of_the_kernel_wake_up_a_receiver_that_has_no_messages() {
        let inbox = Inbox::new().expect("an inbox");
        let events = EventFd::new().expect("an eventfd");
        let taken = |until, events: &EventFd| {
            let began = Instant::now();
            let turn = inbox.take(until, &[events.as_fd()]).expect("open");
            (turn.messages.len(), began.elapsed() < Duration::from_secs(30))
        };
        assert_eq!(taken(Instant::now() + Duration::from_millis(5), &events), (0, true), "there are none");
        events.write(1).expect("written");
        assert_eq!(taken(soon(), &events), (0, true));
        // Messages are taken at once, whether or not there are events.
        assert!(inbox.send(Message::Event(Event::Woken)));
        assert_eq!(taken(soon(), &events), (1, true));
    }

    #[test]
    fn what_may_wait_wakes_up_nobody_until_much_has_gathered() {
        for lazy in [1, BATCH] {
            let inbox = Arc::new(Inbox::new().expect("an inbox"));
            let (theirs, (done, taken)) = (Arc::clone(&inbox), std::sync::mpsc::channel());
            thread::spawn(move || {
                let turn = theirs.take(Instant::now() + Duration::from_secs(3600), &[]);
                done.send(turn.map(|turn| turn.messages.len()))
            });
            while !inbox.lock().asleep {
                thread::yield_now();
            }
            for number in 1..=lazy {
                assert!(inbox.send_lazily(Message::Event(Event::Woken)));
                assert_eq!(inbox.lock().asleep, number < BATCH, "after {number}");
            }
            if lazy < BATCH {
                assert!(inbox.send(Message::Event(Event::Woken)));
            }
            let count = taken.recv_timeout(Duration::from_secs(60)).expect("it woke up");
            assert_eq!(count, Some(if lazy < BATCH { lazy + 1 } else { BATCH }));
        }
    }

    #[test]
    fn one_request_too_many_and_one_too_late_are_distinct() {
        let inbox = Inbox::new().expect("an inbox");
        let ask = || inbox.request(ApiRequest::Names(oneshot::channel().0));
        for _ in 0..REQUESTS {
            assert!(ask().is_ok());
        }
        assert!(matches!(ask(), Err(Refusal::Overloaded)));
        inbox.close();
        assert!(matches!(ask(), Err(Refusal::ShuttingDown)));
    }

    #[test]
    fn send_waits_for_room_and_try_send_does_not() {
        let inbox = Arc::new(Inbox::new().expect("an inbox"));
        for _ in 0..CAPACITY {
            assert!(inbox.try_send(Event::Woken));
        }
        assert!(!inbox.try_send(Event::Woken));
        let theirs = Arc::clone(&inbox);
        let waiting = thread::spawn(move || theirs.send(Message::Event(Event::Resync)));
        assert!(inbox.take(soon(), &[]).is_some());
        assert!(waiting.join().expect("no panic"), "there is room now");
        while inbox.try_send(Event::Woken) {}
        let theirs = Arc::clone(&inbox);
        let waiting = thread::spawn(move || theirs.send(Message::Event(Event::Resync)));
        inbox.close();
        assert!(!waiting.join().expect("no panic"), "nobody takes it any more");
        assert!(inbox.take(soon(), &[]).is_none());
    }
}
