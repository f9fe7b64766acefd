//! The frequency of this machine's time-stamp counter (TSC), which the TSC of an emulated server follows.
//!
//! Left alone, a server's kernel finds it by the emulated timer chip (PIT). Beside other work a CPU of the server stands still while
//! the chip goes on. Linux took 286 and 861 MHz for 2300 MHz then (`PIT calibration deviates from HPET`), and the server's clock
//! went that much too fast.

use std::arch::x86_64::_rdtsc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long the counter is watched: an error of a microsecond is one of 20 in a million then.
const WATCHED: Duration = Duration::from_millis(50);
/// Of so many readings the quickest counts: in it the thread was not interrupted.
const READINGS: usize = 64;

/// In kHz, found once.
pub(crate) fn frequency_khz() -> u64 {
    static FOUND: OnceLock<u64> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let (_, count, time) = reading();
        std::thread::sleep(WATCHED);
        let (_, later_count, later_time) = reading();
        let micros = later_time.duration_since(time).as_micros().max(1) as u64;
        later_count.wrapping_sub(count) * 1000 / micros
    })
}

/// How long it took, the counter, and the time.
fn reading() -> (u64, u64, Instant) {
    // SAFETY: each CPU of x86-64 has this instruction, and Linux allows it to programs.
    let count = || unsafe { _rdtsc() };
    let read = |_| {
        let (before, time) = (count(), Instant::now());
        (count().wrapping_sub(before), before, time)
    };
    (0..READINGS).map(read).min_by_key(|&(taken, ..)| taken).expect("there are readings")
}
