//! Puts the parts together, and takes them apart in order.

use crate::{
    api::{Context, router},
    config::Config,
    daemon::{Daemon, PULSE},
    limits::PerUser,
    listener::ApiListener,
    locations::Locations,
    pulse::Pulse,
    rights::{Peer, Rights},
    socket::{ApiSocket, group_id},
};
use anyhow::Context as _;
use nix::unistd::Gid;
use std::{future::Future, sync::Arc, time::Duration};
use tokio::{
    net::UnixListener,
    sync::{mpsc, watch},
    time::timeout,
};
use tracing::{info, warn};
use vnuma_host::read_host_topology;
use vnuma_hypervisor::VmBackend;

/// Makes backends: one looks for VMs, and each VM's thread has its own, so that none waits for another.
pub type BackendFactory = Arc<dyn Fn() -> Box<dyn VmBackend> + Send + Sync>;

/// Messages that wait for the task that owns the state; senders wait when there are more.
const MESSAGES: usize = 1024;

/// For requests in progress, when the daemon stops.
const GRACE: Duration = Duration::from_secs(2);

/// Runs the daemon until `stop`. VMs, their channels and what was told to them stay as they are.
pub async fn run(
    config: Config,
    factory: BackendFactory,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let group = group_id("api.group", config.group.as_deref())?;
    let act_group = group_id("api.act_group", config.act_group.as_deref())?;
    // Whoever may act has to be able to connect; with both groups named, that is for the operator to see to.
    let (socket, listener) = ApiSocket::listen(&config.socket, group.or(act_group))?;
    let uid = nix::unistd::geteuid().as_raw();
    let rights = Rights { uid, group: act_group.map(Gid::as_raw) };
    let host = read_host_topology(&config.root).context("reading the host's topology")?;
    info!(nodes = host.nodes.len(), root = %config.root.display(), "host topology read");
    let (locations, moved) = Locations::start(&host, &config).context("watching vCPU locations")?;
    let (messages, received) = mpsc::channel(MESSAGES);
    let (stopping, stopped) = watch::channel(false);
    let context = Context {
        messages: messages.clone(),
        root: config.root.clone(),
        act_group: config.act_group.clone(),
        watchers: PerUser::new(config.watchers_per_user),
    };
    let (path, connections) = (config.socket.clone(), config.connections_per_user);
    let daemon = Daemon::new(config, host, locations, factory, messages);
    let pulse = Pulse::start(PULSE).context("a timer")?;
    let daemon = tokio::spawn(daemon.run(pulse, received, moved, stopped.clone()));
    let listener = UnixListener::from_std(listener).context("listening")?;
    let listener = ApiListener::new(listener, rights, connections);
    let service = router(context).into_make_service_with_connect_info::<Peer>();
    let until_stopped = |mut stopped: watch::Receiver<bool>| async move {
        // An error says that the sender is gone, which is a stop as well.
        let _ = stopped.changed().await;
    };
    let serve = axum::serve(listener, service).with_graceful_shutdown(until_stopped(stopped));
    let mut serve = tokio::spawn(serve.into_future());
    info!(socket = %path.display(), "serving");
    tokio::select! {
        () = stop => {}
        ended = &mut serve => {
            ended.context("the API's task")?.context("serving the API")?;
        }
    }
    info!("stopping; VMs keep what they were told");
    stopping.send_replace(true);
    daemon.await.context("the daemon's task")?;
    if timeout(GRACE, serve).await.is_err() {
        warn!("requests in progress were cut off");
    }
    drop(socket);
    Ok(())
}
