//! Everything around running VMs changes at random, for long: policies, operators' masks, scx_vnuma and a scheduler that is not
//! vnuma's, vnumad, and VMs that come and go. All is checked after each step.

mod bounds;
mod checks;
mod model;

use crate::{
    policy::{BALANCING, CONFIGURATION},
    threads::{loaded, stop},
    vcpus::{PROGRAM, load, load_foreign, maps},
};
use anyhow::{Context, Result, ensure};
use bounds::Bounds;
use checks::{Pair, expect_all_run, expect_given_back, expect_within_masks, unsettled};
use model::{Loaded, State, Step, VCPUS};
use std::{
    fs::{self, File},
    io::Read,
    path::PathBuf,
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};
use vnuma_model::CpuSet;
use vnuma_process::read_allowed;
use vnuma_random::Rng;
use vnuma_scenario::{
    HANG_LIMIT, Nodes, Process, Vm, output, vnumactl, vnumactl_command, vnumad_logging_to, wait_for,
};

const PERIOD_MS: u64 = 300;
/// vnumad looks for scx_vnuma every 30 s while no VM has a policy.
const SETTLES: Duration = Duration::from_secs(300);
/// Of the kernel's sched_ext.
const STATE: &str = "/sys/kernel/sched_ext/state";
/// Times that an operator sets a mask which vnumad, deciding at the same moment, has replaced.
const TRIES: usize = 5;
/// Lines of a log that an error shows.
const LINES: usize = 40;

#[derive(clap::Args)]
pub struct Arguments {
    /// How long, seconds
    #[arg(long, default_value_t = 2400)]
    seconds: u64,
    /// At most so many steps
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true)]
    steps: usize,
    /// Seed of the steps
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { seconds, steps, seed } = *arguments;
    println!("seed {seed}, {seconds} s");
    // It would move the pages to the vCPUs.
    fs::write(BALANCING, "0").context(BALANCING)?;
    let text = format!("[policy]\nperiod_ms = {PERIOD_MS}\n");
    fs::write(CONFIGURATION, text).context(CONFIGURATION)?;
    let mut soak = Soak::new()?;
    let (began, mut random, mut count) = (Instant::now(), Rng::new(seed), 0);
    while began.elapsed().as_secs() < seconds && count < steps {
        // Now and then something happens before the last step has had its effect.
        for _ in 0..=random.index(3) / 2 + random.index(4) / 3 {
            count += 1;
            let step = soak.state.next(&mut random);
            let text = step.text(&soak.state.vms);
            println!("step {count}, {} s: {text}", began.elapsed().as_secs());
            soak.carry_out(&step).context(text).or_else(|error| soak.explain(error, seed, count))?;
            soak.state.apply(&step);
        }
        soak.check().or_else(|error| soak.explain(error, seed, count))?;
    }
    soak.end().or_else(|error| soak.explain(error, seed, count))?;
    println!(
        "{count} steps of seed {seed} in {} s, {} moves by vprobe",
        began.elapsed().as_secs(),
        soak.moves
    );
    Ok(())
}

/// vnumad, and who listens to it.
struct Daemon {
    process: Process,
    watcher: Process,
    events: File,
    /// The beginning of a line whose end has not come yet.
    rest: String,
    log: PathBuf,
    bounds: Bounds,
}

/// Everything that runs.
struct Soak {
    state: State,
    /// As those of the state, with their programs.
    vms: Vec<(Vm, Vec<Process>)>,
    daemon: Option<Daemon>,
    scheduler: Option<Process>,
    /// vnumads so far.
    daemons: usize,
    /// Moves by `vprobe` that earlier ones made.
    moves: usize,
    /// Of the server's kernel, before the first step.
    complaints: Vec<String>,
}

impl Soak {
    fn new() -> Result<Self> {
        let all = Nodes::read()?;
        // The group of VMs leaves CPU 0 out.
        let cpus = |(_, cpus): &(u32, CpuSet)| cpus.iter().filter(|cpu| *cpu != 0).collect::<CpuSet>();
        let nodes: Vec<CpuSet> = all.with_cpus().map(cpus).collect();
        ensure!(nodes.len() > 1 && nodes.iter().all(|cpus| !cpus.is_empty()), "nodes: {nodes:?}");
        ensure!(loaded()?.is_none(), "a scheduler is loaded already");
        let state = State::new(nodes);
        let complaints = complaints()?;
        Ok(Self { state, vms: Vec::new(), daemon: None, scheduler: None, daemons: 0, moves: 0, complaints })
    }

    fn pairs(&self) -> Vec<Pair<'_>> {
        self.vms.iter().zip(&self.state.vms).map(|((vm, _), guest)| Pair { vm, guest }).collect()
    }

    fn carry_out(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::Policy { vm, policy } => self.set_policy(*vm, policy),
            Step::Mask { vm, vcpu, mask } => self.set_mask(*vm, *vcpu, mask),
            Step::StartVm { name, node, busy } => self.start_vm(name, *node, busy),
            Step::EndVm { vm, kill } => {
                let (vm, _programs) = self.vms.remove(*vm);
                if *kill {
                    output("kill", &["-KILL", &vm.pid.to_string()])?;
                }
                Ok(())
            }
            Step::Load { full } => {
                let options = if *full { &["--full"][..] } else { &[] };
                self.scheduler = Some(load(options)?);
                wait_for("scx_vnuma to be loaded", HANG_LIMIT, || Ok(maps().is_ok()))
            }
            Step::LoadOther => {
                self.scheduler = Some(load_foreign()?);
                Ok(())
            }
            Step::Refused => {
                let refused = Command::new(PROGRAM).stdin(Stdio::null()).output().context(PROGRAM)?;
                let error = String::from_utf8_lossy(&refused.stderr).into_owned();
                ensure!(!refused.status.success() && error.contains("EBUSY"), "it says {error}");
                Ok(())
            }
            Step::EndScheduler { kill } => self.end_scheduler(*kill),
            Step::StartDaemon => self.start_daemon(),
            Step::EndDaemon { kill } => self.end_daemon(*kill),
            Step::Wait { seconds } => {
                let end = Instant::now() + Duration::from_secs(*seconds);
                while Instant::now() < end {
                    expect_within_masks(&self.pairs())?;
                    sleep(Duration::from_millis(500));
                }
                Ok(())
            }
        }
    }

    fn set_policy(&mut self, at: usize, policy: &'static str) -> Result<()> {
        let name = self.state.vms[at].name;
        crate::guest::wait_until_listed(name)?;
        vnumactl(&["policy", name, "--set", policy])?;
        self.state.vms[at].policy = policy;
        let pair = &self.pairs()[at];
        if pair.guest.acts() {
            return Ok(());
        }
        // The command ends when this is so. A vCPU may still be on its way from scx_vnuma.
        for (&tid, mask) in pair.vm.threads.iter().zip(&pair.guest.masks) {
            let allowed = read_allowed(pair.vm.pid, tid)?;
            ensure!(allowed == *mask, "thread {tid} has CPUs {allowed}, its operator's are {mask}");
        }
        Ok(())
    }

    fn set_mask(&mut self, at: usize, vcpu: usize, mask: &CpuSet) -> Result<()> {
        self.state.vms[at].masks[vcpu] = mask.clone();
        let (vm, _) = &self.vms[at];
        let (tid, list) = (vm.threads[vcpu], mask.to_string());
        for attempt in 1..=TRIES {
            output("taskset", &["-p", "-c", &list, &tid.to_string()])?;
            if read_allowed(vm.pid, tid)?.is_subset(mask) {
                return Ok(());
            }
            println!("vnumad has set another mask at the same moment, {attempt} of {TRIES} times");
        }
        anyhow::bail!("thread {tid} has CPUs {}, expected {list}", read_allowed(vm.pid, tid)?)
    }

    /// Its memory is on the node where the threads that touch it first run.
    fn start_vm(&mut self, name: &str, node: usize, busy: &[bool; VCPUS]) -> Result<()> {
        let (own, all) = (std::process::id().to_string(), self.state.cpus().to_string());
        output("taskset", &["-p", "-c", &self.state.node(node).to_string(), &own])?;
        let (vcpus, memory) = (VCPUS.to_string(), "256M");
        let vm = Vm::start(name, &["--uma", "--vcpus", &vcpus, "--memory", memory].map(str::to_owned));
        output("taskset", &["-p", "-c", &format!("0,{all}"), &own])?;
        let vm = vm?;
        output("taskset", &["-a", "-p", "-c", &all, &vm.pid.to_string()])?;
        let mut programs = Vec::new();
        for (vcpu, _) in busy.iter().enumerate().filter(|(_, busy)| **busy) {
            let line = format!("exec taskset -c {vcpu} dd if=/dev/zero of=/dev/null bs=8M");
            programs.push(vm.spawn(&["sh", "-c", &line])?);
        }
        self.vms.push((vm, programs));
        Ok(())
    }

    fn end_scheduler(&mut self, kill: bool) -> Result<()> {
        let mut process = self.scheduler.take().context("a scheduler")?;
        ensure!(process.0.try_wait()?.is_none(), "it has ended by itself");
        if !kill {
            return stop(process);
        }
        process.0.kill()?;
        process.0.wait()?;
        // While it is being disabled, no other one can be loaded.
        wait_for("the kernel to go on without it", HANG_LIMIT, || {
            Ok(fs::read_to_string(STATE).context(STATE)?.trim() == "disabled")
        })
    }

    fn start_daemon(&mut self) -> Result<()> {
        self.daemons += 1;
        let log = PathBuf::from(format!("/root/soak-vnumad-{}.log", self.daemons));
        let process = vnumad_logging_to(&log, &["--config", CONFIGURATION])?;
        let path = format!("/root/soak-events-{}", self.daemons);
        let file = File::create(&path).with_context(|| path.clone())?;
        let mut command = vnumactl_command(&["watch", "--json", "--events", "confined,policy,gone"]);
        let watcher = command.stdin(Stdio::null()).stdout(file).spawn().context("vnumactl watch")?;
        let events = File::open(&path).with_context(|| path.clone())?;
        let bounds = Bounds::new(PERIOD_MS * 1_000_000);
        let watcher = Process(watcher);
        self.daemon = Some(Daemon { process, watcher, events, rest: String::new(), log, bounds });
        Ok(())
    }

    fn end_daemon(&mut self, kill: bool) -> Result<()> {
        let mut daemon = self.daemon.take().context("a vnumad")?;
        ensure!(daemon.process.0.try_wait()?.is_none(), "it has ended by itself");
        if kill {
            daemon.process.0.kill()?;
            daemon.process.0.wait()?;
        } else {
            output("kill", &["-TERM", &daemon.process.0.id().to_string()])?;
            let mut status = None;
            wait_for("vnumad to end", HANG_LIMIT, || {
                status = daemon.process.0.try_wait()?;
                Ok(status.is_some())
            })?;
            ensure!(status.is_some_and(|status| status.success()), "vnumad: {status:?}");
            expect_given_back(&self.pairs(), &self.state.cpus()).context("vnumad has ended")?;
        }
        wait_for("vnumactl watch to end", HANG_LIMIT, || Ok(daemon.watcher.0.try_wait()?.is_some()))?;
        daemon.read_events()?;
        self.moves += daemon.bounds.count;
        daemon.show_warnings()
    }

    /// After a step: at once what always holds, then the rest as soon as it has had time.
    fn check(&mut self) -> Result<()> {
        let (state, pairs) = (&self.state, self.pairs());
        expect_within_masks(&pairs)?;
        if state.daemon {
            let mut last = Vec::new();
            let settled = wait_for("all to be as it should be", SETTLES, || {
                expect_within_masks(&pairs)?;
                last = unsettled(state, &pairs)?;
                Ok(last.is_empty())
            });
            settled.with_context(|| last.join("\n"))?;
        }
        expect_all_run(&pairs)?;
        expect_within_masks(&pairs)?;
        let ours = matches!(state.loaded, Loaded::Ours { .. }).then(|| "vnuma".to_owned());
        let other = (state.loaded == Loaded::Other).then(|| "other".to_owned());
        ensure!(loaded()? == ours.or(other), "the kernel has loaded {:?}", loaded()?);
        if let Some(process) = &mut self.scheduler {
            ensure!(process.0.try_wait()?.is_none(), "the scheduler has ended by itself");
        }
        if let Some(daemon) = &mut self.daemon {
            ensure!(daemon.process.0.try_wait()?.is_none(), "vnumad has ended by itself");
            daemon.read_events()?;
        }
        Ok(())
    }

    /// All ends in order, and nothing is left.
    fn end(&mut self) -> Result<()> {
        if !self.state.daemon {
            self.start_daemon()?;
            self.state.apply(&Step::StartDaemon);
            self.check()?;
        }
        self.end_daemon(false)?;
        self.state.apply(&Step::EndDaemon { kill: false });
        if self.scheduler.is_some() {
            self.end_scheduler(false)?;
            self.state.apply(&Step::EndScheduler { kill: false });
        }
        self.check()?;
        expect_given_back(&self.pairs(), &self.state.cpus())?;
        for (vm, _) in &self.vms {
            vm.exec(&["true"]).context("a guest after all that")?;
        }
        let new: Vec<_> = complaints()?.into_iter().filter(|line| !self.complaints.contains(line)).collect();
        ensure!(new.is_empty(), "the server's kernel complains:\n{}", new.join("\n"));
        Ok(())
    }

    /// An error with what may explain it.
    fn explain(&self, error: anyhow::Error, seed: u64, step: usize) -> Result<()> {
        for guest in &self.state.vms {
            println!("{guest:?}");
        }
        println!("vnumad: {}, {:?}", self.state.daemon, self.state.loaded);
        if let Some(daemon) = &self.daemon {
            let log = fs::read_to_string(&daemon.log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            println!("{}:\n{}", daemon.log.display(), lines[lines.len().saturating_sub(LINES)..].join("\n"));
        }
        Err(error.context(format!("seed {seed}, step {step}")))
    }
}

impl Daemon {
    /// Checks what has happened since the last call.
    fn read_events(&mut self) -> Result<()> {
        self.events.read_to_string(&mut self.rest).context("events")?;
        while let Some((line, rest)) = self.rest.split_once('\n') {
            self.bounds.take(line)?;
            self.rest = rest.to_owned();
        }
        Ok(())
    }

    /// What it was not content with. That is no error: VMs and schedulers go away under its hands.
    fn show_warnings(&self) -> Result<()> {
        let path = self.log.display().to_string();
        let log = fs::read_to_string(&self.log).context(path)?;
        let told = log.lines().filter(|line| [" WARN ", " ERROR "].iter().any(|level| line.contains(level)));
        told.for_each(|line| println!("vnumad said: {line}"));
        Ok(())
    }
}

/// Complaints of the server's kernel. One that has to wait for its emulator may take a CPU for stuck.
fn complaints() -> Result<Vec<String>> {
    let bad = ["WARNING:", "BUG:", "Oops", "runnable task stall", "runtime error"];
    let late = ["soft lockup", "workqueue lockup"];
    let is = |line: &&str, words: &[&str]| words.iter().any(|word| line.contains(word));
    let log = output("dmesg", &[])?;
    Ok(log.lines().filter(|line| is(line, &bad) && !is(line, &late)).map(str::to_owned).collect())
}
