//! The BPF programs of `bpf/vcpu_watch.bpf.c`: loading, and taking what they report.

use super::{LocationError, LocationEvent, MAX_WATCHED, record::parse_record};
use libbpf_rs::{
    ErrorKind, Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, PrintLevel, RingBufferBuilder,
};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{
    collections::BTreeMap,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::JoinHandle,
};
use vnuma_abi_bpf::{COUNT_DROPPED, COUNT_REPORTED};
use vnuma_process::spawn_worker;
use vnuma_topology::{CpuId, HostNodeId, HostTopology};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/vcpu_watch.bpf.o"));

/// Types of the running kernel; the programs are fitted to them when they are loaded.
const KERNEL_BTF: &str = "/sys/kernel/btf/vmlinux";

/// Inode of the initial PID namespace (`PROC_PID_INIT_INO` in include/linux/proc_ns.h).
const INITIAL_PID_NAMESPACE: u64 = 0xefff_fffc;

/// The program that a kernel may have no place for.
const AFFINITY_PROGRAM: &str = "vnuma_affinity";

/// Programs in the kernel, attached, but watching nothing yet.
pub(super) struct Programs {
    links: Vec<Link>,
    nodes: CpuNodes,
    watched: MapHandle,
    events: MapHandle,
    counts: MapHandle,
    sees_affinity: bool,
}

impl Programs {
    /// Loads and attaches. The error says in words why that is not possible here.
    pub(super) fn load(topology: &HostTopology) -> Result<Self, String> {
        if !Path::new(KERNEL_BTF).exists() {
            return Err(format!("the kernel does not tell its types ({KERNEL_BTF} is missing)"));
        }
        // The programs see thread numbers of the initial namespace, /proc those of ours.
        match fs::metadata("/proc/self/ns/pid") {
            Ok(namespace) if namespace.ino() == INITIAL_PID_NAMESPACE => {}
            Ok(_) => return Err("this process runs in a PID namespace of its own".to_owned()),
            Err(error) => return Err(format!("/proc/self/ns/pid: {error}")),
        }
        libbpf_rs::set_print(Some((PrintLevel::Debug, log)));
        let (object, links, sees_affinity) = match attach(true) {
            Ok((object, links)) => (object, links, true),
            Err(first) => {
                let (object, links) = attach(false).map_err(|error| words(&error))?;
                tracing::info!(reason = %words(&first), "changes of allowed CPUs cannot be watched by BPF");
                (object, links, false)
            }
        };
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
        let (watched, events, counts) = (map("watched")?, map("events")?, map("counts")?);
        Ok(Self { links, nodes, watched, events, counts, sees_affinity })
    }

    /// Starts the thread that takes what the programs report.
    pub(super) fn start(
        self,
        on_event: impl Fn(LocationEvent) + Send + 'static,
    ) -> Result<BpfSource, LocationError> {
        let failed = |act| move |source| LocationError::Watch { act, source };
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)
            .map_err(|errno| failed("making an eventfd")(errno.into()))?;
        let stop = Arc::new(stop);
        let (theirs, events) = (Arc::clone(&stop), self.events);
        let (ready, started) = mpsc::channel();
        let thread = spawn_worker("vnuma-bpf", move || run(&events, theirs.as_fd(), &ready, on_event))
            .map_err(failed("starting a thread"))?;
        // A thread that is gone without a word has panicked, which has been reported.
        started
            .recv()
            .unwrap_or_else(|_| Err(io::Error::other("its thread has failed")))
            .map_err(failed("mapping the ring buffer"))?;
        Ok(BpfSource {
            _links: self.links,
            nodes: Mutex::new(self.nodes),
            watched: self.watched,
            counts: self.counts,
            sees_affinity: self.sees_affinity,
            stop,
            thread: Some(thread),
        })
    }
}

/// The node of each CPU, as the programs know it.
#[derive(Debug)]
struct CpuNodes {
    map: MapHandle,
    known: BTreeMap<CpuId, HostNodeId>,
}

impl CpuNodes {
    /// Changes what differs. A CPU that is gone, or of no node, has node 0 in the map, which stands for none.
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

/// Programs and the thread that takes what they report.
#[derive(Debug)]
pub(super) struct BpfSource {
    /// The programs run as long as these exist.
    _links: Vec<Link>,
    nodes: Mutex<CpuNodes>,
    watched: MapHandle,
    counts: MapHandle,
    sees_affinity: bool,
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl BpfSource {
    pub(super) fn watch(&self, pid: i32, tid: i32) -> Result<(), LocationError> {
        if !vnuma_process::thread_exists(pid, tid) {
            return Err(LocationError::NoThread { pid, tid });
        }
        match self.watched.update(&tid.to_ne_bytes(), &[1], MapFlags::ANY) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::TooBig => {
                return Err(LocationError::TooMany { tid, limit: MAX_WATCHED });
            }
            Err(error) => {
                let source = io::Error::other(error.to_string());
                return Err(LocationError::Watch { act: "watching a thread", source });
            }
        }
        // If it ended before it was watched, nothing will ever tell so.
        if !vnuma_process::thread_exists(pid, tid) {
            self.unwatch(tid);
            return Err(LocationError::NoThread { pid, tid });
        }
        Ok(())
    }

    pub(super) fn set_topology(&self, topology: &HostTopology) -> Result<(), LocationError> {
        let set = self.nodes.lock().unwrap_or_else(PoisonError::into_inner).set(topology);
        set.map_err(|error| LocationError::Watch {
            act: "changing the nodes of CPUs",
            source: io::Error::other(error.to_string()),
        })
    }

    pub(super) fn unwatch(&self, tid: i32) {
        // The only way to fail is that it is not there.
        let _ = self.watched.delete(&tid.to_ne_bytes());
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

impl Drop for BpfSource {
    fn drop(&mut self) {
        if let Err(error) = self.stop.write(1) {
            tracing::error!(%error, "the watcher's thread cannot be stopped");
            return;
        }
        if let Some(thread) = self.thread.take() {
            // It only fails if a callback panicked, which has been reported then.
            let _ = thread.join();
        }
    }
}

/// Loads the programs and attaches them.
fn attach(with_affinity: bool) -> libbpf_rs::Result<(Object, Vec<Link>)> {
    let mut open = ObjectBuilder::default().open_memory(OBJECT)?;
    if !with_affinity {
        open.progs_mut()
            .filter(|program| program.name() == AFFINITY_PROGRAM)
            .for_each(|mut program| program.set_autoload(false));
    }
    let object = open.load()?;
    let links = object
        .progs_mut()
        .filter(|program| with_affinity || program.name() != AFFINITY_PROGRAM)
        .map(|program| program.attach())
        .collect::<libbpf_rs::Result<Vec<_>>>()?;
    Ok((object, links))
}

/// Takes records until `stop` is readable. Blocks between them without a time limit.
fn run(
    events: &MapHandle,
    stop: BorrowedFd<'_>,
    ready: &mpsc::Sender<io::Result<()>>,
    on_event: impl Fn(LocationEvent),
) {
    let mut builder = RingBufferBuilder::new();
    let take = |record: &[u8]| {
        match parse_record(record) {
            Some(event) => on_event(event),
            None => tracing::error!(?record, "a record of the BPF program is not understood"),
        }
        0
    };
    let added = builder.add(events, take).map(drop);
    let ring = match added.and_then(|()| builder.build()) {
        Ok(ring) => ring,
        Err(error) => {
            let _ = ready.send(Err(io::Error::other(error.to_string())));
            return;
        }
    };
    let _ = ready.send(Ok(()));
    // SAFETY: `ring` owns the descriptor and outlives the borrow.
    let ring_fd = unsafe { BorrowedFd::borrow_raw(ring.epoll_fd()) };
    loop {
        let mut fds = [PollFd::new(ring_fd, PollFlags::POLLIN), PollFd::new(stop, PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => continue,
            Err(error) => {
                tracing::error!(%error, "waiting for events of vCPUs failed; none will be seen");
                return;
            }
        }
        if fds[1].any().unwrap_or(true) {
            return;
        }
        if let Err(error) = ring.consume() {
            tracing::error!(%error, "the ring buffer of vCPU events cannot be read");
        }
    }
}

/// What an error means for an operator.
fn words(error: &libbpf_rs::Error) -> String {
    match error.kind() {
        ErrorKind::PermissionDenied => {
            format!("not permitted: CAP_BPF and CAP_PERFMON are needed ({error})")
        }
        _ => format!("{error:#}"),
    }
}

fn log(level: PrintLevel, text: String) {
    let text = text.trim_end();
    match level {
        PrintLevel::Debug => tracing::trace!("libbpf: {text}"),
        PrintLevel::Info | PrintLevel::Warn => tracing::debug!("libbpf: {text}"),
    }
}
