//! Reads what the program in a guest reports, and looks up on which node of the host each page lies.

use crate::guest::STOP;
use crate::locations::Locations;
use crate::pages::Pages;
use crate::record::{Kind, Record};
use anyhow::{Context, Result, ensure};
use std::io::{BufReader, Write};
use std::process::{ChildStdin, ChildStdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use vnuma_scenario::{Monitor, Vm, tsc_offset};

/// Where the guest has the program.
pub const GUEST_PROGRAM: &str = "/root/vnuma-demo";

/// What is known of one page.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Fresh or long-lived.
    pub kind: Kind,
    /// Thread of the vCPU that touched it.
    pub tid: i32,
    /// Before it was touched, by the host's time stamp counter.
    pub before_tsc: u64,
    /// After it.
    pub after_tsc: u64,
    /// Its node; none if it could not be looked up.
    pub node: Option<u32>,
}

impl Sample {
    /// Whether the page was on the node of its vCPU, before it was touched and after. One that could not be looked up was not.
    pub fn is_local(&self, locations: &Locations) -> bool {
        let node_at = |tsc| locations.node(self.tid, tsc);
        self.node.is_some() && [self.before_tsc, self.after_tsc].map(node_at) == [self.node; 2]
    }
}

type Samples = Arc<Mutex<Vec<Sample>>>;

fn locked(samples: &Samples) -> MutexGuard<'_, Vec<Sample>> {
    samples.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks up the pages of one guest, in a thread.
pub struct Checker {
    thread: JoinHandle<Result<()>>,
    samples: Samples,
    stop: Arc<AtomicBool>,
}

impl Checker {
    /// Starts the program in the guest.
    pub fn start(vm: &Vm, seconds: u64) -> Result<Self> {
        let offset = tsc_offset(vm)?;
        let mut lookup = Pages::new(vm.pid, Monitor::connect(&vm.monitor())?);
        let mut program = vm.spawn(&[GUEST_PROGRAM, "touch", "--seconds", &seconds.to_string()])?;
        let answers = program.0.stdin.take().context("no standard input")?;
        let records = BufReader::new(program.0.stdout.take().context("no standard output")?);
        let (threads, name) = (vm.threads.clone(), vm.name.clone());
        let (samples, stop) = (Samples::default(), Arc::<AtomicBool>::default());
        let (found, stops) = (Arc::clone(&samples), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            check_records(records, (answers, &stops), &threads, offset, &mut lookup, &found)
                .with_context(|| format!("looking up the pages of {name}"))?;
            let status = program.0.wait()?;
            ensure!(status.success(), "the program in {name} failed: {status}");
            Ok(())
        });
        Ok(Self { thread, samples, stop })
    }

    /// Lets the program in the guest end before its time.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether the program in the guest has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// One in `step` of the samples from number `first` on, and how many samples there are.
    pub fn some(&self, first: usize, step: usize) -> (Vec<Sample>, usize) {
        let samples = locked(&self.samples);
        (samples.iter().skip(first).step_by(step).copied().collect(), samples.len())
    }

    /// All samples, when the program in the guest has ended.
    pub fn finish(self) -> Result<Vec<Sample>> {
        self.thread.join().expect("a checker panicked")?;
        Ok(std::mem::take(&mut *locked(&self.samples)))
    }
}

fn check_records(
    mut records: BufReader<ChildStdout>,
    (mut answers, stop): (ChildStdin, &AtomicBool),
    threads: &[i32],
    tsc_offset: u64,
    lookup: &mut Pages,
    samples: &Samples,
) -> Result<()> {
    let mut due = Vec::new();
    while let Some(record) = Record::read(&mut records)? {
        let tid = *threads.get(record.apic_id as usize).with_context(|| {
            format!("the guest names APIC id {}, the VM has {} vCPUs", record.apic_id, threads.len())
        })?;
        let gpas: Vec<u64> = record.pages.iter().map(|page| page.gpa).collect();
        let nodes = lookup.nodes(&gpas)?;
        locked(samples).extend(record.pages.iter().zip(nodes).map(|(page, node)| Sample {
            kind: record.kind,
            tid,
            before_tsc: page.before_tsc.wrapping_sub(tsc_offset),
            after_tsc: page.after_tsc.wrapping_sub(tsc_offset),
            node,
        }));
        if record.kind == Kind::Fresh {
            due.extend(record.apic_id.to_le_bytes());
        }
        if stop.swap(false, Ordering::Relaxed) {
            due.extend(STOP.to_le_bytes());
        }
        // Answers go together, as each write to a guest is dear; none waits for a record that is not there yet.
        if records.buffer().is_empty() {
            // At its end the guest program no longer reads answers.
            let _ = answers.write_all(&due);
            due.clear();
        }
    }
    Ok(())
}
