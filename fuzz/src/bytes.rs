//! Messages of a few bytes.

use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair};
use std::{
    io::IoSlice,
    mem::{offset_of, size_of},
    os::fd::AsRawFd,
};
use vnuma_abi_bpf::{AFFINITY, EXITED, MIGRATED, VcpuEvent};
use vnuma_abi_topology_channel::ivshmem::VECTORS;
use vnuma_channel_model::GuestEnd;
use vnuma_observe::{
    location::{LocationKind, parse_record},
    parse_uevent,
};

/// Records of the BPF program: what was understood is what stands at the offsets of the layout.
pub fn bpf_record(input: &[u8]) {
    let Some(event) = parse_record(input) else { return };
    assert!(input.len() >= size_of::<VcpuEvent>() && event.tid >= 0);
    let kind = match event.kind {
        LocationKind::Migrated => MIGRATED,
        LocationKind::AffinityChanged => AFFINITY,
        LocationKind::Exited => EXITED,
    };
    let at = |offset: usize, bytes: &[u8]| assert_eq!(&input[offset..offset + bytes.len()], bytes);
    at(offset_of!(VcpuEvent, kind), &kind.to_ne_bytes());
    at(offset_of!(VcpuEvent, tid), &event.tid.to_ne_bytes());
    at(offset_of!(VcpuEvent, cpu), &event.cpu.to_ne_bytes());
    at(offset_of!(VcpuEvent, time_ns), &event.time_ns.to_ne_bytes());
}

/// The kernel's messages about devices: what was understood stands in the message.
pub fn uevent(input: &[u8]) {
    let Some(event) = parse_uevent(input) else { return };
    assert!(input.starts_with(format!("{}@{}", event.action, event.path).as_bytes()));
    assert!(event.path.starts_with('/') && event.action.bytes().all(|byte| byte.is_ascii_lowercase()));
    let subsystem = format!("SUBSYSTEM={}", event.subsystem);
    assert!(input.split(|&byte| byte == 0).any(|field| field == subsystem.as_bytes()));
}

/// What QEMU would get from the server of a device: messages of nine bytes here, the first of which says how many
/// descriptors go with it. A whole device, or an error.
pub fn ivshmem(input: &[u8]) {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (server, client) =
        socketpair(AddressFamily::Unix, SockType::Stream, None, flags).expect("a pair of sockets");
    for message in input.chunks(9).take(64) {
        let (count, bytes) = (usize::from(message[0] % 4), &message[1..]);
        let descriptors = vec![client.as_raw_fd(); count];
        let rights = [ControlMessage::ScmRights(&descriptors)];
        let rights = if count > 0 { &rights[..] } else { &[] };
        if bytes.is_empty()
            || sendmsg::<()>(server.as_raw_fd(), &[IoSlice::new(bytes)], rights, MsgFlags::MSG_NOSIGNAL, None)
                .is_err()
        {
            break;
        }
    }
    drop(server);
    match GuestEnd::connect(&client) {
        Ok(end) => assert_eq!((end.host_vectors.len(), end.guest_vectors.len()), (VECTORS, VECTORS)),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
