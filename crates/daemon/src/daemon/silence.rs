//! VMs that do not answer: named, and observed without their help.

use super::{Daemon, Entry};
use crate::{
    message::ConnectionId,
    vm::{Known, Vm},
    vm_thread::Command,
};
use std::{collections::BTreeMap, os::fd::OwnedFd};
use tracing::{info, warn};
use vnuma_api::{Event, Hypervisor};
use vnuma_hypervisor::{ObservedVcpus, VmError, VmHandle};
use vnuma_process::{StopReason, main_loop};
use vnuma_topology::VmDescription;

impl Daemon {
    /// A VM does not answer. What was known of it stays.
    pub(super) fn silent(&mut self, handle: &VmHandle, error: &VmError, pid: i32) {
        let Some(entry) = self.entries.get_mut(handle) else { return };
        (entry.slow, entry.silent, entry.peer) = (false, true, Some(pid));
        entry.name_problem(describe(error, pid));
        entry.look_at_process();
        if entry.vm.as_ref().is_some_and(|vm| vm.description.pid != pid) {
            self.forget_vm(handle);
        }
    }

    /// vCPUs were seen of a VM that does not answer, or not as it should.
    pub(super) fn glimpsed(
        &mut self,
        handle: &VmHandle,
        id: ConnectionId,
        (pid, pidfd): (i32, OwnedFd),
        glimpse: ObservedVcpus,
    ) {
        let Some(entry) = self.entries.get(handle) else { return };
        let name = entry.candidate.name.clone();
        // A QEMU may have several monitors, and more than one VM may want a name.
        let other = |vm: &Vm| vm.description.pid == pid || vm.name() == name;
        let taken =
            |(path, entry): (&VmHandle, &Entry)| path != handle && entry.vm.as_ref().is_some_and(other);
        let described = entry.vm.as_ref().is_some_and(|vm| vm.known == Known::Described);
        if described || self.entries.iter().any(taken) {
            return;
        }
        let known = if glimpse.certain { Known::ByKvm } else { Known::ByName };
        let description = VmDescription {
            name: name.clone(),
            pid,
            run_state: String::new(),
            guest_nodes: Vec::new(),
            vcpus: glimpse.vcpus,
            spare_slots: BTreeMap::new(),
        };
        let new = entry.vm.is_none();
        let Some(entry) = self.entries.get_mut(handle) else { return };
        let policy = self.config.settle;
        let vm = entry.vm.get_or_insert_with(|| Vm::new(id, &self.host, description.clone(), pidfd, policy));
        vm.known = known;
        if new {
            info!(vm = name, pid, vcpus = description.vcpus.len(), "VM found; it does not answer");
            self.tell_watchers(|time_ns| Event::Appeared { vm: name, time_ns });
        }
        self.described(handle, description);
    }

    /// Looks which processes stand still, asks those that may be stuck, and connects where that is due.
    pub(super) fn look_at_processes(&mut self) {
        for entry in self.entries.values_mut() {
            entry.look_at_process();
            entry.probe_if_stuck();
        }
        self.connect_due();
    }
}

impl Entry {
    /// The VM's process, or the one that would be.
    fn process(&self) -> Option<i32> {
        self.vm.as_ref().map(|vm| vm.description.pid).or(self.peer)
    }

    /// Looks whether the process stands still.
    pub(super) fn look_at_process(&mut self) {
        let Some(pid) = self.process() else { return };
        // Of a process that has ended others tell.
        let halt = StopReason::of(pid).ok().flatten();
        if halt == self.halt {
            return;
        }
        self.halt = halt;
        let handle = &self.candidate.handle;
        match halt {
            Some(halt) => warn!(%handle, pid, "QEMU is {halt}"),
            None => info!(%handle, pid, "QEMU runs again"),
        }
    }

    /// A main loop that waits for something to do will answer; of any other only a question tells.
    fn probe_if_stuck(&self) {
        let (Some(pid), Some((_, thread))) = (self.process(), &self.connection) else { return };
        // Where the kernel does not tell, it is asked now and then.
        if self.hypervisor() == Hypervisor::Answers && matches!(main_loop::waits(pid), Ok(false)) {
            thread.send(Command::Probe);
        }
    }

    /// It has not answered a probe yet.
    pub(super) fn slow(&mut self, error: &VmError, pid: i32) {
        self.slow = true;
        self.name_problem(describe(error, pid));
    }

    /// Why it cannot be asked anything, for an operator.
    pub(super) fn why_not(&self) -> Option<String> {
        match (self.halt, self.process()) {
            (Some(halt), Some(pid)) => Some(format!("QEMU (process {pid}) is {halt}")),
            _ => self.problem.clone(),
        }
    }

    pub(super) fn hypervisor(&self) -> Hypervisor {
        match self.halt {
            Some(StopReason::Signal) => Hypervisor::Stopped,
            Some(StopReason::Tracer) => Hypervisor::Debugged,
            None if self.silent || self.slow => Hypervisor::Silent,
            None if self.problem.is_some() => Hypervisor::Lost,
            None => Hypervisor::Answers,
        }
    }

    pub(super) fn name_problem(&mut self, problem: String) {
        if self.problem.as_ref() != Some(&problem) {
            warn!(handle = %self.candidate.handle, problem, "a VM does not answer");
        }
        self.problem = Some(problem);
    }
}

/// Why it does not answer, and where it is stuck if that can be seen.
fn describe(error: &VmError, pid: i32) -> String {
    main_loop::stuck_in(pid).map_or_else(
        || error.to_string(),
        |function| format!("{error}; its main loop is stuck in {function} (a function of the kernel)"),
    )
}
