//! Waiting for lanes, and for other things beside them.

use crate::{
    error::{Fault, TransportError},
    lane::Lane,
};
use nix::{
    errno::Errno,
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};
use std::{
    fmt, io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
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

/// As [`Waiter::wait`], once.
pub fn wait(
    lanes: &mut [&mut Lane],
    others: &[BorrowedFd<'_>],
    timeout: Duration,
    spin: Duration,
) -> io::Result<Ready> {
    Waiter::new()?.wait(lanes, others, timeout, spin)
}

/// Waits for the same lanes and descriptors again and again, which costs the less the more there are: the kernel keeps the list.
///
/// A descriptor that was closed must not be followed by another one with the same number in the same place.
pub struct Waiter {
    epoll: Epoll,
    /// What the kernel's list has, in the order of places.
    listed: Vec<(RawFd, EpollFlags)>,
    wanted: Vec<(RawFd, EpollFlags)>,
    events: Vec<EpollEvent>,
}

impl fmt::Debug for Waiter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Waiter").field("listed", &self.listed).finish()
    }
}

impl Waiter {
    /// With an empty list.
    pub fn new() -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self { epoll, listed: Vec::new(), wanted: Vec::new(), events: Vec::new() })
    }

    /// Waits until a lane or another descriptor is ready, or `timeout` has passed (rounded up to milliseconds).
    ///
    /// It polls for `spin` before it sleeps. That saves the microseconds of being woken and costs a CPU. A thread that serves page
    /// faults should not spin: it would keep the CPU from the very thread that it serves.
    pub fn wait(
        &mut self,
        lanes: &mut [&mut Lane],
        others: &[BorrowedFd<'_>],
        timeout: Duration,
        spin: Duration,
    ) -> io::Result<Ready> {
        let begin = Instant::now();
        while !spin.is_zero() {
            let ready = self.look(lanes, others, 0)?;
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
        let busy: Vec<usize> =
            lanes.iter_mut().enumerate().filter_map(|(place, lane)| (!lane.arm()).then_some(place)).collect();
        let left = timeout.saturating_sub(begin.elapsed());
        let left = if busy.is_empty() { left.as_micros().div_ceil(1000) } else { 0 };
        Ok(merge(self.look(lanes, others, u16::try_from(left).unwrap_or(u16::MAX))?, busy))
    }

    fn look(&mut self, lanes: &[&mut Lane], others: &[BorrowedFd<'_>], timeout: u16) -> io::Result<Ready> {
        self.list(lanes, others)?;
        self.events.resize(self.listed.len().max(1), EpollEvent::empty());
        let count = match self.epoll.wait(&mut self.events, EpollTimeout::from(timeout)) {
            Ok(count) => count,
            Err(Errno::EINTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        };
        let mut ready = Ready::default();
        for event in &self.events[..count] {
            let place = event.data() as usize;
            match place.checked_sub(lanes.len()) {
                None => ready.lanes.push(place),
                Some(place) => ready.others.push(place),
            }
        }
        ready.lanes.sort_unstable();
        ready.others.sort_unstable();
        Ok(ready)
    }

    /// Makes the kernel's list what is wanted. It seldom changes.
    fn list(&mut self, lanes: &[&mut Lane], others: &[BorrowedFd<'_>]) -> io::Result<()> {
        let flags = |lane: &&mut Lane| EpollFlags::from_bits_truncate(i32::from(lane.events().bits()));
        let of_lanes = lanes.iter().map(|lane| (lane.fd().as_raw_fd(), flags(lane)));
        let of_others = others.iter().map(|other| (other.as_raw_fd(), EpollFlags::EPOLLIN));
        self.wanted.clear();
        self.wanted.extend(of_lanes.chain(of_others));
        if self.wanted == self.listed {
            return Ok(());
        }
        self.listed.clear();
        self.epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let descriptors = lanes.iter().map(|lane| lane.fd()).chain(others.iter().copied());
        for (place, (descriptor, (_, flags))) in descriptors.zip(&self.wanted).enumerate() {
            self.epoll.add(descriptor, EpollEvent::new(*flags, place as u64))?;
        }
        std::mem::swap(&mut self.listed, &mut self.wanted);
        Ok(())
    }
}

fn merge(mut ready: Ready, more: Vec<usize>) -> Ready {
    ready.lanes.extend(more);
    ready.lanes.sort_unstable();
    ready.lanes.dedup();
    ready
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
