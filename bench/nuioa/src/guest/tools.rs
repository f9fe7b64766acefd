//! Workloads that are programs of others: testpmd of DPDK, fio, sysbench.

use super::{Load, Place, pci};
use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Huge pages of 2 MiB on each guest node.
const HUGE_PAGES: &str = "64";
/// Packets in DPDK's pool.
const MBUFS: &str = "8192";
/// Descriptors of each ring.
const RING: &str = "256";
/// Blocks after which fio has started.
const READS: u64 = 2000;
const HANG: Duration = Duration::from_secs(120);

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output().with_context(|| program.to_owned())?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}: {text}", arguments.join(" "), output.status);
    Ok(())
}

/// testpmd, which is told by lines to start and to stop.
pub struct Testpmd {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// How it begins.
    start: &'static str,
}

impl Testpmd {
    /// Starts it on these cards. It finds out by itself on which node they are, and takes memory there.
    pub fn start(mode: &str, cards: &[PathBuf], place: Place, bytes: usize, burst: usize) -> Result<Self> {
        run("modprobe", &["uio_pci_generic"])?;
        for card in cards {
            pci::bind(card, Some("uio_pci_generic"))?;
        }
        for node in 0..super::nodes()?.len() {
            let path = format!("{}/node{node}/hugepages/hugepages-2048kB/nr_hugepages", super::NODES);
            fs::write(&path, HUGE_PAGES).with_context(|| path.clone())?;
        }
        let Place { cpu, other, .. } = place;
        let mut command = Command::new("stdbuf");
        command.args([
            "-oL",
            "dpdk-testpmd",
            "-l",
            &format!("{other},{cpu}"),
            "--main-lcore",
            &other.to_string(),
        ]);
        command.args(["--in-memory", "--no-telemetry", "--iova-mode=pa", "--log-level=*:warning"]);
        for card in cards {
            command.args(["-a", pci::address(card)?]);
        }
        command.args(["--", "-i", "--nb-cores=1", "--no-lsc-interrupt", "--disable-rss"]);
        command.args([
            format!("--forward-mode={mode}"),
            format!("--txpkts={bytes}"),
            format!("--burst={burst}"),
        ]);
        command.args(["--total-num-mbufs", MBUFS, "--rxd", RING, "--txd", RING]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("dpdk-testpmd")?;
        let input = child.stdin.take().context("standard input")?;
        let output = BufReader::new(child.stdout.take().context("standard output")?);
        // So many packets are on their way between the two cards.
        let start = if mode == "io" { "start tx_first 16" } else { "start" };
        let mut testpmd = Self { child, input, output, start };
        testpmd.say("show port summary all")?;
        testpmd.until("Number of available ports").context("dpdk-testpmd does not answer")?;
        Ok(testpmd)
    }

    fn say(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}").and_then(|()| self.input.flush()).context("telling testpmd")
    }

    /// Reads lines until one has this part; all of them.
    fn until(&mut self, part: &str) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        let end = Instant::now() + HANG;
        while Instant::now() < end {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                break;
            }
            let found = line.contains(part);
            lines.push(line);
            if found {
                return Ok(lines);
            }
        }
        anyhow::bail!("testpmd did not say {part:?}: {}", lines.concat())
    }
}

/// The packets of the last statistics, those of all ports.
fn transmitted(lines: &[String]) -> Option<u64> {
    let line = lines.iter().rev().find_map(|line| line.split("TX-packets:").nth(1))?;
    line.split_whitespace().next()?.parse().ok()
}

impl Load for Testpmd {
    fn go(&mut self) -> Result<()> {
        self.say(self.start)?;
        self.until("packet forwarding packets/burst").map(drop)
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        self.say("stop")?;
        let lines = self.until("Done.")?;
        let sent = transmitted(&lines).with_context(|| format!("no TX-packets in {}", lines.concat()))?;
        Ok(Some(sent))
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // It gives the cards back if it can.
        let _ = self.say("quit");
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(100));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process that is stopped by a signal, and goes on by another.
struct Stopped(Child);

impl Stopped {
    fn signal(&self, signal: Signal) -> Result<()> {
        let group = Pid::from_raw(-i32::try_from(self.0.id())?);
        kill(group, signal).with_context(|| format!("{signal} to process group {group}"))
    }

    /// Starts a program in a process group of its own, lets it begin, and stops it.
    fn start(command: &mut Command) -> Result<Self> {
        use std::os::unix::process::CommandExt;
        let child = command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let mut stopped = Self(child.with_context(|| format!("{command:?}"))?);
        thread::sleep(Duration::from_secs(3));
        ensure!(stopped.0.try_wait()?.is_none(), "{command:?} ended at once");
        stopped.signal(Signal::SIGSTOP)?;
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.signal(Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

fn numactl(place: Place) -> Command {
    let mut command = Command::new("numactl");
    command.arg(format!("--physcpubind={}", place.cpu));
    if place.bind {
        command.arg(format!("--membind={}", place.node));
    }
    command
}

/// fio on the disk's block device.
pub struct Fio {
    process: Stopped,
    /// The kernel's count of what was done.
    statistics: PathBuf,
    before: u64,
}

impl Fio {
    pub fn start(disk: &Path, place: Place, depth: usize) -> Result<Self> {
        run("modprobe", &["nvme"])?;
        pci::bind(disk, Some("nvme"))?;
        let block = block_device(disk)?;
        let mut command = numactl(place);
        command.args([
            "fio",
            "--name=randread",
            "--rw=randread",
            "--bs=4k",
            "--ioengine=libaio",
            "--direct=1",
        ]);
        command.args(["--thread", "--time_based", "--runtime=1000000", "--randrepeat=1", "--gtod_reduce=1"]);
        command.args(["--norandommap", &format!("--iodepth={depth}"), &format!("--filename=/dev/{block}")]);
        let statistics = Path::new("/sys/class/block").join(&block).join("stat");
        let mut fio = Self { process: Stopped::start(&mut command)?, statistics, before: 0 };
        // Its own start takes longer the slower the machine is.
        let end = Instant::now() + HANG;
        while fio.completed()? < READS {
            ensure!(Instant::now() < end, "fio has not begun to read");
            fio.go()?;
            thread::sleep(Duration::from_millis(500));
            fio.halt()?;
        }
        Ok(fio)
    }

    /// Reads that were completed (Documentation/block/stat.rst).
    fn completed(&self) -> Result<u64> {
        let text =
            fs::read_to_string(&self.statistics).with_context(|| self.statistics.display().to_string())?;
        let first = text.split_whitespace().next().and_then(|number| number.parse().ok());
        first.with_context(|| format!("{}: {text:?}", self.statistics.display()))
    }
}

/// The block device of an NVMe disk, when its driver has found it.
fn block_device(disk: &Path) -> Result<String> {
    let end = Instant::now() + HANG;
    while Instant::now() < end {
        for controller in fs::read_dir(disk.join("nvme")).into_iter().flatten().flatten() {
            for entry in fs::read_dir(controller.path()).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.starts_with("nvme") && name.contains('n') && entry.path().join("stat").exists() {
                    return Ok(name);
                }
            }
        }
        thread::sleep(Duration::from_millis(200));
    }
    anyhow::bail!("{}: no block device", disk.display())
}

impl Load for Fio {
    fn go(&mut self) -> Result<()> {
        self.before = self.completed()?;
        self.process.signal(Signal::SIGCONT)
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        self.process.signal(Signal::SIGSTOP)?;
        // What is under way ends.
        thread::sleep(Duration::from_millis(200));
        Ok(Some(self.completed()? - self.before))
    }
}

/// Processes of sysbench, which do not tell what they have done while they run.
pub struct Sysbench(Vec<Stopped>);

impl Sysbench {
    pub fn start(cpu: usize, instances: usize) -> Result<Self> {
        let one = |_| {
            let mut command = Command::new("taskset");
            command.args(["-c", &cpu.to_string(), "sysbench", "memory", "--time=0"]);
            command.args(["--memory-total-size=1000T", "--memory-block-size=32M", "--memory-oper=read"]);
            command.args(["--memory-access-mode=rnd", "run"]);
            Stopped::start(&mut command)
        };
        Ok(Self((0..instances).map(one).collect::<Result<_>>()?))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.0.iter().try_for_each(|one| one.signal(signal))
    }
}

impl Load for Sysbench {
    fn go(&mut self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        self.signal(Signal::SIGSTOP).map(|()| None)
    }
}

/// Two at a time; the first one counts.
pub struct Both<A, B>(pub A, pub B);

impl<A: Load, B: Load> Load for Both<A, B> {
    fn go(&mut self) -> Result<()> {
        self.1.go()?;
        self.0.go()
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        let done = self.0.halt()?;
        self.1.halt()?;
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packets_are_those_of_all_ports() {
        let text = "  ---------------------- Forward statistics for port 0  ----------------------\n\
                    \x20 RX-packets: 7              RX-dropped: 0             RX-total: 7\n\
                    \x20 TX-packets: 11             TX-dropped: 5             TX-total: 16\n\
                    \x20 +++++++++++++++ Accumulated forward statistics for all ports+++++++++++++++\n\
                    \x20 RX-packets: 14             RX-dropped: 0             RX-total: 14\n\
                    \x20 TX-packets: 23             TX-dropped: 5             TX-total: 28\nDone.\n";
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        assert_eq!(transmitted(&lines), Some(23));
        assert_eq!(transmitted(&lines[..2]), None);
    }
}
