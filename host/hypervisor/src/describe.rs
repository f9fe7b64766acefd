//! What a VM consists of, from QEMU and /proc.

use crate::{
    VmError,
    check::{check_length, value},
    client::Client,
    commands::{HumanMonitorCommand, Memdev, QomGet, QomList, QueryMemdev, QueryName, QueryStatus},
    devices, memory_devices,
    name::check_name,
    numa::{self, NumaNode, PlacedBackend},
    process::Process,
    resident, vcpus,
};
use std::collections::BTreeMap;
use vnuma_model::{BackingMapping, GuestNode, MemoryBacking, RunState, Vcpu, VmDescription};
use vnuma_process::text::sanitize_short;

const MEMDEV: &str = "query-memdev";
/// Most memory backends read.
const MAX_BACKENDS: usize = 1024;
/// Longest name of a run state.
const MAX_STATE: usize = 32;

/// Describes the VM. `fallback` names it if QEMU was given no name, or none that can be used.
pub(crate) fn describe(
    client: &mut Client,
    process: &Process,
    fallback: &str,
) -> Result<VmDescription, VmError> {
    let name = name(client, fallback)?;
    let run_state = run_state(client)?;
    let vcpus = vcpus::vcpus(client, process)?;
    let spare_slots = vcpus::spare_slots(client)?;
    let nodes = numa_nodes(client, &vcpus)?;
    let (mut backends, mut memory_devices) = (BTreeMap::new(), Vec::new());
    if !nodes.is_empty() {
        let memdevs = memdevs(client)?;
        backends = numa::match_backends(&nodes, placed_backends(client, &memdevs)?);
        memory_devices = memory_devices::devices(client, &memdevs)?;
    }
    let all = backends.values_mut().chain(memory_devices.iter_mut().map(|device| &mut device.memory));
    count_resident(client, process, all.collect())?;
    let devices = devices::devices(client)?;
    let guest_nodes = nodes
        .into_iter()
        .map(|(id, node)| {
            let memory = backends.remove(&id);
            // `info numa` has MiB only; the backend has bytes.
            let plugged = node.plugged_mib << 20;
            let memory_bytes = memory
                .as_ref()
                .map_or(node.size_mib << 20, |memory| memory.size_bytes.saturating_add(plugged));
            GuestNode { id, memory_bytes, memory }
        })
        .collect();
    Ok(VmDescription {
        name,
        pid: process.pid(),
        run_state,
        guest_nodes,
        vcpus,
        spare_slots,
        devices,
        memory_devices,
    })
}

fn name(client: &mut Client, fallback: &str) -> Result<String, VmError> {
    let Some(name) = client.execute(&QueryName {})?.name else {
        return Ok(fallback.to_owned());
    };
    match check_name(&name) {
        Ok(()) => Ok(name),
        Err(error) => {
            client.complain(format!("using the name of the socket: {error}"));
            Ok(fallback.to_owned())
        }
    }
}

/// QEMU's words for the states of a migration. The model has other words for these.
const MIGRATING: [(&str, RunState); 3] = [
    ("inmigrate", RunState::Arriving),
    ("finish-migrate", RunState::Leaving),
    ("postmigrate", RunState::Left),
];

/// QEMU's word for a state: the API shows this one, whatever the hypervisor.
pub fn state_word(state: &RunState) -> &str {
    MIGRATING.iter().find(|(_, known)| known == state).map_or(state.as_ref(), |(word, _)| word)
}

fn state_of(word: &str) -> RunState {
    MIGRATING.iter().find(|(known, _)| *known == word).map_or_else(|| word.into(), |(_, state)| state.clone())
}

fn run_state(client: &mut Client) -> Result<RunState, VmError> {
    let state = client.execute(&QueryStatus {})?.status;
    let word = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
    if state.is_empty() || state.len() > MAX_STATE || !state.bytes().all(word) {
        return Err(value(client, "query-status", "status", &state, "not the name of a state"));
    }
    Ok(state_of(&state))
}

/// Guest nodes with their sizes. A QEMU without the human monitor leaves those that vCPUs are on.
fn numa_nodes(client: &mut Client, vcpus: &[Vcpu]) -> Result<BTreeMap<u32, NumaNode>, VmError> {
    match human(client, "info numa") {
        Ok(text) => numa::parse_info_numa(&text)
            .map_err(|reason| value(client, "human-monitor-command", "`info numa`", &text, reason)),
        Err(VmError::Refused { reason, .. }) => {
            client.complain(format!("memory of guest nodes unknown: QEMU refuses `info numa`: {reason}"));
            Ok(vcpus.iter().filter_map(|vcpu| Some((vcpu.boot_node?, NumaNode::default()))).collect())
        }
        Err(error) => Err(error),
    }
}

/// All memory backends.
fn memdevs(client: &mut Client) -> Result<Vec<Memdev>, VmError> {
    let memdevs = client.execute(&QueryMemdev {})?;
    if memdevs.len() > MAX_BACKENDS {
        let reason = format!("more than {MAX_BACKENDS} memory backends");
        return Err(value(client, MEMDEV, "the answer", memdevs.len(), reason));
    }
    Ok(memdevs)
}

/// Backends that are part of the RAM that the machine started with.
fn placed_backends(client: &mut Client, memdevs: &[Memdev]) -> Result<Vec<PlacedBackend>, VmError> {
    let mut placed = Vec::new();
    for memdev in memdevs {
        let Some(id) = memdev.id.clone() else { continue };
        check_length(client, MEMDEV, "id", &id)?;
        if let Some(offset) = ram_offset(client, &id)? {
            placed.push(PlacedBackend { backing: backing(client, id, memdev)?, offset });
        }
    }
    Ok(placed)
}

fn backing(client: &Client, id: String, memdev: &Memdev) -> Result<MemoryBacking, VmError> {
    let host_nodes = memdev.host_nodes.iter().map(|&node| {
        u32::try_from(node).map_err(|_| value(client, MEMDEV, "host-nodes", node, "not a node number"))
    });
    Ok(MemoryBacking {
        id,
        size_bytes: memdev.size,
        policy: sanitize_short(&memdev.policy).as_str().into(),
        host_nodes: host_nodes.collect::<Result<_, _>>()?,
        resident_kib: Vec::new(),
        mapping: None,
    })
}

/// Offset of a backend in the machine's RAM. `None` if it is elsewhere: plugged later, part of
/// a device, or the whole RAM of a UMA VM.
fn ram_offset(client: &mut Client, id: &str) -> Result<Option<u64>, VmError> {
    let object = format!("/objects/{id}");
    let children = client.execute(&QomList { path: &object })?;
    let Some(region) = children.iter().find(|child| child.kind == "child<memory-region>") else {
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

/// Counts the pages of all backends: also of memory that is bound, pages may be elsewhere. Not knowing them is no error.
fn count_resident(
    client: &mut Client,
    process: &Process,
    backends: Vec<&mut MemoryBacking>,
) -> Result<(), VmError> {
    if backends.is_empty() {
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
            tracing::debug!(vm = client.vm(), %error, "resident pages unknown");
            return Ok(());
        }
    };
    let mappings = resident::parse_maps(&maps);
    for backing in backends {
        let address = resident::address_of(&addresses, &backing.id);
        let Some(start) = resident::find_mapping(&mappings, address, backing.size_bytes) else { continue };
        if let Some(found) = resident::parse_numa_maps(&numa_maps, start) {
            backing.mapping = Some(BackingMapping { start, page_kib: found.page_kib.max(4) });
            backing.resident_kib = found.pages;
        }
    }
    Ok(())
}

fn human(client: &mut Client, line: &str) -> Result<String, VmError> {
    client.execute(&HumanMonitorCommand { command_line: line })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_have_words_of_the_models_own_and_are_shown_in_those_of_qemu() {
        assert_eq!(
            ["inmigrate", "finish-migrate", "postmigrate", "paused"].map(state_of),
            [RunState::Arriving, RunState::Leaving, RunState::Left, RunState::Paused]
        );
        for word in ["inmigrate", "finish-migrate", "postmigrate", "paused", "colo", "io-error"] {
            assert_eq!(state_word(&state_of(word)), word);
        }
    }
}
