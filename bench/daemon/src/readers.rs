//! Clients of the API that send requests without end. Most ask for a VM, and now and then for all; some watch events. Other rows
//! have clients that scrape metrics.

use crate::{daemon::Daemon, vms};
use serde::{Deserialize, Serialize};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use vnuma_api::{METRICS, VMS, vm_path};
use vnuma_client::{Bytes, Error, Method, blocking::Connection};

/// How many there are, and what they ask for.
#[derive(Clone, Copy, Serialize)]
pub struct Configuration {
    pub askers: usize,
    pub watchers: usize,
    /// Each asker asks for one VM so often,
    pub vm_every_ms: u64,
    /// and for all of them so often.
    pub list_every_ms: u64,
}

pub const CONFIGURATION: Configuration =
    Configuration { askers: 48, watchers: 2, vm_every_ms: 100, list_every_ms: 10_000 };

/// Of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clients {
    /// [`CONFIGURATION`].
    #[default]
    Readers,
    /// [`SCRAPERS`].
    Scrapers,
}

/// How many scrape metrics, each so often: 100 times a second together.
pub const SCRAPERS: (usize, Duration) = (10, Duration::from_millis(100));

/// How long a watcher waits for an event before it looks whether it is to end.
const LOOK: Duration = Duration::from_millis(200);

/// They end when this is dropped.
pub struct Readers {
    stop: Arc<AtomicBool>,
    askers: Vec<JoinHandle<anyhow::Result<Vec<f64>>>>,
    watchers: Vec<JoinHandle<u64>>,
}

impl Readers {
    pub fn start(daemon: &Daemon, vms: usize, clients: Clients) -> anyhow::Result<Self> {
        let (mut askers, stop) = (Vec::new(), Arc::new(AtomicBool::new(false)));
        if clients == Clients::Scrapers {
            for number in 0..SCRAPERS.0 {
                let (client, stop) = (daemon.connect()?, Arc::clone(&stop));
                askers.push(thread::spawn(move || scrape(client, number, vms, &stop)));
            }
            return Ok(Self { stop, askers, watchers: Vec::new() });
        }
        for number in 0..CONFIGURATION.askers {
            let (client, stop) = (daemon.connect()?, Arc::clone(&stop));
            askers.push(thread::spawn(move || ask(client, number, vms, &stop)));
        }
        let mut watchers = Vec::new();
        for _ in 0..CONFIGURATION.watchers {
            let (mut lines, stop) = (daemon.client()?.watch(&[])?.within(LOOK), Arc::clone(&stop));
            watchers.push(thread::spawn(move || {
                let mut seen = 0;
                while !stop.load(Ordering::Relaxed) {
                    match lines.line() {
                        Ok(_) => seen += 1,
                        Err(Error::TimedOut { .. }) => {}
                        Err(_) => break,
                    }
                }
                seen
            }));
        }
        Ok(Self { stop, askers, watchers })
    }

    /// Ends them. Milliseconds that each answer about one VM took, or each scrape.
    pub fn stop(mut self) -> anyhow::Result<Vec<f64>> {
        self.end();
        let mut answers = Vec::new();
        for asker in self.askers.drain(..) {
            answers.extend(asker.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??);
        }
        for watcher in self.watchers.drain(..) {
            let seen = watcher.join().map_err(|_| anyhow::anyhow!("a watcher panicked"))?;
            anyhow::ensure!(seen > 0, "a watcher saw no event");
        }
        Ok(answers)
    }

    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.end();
    }
}

fn ask(mut client: Connection, number: usize, vms: usize, stop: &AtomicBool) -> anyhow::Result<Vec<f64>> {
    let every = Duration::from_millis(CONFIGURATION.vm_every_ms);
    let lists = Duration::from_millis(CONFIGURATION.list_every_ms);
    // Spread over the interval, as those of many people are.
    let share = |whole: Duration| whole * number as u32 / CONFIGURATION.askers as u32;
    let (mut next, mut list_at) = (Instant::now() + share(every), Instant::now() + share(lists));
    let (mut turn, mut answers) = (number, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next += every;
        let begin = Instant::now();
        get(&mut client, &vm_path(&vms::name(turn % vms), None))?;
        answers.push(begin.elapsed().as_secs_f64() * 1e3);
        turn += CONFIGURATION.askers;
        if list_at <= Instant::now() {
            list_at += lists;
            get(&mut client, VMS)?;
        }
    }
    Ok(answers)
}

/// What is answered, unread: these stand for clients on other CPUs.
fn get(client: &mut Connection, path: &str) -> anyhow::Result<Bytes> {
    let answer = client.send(Method::GET, path, "")?;
    let text = || String::from_utf8_lossy(&answer.body);
    anyhow::ensure!(answer.status == 200, "{path}: {}: {}", answer.status, text());
    Ok(answer.body)
}

/// Scrapes metrics, and looks whether all VMs are in them.
fn scrape(mut client: Connection, number: usize, vms: usize, stop: &AtomicBool) -> anyhow::Result<Vec<f64>> {
    let (count, every) = SCRAPERS;
    let last = format!("vm=\"{}\"", vms::name(vms - 1));
    let (mut next, mut answers) = (Instant::now() + every * number as u32 / count as u32, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next += every;
        let begin = Instant::now();
        let text = get(&mut client, METRICS)?;
        answers.push(begin.elapsed().as_secs_f64() * 1e3);
        let complete = text.windows(last.len()).any(|part| part == last.as_bytes());
        anyhow::ensure!(complete, "metrics without {last}");
    }
    Ok(answers)
}
