//! Updates of the guests' topologies, as `vnumactl watch` prints them.

use anyhow::{Context, Result};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use vnuma_scenario::{Process, vnumactl_command};

/// A generation that a guest took over.
pub struct Update {
    pub vm: String,
    /// Of the change on the host; of the first one if it has several. `CLOCK_MONOTONIC`, as the next one.
    pub changed_ns: u64,
    /// Of the guest's acknowledgement.
    pub acknowledged_ns: u64,
    /// Between the change on the host and the acknowledgement, in milliseconds.
    pub since_change_ms: f64,
    /// Between the publication and the acknowledgement, in milliseconds.
    pub since_publication_ms: f64,
}

/// Collects what `vnumactl watch` prints.
pub struct Updates {
    process: Process,
    events: Arc<Mutex<Vec<Value>>>,
    thread: JoinHandle<()>,
}

impl Updates {
    /// Begins to listen to vnumad.
    pub fn watch() -> Result<Self> {
        let child = vnumactl_command(&["watch", "--json"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("vnumactl watch")?;
        let mut process = Process(child);
        let lines = BufReader::new(process.0.stdout.take().context("no standard output")?).lines();
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&events);
        let thread = std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Ok(event) = serde_json::from_str::<Value>(&line)
                    && event["event"] == "acknowledged"
                {
                    seen.lock().expect("poisoned").push(event);
                }
            }
        });
        Ok(Self { process, events, thread })
    }

    /// How many there were so far.
    pub fn count(&self) -> usize {
        self.events.lock().expect("poisoned").len()
    }

    /// Those of one VM.
    pub fn finish(self, vm: &str) -> Result<Vec<Update>> {
        drop(self.process);
        self.thread.join().expect("the reader panicked");
        let events = self.events.lock().expect("poisoned");
        let updates = events.iter().map(Update::read).collect::<Result<Vec<_>>>()?;
        Ok(updates.into_iter().filter(|update| update.vm == vm).collect())
    }
}

impl Update {
    fn read(event: &Value) -> Result<Self> {
        let field =
            |name: &str| event[name].as_u64().with_context(|| format!("event without {name}: {event}"));
        let acknowledged = field("acknowledged_ns")?;
        let since = |name: &str| -> Result<f64> {
            let since = acknowledged.checked_sub(field(name)?);
            Ok(since.with_context(|| format!("acknowledged before {name}: {event}"))? as f64 / 1e6)
        };
        Ok(Self {
            vm: event["vm"].as_str().unwrap_or_default().to_owned(),
            changed_ns: field("changed_ns")?,
            acknowledged_ns: acknowledged,
            since_change_ms: since("changed_ns")?,
            since_publication_ms: since("published_ns")?,
        })
    }
}
