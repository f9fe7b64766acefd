//! What an earlier vnumad left.

use crate::{expect_clear, expect_plain};
use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{Mutex, OnceLock, PoisonError},
};
use vnuma_channel::{Channel, Files, Identity, Plug};
use vnuma_daemon::{parse_masks, parse_record};
use vnuma_placement::reservation::file;

/// A channel that this process holds, as a hypervisor does, and its identity.
struct Held {
    _channel: Channel,
    _client: OwnedFd,
    identity: Files,
    pidfd: OwnedFd,
}

fn held() -> &'static Mutex<Held> {
    static HELD: OnceLock<Mutex<Held>> = OnceLock::new();
    HELD.get_or_init(|| {
        let (channel, Plug::Ivshmem(client)) = Channel::create(1).expect("a channel");
        let Identity(identity) = channel.identity().expect("its identity");
        let own = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).expect("a pidfd");
        Mutex::new(Held { _channel: channel, _client: client, identity, pidfd })
    })
}

/// A record of any content. Numbers from 1000 stand for those of a channel that is there, by position, so that the fuzzer
/// need not guess them. Only what names that channel is taken over.
pub fn record(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    // The record of masks is in a file beside it.
    if let Err(reason) = parse_masks(&text) {
        expect_plain(&reason);
    }
    let found = match parse_record(&text) {
        Ok(Identity(files)) => files,
        Err(reason) => return expect_plain(&reason),
    };
    let held = held().lock().unwrap_or_else(PoisonError::into_inner);
    let own = &held.identity;
    let numbers: Vec<u64> = [own.memory_device, own.memory_inode]
        .into_iter()
        .chain(own.guest_vectors.iter().copied())
        .chain(own.host_vectors.iter().copied())
        .collect();
    let real = |number: u64| {
        let position = number.checked_sub(1000).and_then(|position| usize::try_from(position).ok());
        position.and_then(|position| numbers.get(position).copied()).unwrap_or(number)
    };
    let named = Files {
        memory_device: real(found.memory_device),
        memory_inode: real(found.memory_inode),
        guest_vectors: found.guest_vectors.into_iter().map(real).collect(),
        host_vectors: found.host_vectors.into_iter().map(real).collect(),
    };
    let (own_directory, identity) = (Path::new("/proc/self"), Identity(named.clone()));
    let taken = Channel::take_over(&identity, held.pidfd.as_fd(), own_directory, 2);
    let mut all: Vec<u64> = named.guest_vectors.iter().chain(&named.host_vectors).copied().collect();
    all.sort_unstable();
    let mut its: Vec<u64> = numbers[2..].to_vec();
    its.sort_unstable();
    let memory = |identity: &Files| (identity.memory_device, identity.memory_inode);
    let right =
        memory(&named) == memory(own) && named.guest_vectors.len() == own.guest_vectors.len() && all == its;
    assert!(taken.is_ok() || !right, "{:?}", taken.err());
    // Another eventfd of this process may be named as well, and is as good; the memory may not.
    assert!(taken.is_err() || memory(&named) == memory(own), "{named:?}");
}

/// A file of reservations. What is accepted promises nothing twice and reads back as itself; a refusal names file and field.
pub fn reservations(input: &[u8]) {
    const NOW_NS: u64 = 1_000_000_000;
    let text = String::from_utf8_lossy(input);
    let path = Path::new("/run/x.json");
    match file::parse(path, &text, "boot", NOW_NS) {
        Ok(book) => {
            let mut cpus: Vec<u32> =
                book.all().flat_map(|one| one.placement.pins().map(|pin| pin.cpu)).collect();
            let count = cpus.len();
            cpus.sort_unstable();
            cpus.dedup();
            assert_eq!(cpus.len(), count, "a CPU is reserved twice");
            assert_eq!(book.claims(|_, _| u64::MAX).len(), book.all().count());
            assert_eq!(file::parse(path, &file::print(&book, "boot"), "boot", NOW_NS), Ok(book));
        }
        Err(error) => {
            let message = error.to_string();
            expect_clear(&message);
            assert!(message.starts_with("/run/x.json: ") && !error.field.is_empty(), "{message}");
        }
    }
}
