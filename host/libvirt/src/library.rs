//! The library of this process: loaded once, with one thread that runs its events.

use crate::{
    LibvirtError,
    api::{Api, LIBRARY},
    error,
};
use std::{
    ffi::{CStr, c_char, c_void},
    io, ptr,
    sync::OnceLock,
    thread,
    time::Duration,
};
use vnuma_process::{Groups, Heartbeat, Workers};

/// Pause after the event loop has failed, so that it does not spin.
const PAUSE: Duration = Duration::from_millis(500);

/// libvirt, loaded and ready.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    pub(crate) api: &'static Api,
    pub(crate) workers: &'static Groups,
}

impl Library {
    /// Loads libvirt, if that has not been done. The events of all connections run in a thread of their own from then on.
    pub fn load() -> Result<Self, LibvirtError> {
        static LOADED: OnceLock<Result<Library, LibvirtError>> = OnceLock::new();
        LOADED.get_or_init(load).clone()
    }

    /// The threads of the library and of all connections.
    pub fn workers(self) -> Groups {
        self.workers.clone()
    }

    /// What the last call of this thread failed with.
    pub(crate) fn last_error(self) -> (i32, String) {
        // SAFETY: both calls read the error of this thread.
        let (code, message) = unsafe { ((self.api.last_error_code)(), (self.api.last_error_message)()) };
        let reason = error::reason(&text(message));
        // SAFETY: it forgets the error of this thread; the message was copied.
        unsafe { (self.api.reset_last_error)() };
        (code, reason)
    }
}

fn load() -> Result<Library, LibvirtError> {
    let api = Api::load(LIBRARY).map_err(|error| LibvirtError::Library(error.to_string()))?;
    let library = Library { api: Box::leak(Box::new(api)), workers: Box::leak(Box::default()) };
    // SAFETY: no connection exists yet, as this runs once and before any; the function ignores its arguments.
    let failed = unsafe {
        (library.api.set_error_function)(ptr::null_mut(), Some(ignore_error));
        (library.api.initialize)() < 0 || (library.api.event_register_default)() < 0
    };
    if failed {
        return Err(LibvirtError::Library(library.last_error().1));
    }
    // SAFETY: the default implementation was registered, and only this thread runs it.
    let run = move || match unsafe { (library.api.event_run_default)() } {
        ..0 => Err(library.last_error().1),
        _ => Ok(()),
    };
    let started = start_events(&library.workers.host, run);
    started.map_err(|error| LibvirtError::Library(format!("starting a thread: {error}")))?;
    Ok(library)
}

/// Runs callbacks as long as the process lives. `run` waits for them.
fn start_events(workers: &Workers, run: impl Fn() -> Result<(), String> + Send + 'static) -> io::Result<()> {
    let work = move |heartbeat: &Heartbeat| loop {
        if let Err(error) = heartbeat.rest(&run) {
            tracing::warn!(error, "libvirt's events cannot be received");
            thread::sleep(PAUSE);
        }
    };
    workers.start_alone("libvirt-events", work)
}

/// Errors are returned by the calls; without this the library would print them, too.
unsafe extern "C" fn ignore_error(_: *mut c_void, _: *mut c_void) {}

/// A text of the library. What is not UTF-8 is replaced.
pub(crate) fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the library's texts end with a zero, and are not changed while they are read here.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, time::Instant};
    use vnuma_process::Change;

    #[test]
    fn who_waits_for_events_is_not_silent_and_its_panic_is_seen() {
        let (workers, (event, events)) = (Workers::default(), mpsc::channel::<()>());
        let ((begin, begun), limit) = (mpsc::channel(), Duration::from_secs(60));
        let run = move || {
            begin.send(()).unwrap();
            events.recv().map_err(|_| panic!("an event"))
        };
        start_events(&workers, run).unwrap();
        begun.recv_timeout(limit).unwrap();
        assert_eq!(workers.look(Instant::now() + 2 * limit, limit), []);
        drop(event);
        let (panicked, end) =
            (Change::Panicked("libvirt-events".to_owned(), "an event".to_owned()), Instant::now() + limit);
        while !workers.look(Instant::now(), limit).contains(&panicked) {
            assert!(Instant::now() < end, "its panic is not seen");
            thread::sleep(Duration::from_millis(2));
        }
    }
}
