//! A page that is taken away while others write to it loses no update, if it is done in the pager's order.

mod common;

use common::{Guest, HANG, serve, simple};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};
use vnuma_dsm_pager::{Access, Fault, Page, PageError, PageState, Placement, Region};

const WRITERS: usize = 2;
const PAGE: u64 = 0;

/// What became of a run.
struct Outcome {
    /// Pages taken away.
    steals: u64,
    /// Steals after which a writer's last store was not in the copy that came back.
    lost: u64,
}

/// Writers count upwards in words of their own, and see whether the word still holds what they stored last. A thief
/// takes the page with `steal`, and it comes back from the thief's copy alone.
///
/// `steal` also gets a function that waits until somebody has written to the page once more.
fn run(steals: u64, steal: fn(&Region, &dyn Fn()) -> Result<Page, PageError>) -> Option<Outcome> {
    let region = Arc::new(simple(1)?);
    let copy = Arc::new(std::sync::Mutex::new(None::<Page>));
    region.install(PAGE, &[0; 4096], Access::Write).expect("installed");
    let kept = Arc::clone(&copy);
    let handler = move |region: &Region, fault: &Fault| {
        // Invalid and no copy: the thief is between its two steps, and will put the page back.
        let Some(page) = kept.lock().expect("no panic").take() else { return };
        region.install(fault.page, &page, Access::Write).expect("installed");
    };
    let server = serve(&region, 0, Placement::Float, handler);
    let (stop, lost) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let stores = Arc::new(AtomicU64::new(0));
    let guest = Guest::of(&region);
    let writers: Vec<_> = (0..WRITERS)
        .map(|word| {
            let (stop, lost, stores) = (Arc::clone(&stop), Arc::clone(&lost), Arc::clone(&stores));
            thread::spawn(move || {
                let mut last = 0;
                while !stop.load(Ordering::Relaxed) {
                    let now = guest.load(PAGE, word);
                    if now != last {
                        lost.fetch_add(1, Ordering::Relaxed);
                    }
                    last = now + 1;
                    guest.store(PAGE, word, last);
                    stores.fetch_add(1, Ordering::Relaxed);
                    // There may be one CPU only.
                    if last.is_multiple_of(16) {
                        thread::yield_now();
                    }
                }
                last
            })
        })
        .collect();
    let start = Instant::now();
    let mut done = 0;
    while done < steals {
        assert!(start.elapsed() < HANG, "{done} steals of {steals}");
        if region.state(PAGE).expect("inside") != PageState::ReadWrite {
            thread::yield_now();
            continue;
        }
        let written = || {
            let before = stores.load(Ordering::Relaxed);
            let waiting = || stores.load(Ordering::Relaxed) == before && start.elapsed() < HANG;
            while waiting() {
                thread::yield_now();
            }
        };
        written();
        let page = steal(&region, &written).expect("stolen");
        *copy.lock().expect("no panic") = Some(page);
        // Who faulted before the copy was there waits without a handler's attention.
        region.wake(PAGE).expect("woken");
        done += 1;
    }
    stop.store(true, Ordering::Relaxed);
    let last: Vec<u64> = writers.into_iter().map(|writer| writer.join().expect("no panic")).collect();
    // The last copy may still be under way.
    if let Some(page) = copy.lock().expect("no panic").take() {
        region.install(PAGE, &page, Access::Write).expect("installed");
    }
    let mut lost = lost.load(Ordering::Relaxed);
    lost += last.iter().enumerate().filter(|(word, last)| guest.load(PAGE, *word) != **last).count() as u64;
    server.stop();
    Some(Outcome { steals: done, lost })
}

#[test]
fn no_update_is_lost() {
    let Some(outcome) = run(4000, |region, _| region.invalidate(PAGE, |page| *page)) else { return };
    eprintln!("{} steals, {} lost updates", outcome.steals, outcome.lost);
    assert_eq!(outcome.lost, 0);
}

#[test]
fn no_update_is_lost_by_way_of_a_downgrade() {
    let steal = |region: &Region, _: &dyn Fn()| {
        let copy = region.downgrade(PAGE, |page| *page)?;
        let last = region.invalidate(PAGE, |page| *page)?;
        assert!(copy == last, "somebody wrote to a page that is read-only");
        Ok(last)
    };
    let Some(outcome) = run(2000, steal) else { return };
    eprintln!("{} steals, {} lost updates", outcome.steals, outcome.lost);
    assert_eq!(outcome.lost, 0);
}

/// The order that seems natural loses updates: this is why the pager has another one, and shows that the tests above
/// would notice.
#[test]
fn to_copy_first_loses_updates() {
    let steal = |region: &Region, written: &dyn Fn()| {
        let pin = region.pin(PAGE, Access::Read)?;
        // SAFETY: the memory of a page, which guests write to at the same time: the very mistake.
        let copy = unsafe { pin.address().cast::<Page>().as_ptr().read_volatile() };
        drop(pin);
        written();
        region.invalidate(PAGE, |_| ())?;
        Ok(copy)
    };
    let Some(outcome) = run(2000, steal) else { return };
    eprintln!("{} steals, {} lost updates", outcome.steals, outcome.lost);
    assert!(outcome.lost > 0, "the order makes no difference: the other tests prove nothing");
}
