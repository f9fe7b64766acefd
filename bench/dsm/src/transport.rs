//! Transports by themselves (GiantVM's figure 8).

use crate::{
    peer::{Ask, Kind, connect},
    report::{Quantiles, Transfer},
};
use anyhow::{Result, bail};
use std::time::{Duration, Instant};
use vnuma_abi_dsm_wire::Body;
use vnuma_dsm_transport::{Lane, Waiter};

const SIZES: [usize; 8] = [64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// All sizes on one transport.
pub fn measure(kind: Kind, rounds: usize, bytes: usize, spin: Duration) -> Result<Vec<Transfer>> {
    let mut lane = connect(kind, spin)?;
    let mut transfers = Vec::new();
    for size_bytes in SIZES {
        let rounds = rounds.min(bytes / size_bytes).max(1);
        let mut body = vec![7; size_bytes];
        body[0] = Ask::Echo as u8;
        let round_trip_us = exchange(&mut lane, &body, rounds, spin)?;
        body[0] = Ask::Nothing as u8;
        let bandwidth_mib_per_s = bandwidth(&mut lane, &body, bytes / size_bytes, spin)?;
        let (transport, spin_us) = (kind.name(), spin.as_micros() as u64);
        transfers.push(Transfer { transport, spin_us, size_bytes, round_trip_us, bandwidth_mib_per_s });
    }
    lane.leave(0);
    Ok(transfers)
}

/// Round trips, one after the other.
pub fn exchange(lane: &mut Lane, request: &[u8], rounds: usize, spin: Duration) -> Result<Quantiles> {
    let (mut samples, mut waiter) = (Vec::with_capacity(rounds), Waiter::new()?);
    for round in 0..rounds + rounds / 10 {
        let begin = Instant::now();
        lane.send(&Body::Opaque(request), 0)?;
        answers(lane, &mut waiter, 1, spin)?;
        // The first tenth warms up.
        if round >= rounds / 10 {
            samples.push(begin.elapsed());
        }
    }
    Ok(Quantiles::of(&samples))
}

/// Frames in one direction, until the peer has all of them.
fn bandwidth(lane: &mut Lane, body: &[u8], frames: usize, spin: Duration) -> Result<f64> {
    let (begin, mut waiter) = (Instant::now(), Waiter::new()?);
    for _ in 0..frames {
        while !lane.has_room() {
            waiter.wait(&mut [lane], &[], Duration::from_secs(1), spin)?;
            lane.flush()?;
        }
        lane.send(&Body::Opaque(body), 0)?;
    }
    lane.send(&Body::Opaque(&[Ask::Echo as u8]), 0)?;
    answers(lane, &mut waiter, 1, spin)?;
    Ok((frames * body.len()) as f64 / f64::from(1 << 20) / begin.elapsed().as_secs_f64())
}

fn answers(lane: &mut Lane, waiter: &mut Waiter, count: usize, spin: Duration) -> Result<()> {
    let (begin, mut seen) = (Instant::now(), 0);
    while seen < count {
        lane.flush()?;
        if lane.receive(|_, _| seen += 1)? == 0 {
            waiter.wait(&mut [lane], &[], Duration::from_secs(1), spin)?;
        }
        if begin.elapsed() > Duration::from_secs(60) {
            bail!("{}: no answer", lane.peer());
        }
    }
    Ok(())
}
