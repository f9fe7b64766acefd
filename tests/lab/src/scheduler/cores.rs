//! A thread that wakes gets a whole core of its place if there is one, also if its last CPU is idle, as the other thread of that core may be busy.
//! On a server whose cores have two threads.

use crate::threads::{Loop, start, stop};
use anyhow::{Context, Result, ensure};
use nix::unistd::gettid;
use std::{
    fs,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};
use vnuma_observe::scheduler::Scheduler;
use vnuma_scenario::HANG_LIMIT;

/// One node of the server, with two cores: 4 and 5, 6 and 7.
const NODE: &str = "4-7";
const BUSY: &str = "4";
const BESIDE: u32 = 5;
/// Looks at where it is, and how many of them may find it beside the loop: threads of the kernel wake, too.
const LOOKS: usize = 50;
const MOST: usize = 15;

pub(super) fn are_taken_whole() -> Result<()> {
    let path = "/sys/devices/system/cpu/cpu4/topology/thread_siblings_list";
    let siblings = fs::read_to_string(path).context(path)?;
    ensure!(siblings.trim() == "4-5", "the siblings of CPU 4 are {siblings:?}");
    let (process, scheduler) = start(&[])?;
    let _busy = Loop::start_fair(BUSY)?;
    let (tell, told) = mpsc::channel();
    let ended = AtomicBool::new(false);
    let beside = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Fails only if the test is over.
            let _ = tell.send(gettid().as_raw());
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let beside = told.recv_timeout(HANG_LIMIT).map_err(anyhow::Error::from).and_then(|tid| {
            let thread = Loop::of_thread(tid);
            thread.make_ext()?;
            watch(&scheduler, &thread)
        });
        ended.store(true, Ordering::Relaxed);
        beside
    })?;
    println!(
        "a thread that wakes was beside a loop at {beside} of {LOOKS} looks, while a core of its place was idle"
    );
    ensure!(beside <= MOST, "it was beside a loop at {beside} of {LOOKS} looks");
    stop(process)
}

/// How often it is found beside the loop, after it has been there.
fn watch(scheduler: &Scheduler, thread: &Loop) -> Result<usize> {
    thread.place(scheduler, Some(&BESIDE.to_string()), 0)?;
    thread.wait_until_on(scheduler, &[BESIDE])?;
    thread.place(scheduler, Some(NODE), 0)?;
    let mut beside = 0;
    for _ in 0..LOOKS {
        std::thread::sleep(Duration::from_millis(50));
        thread.again(scheduler)?;
        beside += usize::from(thread.cpu()? == BESIDE);
    }
    Ok(beside)
}
