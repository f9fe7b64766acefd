//! Which CPUs of a node the vCPUs of a guest node get.

use std::collections::BTreeMap;
use vnuma_model::CpuId;

/// A core with a CPU that is free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FreeCore {
    /// Its last-level cache.
    pub cache: u32,
    /// Its free CPUs, at least one.
    pub cpus: Vec<CpuId>,
    /// Nobody uses any of its CPUs.
    pub whole: bool,
}

/// Chooses `count` CPUs, or all if there are fewer, in rising order.
///
/// 1. One CPU of each core that nobody uses. Of the last-level caches the smallest that suffices is filled, so that vCPUs share
///    one and larger ones stay whole.
/// 2. If such cores are too few: the siblings of those, which no other VM uses.
/// 3. Last, CPUs whose siblings somebody else uses.
pub fn pick(cores: &[FreeCore], count: u32) -> Vec<CpuId> {
    let count = count as usize;
    let mut caches = BTreeMap::<u32, Vec<&FreeCore>>::new();
    for core in cores.iter().filter(|core| core.whole) {
        caches.entry(core.cache).or_default().push(core);
    }
    let mut own: Vec<&FreeCore> = Vec::new();
    while own.len() < count {
        let left = count - own.len();
        let sizes = || caches.iter().map(|(cache, cores)| (cores.len(), *cache));
        let fitting = sizes().filter(|(size, _)| *size >= left).min();
        let largest = || sizes().max_by_key(|&(size, cache)| (size, std::cmp::Reverse(cache)));
        let Some((_, cache)) = fitting.or_else(largest) else { break };
        own.extend(caches.remove(&cache).unwrap_or_default().into_iter().take(left));
    }
    let first = own.iter().map(|core| core.cpus[0]);
    let siblings = own.iter().flat_map(|core| core.cpus[1..].iter().copied());
    let shared = cores.iter().filter(|core| !core.whole).flat_map(|core| core.cpus.iter().copied());
    let mut chosen: Vec<CpuId> = first.chain(siblings).chain(shared).take(count).collect();
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cores of two CPUs, `n` and `n + 100`; `whole` ones are free, of the others only the second CPU is.
    fn core(cpu: u32, cache: u32, whole: bool) -> FreeCore {
        FreeCore { cache, cpus: if whole { vec![cpu, cpu + 100] } else { vec![cpu + 100] }, whole }
    }

    #[test]
    fn the_smallest_cache_that_suffices_is_filled() {
        let cores =
            [core(0, 0, true), core(1, 0, true), core(2, 0, true), core(3, 3, true), core(4, 3, true)];
        assert_eq!(pick(&cores, 2), [3, 4]);
        assert_eq!(pick(&cores, 3), [0, 1, 2]);
        assert_eq!(
            pick(&cores, 4),
            [0, 1, 2, 3],
            "the largest, then the smallest that suffices for the rest"
        );
        assert_eq!(pick(&cores, 0), [] as [u32; 0]);
        let equal = [core(0, 0, true), core(1, 0, true), core(2, 2, true), core(3, 2, true)];
        assert_eq!(pick(&equal, 3), [0, 1, 2], "of equally large ones the first");
    }

    #[test]
    fn siblings_of_its_own_come_before_those_of_others() {
        let cores = [core(0, 0, false), core(1, 0, true), core(2, 0, true)];
        assert_eq!(pick(&cores, 2), [1, 2]);
        assert_eq!(pick(&cores, 4), [1, 2, 101, 102]);
        assert_eq!(pick(&cores, 5), [1, 2, 100, 101, 102]);
        assert_eq!(pick(&cores, 9).len(), 5, "all there are");
    }
}
