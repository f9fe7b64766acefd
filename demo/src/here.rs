//! The demonstration on the machine itself, which has KVM and several nodes. A process of its own runs it, so that whatever
//! ends that process, or interrupts this one, everything that was started is ended and removed.
//!
//! ```text
//! /run/vnuma-demo/         made at the start, removed at the end
//!     .lock                held while a demonstration runs
//!     lab                  link to the folder with the guests' kernels and root disk, and QEMU
//!     vm/ qmp/             lab-vm's
//!     vnumad.toml vnumad.sock channels/
//! ```
//!
//! A vnumad that runs already has other sockets, and sees nothing of this.

use crate::host::{VMS, memory_mib};
use crate::locations;
use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, geteuid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Write, stdout};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use vnuma_scenario::{DIRECTORY, home_nodes};

/// Everything of a run.
const FOLDER: &str = "/run/vnuma-demo";
/// Memory that stays free on each node, in MiB, for everybody else.
const SPARE_MIB: u64 = 256;
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// How long the group may take to end after it was killed.
const END_LIMIT: Duration = Duration::from_secs(20);

#[derive(clap::Args)]
pub struct Arguments {
    /// Folder with the programs (bin) and with what the guests need (kernels, root.erofs, tree)
    #[arg(long)]
    files: PathBuf,
    /// Arguments of `vnuma-demo host`
    #[arg(last = true)]
    host: Vec<OsString>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    ensure!(geteuid().is_root(), "root is needed: it starts VMs and reads the kernel's traces");
    let files = arguments.files.canonicalize().with_context(|| arguments.files.display().to_string())?;
    let folder = Path::new(FOLDER);
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let Ok(_lock) = Flock::lock(File::create(folder.join(".lock"))?, FlockArg::LockExclusiveNonblock) else {
        bail!("another demonstration runs on this machine ({FOLDER}/.lock is locked)");
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(files.join("bin")).chain(std::env::split_paths(&path));
    let path = std::env::join_paths(paths).context("PATH")?;
    // What a run that was killed has left.
    clean_up(folder, &path)?;
    let result = run_in(folder, &files, &path, &arguments.host);
    clean_up(folder, &path)?;
    fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    match result? {
        Ended::ByItself(status) => ensure!(status.success(), "the demonstration failed"),
        Ended::By(signal) => {
            // Its reader may be gone, too.
            let _ = writeln!(stdout(), "demo: interrupted; everything is removed");
            // As a shell has it.
            std::process::exit(128 + i32::try_from(signal).unwrap_or_default());
        }
    }
    Ok(())
}

/// Runs it, and leaves files, and VMs if it was interrupted.
fn run_in(folder: &Path, files: &Path, path: &OsStr, arguments: &[OsString]) -> Result<Ended> {
    let lacking = lacking(Path::new("/"), files)?;
    ensure!(
        lacking.is_empty(),
        "the demonstration cannot run on this machine:\n  {}\nwith --lab it runs on an emulated server",
        lacking.join("\n  ")
    );
    symlink(files, folder.join("lab")).context("linking the guests' files")?;
    let signal = first_signal()?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["host", "--on-this-machine"])
        .args(arguments)
        .env("PATH", path)
        .env(DIRECTORY, folder)
        // A group of its own: Ctrl-C reaches this process alone, which ends that group.
        .process_group(0)
        .spawn()
        .context("vnuma-demo host")?;
    let ended = wait(&mut child, &signal);
    end_group(&mut child)?;
    ended
}

/// The number of the first signal that asks to end, or 0.
fn first_signal() -> Result<Arc<AtomicUsize>> {
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGHUP, SIGINT, SIGTERM] {
        let value = usize::try_from(number)?;
        signal_hook::flag::register_usize(number, Arc::clone(&signal), value).context("signal handlers")?;
    }
    Ok(signal)
}

#[derive(Debug, PartialEq, Eq)]
enum Ended {
    ByItself(ExitStatus),
    By(usize),
}

fn wait(child: &mut Child, signal: &AtomicUsize) -> Result<Ended> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Ended::ByItself(status));
        }
        match signal.load(Ordering::Relaxed) {
            0 => std::thread::sleep(LOOK_INTERVAL),
            signal => return Ok(Ended::By(signal)),
        }
    }
}

/// Ends what is left of the group of the child: vnumad, the mover with its load, lab-vm. QEMU has a session of its own.
fn end_group(child: &mut Child) -> Result<()> {
    let group = Pid::from_raw(i32::try_from(child.id())?);
    let started = Instant::now();
    // Until there is no process of the group left; orphans are reaped by process 1.
    while killpg(group, Signal::SIGKILL).is_ok() && started.elapsed() < END_LIMIT {
        child.try_wait()?;
        std::thread::sleep(LOOK_INTERVAL);
    }
    Ok(())
}

/// Stops the VMs, and removes the trace and all files but the lock.
fn clean_up(folder: &Path, path: &OsStr) -> Result<()> {
    for name in VMS.iter().filter(|name| folder.join("vm").join(name).exists()) {
        let status = Command::new("lab-vm")
            .args(["stop", name])
            .env("PATH", path)
            .env(DIRECTORY, folder)
            .status()
            .context("lab-vm")?;
        ensure!(status.success(), "lab-vm stop {name}: {status}");
    }
    end_stragglers(&folder.join("vm"))?;
    locations::remove()?;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let path = entry.path();
        let removed = match entry.file_name().to_str() {
            Some(".lock") => Ok(()),
            _ if entry.file_type()?.is_dir() => fs::remove_dir_all(&path),
            _ => fs::remove_file(&path),
        };
        removed.with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Ends a QEMU that lab-vm, ended in mid-start, knows nothing of: one with its monitor in the folder of VMs.
fn end_stragglers(vms: &Path) -> Result<()> {
    let part = format!("unix:{}/", vms.display());
    for entry in fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // The process may have ended meanwhile.
        let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&words).contains(&part) {
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
    }
    Ok(())
}

/// What the demonstration needs and does not find, each with a way to get it. Files of the system are looked for below
/// `root`.
fn lacking(root: &Path, files: &Path) -> Result<Vec<String>> {
    let mut lacking = Vec::new();
    let mut need = |there: bool, otherwise: String| {
        if !there {
            lacking.push(otherwise);
        }
    };
    let opens = |path: &str| File::options().read(true).write(true).open(root.join(path));
    for (device, hint) in
        [("dev/kvm", "is KVM's module loaded?"), ("dev/vhost-vsock", "modprobe vhost_vsock")]
    {
        let opened = opens(device);
        let error = opened.as_ref().err().map(ToString::to_string).unwrap_or_default();
        need(opened.is_ok(), format!("/{device}: {error} ({hint})"));
    }
    for (directory, hint) in [
        ("sys/kernel/tracing/instances", "mount -t tracefs tracefs /sys/kernel/tracing"),
        ("sys/kernel/debug/kvm", "mount -t debugfs debugfs /sys/kernel/debug"),
    ] {
        need(root.join(directory).is_dir(), format!("/{directory}: not found ({hint})"));
    }
    let homes = home_nodes(root)?;
    need(homes.len() >= 2, format!("{} nodes have CPUs and memory, 2 are needed", homes.len()));
    let needed = (2 * memory_mib(homes.len()) / homes.len().max(1)) as u64 + SPARE_MIB;
    for (node, _) in &homes {
        let free = free_mib(root, *node)?;
        need(free >= needed, format!("node {node} has {free} MiB of free memory, {needed} are needed"));
    }
    for name in ["bin/lab-vm", "bin/vnumad", "bin/vnumactl", "kernels", "root.erofs", "tree/usr/bin"] {
        let path = files.join(name);
        need(path.exists(), format!("{}: not found (`make demo` makes it)", path.display()));
    }
    for program in ["taskset", "setsid", "timeout"] {
        need(find_program(program), format!("{program}: not found (packages util-linux, coreutils)"));
    }
    Ok(lacking)
}

fn find_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).exists())
}

/// Memory of a node that is free, or holds files that can be read again, from lines such as
/// `Node 0 MemFree:          123456 kB`.
fn free_mib(root: &Path, node: u32) -> Result<u64> {
    let path = root.join(format!("sys/devices/system/node/node{node}/meminfo"));
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut kib = 0u64;
    for name in ["MemFree", "Active(file)", "Inactive(file)"] {
        let value = |line: &str| Some(line.split_once(&format!(" {name}:"))?.1.trim().to_owned());
        let value = text.lines().find_map(value);
        let value = value.with_context(|| format!("{}: no line {name}", path.display()))?;
        let number = value.strip_suffix(" kB").and_then(|number| number.trim().parse::<u64>().ok());
        let number = number.with_context(|| format!("{}: {name}: {value:?}", path.display()))?;
        kib = kib.saturating_add(number);
    }
    Ok(kib / 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    /// A machine with these nodes, (CPUs, free KiB), and everything else.
    fn machine(nodes: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let all = format!("0-{}\n", nodes.len() - 1);
        write("sys/devices/system/node/online", &all);
        write("sys/devices/system/node/has_memory", &all);
        for (node, (cpus, free)) in nodes.iter().enumerate() {
            write(&format!("sys/devices/system/node/node{node}/cpulist"), cpus);
            let text = format!(
                "Node {node} MemTotal: 9 kB\nNode {node} MemFree:   {free} kB\nNode {node} Active: 9 kB\n\
                 Node {node} Active(file):  1024 kB\nNode {node} Inactive(file): 1024 kB\n"
            );
            write(&format!("sys/devices/system/node/node{node}/meminfo"), &text);
        }
        for name in ["dev/kvm", "dev/vhost-vsock", "sys/kernel/tracing/instances/x", "sys/kernel/debug/kvm/x"]
        {
            write(name, "");
        }
        for name in ["bin/lab-vm", "bin/vnumad", "bin/vnumactl", "kernels/x", "root.erofs", "tree/usr/bin/x"]
        {
            write(&format!("files/{name}"), "");
        }
        let files = root.path().join("files");
        (root, files)
    }

    fn lacks(root: &Path, files: &Path) -> Vec<String> {
        lacking(root, files).unwrap()
    }

    #[test]
    fn a_machine_that_has_all_lacks_nothing_and_others_say_what() {
        let (root, files) = machine(&[("0-1\n", "2000000"), ("2-3\n", "1046528")]);
        assert_eq!(lacks(root.path(), &files), Vec::<String>::new());
        for gone in ["dev/kvm", "dev/vhost-vsock", "files/bin/vnumad", "files/root.erofs"] {
            let (root, files) = machine(&[("0-1\n", "2000000"), ("2-3\n", "1046528")]);
            fs::remove_file(root.path().join(gone)).unwrap();
            let lacks = lacks(root.path(), &files);
            assert!(lacks.len() == 1 && lacks[0].contains(gone.trim_start_matches("files/")), "{lacks:?}");
        }
        for gone in ["sys/kernel/tracing", "sys/kernel/debug"] {
            let (root, files) = machine(&[("0-1\n", "2000000"), ("2-3\n", "1046528")]);
            fs::remove_dir_all(root.path().join(gone)).unwrap();
            let lacks = lacks(root.path(), &files);
            assert!(lacks.len() == 1 && lacks[0].contains(gone), "{lacks:?}");
        }
    }

    #[test]
    fn a_machine_with_one_node_or_little_memory_is_refused() {
        let (root, files) = machine(&[("0-3\n", "2000000"), ("\n", "2000000")]);
        assert_eq!(lacks(root.path(), &files), ["1 nodes have CPUs and memory, 2 are needed"]);
        let (root, files) = machine(&[("0-1\n", "2000000"), ("2-3\n", "1046527")]);
        assert_eq!(lacks(root.path(), &files), ["node 1 has 1023 MiB of free memory, 1024 are needed"]);
        let (root, files) = machine(&[("0-1\n", "2000000"), ("2-3\n", "much")]);
        let error = format!("{:#}", lacking(root.path(), &files).unwrap_err());
        assert!(error.contains("node1/meminfo: MemFree: \"much kB\""), "{error}");
    }

    #[test]
    fn a_qemu_that_nobody_knows_is_ended_and_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        // A shell that waits for input, and has no child that would stay.
        let start = |word: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", "read line", word]).stdin(Stdio::piped()).spawn().unwrap()
        };
        let mine = format!("unix:{}/vm/a/ctl.sock", folder.path().display());
        let (mut mine, mut other) = (start(&mine), start(&mine.replace("vm/a", "vms/a")));
        // Until the shell is there, the process has this one's command line.
        while other.try_wait().unwrap().is_none() && mine.try_wait().unwrap().is_none() {
            end_stragglers(&folder.path().join("vm")).unwrap();
            std::thread::sleep(LOOK_INTERVAL);
        }
        assert!(other.try_wait().unwrap().is_none(), "another process was ended");
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn a_group_is_ended_and_a_signal_is_seen() {
        let mut group = Command::new("sh");
        let mut child = group.args(["-c", "sleep 1000 & sleep 1000"]).process_group(0).spawn().unwrap();
        assert_eq!(wait(&mut child, &AtomicUsize::new(15)).unwrap(), Ended::By(15));
        end_group(&mut child).unwrap();
        assert!(child.try_wait().unwrap().is_some());
        let none = killpg(Pid::from_raw(child.id().try_into().unwrap()), None);
        assert_eq!(none, Err(nix::errno::Errno::ESRCH));
        let mut ends = Command::new("true").spawn().unwrap();
        assert!(matches!(wait(&mut ends, &AtomicUsize::new(0)).unwrap(), Ended::ByItself(_)));
    }
}
