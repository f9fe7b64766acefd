//! The vCPUs of a VM, plugged and spare, from QEMU.

use crate::{
    VmError,
    check::{check_length, value},
    client::Client,
    commands::{CpuInfo, CpuSlot, QomGet, QueryCpusFast, QueryHotpluggableCpus},
    process::{Process, ThreadNames},
};
use std::collections::{BTreeMap, BTreeSet};
use vnuma_model::Vcpu;

/// Most vCPUs (q35 of QEMU 10 has up to 4096).
pub(crate) const MAX_VCPUS: usize = 4096;

/// The command that knows the vCPUs.
pub(crate) const CPUS: &str = "query-cpus-fast";

/// The command that knows all slots.
const SLOTS: &str = "query-hotpluggable-cpus";

/// All vCPUs that are plugged.
pub(crate) fn cpus(client: &mut Client) -> Result<Vec<CpuInfo>, VmError> {
    let cpus = client.execute(&QueryCpusFast {})?;
    if cpus.len() > MAX_VCPUS {
        let reason = format!("more than {MAX_VCPUS} vCPUs");
        return Err(value(client, CPUS, "the answer", cpus.len(), reason));
    }
    Ok(cpus)
}

/// All vCPUs with their APIC ids and their threads, which are the process's own; in rising order of APIC id.
pub(crate) fn vcpus(client: &mut Client, process: &Process) -> Result<Vec<Vcpu>, VmError> {
    let (mut apic_ids, mut tids, mut vcpus) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    let cpus = cpus(client)?;
    // After QEMU has listed them: those that it names exist by then.
    let names = process.thread_names();
    for cpu in cpus {
        let number = |field, number: i64| {
            u32::try_from(number).map_err(|_| value(client, CPUS, field, number, "not a number of this kind"))
        };
        let index = number("cpu-index", cpu.cpu_index)?;
        let boot_node = cpu.props.node_id.map(|node| number("props.node-id", node)).transpose()?;
        let tid = check_thread(client, process, &names, &cpu)?;
        let apic_id = apic_id(client, &cpu.qom_path)?;
        if !tids.insert(tid) {
            return Err(value(client, CPUS, "thread-id", tid, "it runs two vCPUs"));
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
    check_length(client, CPUS, "qom-path", path)?;
    let id = client.execute(&QomGet { path, property: "apic-id" })?;
    let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
    number.ok_or_else(|| value(client, "qom-get", "apic-id", &id, "not an APIC id"))
}

/// The thread that QEMU names for a vCPU, if it is one of the process's own.
pub(crate) fn check_thread(
    client: &Client,
    process: &Process,
    names: &ThreadNames,
    cpu: &CpuInfo,
) -> Result<i32, VmError> {
    if let Some(tid) = names.ours(cpu.thread_id).filter(|&tid| process.has_thread(tid)) {
        return Ok(tid);
    }
    let vm = client.vm().to_owned();
    if !process.alive() {
        return Err(VmError::Disconnected { vm });
    }
    let vcpu = u32::try_from(cpu.cpu_index).unwrap_or(u32::MAX);
    Err(VmError::ForeignThread { vm, pid: process.pid(), vcpu, tid: cpu.thread_id })
}

/// How many spare slots each guest node has. A machine that knows no slots has none.
pub(crate) fn spare_slots(client: &mut Client) -> Result<BTreeMap<u32, u32>, VmError> {
    let mut spare = BTreeMap::new();
    match slots(client) {
        Ok(slots) => {
            for node in slots.iter().filter_map(CpuSlot::spare_node) {
                *spare.entry(node).or_default() += 1;
            }
            Ok(spare)
        }
        Err(VmError::Refused { .. }) => Ok(spare),
        Err(error) => Err(error),
    }
}

/// The first spare slot of a guest node.
pub(crate) fn spare_slot(client: &mut Client, node: u32) -> Result<CpuSlot, VmError> {
    let slots = slots(client)?;
    let spare = slots.into_iter().filter(|slot| slot.spare_node() == Some(node));
    let Some(slot) = spare.min_by_key(CpuSlot::id) else {
        return Err(VmError::NoSpareSlot { vm: client.vm().to_owned(), node });
    };
    check_length(client, SLOTS, "type", &slot.driver)?;
    Ok(slot)
}

fn slots(client: &mut Client) -> Result<Vec<CpuSlot>, VmError> {
    let slots = client.execute(&QueryHotpluggableCpus {})?;
    if slots.len() > MAX_VCPUS {
        let reason = format!("more than {MAX_VCPUS} slots");
        return Err(value(client, SLOTS, "the answer", slots.len(), reason));
    }
    Ok(slots)
}
