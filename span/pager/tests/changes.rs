//! Every change of a page's state, as a guest sees it, and every refusal.

mod common;

use common::{Guest, HANG, expect, simple};
use std::{
    sync::{Arc, mpsc},
    thread,
    time::Instant,
};
use vnuma_dsm_pager::{
    Access, Cause, Fault, Options, PAGE_SIZE, Page, PageError, PageState, PagerError, Region,
};

fn content(byte: u8) -> Page {
    [byte; PAGE_SIZE]
}

const fn word(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// Does something as a guest in another thread; gives the faults that it reports until it is done to `serve`.
fn as_guest<T: Send + 'static>(
    region: &Arc<Region>,
    act: impl FnOnce(Guest) -> T + Send + 'static,
    mut serve: impl FnMut(&Region, Fault),
) -> T {
    let guest = Guest::of(region);
    let (sender, receiver) = mpsc::channel();
    let thread = thread::spawn(move || sender.send(act(guest)).expect("the test waits"));
    let start = Instant::now();
    let mut faults = Vec::new();
    let value = loop {
        for shard in 0..region.shards() {
            faults.clear();
            region.read_faults(shard, &mut faults).expect("faults");
            faults.iter().for_each(|fault| serve(region, *fault));
        }
        if let Ok(value) = receiver.try_recv() {
            break value;
        }
        assert!(start.elapsed() < HANG, "the guest hangs");
        thread::yield_now();
    };
    thread.join().expect("no panic");
    value
}

fn nobody(_: &Region, fault: Fault) {
    panic!("unexpected: {fault:?}");
}

/// A page in a state, with word 0 of its content.
fn prepared(state: PageState) -> Option<Arc<Region>> {
    let region = Arc::new(simple(4)?);
    match state {
        PageState::Invalid => {}
        PageState::ReadOnly => region.install(1, &content(7), Access::Read).expect("installed"),
        PageState::ReadWrite => region.install(1, &content(7), Access::Write).expect("installed"),
        PageState::Poisoned => region.poison(1).expect("poisoned"),
    }
    assert_eq!(region.state(1).expect("inside"), state);
    Some(region)
}

#[test]
fn a_first_read_waits_for_its_page() {
    let Some(region) = prepared(PageState::Invalid) else { return };
    let mut seen = Vec::new();
    let value = as_guest(
        &region,
        |guest| (nix::unistd::gettid().as_raw(), guest.load(1, 3)),
        |region, fault| {
            seen.push(fault);
            region.install(fault.page, &content(9), fault.access).expect("installed");
        },
    );
    assert_eq!(value.1, word(9));
    assert_eq!(seen, [Fault { page: 1, access: Access::Read, cause: Cause::Missing, thread: value.0 }]);
    assert_eq!(region.state(1).expect("inside"), PageState::ReadOnly);
}

#[test]
fn a_write_to_a_page_that_can_be_read_waits_for_the_upgrade() {
    let Some(region) = prepared(PageState::ReadOnly) else { return };
    let mut seen = Vec::new();
    as_guest(
        &region,
        |guest| guest.store(1, 0, guest.load(1, 1) + 1),
        |region, fault| {
            seen.push((fault.access, fault.cause));
            region.upgrade(1).expect("upgraded");
        },
    );
    assert_eq!(seen, [(Access::Write, Cause::Protected)]);
    assert_eq!(as_guest(&region, |guest| guest.load(1, 0), nobody), word(7) + 1);
}

#[test]
fn a_downgrade_reads_what_was_written_and_stops_the_next_write() {
    let Some(region) = prepared(PageState::ReadWrite) else { return };
    as_guest(&region, |guest| guest.store(1, 2, 42), nobody);
    let copy = region.downgrade(1, |page| *page).expect("downgraded");
    assert_eq!(copy[16..24], 42_u64.to_ne_bytes());
    assert_eq!(as_guest(&region, |guest| guest.load(1, 2), nobody), 42);
    let mut faults = 0;
    as_guest(
        &region,
        |guest| guest.store(1, 2, 43),
        |region, _| {
            faults += 1;
            region.upgrade(1).expect("upgraded");
        },
    );
    assert_eq!(faults, 1);
}

#[test]
fn an_invalidated_page_is_out_of_reach_and_its_content_is_kept() {
    for state in [PageState::ReadOnly, PageState::ReadWrite] {
        let Some(region) = prepared(state) else { return };
        // So that the guest has the page in its tables.
        assert_eq!(as_guest(&region, |guest| guest.load(1, 0), nobody), word(7));
        assert_eq!(region.invalidate(1, |page| *page).expect("invalidated"), content(7));
        assert_eq!(region.peek(1, |page| page[0]).expect("still there"), 7);
        let mut seen = Vec::new();
        as_guest(
            &region,
            |guest| guest.store(1, 0, guest.load(1, 0) + 1),
            |region, fault| {
                seen.push((fault.access, fault.cause));
                let change = |page: &mut Page| page[0] = 8;
                region.install_with(1, Access::Write, change).expect("installed");
            },
        );
        assert_eq!(seen, [(Access::Read, Cause::Unmapped)], "{state}");
        let copy = region.invalidate(1, |page| *page).expect("invalidated");
        assert_eq!(copy[..2], [9, 7], "the delta was applied to what was there: {state}");
    }
}

/// What comes before the guest may have the page.
#[test]
fn a_stored_content_waits_until_it_is_mapped() {
    let Some(region) = prepared(PageState::ReadWrite) else { return };
    region.invalidate(1, |_| ()).expect("invalidated");
    region.store(1, |page| page[..8].fill(9)).expect("stored");
    assert_eq!(region.state(1).expect("inside"), PageState::Invalid);
    let mut seen = Vec::new();
    let value = as_guest(
        &region,
        |guest| guest.load(1, 0),
        |region, fault| {
            seen.push(fault.cause);
            region.install_with(1, Access::Read, |_| ()).expect("installed");
        },
    );
    assert_eq!((value, seen), (word(9), vec![Cause::Unmapped]));
    assert_eq!(as_guest(&region, |guest| guest.load(1, 1), nobody), word(7), "the rest is as it was");
}

#[test]
fn protection_does_not_outlive_a_page() {
    let Some(region) = prepared(PageState::ReadOnly) else { return };
    region.invalidate(1, |_| ()).expect("invalidated");
    region.install(1, &content(1), Access::Write).expect("installed");
    as_guest(&region, |guest| guest.store(1, 0, 5), nobody);
    region.invalidate(1, |_| ()).expect("invalidated");
    region.install(1, &content(1), Access::Read).expect("installed");
    let mut faults = 0;
    as_guest(
        &region,
        |guest| guest.store(1, 0, 5),
        |region, _| {
            faults += 1;
            region.upgrade(1).expect("upgraded");
        },
    );
    assert_eq!(faults, 1, "a page that was writable before is read-only now");
}

#[test]
fn a_lost_page_is_an_error_and_can_be_replaced() {
    for state in [PageState::Invalid, PageState::ReadOnly, PageState::ReadWrite] {
        let Some(region) = prepared(state) else { return };
        if !region.features().poison {
            eprintln!("skipped: the kernel lacks UFFDIO_POISON");
            let error = region.poison(1).expect_err("it says so");
            assert!(error.to_string().contains("6.6"), "{error}");
            return;
        }
        region.poison(1).expect("poisoned");
        let read = as_guest(&region, |guest| guest.read_by_kernel(1), nobody);
        assert_eq!(read, Err(nix::errno::Errno::EFAULT), "{state}");
        assert_eq!(
            as_guest(
                &region,
                |guest| guest.read_by_kernel(2),
                |region, fault| {
                    region.install(fault.page, &content(4), Access::Read).expect("its neighbour is not lost");
                }
            ),
            Ok(4)
        );
        region.install(1, &content(5), Access::Write).expect("another content");
        assert_eq!(as_guest(&region, |guest| guest.load(1, 0), nobody), word(5));
        as_guest(&region, |guest| guest.store(1, 0, 1), nobody);
    }
}

#[test]
fn who_waits_for_a_page_that_gets_lost_is_told() {
    let Some(region) = prepared(PageState::Invalid) else { return };
    if !region.features().poison {
        eprintln!("skipped: the kernel lacks UFFDIO_POISON");
        return;
    }
    let read = as_guest(
        &region,
        |guest| guest.read_by_kernel(1),
        |region, fault| {
            region.poison(fault.page).expect("poisoned");
        },
    );
    assert_eq!(read, Err(nix::errno::Errno::EFAULT));
}

#[test]
fn a_wake_up_without_a_page_is_another_fault() {
    let Some(region) = prepared(PageState::Invalid) else { return };
    let mut faults = 0;
    as_guest(
        &region,
        |guest| guest.load(1, 0),
        |region, fault| {
            faults += 1;
            match faults {
                1 | 2 => region.wake(fault.page).expect("woken"),
                _ => region.install(fault.page, &content(1), Access::Read).expect("installed"),
            }
        },
    );
    assert_eq!(faults, 3);
}

#[test]
fn a_mapping_that_the_kernel_drops_comes_back_by_itself() {
    for state in [PageState::ReadOnly, PageState::ReadWrite] {
        let Some(region) = prepared(state) else { return };
        assert_eq!(as_guest(&region, |guest| guest.load(1, 0), nobody), word(7));
        // As when the page is swapped out, or moved to another node.
        let address = region.guest().as_ptr().wrapping_add(PAGE_SIZE);
        // SAFETY: a page of the region; its content is the file's.
        let dropped = unsafe { libc::madvise(address.cast(), PAGE_SIZE, libc::MADV_DONTNEED) };
        assert_eq!(dropped, 0);
        assert_eq!(as_guest(&region, |guest| guest.load(1, 0), nobody), word(7), "{state}");
        let mut faults = 0;
        as_guest(
            &region,
            |guest| guest.store(1, 0, 5),
            |region, _| {
                faults += 1;
                region.upgrade(1).expect("upgraded");
            },
        );
        assert_eq!(faults, u32::from(state == PageState::ReadOnly), "{state} as before");
    }
}

#[test]
fn a_page_that_device_code_holds_stays() {
    let Some(region) = prepared(PageState::ReadWrite) else { return };
    let pin = region.pin(1, Access::Write).expect("pinned");
    let second = region.pin(1, Access::Read).expect("pinned");
    // SAFETY: the page's memory, which no guest of this test touches.
    unsafe { pin.address().write(66) };
    drop(pin);
    let refusals = [
        region.invalidate(1, |_| ()).expect_err("pinned"),
        region.downgrade(1, |_| ()).expect_err("pinned"),
        region.poison(1).expect_err("pinned"),
    ];
    for (error, act) in refusals.iter().zip(["invalidated", "downgraded", "poisoned"]) {
        assert_eq!(error.to_string(), format!("page 1 cannot be {act}: it is pinned 1 times"));
    }
    drop(second);
    assert_eq!(region.invalidate(1, |page| page[0]).expect("released"), 66);
    let error = region.pin(1, Access::Read).expect_err("invalid");
    assert_eq!(error.to_string(), "page 1 cannot be pinned: it is invalid");
}

/// A page that is taken away as soon as it was given: who asks for it and pins it then would always be late.
#[test]
fn a_page_that_is_fetched_to_be_pinned_stays() {
    let Some(region) = prepared(PageState::ReadOnly) else { return };
    let pin = region.fetch_and_pin(1, Access::Read).expect("pinned");
    let (release, released) = mpsc::channel();
    let region = &*region;
    thread::scope(|scope| {
        let device = scope.spawn(move || {
            let second = region.fetch_and_pin(1, Access::Write).expect("pinned");
            released.recv().expect("the other end is there");
            drop(second);
        });
        drop(pin);
        // It reads only, which is not enough for the second pin.
        region.invalidate(1, |_| ()).expect("nobody has pinned it");
        let give = |access| {
            region.install(1, &content(1), access).expect("installed");
            region.invalidate(1, |_| ())
        };
        give(Access::Read).expect("nobody has pinned it");
        let begin = Instant::now();
        while give(Access::Write).is_ok() {
            assert!(begin.elapsed() < HANG, "it asks for no pin");
        }
        release.send(()).expect("it waits");
        device.join().expect("no panic");
    });
    region.invalidate(1, |_| ()).expect("released");
}

#[test]
fn what_a_state_does_not_allow_is_refused_and_changes_nothing() {
    use PageState::{Invalid, Poisoned, ReadOnly, ReadWrite};
    type Act = fn(&Region) -> Result<(), PageError>;
    let acts: [(&str, Act, &[PageState]); 6] = [
        ("installed", |region| region.install(1, &content(1), Access::Read), &[Invalid, Poisoned]),
        ("stored", |region| region.store(1, |_| ()), &[Invalid, Poisoned]),
        ("upgraded", |region| region.upgrade(1), &[ReadOnly]),
        ("downgraded", |region| region.downgrade(1, |_| ()), &[ReadWrite]),
        ("invalidated", |region| region.invalidate(1, |_| ()), &[ReadOnly, ReadWrite]),
        ("read", |region| region.peek(1, |_| ()), &[Invalid, ReadOnly]),
    ];
    for (name, act, allowed) in acts {
        for state in [Invalid, ReadOnly, ReadWrite, Poisoned] {
            let Some(region) = prepared(state) else { return };
            match act(&region) {
                Ok(()) => assert!(allowed.contains(&state), "{name} while {state}"),
                Err(error) => {
                    assert!(!allowed.contains(&state), "{name} while {state}: {error}");
                    assert_eq!(error.to_string(), format!("page 1 cannot be {name}: it is {state}"));
                    assert_eq!(region.state(1).expect("inside"), state);
                }
            }
        }
    }
}

#[test]
fn pages_outside_are_refused_by_everything() {
    let Some(region) = simple(4) else { return };
    for page in [4, u64::MAX, 1 << 52] {
        let refusals = [
            region.install(page, &content(1), Access::Read).expect_err("outside"),
            region.store(page, |_| ()).expect_err("outside"),
            region.upgrade(page).expect_err("outside"),
            region.downgrade(page, |_| ()).expect_err("outside"),
            region.invalidate(page, |_| ()).expect_err("outside"),
            region.peek(page, |_| ()).expect_err("outside"),
            region.poison(page).expect_err("outside"),
            region.wake(page).expect_err("outside"),
            region.state(page).map(drop).expect_err("outside"),
            region.pin(page, Access::Read).map(drop).expect_err("outside"),
        ];
        for error in refusals {
            let text = format!("page {page} is outside the region, which has 4 pages");
            assert_eq!(error.to_string(), text);
        }
    }
}

#[test]
fn regions_that_make_no_sense_are_refused() {
    for len in [0, 1, PAGE_SIZE - 1, PAGE_SIZE + 1, usize::MAX - PAGE_SIZE + 1] {
        let error = Region::create(len, Options::default()).expect_err("a length");
        assert!(matches!(error, PagerError::Length { .. }), "{error}");
        assert!(error.to_string().contains(&len.to_string()), "{error}");
    }
    for shards in [0, 5, 257] {
        let options = Options { shards, ..Options::default() };
        let error = Region::create(4 * PAGE_SIZE, options).expect_err("a number of shards");
        assert_eq!(error.to_string(), format!("{shards} shards: there must be at least 1 and at most 4"));
    }
}

#[test]
fn a_child_gets_no_way_around_the_pager() {
    let Some(region) = prepared(PageState::ReadWrite) else { return };
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("the maps of this process");
    let start = format!("{:x}-", region.guest().as_ptr() as usize);
    let mapping = maps.split_once(&start).expect("the guest's mapping").1;
    let flags = mapping.lines().find(|line| line.starts_with("VmFlags:")).expect("flags");
    // dc: not copied on fork; nh: no huge pages; um, uw, ui: missing, write-protected, minor faults are reported.
    for flag in [" dc", " nh", " um", " uw", " ui"] {
        assert!(flags.contains(flag), "{flag} of {flags}");
    }
}

#[test]
fn locked_memory_can_be_taken_away_all_the_same() {
    let options = Options { lock: true, ..Options::default() };
    let region = match Region::create(4 * PAGE_SIZE, options) {
        Ok(region) => Arc::new(region),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("RLIMIT_MEMLOCK") || text.contains("userfaultfd"), "{text}");
            eprintln!("skipped: {text}");
            return;
        }
    };
    region.install(1, &content(7), Access::Write).expect("installed");
    as_guest(&region, |guest| guest.store(1, 0, 5), nobody);
    assert_eq!(region.invalidate(1, |page| page[8]).expect("invalidated"), 7);
}

#[test]
fn who_waits_when_a_region_ends_goes_on() {
    let Some(region) = prepared(PageState::Invalid) else { return };
    let guest = Guest::of(&region);
    let (sender, receiver) = mpsc::channel();
    // By a system call: the mapping may be gone by the time that the thread looks again.
    let thread = thread::spawn(move || sender.send(guest.read_by_kernel(1)).expect("the test waits"));
    let start = Instant::now();
    let mut faults = Vec::new();
    while region.read_faults(0, &mut faults).expect("faults") == 0 {
        assert!(start.elapsed() < HANG, "no fault");
        thread::yield_now();
    }
    drop(region);
    let _ = expect(&receiver, "a thread that waited");
    thread.join().expect("no panic");
}
