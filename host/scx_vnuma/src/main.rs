//! Loads the scheduler of vCPU threads, and waits. See docs/scx_vnuma.md.

mod layout;
mod load;

use anyhow::{Context, Result, bail};
use clap::Parser;
use load::{Ended, Loaded, Lock, hotplugs, refuse_second, unpin};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use std::{os::fd::AsFd, path::Path, process::ExitCode};
use vnuma_model::Steal;
use vnuma_observe::scheduler::{Counts, DIRECTORY, Scheduler};

/// A sched_ext scheduler for the vCPU threads of VMs. vnumad decides where they belong.
///
/// It runs in the foreground until SIGTERM or SIGINT; then, or if it is killed, the kernel's own scheduler takes over.
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
pub struct Arguments {
    /// Schedule all threads of the host, not only vCPUs: for hosts that run nothing but VMs
    #[arg(long)]
    full: bool,
    /// Time that vCPUs keep their places after vnumad's last heartbeat, in seconds
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    keep_s: u64,
    /// A vCPU that waits longer than this is stolen first, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    starve_ms: u64,
    /// Time that a vCPU runs before others have their turn, in microseconds
    #[arg(long, value_name = "US", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(100..=100_000))]
    slice_us: u64,
    /// Print what the loaded scheduler has done, and exit
    #[arg(long, exclusive = true)]
    status: bool,
    /// Print what libbpf and the kernel's verifier say
    #[arg(long)]
    verbose: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = if arguments.status { show_status() } else { run(&arguments) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scx_vnuma: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn show_status() -> Result<()> {
    let scheduler = Scheduler::open(Path::new("/"), Path::new(DIRECTORY))?;
    let Counts { placed, stolen_local, stolen_remote, starved, kept, throttled, preempted } =
        scheduler.counts();
    println!("mode          {}", if scheduler.is_full() { "full" } else { "partial" });
    let stealing = match scheduler.steals()? {
        Steal::ByPressure => "by pressure",
        Steal::Blindly => "blindly",
        Steal::WithinPlaces => "within places",
    };
    println!("stealing      {stealing}");
    println!("vCPUs         {}", scheduler.threads().len());
    println!("placed        {placed}");
    println!("stolen local  {stolen_local}");
    println!("stolen remote {stolen_remote}");
    println!("starved       {starved}");
    println!("kept          {kept}");
    println!("throttled     {throttled}");
    println!("preempted     {preempted}");
    Ok(())
}

fn run(arguments: &Arguments) -> Result<()> {
    // Before anything is loaded, so that no signal is lost.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block().context("blocking signals")?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).context("signalfd")?;
    if !nix::unistd::geteuid().is_root() {
        bail!("only root may load a scheduler");
    }
    refuse_second()?;
    let _lock = Lock::take()?;
    let mode = if arguments.full { "all threads of the host" } else { "threads of class SCHED_EXT" };
    loop {
        let before = hotplugs();
        let ended = match Loaded::new(arguments, before) {
            Ok(loaded) => {
                println!("scx_vnuma: loaded, schedules {mode}");
                wait(|| loaded.ended(), &signals)?
            }
            // What was read of a CPU may have gone with it.
            Err(error) if hotplugs() != before => {
                wait(|| Some(Ended { restart: true, reason: format!("{error:#}") }), &signals)?
            }
            Err(error) => return Err(error),
        };
        unpin();
        match ended {
            None => {
                println!("scx_vnuma: unloaded");
                return Ok(());
            }
            Some(ended) if ended.restart => println!("scx_vnuma: loads again: {}", ended.reason),
            Some(ended) => bail!("the kernel has ended the scheduler: {}", ended.reason),
        }
    }
}

/// Waits for a signal, or until the kernel has ended the scheduler. A signal comes first.
fn wait(ended: impl Fn() -> Option<Ended>, signals: &SignalFd) -> Result<Option<Ended>> {
    loop {
        let ended = ended();
        let look_ms = PollTimeout::from(if ended.is_some() { 0u16 } else { 1000 });
        match poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], look_ms) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(None),
            Err(errno) => return Err(errno).context("poll"),
        }
        if ended.is_some() {
            return Ok(ended);
        }
    }
}
