//! Memory that the threads of a team share: a part for each thread, which all of them read and write.

use std::sync::{
    Barrier, Condvar, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// Numbers of all threads. A thread reads what another one has written only after both met at the barrier, or after it waited for
/// that step of the other, so that relaxed loads and stores, which are plain ones on this machine, are enough.
pub struct Shared<'a> {
    parts: Vec<&'a [AtomicU64]>,
    barrier: Barrier,
    sums: Vec<AtomicU64>,
    steps: Vec<(Mutex<u64>, Condvar)>,
}

impl<'a> Shared<'a> {
    /// Of these parts, one for each thread.
    pub fn new(parts: Vec<&'a [AtomicU64]>) -> Self {
        let count = parts.len();
        Self {
            barrier: Barrier::new(count),
            sums: (0..count).map(|_| AtomicU64::new(0)).collect(),
            steps: (0..count).map(|_| Default::default()).collect(),
            parts,
        }
    }

    /// How many threads there are.
    pub fn threads(&self) -> usize {
        self.parts.len()
    }

    /// A number.
    pub fn get(&self, part: usize, at: usize) -> f64 {
        f64::from_bits(self.word(part, at))
    }

    /// Writes a number.
    pub fn set(&self, part: usize, at: usize, value: f64) {
        self.set_word(part, at, value.to_bits());
    }

    /// A word that is no number, such as an index.
    pub fn word(&self, part: usize, at: usize) -> u64 {
        self.parts[part][at].load(Relaxed)
    }

    /// Writes such a word.
    pub fn set_word(&self, part: usize, at: usize, value: u64) {
        self.parts[part][at].store(value, Relaxed);
    }

    /// Waits until all threads are here.
    pub fn meet(&self) {
        self.barrier.wait();
    }

    /// The sum of what all threads give.
    pub fn sum(&self, me: usize, value: f64) -> f64 {
        self.sums[me].store(value.to_bits(), Relaxed);
        self.meet();
        let sum = self.sums.iter().map(|sum| f64::from_bits(sum.load(Relaxed))).sum();
        // The next one is given only after all have read this one.
        self.meet();
        sum
    }

    /// Tells the others how far this thread is.
    pub fn reach(&self, me: usize, step: u64) {
        let (lock, changed) = &self.steps[me];
        *lock.lock().unwrap_or_else(PoisonError::into_inner) = step;
        changed.notify_all();
    }

    /// Waits until a thread is that far.
    pub fn await_step(&self, of: usize, step: u64) {
        let (lock, changed) = &self.steps[of];
        let mut at = lock.lock().unwrap_or_else(PoisonError::into_inner);
        while *at < step {
            at = changed.wait(at).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A small generator of numbers, the same on every run (xorshift64).
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number from 0 to 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// What a team does.
pub trait Kernel: Sync {
    /// Words of each thread's part.
    fn words(&self, threads: usize) -> usize;
    /// Writes its own part.
    fn fill(&self, shared: &Shared<'_>, me: usize);
    /// A round of its work. `done` is told operations as soon as they are finished.
    fn round(&self, shared: &Shared<'_>, me: usize, done: &mut dyn FnMut(u64));
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Runs a kernel for some rounds; the content of all parts, and the operations of each thread.
    pub fn run(kernel: &impl Kernel, threads: usize, rounds: usize) -> (Vec<Vec<u64>>, Vec<u64>) {
        let words = kernel.words(threads);
        let parts: Vec<Vec<AtomicU64>> =
            (0..threads).map(|_| (0..words).map(|_| AtomicU64::new(0)).collect()).collect();
        let shared = Shared::new(parts.iter().map(Vec::as_slice).collect());
        let operations = std::thread::scope(|scope| {
            let thread = |me| {
                let shared = &shared;
                scope.spawn(move || {
                    kernel.fill(shared, me);
                    shared.meet();
                    let mut count = 0;
                    (0..rounds).for_each(|_| kernel.round(shared, me, &mut |done| count += done));
                    count
                })
            };
            let running: Vec<_> = (0..threads).map(thread).collect();
            running.into_iter().map(|thread| thread.join().expect("a thread")).collect()
        });
        let content = parts.iter().map(|part| part.iter().map(|word| word.load(Relaxed)).collect()).collect();
        (content, operations)
    }

    #[test]
    fn sums_are_those_of_all_threads_each_time() {
        struct Sums;
        impl Kernel for Sums {
            fn words(&self, _: usize) -> usize {
                1
            }
            fn fill(&self, _: &Shared<'_>, _: usize) {}
            fn round(&self, shared: &Shared<'_>, me: usize, done: &mut dyn FnMut(u64)) {
                let sum = shared.sum(me, (me + 1) as f64 + shared.get(me, 0));
                shared.set(me, 0, sum);
                done(1);
            }
        }
        // 1 + 2 + 3, then 3 * 6 + 6, then 3 * 24 + 6.
        let (content, operations) = run(&Sums, 3, 3);
        assert_eq!(content, vec![vec![78.0_f64.to_bits()]; 3]);
        assert_eq!(operations, [3, 3, 3]);
    }
}
