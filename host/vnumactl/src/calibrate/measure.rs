//! A load: a command of the operator on one CPU, and what its threads do.

use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use std::{
    io::Write,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};
use vnuma_counters::{Events, ThreadCounters};
use vnuma_model::CpuId;
use vnuma_model::{Counted, ThreadCounts};
use vnuma_process::procfs;

/// A load is counted for as long as is wanted.
pub const ENDED: &str = "it has ended; a load has to run until it is killed";

/// A command that runs. It and all of its process group are killed when it is dropped.
pub struct Load(Child);

impl Load {
    /// Starts it on a CPU: it is there before the command's first instruction, so that its memory is of that CPU's node.
    pub fn start(command: &str, cpu: CpuId) -> Result<Self, String> {
        let script = format!("read go && exec {command}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        let mut load = Self(shell.spawn().map_err(|error| format!("sh: {error}"))?);
        let pid = Pid::from_raw(load.pid());
        let mut set = CpuSet::new();
        let pinned = set.set(cpu as usize).and_then(|()| sched_setaffinity(pid, &set));
        pinned.map_err(|error| format!("CPU {cpu}: {error}"))?;
        let input = load.0.stdin.as_mut().ok_or("no input")?;
        input.write_all(b"\n").map_err(|error| error.to_string())?;
        Ok(load)
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    /// What its threads do in this time.
    pub fn count(&self, events: &Events, time: Duration) -> Result<ThreadCounts, String> {
        let ended = || ENDED.to_owned();
        let threads = procfs::threads(self.pid()).map_err(|_| ended())?;
        // A process that has ended keeps its number until its parent has asked.
        if procfs::read_process(self.pid(), "cmdline", 1).map_err(|error| error.to_string())?.is_empty() {
            return Err(ended());
        }
        let open = |tid| ThreadCounters::open(tid, events).map_err(|error| error.to_string());
        let mut counters = threads.into_iter().map(open).collect::<Result<Vec<_>, _>>()?;
        thread::sleep(time);
        let mut sum = ThreadCounts::default();
        let mut why = "it did not run";
        for counters in &mut counters {
            match counters.read() {
                Ok(Counted::Counted(counted)) => {
                    sum.instructions += counted.instructions;
                    sum.llc_references += counted.llc_references;
                    sum.llc_misses += counted.llc_misses;
                }
                Ok(Counted::Crowded) => why = "others (perf?) had the counters all the time",
                Ok(_) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        if sum.instructions == 0 { Err(why.to_owned()) } else { Ok(sum) }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = killpg(Pid::from_raw(self.pid()), Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use vnuma_counters::detect;

    #[test]
    fn a_load_runs_on_its_cpu_and_is_gone_afterwards() {
        let load = Load::start("sleep 1000", 0).expect("it starts");
        let pid = load.pid();
        let allowed = procfs::read_allowed(pid, pid).expect("it runs");
        assert_eq!(allowed.to_string(), "0");
        drop(load);
        assert!(!procfs::thread_exists(pid, pid));
    }

    #[test]
    fn a_load_that_ends_or_cannot_run_is_named() {
        let Some(events) = detect(Path::new("/"), &[]).events else {
            eprintln!("skipped: this machine has no counters");
            return;
        };
        let load = Load::start("/does/not/exist 2> /dev/null", 0).expect("sh starts");
        thread::sleep(Duration::from_millis(300));
        let error = load.count(&events, Duration::from_millis(10)).expect_err("it has ended");
        assert!(error.contains("it has ended"), "{error}");
    }
}
