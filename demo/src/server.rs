//! The commands of the lab server that the demonstration uses.

use crate::pages::Monitor;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Runs a command to its end and returns its standard output.
pub fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let shown = || format!("{program} {}", arguments.join(" "));
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().with_context(shown)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}\n{text}{error}", shown(), output.status);
    Ok(text)
}

/// A process that is killed when the demonstration ends, however it ends.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

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

impl Vm {
    /// Boots it.
    pub fn start(name: &str, shape: &[String]) -> Result<Self> {
        let mut arguments = vec!["start", name];
        arguments.extend(shape.iter().map(String::as_str));
        output("lab-vm", &arguments)?;
        let directory = Path::new("/run/lab-vm").join(name);
        let pid = fs::read_to_string(directory.join("pid")).context("pid of the VM")?.trim().parse()?;
        Ok(Self { name: name.to_owned(), pid, threads: vcpu_threads(pid)?, directory })
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

    /// A monitor of its QEMU that vnumad does not use.
    pub fn monitor(&self) -> Result<Monitor> {
        Monitor::connect(&self.directory.join("ctl.sock"))
    }

    /// What its time stamp counter shows beyond the host's.
    pub fn tsc_offset(&self) -> Result<u64> {
        let kvm = "/sys/kernel/debug/kvm";
        let prefix = format!("{}-", self.pid);
        let mut offsets = Vec::new();
        for entry in fs::read_dir(kvm).context(kvm)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                for vcpu in 0..self.threads.len() {
                    let path = entry.path().join(format!("vcpu{vcpu}/tsc-offset"));
                    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                    offsets.push(text.trim().parse::<i64>().with_context(|| path.display().to_string())?);
                }
            }
        }
        let first = *offsets.first().with_context(|| format!("no VM of process {} in {kvm}", self.pid))?;
        ensure!(
            offsets.iter().all(|offset| *offset == first),
            "vCPUs with different TSC offsets: {offsets:?}"
        );
        Ok(first.cast_unsigned())
    }

    /// Counters of the guest kernel's AutoNUMA: (name, value).
    pub fn autonuma(&self) -> Result<Vec<(String, u64)>> {
        let text = self.exec(&["cat", "/proc/vmstat"])?;
        let counters = text.lines().filter_map(|line| line.split_once(' '));
        Ok(counters
            .filter(|(name, _)| name.starts_with("numa_hint_faults") || *name == "numa_pages_migrated")
            .filter_map(|(name, value)| Some((name.to_owned(), value.trim().parse().ok()?)))
            .collect())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Err(error) = output("lab-vm", &["stop", &self.name]) {
            eprintln!("{error:#}");
        }
    }
}

/// What `vnumactl ... --json` prints.
pub fn vnumactl(arguments: &[&str]) -> Result<Value> {
    let text = output("vnumactl", &[arguments, &["--json"]].concat())?;
    serde_json::from_str(&text).with_context(|| format!("vnumactl {}: {text:?}", arguments.join(" ")))
}

/// Waits until `ready` says so.
pub fn wait_for(what: &str, limit: Duration, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + limit;
    while !ready()? {
        if Instant::now() > end {
            bail!("{what}: not within {} s", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}
