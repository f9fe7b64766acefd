//! A channel whose host's end has died is found again in the process that holds the other end, and nothing else is.

use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::{
    fs,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{FileExt, symlink},
    },
    path::Path,
    process::Command,
};
use vnuma_abi_topology_channel::{MODE_FAST, REGION_SIZE, Vcpu};
use vnuma_channel::{Channel, Content, Files, Identity, Plug};
use vnuma_channel_model::GuestEnd;
use vnuma_model::DistanceMatrix;

const OWN: &str = "/proc/self";

/// What this process, in the place of a hypervisor, holds of a channel whose host's end is gone.
fn orphan() -> (Files, GuestEnd) {
    let (channel, Plug::Ivshmem(socket)) = Channel::create(1).expect("a channel");
    let guest = GuestEnd::connect(&socket).expect("all messages");
    let Identity(files) = channel.identity().expect("its identity");
    (files, guest)
}

fn own_pidfd() -> OwnedFd {
    pidfd_open(getpid(), PidfdFlags::empty()).expect("a pidfd")
}

fn take(files: &Files, process: &Path) -> Result<Channel, String> {
    let identity = Identity(files.clone());
    let taken = Channel::take_over(&identity, own_pidfd().as_fd(), process, 2);
    let channel = taken.map_err(|error| error.to_string())?;
    assert_eq!(channel.identity().expect("its identity"), identity);
    Ok(channel)
}

fn refused(identity: &Files, process: &Path, reason: &str) {
    let error = take(identity, process).expect_err("taken over");
    assert!(error.contains(reason), "{error:?} should say {reason:?}");
}

#[test]
fn the_right_one_of_several_is_taken_over_and_goes_on() {
    let orphans = [orphan(), orphan(), orphan()];
    let (identity, guest) = &orphans[1];
    let mut channel = take(identity, Path::new(OWN)).expect("taken over");
    let distances = DistanceMatrix::new(vec![vec![10]]).expect("square");
    let content = Content::new(distances, vec![Vcpu { apic_id: 3, node: 0 }]).expect("content");
    let generation = channel.publish(&content).expect("published");
    assert_eq!(guest.read().expect("readable").generation, generation);
    assert_eq!(guest.guest_vectors[0].read(), Ok(1), "it is signalled");
    guest.acknowledge(generation).expect("signalled");
    assert_eq!(channel.take_acknowledgement().expect("taken"), Some(generation));
    for other in [0, 2] {
        assert!(orphans[other].1.read().is_err(), "published to another guest");
    }
}

/// The guest could write everything while the channel was not served, and goes on doing so.
#[test]
fn any_content_is_taken_over() {
    let distances = DistanceMatrix::new(vec![vec![10]]).expect("square");
    let content = Content::new(distances, vec![Vcpu { apic_id: 3, node: 0 }]).expect("content");
    for byte in [0x00, 0x01, 0x7f, 0x80, 0xff] {
        let (identity, guest) = orphan();
        guest.memory.write_all_at(&vec![byte; REGION_SIZE], 0).expect("the guest can write");
        for vector in guest.host_vectors.iter().chain(&guest.guest_vectors) {
            vector.write(u64::MAX - 1).expect("filled");
        }
        let mut channel = take(&identity, Path::new(OWN)).expect("taken over");
        assert_eq!(channel.take_acknowledgement().expect("taken"), None);
        let generation = channel.publish(&content).expect("published");
        assert_eq!(guest.read().expect("the header is whole again").generation, generation);
        guest.announce(MODE_FAST).expect("written");
        guest.store_acknowledged(generation).expect("written");
        assert_eq!(channel.take_acknowledgement().expect("taken"), Some(generation));
    }
}

/// An acknowledgement of what the one before published is not one of what this one did.
#[test]
fn what_was_acknowledged_to_a_predecessor_does_not_count() {
    let (identity, guest) = orphan();
    let mut channel = take(&identity, Path::new(OWN)).expect("taken over");
    guest.acknowledge((1 << 32) | 1).expect("signalled");
    assert_eq!(channel.take_acknowledgement().expect("taken"), None);
    let distances = DistanceMatrix::new(vec![vec![10]]).expect("square");
    let content = Content::new(distances, vec![Vcpu { apic_id: 3, node: 0 }]).expect("content");
    channel.publish(&content).expect("published");
    assert_eq!(channel.take_acknowledgement().expect("taken"), None);
}

#[test]
fn an_identity_that_names_something_else_is_refused() {
    let (good, _guest) = orphan();
    let (other, _other) = orphan();
    let with = |change: &dyn Fn(&mut Files)| {
        let mut identity = good.clone();
        change(&mut identity);
        identity
    };
    for (identity, reason) in [
        (with(&|i| i.memory_inode ^= 1 << 40), "does not hold the channel's shared memory"),
        (with(&|i| i.memory_device += 1), "does not hold the channel's shared memory"),
        (with(&|i| i.host_vectors[3] = u64::MAX), "does not hold the channel's vector"),
        (with(&|i| i.guest_vectors[1] = i.guest_vectors[0]), "all different"),
        (with(&|i| i.host_vectors[0] = i.guest_vectors[0]), "all different"),
        (with(&|i| i.guest_vectors.truncate(3)), "all different"),
        (with(&|i| i.host_vectors.push(other.host_vectors[0])), "all different"),
    ] {
        refused(&identity, Path::new(OWN), reason);
    }
    assert!(take(&good, Path::new(OWN)).is_ok());
}

/// A number of a descriptor means something else by the time that it is copied: here because the directory is another
/// process's, or says what is not so.
#[test]
fn what_was_copied_is_looked_at_again() {
    let (identity, guest) = orphan();
    let memory = guest.memory.try_clone().expect("a copy");
    let mut holder = Command::new("sleep").arg("1000").stdin(memory).spawn().expect("sleep");
    let directory = format!("/proc/{}", holder.id());
    let error = take(&identity, Path::new(&directory)).expect_err("taken over");
    let _ = holder.kill();
    let _ = holder.wait();
    assert!(error.contains("does not hold the channel's shared memory"), "{error}");

    // Two eventfds change places.
    let lies = tempfile::tempdir().expect("a directory");
    symlink(Path::new(OWN).join("fd"), lies.path().join("fd")).expect("linked");
    let fdinfo = lies.path().join("fdinfo");
    fs::create_dir(&fdinfo).expect("made");
    let (one, other) = (identity.guest_vectors[0], identity.host_vectors[0]);
    for entry in fs::read_dir(Path::new(OWN).join("fdinfo")).expect("there").flatten() {
        let Ok(text) = fs::read_to_string(entry.path()) else { continue };
        let swap = |word: &str| match word.parse::<u64>() {
            Ok(id) if id == one => other.to_string(),
            Ok(id) if id == other => one.to_string(),
            _ => word.to_owned(),
        };
        let line = |line: &str| match line.strip_prefix("eventfd-id:") {
            Some(id) => format!("eventfd-id: {}\n", swap(id.trim())),
            None => format!("{line}\n"),
        };
        fs::write(fdinfo.join(entry.file_name()), text.lines().map(line).collect::<String>())
            .expect("written");
    }
    refused(&identity, lies.path(), "does not hold the channel's vector");
}
