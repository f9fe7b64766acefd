//! Runs programs, several at once, and says at the end what each has done and how long it took.
//!
//! ```text
//!  jobs, longest first ─▶ a worker per CPU ─▶ a process, its output in target/test/log/JOB.log
//!                                               └▶ counts, times (target/test/times.json orders the next run)
//! ```

use crate::outcome::Counts;
use crate::steps::{show, workspace};
use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, SysconfVar, sysconf};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// What runs longer hangs: no job takes a tenth of that on a quiet machine, and what it waits for has limits of its own.
const LIMIT: Duration = Duration::from_secs(2 * 3600);
/// Between two looks at a process.
const PERIOD: Duration = Duration::from_millis(20);
/// Between two lines that say what still runs.
const PROGRESS: Duration = Duration::from_secs(60);
/// Jobs that took less are summed up at the end.
const SHORT_SECONDS: f64 = 2.0;
/// Lines of the output of a job that failed, and is no test of libtest's.
const SHOWN_LINES: usize = 60;

/// Jobs of which only some may run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// They wait for cargo's lock.
    Cargo,
    /// Each starts libvirtd, which has one place on a machine.
    Libvirt,
    /// Each boots a server with gigabytes of memory and several threads.
    Lab,
}

impl Lane {
    fn width(self) -> usize {
        match self {
            Self::Cargo | Self::Libvirt => 1,
            Self::Lab => 2,
        }
    }
}

/// What a job's output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    /// Counted as libtest counts.
    Tests,
    /// Of a program that passes or fails.
    Any,
}

/// A program to be run.
pub struct Job {
    name: String,
    command: Command,
    output: Output,
    lane: Option<Lane>,
    /// Expected, unless an earlier run has said how long it takes.
    seconds: f64,
    limit: Duration,
}

impl Job {
    /// One that passes if it ends with status 0.
    pub fn new(name: &str, command: Command) -> Self {
        let name = name.to_owned();
        Self { name, command, output: Output::Any, lane: None, seconds: 10.0, limit: LIMIT }
    }

    /// One whose output is that of libtest.
    pub fn tests(name: &str, command: Command) -> Self {
        Self { output: Output::Tests, seconds: 2.0, ..Self::new(name, command) }
    }

    /// Its output is that of libtest all the same.
    pub fn counted(mut self) -> Self {
        self.output = Output::Tests;
        self
    }

    pub fn env(mut self, name: &str, value: &Path) -> Self {
        self.command.env(name, value);
        self
    }

    pub fn lane(mut self, lane: Lane) -> Self {
        self.lane = Some(lane);
        self
    }

    /// How long it takes, about.
    pub fn seconds(mut self, seconds: f64) -> Self {
        self.seconds = seconds;
        self
    }

    /// When it is ended.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    pub fn name(&self) -> &str {
        &self.name
    }
}

/// What a job has done.
struct Done {
    name: String,
    problem: Option<String>,
    counts: Counts,
    seconds: f64,
    /// Of CPU, with its children.
    cpu: f64,
}

/// The jobs that have not begun, and what is known of the others.
#[derive(Default)]
struct State {
    waiting: Vec<Job>,
    running: BTreeMap<String, Instant>,
    lanes: HashMap<Lane, usize>,
    done: Vec<Done>,
}

impl State {
    /// The longest job whose lane has a place.
    fn take(&mut self) -> Option<Job> {
        let free =
            |job: &Job| job.lane.is_none_or(|lane| self.lanes.get(&lane).is_none_or(|n| *n < lane.width()));
        let place = self.waiting.iter().position(free)?;
        let job = self.waiting.remove(place);
        if let Some(lane) = job.lane {
            *self.lanes.entry(lane).or_default() += 1;
        }
        self.running.insert(job.name.clone(), Instant::now());
        Some(job)
    }

    fn end(&mut self, lane: Option<Lane>, done: Done) {
        if let Some(count) = lane.and_then(|lane| self.lanes.get_mut(&lane)) {
            *count -= 1;
        }
        self.running.remove(&done.name);
        self.done.push(done);
    }
}

/// Seconds that jobs took, by name. Of a file that another version has left nothing is taken.
fn times(path: &Path) -> BTreeMap<String, f64> {
    fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

fn folder() -> PathBuf {
    workspace().join("target/test")
}

/// How long a job took when it ran last on this machine.
pub fn last_time(name: &str) -> Option<f64> {
    times(&folder().join("times.json")).get(name).copied()
}

/// Runs jobs and prints what became of them; an error if one failed. All of them run, whatever fails, so that one run shows
/// everything that is wrong.
pub fn run(jobs: Vec<Job>, since: Instant) -> Result<()> {
    run_in(&folder(), jobs, since)
}

fn run_in(folder: &Path, mut jobs: Vec<Job>, since: Instant) -> Result<()> {
    let logs = folder.join("log");
    if logs.exists() {
        fs::remove_dir_all(&logs).with_context(|| logs.display().to_string())?;
    }
    fs::create_dir_all(&logs).with_context(|| logs.display().to_string())?;
    let mut times = times(&folder.join("times.json"));
    jobs.sort_by(|one, other| {
        let seconds = |job: &Job| times.get(&job.name).copied().unwrap_or(job.seconds);
        seconds(other).total_cmp(&seconds(one))
    });
    let workers = thread::available_parallelism().map_or(1, usize::from);
    println!("{} jobs, {workers} at once, each with its output in {}", jobs.len(), logs.display());
    let (state, changed) = (Mutex::new(State { waiting: jobs, ..State::default() }), Condvar::new());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| work(&state, &changed, &logs));
        }
    });
    let done = state.into_inner().unwrap_or_else(PoisonError::into_inner).done;
    for one in done.iter().filter(|one| one.problem.is_none()) {
        times.insert(one.name.clone(), one.seconds);
    }
    let path = folder.join("times.json");
    fs::write(&path, serde_json::to_vec_pretty(&times)?).with_context(|| path.display().to_string())?;
    finish(done, since)
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs jobs until none is left.
fn work(state: &Mutex<State>, changed: &Condvar, logs: &Path) {
    loop {
        let mut guard = lock(state);
        let job = loop {
            match guard.take() {
                Some(job) => break job,
                None if guard.waiting.is_empty() => return,
                None => {
                    let waited = changed.wait_timeout(guard, PROGRESS);
                    guard = waited.map_or_else(|error| error.into_inner().0, |(guard, _)| guard);
                }
            }
        };
        drop(guard);
        let lane = job.lane;
        let done = run_job(job, logs, || say_running(&lock(state).running));
        println!("{}", done.line());
        lock(state).end(lane, done);
        changed.notify_all();
    }
}

fn say_running(running: &BTreeMap<String, Instant>) {
    let running: Vec<_> =
        running.iter().map(|(name, since)| format!("{name} ({} s)", since.elapsed().as_secs())).collect();
    println!("running: {}", running.join(", "));
}

impl Done {
    fn line(&self) -> String {
        let word = if self.problem.is_none() { "ok" } else { "FAILED" };
        let times = format!("{:>6.1} s {:>6.1} s CPU", self.seconds, self.cpu);
        let problem = self.problem.as_ref().map(|problem| format!(" ({problem})")).unwrap_or_default();
        format!("{word:<7} {times}  {}: {}{problem}", self.name, self.counts.text())
    }
}

/// Runs a job, and calls `still` now and then meanwhile.
fn run_job(mut job: Job, logs: &Path, still: impl Fn()) -> Done {
    let log = logs.join(job.name.replace(['/', ':', ' '], ".") + ".log");
    let start = Instant::now();
    let result = run_logged(&mut job, &log, still);
    let seconds = start.elapsed().as_secs_f64();
    let (mut counts, bytes) = (Counts::default(), fs::read(&log).unwrap_or_default());
    let text = String::from_utf8_lossy(&bytes);
    text.lines().for_each(|line| counts.add_line(line));
    let (problem, cpu) = match result {
        Ok((WaitStatus::Exited(_, 0), cpu)) => (None, cpu),
        Ok((WaitStatus::Exited(_, status), cpu)) => (Some(format!("status {status}")), cpu),
        Ok((status, cpu)) => (Some(format!("{status:?}")), cpu),
        Err(error) => (Some(format!("{error:#}")), 0.0),
    };
    match (job.output, &problem) {
        (Output::Any, None) => counts.passed = 1,
        (_, Some(problem)) if counts.failed == 0 => {
            // It has said no reason in libtest's form: the end of its output is the reason.
            counts.failed = 1;
            let lines: Vec<_> = text.lines().collect();
            let shown = lines[lines.len().saturating_sub(SHOWN_LINES)..].iter().map(|&line| line.to_owned());
            let heading = format!("---- {} ({problem}) ----", show(&job.command));
            counts.failures = vec![std::iter::once(heading).chain(shown).collect()];
        }
        _ => {}
    }
    Done { name: job.name, problem, counts, seconds, cpu }
}

/// Its end, and seconds of CPU.
fn run_logged(job: &mut Job, log: &Path, still: impl Fn()) -> Result<(WaitStatus, f64)> {
    let file = File::create(log).with_context(|| log.display().to_string())?;
    let errors = file.try_clone()?;
    if job.command.get_current_dir().is_none() {
        job.command.current_dir(workspace());
    }
    job.command.stdin(Stdio::null()).stdout(file).stderr(errors);
    let mut child = job.command.spawn().with_context(|| format!("cannot start {}", show(&job.command)))?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let (start, mut said) = (Instant::now(), Instant::now());
    loop {
        // It stays in /proc until it has been waited for in earnest.
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        match waitid(Id::Pid(pid), flags) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => {}
            Ok(status) => {
                let cpu = cpu_seconds(child.id()).unwrap_or_default();
                child.wait()?;
                return Ok((status, cpu));
            }
            Err(error) => bail!("waitid: {error}"),
        }
        if start.elapsed() >= job.limit {
            end(child.id());
            child.wait()?;
            bail!("not within {} s", job.limit.as_secs());
        }
        if said.elapsed() >= PROGRESS {
            said = Instant::now();
            still();
        }
        thread::sleep(PERIOD);
    }
}

/// Fields of `/proc/PID/stat` behind the name: the state is the first.
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(text.rsplit_once(") ")?.1.split_whitespace().map(str::to_owned).collect())
}

/// Of a process and of those that it has waited for.
fn cpu_seconds(pid: u32) -> Option<f64> {
    let ticks = sysconf(SysconfVar::CLK_TCK).ok()??;
    let fields = stat(pid)?;
    let sum: u64 = fields.get(11..15)?.iter().filter_map(|field| field.parse::<u64>().ok()).sum();
    Some(sum as f64 / ticks as f64)
}

/// Ends a process that hangs, and its children: first those that clean up when they are asked to.
fn end(pid: u32) {
    let processes = || fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parents: HashMap<u32, u32> =
        pids.filter_map(|pid| Some((pid, stat(pid)?.get(1)?.parse().ok()?))).collect();
    let below = |of: u32| std::iter::successors(Some(of), |of| parents.get(of).copied()).any(|of| of == pid);
    let family: Vec<_> = parents.keys().copied().filter(|&of| below(of)).collect();
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        for &pid in &family {
            // Those that have ended meanwhile are what is wanted.
            let _ = i32::try_from(pid).map(|pid| kill(Pid::from_raw(pid), signal));
        }
        thread::sleep(Duration::from_secs(if signal == Signal::SIGTERM { 3 } else { 0 }));
    }
}

/// Prints the summary; an error when a job failed.
fn finish(mut done: Vec<Done>, since: Instant) -> Result<()> {
    println!();
    let mut counts = Counts::default();
    done.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    let (mut short, mut of_short) = (0, 0.0);
    for one in &done {
        counts.add(one.counts.clone());
        if one.seconds < SHORT_SECONDS && one.problem.is_none() {
            (short, of_short) = (short + 1, of_short + one.seconds);
        }
    }
    for one in done.iter().filter(|one| one.seconds >= SHORT_SECONDS || one.problem.is_some()) {
        println!("{}", one.line());
    }
    println!("{short} jobs of less than {SHORT_SECONDS} s took {of_short:.0} s together");
    counts.skips.iter().for_each(|skip| println!("skipped: {skip}"));
    counts.repeated.iter().for_each(|line| println!("once more: {line}"));
    let cpu: f64 = done.iter().map(|one| one.cpu).sum();
    let (seconds, again) = (since.elapsed().as_secs(), counts.repeated.len());
    counts.failures.iter().flatten().for_each(|line| println!("{line}"));
    println!("{seconds} s, of CPU {cpu:.0} s in the jobs; {again} boots or lab jobs were run once more");
    println!("{}", counts.text());
    let broken: Vec<_> =
        done.iter().filter(|one| one.problem.is_some()).map(|one| one.name.as_str()).collect();
    ensure!(broken.is_empty(), "{} of {} jobs failed: {}", broken.len(), done.len(), broken.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(name: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job::new(name, command)
    }

    fn run_here(jobs: Vec<Job>) -> (Result<()>, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        (run_in(folder.path(), jobs, Instant::now()), folder)
    }

    #[test]
    fn all_jobs_run_and_those_that_fail_are_named() {
        let jobs = vec![sh("good", "echo fine"), sh("a/bad:one", "exit 3"), sh("killed", "kill -9 $$")];
        let (result, folder) = run_here(jobs);
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with("2 of 3 jobs failed: "), "{error}");
        assert!(error.contains("a/bad:one") && error.contains("killed"), "{error}");
        assert_eq!(fs::read_to_string(folder.path().join("log/good.log")).unwrap(), "fine\n");
        assert!(folder.path().join("log/a.bad.one.log").exists());
        let times = times(&folder.path().join("times.json"));
        assert_eq!(times.keys().collect::<Vec<_>>(), ["good"], "how long a failure took says nothing");
    }

    #[test]
    fn what_hangs_is_ended_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let child = folder.path().join("child");
        let script = format!("sleep 1000 & echo $! > {}; wait", child.display());
        let limit = Duration::from_secs(2);
        let (result, _folder) = run_here(vec![sh("hangs", &script).limit(limit)]);
        assert!(result.is_err());
        let pid: u32 = fs::read_to_string(child).unwrap().trim().parse().unwrap();
        let start = Instant::now();
        while stat(pid).is_some_and(|fields| fields[0] != "Z") {
            assert!(start.elapsed() < Duration::from_secs(60), "it lives");
            thread::sleep(PERIOD);
        }
    }

    #[test]
    fn the_longest_job_whose_lane_is_free_is_next() {
        let mut state = State {
            waiting: vec![
                sh("a", "").lane(Lane::Cargo),
                sh("b", "").lane(Lane::Cargo),
                sh("c", ""),
                sh("d", "").lane(Lane::Lab),
            ],
            ..State::default()
        };
        let mut next = || state.take().map(|job| job.name);
        assert_eq!(
            [next(), next(), next(), next()].map(|name| name.unwrap_or_default()),
            ["a", "c", "d", ""]
        );
        let counts = Counts::default();
        let done = Done { name: "a".into(), problem: None, counts, seconds: 1.0, cpu: 1.0 };
        state.end(Some(Lane::Cargo), done);
        assert_eq!(state.take().unwrap().name, "b");
    }

    #[test]
    fn output_of_tests_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let tests = |script: &str| {
            let mut job = sh("t", script);
            job.output = Output::Tests;
            run_job(job, folder.path(), || {})
        };
        let good = tests("echo 'test result: ok. 9 passed; 0 failed; 2 ignored; 0 measured'");
        assert_eq!(good.counts.text(), "9 passed, 0 failed, 2 skipped");
        // One that dies says nothing of the kind.
        let bad = tests("echo 'test a ... '; exit 101");
        assert_eq!(bad.counts.text(), "0 passed, 1 failed, 0 skipped");
        assert!(bad.line().starts_with("FAILED ") && bad.line().ends_with("(status 101)"), "{}", bad.line());
        assert!(bad.cpu >= 0.0 && bad.seconds < 3600.0);
    }
}
