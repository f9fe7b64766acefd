//! What clients ask for.

use super::{Daemon, Entry};
use crate::{
    act::{MovePlan, cpus_of_node},
    error::Refusal,
    message::{ConnectionId, Reply, Request},
    report,
    vm::{Known, Replugging, Slot, Vm},
    vm_thread::{Command, VmThread},
};
use vnuma_api as api;
use vnuma_channel::Channel;
use vnuma_hypervisor::VmHandle;

impl Daemon {
    /// Answers a request, now or when it is done. Nobody waiting for the answer is no error.
    pub(super) fn request(&mut self, request: Request) {
        match request {
            Request::List { reply } => drop(reply.send(Ok(self.list()))),
            Request::Show { vm, reply } => drop(reply.send(self.show(&vm))),
            Request::Daemon { reply } => drop(reply.send(Ok(self.describe_self()))),
            Request::Attach { vm, reply } => self.attach(&vm, reply),
            Request::Detach { vm, reply } => self.detach(&vm, reply),
            Request::Replug { vm, vcpu, reply } => self.replug(&vm, vcpu, reply),
            Request::PlanMove { vm, vcpu, node, reply } => drop(reply.send(self.plan_move(&vm, vcpu, node))),
            Request::Look { id, vcpu, reply } => self.look_and_show(id, vcpu, reply),
            Request::Watch { reply } => drop(reply.send(Ok(self.watchers.add()))),
        }
    }

    fn list(&self) -> Vec<api::Vm> {
        let mut vms: Vec<_> = self.entries.values().filter_map(Entry::report).collect();
        vms.sort_by(|a, b| a.name.cmp(&b.name));
        vms
    }

    fn show(&self, name: &str) -> Result<api::Vm, Refusal> {
        self.entry(name)?.1.report().ok_or_else(|| Refusal::NoVm(name.to_owned()))
    }

    fn describe_self(&self) -> api::Daemon {
        api::Daemon {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id().cast_signed(),
            location_source: self.locations.source().to_owned(),
            why_not_bpf: self.locations.why_not_bpf(),
            affinity_events: self.locations.sees_affinity(),
            location_events_lost: self.locations.lost(),
            replug_after_s: self.config.replug_after.map(|after| after.as_secs()),
            watchers: self.watchers.count(),
            watchers_dropped: self.watchers.dropped(),
        }
    }

    /// The VM of this name, or the socket of this name that has a problem.
    fn entry(&self, name: &str) -> Result<(&VmHandle, &Entry), Refusal> {
        let has_vm = |entry: &Entry| entry.vm.as_ref().is_some_and(|vm| vm.name() == name);
        let has_problem = |entry: &Entry| entry.vm.is_none() && entry.candidate.name == name;
        let find = |which: &dyn Fn(&Entry) -> bool| self.entries.iter().find(|(_, entry)| which(entry));
        find(&has_vm).or_else(|| find(&has_problem)).ok_or_else(|| Refusal::NoVm(name.to_owned()))
    }

    /// A VM and the thread that talks to it.
    fn connected(&mut self, name: &str) -> Result<(&mut Vm, &VmThread), Refusal> {
        let socket = self.entry(name)?.0.clone();
        let entry = self.entries.get_mut(&socket).ok_or_else(|| Refusal::NoVm(name.to_owned()))?;
        entry.look_at_process();
        let why_not = entry.why_not().unwrap_or_else(|| "connecting".to_owned());
        match (&mut entry.vm, &entry.connection) {
            (Some(vm), Some((_, thread))) if !entry.silent && entry.halt.is_none() => Ok((vm, thread)),
            _ => Err(Refusal::NotConnected { vm: name.to_owned(), problem: why_not }),
        }
    }

    fn attach(&mut self, name: &str, reply: Reply<api::Vm>) {
        let (epoch, records) = (self.epochs.take(), self.records.clone());
        let prepared = self.connected(name).and_then(|(vm, thread)| {
            let name = || vm.name().to_owned();
            match vm.slot {
                _ if vm.replugging.is_some() => return Err(Refusal::Replugging { vm: name() }),
                Slot::Serving(_) => return Err(Refusal::Attached { vm: name() }),
                Slot::Attaching { .. } => return Err(Refusal::Attaching { vm: name() }),
                Slot::TakingOver => return Err(Refusal::TakingOver { vm: name() }),
                Slot::Lost => return Err(Refusal::Lost { vm: name() }),
                Slot::None => vm.check_tellable()?,
            }
            let (channel, socket) =
                Channel::new(epoch).map_err(|source| Refusal::Channel { vm: name(), source })?;
            let identity = channel.identity().map_err(|source| Refusal::Channel { vm: name(), source })?;
            Ok((vm, thread, channel, identity, socket))
        });
        match prepared {
            Err(refusal) => drop(reply.send(Err(refusal))),
            Ok((vm, thread, channel, identity, socket)) => {
                let pid = vm.description.pid;
                // Before the hypervisor has anything of it, so that there is no moment without.
                if let Err(source) = records.write(pid, identity) {
                    return drop(reply.send(Err(Refusal::Record { vm: vm.name().to_owned(), source })));
                }
                if thread.send(Command::Attach(socket)) {
                    vm.slot = Slot::Attaching { channel, reply };
                } else {
                    let _ = reply.send(Err(Refusal::Ended { vm: vm.name().to_owned() }));
                }
            }
        }
    }

    fn detach(&mut self, name: &str, reply: Reply<api::Vm>) {
        let prepared = self.connected(name).and_then(|(vm, thread)| {
            let name = || vm.name().to_owned();
            match vm.slot {
                Slot::None => Err(Refusal::NotAttached { vm: name() }),
                Slot::Attaching { .. } => Err(Refusal::Attaching { vm: name() }),
                Slot::TakingOver => Err(Refusal::TakingOver { vm: name() }),
                _ if vm.detaching.is_some() => Err(Refusal::Detaching { vm: name() }),
                _ => Ok((vm, thread)),
            }
        });
        match prepared {
            Err(refusal) => drop(reply.send(Err(refusal))),
            Ok((vm, thread)) if thread.send(Command::Detach) => vm.detaching = Some(reply),
            Ok((vm, _)) => drop(reply.send(Err(Refusal::Ended { vm: vm.name().to_owned() }))),
        }
    }

    fn replug(&mut self, name: &str, vcpu: u32, reply: Reply<api::Replugged>) {
        let prepared = self.connected(name).and_then(|(vm, thread)| Ok((vm.plan_replug(vcpu)?, vm, thread)));
        match prepared {
            Err(refusal) => drop(reply.send(Err(refusal))),
            Ok((node, vm, thread)) if thread.send(Command::Replug { vcpu, node }) => {
                vm.replugging = Some(Replugging { vcpu, guest_node: node, reply: Some(reply) });
            }
            Ok((_, vm, _)) => drop(reply.send(Err(Refusal::Ended { vm: vm.name().to_owned() }))),
        }
    }

    /// What a move needs. It takes no connection: a VM whose hypervisor does not answer can be moved.
    fn plan_move(&self, name: &str, vcpu: u32, node: u32) -> Result<MovePlan, Refusal> {
        let (_, entry) = self.entry(name)?;
        let Some(vm) = &entry.vm else {
            let problem = entry.why_not().unwrap_or_else(|| "connecting".to_owned());
            return Err(Refusal::NotConnected { vm: name.to_owned(), problem });
        };
        if vm.known == Known::ByName {
            return Err(Refusal::Unnumbered { vm: name.to_owned() });
        }
        let vcpus = &vm.description.vcpus;
        let Some(found) = vcpus.iter().find(|found| found.apic_id == vcpu) else {
            let present = vcpus.iter().map(|vcpu| vcpu.apic_id).collect();
            return Err(Refusal::NoVcpu { vm: name.to_owned(), vcpu, present });
        };
        let cpus = cpus_of_node(&self.host, node)?;
        let pidfd = vm.pidfd.try_clone();
        Ok(MovePlan {
            id: vm.id,
            vm: name.to_owned(),
            pidfd: pidfd.map_err(|source| Refusal::System { vm: name.to_owned(), source })?,
            pid: vm.description.pid,
            tid: found.tid,
            vcpu,
            node,
            cpus,
        })
    }

    fn look_and_show(&mut self, id: ConnectionId, vcpu: u32, reply: Reply<api::Vm>) {
        let found = self.entries.iter().find_map(|(socket, entry)| {
            let vm = entry.vm.as_ref().filter(|vm| vm.id == id)?;
            let tid = vm.description.vcpus.iter().find(|found| found.apic_id == vcpu)?.tid;
            Some((socket.clone(), tid))
        });
        let Some((socket, tid)) = found else {
            return drop(reply.send(Err(Refusal::Ended { vm: format!("vCPU {vcpu}") })));
        };
        self.look(&socket, vcpu, tid);
        self.tell_due();
        if let Some(vm) = self.entries.get(&socket).and_then(Entry::report) {
            let _ = reply.send(Ok(vm));
        }
    }
}

impl Entry {
    /// What an operator sees of it: nothing, before anybody has answered at this socket.
    pub(super) fn report(&self) -> Option<api::Vm> {
        match (&self.vm, self.why_not()) {
            (Some(vm), problem) => Some(report::vm(vm, self.hypervisor(), problem.as_deref())),
            (None, Some(problem)) => {
                Some(report::unreachable(&self.candidate.name, self.hypervisor(), &problem))
            }
            (None, None) => None,
        }
    }
}
