//! Figures.

use serde::Serialize;
use std::time::Duration;
use vnuma_bench_figures::{goals::Limit, stats::Samples};

/// Everything that was measured: wall clock, on this machine.
#[derive(Serialize)]
pub struct Report {
    pub machine: Machine,
    /// A page fault that a handler of the same process serves, without any transport.
    pub local_fault_us: Option<Quantiles>,
    /// Half of two threads that wake each other.
    pub wake_up_us: Option<Quantiles>,
    /// The same where CPUs sleep that have nothing to do. Here they are kept awake for all other figures.
    pub wake_up_asleep_us: Option<Quantiles>,
    pub rows: Vec<Row>,
    pub floor_parts: Vec<Parts>,
    pub mix: Vec<Mix>,
    pub replays: Vec<Replay>,
    pub programs: Vec<Program>,
    /// Why MPI was not measured.
    pub mpi_skipped: Option<String>,
    /// Why RDMA has no rows.
    pub rdma_skipped: Option<String>,
    pub transports: Vec<Transfer>,
    pub faulty_peers: Vec<Answer>,
    /// Programs that did not end with the right result.
    pub failures: Vec<String>,
    pub goals: Vec<Limit>,
}

/// What it was measured on.
#[derive(Serialize)]
pub struct Machine {
    pub cpus: usize,
    pub kernel: String,
    /// At the beginning and at the end: what the machine had to do besides.
    pub load_average: Vec<String>,
    /// How often nodes did not find each other, and were started anew.
    pub begun_again: usize,
}

/// What the floor is made of, in microseconds. `sum` is a local fault, what the transport does with the bytes, and two
/// wake-ups: the node by the fault is part of the local fault.
#[derive(Serialize)]
pub struct Parts {
    pub transport: &'static str,
    pub floor: f64,
    pub local_fault: f64,
    pub stack: f64,
    pub wake_up: f64,
    pub sum: f64,
}

/// Non-owner writes, of which hints find as many as in the programs.
#[derive(Serialize)]
pub struct Mix {
    pub transport: &'static str,
    pub mode: &'static str,
    pub hint_rate: f64,
    /// Medians of those that a hint finds, and of the others.
    pub hint_us: f64,
    pub miss_us: f64,
    /// The two, weighted by the rate.
    pub typical_us: f64,
}

/// What a program touched, by a protocol: see `replay.rs`.
#[derive(Default, Serialize)]
pub struct Replay {
    pub transport: &'static str,
    pub mode: &'static str,
    pub program: String,
    /// Touches of pages, and what they took together.
    pub steps: usize,
    pub steps_us: f64,
    /// Those that were writes by one node of a page that a second owned and a third manages, and what they took with the reads before
    /// them.
    pub writes: usize,
    pub writes_us: f64,
    /// Of these: the writer had read the page; others had.
    pub read_before: usize,
    pub with_copies: usize,
    /// Writes by the manager of a page that another node owned, and what they took.
    pub by_manager: usize,
    pub by_manager_us: f64,
    /// Of all programs: how many requests for ownership went straight to an owner that is not the manager, of those that did not
    /// find the owner at the manager.
    pub hint_rate: Option<f64>,
    /// Of all programs: messages of a pass.
    pub messages: Option<f64>,
}

impl Replay {
    /// Adds what another program did.
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.steps_us += other.steps_us;
        self.writes += other.writes;
        self.writes_us += other.writes_us;
        self.read_before += other.read_before;
        self.with_copies += other.with_copies;
        self.by_manager += other.by_manager;
        self.by_manager_us += other.by_manager_us;
    }

    /// Microseconds of a non-owner write.
    pub fn write_us(&self) -> f64 {
        self.writes_us / self.writes as f64
    }
}

/// A program, the median of some runs.
#[derive(Clone, Serialize)]
pub struct Program {
    pub program: String,
    pub transport: String,
    /// `ivy`, `default`, `default-without-PART` or `mpi`.
    pub mode: String,
    pub nodes: u8,
    pub seconds: f64,
    pub messages: Option<u64>,
    /// Of MPI: what the loopback carried, TCP's headers and mpirun's own traffic included.
    pub bytes: Option<u64>,
    pub faults: Option<u64>,
    /// What the memory test read or wrote, on all nodes.
    pub mib_per_s: Option<f64>,
    pub guest_s: Option<f64>,
    pub dsm_s: Option<f64>,
    pub idle_s: Option<f64>,
    /// Requests to write by where the owner was: at the manager, where the hint said, elsewhere.
    pub owner_writes: Option<u64>,
    pub hint_writes: Option<u64>,
    pub elsewhere_writes: Option<u64>,
}

impl Program {
    /// Without figures.
    pub fn new(program: &str, transport: &str, mode: &str, nodes: u8) -> Self {
        Self {
            program: program.to_owned(),
            transport: transport.to_owned(),
            mode: mode.to_owned(),
            nodes,
            seconds: 0.0,
            messages: None,
            bytes: None,
            faults: None,
            mib_per_s: None,
            guest_s: None,
            dsm_s: None,
            idle_s: None,
            owner_writes: None,
            hint_writes: None,
            elsewhere_writes: None,
        }
    }
}

/// How survivors of a peer that failed answered a thread that wanted its page.
#[derive(Serialize)]
pub struct Answer {
    pub case: &'static str,
    /// Where nodes are in one process, the slower of two survivors; else the one that is in this process.
    pub seconds: f64,
    /// What the thread was told.
    pub error: String,
    /// What the program was told.
    pub reason: String,
}

/// Remote page faults.
#[derive(Serialize)]
pub struct Row {
    pub transport: &'static str,
    pub mode: &'static str,
    pub access: Option<&'static str>,
    pub threads: usize,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    /// The floor, measured in turn with this row.
    pub floor_us: Option<Quantiles>,
    pub faults_per_s: f64,
    /// Messages and bytes of a fault, frames' headers included.
    pub messages: f64,
    pub bytes: f64,
    /// CPU time of a fault on all hosts, and that on the host that is measured (of the floor, whose peer is a thread: not known).
    pub cpu_us: f64,
    pub cpu_measured_us: Option<f64>,
    /// How often threads of the nodes went to sleep, by faults.
    pub sleeps: f64,
    /// How long the network side polls before it sleeps.
    pub spin_us: u64,
    /// A request and a page on the same transport, without a fault: of the floor only.
    pub exchange_us: Option<Quantiles>,
}

impl Row {
    /// On an emulated machine times mean nothing: they are null.
    pub fn without_times(self) -> Self {
        let none = f64::NAN;
        Self {
            p50_us: none,
            p90_us: none,
            p99_us: none,
            floor_us: None,
            faults_per_s: none,
            cpu_us: none,
            cpu_measured_us: None,
            ..self
        }
    }
}

/// A transport by itself.
#[derive(Serialize)]
pub struct Transfer {
    pub transport: &'static str,
    pub spin_us: u64,
    pub size_bytes: usize,
    /// There and back, with as many bytes in both directions.
    pub round_trip_us: Quantiles,
    pub bandwidth_mib_per_s: f64,
}

/// Nearest rank.
#[derive(Clone, Copy, Serialize)]
pub struct Quantiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub samples: usize,
}

impl Quantiles {
    /// Microseconds; 0 without samples.
    pub fn of(samples: &[Duration]) -> Self {
        let samples: Samples = samples.iter().map(|time| time.as_nanos() as f64 / 1000.0).collect();
        let at = |percent| samples.percentile(percent).unwrap_or_default();
        Self { p50: at(50), p90: at(90), p99: at(99), samples: samples.count() }
    }
}

impl Report {
    pub fn new() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let kernel = read("/proc/sys/kernel/osrelease");
        Self {
            machine: Machine { cpus, kernel, load_average: vec![read("/proc/loadavg")], begun_again: 0 },
            local_fault_us: None,
            wake_up_us: None,
            wake_up_asleep_us: None,
            rows: Vec::new(),
            floor_parts: Vec::new(),
            mix: Vec::new(),
            replays: Vec::new(),
            programs: Vec::new(),
            mpi_skipped: None,
            rdma_skipped: None,
            transports: Vec::new(),
            faulty_peers: Vec::new(),
            failures: Vec::new(),
            goals: Vec::new(),
        }
    }

    pub fn print(&self) {
        self.print_faults();
        self.print_programs();
        for Transfer { transport, spin_us, size_bytes, round_trip_us, bandwidth_mib_per_s } in
            &self.transports
        {
            println!(
                "{transport:<8} spin {spin_us:>3} {size_bytes:>8} B p50 {:8.1}  p90 {:8.1}  p99 {:8.1} us, \
                 {bandwidth_mib_per_s:8.0} MiB/s",
                round_trip_us.p50, round_trip_us.p90, round_trip_us.p99
            );
        }
        for Answer { case, seconds, error, reason } in &self.faulty_peers {
            println!("peer {case}: {seconds:.2} s until a thread was told {error:?}; {reason}");
        }
        for failure in &self.failures {
            println!("FAILED: {failure}");
        }
        self.goals.iter().for_each(|goal| println!("{goal}"));
    }

    fn print_faults(&self) {
        if let Some(fault) = &self.local_fault_us {
            println!(
                "local fault            p50 {:8.1}  p90 {:8.1}  p99 {:8.1} us",
                fault.p50, fault.p90, fault.p99
            );
        }
        if let Some(wake_up) = &self.wake_up_asleep_us {
            println!(
                "wake-up of a CPU that sleeps p50 {:.1} p90 {:.1} us; CPUs are kept awake",
                wake_up.p50, wake_up.p90
            );
        }
        for row in &self.rows {
            let Row { transport, mode, threads, spin_us, p50_us, p90_us, p99_us, messages, bytes, .. } = row;
            let Row { cpu_us, sleeps, .. } = row;
            let access = row.access.unwrap_or("-");
            let here = row.cpu_measured_us.map_or("-".to_owned(), |here| format!("{here:.1}"));
            println!(
                "{transport:<8} {mode:<36} {access:<20} threads {threads:>2} spin {spin_us:>2} p50 {p50_us:7.1}  \
                 p90 {p90_us:7.1}  p99 {p99_us:8.1} us, {:6.0} faults/s, {messages:.1} messages, {bytes:.0} bytes, \
                 CPU {cpu_us:.1} us, here {here}, {sleeps:.1} sleeps",
                row.faults_per_s
            );
        }
        for row in &self.rows {
            if let (Some(Quantiles { p50, p90, .. }), Some(access)) = (row.floor_us, row.access) {
                let Row { transport, mode, p50_us, .. } = row;
                let by = p50_us / p50;
                println!(
                    "floor of {transport} in turn with {mode} {access}: p50 {p50:.1} p90 {p90:.1} us; {by:.2} of it"
                );
            }
            if let Some(Quantiles { p50, p90, .. }) = row.exchange_us {
                println!("exchange {} spin {}: p50 {p50:.1} p90 {p90:.1} us", row.transport, row.spin_us);
            }
        }
        for Parts { transport, floor, local_fault, stack, wake_up, sum } in &self.floor_parts {
            println!(
                "floor of {transport}: {floor:.1} us; a local fault {local_fault:.1}, the transport {stack:.1} and two \
                 wake-ups of {wake_up:.1} are {sum:.1}"
            );
        }
        self.print_writes();
    }

    fn print_writes(&self) {
        for Mix { transport, mode, hint_rate, hint_us, miss_us, typical_us } in &self.mix {
            println!(
                "non-owner writes of a mix, {transport} {mode}: hints find {:.1} %; {hint_us:.1} us and {miss_us:.1} us, \
                 weighted {typical_us:.1} us",
                hint_rate * 100.0
            );
        }
        for replay in &self.replays {
            let Replay { transport, mode, program, steps, steps_us, writes, .. } = replay;
            let Replay { read_before, with_copies, by_manager, by_manager_us, .. } = replay;
            println!(
                "replay of {program}, {transport} {mode}: {writes} non-owner writes ({read_before} after a read of the same \
                 node, {with_copies} with copies elsewhere) of {:.1} us; {by_manager} by the manager of {:.1} us; {steps} touches \
                 of {:.1} us",
                replay.write_us(),
                by_manager_us / *by_manager as f64,
                steps_us / *steps as f64
            );
            if let (Some(rate), Some(messages)) = (replay.hint_rate, replay.messages) {
                println!(
                    "replay of {program}, {transport} {mode}: hints find {:.1} %, {messages:.0} messages",
                    rate * 100.0
                );
            }
        }
        for transport in ["tcp", "tcp-tls", "shm"] {
            if let Some(faster) = self.faster_replays(transport) {
                println!(
                    "replay of all, {transport}: non-owner writes, ivy by default: {faster:.2}, which no goal judges"
                );
            }
        }
    }

    /// Time of a non-owner write in replays of all programs, of `ivy` by that of the default.
    fn faster_replays(&self, transport: &str) -> Option<f64> {
        let of = |mode: &str| {
            let all = |one: &&Replay| {
                one.program == crate::replay::ALL && one.transport == transport && one.mode == mode
            };
            self.replays.iter().find(all).map(Replay::write_us)
        };
        Some(of("ivy")? / of("default")?)
    }

    fn print_programs(&self) {
        let count = |value: Option<u64>| value.map_or("-".to_owned(), |value| value.to_string());
        for program in &self.programs {
            let Program { program: name, transport, mode, nodes, seconds, .. } = program;
            println!(
                "{name:<26} {transport:<8} {mode:<36} {nodes} nodes {seconds:8.3} s, {:>8} messages, {:>10} bytes, \
                 {:>7} faults{}",
                count(program.messages),
                count(program.bytes),
                count(program.faults),
                program.mib_per_s.map_or(String::new(), |rate| format!(", {rate:.1} MiB/s"))
            );
        }
        if let Some(reason) = &self.mpi_skipped {
            println!("MPI: skipped: {reason}");
        }
        if let Some(reason) = &self.rdma_skipped {
            println!("RDMA: skipped: {reason}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_an_emulated_machine_have_messages_and_no_times() {
        let row = Row {
            transport: "rdma",
            mode: "ivy",
            access: None,
            threads: 1,
            p50_us: 1.0,
            p90_us: 2.0,
            p99_us: 3.0,
            floor_us: None,
            faults_per_s: 4.0,
            messages: 5.0,
            bytes: 6.0,
            cpu_us: 7.0,
            cpu_measured_us: Some(8.0),
            sleeps: 9.0,
            spin_us: 0,
            exchange_us: None,
        };
        let value = serde_json::to_value(row.without_times()).expect("JSON");
        for field in ["p50_us", "p90_us", "p99_us", "faults_per_s", "cpu_us", "cpu_measured_us"] {
            assert!(value[field].is_null(), "{field}: {value}");
        }
        assert_eq!((value["messages"].as_f64(), value["bytes"].as_f64()), (Some(5.0), Some(6.0)));
    }

    #[test]
    fn replays_of_both_protocols_are_compared() {
        let mut report = Report::new();
        let all = |mode, writes, writes_us| Replay {
            transport: "tcp",
            mode,
            program: crate::replay::ALL.to_owned(),
            writes,
            writes_us,
            ..Replay::default()
        };
        report.replays =
            vec![all("ivy", 4, 120.0), Replay { program: "pi".to_owned(), ..all("default", 1, 1.0) }];
        assert_eq!(report.faster_replays("tcp"), None);
        report.replays.push(all("default", 5, 100.0));
        assert_eq!((report.faster_replays("tcp"), report.faster_replays("shm")), (Some(1.5), None));
    }

    #[test]
    fn quantiles_are_samples_by_their_rank() {
        let samples: Vec<Duration> = (1..=200).rev().map(Duration::from_micros).collect();
        let Quantiles { p50, p90, p99, samples } = Quantiles::of(&samples);
        assert_eq!((p50, p90, p99, samples), (100.0, 180.0, 198.0, 200));
        let one = Quantiles::of(&[Duration::from_micros(7)]);
        assert_eq!((one.p50, one.p99), (7.0, 7.0));
    }
}
