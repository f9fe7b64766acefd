//! VMs that come and go: when, how large, with which devices.

use crate::server::Model;
use vnuma_random::Rng;

/// Where the sizes are from.
pub const SOURCE: &str = "VM cores and memory of Azure in 2019: the columns `Azure 2019` of the figures `VM Cores Distribution` and `VM \
                          Memory Distribution` in the notebook of AzurePublicDatasetV2 (github.com/Azure/AzurePublicDataset), read to \
                          the pixel";

/// Share of VMs up to so many cores, in 217ths (the height of the figure's column), and the largest of each bucket. The last
/// bucket has no end; 32 is taken.
const CORES: [(u32, u32); 6] = [(126, 2), (50, 4), (26, 8), (1, 12), (12, 24), (2, 32)];
/// The same of memory, GiB; the last one has no end, 128 is taken.
const MEMORY_GIB: [(u32, u32); 6] = [(27, 2), (36, 4), (71, 8), (63, 32), (14, 64), (6, 128)];

/// Assumed: of ten VMs three have a virtual function of a network card, and of ten of those one has functions of two cards.
const WITH_DEVICE: f64 = 0.3;
const WITH_TWO: f64 = 0.1;

/// A VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Vm {
    /// When it is to start.
    pub start: f64,
    /// When it stops.
    pub stop: f64,
    /// vCPUs.
    pub vcpus: u32,
    /// Memory in units of 2 MiB.
    pub units: u64,
    /// Network cards of which it is to have a function.
    pub cards: Vec<usize>,
}

/// Below `count`.
pub fn below(random: &mut Rng, count: usize) -> usize {
    (random.share() * count as f64) as usize
}

fn exponential(random: &mut Rng, mean: f64) -> f64 {
    -mean * (1.0 - random.share()).ln()
}

/// The value at a quantile.
fn at(quantile: f64, buckets: &[(u32, u32)]) -> u32 {
    let all: u32 = buckets.iter().map(|bucket| bucket.0).sum();
    let mut below = 0;
    let found = buckets.iter().find(|bucket| {
        below += bucket.0;
        quantile < f64::from(below) / f64::from(all)
    });
    found.map_or(buckets[buckets.len() - 1].1, |bucket| bucket.1)
}

fn mean(buckets: &[(u32, u32)]) -> f64 {
    let all: u32 = buckets.iter().map(|bucket| bucket.0).sum();
    buckets.iter().map(|&(share, value)| f64::from(share * value)).sum::<f64>() / f64::from(all)
}

/// VMs in the order in which they start. They come at random times (Poisson), and lifetimes are exponential, so long that VMs ask
/// for `load` of the fleet's CPUs. The VM at a quantile of cores is at the same quantile of memory: the figures do not tell
/// how they go together.
pub fn generate(seed: u64, starts: u32, load: f64, model: Model, servers: usize) -> Vec<Vm> {
    let mut random = Rng::new(seed);
    let cpus = f64::from(model.cpus()) * servers as f64;
    let lifetime = load * cpus / mean(&CORES);
    let mut now = 0.0;
    let mut vm = || {
        now += exponential(&mut random, 1.0);
        let size = random.share();
        let cards = match random.share() {
            share if share >= WITH_DEVICE => Vec::new(),
            share if share < WITH_DEVICE * WITH_TWO => (0..crate::server::CARDS).collect(),
            _ => vec![below(&mut random, crate::server::CARDS)],
        };
        Vm {
            start: now,
            stop: now + exponential(&mut random, lifetime),
            vcpus: at(size, &CORES),
            units: u64::from(at(size, &MEMORY_GIB)) << 9,
            cards,
        }
    };
    (0..starts).map(|_| vm()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_figures() {
        let vms = generate(1, 20_000, 1.0, Model::Two, 8);
        let share = |holds: &dyn Fn(&Vm) -> bool| vms.iter().filter(|vm| holds(vm)).count() as f64 / 20_000.0;
        for (holds, expected) in [
            (&(|vm: &Vm| vm.vcpus == 2) as &dyn Fn(&Vm) -> bool, 0.58),
            (&|vm: &Vm| vm.vcpus >= 24, 0.065),
            (&|vm: &Vm| vm.units == 32 << 9, 0.29),
            (&|vm: &Vm| !vm.cards.is_empty(), 0.3),
            (&|vm: &Vm| vm.cards.len() == 2, 0.03),
        ] {
            assert!((share(holds) - expected).abs() < 0.02, "{} instead of {expected}", share(holds));
        }
        assert_eq!(vms, generate(1, 20_000, 1.0, Model::Two, 8), "the seed decides");
        assert!((mean(&CORES) - 4.7).abs() < 0.1);
    }
}
