//! Figures.

use anyhow::Result;
use serde::{Deserialize, Deserializer, Serialize};
use std::{collections::BTreeMap, time::Duration};
use vnuma_bench_figures::{goals::Limit, report::table, stats::Samples};

/// Of a transport, a protocol or an access.
type Name = &'static str;

/// Of a cell that was stored: a run reads some hundreds of them at most.
fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
    Ok(String::deserialize(from)?.leak())
}

fn names<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Name>, D::Error> {
    Ok(Option::<String>::deserialize(from)?.map(|name| &*name.leak()))
}

/// Everything that was measured: wall clock, on this machine.
#[derive(Default, Serialize)]
pub struct Report {
    pub commit: String,
    /// How many cells each commit has measured.
    pub measured_by: BTreeMap<String, usize>,
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
    /// Cells that did not come about, such as programs that did not end with the right result.
    pub failures: Vec<String>,
    pub goals: Vec<Limit>,
}

/// Faults on a transport, and what belongs to them.
#[derive(Serialize, Deserialize)]
pub struct Faults {
    pub rows: Vec<Row>,
    pub transports: Vec<Transfer>,
    pub parts: Parts,
}

/// What it was measured on.
#[derive(Default, Serialize)]
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
#[derive(Serialize, Deserialize)]
pub struct Parts {
    #[serde(deserialize_with = "name")]
    pub transport: Name,
    pub floor: f64,
    pub local_fault: f64,
    pub stack: f64,
    pub wake_up: f64,
    pub sum: f64,
}

/// Non-owner writes, of which hints find as many as in the programs.
#[derive(Serialize, Deserialize)]
pub struct Mix {
    #[serde(deserialize_with = "name")]
    pub transport: Name,
    #[serde(deserialize_with = "name")]
    pub mode: Name,
    pub hint_rate: f64,
    /// Medians of those that a hint finds, and of the others.
    pub hint_us: f64,
    pub miss_us: f64,
    /// The two, weighted by the rate.
    pub typical_us: f64,
}

/// What a program touched, by a protocol: see `replay.rs`.
#[derive(Default, Serialize, Deserialize)]
pub struct Replay {
    #[serde(deserialize_with = "name")]
    pub transport: Name,
    #[serde(deserialize_with = "name")]
    pub mode: Name,
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
#[derive(Clone, Default, Serialize, Deserialize)]
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
        let [program, transport, mode] = [program, transport, mode].map(str::to_owned);
        Self { program, transport, mode, nodes, ..Self::default() }
    }
}

/// How survivors of a peer that failed answered a thread that wanted its page.
#[derive(Serialize, Deserialize)]
pub struct Answer {
    #[serde(deserialize_with = "name")]
    pub case: Name,
    /// Where nodes are in one process, the slower of two survivors; else the one that is in this process.
    pub seconds: f64,
    /// What the thread was told.
    pub error: String,
    /// What the program was told.
    pub reason: String,
}

/// Remote page faults.
#[derive(Serialize, Deserialize)]
pub struct Row {
    #[serde(deserialize_with = "name")]
    pub transport: Name,
    #[serde(deserialize_with = "name")]
    pub mode: Name,
    #[serde(deserialize_with = "names")]
    pub access: Option<Name>,
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

/// A transport alone.
#[derive(Serialize, Deserialize)]
pub struct Transfer {
    #[serde(deserialize_with = "name")]
    pub transport: Name,
    pub spin_us: u64,
    pub size_bytes: usize,
    /// There and back, with as many bytes in both directions.
    pub round_trip_us: Quantiles,
    pub bandwidth_mib_per_s: f64,
}

/// Nearest rank.
#[derive(Clone, Copy, Serialize, Deserialize)]
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

/// What people are shown of the lists of a report, and with how many digits.
const TABLES: [(&str, &str); 7] = [
    (
        "rows",
        "transport mode access threads spin_us p50_us:1 p90_us:1 p99_us:1 floor_us/p50:1 floor_us/p90:1 \
         exchange_us/p50:1 faults_per_s messages:1 bytes cpu_us:1 cpu_measured_us:1 sleeps:1",
    ),
    ("floor_parts", "transport floor:1 local_fault:1 stack:1 wake_up:1 sum:1"),
    ("mix", "transport mode hint_rate:3 hint_us:1 miss_us:1 typical_us:1"),
    (
        "replays",
        "transport mode program steps steps_us:1 writes writes_us:1 read_before with_copies by_manager by_manager_us:1 \
         hint_rate:3 messages",
    ),
    ("programs", "program transport mode nodes seconds:3 messages bytes faults mib_per_s:1"),
    (
        "transports",
        "transport spin_us size_bytes round_trip_us/p50:1 round_trip_us/p90:1 round_trip_us/p99:1 bandwidth_mib_per_s",
    ),
    ("faulty_peers", "case seconds:2 reason"),
];

impl Report {
    pub fn new() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let (kernel, load_average) = (read("/proc/sys/kernel/osrelease"), vec![read("/proc/loadavg")]);
        let machine = Machine { cpus, kernel, load_average, begun_again: 0 };
        Self { machine, ..Self::default() }
    }

    /// For people.
    pub fn tables(&self) -> Result<String> {
        let all = serde_json::to_value(self)?;
        let mut text = String::new();
        for (name, columns) in TABLES {
            if let Some(rows) = all[name].as_array().filter(|rows| !rows.is_empty()) {
                text += &format!("{name}\n{}\n", table(columns, rows));
            }
        }
        let us = [
            ("local fault", self.local_fault_us),
            ("wake-up", self.wake_up_us),
            ("wake-up of a CPU that sleeps", self.wake_up_asleep_us),
        ];
        for (name, found) in us {
            text += &found.map_or(String::new(), |found| format!("{name}: p50 {:.1} us\n", found.p50));
        }
        for transport in ["tcp", "tcp-tls", "shm"] {
            if let Some(faster) = self.faster_replays(transport) {
                text += &format!(
                    "replay of all, {transport}: non-owner writes, ivy by default: {faster:.2}, which no goal judges\n"
                );
            }
        }
        for (name, reason) in [("MPI", &self.mpi_skipped), ("RDMA", &self.rdma_skipped)] {
            text += &reason.as_ref().map_or(String::new(), |reason| format!("{name}: skipped: {reason}\n"));
        }
        Ok(text)
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
