//! The API server: who may connect, who may act, and what is answered.

mod api;
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

pub(crate) use api::{Context, router};
pub(crate) use limits::PerUser;
pub(crate) use listener::ApiListener;
pub(crate) use metrics::{Metrics, MetricsListener, metrics_router};
pub use openapi::document as openapi_document;
pub(crate) use placements::Placements;
pub(crate) use rights::{Peer, Rights};
pub use socket::SocketError;
pub(crate) use socket::{ApiSocket, RecordsLock, group_id};
