//! A plan becomes commands.

use super::{
    Core, Reply,
    event::{Ask, Command, Level},
    refusal::Refusal,
};
use vnuma_api as api;
use vnuma_policy::{
    Action, Plan, PublishReason, Reason,
    world::{ChannelEvent, Move, Replug, UnplugStep, VmId},
};

impl Core {
    /// Carries out the core's part of each step of a plan: changes states and adds commands.
    pub(super) fn act(&mut self, plan: Plan) {
        for id in plan.deferred {
            if let Some((_, vm)) = self.world.vm_mut(id) {
                vm.placement.note_deferred();
            }
        }
        let mut confines = Vec::new();
        for step in plan.steps {
            match step.action {
                Action::Publish(generation, reason) => self.publish(step.vm, generation, reason),
                Action::Move(wanted, _) => self.begin_move(step.vm, wanted),
                Action::Replug(replug, reason) => self.begin_replug(step.vm, replug, reason),
                Action::Unplug(UnplugStep::Ask) => self.ask_to_unplug(step.vm),
                Action::Unplug(UnplugStep::GiveUp) => self.give_up_unplug(step.vm),
                Action::Confine(confine) => confines.push((step.vm, confine)),
                Action::Follow => self.begin_follow(step.vm),
                Action::ObserveMemory => self.begin_observation(step.vm),
                Action::WatchHotness => self.begin_hotness(step.vm),
                Action::MoveMemory(order) => self.begin_memory(step.vm, order),
            }
        }
        self.begin_confines(confines);
    }

    fn publish(&mut self, id: VmId, generation: u64, reason: PublishReason) {
        let (now_ns, policy) = (self.now_ns, self.policies.settle);
        let Some((_, vm)) = self.world.vm_mut(id) else { return };
        let Some(state) = vm.channel.next(ChannelEvent::PublishStarted) else { return };
        vm.channel = state;
        let publication = vm.placement.publish(&policy, generation, now_ns);
        (vm.stats.published, vm.stats.publications) = (Some(generation), vm.stats.publications + 1);
        let (name, changed_ns) = (vm.name().to_owned(), publication.changed_ns);
        self.commands.push(Command::Publish(id, generation, publication));
        self.log(Level::Debug, format!("{name}: generation {generation:016x} is published: {reason:?}"));
        let generation = api::Generation(generation);
        self.announce(api::Event::Published { vm: name, generation, time_ns: now_ns, changed_ns });
    }

    fn begin_move(&mut self, id: VmId, wanted: Move) {
        let Some((host, vm)) = self.world.vm_mut(id) else { return };
        let found = vm.description.vcpus.iter().find(|vcpu| vcpu.apic_id == wanted.vcpu);
        let (Some(found), Some(node)) = (found, host.node(wanted.node)) else {
            // The host had this node when the move was asked for.
            let present = host.nodes.iter().map(|node| node.id).collect();
            vm.moves.retain(|known| *known != wanted);
            let refusal = Refusal::NoNode { node: wanted.node, present };
            self.vcpu_rehomed(id, wanted.vcpu, Err(refusal.to_string()));
            return self.answer(wanted.request, Reply::Refused(refusal));
        };
        let command = Command::Move {
            vm: id,
            pid: vm.description.pid,
            vcpu: wanted.vcpu,
            tid: found.tid,
            node: wanted.node,
            cpus: node.cpus.clone(),
        };
        if let Some(begun) = vm.moves.iter_mut().find(|known| **known == wanted) {
            begun.in_flight = true;
        }
        self.commands.push(command);
    }

    fn begin_replug(&mut self, id: VmId, replug: Replug, reason: Reason) {
        let Some(managed) = self.world.get_mut(id) else { return };
        let (Some(connection), Some(vm)) = (managed.responsive(), &mut managed.vm) else { return };
        let Some(state) = vm.channel.next(ChannelEvent::ReplugStarted(replug)) else { return };
        (vm.channel, vm.replug_wanted) = (state, None);
        let name = vm.name().to_owned();
        if reason == Reason::Astray {
            let Replug { vcpu, node } = replug;
            let line =
                format!("{name}: vCPU {vcpu} is replugged to guest node {node}: its guest has no channel");
            self.log(Level::Info, line);
        }
        self.commands.push(Command::Ask(connection, Ask::Replug(replug.vcpu, replug.node)));
    }
}
