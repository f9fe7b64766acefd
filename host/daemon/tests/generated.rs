//! A client that another project's generator makes of docs/openapi.json gets what it expects from a running daemon.

mod common;

use common::{
    Daemon,
    host::large_host,
    vms::{VcpuThread, describe},
    wait_for,
};
use nix::poll::{PollFd, PollFlags, poll};
use std::{
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};
use vnuma_abi_topology_channel::{MODE_FAST, ivshmem::PUBLISH_VECTOR};
use vnuma_channel_model::GuestEnd;
use vnuma_test_kit::HANG_LIMIT;

const VM: &str = "web";

/// Runs a program to its end and returns what it said.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{command:?}: {said}");
    said
}

/// Has the generator make a client in this directory.
fn generate(programs: &Path, directory: &Path) {
    let description = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let mut generator = Command::new(programs.join("openapi-python-client"));
    let output = directory.join("vnuma_client");
    generator.args(["generate", "--meta", "none", "--path", description, "--output-path"]).arg(output);
    let said = run(generator.current_dir(directory));
    // It says what it has left out. Lines without end are beyond it.
    let left_out = said.split("WARNING parsing ").skip(1).filter(|warning| !warning.contains("x-ndjson"));
    let left_out: Vec<_> = left_out.chain(said.contains("removal of").then_some(said.as_str())).collect();
    assert!(left_out.is_empty(), "the generator has left out: {left_out:?}");
}

/// A guest that acknowledges what is published, until it is told to stop or its device goes.
fn be_a_guest(daemon: &Daemon, stop: &AtomicBool) {
    let until = Instant::now() + HANG_LIMIT;
    let end = loop {
        let plugged = |vm: &mut vnuma_memory_backend::MemoryVm| {
            vm.device.as_ref().map(|device| GuestEnd::connect(device).expect("all messages"))
        };
        match daemon.change(VM, plugged) {
            Some(end) => break end,
            // Its operator has failed.
            None if stop.load(Ordering::Relaxed) => return,
            None => assert!(Instant::now() < until, "nobody attaches the VM"),
        }
        thread::sleep(std::time::Duration::from_millis(5));
    };
    end.announce(MODE_FAST).expect("announced");
    let (mut acknowledged, vector) = (0, &end.guest_vectors[PUBLISH_VECTOR]);
    while !stop.load(Ordering::Relaxed) {
        if let Ok(topology) = end.read()
            && topology.generation != acknowledged
        {
            acknowledged = topology.generation;
            end.store_acknowledged(acknowledged).expect("acknowledged");
            end.ring().expect("rung");
        }
        if let Ok(1..) = poll(&mut [PollFd::new(vector.as_fd(), PollFlags::POLLIN)], 20_u16) {
            let _ = vector.read();
        }
    }
}

#[test]
#[ignore = "needs OPENAPI_CLIENT, the directory of a generator's programs, which cargo xtask test installs"]
fn a_generated_client_gets_what_is_described() {
    let programs = PathBuf::from(std::env::var_os("OPENAPI_CLIENT").expect("OPENAPI_CLIENT"));
    let directory = tempfile::tempdir().expect("a directory");
    generate(&programs, directory.path());
    // With room for another VM.
    let daemon = Daemon::start_with(None, |config| large_host(&config.root));
    let threads = [VcpuThread::start(), VcpuThread::start()];
    threads[0].pin(0);
    threads[1].pin(1);
    let tids = threads.each_ref().map(|thread| thread.tid);
    daemon.add(VM, describe(VM, process::id().cast_signed(), &[0, 1], &tids));
    wait_for("the VM to be described", || {
        common::http::ask(&daemon.socket, "GET", "/v1/vms/web", "").1["described"] == true
    });
    let stop = AtomicBool::new(false);
    let said = thread::scope(|scope| {
        scope.spawn(|| be_a_guest(&daemon, &stop));
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/generated/use_client.py");
        let mut client = Command::new(programs.join("python3"));
        client.arg(script).arg(&daemon.socket).arg(VM).env("PYTHONPATH", directory.path());
        let output = client.output();
        stop.store(true, Ordering::Relaxed);
        output.expect("python3")
    });
    let text = [said.stdout, said.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(said.status.success() && text.contains("all is as described"), "{text}");
}
