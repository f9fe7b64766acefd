//! VMs come, change and go.

use super::{
    Core,
    event::{Command, Level, Outcome, Report},
    migration::has_arrived,
    names::is_one,
    refusal::Refusal,
    render,
    waiting::Until,
};
use std::collections::{BTreeMap, HashSet};
use vnuma_api as api;
use vnuma_hypervisor::VmError;
use vnuma_model::{ApicId, Party, RunState, Vcpu, VmCandidate, VmDescription};
use vnuma_policy::migration::MigrationEvent;
use vnuma_policy::world::{
    ChannelEvent, ConnectionId, DescriptionSource, Link, LinkEvent, ManagedVm, Move, ProcessState,
    StopReason, Task, TaskId, Vm, VmId, has_left,
};

/// How often a VM is described again whose memory can move without an event: its hypervisor and the kernel pay for that. A
/// young VM is described more often, as most of its memory is touched for the first time then: at first after this part of
/// the longest interval.
const YOUNG_PART: u64 = 15;

impl Core {
    /// The backends have listed their VMs.
    pub(super) fn scanned(&mut self, candidates: Vec<VmCandidate>) {
        self.registry.scan_problem = None;
        let listed: HashSet<&str> = candidates.iter().map(|candidate| candidate.handle.as_str()).collect();
        // A VM lives on without its handle, until its process ends.
        let over = |managed: &ManagedVm| managed.vm.is_none() && !listed.contains(managed.handle.as_str());
        let gone: Vec<_> = self.world.iter().filter(|(_, m)| over(m)).map(|(id, _)| id).collect();
        gone.into_iter().for_each(|id| self.forget_handle(id));
        for candidate in candidates {
            let (now_ns, instance) = (self.now_ns, candidate.instance);
            let Some(&id) = self.registry.handles.get(&candidate.handle) else {
                let id = self.registry.fresh_id();
                self.registry.handles.insert(candidate.handle.clone(), id);
                self.world.insert(id, ManagedVm::new(candidate, now_ns));
                continue;
            };
            // Compared first, so that a scan without news touches nothing.
            if self.world.get(id).is_some_and(|managed| managed.instance != instance)
                && let Some(managed) = self.world.get_mut(id)
            {
                managed.instance = instance;
                self.registry.twins.remove(&id);
                self.link_event(id, LinkEvent::Replaced { now_ns });
            }
        }
    }

    /// A scan that fails ends no VM.
    pub(super) fn scan_failed(&mut self, problem: String) {
        if self.registry.scan_problem.as_ref() != Some(&problem) {
            self.log(None, Level::Warn, format!("cannot look for VMs; the known ones stay: {problem}"));
        }
        self.registry.scan_problem = Some(problem);
    }

    /// Connects to VMs whose retry is due, and describes those whose guests have seen devices come or go.
    pub(super) fn call_due(&mut self) {
        let now_ns = self.now_ns;
        for id in self.world.due(now_ns) {
            let Some(managed) = self.world.get(id) else { continue };
            let look_ns = managed.vm.as_ref().and_then(|vm| vm.look_ns);
            if matches!(managed.link, Link::Disconnected { retry_ns, .. } if retry_ns <= now_ns) {
                let handle = managed.handle.clone();
                let connection = self.registry.fresh_id();
                self.registry.connections.insert(connection, id);
                self.link_event(id, LinkEvent::Connect(connection));
                self.commands.push(Command::Connect(id, connection, handle));
            }
            if look_ns.is_some_and(|look_ns| look_ns <= now_ns)
                && let Some((_, vm)) = self.world.vm_mut(id)
            {
                (vm.look_ns, vm.described_ns) = (None, now_ns);
                self.describe(id);
            }
        }
    }

    /// Takes a link to its next state, and logs a problem once.
    pub(super) fn link_event(&mut self, id: VmId, event: LinkEvent) {
        let Some(managed) = self.world.get_mut(id) else { return };
        let Some(next) = managed.link.next(event) else { return };
        let before = std::mem::replace(&mut managed.link, next);
        let problem = managed.link.problem().filter(|problem| before.problem() != Some(*problem));
        let line = problem.map(|problem| format!("{}: it does not answer: {problem}", managed.handle));
        let closed = before.connection().filter(|connection| managed.link.connection() != Some(*connection));
        if let Some(line) = line {
            self.log(id, Level::Warn, line);
        }
        if let Some(connection) = closed {
            self.registry.connections.remove(&connection);
            self.commands.push(Command::Disconnect(connection));
        }
    }

    /// A connection reports. Reports of a closed one may still arrive.
    pub(super) fn reported(&mut self, connection: ConnectionId, report: Report) {
        let Some(&id) = self.registry.connections.get(&connection) else { return };
        match report {
            Report::Up(description, _) | Report::Described(description) if has_left(&description) => {
                self.left(id);
            }
            Report::Up(description, channel) => self.up(id, description, channel),
            Report::Described(description) => self.described(id, description),
            Report::NotDescribed => self.not_described(id),
            Report::Left => self.left(id),
            Report::Slow(problem, pid) => {
                self.watch_process(id, pid);
                self.link_event(id, LinkEvent::Slow(problem));
            }
            Report::Prompt => self.link_event(id, LinkEvent::Prompt),
            Report::Silent(problem, pid) => self.silent(id, problem, pid),
            Report::Observed(pid, vcpus, certain) => self.observed(id, pid, vcpus, certain),
            Report::Outcome(task, outcome) => self.asked(task, outcome),
            Report::FoundMarked => {
                self.world.vm_mut(id).into_iter().for_each(|(_, vm)| vm.marked = true);
                self.migration_event(id, MigrationEvent::Marked(Ok(())));
            }
            Report::FoundPlugged => self.found_channel(id, true),
            Report::Released => self.unplugged(id, ChannelEvent::Released),
            Report::Rebooted => self.rebooted(id),
            Report::Ended => {
                self.link_event(id, LinkEvent::Ended { now_ns: self.now_ns });
                self.forget_vm(id, true);
            }
            Report::Lost(error) => self.lost(id, &error),
        }
    }

    /// What a hypervisor was asked has ended. Of what is not under way any more, as its VM is gone, say, nothing comes.
    fn asked(&mut self, task: TaskId, outcome: Outcome) {
        let id = task.vm;
        let Some((_, vm)) = self.world.vm_mut(id) else { return };
        let migrates = vm.migration.as_ref().is_some_and(|migration| migration.waits_for(task));
        match outcome {
            Outcome::Attached(how) if vm.plug.end(task).is_some() => self.attached(id, how),
            Outcome::Detached(how) if vm.plug.end(task).is_some() => self.detached(id, how),
            Outcome::Recovered(how) if vm.plug.end(task).is_some() => self.recovered(id, how),
            Outcome::Replugged(how) if let Some(replug) = vm.replug.end(task) => {
                self.replugged(id, replug, how)
            }
            Outcome::Marked(how) if let Some(marked) = vm.mark.end(task) => self.marked(id, marked, how),
            Outcome::MigrationBegun(how) if migrates => self.migration_begun(id, how),
            Outcome::Migration(how) if migrates => self.migration_looked(id, how),
            Outcome::Resized(how) => self.resize_answered(task, how.map_err(|why| why.to_string())),
            _ => {}
        }
    }

    /// A hypervisor has greeted and described its VM.
    fn up(&mut self, id: VmId, description: VmDescription, channel: bool) {
        let name = description.name.clone();
        if self.described_by_another(id, description.pid, &name) {
            // It has the VM as long as it knows it. Should it forget it, this one is tried again.
            self.registry.twins.insert(id, description.pid);
            let now_ns = self.now_ns;
            return self
                .link_event(id, LinkEvent::Lost { problem: None, known: false, at_once: false, now_ns });
        }
        self.registry.twins.remove(&id);
        if let Some(problem) = self.claim_name(id, &name) {
            let (shown, now_ns) = (Some(problem.clone()), self.now_ns);
            self.link_event(id, LinkEvent::Lost { problem: shown, known: false, at_once: false, now_ns });
            return self.refuse_in_flight(id, &problem);
        }
        self.link_event(id, LinkEvent::Up);
        self.drop_observed_twins(id, description.pid);
        self.watch_process(id, description.pid);
        let known = self.vm(id);
        let same = known.is_some_and(|vm| {
            vm.description.pid == description.pid
                && vm.source == DescriptionSource::Hypervisor
                && vm.name() == name
        });
        if !same {
            // What was observed without the hypervisor is dropped. A VM that was known under this name stays.
            let renamed = known.is_some_and(|vm| vm.name() != name || vm.description.pid != description.pid);
            self.replace_vm(id, description.clone(), DescriptionSource::Hypervisor, renamed);
        }
        self.described(id, description);
        self.found_channel(id, channel);
    }

    /// Does another handle have the VM of this process: of another backend, or of another connection to the same one?
    fn described_by_another(&self, id: VmId, pid: i32, name: &str) -> bool {
        let Some(own) = self.world.get(id) else { return false };
        let is_it = |vm: &Vm| vm.source == DescriptionSource::Hypervisor && vm.description.pid == pid;
        self.world.iter().any(|(other, managed)| {
            other != id && managed.vm.as_ref().is_some_and(is_it) && is_one(own, name, managed)
        })
    }

    /// The same VM may have been observed through another monitor of its process, under another name.
    fn drop_observed_twins(&mut self, id: VmId, pid: i32) {
        let is_twin = |vm: &Vm| vm.source != DescriptionSource::Hypervisor && vm.description.pid == pid;
        let twin =
            |(other, managed): &(VmId, &ManagedVm)| *other != id && managed.vm.as_ref().is_some_and(is_twin);
        let twins: Vec<_> = self.world.iter().filter(twin).map(|(other, _)| other).collect();
        twins.into_iter().for_each(|other| self.drop_vm(other, false));
    }

    /// Replaces what was known of a VM.
    fn replace_vm(
        &mut self,
        id: VmId,
        description: VmDescription,
        source: DescriptionSource,
        announce_end: bool,
    ) {
        let was_known = self.vm(id).is_some();
        if announce_end {
            self.drop_vm(id, false);
        } else if was_known {
            self.watch_only(id, &[]);
        }
        // Moves that were asked for before are still answered.
        let before = self.world.get_mut(id).and_then(|managed| managed.vm.take());
        let memory_policy = before.as_ref().map_or(self.policies.memory.policy, |vm| vm.homing.policy);
        let (moves, kept) = before.map(|vm| (vm.moves, vm.scheduling)).unzip();
        let (name, pid, count) = (description.name.clone(), description.pid, description.vcpus.len());
        let mut vm = Vm::new(&self.world.host, description, source, self.now_ns);
        vm.moves = moves.unwrap_or_default();
        match kept {
            Some(scheduling) => vm.scheduling = scheduling,
            None => {
                vm.scheduling.policy = self.policies.schedule;
                // An earlier vnumad may have confined its vCPUs, and been killed.
                vm.scheduling.restore.wanted = Some(());
            }
        }
        self.registry.names.insert(name.clone(), id);
        if let Some(managed) = self.world.get_mut(id) {
            managed.vm = Some(vm);
        }
        self.state(id);
        self.states.recount.push(id);
        self.world.set_memory_policy(id, memory_policy, self.now_ns);
        if announce_end || !was_known {
            let how = if source == DescriptionSource::Hypervisor { "" } else { "; it does not answer" };
            self.log(id, Level::Info, format!("{name}: VM found, process {pid}, {count} vCPUs{how}"));
            self.announce(api::Event::Appeared { vm: name, time_ns: self.now_ns });
        }
    }

    /// Why a VM cannot have its name, if it cannot. A VM that was only observed has the name of its handle, and gives it up
    /// to a VM that reports this name. Of two that report it, the one has it that its operator called so, by its socket or its domain:
    /// a QEMU can say anything.
    fn claim_name(&mut self, id: VmId, name: &str) -> Option<String> {
        let other = self.registry.names.get(name).copied().filter(|other| *other != id)?;
        let (managed, own) = (self.world.get(other)?, self.world.get(id)?);
        if managed.vm.as_ref()?.source != DescriptionSource::Hypervisor {
            self.drop_vm(other, false);
            return None;
        }
        let taken = |by: &ManagedVm| format!("its name `{name}` is taken by the VM at {}", by.handle);
        if managed.fallback_name == name || own.fallback_name != name {
            return Some(taken(managed));
        }
        let problem = taken(own);
        let (shown, now_ns) = (Some(problem.clone()), self.now_ns);
        self.refuse_in_flight(other, &problem);
        self.drop_left(other);
        self.link_event(other, LinkEvent::Lost { problem: shown, known: false, at_once: false, now_ns });
        None
    }

    /// Takes over a description, and has the threads watched that it names.
    pub(super) fn described(&mut self, id: VmId, mut description: VmDescription) {
        let now_ns = self.now_ns;
        let vcpus = description.vcpus.clone();
        let pid = description.pid;
        let Some((host, vm)) = self.world.vm_mut(id) else { return };
        let arrived = has_arrived(vm, &description);
        // A VM keeps its first name: a later one may belong to another VM.
        vm.name().clone_into(&mut description.name);
        vm.describe(host, description, now_ns);
        if let Some(rehome) = &mut vm.homing.rehome {
            rehome.unseen = false;
        }
        let served = vm.channel.generation().is_some();
        self.watch_only(id, &vcpus);
        let mut new = Vec::new();
        for vcpu in vcpus {
            let mine = (id, vcpu.apic_id);
            if self.registry.threads.get(&vcpu.tid) != Some(&mine) {
                // The number may have belonged to a thread of another process.
                if let Some((other, _)) = self.registry.threads.insert(vcpu.tid, mine) {
                    self.commands.push(Command::Unwatch(vcpu.tid));
                    self.describe_if_doubtful(other, pid);
                }
                self.commands.push(Command::Watch(pid, vcpu.tid));
                new.push(vcpu.tid);
            }
        }
        if !new.is_empty() && !served {
            self.commands.push(Command::Defer(new, true));
        }
        self.drop_moves_of_missing(id);
        self.recount(id);
        self.reached(id, Until::Described);
        if arrived {
            self.arrived(id);
        }
    }

    /// Two VMs name the same thread, which belongs to one of them: either description may be out of date. The VM that has lost the thread
    /// is described again, and takes it back if the thread is still its own.
    fn describe_if_doubtful(&mut self, other: VmId, pid: i32) {
        if self.vm(other).is_some_and(|vm| vm.description.pid != pid) {
            self.describe(other);
        }
    }

    /// Answers moves of vCPUs that no longer exist.
    fn drop_moves_of_missing(&mut self, id: VmId) {
        let Some((_, vm)) = self.world.vm_mut(id) else { return };
        let (name, vcpus) = (vm.name().to_owned(), &vm.description.vcpus);
        let present: Vec<u32> = vcpus.iter().map(|vcpu| vcpu.apic_id).collect();
        let is_gone = |task: &mut Task<Move>| task.what().is_none_or(|of| !present.contains(&of.vcpu));
        let gone: Vec<_> = vm.moves.extract_if(.., is_gone).collect();
        for wanted in gone.iter().filter_map(Task::what) {
            let (vm, vcpu, present) = (name.clone(), wanted.vcpu, present.clone());
            self.refuse_first(id, Until::Moved(wanted.request), Refusal::NoVcpu { vm, vcpu, present });
        }
    }

    /// Watches no threads of a VM but those of these vCPUs.
    fn watch_only(&mut self, id: VmId, vcpus: &[Vcpu]) {
        let wanted: BTreeMap<i32, ApicId> = vcpus.iter().map(|vcpu| (vcpu.tid, vcpu.apic_id)).collect();
        let Some(state) = self.states.of.get_mut(&id) else { return };
        for tid in std::mem::replace(&mut state.watched, wanted.keys().copied().collect()) {
            let owner = self.registry.threads.get(&tid).copied();
            if owner.is_some_and(|(vm, apic_id)| vm == id && wanted.get(&tid) != Some(&apic_id)) {
                self.registry.threads.remove(&tid);
                self.commands.push(Command::Unwatch(tid));
            }
        }
    }

    /// A VM does not answer. What is known of it stays.
    fn silent(&mut self, id: VmId, problem: String, pid: i32) {
        if self.vm(id).is_some_and(|vm| vm.description.pid != pid) {
            self.drop_vm(id, true);
        }
        self.watch_process(id, pid);
        self.refuse_unanswered(id, &problem, false);
        self.link_event(id, LinkEvent::Silent(problem));
    }

    /// vCPUs were observed of a VM whose hypervisor does not answer.
    fn observed(&mut self, id: VmId, pid: i32, vcpus: Vec<Vcpu>, certain: bool) {
        let Some(managed) = self.world.get(id) else { return };
        let name = managed.fallback_name.clone();
        if managed.vm.as_ref().is_some_and(|vm| vm.source == DescriptionSource::Hypervisor) {
            return;
        }
        // A QEMU may have several monitors, and more than one VM may want a name.
        let named = self.registry.names.get(&name).is_some_and(|other| *other != id);
        let same_process = |(other, managed): (VmId, &ManagedVm)| {
            other != id && managed.vm.as_ref().is_some_and(|vm| vm.description.pid == pid)
        };
        if named || self.world.iter().any(same_process) {
            return;
        }
        let source = if certain { DescriptionSource::Kvm } else { DescriptionSource::ThreadNames };
        let description = VmDescription {
            name,
            pid,
            run_state: RunState::Unknown,
            guest_nodes: Vec::new(),
            vcpus,
            spare_slots: Default::default(),
            devices: Vec::new(),
            memory_devices: Vec::new(),
        };
        match self.world.get_mut(id).and_then(|managed| managed.vm.as_mut()) {
            Some(vm) => vm.source = source,
            None => self.replace_vm(id, description.clone(), source, false),
        }
        self.watch_process(id, pid);
        self.described(id, description);
    }

    /// There is no connection. A known VM stays known, and is still observed.
    fn lost(&mut self, id: VmId, error: &VmError) {
        let (known, now_ns) = (self.vm(id).is_some(), self.now_ns);
        let expected = !known && error.nobody_listening();
        if expected {
            let handle = self.world.get(id).map(|managed| managed.handle.to_string()).unwrap_or_default();
            self.log(id, Level::Debug, format!("{handle}: no VM behind it: {error}"));
        }
        let problem = (!expected).then(|| error.to_string());
        // A place in the queue is free as soon as another client leaves.
        let at_once = error.queue_full();
        self.link_event(id, LinkEvent::Lost { problem, known, at_once, now_ns });
        if !known {
            self.unwatch_process(id);
        }
        self.refuse_in_flight(id, &error.to_string());
    }

    /// Requests over a lost connection fail.
    fn refuse_in_flight(&mut self, id: VmId, problem: &str) {
        self.migration_event(id, MigrationEvent::ConnectionLost);
        self.refuse_unanswered(id, problem, true);
        if let Some((_, vm)) = self.world.vm_mut(id) {
            vm.connection_lost();
        }
        self.channel_event(id, ChannelEvent::ConnectionLost);
        if let Some(state) = self.states.of.get_mut(&id) {
            state.attach_problem = None;
        }
    }

    /// Forgets a VM. `ended`: its process has ended.
    fn forget_vm(&mut self, id: VmId, ended: bool) {
        self.unwatch_process(id);
        self.drop_vm(id, ended);
    }

    /// Forgets a VM whose process goes on without it.
    pub(super) fn drop_left(&mut self, id: VmId) {
        self.drop_vm(id, false);
        self.unwatch_process(id);
    }

    /// Forgets a VM and keeps its process watched, as that belongs to the VM that replaces this one.
    fn drop_vm(&mut self, id: VmId, ended: bool) {
        self.watch_only(id, &[]);
        let Some(vm) = self.world.drop_vm(id, ended) else { return };
        if self.registry.names.get(vm.name()) == Some(&id) {
            self.registry.names.remove(vm.name());
        }
        let state = self.states.remove(id);
        if vm.channel.generation().is_some() {
            self.commands.push(Command::CloseChannel(id));
        }
        if ended {
            self.commands.push(Command::ForgetRecord(vm.description.pid));
        }
        if let Some((pid, _)) = state.counted {
            self.commands.push(Command::Count(id, pid, Vec::new()));
        }
        let name = vm.description.name.clone();
        self.remember_migration(vm);
        self.refuse_ended(id, &name);
        self.log(id, Level::Info, format!("{name}: VM gone"));
        self.announce(api::Event::Gone { vm: name, time_ns: self.now_ns });
    }

    /// Forgets a handle that has no known VM and is not listed any more.
    fn forget_handle(&mut self, id: VmId) {
        self.unwatch_process(id);
        self.registry.twins.remove(&id);
        let Some(managed) = self.world.remove(id) else { return };
        self.registry.handles.remove(&managed.handle);
        if let Some(connection) = managed.link.connection() {
            self.registry.connections.remove(&connection);
            self.commands.push(Command::Disconnect(connection));
        }
    }

    /// The guest boots again. From a channel that is not served it reads what another process left there.
    fn rebooted(&mut self, id: VmId) {
        let now_ns = self.now_ns;
        let Some((_, vm)) = self.world.vm_mut(id) else { return };
        if vm.channel.generation().is_some() || !vm.channel.is_plugged() {
            vm.placement.rebooted(now_ns);
        }
    }

    fn watch_process(&mut self, id: VmId, pid: i32) {
        let Some(managed) = self.world.get_mut(id) else { return };
        if managed.process.is_none_or(|process| process.pid != pid) {
            managed.process = Some(ProcessState { pid, stopped: None, looks_hang: false });
            self.commands.push(Command::WatchProcess(id, pid));
        }
    }

    fn unwatch_process(&mut self, id: VmId) {
        if let Some(process) = self.world.get_mut(id).and_then(|managed| managed.process.take()) {
            self.commands.push(Command::UnwatchProcess(id, process.pid));
        }
    }

    /// A process is stopped, or runs again.
    pub(super) fn process_state(&mut self, id: VmId, pid: i32, stopped: Option<StopReason>) {
        let Some(managed) = self.world.get_mut(id) else { return };
        let Some(process) = managed.process.as_mut().filter(|process| process.pid == pid) else { return };
        if std::mem::replace(&mut process.stopped, stopped) == stopped {
            return;
        }
        let (handle, problem) = (managed.handle.clone(), render::problem(managed));
        match stopped {
            Some(_) => self.log(id, Level::Warn, format!("{handle}: {}", problem.unwrap_or_default())),
            None => self.log(id, Level::Info, format!("{handle}: the hypervisor (process {pid}) runs again")),
        }
    }

    /// A look at a process does not return, or has returned.
    pub(super) fn looks_hang(&mut self, id: VmId, pid: i32, hang: bool) {
        let Some(managed) = self.world.get_mut(id) else { return };
        let Some(process) = managed.process.as_mut().filter(|process| process.pid == pid) else { return };
        if std::mem::replace(&mut process.looks_hang, hang) == hang {
            return;
        }
        let (handle, does) = (managed.handle.clone(), if hang { "does not answer" } else { "answers" });
        let level = if hang { Level::Warn } else { Level::Info };
        self.log(id, level, format!("{handle}: the hypervisor (process {pid}) {does} looks"));
    }

    /// A main loop that waits for events will answer. Any other has to be probed.
    pub(super) fn main_loop_busy(&mut self, id: VmId, pid: i32) {
        let Some(managed) = self.world.get(id) else { return };
        let is_it = managed.process.is_some_and(|process| process.pid == pid && process.stopped.is_none());
        if let (true, Link::Answers { connection }) = (is_it, &managed.link) {
            self.commands.push(Command::Probe(*connection));
        }
    }

    /// A process has ended. A connection reports that as well.
    pub(super) fn process_ended(&mut self, id: VmId, pid: i32) {
        let Some(managed) = self.world.get(id) else { return };
        if managed.process.is_some_and(|process| process.pid == pid) {
            // Its manager knows whether it has ended or left, and the connection reports that.
            if managed.vm.as_ref().is_some_and(Vm::is_migrating) && managed.link.connection().is_some() {
                return;
            }
            self.link_event(id, LinkEvent::Ended { now_ns: self.now_ns });
            self.forget_vm(id, true);
        }
    }

    /// Has a VM described again at its own expense, if its hypervisor is connected to.
    pub(super) fn describe(&mut self, id: VmId) {
        self.describe_for(id, Some(Party::Vm(id)));
    }

    /// The same at the expense of this party, or of none.
    pub(super) fn describe_for(&mut self, id: VmId, payer: Option<Party>) {
        let connection = self.world.get(id).and_then(|managed| managed.link.connection());
        self.commands.extend(connection.map(|connection| Command::Describe(connection, payer)));
    }

    /// The same. It counts as described now, so that a slow VM is asked only once.
    pub(super) fn describe_once(&mut self, id: VmId, payer: Option<Party>) {
        if let Some((_, vm)) = self.world.vm_mut(id) {
            vm.described_ns = self.now_ns;
        }
        self.describe_for(id, payer);
    }

    /// Unbound memory changes its home without an event.
    pub(super) fn describe_unbound(&mut self) {
        let (now_ns, most_ns) = (self.now_ns, self.looked.describe_ns);
        let is_due = |managed: &ManagedVm| {
            let Some(vm) = &managed.vm else { return false };
            let wait_ns = now_ns.saturating_sub(vm.found_ns).clamp(most_ns / YOUNG_PART, most_ns);
            vm.has_unbound_memory() && now_ns.saturating_sub(vm.described_ns) >= wait_ns
        };
        let due: Vec<_> = self.world.iter().filter(|(_, m)| is_due(m)).map(|(id, _)| id).collect();
        due.into_iter().for_each(|id| self.describe_once(id, None));
    }
}
