//! Guest nodes that grow and shrink, because an operator wants it or by what is free on their homes.

use super::{Core, event::Level, refusal::Refusal, render, requests::Taken};
use vnuma_api as api;
use vnuma_policy::{
    sizing::{Resize, ResizePhase},
    world::{ManagedVm, ResizeWish, TaskId, Vm, VmId},
};

impl Core {
    /// An operator wants another size for a guest node. The VM is described and its memory looked at first.
    pub(super) fn check_resize(&self, name: &str, wish: &ResizeWish) -> Result<VmId, Refusal> {
        let id = self.with_guest_nodes(name)?;
        let present = self.vm(id).map(|vm| vm.placement.guest_nodes().to_vec()).unwrap_or_default();
        if !present.contains(&wish.guest_node) {
            return Err(Refusal::NoGuestNode { vm: name.to_owned(), node: wish.guest_node, present });
        }
        self.connected(name)?;
        Ok(id)
    }

    /// Begins a change of size. A dry run only returns what would be done.
    pub(super) fn begin_resize(&mut self, id: VmId, wish: &ResizeWish) -> Result<Option<Resize>, Refusal> {
        let Some(vm) = self.vm(id) else { return Err(Refusal::Ended { vm: "the VM".to_owned() }) };
        let (name, guest_node, now_ns) = (vm.name().to_owned(), wish.guest_node, self.now_ns);
        let refused = |source| Refusal::Resize { vm: name.clone(), guest_node, source };
        let (mode, resize) = self.world.plan_resize(vm, wish, now_ns).map_err(refused)?;
        if wish.dry_run {
            return Ok(resize);
        }
        if let Some(resize) = &resize {
            self.log_resize(id, resize);
        }
        self.world.begin_resize(id, guest_node, mode, resize, now_ns);
        Ok(None)
    }

    pub(super) fn stop_resize(&mut self, name: &str) -> Taken {
        let id = self.with_guest_nodes(name)?;
        if !self.world.stop_resizes(id) {
            return Err(Refusal::NoResize { vm: name.to_owned() });
        }
        self.log(None, Level::Info, format!("{name}: its guest nodes keep the sizes that they have by now"));
        Ok((id, None))
    }

    /// Stores the next state of a change of size, and logs it.
    pub(super) fn take_resize_on(&mut self, id: VmId, resize: &Resize) {
        self.world.resize_changed(id, resize.clone(), self.now_ns);
        self.log_resize(id, resize);
    }

    /// The hypervisor has answered a request for a size.
    pub(super) fn resize_answered(&mut self, task: TaskId, outcome: Result<(), String>) {
        if let Some(failed) = self.world.resize_answered(task, outcome, self.now_ns) {
            self.log_resize(task.vm, &failed);
        }
        self.describe_for(task.vm, None);
    }

    /// Describes VMs whose sizes change: the hypervisor's event for that may have been lost.
    pub(super) fn describe_resized(&mut self) {
        let resized = |managed: &ManagedVm| managed.vm.as_ref().is_some_and(Vm::is_resized);
        let all: Vec<_> = self.world.iter().filter(|(_, m)| resized(m)).map(|(id, _)| id).collect();
        all.into_iter().for_each(|id| self.describe(id));
    }

    fn log_resize(&mut self, id: VmId, resize: &Resize) {
        self.state(id).counts.resize(&resize.phase());
        let Some(vm) = self.vm(id) else { return };
        let (name, node, mib) = (vm.name(), resize.guest_node, |bytes: u64| bytes >> 20);
        let what = match resize.phase() {
            ResizePhase::Wanted => {
                format!(
                    "{} MiB are to be plugged, were {}: {}",
                    mib(resize.bytes),
                    mib(resize.before),
                    resize.by
                )
            }
            ResizePhase::Asked | ResizePhase::Waiting | ResizePhase::Stopping | ResizePhase::Stopped => {
                return;
            }
            ResizePhase::Done => format!("{} MiB are plugged", mib(resize.bytes)),
            phase => {
                let problem = resize.problem.clone().unwrap_or_default();
                format!("{} MiB were to be plugged: {}; {problem}", mib(resize.bytes), phase.name())
            }
        };
        let bad = matches!(resize.phase(), ResizePhase::Failed | ResizePhase::Partly);
        let line = format!("{name}: guest node {node}: {what}");
        self.log(None, if bad { Level::Warn } else { Level::Info }, line);
    }

    /// How large guest nodes of a VM are, and the last changes or one that is planned.
    pub(super) fn sizes_of(&self, id: VmId, planned: Option<&Resize>) -> Result<api::Sizes, Refusal> {
        let vm = self.vm(id).ok_or_else(|| Refusal::Ended { vm: "the VM".to_owned() })?;
        Ok(render::sizes(vm, &self.policies.sizes, planned))
    }
}
