//! What has happened since vnumad started, summed up for its metrics.

use crate::core::{Core, counts::VmCounts};
use std::collections::BTreeMap;
use vnuma_api::Event;

/// Upper bounds of the buckets of [`Latencies`], seconds. What takes longer is in a bucket without one.
pub(crate) const BOUNDS_S: [f64; 13] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Sums of all events. Those of a VM are forgotten with it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    /// From a change on the host until the guest's kernel used it.
    pub(crate) update: Latencies,
    /// From the publication of a topology until then.
    pub(crate) acknowledge: Latencies,
    /// By name.
    pub(crate) vms: BTreeMap<String, VmTotals>,
    /// Migrations, by what came of them.
    pub(crate) migrations: BTreeMap<&'static str, u64>,
    /// Threads of vnumad that have panicked.
    pub(crate) thread_panics: u64,
}

/// Sums of a VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct VmTotals {
    /// vCPUs that were replugged.
    pub(crate) replugs: u64,
    /// Steps of policies, by policy and cause. There are a dozen causes.
    pub(crate) steps: BTreeMap<(String, String), u64>,
    /// Moves of memory that have ended.
    pub(crate) memory_moves: u64,
    /// Bytes that these moved.
    pub(crate) memory_bytes: u64,
    /// Times that it got a channel, and lost it.
    pub(crate) attaches: u64,
    pub(crate) detaches: u64,
    /// What the core has counted.
    pub(crate) counts: VmCounts,
}

/// A histogram of times.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Latencies {
    /// By bucket, the one without a bound last. Each time is in one of them.
    pub(crate) counts: [u64; BOUNDS_S.len() + 1],
    pub(crate) sum_s: f64,
}

impl Latencies {
    fn add(&mut self, from_ns: u64, to_ns: u64) {
        let seconds = to_ns.saturating_sub(from_ns) as f64 / 1e9;
        let bucket = BOUNDS_S.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS_S.len());
        self.counts[bucket] += 1;
        self.sum_s += seconds;
    }

    /// How many times there are.
    pub(crate) fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

impl Totals {
    /// These sums, together with those of the core.
    pub(crate) fn with(&self, core: &Core) -> Self {
        let mut totals = Self { migrations: core.migrations(), ..self.clone() };
        for (id, managed) in core.world().iter() {
            if let Some(vm) = &managed.vm {
                of(&mut totals.vms, vm.name()).counts = core.counts(id);
            }
        }
        totals
    }

    /// Adds an event.
    pub(crate) fn add(&mut self, event: &Event) {
        let vms = &mut self.vms;
        match event {
            Event::Gone { vm, .. } => drop(vms.remove(vm)),
            Event::Replugged { vm, .. } => of(vms, vm).replugs += 1,
            Event::Confined { vm, step, .. } => {
                *of(vms, vm).steps.entry((step.policy.clone(), step.cause.clone())).or_default() += 1;
            }
            Event::Memory { vm, step } if step.ended => {
                let vm = of(vms, vm);
                vm.memory_moves += 1;
                vm.memory_bytes += step.moved_bytes;
            }
            Event::Acknowledged { changed_ns, published_ns, acknowledged_ns, .. } => {
                self.update.add(*changed_ns, *acknowledged_ns);
                self.acknowledge.add(*published_ns, *acknowledged_ns);
            }
            Event::Attached { vm, .. } => of(vms, vm).attaches += 1,
            Event::Detached { vm, .. } => of(vms, vm).detaches += 1,
            Event::Appeared { .. }
            | Event::Changed { .. }
            | Event::Memory { .. }
            | Event::Policy { .. }
            | Event::Published { .. } => {}
        }
    }
}

fn of<'t>(vms: &'t mut BTreeMap<String, VmTotals>, name: &str) -> &'t mut VmTotals {
    vms.entry(name.to_owned()).or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_api::{Generation, MemoryStep, PolicyStep};

    fn replugged(vm: &str) -> Event {
        Event::Replugged { vm: vm.into(), vcpu: 0, new_vcpu: 1, guest_node: 1, time_ns: 1 }
    }

    fn confined(cause: &str) -> Event {
        let step = PolicyStep { policy: "vprobe".into(), cause: cause.into(), ..PolicyStep::default() };
        Event::Confined { vm: "a".into(), vcpu: 0, step }
    }

    fn memory(ended: bool) -> Event {
        let step = MemoryStep { ended, moved_bytes: 4096, ..MemoryStep::default() };
        Event::Memory { vm: "a".into(), step }
    }

    #[test]
    fn events_are_summed_by_vm_and_forgotten_with_it() {
        let mut totals = Totals::default();
        let events =
            [replugged("a"), replugged("b"), replugged("a"), confined("x"), confined("y"), confined("x")];
        events.iter().chain(&[memory(false), memory(true)]).for_each(|event| totals.add(event));
        let vm = || "a".to_owned();
        totals.add(&Event::Attached { vm: vm(), time_ns: 1 });
        totals.add(&Event::Detached { vm: vm(), time_ns: 1 });
        totals.add(&Event::Attached { vm: vm(), time_ns: 1 });
        let a = &totals.vms["a"];
        assert_eq!((a.replugs, a.memory_moves, a.memory_bytes), (2, 1, 4096));
        assert_eq!((a.attaches, a.detaches), (2, 1));
        assert_eq!(a.steps.values().copied().collect::<Vec<_>>(), [2, 1]);
        totals.add(&Event::Gone { vm: "a".into(), time_ns: 2 });
        assert_eq!(totals.vms.keys().collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn times_are_in_the_bucket_of_their_bound() {
        let mut totals = Totals::default();
        for (changed_ns, published_ns, acknowledged_ns) in
            [(0, 500_000, 1_000_000), (0, 0, 1_000_001), (5, 4, 3), (0, 1, 11_000_000_000)]
        {
            totals.add(&Event::Acknowledged {
                vm: "a".into(),
                generation: Generation(1),
                changed_ns,
                published_ns,
                acknowledged_ns,
            });
        }
        assert_eq!((totals.update.counts[..2].to_vec(), totals.update.counts[13]), (vec![2, 1], 1));
        assert_eq!((totals.update.count(), totals.acknowledge.count()), (4, 4));
        assert!((totals.update.sum_s - 11.002_000_001).abs() < 1e-9, "{}", totals.update.sum_s);
        assert!(totals.vms.is_empty(), "latencies are the host's");
    }
}
