//! How long the kernel held pages that a thread moves (`move_pages(2)`).
//!
//! ```text
//!   move_pages(2):  every CPU puts its pages back ── migrate_pages(): unmap, copy, map again ── states
//!                                                    └────────── timed by BPF programs ──────┘
//! ```
//!
//! A thread that touches a page waits only while `migrate_pages()` moves it. On a host whose CPUs are all busy most of the call's time
//! goes before that, as a worker of the kernel has to run on each CPU, and delays no other process.
//!
//! It needs a kernel with BTF, `CAP_BPF` and `CAP_PERFMON`, and the initial PID namespace. Elsewhere [`PageMoves::of_this_thread`] says
//! why not, and the time of the call has to do, which is never less.

use crate::bpf::{prepare, words};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, ObjectBuilder};
use nix::unistd::gettid;
use std::{io, time::Duration};
use vnuma_abi_bpf::{PAGE_MOVES_LONGEST_NS, PAGE_MOVES_THREAD};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/page_moves.bpf.o"));

/// The programs, attached.
pub struct PageMoves {
    _links: Vec<Link>,
    moves: MapHandle,
}

impl std::fmt::Debug for PageMoves {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("PageMoves").finish_non_exhaustive()
    }
}

impl PageMoves {
    /// Times the moves of the calling thread from now on. The error explains why that is not possible here.
    pub fn of_this_thread() -> Result<Self, String> {
        prepare()?;
        Self::load().map_err(|error| words(&error))
    }

    fn load() -> libbpf_rs::Result<Self> {
        let object = ObjectBuilder::default().open_memory(OBJECT)?.load()?;
        let map = object.maps().find(|map| map.name() == "moves");
        let map = map.ok_or_else(|| io::Error::other("the object has no map `moves`"))?;
        let moves = MapHandle::try_from(&map)?;
        let thread = u64::from(gettid().as_raw().unsigned_abs());
        set(&moves, PAGE_MOVES_THREAD, thread)?;
        let links = object.progs_mut().map(|program| program.attach()).collect::<libbpf_rs::Result<_>>()?;
        Ok(Self { _links: links, moves })
    }

    /// The longest move since this was asked last; none is zero. It is to be called by the same thread, between its moves.
    pub fn take_longest(&self) -> io::Result<Duration> {
        let value = self.moves.lookup(&PAGE_MOVES_LONGEST_NS.to_ne_bytes(), MapFlags::ANY);
        let value = value.map_err(io::Error::other)?.unwrap_or_default();
        let longest = value.try_into().map(u64::from_ne_bytes);
        let longest = longest.map_err(|_| io::Error::other("a number of the map `moves` has not 8 bytes"))?;
        set(&self.moves, PAGE_MOVES_LONGEST_NS, 0).map_err(io::Error::other)?;
        Ok(Duration::from_nanos(longest))
    }
}

fn set(moves: &MapHandle, index: u32, value: u64) -> libbpf_rs::Result<()> {
    moves.update(&index.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY)
}
