//! What `vprobe` remembers of each vCPU: smoothed figures, and what it may still be moved.

use super::{
    super::{Counts, Input, VcpuKey, VcpuSample},
    Analysis, Bounds, Settings, Standing,
};
use crate::scheduling::analyzer::{VcpuType, vcpu_type};

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
/// A vCPU that waits for this share of a period is hungry.
const HUNGRY: f64 = 0.25;
/// Nodes whose accesses are priced one by one.
pub(super) const HOT: usize = 4;
/// Nodes whose accesses are looked at together.
const BLOCK: usize = 8;

/// Periods that are saved up, to be spent on moves: a token bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bucket(u32);

impl Bucket {
    pub(super) fn new(periods: u32) -> Self {
        Self(periods)
    }

    /// A period has passed. Returns what is saved now.
    pub(super) fn refill(&mut self, full: u32) -> u32 {
        self.0 = (self.0 + 1).min(full);
        self.0
    }

    pub(super) fn holds(&self, price: u32) -> bool {
        self.0 >= price
    }

    pub(super) fn take(&mut self, price: u32) {
        self.0 = self.0.saturating_sub(price);
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
    /// Its figures are known.
    pub(super) known: bool,
    /// It is LLC-T or LLC-FI, or misses a lot for what it refers to.
    pub(super) uses_memory: bool,
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
}

impl History {
    fn new(key: VcpuKey, settings: &Settings) -> Self {
        Self {
            key,
            credit: Bucket::new(settings.burst * settings.rest_periods),
            hungry: 0,
            known: false,
            uses_memory: false,
            calm: 0,
            age: 0,
            instructions: 0.0,
            misses: 0.0,
            reuse: 0.0,
            hot: [(0, 0.0); HOT],
            elsewhere: 0.0,
        }
    }

    pub(super) fn is_calm(&self) -> bool {
        self.known && self.calm >= CALM
    }

    /// A period has ended. `accesses` are its own, by node, per period, smoothed.
    fn observe(
        &mut self,
        settings: &Settings,
        bounds: Bounds,
        (sample, wait_share): (&VcpuSample, f64),
        accesses: &mut [f32],
    ) {
        self.credit.refill(settings.burst * settings.rest_periods);
        self.hungry = if wait_share >= HUNGRY { self.hungry.saturating_add(1) } else { 0 };
        match &sample.counts {
            Some(counts) if counts.instructions > 0 => self.count(bounds, counts, accesses),
            // It did not run: nothing is new.
            Some(_) => {}
            None => {
                self.age += 1;
                self.known &= self.age < FORGOTTEN;
            }
        }
    }

    fn count(&mut self, bounds: Bounds, counts: &Counts, accesses: &mut [f32]) {
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
        for (old, &new) in counted.iter_mut().zip(&counts.accesses) {
            smooth(old, float(new));
        }
        unknown.fill(0.0);
        let per_thousand = |count: f64| count / counts.instructions as f64 * 1000.0;
        let pressure = per_thousand(counts.llc_references as f64);
        let lower = if self.uses_memory { RELEASE } else { 1.0 };
        let bounds = Bounds { low: bounds.low * lower, high: bounds.high };
        let intensive = vcpu_type(pressure, bounds) != VcpuType::Friendly
            || per_thousand(counts.llc_misses as f64) >= MISSES * lower;
        self.calm = if intensive { 0 } else { self.calm.saturating_add(1) };
        self.uses_memory = intensive || (self.uses_memory && self.calm < CALM);
        if self.uses_memory {
            self.find_hot(accesses);
        }
    }

    /// The nodes that most accesses go to.
    fn find_hot(&mut self, accesses: &[f32]) {
        let mut hot = [(0_u16, 0.0_f32); HOT];
        let mut total = 0.0;
        for (block, counts) in accesses.as_chunks::<BLOCK>().0.iter().enumerate() {
            total = counts.iter().fold(total, |total, count| total + count);
            // Most blocks have none that counts, which is seen without a branch for each.
            let least = hot[HOT - 1].1;
            if !counts.iter().fold(false, |any, &count| any | (count > least)) {
                continue;
            }
            for (node, &count) in (block * BLOCK..).zip(counts) {
                if count > hot[HOT - 1].1 {
                    let at = hot.iter().take_while(|(_, more)| count <= *more).count();
                    hot[at..].rotate_right(1);
                    hot[at] = (node as u16, count);
                }
            }
        }
        self.hot = hot;
        self.elsewhere = (total - hot.iter().map(|(_, count)| count).sum::<f32>()).max(0.0);
    }
}

/// A count below 2^52 as a float; of a larger one, which no period has, the lower bits. It is what `as f32` gives, for
/// which x86-64 has no instruction and needs a branch each, while these are done for several counts at once.
fn float(count: u64) -> f32 {
    const LIMIT: f64 = (1_u64 << 52) as f64;
    // The lower bits of a number from 2^52 to 2^53 are those of the integer.
    let bits = (count & ((1 << 52) - 1)) | LIMIT.to_bits();
    (f64::from_bits(bits) - LIMIT) as f32
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

impl Histories {
    /// A period has ended. vCPUs that are gone are forgotten, new ones begin.
    pub(super) fn observe(
        &mut self,
        settings: &Settings,
        bounds: Bounds,
        input: &Input<'_>,
        analysis: &[Analysis],
    ) {
        let same = self.row == Self::row(input)
            && self.vcpus.len() == input.vcpus.len()
            && self.vcpus.iter().zip(input.vcpus).all(|(known, vcpu)| known.key == vcpu.key);
        if !same {
            self.follow(settings, input);
        }
        for (at, (history, vcpu)) in self.vcpus.iter_mut().zip(input.vcpus).enumerate() {
            let accesses = &mut self.accesses[at * self.row..][..self.row];
            history.observe(settings, bounds, (vcpu, vcpu.wait_share(input.period_ns)), accesses);
            if analysis[at].standing != Standing::Free {
                history.hungry = 0;
            }
        }
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
