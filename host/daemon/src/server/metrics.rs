//! Metrics, on the socket and, if the operator wants that, on a TCP port.

use super::{
    caught::caught,
    context::{Asker, Context, Failure, ask},
    exposition::Snapshot,
    guarded::Guarded,
    listener::is_of_the_client,
    openapi::Failures,
    refused::Refused,
};
use crate::{
    fair::{Permit, Permits, Room, Tolls},
    shell::inbox::ApiRequest,
};
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
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::sleep,
};
use tracing::error;
use vnuma_api::METRICS;
use vnuma_model::{Party, Work};

/// Connections to the port at a time, of one address and of all. Further ones are refused.
const CONNECTIONS: Room = Room { of_one: 32, of_all: 256 };

/// A connection to the port is closed after this time.
const CONNECTION_LIMIT: Duration = Duration::from_secs(60);

/// Pause after an error that is not of one connection, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// `Content-Type` of OpenMetrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

async fn gather(asker: Asker) -> Result<Snapshot, Failure> {
    let asker = &asker;
    let daemon = ask(asker, ApiRequest::Daemon).await?;
    let (mut vms, mut scheduling) = (Vec::new(), Vec::new());
    // One request for each VM, so that the core can handle events in between.
    for name in ask(asker, ApiRequest::Names).await? {
        // A VM that is gone by now, or has no vCPUs to schedule, is no error.
        vms.extend(ask(asker, |reply| ApiRequest::Show(name.clone(), reply)).await?.ok());
        scheduling.extend(ask(asker, |reply| ApiRequest::Scheduling(name, reply)).await?.ok());
    }
    let totals = ask(asker, ApiRequest::Totals).await?;
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
    let exposition = context.metrics.get(gather(Asker::own(context.clone()))).await?;
    let accepts = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let answer = if accepts(ACCEPT).contains("application/openmetrics-text") {
        ([(CONTENT_TYPE, OPEN_METRICS)], exposition.open)
    } else {
        ([(CONTENT_TYPE, prometheus_text::CONTENT_TYPE)], exposition.plain)
    };
    Ok(answer)
}

/// What the port serves: nothing but metrics.
pub(crate) fn metrics_router(context: Context) -> Router {
    Router::new().route(METRICS, get(metrics)).layer(from_fn(caught)).with_state(context)
}

/// Whom an address belongs to. Of IPv6 a client has all that begin with the same 64 bits.
fn party(address: IpAddr) -> Party {
    Party::Address(match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
        address => address,
    })
}

/// Accepts connections to the port: a bounded number of each address at a time, for a bounded time.
pub(crate) struct MetricsListener {
    listener: TcpListener,
    connections: Permits,
    refused: Refused,
    tolls: Tolls,
}

impl MetricsListener {
    pub(crate) fn new(listener: TcpListener, tolls: Tolls) -> Self {
        Self { listener, connections: Permits::new(CONNECTIONS), refused: Refused::default(), tolls }
    }
}

impl Listener for MetricsListener {
    type Io = Scraper;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Scraper, SocketAddr) {
        loop {
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) if is_of_the_client(&error) => continue,
                Err(error) => {
                    error!(%error, "no connection to the port of the metrics can be accepted");
                    sleep(ERROR_PAUSE).await;
                    continue;
                }
            };
            let party = party(address.ip());
            match self.connections.take(party) {
                Ok(permit) => {
                    let toll = self.tolls.clone().pay(Work::Connections, party, 1);
                    return (Guarded::new(stream, permit, toll).within(CONNECTION_LIMIT), address);
                }
                Err(has) => self.refused.tell(stream, party, || {
                    format!("{} has {has} connections to the metrics, and gets no more now", address.ip())
                }),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection to the port.
pub(crate) type Scraper = Guarded<TcpStream, Permit>;

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;
    use vnuma_process::Ledger;

    #[test]
    fn a_client_of_ipv6_has_one_part_whatever_address_it_takes() {
        let of = |text: &str| party(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
    }

    #[tokio::test]
    async fn each_connection_to_the_port_has_an_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let mut port = MetricsListener::new(listener, Tolls::new(Ledger::default()));
        let begin = Instant::now();
        let _client = TcpStream::connect(address).await.expect("connected");
        let (connection, _) = port.accept().await;
        let end = connection.until.expect("an end").deadline();
        assert!((begin + CONNECTION_LIMIT..=Instant::now() + CONNECTION_LIMIT).contains(&end));
    }
}
