//! VMs come, change and go.

use super::{Daemon, Entry};
use crate::{
    discovery::ChangeWatch,
    error::Refusal,
    message::ConnectionId,
    report,
    tell::Teller,
    vm::{Known, Replugging, Slot, Vm},
    vm_thread::{Command, Report, VmThread},
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    collections::{HashMap, HashSet},
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};
use tracing::{debug, info, warn};
use vnuma_api::Event;
use vnuma_channel::Channel;
use vnuma_host::location::monotonic_ns;
use vnuma_hypervisor::{Plugged, VmCandidate, VmError, VmHandle};
use vnuma_placement::ReplugEnd;
use vnuma_topology::VmDescription;

/// Between two attempts to connect: at first, and at most.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(10);

/// At most, where a VM is known to be there.
const LAST_RETRY_OF_VM: Duration = Duration::from_secs(2);

/// How often memory that is not bound is looked at; it costs QEMU and the kernel something. A VM that is
/// young is looked at more often, as most of its memory is touched for the first time then.
const UNBOUND_MOST_NS: u64 = 30_000_000_000;
const UNBOUND_LEAST_NS: u64 = 2_000_000_000;

impl Daemon {
    /// Looks which sockets there are, and connects where that is due.
    pub(super) fn rescan(&mut self) {
        self.scanner.clear_changes();
        let scanned = self.scanner.scan();
        self.await_changes();
        let candidates = match scanned {
            Ok(candidates) => candidates,
            Err(error) => {
                // Not knowing which sockets there are ends no VM.
                let problem = error.to_string();
                if self.scan_problem.as_ref() != Some(&problem) {
                    warn!(problem, "no VMs can be found; those that are known stay");
                }
                self.scan_problem = Some(problem);
                return;
            }
        };
        self.scan_problem = None;
        let present: HashSet<_> = candidates.iter().map(|candidate| candidate.handle.clone()).collect();
        let over = |entry: &Entry| entry.vm.as_ref().is_none_or(|vm| has_ended(&vm.pidfd));
        let gone = self.entries.iter().filter(|(handle, entry)| !present.contains(*handle) && over(entry));
        for handle in gone.map(|(handle, _)| handle.clone()).collect::<Vec<_>>() {
            self.forget_vm(&handle);
            self.entries.remove(&handle);
        }
        for candidate in candidates {
            let (handle, instance) = (candidate.handle.clone(), candidate.instance);
            let entry = self.entries.entry(handle.clone()).or_insert_with(|| Entry::new(candidate));
            if entry.vm.as_ref().is_some_and(|vm| entry.connection.is_none() && has_ended(&vm.pidfd)) {
                self.forget_vm(&handle);
            } else {
                entry.notice_instance(instance);
            }
        }
        self.connect_due();
    }

    /// From the first scan on, changes are waited for where the backend sees any.
    fn await_changes(&mut self) {
        let (None, Some(changes)) = (&self.changes, self.scanner.changes()) else { return };
        match ChangeWatch::start(changes, self.messages.clone()) {
            Ok(watch) => self.changes = Some(watch),
            Err(error) => warn!(%error, "changes cannot be waited for: new VMs are found by polling only"),
        }
    }

    /// Connects to those whose time has come.
    pub(super) fn connect_due(&mut self) {
        let now = Instant::now();
        let due = |entry: &&Entry| entry.connection.is_none() && entry.retry_at <= now;
        let due: Vec<_> = self.entries.values().filter(due).map(|entry| entry.candidate.clone()).collect();
        due.into_iter().for_each(|candidate| self.connect(candidate));
    }

    fn connect(&mut self, candidate: VmCandidate) {
        self.last_id += 1;
        let (id, handle) = (self.last_id, candidate.handle.clone());
        let thread = VmThread::start(id, candidate, (self.factory)(), self.messages.clone());
        let Some(entry) = self.entries.get_mut(&handle) else { return };
        match thread {
            Ok(thread) => entry.connection = Some((id, thread)),
            Err(error) => entry.failed(format!("no thread to talk to it: {error}")),
        }
    }

    /// A VM's thread reports.
    pub(super) fn reported(&mut self, id: ConnectionId, report: Report) {
        let from_here = |entry: &Entry| entry.connection.as_ref().is_some_and(|(current, _)| *current == id);
        // A thread that was given up may still have had something to say.
        let Some((handle, entry)) = self.entries.iter_mut().find(|(_, entry)| from_here(entry)) else {
            return;
        };
        let handle = handle.clone();
        match report {
            Report::Up { description, pidfd, channel } => self.up(&handle, id, description, pidfd, channel),
            Report::Described(description) => self.described(&handle, description),
            Report::Silent { error, pid } => self.silent(&handle, &error, pid),
            Report::Slow { error, pid } => entry.slow(&error, pid),
            Report::Prompt => (entry.slow, entry.problem) = (false, None),
            Report::Glimpsed { pid, pidfd, glimpse } => self.glimpsed(&handle, id, (pid, pidfd), glimpse),
            Report::TakenOver(outcome) => self.taken_over(&handle, outcome),
            Report::Attached(outcome) => self.attached(&handle, outcome),
            Report::Detached(outcome) => self.detached(&handle, outcome),
            Report::Replugged(outcome) => self.replugged(&handle, outcome),
            Report::Released => self.released(&handle),
            Report::Rebooted => {
                if let Some(vm) = &mut entry.vm {
                    vm.rebooted();
                }
            }
            Report::Ended => {
                entry.disconnect();
                entry.problem = None;
                entry.retry_at = Instant::now() + FIRST_RETRY;
                self.forget_vm(&handle);
            }
            Report::Lost(error) => self.lost(&handle, &error),
        }
    }

    fn up(
        &mut self,
        handle: &VmHandle,
        id: ConnectionId,
        description: VmDescription,
        pidfd: OwnedFd,
        channel: bool,
    ) {
        let name = description.name.clone();
        if let Some(problem) = self.claim_name(handle, &name) {
            if let Some(entry) = self.entries.get_mut(handle) {
                entry.disconnect();
                entry.failed(problem);
            }
            return;
        }
        let known = self.entries.get(handle).and_then(|entry| entry.vm.as_ref());
        let same = known.is_some_and(|vm| vm.description.pid == description.pid && !has_ended(&vm.pidfd));
        // Of one that was only seen from outside nothing is kept but that it is there.
        let glimpsed = known.filter(|vm| same && vm.known != Known::Described).map(|vm| vm.name().to_owned());
        let renamed = glimpsed.as_ref().is_some_and(|before| *before != name);
        if !same || renamed {
            self.forget_vm(handle);
        } else if glimpsed.is_some() {
            self.unwatch(handle, |_, _| false);
        }
        let Some(entry) = self.entries.get_mut(handle) else { return };
        (entry.problem, entry.slow, entry.silent, entry.backoff) = (None, false, false, FIRST_RETRY);
        if glimpsed.is_some() {
            entry.vm = None;
        }
        entry.look_at_process();
        let policy = self.config.settle;
        let new = || Vm::new(id, &self.host, description.clone(), pidfd, policy);
        entry.vm.get_or_insert_with(new);
        if !same || renamed {
            info!(vm = name, pid = description.pid, vcpus = description.vcpus.len(), "VM found");
            self.tell_watchers(|time_ns| Event::Appeared { vm: name, time_ns });
        }
        self.described(handle, description);
        self.found_channel(handle, channel);
    }

    /// Why a VM cannot have its name, if it cannot. One that was only seen from outside is called like its handle, and
    /// makes way for one that has the name itself.
    fn claim_name(&mut self, handle: &VmHandle, name: &str) -> Option<String> {
        let named = |entry: &Entry| entry.vm.as_ref().filter(|vm| vm.name() == name).map(|vm| vm.known);
        let other = self.entries.iter().filter(|(other, _)| *other != handle);
        let (other, known) = other.filter_map(|(other, entry)| Some((other, named(entry)?))).next()?;
        if known == Known::Described {
            return Some(format!("its name `{name}` is taken by the VM at {other}"));
        }
        let other = other.clone();
        self.forget_vm(&other);
        None
    }

    /// A VM has answered, for the first time or again: is its channel as it was left?
    fn found_channel(&mut self, handle: &VmHandle, plugged: bool) {
        let Some(entry) = self.entries.get_mut(handle) else { return };
        let (Some(vm), Some((_, thread))) = (&mut entry.vm, &entry.connection) else { return };
        let undoing = std::mem::take(&mut vm.undoing);
        match (&vm.slot, plugged) {
            (Slot::None, true) if undoing => {
                info!(vm = vm.name(), "an attach that had failed was carried out after all, and is undone");
                vm.stop_serving(Slot::Lost);
                // It reports that the device is gone, now or when the guest lets go.
                thread.send(Command::Detach);
            }
            (Slot::None | Slot::Lost, true) => self.take_over(handle),
            (Slot::Serving(_) | Slot::Lost, false) => self.released(handle),
            _ => {}
        }
    }

    /// Takes over a description, and watches the threads that it names.
    pub(super) fn described(&mut self, handle: &VmHandle, description: VmDescription) {
        let wanted: HashMap<i32, u32> =
            description.vcpus.iter().map(|vcpu| (vcpu.tid, vcpu.apic_id)).collect();
        let Some(vm) = self.entries.get_mut(handle).and_then(|entry| entry.vm.as_mut()) else { return };
        vm.describe(&self.host, description);
        self.unwatch(handle, |tid, apic_id| wanted.get(&tid) == Some(&apic_id));
        for (tid, apic_id) in wanted {
            let mine = (handle.to_owned(), apic_id);
            if self.threads.get(&tid) != Some(&mine) {
                // A thread of this process now, whoever had its number before.
                self.locations.unwatch(tid);
                self.threads.insert(tid, mine);
                self.looks.add(tid);
            }
        }
    }

    /// Forgets the threads of a VM that `keep` does not want.
    fn unwatch(&mut self, handle: &VmHandle, keep: impl Fn(i32, u32) -> bool) {
        let locations = &mut self.locations;
        self.threads.retain(|&tid, (owner, apic_id)| {
            let stays = owner != handle || keep(tid, *apic_id);
            if !stays {
                locations.unwatch(tid);
            }
            stays
        });
    }

    /// A VM has ended, or nobody knows it any more: everything of it goes.
    pub(super) fn forget_vm(&mut self, handle: &VmHandle) {
        self.unwatch(handle, |_, _| false);
        let Some(vm) = self.entries.get_mut(handle).and_then(|entry| entry.vm.take()) else { return };
        if has_ended(&vm.pidfd) {
            self.records.remove(vm.description.pid);
        }
        let name = vm.description.name;
        let ended = || Err(Refusal::Ended { vm: name.clone() });
        if let Slot::Attaching { reply, .. } = vm.slot {
            // Nobody waiting for it is fine, here and below.
            let _ = reply.send(ended());
        }
        if let Some(reply) = vm.detaching {
            let _ = reply.send(ended());
        }
        if let Some(replugging) = vm.replugging {
            replugging.answer(Err(Refusal::Ended { vm: name.clone() }));
        }
        info!(vm = name, "VM gone");
        self.tell_watchers(|time_ns| Event::Gone { vm: name, time_ns });
    }

    /// There is no connection, or no more. A VM that is known stays known, and is still observed.
    fn lost(&mut self, handle: &VmHandle, error: &VmError) {
        let Some(entry) = self.entries.get_mut(handle) else { return };
        entry.disconnect();
        if let Some(vm) = &mut entry.vm {
            let problem = || error.to_string();
            let refusal = |vm: &Vm| Refusal::NotConnected { vm: vm.name().to_owned(), problem: problem() };
            match std::mem::replace(&mut vm.slot, Slot::None) {
                Slot::Attaching { reply, .. } => drop(reply.send(Err(refusal(vm)))),
                Slot::TakingOver => vm.slot = Slot::Lost,
                slot => vm.slot = slot,
            }
            if let Some(reply) = vm.detaching.take() {
                let _ = reply.send(Err(refusal(vm)));
            }
            if let Some(replugging) = vm.replugging.take() {
                let refused = Err(refusal(vm));
                replugging.answer(refused);
            }
        }
        if entry.vm.is_none() && error.nobody_listening() {
            debug!(%handle, %error, "no VM behind this handle");
            entry.problem = None;
            entry.retry();
        } else {
            if error.queue_full() {
                // A place in the queue is free as soon as somebody leaves.
                entry.backoff = FIRST_RETRY;
            }
            entry.failed(error.to_string());
        }
        if entry.vm.as_ref().is_some_and(|vm| has_ended(&vm.pidfd)) {
            entry.problem = None;
            self.forget_vm(handle);
        }
    }

    /// Takes over the channel of a vnumad that has ended, and tells everything that is true.
    fn take_over(&mut self, handle: &VmHandle) {
        let epoch = self.epochs.take();
        let Some(vm) = self.entries.get_mut(handle).and_then(|entry| entry.vm.as_mut()) else { return };
        // What it was told is not known here, until it acknowledges what it is told now.
        vm.stop_serving(Slot::TakingOver);
        let (name, pid) = (vm.name().to_owned(), vm.description.pid);
        let identity = vm.check_tellable().and_then(|()| {
            self.records.read(pid).map_err(|source| Refusal::System { vm: name.clone(), source })
        });
        let asked = identity.and_then(|identity| {
            let thread = self.entries.get(handle).and_then(|entry| entry.connection.as_ref());
            let command = Command::TakeOver { identity, epoch };
            let sent = thread.is_some_and(|(_, thread)| thread.send(command));
            if sent { Ok(()) } else { Err(Refusal::Ended { vm: name }) }
        });
        if let Err(refusal) = asked {
            self.taken_over(handle, Err(refusal));
        }
    }

    fn taken_over(&mut self, handle: &VmHandle, outcome: Result<Channel, Refusal>) {
        let messages = self.messages.clone();
        let Some(vm) = self.entries.get_mut(handle).and_then(|entry| entry.vm.as_mut()) else { return };
        if !matches!(vm.slot, Slot::TakingOver) {
            return;
        }
        let name = vm.name().to_owned();
        let told = outcome
            .and_then(|channel| {
                Teller::new(channel, vm.id, messages)
                    .map_err(|source| Refusal::System { vm: name.clone(), source })
            })
            .and_then(|teller| vm.serve(teller));
        match told {
            Ok(told) => {
                info!(vm = name, "topology channel taken over");
                self.tell_watchers(|time_ns| Event::Attached { vm: name, time_ns });
                self.watchers.tell(&told);
            }
            Err(refusal) => {
                vm.stop_serving(Slot::Lost);
                warn!(vm = name, %refusal, "its topology channel is lost; detach and attach it");
            }
        }
    }

    fn attached(&mut self, handle: &VmHandle, outcome: Result<(), VmError>) {
        let messages = self.messages.clone();
        let Some(vm) = self.entries.get_mut(handle).and_then(|entry| entry.vm.as_mut()) else { return };
        let slot = std::mem::replace(&mut vm.slot, Slot::None);
        let Slot::Attaching { channel, reply } = slot else {
            vm.slot = slot;
            return;
        };
        let name = vm.name().to_owned();
        if let Err(error) = outcome {
            self.records.remove(vm.description.pid);
            let refusal = match error {
                _ if has_ended(&vm.pidfd) => Refusal::Ended { vm: name },
                VmError::Timeout { .. } => {
                    vm.undoing = true;
                    Refusal::Unfinished { source: error }
                }
                VmError::AlreadyAttached { .. } => {
                    vm.stop_serving(Slot::Lost);
                    error.into()
                }
                error => error.into(),
            };
            let _ = reply.send(Err(refusal));
            return;
        }
        let time_ns = monotonic_ns();
        let told = match Teller::new(channel, vm.id, messages) {
            Ok(teller) => vm.serve(teller),
            Err(error) => Err(Refusal::System { vm: name.clone(), source: error }),
        };
        match told {
            Ok(told) => {
                let _ = reply.send(Ok(report::answering(vm)));
                info!(vm = name, "topology channel attached");
                self.watchers.tell(&Event::Attached { vm: name, time_ns });
                self.watchers.tell(&told);
            }
            Err(refusal) => {
                vm.stop_serving(Slot::Lost);
                let _ = reply.send(Err(refusal));
            }
        }
    }

    fn detached(&mut self, handle: &VmHandle, outcome: Result<(), VmError>) {
        let Some(vm) = self.entries.get_mut(handle).and_then(|entry| entry.vm.as_mut()) else { return };
        let reply = vm.detaching.take();
        match outcome {
            Ok(()) | Err(VmError::NotAttached { .. }) => {
                self.released(handle);
                let vm = self.entries.get(handle).and_then(|entry| entry.vm.as_ref());
                if let (Some(reply), Some(vm)) = (reply, vm) {
                    let _ = reply.send(Ok(report::answering(vm)));
                }
            }
            Err(error) => {
                if let Some(reply) = reply {
                    let _ = reply.send(Err(error.into()));
                }
            }
        }
    }

    /// A vCPU has another slot, and with it another name; or has not.
    fn replugged(&mut self, handle: &VmHandle, outcome: Result<(Plugged, VmDescription), VmError>) {
        let Some(vm) = self.entries.get_mut(handle).and_then(|entry| entry.vm.as_mut()) else { return };
        let Some(replugging) = vm.replugging.take() else { return };
        vm.replugger.ended(end_of(&outcome), monotonic_ns());
        let Replugging { vcpu, guest_node, .. } = replugging;
        let name = vm.name().to_owned();
        let (plugged, description) = match outcome {
            Ok(done) => done,
            Err(error) => {
                if let VmError::ReplugUndescribed { new: new_vcpu, .. } = error {
                    warn!(vm = name, vcpu, new_vcpu, guest_node, %error, "vCPU replugged");
                    self.tell_watchers(|time_ns| Event::Replugged {
                        vm: name,
                        vcpu,
                        new_vcpu,
                        guest_node,
                        time_ns,
                    });
                } else {
                    warn!(vm = name, vcpu, %error, "a vCPU was not replugged");
                }
                return replugging.answer(Err(error.into()));
            }
        };
        let new_vcpu = plugged.apic_id;
        info!(vm = name, vcpu, new_vcpu, guest_node, "vCPU replugged");
        self.described(handle, description);
        // Threads are looked at by turns; the answer shows where this one is.
        self.look(handle, new_vcpu, plugged.tid);
        if let Some(vm) = self.entries.get(handle).and_then(Entry::report) {
            replugging.answer(Ok(vnuma_api::Replugged { vcpu, new_vcpu, guest_node, vm }));
        }
        self.tell_watchers(|time_ns| Event::Replugged { vm: name, vcpu, new_vcpu, guest_node, time_ns });
    }

    /// The device is unplugged, whoever asked for it.
    fn released(&mut self, handle: &VmHandle) {
        let Some(vm) = self.entries.get_mut(handle).and_then(|entry| entry.vm.as_mut()) else { return };
        if !matches!(vm.slot, Slot::Serving(_) | Slot::Lost) {
            return;
        }
        vm.stop_serving(Slot::None);
        self.records.remove(vm.description.pid);
        let name = vm.name().to_owned();
        info!(vm = name, "topology channel detached");
        self.tell_watchers(|time_ns| Event::Detached { vm: name, time_ns });
    }

    pub(super) fn describe_again(&self, handle: &VmHandle) {
        if let Some((_, thread)) = self.entries.get(handle).and_then(|entry| entry.connection.as_ref()) {
            thread.send(Command::Describe);
        }
    }

    /// Unbound memory finds other homes without an event.
    pub(super) fn describe_unbound(&mut self) {
        let now_ns = monotonic_ns();
        for entry in self.entries.values_mut() {
            let (Some(vm), Some((_, thread))) = (&mut entry.vm, &entry.connection) else { continue };
            let age_ns = now_ns.saturating_sub(vm.found_ns);
            let wait_ns = age_ns.clamp(UNBOUND_LEAST_NS, UNBOUND_MOST_NS);
            if vm.has_unbound_memory() && now_ns.saturating_sub(vm.described_ns) >= wait_ns {
                // Counts as described, so that a slow VM is asked once only.
                vm.described_ns = now_ns;
                thread.send(Command::Describe);
            }
        }
    }
}

impl Entry {
    fn new(candidate: VmCandidate) -> Self {
        Self {
            candidate,
            connection: None,
            vm: None,
            problem: None,
            slow: false,
            silent: false,
            peer: None,
            halt: None,
            instance: None,
            retry_at: Instant::now(),
            backoff: FIRST_RETRY,
        }
    }

    /// The connection is no more; its thread ends.
    fn disconnect(&mut self) {
        (self.connection, self.slow, self.silent) = (None, false, false);
        (self.peer, self.halt) = (None, None);
    }

    /// Another VM in the place of one has a listener of its own: there is nothing to wait for.
    fn notice_instance(&mut self, instance: u64) {
        if self.instance != Some(instance) {
            (self.instance, self.retry_at, self.backoff) = (Some(instance), Instant::now(), FIRST_RETRY);
        }
    }

    fn failed(&mut self, problem: String) {
        self.name_problem(problem);
        self.retry();
    }

    fn retry(&mut self) {
        self.retry_at = Instant::now() + self.backoff;
        let last = if self.vm.is_some() { LAST_RETRY_OF_VM } else { LAST_RETRY };
        self.backoff = (self.backoff * 2).min(last);
    }
}

fn end_of<T>(replug: &Result<T, VmError>) -> ReplugEnd {
    match replug {
        Ok(_) | Err(VmError::ReplugUndescribed { .. }) => ReplugEnd::Done,
        Err(VmError::UnplugPending { .. } | VmError::NotUndone { .. }) => ReplugEnd::Both,
        Err(_) => ReplugEnd::Undone,
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut wait = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut wait, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}
