//! Metrics, on the socket and, if the operator wants that, on a TCP port.

use super::{
    caught::caught,
    context::{Context, Failure, ask},
    exposition::Snapshot,
    openapi::Failures,
};
use crate::shell::inbox::ApiRequest;
use axum::{
    Router,
    extract::State,
    http::{HeaderMap, HeaderName, header::ACCEPT, header::CONTENT_TYPE},
    middleware::from_fn,
    response::IntoResponse,
    routing::get,
    serve::Listener,
};
use prometheus_client::encoding::prometheus_text;
use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{self, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Sleep, sleep},
};
use tracing::error;
use vnuma_api::METRICS;

/// Connections to the port at a time. Further ones wait to be accepted.
const CONNECTIONS: usize = 32;

/// A connection to the port is closed after this time.
const CONNECTION_LIMIT: Duration = Duration::from_secs(60);

/// Pause after an error that is not of one connection, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// `Content-Type` of OpenMetrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

async fn gather(context: &Context) -> Result<Snapshot, Failure> {
    let daemon = ask(context, ApiRequest::Daemon).await?;
    let (mut vms, mut scheduling) = (Vec::new(), Vec::new());
    // One request for each VM, so that the core can handle events in between.
    for name in ask(context, ApiRequest::Names).await? {
        // A VM that is gone by now, or has no vCPUs to schedule, is no error.
        vms.extend(ask(context, |reply| ApiRequest::Show(name.clone(), reply)).await?.ok());
        scheduling.extend(ask(context, |reply| ApiRequest::Scheduling(name, reply)).await?.ok());
    }
    let totals = ask(context, ApiRequest::Totals).await?;
    Ok(Snapshot { daemon, vms, scheduling, totals })
}

/// Answers in OpenMetrics if the client understands that, as Prometheus does, and in Prometheus' older text format if not.
#[utoipa::path(
    get,
    path = METRICS,
    operation_id = "metrics",
    description = "Metrics for Prometheus.",
    responses(
        (status = 200, description = "In OpenMetrics or in Prometheus' text format", body = String, content_type = "text/plain"),
        Failures
    ),
)]
pub(super) async fn metrics(
    State(context): State<Context>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Failure> {
    let exposition = context.metrics.get(gather(&context)).await?;
    let accepts = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let answer = if accepts(ACCEPT).contains("application/openmetrics-text") {
        ([(CONTENT_TYPE, OPEN_METRICS)], exposition.open.clone())
    } else {
        ([(CONTENT_TYPE, prometheus_text::CONTENT_TYPE)], exposition.plain.clone())
    };
    Ok(answer)
}

/// What the port serves: nothing but metrics.
pub(crate) fn metrics_router(context: Context) -> Router {
    Router::new().route(METRICS, get(metrics)).layer(from_fn(caught)).with_state(context)
}

/// Accepts connections to the port, a bounded number at a time and for a bounded time.
pub(crate) struct MetricsListener {
    listener: TcpListener,
    connections: Arc<Semaphore>,
}

impl MetricsListener {
    pub(crate) fn new(listener: TcpListener) -> Self {
        Self { listener, connections: Arc::new(Semaphore::new(CONNECTIONS)) }
    }
}

impl Listener for MetricsListener {
    type Io = Scraper;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Scraper, SocketAddr) {
        loop {
            // It fails only if the semaphore is closed, which never happens.
            let Ok(permit) = Arc::clone(&self.connections).acquire_owned().await else {
                sleep(ERROR_PAUSE).await;
                continue;
            };
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    return (
                        Scraper { stream, until: Box::pin(sleep(CONNECTION_LIMIT)), _permit: permit },
                        address,
                    );
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
                    ) => {}
                Err(error) => {
                    error!(%error, "no connection to the port of the metrics can be accepted");
                    sleep(ERROR_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection to the port.
pub(crate) struct Scraper {
    stream: TcpStream,
    until: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl Scraper {
    /// An error once its time is over.
    fn in_time(&mut self, context: &mut task::Context<'_>) -> io::Result<()> {
        match self.until.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Scraper {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.in_time(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Scraper {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.in_time(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
