//! A guest's vCPU that waits for others gives its CPU away to one of these (KVM_HC_SCHED_YIELD). The guest is a KVM guest of the server, and
//! all its vCPUs have one CPU.

use anyhow::{Context, Result, ensure};
use nix::{errno::Errno, libc};
use vnuma_observe::scheduler::Scheduler;
use vnuma_scenario::{HANG_LIMIT, Lines, Process, Vm, wait_for};
use vnuma_scheduled::{Loop, Yields, beat, start, stop};

const PROGRAM: &str = "/root/lab-scenario";
const CPU: &str = "3";
/// Commands of membarrier(2).
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;
/// Yields that have to be granted of those that are tried. Others find their target running, or asleep.
const TRIED: u64 = 200;
const GRANTED_OF: u64 = 20;

/// Those that come until so many were tried.
fn watch(scheduler: Option<&Scheduler>) -> Result<Yields> {
    let before = Yields::read()?;
    let mut seen = Yields::default();
    wait_for("vCPUs to yield", HANG_LIMIT, || {
        scheduler.map_or(Ok(()), beat)?;
        seen = Yields::read()?.since(before);
        Ok(seen.tried >= TRIED)
    })?;
    Ok(seen)
}

/// By the kernel's own scheduler, then in both modes.
pub(super) fn are_granted() -> Result<()> {
    let shape = ["--uma", "--vcpus", "3", "--memory", "256M"].map(str::to_owned);
    let vm = Vm::start("yields", &shape)?;
    vm.put(&std::env::current_exe()?.to_string_lossy(), PROGRAM)?;
    let vcpus: Vec<Loop> = vm.threads.iter().map(|tid| Loop::of_thread_of(vm.pid, *tid)).collect();
    vcpus.iter().try_for_each(|vcpu| vcpu.allow(CPU))?;
    let mut busy: Process = vm.spawn(&[PROGRAM, "barriers"])?;
    let line = Lines::of_process(&mut busy, "the guest")?.next("barriers")?;
    ensure!(line == "barriers", "the guest says {line:?}");
    let own = watch(None).context("by the kernel's own scheduler")?;
    println!("by the kernel's own scheduler: {own:?}");
    for options in [&[][..], &["--full"]] {
        let (process, scheduler) = start(options)?;
        if options.is_empty() {
            vcpus.iter().try_for_each(Loop::make_ext)?;
        }
        let seen = watch(Some(&scheduler)).with_context(|| format!("options {options:?}"))?;
        println!("options {options:?}: {seen:?}");
        ensure!(
            seen.granted * GRANTED_OF >= seen.tried,
            "options {options:?}: {seen:?}, by the kernel's own scheduler {own:?}"
        );
        if options.is_empty() {
            vcpus.iter().try_for_each(Loop::make_fair)?;
        }
        stop(process)?;
        vcpus.iter().try_for_each(Loop::expect_to_run)?;
    }
    Ok(())
}

/// In the guest: a thread for each vCPU has the others pass a memory barrier without end, for which the kernel waits. It asks for a yield
/// where there are several to wait for.
pub fn wait_for_others() -> Result<()> {
    register()?;
    println!("barriers");
    std::thread::scope(|scope| {
        let others = [scope.spawn(pass_barriers), scope.spawn(pass_barriers)];
        pass_barriers()?;
        others
            .into_iter()
            .try_for_each(|other| other.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })
}

fn pass_barriers() -> Result<()> {
    loop {
        membarrier(PRIVATE_EXPEDITED)?;
    }
}

fn register() -> Result<()> {
    membarrier(REGISTER_PRIVATE_EXPEDITED)
}

fn membarrier(command: libc::c_int) -> Result<()> {
    // SAFETY: the system call takes three numbers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    Errno::result(result).map(drop).context("membarrier")
}
