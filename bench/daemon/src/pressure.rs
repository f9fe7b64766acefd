//! How fast vnumad publishes to VMs while another party wants as much from it as it can: readers that read nothing, a reader and a
//! QEMU without pause.

use crate::{
    moves::Moves,
    readers::Clients,
    row::{Host, Plan, progress},
    vms::end_with_us,
};
use anyhow::{Context, bail};
use nix::unistd::{Group, User};
use serde::{Deserialize, Serialize};
use std::{
    io::{Read, Write},
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};
use vnuma_api::{Limited, operation};
use vnuma_bench_figures::{
    goals::Limit,
    stats::{Samples, median},
};

const VMS: usize = 200;
const MOVES_PER_S: u64 = 500;
/// How often each party presses.
const TURNS: usize = 3;
/// Moves that count, without pressure and under it.
const WINDOW: Duration = Duration::from_secs(5);
/// From the beginning of the pressure to the moves that count, and from its end to the next ones.
const SETTLE: Duration = Duration::from_secs(2);
const DRAIN: Duration = Duration::from_millis(500);
/// Connections of readers that read nothing.
const SLOW: usize = 64;
/// Connections of a reader without pause.
const FLOODING: usize = 8;

/// Who presses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// Clients that ask, and read no answer.
    SlowReaders,
    /// Clients that ask for what costs most, and ask again at once or go.
    FloodingReader,
    /// The QEMU of a VM, by events.
    FloodingQemu,
}

impl By {
    pub const ALL: [Self; 3] = [Self::SlowReaders, Self::FloodingReader, Self::FloodingQemu];
}

/// What bench/README.md explains. Of each pair the first is without the pressure, the second under it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pressure {
    by: By,
    turns_publish_p99_ms: Vec<[Option<f64>; 2]>,
    publish_p99_ms: [Option<f64>; 2],
    /// Median of the turns' ratios.
    ratio: Option<f64>,
    unpublished: usize,
    limited: Vec<Limited>,
    skipped: Option<String>,
}

impl Pressure {
    fn of(by: By, turns: Vec<[Option<f64>; 2]>, unpublished: usize, limited: Vec<Limited>) -> Self {
        let middle = |side: usize| median(turns.iter().filter_map(|turn| turn[side]));
        let ratios = turns.iter().filter_map(|[quiet, pressed]| Some((*pressed)? / (*quiet)?));
        let ratio = median(ratios);
        let publish_p99_ms = [middle(0), middle(1)];
        Self { by, ratio, publish_p99_ms, turns_publish_p99_ms: turns, unpublished, limited, skipped: None }
    }

    /// Other VMs are published to about as fast as without the pressure.
    pub fn goals(&self) -> [Limit; 2] {
        let named = |name: &str| format!("{:?}: {name}", self.by);
        let unpublished = self.ratio.map(|_| self.unpublished as f64);
        [
            Limit::at_most(named("publish_p99_ms under pressure by that without"), self.ratio, 2.0),
            Limit::at_most(named("unpublished"), unpublished, 0.0),
        ]
    }
}

/// Presses that end when this is dropped.
enum Pressing<'a> {
    Client(Child),
    Qemu(&'a Host),
}

impl Drop for Pressing<'_> {
    fn drop(&mut self) {
        match self {
            Self::Client(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Qemu(host) => host.vms.places()[0].flood.store(0, Ordering::Relaxed),
        }
    }
}

/// Of one host, with each party in turn.
pub fn measure(vnumad: &Path, log: Option<&Path>, smoke: bool) -> anyhow::Result<Vec<Pressure>> {
    let (vms, turns, window) = if smoke { (10, 1, Duration::from_secs(1)) } else { (VMS, TURNS, WINDOW) };
    eprintln!("pressure: {vms} VMs");
    let moves_per_s = MOVES_PER_S.min(10 * vms as u64);
    let clients = Clients::Readers;
    let plan = Plan { vnumad, backend: "qmp", locations: "bpf", vms, moves_per_s, clients, window, log };
    let host = match Host::up(&plan)? {
        Ok(host) => host,
        Err(reason) => {
            let skipped = |by| Pressure {
                skipped: Some(reason.clone()),
                ..Pressure::of(by, Vec::new(), 0, Vec::new())
            };
            return Ok(By::ALL.map(skipped).into());
        }
    };
    // The first VM's QEMU presses, and is not moved.
    let mut moves = Moves::but_first(&host.vms, 1);
    By::ALL.into_iter().map(|by| pressed(&host, &mut moves, &plan, by, turns)).collect()
}

fn pressed(host: &Host, moves: &mut Moves, plan: &Plan, by: By, turns: usize) -> anyhow::Result<Pressure> {
    let (begin, mut measured, mut unpublished) = (Instant::now(), Vec::new(), 0);
    for turn in 1..=turns {
        let quiet = publish_p99_ms(moves, plan)?;
        unpublished += moves.unpublished;
        let pressing = press(host, by)?;
        thread::sleep(SETTLE);
        let under = publish_p99_ms(moves, plan)?;
        unpublished += moves.unpublished;
        drop(pressing);
        thread::sleep(SETTLE);
        measured.push([quiet, under]);
        progress(
            begin,
            &format!("{by:?}, turn {turn} of {turns}: p99 {quiet:.2?} ms, under pressure {under:.2?}"),
        );
    }
    let limited = host.daemon.client()?.ask::<operation::Daemon>((), &())?.limited;
    Ok(Pressure::of(by, measured, unpublished, limited))
}

fn publish_p99_ms(moves: &mut Moves, plan: &Plan) -> anyhow::Result<Option<f64>> {
    moves.forget();
    moves.run(plan.moves_per_s, plan.window)?;
    thread::sleep(DRAIN);
    moves.collect_all();
    Ok(moves.latencies_ms.iter().copied().collect::<Samples>().percentile(99))
}

fn press(host: &Host, by: By) -> anyhow::Result<Pressing<'_>> {
    if by == By::FloodingQemu {
        let wanted = &host.vms.places()[0].flood;
        wanted.store(1, Ordering::Relaxed);
        crate::board::wake_all(wanted);
        return Ok(Pressing::Qemu(host));
    }
    let user = User::from_name("nobody")?.context("no user nobody")?;
    let group = Group::from_name("nogroup")?.context("no group nogroup")?;
    let mut command = Command::new(std::env::current_exe()?);
    let kind = if by == By::SlowReaders { "slow-readers" } else { "flooding-reader" };
    command.args(["press", kind, "--socket"]).arg(&host.daemon.socket).stdin(Stdio::null());
    command.uid(user.uid.as_raw()).gid(group.gid.as_raw());
    end_with_us(&mut command);
    Ok(Pressing::Client(command.spawn().context("starting a client")?))
}

/// What a client is to do.
#[derive(clap::Args)]
pub struct Arguments {
    by: By,
    /// vnumad's API
    #[arg(long)]
    socket: PathBuf,
}

/// Presses until it is killed, whenever no other thread wants the CPU: it stands for clients on other CPUs.
pub fn press_until_killed(arguments: &Arguments) -> anyhow::Result<()> {
    // SAFETY: the call takes numbers. 0 is this process.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
    let connect = || UnixStream::connect(&arguments.socket);
    match arguments.by {
        By::SlowReaders => {
            let mut kept = Vec::new();
            loop {
                kept.retain(|stream: &UnixStream| is_open(stream));
                while kept.len() < SLOW {
                    let Ok(mut stream) = connect() else { break };
                    let asked = (0..64).try_for_each(|_| stream.write_all(request("/v1/vms").as_bytes()));
                    if asked.is_ok() {
                        kept.push(stream);
                    } else {
                        break;
                    }
                }
                thread::sleep(Duration::from_millis(100));
            }
        }
        By::FloodingReader => thread::scope(|scope| {
            for number in 0..FLOODING {
                let paths = ["/v1/capacity".to_owned(), format!("/v1/vms/vm{number:04}/rehome")];
                scope.spawn(move || flood(&connect, &paths[number % 2], number % 4 < 2));
            }
            Ok(())
        }),
        By::FloodingQemu => bail!("a QEMU is no client"),
    }
}

/// Asks again and again. `goes`: it does not wait for the answer.
fn flood(connect: &(dyn Fn() -> std::io::Result<UnixStream> + Sync), path: &str, goes: bool) {
    let mut answer = [0; 4096];
    loop {
        let Ok(mut stream) = connect() else { continue };
        while stream.write_all(request(path).as_bytes()).is_ok() && !goes {
            if !stream.read(&mut answer).is_ok_and(|length| length > 0) {
                break;
            }
        }
    }
}

fn request(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: vnumad\r\n\r\n")
}

/// Has the other end not closed it? Nothing is read.
fn is_open(stream: &UnixStream) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;
    let mut fds = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    matches!(poll(&mut fds, PollTimeout::ZERO), Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_that_of_turns() {
        let turns = vec![[Some(4.0), Some(6.0)], [Some(2.0), Some(8.0)], [Some(4.0), None]];
        let found = Pressure::of(By::SlowReaders, turns, 0, Vec::new());
        assert_eq!((found.ratio, found.publish_p99_ms), (Some(1.5), [Some(4.0), Some(6.0)]));
        assert_eq!(Pressure::of(By::SlowReaders, Vec::new(), 0, Vec::new()).ratio, None);
    }
}
