//! A small QMP client for the monitor that only lab-vm uses.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// How long QEMU may take for an answer; under emulation seconds happen.
const LIMIT: Duration = Duration::from_secs(30);
/// Longest line that is read.
const MOST_BYTES: u64 = 4 << 20;

/// A connection to a monitor.
pub struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    /// Names of the events that came.
    events: Vec<String>,
}

/// A vCPU and its thread.
pub struct VcpuThread {
    /// Index of the vCPU.
    pub index: usize,
    /// Number of the thread.
    pub tid: i32,
}

impl Qmp {
    /// Connects to the socket.
    pub fn connect(path: &Path) -> Result<Self> {
        let open = || -> Result<Self> {
            let writer = UnixStream::connect(path)?;
            writer.set_read_timeout(Some(LIMIT))?;
            writer.set_write_timeout(Some(LIMIT))?;
            let mut qmp = Self { reader: BufReader::new(writer.try_clone()?), writer, events: Vec::new() };
            let greeting = qmp.read()?;
            if greeting.get("QMP").is_none() {
                bail!("unexpected greeting {greeting}");
            }
            qmp.run("qmp_capabilities")?;
            Ok(qmp)
        };
        open().with_context(|| path.display().to_string())
    }

    /// Runs a command that takes no arguments.
    pub fn run(&mut self, command: &str) -> Result<Value> {
        self.run_with(command, &json!({}))
    }

    /// Runs a command with arguments.
    pub fn run_with(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.writer.write_all(line.as_bytes()).with_context(|| command.to_owned())?;
        loop {
            let mut answer = self.read().with_context(|| command.to_owned())?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                bail!(
                    "{command}: {}",
                    error.get("desc").and_then(Value::as_str).unwrap_or("no reason given")
                );
            }
            if let Some(event) = answer.get("event").and_then(Value::as_str) {
                self.events.push(event.to_owned());
            }
        }
    }

    /// Waits for an event, which may have come already.
    pub fn await_event(&mut self, event: &str) -> Result<()> {
        while !self.events.iter().any(|seen| seen == event) {
            let line = self.read().with_context(|| format!("waiting for {event}"))?;
            if let Some(event) = line.get("event").and_then(Value::as_str) {
                self.events.push(event.to_owned());
            }
        }
        Ok(())
    }

    /// The vCPUs and their threads.
    pub fn vcpu_threads(&mut self) -> Result<Vec<VcpuThread>> {
        let answer = self.run("query-cpus-fast")?;
        let thread = |cpu: &Value| {
            let index = usize::try_from(cpu.get("cpu-index")?.as_u64()?).ok()?;
            let tid = i32::try_from(cpu.get("thread-id")?.as_u64()?).ok()?;
            Some(VcpuThread { index, tid })
        };
        let threads: Option<Vec<_>> =
            answer.as_array().map(|cpus| cpus.iter().map(thread).collect()).unwrap_or(None);
        threads.with_context(|| format!("query-cpus-fast: unexpected answer {answer}"))
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        let length = (&mut self.reader).take(MOST_BYTES).read_line(&mut line)?;
        if length == 0 {
            bail!("the monitor closed the connection");
        }
        serde_json::from_str(&line).with_context(|| format!("no JSON: {}", line.trim()))
    }
}
