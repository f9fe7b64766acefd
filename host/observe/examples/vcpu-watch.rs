//! Shows where the threads of a process run, or proves on a NUMA host that it is seen.
//!
//! ```text
//! vcpu-watch PID [bpf|poll]     prints an event per line until the process ends
//! vcpu-watch --self-test        needs two nodes with two CPUs each and root
//! ```

#[path = "../tests/taker/mod.rs"]
mod taker;

use std::{
    collections::BTreeSet,
    error::Error,
    fs, io,
    path::Path,
    process::{Child, Command, ExitCode},
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};
use taker::Watching;
use vnuma_model::{CpuSet, HostTopology};
use vnuma_observe::{
    HostWatcher,
    location::{LocationEvent, LocationKind, LocationWatcher, Prefer, monotonic_ns, read_location},
    read_host_topology,
};
use vnuma_process::Workers;

type Outcome<T> = Result<T, Box<dyn Error>>;

const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// No event takes this long, not in an emulated machine either.
const HANG: Duration = Duration::from_secs(600);
/// Time in which an event that should not come would have come.
const SILENCE: Duration = Duration::from_secs(3);
/// How many times that long nothing is to happen.
const WINDOWS: u32 = 2;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args[..] {
        ["--self-test"] => self_test(),
        [pid] => watch(pid, Prefer::Auto),
        [pid, "bpf"] => watch(pid, Prefer::Bpf),
        [pid, "poll"] => watch(pid, Prefer::Poll),
        _ => Err("usage: vcpu-watch PID [bpf|poll] | --self-test".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vcpu-watch: {error}");
            ExitCode::FAILURE
        }
    }
}

fn start(host: &HostTopology, prefer: Prefer) -> Outcome<(Watching, Receiver<LocationEvent>)> {
    let (send, events) = mpsc::channel();
    let watcher = taker::start(&Workers::default(), host, prefer, POLL_INTERVAL, move |event| {
        // Fails once the receiver is gone.
        let _ = send.send(event);
    })?;
    Ok((watcher, events))
}

fn threads_of(pid: i32) -> io::Result<BTreeSet<i32>> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

fn watch(pid: &str, prefer: Prefer) -> Outcome<()> {
    let pid = pid.parse().map_err(|_| format!("`{pid}` is no process number"))?;
    let host = read_host_topology(Path::new("/"))?;
    let (watcher, events) = start(&host, prefer)?;
    let by = watcher.health().by;
    println!("source {} {}", by.in_use, by.why().unwrap_or_default());
    let mut threads = threads_of(pid)?;
    for &tid in &threads {
        watcher.watch(pid, tid)?;
        println!("{tid} {:?}", read_location(&host, pid, tid)?);
    }
    while !threads.is_empty() {
        let event = events.recv()?;
        println!("{event:?} node {:?}", host.node_of_cpu(event.cpu));
        if event.kind == LocationKind::Exited {
            threads.remove(&event.tid);
        }
    }
    Ok(())
}

/// A process that keeps a CPU busy, so that it can be migrated at any time.
struct Spinner(Child);

impl Spinner {
    fn start(cpus: &str) -> Outcome<Self> {
        Ok(Self(Command::new("taskset").args(["-c", cpus, "sh", "-c", "while :; do :; done"]).spawn()?))
    }
    fn pid(&self) -> Outcome<i32> {
        Ok(i32::try_from(self.0.id())?)
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn taskset(pid: i32, cpus: &str) -> Outcome<()> {
    let status = Command::new("taskset").args(["-pc", cpus, &pid.to_string()]).output()?.status;
    if status.success() { Ok(()) } else { Err(format!("taskset -pc {cpus} {pid}: {status}").into()) }
}

/// Events until this kind comes.
fn until(events: &Receiver<LocationEvent>, kind: LocationKind) -> Outcome<Vec<LocationEvent>> {
    let mut seen = Vec::new();
    loop {
        let event =
            events.recv_timeout(HANG).map_err(|error| format!("no {kind:?} after {seen:?}: {error}"))?;
        seen.push(event);
        if event.kind == kind {
            return Ok(seen);
        }
    }
}

/// How often this process's thread of that name went to sleep by itself.
fn sleeps_of(name: &str) -> Outcome<u64> {
    for tid in threads_of(i32::try_from(std::process::id())?)? {
        let status = fs::read_to_string(format!("/proc/self/task/{tid}/status"))?;
        let field = |key| status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim();
        if field("Name:") == name {
            return Ok(field("voluntary_ctxt_switches:").parse()?);
        }
    }
    Err(format!("no thread `{name}`").into())
}

fn expect(true_of_it: bool, what: &str) -> Outcome<()> {
    println!("{} {what}", if true_of_it { "ok  " } else { "FAIL" });
    if true_of_it { Ok(()) } else { Err(what.into()) }
}

fn self_test() -> Outcome<()> {
    let host = read_host_topology(Path::new("/"))?;
    let pairs: Vec<CpuSet> =
        host.nodes.iter().filter(|node| node.cpus.len() >= 2).map(|node| node.cpus.clone()).collect();
    let [home, away, ..] = &pairs[..] else {
        return Err("this host does not have two nodes with two CPUs each".into());
    };
    for (prefer, thread) in [(Prefer::Bpf, "vnuma-bpf"), (Prefer::Poll, "vnuma-poll")] {
        let (watcher, events) = start(&host, prefer)?;
        println!("source {} affinity {}", watcher.health().by.in_use, watcher.health().sees_affinity);
        moves(&host, &watcher, &events, home, away)?;
        if prefer == Prefer::Bpf {
            expect(watcher.reported() > 0, "the BPF programs count their records")?;
            idle(&watcher, &events, thread, home)?;
            hotplug(&host, &watcher, &events, away)?;
        }
        expect(watcher.dropped() == 0, "no event was lost")?;
    }
    Ok(())
}

fn moves(
    host: &HostTopology,
    watcher: &LocationWatcher,
    events: &Receiver<LocationEvent>,
    home: &CpuSet,
    away: &CpuSet,
) -> Outcome<()> {
    let first: Vec<String> = home.iter().map(|cpu| cpu.to_string()).collect();
    let spinner = Spinner::start(&first[0])?;
    let pid = spinner.pid()?;
    // taskset sets its own limits before it becomes the shell.
    while fs::read_to_string(format!("/proc/{pid}/comm"))?.trim() != "sh" {
        thread::sleep(Duration::from_millis(10));
    }
    watcher.watch(pid, pid)?;
    taskset(pid, &first[1])?;
    let mut seen = Vec::new();
    if watcher.health().sees_affinity {
        seen = until(events, LocationKind::AffinityChanged)?;
    }
    thread::sleep(SILENCE);
    seen.extend(events.try_iter());
    let crossed = |event: &LocationEvent| event.kind == LocationKind::Migrated;
    expect(!seen.iter().any(crossed), "a move within the node is not told as one")?;
    let before = monotonic_ns();
    taskset(pid, &away.to_string())?;
    let event = until(events, LocationKind::Migrated)?.pop().ok_or("no event")?;
    expect(event.tid == pid && away.contains(event.cpu), "a move to the other node is told with its CPU")?;
    println!("     told after {} us (taskset's own start included)", (event.time_ns - before) / 1000);
    let location = read_location(host, pid, pid)?;
    expect(Some(location.node) == host.node_of_cpus(away), "its location is the other node")?;
    expect(location.pinned == Some(location.node), "and it is pinned there")?;
    drop(spinner);
    expect(
        until(events, LocationKind::Exited)?.pop().is_some_and(|event| event.tid == pid),
        "its end is told",
    )
}

fn idle(
    watcher: &LocationWatcher,
    events: &Receiver<LocationEvent>,
    name: &str,
    home: &CpuSet,
) -> Outcome<()> {
    let spinner = Spinner::start(&home.to_string())?;
    thread::sleep(Duration::from_millis(500));
    watcher.watch(spinner.pid()?, spinner.pid()?)?;
    settle(events, name)?;
    // With signals blocked and no record, there is nothing that could wake the thread.
    let (reported, sleeps) = (watcher.reported(), sleeps_of(name)?);
    for _ in 0..WINDOWS {
        // Others are migrated all over the host meanwhile.
        for _ in 0..20 {
            Command::new("true").status()?;
        }
        thread::sleep(SILENCE);
    }
    let told = events.try_iter().count();
    let (records, wakeups) = (watcher.reported() - reported, sleeps_of(name)? - sleeps);
    println!("     in {:?}: {records} records, {told} events, {wakeups} wake-ups", SILENCE * WINDOWS);
    expect(records == 0 && told == 0, "a thread that stays on its node makes no record")?;
    expect(wakeups == 0, "and wakes nobody")
}

/// Takes the CPU offline that a thread is confined to. The kernel gives the thread others then, on its own account.
fn hotplug(
    host: &HostTopology,
    watcher: &LocationWatcher,
    events: &Receiver<LocationEvent>,
    cpus: &CpuSet,
) -> Outcome<()> {
    let cpu = cpus.iter().last().ok_or("no CPU")?;
    let online = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    let (send, changed) = mpsc::channel();
    // So rarely that only a message of the kernel can make it look in time.
    let on_change = move |topology| drop(send.send(topology));
    let host_watcher =
        HostWatcher::start(&Workers::default(), Path::new("/"), host.clone(), HANG * 100, on_change)?;
    expect(host_watcher.why_polling().is_none(), "the kernel announces changes of the host")?;
    let spinner = Spinner::start(&cpu.to_string())?;
    let pid = spinner.pid()?;
    while read_location(host, pid, pid)?.cpu != cpu {
        thread::sleep(Duration::from_millis(10));
    }
    watcher.watch(pid, pid)?;
    thread::sleep(SILENCE);
    events.try_iter().for_each(drop);
    fs::write(&online, "0")?;
    let event = until(events, LocationKind::AffinityChanged);
    let topology = changed.recv_timeout(HANG);
    fs::write(&online, "1")?;
    expect(event.is_ok(), "a thread whose CPU went offline has other limits, and that is told")?;
    expect(topology?.node_of_cpu(cpu).is_none(), "the host is told to be without that CPU")?;
    let back = changed.recv_timeout(HANG)?;
    expect(back.node_of_cpu(cpu) == host.node_of_cpu(cpu), "and to have it again")
}

/// Waits until the watcher's thread has taken what came before, which takes it a while on a slow machine.
fn settle(events: &Receiver<LocationEvent>, name: &str) -> Outcome<()> {
    let until = Instant::now() + HANG;
    loop {
        let before = sleeps_of(name)?;
        thread::sleep(SILENCE);
        if events.try_iter().count() == 0 && sleeps_of(name)? == before {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(format!("{name} is busy, though nothing happens").into());
        }
    }
}
