//! Requests of operators. Each is refused here, or recorded in the world for the next plan to carry out. Each is answered
//! once.

use super::{
    Core,
    content::content,
    event::Request,
    names::not_connected,
    refusal::{Refusal, refuse_if_migrating},
    reply::ReplyTo,
    waiting::{Due, Then, Until},
};
use vnuma_hypervisor::VmError;
use vnuma_model::{ApicId, GuestNodeId, HostNodeId};
use vnuma_policy::Reason;
use vnuma_policy::world::{
    ChannelEvent, ChannelState, DescriptionSource, Move, Mover, Replug, RequestId, Task, Vm, VmId,
};

/// The VM of a request and what it waits for, if for anything; or why it is refused.
pub(super) type Taken = Result<(VmId, Option<Until>), Refusal>;

impl Core {
    pub(super) fn requested(&mut self, request: RequestId, wanted: Request) {
        use Request as R;
        let rehome_of = |core: &Self, id| core.rehome_of(id, None);
        let sizes_of = |core: &Self, id| core.sizes_of(id, None);
        let migration_of = |core: &Self, id| core.migration_of(&core.name_of(id));
        match wanted {
            R::Attach(name, to) => self.take(to, |core| core.attach(&name), Self::vm_of),
            R::AttachOnArrival(name, to) => {
                self.take(to, |core| core.attach_on_arrival(&name), Self::vm_of);
            }
            R::Detach(name, to) => self.take(to, |core| core.detach(&name), Self::vm_of),
            R::Migrate(name, destination, post_copy, to) => {
                self.take(to, |core| core.want_migration(&name, destination, post_copy), migration_of);
            }
            R::ShowMigration(name, to) => self.answer(to, move |core| core.migration_of(&name)),
            R::CancelMigration(name, to) => {
                self.take(to, |core| core.cancel_migration(&name), migration_of);
            }
            R::Move(name, vcpu, node, to) => {
                self.take(to, |core| core.want_move(request, &name, vcpu, node), Self::vm_of);
            }
            R::Replug(name, vcpu, to) => {
                self.take(to, |core| core.want_replug(&name, vcpu), Self::replugged_of);
            }
            R::SetPolicy(name, policy, to) => {
                self.take(to, |core| core.set_policy(&name, policy), Self::scheduling);
            }
            R::ShowMemory(name, to) => self.take(to, |core| core.want_memory_shown(&name), Self::memory_of),
            R::SetMemoryPolicy(name, policy, to) => {
                self.take(to, |core| core.set_memory_policy(&name, policy), Self::memory_of);
            }
            R::ShowRehome(name, to) => {
                let payer = to.requester.payer;
                self.take(to, |core| core.want_rehome_shown(&name, payer), rehome_of);
            }
            R::Rehome(name, wish, to) => match self.check_rehome(&name, &wish) {
                Ok(id) => self.describe_first(id, Then::Rehome(wish, Some(to))),
                Err(refusal) => self.answer(to, |_| Err(refusal)),
            },
            R::StopRehome(name, to) => self.take(to, |core| core.stop_rehome(&name), rehome_of),
            R::ShowSizes(name, to) => {
                self.take(to, |core| Ok((core.with_guest_nodes(&name)?, None)), sizes_of);
            }
            R::Resize(name, wish, to) => match self.check_resize(&name, &wish) {
                Ok(id) => {
                    self.wait(id, Until::Described, Then::Resize(wish, to));
                    self.describe_for(id, None);
                }
                Err(refusal) => self.answer(to, |_| Err(refusal)),
            },
            R::StopResize(name, to) => self.take(to, |core| core.stop_resize(&name), sizes_of),
        }
    }

    /// Takes a request. It is answered at the end of this step, or when what it waits for has happened.
    fn take<T: Send + 'static>(
        &mut self,
        to: ReplyTo<T>,
        begin: impl FnOnce(&mut Self) -> Taken,
        show: fn(&Self, VmId) -> Result<T, Refusal>,
    ) {
        match begin(self) {
            Ok((id, Some(until))) => {
                self.wait(id, until, Then::Answer(Due::new(to, move |core| show(core, id))));
            }
            Ok((id, None)) => self.answer(to, move |core| show(core, id)),
            Err(refusal) => self.answer(to, |_| Err(refusal)),
        }
    }

    pub(super) fn attach(&mut self, name: &str) -> Taken {
        let (id, vm, _) = self.connected(name)?;
        refuse_if_migrating(vm)?;
        let vm_name = || name.to_owned();
        match vm.channel {
            _ if vm.replug.what().is_some() => return Err(Refusal::Replugging { vm: vm_name() }),
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
        self.want_plugged(id, Reason::Requested);
        Ok((id, Some(Until::Attached)))
    }

    fn detach(&mut self, name: &str) -> Taken {
        let (id, vm, _) = self.connected(name)?;
        refuse_if_migrating(vm)?;
        let vm_name = || name.to_owned();
        match vm.channel {
            ChannelState::Detached | ChannelState::AttachTimedOut => {
                return Err(Refusal::NotAttached { vm: vm_name() });
            }
            ChannelState::Attaching => return Err(Refusal::Attaching { vm: vm_name() }),
            ChannelState::Recovering => return Err(Refusal::Recovering { vm: vm_name() }),
            ChannelState::Detaching(..) | ChannelState::LostDetaching => {
                return Err(Refusal::Detaching { vm: vm_name() });
            }
            ChannelState::Attached(_) | ChannelState::Lost => {}
        }
        // It is not to be attached again on its own.
        self.unmark(id);
        self.channel_event(id, ChannelEvent::DetachRequested);
        self.is_to_be_unplugged(id);
        self.want_plugged(id, Reason::Requested);
        Ok((id, Some(Until::Detached)))
    }

    /// Needs no connection: vCPUs can be moved while the hypervisor does not answer.
    fn want_move(&mut self, request: RequestId, name: &str, vcpu: ApicId, node: HostNodeId) -> Taken {
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
            vm.moves.push(Task::wanted(Move { vcpu, node, mover, request: Some(request) }));
        }
        Ok((id, Some(Until::Moved(Some(request)))))
    }

    fn want_replug(&mut self, name: &str, vcpu: ApicId) -> Taken {
        let (id, vm, _) = self.connected(name)?;
        refuse_if_migrating(vm)?;
        let node = check_replug(vm, vcpu)?;
        if let Some((_, vm)) = self.world.vm_mut(id) {
            vm.replug.wanted = Some(Replug { vcpu, node });
        }
        Ok((id, Some(Until::Replugged)))
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
    if vm.replug.what().is_some() {
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
