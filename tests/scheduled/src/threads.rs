//! Threads that scx_vnuma schedules, loops and vCPUs, and the control groups that they are in.

use anyhow::{Context, Result, bail, ensure};
use std::{
    cell::RefCell,
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};
use vnuma_model::Steal;
use vnuma_observe::{
    location::monotonic_ns,
    scheduler::{Assigned, DIRECTORY, Scheduler, loaded_scheduler},
};
use vnuma_process::{
    Class, change_class, open_pidfd,
    procfs::{read_cpu_times, read_last_cpu},
    read_class,
};
use vnuma_scenario::{HANG_LIMIT, Process, Vm, output, wait_for};

const CGROUPS: &str = "/sys/fs/cgroup";
/// Places hold so long without a heartbeat.
pub const KEEP_S: u64 = 3;
/// Looks at a loop that stays where it is.
pub const LOOKS: usize = 10;
/// Half seconds until a new share has settled, and those in which it is measured.
const SETTLES: u32 = 1;
const WATCHED: u32 = 6;
/// Times that they are measured before shares are wrong.
const SPANS: usize = 4;

/// The program that decides is alive. How threads are stolen stays as it is.
pub fn beat(scheduler: &Scheduler) -> Result<()> {
    Ok(scheduler.beat(monotonic_ns(), scheduler.steals()?)?)
}

/// What each of these threads has of the CPU time that all of them had together, counted by the kernel.
pub fn shares(scheduler: Option<&Scheduler>, threads: &[&Loop]) -> Result<Vec<f64>> {
    let ran = || threads.iter().map(|thread| thread.ran_ns()).collect::<Result<Vec<u64>>>();
    let sleep = |times: u32| {
        for _ in 0..times {
            scheduler.map_or(Ok(()), beat)?;
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok::<_, anyhow::Error>(())
    };
    sleep(SETTLES)?;
    let before = ran()?;
    sleep(WATCHED)?;
    let ran: Vec<u64> = ran()?.iter().zip(before).map(|(after, before)| after - before).collect();
    let all: u64 = ran.iter().sum();
    ensure!(all > 0, "none of the threads ran");
    Ok(ran.iter().map(|&ran| ran as f64 / all as f64).collect())
}

/// The first thread has this share of the time of all, within this tolerance: in one of some spans, as the machine may stop the server's
/// CPU while one of the threads has it, and that one is charged.
pub fn expect_share(
    what: &str,
    scheduler: Option<&Scheduler>,
    threads: &[&Loop],
    (share, tolerance): (f64, f64),
) -> Result<()> {
    let mut all = Vec::new();
    for _ in 0..SPANS {
        let seen = shares(scheduler, threads)?;
        println!(
            "{what}: shares of the CPU time {seen:.3?}, expected {share:.3} +- {tolerance:.3} for the first"
        );
        if (seen[0] - share).abs() <= tolerance {
            return Ok(());
        }
        all.push(seen[0]);
    }
    bail!("{what}: the first had shares of {all:.3?}, expected {share:.3}")
}

/// Loads scx_vnuma, with these options.
pub fn start(options: &[&str]) -> Result<(Process, Scheduler)> {
    let keep = KEEP_S.to_string();
    let mut command = Command::new("scx_vnuma");
    command.args(["--keep-s", &keep]).args(options).stdin(Stdio::null());
    // What it says is for people, and what a benchmark prints is not.
    let process = command.stdout(std::io::stderr()).spawn();
    let process = Process(process.context("scx_vnuma")?);
    let mut opened = None;
    wait_for("scx_vnuma to be loaded", HANG_LIMIT, || {
        opened = Scheduler::open(Path::new("/"), Path::new(DIRECTORY)).ok();
        Ok(opened.is_some())
    })?;
    let scheduler = opened.context("it was open")?;
    scheduler.beat(monotonic_ns(), Steal::default())?;
    Ok((process, scheduler))
}

/// Ends it in order.
pub fn stop(mut process: Process) -> Result<()> {
    output("kill", &["-TERM", &process.0.id().to_string()])?;
    process.succeed("scx_vnuma")?;
    ensure!(loaded()?.is_none(), "it is still loaded");
    Ok(())
}

/// The scheduler that the kernel says is loaded.
pub fn loaded() -> Result<Option<String>> {
    Ok(loaded_scheduler(Path::new("/"))?)
}

/// A thread that never sleeps: a process of its own, or the vCPU of a guest that is busy.
pub struct Loop {
    _process: Option<Process>,
    /// Of its process.
    pub pid: i32,
    /// Its own number.
    pub tid: i32,
    /// What was decided last.
    assigned: RefCell<Option<Assigned>>,
}

impl Loop {
    /// One of class SCHED_EXT, a process of its own.
    pub fn start(cpus: &str) -> Result<Self> {
        let this = Self::start_fair(cpus)?;
        this.make_ext()?;
        Ok(this)
    }

    /// The first vCPU of a VM.
    pub fn of_vcpu(vm: &Vm) -> Self {
        Self::of_thread_of(vm.pid, vm.threads[0])
    }

    /// QEMU's main thread.
    pub fn of_main_thread(vm: &Vm) -> Self {
        Self::of_thread_of(vm.pid, vm.pid)
    }

    /// A thread of this process.
    pub fn of_thread(tid: i32) -> Self {
        Self::of_thread_of(std::process::id().cast_signed(), tid)
    }

    /// A thread of a process.
    pub fn of_thread_of(pid: i32, tid: i32) -> Self {
        Self { _process: None, pid, tid, assigned: RefCell::default() }
    }

    /// From SCHED_OTHER to SCHED_EXT.
    pub fn make_ext(&self) -> Result<()> {
        let pidfd = open_pidfd(self.pid)?;
        let before = change_class(pidfd.as_fd(), self.pid, self.tid, Class::Other, Class::Ext)?;
        ensure!(before == Class::Other, "its class was {before:?}");
        ensure!(self.class()? == Class::Ext, "its class was not changed");
        Ok(())
    }

    /// Back to SCHED_OTHER.
    pub fn make_fair(&self) -> Result<()> {
        let pidfd = open_pidfd(self.pid)?;
        change_class(pidfd.as_fd(), self.pid, self.tid, Class::Ext, Class::Other)?;
        Ok(())
    }

    /// What class it has.
    pub fn class(&self) -> Result<Class> {
        Ok(read_class(self.tid)?)
    }

    /// CPUs that its operator allows.
    pub fn allow(&self, cpus: &str) -> Result<()> {
        output("taskset", &["-p", "-c", cpus, &self.tid.to_string()]).map(drop)
    }

    /// One that the kernel's own scheduler runs, before all of class SCHED_EXT.
    pub fn start_fair(cpus: &str) -> Result<Self> {
        Self::start_by(&[], cpus)
    }

    /// One with a real-time class, which comes before all that sched_ext has.
    pub fn start_real_time(cpus: &str) -> Result<Self> {
        Self::start_by(&["chrt", "--fifo", "1"], cpus)
    }

    fn start_by(prefix: &[&str], cpus: &str) -> Result<Self> {
        let words = [&["--cpu-list", cpus], prefix, &["sh", "-c", "while :; do :; done"]].concat();
        let process = Command::new("taskset").args(words).stdin(Stdio::null()).spawn();
        let process = Process(process.context("taskset")?);
        let pid = process.0.id().cast_signed();
        wait_for("the loop to have its CPUs", HANG_LIMIT, || {
            Ok(vnuma_process::read_allowed(pid, pid)?.to_string() == cpus)
        })?;
        Ok(Self { _process: Some(process), pid, tid: pid, assigned: RefCell::default() })
    }

    /// Decides about it anew.
    pub fn place(&self, scheduler: &Scheduler, place: Option<&str>, pressure: u32) -> Result<()> {
        let place = place.map(str::parse).transpose()?;
        let assigned = Assigned { pid: self.pid, epoch: monotonic_ns(), pressure, place };
        *self.assigned.borrow_mut() = Some(assigned);
        self.again(scheduler)
    }

    /// Another period: the same is decided again.
    pub fn again(&self, scheduler: &Scheduler) -> Result<()> {
        beat(scheduler)?;
        if let Some(assigned) = self.assigned.borrow_mut().as_mut() {
            assigned.epoch = monotonic_ns();
            scheduler.assign(self.tid, assigned)?;
        }
        Ok(())
    }

    /// Its CPU time up to now, nanoseconds.
    pub fn ran_ns(&self) -> Result<u64> {
        Ok(read_cpu_times(self.pid, self.tid)?.ran_ns)
    }

    /// The CPU that it was on last.
    pub fn cpu(&self) -> Result<u32> {
        Ok(read_last_cpu(self.pid, self.tid)?)
    }

    /// Waits until it is on one of these CPUs; what was decided about it is said again and again.
    pub fn wait_until_on(&self, scheduler: &Scheduler, cpus: &[u32]) -> Result<()> {
        let mut seen = 0;
        wait_for(&format!("the loop to be on {cpus:?}"), HANG_LIMIT, || {
            self.again(scheduler)?;
            seen = self.cpu()?;
            Ok(cpus.contains(&seen))
        })
        .with_context(|| format!("it is on CPU {seen}"))
    }

    /// It stays on these CPUs, but for moments in which another class takes its CPU and an idle one steals it.
    pub fn expect_on(&self, scheduler: &Scheduler, cpus: &[u32]) -> Result<()> {
        let mut seen = Vec::new();
        for _ in 0..LOOKS {
            std::thread::sleep(Duration::from_millis(50));
            let cpu = self.cpu()?;
            if !cpus.contains(&cpu) {
                self.again(scheduler)?;
            }
            seen.push(cpu);
        }
        let there = seen.iter().filter(|cpu| cpus.contains(cpu)).count();
        ensure!(there * 10 >= LOOKS * 7, "the loop was on CPUs {seen:?}, expected {cpus:?}");
        Ok(())
    }

    /// What was stolen is not given back before the next decision.
    pub fn expect_to_stay_on(&self, scheduler: &Scheduler, cpu: u32) -> Result<()> {
        let mut seen = Vec::new();
        for _ in 0..LOOKS {
            std::thread::sleep(Duration::from_millis(30));
            seen.push(self.cpu()?);
        }
        beat(scheduler)?;
        let there = seen.iter().filter(|seen| **seen == cpu).count();
        ensure!(there * 10 >= LOOKS * 7, "the loop was on CPUs {seen:?} after it was stolen, expected {cpu}");
        Ok(())
    }

    /// It has more CPU time than a moment ago.
    pub fn expect_to_run(&self) -> Result<()> {
        let before = self.ran_ns()?;
        wait_for("the loop to run", HANG_LIMIT, || Ok(self.ran_ns()? > before + 10_000_000))
    }
}

/// A control group.
pub struct Group {
    path: PathBuf,
    ours: bool,
}

impl Group {
    /// A new one, below the root of the tree.
    pub fn new(name: &str, file: &str, value: &str) -> Result<Self> {
        let path = Path::new(CGROUPS).join(name);
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        let group = Self { path, ours: true };
        group.write(file, value)?;
        Ok(group)
    }

    /// New ones, each below the one before, with threads in the last one only. That one comes first, as it is removed first.
    pub fn chain(name: &str, levels: usize) -> Result<Vec<Self>> {
        let (mut groups, mut name) = (Vec::new(), name.to_owned());
        for level in 1..=levels {
            let group = Self::new(&name, "cpu.weight", "100")?;
            if level < levels {
                group.write("cgroup.subtree_control", "+cpu")?;
            }
            groups.insert(0, group);
            name += &format!("/{level}");
        }
        Ok(groups)
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// CPU time of its threads up to now, microseconds.
    pub fn used_us(&self) -> Result<u64> {
        let path = self.path.join("cpu.stat");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let used = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok());
        used.with_context(|| format!("{}: no usage_usec", path.display()))
    }

    /// That of a VM.
    pub fn of_vm(vm: &Vm) -> Self {
        let path = Path::new(CGROUPS).join("machine.slice").join(format!("{}.scope", vm.name));
        Self { path, ours: false }
    }

    /// Writes one of its files.
    pub fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.path.join(file);
        fs::write(&path, value).with_context(|| format!("{}: {value}", path.display()))
    }

    /// Takes a process.
    pub fn take(&self, thread: &Loop) -> Result<()> {
        self.write("cgroup.procs", &thread.pid.to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        // Fails while a process is in it, which is the end of the scenario anyway.
        let _ = fs::remove_dir(&self.path);
    }
}
