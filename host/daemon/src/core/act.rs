//! A plan becomes commands. Nothing else in the core has anything done to a VM, as a test shows.

use super::{
    Core,
    event::{Ask, Command, Level, MaskOrder, Ranked},
    refusal::Refusal,
    requests::check_publishable,
    waiting::{Then, Until},
};
use std::collections::BTreeMap;
use vnuma_api as api;
use vnuma_model::GuestNodeId;
use vnuma_policy::{
    Action, Batch, PublishReason, Ranks, Reason, Step,
    memory_move::MoveMemory,
    migration::{MigrationEvent, Order},
    world::{ChannelEvent, Confine, Confining, Mechanism, Move, Replug, TaskId, VmId},
};

impl Core {
    /// Carries out the core's part of each step of a plan: changes states and adds commands.
    pub(super) fn act(&mut self, steps: Vec<Step>) {
        let mut confines = Vec::new();
        for step in steps {
            match step.action {
                Action::Confine(confine) => confines.push((step.vm, confine)),
                action => self.carry_out(step.vm, action),
            }
        }
        self.begin_confines(confines);
    }

    fn carry_out(&mut self, id: VmId, action: Action) {
        let task = self.world.next_task(id);
        match action {
            Action::Publish(generation, batch, reason) => self.publish(task, generation, &batch, reason),
            Action::Move(wanted, _) => self.begin_move(task, wanted),
            Action::Replug(replug, reason) => self.begin_replug(task, replug, reason),
            Action::GiveUpDetach(_) => self.give_up_unplug(id),
            Action::Confine(confine) => self.begin_confines(vec![(id, confine)]),
            Action::PlaceAgain(_) => self.place_again(task),
            Action::Follow => self.begin_follow(task),
            Action::Rank(ranks, _) => self.rank(id, ranks),
            Action::RestoreMasks(pid, _) => self.restore_masks(task, pid),
            Action::SettlePins(_) => self.commands.push(Command::SettlePins(id)),
            Action::ObserveMemory(_) => self.begin_observation(task),
            Action::WatchHotness(_) => self.begin_hotness(task),
            Action::MoveMemory(order) => self.begin_memory(task, order),
            Action::RehomeNode(wish) => self.describe_first(id, Then::Rehome(wish, None)),
            Action::Rehome(rehome, _) => self.take_rehome_on(id, rehome),
            Action::SizeNode(resize) => self.take_resize_on(id, &resize),
            Action::StopMemory(begun, _) => {
                self.world.vm_mut(id).into_iter().for_each(|(_, vm)| vm.scheduling.memory.stop = None);
                self.commands.push(Command::StopMemory(begun));
            }
            Action::Attach(reason) => self.begin_attach(task, reason),
            Action::Recover(why) => self.plug_anew(task, why, Ask::Recover),
            Action::Detach(why @ Reason::CameAlong) => {
                self.is_to_be_unplugged(id);
                self.ask_to_unplug(task, why);
            }
            Action::Detach(why @ Reason::Kept) => self.ask_to_unplug(task, why),
            Action::Detach(why) => self.plug(task, why, Ask::Detach),
            Action::Mark(marked, _) => self.mark(task, marked),
            Action::Migrate(order, _) => self.migrate(task, order),
            Action::Resize(node, device, bytes, _) => self.resize(task, node, Ask::Resize(device, bytes)),
        }
    }

    fn publish(&mut self, task: TaskId, generation: u64, batch: &Batch, reason: PublishReason) {
        let now_ns = self.now_ns;
        let known = self.world.vm_mut(task.vm).filter(|(_, vm)| vm.channel.generation().is_some());
        let Some((_, vm)) = known else { return };
        vm.publication.begin(task, ());
        let publication = vm.placement.publish(batch, reason, generation, now_ns);
        (vm.stats.published, vm.stats.publications) = (Some(generation), vm.stats.publications + 1);
        let (name, changed_ns) = (vm.name().to_owned(), publication.changed_ns);
        self.commands.push(Command::Publish(task, generation, publication));
        let generation = api::Generation(generation);
        self.announce(api::Event::Published { vm: name, generation, time_ns: now_ns, changed_ns });
    }

    fn begin_move(&mut self, task: TaskId, wanted: Move) {
        let id = task.vm;
        let Some((host, vm)) = self.world.vm_mut(id) else { return };
        let found = vm.description.vcpus.iter().find(|vcpu| vcpu.apic_id == wanted.vcpu);
        let (Some(found), Some(node)) = (found, host.node(wanted.node)) else {
            // The host had this node when the move was asked for.
            let present = host.nodes.iter().map(|node| node.id).collect();
            vm.moves.retain(|task| task.wanted != Some(wanted));
            self.world.consider_again(id, self.now_ns);
            let refusal = Refusal::NoNode { node: wanted.node, present };
            self.vcpu_rehomed(id, wanted.vcpu, Err(refusal.to_string()));
            return self.refuse_first(id, Until::Moved(wanted.request), refusal);
        };
        let command = Command::Move {
            task,
            pid: vm.description.pid,
            vcpu: wanted.vcpu,
            tid: found.tid,
            node: wanted.node,
            cpus: node.cpus.clone(),
        };
        if let Some(known) = vm.moves.iter_mut().find(|known| known.wanted == Some(wanted)) {
            known.begin(task, wanted);
        }
        self.commands.push(command);
    }

    /// A VM that is gone does not wait for it.
    fn restore_masks(&mut self, task: TaskId, pid: i32) {
        if let Some((_, vm)) = self.world.vm_mut(task.vm).filter(|(_, vm)| vm.description.pid == pid) {
            vm.scheduling.restore.begin(task, ());
        }
        self.commands.push(Command::RestoreMasks(task, pid));
    }

    fn begin_replug(&mut self, task: TaskId, replug: Replug, reason: Reason) {
        let answers = self.world.get(task.vm).is_some_and(|managed| managed.responsive().is_some());
        let vm = self.world.vm_mut(task.vm).filter(|(_, vm)| answers && vm.is_free());
        let Some((_, vm)) = vm else { return };
        vm.replug.begin(task, replug);
        let name = vm.name().to_owned();
        if reason == Reason::Astray {
            let Replug { vcpu, node } = replug;
            let line =
                format!("{name}: vCPU {vcpu} is replugged to guest node {node}: its guest has no channel");
            self.log(task.vm, Level::Info, line);
        }
        self.ask(task, Ask::Replug(replug.vcpu, replug.node));
    }

    /// What an operator wants was checked when it was asked for.
    fn begin_attach(&mut self, task: TaskId, reason: Reason) {
        let id = task.vm;
        if reason == Reason::Marked {
            if let Some(Err(refusal)) = self.vm(id).map(check_publishable) {
                return self.attach_marked_failed(id, refusal.to_string());
            }
            if self.channel_event(id, ChannelEvent::AttachRequested).is_none() {
                return;
            }
        }
        self.plug_anew(task, reason, Ask::Attach);
    }

    /// Each channel has an epoch of its own.
    fn plug_anew(&mut self, task: TaskId, why: Reason, ask: fn(u32) -> Ask) {
        let epoch = self.registry.fresh_epoch();
        self.plug(task, why, ask(epoch));
    }

    /// Asks the hypervisor of a VM. False if there is no connection to it.
    fn ask(&mut self, task: TaskId, ask: Ask) -> bool {
        let connection = self.world.get(task.vm).and_then(|managed| managed.link.connection());
        self.commands.extend(connection.map(|connection| Command::Ask(task, connection, ask)));
        connection.is_some()
    }

    /// Asks for what the state of the channel is to lead to.
    fn plug(&mut self, task: TaskId, why: Reason, ask: Ask) {
        let asked = self.ask(task, ask);
        let vm = self.world.vm_mut(task.vm).filter(|_| asked);
        vm.into_iter().for_each(|(_, vm)| vm.plug.begin(task, why));
    }

    fn mark(&mut self, task: TaskId, marked: bool) {
        let asked = self.ask(task, Ask::Mark(marked));
        if let Some((_, vm)) = self.world.vm_mut(task.vm).filter(|_| asked) {
            // What it was asked before is done before.
            vm.marked = vm.mark.begun().copied().unwrap_or(vm.marked);
            vm.mark.begin(task, marked);
            vm.mark.last = None;
        }
    }

    fn migrate(&mut self, task: TaskId, order: Order) {
        let (now_ns, mut begin) = (self.now_ns, None);
        self.change_migration(task.vm, |migration| {
            migration.ordered(task, order, now_ns);
            begin = Some(Ask::Migrate(migration.destination.clone(), migration.post_copy));
        });
        let ask = match order {
            Order::Mark => return self.mark(task, true),
            Order::Detach => match self.channel_event(task.vm, ChannelEvent::DetachRequested) {
                Some(_) => return self.plug(task, Reason::Migrates, Ask::Detach),
                None => {
                    let why = "its topology channel is in use by another request".to_owned();
                    return self.migration_event(task.vm, MigrationEvent::ReleaseFailed(why));
                }
            },
            Order::GiveUp => None,
            Order::Begin => begin,
            Order::Look => Some(Ask::LookAtMigration),
            Order::Switch => Some(Ask::SwitchMigration),
            Order::Cancel => Some(Ask::CancelMigration),
        };
        ask.map(|ask| self.ask(task, ask));
    }

    fn resize(&mut self, task: TaskId, node: GuestNodeId, ask: Ask) {
        let sizing = self.world.vm_mut(task.vm).and_then(|(_, vm)| vm.homing.sizes.get_mut(&node));
        sizing.and_then(|sizing| sizing.resize.as_mut()).into_iter().for_each(|resize| resize.asked(task));
        if !self.ask(task, ask) {
            self.resize_answered(task, Err("its hypervisor is not connected".to_owned()));
        }
    }

    fn rank(&mut self, id: VmId, Ranks { pid, vcpus, stealing }: Ranks) {
        let vcpus = vcpus.into_iter().map(|(tid, pressure)| Ranked { tid, pressure }).collect();
        self.commands.push(Command::Rank { vm: id, pid, vcpus, stealing });
    }

    /// Gives scx_vnuma the places that are set by affinities, once more.
    fn place_again(&mut self, task: TaskId) {
        let Some((_, vm)) = self.world.vm_mut(task.vm) else { return };
        let mut masks = Vec::new();
        for vcpu in &vm.description.vcpus {
            let Some(mask) = vm.scheduling.masks.get_mut(&vcpu.apic_id) else { continue };
            let set = mask.policy.clone().filter(|set| set.by == Mechanism::Affinity);
            let why = mask.step.last.as_ref().map(|last| last.why);
            let (Some(set), Some(why), Some(operator), false) =
                (set, why, mask.operator.clone(), mask.step.is_under_way())
            else {
                continue;
            };
            let (expected, cpus) = (set.cpus.clone(), Some(set.cpus.clone()));
            // Another step stays wanted.
            let wanted = mask.step.wanted.take();
            mask.step.begin(task, Confining { mask: Some(set), why });
            mask.step.wanted = wanted;
            masks.push(MaskOrder { vcpu: vcpu.apic_id, tid: vcpu.tid, expected, operator, cpus });
        }
        if !masks.is_empty() {
            let pid = vm.description.pid;
            self.commands.push(Command::Confine(task, pid, masks));
        }
    }

    /// Has them kept where their vCPUs are now. Also if nothing has changed: threads may be new.
    fn begin_follow(&mut self, task: TaskId) {
        let cpus = self.world.cpus_of_others(task.vm);
        let Some((_, vm)) = self.world.vm_mut(task.vm) else { return };
        let others = &mut vm.scheduling.others;
        others.follow.wanted = None;
        if cpus.is_none() && !others.in_use() {
            return;
        }
        others.follow.begin(task, cpus.clone());
        let (pid, vcpus) = (vm.description.pid, vm.description.vcpus.iter().map(|vcpu| vcpu.tid).collect());
        self.commands.push(Command::Follow(task, pid, vcpus, cpus));
    }

    /// Has a VM's memory looked at.
    fn begin_observation(&mut self, task: TaskId) {
        let Some((_, vm)) = self.world.vm_mut(task.vm) else { return };
        vm.homing.observation.begin(task, ());
        let (pid, areas) = (vm.description.pid, vm.memory_areas());
        if areas.is_empty() {
            let problem = "where its hypervisor has the memory of its guest nodes is not known: guest nodes without a memory backend of \
                           their own, or several of one size that an old hypervisor does not tell apart";
            return self.memory_observed(task, Err(problem.to_owned()));
        }
        self.commands.push(Command::ObserveMemory(task, pid, areas));
    }

    /// Has it watched how hot a VM's memory is.
    fn begin_hotness(&mut self, task: TaskId) {
        let Some((_, vm)) = self.world.vm_mut(task.vm) else { return };
        vm.homing.hotness.task.begin(task, ());
        self.commands.push(Command::WatchHotness(task, vm.description.pid, vm.memory_areas()));
    }

    /// Has memory moved. It takes a while; others are not kept waiting.
    fn begin_memory(&mut self, task: TaskId, order: MoveMemory) {
        let now_ns = self.now_ns;
        let Some((_, vm)) = self.world.vm_mut(task.vm) else { return };
        let begun = vm.scheduling.memory.begin(task, order.clone(), now_ns);
        let (name, pid) = (vm.name().to_owned(), vm.description.pid);
        self.commands.push(Command::MoveMemory(task, pid, order));
        self.tell_memory(name, &begun);
    }

    /// The guest is asked for its channel's device.
    fn ask_to_unplug(&mut self, task: TaskId, why: Reason) {
        if self.channel_event(task.vm, ChannelEvent::DetachRequested).is_some() {
            self.plug(task, why, Ask::Detach);
        }
    }

    /// Begins steps of policies: one command for each VM, so that one record is written for all of them.
    fn begin_confines(&mut self, steps: Vec<(VmId, Confine)>) {
        let mut orders: BTreeMap<VmId, (TaskId, i32, Vec<MaskOrder>)> = BTreeMap::new();
        for (id, step) in steps {
            let next = self.world.next_task(id);
            let mask = step.to.map(|place| self.world.policy_mask(id, step.vcpu, place));
            let Some((_, vm)) = self.world.vm_mut(id) else { continue };
            let thread = vm.description.vcpus.iter().find(|vcpu| vcpu.apic_id == step.vcpu);
            let thread = thread.map(|vcpu| vcpu.tid);
            let pid = vm.description.pid;
            let Some(state) = vm.scheduling.masks.get_mut(&step.vcpu) else { continue };
            (state.step.wanted, state.released) = (None, false);
            let (Some(tid), Some(operator)) = (thread, state.operator.clone()) else { continue };
            let mask = match mask {
                None => None,
                Some(Some(mask)) => Some(mask),
                // The host has changed since it was decided.
                Some(None) => continue,
            };
            let Some(expected) = state.expected().cloned() else { continue };
            let cpus = mask.as_ref().map(|mask| mask.cpus.clone());
            let (task, _, masks) = orders.entry(id).or_insert_with(|| (next, pid, Vec::new()));
            state.step.begin(*task, Confining { mask, why: step.why });
            masks.push(MaskOrder { vcpu: step.vcpu, tid, expected, operator, cpus });
        }
        for (task, pid, masks) in orders.into_values() {
            self.commands.push(Command::Confine(task, pid, masks));
        }
    }
}
