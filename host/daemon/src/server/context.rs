//! What the handlers share, how they ask the core's thread, and how they fail.

use super::{
    exposition::Metrics,
    limits::PerUser,
    placements::{PlacementError, Placements},
};
use crate::{
    core::{Refusal, sanitize},
    shell::inbox::{ApiRequest, Inbox},
};
use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use std::{path::PathBuf, sync::Arc};
use tokio::sync::oneshot;
use vnuma_api::{ApiError, ErrorKind};

/// No request needs more.
pub(super) const BODY_LIMIT: usize = 4096;

/// State that the handlers share.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) root: PathBuf,
    /// Name of the group that may act, if there is one.
    pub(crate) act_group: Option<String>,
    pub(crate) watchers: PerUser,
    pub(crate) placements: Arc<Placements>,
    pub(crate) metrics: Arc<Metrics>,
}

/// A failed request.
pub(crate) struct Failure(ApiError);

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self(refusal.into())
    }
}

impl From<PlacementError> for Failure {
    fn from(error: PlacementError) -> Self {
        Self::new(error.kind(), error.to_string())
    }
}

impl Failure {
    pub(super) fn new(error: ErrorKind, message: String) -> Self {
        Self(ApiError { error, message })
    }

    pub(super) fn bad_request(message: String) -> Self {
        Self::new(ErrorKind::BadRequest, message)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match self.0.error {
            ErrorKind::BadRequest => StatusCode::BAD_REQUEST,
            ErrorKind::Forbidden => StatusCode::FORBIDDEN,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            ErrorKind::Busy => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Vm => StatusCode::BAD_GATEWAY,
        };
        let ApiError { error, message } = self.0;
        (status, Json(ApiError { error, message: sanitize(&message) })).into_response()
    }
}

/// Asks the core's thread.
pub(super) async fn ask<T>(
    context: &Context,
    make: impl FnOnce(oneshot::Sender<T>) -> ApiRequest,
) -> Result<T, Failure> {
    let (reply, answer) = oneshot::channel();
    context.inbox.request(make(reply))?;
    answer.await.map_err(|_| Refusal::ShuttingDown.into())
}
