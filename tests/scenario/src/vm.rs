//! VMs of the lab server, through `lab-vm`.

use crate::HANG_LIMIT;
use crate::place;
use crate::process::{Process, output, vnumactl, wait_for};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Threads that run the vCPUs of a QEMU process, in order of the vCPU's index. One
/// socket per vCPU makes the index the APIC id.
pub fn vcpu_threads(pid: i32) -> Result<Vec<i32>> {
    let directory = format!("/proc/{pid}/task");
    let mut threads = Vec::new();
    for entry in fs::read_dir(&directory).with_context(|| directory.clone())? {
        let entry = entry?;
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let index = name.trim().strip_prefix("CPU ").and_then(|name| name.strip_suffix("/KVM"));
        if let Some(index) = index.and_then(|index| index.parse::<u32>().ok()) {
            let tid = entry.file_name().to_string_lossy().parse::<i32>()?;
            threads.push((index, tid));
        }
    }
    threads.sort_unstable();
    ensure!(
        threads.iter().map(|(index, _)| *index).eq(0..threads.len() as u32),
        "the vCPU threads of process {pid} are not numbered from 0: {threads:?}"
    );
    Ok(threads.into_iter().map(|(_, tid)| tid).collect())
}

/// Lines of a console that an error shows: a report of a stalled CPU has some forty.
const CONSOLE_LINES: usize = 60;

/// Whether a kernel with this console has panicked.
fn shows_panic(console: &str) -> bool {
    console.contains("Kernel panic - not syncing")
}

/// A VM of the lab server.
pub struct Vm {
    /// Its name.
    pub name: String,
    /// QEMU's process.
    pub pid: i32,
    /// vCPU threads by APIC id.
    pub threads: Vec<i32>,
    directory: PathBuf,
}

/// Why a guest that was not up yet may be booted once more. Under emulation its kernel panics now and then, when a CPU runs code that
/// another one patches, or a CPU stands still, as it misses an interrupt. Nothing of vnuma is in the guest by then.
fn boots_again(error: &str) -> Option<&'static str> {
    let reasons = [
        (shows_panic(error), "its kernel panicked"),
        (error.contains("a vCPU stands still"), "a vCPU stands still"),
    ];
    let reason = reasons.iter().find(|(is_it, _)| *is_it && error.contains("did not start"));
    reason.map(|(_, reason)| *reason)
}

impl Vm {
    /// Boots it.
    pub fn start(name: &str, shape: &[String]) -> Result<Self> {
        Self::start_under(&[], name, shape)
    }

    /// Boots it by a command that starts another one, such as `numactl`: its QEMU inherits what that sets.
    pub fn start_under(command: &[&str], name: &str, shape: &[String]) -> Result<Self> {
        let mut words = [command, &["lab-vm", "start", name]].concat();
        words.extend(shape.iter().map(String::as_str));
        let start = || output(words[0], &words[1..]);
        let started = start();
        let again = started.as_ref().err().map(|error| format!("{error:#}"));
        match (again.as_deref().and_then(boots_again), started) {
            (Some(reason), Err(error)) => {
                // As the runner says it of servers, by which it is counted.
                println!("lab: guest {name} did not boot ({reason}); trying once more\n{error:#}");
                start()?;
            }
            (_, Err(error)) if format!("{error:#}").contains("no end within") => {
                let _ = output("lab-vm", &["stop", name]); // The killed lab-vm has cleaned nothing up.
                return Err(error);
            }
            (_, started) => drop(started?),
        }
        let directory = place::vm(name);
        let pid = fs::read_to_string(directory.join("pid")).context("pid of the VM")?.trim().parse()?;
        Ok(Self { name: name.to_owned(), pid, threads: vcpu_threads(pid)?, directory })
    }

    /// Makes the directory of a VM that somebody else starts: QEMU's monitor `ctl.sock` and the console `console.log` belong there,
    /// and the VM has this context id.
    pub fn prepare(name: &str, cid: u32) -> Result<PathBuf> {
        let directory = place::vm(name);
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        fs::write(directory.join("cid"), cid.to_string()).context("context id of the VM")?;
        Ok(directory)
    }

    /// The VM of a prepared directory, by its process, once its agent answers.
    pub fn started(name: &str, pid: i32) -> Result<Self> {
        let directory = place::vm(name);
        fs::write(directory.join("pid"), pid.to_string()).context("pid of the VM")?;
        let vm = Self { name: name.to_owned(), pid, threads: vcpu_threads(pid)?, directory };
        let answers = || Ok(vm.exec(&["true"]).is_ok());
        wait_for("the guest's agent to answer", HANG_LIMIT, answers).with_context(|| vm.end_of_console())?;
        Ok(vm)
    }

    /// Boots several at the same time, each given by name and shape. The first failure ends those that came up.
    pub fn start_all(vms: &[(&str, &[String])]) -> Result<Vec<Self>> {
        std::thread::scope(|scope| {
            let starts: Vec<_> =
                vms.iter().map(|(name, shape)| scope.spawn(move || Self::start(name, shape))).collect();
            let started: Vec<_> = starts.into_iter().map(|start| start.join()).collect();
            started.into_iter().map(|vm| vm.unwrap_or_else(|_| bail!("a start panicked"))).collect()
        })
    }

    /// Runs a command in it to the end.
    pub fn exec(&self, command: &[&str]) -> Result<String> {
        output("lab-vm", &[&["exec", &self.name, "--"], command].concat())
    }

    /// Puts a file into it.
    pub fn put(&self, source: &str, destination: &str) -> Result<()> {
        output("lab-vm", &["put", &self.name, source, destination]).map(drop)
    }

    /// Starts a command in it whose input and output are pipes.
    pub fn spawn(&self, command: &[&str]) -> Result<Process> {
        let child = Command::new("lab-vm")
            .args(["exec", &self.name, "--"])
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("lab-vm exec")?;
        Ok(Process(child))
    }

    /// Waits until vnumad knows all about it.
    pub fn await_found(&self) -> Result<()> {
        wait_for("vnumad to find the VM", HANG_LIMIT, || {
            Ok(vnumactl(&["show", &self.name]).is_ok_and(|shown| shown["described"] == true))
        })
    }

    /// Plugs the channel as soon as vnumad can.
    pub fn attach(&self) -> Result<()> {
        self.await_found()?;
        vnumactl(&["attach", &self.name]).map(drop)
    }

    /// Waits until its driver has taken the topology over.
    pub fn await_driver(&self) -> Result<()> {
        wait_for("the guest to take its topology over", HANG_LIMIT, || {
            let updates = self.exec(&["cat", "/sys/class/misc/vnuma/updates"]);
            Ok(updates.is_ok_and(|count| count.trim() != "0"))
        })
    }

    /// Whether its kernel has panicked, by its console.
    pub fn has_panicked(&self) -> bool {
        output("lab-vm", &["log", &self.name]).is_ok_and(|console| shows_panic(&console))
    }

    /// The end of its console with its name before each line: what its kernel said last.
    pub fn end_of_console(&self) -> String {
        let console = output("lab-vm", &["log", &self.name]).unwrap_or_else(|error| format!("{error:#}"));
        let lines: Vec<_> = console.lines().collect();
        let end = lines[lines.len().saturating_sub(CONSOLE_LINES)..].iter();
        end.map(|line| format!("{}: {}", self.name, line.trim_end())).collect::<Vec<_>>().join("\n")
    }

    /// Socket of a QEMU monitor that vnumad does not use.
    pub fn monitor(&self) -> PathBuf {
        self.directory.join("ctl.sock")
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Err(error) = output("lab-vm", &["stop", &self.name]) {
            eprintln!("{error:#}");
        }
    }
}

/// What the time stamp counter of a VM shows beyond the host's.
pub fn tsc_offset(vm: &Vm) -> Result<u64> {
    let kvm = "/sys/kernel/debug/kvm";
    let prefix = format!("{}-", vm.pid);
    let mut offsets = Vec::new();
    for entry in fs::read_dir(kvm).context(kvm)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            for vcpu in 0..vm.threads.len() {
                let path = entry.path().join(format!("vcpu{vcpu}/tsc-offset"));
                let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                offsets.push(text.trim().parse::<i64>().with_context(|| path.display().to_string())?);
            }
        }
    }
    let first = *offsets.first().with_context(|| format!("no VM of process {} in {kvm}", vm.pid))?;
    ensure!(offsets.iter().all(|offset| *offset == first), "vCPUs with different TSC offsets: {offsets:?}");
    Ok(first.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_happens_before_a_guest_is_up_is_tried_again() {
        let panic = "Kernel panic - not syncing: Fatal exception in interrupt";
        let start = "lab-vm start a: exit status: 125\nlab-vm: VM \"a\" did not start: ";
        let panicked = boots_again(&format!("{start}QEMU has ended\n[ 7.6] {panic}\n"));
        assert_eq!(panicked, Some("its kernel panicked"));
        assert_eq!(boots_again(&format!("{start}a vCPU stands still\n")), Some("a vCPU stands still"));
        assert_eq!(boots_again(&format!("{start}QEMU has ended\n(the console is empty)\n")), None);
        assert_eq!(boots_again(&format!("lab-vm exec a: {panic}")), None);
    }

    #[test]
    fn a_console_shows_a_panic_by_the_kernel_s_own_line() {
        let panic = "[   31.52] BUG: unable to handle page fault\n\
                     [   31.60] Kernel panic - not syncing: Fatal exception in interrupt\n";
        assert!(shows_panic(panic));
        for other in [
            "",
            "[    0.00] Kernel command line: console=ttyS0 quiet panic=-1\n",
            "[   9.1] Oops: 0002 [#1] SMP\n",
        ] {
            assert!(!shows_panic(other), "{other}");
        }
    }
}
