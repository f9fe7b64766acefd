//! Sets the CPU affinity of vCPU threads, or tells scx_vnuma of their places, in a thread of its own because system calls and
//! the record of masks can block.

use super::{
    inbox::Inbox,
    locator::Reader,
    mask_records::{Kept, Masks, still},
    pin_orders::{NOT_CONNECTED, PinOrder, PolicyPins},
    scheduler::{Look, Places, Thread},
    vm_worker::VmWorker,
};
use crate::core::event::{Event, Made, MaskOrder, Ranked, Switch};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Weak},
};
use vnuma_model::{ApicId, CpuSet, Steal, VcpuLocation};
use vnuma_policy::world::{Mechanism, TaskId};
use vnuma_process::{ActError, Worker, Workers, pin_thread, pin_thread_if};

/// A move to make.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) task: TaskId,
    pub(super) pid: i32,
    /// The process, as a pidfd, so that a reused PID cannot be meant. `None`: it has ended.
    pub(super) pidfd: Option<Arc<OwnedFd>>,
    pub(super) tid: i32,
    pub(super) cpus: CpuSet,
}

/// Orders. They are carried out one after the other.
#[derive(Debug)]
pub(super) enum Order {
    /// An operator's move; [`Event::Moved`] follows.
    Move(Move),
    /// Masks of policies; [`Event::Confined`] follows. `pinner`: who has them set if the VM's manager does that, and may be gone.
    Confine {
        task: TaskId,
        pid: i32,
        pidfd: Option<Arc<OwnedFd>>,
        masks: Vec<MaskOrder>,
        pinner: Option<Weak<VmWorker>>,
    },
    /// All threads of a process but its vCPUs are kept to CPUs, or get their operators' masks; [`Event::Followed`] follows.
    Follow { task: TaskId, pid: i32, pidfd: Option<Arc<OwnedFd>>, vcpus: Vec<i32>, cpus: Option<CpuSet> },
    /// Masks of policies are given back; [`Event::MasksRestored`] follows. If the VM's manager pins its vCPUs: these, and how
    /// many it has given back before.
    Restore {
        task: TaskId,
        pid: i32,
        pidfd: Option<Arc<OwnedFd>>,
        vcpus: Vec<i32>,
        pins: Result<usize, String>,
    },
    /// A thread has its operator's mask.
    Forget { pid: i32, tid: i32 },
    /// A process has ended.
    ForgetProcess(i32),
    /// Threads that a policy schedules, and no others of that process; and which of all idle CPUs take.
    Rank { pid: i32, pidfd: Option<Arc<OwnedFd>>, vcpus: Vec<Ranked>, stealing: Steal },
    /// Look whether scx_vnuma is loaded. [`Event::Switched`] follows if that has changed.
    Look,
}

/// Starts the thread that sets masks, one after the other. When the worker is dropped, and all orders are carried out, it gives back
/// all masks that policies have set.
pub(super) fn start(
    workers: &Workers,
    root: PathBuf,
    records: PathBuf,
    reader: Reader,
    inbox: Arc<Inbox>,
) -> io::Result<Worker<Order>> {
    let places = Places::new(root, inbox.capabilities.clone());
    let mut task = Task { masks: Masks::new(records), reader, places, inbox };
    workers.start("mover", move |orders| {
        task.masks.tidy();
        task.look();
        for order in orders {
            if let Some(outcome) = task.carry_out(order) {
                task.inbox.tell(outcome);
            }
        }
        task.places.release_all();
        task.masks.restore_all(&task.reader.online());
    })
}

struct Task {
    masks: Masks,
    reader: Reader,
    places: Places,
    inbox: Arc<Inbox>,
}

impl Task {
    fn carry_out(&mut self, order: Order) -> Option<Event> {
        match order {
            Order::Move(order) => {
                let outcome = self.make(&order);
                Some(Event::Moved(order.task, outcome))
            }
            Order::Confine { task, pid, pidfd, masks, pinner } => {
                let outcomes = match pinner {
                    None => self.confine(pid, pidfd, masks),
                    Some(pinner) => self.confine_by_pins(task, (pid, pidfd), masks, &pinner),
                };
                (!outcomes.is_empty()).then_some(Event::Confined(task, outcomes))
            }
            Order::Follow { task, pid, pidfd, vcpus, cpus } => {
                let outcome = match pidfd {
                    Some(pidfd) => {
                        self.masks.follow((pid, &pidfd), &vcpus, cpus.as_ref(), &self.reader.online())
                    }
                    None => Err(format!("process {pid} has ended")),
                };
                Some(Event::Followed(task, outcome))
            }
            Order::Restore { task, pid, pidfd, vcpus, pins } => {
                self.masks.leave(pid, vcpus);
                pidfd.iter().for_each(|pidfd| self.places.release_process(pid, pidfd));
                let masks = self.masks.restore(pid, pidfd.as_ref(), &self.reader.online());
                let outcome = masks.and_then(|masks| Ok(masks + pins?));
                Some(Event::MasksRestored(task, outcome))
            }
            Order::Forget { pid, tid } => {
                self.masks.forget(pid, &[tid]);
                self.places.release(pid, &[tid]);
                None
            }
            Order::ForgetProcess(pid) => {
                self.masks.process_ended(pid);
                self.places.forget_process(pid);
                None
            }
            Order::Rank { pid, pidfd, vcpus, stealing } => {
                self.places.set_stealing(stealing);
                self.look();
                self.rank(pid, pidfd, &vcpus);
                None
            }
            Order::Look => {
                self.look();
                None
            }
        }
    }

    fn rank(&mut self, pid: i32, pidfd: Option<Arc<OwnedFd>>, vcpus: &[Ranked]) {
        if !self.places.is_loaded() {
            return;
        }
        let mut others = self.places.of(pid);
        others.retain(|tid| !vcpus.iter().any(|ranked| ranked.tid == *tid));
        self.places.release(pid, &others);
        if vcpus.is_empty() {
            self.places.clear_problems();
        }
        let Some(pidfd) = pidfd else { return };
        for ranked in vcpus {
            self.places.rank(pid, &pidfd, ranked.tid, ranked.pressure);
        }
    }

    /// Sees whether scx_vnuma is loaded. If that has changed, places go from affinities to it, or back.
    fn look(&mut self) {
        let online = self.reader.online();
        let switch = match self.places.look() {
            Look::Same => return,
            Look::Loaded => {
                let mut threads = Vec::new();
                for (pid, pidfd, tid, kept) in self.masks.confined() {
                    // Its affinity stays until scx_vnuma has it.
                    let told = self.places.place(pid, &pidfd, tid, kept.last().cloned(), kept.operator());
                    if told.is_none_or(|told| told.is_err()) {
                        continue;
                    }
                    let ours = |found: &CpuSet| kept.is_ours(found, &online);
                    let freed = pin_thread_if(pidfd.as_fd(), pid, tid, ours, kept.operator());
                    if freed.is_err() {
                        self.places.release(pid, &[tid]);
                        continue;
                    }
                    self.masks.forget(pid, &[tid]);
                    threads.push((tid, true));
                }
                Switch { to: Mechanism::Scheduler, why: String::new(), threads }
            }
            Look::Ended(why, threads) => {
                let confine = |(tid, thread): &(i32, Thread)| {
                    thread
                        .place
                        .as_ref()
                        .map(|place| (*tid, self.confine_again(*tid, thread, place, &online)))
                };
                let threads = threads.iter().filter_map(confine).collect();
                Switch { to: Mechanism::Affinity, why, threads }
            }
        };
        self.inbox.tell(Event::Switched(switch));
    }

    /// Sets as an affinity what scx_vnuma was told. True if that was done. Pins are made when the policy decides again.
    fn confine_again(&mut self, tid: i32, thread: &Thread, place: &CpuSet, online: &CpuSet) -> bool {
        let Some(operator) = thread.operator.clone().filter(|_| !self.masks.is_left(thread.pid)) else {
            return false;
        };
        let order = MaskOrder {
            vcpu: 0,
            tid,
            expected: operator.clone(),
            operator: operator.clone(),
            cpus: Some(place.clone()),
        };
        if self.masks.note(thread.pid, &thread.pidfd, &[order], false).is_err() {
            return false;
        }
        let expected = |found: &CpuSet| still(&operator, found, online);
        let confined = pin_thread_if(thread.pidfd.as_fd(), thread.pid, tid, expected, place).is_ok();
        if !confined {
            self.masks.forget(thread.pid, &[tid]);
        }
        confined
    }

    /// The thread's affinity is set in one system call, so the move is made or not made.
    fn make(&mut self, order: &Move) -> Result<Option<VcpuLocation>, ActError> {
        let Some(pidfd) = &order.pidfd else { return Err(ActError::Exited { pid: order.pid }) };
        pin_thread(pidfd.as_fd(), order.pid, order.tid, &order.cpus)?;
        self.masks.forget(order.pid, &[order.tid]);
        self.places.release(order.pid, &[order.tid]);
        Ok(self.reader.read(order.pid, order.tid))
    }

    /// Confines threads, or gives back their operators' masks: by scx_vnuma if it is loaded and may have the thread, else by
    /// affinities.
    fn confine(
        &mut self,
        pid: i32,
        pidfd: Option<Arc<OwnedFd>>,
        orders: Vec<MaskOrder>,
    ) -> Vec<(ApicId, Result<Made, ActError>)> {
        let Some(pidfd) = pidfd else {
            return orders.iter().map(|order| (order.vcpu, Err(ActError::Exited { pid }))).collect();
        };
        self.look();
        let (mut outcomes, mut left) = (Vec::with_capacity(orders.len()), Vec::new());
        for order in orders {
            match self.tell(pid, &pidfd, &order) {
                Some(outcome) => outcomes.push((order.vcpu, outcome)),
                None => left.push(order),
            }
        }
        outcomes.extend(self.set_affinities(pid, &pidfd, left));
        outcomes
    }

    /// Tells scx_vnuma of a place. The thread has its operator's mask then. `None`: this is for an affinity to do.
    fn tell(&mut self, pid: i32, pidfd: &Arc<OwnedFd>, order: &MaskOrder) -> Option<Result<Made, ActError>> {
        let has = self.places.has(pid, order.tid);
        if !self.places.is_loaded() || (order.cpus.is_none() && !has) {
            return None;
        }
        let online = self.reader.online();
        let kept = self.masks.kept(pid, order.tid);
        let ours = |found: &CpuSet| {
            let by_us = kept.is_some_and(|kept| kept.is_ours(found, &online));
            by_us || [&order.expected, &order.operator].iter().any(|mask| still(mask, found, &online))
        };
        let told = self.places.place(pid, pidfd, order.tid, order.cpus.clone(), &order.operator)?;
        let freed = told.and_then(|()| pin_thread_if(pidfd.as_fd(), pid, order.tid, ours, &order.operator));
        // A mask that others have set counts as the operator's from then on.
        if matches!(freed, Ok(()) | Err(ActError::MaskChanged { .. })) {
            self.masks.forget(pid, &[order.tid]);
        }
        if freed.is_err() {
            self.places.release(pid, &[order.tid]);
        }
        let made = || Made { location: self.reader.read(pid, order.tid), by: Mechanism::Scheduler };
        Some(freed.map(|()| made()))
    }

    /// The same for a VM whose manager sets affinities by pins of its own. What scx_vnuma must not have, or had not before, is for that.
    fn confine_by_pins(
        &mut self,
        task: TaskId,
        (pid, pidfd): (i32, Option<Arc<OwnedFd>>),
        orders: Vec<MaskOrder>,
        pinner: &Weak<VmWorker>,
    ) -> Vec<(ApicId, Result<Made, ActError>)> {
        self.masks.leave(pid, orders.iter().map(|order| order.tid));
        self.look();
        let (mut outcomes, mut pins) = (Vec::new(), Vec::new());
        for order in orders {
            let Some(pidfd) = &pidfd else {
                outcomes.push((order.vcpu, Err(ActError::Exited { pid })));
                continue;
            };
            if order.expected == order.operator {
                match self.tell(pid, pidfd, &order) {
                    Some(outcome) => outcomes.push((order.vcpu, outcome)),
                    None => pins.push(PinOrder { order, by: Mechanism::Affinity }),
                }
                continue;
            }
            // It is pinned, and gets its operator's CPUs back when scx_vnuma has it.
            let place = order.cpus.as_ref().filter(|_| self.places.is_loaded()).cloned();
            let told = place
                .and_then(|place| self.places.place(pid, pidfd, order.tid, Some(place), &order.operator));
            match told {
                Some(Err(error)) => outcomes.push((order.vcpu, Err(error))),
                Some(Ok(())) => pins.push(PinOrder { order, by: Mechanism::Scheduler }),
                None => pins.push(PinOrder { order, by: Mechanism::Affinity }),
            }
        }
        if !pins.is_empty() {
            let pins = PolicyPins::new((task, pid), pins, Arc::clone(&self.inbox));
            match pinner.upgrade() {
                Some(worker) => worker.pin_all(pins),
                None => pins.failed(&NOT_CONNECTED),
            }
        }
        outcomes
    }

    /// Records the masks, then sets them. Without a record none is set.
    fn set_affinities(
        &mut self,
        pid: i32,
        pidfd: &Arc<OwnedFd>,
        orders: Vec<MaskOrder>,
    ) -> Vec<(ApicId, Result<Made, ActError>)> {
        let before = |order: &MaskOrder| self.masks.kept(pid, order.tid).cloned();
        let before: Vec<Option<Kept>> = orders.iter().map(before).collect();
        if let Err(problem) = self.masks.note(pid, pidfd, &orders, false) {
            let failed = |order: &MaskOrder| {
                let (act, source) = ("recording its operator's mask", io::Error::other(problem.clone()));
                (order.vcpu, Err(ActError::System { pid, tid: order.tid, act, source }))
            };
            return orders.iter().map(failed).collect();
        }
        let online = self.reader.online();
        let (mut outcomes, mut given_back) = (Vec::with_capacity(orders.len()), Vec::new());
        for (order, before) in orders.into_iter().zip(before) {
            // The core may not know yet that a place has become an affinity, as scx_vnuma has ended.
            let expected = |found: &CpuSet| {
                let by_us = before.as_ref().is_some_and(|kept| kept.is_ours(found, &online));
                by_us || still(&order.expected, found, &online)
            };
            let cpus = order.cpus.as_ref().unwrap_or(&order.operator);
            let outcome = pin_thread_if(pidfd.as_fd(), pid, order.tid, expected, cpus);
            let operators = match &outcome {
                Ok(()) => order.cpus.is_none(),
                Err(error) => matches!(error, ActError::MaskChanged { .. }),
            };
            if operators {
                given_back.push(order.tid);
            }
            outcomes.push((order.vcpu, outcome.map(|()| self.reader.read(pid, order.tid).into())));
        }
        self.masks.forget(pid, &given_back);
        outcomes
    }
}
