//! Which way of doing a thing is in use, of those that there are: each source publishes it here, and the API has it from here.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use vnuma_api::{Counters, PlaceSetting};
use vnuma_model::Capability;
use vnuma_observe::location::{BPF, monotonic_ns};

#[derive(Debug, Default)]
struct Published {
    /// By name.
    capabilities: BTreeMap<String, Capability>,
    /// Of these two the numbers only.
    counters: Counters,
    places: PlaceSetting,
}

/// What is in use, and how well it works.
#[derive(Clone, Debug, Default)]
pub(super) struct Capabilities(Arc<Mutex<Published>>);

impl Capabilities {
    fn lock(&self) -> MutexGuard<'_, Published> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This is so now.
    pub(super) fn publish(&self, now: Capability) {
        let all = &mut self.lock().capabilities;
        let before = all.get(&now.name).filter(|before| before.in_use == now.in_use);
        let since_ns = before.map_or_else(monotonic_ns, |before| before.since_ns);
        all.insert(now.name.clone(), Capability { since_ns, ..now });
    }

    /// These are not done any more.
    pub(super) fn withdraw(&self, names: &[&str]) {
        self.lock().capabilities.retain(|name, _| !names.contains(&name.as_str()));
    }

    /// Changes the numbers of counters.
    pub(super) fn note_counters(&self, change: impl FnOnce(&mut Counters)) {
        change(&mut self.lock().counters);
    }

    /// These are the numbers of places now.
    pub(super) fn note_places(&self, places: PlaceSetting) {
        self.lock().places = places;
    }

    pub(super) fn all(&self) -> Vec<Capability> {
        self.lock().capabilities.values().cloned().collect()
    }

    /// What is not done has no name.
    pub(super) fn of(&self, name: &str) -> Capability {
        self.lock().capabilities.get(name).cloned().unwrap_or_default()
    }

    fn why_not(&self, name: &str, way: &str) -> Option<String> {
        self.of(name).why_not(way).map(str::to_owned)
    }

    /// The numbers of counters, and what is in use for them.
    pub(super) fn counters(&self) -> Counters {
        let source = self.of(Capability::COUNTERS);
        let numbers = self.lock().counters.clone();
        Counters {
            source: source.in_use,
            passed_over: source.passed_over.iter().map(ToString::to_string).collect(),
            samples: self.of(Capability::SAMPLES).in_use == IBS,
            why_no_samples: self.why_not(Capability::SAMPLES, IBS),
            read_by: self.of(Capability::READINGS).in_use,
            why_files: [Capability::READINGS, Capability::IDLE_TIMES]
                .into_iter()
                .find_map(|name| self.why_not(name, BPF)),
            why_no_idle_times: self.why_not(Capability::IDLE_TIMES, FILES),
            why_no_groups: self.why_not(Capability::GROUPS, GROUPS),
            ..numbers
        }
    }

    /// The same of places.
    pub(super) fn places(&self) -> PlaceSetting {
        let why_not = self.why_not(Capability::PLACES, PlaceSetting::SCHEDULER);
        let (mechanism, numbers) = (self.of(Capability::PLACES).in_use, self.lock().places.clone());
        PlaceSetting { mechanism, why_not, ..numbers }
    }
}

/// Names of ways: files of the kernel, samples of AMD's CPUs, control groups.
pub(super) const FILES: &str = "files";
pub(super) const IBS: &str = "ibs";
pub(super) const GROUPS: &str = "cgroups";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_in_use_since_it_was_published_first() {
        let all = Capabilities::default();
        let of = |problem: Option<&str>| Capability::either(Capability::READINGS, [BPF, FILES], problem);
        all.publish(of(None));
        let first = all.of(Capability::READINGS);
        assert!(first.since_ns > 0 && first == Capability { since_ns: first.since_ns, ..of(None) });
        all.publish(of(None));
        assert_eq!(all.of(Capability::READINGS), first);
        while monotonic_ns() == first.since_ns {}
        all.publish(of(Some("no BTF")));
        let second = all.of(Capability::READINGS);
        assert!(second.since_ns > first.since_ns, "{second:?}");
        all.publish(of(Some("no symbols")));
        let third = all.of(Capability::READINGS);
        assert_eq!((third.since_ns, third.why_not(BPF)), (second.since_ns, Some("no symbols")));
        all.withdraw(&[Capability::READINGS]);
        assert_eq!(all.all(), []);
    }
}
