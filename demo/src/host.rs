//! The demonstration from start to end, on the lab server.

use crate::checker::{Checker, GUEST_PROGRAM, Sample};
use crate::device;
use crate::judge::{judge, moves, touches};
use crate::locations::{Clock, Locations, Trace, tsc};
use crate::picture;
use crate::placed::{self, BeforeAfter, Placed};
use crate::record::Kind;
use crate::report::{Configuration, Percentiles, Report, VmReport};
use crate::series::{Move, Series, Touch};
use crate::svg::svg;
use crate::updates::{Update, Updates};
use anyhow::{Context, Result, anyhow, ensure};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use vnuma_scenario::{
    HANG_LIMIT, HostDevice, Nodes, Process, Vm, home_nodes, output, vnumactl, vnumad_logging_to, wait_for,
};

/// A line of progress at least so often, and about so many lines.
const PROGRESS_PERIOD_S: u64 = 2;
const PROGRESS_LINES: u64 = 30;
/// Lines of progress judge one page in so many: the CPUs that they take are those of the VMs.
const PROGRESS_STEP: usize = 16;

#[derive(clap::Args)]
pub struct Arguments {
    /// Seconds of moves and allocation
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(5..=3600))]
    seconds: u64,
    /// Milliseconds between two moves
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    period_ms: u64,
    /// Seed of the sequence of moves
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Guest nodes of each VM; as many as the host has if it is not said
    #[arg(long)]
    nodes: Option<usize>,
    /// vCPUs of each VM; one for each guest node, and at least 4, if it is not said
    #[arg(long)]
    vcpus: Option<usize>,
    /// Memory of each VM, as lab-vm takes it; 192M for each guest node, and at least 768M, if it is not said
    #[arg(long)]
    memory: Option<String>,
    /// Kernel of the guests, as lab-vm takes it
    #[arg(long)]
    kernel: Option<String>,
    /// The guest driver
    #[arg(long, default_value = "/root/vnuma.ko")]
    driver: String,
    /// Where to write the report
    #[arg(long, default_value = "/root/report.json")]
    report: PathBuf,
    /// Where to draw the shares over time, as SVG
    #[arg(long, default_value = "/root/shares.svg")]
    picture: PathBuf,
    /// Where vnumad's log goes
    #[arg(long, default_value = "/root/vnumad.log")]
    log: PathBuf,
    /// Fail unless the run shows what the demonstration claims
    #[arg(long)]
    claim: bool,
    /// Not on the lab server: make no load for the balancer to move vCPUs away from
    #[arg(long)]
    on_this_machine: bool,
    /// Pass no disk through and show nothing of devices: on a server without an IOMMU
    #[arg(long)]
    without_disk: bool,
}

impl Arguments {
    /// No device is taken from a machine that is not the lab's.
    fn takes_disk(&self) -> bool {
        !(self.on_this_machine || self.without_disk)
    }
}

/// How long the program in the static guest may wait for the end of the moves.
const PATIENCE_S: u64 = 60;
const ATTACH_ATTEMPTS: u32 = 5;
const ATTACH_PAUSE: Duration = Duration::from_secs(3);

/// Names of the VMs: the one that vnumad publishes its topology to, and the one that is otherwise identical.
pub const VMS: [&str; 2] = ["vnuma-demo-dynamic", "vnuma-demo-static"];
/// Guest nodes, as many as lab-vm can make.
const MOST_NODES: usize = 16;
const LEAST_VCPUS: usize = 4;
const NODE_MIB: usize = 192;
const LEAST_MIB: usize = 768;
/// By how much the time stamp counter and the kernel's clock may differ in a run, and the times of one change that the kernel's
/// trace and vnumad name, seconds.
const CLOCKS_DIFFER_S: f64 = 0.01;
/// Where the figures come from.
const LAB: &str = "measured in the lab";
const HERE: &str = "measured on this machine";

/// Memory of each VM in MiB, if it is not said.
pub fn memory_mib(nodes: usize) -> usize {
    (nodes * NODE_MIB).max(LEAST_MIB)
}

/// What both VMs are.
struct Shape {
    vcpus: usize,
    /// Arguments of `lab-vm start`.
    arguments: Vec<String>,
}

impl Shape {
    fn new(arguments: &Arguments, homes: usize) -> Self {
        let nodes = arguments.nodes.unwrap_or(homes.min(MOST_NODES));
        let vcpus = arguments.vcpus.unwrap_or(nodes.max(LEAST_VCPUS));
        let memory = format!("{}M", memory_mib(nodes));
        let memory = arguments.memory.as_ref().unwrap_or(&memory);
        let mut words =
            vec![format!("--nodes={nodes}"), format!("--vcpus={vcpus}"), format!("--memory={memory}")];
        words.extend(arguments.kernel.iter().map(|kernel| format!("--kernel={kernel}")));
        Self { vcpus, arguments: words }
    }
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let played = play(arguments);
    if arguments.on_this_machine {
        return played.with_context(|| format!("vnumad's log is {}", arguments.log.display()));
    }
    played
}

fn play(arguments: &Arguments) -> Result<()> {
    let nodes = Nodes::read()?;
    let shape = Shape::new(arguments, home_nodes(Path::new("/"))?.len());
    say("starting vnumad and two identical VMs");
    let (daemon, device, vms) = std::thread::scope(|scope| {
        let daemon = scope.spawn(|| vnumad_logging_to(&arguments.log, &[]));
        let device = scope.spawn(|| arguments.takes_disk().then(device::prepare).transpose());
        let vms = Vm::start_all(&VMS.map(|name| (name, shape.arguments.as_slice())));
        let (daemon, device) = (daemon.join(), device.join());
        (daemon.expect("the thread does not panic"), device.expect("the thread does not panic"), vms)
    });
    let _daemon = daemon?;
    let vms: [Vm; 2] = vms?.try_into().map_err(|_| anyhow!("not two VMs"))?;
    let program = std::env::current_exe()?;
    let program = program.to_str().context("the path of this program is not UTF-8")?;
    std::thread::scope(|scope| {
        let puts = vms.each_ref().map(|vm| scope.spawn(move || vm.put(program, GUEST_PROGRAM)));
        puts.into_iter().try_for_each(|put| put.join().expect("the thread does not panic"))
    })?;
    let device = device.context("a device for a VM")?;
    play_with(arguments, &vms, &nodes, (shape.vcpus, device.as_ref())).map_err(|error| {
        for vm in &vms {
            eprintln!("{}", vm.end_of_console());
        }
        let panicked = vms.iter().find(|vm| vm.has_panicked());
        named(error, panicked.map(|vm| vm.name.as_str()))
    })
}

/// An error of a run with the VM whose kernel has panicked, if there is one.
pub fn named(error: anyhow::Error, panicked: Option<&str>) -> anyhow::Error {
    match panicked {
        Some(vm) => error.context(GuestStopped { vm: vm.to_owned(), how: "its kernel has panicked" }),
        None => error,
    }
}

/// This VM's guest does not work any more.
#[derive(Debug, thiserror::Error)]
#[error("the guest of {vm} has stopped: {how}")]
pub struct GuestStopped {
    vm: String,
    how: &'static str,
}

fn play_with(
    arguments: &Arguments,
    vms: &[Vm; 2],
    nodes: &Nodes,
    (vcpus, device): (usize, Option<&HostDevice>),
) -> Result<()> {
    say("attaching one of them and loading vnuma.ko into its guest");
    attach(&vms[0], &arguments.driver)?;
    let guest_kernel = vms[0].exec(&["uname", "-r"])?.trim().to_owned();

    let observed = Observed::new(arguments, vms, nodes)?;
    let told = device.map(|device| {
        say("the static VM gets a disk that is passed through, and is attached, too");
        device::told(&vms[1], device, || attach(&vms[1], &arguments.driver))
    });
    let configuration = configuration(arguments, nodes, vcpus, guest_kernel)?;
    let report = Report { told: told.transpose()?, ..observed.report(configuration, vms)? };
    write(&arguments.report, &(serde_json::to_string_pretty(&report)? + "\n"))?;
    write(&arguments.picture, &svg(&report)?)?;
    println!("\n{}\n\n{report}", picture::text(&report));
    if arguments.on_this_machine {
        println!("\nreport:       {}", arguments.report.display());
        println!("picture:      {}", arguments.picture.display());
        println!("vnumad's log: {}", arguments.log.display());
    }
    if !arguments.claim {
        return Ok(());
    }
    report.check_claim(arguments.on_this_machine, arguments.takes_disk())
}

/// What was seen of both VMs while their vCPUs were moved.
struct Observed {
    source: &'static str,
    samples: [Vec<Sample>; 2],
    /// What the counters of AutoNUMA rose by.
    autonuma: [BTreeMap<String, u64>; 2],
    updates: Vec<Update>,
    locations: Locations,
    placed: Placed,
    /// Why the policy moved a vCPU.
    cause: Option<String>,
    clock: Clock,
    /// Length of the run.
    seconds: f64,
}

impl Observed {
    fn new(arguments: &Arguments, vms: &[Vm; 2], nodes: &Nodes) -> Result<Self> {
        let updates = Updates::watch()?;
        let mut trace = Trace::start(&[vms[0].threads.clone(), vms[1].threads.clone()].concat())?;
        let before = [autonuma(&vms[0])?, autonuma(&vms[1])?];
        say(&format!("moving vCPUs for {} s while both guests allocate", arguments.seconds));
        let checkers = [
            Checker::start(&vms[0], arguments.seconds)?,
            Checker::start(&vms[1], arguments.seconds + placed::LIMIT_S + PATIENCE_S)?,
        ];
        let clock = Clock::start();
        let mut mover = start_mover(arguments, &[vms[0].pid, vms[1].pid])?;
        let mut progress = Progress::new(&checkers, &updates, nodes, arguments.seconds);
        progress.until(0, &mut trace, || Ok(checkers[0].is_finished()))?;
        let status = mover.0.wait()?;
        ensure!(status.success(), "the mover failed: {status}");
        let after = [autonuma(&vms[0])?, autonuma(&vms[1])?];
        say(&format!("the moves are over, {} places the vCPUs of the static VM", placed::POLICY));
        let mut placed = placed::place(&vms[1], nodes)?;
        progress.until(1, &mut trace, || Ok(checkers[1].is_finished() || placed.seen_enough(&vms[1])?))?;
        let cause = placed::cause(&vms[1])?;
        checkers[1].stop();
        progress.until(1, &mut trace, || Ok(checkers[1].is_finished()))?;
        let [dynamic, static_] = checkers.map(Checker::finish);
        let locations = trace.stop(nodes)?;
        Ok(Self {
            source: if arguments.on_this_machine { HERE } else { LAB },
            samples: [dynamic?, static_?],
            autonuma: [0, 1].map(|vm: usize| rise(&before[vm], &after[vm])),
            updates: updates.finish(&vms[0].name)?,
            locations,
            placed,
            cause,
            seconds: clock.elapsed(),
            clock,
        })
    }

    /// Whether a VM's guest knew of a change of the first time at the second.
    fn told(&self, vm: &Vm) -> impl Fn(u64, u64) -> bool {
        let of_vm = self.updates.iter().filter(|update| update.vm == vm.name);
        let times = |update: &Update| {
            [update.changed_ns, update.acknowledged_ns].map(|ns| self.clock.seconds_of_ns(ns))
        };
        let (updates, seconds) = (of_vm.map(times).collect::<Vec<_>>(), self.clock.seconds());
        move |changed, at| {
            let (changed, at) = (seconds(changed) - CLOCKS_DIFFER_S, seconds(at));
            updates.iter().any(|&[of, acknowledged]| of >= changed && acknowledged + CLOCKS_DIFFER_S <= at)
        }
    }

    /// One VM: its part of the report, its fresh pages and its moves.
    fn of_vm(&self, number: usize, vm: &Vm) -> Result<(VmReport, Vec<Touch>, Vec<Move>)> {
        let (samples, seconds) = (&self.samples[number], self.clock.seconds());
        let report = judge(vm, samples, &self.locations, self.placed.tsc, &self.told(vm))?;
        let report = VmReport { autonuma: self.autonuma[number].clone(), ..report };
        let touches = touches(samples, &self.locations, &seconds);
        Ok((report, touches, moves(&vm.threads, &self.locations, &seconds)))
    }

    fn report(&self, configuration: Configuration, vms: &[Vm; 2]) -> Result<Report> {
        let (dynamic, dynamic_touches, dynamic_moves) = self.of_vm(0, &vms[0])?;
        let (static_, static_touches, static_moves) = self.of_vm(1, &vms[1])?;
        let (threads, seconds) = (&vms[1].threads, self.clock.seconds());
        let placed = BeforeAfter::of(&self.placed, threads, &self.samples[1], &self.locations, seconds)?;
        let latency = |of: fn(&Update) -> f64| Percentiles::of(self.updates.iter().map(of));
        Ok(Report {
            source: self.source,
            series: Series::new(
                self.seconds,
                (&dynamic_touches, dynamic_moves),
                (&static_touches, static_moves),
            ),
            configuration,
            changes: dynamic.vcpu_node_changes,
            updates: self.updates.len(),
            update_latency_ms: latency(|update| update.since_change_ms),
            published_to_acknowledged_ms: latency(|update| update.since_publication_ms),
            dynamic,
            static_,
            placed: BeforeAfter { cause: self.cause.clone(), ..placed },
            told: None,
        })
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

fn say(what: &str) {
    println!("demo: {what}");
}

fn configuration(
    arguments: &Arguments,
    nodes: &Nodes,
    vcpus: usize,
    guest_kernel: String,
) -> Result<Configuration> {
    Ok(Configuration {
        host_nodes: nodes.with_cpus().count(),
        host_cpus: nodes.with_cpus().map(|(_, cpus)| cpus.len()).sum(),
        vcpus,
        seconds: arguments.seconds,
        period_ms: arguments.period_ms,
        seed: arguments.seed,
        host_kernel: output("uname", &["-r"])?.trim().to_owned(),
        guest_kernel,
    })
}

/// Attaches the VM, loads the driver into its guest and waits until the guest has taken its topology over.
fn attach(vm: &Vm, driver: &str) -> Result<()> {
    for attempt in 1.. {
        match vm.attach() {
            Ok(()) => break,
            // A QEMU that gets no CPU for a second: vnumad undoes such an attach, and can do it again.
            Err(error) if attempt < ATTACH_ATTEMPTS && format!("{error:#}").contains("was not answered") => {
                eprintln!("demo: {error:#}; trying again");
                std::thread::sleep(ATTACH_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
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
        .args(arguments.on_this_machine.then_some("--without-load"))
        .stdin(Stdio::null())
        .spawn()
        .context("the mover")?;
    Ok(Process(child))
}

/// Shows how many of the pages since the last line were local.
struct Progress<'a> {
    checkers: &'a [Checker; 2],
    updates: &'a Updates,
    nodes: &'a Nodes,
    start: Instant,
    /// Between two lines.
    period: Duration,
    next: Instant,
    /// Samples of each VM that lines have shown.
    judged: [usize; 2],
    /// The programs end before.
    limit: Duration,
}

impl<'a> Progress<'a> {
    fn new(checkers: &'a [Checker; 2], updates: &'a Updates, nodes: &'a Nodes, seconds: u64) -> Self {
        let (start, period) =
            (Instant::now(), Duration::from_secs((seconds / PROGRESS_LINES).max(PROGRESS_PERIOD_S)));
        let limit = Duration::from_secs(seconds + placed::LIMIT_S) + HANG_LIMIT;
        Self { checkers, updates, nodes, start, period, next: start + period, judged: [0; 2], limit }
    }

    /// Until something is done, for which the program in a VM's guest has to run. It does not where the guest's kernel has stopped.
    fn until(&mut self, vm: usize, trace: &mut Trace, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        while !done()? {
            if self.start.elapsed() > self.limit {
                let how = "its program has not ended long after its time";
                return Err(GuestStopped { vm: VMS[vm].to_owned(), how }.into());
            }
            std::thread::sleep(Duration::from_millis(200));
            if Instant::now() >= self.next {
                self.show(trace)?;
                self.next += self.period;
            }
        }
        Ok(())
    }

    fn show(&mut self, trace: &mut Trace) -> Result<()> {
        // What is touched later is left to the next line: the trace may not say yet where its vCPU was.
        let until = tsc();
        let locations = trace.so_far(self.nodes)?;
        let [dynamic, static_] = [0, 1].map(|vm: usize| {
            let (samples, count) = self.checkers[vm].some(self.judged[vm], PROGRESS_STEP);
            self.judged[vm] = count;
            picture::bar(share(&samples, until, &locations))
        });
        let (elapsed, updates) = (self.start.elapsed().as_secs(), self.updates.count());
        say(&format!("{elapsed:3} s: vnuma {dynamic} static {static_} {updates} updates"));
        Ok(())
    }
}

/// Share of local pages among those fresh ones that were touched until a time; none without pages.
fn share(samples: &[Sample], until_tsc: u64, locations: &Locations) -> Option<f64> {
    let fresh: Vec<_> = samples
        .iter()
        .filter(|sample| sample.kind == Kind::Fresh && sample.after_tsc <= until_tsc)
        .map(|sample| sample.is_local(locations))
        .collect();
    let local = fresh.iter().filter(|local| **local).count();
    (!fresh.is_empty()).then(|| local as f64 / fresh.len() as f64)
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
