//! What can go wrong with libvirt.

use vnuma_process::text::sanitize_reason;

/// Why something was not learned from libvirt or not done by it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LibvirtError {
    /// There is no libvirt on this host, or an old one.
    #[error("libvirt cannot be used: {0}")]
    Library(String),
    /// A connection was not opened, or is not open.
    #[error("{uri}: not connected to libvirt: {reason}")]
    NotConnected {
        /// The connection.
        uri: String,
        /// What libvirt says.
        reason: String,
    },
    /// A call has not returned. It may still do so.
    #[error("{uri}: libvirt has not answered `{call}` within {limit_ms} ms")]
    Timeout {
        /// The connection.
        uri: String,
        /// What was asked.
        call: &'static str,
        /// How long it was waited for.
        limit_ms: u64,
    },
    /// A call was not begun, as others are under way.
    #[error(
        "{uri}: `{call}` has waited {limit_ms} ms for calls that libvirt has not answered: it serves some of a client, and some in all, at a \
         time (`max_client_requests` and `max_workers` in libvirtd.conf or virtqemud.conf)"
    )]
    Busy {
        /// The connection.
        uri: String,
        /// What was to be asked.
        call: &'static str,
        /// How long it was waited.
        limit_ms: u64,
    },
    /// There is no such domain, or it does not run.
    #[error("{uri}: domain {domain} does not run: {reason}")]
    NoDomain {
        /// The connection.
        uri: String,
        /// The domain's UUID.
        domain: String,
        /// What libvirt says.
        reason: String,
    },
    /// libvirt refused a call.
    #[error("{uri}: libvirt refused `{call}`: {reason}")]
    Refused {
        /// The connection.
        uri: String,
        /// What was asked.
        call: &'static str,
        /// What libvirt says.
        reason: String,
        /// Its number of the error (`virErrorNumber`).
        code: i32,
    },
    /// The system refused something.
    #[error("{uri}: {act}: {reason}")]
    System {
        /// The connection.
        uri: String,
        /// What was tried.
        act: &'static str,
        /// The system's error.
        reason: String,
    },
}

impl LibvirtError {
    /// Makes an error of what the system refused.
    pub(crate) fn system<E: ToString>(uri: &str, act: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::System { uri: uri.to_owned(), act, reason: error.to_string() }
    }
}

/// Text that libvirt wrote, part of which may be QEMU's.
pub(crate) fn reason(text: &str) -> String {
    if text.trim().is_empty() { "no reason given".to_owned() } else { sanitize_reason(text.trim()) }
}
