//! What a node has done, and how long it took.

use crate::touches::Touch;
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};
use vnuma_coherence::NodeId;

/// What a shard's thread is busy with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It sleeps: a thread computes, or an answer is on its way.
    Wait,
    /// The protocol decides.
    Protocol,
    /// Pages are mapped, protected, taken away, copied.
    Pages,
    /// Frames are sent and received.
    Network,
}

/// Time by phase, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phases {
    /// [`Phase::Wait`].
    pub wait_ns: u64,
    /// [`Phase::Protocol`].
    pub protocol_ns: u64,
    /// [`Phase::Pages`].
    pub pages_ns: u64,
    /// [`Phase::Network`].
    pub network_ns: u64,
}

/// What threads waited for pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    /// Pages that threads had to wait for.
    pub count: u64,
    /// From when the fault was read until the page was there.
    pub waited_ns: u64,
    /// The longest of them.
    pub longest_ns: u64,
}

/// Where requests of this node found the owner of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// At the page's manager: two messages in GiantVM's protocol.
    pub manager: u64,
    /// At another node, which the request went to at once.
    pub hint: u64,
    /// At another node, to which the request was passed on.
    pub elsewhere: u64,
}

/// All that a node, or one of its shards, has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Faults of threads that read.
    pub reads: Faults,
    /// Faults of threads that write.
    pub writes: Faults,
    /// Requests that a copy came for; those for prefetch are not counted.
    pub found_by_reads: Found,
    /// Requests that ownership came for, those of readers of migratory pages too.
    pub found_by_writes: Found,
    /// Messages of the protocol that were sent.
    pub messages: u64,
    /// Their bytes, headers included; not those of TLS and TCP.
    pub bytes: u64,
    /// Grants that were sent with a whole page.
    pub whole_pages: u64,
    /// Grants that were sent with a difference.
    pub deltas: u64,
    /// Copies that were dropped.
    pub dropped: u64,
    /// What the threads of the shards did.
    pub phases: Phases,
    /// Faults by page.
    pub pages: HashMap<u64, u64>,
    /// Each page that a thread waited for, if [`Config::list_touches`](crate::Config::list_touches) asks for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub touches: Vec<Touch>,
}

impl Faults {
    pub(crate) fn add(&mut self, waited: Duration) {
        let waited = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        self.count += 1;
        self.waited_ns += waited;
        self.longest_ns = self.longest_ns.max(waited);
    }

    fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.waited_ns += other.waited_ns;
        self.longest_ns = self.longest_ns.max(other.longest_ns);
    }
}

impl Found {
    fn merge(&mut self, other: &Self) {
        self.manager += other.manager;
        self.hint += other.hint;
        self.elsewhere += other.elsewhere;
    }
}

impl Stats {
    /// A request for a page was sent to `asked`, and `owner` answered it.
    pub(crate) fn found(&mut self, write: bool, manager: NodeId, asked: NodeId, owner: NodeId) {
        let found = if write { &mut self.found_by_writes } else { &mut self.found_by_reads };
        *match (owner == manager, owner == asked) {
            (true, _) => &mut found.manager,
            (false, true) => &mut found.hint,
            (false, false) => &mut found.elsewhere,
        } += 1;
    }

    /// Adds what another shard, or node, has done.
    pub fn merge(&mut self, other: &Self) {
        self.reads.merge(&other.reads);
        self.writes.merge(&other.writes);
        self.found_by_reads.merge(&other.found_by_reads);
        self.found_by_writes.merge(&other.found_by_writes);
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.whole_pages += other.whole_pages;
        self.deltas += other.deltas;
        self.dropped += other.dropped;
        self.phases.wait_ns += other.phases.wait_ns;
        self.phases.protocol_ns += other.phases.protocol_ns;
        self.phases.pages_ns += other.phases.pages_ns;
        self.phases.network_ns += other.phases.network_ns;
        self.touches.extend(&other.touches);
        for (page, count) in &other.pages {
            *self.pages.entry(*page).or_default() += count;
        }
    }

    /// The pages with most faults, those with most first.
    pub fn hottest(&self, count: usize) -> Vec<(u64, u64)> {
        let mut pages: Vec<_> = self.pages.iter().map(|(page, faults)| (*page, *faults)).collect();
        pages.sort_unstable_by_key(|(page, faults)| (std::cmp::Reverse(*faults), *page));
        pages.truncate(count);
        pages
    }
}

/// Attributes time to phases.
#[derive(Debug)]
pub(crate) struct Watch {
    since: Instant,
    phase: Phase,
}

impl Watch {
    pub fn new() -> Self {
        Self { since: Instant::now(), phase: Phase::Wait }
    }

    /// The phase ends; another begins. Returns the time.
    pub fn turn(&mut self, to: Phase, phases: &mut Phases) -> Instant {
        let now = Instant::now();
        let taken = u64::try_from((now - self.since).as_nanos()).unwrap_or(u64::MAX);
        *match self.phase {
            Phase::Wait => &mut phases.wait_ns,
            Phase::Protocol => &mut phases.protocol_ns,
            Phase::Pages => &mut phases.pages_ns,
            Phase::Network => &mut phases.network_ns,
        } += taken;
        (self.since, self.phase) = (now, to);
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_added_up() {
        let mut one = Stats { messages: 3, pages: HashMap::from([(7, 2), (8, 5)]), ..Stats::default() };
        one.reads.add(Duration::from_nanos(10));
        let mut other = Stats { messages: 4, pages: HashMap::from([(7, 4)]), ..Stats::default() };
        other.reads.add(Duration::from_nanos(30));
        let [manager, owner] = [NodeId(1), NodeId(2)];
        one.found(true, manager, owner, manager);
        one.found(false, manager, owner, owner);
        other.found(true, manager, manager, owner);
        other.found(true, manager, owner, owner);
        one.merge(&other);
        assert_eq!(one.found_by_writes, Found { manager: 1, hint: 1, elsewhere: 1 });
        assert_eq!(one.found_by_reads, Found { manager: 0, hint: 1, elsewhere: 0 });
        assert_eq!(one.reads, Faults { count: 2, waited_ns: 40, longest_ns: 30 });
        assert_eq!((one.messages, one.hottest(1)), (7, vec![(7, 6)]));
    }
}
