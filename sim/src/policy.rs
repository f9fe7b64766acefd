//! Policies: what is read once a period, and masks that are set and given back.

use crate::{
    action::{Action, MICRO, MILLI, SECOND},
    daemon::{ConfineOrder, Message},
    simulation::Simulation,
    world::Slot,
};
use std::sync::Arc;
use vnuma_daemon::core::event::{Event, Followed, MaskOrder, Request};
use vnuma_model::{ApicId, CpuSet, ThreadCounts};
use vnuma_policy::{
    scheduling::{CpuSample, Policy, entitlement::CpuGroup},
    world::{Accesses, Counted, HostReading, TaskId, VcpuReading, VmReading},
};
use vnuma_process::ActError;

/// Length of a period.
const PERIOD: u64 = 2 * SECOND;

impl Simulation {
    /// Which threads are counted has changed.
    pub(crate) fn count_threads(&mut self, vm: u64, pid: i32, vcpus: Vec<(ApicId, i32)>) {
        let idle = self.daemon.counted.is_empty();
        match vcpus.is_empty() {
            true => drop(self.daemon.counted.remove(&vm)),
            false => drop(self.daemon.counted.insert(vm, (pid, vcpus))),
        }
        if idle && !self.daemon.counted.is_empty() {
            self.daemon.sampled_ns = self.now_ns;
            self.ours(PERIOD, Action::Sample);
        }
    }

    /// A period has ended.
    pub(crate) fn sample(&mut self) {
        if self.daemon.counted.is_empty() {
            return;
        }
        self.ours(PERIOD, Action::Sample);
        self.count("periods");
        let began_ns = self.now_ns;
        let period_ns = began_ns - std::mem::replace(&mut self.daemon.sampled_ns, began_ns);
        let counted = self.daemon.counted.clone();
        let mut vms = Vec::with_capacity(counted.len());
        // VMs of an operator who gives half of them twice the weight, and a third of them a CPU and a half at most.
        let group = |&vm: &u64| CpuGroup {
            parent: None,
            weight: 100 << (vm % 2),
            limit_permille: vm.is_multiple_of(3).then_some(1500),
        };
        let groups = Arc::new(counted.keys().map(group).collect::<Vec<_>>());
        for (group, (vm, (pid, vcpus))) in counted.into_iter().enumerate() {
            let read = |sim: &mut Self, (vcpu, tid): (ApicId, i32)| {
                let reading = sim.read_thread(pid, vcpu, tid, period_ns)?;
                Some(VcpuReading { group: Some(group), ..reading })
            };
            let vcpus = vcpus.into_iter().filter_map(|vcpu| read(self, vcpu)).collect();
            vms.push(VmReading { vm, pid, pages: vec![((vm % 8) as u32, 1 << 20)], memory: None, vcpus });
        }
        let all: Vec<u32> = self.world.host.topology.nodes.iter().flat_map(|node| node.cpus.iter()).collect();
        let cpus = all.into_iter().map(|cpu| CpuSample { cpu, idle_ns: self.rng.within(0..period_ns + 1) });
        let cpus = cpus.collect();
        let reading = HostReading {
            began_ns,
            period_ns,
            source: "simulated",
            layout: Arc::default(),
            cpus,
            groups,
            memory: Vec::new(),
            vms,
        };
        // Reading takes time, now and then more than a period, and masks are set meanwhile.
        let most_ns = if self.chaotic && self.rng.chance(300) { 2 * PERIOD } else { 20 * MILLI };
        let due_ns = (self.now_ns + self.rng.within(0..most_ns)).max(self.daemon.reading_due_ns);
        self.daemon.reading_due_ns = due_ns;
        let reading = Message::Event(Event::Sampled(Box::new(reading)));
        self.ours(due_ns - began_ns, Action::Arrive(reading));
    }

    fn read_thread(&mut self, pid: i32, vcpu: ApicId, tid: i32, period_ns: u64) -> Option<VcpuReading> {
        let thread = self.world.threads.get(&tid).filter(|thread| thread.pid == pid)?;
        let (cpu, allowed) = (thread.at.cpu, Some(thread.mask.cpus.clone()));
        // Where its memory is changes now and then.
        let node = ((tid as u64 + self.now_ns / (30 * SECOND)) % 8) as u32;
        let misses = 1_000_000 * (tid as u64 % 4);
        let counted = match self.rng.index(50) {
            0 => Counted::Lost,
            1 => Counted::Crowded,
            2 => Counted::DidNotRun,
            3 => Counted::NoCounters,
            _ => Counted::Counted(ThreadCounts {
                instructions: 100_000_000,
                llc_references: 2 * misses,
                llc_misses: misses,
                accesses: Accesses::ByNode(vec![(node, misses)]),
                permille: 1000,
            }),
        };
        let waited_ns = self.rng.within(0..period_ns / 2 + 1);
        let ran_ns = period_ns - waited_ns;
        let cpu = Some(cpu);
        let (real_time, group) = (false, None);
        Some(VcpuReading { vcpu, tid, cpu, allowed, real_time, ran_ns, waited_ns, group, counted })
    }

    /// The mover has masks to set, or to give back: after what it has already.
    pub(crate) fn order_masks(&mut self, task: TaskId, pid: i32, masks: Option<Vec<MaskOrder>>, lost: bool) {
        let machine = self.daemon.machine_of(task.vm, pid);
        let takes_ns = self.rng.within(5 * MICRO..60 * MICRO);
        self.daemon.mover_ns = self.daemon.mover_ns.max(self.now_ns) + takes_ns;
        let after_ns = self.daemon.mover_ns - self.now_ns;
        self.ours(after_ns, Action::Confine(ConfineOrder { task, pid, machine, masks, lost }));
    }

    /// The mover keeps the threads of a process that run no vCPU to CPUs, or gives their masks back.
    pub(crate) fn order_others(&mut self, task: TaskId, pid: i32, cpus: Option<CpuSet>, lost: bool) {
        let machine = self.daemon.machine_of(task.vm, pid).map(|(_, serial)| serial);
        let refused = self.chaotic && self.rng.chance(10);
        let outcome = match machine {
            None => Err(format!("process {pid} has ended")),
            Some(_) if refused => Err("the kernel refuses a mask".to_owned()),
            Some(serial) => {
                let threads = usize::from(cpus.is_some());
                self.count(if cpus.is_some() {
                    "other threads that follow"
                } else {
                    "other threads given back"
                });
                match cpus {
                    _ if lost => {}
                    Some(cpus) => drop(self.world.others.insert(serial, cpus)),
                    None => drop(self.world.others.remove(&serial)),
                }
                Ok(Followed { threads, inherited: None })
            }
        };
        self.soon(MILLI, Event::Followed(task, outcome));
    }

    /// The mover sets masks, or gives them back.
    pub(crate) fn set_masks(&mut self, order: ConfineOrder) {
        let ConfineOrder { task, pid, machine, masks, lost } = order;
        let Some(masks) = masks else {
            let outcome = self.restore_masks(machine.map(|(_, serial)| serial));
            return self.soon(MILLI, Event::MasksRestored(task, outcome));
        };
        // All of them are recorded before the first is set.
        if let Some((_, serial)) = machine {
            let record = self.world.records.entry(serial).or_default();
            for order in &masks {
                if let Some(cpus) = &order.cpus {
                    let set = vec![order.expected.clone(), cpus.clone()];
                    record.insert(order.tid, (order.operator.clone(), set));
                }
            }
        }
        // Killed in the middle of it.
        let killed = (self.chaotic && self.rng.chance(3)).then(|| self.rng.index(masks.len()));
        let mut outcomes = Vec::new();
        for (at, order) in masks.into_iter().enumerate() {
            if killed == Some(at) {
                self.count("daemons killed while they set masks");
                return self.restart();
            }
            let outcome = match lost {
                true => Ok(()),
                false => self.set_mask(pid, machine, &order),
            };
            let over = match &outcome {
                Ok(()) => order.cpus.is_none(),
                Err(error) => matches!(error, ActError::MaskChanged { .. }),
            };
            if over {
                self.forget_mask(order.tid);
            }
            outcomes.push((order.vcpu, order.tid, outcome));
        }
        let after_ns = self.rng.within(MICRO..2 * MILLI);
        self.ours(after_ns, Action::Arrive(Message::Confined(task, pid, outcomes)));
    }

    /// One mask, if it is still what it is believed to be.
    fn set_mask(
        &mut self,
        pid: i32,
        machine: Option<(Slot, u64)>,
        order: &MaskOrder,
    ) -> Result<(), ActError> {
        let tid = order.tid;
        let thread = self.world.threads.get(&tid);
        let Some(thread) = thread.filter(|thread| Some((thread.slot, thread.machine)) == machine) else {
            return Err(ActError::ForeignThread { pid, tid });
        };
        let mask = thread.mask.clone();
        let found = self.world.affinity(tid).unwrap_or_default();
        if !still(&order.expected, &found, &self.online()) {
            self.count("masks that somebody else had set");
            return Err(ActError::MaskChanged { tid, found });
        }
        if self.chaotic && self.rng.chance(10) {
            let source = std::io::Error::from_raw_os_error(22);
            return Err(ActError::System { pid, tid, act: "setting its affinity", source });
        }
        // Somebody may have set by chance what a policy had set, or what differs in CPUs only that are offline. Nobody can tell.
        let by_chance = !mask.by_policy && mask.operator != order.operator;
        let certain = !mask.broken && !by_chance;
        let cpus = order.cpus.as_ref().unwrap_or(&order.operator);
        if !self.online().iter().any(|cpu| cpus.contains(cpu)) {
            let source = std::io::Error::from_raw_os_error(22);
            return Err(ActError::System { pid, tid, act: "setting its affinity", source });
        }
        let within = cpus.iter().all(|cpu| mask.operator.contains(cpu));
        self.checker.expect(within || !certain, "mask", || {
            format!("thread {tid}: {cpus} is more than its operator's {}", mask.operator)
        });
        let back = order.cpus.is_some() || *cpus == mask.operator;
        self.checker.expect(back || !certain, "mask", || {
            format!("thread {tid}: its operator's {} are given back as {cpus}", mask.operator)
        });
        if let Some(thread) = self.world.threads.get_mut(&tid).filter(|_| by_chance) {
            thread.mask.operator.clone_from(&order.operator);
        }
        let (now_ns, by_policy) = (self.now_ns, order.cpus.is_some());
        self.world.confine(tid, cpus, by_policy, &mut self.rng, now_ns);
        if let Some(thread) = self.world.threads.get_mut(&tid).filter(|_| !by_policy) {
            thread.mask.set(cpus.clone());
        }
        self.count(if by_policy { "masks set by policies" } else { "masks given back" });
        self.thread_moved(tid);
        Ok(())
    }

    fn online(&self) -> CpuSet {
        self.world.host.topology.nodes.iter().flat_map(|node| node.cpus.iter()).collect()
    }

    /// Gives back what the record of a machine has. Returns how many there were.
    fn restore_masks(&mut self, machine: Option<u64>) -> Result<usize, String> {
        let Some(serial) = machine else { return Ok(0) };
        self.world.others.remove(&serial);
        let Some(record) = self.world.records.remove(&serial) else { return Ok(0) };
        self.count("records of masks read");
        let (mut count, online, now_ns) = (0, self.online(), self.now_ns);
        for (tid, (operator, set)) in record {
            let thread = self.world.threads.get(&tid);
            let found = self.world.affinity(tid).unwrap_or_default();
            let ours = thread.is_some_and(|thread| thread.machine == serial)
                && set.iter().any(|set| still(set, &found, &online));
            if !ours {
                continue;
            }
            if !operator.iter().any(|cpu| online.contains(cpu)) {
                // The kernel refuses it.
                self.world.records.entry(serial).or_default().insert(tid, (operator, set));
                continue;
            }
            self.world.confine(tid, &operator, false, &mut self.rng, now_ns);
            if let Some(thread) = self.world.threads.get_mut(&tid) {
                thread.mask.set(operator);
            }
            self.thread_moved(tid);
            count += 1;
        }
        match self.world.records.contains_key(&serial) {
            true => Err("the kernel refuses a mask".to_owned()),
            false => Ok(count),
        }
    }

    /// A thread has its operator's mask.
    pub(crate) fn forget_mask(&mut self, tid: i32) {
        self.world.records.values_mut().for_each(|record| drop(record.remove(&tid)));
        self.world.records.retain(|_, record| !record.is_empty());
    }

    /// An operator sets a policy.
    pub(crate) fn ask_policy(&mut self, slot: Slot) {
        let name = self.world.places[slot].name.clone();
        let policy = match self.rng.index(10) {
            0..=3 => Policy::Vprobe,
            4 => Policy::VprobePaper,
            5 => Policy::Brm,
            6 => Policy::Lb,
            7 => Policy::Observe,
            _ => Policy::Off,
        };
        self.ask(|to| Request::SetPolicy(name, policy, to));
    }

    /// All policies are switched off.
    pub(crate) fn switch_off(&mut self) {
        for name in self.daemon.core.names() {
            self.ask(|to| Request::SetPolicy(name, Policy::Off, to));
        }
    }

    /// With no policy left, no thread has the mask of one, and nothing is counted or recorded.
    pub(crate) fn check_masks(&mut self) {
        let confined =
            self.world.threads.iter().find(|(_, thread)| thread.mask.by_policy && !thread.mask.broken);
        let confined = confined.map(|(tid, thread)| format!("thread {tid} still has {:?}", thread.mask));
        self.checker.expect(confined.is_none(), "mask", || confined.unwrap_or_default());
        let machines = self.world.places.iter().filter_map(|place| place.machine.as_ref());
        let kept = machines.filter(|machine| self.world.others.contains_key(&machine.serial));
        let kept =
            kept.map(|machine| format!("other threads of process {} are still kept", machine.pid)).next();
        self.checker.expect(kept.is_none(), "mask", || kept.unwrap_or_default());
        let counted = self.daemon.counted.len();
        self.checker.expect(counted == 0, "leak", || format!("threads of {counted} VMs are counted"));
    }
}

/// Is this mask still the one that was set, as far as CPUs are online?
fn still(set: &CpuSet, found: &CpuSet, online: &CpuSet) -> bool {
    let lost = !online.iter().any(|cpu| set.contains(cpu));
    lost || online.iter().all(|cpu| set.contains(cpu) == found.contains(cpu))
}
