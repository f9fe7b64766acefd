//! What a run has shown.

use crate::{
    options::{Arguments, Mode, Transport},
    programs::{Program, Seen},
};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use vnuma_dsm_node::{Faults, Stats};

/// Pages that the report lists, and those that it prints.
const LISTED: usize = 100;
const PRINTED: usize = 10;

/// What one node has done.
#[derive(Serialize, Deserialize)]
pub struct Part {
    /// From the first barrier to the last.
    pub seconds: f64,
    /// Threads of the program.
    pub threads: u8,
    /// Of their time, waiting for other nodes with nothing to do.
    pub idle_s: f64,
    /// Bytes that the program has read or written, of a program that measures that.
    pub moved_bytes: Option<u64>,
    /// The cut that it went on from when a node was lost.
    pub resumed_from: Option<u64>,
    pub guest: Option<Seen>,
    pub stats: Stats,
}

/// Where the time of all nodes' programs went, under the names of GiantVM's figure 7. Its `QEMU`, `KVM` and `Router` belong to a VM:
/// what KVM and this program do for the guest of `guest` counts as the guest's.
#[derive(Serialize)]
pub struct Time {
    /// The program ran.
    pub guest_s: f64,
    /// It waited for pages.
    pub dsm_s: f64,
    /// It waited for other nodes, and knew it.
    pub idle_s: f64,
}

/// A page and its faults, on all nodes.
#[derive(Serialize)]
pub struct Page {
    pub page: u64,
    pub faults: u64,
    /// The share of all faults that are on this page and those before it.
    pub cumulative: f64,
}

#[derive(Serialize)]
pub struct Outcome {
    pub program: Program,
    pub nodes: u8,
    pub transport: Transport,
    pub mode: Mode,
    pub network_namespaces: bool,
    /// The slowest node.
    pub seconds: f64,
    pub mib_per_s: Option<f64>,
    /// Nodes that were lost, and the cut that the others went on from last.
    pub lost_nodes: Vec<u8>,
    pub resumed_from: Option<u64>,
    pub guest: Option<Seen>,
    pub time: Time,
    pub hottest: Vec<Page>,
    pub stats: Stats,
}

impl Outcome {
    pub fn new(arguments: &Arguments, network_namespaces: bool, lost_nodes: Vec<u8>, parts: &[Part]) -> Self {
        let mut stats = Stats::default();
        parts.iter().for_each(|part| stats.merge(&part.stats));
        stats.touches.sort_by_key(|touch| touch.at_ns);
        let seconds = parts.iter().map(|part| part.seconds).fold(0.0, f64::max);
        let total: f64 = parts.iter().map(|part| part.seconds * f64::from(part.threads)).sum();
        let idle_s: f64 = parts.iter().map(|part| part.idle_s).sum();
        let dsm_s = (stats.reads.waited_ns + stats.writes.waited_ns) as f64 / 1e9;
        let moved: Option<u64> = parts.iter().map(|part| part.moved_bytes).sum();
        Self {
            program: arguments.program,
            nodes: arguments.nodes,
            transport: arguments.transport(),
            mode: arguments.mode,
            network_namespaces,
            seconds,
            mib_per_s: moved.map(|bytes| bytes as f64 / f64::from(1 << 20) / seconds),
            lost_nodes,
            resumed_from: parts.iter().filter_map(|part| part.resumed_from).max(),
            guest: seen(parts),
            time: Time { guest_s: (total - idle_s - dsm_s).max(0.0), dsm_s, idle_s },
            hottest: hottest(&stats),
            stats,
        }
    }

    pub fn print(&self, arguments: &Arguments) -> Result<()> {
        if arguments.json {
            println!("{}", serde_json::to_string_pretty(self)?);
            return Ok(());
        }
        let program = serde_json::to_value(self.program)?;
        let program = program.as_str().unwrap_or_default();
        println!("{program} on {} nodes: right, {:.3} s", self.nodes, self.seconds);
        if let Some(cut) = self.resumed_from {
            println!("nodes {:?} were lost; the others went on from cut {cut}", self.lost_nodes);
        }
        if let Some(rate) = self.mib_per_s {
            println!("{rate:.1} MiB/s");
        }
        if let Some(Seen { vcpus, moves, dirty_logs, pins }) = self.guest {
            println!(
                "{vcpus} vCPUs, {moves} moves to another node; {dirty_logs} logs of dirty pages were right; {pins} pins"
            );
        }
        if arguments.stats {
            self.print_stats();
        }
        Ok(())
    }

    fn print_stats(&self) {
        let Self { stats, time, .. } = self;
        let Time { guest_s, dsm_s, idle_s } = *time;
        let whole = (guest_s + dsm_s + idle_s).max(f64::MIN_POSITIVE);
        for (name, part) in [("guest", guest_s), ("DSM", dsm_s), ("idle", idle_s)] {
            println!("{name:<6} {:10.1} ms {:5.1} %", part * 1000.0, part / whole * 100.0);
        }
        let ms = |ns: u64| ns as f64 / 1e6;
        let phases = &stats.phases;
        println!(
            "threads of the DSM: protocol {:.1} ms, pages {:.1} ms, network {:.1} ms, asleep {:.1} ms",
            ms(phases.protocol_ns),
            ms(phases.pages_ns),
            ms(phases.network_ns),
            ms(phases.wait_ns)
        );
        let mean = |faults: &Faults| faults.waited_ns as f64 / 1000.0 / faults.count.max(1) as f64;
        for (name, faults, found) in
            [("read", &stats.reads, &stats.found_by_reads), ("write", &stats.writes, &stats.found_by_writes)]
        {
            println!(
                "{name} faults: {}, mean {:.1} us; the owner was the manager {}, where the hint said {}, elsewhere {}",
                faults.count,
                mean(faults),
                found.manager,
                found.hint,
                found.elsewhere
            );
        }
        println!(
            "messages: {}, {} bytes; {} pages and {} differences",
            stats.messages, stats.bytes, stats.whole_pages, stats.deltas
        );
        for Page { page, faults, cumulative } in self.hottest.iter().take(PRINTED) {
            println!("page {page}: {faults} faults, {:.1} % with those before", cumulative * 100.0);
        }
    }
}

fn seen(parts: &[Part]) -> Option<Seen> {
    let mut all = Seen::default();
    parts.iter().map(|part| part.guest).collect::<Option<Vec<_>>>()?.iter().for_each(|one| all.merge(one));
    Some(all)
}

fn hottest(stats: &Stats) -> Vec<Page> {
    let all = stats.pages.values().sum::<u64>().max(1) as f64;
    let mut seen = 0;
    let page = |(page, faults)| {
        seen += faults;
        Page { page, faults, cumulative: seen as f64 / all }
    };
    stats.hottest(LISTED).into_iter().map(page).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn the_hottest_pages_come_first_with_their_share() {
        let stats = Stats { pages: HashMap::from([(3, 10), (9, 60), (4, 30)]), ..Stats::default() };
        let list: Vec<_> =
            hottest(&stats).iter().map(|page| (page.page, page.faults, page.cumulative)).collect();
        assert_eq!(list, [(9, 60, 0.6), (4, 30, 0.9), (3, 10, 1.0)]);
    }
}
