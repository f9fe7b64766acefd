//! Topology channels of VMs, from what their connections and guests report.

use super::{
    Core,
    event::{Command, Level, Replugged},
    refusal::Refusal,
    requests::check_publishable,
    waiting::{Until, Waiting},
};
use vnuma_api as api;
use vnuma_hypervisor::VmError;
use vnuma_policy::world::{
    ChannelEvent, ChannelState, DriverStatus, Replug, ReplugEnd, Task, TaskId, Unplug, Vm, VmId,
};
use vnuma_policy::{Reason, migration::MigrationEvent};

impl Core {
    /// Takes a channel to its next state. `None`: the event means nothing in the present one.
    pub(super) fn channel_event(&mut self, id: VmId, event: ChannelEvent) -> Option<ChannelState> {
        let now_ns = self.now_ns;
        let (_, vm) = self.world.vm_mut(id)?;
        let before = vm.channel;
        vm.channel = before.next(event)?;
        if !vm.channel.is_plugged() {
            (vm.unplug, vm.came_along) = (None, false);
        }
        if vm.channel == ChannelState::Detached {
            vm.plug.give_up();
        }
        let (served, serves) = (before.generation().is_some(), vm.channel.generation().is_some());
        if serves && !served {
            vm.placement.start_publishing(now_ns);
        } else if served && !serves {
            vm.placement.stop_publishing();
            vm.publication = Task::default();
            vm.stats.driver = DriverStatus::default();
            self.commands.push(Command::CloseChannel(id));
        }
        if serves != served {
            self.defer(id, !serves);
        }
        let Some((_, vm)) = self.world.vm_mut(id) else { return Some(before) };
        if !serves && vm.channel.is_plugged() && vm.channel != before {
            // Another process may have published anything through it.
            vm.placement.acked_unknown();
        }
        Some(before)
    }

    /// Moves of a VM's vCPUs that are published have to be known at once, others not.
    fn defer(&mut self, id: VmId, waits: bool) {
        let vcpus = self.vm(id).into_iter().flat_map(|vm| &vm.description.vcpus);
        // By now another VM may have it, or it has ended.
        let watched = vcpus.filter(|vcpu| self.registry.threads.get(&vcpu.tid) == Some(&(id, vcpu.apic_id)));
        let threads: Vec<i32> = watched.map(|vcpu| vcpu.tid).collect();
        if !threads.is_empty() {
            self.commands.push(Command::Defer(threads, waits));
        }
    }

    pub(super) fn name_of(&self, id: VmId) -> String {
        self.world.get(id).map_or_else(String::new, |managed| managed.name().to_owned())
    }

    /// The channel was plugged, or could not be.
    pub(super) fn attached(&mut self, id: VmId, outcome: Result<u64, Refusal>) {
        let refusal = match outcome {
            Ok(first) => {
                self.channel_event(id, ChannelEvent::Attached(first));
                let name = self.name_of(id);
                self.log(id, Level::Info, format!("{name}: topology channel attached"));
                self.announce(api::Event::Attached { vm: name, time_ns: self.now_ns });
                // Answered after the first publication.
                for Waiting { then, .. } in self.waiting.take(id, Until::Attached) {
                    self.wait(id, Until::Published, then);
                }
                self.attached_again(id);
                return;
            }
            Err(Refusal::Vm(source)) if source.may_be_answered() => {
                self.channel_event(id, ChannelEvent::AttachTimedOut);
                Refusal::Unfinished { source }
            }
            Err(refusal @ Refusal::Vm(VmError::AlreadyAttached { .. })) => {
                self.channel_event(id, ChannelEvent::AttachFoundForeign);
                refusal
            }
            Err(refusal) => {
                self.channel_event(id, ChannelEvent::AttachFailed);
                refusal
            }
        };
        if !self.waiting.has(id, Until::Attached) {
            self.attach_marked_failed(id, refusal.to_string());
        }
        self.refuse_first(id, Until::Attached, refusal);
    }

    /// A publication was written, or failed.
    pub(super) fn published(&mut self, task: TaskId, outcome: Result<u64, Refusal>) {
        let id = task.vm;
        if self.world.vm_mut(id).and_then(|(_, vm)| vm.publication.end(task)).is_none() {
            return;
        }
        match outcome {
            Ok(next) => {
                self.channel_event(id, ChannelEvent::Published(next));
                self.reached(id, Until::Published);
            }
            Err(refusal) => {
                if self.channel_event(id, ChannelEvent::PublishFailed).is_some() {
                    let name = self.name_of(id);
                    self.log(
                        task.vm,
                        Level::Warn,
                        format!("{name}: nothing can be published any more: {refusal}"),
                    );
                }
                self.refuse_first(id, Until::Published, refusal);
            }
        }
    }

    /// The channel was unplugged, or could not be.
    pub(super) fn detached(&mut self, id: VmId, outcome: Result<(), VmError>) {
        match outcome {
            Ok(()) | Err(VmError::NotAttached { .. }) => self.unplugged(id, ChannelEvent::DetachDone),
            Err(error) => {
                if self.channel_event(id, ChannelEvent::DetachFailed).is_some() {
                    self.release_failed(id, &error);
                    let refusal = self.kept(id, error);
                    self.refuse_first(id, Until::Detached, refusal);
                }
            }
        }
    }

    /// The channel's device is to go, and the guest is asked for that now.
    pub(super) fn is_to_be_unplugged(&mut self, id: VmId) {
        let now_ns = self.now_ns;
        if let Some((_, vm)) = self.world.vm_mut(id) {
            (vm.unplug, vm.came_along) = (Some(Unplug::new(now_ns)), false);
        }
    }

    /// The guest has not let go of the device. It is asked again, unless it could not be asked at all the first time.
    fn kept(&mut self, id: VmId, error: VmError) -> Refusal {
        let (name, now_ns) = (self.name_of(id), self.now_ns);
        let pending = matches!(error, VmError::DetachPending { .. });
        let asked_for = self.waiting.has(id, Until::Detached);
        let Some((_, vm)) = self.world.vm_mut(id) else { return error.into() };
        let Some(unplug) = &mut vm.unplug else { return error.into() };
        // The requester may retry. Without a requester there is no retry.
        if !pending && unplug.ignored == 0 && asked_for {
            vm.unplug = None;
            return error.into();
        }
        unplug.kept(now_ns);
        if unplug.ignored == 1 {
            let line = "its guest has not released the channel's device, and is asked again";
            self.log(id, Level::Info, format!("{name}: {line}"));
        }
        Refusal::AskedAgain { source: error }
    }

    /// Gives up asking the guest to release the device.
    pub(super) fn give_up_unplug(&mut self, id: VmId) {
        let name = self.name_of(id);
        let Some(unplug) = self.world.vm_mut(id).and_then(|(_, vm)| vm.unplug.as_mut()) else { return };
        unplug.given_up = true;
        let times = unplug.ignored;
        let line = format!(
            "{name}: its guest has not released the channel's device, which it was asked for {times} times; it is asked no more"
        );
        self.log(id, Level::Warn, line);
    }

    /// The device is unplugged, for whatever reason.
    pub(super) fn unplugged(&mut self, id: VmId, event: ChannelEvent) {
        let Some(before) = self.channel_event(id, event) else { return };
        let Some(vm) = self.vm(id) else { return };
        let name = vm.name().to_owned();
        if !before.is_plugged() {
            return;
        }
        self.migration_event(id, MigrationEvent::Released);
        self.log(id, Level::Info, format!("{name}: topology channel detached"));
        self.announce(api::Event::Detached { vm: name, time_ns: self.now_ns });
        self.refuse_first(id, Until::Published, Refusal::NotAttached { vm: self.name_of(id) });
        self.reached(id, Until::Detached);
    }

    /// A hypervisor has answered, for the first time or again. Compares its channel with the known state.
    pub(super) fn found_channel(&mut self, id: VmId, plugged: bool) {
        if !plugged {
            return self.unplugged(id, ChannelEvent::FoundUnplugged);
        }
        if self.channel_event(id, ChannelEvent::FoundPlugged).is_none() {
            return;
        }
        match self.vm(id).map(|vm| vm.channel) {
            // It is the channel of a vnumad that has ended.
            Some(ChannelState::Recovering) => match self.vm(id).map_or(Ok(()), check_publishable) {
                Ok(()) => self.want_plugged(id, Reason::LeftBehind),
                Err(refusal) => self.recovered(id, Err(refusal)),
            },
            Some(ChannelState::LostDetaching) => {
                let name = self.name_of(id);
                let line = "the hypervisor has carried out an attach that had timed out; it is undone";
                self.log(id, Level::Info, format!("{name}: {line}"));
                self.is_to_be_unplugged(id);
                // It reports that the device is gone, now or when the guest lets go.
                self.want_plugged(id, Reason::TimedOut);
            }
            _ => {}
        }
    }

    /// The hypervisor is to be asked for what the state of the channel is to lead to.
    pub(super) fn want_plugged(&mut self, id: VmId, why: Reason) {
        if let Some((_, vm)) = self.world.vm_mut(id) {
            vm.plug.wanted = Some(why);
        }
    }

    /// The channel of an earlier vnumad was taken over, or could not be.
    pub(super) fn recovered(&mut self, id: VmId, outcome: Result<u64, Refusal>) {
        let event =
            outcome.as_ref().map_or(ChannelEvent::RecoverFailed, |next| ChannelEvent::Recovered(*next));
        if self.channel_event(id, event).is_none() {
            return;
        }
        let name = self.name_of(id);
        match outcome {
            Ok(_) => {
                self.log(id, Level::Info, format!("{name}: topology channel taken over"));
                self.announce(api::Event::Attached { vm: name, time_ns: self.now_ns });
            }
            Err(refusal @ Refusal::CameAlong { .. }) => {
                self.log(id, Level::Info, refusal.to_string());
                // One that waits for its guest arrives later.
                if let Some((_, vm)) = self.world.vm_mut(id) {
                    vm.came_along |= !vm.waits();
                }
            }
            Err(refusal) => {
                let line = format!("{name}: its topology channel is lost; detach and attach it: {refusal}");
                self.log(id, Level::Warn, line);
            }
        }
    }

    /// A guest has acknowledged a generation.
    pub(super) fn acknowledged(&mut self, id: VmId, generation: u64) {
        let acknowledged_ns = self.now_ns;
        let Some((_, vm)) = self.world.vm_mut(id) else { return };
        if vm.channel.generation().is_none() {
            return;
        }
        let Some(update) = vm.placement.acknowledged(generation) else { return };
        vm.stats.acknowledgements += 1;
        vm.stats.acknowledged = Some(generation);
        let event = api::Event::Acknowledged {
            vm: vm.name().to_owned(),
            generation: api::Generation(generation),
            changed_ns: update.changed_ns,
            published_ns: update.published_ns,
            acknowledged_ns,
        };
        self.announce(event);
    }

    /// A guest has signalled its area. It may do so without end, so an unchanged report costs nothing.
    pub(super) fn driver_reported(&mut self, id: VmId, status: DriverStatus) {
        let news = |vm: &Vm| vm.channel.generation().is_some() && vm.stats.driver != status;
        let now_ns = self.now_ns;
        if self.vm(id).is_some_and(news)
            && let Some((_, vm)) = self.world.vm_mut(id)
        {
            vm.driver_reported(status, now_ns);
        }
    }

    /// A replug has ended. If it succeeded the vCPU has another slot, and with it another APIC id.
    pub(super) fn replugged(&mut self, id: VmId, replug: Replug, outcome: Result<Replugged, VmError>) {
        let now_ns = self.now_ns;
        let Some((_, vm)) = self.world.vm_mut(id) else { return };
        vm.replug.last = Some((end_of(&outcome), now_ns));
        let (name, vcpu, guest_node) = (vm.name().to_owned(), replug.vcpu, replug.node);
        let new_vcpu = match outcome {
            Ok(Replugged { plugged, description, location }) => {
                self.described(id, description);
                self.located(plugged.tid, location);
                self.state(id).replugged = Some((vcpu, plugged.apic_id, guest_node));
                self.reached(id, Until::Replugged);
                plugged.apic_id
            }
            Err(error) => {
                let done = match error {
                    VmError::ReplugUndescribed { new, .. } => Some(new),
                    _ => None,
                };
                self.log(id, Level::Warn, format!("{name}: {error}"));
                self.refuse_first(id, Until::Replugged, error.into());
                let Some(new) = done else { return };
                new
            }
        };
        self.log(id, Level::Info, format!("{name}: vCPU {vcpu} is replugged to guest node {guest_node}"));
        self.announce(api::Event::Replugged { vm: name, vcpu, new_vcpu, guest_node, time_ns: now_ns });
    }

    /// The vCPU that was replugged last.
    pub(super) fn replugged_of(&self, id: VmId) -> Result<api::Replugged, Refusal> {
        let vm = self.vm_of(id)?;
        let last = self.states.of.get(&id).and_then(|state| state.replugged);
        let (vcpu, new_vcpu, guest_node) = last.ok_or_else(|| Refusal::Ended { vm: vm.name.clone() })?;
        Ok(api::Replugged { vcpu, new_vcpu, guest_node, vm })
    }
}

fn end_of<T>(replug: &Result<T, VmError>) -> ReplugEnd {
    match replug {
        Ok(_) | Err(VmError::ReplugUndescribed { .. }) => ReplugEnd::Done,
        Err(VmError::UnplugPending { .. } | VmError::NotUndone { .. }) => ReplugEnd::Both,
        Err(_) => ReplugEnd::Undone,
    }
}
