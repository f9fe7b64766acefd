//! Looks where the memory of VMs is, by a sample of their pages, in a thread of its own. A process that does not answer
//! a look in time is left to a thread that waits for it, and others have their turn.
//!
//! A look takes at most [`SAMPLES`] pages of a VM, whatever the VM's size. How often it is done is up to the core.

use super::inbox::Inbox;
use crate::core::event::Event;
use nix::{
    libc,
    time::{ClockId, clock_gettime},
};
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use vnuma_model::PageKind;
use vnuma_observe::{location::monotonic_ns, read_node_memory, read_node_pools};
use vnuma_policy::{
    residency::{AreaSample, Found, Keeps, MemoryArea, MemoryObservation},
    world::TaskId,
};
use vnuma_process::{
    Groups, Jobs, Looker, Sampled, SampledPage, Worker, choose_addresses, procfs, sample_pages,
};

/// Pages of a VM that are looked at. With as many, a share of 1 % is known to 0.2 %, with a confidence of 95 %.
const SAMPLES: u64 = 8192;
/// Of these, least of a part of its memory.
const LEAST: u64 = 256;
/// Addresses of a device that is mostly unplugged, and so mostly holes, are at most so many times as many: holes cost little.
const HOLES: u64 = 8;
/// Size of the smallest pages, KiB. All others are of a pool.
const SMALLEST_KIB: u64 = 4;
/// How long a look may take. One takes milliseconds.
const LIMIT: Duration = Duration::from_secs(5);
/// Descriptors of a process that are looked at. QEMU opens such memory when it starts.
const DESCRIPTORS: usize = 4096;
/// Name of an open file that is memory which no process maps (guest_memfd).
const GUEST_MEMORY: &str = "anon_inode:[kvm-gmem]";

/// Memory of this process of a VM is to be looked at; [`Event::MemoryObserved`] follows.
pub(super) struct Order {
    pub(super) task: TaskId,
    pub(super) pid: i32,
    pub(super) pidfd: Option<Arc<OwnedFd>>,
    pub(super) areas: Vec<MemoryArea>,
}

pub(super) fn start(groups: &Groups, root: PathBuf, inbox: Arc<Inbox>) -> io::Result<Worker<Order>> {
    let (all, root) = (groups.clone(), Arc::new(root));
    groups.host.start("observer", move |orders: Jobs<Order>| {
        let mut looker = Looker::new(&all, orders.heartbeat(), LIMIT, || ());
        for order in orders {
            let (task, pid, root) = (order.task, order.pid, Arc::clone(&root));
            let looked = looker.look((task.vm, pid), move |()| observe(&root, &order));
            let outcome = looked.unwrap_or_else(|error| Err(error.to_string()));
            inbox.tell(Event::MemoryObserved(task, outcome));
        }
    })
}

fn observe(root: &Path, order: &Order) -> Result<MemoryObservation, String> {
    let (began_ns, cost_ns) = (monotonic_ns(), cpu_time_ns());
    let pidfd = order.pidfd.as_ref().ok_or_else(|| format!("process {} has ended", order.pid))?;
    let nodes = read_node_memory(root).map_err(|error| error.to_string())?;
    let pools = match order.areas.iter().any(|area| area.page_kib > SMALLEST_KIB) {
        true => read_node_pools(root).map_err(|error| error.to_string())?,
        false => Vec::new(),
    };
    let allowed = procfs::read_allowed_nodes(order.pid).map_err(|error| error.to_string())?;
    let unmapped = procfs::has_open(Path::new("/proc"), order.pid, GUEST_MEMORY, DESCRIPTORS);
    let unmapped = unmapped.map_err(|error| error.to_string())?;
    let all = order.areas.iter().fold(0_u64, |sum, area| sum.saturating_add(area.guest_bytes));
    let mut areas = Vec::with_capacity(order.areas.len());
    for area in &order.areas {
        let most = looks(area, all);
        let page = area.page_kib.saturating_mul(1024);
        let addresses = choose_addresses(area.start, area.bytes, page, most, began_ns);
        let pages = sample_pages(pidfd.as_fd(), order.pid, &addresses).map_err(|error| why(&error))?;
        areas.push(sample(area, &addresses, &pages));
    }
    Ok(MemoryObservation {
        began_ns,
        cost_ns: cpu_time_ns().saturating_sub(cost_ns),
        areas,
        nodes,
        pools,
        allowed: allowed.iter().collect(),
        unmapped,
    })
}

/// How many addresses of some memory are looked at: its part of what the guest has, and more where it has holes.
fn looks(area: &MemoryArea, all: u64) -> u64 {
    let part = u128::from(SAMPLES) * u128::from(area.guest_bytes) / u128::from(all.max(1));
    let holes = area.bytes.div_ceil(area.guest_bytes.max(1)).clamp(1, HOLES);
    (part as u64).max(LEAST).saturating_mul(holes)
}

fn why(error: &io::Error) -> String {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => ": vnumad needs root, or CAP_SYS_PTRACE and CAP_SYS_NICE",
        Some(libc::ESRCH) => ": the process has ended",
        _ => "",
    };
    format!("its pages: {error}{hint}")
}

/// CPU time of this thread.
pub(super) fn cpu_time_ns() -> u64 {
    // Every kernel has this clock.
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    time.map_or(0, |time| (time.tv_sec() as u64).saturating_mul(1_000_000_000) + time.tv_nsec() as u64)
}

/// Counts pages that are alike.
fn sample(area: &MemoryArea, addresses: &[u64], pages: &[Sampled]) -> AreaSample {
    let mut movable = Vec::new();
    let mut counts: BTreeMap<(u32, PageKind, Option<Keeps>, bool), u64> = BTreeMap::new();
    let mut swapped = 0;
    for (address, page) in addresses.iter().zip(pages) {
        match page {
            Sampled::Absent => {}
            Sampled::Swapped => swapped += 1,
            Sampled::Page(page) => {
                let keeps = keeps(area, page);
                movable.extend(keeps.is_none().then_some((*address, page.node)));
                *counts.entry((page.node, page.kind, keeps, page.locked)).or_default() += 1;
            }
        }
    }
    let found = counts
        .into_iter()
        .map(|((node, kind, kept, locked), count)| Found { node, kind, kept, locked, count })
        .collect();
    AreaSample { area: *area, looked: pages.len() as u64, found, swapped, pages: movable }
}

fn keeps(area: &MemoryArea, page: &SampledPage) -> Option<Keeps> {
    match page {
        SampledPage { merged: true, .. } => Some(Keeps::Merged),
        // It moves by whole ones, and how large these are is not known.
        SampledPage { kind: PageKind::Pool, .. } if area.page_kib <= SMALLEST_KIB => Some(Keeps::Pool),
        SampledPage { shared: true, .. } => Some(Keeps::Shared),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnuma_process::open_pidfd;

    const PAGE: u64 = 4096;

    fn order(areas: Vec<MemoryArea>) -> Order {
        let pid = std::process::id().cast_signed();
        Order {
            task: TaskId { vm: 1, number: 1 },
            pid,
            pidfd: Some(Arc::new(open_pidfd(pid).expect("a pidfd"))),
            areas,
        }
    }

    #[test]
    fn memory_of_a_process_is_found_with_its_cost() {
        let memory = vec![1_u8; 16 << 20];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let area = |guest_node, start, pages| {
            let bytes = pages * PAGE;
            MemoryArea { guest_node, start, bytes, guest_bytes: bytes, page_kib: 4 }
        };
        let seen = observe(Path::new("/"), &order(vec![area(0, start, 4000), area(1, 0, 100)]));
        let seen = match seen {
            Ok(seen) => seen,
            Err(problem) => {
                eprintln!("skipped: {problem}");
                return;
            }
        };
        let there = |sample: &AreaSample| sample.found.iter().map(|found| found.count).sum::<u64>();
        assert_eq!(seen.areas[0].looked, 4000, "all of it");
        assert_eq!((there(&seen.areas[0]), seen.areas[0].swapped), (4000, 0));
        assert_eq!((seen.areas[1].looked, there(&seen.areas[1])), (100, 0), "nothing is at address 0");
        assert!(seen.cost_ns > 0 && seen.began_ns > 0 && !seen.unmapped);
        assert!(!seen.nodes.is_empty() && !seen.allowed.is_empty());
        assert!(memory.iter().all(|byte| *byte == 1));
    }

    #[test]
    fn a_large_vm_costs_no_more_than_a_small_one() {
        // A TiB of addresses, of which next to nothing is there.
        let area =
            MemoryArea { guest_node: 0, start: 1 << 45, bytes: 1 << 40, guest_bytes: 1 << 40, page_kib: 4 };
        match observe(Path::new("/"), &order(vec![area])) {
            Ok(seen) => assert_eq!(seen.areas[0].looked, SAMPLES),
            Err(problem) => eprintln!("skipped: {problem}"),
        }
    }

    #[test]
    fn each_part_of_the_memory_has_its_part_of_the_looks_and_holes_cost_a_few_more() {
        let area =
            |bytes, guest_bytes| MemoryArea { guest_node: 0, start: 0, bytes, guest_bytes, page_kib: 4 };
        let gib = 1 << 30;
        assert_eq!(looks(&area(8 * gib, 8 * gib), 8 * gib), SAMPLES);
        assert_eq!(looks(&area(8 * gib, 8 * gib), 32 * gib), SAMPLES / 4);
        assert_eq!(looks(&area(8 * gib, 2 * gib), 8 * gib), SAMPLES, "a quarter of it is plugged");
        assert_eq!(looks(&area(1024 * gib, 4 * gib), 8 * gib), SAMPLES / 2 * HOLES);
        assert_eq!(looks(&area(gib, 1), u64::MAX), LEAST * HOLES);
        assert_eq!(looks(&area(0, 0), 0), LEAST);
    }

    #[test]
    fn a_process_that_has_ended_is_said_to_have() {
        let mut gone = order(Vec::new());
        gone.pidfd = None;
        assert!(observe(Path::new("/"), &gone).expect_err("no process").ends_with("has ended"));
        let refused = why(&io::Error::from_raw_os_error(libc::EPERM));
        assert_eq!(
            refused,
            "its pages: Operation not permitted (os error 1): vnumad needs root, or CAP_SYS_PTRACE and CAP_SYS_NICE"
        );
    }

    #[test]
    fn pages_are_counted_by_what_they_are() {
        let page = SampledPage { node: 1, kind: PageKind::Base, shared: false, merged: false, locked: false };
        let pages = [
            Sampled::Page(page),
            Sampled::Page(SampledPage { shared: true, ..page }),
            Sampled::Page(SampledPage { shared: true, merged: true, ..page }),
            Sampled::Page(SampledPage { kind: PageKind::Pool, shared: true, ..page }),
            Sampled::Page(page),
            Sampled::Swapped,
            Sampled::Absent,
        ];
        let area =
            MemoryArea { guest_node: 3, start: 0, bytes: 7 * PAGE, guest_bytes: 7 * PAGE, page_kib: 4 };
        let addresses: Vec<u64> = (0..7).map(|page| page * PAGE).collect();
        let counted = sample(&area, &addresses, &pages);
        assert_eq!(counted.pages, [(0, 1), (4 * PAGE, 1)], "those that nothing keeps");
        let expected = [
            (PageKind::Base, None, 2),
            (PageKind::Base, Some(Keeps::Merged), 1),
            (PageKind::Base, Some(Keeps::Shared), 1),
            (PageKind::Pool, Some(Keeps::Pool), 1),
        ];
        let found: Vec<_> = counted.found.iter().map(|found| (found.kind, found.kept, found.count)).collect();
        assert_eq!((found, counted.looked, counted.swapped), (expected.to_vec(), 7, 1));
        let huge = SampledPage { kind: PageKind::Pool, ..page };
        let pages = [huge, SampledPage { shared: true, ..huge }].map(Sampled::Page);
        let area = MemoryArea { bytes: 4 << 20, guest_bytes: 4 << 20, page_kib: 2048, ..area };
        let counted = sample(&area, &[0, 2 << 20], &pages);
        let kept: Vec<_> = counted.found.iter().map(|found| found.kept).collect();
        assert_eq!((kept, counted.pages), (vec![None, Some(Keeps::Shared)], vec![(0, 1)]), "huge pages move");
    }
}
