//! What a domain consists of: from its XML, the file of its driver, KVM and /proc.

use super::{mappings, states::States};
use crate::{VmError, observed, process::Process, resident};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};
use vnuma_libvirt::{DomainState, DomainXml};
use vnuma_model::{
    BackingMapping, GuestNode, MemoryBacking, NumaPolicy, PciAddress, RunState, Vcpu, VmDescription, VmDevice,
};

/// Describes a domain, whose name here may differ from libvirt's. `run_state`: see [`run_state`].
pub(super) fn describe(
    (name, domain_name): (&str, &str),
    xml: &DomainXml,
    run_state: RunState,
    process: &Process,
    states: &States,
) -> Result<VmDescription, VmError> {
    let threads = threads(name, domain_name, xml, process, states)?;
    let vcpus = vcpus(name, xml, threads, process)?;
    let mut guest_nodes = guest_nodes(xml);
    count_resident(name, process, &mut guest_nodes);
    Ok(VmDescription {
        name: name.to_owned(),
        pid: process.pid(),
        run_state,
        guest_nodes,
        vcpus,
        spare_slots: BTreeMap::new(),
        devices: devices(xml),
        // libvirt sizes these itself.
        memory_devices: Vec::new(),
    })
}

/// What a domain does (`virDomainState`, `virDomainPausedReason`). `arrives`: it was started to take in a VM that
/// comes from elsewhere, and has not run since.
pub(super) fn run_state(state: DomainState, arrives: bool) -> RunState {
    match (state.state, state.reason) {
        (1 | 2, _) => RunState::Running,
        (3, 2 | 11) if arrives => RunState::Arriving,
        (3, 2) => RunState::Leaving,
        (3, 5) => RunState::IoError,
        (3, 10) => RunState::Panicked,
        (3, _) => RunState::Paused,
        (6, _) => RunState::Panicked,
        (7, _) => RunState::Suspended,
        _ => RunState::ShutDown,
    }
}

/// Threads of vCPUs, by index.
pub(super) fn threads(
    name: &str,
    domain_name: &str,
    xml: &DomainXml,
    process: &Process,
    states: &States,
) -> Result<BTreeMap<u32, i32>, VmError> {
    let names = states.thread_names(process);
    let found = states.of(process, &names, (domain_name, &xml.uuid));
    let found = found.map_err(|error| VmError::Libvirt { vm: name.to_owned(), reason: error.to_string() })?;
    let Some(status) = found else {
        // The domain was started again.
        return Err(VmError::Disconnected { vm: name.to_owned() });
    };
    if status.vcpus.is_empty() {
        // libvirt may not have written them yet.
        return Ok(observed::by_name(process.pid()).unwrap_or_default());
    }
    let ours = |(index, tid): (u32, i32)| match names.ours(tid.into()) {
        Some(ours) => Ok((index, ours)),
        None if !process.alive() => Err(VmError::Disconnected { vm: name.to_owned() }),
        None => {
            let (vm, pid) = (name.to_owned(), process.pid());
            Err(VmError::ForeignThread { vm, pid, vcpu: index, tid: tid.into() })
        }
    };
    status.vcpus.into_iter().map(ours).collect()
}

fn vcpus(
    name: &str,
    xml: &DomainXml,
    threads: BTreeMap<u32, i32>,
    process: &Process,
) -> Result<Vec<Vcpu>, VmError> {
    let by_kvm = observed::by_kvm(Path::new(observed::KVM), process.pid()).unwrap_or_default();
    let by_kvm: BTreeMap<i32, u32> = by_kvm.into_iter().map(|(apic_id, tid)| (tid, apic_id)).collect();
    let shown = threads.values().all(|tid| by_kvm.contains_key(tid));
    let (mut apic_ids, mut tids, mut vcpus) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for (index, tid) in threads {
        if !process.has_thread(tid) {
            let vm = name.to_owned();
            if !process.alive() {
                return Err(VmError::Disconnected { vm });
            }
            return Err(VmError::ForeignThread { vm, pid: process.pid(), vcpu: index, tid: tid.into() });
        }
        let computed = || xml.topology.apic_id(index);
        let apic_id = by_kvm.get(&tid).filter(|_| shown).copied().unwrap_or_else(computed);
        let twice = |what: &str| {
            let reason = format!("{what} of vCPU {index} is that of another vCPU, too");
            VmError::Libvirt { vm: name.to_owned(), reason }
        };
        if !tids.insert(tid) {
            return Err(twice(&format!("thread {tid}")));
        }
        if !apic_ids.insert(apic_id) {
            return Err(twice(&format!("APIC id {apic_id}")));
        }
        vcpus.push(Vcpu { index, apic_id, boot_node: xml.cell_of(index), tid });
    }
    vcpus.sort_by_key(|vcpu| vcpu.apic_id);
    Ok(vcpus)
}

fn guest_nodes(xml: &DomainXml) -> Vec<GuestNode> {
    let node = |cell: &vnuma_libvirt::Cell| {
        let plugged = xml.plugged.get(&cell.id).copied().unwrap_or(0);
        let (policy, host_nodes) = match xml.binding(cell.id) {
            Some(binding) => (binding.policy.clone(), binding.nodes.clone()),
            None => (NumaPolicy::Default, Vec::new()),
        };
        let memory = MemoryBacking {
            id: mappings::backend_of(cell.id),
            size_bytes: cell.memory_bytes,
            policy,
            host_nodes,
            resident_kib: Vec::new(),
            mapping: None,
        };
        let memory_bytes = cell.memory_bytes.saturating_add(plugged);
        GuestNode { id: cell.id, memory_bytes, memory: (cell.memory_bytes > 0).then_some(memory) }
    };
    xml.cells.iter().map(node).collect()
}

/// Counts the pages of all guest nodes. Not knowing them is no error.
fn count_resident(name: &str, process: &Process, nodes: &mut [GuestNode]) {
    let sizes = nodes.iter().filter_map(|node| Some((node.id, node.memory.as_ref()?.size_bytes)));
    let sizes: Vec<_> = sizes.collect();
    if sizes.is_empty() {
        return;
    }
    let (maps, numa_maps) = match resident::read(process.pid()) {
        Ok(texts) if process.alive() => texts,
        Ok(_) => return,
        Err(error) => return tracing::debug!(vm = name, %error, "resident pages unknown"),
    };
    let found = mappings::find(&sizes, &maps);
    for node in nodes {
        let Some((memory, start)) = node.memory.as_mut().zip(found.get(&node.id)) else { continue };
        if let Some(pages) = resident::parse_numa_maps(&numa_maps, *start) {
            memory.mapping = Some(BackingMapping { start: *start, page_kib: pages.page_kib.max(4) });
            memory.resident_kib = pages.pages;
        }
    }
}

fn devices(xml: &DomainXml) -> Vec<VmDevice> {
    let device = |device: &vnuma_libvirt::HostPci| {
        let at = |(slot, function): (u8, u8)| PciAddress { segment: 0, bus: 0, devfn: slot << 3 | function };
        VmDevice { host: device.host.clone(), guest: device.on_root_bus.map(at) }
    };
    xml.host_devices.iter().map(device).collect()
}
