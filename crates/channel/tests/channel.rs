//! A channel as QEMU sees it.

use nix::{
    cmsg_space,
    errno::Errno,
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        eventfd::EventFd,
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
    },
};
use std::{
    fs::File,
    io::{IoSliceMut, Seek, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::FileExt,
    },
};
use vnuma_abi_topology_channel::{REGION_SIZE, Vcpu, ivshmem};
use vnuma_channel::{Channel, Content, reader};
use vnuma_topology::DistanceMatrix;

/// The next message, as QEMU's `ivshmem_recv_msg` reads it.
fn receive(socket: &OwnedFd) -> Option<(i64, Option<OwnedFd>)> {
    let mut bytes = [0; 8];
    let mut space = cmsg_space!([i32; 4]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_DONTWAIT;
    let message = match recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), flags) {
        Err(Errno::EAGAIN) => return None,
        other => other.expect("a message"),
    };
    assert_eq!(message.bytes, 8);
    let mut descriptors = Vec::new();
    for control in message.cmsgs().expect("not truncated") {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel has just made these descriptors for this process.
            descriptors.extend(raw.into_iter().map(|raw| unsafe { OwnedFd::from_raw_fd(raw) }));
        }
    }
    assert!(descriptors.len() <= 1);
    Some((i64::from_le_bytes(bytes), descriptors.pop()))
}

struct Guest {
    memory: File,
    host_vectors: Vec<EventFd>,
    guest_vectors: Vec<EventFd>,
}

fn connect(socket: &OwnedFd) -> Guest {
    assert!(matches!(receive(socket), Some((0, None))), "version");
    assert!(matches!(receive(socket), Some((0, None))), "own peer number, 0 for master=on");
    let Some((-1, Some(memory))) = receive(socket) else { panic!("the memory ends the synchronous part") };
    let vectors = |peer: u16| {
        let vector = |_| match receive(socket) {
            // SAFETY: an eventfd that was just received and belongs to nobody else.
            Some((number, Some(event))) if number == i64::from(peer) => unsafe {
                EventFd::from_owned_fd(event)
            },
            other => panic!("expected a vector of peer {peer}, found {other:?}"),
        };
        (0..ivshmem::VECTORS).map(vector).collect::<Vec<_>>()
    };
    let (host_vectors, guest_vectors) = (vectors(ivshmem::HOST_PEER), vectors(ivshmem::GUEST_PEER));
    assert!(receive(socket).is_none(), "nothing follows");
    Guest { memory: File::from(memory), host_vectors, guest_vectors }
}

impl Guest {
    fn read(&self) -> Result<reader::Topology, reader::ReadError> {
        reader::read(|offset| {
            let mut word = [0; 8];
            self.memory.read_exact_at(&mut word, offset as u64).expect("inside the region");
            u64::from_le_bytes(word)
        })
    }
}

fn content(node: u16) -> Content {
    let distances = DistanceMatrix::new(vec![vec![10, 21], vec![21, 10]]).expect("square");
    Content::new(distances, vec![Vcpu { apic_id: 3, node, flags: 0 }]).expect("within limits")
}

#[test]
fn qemu_finds_everything_waiting() {
    let (mut channel, socket) = Channel::new(7).expect("a channel");
    let guest = connect(&socket);
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
    let mut guest = connect(&socket);
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
    let guest = connect(&socket);
    for counter in 1..=4 {
        guest.memory.write_all_at(&vec![0xff; REGION_SIZE], 0).expect("the guest can write");
        assert_eq!(channel.publish(&content(1)).expect("published") as u32, counter);
    }
}

#[test]
fn an_acknowledgement_is_noticed_once_and_only_when_expected() {
    let (mut channel, socket) = Channel::new(7).expect("a channel");
    let guest = connect(&socket);
    let ring = |vector: usize| guest.host_vectors[vector].write(1).expect("rung");
    let taken = |channel: &Channel| channel.take_acknowledgements().expect("taken");
    (0..8).for_each(|vector| assert_eq!(ring(vector), 8, "bytes"));
    assert!(taken(&channel).is_empty(), "nothing was published");
    channel.publish(&content(1)).expect("published");
    assert!(taken(&channel).is_empty(), "rung before the publication");
    ring(1);
    ring(2);
    assert_eq!(taken(&channel), [1]);
    ring(1);
    assert!(taken(&channel).is_empty(), "a second ring costs nothing");
    channel.publish(&content(0)).expect("published");
    ring(2);
    assert_eq!(taken(&channel), [2]);
}

#[test]
fn a_full_interrupt_counter_is_no_error() {
    let (mut channel, socket) = Channel::new(7).expect("a channel");
    let guest = connect(&socket);
    guest.guest_vectors[0].write(u64::MAX - 1).expect("the guest's QEMU fills it");
    channel.publish(&content(1)).expect("published");
}
