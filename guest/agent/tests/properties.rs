//! What holds for every sequence of looks, whatever the guest does.

use proptest::{collection::vec, prelude::*};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use vnuma_guest::{
    core::{
        Action, Device, Evidence, Interrupt, InterruptAction, Node, NodeId, Process, ProcessId, Snapshot,
        State, decide,
    },
    rules::{KeepInterrupts, Rules},
};
use vnuma_model::CpuSet;

const NODES: u32 = 3;
const CPUS: u32 = 4;
const PROCESSES: usize = 6;
/// Of a node.
const MEMORY_KIB: u64 = 1 << 20;
const CARDS: [&str; 2] = ["0000:01:00.0", "0000:02:00.0"];

/// What a process does in a look.
#[derive(Clone, Debug)]
struct Doing {
    there: bool,
    /// Nothing, a library, the file of one of two devices, or those of both.
    evidence: u8,
    ran_permille: [u32; NODES as usize],
    waited_permille: u32,
    memory_kib: [u64; NODES as usize],
}

/// A look.
#[derive(Clone, Debug)]
struct Step {
    after_s: u64,
    /// Of the two devices.
    nodes: [NodeId; 2],
    /// The last CPU of node 0 is node 1's.
    moved_cpu: bool,
    used_percent: [u32; NODES as usize],
    free_percent: [u64; NODES as usize],
    doing: Vec<Doing>,
}

fn doing() -> impl Strategy<Value = Doing> {
    let parts = (
        prop::bool::weighted(0.9),
        0..5_u8,
        prop::array::uniform3(0..1500_u32),
        prop_oneof![0..400_u32, Just(300)],
        prop::array::uniform3(0..MEMORY_KIB / 4),
    );
    parts.prop_map(|(there, evidence, ran_permille, waited_permille, memory_kib)| Doing {
        there,
        evidence,
        ran_permille,
        waited_permille,
        memory_kib,
    })
}

/// `moves`: devices and CPUs change nodes.
fn step(moves: bool) -> impl Strategy<Value = Step> {
    let nodes = if moves { (0..NODES, 0..NODES).boxed() } else { (Just(0), Just(1)).boxed() };
    let cpu = if moves { any::<bool>().boxed() } else { Just(false).boxed() };
    let parts = (
        1..15_u64,
        nodes,
        cpu,
        prop::array::uniform3(prop_oneof![0..=100_u32, Just(10), Just(100)]),
        prop::array::uniform3(prop_oneof![0..=100_u64, Just(60)]),
        vec(doing(), PROCESSES),
    );
    parts.prop_map(|(after_s, nodes, moved_cpu, used_percent, free_percent, doing)| Step {
        after_s,
        nodes: [nodes.0, nodes.1],
        moved_cpu,
        used_percent,
        free_percent,
        doing,
    })
}

fn cpus_of(node: NodeId, moved_cpu: bool) -> CpuSet {
    let home = |cpu: &u32| if moved_cpu && *cpu == CPUS - 1 { 1 } else { cpu / CPUS };
    (0..NODES * CPUS).filter(|cpu| home(cpu) == node).collect()
}

fn evidence(kind: u8) -> BTreeSet<Evidence> {
    let file = |card: usize| Evidence::File {
        path: format!("/dev/uio{card}"),
        devices: BTreeSet::from([CARDS[card].to_owned()]),
    };
    let library = Evidence::Library("libvma.so".to_owned());
    match kind {
        0 => BTreeSet::new(),
        1 => BTreeSet::from([library]),
        2 => BTreeSet::from([file(0)]),
        3 => BTreeSet::from([file(1), library]),
        _ => BTreeSet::from([file(0), file(1)]),
    }
}

fn all_cpus() -> CpuSet {
    (0..NODES * CPUS).collect()
}

/// What is seen. A process that is placed has the CPUs that it was given.
fn snapshot(step: &Step, starts: &[u64], state: &State, interrupts: Vec<Interrupt>) -> Snapshot {
    let node = |id: NodeId| {
        let cpus = cpus_of(id, step.moved_cpu);
        let used = step.used_percent[id as usize] * cpus.len() as u32 * 10;
        let free_kib = MEMORY_KIB * step.free_percent[id as usize] / 100;
        (id, Node { cpus, used_permille: Some(used), free_kib, total_kib: MEMORY_KIB })
    };
    let device = |number: usize| {
        let node = Some(step.nodes[number]);
        (CARDS[number].to_owned(), Device { node, class: 0x02_0000, ..Device::default() })
    };
    let process = |(number, doing): (usize, &Doing)| {
        let id = ProcessId { pid: 100 + number as i32, started: starts[number] };
        let allowed = state.placed(id).map_or_else(all_cpus, |placed| placed.cpus.clone());
        doing.there.then(|| Process {
            id,
            name: "x".to_owned(),
            program: "x".to_owned(),
            cgroup: "/".to_owned(),
            evidence: evidence(doing.evidence),
            of_root: false,
            runs_vm: false,
            allowed,
            ran_permille: (0..NODES).zip(doing.ran_permille).collect(),
            waited_permille: doing.waited_permille,
            memory_kib: Some((0..NODES).zip(doing.memory_kib).collect()),
        })
    };
    Snapshot {
        nodes: (0..NODES).map(node).collect(),
        devices: (0..2).map(device).collect(),
        processes: step.doing.iter().enumerate().filter_map(process).collect(),
        interrupts,
    }
}

/// The node of what a process uses, if there is one: the device of its file or, if it has a library only, that of all devices.
fn belongs_on(process: &Process, snapshot: &Snapshot) -> Option<NodeId> {
    let mut cards = BTreeSet::new();
    for evidence in &process.evidence {
        if let Evidence::File { devices, .. } = evidence {
            cards.extend(devices.iter().map(String::as_str));
        }
    }
    if cards.is_empty() && !process.evidence.is_empty() {
        cards.extend(CARDS);
    }
    let nodes: BTreeSet<_> = cards.iter().filter_map(|card| snapshot.devices[*card].node).collect();
    (nodes.len() == 1).then(|| nodes.first().copied()).flatten()
}

/// What a model of the guest knows: who is placed, and since when.
#[derive(Default)]
struct Model {
    placed: BTreeMap<ProcessId, (NodeId, CpuSet)>,
    placements: BTreeMap<ProcessId, Vec<Duration>>,
    changes: usize,
}

impl Model {
    /// Acts are possible, and touch only processes that were found.
    fn apply(&mut self, snapshot: &Snapshot, state: &State, actions: &[Action], now: Duration) {
        let there: BTreeMap<ProcessId, &Process> =
            snapshot.processes.iter().map(|process| (process.id, process)).collect();
        self.placed.retain(|id, _| there.contains_key(id));
        for action in actions {
            let id = action.id();
            let process = there[&id];
            match action {
                Action::Place { node, cpus, .. } => {
                    assert_eq!(belongs_on(process, snapshot), Some(*node), "{id:?} is placed on node {node}");
                    assert!(!cpus.is_empty() && cpus.is_subset(&snapshot.nodes[node].cpus));
                    assert!(self.placed.insert(id, (*node, cpus.clone())).is_none(), "placed twice");
                    self.placements.entry(id).or_default().push(now);
                }
                Action::Release { .. } => assert!(self.placed.remove(&id).is_some(), "released, not placed"),
                Action::MoveMemory { node, .. } => {
                    assert_eq!(self.placed.get(&id).map(|(on, _)| *on), Some(*node), "memory goes along");
                }
                Action::Keep { .. } => assert!(!process.evidence.is_empty(), "nobody else is spoken of"),
            }
        }
        let known: BTreeMap<ProcessId, (NodeId, CpuSet)> =
            state.all_placed().map(|(id, placed)| (id, (placed.node, placed.cpus.clone()))).collect();
        assert_eq!(known, self.placed, "who is placed is known, so that all can be undone");
        assert!(state.all_placed().all(|(_, placed)| placed.former == all_cpus()), "and what they had");
    }
}

fn rules(rest_s: u64, memory_kib: u64) -> Rules {
    let mut rules = Rules::default();
    rules.limits.rest = Duration::from_secs(rest_s);
    rules.limits.placements_per_look = 2;
    rules.limits.memory_kib_per_look = memory_kib;
    rules
}

/// Runs all steps. `each` looks at what was decided.
fn play(
    rules: &Rules,
    steps: &[Step],
    mut each: impl FnMut(&Step, &Snapshot, &State, &[Action], Duration),
) -> Model {
    let (mut state, mut model, mut now) = (State::default(), Model::default(), Duration::ZERO);
    let mut last: Option<&Step> = None;
    let mut starts = [0; PROCESSES];
    for step in steps {
        now += Duration::from_secs(step.after_s);
        // One that has ended comes back as another one with its number.
        for (start, doing) in starts.iter_mut().zip(&step.doing) {
            *start += u64::from(!doing.there);
        }
        let snapshot = snapshot(step, &starts, &state, Vec::new());
        model.changes += usize::from(
            last.is_some_and(|last| last.nodes != step.nodes || last.moved_cpu != step.moved_cpu),
        );
        last = Some(step);
        let plan = decide(rules, &snapshot, &mut state, now);
        model.apply(&snapshot, &state, &plan.actions, now);
        each(step, &snapshot, &state, &plan.actions, now);
    }
    model
}

proptest! {
    #[test]
    fn nobody_who_is_not_found_is_touched_and_all_who_are_placed_are_known(
        steps in vec(step(true), 1..60), rest_s in 1..100_u64,
    ) {
        play(&rules(rest_s, 4096), &steps, |_, _, _, _, _| {});
    }

    #[test]
    fn nobody_is_placed_twice_within_a_rest(steps in vec(step(false), 1..80), rest_s in 1..100_u64) {
        let model = play(&rules(rest_s, 4096), &steps, |_, _, _, _, _| {});
        for (id, times) in model.placements {
            for pair in times.windows(2) {
                prop_assert!(pair[1] - pair[0] >= Duration::from_secs(rest_s), "{id:?}: {times:?}");
            }
        }
    }

    #[test]
    fn changes_of_the_topology_add_one_placement_each(steps in vec(step(true), 1..80), rest_s in 1..100_u64) {
        let model = play(&rules(rest_s, 4096), &steps, |_, _, _, _, _| {});
        let seconds: u64 = steps.iter().map(|step| step.after_s).sum();
        let most = 1 + seconds as usize / rest_s as usize;
        for (id, times) in model.placements {
            prop_assert!(times.len() <= most + model.changes, "{id:?}: {times:?}");
        }
    }

    #[test]
    fn a_look_stays_within_its_budget_and_leaves_the_reserve(
        steps in vec(step(true), 1..60), memory_kib in 4..1_u64 << 20,
    ) {
        let rules = rules(5, memory_kib);
        play(&rules, &steps, |_, snapshot, _, actions, _| {
            let placed: Vec<_> = actions.iter().filter_map(|action| match action {
                Action::Place { id, node, .. } => Some((*id, *node)),
                _ => None,
            }).collect();
            assert!(placed.len() <= rules.limits.placements_per_look as usize);
            let moved = actions.iter().map(|action| match action {
                Action::MoveMemory { kib, .. } => *kib,
                _ => 0,
            });
            assert!(moved.sum::<u64>() <= memory_kib);
            for (id, node) in &snapshot.nodes {
                let here = placed.iter().filter(|(_, on)| on == id);
                let come: u64 = here.clone().map(|(pid, _)| {
                    let process = snapshot.processes.iter().find(|process| process.id == *pid).expect("there");
                    let elsewhere = process.ran_permille.iter().filter(|(on, _)| *on != id);
                    elsewhere.map(|(_, ran)| u64::from(*ran)).sum::<u64>()
                }).sum();
                let all = node.cpus.len() as u64 * 1000;
                let used = u64::from(node.used_permille.expect("measured"));
                assert!(here.count() == 0 || used + come <= all * 9 / 10, "node {id}: {used} and {come} of {all}");
            }
        });
    }

    #[test]
    fn who_waits_on_a_busy_node_is_released(steps in vec(step(false), 1..40)) {
        let mut rules = rules(1, 4096);
        rules.interval = Duration::from_secs(1);
        let mut strained: BTreeMap<ProcessId, u32> = BTreeMap::new();
        play(&rules, &steps, |_, snapshot, state, _, _| {
            let mut still = BTreeMap::new();
            for (id, placed) in state.all_placed() {
                let node = &snapshot.nodes[&placed.node];
                let process = snapshot.processes.iter().find(|process| process.id == id).expect("there");
                let busy = node.used_permille == Some(node.cpus.len() as u32 * 1000);
                if busy && process.waited_permille >= 100 {
                    still.insert(id, strained.get(&id).copied().unwrap_or(0) + 1);
                }
            }
            assert!(still.values().all(|looks| *looks < rules.limits.release_after), "{still:?}");
            strained = still;
        });
    }

    /// Somebody else sets interrupts, devices change nodes and come and go with their interrupts: what was set is either
    /// given back or somebody else's.
    #[test]
    fn interrupts_are_given_back_or_left_to_others(
        steps in vec((step(true), vec((any::<bool>(), 0..8_u8), 4)), 1..40),
    ) {
        let rules = Rules { interrupts: KeepInterrupts::All, ..Rules::default() };
        let (mut state, mut now) = (State::default(), Duration::ZERO);
        // What each interrupt has, what it had before, and whether it is somebody else's.
        let mut real: BTreeMap<u32, (CpuSet, Option<CpuSet>)> = (0..4).map(|irq| (irq, (all_cpus(), None))).collect();
        for (step, others) in &steps {
            now += Duration::from_secs(step.after_s);
            for (irq, (there, other)) in others.iter().enumerate() {
                let irq = irq as u32;
                if !there {
                    real.remove(&irq);
                } else if *other == 0 {
                    real.insert(irq, (CpuSet::from_iter([irq]), None));
                } else {
                    real.entry(irq).or_insert_with(|| (all_cpus(), None));
                }
            }
            let interrupts = real.iter().map(|(irq, (cpus, _))| Interrupt {
                irq: *irq,
                device: CARDS[*irq as usize % 2].to_owned(),
                name: "q".to_owned(),
                cpus: cpus.clone(),
            });
            let snapshot = snapshot(step, &[0; PROCESSES], &state, interrupts.collect());
            for action in decide(&rules, &snapshot, &mut state, now).interrupts {
                match action {
                    InterruptAction::Set { irq, device, former, cpus, .. } => {
                        let (now, before) = real.get_mut(&irq).expect("there");
                        assert_eq!(before.as_ref().unwrap_or(now), &former);
                        let home = snapshot.devices[&device].node.expect("known");
                        assert!(!cpus.is_empty() && cpus.is_subset(&snapshot.nodes[&home].cpus));
                        (*now, *before) = (cpus, Some(former));
                    }
                    InterruptAction::Restore { irq, .. } => {
                        let (now, before) = real.get_mut(&irq).expect("there");
                        *now = before.take().expect("it was set");
                    }
                    InterruptAction::Yield { irq } => assert_eq!(real[&irq].1, None, "set by somebody else"),
                }
            }
        }
    }
}

#[test]
fn a_placement_has_a_beginning_and_an_end() {
    let doing = |evidence, waited_permille| Doing {
        there: true,
        evidence,
        ran_permille: [0, 500, 0],
        waited_permille,
        memory_kib: [0, 4096, 0],
    };
    let idle = Doing { there: false, ..doing(0, 0) };
    let step = |first: Doing, used: u32| Step {
        after_s: 5,
        nodes: [0, 1],
        moved_cpu: false,
        used_percent: [used, 10, 10],
        free_percent: [50; 3],
        doing: std::iter::once(first).chain(vec![idle.clone(); PROCESSES - 1]).collect(),
    };
    // Found at the first device; twice it fits; three times it waits on a busy node; then it rests.
    let looks = [(2, 0, 10), (2, 0, 10), (2, 0, 10), (2, 200, 100), (2, 200, 100), (2, 200, 100), (2, 0, 10)];
    let steps: Vec<Step> =
        looks.iter().map(|&(evidence, waited, used)| step(doing(evidence, waited), used)).collect();
    let mut seen = Vec::new();
    play(&Rules::default(), &steps, |_, _, _, actions, _| {
        let word = |action: &Action| match action {
            Action::Place { .. } => "place",
            Action::Release { .. } => "release",
            Action::MoveMemory { .. } => "memory",
            Action::Keep { reason, .. } if reason.contains("rests for") => "rests",
            Action::Keep { .. } => "keep",
        };
        seen.push(actions.iter().map(word).collect::<Vec<_>>());
    });
    let expected: [&[&str]; 7] = [
        &["keep"],
        &["place", "memory"],
        &["keep", "memory"],
        &["keep", "memory"],
        &["keep", "memory"],
        &["release", "rests"],
        &["rests"],
    ];
    assert_eq!(seen, expected);
}
