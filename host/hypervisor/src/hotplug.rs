//! vCPUs plugged and unplugged while the VM runs. Together they replug a vCPU: how a guest without the driver learns
//! that it runs on another node.
//!
//! ```text
//!            device_add            guest: _OST                 device_del            guest: _EJ0
//!  old only ────────────▶ both, new ──────────▶ both, new known ───────────▶ both, old ──────────▶ new only
//!     ▲      plug_vcpu    unknown   await_guest                unplug_vcpu   asked back
//!     └──────────────────────┴────────────── roll_back ──────────────────────────┘ refused
//! ```
//!
//! The new vCPU comes before the old one goes, so a guest is never short of one, and until the guest has let
//! go everything can be taken back. A guest that neither lets go nor refuses has both:
//! what it was asked for cannot be recalled, so nothing is taken back then.

use crate::{
    Plugged, VmConnection, VmError,
    check::value,
    client::{Client, Limits},
    commands::{AcpiStatus, CpuInfo, DeviceAddCpu, DeviceDel, QueryAcpiOspmStatus},
    process::Process,
    vcpus::{CPUS, MAX_VCPUS, apic_id, check_thread, cpus, spare_slot},
};
use std::{
    thread,
    time::{Duration, Instant},
};

/// For the guest to take a vCPU, or to let go of one.
const GUEST_LIMIT: Duration = Duration::from_secs(10);
/// Limit for all commands of a task that needs the guest.
pub(crate) fn limit(limits: Limits) -> Duration {
    GUEST_LIMIT + limits.task()
}

/// Between two checks whether it has.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// Where devices with an id are.
const PERIPHERAL: &str = "/machine/peripheral";
/// `_OST` status: done; being done (ACPI 6.5, tables 6.65 and 6.67).
const STATUS_GOOD: [i64; 2] = [0, 0x84];
/// `_OST` source: an eject that the host asked for; one that the guest's user asked for.
const SOURCE_EJECT: [i64; 2] = [3, 0x103];

/// A vCPU that the guest may not have taken yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    apic_id: u32,
    index: i64,
    /// What the guest had reported of the slot before.
    before: Option<(i64, i64)>,
}

impl Arrival {
    /// Is it the one with this APIC id?
    pub(crate) fn is(&self, apic_id: u32) -> bool {
        self.apic_id == apic_id
    }
}

/// See [`VmConnection::removable_vcpu`].
pub(crate) fn removable(client: &mut Client, process: &Process, vcpu: u32) -> Result<Plugged, VmError> {
    let cpu = find(client, vcpu)?;
    if cpu.cpu_index == 0 {
        return Err(VmError::BootVcpu { vm: vm(client) });
    }
    Ok(Plugged { apic_id: vcpu, tid: check_thread(client, process, &process.thread_names(), &cpu)? })
}

/// See [`VmConnection::plug_vcpu`]. Also what [`await_guest`] needs.
pub(crate) fn plug(client: &mut Client, process: &Process, node: u32) -> Result<(Plugged, Arrival), VmError> {
    let slot = spare_slot(client, node)?;
    let reports = acpi_status(client)?;
    let id = slot.id();
    client.execute(&DeviceAddCpu { id: &id, slot: &slot })?;
    let path = format!("{PERIPHERAL}/{id}");
    arrival(client, process, &path, &reports).map_err(|cause| {
        let undone = remove(client, &path);
        VmError::with_undo(cause, undone)
    })
}

/// What was plugged.
fn arrival(
    client: &mut Client,
    process: &Process,
    path: &str,
    reports: &[AcpiStatus],
) -> Result<(Plugged, Arrival), VmError> {
    let Some(cpu) = cpus(client)?.into_iter().find(|cpu| cpu.qom_path == path) else {
        return Err(value(client, CPUS, "the answer", path, "QEMU does not list what it plugged"));
    };
    let apic_id = apic_id(client, path)?;
    let tid = check_thread(client, process, &process.thread_names(), &cpu)?;
    let before = status_of(reports, cpu.cpu_index);
    Ok((Plugged { apic_id, tid }, Arrival { apic_id, index: cpu.cpu_index, before }))
}

/// See [`VmConnection::await_guest`].
pub(crate) fn await_guest(client: &mut Client, arrivals: &[Arrival], vcpu: u32) -> Result<(), VmError> {
    let Some(arrival) = arrivals.iter().find(|arrival| arrival.is(vcpu)) else {
        return Err(VmError::NoVcpu { vm: vm(client), vcpu });
    };
    let until = Instant::now() + GUEST_LIMIT;
    while status_of(&acpi_status(client)?, arrival.index) == arrival.before {
        if Instant::now() > until {
            return Err(VmError::PlugIgnored { vm: vm(client), limit_ms: limit_ms() });
        }
        thread::sleep(LOOK_PAUSE);
    }
    Ok(())
}

/// See [`VmConnection::unplug_vcpu`].
pub(crate) fn unplug(client: &mut Client, vcpu: u32) -> Result<(), VmError> {
    let cpu = find(client, vcpu)?;
    if cpu.cpu_index == 0 {
        return Err(VmError::BootVcpu { vm: vm(client) });
    }
    release(client, vcpu, &cpu)
}

/// Takes a new vCPU away again because of `cause`; what is to be reported then. Where the guest was asked to let go of
/// the old one and has not done so, it may do so yet: the new one stays.
pub fn roll_back(connection: &mut dyn VmConnection, new: Plugged, cause: VmError) -> VmError {
    if matches!(cause, VmError::UnplugPending { .. }) {
        return cause;
    }
    let undone = match connection.unplug_vcpu(new.apic_id) {
        // It is gone, which is as good.
        Err(VmError::NoVcpu { .. }) => Ok(()),
        other => other,
    };
    VmError::with_undo(cause, undone)
}

fn vm(client: &Client) -> String {
    client.vm().to_owned()
}

fn find(client: &mut Client, wanted: u32) -> Result<CpuInfo, VmError> {
    for cpu in cpus(client)? {
        if apic_id(client, &cpu.qom_path)? == wanted {
            return Ok(cpu);
        }
    }
    Err(VmError::NoVcpu { vm: vm(client), vcpu: wanted })
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

/// Asks the guest to let go of a vCPU, and waits for it.
fn release(client: &mut Client, vcpu: u32, cpu: &CpuInfo) -> Result<(), VmError> {
    let before = status_of(&acpi_status(client)?, cpu.cpu_index);
    client.execute(&DeviceDel { id: &cpu.qom_path })?;
    let until = Instant::now() + GUEST_LIMIT;
    let mut last = before;
    loop {
        if !cpus(client)?.iter().any(|other| other.qom_path == cpu.qom_path) {
            return Ok(());
        }
        let now = status_of(&acpi_status(client)?, cpu.cpu_index);
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

/// Takes a vCPU away that was plugged here; that it is not there is as good.
fn remove(client: &mut Client, path: &str) -> Result<(), VmError> {
    let Some(cpu) = cpus(client)?.into_iter().find(|cpu| cpu.qom_path == path) else { return Ok(()) };
    let vcpu = apic_id(client, path).unwrap_or(u32::MAX);
    release(client, vcpu, &cpu)
}

fn limit_ms() -> u64 {
    GUEST_LIMIT.as_secs() * 1000
}
