//! A channel as QEMU sees it.

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, SealFlag, fcntl},
};
use std::{
    io::{Seek, Write},
    os::unix::fs::FileExt,
};
use vnuma_abi_topology_channel::{REGION_SIZE, Vcpu};
use vnuma_channel::{Acknowledgement, Channel, Content, guest::GuestEnd, reader};
use vnuma_topology::DistanceMatrix;

fn content(node: u16) -> Content {
    let distances = DistanceMatrix::new(vec![vec![10, 21], vec![21, 10]]).expect("square");
    Content::new(distances, vec![Vcpu { apic_id: 3, node, flags: 0 }]).expect("within limits")
}

#[test]
fn qemu_finds_everything_waiting() {
    let (mut channel, socket) = Channel::new(7).expect("a channel");
    let guest = GuestEnd::connect(&socket).expect("all messages");
    assert!(GuestEnd::connect(&socket).is_err(), "nothing follows");
    assert_eq!(guest.read(), Err(reader::ReadError::Nothing));
    let generation = channel.publish(&content(1)).expect("published");
    assert_eq!(generation, (7 << 32) | 1);
    let found = guest.read().expect("readable");
    assert_eq!((found.generation, found.vcpus[0].node), (generation, 1));
    assert_eq!(guest.guest_vectors[0].read(), Ok(1), "one interrupt");
    assert_eq!(guest.guest_vectors[1].read(), Err(Errno::EAGAIN));
}

#[test]
fn the_memory_cannot_be_resized_by_who_shares_it() {
    let (_channel, socket) = Channel::new(7).expect("a channel");
    let mut guest = GuestEnd::connect(&socket).expect("all messages");
    for size in [0, REGION_SIZE as u64 - 1, REGION_SIZE as u64 * 2] {
        assert!(guest.memory.set_len(size).is_err(), "{size}");
    }
    guest.memory.seek(std::io::SeekFrom::End(0)).expect("the end");
    assert!(guest.memory.write(&[1]).is_err(), "it would grow");
    let error = fcntl(&guest.memory, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE));
    assert_eq!(error, Err(Errno::EPERM), "a guest cannot seal it against the host");
}

#[test]
fn the_host_is_not_led_astray_by_what_a_guest_writes() {
    let (mut channel, socket) = Channel::new(7).expect("a channel");
    let guest = GuestEnd::connect(&socket).expect("all messages");
    for counter in 1..=4 {
        guest.memory.write_all_at(&vec![0xff; REGION_SIZE], 0).expect("the guest can write");
        assert_eq!(channel.publish(&content(1)).expect("published") as u32, counter);
    }
}

#[test]
fn an_acknowledgement_is_noticed_once_and_only_when_expected() {
    let (mut channel, socket) = Channel::new(7).expect("a channel");
    let guest = GuestEnd::connect(&socket).expect("all messages");
    let ring = |vector: usize| guest.host_vectors[vector].write(1).expect("rung");
    let taken = |channel: &Channel| {
        let mut taken = channel.take_acknowledgements().expect("taken");
        taken.sort();
        taken
    };
    let fast = |number| Acknowledgement { number, safe: false };
    let safe = |number| Acknowledgement { number, safe: true };
    (0..16).for_each(|vector| assert_eq!(ring(vector), 8, "bytes"));
    assert!(taken(&channel).is_empty(), "nothing was published");
    channel.publish(&content(1)).expect("published");
    assert!(taken(&channel).is_empty(), "rung before the publication");
    ring(1);
    ring(2);
    assert_eq!(taken(&channel), [fast(1)]);
    ring(1);
    assert!(taken(&channel).is_empty(), "a second ring costs nothing");
    channel.publish(&content(0)).expect("published");
    ring(2);
    assert_eq!(taken(&channel), [fast(2)]);
    ring(8 + 2);
    assert_eq!(taken(&channel), [safe(2)], "the driver's mode is in the vector");
    channel.publish(&content(1)).expect("published");
    ring(8 + 2);
    ring(3);
    ring(8 + 3);
    assert_eq!(taken(&channel), [fast(3), safe(3)], "a guest may say what it likes");
}

#[test]
fn a_full_interrupt_counter_is_no_error() {
    let (mut channel, socket) = Channel::new(7).expect("a channel");
    let guest = GuestEnd::connect(&socket).expect("all messages");
    guest.guest_vectors[0].write(u64::MAX - 1).expect("the guest's QEMU fills it");
    channel.publish(&content(1)).expect("published");
}
