//! A QEMU monitor that vnumad does not use, [`Vm::monitor`](crate::Vm::monitor).

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// A connection to a QEMU monitor.
pub struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects and leaves the negotiation mode.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut monitor = Self { stream: BufReader::new(stream) };
        monitor.read()?;
        monitor.execute(&json!({"execute": "qmp_capabilities"}))?;
        Ok(monitor)
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        (&mut self.stream).take(MAX_ANSWER_BYTES).read_line(&mut line).context("no answer from QEMU")?;
        serde_json::from_str(&line).with_context(|| format!("QEMU answered {line:?}"))
    }

    /// Runs a command and gives its answer; events are passed over.
    pub fn execute(&mut self, command: &Value) -> Result<Value> {
        self.stream.get_mut().write_all(format!("{command}\n").as_bytes())?;
        loop {
            let answer = self.read()?;
            if let Some(value) = answer.get("return") {
                return Ok(value.clone());
            }
            if let Some(error) = answer.get("error") {
                bail!("QEMU refused {command}: {error}");
            }
        }
    }
}
