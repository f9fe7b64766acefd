//! Runs commands and copies files in the machines of the lab: the protocol, the client's side of it, and
//! the agent's.

use std::path::PathBuf;
use std::{fs, io};

pub mod client;
pub mod emulator;
mod outlet;
mod program;
pub mod protocol;
pub mod session;
pub mod terminal;
pub mod vsock;

/// Virtio ports that carry an agent are named with this and a number, from 0.
pub const PORT_PREFIX: &str = "org.vnuma.lab.";
/// How many such ports the server has, that is, how many sessions side by side.
pub const PORTS: usize = 4;
/// Virtio port that is connected to the monitor of the server's QEMU, where the profile has `[hotplug]`.
pub const MONITOR_PORT: &str = "org.vnuma.lab.qmp";
/// Port of AF_VSOCK that the agent of a guest listens at.
pub const VSOCK_PORT: u32 = 1024;

/// The device node of the virtio port of that name. There is no udev to make links by name.
pub fn find_port(name: &str) -> io::Result<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports")? {
        let path = entry?.path();
        if let (Ok(found), Some(node)) = (fs::read_to_string(path.join("name")), path.file_name())
            && found.trim_end() == name
        {
            return Ok(PathBuf::from("/dev").join(node));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("/sys/class/virtio-ports: no port is named {name}")))
}
