//! Answers that have no end: events and observations, a JSON object a line.

use super::{
    context::{Context, Failure, ask},
    limits::Permit,
    openapi::Failures,
    rights::Peer,
};
use crate::{core::Refusal, shell::inbox::ApiRequest};
use axum::{
    body::Body,
    extract::{ConnectInfo, RawQuery, State},
    http::header::CONTENT_TYPE,
    response::{IntoResponse, Response},
};
use futures_core::Stream;
use serde::Serialize;
use std::{
    pin::Pin,
    task::{self, Poll},
};
use tokio::sync::mpsc;
use vnuma_api::{Event, EventKind, OBSERVATIONS, UnknownEvent, WATCH};

/// The kinds of `?events=KIND,KIND`.
fn kinds(query: Option<&str>) -> Result<Vec<EventKind>, Failure> {
    let Some(query) = query.filter(|query| !query.is_empty()) else { return Ok(Vec::new()) };
    let names = query
        .strip_prefix("events=")
        .ok_or_else(|| Failure::bad_request("the query is not events=KIND,KIND".to_owned()))?;
    let kinds: Result<_, UnknownEvent> = names.split(',').map(str::parse).collect();
    kinds.map_err(|error| Failure::bad_request(error.to_string()))
}

#[utoipa::path(
    get,
    path = WATCH,
    operation_id = "watch",
    description = "Events as they happen, a JSON object a line.",
    params(("events" = Option<String>, Query, description = "Kinds of events, separated by commas; all without it")),
    responses(
        (status = 200, description = "Lines without end", body = Event, content_type = "application/x-ndjson"),
        Failures
    ),
)]
pub(super) async fn watch(
    ConnectInfo(peer): ConnectInfo<Peer>,
    State(context): State<Context>,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    let kinds = kinds(query.as_deref())?;
    let permit = permit(&context, peer)?;
    Ok(lines(ask(&context, |reply| ApiRequest::Watch(kinds, reply)).await?, permit))
}

#[utoipa::path(
    get,
    path = OBSERVATIONS,
    operation_id = "record",
    description = "The input of the policies, a JSON object a line for each period.",
    responses(
        (status = 200, description = "Lines without end", body = vnuma_api::Observation, content_type = "application/x-ndjson"),
        Failures
    ),
)]
pub(super) async fn record(
    ConnectInfo(peer): ConnectInfo<Peer>,
    State(context): State<Context>,
) -> Result<Response, Failure> {
    let permit = permit(&context, peer)?;
    Ok(lines(ask(&context, ApiRequest::Record).await?, permit))
}

/// One more watcher of this user, if that is within the limit.
fn permit(context: &Context, Peer { uid, .. }: Peer) -> Result<Permit, Refusal> {
    let most = context.watchers.most();
    context.watchers.take(uid).ok_or(Refusal::Watchers { uid, most })
}

fn lines<T: Serialize + Send + 'static>(items: mpsc::Receiver<T>, permit: Permit) -> Response {
    let lines = Body::from_stream(Lines { items, _permit: permit });
    ([(CONTENT_TYPE, "application/x-ndjson")], lines).into_response()
}

/// Lines of JSON, until the watcher is dropped or the daemon ends.
struct Lines<T> {
    items: mpsc::Receiver<T>,
    _permit: Permit,
}

impl<T: Serialize> Stream for Lines<T> {
    type Item = serde_json::Result<Vec<u8>>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<Option<Self::Item>> {
        self.items.poll_recv(context).map(|item| {
            let line = serde_json::to_vec(&item?);
            Some(line.map(|mut line| {
                line.push(b'\n');
                line
            }))
        })
    }
}
