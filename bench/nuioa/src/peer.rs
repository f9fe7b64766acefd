//! On the second server: the other end of workloads on the network, as lines of JSON on standard input say.

use crate::{
    committed::{Kind, PEER_ADDRESS, Way, workload},
    guest::process,
    memcached,
    raw::{Answer, Request},
    sockets,
};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    io::{BufRead, Write},
    path::Path,
    process::Command,
};

const BRIDGE: &str = "lab0";
const CONFIGURATION: &str = "/sys/kernel/config";
const TARGET: &str = "/sys/kernel/config/nvmet";
/// KiB of the RAM disk.
const DISK_KIB: &str = "65536";

/// Answers each request until standard input ends.
pub fn run() -> Result<()> {
    let card = sockets::card_of_bridge(BRIDGE)?;
    join(&card, false)?;
    let mut part = None;
    for line in std::io::stdin().lock().lines() {
        let request = serde_json::from_str(&line?).context("standard input")?;
        let answer: Answer = follow(request, &card, &mut part).map_err(|error| format!("{error:#}"));
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}

fn follow(request: Request, card: &str, part: &mut Option<Part>) -> Result<Option<u64>> {
    match request {
        Request::Start(name) => {
            *part = None;
            join(card, true)?;
            let found = workload(&name).with_context(|| format!("{name}: unknown"))?;
            *part = Some(Part::start(found.kind)?);
            Ok(None)
        }
        Request::Go => part.as_mut().context("nothing was started")?.go().map(|()| None),
        Request::Halt => part.as_mut().context("nothing was started")?.halt(),
        Request::End => {
            *part = None;
            join(card, false)?;
            Ok(None)
        }
    }
}

/// Testpmd's packets have no receiver, so that they come to all. A bridge takes them; a card that is by itself lets its QEMU drop
/// them. It stays up: from a card that is down its QEMU reads nothing, until the socket is full and the first server's waits.
fn join(card: &str, joins: bool) -> Result<()> {
    let master: &[&str] = if joins { &["master", BRIDGE] } else { &["nomaster"] };
    process::run("ip", &[&["link", "set", card], master].concat()).map(drop)
}

/// This end's part of a workload.
enum Part {
    /// It answers.
    Answers(#[expect(dead_code, reason = "it ends when this is dropped")] Option<process::Running>),
    /// A program that loads the guest.
    Loads(process::Running),
    /// A client of memcached.
    Asks(memcached::Client),
}

impl Part {
    fn start(kind: Kind) -> Result<Self> {
        let command = |program: &str, words: Vec<String>| {
            let mut command = Command::new(program);
            command.args(words);
            command
        };
        Ok(match kind {
            Kind::Sockperf { way, pace, bytes } => {
                let client = way == Way::Receive;
                Self::program(way, &mut command("sockperf", sockets::sockperf(client, way, pace, bytes)))?
            }
            Kind::Rdma { verb, way, bytes } => {
                sockets::soft_roce(BRIDGE)?;
                let other = (way == Way::Receive).then_some(crate::committed::GUEST_ADDRESS);
                let (program, words) = sockets::perftest(verb, bytes, other);
                Self::program(way, &mut command(program, words))?
            }
            Kind::Memcached { bytes } => Self::Asks(memcached::Client::start(bytes)?),
            Kind::RemoteDisk { .. } => {
                share_disk()?;
                Self::Answers(None)
            }
            other => bail!("{other:?} has no part here"),
        })
    }

    fn program(way: Way, command: &mut Command) -> Result<Self> {
        Ok(match way {
            Way::Transmit => Self::Answers(Some(process::Running::start(command)?)),
            Way::Receive => Self::Loads(process::Running::stopped(command)?),
        })
    }

    fn go(&mut self) -> Result<()> {
        match self {
            Self::Answers(_) => Ok(()),
            Self::Loads(program) => program.go(),
            Self::Asks(client) => client.go(),
        }
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        match self {
            Self::Answers(_) => Ok(None),
            Self::Loads(program) => program.halt().map(|()| None),
            Self::Asks(client) => client.halt().map(Some),
        }
    }
}

/// A RAM disk by NVMe over TCP, which stays (drivers/nvme/target/configfs.c).
fn share_disk() -> Result<()> {
    if Path::new(TARGET).join("ports/1").exists() {
        return Ok(());
    }
    process::run("modprobe", &["brd", "rd_nr=1", &format!("rd_size={DISK_KIB}")])?;
    process::run("modprobe", &["-a", "nvmet", "nvmet_tcp"])?;
    if !Path::new(TARGET).exists() {
        process::run("mount", &["-t", "configfs", "configfs", CONFIGURATION])?;
    }
    let subsystem = Path::new(TARGET).join("subsystems/ram");
    let port = Path::new(TARGET).join("ports/1");
    fs::create_dir(&subsystem).context("subsystems/ram")?;
    fs::create_dir(subsystem.join("namespaces/1")).context("namespaces/1")?;
    fs::create_dir(&port).context("ports/1")?;
    for (file, text) in [
        (subsystem.join("attr_allow_any_host"), "1"),
        (subsystem.join("namespaces/1/device_path"), "/dev/ram0"),
        (subsystem.join("namespaces/1/enable"), "1"),
        (port.join("addr_trtype"), "tcp"),
        (port.join("addr_adrfam"), "ipv4"),
        (port.join("addr_traddr"), PEER_ADDRESS),
        (port.join("addr_trsvcid"), "4420"),
    ] {
        fs::write(&file, text).with_context(|| format!("{}: writing {text}", file.display()))?;
    }
    std::os::unix::fs::symlink(&subsystem, port.join("subsystems/ram")).context("ports/1/subsystems/ram")
}
