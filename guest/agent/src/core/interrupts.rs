//! Which interrupts of devices are kept on the devices' nodes.
//!
//! An interrupt that may be handled elsewhere is narrowed to those of its CPUs that are the node's, or, if none of them is,
//! to all of the node's. Somebody who sets it after that knows why, or is irqbalance: it is left to them for as long as this
//! process runs.

use super::{Interrupt, Snapshot};
use crate::rules::KeepInterrupts;
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::CpuSet;

/// What is to be done with an interrupt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InterruptAction {
    /// Let these CPUs handle it.
    Set {
        /// Which.
        irq: u32,
        /// Address of its device.
        device: String,
        /// What they were.
        former: CpuSet,
        /// What they become.
        cpus: CpuSet,
        /// Why.
        reason: String,
    },
    /// Give back what it had before.
    Restore {
        /// Which.
        irq: u32,
        /// Why.
        reason: String,
    },
    /// Somebody else has set it: it is theirs.
    Yield {
        /// Which.
        irq: u32,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Kept {
    device: String,
    former: CpuSet,
    set: CpuSet,
}

/// What is remembered of interrupts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interrupts {
    kept: BTreeMap<u32, Kept>,
    /// Left to others: the kernel refuses, or somebody else sets them.
    others: BTreeSet<(u32, String)>,
}

impl Interrupts {
    /// Setting it has failed: it is not tried again.
    pub(super) fn failed(&mut self, irq: u32) {
        if let Some(kept) = self.kept.remove(&irq) {
            self.others.insert((irq, kept.device));
        }
    }

    /// Decides. `used` are the devices that processes drive which are placed.
    pub(super) fn decide(
        &mut self,
        snapshot: &Snapshot,
        used: &BTreeSet<String>,
        which: KeepInterrupts,
    ) -> Vec<InterruptAction> {
        let here: BTreeMap<u32, &Interrupt> =
            snapshot.interrupts.iter().map(|interrupt| (interrupt.irq, interrupt)).collect();
        // One that is gone has taken its setting with it.
        let same = |irq: &u32, device: &String| here.get(irq).is_some_and(|found| found.device == *device);
        self.kept.retain(|irq, kept| same(irq, &kept.device));
        self.others.retain(|(irq, device)| same(irq, device));
        let mut actions = Vec::new();
        for interrupt in here.values() {
            let wanted = match which {
                KeepInterrupts::None => false,
                KeepInterrupts::Used => used.contains(&interrupt.device),
                KeepInterrupts::All => true,
            };
            let cpus = if wanted { home(snapshot, interrupt) } else { None };
            actions.extend(self.of(interrupt, cpus));
        }
        actions
    }

    fn of(&mut self, interrupt: &Interrupt, home: Option<CpuSet>) -> Option<InterruptAction> {
        let Interrupt { irq, device, cpus, .. } = interrupt;
        if self.others.contains(&(*irq, device.clone())) {
            return None;
        }
        let former = match self.kept.get(irq) {
            Some(kept) if kept.set != *cpus => {
                self.failed(*irq);
                return Some(InterruptAction::Yield { irq: *irq });
            }
            Some(kept) => kept.former.clone(),
            None => cpus.clone(),
        };
        let Some(home) = home.filter(|home| !home.is_empty()) else {
            let reason = "no process that is placed drives its device".to_owned();
            return self.kept.remove(irq).map(|_| InterruptAction::Restore { irq: *irq, reason });
        };
        let narrowed: CpuSet = home.iter().filter(|cpu| former.contains(*cpu)).collect();
        let target = if narrowed.is_empty() { home } else { narrowed };
        if target == *cpus {
            return None;
        }
        let kept = Kept { device: device.clone(), former: former.clone(), set: target.clone() };
        self.kept.insert(*irq, kept);
        let reason = format!("{device} is a device of that node");
        Some(InterruptAction::Set { irq: *irq, device: device.clone(), former, cpus: target, reason })
    }
}

/// CPUs of the node of an interrupt's device.
fn home(snapshot: &Snapshot, interrupt: &Interrupt) -> Option<CpuSet> {
    let node = snapshot.devices.get(&interrupt.device)?.node?;
    Some(snapshot.nodes.get(&node)?.cpus.clone())
}
