//! A guest of KVM that spans the nodes: its memory is the shared one, and each node runs some of its vCPUs.
//!
//! The vCPUs count under a lock, and each in a word of its own of a page that all of them write. After every 32 rounds all of
//! them move: a node goes on with the vCPUs of the node before it, whose registers come through the shared memory, too.
//! What KVM's log of dirty pages says of these rounds is then compared with what the guest has written.
//!
//! Every other vCPU has its data at a second guest address of the same memory: what is shared are pages of the host, wherever the
//! guest sees them.
//!
//! Meanwhile each node plays a device: it pins the page of the own words for a moment, and counts in it without page faults. All of
//! them count in the same word: were the page taken away from under a pin, what one of them has counted would be lost.
//!
//! The guest is a few instructions of real mode, so it needs neither a kernel nor devices. KVM's faults on its memory are served
//! as those of threads are, and what takes a page from this node takes it from the second-level page tables of KVM as well.

use super::{
    Shared, WORDS, expect, fits,
    machine::{Machine, REGISTERS, Vcpu},
};
use kvm_bindings::kvm_regs;
use serde::{Deserialize, Serialize};
use std::{
    sync::{
        Arc, Barrier,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
        mpsc::{Sender, channel},
    },
    thread,
    time::Duration,
};
use vnuma_dsm_pager::{Access, Region};

/// Pages of the guest; the first one belongs to the barrier of the nodes.
const CODE: usize = 2;
const LOCK: usize = 3;
const OWN: usize = 4;
/// Registers of vCPUs that move.
const STATE: usize = 5;
/// How much the device of each node has counted.
const COUNTED: usize = 16;
/// The word of the devices, behind those of the vCPUs.
const DEVICES: usize = 256;
/// A vCPU that writes here has done 32 rounds.
const PORT: u16 = 0x10;
/// Rounds between two of these.
const TURN: usize = 32;
/// Most vCPUs of a node.
pub const VCPUS: u8 = 8;
/// Pins of a device at least, and what it adds during one.
const PINS: u64 = 16;
const ADDS: u64 = 8;
/// Between two of these, and between two pins: a page is pinned for most of the time in which others want it.
const WORK: Duration = Duration::from_micros(50);
const PAUSE: Duration = Duration::from_micros(200);

/// ECX: rounds that are left. BX: address of the vCPU's own word.
const INSTRUCTIONS: [u8; 40] = [
    0xb8, 0x01, 0x00, // again: mov ax, 1
    0x87, 0x06, 0x00, 0x30, // xchg [0x3000], ax
    0x85, 0xc0, // test ax, ax
    0x75, 0xf5, // jnz again
    0x66, 0xff, 0x06, 0x08, 0x30, // inc dword [0x3008]
    0xc7, 0x06, 0x00, 0x30, 0x00, 0x00, // mov word [0x3000], 0
    0x66, 0xff, 0x07, // inc dword [bx]
    0x66, 0x49, // dec ecx
    0xf6, 0xc1, 0x1f, // test cl, 31
    0x75, 0xe0, // jnz again
    0xe6, 0x10, // out 0x10, al
    0x66, 0x85, 0xc9, // test ecx, ecx
    0x75, 0xd9, // jnz again
    0xf4, // hlt
];

/// What a guest was seen to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// vCPUs of all nodes.
    pub vcpus: u64,
    /// How often a vCPU went on on another node.
    pub moves: u64,
    /// How often KVM's log of dirty pages was compared with what was written.
    pub dirty_logs: u64,
    /// How often device code pinned a page.
    pub pins: u64,
}

impl Seen {
    pub fn merge(&mut self, other: &Self) {
        self.vcpus += other.vcpus;
        self.moves += other.moves;
        self.dirty_logs += other.dirty_logs;
        self.pins += other.pins;
    }
}

/// What a thread of this node has done.
enum Ended {
    /// A vCPU, its turns and its idle time.
    Vcpu(u64, Duration),
    /// The device, and its pins.
    Device(u64),
}

/// Address of a page.
fn address(page: usize) -> usize {
    page * WORDS * 8
}

/// A vCPU of this node's, among those of all nodes.
struct Seat {
    shared: Shared,
    /// vCPUs of a node.
    vcpus: usize,
    machine: Arc<Machine>,
    /// The vCPUs of this node.
    beside: Arc<Barrier>,
    rounds: usize,
}

impl Seat {
    /// Runs one vCPU after the other until they have halted, and says how many turns that were.
    fn run(&self, vcpu: &mut Vcpu) -> Result<u64, String> {
        let Shared { node: place, nodes: all, .. } = self.shared;
        let mut number = place;
        vcpu.begin(&kvm_regs {
            rip: address(CODE) as u64,
            rbx: (address(OWN) + number * 8) as u64,
            rcx: self.rounds as u64,
            // The bit that is always set.
            rflags: 2,
            ..kvm_regs::default()
        })?;
        self.shared.barrier();
        // All vCPUs have as many turns.
        let mut turns = 0;
        while vcpu.turn(PORT)? {
            turns += 1;
            self.put(number, vcpu.give()?);
            // No vCPU of any node runs from here on.
            self.shared.barrier();
            if place.is_multiple_of(self.vcpus) {
                self.compare_dirty(turns)?;
            }
            self.beside.wait();
            number = (number + self.vcpus) % all;
            vcpu.take(self.get(number))?;
        }
        self.shared.barrier();
        Ok(turns)
    }

    fn put(&self, vcpu: usize, registers: [u64; REGISTERS]) {
        for (index, word) in registers.into_iter().enumerate() {
            self.shared.store(STATE * WORDS + vcpu * REGISTERS + index, word);
        }
    }

    fn get(&self, vcpu: usize) -> [u64; REGISTERS] {
        std::array::from_fn(|index| self.shared.load(STATE * WORDS + vcpu * REGISTERS + index))
    }

    /// KVM has logged what the vCPUs of this node have written since the last turn, wherever the pages are now, and nothing
    /// else.
    fn compare_dirty(&self, turn: u64) -> Result<(), String> {
        // KVM maps a page for writing, and logs it, if this node may write it. Nobody writes the instructions, and once another
        // node has read them this one may not.
        let alone = self.shared.nodes == self.vcpus;
        for (address, dirty) in self.machine.take_dirty()?.iter().enumerate() {
            // The vCPUs take turns in having their data at one address or the other.
            let used = self.vcpus > address;
            let right = match dirty.as_slice() {
                [LOCK, OWN] => used,
                [CODE, LOCK, OWN] => address == 0 && (alone || turn == 1),
                [] => !used,
                _ => false,
            };
            if !right {
                let expected: &[usize] = if used { &[LOCK, OWN] } else { &[] };
                return Err(format!(
                    "turn {turn}: KVM_GET_DIRTY_LOG of slot {address} has pages {dirty:?}, and {expected:?} were written"
                ));
            }
        }
        Ok(())
    }
}

/// Counts in a word of the page that all vCPUs write while it is pinned, until `stop`. Returns the number of pins.
fn device(region: &Region, stop: &AtomicBool) -> Result<u64, String> {
    let offset = DEVICES * size_of::<u64>();
    let mut pins = 0;
    while pins < PINS || !stop.load(Relaxed) {
        let pin = region.fetch_and_pin(OWN as u64, Access::Write).map_err(|error| error.to_string())?;
        // SAFETY: an aligned word of the pinned page; all accesses are atomic.
        let counter = unsafe { AtomicU64::from_ptr(pin.address().add(offset).cast().as_ptr()) };
        for _ in 0..ADDS {
            let count = counter.load(SeqCst);
            thread::sleep(WORK);
            counter.store(count + 1, SeqCst);
        }
        drop(pin);
        pins += 1;
        thread::sleep(PAUSE);
    }
    Ok(pins)
}

/// Starts a thread that reports how it has ended. A thread that fails leaves others waiting at a barrier, so they are not joined.
fn start(
    ended: &Sender<Result<Ended, String>>,
    work: impl FnOnce() -> Result<Ended, String> + Send + 'static,
) {
    let ended = ended.clone();
    thread::spawn(move || drop(ended.send(work())));
}

pub fn guest(shared: &Shared, vcpus: usize, rounds: usize) -> Result<Seen, String> {
    fits(rounds, 1 << 24, "rounds")?;
    if shared.node == 0 {
        for (index, bytes) in INSTRUCTIONS.as_chunks::<8>().0.iter().enumerate() {
            shared.store(CODE * WORDS + index, u64::from_le_bytes(*bytes));
        }
    }
    let machine = Arc::new(Machine::new(shared)?);
    shared.barrier();
    let (sender, ended) = channel();
    let beside = Arc::new(Barrier::new(vcpus));
    for index in 0..vcpus {
        let (machine, beside) = (Arc::clone(&machine), Arc::clone(&beside));
        let mut vcpu = machine.vcpu(index)?;
        let seat = Seat { shared: shared.thread(index, vcpus), vcpus, machine, beside, rounds };
        start(&sender, move || {
            let turns = seat.run(&mut vcpu)?;
            Ok(Ended::Vcpu(turns, seat.shared.idle.get()))
        });
    }
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    let region = shared.region.upgrade().ok_or("the region is gone")?;
    start(&sender, move || device(&region, &told).map(Ended::Device));
    let (mut left, mut seen, mut idle) =
        (vcpus, Seen { vcpus: vcpus as u64, ..Seen::default() }, Duration::ZERO);
    for _ in 0..=vcpus {
        match ended.recv().map_err(|_| "a thread has panicked")?? {
            Ended::Device(pins) => seen.pins = pins,
            Ended::Vcpu(turns, waited) => {
                expect("the number of turns", turns, rounds.div_ceil(TURN) as u64)?;
                seen.dirty_logs = turns;
                seen.moves += if shared.nodes > 1 { turns } else { 0 };
                idle += waited;
                left -= 1;
                stop.store(left == 0, Relaxed);
            }
        }
    }
    shared.idle.set(shared.idle.get() + idle);
    check(shared, vcpus, rounds, seen.pins)?;
    Ok(seen)
}

/// What all nodes have counted is there on each of them.
fn check(shared: &Shared, vcpus: usize, rounds: usize, pins: u64) -> Result<(), String> {
    shared.store(COUNTED * WORDS + shared.node, pins * ADDS);
    shared.barrier();
    let all = shared.nodes * vcpus;
    expect("the lock", shared.load(LOCK * WORDS) & 0xffff, 0)?;
    expect("the counter", shared.load(LOCK * WORDS + 1), (rounds * all) as u64)?;
    for vcpu in 0..all {
        expect("a vCPU's own word", shared.load(OWN * WORDS + vcpu), rounds as u64)?;
    }
    let counted = (0..shared.nodes).map(|node| shared.load(COUNTED * WORDS + node)).sum();
    expect("the devices' word", shared.load(OWN * WORDS + DEVICES), counted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_uses_the_addresses_that_are_checked() {
        let has = |bytes: &[u8]| INSTRUCTIONS.windows(bytes.len()).any(|window| window == bytes);
        let [lock, counter] = [address(LOCK) as u16, address(LOCK) as u16 + 8].map(u16::to_le_bytes);
        assert!(has(&[0x87, 0x06, lock[0], lock[1]]) && has(&[0xff, 0x06, counter[0], counter[1]]));
        assert!(has(&[0xc7, 0x06, lock[0], lock[1], 0, 0]) && has(&[0xe6, PORT as u8]));
        assert_eq!((TURN, INSTRUCTIONS.len() % 8), (usize::from(INSTRUCTIONS[29]) + 1, 0));
    }

    #[test]
    fn the_most_vcpus_have_words_of_their_own() {
        let vcpus = 16 * usize::from(VCPUS);
        assert!(vcpus <= DEVICES && DEVICES < WORDS);
        assert!(STATE * WORDS + vcpus * REGISTERS <= COUNTED * WORDS);
    }
}
