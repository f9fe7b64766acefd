//! The core's queue of messages and requests.

use super::{capabilities::Capabilities, report, told::Told, totals::Totals};
use crate::{
    core::{
        Refusal, Requester,
        event::{Event, Request},
        uses::VmUse,
    },
    fair::{FairQueue, Permit, ROOT, Room},
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
use vnuma_model::Party;
use vnuma_policy::world::{ConnectionId, TaskId, VmId};
use vnuma_process::Ledger;

/// Capacity of the message queue. When it is full, a sender waits or counts its message as lost.
const CAPACITY: usize = 4096;

/// Requests that wait.
const REQUESTS: Room = Room { of_one: 1024, of_all: 8192 };

/// Requests whose clients have gone that are passed over in one turn.
const PASSED_OVER: usize = 64;

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
    /// What the next VMs after this one have of the host.
    Uses(Option<VmId>, oneshot::Sender<Vec<(VmId, VmUse)>>),
    /// The daemon itself.
    Daemon(oneshot::Sender<api::Daemon>),
    /// Sums of what has happened so far.
    Totals(oneshot::Sender<Totals>),
    /// Events of these kinds from now on; all, if none is named.
    Watch(Vec<api::EventKind>, oneshot::Sender<mpsc::Receiver<Arc<Told<api::Event>>>>),
    /// The input of the policies, each period from now on.
    Record(oneshot::Sender<mpsc::Receiver<Arc<Told<api::Observation>>>>),
    /// A request that the core carries out.
    Act(Request),
}

/// Of whom a request is, and what it holds until all that is done for it is over.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) party: Party,
    pub(crate) requester: Requester,
    pub(crate) _held: Option<Arc<Permit>>,
}

impl Ticket {
    /// vnumad's own, which several clients wait for.
    pub(crate) fn own() -> Self {
        Self { party: ROOT, requester: Requester::default(), _held: None }
    }
}

/// A request that waits for its turn.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) request: ApiRequest,
    /// Dropped when it is served.
    pub(crate) ticket: Ticket,
}

/// What one call takes from the inbox.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    pub(crate) messages: Vec<Message>,
    pub(crate) request: Option<Asked>,
}

#[derive(Debug)]
struct State {
    messages: VecDeque<Message>,
    requests: FairQueue<Asked>,
    closed: bool,
    /// The receiver sleeps and has not been woken up yet.
    asleep: bool,
    /// Senders that wait for room.
    waiting: usize,
}

impl State {
    /// The next request whose client still waits for it.
    fn request(&mut self) -> Option<Asked> {
        let mut next = std::iter::from_fn(|| self.requests.pop()).take(PASSED_OVER);
        next.find(|asked| !asked.ticket.requester.has_gone())
    }
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
        let state = State {
            messages: VecDeque::new(),
            requests: FairQueue::new(REQUESTS),
            closed: false,
            asleep: false,
            waiting: 0,
        };
        let (state, ledger) = (Mutex::new(state), Ledger::default());
        Ok(Self { state, arrived, taken, capabilities, ledger })
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

    /// Adds a request, unless its party has too many or the inbox is closed.
    pub(crate) fn request(&self, ticket: Ticket, request: ApiRequest) -> Result<(), Refusal> {
        let mut state = self.lock();
        if state.closed {
            return Err(Refusal::ShuttingDown);
        }
        let party = ticket.party;
        match state.requests.push(party, Asked { request, ticket }) {
            Ok(()) => {}
            Err(0) => return Err(Refusal::Overloaded),
            Err(has) => return Err(Refusal::Requests { who: who(party), has }),
        }
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
        let request = state.request();
        Some(Turn { messages, request })
    }

    /// What has arrived by now, without waiting and without a request.
    #[cfg(test)]
    pub(crate) fn take_messages(&self) -> Vec<Message> {
        self.batch(&mut self.lock())
    }

    /// How many requests are waited for, and of how many the clients have gone.
    #[cfg(test)]
    pub(crate) fn requests(&self) -> (usize, usize) {
        let state = self.lock();
        let gone = state.requests.iter().filter(|asked| asked.ticket.requester.has_gone()).count();
        (state.requests.iter().count() - gone, gone)
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

/// What a party is called where VMs have no name.
pub(super) fn who(party: Party) -> String {
    match party {
        Party::Vm(id) => format!("vm {id}"),
        Party::User(uid) => format!("user {uid}"),
        Party::Address(address) => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread};

    fn ask(inbox: &Inbox) -> Result<(), Refusal> {
        inbox.request(Ticket::own(), ApiRequest::Names(oneshot::channel().0))
    }

    #[test]
    fn requests_whose_clients_have_gone_are_not_served_and_give_back_what_they_hold() {
        let inbox = Inbox::new().expect("an inbox");
        let (user, permits) = (Party::User(7), crate::fair::Permits::new(Room::for_parties_of(200)));
        let here: Vec<_> = (0..200).map(|_| Arc::new(())).collect();
        for here in &here {
            let _held = Some(Arc::new(permits.take(user).expect("one more")));
            let ticket = Ticket { party: user, requester: Requester::with(here), _held };
            inbox.request(ticket, ApiRequest::Names(oneshot::channel().0)).expect("there is room");
        }
        let mut here = here.into_iter();
        let last = here.next_back();
        drop(here);
        assert_eq!(permits.take(user).err(), Some(200), "they are held until the requests are over");
        ask(&inbox).expect("root has room");
        let taken: Vec<_> =
            (0..6).filter_map(|_| inbox.take(Instant::now(), &[]).expect("open").request).collect();
        let parties: Vec<_> = taken.iter().map(|asked| asked.ticket.party).collect();
        assert_eq!(parties, [ROOT, user], "root's turn comes after those that are passed over");
        assert!(permits.take(user).is_ok());
        drop(last);
    }

    #[test]
    fn a_user_that_has_filled_its_part_is_told_so_and_no_other_is() {
        let inbox = Inbox::new().expect("an inbox");
        let ask = |uid| {
            let ticket = Ticket { party: Party::User(uid), ..Ticket::own() };
            inbox.request(ticket, ApiRequest::Names(oneshot::channel().0))
        };
        let refused = (0..).find_map(|_| ask(1).err()).expect("some time");
        let expected =
            "user 1 has 1024 requests that wait for vnumad, the most that one may have now; try again";
        assert_eq!(refused.to_string(), expected);
        (2..10).for_each(|uid| while ask(uid).is_ok() {});
        assert!((0..1024).all(|_| ask(0).is_ok()), "root's share is its own");
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn messages_can_be_taken_without_a_request() {
        let inbox = Inbox::new().expect("an inbox");
        assert_eq!(inbox.take_messages().len(), 0, "it does not wait");
        assert!(ask(&inbox).is_ok());
        (0..BATCH + 1).for_each(|_| assert!(inbox.send_lazily(Message::Event(Event::Woken))));
        assert_eq!([inbox.take_messages().len(), inbox.take_messages().len()], [BATCH, 1]);
        assert!(inbox.take(soon(), &[]).expect("open").request.is_some(), "it is still there");
    }

    #[test]
    fn messages_come_before_requests_and_requests_one_at_a_time() {
        let inbox = Inbox::new().expect("an inbox");
        for _ in 0..3 {
            assert!(ask(&inbox).is_ok());
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
            |inbox| ask(inbox).is_ok(),
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
        for _ in 0..REQUESTS.of_one {
            assert!(ask(&inbox).is_ok());
        }
        assert!(matches!(ask(&inbox), Err(Refusal::Requests { has: 1024, .. })));
        inbox.close();
        assert!(matches!(ask(&inbox), Err(Refusal::ShuttingDown)));
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
