//! What the handlers share, how they ask the core's thread, and how they fail.

use super::{
    exposition::Metrics,
    joined::joined,
    placements::{PlacementError, Placements},
    rights::Peer,
};
use crate::{
    config::Config,
    core::{Refusal, Requester, sanitize},
    fair::{Lane, Lanes, Permit, Permits, Room, Tolls},
    shell::inbox::{ApiRequest, Inbox, Ticket},
};
use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use std::{path::PathBuf, sync::Arc};
use tokio::sync::oneshot;
use vnuma_api::{ApiError, ErrorKind};
use vnuma_model::{Party, Work};

/// No request needs more.
pub(super) const BODY_LIMIT: usize = 4096;

/// Requests of one user that read the host's files at a time. Others of that user wait.
const JOBS: usize = 2;

/// Answers of one user at a time that have something of each VM, each of which may have megabytes.
const LISTS: usize = 8;

/// State that the handlers share.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) root: PathBuf,
    /// Name of the group that may act, if there is one.
    pub(crate) act_group: Option<String>,
    pub(crate) watchers: Permits,
    pub(crate) placements: Arc<Placements>,
    pub(crate) metrics: Metrics,
    pub(crate) tolls: Tolls,
    /// Of requests that read the host's files, and know all VMs meanwhile.
    pub(crate) jobs: Lanes,
    /// Of answers with something of each VM, until the client has taken them.
    pub(crate) lists: Lanes,
}

impl Context {
    pub(crate) fn new(inbox: Arc<Inbox>, config: &Config) -> Self {
        Self {
            root: config.root.clone(),
            act_group: config.act_group.clone(),
            watchers: Permits::new(Room::for_parties_of(config.watchers_per_user)),
            placements: Arc::new(Placements::new(config.root.clone(), &config.records)),
            metrics: Metrics::default(),
            tolls: Tolls::new(inbox.ledger.clone()),
            jobs: Lanes::new(JOBS),
            lists: Lanes::new(LISTS),
            inbox,
        }
    }
}

/// The client at the other end of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) peer: Peer,
    /// The connection counts until all that was begun for its requests is over.
    pub(crate) held: Arc<Permit>,
}

/// A request that is served. It is dropped when its client goes.
pub(super) struct Asker {
    pub(super) context: Context,
    /// `None`: vnumad itself.
    client: Option<Client>,
    here: Arc<()>,
}

impl Asker {
    pub(super) fn new(context: Context, client: Client) -> Self {
        Self { context, client: Some(client), here: Arc::default() }
    }

    /// vnumad, for several clients.
    pub(super) fn own(context: Context) -> Self {
        Self { context, client: None, here: Arc::default() }
    }

    fn party(&self) -> Party {
        self.client.as_ref().map_or(Ticket::own().party, |client| Party::User(client.peer.uid))
    }

    /// Goes with what is done for it elsewhere.
    pub(super) fn ticket(&self) -> Ticket {
        let _held = self.client.as_ref().map(|client| Arc::clone(&client.held));
        let looks = self.client.as_ref().is_some_and(|client| !client.peer.may_act);
        let requester = Requester::with(&self.here).paid_by(looks.then(|| self.party()));
        Ticket { party: self.party(), requester, _held }
    }

    /// Waits until its user has paid for so much. Those who could stop vnumad need not pay.
    async fn pay(&self, work: Work, amount: u32) {
        if self.client.as_ref().is_some_and(|client| !client.peer.is_trusted()) {
            self.context.tolls.clone().pay(work, self.party(), amount).await;
        }
    }

    /// Gives the core's thread a request.
    pub(super) async fn request(&self, request: ApiRequest) -> Result<(), Refusal> {
        self.pay(Work::Requests, 1).await;
        self.context.inbox.request(self.ticket(), request)
    }

    /// Waits for its turn to read the host's files.
    pub(super) async fn job(&self) -> Lane {
        self.pay(Work::HostReadings, 1).await;
        self.context.jobs.enter(self.party()).await
    }

    /// Waits until its user may have another list.
    pub(super) async fn list(&self) -> Lane {
        self.context.lists.enter(self.party()).await
    }

    /// Runs what may wait for files on another thread. It is not begun once the client has gone. Its panic is one of the handler.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        job: Lane,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let ticket = self.ticket();
        let done = tokio::task::spawn_blocking(move || {
            let done = (!ticket.requester.has_gone()).then(run);
            drop((job, ticket));
            done
        });
        joined(done.await)?.ok_or(Refusal::ShuttingDown)
    }
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

    pub(super) fn internal(message: String) -> Self {
        Self::new(ErrorKind::Internal, message)
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
    asker: &Asker,
    make: impl FnOnce(oneshot::Sender<T>) -> ApiRequest,
) -> Result<T, Failure> {
    let (reply, answer) = oneshot::channel();
    let request = make(reply);
    asker.request(request).await?;
    answer.await.map_err(|_| Refusal::ShuttingDown.into())
}
