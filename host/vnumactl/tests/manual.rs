//! The errors in docs/vnumactl.md are those that vnumad and vnumactl make.

use std::process::Command;
use vnuma_daemon::core::Refusal;
use vnuma_hypervisor::VmError;
use vnuma_policy::{
    memory_move::MemoryPolicy,
    rules::{RehomeObstacle, ResizeObstacle},
};
use vnuma_test_kit::errors::compare;
use vnumactl::calibrate::{CalibrateError, ENDED};
use vnumactl::replay::ReplayError;

/// What vnumactl says where no vnumad is.
fn unreachable() -> String {
    let socket = ["--socket", "/nonexistent/vnumad.sock", "list"];
    let output = Command::new(env!("CARGO_BIN_EXE_vnumactl")).args(socket).output().expect("runs");
    assert_eq!(output.status.code(), Some(3));
    let error = String::from_utf8(output.stderr).expect("UTF-8");
    error.strip_prefix("vnumactl: ").expect("its name").to_owned()
}

#[test]
fn the_manual_names_errors_by_their_text() {
    let vm = || "web".to_owned();
    let timeout = || VmError::Timeout { vm: vm(), command: "device_add".into(), limit_ms: 1000 };
    let of_vm = [
        VmError::NoFreePort { vm: vm() },
        VmError::BootVcpu { vm: vm() },
        VmError::NoSpareSlot { vm: vm(), node: 1 },
        VmError::PlugIgnored { vm: vm(), limit_ms: 10_000 },
        VmError::ReplugUndescribed { vm: vm(), vcpu: 1, new: 5, source: Box::new(timeout()) },
        VmError::NotUndone { cause: Box::new(timeout()), error: Box::new(timeout()) },
        VmError::UnplugPending { vm: vm(), vcpu: 1, limit_ms: 10_000 },
        VmError::NotMigrated { vm: vm() },
        VmError::Confined {
            vm: vm(),
            profile: "libvirt-1".into(),
            socket: "/run/vnuma/libvirt/7.sock".into(),
            reason: "Permission denied".into(),
        },
    ];
    let refusals = [
        Refusal::Uma { vm: vm() },
        Refusal::NoGuestNodes { vm: vm() },
        Refusal::Memory { vm: vm(), problem: "the process has ended".into() },
        Refusal::NoGuestNode { vm: vm(), node: 7, present: vec![0, 1] },
        Refusal::NoRehome { vm: vm() },
        Refusal::NoResize { vm: vm() },
        Refusal::Resize { vm: vm(), guest_node: 0, source: ResizeObstacle::NoDevice },
        Refusal::Rehome { vm: vm(), guest_node: 0, node: 1, source: RehomeObstacle::NoMemory(1) },
        Refusal::Attached { vm: vm() },
        Refusal::Lost { vm: vm() },
        Refusal::NotConnected { vm: vm(), problem: "gone".into() },
        Refusal::Unfinished { source: timeout() },
        Refusal::AskedAgain { source: VmError::DetachPending { vm: vm(), limit_ms: 1000 } },
        Refusal::Watchers { uid: 7, most: 16 },
        Refusal::Requests { who: "user 7".into(), has: 9 },
        Refusal::Overloaded,
        Refusal::Migrating { vm: vm(), destination: "tcp:b:1".into() },
        Refusal::Waits { vm: vm() },
        Refusal::NoMigration { vm: vm() },
        Refusal::PastCancel { vm: vm(), destination: "tcp:b:1".into(), why: "it is over" },
        Refusal::Destination { vm: vm(), destination: "x".into(), why: "it has a blank".into() },
    ];
    let mut made: Vec<String> = of_vm.iter().map(ToString::to_string).collect();
    made.extend(refusals.iter().map(ToString::to_string));
    made.push(unreachable());
    made.extend("all".parse::<MemoryPolicy>().err().map(|error| error.to_string()));
    let broken = ReplayError::Line { line: 3, reason: "expected value".into() };
    made.extend([broken, ReplayError::Empty].map(|error| format!("web.rec: {error}")));
    let calibration = [
        CalibrateError::NoCounters("no PMU".into()),
        CalibrateError::Alone(3),
        CalibrateError::Load { load: "./mg.sh".into(), reason: ENDED.into() },
        CalibrateError::NoBounds("no load is LLC-T".into()),
    ];
    made.extend(calibration.iter().map(ToString::to_string));
    // src/lib.rs has the same texts from the program's own errors.
    made.push("web: it did not migrate to tcp:b:4444".into());
    made.extend(["setup --apply needs root".into(), "2 of what was to be done failed".into()]);
    // host/daemon/tests/rights.rs has the same text from a running daemon.
    made.push("user 7 has 64 connections to vnumad, the most that one may have".into());
    compare(include_str!("../../../docs/vnumactl.md"), &made);
}
