//! Starts the nodes, waits for them, and sums up.

use crate::{
    keys, network, node,
    options::{Arguments, Namespaces, PORT, Transport},
    outcome::{Outcome, Part},
};
use anyhow::{Context, Result, bail};
use std::{
    collections::BTreeSet,
    fs::DirBuilder,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::DirBuilderExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant},
};
use vnuma_dsm_transport::Reserved;

/// Survivors of a node that fails have this long to find out.
const GRACE: Duration = Duration::from_secs(20);
/// And so long to do the work of a node that was lost.
const GRACE_ANEW: Duration = Duration::from_secs(300);

enum Said {
    Line(u8, String),
    End(u8),
}

struct Nodes(Vec<Child>);

impl Drop for Nodes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub fn run(arguments: &Arguments) -> Result<()> {
    if let Some(directory) = &arguments.make_keys {
        return make_keys(directory, arguments.nodes);
    }
    arguments.protocol()?;
    arguments.task()?;
    if let Some((arguments, host)) = arguments.alone()? {
        if arguments.transport() == Transport::TcpTls {
            // Before it waits for the others.
            keys::read(&arguments.directory, host)?;
        }
        let part = node::run_alone(&arguments, host).with_context(|| format!("node {host}"))?;
        return Outcome::new(&arguments, false, Vec::new(), &[part]).print(&arguments);
    }
    let directory = tempfile::tempdir().context("a directory")?;
    let apart = separate(arguments.namespaces)?;
    // Kept until the nodes have ended.
    let (reserved, ports) = match arguments.transport() {
        Transport::Shm | Transport::Rdma => (None, Vec::new()),
        Transport::Tcp | Transport::TcpTls if apart => (None, vec![PORT; arguments.nodes.into()]),
        Transport::Tcp | Transport::TcpTls => {
            let reserved = Reserved::new(Ipv4Addr::LOCALHOST.into(), arguments.nodes.into())?;
            let ports = reserved.addresses().iter().map(SocketAddr::port).collect();
            (Some(reserved), ports)
        }
    };
    if arguments.transport() == Transport::TcpTls {
        keys::make(directory.path(), arguments.nodes).context("keys")?;
    }
    let (sender, receiver) = channel();
    let mut nodes = Nodes(Vec::new());
    for node in 0..arguments.nodes {
        nodes.0.push(start(node, apart, &ports, directory.path(), &sender)?);
    }
    let (parts, lost) = listen(&mut nodes, &receiver, arguments.cut_ms.is_some())?;
    drop(reserved);
    Outcome::new(arguments, apart, lost, &parts).print(arguments)
}

/// Makes keys for nodes on several hosts.
fn make_keys(directory: &Path, nodes: u8) -> Result<()> {
    // A directory that is there may belong to somebody else, or have other keys.
    DirBuilder::new().mode(0o700).create(directory).with_context(|| format!("{}", directory.display()))?;
    keys::make(directory, nodes)?;
    println!("keys of {nodes} nodes: {}", directory.display());
    Ok(())
}

/// True if each node gets a network namespace of its own.
fn separate(wanted: Namespaces) -> Result<bool> {
    match (wanted, network::bridge) {
        (Namespaces::Never, _) => Ok(false),
        (Namespaces::Always, bridge) => {
            bridge().context("--namespaces always: a network namespace cannot be made").map(|()| true)
        }
        (Namespaces::Auto, bridge) => Ok(match bridge() {
            Ok(()) => true,
            Err(error) => {
                eprintln!(
                    "dsm-run: the nodes share this machine's network, as no namespace can be made: {error:#}"
                );
                false
            }
        }),
    }
}

fn start(node: u8, apart: bool, ports: &[u16], directory: &Path, said: &Sender<Said>) -> Result<Child> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .args(["--node", &node.to_string(), "--cluster", &std::process::id().to_string()])
        .args(ports.iter().map(|port| format!("--ports={port}")))
        .args(apart.then_some("--apart"))
        .arg("--directory")
        .arg(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting node {node}"))?;
    eprintln!("dsm-run: node {node} is process {}", child.id());
    let output = child.stdout.take().context("standard output")?;
    let said = said.clone();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let _ = said.send(Said::Line(node, line));
        }
        let _ = said.send(Said::End(node));
    });
    Ok(child)
}

/// What the nodes have done, and which of them were lost while others went `on`.
fn listen(nodes: &mut Nodes, said: &Receiver<Said>, on: bool) -> Result<(Vec<Part>, Vec<u8>)> {
    let (mut done, mut ended): (BTreeSet<u8>, BTreeSet<u8>) = Default::default();
    let mut parts = Vec::new();
    let mut failed: Vec<(u8, String)> = Vec::new();
    let mut failed_at = None;
    while ended.len() < nodes.0.len() {
        match said.recv_timeout(Duration::from_millis(200)) {
            Ok(Said::Line(node, line)) => match line.as_str() {
                "apart" => {
                    let child = &mut nodes.0[usize::from(node)];
                    network::connect(node, child.id())?;
                    let input = child.stdin.as_mut().context("standard input")?;
                    input.write_all(b"connected\n").with_context(|| format!("node {node}"))?;
                }
                "done" => {
                    done.insert(node);
                }
                "again" => {
                    done.remove(&node);
                }
                line => {
                    let part = line.strip_prefix("part ").with_context(|| format!("node {node}: {line}"))?;
                    parts.push(serde_json::from_str(part).with_context(|| format!("node {node}: {part}"))?);
                }
            },
            Ok(Said::End(node)) => {
                ended.insert(node);
                let status = nodes.0[usize::from(node)].wait()?;
                if !status.success() {
                    failed.push((node, format!("node {node}: {status}")));
                    failed_at.get_or_insert_with(Instant::now);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if done.union(&ended).count() == nodes.0.len() {
            nodes.0.iter_mut().for_each(|child| drop(child.stdin.take()));
        }
        let limit = if on { GRACE_ANEW } else { GRACE };
        if failed_at.is_some_and(|at| at.elapsed() > limit) {
            bail!("{}; the others did not end within {limit:?}, and were killed", reasons(&failed));
        }
    }
    // More than half of the nodes go on from their second copies.
    let went_on = on && parts.len() + failed.len() == nodes.0.len() && parts.len() * 2 > nodes.0.len();
    if !failed.is_empty() && !went_on {
        bail!("{}", reasons(&failed));
    }
    Ok((parts, failed.into_iter().map(|(node, _)| node).collect()))
}

fn reasons(failed: &[(u8, String)]) -> String {
    failed.iter().map(|(_, reason)| reason.as_str()).collect::<Vec<_>>().join("; ")
}
