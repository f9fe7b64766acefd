//! Memory that goes to its vCPUs, in the core by itself: periods in, orders out. The mover here does what it is told, or
//! something else.

#[path = "common/two_nodes.rs"]
mod two_nodes;

use std::{collections::BTreeMap, sync::Arc};
use two_nodes::host;
use vnuma_api as api;
use vnuma_daemon::core::{
    Core, ReplyTo,
    event::{Ask, Command, Event, Outcome, Report, Request},
};
use vnuma_model::{
    CpuLayout, CpuSet, GuestNode, MemoryBacking, ThreadCounts, Vcpu, VcpuLocation, VmCandidate, VmDescription,
};
use vnuma_policy::{
    Policies,
    memory_move::MoveMemory,
    scheduling::{Policy, Settings, memory::REST_NS},
    world::{
        Accesses, Counted, HostReading, MemoryMoved, MemoryRange, MemoryReading, TaskId, VcpuReading, VmId,
        VmReading,
    },
};

const SECOND_NS: u64 = 1_000_000_000;
const PID: i32 = 100;
const MIB: u64 = 1 << 20;
const GIB_KIB: u64 = 1 << 20;

fn set(list: &str) -> CpuSet {
    list.parse().expect("a list")
}

/// A VM with two guest nodes, whose unbound memory lies on these host nodes, and two vCPUs.
fn description(homes: [u32; 2]) -> VmDescription {
    let node = |id: u32| {
        let memory = MemoryBacking {
            id: format!("ram{id}"),
            size_bytes: 256 * MIB,
            policy: "default".into(),
            host_nodes: Vec::new(),
            resident_kib: vec![(homes[id as usize], 256 << 10)],
            mapping: None,
        };
        GuestNode { id, memory_bytes: 256 * MIB, memory: Some(memory) }
    };
    let vcpu =
        |id: u32| Vcpu { index: id, apic_id: id, boot_node: Some(id), tid: PID + 1 + id.cast_signed() };
    VmDescription {
        name: "a".into(),
        pid: PID,
        run_state: "running".into(),
        guest_nodes: vec![node(0), node(1)],
        vcpus: vec![vcpu(0), vcpu(1)],
        spare_slots: BTreeMap::new(),
        devices: Vec::new(),
        memory_devices: Vec::new(),
    }
}

struct Run {
    core: Core,
    now_ns: u64,
    vm: (VmId, u64),
    /// Where its memory lies, MiB, and when that was read.
    mib: [u64; 2],
    read_ns: u64,
    orders: Vec<(i32, MoveMemory)>,
    stopped: usize,
    /// The last move that was begun.
    moving: TaskId,
    described: usize,
    published: usize,
    events: Vec<api::MemoryStep>,
    lines: Vec<String>,
}

impl Run {
    /// A VM with the policy `vprobe` and a channel, whose vCPUs its operator has pinned to node 0, and whose memory lies on
    /// both nodes.
    fn new(mib_per_s: u64) -> Self {
        let settings = Settings { memory_bytes_per_s: mib_per_s * MIB, ..Settings::default() };
        let mut run = Self {
            core: Core::new(host(), Policies { settings, ..Policies::default() }, 7),
            now_ns: SECOND_NS,
            vm: (0, 0),
            mib: [256, 256],
            read_ns: 1,
            orders: Vec::new(),
            stopped: 0,
            moving: TaskId { vm: 0, number: 0 },
            described: 0,
            published: 0,
            events: Vec::new(),
            lines: Vec::new(),
        };
        run.step(Event::Scanned(Ok(vec![VmCandidate::new("/a", "a", 1)])));
        run.report(Report::Up(description([0, 1]), false));
        for (tid, cpu) in [(101, 0), (102, 1)] {
            let at = VcpuLocation { cpu, node: 0, pinned: Some(0), time_ns: run.now_ns };
            run.step(Event::Located(tid, Some(at)));
        }
        run.step(Event::Requested(1, Request::Attach("a".into(), ReplyTo::new(drop))));
        run.step(Event::Requested(2, Request::SetPolicy("a".into(), Policy::Vprobe, ReplyTo::new(drop))));
        run
    }

    fn report(&mut self, report: Report) {
        self.step(Event::Hypervisor(self.vm.1, report));
    }

    fn step(&mut self, event: Event) {
        self.now_ns += 1000;
        let mut more = Vec::new();
        for command in self.core.step(self.now_ns, [event]) {
            match command {
                Command::Connect(vm, connection, _) => self.vm = (vm, connection),
                Command::RestoreMasks(task, _) => more.push(Event::MasksRestored(task, Ok(0))),
                Command::Publish(task, generation, _) => {
                    self.published += 1;
                    more.push(Event::Published(task, Ok(generation + 1)));
                }
                Command::Ask(task, connection, Ask::Attach(epoch)) => {
                    let attached = Outcome::Attached(Ok(u64::from(epoch) << 32 | 1));
                    more.push(Event::Hypervisor(connection, Report::Outcome(task, attached)));
                }
                Command::Describe(..) => self.described += 1,
                Command::MoveMemory(task, pid, order) => {
                    self.moving = task;
                    self.orders.push((pid, order));
                }
                Command::StopMemory(_) => self.stopped += 1,
                Command::Announce(api::Event::Memory { step, .. }) => self.events.push(step),
                Command::Log(_, _, line) => self.lines.push(line),
                _ => {}
            }
        }
        more.into_iter().for_each(|event| self.step(event));
    }

    /// A period ends. Accesses go where the memory lies.
    fn period(&mut self) {
        self.now_ns += SECOND_NS;
        let misses = 10_000_000;
        let share = |node: usize| misses * self.mib[node] / (self.mib[0] + self.mib[1]);
        let vcpu = |vcpu: u32| VcpuReading {
            vcpu,
            tid: PID + 1 + vcpu.cast_signed(),
            cpu: Some(vcpu),
            allowed: Some(set(&vcpu.to_string())),
            ran_ns: SECOND_NS,
            counted: Counted::Counted(ThreadCounts {
                instructions: 1_000_000_000,
                llc_references: 30_000_000,
                llc_misses: misses,
                accesses: Accesses::ByNode(vec![(0, share(0)), (1, share(1))]),
                permille: 1000,
            }),
            ..VcpuReading::default()
        };
        let kib = self.mib.iter().enumerate().map(|(node, mib)| (node as u32, mib << 10)).collect();
        let memory = MemoryReading {
            read_ns: self.read_ns,
            parts: vec![MemoryRange { targets: None, kib }],
            fixed: Vec::new(),
            allowed: vec![0, 1],
        };
        let reading = HostReading {
            began_ns: self.now_ns,
            period_ns: SECOND_NS,
            source: "per-node",
            layout: Arc::new(CpuLayout::default()),
            memory: vec![(0, 8 * GIB_KIB, 4 * GIB_KIB), (1, 8 * GIB_KIB, 4 * GIB_KIB)],
            vms: vec![VmReading {
                vm: self.vm.0,
                pid: PID,
                memory: Some(Arc::new(memory)),
                vcpus: vec![vcpu(0), vcpu(1)],
                ..VmReading::default()
            }],
            ..HostReading::default()
        };
        self.step(Event::Sampled(Box::new(reading)));
    }

    fn periods(&mut self, count: usize) {
        (0..count).for_each(|_| self.period());
    }

    /// The mover says how far it has got.
    fn moved(&mut self, bytes: u64, busy: u64, ended: bool) {
        let moved = MemoryMoved { bytes, busy, ..MemoryMoved::default() };
        self.step(Event::MemoryMoved(self.moving, moved, ended));
    }

    fn shown(&self) -> Option<api::MemoryMoves> {
        self.core.show_scheduling("a").expect("known").memory
    }
}

#[test]
fn memory_goes_to_vcpus_that_are_pinned_and_the_guest_is_told_of_its_new_home() {
    let mut run = Run::new(128);
    run.periods(2);
    assert_eq!((&run.orders[..], run.shown()), (&[][..], None), "they may be moved again at once");
    run.period();
    let [(PID, order)] = &run.orders[..] else { panic!("{:?}", run.orders) };
    assert_eq!((order.from, order.to, order.bytes, order.reserve_kib), (1, 0, 256 * MIB, GIB_KIB / 2));
    let line = "a: 256.0 MiB go from node 1 to 0, by vprobe: its vCPUs may not run there; remote share 50 %, 0 % expected; \
                655 ms of work, 1100 ms a second saved";
    assert!(run.lines.iter().any(|known| known == line), "{:?}", run.lines);
    run.moved(64 * MIB, 0, false);
    let shown = run.shown().expect("one is under way");
    assert_eq!((shown.moves, shown.last.moved_bytes, shown.last.ended), (0, 64 * MIB, false));
    run.periods(30);
    assert_eq!(run.orders.len(), 1, "one at a time");

    let (described, published) = (run.described, run.published);
    run.moved(256 * MIB, 3, true);
    assert_eq!(run.described, described + 1, "where its memory is now is read at once");
    let shown = run.shown().expect("a move");
    assert_eq!((shown.moves, shown.bytes, shown.last.ended), (1, 256 * MIB, true));
    let line = "a: 256.0 MiB of 256.0 MiB were moved from node 1 to 0; 3 pages were held";
    assert!(run.lines.iter().any(|known| known == line), "{:?}", run.lines);
    assert_eq!(run.events.iter().map(|step| step.ended).collect::<Vec<_>>(), [false, true]);
    run.report(Report::Described(description([0, 0])));
    assert!(run.published > published, "both guest nodes are at home on node 0 now");
    // A report that is late changes nothing.
    run.moved(0, 0, true);
    assert_eq!(run.shown().map(|shown| shown.bytes), Some(256 * MIB));
}

#[test]
fn the_next_move_waits_until_it_was_read_where_memory_is_now() {
    let mut run = Run::new(32);
    run.periods(3);
    assert_eq!(run.orders.len(), 1, "what was saved up");
    run.moved(96 * MIB, 0, true);
    run.periods(20);
    assert_eq!(run.orders.len(), 1, "where its pages are is not known");
    (run.mib, run.read_ns) = ([352, 160], run.now_ns);
    run.periods(20);
    assert_eq!(run.orders.get(1).map(|(_, order)| order.bytes), Some(160 * MIB));
}

#[test]
fn pages_that_are_held_are_left_alone_for_a_while() {
    let mut run = Run::new(128);
    run.periods(3);
    run.moved(0, 2048, true);
    run.read_ns = run.now_ns + 1;
    assert_eq!(run.orders.len(), 1);
    run.periods((REST_NS / SECOND_NS) as usize - 1);
    assert_eq!(run.orders.len(), 1);
    run.periods(4);
    assert_eq!(run.orders.len(), 2);
}

#[test]
fn a_policy_that_is_switched_off_moves_nothing_any_more() {
    let mut run = Run::new(128);
    run.periods(3);
    run.step(Event::Requested(3, Request::SetPolicy("a".into(), Policy::Observe, ReplyTo::new(drop))));
    assert_eq!(run.stopped, 1);
    run.moved(16 * MIB, 0, true);
    run.read_ns = run.now_ns + 1;
    run.periods(100);
    assert_eq!(run.orders.len(), 1);

    let mut run = Run::new(0);
    run.periods(100);
    assert_eq!((run.orders.len(), run.shown()), (0, None), "nobody has allowed it");
}

#[test]
fn a_vm_that_is_gone_needs_no_memory_moved() {
    let mut run = Run::new(128);
    run.periods(3);
    run.report(Report::Ended);
    assert_eq!((run.orders.len(), run.stopped), (1, 1));
    run.moved(16 * MIB, 0, true);
}
