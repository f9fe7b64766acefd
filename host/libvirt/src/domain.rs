//! Calls for a domain, and its events.
//!
//! Each domain has a thread for its calls, and each call a slot ([`slots`](crate::slots)).

use crate::{
    Library, LibvirtError,
    api::{self, VirDomain},
    connection::{Connection, Opened, Raw, Shared, THREAD},
    error,
    events::{DomainEvent, Queue},
    lane::{Lane, NoResult},
    library::text,
    slots::Kind,
};
use std::{
    ffi::{CString, c_int, c_uint},
    fmt,
    os::fd::BorrowedFd,
    ptr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver},
    },
    time::Duration,
};
use vnuma_process::Heartbeat;

/// Calls that libvirt answers by itself, whatever the domain's QEMU does.
const ANSWERED: [&str; 2] = ["virDomainGetState", "virDomainGetXMLDesc"];

/// A domain of an open connection.
struct Found {
    raw: Raw<VirDomain>,
    /// After the domain, which keeps the connection from being closed.
    opened: Arc<Opened>,
}

impl Found {
    fn of(opened: &Arc<Opened>, uuid: &str) -> Result<Self, LibvirtError> {
        let no_domain = |reason: &str| {
            let (uri, domain) = (opened.uri.clone(), error::reason(uuid));
            LibvirtError::NoDomain { uri, domain, reason: reason.to_owned() }
        };
        let name = CString::new(uuid).map_err(|_| no_domain("no UUID"))?;
        // SAFETY: the connection is open, and the text ends with a zero.
        let raw = unsafe { (opened.library.api.lookup_domain)(opened.raw.0, name.as_ptr()) };
        if raw.is_null() {
            return Err(opened.error("virDomainLookupByUUIDString", uuid));
        }
        Ok(Self { raw: Raw(raw), opened: Arc::clone(opened) })
    }
}

impl Connection {
    /// A domain to talk to. Nothing is asked of libvirt.
    pub fn domain(&self, uuid: &str) -> Result<Domain, LibvirtError> {
        Domain::new(Arc::clone(&self.shared), uuid)
    }
}

impl Drop for Found {
    fn drop(&mut self) {
        // SAFETY: it is freed once. The connection is kept by `opened`, so that nothing is asked of the daemon here.
        unsafe { (self.opened.library.api.free_domain)(self.raw.0) };
    }
}

/// A domain to talk to. Calls wait up to their limit; one at a time.
pub struct Domain {
    shared: Arc<Shared>,
    uuid: String,
    queue: Arc<Queue>,
    lane: Lane,
    found: Arc<Mutex<Option<Arc<Found>>>>,
    /// The last call was not answered in time.
    late: AtomicBool,
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain")
            .field("uri", &self.shared.uri)
            .field("uuid", &self.uuid)
            .finish_non_exhaustive()
    }
}

/// What a domain does (`virDomainState`), and why (a number that depends on it).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DomainState {
    /// `virDomainState`.
    pub state: i32,
    /// Its reason.
    pub reason: i32,
}

impl Domain {
    fn new(shared: Arc<Shared>, uuid: &str) -> Result<Self, LibvirtError> {
        // Without a connection a domain would wait for events that cannot come.
        shared.opened()?;
        let queue = Arc::new(Queue::new().map_err(LibvirtError::system(&shared.uri, "an eventfd"))?);
        let lane = Lane::start(&shared.library.workers.vms, "libvirt-domain", queue.signal());
        let lane = lane.map_err(LibvirtError::system(&shared.uri, THREAD))?;
        shared.subscribe(uuid, &queue);
        let (found, late) = (Arc::default(), AtomicBool::new(false));
        Ok(Self { shared, uuid: uuid.to_owned(), queue, lane, found, late })
    }

    /// Its UUID.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The URI of its connection.
    pub fn uri(&self) -> &str {
        &self.shared.uri
    }

    /// Readable when [`next_event`](Self::next_event) may have one, or a call that was given up has returned.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.queue.fd()
    }

    /// The next event, without waiting.
    pub fn next_event(&self) -> Option<DomainEvent> {
        self.queue.take()
    }

    /// What it does now.
    pub fn state(&self, limit: Duration) -> Result<DomainState, LibvirtError> {
        self.call("virDomainGetState", limit, |library, domain| {
            let (mut state, mut reason) = (0, 0);
            // SAFETY: the domain is held for the call, and both numbers outlive it.
            let result = unsafe { (library.api.domain_state)(domain, &raw mut state, &raw mut reason, 0) };
            (result >= 0).then_some(DomainState { state, reason })
        })
    }

    /// Its XML as it runs.
    pub fn xml(&self, limit: Duration) -> Result<String, LibvirtError> {
        self.xml_with(0, limit)
    }

    /// The same as another host takes it, with what is secret in it.
    pub fn migratable_xml(&self, limit: Duration) -> Result<String, LibvirtError> {
        self.xml_with(api::XML_MIGRATABLE, limit)
    }

    fn xml_with(&self, flags: c_uint, limit: Duration) -> Result<String, LibvirtError> {
        self.call("virDomainGetXMLDesc", limit, move |library, domain| {
            // SAFETY: the domain is held for the call. The text is the caller's, and was allocated by malloc.
            unsafe {
                let pointer = (library.api.domain_xml)(domain, flags);
                let xml = (!pointer.is_null()).then(|| text(pointer));
                libc::free(pointer.cast());
                xml
            }
        })
    }

    /// Confines the thread of a vCPU, by its index, to CPUs: bits of bytes, the lowest first. As long as it runs.
    pub fn pin_vcpu(&self, vcpu: u32, mut cpus: Vec<u8>, limit: Duration) -> Result<(), LibvirtError> {
        self.call("virDomainPinVcpuFlags", limit, move |library, domain| {
            let length = c_int::try_from(cpus.len()).ok()?;
            // SAFETY: the domain is held for the call, and the map has `length` bytes.
            succeeded(unsafe {
                (library.api.pin_vcpu)(domain, vcpu, cpus.as_mut_ptr(), length, api::AFFECT_LIVE)
            })
        })
    }

    /// Replaces the element of the domain's metadata that has this namespace, or removes it. It lasts as long as the domain runs.
    pub fn set_metadata(
        &self,
        xml: Option<&str>,
        prefix: &str,
        uri: &str,
        limit: Duration,
    ) -> Result<(), LibvirtError> {
        const CALL: &str = "virDomainSetMetadata";
        let text = |text: &str| CString::new(text).map_err(|_| self.bad_text(CALL));
        let (xml, prefix, uri) = (xml.map(text).transpose()?, text(prefix)?, text(uri)?);
        self.call(CALL, limit, move |library, domain| {
            let (prefix, uri) = (prefix.as_ptr(), uri.as_ptr());
            let xml = xml.as_ref().map_or(ptr::null(), |xml| xml.as_ptr());
            // SAFETY: the domain is held for the call, and the texts end with a zero. Without an element it is removed.
            succeeded(unsafe {
                (library.api.set_metadata)(domain, api::METADATA_ELEMENT, xml, prefix, uri, api::AFFECT_LIVE)
            })
        })
    }

    /// Plugs a device into the domain as it runs.
    pub fn attach_device(&self, xml: &str, limit: Duration) -> Result<(), LibvirtError> {
        let xml = CString::new(xml).map_err(|_| self.bad_text("virDomainAttachDeviceFlags"))?;
        self.call("virDomainAttachDeviceFlags", limit, move |library, domain| {
            // SAFETY: the domain is held for the call, and the text ends with a zero.
            succeeded(unsafe { (library.api.attach_device)(domain, xml.as_ptr(), api::AFFECT_LIVE) })
        })
    }

    /// Asks the guest to give back the device with this alias.
    pub fn detach_device(&self, alias: &str, limit: Duration) -> Result<(), LibvirtError> {
        let alias = CString::new(alias).map_err(|_| self.bad_text("virDomainDetachDeviceAlias"))?;
        self.call("virDomainDetachDeviceAlias", limit, move |library, domain| {
            // SAFETY: the domain is held for the call, and the text ends with a zero.
            succeeded(unsafe { (library.api.detach_device)(domain, alias.as_ptr(), api::AFFECT_LIVE) })
        })
    }

    pub(crate) fn bad_text(&self, call: &'static str) -> LibvirtError {
        let (uri, reason) = (self.shared.uri.clone(), "a zero byte".to_owned());
        LibvirtError::Refused { uri, call, reason, code: 0 }
    }

    /// Makes a call that lasts, in a thread of its own. What comes of it is received from what is returned, unless the thread panics.
    pub(crate) fn call_long(
        &self,
        name: &str,
        call: &'static str,
        act: impl FnOnce(Library, *mut VirDomain) -> Option<()> + Send + 'static,
    ) -> Result<Receiver<Result<(), LibvirtError>>, LibvirtError> {
        let (shared, uuid, queue) = (Arc::clone(&self.shared), self.uuid.clone(), Arc::clone(&self.queue));
        let (outcome, ended) = mpsc::channel();
        // Over a connection of its own, as it would have a slot for hours.
        let make = move || {
            let _call = shared.long.begin();
            let opened = shared.opened().and_then(|_| Opened::another(&shared)).map(Arc::new);
            let found = opened.and_then(|opened| Found::of(&opened, &uuid));
            found.and_then(|found| {
                act(found.opened.library, found.raw.0).ok_or_else(|| found.opened.error(call, &uuid))
            })
        };
        let work = move |heartbeat: &Heartbeat| {
            // A migration may last longer than the connection of the client that asked for it.
            let _ = outcome.send(heartbeat.rest(make));
            queue.wake();
        };
        let started = self.shared.library.workers.vms.start_alone(name, work);
        started.map_err(LibvirtError::system(&self.shared.uri, THREAD)).map(|()| ended)
    }

    /// Makes a call in the domain's lane. `None` from it is a failure whose error the library has.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        call: &'static str,
        limit: Duration,
        act: impl FnOnce(Library, *mut VirDomain) -> Option<T> + Send + 'static,
    ) -> Result<T, LibvirtError> {
        let (shared, uuid, found) = (Arc::clone(&self.shared), self.uuid.clone(), Arc::clone(&self.found));
        let kind = Kind { waits: !ANSWERED.contains(&call), late: self.late.load(Ordering::Acquire) };
        let outcome = self.lane.run(limit, move || {
            // Where that is closed there are no events, and no calls.
            shared.opened()?;
            let slot = shared.slot(call, kind, limit)?;
            let opened = Arc::clone(slot.connection());
            if !slot.stays() {
                // The domain is not kept, so that the connection can be closed.
                let domain = Found::of(&opened, &uuid)?;
                return act(opened.library, domain.raw.0).ok_or_else(|| opened.error(call, &uuid));
            }
            let known = found.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let domain = match known.filter(|known| Arc::ptr_eq(&known.opened, &opened)) {
                Some(domain) => domain,
                None => {
                    let domain = Arc::new(Found::of(&opened, &uuid)?);
                    *found.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&domain));
                    domain
                }
            };
            act(opened.library, domain.raw.0).ok_or_else(|| opened.error(call, &uuid))
        });
        if !matches!(outcome, Ok(Err(LibvirtError::Busy { .. })) | Err(NoResult::NotBegun)) {
            self.late.store(matches!(outcome, Err(NoResult::Late)), Ordering::Release);
        }
        outcome.unwrap_or_else(|no_result| {
            if no_result == NoResult::Ended {
                // Another connection to the domain has another lane.
                self.queue.push(DomainEvent::Disconnected);
            }
            Err(self.shared.no_result(no_result, call, limit))
        })
    }
}

/// Of a number that is negative if a call has failed.
pub(crate) fn succeeded(result: c_int) -> Option<()> {
    (result >= 0).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::CONNECTIONS;
    use nix::sys::eventfd::{EfdFlags, EventFd};
    use std::time::Instant;

    const HANG: Duration = Duration::from_secs(60);

    /// With the driver for tests that is in the library itself, whose domain stands for many.
    #[test]
    fn calls_that_hang_keep_no_other_domain_waiting() {
        let Ok(library) = Library::load().inspect_err(|error| println!("skipped: {error}")) else { return };
        let changes = Arc::new(EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK).unwrap());
        let connection = Connection::new(library, "test:///default", changes).unwrap();
        let uuid = connection.list(HANG).unwrap().remove(0).uuid;
        let hangs = Arc::new(Mutex::new(()));
        let held = hangs.lock().unwrap();
        let hung: Vec<Domain> = (0..5).map(|_| connection.domain(&uuid).unwrap()).collect();
        let call = |domain: &Domain, limit| {
            let hangs = Arc::clone(&hangs);
            domain.call("virDomainAttachDeviceFlags", limit, move |_, domain| {
                drop(hangs.lock());
                Some(domain as usize)
            })
        };
        std::thread::scope(|scope| {
            for domain in &hung {
                scope.spawn(move || {
                    let late = call(domain, Duration::from_secs(1)).unwrap_err();
                    assert!(matches!(late, LibvirtError::Timeout { .. }), "{late}");
                });
            }
        });
        let healthy = connection.domain(&uuid).unwrap();
        assert!(healthy.state(HANG).is_ok() && healthy.xml(HANG).is_ok());
        assert_eq!(connection.congestion(), None);
        // One whose call hangs makes no second one.
        assert!(matches!(hung[0].state(Duration::from_millis(20)), Err(LibvirtError::Timeout { .. })));
        let more: Vec<Domain> = (0..CONNECTIONS - 5).map(|_| connection.domain(&uuid).unwrap()).collect();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let calls: Vec<_> =
                more.iter().map(|domain| scope.spawn(move || call(domain, Duration::from_secs(1)))).collect();
            calls.into_iter().map(|call| call.join().unwrap().unwrap_err()).collect()
        });
        let busy = outcomes.iter().find(|error| matches!(error, LibvirtError::Busy { .. })).expect("no slot");
        assert!(busy.to_string().contains("`max_client_requests`"), "{busy}");
        assert!(connection.congestion().is_some_and(|told| told.contains("`max_client_requests`")));
        assert!(healthy.state(HANG).is_ok(), "calls that QEMU answers leave room for others");
        drop(held);
        let until = Instant::now() + HANG;
        while call(&hung[0], HANG).is_err() {
            assert!(Instant::now() < until, "it takes calls again");
        }
    }
}
