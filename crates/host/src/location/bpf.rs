//! The BPF programs of `bpf/vcpu_watch.bpf.c`: loading, and taking what they report.

use super::{LocationError, LocationEvent, MAX_WATCHED, record::parse_record};
use libbpf_rs::{
    ErrorKind, Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, PrintLevel, RingBufferBuilder,
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};
use vnuma_abi_bpf::{COUNT_DROPPED, COUNT_REPORTED};
use vnuma_process::spawn_worker;
use vnuma_topology::{CpuId, HostNodeId, HostTopology};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/vcpu_watch.bpf.o"));

/// Types of the running kernel; the programs are fitted to them when they are loaded.
const KERNEL_BTF: &str = "/sys/kernel/btf/vmlinux";

/// Inode of the initial PID namespace (`PROC_PID_INIT_INO` in include/linux/proc_ns.h).
const INITIAL_PID_NAMESPACE: u64 = 0xefff_fffc;

/// Programs that a kernel may have no place for.
const OPTIONAL: [&str; 3] = [AFFINITY, "vnuma_fallback", "vnuma_force"];

/// The one of them that sees nearly all changes of allowed CPUs.
const AFFINITY: &str = "vnuma_affinity";

/// Failures to take events, one after the other, until it is given up.
const FAILURES: u32 = 8;

/// After events were taken the thread rests, so that those that come meanwhile are taken together: one that comes alone is
/// taken at once, and thousands in a second make hundreds of wake-ups, here and of whoever is told.
const REST: Duration = Duration::from_millis(2);

/// Between two of them.
const FAILURE_PAUSE: Duration = Duration::from_millis(10);

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
    /// Loads and attaches. The error explains why that is not possible here.
    pub(super) fn load(topology: &HostTopology) -> Result<Self, String> {
        if !Path::new(KERNEL_BTF).exists() {
            return Err(format!("the kernel has no BTF ({KERNEL_BTF} is missing)"));
        }
        // The programs see thread numbers of the initial namespace, /proc those of ours.
        match fs::metadata("/proc/self/ns/pid") {
            Ok(namespace) if namespace.ino() == INITIAL_PID_NAMESPACE => {}
            Ok(_) => return Err("this process runs in a PID namespace of its own".to_owned()),
            Err(error) => return Err(format!("/proc/self/ns/pid: {error}")),
        }
        libbpf_rs::set_print(Some((PrintLevel::Debug, log)));
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
        let (watched, events, counts) = (map("watched")?, map("events")?, map("counts")?);
        Ok(Self { links, nodes, watched, events, counts, sees_affinity })
    }

    /// Starts the thread that reads the records of the programs. If that fails for good, `on_failure` is called from that
    /// thread, as the last thing that it does, with the reason and with `on_event`.
    pub(super) fn start<F: Fn(LocationEvent) + Send + 'static>(
        self,
        on_event: F,
        on_failure: impl FnOnce(String, F) + Send + 'static,
    ) -> Result<BpfSource, LocationError> {
        let failed = |act| move |source| LocationError::Watch { act, source };
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)
            .map_err(|errno| failed("making an eventfd")(errno.into()))?;
        let stop = Arc::new(stop);
        let (theirs, events) = (Arc::clone(&stop), self.events);
        let (ready, started) = mpsc::channel();
        let work = move || {
            if let Some(reason) = run(&events, theirs.as_fd(), &ready, &on_event) {
                on_failure(reason, on_event);
            }
        };
        let thread = spawn_worker("vnuma-bpf", work).map_err(failed("starting a thread"))?;
        // A thread that ended without a result has panicked, and the panic has been reported.
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

/// The BPF programs and the thread that reads their records.
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
        // If it ended before it was watched, no event follows.
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
            tracing::error!(%error, "cannot stop the watcher's thread");
            return;
        }
        // After a failure it is that thread itself which takes this apart.
        let own = |thread: &JoinHandle<()>| thread.thread().id() == thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| !own(thread)) {
            // It only fails if a callback panicked, which has been reported then.
            let _ = thread.join();
        }
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

/// What became of one attempt to take events.
enum Turn {
    Taken,
    Failed(String),
    Stop,
}

/// Reads records until the end. `Some` is the reason why reading cannot be repeated.
fn pump(mut turn: impl FnMut() -> Turn) -> Option<String> {
    let mut failures = 0;
    loop {
        match turn() {
            Turn::Stop => return None,
            Turn::Taken => failures = 0,
            Turn::Failed(reason) => {
                failures += 1;
                tracing::error!(reason, failures, "cannot read vCPU events");
                if failures == FAILURES {
                    return Some(reason);
                }
                thread::sleep(FAILURE_PAUSE);
            }
        }
    }
}

/// Takes records until `stop` is readable, and blocks between them without a time limit. Returns why it had to end, if
/// it had to.
fn run(
    events: &MapHandle,
    stop: BorrowedFd<'_>,
    ready: &mpsc::Sender<io::Result<()>>,
    on_event: &impl Fn(LocationEvent),
) -> Option<String> {
    let mut builder = RingBufferBuilder::new();
    let take = |record: &[u8]| {
        match parse_record(record) {
            Some(event) => on_event(event),
            None => tracing::error!(?record, "cannot parse a record of the BPF program"),
        }
        0
    };
    let added = builder.add(events, take).map(drop);
    let ring = match added.and_then(|()| builder.build()) {
        Ok(ring) => ring,
        Err(error) => {
            let _ = ready.send(Err(io::Error::other(error.to_string())));
            return None;
        }
    };
    let _ = ready.send(Ok(()));
    // SAFETY: `ring` owns the descriptor and outlives the borrow.
    let ring_fd = unsafe { BorrowedFd::borrow_raw(ring.epoll_fd()) };
    let mut rest = PollTimeout::ZERO;
    pump(|| {
        if rest != PollTimeout::ZERO {
            // Ended early by `stop` only, which is seen below.
            let _ = poll(&mut [PollFd::new(stop, PollFlags::POLLIN)], rest);
            rest = PollTimeout::ZERO;
        }
        let mut fds = [PollFd::new(ring_fd, PollFlags::POLLIN), PollFd::new(stop, PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Turn::Failed(format!("waiting: {error}")),
        }
        if fds[1].any().unwrap_or(true) {
            return Turn::Stop;
        }
        #[cfg(test)]
        if FAILING.with(std::cell::Cell::get) {
            return Turn::Failed("a test wants it so".to_owned());
        }
        match ring.consume() {
            Ok(()) => {
                rest = PollTimeout::try_from(REST).unwrap_or(PollTimeout::ZERO);
                Turn::Taken
            }
            Err(error) => Turn::Failed(format!("the ring buffer: {error}")),
        }
    })
}

#[cfg(test)]
thread_local! {
    /// The BPF thread that sets it, in its callback, takes no more events.
    pub(super) static FAILING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
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
