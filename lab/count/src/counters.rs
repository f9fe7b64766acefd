//! All counters of a thread or of commands at once.

use std::io;
use std::mem::offset_of;

use vnuma_abi_lab_counters::{
    Cpu, EVENT_CYCLES, EVENT_DRAM, EVENT_MMIO_READ, EVENT_MMIO_WRITE, EVENT_SECOND_DRAM,
    EVENT_SECOND_STREAMED, EVENT_STREAMED, Header,
};
use vnuma_lab_pricing::{Counts, SecondLlc};

use crate::perf::{Counter, Event, Mode, Target};

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Measured {
    /// Events.
    pub counts: Counts,
    /// Modelled cycles as the kernel has them, with the prices of the server's profile.
    pub kernel_cycles: u64,
    /// Nanoseconds of guest time on a CPU.
    pub task_clock_ns: u64,
}

/// Counters that run.
#[derive(Debug)]
pub struct CounterSet {
    plain: Vec<Counter>,
    /// Of the second LLC, if there is one: misses, accesses to memory that are not streamed, and those that are.
    second: Option<[Vec<Counter>; 3]>,
    by_class: [Vec<Counter>; 4],
    by_node: [Vec<Counter>; 4],
}

/// The raw event of a word of [`Cpu`], from its offset in bytes.
const fn word(offset: usize) -> Event {
    Event::Raw((offset / 8) as u64)
}

/// In the order of [`CounterSet::read`].
const PLAIN: [Event; 11] = [
    word(offset_of!(Cpu, instructions)),
    word(offset_of!(Cpu, base_cycles)),
    word(offset_of!(Cpu, loads)),
    word(offset_of!(Cpu, stores)),
    word(offset_of!(Cpu, llc_references)),
    word(offset_of!(Cpu, llc_streamed)),
    word(offset_of!(Cpu, llc_misses)),
    word(offset_of!(Cpu, llc_misses_streamed)),
    word(offset_of!(Cpu, mmio_other)),
    Event::Raw(EVENT_CYCLES),
    Event::TaskClock,
];

/// The same of each.
fn each<A, B, const N: usize>(of: [A; N], one: impl Fn(A) -> io::Result<Vec<B>>) -> io::Result<[Vec<B>; N]> {
    let mut all = std::array::from_fn(|_| Vec::new());
    for (to, from) in all.iter_mut().zip(of) {
        *to = one(from)?;
    }
    Ok(all)
}

impl CounterSet {
    /// Starts all counters of the server with that header.
    pub fn open(header: &Header, target: Target, mode: Mode) -> io::Result<Self> {
        let (classes, nodes) = (u64::from(header.nr_classes), header.nr_nodes as usize);
        let open = |event| Counter::open(event, target, mode);
        let classes =
            |first: u64| (0..classes).map(|class| open(Event::Raw(first + class))).collect::<io::Result<_>>();
        let nodes = |offset: usize| (0..nodes).map(|node| open(word(offset + node * 8))).collect();
        let misses = [offset_of!(Cpu, second_misses), offset_of!(Cpu, second_misses_streamed)];
        let second = || {
            let misses = misses.into_iter().map(|offset| open(word(offset))).collect::<io::Result<_>>()?;
            Ok::<_, io::Error>([misses, classes(EVENT_SECOND_DRAM)?, classes(EVENT_SECOND_STREAMED)?])
        };
        Ok(Self {
            second: (header.second_sets > 0).then(second).transpose()?,
            by_class: each([EVENT_DRAM, EVENT_STREAMED, EVENT_MMIO_READ, EVENT_MMIO_WRITE], classes)?,
            by_node: each(
                [
                    offset_of!(Cpu, dram),
                    offset_of!(Cpu, dram_streamed),
                    offset_of!(Cpu, mmio_read),
                    offset_of!(Cpu, mmio_write),
                ],
                nodes,
            )?,
            plain: PLAIN.into_iter().map(open).collect::<io::Result<_>>()?,
        })
    }

    /// What was counted up to now.
    pub fn read(&self) -> io::Result<Measured> {
        let values =
            |counters: &[Counter]| counters.iter().map(Counter::read).collect::<io::Result<Vec<_>>>();
        // The plain ones were started last and are read first: reading costs accesses itself.
        let plain = values(&self.plain)?;
        let lists = |of: &[Vec<Counter>; 4]| each([0, 1, 2, 3], |list: usize| values(&of[list]));
        let [dram_by_class, streamed_by_class, mmio_reads_by_class, mmio_writes_by_class] =
            lists(&self.by_class)?;
        let [dram_by_node, streamed_by_node, mmio_reads_by_node, mmio_writes_by_node] = lists(&self.by_node)?;
        let second = |[misses, dram, streamed]: &[Vec<Counter>; 3]| {
            let misses = values(misses)?;
            Ok::<_, io::Error>(SecondLlc {
                llc_misses: misses[0],
                llc_misses_streamed: misses[1],
                dram_by_class: values(dram)?,
                streamed_by_class: values(streamed)?,
            })
        };
        Ok(Measured {
            counts: Counts {
                instructions: plain[0],
                base_cycles: plain[1],
                loads: plain[2],
                stores: plain[3],
                llc_references: plain[4],
                llc_streamed: plain[5],
                llc_misses: plain[6],
                llc_misses_streamed: plain[7],
                mmio_other: plain[8],
                dram_by_class,
                streamed_by_class,
                dram_by_node,
                streamed_by_node,
                mmio_reads_by_class,
                mmio_writes_by_class,
                mmio_reads_by_node,
                mmio_writes_by_node,
                second: self.second.as_ref().map(second).transpose()?,
            },
            kernel_cycles: plain[9],
            task_clock_ns: plain[10],
        })
    }
}

/// The sum of several threads' measurements.
pub fn sum(parts: &[Measured]) -> Measured {
    let add = |to: &mut Vec<u64>, from: &[u64]| {
        to.resize(to.len().max(from.len()), 0);
        to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
    };
    let mut total = Measured::default();
    for Measured { counts, kernel_cycles, task_clock_ns } in parts {
        let to = &mut total.counts;
        to.instructions += counts.instructions;
        to.base_cycles += counts.base_cycles;
        to.loads += counts.loads;
        to.stores += counts.stores;
        to.llc_references += counts.llc_references;
        to.llc_streamed += counts.llc_streamed;
        to.llc_misses += counts.llc_misses;
        to.llc_misses_streamed += counts.llc_misses_streamed;
        to.mmio_other += counts.mmio_other;
        add(&mut to.dram_by_class, &counts.dram_by_class);
        add(&mut to.streamed_by_class, &counts.streamed_by_class);
        add(&mut to.dram_by_node, &counts.dram_by_node);
        add(&mut to.streamed_by_node, &counts.streamed_by_node);
        add(&mut to.mmio_reads_by_class, &counts.mmio_reads_by_class);
        add(&mut to.mmio_writes_by_class, &counts.mmio_writes_by_class);
        add(&mut to.mmio_reads_by_node, &counts.mmio_reads_by_node);
        add(&mut to.mmio_writes_by_node, &counts.mmio_writes_by_node);
        if let Some(second) = &counts.second {
            to.second = Some(to.second.as_ref().map_or_else(|| second.clone(), |sum| sum.sum(second)));
        }
        total.kernel_cycles += kernel_cycles;
        total.task_clock_ns += task_clock_ns;
    }
    total
}

/// What was counted between two readings.
pub fn difference(before: &Measured, after: &Measured) -> Measured {
    let minus = |a: &[u64], b: &[u64]| a.iter().zip(b).map(|(a, b)| a.saturating_sub(*b)).collect();
    let (b, a) = (&before.counts, &after.counts);
    Measured {
        counts: Counts {
            instructions: a.instructions.saturating_sub(b.instructions),
            base_cycles: a.base_cycles.saturating_sub(b.base_cycles),
            loads: a.loads.saturating_sub(b.loads),
            stores: a.stores.saturating_sub(b.stores),
            llc_references: a.llc_references.saturating_sub(b.llc_references),
            llc_streamed: a.llc_streamed.saturating_sub(b.llc_streamed),
            llc_misses: a.llc_misses.saturating_sub(b.llc_misses),
            llc_misses_streamed: a.llc_misses_streamed.saturating_sub(b.llc_misses_streamed),
            mmio_other: a.mmio_other.saturating_sub(b.mmio_other),
            dram_by_class: minus(&a.dram_by_class, &b.dram_by_class),
            streamed_by_class: minus(&a.streamed_by_class, &b.streamed_by_class),
            dram_by_node: minus(&a.dram_by_node, &b.dram_by_node),
            streamed_by_node: minus(&a.streamed_by_node, &b.streamed_by_node),
            mmio_reads_by_class: minus(&a.mmio_reads_by_class, &b.mmio_reads_by_class),
            mmio_writes_by_class: minus(&a.mmio_writes_by_class, &b.mmio_writes_by_class),
            mmio_reads_by_node: minus(&a.mmio_reads_by_node, &b.mmio_reads_by_node),
            mmio_writes_by_node: minus(&a.mmio_writes_by_node, &b.mmio_writes_by_node),
            second: a.second.as_ref().zip(b.second.as_ref()).map(|(a, b)| a.since(b)),
        },
        kernel_cycles: after.kernel_cycles.saturating_sub(before.kernel_cycles),
        task_clock_ns: after.task_clock_ns.saturating_sub(before.task_clock_ns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(factor: u64) -> Measured {
        Measured {
            counts: Counts {
                instructions: 10 * factor,
                llc_misses: 3 * factor,
                dram_by_class: vec![factor, 2 * factor],
                dram_by_node: vec![3 * factor],
                mmio_reads_by_class: vec![factor, 5 * factor],
                mmio_writes_by_class: vec![2 * factor, 6 * factor],
                mmio_reads_by_node: vec![6 * factor],
                mmio_writes_by_node: vec![8 * factor],
                second: Some(SecondLlc {
                    llc_misses: 4 * factor,
                    llc_misses_streamed: factor,
                    dram_by_class: vec![factor, 2 * factor],
                    streamed_by_class: vec![factor, 0],
                }),
                ..Counts::default()
            },
            kernel_cycles: 7 * factor,
            task_clock_ns: 5 * factor,
        }
    }

    #[test]
    fn threads_add_up_and_readings_subtract() {
        assert_eq!(sum(&[measured(1), measured(4)]), measured(5));
        assert_eq!(difference(&measured(2), &measured(9)), measured(7));
        assert_eq!(sum(&[]), Measured::default());
    }
}
