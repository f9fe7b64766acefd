//! The core by itself: events in, commands out.

use std::collections::BTreeMap;
use vnuma_daemon::core::{
    Core,
    event::{Candidate, Command, Event, Report, Request},
};
use vnuma_placement::{Policies, world::ConnectionId};
use vnuma_topology::{
    CpuSet, DistanceMatrix, GuestNode, HostNode, HostTopology, MemoryBacking, Vcpu, VcpuLocation,
    VmDescription,
};

const MS: u64 = 1_000_000;

fn host() -> HostTopology {
    let node = |id| HostNode { id, cpus: CpuSet::from_iter([id]), ..HostNode::default() };
    HostTopology {
        nodes: vec![node(0), node(1)],
        distances: DistanceMatrix::new(vec![vec![10, 21], vec![21, 10]]).expect("square"),
        ..HostTopology::default()
    }
}

/// A VM of two guest nodes at home on both host nodes, with a vCPU each.
fn description(name: &str, pid: i32) -> VmDescription {
    let memory = |home| MemoryBacking {
        id: format!("ram{home}"),
        size_bytes: 1 << 30,
        policy: "bind".into(),
        host_nodes: vec![home],
        resident_kib: Vec::new(),
    };
    let node = |id| GuestNode { id, memory_bytes: 1 << 30, memory: Some(memory(id)) };
    let vcpu = |id: u32| Vcpu { index: id, apic_id: id, boot_node: Some(id), tid: pid + 1 + id as i32 };
    VmDescription {
        name: name.into(),
        pid,
        run_state: "running".into(),
        guest_nodes: vec![node(0), node(1)],
        vcpus: vec![vcpu(0), vcpu(1)],
        spare_slots: BTreeMap::new(),
    }
}

struct Run {
    core: Core,
    now_ns: u64,
}

impl Run {
    fn new() -> Self {
        Self { core: Core::new(host(), Policies::default(), 7), now_ns: 1 }
    }

    fn step(&mut self, event: Event) -> Vec<Command> {
        self.now_ns += MS;
        self.core.step(self.now_ns, event)
    }

    /// A VM is listed and connected to.
    fn connect(&mut self, name: &str) -> ConnectionId {
        let listed = Candidate { handle: format!("test:{name}"), name: name.into(), instance: 1 };
        let commands = self.step(Event::Scanned(Ok(vec![listed])));
        let connection = commands.iter().find_map(|command| match command {
            Command::Connect(_, connection, _) => Some(*connection),
            _ => None,
        });
        connection.expect("a connection is asked for")
    }

    fn up(&mut self, connection: ConnectionId, description: VmDescription) -> Vec<Command> {
        self.step(Event::Hypervisor(connection, Report::Up(description, false)))
    }

    fn locate(&mut self, tid: i32, node: u32) -> Vec<Command> {
        let time_ns = self.now_ns;
        self.step(Event::Located(tid, Some(VcpuLocation { cpu: node, node, pinned: Some(node), time_ns })))
    }
}

fn watches_of_processes(commands: &[Command]) -> Vec<(bool, i32)> {
    let watch = |command: &Command| match command {
        Command::WatchProcess(_, pid) => Some((true, *pid)),
        Command::UnwatchProcess(_, pid) => Some((false, *pid)),
        _ => None,
    };
    commands.iter().filter_map(watch).collect()
}

#[test]
fn another_process_behind_a_handle_is_watched_in_the_place_of_the_first() {
    let mut run = Run::new();
    let connection = run.connect("a");
    assert_eq!(watches_of_processes(&run.up(connection, description("a", 100))), [(true, 100)]);
    assert_eq!(watches_of_processes(&run.up(connection, description("a", 200))), [(true, 200)]);
    // One that says another name is another VM, in the same process: it stays watched.
    assert_eq!(watches_of_processes(&run.up(connection, description("b", 200))), []);
    assert_eq!(run.core.names(), ["b"]);
    let ended = run.step(Event::Hypervisor(connection, Report::Ended));
    assert_eq!(watches_of_processes(&ended), [(false, 200)]);
    assert_eq!(run.core.names(), Vec::<String>::new());
}

#[test]
fn a_vm_keeps_its_name_whatever_it_says_later() {
    let mut run = Run::new();
    let connection = run.connect("a");
    run.up(connection, description("a", 100));
    run.step(Event::Hypervisor(connection, Report::Described(description("other", 100))));
    assert_eq!(run.core.names(), ["a"]);
    assert!(run.core.show("other").is_err());
}

#[test]
fn an_attach_is_answered_once_everything_true_is_published() {
    let mut run = Run::new();
    let connection = run.connect("a");
    run.up(connection, description("a", 100));
    run.locate(101, 1);
    run.locate(102, 1);
    let asked = run.step(Event::Requested(1, Request::Attach("a".into())));
    assert!(asked.iter().all(|command| !matches!(command, Command::Reply(..))), "{asked:?}");
    let attached = run.step(Event::Hypervisor(connection, Report::Attached(Ok((8 << 32) | 1))));
    let published = attached.iter().find_map(|command| match command {
        Command::Publish(vm, generation, publication) => Some((*vm, *generation, publication.vcpus.clone())),
        _ => None,
    });
    let (vm, generation, vcpus) = published.expect("a publication");
    assert_eq!((generation, vcpus), ((8 << 32) | 1, vec![(0, 1), (1, 1)]));
    assert!(!attached.iter().any(|command| matches!(command, Command::Reply(..))));
    // Nothing else is published before it is known how that went.
    let moved = run.locate(102, 0);
    assert!(!moved.iter().any(|command| matches!(command, Command::Publish(..))));
    let done = run.step(Event::Published(vm, Ok((8 << 32) | 2)));
    assert!(matches!(done.first(), Some(Command::Publish(_, generation, _)) if *generation == (8 << 32) | 2));
    assert!(matches!(done.last(), Some(Command::Reply(1, Ok(_)))), "{done:?}");
}

#[test]
fn what_the_plan_moves_is_published_at_once_though_no_affinity_confines_it() {
    let mut run = Run::new();
    let connection = run.connect("a");
    run.up(connection, description("a", 100));
    run.locate(101, 0);
    run.locate(102, 1);
    run.step(Event::Requested(1, Request::Attach("a".into())));
    run.step(Event::Hypervisor(connection, Report::Attached(Ok((8 << 32) | 1))));
    let vm = run.core.world().iter().next().expect("one VM").0;
    run.step(Event::Published(vm, Ok((8 << 32) | 2)));
    let drift = |run: &mut Run, cpu: u32| {
        let location = VcpuLocation { cpu, node: cpu, pinned: None, time_ns: run.now_ns };
        Some(location)
    };
    let location = drift(&mut run, 1);
    let drifted = run.step(Event::Located(101, location));
    assert!(
        !drifted.iter().any(|command| matches!(command, Command::Publish(..))),
        "drift waits for its dwell"
    );
    let location = drift(&mut run, 0);
    run.step(Event::Located(101, location));

    let ordered = run.step(Event::Requested(2, Request::Move("a".into(), 0, 1)));
    assert!(matches!(ordered.as_slice(), [Command::Move { tid: 101, node: 1, .. }]), "{ordered:?}");
    let location = drift(&mut run, 1);
    let moved = run.step(Event::Moved(vm, 0, 1, Ok(location)));
    let publish = moved.iter().position(|command| matches!(command, Command::Publish(..)));
    let reply = moved.iter().position(|command| matches!(command, Command::Reply(2, Ok(_))));
    assert!(publish.is_some() && publish < reply, "{moved:?}");
}
