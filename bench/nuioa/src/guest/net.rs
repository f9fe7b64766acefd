//! Workloads by the kernel's network stack on a card that is passed through: sockperf, memcached, perftest over soft RoCE.

use super::{Load, Place, pci, process};
use crate::{
    committed::{GUEST_ADDRESS, PEER_ADDRESS, Pace, Verb, Way},
    sockets,
};
use anyhow::{Context, Result};
use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};
use vnuma_scenario::wait_for;

const WORK: &str = "/sys/devices/virtual/workqueue/cpumask";
const HANG: Duration = Duration::from_secs(60);
/// What is under way ends.
const DRAIN: Duration = Duration::from_millis(300);

/// Gives the card to its driver and an address to its interface; what the interface is. What the kernel does for it is done where the
/// workload is: interrupts, unless an agent keeps them there, and work that may be anywhere.
pub fn up(card: &Path, place: Place) -> Result<PathBuf> {
    process::run("modprobe", &["igb"])?;
    pci::bind(card, Some("igb"))?;
    let interface = pci::only_name(&card.join("net"))?;
    process::run("ip", &["address", "replace", &format!("{GUEST_ADDRESS}/16"), "dev", &interface])?;
    process::run("ip", &["link", "set", &interface, "up"])?;
    let directory = card.join("net").join(&interface);
    let is_up = || Ok(fs::read_to_string(directory.join("operstate"))?.trim() == "up");
    wait_for(&format!("{interface} to have a link"), HANG, is_up)?;
    if !place.by_agent {
        for interrupt in pci::interrupts(card)? {
            let path = format!("/proc/irq/{interrupt}/smp_affinity_list");
            fs::write(&path, place.cpu.to_string()).context(path)?;
        }
    }
    fs::write(WORK, format!("{:x}", 1_u64 << place.cpu)).context(WORK)?;
    Ok(directory)
}

/// A counter of the kernel.
enum Count {
    /// A file with a number.
    File(PathBuf),
    /// A field of UDP in `/proc/net/snmp`.
    Udp(&'static str),
}

impl Count {
    fn read(&self) -> Result<u64> {
        let path = match self {
            Self::File(path) => path.as_path(),
            Self::Udp(_) => Path::new("/proc/net/snmp"),
        };
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let number = match self {
            Self::File(_) => text.trim().parse().ok(),
            Self::Udp(field) => udp(&text, field),
        };
        number.with_context(|| format!("{}: {text:?}", path.display()))
    }
}

/// A line with the names of fields comes before one with their values.
fn udp(snmp: &str, field: &str) -> Option<u64> {
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Udp:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let at = names.split_whitespace().position(|name| name == field)?;
    values.split_whitespace().nth(at)?.parse().ok()
}

/// A program of the guest, and what it has done by a counter of the kernel.
pub struct Counted {
    program: process::Running,
    count: Option<Count>,
    before: u64,
    /// It is the one that begins; else it waits for the second server, and goes on.
    initiates: bool,
}

impl Counted {
    fn read(&self) -> Result<u64> {
        self.count.as_ref().map_or(Ok(0), Count::read)
    }

    /// sockperf.
    pub fn sockperf(card: &Path, place: Place, way: Way, pace: Pace, bytes: usize) -> Result<Self> {
        let interface = up(card, place)?;
        let mut command = process::at(place, "sockperf");
        command.args(sockets::sockperf(way == Way::Transmit, way, pace, bytes));
        let statistics = |name: &str| Count::File(interface.join("statistics").join(name));
        let count = match (way, pace) {
            (Way::Receive, Pace::Alone | Pace::Rate(_)) => Count::Udp("InDatagrams"),
            (Way::Transmit, Pace::Alone | Pace::Rate(_)) => Count::Udp("OutDatagrams"),
            (Way::Receive, Pace::Full) => statistics("rx_packets"),
            (Way::Transmit, Pace::Full) => statistics("tx_packets"),
        };
        Self::start(&mut command, Some(count), way)
    }

    /// memcached; the second server counts.
    pub fn memcached(card: &Path, place: Place) -> Result<Self> {
        up(card, place)?;
        let mut command = process::at(place, "memcached");
        // Without threads that look after its memory by the clock.
        command.args(["-u", "root", "-U", "0", "-t", "1", "-o", "no_lru_maintainer,no_lru_crawler"]);
        command.args(["-l", GUEST_ADDRESS]);
        Self::start(&mut command, None, Way::Receive)
    }

    /// perftest. An operation of an initiator is a request that it sends, and of a responder one that it gets.
    pub fn rdma(card: &Path, place: Place, verb: Verb, way: Way, bytes: usize) -> Result<Self> {
        let interface = up(card, place)?;
        let name = interface.file_name().unwrap_or_default().to_string_lossy().into_owned();
        sockets::soft_roce(&name)?;
        let (program, arguments) =
            sockets::perftest(verb, bytes, (way == Way::Transmit).then_some(PEER_ADDRESS));
        let mut command = process::at(place, program);
        command.args(arguments);
        let counter = if way == Way::Transmit { "sent_pkts" } else { "rcvd_pkts" };
        let count = Count::File(Path::new(sockets::RDMA_COUNTERS).join(counter));
        Self::start(&mut command, Some(count), way)
    }

    fn start(command: &mut std::process::Command, count: Option<Count>, way: Way) -> Result<Self> {
        let initiates = way == Way::Transmit;
        let begin = if initiates { process::Running::stopped } else { process::Running::start };
        Ok(Self { program: begin(command)?, count, before: 0, initiates })
    }
}

impl Load for Counted {
    fn go(&mut self) -> Result<()> {
        self.before = self.read()?;
        if self.initiates { self.program.go() } else { Ok(()) }
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        if self.initiates {
            self.program.halt()?;
        }
        thread::sleep(DRAIN);
        let after = self.read()?;
        Ok(self.count.is_some().then(|| after - self.before))
    }

    fn process(&self) -> Option<u32> {
        Some(self.program.id())
    }
}

#[cfg(test)]
mod tests {
    use super::udp;

    #[test]
    fn datagrams_are_counted_by_the_names_of_the_fields() {
        let text =
            "Ip: A B\nIp: 1 2\nUdp: InDatagrams NoPorts InErrors OutDatagrams\nUdp: 5 6 7 8\nUdpLite: x\n";
        assert_eq!((udp(text, "InDatagrams"), udp(text, "OutDatagrams")), (Some(5), Some(8)));
        assert_eq!((udp(text, "X"), udp("Udp: a\n", "a")), (None, None));
    }
}
