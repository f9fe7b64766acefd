//! Where vCPUs are, and moves of them.

use super::{
    Core, Reply,
    event::{Ask, Command},
    refusal::Refusal,
};
use vnuma_api as api;
use vnuma_placement::world::VmId;
use vnuma_process::ActError;
use vnuma_topology::{ApicId, HostNodeId, VcpuLocation};

impl Core {
    /// A thread was seen somewhere, or could not be looked at.
    pub(super) fn located(&mut self, tid: i32, location: Option<VcpuLocation>) {
        if let Some(&(id, vcpu)) = self.threads.get(&tid) {
            self.locate(id, vcpu, location);
        }
    }

    pub(super) fn locate(&mut self, id: VmId, vcpu: ApicId, location: Option<VcpuLocation>) {
        if let Some((from, to)) = self.world.locate(id, vcpu, location) {
            let time_ns = location.map_or(0, |location| location.time_ns);
            let vm = self.vm(id).map(|vm| vm.name().to_owned()).unwrap_or_default();
            self.announce(api::Event::Changed { vm, vcpu, from, to, time_ns });
        }
    }

    /// The vCPU was unplugged, or the VM is about to end; its hypervisor knows.
    pub(super) fn thread_ended(&mut self, tid: i32) {
        // The kernel may reuse its number for a thread of another VM.
        let Some((id, vcpu)) = self.threads.remove(&tid) else { return };
        self.commands.push(Command::Unwatch(tid));
        self.locate(id, vcpu, None);
        self.recount(id);
        self.ask_if_connected(id, Ask::Describe);
    }

    /// A move has ended, one way or the other.
    pub(super) fn moved(
        &mut self,
        id: VmId,
        vcpu: ApicId,
        node: HostNodeId,
        outcome: Result<Option<VcpuLocation>, ActError>,
    ) {
        let Some((host, vm)) = self.world.vm_mut(id) else { return };
        // The VM is gone, and its requests have been answered.
        let is_it = |known: &vnuma_placement::world::Move| {
            known.in_flight && (known.vcpu, known.node) == (vcpu, node)
        };
        let Some(position) = vm.moves.iter().position(is_it) else { return };
        let ended = vm.moves.remove(position);
        let name = vm.name().to_owned();
        let location = match outcome {
            Ok(location) => location,
            Err(source) => {
                let refusal = Refusal::Move { vm: name, vcpu, node, source };
                return self.answer(ended.request, Reply::Refused(refusal));
            }
        };
        vm.assign(host, vcpu, node, ended.mover);
        self.moved_by_operator(id, vcpu);
        self.locate(id, vcpu, location);
        self.answer(ended.request, Reply::Vm(id));
    }
}
