//! The least that a remote page fault costs: a fault, a request, a page, and nothing of a protocol.

use crate::{
    peer::{Ask, Kind, connect},
    report::{Quantiles, Row},
    spent::{cpu_ns, sleeps},
    transport::exchange,
};
use anyhow::{Result, anyhow};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{Body, HEADER, PAGE_SIZE};
use vnuma_dsm_pager::{Access, Follower, Options, Placement, Region};
use vnuma_dsm_transport::{Lane, Waiter};

const PAGES: usize = 256;
/// Bytes of a request.
pub const REQUEST: usize = 32;

/// Faults of the calling thread, each on a page that has been here before.
fn faults(region: &Region, rounds: usize) -> Result<(Vec<Duration>, Duration)> {
    let address = region.guest().as_ptr();
    let mut samples = Vec::with_capacity(rounds);
    let begin = Instant::now();
    for round in 0..rounds + PAGES {
        let page = round % PAGES;
        let start = Instant::now();
        // SAFETY: a byte of the region, which lives as long as this call; it is not written to while it is mapped.
        let byte = unsafe { address.add(page * PAGE_SIZE).read_volatile() };
        let taken = start.elapsed();
        anyhow::ensure!(byte == 0x5a, "page {page} begins with {byte:#x}");
        if round >= PAGES {
            samples.push(taken);
        }
        region.invalidate(page as u64, |_| ())?;
    }
    Ok((samples, begin.elapsed()))
}

/// Without any transport: the handler has the page.
pub fn local(rounds: usize) -> Result<Quantiles> {
    let region = Region::create(PAGES * PAGE_SIZE, Options::default())?;
    let over = AtomicBool::new(false);
    let handle = || -> Result<()> {
        let (mut place, mut new, mut waiter) = (Follower::new(Placement::Follow), Vec::new(), Waiter::new()?);
        while !over.load(Ordering::Relaxed) {
            waiter.wait(&mut [], &[region.shard_fd(0)], Duration::from_millis(20), Duration::ZERO)?;
            region.read_faults(0, &mut new)?;
            for fault in new.drain(..) {
                place.saw(fault.thread);
                // A page that is there already needs nothing.
                let _ = region.install(fault.page, &[0x5a; PAGE_SIZE], Access::Read);
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let handler = scope.spawn(handle);
        let outcome = faults(&region, rounds);
        over.store(true, Ordering::Relaxed);
        handler.join().map_err(|_| anyhow!("the handler panicked"))??;
        Ok(Quantiles::of(&outcome?.0))
    })
}

/// Page faults of which the page comes from a peer. One thread serves the faults and the lane, as a node's thread for a shard
/// does; it sleeps, and only the peer polls.
pub struct Floor {
    region: Arc<Region>,
    stop: Arc<AtomicBool>,
    node: thread::JoinHandle<Result<()>>,
}

impl Floor {
    /// With a peer of its own.
    pub fn begin(kind: Kind) -> Result<Self> {
        Self::over(connect(kind, Duration::ZERO)?)
    }

    fn over(lane: Lane) -> Result<Self> {
        let region = Arc::new(Region::create(PAGES * PAGE_SIZE, Options::default())?);
        let stop = Arc::new(AtomicBool::new(false));
        let (told, served) = (Arc::clone(&stop), Arc::clone(&region));
        let node = thread::spawn(move || node(&served, lane, &told));
        Ok(Self { region, stop, node })
    }

    /// A fault on each page.
    pub fn pass(&self) -> Result<Vec<Duration>> {
        Ok(faults(&self.region, PAGES)?.0)
    }

    /// Ends the threads.
    pub fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.node.join().map_err(|_| anyhow!("the node panicked"))?
    }
}

/// The floor alone.
pub fn remote(kind: Kind, rounds: usize, spin: Duration) -> Result<Row> {
    let mut lane = connect(kind, spin)?;
    let mut request = [0; REQUEST];
    request[0] = Ask::Page as u8;
    let exchange_us = exchange(&mut lane, &request, rounds, Duration::ZERO)?;
    let floor = Floor::over(lane)?;
    let (cpu, slept) = (cpu_ns()?, sleeps()?);
    let (samples, taken) = faults(&floor.region, rounds)?;
    let each = |before, after| (after - before) as f64 / (rounds + PAGES) as f64;
    let (cpu_us, sleeps) = (each(cpu, cpu_ns()?) / 1000.0, each(slept, sleeps()?));
    floor.end()?;
    let Quantiles { p50, p90, p99, samples } = Quantiles::of(&samples);
    Ok(Row {
        transport: kind.name(),
        mode: "floor",
        access: None,
        threads: 1,
        p50_us: p50,
        p90_us: p90,
        p99_us: p99,
        floor_us: None,
        faults_per_s: (samples + PAGES) as f64 / taken.as_secs_f64(),
        messages: 2.0,
        bytes: (2 * HEADER + REQUEST + PAGE_SIZE) as f64,
        cpu_us,
        cpu_measured_us: None,
        sleeps,
        spin_us: spin.as_micros() as u64,
        exchange_us: Some(exchange_us),
    })
}

fn node(region: &Region, mut lane: Lane, stop: &AtomicBool) -> Result<()> {
    let mut request = [0; REQUEST];
    request[0] = Ask::Page as u8;
    let (mut waiting, mut new, mut waiter) = (Vec::new(), Vec::new(), Waiter::new()?);
    while !stop.load(Ordering::Relaxed) {
        let descriptors = [region.shard_fd(0)];
        let ready = waiter.wait(&mut [&mut lane], &descriptors, Duration::from_millis(20), Duration::ZERO)?;
        if !ready.others.is_empty() {
            new.clear();
            region.read_faults(0, &mut new)?;
            for fault in &new {
                waiting.push(fault.page);
                lane.send(&Body::Opaque(&request), 0)?;
            }
        }
        if !ready.lanes.is_empty() {
            lane.flush()?;
            let mut failed = None;
            lane.receive(|_, body| {
                let Body::Opaque(bytes) = body else { return };
                let Ok(page) = <&[u8; PAGE_SIZE]>::try_from(bytes) else { return };
                if let Some(number) = (!waiting.is_empty()).then(|| waiting.remove(0)) {
                    failed = region.install(number, page, Access::Read).err();
                }
            })?;
            failed.map_or(Ok(()), Err)?;
        }
    }
    lane.leave(0);
    Ok(())
}
