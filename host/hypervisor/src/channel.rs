//! The topology channel's device in a VM.
//!
//! ```text
//!            getfd           chardev-add            device_add
//!  nothing ────────▶ named fd ──────────▶ chardev ─────────────▶ attached
//!     ▲    ◀──closefd──┘                    │ ▲                     │
//!     └───────────────── chardev-remove ────┘ └── DEVICE_DELETED ◀──┘ device_del
//! ```
//!
//! Each failing step goes back to the left; a step that was not answered in time is taken back as well, as
//! QEMU may still get to it: it does both in their order. What a crash leaves half-way is removed
//! by the next connection ([`tidy`]) and before the next attach.

use crate::{
    VmError, VmEvent,
    client::Client,
    commands::{
        CHANNEL_DRIVER, ChardevAdd, ChardevRemove, CloseFd, DeviceAddChannel, DeviceDel, GetFd, QomGet,
        QomList,
    },
    message::CHANNEL_ID,
};
use serde_json::Value;
use std::{
    collections::VecDeque,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};
use vnuma_abi_topology_channel::ivshmem::VECTORS;

/// Containers of devices: those with an id, those without.
const CONTAINERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// The bus that root ports themselves are on.
const ROOT_BUS: &str = "pcie.0";

/// Most root ports searched.
const MAX_PORTS: usize = 256;

/// Id of a root port kept free for vnuma begins so; it is taken before others.
const PREFERRED: &str = "vnuma";

pub(crate) fn attached(client: &mut Client) -> Result<bool, VmError> {
    let children = client.execute(&QomList { path: CONTAINERS[0] })?;
    let device = children.iter().find(|child| child.name == CHANNEL_ID);
    Ok(device.is_some_and(|device| device.kind == format!("child<{CHANNEL_DRIVER}>")))
}

/// Is the device there? If not, what an attach left that was cut short is removed.
pub(crate) fn tidy(client: &mut Client) -> Result<bool, VmError> {
    let attached = attached(client)?;
    if !attached {
        remove_chardev(client)?;
        close_fd(client)?;
    }
    Ok(attached)
}

pub(crate) fn attach(client: &mut Client, server: &OwnedFd) -> Result<(), VmError> {
    if attached(client)? {
        return Err(VmError::AlreadyAttached { vm: client.vm().to_owned() });
    }
    let bus = free_port(client)?;
    remove_chardev(client)?;
    if let Err(error) = client.execute_with_fd(&GetFd { fdname: CHANNEL_ID }, Some(server.as_fd())) {
        undo(client, &error, &close_fd);
        return Err(error);
    }
    if let Err(error) = client.execute(&ChardevAdd::over_fd(CHANNEL_ID, CHANNEL_ID)) {
        undo(client, &error, &close_fd);
        undo(client, &error, &remove_chardev);
        return Err(error);
    }
    let vectors = u32::try_from(VECTORS).unwrap_or(u32::MAX);
    let device = DeviceAddChannel::new(CHANNEL_ID, CHANNEL_ID, &bus, vectors);
    if let Err(error) = client.execute(&device) {
        if matches!(error, VmError::Timeout { .. }) {
            // QEMU may still get to it.
            undo(client, &error, &|client| client.execute(&DeviceDel { id: CHANNEL_ID }).map(drop));
        }
        undo(client, &error, &remove_chardev);
        return Err(error);
    }
    Ok(())
}

/// Asks the guest to let go of the device and waits for it, within the limit of a command.
/// False if it has not done so yet.
pub(crate) fn detach(client: &mut Client) -> Result<bool, VmError> {
    if !attached(client)? {
        remove_chardev(client)?;
        return Err(VmError::NotAttached { vm: client.vm().to_owned() });
    }
    match client.execute(&DeviceDel { id: CHANNEL_ID }) {
        // It was asked before. QEMU shows that only by this text.
        Err(VmError::Refused { reason, .. }) if reason.contains("in the process of unplug") => {}
        other => _ = other?,
    }
    let until = Instant::now() + client.limits().command;
    let mut others = VecDeque::new();
    let detached = loop {
        match client.event(until)? {
            Some(VmEvent::ChannelDetached) => break true,
            Some(VmEvent::Disconnected) => {
                return Err(VmError::Disconnected { vm: client.vm().to_owned() });
            }
            Some(other) if others.contains(&other) => {}
            Some(other) => others.push_back(other),
            None => break false,
        }
    };
    client.put_back(others);
    if detached {
        clean_up(client);
    }
    Ok(detached)
}

/// Removes what is left when the device is gone. Should it fail, the next attach does it.
pub(crate) fn clean_up(client: &mut Client) {
    if let Err(error) = remove_chardev(client) {
        client.complain(format!("cannot remove the channel's character device: {error}"));
    }
}

/// Removes the channel's character device; that there is none is no error.
fn remove_chardev(client: &mut Client) -> Result<(), VmError> {
    match client.execute(&ChardevRemove { id: CHANNEL_ID }) {
        Ok(_) | Err(VmError::Refused { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Closes the channel's descriptor, if QEMU still holds it under its name.
fn close_fd(client: &mut Client) -> Result<(), VmError> {
    match client.execute(&CloseFd { fdname: CHANNEL_ID }) {
        Ok(_) | Err(VmError::Refused { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Undoes a step because of `cause`. It is no error if there is nothing to undo.
fn undo(client: &mut Client, cause: &VmError, act: &dyn Fn(&mut Client) -> Result<(), VmError>) {
    match act(client) {
        Ok(()) | Err(VmError::Refused { .. }) => {}
        // QEMU will do it after the commands before.
        Err(VmError::Timeout { .. }) if matches!(cause, VmError::Timeout { .. }) => {}
        // The next connection does it; often QEMU has ended.
        Err(error) => tracing::debug!(vm = client.vm(), %cause, %error, "cannot undo an attach yet"),
    }
}

/// Bus of a free root port that allows hot-plug.
fn free_port(client: &mut Client) -> Result<String, VmError> {
    let mut ports = Vec::new();
    for container in CONTAINERS {
        let children = client.execute(&QomList { path: container })?;
        let roots = children.into_iter().filter(|child| child.kind == "child<pcie-root-port>");
        ports.extend(roots.map(|port| (!port.name.starts_with(PREFERRED), container, port.name)));
    }
    ports.sort();
    for (_, container, name) in ports.into_iter().take(MAX_PORTS) {
        let port = format!("{container}/{name}");
        // The property is younger than QEMU 5; before, every port took them.
        let hotplug = match client.execute(&QomGet { path: &port, property: "hotplug" }) {
            Err(VmError::Refused { .. }) => true,
            other => other? != Value::Bool(false),
        };
        if hotplug && let Some(bus) = empty_bus(client, &port)? {
            return Ok(bus);
        }
    }
    Err(VmError::NoFreePort { vm: client.vm().to_owned() })
}

/// The port's bus, if nothing is plugged into it.
fn empty_bus(client: &mut Client, port: &str) -> Result<Option<String>, VmError> {
    let children = client.execute(&QomList { path: port })?;
    let Some(bus) = children.into_iter().find(|child| child.kind == "child<PCIE>") else {
        return Ok(None);
    };
    let devices = client.execute(&QomList { path: &format!("{port}/{}", bus.name) })?;
    let taken = devices.iter().any(|device| device.name.starts_with("child["));
    // QEMU calls the bus of the first port without an id by the name of the root bus, and
    // the bus is ambiguous then.
    Ok((!taken && bus.name != ROOT_BUS).then_some(bus.name))
}
