//! How many calls for domains are under way at a time, and over which connection.
//!
//! libvirtd serves five requests of a client at a time (`max_client_requests`) and reads nothing more of it meanwhile, keepalive messages
//! included: five calls that hang, as their QEMUs do, would hold up all other domains, and end the connection. And where several
//! threads have calls under way over a connection, one of them reads and writes for all, which libvirt's library does not always do
//! (9.0: a call was not sent for seconds while another one hung). So each call has a connection to itself:
//!
//! ```text
//!  list, events ────────▶ the connection that has the events
//!  call for a domain ───▶ a connection that is idle, or another one: opened when none has been idle for a while, up to 12
//! ```
//!
//! libvirtd has a limit for all clients as well (20, `max_workers`), so that not everything may hang: calls that QEMU has to answer have
//! some of the slots only, and of these fewer those of domains whose last call was not answered in time. The rest is for calls that
//! libvirt answers by itself.
//!
//! Calls of a kind get their slots in the order in which they came. The first of each kind is woken when a slot may be free, and no
//! other: a thousand domains that start at a time have a thousand calls that wait.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Calls at a time, calls that QEMU has to answer, and of these calls for domains whose last call was late.
pub(crate) const CONNECTIONS: usize = 12;
pub(crate) const WAITING: usize = 8;
pub(crate) const LATE: usize = 4;

/// Calls that may take hours, such as migrations, at a time: with those that QEMU has to answer fewer than `max_workers`.
const LONG: usize = 8;

/// How long it is waited for a slot before another connection is opened.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long [`Slots::is_busy`] reports a call that has got no slot.
const MEMORY: Duration = Duration::from_secs(60);

/// What a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind {
    /// QEMU has to answer.
    pub(crate) waits: bool,
    /// The last call for this domain was not answered in time.
    pub(crate) late: bool,
}

/// Calls that may take hours. Each has a thread and a connection of its own; those beyond [`LONG`] wait.
#[derive(Debug, Default)]
pub(crate) struct LongCalls {
    under_way: Mutex<usize>,
    ended: Condvar,
}

/// One that is under way until this is dropped.
#[derive(Debug)]
pub(crate) struct LongCall<'a>(&'a LongCalls);

impl LongCalls {
    /// Begins one when it may.
    pub(crate) fn begin(&self) -> LongCall<'_> {
        let under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        let may = self.ended.wait_while(under_way, |under_way| *under_way >= LONG);
        *may.unwrap_or_else(PoisonError::into_inner) += 1;
        LongCall(self)
    }
}

impl Drop for LongCall<'_> {
    fn drop(&mut self) {
        *self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_one();
    }
}

/// Slots over connections of a kind.
#[derive(Debug)]
pub(crate) struct Slots<C> {
    inner: Mutex<Inner<C>>,
}

#[derive(Debug)]
struct Inner<C> {
    /// Whether each has a call. The first one stays.
    open: Vec<(Arc<C>, bool)>,
    waiting: usize,
    late: usize,
    /// A connection is being opened.
    opening: bool,
    /// When a call has got none, the last time.
    refused: Option<Instant>,
    /// Calls that wait, by which each is woken.
    queues: BTreeMap<Kind, VecDeque<Arc<Condvar>>>,
}

type Guard<'a, C> = MutexGuard<'a, Inner<C>>;

/// A connection, and whether it stays when its call is over.
type Taken<C> = (Arc<C>, bool);

/// Why a call has no slot.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoSlot<E> {
    /// Others are under way.
    Busy,
    /// There is no connection.
    Lost(E),
}

/// A call that is under way, as long as this lives.
#[derive(Debug)]
pub(crate) struct Slot<C> {
    slots: Arc<Slots<C>>,
    connection: Arc<C>,
    kind: Kind,
    /// The connection stays when this call is over.
    stays: bool,
}

impl<C> Slot<C> {
    pub(crate) fn connection(&self) -> &Arc<C> {
        &self.connection
    }

    /// Is it worth while to keep something that belongs to the connection?
    pub(crate) fn stays(&self) -> bool {
        self.stays
    }
}

impl<C> Default for Slots<C> {
    fn default() -> Self {
        let (open, queues) = (Vec::new(), BTreeMap::new());
        let inner = Inner { open, waiting: 0, late: 0, opening: false, refused: None, queues };
        Self { inner: Mutex::new(inner) }
    }
}

impl<C> Inner<C> {
    /// Is there room for a call of this kind, whatever its connection?
    fn admits(&self, kind: Kind) -> bool {
        (!kind.waits || self.waiting < WAITING) && (!kind.late || self.late < LATE)
    }

    /// Takes the first connection that has no call.
    fn take(&mut self, kind: Kind) -> Option<Taken<C>> {
        if !self.admits(kind) {
            return None;
        }
        let at = self.open.iter().position(|(_, busy)| !busy)?;
        let (connection, busy) = &mut self.open[at];
        *busy = true;
        self.waiting += usize::from(kind.waits);
        self.late += usize::from(kind.late);
        Some((Arc::clone(connection), at == 0))
    }

    fn is_first(&self, kind: Kind, turn: &Arc<Condvar>) -> bool {
        self.queues.get(&kind).and_then(VecDeque::front).is_some_and(|first| Arc::ptr_eq(first, turn))
    }

    /// Something may be free.
    fn wake(&self) {
        self.queues.values().filter_map(VecDeque::front).for_each(|first| first.notify_one());
    }

    /// Nobody waits by this any more.
    fn leave(&mut self, kind: Kind, turn: &Arc<Condvar>) {
        if let Some(queue) = self.queues.get_mut(&kind) {
            queue.retain(|other| !Arc::ptr_eq(other, turn));
        }
        self.wake();
    }
}

impl<C> Slots<C> {
    fn lock(&self) -> Guard<'_, C> {
        // Nothing that is done under the lock panics half-way.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot for a call, which is waited for. `alive`: is a connection usable? `open` makes another one.
    pub(crate) fn take<E>(
        self: &Arc<Self>,
        kind: Kind,
        until: Instant,
        alive: impl Fn(&C) -> bool,
        open: impl Fn() -> Result<C, E>,
    ) -> Result<Slot<C>, NoSlot<E>> {
        let mut inner = self.lock();
        let broken: Vec<_> = inner.open.extract_if(.., |(connection, _)| !alive(connection)).collect();
        // They are closed without the lock.
        drop(inner);
        drop(broken);
        inner = self.lock();
        let turn = Arc::<Condvar>::default();
        inner.queues.entry(kind).or_default().push_back(Arc::clone(&turn));
        let (mut inner, taken) = self.await_turn(inner, kind, &turn, until, open);
        inner.leave(kind, &turn);
        taken.map(|(connection, stays)| Slot { slots: Arc::clone(self), connection, kind, stays })
    }

    /// Waits for a connection.
    fn await_turn<'a, E>(
        &'a self,
        mut inner: Guard<'a, C>,
        kind: Kind,
        turn: &Arc<Condvar>,
        until: Instant,
        open: impl Fn() -> Result<C, E>,
    ) -> (Guard<'a, C>, Result<Taken<C>, NoSlot<E>>) {
        let mut patience = None;
        loop {
            let first = inner.is_first(kind, turn);
            if let Some(taken) = first.then(|| inner.take(kind)).flatten() {
                return (inner, Ok(taken));
            }
            let now = Instant::now();
            if now >= until {
                inner.refused = Some(now);
                return (inner, Err(NoSlot::Busy));
            }
            // From when it could have had one.
            let due = *patience.get_or_insert(now + PATIENCE);
            let may_open = first && inner.admits(kind) && !inner.opening && inner.open.len() < CONNECTIONS;
            if may_open && (now >= due || inner.open.is_empty()) {
                inner.opening = true;
                // It may take long. Others of its kind go before it meanwhile.
                inner.leave(kind, turn);
                drop(inner);
                let opened = open();
                inner = self.lock();
                inner.opening = false;
                inner.queues.entry(kind).or_default().push_front(Arc::clone(turn));
                match opened {
                    Ok(opened) => inner.open.push((Arc::new(opened), false)),
                    Err(error) => return (inner, Err(NoSlot::Lost(error))),
                }
                continue;
            }
            // Others may have opened one, and it was taken. One that is not first waits for its turn only.
            patience = Some(if now >= due { now + PATIENCE } else { due }).filter(|_| first);
            let wait = patience.map_or(until, |due| until.min(due)).saturating_duration_since(now);
            inner = turn.wait_timeout(inner, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Has a call got no slot, a short while ago?
    pub(crate) fn is_busy(&self) -> bool {
        self.lock().refused.is_some_and(|refused| refused.elapsed() < MEMORY)
    }
}

impl<C> Drop for Slot<C> {
    fn drop(&mut self) {
        let mut inner = self.slots.lock();
        inner.waiting -= usize::from(self.kind.waits);
        inner.late -= usize::from(self.kind.late);
        // One that was broken is not there any more.
        let used = inner.open.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &self.connection));
        used.into_iter().for_each(|(_, busy)| *busy = false);
        let idle = inner.open.iter().filter(|(_, busy)| !busy).count();
        let needed = inner.queues.values().any(|queue| !queue.is_empty());
        let last = inner.open.iter().rposition(|(_, busy)| !busy).filter(|at| idle > 1 && *at > 0 && !needed);
        let idle = last.map(|at| inner.open.remove(at));
        inner.wake();
        drop(inner);
        // It is closed without the lock.
        drop(idle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    };

    const HANG: Duration = Duration::from_secs(60);
    const ANSWERED: Kind = Kind { waits: false, late: false };
    const WAITS: Kind = Kind { waits: true, late: false };
    const HUNG: Kind = Kind { waits: true, late: true };

    #[derive(Default)]
    struct Host {
        slots: Arc<Slots<usize>>,
        opened: AtomicUsize,
        /// Connections up to this one are broken.
        broken: AtomicUsize,
    }

    impl Host {
        fn take(&self, kind: Kind, limit: Duration) -> Result<Slot<usize>, NoSlot<&'static str>> {
            let open = || Ok(self.opened.fetch_add(1, Ordering::AcqRel) + 1);
            let alive = |number: &usize| *number > self.broken.load(Ordering::Acquire);
            self.slots.take(kind, Instant::now() + limit, alive, open)
        }

        fn taken(&self, kind: Kind, count: usize) -> Vec<Slot<usize>> {
            (0..count).map(|_| self.take(kind, HANG).expect("a slot")).collect()
        }

        fn open(&self) -> Vec<(usize, bool)> {
            self.slots.lock().open.iter().map(|(number, busy)| (**number, *busy)).collect()
        }
    }

    #[test]
    fn so_many_long_calls_are_under_way_and_the_next_one_begins_when_one_ends() {
        let calls = LongCalls::default();
        let mut all: Vec<_> = (0..LONG).map(|_| calls.begin()).collect();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| drop(calls.begin()));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!next.is_finished(), "it has to wait");
            all.pop();
            next.join().expect("it has begun");
        });
    }

    #[test]
    fn calls_that_hang_leave_room_for_others_on_other_connections() {
        let host = Host::default();
        let hung = host.taken(WAITS, 5);
        let over: Vec<usize> = hung.iter().map(|slot| **slot.connection()).collect();
        assert_eq!(over, [1, 2, 3, 4, 5], "each to itself");
        assert_eq!(hung.iter().filter(|slot| slot.stays()).count(), 1);
        for _ in 0..2 {
            let healthy = host.take(WAITS, HANG).expect("a slot");
            assert_eq!(**healthy.connection(), 6, "it is used again");
        }
        assert!(!host.slots.is_busy());
        drop(hung);
        assert_eq!(host.open(), [(1, false)], "one is enough");
        assert!(host.take(ANSWERED, HANG).is_ok_and(|slot| slot.stays()));
    }

    #[test]
    fn not_all_slots_are_for_what_may_hang() {
        let host = Host::default();
        let late = host.taken(HUNG, LATE);
        assert_eq!(host.take(HUNG, PATIENCE).map(drop), Err(NoSlot::Busy), "those of silent domains");
        assert!(host.slots.is_busy());
        let waiting = host.taken(WAITS, WAITING - LATE);
        assert_eq!(host.take(WAITS, 2 * PATIENCE).map(drop), Err(NoSlot::Busy), "those of QEMUs");
        let answered = host.taken(ANSWERED, CONNECTIONS - WAITING);
        assert_eq!(host.take(ANSWERED, 2 * PATIENCE).map(drop), Err(NoSlot::Busy), "all");
        assert_eq!(host.opened.load(Ordering::Acquire), CONNECTIONS);
        drop((late, waiting, answered));
        let inner = host.slots.lock();
        assert_eq!((inner.waiting, inner.late, inner.open.len()), (0, 0, 1));
    }

    #[test]
    fn who_waits_gets_what_another_gives_back() {
        let host = Host::default();
        let mut hung = host.taken(HUNG, LATE);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| host.take(HUNG, HANG).map(drop));
            std::thread::sleep(2 * PATIENCE);
            hung.pop();
            assert_eq!(waits.join().expect("no panic"), Ok(()));
        });
    }

    #[test]
    fn a_connection_that_does_not_open_keeps_no_other_call_waiting() {
        let (host, (opening, opens), (release, released)) =
            (Host::default(), mpsc::channel(), mpsc::channel());
        let mut all = host.taken(WAITS, 1);
        let released = Mutex::new(released);
        let hangs = || {
            opening.send(()).expect("the test waits");
            let _: Result<(), _> = released.lock().expect("no panic").recv();
            Err::<usize, _>("closed")
        };
        std::thread::scope(|scope| {
            let first =
                scope.spawn(|| host.slots.take(WAITS, Instant::now() + HANG, |_| true, hangs).map(drop));
            opens.recv_timeout(HANG).expect("it opens one");
            let next = scope.spawn(|| host.take(WAITS, HANG).map(drop));
            while host.slots.lock().queues.get(&WAITS).is_none_or(VecDeque::is_empty) {
                std::thread::yield_now();
            }
            all.pop();
            assert_eq!(next.join().expect("no panic"), Ok(()));
            drop(release);
            assert_eq!(first.join().expect("no panic"), Err(NoSlot::Lost("closed")));
        });
    }

    #[test]
    fn calls_of_a_kind_get_slots_in_their_order() {
        const CALLS: usize = 40;
        let (host, order) = (Host::default(), Mutex::new(Vec::new()));
        let mut all = host.taken(WAITS, WAITING);
        std::thread::scope(|scope| {
            for call in 0..CALLS {
                let (host, order) = (&host, &order);
                scope.spawn(move || {
                    let slot = host.take(WAITS, HANG).expect("a slot");
                    order.lock().expect("no panic").push(call);
                    drop(slot);
                });
                let waiting = || host.slots.lock().queues.get(&WAITS).map_or(0, VecDeque::len);
                while waiting() <= call {
                    std::thread::yield_now();
                }
            }
            all.pop();
        });
        assert_eq!(order.into_inner().expect("no panic"), (0..CALLS).collect::<Vec<_>>());
        assert!(host.take(ANSWERED, HANG).is_ok(), "nobody is left in a queue");
    }

    #[test]
    fn a_connection_that_breaks_is_used_no_more() {
        let host = Host::default();
        let before = host.taken(WAITS, 2);
        host.broken.store(2, Ordering::Release);
        let slot = host.take(WAITS, HANG).expect("a slot");
        assert_eq!((**slot.connection(), host.open()), (3, vec![(3, true)]));
        drop((before, slot));
        assert_eq!((host.open(), host.slots.lock().waiting), (vec![(3, false)], 0));
        host.broken.store(3, Ordering::Release);
        let closed = Err::<usize, _>("closed");
        let lost = host.slots.take(WAITS, Instant::now() + HANG, |_| false, || closed);
        assert_eq!(lost.map(drop), Err(NoSlot::Lost("closed")));
        assert!(host.take(WAITS, HANG).is_ok(), "it is tried again");
    }
}
