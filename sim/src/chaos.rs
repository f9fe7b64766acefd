//! What goes wrong, and what operators, guests and the kernel do of themselves.

use crate::{
    action::{Action, Chaos, MICRO, MILLI, SECOND},
    daemon::{Message, WorkerState},
    simulation::Simulation,
    world::{Machine, Slot},
};
use vnuma_daemon::core::event::{Event, Report, Request};
use vnuma_hypervisor::VmError;
use vnuma_model::RunState;
use vnuma_policy::world::StopReason;

impl Simulation {
    /// It happens, and will again.
    pub(crate) fn chaos(&mut self, chaos: Chaos) {
        if !self.chaotic {
            return;
        }
        let interval_ns = chaos.interval_ns();
        let after_ns = self.rng.within(MICRO..2 * interval_ns);
        self.later(after_ns, Action::Chaos(chaos));
        match chaos {
            Chaos::Migrate => self.migrate(),
            Chaos::Confine => self.confine(true),
            Chaos::SilentAffinity => self.confine(false),
            Chaos::AskMove | Chaos::AskAttach | Chaos::AskDetach | Chaos::AskReplug => self.ask_one(chaos),
            Chaos::AskPolicy => {
                let slot = self.a_slot();
                slot.into_iter().for_each(|slot| self.ask_policy(slot));
            }
            Chaos::AskMemory => {
                let slot = self.a_slot();
                slot.into_iter().for_each(|slot| self.ask_memory(slot));
            }
            Chaos::AskMigration => {
                let slot = self.a_slot();
                slot.into_iter().for_each(|slot| self.ask_migration(slot));
            }
            Chaos::AskAll => self.ask_all(),
            Chaos::Wander => self.wander(),
            Chaos::Storm => self.storm(),
            Chaos::Hang => self.hang(),
            Chaos::Stop => self.stop(),
            Chaos::Disconnect => self.disconnect(),
            Chaos::End => self.end_one(),
            Chaos::Start => self.start_one(),
            Chaos::Reboot => self.reboot(),
            Chaos::Hotplug => self.hotplug(),
            Chaos::PassThrough => self.pass_through(),
            Chaos::Rehome => self.rehome(),
            Chaos::Rename => self.rename(),
            Chaos::Unlist => self.unlist(),
            Chaos::Release => self.release(),
            Chaos::HostChange => self.change_host(),
            Chaos::Stall => self.stalled_until_ns = self.now_ns + self.rng.within(MILLI..SECOND),
            Chaos::Restart => {
                self.count("restarts");
                self.restart();
            }
        }
    }

    fn a_slot(&mut self) -> Option<Slot> {
        let slot = self.rng.index(self.world.places.len());
        self.world.places[slot].machine.is_some().then_some(slot)
    }

    fn a_machine(&mut self) -> Option<(Slot, &mut Machine)> {
        let slot = self.a_slot()?;
        Some((slot, self.world.places[slot].machine.as_mut()?))
    }

    fn a_thread(&mut self) -> Option<i32> {
        let slot = self.a_slot()?;
        let tids: Vec<_> =
            self.world.places[slot].machine.iter().flat_map(|m| m.vcpus.values()).map(|v| v.tid).collect();
        self.rng.pick(&tids)
    }

    fn a_node(&mut self) -> u32 {
        let nodes: Vec<_> = self.world.host.nodes().collect();
        self.rng.pick(&nodes).unwrap_or(0)
    }

    fn migrate(&mut self) {
        let (Some(tid), node) = (self.a_thread(), self.a_node()) else { return };
        let pinned = self.world.threads.get(&tid).and_then(|thread| thread.at.pinned);
        // One that is confined stays on its node.
        self.world.carry(tid, pinned.unwrap_or(node), pinned.is_some(), &mut self.rng, self.now_ns);
        self.thread_moved(tid);
    }

    fn confine(&mut self, seen: bool) {
        let (Some(tid), node) = (self.a_thread(), self.a_node()) else { return };
        let Some(at) = self.world.threads.get(&tid).map(|thread| thread.at) else { return };
        let free = at.pinned.is_some() && self.rng.chance(800);
        let node = if free { at.node } else { node };
        self.world.carry(tid, node, !free, &mut self.rng, self.now_ns);
        if seen {
            self.thread_moved(tid);
        }
    }

    fn ask_one(&mut self, chaos: Chaos) {
        let Some(slot) = self.a_slot() else { return };
        self.ask_of(slot, chaos);
    }

    pub(crate) fn ask_of(&mut self, slot: Slot, chaos: Chaos) {
        let name = self.world.places[slot].name.clone();
        let vcpus: Vec<_> =
            self.world.places[slot].machine.iter().flat_map(|m| m.vcpus.keys().copied()).collect();
        let vcpu = self.rng.pick(&vcpus).unwrap_or(99);
        let node = if self.rng.chance(5) { 77 } else { self.rng.within(0..8) as u32 };
        match chaos {
            Chaos::AskAttach => self.ask(|to| Request::Attach(name, to)),
            Chaos::AskDetach => self.ask(|to| Request::Detach(name, to)),
            Chaos::AskReplug => self.ask(|to| Request::Replug(name, vcpu, to)),
            _ => self.ask(|to| Request::Move(name, vcpu, node, to)),
        }
    }

    fn ask_all(&mut self) {
        let slot = self.rng.index(self.world.places.len());
        let wanted = [Chaos::AskMove, Chaos::AskAttach, Chaos::AskDetach, Chaos::AskReplug];
        for _ in 0..self.rng.within(2..12) {
            if let Some(chaos) = self.rng.pick(&wanted) {
                self.ask_of(slot, chaos);
            }
        }
    }

    fn wander(&mut self) {
        let open: Vec<_> = self.daemon.channels.values().map(|open| open.0).collect();
        let Some(machine) = self.rng.pick(&open).and_then(|slot| self.world.places[slot].machine.as_ref())
        else {
            return;
        };
        let tids: Vec<_> = machine.vcpus.values().map(|vcpu| vcpu.tid).collect();
        let Some(tid) = self.rng.pick(&tids) else { return };
        for pause in 0..20 {
            self.later(pause * 150 * MILLI, Action::Carry(tid));
        }
    }

    /// A thread is carried to another node, confined no longer.
    pub(crate) fn carry(&mut self, tid: i32) {
        if self.chaotic && self.world.threads.contains_key(&tid) {
            let node = self.a_node();
            self.world.carry(tid, node, false, &mut self.rng, self.now_ns);
            self.thread_moved(tid);
        }
    }

    fn storm(&mut self) {
        let Some(&(slot, ..)) = self.daemon.channels.values().next() else { return };
        for _ in 0..60 {
            let after_ns = self.rng.within(0..SECOND);
            self.later(after_ns, Action::AskMove(slot));
        }
    }

    fn hang(&mut self) {
        let Some((slot, machine)) = self.a_machine() else { return };
        machine.hung = true;
        let serial = machine.serial;
        self.count("hangs");
        let for_ns = self.rng.within(10 * MILLI..20 * SECOND);
        self.later(for_ns, Action::Recover(slot, serial));
        self.process_changed(slot);
    }

    fn stop(&mut self) {
        let tracer = self.rng.chance(300);
        let Some((slot, machine)) = self.a_machine() else { return };
        machine.stopped = Some(if tracer { StopReason::Tracer } else { StopReason::Signal });
        let serial = machine.serial;
        self.count("stops");
        let for_ns = self.rng.within(10 * MILLI..10 * SECOND);
        self.later(for_ns, Action::Recover(slot, serial));
        self.process_changed(slot);
    }

    fn disconnect(&mut self) {
        let Some(slot) = self.a_slot() else { return };
        let found = self.daemon.workers.iter_mut().find(|(_, worker)| worker.slot == slot);
        let Some((&connection, worker)) = found.filter(|(_, worker)| worker.state != WorkerState::Over)
        else {
            return;
        };
        worker.state = WorkerState::Over;
        self.count("connections lost");
        self.report(connection, MILLI, Report::Lost(VmError::Disconnected { vm: "a VM".to_owned() }));
    }

    /// A machine's process ends.
    pub(crate) fn end(&mut self, slot: Slot, replaced: bool) {
        let Some((pid, tids)) = self.world.end(slot) else { return };
        self.checker.process_ended(pid);
        tids.into_iter().for_each(|tid| self.thread_ended(tid));
        let over: Vec<_> =
            self.daemon.workers.iter().filter(|(_, w)| w.slot == slot).map(|(c, _)| *c).collect();
        for connection in over {
            let after_ns = self.rng.within(0..5 * MILLI);
            self.ours(after_ns, Action::Work(connection));
        }
        if replaced {
            self.world.start(slot, &mut self.rng, self.now_ns);
        } else {
            self.world.places[slot].listed = false;
        }
        self.process_changed(slot);
        self.scan_soon();
    }

    fn end_one(&mut self) {
        let Some(slot) = self.a_slot() else { return };
        let replaced = self.rng.chance(300);
        self.count(if replaced { "VMs replaced" } else { "VMs ended" });
        self.end(slot, replaced);
    }

    fn start_one(&mut self) {
        let free = |slot: &Slot| self.world.places[*slot].machine.is_none();
        let free: Vec<_> = (0..self.world.places.len()).filter(free).collect();
        let Some(slot) = self.rng.pick(&free) else { return };
        self.world.start(slot, &mut self.rng, self.now_ns);
        self.count("VMs started");
        let (waits, after_ns) = (self.rng.chance(200), self.rng.within(100 * MILLI..20 * SECOND));
        if let Some(machine) = self.world.places[slot].machine.as_mut().filter(|_| waits) {
            machine.waits = true;
            let serial = machine.serial;
            self.later(after_ns, Action::GuestArrives(slot, serial));
        }
        self.scan_soon();
    }

    fn reboot(&mut self) {
        let (now_ns, takes_ns) = (self.now_ns, self.rng.within(10 * MILLI..3 * SECOND));
        let runs = |machine: &Machine| machine.answers() && machine.run_state() == RunState::Running;
        let Some((slot, machine)) = self.a_machine().filter(|(_, machine)| runs(machine)) else { return };
        machine.boot(now_ns + takes_ns);
        self.count("reboots");
        self.machine_event(slot, |worker| worker.rebooted = true);
        self.ring(slot);
    }

    fn hotplug(&mut self) {
        let Some(slot) = self.a_slot() else { return };
        // QEMU plugs nothing into a machine that migrates.
        let may = |machine: &Machine| machine.answers() && !machine.migrates();
        let Some(mut machine) = self.world.places[slot].machine.clone().filter(may) else { return };
        if self.rng.chance(500) && machine.vcpus.len() < 12 {
            let node = self.rng.index(machine.nodes.len()) as u32;
            self.world.plug(slot, &mut machine, node, &mut self.rng, self.now_ns);
            self.world.places[slot].machine = Some(machine);
        } else {
            // The first one booted the machine, and stays.
            let vcpus: Vec<_> = machine.vcpus.keys().copied().filter(|vcpu| *vcpu != 0).collect();
            let Some(vcpu) = self.rng.pick(&vcpus) else { return };
            let tid = self.world.unplug(slot, vcpu);
            tid.into_iter().for_each(|tid| self.thread_ended(tid));
        }
        self.count("vCPUs plugged or unplugged");
        self.machine_event(slot, |worker| worker.describe = true);
    }

    fn pass_through(&mut self) {
        let Some(slot) = self.a_slot() else { return };
        let machine = self.world.places[slot].machine.as_mut();
        let may = |machine: &&mut Machine| machine.answers() && !machine.migrates();
        let Some(machine) = machine.filter(may) else { return };
        machine.change_functions(&mut self.rng);
        self.count("devices plugged or unplugged");
        // vnumad looks again because the guest's driver counts devices.
        self.machine_event(slot, |worker| worker.describe = true);
    }

    fn rehome(&mut self) {
        let (home, node) = (self.a_node(), self.rng.index(4));
        let Some((_, machine)) = self.a_machine() else { return };
        if let Some(node) = machine.nodes.get_mut(node).filter(|node| !node.bound && node.home.is_some()) {
            node.home = Some(home);
            self.count("guest nodes with another home");
        }
    }

    fn rename(&mut self) {
        let other = self.rng.index(self.world.places.len());
        let name = match self.rng.chance(500) {
            true => self.world.places[other].name.clone(),
            false => format!("liar{other}"),
        };
        let Some((slot, machine)) = self.a_machine() else { return };
        machine.name = name;
        self.count("names that are not true");
        self.machine_event(slot, |worker| worker.describe = true);
    }

    fn unlist(&mut self) {
        let Some(slot) = self.a_slot() else { return };
        let place = &mut self.world.places[slot];
        place.listed = !place.listed;
        self.scan_soon();
    }

    fn release(&mut self) {
        let Some((slot, machine)) = self.a_machine() else { return };
        let serial = machine.serial;
        if let Some(device) = machine.device.as_ref().map(|device| device.serial) {
            self.count("devices let go unasked");
            self.let_go(slot, serial, device);
        }
    }

    /// The host changes, and the daemon is notified.
    pub(crate) fn change_host(&mut self) {
        self.world.host.change(&mut self.rng);
        self.count("changes of the host");
        self.tell_host();
    }

    pub(crate) fn tell_host(&mut self) {
        for tid in self.world.leave_missing_cpus(&mut self.rng, self.now_ns) {
            self.thread_moved(tid);
        }
        let changed = Event::HostChanged(self.world.host.topology.clone());
        self.ours(20 * MILLI, Action::Arrive(Message::Event(changed)));
    }
}
