//! Threads that fill a cache: each reads more memory than the cache holds, again and again.

use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use std::{
    hint::black_box,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};
use vnuma_model::CpuId;

/// At most so many: a few cores fill a cache faster than one uses it.
pub const MOST: usize = 4;
/// Memory of each by the size of the cache.
const LARGER: u64 = 2;
/// Words of a line of 64 bytes.
const LINE: usize = 8;

/// Threads that run until this is dropped.
pub struct Fillers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Fillers {
    /// Starts one on each CPU, and waits until all have read their memory once.
    pub fn start(cpus: &[CpuId], cache_bytes: u64) -> io::Result<Self> {
        let (stop, passed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let words = (cache_bytes * LARGER) as usize / size_of::<u64>();
        let mut fillers = Self { stop: Arc::clone(&stop), threads: Vec::new() };
        for &cpu in cpus {
            let (stop, passed) = (Arc::clone(&stop), Arc::clone(&passed));
            let filler = thread::Builder::new().name("filler".to_owned());
            fillers.threads.push(filler.spawn(move || fill(cpu, words, &stop, &passed))?);
        }
        while passed.load(Ordering::Relaxed) < cpus.len() {
            if let Some(ended) = fillers.threads.iter().position(JoinHandle::is_finished) {
                let outcome = fillers.threads.swap_remove(ended).join();
                outcome.unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))?;
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(fillers)
    }
}

fn fill(cpu: CpuId, words: usize, stop: &AtomicBool, passed: &AtomicUsize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize)?;
    sched_setaffinity(Pid::from_raw(0), &set)?;
    // Not zeros of the allocator, which would all be one page.
    let memory = vec![1_u64; words];
    let mut first = true;
    while !stop.load(Ordering::Relaxed) {
        for piece in memory.chunks(1 << 16) {
            black_box(piece.iter().step_by(LINE).fold(0_u64, |sum, word| sum.wrapping_add(*word)));
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
        if std::mem::take(&mut first) {
            passed.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

impl Drop for Fillers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // What failed was said when it was started.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fillers_fill_and_stop() {
        let fillers = Fillers::start(&[0], 1 << 16).expect("CPU 0");
        assert_eq!(fillers.threads.len(), 1);
        drop(fillers);
    }

    #[test]
    fn a_cpu_that_is_not_there_is_an_error() {
        assert!(Fillers::start(&[1023], 1 << 16).is_err());
    }
}
