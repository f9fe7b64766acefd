//! The server's description of its counters: the header of their region, as the PMU module shows it.

use std::io;
use std::path::Path;

use vnuma_abi_lab_counters::{Header, HeaderError};

const HEADER: &str = "/sys/bus/event_source/devices/cpu/vnuma/header";

/// Why the server has no counters.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No PMU module.
    #[error("{HEADER} is missing: no counters here; run the server with --counters PROFILE")]
    None,
    /// It cannot be read.
    #[error("{HEADER}: {0}")]
    File(io::Error),
    /// Not a header.
    #[error("{HEADER}: {0}")]
    Header(HeaderError),
}

/// Reads the header.
pub fn header() -> Result<Header, ServerError> {
    match std::fs::read(Path::new(HEADER)) {
        Ok(bytes) => Header::from_bytes(&bytes).map_err(ServerError::Header),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ServerError::None),
        Err(error) => Err(ServerError::File(error)),
    }
}
