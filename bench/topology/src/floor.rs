//! The floor of an update: what no implementation can leave out. A doorbell's round trip between host and guest, and the
//! guest kernel's own rebuild of its scheduler domains as a cpuset change causes it, in the VM whose updates are timed.
//! Rebuilds are timed between the moves, because the machine does not keep its speed for the minutes that a series takes.

use crate::clock::monotonic_ns;
use crate::figures::Percentiles;
use crate::moves::SETTLE;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use vnuma_scenario::{Lines, Process, Vm};

/// Plays the host's end of a channel without vnumad.
const FAKE_HOST: &str = "/root/vnuma-fake-host";
const SOCKET: &str = "/run/bench-floor.sock";
/// The root port that vnumad would use.
const PORT: &str = "vnuma0";
const PROGRAM: &str = "/root/bench-topology";
const CGROUPS: &str = "/sys/fs/cgroup";

/// The sum, and its two parts.
#[derive(Serialize)]
pub struct Floor {
    /// Of the sums of a round trip and a rebuild each, in milliseconds, as an update is a sum of phases. (The sum of the two
    /// medians is less than that, as both have long tails.)
    #[serde(flatten)]
    whole: Percentiles,
    /// Host rings, guest reads and acknowledges, host sees it: a publication that changes nothing.
    doorbell_ms: Percentiles,
    /// Write to `cpuset.cpus.partition`, which rebuilds the scheduler domains before it returns.
    rebuild_ms: Percentiles,
}

/// The host's end of a channel of the VM, which must have none.
pub struct Doorbell {
    input: ChildStdin,
    output: Lines<ChildStdout>,
    _process: Process,
    map: String,
}

impl Doorbell {
    /// Plugs it, and waits for the guest's driver. `map` is what the guest uses already.
    pub fn attach(vm: &Vm, map: &[u32]) -> Result<Self> {
        let mut child = Command::new(FAKE_HOST)
            .args(["--qmp".as_ref(), vm.monitor().as_os_str()])
            .args(["--bus", PORT, "--listen", SOCKET])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context(FAKE_HOST)?;
        let (input, output) = child.stdin.take().zip(child.stdout.take()).context("no pipes")?;
        let pairs: Vec<_> = map.iter().enumerate().map(|(vcpu, node)| format!("{vcpu}:{node}")).collect();
        let mut doorbell = Self {
            input,
            output: Lines::of(output, FAKE_HOST),
            _process: Process(child),
            map: pairs.join(","),
        };
        let attached = doorbell.output.next("attach")?;
        ensure!(attached == "attached", "{FAKE_HOST}: {attached:?}");
        let nodes = map.iter().max().map_or(1, |node| node + 1);
        doorbell.ask(&format!("nodes {nodes}"))?;
        // The first one waits for the driver to find the device.
        doorbell.publish()?;
        Ok(doorbell)
    }

    fn ask(&mut self, command: &str) -> Result<String> {
        writeln!(self.input, "{command}").context(FAKE_HOST)?;
        self.output.next(command)
    }

    /// Nanoseconds of a round trip.
    fn publish(&mut self) -> Result<f64> {
        let command = format!("publish {}", self.map);
        let answer = self.ask(&command)?;
        let us =
            answer.strip_prefix("acknowledged ").and_then(|rest| rest.split(' ').nth(2)?.parse::<f64>().ok());
        Ok(us.with_context(|| format!("{command}: {answer:?}"))? * 1e3)
    }
}

/// Nanoseconds of rebuilds of the guest's scheduler domains.
pub fn rebuilds(vm: &Vm, times: usize) -> Result<Vec<f64>> {
    let text = vm.exec(&[PROGRAM, "rebuild", "--times", &times.to_string()])?;
    serde_json::from_str(&text).with_context(|| format!("rebuild: {text:?}"))
}

/// Times round trips of the doorbell, and adds what the rebuilds took.
pub fn measure(doorbell: &mut Doorbell, rebuilds: &[f64]) -> Result<Floor> {
    let mut trips = Vec::new();
    for _ in rebuilds {
        std::thread::sleep(SETTLE);
        trips.push(doorbell.publish()?);
    }
    let sums = trips.iter().zip(rebuilds).map(|(trip, rebuild)| trip + rebuild);
    let whole = Percentiles::of_ns(sums).context("no round trips")?;
    let doorbell_ms = Percentiles::of_ns(trips.into_iter()).context("no round trips")?;
    let rebuild_ms = Percentiles::of_ns(rebuilds.iter().copied()).context("no rebuilds")?;
    Ok(Floor { whole, doorbell_ms, rebuild_ms })
}

/// In a guest: makes the last CPU a scheduling partition of its own and undoes it, by turns; prints nanoseconds of each.
pub fn rebuild(times: usize) -> Result<()> {
    let root = Path::new(CGROUPS);
    let write = |path: &Path, text: &str| {
        fs::write(path, text).with_context(|| format!("{}: {text}", path.display()))
    };
    write(&root.join("cgroup.subtree_control"), "+cpuset")?;
    let online = fs::read_to_string("/sys/devices/system/cpu/online").context("online CPUs")?;
    let last = online.trim().rsplit(['-', ',']).next().context("no CPU")?;
    let group = root.join("bench-floor");
    fs::create_dir_all(&group).with_context(|| group.display().to_string())?;
    write(&group.join("cpuset.cpus"), last)?;
    let partition = group.join("cpuset.cpus.partition");
    let mut durations = Vec::new();
    for number in 0..times {
        std::thread::sleep(SETTLE);
        let wanted = ["root", "member"][number % 2];
        let start = monotonic_ns()?;
        write(&partition, wanted)?;
        durations.push(monotonic_ns()? - start);
        let now = fs::read_to_string(&partition)?;
        ensure!(now.trim() == wanted, "{}: {wanted} was written, it is {now:?}", partition.display());
    }
    write(&partition, "member")?;
    fs::remove_dir(&group).with_context(|| group.display().to_string())?;
    println!("{}", serde_json::to_string(&durations)?);
    Ok(())
}
