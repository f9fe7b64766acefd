//! CPUs go offline and come online again, as fast as they can. The kernel ends the scheduler each time; scx_vnuma loads it again.

use crate::threads::{Loop, start, stop};
use anyhow::{Context, Result, ensure};
use std::{fs, path::Path, time::Duration};
use vnuma_observe::scheduler::{DIRECTORY, Scheduler};
use vnuma_random::Rng;
use vnuma_scenario::{HANG_LIMIT, wait_for};

/// Times that the CPU goes and comes, for each mode, and the pause in between: scx_vnuma looks each second whether it has to load again.
const TIMES: usize = 24;
const MOST_PAUSE: Duration = Duration::from_millis(1200);
const CPU: u32 = 3;

fn set_online(online: bool) -> Result<()> {
    let path = format!("/sys/devices/system/cpu/cpu{CPU}/online");
    fs::write(&path, if online { "1" } else { "0" }).context(path)
}

pub(super) fn come_and_go() -> Result<()> {
    for options in [&[][..], &["--full"]] {
        let (mut process, first) = start(options)?;
        let mut random = Rng::new(1);
        for time in 0..TIMES {
            set_online(false)?;
            set_online(true)?;
            std::thread::sleep(MOST_PAUSE.mul_f64(random.share()));
            let ended = process.0.try_wait()?;
            ensure!(ended.is_none(), "options {options:?}: it has ended with {ended:?} after {time} times");
        }
        let mut opened = None;
        wait_for("scx_vnuma to be loaded again", HANG_LIMIT, || {
            let ended = process.0.try_wait()?;
            ensure!(ended.is_none(), "options {options:?}: it has ended with {ended:?}");
            opened = Scheduler::open(Path::new("/"), Path::new(DIRECTORY)).ok();
            Ok(opened.as_ref().is_some_and(|scheduler| scheduler.check().is_ok()))
        })?;
        ensure!(first.check().is_err(), "it is the one of before");
        let scheduler = opened.context("it was open")?;
        let thread = Loop::start("1-3")?;
        for (place, cpu) in [("3", 3), ("1", 1), ("3", 3)] {
            thread.place(&scheduler, Some(place), 0)?;
            thread.wait_until_on(&scheduler, &[cpu])?;
        }
        stop(process)?;
        thread.expect_to_run()?;
        println!("options {options:?}: a CPU went and came {TIMES} times, and places hold again");
    }
    Ok(())
}
