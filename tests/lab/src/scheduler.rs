//! What scx_vnuma does with threads that it is told of, without vnumad: it takes them to their places, lets idle CPUs steal
//! them, and ends as it should, however it ends. The threads are loops, which never sleep: it sees them when their time is up.

mod alone;
mod cores;
mod cpus;
mod deep;
mod entitled;
mod fair;
mod names;
mod quotas;
mod tickless;
pub mod yields;

use crate::{
    crowd, flips,
    threads::{Group, KEEP_S, LOOKS, Loop, beat, expect_share, loaded, shares, start, stop},
    vcpus,
};
use anyhow::{Context, Result, ensure};
use clap::builder::PossibleValuesParser;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CpuSet as Cpus, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::{Pid, gettid, pipe, write},
};
use std::{
    fs,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};
use vnuma_model::Steal;
use vnuma_observe::{
    location::monotonic_ns,
    scheduler::{Assigned, DIRECTORY, OPS, Scheduler},
};
use vnuma_process::{Class, change_class, open_pidfd};
use vnuma_scenario::{HANG_LIMIT, Nodes, output, wait_for};

/// CPUs of the server `2n4c` that are used: one of node 0, both of node 1.
const ALLOWED: &str = "1-3";
const NODE_1: [u32; 2] = [2, 3];
/// Thefts of which the order is checked.
const THEFTS: usize = 6;
/// Thefts of which the node is checked.
const NEAR_THEFTS: usize = 24;
/// Of a share of CPU time that control groups give: a tick of the kernel is 4 ms, a slice 5 ms.
const TOLERANCE: f64 = 0.06;
/// Times that a thread wakes beside loops, and how many they are.
pub(crate) const WAKE_UPS: u64 = 200;
const LOOPS: usize = 9;
/// Times that two threads are woken for the same CPU.
const RACES: usize = 6;

#[derive(clap::Args)]
pub struct Arguments {
    /// Play this part only; may be repeated. `cores` is for a server whose cores have two threads,
    /// `tickless` for one with a CPU of nohz_full, `fair` for one with eight CPUs, and none of them is played with others
    #[arg(long = "part", value_name = "NAME", value_parser = PossibleValuesParser::new(names_of_parts()))]
    parts: Vec<String>,
    /// Thefts of a thread whose CPUs change meanwhile
    #[arg(long, default_value_t = 300)]
    thefts: u64,
    /// Play the part `hostile` only, with so many loops of a user without rights
    #[arg(long, value_name = "LOOPS")]
    hostile: Option<usize>,
    /// Be those loops
    #[arg(long, value_name = "LOOPS", hide = true)]
    crowd: Option<usize>,
    /// Change the priority all the time
    #[arg(long, hide = true)]
    caller: bool,
    /// On these CPUs
    #[arg(long, value_name = "CPUS", hide = true, default_value = "2")]
    on: vnuma_model::CpuSet,
    /// Make folders here
    #[arg(long, value_name = "PATH", hide = true)]
    folders: Option<PathBuf>,
}

type Part = (&'static str, fn(&Scheduler) -> Result<()>);

/// What one scheduler does before it is killed.
const PARTS: [Part; 16] = [
    ("alone", alone::keeps_its_cpu),
    ("places", follows_places),
    ("wakes", wakes_at_its_place),
    ("preempts", goes_first_as_it_wakes),
    ("steals", steals),
    ("near", steals_from_near),
    ("pressure", steals_by_pressure),
    ("told", steals_as_it_is_told),
    ("within", stays_within_places),
    ("anew", queues_anew),
    ("groups", honours_groups),
    ("nested", deep::counts_in_the_groups_above),
    ("raised", quotas::counts_at_once),
    ("parks", quotas::wait_without_locks),
    ("changed", quotas::change_all_the_time),
    ("silence", forgets_places),
];

/// What has schedulers of its own, one after the other.
const LATER: [&str; 14] = [
    "flips", "ends", "full", "entitled", "lags", "tiny", "calls", "names", "cpus", "yields", "deep", "twice",
    "vcpus", "vnumad",
];

/// What a part does.
type Play = fn() -> Result<()>;

/// What is for a server of its own.
const ELSEWHERE: [(&str, Play); 3] = [
    ("cores", cores::are_taken_whole),
    ("fair", fair::groups_have_their_part),
    ("tickless", tickless::have_no_tick),
];

fn names_of_parts() -> impl Iterator<Item = &'static str> {
    let elsewhere = ELSEWHERE.iter().map(|(name, _)| *name);
    PARTS.iter().map(|(name, _)| *name).chain(LATER).chain(elsewhere)
}

/// The one part that is for another server, if it is that.
fn elsewhere(parts: &[String]) -> Result<Option<Play>> {
    let Some((name, play)) = ELSEWHERE.iter().find(|(name, _)| parts.iter().any(|part| part == name)) else {
        return Ok(None);
    };
    ensure!(parts.len() == 1, "part {name} is for a server of its own: {}", parts.join(", "));
    Ok(Some(*play))
}

/// What this program is when a part starts it; none if it is to play parts.
fn be_a_load(arguments: &Arguments) -> Option<Result<()>> {
    if let Some(count) = arguments.crowd {
        return Some(crowd::be(count, &arguments.on));
    }
    if arguments.caller {
        return Some(crowd::be_a_caller());
    }
    arguments.folders.as_deref().map(quotas::be_a_maker)
}

pub fn run(arguments: &Arguments) -> Result<()> {
    if let Some(ended) = be_a_load(arguments) {
        return ended;
    }
    if let Some(play) = elsewhere(&arguments.parts)? {
        return play();
    }
    let nodes = Nodes::read()?;
    ensure!(nodes.cpus(1).is_some_and(|cpus| cpus.to_string() == "2-3"), "the server is not a 2n4c");
    ensure!(loaded()?.is_none(), "a scheduler is loaded already");
    if let Some(count) = arguments.hostile {
        return crowd::run(count);
    }
    let wanted = |name: &str| {
        assert!(names_of_parts().any(|known| known == name), "no part {name} can be asked for");
        arguments.parts.is_empty() || arguments.parts.iter().any(|part| part == name)
    };
    if PARTS.iter().any(|(name, _)| wanted(name)) || wanted("flips") {
        // On a machine that stands still for a moment no thread counts as starving.
        let (process, scheduler) = start(&["--starve-ms", "10000"])?;
        for (name, part) in PARTS.iter().filter(|(name, _)| wanted(name)) {
            part(&scheduler).with_context(|| format!("part {name}"))?;
        }
        if wanted("flips") {
            flips::run(&scheduler, arguments.thefts).context("part flips")?;
        }
        stop(process)?;
    }
    if wanted("ends") {
        ends()?;
    }
    if wanted("full") {
        takes_all()?;
    }
    if wanted("entitled") || wanted("lags") {
        let (process, scheduler) = start(&[])?;
        if wanted("entitled") {
            entitled::stay_within_their_share(&scheduler)?;
        }
        if wanted("lags") {
            entitled::wait_for_a_bounded_time(&scheduler)?;
        }
        stop(process)?;
    }
    if wanted("tiny") {
        crowd::has_next_to_nothing()?;
    }
    if wanted("calls") {
        crowd::has_no_more_by_calls()?;
    }
    if wanted("names") {
        names::need_not_be_there()?;
    }
    if wanted("cpus") {
        cpus::come_and_go()?;
    }
    if wanted("yields") {
        yields::are_granted()?;
    }
    if wanted("deep") {
        deep::costs_no_more()?;
    }
    if wanted("twice") {
        quotas::count_once_in_full_mode()?;
    }
    vcpus::run(wanted)
}

/// A second one is refused, and a thread runs on when the first one is killed.
fn ends() -> Result<()> {
    let (mut process, scheduler) = start(&[])?;
    refuses_a_second_one()?;
    let thread = Loop::start(ALLOWED)?;
    process.0.kill()?;
    process.0.wait()?;
    wait_for("the kernel to go on without it", HANG_LIMIT, || Ok(loaded()?.is_none()))?;
    ensure!(scheduler.check().is_err(), "its maps are taken for those of a scheduler that runs");
    thread.expect_to_run()?;
    ensure!(thread.class()? == Class::Ext, "its class has changed");
    drop(scheduler);
    let (process, scheduler) = start(&["--starve-ms", "200"]).context("after one that was killed")?;
    thread.place(&scheduler, Some("1"), 0)?;
    thread.wait_until_on(&scheduler, &[1])?;
    println!("killed: the kernel's scheduler goes on, and the next scx_vnuma takes the thread again");
    rescues(&scheduler)?;
    stop(process)?;
    thread.expect_to_run()?;
    ensure!(!Path::new(DIRECTORY).join("header").exists(), "its maps are still pinned");
    Ok(())
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
    ensure!(thread.class()? == Class::Other, "its class has changed");
    stop(process)?;
    thread.expect_to_run()?;
    println!("in full mode a thread of class SCHED_OTHER follows its places, too");
    Ok(())
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

/// One that sleeps follows its places, too: it is taken there when it wakes.
fn wakes_at_its_place(scheduler: &Scheduler) -> Result<()> {
    let (tell, told) = mpsc::channel();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Fails only if the test is over.
            let _ = tell.send(gettid().as_raw());
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let moved = told.recv_timeout(HANG_LIMIT).map_err(anyhow::Error::from).and_then(|tid| {
            let thread = Loop::of_thread(tid);
            thread.allow(ALLOWED)?;
            thread.make_ext()?;
            for (place, cpus) in [("1", &[1][..]), ("2-3", &NODE_1), ("1", &[1]), ("3", &[3])] {
                thread.place(scheduler, Some(place), 0)?;
                thread.wait_until_on(scheduler, cpus)?;
                thread.expect_on(scheduler, cpus)?;
            }
            Ok(())
        });
        ended.store(true, Ordering::Relaxed);
        moved
    })
}

/// Those that sleep most of the time do not wait until the time of the loops on their CPU is up, whether they have a place or not.
fn goes_first_as_it_wakes(scheduler: &Scheduler) -> Result<()> {
    let loops = (0..LOOPS).map(|_| Loop::start(ALLOWED)).collect::<Result<Vec<_>>>()?;
    for place in [Some("1"), Some("2-3"), None] {
        loops.iter().try_for_each(|thread| thread.place(scheduler, place, 0))?;
        let (preempted, waited) = wake_beside_loops(scheduler, place)?;
        let mean_us = waited / WAKE_UPS / 1000;
        println!(
            "place {place:?}: a thread that woke {WAKE_UPS} times beside {LOOPS} loops took a CPU {preempted} times, and waited for {mean_us} us"
        );
        ensure!(preempted >= WAKE_UPS / 2, "it took the CPU at {preempted} of {WAKE_UPS} wake-ups only");
    }
    loops.iter().try_for_each(Loop::expect_to_run)
}

/// How often a thread that wakes has taken a CPU, and how long it has waited in all, nanoseconds.
pub(crate) fn wake_beside_loops(scheduler: &Scheduler, place: Option<&str>) -> Result<(u64, u64)> {
    let before = scheduler.counts().preempted;
    let (tell, told) = mpsc::channel();
    let (go, begin) = mpsc::channel();
    let waited = std::thread::scope(|scope| {
        let sleeper = scope.spawn(move || -> Result<u64> {
            tell.send(gettid().as_raw())?;
            begin.recv()?;
            let before = waited_ns()?;
            for _ in 0..WAKE_UPS {
                std::thread::sleep(Duration::from_millis(10));
                burn(Duration::from_micros(100))?;
            }
            Ok(waited_ns()? - before)
        });
        let thread = Loop::of_thread(told.recv_timeout(HANG_LIMIT)?);
        thread.allow(ALLOWED)?;
        thread.make_ext()?;
        thread.place(scheduler, place, 0)?;
        go.send(())?;
        sleeper.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
    });
    Ok((scheduler.counts().preempted - before, waited?))
}

/// How long this thread has waited for a CPU, nanoseconds.
fn waited_ns() -> Result<u64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(text.split_whitespace().nth(1).context("no time of waiting")?.parse()?)
}

/// Three loops whose place is one CPU of two: one is stolen within the node, one by the other node.
fn steals(scheduler: &Scheduler) -> Result<()> {
    let before = scheduler.counts();
    let loops = [Loop::start(ALLOWED)?, Loop::start(ALLOWED)?, Loop::start(ALLOWED)?];
    for thread in &loops {
        thread.place(scheduler, Some("2"), 0)?;
    }
    let mut counts = before;
    wait_for("loops to be stolen within the node and by the other one", HANG_LIMIT, || {
        loops.iter().try_for_each(|thread| thread.again(scheduler))?;
        counts = scheduler.counts();
        Ok(counts.stolen_local > before.stolen_local && counts.stolen_remote > before.stolen_remote)
    })
    .with_context(|| format!("{counts:?}"))?;
    println!("loops that wait are stolen by idle CPUs: {counts:?}");
    Ok(())
}

/// Of two idle CPUs the one of its own node is woken to steal a thread that waits.
fn steals_from_near(scheduler: &Scheduler) -> Result<()> {
    // What ends on a CPU has that look for a thread, too.
    pin_to(&[0])?;
    let mut far = 0;
    for _ in 0..NEAR_THEFTS {
        let loops = [Loop::start("2")?, Loop::start("2")?];
        beat(scheduler)?;
        std::thread::sleep(Duration::from_millis(300));
        let mut cpus = Cpus::new();
        (1..=3).try_for_each(|cpu| cpus.set(cpu))?;
        sched_setaffinity(Pid::from_raw(loops[0].tid), &cpus)?;
        wait_for("the loop to be stolen", HANG_LIMIT, || Ok(loops[0].cpu()? != 2))?;
        far += usize::from(loops[0].cpu()? == 1);
    }
    pin_to(&[0, 1, 2, 3])?;
    println!("{far} of {NEAR_THEFTS} loops were stolen by a CPU of the other node");
    // Threads of the kernel wake CPUs, too, and these look for work when they have done theirs.
    ensure!(far * 2 <= NEAR_THEFTS, "{far} of {NEAR_THEFTS} loops were stolen by a CPU of the other node");
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
        wait_for("a loop to be stolen", HANG_LIMIT, || {
            beat(scheduler)?;
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

/// Threads wait in two places for CPU 3: on its own node, and on CPU 1, which is the next one by number that has any. By
/// pressure it takes one of its own node, blindly the other one.
fn steals_as_it_is_told(scheduler: &Scheduler) -> Result<()> {
    let near = [Loop::start("2-3")?, Loop::start("2-3")?];
    let far = [Loop::start("1,3")?, Loop::start("1,3")?];
    for (steal, blind) in [(Steal::ByPressure, false), (Steal::Blindly, true)] {
        scheduler.beat(monotonic_ns(), steal)?;
        let mut expected = 0;
        for _ in 0..THEFTS {
            let thief = Loop::start_fair("3")?;
            for (threads, place, cpu) in [(&near, "2", 2), (&far, "1", 1)] {
                threads.iter().try_for_each(|thread| thread.place(scheduler, Some(place), 1000))?;
                threads.iter().try_for_each(|thread| thread.wait_until_on(scheduler, &[cpu]))?;
            }
            // One that is stolen before it has seen the last decision goes back once.
            std::thread::sleep(Duration::from_millis(300));
            drop(thief);
            let stolen = wait_for_theft(scheduler, &near, &far)?;
            let of = if blind { &far } else { &near };
            expected += usize::from(of.iter().any(|thread| thread.tid == stolen.tid));
            stolen.expect_to_stay_on(scheduler, 3)?;
        }
        println!("{steal:?}: {expected} of {THEFTS} thefts as expected");
        ensure!(expected + 1 >= THEFTS, "{steal:?}: only {expected} of {THEFTS} thefts as expected");
    }
    scheduler.beat(monotonic_ns(), Steal::default())?;
    Ok(())
}

/// The one that CPU 3 has stolen.
fn wait_for_theft<'a>(scheduler: &Scheduler, near: &'a [Loop; 2], far: &'a [Loop; 2]) -> Result<&'a Loop> {
    let mut stolen = None;
    wait_for("a loop to be stolen by CPU 3", HANG_LIMIT, || {
        beat(scheduler)?;
        for thread in near.iter().chain(far) {
            if thread.cpu()? == 3 {
                stolen = Some(thread);
            }
        }
        Ok(stolen.is_some())
    })?;
    stolen.context("it was stolen")
}

/// While places are the limit of stealing, an idle CPU beside them takes no thread.
fn stays_within_places(scheduler: &Scheduler) -> Result<()> {
    let _elsewhere = Loop::start("1")?;
    let loops = [Loop::start("2-3")?, Loop::start("2-3")?];
    scheduler.beat(monotonic_ns(), Steal::WithinPlaces)?;
    for thread in &loops {
        thread.place(scheduler, Some("2"), 0)?;
        thread.wait_until_on(scheduler, &[2])?;
    }
    let before = scheduler.counts();
    let seen = shares(Some(scheduler), &[&loops[0], &loops[1]])?;
    let after = scheduler.counts();
    let stolen = |counts: &vnuma_observe::scheduler::Counts| counts.stolen_local + counts.stolen_remote;
    ensure!(stolen(&after) == stolen(&before), "stolen out of its place: {before:?}, then {after:?}");
    ensure!((seen[0] - 0.5).abs() <= TOLERANCE, "they do not share their CPU: {seen:.2?}");
    scheduler.beat(monotonic_ns(), Steal::Blindly)?;
    wait_for("one of them to be stolen as places are no limit any more", HANG_LIMIT, || {
        beat(scheduler)?;
        Ok(stolen(&scheduler.counts()) > stolen(&after))
    })?;
    scheduler.beat(monotonic_ns(), Steal::default())?;
    println!("with places as the limit of stealing nobody was stolen");
    Ok(())
}

/// Uses so much CPU time.
fn burn(time: Duration) -> Result<()> {
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let end = now()? + time;
    while now()? < end {}
    Ok(())
}

fn pin_to(cpus: &[usize]) -> Result<()> {
    let mut set = Cpus::new();
    cpus.iter().try_for_each(|&cpu| set.set(cpu))?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

fn wait_for_byte(pipe: BorrowedFd<'_>) -> Result<()> {
    poll(&mut [PollFd::new(pipe, PollFlags::POLLIN)], PollTimeout::from(60_000u16))?;
    Ok(())
}

/// A thread and one of another class are woken at the same moment for the same idle CPU: the other one gets it, and the
/// thread, which had it already, is to run elsewhere while that is busy, although nobody can steal it.
fn queues_anew(scheduler: &Scheduler) -> Result<()> {
    let mut late = 0;
    for _ in 0..RACES {
        late += usize::from(!race(scheduler)?);
    }
    println!("{late} of {RACES} threads waited for a CPU that was taken from them");
    ensure!(late <= 1, "{late} of {RACES} threads waited for a CPU that another class had taken from them");
    Ok(())
}

/// Has the thread run before the CPU was free again?
fn race(scheduler: &Scheduler) -> Result<bool> {
    let (read, wake) = pipe()?;
    let (tell, told) = mpsc::channel();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| -> Result<()> {
            pin_to(&[2, 3])?;
            tell.send(gettid().as_raw())?;
            wait_for_byte(read.as_fd())?;
            burn(Duration::from_millis(100))?;
            done.store(true, Ordering::Relaxed);
            Ok(())
        });
        let other = scope.spawn(|| -> Result<bool> {
            pin_to(&[2])?;
            wait_for_byte(read.as_fd())?;
            burn(Duration::from_millis(1500))?;
            Ok(done.load(Ordering::Relaxed))
        });
        let tid = told.recv_timeout(HANG_LIMIT)?;
        let pid = std::process::id().cast_signed();
        let pidfd = open_pidfd(pid)?;
        change_class(pidfd.as_fd(), pid, tid, Class::Other, Class::Ext)?;
        let assigned = Assigned { pid, epoch: monotonic_ns(), pressure: 0, place: Some("2".parse()?) };
        beat(scheduler)?;
        scheduler.assign(tid, &assigned)?;
        // Both sleep then, and CPU 2 is idle.
        std::thread::sleep(Duration::from_millis(300));
        write(&wake, &[1])?;
        let failed = |_| anyhow::anyhow!("a thread panicked");
        let first = other.join().map_err(failed)??;
        thread.join().map_err(failed)??;
        Ok(first)
    })
}

/// CPU time is shared as control groups say, by weights and after they have changed, and by limits.
fn honours_groups(scheduler: &Scheduler) -> Result<()> {
    let light = Group::new("scx-light", "cpu.weight", "100")?;
    let heavy = Group::new("scx-heavy", "cpu.weight", "300")?;
    let loops = [Loop::start("3")?, Loop::start("3")?, Loop::start("3")?];
    let all = [&loops[0], &loops[1], &loops[2]];
    light.take(all[0])?;
    heavy.take(all[1])?;
    heavy.take(all[2])?;
    expect_share("weight 100 beside 300", Some(scheduler), &all, (0.25, TOLERANCE))?;
    let seen = shares(Some(scheduler), &all[1..])?;
    ensure!((seen[0] - 0.5).abs() <= TOLERANCE, "two of a group share its time as {seen:.2?}");
    light.write("cpu.weight", "900")?;
    expect_share("weight 900 beside 300, set while both run", Some(scheduler), &all, (0.75, TOLERANCE))?;
    drop(loops);

    let limited = Group::new("scx-limited", "cpu.max", "4000 100000")?;
    let free = Group::new("scx-free", "cpu.weight", "100")?;
    let loops = [Loop::start("2")?, Loop::start("2")?, Loop::start("2")?];
    let all = [&loops[0], &loops[1], &loops[2]];
    free.take(all[0])?;
    limited.take(all[1])?;
    limited.take(all[2])?;
    // Less than a tick for each of them.
    expect_share("beside a limit of 4 %", Some(scheduler), &all, (0.96, 0.02))?;
    limited.write("cpu.max", "max 100000")?;
    expect_share("beside one that has no limit any more", Some(scheduler), &all, (0.5, TOLERANCE))?;
    ensure!(scheduler.counts().throttled > 0, "no wait for a cpu.max was counted");
    drop(loops);
    Ok(())
}

/// A loop whose CPU another class has is taken by a CPU that is never idle.
fn rescues(scheduler: &Scheduler) -> Result<()> {
    let before = scheduler.counts().starved;
    let (_fair, _other) = (Loop::start_fair("2")?, Loop::start("3")?);
    let waiting = Loop::start("2-3")?;
    waiting.place(scheduler, Some("2"), 0)?;
    wait_for("the loop that waits too long to be stolen", HANG_LIMIT, || {
        waiting.again(scheduler)?;
        Ok(scheduler.counts().starved > before)
    })?;
    waiting.expect_to_run()?;
    println!("a loop that waits too long is stolen by a CPU that is busy");
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
    let looks_at_ns = thread.ran_ns()? + Duration::from_millis(50 * LOOKS as u64).as_nanos() as u64;
    wait_for("the loop to run where it is", HANG_LIMIT, || Ok(thread.ran_ns()? > looks_at_ns))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn parse(part: &str) -> std::result::Result<crate::Arguments, clap::Error> {
        crate::Arguments::try_parse_from(["lab-scenario", "scheduler", "--part", part])
    }

    #[test]
    fn an_unknown_part_is_refused_with_the_names_of_all() {
        let error = parse("placess").err().expect("no part has that name").to_string();
        assert!(error.contains("'placess'"), "{error}");
        for name in ["alone", "silence", "twice", "vnumad", "cores", "fair", "tickless"] {
            assert!(error.contains(&format!("{name}, ")) || error.contains(&format!("{name}]")), "{error}");
            assert!(parse(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_part_for_another_server_is_refused_beside_others() {
        let parts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert!(elsewhere(&parts(&["ends"])).expect("one for this server").is_none());
        assert!(elsewhere(&parts(&["fair"])).expect("one by itself").is_some());
        let error = elsewhere(&parts(&["ends", "fair"])).expect_err("two servers").to_string();
        assert_eq!(error, "part fair is for a server of its own: ends, fair");
    }
}
