//! Answers that have no end: events and observations, a JSON object a line.

use super::{
    context::{Asker, Client, Context, Failure, ask},
    openapi::Failures,
};
use crate::{
    core::Refusal,
    fair::Permit,
    shell::{inbox::ApiRequest, told::Told},
};
use axum::{
    body::{Body, Bytes},
    extract::{ConnectInfo, RawQuery, State},
    http::header::CONTENT_TYPE,
    response::{IntoResponse, Response},
};
use futures_core::Stream;
use serde::Serialize;
use std::{
    pin::Pin,
    sync::Arc,
    task::{self, Poll},
};
use tokio::sync::mpsc;
use vnuma_api::{Event, EventKind, OBSERVATIONS, UnknownEvent, WATCH};
use vnuma_model::Party;

/// The kinds of `?events=KIND,KIND`, each once: the core looks through them for each event.
fn kinds(query: Option<&str>) -> Result<Vec<EventKind>, Failure> {
    let Some(query) = query.filter(|query| !query.is_empty()) else { return Ok(Vec::new()) };
    let names = query
        .strip_prefix("events=")
        .ok_or_else(|| Failure::bad_request("the query is not events=KIND,KIND".to_owned()))?;
    let mut kinds = Vec::new();
    for name in names.split(',') {
        let kind = name.parse().map_err(|error: UnknownEvent| Failure::bad_request(error.to_string()))?;
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    Ok(kinds)
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
    ConnectInfo(client): ConnectInfo<Client>,
    State(context): State<Context>,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    let kinds = kinds(query.as_deref())?;
    let permit = permit(&context, &client)?;
    let asker = Asker::new(context, client);
    Ok(lines(ask(&asker, |reply| ApiRequest::Watch(kinds, reply)).await?, permit))
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
    ConnectInfo(client): ConnectInfo<Client>,
    State(context): State<Context>,
) -> Result<Response, Failure> {
    let permit = permit(&context, &client)?;
    let asker = Asker::new(context, client);
    Ok(lines(ask(&asker, ApiRequest::Record).await?, permit))
}

/// One more watcher of this user, if that is within the limit.
fn permit(context: &Context, client: &Client) -> Result<Permit, Refusal> {
    let (uid, most) = (client.peer.uid, context.watchers.most());
    context.watchers.take(Party::User(uid)).map_err(|has| match has < most {
        true => Refusal::WatchersOfAll { uid, has },
        false => Refusal::Watchers { uid, most },
    })
}

fn lines<T>(items: mpsc::Receiver<Arc<Told<T>>>, permit: Permit) -> Response
where
    T: Serialize + Send + Sync + 'static,
{
    let lines = Body::from_stream(Lines { items, _permit: permit });
    ([(CONTENT_TYPE, "application/x-ndjson")], lines).into_response()
}

/// Lines of JSON, until the watcher is dropped or the daemon ends.
struct Lines<T> {
    items: mpsc::Receiver<Arc<Told<T>>>,
    _permit: Permit,
}

impl<T: Serialize> Stream for Lines<T> {
    type Item = serde_json::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<Option<Self::Item>> {
        self.items.poll_recv(context).map(|item| Some(item?.line().map(Bytes::from_owner)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_that_is_named_again_and_again_is_wanted_once() {
        let query = format!("events={}appeared", "gone,".repeat(10_000));
        let kinds = kinds(Some(&query)).map_err(|_| "refused").expect("known kinds");
        assert_eq!(kinds, [EventKind::Gone, EventKind::Appeared]);
    }
}
