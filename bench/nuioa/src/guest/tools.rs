//! Workloads that are programs of others: testpmd of DPDK, and sysbench.

use super::{Load, Place, pci, process};
use anyhow::{Context, Result};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Huge pages of 2 MiB on each guest node. A pool of packets takes ten of them.
const HUGE_PAGES: &str = "32";
const TRIES: usize = 5;
/// What is told of a node that lacks them.
const KEPT: [&str; 4] = ["MemTotal", "MemFree", "FilePages", "Unevictable"];
/// Packets in DPDK's pool.
const MBUFS: &str = "8192";
/// Descriptors of each ring. With twice as many the packets' headers take half of the L2, and where DPDK happens to lay them decides
/// how many of its sets overflow.
const RING: &str = "128";
const HANG: Duration = Duration::from_secs(120);

/// testpmd, which is told by lines to start and to stop.
pub struct Testpmd {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// How it begins.
    start: &'static str,
}

impl Testpmd {
    /// Starts it on these cards. It looks up on which node they are, and takes memory there.
    pub fn start(mode: &str, cards: &[PathBuf], place: Place, bytes: usize, burst: usize) -> Result<Self> {
        process::run("modprobe", &["uio_pci_generic"])?;
        for card in cards {
            pci::bind(card, Some("uio_pci_generic"))?;
        }
        (0..super::nodes()?.len()).try_for_each(reserve_huge_pages)?;
        let mut command = Command::new("stdbuf");
        command.args(["-oL", "dpdk-testpmd", "--lcores", &lcores(place), "--main-lcore", "0"]);
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
        if place.by_agent {
            super::let_run_anywhere(testpmd.child.id())?;
        }
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

/// Node 0 has the guest's kernel and what it has read of its disk, and less room than others.
fn reserve_huge_pages(node: usize) -> Result<()> {
    let path = format!("{}/node{node}/hugepages/hugepages-2048kB/nr_hugepages", super::NODES);
    let mut found = String::new();
    for _ in 0..TRIES {
        fs::write(&path, HUGE_PAGES).with_context(|| path.clone())?;
        found = fs::read_to_string(&path).with_context(|| path.clone())?.trim().to_owned();
        if found == HUGE_PAGES {
            return Ok(());
        }
        for (file, word) in [("/proc/sys/vm/drop_caches", "3"), ("/proc/sys/vm/compact_memory", "1")] {
            fs::write(file, word).context(file)?;
        }
    }
    let memory = format!("{}/node{node}/meminfo", super::NODES);
    let memory = fs::read_to_string(&memory).context(memory)?;
    let kept: Vec<&str> = memory.lines().filter(|line| KEPT.iter().any(|word| line.contains(word))).collect();
    anyhow::bail!("{path}: {found}, expected {HUGE_PAGES}: {}", kept.join(", "))
}

/// Threads of DPDK and their CPUs: one for its commands, one that works. Both are on the CPU that is counted, as they are where an agent
/// places the program: the first one looks for a command each millisecond, which has to be the same for all.
///
/// Where an agent places the program, they may be anywhere once it runs. It must not begin so: a thread with CPUs of several nodes has
/// none for DPDK, and testpmd then asks for memory of node 65535.
fn lcores(place: Place) -> String {
    let Place { cpu, other, by_agent, .. } = place;
    let cpu = if by_agent { other } else { cpu };
    format!("0@{cpu},1@{cpu}")
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

    fn process(&self) -> Option<u32> {
        Some(self.child.id())
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

/// Processes of sysbench, which do not tell what they have done while they run.
pub struct Sysbench(Vec<process::Running>);

impl Sysbench {
    /// Each reads so much memory at random.
    pub fn start(cpu: usize, instances: usize, mib: usize) -> Result<Self> {
        let block = format!("--memory-block-size={mib}M");
        let one = |_| {
            let mut command = Command::new("taskset");
            command.args(["-c", &cpu.to_string(), "sysbench", "memory", "--time=0"]);
            command.args(["--memory-total-size=1000T", &block, "--memory-oper=read"]);
            command.args(["--memory-access-mode=rnd", "run"]);
            process::Running::stopped(&mut command)
        };
        Ok(Self((0..instances).map(one).collect::<Result<_>>()?))
    }
}

impl Load for Sysbench {
    fn go(&mut self) -> Result<()> {
        self.0.iter().try_for_each(process::Running::go)
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        self.0.iter().try_for_each(process::Running::halt).map(|()| None)
    }

    fn process(&self) -> Option<u32> {
        None
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

    fn process(&self) -> Option<u32> {
        self.0.process()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_threads_are_on_the_cpu_that_is_counted_or_on_the_other_until_an_agent_places_them() {
        let place = Place { cpu: 1, other: 0, node: 1, bind: true, by_agent: false };
        assert_eq!(lcores(place), "0@1,1@1");
        assert_eq!(lcores(Place { by_agent: true, ..place }), "0@0,1@0");
    }

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
