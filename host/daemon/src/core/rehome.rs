//! Guest nodes that get another home, because an operator or the policy for that wants it.

use super::{
    Core,
    event::Level,
    refusal::Refusal,
    render,
    requests::Taken,
    waiting::{Then, Until},
};
use vnuma_api as api;
use vnuma_model::Party;
use vnuma_policy::{
    rehome::{Rehome, RehomePhase},
    world::{RehomeWish, Vm, VmId},
};

/// A description younger than this is shown again: any client may ask, and each description costs the hypervisor time.
const SHOWN_NS: u64 = 1_000_000_000;

impl Core {
    /// A client asks how far a re-home is, at whose expense.
    pub(super) fn want_rehome_shown(&mut self, name: &str, payer: Option<Party>) -> Taken {
        let id = self.with_guest_nodes(name)?;
        let now_ns = self.now_ns;
        let old = |vm: &Vm| !vm.is_rehomed() && now_ns.saturating_sub(vm.described_ns) >= SHOWN_NS;
        let answers = self.world.get(id).is_some_and(|managed| managed.responsive().is_some());
        let described = answers && self.vm(id).is_some_and(old);
        match payer {
            // Whether it can pay is not known here. If it cannot, the VM has not been described.
            Some(_) if described => self.describe_for(id, payer),
            None if described => self.describe_once(id, None),
            _ => {}
        }
        Ok((id, described.then_some(Until::Described)))
    }

    /// VMs with bound memory are rarely described again, but a re-home needs to know where the memory is now.
    pub(super) fn describe_first(&mut self, id: VmId, then: Then) {
        // An operator does not wait for what a guest has spent.
        let payer = then.is_a_policys().then_some(Party::Vm(id));
        self.wait(id, Until::Described, then);
        self.describe_once(id, payer);
    }

    /// An operator wants another home for a guest node. The VM is described and its memory looked at first.
    pub(super) fn check_rehome(&self, name: &str, wish: &RehomeWish) -> Result<VmId, Refusal> {
        let id = self.with_guest_nodes(name)?;
        let present = self.vm(id).map(|vm| vm.placement.guest_nodes().to_vec()).unwrap_or_default();
        if !present.contains(&wish.guest_node) {
            return Err(Refusal::NoGuestNode { vm: name.to_owned(), node: wish.guest_node, present });
        }
        if self.world.host.node(wish.node).is_none() {
            let present = self.world.host.nodes.iter().map(|node| node.id).collect();
            return Err(Refusal::NoNode { node: wish.node, present });
        }
        self.connected(name)?;
        Ok(id)
    }

    pub(super) fn stop_rehome(&mut self, name: &str) -> Taken {
        let id = self.with_guest_nodes(name)?;
        if !self.world.stop_rehome(id) {
            return Err(Refusal::NoRehome { vm: name.to_owned() });
        }
        self.state(id).counts.rehome(&RehomePhase::Stopped);
        self.world.stop_memory(id, |_| true);
        self.log(None, Level::Info, format!("{name}: the re-home was stopped; what was moved stays"));
        Ok((id, None))
    }

    /// Begins a re-home. A dry run only returns what would be done.
    pub(super) fn begin_rehome(&mut self, id: VmId, wish: RehomeWish) -> Result<Option<Rehome>, Refusal> {
        let Some(vm) = self.vm(id) else { return Err(Refusal::Ended { vm: "the VM".to_owned() }) };
        let name = vm.name().to_owned();
        if !vm.memory_areas().iter().any(|area| area.guest_node == wish.guest_node) {
            let problem = "where its hypervisor has the memory of this guest node is not known".to_owned();
            return Err(Refusal::Memory { vm: name, problem });
        }
        let refused = |source| Refusal::Rehome {
            vm: name.clone(),
            guest_node: wish.guest_node,
            node: wish.node,
            source,
        };
        let rehome = self.world.plan_rehome(vm, &wish).map_err(refused)?;
        if wish.dry_run {
            return Ok(Some(rehome));
        }
        // Moves of policies end first.
        if self.world.stop_rehome(id) {
            self.state(id).counts.rehome(&RehomePhase::Stopped);
        }
        self.world.stop_memory(id, |_| true);
        self.world.begin_rehome(id, rehome, self.now_ns);
        let RehomeWish { guest_node, node, why, .. } = wish;
        let because = why.map(|why| format!(", as {}", render::why_rehomed(&why))).unwrap_or_default();
        self.log(
            None,
            Level::Info,
            format!("{name}: guest node {guest_node} gets its home on node {node}{because}"),
        );
        Ok(None)
    }

    /// Stores the next state of a re-home, and logs it if its phase is another one.
    pub(super) fn take_rehome_on(&mut self, id: VmId, rehome: Rehome) {
        if rehome.unseen {
            self.describe_once(id, None);
        }
        if self.world.rehome_changed(id, rehome.clone()) {
            self.log_rehome(id, &rehome);
        }
    }

    fn log_rehome(&mut self, id: VmId, rehome: &Rehome) {
        self.state(id).counts.rehome(rehome.phase());
        let Some(vm) = self.vm(id) else { return };
        let (name, guest_node, to) = (vm.name(), rehome.guest_node, rehome.to);
        let problem = rehome.problem.as_ref().map(|problem| format!("; {problem}")).unwrap_or_default();
        let what = match rehome.phase() {
            RehomePhase::Topology => "its memory is there, its guest is told",
            RehomePhase::Vcpus => "its guest was told, its vCPUs are moved",
            RehomePhase::Done => "done",
            RehomePhase::Memory | RehomePhase::Stopped | RehomePhase::Failed => "not done",
        };
        let level = if *rehome.phase() == RehomePhase::Failed { Level::Warn } else { Level::Info };
        let line = format!("{name}: guest node {guest_node}, its new home on node {to}: {what}{problem}");
        self.log(id, level, line);
    }

    /// The guest nodes of a VM and the last re-home, or one that is planned.
    pub(super) fn rehome_of(&self, id: VmId, planned: Option<&Rehome>) -> Result<api::Rehome, Refusal> {
        let vm = self.vm(id).ok_or_else(|| Refusal::Ended { vm: "the VM".to_owned() })?;
        let stays = |node| self.memories.stays_behind(&self.world, (id, node), &self.policies, self.now_ns);
        Ok(render::rehome(vm, &self.world.host, planned, stays))
    }

    /// A vCPU was moved for a re-home, or could not be.
    pub(super) fn vcpu_rehomed(&mut self, id: VmId, vcpu: u32, outcome: Result<(), String>) {
        if let Some((_, vm)) = self.world.vm_mut(id)
            && let Some(rehome) = &mut vm.homing.rehome
        {
            rehome.vcpu_ended(vcpu, outcome);
        }
    }
}
