//! Schedulers that are loaded, and those that the kernel refuses.

use crate::committed::Scheduler;
use anyhow::{Context, Result, bail, ensure};
use vnuma_scenario::Process;
use vnuma_scheduled::{Other, loaded, start, stop};

/// What one of scx says goes there.
const LOG: &str = "/tmp/bench-scheduler-scx.log";

/// One that schedules.
pub enum Running {
    /// The kernel's own.
    Own,
    /// scx_vnuma.
    Vnuma(Process),
    /// One of scx.
    Scx(Other),
}

/// Loads it, or says why that cannot be.
pub fn load(scheduler: Scheduler) -> Result<Result<Running, String>> {
    ensure!(loaded()?.is_none(), "a scheduler is loaded already: {:?}", loaded()?);
    let options: &[&str] = match scheduler {
        Scheduler::Eevdf | Scheduler::EevdfAgain => return Ok(Ok(Running::Own)),
        Scheduler::Partial => &[],
        Scheduler::Full => &["--full"],
        Scheduler::ScxLayered => return scx(scheduler, &["--run-example"]),
        _ => return scx(scheduler, &[]),
    };
    Ok(Ok(Running::Vnuma(start(options)?.0)))
}

fn scx(scheduler: Scheduler, options: &[&str]) -> Result<Result<Running, String>> {
    let program = scheduler.program().context("one of scx")?;
    Ok(Other::load(&program, options, LOG.into())?.map(Running::Scx))
}

impl Running {
    /// Unloads it. An error in words if it did not schedule all the time: the kernel ends one that does wrong, and some start anew then.
    pub fn end(self) -> Result<Result<(), String>> {
        match self {
            Self::Own => Ok(Ok(())),
            Self::Vnuma(process) => Ok(Ok(stop(process)?)),
            Self::Scx(other) => other.end(),
        }
    }

    /// The process of scx_vnuma.
    pub fn pid(&self) -> Result<u32> {
        match self {
            Self::Vnuma(process) => Ok(process.0.id()),
            _ => bail!("it is not scx_vnuma"),
        }
    }
}
