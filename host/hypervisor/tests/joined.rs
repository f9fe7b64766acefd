//! Several backends as one.

use nix::poll::{PollFd, PollFlags, poll};
use vnuma_hypervisor::{JoinedBackend, QmpBackend, VmBackend};
use vnuma_memory_backend::{MemoryBackend, MemoryVm};
use vnuma_model::{RunState, VmDescription, VmHandle};

fn vm(name: &str) -> MemoryVm {
    let description = VmDescription {
        name: name.to_owned(),
        pid: 1,
        run_state: RunState::Running,
        guest_nodes: Vec::new(),
        vcpus: Vec::new(),
        spare_slots: std::collections::BTreeMap::new(),
        devices: Vec::new(),
        memory_devices: Vec::new(),
    };
    MemoryVm::simulated(description).unwrap()
}

/// One backend by sockets, of which there are none, and one in memory.
fn joined() -> (MemoryBackend, JoinedBackend) {
    let memory = MemoryBackend::new().unwrap();
    let backends: Vec<Box<dyn VmBackend>> =
        vec![Box::new(QmpBackend::new(None, Vec::new())), Box::new(memory.clone())];
    (memory, JoinedBackend::new(backends))
}

fn names(joined: &mut JoinedBackend) -> Vec<String> {
    joined.scan().unwrap().into_iter().map(|found| found.name).collect()
}

#[test]
fn a_handle_goes_to_the_backend_that_made_it() {
    let (memory, joined) = joined();
    let handle = memory.add("a", vm("a"));
    assert!(joined.connect(&handle).is_ok());
    let other = joined.connect(&VmHandle::new("qmp:/nowhere/a.sock")).err().unwrap();
    assert!(other.nobody_listening(), "the backend of the socket was asked: {other}");
    let alone = JoinedBackend::new(vec![Box::new(QmpBackend::new(None, Vec::new()))]);
    let refused = alone.connect(&handle).err().unwrap().to_string();
    assert!(refused.ends_with("not a VM with a QMP socket"), "{refused}");
}

#[test]
fn one_that_cannot_list_its_vms_keeps_them_and_those_of_others() {
    let (first, second) = (MemoryBackend::new().unwrap(), MemoryBackend::new().unwrap());
    let mut joined = JoinedBackend::new(vec![Box::new(first.clone()), Box::new(second.clone())]);
    first.add("a", vm("a"));
    second.add("b", vm("b"));
    assert_eq!(names(&mut joined), ["a", "b"]);
    first.set_blind(true);
    second.add("c", vm("c"));
    assert_eq!(names(&mut joined), ["a", "b", "c"]);
    second.set_blind(true);
    assert!(joined.scan().is_err(), "nobody knows which there are");
}

#[test]
fn a_change_of_any_is_a_change_of_all() {
    let (memory, mut joined) = joined();
    assert!(joined.changes().is_none(), "one that only connects has no descriptor");
    names(&mut joined);
    joined.clear_changes();
    let changed = |joined: &JoinedBackend| {
        let mut wait = [PollFd::new(joined.changes().unwrap(), PollFlags::POLLIN)];
        poll(&mut wait, 0u8).unwrap() == 1
    };
    assert!(!changed(&joined));
    memory.add("a", vm("a"));
    assert!(changed(&joined));
    joined.clear_changes();
    assert!(!changed(&joined));
}
