//! What scx_vnuma does with threads that it is told of, without vnumad: it takes them to their places, lets idle CPUs steal
//! them, and ends as it should, however it ends. The threads are loops, which never sleep: it sees them when their time is up.

use anyhow::{Context, Result, ensure};
use std::{
    cell::RefCell,
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use vnuma_host::{
    location::monotonic_ns,
    scheduler::{Assigned, DIRECTORY, OPS, Scheduler, Steal, loaded_scheduler},
};
use vnuma_process::{
    Class, change_class, open_pidfd,
    procfs::{read_cpu_times, read_last_cpu},
    read_class,
};
use vnuma_scenario::{HANG_LIMIT, Nodes, Process, output, wait_for};

/// CPUs of the server `2n4c` that are used: one of node 0, both of node 1.
const ALLOWED: &str = "1-3";
const NODE_1: [u32; 2] = [2, 3];
/// Places hold so long without a heartbeat.
const KEEP_S: u64 = 3;
/// Looks at a loop that stays where it is.
const LOOKS: usize = 10;
/// Time in which shares are measured.
const WATCHED: Duration = Duration::from_secs(2);
/// Thefts of which the order is checked.
const THEFTS: usize = 6;

pub fn run() -> Result<()> {
    let nodes = Nodes::read()?;
    ensure!(nodes.cpus(1).is_some_and(|cpus| cpus.to_string() == "2-3"), "the server is not a 2n4c");
    ensure!(loaded()?.is_none(), "a scheduler is loaded already");
    // On a machine that stands still for a moment nobody is to count as starving.
    let (mut process, scheduler) = start(&["--starve-ms", "10000"])?;
    follows_places(&scheduler)?;
    steals(&scheduler)?;
    steals_by_pressure(&scheduler)?;
    shares(&scheduler)?;
    forgets_places(&scheduler)?;
    refuses_a_second_one()?;
    let loop_ = Loop::start(ALLOWED)?;
    process.0.kill()?;
    process.0.wait()?;
    wait_for("the kernel to go on without it", HANG_LIMIT, || Ok(loaded()?.is_none()))?;
    ensure!(scheduler.check().is_err(), "its maps are taken for those of a scheduler that runs");
    loop_.expect_to_run()?;
    ensure!(read_class(loop_.pid)? == Class::Ext, "its class has changed");
    drop(scheduler);
    let (process, scheduler) = start(&["--starve-ms", "200"]).context("after one that was killed")?;
    loop_.place(&scheduler, Some("1"), 0)?;
    loop_.wait_until_on(&scheduler, &[1])?;
    println!("killed: the kernel's scheduler goes on, and the next scx_vnuma takes the thread again");
    rescues(&scheduler)?;
    stop(process)?;
    loop_.expect_to_run()?;
    ensure!(!Path::new(DIRECTORY).join("header").exists(), "its maps are still pinned");
    drop((loop_, scheduler));
    takes_all()
}

/// In full mode it has all threads, whatever their class.
fn takes_all() -> Result<()> {
    let (process, scheduler) = start(&["--full"])?;
    ensure!(scheduler.is_full(), "its mode is partial");
    let thread = Loop::start_fair(ALLOWED)?;
    for (place, cpus) in [("1", &[1][..]), ("2-3", &NODE_1), ("1", &[1])] {
        thread.place(&scheduler, Some(place), 0)?;
        thread.wait_until_on(&scheduler, cpus)?;
    }
    ensure!(read_class(thread.pid)? == Class::Other, "its class has changed");
    stop(process)?;
    thread.expect_to_run()?;
    println!("in full mode a thread of class SCHED_OTHER follows its places, too");
    Ok(())
}

fn start(options: &[&str]) -> Result<(Process, Scheduler)> {
    let keep = KEEP_S.to_string();
    let process =
        Command::new("scx_vnuma").args(["--keep-s", &keep]).args(options).stdin(Stdio::null()).spawn();
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

fn stop(mut process: Process) -> Result<()> {
    output("kill", &["-TERM", &process.0.id().to_string()])?;
    let mut status = None;
    wait_for("scx_vnuma to end", HANG_LIMIT, || {
        status = process.0.try_wait()?;
        Ok(status.is_some())
    })?;
    ensure!(status.is_some_and(|status| status.success()), "scx_vnuma: {status:?}");
    ensure!(loaded()?.is_none(), "it is still loaded");
    Ok(())
}

fn loaded() -> Result<Option<String>> {
    Ok(loaded_scheduler(Path::new("/"))?)
}

/// A process that never sleeps, of class SCHED_EXT.
struct Loop {
    _process: Process,
    pid: i32,
    /// What was decided last.
    assigned: RefCell<Option<Assigned>>,
}

impl Loop {
    fn start(cpus: &str) -> Result<Self> {
        let this = Self::start_fair(cpus)?;
        let pidfd = open_pidfd(this.pid)?;
        let before = change_class(pidfd.as_fd(), this.pid, this.pid, Class::Other, Class::Ext)?;
        ensure!(before == Class::Other, "its class was {before:?}");
        ensure!(read_class(this.pid)? == Class::Ext, "its class was not changed");
        Ok(this)
    }

    /// One that the kernel's own scheduler runs, before all of class SCHED_EXT.
    fn start_fair(cpus: &str) -> Result<Self> {
        let process = Command::new("taskset")
            .args(["--cpu-list", cpus, "sh", "-c", "while :; do :; done"])
            .stdin(Stdio::null())
            .spawn();
        let process = Process(process.context("taskset")?);
        let pid = process.0.id().cast_signed();
        wait_for("the loop to have its CPUs", HANG_LIMIT, || {
            Ok(vnuma_process::read_allowed(pid, pid)?.to_string() == cpus)
        })?;
        Ok(Self { _process: process, pid, assigned: RefCell::default() })
    }

    /// Decides about it anew.
    fn place(&self, scheduler: &Scheduler, place: Option<&str>, pressure: u32) -> Result<()> {
        let place = place.map(str::parse).transpose()?;
        let assigned = Assigned { pid: self.pid, epoch: monotonic_ns(), pressure, place };
        *self.assigned.borrow_mut() = Some(assigned);
        self.again(scheduler)
    }

    /// Another period: the same is decided again.
    fn again(&self, scheduler: &Scheduler) -> Result<()> {
        scheduler.beat(monotonic_ns(), Steal::default())?;
        if let Some(assigned) = self.assigned.borrow_mut().as_mut() {
            assigned.epoch = monotonic_ns();
            scheduler.assign(self.pid, assigned)?;
        }
        Ok(())
    }

    fn ran_ns(&self) -> Result<u64> {
        Ok(read_cpu_times(self.pid, self.pid)?.ran_ns)
    }

    fn cpu(&self) -> Result<u32> {
        Ok(read_last_cpu(self.pid, self.pid)?)
    }

    fn wait_until_on(&self, scheduler: &Scheduler, cpus: &[u32]) -> Result<()> {
        let mut seen = 0;
        wait_for(&format!("the loop to be on {cpus:?}"), Duration::from_secs(20), || {
            self.again(scheduler)?;
            seen = self.cpu()?;
            Ok(cpus.contains(&seen))
        })
        .with_context(|| format!("it is on CPU {seen}"))
    }

    /// It stays on these CPUs, but for moments in which another class takes its CPU and an idle one steals it.
    fn expect_on(&self, scheduler: &Scheduler, cpus: &[u32]) -> Result<()> {
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

    fn expect_to_run(&self) -> Result<()> {
        let ran =
            || Ok::<_, anyhow::Error>(vnuma_process::procfs::read_cpu_times(self.pid, self.pid)?.ran_ns);
        let before = ran()?;
        wait_for("the loop to run", HANG_LIMIT, || Ok(ran()? > before + 10_000_000))
    }
}

/// A place is followed, as far as the operator allows it.
fn follows_places(scheduler: &Scheduler) -> Result<()> {
    let thread = Loop::start(ALLOWED)?;
    for (place, cpus) in [("1", &[1][..]), ("2-3", &NODE_1), ("1", &[1]), ("3", &[3])] {
        thread.place(scheduler, Some(place), 0)?;
        thread.wait_until_on(scheduler, cpus)?;
        thread.expect_on(scheduler, cpus)?;
    }
    ensure!(scheduler.counts().placed >= 3, "the counts: {:?}", scheduler.counts());
    // Nothing of this place is left.
    thread.place(scheduler, Some("0"), 0)?;
    thread.expect_on(scheduler, &[1, 2, 3])?;
    output("taskset", &["-p", "-c", "0-1", &thread.pid.to_string()])?;
    thread.wait_until_on(scheduler, &[0]).context("the operator allows CPU 0 now")?;
    ensure!(scheduler.threads() == [(thread.pid, thread.pid)], "{:?}", scheduler.threads());
    drop(thread);
    wait_for("a thread that has ended to be forgotten", HANG_LIMIT, || Ok(scheduler.threads().is_empty()))?;
    println!("a loop follows its places, within its operator's CPUs");
    Ok(())
}

/// Three loops whose place is one CPU of two: one is stolen within the node, one by the other node.
fn steals(scheduler: &Scheduler) -> Result<()> {
    let before = scheduler.counts();
    let loops = [Loop::start(ALLOWED)?, Loop::start(ALLOWED)?, Loop::start(ALLOWED)?];
    for thread in &loops {
        thread.place(scheduler, Some("2"), 0)?;
    }
    let mut counts = before;
    wait_for("loops to be stolen within the node and by the other one", Duration::from_secs(20), || {
        loops.iter().try_for_each(|thread| thread.again(scheduler))?;
        counts = scheduler.counts();
        Ok(counts.stolen_local > before.stolen_local && counts.stolen_remote > before.stolen_remote)
    })
    .with_context(|| format!("{counts:?}"))?;
    println!("loops that wait are stolen by idle CPUs: {counts:?}");
    Ok(())
}

/// Of those that wait the one with the least pressure is stolen, so not the one with the most. Another class may take a CPU
/// at any time, and mix them up once.
fn steals_by_pressure(scheduler: &Scheduler) -> Result<()> {
    let _elsewhere = [Loop::start_fair("0")?, Loop::start_fair("1")?];
    let loops = [1000, 20_000, 90_000].map(|pressure| Loop::start("2-3").map(|thread| (thread, pressure)));
    let loops = loops.into_iter().collect::<Result<Vec<_>>>()?;
    let mut most = 0;
    for _ in 0..THEFTS {
        let thief = Loop::start_fair("3")?;
        for (thread, pressure) in &loops {
            thread.place(scheduler, Some("2"), *pressure)?;
        }
        for (thread, _) in &loops {
            thread.wait_until_on(scheduler, &[2])?;
        }
        drop(thief);
        let mut stolen = None;
        wait_for("a loop to be stolen", Duration::from_secs(20), || {
            scheduler.beat(monotonic_ns(), Steal::default())?;
            for (thread, pressure) in &loops {
                if thread.cpu()? == 3 {
                    stolen = Some(*pressure);
                }
            }
            Ok(stolen.is_some())
        })?;
        match stolen {
            Some(90_000) => most += 1,
            Some(pressure) => println!("stolen: pressure {pressure}"),
            None => {}
        }
    }
    ensure!(most <= 1, "the loop with the most pressure was stolen {most} times of {THEFTS}");
    Ok(())
}

/// A loop whose CPU another class has is taken by a CPU that is never idle.
fn rescues(scheduler: &Scheduler) -> Result<()> {
    let before = scheduler.counts().starved;
    let (_fair, _other) = (Loop::start_fair("2")?, Loop::start("3")?);
    let waiting = Loop::start("2-3")?;
    waiting.place(scheduler, Some("2"), 0)?;
    wait_for("the loop that waits too long to be stolen", Duration::from_secs(20), || {
        waiting.again(scheduler)?;
        Ok(scheduler.counts().starved > before)
    })?;
    waiting.expect_to_run()?;
    println!("a loop that waits too long is stolen by a CPU that is busy");
    Ok(())
}

/// A control group at the root of the tree.
struct Group(PathBuf);

impl Group {
    fn new(name: &str, file: &str, value: &str) -> Result<Self> {
        let path = Path::new("/sys/fs/cgroup").join(name);
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        let group = Self(path);
        group.write(file, value)?;
        Ok(group)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.0.join(file);
        fs::write(&path, value).with_context(|| format!("{}: {value}", path.display()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Fails while a process is in it, which is the end of the scenario anyway.
        let _ = fs::remove_dir(&self.0);
    }
}

/// CPU time is shared as control groups say: of two on one CPU, and of one with a limit.
fn shares(scheduler: &Scheduler) -> Result<()> {
    let groups =
        [Group::new("scx-light", "cpu.weight", "100")?, Group::new("scx-heavy", "cpu.weight", "300")?];
    let limited = Group::new("scx-limited", "cpu.max", "20000 100000")?;
    let loops = [Loop::start("3")?, Loop::start("3")?, Loop::start("3")?];
    for (group, thread) in [(0, 0), (1, 1), (1, 2)] {
        groups[group].write("cgroup.procs", &loops[thread].pid.to_string())?;
    }
    let single = Loop::start("2")?;
    limited.write("cgroup.procs", &single.pid.to_string())?;
    scheduler.beat(monotonic_ns(), Steal::default())?;
    let all = || loops.iter().chain([&single]).map(Loop::ran_ns).collect::<Result<Vec<u64>>>();
    std::thread::sleep(Duration::from_millis(500));
    let (before, began) = (all()?, Instant::now());
    std::thread::sleep(WATCHED);
    let (after, ns) = (all()?, began.elapsed().as_nanos() as f64);
    let ran: Vec<f64> =
        after.iter().zip(before).map(|(after, before)| (after - before) as f64 / ns).collect();
    println!("shares of a CPU: {ran:.2?}; waits for a cpu.max: {}", scheduler.counts().throttled);
    let heavy = (ran[1] + ran[2]) / ran[0];
    ensure!((2.0..4.5).contains(&heavy), "weights 300 and 100 share a CPU as {heavy:.1} to 1");
    ensure!(ran[1] / ran[2] > 0.6 && ran[2] / ran[1] > 0.6, "a group's weight is not shared evenly: {ran:?}");
    ensure!((0.1..0.3).contains(&ran[3]), "a fifth of a CPU is the limit of the last one: {ran:?}");
    drop((loops, single));
    Ok(())
}

/// Without a heartbeat places do not hold.
fn forgets_places(scheduler: &Scheduler) -> Result<()> {
    let thread = Loop::start(ALLOWED)?;
    thread.place(scheduler, Some("1"), 0)?;
    thread.wait_until_on(scheduler, &[1])?;
    std::thread::sleep(Duration::from_secs(KEEP_S + 1));
    let assigned =
        Assigned { pid: thread.pid, epoch: monotonic_ns(), pressure: 0, place: Some("2-3".parse()?) };
    scheduler.assign(thread.pid, &assigned)?;
    let before = scheduler.counts().placed;
    std::thread::sleep(Duration::from_millis(50) * LOOKS as u32);
    ensure!(scheduler.counts().placed == before, "it was taken to a place of somebody who is silent");
    for (place, cpus) in [("2-3", &NODE_1[..]), ("1", &[1])] {
        thread.place(scheduler, Some(place), 0)?;
        thread.wait_until_on(scheduler, cpus)?;
    }
    println!("places do not hold without a heartbeat, and hold again with it");
    Ok(())
}

fn refuses_a_second_one() -> Result<()> {
    let second = Command::new("scx_vnuma").output()?;
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    ensure!(!second.status.success() && error.contains("EBUSY") && error.contains(OPS), "{error}");
    ensure!(loaded()?.as_deref() == Some(OPS), "the first one is not loaded any more");
    println!("a second one is refused: {}", error.trim());
    Ok(())
}
