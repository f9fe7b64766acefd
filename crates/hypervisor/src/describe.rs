//! What a VM consists of, as QEMU and /proc tell it.

use crate::{
    VmError,
    client::Client,
    commands::{CpuInfo, Memdev, QomGet, QueryCpusFast, QueryMemdev, QueryStatus},
    name::check_name,
    numa::{self, NumaNode, PlacedBackend},
    process::Process,
    replug, resident,
};
use qapi::qmp;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
};
use vnuma_process::text::shorten;
use vnuma_topology::{GuestNode, MemoryBacking, Vcpu, VmDescription};

/// Most vCPUs (q35 of QEMU 10 takes 4096).
pub(crate) const MAX_VCPUS: usize = 4096;
/// Most memory backends looked at.
const MAX_BACKENDS: usize = 1024;
/// Longest id or path taken from QEMU.
const MAX_ID: usize = 1024;
/// Longest word for a guest's state.
const MAX_STATE: usize = 32;

/// Describes the VM. `fallback` names it if QEMU was given no name, or none that can be used.
pub(crate) fn describe(
    client: &mut Client,
    process: &Process,
    fallback: &str,
) -> Result<VmDescription, VmError> {
    let name = name(client, fallback)?;
    let run_state = run_state(client)?;
    let cpus = client.execute(&QueryCpusFast {})?;
    let vcpus = vcpus(client, process, &cpus)?;
    let spare_slots = replug::spare_slots(client)?;
    let nodes = numa_nodes(client, &vcpus)?;
    let mut backends = if nodes.is_empty() {
        BTreeMap::new()
    } else {
        numa::match_backends(&nodes, placed_backends(client)?)
    };
    count_resident(client, process, &mut backends)?;
    let guest_nodes = nodes
        .into_iter()
        .map(|(id, node)| {
            let memory = backends.remove(&id);
            // MiB are all that `info numa` tells; the backend knows it to the byte.
            let plugged = node.plugged_mib << 20;
            let memory_bytes = memory
                .as_ref()
                .map_or(node.size_mib << 20, |memory| memory.size_bytes.saturating_add(plugged));
            GuestNode { id, memory_bytes, memory }
        })
        .collect();
    Ok(VmDescription { name, pid: process.pid(), run_state, guest_nodes, vcpus, spare_slots })
}

fn name(client: &mut Client, fallback: &str) -> Result<String, VmError> {
    let Some(name) = client.execute(&qmp::query_name {})?.name else {
        return Ok(fallback.to_owned());
    };
    match check_name(&name) {
        Ok(()) => Ok(name),
        Err(error) => {
            tracing::warn!(vm = fallback, %error, "the name of the socket is used");
            Ok(fallback.to_owned())
        }
    }
}

fn run_state(client: &mut Client) -> Result<String, VmError> {
    let state = client.execute(&QueryStatus {})?.status;
    let word = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
    if state.is_empty() || state.len() > MAX_STATE || !state.bytes().all(word) {
        return Err(value(client, "query-status", "status", &state, "not the name of a state"));
    }
    Ok(state)
}

fn vcpus(client: &mut Client, process: &Process, cpus: &[CpuInfo]) -> Result<Vec<Vcpu>, VmError> {
    const COMMAND: &str = "query-cpus-fast";
    if cpus.len() > MAX_VCPUS {
        let reason = format!("more than {MAX_VCPUS} vCPUs");
        return Err(value(client, COMMAND, "the answer", cpus.len(), reason));
    }
    let (mut apic_ids, mut tids, mut vcpus) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for cpu in cpus {
        let number = |field, number: i64| {
            u32::try_from(number)
                .map_err(|_| value(client, COMMAND, field, number, "not a number of this kind"))
        };
        let index = number("cpu-index", cpu.cpu_index)?;
        let boot_node = cpu.props.node_id.map(|node| number("props.node-id", node)).transpose()?;
        let tid = i32::try_from(cpu.thread_id).unwrap_or(0);
        if !process.has_thread(tid) {
            if !process.alive() {
                return Err(VmError::Disconnected { vm: client.vm().to_owned() });
            }
            let (vm, pid) = (client.vm().to_owned(), process.pid());
            return Err(VmError::ForeignThread { vm, pid, vcpu: index, tid: cpu.thread_id });
        }
        let apic_id = apic_id(client, &cpu.qom_path)?;
        if !tids.insert(tid) {
            return Err(value(client, COMMAND, "thread-id", tid, "it runs two vCPUs"));
        }
        if !apic_ids.insert(apic_id) {
            return Err(value(client, "qom-get", "apic-id", apic_id, "two vCPUs have it"));
        }
        vcpus.push(Vcpu { index, apic_id, boot_node, tid });
    }
    vcpus.sort_by_key(|vcpu| vcpu.apic_id);
    Ok(vcpus)
}

pub(crate) fn apic_id(client: &mut Client, path: &str) -> Result<u32, VmError> {
    check_length(client, "query-cpus-fast", "qom-path", path)?;
    let id = client.execute(&QomGet { path, property: "apic-id" })?;
    let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
    number.ok_or_else(|| value(client, "qom-get", "apic-id", &id, "not an APIC id"))
}

/// Guest nodes with their sizes. A QEMU without the human monitor leaves those that vCPUs are on.
fn numa_nodes(client: &mut Client, vcpus: &[Vcpu]) -> Result<BTreeMap<u32, NumaNode>, VmError> {
    match human(client, "info numa") {
        Ok(text) => numa::parse_info_numa(&text)
            .map_err(|reason| value(client, "human-monitor-command", "`info numa`", &text, reason)),
        Err(VmError::Refused { vm, reason, .. }) => {
            tracing::warn!(vm, reason, "memory of guest nodes is not known: QEMU refuses `info numa`");
            Ok(vcpus.iter().filter_map(|vcpu| Some((vcpu.boot_node?, NumaNode::default()))).collect())
        }
        Err(error) => Err(error),
    }
}

/// Backends that are part of the RAM that the machine started with.
fn placed_backends(client: &mut Client) -> Result<Vec<PlacedBackend>, VmError> {
    const COMMAND: &str = "query-memdev";
    let memdevs = client.execute(&QueryMemdev {})?;
    if memdevs.len() > MAX_BACKENDS {
        let reason = format!("more than {MAX_BACKENDS} memory backends");
        return Err(value(client, COMMAND, "the answer", memdevs.len(), reason));
    }
    let mut placed = Vec::new();
    for memdev in memdevs {
        let Some(id) = memdev.id.clone() else { continue };
        check_length(client, COMMAND, "id", &id)?;
        if let Some(offset) = ram_offset(client, &id)? {
            placed.push(PlacedBackend { backing: backing(client, id, &memdev)?, offset });
        }
    }
    Ok(placed)
}

fn backing(client: &Client, id: String, memdev: &Memdev) -> Result<MemoryBacking, VmError> {
    let host_nodes = memdev.host_nodes.iter().map(|&node| {
        u32::try_from(node)
            .map_err(|_| value(client, "query-memdev", "host-nodes", node, "not a node number"))
    });
    Ok(MemoryBacking {
        id,
        size_bytes: memdev.size,
        policy: shorten(&memdev.policy),
        host_nodes: host_nodes.collect::<Result<_, _>>()?,
        resident_kib: Vec::new(),
    })
}

/// Offset of a backend in the machine's RAM. `None` if it is elsewhere: plugged later, part of
/// a device, or the whole RAM of a UMA VM.
fn ram_offset(client: &mut Client, id: &str) -> Result<Option<u64>, VmError> {
    let object = format!("/objects/{id}");
    let children = client.execute(&qmp::qom_list { path: object.clone() })?;
    let Some(region) = children.iter().find(|child| child.type_ == "child<memory-region>") else {
        return Ok(None);
    };
    let path = format!("{object}/{}", region.name);
    let get = |client: &mut Client, property| client.execute(&QomGet { path: &path, property });
    let container = get(client, "container")?;
    // `pc.ram` of a PC, `mach-virt.ram` of an ARM virt machine.
    let in_ram = container
        .as_str()
        .and_then(|path| path.strip_prefix("/machine/"))
        .is_some_and(|name| name.ends_with(".ram[0]") && !name.contains('/'));
    Ok(if in_ram { get(client, "addr")?.as_u64() } else { None })
}

/// Counts the pages of backends that are not bound to one node. Not knowing them is no error.
fn count_resident(
    client: &mut Client,
    process: &Process,
    backends: &mut BTreeMap<u32, MemoryBacking>,
) -> Result<(), VmError> {
    let unbound = |backing: &MemoryBacking| backing.policy != "bind" || backing.host_nodes.len() != 1;
    if !backends.values().any(unbound) {
        return Ok(());
    }
    let addresses = match human(client, "info ramblock") {
        Ok(text) => resident::parse_ramblocks(&text),
        Err(VmError::Refused { .. }) => BTreeMap::new(),
        Err(error) => return Err(error),
    };
    let (maps, numa_maps) = match resident::read(process.pid()) {
        Ok(texts) if process.alive() => texts,
        Ok(_) => return Ok(()),
        Err(error) => {
            tracing::debug!(vm = client.vm(), %error, "resident pages are not known");
            return Ok(());
        }
    };
    let mappings = resident::parse_maps(&maps);
    for backing in backends.values_mut().filter(|backing| unbound(backing)) {
        let address = addresses.get(&backing.id).copied();
        let start = resident::find_mapping(&mappings, address, backing.size_bytes);
        backing.resident_kib =
            start.and_then(|start| resident::parse_numa_maps(&numa_maps, start)).unwrap_or_default();
    }
    Ok(())
}

fn human(client: &mut Client, line: &str) -> Result<String, VmError> {
    client.execute(&qmp::human_monitor_command { cpu_index: None, command_line: line.to_owned() })
}

pub(crate) fn check_length(client: &Client, command: &str, field: &str, text: &str) -> Result<(), VmError> {
    if text.len() <= MAX_ID {
        return Ok(());
    }
    Err(value(client, command, field, text, format!("it has more than {MAX_ID} bytes")))
}

pub(crate) fn value(
    client: &Client,
    command: &str,
    field: &str,
    value: impl Display,
    reason: impl Into<String>,
) -> VmError {
    VmError::Value {
        vm: client.vm().to_owned(),
        command: command.to_owned(),
        field: field.to_owned(),
        value: shorten(&value.to_string()),
        reason: reason.into(),
    }
}
