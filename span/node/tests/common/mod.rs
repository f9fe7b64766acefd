//! What the tests of a node share: nodes in one process.
#![allow(dead_code, reason = "each test program uses another part")]

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use vnuma_dsm_node::{Config, Happening, Node};
use vnuma_dsm_pager::{Options as Memory, PAGE_SIZE, PagerError, Region};
use vnuma_dsm_transport::{Lanes, Limits, Listener, Place, Reserved, mesh};

/// Nothing here takes longer unless it hangs.
pub const HANG: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Shm,
}

/// Shards of each node.
pub const SHARDS: usize = 2;

/// Limits that a busy machine does not reach.
pub fn patient() -> Limits {
    Limits { stall: HANG, silence: HANG, connect: HANG, ..Limits::default() }
}

/// A node's memory, or none where this process may not use userfaultfd.
pub fn region(pages: u64) -> Option<Arc<Region>> {
    let options = Memory { shards: SHARDS, ..Memory::default() };
    match Region::create(pages as usize * PAGE_SIZE, options) {
        Ok(region) => Some(Arc::new(region)),
        Err(error @ (PagerError::Denied { .. } | PagerError::Kernel { .. })) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Memories of all nodes, and their lanes.
pub fn connected(
    nodes: u8,
    pages: u64,
    transport: Transport,
    limits: Limits,
) -> Option<Vec<(Arc<Region>, Lanes)>> {
    let regions: Vec<_> = (0..nodes).map(|_| region(pages)).collect::<Option<_>>()?;
    let directory = tempfile::tempdir().expect("a directory");
    // Kept until all nodes listen.
    let reserved = Reserved::new(Ipv4Addr::LOCALHOST.into(), nodes.into()).expect("ports");
    let places: BTreeMap<u8, Place> = (0..nodes)
        .map(|node| {
            let place = match transport {
                Transport::Shm => Place::Shm(directory.path().join(node.to_string())),
                Transport::Tcp => Place::Tcp(reserved.addresses()[usize::from(node)]),
            };
            (node, place)
        })
        .collect();
    let connect = |node: u8| {
        let (region, places) = (Arc::clone(&regions[usize::from(node)]), places.clone());
        thread::spawn(move || {
            let listener = Listener::bind(&places[&node]).expect("a listener");
            let hello = Config::new(node, nodes, pages).hello(&region);
            let others = places.into_iter().filter(|(other, _)| *other != node).collect();
            let lanes = mesh(&listener, &others, &hello, limits, |error| eprintln!("{error}"));
            (region, lanes.expect("connected"))
        })
    };
    let threads: Vec<_> = (0..nodes).map(connect).collect();
    Some(threads.into_iter().map(|thread| thread.join().expect("no panic")).collect())
}

/// Nodes that run.
pub fn cluster(
    nodes: u8,
    pages: u64,
    transport: Transport,
    change: impl Fn(&mut Config),
) -> Option<Vec<Node>> {
    let start = |(node, (region, lanes)): (usize, _)| {
        let mut config = Config::new(node as u8, nodes, pages);
        // A test that pins a page is not over before it says so.
        config.pin_limit = 10 * HANG;
        change(&mut config);
        Node::start(&config, region, lanes, move |happening| eprintln!("node {node}: {happening}"))
            .expect("starts")
    };
    Some(connected(nodes, pages, transport, patient())?.into_iter().enumerate().map(start).collect())
}

/// A thread's view: words of the memory.
#[derive(Clone, Copy)]
pub struct Words(usize);

impl Words {
    pub fn of(node: &Node) -> Self {
        Self(node.region().guest().as_ptr() as usize)
    }

    pub fn at(self, page: u64, word: usize) -> &'static std::sync::atomic::AtomicU64 {
        assert!(word < PAGE_SIZE / 8);
        let address = self.0 + page as usize * PAGE_SIZE + word * 8;
        // SAFETY: aligned, and inside the region, which outlives the threads of every test; all accesses are atomic.
        unsafe { &*(address as *const std::sync::atomic::AtomicU64) }
    }

    /// The byte as a system call reads it, which gets an error where a load would get SIGBUS.
    pub fn read_by_kernel(self, page: u64) -> nix::Result<u8> {
        let (from, to) = nix::unistd::pipe()?;
        // SAFETY: the address is mapped, and the kernel checks what it reads there.
        let bytes =
            unsafe { std::slice::from_raw_parts((self.0 + page as usize * PAGE_SIZE) as *const u8, 1) };
        nix::unistd::write(&to, bytes)?;
        let mut byte = [0];
        nix::unistd::read(&from, &mut byte)?;
        Ok(byte[0])
    }
}

/// Waits until it is so. It fails with what is wrong `otherwise`.
pub fn until(otherwise: &str, is: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < HANG, "{otherwise}");
        thread::sleep(Duration::from_micros(500));
    }
}

/// Waits until it is reported.
pub fn told(node: &Node, what: impl Fn(&Happening) -> bool) -> Happening {
    let begin = Instant::now();
    loop {
        if let Some(found) = node.happenings().into_iter().find(|happening| what(happening)) {
            return found;
        }
        assert!(begin.elapsed() < HANG, "it was not told; {:?} was", node.happenings());
        thread::sleep(Duration::from_millis(5));
    }
}
