//! In the guest: a load with a thread on each CPU. It reads a line from its standard input, does what it says, and answers with a line.
//! `Orders.java` and `solver.c` understand the same.
//!
//! | line | what | answer |
//! |---|---|---|
//! | | all threads have their memory and wait | 0 |
//! | `go` | they work | 0 |
//! | `pause` | each waits as soon as it has finished what it does | operations so far |
//!
//! It ends with its input.

use crate::{
    committed::{HOMES, STREAM_MIB},
    load::{Stencil, Store, Stream},
};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use lab_count::load::Memory;
use std::{
    io::{BufRead, Write},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use vnuma_bench_common::host::affine;

/// Which load.
#[derive(Clone, Copy, ValueEnum)]
pub enum Load {
    /// STREAM's triad
    Stream,
    /// The stencil
    Stencil,
    /// The key-value store
    Store,
}

#[derive(clap::Args)]
pub struct Arguments {
    /// Which one
    load: Load,
}

/// Where threads wait, and who has.
#[derive(Default)]
struct Gate {
    /// Whether threads shall come here, so that they need not look behind the lock each time.
    closed: AtomicBool,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    open: bool,
    threads: usize,
    operations: u64,
    failed: Option<String>,
}

impl Gate {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread waits here until the gate opens. It has done so much since it was here last.
    fn wait(&self, operations: u64) {
        let mut waiting = self.waiting();
        waiting.threads += 1;
        waiting.operations += operations;
        self.changed.notify_all();
        while !waiting.open {
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        waiting.threads -= 1;
    }

    fn open(&self) {
        self.closed.store(false, Ordering::Release);
        self.waiting().open = true;
        self.changed.notify_all();
    }

    /// Closes it, and waits for all threads. What they have done so far.
    fn close(&self, threads: usize) -> Result<u64> {
        let mut waiting = self.waiting();
        waiting.open = false;
        self.closed.store(true, Ordering::Release);
        while waiting.threads < threads {
            if let Some(error) = &waiting.failed {
                bail!("{error}");
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(waiting.operations)
    }

    /// A thread works on, a piece at a time, for ever.
    fn work(&self, mut piece: impl FnMut() -> u64) {
        let mut operations = 0;
        loop {
            if self.closed.load(Ordering::Acquire) {
                self.wait(operations);
                operations = 0;
            }
            operations += piece();
        }
    }
}

/// Serves its standard input.
pub fn run(arguments: &Arguments) -> Result<()> {
    let gate = Arc::new(Gate { closed: AtomicBool::new(true), ..Gate::default() });
    for cpu in 0..HOMES.len() {
        let (gate, load) = (Arc::clone(&gate), arguments.load);
        // It ends with the process.
        thread::Builder::new().spawn(move || {
            if let Err(error) = affine(0, &[cpu as u32]).and_then(|()| work(load, &gate)) {
                gate.waiting().failed = Some(format!("the thread on CPU {cpu}: {error:#}"));
                gate.changed.notify_all();
            }
        })?;
    }
    gate.close(HOMES.len())?;
    answer(0)?;
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "go" => {
                gate.open();
                answer(0)?;
            }
            "pause" => answer(gate.close(HOMES.len())?)?,
            other => bail!("{other:?}: what is that?"),
        }
    }
    Ok(())
}

fn answer(number: u64) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{number}")?;
    Ok(out.flush()?)
}

fn work(load: Load, gate: &Gate) -> Result<()> {
    match load {
        Load::Stream => {
            // In huge pages, as programs with large arrays have them, as far as the guest has any.
            let map = |huge| Memory::map(STREAM_MIB << 20, None, huge);
            let memory = map(true).or_else(|_| map(false)).context("memory for STREAM")?;
            let mut stream = Stream::new(memory);
            gate.work(|| stream.page());
        }
        Load::Stencil => {
            let mut stencil = Stencil::new();
            gate.work(|| stencil.row());
        }
        Load::Store => {
            let mut store = Store::new();
            gate.work(|| store.request());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn a_closed_gate_knows_all_that_was_done() {
        let gate = Arc::new(Gate { closed: AtomicBool::new(true), ..Gate::default() });
        let done = Arc::new(AtomicU64::new(0));
        for _ in 0..3 {
            let (gate, done) = (Arc::clone(&gate), Arc::clone(&done));
            thread::spawn(move || {
                gate.work(|| {
                    done.fetch_add(2, Ordering::Relaxed);
                    2
                });
            });
        }
        assert_eq!(gate.close(3).expect("no thread fails"), 0);
        for _ in 0..20 {
            gate.open();
            thread::yield_now();
            assert_eq!(gate.close(3).expect("no thread fails"), done.load(Ordering::Relaxed));
        }
        gate.waiting().failed = Some("a thread".to_owned());
        assert!(gate.close(4).is_err());
    }
}
