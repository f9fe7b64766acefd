//! vnumad is killed again and again while it moves memory: displaced memory that comes home, and guest nodes that get another home. Each
//! time the VM runs on, no page and no content is lost, and the next vnumad shows what is where. In the end all is at home.

use crate::guest::{check_kernel_log, equip, wait_until_listed};
use crate::pages::Mapping;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::{
    fs,
    thread::sleep,
    time::{Duration, Instant},
};
use vnuma_lab_agent::emulator::ended_guest;
use vnuma_random::Rng;
use vnuma_scenario::{HANG_LIMIT, Process, Vm, vnumactl, vnumad, wait_for};

const NAME: &str = "moving";
const CONFIGURATION: &str = "/root/moving.toml";
/// An emulated server is slow, so that a look may cost more of it. Little is enough to begin with.
const SETTINGS: &str = "[memory]\nobserve_s = 1\nobserve_permille = 300\nmib_per_s = 512\namount_permille = 1\n\
    [observe]\ndescribe_interval_ms = 2000\n";
const MIB: u64 = 1 << 20;
/// The home of guest node 0 at first and in the end, and another one.
const HOME: u64 = 0;
const OTHER: u64 = 1;
/// What is displaced at least before it is brought home.
const DISPLACED: u64 = 24 * MIB;
/// One node has so much more than the other one, so that it is the home.
const CLEAR: u64 = 4 * MIB;
/// More has gone there only if a move has begun, and less is left only when it is over: some pages are in use at any moment.
const BEGUN: u64 = 256 << 10;
const FEW: u64 = 4 * MIB;
/// vnumad is killed at most so long after that.
const MOMENT_MS: usize = 1500;
/// Each page of it is unlike the others.
const WRITE: &str = "seq 1000000 9999999 | head -c 64M > /dev/shm/load && cksum < /dev/shm/load";
const CHECK: &str = "cksum < /dev/shm/load";

#[derive(clap::Args)]
pub struct Arguments {
    /// How often vnumad is killed
    #[arg(long, default_value_t = 10)]
    kills: usize,
    /// Seed of what is moved and of the moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What vnumad is killed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    ComesHome,
    ReHomed,
}

/// What has been done, by all VMs.
struct Done {
    random: Rng,
    /// Kills in each kind of work, and those of them in the middle of it.
    kills: [usize; 2],
    middle: usize,
}

impl Done {
    fn kills(&self) -> usize {
        self.kills.iter().sum()
    }
}

struct Run<'a> {
    vm: Vm,
    memory: Mapping,
    /// Of what the guest wrote.
    sum: String,
    done: &'a mut Done,
}

/// VMs that the emulated processor may end, in all: one in some fifty kills of a long run.
const MOST_ENDED: usize = 10;

pub fn run(arguments: &Arguments) -> Result<()> {
    ensure!(arguments.kills > 0, "--kills: at least one");
    fs::write(CONFIGURATION, SETTINGS).context(CONFIGURATION)?;
    let mut done = Done { random: Rng::new(arguments.seed), kills: [0, 0], middle: 0 };
    let mut ended = 0;
    while let Err(error) = go_on(arguments.kills, &mut done) {
        let told = format!("{error:?}");
        if !ended_guest(&told) || ended == MOST_ENDED {
            return Err(error);
        }
        ended += 1;
        println!(
            "after kill {} the emulated processor has ended the guest; another VM goes on: {told}",
            done.kills()
        );
    }
    let [home, rehome] = done.kills;
    println!(
        "{} kills, {home} while displaced memory came home and {rehome} in re-homes, {} of all in the middle: no page was lost, \
         and all is at home; guests that the emulated processor has ended: {ended}",
        arguments.kills, done.middle
    );
    ensure!(done.middle * 2 >= arguments.kills, "only {} kills were in the middle of a move", done.middle);
    Ok(())
}

/// The kills that are left, with a VM of its own.
fn go_on(kills: usize, done: &mut Done) -> Result<()> {
    let vm = Vm::start(NAME, &["--nodes", "2", "--vcpus", "2", "--memory", "384M"].map(str::to_owned))?;
    equip(&vm)?;
    let mut daemon = start()?;
    vm.attach()?;
    vm.await_driver()?;
    let sum = vm.exec(&["numactl", "--physcpubind=0", "--membind=0", "sh", "-c", WRITE])?;
    let memory = Mapping::bound_to(&vm, HOME)?;
    let distance = guest_distance(&vm)?;
    let load = [
        "numactl",
        "--physcpubind=0",
        "sh",
        "-c",
        "while cksum < /dev/shm/load > /dev/null; do sleep 0.2; done",
    ];
    let load = vm.spawn(&load)?;
    let mut run = Run { vm, memory, sum, done };
    while run.done.kills() < kills {
        let kill = run.done.kills();
        daemon = run.kill(daemon, kill).with_context(|| format!("kill {kill}"))?;
    }
    run.all_at_home(&distance)?;
    drop(load);
    check_kernel_log(&run.vm)?;
    drop(daemon);
    Ok(())
}

fn start() -> Result<Process> {
    let daemon = vnumad(&["--config", CONFIGURATION])?;
    wait_until_listed(NAME)?;
    Ok(daemon)
}

impl Run<'_> {
    /// On the node that has most of it, and on the other one.
    fn places(&self) -> Result<[(u64, u64); 2]> {
        let on = self.memory.places()?;
        ensure!(on.keys().all(|node| [HOME, OTHER].contains(node)), "memory on other nodes: {on:?}");
        let mut places = [HOME, OTHER].map(|node| (node, on.get(&node).copied().unwrap_or(0)));
        places.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        Ok(places)
    }

    fn resident(&self) -> Result<u64> {
        Ok(self.places()?.iter().map(|(_, bytes)| bytes).sum())
    }

    /// Has vnumad begin some work, kills it in that, and starts the next one.
    fn kill(&mut self, daemon: Process, kill: usize) -> Result<Process> {
        // QEMU binds it to its first home: no policy brings it to another one.
        let at_home = self.places()?[0].0 == HOME;
        let work = if self.done.random.index(2) == 0 && at_home { Work::ComesHome } else { Work::ReHomed };
        let (from, to) = self.begin(work)?;
        let resident = self.resident()?;
        let before = self.memory.on(to)?;
        let begun = || Ok(self.memory.on(to)? >= before + BEGUN || self.memory.on(from)? < FEW);
        await_soon(begun).with_context(|| {
            format!("{work:?}: no page moves: {:?}, {:?}", self.places(), vnumactl(&["memory", NAME]))
        })?;
        sleep(Duration::from_millis(self.done.random.index(MOMENT_MS) as u64));
        // SIGKILL; dropping waits for the end.
        drop(daemon);
        let left = self.memory.on(from)?;
        let middle = left >= FEW;
        let now = self.resident()?;
        ensure!(
            now >= resident,
            "{} KiB are there, {} were before: pages are lost",
            now >> 10,
            resident >> 10
        );
        let sum = self.vm.exec(&["sh", "-c", CHECK]).context("the guest, after vnumad was killed")?;
        ensure!(sum == self.sum, "the content of the guest's memory changed: {} {sum}", self.sum);
        let daemon = start()?;
        self.is_shown(work)?;
        self.done.kills[usize::from(work == Work::ReHomed)] += 1;
        self.done.middle += usize::from(middle);
        let state = if middle { "in the middle" } else { "at the end" };
        println!(
            "kill {kill}, {state}: {work:?} from node {from} to {to}, {} MiB left, {} MiB there: whole",
            left / MIB,
            self.memory.on(to)? / MIB
        );
        Ok(daemon)
    }

    /// Pages go from the first of these nodes to the second.
    fn begin(&mut self, work: Work) -> Result<(u64, u64)> {
        let [(home, most), (other, less)] = self.places()?;
        if most - less < CLEAR {
            // Which of them is the home is then as it comes.
            self.memory.displace(other, home, CLEAR)?;
        }
        match work {
            Work::ComesHome => {
                if less < DISPLACED {
                    self.memory.displace(home, other, DISPLACED)?;
                }
                vnumactl(&["memory", NAME, "--set", "both"])?;
                Ok((other, home))
            }
            Work::ReHomed => {
                rehome(other, &["--no-wait"])?;
                Ok((home, other))
            }
        }
    }

    /// The next vnumad shows what the kernel has, and knows of nothing that is under way.
    fn is_shown(&self, work: Work) -> Result<()> {
        let mut last = (Value::Null, [(0, 0); 2]);
        let shown = || {
            let shown = vnumactl(&["rehome", NAME])?;
            let kernel = self.places()?;
            let node = &shown["guest_nodes"][0];
            let places = node["places"].as_array().context("no places")?;
            let of = |node: u64| {
                let place = places.iter().find(|place| place["node"] == node);
                place.and_then(|place| place["bytes"].as_u64()).unwrap_or(0)
            };
            // The guest touches a page for the first time now and then.
            let same = kernel.iter().all(|(node, bytes)| of(*node).abs_diff(*bytes) < MIB);
            let [(most, many), (_, few)] = kernel;
            let home = node["home"] == most || many - few < MIB;
            last = (shown.clone(), kernel);
            Ok(same && home && shown["rehome"].is_null())
        };
        wait_for("the next vnumad to show what is where", HANG_LIMIT, shown)
            .with_context(|| format!("after {work:?} vnumactl shows and the kernel has: {last:?}"))?;
        // A look in twenty misses its interval, and none by as much as the interval is wide.
        let shown = vnumactl(&["memory", NAME])?["nodes"][0].take();
        let home = shown["home"].as_u64().context("no home")?;
        let size =
            |field: &str| shown["displaced"][field].as_u64().with_context(|| format!("no {field}: {shown}"));
        let (low, high, kernel) = (size("low")?, size("high")?, self.resident()? - self.memory.on(home)?);
        let wide = (high - low).max(MIB);
        ensure!(
            (low.saturating_sub(wide)..=high + wide).contains(&kernel),
            "the kernel has {kernel} bytes displaced, vnumactl memory {}",
            shown["displaced"]
        );
        Ok(())
    }

    /// The operator completes it, and what is left comes home.
    fn all_at_home(&self, distance: &str) -> Result<()> {
        let done = rehome(HOME, &[])?;
        ensure!(done["rehome"]["state"] == "done", "the last re-home: {done}");
        vnumactl(&["memory", NAME, "--set", "both"])?;
        wait_for("all memory to be at home", HANG_LIMIT, || Ok(self.memory.on(OTHER)? < FEW))
            .with_context(|| format!("{:?}", self.places()))?;
        wait_for("the guest to know the distance of before", HANG_LIMIT, || {
            Ok(guest_distance(&self.vm)? == distance)
        })?;
        let sum = self.vm.exec(&["sh", "-c", CHECK])?;
        ensure!(sum == self.sum, "the content of the guest's memory changed: {} {sum}", self.sum);
        println!(
            "in the end {} MiB are at home, {} KiB are not",
            self.memory.on(HOME)? / MIB,
            self.memory.on(OTHER)? >> 10
        );
        Ok(())
    }
}

/// Asks for a re-home. A QEMU that has no CPU for a second counts as not connected, until it answers.
fn rehome(node: u64, more: &[&str]) -> Result<Value> {
    let node = if node == HOME { "0" } else { "1" };
    let command = [&["rehome", NAME, "--guest-node", "0", "--node", node, "--move-pinned"], more].concat();
    let mut answer = Value::Null;
    wait_for("QEMU to answer", HANG_LIMIT, || match vnumactl(&command) {
        Ok(shown) => {
            answer = shown;
            Ok(true)
        }
        Err(error) if format!("{error:#}").contains("not connected") => Ok(false),
        Err(error) => Err(error),
    })?;
    Ok(answer)
}

/// As `wait_for`, but sees it at once.
fn await_soon(ready: impl Fn() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + HANG_LIMIT;
    while !ready()? {
        if Instant::now() > end {
            bail!("not within {} s", HANG_LIMIT.as_secs());
        }
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn guest_distance(vm: &Vm) -> Result<String> {
    vm.exec(&["cat", "/sys/devices/system/node/node0/distance"])
}
