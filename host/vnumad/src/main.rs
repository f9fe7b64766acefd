//! The host daemon. See docs/vnumad.md.

use anyhow::Context;
use clap::Parser;
use nix::{
    libc,
    sys::{
        signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
        stat::{Mode, umask},
    },
};
use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use vnuma_channel::Channel;
use vnuma_daemon::{BackendFactory, Config, Notifier};
use vnuma_hypervisor::{JoinedBackend, LibvirtBackend, QmpBackend, UnusableBackend, VmBackend};
use vnuma_observe::read_host_topology;

/// Keeps the NUMA topology of running guests correct.
///
/// vnumad finds VMs by their QMP sockets, or asks libvirt for its domains, watches on which host node each vCPU runs, and publishes
/// to attached guests (`vnumactl attach VM`) which guest node each of their vCPUs is on now. It runs in the foreground
/// until SIGTERM or SIGINT; VMs run on without it and keep what was published last.
///
/// For a VM to be found, start QEMU with
///   -qmp unix:/run/vnuma/qmp/NAME.sock,server=on,wait=off
/// and for it to be attachable leave a PCIe root port free:
///   -device pcie-root-port,id=vnuma0,chassis=1
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
struct Arguments {
    /// Configuration file [default: /etc/vnuma/vnumad.toml, if there is one]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Read the host's topology below DIR instead of / (a recorded server)
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Check the configuration and exit
    #[arg(long)]
    check: bool,
    /// Print the host's topology as JSON and exit
    #[arg(long, conflicts_with = "check")]
    print_topology: bool,
    /// Print the description of the API (OpenAPI 3.1) and exit
    #[arg(long, conflicts_with_all = ["check", "print_topology"])]
    print_openapi: bool,
    /// What to log on stderr: error, warn, info, debug, trace, or by module
    #[arg(long, value_name = "FILTER", default_value = "info")]
    log: String,
}

fn main() -> ExitCode {
    match start(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vnumad: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(arguments: Arguments) -> anyhow::Result<()> {
    // Files are for the daemon alone; the socket and its directory get their modes one by one.
    umask(Mode::from_bits_truncate(0o077));
    await_children()?;
    if arguments.print_openapi {
        print!("{}", vnuma_daemon::openapi_document());
        return Ok(());
    }
    let mut config = Config::load(arguments.config.as_deref())?;
    if let Some(root) = arguments.root {
        config.root = root;
    }
    if arguments.check {
        return Ok(());
    }
    if arguments.print_topology {
        let topology = read_host_topology(&config.root)?;
        println!("{}", serde_json::to_string_pretty(&topology)?);
        return Ok(());
    }
    let filter = EnvFilter::try_new(&arguments.log).with_context(|| format!("--log {}", arguments.log))?;
    let colours = io::stderr().is_terminal();
    // The log's reader may be slow or stuck: lines wait in a queue, and too many are dropped.
    let (log, _guard) = tracing_appender::non_blocking(io::stderr());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(log).with_ansi(colours).init();
    raise_file_limit();
    // The API needs no more than this thread. What decides, and what blocks, has threads of its own.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("starting the runtime")?.block_on(serve(config))
}

/// A program that ignores ends of its children leaves that to those that it starts. The kernel would then take away children before they
/// are waited for, with the exit codes that say whether a QEMU has got its channel.
fn await_children() -> anyhow::Result<()> {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: no function of this program handles the signal.
    unsafe { sigaction(Signal::SIGCHLD, &default) }.map(drop).context("SIGCHLD")
}

/// A VM takes some twenty descriptors; the usual limit of 1024 is one for programs that use select.
fn raise_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes to the structure that it is given, which outlives the call.
    let read = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads the structure that it is given, which outlives the call.
    if !read || unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } != 0 {
        let error = io::Error::last_os_error();
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// VMs by their QMP sockets, and the domains of libvirt if it is to be asked. A host without libvirt has none.
fn backends(config: &Config) -> BackendFactory {
    let (directory, sockets) = (config.directory.clone(), config.sockets.clone());
    let limit = config.command_limit;
    let qmp = move || -> Box<dyn VmBackend> {
        Box::new(QmpBackend::new(directory.clone(), sockets.clone()).with_limit(limit))
    };
    if config.libvirt_uris.is_empty() {
        return Arc::new(qmp);
    }
    let (states, sockets) = (config.libvirt_directories.clone(), config.libvirt_sockets.clone());
    match LibvirtBackend::new(&config.libvirt_uris, states, sockets) {
        Ok(libvirt) => {
            let make = || Channel::create(0).map(|(_, plug)| plug).map_err(io::Error::other);
            if let Err(error) = libvirt.serve_arrivals(Box::new(make)) {
                tracing::warn!(%error, "domains of libvirt do not take their channels along to other hosts");
            }
            Arc::new(move || Box::new(JoinedBackend::new(vec![qmp(), Box::new(libvirt.clone())])))
        }
        Err(error) => {
            tracing::warn!(%error, "domains of libvirt are not found (`libvirt.uris`)");
            let unusable = UnusableBackend::new(&config.libvirt_uris, &error.to_string());
            Arc::new(move || Box::new(JoinedBackend::new(vec![qmp(), Box::new(unusable.clone())])))
        }
    }
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let factory = backends(&config);
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    // vnumad also starts where a variable of another manager is left in the environment.
    let manager = Notifier::from_environment().unwrap_or_else(|error| {
        tracing::warn!(%error, "the service manager is told nothing");
        Notifier::default()
    });
    vnuma_daemon::run(config, factory, manager, stop).await
}
