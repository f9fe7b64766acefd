//! The library of this process: loaded once, with one thread that runs its events.

use crate::{
    LibvirtError,
    api::{Api, LIBRARY},
    error,
};
use std::{
    ffi::{CStr, c_char, c_void},
    ptr,
    sync::OnceLock,
    thread,
    time::Duration,
};
use vnuma_process::spawn_worker;

/// Pause after the event loop has failed, so that it does not spin.
const PAUSE: Duration = Duration::from_millis(500);

/// libvirt, loaded and ready.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    pub(crate) api: &'static Api,
}

impl Library {
    /// Loads libvirt, if that has not been done. The events of all connections run in a thread of their own from then on.
    pub fn load() -> Result<Self, LibvirtError> {
        static LOADED: OnceLock<Result<Library, LibvirtError>> = OnceLock::new();
        LOADED.get_or_init(load).clone()
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
    let library = Library { api: Box::leak(Box::new(api)) };
    // SAFETY: no connection exists yet, as this runs once and before any; the function ignores its arguments.
    let failed = unsafe {
        (library.api.set_error_function)(ptr::null_mut(), Some(ignore_error));
        (library.api.initialize)() < 0 || (library.api.event_register_default)() < 0
    };
    if failed {
        return Err(LibvirtError::Library(library.last_error().1));
    }
    let started = spawn_worker("libvirt-events", move || run_events(library));
    started.map_err(|error| LibvirtError::Library(format!("starting a thread: {error}")))?;
    Ok(library)
}

/// Runs callbacks as long as the process lives.
fn run_events(library: Library) {
    loop {
        // SAFETY: the default implementation was registered, and only this thread runs it.
        if unsafe { (library.api.event_run_default)() } < 0 {
            tracing::warn!(error = library.last_error().1, "libvirt's events cannot be received");
            thread::sleep(PAUSE);
        }
    }
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
