//! The demonstration from start to end, on the lab server.

use crate::locations::{Locations, Trace};
use crate::pages::Pages;
use crate::record::{Kind, Record};
use crate::report::{Configuration, Percentiles, Report, VmReport};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vnuma_scenario::{
    HANG_LIMIT, Monitor, Nodes, Process, Vm, output, tsc_offset, vnumactl, vnumad_logging_to, wait_for,
};

const PROGRESS_PERIOD: Duration = Duration::from_secs(10);
const GUEST_PROGRAM: &str = "/root/vnuma-demo";

#[derive(clap::Args)]
pub struct Arguments {
    /// Seconds of moves and allocation
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(5..=3600))]
    seconds: u64,
    /// Milliseconds between two moves
    #[arg(long, default_value_t = 6000, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    period_ms: u64,
    /// Seed of the sequence of moves
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Guest nodes of each VM; as many as the host has if it is not said
    #[arg(long)]
    nodes: Option<usize>,
    /// vCPUs of each VM
    #[arg(long, default_value_t = 4)]
    vcpus: u32,
    /// Memory of each VM, as lab-vm takes it
    #[arg(long, default_value = "768M")]
    memory: String,
    /// Kernel of the guests, as lab-vm takes it
    #[arg(long)]
    kernel: Option<String>,
    /// The guest driver
    #[arg(long, default_value = "/root/vnuma.ko")]
    driver: String,
    /// Where to write the report
    #[arg(long, default_value = "/root/report.json")]
    report: String,
    /// Where vnumad's log goes
    #[arg(long, default_value = "/root/vnumad.log")]
    log: PathBuf,
}

/// Pages at the end of a stay that say whether the guest has followed.
const LAST_PAGES: usize = 64;
/// How many of them must be local. Not all: AutoNUMA may be migrating one.
const LAST_LOCAL_PAGES: usize = 60;

/// What the checker knows of one page.
struct Sample {
    kind: Kind,
    tid: i32,
    before_tsc: u64,
    after_tsc: u64,
    node: Option<u32>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let nodes = Nodes::read()?;
    let guest_nodes = arguments.nodes.unwrap_or_else(|| nodes.with_cpus().count());
    let shape = ["--nodes", &guest_nodes.to_string(), "--vcpus", &arguments.vcpus.to_string()]
        .into_iter()
        .chain(["--memory", &arguments.memory])
        .chain(arguments.kernel.iter().flat_map(|kernel| ["--kernel", kernel]))
        .map(str::to_owned)
        .collect::<Vec<_>>();
    say("starting vnumad and two equal VMs");
    let _daemon = vnumad_logging_to(&arguments.log, &[])?;
    let vms = Vm::start_all(&[("dynamic", &shape), ("static", &shape)])?;
    let [dynamic, static_]: [Vm; 2] = vms.try_into().map_err(|_| anyhow!("not two VMs"))?;
    for vm in [&dynamic, &static_] {
        vm.put(&std::env::current_exe()?.to_string_lossy(), GUEST_PROGRAM)?;
    }
    attach(&dynamic, &arguments.driver)?;
    let guest_kernel = dynamic.exec(&["uname", "-r"])?.trim().to_owned();

    let updates = Updates::watch()?;
    let trace = Trace::start(&[dynamic.threads.clone(), static_.threads.clone()].concat())?;
    let before = [autonuma(&dynamic)?, autonuma(&static_)?];
    say(&format!("moving vCPUs for {} s while both guests allocate", arguments.seconds));
    let checkers = [Checker::start(&dynamic, arguments)?, Checker::start(&static_, arguments)?];
    let mut mover = start_mover(arguments, &[dynamic.pid, static_.pid])?;
    let samples = follow(checkers, &updates)?;
    let status = mover.0.wait()?;
    ensure!(status.success(), "the mover failed: {status}");
    let locations = trace.stop()?;
    let after = [autonuma(&dynamic)?, autonuma(&static_)?];

    let [dynamic_samples, static_samples] = samples;
    let mut dynamic_report = judge(&dynamic, &dynamic_samples, &locations, &nodes)?;
    dynamic_report.autonuma = rise(&before[0], &after[0]);
    let mut static_report = judge(&static_, &static_samples, &locations, &nodes)?;
    static_report.autonuma = rise(&before[1], &after[1]);
    let events = updates.finish(&dynamic.name)?;
    let report = Report {
        source: "measured in the lab",
        configuration: configuration(arguments, &nodes, guest_kernel)?,
        changes: dynamic_report.vcpu_node_changes,
        updates: events.len(),
        update_latency_ms: Percentiles::of(events.iter().map(|event| event.since_change_ms).collect()),
        published_to_acknowledged_ms: Percentiles::of(
            events.iter().map(|event| event.since_publication_ms).collect(),
        ),
        dynamic: dynamic_report,
        static_: static_report,
    };
    std::fs::write(&arguments.report, serde_json::to_string_pretty(&report)? + "\n")
        .with_context(|| arguments.report.clone())?;
    println!("\n{report}");
    Ok(())
}

fn say(what: &str) {
    println!("demo: {what}");
}

fn configuration(arguments: &Arguments, nodes: &Nodes, guest_kernel: String) -> Result<Configuration> {
    Ok(Configuration {
        host_nodes: nodes.with_cpus().count(),
        host_cpus: nodes.with_cpus().map(|(_, cpus)| cpus.len()).sum(),
        vcpus: arguments.vcpus as usize,
        seconds: arguments.seconds,
        period_ms: arguments.period_ms,
        seed: arguments.seed,
        host_kernel: output("uname", &["-r"])?.trim().to_owned(),
        guest_kernel,
    })
}

/// Attaches the VM, loads the driver into its guest and waits until the guest has taken its topology over.
fn attach(vm: &Vm, driver: &str) -> Result<()> {
    say("attaching one of them and loading vnuma.ko into its guest");
    vm.attach()?;
    vm.put(driver, "/root/vnuma.ko")?;
    vm.exec(&["insmod", "/root/vnuma.ko"])?;
    wait_for("the guest to take the topology over", HANG_LIMIT, || {
        let vms = vnumactl(&["list"])?;
        let entry = vms.as_array().and_then(|vms| vms.iter().find(|entry| entry["name"] == *vm.name));
        let vcpus = entry.and_then(|entry| entry["vcpus"].as_array()).context("vnumactl list: no vcpus")?;
        Ok(!vcpus.is_empty() && vcpus.iter().all(|vcpu| vcpu["state"] == "true"))
    })
}

fn start_mover(arguments: &Arguments, pids: &[i32]) -> Result<Process> {
    let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
    let child = Command::new(std::env::current_exe()?)
        .args(["move", "--pids", &pids.join(",")])
        .args(["--seconds", &arguments.seconds.to_string()])
        .args(["--period-ms", &arguments.period_ms.to_string()])
        .args(["--seed", &arguments.seed.to_string()])
        .stdin(Stdio::null())
        .spawn()
        .context("the mover")?;
    Ok(Process(child))
}

/// Reads what one guest reports and looks its pages up.
struct Checker {
    thread: JoinHandle<Result<Vec<Sample>>>,
    pages: Arc<AtomicUsize>,
}

impl Checker {
    fn start(vm: &Vm, arguments: &Arguments) -> Result<Self> {
        let offset = tsc_offset(vm)?;
        let mut lookup = Pages::new(vm.pid, Monitor::connect(&vm.monitor())?);
        let mut program = vm.spawn(&[GUEST_PROGRAM, "touch", "--seconds", &arguments.seconds.to_string()])?;
        let answers = program.0.stdin.take().context("no standard input")?;
        let records = BufReader::new(program.0.stdout.take().context("no standard output")?);
        let (threads, name) = (vm.threads.clone(), vm.name.clone());
        let pages = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&pages);
        let thread = std::thread::spawn(move || {
            let samples = check_records(records, answers, &threads, offset, &mut lookup, &count)
                .with_context(|| format!("looking up the pages of {name}"))?;
            let status = program.0.wait()?;
            ensure!(status.success(), "the program in {name} failed: {status}");
            Ok(samples)
        });
        Ok(Self { thread, pages })
    }
}

fn check_records(
    mut records: BufReader<ChildStdout>,
    mut answers: ChildStdin,
    threads: &[i32],
    tsc_offset: u64,
    lookup: &mut Pages,
    count: &AtomicUsize,
) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    let mut due = Vec::new();
    while let Some(record) = Record::read(&mut records)? {
        let tid = *threads.get(record.apic_id as usize).with_context(|| {
            format!("the guest names APIC id {}, the VM has {} vCPUs", record.apic_id, threads.len())
        })?;
        let gpas: Vec<u64> = record.pages.iter().map(|page| page.gpa).collect();
        let nodes = lookup.nodes(&gpas)?;
        samples.extend(record.pages.iter().zip(nodes).map(|(page, node)| Sample {
            kind: record.kind,
            tid,
            before_tsc: page.before_tsc.wrapping_sub(tsc_offset),
            after_tsc: page.after_tsc.wrapping_sub(tsc_offset),
            node,
        }));
        if record.kind == Kind::Fresh {
            count.fetch_add(gpas.len(), Ordering::Relaxed);
            due.extend(record.apic_id.to_le_bytes());
        }
        // Answers go together, as each write to a guest is dear; none waits for a record that is not there yet.
        if records.buffer().is_empty() {
            // At its end the guest program no longer reads answers.
            let _ = answers.write_all(&due);
            due.clear();
        }
    }
    Ok(samples)
}

/// Shows progress until both checkers are done.
fn follow(checkers: [Checker; 2], updates: &Updates) -> Result<[Vec<Sample>; 2]> {
    let start = Instant::now();
    let mut next = start + PROGRESS_PERIOD;
    while !checkers.iter().all(|checker| checker.thread.is_finished()) {
        std::thread::sleep(Duration::from_millis(200));
        if Instant::now() >= next {
            let [dynamic, static_] = [0, 1].map(|vm: usize| checkers[vm].pages.load(Ordering::Relaxed));
            let updates = updates.count();
            let seconds = start.elapsed().as_secs();
            say(&format!("{seconds:3} s: {updates} updates, {dynamic} + {static_} pages looked up"));
            next += PROGRESS_PERIOD;
        }
    }
    let [dynamic, static_] = checkers.map(|checker| checker.thread.join().expect("a checker panicked"));
    Ok([dynamic?, static_?])
}

/// Compares each page's node with that of the vCPU that touched it.
fn judge(vm: &Vm, samples: &[Sample], locations: &Locations, nodes: &Nodes) -> Result<VmReport> {
    let mut report = VmReport::default();
    let (mut local, mut resident_local) = (0usize, 0usize);
    for sample in samples {
        let node_at = |tsc| locations.cpu(sample.tid, tsc).and_then(|cpu| nodes.of_cpu(cpu));
        let (before, after) = (node_at(sample.before_tsc), node_at(sample.after_tsc));
        ensure!(before.is_some() && after.is_some(), "no location of thread {} in the trace", sample.tid);
        // A page that could not be looked up counts as one that is not local.
        let is_local = sample.node == before && sample.node == after;
        report.pages_not_found += usize::from(sample.node.is_none());
        match sample.kind {
            Kind::Fresh => {
                report.pages += 1;
                report.pages_in_transit += usize::from(before != after);
                local += usize::from(is_local);
            }
            Kind::Resident => {
                report.resident_pages += 1;
                resident_local += usize::from(is_local);
            }
        }
    }
    if report.pages == 0 || report.resident_pages == 0 {
        bail!("the guest of {} reported no pages", vm.name);
    }
    (report.stays, report.stays_followed) = stays(vm, samples, locations, nodes);
    report.local_share = local as f64 / report.pages as f64;
    report.resident_local_share = resident_local as f64 / report.resident_pages as f64;
    report.vcpu_node_changes = vm.threads.iter().map(|&tid| locations.node_changes(tid, nodes)).sum();
    Ok(report)
}

/// Stays of vCPUs on a host node, and those at whose end fresh pages were local. Short ones, in which too few pages
/// were touched, are left out. Time does not count: a guest that has to wait for a CPU follows late, but it follows.
fn stays(vm: &Vm, samples: &[Sample], locations: &Locations, nodes: &Nodes) -> (usize, usize) {
    let (mut stays, mut followed) = (0, 0);
    for &tid in &vm.threads {
        let mut fresh: Vec<_> =
            samples.iter().filter(|sample| sample.kind == Kind::Fresh && sample.tid == tid).collect();
        fresh.sort_unstable_by_key(|sample| sample.before_tsc);
        let node_at = |tsc| locations.cpu(tid, tsc).and_then(|cpu| nodes.of_cpu(cpu));
        let placed = fresh.iter().map(|sample| (node_at(sample.before_tsc), sample.node));
        let (more, of_them) = count_stays(placed);
        stays += more;
        followed += of_them;
    }
    (stays, followed)
}

/// The same from (node of the vCPU, node of the page) of one vCPU's pages in the order that they were touched in.
fn count_stays(pages: impl Iterator<Item = (Option<u32>, Option<u32>)>) -> (usize, usize) {
    let (mut stays, mut followed) = (0, 0);
    let pages: Vec<_> = pages.collect();
    for stay in pages.chunk_by(|one, next| one.0 == next.0).filter(|stay| stay.len() >= LAST_PAGES) {
        let last = &stay[stay.len() - LAST_PAGES..];
        stays += 1;
        let local = last.iter().filter(|(vcpu, page)| vcpu.is_some() && vcpu == page).count();
        followed += usize::from(local >= LAST_LOCAL_PAGES);
    }
    (stays, followed)
}

/// Counters of the guest kernel's AutoNUMA: (name, value).
fn autonuma(vm: &Vm) -> Result<Vec<(String, u64)>> {
    let text = vm.exec(&["cat", "/proc/vmstat"])?;
    let counters = text.lines().filter_map(|line| line.split_once(' '));
    Ok(counters
        .filter(|(name, _)| name.starts_with("numa_hint_faults") || *name == "numa_pages_migrated")
        .filter_map(|(name, value)| Some((name.to_owned(), value.trim().parse().ok()?)))
        .collect())
}

fn rise(before: &[(String, u64)], after: &[(String, u64)]) -> BTreeMap<String, u64> {
    let before: BTreeMap<_, _> = before.iter().cloned().collect();
    let rise = |(name, value): &(String, u64)| {
        (name.clone(), value.saturating_sub(before.get(name).copied().unwrap_or_default()))
    };
    after.iter().map(rise).collect()
}

/// A generation that a guest took over.
struct Update {
    vm: String,
    since_change_ms: f64,
    since_publication_ms: f64,
}

/// Collects what `vnumactl watch` prints.
struct Updates {
    process: Process,
    events: Arc<Mutex<Vec<Value>>>,
    thread: JoinHandle<()>,
}

impl Updates {
    fn watch() -> Result<Self> {
        let child = Command::new("vnumactl")
            .args(["watch", "--json"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("vnumactl watch")?;
        let mut process = Process(child);
        let lines = BufReader::new(process.0.stdout.take().context("no standard output")?).lines();
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&events);
        let thread = std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Ok(event) = serde_json::from_str::<Value>(&line)
                    && event["event"] == "acknowledged"
                {
                    seen.lock().expect("poisoned").push(event);
                }
            }
        });
        Ok(Self { process, events, thread })
    }

    fn count(&self) -> usize {
        self.events.lock().expect("poisoned").len()
    }

    fn finish(self, vm: &str) -> Result<Vec<Update>> {
        drop(self.process);
        self.thread.join().expect("the reader panicked");
        let events = self.events.lock().expect("poisoned");
        let updates = events.iter().map(Update::read).collect::<Result<Vec<_>>>()?;
        Ok(updates.into_iter().filter(|update| update.vm == vm).collect())
    }
}

impl Update {
    fn read(event: &Value) -> Result<Self> {
        let field =
            |name: &str| event[name].as_u64().with_context(|| format!("event without {name}: {event}"));
        let acknowledged = field("acknowledged_ns")?;
        let since = |name: &str| -> Result<f64> {
            let since = acknowledged.checked_sub(field(name)?);
            Ok(since.with_context(|| format!("acknowledged before {name}: {event}"))? as f64 / 1e6)
        };
        Ok(Self {
            vm: event["vm"].as_str().unwrap_or_default().to_owned(),
            since_change_ms: since("changed_ns")?,
            since_publication_ms: since("published_ns")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stay_counts_by_its_last_pages() {
        let pages = |vcpu, page, count| std::iter::repeat_n((Some(vcpu), Some(page)), count);
        let late = pages(0, 0, 64).chain(pages(1, 0, 5000)).chain(pages(1, 1, 64));
        assert_eq!(count_stays(late), (2, 2));
        let never = pages(0, 0, 64).chain(pages(1, 0, 5000)).chain(pages(0, 0, 64));
        assert_eq!(count_stays(never), (3, 2));
        let too_short = pages(0, 0, 64).chain(pages(1, 0, 63)).chain(pages(2, 0, 4)).chain(pages(2, 2, 60));
        assert_eq!(count_stays(too_short), (2, 2));
        assert_eq!(count_stays(pages(0, 1, 0)), (0, 0));
        assert_eq!(count_stays(std::iter::repeat_n((None, None), 64)), (1, 0));
    }
}
