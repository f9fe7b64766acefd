//! The QMP client of the lab, of tests and of benchmarks. vnumad has its own, which trusts no QEMU and has other limits.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value, json};

/// How long QEMU may take for an answer; under emulation seconds happen.
pub const LIMIT: Duration = Duration::from_secs(30);
/// Longest line that is read.
const MOST_BYTES: u64 = 4 << 20;

/// A connection to a monitor.
pub struct Qmp {
    reader: BufReader<File>,
    writer: File,
    /// Number of the last command.
    last: u64,
    /// Events that came.
    events: Vec<Value>,
    limit: Duration,
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
    ///
    /// # Errors
    ///
    /// No process listens there, or it is no monitor.
    pub fn connect(path: &Path) -> Result<Self> {
        Self::connect_within(path, LIMIT)
    }

    /// The same of a QEMU that may take so long for each answer.
    ///
    /// # Errors
    ///
    /// No process listens there, or it is no monitor.
    pub fn connect_within(path: &Path, limit: Duration) -> Result<Self> {
        let open = || -> Result<Self> {
            let stream = UnixStream::connect(path)?;
            stream.set_write_timeout(Some(limit))?;
            let mut qmp = Self::new(File::from(OwnedFd::from(stream)), limit)?;
            let greeting = qmp.read()?;
            if greeting.get("QMP").is_none() {
                bail!("unexpected greeting {greeting}");
            }
            qmp.run("qmp_capabilities")?;
            Ok(qmp)
        };
        open().with_context(|| path.display().to_string())
    }

    /// Opens a port that stays connected to a monitor when clients come and go. Only one at a time can; others wait.
    ///
    /// # Errors
    ///
    /// It is in use for too long, or leads to no monitor.
    pub fn open_port(path: &Path) -> Result<Self> {
        let started = Instant::now();
        let port = loop {
            match File::options().read(true).write(true).open(path) {
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                    ensure!(started.elapsed() < LIMIT, "{}: it is in use", path.display());
                    std::thread::sleep(Duration::from_millis(50));
                }
                result => break result.with_context(|| path.display().to_string())?,
            }
        };
        let mut qmp = Self::new(port, LIMIT)?;
        // A monitor that an earlier client negotiated with refuses this.
        let _ = qmp.run("qmp_capabilities");
        qmp.run("query-status").with_context(|| path.display().to_string())?;
        qmp.events.clear();
        Ok(qmp)
    }

    fn new(file: File, limit: Duration) -> Result<Self> {
        // Answers to what an earlier client of a port asked have other numbers.
        let last = u64::from(std::process::id()) << 32;
        Ok(Self { reader: BufReader::new(file.try_clone()?), writer: file, last, events: Vec::new(), limit })
    }

    /// Runs a command that takes no arguments.
    ///
    /// # Errors
    ///
    /// QEMU refuses it or does not answer in time.
    pub fn run(&mut self, command: &str) -> Result<Value> {
        self.execute(&json!({ "execute": command }))
    }

    /// Runs a command with arguments.
    ///
    /// # Errors
    ///
    /// QEMU refuses it or does not answer in time.
    pub fn run_with(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        self.execute(&json!({ "execute": command, "arguments": arguments }))
    }

    /// Runs a command as QMP has it, and returns its answer. Events are kept.
    ///
    /// # Errors
    ///
    /// QEMU refuses it or does not answer in time.
    pub fn execute(&mut self, command: &Value) -> Result<Value> {
        let name = || command["execute"].as_str().unwrap_or_default().to_owned();
        self.last += 1;
        let mut line = command.clone();
        line["id"] = self.last.into();
        self.writer.write_all(format!("{line}\n").as_bytes()).with_context(name)?;
        loop {
            let mut answer = self.read().with_context(name)?;
            if answer.get("event").is_some() {
                self.events.push(answer);
            } else if answer.get("id").and_then(Value::as_u64) != Some(self.last) {
                continue;
            } else if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            } else if let Some(error) = answer.get("error") {
                let reason = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
                bail!("{}: {reason}", name());
            }
        }
    }

    /// Waits for an event, which may have come already.
    ///
    /// # Errors
    ///
    /// It does not come in time.
    pub fn await_event(&mut self, event: &str) -> Result<()> {
        self.await_event_where(|seen| seen["event"] == event)
            .map(drop)
            .with_context(|| format!("waiting for {event}"))
    }

    /// Waits for the first event of a kind, which may have come already.
    ///
    /// # Errors
    ///
    /// It does not come in time.
    pub fn await_event_where(&mut self, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        loop {
            if let Some(position) = self.events.iter().position(&wanted) {
                return Ok(self.events.swap_remove(position));
            }
            let line = self.read()?;
            if line.get("event").is_some() {
                self.events.push(line);
            }
        }
    }

    /// The vCPUs and their threads.
    ///
    /// # Errors
    ///
    /// QEMU does not answer, or something else.
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
        if self.reader.buffer().is_empty() {
            let mut polled = [PollFd::new(self.writer.as_fd(), PollFlags::POLLIN)];
            let limit = PollTimeout::try_from(self.limit)?;
            ensure!(poll(&mut polled, limit)? > 0, "no answer within {:?}", self.limit);
        }
        let mut line = String::new();
        let length = (&mut self.reader).take(MOST_BYTES).read_line(&mut line)?;
        if length == 0 {
            bail!("the monitor closed the connection");
        }
        serde_json::from_str(&line).with_context(|| format!("no JSON: {}", line.trim()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::net::UnixListener, thread};

    #[test]
    fn events_and_late_answers_are_no_answers() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("qmp.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let say = |line: Value| (&stream).write_all(format!("{line}\n").as_bytes()).unwrap();
            say(json!({"QMP": {}}));
            for line in BufReader::new(&stream).lines() {
                let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
                let id = &command["id"];
                say(json!({"event": "STOP"}));
                say(json!({"return": "late", "id": 1}));
                match command["execute"].as_str() {
                    Some("nonsense") => say(json!({"error": {"desc": "x"}, "id": id})),
                    Some("silence") => {}
                    name => say(json!({"return": name, "id": id})),
                }
            }
        });
        let mut qmp = Qmp::connect_within(&socket, Duration::from_millis(500)).unwrap();
        assert_eq!(qmp.run("query-status").unwrap(), "query-status");
        assert_eq!(qmp.run("nonsense").unwrap_err().to_string(), "nonsense: x");
        let silent = format!("{:#}", qmp.run("silence").unwrap_err());
        assert!(silent.contains("no answer within 500ms"), "{silent}");
        qmp.await_event("STOP").unwrap();
    }
}
