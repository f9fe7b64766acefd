//! A hypervisor or a guest that changes under the host what it shares with it: open files, memory, doorbells.
//!
//! Of each shared thing, what the other side can change and why it does not matter:
//!
//! | shared | changed | why it does no harm |
//! |---|---|---|
//! | eventfd | `O_NONBLOCK` | reads carry `RWF_NOWAIT`, signals come from the kernel: tested |
//! | eventfd | counter, empty or full | cleared without looking at it; `eventfd_signal()` saturates: tested |
//! | eventfd | `O_APPEND`, `O_DIRECT`, `O_ASYNC`, `F_SETOWN`, `F_SETSIG` | no meaning without a position, a device or `fasync`: tested |
//! | eventfd | signalled without end | one-shot, with a budget: tested |
//! | memfd | size, seals | sealed against both before it is shared, and looked at when it is taken over: tested |
//! | memfd | holes punched into it | a store finds a page of zeros and fills what it writes; a reader refuses the rest: tested. If the commit limit is strict (`vm.overcommit_memory=2`) and reached, the new page needs memory that the kernel keeps for `CAP_SYS_ADMIN` |
//! | memfd | content, guest's area included | never an index, a size or a decision; a generation counts only if it is outstanding: tested |
//! | memfd | flags, file position | only mappings are used: tested |
//! | memfd | locks, leases, owner, mode | nothing is opened or locked after it was made; they do not affect processes that have it open: tested |
//! | socket | everything | QEMU has the other end, which is another open file; this end is never read or written after the messages |
//!
//! The epoll instance, the timer and the file whose reads signal eventfds are never shared.

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, FcntlArg, OFlag, SealFlag, fallocate, fcntl},
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::EventFd,
};
use std::{
    io::{Seek, SeekFrom, Write},
    mem::offset_of,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::{FileExt, PermissionsExt},
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
use vnuma_abi_topology_channel::{GUEST_MAGIC, Guest, REGION_SIZE, Vcpu};
use vnuma_channel::{Channel, Content, PAUSE, Plug, WAKEUPS_PER_PUBLICATION};
use vnuma_channel_model::GuestEnd;
use vnuma_model::DistanceMatrix;

/// Nothing here takes longer than milliseconds unless it hangs.
const HANG_LIMIT: Duration = Duration::from_secs(600);

fn content() -> Content {
    let distances = DistanceMatrix::new(vec![vec![10]]).expect("square");
    Content::new(distances, vec![Vcpu { apic_id: 3, node: 0 }]).expect("within limits")
}

fn channel() -> (Channel, GuestEnd) {
    let (channel, Plug::Ivshmem(socket)) = Channel::create(7).expect("a channel");
    (channel, GuestEnd::connect(&socket).expect("all messages"))
}

/// Runs it in a thread of its own, so that one that blocks fails the test.
fn returns<T: Send + 'static>(what: &str, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(act()));
    receiver.recv_timeout(HANG_LIMIT).unwrap_or_else(|_| panic!("{what} blocks or fails"))
}

/// What a hostile peer does to the open file of an eventfd: a read of an empty counter blocks then, and a write of a
/// full one.
fn make_blocking(vector: &EventFd) {
    let flags = OFlag::from_bits_retain(fcntl(vector, FcntlArg::F_GETFL).expect("its flags"));
    fcntl(vector, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK)).expect("set");
}

/// Everything that the daemon does to a channel, some times.
fn use_channel(what: &str, mut channel: Channel, guest: GuestEnd) -> (Channel, GuestEnd) {
    let (mut channel, mut generation) = returns(&format!("publish() with {what}"), move || {
        // Several: each finds the state that the one before left.
        let generation = (0..3).map(|_| channel.publish(&content()).expect("published")).last();
        (channel, generation.expect("published"))
    });
    channel = returns(&format!("raise() with {what}"), move || {
        channel.raise().expect("raised");
        channel
    });
    guest.announce(1).expect("written");
    guest.store_acknowledged(generation).expect("written");
    (channel, generation) = returns(&format!("take_acknowledgement() with {what}"), move || {
        let taken = channel.take_acknowledgement().expect("taken");
        assert_eq!(channel.take_acknowledgement().expect("taken"), None);
        (channel, taken.expect("acknowledged"))
    });
    assert_eq!(guest.read().expect("readable").generation, generation);
    (channel, guest)
}

#[test]
fn blocking_eventfds_block_nobody() {
    for (name, counter) in [("empty", 0), ("full", u64::MAX - 1)] {
        let (mut channel, guest) = channel();
        channel.publish(&content()).expect("published");
        for vector in guest.host_vectors.iter().chain(&guest.guest_vectors) {
            vector.read().ok();
            if counter > 0 {
                vector.write(counter).expect("filled");
            }
            make_blocking(vector);
        }
        use_channel(&format!("blocking {name} counters"), channel, guest);
    }
}

#[test]
fn a_full_interrupt_counter_is_no_error_and_stays_pending() {
    for blocking in [false, true] {
        let (mut channel, guest) = channel();
        let vector = &guest.guest_vectors[0];
        vector.write(u64::MAX - 1).expect("the guest's QEMU fills it");
        if blocking {
            make_blocking(vector);
        }
        let generation = returns("publish() with a full counter", move || {
            (channel.publish(&content()).expect("published"), channel).0
        });
        assert_eq!(guest.read().expect("readable").generation, generation);
        assert!(guest.guest_vectors[0].read().expect("pending") >= u64::MAX - 1);
    }
}

#[test]
fn other_flags_owners_and_signals_do_nothing() {
    let (channel, guest) = channel();
    let flags = OFlag::O_APPEND | OFlag::O_ASYNC | OFlag::O_NOATIME;
    let files = guest.host_vectors.iter().chain(&guest.guest_vectors).map(AsFd::as_fd);
    for file in files.chain([guest.memory.as_fd()]) {
        // Some are refused by some kernels, which is as good.
        let _ = fcntl(file, FcntlArg::F_SETFL(flags));
        let _ = fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT));
        // SAFETY: these commands take integers; signal 10 would end this process if it ever came.
        unsafe {
            libc::fcntl(file.as_raw_fd(), libc::F_SETOWN, libc::getpid());
            libc::fcntl(file.as_raw_fd(), 10, libc::SIGUSR1);
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK);
            libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB);
        }
    }
    (&guest.memory).seek(SeekFrom::Start(u64::MAX >> 1)).expect("moved");
    guest.memory.set_permissions(std::fs::Permissions::from_mode(0o000)).expect("changed");
    // Its own writes are of no concern, and O_APPEND would have them at the end.
    let _ = fcntl(&guest.memory, FcntlArg::F_SETFL(OFlag::empty()));
    use_channel("strange flags", channel, guest);
}

#[test]
fn the_memory_can_be_neither_resized_nor_sealed() {
    let (_channel, guest) = channel();
    for size in [0, REGION_SIZE as u64 - 1, REGION_SIZE as u64 * 2] {
        assert!(guest.memory.set_len(size).is_err(), "{size}");
    }
    (&guest.memory).seek(SeekFrom::End(0)).expect("the end");
    assert!((&guest.memory).write(&[1]).is_err(), "it would grow");
    for seal in [SealFlag::F_SEAL_WRITE, SealFlag::F_SEAL_FUTURE_WRITE] {
        assert_eq!(fcntl(&guest.memory, FcntlArg::F_ADD_SEALS(seal)), Err(Errno::EPERM));
    }
}

#[test]
fn holes_in_the_memory_hurt_only_who_punches_them() {
    let (mut channel, guest) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    let (memory, stopped) = (guest.memory.try_clone().expect("a copy"), Arc::clone(&stop));
    let (punched, first) = mpsc::sync_channel(1);
    let puncher = thread::spawn(move || {
        let holes = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        while !stopped.load(Ordering::Relaxed) {
            fallocate(&memory, holes, 0, REGION_SIZE as i64).expect("punched");
            let _ = punched.try_send(());
        }
    });
    // On a busy machine it may not run before all is published.
    first.recv_timeout(HANG_LIMIT).expect("a hole");
    channel = returns("publish() into holes", move || {
        for _ in 0..2000 {
            channel.publish(&content()).expect("published");
            channel.take_acknowledgement().expect("taken");
        }
        channel
    });
    stop.store(true, Ordering::Relaxed);
    puncher.join().expect("no error");
    // The header is gone for good, which is the guest's loss; a new channel has a new one.
    assert!(guest.read().is_err());
    channel.publish(&content()).expect("published");
}

#[test]
fn the_host_is_not_led_astray_by_what_a_guest_writes() {
    let (mut channel, guest) = channel();
    for counter in 1..=4 {
        for byte in [0, 0xff, 0x5a] {
            guest.memory.write_all_at(&vec![byte; REGION_SIZE], 0).expect("the guest can write");
            assert_eq!(channel.take_acknowledgement().expect("taken"), None);
            // The rest of its area is read only once a driver says that it is there.
            guest.store(offset_of!(Guest, magic), GUEST_MAGIC).expect("the guest can write");
            assert_eq!(channel.guest_status().acknowledged, u64::from_ne_bytes([byte; 8]));
            assert_eq!(channel.take_acknowledgement().expect("taken"), None);
        }
        assert_eq!(channel.publish(&content()).expect("published") as u32, counter);
    }
}

/// The bound that `Channel::acknowledgement_fd` states.
#[test]
fn a_guest_that_signals_without_end_wakes_the_host_a_bounded_number_of_times() {
    const PUBLICATIONS: u32 = 3;
    let (mut channel, guest) = channel();
    let vector = guest.host_vectors[0].as_fd().try_clone_to_owned().expect("a copy");
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let flood = thread::spawn(move || {
        // As KVM's ioeventfd does: never full, never waiting.
        while !stopped.load(Ordering::Relaxed) {
            let _ = nix::unistd::write(&vector, &1u64.to_ne_bytes());
        }
    });
    let (start, mut wakeups) = (Instant::now(), 0);
    for _ in 0..PUBLICATIONS {
        channel.publish(&content()).expect("published");
        let end = Instant::now() + 2 * PAUSE + PAUSE / 2;
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).expect("short");
            let mut wait = [PollFd::new(channel.acknowledgement_fd(), PollFlags::POLLIN)];
            if poll(&mut wait, timeout).expect("polled") > 0 {
                wakeups += 1;
                assert_eq!(channel.take_acknowledgement().expect("taken"), None);
            }
        }
    }
    let pauses = start.elapsed().div_duration_f64(PAUSE).ceil() as u32;
    let most = PUBLICATIONS * WAKEUPS_PER_PUBLICATION + 2 * pauses;
    assert!(wakeups <= most, "{wakeups} wake-ups, not at most {most}");
    assert!(
        wakeups >= PUBLICATIONS * WAKEUPS_PER_PUBLICATION,
        "{wakeups} wake-ups: the flood is not noticed"
    );

    // What it acknowledges after all is noticed within a pause.
    let generation = channel.publish(&content()).expect("published");
    thread::sleep(Duration::from_millis(20));
    while channel.take_acknowledgement().expect("taken").is_some() {}
    guest.acknowledge(generation).expect("signalled");
    let acknowledged = loop {
        let mut wait = [PollFd::new(channel.acknowledgement_fd(), PollFlags::POLLIN)];
        poll(&mut wait, PollTimeout::try_from(HANG_LIMIT).expect("short")).expect("polled");
        if let Some(generation) = channel.take_acknowledgement().expect("taken") {
            break generation;
        }
        assert!(start.elapsed() < 3 * HANG_LIMIT, "the acknowledgement is not noticed");
    };
    stop.store(true, Ordering::Relaxed);
    flood.join().expect("no error");
    assert_eq!(acknowledged, generation);
}
