//! Runs commands and copies files in the machines of the lab: the protocol, the client's side of it, and
//! the agent's.

pub mod client;
mod program;
pub mod protocol;
pub mod session;
pub mod terminal;
pub mod vsock;

/// Virtio ports that carry an agent are named with this and a number, from 0.
pub const PORT_PREFIX: &str = "org.vnuma.lab.";
/// How many such ports the server has, that is, how many sessions side by side.
pub const PORTS: usize = 4;
/// Port of AF_VSOCK that the agent of a guest listens at.
pub const VSOCK_PORT: u32 = 1024;
