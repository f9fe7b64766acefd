//! The end of a run: all faults stop, and after a while the daemon's state must be the true one.

use crate::{
    action::{Action, MICRO, MILLI, SECOND},
    daemon::Message,
    simulation::Simulation,
    truth,
    world::{Driver, Machine, Slot},
};
use std::collections::BTreeMap;
use vnuma_api as api;
use vnuma_daemon::core::event::{Event, Report};

impl Simulation {
    /// Faults end, all becomes quiet, everything is checked. Then half of the VMs end, and it is checked again.
    pub(crate) fn finish(&mut self) {
        self.chaotic = false;
        self.world.host.restore();
        self.tell_host();
        for slot in 0..self.world.places.len() {
            let place = &mut self.world.places[slot];
            place.listed = place.machine.is_some();
            let Some(machine) = place.machine.as_mut() else { continue };
            machine.name.clone_from(&place.name);
            // Nothing is left to be replugged to: a replug would be in flight when all is looked at.
            machine.spare.clear();
            let serial = machine.serial;
            self.recover(slot, serial);
            self.guest_arrives(slot, serial);
        }
        self.scan_soon();
        // Some may have reported that a moment ago, and are read only now.
        self.reconnect_liars();
        self.pass(3 * SECOND);
        self.reconnect_liars();
        // Homes without an event are read again after 30 s at most.
        for _ in 0..4 {
            self.pass(12 * SECOND);
            self.drift(20, false);
            self.event(Event::Resync);
        }
        // Nothing moves vCPUs any more.
        self.switch_off();
        self.forget_memory_policies();
        // What the last period showed is not looked at again by the next resync. The one after that finds all.
        self.event(Event::Resync);
        self.pass(12 * SECOND);
        self.check_masks();
        self.check_all();
        for _ in 0..8 {
            // Nothing else happens that would wake the core.
            self.drift(2, true);
            self.pass(4 * SECOND);
        }
        if self.checker.broken.is_some() {
            return;
        }
        for slot in (0..self.world.places.len()).step_by(2) {
            self.end(slot, false);
        }
        self.pass(20 * SECOND);
        self.check_all();
    }

    /// Some threads are carried elsewhere, with an event or without.
    fn drift(&mut self, count: usize, seen: bool) {
        let tids: Vec<_> = self.world.threads.keys().copied().collect();
        for _ in 0..count {
            let (tid, node) = (self.rng.pick(&tids), self.rng.within(0..8) as u32);
            let Some(tid) = tid else { return };
            self.world.carry(tid, node, false, &mut self.rng, self.now_ns);
            if seen {
                self.thread_moved(tid);
            }
        }
    }

    /// A name counts from the moment of connecting: a VM that lied gets a new connection.
    fn reconnect_liars(&mut self) {
        let liars = self.daemon.workers.iter().filter_map(|(connection, worker)| {
            let managed = self.daemon.core.world().get(worker.vm)?;
            (managed.name() != self.world.places[worker.slot].name).then_some(*connection)
        });
        let liars: Vec<_> = liars.collect();
        for connection in liars {
            let gone = vnuma_hypervisor::VmError::Disconnected { vm: "a VM".to_owned() };
            self.ours(MICRO, Action::Arrive(Message::Report(connection, Report::Lost(gone))));
        }
        self.pass(MILLI);
    }

    fn check_all(&mut self) {
        self.checker.sweep(self.now_ns);
        let waiting = self.checker.waiting();
        self.checker.expect(waiting == 0, "request", || format!("{waiting} requests are not answered"));
        self.check_names();
        self.check_leaks();
        for slot in 0..self.world.places.len() {
            if self.world.places[slot].machine.is_some() {
                self.check_vm(slot);
            }
        }
    }

    fn check_names(&mut self) {
        let running = |place: &&crate::world::Place| place.machine.is_some();
        let mut expected: Vec<_> =
            self.world.places.iter().filter(running).map(|place| place.name.clone()).collect();
        expected.sort_unstable();
        let names = self.daemon.core.names();
        let difference = names.iter().filter(|name| !expected.contains(name)).take(3).cloned();
        let difference: Vec<_> =
            difference.chain(expected.iter().filter(|name| !names.contains(name)).take(3).cloned()).collect();
        let same = names == expected;
        self.checker.expect(same, "show", || format!("listed or missing without reason: {difference:?}"));
    }

    /// Watched and open is what there is, and nothing else.
    fn check_leaks(&mut self) {
        let truth: BTreeMap<i32, i32> = self.world.threads.iter().map(|(tid, t)| (*tid, t.pid)).collect();
        let watched = self.checker.threads.clone();
        let difference = watched.iter().filter(|(tid, pid)| truth.get(tid) != Some(pid)).take(3);
        let surplus: Vec<_> = difference.collect();
        let missing: Vec<_> =
            truth.iter().filter(|(tid, pid)| watched.get(tid) != Some(pid)).take(3).collect();
        self.checker
            .expect(surplus.is_empty(), "leak", || format!("watched threads that are gone: {surplus:?}"));
        self.checker
            .expect(missing.is_empty(), "leak", || format!("threads that nobody watches: {missing:?}"));
        let mut pids: Vec<_> =
            self.world.places.iter().flat_map(|place| &place.machine).map(|m| m.pid).collect();
        pids.sort_unstable();
        let mut processes: Vec<_> = self.checker.processes.values().copied().collect();
        processes.sort_unstable();
        let surplus: Vec<_> =
            processes.iter().filter(|pid| pids.binary_search(pid).is_err()).take(3).collect();
        let missing: Vec<_> =
            pids.iter().filter(|pid| processes.binary_search(pid).is_err()).take(3).collect();
        self.checker.expect(processes == pids, "leak", || {
            format!("processes watched that are gone: {surplus:?}, not watched: {missing:?}")
        });
        let machines = pids.len();
        let connections = self.checker.connections().count();
        self.checker.expect(connections == machines, "leak", || {
            format!("{connections} connections to {machines} VMs")
        });
        let open = |(slot, device, _): &&(Slot, u64, u64)| {
            let known = self.world.places[*slot].machine.as_ref().and_then(|m| m.device.as_ref());
            known.is_none_or(|known| known.serial != *device)
        };
        let stray = self.daemon.channels.values().filter(open).count();
        self.checker.expect(stray == 0, "leak", || format!("{stray} channels of VMs that are gone are open"));
    }

    /// What is shown of a VM, and what was published to its guest.
    fn check_vm(&mut self, slot: Slot) {
        let place = &self.world.places[slot];
        let (name, Some(machine)) = (place.name.clone(), place.machine.clone()) else { return };
        let shown = match self.daemon.core.show(&name) {
            Ok(shown) => shown,
            Err(refusal) => return self.checker.expect(false, "show", || format!("{name}: {refusal}")),
        };
        let answers = shown.hypervisor == api::Hypervisor::Answers && shown.described;
        self.checker.expect(answers, "show", || format!("{name} is shown as {:?}", shown.hypervisor));
        let plugged = machine.device.is_some();
        let kept = shown.problem.as_ref().is_some_and(|problem| problem.contains("has not released"));
        self.checker.expect(!kept, "request", || {
            format!(
                "{name}: its guest would release the device, and is not asked for it: {:?}",
                shown.problem
            )
        });
        let known = matches!(shown.channel, api::ChannelState::Attached | api::ChannelState::Lost);
        self.checker.expect(plugged == known, "show", || {
            format!("{name}: its channel is shown as {:?}, plugged: {plugged}", shown.channel)
        });
        self.checker.expect(plugged || !machine.marked, "migration", || {
            format!("{name} is marked to be attached, runs, and is not attached")
        });
        let host = self.world.host.topology.clone();
        let homes = truth::homes(&machine.describe());
        let vcpus = shown.vcpus.iter().map(|vcpu| (vcpu.apic_id, vcpu.tid));
        let same = vcpus.eq(machine.vcpus.iter().map(|(id, vcpu)| (*id, vcpu.tid)));
        self.checker.expect(same, "show", || format!("{name}: other vCPUs are shown than there are"));
        for vcpu in &shown.vcpus {
            let Some(thread) = self.world.threads.get(&vcpu.tid) else { continue };
            let at = thread.at.pinned.unwrap_or(thread.at.node);
            let wrong = check_vcpu(&host, &homes, &machine, vcpu, at, shown.attached);
            self.checker.expect(wrong.is_none(), "truth", || {
                format!("{name}: vCPU {} on host node {at}: {}", vcpu.apic_id, wrong.unwrap_or_default())
            });
        }
        if shown.attached {
            self.check_page(&name, &machine, &homes);
        }
    }

    /// What is in the memory that a guest reads.
    fn check_page(&mut self, name: &str, machine: &Machine, homes: &truth::Homes) {
        let page = machine.device.as_ref().and_then(|device| device.page.as_ref());
        let Some((generation, publication)) = page else {
            return self.checker.expect(false, "truth", || format!("{name}: nothing was published"));
        };
        let host = &self.world.host.topology;
        let far = truth::distances_hold(host, homes, machine.nodes.len(), &publication.distances);
        let listed = publication.vcpus.iter().map(|(vcpu, _)| vcpu).eq(machine.vcpus.keys());
        let wrong = publication.vcpus.iter().find(|(vcpu, node)| {
            let thread = machine.vcpus.get(vcpu).and_then(|vcpu| self.world.threads.get(&vcpu.tid));
            let at = thread.map(|thread| thread.at.pinned.unwrap_or(thread.at.node));
            !homes.is_empty() && !at.is_some_and(|at| truth::is_nearest(host, homes, at, *node))
        });
        let wrong = wrong.copied();
        self.checker.expect(wrong.is_none() && listed && far, "truth", || {
            format!("{name}: generation {generation:x}: {wrong:?}, vCPUs {listed}, distances {far}")
        });
        let host = &self.world.host.topology;
        let wrong = truth::wrong_device(host, homes, &machine.describe().devices, &publication.devices);
        self.checker.expect(wrong.is_none(), "truth", || format!("{name}: {}", wrong.unwrap_or_default()));
    }
}

/// What is wrong with how a vCPU is shown, when all is quiet.
fn check_vcpu(
    host: &vnuma_model::HostTopology,
    homes: &truth::Homes,
    machine: &Machine,
    vcpu: &api::Vcpu,
    at: u32,
    attached: bool,
) -> Option<String> {
    if vcpu.host_node != Some(at) {
        return Some(format!("is shown on host node {:?}", vcpu.host_node));
    }
    let used = machine.guest.used.get(&vcpu.apic_id).copied();
    match machine.guest.driver {
        Driver::Forger => return None,
        // It boots with what the firmware says, and stays with that.
        Driver::Deaf if vcpu.acked_node.is_some_and(|node| Some(node) != used) => {
            return Some(format!("its guest uses {used:?}, is shown to use {:?}", vcpu.acked_node));
        }
        Driver::Deaf => return None,
        Driver::Honest { .. } if !attached => return None,
        Driver::Honest { .. } => {}
    }
    if vcpu.acked_node != used {
        return Some(format!("its guest uses {used:?}, is shown to use {:?}", vcpu.acked_node));
    }
    let expected = match () {
        () if homes.is_empty() => api::VcpuState::Unknown,
        () if !used.is_some_and(|node| truth::is_nearest(host, homes, at, node)) => api::VcpuState::Stale,
        () if truth::is_home(homes, at) => api::VcpuState::True,
        () => api::VcpuState::Approximate,
    };
    let told =
        matches!(expected, api::VcpuState::True | api::VcpuState::Approximate | api::VcpuState::Unknown);
    let right = vcpu.state == expected && told;
    (!right).then(|| format!("is shown as {:?}, and is {expected:?}", vcpu.state))
}
