//! Sockets that appear and vanish are noticed, in a directory that may itself be removed and made again.

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::{
    fs,
    os::{fd::AsFd, unix::net::UnixListener},
    path::Path,
};
use vnuma_hypervisor::{QmpBackend, VmBackend};
use vnuma_model::VmCandidate;

/// Is a change announced, within a time that no machine needs for that?
fn changed(backend: &QmpBackend) -> bool {
    let fd = backend.changes().expect("this host has inotify");
    poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], PollTimeout::from(10_000u16)).unwrap() > 0
}

fn quiet(backend: &QmpBackend) -> bool {
    let fd = backend.changes().expect("this host has inotify");
    poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::from(100u8)).unwrap() == 0
}

fn scan(backend: &mut QmpBackend) -> Vec<VmCandidate> {
    backend.clear_changes();
    backend.scan().unwrap()
}

fn names(candidates: &[VmCandidate]) -> Vec<&str> {
    candidates.iter().map(|candidate| candidate.name.as_str()).collect()
}

#[test]
fn sockets_are_announced_when_they_appear_and_vanish() {
    let directory = tempfile::tempdir().unwrap();
    let mut backend = QmpBackend::new(Some(directory.path().to_owned()), Vec::new());
    assert!(backend.changes().is_none(), "nothing is watched before the first scan");
    assert_eq!(scan(&mut backend), []);
    assert!(quiet(&backend));
    let socket = directory.path().join("a.sock");
    let _first = UnixListener::bind(&socket).unwrap();
    assert!(changed(&backend));
    let found = scan(&mut backend);
    assert_eq!(names(&found), ["a"]);
    assert!(quiet(&backend), "the change was cleared");
    // Another socket takes its place while the first is still held.
    let other = directory.path().join("new");
    let _second = UnixListener::bind(&other).unwrap();
    fs::rename(&other, &socket).unwrap();
    assert!(changed(&backend));
    let replaced = scan(&mut backend);
    assert_eq!(replaced[0].handle, found[0].handle);
    assert_ne!(replaced[0].instance, found[0].instance);
    fs::remove_file(&socket).unwrap();
    assert!(changed(&backend));
    assert_eq!(scan(&mut backend), []);
}

#[test]
fn a_directory_that_is_removed_and_made_again_is_watched_again() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("qmp");
    let mut backend = QmpBackend::new(Some(directory.clone()), Vec::new());
    assert_eq!(scan(&mut backend), [], "it is not there yet");
    for _ in 0..2 {
        fs::create_dir(&directory).unwrap();
        // This is what the look now and then is for.
        assert_eq!(scan(&mut backend), []);
        let _socket = UnixListener::bind(directory.join("a.sock")).unwrap();
        assert!(changed(&backend));
        assert_eq!(names(&scan(&mut backend)), ["a"]);
        fs::remove_dir_all(&directory).unwrap();
        assert!(changed(&backend), "its end is announced");
        assert_eq!(scan(&mut backend), []);
    }
}

#[test]
fn sockets_that_are_listed_are_watched_where_they_are() {
    let parent = tempfile::tempdir().unwrap();
    let socket = parent.path().join("single.monitor");
    let mut backend = QmpBackend::new(None, vec![socket.clone()]);
    assert_eq!(scan(&mut backend), []);
    let _listener = UnixListener::bind(&socket).unwrap();
    assert!(changed(&backend));
    assert_eq!(names(&scan(&mut backend)), ["single"]);
}

#[test]
fn only_handles_of_this_backend_are_connected_to() {
    let text = QmpBackend::handle(Path::new("/nonexistent/a.sock")).unwrap();
    assert_eq!(text.as_str(), "qmp:/nonexistent/a.sock");
    assert!(QmpBackend::default().connect(&text).err().unwrap().nobody_listening());
    let other = vnuma_model::VmHandle::new("memory:a");
    let error = QmpBackend::default().connect(&other).err().unwrap().to_string();
    assert!(error.starts_with("memory:a: cannot connect"), "{error}");
}
