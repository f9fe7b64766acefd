//! The API server: who may connect, who may act, and what is answered.

mod api;
mod caught;
mod context;
mod devices;
mod exposition;
mod limits;
mod listener;
mod metrics;
mod openapi;
mod placements;
mod rights;
mod serve;
mod socket;
mod streams;

pub(crate) use api::router;
pub(crate) use context::Context;
pub(crate) use exposition::Metrics;
pub(crate) use limits::PerUser;
pub(crate) use listener::ApiListener;
pub(crate) use metrics::{MetricsListener, metrics_router};
pub use openapi::document as openapi_document;
pub(crate) use placements::Placements;
pub(crate) use rights::{Peer, Rights};
pub use socket::SocketError;
pub(crate) use socket::{ApiSocket, RecordsLock, group_id};
