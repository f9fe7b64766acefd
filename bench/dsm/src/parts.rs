//! What the floor is made of.
//!
//! A remote fault cannot cost less than a local one, a thread that is woken by the request, one that is woken by the page, and
//! what the transport does with the bytes.

use crate::{
    peer::{Ask, Kind, pair},
    place,
    report::Quantiles,
};
use anyhow::{Result, anyhow, ensure};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{
    os::fd::AsFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_dsm_wire::{Body, PAGE_SIZE};
use vnuma_dsm_transport::Lane;

/// A request and a page on a transport by one thread that has both ends, so that no thread is woken.
pub fn stack(kind: Kind, request: &[u8], rounds: usize) -> Result<Quantiles> {
    let (mut theirs, mut ours) = pair(kind)?;
    let page = [0x5a; PAGE_SIZE];
    let mut samples = Vec::with_capacity(rounds);
    for round in 0..rounds + rounds / 10 {
        let begin = Instant::now();
        ours.send(&Body::Opaque(request), 0)?;
        take(&mut theirs)?;
        theirs.send(&Body::Opaque(&page), 0)?;
        take(&mut ours)?;
        // The first tenth warms up.
        if round >= rounds / 10 {
            samples.push(begin.elapsed());
        }
    }
    debug_assert_eq!(request[0], Ask::Page as u8);
    Ok(Quantiles::of(&samples))
}

fn take(lane: &mut Lane) -> Result<()> {
    let begin = Instant::now();
    while lane.receive(|_, _| ())? == 0 {
        ensure!(begin.elapsed() < Duration::from_secs(10), "{}: nothing comes", lane.peer());
    }
    Ok(())
}

/// A sleeping thread is woken, and wakes the one that woke it: half of that.
pub fn wake_up(rounds: usize) -> Result<Quantiles> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let [there, back] =
        [EventFd::from_value_and_flags(0, flags)?, EventFd::from_value_and_flags(0, flags)?].map(Arc::new);
    let (theirs, ours) = (Arc::clone(&there), Arc::clone(&back));
    let total = rounds + rounds / 10;
    let other = thread::spawn(move || -> Result<()> {
        place::elsewhere()?;
        for _ in 0..total {
            sleep(&theirs)?;
            ours.write(1)?;
        }
        Ok(())
    });
    let mut samples = Vec::with_capacity(rounds);
    for round in 0..total {
        let begin = Instant::now();
        there.write(1)?;
        sleep(&back)?;
        if round >= rounds / 10 {
            samples.push(begin.elapsed() / 2);
        }
    }
    other.join().map_err(|_| anyhow!("a thread panicked"))??;
    Ok(Quantiles::of(&samples))
}

fn sleep(event: &EventFd) -> Result<()> {
    poll(&mut [PollFd::new(event.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
    event.read()?;
    Ok(())
}
