//! vnumad keeps the guests of a host informed of their true NUMA topology.
//!
//! ```text
//!   core/     what is decided: events in, commands out; no I/O, no threads, no clock
//!   shell/    what surrounds it: threads that observe, and carry out what was decided
//!   server/   the API server, on a thread of its own
//!   fair/     shares of what clients cause
//!   run.rs    puts them together
//!   notify.rs tells the service manager how it is
//! ```

pub mod config;
pub mod core;
mod fair;
mod notify;
mod run;
mod server;
mod shell;

pub use config::Config;
pub use notify::{Notifier, NotifyError};
pub use run::run;
pub use server::{SocketError, openapi_document};
pub use shell::{BackendFactory, MaskRecord, parse_masks, parse_record};
