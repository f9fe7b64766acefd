//! Placements of VMs that are to be started, and the file of reservations.
//!
//! A request reads the host and asks the core which VMs there are; both can wait, and neither does on the core's thread. Then
//! it has the book for itself: it takes notice of VMs that came and went, decides, and writes the file. What is not written is
//! not reserved.

use super::devices::Observed;
use crate::core::uses::VmUse;
use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};
use vnuma_api::{Devices, FreeMemory, NodeFree, PlaceRequest, Placed, Reserved};
use vnuma_model::{CpuLayout, HostNode, HostNodeId, HostTopology};
use vnuma_observe::{SysfsError, read_cpu_layout, read_host_topology};
use vnuma_placement::{
    Claim, NodeCapacity, PlaceError, Pool, Request, RequestError,
    reservation::{Book, Ground, ReleaseError, Reservation, ReserveError, file},
};
use vnuma_process::own;

/// Why a VM is not placed, or a reservation not given up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlacementError {
    /// The request makes no sense, or what it asks for is taken.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The VM runs.
    #[error("name {0}: a VM of this name runs")]
    Runs(String),
    /// There is none to be given up.
    #[error(transparent)]
    Release(#[from] ReleaseError),
    /// The host cannot be read.
    #[error("reading the host's topology: {0}")]
    Host(#[from] SysfsError),
    /// It is not known which devices are in use.
    #[error("it is not known which devices are in use: {0}")]
    Devices(String),
    /// The file of an earlier vnumad cannot be understood.
    #[error("{0}; remove the file when no VM that was placed is being started")]
    File(#[from] file::FileError),
    /// The file can be neither read nor written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl PlacementError {
    /// What kind of error it is for clients.
    pub(crate) fn kind(&self) -> vnuma_api::ErrorKind {
        use vnuma_api::ErrorKind as Kind;
        match self {
            Self::Reserve(ReserveError::Place(PlaceError::Request(error))) => match error {
                RequestError::InUse { .. } | RequestError::Group { .. } => Kind::Conflict,
                RequestError::NoDevice(_) => Kind::NotFound,
                _ => Kind::BadRequest,
            },
            Self::Reserve(ReserveError::Lifetime(_)) => Kind::BadRequest,
            Self::Reserve(_) | Self::Runs(_) | Self::Release(ReleaseError::Held { .. }) => Kind::Conflict,
            Self::Release(ReleaseError::None(_)) => Kind::NotFound,
            Self::Host(_) | Self::Devices(_) | Self::File(_) | Self::Io { .. } => Kind::Internal,
        }
    }
}

/// All reservations, and their file.
#[derive(Debug)]
pub(crate) struct Placements {
    /// Where the host's `sys` and `proc` are.
    root: PathBuf,
    file: PathBuf,
    /// Not read yet, or read.
    book: Mutex<Option<Book>>,
}

impl Placements {
    /// Those of the file in a directory of records.
    pub(crate) fn new(root: PathBuf, records: &Path) -> Self {
        Self { root, file: records.join("reservations.json"), book: Mutex::new(None) }
    }

    /// Decides where a VM goes, and reserves that. `uses` are the VMs that there are now.
    pub(crate) fn place(
        &self,
        uses: &[VmUse],
        wanted: &PlaceRequest,
        now_ns: u64,
    ) -> Result<Placed, PlacementError> {
        let host = read_host_topology(&self.root)?;
        let layout = read_cpu_layout(&self.root, &host)?;
        let request = Request {
            name: wanted.name.clone(),
            vcpus: wanted.vcpus,
            memory_bytes: wanted.memory_bytes,
            page_bytes: wanted.page_bytes,
            devices: wanted.devices.clone(),
            locality: wanted.locality,
        };
        if uses.iter().any(|vm| vm.claim.owner == request.name) {
            return Err(PlacementError::Runs(request.name));
        }
        let observed = self.observed(&host, uses, &request)?;
        self.change(uses, now_ns, |book| {
            let mut others = others(book, uses);
            others.extend(observed.iter().flat_map(|observed| observed.claims(book)));
            let ground = Ground { host: &host, layout: &layout, others: &others };
            let lifetime_ns = wanted.lifetime_ms.saturating_mul(1_000_000);
            let (id, placed) = book.reserve(ground, resident(uses), &request, now_ns, lifetime_ns)?;
            let reservation =
                Reserved { id, waits_ms: Some(wanted.lifetime_ms), pid: None, placement: placed.placement };
            let obstacles =
                observed.as_ref().map(|observed| observed.obstacles(&request.devices)).unwrap_or_default();
            Ok(Placed { reservation, explanation: placed.explanation, obstacles })
        })
    }

    /// The devices that are in use, if the request is for some.
    fn observed(
        &self,
        host: &HostTopology,
        uses: &[VmUse],
        request: &Request,
    ) -> Result<Option<Observed>, PlacementError> {
        if request.devices.is_empty() {
            return Ok(None);
        }
        let observed = Observed::read(&self.root, host, uses)?;
        match observed.problem() {
            Some(problem) => Err(PlacementError::Devices(problem.to_owned())),
            None => Ok(Some(observed)),
        }
    }

    /// The host's devices, and who has them.
    pub(crate) fn devices(&self, uses: &[VmUse], now_ns: u64) -> Result<Devices, PlacementError> {
        let host = read_host_topology(&self.root)?;
        let observed = Observed::read(&self.root, &host, uses)?;
        let reservations: Vec<Reservation> =
            self.change(uses, now_ns, |book| Ok(book.all().cloned().collect()))?;
        Ok(observed.shown(&self.root, &reservations)?)
    }

    /// What is free on each node.
    pub(crate) fn capacity(&self, uses: &[VmUse], now_ns: u64) -> Result<Vec<NodeFree>, PlacementError> {
        let host = read_host_topology(&self.root)?;
        let layout: CpuLayout = read_cpu_layout(&self.root, &host)?;
        let capacity = self.change(uses, now_ns, |book| {
            let others = others(book, uses);
            let ground = Ground { host: &host, layout: &layout, others: &others };
            Ok(book.capacity(ground, resident(uses)))
        })?;
        let node = |(node, free): (&HostNode, &NodeCapacity)| NodeFree {
            node: node.id,
            usable_cpus: free.usable_cpus,
            free_cpus: free.free_cpus,
            free_cores: free.free_cores,
            memory: free.pools.iter().map(|pool| free_memory(node, *pool)).collect(),
        };
        Ok(host.nodes.iter().zip(&capacity.nodes).map(node).collect())
    }

    /// All reservations.
    pub(crate) fn list(&self, uses: &[VmUse], now_ns: u64) -> Result<Vec<Reserved>, PlacementError> {
        self.change(uses, now_ns, |book| Ok(book.all().map(|one| Reserved::new(one, now_ns)).collect()))
    }

    /// Gives up a reservation whose VM is not there.
    pub(crate) fn release(
        &self,
        uses: &[VmUse],
        name: &str,
        now_ns: u64,
    ) -> Result<Reserved, PlacementError> {
        self.change(uses, now_ns, |book| Ok(Reserved::new(&book.release(name)?, now_ns)))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Book>> {
        // A change is made to a copy, so that none is half made.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the book, alone, and writes it. If one of both fails, nothing has changed.
    fn change<T>(
        &self,
        uses: &[VmUse],
        now_ns: u64,
        change: impl FnOnce(&mut Book) -> Result<T, PlacementError>,
    ) -> Result<T, PlacementError> {
        let mut present = self.lock();
        let read = match present.take() {
            Some(book) => book,
            None => self.read(now_ns)?,
        };
        let mut book = read.clone();
        self.take_notice(&mut book, uses, now_ns);
        let outcome = change(&mut book);
        let outcome = outcome.and_then(|value| {
            if book != read {
                self.write(&book)?;
            }
            Ok(value)
        });
        *present = Some(if outcome.is_ok() { book } else { read });
        outcome
    }

    /// VMs came and went since the last time. Each came when it was found.
    fn take_notice(&self, book: &mut Book, uses: &[VmUse], now_ns: u64) {
        for vm in uses {
            book.appeared(&vm.claim.owner, vm.pid, self.started(vm.pid), vm.found_ns);
        }
        book.expire(now_ns);
        let held = book.holders().map(|(name, pid, started)| (name.to_owned(), pid, started));
        for (name, pid, started) in held.collect::<Vec<_>>() {
            let listed = uses.iter().any(|vm| vm.claim.owner == name && vm.pid == pid);
            // After a start of vnumad it can be there without having been found yet. Another process or thread may have its number.
            let now = self.started(pid);
            let runs = now.is_some() && (started.is_none() || now == started);
            if !listed && !runs {
                book.gone(&name, pid);
            }
        }
    }

    /// When a process started, clock ticks since boot.
    fn started(&self, pid: i32) -> Option<u64> {
        let stat = fs::read_to_string(self.root.join(format!("proc/{pid}/stat"))).ok()?;
        vnuma_process::procfs::start_time(&stat)
    }

    fn boot_id(&self) -> Result<String, PlacementError> {
        let path = self.root.join("proc/sys/kernel/random/boot_id");
        let text = fs::read_to_string(&path).map_err(|source| PlacementError::Io { path, source })?;
        Ok(text.trim().to_owned())
    }

    fn read(&self, now_ns: u64) -> Result<Book, PlacementError> {
        let failed = |source| PlacementError::Io { path: self.file.clone(), source };
        let mut bytes = Vec::new();
        match own::open(&self.file) {
            Ok(file) => file.take(file::MAX_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(failed)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Book::default()),
            Err(error) => return Err(failed(error)),
        };
        let text = String::from_utf8_lossy(&bytes);
        Ok(file::parse(&self.file, &text, &self.boot_id()?, now_ns)?)
    }

    /// Writes the file, atomically.
    fn write(&self, book: &Book) -> Result<(), PlacementError> {
        let failed = |source| PlacementError::Io { path: self.file.clone(), source };
        let text = file::print(book, &self.boot_id()?);
        own::write(&self.file, text.as_bytes()).map_err(failed)
    }
}

/// What VMs have that have no reservation.
fn others(book: &Book, uses: &[VmUse]) -> Vec<Claim> {
    let others = uses.iter().filter(|vm| book.of(&vm.claim.owner).is_none());
    others.map(|vm| vm.claim.clone()).collect()
}

/// Memory that a VM has taken on a node, bytes.
fn resident(uses: &[VmUse]) -> impl Fn(&str, HostNodeId) -> u64 {
    |name, node| {
        let vm = uses.iter().find(|vm| vm.claim.owner == name);
        vm.and_then(|vm| vm.resident.get(&node)).copied().unwrap_or_default()
    }
}

fn free_memory(node: &HostNode, Pool { page_bytes, free_bytes }: Pool) -> FreeMemory {
    let huge = node.huge_pages.iter().find(|pool| pool.size_kib.saturating_mul(1024) == page_bytes);
    let total_bytes = match huge {
        Some(pool) => pool.total.saturating_mul(page_bytes),
        None => node.memory_total_kib.saturating_mul(1024),
    };
    FreeMemory { page_bytes, total_bytes, free_bytes }
}
