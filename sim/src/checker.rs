//! The checker. It sees the core's events and commands, and works out for itself whether the commands were right.
//! It calls nothing of the code that it checks.
//!
//! | rule | |
//! |---|---|
//! | `publication` | only through an open channel, generations one after the other, epochs never twice, and only what is true; the first one when all vCPUs were looked at, or after a dwell |
//! | `cap` | never more publications through a channel in one second than the policy allows |
//! | `dwell` | a vCPU that drifted is published after its dwell, not before; the short dwell is for calm ones |
//! | `device` | only nodes of devices that the VM has are published, each with a nearest guest node |
//! | `late` | what is due goes out in the step that makes it due, or at the deadline that the core announced |
//! | `request` | each is answered once, in time, and a yes is true |
//! | `leak` | what is opened or watched is closed or unwatched, once |
//! | `ask` | nothing is asked of a connection that is closed, and nothing beside what excludes it |
//! | `move` | only threads of the process that was described, to the CPUs of that node, one move of a vCPU at a time |
//! | `mask` | a policy's mask is within its operator's, which is given back as it was; one step of a vCPU at a time |
//! | `migration` | begun once for each request, only without a channel, and marked before if there was one; nothing is attached meanwhile, nor what an operator has detached |
//! | `memory` | only of a guest node to its home, one move of a VM at a time |
//! | `acknowledgement` | an update is announced for the generation that was acknowledged, and for no other |
//! | `deadline` | a deadline that has been served is not announced again |

mod memory;
mod migration;
mod threads;

use crate::truth::{self, Homes};
use migration::{Migrations, Wanted};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use vnuma_api as api;
use vnuma_daemon::core::event::{Ask, Command, Event, Outcome, Report};
use vnuma_model::{
    ApicId, GuestNodeId, HostNodeId, HostTopology, PciAddress, RunState, Vcpu, VcpuLocation, VmDescription,
    VmDevice,
};
use vnuma_policy::{
    Publication, SettlePolicy,
    world::{ConnectionId, HostReading, RequestId, TaskId, VmId},
};

const SECOND_NS: u64 = 1_000_000_000;
/// After so many dwells a vCPU that never rests is published wherever it is.
const PATIENCE: u64 = 4;
/// The longest that anything takes which a request waits for.
const ANSWER_NS: u64 = 90 * SECOND_NS;

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// When, simulated.
    pub time_ns: u64,
    /// Which rule.
    pub rule: &'static str,
    /// How.
    pub what: String,
}

#[derive(Debug)]
struct Connection {
    vm: VmId,
    /// Something is being done that excludes everything else of its kind.
    busy: Option<Ask>,
    /// The same of a migration.
    asked_of_migration: bool,
}

/// A vCPU, as far as the core has been notified.
#[derive(Debug, Default)]
struct VcpuView {
    boot: GuestNodeId,
    tid: i32,
    /// The core knows where it is, or that this is unknown.
    looked_at: bool,
    at: Option<VcpuLocation>,
    assigned: Option<HostNodeId>,
    /// A policy did that.
    by_policy: bool,
    diverged: Option<Diverged>,
    /// When it last stopped to differ after it had drifted.
    drift_ended_ns: Option<u64>,
}

impl VcpuView {
    /// What was published is true, since this time.
    fn is_true(&mut self, since_ns: u64) {
        if self.diverged.take().is_some_and(|diverged| !diverged.deliberate) {
            self.drift_ended_ns = Some(since_ns);
        }
    }
}

/// What was published is not true.
#[derive(Clone, Copy, Debug)]
struct Diverged {
    /// Since when, by the observer's clock, and since when the core knows.
    since_ns: u64,
    known_ns: u64,
    /// It was put on a node on purpose at any time since.
    deliberate: bool,
    /// It was put on purpose where it is now.
    stays: bool,
    /// It had not drifted for the calm before.
    calm: bool,
}

#[derive(Debug, Default)]
struct Channel {
    next: u64,
    /// When the core learned that it is open.
    since_ns: u64,
    published: BTreeMap<ApicId, GuestNodeId>,
    distances: vnuma_model::DistanceMatrix,
    devices: Vec<(PciAddress, GuestNodeId)>,
    times: VecDeque<u64>,
}

#[derive(Debug, Default)]
struct VmView {
    name: String,
    pid: i32,
    nodes: usize,
    homes: Homes,
    vcpus: BTreeMap<ApicId, VcpuView>,
    devices: Vec<VmDevice>,
    /// Its guest has not arrived yet.
    waits: bool,
    channel: Option<Channel>,
}

impl VmView {
    /// Is there a vCPU whose location has not been read yet?
    fn is_unseen(&self) -> bool {
        self.vcpus.values().any(|vcpu| !vcpu.looked_at)
    }
}

/// What is being checked.
#[derive(Debug)]
pub struct Checker {
    policy: SettlePolicy,
    host: HostTopology,
    now_ns: u64,
    connections: BTreeMap<ConnectionId, Connection>,
    vms: BTreeMap<VmId, VmView>,
    /// Watched threads and their processes.
    pub threads: BTreeMap<i32, i32>,
    /// Those of them whose moves do not wake the core.
    deferred: BTreeSet<i32>,
    /// Watched processes.
    pub processes: BTreeMap<VmId, i32>,
    owners: BTreeMap<i32, (VmId, ApicId)>,
    requests: BTreeMap<RequestId, (u64, Wanted)>,
    moving: BTreeMap<(VmId, i32, ApicId), (TaskId, HostNodeId)>,
    /// Masks that are being set, and the node that they are of.
    confining: BTreeMap<(VmId, i32, ApicId), (TaskId, Option<HostNodeId>)>,
    memory: memory::Rules,
    migrations: Migrations,
    epochs: BTreeSet<u64>,
    /// What the present step is about.
    moved: Option<(VmId, ApicId, HostNodeId, bool)>,
    acknowledged: Option<u64>,
    arrived: Option<VmId>,
    /// The move that has ended, if it is one of the VM that is there now.
    move_ended: Option<(VmId, ApicId, HostNodeId)>,
    /// A connection whose VM reports another name. The core accepts the name unless it closes the connection.
    renamed: Option<(ConnectionId, VmId, VmDescription)>,
    /// The same of one that says who it is for the first time.
    first: Option<(ConnectionId, VmId)>,
    /// Checks that were made.
    pub checks: u64,
    /// The first rule that was broken.
    pub broken: Option<Violation>,
}

impl Checker {
    /// Nothing has happened yet.
    pub fn new(policy: SettlePolicy, host: HostTopology) -> Self {
        Self {
            policy,
            host,
            now_ns: 0,
            connections: BTreeMap::new(),
            vms: BTreeMap::new(),
            threads: BTreeMap::new(),
            deferred: BTreeSet::new(),
            processes: BTreeMap::new(),
            owners: BTreeMap::new(),
            requests: BTreeMap::new(),
            moving: BTreeMap::new(),
            confining: BTreeMap::new(),
            memory: memory::Rules::default(),
            migrations: Migrations::default(),
            epochs: BTreeSet::new(),
            moved: None,
            acknowledged: None,
            arrived: None,
            move_ended: None,
            renamed: None,
            first: None,
            checks: 0,
            broken: None,
        }
    }

    /// A new daemon: nothing of the old one counts, but the epochs, and what operators have detached.
    pub fn restarted(&mut self, host: HostTopology) {
        let (epochs, migrations) = (std::mem::take(&mut self.epochs), self.migrations.restarted());
        let (checks, broken) = (self.checks, self.broken.take());
        *self = Self { epochs, migrations, checks, broken, ..Self::new(self.policy, host) };
    }

    /// A rule holds, or does not.
    pub fn expect(&mut self, holds: bool, rule: &'static str, what: impl FnOnce() -> String) {
        self.checks += 1;
        if !holds && self.broken.is_none() {
            self.broken = Some(Violation { time_ns: self.now_ns, rule, what: what() });
        }
    }

    /// Connections that are open.
    pub fn connections(&self) -> impl Iterator<Item = (ConnectionId, VmId)> + '_ {
        self.connections.iter().map(|(id, connection)| (*id, connection.vm))
    }

    /// VMs with an open channel.
    pub fn channels(&self) -> impl Iterator<Item = VmId> + '_ {
        self.vms.iter().filter(|(_, vm)| vm.channel.is_some()).map(|(id, _)| *id)
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.requests.len()
    }

    /// The core is about to be given an event.
    pub fn event(&mut self, now_ns: u64, event: &Event) {
        self.now_ns = now_ns;
        (self.moved, self.acknowledged, self.arrived) = (None, None, None);
        match event {
            Event::Hypervisor(connection, report) => self.reported(*connection, report),
            Event::Located(tid, at) => self.located(*tid, *at),
            Event::Sampled(reading) => self.sampled(reading),
            Event::ThreadEnded(tid) => {
                if let Some(vcpu) = self.vcpu_of(*tid) {
                    (vcpu.at, vcpu.diverged, vcpu.looked_at) = (None, None, true);
                }
            }
            Event::Moved(_, outcome) => {
                let Some((vm, vcpu, node)) = self.move_ended.take() else { return };
                self.moved = Some((vm, vcpu, node, outcome.is_ok()));
                if let (Ok(at), Some(view)) = (outcome, self.vcpu_mut(vm, vcpu)) {
                    (view.assigned, view.by_policy) = (Some(node), false);
                    // An older reading than the last one still says that it was put there.
                    self.place(vm, vcpu, *at);
                    self.judge(vm, vcpu, now_ns);
                }
            }
            Event::Confined(task, outcomes) => self.confined(*task, outcomes),
            Event::MemoryMoved(task, _, true) => self.memory.ended(*task),
            Event::Acknowledged(_, generation) => self.acknowledged = Some(*generation),
            Event::HostChanged(host) => {
                self.host = host.clone();
                let all: Vec<_> = self.vms.keys().copied().collect();
                all.into_iter().for_each(|vm| self.judge_all(vm, now_ns));
            }
            Event::Requested(request, wanted) => {
                self.wanted_attached(wanted);
                let fresh = self.requests.insert(*request, (now_ns, Wanted::of(wanted))).is_none();
                self.expect(fresh, "request", || format!("request {request} was given twice"));
            }
            _ => {}
        }
    }

    fn vcpu_mut(&mut self, vm: VmId, vcpu: ApicId) -> Option<&mut VcpuView> {
        self.vms.get_mut(&vm)?.vcpus.get_mut(&vcpu)
    }

    fn vcpu_of(&mut self, tid: i32) -> Option<&mut VcpuView> {
        if !self.threads.contains_key(&tid) {
            return None;
        }
        let (vm, vcpu) = *self.owners.get(&tid)?;
        self.vcpu_mut(vm, vcpu).filter(|view| view.tid == tid)
    }

    fn reported(&mut self, connection: ConnectionId, report: &Report) {
        let Some(known) = self.connections.get_mut(&connection) else { return };
        let vm = known.vm;
        match report {
            Report::Outcome(
                _,
                Outcome::Attached(_) | Outcome::Detached(_) | Outcome::Replugged(_) | Outcome::Recovered(_),
            ) => known.busy = None,
            Report::Up(..) | Report::Observed(..) => self.arrived = Some(vm),
            _ => {}
        }
        if let Report::Outcome(_, Outcome::Attached(Ok(_)) | Outcome::Recovered(Ok(_))) = report
            && let Some(channel) = self.vms.get_mut(&vm).and_then(|view| view.channel.as_mut())
        {
            channel.since_ns = self.now_ns;
        }
        // The device is gone, so that a detach under way will find nothing.
        if matches!(report, Report::Released | Report::Up(_, false)) && known.busy == Some(Ask::Detach) {
            known.busy = None;
        }
        self.migration_reported(connection, vm, report);
        match report {
            Report::Up(description, _) | Report::Described(description)
                if description.run_state == RunState::Left =>
            {
                self.forget(vm);
            }
            Report::Up(description, _) => {
                let view = self.vms.get(&vm);
                if view.is_some_and(|view| (view.pid, &view.name) != (description.pid, &description.name)) {
                    self.renamed = Some((connection, vm, description.clone()));
                } else {
                    self.first = view.is_none().then_some((connection, vm));
                    self.described(vm, description);
                }
            }
            Report::Described(description) => self.described(vm, description),
            Report::Outcome(_, Outcome::Replugged(Ok(replugged))) => {
                self.described(vm, &replugged.description);
                self.place(vm, replugged.plugged.apic_id, replugged.location);
            }
            Report::Ended => self.forget(vm),
            _ => {}
        }
    }

    /// A step has ended: the names of connections that are still open were accepted.
    pub fn step_ended(&mut self) {
        if let Some((connection, vm)) = self.first.take()
            && !self.connections.contains_key(&connection)
        {
            // What is known of it from outside stays, and so do its moves.
            self.vms.remove(&vm);
        }
        if let Some((connection, vm, description)) = self.renamed.take()
            && self.connections.contains_key(&connection)
        {
            self.forget(vm);
            self.described(vm, &description);
        }
    }

    fn forget(&mut self, vm: VmId) {
        self.vms.remove(&vm);
        self.moving.retain(|(known, ..), _| *known != vm);
        self.confining.retain(|(known, ..), _| *known != vm);
        self.migrations.forget(vm);
    }

    fn described(&mut self, vm: VmId, description: &VmDescription) {
        let now_ns = self.now_ns;
        let fresh = || VmView { name: description.name.clone(), pid: description.pid, ..VmView::default() };
        self.vms.entry(vm).or_insert_with(fresh);
        let Some(view) = self.vms.get_mut(&vm) else { return };
        (view.nodes, view.homes) = (description.guest_nodes.len(), truth::homes(description));
        view.devices.clone_from(&description.devices);
        if std::mem::replace(&mut view.waits, description.run_state == RunState::Arriving) && !view.waits {
            view.arrived();
        }
        let present: BTreeMap<ApicId, &Vcpu> = description.vcpus.iter().map(|v| (v.apic_id, v)).collect();
        view.vcpus.retain(|id, _| present.contains_key(id));
        for (id, vcpu) in present {
            let known = view.vcpus.entry(id).or_default();
            (known.boot, known.tid) = (vcpu.boot_node.unwrap_or(0), vcpu.tid);
            self.owners.insert(vcpu.tid, (vm, id));
        }
        self.judge_all(vm, now_ns);
    }

    fn located(&mut self, tid: i32, at: Option<VcpuLocation>) {
        if self.vcpu_of(tid).is_some()
            && let Some(&(vm, vcpu)) = self.owners.get(&tid)
        {
            self.place(vm, vcpu, at);
        }
    }

    /// A period shows where threads were when it began, or later.
    fn sampled(&mut self, reading: &HostReading) {
        for (vm, seen) in reading.vms.iter().flat_map(|vm| vm.vcpus.iter().map(|seen| (vm.vm, seen))) {
            // The number may be that of another VM's thread by now.
            if self.owners.get(&seen.tid) != Some(&(vm, seen.vcpu)) {
                continue;
            }
            let (Some(cpu), Some(allowed)) = (seen.cpu, &seen.allowed) else { continue };
            let Some(node) = self.host.node_of_cpu(cpu) else { continue };
            let pinned = self.host.node_of_cpus(allowed);
            self.located(seen.tid, Some(VcpuLocation { cpu, node, pinned, time_ns: reading.began_ns }));
        }
    }

    fn place(&mut self, vm: VmId, vcpu: ApicId, at: Option<VcpuLocation>) {
        let Some(view) = self.vcpu_mut(vm, vcpu) else { return };
        view.looked_at = true;
        let older = |known: VcpuLocation| at.is_some_and(|at| known.time_ns > at.time_ns);
        if view.at.is_some_and(older) {
            return;
        }
        view.at = at;
        self.judge(vm, vcpu, at.map_or(self.now_ns, |at| at.time_ns));
    }

    fn judge_all(&mut self, vm: VmId, since_ns: u64) {
        let vcpus: Vec<_> =
            self.vms.get(&vm).map(|view| view.vcpus.keys().copied().collect()).unwrap_or_default();
        vcpus.into_iter().for_each(|vcpu| self.judge(vm, vcpu, since_ns));
    }

    /// Is what was published true, by the core's events?
    fn judge(&mut self, vm: VmId, vcpu: ApicId, since_ns: u64) {
        let (host, now_ns) = (&self.host, self.now_ns);
        let Some(view) = self.vms.get_mut(&vm) else { return };
        let (Some(known), Some(channel)) = (view.vcpus.get_mut(&vcpu), &view.channel) else { return };
        let published = channel.published.get(&vcpu).copied().unwrap_or(known.boot);
        // The first report is no change.
        let told = !channel.published.is_empty() && !view.homes.is_empty();
        let Some(at) = known.at.filter(|_| told) else {
            known.diverged = None;
            return;
        };
        let node = at.pinned.unwrap_or(at.node);
        if truth::is_nearest(host, &view.homes, node, published) {
            known.is_true(since_ns);
            return;
        }
        let deliberate = at.pinned.is_some() || known.assigned == Some(node);
        let calm_ns = self.policy.calm_ns;
        let calm = known.drift_ended_ns.is_none_or(|ended_ns| since_ns.saturating_sub(ended_ns) >= calm_ns);
        let new = Diverged { since_ns, known_ns: now_ns, deliberate, stays: deliberate, calm };
        let diverged = known.diverged.get_or_insert(new);
        // An event that was delayed may say that it was there before.
        diverged.since_ns = diverged.since_ns.min(since_ns);
        diverged.deliberate |= deliberate;
        diverged.stays = deliberate;
    }

    /// The shell has a channel for a VM now.
    pub fn opened(&mut self, vm: VmId, first: u64) {
        let fresh = self.epochs.insert(first >> 32);
        self.expect(fresh, "publication", || format!("epoch {:x} was used before", first >> 32));
        if let Some(view) = self.vms.get_mut(&vm) {
            view.channel = Some(Channel { next: first, ..Channel::default() });
            let (pid, unwanted) = (view.pid, self.migrations.unwanted.contains(&view.pid));
            self.expect(!unwanted, "migration", || {
                format!("VM {vm} (process {pid}): it was detached, and is attached again")
            });
        }
    }

    /// The shell has none any more.
    pub fn closed(&mut self, vm: VmId) {
        if let Some(view) = self.vms.get_mut(&vm) {
            view.channel = None;
            view.vcpus.values_mut().for_each(|vcpu| vcpu.diverged = None);
        }
    }

    /// The core wants something done. `open`: the shell has a channel for the VM that it is about.
    pub fn command(&mut self, command: &Command, open: bool) {
        match command {
            Command::Connect(vm, connection, _) => {
                let fresh = self
                    .connections
                    .insert(*connection, Connection { vm: *vm, busy: None, asked_of_migration: false })
                    .is_none();
                let second = self.connections.values().filter(|known| known.vm == *vm).count();
                self.expect(fresh && second == 1, "leak", || format!("VM {vm} has {second} connections"));
            }
            Command::Disconnect(connection) => {
                let known = self.connections.remove(connection).is_some();
                self.expect(known, "leak", || format!("connection {connection} is closed twice"));
            }
            Command::Ask(_, connection, ask) => self.asked(*connection, ask),
            Command::Describe(connection, _) | Command::Probe(connection) => {
                let open = self.connections.contains_key(connection);
                self.expect(open, "ask", || format!("{command:?}, which is closed"));
            }
            Command::Publish(task, generation, publication) => {
                self.published(task.vm, *generation, publication);
            }
            Command::CloseChannel(vm) => {
                self.expect(open, "leak", || format!("VM {vm} has no channel to be closed"));
                self.closed(*vm);
            }
            Command::Watch(..)
            | Command::Defer(..)
            | Command::Unwatch(_)
            | Command::WatchProcess(..)
            | Command::UnwatchProcess(..)
            | Command::Move { .. }
            | Command::Confine(..)
            | Command::ForgetMask(..)
            | Command::Follow(..)
            | Command::RestoreMasks(..) => self.thread_command(command),
            Command::Count(..)
            | Command::Rank { .. }
            | Command::StopMemory(_)
            | Command::ObserveMemory(..)
            | Command::WatchHotness(..)
            | Command::Reply(_)
            | Command::LookForScheduler => {}
            Command::MoveMemory(task, pid, order) => {
                let homes = self.vms.get(&task.vm).map(|view| view.homes.clone()).unwrap_or_default();
                let wrong = self.memory.begins(*task, *pid, order, &homes);
                self.expect(wrong.is_none(), "memory", || wrong.unwrap_or_default());
            }
            Command::Announce(api::Event::Acknowledged {
                vm, generation, changed_ns, published_ns, ..
            }) => {
                let right = self.acknowledged == Some(generation.0) && changed_ns <= published_ns;
                self.expect(right, "acknowledgement", || format!("{vm} did not acknowledge {generation}"));
            }
            Command::Announce(api::Event::Gone { .. }) => {
                // Another one is there than was seen from outside, whose moves are forgotten.
                if let Some(vm) = self.arrived {
                    self.moving.retain(|(known, ..), _| *known != vm);
                }
            }
            Command::Announce(_) | Command::Look(_) | Command::ForgetRecord(_) | Command::Log(..) => {}
            Command::SettlePins(_) => {}
        }
    }

    fn asked(&mut self, connection: ConnectionId, ask: &Ask) {
        let Some(known) = self.connections.get_mut(&connection) else {
            return self
                .expect(false, "ask", || format!("{ask:?} over connection {connection}, which is closed"));
        };
        let vm = known.vm;
        match ask {
            // `departs` has looked at a migration that begins.
            Ask::Mark(_) | Ask::Migrate(..) => return,
            Ask::Resize(..) => {
                return self.expect(false, "size", || format!("VM {vm}: nobody wants {ask:?}"));
            }
            Ask::LookAtMigration | Ask::SwitchMigration | Ask::CancelMigration => {
                let beside = std::mem::replace(&mut known.asked_of_migration, true);
                return self
                    .expect(!beside, "ask", || format!("VM {vm}: {ask:?} beside another of the migration"));
            }
            Ask::Attach(_) | Ask::Detach | Ask::Replug(..) if self.migrations.under_way.contains(&vm) => {
                self.expect(false, "migration", || format!("VM {vm}: {ask:?} while it migrates"));
            }
            _ => {}
        }
        let Some(known) = self.connections.get_mut(&connection) else { return };
        let before = known.busy.replace(ask.clone());
        self.expect(before.is_none(), "ask", || format!("VM {vm}: {ask:?} beside {before:?}"));
    }

    /// A request was answered.
    pub fn answered(&mut self, request: RequestId, yes: bool) {
        let Some((_, wanted)) = self.requests.remove(&request) else {
            return self.expect(false, "request", || format!("request {request} is answered again"));
        };
        self.granted(&wanted, yes);
        if let (true, Wanted::Move(name, vcpu, node)) = (yes, &wanted) {
            let done = self.moved.is_some_and(|(_, v, n, ok)| ok && (v, n) == (*vcpu, *node));
            self.expect(done, "request", || {
                format!("{name}: vCPU {vcpu} was not moved to {node}, and that is denied")
            });
        }
    }

    fn published(&mut self, vm: VmId, generation: u64, publication: &Publication) {
        let (now_ns, policy) = (self.now_ns, self.policy);
        let Some(channel) = self.vms.get_mut(&vm).and_then(|view| view.channel.as_mut()) else {
            return self.expect(false, "publication", || format!("VM {vm} has no open channel"));
        };
        let expected = std::mem::replace(&mut channel.next, generation + 1);
        channel.times.retain(|then| now_ns - then < SECOND_NS);
        channel.times.push_back(now_ns);
        let count = channel.times.len();
        let first = channel.published.is_empty();
        let waited = now_ns >= channel.since_ns + policy.dwell_ns;
        let nodes: BTreeMap<_, _> = publication.vcpus.iter().copied().collect();
        let before = std::mem::replace(&mut channel.published, nodes);
        channel.distances = publication.distances.clone();
        channel.devices.clone_from(&publication.devices);
        self.expect(generation == expected, "publication", || {
            format!("VM {vm}: generation {generation:x} instead of {expected:x}")
        });
        let early = first && !waited && self.vms.get(&vm).is_some_and(VmView::is_unseen);
        self.expect(!early, "publication", || format!("VM {vm}: published before its vCPUs were looked at"));
        let cap = policy.max_per_second as usize;
        self.expect(count <= cap, "cap", || format!("VM {vm}: {count} publications in a second"));
        for (vcpu, node) in &publication.vcpus {
            let tid = self.vms.get(&vm).and_then(|view| Some(view.vcpus.get(vcpu)?.tid));
            // The number of a thread that has ended may be that of another VM's.
            let its = |tid: &i32| self.owners.get(tid) == Some(&(vm, *vcpu));
            let late = tid.filter(its).is_some_and(|tid| self.deferred.contains(&tid));
            self.expect(!late, "publication", || {
                format!("VM {vm}: moves of vCPU {vcpu} are published, and wake nobody")
            });
            self.told(vm, *vcpu, *node, before.get(vcpu).copied().filter(|_| !first));
        }
        let wrong = self.wrong_device(vm);
        self.expect(wrong.is_none(), "device", || format!("VM {vm}: {}", wrong.unwrap_or_default()));
        self.judge_all(vm, now_ns);
    }

    /// What is wrong with the nodes of devices that were published last.
    fn wrong_device(&self, vm: VmId) -> Option<String> {
        let view = self.vms.get(&vm)?;
        let told = &view.channel.as_ref()?.devices;
        truth::wrong_device(&self.host, &view.homes, &view.devices, told)
    }

    /// A vCPU's node was published; before, another one was.
    fn told(&mut self, vm: VmId, vcpu: ApicId, node: GuestNodeId, before: Option<GuestNodeId>) {
        let Some(view) = self.vms.get(&vm) else { return };
        let Some(known) = view.vcpus.get(&vcpu) else {
            return self.expect(false, "publication", || format!("VM {vm} has no vCPU {vcpu}"));
        };
        let changes = before.is_some_and(|before| before != node);
        if before.is_some() && !changes {
            return;
        }
        let at = known.at.filter(|_| !view.homes.is_empty()).map(|at| at.pinned.unwrap_or(at.node));
        let right = at.is_none_or(|at| truth::is_nearest(&self.host, &view.homes, at, node));
        let new = before.is_none() && view.channel.as_ref().is_none_or(|channel| channel.times.len() != 1);
        let SettlePolicy { dwell_ns, calm_dwell_ns, .. } = self.policy;
        let dwell_ns = |calm: bool| if calm { dwell_ns.min(calm_dwell_ns) } else { dwell_ns };
        let rested =
            known.diverged.is_some_and(|d| d.deliberate || self.now_ns - d.since_ns >= dwell_ns(d.calm));
        self.expect(right || new, "publication", || {
            format!("VM {vm}: vCPU {vcpu} on host node {at:?} is published as being on guest node {node}")
        });
        self.expect(rested || !changes, "dwell", || format!("VM {vm}: vCPU {vcpu} drifted a moment ago"));
    }

    /// Everything that follows at once from an event has been done. What is due has gone out, if the cap lets it.
    pub fn settled(&mut self, vm: VmId) {
        let (now_ns, policy) = (self.now_ns, self.policy);
        let Some(view) = self.vms.get(&vm) else { return };
        let Some(channel) = &view.channel else { return };
        let begins = channel.times.is_empty() && now_ns < channel.since_ns + policy.dwell_ns;
        if begins && view.is_unseen() {
            return;
        }
        let recent = channel.times.iter().filter(|then| now_ns - **then < SECOND_NS).count();
        if recent >= policy.max_per_second as usize {
            return;
        }
        let overdue = view.vcpus.iter().find(|(_, vcpu)| {
            vcpu.diverged.is_some_and(|d| d.stays || now_ns > d.known_ns + PATIENCE * policy.dwell_ns)
        });
        let overdue =
            overdue.map(|(vcpu, view)| format!("vCPU {vcpu} of VM {vm} is not published: {view:?}"));
        let listed = view.vcpus.keys().eq(channel.published.keys());
        let far = truth::distances_hold(&self.host, &view.homes, view.nodes, &channel.distances);
        self.expect(overdue.is_none(), "late", || overdue.unwrap_or_default());
        self.expect(listed, "late", || format!("vCPUs of VM {vm} came or went, and that is not published"));
        self.expect(far, "late", || format!("distances of VM {vm} changed, and that is not published"));
        let wrong = self.wrong_device(vm);
        self.expect(wrong.is_none(), "late", || format!("VM {vm}: {}", wrong.unwrap_or_default()));
    }

    /// VM of a thread or a connection, for [`settled`](Self::settled).
    pub fn vm_of(&self, event: &Event) -> Option<VmId> {
        match event {
            Event::Hypervisor(connection, _) => self.connections.get(connection).map(|known| known.vm),
            Event::Located(tid, _) => self.owners.get(tid).map(|(vm, _)| *vm),
            Event::Moved(task, _) | Event::Confined(task, _) => Some(task.vm),
            _ => None,
        }
    }

    /// Now and then everything is looked at.
    pub fn sweep(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        let open: Vec<_> = self.channels().collect();
        open.into_iter().for_each(|vm| self.settled(vm));
        let late = self.requests.iter().find(|(_, (asked_ns, _))| now_ns - asked_ns > ANSWER_NS);
        let late = late.map(|(id, (asked_ns, wanted))| format!("{id} ({wanted:?}) waits since {asked_ns}"));
        self.expect(late.is_none(), "request", || late.unwrap_or_default());
    }
}
