//! Memory of VMs that is looked at and moved: what the simulated threads show and do.

use crate::{
    action::{Action, MICRO, MILLI, SECOND},
    simulation::Simulation,
    world::Slot,
};
use vnuma_daemon::core::event::{Event, Request};
use vnuma_model::{PageKind, WatchedRegion};
use vnuma_policy::{
    hotness::Hotness,
    memory_move::{MemoryPolicy, MoveMemory},
    residency::{AreaSample, Found, Keeps, MemoryArea, MemoryObservation},
    world::{MemoryMoved, TaskId, VmId},
};

/// Pages of a guest node that are looked at.
const SAMPLES: u64 = 1000;

impl Simulation {
    /// Pages of a process are looked at.
    pub(crate) fn observe_memory(&mut self, task: TaskId, pid: i32, areas: &[MemoryArea]) {
        self.count("looks at memory");
        let known = self.daemon.machine_of(task.vm, pid).is_some();
        let outcome = match known && !(self.chaotic && self.rng.chance(50)) {
            false => Err(format!("process {pid} has ended")),
            true => Ok(self.observation(areas)),
        };
        self.soon(500 * MILLI, Event::MemoryObserved(task, outcome));
    }

    fn observation(&mut self, areas: &[MemoryArea]) -> MemoryObservation {
        let nodes: Vec<u32> = self.world.host.nodes().collect();
        let mut sample = |area: &MemoryArea| {
            let (mut found, mut pages) = (Vec::new(), Vec::new());
            for &node in &nodes {
                let kept = self.rng.chance(50).then_some(Keeps::Shared);
                let count = self.rng.within(0..SAMPLES / nodes.len() as u64 + 1);
                found.push(Found { node, kind: PageKind::Base, kept, locked: false, count });
                let first = pages.len() as u64;
                let page = |at: u64| (area.start + (first + at) * (area.bytes / SAMPLES), node);
                pages.extend((0..count).filter(|_| kept.is_none()).map(page));
            }
            AreaSample { area: *area, looked: SAMPLES, found, swapped: 0, pages }
        };
        let areas = areas.iter().map(&mut sample).collect();
        let free = |node: &u32| (*node, 32 << 20, self.rng.within(0..16 << 20));
        MemoryObservation {
            began_ns: self.now_ns,
            cost_ns: 20 * MILLI,
            areas,
            nodes: nodes.iter().map(free).collect(),
            pools: Vec::new(),
            allowed: nodes.clone(),
            unmapped: false,
        }
    }

    /// It is watched how hot memory of a process is. Often that is not known.
    pub(crate) fn watch_hotness(&mut self, task: TaskId, pid: i32, areas: &[MemoryArea]) {
        self.count("watches of hotness");
        let known = self.daemon.machine_of(task.vm, pid).is_some();
        let took_ns = self.rng.within(SECOND..8 * SECOND);
        let outcome = match known && self.rng.chance(700) {
            false => Err(format!("process {pid} has ended")),
            true => {
                let mut regions: Vec<WatchedRegion> = Vec::new();
                for area in areas {
                    let middle = area.start + self.rng.within(1..area.bytes / 4096) * 4096;
                    for (start, end) in [(area.start, middle), (middle, area.start + area.bytes)] {
                        let accesses = self.rng.within(0..21) as u32;
                        regions.push(WatchedRegion { start, end, accesses });
                    }
                }
                regions.sort_by_key(|region| region.start);
                let (began_ns, ended_ns) = (self.now_ns, self.now_ns + took_ns);
                Ok(Hotness { began_ns, ended_ns, cost_ns: 20 * MILLI, looks: 20, regions })
            }
        };
        self.soon(took_ns, Event::HotnessWatched(task, outcome));
    }

    /// Pages of a process are moved. That ends some time, with some of them moved.
    pub(crate) fn move_memory(&mut self, task: TaskId, order: &MoveMemory) {
        self.count("moves of memory");
        let moves = &mut self.daemon.memory;
        moves.last += 1;
        let serial = moves.last;
        moves.under_way.insert(task.vm, (task, serial, order.bytes));
        let takes_ns = self.rng.within(MICRO..8 * SECOND);
        self.ours(takes_ns, Action::EndMemory(task.vm, serial));
    }

    /// What is under way for a VM ends, unless it has ended already.
    pub(crate) fn end_memory(&mut self, vm: VmId, serial: Option<u64>) {
        let known = self.daemon.memory.under_way.get(&vm).copied();
        let Some((task, _, most)) =
            known.filter(|(_, known, _)| serial.is_none_or(|serial| serial == *known))
        else {
            return;
        };
        self.daemon.memory.under_way.remove(&vm);
        let stuck = self.rng.chance(200);
        let moved = MemoryMoved {
            bytes: if stuck { 0 } else { self.rng.within(0..most + 1) },
            busy: if stuck { 3000 } else { 0 },
            problem: serial.is_none().then(|| "it was stopped".to_owned()),
            ..MemoryMoved::default()
        };
        self.event(Event::MemoryMoved(task, moved, true));
    }

    /// An operator sets a memory policy, or wants to see where memory is.
    pub(crate) fn ask_memory(&mut self, slot: Slot) {
        let name = self.world.places[slot].name.clone();
        match self.rng.index(8) {
            at @ 0..=4 => self.ask(|to| Request::SetMemoryPolicy(name, MemoryPolicy::ALL[at], to)),
            _ => self.ask(|to| Request::ShowMemory(name, to)),
        }
    }

    /// No memory policy is left.
    pub(crate) fn forget_memory_policies(&mut self) {
        for name in self.daemon.core.names() {
            self.ask(|to| Request::SetMemoryPolicy(name, MemoryPolicy::None, to));
        }
    }
}
