//! A channel as QEMU and a guest see it.

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use std::{mem::offset_of, time::Instant};
use vnuma_abi_topology_channel::{GUEST_MAGIC, Guest, MODE_NONE, MODE_SAFE, Vcpu};
use vnuma_channel::{Channel, Content, GuestStatus, MAX_OUTSTANDING, PAUSE, Plug, WAKEUPS_PER_PUBLICATION};
use vnuma_channel_model::{GuestEnd, ReadError, SUPPORTED};
use vnuma_model::DistanceMatrix;

fn content(node: u32) -> Content {
    let distances = DistanceMatrix::new(vec![vec![10, 21], vec![21, 10]]).expect("square");
    Content::new(distances, vec![Vcpu { apic_id: 3, node }]).expect("within limits")
}

fn channel() -> (Channel, GuestEnd) {
    let (channel, Plug::Ivshmem(socket)) = Channel::create(7).expect("a channel");
    (channel, GuestEnd::connect(&socket).expect("all messages"))
}

fn is_readable(channel: &Channel) -> bool {
    let mut wait = [PollFd::new(channel.acknowledgement_fd(), PollFlags::POLLIN)];
    poll(&mut wait, PollTimeout::ZERO).expect("polled") > 0
}

#[test]
fn qemu_finds_everything_waiting() {
    let (mut channel, Plug::Ivshmem(socket)) = Channel::create(7).expect("a channel");
    let guest = GuestEnd::connect(&socket).expect("all messages");
    assert!(GuestEnd::connect(&socket).is_err(), "nothing follows");
    assert_eq!(guest.read(), Err(ReadError::Nothing));
    let generation = channel.publish(&content(1)).expect("published");
    assert_eq!(generation, (7 << 32) | 1);
    let found = guest.read().expect("readable");
    assert_eq!((found.generation, found.vcpus[0].node), (generation, 1));
    assert_eq!(guest.guest_vectors[0].read(), Ok(1), "one interrupt");
    for other in &guest.guest_vectors[1..] {
        assert_eq!(other.read(), Err(Errno::EAGAIN));
    }
}

#[test]
fn an_acknowledgement_counts_once_and_only_if_it_is_outstanding() {
    let (mut channel, guest) = channel();
    guest.acknowledge(0).expect("signalled");
    assert_eq!(channel.take_acknowledgement().expect("taken"), None, "nothing was published");
    let first = channel.publish(&content(1)).expect("published");
    let second = channel.publish(&content(0)).expect("published");
    for wrong in [0, first + 8, first & 0xffff_ffff, (8 << 32) | 1, u64::MAX] {
        guest.acknowledge(wrong).expect("signalled");
        assert_eq!(channel.take_acknowledgement().expect("taken"), None, "{wrong:#x}");
    }
    guest.acknowledge(second).expect("signalled");
    assert_eq!(channel.take_acknowledgement().expect("taken"), Some(second));
    assert_eq!(channel.take_acknowledgement().expect("taken"), None, "it counts once");
    guest.acknowledge(first).expect("signalled");
    assert_eq!(channel.take_acknowledgement().expect("taken"), None, "an earlier one went with it");
}

#[test]
fn a_late_acknowledgement_is_not_credited_to_a_newer_generation() {
    let (mut channel, guest) = channel();
    let generations: Vec<u64> =
        (0..=MAX_OUTSTANDING).map(|_| channel.publish(&content(1)).expect("published")).collect();
    guest.acknowledge(generations[0]).expect("signalled");
    assert_eq!(channel.take_acknowledgement().expect("taken"), None, "the oldest was given up");
    guest.acknowledge(generations[1]).expect("signalled");
    assert_eq!(channel.take_acknowledgement().expect("taken"), Some(generations[1]));
}

#[test]
fn a_signal_before_the_acknowledgement_does_not_hide_it() {
    let (mut channel, guest) = channel();
    let generation = channel.publish(&content(1)).expect("published");
    assert!(!is_readable(&channel));
    guest.ring().expect("signalled");
    assert!(is_readable(&channel));
    assert_eq!(channel.take_acknowledgement().expect("taken"), None);
    assert!(!is_readable(&channel), "taken");
    guest.acknowledge(generation).expect("signalled");
    assert!(is_readable(&channel));
    assert_eq!(channel.take_acknowledgement().expect("taken"), Some(generation));
}

#[test]
fn a_peer_that_takes_its_signals_back_wakes_the_host_no_more_often() {
    let (mut channel, guest) = channel();
    channel.publish(&content(1)).expect("published");
    let begin = Instant::now();
    for _ in 0..WAKEUPS_PER_PUBLICATION {
        guest.ring().expect("signalled");
        assert!(is_readable(&channel));
        guest.host_vectors[0].read().expect("taken back");
        assert_eq!(channel.take_acknowledgement().expect("taken"), None);
    }
    guest.ring().expect("signalled");
    assert!(!is_readable(&channel) || begin.elapsed() >= PAUSE, "its budget is used up");
}

#[test]
fn the_guest_says_what_it_is_and_what_it_refused() {
    let (mut channel, guest) = channel();
    assert_eq!(channel.guest_status(), GuestStatus::default(), "no driver yet");
    guest.announce(MODE_SAFE).expect("written");
    let generation = channel.publish(&content(1)).expect("published");
    guest.refuse(generation, 95).expect("signalled");
    let status = channel.guest_status();
    assert_eq!((status.driver.safe_mode, status.driver.refused), (Some(true), Some((generation, 95))));
    assert_eq!(status.driver.version, Some([1, 2, 3]));
    assert_eq!(status.supported, SUPPORTED);
    guest.announce(MODE_NONE).expect("written");
    let status = channel.guest_status();
    assert_eq!((status.driver.safe_mode, status.driver.version), (None, Some([1, 2, 3])));
    guest.store(offset_of!(Guest, magic), 0).expect("written");
    assert_eq!(channel.guest_status(), GuestStatus::default(), "the driver is gone");
}

#[test]
fn nonsense_in_the_guests_area_is_shown_as_unknown() {
    let (channel, guest) = channel();
    guest.announce(77).expect("written");
    guest.store(offset_of!(Guest, refused), 5).expect("written");
    for (error, errno) in [(0, 0), (1, 0), (-1, 1), (-4095, 4095), (-4096, 0), (i64::MIN, 0), (i64::MAX, 0)] {
        guest.store(offset_of!(Guest, refused_error), i64::cast_unsigned(error)).expect("written");
        assert_eq!(channel.guest_status().driver.refused, Some((5, errno)), "{error}");
    }
    assert_eq!(channel.guest_status().driver.safe_mode, None);
    for offset in (0..size_of::<Guest>()).step_by(8) {
        guest.store(offset, u64::MAX).expect("written");
    }
    guest.store(offset_of!(Guest, magic), GUEST_MAGIC).expect("written");
    let status = channel.guest_status();
    assert_eq!((status.driver.safe_mode, status.acknowledged, status.supported.len()), (None, u64::MAX, 16));
}
