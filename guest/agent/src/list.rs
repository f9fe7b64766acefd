//! What `vnuma-guest list` shows.

use crate::{
    core::{Action, Evidence, ProcessId, Snapshot, State, decide},
    journal::Change,
    observe::Observer,
    rules::Rules,
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fmt,
    path::Path,
    time::{Duration, Instant},
};

/// CPU time is measured for so long.
const MEASURED: Duration = Duration::from_secs(1);

/// Looks at processes for which there was no time before.
const MORE: usize = 20;

/// Everything that `list` shows.
#[derive(Debug, Serialize)]
pub struct List {
    nodes: Vec<Node>,
    workloads: Vec<Workload>,
    interrupts: Vec<Interrupt>,
    /// Processes that could not be looked at, for lack of rights.
    pub hidden: usize,
}

#[derive(Debug, Serialize)]
struct Node {
    node: u32,
    cpus: String,
    used_permille: Option<u32>,
    free_kib: u64,
    total_kib: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Standing {
    /// By a vnuma-guest that runs.
    Placed,
    /// It would be.
    Fits,
    /// It would not be.
    Left,
}

#[derive(Debug, Serialize)]
struct Workload {
    pid: i32,
    name: String,
    program: String,
    found_by: Vec<String>,
    cpus: String,
    state: Standing,
    reason: String,
}

#[derive(Debug, Serialize)]
struct Interrupt {
    irq: u32,
    device: String,
    name: String,
    node: Option<u32>,
    cpus: String,
    /// A vnuma-guest that runs keeps it on its device's node.
    kept: bool,
}

/// Looks, and says what would be decided.
pub fn list(root: &Path, rules: &Rules, changes: &[Change]) -> List {
    let mut rules = rules.clone();
    (rules.limits.place_after, rules.limits.placements_per_look) = (1, u32::MAX);
    let (mut observer, mut state, start) = (Observer::new(root), State::default(), Instant::now());
    observer.look(&rules, &state, start.elapsed());
    std::thread::sleep(MEASURED);
    let mut look = observer.look(&rules, &state, start.elapsed());
    // There may be more processes than are looked at once.
    for _ in 0..MORE {
        if look.late == 0 {
            break;
        }
        look = observer.look(&rules, &state, start.elapsed());
    }
    let plan = decide(&rules, &look.snapshot, &mut state, Duration::ZERO);
    List { hidden: look.hidden, ..of(&look.snapshot, &plan.actions, changes) }
}

fn of(snapshot: &Snapshot, actions: &[Action], changes: &[Change]) -> List {
    let placed: BTreeMap<ProcessId, &Change> =
        changes.iter().filter_map(|change| Some((change.process()?, change))).collect();
    let mut decided: BTreeMap<ProcessId, (Standing, String)> = BTreeMap::new();
    for action in actions {
        match action {
            Action::Place { id, node, reason, .. } => {
                decided.insert(*id, (Standing::Fits, format!("{reason}: fits on node {node}")));
            }
            Action::Keep { id, reason } => drop(decided.insert(*id, (Standing::Left, reason.clone()))),
            Action::Release { .. } | Action::MoveMemory { .. } => {}
        }
    }
    let workload = |process: &crate::core::Process| {
        let (state, reason) = match (placed.get(&process.id), decided.get(&process.id)) {
            (Some(change), _) => (Standing::Placed, how(change)),
            (None, decided) => decided?.clone(),
        };
        let found = |evidence: &Evidence| match evidence {
            Evidence::Library(name) => name.clone(),
            Evidence::File { path, .. } => path.clone(),
        };
        let found_by = process.evidence.iter().map(found).collect();
        let (pid, name, program) = (process.id.pid, process.name.clone(), process.program.clone());
        let cpus = process.allowed.to_string();
        let program = vnuma_process::text::sanitize_short(&program);
        Some(Workload { pid, name, program, found_by, cpus, state, reason })
    };
    let kept = |wanted: u32| {
        changes.iter().any(|change| matches!(change, Change::Interrupt { irq, .. } if *irq == wanted))
    };
    let interrupt = |found: &crate::core::Interrupt| Interrupt {
        irq: found.irq,
        device: found.device.clone(),
        name: found.name.clone(),
        node: snapshot.devices.get(&found.device).and_then(|device| device.node),
        cpus: found.cpus.to_string(),
        kept: kept(found.irq),
    };
    let node = |(id, node): (&u32, &crate::core::Node)| Node {
        node: *id,
        cpus: node.cpus.to_string(),
        used_permille: node.used_permille,
        free_kib: node.free_kib,
        total_kib: node.total_kib,
    };
    List {
        nodes: snapshot.nodes.iter().map(node).collect(),
        workloads: snapshot.processes.iter().filter_map(workload).collect(),
        interrupts: snapshot.interrupts.iter().map(interrupt).collect(),
        hidden: 0,
    }
}

fn how(change: &Change) -> String {
    match change {
        Change::Threads { set, .. } => format!("threads on CPUs {set}"),
        Change::Group { path, cpus, .. } => format!("control group {path} on CPUs {}", cpus.set),
        Change::Unit { unit, cpus, .. } => format!("unit {unit} on CPUs {}", cpus.set),
        Change::Interrupt { .. } => String::new(),
    }
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Node { node, cpus, used_permille, free_kib, total_kib } in &self.nodes {
            let used = used_permille
                .map_or("-".to_owned(), |used| format!("{}.{:02}", used / 1000, used % 1000 / 10));
            let (free, total) = (free_kib / 1024, total_kib / 1024);
            writeln!(f, "node {node}: CPUs {cpus}, {used} used; {free} of {total} MiB free")?;
        }
        if self.workloads.is_empty() {
            writeln!(f, "no workloads")?;
        }
        for Workload { pid, name, state, reason, .. } in &self.workloads {
            let state = match state {
                Standing::Placed => "placed",
                Standing::Fits => "fits",
                Standing::Left => "left",
            };
            writeln!(f, "{pid} {name}: {state}: {reason}")?;
        }
        for Interrupt { irq, device, name, node, cpus, kept } in &self.interrupts {
            let node = node.map_or("-".to_owned(), |node| node.to_string());
            let kept = if *kept { ", kept there" } else { "" };
            writeln!(f, "interrupt {irq} {name} of {device} (node {node}): CPUs {cpus}{kept}")?;
        }
        Ok(())
    }
}
