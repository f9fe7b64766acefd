//! How long vCPU threads wait for a CPU after they were woken, seen by the BPF program of `bpf/wakes.bpf.c`.
//!
//! The times are the server's, which is emulated: they are compared with each other only.

use anyhow::{Context, Result, ensure};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, RingBuffer, RingBufferBuilder};
use std::{cell::RefCell, rc::Rc};
use vnuma_observe::location::monotonic_ns;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wakes.bpf.o"));

/// Programs in the kernel, and what they have reported. They end when this is dropped.
pub struct Wakes {
    ring: RingBuffer<'static>,
    found: Rc<RefCell<Vec<u32>>>,
    lost: MapHandle,
    watched: MapHandle,
    _links: Vec<Link>,
}

impl Wakes {
    /// Watches these threads.
    pub fn watch(tids: impl Iterator<Item = i32>) -> Result<Self> {
        let open = ObjectBuilder::default().open_memory(OBJECT).context("the BPF program of wake-ups")?;
        let object = open.load().context("loading the BPF program of wake-ups")?;
        let watched = map(&object, "watched")?;
        for tid in tids {
            let watch = watched.update(&tid.to_ne_bytes(), &0_u64.to_ne_bytes(), MapFlags::ANY);
            watch.with_context(|| format!("watching wake-ups of thread {tid}"))?;
        }
        let found = Rc::new(RefCell::new(Vec::new()));
        let theirs = Rc::clone(&found);
        let mut builder = RingBufferBuilder::new();
        let waits = map(&object, "waits")?;
        let take = move |record: &[u8]| {
            // Records have 8 bytes.
            let waited_ns = record.try_into().map(u64::from_ne_bytes).unwrap_or_default();
            theirs.borrow_mut().push(microseconds(waited_ns));
            0
        };
        builder.add(&waits, take)?;
        let ring = builder.build()?;
        let attach = object.progs_mut().map(|program| program.attach());
        let links = attach.collect::<Result<_, _>>().context("attaching the BPF program of wake-ups")?;
        Ok(Self { ring, found, lost: map(&object, "lost")?, watched, _links: links })
    }

    /// What those have waited up to now that were woken and have no CPU yet, microseconds. [`Self::take`] has no wait that is not over.
    pub fn pending(&self) -> Result<Vec<u32>> {
        let mut found = Vec::new();
        for key in self.watched.keys() {
            let since = self.watched.lookup(&key, MapFlags::ANY)?.and_then(|since| since.try_into().ok());
            let since = since.map(u64::from_ne_bytes).filter(|since| *since > 0);
            found.extend(since.map(|since| microseconds(monotonic_ns().saturating_sub(since))));
        }
        Ok(found)
    }

    /// What they waited since the last call, each time that one was woken, microseconds.
    pub fn take(&self) -> Result<Vec<u32>> {
        self.ring.consume().context("the ring buffer of wake-ups")?;
        let lost = self.lost.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY)?.unwrap_or_default();
        ensure!(lost.iter().all(|byte| *byte == 0), "wake-ups were lost, as the ring buffer was full");
        Ok(self.found.take())
    }
}

fn map(object: &Object, name: &str) -> Result<MapHandle> {
    let map = object.maps().find(|map| map.name() == name);
    Ok(MapHandle::try_from(&map.with_context(|| format!("the BPF object has no map {name}"))?)?)
}

/// Rounded up, so that a wake-up takes more than nothing.
fn microseconds(ns: u64) -> u32 {
    u32::try_from(ns.div_ceil(1000)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, thread, time::Duration};
    use vnuma_scenario::HANG_LIMIT;

    /// A thread that sleeps as often as it is told; its number.
    fn sleeper(times: mpsc::Receiver<u32>, done: mpsc::Sender<()>) -> i32 {
        let (number, told) = mpsc::channel();
        thread::spawn(move || {
            number.send(nix::unistd::gettid().as_raw()).expect("awaited");
            for times in times {
                (0..times).for_each(|_| thread::sleep(Duration::from_millis(2)));
                done.send(()).expect("awaited");
            }
        });
        told.recv_timeout(HANG_LIMIT).expect("it runs")
    }

    #[test]
    fn wake_ups_of_watched_threads_are_seen_and_no_others() {
        let (orders, times) = mpsc::channel();
        let (other_orders, other_times) = mpsc::channel();
        let (done, ended) = mpsc::channel();
        let (watched, other) = (sleeper(times, done.clone()), sleeper(other_times, done));
        let wakes = match Wakes::watch([watched].into_iter()) {
            Ok(wakes) => wakes,
            Err(error) => return println!("skipped: {error:#}"),
        };
        other_orders.send(20).expect("it runs");
        ended.recv_timeout(HANG_LIMIT).expect("it has slept");
        assert_eq!(wakes.take().expect("taken"), Vec::<u32>::new(), "thread {other} is not watched");
        orders.send(20).expect("it runs");
        ended.recv_timeout(HANG_LIMIT).expect("it has slept");
        let found = wakes.take().expect("taken");
        // The order and each sleep; one that was over before it began is none.
        assert!((15..=21).contains(&found.len()), "{found:?}");
        assert!(found.iter().all(|&us| us > 0 && us < 60_000_000), "{found:?}");
        assert_eq!(wakes.take().expect("taken"), Vec::<u32>::new(), "they were taken");
        assert_eq!(wakes.pending().expect("looked up"), Vec::<u32>::new(), "it sleeps");
    }

    #[test]
    fn times_are_rounded_up() {
        assert_eq!([0, 1, 1000, 1001, u64::MAX].map(microseconds), [0, 1, 1, 2, u32::MAX]);
    }
}
