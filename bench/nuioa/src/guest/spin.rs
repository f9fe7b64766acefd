//! Keeps a vCPU from falling idle while a workload waits. What an idle vCPU costs is the emulator's time: the guest halts, the server
//! schedules, and how often depends on how fast the other end is. A thread of the lowest rank computes instead, and counts what it does, so
//! that it can be taken off.

use crate::{raw::Spun, ticks};
use anyhow::{Result, anyhow, bail};
use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

/// Rounds of a spin, each of two instructions.
const ROUNDS: u64 = 10_000;

#[derive(Default)]
struct State {
    goes: bool,
    halted: bool,
    failed: Option<String>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// As [`State::goes`], for the thread while it computes.
    goes: AtomicBool,
    spins: AtomicU64,
}

/// A thread that computes on a CPU when no other thread wants to run there.
pub struct Spin {
    shared: Arc<Shared>,
    cpu: usize,
    before: Spun,
}

impl Spin {
    /// Makes it, halted.
    pub fn start(cpu: usize) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let own = shared.clone();
        thread::spawn(move || {
            if let Err(error) = lowest(cpu) {
                own.state.lock().unwrap_or_else(PoisonError::into_inner).failed = Some(format!("{error:#}"));
            }
            work(&own);
        });
        let spin = Self { shared, cpu, before: Spun::default() };
        spin.halted()?;
        Ok(spin)
    }

    pub fn go(&mut self) -> Result<()> {
        self.before = self.read()?;
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.goes, state.halted) = (true, false);
        self.shared.goes.store(true, Ordering::Relaxed);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// What it has done since it went.
    pub fn halt(&mut self) -> Result<Spun> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).goes = false;
        self.shared.goes.store(false, Ordering::Relaxed);
        self.halted()?;
        let after = self.read()?;
        Ok(Spun { spins: after.spins - self.before.spins, ticks: after.ticks - self.before.ticks })
    }

    fn halted(&self) -> Result<()> {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.halted {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match &state.failed {
            Some(error) => Err(anyhow!("{error}")),
            None => Ok(()),
        }
    }

    fn read(&self) -> Result<Spun> {
        let ticks = ticks::of_cpu(self.cpu)?;
        Ok(Spun { spins: self.shared.spins.load(Ordering::Relaxed), ticks })
    }
}

/// Only here, and only when no other thread wants to run (sched(7), SCHED_IDLE).
fn lowest(cpu: usize) -> Result<()> {
    super::pin(&[cpu])?;
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the parameter, which lives through the call; 0 is the calling thread.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameter) } != 0 {
        bail!("SCHED_IDLE: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

fn work(shared: &Shared) {
    loop {
        let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.goes {
            state.halted = true;
            shared.changed.notify_all();
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        while shared.goes.load(Ordering::Relaxed) {
            lab_count::load::compute(ROUNDS);
            shared.spins.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_spins_only_while_it_goes() {
        let mut spin = Spin::start(0).unwrap();
        assert_eq!(spin.shared.spins.load(Ordering::Relaxed), 0, "not yet");
        spin.go().unwrap();
        while spin.shared.spins.load(Ordering::Relaxed) < 3 {
            thread::yield_now();
        }
        let done = spin.halt().unwrap();
        assert!(done.spins >= 3, "{done:?}");
        assert_eq!(spin.shared.spins.load(Ordering::Relaxed), done.spins, "it is halted");
    }
}
