//! Latencies of one guest kernel: vCPUs are moved one at a time by a process that vnumad knows nothing of, and each move is
//! timed from there to a program of the guest that sees the new generation. After each the guest is checked.

use crate::clock::{Line, Moment, monotonic_ns};
use crate::figures::Percentiles;
use crate::floor::{self, Doorbell, Floor};
use crate::guest::Sighting;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use vnuma_scenario::{HANG_LIMIT, Nodes, Process, Vm, tsc_offset, vnumactl, vnumad};

/// Between two moves: what the last one and its check stirred up has settled. Also between two of what the floor is made of,
/// because CPUs that have slept for longer are slower.
pub const SETTLE: Duration = Duration::from_millis(400);
/// Moves between two times that the guest's own rebuilds are timed. Even, as each pair of rebuilds undoes itself.
const BLOCK: usize = 8;
const VCPUS: usize = 4;
const PROGRAM: &str = "/root/bench-topology";
const CHECKER: &str = "/root/vnuma-check";

#[derive(clap::Args)]
pub struct Arguments {
    /// Kernel of the guest, as lab-vm takes it
    #[arg(long)]
    kernel: String,
    /// The driver for it
    #[arg(long)]
    driver: String,
    /// Moves while the guest is idle
    #[arg(long, default_value_t = 50)]
    idle: usize,
    /// Moves while all its vCPUs are busy
    #[arg(long, default_value_t = 30)]
    loaded: usize,
}

/// Parts of the way from a move to a program of the guest, in milliseconds.
#[derive(Serialize)]
pub struct Latencies {
    /// The whole: move to program.
    #[serde(flatten)]
    whole: Percentiles,
    phases_ms: Phases,
}

#[derive(Serialize)]
struct Phases {
    /// The move's system call begins, to: vnumad published and rang.
    moved_to_published: Percentiles,
    /// To: the guest's interrupt handler runs.
    published_to_interrupt: Percentiles,
    /// To: the kernel's maps agree.
    interrupt_to_kernel: Percentiles,
    /// To: a program has woken up and read the generation.
    kernel_to_program: Percentiles,
}

#[derive(Serialize)]
struct Report {
    release: String,
    update_latency_ms: Latencies,
    update_latency_ms_loaded: Latencies,
    floor_ms: Floor,
    floor_ms_loaded: Floor,
    /// Checks of the guest after a move that found anything wrong.
    wrong_states: usize,
    /// How many checks there were.
    checked: usize,
    /// What a look at the generation costs in this guest.
    cost: serde_json::Value,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let _daemon = vnumad(&[])?;
    let vm = start("bench", &arguments.kernel, &arguments.driver)?;
    let cost = serde_json::from_str(&vm.exec(&[PROGRAM, "cost"])?).context("bench-topology cost")?;

    let mut bench = Bench::start(&vm, Nodes::read()?)?;
    let (idle, idle_rebuilds) = bench.series("idle", arguments.idle)?;
    let load = busy(&vm)?;
    let (loaded, loaded_rebuilds) = bench.series("loaded", arguments.loaded)?;
    drop(load);
    let (wrong_states, map) = bench.end();
    let [floor_ms, floor_ms_loaded] = floors(&vm, &map, [&idle_rebuilds, &loaded_rebuilds])?;
    let report = Report {
        release: vm.exec(&["uname", "-r"])?.trim().to_owned(),
        update_latency_ms: latencies(&idle)?,
        update_latency_ms_loaded: latencies(&loaded)?,
        floor_ms,
        floor_ms_loaded,
        wrong_states,
        checked: idle.len() + loaded.len(),
        cost,
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// A VM with a vCPU on each of the server's nodes, as this part and the replug have it.
pub fn shape(kernel: &str) -> Result<Vec<String>> {
    let nodes = Nodes::read()?.with_cpus().count().to_string();
    let vcpus = VCPUS.to_string();
    Ok(["--nodes", &nodes, "--vcpus", &vcpus, "--memory", "1536M", "--kernel", kernel]
        .map(str::to_owned)
        .into())
}

/// Boots that VM and has its guest follow. vnumad must run.
pub fn start(name: &str, kernel: &str, driver: &str) -> Result<Vm> {
    let vm = Vm::start(name, &shape(kernel)?)?;
    vm.put(driver, "/root/vnuma.ko")?;
    vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
    vm.put(CHECKER, CHECKER)?;
    vm.exec(&["insmod", "/root/vnuma.ko"])?;
    vm.attach()?;
    vm.await_driver()?;
    Ok(vm)
}

/// All vCPUs are busy until it is dropped.
fn busy(vm: &Vm) -> Result<Process> {
    vm.spawn(&["stress-ng", "--quiet", "--cpu", &VCPUS.to_string(), "--vm", "1", "--vm-bytes", "32M"])
}

/// Idle and loaded, after vnumad's channel has gone.
fn floors(vm: &Vm, map: &[u32], [idle, loaded]: [&[f64]; 2]) -> Result<[Floor; 2]> {
    vnumactl(&["detach", &vm.name])?;
    let mut doorbell = Doorbell::attach(vm, map)?;
    let idle = floor::measure(&mut doorbell, idle).context("floor, idle")?;
    let load = busy(vm)?;
    let loaded = floor::measure(&mut doorbell, loaded).context("floor, loaded")?;
    drop(load);
    Ok([idle, loaded])
}

/// One move, in readings of the host's time stamp counter; [`Line`] turns differences into nanoseconds.
pub struct Trip {
    line: Line,
    moved: u64,
    published: u64,
    interrupt: u64,
    applied: u64,
    seen: u64,
}

pub fn latencies(trips: &[Trip]) -> Result<Latencies> {
    let of = |from: fn(&Trip) -> u64, to: fn(&Trip) -> u64| {
        Percentiles::of_ns(trips.iter().map(|trip| trip.line.between(from(trip), to(trip))))
            .context("no moves")
    };
    Ok(Latencies {
        whole: of(|trip| trip.moved, |trip| trip.seen)?,
        phases_ms: Phases {
            moved_to_published: of(|trip| trip.moved, |trip| trip.published)?,
            published_to_interrupt: of(|trip| trip.published, |trip| trip.interrupt)?,
            interrupt_to_kernel: of(|trip| trip.interrupt, |trip| trip.applied)?,
            kernel_to_program: of(|trip| trip.applied, |trip| trip.seen)?,
        },
    })
}

/// An `acknowledged` event of vnumad.
#[derive(Deserialize)]
struct Acknowledged {
    generation: String,
    published_ns: u64,
}

pub struct Bench<'vm> {
    vm: &'vm Vm,
    nodes: Nodes,
    hosts: Vec<u32>,
    places: Vec<usize>,
    /// What the guest's program prints.
    sightings: Receiver<String>,
    /// What vnumad says.
    events: Receiver<String>,
    published: HashMap<String, u64>,
    host_start: Moment,
    guest_start: Moment,
    offset: u64,
    wrong: usize,
    _processes: [Process; 2],
}

impl<'vm> Bench<'vm> {
    /// Starts the guest's program and watches vnumad.
    pub fn start(vm: &'vm Vm, nodes: Nodes) -> Result<Self> {
        let hosts: Vec<u32> = nodes.with_cpus().map(|(node, _)| *node).collect();
        let mut program = vm.spawn(&[PROGRAM, "follow"])?;
        let sightings = lines(&mut program)?;
        let watch = Command::new("vnumactl")
            // Of others, which come while the guest follows, it would be woken for nothing.
            .args(["watch", "--json", "--events", "acknowledged"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut watch = Process(watch.context("vnumactl watch")?);
        let events = lines(&mut watch)?;
        let first = sightings.recv_timeout(HANG_LIMIT).context("nothing from the guest's program")?;
        let guest_start =
            serde_json::from_str(&first).with_context(|| format!("the guest's program: {first}"))?;
        Ok(Self {
            vm,
            places: (0..VCPUS).map(|vcpu| vcpu * hosts.len() / VCPUS).collect(),
            hosts,
            nodes,
            sightings,
            events,
            published: HashMap::new(),
            host_start: Moment::now()?,
            guest_start,
            offset: tsc_offset(vm)?,
            wrong: 0,
            _processes: [program, watch],
        })
    }

    /// Moves in blocks, with the guest's own rebuilds timed before each. Also returns those, in nanoseconds.
    fn series(&mut self, name: &str, moves: usize) -> Result<(Vec<Trip>, Vec<f64>)> {
        let (mut trips, mut rebuilds) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while trips.len() < moves {
            let times = BLOCK.min(moves - trips.len());
            rebuilds.extend(floor::rebuilds(self.vm, times).with_context(|| format!("floor, {name}"))?);
            trips.extend(self.moves(name, times)?);
            eprintln!("{name}: {} of {moves} moves, {} s", trips.len(), start.elapsed().as_secs());
        }
        Ok((trips, rebuilds))
    }

    /// Moves one vCPU after the other, each to the next node.
    pub fn moves(&mut self, name: &str, moves: usize) -> Result<Vec<Trip>> {
        let mut trips = Vec::new();
        for number in 0..moves {
            std::thread::sleep(SETTLE);
            trips.push(self.trip(number % VCPUS).with_context(|| format!("{name}, move {number}"))?);
            self.check();
        }
        Ok(trips)
    }

    fn trip(&mut self, vcpu: usize) -> Result<Trip> {
        self.places[vcpu] = (self.places[vcpu] + 1) % self.hosts.len();
        let node = self.hosts[self.places[vcpu]];
        let cpus = self.nodes.cpus(node).with_context(|| format!("no node {node}"))?;
        let mut set = nix::sched::CpuSet::new();
        cpus.iter().try_for_each(|cpu| set.set(cpu as usize))?;
        let moved_ns = monotonic_ns()?;
        nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(self.vm.threads[vcpu]), &set)?;
        let line = self.sightings.recv_timeout(HANG_LIMIT).context("the guest's program saw nothing")?;
        let sighting: Sighting = serde_json::from_str(&line).with_context(|| line.clone())?;
        let published_ns = self.published_ns(&sighting.generation)?;
        ensure!(published_ns >= moved_ns, "generation {} was published before the move", sighting.generation);
        let host = Line::through(self.host_start, Moment::now()?)?;
        let guest = Line::through(self.guest_start, sighting.moment)?;
        let as_host = |ns: u64| guest.tsc(ns).wrapping_sub(self.offset);
        Ok(Trip {
            line: host,
            moved: host.tsc(moved_ns),
            published: host.tsc(published_ns),
            interrupt: as_host(sighting.interrupt_ns),
            applied: as_host(sighting.applied_ns),
            seen: as_host(sighting.seen_ns),
        })
    }

    /// When vnumad published a generation.
    fn published_ns(&mut self, generation: &str) -> Result<u64> {
        loop {
            if let Some(published) = self.published.remove(generation) {
                return Ok(published);
            }
            let line = self
                .events
                .recv_timeout(HANG_LIMIT)
                .with_context(|| format!("vnumad is silent of {generation}"))?;
            // Other events have other fields.
            if let Ok(acknowledged) = serde_json::from_str::<Acknowledged>(&line) {
                self.published.insert(acknowledged.generation, acknowledged.published_ns);
            }
        }
    }

    /// How many states were wrong, and the guest node of each vCPU.
    fn end(self) -> (usize, Vec<u32>) {
        let map = self.places.iter().filter_map(|place| u32::try_from(*place).ok()).collect();
        (self.wrong, map)
    }

    /// Everything in the guest that names a node, against where the vCPUs were put.
    fn check(&mut self) {
        let expected: Vec<String> =
            self.places.iter().enumerate().map(|(vcpu, node)| format!("{vcpu}:{node}")).collect();
        if let Err(error) = self.vm.exec(&[CHECKER, "--strict", &expected.join(",")]) {
            // A node that is full gives no pages to its CPUs, which is no fault.
            let free = self.vm.exec(&["sh", "-c", "grep MemFree /sys/devices/system/node/node*/meminfo"]);
            eprintln!("wrong state: {error:#}\n{}", free.unwrap_or_else(|error| format!("{error:#}")));
            self.wrong += 1;
        }
    }
}

/// What a process prints, line by line.
fn lines(process: &mut Process) -> Result<Receiver<String>> {
    let output = process.0.stdout.take().context("no standard output")?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        // Ends with the bench, which is the only one to take them.
        let _ = lines.into_iter().try_for_each(|line| sender.send(line));
    });
    Ok(receiver)
}
