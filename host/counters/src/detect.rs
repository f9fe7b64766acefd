//! Which events of this host say most about memory: the sources are tried, best first.

use crate::{
    events::{Code, Events, Source},
    group::{CounterError, ThreadCounters},
    period::Meaning,
    servers::local_and_remote,
};
use std::{fs, io::Read, path::Path};
use vnuma_model::{Capability, HostNodeId, PassedOver};

/// Nodes whose events are looked for.
const NODES: HostNodeId = 64;
/// Longest file of an event.
const FILE_LIMIT: u64 = 256;
/// `/proc/cpuinfo` of the first CPU is within this.
const CPUINFO_LIMIT: u64 = 4096;

/// What this host has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detected {
    /// The best events that can be opened. `None`: nothing can be counted.
    pub events: Option<Events>,
    /// Better sources.
    pub passed_over: Vec<PassedOver>,
}

impl Detected {
    /// The source in use.
    pub fn source(&self) -> Source {
        self.events.as_ref().map_or(Source::None, |events| events.source)
    }

    /// The same, and what is passed over.
    pub fn capability(&self) -> Capability {
        Capability::new(Capability::COUNTERS, self.source().name(), self.passed_over.clone())
    }
}

/// Finds the best source but for those that are given up: each is tried on the calling thread, best first. `root` is where `sys`
/// and `proc` are.
pub fn detect(root: &Path, given_up: &[PassedOver]) -> Detected {
    detect_by(root, given_up, |events| ThreadCounters::open_caller(events).map(drop))
}

/// The same, with another function that tries to open them.
pub fn detect_by(
    root: &Path,
    given_up: &[PassedOver],
    mut try_to_open: impl FnMut(&Events) -> Result<(), CounterError>,
) -> Detected {
    let mut open = |events: Events| match given_up.iter().find(|passed| passed.way == events.source.name()) {
        Some(passed) => Err(passed.clone()),
        None => match try_to_open(&events) {
            Ok(()) => Ok(events),
            Err(error) => Err(PassedOver::new(events.source.name(), error.to_string())),
        },
    };
    let mut passed_over = Vec::new();
    for candidate in candidates(root) {
        match candidate.and_then(&mut open) {
            Ok(events) => return Detected { events: Some(events), passed_over },
            Err(failed) => passed_over.push(failed),
        }
    }
    Detected { events: None, passed_over }
}

/// All sources, best first, with why a source does not come into question.
fn candidates(root: &Path) -> Vec<Result<Events, PassedOver>> {
    let missing = |source: Source, why| PassedOver::new(source.name(), why);
    let per_node = per_node_events(&root.join("sys/bus/event_source/devices/cpu"));
    let cpuinfo = read(&root.join("proc/cpuinfo"), CPUINFO_LIMIT);
    let local_remote = cpuinfo.as_deref().and_then(local_and_remote);
    let local_remote =
        local_remote.map(|[local, remote]| vec![(local, Meaning::Local), (remote, Meaning::Remote)]);
    vec![
        per_node
            .map(|list| Events::new(Source::PerNode, list))
            .ok_or_else(|| missing(Source::PerNode, "the PMU has no events dram-nodeN")),
        local_remote.map(|list| Events::new(Source::LocalRemote, list)).ok_or_else(|| {
            missing(Source::LocalRemote, "no events of local and remote accesses are known for this CPU")
        }),
        Ok(Events::new(
            Source::Generic,
            vec![(Code::NodeLoads, Meaning::All), (Code::NodeLoadMisses, Meaning::Remote)],
        )),
        Ok(Events::new(Source::PageLocation, Vec::new())),
    ]
}

/// Events `dram-nodeN` and `dram-streamed-nodeN` of a PMU.
fn per_node_events(pmu: &Path) -> Option<Vec<(Code, Meaning)>> {
    let event = |name: String| parse_event(&read(&pmu.join("events").join(name), FILE_LIMIT)?);
    let mut list = Vec::new();
    for node in 0..NODES {
        let found = ["dram-node", "dram-streamed-node"].map(|prefix| event(format!("{prefix}{node}")));
        list.extend(found.into_iter().flatten().map(|config| (Code::Raw(config), Meaning::Node(node))));
    }
    (!list.is_empty()).then_some(list)
}

/// `event=0x10`, alone or before other terms.
fn parse_event(text: &str) -> Option<u64> {
    let value = text.trim().split(',').find_map(|term| term.strip_prefix("event="))?;
    match value.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => value.parse().ok(),
    }
}

pub(crate) fn read(path: &Path, limit: u64) -> Option<String> {
    let mut bytes = Vec::new();
    fs::File::open(path).ok()?.take(limit).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn refused(code: i32) -> CounterError {
        CounterError::open(Code::Instructions, io::Error::from_raw_os_error(code))
    }

    #[test]
    fn the_events_of_the_labs_pmu_are_found() {
        let root = tempfile::tempdir().expect("a directory");
        let events = root.path().join("sys/bus/event_source/devices/cpu/events");
        fs::create_dir_all(&events).expect("made");
        for (name, text) in [
            ("dram-node0", "event=0x10\n"),
            ("dram-streamed-node0", "event=0x20\n"),
            ("dram-node1", "event=17\n"),
            ("dram-node2", "nonsense"),
            ("loads", "event=0x2"),
        ] {
            fs::write(events.join(name), text).expect("written");
        }
        let detected = detect_by(root.path(), &[], |_| Ok(()));
        assert_eq!((detected.source(), detected.passed_over.len()), (Source::PerNode, 0));
        let list = detected.events.expect("events").list;
        let nodes: Vec<_> = list.into_iter().skip(3).collect();
        let node = |config, node| (Code::Raw(config), Meaning::Node(node));
        assert_eq!(nodes, [node(0x10, 0), node(0x20, 0), node(17, 1)]);
    }

    #[test]
    fn what_cannot_be_opened_is_passed_over_with_the_reason() {
        let root = tempfile::tempdir().expect("a directory");
        let detected = detect_by(root.path(), &[], |events| match events.source {
            Source::PageLocation => Ok(()),
            _ => Err(refused(2)),
        });
        assert_eq!(detected.source(), Source::PageLocation);
        let passed: Vec<_> = detected.passed_over.iter().map(|passed| passed.way.as_str()).collect();
        assert_eq!(passed, ["per-node", "local-remote", "generic"]);
        let nothing = detect_by(root.path(), &[], |_| Err(refused(13)));
        assert_eq!((nothing.source(), nothing.events), (Source::None, None));
        let why = &nothing.passed_over.last().expect("one").why;
        assert!(why.contains("perf_event_paranoid"), "{why}");
    }

    #[test]
    fn what_is_given_up_is_not_opened() {
        let root = tempfile::tempdir().expect("a directory");
        let given_up = PassedOver::new(Source::Generic.name(), "it counted nothing");
        let mut opened = Vec::new();
        let detected = detect_by(root.path(), std::slice::from_ref(&given_up), |events| {
            opened.push(events.source);
            Ok(())
        });
        assert_eq!((detected.source(), opened), (Source::PageLocation, vec![Source::PageLocation]));
        assert_eq!(detected.passed_over.last(), Some(&given_up));
    }

    #[test]
    fn events_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_event("event=0xd3,umask=0x1\n"), Some(0xd3));
        assert_eq!(parse_event("config=1"), None);
        assert_eq!(parse_event("event=0xzz"), None);
    }
}
