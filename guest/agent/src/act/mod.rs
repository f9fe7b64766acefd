//! Carries a plan out, and undoes it.
//!
//! There are three ways to confine a process, and the first that is possible is taken:
//!
//! 1. **unit**: systemd runs, and the process is alone in the control group of a unit of the system that has `AllowedCPUs=`:
//!    that is set at run time, by systemd, whose group it is.
//! 2. **group**: systemd does not run, and the process is alone in a control group that has CPUs in `cpuset.cpus`: that is
//!    written.
//! 3. **threads**: the affinity of each of its threads is set.
//!
//! A process is never moved to another control group: it would leave its service's limits, accounts and its place in
//! systemd's list. The controller `cpuset` is never enabled either: before Linux 6.2 that takes affinities away from threads of
//! all groups beside it. Nor is a cpuset used that is empty: the kernel refuses to empty it again while processes are there.

pub mod group;
pub mod interrupts;
pub mod memory;
pub mod systemd;
pub mod threads;

use crate::{
    core::{Action, InterruptAction, Limits, NodeId, Plan, ProcessId, State},
    ends::Ends,
    files,
    journal::{Change, Journal, JournalError, Value},
    rules::Memory,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use systemd::Systemd;
use vnuma_model::CpuSet;

/// Where things are changed.
pub struct System {
    root: PathBuf,
    systemd: Option<Box<dyn Systemd>>,
    ends: Ends,
}

/// What became of a change that was to be undone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undone {
    /// What was there before is there again.
    Restored(String),
    /// Somebody else has changed it since, or it is gone: it was left alone.
    Left(String),
}

impl System {
    /// The system below `root`, with the systemd that runs there if one does. What takes long stops at a signal to end.
    pub fn new(root: &Path, ends: Ends) -> Self {
        Self { root: root.to_owned(), systemd: systemd::running(root, &ends), ends }
    }

    fn online(&self) -> CpuSet {
        let list = files::text(&self.root.join("sys/devices/system/cpu/online"));
        list.and_then(|list| list.parse().ok()).unwrap_or_default()
    }

    /// Undoes a change.
    pub fn undo(&self, change: &Change) -> Result<Undone, String> {
        match change {
            Change::Threads { pid, started, former, set, own } => {
                let id = ProcessId { pid: *pid, started: *started };
                let count = threads::change(id, set, former, own, &self.online())?;
                Ok(match count {
                    Some(count) => {
                        Undone::Restored(format!("PID {pid}: {count} threads may use CPUs {former} again"))
                    }
                    None => Undone::Left(format!("PID {pid} has ended")),
                })
            }
            Change::Group { path, cpus, mems, .. } => group::release(&self.root, path, cpus, mems.as_ref()),
            Change::Unit { unit, .. } => match &self.systemd {
                Some(systemd) => systemd::release(systemd.as_ref(), change),
                None => Err(format!("unit {unit}: systemd does not run any more")),
            },
            Change::Interrupt { irq, former, set, .. } => {
                interrupts::release(&self.root, *irq, former, set, &self.online())
            }
        }
    }
}

/// Carries plans out.
pub struct Actor {
    system: System,
    journal: Journal,
    /// Where the move of the memory of a process goes on.
    cursors: BTreeMap<ProcessId, u64>,
    /// Descendants that have been given back what they had inherited.
    freed: BTreeSet<ProcessId>,
}

impl Actor {
    /// With a journal in which everything of an earlier one has been undone.
    pub fn new(system: System, journal: Journal) -> Self {
        Self { system, journal, cursors: BTreeMap::new(), freed: BTreeSet::new() }
    }

    /// What has been changed.
    pub fn changes(&self) -> &[Change] {
        self.journal.changes()
    }

    /// Undoes everything, the latest first. What cannot be undone stays in the journal. Gives a line for each change.
    pub fn undo_all(&mut self) -> (Vec<String>, Result<(), String>) {
        self.system.ends.begin();
        let mut lines = self.free_descendants();
        let mut failed = Vec::new();
        for change in self.journal.changes().iter().rev().cloned().collect::<Vec<_>>() {
            match self.undo(&change) {
                Ok(line) => lines.push(line),
                Err(error) => failed.push(error),
            }
        }
        (lines, if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) })
    }

    fn undo(&mut self, change: &Change) -> Result<String, String> {
        let line = match self.system.undo(change)? {
            Undone::Restored(line) => line,
            Undone::Left(line) => format!("{line}: left alone"),
        };
        self.journal.strike(change).map_err(text)?;
        Ok(line)
    }

    /// Carries out a plan, until a signal to end comes. Gives a line for each act; `state` learns what fails.
    pub fn apply(
        &mut self,
        plan: &Plan,
        state: &mut State,
        memory: Memory,
        (limits, now): (&Limits, Duration),
    ) -> Vec<String> {
        let mut lines = Vec::new();
        let end = Instant::now() + memory::WORK;
        for action in &plan.actions {
            if self.system.ends.have_come() {
                return lines;
            }
            let pid = action.id().pid;
            match action {
                // The others have their turn at the next look.
                Action::MoveMemory { .. } if Instant::now() >= end => {}
                Action::Keep { .. } => {}
                Action::Release { id, reason } => {
                    lines.push(format!("PID {pid}: released: {reason}"));
                    lines.extend(self.release(*id));
                }
                Action::Place { id, node, cpus, reason } => {
                    match self.place(*id, *node, cpus, memory, state) {
                        Ok(how) => lines.push(format!("PID {pid}: placed on node {node} ({how}): {reason}")),
                        Err(error) => {
                            state.lost(*id, limits, now);
                            lines.push(format!("PID {pid}: not placed on node {node}: {error}"));
                            lines.extend(self.release(*id));
                        }
                    }
                }
                Action::MoveMemory { id, node, kib } => {
                    match self.move_memory(*id, *node, *kib, end, state) {
                        Ok(0) => {}
                        Ok(moved) => lines.push(format!("PID {pid}: {moved} KiB moved to node {node}")),
                        Err(error) => lines.push(format!("PID {pid}: memory: {error}")),
                    }
                }
            }
        }
        for action in &plan.interrupts {
            lines.extend(self.interrupt(action, state));
        }
        lines
    }

    fn release(&mut self, id: ProcessId) -> Vec<String> {
        self.cursors.remove(&id);
        let mut lines = self.free_descendants();
        let of = |change: &&Change| change.process() == Some(id);
        for change in self.journal.changes().iter().filter(of).cloned().collect::<Vec<_>>() {
            lines.push(self.undo(&change).unwrap_or_else(|error| format!("PID {}: {error}", id.pid)));
        }
        lines
    }

    /// Confines a process. Gives how.
    fn place(
        &mut self,
        id: ProcessId,
        node: NodeId,
        cpus: &CpuSet,
        memory: Memory,
        state: &State,
    ) -> Result<String, String> {
        let former = state.placed(id).map(|placed| placed.former.clone()).ok_or("it is not placed")?;
        let mems = (memory == Memory::Bind).then_some(node);
        match self.place_group(id, &former, cpus, mems)? {
            Ok(how) => return Ok(how),
            Err(why) if memory == Memory::Bind => {
                let how = self.place_threads(id, &former, cpus)?;
                return Ok(format!("{how}; memory is not bound: {why}"));
            }
            Err(_) => {}
        }
        self.place_threads(id, &former, cpus)
    }

    /// By its control group. `Ok(Err)` says why that is not possible.
    fn place_group(
        &mut self,
        id: ProcessId,
        former: &CpuSet,
        cpus: &CpuSet,
        mems: Option<NodeId>,
    ) -> Result<Result<String, String>, String> {
        let ProcessId { pid, started } = id;
        let found = match group::of_process(&self.system.root, id, former, &self.system.online()) {
            Ok(found) => found,
            Err(why) => return Ok(Err(why)),
        };
        let path = found.path.clone();
        let set = cpus.to_string();
        let Some(systemd) = &self.system.systemd else {
            let mems = bound(found.mems, mems);
            let how = shown(&format!("control group {path}"), mems.is_some());
            let cpus = Value { former: found.cpus, set };
            let change = Change::Group { pid, started, path, cpus, mems };
            self.journal.note(change.clone()).map_err(text)?;
            group::confine(&self.system.root, &change)?;
            return Ok(Ok(how));
        };
        let Some(unit) = systemd::unit_of(&path) else {
            return Ok(Err(format!("{path} is not the control group of a unit of the system")));
        };
        let (former, former_mems) = systemd.allowed(&unit)?;
        if former.is_empty() {
            return Ok(Err(format!("unit {unit} has no AllowedCPUs")));
        }
        let mems = bound(former_mems, mems);
        let how = shown(&format!("unit {unit}"), mems.is_some());
        let (cpus, drop_ins) = (Value { former, set }, systemd.drop_ins(&unit));
        let change = Change::Unit { pid, started, unit, path, cpus, mems, drop_ins };
        self.journal.note(change.clone()).map_err(text)?;
        systemd::confine(systemd.as_ref(), &change)?;
        Ok(Ok(how))
    }

    fn place_threads(&mut self, id: ProcessId, former: &CpuSet, cpus: &CpuSet) -> Result<String, String> {
        let online = self.system.online();
        let own = threads::already(id, cpus, &online)?;
        let ProcessId { pid, started } = id;
        let (former, set) = (former.clone(), cpus.clone());
        let change =
            Change::Threads { pid, started, former: former.clone(), set: set.clone(), own: own.clone() };
        self.journal.note(change).map_err(text)?;
        let count = threads::change(id, &former, &set, &own, &online)?.ok_or("it has ended")?;
        Ok(format!("{count} threads on CPUs {cpus}"))
    }

    fn move_memory(
        &mut self,
        id: ProcessId,
        node: NodeId,
        kib: u64,
        end: Instant,
        state: &mut State,
    ) -> Result<u64, String> {
        let from = self.cursors.get(&id).copied().unwrap_or(0);
        let outcome = memory::move_to(&self.system.root, id, node, kib, (from, end));
        // What cannot be moved now is not tried again and again.
        let settled = outcome.as_ref().map_or(true, |moved| moved.settled);
        state.moved(id, settled);
        let moved = outcome?;
        self.cursors.insert(id, moved.cursor);
        Ok(moved.kib)
    }

    fn interrupt(&mut self, action: &InterruptAction, state: &mut State) -> Option<String> {
        let known = |changes: &[Change], wanted: u32| {
            let found = changes
                .iter()
                .find(|change| matches!(change, Change::Interrupt { irq, .. } if *irq == wanted));
            found.cloned()
        };
        match action {
            InterruptAction::Set { irq, device, former, cpus, reason } => {
                let (device, former, set) = (device.clone(), former.clone(), cpus.clone());
                let earlier = known(self.journal.changes(), *irq);
                let change = Change::Interrupt { irq: *irq, device, former, set };
                let set = self.journal.note(change.clone()).map_err(text).and_then(|()| {
                    interrupts::set(&self.system.root, *irq, cpus)?;
                    earlier.map_or(Ok(()), |earlier| self.journal.strike(&earlier).map_err(text))
                });
                Some(match set {
                    Ok(()) => format!("interrupt {irq}: CPUs {cpus}: {reason}"),
                    Err(error) => {
                        state.interrupt_failed(*irq);
                        let undone = self.undo(&change);
                        format!("interrupt {irq}: left alone: {error}{}", undone.err().unwrap_or_default())
                    }
                })
            }
            InterruptAction::Restore { irq, reason } => {
                let change = known(self.journal.changes(), *irq)?;
                Some(match self.undo(&change) {
                    Ok(line) => format!("{line}: {reason}"),
                    Err(error) => format!("interrupt {irq}: {error}"),
                })
            }
            InterruptAction::Yield { irq } => {
                let change = known(self.journal.changes(), *irq)?;
                let struck = self.journal.strike(&change).map_err(text);
                let problem = struck.err().unwrap_or_default();
                Some(format!("interrupt {irq}: somebody else sets its CPUs: left alone{problem}"))
            }
        }
    }

    /// Looks after what is set: gives back what descendants have inherited, and yields to others.
    pub fn tend(&mut self, state: &mut State, (limits, now): (&Limits, Duration)) -> Vec<String> {
        let mut lines = self.free_descendants();
        let online = self.system.online();
        for change in self.journal.changes().to_vec() {
            let Some(id) = change.process() else { continue };
            let alone = match &change {
                Change::Group { path, .. } | Change::Unit { path, .. } => {
                    group::is_alone(&self.system.root, path, id.pid)
                }
                _ => true,
            };
            let ours = match &change {
                Change::Threads { set, .. } => threads::any_has(id, set, &online),
                Change::Group { path, cpus, .. } => group::has(&self.system.root, path, &cpus.set),
                _ => true,
            };
            let line = if !threads::is_alive(id) {
                self.undo(&change)
            } else if !ours {
                state.lost(id, limits, now);
                let line = format!("PID {}: somebody else has set its CPUs: left alone", id.pid);
                self.journal.strike(&change).map_err(text).map(|()| line)
            } else if !alone {
                self.fall_back_to_threads(&change, id, state)
            } else {
                continue;
            };
            lines.push(line.unwrap_or_else(|error| format!("PID {}: {error}", id.pid)));
        }
        lines
    }

    /// The group of a process has got others: its threads are confined instead.
    fn fall_back_to_threads(
        &mut self,
        change: &Change,
        id: ProcessId,
        state: &State,
    ) -> Result<String, String> {
        self.undo(change)?;
        let placed = state.placed(id).cloned().ok_or("it is not placed")?;
        let how = self.place_threads(id, &placed.former, &placed.cpus)?;
        Ok(format!("PID {}: its control group has got others: {how}", id.pid))
    }

    fn free_descendants(&mut self) -> Vec<String> {
        let mut set = BTreeMap::new();
        for change in self.journal.changes() {
            if let (Change::Threads { former, set: cpus, .. }, Some(id)) = (change, change.process()) {
                set.insert(id, (former.clone(), cpus.clone()));
            }
        }
        if set.is_empty() {
            self.freed.clear();
            return Vec::new();
        }
        threads::free_descendants(&self.system.root, &set, &mut self.freed, &self.system.online())
    }
}

/// Binds memory to a node. What was empty before cannot be made so again, so it stays as it is.
fn bound(former: String, node: Option<NodeId>) -> Option<Value> {
    node.filter(|_| !former.is_empty()).map(|node| Value { former, set: node.to_string() })
}

fn shown(how: &str, is_bound: bool) -> String {
    if is_bound { format!("{how}, memory bound") } else { how.to_owned() }
}

fn text(error: JournalError) -> String {
    error.to_string()
}
