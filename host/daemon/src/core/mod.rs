//! vnumad's decisions, without I/O, threads or clock: events in, commands out.
//!
//! ```text
//!            ┌──────────────────────────── Core::step ────────────────────────────┐
//!  Event ───▶│ observe ──▶ World ──▶ decide ──▶ Plan ──▶ act, publish ──▶ commands │───▶ Command
//!    ▲       └─────────────────────────────────────────────────────────────────────┘       │
//!    └──────────────────────── outcome of each command ◀── whoever carries it out ◀─────────┘
//! ```
//!
//! | file | |
//! |---|---|
//! | [`event`] | the events and commands |
//! | `vms` | VMs come, change and go |
//! | `channels` | their topology channels |
//! | `locations` | where their vCPUs are |
//! | `names` | what VMs are called |
//! | `requests` | what operators want |
//! | `reply` | who gets the answers |
//! | `act` | a plan becomes commands: nothing else acts |
//! | `scheduling` | policies of VMs, and the masks that they want |
//! | `others` | threads of VMs that run no vCPU |
//! | `memory` | memory that is moved |
//! | `homing` | where memory is, and what is displaced |
//! | `rehome` | guest nodes that get another home |
//! | `resize` | guest nodes that grow and shrink |
//! | `migration` | VMs that leave for another host, or arrive |
//! | `render` | VMs in the form of the API |
//! | `counts` | what was done to VMs, summed up for metrics |
//! | `registry` | which VM is meant |
//! | `vm_state` | what is kept of each VM |
//! | `waiting` | requests that wait for something |
//! | `uses` | what VMs have of the host, for those who place another one |

mod act;
mod channels;
pub(crate) mod content;
pub mod counts;
pub mod event;
mod homing;
mod locations;
mod memory;
mod migration;
mod names;
mod others;
mod refusal;
mod registry;
mod rehome;
mod render;
mod reply;
mod requests;
mod resize;
mod scheduling;
pub(crate) mod uses;
mod vm_state;
mod vms;
mod waiting;

pub use refusal::{Refusal, sanitize};
pub use reply::{Reply, ReplyTo, Requester};

use event::{Command, Event, Level};
use std::{collections::BTreeMap, time::Duration};
use vnuma_api as api;
use vnuma_model::HostTopology;
use vnuma_policy::{
    Memories, Policies, World, decide,
    world::{Vm, VmId},
};

/// The state of the loop: all that is known, and the requests that wait.
pub struct Core {
    world: World,
    policies: Policies,
    /// What the policies remember.
    memories: Memories,
    /// Which VM is meant.
    registry: registry::Registry,
    /// What is kept of each VM that is known.
    states: vm_state::VmStates,
    /// Requests that wait for something.
    waiting: waiting::WaitingList,
    /// When threads were looked at, and VMs described.
    looked: locations::Looked,
    now_ns: u64,
    commands: Vec<Command>,
    /// Answers of this step, or refusals. They are given last, so that they show the state after it.
    replies: Vec<(waiting::Due, Option<Refusal>)>,
}

/// With each of so many resyncs it is looked for scx_vnuma, which wakes a thread up: while a VM has a policy, and while none has
/// (every 10 and 30 s by default). Before each step of a policy it is looked for as well.
const LOOK_FOR_SCHEDULER: [u32; 2] = [5, 15];

impl Core {
    /// A core that knows the host and no VMs. No earlier vnumad may have used `first_epoch`.
    pub fn new(host: HostTopology, policies: Policies, first_epoch: u32) -> Self {
        Self {
            world: World::new(host),
            policies,
            memories: Memories::default(),
            registry: registry::Registry { last_epoch: first_epoch, ..Default::default() },
            states: vm_state::VmStates::default(),
            waiting: waiting::WaitingList::default(),
            looked: locations::Looked::default(),
            now_ns: 0,
            commands: Vec::new(),
            replies: Vec::new(),
        }
    }

    /// Sets the longest time between two descriptions of a VM whose memory is not bound.
    pub fn describing_every(mut self, interval: Duration) -> Self {
        self.looked.describe_ns = interval.as_nanos() as u64;
        self
    }

    /// The body of the loop: takes in events that come together, decides once, and returns commands in the order in which they are
    /// to be carried out.
    pub fn step(&mut self, now_ns: u64, events: impl IntoIterator<Item = Event>) -> Vec<Command> {
        self.now_ns = now_ns;
        events.into_iter().for_each(|event| self.observe(event));
        self.call_due();
        let plan = decide(&self.world, &self.policies, &mut self.memories, now_ns);
        self.count();
        self.world.note_waits(&plan, now_ns);
        self.act(plan.steps);
        self.world.commit(now_ns);
        self.give_answers();
        let mut commands = std::mem::take(&mut self.commands);
        commands.sort_by_key(|command| match command {
            // Masks are given back by the connection and the process that had them set.
            Command::UnwatchProcess(..) | Command::Disconnect(_) | Command::Connect(..) => 1,
            // Guests first: to wake a watcher of events or to write a log line takes as long as to ring.
            Command::Announce(_) | Command::Log(..) => 2,
            _ => 0,
        });
        commands
    }

    /// Takes commands that were carried out back, for their memory: to allocate it anew was 2 % of a vCPU's move.
    pub fn reuse(&mut self, mut commands: Vec<Command>) {
        commands.clear();
        if self.commands.is_empty() {
            self.commands = commands;
        }
    }

    /// When [`Event::Woken`] is due, if nothing else happens.
    pub fn next_deadline_ns(&self) -> Option<u64> {
        self.world.next_deadline_ns()
    }

    /// What was done to a VM so far.
    pub fn counts(&self, id: VmId) -> counts::VmCounts {
        self.states.of.get(&id).map(|state| state.counts.clone()).unwrap_or_default()
    }

    /// Migrations so far, by what came of them.
    pub fn migrations(&self) -> BTreeMap<&'static str, u64> {
        self.states.migrated.counts()
    }

    /// All that is known.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The VM that a thread runs a vCPU of.
    pub(crate) fn vm_of_thread(&self, tid: i32) -> Option<VmId> {
        self.registry.threads.get(&tid).map(|(vm, _)| *vm)
    }

    fn observe(&mut self, event: Event) {
        match event {
            Event::Scanned(Ok(candidates)) => self.scanned(candidates),
            Event::Scanned(Err(problem)) => self.scan_failed(problem),
            Event::Hypervisor(connection, report) => self.reported(connection, report),
            Event::Located(tid, location) => self.located(tid, location),
            Event::ThreadEnded(tid) => self.thread_ended(tid),
            Event::Acknowledged(vm, generation) => self.acknowledged(vm, generation),
            Event::Driver(vm, status) => self.driver_reported(vm, status),
            Event::Published(task, outcome) => self.published(task, outcome),
            Event::Moved(task, outcome) => self.moved(task, outcome),
            Event::ProcessState(vm, pid, stopped) => self.process_state(vm, pid, stopped),
            Event::LooksHang(vm, pid, hang) => self.looks_hang(vm, pid, hang),
            Event::MainLoopBusy(vm, pid) => self.main_loop_busy(vm, pid),
            Event::ProcessEnded(vm, pid) => self.process_ended(vm, pid),
            Event::HostChanged(host) => self.host_changed(host),
            Event::Requested(request, wanted) => self.requested(request, wanted),
            Event::Sampled(reading) => self.sampled(reading),
            Event::Confined(task, outcomes) => self.confined(task, outcomes),
            Event::Followed(task, outcome) => self.followed(task, outcome),
            Event::MemoryObserved(task, outcome) => self.memory_observed(task, outcome),
            Event::HotnessWatched(task, outcome) => self.hotness_watched(task, outcome),
            Event::MemoryMoved(task, moved, ended) => self.memory_moved(task, moved, ended),
            Event::Switched(switch) => self.switched(switch),
            Event::MasksRestored(task, outcome) => self.masks_restored(task, outcome),
            Event::Resync => self.resync(),
            Event::Woken => {}
        }
    }

    /// Answers a request at the end of the step, with what is known then.
    fn answer<T: Send + 'static>(
        &mut self,
        to: ReplyTo<T>,
        show: impl FnOnce(&Self) -> Result<T, Refusal> + Send + 'static,
    ) {
        self.replies.push((waiting::Due::new(to, show), None));
    }

    fn give_answers(&mut self) {
        self.answer_policies();
        for (due, refusal) in std::mem::take(&mut self.replies) {
            let reply = due.reply(refusal.map_or(Ok(&*self), Err));
            self.commands.push(Command::Reply(reply));
        }
    }

    fn host_changed(&mut self, host: HostTopology) {
        let (nodes, cpus) = (host.nodes.len(), host.nodes.iter().map(|node| node.cpus.len()).sum::<usize>());
        self.log(
            None,
            Level::Info,
            format!("the host's topology changed: {nodes} nodes, {cpus} CPUs online"),
        );
        self.world.host_changed(host, self.now_ns);
        // A CPU without a known node may have one now.
        self.look_at_all();
    }

    /// Repairs what a lost event has left wrong.
    fn resync(&mut self) {
        self.waiting.forget_gone();
        self.look_at_unread();
        self.describe_unbound();
        self.describe_leaving();
        self.describe_resized();
        self.restore_again();
        self.world.look_at_others();
        let [needed, otherwise] = LOOK_FOR_SCHEDULER;
        let due = if self.states.want_readings == 0 { otherwise } else { needed };
        if self.looked.is_scheduler_due(due) {
            self.commands.push(Command::LookForScheduler);
        }
    }

    fn vm(&self, id: VmId) -> Option<&Vm> {
        self.world.get(id)?.vm.as_ref()
    }

    /// `about`: the VM that can have as many of these lines logged as it likes. What operators have done is always logged.
    fn log(&mut self, about: impl Into<Option<VmId>>, level: Level, line: String) {
        self.commands.push(Command::Log(about.into(), level, line));
    }

    fn announce(&mut self, event: api::Event) {
        self.commands.push(Command::Announce(event));
    }
}
