//! Each bound by example: what a node has to have for a process to be placed on it, what makes it leave again, and how long it rests.
//!
//! One process uses a card on node 0, and has run on node 1 so far, where its memory is. Both nodes have four CPUs.

use std::{collections::BTreeMap, collections::BTreeSet, time::Duration};
use vnuma_guest::{
    core::{
        Action, Device, Evidence, Interrupt, InterruptAction, LONGEST_REST, Node, Process, ProcessId,
        Snapshot, State, decide,
    },
    rules::Rules,
};
use vnuma_model::CpuSet;

const CARD: &str = "0000:01:00.0";
const ID: ProcessId = ProcessId { pid: 7, started: 1 };
/// Of a node. By default a twentieth of it is kept free, and it runs out below a quarter of that.
const TOTAL_KIB: u64 = 1_000_000;
const KEPT_KIB: u64 = 50_000;
const LOW_KIB: u64 = 12_500;
/// Memory of the process.
const OWN_KIB: u64 = 4096;

fn cpus(list: &str) -> CpuSet {
    list.parse().expect("CPUs")
}

/// Half of all memory and nine tenths of all CPU time are free.
fn guest() -> Snapshot {
    let node = |list: &str| Node {
        cpus: cpus(list),
        used_permille: Some(400),
        free_kib: TOTAL_KIB / 2,
        total_kib: TOTAL_KIB,
    };
    let file = Evidence::File { path: "/dev/uio0".to_owned(), devices: BTreeSet::from([CARD.to_owned()]) };
    let process = Process {
        id: ID,
        name: "x".to_owned(),
        program: "x".to_owned(),
        cgroup: "/".to_owned(),
        evidence: BTreeSet::from([file]),
        of_root: false,
        runs_vm: false,
        allowed: cpus("0-7"),
        ran_permille: BTreeMap::from([(1, 500)]),
        waited_permille: 0,
        memory_kib: Some(BTreeMap::from([(1, OWN_KIB)])),
    };
    let card = Device { node: Some(0), class: 0x02_0000, ..Device::default() };
    Snapshot {
        nodes: BTreeMap::from([(0, node("0-3")), (1, node("4-7"))]),
        devices: BTreeMap::from([(CARD.to_owned(), card)]),
        processes: vec![process],
        interrupts: Vec::new(),
    }
}

/// The guest's time, what is remembered, and what is seen.
struct Run {
    rules: Rules,
    state: State,
    now_s: u64,
    guest: Snapshot,
    /// What was decided of interrupts at the last look.
    interrupts: Vec<InterruptAction>,
}

impl Run {
    fn new() -> Self {
        let (rules, state) = (Rules::default(), State::default());
        Self { rules, state, now_s: 0, guest: guest(), interrupts: Vec::new() }
    }

    fn node(&mut self, id: u32) -> &mut Node {
        self.guest.nodes.get_mut(&id).expect("a node")
    }

    fn process(&mut self) -> &mut Process {
        &mut self.guest.processes[0]
    }

    /// Looks after so many seconds. What is decided of the process first, and how much of its memory is moved.
    fn look(&mut self, after_s: u64) -> (String, u64) {
        self.now_s += after_s;
        let now = self.now();
        let plan = decide(&self.rules, &self.guest, &mut self.state, now);
        self.interrupts = plan.interrupts;
        let mut moved = 0;
        let mut said = Vec::new();
        for action in plan.actions {
            match action {
                Action::Place { node, cpus, .. } => said.push(format!("place: node {node}, CPUs {cpus}")),
                Action::Release { reason, .. } => said.push(format!("release: {reason}")),
                Action::Keep { reason, .. } => said.push(reason),
                Action::MoveMemory { kib, .. } => moved += kib,
            }
        }
        (said.swap_remove(0), moved)
    }

    fn now(&self) -> Duration {
        Duration::from_secs(self.now_s)
    }

    /// Two looks in a row are enough.
    fn place(&mut self) {
        self.look(5);
        let (said, _) = self.look(5);
        assert_eq!(said, "place: node 0, CPUs 0-3");
    }
}

/// What is decided at the second look.
fn second_look(change: impl Fn(&mut Run)) -> String {
    let mut run = Run::new();
    change(&mut run);
    run.look(5);
    run.look(5).0
}

#[test]
fn a_process_is_placed_where_cpu_time_is_kept_and_not_beyond() {
    const PLACED: &str = "place: node 0, CPUs 0-3";
    // 3600 of 4000 thousandths may be used, of which it uses 500.
    assert_eq!(second_look(|run| run.node(0).used_permille = Some(3100)), PLACED);
    let lacks = "has /dev/uio0 open: node 0 has no CPU time to spare: 3601 of 4000 thousandths would be used, 400 are kept";
    assert_eq!(second_look(|run| run.node(0).used_permille = Some(3101)), lacks);
    // What it has run there is its own already.
    let runs_there = |run: &mut Run| run.process().ran_permille = BTreeMap::from([(0, 300), (1, 200)]);
    let both = |used| {
        move |run: &mut Run| {
            runs_there(run);
            run.node(0).used_permille = Some(used);
        }
    };
    assert_eq!(second_look(both(3400)), PLACED);
    assert_eq!(second_look(both(3401)), lacks);
    let first = |run: &mut Run| run.node(0).used_permille = None;
    assert_eq!(second_look(first), "has /dev/uio0 open: CPU time is measured from one look to the next");
    // As much as the CPUs that it may use there can do.
    let may = |list: &'static str, ran| {
        move |run: &mut Run| {
            run.process().allowed = cpus(list);
            run.process().ran_permille = BTreeMap::from([(1, ran)]);
        }
    };
    assert_eq!(second_look(may("3-5", 1000)), "place: node 0, CPUs 3");
    assert!(second_look(may("3-5", 1001)).contains("node 0 has no CPU time to spare"));
    assert_eq!(second_look(may("4-7", 10)), "has /dev/uio0 open: it may run on no CPU of node 0");
    let gone = |run: &mut Run| drop(run.guest.nodes.remove(&0));
    assert_eq!(second_look(gone), "has /dev/uio0 open: node 0 is not online");
}

#[test]
fn a_process_is_placed_where_memory_is_kept_and_not_beyond() {
    let free = |kib| move |run: &mut Run| run.node(0).free_kib = kib;
    assert_eq!(second_look(free(KEPT_KIB + OWN_KIB)), "place: node 0, CPUs 0-3");
    assert_eq!(
        second_look(free(KEPT_KIB + OWN_KIB - 1)),
        "has /dev/uio0 open: node 0 has no memory to spare: 4096 KiB would come, 54095 are free, 50000 are kept"
    );
    // Memory that is there already does not come.
    let there = |run: &mut Run| {
        run.process().memory_kib = Some(BTreeMap::from([(0, OWN_KIB)]));
        run.node(0).free_kib = KEPT_KIB;
    };
    assert_eq!(second_look(there), "place: node 0, CPUs 0-3");
}

#[test]
fn memory_that_comes_leaves_what_is_kept() {
    let mut run = Run::new();
    run.rules.limits.memory_kib_per_look = 3000;
    run.look(5);
    assert_eq!(run.look(5).1, 3000, "of 4096 KiB, as much as a look may move");
    run.process().memory_kib = Some(BTreeMap::from([(0, 3000), (1, 1096)]));
    run.node(0).free_kib = KEPT_KIB + 96;
    assert_eq!(run.look(5).1, 96);
    run.node(0).free_kib = KEPT_KIB;
    assert_eq!(run.look(5).1, 0);
    run.node(0).free_kib = TOTAL_KIB / 2;
    assert_eq!(run.look(5).1, 1096, "there is room again");
    run.process().memory_kib = Some(BTreeMap::from([(0, OWN_KIB)]));
    assert_eq!(run.look(5).1, 0);
    assert!(!run.state.wants_memory(ID), "all of it has come");
}

#[test]
fn a_process_leaves_a_busy_node_only_if_it_waits_there() {
    // Idle for less than 3 %, and the process waits for a tenth of its time: both together, three times in a row.
    for (used, waited, leaves) in [(3881, 100, true), (3880, 100, false), (4000, 99, false)] {
        let mut run = Run::new();
        run.place();
        run.node(0).used_permille = Some(used);
        run.process().waited_permille = waited;
        let stays = "has /dev/uio0 open: placed on node 0";
        assert_eq!([run.look(5).0, run.look(5).0], [stays, stays], "{used} {waited}");
        let said = run.look(5).0;
        let reason = format!(
            "release: node 0 is busy ({used} of 4000 thousandths of a CPU), and it waits for CPUs ({waited} thousandths)"
        );
        assert_eq!(said == reason, leaves, "{said}");
    }
}

#[test]
fn a_process_leaves_a_node_that_runs_out_of_memory() {
    for (free_kib, leaves) in [(LOW_KIB - 1, true), (LOW_KIB, false)] {
        let mut run = Run::new();
        run.place();
        run.node(0).free_kib = free_kib;
        run.look(5);
        run.look(5);
        let said = run.look(5).0;
        assert_eq!(
            said == format!("release: node 0 has {free_kib} KiB free, less than 12500"),
            leaves,
            "{said}"
        );
    }
}

#[test]
fn one_look_without_strain_begins_the_count_anew() {
    let mut run = Run::new();
    run.place();
    for _ in 0..4 {
        for (waited, looks) in [(500, 2), (0, 1)] {
            run.node(0).used_permille = Some(4000);
            run.process().waited_permille = waited;
            for _ in 0..looks {
                assert_eq!(run.look(5).0, "has /dev/uio0 open: placed on node 0");
            }
        }
    }
    // So it is with those before a placement.
    let mut run = Run::new();
    for used in [400, 4000, 400, 4000, 400] {
        run.node(0).used_permille = Some(used);
        let said = run.look(5).0;
        assert!(said.ends_with("look 1 of 2") || said.contains("no CPU time"), "{said}");
    }
}

#[test]
fn looks_that_follow_each_other_fast_do_not_count() {
    let mut run = Run::new();
    let first = "has /dev/uio0 open: fits on node 0, look 1 of 2";
    assert_eq!(run.look(5).0, first);
    for _ in 0..4 {
        assert_eq!(run.look(1).0, first, "a change of the topology has caused it");
    }
    assert_eq!(run.look(1).0, "place: node 0, CPUs 0-3");
    run.node(0).used_permille = Some(4000);
    run.process().waited_permille = 500;
    run.look(5);
    for _ in 0..4 {
        assert_eq!(run.look(1).0, "has /dev/uio0 open: placed on node 0");
    }
    assert_eq!(run.look(1).0, "has /dev/uio0 open: placed on node 0", "the second one that counts");
    assert!(run.look(5).0.starts_with("release: "), "the third one");
}

#[test]
fn a_process_rests_twice_as_long_each_time_until_it_has_stayed() {
    let mut run = Run::new();
    let rest_s = run.rules.limits.rest.as_secs();
    let rests = |run: &mut Run, times: u64| {
        run.place();
        let now = run.now();
        let limits = run.rules.limits;
        run.state.lost(ID, &limits, now);
        let said = run.look(0).0;
        assert_eq!(said, format!("has /dev/uio0 open: rests for {} s", times * rest_s + 1));
        assert!(run.look(times * rest_s - 1).0.ends_with("rests for 2 s"), "a second is left");
        run.now_s += 1;
    };
    for times in [1, 2, 4, 8, 16, 16] {
        rests(&mut run, times);
    }
    // It stays for as long as it rests at most: what was before is forgotten.
    run.place();
    run.look(rest_s * u64::from(LONGEST_REST));
    let (now, limits) = (run.now(), run.rules.limits);
    run.state.lost(ID, &limits, now);
    assert!(run.look(0).0.ends_with(&format!("rests for {} s", rest_s + 1)));
}

/// Any user can have a file with the name of a library mapped as code. It takes a right to have a device open.
#[test]
fn interrupts_follow_what_anybody_has_open_and_what_root_runs() {
    let library = Evidence::Library("libibverbs.so.1".to_owned());
    let file = guest().processes[0].evidence.clone();
    let both = file.iter().cloned().chain([library.clone()]).collect();
    let library = BTreeSet::from([library]);
    for (evidence, of_root, follow) in
        [(library.clone(), false, false), (library, true, true), (file, false, true), (both, false, true)]
    {
        let mut run = Run::new();
        let cpus = cpus("0-7");
        run.guest.interrupts =
            vec![Interrupt { irq: 24, device: CARD.to_owned(), name: "eth0-0".to_owned(), cpus }];
        (run.process().evidence, run.process().of_root) = (evidence.clone(), of_root);
        run.place();
        let set: Vec<u32> = run
            .interrupts
            .iter()
            .filter_map(|action| match action {
                InterruptAction::Set { irq, .. } => Some(*irq),
                _ => None,
            })
            .collect();
        assert_eq!(set, if follow { vec![24] } else { vec![] }, "{evidence:?}, of root: {of_root}");
    }
}
