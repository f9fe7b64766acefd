//! The BPF programs of `bpf/vcpu_watch.bpf.c`: loading, and taking what they report.

use super::{LocationError, LocationEvent, record::parse_record, watched::Watched};
use crate::bpf::{prepare, words};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, RingBuffer, RingBufferBuilder};
use nix::errno::Errno;
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io,
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use vnuma_abi_bpf::{COUNT_DROPPED, COUNT_REPORTED};
use vnuma_model::{CpuId, HostNodeId, HostTopology};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/vcpu_watch.bpf.o"));

/// Programs that a kernel may have no place for.
const OPTIONAL: [&str; 3] = [AFFINITY, "vnuma_fallback", "vnuma_force"];

/// The one of them that sees nearly all changes of allowed CPUs.
const AFFINITY: &str = "vnuma_affinity";

/// Failures to take events, one after the other, until it is given up.
const FAILURES: u32 = 8;

/// After events were taken their reader rests so long, so that those that come meanwhile are taken together: one that comes
/// alone is taken at once, and thousands in a second make hundreds of wake-ups, here and of the receiver.
pub const REST: Duration = Duration::from_millis(4);

/// Most events that one call takes, some milliseconds' work. Who takes them has other things to do, and what happens to a VM's threads
/// may come without end.
pub const TAKEN_AT_ONCE: usize = 1024;

/// Between two of them.
const FAILURE_PAUSE: Duration = Duration::from_millis(10);

/// Programs in the kernel, attached, but watching nothing yet.
pub(super) struct Programs {
    links: Vec<Link>,
    nodes: CpuNodes,
    watched: Watched,
    events: MapHandle,
    waiting: MapHandle,
    counts: MapHandle,
    sees_affinity: bool,
}

impl Programs {
    /// Loads and attaches. The error explains why that is not possible here.
    pub(super) fn load(topology: &HostTopology) -> Result<Self, String> {
        prepare()?;
        let fitting: Vec<&str> = OPTIONAL.into_iter().filter(|program| fits(program)).collect();
        let (object, links) = attach(|name| !OPTIONAL.contains(&name) || fitting.contains(&name))
            .map_err(|error| words(&error))?;
        let sees_affinity = fitting.contains(&AFFINITY);
        Self::from_object(&object, links, sees_affinity, topology).map_err(|error| words(&error))
    }

    fn from_object(
        object: &Object,
        links: Vec<Link>,
        sees_affinity: bool,
        topology: &HostTopology,
    ) -> libbpf_rs::Result<Self> {
        let map = |name: &str| {
            let map = object.maps().find(|map| map.name() == name);
            let map = map.ok_or_else(|| io::Error::other(format!("the object has no map `{name}`")))?;
            MapHandle::try_from(&map)
        };
        let mut nodes = CpuNodes { map: map("cpu_node")?, known: BTreeMap::new() };
        nodes.set(topology)?;
        let (watched, counts) = (Watched::of(&map("watched")?, &map("masks")?)?, map("counts")?);
        let (events, waiting) = (map("events")?, map("waiting")?);
        Ok(Self { links, nodes, watched, events, waiting, counts, sees_affinity })
    }

    /// What they report from now on can be taken. `on_failure` is called once it cannot be taken any more, with the reason.
    pub(super) fn start(
        self,
        on_failure: impl FnOnce(String) + Send + 'static,
    ) -> Result<(BpfSource, KernelEvents), LocationError> {
        let taken = Arc::new(Mutex::new(Vec::new()));
        let take = |taken: &Arc<Mutex<Vec<LocationEvent>>>| {
            let taken = Arc::clone(taken);
            move |record: &[u8]| {
                match parse_record(record) {
                    Some(event) => taken.lock().unwrap_or_else(PoisonError::into_inner).push(event),
                    None => tracing::error!(?record, "cannot parse a record of the BPF program"),
                }
                0
            }
        };
        let mut builder = RingBufferBuilder::new();
        // In this order, so that what may wait delays nothing.
        let ring = builder
            .add(&self.events, take(&taken))
            .and_then(|builder| builder.add(&self.waiting, take(&taken)))
            .map(drop)
            .and_then(|()| builder.build());
        let ring = ring.map_err(|error| LocationError::Watch {
            act: "mapping the ring buffer",
            source: io::Error::other(error.to_string()),
        })?;
        let events = KernelEvents {
            ring,
            taken,
            _maps: [self.events, self.waiting],
            failures: 0,
            on_failure: Some(Box::new(on_failure)),
        };
        let source = BpfSource {
            _links: self.links,
            nodes: Mutex::new(self.nodes),
            watched: self.watched,
            counts: self.counts,
            sees_affinity: self.sees_affinity,
        };
        Ok((source, events))
    }
}

/// Reports of the BPF programs that have not been taken yet.
pub struct KernelEvents {
    ring: RingBuffer<'static>,
    /// What a call of [`Self::take`] has found so far.
    taken: Arc<Mutex<Vec<LocationEvent>>>,
    /// What the rings were made of.
    _maps: [MapHandle; 2],
    /// One after the other.
    failures: u32,
    on_failure: Option<Box<dyn FnOnce(String) + Send>>,
}

impl std::fmt::Debug for KernelEvents {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("KernelEvents").field("failures", &self.failures).finish_non_exhaustive()
    }
}

impl KernelEvents {
    /// Readable while there is something to take at once. What may wait does not make it readable.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `ring` owns the descriptor and outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) }
    }

    /// Adds what there is to `events`, up to [`TAKEN_AT_ONCE`], by their time. Returns how long to rest until the next call, so that
    /// events of a busy time are taken together. `None`: they cannot be taken any more, and polling has taken over.
    pub fn take(&mut self, events: &mut Vec<LocationEvent>) -> Option<Duration> {
        self.on_failure.as_ref()?;
        let consumed = self.ring.consume_raw_n(TAKEN_AT_ONCE);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.sort_by_key(|event| event.time_ns);
        events.append(&mut taken);
        drop(taken);
        match consumed {
            0 => Some(Duration::ZERO),
            1.. => {
                self.failures = 0;
                Some(REST)
            }
            error => self.failed(format!("the ring buffer: {}", Errno::from_raw(-error))),
        }
    }

    pub(super) fn failed(&mut self, reason: String) -> Option<Duration> {
        self.failures += 1;
        tracing::error!(reason, failures = self.failures, "cannot read vCPU events");
        if self.failures < FAILURES {
            return Some(FAILURE_PAUSE);
        }
        self.on_failure.take()?(reason);
        None
    }
}

/// The node of each CPU, as the programs know it.
#[derive(Debug)]
struct CpuNodes {
    map: MapHandle,
    known: BTreeMap<CpuId, HostNodeId>,
}

impl CpuNodes {
    /// Writes the entries that differ. A CPU that is gone, or without a node, has 0 in the map, which means none.
    fn set(&mut self, topology: &HostTopology) -> libbpf_rs::Result<()> {
        let nodes = topology.nodes.iter().flat_map(|node| node.cpus.iter().map(|cpu| (cpu, node.id)));
        let wanted: BTreeMap<CpuId, HostNodeId> = nodes.collect();
        let gone: Vec<CpuId> = self.known.keys().filter(|cpu| !wanted.contains_key(cpu)).copied().collect();
        for cpu in gone {
            self.map.update(&cpu.to_ne_bytes(), &0u32.to_ne_bytes(), MapFlags::ANY)?;
            self.known.remove(&cpu);
        }
        for (cpu, node) in wanted {
            if self.known.get(&cpu) != Some(&node) {
                self.map.update(&cpu.to_ne_bytes(), &(node + 1).to_ne_bytes(), MapFlags::ANY)?;
                self.known.insert(cpu, node);
            }
        }
        Ok(())
    }
}

/// The BPF programs.
#[derive(Debug)]
pub(super) struct BpfSource {
    /// The programs run as long as these exist.
    _links: Vec<Link>,
    nodes: Mutex<CpuNodes>,
    watched: Watched,
    counts: MapHandle,
    sees_affinity: bool,
}

impl BpfSource {
    /// `how`: what its moves do.
    pub(super) fn watch(&self, pid: i32, tid: i32, how: u8) -> Result<(), LocationError> {
        if !vnuma_process::thread_exists(pid, tid) {
            return Err(LocationError::NoThread { pid, tid });
        }
        self.watched.forget_mask(tid);
        self.watched.set(tid, how, false);
        // If it ended before it was watched, no event follows.
        if !vnuma_process::thread_exists(pid, tid) {
            self.unwatch(tid);
            return Err(LocationError::NoThread { pid, tid });
        }
        Ok(())
    }

    /// Changes what the moves of a watched thread do. One that is not watched stays so.
    pub(super) fn change(&self, tid: i32, how: u8) {
        self.watched.forget_mask(tid);
        self.watched.set(tid, how, true);
    }

    pub(super) fn set_topology(&self, topology: &HostTopology) -> Result<(), LocationError> {
        let set = self.nodes.lock().unwrap_or_else(PoisonError::into_inner).set(topology);
        set.map_err(|error| LocationError::Watch {
            act: "changing the nodes of CPUs",
            source: io::Error::other(error.to_string()),
        })
    }

    pub(super) fn unwatch(&self, tid: i32) {
        self.watched.set(tid, 0, false);
    }

    pub(super) fn sees_affinity(&self) -> bool {
        self.sees_affinity
    }

    pub(super) fn reported(&self) -> u64 {
        self.count(COUNT_REPORTED)
    }

    pub(super) fn dropped(&self) -> u64 {
        self.count(COUNT_DROPPED)
    }

    fn count(&self, which: u32) -> u64 {
        let per_cpu = match self.counts.lookup_percpu(&which.to_ne_bytes(), MapFlags::ANY) {
            Ok(per_cpu) => per_cpu.unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%error, "cannot read the counters of the BPF programs");
                return 0;
            }
        };
        per_cpu.iter().filter_map(|bytes| Some(u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?))).sum()
    }
}

/// Does the running kernel have the function that this program is attached to?
fn fits(program: &str) -> bool {
    match attach(|name| name == program) {
        Ok(_) => true,
        Err(error) => {
            tracing::debug!(program, reason = %words(&error), "this BPF program does not fit the kernel");
            false
        }
    }
}

/// Loads and attaches those of the programs that are wanted.
fn attach(wanted: impl Fn(&str) -> bool) -> libbpf_rs::Result<(Object, Vec<Link>)> {
    let mut open = ObjectBuilder::default().open_memory(OBJECT)?;
    let wanted = |name: &OsStr| name.to_str().is_some_and(&wanted);
    open.progs_mut()
        .filter(|program| !wanted(program.name()))
        .for_each(|mut program| program.set_autoload(false));
    let object = open.load()?;
    let links = object
        .progs_mut()
        .filter(|program| wanted(program.name()))
        .map(|program| program.attach())
        .collect::<libbpf_rs::Result<Vec<_>>>()?;
    Ok((object, links))
}
