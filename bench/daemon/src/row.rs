//! One row of the report: a host with its VMs, brought up, measured and taken down.

use crate::{
    daemon::{Daemon, Found, Usage},
    figures::Row,
    host,
    libvirtd::Libvirtd,
    moves::Moves,
    readers::{Clients, Readers},
    vms::{self, Vms},
};
use std::{
    collections::BTreeMap,
    path::Path,
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use vnuma_api::operation;
use vnuma_bench_figures::stats::Samples;

/// After everything is attached, until it is at rest.
const SETTLE: Duration = Duration::from_secs(6);
/// Moves before those that count.
const WARM_UP: Duration = Duration::from_secs(3);
/// Until the last move has been published.
const DRAIN: Duration = Duration::from_millis(1500);

/// What is measured.
pub struct Plan<'a> {
    pub vnumad: &'a Path,
    /// By what VMs are found: `qmp` or `libvirt`.
    pub backend: &'a str,
    /// By what locations are learned: `bpf` or `poll`.
    pub locations: &'a str,
    pub vms: usize,
    pub moves_per_s: u64,
    pub clients: Clients,
    pub window: Duration,
    pub log: Option<&'a Path>,
}

/// A host with its VMs and a vnumad to which all are attached.
pub struct Host {
    pub daemon: Daemon,
    pub vms: Vms,
    /// It serves as long as the VMs run.
    _libvirtd: Option<Libvirtd>,
    /// How long the attaching took.
    attached: Duration,
    _directory: TempDir,
}

impl Host {
    /// Brings it up. `Err(reason)` in the inner result: the backend does not work here.
    pub fn up(plan: &Plan) -> anyhow::Result<Result<Self, String>> {
        let directory = tempfile::tempdir()?;
        let root = directory.path();
        host::write(root)?;
        let begin = Instant::now();
        let vms = Vms::start(plan.vms, root)?;
        progress(begin, &format!("{} VMs with {} vCPUs run", vms.count(), vms.places().len()));
        let default_log = root.join("vnumad.log");
        let log = plan.log.unwrap_or(&default_log);
        let libvirtd = (plan.backend == "libvirt").then(|| Libvirtd::start(root)).transpose()?;
        libvirtd.as_ref().map(|libvirtd| libvirtd.show(&vms)).transpose()?;
        let found = match &libvirtd {
            Some(libvirtd) => Found::Libvirt(&libvirtd.uri, &libvirtd.states),
            None => Found::Qmp(&vms.directory),
        };
        let daemon = match Daemon::start(plan.vnumad, plan.locations, root, found, log)? {
            Ok(daemon) => daemon,
            Err(reason) => return Ok(Err(reason)),
        };
        let described = daemon.await_vms(plan.vms)?.as_secs_f64();
        progress(begin, &format!("all are known, {described:.1} s after vnumad began to serve"));
        let attach = Instant::now();
        attach_all(&daemon, plan.vms)?;
        let attached = attach.elapsed();
        progress(begin, &format!("all are attached, within {:.1} s", attached.as_secs_f64()));
        thread::sleep(SETTLE);
        Ok(Ok(Self { daemon, vms, _libvirtd: libvirtd, attached, _directory: directory }))
    }
}

pub fn measure(plan: &Plan) -> anyhow::Result<Row> {
    let (begin, load_average) = (Instant::now(), crate::load_average());
    let host = match Host::up(plan)? {
        Ok(host) => host,
        Err(reason) => return Ok(skipped(plan, reason)),
    };
    let (daemon, mut moves) = (&host.daemon, Moves::new(&host.vms));
    let rest = window(daemon, || {
        thread::sleep(plan.window);
        Ok(())
    })?
    .0;
    progress(begin, "measured at rest");
    moves.run(plan.moves_per_s, WARM_UP)?;
    let (alone, (made, took)) = moved(daemon, &mut moves, plan)?;
    let latencies_alone_ms: Samples = moves.latencies_ms.drain(..).collect();
    let unpublished_alone = moves.unpublished;
    progress(begin, "measured with moves");
    let readers = Readers::start(daemon, plan.vms, plan.clients)?;
    thread::sleep(Duration::from_secs(1));
    let (together, _) = moved(daemon, &mut moves, plan)?;
    let answers: Samples = readers.stop()?.into_iter().collect();
    let latencies_ms: Samples = moves.latencies_ms.iter().copied().collect();
    progress(begin, "measured with moves and clients");
    let (descriptors, threads) = daemon.counts()?;
    let per_move = |ns: f64| round(ns / 1e3 / made as f64);
    let since_rest = |ns: f64, rest_ns: f64| per_move(ns - rest_ns * alone.seconds / rest.seconds);
    let by_thread = alone
        .threads
        .iter()
        .map(|(name, ns)| (name.clone(), since_rest(*ns, rest.threads.get(name).copied().unwrap_or(0.0))));
    Ok(Row {
        backend: plan.backend.to_owned(),
        locations: daemon.location_source()?,
        clients: plan.clients,
        vms: plan.vms,
        vcpus: plan.vms * vms::VCPUS,
        moves_per_s: plan.moves_per_s,
        publish_p99_ms_alone: latencies_alone_ms.percentile(99),
        publish_p50_ms: latencies_ms.percentile(50),
        publish_p99_ms: latencies_ms.percentile(99),
        publish_max_ms: latencies_ms.percentile(100),
        moves: made,
        moves_per_s_made: Some(round(made as f64 / took.as_secs_f64())),
        unpublished: moves.unpublished + unpublished_alone,
        cpu_us_per_move: Some(since_rest(alone.cpu_ns, rest.cpu_ns)),
        cpu_us_per_move_by_thread: by_thread.filter(|(_, us)| *us >= 0.1).collect(),
        cpu_share_with_readers: Some(round(together.cpu_ns / 1e9 / together.seconds)),
        answer_p99_ms: answers.percentile(99),
        rest_cpu_share: Some(round(rest.cpu_ns / 1e9 / rest.seconds)),
        wakeups_per_s: Some(round(rest.wakeups / rest.seconds)),
        wakeups_per_s_by_thread: per_second(&rest.woken, rest.seconds),
        rest_cpu_share_by_thread: per_second(&rest.threads, rest.seconds * 1e9),
        rss_mb: Some(round(daemon.rss_mb()?)),
        descriptors,
        threads,
        attach_s: Some(round(host.attached.as_secs_f64())),
        load_average,
        core_waited_share: Some(round(
            together.waited.get("core").copied().unwrap_or(0.0) / 1e9 / together.seconds,
        )),
        skipped: None,
    })
}

/// One that cannot be measured here.
fn skipped(plan: &Plan, reason: String) -> Row {
    Row {
        backend: plan.backend.to_owned(),
        locations: plan.locations.to_owned(),
        clients: plan.clients,
        vms: plan.vms,
        vcpus: plan.vms * vms::VCPUS,
        moves_per_s: plan.moves_per_s,
        skipped: Some(reason),
        ..Row::default()
    }
}

/// Moves within a window, whose latencies are collected anew.
fn moved(daemon: &Daemon, moves: &mut Moves, plan: &Plan) -> anyhow::Result<(Used, (usize, Duration))> {
    thread::sleep(DRAIN);
    moves.forget();
    let outcome = window(daemon, || {
        let begin = Instant::now();
        let made = moves.run(plan.moves_per_s, plan.window)?;
        let took = begin.elapsed();
        thread::sleep(DRAIN);
        Ok((made, took))
    })?;
    moves.collect_all();
    Ok(outcome)
}

pub fn progress(begin: Instant, what: &str) {
    eprintln!("  {:5.1} s: {what}", begin.elapsed().as_secs_f64());
}

fn round(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}

/// One after the other: each answer comes when everything is published to the guest.
pub fn attach_all(daemon: &Daemon, count: usize) -> anyhow::Result<()> {
    let mut client = daemon.connect()?;
    for number in 0..count {
        client.ask::<operation::Attach>(&vms::name(number), &None)?;
    }
    Ok(())
}

/// What was used within a window.
struct Used {
    seconds: f64,
    cpu_ns: f64,
    wakeups: f64,
    threads: BTreeMap<String, f64>,
    woken: BTreeMap<String, f64>,
    waited: BTreeMap<String, f64>,
}

fn window<T>(daemon: &Daemon, act: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(Used, T)> {
    let before = daemon.usage()?;
    let outcome = act()?;
    Ok((between(&before, &daemon.usage()?), outcome))
}

fn between(before: &Usage, after: &Usage) -> Used {
    let rise = |before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>| {
        let rise = |(name, now): (&String, &u64)| {
            (name.clone(), now.saturating_sub(before.get(name).copied().unwrap_or(0)) as f64)
        };
        after.iter().map(rise).collect()
    };
    Used {
        seconds: (after.at - before.at).as_secs_f64(),
        cpu_ns: after.cpu_ns.saturating_sub(before.cpu_ns) as f64,
        wakeups: after.wakeups.saturating_sub(before.wakeups) as f64,
        threads: rise(&before.threads, &after.threads),
        woken: rise(&before.woken, &after.woken),
        waited: rise(&before.waited, &after.waited),
    }
}

/// Without what rounds to nothing.
fn per_second(rises: &BTreeMap<String, f64>, divisor: f64) -> BTreeMap<String, f64> {
    let rounded = rises.iter().map(|(name, rise)| (name.clone(), round(rise / divisor)));
    rounded.filter(|(_, number)| *number > 0.0).collect()
}
