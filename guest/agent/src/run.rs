//! The loop of vnuma-guest, and what undoes its settings however it ends.
//!
//! | end | who undoes what was set |
//! |---|---|
//! | SIGTERM, SIGINT, SIGHUP, an error | the process itself |
//! | SIGKILL, a crash | the guard, a process of its own that waits for that |
//! | both are killed | `ExecStopPost=vnuma-guest undo` of the systemd unit; else the next start, or `vnuma-guest undo` |
//! | the machine ends | nothing needs to: no setting survives that |

use crate::{
    act::{Actor, System},
    core::{Action, InterruptAction, Plan, State, decide},
    ends::Ends,
    files,
    journal::{self, Journal, JournalError},
    observe::{Look, Observer},
    rules::Rules,
};
use anyhow::{Context, bail, ensure};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::AsFd,
        unix::{fs::OpenOptionsExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    rc::Rc,
    time::{Duration, Instant},
};

/// The driver's device, which says when the topology has changed.
const DEVICE: &str = "/dev/vnuma";
/// From the first look, which measures nothing yet, to the second one.
const FIRST: Duration = Duration::from_secs(1);
/// Between two looks at least, whatever the host changes.
const LEAST: Duration = Duration::from_millis(200);
/// How long the end of another vnuma-guest is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// How it runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the operator says.
    pub rules: Rules,
    /// Say what would be done, and do nothing.
    pub dry_run: bool,
    /// Where things are.
    pub places: Places,
}

/// Where things are. Tests have other places.
#[derive(Clone, Debug)]
pub struct Places {
    /// Where `proc`, `sys` and `run` are.
    pub root: PathBuf,
    /// Directory of the journal.
    pub journal: PathBuf,
}

/// A closed output is no reason to end.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "vnuma-guest: {line}");
}

/// Signals that end it in order.
fn ends() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect()
}

/// Runs until it gets a signal to end, and undoes everything.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let Places { root, .. } = &options.places;
    ensure!(
        options.dry_run || nix::unistd::geteuid().is_root(),
        "run needs root, to set the CPUs of other users' processes; run --dry-run and list do not"
    );
    ends().thread_block().context("blocking signals")?;
    let signals = SignalFd::with_flags(&ends(), SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC);
    let signals = Rc::new(signals.context("signalfd")?);
    if options.dry_run {
        return Loop::new(options, root).until(&signals, &mut Dry::default());
    }
    let journal = take(&options.places)?;
    let mut actor = Actor::new(System::new(root, Ends::new(Rc::clone(&signals))), journal);
    if !actor.changes().is_empty() {
        say("an earlier vnuma-guest has been killed: undoing what it has left");
        undo(&mut actor)?;
    }
    let mut wet = Wet { actor, guard: Guard::start(&options.places)? };
    let outcome = Loop::new(options, root).until(&signals, &mut wet);
    let undone = undo(&mut wet.actor);
    outcome.and(undone)
}

/// Undoes everything.
fn undo(actor: &mut Actor) -> anyhow::Result<()> {
    let (lines, result) = actor.undo_all();
    lines.iter().for_each(|line| say(line));
    result.map_err(|error| anyhow::anyhow!("cannot be undone, and stays in the journal: {error}"))
}

/// Takes the journal. A guard that undoes what was left has it for a moment.
fn take(places: &Places) -> Result<Journal, JournalError> {
    let end = Instant::now() + PATIENCE;
    loop {
        match Journal::take(&places.journal, &places.root) {
            Err(JournalError::Busy { .. }) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(50));
            }
            taken => return taken,
        }
    }
}

/// Undoes what an earlier vnuma-guest has left, once no other one is at work. Gives whether there was anything.
pub fn undo_left(places: &Places) -> anyhow::Result<bool> {
    let journal = take(places)?;
    if journal.changes().is_empty() {
        return Ok(false);
    }
    undo(&mut Actor::new(System::new(&places.root, Ends::default()), journal)).map(|()| true)
}

/// What becomes of a plan.
trait Hands {
    fn before(&mut self, _: &mut State, _: &Rules, _: Duration) -> anyhow::Result<()> {
        Ok(())
    }
    fn carry_out(&mut self, plan: &Plan, state: &mut State, rules: &Rules, now: Duration);
}

/// Does it.
struct Wet {
    actor: Actor,
    guard: Guard,
}

impl Hands for Wet {
    fn before(&mut self, state: &mut State, rules: &Rules, now: Duration) -> anyhow::Result<()> {
        self.guard.see()?;
        let lines = self.actor.tend(state, (&rules.limits, now));
        lines.iter().for_each(|line| say(line));
        Ok(())
    }

    fn carry_out(&mut self, plan: &Plan, state: &mut State, rules: &Rules, now: Duration) {
        let lines = self.actor.apply(plan, state, rules.memory, (&rules.limits, now));
        lines.iter().for_each(|line| say(line));
    }
}

/// Prints what would be done, and does nothing.
#[derive(Default)]
struct Dry {
    said: BTreeMap<i32, String>,
}

impl Hands for Dry {
    fn carry_out(&mut self, plan: &Plan, _: &mut State, _: &Rules, _: Duration) {
        for action in &plan.actions {
            let pid = action.id().pid;
            let line = match action {
                Action::Place { node, cpus, reason, .. } => {
                    format!("PID {pid}: would be placed on node {node}, CPUs {cpus}: {reason}")
                }
                Action::Release { reason, .. } => format!("PID {pid}: would be released: {reason}"),
                Action::Keep { reason, .. } => format!("PID {pid}: {reason}"),
                // A dry run moves no memory. It would print the same move again and again.
                Action::MoveMemory { .. } => continue,
            };
            if self.said.insert(pid, line.clone()).as_ref() != Some(&line) {
                say(&line);
            }
        }
        for action in &plan.interrupts {
            if let InterruptAction::Set { irq, cpus, reason, .. } = action {
                say(&format!("interrupt {irq}: would have CPUs {cpus}: {reason}"));
            }
        }
    }
}

struct Loop<'a> {
    options: &'a Options,
    observer: Observer,
    state: State,
    start: Instant,
    topology: Option<File>,
    notices: Notices,
}

impl<'a> Loop<'a> {
    fn new(options: &'a Options, root: &Path) -> Self {
        let (observer, state) = (Observer::new(root), State::default());
        let notices = Notices::default();
        Self { options, observer, state, start: Instant::now(), topology: None, notices }
    }

    fn until(mut self, signals: &SignalFd, hands: &mut dyn Hands) -> anyhow::Result<()> {
        let rules = &self.options.rules;
        let mut wait = FIRST.min(rules.interval);
        loop {
            self.open_topology();
            let now = self.start.elapsed();
            hands.before(&mut self.state, rules, now)?;
            let look = self.observer.look(rules, &self.state, now);
            self.notices.of(&self.options.places.root, &look, self.topology.is_some(), rules);
            let plan = decide(rules, &look.snapshot, &mut self.state, now);
            hands.carry_out(&plan, &mut self.state, rules, now);
            if self.wait(signals, wait)? {
                return Ok(());
            }
            wait = rules.interval;
        }
    }

    /// The driver may be loaded later.
    fn open_topology(&mut self) {
        if self.topology.is_none() {
            let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
            self.topology = OpenOptions::new().read(true).custom_flags(flags).open(DEVICE).ok();
            self.read_generation();
        }
    }

    /// A change counts from this on.
    fn read_generation(&mut self) {
        let mut generation = [0; 8];
        if self.topology.as_mut().is_some_and(|file| file.read_exact(&mut generation).is_err()) {
            self.topology = None;
        }
    }

    /// Waits for the next look. True: it is to end.
    fn wait(&mut self, signals: &SignalFd, time: Duration) -> anyhow::Result<bool> {
        let begin = Instant::now();
        let (mut end, mut changed) = (begin + time, false);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let mut polled = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
            if let Some(file) = self.topology.as_ref().filter(|_| !changed) {
                polled.push(PollFd::new(file.as_fd(), PollFlags::POLLIN));
            }
            let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            match poll(&mut polled, timeout) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(io::Error::from(errno)).context("poll"),
            }
            let ready = |at: usize| polled.get(at).is_some_and(|one| one.any().unwrap_or(false));
            let (ends, topology) = (ready(0), ready(1));
            drop(polled);
            if ends && signals.read_signal().context("signalfd")?.is_some() {
                return Ok(true);
            }
            if topology {
                self.read_generation();
                (end, changed) = (begin + LEAST.min(time), true);
            }
        }
    }
}

/// Users of whom it is remembered that they were told of.
const MOST_USERS: usize = 1000;

/// Which notices were printed. Each is printed once, as it reports no fault.
#[derive(Default)]
struct Notices {
    one_node: bool,
    hidden: bool,
    late: bool,
    busy_users: BTreeSet<u32>,
    driver: bool,
    groups: bool,
}

impl Notices {
    fn of(&mut self, root: &Path, look: &Look, driver: bool, rules: &Rules) {
        let (nodes, hidden, late) = (look.snapshot.nodes.len(), look.hidden, look.late);
        let once = |said: &mut bool, is: bool, line: String| {
            if is && !*said {
                say(&line);
            }
            *said = is;
        };
        once(
            &mut self.one_node,
            nodes < 2,
            format!("this machine has {nodes} NUMA nodes: with fewer than 2 there is nothing to place"),
        );
        once(
            &mut self.hidden,
            hidden > 0,
            format!("{hidden} processes cannot be looked at, for lack of rights"),
        );
        once(
            &mut self.late,
            late > 0,
            format!("there was no time for {late} processes at one look: they are taken to be as they were"),
        );
        for user in look.busy_users.iter().filter(|user| !self.busy_users.contains(user)) {
            say(&format!(
                "the processes of user {user} take too long to look at: not all of them are at each look"
            ));
        }
        // A user that reaches the limit again and again is logged once.
        if self.busy_users.len() < MOST_USERS {
            self.busy_users.extend(&look.busy_users);
        }
        let interval = rules.interval.as_secs();
        once(
            &mut self.driver,
            !driver,
            format!("no {DEVICE}: changes of the topology are noticed within {interval} s, by looking"),
        );
        let groups = files::text(&root.join("sys/fs/cgroup/cgroup.controllers")).is_some();
        once(
            &mut self.groups,
            !groups,
            "cgroup v2 is not at /sys/fs/cgroup: processes are confined by the affinity of their threads"
                .to_owned(),
        );
    }
}

/// A process that undoes everything when this one is gone. It waits for the end of its input, of which this process has the
/// other end.
struct Guard {
    places: Places,
    child: Child,
}

impl Guard {
    fn start(places: &Places) -> anyhow::Result<Self> {
        // This very program, even if its file has been replaced.
        let child = Command::new("/proc/self/exe")
            .arg0("vnuma-guest")
            .arg("guard")
            .arg("--journal")
            .arg(&places.journal)
            .arg("--root")
            .arg(&places.root)
            .stdin(Stdio::piped())
            // What is sent to this group from a terminal is not for it.
            .process_group(0)
            .spawn()
            .context("starting the guard")?;
        Ok(Self { places: places.clone(), child })
    }

    /// Starts another one if it has been killed.
    fn see(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait().context("the guard")? {
            say(&format!("the guard has ended ({status}): starting another one"));
            *self = Self::start(&self.places)?;
        }
        Ok(())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // Nothing is left for it to do.
        let _ = self.child.wait();
    }
}

/// The guard: waits for the end of its input, and undoes what is left.
pub fn guard(places: &Places) -> anyhow::Result<()> {
    ends().thread_block().context("blocking signals")?;
    // For ps: the kernel has named it after the link that it was started by.
    let _ = std::fs::write("/proc/self/comm", "vnuma-guard");
    match io::copy(&mut io::stdin().lock(), &mut io::sink()) {
        Ok(_) => {}
        Err(error) => bail!("reading what never comes: {error}"),
    }
    if journal::read(&places.journal, &places.root)?.is_empty() {
        return Ok(());
    }
    say("vnuma-guest has been killed: undoing what it has left");
    undo_left(places).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;

    /// Far longer than it takes on any machine until an event is followed by a look.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_change_of_the_topology_causes_a_look_and_a_driver_that_goes_does_not_end_the_loop() {
        let places = Places { root: "/nonexistent".into(), journal: "/nonexistent".into() };
        let options = Options { rules: Rules::default(), dry_run: true, places };
        let signals = SignalFd::with_flags(&SigSet::empty(), SfdFlags::SFD_NONBLOCK).expect("signalfd");
        let mut looks = Loop::new(&options, Path::new("/nonexistent"));
        let (driver, mut host) = io::pipe().expect("a pipe");
        looks.topology = Some(File::from(OwnedFd::from(driver)));
        host.write_all(&7_u64.to_le_bytes()).expect("a generation");
        let start = Instant::now();
        assert!(!looks.wait(&signals, LONG).expect("waits"), "it is not to end");
        assert!(start.elapsed() >= LEAST && start.elapsed() < LONG / 2, "{:?}", start.elapsed());
        assert!(looks.topology.is_some());
        drop(host);
        assert!(!looks.wait(&signals, LONG).expect("waits"));
        assert!(looks.topology.is_none() && start.elapsed() < LONG / 2, "it is opened again later");
    }
}
