//! A network namespace for each node, and a bridge between them.
//!
//! The bridge is in a namespace of the parent, so that all of it is gone with the processes.

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, unshare};
use std::{net::Ipv4Addr, process::Command};

const BRIDGE: &str = "dsm-run";

/// The address of a node.
pub fn address(node: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 83, 0, node + 1)
}

/// The calling process, which has one thread, is in a namespace of its own from now on.
pub fn leave() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("unshare(CLONE_NEWNET)")
}

/// Makes the parent's namespace and the bridge.
pub fn bridge() -> Result<()> {
    leave()?;
    ip(&["link", "add", BRIDGE, "type", "bridge"])?;
    ip(&["link", "set", BRIDGE, "up"])
}

/// Connects the namespace of a process that has left the parent's.
pub fn connect(node: u8, process: u32) -> Result<()> {
    let (outer, process) = (format!("node{node}"), process.to_string());
    let pair = ["link", "add", &outer, "type", "veth", "peer", "name", "eth0", "netns", &process];
    ip(&pair)?;
    ip(&["link", "set", &outer, "master", BRIDGE, "up"])
}

/// In a node's namespace, once it is connected.
pub fn configure(node: u8) -> Result<()> {
    ip(&["link", "set", "lo", "up"])?;
    ip(&["address", "add", &format!("{}/24", address(node)), "dev", "eth0"])?;
    ip(&["link", "set", "eth0", "up"])
}

fn ip(arguments: &[&str]) -> Result<()> {
    let shown = || format!("ip {}", arguments.join(" "));
    let output = Command::new("ip").args(arguments).output().with_context(shown)?;
    ensure!(output.status.success(), "{}: {}", shown(), String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
