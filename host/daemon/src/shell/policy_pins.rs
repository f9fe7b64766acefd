//! Pins of policies, for VMs whose hypervisor's manager keeps pins of its own: that sets the affinities.
//!
//! ```text
//!  core ─Confine─▶ affinities ─PolicyPins─▶ VM worker ─▶ libvirt
//!                  tells scx_vnuma first        │
//!  core ◀─Confined────── shell ◀────────────────┘
//!
//!  core ─RestoreMasks─▶ shell ─Unpin─▶ VM worker ─▶ shell ─Restore─▶ affinities ─MasksRestored─▶ core
//! ```
//!
//! Only the VM's worker waits for libvirt. What is asked of it is answered once, however it ends.

use super::{
    Shell,
    affinities::Order,
    inbox::Message,
    pin_orders::{NOT_CONNECTED, Unpin},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};
use tracing::{info, warn};
use vnuma_model::CpuSet;
use vnuma_policy::world::{Mechanism, TaskId, Vm, VmId};

/// How long pins are given back when vnumad stops: one call to libvirt that is not answered, and those that are.
const STOP_LIMIT: Duration = Duration::from_secs(6);

/// The pins that policies want of a VM, by thread.
fn wanted_pins(vm: &Vm) -> BTreeMap<i32, Vec<CpuSet>> {
    let of = |vcpu: &vnuma_model::Vcpu| {
        let mask = vm.scheduling.masks.get(&vcpu.apic_id)?;
        let begun = mask.step.begun().and_then(|begun| begun.mask.as_ref());
        let set = mask.policy.as_ref().filter(|mask| mask.by == Mechanism::Affinity);
        let sets: Vec<CpuSet> = begun.into_iter().chain(set).map(|mask| mask.cpus.clone()).collect();
        (!sets.is_empty()).then_some((vcpu.tid, sets))
    };
    vm.description.vcpus.iter().filter_map(of).collect()
}

impl Shell {
    /// An order that cannot be queued is returned. Do not answer it by the inbox from this thread, which is the one that empties it.
    fn unpin(&self, vm: VmId, unpin: Unpin) -> Result<(), Unpin> {
        match self.pinner(vm) {
            Some(worker) => worker.unpin(unpin),
            None => Err(unpin),
        }
    }

    /// Gives back what policies have set in a VM: first pins, as affinities follow them.
    pub(super) fn restore(&self, task: TaskId, pid: i32) {
        let vm = task.vm;
        let pidfd = self.pidfd(vm, pid);
        let (mut vcpus, mut pins) = (Vec::new(), Ok(0));
        if self.keeps_pins(vm) {
            let (inbox, pidfd) = (Arc::clone(&self.inbox), pidfd.clone());
            // Fails only while vnumad stops.
            let told = move |outcome| _ = inbox.send(Message::Unpinned(task, pid, pidfd, outcome));
            match self.unpin(vm, Unpin::new(BTreeMap::new(), told)) {
                Ok(()) => return,
                Err(unpin) => unpin.forget(),
            }
            (vcpus, pins) = (self.threads_of_vcpus(vm), Err(NOT_CONNECTED.to_owned()));
        }
        self.affinities.order(Order::Restore { task, pid, pidfd, vcpus, pins });
    }

    pub(super) fn threads_of_vcpus(&self, vm: VmId) -> Vec<i32> {
        let known = self.core.world().get(vm).and_then(|managed| managed.vm.as_ref());
        known.into_iter().flat_map(|vm| &vm.description.vcpus).map(|vcpu| vcpu.tid).collect()
    }

    /// Gives back pins that no policy wants.
    pub(super) fn settle_pins(&self, vm: VmId) {
        let Some(known) = self.core.world().get(vm).and_then(|managed| managed.vm.as_ref()) else { return };
        let name = known.name().to_owned();
        let told = move |outcome| match outcome {
            Ok(0) => {}
            Ok(count) => info!("{name}: {count} vCPUs are pinned as before their policy"),
            Err(error) => warn!("{name}: pins that no policy wants stay until the next connection: {error}"),
        };
        // If it cannot be queued, the connection is gone, and another one follows.
        drop(self.unpin(vm, Unpin::new(wanted_pins(known), told)));
    }

    /// vnumad stops: gives back all pins of policies. What cannot be given back now is by the next vnumad.
    pub(super) fn give_pins_back(&self) {
        let (tell, told) = mpsc::channel();
        let mut left = BTreeMap::new();
        for (vm, managed) in self.core.world().iter().filter(|(_, managed)| managed.abilities.pins) {
            let Some(known) = managed.vm.as_ref().filter(|vm| !wanted_pins(vm).is_empty()) else { continue };
            left.insert(vm, known.name().to_owned());
            let tell = tell.clone();
            // The receiver is gone once the time is up.
            drop(self.unpin(vm, Unpin::new(BTreeMap::new(), move |outcome| drop(tell.send((vm, outcome))))));
        }
        let until = Instant::now() + STOP_LIMIT;
        let stays = |name: &str, why: &str| {
            warn!(
                "{name}: its vCPUs stay pinned as its policy had them: {why}; the next vnumad takes that back"
            );
        };
        while !left.is_empty() {
            let Ok((vm, outcome)) = told.recv_timeout(until.saturating_duration_since(Instant::now())) else {
                break;
            };
            if let (Some(name), Err(error)) = (left.remove(&vm), outcome) {
                stays(&name, &error);
            }
        }
        left.values().for_each(|name| stays(name, "what manages it has not answered in time"));
    }
}
