//! virtio-mem devices: memory of guest nodes that is plugged and unplugged while the VM runs.
//!
//! vnumad sets how much a guest is to have (`requested-size`), and QEMU reports how much it has (`size`). The guest's driver does the
//! rest; nothing here waits for it.

use crate::{
    VmError,
    check::{check_length, value},
    client::Client,
    commands::{Memdev, QomSet, QueryMemoryDevices, VirtioMem},
    name::check_name,
};
use vnuma_model::{MemoryBacking, MemoryDevice, NumaPolicy};
use vnuma_process::text::sanitize_short;

/// Most devices read, of whatever type.
const MAX_DEVICES: usize = 1024;
/// QEMU's type of these devices.
const TYPE: &str = "virtio-mem";
/// Where QEMU has devices with an id.
const PERIPHERAL: &str = "/machine/peripheral";
const COMMAND: &str = "query-memory-devices";

/// Those of a VM, by their backends (`query-memdev`). A QEMU that does not know the command has none.
pub(crate) fn devices(client: &mut Client, memdevs: &[Memdev]) -> Result<Vec<MemoryDevice>, VmError> {
    let found = match client.execute(&QueryMemoryDevices {}) {
        Err(VmError::Refused { .. }) => return Ok(Vec::new()),
        found => found?,
    };
    if found.len() > MAX_DEVICES {
        return Err(value(
            client,
            COMMAND,
            "the answer",
            found.len(),
            format!("more than {MAX_DEVICES} memory devices"),
        ));
    }
    let mut devices: Vec<MemoryDevice> = Vec::new();
    for one in found.into_iter().filter(|one| one.kind == TYPE) {
        let data =
            VirtioMem::of(&one.data).map_err(|reason| value(client, COMMAND, "data", &one.data, reason))?;
        let device = device(client, data, memdevs)?;
        if device.id.is_some() && devices.iter().any(|other| other.id == device.id) {
            return Err(value(
                client,
                COMMAND,
                "id",
                device.id.unwrap_or_default(),
                "another device has it, too",
            ));
        }
        devices.push(device);
    }
    Ok(devices)
}

fn device(client: &Client, data: VirtioMem, memdevs: &[Memdev]) -> Result<MemoryDevice, VmError> {
    let wrong =
        |field, shown: &dyn std::fmt::Display, reason: &str| value(client, COMMAND, field, shown, reason);
    check_length(client, COMMAND, "memdev", &data.memdev)?;
    let guest_node = u32::try_from(data.node).map_err(|_| wrong("node", &data.node, "not a node number"))?;
    if data.block_size == 0 || !data.block_size.is_power_of_two() {
        return Err(wrong("block-size", &data.block_size, "not a power of two"));
    }
    for (field, size) in [("size", data.size), ("requested-size", data.requested_size)] {
        if size > data.max_size {
            return Err(wrong(field, &size, &format!("above max-size, {}", data.max_size)));
        }
    }
    let backend = data.memdev.rsplit('/').next().unwrap_or_default();
    let memdev = memdevs.iter().find(|memdev| memdev.id.as_deref() == Some(backend));
    let host_nodes = memdev.map_or(&[][..], |memdev| &memdev.host_nodes).iter();
    let memory = MemoryBacking {
        id: backend.to_owned(),
        size_bytes: data.max_size,
        policy: memdev.map_or(NumaPolicy::Default, |memdev| sanitize_short(&memdev.policy).as_str().into()),
        host_nodes: host_nodes.filter_map(|&node| u32::try_from(node).ok()).collect(),
        resident_kib: Vec::new(),
        mapping: None,
    };
    // It becomes part of a path.
    let id = data.id.filter(|id| check_name(id).is_ok());
    Ok(MemoryDevice {
        id,
        guest_node,
        requested_bytes: data.requested_size,
        plugged_bytes: data.size,
        block_bytes: data.block_size,
        memory,
    })
}

/// See [`VmConnection::request_memory`](crate::VmConnection::request_memory). QEMU refuses what is no multiple of the block size.
pub(crate) fn request(client: &mut Client, id: &str, bytes: u64) -> Result<(), VmError> {
    let path = format!("{PERIPHERAL}/{id}");
    client.execute(&QomSet { path: &path, property: "requested-size", value: bytes }).map(drop)
}
