//! Moves vCPUs without vnumad's knowledge, at a steady rate, and collects how long it took until their guests knew.

use crate::{
    board::{Place, now_ns, wake},
    host::NODES,
    qemu::boot_node,
    vms::{VCPUS, Vms},
};
use anyhow::Context;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use std::{
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

/// Moves of all VMs in turn, so that none reaches the cap on its publications.
pub struct Moves<'a> {
    vms: &'a Vms,
    /// VMs at the beginning that are not moved.
    left_alone: usize,
    made: usize,
    /// Milliseconds from the beginning of a move until its guest had read it.
    pub latencies_ms: Vec<f64>,
    /// Moves that were not published before the next one of the same vCPU.
    pub unpublished: usize,
}

impl<'a> Moves<'a> {
    /// None made yet: all vCPUs are where they booted.
    pub fn new(vms: &'a Vms) -> Self {
        Self::but_first(vms, 0)
    }

    /// The same, of all VMs but so many first ones.
    pub fn but_first(vms: &'a Vms, left_alone: usize) -> Self {
        for (position, place) in vms.places().iter().enumerate() {
            place.wanted.store(boot_node(position % VCPUS, VCPUS) as u32, Ordering::Release);
        }
        Self { vms, left_alone, made: 0, latencies_ms: Vec::new(), unpublished: 0 }
    }

    /// Makes `per_second` for so long. Returns how many.
    pub fn run(&mut self, per_second: u64, duration: Duration) -> anyhow::Result<usize> {
        let (begin, before) = (Instant::now(), self.made);
        let count = (duration.as_secs_f64() * per_second as f64) as usize;
        for number in 0..count {
            let at = begin + Duration::from_secs(1) * number as u32 / per_second as u32;
            thread::sleep(at.saturating_duration_since(Instant::now()));
            self.make_one()?;
        }
        Ok(self.made - before)
    }

    fn make_one(&mut self) -> anyhow::Result<()> {
        let moved = position(self.made, self.vms.count() - self.left_alone);
        let position = self.left_alone * VCPUS + moved;
        let place = &self.vms.places()[position];
        self.collect(place);
        let node = (place.wanted.load(Ordering::Relaxed) as usize + 1) % NODES;
        let mut cpus = CpuSet::new();
        cpus.set(node)?;
        place.wanted.store(node as u32, Ordering::Release);
        place.moved_ns.store(now_ns(), Ordering::Release);
        let thread = Pid::from_raw(place.tid.load(Ordering::Acquire));
        sched_setaffinity(thread, &cpus).with_context(|| format!("vCPU {position}"))?;
        // It goes there now, as a vCPU with something to do would.
        wake(&place.wake);
        self.made += 1;
        Ok(())
    }

    /// Takes the latency of the last move of a vCPU, if there was one.
    fn collect(&mut self, place: &Place) {
        let (moved, seen) = (place.moved_ns.swap(0, Ordering::AcqRel), place.seen_ns.load(Ordering::Acquire));
        match seen.checked_sub(moved) {
            _ if moved == 0 => {}
            Some(latency) => self.latencies_ms.push(latency as f64 / 1e6),
            None => self.unpublished += 1,
        }
    }

    /// Takes the latencies of all that have not been taken. Time must have passed since the last move.
    pub fn collect_all(&mut self) {
        let places = self.vms.places();
        places.iter().for_each(|place| self.collect(place));
    }

    /// Forgets what was collected so far.
    pub fn forget(&mut self) {
        self.collect_all();
        (self.latencies_ms, self.unpublished) = (Vec::new(), 0);
    }
}

/// Which vCPU the move of this number is of: one of each VM, then the next one of each.
fn position(number: usize, vms: usize) -> usize {
    (number % vms) * VCPUS + number / vms % VCPUS
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_vcpu_has_its_turn_and_no_vm_two_in_a_row() {
        let all: Vec<usize> = (0..3 * VCPUS).map(|number| position(number, 3)).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 3 * VCPUS);
        assert_eq!(all[..4], [0, VCPUS, 2 * VCPUS, 1]);
        assert_eq!(position(3 * VCPUS, 3), 0);
    }
}
