//! Connections to libvirt: opened when they are needed, given up when they break, opened again later.
//!
//! ```text
//!            list, and the pause is over
//!  Closed ────────────────────────────────▶ Open ──▶ domains, events
//!    ▲   ◀── refused: a longer pause ──┘      │
//!    └──────── closed by the other end ───────┘ every subscriber gets `Disconnected`
//! ```
//!
//! A connection has a thread for its own calls, and each domain that is in use has one, so that a call that hangs holds up nothing
//! else. As libvirtd serves a few requests of a client at a time, calls for domains go over further connections ([`slots`](crate::slots)).
//! The library closes a connection whose daemon does not answer its keepalive messages; calls that hang fail then.

use crate::{
    Library, LibvirtError,
    api::{self, CloseCallback, EventCallback, VirConnect, VirDomain},
    events::{DomainEvent, Queue},
    lane::{Lane, NoResult},
    library::text,
    slots::{Kind, LongCalls, NoSlot, Slot, Slots},
};
use nix::sys::eventfd::EventFd;
use std::{
    collections::BTreeMap,
    ffi::{CString, c_char, c_int, c_void},
    fmt, ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use vnuma_model::Backoff;

/// Pause before a connection is opened again: at first, and at most.
const PAUSES: Backoff = Backoff::of(Duration::from_secs(1), Duration::from_secs(30));

/// Time between keepalive messages, seconds, and how many may stay without an answer.
const KEEPALIVE: (c_int, u32) = (10, 1);

/// What fails where there can be no more threads.
pub(crate) const THREAD: &str = "starting a thread";

/// Most domains of a connection.
const MAX_DOMAINS: usize = 4096;

/// A domain that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name, as its operator has chosen it.
    pub name: String,
    /// Its UUID, as text.
    pub uuid: String,
    /// Its number, which another run of it does not have while the daemon lives.
    pub id: u32,
}

/// A connection to the libvirt of a URI.
#[derive(Clone, Debug)]
pub struct Connection {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) library: Library,
    pub(crate) uri: String,
    lane: Lane,
    /// Calls for domains.
    slots: Arc<Slots<Opened>>,
    /// Migrations.
    pub(crate) long: LongCalls,
    state: Mutex<State>,
    /// Another list would have something else in it.
    changes: Arc<EventFd>,
    /// The same, since it was asked for.
    changed: AtomicBool,
    subscribers: Mutex<BTreeMap<String, Vec<Weak<Queue>>>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("uri", &self.uri).finish_non_exhaustive()
    }
}

enum State {
    /// Not before `from` it is tried again.
    Closed {
        from: Instant,
        pauses: Backoff,
        problem: String,
    },
    Open(Arc<Opened>),
}

impl Connection {
    /// A connection that is opened when domains are listed. It signals `changes` when another list may have something else in it.
    pub fn new(library: Library, uri: &str, changes: Arc<EventFd>) -> Result<Self, LibvirtError> {
        let lane = Lane::start(&library.workers.host, "libvirt", Arc::clone(&changes));
        let lane = lane.map_err(LibvirtError::system(uri, THREAD))?;
        let problem = "not tried yet".to_owned();
        let state = State::Closed { from: Instant::now(), pauses: PAUSES, problem };
        let (state, subscribers, slots) = (Mutex::new(state), Mutex::default(), Arc::default());
        let (uri, changed) = (uri.to_owned(), AtomicBool::new(true));
        let long = LongCalls::default();
        let shared = Shared { library, uri, lane, slots, long, state, changes, changed, subscribers };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// What to tell an operator if calls had to wait for others for too long, a short while ago.
    pub fn congestion(&self) -> Option<String> {
        let told = "calls for domains wait for others that libvirt has not answered, as their QEMUs hang: it serves \
                    `max_workers` calls of all clients at a time, and `max_client_requests` of one";
        self.shared.slots.is_busy().then(|| told.to_owned())
    }

    /// Its URI.
    pub fn uri(&self) -> &str {
        &self.shared.uri
    }

    /// Domains that run. Opens the connection if it is closed and the pause is over. A list that takes longer than `limit` is
    /// given up, and `changes` is signalled when the next one would be answered.
    pub fn list(&self, limit: Duration) -> Result<Vec<Listed>, LibvirtError> {
        let shared = Arc::clone(&self.shared);
        let listed = self.shared.lane.run(limit, move || shared.open().and_then(|opened| opened.list()));
        listed.unwrap_or_else(|why| Err(self.shared.no_result(why, "virConnectListAllDomains", limit)))
    }

    /// May a list have something else in it than one that was begun when this was asked before? Where the connection is closed, or
    /// its driver tells nothing of domains that come and go, it always may. Nothing is asked of libvirt.
    pub fn may_have_changed(&self) -> bool {
        let changed = self.shared.changed.swap(false, Ordering::AcqRel);
        let told = |opened: &Opened| opened.tells && opened.alive.load(Ordering::Acquire);
        changed || !self.shared.opened().is_ok_and(|opened| told(&opened))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn no_result(&self, why: NoResult, call: &'static str, limit: Duration) -> LibvirtError {
        if why == NoResult::Ended {
            return self.not_connected("the thread of its calls has panicked");
        }
        LibvirtError::Timeout { uri: self.uri.clone(), call, limit_ms: limit.as_millis() as u64 }
    }

    fn not_connected(&self, reason: &str) -> LibvirtError {
        LibvirtError::NotConnected { uri: self.uri.clone(), reason: reason.to_owned() }
    }

    /// The connection, if it is open.
    pub(crate) fn opened(&self) -> Result<Arc<Opened>, LibvirtError> {
        match &*self.lock() {
            State::Open(opened) => Ok(Arc::clone(opened)),
            State::Closed { problem, .. } => Err(self.not_connected(problem)),
        }
    }

    /// Opens the connection, unless it is open, or it is too early to try again. Only the connection's own lane calls this.
    fn open(self: &Arc<Self>) -> Result<Arc<Opened>, LibvirtError> {
        let (pauses, broken) = match &*self.lock() {
            State::Open(opened) if opened.is_alive() => return Ok(Arc::clone(opened)),
            State::Open(_) => (PAUSES, true),
            State::Closed { from, problem, .. } if *from > Instant::now() => {
                return Err(self.not_connected(problem));
            }
            State::Closed { pauses, .. } => (*pauses, false),
        };
        if broken {
            self.hang_up();
        }
        match Opened::new(self) {
            Ok(opened) => {
                let opened = Arc::new(opened);
                *self.lock() = State::Open(Arc::clone(&opened));
                Ok(opened)
            }
            Err(error) => {
                let problem = match &error {
                    LibvirtError::NotConnected { reason, .. } => reason.clone(),
                    other => other.to_string(),
                };
                self.set_closed(problem, pauses);
                Err(error)
            }
        }
    }

    /// A slot for a call, which has a connection to itself.
    pub(crate) fn slot(
        &self,
        call: &'static str,
        kind: Kind,
        limit: Duration,
    ) -> Result<Slot<Opened>, LibvirtError> {
        // As long again is left for the call itself.
        let until = Instant::now() + limit / 2;
        let slot = self.slots.take(kind, until, Opened::is_alive, || Opened::another(self));
        slot.map_err(|why| match why {
            NoSlot::Lost(error) => error,
            NoSlot::Busy => {
                let limit_ms = (limit / 2).as_millis() as u64;
                LibvirtError::Busy { uri: self.uri.clone(), call, limit_ms }
            }
        })
    }

    fn set_closed(&self, problem: String, mut pauses: Backoff) {
        *self.lock() = State::Closed { from: Instant::now() + pauses.duration(), pauses, problem };
    }

    /// The other end has closed the connection that is marked by `alive`. A later one is not meant.
    fn closed(&self, alive: &Arc<AtomicBool>, reason: &str) {
        let is_it = matches!(&*self.lock(), State::Open(opened) if Arc::ptr_eq(&opened.alive, alive));
        if is_it {
            self.set_closed(reason.to_owned(), PAUSES);
            self.hang_up();
        }
    }

    /// Tells every subscriber that the connection is gone.
    fn hang_up(&self) {
        self.queues(None).iter().for_each(|queue| queue.push(DomainEvent::Disconnected));
        self.list_again();
    }

    /// Another list may have something else in it.
    fn list_again(&self) {
        self.changed.store(true, Ordering::Release);
        // A counter that is full is as readable as any other.
        let _ = self.changes.write(1);
    }

    pub(crate) fn subscribe(&self, uuid: &str, queue: &Arc<Queue>) {
        let mut subscribers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        subscribers.retain(|_, queues| {
            queues.retain(|queue| queue.strong_count() > 0);
            !queues.is_empty()
        });
        subscribers.entry(uuid.to_owned()).or_default().push(Arc::downgrade(queue));
    }

    /// Who has subscribed to a domain, or to any.
    fn queues(&self, uuid: Option<&str>) -> Vec<Arc<Queue>> {
        let subscribers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = subscribers.iter().filter(|(subscribed, _)| uuid.is_none_or(|uuid| uuid == *subscribed));
        wanted.flat_map(|(_, queues)| queues).filter_map(Weak::upgrade).collect()
    }

    /// An event of a domain has arrived. Called by the thread of the events, so it waits for nothing.
    fn arrived(&self, uuid: &str, event: &DomainEvent) {
        self.queues(Some(uuid)).iter().for_each(|queue| queue.push(event.clone()));
    }
}

/// A connection that is open. Dropping it closes it, in a thread of its own as that may hang.
pub(crate) struct Opened {
    pub(crate) library: Library,
    pub(crate) uri: String,
    pub(crate) raw: Raw<VirConnect>,
    events: Vec<c_int>,
    /// Its close callback is registered.
    watched: bool,
    /// Its driver reports domains that start and end.
    tells: bool,
    alive: Arc<AtomicBool>,
}

/// A pointer of the library, which may be used by all threads.
pub(crate) struct Raw<T>(pub(crate) *mut T);

// SAFETY: libvirt's connections and domains are counted and locked by the library itself; its documentation allows calls of several
// threads on one.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Raw<T> {}

/// What callbacks are given.
struct Listener {
    library: Library,
    shared: Weak<Shared>,
    alive: Arc<AtomicBool>,
}

impl Opened {
    /// With the events of domains.
    fn new(shared: &Arc<Shared>) -> Result<Self, LibvirtError> {
        let mut opened = Self::another(shared)?;
        opened.listen(shared);
        Ok(opened)
    }

    /// For calls alone.
    pub(crate) fn another(shared: &Shared) -> Result<Self, LibvirtError> {
        let library = shared.library;
        let uri =
            CString::new(shared.uri.as_str()).map_err(|_| shared.not_connected("a zero byte in the URI"))?;
        // SAFETY: the URI ends with a zero and outlives the call.
        let raw = unsafe { (library.api.open)(uri.as_ptr()) };
        if raw.is_null() {
            return Err(shared.not_connected(&library.last_error().1));
        }
        let (uri, alive) = (shared.uri.clone(), Arc::new(AtomicBool::new(true)));
        // SAFETY: the connection is open. Drivers in this process know no keepalive, which is no error here.
        unsafe {
            let _ = (library.api.set_keep_alive)(raw, KEEPALIVE.0, KEEPALIVE.1);
            (library.api.reset_last_error)();
        }
        let (raw, events) = (Raw(raw), Vec::new());
        Ok(Self { library, uri, raw, events, watched: false, tells: false, alive })
    }

    /// Registers for its end and for events of domains. What a driver does not have is left out.
    fn listen(&mut self, shared: &Arc<Shared>) {
        let (library, raw) = (self.library, self.raw.0);
        let listener = || {
            let (shared, alive) = (Arc::downgrade(shared), Arc::clone(&self.alive));
            Box::into_raw(Box::new(Listener { library, shared, alive })).cast::<c_void>()
        };
        // SAFETY: the connection is open. Each callback has a listener of its own, which the library frees by the function that it
        // is given; if it was not registered, it is freed here.
        unsafe {
            let opaque = listener();
            self.watched = (library.api.register_close)(raw, on_close, opaque, Some(free_listener)) >= 0;
            if !self.watched {
                free_listener(opaque);
            }
            for (event, callback) in callbacks() {
                let opaque = listener();
                let id = (library.api.register_event)(
                    raw,
                    ptr::null_mut(),
                    event,
                    callback,
                    opaque,
                    Some(free_listener),
                );
                if id >= 0 {
                    self.events.push(id);
                    self.tells |= event == api::event::LIFECYCLE;
                } else {
                    free_listener(opaque);
                    let error = library.last_error().1;
                    tracing::debug!(uri = self.uri, event, error, "no such events");
                }
            }
            (library.api.reset_last_error)();
        }
    }

    /// Is it known to be broken? Nothing is asked.
    fn is_alive(&self) -> bool {
        // SAFETY: the connection is open. For one to a daemon the library looks at its own state only.
        self.alive.load(Ordering::Acquire) && unsafe { (self.library.api.is_alive)(self.raw.0) } == 1
    }

    /// The error of the last call of this thread.
    pub(crate) fn error(&self, call: &'static str, uuid: &str) -> LibvirtError {
        let (code, reason) = self.library.last_error();
        let uri = self.uri.clone();
        if !self.is_alive() {
            return LibvirtError::NotConnected { uri, reason };
        }
        if code == api::ERROR_NO_DOMAIN {
            return LibvirtError::NoDomain { uri, domain: uuid.to_owned(), reason };
        }
        LibvirtError::Refused { uri, call, reason, code }
    }

    fn list(&self) -> Result<Vec<Listed>, LibvirtError> {
        let api = self.library.api;
        let mut domains: *mut *mut VirDomain = ptr::null_mut();
        // SAFETY: the connection is open, and the library writes an array of its own making to `domains`.
        let count = unsafe { (api.list_domains)(self.raw.0, &raw mut domains, api::LIST_ACTIVE) };
        let Ok(count) = usize::try_from(count) else {
            return Err(self.error("virConnectListAllDomains", ""));
        };
        let mut listed = Vec::with_capacity(count.min(MAX_DOMAINS));
        for at in 0..count {
            // SAFETY: the array has `count` domains, each of which is freed once.
            unsafe {
                let domain = *domains.add(at);
                if listed.len() < MAX_DOMAINS {
                    let (name, uuid) = (text((api.domain_name)(domain)), uuid_of(self.library, domain));
                    listed.push(Listed { name, uuid, id: (api.domain_id)(domain) });
                }
                (api.free_domain)(domain);
            }
        }
        // SAFETY: the array was allocated by malloc for the caller to free.
        unsafe { libc::free(domains.cast()) };
        Ok(listed)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let (library, raw) = (self.library, Raw(self.raw.0));
        let (events, watched) = (std::mem::take(&mut self.events), self.watched);
        let close = move || {
            let raw = raw;
            // SAFETY: no other thread has this connection any more. What was registered is given back first, as it keeps the connection.
            unsafe {
                for id in events {
                    (library.api.deregister_event)(raw.0, id);
                }
                if watched {
                    (library.api.unregister_close)(raw.0, on_close as CloseCallback);
                }
                (library.api.close)(raw.0);
            }
        };
        if let Err(error) = library.workers.vms.start_alone("libvirt-close", move |_| close()) {
            tracing::warn!(%error, "a connection to libvirt stays open");
        }
    }
}

/// Events that matter, with their callbacks.
fn callbacks() -> [(c_int, EventCallback); 6] {
    use api::event::*;
    type Lifecycle =
        unsafe extern "C" fn(*mut VirConnect, *mut VirDomain, c_int, c_int, *mut c_void) -> c_int;
    type Device = unsafe extern "C" fn(*mut VirConnect, *mut VirDomain, *const c_char, *mut c_void);
    type Tunable = unsafe extern "C" fn(*mut VirConnect, *mut VirDomain, *mut c_void, c_int, *mut c_void);
    // SAFETY: the library calls each by the type of its event, and takes it by this one.
    unsafe {
        [
            (LIFECYCLE, std::mem::transmute::<Lifecycle, EventCallback>(on_lifecycle)),
            (REBOOT, on_reboot as EventCallback),
            (TUNABLE, std::mem::transmute::<Tunable, EventCallback>(on_tunable)),
            (DEVICE_ADDED, std::mem::transmute::<Device, EventCallback>(on_device::<DEVICE_ADDED>)),
            (DEVICE_REMOVED, std::mem::transmute::<Device, EventCallback>(on_device::<DEVICE_REMOVED>)),
            (REMOVAL_FAILED, std::mem::transmute::<Device, EventCallback>(on_device::<REMOVAL_FAILED>)),
        ]
    }
}

/// Frees a listener; its type is `virFreeCallback`.
unsafe extern "C" fn free_listener(opaque: *mut c_void) {
    // SAFETY: it was made by `Box::into_raw`, and is freed once.
    drop(unsafe { Box::from_raw(opaque.cast::<Listener>()) });
}

/// Passes an event on.
///
/// # Safety
/// `opaque` is a listener, and `domain` the library's.
unsafe fn pass(domain: *mut VirDomain, opaque: *mut c_void, event: Option<DomainEvent>) {
    // SAFETY: the caller's promise; the library keeps both until the callback returns.
    let listener = unsafe { &*opaque.cast::<Listener>() };
    let (Some(shared), Some(event)) = (listener.shared.upgrade(), event) else { return };
    shared.arrived(&uuid_of(listener.library, domain), &event);
}

/// Why a connection was closed (`virConnectCloseReason`).
fn close_reason(reason: c_int) -> &'static str {
    match reason {
        0 => "an error",
        1 => "libvirt has ended",
        2 => "libvirt does not answer its keepalive messages",
        _ => "closed",
    }
}

unsafe extern "C" fn on_close(_: *mut VirConnect, reason: c_int, opaque: *mut c_void) {
    // SAFETY: the library gives back what was registered.
    let listener = unsafe { &*opaque.cast::<Listener>() };
    listener.alive.store(false, Ordering::Release);
    if let Some(shared) = listener.shared.upgrade() {
        shared.closed(&listener.alive, close_reason(reason));
    }
}

unsafe extern "C" fn on_lifecycle(
    _: *mut VirConnect,
    domain: *mut VirDomain,
    event: c_int,
    detail: c_int,
    opaque: *mut c_void,
) -> c_int {
    // virDomainEventType, and virDomainEventStoppedDetailType.
    let (event, listed) = match (event, detail) {
        (2, _) => (None, true),
        (3 | 7, _) => (Some(DomainEvent::Suspended), false),
        (4, _) => (Some(DomainEvent::Resumed), false),
        (5, 3) => (Some(DomainEvent::Left), true),
        // 6 is the end of the guest, or a signal that QEMU got; what follows says which.
        (5 | 8, _) => (Some(DomainEvent::Stopped), true),
        _ => (None, false),
    };
    // SAFETY: the library gives back what was registered, and a domain that it keeps.
    unsafe {
        if listed && let Some(shared) = (*opaque.cast::<Listener>()).shared.upgrade() {
            shared.list_again();
        }
        pass(domain, opaque, event);
    }
    0
}

unsafe extern "C" fn on_reboot(_: *mut VirConnect, domain: *mut VirDomain, opaque: *mut c_void) {
    // SAFETY: as for `on_lifecycle`.
    unsafe { pass(domain, opaque, Some(DomainEvent::Rebooted)) };
}

unsafe extern "C" fn on_tunable(
    _: *mut VirConnect,
    domain: *mut VirDomain,
    _parameters: *mut c_void,
    _count: c_int,
    opaque: *mut c_void,
) {
    // SAFETY: as for `on_lifecycle`.
    unsafe { pass(domain, opaque, Some(DomainEvent::Changed)) };
}

unsafe extern "C" fn on_device<const EVENT: c_int>(
    _: *mut VirConnect,
    domain: *mut VirDomain,
    alias: *const c_char,
    opaque: *mut c_void,
) {
    let event = match EVENT {
        api::event::DEVICE_ADDED => DomainEvent::DeviceAdded,
        api::event::DEVICE_REMOVED => DomainEvent::DeviceRemoved,
        _ => DomainEvent::RemovalFailed,
    };
    // SAFETY: as for `on_lifecycle`.
    unsafe { pass(domain, opaque, Some(event(text(alias)))) };
}

/// The UUID of a domain, which the library has at hand. Empty if it has none.
fn uuid_of(library: Library, domain: *mut VirDomain) -> String {
    let mut buffer: [c_char; api::UUID_BUFFER] = [0; api::UUID_BUFFER];
    // SAFETY: the domain is the library's, and the buffer has the size that the library wants.
    let failed = unsafe { (library.api.domain_uuid)(domain, buffer.as_mut_ptr()) } < 0;
    if failed { String::new() } else { text(buffer.as_ptr()) }
}
