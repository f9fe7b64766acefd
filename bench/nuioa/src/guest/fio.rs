//! fio on a block device: the disk's, or one of the second server's RAM by NVMe over TCP.

use super::{Load, Place, net, pci, process};
use crate::committed::PEER_ADDRESS;
use anyhow::{Context, Result, ensure};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};
use vnuma_scenario::wait_for;

/// Blocks after which fio has started.
const READS: u64 = 200;
const BLOCKS: &str = "/sys/class/block";
const FABRICS: &str = "/dev/nvme-fabrics";
const HANG: Duration = Duration::from_secs(120);

pub struct Fio {
    process: process::Running,
    /// The kernel's count of what was done.
    statistics: PathBuf,
    before: u64,
    /// Goes with the workload.
    _remote: Option<Remote>,
}

impl Fio {
    /// On the disk.
    pub fn start(disk: &Path, place: Place, depth: usize) -> Result<Self> {
        process::run("modprobe", &["nvme"])?;
        // Its block device comes anew, perhaps by the same name.
        pci::bind(disk, None)?;
        let before = namespaces()?;
        pci::bind(disk, Some("nvme"))?;
        Self::on(&new_namespace(&before)?, None, place, depth)
    }

    /// On the second server's RAM, by this card.
    pub fn remote(card: &Path, place: Place, depth: usize) -> Result<Self> {
        net::up(card, place)?;
        let (remote, block) = Remote::connect()?;
        Self::on(&block, Some(remote), place, depth)
    }

    fn on(block: &str, remote: Option<Remote>, place: Place, depth: usize) -> Result<Self> {
        let mut command = process::at(place, "fio");
        command.args(["--name=randread", "--rw=randread", "--bs=4k", "--ioengine=libaio", "--direct=1"]);
        command.args(["--thread", "--time_based", "--runtime=1000000", "--randrepeat=1", "--gtod_reduce=1"]);
        // What it does by the clock beside its reads is the more for each the slower the machine is.
        command.args(["--disk_util=0", "--eta=never"]);
        command.args(["--norandommap", &format!("--iodepth={depth}"), &format!("--filename=/dev/{block}")]);
        let statistics = Path::new(BLOCKS).join(block).join("stat");
        let process = process::Running::stopped(&mut command)?;
        let mut fio = Self { process, statistics, before: 0, _remote: remote };
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

impl Load for Fio {
    fn go(&mut self) -> Result<()> {
        self.before = self.completed()?;
        self.process.go()
    }

    fn halt(&mut self) -> Result<Option<u64>> {
        self.process.halt()?;
        // What is under way ends.
        thread::sleep(Duration::from_millis(200));
        Ok(Some(self.completed()? - self.before))
    }

    fn process(&self) -> Option<u32> {
        Some(self.process.id())
    }
}

/// A disk of the second server.
struct Remote {
    controller: String,
}

impl Remote {
    /// Connects to the second server (drivers/nvme/host/fabrics.c); with the block device.
    fn connect() -> Result<(Self, String)> {
        process::run("modprobe", &["nvme_tcp"])?;
        let before = namespaces()?;
        let mut file = fs::OpenOptions::new().read(true).write(true).open(FABRICS).context(FABRICS)?;
        let options = format!("transport=tcp,traddr={PEER_ADDRESS},trsvcid=4420,nqn=ram");
        // One write is one request, and the answer names the controller: instance=N,cntlid=M.
        std::io::Write::write_all(&mut file, options.as_bytes())
            .with_context(|| format!("{FABRICS}: {options}"))?;
        let mut answer = [0; 128];
        let count = std::io::Read::read(&mut file, &mut answer).context(FABRICS)?;
        let answer = String::from_utf8_lossy(&answer[..count]).into_owned();
        let instance = answer.split(',').find_map(|word| word.trim().strip_prefix("instance="));
        let instance = instance.with_context(|| format!("{FABRICS}: {answer:?}"))?;
        let remote = Self { controller: format!("/sys/class/nvme/nvme{instance}") };
        Ok((remote, new_namespace(&before)?))
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Err(error) = fs::write(Path::new(&self.controller).join("delete_controller"), "1") {
            eprintln!("{}: {error}", self.controller);
        }
    }
}

/// Is it `nvme0n1`? With several paths a path of its own is `nvme0c1n1`.
fn is_namespace(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let rest = name.strip_prefix("nvme").and_then(|rest| rest.split_once('n'));
    rest.is_some_and(|(controller, namespace)| number(controller) && number(namespace))
}

fn namespaces() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(BLOCKS).context(BLOCKS)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if is_namespace(&name) {
            found.insert(name);
        }
    }
    Ok(found)
}

/// The one that comes.
fn new_namespace(before: &BTreeSet<String>) -> Result<String> {
    let mut found = None;
    wait_for("a block device to come", HANG, || {
        found = namespaces()?.difference(before).next().cloned();
        Ok(found.is_some())
    })?;
    found.context(BLOCKS)
}

#[cfg(test)]
mod tests {
    use super::is_namespace;

    #[test]
    fn a_namespace_is_known_by_its_name() {
        for (name, is) in [
            ("nvme0n1", true),
            ("nvme10n2", true),
            ("nvme0c1n1", false),
            ("nvme0n1p1", false),
            ("nvme0", false),
            ("vda", false),
        ] {
            assert_eq!(is_namespace(name), is, "{name}");
        }
    }
}
