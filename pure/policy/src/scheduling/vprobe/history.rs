//! What `vprobe` remembers of each vCPU: smoothed figures, and what it may still be moved.

use super::{
    super::{Counts, Input, Place, Reach, Standing, VcpuKey, VcpuSample, WAITS, sample::Sums},
    Analysis, Bounds, Settings,
};
use crate::{
    scheduling::analyzer::{ALPHA, VcpuType, vcpu_type},
    world::VmId,
};

/// Share of the new period in a smoothed figure.
const NEW: f32 = 0.5;
/// Periods without counters after which nothing is known any more.
const FORGOTTEN: u32 = 10;
/// Periods in a row without much use of memory after which a vCPU is calm.
const CALM: u32 = 3;
/// A vCPU stays memory-intensive until its pressure is below this share of the bound.
const RELEASE: f64 = 0.8;
/// Misses per thousand instructions from which on the place of memory matters, whatever the pressure.
const MISSES: f64 = 0.5;
/// References to the cache per second below which no place matters, whatever the pressure: at 100 ns each they are 0.5 % of a
/// CPU, of which a place saves about half. A step takes vnumad half a millisecond. A vCPU that sleeps nearly all the time misses
/// whenever it runs, and steps would cost a good part of what they save.
const REFERENCES: f64 = 50_000.0;
/// A vCPU that waits for this share of a period is hungry.
const HUNGRY: f64 = 0.25;
/// Nodes whose accesses are priced one by one.
pub(super) const HOT: usize = 4;
/// Nodes whose accesses are looked at together.
const BLOCK: usize = 8;

/// Periods that are saved up, to be spent on moves: a token bucket. What could not be waited for is owed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bucket(i64);

impl Bucket {
    pub(super) fn new(periods: u32) -> Self {
        Self(i64::from(periods))
    }

    /// A period has passed. Is it full now?
    pub(super) fn refill(&mut self, full: u32) -> bool {
        self.0 = (self.0 + 1).min(i64::from(full));
        self.0 == i64::from(full)
    }

    pub(super) fn holds(&self, price: u32) -> bool {
        self.0 >= i64::from(price)
    }

    /// Takes the price, or what there is.
    pub(super) fn take(&mut self, price: u32) {
        self.0 = self.0.min(0).max(self.0 - i64::from(price));
    }

    /// Takes the price, whatever there is.
    pub(super) fn owe(&mut self, price: u32) {
        self.0 -= i64::from(price);
    }
}

/// A vCPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct History {
    key: VcpuKey,
    /// Moves that it may still have.
    pub(super) credit: Bucket,
    /// Periods in a row that it has been waiting.
    pub(super) hungry: u32,
    /// It has no place until this VM, beside which it starved, may cause moves again.
    pub(super) gives_way: Option<VmId>,
    /// Its figures are known.
    pub(super) known: bool,
    /// It is LLC-T or LLC-FI, or misses a lot for what it refers to.
    pub(super) uses_memory: bool,
    /// In the last period: a policy might move it.
    pub(super) free: bool,
    /// It ran.
    ran: bool,
    /// It waited for a CPU.
    pub(super) waits: bool,
    /// It was confined to a place.
    pub(super) confined: bool,
    /// Position of its operator's mask.
    pub(super) reach: u32,
    /// The domain where it was, if it counts there.
    pub(super) domain: Option<u32>,
    /// CPU time that was due to it, in CPUs.
    pub(super) demand: f64,
    calm: u32,
    /// Periods since it was counted last.
    age: u32,
    /// Per period, smoothed: instructions and misses.
    pub(super) instructions: f32,
    pub(super) misses: f32,
    /// Share of its references that hit.
    pub(super) reuse: f32,
    /// Nodes that most of its accesses go to, and how many. Kept up to date while it uses memory.
    pub(super) hot: [(u16, f32); HOT],
    /// Accesses to all other nodes. Kept up to date while it uses memory.
    pub(super) elsewhere: f32,
    /// Accesses to all nodes in the last period, as counted.
    pub(super) total: u64,
}

impl History {
    fn new(key: VcpuKey, settings: &Settings) -> Self {
        Self {
            key,
            credit: Bucket::new(settings.burst * settings.rest_periods),
            hungry: 0,
            gives_way: None,
            known: false,
            uses_memory: false,
            free: false,
            ran: false,
            waits: false,
            confined: false,
            reach: 0,
            domain: None,
            demand: 0.0,
            calm: 0,
            age: 0,
            instructions: 0.0,
            misses: 0.0,
            reuse: 0.0,
            hot: [(0, 0.0); HOT],
            elsewhere: 0.0,
            total: 0,
        }
    }

    /// Is it one that is worth a place of its own?
    pub(super) fn is_worth(&self) -> bool {
        self.uses_memory && self.known && self.ran
    }

    pub(super) fn is_calm(&self) -> bool {
        self.known && self.calm >= CALM
    }

    /// Its VM.
    pub(super) fn vm(&self) -> VmId {
        self.key.vm
    }

    /// A period has ended. `accesses` are its own, by node, per period, smoothed.
    fn observe(
        &mut self,
        of: &Period<'_>,
        (sample, seen): (&VcpuSample, &Analysis),
        sums: Sums,
        accesses: &mut [f32],
    ) {
        let Period { settings, input, .. } = *of;
        self.credit.refill(settings.burst * settings.rest_periods);
        self.free = seen.standing == Standing::Free;
        let wait_share = sample.wait_share(input.period_ns);
        self.waits = wait_share >= WAITS;
        self.hungry = if self.free && wait_share >= HUNGRY { self.hungry.saturating_add(1) } else { 0 };
        self.ran = sample.ran_ns > 0;
        self.confined = sample.assigned.is_some();
        self.reach = sample.reach as u32;
        self.demand = sample.demand(input.period_ns);
        self.total = sums.total;
        match &sample.counts {
            Some(counts) if counts.instructions > 0 => {
                self.count(of, counts, (seen.pressure.unwrap_or(0.0), sums), accesses);
            }
            // It did not run: nothing is new.
            Some(_) => {}
            None => {
                self.age += 1;
                self.known &= self.age < FORGOTTEN;
            }
        }
        self.domain = of.domain(sample, self);
    }

    fn count(
        &mut self,
        Period { bounds, least, .. }: &Period<'_>,
        counts: &Counts,
        (pressure, sums): (f64, Sums),
        accesses: &mut [f32],
    ) {
        let weight = if self.known { NEW } else { 1.0 };
        (self.known, self.age) = (true, 0);
        let smooth = |old: &mut f32, new: f32| *old += weight * (new - *old);
        let references = counts.llc_references as f32;
        smooth(&mut self.instructions, counts.instructions as f32);
        smooth(&mut self.misses, counts.llc_misses as f32);
        let hits =
            if references > 0.0 { 1.0 - (counts.llc_misses as f32 / references).min(1.0) } else { 0.0 };
        smooth(&mut self.reuse, hits);
        let (counted, unknown) = accesses.split_at_mut(counts.accesses.len().min(accesses.len()));
        let counted = counted.iter_mut().zip(&counts.accesses);
        // x86-64 makes floats of several integers at once if they are small, as those of nearly all periods are.
        match sums.largest <= i32::MAX as u64 {
            true => counted.for_each(|(old, &new)| smooth(old, new as i32 as f32)),
            false => counted.for_each(|(old, &new)| smooth(old, new as f32)),
        }
        unknown.fill(0.0);
        let lower = if self.uses_memory { RELEASE } else { 1.0 };
        let bounds = Bounds { low: bounds.low * lower, high: bounds.high };
        let often = vcpu_type(pressure, bounds) != VcpuType::Friendly
            || counts.llc_misses as f64 / counts.instructions as f64 * ALPHA >= MISSES * lower;
        let intensive = often && f64::from(references) >= least * lower;
        self.calm = if intensive { 0 } else { self.calm.saturating_add(1) };
        self.uses_memory = intensive || (self.uses_memory && self.calm < CALM);
        if self.uses_memory {
            self.find_hot(accesses);
        }
    }

    /// The nodes that most accesses go to.
    fn find_hot(&mut self, accesses: &[f32]) {
        let mut hot = [(0_u16, 0.0_f32); HOT];
        let mut totals = [0.0; BLOCK];
        for (block, counts) in accesses.as_chunks::<BLOCK>().0.iter().enumerate() {
            let least = hot[HOT - 1].1;
            let mut any = false;
            for (total, &count) in totals.iter_mut().zip(counts) {
                *total += count;
                // Most blocks have none that counts, which is seen without a branch for each.
                any |= count > least;
            }
            if !any {
                continue;
            }
            for (node, &count) in (block * BLOCK..).zip(counts) {
                if count > hot[HOT - 1].1 {
                    let mut at = HOT - 1;
                    while at > 0 && count > hot[at - 1].1 {
                        hot[at] = hot[at - 1];
                        at -= 1;
                    }
                    hot[at] = (node as u16, count);
                }
            }
        }
        self.hot = hot;
        let total: f32 = totals.iter().sum();
        self.elsewhere = (total - hot.iter().map(|(_, count)| count).sum::<f32>()).max(0.0);
    }
}

/// Of all vCPUs, in the order of the last input.
#[derive(Clone, Debug, Default)]
pub(super) struct Histories {
    vcpus: Vec<History>,
    /// Accesses by node, per period, smoothed: a row for each vCPU. It is one vector, as a large host has many.
    accesses: Vec<f32>,
    /// Length of a row: nodes, filled up to a whole block.
    row: usize,
}

/// What is the same for all vCPUs in a period.
struct Period<'a> {
    settings: &'a Settings,
    bounds: Bounds,
    /// [`REFERENCES`] of a period.
    least: f64,
    input: &'a Input<'a>,
    /// The only domain that each mask reaches, if it is one.
    only: Vec<Option<usize>>,
}

impl Period<'_> {
    /// The domain where a vCPU is, if it counts there.
    fn domain(&self, sample: &VcpuSample, history: &History) -> Option<u32> {
        let (reach, only) = (&self.input.reaches[sample.reach], self.only[sample.reach]);
        // One that uses no memory and may go elsewhere makes room by itself.
        if !history.uses_memory && history.free && only.is_none() {
            return None;
        }
        let there = match sample.assigned {
            Some(Place::Cache(domain)) => Some(domain),
            _ => sample.cpu.and_then(|cpu| self.input.machine.domain_of(cpu)),
        };
        // It may still be on a CPU that its mask does not have any more.
        let there = there.filter(|&domain| !history.free || reach.domain(domain)).or(only);
        there.map(|domain| domain as u32)
    }
}

/// Takes in a period.
pub(in crate::scheduling) struct Observer<'a> {
    histories: &'a mut Histories,
    period: Period<'a>,
}

impl Observer<'_> {
    /// What a vCPU did. Each of the input has its turn, in their order.
    pub(in crate::scheduling) fn observe(
        &mut self,
        at: usize,
        sample: &VcpuSample,
        seen: &Analysis,
        sums: Sums,
    ) {
        let Self { histories, period } = self;
        if histories.vcpus[at].key != sample.key {
            histories.follow(period.settings, period.input);
        }
        let accesses = &mut histories.accesses[at * histories.row..][..histories.row];
        histories.vcpus[at].observe(period, (sample, seen), sums, accesses);
    }
}

impl Histories {
    /// A period has ended. vCPUs that are gone are forgotten, new ones begin.
    pub(super) fn begin<'a>(
        &'a mut self,
        settings: &'a Settings,
        bounds: Bounds,
        input: &'a Input<'a>,
    ) -> Observer<'a> {
        if self.row != Self::row(input) || self.vcpus.len() != input.vcpus.len() {
            self.follow(settings, input);
        }
        let only = input.reaches.iter().map(Reach::only_domain).collect();
        let least = REFERENCES * input.period_ns as f64 / 1e9;
        Observer { histories: self, period: Period { settings, bounds, least, input, only } }
    }

    /// Other vCPUs than before. What is known of those that stay is kept.
    fn follow(&mut self, settings: &Settings, input: &Input<'_>) {
        let before = std::mem::take(self);
        self.row = Self::row(input);
        let mut rest = before.vcpus.iter().enumerate().peekable();
        for vcpu in input.vcpus {
            while rest.next_if(|(_, known)| known.key < vcpu.key).is_some() {}
            let known = rest.next_if(|(_, known)| known.key == vcpu.key);
            self.vcpus.push(known.map_or_else(|| History::new(vcpu.key, settings), |(_, known)| *known));
            if let Some((at, _)) = known {
                self.accesses.extend(&before.accesses[at * before.row..][..before.row]);
            }
            self.accesses.resize(self.vcpus.len() * self.row, 0.0);
        }
    }

    fn row(input: &Input<'_>) -> usize {
        input.machine.nodes.len().next_multiple_of(BLOCK)
    }

    pub(super) fn all(&self) -> &[History] {
        &self.vcpus
    }

    pub(super) fn all_mut(&mut self) -> &mut [History] {
        &mut self.vcpus
    }
}
