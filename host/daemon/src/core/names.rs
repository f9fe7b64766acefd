//! What VMs are called. A name is given once: to the VM that reported it first. Whatever else wants it is called by its handle,
//! which is no VM's name, so that the two cannot be confused.

use super::{Core, refusal::Refusal, render};
use std::collections::{HashMap, HashSet};
use vnuma_api as api;
use vnuma_policy::world::{ConnectionId, DescriptionSource, ManagedVm, Vm, VmId};

impl Core {
    /// Names of all VMs that an operator can see, each once.
    pub fn names(&self) -> Vec<String> {
        let known = self.world.iter().filter_map(|(_, managed)| Some(managed.vm.as_ref()?.name()));
        let unknown = self.unknown().into_iter().map(|(_, _, name)| name);
        let mut names: Vec<_> = known.chain(unknown).map(str::to_owned).collect();
        names.sort_unstable();
        names
    }

    /// A VM as an operator sees it.
    pub fn show(&self, name: &str) -> Result<api::Vm, Refusal> {
        let (id, managed) = self.find(name)?;
        let shown = render::managed(managed, self.memories.suppressed(id))
            .ok_or_else(|| Refusal::NoVm(name.to_owned()))?;
        Ok(api::Vm { name: name.to_owned(), ..shown })
    }

    /// The same of one that is known.
    pub(super) fn vm_of(&self, id: VmId) -> Result<api::Vm, Refusal> {
        let suppressed = self.memories.suppressed(id);
        let shown = self.world.get(id).and_then(|managed| render::managed(managed, suppressed));
        shown.ok_or_else(|| Refusal::Ended { vm: "the VM".to_owned() })
    }

    /// The VM of this name, or a handle of this name that has a problem.
    pub(super) fn find(&self, name: &str) -> Result<(VmId, &ManagedVm), Refusal> {
        if let Some(id) = self.registry.names.get(name)
            && let Some(managed) = self.world.get(*id)
        {
            return Ok((*id, managed));
        }
        let shown = self.unknown().into_iter().find(|(_, _, called)| *called == name);
        let shown = shown.map(|(id, managed, _)| (id, managed));
        // Nothing is known of it yet.
        let connecting = || {
            let is_it = |managed: &ManagedVm| managed.vm.is_none() && !render::is_shown(managed);
            self.world
                .iter()
                .find(|(id, m)| is_it(m) && m.fallback_name == name && !self.registry.twins.contains_key(id))
        };
        shown.or_else(connecting).ok_or_else(|| Refusal::NoVm(name.to_owned()))
    }

    /// A VM that can be asked something, and its connection.
    pub(super) fn connected(&self, name: &str) -> Result<(VmId, &Vm, ConnectionId), Refusal> {
        let (id, managed) = self.find(name)?;
        match (&managed.vm, managed.responsive()) {
            (Some(vm), Some(connection)) => Ok((id, vm, connection)),
            _ => Err(not_connected(name, managed)),
        }
    }

    /// Handles with a problem whose VMs are not known, and what these are called.
    fn unknown(&self) -> Vec<(VmId, &ManagedVm, &str)> {
        let mut processes = HashMap::<i32, Vec<&ManagedVm>>::new();
        for (_, managed) in self.world.iter() {
            let vm = managed.vm.as_ref().filter(|vm| vm.source == DescriptionSource::Hypervisor);
            if let Some(vm) = vm {
                processes.entry(vm.description.pid).or_default().push(managed);
            }
        }
        let is_twin = |id: VmId, managed: &ManagedVm| {
            let (name, process) = (&managed.fallback_name, managed.process.map(|process| process.pid));
            let known = process.and_then(|pid| processes.get(&pid)).into_iter().flatten();
            let is_known = |pid| processes.contains_key(pid);
            self.registry.twins.get(&id).is_some_and(is_known)
                || known.copied().any(|it| is_one(managed, name, it))
        };
        let mut taken = HashSet::new();
        let unknown = self.world.iter().filter(|(id, managed)| {
            managed.vm.is_none() && render::is_shown(managed) && !is_twin(*id, managed)
        });
        let called = unknown.map(|(id, managed)| {
            let name = managed.fallback_name.as_str();
            let free = !self.registry.names.contains_key(name) && taken.insert(name);
            (id, managed, if free { name } else { managed.handle.as_str() })
        });
        called.collect()
    }
}

/// Of two handles that lead to one process: are they one VM? So it is where they are of two backends, or where it has one name: a
/// QEMU has one, and so has a domain over every connection.
pub(super) fn is_one(managed: &ManagedVm, name: &str, known: &ManagedVm) -> bool {
    known.name() == name || known.handle.backend() != managed.handle.backend()
}

/// Why a VM cannot be asked.
pub(super) fn not_connected(name: &str, managed: &ManagedVm) -> Refusal {
    let problem = render::problem(managed).unwrap_or_else(|| "connecting".to_owned());
    Refusal::NotConnected { vm: name.to_owned(), problem }
}
