//! The part of libvirt's C interface that is used, looked up in `libvirt.so.0` when the program runs.
//!
//! Types are those of include/libvirt/libvirt-host.h, libvirt-domain.h, libvirt-event.h and virterror.h. The interface is stable: symbols
//! are versioned, and what a version offers stays.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};

/// The library's name since its first version.
pub(crate) const LIBRARY: &str = "libvirt.so.0";

/// A connection to a hypervisor's daemon (`virConnectPtr`). Opaque.
#[repr(C)]
pub(crate) struct VirConnect {
    _opaque: [u8; 0],
}

/// A domain (`virDomainPtr`). Opaque.
#[repr(C)]
pub(crate) struct VirDomain {
    _opaque: [u8; 0],
}

/// `virFreeCallback`.
pub(crate) type FreeCallback = unsafe extern "C" fn(*mut c_void);
/// `virConnectCloseFunc`.
pub(crate) type CloseCallback = unsafe extern "C" fn(*mut VirConnect, c_int, *mut c_void);
/// `virConnectDomainEventGenericCallback`. What is registered has the type of its event and is cast to this.
pub(crate) type EventCallback = unsafe extern "C" fn(*mut VirConnect, *mut VirDomain, *mut c_void);
/// `virErrorFunc`.
pub(crate) type ErrorCallback = unsafe extern "C" fn(*mut c_void, *mut c_void);

/// `VIR_CONNECT_LIST_DOMAINS_ACTIVE`.
pub(crate) const LIST_ACTIVE: c_uint = 1;
/// `VIR_DOMAIN_AFFECT_LIVE`.
pub(crate) const AFFECT_LIVE: c_uint = 1;
/// `VIR_DOMAIN_XML_MIGRATABLE`.
pub(crate) const XML_MIGRATABLE: c_uint = 8;
/// `VIR_DOMAIN_METADATA_ELEMENT`.
pub(crate) const METADATA_ELEMENT: c_int = 2;
/// `VIR_UUID_STRING_BUFLEN`.
pub(crate) const UUID_BUFFER: usize = 37;

/// `virErrorNumber`: no such domain.
pub(crate) const ERROR_NO_DOMAIN: c_int = 42;
/// `virErrorNumber`: an operation was cancelled.
pub(crate) const ERROR_ABORTED: c_int = 78;

/// `virDomainMigrateFlags`.
pub(crate) mod migrate {
    use std::ffi::c_uint;
    pub(crate) const LIVE: c_uint = 1;
    pub(crate) const PEER2PEER: c_uint = 2;
    pub(crate) const PERSIST_DEST: c_uint = 8;
    pub(crate) const UNDEFINE_SOURCE: c_uint = 16;
    pub(crate) const POSTCOPY: c_uint = 1 << 15;
    /// `VIR_MIGRATE_PARAM_DEST_XML`.
    pub(crate) const DEST_XML: &std::ffi::CStr = c"destination_xml";
}

/// `virTypedParameterType`: an `unsigned long long`.
pub(crate) const TYPE_ULLONG: c_int = 4;
/// `virTypedParameterType`: a `char *`.
pub(crate) const TYPE_STRING: c_int = 7;

/// `virTypedParameter`.
#[repr(C)]
pub(crate) struct TypedParameter {
    pub(crate) field: [c_char; 80],
    pub(crate) kind: c_int,
    /// A union, whose largest members have this size and alignment.
    pub(crate) value: u64,
}

impl TypedParameter {
    /// A text under this name. It points to the text.
    pub(crate) fn text(name: &CStr, value: &CStr) -> Self {
        let mut field = [0; 80];
        // The last byte stays zero.
        for (to, from) in field[..79].iter_mut().zip(name.to_bytes()) {
            *to = *from as c_char;
        }
        Self { field, kind: TYPE_STRING, value: value.as_ptr() as u64 }
    }
}

/// `virDomainEventID`.
pub(crate) mod event {
    use std::ffi::c_int;
    pub(crate) const LIFECYCLE: c_int = 0;
    pub(crate) const REBOOT: c_int = 1;
    pub(crate) const DEVICE_REMOVED: c_int = 15;
    pub(crate) const TUNABLE: c_int = 17;
    pub(crate) const DEVICE_ADDED: c_int = 19;
    pub(crate) const REMOVAL_FAILED: c_int = 22;
}

macro_rules! symbols {
    ($($field:ident = $symbol:literal: fn($($argument:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        /// Functions of the library. It stays loaded until the process ends: threads of its own may run in it.
        pub(crate) struct Api {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            _library: Library,
        }

        impl Api {
            /// Loads the library of this name.
            pub(crate) fn load(name: &str) -> Result<Self, libloading::Error> {
                // SAFETY: the library is the system's own, and its constructors do nothing that this process forbids.
                let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL)? };
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is that of the library's headers.
                        *unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>($symbol.as_bytes())?
                        }
                    },)*
                    _library: library,
                })
            }

            /// Names of the symbols.
            #[cfg(test)]
            pub(crate) const SYMBOLS: &'static [&'static str] = &[$($symbol),*];
        }
    };
}

symbols! {
    initialize = "virInitialize": fn() -> c_int;
    event_register_default = "virEventRegisterDefaultImpl": fn() -> c_int;
    event_run_default = "virEventRunDefaultImpl": fn() -> c_int;
    set_error_function = "virSetErrorFunc": fn(*mut c_void, Option<ErrorCallback>);
    last_error_code = "virGetLastErrorCode": fn() -> c_int;
    last_error_message = "virGetLastErrorMessage": fn() -> *const c_char;
    reset_last_error = "virResetLastError": fn();
    open = "virConnectOpen": fn(*const c_char) -> *mut VirConnect;
    close = "virConnectClose": fn(*mut VirConnect) -> c_int;
    is_alive = "virConnectIsAlive": fn(*mut VirConnect) -> c_int;
    set_keep_alive = "virConnectSetKeepAlive": fn(*mut VirConnect, c_int, c_uint) -> c_int;
    register_close = "virConnectRegisterCloseCallback":
        fn(*mut VirConnect, CloseCallback, *mut c_void, Option<FreeCallback>) -> c_int;
    unregister_close = "virConnectUnregisterCloseCallback": fn(*mut VirConnect, CloseCallback) -> c_int;
    register_event = "virConnectDomainEventRegisterAny":
        fn(*mut VirConnect, *mut VirDomain, c_int, EventCallback, *mut c_void, Option<FreeCallback>) -> c_int;
    deregister_event = "virConnectDomainEventDeregisterAny": fn(*mut VirConnect, c_int) -> c_int;
    list_domains = "virConnectListAllDomains": fn(*mut VirConnect, *mut *mut *mut VirDomain, c_uint) -> c_int;
    lookup_domain = "virDomainLookupByUUIDString": fn(*mut VirConnect, *const c_char) -> *mut VirDomain;
    free_domain = "virDomainFree": fn(*mut VirDomain) -> c_int;
    domain_name = "virDomainGetName": fn(*mut VirDomain) -> *const c_char;
    domain_uuid = "virDomainGetUUIDString": fn(*mut VirDomain, *mut c_char) -> c_int;
    domain_id = "virDomainGetID": fn(*mut VirDomain) -> c_uint;
    domain_state = "virDomainGetState": fn(*mut VirDomain, *mut c_int, *mut c_int, c_uint) -> c_int;
    domain_xml = "virDomainGetXMLDesc": fn(*mut VirDomain, c_uint) -> *mut c_char;
    pin_vcpu = "virDomainPinVcpuFlags": fn(*mut VirDomain, c_uint, *mut c_uchar, c_int, c_uint) -> c_int;
    set_metadata = "virDomainSetMetadata":
        fn(*mut VirDomain, c_int, *const c_char, *const c_char, *const c_char, c_uint) -> c_int;
    attach_device = "virDomainAttachDeviceFlags": fn(*mut VirDomain, *const c_char, c_uint) -> c_int;
    detach_device = "virDomainDetachDeviceAlias": fn(*mut VirDomain, *const c_char, c_uint) -> c_int;
    is_persistent = "virDomainIsPersistent": fn(*mut VirDomain) -> c_int;
    migrate = "virDomainMigrateToURI3":
        fn(*mut VirDomain, *const c_char, *mut TypedParameter, c_uint, c_uint) -> c_int;
    start_post_copy = "virDomainMigrateStartPostCopy": fn(*mut VirDomain, c_uint) -> c_int;
    job_stats = "virDomainGetJobStats":
        fn(*mut VirDomain, *mut c_int, *mut *mut TypedParameter, *mut c_int, c_uint) -> c_int;
    abort_job = "virDomainAbortJob": fn(*mut VirDomain) -> c_int;
    free_parameters = "virTypedParamsFree": fn(*mut TypedParameter, c_int);
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(LIBRARY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let error = Api::load("libvnuma-no-such-library.so.0").unwrap_err().to_string();
        assert!(error.contains("libvnuma-no-such-library.so.0"), "{error}");
    }

    #[test]
    fn a_library_without_the_symbols_is_refused() {
        let error = Api::load("libc.so.6").unwrap_err().to_string();
        assert!(error.contains(Api::SYMBOLS[0]), "{error}");
    }
}
