//! Starts the nodes, waits for them, and sums up.

use crate::options::{Arguments, Transport};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::{
    io::{BufRead, BufReader},
    net::{Ipv4Addr, TcpListener},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};
use vnuma_dsm_node::Stats;

/// Survivors of a node that fails have this long to find out.
const GRACE: Duration = Duration::from_secs(20);

#[derive(Serialize)]
struct Outcome {
    program: String,
    nodes: u8,
    /// The slowest node.
    seconds: f64,
    stats: Stats,
}

enum Said {
    Line(String),
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
    arguments.protocol()?;
    eprintln!(
        "dsm-run: the nodes are plain processes on this machine, without network namespaces of their own"
    );
    let directory = tempfile::tempdir().context("a directory")?;
    let ports = match arguments.transport {
        Transport::Shm => Vec::new(),
        Transport::Tcp => free_ports(arguments.nodes)?,
    };
    let (sender, receiver) = channel();
    let mut nodes = Nodes(Vec::new());
    for node in 0..arguments.nodes {
        let mut child = Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .args(["--node", &node.to_string(), "--cluster", &std::process::id().to_string()])
            .args(ports.iter().map(|port| format!("--ports={port}")))
            .arg("--directory")
            .arg(directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting node {node}"))?;
        eprintln!("dsm-run: node {node} is process {}", child.id());
        let output = child.stdout.take().context("standard output")?;
        let sender = sender.clone();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(Said::Line(line));
            }
            let _ = sender.send(Said::End(node));
        });
        nodes.0.push(child);
    }
    let outcome = listen(arguments, &mut nodes, &receiver)?;
    report(arguments, &outcome)
}

fn free_ports(count: u8) -> Result<Vec<u16>> {
    // All at once, so that they differ; free again when the nodes listen.
    let sockets: Vec<_> =
        (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<_, _>>()?;
    sockets.iter().map(|socket| Ok(socket.local_addr()?.port())).collect()
}

fn listen(arguments: &Arguments, nodes: &mut Nodes, said: &Receiver<Said>) -> Result<Outcome> {
    let program = format!("{:?}", arguments.program);
    let mut outcome = Outcome { program, nodes: arguments.nodes, seconds: 0.0, stats: Stats::default() };
    let (mut done, mut ended) = (0, 0);
    let mut failed: Vec<String> = Vec::new();
    let mut failed_at = None;
    while ended < arguments.nodes {
        match said.recv_timeout(Duration::from_millis(200)) {
            Ok(Said::Line(line)) => {
                if let Some(seconds) = line.strip_prefix("done ") {
                    outcome.seconds = outcome.seconds.max(seconds.parse()?);
                    done += 1;
                } else if let Some(stats) = line.strip_prefix("stats ") {
                    outcome.stats.merge(&serde_json::from_str(stats)?);
                }
                if done == arguments.nodes {
                    nodes.0.iter_mut().for_each(|child| drop(child.stdin.take()));
                }
            }
            Ok(Said::End(node)) => {
                ended += 1;
                let status = nodes.0[usize::from(node)].wait()?;
                if !status.success() {
                    failed.push(format!("node {node}: {status}"));
                    failed_at.get_or_insert_with(Instant::now);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if failed_at.is_some_and(|at| at.elapsed() > GRACE) {
            bail!("{}; the others did not end within {GRACE:?}, and were killed", failed.join("; "));
        }
    }
    if !failed.is_empty() {
        bail!("{}", failed.join("; "));
    }
    Ok(outcome)
}

fn report(arguments: &Arguments, outcome: &Outcome) -> Result<()> {
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(outcome)?);
        return Ok(());
    }
    let Outcome { program, nodes, seconds, stats } = outcome;
    println!("{program} on {nodes} nodes: right, {seconds:.3} s");
    if arguments.stats {
        let mean = |ns: u64, count: u64| ns as f64 / 1000.0 / count.max(1) as f64;
        for (name, faults) in [("read", &stats.reads), ("write", &stats.writes)] {
            println!("{name} faults: {}, mean {:.1} us", faults.count, mean(faults.waited_ns, faults.count));
        }
        println!(
            "messages: {}, {} bytes; {} pages and {} differences",
            stats.messages, stats.bytes, stats.whole_pages, stats.deltas
        );
        let ms = |ns: u64| ns as f64 / 1e6;
        let phases = &stats.phases;
        println!(
            "time of the shards' threads in ms: waiting {:.1}, protocol {:.1}, pages {:.1}, network {:.1}",
            ms(phases.wait_ns),
            ms(phases.protocol_ns),
            ms(phases.pages_ns),
            ms(phases.network_ns)
        );
        for (page, faults) in stats.hottest(10) {
            println!("page {page}: {faults} faults");
        }
    }
    Ok(())
}
