//! What is checked of threads and processes: what is watched, and where vCPUs are put.

use super::Checker;
use vnuma_daemon::core::event::{Command, Made, MaskOrder};
use vnuma_model::{ApicId, CpuSet, HostNodeId};
use vnuma_policy::world::{TaskId, VmId};
use vnuma_process::ActError;

impl Checker {
    /// The core wants a thread or a process to be watched or put elsewhere, or no longer.
    pub(super) fn thread_command(&mut self, command: &Command) {
        match command {
            Command::Watch(pid, tid) => {
                let fresh = self.threads.insert(*tid, *pid).is_none();
                self.expect(fresh, "leak", || format!("thread {tid} is watched twice"));
            }
            Command::Defer(tids, waits) => {
                for tid in tids {
                    let known = self.threads.contains_key(tid);
                    self.expect(known, "leak", || format!("thread {tid} is deferred, and not watched"));
                    if *waits {
                        self.deferred.insert(*tid)
                    } else {
                        self.deferred.remove(tid)
                    };
                }
            }
            Command::Unwatch(tid) => {
                self.deferred.remove(tid);
                let known = self.threads.remove(tid).is_some();
                self.expect(known, "leak", || format!("thread {tid} was not watched"));
            }
            Command::WatchProcess(vm, pid) => {
                self.processes.insert(*vm, *pid);
                if self.vms.get(vm).is_some_and(|view| view.pid != *pid) {
                    self.forget(*vm);
                }
            }
            Command::UnwatchProcess(vm, _) => {
                let known = self.processes.remove(vm).is_some();
                self.expect(known, "leak", || format!("no process of VM {vm} was watched"));
                if self.arrived != Some(*vm) {
                    self.forget(*vm);
                }
            }
            Command::Move { task, pid, vcpu, tid, node, cpus } => {
                self.moving(*task, (*pid, *tid), *vcpu, *node, cpus);
            }
            Command::Confine(task, pid, masks) => {
                masks.iter().for_each(|order| self.confining_one(*task, *pid, order));
            }
            Command::ForgetMask(_, tid) => {
                if let Some(&(vm, vcpu)) = self.owners.get(tid) {
                    self.assign(vm, vcpu, None);
                }
            }
            Command::Follow(task, pid, vcpus, cpus) => {
                self.following(task.vm, *pid, vcpus, cpus.as_ref());
            }
            // The VM is taken for a new one: what was begun before is of no account.
            Command::RestoreMasks(task, _) => self.confining.retain(|(known, ..), _| *known != task.vm),
            _ => {}
        }
    }

    /// Masks have been set, or not.
    pub(super) fn confined(&mut self, task: TaskId, outcomes: &[(ApicId, Result<Made, ActError>)]) {
        let vm = task.vm;
        for (vcpu, outcome) in outcomes {
            let is_it = |(its, (known, _)): &(&(VmId, i32, ApicId), &_)| its.2 == *vcpu && *known == task;
            let its = self.confining.iter().find(is_it).map(|(its, _)| *its);
            let Some((_, node)) = its.and_then(|its| self.confining.remove(&its)) else { continue };
            match outcome {
                Ok(at) => {
                    let now_ns = self.now_ns;
                    self.assign(vm, *vcpu, node);
                    self.place(vm, *vcpu, at.location);
                    self.judge(vm, *vcpu, now_ns);
                }
                Err(ActError::MaskChanged { .. }) => self.assign(vm, *vcpu, None),
                Err(_) => {}
            }
        }
    }

    /// A policy has put a vCPU on a node, or has nothing to say of it any more.
    pub(super) fn assign(&mut self, vm: VmId, vcpu: ApicId, node: Option<HostNodeId>) {
        let now_ns = self.now_ns;
        let Some(view) = self.vcpu_mut(vm, vcpu) else { return };
        match node {
            Some(node) => (view.assigned, view.by_policy) = (Some(node), true),
            None if view.by_policy => (view.assigned, view.by_policy) = (None, false),
            None => return,
        }
        self.judge(vm, vcpu, now_ns);
    }

    fn moving(
        &mut self,
        task: TaskId,
        (pid, tid): (i32, i32),
        vcpu: ApicId,
        node: HostNodeId,
        cpus: &CpuSet,
    ) {
        let vm = task.vm;
        let described = self.vms.get(&vm).is_none_or(|view| {
            view.pid == pid && view.vcpus.get(&vcpu).is_some_and(|known| known.tid == tid)
        });
        self.expect(described, "move", || format!("VM {vm}: thread {tid} of {pid} is not vCPU {vcpu}"));
        let right = self.host.nodes.iter().any(|known| known.id == node && known.cpus == *cpus);
        self.expect(right, "move", || format!("VM {vm}: {cpus} are not the CPUs of node {node}"));
        let fresh = self.moving.insert((vm, pid, vcpu), (task, node)).is_none();
        self.expect(fresh, "move", || format!("VM {vm}: vCPU {vcpu} is moved twice at a time"));
        self.apart(vm, pid, vcpu);
    }

    /// Which of both was last would not be known.
    fn apart(&mut self, vm: VmId, pid: i32, vcpu: ApicId) {
        let its = (vm, pid, vcpu);
        let apart = !self.moving.contains_key(&its) || !self.confining.contains_key(&its);
        self.expect(apart, "move", || format!("VM {vm}: vCPU {vcpu} is moved while its mask is set"));
    }

    fn confining_one(&mut self, task: TaskId, pid: i32, order: &MaskOrder) {
        let vm = task.vm;
        let MaskOrder { vcpu, tid, cpus, operator, .. } = order;
        let described = self.vms.get(&vm).is_none_or(|view| {
            view.pid == pid && view.vcpus.get(vcpu).is_some_and(|known| known.tid == *tid)
        });
        self.expect(described, "mask", || format!("VM {vm}: thread {tid} of {pid} is not vCPU {vcpu}"));
        let within = cpus.as_ref().is_none_or(|cpus| !cpus.is_empty() && cpus.is_subset(operator));
        self.expect(within, "mask", || format!("VM {vm}: vCPU {vcpu}: {cpus:?} are not within {operator}"));
        let node = cpus.as_ref().and_then(|cpus| self.host.node_of_cpus(cpus));
        let fresh = self.confining.insert((vm, pid, *vcpu), (task, node)).is_none();
        self.expect(fresh, "mask", || format!("VM {vm}: two masks of vCPU {vcpu} are set at a time"));
        self.apart(vm, pid, *vcpu);
    }

    fn following(&mut self, vm: VmId, pid: i32, vcpus: &[i32], cpus: Option<&CpuSet>) {
        let described = self.vms.get(&vm).is_none_or(|view| {
            let known = view.vcpus.values().map(|vcpu| vcpu.tid);
            view.pid == pid && known.filter(|tid| !vcpus.contains(tid)).count() == 0
        });
        self.expect(described, "mask", || format!("VM {vm}: vCPUs of {pid} are taken for other threads"));
        let some = cpus.is_none_or(|cpus| !cpus.is_empty());
        self.expect(some, "mask", || format!("VM {vm}: other threads are kept to no CPU"));
    }

    /// The mover has made or refused a move.
    pub fn move_ended(&mut self, task: TaskId) {
        let ended = self.moving.iter().find(|(_, (known, _))| *known == task);
        self.move_ended = ended.map(|((vm, _, vcpu), (_, node))| (*vm, *vcpu, *node));
        self.moving.retain(|_, (known, _)| *known != task);
    }
}
