//! What libvirt does to a domain as a whole: it is defined and started, suspended, reset, its memory goes into a snapshot, and it is saved and
//! started again from there. Its guest is told the truth whenever it runs.

use crate::guest::{equip, wait_until_listed};
use crate::libvirt::{CID, FILE, NAME, detach, expect, has_channel, move_to, place};
use crate::virsh::virsh;
use anyhow::{Context, Result, ensure};
use std::fs;
use vnuma_scenario::{HANG_LIMIT, Vm, vnumactl, wait_for};

const MEMORY: &str = "/root/web.memory";

/// The domain that is given is the one that has been saved and started again in the end.
pub fn run(vm: Vm) -> Result<Vm> {
    equip(&vm)?;
    define()?;
    place(&vm, 0, 0)?;
    place(&vm, 1, 1)?;
    vnumactl(&["attach", NAME])?;
    expect(&vm, [0, 1])?;
    suspended(&vm)?;
    rebooted(&vm)?;
    refused(&vm)?;
    detach()?;
    ensure!(!has_channel()?, "virsh dumpxml shows a device that was detached");
    virsh(&["snapshot-create-as", NAME, "one", "--memspec", &format!("file={MEMORY},snapshot=external")])?;
    ensure!(fs::metadata(MEMORY).context(MEMORY)?.len() > 0, "{MEMORY} is empty");
    vm.exec(&["true"]).context("the guest after a snapshot")?;
    virsh(&["snapshot-delete", NAME, "one", "--metadata"])?;
    println!("a snapshot is refused while attached, and taken when detached");
    saved(vm)
}

/// The domain has been created, and would be forgotten at its end. A definition is another one's without its UUID.
fn define() -> Result<()> {
    let uuid = virsh(&["domuuid", NAME])?;
    let text = fs::read_to_string(FILE).context(FILE)?;
    fs::write(FILE, text.replace("<name>", &format!("<uuid>{}</uuid><name>", uuid.trim()))).context(FILE)?;
    virsh(&["define", FILE]).map(drop)
}

/// A vCPU of a guest that stands still is moved, by vnumad and by libvirt. The guest knows as soon as it runs.
fn suspended(vm: &Vm) -> Result<()> {
    virsh(&["suspend", NAME])?;
    move_to("1", "0")?;
    virsh(&["resume", NAME])?;
    expect(vm, [0, 0])?;
    virsh(&["suspend", NAME])?;
    virsh(&["vcpupin", NAME, "0", "2-3", "--live"])?;
    virsh(&["resume", NAME])?;
    expect(vm, [1, 0])?;
    virsh(&["vcpupin", NAME, "0", "1-3", "--live"])?;
    move_to("0", "0")?;
    move_to("1", "1")?;
    expect(vm, [0, 1])?;
    println!("what happens while a guest is suspended is told when it runs again");
    Ok(())
}

/// The device stays, and a vCPU moves while the guest boots.
fn rebooted(vm: &Vm) -> Result<()> {
    virsh(&["reset", NAME])?;
    move_to("1", "0")?;
    wait_for("the guest to have booted", HANG_LIMIT, || Ok(vm.exec(&["true"]).is_ok()))?;
    ensure!(has_channel()?, "virsh dumpxml does not show the device after a reboot");
    equip(vm)?;
    expect(vm, [0, 0])?;
    move_to("1", "1")?;
    expect(vm, [0, 1])?;
    println!("a guest that was reset with its channel is told where it is");
    Ok(())
}

/// QEMU saves no memory that it shares with others. The domain runs on, attached.
fn refused(vm: &Vm) -> Result<()> {
    let memory = format!("file={MEMORY},snapshot=external");
    for command in [&["managedsave", NAME][..], &["snapshot-create-as", NAME, "one", "--memspec", &memory]] {
        let error = virsh(command).err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(error.contains("ivshmem"), "{command:?} of an attached domain: {error:?}");
    }
    ensure!(has_channel()?, "a save that was refused has taken the device");
    move_to("0", "1")?;
    expect(vm, [1, 1])?;
    move_to("0", "0")?;
    expect(vm, [0, 1])
}

/// Pins of vnumad's are of this run only, and are not saved.
fn saved(vm: Vm) -> Result<Vm> {
    virsh(&["managedsave", NAME])?;
    let inactive = virsh(&["dumpxml", NAME, "--inactive"])?;
    ensure!(
        !inactive.contains("urn:vnuma") && !inactive.contains("<vcpupin"),
        "a saved domain has what was of its run: {inactive}"
    );
    drop(vm);
    Vm::prepare(NAME, CID)?;
    virsh(&["start", NAME])?;
    let path = format!("/run/libvirt/qemu/{NAME}.pid");
    let pid = fs::read_to_string(&path).with_context(|| path.clone())?;
    let vm = Vm::started(NAME, pid.trim().parse().context(path)?)?;
    wait_until_listed(NAME)?;
    place(&vm, 0, 1)?;
    place(&vm, 1, 1)?;
    vnumactl(&["attach", NAME])?;
    expect(&vm, [1, 1])?;
    move_to("0", "0")?;
    expect(&vm, [0, 1])?;
    virsh(&["undefine", NAME])?;
    println!("a domain that was saved and started again is attached, and its guest is told");
    Ok(vm)
}
