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
    let add = |total: Measured, part: &Measured| Measured {
        counts: total.counts.sum(&part.counts),
        kernel_cycles: total.kernel_cycles + part.kernel_cycles,
        task_clock_ns: total.task_clock_ns + part.task_clock_ns,
    };
    parts.iter().fold(Measured::default(), add)
}

/// What was counted between two readings.
pub fn difference(before: &Measured, after: &Measured) -> Measured {
    Measured {
        counts: after.counts.since(&before.counts),
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
