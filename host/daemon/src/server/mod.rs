//! The API server: who may connect, who may act, and what is answered.

mod api;
mod caught;
mod context;
mod devices;
mod exposition;
mod guarded;
mod joined;
mod listener;
mod metrics;
mod openapi;
mod placements;
mod refused;
mod rights;
mod serve;
mod socket;
mod streams;
#[cfg(test)]
mod tests;

pub(crate) use api::router;
pub(crate) use context::{Client, Context};
pub(crate) use listener::ApiListener;
pub(crate) use metrics::{MetricsListener, metrics_router};
pub use openapi::document as openapi_document;
pub(crate) use rights::Rights;
pub use socket::SocketError;
pub(crate) use socket::{ApiSocket, RecordsLock, group_id};
