//! Requests of operators. Each is refused here, or recorded in the world for the next plan to carry out. Each is answered
//! once.

use super::{
    Core, Reply,
    content::content,
    event::Request,
    migration::refuse_if_migrating,
    names::not_connected,
    refusal::Refusal,
    waiting::{Then, Until},
};
use vnuma_hypervisor::VmError;
use vnuma_model::{ApicId, GuestNodeId, HostNodeId};
use vnuma_policy::world::{
    ChannelEvent, ChannelState, DescriptionSource, Move, Mover, Replug, RequestId, Vm,
};
use vnuma_policy::{Action, Reason};

impl Core {
    pub(super) fn requested(&mut self, request: RequestId, wanted: Request) {
        let taken = match wanted {
            Request::Attach(name) => self.attach(request, &name),
            Request::AttachOnArrival(name) => self.attach_on_arrival(request, &name),
            Request::Detach(name) => self.detach(request, &name),
            Request::Migrate(name, to, post_copy) => self.want_migration(request, &name, to, post_copy),
            Request::ShowMigration(name) => self.want_migration_shown(request, &name),
            Request::CancelMigration(name) => self.cancel_migration(request, &name),
            Request::Move(name, vcpu, node) => self.want_move(request, &name, vcpu, node),
            Request::Replug(name, vcpu) => self.want_replug(request, &name, vcpu),
            Request::SetPolicy(name, policy) => self.set_policy(request, &name, policy),
            Request::ShowRehome(name) => self.want_rehome_shown(request, &name),
            Request::Rehome(name, wish) => self.want_rehome(request, &name, wish),
            Request::StopRehome(name) => self.stop_rehome(request, &name),
            Request::ShowSizes(name) => self.want_sizes_shown(request, &name),
            Request::Resize(name, wish) => self.want_resize(request, &name, wish),
            Request::StopResize(name) => self.stop_resize(request, &name),
            Request::ShowMemory(name) => self.want_memory_shown(request, &name),
            Request::SetMemoryPolicy(name, policy) => self.set_memory_policy(request, &name, policy),
        };
        if let Err(refusal) = taken {
            self.answer(Some(request), Reply::Refused(refusal));
        }
    }

    pub(super) fn attach(&mut self, request: RequestId, name: &str) -> Result<(), Refusal> {
        let (id, vm, _) = self.connected(name)?;
        refuse_if_migrating(vm)?;
        let vm_name = || name.to_owned();
        match vm.channel {
            ChannelState::Replugging(_) => return Err(Refusal::Replugging { vm: vm_name() }),
            _ if vm.replug_wanted.is_some() => return Err(Refusal::Replugging { vm: vm_name() }),
            ChannelState::Attached(_) | ChannelState::Detaching(..) => {
                return Err(Refusal::Attached { vm: vm_name() });
            }
            ChannelState::Attaching => return Err(Refusal::Attaching { vm: vm_name() }),
            ChannelState::Recovering => return Err(Refusal::Recovering { vm: vm_name() }),
            ChannelState::Lost | ChannelState::LostDetaching => {
                return Err(Refusal::Lost { vm: vm_name() });
            }
            // If it does not answer, its link becomes silent.
            ChannelState::AttachTimedOut => {
                let problem = "an attach was not answered in time, and is undone first".to_owned();
                return Err(Refusal::NotConnected { vm: vm_name(), problem });
            }
            ChannelState::Detached => check_publishable(vm)?,
        }
        self.channel_event(id, ChannelEvent::AttachRequested);
        self.wait(Some(request), id, Until::Attached, Then::Answer(Reply::Vm(id)));
        self.world.add_step(id, Action::Attach(Reason::Requested));
        Ok(())
    }

    fn detach(&mut self, request: RequestId, name: &str) -> Result<(), Refusal> {
        let (id, vm, _) = self.connected(name)?;
        refuse_if_migrating(vm)?;
        let vm_name = || name.to_owned();
        match vm.channel {
            ChannelState::Detached | ChannelState::AttachTimedOut | ChannelState::Replugging(_) => {
                return Err(Refusal::NotAttached { vm: vm_name() });
            }
            ChannelState::Attaching => return Err(Refusal::Attaching { vm: vm_name() }),
            ChannelState::Recovering => return Err(Refusal::Recovering { vm: vm_name() }),
            ChannelState::Detaching(..) | ChannelState::LostDetaching => {
                return Err(Refusal::Detaching { vm: vm_name() });
            }
            ChannelState::Attached(_) | ChannelState::Lost => {}
        }
        // It is not to come back by itself.
        self.unmark(id);
        self.channel_event(id, ChannelEvent::DetachRequested);
        self.wait(Some(request), id, Until::Detached, Then::Answer(Reply::Vm(id)));
        self.is_to_be_unplugged(id);
        self.world.add_step(id, Action::Detach(Reason::Requested));
        Ok(())
    }

    /// Needs no connection: vCPUs can be moved while the hypervisor does not answer.
    fn want_move(
        &mut self,
        request: RequestId,
        name: &str,
        vcpu: ApicId,
        node: HostNodeId,
    ) -> Result<(), Refusal> {
        let (id, managed) = self.find(name)?;
        let Some(vm) = &managed.vm else { return Err(not_connected(name, managed)) };
        if vm.source == DescriptionSource::ThreadNames {
            return Err(Refusal::Unnumbered { vm: name.to_owned() });
        }
        if !vm.description.vcpus.iter().any(|known| known.apic_id == vcpu) {
            return Err(no_vcpu(vm, vcpu));
        }
        match self.world.host.node(node) {
            None => {
                let present = self.world.host.nodes.iter().map(|node| node.id).collect();
                return Err(Refusal::NoNode { node, present });
            }
            Some(found) if found.cpus.is_empty() => return Err(Refusal::NoCpus { node }),
            Some(_) => {}
        }
        if let Some((_, vm)) = self.world.vm_mut(id) {
            let mover = Mover::Operator;
            vm.moves.push(Move { vcpu, node, mover, request: Some(request), in_flight: false });
        }
        Ok(())
    }

    fn want_replug(&mut self, request: RequestId, name: &str, vcpu: ApicId) -> Result<(), Refusal> {
        let (id, vm, _) = self.connected(name)?;
        refuse_if_migrating(vm)?;
        let node = check_replug(vm, vcpu)?;
        if let Some((_, vm)) = self.world.vm_mut(id) {
            vm.replug_wanted = Some(Replug { vcpu, node });
        }
        self.wait(Some(request), id, Until::Replugged, Then::Answer(Reply::Vm(id)));
        Ok(())
    }
}

fn no_vcpu(vm: &Vm, vcpu: ApicId) -> Refusal {
    let present = vm.description.vcpus.iter().map(|vcpu| vcpu.apic_id).collect();
    Refusal::NoVcpu { vm: vm.name().to_owned(), vcpu, present }
}

/// Checks that its topology fits a channel, before one is made.
pub(super) fn check_publishable(vm: &Vm) -> Result<(), Refusal> {
    let name = || vm.name().to_owned();
    let ids = vm.placement.guest_nodes();
    if ids.is_empty() {
        return Err(Refusal::Uma { vm: name() });
    }
    let last = ids.len() - 1;
    if ids.iter().enumerate().any(|(position, &id)| id as usize != position) {
        return Err(Refusal::NodeNumbers { vm: name(), ids: ids.to_vec(), last });
    }
    let vcpus = vm.description.vcpus.iter().map(|vcpu| (vcpu.apic_id, vcpu.boot_node.unwrap_or(0)));
    let content = content(vm.placement.distances().clone(), vcpus, std::iter::empty());
    content.map(drop).map_err(|source| Refusal::Content { vm: name(), source })
}

/// The guest node that a vCPU is to be replugged to.
fn check_replug(vm: &Vm, vcpu: ApicId) -> Result<GuestNodeId, Refusal> {
    let name = || vm.name().to_owned();
    if vm.placement.guest_nodes().is_empty() {
        return Err(Refusal::Uma { vm: name() });
    }
    if matches!(vm.channel, ChannelState::Replugging(_)) || vm.replug_wanted.is_some() {
        return Err(Refusal::Replugging { vm: name() });
    }
    if vm.channel != ChannelState::Detached {
        return Err(Refusal::ChannelInUse { vm: name() });
    }
    let described = vm.description.vcpus.iter().find(|described| described.apic_id == vcpu);
    let (Some(described), Some(status)) = (described, vm.placement.vcpu(vcpu)) else {
        return Err(no_vcpu(vm, vcpu));
    };
    if described.index == 0 {
        return Err(VmError::BootVcpu { vm: name() }.into());
    }
    match (status.target_node, status.acked_node) {
        (None, _) => Err(Refusal::LocationUnknown { vm: name(), vcpu }),
        (Some(node), Some(acked)) if node == acked => Err(Refusal::AlreadyCorrect { vm: name(), vcpu, node }),
        (Some(node), _) => Ok(node),
    }
}
