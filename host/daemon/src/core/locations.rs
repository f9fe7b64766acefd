//! Where vCPUs are, and moves of them.

use super::{
    Core,
    counts::{BY_OPERATOR, FOR_REHOME},
    event::Command,
    refusal::Refusal,
    waiting::Until,
};
use crate::config::Intervals;
use vnuma_api as api;
use vnuma_model::{ApicId, HostTopology, VcpuLocation};
use vnuma_policy::world::{HostReading, Move, TaskId, VcpuReading, VmId};
use vnuma_process::ActError;

/// Every so many resyncs (30 s by default) all threads are looked at, those that periods read included: threads that could not be
/// watched are tried again then.
const LOOK_AT_ALL: u32 = 15;

/// When threads were looked at.
#[derive(Debug)]
pub(super) struct Looked {
    /// Resyncs since a command had all threads looked at.
    resyncs: u32,
    /// When the last period read threads, and which, in rising order.
    read_ns: u64,
    read: Vec<i32>,
    /// When the last resync was.
    resync_ns: u64,
    /// Resyncs since the last look for scx_vnuma.
    unlooked: u32,
    /// Longest time between two descriptions of a VM whose memory is not bound.
    pub describe_ns: u64,
}

impl Default for Looked {
    fn default() -> Self {
        let describe_ns = Intervals::default().describe.as_nanos() as u64;
        Self { resyncs: 0, read_ns: 0, read: Vec::new(), resync_ns: 0, unlooked: u32::MAX, describe_ns }
    }
}

impl Looked {
    /// Counts a resync. True at every `each`-th one, which is when scx_vnuma is looked for.
    pub(super) fn is_scheduler_due(&mut self, each: u32) -> bool {
        self.unlooked = self.unlooked.saturating_add(1);
        let due = self.unlooked >= each;
        if due {
            self.unlooked = 0;
        }
        due
    }
}

/// Where a period has seen a vCPU. The time is that of the period's begin, so that events since then count as newer.
fn location(host: &HostTopology, seen: &VcpuReading, began_ns: u64) -> Option<VcpuLocation> {
    let (cpu, allowed) = (seen.cpu?, seen.allowed.as_ref()?);
    let (node, pinned) = (host.node_of_cpu(cpu)?, host.node_of_cpus(allowed));
    Some(VcpuLocation { cpu, node, pinned, time_ns: began_ns })
}

impl Core {
    /// Orders a look at all threads.
    pub(super) fn look_at_all(&mut self) {
        self.looked.resyncs = 0;
        self.look(|_| true);
    }

    /// Orders a look at the threads that no period has read since the last resync.
    pub(super) fn look_at_unread(&mut self) {
        let resync_ns = std::mem::replace(&mut self.looked.resync_ns, self.now_ns);
        self.looked.resyncs += 1;
        if self.looked.read_ns < resync_ns || self.looked.resyncs >= LOOK_AT_ALL {
            return self.look_at_all();
        }
        let read = std::mem::take(&mut self.looked.read);
        self.look(|tid| read.binary_search(&tid).is_err());
        self.looked.read = read;
    }

    fn look(&mut self, wanted: impl Fn(i32) -> bool) {
        let mut threads = Vec::new();
        for (&tid, &(vm, _)) in self.registry.threads.iter().filter(|(tid, _)| wanted(**tid)) {
            if let Some(vm) = self.vm(vm) {
                threads.push((vm.description.pid, tid));
            }
        }
        if !threads.is_empty() {
            self.commands.push(Command::Look(threads));
        }
    }

    /// Takes the locations that a period has read.
    pub(super) fn read_locations(&mut self, reading: &HostReading) {
        let mut read = std::mem::take(&mut self.looked.read);
        read.clear();
        for vm in &reading.vms {
            for seen in &vm.vcpus {
                let location = location(&self.world.host, seen, reading.began_ns);
                let its = (vm.vm, seen.vcpu);
                if location.is_some() && self.registry.threads.get(&seen.tid) == Some(&its) {
                    self.locate(vm.vm, seen.vcpu, location);
                    read.push(seen.tid);
                }
            }
        }
        read.sort_unstable();
        (self.looked.read_ns, self.looked.read) = (reading.began_ns, read);
    }

    /// A thread was seen somewhere, or could not be looked at.
    pub(super) fn located(&mut self, tid: i32, location: Option<VcpuLocation>) {
        if let Some(&(id, vcpu)) = self.registry.threads.get(&tid) {
            self.locate(id, vcpu, location);
        }
    }

    pub(super) fn locate(&mut self, id: VmId, vcpu: ApicId, location: Option<VcpuLocation>) {
        if let Some((from, to)) = self.world.locate(id, vcpu, location) {
            let time_ns = location.map_or(0, |location| location.time_ns);
            let vm = self.vm(id).map(|vm| vm.name().to_owned()).unwrap_or_default();
            self.state(id).counts.node_changes += 1;
            self.announce(api::Event::Changed { vm, vcpu, from, to, time_ns });
        }
    }

    /// The vCPU was unplugged, or the VM is about to end; its hypervisor knows.
    pub(super) fn thread_ended(&mut self, tid: i32) {
        // The kernel may reuse its number for a thread of another VM.
        let Some((id, vcpu)) = self.registry.threads.remove(&tid) else { return };
        self.commands.push(Command::Unwatch(tid));
        self.locate(id, vcpu, None);
        self.recount(id);
        self.describe(id);
    }

    /// A move of a vCPU has succeeded or failed.
    pub(super) fn moved(&mut self, task: TaskId, outcome: Result<Option<VcpuLocation>, ActError>) {
        let id = task.vm;
        let Some((host, vm)) = self.world.vm_mut(id) else { return };
        // Otherwise the VM is gone, and its requests have been answered.
        let Some(ended) = vm.moves.iter_mut().find_map(|known| known.end(task)) else { return };
        vm.moves.retain(|known| known.what().is_some());
        let (name, Move { vcpu, node, .. }) = (vm.name().to_owned(), ended);
        let location = match outcome {
            Ok(location) => location,
            Err(source) => {
                let refusal = Refusal::Move { vm: name, vcpu, node, source };
                self.vcpu_rehomed(id, vcpu, Err(refusal.to_string()));
                return self.refuse_first(id, Until::Moved(ended.request), refusal);
            }
        };
        vm.assign(host, vcpu, node, ended.mover);
        let why = if ended.request.is_some() { BY_OPERATOR } else { FOR_REHOME };
        self.state(id).counts.moved(why);
        self.moved_by_operator(id, vcpu);
        self.locate(id, vcpu, location);
        self.vcpu_rehomed(id, vcpu, Ok(()));
        self.reached(id, Until::Moved(ended.request));
    }
}
