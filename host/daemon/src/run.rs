//! Starts the parts of vnumad, and stops them in order.

use crate::{
    config::Config,
    notify::Notifier,
    server::{
        ApiListener, ApiSocket, Client, Context, MetricsListener, RecordsLock, Rights, group_id,
        metrics_router, router,
    },
    shell::{BackendFactory, Shell, inbox::Inbox},
};
use anyhow::Context as _;
use nix::unistd::Gid;
use std::{
    future::Future,
    net::SocketAddr,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::{oneshot, watch},
    time::timeout,
};
use tracing::{info, warn};
use vnuma_observe::read_host_topology;
use vnuma_process::spawn_worker;

/// Time for requests in progress when the daemon stops.
const GRACE: Duration = Duration::from_secs(2);

/// Runs the daemon until `stop`, and tells the service manager of it. VMs, their channels and what was published to them stay as they are.
pub async fn run(
    config: Config,
    factory: BackendFactory,
    manager: Notifier,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let group = group_id("api.group", config.group.as_deref())?;
    let act_group = group_id("api.act_group", config.act_group.as_deref())?;
    // Users who may act must be able to connect. If both groups are named, the operator has to ensure that.
    let (socket, listener) = ApiSocket::listen(&config.socket, group.or(act_group))?;
    let records = RecordsLock::take(&config.records)?;
    let rights = Rights { uid: nix::unistd::geteuid().as_raw(), group: act_group.map(Gid::as_raw) };
    let host = read_host_topology(&config.root).context("reading the host's topology")?;
    info!(nodes = host.nodes.len(), root = %config.root.display(), "host topology read");
    let inbox = Arc::new(Inbox::new().context("an eventfd")?);
    let context = Context::new(Arc::clone(&inbox), &config);
    let (path, connections) = (config.socket.clone(), config.connections_per_user);
    let metrics = match config.metrics {
        Some(address) => Some(listen_for_metrics(address, &context).await?),
        None => None,
    };
    let nodes = host.nodes.len();
    let shell = Shell::start(config, host, factory, first_epoch(), manager.watchdog(), Arc::clone(&inbox));
    let shell = shell.context("starting to watch")?;
    let (core, core_ended) = start_core(move || shell.run())?;
    let (stopping, stopped) = watch::channel(false);
    let listener = UnixListener::from_std(listener).context("listening")?;
    let listener = ApiListener::new(listener, rights, connections, context.tolls.clone());
    let service = router(context.clone()).into_make_service_with_connect_info::<Client>();
    let until_stopped = |mut stopped: watch::Receiver<bool>| async move {
        // An error says that the sender is gone, which is a stop as well.
        let _ = stopped.changed().await;
    };
    let scraped = metrics.map(|listener| {
        let serve = axum::serve(listener, metrics_router(context));
        tokio::spawn(serve.with_graceful_shutdown(until_stopped(stopped.clone())).into_future())
    });
    let serve = axum::serve(listener, service).with_graceful_shutdown(until_stopped(stopped));
    let mut serve = tokio::spawn(serve.into_future());
    info!(socket = %path.display(), "serving");
    manager.ready(&format!("serving {}, {nodes} host nodes", path.display()));
    tokio::select! {
        () = stop => {}
        // The core ended without a request to stop. Joining its thread gives the reason.
        _ = core_ended => {}
        ended = &mut serve => {
            ended.context("the API's task")?.context("serving the API")?;
        }
    }
    manager.stopping();
    info!("stopping; VMs keep what was published to them");
    inbox.close();
    stopping.send_replace(true);
    let ended = tokio::task::spawn_blocking(move || core.join()).await.context("waiting for the core")?;
    let outcome = ended.map_err(|_| anyhow::anyhow!("the core's thread panicked"))?;
    if timeout(GRACE, serve).await.is_err() {
        warn!("requests in progress were cut off");
    }
    // A scraper that is cut off only loses this scrape.
    scraped.inspect(tokio::task::JoinHandle::abort);
    drop((socket, records));
    Ok(outcome?)
}

async fn listen_for_metrics(address: SocketAddr, context: &Context) -> anyhow::Result<MetricsListener> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("metrics.listen = {address}"))?;
    Ok(MetricsListener::new(listener, context.tolls.clone()))
}

/// The API server runs on the caller's thread and the core on another, so readers cannot delay the core. The second says when it
/// has ended.
fn start_core<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<(JoinHandle<T>, oneshot::Receiver<()>)> {
    let (alive, ended) = oneshot::channel();
    let core = spawn_worker("core", move || {
        // Dropped when the core ends, also by a panic.
        let _alive: oneshot::Sender<()> = alive;
        run()
    });
    Ok((core.context("starting a thread")?, ended))
}

/// The start of this process in milliseconds, which wrap around after seven weeks. A restarted process begins above all
/// epochs of its predecessor, which cannot plug a device every millisecond.
fn first_epoch() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_millis() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_within_a_second_has_other_epochs() {
        let first = first_epoch();
        std::thread::sleep(Duration::from_millis(5));
        assert_ne!(first, first_epoch());
    }
}
