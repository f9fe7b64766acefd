//! The vnumad that is measured: its process, and what that has used so far.

use crate::vms::end_with_us;
use anyhow::{Context, bail, ensure};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use vnuma_api::operation;
use vnuma_client::blocking::{Client, Connection};

/// Only ends a hang.
const HANG: Duration = Duration::from_secs(180);
/// Between two looks at what it knows.
const LOOK: Duration = Duration::from_millis(200);

/// A vnumad, killed when this is dropped.
pub struct Daemon {
    child: Child,
    /// Of its API.
    pub socket: PathBuf,
}

/// What it has used so far.
#[derive(Clone, Debug)]
pub struct Usage {
    pub at: Instant,
    /// Of all threads, those that have ended included.
    pub cpu_ns: u64,
    /// Times that a thread slept, and was woken up.
    pub wakeups: u64,
    /// CPU time of the threads that there are, by name.
    pub threads: BTreeMap<String, u64>,
    /// Wake-ups likewise.
    pub woken: BTreeMap<String, u64>,
    /// Nanoseconds that they waited for a CPU, likewise.
    pub waited: BTreeMap<String, u64>,
}

/// What a vnumad is to find its VMs by.
#[derive(Clone, Copy)]
pub enum Found<'a> {
    /// QMP sockets in a directory.
    Qmp(&'a Path),
    /// Domains of a libvirt: its URI, and where its files are.
    Libvirt(&'a str, &'a Path),
}

/// vnumad's configuration.
fn configured(socket: &Path, locations: &str, directory: &Path, found: Found<'_>) -> String {
    let none = directory.join("none");
    let (sockets, libvirt) = match found {
        Found::Qmp(sockets) => (sockets, String::new()),
        Found::Libvirt(uri, states) => {
            let plugs = directory.join("plugs");
            let libvirt = format!(
                "[libvirt]\nuris = [{uri:?}]\nstate_directories = [{states:?}]\nsocket_directory = {plugs:?}\n"
            );
            (none.as_path(), libvirt)
        }
    };
    format!(
        "[api]\nsocket = {socket:?}\ngroup = \"nogroup\"\nconnections_per_user = 128\n[vms]\ndirectory = {sockets:?}\n\
         [observe]\nroot = {directory:?}\nlocation = {locations:?}\n[publish]\nrecords = {:?}\n{libvirt}",
        directory.join("channels")
    )
}

impl Daemon {
    /// Starts it for these VMs. `Err(reason)` in the inner result: what it is to use does not work here.
    pub fn start(
        program: &Path,
        locations: &str,
        directory: &Path,
        found: Found<'_>,
        log: &Path,
    ) -> anyhow::Result<Result<Self, String>> {
        let socket = directory.join("api.sock");
        let configuration = directory.join("vnumad.toml");
        fs::write(&configuration, configured(&socket, locations, directory, found))?;
        fs::create_dir(directory.join("none"))?;
        let mut command = Command::new(program);
        command.arg("--config").arg(&configuration).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(log).with_context(|| log.display().to_string())?);
        end_with_us(&mut command);
        let child = command.spawn().with_context(|| program.display().to_string())?;
        let mut daemon = Self { child, socket };
        let end = Instant::now() + HANG;
        while daemon.connect().is_err() {
            if daemon.child.try_wait()?.is_some() {
                let said = fs::read_to_string(log).unwrap_or_default();
                let last = said.lines().last().unwrap_or_default().to_owned();
                if last.contains("cannot be watched by BPF") {
                    return Ok(Err(last));
                }
                bail!("vnumad ended: {last}");
            }
            ensure!(Instant::now() < end, "vnumad does not serve");
            thread::sleep(LOOK);
        }
        let said = fs::read_to_string(log).unwrap_or_default();
        let missing = said.lines().find(|line| line.contains("domains of libvirt are not found"));
        Ok(missing.map_or(Ok(daemon), |line| Err(line.to_owned())))
    }

    /// A connection to its API.
    pub fn connect(&self) -> anyhow::Result<Connection> {
        Ok(self.client()?.connect()?)
    }

    /// A client of it.
    pub fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::new(&self.socket, HANG)?)
    }

    /// Waits until it knows what so many VMs consist of.
    pub fn await_vms(&self, count: usize) -> anyhow::Result<Duration> {
        let (begin, mut client) = (Instant::now(), self.connect()?);
        loop {
            let vms = client.ask::<operation::List>((), &())?;
            if vms.iter().filter(|vm| vm.described).count() == count {
                return Ok(begin.elapsed());
            }
            ensure!(begin.elapsed() < HANG, "only {} of {count} VMs are known", vms.len());
            thread::sleep(LOOK);
        }
    }

    /// Where locations come from, as it says itself.
    pub fn location_source(&self) -> anyhow::Result<String> {
        Ok(self.client()?.ask::<operation::Daemon>((), &())?.location_source)
    }

    /// What it has used so far.
    pub fn usage(&self) -> anyhow::Result<Usage> {
        let at = Instant::now();
        let (mut threads, mut woken, mut waited) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut wakeups = 0;
        for entry in fs::read_dir(self.proc("task"))? {
            let task = entry?.path();
            let read = |file: &str| fs::read_to_string(task.join(file)).unwrap_or_default();
            let name = group(read("comm").trim_end());
            let (ran, queued) = parse_schedstat(&read("schedstat"));
            *threads.entry(name.clone()).or_default() += ran;
            *waited.entry(name.clone()).or_default() += queued;
            let switches = parse_switches(&read("status"));
            *woken.entry(name).or_default() += switches;
            wakeups += switches;
        }
        Ok(Usage { at, cpu_ns: self.cpu_ns()?, wakeups, threads, woken, waited })
    }

    /// CPU time of all its threads so far, those that have ended included.
    pub fn cpu_ns(&self) -> anyhow::Result<u64> {
        let mut clock = 0;
        // SAFETY: the clock's number is written to a place of that type.
        let error = unsafe { libc::clock_getcpuclockid(self.child.id().cast_signed(), &raw mut clock) };
        ensure!(error == 0, "the CPU clock of vnumad: error {error}");
        let time = nix::time::clock_gettime(nix::time::ClockId::from_raw(clock))?;
        Ok(time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs())
    }

    /// Resident memory, in MB of a million bytes.
    pub fn rss_mb(&self) -> anyhow::Result<f64> {
        let status = fs::read_to_string(self.proc("status"))?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
        let kib: f64 = kib.context("no VmRSS")?.parse()?;
        Ok(kib * 1024.0 / 1e6)
    }

    /// Open files and threads.
    pub fn counts(&self) -> anyhow::Result<(usize, usize)> {
        Ok((fs::read_dir(self.proc("fd"))?.count(), fs::read_dir(self.proc("task"))?.count()))
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.child.id()))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Name of a thread without what tells it from others that do the same: `vm-17` is `vm`.
fn group(name: &str) -> String {
    name.trim_end_matches(|last: char| last.is_ascii_digit() || last == '-').to_owned()
}

/// Nanoseconds on a CPU and waiting for one, from a `schedstat` file.
fn parse_schedstat(text: &str) -> (u64, u64) {
    let mut numbers = text.split(' ').map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Voluntary context switches, from a `status` file.
fn parse_switches(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vnumad_takes_its_configuration() {
        let [socket, directory, sockets] = ["/tmp/a.sock", "/tmp/a", "/tmp/a/qmp"].map(Path::new);
        let parsed = |found: Found<'_>| {
            let text = configured(socket, "poll", directory, found);
            vnuma_daemon::config::Config::parse(Path::new("vnumad.toml"), &text).expect("it is accepted")
        };
        let config = parsed(Found::Qmp(sockets));
        assert_eq!((config.root.as_path(), config.records), (directory, directory.join("channels")));
        assert_eq!((config.directory.as_deref(), config.libvirt_uris.len()), (Some(sockets), 0));
        let config = parsed(Found::Libvirt("qemu+unix:///system?socket=/tmp/a/l", sockets));
        assert_eq!(config.libvirt_uris, ["qemu+unix:///system?socket=/tmp/a/l"]);
        assert_eq!(config.libvirt_directories, [sockets]);
    }

    #[test]
    fn threads_that_do_the_same_are_one() {
        assert_eq!(["vm-17", "vm-2", "core", "vnuma-bpf"].map(group), ["vm", "vm", "core", "vnuma-bpf"]);
    }

    #[test]
    fn fields_of_proc() {
        assert_eq!(parse_schedstat("123456 789 12\n"), (123_456, 789));
        assert_eq!(
            parse_switches("Name:\tx\nvoluntary_ctxt_switches:\t42\nnonvoluntary_ctxt_switches:\t7\n"),
            42
        );
        assert_eq!((parse_schedstat(""), parse_switches("")), ((0, 0), 0));
    }
}
