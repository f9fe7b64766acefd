//! Which CPUs stand for which host: the first for the one whose faults are measured, the second for all others. Whether two
//! threads share a CPU decides what it costs to wake one of them, so it is not left to chance.

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    libc,
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::{prctl::set_pdeathsig, signal::Signal},
    unistd::Pid,
};
use std::{
    hint::black_box,
    process::{Child, Command},
    sync::OnceLock,
};

/// What this process was allowed when it began.
static ALLOWED: OnceLock<CpuSet> = OnceLock::new();

fn allowed() -> Result<CpuSet> {
    let now = sched_getaffinity(Pid::from_raw(0))?;
    Ok(*ALLOWED.get_or_init(|| now))
}

fn only(number: usize) -> Result<()> {
    let allowed = allowed()?;
    let cpus: Vec<_> = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect();
    let mut one = CpuSet::new();
    one.set(cpus[number.min(cpus.len() - 1)])?;
    Ok(sched_setaffinity(Pid::from_raw(0), &one)?)
}

/// The calling thread, and all that it starts, is on the host that is measured. To be called first by the main thread.
pub fn measured() -> Result<()> {
    only(0)
}

/// The calling thread, and all that it starts, is on another host.
pub fn elsewhere() -> Result<()> {
    only(1)
}

/// It runs anywhere again.
pub fn anywhere() -> Result<()> {
    Ok(sched_setaffinity(Pid::from_raw(0), &allowed()?)?)
}

/// Processes that keep the CPUs of both hosts from sleeping, for as long as this lives.
///
/// They run when nothing else does: each thread that wakes takes the CPU from them. A virtual CPU that sleeps has left the machine:
/// to wake it takes its hypervisor 5 to 30 us, more the less the machine has to do. That would be most of a fault, and the same
/// in each protocol.
pub struct Awake(Vec<Child>);

/// The argument of such a process.
pub const KEEP_AWAKE: &str = "--keep-awake";

impl Awake {
    pub fn begin() -> Result<Self> {
        let start = || Command::new(std::env::current_exe()?).arg(KEEP_AWAKE).spawn();
        let mut awake = Self(Vec::new());
        // A process inherits the CPUs of the thread that starts it.
        elsewhere()?;
        let other = start();
        measured()?;
        awake.0.push(other.context("a process that keeps a CPU awake")?);
        awake.0.push(start().context("a process that keeps a CPU awake")?);
        Ok(awake)
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Keeps the CPU of this process awake until the parent ends.
pub fn stay_awake() -> Result<()> {
    set_pdeathsig(Signal::SIGKILL).context("prctl(PR_SET_PDEATHSIG)")?;
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the parameters, which live through the call.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    Errno::result(result).context("sched_setscheduler(SCHED_IDLE)")?;
    // Not with `pause`, by which a virtual CPU may leave the machine, too.
    for number in 0_u64.. {
        black_box(number);
    }
    Ok(())
}
