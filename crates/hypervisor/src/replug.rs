//! A vCPU unplugged here and plugged there: how a guest without the driver learns of another node.
//!
//! ```text
//!            device_add            guest: _OST                 device_del            guest: _EJ0
//!  old only ────────────▶ both, new ──────────▶ both, new known ───────────▶ both, old ──────────▶ new only
//!     ▲                   unknown                                            asked back
//!     └──────────────────────┴──── device_del of the new one ────────────────────┘ refused
//! ```
//!
//! The new vCPU comes before the old one goes, so a guest is never short of one, and until the guest has let
//! go everything can be taken back. A guest that neither lets go nor refuses has both:
//! what it was asked for cannot be recalled, so nothing is taken back then.

use crate::{
    Plugged, VmError,
    client::Client,
    commands::{AcpiStatus, CpuInfo, CpuSlot, DeviceAddCpu, QueryAcpiOspmStatus, QueryCpusFast},
    commands::{QomGet, QueryHotpluggableCpus},
    describe::{MAX_VCPUS, apic_id, check_length, value},
    process::Process,
};
use qapi::qmp;
use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

/// For the guest to take the new vCPU, and for it to let go of one.
const GUEST_LIMIT: Duration = Duration::from_secs(10);
/// For all of it: the guest is waited for three times at most.
pub(crate) const REPLUG_LIMIT: Duration = GUEST_LIMIT.saturating_mul(4);
/// Between two looks at whether it has.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// The command that knows all slots.
const SLOTS: &str = "query-hotpluggable-cpus";
/// Where devices with an id are.
const PERIPHERAL: &str = "/machine/peripheral";
/// `_OST` status: done; being done (ACPI 6.5, tables 6.65 and 6.67).
const STATUS_GOOD: [i64; 2] = [0, 0x84];
/// `_OST` source: an eject that the host asked for; one that the guest's user asked for.
const SOURCE_EJECT: [i64; 2] = [3, 0x103];

/// Confines the thread of a new vCPU as that of the old one is.
pub type Adopt<'a> = &'a mut dyn FnMut(i32, i32) -> Result<(), String>;

/// See [`VmConnection::replug_vcpu`](super::VmConnection::replug_vcpu).
pub(crate) fn replug(
    client: &mut Client,
    process: &Process,
    old: u32,
    node: u32,
    adopt: Adopt<'_>,
) -> Result<Plugged, VmError> {
    let before = cpus(client)?;
    let old_cpu = find(client, before, old)?;
    if old_cpu.cpu_index == 0 {
        return Err(VmError::BootVcpu { vm: client.vm().to_owned() });
    }
    let slot = spare_slot(client, node)?;
    let ready = acpi_status(client)?;
    let id = slot.id();
    client.execute(&DeviceAddCpu { id: &id, slot: &slot })?;
    let moved = settle_in(client, process, &id, &ready)
        .and_then(|(new, tid)| {
            let old_tid = i32::try_from(old_cpu.thread_id).unwrap_or(0);
            check_thread(client, process, &old_cpu)?;
            adopt(old_tid, tid).map_err(|reason| VmError::ReplugFailed {
                vm: vm(client),
                vcpu: old,
                reason,
            })?;
            Ok(new)
        })
        .and_then(|new| unplug(client, old, &old_cpu.qom_path, old_cpu.cpu_index).map(|()| new));
    match moved {
        Ok(new) => Ok(new),
        Err(error @ VmError::UnplugPending { .. }) => Err(error),
        Err(error) => Err(take_back(client, &id, error)),
    }
}

fn vm(client: &Client) -> String {
    client.vm().to_owned()
}

fn cpus(client: &mut Client) -> Result<Vec<CpuInfo>, VmError> {
    let cpus = client.execute(&QueryCpusFast {})?;
    if cpus.len() > MAX_VCPUS {
        let reason = format!("more than {MAX_VCPUS} vCPUs");
        return Err(value(client, "query-cpus-fast", "the answer", cpus.len(), reason));
    }
    Ok(cpus)
}

fn find(client: &mut Client, cpus: Vec<CpuInfo>, wanted: u32) -> Result<CpuInfo, VmError> {
    for cpu in cpus {
        if apic_id(client, &cpu.qom_path)? == wanted {
            return Ok(cpu);
        }
    }
    Err(VmError::NoVcpu { vm: vm(client), vcpu: wanted })
}

fn check_thread(client: &Client, process: &Process, cpu: &CpuInfo) -> Result<i32, VmError> {
    let tid = i32::try_from(cpu.thread_id).unwrap_or(0);
    if process.has_thread(tid) {
        return Ok(tid);
    }
    let vcpu = u32::try_from(cpu.cpu_index).unwrap_or(u32::MAX);
    Err(VmError::ForeignThread { vm: vm(client), pid: process.pid(), vcpu, tid: cpu.thread_id })
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

fn slots(client: &mut Client) -> Result<Vec<CpuSlot>, VmError> {
    let slots = client.execute(&QueryHotpluggableCpus {})?;
    if slots.len() > MAX_VCPUS {
        let reason = format!("more than {MAX_VCPUS} slots");
        return Err(value(client, SLOTS, "the answer", slots.len(), reason));
    }
    Ok(slots)
}

fn spare_slot(client: &mut Client, node: u32) -> Result<CpuSlot, VmError> {
    let slots = slots(client)?;
    let mut spare: Vec<_> = slots.into_iter().filter(|slot| slot.spare_node() == Some(node)).collect();
    spare.sort_by_key(CpuSlot::id);
    let Some(slot) = spare.into_iter().next() else {
        return Err(VmError::NoSpareSlot { vm: vm(client), node });
    };
    check_length(client, SLOTS, "type", &slot.driver)?;
    Ok(slot)
}

/// Reports of the guest about vCPUs, by slot.
fn acpi_status(client: &mut Client) -> Result<Vec<AcpiStatus>, VmError> {
    let all = client.execute(&QueryAcpiOspmStatus {})?;
    Ok(all.into_iter().filter(|status| status.slot_type == "CPU").take(MAX_VCPUS).collect())
}

fn status_of(all: &[AcpiStatus], index: i64) -> Option<(i64, i64)> {
    let slot = index.to_string();
    all.iter().find(|status| status.slot == slot).map(|status| (status.source, status.status))
}

/// Waits until the guest has taken the new vCPU; its APIC id and its thread.
fn settle_in(
    client: &mut Client,
    process: &Process,
    id: &str,
    ready: &[AcpiStatus],
) -> Result<(Plugged, i32), VmError> {
    let path = format!("{PERIPHERAL}/{id}");
    let plugged = cpus(client)?.into_iter().find(|cpu| cpu.qom_path == path);
    let Some(cpu) = plugged else {
        return Err(value(
            client,
            "query-cpus-fast",
            "the answer",
            &path,
            "QEMU does not list what it plugged",
        ));
    };
    let new = apic_id(client, &path)?;
    let tid = check_thread(client, process, &cpu)?;
    let until = Instant::now() + GUEST_LIMIT;
    let known = status_of(ready, cpu.cpu_index);
    loop {
        let now = acpi_status(client)?;
        if status_of(&now, cpu.cpu_index) != known {
            return Ok((Plugged { apic_id: new, tid }, tid));
        }
        if Instant::now() > until {
            return Err(VmError::PlugIgnored { vm: vm(client), limit_ms: limit_ms() });
        }
        thread::sleep(LOOK_PAUSE);
    }
}

/// Asks the guest to let go of a vCPU, and waits for it.
fn unplug(client: &mut Client, vcpu: u32, path: &str, index: i64) -> Result<(), VmError> {
    let before = status_of(&acpi_status(client)?, index);
    client.execute(&qmp::device_del { id: path.to_owned() })?;
    let until = Instant::now() + GUEST_LIMIT;
    let mut last = before;
    loop {
        if !cpus(client)?.iter().any(|cpu| cpu.qom_path == path) {
            return Ok(());
        }
        let now = status_of(&acpi_status(client)?, index);
        if let Some((source, status)) = now.filter(|_| now != last)
            && SOURCE_EJECT.contains(&source)
            && !STATUS_GOOD.contains(&status)
        {
            return Err(VmError::UnplugRefused { vm: vm(client), vcpu, status });
        }
        last = now;
        if Instant::now() > until {
            return Err(VmError::UnplugPending { vm: vm(client), vcpu, limit_ms: limit_ms() });
        }
        thread::sleep(LOOK_PAUSE);
    }
}

/// Takes the new vCPU away again because of `cause`.
fn take_back(client: &mut Client, id: &str, cause: VmError) -> VmError {
    let path = format!("{PERIPHERAL}/{id}");
    let undone = cpus(client).and_then(|cpus| {
        let Some(cpu) = cpus.into_iter().find(|cpu| cpu.qom_path == path) else { return Ok(()) };
        let new = client.execute(&QomGet { path: &path, property: "apic-id" })?.as_u64();
        unplug(client, new.and_then(|id| u32::try_from(id).ok()).unwrap_or(u32::MAX), &path, cpu.cpu_index)
    });
    match undone {
        Ok(()) => cause,
        Err(error) => VmError::NotUndone { cause: Box::new(cause), error: Box::new(error) },
    }
}

fn limit_ms() -> u64 {
    GUEST_LIMIT.as_secs() * 1000
}
