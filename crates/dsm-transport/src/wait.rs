//! Waiting for lanes, and for other things beside them.

use crate::{
    error::{Fault, TransportError},
    lane::Lane,
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{
    io,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

/// What is ready.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// By their places in the list: lanes that have something to read, or can write what waits.
    pub lanes: Vec<usize>,
    /// By their places in the list: other descriptors that can be read.
    pub others: Vec<usize>,
}

impl Ready {
    fn is_empty(&self) -> bool {
        self.lanes.is_empty() && self.others.is_empty()
    }
}

/// Waits until a lane or another descriptor is ready, or `timeout` has passed (rounded up to milliseconds).
///
/// It polls for `spin` before it sleeps. That saves the microseconds of being woken and costs a CPU. A thread that serves page
/// faults should not spin: it would keep the CPU from the very thread that it serves.
pub fn wait(
    lanes: &mut [&mut Lane],
    others: &[BorrowedFd<'_>],
    timeout: Duration,
    spin: Duration,
) -> io::Result<Ready> {
    let begin = Instant::now();
    if !spin.is_zero() {
        loop {
            let ready = look(lanes, others, PollTimeout::ZERO)?;
            let pending = lanes.iter().enumerate().filter(|(_, lane)| lane.pending());
            let ready = merge(ready, pending.map(|(place, _)| place).collect());
            if !ready.is_empty() {
                return Ok(ready);
            }
            if begin.elapsed() >= spin.min(timeout) {
                break;
            }
            std::hint::spin_loop();
        }
    }
    let busy: Vec<usize> =
        lanes.iter_mut().enumerate().filter_map(|(place, lane)| (!lane.arm()).then_some(place)).collect();
    let left = timeout.saturating_sub(begin.elapsed());
    let left = if busy.is_empty() { left.as_micros().div_ceil(1000) } else { 0 };
    let left = PollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX));
    Ok(merge(look(lanes, others, left)?, busy))
}

fn merge(mut ready: Ready, more: Vec<usize>) -> Ready {
    ready.lanes.extend(more);
    ready.lanes.sort_unstable();
    ready.lanes.dedup();
    ready
}

fn look(lanes: &[&mut Lane], others: &[BorrowedFd<'_>], timeout: PollTimeout) -> io::Result<Ready> {
    let of_lanes = lanes.iter().map(|lane| PollFd::new(lane.fd(), lane.events()));
    let of_others = others.iter().map(|other| PollFd::new(*other, PollFlags::POLLIN));
    let mut descriptors: Vec<PollFd<'_>> = of_lanes.chain(of_others).collect();
    match poll(&mut descriptors, timeout) {
        Ok(_) => {}
        Err(Errno::EINTR) => return Ok(Ready::default()),
        Err(error) => return Err(error.into()),
    }
    // Errors and hang-ups too: reading says what they are.
    let set = |descriptor: &PollFd<'_>| descriptor.revents().is_none_or(|events| !events.is_empty());
    let places = |part: &[PollFd<'_>]| {
        part.iter().enumerate().filter(|(_, descriptor)| set(descriptor)).map(|(place, _)| place).collect()
    };
    let (of_lanes, of_others) = descriptors.split_at(lanes.len());
    Ok(Ready { lanes: places(of_lanes), others: places(of_others) })
}

/// Gives the next frame to `take`, waiting until `deadline`.
pub(crate) fn receive_one(
    lane: &mut Lane,
    deadline: Instant,
    mut take: impl FnMut(&vnuma_abi_dsm_wire::Header, vnuma_abi_dsm_wire::Body<'_>),
) -> Result<(), TransportError> {
    loop {
        lane.flush()?;
        if lane.receive(&mut take)? > 0 {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let limit = lane.limits().connect;
            return Err(lane.end(Fault::Deadline { limit }));
        }
        wait(&mut [lane], &[], left, Duration::ZERO).map_err(|error| lane.end(Fault::io("poll")(error)))?;
    }
}
