//! From the windows of a workload to what an operation takes.
//!
//! Of a workload by the kernel three things are taken off that go by the clock: the spins of the thread that computes when the workload
//! waits, the kernels' work for each interrupt of the server's timer (both by the baseline), and reads of registers, which are statistics
//! of the card's driver. What remains has two parts. The waits of an operation, for caches, memory and registers, are what the place of a VM
//! changes, and repeat. Its instructions do not depend on the place, but on how fast the second server and the emulator are at that moment;
//! so the median of all configurations has to do for each of them, and what was found under each is told beside it.

use crate::{
    committed::goals,
    raw::{Baseline, Cell, Spun, Vcpu},
};
use vnuma_bench_common::stats::{Samples, median};
use vnuma_lab_pricing::{CounterProfile, Counts, Prices, price};

/// That are an operation where a workload does not count its own.
const INSTRUCTIONS: u64 = 1000;

/// What was found at one spot.
#[derive(Clone, Debug)]
pub struct Figures {
    pub cycles_per_op: f64,
    /// The least and the most of a window, by that.
    pub low: f64,
    pub high: f64,
    pub fewest: u64,
    /// The least share of a window of the writes to registers that the workload's vCPU made.
    pub kept: f64,
    /// Its own, and their standard error.
    pub instructions: f64,
    pub error: f64,
    /// Accesses of an operation: to memory, and to registers; those that leave the node, and all.
    pub dram: (f64, f64),
    pub mmio: (f64, f64),
    pub reads: f64,
    pub writes: f64,
    pub cpu_share: f64,
}

/// Of the workload's vCPU in a window. The others do regular work only, or something else; the disk has a queue and an interrupt for
/// each vCPU.
struct Window<'a> {
    operations: u64,
    vcpu: &'a Vcpu,
    elapsed_ns: u64,
    /// Share of the writes to registers that this vCPU made.
    kept: f64,
    /// Of an operation.
    instructions: f64,
    waits: f64,
}

/// Instructions, or cycles that instructions alone take, and cycles that they wait.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    instructions: f64,
    waits: f64,
}

impl Cost {
    fn of(counts: &Counts, prices: &Prices) -> Self {
        let cycles = price(counts, prices);
        Self { instructions: cycles.base, waits: cycles.total - cycles.base }
    }

    /// Without reads of registers.
    fn unread(counts: &Counts, prices: &Prices) -> Self {
        let reads = vec![0; counts.mmio_reads_by_class.len()];
        Self::of(&Counts { mmio_reads_by_class: reads, ..counts.clone() }, prices)
    }
}

/// What is beside a workload on its vCPU.
struct Besides {
    /// Instructions of a spin, which touches no memory.
    spin: f64,
    /// Of kernels, for each interrupt of the server's timer.
    tick: Cost,
}

impl Besides {
    fn of(Baseline { vcpu, spun }: &Baseline, prices: &Prices) -> Self {
        let (spins, ticks) = (spun.spins.max(1) as f64, vcpu.server_ticks.max(1) as f64);
        let all = Cost::unread(&vcpu.counts, prices);
        let kernels = (all.instructions - vcpu.program_cycles as f64) / ticks;
        let tick = Cost { instructions: kernels, waits: all.waits / ticks };
        Self { spin: vcpu.program_cycles as f64 / spins, tick }
    }

    fn taken_off(&self, vcpu: &Vcpu, spun: Spun, prices: &Prices) -> Cost {
        let all = Cost::unread(&vcpu.counts, prices);
        let ticks = vcpu.server_ticks as f64;
        Cost {
            instructions: all.instructions - spun.spins as f64 * self.spin - ticks * self.tick.instructions,
            waits: all.waits - ticks * self.tick.waits,
        }
    }
}

fn windows<'a>(cell: &'a Cell, prices: &'a Prices) -> impl Iterator<Item = Window<'a>> {
    let besides = cell.baseline.as_ref().map(|baseline| Besides::of(baseline, prices));
    cell.windows.iter().filter_map(move |window| {
        let vcpu = window.vcpus.get(cell.guest.cpu)?;
        let operations = window.operations.unwrap_or(vcpu.counts.instructions / INSTRUCTIONS);
        let cost = match (&besides, window.spun) {
            (Some(besides), Some(spun)) => besides.taken_off(vcpu, spun, prices),
            _ => Cost::of(&vcpu.counts, prices),
        };
        // Nothing was done.
        if operations == 0 {
            return None;
        }
        let each = |cycles: f64| cycles / operations as f64;
        let (instructions, waits) = (each(cost.instructions), each(cost.waits));
        let writes = |vcpu: &Vcpu| vcpu.counts.mmio_writes_by_class.iter().sum::<u64>() as f64;
        let all = window.vcpus.iter().map(writes).sum::<f64>();
        let kept = if all > 0.0 { writes(vcpu) / all } else { 1.0 };
        Some(Window { operations, vcpu, elapsed_ns: window.elapsed_ns, kept, instructions, waits })
    })
}

/// Instructions of an operation of a workload by the kernel, of all that was measured of it; none if it is another one.
pub fn common_instructions(cells: &[&Cell], profile: &CounterProfile) -> Option<f64> {
    let prices = profile.prices();
    let by_kernel = cells.iter().filter(|cell| cell.baseline.is_some());
    let all = by_kernel.flat_map(|cell| windows(cell, &prices));
    // What was done elsewhere was not counted.
    median(all.filter(|window| window.kept >= goals::KEPT).map(|window| window.instructions))
}

fn sum(lists: &[&[u64]]) -> (f64, f64) {
    let of = |skip: usize| lists.iter().flat_map(|list| list.iter().skip(skip)).sum::<u64>() as f64;
    (of(1), of(0))
}

impl Figures {
    /// Of all turns at one spot, with these instructions if they are not its own. None if there was a window in which nothing was done.
    pub fn of(turns: &[&Cell], profile: &CounterProfile, common: Option<f64>) -> Option<Self> {
        let prices = profile.prices();
        let all: Vec<Window> = turns.iter().flat_map(|cell| windows(cell, &prices)).collect();
        if all.len() < turns.iter().map(|cell| cell.windows.len()).sum() {
            return None;
        }
        let cost = |window: &Window| common.unwrap_or(window.instructions) + window.waits;
        let costs: Samples = all.iter().map(cost).collect();
        let (cycles_per_op, [least, most]) = (costs.median()?, costs.interval()?);
        let total = |of: fn(&Window) -> u64| all.iter().map(of).sum::<u64>() as f64;
        let operations = total(|window| window.operations);
        let each = |of: fn(&Counts) -> [&[u64]; 2]| {
            let sums = all.iter().map(|window| sum(&of(&window.vcpu.counts)));
            let (far, all) = sums.fold((0.0, 0.0), |(far, all), one| (far + one.0, all + one.1));
            (far / operations, all / operations)
        };
        let of = |by: fn(&Counts) -> &[u64]| {
            all.iter().flat_map(|window| by(&window.vcpu.counts)).sum::<u64>() as f64 / operations
        };
        let (instructions, error) = mean(all.iter().map(|window| window.instructions).collect());
        Some(Self {
            cycles_per_op,
            low: least / cycles_per_op,
            high: most / cycles_per_op,
            kept: all.iter().map(|window| window.kept).fold(1.0, f64::min),
            fewest: all.iter().map(|window| window.operations).min()?,
            instructions,
            error,
            dram: each(|counts| [&counts.dram_by_class, &counts.streamed_by_class]),
            mmio: each(|counts| [&counts.mmio_reads_by_class, &counts.mmio_writes_by_class]),
            reads: of(|counts| &counts.mmio_reads_by_class),
            writes: of(|counts| &counts.mmio_writes_by_class),
            cpu_share: total(|window| window.vcpu.ran_ns) / total(|window| window.elapsed_ns),
        })
    }
}

/// With its standard error, by it.
fn mean(figures: Vec<f64>) -> (f64, f64) {
    let count = figures.len() as f64;
    let mean = figures.iter().sum::<f64>() / count;
    let squares = figures.iter().map(|figure| (figure - mean).powi(2)).sum::<f64>();
    let variance = squares / (count - 1.0).max(1.0);
    (mean, (variance / count).sqrt() / mean)
}
