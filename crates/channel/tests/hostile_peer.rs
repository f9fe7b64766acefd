//! A hypervisor or a guest that changes under the host what it shares with it: open files, memory, doorbells.

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::eventfd::EventFd,
};
use std::{sync::mpsc, thread, time::Duration};
use vnuma_abi_topology_channel::Vcpu;
use vnuma_channel::{Channel, Content, guest::GuestEnd};
use vnuma_topology::DistanceMatrix;

/// Nothing here takes longer than milliseconds unless it hangs.
const HANG_LIMIT: Duration = Duration::from_secs(20);

fn content() -> Content {
    let distances = DistanceMatrix::new(vec![vec![10]]).expect("square");
    Content::new(distances, vec![Vcpu::default()]).expect("within limits")
}

fn channel() -> (Channel, GuestEnd) {
    let (channel, socket) = Channel::new(7).expect("a channel");
    (channel, GuestEnd::connect(&socket).expect("all messages"))
}

/// Runs it in a thread of its own, so that one that blocks fails the test.
fn returns<T: Send + 'static>(what: &str, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(act()));
    receiver.recv_timeout(HANG_LIMIT).unwrap_or_else(|_| panic!("{what} blocks"))
}

/// What a hostile peer does to the open file of an eventfd: a read of an empty counter blocks then, and a write of a
/// full one.
fn make_blocking(vector: &EventFd) {
    let flags = OFlag::from_bits_retain(fcntl(vector, FcntlArg::F_GETFL).expect("its flags"));
    fcntl(vector, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK)).expect("set");
}

#[test]
fn blocking_eventfds_block_nobody() {
    for (name, counter) in [("empty", 0), ("full", u64::MAX - 1)] {
        let (mut channel, guest) = channel();
        for vector in guest.host_vectors.iter().chain(&guest.guest_vectors) {
            if counter > 0 {
                vector.write(counter).expect("filled");
            }
            make_blocking(vector);
        }
        let channel = returns(&format!("publish() with {name} counters"), move || {
            // Several: each finds the state that the one before left.
            for _ in 0..3 {
                channel.publish(&content()).expect("published");
            }
            channel
        });
        let channel = returns(&format!("raise() with {name} counters"), move || {
            channel.raise().expect("raised");
            channel
        });
        returns(&format!("take_acknowledgements() with {name} counters"), move || {
            for vector in &guest.host_vectors {
                if counter == 0 {
                    vector.write(1).expect("rung");
                }
                channel.take_acknowledgements().expect("taken");
                channel.take_acknowledgements().expect("taken");
            }
        });
    }
}
