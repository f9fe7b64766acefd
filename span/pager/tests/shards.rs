//! Shards do not wait for each other, and their threads.

mod common;

use common::{Guest, expect, region, serve};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, mpsc},
    thread,
};
use vnuma_dsm_pager::{Access, Fault, Options, PAGE_SIZE, Placement, Region};

fn sharded(pages: usize, shards: usize) -> Option<Arc<Region>> {
    region(pages, Options { shards, ..Options::default() }).map(Arc::new)
}

#[test]
fn pages_are_divided_evenly_and_in_stripes() {
    for (pages, shards) in [(1, 1), (7, 3), (8, 4), (4096, 4), (5000, 3)] {
        let Some(region) = sharded(pages, shards) else { return };
        let next = region.stripe_pages().min(region.pages() - 1);
        assert!(
            shards == 1 || region.shard_of(next) == 1 || region.pages() < 2,
            "a stripe ends where it says"
        );
        let mut counts = BTreeMap::new();
        for page in 0..region.pages() {
            *counts.entry(region.shard_of(page)).or_insert(0_u64) += 1;
        }
        assert_eq!(counts.values().sum::<u64>(), pages as u64);
        assert!(counts.keys().all(|shard| *shard < shards), "{counts:?}");
        if pages >= shards * 512 {
            assert_eq!(counts.len(), shards, "{pages} pages: {counts:?}");
        }
    }
}

#[test]
fn a_blocked_shard_does_not_delay_another() {
    let Some(region) = sharded(4, 2) else { return };
    let stuck = 0;
    let free = (0..4).find(|page| region.shard_of(*page) != region.shard_of(stuck)).expect("another shard");
    let (entered, has_entered) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let blocking = move |region: &Region, fault: &Fault| {
        entered.send(()).expect("the test waits");
        let _ = released.recv();
        region.install(fault.page, &[1; PAGE_SIZE], Access::Read).expect("installed");
    };
    let serving = |region: &Region, fault: &Fault| {
        region.install(fault.page, &[2; PAGE_SIZE], Access::Read).expect("installed");
    };
    let first = serve(&region, region.shard_of(stuck), Placement::Float, blocking);
    let second = serve(&region, region.shard_of(free), Placement::Float, serving);
    let guest = Guest::of(&region);
    let (done, is_done) = mpsc::channel();
    let load = |page: u64| {
        let done = done.clone();
        thread::spawn(move || done.send((page, guest.load(page, 0) & 0xff)).expect("the test waits"))
    };
    let waiting = load(stuck);
    expect(&has_entered, "the first handler");
    let going = load(free);
    assert_eq!(expect(&is_done, "the other shard"), (free, 2), "served while the first handler is stuck");
    drop(release);
    assert_eq!(expect(&is_done, "the stuck shard"), (stuck, 1));
    waiting.join().expect("no panic");
    going.join().expect("no panic");
    assert_eq!((first.stop().0, second.stop().0), (1, 1));
}

#[test]
fn many_threads_get_what_they_wait_for() {
    const THREADS: u64 = 8;
    const PAGES: u64 = 64;
    let Some(region) = sharded(PAGES as usize, 4) else { return };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let servers: Vec<_> = (0..4)
        .map(|shard| {
            let seen = Arc::clone(&seen);
            let handler = move |region: &Region, fault: &Fault| {
                assert_eq!(region.shard_of(fault.page), shard);
                seen.lock().expect("no panic").push(fault.page);
                let content = [fault.page as u8; PAGE_SIZE];
                // Two threads may wait for one page; the second message finds it there.
                let _ = region.install(fault.page, &content, Access::Read);
            };
            serve(&region, shard, Placement::Follow, handler)
        })
        .collect();
    let guest = Guest::of(&region);
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            thread::spawn(move || {
                for step in 0..PAGES {
                    let page = (step * 7 + thread) % PAGES;
                    assert_eq!(guest.load(page, 1) & 0xff, page);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    drop(servers);
    let mut pages = seen.lock().expect("no panic").clone();
    pages.sort_unstable();
    pages.dedup();
    assert_eq!(pages, (0..PAGES).collect::<Vec<_>>());
}

#[test]
fn a_handler_runs_where_the_thread_faulted() {
    let Some(region) = sharded(256, 1) else { return };
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).expect("an affinity");
    let cpus: Vec<usize> =
        (0..nix::sched::CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect();
    let (where_, was_where) = mpsc::channel();
    let handler = move |region: &Region, fault: &Fault| {
        where_.send(nix::sched::sched_getcpu().expect("a CPU")).expect("the test waits");
        region.install(fault.page, &[1; PAGE_SIZE], fault.access).expect("installed");
    };
    let server = serve(&region, 0, Placement::Follow, handler);
    let guest = Guest::of(&region);
    let mut page = 0;
    for cpu in cpus.iter().take(2) {
        let (first, cpu) = (page, *cpu);
        page += 100;
        let faulting = thread::spawn(move || {
            let mut set = nix::sched::CpuSet::new();
            set.set(cpu).expect("a CPU");
            nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set).expect("an allowed CPU");
            assert!((first..first + 100).all(|page| guest.load(page, 0) & 0xff == 1));
        });
        faulting.join().expect("no panic");
        let places: Vec<usize> = (0..100).map(|_| expect(&was_where, "a fault")).collect();
        assert_eq!(places.last(), Some(&cpu), "it followed: {places:?}");
    }
    assert_eq!(server.stop(), (page, cpus.len().min(2) as u64));
}
